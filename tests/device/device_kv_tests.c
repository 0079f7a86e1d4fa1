/* SPDX-License-Identifier: Apache-2.0
 *
 * Third part of the list: the cache. Store, attention and merge, with caches in one piece, by a
 * table and divided, against the scalar reference; bounds as in device_op_tests.c.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "device/device_tests.h"
#include "device/op_case.h"
#include "op/kv.h"
#include "test.h"

#define BOUND_ATTENTION 2e-3
#define BOUND_MERGE 1e-6

static struct sl_device *dev;

static void check_kv_store(struct sl_kv_types types, int n_tokens, int n_kv_heads, int head_dim,
                           int32_t first_pos, int n_seqs, bool with_table)
{
    struct op_case c;
    case_init(&c, (uint64_t)n_tokens, "kv_store %s/%s %d x %d x %d from %d, %d sequences%s",
              sl_type_name(types.k), sl_type_name(types.v), n_tokens, n_kv_heads, head_dim,
              first_pos, n_seqs, with_table ? ", table" : "");
    struct sl_op *op = case_op(&c, SL_OP_KV_STORE, n_tokens);
    const size_t n = (size_t)n_tokens * (size_t)n_kv_heads * (size_t)head_dim;
    const int n_blocks = (first_pos + n_tokens) / SL_KV_BLOCK + 1;
    op->kv_store = (struct sl_op_kv_store){
        .k = case_floats(&c, n, 1.0f),
        .v = case_floats(&c, n, 2.0f),
        .pos = case_positions(&c, n_tokens, first_pos),
        .kv = case_cache(&c, types, n_kv_heads, head_dim, n_seqs, n_blocks, with_table)};
    if (n_seqs > 1) {
        int32_t *seq = case_positions(&c, n_tokens, 0);
        for (int i = 0; i < n_tokens; i++) {
            seq[i] %= n_seqs;
        }
        op->kv_store.seq = seq;
    }
    case_output_cache(&c, &op->kv_store.kv, n_seqs * n_blocks, 0);
    case_check(&c, dev, false, "kv_store");
    case_finish(&c);
}

static void check_divided_store(struct sl_kv_types types, int n_tokens, int head_dim,
                                int32_t first_pos, int n_first, enum sl_kv_here here)
{
    enum { HEADS = 3 };
    struct op_case c;
    case_init(&c, (uint64_t)n_tokens, "kv_store %s/%s %d x %d from %d, divided at %d, %d",
              sl_type_name(types.k), sl_type_name(types.v), n_tokens, head_dim, first_pos, n_first,
              (int)here);
    struct sl_op *op = case_op(&c, SL_OP_KV_STORE, n_tokens);
    const size_t n = (size_t)n_tokens * HEADS * (size_t)head_dim;
    const int n_blocks = (first_pos + n_tokens) / SL_KV_BLOCK + 1;
    op->kv_store = (struct sl_op_kv_store){
        .k = case_floats(&c, n, 1.0f),
        .v = case_floats(&c, n, 2.0f),
        .pos = case_positions(&c, n_tokens, first_pos),
        .kv = case_divided_cache(&c, types, HEADS, head_dim, n_blocks, n_first, here)};
    case_output_cache(&c, &op->kv_store.kv, n_blocks, 0);
    case_check(&c, dev, false, "kv_store");
    case_finish(&c);
}

static void test_kv_store(void **state)
{
    (void)state;
    for (int pair = 0; pair < SL_N_KV_TYPES * SL_N_KV_TYPES; pair++) {
        const struct sl_kv_types types = {sl_kv_type_list[pair / SL_N_KV_TYPES],
                                          sl_kv_type_list[pair % SL_N_KV_TYPES]};
        check_kv_store(types, 1, 3, 64, 0, 1, false);
        check_kv_store(types, 1, 3, 64, 63, 1, false);
        check_kv_store(types, 1, 8, 128, 64, 1, true);
        check_kv_store(types, 150, 2, 64, 40, 1, true);
        check_kv_store(types, 9, 1, 256, 120, 3, true);
        for (int here = SL_KV_ALL; here <= SL_KV_LATER; here++) {
            check_divided_store(types, 150, 64, 40, 1, (enum sl_kv_here)here);
            check_divided_store(types, 5, 96, 126, 2, (enum sl_kv_here)here);
            check_divided_store(types, 1, 128, 64, 2, (enum sl_kv_here)here);
        }
    }
}

struct attention_case {
    int n_tokens;
    int n_heads;
    int n_kv_heads;
    int head_dim;
    int first_pos;
    int n_seqs; /* > 1: token t is of sequence t % n_seqs, each at a place of its own */
    bool with_table;
    bool with_sinks;
    int window;
    float softcap;
};

/* n_first 0: a cache that is not divided. Divided ones are of one sequence. */
static void check_attention_of(const struct attention_case *a, struct sl_kv_types types,
                               int n_first, enum sl_kv_here here)
{
    struct op_case c;
    case_init(&c, (uint64_t)(a->n_tokens + a->first_pos),
              "attention %s/%s, %d tokens from %d, %d heads over %d, size %d, %d sequences, "
              "window %d, divided at %d, %d",
              sl_type_name(types.k), sl_type_name(types.v), a->n_tokens, a->first_pos, a->n_heads,
              a->n_kv_heads, a->head_dim, a->n_seqs, a->window, n_first, (int)here);
    const int n_kv = a->first_pos + a->n_tokens;
    const int n_blocks = (n_kv + SL_KV_BLOCK - 1) / SL_KV_BLOCK;
    const size_t n_rows = (size_t)a->n_tokens * (size_t)a->n_heads;
    const size_t n = n_rows * (size_t)a->head_dim;
    struct sl_op *op = case_op(&c, SL_OP_ATTENTION, a->n_tokens);
    op->attention = (struct sl_op_attention){
        .q = case_floats(&c, n, 1.0f),
        .y = case_floats(&c, n, 1.0f),
        .pos = case_positions(&c, a->n_tokens, a->first_pos),
        .sinks = a->with_sinks ? case_floats(&c, (size_t)a->n_heads, 1.0f) : NULL,
        .lse = n_first > 0 ? case_floats(&c, n_rows, 1.0f) : NULL,
        .kv = n_first > 0 ? case_divided_cache(&c, types, a->n_kv_heads, a->head_dim, n_blocks,
                                               n_first, here)
                          : case_cache(&c, types, a->n_kv_heads, a->head_dim, a->n_seqs, n_blocks,
                                       a->with_table),
        .n_heads = a->n_heads,
        .n_kv_max = n_kv,
        .window = a->window,
        .scale = 1.0f / sqrtf((float)a->head_dim),
        .softcap = a->softcap};
    if (a->n_seqs > 1) {
        int32_t *seq = case_positions(&c, a->n_tokens, 0);
        for (int i = 0; i < a->n_tokens; i++) {
            seq[i] %= a->n_seqs;
        }
        op->attention.seq = seq;
    }
    for (int s = 0; s < a->n_seqs; s++) {
        case_fill_cache(&c, &op->attention.kv, s, n_kv);
    }
    case_output(&c, CASE_FLOATS, op->attention.y, n * sizeof(float), SL_TYPE_F32, BOUND_ATTENTION);
    if (n_first > 0) {
        case_output(&c, CASE_FLOATS, op->attention.lse, n_rows * sizeof(float), SL_TYPE_F32,
                    BOUND_ATTENTION);
    }
    case_check(&c, dev, false, "attention");
    case_finish(&c);
}

static void check_attention(const struct attention_case *a, struct sl_kv_types types)
{
    check_attention_of(a, types, 0, SL_KV_ALL);
}

static void test_attention(void **state)
{
    (void)state;
    const struct attention_case cases[] = {
        {1, 9, 3, 64, 0, 1, false, false, 0, 0},
        {1, 9, 3, 64, 62, 1, false, false, 0, 0},
        {1, 9, 3, 64, 63, 1, true, false, 0, 0},
        {1, 9, 3, 64, 64, 1, true, false, 0, 0},
        {1, 4, 1, 256, 700, 1, true, false, 0, 0},
        {1, 8, 2, 128, 333, 1, true, true, 100, 0},
        {2, 4, 4, 96, 200, 1, true, false, 0, 30.0f},
        {16, 6, 2, 64, 130, 1, true, false, 0, 0},
        {17, 6, 2, 64, 130, 1, true, false, 0, 0},
        {70, 8, 4, 64, 0, 1, false, false, 0, 0},
        {130, 4, 2, 128, 61, 1, true, false, 0, 0},
        {65, 4, 1, 256, 100, 1, true, false, 64, 50.0f},
        {33, 4, 2, 64, 90, 1, true, true, 16, 0},
        {5, 4, 2, 64, 150, 5, true, false, 0, 0},
        {30, 4, 2, 64, 70, 3, true, false, 40, 0},
        {1, 2, 1, 32, 5, 1, false, true, 0, 0},
        {3, 24, 1, 64, 40, 1, false, false, 1, 0},
        /* tokens that share parts of scratch */
        {17, 8, 2, 128, 900, 1, true, false, 0, 0},
        {40, 8, 2, 128, 700, 1, false, true, 0, 0},
        {64, 4, 1, 64, 800, 1, true, false, 300, 0},
        {48, 4, 2, 64, 500, 3, true, false, 0, 20.0f},
        /* enough to fill a GPU without cutting positions into ranges */
        {130, 44, 22, 128, 61, 1, true, false, 0, 0},
        {130, 44, 22, 128, 200, 1, false, true, 100, 0},
        {100, 68, 17, 128, 0, 1, true, false, 0, 30.0f},
        {130, 36, 36, 128, 0, 1, false, false, 0, 0}, /* as many tokens as rows in a tile */
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        check_attention(&cases[i], (struct sl_kv_types){SL_TYPE_F16, SL_TYPE_F16});
    }
}

/* Every pair of cache types: one token, the last number that is cut into ranges, more; large heads;
 * a window; sequences. */
static void test_attention_types(void **state)
{
    (void)state;
    const struct attention_case cases[] = {
        {1, 8, 2, 64, 300, 1, true, false, 0, 0},   {16, 4, 2, 128, 190, 1, false, false, 0, 0},
        {40, 8, 2, 128, 50, 1, true, false, 0, 0},  {3, 4, 1, 256, 130, 1, true, false, 0, 30.0f},
        {40, 2, 1, 256, 30, 1, false, true, 50, 0}, {12, 4, 2, 96, 70, 3, true, false, 40, 0},
        {1, 4, 1, 32, 4000, 1, false, false, 0, 0},
    };
    for (int pair = 1; pair < SL_N_KV_TYPES * SL_N_KV_TYPES; pair++) {
        for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
            check_attention(&cases[i], (struct sl_kv_types){sl_kv_type_list[pair / SL_N_KV_TYPES],
                                                            sl_kv_type_list[pair % SL_N_KV_TYPES]});
        }
    }
}

/* Decode and prefill, with nothing to see on a side for some rows or for all, cut into ranges and
 * not; the last ones fill a GPU. */
static void test_attention_divided(void **state)
{
    (void)state;
    const struct sl_kv_types f16 = {SL_TYPE_F16, SL_TYPE_F16};
    static const struct {
        struct attention_case a;
        int n_first;
    } cases[] = {
        {{1, 9, 3, 64, 63, 1, false, false, 0, 0}, 1},
        {{1, 9, 3, 64, 64, 1, false, true, 0, 0}, 1},
        {{1, 9, 3, 64, 100, 1, false, true, 0, 0}, 2},
        {{1, 8, 2, 128, 1333, 1, false, false, 0, 0}, 13},
        {{1, 8, 2, 128, 333, 1, false, true, 100, 0}, 4},
        {{1, 8, 2, 128, 333, 1, false, false, 70, 30.0f}, 3},
        {{1, 4, 1, 256, 700, 1, false, false, 0, 0}, 10},
        {{3, 4, 4, 96, 190, 1, false, false, 0, 0}, 3},
        {{33, 4, 2, 64, 110, 1, false, false, 16, 0}, 2},
        {{70, 8, 4, 64, 20, 1, false, false, 0, 0}, 1},
        {{65, 4, 1, 256, 100, 1, false, true, 64, 50.0f}, 2},
        {{40, 8, 2, 128, 700, 1, false, false, 0, 0}, 4},
        {{130, 44, 22, 128, 61, 1, false, false, 0, 0}, 1},
        {{130, 44, 22, 128, 61, 1, false, true, 20, 0}, 2},
        {{130, 44, 22, 128, 200, 1, false, true, 100, 0}, 3},
        {{130, 44, 22, 128, 200, 1, false, false, 0, 30.0f}, 4},
        {{100, 68, 17, 128, 0, 1, false, false, 0, 0}, 3},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        for (int here = SL_KV_ALL; here <= SL_KV_LATER; here++) {
            check_attention_of(&cases[i].a, f16, cases[i].n_first, (enum sl_kv_here)here);
        }
    }
    for (int pair = 1; pair < SL_N_KV_TYPES * SL_N_KV_TYPES; pair++) {
        const struct sl_kv_types types = {sl_kv_type_list[pair / SL_N_KV_TYPES],
                                          sl_kv_type_list[pair % SL_N_KV_TYPES]};
        for (int i = 0; i < 3 * 3; i++) {
            const struct attention_case a[] = {
                {1, 8, 2, 64, 300, 1, false, true, 0, 0},
                {40, 8, 2, 128, 50, 1, false, false, 0, 0},
                {12, 4, 1, 256, 130, 1, false, false, 40, 30.0f},
            };
            check_attention_of(&a[i % 3], types, 1 + i % 3, (enum sl_kv_here)(i / 3));
        }
    }
}

/* Both sides and their merge in one list, as if two backends had them. */
static void check_two_sides(int n_tokens, int first_pos, int window, bool later_into_first)
{
    enum { HEADS = 6, KV_HEADS = 2, DIM = 64, N_FIRST = 2 };
    struct op_case c;
    case_init(&c, (uint64_t)n_tokens, "two sides, %d tokens from %d, window %d, %s", n_tokens,
              first_pos, window, later_into_first ? "later into first" : "first into later");
    const int n_kv = first_pos + n_tokens;
    const size_t n_rows = (size_t)n_tokens * HEADS;
    struct sl_kv_view kv =
        case_divided_cache(&c, (struct sl_kv_types){SL_TYPE_F16, SL_TYPE_F16}, KV_HEADS, DIM,
                           n_kv / SL_KV_BLOCK + 1, N_FIRST, SL_KV_ALL);
    case_fill_cache(&c, &kv, 0, n_kv);
    const struct sl_op_attention attention = {.q = case_floats(&c, n_rows * DIM, 1.0f),
                                              .pos = case_positions(&c, n_tokens, first_pos),
                                              .n_heads = HEADS,
                                              .n_kv_max = n_kv,
                                              .window = window,
                                              .scale = 0.125f};
    float *y[2], *lse[2];
    for (int side = 0; side < 2; side++) {
        struct sl_op *op = case_op(&c, SL_OP_ATTENTION, n_tokens);
        y[side] = case_floats(&c, n_rows * DIM, 1.0f);
        lse[side] = case_floats(&c, n_rows, 1.0f);
        kv.here = side == 0 ? SL_KV_FIRST : SL_KV_LATER;
        op->attention = attention;
        op->attention.y = y[side];
        op->attention.lse = lse[side];
        op->attention.kv = kv;
        case_output(&c, CASE_FLOATS, y[side], n_rows * DIM * sizeof(float), SL_TYPE_F32,
                    BOUND_ATTENTION);
        case_output(&c, CASE_FLOATS, lse[side], n_rows * sizeof(float), SL_TYPE_F32,
                    BOUND_ATTENTION);
    }
    const int into = later_into_first ? 0 : 1;
    struct sl_op *op = case_op(&c, SL_OP_MERGE, n_tokens);
    op->merge = (struct sl_op_merge){.x = y[1 - into],
                                     .x_lse = lse[1 - into],
                                     .y = y[into],
                                     .y_lse = lse[into],
                                     .n_heads = HEADS,
                                     .head_dim = DIM};
    case_check(&c, dev, false, "merge");
    case_finish(&c);
}

static void test_two_sides(void **state)
{
    (void)state;
    for (int into = 0; into < 2; into++) {
        check_two_sides(1, 500, 0, into != 0);
        check_two_sides(1, 90, 0, into != 0); /* nothing on the later side */
        check_two_sides(40, 110, 0, into != 0);
        check_two_sides(40, 150, 30, into != 0);
    }
}

static void check_merge(int n_tokens, int n_heads, int head_dim)
{
    struct op_case c;
    case_init(&c, (uint64_t)(n_tokens + head_dim), "merge %d x %d x %d", n_tokens, n_heads,
              head_dim);
    struct sl_op *op = case_op(&c, SL_OP_MERGE, n_tokens);
    const size_t n_rows = (size_t)n_tokens * (size_t)n_heads;
    const size_t n = n_rows * (size_t)head_dim;
    float *lse[2];
    for (int side = 0; side < 2; side++) {
        lse[side] = case_floats(&c, n_rows, 2.0f);
        for (size_t i = 0; i < n_rows; i++) {
            const uint32_t kind = case_random(&c, 6);
            lse[side][i] = kind == 0   ? -INFINITY
                           : kind == 1 ? lse[side][i] * 1e3f
                                       : lse[side][i] + 10.0f;
        }
    }
    op->merge = (struct sl_op_merge){.x = case_floats(&c, n, 1.0f),
                                     .x_lse = lse[0],
                                     .y = case_floats(&c, n, 1.0f),
                                     .y_lse = lse[1],
                                     .n_heads = n_heads,
                                     .head_dim = head_dim};
    case_output(&c, CASE_FLOATS, op->merge.y, n * sizeof(float), SL_TYPE_F32, BOUND_MERGE);
    case_check(&c, dev, false, "merge");
    case_finish(&c);
}

/* What the other side has computed may lie in page-locked memory of the host. */
static void test_merge_from_host(void **state)
{
    (void)state;
    enum { HEADS = 3, DIM = 64, N = HEADS * DIM, BYTES = (N + HEADS) * sizeof(float) };
    const struct sl_device_vtable *vt = dev->vt;
    struct sluice_error err = {0};
    void *locked[2], *mem, *scratch;
    struct sl_stream *stream;
    for (int i = 0; i < 2; i++) {
        assert_ok(vt->host_alloc(dev, BYTES, &locked[i], &err), err);
    }
    assert_ok(vt->mem_alloc(dev, BYTES, &mem, &err), err);
    assert_ok(vt->mem_alloc(dev, 256, &scratch, &err), err);
    assert_ok(vt->stream_create(dev, SL_STREAM_OPERATORS, &stream, &err), err);
    float *here = locked[0], *there = locked[1];
    for (int i = 0; i < N; i++) {
        here[i] = (float)(i % DIM);
        there[i] = (float)(5 * (i % DIM));
    }
    for (int head = 0; head < HEADS; head++) { /* weights 1 : 3, 1 : 0, 0 : 1 */
        here[N + head] = head == 2 ? -INFINITY : 7.0f;
        there[N + head] = head == 1 ? -INFINITY : 7.0f + logf(3.0f);
    }
    struct sl_op op = {.kind = SL_OP_MERGE, .n_tokens = 1};
    op.merge = (struct sl_op_merge){.x = there,
                                    .x_lse = there + N,
                                    .y = mem,
                                    .y_lse = (float *)mem + N,
                                    .n_heads = HEADS,
                                    .head_dim = DIM};
    assert_ok(vt->copy_to_device(dev, stream, mem, here, BYTES, &err), err);
    assert_ok(vt->run(dev, stream, &op, 1, scratch, &err), err);
    assert_ok(vt->copy_to_host(dev, stream, here, mem, BYTES, &err), err);
    assert_ok(vt->stream_sync(dev, stream, &err), err);
    const float factors[HEADS] = {4.0f, 1.0f, 5.0f};
    for (int i = 0; i < N; i++) {
        assert_float_equal(here[i], factors[i / DIM] * (float)(i % DIM), 1e-4f);
    }
    vt->stream_destroy(dev, stream);
    vt->mem_free(dev, scratch);
    vt->mem_free(dev, mem);
    for (int i = 0; i < 2; i++) {
        vt->host_free(dev, locked[i]);
    }
}

static void test_merge(void **state)
{
    (void)state;
    check_merge(1, 32, 128);
    check_merge(9, 7, 96);
    check_merge(70, 3, 4);
    check_merge(33, 2, 256);
}

int device_tests_run_kv(const char *prefix, struct sl_device *device)
{
    dev = device;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kv_store),        cmocka_unit_test(test_attention),
        cmocka_unit_test(test_attention_types), cmocka_unit_test(test_attention_divided),
        cmocka_unit_test(test_two_sides),       cmocka_unit_test(test_merge),
        cmocka_unit_test(test_merge_from_host),
    };
    char name[96];
    snprintf(name, sizeof name, "%s: cache", prefix);
    return cmocka_run_group_tests_name(name, tests, NULL, NULL);
}
