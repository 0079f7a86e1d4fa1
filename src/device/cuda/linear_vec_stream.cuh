/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrix times a few vectors: the stream of weights, the same for all types.
 *
 * What bounds a product of one token is memory, if the instructions for every byte are few enough.
 * So a warp stays with one piece of the columns, P chunks of 32 units: where its lanes' units and
 * their x lie is known once and for all, and with one token x is kept in registers while the rows
 * go by. The warps that share a piece take the rows in turn; the pieces' sums of a row meet in
 * shared memory at the end, where all that has to be done to them (bias, gate, what y held) is done
 * by all threads at once.
 *
 *   warp w: piece w % n_pieces of rows w / n_pieces, + n_groups, + 2 n_groups ...
 *
 * P * R units of a lane are on their way at any time: a unit's successor, R rows on, is asked for
 * as soon as the unit is used up. The first are asked for before x is there, before the kernel
 * ahead has ended even (launch.cuh). The last piece begins early enough to be whole; units that it
 * shares with the one before do not count there, nor do those behind a row of less than a chunk.
 */
#ifndef SL_DEVICE_CUDA_LINEAR_VEC_STREAM_CUH
#define SL_DEVICE_CUDA_LINEAR_VEC_STREAM_CUH

#include "device/cuda/linear_vec.cuh"

/* How the warps of a block share its rows. */
struct sl_vec_share {
    int n_pieces;
    int n_groups; /* of warps that take rows together */
};

/* ---- a warp's way through its rows ---- */

/* Sums over the warp of R rows at once, for the price of hardly more than one: at every step half
 * of the lanes go on with half of the rows. A lane ends up with the sum of row sl_vec_row_of_lane.
 */
template <int R> SL_DEV float sl_vec_sum_rows(const float sum[R])
{
    static_assert(R == 1 || R == 2 || R == 4, "rows");
    const int lane = (int)threadIdx.x & 31;
    float v = sum[0];
    int mask = 16;
    if constexpr (R == 2) {
        const bool high = (lane & 16) != 0;
        v = (high ? sum[1] : sum[0]) + sl_shfl_xor(high ? sum[0] : sum[1], 16);
        mask = 8;
    } else if constexpr (R == 4) {
        const bool high = (lane & 16) != 0;
        const float a = (high ? sum[2] : sum[0]) + sl_shfl_xor(high ? sum[0] : sum[2], 16);
        const float b = (high ? sum[3] : sum[1]) + sl_shfl_xor(high ? sum[1] : sum[3], 16);
        const bool odd = (lane & 8) != 0;
        v = (odd ? b : a) + sl_shfl_xor(odd ? a : b, 8);
        mask = 4;
    }
    for (; mask; mask >>= 1) {
        v += sl_shfl_xor(v, mask);
    }
    return v;
}

template <int R> SL_DEV int sl_vec_row_of_lane(void)
{
    return ((int)threadIdx.x & 31) * R / 32;
}

/* FORM says what a unit is and how it meets x. `rows` knows where units are:
 *   left             rows that are still to be loaded
 *   unit(k)          address of the lane's unit of chunk k in the next row to load; unit8(k) the
 * same brought down to a multiple of 8, low(k) its low bits is_last()        whether that row is
 * the last of its matrix: loads must not go past end(k) advance()        go on to the row after
 *   close(i, t, sum) the sum of the warp's row number i for token t
 *   valid(k)         whether chunk k of the lane counts
 * make_x is called by the whole block once the first loads are queued. */
template <class FORM, int P, int R, class ROWS, class MAKE_X>
SL_DEV void sl_vec_run(ROWS &rows, MAKE_X make_x)
{
    constexpr int N = FORM::tokens;
    uint32_t raw[R][P][FORM::n];
    uint32_t low[R][P]; /* of the units' addresses: how far from aligned */
    const int n_rows = rows.left;
    const typename FORM::lane lane = FORM::make_lane();
    auto load = [&](int r, int k, bool last) {
        const sl_mem_global mem = {last ? rows.end(k) : (const uint8_t *)UINTPTR_MAX};
        FORM::load(raw[r][k], rows.unit(k), rows.unit8(k), lane, mem, last);
        low[r][k] = rows.low(k);
    };
#pragma unroll
    for (int r = 0; r < R; r++) {
        if (rows.left > 0) {
            const bool last = rows.is_last();
#pragma unroll
            for (int k = 0; k < P; k++) {
                load(r, k, last);
            }
            rows.advance();
        }
    }
    typename FORM::template x_piece<P> x;
    make_x(x, lane);
    for (int i = 0; i < n_rows; i += R) {
        float sum[N][R] = {};
#pragma unroll
        for (int r = 0; r < R; r++) {
            if (i + r >= n_rows) {
                break;
            }
            const bool more = rows.left > 0;
            const bool last = more && rows.is_last();
            const bool plain = more && !last;
#pragma unroll
            for (int k = 0; k < P; k++) {
                float v[N];
                FORM::template dot<P>(raw[r][k], (const uint8_t *)(uintptr_t)low[r][k], lane, x, k,
                                      v);
#pragma unroll
                for (int t = 0; t < N; t++) {
                    sum[t][r] += rows.valid(k) ? v[t] : 0.0f;
                }
                if (plain) {
                    load(r, k, false);
                }
            }
            if (last) {
#pragma unroll
                for (int k = 0; k < P; k++) {
                    load(r, k, true);
                }
            }
            if (more) {
                rows.advance();
            }
        }
        const int mine = i + sl_vec_row_of_lane<R>();
#pragma unroll
        for (int t = 0; t < N; t++) {
            const float total = sl_vec_sum_rows<R>(sum[t]);
            if (mine < n_rows) {
                rows.close(mine, t, total);
            }
        }
    }
}

/* What all kinds of rows share: who the warp is, and the sums in shared memory. */
template <class FORM, int P> struct sl_vec_rows_base {
    struct sl_vec_share share;
    float *sums; /* [rows of the block][tokens][pieces] */
    int piece, group;
    int left;
    bool counts[P];

    SL_DEV_MEMBER void init(struct sl_vec_share share_, float *sums_, int n_rows)
    {
        const int warp = (int)threadIdx.x >> 5;
        share = share_;
        sums = sums_;
        piece = warp % share.n_pieces;
        group = warp / share.n_pieces;
        left = group < n_rows ? (n_rows - group + share.n_groups - 1) / share.n_groups : 0;
    }

    /* The lane's unit of chunk 0 in a row of n_units. */
    SL_DEV_MEMBER int first_unit(int n_units)
    {
        const int lane = (int)threadIdx.x & 31;
        const int begin = 32 * P * piece;
        const int late = n_units - 32 * P;
        const int first = begin <= late ? begin : late > 0 ? late : 0;
#pragma unroll
        for (int k = 0; k < P; k++) {
            const int unit = first + 32 * k + lane;
            counts[k] = unit >= begin && unit < n_units;
        }
        /* Rows of less than a chunk: behind their end the last unit is loaded again. */
        return first + lane < n_units ? first + lane : n_units - 1;
    }

    SL_DEV_MEMBER bool valid(int k) const
    {
        return counts[k];
    }

    /* Several lanes say the same. */
    SL_DEV_MEMBER void close(int i, int token, float sum)
    {
        const int q = group + i * share.n_groups;
        sums[(q * FORM::tokens + token) * share.n_pieces + piece] = sum;
    }

    /* The sum of row q of the block, after a barrier behind the run. */
    SL_DEV_MEMBER float total(int q, int token) const
    {
        float v = 0.0f;
        for (int p = 0; p < share.n_pieces; p++) {
            v += sums[(q * FORM::tokens + token) * share.n_pieces + p];
        }
        return v;
    }
};

SL_DEV int sl_vec_tiles_of_block(int n_tiles)
{
    return (n_tiles - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
}

/* ---- rows of a plain product ---- */

/* Row q of the block is row tile q * gridDim.x + blockIdx.x; a gated product has the gate's rows
 * first, then up's. */
template <class FORM, int P> struct sl_vec_rows : sl_vec_rows_base<FORM, P> {
    const struct sl_linear_args &a;
    int n_tiles; /* of the block */
    int unit0;
    int tile, limit, last; /* next row to load; where its part ends; the last row of its matrix */
    int part;
    int step; /* tiles from row to row */
    int64_t step_bytes;
    const uint8_t *at;

    SL_DEV_MEMBER sl_vec_rows(const struct sl_linear_args &args, struct sl_vec_share share_,
                              float *sums_)
        : a(args)
    {
        n_tiles = sl_vec_tiles_of_block(args.n_tiles);
        this->init(share_, sums_, args.activation != SL_ACT_NONE ? 2 * n_tiles : n_tiles);
        unit0 = this->first_unit(args.n_cols / FORM::items);
        step = share_.n_groups * (int)gridDim.x;
        step_bytes = step * args.row_bytes;
        tile = this->group * (int)gridDim.x + (int)blockIdx.x;
        part = -1;
        if (this->left > 0) {
            locate();
        }
    }

    /* `tile` has left its part. */
    SL_DEV_MEMBER void locate()
    {
        const bool gated = a.activation != SL_ACT_NONE;
        if (!gated) {
            part = sl_part_of_tile(a, tile);
        } else if (tile >= a.n_tiles) {
            part = 1;
            tile -= n_tiles * (int)gridDim.x;
        } else {
            part = 0;
        }
        const struct sl_linear_part &p = a.part[part];
        at = p.w + (tile - p.first) * a.row_bytes + unit0 / FORM::per_block * FORM::block_bytes;
        limit = gated && part == 1 ? INT32_MAX : p.first + p.n_rows;
        last = p.first + p.n_rows - 1;
    }

    /* Chunks are a multiple of 8 bytes: what is odd is the same for all. */
    static constexpr int chunk_bytes = 32 / FORM::per_block * FORM::block_bytes;
    static_assert(chunk_bytes % 8 == 0, "chunks");

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
        return FORM::reads_past && tile == last;
    }

    SL_DEV_MEMBER const uint8_t *end(int) const
    {
        return a.part[part].end;
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

    SL_DEV_MEMBER void finish() const
    {
        for (int i = (int)threadIdx.x; i < n_tiles * FORM::tokens; i += (int)blockDim.x) {
            const int q = i / FORM::tokens;
            const int token = i % FORM::tokens;
            const int t = q * (int)gridDim.x + (int)blockIdx.x;
            if (token >= a.n_tokens) {
                continue;
            }
            if (a.activation != SL_ACT_NONE) {
                sl_store_gated(a, token, t, this->total(q, token), this->total(n_tiles + q, token));
            } else {
                const int p = sl_part_of_tile(a, t);
                sl_store_y(a, a.part[p], token, t - a.part[p].first, this->total(q, token));
            }
        }
    }
};

/* ---- the kernel ---- */

/* Shared memory: | x | factors of the norm | sums |. Bytes of the first two. */
template <class FORM> SL_HD int sl_vec_x_bytes(int n_cols)
{
    const int x_bytes = FORM::items == 32 ? sl_vec_packed_bytes(n_cols, FORM::tokens)
                                          : sl_vec_float_bytes(n_cols, FORM::tokens);
    return x_bytes + SL_VEC_NORM_FLOATS(FORM::tokens) * 4;
}

/* Make x in shared memory. Whole block. */
template <class FORM>
SL_DEV void sl_vec_make_x(const struct sl_linear_args &a, uint8_t *shared, float *scales)
{
    constexpr int N = FORM::tokens;
    sl_vec_prefetch_norm(a);
    sl_await_ahead();
    if (a.norm.on) {
        sl_vec_norm_x<N>(a, scales);
    }
    if constexpr (FORM::items != 32) {
        sl_vec_keep_x<N>(a, (float *)shared, scales);
    } else {
        struct sl_xblock *blocks = (struct sl_xblock *)(shared + N * sl_vec_x_stride(a.n_cols));
        if (a.x_packed) {
            sl_vec_copy_x<N>(a, shared, blocks);
        } else {
            sl_vec_pack_x<N>(a, shared, blocks, scales);
        }
    }
    sl_block_sync();
}

template <class FORM, int P, int R>
SL_DEV void sl_vec_product(const struct sl_linear_args &a, struct sl_vec_share share)
{
    SL_SHARED(shared);
    const int sums_at = sl_vec_x_bytes<FORM>(a.n_cols);
    float *scales = (float *)(shared + sums_at) - SL_VEC_NORM_FLOATS(FORM::tokens);
    sl_vec_rows<FORM, P> rows(a, share, (float *)(shared + sums_at));
    sl_vec_run<FORM, P, R>(
        rows, [&](typename FORM::template x_piece<P> &x, const typename FORM::lane &lane) {
            sl_vec_make_x<FORM>(a, shared, scales);
            FORM::template take_x<P>(x, shared, a.n_cols, rows.unit0, lane);
        });
    sl_block_sync();
    rows.finish();
}

template <class FORM, int P, int R>
__global__ void __launch_bounds__(32 * FORM::max_warps, 1)
    sl_vec_kernel(SL_KERNEL_ARG struct sl_linear_args a, const struct sl_vec_share share)
{
    sl_let_follow();
    sl_vec_product<FORM, P, R>(a, share);
}

/* Chunks of a piece, `most` at most: a power of two, whatever loads the least twice; 0: rows are
 * too long. */
static inline int sl_vec_piece_chunks(int n_units, int most, int max_warps)
{
    int best = 0;
    int64_t best_units = INT64_MAX;
    for (int p = most; p >= 1; p /= 2) {
        const int64_t n_pieces = (n_units + 32 * p - 1) / (32 * p);
        const bool whole = n_units >= 32 * p || p == 1;
        if (whole && n_pieces <= max_warps && n_pieces * 32 * p < best_units) {
            best = p;
            best_units = n_pieces * 32 * p;
        }
    }
    return best;
}

/* All warps busy, and as many rows for each group as for every other. */
static inline struct sl_vec_share sl_vec_share_rows(int n_units, int p, int rows, int max_warps)
{
    struct sl_vec_share share;
    share.n_pieces = (n_units + 32 * p - 1) / (32 * p);
    const int most = max_warps / share.n_pieces;
    const int rounds = (rows + most - 1) / most;
    share.n_groups = rounds > 0 ? (rows + rounds - 1) / rounds : 1;
    return share;
}

/* Rows of a block, at most. */
static inline int sl_vec_block_rows(const struct sl_linear_args *args, int n_blocks)
{
    const int tiles = (args->n_tiles + n_blocks - 1) / n_blocks;
    return args->activation != SL_ACT_NONE ? 2 * tiles : tiles;
}

/* Shared memory of a launch; 0: not for this kernel. */
template <class FORM>
static inline size_t sl_vec_shared_bytes(const struct sl_linear_args *args,
                                         const struct sl_cuda_props *props)
{
    const int n_units = args->n_cols / FORM::items;
    const int p = sl_vec_piece_chunks(n_units, FORM::max_piece, FORM::max_warps);
    if (p == 0) {
        return 0;
    }
    const int n_blocks = args->n_tiles < props->n_sm ? args->n_tiles : props->n_sm;
    const int64_t n_pieces = (n_units + 32 * p - 1) / (32 * p);
    return (size_t)sl_vec_x_bytes<FORM>(args->n_cols) +
           (size_t)(sl_vec_block_rows(args, n_blocks) * n_pieces) * FORM::tokens * sizeof(float);
}

template <class FORM, int P, int R>
static int sl_vec_launch_piece(cudaStream_t stream, const struct sl_linear_args *args,
                               size_t shared, const struct sl_cuda_props *props)
{
    const int n_blocks = args->n_tiles < props->n_sm ? args->n_tiles : props->n_sm;
    const struct sl_vec_share share = sl_vec_share_rows(
        args->n_cols / FORM::items, P, sl_vec_block_rows(args, n_blocks), FORM::max_warps);
    return SL_FOLLOW((sl_vec_kernel<FORM, P, R>), dim3((unsigned)n_blocks),
                     dim3((unsigned)(32 * share.n_pieces * share.n_groups)), shared, stream, props,
                     *args, share);
}

template <class FORM>
static int sl_vec_launch(cudaStream_t stream, const struct sl_linear_args *args,
                         const struct sl_cuda_props *props)
{
    const size_t shared = sl_vec_shared_bytes<FORM>(args, props);
    if (shared == 0 || shared > props->max_shared_bytes) {
        return SL_CUDA_UNSUPPORTED;
    }
    switch (sl_vec_piece_chunks(args->n_cols / FORM::items, FORM::max_piece, FORM::max_warps)) {
    case 4:
        if constexpr (FORM::max_piece == 4) {
            return sl_vec_launch_piece<FORM, 4, 1>(stream, args, shared, props);
        }
        return SL_CUDA_UNSUPPORTED;
    case 2:
        return sl_vec_launch_piece<FORM, 2, 2>(stream, args, shared, props);
    default:
        return sl_vec_launch_piece<FORM, 1, 4>(stream, args, shared, props);
    }
}

#endif
