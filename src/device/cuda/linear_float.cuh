/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of many tokens in float throughout, for F32, F16 and BF16 weights: what the choice of
 * experts is made of must not depend on how inputs are rounded for tensor cores.
 *
 * A block makes a tile of 4 TM tokens x 8 TN rows of weights. Its eight warps share the depth: of
 * every 64 columns warp w takes 8 w .. 8 w + 7, for the whole tile, from stages of its own in
 * shared memory, so that no warp waits for another until their sums are added, in order, at the
 * end. Lane 8 i + j of a warp has tokens i, i + 4, ... and rows j, j + 8, ...: TM * TN sums in
 * registers.
 *
 *   stage: | x of 4 TM tokens | weights of 8 TN rows |   8 columns each: two pieces of 16 bytes,
 *                                                        which change places in every other four
 *                                                        rows, so that eight lie in other banks
 *
 * Tokens and rows past the end repeat the last; nothing is stored of them.
 */
#ifndef SL_DEVICE_CUDA_LINEAR_FLOAT_CUH
#define SL_DEVICE_CUDA_LINEAR_FLOAT_CUH

#include "device/cuda/linear_vecf.cuh"

#define SL_FLOAT_WARPS 8
#define SL_FLOAT_COLS 8 /* of a stage */
#define SL_FLOAT_PITCH 32

template <int TYPE, int TM, int TN> struct sl_float_tile {
    static constexpr int tokens = 4 * TM;
    static constexpr int rows = 8 * TN;
    static constexpr int stages = TM * TN >= 64 ? 2 : 3;
    static constexpr int stage_bytes = (tokens + rows) * SL_FLOAT_PITCH;
    static constexpr int sums_bytes = SL_FLOAT_WARPS * tokens * rows * 4;
    static constexpr int ring_bytes = SL_FLOAT_WARPS * stages * stage_bytes;
    static constexpr int shared_bytes = ring_bytes > sums_bytes ? ring_bytes : sums_bytes;
    static constexpr int weight_bytes = TYPE == SL_TYPE_F32 ? 4 : 2;

    const struct sl_linear_args &a;
    int token0, row0;

    /* Byte of piece `i` of row `row` of a stage. */
    SL_DEV_MEMBER static int at(int row, int i)
    {
        return row * SL_FLOAT_PITCH + 16 * (i ^ (row >> 2 & 1));
    }

    /* Queue the copies of a warp's columns from `col` on; behind the end they become zeros. */
    SL_DEV_MEMBER void fetch(uint8_t *stage, int col) const
    {
        constexpr int w_pieces = weight_bytes / 2; /* of 16 bytes, in a row */
        const int lane = (int)threadIdx.x & 31;
        const struct sl_linear_part &part = a.part[0];
        for (int i = lane; i < 2 * tokens; i += 32) {
            const int token = min(token0 + i / 2, a.n_tokens - 1);
            const int k = col + 4 * (i % 2);
            const float *x = a.x + (int64_t)token * a.n_cols;
            sl_copy16(stage + at(i / 2, i % 2), k < a.n_cols ? x + k : x, k < a.n_cols ? 16 : 0);
        }
        for (int i = lane; i < w_pieces * rows; i += 32) {
            const int row = min(row0 + i / w_pieces, part.n_rows - 1);
            const int k = col + 4 * (i % w_pieces);
            const uint8_t *w = part.w + row * a.row_bytes;
            sl_copy16(stage + at(tokens + i / w_pieces, i % w_pieces),
                      k < a.n_cols ? w + k * weight_bytes : w, k < a.n_cols ? 16 : 0);
        }
        sl_copy_commit();
    }

    /* Columns 4 k .. 4 k + 3 of a row of weights. */
    SL_DEV_MEMBER static void weights(const uint8_t *stage, int row, int k, float w[4])
    {
        if constexpr (TYPE == SL_TYPE_F32) {
            const float4 v = *(const float4 *)(stage + at(tokens + row, k));
            w[0] = v.x, w[1] = v.y, w[2] = v.z, w[3] = v.w;
        } else {
            const uint2 v = *(const uint2 *)(stage + at(tokens + row, 0) + 8 * k);
            float both[8];
            sl_vecf_unpack<TYPE>(make_uint4(v.x, v.y, 0, 0), both);
            w[0] = both[0], w[1] = both[1], w[2] = both[2], w[3] = both[3];
        }
    }

    SL_DEV_MEMBER static void multiply(const uint8_t *stage, float (&sum)[TM][TN])
    {
        const int lane = (int)threadIdx.x & 31;
#pragma unroll
        for (int k = 0; k < SL_FLOAT_COLS / 4; k++) {
            float4 xs[TM];
#pragma unroll
            for (int m = 0; m < TM; m++) {
                xs[m] = *(const float4 *)(stage + at(4 * m + (lane >> 3), k));
            }
#pragma unroll
            for (int n = 0; n < TN; n++) {
                float ws[4];
                weights(stage, 8 * n + (lane & 7), k, ws);
#pragma unroll
                for (int m = 0; m < TM; m++) {
                    sum[m][n] += xs[m].x * ws[0];
                    sum[m][n] += xs[m].y * ws[1];
                    sum[m][n] += xs[m].z * ws[2];
                    sum[m][n] += xs[m].w * ws[3];
                }
            }
        }
    }

    /* The warps' sums, added and stored. Whole block. */
    SL_DEV_MEMBER void store(float *sums, const float (&sum)[TM][TN]) const
    {
        const int lane = (int)threadIdx.x & 31;
        const int warp = (int)threadIdx.x >> 5;
        sl_block_sync(); /* all have read their stages */
#pragma unroll
        for (int m = 0; m < TM; m++) {
#pragma unroll
            for (int n = 0; n < TN; n++) {
                sums[(warp * tokens + 4 * m + (lane >> 3)) * rows + 8 * n + (lane & 7)] = sum[m][n];
            }
        }
        sl_block_sync();
        for (int i = (int)threadIdx.x; i < tokens * rows; i += 32 * SL_FLOAT_WARPS) {
            const int token = token0 + i / rows;
            const int row = row0 + i % rows;
            float v = 0.0f;
#pragma unroll
            for (int w = 0; w < SL_FLOAT_WARPS; w++) {
                v += sums[w * tokens * rows + i];
            }
            if (token < a.n_tokens && row < a.part[0].n_rows) {
                sl_store_y(a, a.part[0], token, row, v);
            }
        }
    }

    SL_DEV_MEMBER void run(uint8_t *shared) const
    {
        constexpr int step = SL_FLOAT_WARPS * SL_FLOAT_COLS;
        const int warp = (int)threadIdx.x >> 5;
        uint8_t *ring = shared + warp * stages * stage_bytes;
        const int n_steps = (a.n_cols + step - 1) / step;
        const int first = warp * SL_FLOAT_COLS;
        float sum[TM][TN] = {};
        for (int i = 0; i < stages - 1; i++) {
            fetch(ring + i * stage_bytes, first + i * step);
        }
        int slot = 0, next = stages - 1;
        for (int i = 0; i < n_steps; i++) {
            fetch(ring + next * stage_bytes, first + (i + stages - 1) * step);
            sl_copy_wait<stages - 1>();
            sl_warp_sync(); /* the other lanes' copies as well */
            multiply(ring + slot * stage_bytes, sum);
            sl_warp_sync(); /* all have read it */
            slot = slot + 1 == stages ? 0 : slot + 1;
            next = next + 1 == stages ? 0 : next + 1;
        }
        sl_copy_wait<0>();
        store((float *)shared, sum);
    }
};

template <int TYPE, int TM, int TN>
__global__ void __launch_bounds__(32 * SL_FLOAT_WARPS)
    sl_float_kernel(SL_KERNEL_ARG struct sl_linear_args a)
{
    using tile = sl_float_tile<TYPE, TM, TN>;
    SL_SHARED(shared);
    const tile mine = {a, (int)blockIdx.y * tile::tokens, (int)blockIdx.x * tile::rows};
    mine.run(shared);
}

/* One plain product whose rows and x allow 16-byte accesses. */
static inline bool sl_float_takes(const struct sl_linear_args *args)
{
    return args->n_parts == 1 && args->activation == SL_ACT_NONE && !args->norm.on &&
           args->row_bytes % 16 == 0 && args->n_cols % 4 == 0 &&
           (((uintptr_t)args->x | (uintptr_t)args->part[0].w) & 15) == 0;
}

template <int TYPE, int TM, int TN>
static int sl_float_launch(cudaStream_t stream, const struct sl_linear_args *args)
{
    using tile = sl_float_tile<TYPE, TM, TN>;
    const dim3 grid((unsigned)((args->part[0].n_rows + tile::rows - 1) / tile::rows),
                    (unsigned)((args->n_tokens + tile::tokens - 1) / tile::tokens));
    return SL_LAUNCH((sl_float_kernel<TYPE, TM, TN>), grid, dim3(32 * SL_FLOAT_WARPS),
                     (size_t)tile::shared_bytes, stream, *args);
}

/* Large tiles, which read less, where they fill the GPU and fit. */
template <int TYPE>
static int sl_float_dispatch(cudaStream_t stream, const struct sl_linear_args *args,
                             const struct sl_cuda_props *props)
{
    const int64_t large =
        (int64_t)((args->part[0].n_rows + 63) / 64) * ((args->n_tokens + 31) / 32);
    const bool fits = sl_float_tile<TYPE, 8, 8>::shared_bytes <= (int)props->max_shared_bytes;
    return fits && 2 * large >= props->n_sm ? sl_float_launch<TYPE, 8, 8>(stream, args)
                                            : sl_float_launch<TYPE, 4, 4>(stream, args);
}

#endif
