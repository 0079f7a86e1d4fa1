/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of byte panels (linear_unpack_tmpl.h) with tiles of tokens packed to 8 bits. Included by
 * one source file a level, after the unpacking of blocks.
 *
 * The products of 32 columns (16 for types with finer scales) are summed as integers, then scaled
 * by the row's and the token's scale. An offset of the levels is a start value of the integer sum;
 * a minimum adds minimum times scaled sum of the activations.
 */
#ifndef SL_CPU_LINEAR_BYTES_TMPL_H
#define SL_CPU_LINEAR_BYTES_TMPL_H

#include "cpu/linear_unpack_tmpl.h"

INLINE vi four_bytes(const int8_t *x)
{
    int32_t four;
    memcpy(&four, x, sizeof(four));
    return vi_set1(four);
}

/* Integer products of n_steps times 4 columns. `add` is how many pairs of products may be added
 * in 16 bits before they must be widened; it divides n_steps. */
INLINE void int_products(vi sums[][2], const uint8_t *q, const int8_t *x, const int32_t *start,
                         const int n_tokens, const int n_steps, const int add)
{
    for (int t = 0; t < n_tokens; t++) {
        sums[t][0] = sums[t][1] = start != NULL ? vi_set1(start[t]) : vi_zero();
    }
#if HAVE_DPBUSD
    (void)add;
    for (int k = 0; k < n_steps; k++) {
        const vi w0 = vi_load(q + 2 * k * V_BYTES);
        const vi w1 = vi_load(q + (2 * k + 1) * V_BYTES);
        for (int t = 0; t < n_tokens; t++) {
            const vi four = four_bytes(x + 32 * t + 4 * k);
            sums[t][0] = vi_dpbusd(sums[t][0], w0, four);
            sums[t][1] = vi_dpbusd(sums[t][1], w1, four);
        }
    }
#else
    for (int k0 = 0; k0 < n_steps; k0 += add) {
        vi pairs[BYTES_TOKENS][2];
        for (int t = 0; t < n_tokens; t++) {
            pairs[t][0] =
                vi_maddubs(vi_load(q + 2 * k0 * V_BYTES), four_bytes(x + 32 * t + 4 * k0));
            pairs[t][1] =
                vi_maddubs(vi_load(q + (2 * k0 + 1) * V_BYTES), four_bytes(x + 32 * t + 4 * k0));
        }
        for (int k = k0 + 1; k < k0 + add; k++) {
            const vi w0 = vi_load(q + 2 * k * V_BYTES);
            const vi w1 = vi_load(q + (2 * k + 1) * V_BYTES);
            for (int t = 0; t < n_tokens; t++) {
                const vi four = four_bytes(x + 32 * t + 4 * k);
                pairs[t][0] = vi_add16(pairs[t][0], vi_maddubs(w0, four));
                pairs[t][1] = vi_add16(pairs[t][1], vi_maddubs(w1, four));
            }
        }
        for (int t = 0; t < n_tokens; t++) {
            sums[t][0] = vi_add(sums[t][0], vi_widen16(pairs[t][0]));
            sums[t][1] = vi_add(sums[t][1], vi_widen16(pairs[t][1]));
        }
    }
#endif
}

INLINE void tile_body(const struct sl_linear_panel *panel, const struct sl_linear_tile *x,
                      const int n_tokens, int n_cols, float *y, int64_t stride, const bool with_m,
                      const bool group16, const int add)
{
    const int per_block = group16 ? 2 : 1;
    const int n_steps = 8 / per_block;
    vf acc[BYTES_TOKENS][2];
    for (int t = 0; t < n_tokens; t++) {
        acc[t][0] = vf_load(y + t * stride);
        acc[t][1] = vf_load(y + t * stride + V_LANES);
    }
    const uint8_t *q = panel->q;
    const float *d = panel->d;
    const float *m = panel->m;
    const int8_t *xq = x->q;
    const float *xd = x->d;
    const int32_t *start = with_m ? NULL : x->sums;
    const float *xs = with_m ? x->sums : NULL;
    for (int block = 0; block < n_cols / 32; block++) {
        for (int g = 0; g < per_block; g++) {
            vi sums[BYTES_TOKENS][2];
            int_products(sums, q, xq + 16 * g, start, n_tokens, n_steps, add);
            for (int t = 0; t < n_tokens; t++) {
                const vf s0 = vf_mul(vf_from_int(sums[t][0]), vf_load(d));
                const vf s1 = vf_mul(vf_from_int(sums[t][1]), vf_load(d + V_LANES));
                acc[t][0] = vf_fma(s0, vf_set1(xd[t]), acc[t][0]);
                acc[t][1] = vf_fma(s1, vf_set1(xd[t]), acc[t][1]);
                if (with_m) {
                    acc[t][0] = vf_fma(vf_load(m), vf_set1(xs[t]), acc[t][0]);
                    acc[t][1] = vf_fma(vf_load(m + V_LANES), vf_set1(xs[t]), acc[t][1]);
                }
            }
            q += 2 * n_steps * V_BYTES;
            d += PANEL_ROWS;
            m += PANEL_ROWS;
            start = with_m ? NULL : start + n_tokens;
            xs = with_m ? xs + n_tokens : NULL;
        }
        xq += 32 * n_tokens;
        xd += n_tokens;
    }
    for (int t = 0; t < n_tokens; t++) {
        vf_store(y + t * stride, acc[t][0]);
        vf_store(y + t * stride + V_LANES, acc[t][1]);
    }
}

#if BYTES_TOKENS == 6
#define TOKEN_CASES(CASE, ...)                                                                     \
    CASE(1, __VA_ARGS__)                                                                           \
    CASE(2, __VA_ARGS__)                                                                           \
    CASE(3, __VA_ARGS__)                                                                           \
    CASE(4, __VA_ARGS__)                                                                           \
    CASE(5, __VA_ARGS__)                                                                           \
    CASE(6, __VA_ARGS__)
#else
#define TOKEN_CASES(CASE, ...)                                                                     \
    CASE(1, __VA_ARGS__)                                                                           \
    CASE(2, __VA_ARGS__)                                                                           \
    CASE(3, __VA_ARGS__)                                                                           \
    CASE(4, __VA_ARGS__)
#endif

#define TILE_CASE(n, with_m, group16, add)                                                         \
    case n:                                                                                        \
        tile_body(panel, x, n, n_cols, y, stride, with_m, group16, add);                           \
        break;

#define TILE_FUNCTION(name, with_m, group16, add)                                                  \
    static void name(const void *panel, const void *x, int n_tokens, int n_cols, float *y,         \
                     int64_t stride)                                                               \
    {                                                                                              \
        switch (n_tokens) {                                                                        \
            TOKEN_CASES(TILE_CASE, with_m, group16, add)                                           \
        }                                                                                          \
    }

/* Sums of `add` products of levels up to L with 127, in pairs, fit 16 bits: 2 * 127 * L * add. */
#if HAVE_DPBUSD
TILE_FUNCTION(tile_offset, false, false, 0)
TILE_FUNCTION(tile_min, true, false, 0)
TILE_FUNCTION(tile_offset16, false, true, 0)
TILE_FUNCTION(tile_min16, true, true, 0)
#define TILE_OFFSET_15 tile_offset
#define TILE_OFFSET_31 tile_offset
#define TILE_MIN_15 tile_min
#define TILE_MIN_31 tile_min
#define TILE_OFFSET16_7 tile_offset16
#define TILE_OFFSET16_63 tile_offset16
#define TILE_MIN16_3 tile_min16
#else
TILE_FUNCTION(tile_offset_15, false, false, 8)
TILE_FUNCTION(tile_offset_31, false, false, 4)
TILE_FUNCTION(tile_min_15, true, false, 8)
TILE_FUNCTION(tile_min_31, true, false, 4)
TILE_FUNCTION(tile_offset16_7, false, true, 4)
TILE_FUNCTION(tile_offset16_63, false, true, 2)
TILE_FUNCTION(tile_min16_3, true, true, 4)
#define TILE_OFFSET_15 tile_offset_15
#define TILE_OFFSET_31 tile_offset_31
#define TILE_MIN_15 tile_min_15
#define TILE_MIN_31 tile_min_31
#define TILE_OFFSET16_7 tile_offset16_7
#define TILE_OFFSET16_63 tile_offset16_63
#define TILE_MIN16_3 tile_min16_3
#endif

#define BYTES_ENTRY(offset, minimum, group16, name, tile)                                          \
    {                                                                                              \
        SL_LINEAR_BYTES, {offset, minimum, group16}, build_##name, tile                            \
    }
/* Entries of the types table of a level. */
#define BYTES_ENTRIES                                                                              \
    [SL_TYPE_Q4_0] = BYTES_ENTRY(8, false, false, q4_0, TILE_OFFSET_15),                           \
    [SL_TYPE_Q4_1] = BYTES_ENTRY(0, true, false, q4_1, TILE_MIN_15),                               \
    [SL_TYPE_Q5_0] = BYTES_ENTRY(16, false, false, q5_0, TILE_OFFSET_31),                          \
    [SL_TYPE_Q5_1] = BYTES_ENTRY(0, true, false, q5_1, TILE_MIN_31),                               \
    [SL_TYPE_MXFP4] = BYTES_ENTRY(12, false, false, mxfp4, TILE_OFFSET_31),                        \
    [SL_TYPE_Q2_K] = BYTES_ENTRY(0, true, true, q2_k, TILE_MIN16_3),                               \
    [SL_TYPE_Q3_K] = BYTES_ENTRY(4, false, true, q3_k, TILE_OFFSET16_7),                           \
    [SL_TYPE_Q4_K] = BYTES_ENTRY(0, true, false, q4_k, TILE_MIN_15),                               \
    [SL_TYPE_Q5_K] = BYTES_ENTRY(0, true, false, q5_k, TILE_MIN_31),                               \
    [SL_TYPE_Q6_K] = BYTES_ENTRY(32, false, true, q6_k, TILE_OFFSET16_63)

#if HAVE_DPBUSD
#define SIGNED_ENTRIES                                                                             \
    [SL_TYPE_Q8_0] = BYTES_ENTRY(BIAS_S8, false, false, q8_0, tile_offset),                        \
    [SL_TYPE_IQ4_NL] = BYTES_ENTRY(BIAS_S8, false, false, iq4_nl, tile_offset),                    \
    [SL_TYPE_IQ4_XS] = BYTES_ENTRY(BIAS_S8, false, false, iq4_xs, tile_offset)
#endif

#endif
