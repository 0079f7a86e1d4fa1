/* SPDX-License-Identifier: Apache-2.0
 *
 * Unpacking of weight blocks into 512-bit registers, for the row kernels.
 *
 * Small blocks come in groups of four (layout SL_LINEAR_HALVES). Their bytes are read by two
 * overlapping loads that stay inside the group and sorted by one permutation of words. A group with
 * fewer blocks reads only those; the others come out with scale 0.
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

/* Word of the two loads that holds byte x of a group of blocks of `bytes`. */
#define WORD(bytes, x) ((x) < 64 ? (x) / 2 : 32 + ((x) - ((bytes)*4 - 64)) / 2)
#define WORDS8(bytes, x)                                                                           \
    WORD(bytes, (x)), WORD(bytes, (x) + 2), WORD(bytes, (x) + 4), WORD(bytes, (x) + 6),            \
        WORD(bytes, (x) + 8), WORD(bytes, (x) + 10), WORD(bytes, (x) + 12), WORD(bytes, (x) + 14)
#define WORDS_QS(bytes, at)                                                                        \
    {                                                                                              \
        WORDS8(bytes, at), WORDS8(bytes, (bytes) + (at)), WORDS8(bytes, 2 * (bytes) + (at)),       \
            WORDS8(bytes, 3 * (bytes) + (at))                                                      \
    }
#define SAME4(x) x, x, x, x
#define WORDS_D(bytes, at)                                                                         \
    {                                                                                              \
        SAME4(WORD(bytes, at)), SAME4(WORD(bytes, (bytes) + (at))),                                \
            SAME4(WORD(bytes, 2 * (bytes) + (at))), SAME4(WORD(bytes, 3 * (bytes) + (at)))         \
    }

typedef const uint16_t words32[32] __attribute__((aligned(64)));
typedef const uint16_t words16[16] __attribute__((aligned(32)));

static words32 words_qs_18 = WORDS_QS(18, 2), words_qs_20 = WORDS_QS(20, 4),
               words_qs_22 = WORDS_QS(22, 6), words_qs_24 = WORDS_QS(24, 8);
static words16 words_d_18 = WORDS_D(18, 0), words_d_20 = WORDS_D(20, 0),
               words_m_20 = WORDS_D(20, 2), words_d_22 = WORDS_D(22, 0),
               words_d_24 = WORDS_D(24, 0), words_m_24 = WORDS_D(24, 2);
/* Low, then high words of qh of the four blocks. */
#define WORDS_QH(bytes, at)                                                                        \
    {                                                                                              \
        WORD(bytes, at), WORD(bytes, (bytes) + (at)), WORD(bytes, 2 * (bytes) + (at)),             \
            WORD(bytes, 3 * (bytes) + (at)), WORD(bytes, (at) + 2),                                \
            WORD(bytes, (bytes) + (at) + 2), WORD(bytes, 2 * (bytes) + (at) + 2),                  \
            WORD(bytes, 3 * (bytes) + (at) + 2)                                                    \
    }
static const uint16_t words_qh_22[8] __attribute__((aligned(16))) = WORDS_QH(22, 2);
static const uint16_t words_qh_24[8] __attribute__((aligned(16))) = WORDS_QH(24, 4);

struct pair {
    vi a, b;
};

/* The two loads of a group of n blocks. */
INLINE struct pair load_pair(const uint8_t *p, int bytes, int n)
{
    const int shift = bytes * 4 - 64;
    if (n == GROUP_BLOCKS) {
        return (struct pair){vi_load(p), vi_load(p + shift)};
    }
    const int total = bytes * n;
    const __mmask64 a = total >= 64 ? ~UINT64_C(0) : (UINT64_C(1) << total) - 1;
    const __mmask64 b = total > shift ? (UINT64_C(1) << (total - shift)) - 1 : 0;
    return (struct pair){_mm512_maskz_loadu_epi8(a, p), _mm512_maskz_loadu_epi8(b, p + shift)};
}
INLINE vi pick(struct pair v, const uint16_t *words)
{
    return _mm512_permutex2var_epi16(v.a, _mm512_load_si512(words), v.b);
}
INLINE vf pick_f16(struct pair v, const uint16_t *words)
{
    const vi index = _mm512_castsi256_si512(_mm256_load_si256((const void *)words));
    return _mm512_cvtph_ps(_mm512_castsi512_si256(_mm512_permutex2var_epi16(v.a, index, v.b)));
}
INLINE void set_nibbles(struct group *g, vi qs)
{
    const vi low = _mm512_set1_epi8(15);
    g->lo = _mm512_and_si512(qs, low);
    g->hi = _mm512_and_si512(_mm512_srli_epi16(qs, 4), low);
}
INLINE void add_fifth_bits(struct group *g, struct pair v, const uint16_t *words)
{
    const vi index = _mm512_castsi128_si512(_mm_load_si128((const void *)words));
    const __m128i qh = _mm512_castsi512_si128(_mm512_permutex2var_epi16(v.a, index, v.b));
    const vi bit = _mm512_set1_epi8(16);
    const __mmask64 lo = (__mmask64)_mm_cvtsi128_si64(qh);
    const __mmask64 hi = (__mmask64)_mm_extract_epi64(qh, 1);
    g->lo = _mm512_mask_add_epi8(g->lo, lo, g->lo, bit);
    g->hi = _mm512_mask_add_epi8(g->hi, hi, g->hi, bit);
}
INLINE vi lookup(const int8_t *levels, int bias, vi q)
{
    const vi table = _mm512_add_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const void *)levels)),
                                     _mm512_set1_epi8((char)bias));
    return _mm512_shuffle_epi8(table, q);
}

INLINE struct group load_q4_0(const uint8_t *p, int n)
{
    const struct pair v = load_pair(p, 18, n);
    struct group g;
    set_nibbles(&g, pick(v, words_qs_18));
    g.d = g.m = pick_f16(v, words_d_18);
    return g;
}
INLINE struct group load_q4_1(const uint8_t *p, int n)
{
    const struct pair v = load_pair(p, 20, n);
    struct group g;
    set_nibbles(&g, pick(v, words_qs_20));
    g.d = pick_f16(v, words_d_20);
    g.m = pick_f16(v, words_m_20);
    return g;
}
INLINE struct group load_q5_0(const uint8_t *p, int n)
{
    const struct pair v = load_pair(p, 22, n);
    struct group g;
    set_nibbles(&g, pick(v, words_qs_22));
    add_fifth_bits(&g, v, words_qh_22);
    g.d = g.m = pick_f16(v, words_d_22);
    return g;
}
INLINE struct group load_q5_1(const uint8_t *p, int n)
{
    const struct pair v = load_pair(p, 24, n);
    struct group g;
    set_nibbles(&g, pick(v, words_qs_24));
    add_fifth_bits(&g, v, words_qh_24);
    g.d = pick_f16(v, words_d_24);
    g.m = pick_f16(v, words_m_24);
    return g;
}
INLINE struct group load_iq4_nl(const uint8_t *p, int n)
{
    struct group g = load_q4_0(p, n);
    g.lo = lookup(sl_iq4_values, BIAS_S8, g.lo);
    g.hi = lookup(sl_iq4_values, BIAS_S8, g.hi);
    return g;
}

/* Four 16-byte pieces at a stride; pieces n and up are zero. */
INLINE vi load_pieces(const uint8_t *p, size_t stride, int n)
{
    vi v = _mm512_castsi128_si512(_mm_loadu_si128((const void *)p));
    if (n == GROUP_BLOCKS) {
        v = _mm512_inserti32x4(v, _mm_loadu_si128((const void *)(p + stride)), 1);
        v = _mm512_inserti32x4(v, _mm_loadu_si128((const void *)(p + 2 * stride)), 2);
        return _mm512_inserti32x4(v, _mm_loadu_si128((const void *)(p + 3 * stride)), 3);
    }
    v = _mm512_zextsi128_si512(_mm512_castsi512_si128(v));
    if (n > 1) {
        v = _mm512_inserti32x4(v, _mm_loadu_si128((const void *)(p + stride)), 1);
    }
    if (n > 2) {
        v = _mm512_inserti32x4(v, _mm_loadu_si128((const void *)(p + 2 * stride)), 2);
    }
    return v;
}
INLINE uint16_t load_u16(const uint8_t *p)
{
    uint16_t v;
    memcpy(&v, p, sizeof(v));
    return v;
}
INLINE struct group load_q8_0(const uint8_t *p, int n)
{
    const size_t bytes = sizeof(struct sl_block_q8_0);
    const vi bias = _mm512_set1_epi8((char)BIAS_S8);
    struct group g;
    g.lo = _mm512_xor_si512(load_pieces(p + 2, bytes, n), bias);
    g.hi = _mm512_xor_si512(load_pieces(p + 18, bytes, n), bias);
    __m128i d = _mm_cvtsi32_si128(load_u16(p));
    d = n > 1 ? _mm_insert_epi16(d, load_u16(p + bytes), 1) : d;
    d = n > 2 ? _mm_insert_epi16(d, load_u16(p + 2 * bytes), 2) : d;
    d = n > 3 ? _mm_insert_epi16(d, load_u16(p + 3 * bytes), 3) : d;
    const __m256i spread = _mm256_setr_epi8(0, 1, 0, 1, 0, 1, 0, 1, 2, 3, 2, 3, 2, 3, 2, 3, 4, 5, 4,
                                            5, 4, 5, 4, 5, 6, 7, 6, 7, 6, 7, 6, 7);
    g.d = g.m = _mm512_cvtph_ps(_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(d), spread));
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
        const vi ql = vi_load(p + 64 * h);
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

/* Products of a super-block, scaled; the minimums with the sums of the activations. */
INLINE void super_products(const struct super *b, const uint8_t *x, vi (*dot)(vi, vi), bool with_m,
                           vf *acc, vf *acc_m)
{
    const vf scales = vf_mul(b->s, vf_load(x + 256));
    if (with_m) {
        *acc_m = vf_fma(b->m, vf_load(x + 320), *acc_m);
    }
    for (int i = 0; i < 4; i++) {
        const vi products = dot(b->q[i], vi_load(x + 64 * i));
        *acc = vf_fma(vf_from_int(products), spread_scales(scales, i), *acc);
    }
}

#endif
