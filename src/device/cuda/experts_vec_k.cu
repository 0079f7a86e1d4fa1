/* SPDX-License-Identifier: Apache-2.0
 *
 * Experts of a few tokens as vector products: types with blocks of 256 weights. The kernels are in
 * experts_vec.cuh.
 */
#include "device/cuda/experts_vec.cuh"

int sl_experts_vec_up_k(cudaStream_t stream, int type, struct sl_experts_vec_args *args,
                        const struct sl_cuda_props *props)
{
    switch (type) {
    case SL_TYPE_Q2_K:
        return sl_experts_vec_up<SL_TYPE_Q2_K>(stream, args, props);
    case SL_TYPE_Q3_K:
        return sl_experts_vec_up<SL_TYPE_Q3_K>(stream, args, props);
    case SL_TYPE_Q4_K:
        return sl_experts_vec_up<SL_TYPE_Q4_K>(stream, args, props);
    case SL_TYPE_Q5_K:
        return sl_experts_vec_up<SL_TYPE_Q5_K>(stream, args, props);
    case SL_TYPE_Q6_K:
        return sl_experts_vec_up<SL_TYPE_Q6_K>(stream, args, props);
    case SL_TYPE_IQ4_XS:
        return sl_experts_vec_up<SL_TYPE_IQ4_XS>(stream, args, props);
    default:
        return SL_CUDA_UNSUPPORTED;
    }
}

int sl_experts_vec_down_k(cudaStream_t stream, int type, struct sl_experts_vec_args *args,
                          const struct sl_cuda_props *props)
{
    switch (type) {
    case SL_TYPE_Q2_K:
        return sl_experts_vec_down<SL_TYPE_Q2_K>(stream, args, props);
    case SL_TYPE_Q3_K:
        return sl_experts_vec_down<SL_TYPE_Q3_K>(stream, args, props);
    case SL_TYPE_Q4_K:
        return sl_experts_vec_down<SL_TYPE_Q4_K>(stream, args, props);
    case SL_TYPE_Q5_K:
        return sl_experts_vec_down<SL_TYPE_Q5_K>(stream, args, props);
    case SL_TYPE_Q6_K:
        return sl_experts_vec_down<SL_TYPE_Q6_K>(stream, args, props);
    case SL_TYPE_IQ4_XS:
        return sl_experts_vec_down<SL_TYPE_IQ4_XS>(stream, args, props);
    default:
        return SL_CUDA_UNSUPPORTED;
    }
}
