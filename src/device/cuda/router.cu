/* SPDX-License-Identifier: Apache-2.0
 *
 * The router of a mixture: logits into scratch, then the choice of each token by a warp.
 *
 * The logits of float weights are made in float throughout, so that the choice is that of the CPU
 * but for ties within rounding; quantized weights go the way of any product. For few tokens a block
 * makes the logits of one expert: its row is on its way before x is there, and the norm of x, if it
 * is asked for along, is the same pass over x.
 *
 *   scratch: | logits [n_tokens, n_experts] | scratch of the product |
 */
#include "device/cuda/common.cuh"
#include "device/cuda/fuse.h"
#include "device/cuda/launch.cuh"
#include "device/cuda/linear_vecf.cuh"

#define ROUTER_WARPS 4
#define LOGITS_THREADS 256
#define LOGITS_KEEP 4       /* 16-byte pieces of its row that a thread keeps */
#define LOGITS_MAX_TOKENS 8 /* that a block makes one after the other */

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
SL_DEV uint32_t router_key(float score)
{
    if (score != score) {
        return 0;
    }
    const uint32_t bits = sl_f32_bits(score + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

/* p of every expert, in shared memory, from the logits. */
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

SL_DEV uint32_t router_most(uint32_t v)
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
SL_DEV void router_choose(const struct router_args &a, const float *p, int ids[2])
{
    const int lane = (int)threadIdx.x & 31;
    uint32_t key[PER];
#pragma unroll
    for (int i = 0; i < PER; i++) {
        const int e = lane + 32 * i;
        const float bias = e < a.n && a.selection_bias ? a.selection_bias[e] : 0.0f;
        key[i] = e < a.n ? router_key(p[e] + bias) + 1 : 0;
    }
    for (int j = 0; j < a.n_used; j++) {
        uint32_t best = 0;
        int own = 0; /* the lowest of the lane's best ones */
#pragma unroll
        for (int i = 0; i < PER; i++) {
            own = key[i] > best ? i : own;
            best = key[i] > best ? key[i] : best;
        }
        const uint32_t most = router_most(best);
        const uint32_t id = (uint32_t)(lane + 32 * own);
        const uint32_t chosen = ~router_most(best == most ? ~id : 0);
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
SL_DEV void router_weigh(const struct router_args &a, const float *p, const int ids[2], float v[2])
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
SL_DEV void router_run(const struct router_args &a, int64_t token, float *p, int ids[2], float v[2])
{
    ids[0] = ids[1] = 0;
    router_gate(a, a.logits + token * a.n, p);
    if (a.n <= 128) {
        router_choose<4>(a, p, ids);
    } else {
        router_choose<SL_MAX_EXPERTS / 32>(a, p, ids);
    }
    router_weigh(a, p, ids, v);
}

SL_DEV void router_write(const struct router_args &a, int64_t token, const int ids[2],
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

static __global__ void __launch_bounds__(32 * ROUTER_WARPS)
    router_choose_kernel(SL_KERNEL_ARG struct router_args a)
{
    SL_SHARED(shared);
    sl_let_follow();
    sl_await_ahead();
    const int warp = (int)threadIdx.x >> 5;
    const int64_t token = (int64_t)blockIdx.x * ROUTER_WARPS + warp;
    if (token >= a.n_tokens) {
        return;
    }
    int ids[2];
    float v[2];
    router_run(a, token, (float *)shared + warp * a.n, ids, v);
    router_write(a, token, ids, v);
}

/* ---- logits of few tokens ---- */

struct logits_args {
    const float *x;           /* [n_tokens, n_cols] */
    const float *norm_weight; /* [n_cols] or NULL */
    float *normed;            /* where the normed x goes, or NULL: x is not normed */
    float eps;
    const uint8_t *w;
    const float *bias;
    float *logits;
    int64_t row_bytes;
    int32_t n_tokens, n_cols;
};

/* Sums of two numbers over the block, in all threads. */
SL_DEV float2 block_sums(float a, float b)
{
    __shared__ float2 part[LOGITS_THREADS / 32];
    const int warp = (int)threadIdx.x >> 5;
    const float2 mine = make_float2(sl_warp_sum(a), sl_warp_sum(b));
    sl_block_sync(); /* everybody has read what was there before */
    if ((threadIdx.x & 31) == 0) {
        part[warp] = mine;
    }
    sl_block_sync();
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < LOGITS_THREADS / 32; i++) {
        sum.x += part[i].x;
        sum.y += part[i].y;
    }
    return sum;
}

/* The block's share of the normed x. */
SL_DEV void write_normed(const struct logits_args &a, const float *x, int token, float scale)
{
    const int share = (a.n_cols + (int)gridDim.x - 1) / (int)gridDim.x;
    const int begin = (int)blockIdx.x * share;
    const int end = begin + share < a.n_cols ? begin + share : a.n_cols;
    for (int i = begin + (int)threadIdx.x; i < end; i += LOGITS_THREADS) {
        const float v = x[i] * scale;
        a.normed[(int64_t)token * a.n_cols + i] = a.norm_weight ? v * a.norm_weight[i] : v;
    }
}

/* A block makes the logits of expert blockIdx.x. Rows are 16-byte aligned and whole pieces. */
template <int TYPE>
static __global__ void __launch_bounds__(LOGITS_THREADS)
    router_logits_kernel(SL_KERNEL_ARG struct logits_args a)
{
    constexpr int per = TYPE == SL_TYPE_F32 ? 4 : 8; /* weights of a piece */
    const uint4 *row = (const uint4 *)(a.w + blockIdx.x * a.row_bytes);
    const int n_pieces = a.n_cols / per;
    sl_let_follow();
    uint4 kept[LOGITS_KEEP];
#pragma unroll
    for (int k = 0; k < LOGITS_KEEP; k++) {
        const int i = k * LOGITS_THREADS + (int)threadIdx.x;
        kept[k] = i < n_pieces ? SL_LDG(row + i) : make_uint4(0, 0, 0, 0);
    }
    for (int i = 32 * (int)threadIdx.x; a.norm_weight && i < a.n_cols; i += 32 * LOGITS_THREADS) {
        sl_prefetch_l2(a.norm_weight + i);
    }
    sl_await_ahead();
    for (int token = 0; token < a.n_tokens; token++) {
        const float *x = a.x + (int64_t)token * a.n_cols;
        float squares = 0.0f, dot = 0.0f;
        auto add = [&](uint4 piece, int i) {
            float w[per];
            sl_vecf_unpack<TYPE>(piece, w);
#pragma unroll
            for (int j = 0; j < per; j++) {
                const float v = x[i * per + j];
                squares += v * v;
                dot += w[j] * (a.norm_weight ? v * a.norm_weight[i * per + j] : v);
            }
        };
#pragma unroll
        for (int k = 0; k < LOGITS_KEEP; k++) {
            const int i = k * LOGITS_THREADS + (int)threadIdx.x;
            if (i < n_pieces) {
                add(kept[k], i);
            }
        }
        for (int i = LOGITS_KEEP * LOGITS_THREADS + (int)threadIdx.x; i < n_pieces;
             i += LOGITS_THREADS) {
            add(SL_LDG(row + i), i);
        }
        const float2 sums = block_sums(squares, dot);
        const float scale = a.normed ? 1.0f / sqrtf(sums.x / (float)a.n_cols + a.eps) : 1.0f;
        if (threadIdx.x == 0) {
            const float v = sums.y * scale;
            a.logits[(int64_t)token * gridDim.x + blockIdx.x] = a.bias ? v + a.bias[blockIdx.x] : v;
        }
        if (a.normed) {
            write_normed(a, x, token, scale);
        }
    }
}

int few_logits(cudaStream_t stream, const struct sl_op *op, const struct sl_op_norm *norm,
               float *logits, const struct sl_cuda_props *props)
{
    const struct sl_op_router *o = &op->router;
    struct logits_args a;
    memset(&a, 0, sizeof(a));
    a.x = norm ? norm->x : o->x;
    a.norm_weight = norm ? norm->weight : NULL;
    a.normed = norm ? norm->y : NULL;
    a.eps = norm ? norm->eps : 0.0f;
    a.w = (const uint8_t *)o->w.data;
    a.bias = o->bias;
    a.logits = logits;
    a.row_bytes = (int64_t)sl_type_row_bytes(o->w.type, o->w.n_cols);
    a.n_tokens = op->n_tokens;
    a.n_cols = (int32_t)o->w.n_cols;
    const unsigned n = (unsigned)o->w.n_rows;
    switch (o->w.type) {
    case SL_TYPE_F32:
        return SL_FOLLOW((router_logits_kernel<SL_TYPE_F32>), n, LOGITS_THREADS, 0, stream, props,
                         a);
    case SL_TYPE_F16:
        return SL_FOLLOW((router_logits_kernel<SL_TYPE_F16>), n, LOGITS_THREADS, 0, stream, props,
                         a);
    default:
        return SL_FOLLOW((router_logits_kernel<SL_TYPE_BF16>), n, LOGITS_THREADS, 0, stream, props,
                         a);
    }
}

bool sl_cuda_router_takes_norm(const struct sl_op *op)
{
    const struct sl_matrix *w = &op->router.w;
    const bool is_float =
        w->type == SL_TYPE_F32 || w->type == SL_TYPE_F16 || w->type == SL_TYPE_BF16;
    return is_float && op->n_tokens <= LOGITS_MAX_TOKENS && ((uintptr_t)w->data & 15) == 0 &&
           sl_type_row_bytes(w->type, w->n_cols) % 16 == 0 && w->n_cols <= INT32_MAX;
}

static int router_logits(cudaStream_t stream, const struct sl_op *op, const struct sl_op_norm *norm,
                         float *logits, void *scratch, size_t scratch_bytes,
                         const struct sl_cuda_props *props)
{
    const struct sl_op_router *o = &op->router;
    const int type = (int)o->w.type;
    if (sl_cuda_router_takes_norm(op)) {
        return few_logits(stream, op, norm, logits, props);
    }
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
        return sl_linear_vec_f(stream, type, &a, props);
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

static size_t logits_size(const struct sl_op *op)
{
    return ((size_t)op->n_tokens * (size_t)op->router.w.n_rows * sizeof(float) + 255) / 256 * 256;
}

static struct router_args make_args(const struct sl_op *op, const float *logits)
{
    const struct sl_op_router *o = &op->router;
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
    return a;
}

int sl_cuda_router_normed(cudaStream_t stream, const struct sl_op *op,
                          const struct sl_op_norm *norm, void *scratch, size_t scratch_bytes,
                          const struct sl_cuda_props *props)
{
    const size_t logits_bytes = logits_size(op);
    if (scratch_bytes < sl_op_scratch_bytes(op)) {
        return SL_CUDA_UNSUPPORTED;
    }
    float *logits = (float *)scratch;
    const int failed = router_logits(stream, op, norm, logits, (uint8_t *)scratch + logits_bytes,
                                     scratch_bytes - logits_bytes, props);
    if (failed) {
        return failed;
    }
    const struct router_args a = make_args(op, logits);
    return SL_FOLLOW(
        router_choose_kernel, (unsigned)((op->n_tokens + ROUTER_WARPS - 1) / ROUTER_WARPS),
        32 * ROUTER_WARPS, ROUTER_WARPS * (size_t)a.n * sizeof(float), stream, props, a);
}

int sl_cuda_router(cudaStream_t stream, const struct sl_op *op, void *scratch, size_t scratch_bytes,
                   const struct sl_cuda_props *props)
{
    return sl_cuda_router_normed(stream, op, NULL, scratch, scratch_bytes, props);
}
