/* SPDX-License-Identifier: Apache-2.0
 *
 * What the kernels of a mixture's experts share. The (token, expert) pairs lie sorted by expert;
 * the place of a pair in that order is its position. A tile is up to `tile_tokens` neighbouring
 * positions of one expert. To a product a tile is a small matrix product of its own: its packed
 * inputs lie together (layouts of linear_args.cuh for `n` tokens, at position times x_stride), its
 * outputs are rows of y by position. So the tile code of linear_mid and linear_gemm serves as it
 * is: a block finds its tile, fills in struct sl_linear_args and goes on as for any product.
 *
 * Which tiles there are is known on the device alone. Grids hold the most there can be; blocks
 * without a tile return. Few tokens are not sorted ("direct"): every pair is a tile.
 * Positions are worked in chunks [begin, end); tiles do not cross their borders.
 */
#ifndef SL_DEVICE_CUDA_EXPERTS_CUH
#define SL_DEVICE_CUDA_EXPERTS_CUH

#include "device/cuda/linear_args.cuh"

#define SL_EXPERTS_NOWHERE INT32_MAX /* `first` and tile numbers of what does not exist */

struct sl_experts_tile {
    int32_t expert; /* counted from the op's first */
    int32_t first;  /* position */
    int32_t n;
    int32_t unused;
};

/* The order of the pairs. */
struct sl_experts_order {
    const int32_t *ids;
    const void *const *table;      /* of one of the matrices, or NULL: which experts are here */
    struct sl_experts_tile *tiles; /* [n_pairs], those that do not exist at the end */
    int32_t *tile_of;              /* [n_pairs] by position */
    int32_t *pair_at;              /* [n_pairs] by position */
    int32_t *position;             /* [n_pairs] by pair; negative: left out */
    int32_t *group_first;          /* [n] */
    int32_t *group_tile;           /* [n] */
    int32_t n_pairs, n_used;
    int32_t first, n; /* experts */
    int32_t tile_tokens, chunk;
    bool direct;
};

struct sl_experts_part {
    const uint8_t *data;
    const void *const *table;
    const float *bias;
    int64_t bytes; /* of an expert's matrix */
};

/* A product over the tiles of a chunk. With an activation part 0 is gate and part 1 up. */
struct sl_experts_args {
    struct sl_experts_order order;
    struct sl_experts_part part[2];
    const uint8_t *xs;
    float *y; /* [end - begin, n_rows] */
    int64_t x_stride, row_bytes;
    int32_t x_share; /* pairs that share an input row (direct: the pairs of a token), else 1 */
    int32_t begin, end;
    int32_t n_rows, n_cols;
    int32_t n_tiles; /* row tiles */
    int32_t most;    /* tiles there can be */
    int32_t activation;
};

/* By type: 0, a cudaError_t or SL_CUDA_UNSUPPORTED. _f: F16 and BF16; _plain: float types in
 * float, whatever the alignment. */
int sl_experts_mid_q(cudaStream_t stream, int type, const struct sl_experts_args *args);
int sl_experts_mid_k(cudaStream_t stream, int type, const struct sl_experts_args *args);
int sl_experts_mid_f(cudaStream_t stream, int type, const struct sl_experts_args *args);
int sl_experts_plain(cudaStream_t stream, int type, const struct sl_experts_args *args);
int sl_experts_gemm_q(cudaStream_t stream, int type, const struct sl_experts_args *args);
int sl_experts_gemm_k(cudaStream_t stream, int type, const struct sl_experts_args *args);
int sl_experts_gemm_f(cudaStream_t stream, int type, const struct sl_experts_args *args);

/* Make the order on the device; nothing to do for a direct one. */
int sl_experts_sort(cudaStream_t stream, const struct sl_experts_order *order);

/* The expert of an id, counted from the first, or -1: not here. */
SL_DEV int sl_experts_here(const struct sl_experts_order &o, int id)
{
    /* Unsigned: ids are whatever a router made of its numbers. */
    const uint32_t e = (uint32_t)id - (uint32_t)o.first;
    if (e >= (uint32_t)o.n || (o.table && !o.table[e])) {
        return -1;
    }
    return (int)e;
}

/* Tile `i` of a chunk. */
SL_DEV bool sl_experts_find(const struct sl_experts_order &o, int begin, int end, int i,
                            sl_experts_tile &tile)
{
    if (o.direct) {
        tile.expert = sl_experts_here(o, o.ids[begin + i]);
        tile.first = begin + i;
        tile.n = 1;
        return tile.expert >= 0;
    }
    const int first = o.tile_of[begin];
    if (first >= o.n_pairs - i) {
        return false;
    }
    tile = o.tiles[first + i];
    return tile.first < end;
}

/* Fill in the product of a tile, but for where its x is. */
SL_DEV void sl_experts_fill(const struct sl_experts_args &g, const sl_experts_tile &tile,
                            sl_linear_args &a)
{
    const int at = tile.first - g.begin;
    a.row_bytes = g.row_bytes;
    a.n_tokens = tile.n;
    a.n_cols = g.n_cols;
    a.n_parts = g.activation != SL_ACT_NONE ? 2 : 1;
    a.n_tiles = g.n_tiles;
    a.activation = g.activation;
    a.accumulate = false;
    a.x_packed = true;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const struct sl_experts_part &from = g.part[i];
        if (i < a.n_parts) {
            sl_linear_part &to = a.part[i];
            to.w = from.table ? (const uint8_t *)from.table[tile.expert]
                              : from.data + tile.expert * from.bytes;
            to.end = to.w + from.bytes;
            to.bias = from.bias ? from.bias + (int64_t)tile.expert * g.n_rows : NULL;
            to.y = g.y + (int64_t)at * g.n_rows;
            to.n_rows = g.n_rows;
            to.first = 0;
        }
    }
}

/* The product of tile blockIdx.y: false if there is none. Uniform over the block. */
SL_DEV bool sl_experts_bind(const struct sl_experts_args &g, sl_linear_args &a)
{
    sl_experts_tile tile;
    if (!sl_experts_find(g.order, g.begin, g.end, (int)blockIdx.y, tile)) {
        return false;
    }
    a.xs = g.xs + (tile.first - g.begin) / g.x_share * g.x_stride;
    a.x = (const float *)a.xs;
    sl_experts_fill(g, tile, a);
    return true;
}

#endif
