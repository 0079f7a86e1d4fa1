/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrix products, scalar: rows are unpacked chunk by chunk and multiplied with every token.
 */
#include "cpu/linear.h"

#include <math.h>

#define CHUNK 256
#define TOKEN_TILE 16

const struct sl_cpu_linear_kernels *sl_cpu_linear_kernels(enum sl_cpu_level level)
{
    (void)level;
    return NULL;
}

static void row_products(const struct sl_matrix *w, int64_t row, const float *x, int n_tokens,
                         float *sums)
{
    const char *data = (const char *)w->data + (size_t)row * sl_type_row_bytes(w->type, w->n_cols);
    for (int t = 0; t < n_tokens; t++) {
        sums[t] = 0.0f;
    }
    for (int64_t at = 0; at < w->n_cols; at += CHUNK) {
        const int64_t n = w->n_cols - at < CHUNK ? w->n_cols - at : CHUNK;
        float values[CHUNK];
        sl_dequantize_row(w->type, data + sl_type_row_bytes(w->type, at), values, n);
        for (int t = 0; t < n_tokens; t++) {
            const float *xt = x + t * w->n_cols + at;
            float sum = 0.0f;
            for (int64_t i = 0; i < n; i++) {
                sum += values[i] * xt[i];
            }
            sums[t] += sum;
        }
    }
}

static void part_rows(const struct sl_op_linear *op, int part, int32_t n_tokens, int64_t first,
                      int64_t end)
{
    const struct sl_matrix *w = &op->part[part].w;
    const float *bias = op->part[part].bias;
    for (int64_t row = first; row < end; row++) {
        for (int32_t t0 = 0; t0 < n_tokens; t0 += TOKEN_TILE) {
            const int n = n_tokens - t0 < TOKEN_TILE ? n_tokens - t0 : TOKEN_TILE;
            float sums[TOKEN_TILE];
            row_products(w, row, op->x + t0 * w->n_cols, n, sums);
            for (int t = 0; t < n; t++) {
                float *y = &op->part[part].y[(t0 + t) * w->n_rows + row];
                const float value = sums[t] + (bias != NULL ? bias[row] : 0.0f);
                *y = op->accumulate ? *y + value : value;
            }
        }
    }
}

static float activate(enum sl_activation activation, float x)
{
    if (activation == SL_ACT_SILU) {
        return x / (1.0f + expf(-x));
    }
    return 0.5f * x * (1.0f + tanhf(0.797884561f * (x + 0.044715f * x * x * x)));
}

void sl_cpu_linear(const struct sl_cpu_kernels *k, const struct sl_op *op, void *scratch,
                   void *thread_scratch, struct sl_pool *pool_or_null, int thread, int n_threads)
{
    (void)k;
    (void)scratch;
    (void)thread_scratch;
    (void)pool_or_null;
    const struct sl_op_linear *l = &op->linear;
    for (int i = 0; i < l->n_parts; i++) {
        const int64_t n = l->part[i].w.n_rows;
        part_rows(l, i, op->n_tokens, n * thread / n_threads, n * (thread + 1) / n_threads);
    }
    if (l->activation == SL_ACT_NONE) {
        return;
    }
    /* Gate and up have one height, so this thread made exactly these rows of both. */
    const int64_t n = l->part[0].w.n_rows;
    for (int32_t t = 0; t < op->n_tokens; t++) {
        for (int64_t row = n * thread / n_threads; row < n * (thread + 1) / n_threads; row++) {
            float *gate = &l->part[0].y[t * n + row];
            *gate = activate(l->activation, *gate) * l->part[1].y[t * n + row];
        }
    }
}
