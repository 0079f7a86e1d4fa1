/* SPDX-License-Identifier: Apache-2.0
 *
 * Op lists on a team: a list gives bit by bit what its ops give one at a time on one thread, for
 * any number of threads, ops of all sizes following each other (small ones are left to thread 0 and
 * have no barriers between them). And the levels and their cap.
 */
#include <stdio.h>
#include <stdlib.h>

#include "base/mem.h"
#include "cpu/cpu.h"
#include "test.h"

enum {
    N_TOKENS = 3,
    N_HEADS = 4,
    N_KV_HEADS = 2,
    HEAD_DIM = 64,
    N_EMBD = N_HEADS * HEAD_DIM,
    N_KV = N_KV_HEADS * HEAD_DIM,
    N_PAST = 900,
    N_BLOCKS = 16,
    N_WIDE = 40, /* tokens of the ops that are shared out */
    N_OPS = 12,
};

/* Everything that the list reads and writes, in one block, so that it can be copied and compared.
 */
struct world {
    float x[N_WIDE * N_EMBD];
    float norm[N_WIDE * N_EMBD];
    float q[N_TOKENS * N_EMBD], k[N_TOKENS * N_KV], v[N_TOKENS * N_KV], y[N_TOKENS * N_EMBD];
    float wide_y[N_WIDE * N_EMBD];
    float weight[N_EMBD];
    float freq[HEAD_DIM / 2];
    float matrix[N_EMBD * N_EMBD];
    int32_t pos[N_WIDE];
    uint16_t cache[N_BLOCKS * 2 * N_KV * SL_KV_BLOCK];
};

static float random_float(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (float)(*state >> 8) / 8388608.0f - 1.0f;
}

static void world_fill(struct world *w)
{
    uint32_t rng = 5;
    memset(w, 0, sizeof(*w));
    for (int i = 0; i < N_WIDE * N_EMBD; i++) {
        w->x[i] = random_float(&rng);
    }
    for (int i = 0; i < N_EMBD; i++) {
        w->weight[i] = random_float(&rng);
    }
    for (int i = 0; i < N_EMBD * N_EMBD; i++) {
        w->matrix[i] = random_float(&rng) * 0.1f;
    }
    for (int i = 0; i < HEAD_DIM / 2; i++) {
        w->freq[i] = 1.0f / (float)(1 + i * i);
    }
    for (int i = 0; i < N_WIDE; i++) {
        w->pos[i] = N_PAST + i;
    }
    for (size_t i = 0; i < sizeof(w->cache) / sizeof(w->cache[0]); i++) {
        w->cache[i] = sl_f32_to_f16(random_float(&rng));
    }
}

static struct sl_op linear(const float *x, const struct world *w, int n_rows, float *y, int n)
{
    struct sl_op op = {.kind = SL_OP_LINEAR, .n_tokens = n, .linear = {.x = x, .n_parts = 1}};
    op.linear.part[0].w = (struct sl_matrix){
        .data = w->matrix, .type = SL_TYPE_F32, .n_rows = n_rows, .n_cols = N_EMBD};
    op.linear.part[0].y = y;
    return op;
}

static struct sl_op rope(float *x, const struct world *w, int n_heads)
{
    return (struct sl_op){.kind = SL_OP_ROPE,
                          .n_tokens = N_TOKENS,
                          .rope = {.x = x,
                                   .pos = w->pos,
                                   .freq = w->freq,
                                   .n_heads = n_heads,
                                   .head_dim = HEAD_DIM,
                                   .n_rot = HEAD_DIM,
                                   .magnitude = 1.0f,
                                   .neox = true}};
}

static struct sl_op norm(const float *x, const struct world *w, float *y, int n, bool accumulate)
{
    return (struct sl_op){.kind = SL_OP_NORM,
                          .n_tokens = n,
                          .norm = {.x = x,
                                   .weight = w->weight,
                                   .y = y,
                                   .n = N_EMBD,
                                   .rows_per_token = 1,
                                   .eps = 1e-6f,
                                   .accumulate = accumulate}};
}

static struct sl_op attention(const float *q, struct world *w, float *y, int n)
{
    return (struct sl_op){.kind = SL_OP_ATTENTION,
                          .n_tokens = n,
                          .attention = {.q = q,
                                        .y = y,
                                        .pos = w->pos,
                                        .kv = {.data = w->cache,
                                               .types = {SL_TYPE_F16, SL_TYPE_F16},
                                               .n_kv_heads = N_KV_HEADS,
                                               .head_dim = HEAD_DIM},
                                        .n_heads = N_HEADS,
                                        .n_kv_max = N_PAST + n,
                                        .scale = 0.125f}};
}

/* A layer of few tokens, then ops of many: shared and small ones in all orders. */
static void build(struct world *w, struct sl_op ops[N_OPS])
{
    struct sl_op *op = ops;
    *op++ = norm(w->x, w, w->norm, N_TOKENS, false);
    *op++ = linear(w->norm, w, N_EMBD, w->q, N_TOKENS);
    *op++ = linear(w->norm, w, N_KV, w->k, N_TOKENS);
    *op++ = linear(w->x, w, N_KV, w->v, N_TOKENS);
    *op++ = rope(w->q, w, N_HEADS);
    *op++ = rope(w->k, w, N_KV_HEADS);
    *op++ = (struct sl_op){.kind = SL_OP_KV_STORE,
                           .n_tokens = N_TOKENS,
                           .kv_store = {.k = w->k,
                                        .v = w->v,
                                        .pos = w->pos,
                                        .kv = attention(w->q, w, w->y, N_TOKENS).attention.kv}};
    *op++ = attention(w->q, w, w->y, N_TOKENS);
    *op++ = norm(w->y, w, w->x, N_TOKENS, true);
    *op++ = norm(w->x, w, w->norm, N_WIDE, false);
    *op++ = attention(w->norm, w, w->wide_y, N_WIDE);
    *op++ = attention(w->wide_y, w, w->y, N_TOKENS);
}

static size_t scratch_bytes(const struct sl_op *ops, int n_threads)
{
    size_t most = 0;
    for (int i = 0; i < N_OPS; i++) {
        const size_t bytes = sl_op_scratch_bytes(&ops[i]);
        most = bytes > most ? bytes : most;
    }
    return sl_cpu_scratch_bytes(most, n_threads);
}

static void check_threads(const struct sl_cpu_kernels *kernels, const struct world *start,
                          const struct world *wanted, struct world *w, int n_threads)
{
    struct sl_op ops[N_OPS];
    struct sl_pool *pool = NULL;
    struct sluice_error err = {0};
    const struct sl_pool_options options = {.n_threads = n_threads};
    assert_ok(sl_pool_create(&pool, &options, &err), err);
    build(w, ops);
    void *scratch = sl_alloc_aligned(SL_MEM_BASE, scratch_bytes(ops, n_threads), 64);
    assert_non_null(scratch);
    for (int i = 0; i < 20; i++) {
        memcpy(w, start, sizeof(*w));
        sl_mem_forbid(true);
        sl_cpu_run(kernels, pool, ops, N_OPS, scratch);
        sl_mem_forbid(false);
        if (memcmp(w, wanted, sizeof(*w)) != 0) {
            fail_msg("%s, %d threads, run %d: another result", sl_cpu_level_name(sl_cpu_level()),
                     n_threads, i);
        }
    }
    sl_free(scratch);
    sl_pool_destroy(&pool);
}

static void test_lists(void **state)
{
    (void)state;
    struct world *start = sl_alloc(SL_MEM_BASE, sizeof(*start));
    struct world *wanted = sl_alloc(SL_MEM_BASE, sizeof(*wanted));
    struct world *w = sl_alloc(SL_MEM_BASE, sizeof(*w));
    assert_non_null(start);
    assert_non_null(wanted);
    assert_non_null(w);
    world_fill(start);
    for (int level = 0; level < SL_CPU_N_LEVELS; level++) {
        if (!sl_cpu_level_supported((enum sl_cpu_level)level)) {
            continue;
        }
        const struct sl_cpu_kernels *kernels = sl_cpu_kernels((enum sl_cpu_level)level);
        struct sl_op ops[N_OPS];
        struct sluice_error err = {0};
        memcpy(wanted, start, sizeof(*wanted));
        build(wanted, ops);
        void *scratch = sl_alloc_aligned(SL_MEM_BASE, scratch_bytes(ops, 1), 64);
        assert_non_null(scratch);
        for (int i = 0; i < N_OPS; i++) {
            assert_ok(sl_op_validate(&ops[i], &err), err);
            sl_cpu_run(kernels, NULL, &ops[i], 1, scratch);
        }
        sl_free(scratch);
        assert_memory_not_equal(wanted, start, sizeof(*wanted));
        for (int n_threads = 1; n_threads <= 5; n_threads++) {
            check_threads(kernels, start, wanted, w, n_threads);
        }
    }
    sl_free(w);
    sl_free(wanted);
    sl_free(start);
}

static void test_levels(void **state)
{
    (void)state;
    struct sluice_error err = {0};
    assert_ok(sl_cpu_set_level_cap(NULL, &err), err);
    const enum sl_cpu_level best = sl_cpu_level();
    assert_true(sl_cpu_level_supported(best));
    assert_true(sl_cpu_level_supported(SL_CPU_SCALAR));
    for (int level = 0; level < SL_CPU_N_LEVELS; level++) {
        assert_ok(sl_cpu_set_level_cap(sl_cpu_level_name((enum sl_cpu_level)level), &err), err);
        assert_true((int)sl_cpu_level() <= level);
        assert_true(sl_cpu_level_supported(sl_cpu_level()));
        if (sl_cpu_level_supported((enum sl_cpu_level)level)) {
            assert_int_equal(sl_cpu_level(), level);
        }
    }
    assert_status(sl_cpu_set_level_cap("sse9", &err), INVALID_ARGUMENT);
    assert_mentions(err, "sse9");
    assert_mentions(err, "avx512vnni");
    assert_ok(sl_cpu_set_level_cap(NULL, &err), err);
    assert_int_equal(sl_cpu_level(), best);
    assert_true(strlen(sl_cpu_name()) > 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lists),
        cmocka_unit_test(test_levels),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
