/* SPDX-License-Identifier: Apache-2.0
 *
 * Second part of the list: every operator, in the shapes and types of real models and some that
 * are only hostile, against the scalar reference.
 *
 * Bounds are on the Euclidean norm of the difference over that of the reference. Where inputs are
 * packed to 8 bits a block of 32 normal numbers loses about 0.5 % of its norm, a block with one
 * large number at most 1.3 %; f16 inputs lose 0.03 %, bf16 ones (for BF16 weights) 0.12 %.
 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "device/device_tests.h"
#include "device/op_case.h"
#include "op/kv.h"
#include "test.h"

#define BOUND_PACKED 0.015
#define BOUND_GATED 0.03 /* two products, multiplied */
#define BOUND_F16 0.001
#define BOUND_BF16 0.004
#define BOUND_NORM 1e-5
#define BOUND_ROPE 5e-4 /* angles up to some thousand radians, as float */

static struct sl_device *dev;

static bool is_packed(enum sl_type type)
{
    return type != SL_TYPE_F32 && type != SL_TYPE_F16 && type != SL_TYPE_BF16;
}

static double linear_bound(enum sl_type type)
{
    if (type == SL_TYPE_BF16) {
        return BOUND_BF16;
    }
    return is_packed(type) ? BOUND_PACKED : BOUND_F16;
}

/* Append a part to the op; returns its output. */
static float *add_part(struct op_case *c, struct sl_op *op, enum sl_type type, int64_t n_rows,
                       int64_t n_cols, bool bias)
{
    const int i = op->linear.n_parts++;
    op->linear.part[i].w = case_matrix(c, type, n_rows, n_cols);
    op->linear.part[i].bias = bias ? case_floats(c, (size_t)n_rows, 0.3f) : NULL;
    op->linear.part[i].y = case_floats(c, (size_t)op->n_tokens * (size_t)n_rows, 1.0f);
    return op->linear.part[i].y;
}

static void check_linear(enum sl_type type, int n_tokens, int64_t n_rows, int64_t n_cols, bool bias,
                         bool accumulate)
{
    struct op_case c;
    case_init(&c, (uint64_t)(n_tokens * 131 + n_rows * 17 + n_cols), "linear %s %d x [%d, %d]%s%s",
              sl_type_name((uint32_t)type), n_tokens, (int)n_rows, (int)n_cols, bias ? " bias" : "",
              accumulate ? " accumulate" : "");
    struct sl_op *op = case_op(&c, SL_OP_LINEAR, n_tokens);
    op->linear.x = case_floats(&c, (size_t)n_tokens * (size_t)n_cols, 1.0f);
    op->linear.accumulate = accumulate;
    const float *y = add_part(&c, op, type, n_rows, n_cols, bias);
    case_output(&c, CASE_FLOATS, y, (size_t)n_tokens * (size_t)n_rows * sizeof *y, SL_TYPE_F32,
                linear_bound(type));
    case_check(&c, dev, false, "linear");
    case_finish(&c);
}

static void test_linear(void **state)
{
    (void)state;
    for (uint32_t id = 0; id < SL_TYPE_N; id++) {
        const struct sl_type_traits *traits = sl_type_traits(id);
        if (!traits || !traits->computes) {
            continue;
        }
        const enum sl_type type = (enum sl_type)id;
        check_linear(type, 1, 64, 512, false, false);
        check_linear(type, 1, 33, 1024, true, true);
        check_linear(type, 3, 40, 256, true, false);
        check_linear(type, 19, 17, 512, false, true);
        check_linear(type, 70, 130, 256, false, false);
        if (traits->block_items <= 32) { /* rows that are no multiple of 256, as in small models */
            check_linear(type, 1, 48, 96, false, false);
            check_linear(type, 5, 9, 576, true, false);
            check_linear(type, 33, 20, 160, false, true);
        }
        if (traits->block_items == 1) {
            check_linear(type, 2, 5, 37, false, false);
        }
    }
    check_linear(SL_TYPE_Q4_K, 1, 1, 256, false, false);
    check_linear(SL_TYPE_Q8_0, 130, 1, 64, false, false);
    check_linear(SL_TYPE_Q6_K, 1, 2000, 256, false, false);
}

/* Several products of one input; types may be mixed, as in real files (Q4_K with Q6_K values). */
static void test_linear_parts(void **state)
{
    (void)state;
    const enum sl_type mixes[][4] = {
        {SL_TYPE_Q4_K, SL_TYPE_Q4_K, SL_TYPE_Q6_K, SL_TYPE_Q4_K},
        {SL_TYPE_Q8_0, SL_TYPE_F16, SL_TYPE_Q4_0, SL_TYPE_F32},
        {SL_TYPE_Q5_0, SL_TYPE_Q5_K, SL_TYPE_BF16, SL_TYPE_Q3_K},
    };
    for (size_t m = 0; m < sizeof mixes / sizeof mixes[0]; m++) {
        for (int n_tokens = 1; n_tokens <= 37; n_tokens += 12) {
            for (int n_parts = 2; n_parts <= 4; n_parts++) {
                struct op_case c;
                case_init(&c, m * 100 + (uint64_t)n_tokens, "linear mix %zu, %d parts, %d tokens",
                          m, n_parts, n_tokens);
                struct sl_op *op = case_op(&c, SL_OP_LINEAR, n_tokens);
                op->linear.x = case_floats(&c, (size_t)n_tokens * 512, 1.0f);
                for (int i = 0; i < n_parts; i++) {
                    const int64_t n_rows = 24 + i * 21;
                    const float *y = add_part(&c, op, mixes[m][i], n_rows, 512, i % 2 == 1);
                    /* Types share one packed input, so the coarser bound holds for all. */
                    case_output(&c, CASE_FLOATS, y, (size_t)(n_tokens * n_rows) * sizeof *y,
                                SL_TYPE_F32, BOUND_PACKED);
                }
                case_check(&c, dev, false, "linear");
                case_finish(&c);
            }
        }
    }
}

static void test_linear_gated(void **state)
{
    (void)state;
    const enum sl_type types[][2] = {{SL_TYPE_Q4_K, SL_TYPE_Q4_K},
                                     {SL_TYPE_Q4_1, SL_TYPE_Q4_1},
                                     {SL_TYPE_F16},
                                     {SL_TYPE_Q8_0, SL_TYPE_Q6_K}};
    for (size_t t = 0; t < sizeof types / sizeof types[0]; t++) {
        for (int n_tokens = 1; n_tokens <= 41; n_tokens += 20) {
            for (int activation = SL_ACT_SILU; activation <= SL_ACT_GELU_TANH; activation++) {
                struct op_case c;
                case_init(&c, t + (uint64_t)n_tokens, "linear gated %d, %s, %d tokens", activation,
                          sl_type_name((uint32_t)types[t][0]), n_tokens);
                struct sl_op *op = case_op(&c, SL_OP_LINEAR, n_tokens);
                op->linear.x = case_floats(&c, (size_t)n_tokens * 256, 1.0f);
                op->linear.activation = (enum sl_activation)activation;
                const size_t bytes = (size_t)n_tokens * 77 * sizeof(float);
                const float *y = add_part(&c, op, types[t][0], 77, 256, t == 2);
                const float *up = add_part(&c, op, types[t][1], 77, 256, t == 2);
                case_output(&c, CASE_FLOATS, y, bytes, SL_TYPE_F32,
                            is_packed(types[t][0]) ? BOUND_GATED : 2 * BOUND_F16);
                case_output(&c, CASE_UNDEFINED, up, bytes, SL_TYPE_F32, 0);
                case_check(&c, dev, false, "linear");
                case_finish(&c);
            }
        }
    }
}

/* Token counts that large tiles are for, with tiles that are not full. */
static void test_linear_many(void **state)
{
    (void)state;
    const enum sl_type types[] = {SL_TYPE_F16,  SL_TYPE_BF16, SL_TYPE_Q4_0, SL_TYPE_Q5_1,
                                  SL_TYPE_Q8_0, SL_TYPE_Q3_K, SL_TYPE_Q4_K, SL_TYPE_Q6_K};
    for (size_t t = 0; t < sizeof types / sizeof types[0]; t++) {
        check_linear(types[t], 300, 259, 768, true, true); /* rows without a second */
        check_linear(types[t], 130, 640, 512, false, true);
        check_linear(types[t], 513, 130, 256, true, false);
    }
    check_linear(SL_TYPE_F16, 100, 200, 72, true, true); /* depth: no multiple of a step */
    check_linear(SL_TYPE_BF16, 257, 64, 200, false, false);
    for (int gated = 0; gated < 2; gated++) {
        for (size_t t = 0; t < sizeof types / sizeof types[0]; t++) {
            const int n_tokens = 290;
            const int n_parts = gated ? 2 : 3;
            struct op_case c;
            case_init(&c, t, "linear %s, %d parts of %s, %d tokens", gated ? "gated" : "plain",
                      n_parts, sl_type_name((uint32_t)types[t]), n_tokens);
            struct sl_op *op = case_op(&c, SL_OP_LINEAR, n_tokens);
            op->linear.x = case_floats(&c, (size_t)n_tokens * 512, 1.0f);
            op->linear.activation = gated ? SL_ACT_SILU : SL_ACT_NONE;
            for (int i = 0; i < n_parts; i++) {
                const int64_t n_rows = gated ? 146 : 100 + 70 * i;
                const float *y = add_part(&c, op, types[t], n_rows, 512, i < 2);
                const size_t bytes = (size_t)n_tokens * (size_t)n_rows * sizeof *y;
                const double bound = linear_bound(types[t]) * (gated ? 2.0 : 1.0);
                case_output(&c, gated && i ? CASE_UNDEFINED : CASE_FLOATS, y, bytes, SL_TYPE_F32,
                            bound);
            }
            case_check(&c, dev, false, "linear");
            case_finish(&c);
        }
    }
}

static void check_norm(int n_tokens, int rows_per_token, int n, bool weight, bool accumulate,
                       bool in_place, float scale)
{
    struct op_case c;
    case_init(&c, (uint64_t)(n_tokens + n), "norm %d x %d x %d%s%s%s scale %g", n_tokens,
              rows_per_token, n, weight ? " weight" : "", accumulate ? " accumulate" : "",
              in_place ? " in place" : "", (double)scale);
    struct sl_op *op = case_op(&c, SL_OP_NORM, n_tokens);
    const size_t n_items = (size_t)n_tokens * (size_t)rows_per_token * (size_t)n;
    float *x = case_floats(&c, n_items, scale);
    op->norm = (struct sl_op_norm){.x = x,
                                   .weight = weight ? case_floats(&c, (size_t)n, 1.0f) : NULL,
                                   .y = in_place ? x : case_floats(&c, n_items, 1.0f),
                                   .n = n,
                                   .rows_per_token = rows_per_token,
                                   .eps = 1e-6f,
                                   .accumulate = accumulate};
    case_output(&c, CASE_FLOATS, op->norm.y, n_items * sizeof(float), SL_TYPE_F32, BOUND_NORM);
    case_check(&c, dev, false, "norm");
    case_finish(&c);
}

static void test_norm(void **state)
{
    (void)state;
    check_norm(1, 1, 576, true, false, false, 1.0f);
    check_norm(7, 1, 2048, true, false, true, 1.0f);
    check_norm(33, 1, 640, true, true, false, 1.0f);
    check_norm(4, 8, 128, true, false, true, 1.0f); /* heads */
    check_norm(5, 3, 64, false, false, false, 1.0f);
    check_norm(2, 1, 37, true, false, false, 1.0f);
    check_norm(1, 1, 1, false, false, false, 1.0f);
    check_norm(3, 1, 512, true, false, false, 1e4f);
    check_norm(3, 1, 512, true, false, false, 0.0f); /* eps keeps it finite */
    check_norm(3, 1, 512, true, true, false, 1e-5f);
}

static void check_add(int n_tokens, int n)
{
    struct op_case c;
    case_init(&c, (uint64_t)(n_tokens + n), "add %d x %d", n_tokens, n);
    struct sl_op *op = case_op(&c, SL_OP_ADD, n_tokens);
    const size_t n_items = (size_t)n_tokens * (size_t)n;
    op->add = (struct sl_op_add){
        .x = case_floats(&c, n_items, 1.0f), .y = case_floats(&c, n_items, 1.0f), .n = n};
    case_output(&c, CASE_FLOATS, op->add.y, n_items * sizeof(float), SL_TYPE_F32, 0.0);
    case_check(&c, dev, false, "add");
    case_finish(&c);
}

static void test_add(void **state)
{
    (void)state;
    check_add(1, 2048);
    check_add(3, 37);
    check_add(65, 576);
}

static void check_rope(int n_tokens, int n_heads, int head_dim, int n_rot, bool neox,
                       int32_t first_pos, float magnitude)
{
    struct op_case c;
    case_init(&c, (uint64_t)(n_tokens * n_heads), "rope %d x %d x %d, n_rot %d%s, from %d",
              n_tokens, n_heads, head_dim, n_rot, neox ? " neox" : "", first_pos);
    struct sl_op *op = case_op(&c, SL_OP_ROPE, n_tokens);
    const size_t n = (size_t)n_tokens * (size_t)n_heads * (size_t)head_dim;
    float *freq = case_room(&c, (size_t)n_rot / 2 * sizeof *freq);
    for (int i = 0; i < n_rot / 2; i++) {
        freq[i] = powf(10000.0f, -2.0f * (float)i / (float)n_rot);
    }
    op->rope = (struct sl_op_rope){.x = case_floats(&c, n, 1.0f),
                                   .pos = case_positions(&c, n_tokens, first_pos),
                                   .freq = freq,
                                   .n_heads = n_heads,
                                   .head_dim = head_dim,
                                   .n_rot = n_rot,
                                   .magnitude = magnitude,
                                   .neox = neox};
    case_output(&c, CASE_FLOATS, op->rope.x, n * sizeof(float), SL_TYPE_F32, BOUND_ROPE);
    case_check(&c, dev, false, "rope");
    case_finish(&c);
}

static void test_rope(void **state)
{
    (void)state;
    for (int neox = 0; neox < 2; neox++) {
        check_rope(1, 9, 64, 64, neox, 0, 1.0f);
        check_rope(1, 9, 64, 64, neox, 5000, 1.0f);
        check_rope(20, 3, 128, 128, neox, 100, 1.0f);
        check_rope(5, 4, 256, 256, neox, 31, 1.2f);
        check_rope(6, 2, 96, 32, neox, 7, 1.0f); /* the rest of each head stays */
        check_rope(3, 1, 80, 2, neox, 2, 0.5f);
    }
}

/* Experts where a table says, in another order than they are numbered, and one of them nowhere. */
static void scatter(struct op_case *c, struct sl_experts_matrix *m, int32_t n)
{
    const size_t bytes = (size_t)m->n_rows * sl_type_row_bytes(m->type, m->n_cols);
    const void **table = case_room(c, (size_t)n * sizeof *table);
    for (int32_t e = 0; e < n; e++) {
        table[e] = e == n / 2 ? NULL : (const char *)m->data + (size_t)(n - 1 - e) * bytes;
    }
    m->table = table;
    m->data = NULL;
}

/* Norm, the choice of experts and the products of the chosen ones, in one list: each op reads what
 * the ones before have made. */
static void check_experts(enum sl_gating gating, enum sl_type type, int n_tokens, int n_experts,
                          int n_used, int first, bool with_biases, bool with_tables)
{
    enum { EMBD = 1024, FF = 160 };
    struct op_case c;
    case_init(&c, (uint64_t)(n_tokens + n_experts), "experts %s, gating %d, %d tokens, %d of %d",
              sl_type_name((uint32_t)type), (int)gating, n_tokens, n_used, n_experts);
    const size_t n = (size_t)n_tokens;
    float *x = case_floats(&c, n * EMBD, 1.0f);
    int32_t *ids = case_positions(&c, n_tokens * n_used, 0);
    float *weights = case_floats(&c, n * (size_t)n_used, 1.0f);
    struct sl_op *op = case_op(&c, SL_OP_NORM, n_tokens);
    op->norm = (struct sl_op_norm){.x = case_floats(&c, n * EMBD, 2.0f),
                                   .weight = case_floats(&c, EMBD, 1.0f),
                                   .y = x,
                                   .n = EMBD,
                                   .rows_per_token = 1,
                                   .eps = 1e-5f};
    case_output(&c, CASE_FLOATS, x, n * EMBD * sizeof *x, SL_TYPE_F32, BOUND_NORM);
    op = case_op(&c, SL_OP_ROUTER, n_tokens);
    op->router = (struct sl_op_router){
        .x = x,
        .w = case_matrix(&c, SL_TYPE_F32, n_experts, EMBD),
        .bias = with_biases ? case_floats(&c, (size_t)n_experts, 0.2f) : NULL,
        .selection_bias = with_biases ? case_floats(&c, (size_t)n_experts, 0.2f) : NULL,
        .ids = ids,
        .weights = weights,
        .n_used = n_used,
        .gating = gating,
        .normalize = gating != SL_GATING_SOFTMAX,
        .scale = 1.5f};
    case_output(&c, CASE_EXACT, ids, n * (size_t)n_used * sizeof *ids, SL_TYPE_F32, 0);
    case_output(&c, CASE_FLOATS, weights, n * (size_t)n_used * sizeof *weights, SL_TYPE_F32,
                BOUND_F16);

    op = case_op(&c, SL_OP_EXPERTS, n_tokens);
    const int n_here = n_experts - first; /* the rest is elsewhere: left out of the sum */
    const struct sl_matrix gate = case_matrix(&c, type, (int64_t)n_here * FF, EMBD);
    const struct sl_matrix up = case_matrix(&c, type, (int64_t)n_here * FF, EMBD);
    const struct sl_matrix down = case_matrix(&c, SL_TYPE_Q8_0, (int64_t)n_here * EMBD, FF);
    const size_t n_bias = with_biases ? (size_t)n_here : 0;
    op->experts = (struct sl_op_experts){
        .x = x,
        .y = case_floats(&c, n * EMBD, 1.0f),
        .ids = ids,
        .weights = weights,
        .n_used = n_used,
        .first = first,
        .n = n_here,
        .gate = {.data = gate.data, .type = type, .n_rows = FF, .n_cols = EMBD},
        .up = {.data = up.data, .type = type, .n_rows = FF, .n_cols = EMBD},
        .down = {.data = down.data, .type = SL_TYPE_Q8_0, .n_rows = EMBD, .n_cols = FF},
        .activation = SL_ACT_SILU,
        .accumulate = with_biases};
    if (n_bias > 0) {
        op->experts.gate.bias = case_floats(&c, n_bias * FF, 0.2f);
        op->experts.up.bias = case_floats(&c, n_bias * FF, 0.2f);
        op->experts.down.bias = case_floats(&c, n_bias * EMBD, 0.2f);
    }
    if (with_tables) {
        scatter(&c, &op->experts.gate, n_here);
        scatter(&c, &op->experts.up, n_here);
        scatter(&c, &op->experts.down, n_here);
    }
    case_output(&c, CASE_FLOATS, op->experts.y, n * EMBD * sizeof(float), SL_TYPE_F32, BOUND_GATED);
    case_check(&c, dev, dev->kind != SL_DEVICE_SIM, "router");
    case_finish(&c);
}

static void test_experts(void **state)
{
    (void)state;
    for (int gating = SL_GATING_SOFTMAX; gating <= SL_GATING_SOFTMAX_CHOSEN; gating++) {
        check_experts((enum sl_gating)gating, SL_TYPE_Q4_K, 1, 16, 4, 0, false, false);
        check_experts((enum sl_gating)gating, SL_TYPE_Q4_K, 7, 8, 2, 3, true, true);
        check_experts((enum sl_gating)gating, SL_TYPE_MXFP4, 40, 20, 3, 0, true, false);
    }
    check_experts(SL_GATING_SOFTMAX, SL_TYPE_F16, 3, 3, 1, 2, false, false);
    check_experts(SL_GATING_SIGMOID, SL_TYPE_Q6_K, 90, 5, 5, 0, false, true);
    check_experts(SL_GATING_SOFTMAX, SL_TYPE_Q4_0, 1, 16, 8, 0, false, true);
    for (int n_tokens = 2; n_tokens <= 12; n_tokens += 2) {
        check_experts(SL_GATING_SOFTMAX, SL_TYPE_Q8_0, n_tokens, 32, 8, 0, true, false);
    }
}

/* The ops of a whole attention half in one list: each reads what the one before wrote. */
static void check_layer(int n_tokens, int first_pos, bool normed_heads, enum sl_type type,
                        int n_first, enum sl_kv_here here)
{
    enum { EMBD = 256, HEADS = 4, KV_HEADS = 2, DIM = 64 };
    struct op_case c;
    case_init(&c, (uint64_t)n_tokens, "layer of %d tokens from %d%s, %s, divided at %d, %d",
              n_tokens, first_pos, normed_heads ? ", heads normed" : "",
              sl_type_name((uint32_t)type), n_first, (int)here);
    const size_t n = (size_t)n_tokens;
    const int n_kv = first_pos + n_tokens;
    float *x = case_floats(&c, n * EMBD, 1.0f);
    float *normed = case_floats(&c, n * EMBD, 1.0f);
    float *mixed = case_floats(&c, n * HEADS * DIM, 1.0f);
    float *freq = case_room(&c, DIM / 2 * sizeof *freq);
    for (int i = 0; i < DIM / 2; i++) {
        freq[i] = powf(10000.0f, -2.0f * (float)i / DIM);
    }
    const int32_t *pos = case_positions(&c, n_tokens, first_pos);
    const int n_blocks = (n_kv + SL_KV_BLOCK - 1) / SL_KV_BLOCK;
    const struct sl_kv_types f16 = {SL_TYPE_F16, SL_TYPE_F16};
    const struct sl_kv_view kv =
        n_first > 0 ? case_divided_cache(&c, f16, KV_HEADS, DIM, n_blocks, n_first, here)
                    : case_cache(&c, f16, KV_HEADS, DIM, 1, n_blocks, true);
    if (first_pos > 0) {
        case_fill_cache(&c, &kv, 0, first_pos);
    }

    struct sl_op *op = case_op(&c, SL_OP_NORM, n_tokens);
    op->norm = (struct sl_op_norm){.x = x,
                                   .weight = case_floats(&c, EMBD, 1.0f),
                                   .y = normed,
                                   .n = EMBD,
                                   .rows_per_token = 1,
                                   .eps = 1e-5f};
    op = case_op(&c, SL_OP_LINEAR, n_tokens);
    op->linear.x = normed;
    float *q = add_part(&c, op, type, (int64_t)HEADS * DIM, EMBD, false);
    float *k = add_part(&c, op, type, (int64_t)KV_HEADS * DIM, EMBD, false);
    float *v = add_part(&c, op, SL_TYPE_Q6_K, (int64_t)KV_HEADS * DIM, EMBD, false);
    for (int side = 0; side < 2 && normed_heads; side++) {
        op = case_op(&c, SL_OP_NORM, n_tokens);
        op->norm = (struct sl_op_norm){.x = side ? k : q,
                                       .weight = case_floats(&c, DIM, 1.0f),
                                       .y = side ? k : q,
                                       .n = DIM,
                                       .rows_per_token = side ? KV_HEADS : HEADS,
                                       .eps = 1e-6f};
    }
    const struct sl_op_rope rope = {
        .pos = pos, .freq = freq, .head_dim = DIM, .n_rot = DIM, .magnitude = 1.0f, .neox = true};
    op = case_op(&c, SL_OP_ROPE, n_tokens);
    op->rope = rope;
    op->rope.x = q;
    op->rope.n_heads = HEADS;
    op = case_op(&c, SL_OP_ROPE, n_tokens);
    op->rope = rope;
    op->rope.x = k;
    op->rope.n_heads = KV_HEADS;
    op = case_op(&c, SL_OP_KV_STORE, n_tokens);
    op->kv_store = (struct sl_op_kv_store){.k = k, .v = v, .pos = pos, .kv = kv};
    op = case_op(&c, SL_OP_ATTENTION, n_tokens);
    op->attention = (struct sl_op_attention){.q = q,
                                             .y = mixed,
                                             .pos = pos,
                                             .kv = kv,
                                             .n_heads = HEADS,
                                             .n_kv_max = n_kv,
                                             .scale = 0.125f};
    op = case_op(&c, SL_OP_LINEAR, n_tokens);
    op->linear.x = mixed;
    op->linear.accumulate = true;
    op->linear.n_parts = 1;
    op->linear.part[0].w = case_matrix(&c, type, EMBD, (int64_t)HEADS * DIM);
    op->linear.part[0].y = x;

    /* Errors of packed inputs add up along the list. */
    case_output(&c, CASE_FLOATS, x, n * EMBD * sizeof *x, SL_TYPE_F32, 2 * BOUND_PACKED);
    case_output(&c, CASE_FLOATS, normed, n * EMBD * sizeof *x, SL_TYPE_F32, BOUND_NORM);
    case_output(&c, CASE_FLOATS, mixed, n * HEADS * DIM * sizeof *x, SL_TYPE_F32, 4 * BOUND_PACKED);
    case_output(&c, CASE_FLOATS, q, n * HEADS * DIM * sizeof *x, SL_TYPE_F32, BOUND_PACKED);
    case_output(&c, CASE_FLOATS, k, n * KV_HEADS * DIM * sizeof *x, SL_TYPE_F32, BOUND_PACKED);
    case_output(&c, CASE_FLOATS, v, n * KV_HEADS * DIM * sizeof *x, SL_TYPE_F32, BOUND_PACKED);
    case_output_cache(&c, &kv, n_blocks, BOUND_PACKED);
    case_check(&c, dev, false, "layer");
    case_finish(&c);
}

static void test_layer(void **state)
{
    (void)state;
    check_layer(1, 0, false, SL_TYPE_Q4_K, 0, SL_KV_ALL);
    check_layer(1, 100, true, SL_TYPE_Q4_K, 0, SL_KV_ALL);
    check_layer(1, 70, true, SL_TYPE_F16, 0, SL_KV_ALL);
    check_layer(3, 62, true, SL_TYPE_Q8_0, 0, SL_KV_ALL);
    check_layer(12, 60, false, SL_TYPE_Q4_K, 0, SL_KV_ALL);
    check_layer(80, 0, false, SL_TYPE_Q4_K, 0, SL_KV_ALL);
    check_layer(1, 100, true, SL_TYPE_F16, 1, SL_KV_ALL);
    check_layer(1, 100, true, SL_TYPE_F16, 1, SL_KV_FIRST);
    check_layer(12, 60, false, SL_TYPE_Q8_0, 1, SL_KV_ALL);
    check_layer(12, 60, false, SL_TYPE_Q8_0, 1, SL_KV_LATER);
}

/* Norm, gate and up, down into the residual stream. */
static void check_feed_forward(int n_tokens, enum sl_type gate, enum sl_type up, enum sl_type down)
{
    enum { EMBD = 512, FF = 768 };
    struct op_case c;
    case_init(&c, (uint64_t)n_tokens, "feed-forward %s %s %s of %d tokens",
              sl_type_name((uint32_t)gate), sl_type_name((uint32_t)up),
              sl_type_name((uint32_t)down), n_tokens);
    const size_t n = (size_t)n_tokens;
    float *x = case_floats(&c, n * EMBD, 1.0f);
    float *normed = case_floats(&c, n * EMBD, 1.0f);
    struct sl_op *op = case_op(&c, SL_OP_NORM, n_tokens);
    op->norm = (struct sl_op_norm){.x = x,
                                   .weight = case_floats(&c, EMBD, 1.0f),
                                   .y = normed,
                                   .n = EMBD,
                                   .rows_per_token = 1,
                                   .eps = 1e-5f};
    op = case_op(&c, SL_OP_LINEAR, n_tokens);
    op->linear.x = normed;
    op->linear.activation = SL_ACT_SILU;
    const float *h = add_part(&c, op, gate, FF, EMBD, true);
    const float *scratch = add_part(&c, op, up, FF, EMBD, false);
    op = case_op(&c, SL_OP_LINEAR, n_tokens);
    op->linear.x = h;
    op->linear.accumulate = true;
    op->linear.n_parts = 1;
    op->linear.part[0].w = case_matrix(&c, down, EMBD, FF);
    op->linear.part[0].y = x;
    case_output(&c, CASE_FLOATS, normed, n * EMBD * sizeof *x, SL_TYPE_F32, BOUND_NORM);
    case_output(&c, CASE_FLOATS, h, n * FF * sizeof *x, SL_TYPE_F32, BOUND_GATED);
    case_output(&c, CASE_UNDEFINED, scratch, n * FF * sizeof *x, SL_TYPE_F32, 0);
    case_output(&c, CASE_FLOATS, x, n * EMBD * sizeof *x, SL_TYPE_F32, 2 * BOUND_GATED);
    case_check(&c, dev, false, "feed-forward");
    case_finish(&c);
}

static void test_feed_forward(void **state)
{
    (void)state;
    const int counts[] = {1, 2, 3, 4, 9, 40};
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        check_feed_forward(counts[i], SL_TYPE_Q4_0, SL_TYPE_Q4_0, SL_TYPE_Q8_0);
        check_feed_forward(counts[i], SL_TYPE_Q4_K, SL_TYPE_Q6_K, SL_TYPE_Q5_K);
        check_feed_forward(counts[i], SL_TYPE_F16, SL_TYPE_F16, SL_TYPE_BF16);
    }
}

int device_tests_run_ops(const char *prefix, struct sl_device *device)
{
    dev = device;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_add),          cmocka_unit_test(test_linear),
        cmocka_unit_test(test_linear_parts), cmocka_unit_test(test_linear_gated),
        cmocka_unit_test(test_linear_many),  cmocka_unit_test(test_norm),
        cmocka_unit_test(test_rope),         cmocka_unit_test(test_experts),
        cmocka_unit_test(test_layer),        cmocka_unit_test(test_feed_forward),
    };
    char name[96];
    snprintf(name, sizeof name, "%s: operators", prefix);
    return cmocka_run_group_tests_name(name, tests, NULL, NULL);
}
