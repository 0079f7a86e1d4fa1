/* SPDX-License-Identifier: Apache-2.0
 *
 * Unpacking of weight blocks into 256-bit registers, for the row kernels. Small blocks come in
 * groups of two (layout SL_LINEAR_HALVES); a missing second block comes out with scale 0.
 */
#ifndef SL_CPU_X86_LINEAR_LOAD_V256_H
#define SL_CPU_X86_LINEAR_LOAD_V256_H

#include <stdbool.h>

#include "cpu/x86/linear_v256.h"
#include "cpu/x86/linear_scales.h"
#include "quant/blocks.h"

#define GROUP_BLOCKS 2

/* Levels of a group (first and last 16 of each block), scale and minimum in 4 lanes a block. */
struct group {
    vi lo, hi;
    vf d, m;
};

INLINE uint16_t load_u16(const uint8_t *p)
{
    uint16_t v;
    memcpy(&v, p, sizeof(v));
    return v;
}
INLINE uint32_t load_u32(const uint8_t *p)
{
    uint32_t v;
    memcpy(&v, p, sizeof(v));
    return v;
}
INLINE vi load_pieces(const uint8_t *p, size_t stride, int n)
{
    const vi v = _mm256_zextsi128_si256(_mm_loadu_si128((const void *)p));
    return n > 1 ? _mm256_inserti128_si256(v, _mm_loadu_si128((const void *)(p + stride)), 1) : v;
}
INLINE void set_nibbles(struct group *g, vi qs)
{
    const vi low = _mm256_set1_epi8(15);
    g->lo = _mm256_and_si256(qs, low);
    g->hi = _mm256_and_si256(_mm256_srli_epi16(qs, 4), low);
}
/* The halves at p of both blocks, each in 4 lanes. */
INLINE vf load_f16_4(const uint8_t *p, size_t stride, int n)
{
    __m128i d = _mm_cvtsi32_si128(load_u16(p));
    d = n > 1 ? _mm_insert_epi16(d, load_u16(p + stride), 1) : d;
    const __m128i spread = _mm_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3);
    return _mm256_cvtph_ps(_mm_shuffle_epi8(d, spread));
}
/* Bit i of the low, then high words of qh to bit 4 of byte i, for both blocks. */
INLINE vi fifth_bits(uint32_t low_word, uint32_t high_word)
{
    const vi bits = _mm256_set1_epi32((int)(low_word | high_word << 16));
    const vi byte =
        _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const vi bit = _mm256_set1_epi64x((long long)0x8040201008040201);
    const vi picked = _mm256_and_si256(_mm256_shuffle_epi8(bits, byte), bit);
    return _mm256_and_si256(_mm256_cmpeq_epi8(picked, bit), _mm256_set1_epi8(16));
}
INLINE void add_fifth_bits(struct group *g, const uint8_t *qh, size_t stride, int n)
{
    const uint32_t a = load_u32(qh);
    const uint32_t b = n > 1 ? load_u32(qh + stride) : 0;
    g->lo = _mm256_or_si256(g->lo, fifth_bits(a & 0xffff, b & 0xffff));
    g->hi = _mm256_or_si256(g->hi, fifth_bits(a >> 16, b >> 16));
}
INLINE vi lookup(const int8_t *levels, int bias, vi q)
{
    const vi table =
        _mm256_add_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)levels)),
                        _mm256_set1_epi8((char)bias));
    return _mm256_shuffle_epi8(table, q);
}

INLINE struct group load_q4_0(const uint8_t *p, int n)
{
    struct group g;
    set_nibbles(&g, load_pieces(p + 2, 18, n));
    g.d = g.m = load_f16_4(p, 18, n);
    return g;
}
INLINE struct group load_q4_1(const uint8_t *p, int n)
{
    struct group g;
    set_nibbles(&g, load_pieces(p + 4, 20, n));
    g.d = load_f16_4(p, 20, n);
    g.m = load_f16_4(p + 2, 20, n);
    return g;
}
INLINE struct group load_q5_0(const uint8_t *p, int n)
{
    struct group g;
    set_nibbles(&g, load_pieces(p + 6, 22, n));
    add_fifth_bits(&g, p + 2, 22, n);
    g.d = g.m = load_f16_4(p, 22, n);
    return g;
}
INLINE struct group load_q5_1(const uint8_t *p, int n)
{
    struct group g;
    set_nibbles(&g, load_pieces(p + 8, 24, n));
    add_fifth_bits(&g, p + 4, 24, n);
    g.d = load_f16_4(p, 24, n);
    g.m = load_f16_4(p + 2, 24, n);
    return g;
}
INLINE struct group load_q8_0(const uint8_t *p, int n)
{
    struct group g;
    const vi bias = _mm256_set1_epi8((char)BIAS_S8);
    g.lo = _mm256_xor_si256(load_pieces(p + 2, 34, n), bias);
    g.hi = _mm256_xor_si256(load_pieces(p + 18, 34, n), bias);
    g.d = g.m = load_f16_4(p, 34, n);
    return g;
}
INLINE struct group load_iq4_nl(const uint8_t *p, int n)
{
    struct group g = load_q4_0(p, n);
    g.lo = lookup(sl_iq4_values, BIAS_S8, g.lo);
    g.hi = lookup(sl_iq4_values, BIAS_S8, g.hi);
    return g;
}
INLINE struct group load_mxfp4(const uint8_t *p, int n)
{
    struct group g;
    set_nibbles(&g, load_pieces(p + 1, 17, n));
    g.lo = lookup(sl_mxfp4_values, 12, g.lo);
    g.hi = lookup(sl_mxfp4_values, 12, g.hi);
    const float d0 = sl_mxfp4_scale(p[0]);
    const float d1 = n > 1 ? sl_mxfp4_scale(p[17]) : 0.0f;
    g.d = g.m = _mm256_set_m128(_mm_set1_ps(d1), _mm_set1_ps(d0));
    return g;
}

/* A super-block: levels in order, and scale and minimum of each 16 columns. */
struct super {
    vi q[8];
    vf s[2], m[2];
};

/* 16 bytes to floats, times a half. */
INLINE void scale_u8(vf *out, __m128i v, const void *half)
{
    const vf d = _mm256_cvtph_ps(_mm_set1_epi16((short)load_u16(half)));
    out[0] = vf_mul(vf_from_int(_mm256_cvtepu8_epi32(v)), d);
    out[1] = vf_mul(vf_from_int(_mm256_cvtepu8_epi32(_mm_srli_si128(v, 8))), d);
}
INLINE void scale_s8(vf *out, __m128i v, const void *half)
{
    const vf d = _mm256_cvtph_ps(_mm_set1_epi16((short)load_u16(half)));
    out[0] = vf_mul(vf_from_int(_mm256_cvtepi8_epi32(v)), d);
    out[1] = vf_mul(vf_from_int(_mm256_cvtepi8_epi32(_mm_srli_si128(v, 8))), d);
}
INLINE void set_k4_scales(struct super *b, const uint8_t *p)
{
    const __m128i scales = k4_scales(_mm_loadu_si128((const void *)p));
    scale_u8(b->s, _mm_unpacklo_epi8(scales, scales), p);
    scale_u8(b->m, _mm_unpackhi_epi8(scales, scales), p + 2);
}
INLINE struct super load_q4_k(const uint8_t *p)
{
    const vi low = _mm256_set1_epi8(15);
    struct super b;
    set_k4_scales(&b, p);
    for (int i = 0; i < 4; i++) {
        const vi qs = vi_load(p + 16 + 32 * i);
        b.q[2 * i] = _mm256_and_si256(qs, low);
        b.q[2 * i + 1] = _mm256_and_si256(_mm256_srli_epi16(qs, 4), low);
    }
    return b;
}
INLINE struct super load_q5_k(const uint8_t *p)
{
    struct super b = load_q4_k(p + 32);
    set_k4_scales(&b, p);
    const vi bit = _mm256_set1_epi8(16);
    const vi qh = vi_load(p + 16);
    for (int g = 0; g < 8; g++) {
        const vi to_4 = g < 4 ? _mm256_slli_epi16(qh, 4 - g) : _mm256_srli_epi16(qh, g - 4);
        b.q[g] = _mm256_or_si256(b.q[g], _mm256_and_si256(to_4, bit));
    }
    return b;
}
INLINE struct super load_q6_k(const uint8_t *p)
{
    const vi low = _mm256_set1_epi8(15);
    const vi high = _mm256_set1_epi8(48);
    struct super b;
    scale_s8(b.s, _mm_loadu_si128((const void *)(p + 192)), p + 208);
    for (int i = 0; i < 2; i++) {
        const vi qh = vi_load(p + 128 + 32 * i);
        for (int half = 0; half < 2; half++) {
            const vi ql = vi_load(p + 64 * i + 32 * half);
            const vi lo_bits = half == 0 ? _mm256_slli_epi16(qh, 4) : _mm256_slli_epi16(qh, 2);
            const vi hi_bits = half == 0 ? qh : _mm256_srli_epi16(qh, 2);
            b.q[4 * i + half] =
                _mm256_or_si256(_mm256_and_si256(ql, low), _mm256_and_si256(lo_bits, high));
            b.q[4 * i + 2 + half] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(ql, 4), low),
                                                    _mm256_and_si256(hi_bits, high));
        }
    }
    b.m[0] = b.s[0];
    b.m[1] = b.s[1];
    return b;
}
INLINE struct super load_q2_k(const uint8_t *p)
{
    const __m128i scales = _mm_loadu_si128((const void *)p);
    const __m128i low = _mm_set1_epi8(15);
    const vi three = _mm256_set1_epi8(3);
    struct super b;
    scale_u8(b.s, _mm_and_si128(scales, low), p + 80);
    scale_u8(b.m, _mm_and_si128(_mm_srli_epi16(scales, 4), low), p + 82);
    for (int g = 0; g < 8; g++) {
        const vi qs = vi_load(p + 16 + 32 * (g / 4));
        b.q[g] = _mm256_and_si256(_mm256_srli_epi16(qs, 2 * (g % 4)), three);
    }
    return b;
}
INLINE struct super load_q3_k(const uint8_t *p)
{
    const vi three = _mm256_set1_epi8(3);
    const vi four = _mm256_set1_epi8(4);
    struct super b;
    scale_s8(b.s, q3k_scales(p + 96), p + 108);
    const vi hmask = vi_load(p);
    for (int g = 0; g < 8; g++) {
        const vi qs = vi_load(p + 32 + 32 * (g / 4));
        const vi low = _mm256_and_si256(_mm256_srli_epi16(qs, 2 * (g % 4)), three);
        const vi bits = g < 2 ? _mm256_slli_epi16(hmask, 2 - g) : _mm256_srli_epi16(hmask, g - 2);
        b.q[g] = _mm256_or_si256(low, _mm256_and_si256(bits, four));
    }
    b.m[0] = b.s[0];
    b.m[1] = b.s[1];
    return b;
}
INLINE struct super load_iq4_xs(const uint8_t *p)
{
    const vi low = _mm256_set1_epi8(15);
    const vi shift = _mm256_setr_epi64x(0, 0, 4, 4);
    struct super b;
    scale_s8(b.s, iq4xs_scales(p), p);
    for (int g = 0; g < 8; g++) {
        const vi qs = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)(p + 8 + 16 * g)));
        b.q[g] =
            lookup(sl_iq4_values, BIAS_S8, _mm256_and_si256(_mm256_srlv_epi64(qs, shift), low));
    }
    b.m[0] = b.s[0];
    b.m[1] = b.s[1];
    return b;
}

/* Products of a super-block, scaled, in two chains of additions; the minimums with the sums of the
 * activations. */
INLINE void super_products(const struct super *b, const uint8_t *x, vi (*dot)(vi, vi), bool with_m,
                           vf acc[2], vf *acc_m)
{
    for (int h = 0; h < 2; h++) {
        const vf scales = vf_mul(b->s[h], vf_load(x + 256 + 32 * h));
        if (with_m) {
            *acc_m = vf_fma(b->m[h], vf_load(x + 320 + 32 * h), *acc_m);
        }
        for (int i = 0; i < 4; i++) {
            /* The scales of the two groups of 16 columns, over 4 lanes each. */
            const vi index = _mm256_setr_epi32(2 * i, 2 * i, 2 * i, 2 * i, 2 * i + 1, 2 * i + 1,
                                               2 * i + 1, 2 * i + 1);
            const vi products = dot(b->q[4 * h + i], vi_load(x + 32 * (4 * h + i)));
            acc[i % 2] =
                vf_fma(vf_from_int(products), _mm256_permutevar8x32_ps(scales, index), acc[i % 2]);
        }
    }
}

#endif
