/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrix times one to four vectors: types with blocks of 32 weights. The kernels are in
 * linear_vec_direct.cuh.
 */
#include "device/cuda/linear_vec_direct.cuh"

bool sl_linear_vec_fits(const struct sl_linear_args *args, const struct sl_cuda_props *props)
{
    /* The types with the fewest warps, which allow the least: longer rows, more pieces of them. */
    const size_t bytes =
        args->n_tokens == 1   ? sl_vec_shared_bytes<sl_vec_packed<SL_TYPE_Q8_0, 1>>(args, props)
        : args->n_tokens == 2 ? sl_vec_shared_bytes<sl_vec_packed<SL_TYPE_Q8_0, 2>>(args, props)
                              : sl_vec_shared_bytes<sl_vec_packed<SL_TYPE_Q8_0, 4>>(args, props);
    return args->n_tokens <= 4 && bytes > 0 && bytes <= props->max_shared_bytes;
}

int sl_linear_vec_q(cudaStream_t stream, int type, const struct sl_linear_args *args,
                    const struct sl_cuda_props *props)
{
    switch (type) {
    case SL_TYPE_Q4_0:
        return sl_vec_dispatch<SL_TYPE_Q4_0>(stream, args, props);
    case SL_TYPE_Q4_1:
        return sl_vec_dispatch<SL_TYPE_Q4_1>(stream, args, props);
    case SL_TYPE_Q5_0:
        return sl_vec_dispatch<SL_TYPE_Q5_0>(stream, args, props);
    case SL_TYPE_Q5_1:
        return sl_vec_dispatch<SL_TYPE_Q5_1>(stream, args, props);
    case SL_TYPE_Q8_0:
        return sl_vec_dispatch<SL_TYPE_Q8_0>(stream, args, props);
    case SL_TYPE_IQ4_NL:
        return sl_vec_dispatch<SL_TYPE_IQ4_NL>(stream, args, props);
    case SL_TYPE_MXFP4:
        return sl_vec_dispatch<SL_TYPE_MXFP4>(stream, args, props);
    default:
        return SL_CUDA_UNSUPPORTED;
    }
}
