/* SPDX-License-Identifier: Apache-2.0
 *
 * Unpacking of weight blocks into 128-bit registers, for NEON. A group (layout SL_LINEAR_HALVES) is
 * one small block; a vector of a super-block is one group of 16 columns.
 */
#ifndef SL_CPU_ARM_LINEAR_LOAD_NEON_H
#define SL_CPU_ARM_LINEAR_LOAD_NEON_H

#include <stdbool.h>

#include "cpu/arm/linear_neon.h"
#include "quant/blocks.h"

#define GROUP_BLOCKS 1

/* Levels of a block (first and last 16), scale and minimum in all lanes. */
struct group {
    vi lo, hi;
    vf d, m;
};

INLINE float half(const uint8_t *p)
{
    __fp16 h;
    memcpy(&h, p, sizeof(h));
    return (float)h;
}
INLINE vi from_u8(uint8x16_t v)
{
    return vreinterpretq_s32_u8(v);
}
INLINE vi from_s8(int8x16_t v)
{
    return vreinterpretq_s32_s8(v);
}
INLINE void set_nibbles(struct group *g, const uint8_t *p)
{
    const uint8x16_t qs = vld1q_u8(p);
    g->lo = from_u8(vandq_u8(qs, vdupq_n_u8(15)));
    g->hi = from_u8(vshrq_n_u8(qs, 4));
}
INLINE vi lookup(const int8_t *levels, vi q)
{
    return from_s8(vqtbl1q_s8(vld1q_s8(levels), vreinterpretq_u8_s32(q)));
}
/* Bit i of two bytes to bit 4 of byte i. */
INLINE vi fifth_bits(const uint8_t *p, vi nibbles)
{
    const uint8x16_t bits = vcombine_u8(vdup_n_u8(p[0]), vdup_n_u8(p[1]));
    const uint8x16_t bit = vreinterpretq_u8_u64(vdupq_n_u64(UINT64_C(0x8040201008040201)));
    const uint8x16_t set = vandq_u8(vtstq_u8(bits, bit), vdupq_n_u8(16));
    return from_u8(vorrq_u8(vreinterpretq_u8_s32(nibbles), set));
}

INLINE struct group load_q4_0(const uint8_t *p, int n)
{
    (void)n;
    struct group g;
    set_nibbles(&g, p + 2);
    g.d = g.m = vf_set1(half(p));
    return g;
}
INLINE struct group load_q4_1(const uint8_t *p, int n)
{
    (void)n;
    struct group g;
    set_nibbles(&g, p + 4);
    g.d = vf_set1(half(p));
    g.m = vf_set1(half(p + 2));
    return g;
}
INLINE struct group load_q5_0(const uint8_t *p, int n)
{
    (void)n;
    struct group g;
    set_nibbles(&g, p + 6);
    g.lo = fifth_bits(p + 2, g.lo);
    g.hi = fifth_bits(p + 4, g.hi);
    g.d = g.m = vf_set1(half(p));
    return g;
}
INLINE struct group load_q5_1(const uint8_t *p, int n)
{
    (void)n;
    struct group g;
    set_nibbles(&g, p + 8);
    g.lo = fifth_bits(p + 4, g.lo);
    g.hi = fifth_bits(p + 6, g.hi);
    g.d = vf_set1(half(p));
    g.m = vf_set1(half(p + 2));
    return g;
}
INLINE struct group load_q8_0(const uint8_t *p, int n)
{
    (void)n;
    struct group g;
    g.lo = vi_load(p + 2);
    g.hi = vi_load(p + 18);
    g.d = g.m = vf_set1(half(p));
    return g;
}
INLINE struct group load_iq4_nl(const uint8_t *p, int n)
{
    struct group g = load_q4_0(p, n);
    g.lo = lookup(sl_iq4_values, g.lo);
    g.hi = lookup(sl_iq4_values, g.hi);
    return g;
}
INLINE struct group load_mxfp4(const uint8_t *p, int n)
{
    (void)n;
    const vi twelve = from_s8(vdupq_n_s8(12));
    struct group g;
    set_nibbles(&g, p + 1);
    g.lo = from_s8(vaddq_s8(vreinterpretq_s8_s32(lookup(sl_mxfp4_values, g.lo)),
                            vreinterpretq_s8_s32(twelve)));
    g.hi = from_s8(vaddq_s8(vreinterpretq_s8_s32(lookup(sl_mxfp4_values, g.hi)),
                            vreinterpretq_s8_s32(twelve)));
    g.d = g.m = vf_set1(sl_mxfp4_scale(p[0]));
    return g;
}

/* A super-block: levels in order, and scale and minimum of each 16 columns. */
struct super {
    vi q[16];
    vf s[4], m[4];
};

/* 16 bytes to floats, times a half. */
INLINE void scale_s8(vf *out, int8x16_t v, const uint8_t *p)
{
    const float d = half(p);
    const int16x8_t low = vmovl_s8(vget_low_s8(v));
    const int16x8_t high = vmovl_s8(vget_high_s8(v));
    out[0] = vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), d);
    out[1] = vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))), d);
    out[2] = vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), d);
    out[3] = vmulq_n_f32(vcvtq_f32_s32(vmovl_s16(vget_high_s16(high))), d);
}
INLINE void copy_scales(struct super *b)
{
    for (int i = 0; i < 4; i++) {
        b->m[i] = b->s[i];
    }
}
INLINE uint32_t load_u32(const uint8_t *p)
{
    uint32_t v;
    memcpy(&v, p, sizeof(v));
    return v;
}
/* Scales and minimums, four at a time in a word; see sl_k4_scale. */
INLINE void set_k4_scales(struct super *b, const uint8_t *p)
{
    const uint32_t low = load_u32(p + 4);
    const uint32_t low_m = load_u32(p + 8);
    const uint32_t high = load_u32(p + 12);
    const uint32_t words[4] = {
        low & 0x3f3f3f3f,
        (high & 0x0f0f0f0f) | (low >> 2 & 0x30303030),
        low_m & 0x3f3f3f3f,
        (high >> 4 & 0x0f0f0f0f) | (low_m >> 2 & 0x30303030),
    };
    const int8x16_t v = vreinterpretq_s8_u32(vld1q_u32(words));
    scale_s8(b->s, vzip1q_s8(v, v), p);
    scale_s8(b->m, vzip2q_s8(v, v), p + 2);
}
INLINE struct super load_q4_k(const uint8_t *p)
{
    struct super b;
    set_k4_scales(&b, p);
    for (int i = 0; i < 8; i++) {
        const uint8x16_t qs = vld1q_u8(p + 16 + 16 * i);
        const int at = i / 2 * 4 + i % 2;
        b.q[at] = from_u8(vandq_u8(qs, vdupq_n_u8(15)));
        b.q[at + 2] = from_u8(vshrq_n_u8(qs, 4));
    }
    return b;
}
/* Bits `bit` (from 0) of v to bit `to` of each byte. */
INLINE uint8x16_t move_bits(uint8x16_t v, int bit, int to, int mask)
{
    return vandq_u8(vshlq_u8(v, vdupq_n_s8((int8_t)(to - bit))), vdupq_n_u8((uint8_t)(mask << to)));
}
INLINE vi with_bits(vi q, uint8x16_t bits)
{
    return from_u8(vorrq_u8(vreinterpretq_u8_s32(q), bits));
}
INLINE struct super load_q5_k(const uint8_t *p)
{
    struct super b = load_q4_k(p + 32);
    set_k4_scales(&b, p);
    for (int i = 0; i < 16; i++) {
        b.q[i] = with_bits(b.q[i], move_bits(vld1q_u8(p + 16 + 16 * (i % 2)), i / 2, 4, 1));
    }
    return b;
}
INLINE struct super load_q6_k(const uint8_t *p)
{
    struct super b;
    scale_s8(b.s, vld1q_s8((const int8_t *)p + 192), p + 208);
    copy_scales(&b);
    for (int i = 0; i < 16; i++) {
        /* Column 128 h + 32 s + 16 r. */
        const int h = i / 8;
        const int s = i / 2 % 4;
        const int r = i % 2;
        const uint8x16_t ql = vld1q_u8(p + 64 * h + 32 * (s % 2) + 16 * r);
        const uint8x16_t low = s < 2 ? vandq_u8(ql, vdupq_n_u8(15)) : vshrq_n_u8(ql, 4);
        b.q[i] =
            with_bits(from_u8(low), move_bits(vld1q_u8(p + 128 + 32 * h + 16 * r), 2 * s, 4, 3));
    }
    return b;
}
INLINE struct super load_q2_k(const uint8_t *p)
{
    const uint8x16_t scales = vld1q_u8(p);
    struct super b;
    scale_s8(b.s, vreinterpretq_s8_u8(vandq_u8(scales, vdupq_n_u8(15))), p + 80);
    scale_s8(b.m, vreinterpretq_s8_u8(vshrq_n_u8(scales, 4)), p + 82);
    for (int i = 0; i < 16; i++) {
        const uint8x16_t qs = vld1q_u8(p + 16 + 32 * (i / 8) + 16 * (i % 2));
        b.q[i] = from_u8(move_bits(qs, 2 * (i / 2 % 4), 0, 3));
    }
    return b;
}
INLINE struct super load_q3_k(const uint8_t *p)
{
    int8_t scales[16];
    for (int g = 0; g < 16; g++) {
        scales[g] = (int8_t)sl_q3k_scale(p + 96, g);
    }
    struct super b;
    scale_s8(b.s, vld1q_s8(scales), p + 108);
    copy_scales(&b);
    for (int i = 0; i < 16; i++) {
        const uint8x16_t qs = vld1q_u8(p + 32 + 32 * (i / 8) + 16 * (i % 2));
        const vi low = from_u8(move_bits(qs, 2 * (i / 2 % 4), 0, 3));
        b.q[i] = with_bits(low, move_bits(vld1q_u8(p + 16 * (i % 2)), i / 2, 2, 1));
    }
    return b;
}
INLINE struct super load_iq4_xs(const uint8_t *p)
{
    struct sl_block_iq4_xs head;
    memcpy(&head, p, 8);
    int8_t scales[16];
    for (int g = 0; g < 8; g++) {
        scales[2 * g] = scales[2 * g + 1] = (int8_t)sl_iq4xs_scale(&head, g);
    }
    struct super b;
    scale_s8(b.s, vld1q_s8(scales), p);
    copy_scales(&b);
    for (int g = 0; g < 8; g++) {
        const uint8x16_t qs = vld1q_u8(p + 8 + 16 * g);
        b.q[2 * g] = lookup(sl_iq4_values, from_u8(vandq_u8(qs, vdupq_n_u8(15))));
        b.q[2 * g + 1] = lookup(sl_iq4_values, from_u8(vshrq_n_u8(qs, 4)));
    }
    return b;
}

/* Products of a super-block, scaled, in two chains of additions; the minimums with the sums of the
 * activations. */
INLINE void super_products(const struct super *b, const uint8_t *x, vi (*dot)(vi, vi), bool with_m,
                           vf acc[2], vf *acc_m)
{
    for (int i = 0; i < 4; i++) {
        const vf scales = vf_mul(b->s[i], vf_load(x + 256 + 16 * i));
        if (with_m) {
            *acc_m = vf_fma(b->m[i], vf_load(x + 320 + 16 * i), *acc_m);
        }
        const uint8_t *xi = x + 64 * i;
        acc[0] = vfmaq_laneq_f32(acc[0], vf_from_int(dot(b->q[4 * i], vi_load(xi))), scales, 0);
        acc[1] =
            vfmaq_laneq_f32(acc[1], vf_from_int(dot(b->q[4 * i + 1], vi_load(xi + 16))), scales, 1);
        acc[0] =
            vfmaq_laneq_f32(acc[0], vf_from_int(dot(b->q[4 * i + 2], vi_load(xi + 32))), scales, 2);
        acc[1] =
            vfmaq_laneq_f32(acc[1], vf_from_int(dot(b->q[4 * i + 3], vi_load(xi + 48))), scales, 3);
    }
}

#endif
