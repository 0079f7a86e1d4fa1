/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of experts, large tiles: F16 and BF16 weights.
 * The kernels are in experts_gemm.cuh.
 */
#include "device/cuda/experts_gemm.cuh"

int sl_experts_gemm_f(cudaStream_t stream, int type, const struct sl_experts_args *args)
{
    switch (type) {
    case SL_TYPE_F16:
        return sl_experts_gemm<sl_gemm_direct<SL_TYPE_F16>>(stream, args);
    case SL_TYPE_BF16:
        return sl_experts_gemm<sl_gemm_direct<SL_TYPE_BF16>>(stream, args);
    default:
        return -1;
    }
}
