/* SPDX-License-Identifier: Apache-2.0
 *
 * Experts of a few tokens, quantized weights: two launches of vector products for all (token,
 * expert) pairs.
 *
 *   up    h[pair] = act(gate_e x) * up_e x + biases       rows: the pairs' rows of gate and up
 *   down  y[token] (+)= sum over pairs of weight * (down_e h[pair] + bias)
 *
 * A block works for one token (blockIdx.y), so that it packs one x. `down` sees a row of y as one
 * long product: the h of the token's pairs behind one another, times the row of each pair's matrix
 * behind one another. The weights of the pairs go into the scales of h, so that nothing is added up
 * across pairs but units of one sum, in an order that does not depend on timing.
 *
 * The router's choice, too, is made by every block for itself where its operator stands ahead and
 * only its logits are there.
 *
 *   shared, up:    | x packed | sums | pairs | p of the experts |
 *   shared, down:  | h packed | sums | pairs | p of the experts | addresses of blocks of row 0 |
 */
#ifndef SL_DEVICE_CUDA_EXPERTS_VEC_CUH
#define SL_DEVICE_CUDA_EXPERTS_VEC_CUH

#include "device/cuda/experts.cuh"
#include "device/cuda/linear_vec_direct.cuh"
#include "device/cuda/router.cuh"

#define SL_EXPERTS_VEC_TOKENS 8

struct sl_experts_vec_args {
    struct sl_experts_order order; /* ids, table, n_used, first and n alone are used */
    struct sl_experts_part part[2];
    const float *x; /* [n_tokens, n_cols] for up, [n_tokens, n_used, n_cols] for down */
    const float *weights;
    struct sl_router_args router; /* logits NULL: ids and weights are there */
    float *y;                     /* [n_tokens, n_used, n_rows] by up, [n_tokens, n_rows] by down */
    int64_t row_bytes;
    int32_t n_tokens, n_cols, n_rows;
    int32_t activation;
    bool accumulate;
    int32_t sums_at, pairs_at, p_at, addresses_at; /* in shared memory */
    struct sl_vec_split split;
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

/* By the first warp. p: shared, a float for each expert of the router. */
SL_DEV void sl_experts_vec_find(const struct sl_experts_vec_args &a, sl_experts_vec_pairs *pairs,
                                float *p, bool write)
{
    const struct sl_experts_order &o = a.order;
    const int lane = (int)threadIdx.x & 31;
    int ids[2] = {0, 0};
    float weights[2] = {1.0f, 1.0f};
    if (a.router.logits) {
        sl_router_run(a.router, (int64_t)blockIdx.y, p, ids, weights);
        if (write) {
            sl_router_write(a.router, (int64_t)blockIdx.y, ids, weights);
        }
    }
    int n = 0;
    for (int i = 0; i < 2; i++) {
        const int j = 32 * i + lane;
        if (!a.router.logits && j < o.n_used) {
            const int64_t at = (int64_t)blockIdx.y * o.n_used + j;
            ids[i] = SL_LOAD_L2(o.ids + at);
            weights[i] = SL_LOAD_L2(a.weights + at);
        }
        const int e = j < o.n_used ? sl_experts_here(o, ids[i]) : -1;
        const uint32_t here = __ballot_sync(0xffffffffu, e >= 0);
        if (e >= 0) {
            const int place = n + sl_count_bits(here & ((1u << lane) - 1));
            pairs->used[place] = j;
            pairs->expert[place] = e;
            pairs->weight[place] = weights[i];
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

/* Tiles are rows of all pairs, pair after pair, each a row of gate and one of up. */
template <class FORM> struct sl_experts_vec_up_rows : sl_vec_pieces<FORM, 1> {
    const struct sl_experts_vec_args &a;
    const sl_experts_vec_pairs &pairs;
    int n_tiles; /* of the block */

    SL_DEV_MEMBER sl_experts_vec_up_rows(const struct sl_experts_vec_args &args,
                                         const sl_experts_vec_pairs &pairs_, float *sums_)
        : a(args), pairs(pairs_)
    {
        n_tiles = sl_vec_tiles_of_block(pairs_.n * args.n_rows);
        this->init(args.split, sums_, 2 * n_tiles);
    }

    SL_DEV_MEMBER void open(int i)
    {
        const int q = this->row(i);
        const int tile = (q >> 1) * (int)gridDim.x + (int)blockIdx.x;
        const int r = tile % a.n_rows;
        const struct sl_experts_part &part = a.part[q & 1];
        const uint8_t *w = sl_experts_vec_matrix(part, pairs.expert[tile / a.n_rows]);
        const int unit = 32 * this->first_chunk(i) + ((int)threadIdx.x & 31);
        this->block = w + r * a.row_bytes + unit / FORM::per_block * FORM::block_bytes;
        this->end = w + part.bytes;
        this->near_end = r == a.n_rows - 1;
    }

    SL_DEV_MEMBER void next()
    {
        this->block += 32 / FORM::per_block * FORM::block_bytes;
    }

    SL_DEV_MEMBER float biased(int which, int expert, int r, float v) const
    {
        const float *bias = a.part[which].bias;
        return bias ? v + bias[(int64_t)expert * a.n_rows + r] : v;
    }

    SL_DEV_MEMBER void finish() const
    {
        for (int q = (int)threadIdx.x; q < n_tiles; q += FORM::threads) {
            const int tile = q * (int)gridDim.x + (int)blockIdx.x;
            const int p = tile / a.n_rows;
            const int r = tile % a.n_rows;
            const float gate = biased(0, pairs.expert[p], r, this->total(2 * q, 0));
            const float up = biased(1, pairs.expert[p], r, this->total(2 * q + 1, 0));
            const int64_t pair = (int64_t)blockIdx.y * a.order.n_used + pairs.used[p];
            a.y[pair * a.n_rows + r] = sl_gate(gate, up, a.activation);
        }
    }
};

/* The block's x as the vector kernels see it. */
SL_DEV void sl_experts_vec_bind(const struct sl_experts_vec_args &a, const float *x, int n_cols,
                                sl_linear_args &l)
{
    l.x = x;
    l.n_tokens = 1;
    l.n_cols = n_cols;
    l.norm.on = false;
    l.norm.weight = NULL;
    l.norm.y = NULL;
    (void)a;
}

template <class FORM>
__global__ void __launch_bounds__(FORM::threads, 1)
    sl_experts_vec_up_kernel(SL_KERNEL_ARG struct sl_experts_vec_args a)
{
    SL_SHARED(shared);
    sl_experts_vec_pairs *pairs = (sl_experts_vec_pairs *)(shared + a.pairs_at);
    sl_await_ahead();
    sl_let_follow();
    if (threadIdx.x < 32) {
        sl_experts_vec_find(a, pairs, (float *)(shared + a.p_at), blockIdx.x == 0);
    }
    sl_block_sync();
    FORM form;
    form.prepare();
    sl_experts_vec_up_rows<FORM> rows(a, *pairs, (float *)(shared + a.sums_at));
    sl_vec_stream<FORM, 1>(form, rows, a.n_cols / 32, a.split.n_chunks, [&]() {
        sl_linear_args l;
        sl_experts_vec_bind(a, a.x + (int64_t)blockIdx.y * a.n_cols, a.n_cols, l);
        sl_vec_pack_x<1, FORM::threads>(
            l, shared, (struct sl_xblock *)(shared + sl_vec_x_stride(a.n_cols)), NULL);
        sl_block_sync();
        form.set_x(shared, a.n_cols);
    });
    sl_block_sync();
    rows.finish();
}

/* ---- down ---- */

template <class FORM> struct sl_experts_vec_down_rows : sl_vec_pieces<FORM, 1> {
    const struct sl_experts_vec_args &a;
    const sl_experts_vec_pairs &pairs;
    const uint8_t *const *addresses; /* of every block of row 0, pair after pair */
    int n_tiles;                     /* of the block */
    int at;                          /* the lane's next block */
    int64_t offset;                  /* of the row in every matrix */

    SL_DEV_MEMBER sl_experts_vec_down_rows(const struct sl_experts_vec_args &args,
                                           const sl_experts_vec_pairs &pairs_, float *sums_,
                                           const uint8_t *const *addresses_)
        : a(args), pairs(pairs_), addresses(addresses_)
    {
        n_tiles = sl_vec_tiles_of_block(args.n_rows);
        this->init(args.split, sums_, n_tiles);
        at = 0;
        offset = 0;
    }

    SL_DEV_MEMBER void find()
    {
        /* A lane behind the last unit finds nothing, and loads nothing. */
        const int per_row = a.n_cols / (32 * FORM::per_block);
        if (at < pairs.n * per_row) {
            this->block = addresses[at] + offset;
            /* Rows before the last end before their matrix does. */
            this->end = this->near_end ? this->block + (per_row - at % per_row) * FORM::block_bytes
                                       : (const uint8_t *)UINTPTR_MAX;
        }
    }

    SL_DEV_MEMBER void open(int i)
    {
        const int r = this->row(i) * (int)gridDim.x + (int)blockIdx.x;
        at = (32 * this->first_chunk(i) + ((int)threadIdx.x & 31)) / FORM::per_block;
        offset = r * a.row_bytes;
        this->near_end = r == a.n_rows - 1;
        find();
    }

    SL_DEV_MEMBER void next()
    {
        at += 32 / FORM::per_block;
        find();
    }

    SL_DEV_MEMBER void finish() const
    {
        for (int q = (int)threadIdx.x; q < n_tiles; q += FORM::threads) {
            const int r = q * (int)gridDim.x + (int)blockIdx.x;
            float v = this->total(q, 0);
            for (int p = 0; a.part[0].bias && p < pairs.n; p++) {
                v += pairs.weight[p] * a.part[0].bias[(int64_t)pairs.expert[p] * a.n_rows + r];
            }
            float *y = a.y + (int64_t)blockIdx.y * a.n_rows + r;
            *y = a.accumulate ? *y + v : v;
        }
    }
};

/* Where row 0 of every pair's matrix has its blocks. */
template <class FORM>
SL_DEV void sl_experts_vec_addresses(const struct sl_experts_vec_args &a,
                                     const sl_experts_vec_pairs &pairs, const uint8_t **addresses)
{
    const int per_row = a.n_cols / (32 * FORM::per_block);
    for (int i = (int)threadIdx.x; i < pairs.n * per_row; i += FORM::threads) {
        addresses[i] = sl_experts_vec_matrix(a.part[0], pairs.expert[i / per_row]) +
                       i % per_row * FORM::block_bytes;
    }
}

/* Pack the h of the pairs behind one another, weighted. */
template <class FORM>
SL_DEV void sl_experts_vec_pack_h(const struct sl_experts_vec_args &a,
                                  const sl_experts_vec_pairs &pairs, uint8_t *levels)
{
    const int lane = (int)threadIdx.x & 31;
    const int n_all = pairs.n * a.n_cols; /* a multiple of 32 */
    struct sl_xblock *blocks =
        (struct sl_xblock *)(levels + sl_vec_x_stride(a.order.n_used * a.n_cols));
    for (int base = (int)threadIdx.x - lane; base < n_all / 4; base += FORM::threads) {
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

template <class FORM>
__global__ void __launch_bounds__(FORM::threads, 1)
    sl_experts_vec_down_kernel(SL_KERNEL_ARG struct sl_experts_vec_args a)
{
    SL_SHARED(shared);
    sl_experts_vec_pairs *pairs = (sl_experts_vec_pairs *)(shared + a.pairs_at);
    const uint8_t **addresses = (const uint8_t **)(shared + a.addresses_at);
    sl_let_follow();
    /* The logits, or ids and weights, are older than the kernel ahead, sl_experts_vec_up_kernel,
     * which has waited for what made them before it let this one follow: they lie in L2 already,
     * and the first weights can be on their way while h is still being made. */
    if (threadIdx.x < 32) {
        sl_experts_vec_find(a, pairs, (float *)(shared + a.p_at), false);
    }
    sl_block_sync();
    sl_experts_vec_addresses<FORM>(a, *pairs, addresses);
    sl_block_sync();
    FORM form;
    form.prepare();
    sl_experts_vec_down_rows<FORM> rows(a, *pairs, (float *)(shared + a.sums_at), addresses);
    sl_vec_stream<FORM, 1>(form, rows, pairs->n * (a.n_cols / 32), a.split.n_chunks, [&]() {
        sl_await_ahead();
        sl_experts_vec_pack_h<FORM>(a, *pairs, shared);
        sl_block_sync();
        form.set_x(shared, a.order.n_used * a.n_cols);
    });
    sl_block_sync();
    rows.finish();
}

/* ---- launches ---- */

/* Places of shared memory behind x of `n_cols`; returns how much there is. */
template <class FORM>
static inline size_t sl_experts_vec_lay_out(struct sl_experts_vec_args *a, int n_cols,
                                            int n_block_rows, int n_addresses)
{
    const int pieces = n_block_rows > FORM::warps ? n_block_rows : FORM::warps;
    a->sums_at = (sl_vec_packed_bytes(n_cols, 1) + 15) & ~15;
    a->pairs_at = (a->sums_at + pieces * 4 + 15) & ~15;
    a->p_at = (a->pairs_at + (int)sizeof(struct sl_experts_vec_pairs) + 15) & ~15;
    a->addresses_at = (a->p_at + (a->router.logits ? a->router.n : 0) * 4 + 15) & ~15;
    return (size_t)a->addresses_at + (size_t)n_addresses * sizeof(void *);
}

/* Blocks for each token. */
static inline int sl_experts_vec_blocks(const struct sl_experts_vec_args *a,
                                        const struct sl_cuda_props *props)
{
    const int n = props->n_sm / a->n_tokens;
    return n > 1 ? n : 1;
}

/* Whether both launches have room in shared memory, whatever the types: an upper bound. */
static inline bool sl_experts_vec_fits(const struct sl_op *op, const struct sl_op *router,
                                       const struct sl_cuda_props *props)
{
    using form = sl_vec_packed<SL_TYPE_Q4_0, 1>;
    const struct sl_op_experts *e = &op->experts;
    struct sl_experts_vec_args a;
    memset(&a, 0, sizeof(a));
    a.n_tokens = op->n_tokens;
    a.router.n = router ? (int32_t)router->router.w.n_rows : 0;
    const int64_t n_blocks = sl_experts_vec_blocks(&a, props);
    const int64_t up_rows = 2 * (e->n_used * e->gate.n_rows / n_blocks + 1);
    const int64_t down_rows = e->down.n_rows / n_blocks + 1;
    const int64_t n_h = e->n_used * e->down.n_cols;
    if (e->gate.n_cols > INT32_MAX / 8 || n_h > INT32_MAX / 8 || up_rows > INT32_MAX / 8) {
        return false;
    }
    const size_t up =
        sl_experts_vec_lay_out<form>(&a, (int)e->gate.n_cols, (int)up_rows, a.router.n);
    const size_t down =
        sl_experts_vec_lay_out<form>(&a, (int)n_h, (int)down_rows, (int)(n_h / 32) + a.router.n);
    return (up > down ? up : down) <= props->max_shared_bytes;
}

template <int TYPE>
static int sl_experts_vec_up(cudaStream_t stream, struct sl_experts_vec_args *a,
                             const struct sl_cuda_props *props)
{
    using form = sl_vec_packed<TYPE, 1>;
    const int n_blocks = sl_experts_vec_blocks(a, props);
    const int rows = 2 * ((a->order.n_used * a->n_rows + n_blocks - 1) / n_blocks);
    const size_t shared = sl_experts_vec_lay_out<form>(a, a->n_cols, rows, 0);
    a->split = sl_vec_split_rows(a->n_cols / 32, rows, form::warps);
    if (shared > props->max_shared_bytes) {
        return SL_CUDA_UNSUPPORTED;
    }
    return SL_FOLLOW((sl_experts_vec_up_kernel<form>),
                     dim3((unsigned)n_blocks, (unsigned)a->n_tokens), dim3(form::threads), shared,
                     stream, props, *a);
}

template <int TYPE>
static int sl_experts_vec_down(cudaStream_t stream, struct sl_experts_vec_args *a,
                               const struct sl_cuda_props *props)
{
    using form = sl_vec_packed<TYPE, 1>;
    const int n_blocks = sl_experts_vec_blocks(a, props);
    const int rows = (a->n_rows + n_blocks - 1) / n_blocks;
    const int n_cols = a->order.n_used * a->n_cols;
    const size_t shared =
        sl_experts_vec_lay_out<form>(a, n_cols, rows, n_cols / (32 * form::per_block));
    a->split = sl_vec_split_rows(n_cols / 32, rows, form::warps);
    if (shared > props->max_shared_bytes) {
        return SL_CUDA_UNSUPPORTED;
    }
    return SL_FOLLOW((sl_experts_vec_down_kernel<form>),
                     dim3((unsigned)n_blocks, (unsigned)a->n_tokens), dim3(form::threads), shared,
                     stream, props, *a);
}

#endif
