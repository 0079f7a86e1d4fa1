/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of many tokens on compute capability 9.0: f16 operands, float sums.
 *
 * A block makes tiles of 128 weight rows x up to 256 tokens with two warp groups, 64 rows each, in
 * steps of 64 along the depth. Weights are the operand in registers, so that every type goes the
 * same way: F16 and BF16 from tiles in shared memory, packed types straight from device memory,
 * unpacked on the way (weights_sm90.cuh). x is the operand in shared memory; two blocks of a
 * cluster have neighbouring row tiles and the same tokens, and each fetches half of the x tile for
 * both.
 *
 *   copying warp   waits for empty[slot], queues the copies, full[slot] counts their bytes
 *   warp groups    step i: queue the products of i; wait for those of i - 1; give its slot back;
 *                  wait for full[i + 1] and make its fragments while the products of i run
 *
 * Slots go round without regard to tiles: while sums are stored, the next tile is on its way. What
 * the tiles are comes from a source: linear_sm90.cuh, experts_sm90.cuh.
 */
#ifndef SL_DEVICE_CUDA_SM90_GEMM_SM90_CUH
#define SL_DEVICE_CUDA_SM90_GEMM_SM90_CUH

#include "device/cuda/sm90/tensor_map.cuh"
#include "device/cuda/sm90/weights_sm90.cuh"
#include "device/cuda/sm90/wgmma.cuh"

#define SL_SM90_DEPTH 64
#define SL_SM90_CONSUMERS 256
#define SL_SM90_THREADS (SL_SM90_CONSUMERS + 128)
/* Registers of a thread: a third of the multiprocessor's at the launch, then moved to where the
 * sums are. */
#define SL_SM90_COPY_REGISTERS 40
#define SL_SM90_SUM_REGISTERS 232
#define SL_SM90_MAX_SLOTS 8 /* two barriers of 8 bytes each */
#define SL_SM90_BOX_TOKENS 64
#define SL_SM90_BOX_BYTES (SL_SM90_BOX_TOKENS * 128)

/* How a slot is made: x of T tokens, then weights that are copied as they are. */
template <class W, int T> struct sl_sm90_slots {
    static constexpr int x_bytes = T * 128;
    static constexpr int bytes = x_bytes + W::tile_bytes;
    static constexpr int fitting = SL_SM90_SLOTS_BYTES / bytes;
    static constexpr int n = fitting < SL_SM90_MAX_SLOTS ? fitting : SL_SM90_MAX_SLOTS;
};

/* Where a warp group or the copying warp is in the ring of slots. */
template <class SLOTS> struct sl_sm90_ring {
    uint32_t slots; /* address of the first, and of what follows them all: the barriers */
    int at, parity;

    SL_DEV_MEMBER uint32_t slot(void) const
    {
        return slots + (uint32_t)(at * SLOTS::bytes);
    }

    SL_DEV_MEMBER uint32_t full(int i) const
    {
        return slots + SL_SM90_SLOTS_BYTES + 8 * (uint32_t)i;
    }

    SL_DEV_MEMBER uint32_t empty(int i) const
    {
        return full(i + SL_SM90_MAX_SLOTS);
    }

    SL_DEV_MEMBER void advance(void)
    {
        if (++at == SLOTS::n) {
            at = 0;
            parity ^= 1;
        }
    }
};

/* ---- copies ---- */

/* Queue what a tile needs at column `col`. SHARED: boxes of x go to both blocks of the cluster, who
 * fetch them in turn. */
template <class W, int T, bool SHARED>
SL_DEV void sl_sm90_copy_step(const struct sl_sm90_maps &maps, uint32_t slot, uint32_t full,
                              bool gated, const sl_sm90_tile &tile, int col, int rank)
{
    using slots = sl_sm90_slots<W, T>;
    const int n_boxes = (tile.n_tokens + SL_SM90_BOX_TOKENS - 1) / SL_SM90_BOX_TOKENS;
    sl_barrier_expect(full, n_boxes * SL_SM90_BOX_BYTES + W::tile_bytes);
    for (int i = SHARED ? rank : 0; i < n_boxes; i += SHARED ? 2 : 1) {
        const uint32_t to = slot + (uint32_t)(i * SL_SM90_BOX_BYTES);
        const int row = tile.x_row + i * SL_SM90_BOX_TOKENS;
        if (SHARED) {
            sl_tile_multicast(to, &maps.x, col, row, full, 3);
        } else {
            sl_tile_copy(to, &maps.x, col, row, full);
        }
    }
    if constexpr (W::tile_bytes > 0) {
        const uint32_t w = slot + slots::x_bytes;
        if (gated) {
            sl_tile_copy(w, &maps.w[0], col, tile.row0, full);
            sl_tile_copy(w + W::tile_bytes / 2, &maps.w[1], col, tile.row0, full);
        } else {
            sl_tile_copy(w, &maps.w[tile.part], col, tile.row0, full);
        }
    }
}

/* ---- sums: c[4 (i / 2) + i % 2] and the one 2 behind it are of token 8 (i / 2) + i % 2 ---- */

#define SL_SM90_BATCH 32 /* scales that a thread loads at once */

/* Scales of tokens i0 .. (as above) at once, ahead of their stores: one wait instead of many.
 * Tokens from n_left on do not exist. */
template <int N>
SL_DEV void sl_sm90_load_scales(const float *scale, int i0, int n_left, float (&s)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        const int token = 8 * ((i0 + i) / 2) + i % 2;
        s[i] = token < n_left ? __ldg(scale + token) : 0.0f;
    }
}

/* A thread has two neighbouring rows, which are stored as one. Sums to add to are loaded for eight
 * tokens at a time, ahead of the stores. */
template <class W, int N>
SL_DEV void sl_sm90_store(const struct sl_linear_args &a, const sl_sm90_tile &tile,
                          const float *scale, float (&c)[N / 2])
{
    const struct sl_linear_part &part = a.part[tile.part];
    const int row = tile.row0 + 16 * ((int)threadIdx.x >> 5) + 2 * (((int)threadIdx.x & 31) >> 2);
    if (row >= part.n_rows) {
        return;
    }
    const float2 bias =
        part.bias ? make_float2(part.bias[row], part.bias[row + 1]) : make_float2(0.0f, 0.0f);
    const bool swap = W::swapped();
    const int first = 2 * ((int)threadIdx.x & 3);
    const int n_left = tile.n_tokens - first;
    float *y0 = part.y + (int64_t)(tile.token0 + first) * part.n_rows + row;
    scale += tile.token0 + first;
#pragma unroll
    for (int j = 0; j < N / 8; j += 4) {
        float2 sum[8];
        float s[8];
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int token = 8 * (j + i / 2) + i % 2;
            s[i] = token < n_left ? scale[token] : 0.0f;
            sum[i] = bias;
        }
        if (a.accumulate) {
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int token = 8 * (j + i / 2) + i % 2;
                if (token < n_left) {
                    const float2 old = *(const float2 *)(y0 + (int64_t)token * part.n_rows);
                    sum[i].x += old.x;
                    sum[i].y += old.y;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int token = 8 * (j + i / 2) + i % 2;
            const float g = s[i] * c[4 * (j + i / 2) + i % 2];
            const float g8 = s[i] * c[4 * (j + i / 2) + 2 + i % 2];
            if (token < n_left) {
                *(float2 *)(y0 + (int64_t)token * part.n_rows) =
                    make_float2(sum[i].x + (swap ? g8 : g), sum[i].y + (swap ? g : g8));
            }
        }
    }
}

template <int N>
SL_DEV void sl_sm90_store_gated(const struct sl_linear_args &a, const sl_sm90_tile &tile,
                                const float *scale, float (&c)[N / 2])
{
    constexpr int batch = N / 4 < SL_SM90_BATCH ? N / 4 : SL_SM90_BATCH;
    const int lane = (int)threadIdx.x & 31;
    const int row = tile.row0 + 8 * ((int)threadIdx.x >> 5) + (lane >> 2);
    const int n_rows = a.part[0].n_rows;
    if (row >= n_rows) {
        return;
    }
    const int first = 2 * (lane & 3);
    const int n_left = tile.n_tokens - first;
    const float bias_gate = a.part[0].bias ? a.part[0].bias[row] : 0.0f;
    const float bias_up = a.part[1].bias ? a.part[1].bias[row] : 0.0f;
    float *y = a.part[0].y + (int64_t)(tile.token0 + first) * n_rows + row;
    float s[batch];
#pragma unroll
    for (int i = 0; i < N / 4; i++) {
        if (i % batch == 0) {
            sl_sm90_load_scales(scale + tile.token0 + first, i, n_left, s);
        }
        const float gate = s[i % batch] * c[4 * (i / 2) + i % 2] + bias_gate;
        const float up = s[i % batch] * c[4 * (i / 2) + 2 + i % 2] + bias_up;
        if (8 * (i / 2) + i % 2 < n_left) {
            *y = sl_gate(gate, up, a.activation);
        }
        y += (i % 2 ? 7 : 1) * (int64_t)n_rows;
    }
}

/* ---- a warp group's work ---- */

/* SHARED: two blocks fill each other's slots. */
template <class W, int T, bool SHARED> struct sl_sm90_group {
    using slots = sl_sm90_slots<W, T>;
    W weights;
    sl_sm90_ring<slots> ring;
    int n_steps;

    /* Give slot `at` back to those who fill it. */
    SL_DEV_MEMBER void release(int at) const
    {
        const int lane = (int)threadIdx.x & 31;
        if (SHARED && lane < 2) {
            sl_barrier_arrive(ring.empty(at), lane);
        } else if (!SHARED && lane == 0) {
            sl_barrier_arrive_here(ring.empty(at));
        }
    }

    /* Wait for the ring's slot, which is of step `it`, and make its fragments. */
    template <int PARITY> SL_DEV_MEMBER void prepare(uint32_t f[4][4], int it)
    {
        sl_barrier_wait(ring.full(ring.at), ring.parity);
        weights.template fragments<PARITY>(f, ring.slot() + slots::x_bytes, it, n_steps);
    }

    /* Step `it`, whose fragments are in `now`; those of the next come to `then`. */
    template <int PARITY, int N_SUMS>
    SL_DEV_MEMBER void step(float (&c)[N_SUMS], const uint32_t now[4][4], uint32_t then[4][4],
                            int it, int &last)
    {
        const uint64_t x = sl_wgmma_tile(ring.slot());
        sl_wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++) {
            sl_wgmma(c, now[k], x + 2 * (uint64_t)k, 1);
        }
        sl_wgmma_commit();
        sl_wgmma_wait<1>();
        if (it > 0) {
            release(last);
        }
        last = ring.at;
        ring.advance();
        if (it + 1 < n_steps) {
            prepare<1 - PARITY>(then, it + 1);
        }
    }

    /* The sums of a tile over n_steps, at least one, from column first_col on. */
    template <int N_SUMS>
    SL_DEV_MEMBER void multiply(float (&c)[N_SUMS], const struct sl_linear_args &a,
                                const sl_sm90_tile &tile, int first_col)
    {
        uint32_t even[4][4], odd[4][4];
        int last = 0;
#pragma unroll
        for (int i = 0; i < N_SUMS; i++) {
            c[i] = 0.0f;
        }
        weights.start(a, tile, first_col);
        prepare<0>(even, 0);
        int it = 0;
#pragma unroll 1
        do {
            step<0>(c, even, odd, it, last);
            if (it + 1 < n_steps) {
                step<1>(c, odd, even, it + 1, last);
            }
            it += 2;
        } while (it < n_steps); /* as a loop that may not begin it would wait at every step */
        sl_wgmma_wait<0>();
        sl_wgmma_pin(c);
        release(last);
    }

    /* A tile of at most N tokens. `scale` is of y's token 0. */
    template <int N>
    SL_DEV_MEMBER void make(const struct sl_linear_args &a, const sl_sm90_tile &tile,
                            const float *scale)
    {
        float c[N / 2];
        multiply(c, a, tile, 0);
        if (a.activation != SL_ACT_NONE) {
            sl_sm90_store_gated<N>(a, tile, scale, c);
        } else {
            sl_sm90_store<W, N>(a, tile, scale, c);
        }
        __syncwarp();
    }

    SL_DEV_MEMBER void make_tile(const struct sl_linear_args &a, const sl_sm90_tile &tile,
                                 const float *scale)
    {
        if constexpr (T == 256) {
            if (tile.n_tokens > 128) {
                make<256>(a, tile, scale);
            } else {
                make<128>(a, tile, scale);
            }
        } else if (tile.n_tokens > 96) {
            make<128>(a, tile, scale);
        } else if (tile.n_tokens > 64) {
            make<96>(a, tile, scale);
        } else if (tile.n_tokens > 32) {
            make<64>(a, tile, scale);
        } else {
            make<32>(a, tile, scale);
        }
    }
};

/* ---- the kernel's body ---- */

/* n_peers: blocks that fill a slot. */
SL_DEV void sl_sm90_init_barriers(uint32_t full, int n_peers)
{
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < SL_SM90_MAX_SLOTS; i++) {
            sl_barrier_init(full + 8 * i, 1);
            sl_barrier_init(full + 8 * (SL_SM90_MAX_SLOTS + i), n_peers * SL_SM90_CONSUMERS / 32);
        }
        sl_barrier_publish();
    }
    sl_cluster_sync();
}

/* Tiles of up to T tokens. S says what they are: n_items(), and bind(i, rank, a, tile), which
 * returns the arguments that the tile belongs to (`a`, where it has to make them), or null: there
 * are no more; a tile may be without tokens. Both blocks of a cluster get the same answer, but for
 * the row tile. */
template <class W, int T, class S>
SL_DEV void sl_sm90_work(const S &source, const struct sl_sm90_maps &maps, bool gated, int n_cols)
{
    extern __shared__ __align__(1024) uint8_t slot_memory[];
    sl_sm90_ring<sl_sm90_slots<W, T>> ring;
    ring.slots = sl_shared_u32(slot_memory);
    ring.at = ring.parity = 0;
    sl_sm90_init_barriers(ring.full(0), 2);
    const int rank = sl_cluster_rank();
    const int n_steps = (n_cols + SL_SM90_DEPTH - 1) / SL_SM90_DEPTH;
    const int n_items = source.n_items();
    struct sl_linear_args local;
    sl_sm90_tile tile;
    if (threadIdx.x >= SL_SM90_CONSUMERS) {
        sl_registers_give<SL_SM90_COPY_REGISTERS>();
        for (int i = (int)blockIdx.x / 2; i < n_items; i += (int)gridDim.x / 2) {
            if (threadIdx.x != SL_SM90_CONSUMERS || !source.bind(i, rank, local, tile)) {
                break;
            }
            for (int it = 0; it < n_steps && tile.n_tokens > 0; it++) {
                sl_barrier_wait(ring.empty(ring.at), ring.parity ^ 1);
                sl_sm90_copy_step<W, T, true>(maps, ring.slot(), ring.full(ring.at), gated, tile,
                                              it * SL_SM90_DEPTH, rank);
                ring.advance();
            }
        }
        __syncwarp();
    } else {
        sl_registers_take<SL_SM90_SUM_REGISTERS>();
        sl_sm90_group<W, T, true> group;
        group.ring = ring;
        group.n_steps = n_steps;
        group.weights.init(gated);
        for (int i = (int)blockIdx.x / 2; i < n_items; i += (int)gridDim.x / 2) {
            const struct sl_linear_args *a = source.bind(i, rank, local, tile);
            if (!a) {
                break;
            }
            if (tile.n_tokens > 0) {
                group.make_tile(*a, tile, source.scales(tile));
            }
        }
    }
    /* No block leaves while the other may still write to its memory. */
    sl_cluster_sync();
}

/* Blocks for n_items: two for each, as far as the GPU reaches. */
static inline unsigned sl_sm90_blocks(int64_t n_items, const struct sl_cuda_props *props)
{
    return 2 * (unsigned)(n_items < props->n_sm / 2 ? n_items : props->n_sm / 2);
}

#endif
