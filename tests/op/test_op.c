/* SPDX-License-Identifier: Apache-2.0
 *
 * What is known of operators from their shapes: valid ones pass, each wrong field is refused by
 * name, and sizes are what op.h promises.
 */
#include <math.h>
#include <stdio.h>

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

static void test_valid(void **state)
{
    (void)state;
    struct sl_op ops[] = {norm_op(), linear_op(), rope_op(), attention_op(), kv_store_op()};
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
        cmocka_unit_test(test_valid),         cmocka_unit_test(test_refused),
        cmocka_unit_test(test_gated_heights), cmocka_unit_test(test_scratch),
        cmocka_unit_test(test_kv_addresses),  cmocka_unit_test(test_kv_turn),
        cmocka_unit_test(test_divide),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
