/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of up to 64 tokens with tensor cores, still bound by the bytes of the matrix.
 *
 * A block of eight warps takes 32 rows and a tile of 8 * NT tokens over the whole depth, so no
 * partial sums leave it. Chunks of the depth (raw bytes of the rows, packed x) stream through a
 * ring of shared memory, several ahead. In a chunk, warp w works on row half w % 2 (16 rows) and
 * depth quarter w / 2: weights are the 16-row operand of the products, unpacked from the raw bytes
 * straight into its registers; tokens are the 8-column operand. The quarters are added at the end,
 * in fixed order.
 * Quantized types multiply int8 by int8 with 32-bit sums over a group of weights (32, or 16 where
 * scales are that fine) and apply both scales in float. F16 and BF16 multiply in f16 with float
 * sums; x is f16, scaled by rows.
 */
#ifndef SL_DEVICE_CUDA_LINEAR_MID_CUH
#define SL_DEVICE_CUDA_LINEAR_MID_CUH

#include "device/cuda/linear_args.cuh"
#include "device/cuda/linear_unpack.cuh"

#define SL_MID_THREADS 256
#define SL_MID_SHARED_MAX (64 * 1024) /* what every target has */
#define SL_MID_SUM_PITCH                                                                           \
    36 /* floats of a token's 32 sums: four quarters of lanes in other banks                       \
        */

constexpr int sl_mid_stages(int stage_bytes)
{
    return SL_MID_SHARED_MAX / stage_bytes > 6 ? 6 : SL_MID_SHARED_MAX / stage_bytes;
}

constexpr int sl_mid_shared_bytes(int stage_bytes, int n_tokens)
{
    const int ring = sl_mid_stages(stage_bytes) * stage_bytes;
    const int sums = 4 * n_tokens * SL_MID_SUM_PITCH * 4;
    return ring > sums ? ring : sums;
}

/* The rows of a block: local row r of 0..31 is row `row0 + r` of the part, or, gated, row
 * row0 + r % 16 of gate (r < 16) or up. Rows past the end repeat the last; nothing is stored. */
struct sl_mid_rows {
    int part, row0;
    bool gated;
};

SL_DEV sl_mid_rows sl_mid_rows_of(const struct sl_linear_args &a, int tile)
{
    sl_mid_rows rows;
    rows.gated = a.activation != SL_ACT_NONE;
    rows.part = rows.gated ? 0 : sl_part_of_tile(a, tile);
    rows.row0 = (tile - a.part[rows.part].first) * (rows.gated ? SL_MID_ROWS / 2 : SL_MID_ROWS);
    return rows;
}

SL_DEV const uint8_t *sl_mid_row(const struct sl_linear_args &a, const sl_mid_rows &rows, int r)
{
    const struct sl_linear_part &part = a.part[rows.gated ? r >> 4 : rows.part];
    const int row = rows.row0 + (rows.gated ? r & 15 : r);
    return part.w + (row < part.n_rows ? row : part.n_rows - 1) * a.row_bytes;
}

/* Add the four quarters' sums in shared memory and store y. `scale`: of the tokens' x, or NULL. */
template <int TOKENS>
SL_DEV void sl_mid_store(const struct sl_linear_args &a, const sl_mid_rows &rows, int token0,
                         const float *sums, const float *scale)
{
    const int n_out = rows.gated ? 16 : 32;
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
        for (int q = 0; q < 4; q++) {
            v += sums[(q * TOKENS + n) * SL_MID_SUM_PITCH + r];
            up += rows.gated ? sums[(q * TOKENS + n) * SL_MID_SUM_PITCH + 16 + r] : 0.0f;
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

/* A warp's sums to shared memory: [quarter][token][row]. */
template <int NT> SL_DEV void sl_mid_share_sums(float *sums, const float acc[NT][4])
{
    const int lane = (int)threadIdx.x & 31;
    const int warp = (int)threadIdx.x >> 5;
    float *at = sums + ((warp >> 1) * 8 * NT + 2 * (lane & 3)) * SL_MID_SUM_PITCH +
                16 * (warp & 1) + (lane >> 2);
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
        at[0] = acc[nt][0];
        at[SL_MID_SUM_PITCH] = acc[nt][1];
        at[8] = acc[nt][2];
        at[SL_MID_SUM_PITCH + 8] = acc[nt][3];
        at += 8 * SL_MID_SUM_PITCH;
    }
}

/* ---- quantized weights ---- */

#define SL_MIDQ_X_PITCH 272 /* bytes of a token's 256 levels: rows of a fragment in other banks */
#define SL_MIDQ_S_PITCH 72  /* bytes of a token's 8 scales and sums */

template <class F, int NT> struct sl_midq_stage {
    static constexpr int chunk_bytes = 256 / F::items * F::bytes; /* of a row */
    static constexpr int n16 =
        F::align >= 16 ? chunk_bytes / 16 : (chunk_bytes + 16 - F::align + 15) / 16;
    static constexpr int pitch = 16 * (n16 | 1); /* odd: eight rows in other banks */
    static constexpr int x = SL_MID_ROWS * pitch;
    static constexpr int s = x + 8 * NT * SL_MIDQ_X_PITCH;
    static constexpr int bytes = s + 8 * NT * SL_MIDQ_S_PITCH;
    static constexpr int aligned = (bytes + 15) / 16 * 16;
};

/* Queue the copies of chunk `chunk` into a stage. */
template <class F, int NT>
SL_DEV void sl_midq_fetch(const struct sl_linear_args &a, const sl_mid_rows &rows, int token0,
                          uint8_t *stage, int chunk)
{
    using S = sl_midq_stage<F, NT>;
    const int64_t at = (int64_t)chunk * S::chunk_bytes;
    const int bytes = a.row_bytes - at < S::chunk_bytes ? (int)(a.row_bytes - at) : S::chunk_bytes;
    for (int i = (int)threadIdx.x; i < SL_MID_ROWS * S::n16; i += SL_MID_THREADS) {
        const int r = i / S::n16;
        const int piece = i - r * S::n16;
        const uint8_t *src = sl_mid_row(a, rows, r) + at;
        const int odd = (int)((uintptr_t)src & 15);
        const int left = odd + bytes - 16 * piece;
        if (left > 0) {
            sl_copy16(stage + r * S::pitch + 16 * piece, src - odd + 16 * piece,
                      left < 16 ? left : 16);
        }
    }
    const uint8_t *x = (const uint8_t *)a.xs;
    for (int i = (int)threadIdx.x; i < 8 * NT * 16; i += SL_MID_THREADS) {
        const int n = i >> 4;
        const int k = chunk * 256 + 16 * (i & 15);
        const bool there = token0 + n < a.n_tokens && k < a.n_cols;
        sl_copy16(stage + S::x + n * SL_MIDQ_X_PITCH + 16 * (i & 15),
                  there ? x + (int64_t)(token0 + n) * a.n_cols + k : x, there ? 16 : 0);
    }
    const uint8_t *s = x + (int64_t)a.n_tokens * a.n_cols;
    for (int i = (int)threadIdx.x; i < 8 * NT * 8; i += SL_MID_THREADS) {
        const int n = i >> 3;
        const int b = chunk * 8 + (i & 7);
        const bool there = token0 + n < a.n_tokens && b < a.n_cols / 32;
        sl_copy8(stage + S::s + n * SL_MIDQ_S_PITCH + 8 * (i & 7),
                 there ? s + ((int64_t)(token0 + n) * (a.n_cols / 32) + b) * 8 : s, there ? 8 : 0);
    }
}

/* One group of 32 weights of 16 rows times 8 tokens. w0, w1: the fragments of rows g and g + 8. */
template <class F>
SL_DEV void sl_midq_group(const sl_frag &w0, const sl_frag &w1, int j, const uint8_t *x,
                          const uint8_t *s, float acc[4])
{
    const int lane = (int)threadIdx.x & 31;
    const int g = lane >> 2;
    const int t = lane & 3;
    const uint8_t *xg = x + g * SL_MIDQ_X_PITCH + 4 * t;
    const uint32_t b0 = *(const uint32_t *)xg;
    const uint32_t b1 = *(const uint32_t *)(xg + 16);
    const struct sl_xblock s0 = *(const struct sl_xblock *)(s + 2 * t * SL_MIDQ_S_PITCH);
    const struct sl_xblock s1 = *(const struct sl_xblock *)(s + (2 * t + 1) * SL_MIDQ_S_PITCH);
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
template <class F, int NT>
SL_DEV void sl_midq_chunk(const uint8_t *stage, uint32_t odd0, uint32_t odd1, int n_valid,
                          float acc[NT][4])
{
    using S = sl_midq_stage<F, NT>;
    const int lane = (int)threadIdx.x & 31;
    const int warp = (int)threadIdx.x >> 5;
    const int piece = warp >> 1;
    const uint8_t *row = stage + (16 * (warp & 1) + (lane >> 2)) * S::pitch;
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
        const int group = j ? sl_group_b<F>(piece) : sl_group_a<F>(piece);
        const uint8_t *x = stage + S::x + 32 * group;
        const uint8_t *s = stage + S::s + 8 * group;
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            sl_midq_group<F>(w0, w1, j, x + 8 * nt * SL_MIDQ_X_PITCH, s + 8 * nt * SL_MIDQ_S_PITCH,
                             acc[nt]);
        }
    }
}

/* The block's work: row tile `tile`, tokens from token0 on. */
template <int TYPE, int NT>
SL_DEV void sl_midq_tile(const struct sl_linear_args &a, int tile, int token0, uint8_t *shared)
{
    using F = sl_fmt<TYPE>;
    using S = sl_midq_stage<F, NT>;
    constexpr int stages = sl_mid_stages(S::aligned);
    const sl_mid_rows rows = sl_mid_rows_of(a, tile);
    const int n_chunks = (a.n_cols + 255) / 256;
    const int warp = (int)threadIdx.x >> 5;
    /* Low address bits of this lane's two rows: where they start in a stage's 16-byte pieces. */
    const int r = 16 * (warp & 1) + (((int)threadIdx.x & 31) >> 2);
    const uint32_t low0 = (uint32_t)(uintptr_t)sl_mid_row(a, rows, r);
    const uint32_t low1 = (uint32_t)(uintptr_t)sl_mid_row(a, rows, r + 8);

    for (int i = 0; i < stages - 1; i++) {
        if (i < n_chunks) {
            sl_midq_fetch<F, NT>(a, rows, token0, shared + i * S::aligned, i);
        }
        sl_copy_commit();
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
            sl_midq_fetch<F, NT>(a, rows, token0, shared + next * S::aligned, chunk + stages - 1);
        }
        sl_copy_commit();
        const uint32_t at = (uint32_t)chunk * S::chunk_bytes;
        const int groups = a.n_cols / 32 - 8 * chunk - 2 * (warp >> 1);
        if (groups > 0) {
            sl_midq_chunk<F, NT>(shared + slot * S::aligned, F::align >= 16 ? 0 : (low0 + at) & 15,
                                 F::align >= 16 ? 0 : (low1 + at) & 15, groups < 2 ? 1 : 2, acc);
        }
        slot = slot + 1 == stages ? 0 : slot + 1;
        next = next + 1 == stages ? 0 : next + 1;
    }
    sl_copy_wait<0>();
    sl_block_sync();
    sl_mid_share_sums<NT>((float *)shared, acc);
    sl_block_sync();
    sl_mid_store<8 * NT>(a, rows, token0, (const float *)shared, NULL);
}

template <int TYPE, int NT>
__global__ void __launch_bounds__(SL_MID_THREADS, NT <= 2 ? 3 : 2)
    sl_midq_kernel(SL_KERNEL_ARG struct sl_linear_args a)
{
    SL_SHARED(shared);
    sl_midq_tile<TYPE, NT>(a, (int)blockIdx.x, (int)blockIdx.y * 8 * NT, shared);
}

/* ---- F16 and BF16 weights ---- */

#define SL_MIDH_DEPTH 128 /* weights of a row in a chunk; 256 bytes, as of a token's x */

template <int NT> struct sl_midh_stage {
    static constexpr int x = SL_MID_ROWS * 256;
    static constexpr int bytes = x + 8 * NT * 256;
};

/* Byte of 16-byte piece `i` of a row of 256 bytes: odd rows swap halves of 128 bits' banks. */
SL_DEV int sl_midh_at(int row, int i)
{
    return row * 256 + 16 * (i ^ (row & 1) << 2);
}

template <int NT>
SL_DEV void sl_midh_fetch(const struct sl_linear_args &a, const sl_mid_rows &rows, int token0,
                          uint8_t *stage, int chunk)
{
    for (int i = (int)threadIdx.x; i < SL_MID_ROWS * 16; i += SL_MID_THREADS) {
        const int r = i >> 4;
        const int k = chunk * SL_MIDH_DEPTH + 8 * (i & 15);
        const uint8_t *row = sl_mid_row(a, rows, r);
        sl_copy16(stage + sl_midh_at(r, i & 15), k < a.n_cols ? row + 2 * k : row,
                  k < a.n_cols ? 16 : 0);
    }
    const uint8_t *x = (const uint8_t *)a.xs;
    for (int i = (int)threadIdx.x; i < 8 * NT * 16; i += SL_MID_THREADS) {
        const int n = i >> 4;
        const int k = chunk * SL_MIDH_DEPTH + 8 * (i & 15);
        const bool there = token0 + n < a.n_tokens && k < a.n_cols;
        sl_copy16(stage + sl_midh_stage<NT>::x + sl_midh_at(n, i & 15),
                  there ? x + ((int64_t)(token0 + n) * a.n_cols + k) * 2 : x, there ? 16 : 0);
    }
}

/* A warp's share of a chunk: 32 of the depth. Lane (g, t) takes weights and x at 8t..8t+7: any
 * order of the depth does as long as both operands agree. */
template <int TYPE, int NT> SL_DEV void sl_midh_chunk(const uint8_t *stage, float acc[NT][4])
{
    const int lane = (int)threadIdx.x & 31;
    const int warp = (int)threadIdx.x >> 5;
    const int piece = 4 * (warp >> 1) + (lane & 3);
    const int r = 16 * (warp & 1) + (lane >> 2);
    const uint4 v0 = *(const uint4 *)(stage + sl_midh_at(r, piece));
    const uint4 v1 = *(const uint4 *)(stage + sl_midh_at(r + 8, piece));
    uint32_t w[8] = {v0.x, v1.x, v0.y, v1.y, v0.z, v1.z, v0.w, v1.w};
    if constexpr (TYPE == SL_TYPE_BF16) {
#pragma unroll
        for (int i = 0; i < 8; i++) {
            w[i] = sl_bf16x2_half2(w[i]);
        }
    }
#pragma unroll
    for (int nt = 0; nt < NT; nt++) {
        const uint4 x = *(const uint4 *)(stage + sl_midh_stage<NT>::x +
                                         sl_midh_at(8 * nt + (lane >> 2), piece));
        sl_mma_f16(acc[nt], w, x.x, x.y);
        sl_mma_f16(acc[nt], w + 4, x.z, x.w);
    }
}

template <int TYPE, int NT>
SL_DEV void sl_midh_tile(const struct sl_linear_args &a, int tile, int token0, uint8_t *shared)
{
    constexpr int stage_bytes = sl_midh_stage<NT>::bytes;
    constexpr int stages = sl_mid_stages(stage_bytes);
    const sl_mid_rows rows = sl_mid_rows_of(a, tile);
    const int n_chunks = (a.n_cols + SL_MIDH_DEPTH - 1) / SL_MIDH_DEPTH;
    for (int i = 0; i < stages - 1; i++) {
        if (i < n_chunks) {
            sl_midh_fetch<NT>(a, rows, token0, shared + i * stage_bytes, i);
        }
        sl_copy_commit();
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
            sl_midh_fetch<NT>(a, rows, token0, shared + next * stage_bytes, chunk + stages - 1);
        }
        sl_copy_commit();
        sl_midh_chunk<TYPE, NT>(shared + slot * stage_bytes, acc);
        slot = slot + 1 == stages ? 0 : slot + 1;
        next = next + 1 == stages ? 0 : next + 1;
    }
    sl_copy_wait<0>();
    sl_block_sync();
    sl_mid_share_sums<NT>((float *)shared, acc);
    sl_block_sync();
    const float *scale = (const float *)((const uint16_t *)a.xs + (int64_t)a.n_tokens * a.n_cols);
    sl_mid_store<8 * NT>(a, rows, token0, (const float *)shared, scale);
}

template <int TYPE, int NT>
__global__ void __launch_bounds__(SL_MID_THREADS, NT <= 2 ? 3 : 2)
    sl_midh_kernel(SL_KERNEL_ARG struct sl_linear_args a)
{
    SL_SHARED(shared);
    sl_midh_tile<TYPE, NT>(a, (int)blockIdx.x, (int)blockIdx.y * 8 * NT, shared);
}

/* ---- launches ---- */

template <int TYPE, int NT>
static int sl_midq_launch(cudaStream_t stream, const struct sl_linear_args *args)
{
    constexpr int shared = sl_mid_shared_bytes(sl_midq_stage<sl_fmt<TYPE>, NT>::aligned, 8 * NT);
    return SL_LAUNCH(
        (sl_midq_kernel<TYPE, NT>),
        dim3((unsigned)args->n_tiles, (unsigned)((args->n_tokens + 8 * NT - 1) / (8 * NT))),
        dim3(SL_MID_THREADS), (size_t)shared, stream, *args);
}

template <int TYPE, int NT>
static int sl_midh_launch(cudaStream_t stream, const struct sl_linear_args *args)
{
    constexpr int shared = sl_mid_shared_bytes(sl_midh_stage<NT>::bytes, 8 * NT);
    return SL_LAUNCH(
        (sl_midh_kernel<TYPE, NT>),
        dim3((unsigned)args->n_tiles, (unsigned)((args->n_tokens + 8 * NT - 1) / (8 * NT))),
        dim3(SL_MID_THREADS), (size_t)shared, stream, *args);
}

template <int TYPE>
static int sl_midq_dispatch(cudaStream_t stream, const struct sl_linear_args *args)
{
    if (args->n_tokens <= 8) {
        return sl_midq_launch<TYPE, 1>(stream, args);
    }
    if (args->n_tokens <= 16) {
        return sl_midq_launch<TYPE, 2>(stream, args);
    }
    if (args->n_tokens <= 32) {
        return sl_midq_launch<TYPE, 4>(stream, args);
    }
    return sl_midq_launch<TYPE, 8>(stream, args);
}

template <int TYPE>
static int sl_midh_dispatch(cudaStream_t stream, const struct sl_linear_args *args)
{
    if (args->n_tokens <= 8) {
        return sl_midh_launch<TYPE, 1>(stream, args);
    }
    if (args->n_tokens <= 16) {
        return sl_midh_launch<TYPE, 2>(stream, args);
    }
    if (args->n_tokens <= 32) {
        return sl_midh_launch<TYPE, 4>(stream, args);
    }
    return sl_midh_launch<TYPE, 8>(stream, args);
}

#endif
