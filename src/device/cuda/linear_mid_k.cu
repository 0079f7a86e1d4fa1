/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of few tokens: types with blocks of 256 weights. The kernels are in linear_mid.cuh.
 */
#include "device/cuda/linear_mid.cuh"
#include "device/cuda/linear_unpack_k.cuh"

int sl_linear_mid_k(cudaStream_t stream, int type, const struct sl_linear_args *args, bool narrow,
                    const struct sl_cuda_props *props)
{
    switch (type) {
    case SL_TYPE_Q2_K:
        return sl_mid_dispatch<SL_TYPE_Q2_K>(stream, args, narrow, props);
    case SL_TYPE_Q3_K:
        return sl_mid_dispatch<SL_TYPE_Q3_K>(stream, args, narrow, props);
    case SL_TYPE_Q4_K:
        return sl_mid_dispatch<SL_TYPE_Q4_K>(stream, args, narrow, props);
    case SL_TYPE_Q5_K:
        return sl_mid_dispatch<SL_TYPE_Q5_K>(stream, args, narrow, props);
    case SL_TYPE_Q6_K:
        return sl_mid_dispatch<SL_TYPE_Q6_K>(stream, args, narrow, props);
    case SL_TYPE_IQ4_XS:
        return sl_mid_dispatch<SL_TYPE_IQ4_XS>(stream, args, narrow, props);
    default:
        return -1;
    }
}
