/* SPDX-License-Identifier: Apache-2.0
 *
 * Panel kernels with AVX2 and its form of VNNI.
 */
#define BYTES_TOKENS 4
#include "cpu/x86/linear_load_v256.h"
#include "cpu/linear_words_tmpl.h"

static const struct sl_linear_panel_type types[SL_TYPE_N] = {
    [SL_TYPE_F32] = {.kind = SL_LINEAR_FLOATS},
    WORDS_F16_ENTRY,
    WORDS_BF16_ENTRY,
    BYTES_ENTRIES,
    SIGNED_ENTRIES,
};

const struct sl_linear_panel_kernels sl_linear_panels_avxvnni = {
    .panel_rows = PANEL_ROWS,
    .tile_tokens = {[SL_LINEAR_BYTES] = BYTES_TOKENS,
                    [SL_LINEAR_WORDS] = BYTES_TOKENS,
                    [SL_LINEAR_FLOATS] = 6},
    .types = types,
    .pack_bytes = sl_linear_pack_bytes_avx2,
    .pack_words = pack_words,
    .build_floats = sl_linear_build_floats_avx2,
    .tile_floats = sl_linear_tile_floats_avx2,
};
