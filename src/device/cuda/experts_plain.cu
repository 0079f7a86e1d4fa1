/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of experts in float throughout: F32 weights, and shapes of F16 and BF16 whose rows are
 * not 16-byte aligned. A warp takes a row of an expert (two when gated) and the pairs of a tile,
 * four at a time.
 */
#include "device/cuda/experts.cuh"
#include "device/cuda/linear_vecf.cuh"

template <int TYPE>
__global__ void __launch_bounds__(32 * SL_VECF_WARPS)
    sl_experts_plain_kernel(SL_KERNEL_ARG struct sl_experts_args g)
{
    const int lane = (int)threadIdx.x & 31;
    const int row = (int)blockIdx.x * SL_VECF_WARPS + ((int)threadIdx.x >> 5);
    struct sl_linear_args a;
    if (!sl_experts_bind(g, a) || row >= g.n_rows) {
        return;
    }
    const bool gated = a.n_parts == 2;
    const uint8_t *w = a.part[0].w + row * a.row_bytes;
    const uint8_t *w_up = gated ? a.part[1].w + row * a.row_bytes : w;
    const bool wide = a.row_bytes % 16 == 0 && a.n_cols % 4 == 0 &&
                      (((uintptr_t)w | (uintptr_t)w_up | (uintptr_t)a.x) & 15) == 0;
    for (int token = 0; token < a.n_tokens; token += 4) {
        const int n_there = a.n_tokens - token < 4 ? a.n_tokens - token : 4;
        const float *x = a.x + (int64_t)token * a.n_cols;
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        float up[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        sl_vecf_row<TYPE, 4>(w, x, a.n_cols, n_there, wide, sum);
        if (gated) {
            sl_vecf_row<TYPE, 4>(w_up, x, a.n_cols, n_there, wide, up);
        }
#pragma unroll
        for (int n = 0; n < 4; n++) {
#pragma unroll
            for (int mask = 16; mask; mask >>= 1) {
                sum[n] += sl_shfl_xor(sum[n], mask);
                up[n] += sl_shfl_xor(up[n], mask);
            }
            if (lane == n && n < n_there) {
                if (gated) {
                    sl_store_gated(a, token + n, row, sum[n], up[n]);
                } else {
                    sl_store_y(a, a.part[0], token + n, row, sum[n]);
                }
            }
        }
    }
}

template <int TYPE>
static int sl_experts_plain_launch(cudaStream_t stream, const struct sl_experts_args *args)
{
    const unsigned blocks = (unsigned)((args->n_rows + SL_VECF_WARPS - 1) / SL_VECF_WARPS);
    return SL_LAUNCH((sl_experts_plain_kernel<TYPE>), dim3(blocks, (unsigned)args->most),
                     dim3(32 * SL_VECF_WARPS), (size_t)0, stream, *args);
}

int sl_experts_plain(cudaStream_t stream, int type, const struct sl_experts_args *args)
{
    switch (type) {
    case SL_TYPE_F32:
        return sl_experts_plain_launch<SL_TYPE_F32>(stream, args);
    case SL_TYPE_F16:
        return sl_experts_plain_launch<SL_TYPE_F16>(stream, args);
    case SL_TYPE_BF16:
        return sl_experts_plain_launch<SL_TYPE_BF16>(stream, args);
    default:
        return -1;
    }
}
