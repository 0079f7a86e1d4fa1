/* SPDX-License-Identifier: Apache-2.0
 *
 * Packing of activations to 8 bits with one scale per 32 columns, in the layouts of
 * linear_internal.h. Written with 256-bit vectors, which every x86 level has: a row of activations
 * is small beside the weights that it meets.
 */
#ifndef SL_CPU_X86_LINEAR_PACK_TMPL_H
#define SL_CPU_X86_LINEAR_PACK_TMPL_H

#include <immintrin.h>
#include <string.h>

#include "cpu/linear_internal.h"

struct packed {
    __m256i q;      /* 32 bytes in order */
    float d;        /* scale */
    int32_t sum[2]; /* of 16 bytes each */
};

static inline float max_of(__m256 a)
{
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}

static inline struct packed pack_32(const float *x)
{
    const __m256 sign = _mm256_set1_ps(-0.0f);
    __m256 v[4];
    for (int i = 0; i < 4; i++) {
        v[i] = _mm256_loadu_ps(x + 8 * i);
    }
    const float largest = max_of(
        _mm256_max_ps(_mm256_max_ps(_mm256_andnot_ps(sign, v[0]), _mm256_andnot_ps(sign, v[1])),
                      _mm256_max_ps(_mm256_andnot_ps(sign, v[2]), _mm256_andnot_ps(sign, v[3]))));
    struct packed p = {.d = largest / 127.0f};
    /* So small that the inverse would overflow: zeros. */
    const __m256 inverse = _mm256_set1_ps(largest > 1e-35f ? 127.0f / largest : 0.0f);
    __m256i n[4];
    for (int i = 0; i < 4; i++) {
        n[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
    }
    /* Packing works within 128-bit lanes; the permutation puts the groups of 4 back in order. */
    const __m256i bytes =
        _mm256_packs_epi16(_mm256_packs_epi32(n[0], n[1]), _mm256_packs_epi32(n[2], n[3]));
    p.q = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), p.q);
    __m256i sums = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    sums = _mm256_hadd_epi32(sums, sums);
    sums = _mm256_hadd_epi32(sums, sums);
    p.sum[0] = _mm256_extract_epi32(sums, 0);
    p.sum[1] = _mm256_extract_epi32(sums, 4);
    return p;
}

static inline void pack_halves_width(const float *x, int64_t n_cols, uint8_t *dst, int width)
{
    const int64_t n_blocks = n_cols / 32;
    const int per_group = width / 16;
    for (int64_t b = 0; b < (n_blocks + per_group - 1) / per_group * per_group; b++) {
        uint8_t *group = dst + b / per_group * 4 * width;
        uint8_t *at = group + b % per_group * 16;
        struct packed p = {.d = 0.0f};
        if (b < n_blocks) {
            p = pack_32(x + 32 * b);
        } else {
            p.q = _mm256_setzero_si256();
        }
        _mm_storeu_si128((void *)at, _mm256_castsi256_si128(p.q));
        _mm_storeu_si128((void *)(at + width), _mm256_extracti128_si256(p.q, 1));
        _mm_storeu_ps((void *)(at + 2 * width), _mm_set1_ps(p.d));
        const float quarter = 0.25f * p.d * (float)(p.sum[0] + p.sum[1]);
        _mm_storeu_ps((void *)(at + 3 * width), _mm_set1_ps(quarter));
    }
}

static inline void pack_super(const float *x, int64_t n_cols, void *dst)
{
    for (int64_t b = 0; b < n_cols / 256; b++) {
        uint8_t *at = (uint8_t *)dst + b * SL_LINEAR_SUPER_BYTES;
        for (int i = 0; i < 8; i++) {
            const struct packed p = pack_32(x + 256 * b + 32 * i);
            const float scales[2] = {p.d, p.d};
            const float sums[2] = {p.d * (float)p.sum[0], p.d * (float)p.sum[1]};
            _mm256_storeu_si256((void *)(at + 32 * i), p.q);
            memcpy(at + 256 + 8 * i, scales, sizeof(scales));
            memcpy(at + 320 + 8 * i, sums, sizeof(sums));
        }
    }
}

#endif
