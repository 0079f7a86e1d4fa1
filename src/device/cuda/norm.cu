/* SPDX-License-Identifier: Apache-2.0
 *
 * Root-mean-square norm: y = x * rsqrt(mean(x^2) + eps) * weight over rows of n floats.
 *
 * Short rows (the heads of q/k norms) take one warp each, eight to a block; long rows take a block
 * each. The row is read once, 16 bytes a thread, and kept in registers between the sum and the
 * scaling; only rows longer than a block can hold are read twice. Rows that do not allow 16-byte
 * accesses use the same kernels, element by element.
 */
#include "device/cuda/common.cuh"
#include "device/cuda/launch.cuh"

#define WARP_ROWS 8     /* rows of a block when a warp takes one */
#define WARP_MAX_N 1024 /* longest row that a warp takes */
#define KEEP 8          /* vectors that a thread keeps in registers */

struct norm_args {
    const float *x;
    const float *weight;
    float *y;
    int64_t n_rows;
    int n;
    float eps;
};

/* A vector of W floats with the few operations that the kernels need. */
template <int W> struct vec {
    float v[W];
};

template <int W> static __device__ __forceinline__ vec<W> load(const float *p)
{
    vec<W> r;
    if constexpr (W == 4) {
        const float4 t = *reinterpret_cast<const float4 *>(p);
        r.v[0] = t.x;
        r.v[1] = t.y;
        r.v[2] = t.z;
        r.v[3] = t.w;
    } else {
        r.v[0] = *p;
    }
    return r;
}

template <int W> static __device__ __forceinline__ void store(float *p, const vec<W> &r)
{
    if constexpr (W == 4) {
        *reinterpret_cast<float4 *>(p) = make_float4(r.v[0], r.v[1], r.v[2], r.v[3]);
    } else {
        *p = r.v[0];
    }
}

template <int W> static __device__ __forceinline__ float sum_of_squares(const vec<W> &r)
{
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < W; i++) {
        sum = fmaf(r.v[i], r.v[i], sum);
    }
    return sum;
}

template <int W, bool ACCUMULATE>
static __device__ __forceinline__ void write_scaled(const norm_args &a, float *y, int at,
                                                    const vec<W> &x, float scale)
{
    vec<W> r;
#pragma unroll
    for (int i = 0; i < W; i++) {
        r.v[i] = x.v[i] * scale;
    }
    if (a.weight != nullptr) {
        const vec<W> w = load<W>(a.weight + at);
#pragma unroll
        for (int i = 0; i < W; i++) {
            r.v[i] *= w.v[i];
        }
    }
    if constexpr (ACCUMULATE) {
        const vec<W> old = load<W>(y + at);
#pragma unroll
        for (int i = 0; i < W; i++) {
            r.v[i] += old.v[i];
        }
    }
    store<W>(y + at, r);
}

/* Sum over the threads that share a row: a warp, or the whole block. */
template <bool WARP_ROW> static __device__ __forceinline__ float row_sum(float v)
{
    v = sl_warp_sum(v);
    if constexpr (!WARP_ROW) {
        __shared__ float part[SL_WARP];
        const int lane = threadIdx.x % SL_WARP;
        const int warp = threadIdx.x / SL_WARP;
        if (lane == 0) {
            part[warp] = v;
        }
        __syncthreads();
        v = lane < (int)blockDim.x / SL_WARP ? part[lane] : 0.0f;
        v = sl_warp_sum(v);
    }
    return v;
}

/* `x` and `y` may be the same memory: each element is read and written by one thread alone. */
template <int W, bool ACCUMULATE, bool WARP_ROW>
static __global__ void __launch_bounds__(WARP_ROW ? WARP_ROWS *SL_WARP : 1024)
    norm_kernel(const norm_args a)
{
    const int n_threads = WARP_ROW ? SL_WARP : (int)blockDim.x;
    const int thread = WARP_ROW ? (int)threadIdx.x % SL_WARP : (int)threadIdx.x;
    const int64_t row =
        WARP_ROW ? (int64_t)blockIdx.x * WARP_ROWS + threadIdx.x / SL_WARP : (int64_t)blockIdx.x;
    sl_let_follow();
    sl_await_ahead();
    if (row >= a.n_rows) {
        return; /* whole warps only: row is the same for all lanes */
    }
    const float *x = a.x + row * a.n;
    float *y = a.y + row * a.n;
    const int n_vecs = a.n / W;

    vec<W> kept[KEEP];
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < KEEP; i++) {
        const int at = thread + i * n_threads;
        if (at < n_vecs) {
            kept[i] = load<W>(x + at * W);
            sum += sum_of_squares<W>(kept[i]);
        }
    }
    for (int at = thread + KEEP * n_threads; at < n_vecs; at += n_threads) {
        sum += sum_of_squares<W>(load<W>(x + at * W));
    }
    sum = row_sum<WARP_ROW>(sum);
    const float scale = 1.0f / sqrtf(sum / (float)a.n + a.eps);

#pragma unroll
    for (int i = 0; i < KEEP; i++) {
        const int at = thread + i * n_threads;
        if (at < n_vecs) {
            write_scaled<W, ACCUMULATE>(a, y, at * W, kept[i], scale);
        }
    }
    for (int at = thread + KEEP * n_threads; at < n_vecs; at += n_threads) {
        write_scaled<W, ACCUMULATE>(a, y, at * W, load<W>(x + at * W), scale);
    }
}

/* Threads of a block that takes one row: few rows want the shortest time for each, many rows want
 * many blocks on a multiprocessor. */
static int block_threads(int n_vecs, int64_t n_rows, int n_sm)
{
    const int most = n_rows <= 2 * (int64_t)n_sm ? 1024 : 256;
    const int wanted = (int)sl_div_up(n_vecs, SL_WARP) * SL_WARP;
    return wanted < most ? wanted : most;
}

template <int W, bool ACCUMULATE>
static int launch_norm(cudaStream_t stream, const norm_args &a, const struct sl_cuda_props *props)
{
    const int64_t n_blocks =
        a.n <= WARP_MAX_N && a.n_rows > 1 ? sl_div_up(a.n_rows, WARP_ROWS) : a.n_rows;
    if (n_blocks > INT32_MAX) {
        return SL_CUDA_UNSUPPORTED;
    }
    if (n_blocks != a.n_rows) {
        return SL_FOLLOW((norm_kernel<W, ACCUMULATE, true>), (unsigned)n_blocks,
                         WARP_ROWS * SL_WARP, 0, stream, props, a);
    }
    const int threads = block_threads(a.n / W, a.n_rows, props->n_sm);
    return SL_FOLLOW((norm_kernel<W, ACCUMULATE, false>), (unsigned)n_blocks, (unsigned)threads, 0,
                     stream, props, a);
}

extern "C" int sl_cuda_norm(cudaStream_t stream, const struct sl_op *op,
                            const struct sl_cuda_props *props)
{
    const struct sl_op_norm *p = &op->norm;
    const norm_args a = {p->x, p->weight, p->y, (int64_t)op->n_tokens * p->rows_per_token,
                         p->n, p->eps};
    const bool wide = p->n % 4 == 0 && sl_is_aligned(p->x, 16) && sl_is_aligned(p->y, 16) &&
                      (p->weight == nullptr || sl_is_aligned(p->weight, 16));
    if (wide) {
        return p->accumulate ? launch_norm<4, true>(stream, a, props)
                             : launch_norm<4, false>(stream, a, props);
    }
    return p->accumulate ? launch_norm<1, true>(stream, a, props)
                         : launch_norm<1, false>(stream, a, props);
}

#ifndef SL_CUDA_EMULATE
extern "C" int sl_cuda_has_code(void)
{
    struct cudaFuncAttributes attributes;
    const cudaError_t code =
        cudaFuncGetAttributes(&attributes, (const void *)norm_kernel<4, false, false>);
    cudaGetLastError();
    return (int)code;
}
#endif
