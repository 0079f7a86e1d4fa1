/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrix products, scalar: rows are unpacked piece by piece and multiplied with every token. The
 * way of processors without kernels of their own.
 */
#include "cpu/linear_internal.h"

#define CHUNK 256
#define TOKEN_TILE 16

static void row_products(const struct sl_matrix *w, int64_t row, const float *x, int n_tokens,
                         float *sums)
{
    const char *data = (const char *)w->data + (size_t)row * sl_matrix_pitch_bytes(w);
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

void sl_linear_scalar_rows(const struct sl_op_linear *op, int part, int32_t n_tokens, int64_t first,
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
