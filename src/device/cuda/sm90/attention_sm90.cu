/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention of many tokens of one sequence on compute capability 9.0: F16 cache, heads of 128.
 *
 * Rows are packed as in attention.cuh: row r of a KV head is query head r % group of token
 * r / group. A block has two warp groups with 64 rows each and a copying warp; tiles are 128
 * positions, two blocks of the cache, whose keys and values come through a ring of slots:
 *
 *   | columns 0..63 of 128 positions | columns 64..127 |    rows of 128 swizzled bytes
 *
 * Both products are of a warp group: S = Q K^T with Q in registers, and O += P V with P in
 * registers and V turned. A group queues P V of a tile and Q K^T of the next together, and the two
 * groups take turns at that: while one has its products, the other makes its weights. Softmax as in
 * attention_state.cuh, in units of log2.
 *
 * Of a divided cache a tile may have one block that is not here: it is not copied, and nobody sees
 * its positions. Positions that nobody sees may hold anything: their logits are masked, and their
 * values become zeros before the product, which would make NaN of a NaN.
 */
#include "device/cuda/attention_feed.cuh"
#include "device/cuda/sm90/attention_sm90.h"
#include "device/cuda/sm90/sm90.cuh"
#include "device/cuda/sm90/tensor_map.cuh"
#include "device/cuda/sm90/wgmma.cuh"

#define DIM 128
#define TILE 128 /* positions */
#define ROWS 128
#define N_SLOTS 6
#define SLOT_BYTES (TILE * DIM * 2)
#define PIECE_BYTES (TILE * 128)      /* 64 columns of a tile */
#define BOX_BYTES (SL_KV_BLOCK * 128) /* of a block of the cache */
#define MAX_ROWS (1 << 30)            /* of the map, between the parts of a divided cache */
#define CONSUMERS 256
#define THREADS (CONSUMERS + 128)
#define COPY_REGISTERS 24
#define SUM_REGISTERS 240
#define EDGE_BARRIER 1
#define TURN_BARRIER 2 /* and 3: of either group */

struct attention_args {
    CUtensorMap cache; /* rows of keys and values of a head, 64 for each block of the cache */
    /* One map reaches both parts of a divided cache: where block 0 lies by the first blocks, and by
     * the later ones. */
    int first_row, later_row;
    struct sl_attn_args a;
};

/* The tiles that a block goes through and what is to be seen in them. */
struct range {
    int begin, end;         /* tiles */
    int kv_begin, kv_end;   /* positions that some row sees */
    int all_begin, all_end; /* positions that all rows see */
};

struct ring {
    uint32_t slots;
    int at, parity;

    SL_DEV_MEMBER uint32_t slot(void) const
    {
        return slots + (uint32_t)(at * SLOT_BYTES);
    }
    SL_DEV_MEMBER uint32_t full(void) const
    {
        return slots + N_SLOTS * SLOT_BYTES + 8 * (uint32_t)at;
    }
    SL_DEV_MEMBER uint32_t empty(void) const
    {
        return full() + 8 * N_SLOTS;
    }
    SL_DEV_MEMBER void advance(void)
    {
        if (++at == N_SLOTS) {
            at = 0;
            parity ^= 1;
        }
    }
};

/* The last rows see the most: they go first. */
SL_DEV int first_row(void)
{
    return (int)(gridDim.x - 1 - blockIdx.x) * ROWS;
}

SL_DEV range find_range(const struct sl_attn_args &a)
{
    const int row0 = first_row();
    const int row1 = min(row0 + ROWS, a.n_tokens * a.group) - 1;
    const int token0 = row0 / a.group;
    int min_pos, max_pos;
    sl_attn_find_positions(a, token0, 0, row1 / a.group - token0 + 1, &min_pos, &max_pos);
    range r;
    r.kv_end = min(max_pos + 1, a.n_kv_max);
    r.kv_begin = max(a.window > 0 ? min_pos - a.window + 1 : 0, a.kv.here_begin);
    r.all_end = min(min_pos + 1, a.n_kv_max);
    r.all_begin = max(a.window > 0 ? max_pos - a.window + 1 : 0, a.kv.here_begin);
    r.begin = r.kv_begin / TILE;
    r.end = r.kv_begin < r.kv_end ? (r.kv_end + TILE - 1) / TILE : r.begin;
    return r;
}

/* ---- the copying thread ---- */

/* Queue the keys or the values of a tile: of the blocks of the cache that somebody sees, which are
 * all here. */
SL_DEV void copy_tile(const struct attention_args &k, const range &r, int tile, int side,
                      const ring &to)
{
    constexpr int blocks_of_tile = TILE / SL_KV_BLOCK;
    const int block0 = tile * blocks_of_tile;
    const int begin = max(block0, r.kv_begin / SL_KV_BLOCK);
    const int end = min(block0 + blocks_of_tile, (r.kv_end + SL_KV_BLOCK - 1) / SL_KV_BLOCK);
    sl_barrier_expect(to.full(), (end - begin) * 2 * BOX_BYTES);
    /* Unrolled it takes more registers than the copying thread has. */
#pragma unroll 1
    for (int b = begin; b < end; b++) {
        const int block = sl_cuda_kv_block(k.a.kv, 0, b);
        const int row = (block < k.a.kv.n_first ? k.first_row : k.later_row) +
                        ((2 * block + side) * k.a.kv.n_kv_heads + (int)blockIdx.y) * SL_KV_BLOCK;
        for (int half = 0; half < 2; half++) {
            sl_tile_copy(to.slot() + (uint32_t)(half * PIECE_BYTES + (b - block0) * BOX_BYTES),
                         &k.cache, 64 * half, row, to.full());
        }
    }
}

SL_DEV void copy_all(const struct attention_args &k, const range &r, ring to)
{
    for (int tile = r.begin; tile < r.end; tile++) {
        for (int side = 0; side < 2; side++) {
            sl_barrier_wait(to.empty(), to.parity ^ 1);
            copy_tile(k, r, tile, side, to);
            to.advance();
        }
    }
}

/* ---- a warp group ---- */

struct group {
    float o[DIM / 2], s[TILE / 2]; /* as the sums of a product */
    uint32_t q[DIM / 16][4], p[TILE / 16][4];
    float largest[2], total[2];
    int low[2], high[2]; /* positions that the thread's rows see */
    ring from;

    /* Q of rows g and g + 8, scaled and rounded. */
    SL_DEV_MEMBER void load_row(const struct sl_attn_args &a, int i, int row)
    {
        const bool valid = row < a.n_tokens * a.group;
        const int token = valid ? row / a.group : 0;
        const int head = (int)blockIdx.y * a.group + (valid ? row % a.group : 0);
        const int pos = a.pos[token];
        high[i] = valid ? min(pos, a.n_kv_max - 1) : -1;
        low[i] = max(a.window > 0 ? pos - a.window + 1 : 0, a.kv.here_begin);
        const float *from_q =
            a.q + ((int64_t)token * a.n_heads + head) * DIM + 2 * ((int)threadIdx.x & 3);
#pragma unroll
        for (int k = 0; k < DIM / 16; k++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float2 v = *(const float2 *)(from_q + 16 * k + 8 * half);
                q[k][i + 2 * half] = valid ? sl_pack_f16(v.x * a.q_scale, v.y * a.q_scale) : 0;
            }
        }
        largest[i] = -INFINITY;
        total[i] = 0.0f;
    }

    SL_DEV_MEMBER void clear(void)
    {
#pragma unroll
        for (int i = 0; i < DIM / 2; i++) {
            o[i] = 0.0f;
        }
    }

    SL_DEV_MEMBER void release(uint32_t empty) const
    {
        if ((threadIdx.x & 31) == 0) {
            sl_barrier_arrive(empty, 0);
        }
    }

    /* Queue S = Q K^T. */
    SL_DEV_MEMBER void multiply_keys(uint32_t slot)
    {
        const uint64_t tile = sl_wgmma_tile(slot);
        sl_wgmma_fence();
#pragma unroll
        for (int k = 0; k < DIM / 16; k++) {
            sl_wgmma(s, q[k], tile + (uint64_t)(k / 4 * (PIECE_BYTES / 16) + k % 4 * 2), k > 0);
        }
    }

    /* Queue O += P V. */
    SL_DEV_MEMBER void multiply_values(uint32_t slot)
    {
        const uint64_t tile = sl_wgmma_turned_tile(slot, PIECE_BYTES);
        sl_wgmma_fence();
#pragma unroll
        for (int k = 0; k < TILE / 16; k++) {
            sl_wgmma_turned(o, p[k], tile + (uint64_t)(k * 128), 1);
        }
    }

    SL_DEV_MEMBER void soft_cap(float cap_log2)
    {
#pragma unroll
        for (int i = 0; i < TILE / 2; i++) {
            const float e = sl_exp2(s[i] * (2.0f * SL_LOG2E));
            s[i] = cap_log2 * (1.0f - __fdividef(2.0f, e + 1.0f));
        }
    }

    SL_DEV_MEMBER void mask(int pos0)
    {
        const int first = pos0 + 2 * ((int)threadIdx.x & 3);
#pragma unroll
        for (int i = 0; i < TILE / 2; i++) {
            const int pos = first + 8 * (i / 4) + i % 2;
            const bool seen = pos >= low[i / 2 % 2] && pos <= high[i / 2 % 2];
            s[i] = seen ? s[i] : -INFINITY;
        }
    }

    /* Weights of the tile in P; sums and O on the new maxima. */
    SL_DEV_MEMBER void soft_max(void)
    {
        float base[2], factor[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float most = largest[r];
#pragma unroll
            for (int i = 2 * r; i < TILE / 2; i += 4) {
                most = fmaxf(most, fmaxf(s[i], s[i + 1]));
            }
            most = fmaxf(most, __shfl_xor_sync(SL_ALL_LANES, most, 1));
            most = fmaxf(most, __shfl_xor_sync(SL_ALL_LANES, most, 2));
            /* A row that has seen nothing yet: any finite base makes its weights 0. */
            base[r] = most > -INFINITY ? most : 0.0f;
            factor[r] = sl_exp2(largest[r] - base[r]);
            largest[r] = most;
            total[r] *= factor[r];
        }
#pragma unroll
        for (int i = 0; i < TILE / 2; i++) {
            s[i] = sl_exp2(s[i] - base[i / 2 % 2]);
            total[i / 2 % 2] += s[i];
        }
#pragma unroll
        for (int i = 0; i < TILE / 4; i++) {
            p[i / 4][i % 4] = sl_pack_f16(s[2 * i], s[2 * i + 1]);
        }
        if (__any_sync(SL_ALL_LANES, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
            for (int i = 0; i < DIM / 2; i++) {
                o[i] *= factor[i / 2 % 2];
            }
        }
    }

    /* Values of positions that nobody sees become zeros. Both groups meet: either needs them all.
     */
    SL_DEV_MEMBER void clear_edge(const range &r, int pos0, uint32_t slot) const
    {
        for (int row = (int)threadIdx.x; row < 2 * TILE; row += CONSUMERS) {
            const int pos = pos0 + row % TILE;
            if (pos < r.kv_begin || pos >= r.kv_end) {
                const uint32_t at = slot + (uint32_t)(row / TILE * PIECE_BYTES + row % TILE * 128);
#pragma unroll
                for (uint32_t i = 0; i < 8; i++) {
                    sl_store_shared_16(at + 16 * i, make_uint4(0, 0, 0, 0));
                }
            }
        }
        sl_publish_shared();
        sl_named_sync(EDGE_BARRIER, CONSUMERS);
    }

    /* The logits of tile `tile` become weights, and its values whole; returns where these are. */
    SL_DEV_MEMBER ring prepare(const struct sl_attn_args &a, const range &r, int tile)
    {
        const int pos0 = tile * TILE;
        if (a.cap_log2 != 0.0f) {
            soft_cap(a.cap_log2);
        }
        if (pos0 < r.all_begin || pos0 + TILE > r.all_end) {
            mask(pos0);
        }
        soft_max();
        const ring values = from;
        from.advance();
        sl_barrier_wait(values.full(), values.parity);
        if (pos0 < r.kv_begin || pos0 + TILE > r.kv_end) {
            clear_edge(r, pos0, values.slot());
        }
        return values;
    }

    SL_DEV_MEMBER void finish_products(void)
    {
        sl_wgmma_commit();
        sl_wgmma_wait<0>();
        sl_wgmma_pin(s);
        sl_wgmma_pin(o);
    }

    /* At least one tile. */
    SL_DEV_MEMBER void run(const struct sl_attn_args &a, const range &r)
    {
        const int me = (int)threadIdx.x / 128;
        sl_barrier_wait(from.full(), from.parity);
        multiply_keys(from.slot());
        finish_products();
        release(from.empty());
        from.advance();
        if (me == 1) {
            sl_named_arrive(TURN_BARRIER, CONSUMERS);
        }
#pragma unroll 1
        for (int tile = r.begin; tile + 1 < r.end; tile++) {
            const ring values = prepare(a, r, tile);
            sl_barrier_wait(from.full(), from.parity);
            sl_named_sync(TURN_BARRIER + me, CONSUMERS);
            multiply_values(values.slot());
            multiply_keys(from.slot());
            sl_named_arrive(TURN_BARRIER + 1 - me, CONSUMERS);
            finish_products();
            release(values.empty());
            release(from.empty());
            from.advance();
        }
        const ring values = prepare(a, r, r.end - 1);
        sl_named_sync(TURN_BARRIER + me, CONSUMERS);
        multiply_values(values.slot());
        if (me == 0) {
            sl_named_arrive(TURN_BARRIER + 1, CONSUMERS);
        }
        finish_products();
    }

    SL_DEV_MEMBER void store(const struct sl_attn_args &a, int row0)
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            total[i] += __shfl_xor_sync(SL_ALL_LANES, total[i], 1);
            total[i] += __shfl_xor_sync(SL_ALL_LANES, total[i], 2);
            const int row = row0 + 8 * i;
            if (row < a.n_tokens * a.group) {
                const int head = (int)blockIdx.y * a.group + row % a.group;
                const int64_t at = (int64_t)(row / a.group) * a.n_heads + head;
                const int lane = (int)threadIdx.x & 3;
                const float scale =
                    sl_attn_output_scale(a, at, head, largest[i], total[i], lane == 0);
                float *y = a.y + at * DIM + 2 * lane;
#pragma unroll
                for (int j = 0; j < DIM / 8; j++) {
                    *(float2 *)(y + 8 * j) =
                        make_float2(o[4 * j + 2 * i] * scale, o[4 * j + 2 * i + 1] * scale);
                }
            }
        }
    }
};

/* ---- the kernel ---- */

static __global__ void __launch_bounds__(THREADS, 1)
    attention_kernel(SL_KERNEL_ARG struct attention_args k)
{
    extern __shared__ __align__(1024) uint8_t slot_memory[];
    ring slots = {sl_shared_u32(slot_memory), 0, 0};
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < N_SLOTS; i++) {
            sl_barrier_init(slots.full() + 8 * i, 1);
            sl_barrier_init(slots.empty() + 8 * i, CONSUMERS / 32);
        }
        sl_barrier_publish();
    }
    __syncthreads();
    const range r = find_range(k.a);
    if (threadIdx.x >= CONSUMERS) {
        sl_registers_give<COPY_REGISTERS>();
        if (threadIdx.x == CONSUMERS) {
            copy_all(k, r, slots);
        }
    } else {
        sl_registers_take<SUM_REGISTERS>();
        const int row0 = first_row() + 16 * ((int)threadIdx.x / 32) + (int)(threadIdx.x & 31) / 4;
        group mine;
        mine.from = slots;
        mine.clear();
        mine.load_row(k.a, 0, row0);
        mine.load_row(k.a, 1, row0 + 8);
        if (r.begin < r.end) {
            mine.run(k.a, r);
        }
        mine.store(k.a, row0);
    }
}

/* Where block 0 lies for the first blocks, and where it would for the later ones, in rows behind
 * the lower of both. False: too far apart, or not by whole rows. */
static bool find_rows(const sl_cuda_kv *kv, int *first_row, int *later_row)
{
    const int64_t bytes = (int64_t)((uintptr_t)kv->later - (uintptr_t)kv->data);
    const int64_t rows = bytes / (DIM * 2);
    const int64_t n_first = kv->n_first < INT32_MAX ? kv->n_first : 0;
    const int64_t ahead = n_first * 2 * kv->n_kv_heads * SL_KV_BLOCK;
    *first_row = (int)(rows < 0 ? -rows : 0);
    *later_row = (int)((rows < 0 ? 0 : rows) - ahead);
    return rows * (DIM * 2) == bytes && rows > -MAX_ROWS && rows < MAX_ROWS && ahead < MAX_ROWS;
}

bool sl_attention_sm90_takes(const struct sl_attn_args *a, const struct sl_cuda_props *props)
{
    int first_row, later_row;
    const int64_t blocks = ((int64_t)a->n_tokens * a->group + ROWS - 1) / ROWS * a->kv.n_kv_heads;
    return sl_is_sm90(props) && a->head_dim == DIM && !a->seq && a->kv_type[0] == SL_TYPE_F16 &&
           a->kv_type[1] == SL_TYPE_F16 && blocks >= props->n_sm / 2 && a->kv.n_kv_heads <= 65535 &&
           find_rows(&a->kv, &first_row, &later_row);
}

int sl_cuda_attention_sm90(cudaStream_t stream, const struct sl_attn_args *args)
{
    struct attention_args k;
    k.a = *args;
    if (!find_rows(&args->kv, &k.first_row, &k.later_row)) {
        return SL_CUDA_UNSUPPORTED;
    }
    const char *lower = k.first_row > 0 ? args->kv.later : args->kv.data;
    /* How long the cache is does not matter: only rows of its blocks are asked for. */
    const int failed = sl_tensor_map_rows(&k.cache, lower, INT32_MAX, DIM, SL_KV_BLOCK);
    if (failed) {
        return failed;
    }
    const unsigned tiles = (unsigned)((args->n_tokens * args->group + ROWS - 1) / ROWS);
    return SL_SM90_LAUNCH(attention_kernel, dim3(tiles, (unsigned)args->kv.n_kv_heads),
                          dim3(THREADS), (size_t)N_SLOTS * SLOT_BYTES + 2 * 8 * N_SLOTS, stream, k);
}
