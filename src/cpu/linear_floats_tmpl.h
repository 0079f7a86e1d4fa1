/* SPDX-License-Identifier: Apache-2.0
 *
 * Float panels: rows unpacked to floats, or pairs of bfloats, and their products with tiles of
 * tokens. Included by one source file a level, after the vector operations.
 *
 * Panel, for each column (pair of columns) one line of two vectors, one lane a row. A tile is as
 * many tokens as there are registers for sums.
 */
#ifndef SL_CPU_LINEAR_FLOATS_TMPL_H
#define SL_CPU_LINEAR_FLOATS_TMPL_H

#include "cpu/linear_internal.h"

#define FLOATS_ROWS (2 * V_LANES)

/* Rows of 4-byte items, `stride` bytes apart, to lines. */
INLINE void transpose_items(const uint8_t *rows, size_t stride, int n_steps, uint8_t *panel)
{
    for (int half = 0; half < 2; half++) {
        for (int c = 0; c < n_steps; c += V_LANES) {
            vi columns[V_LANES];
            transpose_32(rows + (size_t)(half * V_LANES) * stride + c * 4, stride, columns);
            for (int i = 0; i < V_LANES; i++) {
                vi_store(panel + (2 * (c + i) + half) * V_BYTES, columns[i]);
            }
        }
    }
}

/* Columns first .. first + n_cols - 1 of a row to floats. */
INLINE void row_to_floats(enum sl_type type, const uint8_t *row, int64_t first, int n_cols,
                          float *dst)
{
    int i = 0;
    if (type == SL_TYPE_F32) {
        memcpy(dst, row + 4 * first, (size_t)n_cols * sizeof(float));
        return;
    }
    if (type == SL_TYPE_F16 || type == SL_TYPE_BF16) {
        for (; i + V_LANES <= n_cols; i += V_LANES) {
            const uint8_t *p = row + 2 * (first + i);
            vf_store(dst + i, type == SL_TYPE_F16 ? vf_load_f16(p) : vf_load_bf16(p));
        }
    }
    /* Blocks of 256 are wider than a panel. */
    const int64_t items = sl_type_traits(type)->block_items;
    while (i < n_cols) {
        float block[256];
        const int64_t start = (first + i) / items * items;
        const int skip = (int)(first + i - start);
        const int64_t whole = items < 32 ? 1 : items;
        const int n = n_cols - i < whole - skip ? n_cols - i : (int)(whole - skip);
        sl_dequantize_row(type, row + sl_type_row_bytes(type, start), block, whole);
        memcpy(dst + i, block + skip, (size_t)n * sizeof(float));
        i += n;
    }
}

INLINE void build_floats_body(enum sl_type type, const uint8_t *w, size_t row_bytes, int n_rows,
                              int64_t first, int n_cols, void *panel, void *rows)
{
    const int whole = (n_cols + V_LANES - 1) / V_LANES * V_LANES;
    for (int r = 0; r < FLOATS_ROWS; r++) {
        float *row = (float *)rows + r * SL_LINEAR_FLOATS_STEPS;
        const int n = r < n_rows ? n_cols : 0;
        row_to_floats(type, w + (size_t)r * row_bytes, first, n, row);
        memset(row + n, 0, (size_t)(whole - n) * sizeof(float));
    }
    transpose_items(rows, SL_LINEAR_FLOATS_STEPS * sizeof(float), whole, panel);
}

INLINE void floats_tile_body(const uint8_t *panel, const float *x, const int n_tokens, int n_steps,
                             float *y, int64_t stride)
{
    vf acc[FLOATS_TOKENS][2];
    for (int t = 0; t < n_tokens; t++) {
        acc[t][0] = vf_load(y + t * stride);
        acc[t][1] = vf_load(y + t * stride + V_LANES);
    }
    for (int k = 0; k < n_steps; k++) {
        const vf w0 = vf_load(panel + 2 * k * V_BYTES);
        const vf w1 = vf_load(panel + (2 * k + 1) * V_BYTES);
        for (int t = 0; t < n_tokens; t++) {
            const vf one = vf_set1(x[t * SL_LINEAR_FLOATS_STRIDE + k]);
            acc[t][0] = vf_fma(w0, one, acc[t][0]);
            acc[t][1] = vf_fma(w1, one, acc[t][1]);
        }
    }
    for (int t = 0; t < n_tokens; t++) {
        vf_store(y + t * stride, acc[t][0]);
        vf_store(y + t * stride + V_LANES, acc[t][1]);
    }
}

#ifdef __AVX512BF16__
/* n_cols is whole 32s. Rows are turned where they lie, unless some are missing. */
INLINE void build_bfloats_body(const uint8_t *w, size_t row_bytes, int n_rows, int64_t first,
                               int n_cols, void *panel, void *rows)
{
    const uint8_t *at = w + 2 * first;
    if (n_rows < FLOATS_ROWS) {
        const size_t bytes = (size_t)n_cols * 2;
        for (int r = 0; r < FLOATS_ROWS; r++) {
            uint8_t *row = (uint8_t *)rows + (size_t)r * bytes;
            if (r < n_rows) {
                memcpy(row, at + (size_t)r * row_bytes, bytes);
            } else {
                memset(row, 0, bytes);
            }
        }
        at = rows;
        row_bytes = bytes;
    }
    transpose_items(at, row_bytes, n_cols / 2, panel);
}

/* To [pair of columns][tokens]. */
INLINE void pack_bfloats_body(const float *x, int64_t stride, int n_tokens, int64_t n_cols,
                              void *dst)
{
    uint32_t *out = dst;
    for (int t = 0; t < n_tokens; t++) {
        for (int64_t i = 0; i < n_cols; i += 16) {
            const __m256bh halves = _mm512_cvtneps_pbh(vf_load(x + t * stride + i));
            uint32_t pairs[8];
            memcpy(pairs, &halves, sizeof(pairs));
            for (int k = 0; k < 8; k++) {
                out[(i / 2 + k) * n_tokens + t] = pairs[k];
            }
        }
    }
}

INLINE void bfloats_tile_body(const uint8_t *panel, const float *x, const int n_tokens, int n_steps,
                              float *y, int64_t stride)
{
    vf acc[FLOATS_TOKENS][2];
    for (int t = 0; t < n_tokens; t++) {
        acc[t][0] = vf_load(y + t * stride);
        acc[t][1] = vf_load(y + t * stride + V_LANES);
    }
    for (int k = 0; k < n_steps; k++) {
        const vi w0 = vi_load(panel + 2 * k * V_BYTES);
        const vi w1 = vi_load(panel + (2 * k + 1) * V_BYTES);
        for (int t = 0; t < n_tokens; t++) {
            const __m512bh pair = (__m512bh)vf_set1(x[k * n_tokens + t]);
            acc[t][0] = _mm512_dpbf16_ps(acc[t][0], (__m512bh)w0, pair);
            acc[t][1] = _mm512_dpbf16_ps(acc[t][1], (__m512bh)w1, pair);
        }
    }
    for (int t = 0; t < n_tokens; t++) {
        vf_store(y + t * stride, acc[t][0]);
        vf_store(y + t * stride + V_LANES, acc[t][1]);
    }
}
#endif

#define FLOATS_CASE(body, n)                                                                       \
    case n:                                                                                        \
        body(panel, x, n, n_steps, y, stride);                                                     \
        break;
#if FLOATS_TOKENS == 14
#define FLOATS_CASES(body)                                                                         \
    FLOATS_CASE(body, 1)                                                                           \
    FLOATS_CASE(body, 2)                                                                           \
    FLOATS_CASE(body, 3)                                                                           \
    FLOATS_CASE(body, 4)                                                                           \
    FLOATS_CASE(body, 5)                                                                           \
    FLOATS_CASE(body, 6)                                                                           \
    FLOATS_CASE(body, 7)                                                                           \
    FLOATS_CASE(body, 8)                                                                           \
    FLOATS_CASE(body, 9)                                                                           \
    FLOATS_CASE(body, 10)                                                                          \
    FLOATS_CASE(body, 11)                                                                          \
    FLOATS_CASE(body, 12) FLOATS_CASE(body, 13) FLOATS_CASE(body, 14)
#else
#define FLOATS_CASES(body)                                                                         \
    FLOATS_CASE(body, 1)                                                                           \
    FLOATS_CASE(body, 2)                                                                           \
    FLOATS_CASE(body, 3)                                                                           \
    FLOATS_CASE(body, 4)                                                                           \
    FLOATS_CASE(body, 5) FLOATS_CASE(body, 6)
#endif
#define FLOATS_FUNCTION(name, body)                                                                \
    void name(const void *panel, const void *x, int n_tokens, int n_steps, float *y,               \
              int64_t stride)                                                                      \
    {                                                                                              \
        switch (n_tokens) {                                                                        \
            FLOATS_CASES(body)                                                                     \
        }                                                                                          \
    }

#endif
