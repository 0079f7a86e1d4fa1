/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of many tokens on compute capability 9.0: types with blocks of 32 weights.
 */
#include "device/cuda/sm90/linear_sm90.cuh"

template <int TYPE>
static int launch(cudaStream_t stream, const struct sl_linear_args *args,
                  const struct sl_cuda_props *props)
{
    return sl_sm90_linear_of<sl_sm90_packed<TYPE>>(stream, args, props);
}

int sl_linear_sm90_q(cudaStream_t stream, int type, const struct sl_linear_args *args,
                     const struct sl_cuda_props *props)
{
    switch (type) {
    case SL_TYPE_Q4_0:
        return launch<SL_TYPE_Q4_0>(stream, args, props);
    case SL_TYPE_Q4_1:
        return launch<SL_TYPE_Q4_1>(stream, args, props);
    case SL_TYPE_Q5_0:
        return launch<SL_TYPE_Q5_0>(stream, args, props);
    case SL_TYPE_Q5_1:
        return launch<SL_TYPE_Q5_1>(stream, args, props);
    case SL_TYPE_Q8_0:
        return launch<SL_TYPE_Q8_0>(stream, args, props);
    case SL_TYPE_IQ4_NL:
        return launch<SL_TYPE_IQ4_NL>(stream, args, props);
    case SL_TYPE_MXFP4:
        return launch<SL_TYPE_MXFP4>(stream, args, props);
    default:
        return SL_CUDA_UNSUPPORTED;
    }
}
