/* SPDX-License-Identifier: Apache-2.0
 *
 * The router of a mixture: logits by the matrix product of the level, into scratch, then the choice
 * for each token. The choice is scalar: some hundred numbers a token.
 *
 *   scratch: | logits [n_tokens, n_experts] | scratch of the product |
 */
#include <math.h>
#include <string.h>

#include "cpu/linear.h"
#include "cpu/team.h"

static size_t logits_bytes(const struct sl_op *op)
{
    const size_t n = (size_t)op->n_tokens * (size_t)op->router.w.n_rows;
    return (n * sizeof(float) + 255) / 256 * 256;
}

/* Whether the weights are a softmax over the chosen: said so, or because the sum over all is
 * divided out again (what is chosen makes more than SL_ROUTER_MIN_SUM of it) and does not change
 * the order. That spares an exponential for every expert, while the team waits. */
static bool by_chosen(const struct sl_op_router *o)
{
    return o->gating == SL_GATING_SOFTMAX_CHOSEN ||
           (o->gating == SL_GATING_SOFTMAX && o->normalize && o->selection_bias == NULL);
}

/* p of every expert in place of its logit, for the gatings that know p before the choice. */
static void gate(const struct sl_op_router *o, float *p)
{
    const int32_t n = (int32_t)o->w.n_rows;
    if (by_chosen(o)) {
        return;
    }
    if (o->gating == SL_GATING_SIGMOID) {
        for (int32_t e = 0; e < n; e++) {
            p[e] = 1.0f / (1.0f + expf(-p[e]));
        }
    } else {
        float max = p[0];
        for (int32_t e = 1; e < n; e++) {
            max = p[e] > max ? p[e] : max;
        }
        float sum = 0.0f;
        for (int32_t e = 0; e < n; e++) {
            p[e] = expf(p[e] - max);
            sum += p[e];
        }
        for (int32_t e = 0; e < n; e++) {
            p[e] /= sum;
        }
    }
}

/* The n_used best of all experts by insertion into a short sorted list. Going through the experts
 * in rising order and moving only past smaller scores leaves the lower id first among equals; NaN
 * is as low as can be, so that every id is chosen at most once whatever the numbers. */
static void choose(const struct sl_op_router *o, const float *p, int32_t *ids)
{
    float best[SL_MAX_EXPERTS_USED];
    int32_t n = 0;
    for (int32_t e = 0; e < (int32_t)o->w.n_rows; e++) {
        float score = p[e] + (o->selection_bias != NULL ? o->selection_bias[e] : 0.0f);
        score = isnan(score) ? -INFINITY : score;
        if (n == o->n_used && !(score > best[n - 1])) {
            continue;
        }
        int32_t at = n < o->n_used ? n++ : n - 1;
        for (; at > 0 && score > best[at - 1]; at--) {
            best[at] = best[at - 1];
            ids[at] = ids[at - 1];
        }
        best[at] = score;
        ids[at] = e;
    }
}

static void weigh(const struct sl_op_router *o, const float *p, const int32_t *ids, float *weights)
{
    float sum = 0.0f;
    float max = -INFINITY;
    for (int32_t j = 0; j < o->n_used; j++) {
        max = p[ids[j]] > max ? p[ids[j]] : max;
    }
    for (int32_t j = 0; j < o->n_used; j++) {
        weights[j] = by_chosen(o) ? expf(p[ids[j]] - max) : p[ids[j]];
        sum += weights[j];
    }
    float by = 1.0f;
    if (by_chosen(o)) {
        by = sum; /* and then they add up to 1 */
    } else if (o->normalize) {
        by = sum < SL_ROUTER_MIN_SUM ? SL_ROUTER_MIN_SUM : sum;
    }
    for (int32_t j = 0; j < o->n_used; j++) {
        weights[j] = weights[j] / by * o->scale;
    }
}

static void make_product(const struct sl_op_router *o, float *logits, struct sl_op_linear *product)
{
    memset(product, 0, sizeof *product);
    product->x = o->x;
    product->n_parts = 1;
    product->part[0].w = o->w;
    product->part[0].bias = o->bias;
    product->part[0].y = logits;
}

void sl_cpu_router_fetch(const struct sl_cpu_thread *t, const struct sl_op *op)
{
    struct sl_op_linear product;
    make_product(&op->router, NULL, &product);
    sl_cpu_linear_fetch(t, &product, op->n_tokens);
}

void sl_cpu_router(const struct sl_cpu_thread *t, const struct sl_op *op)
{
    const struct sl_op_router *o = &op->router;
    float *logits = t->scratch;
    struct sl_op product = {.kind = SL_OP_LINEAR, .n_tokens = op->n_tokens};
    make_product(o, logits, &product.linear);
    sl_cpu_linear_exact(t, &product, (char *)t->scratch + logits_bytes(op));
    sl_cpu_barrier(t);
    for (int32_t i = t->thread; i < op->n_tokens; i += t->n_threads) {
        float *p = logits + (int64_t)i * o->w.n_rows;
        const int64_t at = (int64_t)i * o->n_used;
        gate(o, p);
        choose(o, p, o->ids + at);
        weigh(o, p, o->ids + at, o->weights + at);
    }
}
