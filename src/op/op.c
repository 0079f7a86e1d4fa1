/* SPDX-License-Identifier: Apache-2.0
 *
 * What is known of an operator from its shapes alone: names, sizes, and whether it makes sense.
 */
#include "op/op.h"

#include <math.h>

#include "base/error.h"

/* Far above any model, and small enough that sizes in bytes cannot overflow 64 bits. */
#define MAX_DIM (INT64_C(1) << 24)

const char *sl_op_kind_name(enum sl_op_kind kind)
{
    static const char *const names[SL_OP_N_KINDS] = {
        [SL_OP_NORM] = "norm",         [SL_OP_LINEAR] = "linear",       [SL_OP_ROPE] = "rope",
        [SL_OP_KV_STORE] = "kv_store", [SL_OP_ATTENTION] = "attention", [SL_OP_ROUTER] = "router",
        [SL_OP_EXPERTS] = "experts",   [SL_OP_DIVIDE] = "divide",       [SL_OP_ADD] = "add",
        [SL_OP_MERGE] = "merge",
    };
    return (unsigned)kind < SL_OP_N_KINDS ? names[kind] : "unknown";
}

size_t sl_kv_block_bytes(struct sl_kv_types types, int32_t n_kv_heads, int32_t head_dim)
{
    return (size_t)n_kv_heads * SL_KV_BLOCK *
           (sl_type_row_bytes(types.k, head_dim) + sl_type_row_bytes(types.v, head_dim));
}

const enum sl_type sl_kv_type_list[SL_N_KV_TYPES] = {SL_TYPE_F16, SL_TYPE_Q8_0, SL_TYPE_Q4_0};

int sl_kv_type_index(enum sl_type type)
{
    for (int i = 0; i < SL_N_KV_TYPES; i++) {
        if (sl_kv_type_list[i] == type) {
            return i;
        }
    }
    return -1;
}

static size_t round_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

/* Rows of n_cols activations, packed to 8-bit blocks or rounded to f16. */
static size_t packed_bytes(size_t n_rows, size_t n_cols)
{
    return n_rows * round_up(n_cols, 256) * 9 / 4;
}

/* Elements of the widest activation that a chunk of pairs may have, and the least pairs. */
#define CHUNK_ELEMENTS (1 << 24)
#define CHUNK_MIN_PAIRS 256

int32_t sl_op_experts_chunk(const struct sl_op *op)
{
    const struct sl_op_experts *o = &op->experts;
    const int64_t widest = o->gate.n_cols > o->gate.n_rows ? o->gate.n_cols : o->gate.n_rows;
    const int64_t pairs = (int64_t)op->n_tokens * o->n_used;
    int64_t chunk = CHUNK_ELEMENTS / widest;
    chunk = chunk < CHUNK_MIN_PAIRS ? CHUNK_MIN_PAIRS : chunk;
    return (int32_t)(pairs < chunk ? pairs : chunk);
}

/* What a product of this type may want of an input row. */
static size_t input_bytes(size_t n_rows, size_t n_cols, enum sl_type type)
{
    const struct sl_type_traits *t = sl_type_traits(type);
    const bool is_float = t != NULL && t->block_items == 1;
    return is_float ? n_rows * round_up(n_cols, 256) * sizeof(float) : packed_bytes(n_rows, n_cols);
}

static size_t experts_scratch_bytes(const struct sl_op *op)
{
    const struct sl_op_experts *o = &op->experts;
    const size_t chunk = (size_t)sl_op_experts_chunk(op);
    const size_t n_embd = (size_t)o->gate.n_cols;
    const size_t n_ff = (size_t)o->gate.n_rows;
    const size_t n_pairs = (size_t)op->n_tokens * (size_t)o->n_used;
    size_t bytes = 32 * (n_pairs + (size_t)o->n) + 4096;
    bytes += packed_bytes(round_up((size_t)op->n_tokens, 64), n_embd);
    /* Inputs by pair; later the outputs by pair, as floats. */
    bytes += chunk * round_up(n_embd, 256) * sizeof(float);
    if (o->up.type != o->gate.type) {
        bytes +=
            input_bytes(chunk, n_embd, o->up.type) + chunk * round_up(n_ff, 256) * sizeof(float);
    }
    return bytes + chunk * round_up(n_ff, 256) * sizeof(float) + packed_bytes(chunk, n_ff);
}

size_t sl_op_scratch_bytes(const struct sl_op *op)
{
    size_t bytes = 0;
    if (op->kind == SL_OP_LINEAR) {
        const size_t n_cols = (size_t)op->linear.part[0].w.n_cols;
        bytes = packed_bytes(round_up((size_t)op->n_tokens, 64), n_cols);
    } else if (op->kind == SL_OP_ROUTER) {
        const struct sl_matrix *w = &op->router.w;
        bytes = round_up((size_t)op->n_tokens * (size_t)w->n_rows * sizeof(float), 256) +
                packed_bytes(round_up((size_t)op->n_tokens, 64), (size_t)w->n_cols);
    } else if (op->kind == SL_OP_EXPERTS) {
        bytes = experts_scratch_bytes(op);
    } else if (op->kind == SL_OP_ATTENTION && op->n_tokens <= 4 * SL_ATTN_SPLIT_TOKENS) {
        /* A partial result is the weighted values, the running maximum and the sum. */
        const size_t n_tokens = (size_t)op->n_tokens;
        const size_t n_splits = n_tokens <= SL_ATTN_SPLIT_TOKENS
                                    ? SL_ATTN_MAX_SPLITS
                                    : SL_ATTN_MAX_SPLITS * SL_ATTN_SPLIT_TOKENS / n_tokens;
        const size_t row_floats = (size_t)op->attention.kv.head_dim + 2;
        bytes = n_splits * n_tokens * (size_t)op->attention.n_heads * row_floats * sizeof(float);
    }
    return round_up(bytes, 256);
}

static enum sluice_status validate_norm(const struct sl_op_norm *op, struct sluice_error *err)
{
    SL_CHECK(op->n >= 1 && op->n <= MAX_DIM, INTERNAL, err, "norm: row of %d elements", op->n);
    SL_CHECK(op->rows_per_token >= 1 && op->rows_per_token <= MAX_DIM, INTERNAL, err,
             "norm: %d rows per token", op->rows_per_token);
    SL_CHECK(op->eps >= 0.0f && isfinite(op->eps), INTERNAL, err, "norm: eps %g", (double)op->eps);
    return SLUICE_STATUS_OK;
}

static enum sluice_status validate_shape(enum sl_type type, int64_t n_rows, int64_t n_cols,
                                         const char *what, struct sluice_error *err)
{
    const struct sl_type_traits *t = sl_type_traits(type);
    SL_CHECK(t != NULL && t->computes, INTERNAL, err, "%s has type %s (id %d)", what,
             sl_type_name(type), (int)type);
    SL_CHECK(n_rows >= 1 && n_rows <= MAX_DIM && n_cols >= 1 && n_cols <= MAX_DIM, INTERNAL, err,
             "%s is %lld x %lld", what, (long long)n_rows, (long long)n_cols);
    SL_CHECK(n_cols % t->block_items == 0, INTERNAL, err,
             "%s has %lld columns, no multiple of the %u of a %s block", what, (long long)n_cols,
             (unsigned)t->block_items, t->name);
    return SLUICE_STATUS_OK;
}

static enum sluice_status validate_matrix(const struct sl_matrix *w, int part,
                                          struct sluice_error *err)
{
    static const char *const names[SL_LINEAR_MAX_PARTS] = {"linear: part 0", "linear: part 1",
                                                           "linear: part 2", "linear: part 3"};
    SL_TRY(validate_shape(w->type, w->n_rows, w->n_cols, names[part], err));
    SL_CHECK(w->pitch_bytes == 0 || w->pitch_bytes >= sl_type_row_bytes(w->type, w->n_cols),
             INTERNAL, err, "%s has rows of %zu bytes, %u apart", names[part],
             sl_type_row_bytes(w->type, w->n_cols), (unsigned)w->pitch_bytes);
    return SLUICE_STATUS_OK;
}

static enum sluice_status validate_linear(const struct sl_op_linear *op, struct sluice_error *err)
{
    SL_CHECK(op->n_parts >= 1 && op->n_parts <= SL_LINEAR_MAX_PARTS, INTERNAL, err,
             "linear: %d parts", op->n_parts);
    for (int i = 0; i < op->n_parts; i++) {
        SL_TRY(validate_matrix(&op->part[i].w, i, err));
        SL_CHECK(op->part[i].w.n_cols == op->part[0].w.n_cols, INTERNAL, err,
                 "linear: part %d has %lld columns, part 0 has %lld", i,
                 (long long)op->part[i].w.n_cols, (long long)op->part[0].w.n_cols);
    }
    SL_CHECK(!op->accumulate || op->n_parts == 1, INTERNAL, err,
             "linear: accumulates over %d parts", op->n_parts);
    SL_CHECK(op->activation == SL_ACT_NONE || op->activation == SL_ACT_SILU ||
                 op->activation == SL_ACT_GELU_TANH,
             INTERNAL, err, "linear: activation %d", (int)op->activation);
    if (op->activation != SL_ACT_NONE) {
        SL_CHECK(op->n_parts == 2 && op->part[0].w.n_rows == op->part[1].w.n_rows, INTERNAL, err,
                 "linear: a gated activation wants two parts of one height");
    }
    return SLUICE_STATUS_OK;
}

static enum sluice_status validate_rope(const struct sl_op_rope *op, struct sluice_error *err)
{
    SL_CHECK(op->n_heads >= 1 && op->n_heads <= MAX_DIM && op->head_dim >= 2 &&
                 op->head_dim <= MAX_DIM,
             INTERNAL, err, "rope: %d heads of %d", op->n_heads, op->head_dim);
    SL_CHECK(op->n_rot >= 2 && op->n_rot % 2 == 0 && op->n_rot <= op->head_dim, INTERNAL, err,
             "rope: rotates %d of %d elements", op->n_rot, op->head_dim);
    return SLUICE_STATUS_OK;
}

static enum sluice_status validate_kv(const struct sl_kv_view *kv, const char *what,
                                      struct sluice_error *err)
{
    SL_CHECK(sl_kv_type_index(kv->types.k) >= 0 && sl_kv_type_index(kv->types.v) >= 0, INTERNAL,
             err, "%s: KV cache of %s keys and %s values (F16, Q8_0 and Q4_0 work)", what,
             sl_type_name(kv->types.k), sl_type_name(kv->types.v));
    SL_CHECK(kv->n_kv_heads >= 1 && kv->n_kv_heads <= MAX_DIM, INTERNAL, err, "%s: %d KV heads",
             what, kv->n_kv_heads);
    SL_CHECK(kv->head_dim >= 32 && kv->head_dim % 32 == 0 && kv->head_dim <= SL_KV_MAX_HEAD_DIM,
             INTERNAL, err, "%s: head size %d (multiples of 32 up to %d work)", what, kv->head_dim,
             SL_KV_MAX_HEAD_DIM);
    SL_CHECK(kv->table == NULL || kv->table_stride >= 1, INTERNAL, err, "%s: block table of %d",
             what, kv->table_stride);
    SL_CHECK(
        kv->n_first >= 0 && kv->n_first <= MAX_DIM && (unsigned)kv->here <= SL_KV_LATER &&
            (kv->n_first > 0 || kv->here == SL_KV_ALL) && (kv->n_first == 0 || kv->table == NULL),
        INTERNAL, err, "%s: cache divided at block %d, part %d", what, kv->n_first, (int)kv->here);
    return SLUICE_STATUS_OK;
}

static enum sluice_status validate_attention(const struct sl_op_attention *op,
                                             struct sluice_error *err)
{
    SL_TRY(validate_kv(&op->kv, "attention", err));
    SL_CHECK(op->n_heads >= 1 && op->n_heads <= MAX_DIM && op->n_heads % op->kv.n_kv_heads == 0,
             INTERNAL, err, "attention: %d heads over %d KV heads", op->n_heads, op->kv.n_kv_heads);
    SL_CHECK(op->n_kv_max >= 1, INTERNAL, err, "attention: n_kv_max %d", op->n_kv_max);
    SL_CHECK(op->window >= 0, INTERNAL, err, "attention: window %d", op->window);
    SL_CHECK(isfinite(op->scale) && isfinite(op->softcap) && op->softcap >= 0.0f, INTERNAL, err,
             "attention: scale %g, soft-cap %g", (double)op->scale, (double)op->softcap);
    return SLUICE_STATUS_OK;
}

static enum sluice_status validate_router(const struct sl_op_router *op, struct sluice_error *err)
{
    SL_TRY(validate_shape(op->w.type, op->w.n_rows, op->w.n_cols, "router: matrix", err));
    /* A choice turns on small differences: packed weights round x to 8 bits. */
    SL_CHECK(op->w.type == SL_TYPE_F32 || op->w.type == SL_TYPE_F16 || op->w.type == SL_TYPE_BF16,
             UNSUPPORTED, err, "router: matrix of type %s (F32, F16 or BF16 is needed)",
             sl_type_name((uint32_t)op->w.type));
    SL_CHECK(op->w.pitch_bytes == 0, INTERNAL, err, "router: matrix with gaps");
    SL_CHECK(op->w.n_rows <= SL_MAX_EXPERTS, INTERNAL, err, "router: %lld experts (at most %d)",
             (long long)op->w.n_rows, SL_MAX_EXPERTS);
    SL_CHECK(op->n_used >= 1 && op->n_used <= op->w.n_rows && op->n_used <= SL_MAX_EXPERTS_USED,
             INTERNAL, err, "router: chooses %d of %lld experts (at most %d)", op->n_used,
             (long long)op->w.n_rows, SL_MAX_EXPERTS_USED);
    SL_CHECK(op->gating == SL_GATING_SOFTMAX || op->gating == SL_GATING_SIGMOID ||
                 op->gating == SL_GATING_SOFTMAX_CHOSEN,
             INTERNAL, err, "router: gating %d", (int)op->gating);
    SL_CHECK(isfinite(op->scale), INTERNAL, err, "router: scale %g", (double)op->scale);
    return SLUICE_STATUS_OK;
}

static enum sluice_status validate_experts(const struct sl_op_experts *op, struct sluice_error *err)
{
    const struct sl_experts_matrix *gate = &op->gate;
    const struct sl_experts_matrix *up = &op->up;
    const struct sl_experts_matrix *down = &op->down;
    SL_TRY(validate_shape(gate->type, gate->n_rows, gate->n_cols, "experts: gate", err));
    SL_TRY(validate_shape(up->type, up->n_rows, up->n_cols, "experts: up", err));
    SL_TRY(validate_shape(down->type, down->n_rows, down->n_cols, "experts: down", err));
    SL_CHECK(up->n_rows == gate->n_rows && up->n_cols == gate->n_cols &&
                 down->n_rows == gate->n_cols && down->n_cols == gate->n_rows,
             INTERNAL, err, "experts: gate %lld x %lld, up %lld x %lld, down %lld x %lld",
             (long long)gate->n_rows, (long long)gate->n_cols, (long long)up->n_rows,
             (long long)up->n_cols, (long long)down->n_rows, (long long)down->n_cols);
    SL_CHECK(op->first >= 0 && op->n >= 1 && op->n <= SL_MAX_EXPERTS - op->first, INTERNAL, err,
             "experts: %d from %d (at most %d)", op->n, op->first, SL_MAX_EXPERTS);
    SL_CHECK(op->n_used >= 1 && op->n_used <= SL_MAX_EXPERTS_USED, INTERNAL, err,
             "experts: %d used (at most %d)", op->n_used, SL_MAX_EXPERTS_USED);
    SL_CHECK(op->activation == SL_ACT_SILU || op->activation == SL_ACT_GELU_TANH ||
                 op->activation == SL_ACT_SWIGLU_CLAMPED,
             INTERNAL, err, "experts: activation %d", (int)op->activation);
    return SLUICE_STATUS_OK;
}

static enum sluice_status validate_divide(const struct sl_op_divide *op, struct sluice_error *err)
{
    SL_CHECK(op->n_experts >= 1 && op->n_experts <= SL_MAX_EXPERTS, INTERNAL, err,
             "divide: %d experts (at most %d)", op->n_experts, SL_MAX_EXPERTS);
    SL_CHECK(op->n_used >= 1 && op->n_used <= op->n_experts && op->n_used <= SL_MAX_EXPERTS_USED,
             INTERNAL, err, "divide: %d of %d experts used (at most %d)", op->n_used, op->n_experts,
             SL_MAX_EXPERTS_USED);
    SL_CHECK(op->share >= 0 && op->share <= SL_DIVIDE_ALL, INTERNAL, err, "divide: share %d of %d",
             op->share, SL_DIVIDE_ALL);
    return SLUICE_STATUS_OK;
}

/* Experts that come before e: with more tokens, or as many and a lower id. */
static int32_t n_fuller(const int32_t *n_tokens, int32_t n_experts, int32_t e)
{
    int32_t n = 0;
    for (int32_t other = 0; other < n_experts; other++) {
        n += n_tokens[other] > n_tokens[e] || (n_tokens[other] == n_tokens[e] && other < e);
    }
    return n;
}

void sl_op_divide_run(const struct sl_op_divide *op, int32_t n_tokens)
{
    const int64_t n_pairs = (int64_t)n_tokens * op->n_used;
    for (int64_t i = 0; op->uses && i < n_pairs; i++) {
        op->uses[op->ids[i]]++;
    }
    if (!op->at_hand) {
        return;
    }
    int32_t missing[SL_MAX_EXPERTS] = {0}; /* tokens of experts that are not at hand */
    int32_t n_distinct = 0;
    for (int64_t i = 0; i < n_pairs; i++) {
        const int32_t e = op->ids[i];
        n_distinct += !op->at_hand[e] && missing[e]++ == 0;
    }
    const int32_t n_taken = (n_distinct * op->share + SL_DIVIDE_ALL / 2) / SL_DIVIDE_ALL;
    bool taken[SL_MAX_EXPERTS];
    for (int32_t e = 0; e < op->n_experts; e++) {
        taken[e] = op->at_hand[e] ||
                   (missing[e] > 0 && n_taken > 0 && n_fuller(missing, op->n_experts, e) < n_taken);
    }
    for (int64_t i = 0; i < n_pairs; i++) {
        op->mine[i] = taken[op->ids[i]] ? op->ids[i] : -1;
    }
}

enum sluice_status sl_op_validate(const struct sl_op *op, struct sluice_error *err)
{
    SL_CHECK(op->n_tokens >= 1 && op->n_tokens <= MAX_DIM, INTERNAL, err, "%s: %d tokens",
             sl_op_kind_name(op->kind), op->n_tokens);
    switch (op->kind) {
    case SL_OP_NORM:
        return validate_norm(&op->norm, err);
    case SL_OP_LINEAR:
        return validate_linear(&op->linear, err);
    case SL_OP_ROPE:
        return validate_rope(&op->rope, err);
    case SL_OP_KV_STORE:
        return validate_kv(&op->kv_store.kv, "kv_store", err);
    case SL_OP_ATTENTION:
        return validate_attention(&op->attention, err);
    case SL_OP_ROUTER:
        return validate_router(&op->router, err);
    case SL_OP_EXPERTS:
        return validate_experts(&op->experts, err);
    case SL_OP_DIVIDE:
        return validate_divide(&op->divide, err);
    case SL_OP_ADD:
        SL_CHECK(op->add.n >= 1 && op->add.n <= MAX_DIM, INTERNAL, err, "add: rows of %lld",
                 (long long)op->add.n);
        return SLUICE_STATUS_OK;
    case SL_OP_MERGE:
        SL_CHECK(op->merge.n_heads >= 1 && op->merge.n_heads <= MAX_DIM &&
                     op->merge.head_dim >= 4 && op->merge.head_dim % 4 == 0 &&
                     op->merge.head_dim <= SL_KV_MAX_HEAD_DIM,
                 INTERNAL, err, "merge: %d heads of %d", op->merge.n_heads, op->merge.head_dim);
        return SLUICE_STATUS_OK;
    case SL_OP_N_KINDS:
        break;
    }
    return sl_error_set(err, SLUICE_STATUS_INTERNAL, "operator of unknown kind %d", (int)op->kind);
}
