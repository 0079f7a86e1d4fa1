/* SPDX-License-Identifier: Apache-2.0
 *
 * What the vector kernels share: x as 8-bit blocks in shared memory, packed by the block itself or
 * brought from scratch, its 16-byte pieces swizzled so that all formats' run orders read without
 * conflicts; and the rows of a warp.
 */
#ifndef SL_DEVICE_CUDA_LINEAR_VEC_CUH
#define SL_DEVICE_CUDA_LINEAR_VEC_CUH

#include "device/cuda/linear_args.cuh"
#include "device/cuda/linear_pack.cuh"
#include "device/cuda/linear_unpack.cuh"

SL_HD int sl_vec_swizzle(int run)
{
    return run ^ (7 * (run >> 3 & 1));
}

/* Bytes of a token's packed levels, whole swizzle groups. */
SL_HD int sl_vec_x_stride(int n_cols)
{
    return (n_cols + 255) & ~255;
}

/* Pack x of up to N tokens into shared memory; missing tokens become zeros. Eight lanes share a
 * block of 32, four elements each. */
template <int N, int THREADS>
SL_DEV void sl_vec_pack_x(const struct sl_linear_args &a, uint8_t *levels, struct sl_xblock *blocks)
{
    const int lane = (int)threadIdx.x & 31;
    const int per_token = a.n_cols / 4;
    const int x_stride = sl_vec_x_stride(a.n_cols);
#pragma unroll 1
    for (int n = 0; n < N; n++) {
        const float *x = a.x + (int64_t)n * a.n_cols;
        const bool wide = ((uintptr_t)x & 15) == 0;
#pragma unroll 2
        for (int base = (int)threadIdx.x - lane; base < per_token; base += THREADS) {
            const int i = base + lane;
            float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (i < per_token && n < a.n_tokens) {
                if (wide) {
                    v = *(const float4 *)(x + 4 * i);
                } else {
                    v = make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
                }
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
template <int N, int THREADS>
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
        for (int i = (int)threadIdx.x; i < runs; i += THREADS) {
            const uint4 v = there ? *(const uint4 *)(src + (int64_t)n * a.n_cols + 16 * i)
                                  : make_uint4(0, 0, 0, 0);
            *(uint4 *)(levels + n * x_stride + 16 * sl_vec_swizzle(i)) = v;
        }
        for (int i = (int)threadIdx.x; i < runs / 2; i += THREADS) {
            struct sl_xblock b = {0.0f, 0};
            if (there) {
                b = src_blocks[n * (runs / 2) + i];
            }
            blocks[n * (runs / 2) + i] = b;
        }
    }
}

/* The rows of a warp, in order: job after job; a gated job is the gate's row, then up's. */
struct sl_vec_rows {
    int first, stride, n;
};

SL_DEV const uint8_t *sl_vec_row(const struct sl_linear_args &a, const sl_vec_rows &rows, int i,
                                 int &part, int &row)
{
    if (a.activation != SL_ACT_NONE) {
        part = i & 1;
        row = rows.first + (i >> 1) * rows.stride;
    } else {
        row = rows.first + i * rows.stride;
        part = sl_part_of_tile(a, row);
        row -= a.part[part].first;
    }
    return a.part[part].w + row * a.row_bytes;
}

#endif
