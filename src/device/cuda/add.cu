/* SPDX-License-Identifier: Apache-2.0
 *
 * y += x: what another backend has computed of a shard joins the hidden state. x may lie in
 * page-locked host memory; it is then read once, straight over the bus.
 */
#include "device/cuda/common.cuh"

#define ADD_THREADS 256

template <typename V>
static __global__ void __launch_bounds__(ADD_THREADS) add_kernel(const V *x, V *y, int64_t n)
{
    const int64_t i = (int64_t)blockIdx.x * ADD_THREADS + threadIdx.x;
    if (i >= n) {
        return;
    }
    if constexpr (sizeof(V) == sizeof(float4)) {
        const float4 a = x[i];
        float4 b = y[i];
        b.x += a.x;
        b.y += a.y;
        b.z += a.z;
        b.w += a.w;
        y[i] = b;
    } else {
        y[i] += x[i];
    }
}

extern "C" int sl_cuda_add(cudaStream_t stream, const struct sl_op *op,
                           const struct sl_cuda_props *props)
{
    (void)props;
    const struct sl_op_add *p = &op->add;
    const int64_t n = op->n_tokens * p->n;
    const bool wide = n % 4 == 0 && sl_is_aligned(p->x, 16) && sl_is_aligned(p->y, 16);
    const int64_t n_blocks = sl_div_up(wide ? n / 4 : n, ADD_THREADS);
    if (n_blocks > INT32_MAX) {
        return SL_CUDA_UNSUPPORTED;
    }
    if (wide) {
        SL_QUEUE(add_kernel<float4>, (unsigned)n_blocks, ADD_THREADS, 0, stream,
                 (const float4 *)p->x, (float4 *)p->y, n / 4);
    } else {
        SL_QUEUE(add_kernel<float>, (unsigned)n_blocks, ADD_THREADS, 0, stream, p->x, p->y, n);
    }
    return sl_launch_result();
}
