/* SPDX-License-Identifier: Apache-2.0
 *
 * x of the vector kernels, in shared memory: what a block does before its first product. Three ways
 * lead there: x is packed to 8-bit blocks by the block itself, brought from scratch packed, or kept
 * as floats (weights that are not quantized). The first and the last may take a norm along: every
 * block norms the whole of x, which costs less than a kernel that does it once, and one of them
 * also writes it down.
 *
 * Packed levels lie in 16-byte pieces swizzled so that all formats' run orders read without
 * conflicts; floats lie in two halves (elements 0..3 and 4..7 of every eight) for the same reason.
 */
#ifndef SL_DEVICE_CUDA_LINEAR_VEC_CUH
#define SL_DEVICE_CUDA_LINEAR_VEC_CUH

#include "device/cuda/launch.cuh"
#include "device/cuda/linear_args.cuh"
#include "device/cuda/linear_pack.cuh"
#include "device/cuda/linear_unpack.cuh"

/* ---- where things lie ---- */

SL_HD int sl_vec_swizzle(int run)
{
    return run ^ (7 * (run >> 3 & 1));
}

/* Bytes of a token's packed levels, whole swizzle groups. */
SL_HD int sl_vec_x_stride(int n_cols)
{
    return (n_cols + 255) & ~255;
}

/* Of x packed, for n tokens: levels, then blocks. */
SL_HD int sl_vec_packed_bytes(int n_cols, int n)
{
    return n * (sl_vec_x_stride(n_cols) + n_cols / 32 * (int)sizeof(struct sl_xblock));
}

/* Of x as floats. */
SL_HD int sl_vec_float_bytes(int n_cols, int n)
{
    return n * ((n_cols + 7) & ~7) * 4;
}

/* Where float i of a token lies. */
SL_HD int sl_vec_float_at(int n_cols, int i)
{
    return (i >> 2 & 1) * (((n_cols + 7) & ~7) / 2) + (i >> 3) * 4 + (i & 3);
}

/* ---- norm ---- */

/* Floats of shared memory that sl_vec_norm_x wants behind one another: scales, then parts. */
#define SL_VEC_NORM_FLOATS(n) ((n)*33)

/* The factor of every token's norm (1 without one), into scales[N]. Whole block. */
template <int N> SL_DEV void sl_vec_norm_x(const struct sl_linear_args &a, float *scales)
{
    const int threads = (int)blockDim.x;
    const int warps = threads / 32;
    float *part = scales + N;
    const int lane = (int)threadIdx.x & 31;
    const int warp = (int)threadIdx.x >> 5;
#pragma unroll 1
    for (int n = 0; n < N; n++) {
        float sum = 0.0f;
        if (n < a.n_tokens) {
            const float *x = a.x + (int64_t)n * a.n_cols;
#pragma unroll 4
            for (int i = (int)threadIdx.x; i < a.n_cols; i += (int)blockDim.x) {
                sum += x[i] * x[i];
            }
        }
#pragma unroll
        for (int mask = 16; mask; mask >>= 1) {
            sum += sl_shfl_xor(sum, mask);
        }
        if (lane == 0) {
            part[n * warps + warp] = sum;
        }
    }
    sl_block_sync();
    for (int n = warp; n < N; n += warps) { /* a block may have fewer warps than tokens */
        float sum = lane < warps ? part[n * warps + lane] : 0.0f;
#pragma unroll
        for (int mask = 16; mask; mask >>= 1) {
            sum += sl_shfl_xor(sum, mask);
        }
        if (lane == 0) {
            scales[n] = 1.0f / sqrtf(sum / (float)a.n_cols + a.norm.eps);
        }
    }
    sl_block_sync();
}

/* The norm's weights are on their way while the block waits for x. */
SL_DEV void sl_vec_prefetch_norm(const struct sl_linear_args &a)
{
    if (a.norm.on && a.norm.weight) {
        for (int i = 32 * (int)threadIdx.x; i < a.n_cols; i += 32 * (int)blockDim.x) {
            sl_prefetch_l2(a.norm.weight + i);
        }
    }
}

SL_DEV float4 sl_vec_load4(const float *p, bool wide)
{
    return wide ? *(const float4 *)p : make_float4(p[0], p[1], p[2], p[3]);
}

/* Elements 4i .. 4i + 3 of token n, normed; the grid's last block writes them down. */
SL_DEV float4 sl_vec_take_x(const struct sl_linear_args &a, int n, int i, bool wide,
                            const float *scales)
{
    float4 v = sl_vec_load4(a.x + (int64_t)n * a.n_cols + 4 * i, wide);
    if (a.norm.on) {
        const float scale = scales[n];
        v.x *= scale, v.y *= scale, v.z *= scale, v.w *= scale;
        if (a.norm.weight) {
            const float4 w = sl_vec_load4(a.norm.weight + 4 * i, wide);
            v.x *= w.x, v.y *= w.y, v.z *= w.z, v.w *= w.w;
        }
        if (a.norm.y && blockIdx.x == gridDim.x - 1) {
            float *y = a.norm.y + (int64_t)n * a.n_cols + 4 * i;
            y[0] = v.x, y[1] = v.y, y[2] = v.z, y[3] = v.w;
        }
    }
    return v;
}

SL_DEV bool sl_vec_is_wide(const struct sl_linear_args &a)
{
    return (((uintptr_t)a.x | (uintptr_t)a.norm.weight) & 15) == 0 && a.n_cols % 4 == 0;
}

/* ---- x ---- */

/* Pack x of up to N tokens; missing tokens become zeros. Eight lanes share a block of 32, four
 * elements each. */
template <int N>
SL_DEV void sl_vec_pack_x(const struct sl_linear_args &a, uint8_t *levels, struct sl_xblock *blocks,
                          const float *scales)
{
    const int lane = (int)threadIdx.x & 31;
    const int per_token = a.n_cols / 4;
    const int x_stride = sl_vec_x_stride(a.n_cols);
    const bool wide = sl_vec_is_wide(a);
#pragma unroll 1
    for (int n = 0; n < N; n++) {
#pragma unroll 2
        for (int base = (int)threadIdx.x - lane; base < per_token; base += (int)blockDim.x) {
            const int i = base + lane;
            float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (i < per_token && n < a.n_tokens) {
                v = sl_vec_take_x(a, n, i, wide, scales);
            }
            float d, sum;
            const uint32_t q = sl_pack_levels(v, d, sum);
            const float other = sl_shfl_xor(sum, 4);
            if (i < per_token) {
                const int run = sl_vec_swizzle(i >> 2);
                *(uint32_t *)(levels + n * x_stride + 16 * run + 4 * (i & 3)) = q;
                if ((lane & 7) == 0) {
                    struct sl_xblock *b = &blocks[n * (a.n_cols / 32) + (i >> 3)];
                    b->d = d;
                    b->sums = sl_pack_half2(sum, other);
                }
            }
        }
    }
}

/* The same from scratch, where x was packed once for all blocks. */
template <int N>
SL_DEV void sl_vec_copy_x(const struct sl_linear_args &a, uint8_t *levels, struct sl_xblock *blocks)
{
    const int runs = a.n_cols / 16;
    const int x_stride = sl_vec_x_stride(a.n_cols);
    const uint8_t *src = (const uint8_t *)a.xs;
    const struct sl_xblock *src_blocks =
        (const struct sl_xblock *)(src + (int64_t)a.n_tokens * a.n_cols);
#pragma unroll 1
    for (int n = 0; n < N; n++) {
        const bool there = n < a.n_tokens;
        for (int i = (int)threadIdx.x; i < runs; i += (int)blockDim.x) {
            const uint4 v = there ? *(const uint4 *)(src + (int64_t)n * a.n_cols + 16 * i)
                                  : make_uint4(0, 0, 0, 0);
            *(uint4 *)(levels + n * x_stride + 16 * sl_vec_swizzle(i)) = v;
        }
        for (int i = (int)threadIdx.x; i < runs / 2; i += (int)blockDim.x) {
            struct sl_xblock b = {0.0f, 0};
            if (there) {
                b = src_blocks[n * (runs / 2) + i];
            }
            blocks[n * (runs / 2) + i] = b;
        }
    }
}

/* x as floats. n_cols is a multiple of 4. */
template <int N>
SL_DEV void sl_vec_keep_x(const struct sl_linear_args &a, float *to, const float *scales)
{
    const bool wide = sl_vec_is_wide(a);
#pragma unroll 1
    for (int n = 0; n < N; n++) {
        float *row = to + n * (sl_vec_float_bytes(a.n_cols, 1) / 4);
#pragma unroll 2
        for (int i = (int)threadIdx.x; i < a.n_cols / 4; i += (int)blockDim.x) {
            float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (n < a.n_tokens) {
                v = sl_vec_take_x(a, n, i, wide, scales);
            }
            *(float4 *)(row + sl_vec_float_at(a.n_cols, 4 * i)) = v;
        }
    }
}

#endif
