/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of few tokens: weights that are not quantized. The kernels are in linear_mid.cuh.
 */
#include "device/cuda/linear_mid.cuh"

int sl_linear_mid_f(cudaStream_t stream, int type, const struct sl_linear_args *args, bool narrow,
                    const struct sl_cuda_props *props)
{
    switch (type) {
    case SL_TYPE_F16:
        return sl_mid_dispatch<SL_TYPE_F16>(stream, args, narrow, props);
    case SL_TYPE_BF16:
        return sl_mid_dispatch<SL_TYPE_BF16>(stream, args, narrow, props);
    default:
        return -1;
    }
}
