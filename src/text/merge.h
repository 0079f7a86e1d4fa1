/* SPDX-License-Identifier: Apache-2.0
 *
 * The merge loop of both kinds of byte-pair encoding: neighbouring symbols in a linked list, and a
 * heap of the merges that are possible. O(n log n) whatever the length of a word.
 */
#ifndef SL_TEXT_MERGE_H
#define SL_TEXT_MERGE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <sluice/status.h>

/* A stretch of text that is, so far, one token. length 0: merged into its left neighbour. */
struct sl_symbol {
    uint32_t start;
    uint32_t length;
    int32_t prev;
    int32_t next; /* -1 at the end */
    int32_t id;   /* token, or -1 */
};

struct sl_merge_candidate {
    uint64_t key; /* priority << 32 | left symbol: the smallest goes first */
    int32_t right;
    int32_t merged;
    uint32_t length; /* of both together: tells whether the candidate is still true */
};

/* Scratch memory of a loop, reused from word to word. A zeroed one is empty. */
struct sl_merger {
    struct sl_symbol *symbols;
    size_t n_symbols;
    size_t max_symbols;
    struct sl_merge_candidate *heap;
    size_t n_heap;
    size_t max_heap;
};

/* Whether two neighbours merge, into which token, and how urgently (smaller is earlier). */
typedef bool sl_merge_fn(const void *context, const struct sl_symbol *left,
                         const struct sl_symbol *right, uint32_t *priority, int32_t *merged);

void sl_merger_finish(struct sl_merger *merger);

/* Append a symbol; start with n_symbols = 0. */
enum sluice_status sl_merger_push(struct sl_merger *merger, uint32_t start, uint32_t length,
                                  int32_t id, struct sluice_error *err);

/* Link the pushed symbols and merge until nothing merges. What is left are the symbols from 0 on
 * along `next`. */
enum sluice_status sl_merger_run(struct sl_merger *merger, sl_merge_fn *fn, const void *context,
                                 struct sluice_error *err);

#endif
