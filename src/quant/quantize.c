/* SPDX-License-Identifier: Apache-2.0
 *
 * Packing of floats into every block format, by plain rounding: each group gets the scale (and
 * minimum) that spans its values, each value the nearest level. Good for KV caches, tests and
 * synthetic models; files meant for use want a search over scales instead.
 *
 * Levels are found with the scale as stored (already rounded to f16 or six bits), so the error of a
 * value is at most half a step of the stored grid, plus what the rounding of the scale cuts off at
 * the ends. Values that are not finite are clamped, never undefined.
 */
#include <math.h>
#include <string.h>

#include "quant/blocks.h"
#include "quant/type.h"

/* f16 of a scale, kept finite: an infinite scale would turn every zero level into NaN. */
static uint16_t scale_f16(float f)
{
    if (f > 65504.0f) {
        f = 65504.0f;
    } else if (f < -65504.0f) {
        f = -65504.0f;
    } else if (!(f == f)) {
        f = 0.0f;
    }
    return sl_f32_to_f16(f);
}

/* Nearest whole number of x / d inside lo..hi (lo <= 0); 0 when d is 0 or x is NaN. Divides rather
 * than multiplying by 1 / d, which overflows for subnormal d. */
static int level(float x, float d, int lo, int hi)
{
    const float steps = d != 0.0f ? x / d : 0.0f;
    if (!(steps > (float)lo)) {
        return steps == steps ? lo : 0;
    }
    return steps < (float)hi ? (int)lrintf(steps) : hi;
}

/* The value of largest magnitude, with its sign. */
static float extreme(const float *x, int n)
{
    float best = 0.0f;
    for (int i = 0; i < n; i++) {
        if (fabsf(x[i]) > fabsf(best)) {
            best = x[i];
        }
    }
    return best;
}

static void min_max(const float *x, int n, float *min, float *max)
{
    *min = x[0];
    *max = x[0];
    for (int i = 1; i < n; i++) {
        *min = x[i] < *min ? x[i] : *min;
        *max = x[i] > *max ? x[i] : *max;
    }
}

/* The extreme value goes to the level -8, which has no positive twin: one level more is used. */
static void block_q4_0(const float *x, struct sl_block_q4_0 *b)
{
    b->d = scale_f16(extreme(x, SL_QK) / -8.0f);
    const float d = sl_f16_to_f32(b->d);
    for (int i = 0; i < 16; i++) {
        const int lo = level(x[i], d, -8, 7) + 8;
        const int hi = level(x[16 + i], d, -8, 7) + 8;
        b->qs[i] = (uint8_t)(lo | hi << 4);
    }
}

static void block_q4_1(const float *x, struct sl_block_q4_1 *b)
{
    float min, max;
    min_max(x, SL_QK, &min, &max);
    b->d = scale_f16((max - min) / 15.0f);
    b->m = scale_f16(min);
    const float d = sl_f16_to_f32(b->d);
    const float m = sl_f16_to_f32(b->m);
    for (int i = 0; i < 16; i++) {
        const int lo = level(x[i] - m, d, 0, 15);
        const int hi = level(x[16 + i] - m, d, 0, 15);
        b->qs[i] = (uint8_t)(lo | hi << 4);
    }
}

static void pack_5bit(const int q[32], uint8_t qh[4], uint8_t qs[16])
{
    memset(qh, 0, 4);
    for (int i = 0; i < 32; i++) {
        qh[i / 8] = (uint8_t)(qh[i / 8] | (q[i] >> 4) << i % 8);
    }
    for (int i = 0; i < 16; i++) {
        qs[i] = (uint8_t)((q[i] & 15) | (q[16 + i] & 15) << 4);
    }
}

static void block_q5_0(const float *x, struct sl_block_q5_0 *b)
{
    b->d = scale_f16(extreme(x, SL_QK) / -16.0f);
    const float d = sl_f16_to_f32(b->d);
    int q[32];
    for (int i = 0; i < 32; i++) {
        q[i] = level(x[i], d, -16, 15) + 16;
    }
    pack_5bit(q, b->qh, b->qs);
}

static void block_q5_1(const float *x, struct sl_block_q5_1 *b)
{
    float min, max;
    min_max(x, SL_QK, &min, &max);
    b->d = scale_f16((max - min) / 31.0f);
    b->m = scale_f16(min);
    const float d = sl_f16_to_f32(b->d);
    const float m = sl_f16_to_f32(b->m);
    int q[32];
    for (int i = 0; i < 32; i++) {
        q[i] = level(x[i] - m, d, 0, 31);
    }
    pack_5bit(q, b->qh, b->qs);
}

static void block_q8_0(const float *x, struct sl_block_q8_0 *b)
{
    b->d = scale_f16(fabsf(extreme(x, SL_QK)) / 127.0f);
    const float d = sl_f16_to_f32(b->d);
    for (int i = 0; i < 32; i++) {
        b->qs[i] = (int8_t)level(x[i], d, -127, 127);
    }
}

/* Index of the level nearest to `steps` in a table of 16 (any order). */
static int nearest(const int8_t *table, float steps)
{
    int best = 0;
    for (int i = 1; i < 16; i++) {
        if (fabsf(steps - (float)table[i]) < fabsf(steps - (float)table[best])) {
            best = i;
        }
    }
    return best;
}

static void pack_table(const int8_t *table, float d, const float *x, uint8_t qs[16])
{
    for (int i = 0; i < 16; i++) {
        const int lo = nearest(table, d != 0.0f ? x[i] / d : 0.0f);
        const int hi = nearest(table, d != 0.0f ? x[16 + i] / d : 0.0f);
        qs[i] = (uint8_t)(lo | hi << 4);
    }
}

static void block_iq4_nl(const float *x, struct sl_block_iq4_nl *b)
{
    b->d = scale_f16(extreme(x, SL_QK) / -127.0f);
    pack_table(sl_iq4_values, sl_f16_to_f32(b->d), x, b->qs);
}

/* The power of two that puts the largest value between 4 and 8 steps (the top level is 6). */
static void block_mxfp4(const float *x, struct sl_block_mxfp4 *b)
{
    const float amax = fabsf(extreme(x, SL_QK));
    int exponent = -127;
    if (amax > 0.0f && amax <= 3.0e38f) {
        exponent = ilogbf(amax) - 2;
    } else if (amax > 0.0f) {
        exponent = 125;
    }
    b->e = (uint8_t)((exponent < -127 ? -127 : exponent) + 127);
    pack_table(sl_mxfp4_values, sl_mxfp4_scale(b->e), x, b->qs);
}

static void row_f16(const float *src, uint16_t *dst, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        dst[i] = sl_f32_to_f16(src[i]);
    }
}

static void row_bf16(const float *src, uint16_t *dst, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        dst[i] = sl_f32_to_bf16(src[i]);
    }
}

/* Spread of a group for formats with a minimum: x = scale * q - min, min never negative. */
static void group_range(const float *x, int n, int top, float *scale, float *min)
{
    float lo, hi;
    min_max(x, n, &lo, &hi);
    lo = lo < 0.0f ? lo : 0.0f;
    hi = hi > 0.0f ? hi : 0.0f;
    *scale = (hi - lo) / (float)top;
    *min = -lo;
}

static void block_q2_k(const float *x, struct sl_block_q2_k *b)
{
    float scales[16], mins[16];
    for (int g = 0; g < 16; g++) {
        group_range(x + 16 * g, 16, 3, &scales[g], &mins[g]);
    }
    b->d = scale_f16(extreme(scales, 16) / 15.0f);
    b->dmin = scale_f16(extreme(mins, 16) / 15.0f);
    const float d = sl_f16_to_f32(b->d);
    const float dmin = sl_f16_to_f32(b->dmin);
    memset(b->qs, 0, sizeof(b->qs));
    for (int g = 0; g < 16; g++) {
        const int s = level(scales[g], d, 0, 15);
        const int m = level(mins[g], dmin, 0, 15);
        b->scales[g] = (uint8_t)(s | m << 4);
        for (int l = 0; l < 16; l++) {
            const int i = 16 * g + l;
            const int q = level(x[i] + dmin * (float)m, d * (float)s, 0, 3);
            uint8_t *byte = &b->qs[i / 128 * 32 + i % 32];
            *byte = (uint8_t)(*byte | q << 2 * (i / 32 % 4));
        }
    }
}

static void block_q3_k(const float *x, struct sl_block_q3_k *b)
{
    float scales[16];
    for (int g = 0; g < 16; g++) {
        scales[g] = extreme(x + 16 * g, 16) / -4.0f;
    }
    b->d = scale_f16(extreme(scales, 16) / -32.0f);
    const float d = sl_f16_to_f32(b->d);
    memset(b->hmask, 0, sizeof(b->hmask));
    memset(b->qs, 0, sizeof(b->qs));
    memset(b->scales, 0, sizeof(b->scales));
    for (int g = 0; g < 16; g++) {
        const int s = level(scales[g], d, -32, 31);
        const int packed = s + 32;
        uint8_t *low = &b->scales[g % 8];
        uint8_t *high = &b->scales[8 + g % 4];
        *low = (uint8_t)(*low | (packed & 15) << (g < 8 ? 0 : 4));
        *high = (uint8_t)(*high | packed >> 4 << 2 * (g / 4));
        for (int l = 0; l < 16; l++) {
            const int i = 16 * g + l;
            const int q = level(x[i], d * (float)s, -4, 3) + 4;
            uint8_t *byte = &b->qs[i / 128 * 32 + i % 32];
            *byte = (uint8_t)(*byte | (q & 3) << 2 * (i / 32 % 4));
            b->hmask[i % 32] = (uint8_t)(b->hmask[i % 32] | q >> 2 << i / 32);
        }
    }
}

/* Scales, minimums and levels of Q4_K (top 15) and Q5_K (top 31). */
static void quantize_k45(const float *x, int top, uint16_t *d16, uint16_t *dmin16,
                         uint8_t scales12[12], uint8_t q[SL_QK_K])
{
    float scales[8], mins[8];
    for (int g = 0; g < 8; g++) {
        group_range(x + 32 * g, 32, top, &scales[g], &mins[g]);
    }
    *d16 = scale_f16(extreme(scales, 8) / 63.0f);
    *dmin16 = scale_f16(extreme(mins, 8) / 63.0f);
    const float d = sl_f16_to_f32(*d16);
    const float dmin = sl_f16_to_f32(*dmin16);
    memset(scales12, 0, 12);
    for (int g = 0; g < 8; g++) {
        const int s = level(scales[g], d, 0, 63);
        const int m = level(mins[g], dmin, 0, 63);
        if (g < 4) {
            scales12[g] = (uint8_t)s;
            scales12[g + 4] = (uint8_t)m;
        } else {
            scales12[g + 4] = (uint8_t)((s & 15) | (m & 15) << 4);
            scales12[g - 4] = (uint8_t)(scales12[g - 4] | s >> 4 << 6);
            scales12[g] = (uint8_t)(scales12[g] | m >> 4 << 6);
        }
        for (int l = 0; l < 32; l++) {
            const float shifted = x[32 * g + l] + dmin * (float)m;
            q[32 * g + l] = (uint8_t)level(shifted, d * (float)s, 0, top);
        }
    }
}

static void block_q4_k(const float *x, struct sl_block_q4_k *b)
{
    uint8_t q[SL_QK_K];
    quantize_k45(x, 15, &b->d, &b->dmin, b->scales, q);
    for (int i = 0; i < 128; i++) {
        const int at = i / 32 * 64 + i % 32;
        b->qs[i] = (uint8_t)(q[at] | q[at + 32] << 4);
    }
}

static void block_q5_k(const float *x, struct sl_block_q5_k *b)
{
    uint8_t q[SL_QK_K];
    quantize_k45(x, 31, &b->d, &b->dmin, b->scales, q);
    memset(b->qh, 0, sizeof(b->qh));
    for (int i = 0; i < 128; i++) {
        const int at = i / 32 * 64 + i % 32;
        b->qs[i] = (uint8_t)((q[at] & 15) | (q[at + 32] & 15) << 4);
    }
    for (int i = 0; i < SL_QK_K; i++) {
        b->qh[i % 32] = (uint8_t)(b->qh[i % 32] | q[i] >> 4 << i / 32);
    }
}

static void block_q6_k(const float *x, struct sl_block_q6_k *b)
{
    float scales[16];
    for (int g = 0; g < 16; g++) {
        scales[g] = extreme(x + 16 * g, 16) / -32.0f;
    }
    b->d = scale_f16(extreme(scales, 16) / -128.0f);
    const float d = sl_f16_to_f32(b->d);
    memset(b->ql, 0, sizeof(b->ql));
    memset(b->qh, 0, sizeof(b->qh));
    for (int i = 0; i < SL_QK_K; i++) {
        const int h = i / 128;
        const int s = i / 32 % 4;
        const int l = i % 32;
        const int group_scale = level(scales[i / 16], d, -128, 127);
        b->scales[i / 16] = (int8_t)group_scale;
        const int q = level(x[i], d * (float)group_scale, -32, 31) + 32;
        uint8_t *low = &b->ql[64 * h + 32 * (s % 2) + l];
        uint8_t *high = &b->qh[32 * h + l];
        *low = (uint8_t)(*low | (q & 15) << 4 * (s / 2));
        *high = (uint8_t)(*high | q >> 4 << 2 * s);
    }
}

static void block_iq4_xs(const float *x, struct sl_block_iq4_xs *b)
{
    float scales[8];
    for (int g = 0; g < 8; g++) {
        scales[g] = extreme(x + 32 * g, 32) / -127.0f;
    }
    b->d = scale_f16(extreme(scales, 8) / -32.0f);
    const float d = sl_f16_to_f32(b->d);
    b->scales_h = 0;
    memset(b->scales_l, 0, sizeof(b->scales_l));
    for (int g = 0; g < 8; g++) {
        const int s = level(scales[g], d, -32, 31);
        const int packed = s + 32;
        b->scales_l[g / 2] = (uint8_t)(b->scales_l[g / 2] | (packed & 15) << 4 * (g % 2));
        b->scales_h = (uint16_t)(b->scales_h | packed >> 4 << 2 * g);
        pack_table(sl_iq4_values, d * (float)s, x + 32 * g, b->qs + 16 * g);
    }
}

/* One case of the switch below: all blocks of a row. */
#define ROW_CASE(TYPE, name, items)                                                                \
    case SL_TYPE_##TYPE: {                                                                         \
        struct sl_block_##name *b = dst;                                                           \
        for (int64_t i = 0; i < n_items / (items); i++) {                                          \
            block_##name(src + i * (items), &b[i]);                                                \
        }                                                                                          \
        return true;                                                                               \
    }

bool sl_quantize_row(enum sl_type type, const float *src, void *dst, int64_t n_items)
{
    switch (type) {
    case SL_TYPE_F32:
        memcpy(dst, src, (size_t)n_items * sizeof(float));
        return true;
    case SL_TYPE_F16:
        row_f16(src, dst, n_items);
        return true;
    case SL_TYPE_BF16:
        row_bf16(src, dst, n_items);
        return true;
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
        return false;
    }
}
