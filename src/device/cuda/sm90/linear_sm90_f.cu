/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of many tokens on compute capability 9.0: weights that are not quantized.
 */
#include "device/cuda/sm90/linear_sm90.cuh"

int sl_linear_sm90_f(cudaStream_t stream, int type, const struct sl_linear_args *args,
                     const struct sl_cuda_props *props)
{
    switch (type) {
    case SL_TYPE_F16:
        return sl_sm90_linear_of<sl_sm90_direct<SL_TYPE_F16>>(stream, args, props);
    case SL_TYPE_BF16:
        return sl_sm90_linear_of<sl_sm90_direct<SL_TYPE_BF16>>(stream, args, props);
    default:
        return SL_CUDA_UNSUPPORTED;
    }
}
