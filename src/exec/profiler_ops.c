/* SPDX-License-Identifier: Apache-2.0
 *
 * Operators, timed through cold memory on the CPU, alone and beside copies, and on the device (see
 * profiler.h).
 */
#include <math.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/median.h"
#include "exec/profiler_internal.h"

#define MIB (1u << 20)
#define MAX_BATCH 32 /* ops in one timed list */

static uint8_t *device_cold(struct sl_profiler *b, size_t bytes)
{
    if (b->d_cursor + bytes > b->dev.weights_bytes) {
        b->d_cursor = 0;
    }
    uint8_t *const at = b->d_weights + b->d_cursor;
    b->d_cursor += (bytes + 255) & ~(size_t)255;
    return at;
}

struct sl_op sl_profiler_linear_op(enum sl_type type, int32_t rows, int32_t cols, int32_t n_tokens)
{
    struct sl_op op = {.kind = SL_OP_LINEAR, .n_tokens = n_tokens};
    op.linear.n_parts = 1;
    op.linear.part[0].w = (struct sl_matrix){.type = type, .n_rows = rows, .n_cols = cols};
    return op;
}

struct sl_op sl_profiler_attention_op(int32_t n_tokens, int32_t n_kv, enum sl_type type)
{
    struct sl_op op = {.kind = SL_OP_ATTENTION, .n_tokens = n_tokens};
    op.attention.kv = (struct sl_kv_view){.types = {type, type},
                                          .n_kv_heads = SL_PROFILER_KV_HEADS,
                                          .head_dim = SL_PROFILER_HEAD_DIM};
    op.attention.n_heads = SL_PROFILER_HEADS;
    op.attention.n_kv_max = n_kv;
    op.attention.scale = 0.088f;
    return op;
}

struct sl_op sl_profiler_norm_op(int32_t n_tokens, int32_t n)
{
    struct sl_op op = {.kind = SL_OP_NORM, .n_tokens = n_tokens};
    op.norm.n = n;
    op.norm.rows_per_token = 1;
    op.norm.eps = 1e-5f;
    return op;
}

/* Give an op its operands in one memory. */
void sl_profiler_bind_op(struct sl_op *op, uint8_t *cold_bytes, float *x, float *y, int32_t *pos)
{
    switch (op->kind) {
    case SL_OP_LINEAR:
        op->linear.x = x;
        op->linear.part[0].w.data = cold_bytes;
        op->linear.part[0].y = y;
        break;
    case SL_OP_ATTENTION:
        op->attention.q = x;
        op->attention.y = y;
        op->attention.pos = pos;
        op->attention.kv.data = cold_bytes;
        break;
    case SL_OP_NORM:
    default:
        op->norm.x = x;
        op->norm.y = y;
        break;
    }
}

size_t sl_profiler_op_bytes(const struct sl_op *op)
{
    if (op->kind == SL_OP_LINEAR) {
        const struct sl_matrix *const w = &op->linear.part[0].w;
        return sl_type_row_bytes(w->type, w->n_cols) * (size_t)w->n_rows;
    }
    if (op->kind == SL_OP_ATTENTION) {
        const size_t n_blocks = ((size_t)op->attention.n_kv_max + SL_KV_BLOCK - 1) / SL_KV_BLOCK;
        return n_blocks * sl_kv_block_bytes(op->attention.kv.types, SL_PROFILER_KV_HEADS,
                                            SL_PROFILER_HEAD_DIM);
    }
    return 0;
}

/* The pass's positions: the last n_tokens of n_kv. */
static void set_positions(int32_t *pos, const struct sl_op *op)
{
    for (int32_t i = 0; op->kind == SL_OP_ATTENTION && i < op->n_tokens; i++) {
        pos[i] = op->attention.n_kv_max - op->n_tokens + i;
    }
}

/* Median time of one op on the CPU over a few runs through cold memory. */
static double time_cpu(struct sl_profiler *b, struct sl_op op, int repeats)
{
    double ns[8];
    set_positions(b->pos, &op);
    sl_profiler_bind_op(&op, sl_profiler_cold(b, sl_profiler_op_bytes(&op)), b->x, b->y, b->pos);
    sl_cpu_run(b->kernels, b->o->pool, &op, 1, b->scratch); /* wake the pool, load the code */
    for (int i = 0; i < repeats; i++) {
        sl_profiler_bind_op(&op, sl_profiler_cold(b, sl_profiler_op_bytes(&op)), b->x, b->y,
                            b->pos);
        const uint64_t start = sl_clock_now_ns();
        sl_cpu_run(b->kernels, b->o->pool, &op, 1, b->scratch);
        ns[i] = (double)(sl_clock_now_ns() - start);
    }
    return sl_median(ns, repeats);
}

/* The same while the copy engine draws on the same memory. */
static enum sluice_status time_cpu_busy(struct sl_profiler *b, struct sl_op op, double alone_ns,
                                        double *out)
{
    SL_TRY(sl_profiler_start_copies(b, 10 * alone_ns));
    *out = fmax(alone_ns, time_cpu(b, op, 3));
    return b->vt->stream_sync(b->o->device, b->copy, b->err);
}

/* Median time of one op in a list of n on the device, each on other bytes. As a graph, since passes
 * that are short enough for launches to count are replayed as graphs too. */
static enum sluice_status time_gpu(struct sl_profiler *b, struct sl_op op, int n, double *out)
{
    struct sl_op ops[MAX_BATCH];
    set_positions(b->pos, &op);
    SL_TRY(b->vt->copy_to_device(b->o->device, b->timer.stream, b->d_pos, b->pos,
                                 (size_t)op.n_tokens * sizeof(int32_t), b->err));
    for (int i = 0; i < n; i++) {
        ops[i] = op;
        sl_profiler_bind_op(&ops[i], device_cold(b, sl_profiler_op_bytes(&op)), b->d_x, b->d_y,
                            b->d_pos);
    }
    SL_TRY(sl_timer_list(&b->timer, ops, n, b->d_scratch, true, out, b->err));
    *out /= n;
    return SLUICE_STATUS_OK;
}

/* How many products make a list that no cache holds. */
static int cold_count(const struct sl_profiler *b, const struct sl_op *op)
{
    const size_t n = b->dev.weights_bytes * 3 / 4 / sl_profiler_op_bytes(op);
    return n < 2 ? 2 : n > MAX_BATCH ? MAX_BATCH : (int)n;
}

static bool measured_type(const struct sl_profiler_scale *scale, uint32_t type)
{
    const struct sl_type_traits *const t = sl_type_traits(type);
    if (!t || !t->computes) {
        return false;
    }
    /* The simulated device is as slow as one thread: three types stand for the others. */
    return scale->n_cols != SL_PROFILER_SIM_COLS || type == SL_TYPE_F16 || type == SL_TYPE_Q8_0 ||
           type == SL_TYPE_Q4_K;
}

/* The product that stands for a type in passes of n tokens; mib: its weights, in 2^20 elements. */
static struct sl_op linear_of_tier(const struct sl_profiler_scale *scale, uint32_t type, int32_t n,
                                   double *mib)
{
    const int32_t rows = n < 64 ? scale->rows_decode : scale->rows_prefill;
    *mib = (double)rows * scale->n_cols / MIB;
    return sl_profiler_linear_op((enum sl_type)type, rows, scale->n_cols, n);
}

enum sluice_status sl_profiler_measure_cpu_linear(struct sl_profiler *b)
{
    for (uint32_t type = 0; type < SL_TYPE_N; type++) {
        if (!measured_type(&b->host, type)) {
            continue;
        }
        for (int i = 0; i < SL_N_TIERS && sl_tier_tokens[i] <= b->host.max_tokens; i++) {
            const int32_t n = sl_tier_tokens[i];
            double mib;
            const struct sl_op op = linear_of_tier(&b->host, type, n, &mib);
            const double ns = time_cpu(b, op, 3);
            double busy_ns = ns;
            if (b->vt && n < 64) {
                SL_TRY(time_cpu_busy(b, op, ns, &busy_ns));
            }
            b->p->linear_ns[SL_UNIT_CPU][type][i] = ns / mib;
            b->p->linear_ns[SL_UNIT_CPU_BUSY][type][i] = busy_ns / mib;
        }
        SL_TRY(sl_profiler_tick(b, sl_type_name(type)));
    }
    return SLUICE_STATUS_OK;
}

static double kv_mib(int32_t n_kv, enum sl_type type)
{
    return 2.0 * n_kv * SL_PROFILER_KV_HEADS *
           (double)sl_type_row_bytes(type, SL_PROFILER_HEAD_DIM) / MIB;
}

/* Useful operations of causal attention of the last n of n_kv positions. */
static double attention_gflop(int32_t n, int32_t n_kv)
{
    return 4e-9 * n * (n_kv - 0.5 * n) * SL_PROFILER_HEADS * SL_PROFILER_HEAD_DIM;
}

/* Decode over a cache of each type. */
static enum sluice_status measure_cpu_attention(struct sl_profiler *b)
{
    const int32_t n_kv = b->host.kv_tokens;
    for (int i = 0; i < SL_N_KV_TYPES; i++) {
        const struct sl_op decode = sl_profiler_attention_op(1, n_kv, sl_kv_type_list[i]);
        const double alone_ns = time_cpu(b, decode, 3);
        double busy_ns = alone_ns;
        if (b->vt) {
            SL_TRY(time_cpu_busy(b, decode, alone_ns, &busy_ns));
        }
        const double mib = kv_mib(n_kv, sl_kv_type_list[i]);
        b->p->attention_mib_ns[SL_UNIT_CPU][i] = alone_ns / mib;
        b->p->attention_mib_ns[SL_UNIT_CPU_BUSY][i] = busy_ns / mib;
    }
    return sl_profiler_tick(b, "attention");
}

enum sluice_status sl_profiler_measure_cpu_rest(struct sl_profiler *b)
{
    struct sl_profile *const p = b->p;
    const int32_t n_prefill = 64;
    const struct sl_op prefill = sl_profiler_attention_op(n_prefill, 512, SL_TYPE_F16);
    SL_TRY(measure_cpu_attention(b));
    const double gflop_ns = time_cpu(b, prefill, 3) / attention_gflop(n_prefill, 512);
    const double norm_ns = time_cpu(b, sl_profiler_norm_op(128, SL_PROFILER_COLS), 5);
    const double op_ns = time_cpu(b, sl_profiler_norm_op(1, 64), 7);
    for (int u = SL_UNIT_CPU; u <= SL_UNIT_CPU_BUSY; u++) {
        p->attention_gflop_ns[u] = gflop_ns;
        p->elementwise_mib_ns[u] = norm_ns / (128.0 * SL_PROFILER_COLS * 4 / MIB);
        p->op_ns[u] = op_ns;
    }
    return sl_profiler_tick(b, "norm");
}

/* What more of a cache takes: by two depths, for beside an attention's launches and merges a cache
 * that fits a small budget takes little. */
static enum sluice_status measure_gpu_attention(struct sl_profiler *b, enum sl_type type,
                                                double *mib_ns)
{
    const int32_t deep = b->dev.kv_tokens, half = deep / 2;
    double deep_ns = 0, half_ns = 0;
    SL_TRY(time_gpu(b, sl_profiler_attention_op(1, deep, type), 2, &deep_ns));
    SL_TRY(time_gpu(b, sl_profiler_attention_op(1, half, type), 2, &half_ns));
    *mib_ns = fmax(deep_ns - half_ns, 0.1 * deep_ns) / (kv_mib(deep, type) - kv_mib(half, type));
    return SLUICE_STATUS_OK;
}

/* What more positions before a prompt take: at its start kernels have few and uneven blocks. */
static enum sluice_status measure_gpu_prompt_attention(struct sl_profiler *b)
{
    const int32_t n = b->dev.max_tokens < 512 ? b->dev.max_tokens : 512;
    const int32_t deep = b->dev.kv_tokens, half = deep / 2;
    double deep_ns = 0, half_ns = 0;
    SL_TRY(time_gpu(b, sl_profiler_attention_op(n, deep, SL_TYPE_F16), 1, &deep_ns));
    SL_TRY(time_gpu(b, sl_profiler_attention_op(n, half, SL_TYPE_F16), 1, &half_ns));
    b->p->attention_gflop_ns[SL_UNIT_GPU] = fmax(deep_ns - half_ns, 0.1 * deep_ns) /
                                            (attention_gflop(n, deep) - attention_gflop(n, half));
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_profiler_measure_gpu(struct sl_profiler *b)
{
    struct sl_profile *const p = b->p;
    double ns = 0;
    SL_TRY(time_gpu(b, sl_profiler_norm_op(1, 64), MAX_BATCH, &ns));
    p->op_ns[SL_UNIT_GPU] = ns;
    const double op_ns = ns;
    for (uint32_t type = 0; type < SL_TYPE_N; type++) {
        if (!measured_type(&b->dev, type)) {
            continue;
        }
        for (int i = 0; i < SL_N_TIERS && sl_tier_tokens[i] <= b->dev.max_tokens; i++) {
            const int32_t n = sl_tier_tokens[i];
            double mib;
            const struct sl_op op = linear_of_tier(&b->dev, type, n, &mib);
            SL_TRY(time_gpu(b, op, n < 64 ? cold_count(b, &op) : 1, &ns));
            p->linear_ns[SL_UNIT_GPU][type][i] = fmax(ns - op_ns, 0.1 * ns) / mib;
        }
        SL_TRY(sl_profiler_tick(b, sl_type_name(type)));
    }
    for (int i = 0; i < SL_N_KV_TYPES; i++) {
        SL_TRY(measure_gpu_attention(b, sl_kv_type_list[i], &p->attention_mib_ns[SL_UNIT_GPU][i]));
    }
    SL_TRY(measure_gpu_prompt_attention(b));
    SL_TRY(time_gpu(b, sl_profiler_norm_op(b->dev.max_tokens, b->dev.n_cols), 4, &ns));
    p->elementwise_mib_ns[SL_UNIT_GPU] =
        fmax(ns - op_ns, 0.1 * ns) / ((double)b->dev.max_tokens * b->dev.n_cols * 4 / MIB);
    return sl_profiler_tick(b, "GPU");
}
