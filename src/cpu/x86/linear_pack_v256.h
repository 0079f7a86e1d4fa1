/* SPDX-License-Identifier: Apache-2.0
 *
 * Packing of 32 activations with 256-bit vectors, which every x86 level has: a row of activations
 * is small beside the weights that it meets.
 */
#ifndef SL_CPU_X86_LINEAR_PACK_V256_H
#define SL_CPU_X86_LINEAR_PACK_V256_H

#include <immintrin.h>
#include <stdint.h>

static inline float max_of(__m256 a)
{
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

/* Round 32 floats to bytes, the first 16 to lo and the others to hi; their sums. Returns the scale,
 * the largest magnitude / 127. */
static inline float pack_32(const float *x, int8_t *lo, int8_t *hi, int32_t sums[2])
{
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 v[4];
    for (int i = 0; i < 4; i++) {
        v[i] = _mm256_loadu_ps(x + 8 * i);
    }
    const float largest = max_of(
        _mm256_max_ps(_mm256_max_ps(_mm256_andnot_ps(sign, v[0]), _mm256_andnot_ps(sign, v[1])),
                      _mm256_max_ps(_mm256_andnot_ps(sign, v[2]), _mm256_andnot_ps(sign, v[3]))));
    /* So small that the inverse would overflow: zeros. */
    const __m256 inverse = _mm256_set1_ps(largest > 1e-35f ? 127.0f / largest : 0.0f);
    __m256i n[4];
    for (int i = 0; i < 4; i++) {
        n[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
    }
    /* Packing works within 128-bit lanes; the permutation puts the groups of 4 back in order. */
    const __m256i bytes =
        _mm256_packs_epi16(_mm256_packs_epi32(n[0], n[1]), _mm256_packs_epi32(n[2], n[3]));
    const __m256i q = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm_storeu_si128((void *)lo, _mm256_castsi256_si128(q));
    _mm_storeu_si128((void *)hi, _mm256_extracti128_si256(q, 1));
    /* Sums of 8 unsigned bytes each; pairs of them, less what made the bytes unsigned. */
    const __m256i eights =
        _mm256_sad_epu8(_mm256_xor_si256(q, _mm256_set1_epi8((char)128)), _mm256_setzero_si256());
    const __m256i both = _mm256_sub_epi32(
        _mm256_add_epi32(eights, _mm256_shuffle_epi32(eights, 0xee)), _mm256_set1_epi32(16 * 128));
    sums[0] = _mm_cvtsi128_si32(_mm256_castsi256_si128(both));
    sums[1] = _mm_cvtsi128_si32(_mm256_extracti128_si256(both, 1));
    return largest * (1.0f / 127.0f);
}

#endif
