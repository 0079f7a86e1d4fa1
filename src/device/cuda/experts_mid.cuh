/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of experts with the tile code of linear_mid: 32 rows of an expert times a tile of up to
 * 64 pairs. Row tiles are the fast grid index.
 */
#ifndef SL_DEVICE_CUDA_EXPERTS_MID_CUH
#define SL_DEVICE_CUDA_EXPERTS_MID_CUH

#include "device/cuda/experts.cuh"
#include "device/cuda/linear_mid.cuh"

template <int TYPE, int NT>
__global__ void __launch_bounds__(SL_MID_THREADS, NT <= 2 ? 3 : 2)
    sl_experts_midq_kernel(SL_KERNEL_ARG struct sl_experts_args g)
{
    SL_SHARED(shared);
    struct sl_linear_args a;
    if (sl_experts_bind(g, a)) {
        sl_midq_tile<TYPE, NT, SL_MID_ROWS>(a, (int)blockIdx.x, 0, shared);
    }
}

template <int TYPE, int NT>
__global__ void __launch_bounds__(SL_MID_THREADS, NT <= 2 ? 3 : 2)
    sl_experts_midh_kernel(SL_KERNEL_ARG struct sl_experts_args g)
{
    SL_SHARED(shared);
    struct sl_linear_args a;
    if (sl_experts_bind(g, a)) {
        sl_midh_tile<TYPE, NT, SL_MID_ROWS>(a, (int)blockIdx.x, 0, shared);
    }
}

template <int TYPE, int NT>
static int sl_experts_midq_launch(cudaStream_t stream, const struct sl_experts_args *args)
{
    constexpr int shared = sl_mid_shared_bytes<SL_MID_ROWS>(
        sl_midq_stage<sl_fmt<TYPE>, NT, SL_MID_ROWS>::aligned, 8 * NT);
    return SL_LAUNCH((sl_experts_midq_kernel<TYPE, NT>),
                     dim3((unsigned)args->n_tiles, (unsigned)args->most), dim3(SL_MID_THREADS),
                     (size_t)shared, stream, *args);
}

template <int TYPE, int NT>
static int sl_experts_midh_launch(cudaStream_t stream, const struct sl_experts_args *args)
{
    constexpr int shared =
        sl_mid_shared_bytes<SL_MID_ROWS>(sl_midh_stage<NT, SL_MID_ROWS>::bytes, 8 * NT);
    return SL_LAUNCH((sl_experts_midh_kernel<TYPE, NT>),
                     dim3((unsigned)args->n_tiles, (unsigned)args->most), dim3(SL_MID_THREADS),
                     (size_t)shared, stream, *args);
}

template <int TYPE>
static int sl_experts_midq(cudaStream_t stream, const struct sl_experts_args *args)
{
    const int n = args->order.tile_tokens;
    return n <= 8    ? sl_experts_midq_launch<TYPE, 1>(stream, args)
           : n <= 32 ? sl_experts_midq_launch<TYPE, 4>(stream, args)
                     : sl_experts_midq_launch<TYPE, 8>(stream, args);
}

template <int TYPE>
static int sl_experts_midh(cudaStream_t stream, const struct sl_experts_args *args)
{
    const int n = args->order.tile_tokens;
    return n <= 8    ? sl_experts_midh_launch<TYPE, 1>(stream, args)
           : n <= 32 ? sl_experts_midh_launch<TYPE, 4>(stream, args)
                     : sl_experts_midh_launch<TYPE, 8>(stream, args);
}

#endif
