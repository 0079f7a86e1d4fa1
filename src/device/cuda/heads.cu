/* SPDX-License-Identifier: Apache-2.0
 *
 * Between the products of attention and attention itself, in one launch: norms of the heads of q
 * and k, rotary embedding of both, and k and v into the cache (F16), where their block is here.
 *
 * A warp takes one head of q, k or v of one token. The head lies in shared memory meanwhile, so
 * that a lane finds both elements of its pair wherever they are. q and k are written back as if
 * the operators had run one by one.
 *
 * grid = (heads of q, k and v / HEADS_WARPS, tokens)
 */
#include "device/cuda/fuse.h"
#include "device/cuda/kv.cuh"
#include "device/cuda/launch.cuh"
#include "device/cuda/rope.cuh"

#define HEADS_WARPS 4
#define HEADS_MAX_DIM 512

struct heads_side {
    float *x;          /* [n_tokens, n_heads, head_dim] */
    const float *norm; /* [head_dim] or NULL */
    float eps;
    bool normed;
    int n_heads;
};

struct heads_args {
    heads_side q, k;
    const float *v;
    const int32_t *pos;
    const int32_t *seq; /* or NULL: all 0 */
    const float *freq;
    sl_cuda_kv kv;
    int head_dim, half;
    float magnitude;
    bool neox;
};

/* A head of q or k into shared memory, normed. */
static __device__ __forceinline__ void take_head(const heads_side &side, const float *x, int n,
                                                 float *to)
{
    const int lane = threadIdx.x % SL_WARP;
    float sum = 0.0f;
    for (int i = lane; i < n; i += SL_WARP) {
        const float v = x[i];
        to[i] = v;
        sum = fmaf(v, v, sum);
    }
    if (side.normed) {
        const float scale = 1.0f / sqrtf(sl_warp_sum(sum) / (float)n + side.eps);
        for (int i = lane; i < n; i += SL_WARP) {
            const float v = to[i] * scale;
            to[i] = side.norm != nullptr ? v * side.norm[i] : v;
        }
    }
    __syncwarp();
}

static __device__ __forceinline__ void turn_head(const heads_args &a, int pos, float *x)
{
    for (int pair = threadIdx.x % SL_WARP; pair < a.half; pair += SL_WARP) {
        float s, c;
        sl_rope_angle(pos, a.freq[pair], &s, &c);
        sl_rope_turn(a.neox ? x + pair : x + 2 * pair, a.neox ? a.half : 1, s * a.magnitude,
                     c * a.magnitude);
    }
    __syncwarp();
}

/* Eight elements a lane, 16 bytes a store. */
static __device__ __forceinline__ void store_head(const heads_args &a, int token, int side,
                                                  int head, const float *x)
{
    const int32_t pos = a.pos[token];
    if (!sl_cuda_kv_is_here(a.kv, pos)) {
        return;
    }
    const int32_t seq = a.seq != nullptr ? a.seq[token] : 0;
    const int32_t block = sl_cuda_kv_block(a.kv, seq, pos / SL_KV_BLOCK);
    uint4 *row =
        reinterpret_cast<uint4 *>(sl_cuda_kv_row(a.kv, block, side, head, pos % SL_KV_BLOCK));
    for (int i = threadIdx.x % SL_WARP; i < a.head_dim / 8; i += SL_WARP) {
        const float *v = x + 8 * i;
        row[i] = make_uint4(sl_pack_f16(v[0], v[1]), sl_pack_f16(v[2], v[3]),
                            sl_pack_f16(v[4], v[5]), sl_pack_f16(v[6], v[7]));
    }
}

static __global__ void __launch_bounds__(HEADS_WARPS *SL_WARP) heads_kernel(const heads_args a)
{
    __shared__ float heads[HEADS_WARPS][HEADS_MAX_DIM];
    const int warp = threadIdx.x / SL_WARP;
    float *mine = heads[warp];
    const int token = blockIdx.y;
    int head = blockIdx.x * HEADS_WARPS + warp;
    sl_let_follow();
    sl_await_ahead();
    if (head >= a.q.n_heads + 2 * a.k.n_heads) {
        return;
    }
    const bool is_q = head < a.q.n_heads;
    const heads_side &side = is_q ? a.q : a.k;
    head -= is_q ? 0 : a.q.n_heads;
    if (head >= side.n_heads) {
        head -= side.n_heads;
        const float *v = a.v + ((int64_t)token * side.n_heads + head) * a.head_dim;
        store_head(a, token, 1, head, v);
        return;
    }
    float *x = side.x + ((int64_t)token * side.n_heads + head) * a.head_dim;
    take_head(side, x, a.head_dim, mine);
    turn_head(a, a.pos[token], mine);
    for (int i = threadIdx.x % SL_WARP; i < a.head_dim; i += SL_WARP) {
        x[i] = mine[i];
    }
    if (!is_q) {
        store_head(a, token, 0, head, mine);
    }
}

/* ---- which operators these are ---- */

static bool is_head_norm(const struct sl_op *op, const struct sl_op_rope *rope, int n_tokens)
{
    const struct sl_op_norm *norm = &op->norm;
    return op->kind == SL_OP_NORM && op->n_tokens == n_tokens && norm->x == rope->x &&
           norm->y == rope->x && norm->n == rope->head_dim &&
           norm->rows_per_token == rope->n_heads && !norm->accumulate;
}

static bool same_turn(const struct sl_op_rope *a, const struct sl_op_rope *b)
{
    return a->pos == b->pos && a->freq == b->freq && a->head_dim == b->head_dim &&
           a->n_rot == b->n_rot && a->magnitude == b->magnitude && a->neox == b->neox;
}

static bool fits(const struct sl_op *q, const struct sl_op *k, const struct sl_op *store)
{
    if (q->kind != SL_OP_ROPE || k->kind != SL_OP_ROPE || store->kind != SL_OP_KV_STORE ||
        q->n_tokens != k->n_tokens || k->n_tokens != store->n_tokens) {
        return false;
    }
    const struct sl_kv_view *kv = &store->kv_store.kv;
    const sl_cuda_kv blocks = sl_cuda_kv_make(kv);
    return q->rope.x != k->rope.x && same_turn(&q->rope, &k->rope) &&
           store->kv_store.k == k->rope.x && store->kv_store.pos == k->rope.pos &&
           kv->types.k == SL_TYPE_F16 && kv->types.v == SL_TYPE_F16 &&
           sl_cuda_kv_is_aligned(&blocks, 16) && kv->head_dim == k->rope.head_dim &&
           kv->n_kv_heads == k->rope.n_heads && kv->head_dim <= HEADS_MAX_DIM &&
           q->n_tokens <= 65535;
}

static heads_side make_side(const struct sl_op_rope *rope, const struct sl_op *norm)
{
    heads_side side;
    side.x = rope->x;
    side.n_heads = rope->n_heads;
    side.normed = norm != nullptr;
    side.norm = norm != nullptr ? norm->norm.weight : nullptr;
    side.eps = norm != nullptr ? norm->norm.eps : 0.0f;
    return side;
}

int sl_cuda_heads_fused(const struct sl_op *ops, int n_ops)
{
    /* Norms of q and k, if any, come first. */
    const bool normed = n_ops >= 5 && ops[0].kind == SL_OP_NORM;
    const struct sl_op *rest = normed ? ops + 2 : ops;
    if (n_ops < 3 || !fits(&rest[0], &rest[1], &rest[2])) {
        return 0;
    }
    const int n_tokens = rest[0].n_tokens;
    if (normed && (!is_head_norm(&ops[0], &rest[0].rope, n_tokens) ||
                   !is_head_norm(&ops[1], &rest[1].rope, n_tokens))) {
        return 0;
    }
    return normed ? 5 : 3;
}

int sl_cuda_heads(cudaStream_t stream, const struct sl_op *ops, int n_ops,
                  const struct sl_cuda_props *props)
{
    const bool normed = n_ops == 5;
    const struct sl_op *rest = normed ? ops + 2 : ops;
    const struct sl_op_rope *rope = &rest[0].rope;
    const struct sl_op_kv_store *store = &rest[2].kv_store;
    heads_args a;
    a.q = make_side(rope, normed ? &ops[0] : nullptr);
    a.k = make_side(&rest[1].rope, normed ? &ops[1] : nullptr);
    a.v = store->v;
    a.pos = rope->pos;
    a.seq = store->seq;
    a.freq = rope->freq;
    a.kv = sl_cuda_kv_make(&store->kv);
    a.head_dim = rope->head_dim;
    a.half = rope->n_rot / 2;
    a.magnitude = rope->magnitude;
    a.neox = rope->neox;
    const int64_t n_heads = a.q.n_heads + 2 * (int64_t)a.k.n_heads;
    const dim3 grid((unsigned)sl_div_up(n_heads, HEADS_WARPS), (unsigned)rest[0].n_tokens);
    return SL_FOLLOW(heads_kernel, grid, HEADS_WARPS * SL_WARP, 0, stream, props, a);
}
