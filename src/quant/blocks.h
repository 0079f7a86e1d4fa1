/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory layout of the quantized blocks that compute, as they lie in a GGUF file (little endian).
 * All structs have alignment 1 or 2, so rows need no alignment of their own. Item order inside a
 * block is written at each struct; "lo" and "hi" are the two nibbles of a byte.
 */
#ifndef SL_QUANT_BLOCKS_H
#define SL_QUANT_BLOCKS_H

#include <stdint.h>

#define SL_QK 32    /* items of a small block */
#define SL_QK_K 256 /* items of a super-block */

/* x = d * (q - 8). Item i < 16: lo of qs[i]; item 16 + i: hi of qs[i]. */
struct sl_block_q4_0 {
    uint16_t d;
    uint8_t qs[16];
};

/* x = d * q + m; order as Q4_0. */
struct sl_block_q4_1 {
    uint16_t d, m;
    uint8_t qs[16];
};

/* x = d * (q - 16); low four bits as Q4_0, fifth bit of item i: bit i of qh. */
struct sl_block_q5_0 {
    uint16_t d;
    uint8_t qh[4];
    uint8_t qs[16];
};

/* x = d * q + m; bits as Q5_0. */
struct sl_block_q5_1 {
    uint16_t d, m;
    uint8_t qh[4];
    uint8_t qs[16];
};

/* x = d * q. */
struct sl_block_q8_0 {
    uint16_t d;
    int8_t qs[32];
};

/* 16 groups of 16. Group g: x = d * (scales[g] & 15) * q - dmin * (scales[g] >> 4).
 * Item 128 h + 32 s + l: bits 2s..2s+1 of qs[32 h + l]. */
struct sl_block_q2_k {
    uint8_t scales[16];
    uint8_t qs[64];
    uint16_t d, dmin;
};

/* 16 groups of 16. Group g: x = d * (scale(g) - 32) * (q - 4). Item 128 h + 32 s + l: low two bits
 * are bits 2s..2s+1 of qs[32 h + l], the third is bit 4h + s of hmask[l]. Six-bit scale g: low four
 * bits in a nibble of scales[g % 8] (lo for g < 8), high two in bits 2 (g / 4).. of
 * scales[8 + g % 4]. */
struct sl_block_q3_k {
    uint8_t hmask[32];
    uint8_t qs[64];
    uint8_t scales[12];
    uint16_t d;
};

/* 8 groups of 32. Group g: x = d * scale(g) * q - dmin * min(g), see sl_k4_scale.
 * Item 64 p + l: lo of qs[32 p + l]; item 64 p + 32 + l: hi of it. */
struct sl_block_q4_k {
    uint16_t d, dmin;
    uint8_t scales[12];
    uint8_t qs[128];
};

/* As Q4_K, with the fifth bit of item 32 g + l in bit g of qh[l]. */
struct sl_block_q5_k {
    uint16_t d, dmin;
    uint8_t scales[12];
    uint8_t qh[32];
    uint8_t qs[128];
};

/* 16 groups of 16. Group g: x = d * scales[g] * (q - 32). Item 128 h + 32 s + l: low four bits are
 * the lo (s < 2) or hi nibble of ql[64 h + 32 (s % 2) + l], high two bits 2s.. of qh[32 h + l]. */
struct sl_block_q6_k {
    uint8_t ql[128];
    uint8_t qh[64];
    int8_t scales[16];
    uint16_t d;
};

/* x = d * sl_iq4_values[q]; order as Q4_0. */
struct sl_block_iq4_nl {
    uint16_t d;
    uint8_t qs[16];
};

/* 8 groups of 32. Group g: x = d * (scale(g) - 32) * sl_iq4_values[q]; each group's 16 bytes are
 * ordered as Q4_0. Scale g: low four bits in a nibble of scales_l[g / 2] (lo for even g), high two
 * in bits 2g.. of scales_h. */
struct sl_block_iq4_xs {
    uint16_t d;
    uint16_t scales_h;
    uint8_t scales_l[4];
    uint8_t qs[128];
};

/* x = 2^(e - 127) * E2M1 value of q; order as Q4_0. */
struct sl_block_mxfp4 {
    uint8_t e;
    uint8_t qs[16];
};

_Static_assert(sizeof(struct sl_block_q4_0) == 18, "q4_0");
_Static_assert(sizeof(struct sl_block_q4_1) == 20, "q4_1");
_Static_assert(sizeof(struct sl_block_q5_0) == 22, "q5_0");
_Static_assert(sizeof(struct sl_block_q5_1) == 24, "q5_1");
_Static_assert(sizeof(struct sl_block_q8_0) == 34, "q8_0");
_Static_assert(sizeof(struct sl_block_q2_k) == 84, "q2_k");
_Static_assert(sizeof(struct sl_block_q3_k) == 110, "q3_k");
_Static_assert(sizeof(struct sl_block_q4_k) == 144, "q4_k");
_Static_assert(sizeof(struct sl_block_q5_k) == 176, "q5_k");
_Static_assert(sizeof(struct sl_block_q6_k) == 210, "q6_k");
_Static_assert(sizeof(struct sl_block_iq4_nl) == 18, "iq4_nl");
_Static_assert(sizeof(struct sl_block_iq4_xs) == 136, "iq4_xs");
_Static_assert(sizeof(struct sl_block_mxfp4) == 17, "mxfp4");

/* Levels of the IQ4 types. */
extern const int8_t sl_iq4_values[16];
/* Twice the E2M1 values, so that they are whole; sl_mxfp4_scale is half the block's scale. */
extern const int8_t sl_mxfp4_values[16];

/* 2^(e - 128) for every e, exact down into the subnormals. */
static inline float sl_mxfp4_scale(uint8_t e)
{
    const union {
        uint32_t u;
        float f;
    } v = {.u = e < 2 ? UINT32_C(0x00200000) << e : (uint32_t)(e - 1) << 23};
    return v.f;
}

/* Six-bit scale and minimum of group g (0..7) of Q4_K and Q5_K: groups 0..3 lie in the low six bits
 * of bytes 0..3 and 4..7; the low nibbles of groups 4..7 in bytes 8..11 (scale lo, minimum hi), and
 * their two high bits on top of the bytes of groups 0..3. */
static inline void sl_k4_scale(const uint8_t s[12], int g, uint8_t *scale, uint8_t *min)
{
    if (g < 4) {
        *scale = s[g] & 63;
        *min = s[g + 4] & 63;
    } else {
        *scale = (uint8_t)((s[g + 4] & 15) | (s[g - 4] >> 6) << 4);
        *min = (uint8_t)((s[g + 4] >> 4) | (s[g] >> 6) << 4);
    }
}

/* Signed scale (already minus 32) of group g (0..15) of Q3_K. */
static inline int sl_q3k_scale(const uint8_t s[12], int g)
{
    const int low = g < 8 ? s[g] & 15 : s[g - 8] >> 4;
    const int high = s[8 + g % 4] >> 2 * (g / 4) & 3;
    return (low | high << 4) - 32;
}

/* Signed scale (already minus 32) of group g (0..7) of IQ4_XS. */
static inline int sl_iq4xs_scale(const struct sl_block_iq4_xs *b, int g)
{
    const int low = b->scales_l[g / 2] >> 4 * (g % 2) & 15;
    const int high = b->scales_h >> 2 * g & 3;
    return (low | high << 4) - 32;
}

#endif
