/* SPDX-License-Identifier: Apache-2.0
 *
 * Float panel kernels with AVX2.
 */
#define FLOATS_TOKENS 6
#include "cpu/x86/linear_v256.h"
#include "cpu/linear_floats_tmpl.h"

void sl_linear_build_floats_avx2(enum sl_type type, const void *w, size_t row_bytes, int n_rows,
                                 int64_t first, int n_cols, void *panel, void *rows)
{
    build_floats_body(type, w, row_bytes, n_rows, first, n_cols, panel, rows);
}

FLOATS_FUNCTION(sl_linear_tile_floats_avx2, floats_tile_body)
