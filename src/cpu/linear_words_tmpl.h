/* SPDX-License-Identifier: Apache-2.0
 *
 * Word panels: half and bfloat rows as 16-bit integers with one scale per 128 columns, and their
 * products with activations in the same form (one scale per 32), where the processor adds two
 * products of words at once: twice as many multiplications as with floats. A value keeps 14 bits of
 * the largest that shares its scale, so the products are closer than those of bfloats. Included
 * after the unpacking of blocks.
 *
 * The integers stay within WORD_LIMIT, so that 32 products fit 32 bits.
 */
#ifndef SL_CPU_LINEAR_WORDS_TMPL_H
#define SL_CPU_LINEAR_WORDS_TMPL_H

#include "cpu/linear_bytes_tmpl.h"

#define WORD_LIMIT 8191
_Static_assert((int64_t)32 * WORD_LIMIT * WORD_LIMIT <= INT32_MAX, "sums of 32 products");
/* Columns of a row that share a scale. */
#define WORD_COLS 128

/* From values to words. So small that the factor would overflow: zeros. */
INLINE float word_factor(float max)
{
    return max > 1e-33f ? (float)WORD_LIMIT / max : 0.0f;
}

/* Pack 32 floats to words at dst; returns the scale. */
INLINE float pack_words_32(const vf v[32 / V_LANES], int16_t *dst)
{
    vf largest = vf_larger_magnitude(v[0], v[1]);
    for (int i = 2; i < 32 / V_LANES; i++) {
        largest = vf_larger_magnitude(largest, v[i]);
    }
    const float max = vf_largest(largest);
    for (int i = 0; i < 32 / V_LANES; i += 2) {
        store_words(dst + i * V_LANES, v[i], v[i + 1], word_factor(max));
    }
    return max * (1.0f / (float)WORD_LIMIT);
}

static void pack_words(const float *x, int64_t stride, int n_tokens, int64_t n_cols, int16_t *q,
                       float *d)
{
    for (int64_t block = 0; block < n_cols / 32; block++) {
        for (int t = 0; t < n_tokens; t++) {
            const int64_t at = block * n_tokens + t;
            vf v[32 / V_LANES];
            for (int i = 0; i < 32 / V_LANES; i++) {
                v[i] = vf_load(x + t * stride + 32 * block + i * V_LANES);
            }
            d[at] = pack_words_32(v, q + 32 * at);
        }
    }
}

/* The largest magnitude of n values of 16 bits. Without their signs, halves and bfloats are ordered
 * as integers. */
INLINE float largest_of(const uint8_t *p, int n, bool bf16)
{
    const vi magnitude = vi_set1(0x7fff7fff);
    vi largest = vi_zero();
    for (int i = 0; i < n; i += 2 * V_LANES) {
        largest = vi_max_u16(largest, vi_and(vi_load(p + 2 * i), magnitude));
    }
    const uint16_t bits = vi_largest_u16(largest);
    return bf16 ? sl_bf16_to_f32(bits) : _cvtsh_ss(bits);
}

INLINE void build_words(bool bf16, const uint8_t *w, size_t row_bytes, int n_rows, int n_cols,
                        struct sl_linear_panel *panel)
{
    for (int r = 0; r < n_rows; r++) {
        const uint8_t *row = w + (size_t)r * row_bytes;
        fetch_segment(row + PANEL_FETCH_ROWS * row_bytes, (size_t)n_cols * 2);
        for (int at = 0; at < n_cols; at += WORD_COLS) {
            const int n = n_cols - at < WORD_COLS ? n_cols - at : WORD_COLS;
            const uint8_t *p = row + 2 * at;
            uint8_t *to = panel->rows + r * ROW_STRIDE + 2 * at;
            const float max = largest_of(p, n, bf16);
            const float factor = word_factor(max);
            for (int i = 0; i < n; i += 2 * V_LANES) {
                const uint8_t *a = p + 2 * i;
                const uint8_t *b = a + 2 * V_LANES;
                store_words(to + 2 * i, bf16 ? vf_load_bf16(a) : vf_load_f16(a),
                            bf16 ? vf_load_bf16(b) : vf_load_f16(b), factor);
            }
            for (int i = 0; i < n; i += 32) {
                panel->d[(at + i) / 32 * PANEL_ROWS + r] = max * (1.0f / (float)WORD_LIMIT);
            }
        }
    }
    clear_rows(panel, n_rows);
    transpose_rows(panel, (n_cols * 2 + V_BYTES - 1) / V_BYTES, false);
}

static void build_words_f16(const uint8_t *w, size_t row_bytes, int n_rows, int n_cols,
                            struct sl_linear_panel *panel)
{
    build_words(false, w, row_bytes, n_rows, n_cols, panel);
}

static void build_words_bf16(const uint8_t *w, size_t row_bytes, int n_rows, int n_cols,
                             struct sl_linear_panel *panel)
{
    build_words(true, w, row_bytes, n_rows, n_cols, panel);
}

/* 16 columns. */
INLINE void word_products(vi sums[][2], const uint8_t *q, const int8_t *x, const int n_tokens)
{
    for (int k = 0; k < 8; k++) {
        const vi w0 = vi_load(q + 2 * k * V_BYTES);
        const vi w1 = vi_load(q + (2 * k + 1) * V_BYTES);
        for (int t = 0; t < n_tokens; t++) {
            const vi pair = four_bytes(x + 64 * t + 4 * k);
            sums[t][0] = vi_dpwssd(sums[t][0], w0, pair);
            sums[t][1] = vi_dpwssd(sums[t][1], w1, pair);
        }
    }
}

INLINE void words_body(const struct sl_linear_panel *panel, const struct sl_linear_tile *x,
                       const int n_tokens, int n_cols, float *y, int64_t stride)
{
    vf acc[BYTES_TOKENS][2];
    for (int t = 0; t < n_tokens; t++) {
        acc[t][0] = vf_load(y + t * stride);
        acc[t][1] = vf_load(y + t * stride + V_LANES);
    }
    const uint8_t *q = panel->q;
    const float *d = panel->d;
    const int8_t *xq = x->q;
    const float *xd = x->d;
    for (int block = 0; block < n_cols / 32; block++) {
        vi sums[BYTES_TOKENS][2];
        for (int t = 0; t < n_tokens; t++) {
            sums[t][0] = sums[t][1] = vi_zero();
        }
        for (int half = 0; half < 2; half++) { /* as much as compilers unroll */
            word_products(sums, q + half * 16 * V_BYTES, xq + 32 * half, n_tokens);
        }
        for (int t = 0; t < n_tokens; t++) {
            const vf s0 = vf_mul(vf_from_int(sums[t][0]), vf_load(d));
            const vf s1 = vf_mul(vf_from_int(sums[t][1]), vf_load(d + V_LANES));
            acc[t][0] = vf_fma(s0, vf_set1(xd[t]), acc[t][0]);
            acc[t][1] = vf_fma(s1, vf_set1(xd[t]), acc[t][1]);
        }
        q += 32 * V_BYTES;
        d += PANEL_ROWS;
        xq += 64 * n_tokens;
        xd += n_tokens;
    }
    for (int t = 0; t < n_tokens; t++) {
        vf_store(y + t * stride, acc[t][0]);
        vf_store(y + t * stride + V_LANES, acc[t][1]);
    }
}

#define WORDS_CASE(n, unused)                                                                      \
    case n:                                                                                        \
        words_body(panel, x, n, n_cols, y, stride);                                                \
        break;
static void tile_words(const void *panel, const void *x, int n_tokens, int n_cols, float *y,
                       int64_t stride)
{
    switch (n_tokens) {
        TOKEN_CASES(WORDS_CASE, 0)
    }
}

/* Entries of the types table of a level. */
#define WORDS_F16_ENTRY                                                                            \
    [SL_TYPE_F16] = {.kind = SL_LINEAR_WORDS, .build = build_words_f16, .tile = tile_words}
#define WORDS_BF16_ENTRY                                                                           \
    [SL_TYPE_BF16] = {.kind = SL_LINEAR_WORDS, .build = build_words_bf16, .tile = tile_words}

#endif
