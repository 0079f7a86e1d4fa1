/* SPDX-License-Identifier: Apache-2.0
 *
 * The choice of a token's experts from its logits, by one warp. It takes about as long as a kernel
 * takes to begin, so it is also done by every block of the first kernel that wants to know
 * (experts_vec.cuh).
 */
#ifndef SL_DEVICE_CUDA_ROUTER_CUH
#define SL_DEVICE_CUDA_ROUTER_CUH

#include "device/cuda/common.cuh"
#include "device/cuda/linear_port.cuh"

struct sl_router_args {
    const float *logits; /* bias included */
    const float *selection_bias;
    int32_t *ids;
    float *weights;
    int32_t n_tokens, n, n_used, gating;
    bool normalize;
    float scale;
};

/* Scores as integers in the same order: NaN below everything, -0 equal to 0. */
SL_DEV uint32_t sl_router_key(float score)
{
    if (score != score) {
        return 0;
    }
    const uint32_t bits = sl_f32_bits(score + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* p of every expert, in shared memory, from the logits. */
SL_DEV void sl_router_gate(const struct sl_router_args &a, const float *logits, float *p)
{
    const int lane = (int)threadIdx.x & 31;
    float most = -INFINITY;
    for (int e = lane; e < a.n; e += 32) {
        p[e] = SL_LOAD_L2(logits + e);
        most = fmaxf(most, p[e]);
    }
    if (a.gating == SL_GATING_SIGMOID) {
        for (int e = lane; e < a.n; e += 32) {
            p[e] = 1.0f / (1.0f + expf(-p[e]));
        }
    } else if (a.gating == SL_GATING_SOFTMAX) {
        most = sl_warp_max(most);
        float sum = 0.0f;
        for (int e = lane; e < a.n; e += 32) {
            p[e] = expf(p[e] - most);
            sum += p[e];
        }
        sum = sl_warp_sum(sum);
        for (int e = lane; e < a.n; e += 32) {
            p[e] /= sum;
        }
    }
    __syncwarp();
}

SL_DEV uint32_t sl_router_most(uint32_t v)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    return __reduce_max_sync(SL_ALL_LANES, v);
#else
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) {
        const uint32_t other = __shfl_xor_sync(SL_ALL_LANES, v, mask);
        v = other > v ? other : v;
    }
    return v;
#endif
}

/* The n_used best of a token, one after the other; this lane's are ids[0] (number lane) and ids[1]
 * (lane + 32). Experts lane, lane + 32, ... are the lane's, PER of them at most; their keys stay in
 * registers, one more than the score's so that 0 is one that is taken. */
template <int PER>
SL_DEV void sl_router_choose(const struct sl_router_args &a, const float *p, int ids[2])
{
    const int lane = (int)threadIdx.x & 31;
    uint32_t key[PER];
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int e = lane + 32 * i;
        const float bias = e < a.n && a.selection_bias ? a.selection_bias[e] : 0.0f;
        key[i] = e < a.n ? sl_router_key(p[e] + bias) + 1 : 0;
    }
    for (int j = 0; j < a.n_used; j++) {
        uint32_t best = 0;
        int own = 0; /* the lowest of the lane's best ones */
#pragma unroll
        for (int i = 0; i < PER; i++) {
            own = key[i] > best ? i : own;
            best = key[i] > best ? key[i] : best;
        }
        const uint32_t most = sl_router_most(best);
        const uint32_t id = (uint32_t)(lane + 32 * own);
        const uint32_t chosen = ~sl_router_most(best == most ? ~id : 0);
#pragma unroll
        for (int i = 0; i < PER; i++) {
            key[i] = (uint32_t)(lane + 32 * i) == chosen ? 0 : key[i];
        }
        if ((j & 31) == lane) {
            ids[j >> 5] = (int)chosen;
        }
    }
}

/* The weights of the chosen ones: this lane's are v[0] and v[1], as its ids. */
SL_DEV void sl_router_weigh(const struct sl_router_args &a, const float *p, const int ids[2],
                            float v[2])
{
    const int lane = (int)threadIdx.x & 31;
    const bool chosen = a.gating == SL_GATING_SOFTMAX_CHOSEN;
    float most = -INFINITY;
    for (int i = 0; i < 2; i++) {
        v[i] = lane + 32 * i < a.n_used ? p[ids[i]] : -INFINITY;
        most = fmaxf(most, v[i]);
    }
    most = sl_warp_max(most);
    float sum = 0.0f;
    for (int i = 0; i < 2; i++) {
        const bool there = lane + 32 * i < a.n_used;
        v[i] = !there ? 0.0f : chosen ? expf(v[i] - most) : v[i];
        sum += v[i];
    }
    sum = sl_warp_sum(sum);
    const float by = chosen ? sum : a.normalize ? fmaxf(sum, SL_ROUTER_MIN_SUM) : 1.0f;
    for (int i = 0; i < 2; i++) {
        v[i] = v[i] / by * a.scale;
    }
}

/* The whole choice of a token by a warp: ids and weights number lane and lane + 32. p: shared, a
 * float for every expert. */
SL_DEV void sl_router_run(const struct sl_router_args &a, int64_t token, float *p, int ids[2],
                          float v[2])
{
    ids[0] = ids[1] = 0;
    sl_router_gate(a, a.logits + token * a.n, p);
    if (a.n <= 128) {
        sl_router_choose<4>(a, p, ids);
    } else {
        sl_router_choose<SL_MAX_EXPERTS / 32>(a, p, ids);
    }
    sl_router_weigh(a, p, ids, v);
}

SL_DEV void sl_router_write(const struct sl_router_args &a, int64_t token, const int ids[2],
                            const float v[2])
{
    for (int i = 0; i < 2; i++) {
        const int j = ((int)threadIdx.x & 31) + 32 * i;
        if (j < a.n_used) {
            a.ids[token * a.n_used + j] = ids[i];
            a.weights[token * a.n_used + j] = v[i];
        }
    }
}

/* router.cu: the logits of few tokens in one launch, which norms their x along (norm or NULL),
 * where sl_cuda_router_takes_norm says so. */
int sl_router_few_logits(cudaStream_t stream, const struct sl_op *op, const struct sl_op_norm *norm,
                         float *logits, const struct sl_cuda_props *props);
/* The choice as the kernels get it. */
struct sl_router_args sl_router_make_args(const struct sl_op *op, const float *logits);
size_t sl_router_logits_bytes(const struct sl_op *op);

#endif
