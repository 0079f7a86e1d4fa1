/* SPDX-License-Identifier: Apache-2.0
 *
 * Packing of activations, the same in every kernel: blocks of 32 floats to int8 with a scale, or
 * rows to f16 with a scale.
 */
#ifndef SL_DEVICE_CUDA_LINEAR_PACK_CUH
#define SL_DEVICE_CUDA_LINEAR_PACK_CUH

#include "device/cuda/linear_args.cuh"

/* Eight neighbouring lanes hold a block of 32, four elements each. Returns this lane's levels;
 * `d` is the block's scale and `sum` the sum of the levels in this lane's half (of 16). The whole
 * warp takes part. */
SL_DEV uint32_t sl_pack_levels(float4 v, float &d, float &sum)
{
    float most = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
    most = fmaxf(most, sl_shfl_xor(most, 1));
    most = fmaxf(most, sl_shfl_xor(most, 2));
    most = fmaxf(most, sl_shfl_xor(most, 4));
    /* Below this 127 / most would overflow; such a block is as good as zero. */
    const bool tiny = most < 1e-30f;
    d = tiny ? 0.0f : most / 127.0f;
    const float inverse = tiny ? 0.0f : 127.0f / most;
    /* Levels as magic sums: the low byte of the bits is the level, rounded to nearest even. */
    const float x = v.x * inverse + SL_MAGIC_F32;
    const float y = v.y * inverse + SL_MAGIC_F32;
    const float z = v.z * inverse + SL_MAGIC_F32;
    const float w = v.w * inverse + SL_MAGIC_F32;
    sum = (x - SL_MAGIC_F32) + (y - SL_MAGIC_F32) + (z - SL_MAGIC_F32) + (w - SL_MAGIC_F32);
    sum += sl_shfl_xor(sum, 1);
    sum += sl_shfl_xor(sum, 2);
    const uint32_t low = sl_bytes_pick(sl_f32_bits(x), sl_f32_bits(y), 0x0040);
    const uint32_t high = sl_bytes_pick(sl_f32_bits(z), sl_f32_bits(w), 0x0040);
    return sl_bytes_pick(low, high, 0x5410);
}

/* ---- rows to f16 ---- */

#define SL_PACK_THREADS 256
#define SL_PACK_HELD 4 /* groups of four floats that a thread keeps */
#define SL_PACK_SHARED_BYTES (SL_PACK_THREADS / 32 * sizeof(float))

/* The order of the columns of a packed row: as they are, or as kernels want them that unpack
 * weights into the registers of tensor cores. Of four units of 32 weights (see linear_unpack.cuh)
 * they take first the first runs, then the second ones, of both together weights 0..3, then 4..7
 * and so on: column 64 h + 16 s + 2 u + 8 p + e of 128 is weight 4 s + 2 p + e of run h of unit u.
 * Where the runs of a unit are depends on the type. */
enum sl_x_order { SL_ORDER_PLAIN, SL_ORDER_UNITS, SL_ORDER_SUPER, SL_ORDER_FAR };

/* Where column i, a multiple of 4, and the next come to in a row; the two after them 8 later. */
SL_HD int sl_order_at(int i, int order)
{
    const int run = i >> 4;
    const int s = i >> 2 & 3;
    int unit, half;
    if (order == SL_ORDER_UNITS) {
        unit = run >> 1;
        half = run & 1;
    } else if (order == SL_ORDER_SUPER) {
        unit = (run >> 2) * 2 + (run & 1);
        half = run >> 1 & 1;
    } else {
        unit = (run >> 4) * 8 + (run >> 3 & 1) * 4 + (run & 3);
        half = run >> 2 & 1;
    }
    return (unit >> 2) * 128 + 64 * half + 16 * s + 2 * (unit & 3);
}

SL_DEV float4 sl_load4(const float *x, bool wide)
{
    return wide ? *(const float4 *)x : make_float4(x[0], x[1], x[2], x[3]);
}

SL_DEV float sl_most4(float4 v)
{
    return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
}

/* Columns i .. i + 3 of a packed row. */
SL_DEV void sl_put_half4(uint16_t *row, int i, float4 v, float factor, int order)
{
    const uint2 packed = {sl_pack_half2(v.x * factor, v.y * factor),
                          sl_pack_half2(v.z * factor, v.w * factor)};
    if (order == SL_ORDER_PLAIN) {
        *(uint2 *)(row + i) = packed;
    } else {
        const int at = sl_order_at(i, order);
        *(uint32_t *)(row + at) = packed.x;
        *(uint32_t *)(row + at + 8) = packed.y;
    }
}

/* Pack a row of n columns, a multiple of 8 (in an order: of 128), by a block of SL_PACK_THREADS
 * with `warp_most` in shared memory. The start of the row stays in registers between finding its
 * largest magnitude and packing. */
SL_DEV void sl_pack_half_row(const float *x, uint16_t *out, float *scale, int n, int order,
                             float *warp_most)
{
    const int step = 4 * SL_PACK_THREADS;
    const int first = 4 * (int)threadIdx.x;
    const bool wide = ((uintptr_t)x & 15) == 0;
    float most = 0.0f;
    float4 held[SL_PACK_HELD];
#pragma unroll
    for (int j = 0; j < SL_PACK_HELD; j++) {
        const int i = first + j * step;
        held[j] = i < n ? sl_load4(x + i, wide) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        most = fmaxf(most, sl_most4(held[j]));
    }
    for (int i = first + SL_PACK_HELD * step; i < n; i += step) {
        most = fmaxf(most, sl_most4(sl_load4(x + i, wide)));
    }
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) {
        most = fmaxf(most, sl_shfl_xor(most, mask));
    }
    if ((threadIdx.x & 31) == 0) {
        warp_most[threadIdx.x >> 5] = most;
    }
    sl_block_sync();
    for (int i = 0; i < SL_PACK_THREADS / 32; i++) {
        most = fmaxf(most, warp_most[i]);
    }
    /* most lies in [2^e, 2^(e + 1)); bring it to [2^10, 2^11). */
    int e = (int)(sl_f32_bits(most) >> 23 & 255) - 127;
    e = e < -100 ? -100 : e;
    const float factor = sl_bits_f32((uint32_t)(127 + 10 - e) << 23);
#pragma unroll
    for (int j = 0; j < SL_PACK_HELD; j++) {
        const int i = first + j * step;
        if (i < n) {
            sl_put_half4(out, i, held[j], factor, order);
        }
    }
    for (int i = first + SL_PACK_HELD * step; i < n; i += step) {
        sl_put_half4(out, i, sl_load4(x + i, wide), factor, order);
    }
    if (threadIdx.x == 0) {
        *scale = sl_bits_f32((uint32_t)(127 - 10 + e) << 23);
    }
}

#endif
