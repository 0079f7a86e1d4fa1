/* SPDX-License-Identifier: Apache-2.0
 *
 * Neighbouring operators of a list that one launch can do. What a list computes stays the same to
 * the byte of every output, intermediate ones included: a fused launch writes them all, so that
 * nobody has to know what is read later. A pattern that does not fit is left to be run one by one.
 */
#include <stdint.h>

#include "device/cuda/cuda_device.h"
#include "device/cuda/fuse.h"

/* Memory that an operator reads or writes. */
struct span {
    const char *at;
    size_t bytes;
};

static struct span floats(const float *at, int64_t n)
{
    return (struct span){(const char *)at, (size_t)n * sizeof *at};
}

static bool overlap(struct span a, struct span b)
{
    return a.at < b.at + b.bytes && b.at < a.at + a.bytes;
}

/* ---- norm and what multiplies its output ---- */

/* Whether `first` is a norm whose output `x` (n_cols wide) is. Every block of a fused launch reads
 * the norm's input while others write what they have, so outputs must lie apart from it. */
static bool is_norm_of(const struct sl_op *first, const struct sl_op *second, const float *x,
                       int64_t n_cols, const struct span *outputs, int n_outputs)
{
    const struct sl_op_norm *norm = &first->norm;
    if (first->kind != SL_OP_NORM || norm->accumulate || norm->rows_per_token != 1 ||
        norm->y != x || norm->n != n_cols || first->n_tokens != second->n_tokens) {
        return false;
    }
    const struct span from = floats(norm->x, first->n_tokens * n_cols);
    const struct span to = floats(norm->y, first->n_tokens * n_cols);
    bool apart = !overlap(from, to);
    for (int i = 0; i < n_outputs; i++) {
        apart = apart && !overlap(outputs[i], from) && !overlap(outputs[i], to);
    }
    return apart;
}

static bool is_norm_of_linear(const struct sl_op *first, const struct sl_op *second,
                              const struct sl_cuda_props *props)
{
    const struct sl_op_linear *linear = &second->linear;
    if (second->kind != SL_OP_LINEAR) {
        return false;
    }
    struct span outputs[SL_LINEAR_MAX_PARTS];
    for (int i = 0; i < linear->n_parts; i++) {
        outputs[i] = floats(linear->part[i].y, second->n_tokens * linear->part[i].w.n_rows);
    }
    return is_norm_of(first, second, linear->x, linear->part[0].w.n_cols, outputs,
                      linear->n_parts) &&
           sl_cuda_linear_takes_norm(second, props);
}

static bool is_norm_of_router(const struct sl_op *first, const struct sl_op *second)
{
    const struct sl_op_router *router = &second->router;
    if (second->kind != SL_OP_ROUTER) {
        return false;
    }
    const int64_t n = (int64_t)second->n_tokens * router->n_used;
    const struct span outputs[2] = {
        {(const char *)router->ids, (size_t)n * sizeof *router->ids},
        floats(router->weights, n),
    };
    return is_norm_of(first, second, router->x, router->w.n_cols, outputs, 2) &&
           sl_cuda_router_takes_norm(second);
}

/* ---- the list ---- */

int sl_cuda_run_fused(cudaStream_t stream, const struct sl_op *ops, int n_ops, void *scratch,
                      const struct sl_cuda_props *props, int *n_taken)
{
    *n_taken = 0;
    if (n_ops >= 2 && is_norm_of_linear(&ops[0], &ops[1], props)) {
        *n_taken = 2;
        return sl_cuda_linear_normed(stream, &ops[1], &ops[0].norm, scratch,
                                     sl_op_scratch_bytes(&ops[1]), props);
    }
    if (n_ops >= 2 && is_norm_of_router(&ops[0], &ops[1])) {
        *n_taken = 2;
        return sl_cuda_router_normed(stream, &ops[1], &ops[0].norm, scratch,
                                     sl_op_scratch_bytes(&ops[1]), props);
    }
    *n_taken = sl_cuda_heads_fused(ops, n_ops);
    return *n_taken > 0 ? sl_cuda_heads(stream, ops, *n_taken, props) : 0;
}
