/* SPDX-License-Identifier: Apache-2.0
 *
 * Bfloat panel kernels with the AVX-512 dot product of bfloats. Activations are rounded to bfloats;
 * sums are float.
 */
#define FLOATS_TOKENS 14
#include "cpu/x86/linear_v512.h"
#include "cpu/linear_floats_tmpl.h"

void sl_linear_build_bfloats_avx512bf16(enum sl_type type, const void *w, size_t row_bytes,
                                        int n_rows, int64_t first, int n_cols, void *panel,
                                        void *rows)
{
    (void)type;
    build_bfloats_body(w, row_bytes, n_rows, first, n_cols, panel, rows);
}

void sl_linear_pack_bfloats_avx512bf16(const float *x, int64_t stride, int n_tokens, int64_t n_cols,
                                       void *dst)
{
    pack_bfloats_body(x, stride, n_tokens, n_cols, dst);
}

FLOATS_FUNCTION(sl_linear_tile_bfloats_avx512bf16, bfloats_tile_body)
