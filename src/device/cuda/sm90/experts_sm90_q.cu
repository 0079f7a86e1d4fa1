/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of experts on compute capability 9.0: types with blocks of 32 weights.
 */
#include "device/cuda/sm90/experts_sm90.cuh"

int sl_experts_sm90_q(cudaStream_t stream, int type, const struct sl_experts_args *args,
                      const struct sl_cuda_props *props)
{
    switch (type) {
    case SL_TYPE_Q4_0:
        return sl_sm90_launch_experts<sl_sm90_packed<SL_TYPE_Q4_0>>(stream, args, props);
    case SL_TYPE_Q4_1:
        return sl_sm90_launch_experts<sl_sm90_packed<SL_TYPE_Q4_1>>(stream, args, props);
    case SL_TYPE_Q5_0:
        return sl_sm90_launch_experts<sl_sm90_packed<SL_TYPE_Q5_0>>(stream, args, props);
    case SL_TYPE_Q5_1:
        return sl_sm90_launch_experts<sl_sm90_packed<SL_TYPE_Q5_1>>(stream, args, props);
    case SL_TYPE_Q8_0:
        return sl_sm90_launch_experts<sl_sm90_packed<SL_TYPE_Q8_0>>(stream, args, props);
    case SL_TYPE_IQ4_NL:
        return sl_sm90_launch_experts<sl_sm90_packed<SL_TYPE_IQ4_NL>>(stream, args, props);
    case SL_TYPE_MXFP4:
        return sl_sm90_launch_experts<sl_sm90_packed<SL_TYPE_MXFP4>>(stream, args, props);
    default:
        return SL_CUDA_UNSUPPORTED;
    }
}
