/* SPDX-License-Identifier: Apache-2.0
 *
 * Memories and the way between them: what plain reads, copies, kernels that read system memory and
 * changes of sides reach (see profiler.h).
 */
#include <math.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/median.h"
#include "exec/profiler_internal.h"

#define MIB (1u << 20)

/* Queue copies that keep the link busy for about `ns`. */
enum sluice_status sl_profiler_start_copies(struct sl_profiler *b, double ns)
{
    const size_t piece = 16 * MIB;
    const double rate = b->p->h2d_bytes_per_s[SL_N_COPY_SIZES - 1];
    const int n = (int)fmin(512, ceil(rate * ns * 1e-9 / (double)piece) + 1);
    for (int i = 0; i < n; i++) {
        SL_TRY(b->vt->copy_to_device(b->o->device, b->copy, b->d_sink, sl_profiler_cold(b, piece),
                                     piece, b->err));
    }
    return SLUICE_STATUS_OK;
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

static double read_rate(struct sl_profiler *b)
{
    const size_t bytes = b->host.buffer_bytes / 2;
    double rates[3];
    for (int i = 0; i < 3; i++) {
        struct reader r = {.data = (const uint64_t *)sl_profiler_cold(b, bytes), .n = bytes / 8};
        const uint64_t start = sl_clock_now_ns();
        sl_profiler_on_pool(b, read_all, &r);
        rates[i] = 1e9 * (double)bytes / (double)(sl_clock_now_ns() - start);
    }
    return sl_median(rates, 3);
}

enum sluice_status sl_profiler_measure_memory(struct sl_profiler *b)
{
    b->p->dram_bytes_per_s = read_rate(b);
    SL_TRY(sl_profiler_tick(b, "system memory"));
    b->p->dram_busy_bytes_per_s = b->p->dram_bytes_per_s;
    if (!b->vt) {
        return SLUICE_STATUS_OK;
    }
    const double link = b->p->h2d_bytes_per_s[SL_N_COPY_SIZES - 1];
    const double ns = 4e9 * (double)b->host.buffer_bytes / b->p->dram_bytes_per_s;
    SL_TRY(sl_profiler_start_copies(b, ns));
    const double beside = read_rate(b);
    SL_TRY(b->vt->stream_sync(b->o->device, b->copy, b->err));
    b->p->dram_busy_bytes_per_s = beside + link * b->p->copy_busy_factor;
    return sl_profiler_tick(b, "system memory during copies");
}

static enum sluice_status copy_rate(struct sl_profiler *b, size_t bytes, bool down, double *out)
{
    double rates[3];
    const int n = bytes >= 16 * MIB ? 2 : 8;
    for (int r = 0; r < 3; r++) {
        SL_TRY(b->vt->event_record(b->o->device, b->timer.start, b->copy, b->err));
        for (int i = 0; i < n; i++) {
            if (down) {
                SL_TRY(b->vt->copy_to_host(b->o->device, b->copy, sl_profiler_cold(b, bytes),
                                           b->d_sink, bytes, b->err));
            } else {
                SL_TRY(b->vt->copy_to_device(b->o->device, b->copy, b->d_sink,
                                             sl_profiler_cold(b, bytes), bytes, b->err));
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
static enum sluice_status queue_round(struct sl_profiler *b, const struct sl_op *op, size_t bytes)
{
    struct sl_device *const dev = b->o->device;
    SL_TRY(b->vt->copy_to_device(dev, b->timer.stream, b->d_x, b->buffer, bytes, b->err));
    SL_TRY(b->vt->run(dev, b->timer.stream, op, 1, b->d_scratch, b->err));
    return b->vt->copy_to_host(dev, b->timer.stream, b->buffer, b->d_y, bytes, b->err);
}

static enum sluice_status time_rounds(struct sl_profiler *b, const struct sl_op *op, size_t bytes,
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
static enum sluice_status measure_hop(struct sl_profiler *b)
{
    struct sl_device *const dev = b->o->device;
    struct sl_op op = sl_profiler_norm_op(1, b->dev.n_cols);
    const size_t bytes = (size_t)b->dev.n_cols * sizeof(float);
    sl_profiler_bind_op(&op, NULL, b->d_x, b->d_y, NULL);
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
    return sl_profiler_tick(b, "round trips");
}

/* Rate at which kernels for passes of n tokens read page-locked system memory in place. */
static enum sluice_status time_mapped(struct sl_profiler *b, int32_t n, double *out)
{
    struct sl_op op = sl_profiler_linear_op(SL_TYPE_Q4_0, b->dev.rows_decode, b->dev.n_cols, n);
    struct sl_op ops[4];
    for (int i = 0; i < 4; i++) {
        ops[i] = op;
        sl_profiler_bind_op(&ops[i], sl_profiler_cold(b, sl_profiler_op_bytes(&op)), b->d_x, b->d_y,
                            b->d_pos);
    }
    double ns = 0;
    SL_TRY(sl_timer_list(&b->timer, ops, 4, b->d_scratch, true, &ns, b->err));
    *out = 4e9 * (double)sl_profiler_op_bytes(&op) / fmax(ns, 1);
    return SLUICE_STATUS_OK;
}

static enum sluice_status measure_mapped(struct sl_profiler *b)
{
    struct sl_device_info info;
    SL_TRY(b->vt->info(b->o->device, &info, b->err));
    if (!info.reads_host_memory || !b->registered) {
        return SLUICE_STATUS_OK;
    }
    SL_TRY(time_mapped(b, 1, &b->p->mapped_bytes_per_s));
    SL_TRY(time_mapped(b, 16, &b->p->mapped_tiles_bytes_per_s));
    return sl_profiler_tick(b, "system memory read by the GPU");
}

enum sluice_status sl_profiler_measure_link(struct sl_profiler *b)
{
    for (int i = 0; i < SL_N_COPY_SIZES; i++) {
        SL_TRY(copy_rate(b, sl_copy_sizes[i], false, &b->p->h2d_bytes_per_s[i]));
        SL_TRY(sl_profiler_tick(b, "copies"));
    }
    SL_TRY(copy_rate(b, 16 * MIB, true, &b->p->d2h_bytes_per_s));
    /* The same copy while the CPU reads: queue it, read, and see when it is done. */
    const size_t bytes = sl_copy_sizes[SL_N_COPY_SIZES - 1];
    struct reader r = {.data = (const uint64_t *)b->buffer, .n = b->host.buffer_bytes / 8};
    SL_TRY(b->vt->event_record(b->o->device, b->timer.start, b->copy, b->err));
    SL_TRY(b->vt->copy_to_device(b->o->device, b->copy, b->d_sink, sl_profiler_cold(b, bytes),
                                 bytes, b->err));
    SL_TRY(b->vt->event_record(b->o->device, b->timer.stop, b->copy, b->err));
    sl_profiler_on_pool(b, read_all, &r);
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
