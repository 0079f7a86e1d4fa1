/* SPDX-License-Identifier: Apache-2.0
 *
 * cpu/vec.h for AVX2 with FMA and F16C.
 */
#ifndef SL_CPU_VEC_AVX2_H
#define SL_CPU_VEC_AVX2_H

#include <immintrin.h>

typedef __m256 vf;
#define VN 8

static inline vf vload(const float *p)
{
    return _mm256_loadu_ps(p);
}

static inline void vstore(float *p, vf a)
{
    _mm256_storeu_ps(p, a);
}

static inline vf vset1(float x)
{
    return _mm256_set1_ps(x);
}

static inline vf vadd(vf a, vf b)
{
    return _mm256_add_ps(a, b);
}

static inline vf vsub(vf a, vf b)
{
    return _mm256_sub_ps(a, b);
}

static inline vf vmul(vf a, vf b)
{
    return _mm256_mul_ps(a, b);
}

static inline vf vdiv(vf a, vf b)
{
    return _mm256_div_ps(a, b);
}

static inline vf vfma(vf a, vf b, vf c)
{
    return _mm256_fmadd_ps(a, b, c);
}

static inline vf vmax(vf a, vf b)
{
    return _mm256_max_ps(a, b);
}

static inline vf vabs(vf a)
{
    return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a);
}

static inline vf vround(vf a)
{
    return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

static inline vf vpow2(vf n)
{
    const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}

static inline vf vless(vf a, vf b, vf x, vf y)
{
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}

static inline void vhsum4(vf a, vf b, vf c, vf d, float out[4])
{
    const __m256 sum = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1)));
}

static inline float vhsum(vf a)
{
    __m128 x = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_add_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}

static inline float vhmax(vf a)
{
    __m128 x = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    x = _mm_max_ps(x, _mm_movehl_ps(x, x));
    return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

static inline vf vset1_f16(uint16_t h)
{
    return _mm256_set1_ps(_cvtsh_ss(h));
}

static inline vf vload_f16(const uint16_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

static inline void vstore_f16(uint16_t *p, vf a)
{
    _mm_storeu_si128((__m128i *)p,
                     _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

static inline vf vload_i8(const int8_t *p)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}

static inline vf vload_low4(const uint8_t *p)
{
    const __m128i bytes = _mm_loadl_epi64((const __m128i *)p);
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_and_si128(bytes, _mm_set1_epi8(15))));
}

static inline vf vload_high4(const uint8_t *p)
{
    const __m128i bytes = _mm_srli_epi16(_mm_loadl_epi64((const __m128i *)p), 4);
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_and_si128(bytes, _mm_set1_epi8(15))));
}

static inline vf viota(void)
{
    return _mm256_set_ps(7, 6, 5, 4, 3, 2, 1, 0);
}

#endif
