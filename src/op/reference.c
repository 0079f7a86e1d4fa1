/* SPDX-License-Identifier: Apache-2.0
 *
 * The scalar reference of every operator: what the kernels are held to. Plain loops, sums in
 * double, no blocking, no scratch. Slow on purpose; also the fallback where nothing else exists.
 */
#include <math.h>

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

static double activate(enum sl_activation activation, double x)
{
    if (activation == SL_ACT_SILU) {
        return x / (1.0 + exp(-x));
    }
    const double sqrt_2_over_pi = 0.79788456080286535588;
    return 0.5 * x * (1.0 + tanh(sqrt_2_over_pi * (x + 0.044715 * x * x * x)));
}

/* Rows of any width pass through a small buffer: every block size divides it. */
#define CHUNK 256
#define TOKEN_TILE 16

/* One weight row times up to TOKEN_TILE inputs. */
static void row_products(const struct sl_matrix *w, int64_t row, const float *x, int n_tokens,
                         double *sums)
{
    const char *data = (const char *)w->data + (size_t)row * sl_type_row_bytes(w->type, w->n_cols);
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
            gate[i] = (float)(activate(op->activation, (double)gate[i]) * (double)up[i]);
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
        for (int32_t h = 0; h < kv->n_kv_heads; h++) {
            const int64_t row = (int64_t)t * kv->n_kv_heads + h;
            void *k = sl_kv_key(kv, seq, op->pos[t], h);
            void *v = sl_kv_value(kv, seq, op->pos[t], h);
            sl_quantize_row(kv->type, op->k + row * kv->head_dim, k, kv->head_dim);
            sl_quantize_row(kv->type, op->v + row * kv->head_dim, v, kv->head_dim);
        }
    }
}

/* Logit of one query against the key at `pos`. */
static double logit_ref(const struct sl_op_attention *op, const float *q, int32_t seq, int32_t pos,
                        int32_t kv_head)
{
    float key[256];
    const int32_t n = op->kv.head_dim;
    sl_dequantize_row(op->kv.type, sl_kv_key(&op->kv, seq, pos, kv_head), key, n);
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
    const float *q = op->q + row * n;
    const int32_t kv_head = head / (op->n_heads / op->kv.n_kv_heads);
    const int32_t seq = op->seq != NULL ? op->seq[token] : 0;
    const int32_t last = op->pos[token];
    const int32_t first = op->window > 0 && last >= op->window ? last - op->window + 1 : 0;

    double max = op->sinks != NULL ? (double)op->sinks[head] : -INFINITY;
    for (int32_t p = first; p <= last; p++) {
        max = fmax(max, logit_ref(op, q, seq, p, kv_head));
    }
    double sum = op->sinks != NULL ? exp((double)op->sinks[head] - max) : 0.0;
    double out[256] = {0};
    for (int32_t p = first; p <= last; p++) {
        const double weight = exp(logit_ref(op, q, seq, p, kv_head) - max);
        float value[256];
        sl_dequantize_row(op->kv.type, sl_kv_value(&op->kv, seq, p, kv_head), value, n);
        for (int32_t i = 0; i < n; i++) {
            out[i] += weight * (double)value[i];
        }
        sum += weight;
    }
    for (int32_t i = 0; i < n; i++) {
        op->y[row * n + i] = (float)(out[i] / sum);
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
    case SL_OP_N_KINDS:
        break;
    }
}
