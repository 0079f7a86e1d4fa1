/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrix products on the CPU: which way an op goes, and which rows are whose. The ways are in
 * linear_rows.c (few tokens), linear_panels.c (many) and linear_scalar.c (no kernels).
 */
#include "cpu/linear.h"

#include "cpu/linear_internal.h"

/* The first row of part i at or after byte `at` of all parts laid end to end, a multiple of
 * `unit`. */
static int64_t row_at(const struct sl_op_linear *op, int i, size_t at, int unit)
{
    const bool gated = op->activation != SL_ACT_NONE;
    for (int before = 0; !gated && before < i; before++) {
        const struct sl_matrix *w = &op->part[before].w;
        const size_t bytes = (size_t)w->n_rows * sl_type_row_bytes(w->type, w->n_cols);
        if (at <= bytes) {
            return 0;
        }
        at -= bytes;
    }
    const struct sl_matrix *w = &op->part[i].w;
    const int64_t row = (int64_t)(at / sl_type_row_bytes(w->type, w->n_cols));
    const int64_t whole = (row + unit - 1) / unit * unit;
    return whole < w->n_rows ? whole : w->n_rows;
}

void sl_linear_share(const struct sl_linear_call *c, int i, int unit, int64_t *first, int64_t *end)
{
    const struct sl_op_linear *op = c->op;
    /* Gate and up are swept together, by the rows of the gate. */
    const int n_parts = op->activation != SL_ACT_NONE ? 1 : op->n_parts;
    size_t bytes = 0;
    for (int p = 0; p < n_parts; p++) {
        const struct sl_matrix *w = &op->part[p].w;
        bytes += (size_t)w->n_rows * sl_type_row_bytes(w->type, w->n_cols);
    }
    const size_t n = (size_t)c->n_threads;
    const size_t thread = (size_t)c->thread;
    /* Without overflow: bytes * thread / n. */
    const size_t from = bytes / n * thread + bytes % n * thread / n;
    const size_t to = bytes / n * (thread + 1) + bytes % n * (thread + 1) / n;
    *first = row_at(op, i, from, unit);
    *end = c->thread == c->n_threads - 1 ? op->part[i].w.n_rows : row_at(op, i, to, unit);
}

static void run_scalar(const struct sl_linear_call *c)
{
    const struct sl_op_linear *op = c->op;
    const bool gated = op->activation != SL_ACT_NONE;
    int64_t first, end;
    for (int i = 0; i < op->n_parts; i++) {
        sl_linear_share(c, gated ? 0 : i, 16, &first, &end);
        sl_linear_scalar_rows(op, i, c->n_tokens, first, end);
    }
    for (int32_t t = 0; gated && t < c->n_tokens; t++) {
        float *gate = op->part[0].y + t * op->part[0].w.n_rows + first;
        const float *up = op->part[1].y + t * op->part[0].w.n_rows + first;
        c->kernels->activate(op->activation, gate, up, gate, end - first);
    }
}

void sl_linear_run(const struct sl_linear_call *c)
{
    if (c->kernels->rows == NULL) {
        run_scalar(c);
    } else if (c->n_tokens <= SL_LINEAR_ROWS_TOKENS) {
        sl_linear_run_rows(c);
    } else {
        sl_linear_run_panels(c);
    }
}

static void run_op(const struct sl_cpu_kernels *k, const struct sl_op *op, void *scratch, void *own,
                   struct sl_pool *pool, int thread, int n_threads, bool exact)
{
    const struct sl_linear_call call = {
        .kernels = sl_cpu_linear_kernels(k->level),
        .op = &op->linear,
        .n_tokens = op->n_tokens,
        .scratch = scratch,
        .own = own,
        .pool = pool,
        .thread = thread,
        .n_threads = n_threads,
        .exact = exact,
    };
    sl_linear_run(&call);
}

void sl_cpu_linear(const struct sl_cpu_kernels *k, const struct sl_op *op, void *scratch,
                   void *thread_scratch, struct sl_pool *pool_or_null, int thread, int n_threads)
{
    run_op(k, op, scratch, thread_scratch, pool_or_null, thread, n_threads, false);
}

void sl_cpu_linear_exact(const struct sl_cpu_kernels *k, const struct sl_op *op, void *scratch,
                         void *thread_scratch, struct sl_pool *pool_or_null, int thread,
                         int n_threads)
{
    run_op(k, op, scratch, thread_scratch, pool_or_null, thread, n_threads, true);
}
