/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of many tokens: types with blocks of 32 weights. The kernels are in linear_gemm.cuh.
 */
#include "device/cuda/linear_gemm.cuh"

int sl_linear_gemm_q(cudaStream_t stream, int type, const struct sl_linear_args *args)
{
    switch (type) {
    case SL_TYPE_Q4_0:
        return sl_gemm_launch<sl_gemm_packed<SL_TYPE_Q4_0>>(stream, args);
    case SL_TYPE_Q4_1:
        return sl_gemm_launch<sl_gemm_packed<SL_TYPE_Q4_1>>(stream, args);
    case SL_TYPE_Q5_0:
        return sl_gemm_launch<sl_gemm_packed<SL_TYPE_Q5_0>>(stream, args);
    case SL_TYPE_Q5_1:
        return sl_gemm_launch<sl_gemm_packed<SL_TYPE_Q5_1>>(stream, args);
    case SL_TYPE_Q8_0:
        return sl_gemm_launch<sl_gemm_packed<SL_TYPE_Q8_0>>(stream, args);
    case SL_TYPE_IQ4_NL:
        return sl_gemm_launch<sl_gemm_packed<SL_TYPE_IQ4_NL>>(stream, args);
    case SL_TYPE_MXFP4:
        return sl_gemm_launch<sl_gemm_packed<SL_TYPE_MXFP4>>(stream, args);
    default:
        return -1;
    }
}
