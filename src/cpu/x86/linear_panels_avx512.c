/* SPDX-License-Identifier: Apache-2.0
 *
 * Panel kernels with AVX-512 without VNNI.
 */
#define BYTES_TOKENS 6
#include "cpu/x86/linear_load_v512.h"
#include "cpu/linear_bytes_tmpl.h"

static const struct sl_linear_panel_type types[SL_TYPE_N] = {
    [SL_TYPE_F32] = {.kind = SL_LINEAR_FLOATS},
    [SL_TYPE_F16] = {.kind = SL_LINEAR_FLOATS},
    [SL_TYPE_BF16] = {.kind = SL_LINEAR_FLOATS},
    [SL_TYPE_Q8_0] = {.kind = SL_LINEAR_FLOATS},
    [SL_TYPE_IQ4_NL] = {.kind = SL_LINEAR_FLOATS},
    [SL_TYPE_IQ4_XS] = {.kind = SL_LINEAR_FLOATS},
    BYTES_ENTRIES,
};

const struct sl_linear_panel_kernels sl_linear_panels_avx512 = {
    .panel_rows = PANEL_ROWS,
    .tile_tokens = {[SL_LINEAR_BYTES] = BYTES_TOKENS, [SL_LINEAR_FLOATS] = 14},
    .types = types,
    .pack_bytes = sl_linear_pack_bytes_avx2,
    .build_floats = sl_linear_build_floats_avx512,
    .tile_floats = sl_linear_tile_floats_avx512,
};
