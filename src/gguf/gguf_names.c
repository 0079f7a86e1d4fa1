/* SPDX-License-Identifier: Apache-2.0
 *
 * The store of key and tensor names, and the hash table over them. A file chooses its names, so
 * the hash is seeded per file: names that collide cannot be prepared in advance.
 */
#include "gguf/gguf_internal.h"

#include <string.h>

#include "base/clock.h"
#include "base/mem.h"

#define CHUNK_BYTES 16384
#define FIRST_SLOTS 64

struct sl_gguf_chunk {
    struct sl_gguf_chunk *next;
    size_t used;
    size_t capacity;
    char data[];
};

const char *sl_gguf_names_add(struct sl_gguf_names *names, const char *data, size_t length)
{
    struct sl_gguf_chunk *chunk = names->chunks;
    if (chunk == NULL || chunk->capacity - chunk->used <= length) {
        const size_t capacity = length < CHUNK_BYTES ? CHUNK_BYTES : length + 1;
        chunk = sl_alloc(SL_MEM_GGUF, sizeof(*chunk) + capacity);
        if (chunk == NULL) {
            return NULL;
        }
        chunk->next = names->chunks;
        chunk->used = 0;
        chunk->capacity = capacity;
        names->chunks = chunk;
    }
    char *name = chunk->data + chunk->used;
    memcpy(name, data, length);
    name[length] = '\0';
    chunk->used += length + 1;
    return name;
}

void sl_gguf_names_finish(struct sl_gguf_names *names)
{
    while (names->chunks != NULL) {
        struct sl_gguf_chunk *next = names->chunks->next;
        sl_free(names->chunks);
        names->chunks = next;
    }
}

/* Multiply and fold: eight bytes a step, the length in the start value. */
static uint64_t hash_name(uint64_t seed, const char *name, size_t length)
{
    const uint64_t factor = 0x9e3779b97f4a7c15u;
    uint64_t h = seed ^ (length * factor);
    while (length > 0) {
        const size_t n = length < 8 ? length : 8;
        uint64_t word = 0;
        memcpy(&word, name, n);
        const unsigned __int128 product = (unsigned __int128)(h ^ word) * (factor ^ seed);
        h = (uint64_t)product ^ (uint64_t)(product >> 64);
        h += factor;
        name += n;
        length -= n;
    }
    h ^= h >> 32;
    return h * factor ^ (h >> 29);
}

size_t sl_gguf_table_find(const struct sl_gguf_table *table, const char *name, size_t length)
{
    if (table->n_slots == 0) {
        return SIZE_MAX;
    }
    const uint64_t hash = hash_name(table->seed, name, length);
    const size_t mask = table->n_slots - 1;
    for (size_t i = (size_t)hash & mask; table->slots[i].name != NULL; i = (i + 1) & mask) {
        const struct sl_gguf_slot *slot = &table->slots[i];
        if (slot->hash == hash && strlen(slot->name) == length &&
            memcmp(slot->name, name, length) == 0) {
            return slot->index;
        }
    }
    return SIZE_MAX;
}

static void place(struct sl_gguf_slot *slots, size_t n_slots, struct sl_gguf_slot slot)
{
    size_t i = (size_t)slot.hash & (n_slots - 1);
    while (slots[i].name != NULL) {
        i = (i + 1) & (n_slots - 1);
    }
    slots[i] = slot;
}

static bool grow(struct sl_gguf_table *table)
{
    const size_t n_slots = table->n_slots == 0 ? FIRST_SLOTS : table->n_slots * 2;
    struct sl_gguf_slot *slots = sl_calloc(SL_MEM_GGUF, n_slots, sizeof(*slots));
    if (slots == NULL) {
        return false;
    }
    for (size_t i = 0; i < table->n_slots; i++) {
        if (table->slots[i].name != NULL) {
            place(slots, n_slots, table->slots[i]);
        }
    }
    if (table->slots == NULL) {
        /* Where the memory lies and when: not known to whoever wrote the file. */
        table->seed = (uint64_t)(uintptr_t)slots * 0xff51afd7ed558ccdu ^ sl_clock_now_ns();
    }
    sl_free(table->slots);
    table->slots = slots;
    table->n_slots = n_slots;
    return true;
}

bool sl_gguf_table_add(struct sl_gguf_table *table, const char *name, size_t length, size_t index)
{
    if ((table->n_used + 1) * 2 > table->n_slots && !grow(table)) {
        return false;
    }
    const struct sl_gguf_slot slot = {
        .name = name, .hash = hash_name(table->seed, name, length), .index = index};
    place(table->slots, table->n_slots, slot);
    table->n_used++;
    return true;
}

void sl_gguf_table_finish(struct sl_gguf_table *table)
{
    sl_free(table->slots);
    *table = (struct sl_gguf_table){0};
}
