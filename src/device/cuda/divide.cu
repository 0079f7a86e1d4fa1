/* SPDX-License-Identifier: Apache-2.0
 *
 * Which of the chosen experts this device computes, and how often each is chosen (SL_OP_DIVIDE).
 * One block: a bit for each expert that is chosen and not at hand, then the rank of each pair's
 * expert among them.
 */
#include "device/cuda/common.cuh"

#define DIVIDE_THREADS 256
#define DIVIDE_WORDS (SL_MAX_EXPERTS / 32)

struct divide_args {
    const int32_t *ids;
    const uint8_t *at_hand;
    int32_t *mine;
    int32_t *uses;
    int n_pairs;
    int n_words; /* of bits */
    int share;
};

/* Bits below bit `e`. */
static __device__ __forceinline__ int rank_of(const uint32_t *bits, int e)
{
    int rank = __popc(bits[e / 32] & ((1u << (e % 32)) - 1));
    for (int w = 0; w < e / 32; w++) {
        rank += __popc(bits[w]);
    }
    return rank;
}

static __global__ void __launch_bounds__(DIVIDE_THREADS) divide_kernel(const divide_args a)
{
    __shared__ uint32_t bits[DIVIDE_WORDS];
    for (int w = threadIdx.x; w < a.n_words; w += DIVIDE_THREADS) {
        bits[w] = 0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < a.n_pairs; i += DIVIDE_THREADS) {
        const int e = a.ids[i];
        if (a.uses != nullptr) {
            atomicAdd(&a.uses[e], 1);
        }
        if (a.at_hand != nullptr && !a.at_hand[e]) {
            atomicOr(&bits[e / 32], 1u << (e % 32));
        }
    }
    if (a.at_hand == nullptr) {
        return;
    }
    __syncthreads();
    int n_distinct = 0;
    for (int w = 0; w < a.n_words; w++) {
        n_distinct += __popc(bits[w]);
    }
    const int n_taken = (n_distinct * a.share + SL_DIVIDE_ALL / 2) / SL_DIVIDE_ALL;
    for (int i = threadIdx.x; i < a.n_pairs; i += DIVIDE_THREADS) {
        const int e = a.ids[i];
        a.mine[i] = a.at_hand[e] || rank_of(bits, e) < n_taken ? e : -1;
    }
}

extern "C" int sl_cuda_divide(cudaStream_t stream, const struct sl_op *op,
                              const struct sl_cuda_props *props)
{
    (void)props;
    const struct sl_op_divide *p = &op->divide;
    const int64_t n_pairs = (int64_t)op->n_tokens * p->n_used;
    if (n_pairs > INT32_MAX) {
        return SL_CUDA_UNSUPPORTED;
    }
    const divide_args a = {
        p->ids, p->at_hand, p->mine, p->uses, (int)n_pairs, (p->n_experts + 31) / 32, p->share};
    SL_QUEUE(divide_kernel, 1, DIVIDE_THREADS, 0, stream, a);
    return sl_launch_result();
}
