/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of attention share: the arguments of its kernels, the launchers behind one
 * another, and how a row of sums becomes output. The method is described in attention.cuh.
 */
#ifndef SL_DEVICE_CUDA_ATTENTION_ARGS_CUH
#define SL_DEVICE_CUDA_ATTENTION_ARGS_CUH

#include "device/cuda/kv.cuh"
#include "device/cuda/launch.cuh"
#include "device/cuda/mma.cuh"

#define SL_LN2 0.6931471805599453f

struct sl_attn_args {
    const float *q;
    float *y;
    const int32_t *pos;
    const int32_t *seq;   /* or null: all 0 */
    const float *sinks;   /* or null */
    float *lse;           /* or null */
    float *part_values;   /* [n_splits, n_tokens * n_heads, head_dim] */
    float2 *part_max_sum; /* [n_splits, n_tokens * n_heads] */
    sl_cuda_kv kv;
    int n_tokens;
    int n_heads;
    int head_dim;
    int group;    /* query heads of a KV head */
    int n_kv_max; /* no block behind it is here */
    int window;
    int n_splits;
    float q_scale;
    float cap_log2;          /* soft-cap times log2(e); 0: none */
    enum sl_type kv_type[2]; /* keys, values */
};

/* attention_decode.cu, attention_prefill.cu: fill in n_splits (at most max_splits) and launch. */
int sl_cuda_attention_decode(cudaStream_t stream, sl_attn_args *args, int max_splits,
                             const struct sl_cuda_props *props);
int sl_cuda_attention_prefill(cudaStream_t stream, sl_attn_args *args, int max_splits,
                              const struct sl_cuda_props *props);
/* attention_merge.cu */
int sl_cuda_attention_merge(cudaStream_t stream, const sl_attn_args *args,
                            const struct sl_cuda_props *props);

/* What the weighted values of a row are multiplied by in the end. `sum` belongs to maximum `max`
 * (log2 units); a sink adds to the sum alone. One thread of the row also writes its lse. */
static __device__ __forceinline__ float sl_attn_output_scale(const sl_attn_args &a, int64_t row,
                                                             int head, float max, float sum,
                                                             bool writer)
{
    float factor = 1.0f;
    if (a.sinks != nullptr) {
        const float sink = a.sinks[head] * SL_LOG2E;
        const float new_max = fmaxf(max, sink);
        if (new_max > -INFINITY) {
            factor = sl_exp2(max - new_max);
            sum = sum * factor + sl_exp2(sink - new_max);
            max = new_max;
        }
    }
    if (a.lse != nullptr && writer) {
        a.lse[row] = sum > 0.0f ? (max + log2f(sum)) * SL_LN2 : -INFINITY;
    }
    return sum > 0.0f ? factor / sum : 0.0f;
}

#endif
