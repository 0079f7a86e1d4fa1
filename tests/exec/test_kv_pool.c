/* SPDX-License-Identifier: Apache-2.0
 *
 * Blocks of the cache and their users: whatever sequences do, each reads back what it wrote, no
 * block is lost, and a sequence that is alone has its blocks in order.
 */
#include "test.h"

#include <string.h>

#include "base/mem.h"
#include "exec/kv_pool.h"
#include "op/op.h"

#define N_SEQS 5
#define N_BLOCKS 12
#define N_STEPS 20000

struct world {
    struct sl_kv_pool pool;
    int32_t table[N_SEQS * N_BLOCKS];
    int32_t memory[N_BLOCKS * SL_KV_BLOCK];
    int32_t wanted[N_SEQS][N_BLOCKS * SL_KV_BLOCK]; /* what each sequence wrote */
    int n_splits, n_full, n_shares;
    uint32_t state;
};

static int32_t random_below(struct world *w, int32_t n)
{
    w->state = w->state * 1664525u + 1013904223u;
    return (int32_t)((w->state >> 8) % (uint32_t)n);
}

static int32_t *cell(struct world *w, int32_t seq, int32_t pos)
{
    const int32_t block = w->table[seq * N_BLOCKS + pos / SL_KV_BLOCK];
    assert_in_range(block, 0, N_BLOCKS - 1);
    return &w->memory[block * SL_KV_BLOCK + pos % SL_KV_BLOCK];
}

/* As a context does it: reserve, own the block that is written, write, count. */
static void append(struct world *w, int32_t seq, int32_t n)
{
    struct sluice_error err;
    struct sl_kv_pool *const pool = &w->pool;
    const int32_t n_past = pool->n_past[seq], n_free = pool->n_free;
    if (n_past + n > N_BLOCKS * SL_KV_BLOCK) {
        return;
    }
    enum sluice_status status = sl_kv_pool_reserve(pool, seq, n, &err);
    if (status != SLUICE_STATUS_OK) {
        assert_mentions(err, "full");
        assert_int_equal(pool->n_free, n_free);
        w->n_full++;
        return;
    }
    if (n_past % SL_KV_BLOCK != 0) {
        struct sl_kv_split split;
        status = sl_kv_pool_split(pool, seq, n_past / SL_KV_BLOCK, &split, &err);
        if (status != SLUICE_STATUS_OK) {
            assert_mentions(err, "full");
            sl_kv_pool_truncate(pool, seq, n_past);
            assert_int_equal(pool->n_free, n_free);
            w->n_full++;
            return;
        }
        if (split.from != split.to && random_below(w, 4) == 0) {
            sl_kv_pool_unsplit(pool, &split); /* its copy has failed */
            sl_kv_pool_truncate(pool, seq, n_past);
            assert_int_equal(pool->n_free, n_free);
            return;
        }
        w->n_splits += split.from != split.to;
        memmove(w->memory + split.to * SL_KV_BLOCK, w->memory + split.from * SL_KV_BLOCK,
                SL_KV_BLOCK * sizeof w->memory[0]);
    }
    for (int32_t i = 0; i < n; i++) {
        *cell(w, seq, n_past + i) = w->wanted[seq][n_past + i] = random_below(w, 1 << 20);
    }
    pool->n_past[seq] += n;
}

static void share(struct world *w, int32_t from, int32_t to, int32_t n)
{
    if (from != to) {
        sl_kv_pool_share(&w->pool, from, to, n);
        memcpy(w->wanted[to], w->wanted[from], (size_t)n * sizeof w->wanted[0][0]);
        w->n_shares++;
    }
}

static void check_world(struct world *w)
{
    assert_true(sl_kv_pool_is_sound(&w->pool));
    for (int32_t seq = 0; seq < N_SEQS; seq++) {
        for (int32_t pos = 0; pos < w->pool.n_past[seq]; pos++) {
            assert_int_equal(*cell(w, seq, pos), w->wanted[seq][pos]);
        }
    }
}

static void test_random_use(void **state)
{
    (void)state;
    static struct world w;
    struct sluice_error err;
    memset(&w, 0, sizeof w);
    assert_ok(sl_kv_pool_init(&w.pool, N_SEQS, N_BLOCKS, w.table, &err), err);
    for (int step = 0; step < N_STEPS; step++) {
        const int32_t seq = random_below(&w, N_SEQS);
        const int32_t n_past = w.pool.n_past[seq];
        switch (random_below(&w, 8)) {
        case 0:
            sl_kv_pool_truncate(&w.pool, seq, random_below(&w, n_past + 1));
            break;
        case 1:
            share(&w, seq, random_below(&w, N_SEQS), random_below(&w, n_past + 1));
            break;
        case 2:
            append(&w, seq, 1 + random_below(&w, 3 * SL_KV_BLOCK));
            break;
        default:
            append(&w, seq, 1 + random_below(&w, 9));
            break;
        }
        check_world(&w);
    }
    print_message("%d splits, %d shares, full %d times\n", w.n_splits, w.n_shares, w.n_full);
    assert_true(w.n_splits > 0 && w.n_shares > 0 && w.n_full > 0);
    for (int32_t seq = 0; seq < N_SEQS; seq++) {
        sl_kv_pool_truncate(&w.pool, seq, 0);
    }
    assert_int_equal(w.pool.n_free, N_BLOCKS);
    sl_kv_pool_finish(&w.pool);
}

/* A sequence that is alone needs no table, whatever it did before. */
static void test_alone(void **state)
{
    (void)state;
    struct sluice_error err;
    struct sl_kv_pool pool;
    int32_t table[N_BLOCKS];
    uint32_t random = 1;
    assert_ok(sl_kv_pool_init(&pool, 1, N_BLOCKS, table, &err), err);
    for (int step = 0; step < 1000; step++) {
        random = random * 1664525u + 1013904223u;
        const int32_t n = (int32_t)((random >> 8) % (N_BLOCKS * SL_KV_BLOCK));
        if (n > pool.n_past[0]) {
            assert_ok(sl_kv_pool_reserve(&pool, 0, n - pool.n_past[0], &err), err);
            if (random >> 28 > 3) {
                pool.n_past[0] = n; /* else the pass has failed */
            }
        }
        sl_kv_pool_truncate(&pool, 0, n);
        for (int32_t i = 0; i < pool.n_held[0]; i++) {
            assert_int_equal(table[i], i);
        }
    }
    sl_kv_pool_finish(&pool);
}

/* Marked blocks come out as runs, once each. */
static void test_runs(void **state)
{
    (void)state;
    struct sluice_error err;
    struct sl_kv_pool pool;
    struct sl_kv_runs runs;
    int32_t table[3 * N_BLOCKS];
    assert_ok(sl_kv_pool_init(&pool, 3, N_BLOCKS, table, &err), err);
    assert_ok(sl_kv_runs_init(&runs, &pool, &err), err);
    for (int round = 0; round < 3; round++) { /* blocks 0 2 4, 1 3 5 */
        for (int32_t seq = 0; seq < 2; seq++) {
            assert_ok(sl_kv_pool_reserve(&pool, seq, SL_KV_BLOCK, &err), err);
            pool.n_past[seq] += SL_KV_BLOCK;
        }
    }
    sl_kv_pool_share(&pool, 0, 2, 2 * SL_KV_BLOCK - 1);
    sl_kv_pool_mark(&pool, 0, 0, 2 * SL_KV_BLOCK + 1);
    sl_kv_pool_mark(&pool, 2, 0, 2 * SL_KV_BLOCK - 1);
    sl_kv_pool_mark(&pool, 1, SL_KV_BLOCK, SL_KV_BLOCK + 1);
    sl_kv_pool_take_marked(&pool, &runs);
    assert_int_equal(runs.n, 2);
    assert_int_equal(runs.items[0].first, 0);
    assert_int_equal(runs.items[0].n, 1);
    assert_int_equal(runs.items[1].first, 2);
    assert_int_equal(runs.items[1].n, 3);
    sl_kv_pool_take_marked(&pool, &runs);
    assert_int_equal(runs.n, 0);
    sl_kv_runs_finish(&runs);
    sl_kv_pool_finish(&pool);
}

/* No memory: an error, no leak. */
static void test_no_memory(void **state)
{
    (void)state;
    struct sluice_error err;
    int32_t table[N_BLOCKS];
    for (int64_t n = 0;; n++) {
        const size_t blocks = sl_mem_n_blocks();
        struct sl_kv_pool pool;
        sl_mem_fail_after(n, false);
        const enum sluice_status status = sl_kv_pool_init(&pool, 1, N_BLOCKS, table, &err);
        const bool fired = sl_mem_fault_fired();
        sl_mem_fail_after(-1, false);
        sl_kv_pool_finish(&pool);
        assert_int_equal(sl_mem_n_blocks(), blocks);
        if (!fired) {
            assert_int_equal(status, SLUICE_STATUS_OK);
            assert_true(n > 0);
            break;
        }
        assert_int_equal(status, SLUICE_STATUS_OUT_OF_MEMORY);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_use),
        cmocka_unit_test(test_alone),
        cmocka_unit_test(test_runs),
        cmocka_unit_test(test_no_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
