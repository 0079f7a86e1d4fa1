/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of many tokens with tensor cores: f16 operands, float sums.
 *
 * A block of four warps makes a tile of 128 tokens x 128 rows, 64 x 64 a warp, in steps of 64 along
 * the depth. Tiles in shared memory are rows of 128 bytes whose 16-byte pieces are swizzled by the
 * row, so that neither the copies nor the matrix loads conflict.
 *   - x (f16, rows scaled) and F16/BF16 weights come by asynchronous copies, two stages.
 *   - Quantized weights are loaded as raw words into registers one step ahead, and unpacked to f16
 *     while other warps (and the second block of the multiprocessor) keep the tensor cores busy.
 * Levels become f16 exactly; a weight is rounded twice (its scale, and the weight itself).
 *
 * Gated: tile row 16 i + j is row 8 i + j of gate for j < 8, else 8 i + j - 8 of up, so that a
 * thread holds both sums of an output.
 */
#ifndef SL_DEVICE_CUDA_LINEAR_GEMM_CUH
#define SL_DEVICE_CUDA_LINEAR_GEMM_CUH

#include "device/cuda/linear_args.cuh"
#include "device/cuda/linear_unpack.cuh"

#define SL_GEMM_THREADS 128
#define SL_GEMM_DEPTH 64
#define SL_GEMM_TILE_BYTES (128 * 128) /* 128 rows of 64 f16 */
#define SL_GEMM_SHARED (4 * SL_GEMM_TILE_BYTES)

SL_DEV int sl_gemm_at(int row, int piece)
{
    return row * 128 + 16 * (piece ^ (row & 7));
}

/* The tile's rows. */
struct sl_gemm_rows {
    int part, row0;
    bool gated;
};

SL_DEV sl_gemm_rows sl_gemm_rows_of(const struct sl_linear_args &a, int tile)
{
    sl_gemm_rows rows;
    rows.gated = a.activation != SL_ACT_NONE;
    rows.part = rows.gated ? 0 : sl_part_of_tile(a, tile);
    rows.row0 = (tile - a.part[rows.part].first) * (rows.gated ? SL_GEMM_ROWS / 2 : SL_GEMM_ROWS);
    return rows;
}

/* The part of tile row r and its address; rows past the end repeat the last. */
SL_DEV const uint8_t *sl_gemm_row(const struct sl_linear_args &a, const sl_gemm_rows &rows, int r,
                                  int &part)
{
    int row = rows.row0 + r;
    part = rows.part;
    if (rows.gated) {
        part = r >> 3 & 1;
        row = rows.row0 + (r >> 4) * 8 + (r & 7);
    }
    const int n_rows = a.part[part].n_rows;
    return a.part[part].w + (row < n_rows ? row : n_rows - 1) * a.row_bytes;
}

/* Queue the copies of x for step `it`. The step's columns are two groups of 32. */
SL_DEV void sl_gemm_fetch_x(const struct sl_linear_args &a, int token0, uint8_t *tile, int group_a,
                            int group_b)
{
    const uint8_t *x = (const uint8_t *)a.xs;
    const int piece = (int)threadIdx.x & 7;
    const int k = 32 * (piece < 4 ? group_a : group_b) + 8 * (piece & 3);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const int n = 16 * i + ((int)threadIdx.x >> 3);
        const bool there = token0 + n < a.n_tokens && k < a.n_cols;
        sl_copy16(tile + sl_gemm_at(n, piece),
                  there ? x + ((int64_t)(token0 + n) * a.n_cols + k) * 2 : x, there ? 16 : 0);
    }
}

/* ---- F16 and BF16 weights: copied as they are ---- */

template <int TYPE> struct sl_gemm_direct {
    static constexpr bool direct = true;
    static constexpr bool bf16 = TYPE == SL_TYPE_BF16;

    SL_DEV_MEMBER void init(const struct sl_linear_args &a, const sl_gemm_rows &rows)
    {
        (void)a;
        (void)rows;
    }

    SL_DEV_MEMBER void fetch(const struct sl_linear_args &a, const sl_gemm_rows &rows,
                             uint8_t *tile, int it)
    {
        const int piece = (int)threadIdx.x & 7;
        const int k = it * SL_GEMM_DEPTH + 8 * piece;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            const int r = 16 * i + ((int)threadIdx.x >> 3);
            int part;
            const uint8_t *row = sl_gemm_row(a, rows, r, part);
            const bool there = k < a.n_cols;
            sl_copy16(tile + sl_gemm_at(r, piece), there ? row + 2 * k : row, there ? 16 : 0);
        }
    }

    SL_DEV_MEMBER static int group_a(int it)
    {
        return 2 * it;
    }
    SL_DEV_MEMBER static int group_b(int it)
    {
        return 2 * it + 1;
    }
};

/* ---- quantized weights ---- */

/* Four levels as f16, less the type's offset. */
template <class F> SL_DEV void sl_levels_half(uint32_t w, uint32_t &lo, uint32_t &hi)
{
    /* 0x6400 | byte is 1024 + byte in f16; signed levels are moved up by 128 first. */
    constexpr uint32_t base = 0x6400u + (F::is_signed ? 128u : (uint32_t)F::offset);
    if constexpr (F::is_signed) {
        w ^= 0x80808080u;
    }
    lo = sl_half2_sub(sl_bytes_pick(w, 0x64646464u, 0x4140), base * 0x10001u);
    hi = sl_half2_sub(sl_bytes_pick(w, 0x64646464u, 0x4342), base * 0x10001u);
}

/* The scale and the minimum of a run, each as two f16 of the same value. */
struct sl_run_scale {
    uint32_t s, m;
};

template <class F> SL_DEV sl_run_scale sl_run_scale_of(float s, float m)
{
    const float top = 65504.0f;
    s = fminf(fmaxf(s, -top), top);
    const sl_run_scale both = {sl_pack_half2(s, s), F::has_min ? sl_pack_half2(m, m) : 0};
    return both;
}

/* Four weights of a run as f16. */
template <class F>
SL_DEV void sl_run_weights(uint32_t w, const sl_run_scale &scale, uint32_t &lo, uint32_t &hi)
{
    sl_levels_half<F>(w, lo, hi);
    lo = F::has_min ? sl_half2_fma(lo, scale.s, scale.m) : sl_half2_mul(lo, scale.s);
    hi = F::has_min ? sl_half2_fma(hi, scale.s, scale.m) : sl_half2_mul(hi, scale.s);
}

/* Sixteen weights of a run to two pieces of a tile row. */
template <class F>
SL_DEV void sl_gemm_put_run(uint8_t *tile, int row, int piece, const uint32_t w[4], float s,
                            float m)
{
    const sl_run_scale scale = sl_run_scale_of<F>(s, m);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t h[4];
        sl_run_weights<F>(w[2 * i], scale, h[0], h[1]);
        sl_run_weights<F>(w[2 * i + 1], scale, h[2], h[3]);
        *(uint4 *)(tile + sl_gemm_at(row, piece + i)) = make_uint4(h[0], h[1], h[2], h[3]);
    }
}

/* A thread unpacks unit c = thread % 2 of rows thread / 2 and 64 + thread / 2. */
template <int TYPE> struct sl_gemm_packed {
    using F = sl_fmt<TYPE>;
    static constexpr bool direct = false;
    static constexpr bool bf16 = false;

    const uint8_t *row[2];
    const uint8_t *end[2];
    uint32_t raw[2][F::n_raw];

    SL_DEV_MEMBER void init(const struct sl_linear_args &a, const sl_gemm_rows &rows)
    {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int part;
            row[i] = sl_gemm_row(a, rows, ((int)threadIdx.x >> 1) + 64 * i, part);
            end[i] = a.part[part].end;
        }
    }

    SL_DEV_MEMBER static int unit(int it)
    {
        return 2 * it + ((int)threadIdx.x & 1);
    }

    SL_DEV_MEMBER void load(int it, int n_units)
    {
        const int u = unit(it);
        if (u < n_units) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const sl_mem_global mem = {end[i]};
                F::load(raw[i], row[i] + u / F::units * F::bytes, u % F::units, mem);
            }
        }
    }

    SL_DEV_MEMBER void put(uint8_t *tile, int it, int n_units)
    {
        const int u = unit(it);
        const int c = (int)threadIdx.x & 1;
        const int lo = F::super_runs ? 2 * c : 4 * c;
        const int hi = F::super_runs ? 4 + 2 * c : 4 * c + 2;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            sl_unit unit_i;
            if (u < n_units) {
                F::expand(raw[i], row[i] + u / F::units * F::bytes, u % F::units, unit_i);
            } else {
                /* Past the depth: x is zero there, and the weights must be finite. */
                unit_i.s_lo = unit_i.s_hi = unit_i.m_lo = unit_i.m_hi = 0.0f;
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    unit_i.lo[j] = unit_i.hi[j] = 0;
                }
            }
            const int r = ((int)threadIdx.x >> 1) + 64 * i;
            sl_gemm_put_run<F>(tile, r, lo, unit_i.lo, unit_i.s_lo, unit_i.m_lo);
            sl_gemm_put_run<F>(tile, r, hi, unit_i.hi, unit_i.s_hi, unit_i.m_hi);
        }
    }

    SL_DEV_MEMBER static int group_a(int it)
    {
        return sl_group_a<F>(it);
    }
    SL_DEV_MEMBER static int group_b(int it)
    {
        return sl_group_b<F>(it);
    }
};

/* ---- the tile ---- */

/* acc += x tile times w tile, 64 deep. */
template <bool BF16>
SL_DEV void sl_gemm_step(const uint8_t *x, const uint8_t *w, float acc[4][8][4])
{
    const int lane = (int)threadIdx.x & 31;
    const int warp = (int)threadIdx.x >> 5;
    const int x_row = 64 * (warp >> 1) + (lane & 15);
    const int w_row = 64 * (warp & 1) + (lane & 7) + (lane >> 4) * 8;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        uint32_t xf[4][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sl_load_matrix4(xf[i], x + sl_gemm_at(x_row + 16 * i, 2 * k + (lane >> 4)));
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint32_t wf[4];
            sl_load_matrix4(wf, w + sl_gemm_at(w_row + 16 * j, 2 * k + (lane >> 3 & 1)));
            if constexpr (BF16) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    wf[i] = sl_bf16x2_half2(wf[i]);
                }
            }
#pragma unroll
            for (int i = 0; i < 4; i++) {
                sl_mma_f16(acc[i][2 * j], xf[i], wf[0], wf[1]);
                sl_mma_f16(acc[i][2 * j + 1], xf[i], wf[2], wf[3]);
            }
        }
    }
}

/* Two neighbouring outputs of a token. */
SL_DEV void sl_gemm_store2(const struct sl_linear_args &a, const struct sl_linear_part &part,
                           int token, int row, float v0, float v1)
{
    float *y = part.y + (int64_t)token * part.n_rows + row;
    if (row + 1 < part.n_rows && ((uintptr_t)y & 7) == 0) {
        if (part.bias) {
            v0 += part.bias[row];
            v1 += part.bias[row + 1];
        }
        if (a.accumulate) {
            const float2 old = *(const float2 *)y;
            v0 += old.x;
            v1 += old.y;
        }
        *(float2 *)y = make_float2(v0, v1);
    } else {
        if (row < part.n_rows) {
            sl_store_y(a, part, token, row, v0);
        }
        if (row + 1 < part.n_rows) {
            sl_store_y(a, part, token, row + 1, v1);
        }
    }
}

SL_DEV void sl_gemm_store(const struct sl_linear_args &a, const sl_gemm_rows &rows, int token0,
                          float acc[4][8][4])
{
    const int lane = (int)threadIdx.x & 31;
    const int warp = (int)threadIdx.x >> 5;
    const float *scale = (const float *)((const uint16_t *)a.xs + (int64_t)a.n_tokens * a.n_cols);
    const int col = 64 * (warp & 1) + 2 * (lane & 3);
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int token = token0 + 64 * (warp >> 1) + 16 * i + 8 * h + (lane >> 2);
            if (token >= a.n_tokens) {
                continue;
            }
            const float s = scale[token];
            if (rows.gated) {
#pragma unroll
                for (int j = 0; j < 8; j += 2) {
                    const int row = rows.row0 + (64 * (warp & 1) + 8 * j) / 2 + 2 * (lane & 3);
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        if (row + e < a.part[0].n_rows) {
                            sl_store_gated(a, token, row + e, s * acc[i][j][2 * h + e],
                                           s * acc[i][j + 1][2 * h + e]);
                        }
                    }
                }
            } else {
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    sl_gemm_store2(a, a.part[rows.part], token, rows.row0 + col + 8 * j,
                                   s * acc[i][j][2 * h], s * acc[i][j][2 * h + 1]);
                }
            }
        }
    }
}

/* W: sl_gemm_direct or sl_gemm_packed. Token tiles are the fast grid index: blocks that run at the
 * same time share the weights of few row tiles, and x stays in the L2 cache. */
template <class W>
SL_DEV void sl_gemm_tile(const struct sl_linear_args &a, int tile, int token0, uint8_t *shared)
{
    uint8_t *xt = shared;
    uint8_t *wt = shared + 2 * SL_GEMM_TILE_BYTES;
    const sl_gemm_rows rows = sl_gemm_rows_of(a, tile);
    const int n_steps = (a.n_cols + SL_GEMM_DEPTH - 1) / SL_GEMM_DEPTH;
    const int n_units = a.n_cols / 32;
    W weights;
    weights.init(a, rows);

    sl_gemm_fetch_x(a, token0, xt, W::group_a(0), W::group_b(0));
    if constexpr (W::direct) {
        weights.fetch(a, rows, wt, 0);
    } else {
        weights.load(0, n_units);
        weights.put(wt, 0, n_units);
        weights.load(1, n_units);
    }
    sl_copy_commit();
    float acc[4][8][4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            acc[i][j][0] = acc[i][j][1] = acc[i][j][2] = acc[i][j][3] = 0.0f;
        }
    }
#pragma unroll 1
    for (int it = 0; it < n_steps; it++) {
        const int now = (it & 1) * SL_GEMM_TILE_BYTES;
        const int then = SL_GEMM_TILE_BYTES - now;
        sl_copy_wait<0>();
        sl_block_sync(); /* tiles `now` are whole, tiles `then` are done with */
        if (it + 1 < n_steps) {
            sl_gemm_fetch_x(a, token0, xt + then, W::group_a(it + 1), W::group_b(it + 1));
            if constexpr (W::direct) {
                weights.fetch(a, rows, wt + then, it + 1);
            }
        }
        sl_copy_commit();
        sl_gemm_step<W::bf16>(xt + now, wt + now, acc);
        if constexpr (!W::direct) {
            if (it + 1 < n_steps) {
                weights.put(wt + then, it + 1, n_units);
                weights.load(it + 2, n_units);
            }
        }
    }
    sl_gemm_store(a, rows, token0, acc);
}

template <class W>
__global__ void __launch_bounds__(SL_GEMM_THREADS, 2)
    sl_gemm_kernel(SL_KERNEL_ARG struct sl_linear_args a)
{
    SL_SHARED(shared);
    sl_gemm_tile<W>(a, (int)blockIdx.y, (int)blockIdx.x * SL_GEMM_TOKENS, shared);
}

template <class W> static int sl_gemm_launch(cudaStream_t stream, const struct sl_linear_args *args)
{
    const unsigned tokens = (unsigned)((args->n_tokens + SL_GEMM_TOKENS - 1) / SL_GEMM_TOKENS);
    return SL_LAUNCH((sl_gemm_kernel<W>), dim3(tokens, (unsigned)args->n_tiles),
                     dim3(SL_GEMM_THREADS), (size_t)SL_GEMM_SHARED, stream, *args);
}

#endif
