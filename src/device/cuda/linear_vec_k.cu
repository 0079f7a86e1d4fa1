/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrix times one to four vectors: types with blocks of 256 weights. The kernels are in
 * linear_vec_direct.cuh.
 */
#include "device/cuda/linear_vec_direct.cuh"

int sl_linear_vec_k(cudaStream_t stream, int type, const struct sl_linear_args *args,
                    const struct sl_cuda_props *props)
{
    switch (type) {
    case SL_TYPE_Q2_K:
        return sl_vec_dispatch<SL_TYPE_Q2_K>(stream, args, props);
    case SL_TYPE_Q3_K:
        return sl_vec_dispatch<SL_TYPE_Q3_K>(stream, args, props);
    case SL_TYPE_Q4_K:
        return sl_vec_dispatch<SL_TYPE_Q4_K>(stream, args, props);
    case SL_TYPE_Q5_K:
        return sl_vec_dispatch<SL_TYPE_Q5_K>(stream, args, props);
    case SL_TYPE_Q6_K:
        return sl_vec_dispatch<SL_TYPE_Q6_K>(stream, args, props);
    case SL_TYPE_IQ4_XS:
        return sl_vec_dispatch<SL_TYPE_IQ4_XS>(stream, args, props);
    default:
        return SL_CUDA_UNSUPPORTED;
    }
}
