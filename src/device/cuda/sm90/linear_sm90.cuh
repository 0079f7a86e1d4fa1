/* SPDX-License-Identifier: Apache-2.0
 *
 * Dense products of many tokens on compute capability 9.0; see gemm_sm90.cuh.
 */
#ifndef SL_DEVICE_CUDA_SM90_LINEAR_SM90_CUH
#define SL_DEVICE_CUDA_SM90_LINEAR_SM90_CUH

#include "device/cuda/sm90/split_sm90.cuh"

template <int T> struct sl_sm90_linear {
    struct sl_sm90_maps maps;
    struct sl_linear_args a;
    int32_t n_token_tiles; /* of T */
    int32_t n_whole;       /* items that are tiles of T tokens; the others are halves of such */
    int32_t n_halves;

    SL_DEV_MEMBER int n_items(void) const
    {
        return n_whole + n_halves;
    }

    /* Token tiles are the fast index: clusters that run at the same time share the weights of few
     * row tiles, and x stays in the L2 cache. The last pair may have a tile without rows: its row0
     * lies past the end. The last half may have no tokens. */
    SL_DEV_MEMBER const sl_linear_args *bind(int i, int rank, sl_linear_args &,
                                             sl_sm90_tile &tile) const
    {
        const bool gated = a.activation != SL_ACT_NONE;
        const int half = i - n_whole;
        const int whole = half < 0 ? i : n_whole + half / 2;
        const int row_tile = whole / n_token_tiles * 2 + rank;
        tile.part = gated ? 0 : sl_part_of_tile(a, row_tile);
        tile.row0 =
            (row_tile - a.part[tile.part].first) * (gated ? SL_SM90_ROWS / 2 : SL_SM90_ROWS);
        tile.token0 = whole % n_token_tiles * T + (half > 0 && half % 2 ? T / 2 : 0);
        tile.n_tokens = min(a.n_tokens - tile.token0, half < 0 ? T : T / 2);
        tile.x_row = tile.token0;
        return &a;
    }

    SL_DEV_MEMBER const float *scales(const sl_sm90_tile &) const
    {
        return (const float *)((const uint16_t *)a.xs + (int64_t)a.n_tokens * a.x_cols);
    }
};

template <class W, int T>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(SL_SM90_THREADS, 1)
    sl_sm90_linear_kernel(SL_KERNEL_ARG struct sl_sm90_linear<T> k)
{
    sl_sm90_work<W, T>(k, k.maps, k.a.activation != SL_ACT_NONE, k.a.x_cols);
}

/* Tiles that would not fill the last round over the GPU are cut in halves, if that makes them fit:
 * half a round instead of a whole one. */
template <class W, int T>
static int sl_sm90_launch_linear(cudaStream_t stream, const struct sl_linear_args *args,
                                 const struct sl_sm90_maps *maps, const struct sl_cuda_props *props)
{
    struct sl_sm90_linear<T> k;
    k.maps = *maps;
    const int clusters = props->n_sm / 2;
    k.a = *args;
    k.n_token_tiles = (args->n_tokens + T - 1) / T;
    k.n_whole = (args->n_tiles + 1) / 2 * k.n_token_tiles;
    k.n_halves = 0;
    const int rest = k.n_whole % clusters;
    if (T == SL_SM90_TOKENS && 2 * rest <= clusters) {
        k.n_whole -= rest;
        k.n_halves = 2 * rest;
    }
    return SL_SM90_LAUNCH((sl_sm90_linear_kernel<W, T>),
                          dim3(sl_sm90_blocks(k.n_whole + k.n_halves, props)),
                          dim3(SL_SM90_THREADS), (size_t)SL_SM90_SHARED_BYTES, stream, k);
}

template <class W>
static int sl_sm90_make_maps(struct sl_sm90_maps *maps, const struct sl_linear_args *args)
{
    const int box_rows = args->activation != SL_ACT_NONE ? SL_SM90_ROWS / 2 : SL_SM90_ROWS;
    int failed =
        sl_tensor_map_rows(&maps->x, args->xs, args->n_tokens, args->x_cols, SL_SM90_BOX_TOKENS);
    for (int i = 0; !failed && W::tile_bytes > 0 && i < args->n_parts; i++) {
        failed = sl_tensor_map_rows(&maps->w[i], args->part[i].w, args->part[i].n_rows,
                                    args->n_cols, box_rows);
    }
    return failed;
}

/* Few tiles are split along the depth; small tiles where there are not many: they have more sizes
 * and more slots. */
template <class W>
static int sl_sm90_linear_of(cudaStream_t stream, const struct sl_linear_args *args,
                             const struct sl_cuda_props *props)
{
    constexpr int half = SL_SM90_TOKENS / 2;
    struct sl_sm90_maps maps;
    const int failed = sl_sm90_make_maps<W>(&maps, args);
    if (failed) {
        return failed;
    }
    const int n_splits = sl_sm90_choose_splits(args, props);
    if (n_splits > 1) {
        return sl_sm90_launch_split<W>(stream, args, n_splits, &maps);
    }
    const int halves = (args->n_tiles + 1) / 2 * ((args->n_tokens + half - 1) / half);
    return halves <= props->n_sm / 2
               ? sl_sm90_launch_linear<W, half>(stream, args, &maps, props)
               : sl_sm90_launch_linear<W, SL_SM90_TOKENS>(stream, args, &maps, props);
}

#endif
