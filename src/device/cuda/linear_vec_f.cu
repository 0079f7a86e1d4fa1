/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrix times one vector: weights that are not quantized (linear_vec_float.cuh). Several vectors
 * in float throughout: few by the kernel of linear_vecf.cuh, which also takes rows that do not
 * allow 16-byte accesses, many by that of linear_float.cuh.
 */
#include "device/cuda/linear_float.cuh"
#include "device/cuda/linear_vec_float.cuh"

#define FLOAT_MIN_TOKENS 320 /* fewer take longer that way */

template <class FORM>
static bool has_room(const struct sl_linear_args *args, const struct sl_cuda_props *props)
{
    const size_t bytes = sl_vec_shared_bytes<FORM>(args, props);
    return bytes > 0 && bytes <= props->max_shared_bytes;
}

bool sl_linear_vec_f_streams(int type, const struct sl_linear_args *args,
                             const struct sl_cuda_props *props)
{
    bool wide = args->n_tokens == 1 && args->row_bytes % 16 == 0;
    for (int i = 0; i < args->n_parts; i++) {
        wide = wide && ((uintptr_t)args->part[i].w & 15) == 0;
    }
    return wide && (type == SL_TYPE_F32 ? has_room<sl_vec_floats<SL_TYPE_F32>>(args, props)
                                        : has_room<sl_vec_floats<SL_TYPE_F16>>(args, props));
}

template <int TYPE>
static int vecf_dispatch(cudaStream_t stream, const struct sl_linear_args *args,
                         const struct sl_cuda_props *props)
{
    if (sl_linear_vec_f_streams(TYPE, args, props)) {
        return sl_vec_launch<sl_vec_floats<TYPE>>(stream, args, props);
    }
    return args->n_tokens >= FLOAT_MIN_TOKENS && sl_float_takes(args)
               ? sl_float_dispatch<TYPE>(stream, args, props)
               : sl_vecf_dispatch<TYPE>(stream, args);
}

int sl_linear_vec_f(cudaStream_t stream, int type, const struct sl_linear_args *args,
                    const struct sl_cuda_props *props)
{
    switch (type) {
    case SL_TYPE_F32:
        return vecf_dispatch<SL_TYPE_F32>(stream, args, props);
    case SL_TYPE_F16:
        return vecf_dispatch<SL_TYPE_F16>(stream, args, props);
    case SL_TYPE_BF16:
        return vecf_dispatch<SL_TYPE_BF16>(stream, args, props);
    default:
        return SL_CUDA_UNSUPPORTED;
    }
}
