/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of few tokens: weights that are not quantized. The kernels are in linear_mid.cuh.
 */
#include "device/cuda/linear_mid.cuh"

int sl_linear_mid_f(cudaStream_t stream, int type, const struct sl_linear_args *args)
{
    switch (type) {
    case SL_TYPE_F16:
        return sl_midh_dispatch<SL_TYPE_F16>(stream, args);
    case SL_TYPE_BF16:
        return sl_midh_dispatch<SL_TYPE_BF16>(stream, args);
    default:
        return -1;
    }
}
