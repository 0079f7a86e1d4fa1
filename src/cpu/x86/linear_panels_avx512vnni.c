/* SPDX-License-Identifier: Apache-2.0
 *
 * Panel kernels with AVX-512 and VNNI.
 */
#define BYTES_TOKENS 6
#include "cpu/x86/linear_load_v512.h"
#include "cpu/linear_words_tmpl.h"

/* Words serve levels above this one too. */
void sl_linear_pack_words_avx512vnni(const float *x, int64_t stride, int n_tokens, int64_t n_cols,
                                     int16_t *q, float *d)
{
    pack_words(x, stride, n_tokens, n_cols, q, d);
}

void sl_linear_build_words_f16_avx512vnni(const uint8_t *w, size_t row_bytes, int n_rows,
                                          int n_cols, struct sl_linear_panel *panel)
{
    build_words_f16(w, row_bytes, n_rows, n_cols, panel);
}

void sl_linear_tile_words_avx512vnni(const void *panel, const void *x, int n_tokens, int n_cols,
                                     float *y, int64_t stride)
{
    tile_words(panel, x, n_tokens, n_cols, y, stride);
}

static const struct sl_linear_panel_type types[SL_TYPE_N] = {
    [SL_TYPE_F32] = {.kind = SL_LINEAR_FLOATS},
    WORDS_F16_ENTRY,
    WORDS_BF16_ENTRY,
    BYTES_ENTRIES,
    SIGNED_ENTRIES,
};

const struct sl_linear_panel_kernels sl_linear_panels_avx512vnni = {
    .panel_rows = PANEL_ROWS,
    .tile_tokens = {[SL_LINEAR_BYTES] = BYTES_TOKENS,
                    [SL_LINEAR_WORDS] = BYTES_TOKENS,
                    [SL_LINEAR_FLOATS] = 14},
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
    .tile_tokens = {[SL_LINEAR_BYTES] = BYTES_TOKENS,
                    [SL_LINEAR_WORDS] = BYTES_TOKENS,
                    [SL_LINEAR_FLOATS] = 14,
                    [SL_LINEAR_BFLOATS] = 14},
    .types = types_bf16,
    .pack_bytes = sl_linear_pack_bytes_avx2,
    .pack_words = pack_words,
    .build_floats = sl_linear_build_floats_avx512,
    .tile_floats = sl_linear_tile_floats_avx512,
    .build_bfloats = sl_linear_build_bfloats_avx512bf16,
    .pack_bfloats = sl_linear_pack_bfloats_avx512bf16,
    .tile_bfloats = sl_linear_tile_bfloats_avx512bf16,
};
