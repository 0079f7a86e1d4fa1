/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrix products on the CPU: which way an op goes, and which rows are whose. The ways are in
 * linear_rows.c (few tokens), linear_panels.c (many) and linear_scalar.c (no kernels).
 */
#include "cpu/linear.h"

#include "cpu/linear_internal.h"
#include "cpu/team.h"

/* Rows that are not worth dividing. */
#define ROW_UNIT 1

static size_t part_bytes(const struct sl_op_linear *op, int i)
{
    const struct sl_matrix *w = &op->part[i].w;
    return (size_t)w->n_rows * sl_type_row_bytes(w->type, w->n_cols);
}

int sl_linear_n_swept(const struct sl_op_linear *op)
{
    return op->activation != SL_ACT_NONE ? 1 : op->n_parts;
}

size_t sl_linear_line_bytes(const struct sl_op_linear *op)
{
    size_t bytes = 0;
    for (int i = 0; i < sl_linear_n_swept(op); i++) {
        bytes += part_bytes(op, i);
    }
    return bytes;
}

/* The first row of part i at or after byte `at` of the part, a multiple of the unit. */
static int64_t row_at(const struct sl_op_linear *op, int i, int64_t at)
{
    const struct sl_matrix *w = &op->part[i].w;
    if (at <= 0) {
        return 0;
    }
    const int64_t row = at / (int64_t)sl_type_row_bytes(w->type, w->n_cols);
    const int64_t whole = (row + ROW_UNIT - 1) / ROW_UNIT * ROW_UNIT;
    return whole < w->n_rows ? whole : w->n_rows;
}

void sl_linear_rows_between(const struct sl_op_linear *op, int i, int64_t from, int64_t to,
                            int64_t *first, int64_t *end)
{
    int64_t start = 0;
    for (int before = 0; before < i && before < sl_linear_n_swept(op); before++) {
        start += (int64_t)part_bytes(op, before);
    }
    *first = row_at(op, i, from - start);
    *end = row_at(op, i, to - start);
}

/* No kernels: equal shares, since arithmetic is what takes the time. */
static void run_scalar(const struct sl_linear_call *c)
{
    const struct sl_op_linear *op = c->op;
    const bool gated = op->activation != SL_ACT_NONE;
    const int64_t bytes = (int64_t)sl_linear_line_bytes(op);
    const int64_t from = bytes / c->n_threads * c->thread;
    const int64_t to =
        c->thread == c->n_threads - 1 ? bytes : bytes / c->n_threads * (c->thread + 1);
    int64_t first, end;
    for (int i = 0; i < op->n_parts; i++) {
        sl_linear_rows_between(op, gated ? 0 : i, from, to, &first, &end);
        sl_linear_scalar_rows(op, i, c->n_tokens, first, end);
    }
    for (int32_t t = 0; gated && t < c->n_tokens; t++) {
        float *gate = op->part[0].y + t * op->part[0].w.n_rows + first;
        const float *up = op->part[1].y + t * op->part[0].w.n_rows + first;
        c->kernels->activate(op->activation, gate, up, gate, end - first);
    }
}

/* Unpacking to panels pays from fewer tokens on where activations would stay floats. */
static bool by_rows(const struct sl_op_linear *op, int n_tokens)
{
    for (int i = 0; i < op->n_parts && n_tokens > SL_LINEAR_CALL_TOKENS; i++) {
        if (sl_linear_layout(op->part[i].w.type) == SL_LINEAR_FLOAT) {
            return false;
        }
    }
    return n_tokens <= SL_LINEAR_ROWS_TOKENS;
}

void sl_linear_run(const struct sl_linear_call *c)
{
    if (c->kernels->rows == NULL) {
        run_scalar(c);
    } else if (by_rows(c->op, c->n_tokens)) {
        sl_linear_run_rows(c);
    } else {
        sl_linear_run_panels(c);
    }
}

static void run_op(const struct sl_cpu_thread *t, const struct sl_op *op, void *scratch, bool exact)
{
    const struct sl_linear_call call = {
        .kernels = sl_cpu_linear_kernels(t->kernels->level),
        .op = &op->linear,
        .n_tokens = op->n_tokens,
        .scratch = scratch,
        .own = t->own,
        .pool = t->pool,
        .thread = t->thread,
        .n_threads = t->n_threads,
        .taken = t->taken,
        .exact = exact,
    };
    sl_linear_run(&call);
}

void sl_cpu_linear(const struct sl_cpu_thread *t, const struct sl_op *op)
{
    run_op(t, op, t->scratch, false);
}

void sl_cpu_linear_exact(const struct sl_cpu_thread *t, const struct sl_op *op, void *scratch)
{
    run_op(t, op, scratch, true);
}

void sl_cpu_linear_fetch(const struct sl_cpu_thread *t, const struct sl_op_linear *op, int n_tokens)
{
    const struct sl_linear_call call = {
        .op = op, .n_tokens = n_tokens, .thread = t->thread, .n_threads = t->n_threads};
    if (by_rows(op, n_tokens)) {
        sl_linear_fetch_rows(&call);
    }
}
