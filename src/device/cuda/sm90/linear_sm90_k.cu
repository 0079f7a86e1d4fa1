/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of many tokens on compute capability 9.0: types with blocks of 256 weights.
 */
#include "device/cuda/linear_unpack_k.cuh"
#include "device/cuda/sm90/linear_sm90.cuh"

template <int TYPE>
static int launch(cudaStream_t stream, const struct sl_linear_args *args,
                  const struct sl_cuda_props *props)
{
    return sl_sm90_linear_of<sl_sm90_packed<TYPE>>(stream, args, props);
}

int sl_linear_sm90_k(cudaStream_t stream, int type, const struct sl_linear_args *args,
                     const struct sl_cuda_props *props)
{
    switch (type) {
    case SL_TYPE_Q2_K:
        return launch<SL_TYPE_Q2_K>(stream, args, props);
    case SL_TYPE_Q3_K:
        return launch<SL_TYPE_Q3_K>(stream, args, props);
    case SL_TYPE_Q4_K:
        return launch<SL_TYPE_Q4_K>(stream, args, props);
    case SL_TYPE_Q5_K:
        return launch<SL_TYPE_Q5_K>(stream, args, props);
    case SL_TYPE_Q6_K:
        return launch<SL_TYPE_Q6_K>(stream, args, props);
    case SL_TYPE_IQ4_XS:
        return launch<SL_TYPE_IQ4_XS>(stream, args, props);
    default:
        return SL_CUDA_UNSUPPORTED;
    }
}
