/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrix times a few vectors for F32, F16 and BF16 weights, in float throughout. A warp takes a row
 * (two when gated); lanes read 16 bytes of it at a time, several loads ahead; x comes through the
 * L1 cache. Rows or x that do not allow 16-byte accesses go element by element through the same
 * kernel. Also the exact path of F32 weights for any number of tokens, in groups of N.
 */
#ifndef SL_DEVICE_CUDA_LINEAR_VECF_CUH
#define SL_DEVICE_CUDA_LINEAR_VECF_CUH

#include "device/cuda/linear_args.cuh"

#define SL_VECF_WARPS 8
#define SL_VECF_AHEAD 4 /* 16-byte loads under way in a lane */

/* The floats of 16 bytes of weights. */
template <int TYPE> SL_DEV void sl_vecf_unpack(uint4 v, float *w)
{
    const uint32_t u[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (TYPE == SL_TYPE_F32) {
            w[i] = sl_bits_f32(u[i]);
        } else if constexpr (TYPE == SL_TYPE_F16) {
            w[2 * i] = sl_half_f32(u[i]);
            w[2 * i + 1] = sl_half_f32(u[i] >> 16);
        } else {
            w[2 * i] = sl_bits_f32(u[i] << 16);
            w[2 * i + 1] = sl_bits_f32(u[i] & 0xffff0000u);
        }
    }
}

template <int TYPE> SL_DEV float sl_vecf_one(const uint8_t *row, int k)
{
    if constexpr (TYPE == SL_TYPE_F32) {
        return ((const float *)row)[k];
    } else {
        const uint32_t v = ((const uint16_t *)row)[k];
        return TYPE == SL_TYPE_F16 ? sl_half_f32(v) : sl_bits_f32(v << 16);
    }
}

/* sum[n] += the lane's share of row times x[n]. `n_there` of the N tokens exist; the others repeat
 * the last one, their sums are dropped. */
template <int TYPE, int N>
SL_DEV void sl_vecf_row(const uint8_t *row, const float *x, int n_cols, int n_there, bool wide,
                        float sum[N])
{
    constexpr int per = TYPE == SL_TYPE_F32 ? 4 : 8; /* weights in 16 bytes */
    const int lane = (int)threadIdx.x & 31;
    const float *xn[N];
#pragma unroll
    for (int n = 0; n < N; n++) {
        xn[n] = x + (int64_t)(n < n_there ? n : n_there - 1) * n_cols;
    }
    if (!wide) {
        for (int k = lane; k < n_cols; k += 32) {
            const float w = sl_vecf_one<TYPE>(row, k);
#pragma unroll
            for (int n = 0; n < N; n++) {
                sum[n] += w * xn[n][k];
            }
        }
        return;
    }
    const int n_vectors = n_cols / per;
    for (int base = 0; base < n_vectors; base += 32 * SL_VECF_AHEAD) {
        uint4 v[SL_VECF_AHEAD];
#pragma unroll
        for (int j = 0; j < SL_VECF_AHEAD; j++) {
            const int i = base + 32 * j + lane;
            v[j] = i < n_vectors ? SL_LDG((const uint4 *)row + i) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int j = 0; j < SL_VECF_AHEAD; j++) {
            const int i = base + 32 * j + lane;
            if (i < n_vectors) {
                float w[per];
                sl_vecf_unpack<TYPE>(v[j], w);
#pragma unroll
                for (int n = 0; n < N; n++) {
#pragma unroll
                    for (int k = 0; k < per; k += 4) {
                        const float4 xv = SL_LDG((const float4 *)(xn[n] + i * per + k));
                        sum[n] += w[k] * xv.x;
                        sum[n] += w[k + 1] * xv.y;
                        sum[n] += w[k + 2] * xv.z;
                        sum[n] += w[k + 3] * xv.w;
                    }
                }
            }
        }
    }
}

template <int TYPE, int N>
__global__ void __launch_bounds__(32 * SL_VECF_WARPS)
    sl_vecf_kernel(SL_KERNEL_ARG struct sl_linear_args a, const bool wide)
{
    const int lane = (int)threadIdx.x & 31;
    const int job = (int)blockIdx.x * SL_VECF_WARPS + ((int)threadIdx.x >> 5);
    if (job >= a.n_tiles) {
        return;
    }
    const int token = (int)blockIdx.y * N;
    const int n_there = a.n_tokens - token < N ? a.n_tokens - token : N;
    const bool gated = a.activation != SL_ACT_NONE;
    const int part = gated ? 0 : sl_part_of_tile(a, job);
    const int row = job - a.part[part].first;
    const float *x = a.x + (int64_t)token * a.n_cols;
    float sum[N], up[N];
#pragma unroll
    for (int n = 0; n < N; n++) {
        sum[n] = up[n] = 0.0f;
    }
    sl_vecf_row<TYPE, N>(a.part[part].w + row * a.row_bytes, x, a.n_cols, n_there, wide, sum);
    if (gated) {
        sl_vecf_row<TYPE, N>(a.part[1].w + row * a.row_bytes, x, a.n_cols, n_there, wide, up);
    }
#pragma unroll
    for (int n = 0; n < N; n++) {
#pragma unroll
        for (int mask = 16; mask; mask >>= 1) {
            sum[n] += sl_shfl_xor(sum[n], mask);
            up[n] += sl_shfl_xor(up[n], mask);
        }
        if (lane == n && n < n_there) {
            if (gated) {
                sl_store_gated(a, token + n, row, sum[n], up[n]);
            } else {
                sl_store_y(a, a.part[part], token + n, row, sum[n]);
            }
        }
    }
}

template <int TYPE>
static int sl_vecf_dispatch(cudaStream_t stream, const struct sl_linear_args *args)
{
    const unsigned blocks = (unsigned)((args->n_tiles + SL_VECF_WARPS - 1) / SL_VECF_WARPS);
    bool wide =
        args->row_bytes % 16 == 0 && args->n_cols % 4 == 0 && ((uintptr_t)args->x & 15) == 0;
    for (int i = 0; i < args->n_parts; i++) {
        wide = wide && ((uintptr_t)args->part[i].w & 15) == 0;
    }
    if (args->n_tokens == 1) {
        return SL_LAUNCH((sl_vecf_kernel<TYPE, 1>), dim3(blocks), dim3(32 * SL_VECF_WARPS), 0,
                         stream, *args, wide);
    }
    return SL_LAUNCH((sl_vecf_kernel<TYPE, 4>), dim3(blocks, (unsigned)(args->n_tokens + 3) / 4),
                     dim3(32 * SL_VECF_WARPS), 0, stream, *args, wide);
}

#endif
