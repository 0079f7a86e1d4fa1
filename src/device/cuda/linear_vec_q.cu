/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrix times one to four vectors: types with blocks of 32 weights. The kernels are in
 * linear_vec_direct.cuh.
 */
#include "device/cuda/linear_vec_direct.cuh"

size_t sl_linear_vec_shared_bytes(int n_cols, int n_tokens)
{
    const size_t n = n_tokens > 2 ? 4 : (size_t)n_tokens;
    return n * ((size_t)sl_vec_x_stride(n_cols) + (size_t)n_cols / 32 * sizeof(struct sl_xblock));
}

int sl_linear_vec_q(cudaStream_t stream, int type, const struct sl_linear_args *args, int n_sm)
{
    switch (type) {
    case SL_TYPE_Q4_0:
        return sl_vec_direct_dispatch<SL_TYPE_Q4_0>(stream, args, n_sm);
    case SL_TYPE_Q4_1:
        return sl_vec_direct_dispatch<SL_TYPE_Q4_1>(stream, args, n_sm);
    case SL_TYPE_Q5_0:
        return sl_vec_direct_dispatch<SL_TYPE_Q5_0>(stream, args, n_sm);
    case SL_TYPE_Q5_1:
        return sl_vec_direct_dispatch<SL_TYPE_Q5_1>(stream, args, n_sm);
    case SL_TYPE_Q8_0:
        return sl_vec_direct_dispatch<SL_TYPE_Q8_0>(stream, args, n_sm);
    case SL_TYPE_IQ4_NL:
        return sl_vec_direct_dispatch<SL_TYPE_IQ4_NL>(stream, args, n_sm);
    case SL_TYPE_MXFP4:
        return sl_vec_direct_dispatch<SL_TYPE_MXFP4>(stream, args, n_sm);
    default:
        return -1;
    }
}
