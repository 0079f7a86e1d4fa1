/* SPDX-License-Identifier: Apache-2.0
 *
 * Flash attention over the paged KV cache, on tensor cores, as one template for decode and prefill.
 *
 * Rows. The query heads that share a KV head are packed together: row r of a KV head is query head
 * r % group of token r / group, so that keys and values are read once for all of them. A block
 * computes 16 * WM rows of one KV head over one of n_splits ranges of positions.
 *
 * Positions. A tile is BN = NB * WN positions. The warps of a block are WM along rows times WN
 * along positions: prefill has 4 x 1 (all warps share a tile), decode 1 x WN (each warp has its own
 * NB positions of a tile, its own running maximum, and its own ring; the results meet at the end).
 *
 *   for each tile:  S = Q K^T   ->   mask, running maximum, P = 2^(S - max)   ->   O += P V
 *                   (registers)      (registers)                                (registers)
 *
 * Keys and values come through a ring of R slots in shared memory, filled R - 1 slots ahead by
 * asynchronous copies in the order K0 V0 K1 V1 ... Rows of a tile are swizzled in units of 16
 * bytes: eight rows at one column, which is what ldmatrix reads, lie in eight different bank
 * groups.
 *
 * Sequences. Tokens of a tile may belong to different sequences; runs of tokens of one sequence
 * are done one after the other, with the rows outside the run masked. Positions that no row of a
 * run may see are skipped by whole tiles (causality and window), and what lies outside
 * the visible positions is replaced by zeros on the way: unwritten memory may hold NaN.
 *
 * Logits are kept in units of log2: the scale is put into Q, times log2(e) where there is no
 * soft-cap.
 *
 * Of a divided cache only positions from here_begin on count, and n_kv_max ends where what is here
 * does. Both are whole blocks, of which tiles are parts: it is enough to go through no others.
 *
 * With n_splits > 1 a row's unnormalized values, maximum and sum go to scratch, and
 * attention_merge.cu puts the ranges together.
 */
#ifndef SL_DEVICE_CUDA_ATTENTION_CUH
#define SL_DEVICE_CUDA_ATTENTION_CUH

#include "device/cuda/attention_feed.cuh"
#include "device/cuda/attention_state.cuh"

/* Where a row of a KV head lies. */
struct sl_attn_row {
    bool valid;
    int token;
    int head;
};

static __device__ __forceinline__ sl_attn_row sl_attn_find_row(const sl_attn_args &a, int row)
{
    sl_attn_row r;
    r.valid = row < a.n_tokens * a.group;
    r.token = r.valid ? row / a.group : 0;
    r.head = (int)blockIdx.y * a.group + (r.valid ? row % a.group : 0);
    return r;
}

/* One step of turning a block: two elements that a thread holds itself. */
static __device__ __forceinline__ void sl_attn_turn_pair(float &low, float &high)
{
    const float a = low;
    low = a + high;
    high = a - high;
}

/* One step between lanes that differ in the bit `mask`. */
static __device__ __forceinline__ float sl_attn_turn_lanes(float x, int mask)
{
    const float other = __shfl_xor_sync(SL_ALL_LANES, x, mask);
    return (threadIdx.x & (unsigned)mask) != 0 ? other - x : x + other;
}

/* Eight neighbouring elements of a block of 32; the others are with the three lanes beside. */
static __device__ __forceinline__ void sl_attn_turn_chunk(float v[8])
{
#pragma unroll
    for (int step = 1; step < 8; step *= 2) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            if ((i & step) == 0) {
                sl_attn_turn_pair(v[i], v[i + step]);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) {
        v[i] = sl_attn_turn_lanes(sl_attn_turn_lanes(v[i], 1), 2) * SL_KV_TURN_SCALE;
    }
}

/* A thread's elements of a block of 32 in the layout of fragments: v[k][h] are columns
 * 16 k + 8 h + 2 t and the next, t being lane % 4. */
static __device__ __forceinline__ void sl_attn_turn_fragment(float2 v[2][2])
{
#pragma unroll
    for (int k = 0; k < 2; k++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float2 &x = v[k][h];
            sl_attn_turn_pair(x.x, x.y);
            x.x = sl_attn_turn_lanes(sl_attn_turn_lanes(x.x, 1), 2);
            x.y = sl_attn_turn_lanes(sl_attn_turn_lanes(x.y, 1), 2);
        }
        sl_attn_turn_pair(v[k][0].x, v[k][1].x);
        sl_attn_turn_pair(v[k][0].y, v[k][1].y);
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        sl_attn_turn_pair(v[0][h].x, v[1][h].x);
        sl_attn_turn_pair(v[0][h].y, v[1][h].y);
#pragma unroll
        for (int k = 0; k < 2; k++) {
            v[k][h].x *= SL_KV_TURN_SCALE;
            v[k][h].y *= SL_KV_TURN_SCALE;
        }
    }
}

/* Q of the block's rows, scaled and rounded to f16, into registers or shared memory. Turned where
 * the keys are. */
template <class S>
static __device__ __forceinline__ void sl_attn_load_q(const sl_attn_args &a, sl_attn_state<S> &st,
                                                      const sl_attn_row row[2], int first_row,
                                                      uint32_t q_shared)
{
    const int lane = threadIdx.x % SL_WARP;
    const bool turned = S::CACHE != SL_ATTN_F16 && a.kv_type[0] == SL_TYPE_Q4_0;
    if constexpr (S::Q_SHARED) {
        static_assert(S::ROWS * S::CHUNKS % SL_WARP == 0, "whole warps");
        for (int at = threadIdx.x; at < S::ROWS * S::CHUNKS; at += S::THREADS) {
            const int in_tile = at / S::CHUNKS;
            const int chunk = at % S::CHUNKS;
            const sl_attn_row r = sl_attn_find_row(a, first_row + in_tile);
            const float *q = a.q + ((int64_t)r.token * a.n_heads + r.head) * S::D + chunk * 8;
            float v[8] = {0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f, 0.0f};
            if (r.valid) {
                *reinterpret_cast<float4 *>(v) = reinterpret_cast<const float4 *>(q)[0];
                *reinterpret_cast<float4 *>(v + 4) = reinterpret_cast<const float4 *>(q)[1];
            }
            if (turned) {
                sl_attn_turn_chunk(v);
            }
            sl_store_shared_16(q_shared + sl_attn_swizzle<S::D>(in_tile, chunk),
                               make_uint4(sl_pack_f16(v[0] * a.q_scale, v[1] * a.q_scale),
                                          sl_pack_f16(v[2] * a.q_scale, v[3] * a.q_scale),
                                          sl_pack_f16(v[4] * a.q_scale, v[5] * a.q_scale),
                                          sl_pack_f16(v[6] * a.q_scale, v[7] * a.q_scale)));
        }
        __syncthreads();
        const int warp_row = (int)threadIdx.x / SL_WARP % S::WM * 16;
        st.q_address = q_shared + (warp_row + (lane & 15)) * (S::D * 2);
    } else {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const sl_attn_row &r = row[i];
            const float *q = a.q + ((int64_t)r.token * a.n_heads + r.head) * S::D + 2 * (lane & 3);
#pragma unroll
            for (int block = 0; block < S::D / 32; block++) {
                float2 v[2][2];
#pragma unroll
                for (int part = 0; part < 4; part++) {
                    v[part >> 1][part & 1] = make_float2(0.0f, 0.0f);
                    if (r.valid) {
                        v[part >> 1][part & 1] =
                            *reinterpret_cast<const float2 *>(q + block * 32 + part * 8);
                    }
                }
                if (turned) {
                    sl_attn_turn_fragment(v);
                }
#pragma unroll
                for (int part = 0; part < 4; part++) {
                    const float2 &x = v[part >> 1][part & 1];
                    st.q[2 * block + (part >> 1)][i + 2 * (part & 1)] =
                        sl_pack_f16(x.x * a.q_scale, x.y * a.q_scale);
                }
            }
        }
    }
}

/* The F16 tile of an item that has arrived. Unpacked by all threads of the ring, which meet before
 * they use it; that they are done with the tile before is what the wait for the item made sure. */
template <class S>
static __device__ __forceinline__ uint32_t sl_attn_open(const sl_attn_args &a,
                                                        sl_attn_feed<S> &feed, int item)
{
    const uint32_t tile = feed.open(a, item);
    if (S::CACHE != SL_ATTN_F16) {
        sl_attn_ring_sync<S>();
    }
    return tile;
}

/* One run over the tiles of this block's range. */
template <class S>
static __device__ __forceinline__ void sl_attn_do_run(const sl_attn_args &a, sl_attn_state<S> &st,
                                                      const sl_attn_run &run, bool whole,
                                                      uint32_t ring, int first_row)
{
    sl_attn_feed<S> feed;
    feed.ring = ring;
    feed.seq = run.seq;
    feed.kv_head = blockIdx.y;
    feed.first_row = first_row;
    feed.kv_end = min(run.max_pos + 1, a.n_kv_max);
    feed.kv_begin = max(a.window > 0 ? run.min_pos - a.window + 1 : 0, a.kv.here_begin);
    const int tile_begin = feed.kv_begin / S::BN;
    const int tile_end = (feed.kv_end + S::BN - 1) / S::BN;
    const int per_split = (max(tile_end - tile_begin, 0) + a.n_splits - 1) / a.n_splits;
    const int begin = tile_begin + (int)blockIdx.z * per_split;
    const int end = min(begin + per_split, tile_end);
    feed.init(a, begin, end);

#pragma unroll
    for (int i = 0; i < S::R - 1; i++) {
        feed.start(a);
    }
    for (int tile = begin; tile < end; tile++) {
        const int pos0 = tile * S::BN;
        const int item = 2 * (tile - begin);
        sl_copy_async_wait<S::R - 2>();
        sl_attn_ring_sync<S>();
        feed.start(a);
        st.multiply_keys(sl_attn_open<S>(a, feed, item));
        if (a.cap_log2 != 0.0f) {
            st.soft_cap(a.cap_log2);
        }
        const bool masked = !whole || pos0 + S::BN - 1 > run.min_pos ||
                            (a.window > 0 && pos0 <= run.max_pos - a.window);
        if (masked) {
            st.mask(pos0 + first_row);
        }
        st.soft_max();
        sl_copy_async_wait<S::R - 2>();
        sl_attn_ring_sync<S>();
        feed.start(a);
        st.multiply_values(sl_attn_open<S>(a, feed, item + 1));
    }
    /* The next user of the ring's memory must find nobody reading or filling it. */
    sl_copy_async_wait<0>();
    sl_attn_ring_sync<S>();
}

/* Two neighbouring values of a row: finished, or as a part of the range `blockIdx.z`. */
static __device__ __forceinline__ void sl_attn_put(const sl_attn_args &a, const sl_attn_row &r,
                                                   int column, float2 v, float scale)
{
    const int64_t row = (int64_t)r.token * a.n_heads + r.head;
    float *out = a.y + row * a.head_dim;
    if (a.n_splits > 1) {
        const int64_t n_rows = (int64_t)a.n_tokens * a.n_heads;
        out = a.part_values + (blockIdx.z * n_rows + row) * a.head_dim;
    }
    *reinterpret_cast<float2 *>(out + column) = make_float2(v.x * scale, v.y * scale);
}

/* The factor for sl_attn_put; one thread of the row also writes its lse, or maximum and sum of a
 * part. */
static __device__ __forceinline__ float
sl_attn_finish_row(const sl_attn_args &a, const sl_attn_row &r, float max, float sum, bool writer)
{
    const int64_t row = (int64_t)r.token * a.n_heads + r.head;
    if (a.n_splits == 1) {
        return sl_attn_output_scale(a, row, r.head, max, sum, writer);
    }
    if (writer) {
        const int64_t n_rows = (int64_t)a.n_tokens * a.n_heads;
        a.part_max_sum[blockIdx.z * n_rows + row] = make_float2(max, sum);
    }
    return 1.0f;
}

/* Warps along rows: each thread writes what it holds. */
template <class S>
static __device__ __forceinline__ void sl_attn_write(const sl_attn_args &a, sl_attn_state<S> &st,
                                                     const sl_attn_row row[2])
{
    const int t = threadIdx.x & 3;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (!row[r].valid) {
            continue;
        }
        const float scale = sl_attn_finish_row(a, row[r], st.max[r], st.sum[r], t == 0);
#pragma unroll
        for (int c = 0; c < S::CHUNKS; c++) {
            sl_attn_put(a, row[r], c * 8 + 2 * t, make_float2(st.o[c][2 * r], st.o[c][2 * r + 1]),
                        scale);
        }
    }
}

/* Warps along positions: leave everything in shared memory, then each warp sums up some rows. */
template <class S>
static __device__ __forceinline__ void sl_attn_meet(const sl_attn_args &a, sl_attn_state<S> &st,
                                                    int first_row, char *shared)
{
    const int lane = threadIdx.x % SL_WARP;
    const int warp = threadIdx.x / SL_WARP;
    float *values = reinterpret_cast<float *>(shared);
    float2 *max_sum = reinterpret_cast<float2 *>(shared + S::MEET_VALUES);
    __syncthreads(); /* all rings are idle */
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int mine = warp * 16 + (lane >> 2) + r * 8;
        if ((lane & 3) == 0) {
            max_sum[mine] = make_float2(st.max[r], st.sum[r]);
        }
#pragma unroll
        for (int c = 0; c < S::CHUNKS; c++) {
            *reinterpret_cast<float2 *>(values + mine * S::MEET_STRIDE + c * 8 + 2 * (lane & 3)) =
                make_float2(st.o[c][2 * r], st.o[c][2 * r + 1]);
        }
    }
    __syncthreads();
    for (int in_tile = warp; in_tile < 16; in_tile += S::WN) {
        const sl_attn_row row = sl_attn_find_row(a, first_row + in_tile);
        if (!row.valid) {
            break; /* so are all later rows */
        }
        float max = -INFINITY;
#pragma unroll
        for (int w = 0; w < S::WN; w++) {
            max = fmaxf(max, max_sum[w * 16 + in_tile].x);
        }
        float factor[S::WN];
        float sum = 0.0f;
#pragma unroll
        for (int w = 0; w < S::WN; w++) {
            const float2 part = max_sum[w * 16 + in_tile];
            factor[w] = part.y > 0.0f ? sl_exp2(part.x - max) : 0.0f;
            sum += part.y * factor[w];
        }
        const float scale = sl_attn_finish_row(a, row, max, sum, lane == 0);
        if (a.n_splits > 1 && sum == 0.0f) {
            continue; /* the merge does not read it */
        }
        for (int column = 2 * lane; column < S::D; column += 2 * SL_WARP) {
            float2 v = make_float2(0.0f, 0.0f);
#pragma unroll
            for (int w = 0; w < S::WN; w++) {
                const float2 part = *reinterpret_cast<const float2 *>(
                    values + (w * 16 + in_tile) * S::MEET_STRIDE + column);
                v.x = fmaf(part.x, factor[w], v.x);
                v.y = fmaf(part.y, factor[w], v.y);
            }
            sl_attn_put(a, row, column, v, scale);
        }
    }
}

/* grid = (tiles of rows, KV heads, ranges). Late tiles see most; they start first. */
template <class S>
static __global__ void __launch_bounds__(S::THREADS) sl_attn_kernel(const sl_attn_args a)
{
    SL_DYNAMIC_SHARED(shared);
    sl_let_follow();
    sl_await_ahead();
    const int warp = threadIdx.x / SL_WARP;
    const int lane = threadIdx.x % SL_WARP;
    const int warp_m = S::WM == 1 ? 0 : warp;
    const int warp_n = S::WM == 1 ? warp : 0;
    const int first_row = (int)(gridDim.x - 1 - blockIdx.x) * S::ROWS;
    const int n_rows = a.n_tokens * a.group;
    const int first_token = first_row / a.group;
    const int last_row = min(first_row + S::ROWS, n_rows) - 1;
    const int n_run_tokens = last_row / a.group - first_token + 1;
    const uint32_t ring = sl_shared_address(shared) + warp_n * S::RING_BYTES;
    const uint32_t q_shared = sl_shared_address(shared) + S::WN * S::RING_BYTES;

    sl_attn_state<S> st;
    st.init();
    const int my_row = first_row + warp_m * 16 + (lane >> 2);
    const sl_attn_row row[2] = {sl_attn_find_row(a, my_row), sl_attn_find_row(a, my_row + 8)};
    const int row_pos[2] = {a.pos[row[0].token], a.pos[row[1].token]};
    sl_attn_load_q<S>(a, st, row, first_row, q_shared);

    for (int begin = 0; begin < n_run_tokens;) {
        const sl_attn_run run = sl_attn_find_run(a, first_token, n_run_tokens, begin);
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int token = row[r].token - first_token;
            const bool inside = row[r].valid && token >= run.begin && token < run.end;
            st.low[r] = a.window > 0 ? max(row_pos[r] - a.window + 1, 0) : 0;
            st.high[r] = inside ? row_pos[r] : -1;
        }
        const bool whole = run.begin == 0 && run.end == n_run_tokens;
        sl_attn_do_run<S>(a, st, run, whole, ring, warp_n * S::NB);
        begin = run.end;
    }

#pragma unroll
    for (int r = 0; r < 2; r++) {
        st.sum[r] += __shfl_xor_sync(SL_ALL_LANES, st.sum[r], 1);
        st.sum[r] += __shfl_xor_sync(SL_ALL_LANES, st.sum[r], 2);
    }
    if constexpr (S::WN == 1) {
        sl_attn_write<S>(a, st, row);
    } else {
        sl_attn_meet<S>(a, st, first_row, shared);
    }
}

/* ---- host side ---- */

/* How many ranges to cut the positions into: enough blocks to fill the GPU once, none without a
 * tile of its own. Any number is right; the kernel spreads the positions that there really are. */
template <class S>
static int sl_attn_choose_splits(const sl_attn_args *a, int max_splits,
                                 const struct sl_cuda_props *props)
{
    const int64_t n_blocks = sl_div_up((int64_t)a->n_tokens * a->group, S::ROWS) * a->kv.n_kv_heads;
    int64_t resident = (int64_t)(props->shared_per_sm_bytes / (S::SHARED_BYTES + 1024));
    const int64_t by_registers = 65536 / (S::REGISTERS * S::THREADS);
    resident = resident < by_registers ? resident : by_registers;
    resident = resident > 1 ? resident : 1;
    int64_t n_visible = a->n_kv_max - a->kv.here_begin;
    if (a->window > 0 && (int64_t)a->window + a->n_tokens < n_visible) {
        n_visible = (int64_t)a->window + a->n_tokens;
    }
    int64_t n_splits = props->n_sm * resident / n_blocks;
    const int64_t by_work = n_visible / S::BN;
    n_splits = n_splits < by_work ? n_splits : by_work;
    n_splits = n_splits < max_splits ? n_splits : max_splits;
    return n_splits > 1 ? (int)n_splits : 1;
}

template <class S>
static int sl_attn_launch(cudaStream_t stream, sl_attn_args *a, int max_splits,
                          const struct sl_cuda_props *props)
{
    const int64_t n_tiles = sl_div_up((int64_t)a->n_tokens * a->group, S::ROWS);
    if (S::SHARED_BYTES > props->max_shared_bytes || a->kv.n_kv_heads > 65535 ||
        (int64_t)a->n_tokens * a->group > INT32_MAX - S::ROWS) {
        return SL_CUDA_UNSUPPORTED;
    }
    a->n_splits = sl_attn_choose_splits<S>(a, max_splits, props);
    const dim3 grid((unsigned)n_tiles, (unsigned)a->kv.n_kv_heads, (unsigned)a->n_splits);
    return SL_FOLLOW(sl_attn_kernel<S>, grid, (unsigned)S::THREADS, S::SHARED_BYTES, stream, props,
                     *a);
}

#endif
