/* SPDX-License-Identifier: Apache-2.0
 *
 * The scalar reference of every operator: what the kernels are held to. Plain loops, sums in
 * double, no blocking, no scratch. Slow on purpose; also the fallback where nothing else exists.
 */
#include <math.h>
#include <string.h>

#include "op/kv.h"
#include "op/op.h"

static void norm_ref(const struct sl_op_norm *op, int64_t n_rows)
{
    for (int64_t r = 0; r < n_rows; r++) {
        const float *x = op->x + r * op->n;
        float *y = op->y + r * op->n;
        double sum = 0.0;
        for (int32_t i = 0; i < op->n; i++) {
            sum += (double)x[i] * x[i];
        }
        const double scale = 1.0 / sqrt(sum / op->n + (double)op->eps);
        for (int32_t i = 0; i < op->n; i++) {
            const double weight = op->weight != NULL ? (double)op->weight[i] : 1.0;
            const double value = x[i] * scale * weight;
            y[i] = (float)(op->accumulate ? y[i] + value : value);
        }
    }
}

static double gated(enum sl_activation activation, double gate, double up)
{
    if (activation == SL_ACT_SILU) {
        return gate / (1.0 + exp(-gate)) * up;
    }
    if (activation == SL_ACT_SWIGLU_CLAMPED) {
        const double limit = (double)SL_SWIGLU_LIMIT;
        const double g = fmin(gate, limit);
        const double u = fmax(-limit, fmin(up, limit));
        return g / (1.0 + exp(-(double)SL_SWIGLU_ALPHA * g)) * (u + 1.0);
    }
    const double sqrt_2_over_pi = 0.79788456080286535588;
    const double cubic = gate + 0.044715 * gate * gate * gate;
    return 0.5 * gate * (1.0 + tanh(sqrt_2_over_pi * cubic)) * up;
}

/* Rows of any width pass through a small buffer: every block size divides it. */
#define CHUNK 256
#define TOKEN_TILE 16

/* One weight row times up to TOKEN_TILE inputs. */
static void row_products(const struct sl_matrix *w, int64_t row, const float *x, int n_tokens,
                         double *sums)
{
    const char *data = (const char *)w->data + (size_t)row * sl_matrix_pitch_bytes(w);
    for (int t = 0; t < n_tokens; t++) {
        sums[t] = 0.0;
    }
    for (int64_t at = 0; at < w->n_cols; at += CHUNK) {
        const int64_t n = w->n_cols - at < CHUNK ? w->n_cols - at : CHUNK;
        float values[CHUNK];
        sl_dequantize_row(w->type, data + sl_type_row_bytes(w->type, at), values, n);
        for (int t = 0; t < n_tokens; t++) {
            const float *xt = x + t * w->n_cols + at;
            for (int64_t i = 0; i < n; i++) {
                sums[t] += (double)values[i] * xt[i];
            }
        }
    }
}

static void linear_part_ref(const struct sl_op_linear *op, int part, int32_t n_tokens)
{
    const struct sl_matrix *w = &op->part[part].w;
    const float *bias = op->part[part].bias;
    for (int64_t row = 0; row < w->n_rows; row++) {
        for (int32_t t0 = 0; t0 < n_tokens; t0 += TOKEN_TILE) {
            const int n = n_tokens - t0 < TOKEN_TILE ? n_tokens - t0 : TOKEN_TILE;
            double sums[TOKEN_TILE];
            row_products(w, row, op->x + t0 * w->n_cols, n, sums);
            for (int t = 0; t < n; t++) {
                float *y = &op->part[part].y[(t0 + t) * w->n_rows + row];
                const double value = sums[t] + (bias != NULL ? (double)bias[row] : 0.0);
                *y = (float)(op->accumulate ? *y + value : value);
            }
        }
    }
}

static void linear_ref(const struct sl_op_linear *op, int32_t n_tokens)
{
    for (int i = 0; i < op->n_parts; i++) {
        linear_part_ref(op, i, n_tokens);
    }
    if (op->activation != SL_ACT_NONE) {
        const int64_t n = n_tokens * op->part[0].w.n_rows;
        float *gate = op->part[0].y;
        const float *up = op->part[1].y;
        for (int64_t i = 0; i < n; i++) {
            gate[i] = (float)gated(op->activation, (double)gate[i], (double)up[i]);
        }
    }
}

static void rope_ref(const struct sl_op_rope *op, int32_t n_tokens)
{
    const int32_t half = op->n_rot / 2;
    for (int64_t row = 0; row < (int64_t)n_tokens * op->n_heads; row++) {
        float *x = op->x + row * op->head_dim;
        for (int32_t i = 0; i < half; i++) {
            const double angle = (double)op->pos[row / op->n_heads] * (double)op->freq[i];
            const double c = cos(angle) * (double)op->magnitude;
            const double s = sin(angle) * (double)op->magnitude;
            float *a = &x[op->neox ? i : 2 * i];
            float *b = &x[op->neox ? i + half : 2 * i + 1];
            const double old_a = (double)*a;
            const double old_b = (double)*b;
            *a = (float)(old_a * c - old_b * s);
            *b = (float)(old_a * s + old_b * c);
        }
    }
}

static void kv_store_ref(const struct sl_op_kv_store *op, int32_t n_tokens)
{
    const struct sl_kv_view *kv = &op->kv;
    for (int32_t t = 0; t < n_tokens; t++) {
        const int32_t seq = op->seq != NULL ? op->seq[t] : 0;
        for (int32_t h = 0; h < kv->n_kv_heads && sl_kv_is_here(kv, op->pos[t]); h++) {
            const int64_t row = (int64_t)t * kv->n_kv_heads + h;
            void *k = sl_kv_key(kv, seq, op->pos[t], h);
            void *v = sl_kv_value(kv, seq, op->pos[t], h);
            float key[SL_KV_MAX_HEAD_DIM];
            memcpy(key, op->k + row * kv->head_dim, sizeof(float) * (size_t)kv->head_dim);
            if (sl_kv_turns_keys(kv->types)) {
                sl_kv_turn(key, kv->head_dim);
            }
            sl_quantize_row(kv->types.k, key, k, kv->head_dim);
            sl_quantize_row(kv->types.v, op->v + row * kv->head_dim, v, kv->head_dim);
        }
    }
}

/* Logit of one query against the key at `pos`. */
static double logit_ref(const struct sl_op_attention *op, const float *q, int32_t seq, int32_t pos,
                        int32_t kv_head)
{
    float key[256];
    const int32_t n = op->kv.head_dim;
    sl_dequantize_row(op->kv.types.k, sl_kv_key(&op->kv, seq, pos, kv_head), key, n);
    double dot = 0.0;
    for (int32_t i = 0; i < n; i++) {
        dot += (double)q[i] * key[i];
    }
    dot *= (double)op->scale;
    return op->softcap > 0.0f ? (double)op->softcap * tanh(dot / (double)op->softcap) : dot;
}

/* Three passes over the positions: maximum, sum, values. */
static void attention_row_ref(const struct sl_op_attention *op, int32_t token, int32_t head)
{
    const int32_t n = op->kv.head_dim;
    const int64_t row = (int64_t)token * op->n_heads + head;
    float q[SL_KV_MAX_HEAD_DIM];
    memcpy(q, op->q + row * n, sizeof(float) * (size_t)n);
    if (sl_kv_turns_keys(op->kv.types)) {
        sl_kv_turn(q, n);
    }
    const int32_t kv_head = head / (op->n_heads / op->kv.n_kv_heads);
    const int32_t seq = op->seq != NULL ? op->seq[token] : 0;
    const int32_t seen = op->pos[token];
    const int32_t seen_first = op->window > 0 && seen >= op->window ? seen - op->window + 1 : 0;
    const int32_t here_first = sl_kv_here_begin(&op->kv), here_last = sl_kv_here_end(&op->kv) - 1;
    const int32_t first = seen_first > here_first ? seen_first : here_first;
    const int32_t last = seen < here_last ? seen : here_last;

    double max = op->sinks != NULL ? (double)op->sinks[head] : -INFINITY;
    for (int32_t p = first; p <= last; p++) {
        max = fmax(max, logit_ref(op, q, seq, p, kv_head));
    }
    /* Where there is no logit yet any base will do: the difference of infinities would be NaN. */
    const double base = max > -INFINITY ? max : 0.0;
    double sum = op->sinks != NULL ? exp((double)op->sinks[head] - base) : 0.0;
    double out[256] = {0};
    for (int32_t p = first; p <= last; p++) {
        const double weight = exp(logit_ref(op, q, seq, p, kv_head) - base);
        float value[256];
        sl_dequantize_row(op->kv.types.v, sl_kv_value(&op->kv, seq, p, kv_head), value, n);
        for (int32_t i = 0; i < n; i++) {
            out[i] += weight * (double)value[i];
        }
        sum += weight;
    }
    for (int32_t i = 0; i < n; i++) {
        op->y[row * n + i] = first <= last ? (float)(out[i] / sum) : 0.0F;
    }
    if (op->lse != NULL) {
        op->lse[row] = sum != 0 ? (float)(base + log(sum)) : -INFINITY;
    }
}

static void merge_ref(const struct sl_op_merge *op, int64_t n_rows)
{
    for (int64_t row = 0; row < n_rows; row++) {
        const double a = (double)op->y_lse[row], b = (double)op->x_lse[row], max = fmax(a, b);
        const double by = exp(a - max), bx = exp(b - max);
        for (int64_t i = row * op->head_dim; i < (row + 1) * op->head_dim; i++) {
            const double sum = by * (double)op->y[i] + bx * (double)op->x[i];
            op->y[i] = max > -INFINITY ? (float)(sum / (by + bx)) : 0.0F;
        }
    }
}

/* p of every expert, and the scores that decide the choice. */
static void router_scores_ref(const struct sl_op_router *op, const float *x, double *p,
                              double *scores)
{
    const int32_t n = (int32_t)op->w.n_rows;
    double max = -INFINITY;
    for (int32_t e = 0; e < n; e++) {
        row_products(&op->w, e, x, 1, &p[e]);
        p[e] += op->bias != NULL ? (double)op->bias[e] : 0.0;
        max = fmax(max, p[e]);
    }
    double sum = 0.0;
    for (int32_t e = 0; e < n && op->gating == SL_GATING_SOFTMAX; e++) {
        sum += exp(p[e] - max);
    }
    for (int32_t e = 0; e < n; e++) {
        if (op->gating == SL_GATING_SOFTMAX) {
            p[e] = exp(p[e] - max) / sum;
        } else if (op->gating == SL_GATING_SIGMOID) {
            p[e] = 1.0 / (1.0 + exp(-p[e]));
        }
        scores[e] = p[e] + (op->selection_bias != NULL ? (double)op->selection_bias[e] : 0.0);
    }
}

static void router_token_ref(const struct sl_op_router *op, const float *x, int32_t *ids,
                             float *weights)
{
    double p[SL_MAX_EXPERTS], scores[SL_MAX_EXPERTS];
    bool taken[SL_MAX_EXPERTS] = {false};
    router_scores_ref(op, x, p, scores);
    for (int32_t j = 0; j < op->n_used; j++) {
        int32_t best = -1;
        for (int32_t e = 0; e < (int32_t)op->w.n_rows; e++) {
            /* The first free expert counts whatever its score; NaN never beats it. */
            if (!taken[e] && (best < 0 || scores[e] > scores[best] ||
                              (isnan(scores[best]) && !isnan(scores[e])))) {
                best = e;
            }
        }
        taken[best] = true;
        ids[j] = best;
    }
    double values[SL_MAX_EXPERTS_USED];
    double sum = 0.0;
    for (int32_t j = 0; j < op->n_used; j++) {
        values[j] = p[ids[j]];
        if (op->gating == SL_GATING_SOFTMAX_CHOSEN) {
            values[j] = 0.0;
            for (int32_t k = 0; k < op->n_used; k++) {
                values[j] += exp(p[ids[k]] - p[ids[j]]);
            }
            values[j] = 1.0 / values[j];
        }
        sum += values[j];
    }
    const double by = op->normalize ? fmax(sum, (double)SL_ROUTER_MIN_SUM) : 1.0;
    for (int32_t j = 0; j < op->n_used; j++) {
        weights[j] = (float)(values[j] / by * (double)op->scale);
    }
}

/* The matrix of an expert (counted from `first`), or one without data. */
static struct sl_matrix expert_matrix(const struct sl_experts_matrix *m, int32_t expert)
{
    const size_t bytes = (size_t)m->n_rows * sl_type_row_bytes(m->type, m->n_cols);
    return (struct sl_matrix){.data = m->table != NULL
                                          ? m->table[expert]
                                          : (const char *)m->data + (size_t)expert * bytes,
                              .type = m->type,
                              .n_rows = m->n_rows,
                              .n_cols = m->n_cols};
}

static double expert_row(const struct sl_experts_matrix *m, int32_t expert, int64_t row,
                         const float *x)
{
    const struct sl_matrix w = expert_matrix(m, expert);
    double sum;
    row_products(&w, row, x, 1, &sum);
    return sum + (m->bias != NULL ? (double)m->bias[expert * m->n_rows + row] : 0.0);
}

/* Row by row of y, with the activations made anew in pieces: slow, and needs no memory. */
#define PIECE 4096

static void expert_add_ref(const struct sl_op_experts *op, int32_t expert, const float *x,
                           double weight, float *y)
{
    const struct sl_experts_matrix *down = &op->down;
    const int64_t block = sl_type_traits(down->type)->block_items;
    for (int64_t at = 0; at < down->n_cols; at += PIECE / block * block) {
        const int64_t left = down->n_cols - at;
        const int64_t n = left < PIECE / block * block ? left : PIECE / block * block;
        float h[PIECE];
        for (int64_t i = 0; i < n; i++) {
            h[i] = (float)gated(op->activation, expert_row(&op->gate, expert, at + i, x),
                                expert_row(&op->up, expert, at + i, x));
        }
        const struct sl_matrix whole = expert_matrix(down, expert);
        const size_t row_bytes = sl_type_row_bytes(down->type, down->n_cols);
        for (int64_t row = 0; row < down->n_rows; row++) {
            const char *data = (const char *)whole.data + (size_t)row * row_bytes;
            const struct sl_matrix w = {.data = data + sl_type_row_bytes(down->type, at),
                                        .type = down->type,
                                        .n_rows = 1,
                                        .n_cols = n};
            double sum;
            row_products(&w, 0, h, 1, &sum);
            if (at == 0 && down->bias != NULL) {
                sum += (double)down->bias[expert * down->n_rows + row];
            }
            y[row] = (float)(y[row] + weight * sum);
        }
    }
}

static void experts_ref(const struct sl_op_experts *op, int32_t n_tokens)
{
    const int64_t n_embd = op->gate.n_cols;
    for (int32_t t = 0; t < n_tokens; t++) {
        float *y = op->y + t * n_embd;
        if (!op->accumulate) {
            memset(y, 0, (size_t)n_embd * sizeof(float));
        }
        for (int32_t j = 0; j < op->n_used; j++) {
            const int64_t pair = (int64_t)t * op->n_used + j;
            const int32_t expert = op->ids[pair] - op->first;
            if (expert >= 0 && expert < op->n && expert_matrix(&op->gate, expert).data != NULL) {
                expert_add_ref(op, expert, op->x + t * n_embd, (double)op->weights[pair], y);
            }
        }
    }
}

void sl_op_run_ref(const struct sl_op *op)
{
    switch (op->kind) {
    case SL_OP_NORM:
        norm_ref(&op->norm, (int64_t)op->n_tokens * op->norm.rows_per_token);
        break;
    case SL_OP_LINEAR:
        linear_ref(&op->linear, op->n_tokens);
        break;
    case SL_OP_ROPE:
        rope_ref(&op->rope, op->n_tokens);
        break;
    case SL_OP_KV_STORE:
        kv_store_ref(&op->kv_store, op->n_tokens);
        break;
    case SL_OP_ATTENTION:
        for (int32_t t = 0; t < op->n_tokens; t++) {
            for (int32_t h = 0; h < op->attention.n_heads; h++) {
                attention_row_ref(&op->attention, t, h);
            }
        }
        break;
    case SL_OP_ROUTER:
        for (int32_t t = 0; t < op->n_tokens; t++) {
            router_token_ref(&op->router, op->router.x + t * op->router.w.n_cols,
                             op->router.ids + (int64_t)t * op->router.n_used,
                             op->router.weights + (int64_t)t * op->router.n_used);
        }
        break;
    case SL_OP_EXPERTS:
        experts_ref(&op->experts, op->n_tokens);
        break;
    case SL_OP_DIVIDE:
        sl_op_divide_run(&op->divide, op->n_tokens);
        break;
    case SL_OP_ADD:
        for (int64_t i = 0; i < op->n_tokens * op->add.n; i++) {
            op->add.y[i] += op->add.x[i];
        }
        break;
    case SL_OP_MERGE:
        merge_ref(&op->merge, (int64_t)op->n_tokens * op->merge.n_heads);
        break;
    case SL_OP_N_KINDS:
        break;
    }
}
