/* SPDX-License-Identifier: Apache-2.0
 *
 * Panel kernels with AVX-512 and VNNI.
 */
#define BYTES_TOKENS 6
#include "cpu/x86/linear_load_v512.h"
#include "cpu/linear_words_tmpl.h"

static const struct sl_linear_panel_type types[SL_TYPE_N] = {
    [SL_TYPE_F32] = {.kind = SL_LINEAR_FLOATS},
    WORDS_F16_ENTRY,
    WORDS_BF16_ENTRY,
    BYTES_ENTRIES,
    SIGNED_ENTRIES,
};

const struct sl_linear_panel_kernels sl_linear_panels_avx512vnni = {
    .panel_rows = PANEL_ROWS,
    .bytes_tokens = BYTES_TOKENS,
    .floats_tokens = 14,
    .types = types,
    .pack_bytes = sl_linear_pack_bytes_avx2,
    .pack_words = pack_words,
    .build_floats = sl_linear_build_floats_avx512,
    .tile_floats = sl_linear_tile_floats_avx512,
};

/* The same where the processor also multiplies bfloats. */
static const struct sl_linear_panel_type types_bf16[SL_TYPE_N] = {
    [SL_TYPE_F32] = {.kind = SL_LINEAR_FLOATS},
    WORDS_F16_ENTRY,
    [SL_TYPE_BF16] = {.kind = SL_LINEAR_BFLOATS},
    BYTES_ENTRIES,
    SIGNED_ENTRIES,
};

const struct sl_linear_panel_kernels sl_linear_panels_avx512bf16 = {
    .panel_rows = PANEL_ROWS,
    .bytes_tokens = BYTES_TOKENS,
    .floats_tokens = 14,
    .types = types_bf16,
    .pack_bytes = sl_linear_pack_bytes_avx2,
    .pack_words = pack_words,
    .build_floats = sl_linear_build_floats_avx512,
    .tile_floats = sl_linear_tile_floats_avx512,
    .build_bfloats = sl_linear_build_bfloats_avx512bf16,
    .pack_bfloats = sl_linear_pack_bfloats_avx512bf16,
    .tile_bfloats = sl_linear_tile_bfloats_avx512bf16,
};
