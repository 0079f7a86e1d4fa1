/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of experts on compute capability 9.0: types with blocks of 256 weights.
 */
#include "device/cuda/linear_unpack_k.cuh"
#include "device/cuda/sm90/experts_sm90.cuh"

int sl_experts_sm90_k(cudaStream_t stream, int type, const struct sl_experts_args *args,
                      const struct sl_cuda_props *props)
{
    switch (type) {
    case SL_TYPE_Q2_K:
        return sl_sm90_launch_experts<sl_sm90_packed<SL_TYPE_Q2_K>>(stream, args, props);
    case SL_TYPE_Q3_K:
        return sl_sm90_launch_experts<sl_sm90_packed<SL_TYPE_Q3_K>>(stream, args, props);
    case SL_TYPE_Q4_K:
        return sl_sm90_launch_experts<sl_sm90_packed<SL_TYPE_Q4_K>>(stream, args, props);
    case SL_TYPE_Q5_K:
        return sl_sm90_launch_experts<sl_sm90_packed<SL_TYPE_Q5_K>>(stream, args, props);
    case SL_TYPE_Q6_K:
        return sl_sm90_launch_experts<sl_sm90_packed<SL_TYPE_Q6_K>>(stream, args, props);
    case SL_TYPE_IQ4_XS:
        return sl_sm90_launch_experts<sl_sm90_packed<SL_TYPE_IQ4_XS>>(stream, args, props);
    default:
        return SL_CUDA_UNSUPPORTED;
    }
}
