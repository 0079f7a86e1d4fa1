/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of experts with the tile code of linear_gemm: 128 rows of an expert times a tile of up
 * to 128 pairs. Row tiles are the fast grid index.
 */
#ifndef SL_DEVICE_CUDA_EXPERTS_GEMM_CUH
#define SL_DEVICE_CUDA_EXPERTS_GEMM_CUH

#include "device/cuda/experts.cuh"
#include "device/cuda/linear_gemm.cuh"

template <class W>
__global__ void __launch_bounds__(SL_GEMM_THREADS, 2)
    sl_experts_gemm_kernel(SL_KERNEL_ARG struct sl_experts_args g)
{
    SL_SHARED(shared);
    struct sl_linear_args a;
    if (sl_experts_bind(g, a)) {
        sl_gemm_tile<W>(a, (int)blockIdx.x, 0, shared);
    }
}

template <class W>
static int sl_experts_gemm(cudaStream_t stream, const struct sl_experts_args *args)
{
    return SL_LAUNCH((sl_experts_gemm_kernel<W>),
                     dim3((unsigned)args->n_tiles, (unsigned)args->most), dim3(SL_GEMM_THREADS),
                     (size_t)SL_GEMM_SHARED, stream, *args);
}

#endif
