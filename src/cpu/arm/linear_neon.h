/* SPDX-License-Identifier: Apache-2.0
 *
 * The vector operations of the product kernels for NEON with dot products, under the names of
 * x86/linear_v512.h. The dot product takes signed bytes on both sides, so signed levels need no
 * bias, and levels without sign stay below 64.
 */
#ifndef SL_CPU_ARM_LINEAR_NEON_H
#define SL_CPU_ARM_LINEAR_NEON_H

#include <arm_neon.h>
#include <stdint.h>
#include <string.h>

#define V_BYTES 16
#define V_LANES 4
#define HAVE_DPBUSD 1
#define BIAS_S8 0
#define INLINE static inline __attribute__((always_inline))

typedef int32x4_t vi;
typedef float32x4_t vf;

INLINE vi vi_load(const void *p)
{
    return vreinterpretq_s32_u8(vld1q_u8(p));
}
INLINE void vi_store(void *p, vi a)
{
    vst1q_u8(p, vreinterpretq_u8_s32(a));
}
INLINE vi vi_zero(void)
{
    return vdupq_n_s32(0);
}
INLINE vi vi_set1(int32_t x)
{
    return vdupq_n_s32(x);
}
INLINE vi vi_dpbusd(vi sum, vi w, vi x)
{
    return vdotq_s32(sum, vreinterpretq_s8_s32(w), vreinterpretq_s8_s32(x));
}
INLINE vf vf_load(const void *p)
{
    return vreinterpretq_f32_u8(vld1q_u8(p));
}
INLINE void vf_store(void *p, vf a)
{
    vst1q_u8(p, vreinterpretq_u8_f32(a));
}
INLINE vf vf_zero(void)
{
    return vdupq_n_f32(0.0f);
}
INLINE vf vf_set1(float x)
{
    return vdupq_n_f32(x);
}
INLINE vf vf_mul(vf a, vf b)
{
    return vmulq_f32(a, b);
}
INLINE vf vf_add(vf a, vf b)
{
    return vaddq_f32(a, b);
}
INLINE vf vf_fma(vf a, vf b, vf c)
{
    return vfmaq_f32(c, a, b);
}
INLINE vf vf_from_int(vi a)
{
    return vcvtq_f32_s32(a);
}
INLINE float vf_sum(vf a)
{
    return vaddvq_f32(a);
}
/* 4 halves or bfloats to float. */
INLINE vf vf_load_f16(const void *p)
{
    return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p)));
}
INLINE vf vf_load_bf16(const void *p)
{
    return vreinterpretq_f32_u32(vshll_n_u16(vreinterpret_u16_u8(vld1_u8(p)), 16));
}
INLINE void prefetch(const void *p)
{
    __builtin_prefetch(p);
}

INLINE vi dot_u(vi w, vi x)
{
    return vi_dpbusd(vi_zero(), w, x);
}
INLINE vi dot2_u(vi w0, vi x0, vi w1, vi x1)
{
    return vi_dpbusd(dot_u(w0, x0), w1, x1);
}
INLINE vi dot_s(vi w, vi x)
{
    return dot_u(w, x);
}
INLINE vi dot2_s(vi w0, vi x0, vi w1, vi x1)
{
    return dot2_u(w0, x0, w1, x1);
}

/* 4 rows of 4 double words: out[i] is double word i of every row. */
INLINE void transpose_32(const uint8_t *src, size_t stride, vi out[4])
{
    const int32x4x2_t a = vtrnq_s32(vi_load(src), vi_load(src + stride));
    const int32x4x2_t b = vtrnq_s32(vi_load(src + 2 * stride), vi_load(src + 3 * stride));
    for (int i = 0; i < 2; i++) {
        const int64x2_t even = vreinterpretq_s64_s32(a.val[i]);
        const int64x2_t odd = vreinterpretq_s64_s32(b.val[i]);
        out[i] = vreinterpretq_s32_s64(vzip1q_s64(even, odd));
        out[2 + i] = vreinterpretq_s32_s64(vzip2q_s64(even, odd));
    }
}

#endif
