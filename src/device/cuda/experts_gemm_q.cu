/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of experts, large tiles: types with blocks of 32 weights.
 * The kernels are in experts_gemm.cuh.
 */
#include "device/cuda/experts_gemm.cuh"

int sl_experts_gemm_q(cudaStream_t stream, int type, const struct sl_experts_args *args)
{
    switch (type) {
    case SL_TYPE_Q4_0:
        return sl_experts_gemm<sl_gemm_packed<SL_TYPE_Q4_0>>(stream, args);
    case SL_TYPE_Q4_1:
        return sl_experts_gemm<sl_gemm_packed<SL_TYPE_Q4_1>>(stream, args);
    case SL_TYPE_Q5_0:
        return sl_experts_gemm<sl_gemm_packed<SL_TYPE_Q5_0>>(stream, args);
    case SL_TYPE_Q5_1:
        return sl_experts_gemm<sl_gemm_packed<SL_TYPE_Q5_1>>(stream, args);
    case SL_TYPE_Q8_0:
        return sl_experts_gemm<sl_gemm_packed<SL_TYPE_Q8_0>>(stream, args);
    case SL_TYPE_IQ4_NL:
        return sl_experts_gemm<sl_gemm_packed<SL_TYPE_IQ4_NL>>(stream, args);
    case SL_TYPE_MXFP4:
        return sl_experts_gemm<sl_gemm_packed<SL_TYPE_MXFP4>>(stream, args);
    default:
        return -1;
    }
}
