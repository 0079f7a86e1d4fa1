/* SPDX-License-Identifier: Apache-2.0
 *
 * cpu/vec.h for AVX-512 (F, BW, DQ, VL).
 */
#ifndef SL_CPU_VEC_AVX512_H
#define SL_CPU_VEC_AVX512_H

#include <immintrin.h>

typedef __m512 vf;
#define VN 16

static inline vf vload(const float *p)
{
    return _mm512_loadu_ps(p);
}

static inline void vstore(float *p, vf a)
{
    _mm512_storeu_ps(p, a);
}

static inline vf vset1(float x)
{
    return _mm512_set1_ps(x);
}

static inline vf vadd(vf a, vf b)
{
    return _mm512_add_ps(a, b);
}

static inline vf vsub(vf a, vf b)
{
    return _mm512_sub_ps(a, b);
}

static inline vf vmul(vf a, vf b)
{
    return _mm512_mul_ps(a, b);
}

static inline vf vdiv(vf a, vf b)
{
    return _mm512_div_ps(a, b);
}

static inline vf vfma(vf a, vf b, vf c)
{
    return _mm512_fmadd_ps(a, b, c);
}

static inline vf vmax(vf a, vf b)
{
    return _mm512_max_ps(a, b);
}

static inline vf vabs(vf a)
{
    return _mm512_abs_ps(a);
}

static inline vf vround(vf a)
{
    return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

static inline vf vpow2(vf n)
{
    return _mm512_scalef_ps(_mm512_set1_ps(1.0f), n);
}

static inline vf vless(vf a, vf b, vf x, vf y)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}

static inline float vhsum(vf a)
{
    return _mm512_reduce_add_ps(a);
}

static inline float vhmax(vf a)
{
    return _mm512_reduce_max_ps(a);
}

static inline __m256 sl_fold512(vf a)
{
    return _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
}

static inline void vhsum4(vf a, vf b, vf c, vf d, float out[4])
{
    const __m256 ab = _mm256_hadd_ps(sl_fold512(a), sl_fold512(b));
    const __m256 cd = _mm256_hadd_ps(sl_fold512(c), sl_fold512(d));
    const __m256 sum = _mm256_hadd_ps(ab, cd);
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps(sum, 1)));
}

/* Sum number i to lane i, by turning the vectors as a matrix: 15 additions for all. */
static inline vf vhsum16(const vf v[16])
{
    vf a[8], b[4], c[2];
    for (int i = 0; i < 8; i++) { /* lanes of 128 bits: two sums of both, twice */
        a[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]),
                             _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    }
    for (int i = 0; i < 4; i++) { /* one sum of each of four */
        const __m512d low = _mm512_castps_pd(a[2 * i]), high = _mm512_castps_pd(a[2 * i + 1]);
        b[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(low, high)),
                             _mm512_castpd_ps(_mm512_unpackhi_pd(low, high)));
    }
    for (int i = 0; i < 2; i++) { /* then across lanes */
        c[i] = _mm512_add_ps(_mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(b[2 * i], b[2 * i + 1], 0xdd));
    }
    return _mm512_add_ps(_mm512_shuffle_f32x4(c[0], c[1], 0x88),
                         _mm512_shuffle_f32x4(c[0], c[1], 0xdd));
}

static inline vf vset1_f16(uint16_t h)
{
    return _mm512_set1_ps(_cvtsh_ss(h));
}

static inline vf vload_f16(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

static inline void vstore_f16(uint16_t *p, vf a)
{
    _mm256_storeu_si256((__m256i *)p,
                        _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

static inline vf vload_i8(const int8_t *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

static inline vf vload_low4(const uint8_t *p)
{
    const __m128i bytes = _mm_loadu_si128((const __m128i *)p);
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_and_si128(bytes, _mm_set1_epi8(15))));
}

static inline vf vload_high4(const uint8_t *p)
{
    const __m128i bytes = _mm_srli_epi16(_mm_loadu_si128((const __m128i *)p), 4);
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_and_si128(bytes, _mm_set1_epi8(15))));
}

static inline vf viota(void)
{
    return _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
}

#endif
