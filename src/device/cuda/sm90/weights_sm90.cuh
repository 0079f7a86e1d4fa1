/* SPDX-License-Identifier: Apache-2.0
 *
 * Weights as the operand in registers of products on compute capability 9.0 (see gemm_sm90.cuh).
 * A type says how its fragments are made:
 *
 *   tile_bytes       of a slot, behind x: what the copying warp brings; 0: nothing
 *   init, start      once, and for each tile; the depth begins at a column, a multiple of 256
 *   fragments<P>     of step `it`, whose parity is P: four products of 16 columns
 *   swapped          whether row g of a product is the second of the two that this thread stores
 *
 * The rows of a warp: row g of the product is weight row 2 g of its 16, row g + 8 is 2 g + 1, so
 * that a thread stores two neighbours. Gated: row g is of gate and g + 8 the same one of up.
 */
#ifndef SL_DEVICE_CUDA_SM90_WEIGHTS_SM90_CUH
#define SL_DEVICE_CUDA_SM90_WEIGHTS_SM90_CUH

#include "device/cuda/linear_gemm.cuh"
#include "device/cuda/sm90/sm90.cuh"

/* What a block works on: rows of a part (of gate and up, when gated), and tokens. */
struct sl_sm90_tile {
    int part, row0;
    int token0, n_tokens; /* in y */
    int x_row;            /* of the first token in the packed x */
};

/* F16 and BF16: a slot holds the tile's 128 rows behind x; gated: 64 rows of gate, then 64 of up.
 */
template <int TYPE> struct sl_sm90_direct {
    static constexpr int tile_bytes = SL_SM90_ROWS * 128;
    uint32_t offset[2]; /* of this lane's row of a matrix, and the XOR of its pieces */

    /* Lanes 8 m .. 8 m + 7 address the rows of matrix m: of rows g for even m, g + 8 for odd ones.
     * Weight rows 2 g and 2 g + 1 change places from g = 4 on, or the eight rows of a matrix would
     * share four groups of banks. */
    SL_DEV_MEMBER void init(bool gated)
    {
        const int warp = (int)threadIdx.x >> 5;
        const int lane = (int)threadIdx.x & 31;
        const int r = lane & 7;
        const int odd = lane >> 3 & 1;
        const int row = gated ? 64 * odd + 8 * warp + r : 16 * warp + 2 * r + (odd ^ (r >> 2));
        offset[0] = (uint32_t)row * 128;
        offset[1] = (uint32_t)(row & 7);
    }

    /* Whether this thread's row g is the second of the two that it stores. */
    SL_DEV_MEMBER static bool swapped(void)
    {
        return (threadIdx.x & 31) >= 16;
    }

    SL_DEV_MEMBER void start(const struct sl_linear_args &, const sl_sm90_tile &, int)
    {
    }

    template <int PARITY>
    SL_DEV_MEMBER void fragments(uint32_t f[4][4], uint32_t tile, int, int) const
    {
        const uint32_t piece = threadIdx.x >> 4 & 1;
#pragma unroll
        for (uint32_t k = 0; k < 4; k++) {
            const uint32_t at = tile + offset[0] + 16 * ((2 * k + piece) ^ offset[1]);
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                         : "=r"(f[k][0]), "=r"(f[k][1]), "=r"(f[k][2]), "=r"(f[k][3])
                         : "r"(at)
                         : "memory");
        }
        if constexpr (TYPE == SL_TYPE_BF16) {
#pragma unroll
            for (int i = 0; i < 16; i++) {
                f[i / 4][i % 4] = sl_bf16x2_half2(f[i / 4][i % 4]);
            }
        }
    }
};

/* Packed types: a thread unpacks its two rows, a unit of each in two steps, and loads the raw
 * words of the next one ahead. Lane 4 g + t takes unit t of the four that make 128 columns; the
 * first step multiplies their first runs, the second the others. Within a step product k takes
 * weights 4 k .. 4 k + 3 of each run, so x comes with its columns in that order (see
 * linear_pack.cuh). */
template <int TYPE> struct sl_sm90_packed {
    using F = sl_fmt<TYPE>;
    static constexpr int AHEAD = 4; /* groups of 128 columns that are asked for early */
    static constexpr int tile_bytes = 0;
    static_assert(sl_sm90_order(TYPE) == (F::far_groups   ? SL_ORDER_FAR
                                          : F::super_runs ? SL_ORDER_SUPER
                                                          : SL_ORDER_UNITS),
                  "x comes in another order");
    const uint8_t *row[2], *end[2];
    uint32_t raw[2][F::n_raw];
    uint32_t second[2][4];
    sl_run_scale second_scale[2];

    SL_DEV_MEMBER void init(bool)
    {
    }

    SL_DEV_MEMBER static bool swapped(void)
    {
        return false;
    }

    /* The block of unit u of this thread's row. Units past the end of the row meet zeros of x: they
     * may be any weights, but not memory behind the matrix. */
    SL_DEV_MEMBER const uint8_t *block(int i, int u) const
    {
        const uint8_t *at = row[i] + u / F::units * F::bytes;
        return F::items >= SL_SM90_PACKED_COLS || at < end[i] ? at : end[i] - F::bytes;
    }

    SL_DEV_MEMBER void load(int it)
    {
        const int u = 2 * it + ((int)threadIdx.x & 3);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const sl_mem_global mem = {end[i]};
            F::load(raw[i], block(i, u), u % F::units, mem);
            /* With few tokens the products are done long before memory answers. */
            const uint8_t *later = row[i] + (it / 2 + AHEAD) * (128 * F::bytes / F::items);
            if ((threadIdx.x & 3) == 0 && later < end[i]) {
                asm volatile("prefetch.global.L2 [%0];" ::"l"(later));
            }
        }
    }

    SL_DEV_MEMBER void start(const struct sl_linear_args &a, const sl_sm90_tile &tile,
                             int first_col)
    {
        const bool gated = a.activation != SL_ACT_NONE;
        const int warp = (int)threadIdx.x >> 5;
        const int g = ((int)threadIdx.x & 31) >> 2;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const struct sl_linear_part &part = a.part[gated ? i : tile.part];
            const int r = tile.row0 + (gated ? 8 * warp + g : 16 * warp + 2 * g + i);
            /* Rows past the end repeat the last. */
            row[i] = part.w + (r < part.n_rows ? r : part.n_rows - 1) * a.row_bytes +
                     first_col / F::items * F::bytes;
            end[i] = part.end;
        }
        load(0);
    }

    template <int PARITY>
    SL_DEV_MEMBER void fragments(uint32_t f[4][4], uint32_t, int it, int n_steps)
    {
        if constexpr (PARITY == 0) {
            const int u = 2 * it + ((int)threadIdx.x & 3);
#pragma unroll
            for (int i = 0; i < 2; i++) {
                sl_unit unit;
                F::expand(raw[i], block(i, u), u % F::units, unit);
                const sl_run_scale scale = sl_run_scale_of<F>(unit.s_lo, unit.m_lo);
                second_scale[i] = sl_run_scale_of<F>(unit.s_hi, unit.m_hi);
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    sl_run_weights<F>(unit.lo[k], scale, f[k][i], f[k][2 + i]);
                    second[i][k] = unit.hi[k];
                }
            }
            if (it + 2 < n_steps) {
                load(it + 2);
            }
        } else {
#pragma unroll
            for (int i = 0; i < 2; i++) {
#pragma unroll
                for (int k = 0; k < 4; k++) {
                    sl_run_weights<F>(second[i][k], second_scale[i], f[k][i], f[k][2 + i]);
                }
            }
        }
    }
};

#endif
