/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrix times one or two vectors: weights that are not quantized. The kernels are in
 * linear_vecf.cuh.
 */
#include "device/cuda/linear_vecf.cuh"

int sl_linear_vec_f(cudaStream_t stream, int type, const struct sl_linear_args *args, int n_sm)
{
    (void)n_sm;
    switch (type) {
    case SL_TYPE_F32:
        return sl_vecf_dispatch<SL_TYPE_F32>(stream, args);
    case SL_TYPE_F16:
        return sl_vecf_dispatch<SL_TYPE_F16>(stream, args);
    case SL_TYPE_BF16:
        return sl_vecf_dispatch<SL_TYPE_BF16>(stream, args);
    default:
        return -1;
    }
}
