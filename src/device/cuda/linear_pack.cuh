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

/* The order of the columns of a packed row: as they are, or as kernels want them that unpack
 * weights into the registers of tensor cores. Of four units of 32 weights (see linear_unpack.cuh)
 * they take first the first runs, then the second ones, of both together weights 0..3, then 4..7
 * and so on: column 64 h + 16 s + 8 p + 2 u + e of 128 is weight 4 s + 2 p + e of run h of unit u.
 * Where the runs of a unit are depends on the type. */
enum sl_x_order { SL_ORDER_PLAIN, SL_ORDER_UNITS, SL_ORDER_SUPER, SL_ORDER_FAR };

/* What comes to columns 8 i + 2 u and the next of a packed row: this column of x and the next. */
SL_HD int sl_order_from(int i, int u, int order)
{
    if (order == SL_ORDER_PLAIN) {
        return 8 * i + 2 * u;
    }
    const int unit = (i >> 4) * 4 + u;
    const int half = i >> 3 & 1;
    const int run = order == SL_ORDER_UNITS ? 2 * unit + half
                    : order == SL_ORDER_SUPER
                        ? (unit >> 1) * 4 + 2 * half + (unit & 1)
                        : (unit >> 3) * 16 + (unit >> 2 & 1) * 8 + 4 * half + (unit & 3);
    return 16 * run + 4 * (i >> 1 & 3) + 2 * (i & 1);
}

/* Where 16 bytes of a packed row come from; past the n columns of x there is nothing but zeros. */
SL_DEV void sl_pack_load8(float v[8], const float *x, int n, int i, int order, bool wide)
{
#pragma unroll
    for (int u = 0; u < 4; u++) {
        const int from = sl_order_from(i, u, order);
        const float *at = x + from;
        const float2 pair = from >= n ? make_float2(0.0f, 0.0f)
                            : wide    ? *(const float2 *)at
                                      : make_float2(at[0], at[1]);
        v[2 * u] = pair.x;
        v[2 * u + 1] = pair.y;
    }
}

SL_DEV float sl_pack_most8(const float v[8], float most)
{
#pragma unroll
    for (int k = 0; k < 8; k++) {
        most = fmaxf(most, fabsf(v[k]));
    }
    return most;
}

SL_DEV uint4 sl_pack_half8(const float v[8], float factor)
{
    const uint4 packed = {
        sl_pack_half2(v[0] * factor, v[1] * factor), sl_pack_half2(v[2] * factor, v[3] * factor),
        sl_pack_half2(v[4] * factor, v[5] * factor), sl_pack_half2(v[6] * factor, v[7] * factor)};
    return packed;
}

/* The largest of a row over a block of THREADS, or over a warp. */
template <int THREADS> SL_DEV float sl_pack_most(float most)
{
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) {
        most = fmaxf(most, sl_shfl_xor(most, mask));
    }
    if constexpr (THREADS > 32) {
        __shared__ float warp_most[THREADS / 32];
        if ((threadIdx.x & 31) == 0) {
            warp_most[threadIdx.x >> 5] = most;
        }
        sl_block_sync();
        for (int i = 0; i < THREADS / 32; i++) {
            most = fmaxf(most, warp_most[i]);
        }
    }
    return most;
}

/* Pack a row of n columns into n_out, a multiple of 8 (in an order: of 128), by a block of THREADS,
 * or by each warp one (32). The start of the row stays in registers between finding its largest
 * magnitude and packing. put(i, v) takes columns 8 i to 8 i + 7; returns the row's scale. */
template <int THREADS, class PUT>
SL_DEV float sl_pack_half_row(const float *x, int n, int n_out, int order, PUT put)
{
    constexpr int held_n = THREADS > 32 ? 2 : 4; /* pieces that a thread keeps */
    const int thread = (int)threadIdx.x % THREADS;
    const bool wide = ((uintptr_t)x & 7) == 0;
    float most = 0.0f;
    float held[held_n][8];
#pragma unroll
    for (int j = 0; j < held_n; j++) {
        const int i = thread + j * THREADS;
        if (i < n_out / 8) {
            sl_pack_load8(held[j], x, n, i, order, wide);
            most = sl_pack_most8(held[j], most);
        }
    }
    for (int i = thread + held_n * THREADS; i < n_out / 8; i += THREADS) {
        float v[8];
        sl_pack_load8(v, x, n, i, order, wide);
        most = sl_pack_most8(v, most);
    }
    most = sl_pack_most<THREADS>(most);
    /* most lies in [2^e, 2^(e + 1)); bring it to [2^10, 2^11). */
    int e = (int)(sl_f32_bits(most) >> 23 & 255) - 127;
    e = e < -100 ? -100 : e;
    const float factor = sl_bits_f32((uint32_t)(127 + 10 - e) << 23);
#pragma unroll
    for (int j = 0; j < held_n; j++) {
        const int i = thread + j * THREADS;
        if (i < n_out / 8) {
            put(i, sl_pack_half8(held[j], factor));
        }
    }
    for (int i = thread + held_n * THREADS; i < n_out / 8; i += THREADS) {
        float v[8];
        sl_pack_load8(v, x, n, i, order, wide);
        put(i, sl_pack_half8(v, factor));
    }
    return sl_bits_f32((uint32_t)(127 - 10 + e) << 23);
}

#endif
