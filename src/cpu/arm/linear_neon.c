/* SPDX-License-Identifier: Apache-2.0
 *
 * Product kernels for NEON with dot products: rows and panels.
 */
#define BYTES_TOKENS 6
#define FLOATS_TOKENS 6
#include "cpu/arm/linear_load_neon.h"
#include "cpu/arm/linear_pack_neon.h"
#include "cpu/linear_pack_tmpl.h"
#include "cpu/linear_rows_tmpl.h"
#include "cpu/linear_bytes_tmpl.h"
#include "cpu/linear_floats_tmpl.h"

static void pack_halves(const float *x, int64_t n_cols, void *dst)
{
    pack_halves_width(x, n_cols, dst, V_BYTES);
}

const struct sl_linear_rows_kernels sl_linear_rows_neon = {
    .vector_bytes = V_BYTES,
    .pack = {[SL_LINEAR_HALVES] = pack_halves, [SL_LINEAR_SUPER] = pack_super},
    .rows = rows_table,
};

static void pack_bytes(const float *x, int64_t stride, int n_tokens, int64_t n_cols, int8_t *q,
                       float *d, const struct sl_linear_correction *corrections, void *const *sums,
                       int n_corrections)
{
    pack_bytes_body(x, stride, n_tokens, n_cols, q, d, corrections, sums, n_corrections);
}

static void build_floats(enum sl_type type, const void *w, size_t row_bytes, int n_rows,
                         int64_t first, int n_cols, void *panel, void *rows)
{
    build_floats_body(type, w, row_bytes, n_rows, first, n_cols, panel, rows);
}

static FLOATS_FUNCTION(tile_floats, floats_tile_body)

    static const struct sl_linear_panel_type types[SL_TYPE_N] = {
        [SL_TYPE_F32] = {.kind = SL_LINEAR_FLOATS},
        [SL_TYPE_F16] = {.kind = SL_LINEAR_FLOATS},
        [SL_TYPE_BF16] = {.kind = SL_LINEAR_FLOATS},
        BYTES_ENTRIES,
        SIGNED_ENTRIES,
};

const struct sl_linear_panel_kernels sl_linear_panels_neon = {
    .panel_rows = PANEL_ROWS,
    .tile_tokens = {[SL_LINEAR_BYTES] = BYTES_TOKENS, [SL_LINEAR_FLOATS] = FLOATS_TOKENS},
    .types = types,
    .pack_bytes = pack_bytes,
    .build_floats = build_floats,
    .tile_floats = tile_floats,
};
