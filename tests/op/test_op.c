/* SPDX-License-Identifier: Apache-2.0
 *
 * What is known of operators from their shapes: valid ones pass, each wrong field is refused by
 * name, and sizes are what op.h promises. And the reference of caches that are divided, against
 * numbers worked out by hand.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "op/kv.h"
#include "op/op.h"
#include "test.h"

static struct sl_op norm_op(void)
{
    return (struct sl_op){
        .kind = SL_OP_NORM, .n_tokens = 2, .norm = {.n = 64, .rows_per_token = 3, .eps = 1e-6f}};
}

static struct sl_op linear_op(void)
{
    struct sl_op op = {.kind = SL_OP_LINEAR, .n_tokens = 5, .linear = {.n_parts = 2}};
    for (int i = 0; i < 2; i++) {
        op.linear.part[i].w = (struct sl_matrix){.type = SL_TYPE_Q4_K, .n_rows = 48, .n_cols = 512};
    }
    return op;
}

static struct sl_op rope_op(void)
{
    return (struct sl_op){.kind = SL_OP_ROPE,
                          .n_tokens = 1,
                          .rope = {.n_heads = 4, .head_dim = 64, .n_rot = 64, .magnitude = 1.0f}};
}

static struct sl_op attention_op(void)
{
    return (struct sl_op){
        .kind = SL_OP_ATTENTION,
        .n_tokens = 4,
        .attention = {.kv = {.types = {SL_TYPE_F16, SL_TYPE_F16}, .n_kv_heads = 2, .head_dim = 64},
                      .n_heads = 8,
                      .n_kv_max = 100,
                      .scale = 0.125f}};
}

static struct sl_op kv_store_op(void)
{
    return (struct sl_op){
        .kind = SL_OP_KV_STORE,
        .n_tokens = 4,
        .kv_store.kv = {.types = {SL_TYPE_Q8_0, SL_TYPE_Q8_0}, .n_kv_heads = 2, .head_dim = 96}};
}

/* Of a cache without table whose first three blocks lie apart. */
static struct sl_op divided_op(void)
{
    struct sl_op op = attention_op();
    op.attention.kv.n_first = 3;
    op.attention.kv.here = SL_KV_LATER;
    return op;
}

static struct sl_op merge_op(void)
{
    return (struct sl_op){
        .kind = SL_OP_MERGE, .n_tokens = 3, .merge = {.n_heads = 7, .head_dim = 4}};
}

static void test_valid(void **state)
{
    (void)state;
    struct sl_op ops[] = {norm_op(),     linear_op(),  rope_op(), attention_op(),
                          kv_store_op(), divided_op(), merge_op()};
    struct sluice_error err = {0};
    for (size_t i = 0; i < sizeof(ops) / sizeof(ops[0]); i++) {
        assert_ok(sl_op_validate(&ops[i], &err), err);
    }
}

/* One wrong field each; the message says which op and holds the value. */
#define REFUSES(make, change, text)                                                                \
    do {                                                                                           \
        struct sl_op op = make();                                                                  \
        struct sluice_error err = {0};                                                             \
        op.change;                                                                                 \
        assert_status(sl_op_validate(&op, &err), INTERNAL);                                        \
        assert_mentions(err, text);                                                                \
        assert_mentions(err, sl_op_kind_name(op.kind));                                            \
    } while (0)

static void test_refused(void **state)
{
    (void)state;
    REFUSES(norm_op, n_tokens = 0, "0 tokens");
    REFUSES(norm_op, n_tokens = -3, "-3 tokens");
    REFUSES(norm_op, norm.n = 0, "row of 0");
    REFUSES(norm_op, norm.rows_per_token = 0, "0 rows");
    REFUSES(norm_op, norm.eps = -1.0f, "eps -1");
    REFUSES(norm_op, norm.eps = NAN, "eps");
    REFUSES(linear_op, linear.n_parts = 5, "5 parts");
    REFUSES(linear_op, linear.n_parts = 0, "0 parts");
    REFUSES(linear_op, linear.part[1].w.type = SL_TYPE_IQ2_XS, "IQ2_XS");
    REFUSES(linear_op, linear.part[1].w.type = (enum sl_type)4, "unknown");
    REFUSES(linear_op, linear.part[0].w.n_cols = 100, "100 columns");
    REFUSES(linear_op, linear.part[1].w.n_cols = 256, "part 1 has 256 columns");
    REFUSES(linear_op, linear.part[0].w.n_rows = 0, "0 x 512");
    REFUSES(linear_op, linear.part[0].w.n_rows = INT64_C(1) << 40, "1099511627776 x 512");
    REFUSES(linear_op, linear.accumulate = true, "accumulates over 2 parts");
    REFUSES(linear_op, linear.activation = (enum sl_activation)9, "activation 9");
    REFUSES(rope_op, rope.n_rot = 63, "rotates 63");
    REFUSES(rope_op, rope.n_rot = 66, "rotates 66 of 64");
    REFUSES(rope_op, rope.n_rot = 0, "rotates 0");
    REFUSES(rope_op, rope.n_heads = 0, "0 heads");
    REFUSES(attention_op, attention.n_heads = 7, "7 heads over 2");
    REFUSES(attention_op, attention.kv.head_dim = 100, "head size 100");
    REFUSES(attention_op, attention.kv.head_dim = 288, "head size 288");
    REFUSES(attention_op, attention.kv.types.v = SL_TYPE_Q4_K, "Q4_K");
    REFUSES(attention_op, attention.kv.n_kv_heads = 0, "0 KV heads");
    REFUSES(attention_op, attention.n_kv_max = 0, "n_kv_max 0");
    REFUSES(attention_op, attention.window = -1, "window -1");
    REFUSES(attention_op, attention.softcap = INFINITY, "soft-cap inf");
    REFUSES(kv_store_op, kv_store.kv.types.k = SL_TYPE_F32, "F32");
    REFUSES(kv_store_op, kv_store.kv.n_first = -1, "block -1");
    REFUSES(kv_store_op, kv_store.kv.here = SL_KV_FIRST, "block 0, part 1");
    REFUSES(divided_op, attention.kv.n_first = 1 << 25, "block 33554432");
    REFUSES(divided_op, attention.kv.here = (enum sl_kv_here)3, "part 3");
    REFUSES(divided_op, attention.kv.table = (const int32_t[1]){0};
            op.attention.kv.table_stride = 1, "divided at block 3");
    REFUSES(merge_op, merge.n_heads = 0, "0 heads");
    REFUSES(merge_op, merge.head_dim = 0, "of 0");
    REFUSES(merge_op, merge.head_dim = 6, "of 6");
    REFUSES(merge_op, merge.head_dim = 260, "of 260");
    struct sl_op unknown = {.kind = SL_OP_N_KINDS, .n_tokens = 1};
    struct sluice_error err = {0};
    assert_status(sl_op_validate(&unknown, &err), INTERNAL);
}

static void test_gated_heights(void **state)
{
    (void)state;
    struct sl_op op = linear_op();
    struct sluice_error err = {0};
    op.linear.activation = SL_ACT_SILU;
    assert_ok(sl_op_validate(&op, &err), err);
    op.linear.part[1].w.n_rows = 32;
    assert_status(sl_op_validate(&op, &err), INTERNAL);
}

static void test_scratch(void **state)
{
    (void)state;
    struct sl_op op = linear_op();
    assert_int_equal(sl_op_scratch_bytes(&op), 64 * 512 * 9 / 4); /* 5 tokens are padded to 64 */
    op.n_tokens = 65;
    assert_int_equal(sl_op_scratch_bytes(&op), 128 * 512 * 9 / 4);
    op = attention_op();
    const size_t rows = 4 * 8;
    assert_int_equal(sl_op_scratch_bytes(&op), SL_ATTN_MAX_SPLITS * rows * (64 + 2) * 4);
    op.n_tokens = SL_ATTN_SPLIT_TOKENS;
    const size_t most = sl_op_scratch_bytes(&op);
    assert_int_equal(most, SL_ATTN_MAX_SPLITS * SL_ATTN_SPLIT_TOKENS * 8 * (64 + 2) * 4);
    for (op.n_tokens = SL_ATTN_SPLIT_TOKENS + 1; op.n_tokens <= 4 * SL_ATTN_SPLIT_TOKENS;
         op.n_tokens++) {
        assert_in_range(sl_op_scratch_bytes(&op), most / 2, most);
    }
    op.n_tokens = 4 * SL_ATTN_SPLIT_TOKENS + 1;
    assert_int_equal(sl_op_scratch_bytes(&op), 0);
    op = norm_op();
    assert_int_equal(sl_op_scratch_bytes(&op), 0);
}

/* Blocks and rows of the cache, by table and without. */
static void test_kv_addresses(void **state)
{
    (void)state;
    const int32_t table[] = {4, 2, 9, 7};
    char *const base = (char *)0x10000; /* only computed with */
    struct sl_kv_view kv = {
        .data = base, .types = {SL_TYPE_Q8_0, SL_TYPE_Q4_0}, .n_kv_heads = 3, .head_dim = 64};
    const ptrdiff_t row = 2 * 34, value_row = 2 * 18;
    const ptrdiff_t block = 3 * 64 * (row + value_row);
    assert_int_equal(sl_kv_block_bytes(kv.types, 3, 64), block);
    assert_int_equal((char *)sl_kv_key(&kv, 0, 0, 0) - base, 0);
    assert_int_equal((char *)sl_kv_key(&kv, 0, 65, 2) - base, block + (2 * 64 + 1) * row);
    assert_int_equal((char *)sl_kv_value(&kv, 0, 65, 0) - base, block + 3 * 64 * row + value_row);
    assert_int_equal((char *)sl_kv_value(&kv, 0, 2, 1) - base, 3 * 64 * row + (64 + 2) * value_row);
    kv.table = table;
    kv.table_stride = 2;
    assert_int_equal((char *)sl_kv_key(&kv, 0, 63, 0) - base, 4 * block + 63 * row);
    assert_int_equal((char *)sl_kv_key(&kv, 1, 127, 1) - base, 7 * block + (64 + 63) * row);
    char *const later = (char *)0x90000000;
    kv.table = NULL;
    kv.n_first = 2;
    kv.later = later;
    assert_int_equal((char *)sl_kv_key(&kv, 0, 127, 1) - base, block + (64 + 63) * row);
    assert_int_equal((char *)sl_kv_key(&kv, 0, 128, 0) - later, 0);
    assert_int_equal((char *)sl_kv_value(&kv, 0, 192 + 5, 1) - later,
                     block + 3 * 64 * row + (64 + 5) * value_row);
}

static void test_kv_here(void **state)
{
    (void)state;
    struct sl_kv_view kv = {.n_first = 0};
    assert_true(sl_kv_is_here(&kv, 0) && sl_kv_is_here(&kv, INT32_MAX - 1));
    kv.n_first = 2;
    assert_true(sl_kv_is_here(&kv, 0) && sl_kv_is_here(&kv, 128));
    kv.here = SL_KV_FIRST;
    assert_true(sl_kv_is_here(&kv, 0) && sl_kv_is_here(&kv, 127) && !sl_kv_is_here(&kv, 128));
    kv.here = SL_KV_LATER;
    assert_true(!sl_kv_is_here(&kv, 0) && !sl_kv_is_here(&kv, 127) && sl_kv_is_here(&kv, 128));
}

/* Turning is a product with the matrix of signs (-1)^(bits that both indices have), over the root
 * of its size; done twice it is nothing. */
static void test_kv_turn(void **state)
{
    (void)state;
    float row[2 * SL_KV_TURN], turned[2 * SL_KV_TURN];
    for (int i = 0; i < 2 * SL_KV_TURN; i++) {
        row[i] = turned[i] = (float)((i * 37 + 11) % 23) - 10.5f;
    }
    sl_kv_turn(turned, 2 * SL_KV_TURN);
    for (int i = 0; i < 2 * SL_KV_TURN; i++) {
        double wanted = 0.0;
        for (int j = 0; j < SL_KV_TURN; j++) {
            const bool odd = __builtin_popcount((unsigned)(i % SL_KV_TURN & j)) % 2 != 0;
            wanted += (odd ? -1.0 : 1.0) * (double)row[i / SL_KV_TURN * SL_KV_TURN + j];
        }
        assert_float_equal(turned[i], wanted / sqrt((double)SL_KV_TURN), 1e-4);
    }
    sl_kv_turn(turned, 2 * SL_KV_TURN);
    for (int i = 0; i < 2 * SL_KV_TURN; i++) {
        assert_float_equal(turned[i], row[i], 1e-4);
    }
    assert_true(sl_kv_turns_keys((struct sl_kv_types){SL_TYPE_Q4_0, SL_TYPE_F16}));
    assert_false(sl_kv_turns_keys((struct sl_kv_types){SL_TYPE_Q8_0, SL_TYPE_Q4_0}));
}

/* ---- caches that are divided, by the reference ---- */

enum { DIM = 32, N_HEADS = 2, N_BLOCKS = 4, N_POSITIONS = N_BLOCKS * SL_KV_BLOCK };

/* A cache of one head, which the reference takes in floats too: both sides, apart. */
struct divided {
    struct sl_kv_view kv;
    float first[N_BLOCKS][2][SL_KV_BLOCK][DIM]; /* of each block keys and values */
    float later[N_BLOCKS][2][SL_KV_BLOCK][DIM];
};

static void divided_init(struct divided *d, int32_t n_first)
{
    memset(d, 0, sizeof(*d));
    d->kv = (struct sl_kv_view){.data = d->first,
                                .types = {SL_TYPE_F32, SL_TYPE_F32},
                                .n_kv_heads = 1,
                                .head_dim = DIM,
                                .n_first = n_first,
                                .later = d->later};
}

/* The same with what is not here out of reach. */
static struct sl_kv_view part_of(const struct divided *d, enum sl_kv_here here)
{
    struct sl_kv_view kv = d->kv;
    kv.here = here;
    kv.data = here == SL_KV_LATER ? NULL : kv.data;
    kv.later = here == SL_KV_FIRST ? NULL : kv.later;
    return kv;
}

static void test_divided_store(void **state)
{
    (void)state;
    struct divided d;
    divided_init(&d, 2);
    const int32_t pos[] = {127, 128, 5, 255};
    float k[4][DIM], v[4][DIM];
    for (int i = 0; i < 4 * DIM; i++) {
        k[i / DIM][i % DIM] = (float)(1 + i / DIM);
        v[i / DIM][i % DIM] = (float)(-1 - i / DIM);
    }
    struct sl_op op = {.kind = SL_OP_KV_STORE, .n_tokens = 4};
    op.kv_store =
        (struct sl_op_kv_store){.k = k[0], .v = v[0], .pos = pos, .kv = part_of(&d, SL_KV_LATER)};
    sl_op_run_ref(&op);
    assert_float_equal(d.later[0][0][0][0], 2.0f, 0.0f);
    assert_float_equal(d.later[0][1][0][DIM - 1], -2.0f, 0.0f);
    assert_float_equal(d.later[1][0][63][7], 4.0f, 0.0f);
    assert_float_equal(d.first[1][0][63][0], 0.0f, 0.0f);
    op.kv_store.kv = part_of(&d, SL_KV_FIRST);
    sl_op_run_ref(&op);
    assert_float_equal(d.first[1][0][63][0], 1.0f, 0.0f);
    assert_float_equal(d.first[0][1][5][3], -3.0f, 0.0f);
    assert_float_equal(d.first[0][0][0][0], 0.0f, 0.0f);
}

/* All logits are the same, and a value says its position: what comes out is the mean of the
 * positions that are seen, and lse the logit plus the logarithm of their number. */
static void test_divided_attention(void **state)
{
    (void)state;
    static const struct {
        enum sl_kv_here here;
        int32_t pos, window, first, last; /* seen: first .. last */
        float softcap;
        bool sink;
    } cases[] = {
        {SL_KV_ALL, 200, 0, 0, 200, 0.0f, false},      {SL_KV_FIRST, 200, 0, 0, 127, 0.0f, false},
        {SL_KV_LATER, 200, 0, 128, 200, 0.0f, false},  {SL_KV_FIRST, 60, 0, 0, 60, 0.0f, true},
        {SL_KV_LATER, 127, 0, 0, -1, 0.0f, false},     {SL_KV_LATER, 127, 0, 0, -1, 0.0f, true},
        {SL_KV_LATER, 128, 0, 128, 128, 3.0f, false},  {SL_KV_FIRST, 150, 30, 121, 127, 3.0f, true},
        {SL_KV_FIRST, 150, 23, 0, -1, 0.0f, false}, /* the window begins at 128 */
        {SL_KV_LATER, 150, 30, 128, 150, 0.0f, false},
    };
    const double logit = 2.5, sink = 1.25;
    struct divided d;
    divided_init(&d, 2);
    for (int32_t p = 0; p < N_POSITIONS; p++) {
        for (int i = 0; i < DIM; i++) {
            ((float *)sl_kv_key(&d.kv, 0, p, 0))[i] = 1.0f;
            ((float *)sl_kv_value(&d.kv, 0, p, 0))[i] = (float)p;
        }
    }
    float q[N_HEADS][DIM], y[N_HEADS][DIM], lse[N_HEADS];
    const float sinks[N_HEADS] = {-INFINITY, (float)sink}; /* head 0 has none */
    for (int i = 0; i < N_HEADS * DIM; i++) {
        q[i / DIM][i % DIM] = 1.0f;
    }
    for (size_t c = 0; c < sizeof(cases) / sizeof(cases[0]); c++) {
        struct sl_op op = {.kind = SL_OP_ATTENTION, .n_tokens = 1};
        op.attention = (struct sl_op_attention){.q = q[0],
                                                .y = y[0],
                                                .pos = &cases[c].pos,
                                                .sinks = cases[c].sink ? sinks : NULL,
                                                .lse = lse,
                                                .kv = part_of(&d, cases[c].here),
                                                .n_heads = N_HEADS,
                                                .n_kv_max = cases[c].pos + 1,
                                                .window = cases[c].window,
                                                .scale = (float)(logit / DIM),
                                                .softcap = cases[c].softcap};
        sl_op_run_ref(&op);
        const int32_t n = cases[c].last - cases[c].first + 1;
        const double cap = (double)cases[c].softcap;
        const double each = exp(cap > 0.0 ? cap * tanh(logit / cap) : logit);
        for (int h = 0; h < N_HEADS; h++) {
            const double sum = n * each + (cases[c].sink ? exp((double)sinks[h]) : 0.0);
            const double mean =
                n > 0 ? n * each * (cases[c].first + cases[c].last) / 2.0 / sum : 0.0;
            assert_float_equal(y[h][0], mean, 1e-4);
            assert_float_equal(y[h][DIM - 1], mean, 1e-4);
            if (sum > 0.0) {
                assert_float_equal(lse[h], log(sum), 1e-5);
            } else {
                assert_true(isinf(lse[h]) && lse[h] < 0.0f);
            }
        }
    }
}

/* With a random cache: the parts, merged in either order, are attention over all of it. */
static void test_divided_merged(void **state)
{
    (void)state;
    enum { N_TOKENS = 5 };
    const int32_t pos[N_TOKENS] = {3, 63, 64, 65, 255};
    struct divided d;
    uint32_t random = 1;
    for (int window = 0; window <= 100; window += 100) {
        divided_init(&d, 1);
        float q[N_TOKENS * N_HEADS * DIM];
        float y[3][N_TOKENS * N_HEADS * DIM], lse[3][N_TOKENS * N_HEADS];
        for (int32_t i = 0; i < N_POSITIONS * DIM; i++) {
            random = random * 1664525u + 1013904223u;
            ((float *)sl_kv_key(&d.kv, 0, i / DIM, 0))[i % DIM] = (float)(random >> 20) / 2048 - 1;
            ((float *)sl_kv_value(&d.kv, 0, i / DIM, 0))[i % DIM] = (float)(random & 4095);
        }
        for (int32_t i = 0; i < N_TOKENS * N_HEADS * DIM; i++) {
            random = random * 1664525u + 1013904223u;
            q[i] = (float)(random >> 20) / 1024 - 2;
        }
        struct sl_op op = {.kind = SL_OP_ATTENTION, .n_tokens = N_TOKENS};
        op.attention = (struct sl_op_attention){.q = q,
                                                .pos = pos,
                                                .n_heads = N_HEADS,
                                                .n_kv_max = N_POSITIONS,
                                                .window = window,
                                                .scale = 0.5f};
        for (int part = SL_KV_ALL; part <= SL_KV_LATER; part++) {
            op.attention.kv = part_of(&d, (enum sl_kv_here)part);
            op.attention.y = y[part];
            op.attention.lse = lse[part];
            sl_op_run_ref(&op);
        }
        const int into = window == 0 ? SL_KV_FIRST : SL_KV_LATER;
        const int from = SL_KV_FIRST + SL_KV_LATER - into;
        op = (struct sl_op){.kind = SL_OP_MERGE, .n_tokens = N_TOKENS};
        op.merge = (struct sl_op_merge){.x = y[from],
                                        .x_lse = lse[from],
                                        .y = y[into],
                                        .y_lse = lse[into],
                                        .n_heads = N_HEADS,
                                        .head_dim = DIM};
        sl_op_run_ref(&op);
        for (int32_t i = 0; i < N_TOKENS * N_HEADS * DIM; i++) {
            assert_float_equal(y[into][i], y[SL_KV_ALL][i], 1e-2); /* of values up to 4095 */
        }
    }
}

/* Rows with weights 1 and 3, one side empty, the other, both, and far apart. */
static void test_merge(void **state)
{
    (void)state;
    enum { N = 5 };
    float y[N][4], x[N][4];
    const float nothing = -INFINITY;
    const float y_lse[N] = {20.0f, nothing, 7.0f, nothing, 500.0f};
    const float x_lse[N] = {20.0f + logf(3.0f), 7.0f, nothing, nothing, -500.0f};
    const float wanted[N] = {7.0f, 8.0f, 4.0f, 0.0f, 4.0f};
    for (int i = 0; i < 4 * N; i++) {
        y[i / 4][i % 4] = 4.0f * (float)(i % 4);
        x[i / 4][i % 4] = 8.0f * (float)(i % 4);
    }
    struct sl_op op = {.kind = SL_OP_MERGE, .n_tokens = N};
    op.merge = (struct sl_op_merge){
        .x = x[0], .x_lse = x_lse, .y = y[0], .y_lse = y_lse, .n_heads = 1, .head_dim = 4};
    sl_op_run_ref(&op);
    for (int i = 0; i < 4 * N; i++) {
        assert_float_equal(y[i / 4][i % 4], wanted[i / 4] * (float)(i % 4), 1e-5);
    }
}

/* Experts 0, 2, 4, 5 and 6 are missing, with 1, 3, 2, 2 and 1 tokens. */
static void test_divide(void **state)
{
    (void)state;
    const int32_t ids[] = {2, 1, 4, 5, 2, 3, 5, 0, 2, 6, 4, 1};
    const uint8_t at_hand[] = {0, 1, 0, 1, 0, 0, 0};
    static const struct {
        int32_t share, mine[12];
    } cases[] = {
        {0, {-1, 1, -1, -1, -1, 3, -1, -1, -1, -1, -1, 1}},
        {52, {2, 1, -1, -1, 2, 3, -1, -1, 2, -1, -1, 1}}, /* a fifth: the one with most */
        {103, {2, 1, 4, -1, 2, 3, -1, -1, 2, -1, 4, 1}},  /* of equals the lower */
        {154, {2, 1, 4, 5, 2, 3, 5, -1, 2, -1, 4, 1}},    /* three fifths */
        {SL_DIVIDE_ALL, {2, 1, 4, 5, 2, 3, 5, 0, 2, 6, 4, 1}},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        int32_t mine[12], uses[7] = {1};
        const struct sl_op_divide op = {ids, at_hand, mine, uses, 2, 7, cases[i].share};
        sl_op_divide_run(&op, 6);
        assert_memory_equal(mine, cases[i].mine, sizeof(mine));
        assert_memory_equal(uses, ((int32_t[7]){2, 2, 3, 1, 2, 2, 1}), sizeof(uses));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_valid),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_gated_heights),
        cmocka_unit_test(test_scratch),
        cmocka_unit_test(test_kv_addresses),
        cmocka_unit_test(test_kv_turn),
        cmocka_unit_test(test_kv_here),
        cmocka_unit_test(test_divided_store),
        cmocka_unit_test(test_divided_attention),
        cmocka_unit_test(test_divided_merged),
        cmocka_unit_test(test_merge),
        cmocka_unit_test(test_divide),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
