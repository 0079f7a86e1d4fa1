/* SPDX-License-Identifier: Apache-2.0
 *
 * The router of a mixture: logits into scratch, then the choice of each token by a warp.
 *
 * The logits of float weights are made in float throughout, so that the choice is that of the CPU
 * but for ties within rounding; quantized weights go the way of any product.
 *
 *   scratch: | logits [n_tokens, n_experts] | scratch of the product |
 */
#include "device/cuda/common.cuh"
#include "device/cuda/linear_args.cuh"

#define ROUTER_WARPS 4

struct router_args {
    const float *logits; /* bias included */
    const float *selection_bias;
    int32_t *ids;
    float *weights;
    int32_t n_tokens, n, n_used, gating;
    bool normalize;
    float scale;
};

/* Scores as integers in the same order: NaN below everything, -0 equal to 0. */
SL_DEV uint32_t score_key(float score)
{
    if (score != score) {
        return 0;
    }
    const uint32_t bits = sl_f32_bits(score + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* p of every expert, in shared memory, from the logits. One warp. */
SL_DEV void router_gate(const struct router_args &a, const float *logits, float *p)
{
    const int lane = (int)threadIdx.x & 31;
    float most = -INFINITY;
    for (int e = lane; e < a.n; e += 32) {
        p[e] = logits[e];
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

/* The lane's best expert that is not taken yet; experts lane, lane + 32, ... are bits of `taken`.
 */
SL_DEV void router_best(const struct router_args &a, const float *p, uint32_t taken, uint32_t &key,
                        int &id)
{
    const int lane = (int)threadIdx.x & 31;
    key = 0;
    id = INT32_MAX;
    for (int e = lane, i = 0; e < a.n; e += 32, i++) {
        if (taken >> i & 1) {
            continue;
        }
        const uint32_t k = score_key(p[e] + (a.selection_bias ? a.selection_bias[e] : 0.0f));
        if (id == INT32_MAX || k > key) {
            key = k;
            id = e;
        }
    }
}

/* The weights of the chosen ones: this lane's are ids[0] (number lane) and ids[1] (lane + 32). */
SL_DEV void router_weigh(const struct router_args &a, const float *p, const int ids[2],
                         int64_t token)
{
    const int lane = (int)threadIdx.x & 31;
    const bool chosen = a.gating == SL_GATING_SOFTMAX_CHOSEN;
    float v[2], most = -INFINITY;
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
        const int j = lane + 32 * i;
        if (j < a.n_used) {
            a.ids[token * a.n_used + j] = ids[i];
            a.weights[token * a.n_used + j] = v[i] / by * a.scale;
        }
    }
}

static __global__ void __launch_bounds__(32 * ROUTER_WARPS)
    router_choose_kernel(SL_KERNEL_ARG struct router_args a)
{
    SL_SHARED(shared);
    const int lane = (int)threadIdx.x & 31;
    const int warp = (int)threadIdx.x >> 5;
    const int64_t token = (int64_t)blockIdx.x * ROUTER_WARPS + warp;
    if (token >= a.n_tokens) {
        return;
    }
    float *p = (float *)shared + warp * a.n;
    router_gate(a, a.logits + token * a.n, p);
    uint32_t taken = 0;
    int ids[2] = {0, 0};
    for (int j = 0; j < a.n_used; j++) {
        uint32_t key;
        int id;
        router_best(a, p, taken, key, id);
#pragma unroll
        for (int mask = 16; mask; mask >>= 1) {
            const uint32_t other_key = __shfl_xor_sync(SL_ALL_LANES, key, mask);
            const int other_id = __shfl_xor_sync(SL_ALL_LANES, id, mask);
            if (other_key > key || (other_key == key && other_id < id)) {
                key = other_key;
                id = other_id;
            }
        }
        if ((id & 31) == lane) {
            taken |= 1u << (id >> 5);
        }
        if ((j & 31) == lane) {
            ids[j >> 5] = id;
        }
    }
    router_weigh(a, p, ids, token);
}

static int router_logits(cudaStream_t stream, const struct sl_op *op, float *logits, void *scratch,
                         size_t scratch_bytes, const struct sl_cuda_props *props)
{
    const struct sl_op_router *o = &op->router;
    const int type = (int)o->w.type;
    if (type == SL_TYPE_F32 || type == SL_TYPE_F16 || type == SL_TYPE_BF16) {
        struct sl_linear_args a;
        memset(&a, 0, sizeof(a));
        a.x = o->x;
        a.row_bytes = (int64_t)sl_type_row_bytes(o->w.type, o->w.n_cols);
        a.n_tokens = op->n_tokens;
        a.n_cols = (int32_t)o->w.n_cols;
        a.n_parts = 1;
        a.n_tiles = (int32_t)o->w.n_rows;
        a.part[0].w = (const uint8_t *)o->w.data;
        a.part[0].end = a.part[0].w + o->w.n_rows * a.row_bytes;
        a.part[0].bias = o->bias;
        a.part[0].y = logits;
        a.part[0].n_rows = (int32_t)o->w.n_rows;
        return sl_linear_vec_f(stream, type, &a, props->n_sm);
    }
    struct sl_op product;
    memset(&product, 0, sizeof(product));
    product.kind = SL_OP_LINEAR;
    product.n_tokens = op->n_tokens;
    product.linear.x = o->x;
    product.linear.n_parts = 1;
    product.linear.part[0].w = o->w;
    product.linear.part[0].bias = o->bias;
    product.linear.part[0].y = logits;
    return sl_cuda_linear(stream, &product, scratch, scratch_bytes, props);
}

extern "C" int sl_cuda_router(cudaStream_t stream, const struct sl_op *op, void *scratch,
                              size_t scratch_bytes, const struct sl_cuda_props *props)
{
    const struct sl_op_router *o = &op->router;
    const size_t logits_bytes =
        ((size_t)op->n_tokens * (size_t)o->w.n_rows * sizeof(float) + 255) / 256 * 256;
    if (scratch_bytes < sl_op_scratch_bytes(op)) {
        return SL_CUDA_UNSUPPORTED;
    }
    float *logits = (float *)scratch;
    const int failed = router_logits(stream, op, logits, (uint8_t *)scratch + logits_bytes,
                                     scratch_bytes - logits_bytes, props);
    if (failed) {
        return failed;
    }
    struct router_args a;
    memset(&a, 0, sizeof(a));
    a.logits = logits;
    a.selection_bias = o->selection_bias;
    a.ids = o->ids;
    a.weights = o->weights;
    a.n_tokens = op->n_tokens;
    a.n = (int32_t)o->w.n_rows;
    a.n_used = o->n_used;
    a.gating = (int32_t)o->gating;
    a.normalize = o->normalize;
    a.scale = o->scale;
    return SL_LAUNCH(
        router_choose_kernel, dim3((unsigned)((op->n_tokens + ROUTER_WARPS - 1) / ROUTER_WARPS)),
        dim3(32 * ROUTER_WARPS), ROUTER_WARPS * (size_t)a.n * sizeof(float), stream, a);
}
