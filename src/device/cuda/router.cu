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
#include "device/cuda/fuse.h"
#include "device/cuda/launch.cuh"
#include "device/cuda/linear_vecf.cuh"
#include "device/cuda/router.cuh"

#define ROUTER_WARPS 4
#define LOGITS_THREADS 256
#define LOGITS_KEEP 4       /* 16-byte pieces of its row that a thread keeps */
#define LOGITS_MAX_TOKENS 8 /* that a block makes one after the other */

static __global__ void __launch_bounds__(32 * ROUTER_WARPS)
    router_choose_kernel(SL_KERNEL_ARG struct sl_router_args a)
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
    sl_router_run(a, token, (float *)shared + warp * a.n, ids, v);
    sl_router_write(a, token, ids, v);
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

int sl_router_few_logits(cudaStream_t stream, const struct sl_op *op, const struct sl_op_norm *norm,
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
        return sl_router_few_logits(stream, op, norm, logits, props);
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

size_t sl_router_logits_bytes(const struct sl_op *op)
{
    return ((size_t)op->n_tokens * (size_t)op->router.w.n_rows * sizeof(float) + 255) / 256 * 256;
}

struct sl_router_args sl_router_make_args(const struct sl_op *op, const float *logits)
{
    const struct sl_op_router *o = &op->router;
    struct sl_router_args a;
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
    const size_t logits_bytes = sl_router_logits_bytes(op);
    if (scratch_bytes < sl_op_scratch_bytes(op)) {
        return SL_CUDA_UNSUPPORTED;
    }
    float *logits = (float *)scratch;
    const int failed = router_logits(stream, op, norm, logits, (uint8_t *)scratch + logits_bytes,
                                     scratch_bytes - logits_bytes, props);
    if (failed) {
        return failed;
    }
    const struct sl_router_args a = sl_router_make_args(op, logits);
    return SL_FOLLOW(
        router_choose_kernel, (unsigned)((op->n_tokens + ROUTER_WARPS - 1) / ROUTER_WARPS),
        32 * ROUTER_WARPS, ROUTER_WARPS * (size_t)a.n * sizeof(float), stream, props, a);
}

int sl_cuda_router(cudaStream_t stream, const struct sl_op *op, void *scratch, size_t scratch_bytes,
                   const struct sl_cuda_props *props)
{
    return sl_cuda_router_normed(stream, op, NULL, scratch, scratch_bytes, props);
}
