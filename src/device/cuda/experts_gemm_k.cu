/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of experts, large tiles: types with blocks of 256 weights.
 * The kernels are in experts_gemm.cuh.
 */
#include "device/cuda/experts_gemm.cuh"
#include "device/cuda/linear_unpack_k.cuh"

int sl_experts_gemm_k(cudaStream_t stream, int type, const struct sl_experts_args *args)
{
    switch (type) {
    case SL_TYPE_Q2_K:
        return sl_experts_gemm<sl_gemm_packed<SL_TYPE_Q2_K>>(stream, args);
    case SL_TYPE_Q3_K:
        return sl_experts_gemm<sl_gemm_packed<SL_TYPE_Q3_K>>(stream, args);
    case SL_TYPE_Q4_K:
        return sl_experts_gemm<sl_gemm_packed<SL_TYPE_Q4_K>>(stream, args);
    case SL_TYPE_Q5_K:
        return sl_experts_gemm<sl_gemm_packed<SL_TYPE_Q5_K>>(stream, args);
    case SL_TYPE_Q6_K:
        return sl_experts_gemm<sl_gemm_packed<SL_TYPE_Q6_K>>(stream, args);
    case SL_TYPE_IQ4_XS:
        return sl_experts_gemm<sl_gemm_packed<SL_TYPE_IQ4_XS>>(stream, args);
    default:
        return -1;
    }
}
