/* SPDX-License-Identifier: Apache-2.0
 *
 * Who has which block of the KV cache. All layers use the same block numbers, in VRAM and in system
 * memory, so that one table serves them all: that of struct sl_kv_view. Blocks are counted by their
 * users: sequences grow block by block, share what they have in common, and give up blocks without
 * a copy. Nobody writes into a block that others use: `sl_kv_pool_split` puts another in its place.
 *
 * Nothing but numbers; what is in the blocks is the context's (sequence.c).
 */
#ifndef SL_EXEC_KV_POOL_H
#define SL_EXEC_KV_POOL_H

#include <stdbool.h>
#include <stdint.h>

#include <sluice/status.h>

/* Blocks next to each other. */
struct sl_kv_run {
    int32_t first, n;
};

/* A set of blocks, in rising order. */
struct sl_kv_runs {
    struct sl_kv_run *items; /* room for any set of the pool's */
    int32_t n;
};

struct sl_kv_pool {
    int32_t n_seqs, n_blocks;
    int32_t *table;   /* [n_seqs, n_blocks], borrowed; 0 past the blocks of a sequence */
    int32_t *n_past;  /* by sequence: tokens in the cache */
    int32_t *n_held;  /* by sequence: blocks, at least enough for n_past */
    int32_t *n_users; /* by block */
    int32_t *free;    /* stack */
    int32_t n_free;
    uint8_t *marks; /* by block, see sl_kv_pool_mark */
    /* Entries of the table that changed; for the owner of a copy to read and to reset. */
    int32_t changed_begin, changed_end;
};

/* A block in the place of one that is shared. */
struct sl_kv_split {
    int32_t seq, index; /* place in the table */
    int32_t from, to;   /* blocks; the same: nothing to copy */
};

/* Blocks that hold n tokens. */
int32_t sl_kv_pool_blocks(int32_t n_tokens);

/* `table` has room for n_seqs * n_blocks numbers and outlives the pool. Also after a failure the
 * pool may be finished. */
enum sluice_status sl_kv_pool_init(struct sl_kv_pool *pool, int32_t n_seqs, int32_t n_blocks,
                                   int32_t *table, struct sluice_error *err);
void sl_kv_pool_finish(struct sl_kv_pool *pool);
enum sluice_status sl_kv_runs_init(struct sl_kv_runs *runs, const struct sl_kv_pool *pool,
                                   struct sluice_error *err);
void sl_kv_runs_finish(struct sl_kv_runs *runs);

/* Blocks for n tokens behind n_past, which stays as it is. INVALID_ARGUMENT when the pool has not
 * so many; nothing has changed then. */
enum sluice_status sl_kv_pool_reserve(struct sl_kv_pool *pool, int32_t seq, int32_t n,
                                      struct sluice_error *err);
/* Forget all but the first n tokens, and give up all blocks that n_past does not need. */
void sl_kv_pool_truncate(struct sl_kv_pool *pool, int32_t seq, int32_t n);
/* `to` forgets what it had and uses the blocks of the first n tokens of `from` too. */
void sl_kv_pool_share(struct sl_kv_pool *pool, int32_t from, int32_t to, int32_t n);

/* Before block `index` of a sequence is written: if others use it, put a free one in its place, to
 * which the caller copies the content. Fails as `reserve` does. */
enum sluice_status sl_kv_pool_split(struct sl_kv_pool *pool, int32_t seq, int32_t index,
                                    struct sl_kv_split *out, struct sluice_error *err);
/* Take a split back at once: the copy has failed. */
void sl_kv_pool_unsplit(struct sl_kv_pool *pool, const struct sl_kv_split *split);

/* Mark the blocks that hold positions begin .. end - 1 of a sequence; and take what is marked. */
void sl_kv_pool_mark(struct sl_kv_pool *pool, int32_t seq, int32_t begin, int32_t end);
void sl_kv_pool_take_marked(struct sl_kv_pool *pool, struct sl_kv_runs *out);

/* Whether every block has as many users as there are entries of it and is free exactly when it has
 * none, entries are in range, and sequences hold what they need. For tests. */
bool sl_kv_pool_is_sound(const struct sl_kv_pool *pool);

#endif
