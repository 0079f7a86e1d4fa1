/* SPDX-License-Identifier: Apache-2.0
 *
 * The byte trie; see trie.h. A slot packs the child node (upper 24 bits) over the edge key (lower
 * 40 bits, plus one), so node numbers stay below 2^24.
 */
#include "text/trie.h"

#include <string.h>

#include "base/error.h"
#include "base/mem.h"

#define EDGE_BITS 40
#define EDGE_MASK ((UINT64_C(1) << EDGE_BITS) - 1)
#define MAX_NODES (UINT32_C(1) << 24)

static uint32_t edge_hash(uint64_t edge)
{
    return (uint32_t)((edge * UINT64_C(0x9E3779B97F4A7C15)) >> 32);
}

static uint64_t edge_of(uint32_t node, unsigned char byte)
{
    return (((uint64_t)node << 8) | byte) + 1;
}

static uint64_t *find_slot(uint64_t *slots, uint32_t mask, uint64_t edge)
{
    uint32_t i = edge_hash(edge) & mask;
    while (slots[i] != 0 && (slots[i] & EDGE_MASK) != edge) {
        i = (i + 1) & mask;
    }
    return &slots[i];
}

enum sluice_status sl_trie_init(struct sl_trie *trie, struct sluice_error *err)
{
    *trie = (struct sl_trie){.slot_mask = 255, .n_nodes = 1, .max_nodes = 128};
    trie->slots = sl_calloc(SL_MEM_TEXT, 256, sizeof(*trie->slots));
    trie->values = sl_alloc(SL_MEM_TEXT, trie->max_nodes * sizeof(*trie->values));
    if (trie->slots == NULL || trie->values == NULL) {
        sl_trie_finish(trie);
        return sl_error_set(err, SLUICE_STATUS_OUT_OF_MEMORY, "no memory for a token trie");
    }
    trie->values[SL_TRIE_ROOT] = -1;
    return SLUICE_STATUS_OK;
}

void sl_trie_finish(struct sl_trie *trie)
{
    sl_free(trie->slots);
    sl_free(trie->values);
    *trie = (struct sl_trie){0};
}

/* Room for one more node; the edge table is kept at most half full. */
static enum sluice_status grow(struct sl_trie *trie, struct sluice_error *err)
{
    if (trie->n_nodes < trie->max_nodes) {
        return SLUICE_STATUS_OK;
    }
    SL_CHECK(trie->max_nodes < MAX_NODES, UNSUPPORTED, err,
             "the vocabulary has too much text for a token trie");
    const uint32_t max_nodes = trie->max_nodes * 2;
    int32_t *values = sl_realloc(SL_MEM_TEXT, trie->values, max_nodes, sizeof(*values));
    SL_CHECK(values != NULL, OUT_OF_MEMORY, err, "no memory for a token trie");
    trie->values = values;
    const uint32_t mask = max_nodes * 2 - 1;
    uint64_t *slots = sl_calloc(SL_MEM_TEXT, (size_t)mask + 1, sizeof(*slots));
    SL_CHECK(slots != NULL, OUT_OF_MEMORY, err, "no memory for a token trie");
    for (uint32_t i = 0; i <= trie->slot_mask; i++) {
        if (trie->slots[i] != 0) {
            *find_slot(slots, mask, trie->slots[i] & EDGE_MASK) = trie->slots[i];
        }
    }
    sl_free(trie->slots);
    trie->slots = slots;
    trie->slot_mask = mask;
    trie->max_nodes = max_nodes;
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_trie_insert(struct sl_trie *trie, const char *key, size_t length,
                                  int32_t value, struct sluice_error *err)
{
    if (length == 0) {
        return SLUICE_STATUS_OK;
    }
    uint32_t node = SL_TRIE_ROOT;
    for (size_t i = 0; i < length; i++) {
        const unsigned char byte = (unsigned char)key[i];
        uint32_t next = sl_trie_step(trie, node, byte);
        if (next == SL_TRIE_NONE) {
            SL_TRY(grow(trie, err));
            next = trie->n_nodes++;
            trie->values[next] = -1;
            const uint64_t edge = edge_of(node, byte);
            *find_slot(trie->slots, trie->slot_mask, edge) = ((uint64_t)next << EDGE_BITS) | edge;
            if (node == SL_TRIE_ROOT) {
                trie->root[byte] = next;
            }
        }
        node = next;
    }
    if (trie->values[node] < 0) {
        trie->values[node] = value;
    }
    if (length > trie->longest) {
        trie->longest = length;
    }
    return SLUICE_STATUS_OK;
}

uint32_t sl_trie_step(const struct sl_trie *trie, uint32_t node, unsigned char byte)
{
    if (node == SL_TRIE_ROOT) {
        return trie->root[byte];
    }
    return (uint32_t)(*find_slot(trie->slots, trie->slot_mask, edge_of(node, byte)) >> EDGE_BITS);
}

int32_t sl_trie_longest(const struct sl_trie *trie, const char *text, size_t length,
                        size_t *out_length)
{
    int32_t best = -1;
    uint32_t node = SL_TRIE_ROOT;
    *out_length = 0;
    for (size_t i = 0; i < length; i++) {
        node = sl_trie_step(trie, node, (unsigned char)text[i]);
        if (node == SL_TRIE_NONE) {
            break;
        }
        if (trie->values[node] >= 0) {
            best = trie->values[node];
            *out_length = i + 1;
        }
    }
    return best;
}
