/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of experts, small tiles: types with blocks of 32 weights.
 * The kernels are in experts_mid.cuh.
 */
#include "device/cuda/experts_mid.cuh"

int sl_experts_mid_q(cudaStream_t stream, int type, const struct sl_experts_args *args)
{
    switch (type) {
    case SL_TYPE_Q4_0:
        return sl_experts_midq<SL_TYPE_Q4_0>(stream, args);
    case SL_TYPE_Q4_1:
        return sl_experts_midq<SL_TYPE_Q4_1>(stream, args);
    case SL_TYPE_Q5_0:
        return sl_experts_midq<SL_TYPE_Q5_0>(stream, args);
    case SL_TYPE_Q5_1:
        return sl_experts_midq<SL_TYPE_Q5_1>(stream, args);
    case SL_TYPE_Q8_0:
        return sl_experts_midq<SL_TYPE_Q8_0>(stream, args);
    case SL_TYPE_IQ4_NL:
        return sl_experts_midq<SL_TYPE_IQ4_NL>(stream, args);
    case SL_TYPE_MXFP4:
        return sl_experts_midq<SL_TYPE_MXFP4>(stream, args);
    default:
        return -1;
    }
}
