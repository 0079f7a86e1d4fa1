/* SPDX-License-Identifier: Apache-2.0
 *
 * Random content for every type that computes, without a quantizer: a block's quants are random
 * bits, and its scale is set so that the items have the wanted spread. Where quants are not
 * centred on zero the scale's sign is random, or the minimum is half the range: otherwise all
 * products would share an offset that grows from layer to layer.
 */
#include <math.h>
#include <string.h>

#include "quant/blocks.h"
#include "synth/synth_internal.h"

/* Root mean square of random quants of each type, before the block's scale:
 *   16, 32, 64 and 255 even levels; Q2_K and Q4_K..Q5_K with their 4- or 6-bit scales in the upper
 *   half; Q3_K and IQ4_XS with their signed 6-bit scales; Q6_K with 8-bit scales of 64..127. */
#define RMS_Q4_0 4.637f
#define RMS_Q4_1 4.610f
#define RMS_Q5_0 9.247f
#define RMS_Q5_1 9.233f
#define RMS_Q8_0 73.61f
#define RMS_IQ4 67.44f
#define RMS_MXFP4 2.926f
#define RMS_Q2_K (11.73f * 1.118f)
#define RMS_Q3_K (18.48f * 2.345f)
#define RMS_Q4_K (48.39f * 4.610f)
#define RMS_Q5_K (48.39f * 9.233f)
#define RMS_Q6_K (97.3f * 18.48f)
#define RMS_IQ4_XS (18.48f * RMS_IQ4)

/* splitmix64: a counter and a mixing function. */
static uint64_t mix64(uint64_t x)
{
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static uint64_t next(uint64_t *state)
{
    *state += 0x9e3779b97f4a7c15u;
    return mix64(*state);
}

static void random_bytes(uint64_t *state, void *dst, size_t bytes)
{
    uint8_t *p = dst;
    for (; bytes >= 8; bytes -= 8, p += 8) {
        const uint64_t word = next(state);
        memcpy(p, &word, 8);
    }
    const uint64_t word = next(state);
    memcpy(p, &word, bytes);
}

/* The value below which a share `p` of a normal distribution lies, by Newton's method. */
static double normal_quantile(double p)
{
    const double root_half = sqrt(0.5);
    const double density = 1 / sqrt(2 * acos(-1));
    double x = 0;
    for (int i = 0; i < 60; i++) {
        const double step = (0.5 * erfc(-x * root_half) - p) / (density * exp(-0.5 * x * x));
        x -= fmax(-0.5, fmin(0.5, step)); /* the first steps from afar would overshoot */
        if (fabs(step) < 1e-12) {
            break;
        }
    }
    return x;
}

void sl_synth_levels_init(struct sl_synth_levels *levels)
{
    for (int i = 0; i < SL_SYNTH_N_LEVELS; i++) {
        levels->normal[i] = (float)normal_quantile((i + 0.5) / SL_SYNTH_N_LEVELS);
    }
}

void sl_synth_filler_init(struct sl_synth_filler *filler, const struct sl_synth_levels *levels,
                          const struct sl_synth_tensor *tensor, uint64_t seed)
{
    filler->type = tensor->type;
    filler->mean = tensor->mean;
    filler->spread = tensor->spread;
    const size_t block_items = sl_type_traits((uint32_t)tensor->type)->block_items;
    filler->row_blocks = (size_t)tensor->dims[0] / block_items;
    filler->common_blocks = (size_t)tensor->n_common / block_items;
    filler->common_spread = tensor->common_spread;
    /* By name, so that a tensor does not change when others come before it. */
    filler->seed = mix64(seed ^ 0x5851f42d4c957f2du);
    for (const char *p = tensor->name; *p != '\0'; p++) {
        filler->seed = mix64(filler->seed ^ (uint8_t)*p);
    }
    for (int i = 0; i < SL_SYNTH_N_LEVELS; i++) {
        const float level = tensor->mean + tensor->spread * levels->normal[i];
        if (tensor->type == SL_TYPE_F32) {
            filler->levels.f32[i] = level;
        } else if (tensor->type == SL_TYPE_F16) {
            filler->levels.u16[i] = sl_f32_to_f16(level);
        } else if (tensor->type == SL_TYPE_BF16) {
            filler->levels.u16[i] = sl_f32_to_bf16(level);
        }
    }
}

/* ------------------------------------------------------------ float types */

/* Twelve random bits choose a level: four to a word for 16-bit types, two would waste less for
 * 32-bit ones, but those are few. */
static void fill_f32(const struct sl_synth_filler *f, uint64_t *state, float *dst, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        dst[i] = f->levels.f32[next(state) >> 52];
    }
}

static void fill_u16(const struct sl_synth_filler *f, uint64_t *state, uint16_t *dst, size_t n)
{
    for (size_t i = 0; i < n; i += 4) {
        uint64_t word = next(state);
        for (size_t j = i; j < i + 4 && j < n; j++, word >>= 16) {
            dst[j] = f->levels.u16[word & (SL_SYNTH_N_LEVELS - 1)];
        }
    }
}

/* --------------------------------------------------------------- scales */

/* A scale around `d`, three quarters to five quarters of it. */
static float jitter(float d, uint64_t bits)
{
    return d * (0.75f + (float)(bits & 0xff) * (0.5f / 255.0f));
}

static float signed_jitter(float d, uint64_t bits)
{
    return (bits & 0x100) != 0 ? -jitter(d, bits) : jitter(d, bits);
}

/* Scales with random sign for types of the form d * quant, whose blocks begin with d. */
static void set_scales(uint64_t *state, uint8_t *dst, size_t n, size_t block_bytes, float d)
{
    for (size_t i = 0; i < n; i++) {
        const uint16_t h = sl_f32_to_f16(signed_jitter(d, next(state)));
        memcpy(dst + i * block_bytes, &h, sizeof(h));
    }
}

/* Scale and minimum for types of the form d * quant + m, whose blocks begin with both. */
static void set_scales_min(uint64_t *state, uint8_t *dst, size_t n, size_t block_bytes, float d,
                           float half_range)
{
    for (size_t i = 0; i < n; i++) {
        const float scale = jitter(d, next(state));
        const uint16_t h[2] = {sl_f32_to_f16(scale), sl_f32_to_f16(-scale * half_range)};
        memcpy(dst + i * block_bytes, h, sizeof(h));
    }
}

static void fix_q8_0(uint64_t *state, struct sl_block_q8_0 *blocks, size_t n, float d)
{
    for (size_t i = 0; i < n; i++) {
        blocks[i].d = sl_f32_to_f16(jitter(d, next(state)));
        for (int j = 0; j < SL_QK; j++) { /* no quantizer writes -128 */
            blocks[i].qs[j] = blocks[i].qs[j] == -128 ? -127 : blocks[i].qs[j];
        }
    }
}

static void fix_q2_k(uint64_t *state, struct sl_block_q2_k *blocks, size_t n, float d)
{
    for (size_t i = 0; i < n; i++) {
        const float scale = jitter(d, next(state));
        blocks[i].d = sl_f32_to_f16(scale);
        blocks[i].dmin = sl_f32_to_f16(1.5f * scale);
        for (int g = 0; g < 16; g++) {
            const uint8_t both = 8 | (blocks[i].scales[g] & 7);
            blocks[i].scales[g] = (uint8_t)(both | both << 4);
        }
    }
}

static void fix_q3_k(uint64_t *state, struct sl_block_q3_k *blocks, size_t n, float d)
{
    for (size_t i = 0; i < n; i++) {
        blocks[i].d = sl_f32_to_f16(jitter(d, next(state)));
    }
}

/* The twelve scale bytes of Q4_K and Q5_K, each group's minimum number equal to its scale number,
 * so that dmin alone centres the block (layout: sl_k4_scale). */
static void set_k4_scales(uint8_t s[12])
{
    uint8_t scale[8];
    for (int g = 0; g < 8; g++) {
        scale[g] = 32 | (s[g] & 31);
    }
    for (int g = 0; g < 4; g++) {
        const uint8_t low = (uint8_t)(scale[g] | (scale[g + 4] >> 4) << 6);
        s[g] = low;
        s[g + 4] = low;
        s[g + 8] = (uint8_t)((scale[g + 4] & 15) | (scale[g + 4] & 15) << 4);
    }
}

static void fix_q4_k(uint64_t *state, struct sl_block_q4_k *blocks, size_t n, float d)
{
    set_scales_min(state, (uint8_t *)blocks, n, sizeof(*blocks), d, -7.5f);
    for (size_t i = 0; i < n; i++) {
        set_k4_scales(blocks[i].scales);
    }
}

static void fix_q5_k(uint64_t *state, struct sl_block_q5_k *blocks, size_t n, float d)
{
    set_scales_min(state, (uint8_t *)blocks, n, sizeof(*blocks), d, -15.5f);
    for (size_t i = 0; i < n; i++) {
        set_k4_scales(blocks[i].scales);
    }
}

static void fix_q6_k(uint64_t *state, struct sl_block_q6_k *blocks, size_t n, float d)
{
    for (size_t i = 0; i < n; i++) {
        blocks[i].d = sl_f32_to_f16(jitter(d, next(state)));
        for (int g = 0; g < 16; g++) {
            const int scale = blocks[i].scales[g];
            const int magnitude = 64 | (scale & 63);
            blocks[i].scales[g] = (int8_t)(scale < 0 ? -magnitude : magnitude);
        }
    }
}

/* Scales of MXFP4 are powers of two: of the two around the wanted one each is taken as often as
 * makes the mean square right. */
static void fix_mxfp4(uint64_t *state, struct sl_block_mxfp4 *blocks, size_t n, float d)
{
    const int low = (int)floorf(log2f(d));
    const float ratio = d / ldexpf(1, low); /* 1 .. 2 */
    const float share = (ratio * ratio - 1) / 3;
    for (size_t i = 0; i < n; i++) {
        const bool high = (float)(next(state) >> 40) * 0x1p-24f < share;
        blocks[i].e = (uint8_t)(127 + low + (high ? 1 : 0));
    }
}

static void fix_blocks(enum sl_type type, float s, uint64_t *state, void *dst, size_t n)
{
    switch (type) {
    case SL_TYPE_Q4_0:
        set_scales(state, dst, n, sizeof(struct sl_block_q4_0), s / RMS_Q4_0);
        break;
    case SL_TYPE_Q4_1:
        set_scales_min(state, dst, n, sizeof(struct sl_block_q4_1), s / RMS_Q4_1, 7.5f);
        break;
    case SL_TYPE_Q5_0:
        set_scales(state, dst, n, sizeof(struct sl_block_q5_0), s / RMS_Q5_0);
        break;
    case SL_TYPE_Q5_1:
        set_scales_min(state, dst, n, sizeof(struct sl_block_q5_1), s / RMS_Q5_1, 15.5f);
        break;
    case SL_TYPE_Q8_0:
        fix_q8_0(state, dst, n, s / RMS_Q8_0);
        break;
    case SL_TYPE_Q2_K:
        fix_q2_k(state, dst, n, s / RMS_Q2_K);
        break;
    case SL_TYPE_Q3_K:
        fix_q3_k(state, dst, n, s / RMS_Q3_K);
        break;
    case SL_TYPE_Q4_K:
        fix_q4_k(state, dst, n, s / RMS_Q4_K);
        break;
    case SL_TYPE_Q5_K:
        fix_q5_k(state, dst, n, s / RMS_Q5_K);
        break;
    case SL_TYPE_Q6_K:
        fix_q6_k(state, dst, n, s / RMS_Q6_K);
        break;
    case SL_TYPE_IQ4_NL:
        set_scales(state, dst, n, sizeof(struct sl_block_iq4_nl), s / RMS_IQ4);
        break;
    case SL_TYPE_IQ4_XS:
        set_scales(state, dst, n, sizeof(struct sl_block_iq4_xs), s / RMS_IQ4_XS);
        break;
    case SL_TYPE_MXFP4:
        fix_mxfp4(state, dst, n, s / RMS_MXFP4);
        break;
    default:
        break;
    }
}

/* Block `column` of every row. */
static void fill_common(const struct sl_synth_filler *f, size_t column, void *dst)
{
    uint64_t state = mix64(f->seed ^ mix64(0x632be59bd9b4e019u + column));
    const size_t bytes = sl_type_traits((uint32_t)f->type)->block_bytes;
    const float ratio = f->common_spread / f->spread;
    if (f->type == SL_TYPE_F32) {
        float x;
        fill_f32(f, &state, &x, 1);
        x *= ratio;
        memcpy(dst, &x, sizeof(x));
    } else if (f->type == SL_TYPE_F16 || f->type == SL_TYPE_BF16) {
        uint16_t h;
        float x;
        fill_u16(f, &state, &h, 1);
        sl_dequantize_row(f->type, &h, &x, 1);
        x *= ratio;
        sl_quantize_row(f->type, &x, dst, 1);
    } else {
        random_bytes(&state, dst, bytes);
        fix_blocks(f->type, f->common_spread, &state, dst, 1);
    }
}

static void fill_random(const struct sl_synth_filler *filler, uint64_t piece, void *dst,
                        size_t n_blocks)
{
    uint64_t state = mix64(filler->seed + piece);
    switch (filler->type) {
    case SL_TYPE_F32:
        fill_f32(filler, &state, dst, n_blocks);
        break;
    case SL_TYPE_F16:
    case SL_TYPE_BF16:
        fill_u16(filler, &state, dst, n_blocks);
        break;
    default:
        random_bytes(&state, dst, n_blocks * sl_type_traits((uint32_t)filler->type)->block_bytes);
        fix_blocks(filler->type, filler->spread, &state, dst, n_blocks);
        break;
    }
}

void sl_synth_fill(const struct sl_synth_filler *filler, uint64_t piece, uint64_t first_block,
                   void *dst, size_t n_blocks)
{
    fill_random(filler, piece, dst, n_blocks);
    const size_t block_bytes = sl_type_traits((uint32_t)filler->type)->block_bytes;
    for (size_t i = 0; filler->common_blocks > 0 && i < n_blocks; i++) {
        const size_t column = (size_t)((first_block + i) % filler->row_blocks);
        if (column < filler->common_blocks) {
            fill_common(filler, column, (uint8_t *)dst + i * block_bytes);
        }
    }
}
