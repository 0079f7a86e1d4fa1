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
 * asynchronous copies in the order K0 V0 K1 V1 ... Rows in a slot are swizzled in units of 16
 * bytes: eight rows at one column, which is what ldmatrix reads, lie in eight different bank
 * groups.
 *
 * Sequences. Tokens of a tile may belong to different sequences; runs of tokens of one sequence
 * are done one after the other, with the rows outside the run masked. Positions that no row of a
 * run may see are skipped by whole tiles (causality and window), and values beyond the last
 * visible position are replaced by zeros on the way: unwritten memory may hold NaN.
 *
 * Logits are kept in units of log2: the scale is put into Q, times log2(e) where there is no
 * soft-cap.
 *
 * With n_splits > 1 a row's unnormalized values, maximum and sum go to scratch, and
 * attention_merge.cu puts the ranges together.
 */
#ifndef SL_DEVICE_CUDA_ATTENTION_CUH
#define SL_DEVICE_CUDA_ATTENTION_CUH

#include "device/cuda/kv.cuh"
#include "device/cuda/mma.cuh"

struct sl_attn_args {
    const float *q;
    float *y;
    const int32_t *pos;
    const int32_t *seq;   /* or null: all 0 */
    const float *sinks;   /* or null */
    float *part_values;   /* [n_splits, n_tokens * n_heads, head_dim] */
    float2 *part_max_sum; /* [n_splits, n_tokens * n_heads] */
    sl_cuda_kv kv;
    int n_tokens;
    int n_heads;
    int head_dim;
    int group; /* query heads of a KV head */
    int n_kv_max;
    int window;
    int n_splits;
    float q_scale;
    float cap_log2; /* soft-cap times log2(e); 0: none */
    bool q4;        /* quantized cache: Q4_0, else Q8_0 */
};

/* attention_decode.cu, attention_prefill.cu: fill in n_splits (at most max_splits) and launch. */
int sl_cuda_attention_decode(cudaStream_t stream, sl_attn_args *args, bool quantized,
                             int max_splits, const struct sl_cuda_props *props);
int sl_cuda_attention_prefill(cudaStream_t stream, sl_attn_args *args, bool quantized,
                              int max_splits, const struct sl_cuda_props *props);
/* attention_merge.cu */
int sl_cuda_attention_merge(cudaStream_t stream, const sl_attn_args *args);

/* What the weighted values of a row are multiplied by in the end. `sum` belongs to maximum `max`
 * (log2 units); a sink adds to the sum alone. */
static __device__ __forceinline__ float sl_attn_output_scale(float max, float sum,
                                                             const float *sinks, int head)
{
    float factor = 1.0f;
    if (sinks != nullptr) {
        const float sink = sinks[head] * SL_LOG2E;
        const float new_max = fmaxf(max, sink);
        if (new_max > -INFINITY) {
            factor = sl_exp2(max - new_max);
            sum = sum * factor + sl_exp2(sink - new_max);
        }
    }
    return sum > 0.0f ? factor / sum : 0.0f;
}

/* ---- template ---- */

template <int D_, int WM_, int WN_, int NB_, int R_, bool Q_SHARED_, bool QUANTIZED_>
struct sl_attn_shape {
    static constexpr int D = D_;   /* head size */
    static constexpr int WM = WM_; /* warps along rows, 16 rows each */
    static constexpr int WN = WN_; /* warps along positions, NB each */
    static constexpr int NB = NB_;
    static constexpr int R = R_;                /* ring slots, a power of two */
    static constexpr bool Q_SHARED = Q_SHARED_; /* Q in shared memory instead of registers */
    static constexpr bool QUANTIZED = QUANTIZED_;
    static constexpr int ROWS = 16 * WM;
    static constexpr int BN = NB * WN;
    static constexpr int THREADS = SL_WARP * WM * WN;
    static constexpr int CHUNKS = D / 8; /* 16-byte pieces of an f16 row */
    static constexpr int SLOT_BYTES = NB * D * 2;
    static constexpr int RING_BYTES = SLOT_BYTES * R;
    static constexpr int Q_BYTES = Q_SHARED ? ROWS * D * 2 : 0;
    /* Meeting of the warps along positions: values padded against bank conflicts, then max, sum. */
    static constexpr int MEET_STRIDE = D + 8;
    static constexpr int MEET_VALUES = WN * ROWS * MEET_STRIDE * 4;
    static constexpr int MEET_BYTES = WN > 1 ? MEET_VALUES + WN *ROWS * 8 : 0;
    static constexpr int LOOP_BYTES = RING_BYTES * WN + Q_BYTES;
    static constexpr int SHARED_BYTES = LOOP_BYTES > MEET_BYTES ? LOOP_BYTES : MEET_BYTES;
    /* Upper bound of what the compiler takes a thread, for the estimate of resident blocks. */
    static constexpr int REGISTERS = WM > 1 || Q_SHARED ? 256 : 168;
    static_assert(D % 32 == 0 && NB % 16 == 0 && SL_KV_BLOCK % BN == 0, "tile shape");
    static_assert(WM == 1 || WN == 1, "a ring belongs to a warp or to all warps");
    static_assert((R & (R - 1)) == 0 && R >= 2, "ring slots");
    static_assert(SHARED_BYTES <= 64 * 1024, "sm_75 has no more");
};

/* Byte offset of a 16-byte chunk in a swizzled tile with rows of D f16. */
template <int D> static __device__ __forceinline__ uint32_t sl_attn_swizzle(int row, int chunk)
{
    const int turn = D % 64 == 0 ? row & 7 : (row >> 1) & 3;
    return (uint32_t)(row * (D * 2) + ((chunk ^ turn) << 4));
}

/* A run of tokens of one sequence inside a block's tokens, and what it sees. */
struct sl_attn_run {
    int begin, end; /* tokens, relative to the block's first */
    int seq;
    int min_pos, max_pos;
};

/* The run that starts at token `begin` of the n tokens from `first` on; n <= 64. All lanes of a
 * warp take part and get the same answer. */
static __device__ __forceinline__ sl_attn_run sl_attn_find_run(const sl_attn_args &a, int first,
                                                               int n, int begin)
{
    const int lane = threadIdx.x % SL_WARP;
    sl_attn_run run;
    run.begin = begin;
    run.end = n;
    run.seq = a.seq != nullptr ? a.seq[first + begin] : 0;
    if (a.seq != nullptr) {
        const bool low = lane >= begin && lane < n && a.seq[first + lane] != run.seq;
        const int high_lane = lane + SL_WARP;
        const bool high =
            high_lane >= begin && high_lane < n && a.seq[first + high_lane] != run.seq;
        const uint64_t others = (uint64_t)__ballot_sync(SL_ALL_LANES, low) |
                                (uint64_t)__ballot_sync(SL_ALL_LANES, high) << 32;
        if (others != 0) {
            run.end = __ffsll((long long)others) - 1;
        }
    }
    int least = INT32_MAX;
    int most = -1;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int token = lane + half * SL_WARP;
        if (token >= run.begin && token < run.end) {
            const int pos = a.pos[first + token];
            least = min(least, pos);
            most = max(most, pos);
        }
    }
#pragma unroll
    for (int step = SL_WARP / 2; step > 0; step /= 2) {
        least = min(least, __shfl_xor_sync(SL_ALL_LANES, least, step));
        most = max(most, __shfl_xor_sync(SL_ALL_LANES, most, step));
    }
    run.min_pos = least;
    run.max_pos = most;
    return run;
}

/* Eight elements of a quantized row as f16. The scale is read as two bytes: blocks are 2-byte
 * aligned only. */
static __device__ __forceinline__ uint4 sl_attn_unpack(const char *row, int chunk, bool q4)
{
    uint32_t packed[4];
    const int quarter = chunk & 3;
    const char *block = row + (chunk >> 2) * (q4 ? 18 : 34);
    const float d = __half2float(__ushort_as_half(*reinterpret_cast<const uint16_t *>(block)));
    /* Q4_0: elements 0..15 are the low halves of 16 bytes, 16..31 the high ones. */
    const int at = q4 ? 2 + (quarter & 1) * 8 : 2 + quarter * 8;
    const uint16_t *src = reinterpret_cast<const uint16_t *>(block + at);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t pair = src[i];
        int low, high;
        if (q4) {
            const int shift = quarter >= 2 ? 4 : 0;
            low = (int)(pair >> shift & 15u) - 8;
            high = (int)(pair >> (8 + shift) & 15u) - 8;
        } else {
            low = (int8_t)(pair & 255u);
            high = (int8_t)(pair >> 8);
        }
        packed[i] = sl_pack_f16(d * (float)low, d * (float)high);
    }
    return make_uint4(packed[0], packed[1], packed[2], packed[3]);
}

/* State of filling one ring: which item comes next and where its block lies. Items are
 * K, V of tile `tile`, K, V of the next, ... */
template <class S> struct sl_attn_feed {
    uint32_t ring; /* shared address */
    int item;      /* next to start */
    int n_items;
    int first_tile;
    int kv_end; /* first position that nobody sees */
    int seq;
    int kv_head;
    int first_row; /* of this ring in a tile */
    int block;     /* physical, of the item's tile */
    int next_block;

    __device__ __forceinline__ int block_of(const sl_attn_args &a, int at_item) const
    {
        const int tile = first_tile + at_item / 2;
        return sl_cuda_kv_block(a.kv, seq, tile * S::BN / SL_KV_BLOCK);
    }

    __device__ __forceinline__ void init(const sl_attn_args &a, int begin_tile, int end_tile)
    {
        item = 0;
        first_tile = begin_tile;
        n_items = 2 * max(end_tile - begin_tile, 0);
        block = 0;
        next_block = n_items > 0 ? block_of(a, 0) : 0;
    }

    /* Start the next item, if there is one, and close its group in any case: groups are counted. */
    __device__ __forceinline__ void start(const sl_attn_args &a)
    {
        if (item < n_items) {
            const int is_value = item & 1;
            if (is_value == 0) {
                /* The table entry of the tile after this one is asked for early. */
                block = next_block;
                next_block = item + 2 < n_items ? block_of(a, item + 2) : 0;
            }
            copy(a, is_value);
        }
        item++;
        sl_copy_async_commit();
    }

    __device__ __forceinline__ void copy(const sl_attn_args &a, int is_value)
    {
        const int pos0 = (first_tile + item / 2) * S::BN + first_row;
        const int head = is_value ? kv_head + a.kv.n_kv_heads : kv_head;
        const char *src =
            sl_cuda_kv_head(a.kv, block, head) + (pos0 % SL_KV_BLOCK) * a.kv.row_bytes;
        const uint32_t slot = ring + (item & (S::R - 1)) * S::SLOT_BYTES;
        constexpr int n_threads = SL_WARP * S::WM;
        constexpr int n_chunks = S::NB * S::CHUNKS;
        static_assert(n_chunks % n_threads == 0, "every thread copies as much");
        const int thread = threadIdx.x % n_threads;
#pragma unroll
        for (int i = 0; i < n_chunks / n_threads; i++) {
            const int at = thread + i * n_threads;
            const int row = at / S::CHUNKS;
            const int chunk = at % S::CHUNKS;
            const uint32_t dst = slot + sl_attn_swizzle<S::D>(row, chunk);
            const bool valid = pos0 + row < kv_end;
            if constexpr (S::QUANTIZED) {
                uint4 v = make_uint4(0, 0, 0, 0);
                if (valid) {
                    v = sl_attn_unpack(src + row * a.kv.row_bytes, chunk, a.q4);
                }
                sl_store_shared_16(dst, v);
            } else {
                sl_copy_async_16(dst, src + at * 16, valid);
            }
        }
    }
};

/* The threads that share a ring meet. */
template <class S> static __device__ __forceinline__ void sl_attn_ring_sync(void)
{
    if constexpr (S::WM == 1) {
        __syncwarp();
    } else {
        __syncthreads();
    }
}

/* Everything a warp holds in registers. A thread has rows g and g + 8 of its warp's 16. */
template <class S> struct sl_attn_state {
    static constexpr int KS = S::D / 16;
    uint32_t q[S::Q_SHARED ? 1 : KS][4];
    float o[S::D / 8][4];
    float s[S::NB / 8][4];
    float max[2];
    float sum[2]; /* of this thread's columns only, until the end */
    int low[2];   /* positions that the row may see: low..high */
    int high[2];
    uint32_t q_address; /* Q_SHARED: of this lane's ldmatrix row */
    int turn;           /* this lane's swizzle, the same for all its rows */

    __device__ __forceinline__ void init(void)
    {
#pragma unroll
        for (int i = 0; i < S::D / 8; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                o[i][j] = 0.0f;
            }
        }
        max[0] = max[1] = -INFINITY;
        sum[0] = sum[1] = 0.0f;
        const int in8 = threadIdx.x & 7;
        turn = S::D % 64 == 0 ? in8 : in8 >> 1;
    }

    /* s = Q K^T for the NB positions in `slot`. */
    __device__ __forceinline__ void multiply_keys(uint32_t slot)
    {
        const int lane = threadIdx.x % SL_WARP;
        /* Matrices of an x4 load: positions 0-7 at columns c, c + 8, positions 8-15 at the same. */
        const uint32_t row = slot + ((lane & 7) + ((lane >> 4) << 3)) * (S::D * 2);
        const int half = (lane >> 3) & 1;
#pragma unroll
        for (int n = 0; n < S::NB / 8; n++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                s[n][j] = 0.0f;
            }
        }
#pragma unroll
        for (int k = 0; k < KS; k++) {
            uint32_t shared_q[4];
            if constexpr (S::Q_SHARED) {
                const int q_half = lane >> 4;
                sl_ldmatrix_x4(shared_q, q_address + (((2 * k + q_half) ^ turn) << 4));
            }
            const uint32_t *a = S::Q_SHARED ? shared_q : q[S::Q_SHARED ? 0 : k];
            const uint32_t column = ((2 * k + half) ^ turn) << 4;
#pragma unroll
            for (int n = 0; n < S::NB / 16; n++) {
                uint32_t b[4];
                sl_ldmatrix_x4(b, row + n * (16 * S::D * 2) + column);
                sl_mma_f16(s[2 * n], a, b[0], b[1]);
                sl_mma_f16(s[2 * n + 1], a, b[2], b[3]);
            }
        }
    }

    /* s = cap * tanh(s): the exact form in exponentials, good to a few units of 1e-7. */
    __device__ __forceinline__ void soft_cap(float cap_log2)
    {
#pragma unroll
        for (int n = 0; n < S::NB / 8; n++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float e = sl_exp2(s[n][j] * (2.0f * SL_LOG2E));
                s[n][j] = cap_log2 * (1.0f - __fdividef(2.0f, e + 1.0f));
            }
        }
    }

    /* Hide what a row may not see; `pos0` is the position of the first column. */
    __device__ __forceinline__ void mask(int pos0)
    {
        const int first = pos0 + 2 * ((int)threadIdx.x & 3);
#pragma unroll
        for (int n = 0; n < S::NB / 8; n++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int pos = first + n * 8 + (j & 1);
                const bool seen = pos >= low[j >> 1] && pos <= high[j >> 1];
                s[n][j] = seen ? s[n][j] : -INFINITY;
            }
        }
    }

    /* Move the running maxima on, rescale what is summed, and turn s into weights. */
    __device__ __forceinline__ void soft_max(void)
    {
        float base[2];
        float factor[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float most = max[r];
#pragma unroll
            for (int n = 0; n < S::NB / 8; n++) {
                most = fmaxf(most, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
            }
            most = fmaxf(most, __shfl_xor_sync(SL_ALL_LANES, most, 1));
            most = fmaxf(most, __shfl_xor_sync(SL_ALL_LANES, most, 2));
            /* A row that has seen nothing yet: any finite base makes its weights 0. */
            base[r] = most > -INFINITY ? most : 0.0f;
            factor[r] = sl_exp2(max[r] - base[r]);
            max[r] = most;
            sum[r] *= factor[r];
        }
#pragma unroll
        for (int n = 0; n < S::NB / 8; n++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                s[n][j] = sl_exp2(s[n][j] - base[j >> 1]);
                sum[j >> 1] += s[n][j];
            }
        }
        /* Mostly no maximum moves; one vote saves the rescaling. */
        if (__any_sync(SL_ALL_LANES, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
            for (int i = 0; i < S::D / 8; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    o[i][j] *= factor[j >> 1];
                }
            }
        }
    }

    /* o += P V for the NB positions in `slot`. The C layout of two column tiles of s is the A
     * layout of one step of 16 positions. */
    __device__ __forceinline__ void multiply_values(uint32_t slot)
    {
        const int lane = threadIdx.x % SL_WARP;
        /* Matrices of an x4 load: positions 0-7 and 8-15 at column c, the same at c + 8. */
        const uint32_t row = slot + ((lane & 7) + (((lane >> 3) & 1) << 3)) * (S::D * 2);
        const int half = lane >> 4;
#pragma unroll
        for (int k = 0; k < S::NB / 16; k++) {
            const uint32_t a[4] = {sl_pack_f16(s[2 * k][0], s[2 * k][1]),
                                   sl_pack_f16(s[2 * k][2], s[2 * k][3]),
                                   sl_pack_f16(s[2 * k + 1][0], s[2 * k + 1][1]),
                                   sl_pack_f16(s[2 * k + 1][2], s[2 * k + 1][3])};
#pragma unroll
            for (int c = 0; c < S::CHUNKS; c += 2) {
                uint32_t b[4];
                sl_ldmatrix_x4_trans(b, row + k * (16 * S::D * 2) + (((c + half) ^ turn) << 4));
                sl_mma_f16(o[c], a, b[0], b[1]);
                sl_mma_f16(o[c + 1], a, b[2], b[3]);
            }
        }
    }
};

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

/* Q of the block's rows, scaled and rounded to f16, into registers or shared memory. */
template <class S>
static __device__ __forceinline__ void sl_attn_load_q(const sl_attn_args &a, sl_attn_state<S> &st,
                                                      const sl_attn_row row[2], int first_row,
                                                      uint32_t q_shared)
{
    const int lane = threadIdx.x % SL_WARP;
    if constexpr (S::Q_SHARED) {
        for (int at = threadIdx.x; at < S::ROWS * S::CHUNKS; at += S::THREADS) {
            const int in_tile = at / S::CHUNKS;
            const int chunk = at % S::CHUNKS;
            const sl_attn_row r = sl_attn_find_row(a, first_row + in_tile);
            const float *q = a.q + ((int64_t)r.token * a.n_heads + r.head) * S::D + chunk * 8;
            uint4 v = make_uint4(0, 0, 0, 0);
            if (r.valid) {
                const float4 x = reinterpret_cast<const float4 *>(q)[0];
                const float4 y = reinterpret_cast<const float4 *>(q)[1];
                v.x = sl_pack_f16(x.x * a.q_scale, x.y * a.q_scale);
                v.y = sl_pack_f16(x.z * a.q_scale, x.w * a.q_scale);
                v.z = sl_pack_f16(y.x * a.q_scale, y.y * a.q_scale);
                v.w = sl_pack_f16(y.z * a.q_scale, y.w * a.q_scale);
            }
            sl_store_shared_16(q_shared + sl_attn_swizzle<S::D>(in_tile, chunk), v);
        }
        __syncthreads();
        const int warp_row = (int)threadIdx.x / SL_WARP % S::WM * 16;
        st.q_address = q_shared + (warp_row + (lane & 15)) * (S::D * 2);
    } else {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const sl_attn_row &r = row[i & 1];
            const float *q = a.q + ((int64_t)r.token * a.n_heads + r.head) * S::D + 2 * (lane & 3) +
                             (i >> 1) * 8;
#pragma unroll
            for (int k = 0; k < S::D / 16; k++) {
                float2 v = make_float2(0.0f, 0.0f);
                if (r.valid) {
                    v = *reinterpret_cast<const float2 *>(q + k * 16);
                }
                st.q[k][i] = sl_pack_f16(v.x * a.q_scale, v.y * a.q_scale);
            }
        }
    }
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
    const int kv_begin = a.window > 0 ? max(run.min_pos - a.window + 1, 0) : 0;
    const int tile_begin = kv_begin / S::BN;
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
        const int slot = 2 * (tile - begin);
        sl_copy_async_wait<S::R - 2>();
        sl_attn_ring_sync<S>();
        feed.start(a);
        st.multiply_keys(ring + (slot & (S::R - 1)) * S::SLOT_BYTES);
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
        st.multiply_values(ring + ((slot + 1) & (S::R - 1)) * S::SLOT_BYTES);
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

/* The factor for sl_attn_put; one thread of the row also writes maximum and sum of a part. */
static __device__ __forceinline__ float
sl_attn_finish_row(const sl_attn_args &a, const sl_attn_row &r, float max, float sum, bool writer)
{
    if (a.n_splits == 1) {
        return sl_attn_output_scale(max, sum, a.sinks, r.head);
    }
    if (writer) {
        const int64_t n_rows = (int64_t)a.n_tokens * a.n_heads;
        const int64_t row = (int64_t)r.token * a.n_heads + r.head;
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
    extern __shared__ __align__(128) char shared[];
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
    int64_t n_visible = a->n_kv_max;
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
    if (S::SHARED_BYTES > 48 * 1024) {
        static uint64_t allowed_on; /* bit i: done for GPU i */
        const int code = sl_allow_shared((const void *)sl_attn_kernel<S>, S::SHARED_BYTES,
                                         props->ordinal, &allowed_on);
        if (code != 0) {
            return code;
        }
    }
    const dim3 grid((unsigned)n_tiles, (unsigned)a->kv.n_kv_heads, (unsigned)a->n_splits);
    sl_attn_kernel<S><<<grid, S::THREADS, S::SHARED_BYTES, stream>>>(*a);
    return sl_launch_result();
}

#endif
