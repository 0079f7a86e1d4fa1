/* SPDX-License-Identifier: Apache-2.0
 *
 * Experts of a few tokens as vector products: types with blocks of 32 weights. The kernels are in
 * experts_vec.cuh.
 */
#include "device/cuda/experts_vec.cuh"

int sl_experts_vec_up_q(cudaStream_t stream, int type, struct sl_experts_vec_args *args,
                        const struct sl_cuda_props *props)
{
    switch (type) {
    case SL_TYPE_Q4_0:
        return sl_experts_vec_up<SL_TYPE_Q4_0>(stream, args, props);
    case SL_TYPE_Q4_1:
        return sl_experts_vec_up<SL_TYPE_Q4_1>(stream, args, props);
    case SL_TYPE_Q5_0:
        return sl_experts_vec_up<SL_TYPE_Q5_0>(stream, args, props);
    case SL_TYPE_Q5_1:
        return sl_experts_vec_up<SL_TYPE_Q5_1>(stream, args, props);
    case SL_TYPE_Q8_0:
        return sl_experts_vec_up<SL_TYPE_Q8_0>(stream, args, props);
    case SL_TYPE_IQ4_NL:
        return sl_experts_vec_up<SL_TYPE_IQ4_NL>(stream, args, props);
    case SL_TYPE_MXFP4:
        return sl_experts_vec_up<SL_TYPE_MXFP4>(stream, args, props);
    default:
        return SL_CUDA_UNSUPPORTED;
    }
}

int sl_experts_vec_down_q(cudaStream_t stream, int type, struct sl_experts_vec_args *args,
                          const struct sl_cuda_props *props)
{
    switch (type) {
    case SL_TYPE_Q4_0:
        return sl_experts_vec_down<SL_TYPE_Q4_0>(stream, args, props);
    case SL_TYPE_Q4_1:
        return sl_experts_vec_down<SL_TYPE_Q4_1>(stream, args, props);
    case SL_TYPE_Q5_0:
        return sl_experts_vec_down<SL_TYPE_Q5_0>(stream, args, props);
    case SL_TYPE_Q5_1:
        return sl_experts_vec_down<SL_TYPE_Q5_1>(stream, args, props);
    case SL_TYPE_Q8_0:
        return sl_experts_vec_down<SL_TYPE_Q8_0>(stream, args, props);
    case SL_TYPE_IQ4_NL:
        return sl_experts_vec_down<SL_TYPE_IQ4_NL>(stream, args, props);
    case SL_TYPE_MXFP4:
        return sl_experts_vec_down<SL_TYPE_MXFP4>(stream, args, props);
    default:
        return SL_CUDA_UNSUPPORTED;
    }
}
