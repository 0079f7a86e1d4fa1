/* SPDX-License-Identifier: Apache-2.0
 *
 * Experts of a few tokens, quantized weights: two launches of vector products for all (token,
 * expert) pairs.
 *
 *   up    h[pair] = act(gate_e x) * up_e x + biases       rows: the pairs' rows of gate and up
 *   down  y[token] (+)= sum over pairs of weight * (down_e h[pair] + bias)
 *
 * Both are products with one vector (linear_vec_stream.cuh). A block works for one token
 * (blockIdx.y). `down` sees a row of y as one long product: the h of the token's pairs behind one
 * another, times the row of each pair's matrix behind one another. The weights of the pairs go into
 * the scales of h, so that nothing is added up across pairs but units of one sum, in an order that
 * does not depend on timing.
 *
 *   shared: | x or h packed | sums | pairs |
 */
#ifndef SL_DEVICE_CUDA_EXPERTS_VEC_CUH
#define SL_DEVICE_CUDA_EXPERTS_VEC_CUH

#include "device/cuda/experts.cuh"
#include "device/cuda/linear_vec_direct.cuh"

struct sl_experts_vec_args {
    struct sl_experts_order order; /* ids, table, n_used, first and n alone are used */
    struct sl_experts_part part[2];
    const float *x; /* [n_tokens, n_cols] for up, [n_tokens, n_used, n_cols] for down */
    const float *weights;
    float *y; /* [n_tokens, n_used, n_rows] by up, [n_tokens, n_rows] by down */
    int64_t row_bytes;
    int32_t n_tokens, n_cols, n_rows;
    int32_t activation;
    bool accumulate;
    int32_t sums_at, pairs_at; /* in shared memory */
    struct sl_vec_share share;
};

int sl_experts_vec_up_q(cudaStream_t stream, int type, struct sl_experts_vec_args *args,
                        const struct sl_cuda_props *props);
int sl_experts_vec_up_k(cudaStream_t stream, int type, struct sl_experts_vec_args *args,
                        const struct sl_cuda_props *props);
int sl_experts_vec_down_q(cudaStream_t stream, int type, struct sl_experts_vec_args *args,
                          const struct sl_cuda_props *props);
int sl_experts_vec_down_k(cudaStream_t stream, int type, struct sl_experts_vec_args *args,
                          const struct sl_cuda_props *props);

/* The pairs of the block's token whose expert is here, in order, in shared memory. */
struct sl_experts_vec_pairs {
    int32_t n;
    int32_t used[SL_MAX_EXPERTS_USED];   /* number among the token's ids */
    int32_t expert[SL_MAX_EXPERTS_USED]; /* counted from the op's first */
    float weight[SL_MAX_EXPERTS_USED];
};

/* By the first warp. */
SL_DEV void sl_experts_vec_find(const struct sl_experts_vec_args &a, sl_experts_vec_pairs *pairs)
{
    const struct sl_experts_order &o = a.order;
    const int lane = (int)threadIdx.x & 31;
    int n = 0;
    for (int base = 0; base < o.n_used; base += 32) {
        const int j = base + lane;
        const int64_t at = (int64_t)blockIdx.y * o.n_used + j;
        const int e = j < o.n_used ? sl_experts_here(o, SL_LOAD_L2(o.ids + at)) : -1;
        const uint32_t here = __ballot_sync(0xffffffffu, e >= 0);
        if (e >= 0) {
            const int place = n + sl_count_bits(here & ((1u << lane) - 1));
            pairs->used[place] = j;
            pairs->expert[place] = e;
            pairs->weight[place] = SL_LOAD_L2(a.weights + at);
        }
        n += sl_count_bits(here);
    }
    if (lane == 0) {
        pairs->n = n;
    }
}

SL_DEV const uint8_t *sl_experts_vec_matrix(const struct sl_experts_part &part, int expert)
{
    return part.table ? (const uint8_t *)part.table[expert] : part.data + expert * part.bytes;
}

/* ---- gate and up ---- */

/* Tiles are rows of all pairs, pair after pair; a block takes its tiles' rows of gate, then those
 * of up. */
template <class FORM, int P> struct sl_experts_vec_up_rows : sl_vec_rows_base<FORM, P> {
    const struct sl_experts_vec_args &a;
    const sl_experts_vec_pairs &pairs;
    int n_all, n_tiles; /* tiles of the token, and of the block */
    int unit0;
    int which;       /* part of the next row to load: 0 gate, 1 up */
    int tile, limit; /* it, and where its matrix ends */
    int step;
    int64_t step_bytes;
    const uint8_t *at, *matrix_end;

    SL_DEV_MEMBER sl_experts_vec_up_rows(const struct sl_experts_vec_args &args,
                                         const sl_experts_vec_pairs &pairs_, float *sums_)
        : a(args), pairs(pairs_)
    {
        n_all = pairs_.n * args.n_rows;
        n_tiles = sl_vec_tiles_of_block(n_all);
        this->init(args.share, sums_, 2 * n_tiles);
        unit0 = this->first_unit(args.n_cols / 32);
        step = args.share.n_groups * (int)gridDim.x;
        step_bytes = step * args.row_bytes;
        tile = this->group * (int)gridDim.x + (int)blockIdx.x;
        which = 0;
        if (this->left > 0) {
            locate();
        }
    }

    SL_DEV_MEMBER void locate()
    {
        if (tile >= n_all) {
            tile -= n_tiles * (int)gridDim.x;
            which = 1;
        }
        const int p = tile / a.n_rows;
        const uint8_t *matrix = sl_experts_vec_matrix(a.part[which], pairs.expert[p]);
        limit = (p + 1) * a.n_rows;
        matrix_end = matrix + a.part[which].bytes;
        at = matrix + (tile - p * a.n_rows) * a.row_bytes +
             unit0 / FORM::per_block * FORM::block_bytes;
    }

    static constexpr int chunk_bytes = 32 / FORM::per_block * FORM::block_bytes;

    SL_DEV_MEMBER const uint8_t *unit(int k) const
    {
        return at + k * chunk_bytes;
    }

    SL_DEV_MEMBER const uint8_t *unit8(int k) const
    {
        return at - ((uintptr_t)at & 7) + k * chunk_bytes;
    }

    SL_DEV_MEMBER uint32_t low(int) const
    {
        return (uint32_t)(uintptr_t)at;
    }

    SL_DEV_MEMBER bool is_last() const
    {
        return FORM::reads_past && tile == limit - 1;
    }

    SL_DEV_MEMBER const uint8_t *end(int) const
    {
        return matrix_end;
    }

    SL_DEV_MEMBER void advance()
    {
        this->left--;
        tile += step;
        at += step_bytes;
        if (tile >= limit && this->left > 0) {
            locate();
        }
    }

    SL_DEV_MEMBER float biased(int part, int expert, int r, float v) const
    {
        const float *bias = a.part[part].bias;
        return bias ? v + bias[(int64_t)expert * a.n_rows + r] : v;
    }

    SL_DEV_MEMBER void finish() const
    {
        for (int q = (int)threadIdx.x; q < n_tiles; q += (int)blockDim.x) {
            const int t = q * (int)gridDim.x + (int)blockIdx.x;
            const int p = t / a.n_rows;
            const int r = t - p * a.n_rows;
            const float gate = biased(0, pairs.expert[p], r, this->total(q, 0));
            const float up = biased(1, pairs.expert[p], r, this->total(n_tiles + q, 0));
            const int64_t pair = (int64_t)blockIdx.y * a.order.n_used + pairs.used[p];
            a.y[pair * a.n_rows + r] = sl_gate(gate, up, a.activation);
        }
    }
};

template <class FORM, int P, int R>
__global__ void __launch_bounds__(32 * FORM::max_warps, 1)
    sl_experts_vec_up_kernel(SL_KERNEL_ARG struct sl_experts_vec_args a)
{
    SL_SHARED(shared);
    sl_experts_vec_pairs *pairs = (sl_experts_vec_pairs *)(shared + a.pairs_at);
    sl_await_ahead();
    sl_let_follow();
    if (threadIdx.x < 32) {
        sl_experts_vec_find(a, pairs);
    }
    sl_block_sync();
    sl_experts_vec_up_rows<FORM, P> rows(a, *pairs, (float *)(shared + a.sums_at));
    sl_vec_run<FORM, P, R>(rows, [&](typename FORM::template x_piece<P> &x,
                                     const typename FORM::lane &lane) {
        sl_linear_args l;
        l.x = a.x + (int64_t)blockIdx.y * a.n_cols;
        l.n_tokens = 1;
        l.n_cols = a.n_cols;
        l.norm.on = false;
        l.norm.weight = NULL;
        sl_vec_pack_x<1>(l, shared, (struct sl_xblock *)(shared + sl_vec_x_stride(a.n_cols)), NULL);
        sl_block_sync();
        FORM::template take_x<P>(x, shared, a.n_cols, rows.unit0, lane);
    });
    sl_block_sync();
    rows.finish();
}

/* ---- down ---- */

/* Rows are those of y. Units of a lane lie in the matrices of different pairs, each where it has
 * been in the row before but for row_bytes. */
template <class FORM, int P> struct sl_experts_vec_down_rows : sl_vec_rows_base<FORM, P> {
    const struct sl_experts_vec_args &a;
    const sl_experts_vec_pairs &pairs;
    int n_tiles; /* of the block */
    int unit0;
    int row; /* next to load */
    int step;
    int64_t step_bytes;
    const uint8_t *at[P] = {}; /* none: of a warp that has no rows */
    int to_end[P] = {};        /* bytes from there to the end of the row */

    SL_DEV_MEMBER sl_experts_vec_down_rows(const struct sl_experts_vec_args &args,
                                           const sl_experts_vec_pairs &pairs_, float *sums_)
        : a(args), pairs(pairs_)
    {
        n_tiles = sl_vec_tiles_of_block(args.n_rows);
        this->init(args.share, sums_, pairs_.n > 0 ? n_tiles : 0);
        const int per_pair = args.n_cols / 32;
        unit0 = this->first_unit(args.order.n_used * per_pair);
        step = args.share.n_groups * (int)gridDim.x;
        step_bytes = step * args.row_bytes;
        row = this->group * (int)gridDim.x + (int)blockIdx.x;
        const int n_units = pairs_.n * per_pair;
#pragma unroll
        for (int k = 0; k<P &&this->left> 0; k++) {
            const int u = unit0 + 32 * k;
            this->counts[k] = this->counts[k] && u < n_units;
            const int there = u < n_units ? u : n_units - 1;
            const int p = there / per_pair;
            const int offset = (there - p * per_pair) / FORM::per_block * FORM::block_bytes;
            at[k] = sl_experts_vec_matrix(args.part[0], pairs_.expert[p]) + row * args.row_bytes +
                    offset;
            to_end[k] = (int)args.row_bytes - offset;
        }
    }

    SL_DEV_MEMBER const uint8_t *unit(int k) const
    {
        return at[k];
    }

    SL_DEV_MEMBER const uint8_t *unit8(int k) const
    {
        return at[k] - ((uintptr_t)at[k] & 7);
    }

    SL_DEV_MEMBER uint32_t low(int k) const
    {
        return (uint32_t)(uintptr_t)at[k];
    }

    SL_DEV_MEMBER bool is_last() const
    {
        return FORM::reads_past && row == a.n_rows - 1;
    }

    SL_DEV_MEMBER const uint8_t *end(int k) const
    {
        return at[k] + to_end[k];
    }

    SL_DEV_MEMBER void advance()
    {
        this->left--;
        row += step;
#pragma unroll
        for (int k = 0; k < P; k++) {
            at[k] += step_bytes;
        }
    }

    SL_DEV_MEMBER void finish() const
    {
        for (int q = (int)threadIdx.x; q < n_tiles; q += (int)blockDim.x) {
            const int r = q * (int)gridDim.x + (int)blockIdx.x;
            float v = pairs.n > 0 ? this->total(q, 0) : 0.0f;
            for (int p = 0; a.part[0].bias && p < pairs.n; p++) {
                v += pairs.weight[p] * a.part[0].bias[(int64_t)pairs.expert[p] * a.n_rows + r];
            }
            float *y = a.y + (int64_t)blockIdx.y * a.n_rows + r;
            *y = a.accumulate ? *y + v : v;
        }
    }
};

/* Pack the h of the pairs behind one another, weighted. */
SL_DEV void sl_experts_vec_pack_h(const struct sl_experts_vec_args &a,
                                  const sl_experts_vec_pairs &pairs, uint8_t *levels)
{
    const int lane = (int)threadIdx.x & 31;
    const int n_all = pairs.n * a.n_cols; /* a multiple of 32 */
    struct sl_xblock *blocks =
        (struct sl_xblock *)(levels + sl_vec_x_stride(a.order.n_used * a.n_cols));
    for (int base = (int)threadIdx.x - lane; base < n_all / 4; base += (int)blockDim.x) {
        const int i = base + lane;
        const int p = i < n_all / 4 ? 4 * i / a.n_cols : 0;
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (i < n_all / 4) {
            const int64_t pair = (int64_t)blockIdx.y * a.order.n_used + pairs.used[p];
            v = *(const float4 *)(a.x + pair * a.n_cols + (4 * i - p * a.n_cols));
        }
        float d, sum;
        const uint32_t q = sl_pack_levels(v, d, sum);
        const float other = sl_shfl_xor(sum, 4);
        if (i < n_all / 4) {
            *(uint32_t *)(levels + 16 * sl_vec_swizzle(i >> 2) + 4 * (i & 3)) = q;
            if ((lane & 7) == 0) {
                blocks[i >> 3].d = d * pairs.weight[p];
                blocks[i >> 3].sums = sl_pack_half2(sum, other);
            }
        }
    }
}

template <class FORM, int P, int R>
__global__ void __launch_bounds__(32 * FORM::max_warps, 1)
    sl_experts_vec_down_kernel(SL_KERNEL_ARG struct sl_experts_vec_args a)
{
    SL_SHARED(shared);
    sl_experts_vec_pairs *pairs = (sl_experts_vec_pairs *)(shared + a.pairs_at);
    sl_let_follow();
    /* Ids and weights are older than the kernel ahead, sl_experts_vec_up_kernel, which has waited
     * for what made them before it let this one follow: they lie in L2 already, and the first
     * weights can be on their way while h is still being made. */
    if (threadIdx.x < 32) {
        sl_experts_vec_find(a, pairs);
    }
    sl_block_sync();
    sl_experts_vec_down_rows<FORM, P> rows(a, *pairs, (float *)(shared + a.sums_at));
    sl_vec_run<FORM, P, R>(
        rows, [&](typename FORM::template x_piece<P> &x, const typename FORM::lane &lane) {
            const int n_all = a.order.n_used * a.n_cols;
            sl_await_ahead();
            sl_experts_vec_pack_h(a, *pairs, shared);
            sl_block_sync();
            FORM::template take_x<P>(x, shared, n_all, rows.unit0, lane);
        });
    sl_block_sync();
    rows.finish();
}

/* ---- launches ---- */

/* Blocks for each token. */
static inline int sl_experts_vec_blocks(int n_tokens, const struct sl_cuda_props *props)
{
    const int n = props->n_sm / n_tokens;
    return n > 1 ? n : 1;
}

/* Shares n_rows rows of n_units units out and lays out shared memory; returns how much there is, or
 * 0: rows are too short or too long. *piece: chunks of a piece. */
static inline size_t sl_experts_vec_plan(struct sl_experts_vec_args *a, int n_units, int64_t n_rows,
                                         int max_warps, int *piece)
{
    *piece = sl_vec_piece_chunks(n_units, 2, max_warps);
    if (*piece == 0 || n_rows > INT32_MAX / 128) {
        return 0;
    }
    a->share = sl_vec_share_rows(n_units, *piece, (int)n_rows, max_warps);
    a->sums_at = (sl_vec_packed_bytes(32 * n_units, 1) + 15) & ~15;
    a->pairs_at = (a->sums_at + (int)n_rows * a->share.n_pieces * 4 + 15) & ~15;
    return (size_t)a->pairs_at + sizeof(struct sl_experts_vec_pairs);
}

/* Rows of a block, at most: gate's and up's, and those of y. */
static inline int64_t sl_experts_vec_up_block_rows(int64_t n_used, int64_t n_ff, int n_blocks)
{
    return 2 * ((n_used * n_ff + n_blocks - 1) / n_blocks);
}

static inline int64_t sl_experts_vec_down_block_rows(int64_t n_embd, int n_blocks)
{
    return (n_embd + n_blocks - 1) / n_blocks;
}

/* Whether both launches have room in shared memory, whatever the types: the fewest warps make the
 * longest rows impossible, the most make the most pieces. */
static inline bool sl_experts_vec_fits(const struct sl_op *op, const struct sl_cuda_props *props)
{
    const struct sl_op_experts *e = &op->experts;
    const int n_blocks = sl_experts_vec_blocks(op->n_tokens, props);
    const int64_t n_h = e->n_used * e->down.n_cols;
    if (e->gate.n_cols > INT32_MAX / 8 || n_h > INT32_MAX / 8) {
        return false;
    }
    struct sl_experts_vec_args a;
    memset(&a, 0, sizeof(a));
    int piece;
    const size_t up = sl_experts_vec_plan(
        &a, (int)(e->gate.n_cols / 32),
        sl_experts_vec_up_block_rows(e->n_used, e->gate.n_rows, n_blocks), 16, &piece);
    const size_t down = sl_experts_vec_plan(
        &a, (int)(n_h / 32), sl_experts_vec_down_block_rows(e->down.n_rows, n_blocks), 16, &piece);
    const size_t room = props->max_shared_bytes;
    return up > 0 && down > 0 && up <= room && down <= room;
}

template <int TYPE>
static int sl_experts_vec_up(cudaStream_t stream, struct sl_experts_vec_args *a,
                             const struct sl_cuda_props *props)
{
    using form = sl_vec_packed<TYPE, 1>;
    const int n_blocks = sl_experts_vec_blocks(a->n_tokens, props);
    int piece;
    const size_t shared = sl_experts_vec_plan(
        a, a->n_cols / 32, sl_experts_vec_up_block_rows(a->order.n_used, a->n_rows, n_blocks),
        form::max_warps, &piece);
    const dim3 grid((unsigned)n_blocks, (unsigned)a->n_tokens);
    const dim3 block((unsigned)(32 * a->share.n_pieces * a->share.n_groups));
    return piece == 2 ? SL_FOLLOW((sl_experts_vec_up_kernel<form, 2, 2>), grid, block, shared,
                                  stream, props, *a)
                      : SL_FOLLOW((sl_experts_vec_up_kernel<form, 1, 4>), grid, block, shared,
                                  stream, props, *a);
}

template <int TYPE>
static int sl_experts_vec_down(cudaStream_t stream, struct sl_experts_vec_args *a,
                               const struct sl_cuda_props *props)
{
    using form = sl_vec_packed<TYPE, 1>;
    const int n_blocks = sl_experts_vec_blocks(a->n_tokens, props);
    int piece;
    const size_t shared = sl_experts_vec_plan(a, a->order.n_used * (a->n_cols / 32),
                                              sl_experts_vec_down_block_rows(a->n_rows, n_blocks),
                                              form::max_warps, &piece);
    const dim3 grid((unsigned)n_blocks, (unsigned)a->n_tokens);
    const dim3 block((unsigned)(32 * a->share.n_pieces * a->share.n_groups));
    return piece == 2 ? SL_FOLLOW((sl_experts_vec_down_kernel<form, 2, 2>), grid, block, shared,
                                  stream, props, *a)
                      : SL_FOLLOW((sl_experts_vec_down_kernel<form, 1, 4>), grid, block, shared,
                                  stream, props, *a);
}

#endif
