/* SPDX-License-Identifier: Apache-2.0
 *
 * The vector operations of the product kernels, 512 bits wide. linear_v256.h has the same names.
 *
 * Products of 8-bit integers take unsigned weights: where the processor has VNNI, levels that are
 * signed get BIAS_S8 added (the kernels take it off again through the sums of the activations);
 * without VNNI pairs of products must fit 16 bits, so dot_s moves the sign to the activations.
 */
#ifndef SL_CPU_X86_LINEAR_V512_H
#define SL_CPU_X86_LINEAR_V512_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define V_BYTES 64
#define V_LANES 16
#ifdef __AVX512VNNI__
#define HAVE_DPBUSD 1
#define BIAS_S8 128
#else
#define HAVE_DPBUSD 0
#define BIAS_S8 0
#endif
#define INLINE static inline __attribute__((always_inline))

typedef __m512i vi;
typedef __m512 vf;

INLINE vi vi_load(const void *p)
{
    return _mm512_loadu_si512(p);
}
INLINE vf vf_load(const void *p)
{
    return _mm512_loadu_ps(p);
}
INLINE vf vf_zero(void)
{
    return _mm512_setzero_ps();
}
INLINE vf vf_set1(float x)
{
    return _mm512_set1_ps(x);
}
INLINE vf vf_mul(vf a, vf b)
{
    return _mm512_mul_ps(a, b);
}
INLINE vf vf_add(vf a, vf b)
{
    return _mm512_add_ps(a, b);
}
INLINE vf vf_fma(vf a, vf b, vf c)
{
    return _mm512_fmadd_ps(a, b, c);
}
INLINE vf vf_from_int(vi a)
{
    return _mm512_cvtepi32_ps(a);
}
INLINE float vf_sum(vf a)
{
    const __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    const __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    const __m128 d = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}
/* 16 halves or bfloats to float. */
INLINE vf vf_load_f16(const void *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256(p));
}
INLINE vf vf_load_bf16(const void *p)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p)), 16));
}
INLINE void prefetch(const void *p)
{
    _mm_prefetch(p, _MM_HINT_T0);
}

/* Four products of bytes per lane, 0 <= w < 64. */
INLINE vi dot_u(vi w, vi x)
{
#if HAVE_DPBUSD
    return _mm512_dpbusd_epi32(_mm512_setzero_si512(), w, x);
#else
    return _mm512_madd_epi16(_mm512_maddubs_epi16(w, x), _mm512_set1_epi16(1));
#endif
}
/* The same of two pairs of vectors, added. */
INLINE vi dot2_u(vi w0, vi x0, vi w1, vi x1)
{
#if HAVE_DPBUSD
    return _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), w0, x0), w1, x1);
#else
    const vi sum = _mm512_add_epi16(_mm512_maddubs_epi16(w0, x0), _mm512_maddubs_epi16(w1, x1));
    return _mm512_madd_epi16(sum, _mm512_set1_epi16(1));
#endif
}
#if !HAVE_DPBUSD
INLINE vi madd_signed(vi w, vi x)
{
    const vi sx = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
    return _mm512_madd_epi16(_mm512_maddubs_epi16(_mm512_abs_epi8(w), sx), _mm512_set1_epi16(1));
}
#endif
/* Signed weights, with BIAS_S8 added. */
INLINE vi dot_s(vi w, vi x)
{
#if HAVE_DPBUSD
    return dot_u(w, x);
#else
    return madd_signed(w, x);
#endif
}
INLINE vi dot2_s(vi w0, vi x0, vi w1, vi x1)
{
#if HAVE_DPBUSD
    return dot2_u(w0, x0, w1, x1);
#else
    return _mm512_add_epi32(madd_signed(w0, x0), madd_signed(w1, x1));
#endif
}

INLINE vi vi_zero(void)
{
    return _mm512_setzero_si512();
}
INLINE vi vi_set1(int32_t x)
{
    return _mm512_set1_epi32(x);
}
INLINE vi vi_add(vi a, vi b)
{
    return _mm512_add_epi32(a, b);
}
INLINE vi vi_add16(vi a, vi b)
{
    return _mm512_add_epi16(a, b);
}
INLINE vi vi_maddubs(vi w, vi x)
{
    return _mm512_maddubs_epi16(w, x);
}
INLINE vi vi_widen16(vi a)
{
    return _mm512_madd_epi16(a, _mm512_set1_epi16(1));
}
#if HAVE_DPBUSD
INLINE vi vi_dpbusd(vi sum, vi w, vi x)
{
    return _mm512_dpbusd_epi32(sum, w, x);
}
#endif
#if HAVE_DPBUSD
/* Two products of 16-bit integers per lane. */
INLINE vi vi_dpwssd(vi sum, vi a, vi b)
{
    return _mm512_dpwssd_epi32(sum, a, b);
}
#endif
/* Two vectors of floats times a factor to 16-bit integers, in order. */
INLINE void store_words(void *p, vf a, vf b, float factor)
{
    const vf f = vf_set1(factor);
    /* Packing works within 128-bit lanes. */
    const vi words =
        _mm512_packs_epi32(_mm512_cvtps_epi32(vf_mul(a, f)), _mm512_cvtps_epi32(vf_mul(b, f)));
    const vi order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    _mm512_storeu_si512(p, _mm512_permutexvar_epi64(order, words));
}
INLINE vi vi_and(vi a, vi b)
{
    return _mm512_and_si512(a, b);
}
INLINE vi vi_max_u16(vi a, vi b)
{
    return _mm512_max_epu16(a, b);
}
INLINE uint16_t vi_largest_u16(vi a)
{
    const __m256i b = _mm256_max_epu16(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
    const __m128i c = _mm_max_epu16(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
    const __m128i ones = _mm_set1_epi16(-1);
    return (uint16_t)~_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(c, ones)));
}
INLINE vf vf_larger_magnitude(vf a, vf b)
{
    return _mm512_max_ps(_mm512_abs_ps(a), _mm512_abs_ps(b));
}
INLINE float vf_largest(vf a)
{
    const __m256 b = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    const __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
    const __m128 d = _mm_max_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)));
}
INLINE void vi_store(void *p, vi a)
{
    _mm512_storeu_si512(p, a);
}
INLINE void vf_store(void *p, vf a)
{
    _mm512_storeu_ps(p, a);
}

/* 16 rows of 16 double words: out[i] is double word i of every row. */
INLINE void transpose_32(const uint8_t *src, size_t stride, vi out[16])
{
    vi a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        const vi r0 = vi_load(src + (size_t)i * stride);
        const vi r1 = vi_load(src + (size_t)(i + 1) * stride);
        a[i] = _mm512_unpacklo_epi32(r0, r1);
        a[i + 1] = _mm512_unpackhi_epi32(r0, r1);
    }
    for (int i = 0; i < 16; i += 4) {
        b[i] = _mm512_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm512_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm512_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm512_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    /* Now 128-bit lane l of b[4 g + i] is double word 4 l + i of rows 4 g .. 4 g + 3. */
    for (int i = 0; i < 4; i++) {
        const vi even0 = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88);
        const vi even1 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88);
        const vi odd0 = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xdd);
        const vi odd1 = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xdd);
        out[i] = _mm512_shuffle_i32x4(even0, even1, 0x88);
        out[4 + i] = _mm512_shuffle_i32x4(odd0, odd1, 0x88);
        out[8 + i] = _mm512_shuffle_i32x4(even0, even1, 0xdd);
        out[12 + i] = _mm512_shuffle_i32x4(odd0, odd1, 0xdd);
    }
}

#endif
