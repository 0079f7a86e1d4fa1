/* SPDX-License-Identifier: Apache-2.0
 *
 * The vector operations of the product kernels, 256 bits wide, under the names of linear_v512.h.
 * VNNI in its form without AVX-512 is used where the including file is compiled for it.
 */
#ifndef SL_CPU_X86_LINEAR_V256_H
#define SL_CPU_X86_LINEAR_V256_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define V_BYTES 32
#define V_LANES 8
#ifdef __AVXVNNI__
#define HAVE_DPBUSD 1
#define BIAS_S8 128
#else
#define HAVE_DPBUSD 0
#define BIAS_S8 0
#endif
#define INLINE static inline __attribute__((always_inline))

typedef __m256i vi;
typedef __m256 vf;

INLINE vi vi_load(const void *p)
{
    return _mm256_loadu_si256(p);
}
INLINE vf vf_load(const void *p)
{
    return _mm256_loadu_ps(p);
}
INLINE vf vf_zero(void)
{
    return _mm256_setzero_ps();
}
INLINE vf vf_set1(float x)
{
    return _mm256_set1_ps(x);
}
INLINE vf vf_mul(vf a, vf b)
{
    return _mm256_mul_ps(a, b);
}
INLINE vf vf_add(vf a, vf b)
{
    return _mm256_add_ps(a, b);
}
INLINE vf vf_fma(vf a, vf b, vf c)
{
    return _mm256_fmadd_ps(a, b, c);
}
INLINE vf vf_from_int(vi a)
{
    return _mm256_cvtepi32_ps(a);
}
INLINE float vf_sum(vf a)
{
    const __m128 c = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 d = _mm_add_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_add_ss(d, _mm_movehdup_ps(d)));
}
/* 8 halves or bfloats to float. */
INLINE vf vf_load_f16(const void *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128(p));
}
INLINE vf vf_load_bf16(const void *p)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(p)), 16));
}
INLINE void prefetch(const void *p)
{
    _mm_prefetch(p, _MM_HINT_T0);
}

#if HAVE_DPBUSD
INLINE vi vi_dpbusd(vi sum, vi w, vi x)
{
    return _mm256_dpbusd_avx_epi32(sum, w, x);
}
#endif

/* Four products of bytes per lane, 0 <= w < 64. */
INLINE vi dot_u(vi w, vi x)
{
#if HAVE_DPBUSD
    return vi_dpbusd(_mm256_setzero_si256(), w, x);
#else
    return _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1));
#endif
}
/* The same of two pairs of vectors, added. */
INLINE vi dot2_u(vi w0, vi x0, vi w1, vi x1)
{
#if HAVE_DPBUSD
    return vi_dpbusd(dot_u(w0, x0), w1, x1);
#else
    const vi sum = _mm256_add_epi16(_mm256_maddubs_epi16(w0, x0), _mm256_maddubs_epi16(w1, x1));
    return _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
#endif
}
/* Signed weights, with BIAS_S8 added; without a bias the sign moves to the activations. */
INLINE vi dot_s(vi w, vi x)
{
#if HAVE_DPBUSD
    return dot_u(w, x);
#else
    return dot_u(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
#endif
}
INLINE vi dot2_s(vi w0, vi x0, vi w1, vi x1)
{
#if HAVE_DPBUSD
    return dot2_u(w0, x0, w1, x1);
#else
    return _mm256_add_epi32(dot_s(w0, x0), dot_s(w1, x1));
#endif
}

INLINE vi vi_zero(void)
{
    return _mm256_setzero_si256();
}
INLINE vi vi_set1(int32_t x)
{
    return _mm256_set1_epi32(x);
}
INLINE vi vi_add(vi a, vi b)
{
    return _mm256_add_epi32(a, b);
}
INLINE vi vi_add16(vi a, vi b)
{
    return _mm256_add_epi16(a, b);
}
INLINE vi vi_maddubs(vi w, vi x)
{
    return _mm256_maddubs_epi16(w, x);
}
INLINE vi vi_widen16(vi a)
{
    return _mm256_madd_epi16(a, _mm256_set1_epi16(1));
}
#if HAVE_DPBUSD
/* Two products of 16-bit integers per lane. */
INLINE vi vi_dpwssd(vi sum, vi a, vi b)
{
    return _mm256_dpwssd_avx_epi32(sum, a, b);
}
#endif
/* Two vectors of floats times a factor to 16-bit integers, in order. */
INLINE void store_words(void *p, vf a, vf b, float factor)
{
    const vf f = vf_set1(factor);
    const vi words =
        _mm256_packs_epi32(_mm256_cvtps_epi32(vf_mul(a, f)), _mm256_cvtps_epi32(vf_mul(b, f)));
    _mm256_storeu_si256(p, _mm256_permute4x64_epi64(words, _MM_SHUFFLE(3, 1, 2, 0)));
}
INLINE vi vi_and(vi a, vi b)
{
    return _mm256_and_si256(a, b);
}
INLINE vi vi_max_u16(vi a, vi b)
{
    return _mm256_max_epu16(a, b);
}
INLINE uint16_t vi_largest_u16(vi a)
{
    const __m128i c = _mm_max_epu16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    const __m128i ones = _mm_set1_epi16(-1);
    return (uint16_t)~_mm_cvtsi128_si32(_mm_minpos_epu16(_mm_xor_si128(c, ones)));
}
INLINE vf vf_larger_magnitude(vf a, vf b)
{
    const vf sign = _mm256_set1_ps(-0.0f);
    return _mm256_max_ps(_mm256_andnot_ps(sign, a), _mm256_andnot_ps(sign, b));
}
INLINE float vf_largest(vf a)
{
    const __m128 c = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 d = _mm_max_ps(c, _mm_movehl_ps(c, c));
    return _mm_cvtss_f32(_mm_max_ss(d, _mm_movehdup_ps(d)));
}
INLINE void vi_store(void *p, vi a)
{
    _mm256_storeu_si256(p, a);
}
INLINE void vf_store(void *p, vf a)
{
    _mm256_storeu_ps(p, a);
}

/* 8 rows of 8 double words: out[i] is double word i of every row. */
INLINE void transpose_32(const uint8_t *src, size_t stride, vi out[8])
{
    vi a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        const vi r0 = vi_load(src + (size_t)i * stride);
        const vi r1 = vi_load(src + (size_t)(i + 1) * stride);
        a[i] = _mm256_unpacklo_epi32(r0, r1);
        a[i + 1] = _mm256_unpackhi_epi32(r0, r1);
    }
    for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm256_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm256_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    /* Now 128-bit lane l of b[4 g + i] is double word 4 l + i of rows 4 g .. 4 g + 3. */
    for (int i = 0; i < 4; i++) {
        out[i] = _mm256_permute2x128_si256(b[i], b[4 + i], 0x20);
        out[4 + i] = _mm256_permute2x128_si256(b[i], b[4 + i], 0x31);
    }
}

#endif
