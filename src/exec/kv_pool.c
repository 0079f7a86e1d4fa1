/* SPDX-License-Identifier: Apache-2.0
 *
 * Blocks of the KV cache and their users (see kv_pool.h). Free blocks are a stack that hands out
 * the lowest numbers first as long as blocks come back in the order in which they went: a sequence
 * that is alone has blocks 0, 1, 2, ... and needs no table.
 */
#include "exec/kv_pool.h"

#include <assert.h>
#include <string.h>

#include "base/error.h"
#include "base/mem.h"
#include "op/op.h"

int32_t sl_kv_pool_blocks(int32_t n_tokens)
{
    return (n_tokens + SL_KV_BLOCK - 1) / SL_KV_BLOCK;
}

enum sluice_status sl_kv_pool_init(struct sl_kv_pool *pool, int32_t n_seqs, int32_t n_blocks,
                                   int32_t *table, struct sluice_error *err)
{
    const size_t seqs = (size_t)n_seqs, blocks = (size_t)n_blocks;
    *pool = (struct sl_kv_pool){.n_seqs = n_seqs, .n_blocks = n_blocks, .table = table};
    pool->n_past = sl_calloc(SL_MEM_EXEC, seqs, sizeof *pool->n_past);
    pool->n_held = sl_calloc(SL_MEM_EXEC, seqs, sizeof *pool->n_held);
    pool->n_users = sl_calloc(SL_MEM_EXEC, blocks, sizeof *pool->n_users);
    pool->free = sl_calloc(SL_MEM_EXEC, blocks, sizeof *pool->free);
    pool->marks = sl_calloc(SL_MEM_EXEC, blocks, sizeof *pool->marks);
    SL_CHECK(pool->n_past && pool->n_held && pool->n_users && pool->free && pool->marks,
             OUT_OF_MEMORY, err, "no memory for the table of %d cache blocks", n_blocks);
    memset(table, 0, seqs * blocks * sizeof *table);
    pool->changed_end = n_seqs * n_blocks;
    while (pool->n_free < n_blocks) {
        pool->free[pool->n_free] = n_blocks - 1 - pool->n_free;
        pool->n_free++;
    }
    return SLUICE_STATUS_OK;
}

void sl_kv_pool_finish(struct sl_kv_pool *pool)
{
    sl_free(pool->n_past);
    sl_free(pool->n_held);
    sl_free(pool->n_users);
    sl_free(pool->free);
    sl_free(pool->marks);
    memset(pool, 0, sizeof *pool);
}

enum sluice_status sl_kv_runs_init(struct sl_kv_runs *runs, const struct sl_kv_pool *pool,
                                   struct sluice_error *err)
{
    runs->n = 0;
    /* Every other block at worst. */
    runs->items = sl_calloc(SL_MEM_EXEC, (size_t)pool->n_blocks / 2 + 1, sizeof *runs->items);
    SL_CHECK(runs->items, OUT_OF_MEMORY, err, "no memory for lists of %d cache blocks",
             pool->n_blocks);
    return SLUICE_STATUS_OK;
}

void sl_kv_runs_finish(struct sl_kv_runs *runs)
{
    sl_free(runs->items);
    memset(runs, 0, sizeof *runs);
}

static void set_entry(struct sl_kv_pool *pool, int32_t seq, int32_t index, int32_t block)
{
    const int32_t at = seq * pool->n_blocks + index;
    assert(pool->n_seqs > 1 || block == index || block == 0);
    if (pool->changed_begin >= pool->changed_end) {
        pool->changed_begin = at;
        pool->changed_end = at + 1;
    }
    pool->changed_begin = at < pool->changed_begin ? at : pool->changed_begin;
    pool->changed_end = at >= pool->changed_end ? at + 1 : pool->changed_end;
    pool->table[at] = block;
}

static int32_t get_entry(const struct sl_kv_pool *pool, int32_t seq, int32_t index)
{
    return pool->table[seq * pool->n_blocks + index];
}

static int32_t take_block(struct sl_kv_pool *pool)
{
    const int32_t block = pool->free[--pool->n_free];
    assert(pool->n_users[block] == 0);
    pool->n_users[block] = 1;
    return block;
}

static void drop_block(struct sl_kv_pool *pool, int32_t block)
{
    assert(pool->n_users[block] > 0);
    if (--pool->n_users[block] == 0) {
        pool->free[pool->n_free++] = block;
    }
}

enum sluice_status sl_kv_pool_reserve(struct sl_kv_pool *pool, int32_t seq, int32_t n,
                                      struct sluice_error *err)
{
    const int32_t lacking = sl_kv_pool_blocks(pool->n_past[seq] + n) - pool->n_held[seq];
    SL_CHECK(lacking <= pool->n_free, INVALID_ARGUMENT, err,
             "the KV cache is full: %d more tokens of sequence %d, which has %d, need %d blocks of "
             "%d, and %d of %d are free; end a sequence or use a larger -c/--ctx-size",
             n, seq, pool->n_past[seq], lacking, SL_KV_BLOCK, pool->n_free, pool->n_blocks);
    for (int32_t k = 0; k < lacking; k++) {
        set_entry(pool, seq, pool->n_held[seq]++, take_block(pool));
    }
    return SLUICE_STATUS_OK;
}

void sl_kv_pool_truncate(struct sl_kv_pool *pool, int32_t seq, int32_t n)
{
    if (n < pool->n_past[seq]) {
        pool->n_past[seq] = n;
    }
    /* The last goes back first, see above. */
    const int32_t keep = sl_kv_pool_blocks(pool->n_past[seq]);
    while (pool->n_held[seq] > keep) {
        const int32_t index = --pool->n_held[seq];
        drop_block(pool, get_entry(pool, seq, index));
        set_entry(pool, seq, index, 0);
    }
}

void sl_kv_pool_share(struct sl_kv_pool *pool, int32_t from, int32_t to, int32_t n)
{
    assert(from != to && n <= pool->n_past[from]);
    sl_kv_pool_truncate(pool, to, 0);
    pool->n_past[to] = n;
    for (int32_t i = 0; i < sl_kv_pool_blocks(n); i++) {
        const int32_t block = get_entry(pool, from, i);
        pool->n_users[block]++;
        set_entry(pool, to, i, block);
        pool->n_held[to]++;
    }
}

enum sluice_status sl_kv_pool_split(struct sl_kv_pool *pool, int32_t seq, int32_t index,
                                    struct sl_kv_split *out, struct sluice_error *err)
{
    assert(index < pool->n_held[seq]);
    const int32_t block = get_entry(pool, seq, index);
    *out = (struct sl_kv_split){.seq = seq, .index = index, .from = block, .to = block};
    if (pool->n_users[block] == 1) {
        return SLUICE_STATUS_OK;
    }
    SL_CHECK(pool->n_free > 0, INVALID_ARGUMENT, err,
             "the KV cache is full: sequence %d would write to a block that others use, and none "
             "of %d is free; end a sequence or use a larger -c/--ctx-size",
             seq, pool->n_blocks);
    out->to = take_block(pool);
    drop_block(pool, block);
    set_entry(pool, seq, index, out->to);
    return SLUICE_STATUS_OK;
}

void sl_kv_pool_unsplit(struct sl_kv_pool *pool, const struct sl_kv_split *split)
{
    assert(get_entry(pool, split->seq, split->index) == split->to && split->from != split->to);
    pool->n_users[split->from]++;
    set_entry(pool, split->seq, split->index, split->from);
    drop_block(pool, split->to);
}

void sl_kv_pool_mark(struct sl_kv_pool *pool, int32_t seq, int32_t begin, int32_t end)
{
    for (int32_t i = begin / SL_KV_BLOCK; i < sl_kv_pool_blocks(end); i++) {
        pool->marks[get_entry(pool, seq, i)] = 1;
    }
}

void sl_kv_pool_take_marked(struct sl_kv_pool *pool, struct sl_kv_runs *out)
{
    out->n = 0;
    for (int32_t block = 0; block < pool->n_blocks; block++) {
        if (!pool->marks[block]) {
            continue;
        }
        if (block == 0 || !pool->marks[block - 1]) {
            out->items[out->n++] = (struct sl_kv_run){.first = block};
        }
        out->items[out->n - 1].n++;
    }
    memset(pool->marks, 0, (size_t)pool->n_blocks);
}

bool sl_kv_pool_is_sound(const struct sl_kv_pool *pool)
{
    int64_t n_entries = 0, n_users = 0;
    int32_t n_unused = 0;
    for (int32_t block = 0; block < pool->n_blocks; block++) {
        int32_t users = 0, n_on_stack = 0;
        for (int32_t s = 0; s < pool->n_seqs; s++) {
            for (int32_t i = 0; i < pool->n_held[s]; i++) {
                users += get_entry(pool, s, i) == block;
            }
        }
        for (int32_t i = 0; i < pool->n_free; i++) {
            n_on_stack += pool->free[i] == block;
        }
        if (users != pool->n_users[block] || n_on_stack != (users == 0)) {
            return false;
        }
        n_users += users;
        n_unused += users == 0;
    }
    for (int32_t s = 0; s < pool->n_seqs; s++) {
        n_entries += pool->n_held[s];
        if (pool->n_held[s] < sl_kv_pool_blocks(pool->n_past[s])) {
            return false;
        }
    }
    return n_entries == n_users && n_unused == pool->n_free;
}
