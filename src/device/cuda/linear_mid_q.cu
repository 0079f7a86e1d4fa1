/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of few tokens: types with blocks of 32 weights. The kernels are in linear_mid.cuh.
 */
#include "device/cuda/linear_mid.cuh"

int sl_linear_mid_q(cudaStream_t stream, int type, const struct sl_linear_args *args, bool narrow,
                    const struct sl_cuda_props *props)
{
    switch (type) {
    case SL_TYPE_Q4_0:
        return sl_mid_dispatch<SL_TYPE_Q4_0>(stream, args, narrow, props);
    case SL_TYPE_Q4_1:
        return sl_mid_dispatch<SL_TYPE_Q4_1>(stream, args, narrow, props);
    case SL_TYPE_Q5_0:
        return sl_mid_dispatch<SL_TYPE_Q5_0>(stream, args, narrow, props);
    case SL_TYPE_Q5_1:
        return sl_mid_dispatch<SL_TYPE_Q5_1>(stream, args, narrow, props);
    case SL_TYPE_Q8_0:
        return sl_mid_dispatch<SL_TYPE_Q8_0>(stream, args, narrow, props);
    case SL_TYPE_IQ4_NL:
        return sl_mid_dispatch<SL_TYPE_IQ4_NL>(stream, args, narrow, props);
    case SL_TYPE_MXFP4:
        return sl_mid_dispatch<SL_TYPE_MXFP4>(stream, args, narrow, props);
    default:
        return -1;
    }
}
