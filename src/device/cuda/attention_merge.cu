/* SPDX-License-Identifier: Apache-2.0
 *
 * The end of a split attention: put the parts of the ranges of positions together, exactly.
 *
 *   y = sum_i 2^(max_i - max) values_i / (sum_i 2^(max_i - max) sum_i + 2^(sink - max))
 *
 * A block takes one row (token and head). Its threads are head_dim / 4 columns of four floats times
 * as many groups as fit; each group adds every so-manieth range, so that all loads of a row are
 * in flight at once.
 */
#include "device/cuda/attention_args.cuh"

#define MERGE_THREADS 256

/* Weight of every range in the output, the final scale included. By the first warp. */
static __device__ void find_weights(const sl_attn_args &a, int64_t row, int64_t n_rows,
                                    float *weights)
{
    const int lane = threadIdx.x;
    constexpr int per_lane = SL_ATTN_MAX_SPLITS / SL_WARP;
    float2 part[per_lane];
    float max = -INFINITY;
#pragma unroll
    for (int i = 0; i < per_lane; i++) {
        const int split = lane + i * SL_WARP;
        part[i] = split < a.n_splits ? a.part_max_sum[split * n_rows + row]
                                     : make_float2(-INFINITY, 0.0f);
        max = fmaxf(max, part[i].x);
    }
    max = sl_warp_max(max);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < per_lane; i++) {
        part[i].x = part[i].y > 0.0f ? sl_exp2(part[i].x - max) : 0.0f;
        sum += part[i].x * part[i].y;
    }
    sum = sl_warp_sum(sum);
    const float scale = sl_attn_output_scale(a, row, (int)(row % a.n_heads), max, sum, lane == 0);
#pragma unroll
    for (int i = 0; i < per_lane; i++) {
        weights[lane + i * SL_WARP] = part[i].x * scale;
    }
}

static __global__ void __launch_bounds__(MERGE_THREADS) merge_kernel(const sl_attn_args a)
{
    __shared__ float weights[SL_ATTN_MAX_SPLITS];
    __shared__ float4 sums[MERGE_THREADS];
    sl_let_follow();
    sl_await_ahead();
    const int64_t row = blockIdx.x;
    const int64_t n_rows = gridDim.x;
    if (threadIdx.x < SL_WARP) {
        find_weights(a, row, n_rows, weights);
    }
    __syncthreads();

    const int n_columns = a.head_dim / 4;
    const int n_groups = MERGE_THREADS / n_columns;
    const int column = threadIdx.x % n_columns;
    const int group = threadIdx.x / n_columns;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (group < n_groups) {
        const float4 *values = reinterpret_cast<const float4 *>(a.part_values);
#pragma unroll 4
        for (int split = group; split < a.n_splits; split += n_groups) {
            const float weight = weights[split];
            if (weight != 0.0f) { /* a range without positions has written no values */
                const float4 v = values[(split * n_rows + row) * n_columns + column];
                sum.x = fmaf(v.x, weight, sum.x);
                sum.y = fmaf(v.y, weight, sum.y);
                sum.z = fmaf(v.z, weight, sum.z);
                sum.w = fmaf(v.w, weight, sum.w);
            }
        }
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (group == 0) {
        for (int i = 1; i < n_groups; i++) {
            const float4 v = sums[i * n_columns + column];
            sum.x += v.x;
            sum.y += v.y;
            sum.z += v.z;
            sum.w += v.w;
        }
        reinterpret_cast<float4 *>(a.y)[row * n_columns + column] = sum;
    }
}

int sl_cuda_attention_merge(cudaStream_t stream, const sl_attn_args *args,
                            const struct sl_cuda_props *props)
{
    const int64_t n_rows = (int64_t)args->n_tokens * args->n_heads;
    if (n_rows > INT32_MAX) {
        return SL_CUDA_UNSUPPORTED;
    }
    return SL_FOLLOW(merge_kernel, (unsigned)n_rows, MERGE_THREADS, 0, stream, props, *args);
}
