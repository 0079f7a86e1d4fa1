/* SPDX-License-Identifier: Apache-2.0
 *
 * The memory side of the attention kernel: shapes, the runs of tokens of one sequence, and the ring
 * through which keys and values come from the paged cache into shared memory as f16.
 */
#ifndef SL_DEVICE_CUDA_ATTENTION_FEED_CUH
#define SL_DEVICE_CUDA_ATTENTION_FEED_CUH

#include "device/cuda/attention_args.cuh"

/* What a cache holds. Both sides F16: tiles are used where they arrive. Both packed: the ring holds
 * packed rows, and a tile is unpacked to F16 just before its use. Mixed: slots are large enough for
 * F16, and there are fewer. */
enum sl_attn_cache { SL_ATTN_F16, SL_ATTN_PACKED, SL_ATTN_MIXED };

template <int D_, int WM_, int WN_, int NB_, int R_, bool Q_SHARED_, enum sl_attn_cache CACHE_>
struct sl_attn_shape {
    static constexpr int D = D_;   /* head size */
    static constexpr int WM = WM_; /* warps along rows, 16 rows each */
    static constexpr int WN = WN_; /* warps along positions, NB each */
    static constexpr int NB = NB_;
    static constexpr int R = R_;                /* ring slots, a power of two */
    static constexpr bool Q_SHARED = Q_SHARED_; /* Q in shared memory instead of registers */
    static constexpr enum sl_attn_cache CACHE = CACHE_;
    static constexpr int ROWS = 16 * WM;
    static constexpr int BN = NB * WN;
    static constexpr int THREADS = SL_WARP * WM * WN;
    static constexpr int CHUNKS = D / 8;          /* 16-byte pieces of an f16 row */
    static constexpr int TILE_BYTES = NB * D * 2; /* as F16 */
    static constexpr int SLOT_BYTES = CACHE == SL_ATTN_PACKED ? NB * (D / 32) * 34 : TILE_BYTES;
    /* Before the ring: the tile that packed rows are unpacked to. */
    static constexpr int STAGE_BYTES = CACHE == SL_ATTN_F16 ? 0 : TILE_BYTES;
    static constexpr int RING_BYTES = STAGE_BYTES + SLOT_BYTES * R;
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

/* Smallest and largest position of tokens begin .. end - 1 behind `first`. All lanes of a warp take
 * part and get the same answer. */
static __device__ __forceinline__ void sl_attn_find_positions(const sl_attn_args &a, int first,
                                                              int begin, int end, int *min_pos,
                                                              int *max_pos)
{
    int least = INT32_MAX;
    int most = -1;
    for (int token = begin + (int)threadIdx.x % SL_WARP; token < end; token += SL_WARP) {
        const int pos = a.pos[first + token];
        least = min(least, pos);
        most = max(most, pos);
    }
#pragma unroll
    for (int step = SL_WARP / 2; step > 0; step /= 2) {
        least = min(least, __shfl_xor_sync(SL_ALL_LANES, least, step));
        most = max(most, __shfl_xor_sync(SL_ALL_LANES, most, step));
    }
    *min_pos = least;
    *max_pos = most;
}

/* The run that starts at token `begin` of the n tokens from `first` on; n <= 64. As above by
 * whole warps. */
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
    sl_attn_find_positions(a, first, run.begin, run.end, &run.min_pos, &run.max_pos);
    return run;
}

/* Two bytes of `word` as f16: 1024 + byte is 0x6400 + byte. `pick` 0x4140: bytes 0 and 1, 0x4342: 2
 * and 3. `offset` is 1024 plus what is to be taken off, twice; `scale` the block's scale, twice.
 * The difference is a whole number, so that only the product rounds. */
static __device__ __forceinline__ uint32_t sl_attn_scaled_pair(uint32_t word, uint32_t pick,
                                                               uint32_t offset, uint32_t scale)
{
    const uint32_t level = sl_half2_sub(sl_bytes_pick(word, 0x64646464u, pick), offset);
    return sl_half2_fma(level, scale, 0);
}

/* Eight elements of a packed row in shared memory as f16: quarter `quarter` of the block at
 * `block`, which is 2-byte aligned. */
static __device__ __forceinline__ uint4 sl_attn_unpack(uint32_t block, int quarter, uint32_t scale,
                                                       bool q4)
{
    /* Q4_0: elements 0..15 are the low halves of 16 bytes, 16..31 the high ones. */
    const uint32_t at = block + 2 + 8 * (uint32_t)(q4 ? quarter & 1 : quarter);
    const uint32_t first = at & ~3u;
    const uint32_t shift = 8 * (at & 2);
    const uint32_t middle = sl_load_shared_4(first + 4);
    uint32_t low = sl_funnel(sl_load_shared_4(first), middle, shift);
    /* Where nothing is shifted the third word is not needed, and may lie past the end of the
     * memory. */
    uint32_t high = sl_funnel(middle, sl_load_shared_4(first + 4 + 2 * (at & 2)), shift);
    uint32_t offset = 0x64806480u; /* 1024 + 128 */
    if (q4) {
        const int half = quarter >= 2 ? 4 : 0;
        low = low >> half & 0x0f0f0f0fu;
        high = high >> half & 0x0f0f0f0fu;
        offset = 0x64086408u; /* 1024 + 8 */
    } else {
        low ^= 0x80808080u;
        high ^= 0x80808080u;
    }
    return make_uint4(sl_attn_scaled_pair(low, 0x4140, offset, scale),
                      sl_attn_scaled_pair(low, 0x4342, offset, scale),
                      sl_attn_scaled_pair(high, 0x4140, offset, scale),
                      sl_attn_scaled_pair(high, 0x4342, offset, scale));
}

/* State of filling one ring: which item comes next and where its block lies. Items are
 * K, V of tile `tile`, K, V of the next, ... */
template <class S> struct sl_attn_feed {
    uint32_t ring; /* shared address: stage, then slots */
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

    __device__ __forceinline__ uint32_t slot_of(int at_item) const
    {
        return ring + S::STAGE_BYTES + (uint32_t)(at_item & (S::R - 1)) * S::SLOT_BYTES;
    }

    __device__ __forceinline__ void copy(const sl_attn_args &a, int is_value)
    {
        const int pos0 = (first_tile + item / 2) * S::BN + first_row;
        const char *src = sl_cuda_kv_row(a.kv, block, is_value, kv_head, pos0 % SL_KV_BLOCK);
        if (S::CACHE == SL_ATTN_F16 ||
            (S::CACHE == SL_ATTN_MIXED && a.kv_type[is_value] == SL_TYPE_F16)) {
            copy_tile(src, pos0);
        } else {
            /* Whole rows, those too that nobody sees: unpacking leaves them out. NB rows are a
             * multiple of 16 bytes, and so is where they begin. */
            const int n = S::NB * a.kv.row_bytes[is_value] / 16;
            for (int at = threadIdx.x % (SL_WARP * S::WM); at < n; at += SL_WARP * S::WM) {
                sl_copy_async_16(slot_of(item) + at * 16, src + at * 16, true);
            }
        }
    }

    /* F16 rows to where they are used. */
    __device__ __forceinline__ void copy_tile(const char *src, int pos0)
    {
        constexpr int n_threads = SL_WARP * S::WM;
        constexpr int n_chunks = S::NB * S::CHUNKS;
        const int thread = threadIdx.x % n_threads;
        const uint32_t slot = slot_of(item);
#pragma unroll
        for (int i = 0; i < (n_chunks + n_threads - 1) / n_threads; i++) {
            const int at = thread + i * n_threads;
            if (n_chunks % n_threads != 0 && at >= n_chunks) {
                break;
            }
            const int row = at / S::CHUNKS;
            const int chunk = at % S::CHUNKS;
            const bool valid = pos0 + row >= kv_begin && pos0 + row < kv_end;
            sl_copy_async_16(slot + sl_attn_swizzle<S::D>(row, chunk), src + at * 16, valid);
        }
    }

    /* Where item `at_item`, which has arrived, can be used as F16. */
    __device__ __forceinline__ uint32_t open(const sl_attn_args &a, int at_item)
    {
        const int is_value = at_item & 1;
        if (S::CACHE == SL_ATTN_F16 ||
            (S::CACHE == SL_ATTN_MIXED && a.kv_type[is_value] == SL_TYPE_F16)) {
            return slot_of(at_item);
        }
        const bool q4 = a.kv_type[is_value] == SL_TYPE_Q4_0;
        const int pos0 = (first_tile + at_item / 2) * S::BN + first_row;
        unpack_tile(slot_of(at_item), a.kv.row_bytes[is_value], pos0, q4);
        return ring;
    }

    /* A thread unpacks blocks of 32 elements. The order of a block's quarters differs between
     * blocks so that the lanes of a store meet in no bank. */
    __device__ __forceinline__ void unpack_tile(uint32_t slot, int row_bytes, int pos0, bool q4)
    {
        constexpr int n_blocks = S::NB * (S::D / 32);
        for (int at = threadIdx.x % (SL_WARP * S::WM); at < n_blocks; at += SL_WARP * S::WM) {
            const int row = at / (S::D / 32);
            const int in_row = at % (S::D / 32);
            const bool valid = pos0 + row >= kv_begin && pos0 + row < kv_end;
            const uint32_t packed = slot + row * row_bytes + in_row * (q4 ? 18 : 34);
            const uint32_t scale = sl_load_shared_2(packed) * 0x10001u;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int quarter = i ^ (S::D <= 128 ? in_row & 2 : (in_row >> 1) & 3);
                uint4 v = make_uint4(0, 0, 0, 0);
                if (valid) {
                    v = sl_attn_unpack(packed, quarter, scale, q4);
                }
                sl_store_shared_16(ring + sl_attn_swizzle<S::D>(row, in_row * 4 + quarter), v);
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

#endif
