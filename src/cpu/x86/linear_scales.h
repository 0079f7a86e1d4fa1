/* SPDX-License-Identifier: Apache-2.0
 *
 * Group scales of the super-blocks, unpacked to bytes in one 128-bit register. Used by the kernels
 * of every vector width.
 */
#ifndef SL_CPU_X86_LINEAR_SCALES_H
#define SL_CPU_X86_LINEAR_SCALES_H

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

/* Q4_K and Q5_K: the first 16 bytes of a block to 8 scales, then 8 minimums. */
static inline __m128i k4_scales(__m128i head)
{
    /* Double words 1, 2, 3 hold: low bits of scales 0..3, of minimums 0..3, nibbles of both 4..7.
     */
    const __m128i base = _mm_shuffle_epi32(head, _MM_SHUFFLE(3, 2, 3, 1));
    const __m128i low =
        _mm_and_si128(_mm_srlv_epi32(base, _mm_setr_epi32(0, 0, 0, 4)),
                      _mm_setr_epi32(0x3f3f3f3f, 0x0f0f0f0f, 0x3f3f3f3f, 0x0f0f0f0f));
    const __m128i top = _mm_shuffle_epi32(head, _MM_SHUFFLE(2, 2, 1, 1));
    const __m128i high =
        _mm_and_si128(_mm_srli_epi32(top, 2), _mm_setr_epi32(0, 0x30303030, 0, 0x30303030));
    return _mm_or_si128(low, high);
}

/* Q3_K: 12 bytes to 16 signed scales. */
static inline __m128i q3k_scales(const uint8_t *p)
{
    int64_t nibbles;
    int32_t pairs;
    memcpy(&nibbles, p, 8);
    memcpy(&pairs, p + 8, 4);
    const __m128i n = _mm_cvtsi64_si128(nibbles);
    const __m128i low =
        _mm_and_si128(_mm_unpacklo_epi64(n, _mm_srli_epi16(n, 4)), _mm_set1_epi8(15));
    const __m128i bits = _mm_srlv_epi32(_mm_set1_epi32(pairs), _mm_setr_epi32(0, 2, 4, 6));
    const __m128i high = _mm_slli_epi16(_mm_and_si128(bits, _mm_set1_epi8(3)), 4);
    return _mm_sub_epi8(_mm_or_si128(low, high), _mm_set1_epi8(32));
}

/* IQ4_XS: the head of a block to 8 signed scales, each twice. */
static inline __m128i iq4xs_scales(const uint8_t *p)
{
    int32_t nibbles;
    uint16_t pairs;
    memcpy(&nibbles, p + 4, 4);
    memcpy(&pairs, p + 2, 2);
    const __m128i n = _mm_cvtsi32_si128(nibbles);
    const __m128i low =
        _mm_and_si128(_mm_unpacklo_epi8(n, _mm_srli_epi16(n, 4)), _mm_set1_epi8(15));
    /* Bit pairs to the low bits of 8 words, words to bytes. */
    const __m128i words = _mm_mullo_epi16(
        _mm_set1_epi16((short)pairs),
        _mm_setr_epi16(1 << 14, 1 << 12, 1 << 10, 1 << 8, 1 << 6, 1 << 4, 1 << 2, 1));
    const __m128i bits = _mm_srli_epi16(words, 14);
    const __m128i high = _mm_slli_epi16(_mm_packus_epi16(bits, bits), 4);
    const __m128i scales = _mm_sub_epi8(_mm_or_si128(low, high), _mm_set1_epi8(32));
    return _mm_unpacklo_epi8(scales, scales);
}

#endif
