/* SPDX-License-Identifier: Apache-2.0
 *
 * Row kernels with AVX-512 and VNNI.
 */
#include "cpu/x86/linear_load_v512.h"
#include "cpu/x86/linear_pack_v256.h"
#include "cpu/linear_pack_tmpl.h"
#include "cpu/linear_rows_tmpl.h"

static void pack_halves(const float *x, int64_t n_cols, void *dst)
{
    pack_halves_width(x, n_cols, dst, V_BYTES);
}

const struct sl_linear_rows_kernels sl_linear_rows_avx512vnni = {
    .vector_bytes = V_BYTES,
    .pack = {[SL_LINEAR_HALVES] = pack_halves, [SL_LINEAR_SUPER] = pack_super},
    .rows = rows_table,
};
