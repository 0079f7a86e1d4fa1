/* SPDX-License-Identifier: Apache-2.0
 *
 * The profiler (see profiler.h). One large host buffer of harmless random bytes serves as every
 * matrix, KV cache and copy source; measurements walk through it so that caches stay cold.
 */
#include "exec/profiler.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "base/median.h"
#include "base/mem.h"
#include "exec/timer.h"

#define MIB (1u << 20)
#define N_COLS 4096
#define HEADS 32
#define KV_HEADS 8
#define HEAD_DIM 128
#define SIM_COLS 1024
#define MAX_BATCH 32 /* ops in one timed list */

/* How large the measurements are. */
struct scale {
    size_t buffer_bytes;  /* host: beyond the last-level cache */
    size_t weights_bytes; /* device */
    int32_t n_cols;
    int32_t rows_decode, rows_prefill;
    int32_t max_tokens; /* larger tiers are extrapolated */
    int32_t kv_tokens;
};

struct bench {
    const struct sl_profiler_options *o;
    const struct sl_cpu_kernels *kernels;
    struct sl_profile *p;
    struct scale host, dev;
    int n_threads;
    /* Host. */
    uint8_t *buffer;
    size_t cursor; /* next cold byte */
    float *x, *y;
    int32_t *pos;
    void *scratch;
    bool registered;
    /* Device. */
    const struct sl_device_vtable *vt;
    struct sl_timer timer; /* its stream is the compute stream */
    struct sl_stream *copy;
    uint8_t *mem;
    uint8_t *d_weights, *d_scratch, *d_sink;
    float *d_x, *d_y;
    int32_t *d_pos;
    size_t d_cursor;
    int n_done, n_total;
    struct sluice_error *err;
};

static enum sluice_status tick(struct bench *b, const char *what)
{
    b->n_done++;
    const double fraction = b->n_done < b->n_total ? (double)b->n_done / b->n_total : 1.0;
    SL_CHECK(!b->o->progress || !b->o->progress(b->o->user, what, fraction), CANCELLED, b->err,
             "cancelled");
    return SLUICE_STATUS_OK;
}

/* Bytes 0x28 .. 0x37: read as f16, bf16 or f32 they are normal numbers, so no kernel runs into
 * subnormals or NaN, and every quantized format finds sane scales. */
static void fill_pattern(void *arg, int thread, int n_threads)
{
    const struct bench *const b = arg;
    const size_t n = b->host.buffer_bytes / 8;
    const size_t from = n * (size_t)thread / (size_t)n_threads;
    const size_t to = n * ((size_t)thread + 1) / (size_t)n_threads;
    uint64_t state = 0x9e3779b97f4a7c15u * (uint64_t)(thread + 1);
    uint64_t *const out = (uint64_t *)b->buffer;
    for (size_t i = from; i < to; i++) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out[i] = (state & 0x0f0f0f0f0f0f0f0fu) + 0x2828282828282828u;
    }
}

static void run_on_pool(struct bench *b, sl_pool_fn *fn, void *arg)
{
    if (b->o->pool) {
        sl_pool_run(b->o->pool, fn, arg);
    } else {
        fn(arg, 0, 1);
    }
}

/* A cold stretch of the host buffer. */
static uint8_t *cold(struct bench *b, size_t bytes)
{
    if (b->cursor + bytes > b->host.buffer_bytes) {
        b->cursor = 0;
    }
    uint8_t *const at = b->buffer + b->cursor;
    b->cursor += (bytes + 4095) & ~(size_t)4095;
    return at;
}

static uint8_t *device_cold(struct bench *b, size_t bytes)
{
    if (b->d_cursor + bytes > b->dev.weights_bytes) {
        b->d_cursor = 0;
    }
    uint8_t *const at = b->d_weights + b->d_cursor;
    b->d_cursor += (bytes + 255) & ~(size_t)255;
    return at;
}

static struct sl_op linear_op(enum sl_type type, int32_t rows, int32_t cols, int32_t n_tokens)
{
    struct sl_op op = {.kind = SL_OP_LINEAR, .n_tokens = n_tokens};
    op.linear.n_parts = 1;
    op.linear.part[0].w = (struct sl_matrix){.type = type, .n_rows = rows, .n_cols = cols};
    return op;
}

static struct sl_op attention_op(int32_t n_tokens, int32_t n_kv, enum sl_type type)
{
    struct sl_op op = {.kind = SL_OP_ATTENTION, .n_tokens = n_tokens};
    op.attention.kv =
        (struct sl_kv_view){.types = {type, type}, .n_kv_heads = KV_HEADS, .head_dim = HEAD_DIM};
    op.attention.n_heads = HEADS;
    op.attention.n_kv_max = n_kv;
    op.attention.scale = 0.088f;
    return op;
}

static struct sl_op norm_op(int32_t n_tokens, int32_t n)
{
    struct sl_op op = {.kind = SL_OP_NORM, .n_tokens = n_tokens};
    op.norm.n = n;
    op.norm.rows_per_token = 1;
    op.norm.eps = 1e-5f;
    return op;
}

/* Give an op its operands in one memory. */
static void bind_op(struct sl_op *op, uint8_t *cold_bytes, float *x, float *y, int32_t *pos)
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

static size_t op_cold_bytes(const struct sl_op *op)
{
    if (op->kind == SL_OP_LINEAR) {
        const struct sl_matrix *const w = &op->linear.part[0].w;
        return sl_type_row_bytes(w->type, w->n_cols) * (size_t)w->n_rows;
    }
    if (op->kind == SL_OP_ATTENTION) {
        const size_t n_blocks = ((size_t)op->attention.n_kv_max + SL_KV_BLOCK - 1) / SL_KV_BLOCK;
        return n_blocks * sl_kv_block_bytes(op->attention.kv.types, KV_HEADS, HEAD_DIM);
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
static double time_cpu(struct bench *b, struct sl_op op, int repeats)
{
    double ns[8];
    set_positions(b->pos, &op);
    bind_op(&op, cold(b, op_cold_bytes(&op)), b->x, b->y, b->pos);
    sl_cpu_run(b->kernels, b->o->pool, &op, 1, b->scratch); /* wake the pool, load the code */
    for (int i = 0; i < repeats; i++) {
        bind_op(&op, cold(b, op_cold_bytes(&op)), b->x, b->y, b->pos);
        const uint64_t start = sl_clock_now_ns();
        sl_cpu_run(b->kernels, b->o->pool, &op, 1, b->scratch);
        ns[i] = (double)(sl_clock_now_ns() - start);
    }
    return sl_median(ns, repeats);
}

/* Queue copies that keep the link busy for about `ns`. */
static enum sluice_status start_copies(struct bench *b, double ns)
{
    const size_t piece = 16 * MIB;
    const double rate = b->p->h2d_bytes_per_s[SL_N_COPY_SIZES - 1];
    const int n = (int)fmin(512, ceil(rate * ns * 1e-9 / (double)piece) + 1);
    for (int i = 0; i < n; i++) {
        SL_TRY(
            b->vt->copy_to_device(b->o->device, b->copy, b->d_sink, cold(b, piece), piece, b->err));
    }
    return SLUICE_STATUS_OK;
}

/* The same while the copy engine draws on the same memory. */
static enum sluice_status time_cpu_busy(struct bench *b, struct sl_op op, double alone_ns,
                                        double *out)
{
    SL_TRY(start_copies(b, 10 * alone_ns));
    *out = fmax(alone_ns, time_cpu(b, op, 3));
    return b->vt->stream_sync(b->o->device, b->copy, b->err);
}

/* Median time of one op in a list of n on the device, each on other bytes. As a graph, since passes
 * that are short enough for launches to count are replayed as graphs too. */
static enum sluice_status time_gpu(struct bench *b, struct sl_op op, int n, double *out)
{
    struct sl_op ops[MAX_BATCH];
    set_positions(b->pos, &op);
    SL_TRY(b->vt->copy_to_device(b->o->device, b->timer.stream, b->d_pos, b->pos,
                                 (size_t)op.n_tokens * sizeof(int32_t), b->err));
    for (int i = 0; i < n; i++) {
        ops[i] = op;
        bind_op(&ops[i], device_cold(b, op_cold_bytes(&op)), b->d_x, b->d_y, b->d_pos);
    }
    SL_TRY(sl_timer_list(&b->timer, ops, n, b->d_scratch, true, out, b->err));
    *out /= n;
    return SLUICE_STATUS_OK;
}

/* How many products make a list that no cache holds. */
static int cold_count(const struct bench *b, const struct sl_op *op)
{
    const size_t n = b->dev.weights_bytes * 3 / 4 / op_cold_bytes(op);
    return n < 2 ? 2 : n > MAX_BATCH ? MAX_BATCH : (int)n;
}

/* Sum of a stretch of the buffer: what plain loads of all threads reach. */
struct reader {
    const uint64_t *data;
    size_t n;
    uint64_t sum[256];
};

static void read_all(void *arg, int thread, int n_threads)
{
    struct reader *const r = arg;
    const size_t from = r->n * (size_t)thread / (size_t)n_threads;
    const size_t to = r->n * ((size_t)thread + 1) / (size_t)n_threads;
    uint64_t s[8] = {0};
    for (size_t i = from; i + 8 <= to; i += 8) {
        for (int k = 0; k < 8; k++) {
            s[k] += r->data[i + (size_t)k];
        }
    }
    uint64_t sum = 0;
    for (int k = 0; k < 8; k++) {
        sum += s[k];
    }
    r->sum[thread % 256] = sum;
}

static double read_rate(struct bench *b)
{
    const size_t bytes = b->host.buffer_bytes / 2;
    double rates[3];
    for (int i = 0; i < 3; i++) {
        struct reader r = {.data = (const uint64_t *)cold(b, bytes), .n = bytes / 8};
        const uint64_t start = sl_clock_now_ns();
        run_on_pool(b, read_all, &r);
        rates[i] = 1e9 * (double)bytes / (double)(sl_clock_now_ns() - start);
    }
    return sl_median(rates, 3);
}

static enum sluice_status measure_memory(struct bench *b)
{
    b->p->dram_bytes_per_s = read_rate(b);
    SL_TRY(tick(b, "system memory"));
    b->p->dram_busy_bytes_per_s = b->p->dram_bytes_per_s;
    if (!b->vt) {
        return SLUICE_STATUS_OK;
    }
    const double link = b->p->h2d_bytes_per_s[SL_N_COPY_SIZES - 1];
    const double ns = 4e9 * (double)b->host.buffer_bytes / b->p->dram_bytes_per_s;
    SL_TRY(start_copies(b, ns));
    const double beside = read_rate(b);
    SL_TRY(b->vt->stream_sync(b->o->device, b->copy, b->err));
    b->p->dram_busy_bytes_per_s = beside + link * b->p->copy_busy_factor;
    return tick(b, "system memory during copies");
}

static enum sluice_status copy_rate(struct bench *b, size_t bytes, bool down, double *out)
{
    double rates[3];
    const int n = bytes >= 16 * MIB ? 2 : 8;
    for (int r = 0; r < 3; r++) {
        SL_TRY(b->vt->event_record(b->o->device, b->timer.start, b->copy, b->err));
        for (int i = 0; i < n; i++) {
            if (down) {
                SL_TRY(b->vt->copy_to_host(b->o->device, b->copy, cold(b, bytes), b->d_sink, bytes,
                                           b->err));
            } else {
                SL_TRY(b->vt->copy_to_device(b->o->device, b->copy, b->d_sink, cold(b, bytes),
                                             bytes, b->err));
            }
        }
        SL_TRY(b->vt->event_record(b->o->device, b->timer.stop, b->copy, b->err));
        SL_TRY(b->vt->stream_sync(b->o->device, b->copy, b->err));
        uint64_t ns = 0;
        SL_TRY(b->vt->event_elapsed(b->o->device, b->timer.start, b->timer.stop, &ns, b->err));
        rates[r] = 1e9 * (double)bytes * n / (double)(ns ? ns : 1);
    }
    *out = sl_median(rates, 3);
    return SLUICE_STATUS_OK;
}

/* One round trip: a hidden state of one token to the device, an op, and back. */
static enum sluice_status queue_round(struct bench *b, const struct sl_op *op, size_t bytes)
{
    struct sl_device *const dev = b->o->device;
    SL_TRY(b->vt->copy_to_device(dev, b->timer.stream, b->d_x, b->buffer, bytes, b->err));
    SL_TRY(b->vt->run(dev, b->timer.stream, op, 1, b->d_scratch, b->err));
    return b->vt->copy_to_host(dev, b->timer.stream, b->buffer, b->d_y, bytes, b->err);
}

static enum sluice_status time_rounds(struct bench *b, const struct sl_op *op, size_t bytes,
                                      struct sl_graph *graph)
{
    struct sl_device *const dev = b->o->device;
    double ns[9];
    for (int i = 0; i < 9; i++) {
        const uint64_t start = sl_clock_now_ns();
        SL_TRY(graph ? b->vt->graph_launch(dev, b->timer.stream, graph, b->err)
                     : queue_round(b, op, bytes));
        SL_TRY(b->vt->event_record(dev, b->timer.stop, b->timer.stream, b->err));
        SL_TRY(b->vt->event_sync(dev, b->timer.stop, b->err));
        ns[i] = (double)(sl_clock_now_ns() - start);
    }
    b->p->hop_ns = sl_median(ns, 9);
    return SLUICE_STATUS_OK;
}

/* What a plan with CPU steps pays for each change of sides: by a graph where passes use graphs. */
static enum sluice_status measure_hop(struct bench *b)
{
    struct sl_device *const dev = b->o->device;
    struct sl_op op = norm_op(1, b->dev.n_cols);
    const size_t bytes = (size_t)b->dev.n_cols * sizeof(float);
    bind_op(&op, NULL, b->d_x, b->d_y, NULL);
    double issue[9];
    for (int i = 0; i < 9; i++) {
        const uint64_t start = sl_clock_now_ns();
        SL_TRY(b->vt->run(dev, b->timer.stream, &op, 1, b->d_scratch, b->err));
        issue[i] = (double)(sl_clock_now_ns() - start);
    }
    b->p->issue_ns = sl_median(issue, 9);
    struct sl_graph *graph = NULL;
    if (b->vt->graph_begin && b->registered) {
        SL_TRY(b->vt->graph_begin(dev, b->timer.stream, b->err));
        const enum sluice_status queued = queue_round(b, &op, bytes);
        const enum sluice_status ended = b->vt->graph_end(dev, b->timer.stream, &graph, b->err);
        SL_TRY(ended);
        if (queued != SLUICE_STATUS_OK) {
            b->vt->graph_destroy(dev, graph);
            return queued;
        }
    }
    const enum sluice_status status = time_rounds(b, &op, bytes, graph);
    if (graph) {
        b->vt->graph_destroy(dev, graph);
    }
    SL_TRY(status);
    return tick(b, "round trips");
}

/* Rate at which kernels for passes of n tokens read page-locked system memory in place. */
static enum sluice_status time_mapped(struct bench *b, int32_t n, double *out)
{
    struct sl_op op = linear_op(SL_TYPE_Q4_0, b->dev.rows_decode, b->dev.n_cols, n);
    struct sl_op ops[4];
    for (int i = 0; i < 4; i++) {
        ops[i] = op;
        bind_op(&ops[i], cold(b, op_cold_bytes(&op)), b->d_x, b->d_y, b->d_pos);
    }
    double ns = 0;
    SL_TRY(sl_timer_list(&b->timer, ops, 4, b->d_scratch, true, &ns, b->err));
    *out = 4e9 * (double)op_cold_bytes(&op) / fmax(ns, 1);
    return SLUICE_STATUS_OK;
}

static enum sluice_status measure_mapped(struct bench *b)
{
    struct sl_device_info info;
    SL_TRY(b->vt->info(b->o->device, &info, b->err));
    if (!info.reads_host_memory || !b->registered) {
        return SLUICE_STATUS_OK;
    }
    SL_TRY(time_mapped(b, 1, &b->p->mapped_bytes_per_s));
    SL_TRY(time_mapped(b, 16, &b->p->mapped_tiles_bytes_per_s));
    return tick(b, "system memory read by the GPU");
}

static enum sluice_status measure_link(struct bench *b)
{
    for (int i = 0; i < SL_N_COPY_SIZES; i++) {
        SL_TRY(copy_rate(b, sl_copy_sizes[i], false, &b->p->h2d_bytes_per_s[i]));
        SL_TRY(tick(b, "copies"));
    }
    SL_TRY(copy_rate(b, 16 * MIB, true, &b->p->d2h_bytes_per_s));
    /* The same copy while the CPU reads: queue it, read, and see when it is done. */
    const size_t bytes = sl_copy_sizes[SL_N_COPY_SIZES - 1];
    struct reader r = {.data = (const uint64_t *)b->buffer, .n = b->host.buffer_bytes / 8};
    SL_TRY(b->vt->event_record(b->o->device, b->timer.start, b->copy, b->err));
    SL_TRY(b->vt->copy_to_device(b->o->device, b->copy, b->d_sink, cold(b, bytes), bytes, b->err));
    SL_TRY(b->vt->event_record(b->o->device, b->timer.stop, b->copy, b->err));
    run_on_pool(b, read_all, &r);
    SL_TRY(b->vt->stream_sync(b->o->device, b->copy, b->err));
    uint64_t ns = 0;
    SL_TRY(b->vt->event_elapsed(b->o->device, b->timer.start, b->timer.stop, &ns, b->err));
    const double busy = 1e9 * (double)bytes / (double)(ns ? ns : 1);
    b->p->copy_busy_factor = fmin(1.0, busy / b->p->h2d_bytes_per_s[SL_N_COPY_SIZES - 1]);

    const size_t piece = b->dev.weights_bytes / 2;
    const int n_copies = 8; /* one alone is too short to be timed */
    for (int i = -1; i < n_copies; i++) {
        if (i == 0) {
            SL_TRY(b->vt->event_record(b->o->device, b->timer.start, b->copy, b->err));
        }
        SL_TRY(b->vt->copy_on_device(b->o->device, b->copy, b->d_weights, b->d_weights + piece,
                                     piece, b->err));
    }
    SL_TRY(b->vt->event_record(b->o->device, b->timer.stop, b->copy, b->err));
    SL_TRY(b->vt->stream_sync(b->o->device, b->copy, b->err));
    SL_TRY(b->vt->event_elapsed(b->o->device, b->timer.start, b->timer.stop, &ns, b->err));
    b->p->vram_bytes_per_s = 2e9 * (double)piece * n_copies / (double)(ns ? ns : 1);
    SL_TRY(measure_hop(b));
    return measure_mapped(b);
}

static bool measured_type(const struct scale *scale, uint32_t type)
{
    const struct sl_type_traits *const t = sl_type_traits(type);
    if (!t || !t->computes) {
        return false;
    }
    /* The simulated device is as slow as one thread: three types stand for the others. */
    return scale->n_cols != SIM_COLS || type == SL_TYPE_F16 || type == SL_TYPE_Q8_0 ||
           type == SL_TYPE_Q4_K;
}

static enum sluice_status measure_cpu_linear(struct bench *b)
{
    for (uint32_t type = 0; type < SL_TYPE_N; type++) {
        if (!measured_type(&b->host, type)) {
            continue;
        }
        for (int i = 0; i < SL_N_TIERS && sl_tier_tokens[i] <= b->host.max_tokens; i++) {
            const int32_t n = sl_tier_tokens[i];
            const int32_t rows = n < 64 ? b->host.rows_decode : b->host.rows_prefill;
            const double mib = (double)rows * b->host.n_cols / MIB;
            const struct sl_op op = linear_op((enum sl_type)type, rows, b->host.n_cols, n);
            const double ns = time_cpu(b, op, 3);
            double busy_ns = ns;
            if (b->vt && n < 64) {
                SL_TRY(time_cpu_busy(b, op, ns, &busy_ns));
            }
            b->p->linear_ns[SL_UNIT_CPU][type][i] = ns / mib;
            b->p->linear_ns[SL_UNIT_CPU_BUSY][type][i] = busy_ns / mib;
        }
        SL_TRY(tick(b, sl_type_name(type)));
    }
    return SLUICE_STATUS_OK;
}

static double kv_mib(int32_t n_kv, enum sl_type type)
{
    return 2.0 * n_kv * KV_HEADS * (double)sl_type_row_bytes(type, HEAD_DIM) / MIB;
}

/* Useful operations of causal attention of the last n of n_kv positions. */
static double attention_gflop(int32_t n, int32_t n_kv)
{
    return 4e-9 * n * (n_kv - 0.5 * n) * HEADS * HEAD_DIM;
}

/* Decode over a cache of each type. */
static enum sluice_status measure_cpu_attention(struct bench *b)
{
    const int32_t n_kv = b->host.kv_tokens;
    for (int i = 0; i < SL_N_KV_TYPES; i++) {
        const struct sl_op decode = attention_op(1, n_kv, sl_kv_type_list[i]);
        const double alone_ns = time_cpu(b, decode, 3);
        double busy_ns = alone_ns;
        if (b->vt) {
            SL_TRY(time_cpu_busy(b, decode, alone_ns, &busy_ns));
        }
        const double mib = kv_mib(n_kv, sl_kv_type_list[i]);
        b->p->attention_mib_ns[SL_UNIT_CPU][i] = alone_ns / mib;
        b->p->attention_mib_ns[SL_UNIT_CPU_BUSY][i] = busy_ns / mib;
    }
    return tick(b, "attention");
}

static enum sluice_status measure_cpu_rest(struct bench *b)
{
    struct sl_profile *const p = b->p;
    const int32_t n_prefill = 64;
    const struct sl_op prefill = attention_op(n_prefill, 512, SL_TYPE_F16);
    SL_TRY(measure_cpu_attention(b));
    const double gflop_ns = time_cpu(b, prefill, 3) / attention_gflop(n_prefill, 512);
    const double norm_ns = time_cpu(b, norm_op(128, N_COLS), 5);
    const double op_ns = time_cpu(b, norm_op(1, 64), 7);
    for (int u = SL_UNIT_CPU; u <= SL_UNIT_CPU_BUSY; u++) {
        p->attention_gflop_ns[u] = gflop_ns;
        p->elementwise_mib_ns[u] = norm_ns / (128.0 * N_COLS * 4 / MIB);
        p->op_ns[u] = op_ns;
    }
    return tick(b, "norm");
}

static enum sluice_status measure_gpu(struct bench *b)
{
    struct sl_profile *const p = b->p;
    double ns = 0;
    SL_TRY(time_gpu(b, norm_op(1, 64), MAX_BATCH, &ns));
    p->op_ns[SL_UNIT_GPU] = ns;
    const double op_ns = ns;
    for (uint32_t type = 0; type < SL_TYPE_N; type++) {
        if (!measured_type(&b->dev, type)) {
            continue;
        }
        for (int i = 0; i < SL_N_TIERS && sl_tier_tokens[i] <= b->dev.max_tokens; i++) {
            const int32_t n = sl_tier_tokens[i];
            const int32_t rows = n < 64 ? b->dev.rows_decode : b->dev.rows_prefill;
            const double mib = (double)rows * b->dev.n_cols / MIB;
            const struct sl_op op = linear_op((enum sl_type)type, rows, b->dev.n_cols, n);
            SL_TRY(time_gpu(b, op, n < 64 ? cold_count(b, &op) : 1, &ns));
            p->linear_ns[SL_UNIT_GPU][type][i] = fmax(ns - op_ns, 0.1 * ns) / mib;
        }
        SL_TRY(tick(b, sl_type_name(type)));
    }
    for (int i = 0; i < SL_N_KV_TYPES; i++) {
        const enum sl_type type = sl_kv_type_list[i];
        SL_TRY(time_gpu(b, attention_op(1, b->dev.kv_tokens, type), 2, &ns));
        p->attention_mib_ns[SL_UNIT_GPU][i] =
            fmax(ns - op_ns, 0.1 * ns) / kv_mib(b->dev.kv_tokens, type);
    }
    const int32_t n_prefill = b->dev.max_tokens < 512 ? b->dev.max_tokens : 512;
    SL_TRY(time_gpu(b, attention_op(n_prefill, 2 * n_prefill, SL_TYPE_F16), 1, &ns));
    p->attention_gflop_ns[SL_UNIT_GPU] =
        fmax(ns - op_ns, 0.1 * ns) / attention_gflop(n_prefill, 2 * n_prefill);
    SL_TRY(time_gpu(b, norm_op(b->dev.max_tokens, b->dev.n_cols), 4, &ns));
    p->elementwise_mib_ns[SL_UNIT_GPU] =
        fmax(ns - op_ns, 0.1 * ns) / ((double)b->dev.max_tokens * b->dev.n_cols * 4 / MIB);
    return tick(b, "GPU");
}

static size_t largest_scratch(const struct scale *s)
{
    const struct sl_op ops[] = {linear_op(SL_TYPE_F16, s->rows_prefill, s->n_cols, s->max_tokens),
                                attention_op(1, s->kv_tokens, SL_TYPE_F16),
                                attention_op(64, 512, SL_TYPE_F16)};
    size_t most = 0;
    for (size_t i = 0; i < sizeof ops / sizeof ops[0]; i++) {
        const size_t bytes = sl_op_scratch_bytes(&ops[i]);
        most = bytes > most ? bytes : most;
    }
    return most;
}

static size_t activation_floats(const struct scale *s)
{
    const size_t wide = (size_t)(s->n_cols > HEADS * HEAD_DIM ? s->n_cols : HEADS * HEAD_DIM);
    const size_t rows =
        (size_t)(s->rows_decode > s->rows_prefill ? s->rows_decode : s->rows_prefill);
    const size_t most = wide > rows ? wide : rows;
    const size_t tokens = (size_t)(s->max_tokens > 128 ? s->max_tokens : 128);
    return most * tokens;
}

static enum sluice_status init_host(struct bench *b)
{
    b->host = (struct scale){.buffer_bytes = 768u * MIB,
                             .n_cols = N_COLS,
                             .rows_decode = 4096,
                             .rows_prefill = 512,
                             .max_tokens = 256,
                             .kv_tokens = 8192};
    b->buffer = sl_alloc_aligned(SL_MEM_EXEC, b->host.buffer_bytes, 4096);
    if (!b->buffer) {
        b->host.buffer_bytes = 256u * MIB;
        b->buffer = sl_alloc_aligned(SL_MEM_EXEC, b->host.buffer_bytes, 4096);
    }
    const size_t floats = activation_floats(&b->host);
    b->x = sl_alloc_aligned(SL_MEM_EXEC, floats * sizeof(float), 4096);
    b->y = sl_alloc_aligned(SL_MEM_EXEC, floats * sizeof(float), 4096);
    b->pos = sl_calloc(SL_MEM_EXEC, 4096, sizeof *b->pos);
    b->scratch = sl_alloc_aligned(
        SL_MEM_EXEC, sl_cpu_scratch_bytes(largest_scratch(&b->host), b->n_threads), 4096);
    SL_CHECK(b->buffer && b->x && b->y && b->pos && b->scratch, OUT_OF_MEMORY, b->err,
             "no memory for the profiler");
    run_on_pool(b, fill_pattern, b);
    for (size_t i = 0; i < floats; i++) {
        b->x[i] = (float)((double)((i * 2654435761u) & 0xffff) / 65536.0 - 0.5);
    }
    return SLUICE_STATUS_OK;
}

static enum sluice_status init_device(struct bench *b)
{
    struct sl_device *const dev = b->o->device;
    const bool sim = dev->kind == SL_DEVICE_SIM;
    b->dev = sim ? (struct scale){.weights_bytes = 32u * MIB,
                                  .n_cols = SIM_COLS,
                                  .rows_decode = 256,
                                  .rows_prefill = 128,
                                  .max_tokens = 64,
                                  .kv_tokens = 1024}
                 : (struct scale){.weights_bytes = 256u * MIB,
                                  .n_cols = N_COLS,
                                  .rows_decode = 8192,
                                  .rows_prefill = 4096,
                                  .max_tokens = 2048,
                                  .kv_tokens = 16384};
    b->vt = dev->vt;
    const size_t floats = activation_floats(&b->dev), sink = 64u * MIB;
    const size_t scratch = largest_scratch(&b->dev);
    const size_t total = b->dev.weights_bytes + sink + 2 * floats * sizeof(float) + scratch + 65536;
    void *mem = NULL;
    SL_TRY(b->vt->mem_alloc(dev, total, &mem, b->err));
    b->mem = mem;
    b->d_weights = b->mem;
    b->d_sink = b->d_weights + b->dev.weights_bytes;
    b->d_x = (float *)(b->d_sink + sink);
    b->d_y = b->d_x + floats;
    b->d_pos = (int32_t *)(b->d_y + floats);
    b->d_scratch = (uint8_t *)b->d_pos + 65536;
    SL_TRY(sl_timer_init(&b->timer, dev, b->err));
    SL_TRY(b->vt->stream_create(dev, &b->copy, b->err));
    b->registered =
        b->vt->host_register(dev, b->buffer, b->host.buffer_bytes, false, NULL) == SLUICE_STATUS_OK;
    SL_TRY(b->vt->copy_to_device(dev, b->timer.stream, b->d_weights, b->buffer,
                                 b->dev.weights_bytes, b->err));
    const size_t x_bytes = floats * sizeof(float);
    const size_t host_bytes = activation_floats(&b->host) * sizeof(float);
    for (size_t at = 0; at < x_bytes; at += host_bytes) {
        const size_t n = x_bytes - at < host_bytes ? x_bytes - at : host_bytes;
        SL_TRY(
            b->vt->copy_to_device(dev, b->timer.stream, (uint8_t *)b->d_x + at, b->x, n, b->err));
    }
    return b->vt->stream_sync(dev, b->timer.stream, b->err);
}

static void finish(struct bench *b)
{
    if (b->vt) {
        struct sl_device *const dev = b->o->device;
        sl_timer_finish(&b->timer);
        if (b->copy) {
            b->vt->stream_sync(dev, b->copy, NULL);
            b->vt->stream_destroy(dev, b->copy);
        }
        if (b->registered) {
            b->vt->host_unregister(dev, b->buffer);
        }
        if (b->mem) {
            b->vt->mem_free(dev, b->mem);
        }
    }
    sl_free(b->buffer);
    sl_free(b->x);
    sl_free(b->y);
    sl_free(b->pos);
    sl_free(b->scratch);
}

/* Who this machine is: the key of the cache. */
static enum sluice_status identify(struct sl_profile *p, const struct sl_profiler_options *o,
                                   struct sluice_error *err)
{
    memset(p, 0, sizeof *p);
    sl_profile_clear_factors(p);
    p->n_threads = o->pool ? sl_pool_n_threads(o->pool) : 1;
    snprintf(p->cpu, sizeof p->cpu, "%s", sl_cpu_name());
    if (o->device) {
        struct sl_device_info info;
        SL_TRY(o->device->vt->info(o->device, &info, err));
        p->kind = info.kind;
        snprintf(p->gpu, sizeof p->gpu, "%s", info.name);
    }
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_profiler_run(struct sl_profile *out,
                                   const struct sl_profiler_options *options,
                                   struct sluice_error *err)
{
    SL_TRY(identify(out, options, err));
    struct bench b = {.o = options,
                      .kernels =
                          options->kernels ? options->kernels : sl_cpu_kernels(sl_cpu_level()),
                      .p = out,
                      .n_threads = out->n_threads,
                      .n_total = options->device ? 46 : 20,
                      .err = err};
    enum sluice_status status = SLUICE_STATUS_OK;
    SL_TRY_OUT(init_host(&b));
    if (options->device) {
        SL_TRY_OUT(init_device(&b));
        SL_TRY_OUT(measure_link(&b));
    }
    SL_TRY_OUT(measure_memory(&b));
    SL_TRY_OUT(measure_cpu_linear(&b));
    SL_TRY_OUT(measure_cpu_rest(&b));
    if (options->device) {
        SL_TRY_OUT(measure_gpu(&b));
    }
out:
    finish(&b);
    return status;
}

enum sluice_status sl_profiler_get(struct sl_profile *out,
                                   const struct sl_profiler_options *options, bool *measured,
                                   struct sluice_error *err)
{
    if (measured) {
        *measured = false;
    }
    SL_TRY(identify(out, options, err));
    char name[64];
    sl_profile_file_name(name, sizeof name, out->kind, out->gpu, out->cpu, out->n_threads);
    char *path = NULL;
    struct sluice_error ignored;
    if (sl_file_cache_path(name, &path, &ignored) == SLUICE_STATUS_OK && sl_file_exists(path)) {
        if (sl_profile_load(out, path, &ignored) == SLUICE_STATUS_OK) {
            sl_free(path);
            return SLUICE_STATUS_OK;
        }
        sl_log(SL_LOG_WARN, "measuring again: %s", ignored.message);
    }
    const enum sluice_status status = sl_profiler_run(out, options, err);
    if (status == SLUICE_STATUS_OK) {
        if (measured) {
            *measured = true;
        }
        if (path && sl_profile_save(out, path, &ignored) != SLUICE_STATUS_OK) {
            sl_log(SL_LOG_WARN, "the profile is not kept: %s", ignored.message);
        }
    }
    sl_free(path);
    return status;
}
