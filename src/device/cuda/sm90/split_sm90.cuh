/* SPDX-License-Identifier: Apache-2.0
 *
 * Dense products whose tiles would leave most of the GPU idle, on compute capability 9.0: the
 * blocks of a cluster make one tile together, each over a part of the depth. They leave their sums
 * in shared memory, and each adds up and stores those of some tokens, in the order of the parts: no
 * result depends on timing.
 */
#ifndef SL_DEVICE_CUDA_SM90_SPLIT_SM90_CUH
#define SL_DEVICE_CUDA_SM90_SPLIT_SM90_CUH

#include "device/cuda/sm90/gemm_sm90.cuh"

#define SL_SM90_SPLIT_TOKENS 128
#define SL_SM90_SPLIT_COLS 256 /* parts of the depth are multiples of this */
#define SL_SM90_MAX_SPLITS 8
#define SL_SM90_SUMS_BARRIER 1

struct sl_sm90_split {
    struct sl_sm90_maps maps;
    struct sl_linear_args a;
    int32_t n_token_tiles;
    int32_t n_splits; /* blocks of a cluster */
};

/* Where a thread leaves sums 4 m .. 4 m + 3. */
SL_DEV uint32_t sl_sm90_sums_at(uint32_t slots, int m)
{
    return slots + (uint32_t)((m * SL_SM90_CONSUMERS + (int)threadIdx.x) * 16);
}

template <int N> SL_DEV void sl_sm90_leave_sums(uint32_t slots, const float (&c)[N / 2])
{
    sl_named_sync(SL_SM90_SUMS_BARRIER, SL_SM90_CONSUMERS); /* all have read the slots */
#pragma unroll
    for (int m = 0; m < N / 8; m++) {
        const uint4 v = {__float_as_uint(c[4 * m]), __float_as_uint(c[4 * m + 1]),
                         __float_as_uint(c[4 * m + 2]), __float_as_uint(c[4 * m + 3])};
        asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(sl_sm90_sums_at(slots, m)),
                     "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                     : "memory");
    }
}

/* A token's outputs in a thread's rows from the two sums that it holds. */
template <class W>
SL_DEV void sl_sm90_store_token(const struct sl_linear_args &a, const sl_sm90_tile &tile, int token,
                                float g, float g8)
{
    const int warp = (int)threadIdx.x >> 5;
    const int in8 = ((int)threadIdx.x & 31) >> 2;
    if (a.activation != SL_ACT_NONE) {
        const int row = tile.row0 + 8 * warp + in8;
        if (row < a.part[0].n_rows) {
            sl_store_gated(a, token, row, g, g8);
        }
        return;
    }
    const struct sl_linear_part &part = a.part[tile.part];
    const int row = tile.row0 + 16 * warp + 2 * in8;
    if (row < part.n_rows) {
        const bool swap = W::swapped();
        sl_gemm_store2(a, part, token, row, swap ? g8 : g, swap ? g : g8);
    }
}

/* Add up and store this block's share of the tokens. */
template <class W>
SL_DEV void sl_sm90_join(const struct sl_linear_args &a, const sl_sm90_tile &tile, uint32_t slots,
                         int rank, int n_ranks)
{
    const float *scale = (const float *)((const uint16_t *)a.xs + (int64_t)a.n_tokens * a.x_cols);
    const int first = tile.token0 + 2 * ((int)threadIdx.x & 3);
    for (int m = rank; 8 * m < tile.n_tokens; m += n_ranks) {
        float4 sum = sl_cluster_load(sl_sm90_sums_at(slots, m), 0);
#pragma unroll 4
        for (int r = 1; r < n_ranks; r++) {
            const float4 v = sl_cluster_load(sl_sm90_sums_at(slots, m), r);
            sum.x += v.x;
            sum.y += v.y;
            sum.z += v.z;
            sum.w += v.w;
        }
        const int token = first + 8 * m;
        if (token < a.n_tokens) {
            const float s = scale[token];
            sl_sm90_store_token<W>(a, tile, token, s * sum.x, s * sum.z);
        }
        if (token + 1 < a.n_tokens) {
            const float s = scale[token + 1];
            sl_sm90_store_token<W>(a, tile, token + 1, s * sum.y, s * sum.w);
        }
    }
}

template <class W, int N>
SL_DEV void sl_sm90_split_sums(sl_sm90_group<W, SL_SM90_SPLIT_TOKENS, false> &group,
                               const struct sl_linear_args &a, const sl_sm90_tile &tile,
                               int first_step)
{
    float c[N / 2];
    group.multiply(c, a, tile, first_step * SL_SM90_DEPTH);
    sl_sm90_leave_sums<N>(group.ring.slots, c);
}

template <class W>
__global__ void __launch_bounds__(SL_SM90_THREADS, 1)
    sl_sm90_split_kernel(SL_KERNEL_ARG struct sl_sm90_split k)
{
    constexpr int T = SL_SM90_SPLIT_TOKENS;
    extern __shared__ __align__(1024) uint8_t slot_memory[];
    const bool gated = k.a.activation != SL_ACT_NONE;
    /* From what is the same in all threads as the compiler sees it: products of several turns of a
     * loop are under way at once only if the loop's bounds are. */
    const int n_ranks = k.n_splits;
    const int rank = (int)blockIdx.x % n_ranks;
    const int item = (int)blockIdx.x / n_ranks;
    const int row_tile = item / k.n_token_tiles;
    sl_sm90_tile tile;
    tile.part = gated ? 0 : sl_part_of_tile(k.a, row_tile);
    tile.row0 = (row_tile - k.a.part[tile.part].first) * (gated ? SL_SM90_ROWS / 2 : SL_SM90_ROWS);
    tile.token0 = tile.x_row = item % k.n_token_tiles * T;
    tile.n_tokens = min(k.a.n_tokens - tile.token0, T);
    /* The part of the depth, in steps. */
    constexpr int steps_of_piece = SL_SM90_SPLIT_COLS / SL_SM90_DEPTH;
    const int n_pieces = (k.a.x_cols + SL_SM90_SPLIT_COLS - 1) / SL_SM90_SPLIT_COLS;
    const int all_steps = (k.a.x_cols + SL_SM90_DEPTH - 1) / SL_SM90_DEPTH;
    const int begin = n_pieces * rank / n_ranks * steps_of_piece;
    const int end = min(n_pieces * (rank + 1) / n_ranks * steps_of_piece, all_steps);

    sl_sm90_ring<sl_sm90_slots<W, T>> ring;
    ring.slots = sl_shared_u32(slot_memory);
    ring.at = ring.parity = 0;
    sl_sm90_init_barriers(ring.full(0), 1);
    if (threadIdx.x >= SL_SM90_CONSUMERS) {
        sl_registers_give<SL_SM90_COPY_REGISTERS>();
        if (threadIdx.x == SL_SM90_CONSUMERS) {
            for (int it = begin; it < end; it++) {
                sl_barrier_wait(ring.empty(ring.at), ring.parity ^ 1);
                sl_sm90_copy_step<W, T, false>(k.maps, ring.slot(), ring.full(ring.at), gated, tile,
                                               it * SL_SM90_DEPTH, rank);
                ring.advance();
            }
        }
        __syncwarp();
        sl_cluster_sync();
    } else {
        sl_registers_take<SL_SM90_SUM_REGISTERS>();
        sl_sm90_group<W, T, false> group;
        group.ring = ring;
        group.n_steps = end - begin;
        group.weights.init(gated);
        if (tile.n_tokens > 96) {
            sl_sm90_split_sums<W, 128>(group, k.a, tile, begin);
        } else if (tile.n_tokens > 64) {
            sl_sm90_split_sums<W, 96>(group, k.a, tile, begin);
        } else if (tile.n_tokens > 32) {
            sl_sm90_split_sums<W, 64>(group, k.a, tile, begin);
        } else {
            sl_sm90_split_sums<W, 32>(group, k.a, tile, begin);
        }
        __syncwarp();
        sl_cluster_sync();
        sl_sm90_join<W>(k.a, tile, ring.slots, rank, n_ranks);
        __syncwarp();
    }
    sl_cluster_sync(); /* nobody leaves while others read its sums */
}

/* Into how many parts: as many as there is room for on the GPU; 1: not at all. */
static inline int sl_sm90_choose_splits(const struct sl_linear_args *args,
                                        const struct sl_cuda_props *props)
{
    const int64_t tiles = (int64_t)args->n_tiles *
                          ((args->n_tokens + SL_SM90_SPLIT_TOKENS - 1) / SL_SM90_SPLIT_TOKENS);
    int n = 1;
    while (2 * n <= SL_SM90_MAX_SPLITS && 2 * n * tiles <= props->n_sm &&
           2 * n * SL_SM90_SPLIT_COLS <= args->x_cols) {
        n *= 2;
    }
    return n;
}

template <class W>
static int sl_sm90_launch_split(cudaStream_t stream, const struct sl_linear_args *args,
                                int n_splits, const struct sl_sm90_maps *maps)
{
    struct sl_sm90_split k;
    k.maps = *maps;
    k.a = *args;
    k.n_splits = n_splits;
    k.n_token_tiles = (args->n_tokens + SL_SM90_SPLIT_TOKENS - 1) / SL_SM90_SPLIT_TOKENS;
    const cudaError_t code =
        cudaFuncSetAttribute((const void *)sl_sm90_split_kernel<W>,
                             cudaFuncAttributeMaxDynamicSharedMemorySize, SL_SM90_SHARED_BYTES);
    if (code != cudaSuccess) {
        return (int)code;
    }
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = (unsigned)n_splits;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3((unsigned)(args->n_tiles * k.n_token_tiles * n_splits));
    config.blockDim = dim3(SL_SM90_THREADS);
    config.dynamicSmemBytes = SL_SM90_SHARED_BYTES;
    config.stream = stream;
    config.attrs = &cluster;
    config.numAttrs = 1;
    return (int)cudaLaunchKernelEx(&config, sl_sm90_split_kernel<W>, k);
}

#endif
