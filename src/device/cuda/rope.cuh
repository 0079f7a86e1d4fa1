/* SPDX-License-Identifier: Apache-2.0
 *
 * One pair of a rotary embedding.
 *
 * Positions go to hundreds of thousands, where pos * freq rounded to float is off by 0.01 rad. The
 * product's rounding error is therefore kept (one fused multiply-add) and put back, to second
 * order.
 */
#ifndef SL_DEVICE_CUDA_ROPE_CUH
#define SL_DEVICE_CUDA_ROPE_CUH

#include "device/cuda/common.cuh"

/* Sine and cosine of pos * freq; the position is exact in float below 2^24. */
static __device__ __forceinline__ void sl_rope_angle(int pos, float freq, float *s, float *c)
{
    const float p = (float)pos;
    const float high = p * freq;
    const float low = fmaf(p, freq, -high);
    float s0, c0;
    sincosf(high, &s0, &c0);
    *s = fmaf(fmaf(-0.5f * low, s0, c0), low, s0);
    *c = fmaf(fmaf(-0.5f * low, c0, -s0), low, c0);
}

/* Turn the pair x[0], x[apart]. */
static __device__ __forceinline__ void sl_rope_turn(float *x, int apart, float s, float c)
{
    const float v0 = x[0];
    const float v1 = x[apart];
    x[0] = v0 * c - v1 * s;
    x[apart] = v0 * s + v1 * c;
}

#endif
