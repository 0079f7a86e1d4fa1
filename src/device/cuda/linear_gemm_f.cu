/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of many tokens: weights that are not quantized. The kernels are in linear_gemm.cuh.
 */
#include "device/cuda/linear_gemm.cuh"

int sl_linear_gemm_f(cudaStream_t stream, int type, const struct sl_linear_args *args)
{
    switch (type) {
    case SL_TYPE_F16:
        return sl_gemm_launch<sl_gemm_direct<SL_TYPE_F16>>(stream, args);
    case SL_TYPE_BF16:
        return sl_gemm_launch<sl_gemm_direct<SL_TYPE_BF16>>(stream, args);
    default:
        return -1;
    }
}
