/* SPDX-License-Identifier: Apache-2.0
 *
 * Sorts the (token, expert) pairs of a pass by expert and cuts the order into tiles, on the device.
 *
 *   count   one block: pairs of each expert, then where each expert's positions and tiles start
 *   place   a warp an expert: goes through all pairs in order and takes its own
 *
 * The order is stable, so that sums over chunks do not depend on timing. Counting uses atomics on
 * integers only.
 */
#include "device/cuda/experts.cuh"

#define SORT_THREADS 512
#define PLACE_WARPS 4

#ifndef SL_CUDA_EMULATE
SL_DEV void add_one(int *at)
{
    atomicAdd(at, 1);
}

SL_DEV uint32_t vote(bool v)
{
    return __ballot_sync(SL_WARP_ALL, v);
}

SL_DEV int from_lane(int v, int lane)
{
    return __shfl_sync(SL_WARP_ALL, v, lane);
}

SL_DEV int count_bits(uint32_t v)
{
    return __popc(v);
}
#else
/* Threads of the emulation take turns. */
static void add_one(int *at)
{
    ++*at;
}

static uint32_t vote(bool v)
{
    return __ballot_sync(~0u, v);
}

static int from_lane(int v, int lane)
{
    return __shfl_sync(~0u, v, lane);
}

static int count_bits(uint32_t v)
{
    return __builtin_popcount(v);
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
    for (int i = thread; i < o.n_pairs; i += SORT_THREADS) {
        const int e = sl_experts_here(o, o.ids[i]);
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

static __global__ void __launch_bounds__(32 * PLACE_WARPS)
    place_kernel(SL_KERNEL_ARG struct sl_experts_order o)
{
    const int lane = (int)threadIdx.x & 31;
    const int e = (int)blockIdx.x * PLACE_WARPS + ((int)threadIdx.x >> 5);
    if (e >= o.n || (o.table && !o.table[e])) {
        return;
    }
    const int first = o.group_first[e];
    const int group_tile = o.group_tile[e];
    int at = first;
#pragma unroll 4
    for (int base = 0; base < o.n_pairs; base += 32) {
        const int i = base + lane;
        const bool mine = i < o.n_pairs && o.ids[i] == o.first + e;
        const uint32_t votes = vote(mine);
        if (mine) {
            const int p = at + count_bits(votes & ((1u << lane) - 1));
            int start;
            const int tile = group_tile + tiles_before(o, first, p, start);
            o.pair_at[p] = i;
            o.position[i] = p;
            o.tile_of[p] = tile;
            if (p == start) {
                o.tiles[tile].expert = e;
                o.tiles[tile].first = p;
            }
        }
        at += count_bits(votes);
    }
    sl_warp_sync();
    /* The tiles' sizes: the end of the group is known now. */
    for (int p = first + lane; p < at; p += 32) {
        int start;
        const int tile = group_tile + tiles_before(o, first, p, start);
        const int border = (p / o.chunk + 1) * o.chunk;
        const int end = at < border ? at : border;
        if (p == start) {
            o.tiles[tile].n = end - p < o.tile_tokens ? end - p : o.tile_tokens;
        }
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
    const unsigned blocks = (unsigned)((order->n + PLACE_WARPS - 1) / PLACE_WARPS);
    return SL_LAUNCH(place_kernel, dim3(blocks), dim3(32 * PLACE_WARPS), (size_t)0, stream, *order);
}
