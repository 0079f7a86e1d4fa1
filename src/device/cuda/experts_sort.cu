/* SPDX-License-Identifier: Apache-2.0
 *
 * Sorts the (token, expert) pairs of a pass by expert and cuts the order into tiles, on the device.
 *
 *   count   one block: pairs of each expert, then where each expert's positions and tiles start
 *   place   a block an expert: its warps go through all pairs, each through a stretch, first to
 *           count the expert's and then, knowing where its own begin, to place them
 *
 * The order is stable, so that sums over chunks do not depend on timing. Counting uses atomics on
 * integers only.
 */
#include "device/cuda/experts.cuh"

#define SORT_THREADS 1024
#define PLACE_WARPS 16

#ifndef SL_CUDA_EMULATE
SL_DEV void add_one(int *at)
{
    atomicAdd(at, 1);
}

SL_DEV int from_lane(int v, int lane)
{
    return __shfl_sync(SL_WARP_ALL, v, lane);
}

#else
/* Threads of the emulation take turns. */
static void add_one(int *at)
{
    ++*at;
}

static int from_lane(int v, int lane)
{
    return __shfl_sync(~0u, v, lane);
}
#endif

/* Tiles of a group that starts at `first` before the one that holds position `p`. A group's tiles
 * start anew at every chunk border. `start` becomes the first position of p's tile. */
SL_DEV int tiles_before(const struct sl_experts_order &o, int first, int p, int &start)
{
    const int c0 = first / o.chunk;
    const int c = p / o.chunk;
    const int in_chunk = c == c0 ? first : c * o.chunk; /* where the group starts in p's chunk */
    const int whole = (o.chunk + o.tile_tokens - 1) / o.tile_tokens;
    int n = (p - in_chunk) / o.tile_tokens;
    start = in_chunk + n * o.tile_tokens;
    if (c > c0) {
        n += ((c0 + 1) * o.chunk - first + o.tile_tokens - 1) / o.tile_tokens;
        n += (c - c0 - 1) * whole;
    }
    return n;
}

/* v[0 .. n) becomes the sums before each; returns the sum of all. One warp; n at most 1024. */
SL_DEV int scan(int *v, int n)
{
    const int lane = (int)threadIdx.x & 31;
    const int each = (n + 31) / 32;
    const int begin = lane * each < n ? lane * each : n;
    const int end = begin + each < n ? begin + each : n;
    int sum = 0;
    for (int i = begin; i < end; i++) {
        sum += v[i];
    }
    int before = sum;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = from_lane(before, (lane - step) & 31);
        before += lane >= step ? other : 0;
    }
    const int all = from_lane(before, 31);
    before -= sum;
    for (int i = begin; i < end; i++) {
        const int own = v[i];
        v[i] = before;
        before += own;
    }
    return all;
}

static __global__ void __launch_bounds__(SORT_THREADS)
    count_kernel(SL_KERNEL_ARG struct sl_experts_order o)
{
    SL_SHARED(shared);
    int *first = (int *)shared;
    int *tiles = first + o.n;
    int *totals = tiles + o.n;
    const int thread = (int)threadIdx.x;
    for (int e = thread; e < o.n; e += SORT_THREADS) {
        first[e] = 0;
    }
    sl_block_sync();
#pragma unroll 4
    for (int i = thread; i < o.n_pairs; i += SORT_THREADS) {
        const int e = sl_experts_here(o, SL_LDG(o.ids + i));
        if (e >= 0) {
            add_one(&first[e]);
        } else {
            o.position[i] = -1;
        }
    }
    sl_block_sync();
    for (int e = thread; e < o.n; e += SORT_THREADS) {
        tiles[e] = first[e]; /* the counts, for now */
    }
    sl_block_sync();
    if (thread < 32) {
        const int n = scan(first, o.n);
        if (thread == 0) {
            totals[0] = n;
        }
    }
    sl_block_sync();
    for (int e = thread; e < o.n; e += SORT_THREADS) {
        int start;
        const int n = tiles[e];
        tiles[e] = n > 0 ? tiles_before(o, first[e], first[e] + n - 1, start) + 1 : 0;
    }
    sl_block_sync();
    if (thread < 32) {
        const int n = scan(tiles, o.n);
        if (thread == 0) {
            totals[1] = n;
        }
    }
    sl_block_sync();
    for (int e = thread; e < o.n; e += SORT_THREADS) {
        o.group_first[e] = first[e];
        o.group_tile[e] = tiles[e];
    }
    for (int i = totals[0] + thread; i < o.n_pairs; i += SORT_THREADS) {
        o.tile_of[i] = SL_EXPERTS_NOWHERE;
    }
    for (int i = totals[1] + thread; i < o.n_pairs; i += SORT_THREADS) {
        o.tiles[i].first = SL_EXPERTS_NOWHERE;
    }
}

/* Where the pairs of a warp's stretch go that are of the block's expert; `n_all` becomes the number
 * of all of them. Whole block. */
SL_DEV int first_of_warp(const struct sl_experts_order &o, int id, int begin, int end, int &n_all)
{
    __shared__ int counts[PLACE_WARPS];
    const int warp = (int)threadIdx.x >> 5;
    int n = 0;
#pragma unroll 8
    for (int i = begin + ((int)threadIdx.x & 31); i < end; i += 32) {
        n += SL_LDG(o.ids + i) == id;
    }
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) {
        n += sl_shfl_xor(n, mask);
    }
    if ((threadIdx.x & 31) == 0) {
        counts[warp] = n;
    }
    sl_block_sync();
    int before = 0;
    n_all = 0;
    for (int w = 0; w < PLACE_WARPS; w++) {
        before += w < warp ? counts[w] : 0;
        n_all += counts[w];
    }
    return before;
}

static __global__ void __launch_bounds__(32 * PLACE_WARPS)
    place_kernel(SL_KERNEL_ARG struct sl_experts_order o)
{
    const int lane = (int)threadIdx.x & 31;
    const int e = (int)blockIdx.x;
    if (o.table && !o.table[e]) {
        return;
    }
    const int id = o.first + e;
    const int first = o.group_first[e];
    const int group_tile = o.group_tile[e];
    const int stretch = (o.n_pairs + 32 * PLACE_WARPS - 1) / (32 * PLACE_WARPS) * 32;
    const int begin = min(((int)threadIdx.x >> 5) * stretch, o.n_pairs);
    const int end = min(begin + stretch, o.n_pairs);
    int n_all;
    int at = first + first_of_warp(o, id, begin, end, n_all);
#pragma unroll 4
    for (int base = begin; base < end; base += 32) {
        const int i = base + lane;
        const bool mine = i < end && SL_LDG(o.ids + i) == id;
        const uint32_t votes = sl_vote(mine);
        if (mine) {
            const int p = at + sl_count_bits(votes & ((1u << lane) - 1));
            int start;
            const int tile = group_tile + tiles_before(o, first, p, start);
            o.pair_at[p] = i;
            o.position[i] = p;
            o.tile_of[p] = tile;
            if (p == start) {
                const int border = (p / o.chunk + 1) * o.chunk;
                const int last = min(min(first + n_all, border), p + o.tile_tokens);
                o.tiles[tile].expert = e;
                o.tiles[tile].first = p;
                o.tiles[tile].n = last - p;
            }
        }
        at += sl_count_bits(votes);
    }
}

int sl_experts_sort(cudaStream_t stream, const struct sl_experts_order *order)
{
    if (order->direct) {
        return 0;
    }
    const size_t shared = (2 * (size_t)order->n + 2) * sizeof(int);
    const int failed = SL_LAUNCH(count_kernel, dim3(1), dim3(SORT_THREADS), shared, stream, *order);
    if (failed) {
        return failed;
    }
    return SL_LAUNCH(place_kernel, dim3((unsigned)order->n), dim3(32 * PLACE_WARPS), (size_t)0,
                     stream, *order);
}
