/* SPDX-License-Identifier: Apache-2.0
 *
 * y = (e^y_lse y + e^x_lse x) / (e^y_lse + e^x_lse): attention over other positions, which another
 * backend has computed, joins what is here. x and x_lse may lie in page-locked host memory; they
 * are then read once, straight over the bus. A thread takes four elements of a row.
 */
#include "device/cuda/common.cuh"
#include "device/cuda/launch.cuh"

#define MERGE_THREADS 256

struct side_args {
    const float *x, *x_lse, *y_lse;
    float *y;
    uint32_t per_row; /* pieces of a row: what a thread takes */
    uint32_t n;
};

template <typename V>
static __global__ void __launch_bounds__(MERGE_THREADS) merge_sides_kernel(const side_args a)
{
    const uint32_t i = blockIdx.x * MERGE_THREADS + threadIdx.x;
    sl_let_follow();
    sl_await_ahead();
    if (i >= a.n) {
        return;
    }
    const uint32_t row = i / a.per_row;
    const float y_lse = a.y_lse[row], x_lse = a.x_lse[row];
    const float max = fmaxf(y_lse, x_lse);
    float y_weight = 0.0f, x_weight = 0.0f;
    if (max > -INFINITY) { /* else nobody has seen anything */
        y_weight = expf(y_lse - max);
        x_weight = expf(x_lse - max);
        const float scale = 1.0f / (y_weight + x_weight);
        y_weight *= scale;
        x_weight *= scale;
    }
    V *to = reinterpret_cast<V *>(a.y) + i;
    const V x = reinterpret_cast<const V *>(a.x)[i];
    V y = *to;
    if constexpr (sizeof(V) == sizeof(float4)) {
        y.x = fmaf(x.x, x_weight, y.x * y_weight);
        y.y = fmaf(x.y, x_weight, y.y * y_weight);
        y.z = fmaf(x.z, x_weight, y.z * y_weight);
        y.w = fmaf(x.w, x_weight, y.w * y_weight);
    } else {
        y = fmaf(x, x_weight, y * y_weight);
    }
    *to = y;
}

extern "C" int sl_cuda_merge(cudaStream_t stream, const struct sl_op *op,
                             const struct sl_cuda_props *props)
{
    const struct sl_op_merge *p = &op->merge;
    const bool wide = sl_is_aligned(p->x, 16) && sl_is_aligned(p->y, 16);
    side_args a;
    a.x = p->x;
    a.x_lse = p->x_lse;
    a.y_lse = p->y_lse;
    a.y = p->y;
    a.per_row = (uint32_t)(wide ? p->head_dim / 4 : p->head_dim);
    const int64_t n = (int64_t)op->n_tokens * p->n_heads * a.per_row;
    if (n > INT32_MAX) {
        return SL_CUDA_UNSUPPORTED;
    }
    a.n = (uint32_t)n;
    const unsigned n_blocks = (unsigned)sl_div_up(n, MERGE_THREADS);
    return wide
               ? SL_FOLLOW(merge_sides_kernel<float4>, n_blocks, MERGE_THREADS, 0, stream, props, a)
               : SL_FOLLOW(merge_sides_kernel<float>, n_blocks, MERGE_THREADS, 0, stream, props, a);
}
