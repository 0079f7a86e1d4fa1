/* SPDX-License-Identifier: Apache-2.0
 *
 * Running an op on a CPU level or a device, once or timed.
 */
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/median.h"
#include "base/mem.h"
#include "kcheck.h"
#include "op/kv.h"

#define SCRATCH_GUARD 4096
#define N_TIMES 15
/* Operands of timed runs take turns over so much memory, so that they come from DRAM as in use. */
#define COLD_BYTES ((size_t)192 << 20)
#define MAX_COPIES 64

/* Scratch full of NaN, with a guard that is looked at afterwards. */
static enum sluice_status run_cpu(struct kc_target *t, const struct sl_op *op, int n_threads,
                                  struct sluice_error *err)
{
    const size_t bytes = sl_cpu_scratch_bytes(sl_op_scratch_bytes(op), n_threads);
    char *scratch = sl_alloc_aligned(SL_MEM_BASE, bytes + SCRATCH_GUARD, 64);
    SL_CHECK(scratch != NULL, OUT_OF_MEMORY, err, "no memory for %zu bytes of scratch", bytes);
    memset(scratch, 0xff, bytes + SCRATCH_GUARD);
    if (n_threads > 1) {
        sl_pool_limit(t->pool, n_threads);
    }
    sl_cpu_run(t->kernels, n_threads > 1 ? t->pool : NULL, op, 1, scratch);
    enum sluice_status status = SLUICE_STATUS_OK;
    for (size_t i = 0; i < SCRATCH_GUARD; i++) {
        if ((unsigned char)scratch[bytes + i] != 0xff) {
            status = sl_error_set(err, SLUICE_STATUS_INTERNAL,
                                  "wrote %zu bytes past its %zu bytes of scratch", i + 1, bytes);
        }
    }
    sl_free(scratch);
    return status;
}

/* Device memory for a run, and its stream. */
struct session {
    struct sl_device *dev;
    struct sl_stream *stream;
    void *block, *scratch;
};

static void session_finish(struct session *s)
{
    if (s->stream != NULL) {
        s->dev->vt->stream_destroy(s->dev, s->stream);
    }
    if (s->block != NULL) {
        s->dev->vt->mem_free(s->dev, s->block);
    }
    if (s->scratch != NULL) {
        s->dev->vt->mem_free(s->dev, s->scratch);
    }
}

static enum sluice_status session_init(struct session *s, struct sl_device *dev, size_t block_bytes,
                                       size_t scratch_bytes, struct sluice_error *err)
{
    *s = (struct session){.dev = dev};
    SL_TRY(dev->vt->mem_alloc(dev, block_bytes, &s->block, err));
    SL_TRY(dev->vt->mem_alloc(dev, scratch_bytes + 256, &s->scratch, err));
    return dev->vt->stream_create(dev, SL_STREAM_OPERATORS, &s->stream, err);
}

static enum sluice_status run_device(struct kc_target *t, const struct kc_instance *in, char *block,
                                     struct sluice_error *err)
{
    struct sl_device *dev = t->device;
    struct session s;
    enum sluice_status status;
    SL_TRY_OUT(session_init(&s, dev, in->bytes, sl_op_scratch_bytes(&in->op), err));
    const struct sl_op op = kc_op_moved(&in->op, in->base, s.block);
    kc_tables_move(in, block, s.block);
    SL_TRY_OUT(dev->vt->copy_to_device(dev, s.stream, s.block, block, in->bytes, err));
    SL_TRY_OUT(dev->vt->run(dev, s.stream, &op, 1, s.scratch, err));
    SL_TRY_OUT(dev->vt->copy_to_host(dev, s.stream, block, s.block, in->bytes, err));
    SL_TRY_OUT(dev->vt->stream_sync(dev, s.stream, err));
    kc_tables_move(in, block, in->base);
out:
    session_finish(&s);
    return status;
}

enum sluice_status kc_target_run(struct kc_target *t, const struct kc_instance *in, char *block,
                                 int n_threads, struct sluice_error *err)
{
    if (t->device != NULL) {
        return run_device(t, in, block, err);
    }
    const struct sl_op op = kc_op_moved(&in->op, in->base, block);
    kc_tables_move(in, block, block);
    const enum sluice_status status = run_cpu(t, &op, n_threads, err);
    kc_tables_move(in, block, in->base);
    return status;
}

static void summarize(double *times, double *median_ns, double *spread_ns)
{
    *median_ns = sl_median(times, N_TIMES); /* and in order from here on */
    *spread_ns = (times[N_TIMES * 3 / 4] - times[N_TIMES / 4]) / 2.0;
}

static enum sluice_status time_cpu(struct kc_target *t, const struct kc_instance *in, double *times,
                                   struct sluice_error *err)
{
    size_t n_copies = COLD_BYTES / in->bytes + 1;
    n_copies = n_copies > MAX_COPIES ? MAX_COPIES : n_copies;
    const size_t scratch_bytes = sl_cpu_scratch_bytes(sl_op_scratch_bytes(&in->op), t->n_threads);
    char *copies = sl_alloc_aligned(SL_MEM_BASE, n_copies * in->bytes, 256);
    char *scratch = sl_alloc_aligned(SL_MEM_BASE, scratch_bytes, 64);
    enum sluice_status status = SLUICE_STATUS_OK;
    if (copies == NULL || scratch == NULL) {
        status = sl_error_set(err, SLUICE_STATUS_OUT_OF_MEMORY, "no memory for timing");
        goto out;
    }
    for (size_t i = 0; i < n_copies; i++) {
        memcpy(copies + i * in->bytes, in->base, in->bytes);
    }
    sl_pool_limit(t->pool, t->n_threads);
    for (int i = -2; i < N_TIMES; i++) {
        char *block = copies + (size_t)(i + 2) % n_copies * in->bytes;
        const struct sl_op op = kc_op_moved(&in->op, in->base, block);
        const uint64_t start = sl_clock_now_ns();
        sl_cpu_run(t->kernels, t->pool, &op, 1, scratch);
        if (i >= 0) {
            times[i] = (double)(sl_clock_now_ns() - start);
        }
    }
out:
    sl_free(copies);
    sl_free(scratch);
    return status;
}

/* Several copies of the op in one list, between two events, so that the queue never runs dry. */
static enum sluice_status time_device(struct kc_target *t, const struct kc_instance *in,
                                      double *times, struct sluice_error *err)
{
    struct sl_device *dev = t->device;
    struct sl_event *from = NULL;
    struct sl_event *to = NULL;
    struct sl_op ops[MAX_COPIES];
    int n_copies = (int)(COLD_BYTES / in->bytes) + 1;
    n_copies = n_copies > MAX_COPIES ? MAX_COPIES : n_copies;
    struct session s;
    enum sluice_status status;
    SL_TRY_OUT(
        session_init(&s, dev, in->bytes * (size_t)n_copies, sl_op_scratch_bytes(&in->op), err));
    SL_TRY_OUT(dev->vt->event_create(dev, true, &from, err));
    SL_TRY_OUT(dev->vt->event_create(dev, true, &to, err));
    for (int i = 0; i < n_copies; i++) {
        char *block = (char *)s.block + (size_t)i * in->bytes;
        SL_TRY_OUT(dev->vt->copy_to_device(dev, s.stream, block, in->base, in->bytes, err));
        ops[i] = kc_op_moved(&in->op, in->base, block);
    }
    for (int i = -1; i < N_TIMES; i++) {
        uint64_t ns = 0;
        SL_TRY_OUT(dev->vt->event_record(dev, from, s.stream, err));
        SL_TRY_OUT(dev->vt->run(dev, s.stream, ops, n_copies, s.scratch, err));
        SL_TRY_OUT(dev->vt->event_record(dev, to, s.stream, err));
        SL_TRY_OUT(dev->vt->event_sync(dev, to, err));
        SL_TRY_OUT(dev->vt->event_elapsed(dev, from, to, &ns, err));
        if (i >= 0) {
            times[i] = (double)ns / n_copies;
        }
    }
out:
    if (from != NULL) {
        dev->vt->event_destroy(dev, from);
    }
    if (to != NULL) {
        dev->vt->event_destroy(dev, to);
    }
    session_finish(&s);
    return status;
}

enum sluice_status kc_target_time(struct kc_target *t, const struct kc_instance *in,
                                  double *median_ns, double *spread_ns, struct sluice_error *err)
{
    double times[N_TIMES];
    SL_TRY(t->device != NULL ? time_device(t, in, times, err) : time_cpu(t, in, times, err));
    summarize(times, median_ns, spread_ns);
    return SLUICE_STATUS_OK;
}

/* The experts that are chosen at all, each read once. */
static void experts_work(const struct sl_op_experts *o, int32_t n_tokens, double *bytes,
                         double *flops)
{
    const struct sl_experts_matrix *const matrices[] = {&o->gate, &o->up, &o->down};
    const int64_t n_pairs = (int64_t)n_tokens * o->n_used;
    bool used[SL_MAX_EXPERTS] = {false};
    int n_experts = 0;
    for (int64_t i = 0; i < n_pairs; i++) {
        n_experts += !used[o->ids[i]];
        used[o->ids[i]] = true;
    }
    for (int i = 0; i < 3; i++) {
        const struct sl_experts_matrix *m = matrices[i];
        *bytes +=
            (double)n_experts * (double)m->n_rows * (double)sl_type_row_bytes(m->type, m->n_cols);
        *flops += 2.0 * (double)n_pairs * (double)m->n_rows * (double)m->n_cols;
    }
}

void kc_case_work(const struct kc_instance *in, double *bytes, double *flops)
{
    const struct sl_op *op = &in->op;
    const double n_tokens = op->n_tokens;
    *bytes = 0.0;
    *flops = 0.0;
    if (op->kind == SL_OP_LINEAR) {
        for (int i = 0; i < op->linear.n_parts; i++) {
            const struct sl_matrix *w = &op->linear.part[i].w;
            *bytes += (double)(sl_type_row_bytes(w->type, w->n_cols) * (size_t)w->n_rows);
            *flops += 2.0 * n_tokens * (double)w->n_rows * (double)w->n_cols;
        }
    } else if (op->kind == SL_OP_ATTENTION) {
        const struct sl_op_attention *o = &op->attention;
        double keys = 0.0;
        for (int32_t t = 0; t < op->n_tokens; t++) {
            keys += o->pos[t] + 1;
        }
        *flops = 4.0 * keys * o->n_heads * o->kv.head_dim;
        *bytes = (double)sl_kv_block_bytes(o->kv.types, o->kv.n_kv_heads, o->kv.head_dim) *
                 o->n_kv_max / SL_KV_BLOCK;
    } else if (op->kind == SL_OP_ROUTER) {
        const struct sl_matrix *w = &op->router.w;
        *bytes = (double)(sl_type_row_bytes(w->type, w->n_cols) * (size_t)w->n_rows);
        *flops = 2.0 * n_tokens * (double)w->n_rows * (double)w->n_cols;
    } else if (op->kind == SL_OP_EXPERTS) {
        experts_work(&op->experts, op->n_tokens, bytes, flops);
    } else if (op->kind == SL_OP_ADD) {
        *bytes = 12.0 * n_tokens * (double)op->add.n;
    } else if (op->kind == SL_OP_MERGE) {
        *bytes = n_tokens * op->merge.n_heads * (12.0 * op->merge.head_dim + 8.0);
    } else if (op->kind == SL_OP_NORM) {
        *bytes = 8.0 * n_tokens * op->norm.rows_per_token * op->norm.n;
    } else if (op->kind == SL_OP_ROPE) {
        *bytes = 8.0 * n_tokens * op->rope.n_heads * op->rope.n_rot;
    } else if (op->kind == SL_OP_KV_STORE) {
        const struct sl_kv_view *kv = &op->kv_store.kv;
        const double token =
            (double)sl_kv_block_bytes(kv->types, kv->n_kv_heads, kv->head_dim) / SL_KV_BLOCK;
        *bytes = n_tokens * (8.0 * kv->n_kv_heads * kv->head_dim + token);
    }
}
