/* SPDX-License-Identifier: Apache-2.0
 *
 * Which of the chosen experts this device computes, and how often each is chosen (SL_OP_DIVIDE).
 * One block: a bit for each expert that is chosen and not at hand, and its tokens; then the rank of
 * each among them; then what that means for each pair.
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
    int n_used;
    int n_experts;
    int share;
};

/* Bits below bit `e`: the rank where every expert has one token. */
static __device__ __forceinline__ int rank_of(const uint32_t *bits, int e)
{
    int rank = __popc(bits[e / 32] & ((1u << (e % 32)) - 1));
    for (int w = 0; w < e / 32; w++) {
        rank += __popc(bits[w]);
    }
    return rank;
}

/* Experts with more tokens than `e`, or as many and a lower id. */
static __device__ __forceinline__ int n_fuller(const int *n_tokens, int n_experts, int e)
{
    const int mine = n_tokens[e];
    int n = 0;
    for (int other = 0; other < n_experts; other++) {
        n += n_tokens[other] > mine || (n_tokens[other] == mine && other < e);
    }
    return n;
}

static __global__ void __launch_bounds__(DIVIDE_THREADS) divide_kernel(const divide_args a)
{
    __shared__ uint32_t missing[DIVIDE_WORDS], taken[DIVIDE_WORDS];
    __shared__ int n_tokens[SL_MAX_EXPERTS]; /* of missing experts */
    const int n_words = (a.n_experts + 31) / 32;
    for (int w = threadIdx.x; w < n_words; w += DIVIDE_THREADS) {
        missing[w] = taken[w] = 0;
    }
    for (int e = threadIdx.x; e < a.n_experts; e += DIVIDE_THREADS) {
        n_tokens[e] = 0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < a.n_pairs; i += DIVIDE_THREADS) {
        const int e = a.ids[i];
        if (a.uses != nullptr) {
            atomicAdd(&a.uses[e], 1);
        }
        if (a.at_hand != nullptr && !a.at_hand[e]) {
            atomicOr(&missing[e / 32], 1u << (e % 32));
            atomicAdd(&n_tokens[e], 1);
        }
    }
    if (a.at_hand == nullptr) {
        return;
    }
    __syncthreads();
    int n_distinct = 0;
    for (int w = 0; w < n_words; w++) {
        n_distinct += __popc(missing[w]);
    }
    const int n_taken = (n_distinct * a.share + SL_DIVIDE_ALL / 2) / SL_DIVIDE_ALL;
    for (int e = threadIdx.x; n_taken > 0 && e < a.n_experts; e += DIVIDE_THREADS) {
        if (n_tokens[e] > 0 &&
            (a.n_pairs == a.n_used ? rank_of(missing, e) : n_fuller(n_tokens, a.n_experts, e)) <
                n_taken) {
            atomicOr(&taken[e / 32], 1u << (e % 32));
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < a.n_pairs; i += DIVIDE_THREADS) {
        const int e = a.ids[i];
        a.mine[i] = a.at_hand[e] || (taken[e / 32] >> (e % 32) & 1) ? e : -1;
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
    const divide_args a = {p->ids,       p->at_hand, p->mine,      p->uses,
                           (int)n_pairs, p->n_used,  p->n_experts, p->share};
    SL_QUEUE(divide_kernel, 1, DIVIDE_THREADS, 0, stream, a);
    return sl_launch_result();
}
