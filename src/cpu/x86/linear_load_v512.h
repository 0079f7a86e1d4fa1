/* SPDX-License-Identifier: Apache-2.0
 *
 * Unpacking of weight blocks into 512-bit registers, for the row kernels.
 *
 * Small blocks come in groups of four (layout SL_LINEAR_HALVES), gathered by loads of 16 bytes. Two
 * overlapping loads of 64 bytes and a permutation would be half the work, but such loads cross a
 * line almost always, and while the lines are still on their way from memory that costs more than
 * half of the bandwidth. A missing block comes out with scale 0.
 */
#ifndef SL_CPU_X86_LINEAR_LOAD_V512_H
#define SL_CPU_X86_LINEAR_LOAD_V512_H

#include "cpu/x86/linear_v512.h"
#include "cpu/x86/linear_scales.h"
#include <stdbool.h>

#include "quant/blocks.h"

#define GROUP_BLOCKS 4

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
/* Four 16-byte pieces at a stride; pieces n and up are zero. */
INLINE vi load_pieces(const uint8_t *p, size_t stride, int n)
{
    vi v = _mm512_zextsi128_si512(_mm_loadu_si128((const void *)p));
    if (n > 1) {
        v = _mm512_inserti32x4(v, _mm_loadu_si128((const void *)(p + stride)), 1);
    }
    if (n > 2) {
        v = _mm512_inserti32x4(v, _mm_loadu_si128((const void *)(p + 2 * stride)), 2);
    }
    if (n > 3) {
        v = _mm512_inserti32x4(v, _mm_loadu_si128((const void *)(p + 3 * stride)), 3);
    }
    return v;
}
/* The halves in the low (at 0) or high (at 2) words of four double words, each in 4 lanes. */
INLINE vf spread_f16(__m128i words, int at)
{
    const __m256i index = _mm256_setr_epi32(0x01000100, 0x01000100, 0x05040504, 0x05040504,
                                            0x09080908, 0x09080908, 0x0d0c0d0c, 0x0d0c0d0c);
    const __m256i bytes = _mm256_add_epi8(index, _mm256_set1_epi8((char)at));
    return _mm512_cvtph_ps(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(words), bytes));
}
/* A half of each block. */
INLINE vf load_f16_4(const uint8_t *p, size_t stride, int n)
{
    __m128i d = _mm_cvtsi32_si128(load_u16(p));
    d = n > 1 ? _mm_insert_epi16(d, load_u16(p + stride), 2) : d;
    d = n > 2 ? _mm_insert_epi16(d, load_u16(p + 2 * stride), 4) : d;
    d = n > 3 ? _mm_insert_epi16(d, load_u16(p + 3 * stride), 6) : d;
    return spread_f16(d, 0);
}
/* Scale and minimum, which begin the blocks. */
INLINE void set_pairs(struct group *g, const uint8_t *p, size_t stride, int n)
{
    __m128i d = _mm_cvtsi32_si128((int)load_u32(p));
    d = n > 1 ? _mm_insert_epi32(d, (int)load_u32(p + stride), 1) : d;
    d = n > 2 ? _mm_insert_epi32(d, (int)load_u32(p + 2 * stride), 2) : d;
    d = n > 3 ? _mm_insert_epi32(d, (int)load_u32(p + 3 * stride), 3) : d;
    g->d = spread_f16(d, 0);
    g->m = spread_f16(d, 2);
}
INLINE void set_nibbles(struct group *g, vi qs)
{
    const vi low = _mm512_set1_epi8(15);
    g->lo = _mm512_and_si512(qs, low);
    g->hi = _mm512_and_si512(_mm512_srli_epi16(qs, 4), low);
}
/* Bit i of a block's qh is the fifth bit of its level i. */
INLINE void add_fifth_bits(struct group *g, const uint8_t *qh, size_t stride, int n)
{
    const uint64_t a = load_u32(qh);
    const uint64_t b = n > 1 ? load_u32(qh + stride) : 0;
    const uint64_t c = n > 2 ? load_u32(qh + 2 * stride) : 0;
    const uint64_t d = n > 3 ? load_u32(qh + 3 * stride) : 0;
    const uint64_t first = (a & 0xffff) | (b & 0xffff) << 16 | (c & 0xffff) << 32 | d << 48;
    const uint64_t last = a >> 16 | (b >> 16) << 16 | (c >> 16) << 32 | (d >> 16) << 48;
    const vi bit = _mm512_set1_epi8(16);
    g->lo = _mm512_mask_add_epi8(g->lo, (__mmask64)first, g->lo, bit);
    g->hi = _mm512_mask_add_epi8(g->hi, (__mmask64)last, g->hi, bit);
}
INLINE vi lookup(const int8_t *levels, int bias, vi q)
{
    const vi table = _mm512_add_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const void *)levels)),
                                     _mm512_set1_epi8((char)bias));
    return _mm512_shuffle_epi8(table, q);
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
    set_pairs(&g, p, 20, n);
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
    set_pairs(&g, p, 24, n);
    return g;
}
INLINE struct group load_iq4_nl(const uint8_t *p, int n)
{
    struct group g = load_q4_0(p, n);
    g.lo = lookup(sl_iq4_values, BIAS_S8, g.lo);
    g.hi = lookup(sl_iq4_values, BIAS_S8, g.hi);
    return g;
}
INLINE struct group load_q8_0(const uint8_t *p, int n)
{
    const vi bias = _mm512_set1_epi8((char)BIAS_S8);
    struct group g;
    g.lo = _mm512_xor_si512(load_pieces(p + 2, 34, n), bias);
    g.hi = _mm512_xor_si512(load_pieces(p + 18, 34, n), bias);
    g.d = g.m = load_f16_4(p, 34, n);
    return g;
}
INLINE struct group load_mxfp4(const uint8_t *p, int n)
{
    const size_t bytes = sizeof(struct sl_block_mxfp4);
    struct group g;
    set_nibbles(&g, load_pieces(p + 1, bytes, n));
    g.lo = lookup(sl_mxfp4_values, 12, g.lo);
    g.hi = lookup(sl_mxfp4_values, 12, g.hi);
    uint32_t e = p[0];
    e |= n > 1 ? (uint32_t)p[bytes] << 8 : 0;
    e |= n > 2 ? (uint32_t)p[2 * bytes] << 16 : 0;
    e |= n > 3 ? (uint32_t)p[3 * bytes] << 24 : 0;
    const __m128i spread = _mm_setr_epi8(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
    const vi exponent = _mm512_cvtepu8_epi32(_mm_shuffle_epi8(_mm_cvtsi32_si128((int)e), spread));
    /* 2^(e - 128): the two smallest are subnormal. */
    const vi one = _mm512_set1_epi32(1);
    const vi normal = _mm512_slli_epi32(_mm512_sub_epi32(exponent, one), 23);
    const vi tiny = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), exponent);
    const vi bits = _mm512_mask_mov_epi32(normal, _mm512_cmple_epu32_mask(exponent, one), tiny);
    g.d = g.m = _mm512_castsi512_ps(_mm512_maskz_mov_epi32((__mmask16)((1 << 4 * n) - 1), bits));
    return g;
}

/* A super-block: levels in order, and scale and minimum of each 16 columns. */
struct super {
    vi q[4];
    vf s, m;
};

/* Bytes to 16 floats. */
INLINE vf float_u8(__m128i v)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(v));
}
INLINE vf float_s8(__m128i v)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(v));
}
INLINE vf set1_f16(const void *p)
{
    return _mm512_cvtph_ps(_mm256_set1_epi16((short)load_u16(p)));
}
INLINE vi load_twice(const uint8_t *p)
{
    return _mm512_broadcast_i64x4(_mm256_loadu_si256((const void *)p));
}
/* Both 32-byte halves, shifted right by different counts. */
INLINE vi shift_halves(vi v, int low, int high)
{
    return _mm512_srlv_epi64(v, _mm512_setr_epi64(low, low, low, low, high, high, high, high));
}

/* 64 bytes at any address, by halves: see above. */
INLINE vi load_64(const uint8_t *p)
{
    const vi low = _mm512_castsi256_si512(_mm256_loadu_si256((const void *)p));
    return _mm512_inserti64x4(low, _mm256_loadu_si256((const void *)(p + 32)), 1);
}

INLINE void set_k4_scales(struct super *b, const uint8_t *p)
{
    const __m128i v = _mm_loadu_si128((const void *)p);
    const __m128i scales = k4_scales(v);
    b->s = vf_mul(float_u8(_mm_unpacklo_epi8(scales, scales)), set1_f16(p));
    b->m = vf_mul(float_u8(_mm_unpackhi_epi8(scales, scales)), set1_f16(p + 2));
}
INLINE struct super load_q4_k(const uint8_t *p)
{
    const vi low = _mm512_set1_epi8(15);
    struct super b;
    set_k4_scales(&b, p);
    for (int i = 0; i < 4; i++) {
        b.q[i] = _mm512_and_si512(shift_halves(load_twice(p + 16 + 32 * i), 0, 4), low);
    }
    return b;
}
INLINE struct super load_q5_k(const uint8_t *p)
{
    const vi low = _mm512_set1_epi8(15);
    const vi bit = _mm512_set1_epi8(16);
    struct super b;
    set_k4_scales(&b, p);
    /* Group g's bits to bit 4: g = 0 and 1 first; every turn of 2 moves the next ones there. */
    const vi qh = load_twice(p + 16);
    for (int i = 0; i < 4; i++) {
        const vi q = _mm512_and_si512(shift_halves(load_twice(p + 48 + 32 * i), 0, 4), low);
        const vi to_4 =
            i < 2 ? _mm512_sllv_epi64(qh,
                                      _mm512_setr_epi64(4 - 2 * i, 4 - 2 * i, 4 - 2 * i, 4 - 2 * i,
                                                        3 - 2 * i, 3 - 2 * i, 3 - 2 * i, 3 - 2 * i))
                  : shift_halves(qh, 2 * i - 4, 2 * i - 3);
        b.q[i] = _mm512_or_si512(q, _mm512_and_si512(to_4, bit));
    }
    return b;
}
INLINE struct super load_q6_k(const uint8_t *p)
{
    const vi low = _mm512_set1_epi8(15);
    const vi high = _mm512_set1_epi8(48);
    struct super b;
    b.s = vf_mul(float_s8(_mm_loadu_si128((const void *)(p + 192))), set1_f16(p + 208));
    b.m = b.s;
    for (int h = 0; h < 2; h++) {
        const vi ql = load_64(p + 64 * h);
        const vi qh = shift_halves(load_twice(p + 128 + 32 * h), 0, 2);
        const vi lo = _mm512_and_si512(ql, low);
        const vi hi = _mm512_and_si512(_mm512_srli_epi16(ql, 4), low);
        b.q[2 * h] = _mm512_or_si512(lo, _mm512_and_si512(_mm512_slli_epi16(qh, 4), high));
        b.q[2 * h + 1] = _mm512_or_si512(hi, _mm512_and_si512(qh, high));
    }
    return b;
}
INLINE struct super load_q2_k(const uint8_t *p)
{
    const __m128i scales = _mm_loadu_si128((const void *)p);
    const __m128i low = _mm_set1_epi8(15);
    const vi three = _mm512_set1_epi8(3);
    struct super b;
    b.s = vf_mul(float_u8(_mm_and_si128(scales, low)), set1_f16(p + 80));
    b.m = vf_mul(float_u8(_mm_and_si128(_mm_srli_epi16(scales, 4), low)), set1_f16(p + 82));
    for (int h = 0; h < 2; h++) {
        const vi qs = load_twice(p + 16 + 32 * h);
        b.q[2 * h] = _mm512_and_si512(shift_halves(qs, 0, 2), three);
        b.q[2 * h + 1] = _mm512_and_si512(shift_halves(qs, 4, 6), three);
    }
    return b;
}
INLINE struct super load_q3_k(const uint8_t *p)
{
    const vi three = _mm512_set1_epi8(3);
    const vi four = _mm512_set1_epi8(4);
    struct super b;
    b.s = vf_mul(float_s8(q3k_scales(p + 96)), set1_f16(p + 108));
    b.m = b.s;
    const vi hmask = load_twice(p);
    for (int i = 0; i < 4; i++) {
        const vi qs = load_twice(p + 32 + 32 * (i / 2));
        const vi low =
            _mm512_and_si512(i % 2 == 0 ? shift_halves(qs, 0, 2) : shift_halves(qs, 4, 6), three);
        /* Bits 2i and 2i + 1 to bit 2. */
        const vi bits = i == 0 ? _mm512_sllv_epi64(hmask, _mm512_setr_epi64(2, 2, 2, 2, 1, 1, 1, 1))
                               : shift_halves(hmask, 2 * i - 2, 2 * i - 1);
        b.q[i] = _mm512_or_si512(low, _mm512_and_si512(bits, four));
    }
    return b;
}
INLINE struct super load_iq4_xs(const uint8_t *p)
{
    const vi low = _mm512_set1_epi8(15);
    const vi order = _mm512_setr_epi64(0, 1, 0, 1, 2, 3, 2, 3);
    const vi shift = _mm512_setr_epi64(0, 0, 4, 4, 0, 0, 4, 4);
    struct super b;
    b.s = vf_mul(float_s8(iq4xs_scales(p)), set1_f16(p));
    b.m = b.s;
    for (int i = 0; i < 4; i++) {
        const vi qs = _mm512_permutexvar_epi64(order, load_twice(p + 8 + 32 * i));
        b.q[i] =
            lookup(sl_iq4_values, BIAS_S8, _mm512_and_si512(_mm512_srlv_epi64(qs, shift), low));
    }
    return b;
}

/* Spread the scales of columns 64 i .. 64 i + 63 over the lanes of their products. */
INLINE vf spread_scales(vf s, int i)
{
    const vi index =
        _mm512_add_epi32(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3),
                         _mm512_set1_epi32(4 * i));
    return _mm512_permutexvar_ps(index, s);
}

/* Products of a super-block, scaled, in two chains of additions; the minimums with the sums of the
 * activations. */
INLINE void super_products(const struct super *b, const uint8_t *x, vi (*dot)(vi, vi), bool with_m,
                           vf acc[2], vf *acc_m)
{
    const vf scales = vf_mul(b->s, vf_load(x + 256));
    if (with_m) {
        *acc_m = vf_fma(b->m, vf_load(x + 320), *acc_m);
    }
    for (int i = 0; i < 4; i++) {
        const vi products = dot(b->q[i], vi_load(x + 64 * i));
        acc[i % 2] = vf_fma(vf_from_int(products), spread_scales(scales, i), acc[i % 2]);
    }
}

#endif
