/* SPDX-License-Identifier: Apache-2.0
 *
 * The memory side of the attention kernel: shapes, the runs of tokens of one sequence, and the ring
 * through which keys and values come from the paged cache into shared memory as f16.
 */
#ifndef SL_DEVICE_CUDA_ATTENTION_FEED_CUH
#define SL_DEVICE_CUDA_ATTENTION_FEED_CUH

#include "device/cuda/attention_args.cuh"

template <int D_, int WM_, int WN_, int NB_, int R_, bool Q_SHARED_, bool QUANTIZED_>
struct sl_attn_shape {
    static constexpr int D = D_;   /* head size */
    static constexpr int WM = WM_; /* warps along rows, 16 rows each */
    static constexpr int WN = WN_; /* warps along positions, NB each */
    static constexpr int NB = NB_;
    static constexpr int R = R_;                  /* ring slots, a power of two */
    static constexpr bool Q_SHARED = Q_SHARED_;   /* Q in shared memory instead of registers */
    static constexpr bool QUANTIZED = QUANTIZED_; /* keys, values or both */
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
    const float d = sl_f16_value(*reinterpret_cast<const uint16_t *>(block));
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
    int kv_begin; /* first position that somebody sees, */
    int kv_end;   /* and the first behind it that nobody does */
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
        const char *src = sl_cuda_kv_row(a.kv, block, is_value, kv_head, pos0 % SL_KV_BLOCK);
        const enum sl_type type = S::QUANTIZED ? a.kv_type[is_value] : SL_TYPE_F16;
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
            const bool valid = pos0 + row >= kv_begin && pos0 + row < kv_end;
            if (type == SL_TYPE_F16) {
                sl_copy_async_16(dst, src + at * 16, valid);
                continue;
            }
            uint4 v = make_uint4(0, 0, 0, 0);
            if (valid) {
                v = sl_attn_unpack(src + row * a.kv.row_bytes[is_value], chunk,
                                   type == SL_TYPE_Q4_0);
            }
            sl_store_shared_16(dst, v);
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

#endif
