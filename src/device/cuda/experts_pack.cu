/* SPDX-License-Identifier: Apache-2.0
 *
 * See experts_pack.cuh. All of it is bound by memory: a token's row is read once and packed once,
 * for as many of its pairs as the chunk has, and rows of an expert's width, which are short, take a
 * warp each.
 */
#include "device/cuda/experts_pack.cuh"

#include <type_traits>

#define THREADS SL_PACK_THREADS
#define WARP_MAX_COLS 2048 /* longest row that a warp packs */

/* ---- a token's pairs ---- */

/* Those that lie in the chunk: where, from its begin on, in the order of the token's ids. */
struct token_pairs {
    int n;
    int at[SL_MAX_EXPERTS_USED];
    float weight[SL_MAX_EXPERTS_USED];
};

/* Whole block. `weights` may be NULL. */
SL_DEV void find_pairs(const struct sl_experts_order &o, const float *weights, int token, int begin,
                       int end, token_pairs *to)
{
    if (threadIdx.x < 32) {
        const int lane = (int)threadIdx.x;
        int n = 0;
        for (int j0 = 0; j0 < o.n_used; j0 += 32) {
            const int pair = token * o.n_used + j0 + lane;
            int p = -1;
            if (j0 + lane < o.n_used) {
                p = !o.direct ? o.position[pair] : sl_experts_here(o, o.ids[pair]) >= 0 ? pair : -1;
            }
            const bool there = p >= begin && p < end;
            const uint32_t votes = sl_vote(there);
            if (there) {
                const int i = n + sl_count_bits(votes & ((1u << lane) - 1));
                to->at[i] = p - begin;
                to->weight[i] = weights ? weights[pair] : 1.0f;
            }
            n += sl_count_bits(votes);
        }
        if (lane == 0) {
            to->n = n;
        }
    }
    sl_block_sync();
}

/* ---- packing ---- */

/* A token's row to all its positions. The rows of the chunk, then their scales. */
static __global__ void __launch_bounds__(THREADS)
    pack_token_kernel(SL_KERNEL_ARG struct sl_experts_pack a)
{
    __shared__ token_pairs pairs;
    const int token = (int)blockIdx.x;
    find_pairs(a.order, NULL, token, a.begin, a.end, &pairs);
    if (pairs.n == 0) {
        return;
    }
    const int64_t n_cols = a.n_cols;
    const float scale = sl_pack_half_row<THREADS>(
        a.x + token * n_cols, a.n_cols, a.n_cols, a.column_order, [&](int i, uint4 v) {
            for (int k = 0; k < pairs.n; k++) {
                *(uint4 *)(a.out + (pairs.at[k] * n_cols + 8 * i) * 2) = v;
            }
        });
    float *scales = (float *)(a.out + (a.end - a.begin) * n_cols * 2);
    if ((int)threadIdx.x < pairs.n) {
        scales[pairs.at[threadIdx.x]] = scale;
    }
}

/* A pair's row, at its position, by N threads. */
template <int N>
static __global__ void __launch_bounds__(THREADS)
    pack_pair_kernel(SL_KERNEL_ARG struct sl_experts_pack a)
{
    const int64_t n_rows = a.end - a.begin;
    const int row = (int)blockIdx.x * (THREADS / N) + (int)threadIdx.x / N;
    if (row >= n_rows ||
        (!a.order.direct && a.order.tile_of[a.begin + row] == SL_EXPERTS_NOWHERE)) {
        return; /* the whole block, or warps */
    }
    uint4 *out = (uint4 *)(a.out + (int64_t)row * a.n_cols * 2);
    const float scale = sl_pack_half_row<N>(a.x + (int64_t)row * a.n_cols, a.n_cols, a.n_cols,
                                            a.column_order, [&](int i, uint4 v) { out[i] = v; });
    if (threadIdx.x % N == 0) {
        ((float *)(a.out + n_rows * a.n_cols * 2))[row] = scale;
    }
}

SL_DEV void pack_row_8bit(const float *x, uint8_t *tile, int n, int k, int n_cols)
{
    struct sl_xblock *blocks =
        (struct sl_xblock *)(tile + (int64_t)n * n_cols) + (int64_t)k * (n_cols / 32);
    uint8_t *levels = tile + (int64_t)k * n_cols;
    const bool wide = ((uintptr_t)x & 15) == 0;
    for (int base = 0; base < n_cols / 4; base += THREADS) {
        const int i = base + (int)threadIdx.x;
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (i < n_cols / 4) {
            v = wide ? *(const float4 *)(x + 4 * i)
                     : make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
        }
        float d, sum;
        const uint32_t q = sl_pack_levels(v, d, sum);
        const float other = sl_shfl_xor(sum, 4);
        if (i < n_cols / 4) {
            *(uint32_t *)(levels + 4 * i) = q;
            if ((i & 7) == 0) {
                blocks[i >> 3].d = d;
                blocks[i >> 3].sums = sl_pack_half2(sum, other);
            }
        }
    }
}

/* Tile by tile: a block packs the row of position begin + blockIdx.x, or of a token (direct,
 * by_token). */
template <int FORM>
static __global__ void __launch_bounds__(THREADS)
    pack_tile_kernel(SL_KERNEL_ARG struct sl_experts_pack a, bool by_token)
{
    const struct sl_experts_order &o = a.order;
    const int row = (int)blockIdx.x;
    const float *x = a.x + (int64_t)row * a.n_cols;
    int at = row, n = 1, k = 0; /* the tile's row of `out`, its size, and which of it this is */
    if (!o.direct) {
        const int p = a.begin + row;
        const int tile = o.tile_of[p];
        if (tile == SL_EXPERTS_NOWHERE) {
            return;
        }
        at = o.tiles[tile].first - a.begin;
        n = o.tiles[tile].n;
        k = row - at;
        if (by_token) {
            x = a.x + (int64_t)(o.pair_at[p] / o.n_used) * a.n_cols;
        }
    } else if (!by_token && sl_experts_here(o, o.ids[a.begin + row]) < 0) {
        return;
    }
    uint8_t *tile_out = a.out + at * a.stride;
    if constexpr (FORM == SL_EXPERTS_8BIT) {
        pack_row_8bit(x, tile_out, n, k, a.n_cols);
    } else if constexpr (FORM == SL_EXPERTS_HALF) {
        uint4 *out = (uint4 *)(tile_out + (int64_t)k * a.n_cols * 2);
        const float scale = sl_pack_half_row<THREADS>(x, a.n_cols, a.n_cols, SL_ORDER_PLAIN,
                                                      [&](int i, uint4 v) { out[i] = v; });
        if (threadIdx.x == 0) {
            ((float *)(tile_out + (int64_t)n * a.n_cols * 2))[k] = scale;
        }
    } else {
        float *to = (float *)tile_out + (int64_t)k * a.n_cols;
        for (int i = (int)threadIdx.x; i < a.n_cols; i += THREADS) {
            to[i] = x[i];
        }
    }
}

int64_t sl_experts_row_stride(enum sl_experts_form form, int n_cols)
{
    const int64_t bytes = form == SL_EXPERTS_8BIT    ? (int64_t)n_cols + n_cols / 32 * 8
                          : form == SL_EXPERTS_FLOAT ? (int64_t)n_cols * 4
                                                     : (int64_t)n_cols * 2 + 4;
    return form == SL_EXPERTS_FLOAT ? bytes : (bytes + 15) / 16 * 16;
}

static int pack_tiles(cudaStream_t stream, const struct sl_experts_pack *a,
                      enum sl_experts_form form, bool by_token, int n_rows)
{
    const dim3 grid((unsigned)n_rows), block(THREADS);
    switch (form) {
    case SL_EXPERTS_8BIT:
        return SL_LAUNCH((pack_tile_kernel<SL_EXPERTS_8BIT>), grid, block, (size_t)0, stream, *a,
                         by_token);
    case SL_EXPERTS_HALF:
        return SL_LAUNCH((pack_tile_kernel<SL_EXPERTS_HALF>), grid, block, (size_t)0, stream, *a,
                         by_token);
    default:
        return SL_LAUNCH((pack_tile_kernel<SL_EXPERTS_FLOAT>), grid, block, (size_t)0, stream, *a,
                         by_token);
    }
}

int sl_experts_pack_tokens(cudaStream_t stream, const struct sl_experts_pack *a,
                           enum sl_experts_form form)
{
    if (form == SL_EXPERTS_ROWS) {
        return SL_LAUNCH(pack_token_kernel, dim3((unsigned)a->n_tokens), dim3(THREADS), (size_t)0,
                         stream, *a);
    }
    return pack_tiles(stream, a, form, true, a->order.direct ? a->n_tokens : a->end - a->begin);
}

int sl_experts_pack_pairs(cudaStream_t stream, const struct sl_experts_pack *a,
                          enum sl_experts_form form)
{
    const int n_rows = a->end - a->begin;
    if (form != SL_EXPERTS_ROWS) {
        return pack_tiles(stream, a, form, false, n_rows);
    }
    if (a->n_cols > WARP_MAX_COLS) {
        return SL_LAUNCH((pack_pair_kernel<THREADS>), dim3((unsigned)n_rows), dim3(THREADS),
                         (size_t)0, stream, *a);
    }
    constexpr int rows = THREADS / 32;
    return SL_LAUNCH((pack_pair_kernel<32>), dim3((unsigned)((n_rows + rows - 1) / rows)),
                     dim3(THREADS), (size_t)0, stream, *a);
}

/* ---- gates of unlike types ---- */

static __global__ void __launch_bounds__(THREADS)
    gate_pairs_kernel(float *gate, const float *up, int64_t n, int activation)
{
    const int64_t i = (int64_t)blockIdx.x * THREADS + (int)threadIdx.x;
    if (i < n) {
        gate[i] = sl_gate(gate[i], up[i], activation);
    }
}

int sl_experts_gate(cudaStream_t stream, float *gate, const float *up, int64_t n, int activation)
{
    return SL_LAUNCH(gate_pairs_kernel, dim3((unsigned)((n + THREADS - 1) / THREADS)),
                     dim3(THREADS), (size_t)0, stream, gate, up, n, activation);
}

/* ---- the sum ---- */

/* y of token blockIdx.x, W floats at a time. */
template <int W>
static __global__ void __launch_bounds__(THREADS) sum_kernel(SL_KERNEL_ARG struct sl_experts_sum a)
{
    using vec = typename std::conditional<W == 4, float4, float>::type;
    __shared__ token_pairs pairs;
    find_pairs(a.order, a.weights, (int)blockIdx.x, a.begin, a.end, &pairs);
    if (pairs.n == 0 && a.accumulate) {
        return;
    }
    float *y = a.y + (int64_t)blockIdx.x * a.n_cols;
    for (int i = W * (int)threadIdx.x; i < a.n_cols; i += W * THREADS) {
        alignas(16) float sum[W];
        if (a.accumulate) {
            *(vec *)sum = *(const vec *)(y + i);
        } else {
#pragma unroll
            for (int w = 0; w < W; w++) {
                sum[w] = 0.0f;
            }
        }
#pragma unroll 4
        for (int k = 0; k < pairs.n; k++) {
            alignas(16) float v[W];
            *(vec *)v = *(const vec *)(a.out + (int64_t)pairs.at[k] * a.n_cols + i);
#pragma unroll
            for (int w = 0; w < W; w++) {
                sum[w] += pairs.weight[k] * v[w];
            }
        }
        *(vec *)(y + i) = *(const vec *)sum;
    }
}

int sl_experts_sum_pairs(cudaStream_t stream, const struct sl_experts_sum *a, int n_tokens)
{
    const bool wide = a->n_cols % 4 == 0 && (((uintptr_t)a->y | (uintptr_t)a->out) & 15) == 0;
    const dim3 grid((unsigned)n_tokens), block(THREADS);
    return wide ? SL_LAUNCH((sum_kernel<4>), grid, block, (size_t)0, stream, *a)
                : SL_LAUNCH((sum_kernel<1>), grid, block, (size_t)0, stream, *a);
}
