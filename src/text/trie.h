/* SPDX-License-Identifier: Apache-2.0
 *
 * A byte trie whose edges live in one hash table keyed by (node, byte): one probe a step, memory in
 * proportion to the bytes inserted. It finds special tokens and the pieces of unigram vocabularies.
 */
#ifndef SL_TEXT_TRIE_H
#define SL_TEXT_TRIE_H

#include <stddef.h>
#include <stdint.h>

#include <sluice/status.h>

struct sl_trie {
    uint64_t *slots; /* (node << 8 | byte) + 1 in the low 40 bits' place, child above; 0: empty */
    uint32_t slot_mask;
    int32_t *values; /* per node: the value inserted there, or -1 */
    uint32_t n_nodes;
    uint32_t max_nodes;
    uint32_t root[256]; /* children of the root, so that a scan over plain text costs one load */
    size_t longest;     /* bytes of the longest key */
};

#define SL_TRIE_ROOT 0u
#define SL_TRIE_NONE 0u /* the root is nobody's child */

/* A zeroed trie is empty. */
enum sluice_status sl_trie_init(struct sl_trie *trie, struct sluice_error *err);
void sl_trie_finish(struct sl_trie *trie);

/* The first value inserted for a key stays. Empty keys are ignored. */
enum sluice_status sl_trie_insert(struct sl_trie *trie, const char *key, size_t length,
                                  int32_t value, struct sluice_error *err);

uint32_t sl_trie_step(const struct sl_trie *trie, uint32_t node, unsigned char byte);

/* The value of the longest key that begins `text` (-1: none) and its length. */
int32_t sl_trie_longest(const struct sl_trie *trie, const char *text, size_t length,
                        size_t *out_length);

#endif
