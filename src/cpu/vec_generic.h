/* SPDX-License-Identifier: Apache-2.0
 *
 * cpu/vec.h by compiler vectors of four floats: the compiler makes SSE2 or NEON of them, or plain
 * code where there is neither. Half floats go through the conversions of quant/type.h, except where
 * NEON has them.
 */
#ifndef SL_CPU_VEC_GENERIC_H
#define SL_CPU_VEC_GENERIC_H

#if defined(__ARM_NEON) && defined(__aarch64__)
#include <arm_neon.h>
#endif

typedef float vf __attribute__((vector_size(16)));
typedef int32_t sl_vi __attribute__((vector_size(16)));
#define VN 4

static inline vf vload(const float *p)
{
    vf a;
    memcpy(&a, p, sizeof(a));
    return a;
}

static inline void vstore(float *p, vf a)
{
    memcpy(p, &a, sizeof(a));
}

static inline vf vset1(float x)
{
    return (vf){x, x, x, x};
}

static inline vf vadd(vf a, vf b)
{
    return a + b;
}

static inline vf vsub(vf a, vf b)
{
    return a - b;
}

static inline vf vmul(vf a, vf b)
{
    return a * b;
}

static inline vf vdiv(vf a, vf b)
{
    return a / b;
}

static inline vf vfma(vf a, vf b, vf c)
{
    return a * b + c;
}

static inline vf vless(vf a, vf b, vf x, vf y)
{
    const sl_vi mask = a < b;
    return (vf)((mask & (sl_vi)x) | (~mask & (sl_vi)y));
}

static inline vf vmax(vf a, vf b)
{
    return vless(b, a, a, b);
}

static inline vf vabs(vf a)
{
    return (vf)((sl_vi)a & 0x7fffffff);
}

/* Adding 1.5 * 2^23 leaves no fraction bits; whole numbers above 2^22 pass unchanged. */
static inline vf vround(vf a)
{
    const vf magic = vset1(12582912.0f);
    return vless(vabs(a), vset1(4194304.0f), (a + magic) - magic, a);
}

static inline vf vpow2(vf n)
{
    return (vf)((__builtin_convertvector(n, sl_vi) + 127) << 23);
}

static inline float vhsum(vf a)
{
    return (a[0] + a[2]) + (a[1] + a[3]);
}

static inline float vhmax(vf a)
{
    const float x = a[0] > a[1] ? a[0] : a[1];
    const float y = a[2] > a[3] ? a[2] : a[3];
    return x > y ? x : y;
}

static inline void vhsum4(vf a, vf b, vf c, vf d, float out[4])
{
    out[0] = vhsum(a);
    out[1] = vhsum(b);
    out[2] = vhsum(c);
    out[3] = vhsum(d);
}

static inline vf vset1_f16(uint16_t h)
{
    return vset1(sl_f16_to_f32(h));
}

static inline vf vload_f16(const uint16_t *p)
{
#if defined(__ARM_NEON) && defined(__aarch64__)
    return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
    return (vf){sl_f16_to_f32(p[0]), sl_f16_to_f32(p[1]), sl_f16_to_f32(p[2]), sl_f16_to_f32(p[3])};
#endif
}

static inline void vstore_f16(uint16_t *p, vf a)
{
#if defined(__ARM_NEON) && defined(__aarch64__)
    vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)a)));
#else
    for (int i = 0; i < VN; i++) {
        p[i] = sl_f32_to_f16(a[i]);
    }
#endif
}

static inline vf vload_i8(const int8_t *p)
{
    return (vf){(float)p[0], (float)p[1], (float)p[2], (float)p[3]};
}

static inline vf vload_low4(const uint8_t *p)
{
    return (vf){(float)(p[0] & 15), (float)(p[1] & 15), (float)(p[2] & 15), (float)(p[3] & 15)};
}

static inline vf vload_high4(const uint8_t *p)
{
    return (vf){(float)(p[0] >> 4), (float)(p[1] >> 4), (float)(p[2] >> 4), (float)(p[3] >> 4)};
}

static inline vf viota(void)
{
    return (vf){0.0f, 1.0f, 2.0f, 3.0f};
}

#endif
