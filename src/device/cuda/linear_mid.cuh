/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of up to 64 tokens with tensor cores, still bound by the bytes of the matrix.
 *
 * A block of eight warps takes 32 rows and a tile of 8 * NT tokens over the whole depth, so no
 * partial sums leave it. Chunks of the depth (raw bytes of the rows, packed x) stream through a
 * ring of shared memory, several ahead. In a chunk, warp w works on row half w % 2 (16 rows) and
 * depth quarter w / 2: weights are the 16-row operand of the products, unpacked from the raw bytes
 * straight into its registers; tokens are the 8-column operand. The quarters are added at the end,
 * in fixed order. Where that makes too few blocks to fill a GPU, a block takes 16 rows, its warps
 * an eighth of chunks of twice the depth.
 * Quantized types multiply int8 by int8 with 32-bit sums over a group of weights (32, or 16 where
 * scales are that fine) and apply both scales in float. F16 and BF16 multiply in f16 with float
 * sums; x is f16, scaled by rows.
 */
#ifndef SL_DEVICE_CUDA_LINEAR_MID_CUH
#define SL_DEVICE_CUDA_LINEAR_MID_CUH

#include "device/cuda/launch.cuh"
#include "device/cuda/linear_args.cuh"
#include "device/cuda/linear_unpack.cuh"

#define SL_MID_THREADS 256
#define SL_MID_SHARED_MAX (64 * 1024) /* what every target has */

/* How the warps of a block of ROWS rows, 32 or 16, share its work. */
template <int ROWS> struct sl_mid_share {
    static constexpr int halves = ROWS / 16;  /* of rows */
    static constexpr int pieces = 8 / halves; /* of the depth */
    /* Floats of a token's sums: those of four neighbouring lanes in other banks. */
    static constexpr int pitch = ROWS + 4;

    SL_DEV_MEMBER static int half(void)
    {
        return ((int)threadIdx.x >> 5) % halves;
    }
    SL_DEV_MEMBER static int piece(void)
    {
        return ((int)threadIdx.x >> 5) / halves;
    }
};

constexpr int sl_mid_stages(int stage_bytes)
{
    return SL_MID_SHARED_MAX / stage_bytes > 6 ? 6 : SL_MID_SHARED_MAX / stage_bytes;
}

template <int ROWS> constexpr int sl_mid_shared_bytes(int stage_bytes, int n_tokens)
{
    const int ring = sl_mid_stages(stage_bytes) * stage_bytes;
    const int sums = sl_mid_share<ROWS>::pieces * n_tokens * sl_mid_share<ROWS>::pitch * 4;
    return ring > sums ? ring : sums;
}

/* The rows of a block: local row r is row `row0 + r` of the part, or, gated, one of gate in the
 * first half and of up in the second. Rows past the end repeat the last; nothing is stored. */
struct sl_mid_rows {
    int part, row0;
    bool gated;
};

template <int ROWS> SL_DEV sl_mid_rows sl_mid_rows_of(const struct sl_linear_args &a, int tile)
{
    sl_mid_rows rows;
    rows.gated = a.activation != SL_ACT_NONE;
    rows.part = rows.gated ? 0 : sl_part_of_tile(a, tile);
    rows.row0 = (tile - a.part[rows.part].first) * (rows.gated ? ROWS / 2 : ROWS);
    return rows;
}

template <int ROWS>
SL_DEV const uint8_t *sl_mid_row(const struct sl_linear_args &a, const sl_mid_rows &rows, int r)
{
    const struct sl_linear_part &part = a.part[rows.gated ? r / (ROWS / 2) : rows.part];
    const int row = rows.row0 + (rows.gated ? r % (ROWS / 2) : r);
    return part.w + (row < part.n_rows ? row : part.n_rows - 1) * a.row_bytes;
}

/* Add the pieces' sums in shared memory and store y. `scale`: of the tokens' x, or NULL. */
template <int ROWS, int TOKENS>
SL_DEV void sl_mid_store(const struct sl_linear_args &a, const sl_mid_rows &rows, int token0,
                         const float *sums, const float *scale)
{
    using share = sl_mid_share<ROWS>;
    const int n_out = rows.gated ? ROWS / 2 : ROWS;
    for (int i = (int)threadIdx.x; i < TOKENS * n_out; i += SL_MID_THREADS) {
        const int r = i % n_out;
        const int n = i / n_out;
        const int token = token0 + n;
        const int row = rows.row0 + r;
        if (token >= a.n_tokens || row >= a.part[rows.part].n_rows) {
            continue;
        }
        float v = 0.0f, up = 0.0f;
#pragma unroll
        for (int q = 0; q < share::pieces; q++) {
            const float *at = sums + (q * TOKENS + n) * share::pitch + r;
            v += at[0];
            up += rows.gated ? at[ROWS / 2] : 0.0f;
        }
        if (scale) {
            v *= scale[token];
            up *= scale[token];
        }
        if (rows.gated) {
            sl_store_gated(a, token, row, v, up);
        } else {
            sl_store_y(a, a.part[rows.part], token, row, v);
        }
    }
}

/* A warp's sums to shared memory: [piece][token][row]. */
template <int ROWS, int NT> SL_DEV void sl_mid_share_sums(float *sums, const float acc[NT][4])
{
    using share = sl_mid_share<ROWS>;
    const int lane = (int)threadIdx.x & 31;
    float *at = sums + (share::piece() * 8 * NT + 2 * (lane & 3)) * share::pitch +
                16 * share::half() + (lane >> 2);
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
        at[0] = acc[nt][0];
        at[share::pitch] = acc[nt][1];
        at[8] = acc[nt][2];
        at[share::pitch + 8] = acc[nt][3];
        at += 8 * share::pitch;
    }
}

/* ---- quantized weights ---- */

template <class F, int NT, int ROWS> struct sl_midq_stage {
    static constexpr int depth = 64 * sl_mid_share<ROWS>::pieces;
    static constexpr int super_bytes = 256 / F::items * F::bytes;   /* of a row's 256 weights */
    static constexpr int chunk_bytes = depth / F::items * F::bytes; /* of a row */
    static constexpr int x_pitch = depth + 16; /* bytes of a token's levels: rows in other banks */
    static constexpr int s_pitch = depth / 4 + 8; /* bytes of a token's scales and sums */
    static constexpr int n16 =
        F::align >= 16 ? chunk_bytes / 16 : (chunk_bytes + 16 - F::align + 15) / 16;
    static constexpr int pitch = 16 * (n16 | 1); /* odd: eight rows in other banks */
    static constexpr int x = ROWS * pitch;
    static constexpr int s = x + 8 * NT * x_pitch;
    static constexpr int bytes = s + 8 * NT * s_pitch;
    static constexpr int aligned = (bytes + 15) / 16 * 16;
};

/* Queue the copies of chunk `chunk` into a stage: the weights. */
template <class F, int NT, int ROWS>
SL_DEV void sl_midq_fetch_w(const struct sl_linear_args &a, const sl_mid_rows &rows, uint8_t *stage,
                            int chunk)
{
    using S = sl_midq_stage<F, NT, ROWS>;
    const int64_t at = (int64_t)chunk * S::chunk_bytes;
    const int bytes = a.row_bytes - at < S::chunk_bytes ? (int)(a.row_bytes - at) : S::chunk_bytes;
    for (int i = (int)threadIdx.x; i < ROWS * S::n16; i += SL_MID_THREADS) {
        const int r = i / S::n16;
        const int piece = i - r * S::n16;
        const uint8_t *src = sl_mid_row<ROWS>(a, rows, r) + at;
        const int odd = (int)((uintptr_t)src & 15);
        const int left = odd + bytes - 16 * piece;
        if (left > 0) {
            sl_copy16(stage + r * S::pitch + 16 * piece, src - odd + 16 * piece,
                      left < 16 ? left : 16);
        }
    }
}

/* x, and the end of what is waited for as one. */
template <class F, int NT, int ROWS>
SL_DEV void sl_midq_fetch_x(const struct sl_linear_args &a, int token0, uint8_t *stage, int chunk)
{
    using S = sl_midq_stage<F, NT, ROWS>;
    constexpr int n16 = S::depth / 16, n_blocks = S::depth / 32;
    const uint8_t *x = (const uint8_t *)a.xs;
    for (int i = (int)threadIdx.x; i < 8 * NT * n16; i += SL_MID_THREADS) {
        const int n = i / n16;
        const int k = chunk * S::depth + 16 * (i % n16);
        const bool there = token0 + n < a.n_tokens && k < a.n_cols;
        sl_copy16(stage + S::x + n * S::x_pitch + 16 * (i % n16),
                  there ? x + (int64_t)(token0 + n) * a.n_cols + k : x, there ? 16 : 0);
    }
    const uint8_t *s = x + (int64_t)a.n_tokens * a.n_cols;
    for (int i = (int)threadIdx.x; i < 8 * NT * n_blocks; i += SL_MID_THREADS) {
        const int n = i / n_blocks;
        const int b = chunk * n_blocks + i % n_blocks;
        const bool there = token0 + n < a.n_tokens && b < a.n_cols / 32;
        sl_copy8(stage + S::s + n * S::s_pitch + 8 * (i % n_blocks),
                 there ? s + ((int64_t)(token0 + n) * (a.n_cols / 32) + b) * 8 : s, there ? 8 : 0);
    }
    sl_copy_commit();
}

/* One group of 32 weights of 16 rows times 8 tokens. w0, w1: the fragments of rows g and g + 8. */
template <class F, class S>
SL_DEV void sl_midq_group(const sl_frag &w0, const sl_frag &w1, int j, const uint8_t *x,
                          const uint8_t *s, float acc[4])
{
    const int lane = (int)threadIdx.x & 31;
    const int g = lane >> 2;
    const int t = lane & 3;
    const uint8_t *xg = x + g * S::x_pitch + 4 * t;
    const uint32_t b0 = *(const uint32_t *)xg;
    const uint32_t b1 = *(const uint32_t *)(xg + 16);
    const struct sl_xblock s0 = *(const struct sl_xblock *)(s + 2 * t * S::s_pitch);
    const struct sl_xblock s1 = *(const struct sl_xblock *)(s + (2 * t + 1) * S::s_pitch);
    constexpr int halves = F::half_scales ? 2 : 1;
#pragma unroll
    for (int h = 0; h < halves; h++) {
        int sum[4] = {SL_MAGIC_BITS, SL_MAGIC_BITS, SL_MAGIC_BITS, SL_MAGIC_BITS};
        if constexpr (F::half_scales) {
            sl_mma_s8_k16(sum, w0.level[j][h], w1.level[j][h], h ? b1 : b0);
        } else {
            const uint32_t w[4] = {w0.level[j][0], w1.level[j][0], w0.level[j][1], w1.level[j][1]};
            sl_mma_s8_k32(sum, w, b0, b1);
        }
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            v[i] = (i < 2 ? w0 : w1).s[j][h] * sl_magic_f32(sum[i]);
        }
        if constexpr (F::has_min) {
            float x0, x1;
            if constexpr (F::half_scales) {
                x0 = sl_half_f32(s0.sums >> 16 * h);
                x1 = sl_half_f32(s1.sums >> 16 * h);
            } else {
                x0 = sl_half_f32(s0.sums) + sl_half_f32(s0.sums >> 16);
                x1 = sl_half_f32(s1.sums) + sl_half_f32(s1.sums >> 16);
            }
            v[0] += w0.m[j][h] * x0;
            v[1] += w0.m[j][h] * x1;
            v[2] += w1.m[j][h] * x0;
            v[3] += w1.m[j][h] * x1;
        }
        acc[0] += s0.d * v[0];
        acc[1] += s1.d * v[1];
        acc[2] += s0.d * v[2];
        acc[3] += s1.d * v[3];
    }
}

/* A warp's share of a chunk: one piece of 64 weights of its 16 rows. */
template <class F, int NT, int ROWS>
SL_DEV void sl_midq_chunk(const uint8_t *stage, uint32_t odd0, uint32_t odd1, int n_valid,
                          float acc[NT][4])
{
    using S = sl_midq_stage<F, NT, ROWS>;
    using share = sl_mid_share<ROWS>;
    const int lane = (int)threadIdx.x & 31;
    const int super = share::piece() / 4; /* of the chunk's 256 weights */
    const int piece = share::piece() % 4;
    const uint8_t *row =
        stage + (16 * share::half() + (lane >> 2)) * S::pitch + super * S::super_bytes;
    sl_frag w0, w1;
    F::frag(row + odd0, piece, lane & 3, n_valid, w0);
    F::frag(row + 8 * S::pitch + odd1, piece, lane & 3, n_valid, w1);
    if constexpr (F::offset != 0) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            w0.level[i >> 1][i & 1] = sl_bytes_less(w0.level[i >> 1][i & 1], F::offset);
            w1.level[i >> 1][i & 1] = sl_bytes_less(w1.level[i >> 1][i & 1], F::offset);
        }
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const int group = 8 * super + (j ? sl_group_b<F>(piece) : sl_group_a<F>(piece));
        const uint8_t *x = stage + S::x + 32 * group;
        const uint8_t *s = stage + S::s + 8 * group;
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            sl_midq_group<F, S>(w0, w1, j, x + 8 * nt * S::x_pitch, s + 8 * nt * S::s_pitch,
                                acc[nt]);
        }
    }
}

/* The block's work: row tile `tile`, tokens from token0 on. */
template <int TYPE, int NT, int ROWS>
SL_DEV void sl_midq_tile(const struct sl_linear_args &a, int tile, int token0, uint8_t *shared)
{
    using F = sl_fmt<TYPE>;
    using S = sl_midq_stage<F, NT, ROWS>;
    using share = sl_mid_share<ROWS>;
    constexpr int stages = sl_mid_stages(S::aligned);
    const sl_mid_rows rows = sl_mid_rows_of<ROWS>(a, tile);
    const int n_chunks = (a.n_cols + S::depth - 1) / S::depth;
    /* Low address bits of this lane's two rows: where they start in a stage's 16-byte pieces. */
    const int r = 16 * share::half() + (((int)threadIdx.x & 31) >> 2);
    const uint32_t low0 = (uint32_t)(uintptr_t)sl_mid_row<ROWS>(a, rows, r);
    const uint32_t low1 = (uint32_t)(uintptr_t)sl_mid_row<ROWS>(a, rows, r + 8);

    for (int i = 0; i < stages - 1 && i < n_chunks; i++) {
        sl_midq_fetch_w<F, NT, ROWS>(a, rows, shared + i * S::aligned, i);
    }
    sl_await_ahead();
    for (int i = 0; i < stages - 1; i++) {
        sl_midq_fetch_x<F, NT, ROWS>(a, token0, shared + i * S::aligned, i);
    }
    float acc[NT][4];
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
        acc[nt][0] = acc[nt][1] = acc[nt][2] = acc[nt][3] = 0.0f;
    }
    int slot = 0, next = stages - 1;
    for (int chunk = 0; chunk < n_chunks; chunk++) {
        sl_copy_wait<stages - 2>();
        sl_block_sync(); /* the chunk is there for all, and the one before is done with */
        if (chunk + stages - 1 < n_chunks) {
            sl_midq_fetch_w<F, NT, ROWS>(a, rows, shared + next * S::aligned, chunk + stages - 1);
            sl_midq_fetch_x<F, NT, ROWS>(a, token0, shared + next * S::aligned, chunk + stages - 1);
        } else {
            sl_copy_commit();
        }
        const uint32_t at = (uint32_t)chunk * S::chunk_bytes;
        const int groups = (a.n_cols - S::depth * chunk) / 32 - 2 * share::piece();
        if (groups > 0) {
            sl_midq_chunk<F, NT, ROWS>(
                shared + slot * S::aligned, F::align >= 16 ? 0 : (low0 + at) & 15,
                F::align >= 16 ? 0 : (low1 + at) & 15, groups < 2 ? 1 : 2, acc);
        }
        slot = slot + 1 == stages ? 0 : slot + 1;
        next = next + 1 == stages ? 0 : next + 1;
    }
    sl_copy_wait<0>();
    sl_block_sync();
    sl_mid_share_sums<ROWS, NT>((float *)shared, acc);
    sl_block_sync();
    sl_mid_store<ROWS, 8 * NT>(a, rows, token0, (const float *)shared, NULL);
}

template <int TYPE, int NT, int ROWS>
__global__ void __launch_bounds__(SL_MID_THREADS, NT <= 2 ? 3 : 2)
    sl_midq_kernel(SL_KERNEL_ARG struct sl_linear_args a)
{
    SL_SHARED(shared);
    sl_let_follow();
    sl_midq_tile<TYPE, NT, ROWS>(a, (int)blockIdx.x, (int)blockIdx.y * 8 * NT, shared);
}

/* ---- F16 and BF16 weights ---- */

template <int NT, int ROWS> struct sl_midh_stage {
    static constexpr int depth = 32 * sl_mid_share<ROWS>::pieces;
    static constexpr int pitch = 2 * depth; /* bytes of a row, and of a token's x */
    static constexpr int x = ROWS * pitch;
    static constexpr int bytes = x + 8 * NT * pitch;

    /* Byte of 16-byte piece `i` of a row: odd rows swap halves of 128 bits' banks. */
    SL_DEV_MEMBER static int at(int row, int i)
    {
        return row * pitch + 16 * (i ^ (row & 1) << 2);
    }
};

template <int NT, int ROWS>
SL_DEV void sl_midh_fetch_w(const struct sl_linear_args &a, const sl_mid_rows &rows, uint8_t *stage,
                            int chunk)
{
    using S = sl_midh_stage<NT, ROWS>;
    constexpr int n16 = S::pitch / 16;
    for (int i = (int)threadIdx.x; i < ROWS * n16; i += SL_MID_THREADS) {
        const int r = i / n16;
        const int k = chunk * S::depth + 8 * (i % n16);
        const uint8_t *row = sl_mid_row<ROWS>(a, rows, r);
        sl_copy16(stage + S::at(r, i % n16), k < a.n_cols ? row + 2 * k : row,
                  k < a.n_cols ? 16 : 0);
    }
}

template <int NT, int ROWS>
SL_DEV void sl_midh_fetch_x(const struct sl_linear_args &a, int token0, uint8_t *stage, int chunk)
{
    using S = sl_midh_stage<NT, ROWS>;
    constexpr int n16 = S::pitch / 16;
    const uint8_t *x = (const uint8_t *)a.xs;
    for (int i = (int)threadIdx.x; i < 8 * NT * n16; i += SL_MID_THREADS) {
        const int n = i / n16;
        const int k = chunk * S::depth + 8 * (i % n16);
        const bool there = token0 + n < a.n_tokens && k < a.n_cols;
        sl_copy16(stage + S::x + S::at(n, i % n16),
                  there ? x + ((int64_t)(token0 + n) * a.n_cols + k) * 2 : x, there ? 16 : 0);
    }
    sl_copy_commit();
}

/* A warp's share of a chunk: 32 of the depth. Lane (g, t) takes weights and x at 8t..8t+7: any
 * order of the depth does as long as both operands agree. */
template <int TYPE, int NT, int ROWS>
SL_DEV void sl_midh_chunk(const uint8_t *stage, float acc[NT][4])
{
    using S = sl_midh_stage<NT, ROWS>;
    using share = sl_mid_share<ROWS>;
    const int lane = (int)threadIdx.x & 31;
    const int piece = 4 * share::piece() + (lane & 3);
    const int r = 16 * share::half() + (lane >> 2);
    const uint4 v0 = *(const uint4 *)(stage + S::at(r, piece));
    const uint4 v1 = *(const uint4 *)(stage + S::at(r + 8, piece));
    uint32_t w[8] = {v0.x, v1.x, v0.y, v1.y, v0.z, v1.z, v0.w, v1.w};
    if constexpr (TYPE == SL_TYPE_BF16) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            w[i] = sl_bf16x2_half2(w[i]);
        }
    }
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
        const uint4 x = *(const uint4 *)(stage + S::x + S::at(8 * nt + (lane >> 2), piece));
        sl_mma_f16(acc[nt], w, x.x, x.y);
        sl_mma_f16(acc[nt], w + 4, x.z, x.w);
    }
}

template <int TYPE, int NT, int ROWS>
SL_DEV void sl_midh_tile(const struct sl_linear_args &a, int tile, int token0, uint8_t *shared)
{
    using S = sl_midh_stage<NT, ROWS>;
    constexpr int stages = sl_mid_stages(S::bytes);
    const sl_mid_rows rows = sl_mid_rows_of<ROWS>(a, tile);
    const int n_chunks = (a.n_cols + S::depth - 1) / S::depth;
    for (int i = 0; i < stages - 1 && i < n_chunks; i++) {
        sl_midh_fetch_w<NT, ROWS>(a, rows, shared + i * S::bytes, i);
    }
    sl_await_ahead();
    for (int i = 0; i < stages - 1; i++) {
        sl_midh_fetch_x<NT, ROWS>(a, token0, shared + i * S::bytes, i);
    }
    float acc[NT][4];
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
        acc[nt][0] = acc[nt][1] = acc[nt][2] = acc[nt][3] = 0.0f;
    }
    int slot = 0, next = stages - 1;
    for (int chunk = 0; chunk < n_chunks; chunk++) {
        sl_copy_wait<stages - 2>();
        sl_block_sync();
        if (chunk + stages - 1 < n_chunks) {
            sl_midh_fetch_w<NT, ROWS>(a, rows, shared + next * S::bytes, chunk + stages - 1);
            sl_midh_fetch_x<NT, ROWS>(a, token0, shared + next * S::bytes, chunk + stages - 1);
        } else {
            sl_copy_commit();
        }
        sl_midh_chunk<TYPE, NT, ROWS>(shared + slot * S::bytes, acc);
        slot = slot + 1 == stages ? 0 : slot + 1;
        next = next + 1 == stages ? 0 : next + 1;
    }
    sl_copy_wait<0>();
    sl_block_sync();
    sl_mid_share_sums<ROWS, NT>((float *)shared, acc);
    sl_block_sync();
    const float *scale = (const float *)((const uint16_t *)a.xs + (int64_t)a.n_tokens * a.n_cols);
    sl_mid_store<ROWS, 8 * NT>(a, rows, token0, (const float *)shared, scale);
}

template <int TYPE, int NT, int ROWS>
__global__ void __launch_bounds__(SL_MID_THREADS, NT <= 2 ? 3 : 2)
    sl_midh_kernel(SL_KERNEL_ARG struct sl_linear_args a)
{
    SL_SHARED(shared);
    sl_let_follow();
    sl_midh_tile<TYPE, NT, ROWS>(a, (int)blockIdx.x, (int)blockIdx.y * 8 * NT, shared);
}

/* ---- launches ---- */

template <int TYPE, int NT, int ROWS>
static int sl_mid_launch(cudaStream_t stream, const struct sl_linear_args *args,
                         const struct sl_cuda_props *props)
{
    const unsigned token_tiles = (unsigned)((args->n_tokens + 8 * NT - 1) / (8 * NT));
    const dim3 grid((unsigned)args->n_tiles, token_tiles), block(SL_MID_THREADS);
    if constexpr (TYPE == SL_TYPE_F16 || TYPE == SL_TYPE_BF16) {
        constexpr int shared = sl_mid_shared_bytes<ROWS>(sl_midh_stage<NT, ROWS>::bytes, 8 * NT);
        return SL_FOLLOW((sl_midh_kernel<TYPE, NT, ROWS>), grid, block, shared, stream, props,
                         *args);
    } else {
        using S = sl_midq_stage<sl_fmt<TYPE>, NT, ROWS>;
        constexpr int shared = sl_mid_shared_bytes<ROWS>(S::aligned, 8 * NT);
        return SL_FOLLOW((sl_midq_kernel<TYPE, NT, ROWS>), grid, block, shared, stream, props,
                         *args);
    }
}

/* Row tiles are of SL_MID_ROWS, or with `narrow` of half as many. */
template <int TYPE>
static int sl_mid_dispatch(cudaStream_t stream, const struct sl_linear_args *args, bool narrow,
                           const struct sl_cuda_props *props)
{
    if (args->n_tokens <= 8) {
        return narrow ? sl_mid_launch<TYPE, 1, SL_MID_ROWS / 2>(stream, args, props)
                      : sl_mid_launch<TYPE, 1, SL_MID_ROWS>(stream, args, props);
    }
    if (args->n_tokens <= 16) {
        return narrow ? sl_mid_launch<TYPE, 2, SL_MID_ROWS / 2>(stream, args, props)
                      : sl_mid_launch<TYPE, 2, SL_MID_ROWS>(stream, args, props);
    }
    if (args->n_tokens <= 32) {
        return sl_mid_launch<TYPE, 4, SL_MID_ROWS>(stream, args, props);
    }
    return sl_mid_launch<TYPE, 8, SL_MID_ROWS>(stream, args, props);
}

#endif
