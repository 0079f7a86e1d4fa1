/* SPDX-License-Identifier: Apache-2.0
 *
 * Unpacking of every block format to float: plain loops, the reference of all kernels. The order of
 * the float operations (scale times group scale first, then times the level, then minus the
 * minimum) is part of the formats' definition: results are bit-exact against other readers.
 */
#include <string.h>

#include "quant/blocks.h"
#include "quant/type.h"

static void row_f16(const uint16_t *src, float *dst, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        dst[i] = sl_f16_to_f32(src[i]);
    }
}

static void row_bf16(const uint16_t *src, float *dst, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        dst[i] = sl_bf16_to_f32(src[i]);
    }
}

static void block_q4_0(const struct sl_block_q4_0 *b, float *dst)
{
    const float d = sl_f16_to_f32(b->d);
    for (int i = 0; i < 16; i++) {
        dst[i] = d * (float)((b->qs[i] & 15) - 8);
        dst[16 + i] = d * (float)((b->qs[i] >> 4) - 8);
    }
}

static void block_q4_1(const struct sl_block_q4_1 *b, float *dst)
{
    const float d = sl_f16_to_f32(b->d);
    const float m = sl_f16_to_f32(b->m);
    for (int i = 0; i < 16; i++) {
        dst[i] = d * (float)(b->qs[i] & 15) + m;
        dst[16 + i] = d * (float)(b->qs[i] >> 4) + m;
    }
}

/* Levels 0..31 of Q5_0 and Q5_1. */
static void unpack_5bit(const uint8_t qh[4], const uint8_t qs[16], int q[32])
{
    for (int i = 0; i < 16; i++) {
        q[i] = (qs[i] & 15) | (qh[i / 8] >> i % 8 & 1) << 4;
        q[16 + i] = qs[i] >> 4 | (qh[2 + i / 8] >> i % 8 & 1) << 4;
    }
}

static void block_q5_0(const struct sl_block_q5_0 *b, float *dst)
{
    const float d = sl_f16_to_f32(b->d);
    int q[32];
    unpack_5bit(b->qh, b->qs, q);
    for (int i = 0; i < 32; i++) {
        dst[i] = d * (float)(q[i] - 16);
    }
}

static void block_q5_1(const struct sl_block_q5_1 *b, float *dst)
{
    const float d = sl_f16_to_f32(b->d);
    const float m = sl_f16_to_f32(b->m);
    int q[32];
    unpack_5bit(b->qh, b->qs, q);
    for (int i = 0; i < 32; i++) {
        dst[i] = d * (float)q[i] + m;
    }
}

static void block_q8_0(const struct sl_block_q8_0 *b, float *dst)
{
    const float d = sl_f16_to_f32(b->d);
    for (int i = 0; i < 32; i++) {
        dst[i] = d * (float)b->qs[i];
    }
}

static void block_q2_k(const struct sl_block_q2_k *b, float *dst)
{
    const float d = sl_f16_to_f32(b->d);
    const float dmin = sl_f16_to_f32(b->dmin);
    for (int i = 0; i < SL_QK_K; i++) {
        const uint8_t scale = b->scales[i / 16];
        const int q = b->qs[i / 128 * 32 + i % 32] >> 2 * (i / 32 % 4) & 3;
        dst[i] = d * (float)(scale & 15) * (float)q - dmin * (float)(scale >> 4);
    }
}

static void block_q3_k(const struct sl_block_q3_k *b, float *dst)
{
    const float d = sl_f16_to_f32(b->d);
    for (int i = 0; i < SL_QK_K; i++) {
        const int low = b->qs[i / 128 * 32 + i % 32] >> 2 * (i / 32 % 4) & 3;
        const int high = b->hmask[i % 32] >> i / 32 & 1;
        const float scale = d * (float)sl_q3k_scale(b->scales, i / 16);
        dst[i] = scale * (float)((low | high << 2) - 4);
    }
}

static void block_q4_k(const struct sl_block_q4_k *b, float *dst)
{
    const float d = sl_f16_to_f32(b->d);
    const float dmin = sl_f16_to_f32(b->dmin);
    for (int g = 0; g < 8; g++) {
        uint8_t scale, min;
        sl_k4_scale(b->scales, g, &scale, &min);
        const float group_d = d * (float)scale;
        const float group_min = dmin * (float)min;
        const uint8_t *qs = b->qs + g / 2 * 32;
        for (int l = 0; l < 32; l++) {
            const int q = qs[l] >> 4 * (g % 2) & 15;
            dst[32 * g + l] = group_d * (float)q - group_min;
        }
    }
}

static void block_q5_k(const struct sl_block_q5_k *b, float *dst)
{
    const float d = sl_f16_to_f32(b->d);
    const float dmin = sl_f16_to_f32(b->dmin);
    for (int g = 0; g < 8; g++) {
        uint8_t scale, min;
        sl_k4_scale(b->scales, g, &scale, &min);
        const float group_d = d * (float)scale;
        const float group_min = dmin * (float)min;
        const uint8_t *qs = b->qs + g / 2 * 32;
        for (int l = 0; l < 32; l++) {
            const int q = (qs[l] >> 4 * (g % 2) & 15) | (b->qh[l] >> g & 1) << 4;
            dst[32 * g + l] = group_d * (float)q - group_min;
        }
    }
}

static void block_q6_k(const struct sl_block_q6_k *b, float *dst)
{
    const float d = sl_f16_to_f32(b->d);
    for (int i = 0; i < SL_QK_K; i++) {
        const int h = i / 128;
        const int s = i / 32 % 4;
        const int l = i % 32;
        const int low = b->ql[64 * h + 32 * (s % 2) + l] >> 4 * (s / 2) & 15;
        const int high = b->qh[32 * h + l] >> 2 * s & 3;
        const float scale = d * (float)b->scales[i / 16];
        dst[i] = scale * (float)((low | high << 4) - 32);
    }
}

static void block_iq4_nl(const struct sl_block_iq4_nl *b, float *dst)
{
    const float d = sl_f16_to_f32(b->d);
    for (int i = 0; i < 16; i++) {
        dst[i] = d * (float)sl_iq4_values[b->qs[i] & 15];
        dst[16 + i] = d * (float)sl_iq4_values[b->qs[i] >> 4];
    }
}

static void block_iq4_xs(const struct sl_block_iq4_xs *b, float *dst)
{
    const float d = sl_f16_to_f32(b->d);
    for (int g = 0; g < 8; g++) {
        const float scale = d * (float)sl_iq4xs_scale(b, g);
        for (int i = 0; i < 16; i++) {
            const uint8_t q = b->qs[16 * g + i];
            dst[32 * g + i] = scale * (float)sl_iq4_values[q & 15];
            dst[32 * g + 16 + i] = scale * (float)sl_iq4_values[q >> 4];
        }
    }
}

static void block_mxfp4(const struct sl_block_mxfp4 *b, float *dst)
{
    const float d = sl_mxfp4_scale(b->e);
    for (int i = 0; i < 16; i++) {
        dst[i] = d * (float)sl_mxfp4_values[b->qs[i] & 15];
        dst[16 + i] = d * (float)sl_mxfp4_values[b->qs[i] >> 4];
    }
}

/* One case of the switch below: all blocks of a row. */
#define ROW_CASE(TYPE, name, items)                                                                \
    case SL_TYPE_##TYPE: {                                                                         \
        const struct sl_block_##name *b = src;                                                     \
        for (int64_t i = 0; i < n_items / (items); i++) {                                          \
            block_##name(&b[i], dst + i * (items));                                                \
        }                                                                                          \
        break;                                                                                     \
    }

void sl_dequantize_row(enum sl_type type, const void *src, float *dst, int64_t n_items)
{
    switch (type) {
    case SL_TYPE_F32:
        memcpy(dst, src, (size_t)n_items * sizeof(float));
        break;
    case SL_TYPE_F16:
        row_f16(src, dst, n_items);
        break;
    case SL_TYPE_BF16:
        row_bf16(src, dst, n_items);
        break;
        ROW_CASE(Q4_0, q4_0, SL_QK)
        ROW_CASE(Q4_1, q4_1, SL_QK)
        ROW_CASE(Q5_0, q5_0, SL_QK)
        ROW_CASE(Q5_1, q5_1, SL_QK)
        ROW_CASE(Q8_0, q8_0, SL_QK)
        ROW_CASE(Q2_K, q2_k, SL_QK_K)
        ROW_CASE(Q3_K, q3_k, SL_QK_K)
        ROW_CASE(Q4_K, q4_k, SL_QK_K)
        ROW_CASE(Q5_K, q5_k, SL_QK_K)
        ROW_CASE(Q6_K, q6_k, SL_QK_K)
        ROW_CASE(IQ4_NL, iq4_nl, SL_QK)
        ROW_CASE(IQ4_XS, iq4_xs, SL_QK_K)
        ROW_CASE(MXFP4, mxfp4, SL_QK)
    default:
        /* Types that do not compute: callers check `computes`; zeros rather than stale memory. */
        memset(dst, 0, (size_t)n_items * sizeof(float));
        break;
    }
}
