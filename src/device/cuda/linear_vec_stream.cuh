/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrix times a few vectors: the stream of weights, the same for all types.
 *
 * One block of up to 32 warps stays on every multiprocessor, so that x is made once there. A warp
 * takes whole rows, or a half or quarter of each where there are few of them; a row is chunks of 32
 * units, one a lane. `slots` units of a lane are under way in registers at any time, across row
 * ends too: what a slot held is used up, then its next load is queued. The first loads are queued
 * before x is there, before the kernel ahead has ended even (launch.cuh), so that memory idles
 * neither between kernels nor while x is made.
 *
 * Sums of finished rows wait in shared memory. What has to be done to them (bias, gate, what y
 * held) is done at the end by all threads at once: at every row's end it would be a stall.
 */
#ifndef SL_DEVICE_CUDA_LINEAR_VEC_STREAM_CUH
#define SL_DEVICE_CUDA_LINEAR_VEC_STREAM_CUH

#include "device/cuda/linear_vec.cuh"

/* ---- the stream ---- */

/* How the rows of a block are numbered for its warps: `at` counts pieces of rows of tiles. */
struct sl_vec_split {
    int n_chunks; /* of a piece */
    int shift;    /* log2 of the pieces of a row */
};

/* Pieces so that all warps have something to do, none without a chunk. */
static inline struct sl_vec_split sl_vec_split_rows(int n_units, int rows, int warps)
{
    const int n_chunks = (n_units + 31) / 32;
    struct sl_vec_split split = {n_chunks, 0};
    while (split.shift < 2 && rows << (split.shift + 1) <= warps && split.n_chunks > 1) {
        split.shift++;
        split.n_chunks = (n_chunks + (1 << split.shift) - 1) >> split.shift;
    }
    return split;
}

/* Go through the pieces of a warp. FORM says what a unit is. `rows` knows where they are:
 *   n               how many pieces
 *   first_chunk(i)  where piece i begins in its row
 *   open(i)         set `block` to the lane's unit of that chunk, and `end`, `near_end`
 *   next()          set `block` to the lane's unit of the next chunk
 *   close(i, sum)   the piece's sums, the same in all lanes
 * `make_x` is called by the whole block once the first loads are queued. */
template <class FORM, int N, class ROWS, class MAKE_X>
SL_DEV void sl_vec_stream(FORM &form, ROWS &rows, int n_units, int n_chunks, MAKE_X make_x)
{
    const int lane = (int)threadIdx.x & 31;
    uint32_t raw[FORM::slots][FORM::n];
    uint32_t low[FORM::slots]; /* bits of the units' addresses: how far from aligned */
    int ahead = 0, ahead_chunk = 0, ahead_unit = 0;
    auto open = [&]() {
        if (ahead < rows.n) {
            ahead_unit = 32 * rows.first_chunk(ahead) + lane;
            rows.open(ahead);
        }
    };
    auto load = [&](int j) {
        if (ahead >= rows.n) {
            return;
        }
        if (ahead_unit < n_units) {
            const sl_mem_global mem = {rows.end};
            form.load(raw[j], rows.block, mem, FORM::covers && rows.near_end);
            low[j] = (uint32_t)(uintptr_t)rows.block;
        }
        if (++ahead_chunk < n_chunks) {
            ahead_unit += 32;
            rows.next();
        } else {
            ahead_chunk = 0;
            ahead++;
            open();
        }
    };
    open();
#pragma unroll
    for (int j = 0; j < FORM::slots; j++) {
        load(j);
    }
    make_x();
    float sum[N] = {};
    int i = 0, left = n_chunks;
    int chunk = rows.n > 0 ? rows.first_chunk(0) : 0;
    while (i < rows.n) {
#pragma unroll
        for (int j = 0; j < FORM::slots; j++) {
            if (i >= rows.n) {
                break;
            }
            if (32 * chunk + lane < n_units) {
                form.add(raw[j], (const uint8_t *)(uintptr_t)low[j], chunk, sum);
            }
            load(j);
            chunk++;
            if (--left == 0) {
#pragma unroll
                for (int n = 0; n < N; n++) {
#pragma unroll
                    for (int mask = 16; mask; mask >>= 1) {
                        sum[n] += sl_shfl_xor(sum[n], mask);
                    }
                }
                rows.close(i, sum);
#pragma unroll
                for (int n = 0; n < N; n++) {
                    sum[n] = 0.0f;
                }
                left = n_chunks;
                chunk = rows.first_chunk(++i);
            }
        }
    }
}

/* ---- pieces of a block ---- */

/* What all kinds of rows share: the numbering, and the sums in shared memory. Row q of the block
 * has pieces q << shift and on; a gated tile is two rows, the gate's and up's. Tiles of a block lie
 * gridDim.x apart: all blocks have as many but for one. */
template <class FORM, int N> struct sl_vec_pieces {
    struct sl_vec_split split;
    float *sums; /* [rows of the block][pieces][N] */
    int n;
    const uint8_t *block, *end;
    bool near_end;

    SL_DEV_MEMBER void init(struct sl_vec_split split_, float *sums_, int n_rows)
    {
        const int warp = (int)threadIdx.x >> 5;
        const int n_pieces = n_rows << split_.shift;
        split = split_;
        sums = sums_;
        n = warp < n_pieces ? (n_pieces - warp + FORM::warps - 1) / FORM::warps : 0;
        block = end = NULL;
        near_end = false;
    }

    SL_DEV_MEMBER int piece(int i) const
    {
        return ((int)threadIdx.x >> 5) + i * FORM::warps;
    }

    SL_DEV_MEMBER int row(int i) const
    {
        return piece(i) >> split.shift;
    }

    SL_DEV_MEMBER int first_chunk(int i) const
    {
        return (piece(i) & ((1 << split.shift) - 1)) * split.n_chunks;
    }

    SL_DEV_MEMBER void close(int i, const float sum[N])
    {
#pragma unroll
        for (int t = 0; t < N; t++) {
            if (((int)threadIdx.x & 31) == t) {
                sums[piece(i) * N + t] = sum[t];
            }
        }
    }

    /* The sum of row q, after a barrier behind the stream. */
    SL_DEV_MEMBER float total(int q, int token) const
    {
        float v = 0.0f;
        for (int s = 0; s < 1 << split.shift; s++) {
            v += sums[((q << split.shift) + s) * N + token];
        }
        return v;
    }
};

SL_DEV int sl_vec_tiles_of_block(int n_tiles)
{
    return (n_tiles - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
}

/* ---- rows of a plain product ---- */

template <class FORM, int N> struct sl_vec_rows : sl_vec_pieces<FORM, N> {
    const struct sl_linear_args &a;
    int n_tiles; /* of the block */

    SL_DEV_MEMBER sl_vec_rows(const struct sl_linear_args &args, struct sl_vec_split split_,
                              float *sums_)
        : a(args)
    {
        n_tiles = sl_vec_tiles_of_block(args.n_tiles);
        this->init(split_, sums_, args.activation != SL_ACT_NONE ? 2 * n_tiles : n_tiles);
    }

    SL_DEV_MEMBER void open(int i)
    {
        const bool gated = a.activation != SL_ACT_NONE;
        const int q = this->row(i);
        const int tile = (gated ? q >> 1 : q) * (int)gridDim.x + (int)blockIdx.x;
        const int p = gated ? q & 1 : sl_part_of_tile(a, tile);
        const int r = tile - a.part[p].first;
        const int unit = 32 * this->first_chunk(i) + ((int)threadIdx.x & 31);
        this->block = a.part[p].w + r * a.row_bytes + unit / FORM::per_block * FORM::block_bytes;
        this->end = a.part[p].end;
        this->near_end = r == a.part[p].n_rows - 1;
    }

    SL_DEV_MEMBER void next()
    {
        this->block += 32 / FORM::per_block * FORM::block_bytes;
    }

    /* All rows are done: to y. */
    SL_DEV_MEMBER void finish() const
    {
        for (int i = (int)threadIdx.x; i < n_tiles * N; i += FORM::threads) {
            const int q = i / N;
            const int token = i % N;
            const int tile = q * (int)gridDim.x + (int)blockIdx.x;
            if (token >= a.n_tokens) {
                continue;
            }
            if (a.activation != SL_ACT_NONE) {
                sl_store_gated(a, token, tile, this->total(2 * q, token),
                               this->total(2 * q + 1, token));
            } else {
                const int p = sl_part_of_tile(a, tile);
                sl_store_y(a, a.part[p], token, tile - a.part[p].first, this->total(q, token));
            }
        }
    }
};

/* ---- the kernel ---- */

/* Shared memory: | x | factors of the norm | sums |. Bytes of the first two. */
template <class FORM, int N> SL_HD int sl_vec_x_bytes(int n_cols)
{
    const int x_bytes =
        FORM::items == 32 ? sl_vec_packed_bytes(n_cols, N) : sl_vec_float_bytes(n_cols, N);
    return x_bytes + SL_VEC_NORM_FLOATS(N) * 4;
}

template <class FORM, int N>
SL_DEV void sl_vec_product(const struct sl_linear_args &a, struct sl_vec_split split)
{
    SL_SHARED(shared);
    const int sums_at = sl_vec_x_bytes<FORM, N>(a.n_cols);
    float *scales = (float *)(shared + sums_at) - SL_VEC_NORM_FLOATS(N);
    FORM form;
    form.prepare();
    sl_vec_rows<FORM, N> rows(a, split, (float *)(shared + sums_at));
    sl_vec_stream<FORM, N>(form, rows, a.n_cols / FORM::items, split.n_chunks, [&]() {
        sl_vec_prefetch_norm<FORM::threads>(a);
        sl_await_ahead();
        if (a.norm.on) {
            sl_vec_norm_x<N, FORM::threads>(a, scales);
        }
        if constexpr (FORM::items != 32) {
            sl_vec_keep_x<N, FORM::threads>(a, (float *)shared, scales);
        } else {
            struct sl_xblock *blocks = (struct sl_xblock *)(shared + N * sl_vec_x_stride(a.n_cols));
            if (a.x_packed) {
                sl_vec_copy_x<N, FORM::threads>(a, shared, blocks);
            } else {
                sl_vec_pack_x<N, FORM::threads>(a, shared, blocks, scales);
            }
        }
        sl_block_sync();
        form.set_x(shared, a.n_cols);
    });
    sl_block_sync();
    rows.finish();
}

template <class FORM, int N>
__global__ void __launch_bounds__(FORM::threads, 1)
    sl_vec_kernel(SL_KERNEL_ARG struct sl_linear_args a, const struct sl_vec_split split)
{
    sl_let_follow();
    sl_vec_product<FORM, N>(a, split);
}

/* Rows of a block, at most. */
static inline int sl_vec_block_rows(const struct sl_linear_args *args, int n_blocks)
{
    const int tiles = (args->n_tiles + n_blocks - 1) / n_blocks;
    return args->activation != SL_ACT_NONE ? 2 * tiles : tiles;
}

/* Shared memory of a launch. Rows are split only where they are few. */
template <class FORM, int N>
static inline size_t sl_vec_shared_bytes(const struct sl_linear_args *args, int n_blocks)
{
    const int rows = sl_vec_block_rows(args, n_blocks);
    const int pieces = rows > FORM::warps ? rows : FORM::warps;
    return (size_t)sl_vec_x_bytes<FORM, N>(args->n_cols) + (size_t)pieces * N * sizeof(float);
}

template <class FORM, int N>
static int sl_vec_launch(cudaStream_t stream, const struct sl_linear_args *args,
                         const struct sl_cuda_props *props)
{
    const int n_blocks = args->n_tiles < props->n_sm ? args->n_tiles : props->n_sm;
    const size_t shared = sl_vec_shared_bytes<FORM, N>(args, n_blocks);
    if (shared > props->max_shared_bytes) {
        return SL_CUDA_UNSUPPORTED;
    }
    const struct sl_vec_split split = sl_vec_split_rows(
        args->n_cols / FORM::items, sl_vec_block_rows(args, n_blocks), FORM::warps);
    return SL_FOLLOW((sl_vec_kernel<FORM, N>), dim3((unsigned)n_blocks), dim3(FORM::threads),
                     shared, stream, props, *args, split);
}

#endif
