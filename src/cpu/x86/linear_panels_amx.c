/* SPDX-License-Identifier: Apache-2.0
 *
 * Panel kernels with AMX tiles: bytes for quantized weights, bfloats for BF16. Panels and packed
 * activations are those of the level below, which happen to lie as tiles want them: a line of a
 * panel is a row of the second operand, a token's 32 columns are one of the first. Halves stay
 * with words.
 *
 * Bytes: a product of tiles is 16 tokens by 16 rows by 32 columns (or 16), as far as one pair of
 * scales goes. The sums go through memory to be scaled, which takes longer than the product; so
 * several products are under way: one in the tiles, others stored, one being scaled. Levels are
 * made signed when a panel is built, hence no correction is left but minimums. With 16 columns this
 * is no faster than the level below, but the parts of an op share their packed activations.
 *
 * Bfloats: 32 tokens by 32 rows in four tiles of sums, over all columns of the panel.
 */
#include "cpu/x86/amx_tiles.h"

#include "cpu/x86/linear_load_v512.h"
#include "cpu/linear_unpack_tmpl.h"

#define TILE_TOKENS TILE_ROWS
#define LINE_BYTES (4 * PANEL_ROWS)

/* Bytes: tiles 0, 1 hold sums; 2, 3 activations; 4, 5 weights. Bfloats: 0 to 3; 4, 5; 6, 7. */
static void open_panels(enum sl_linear_panel_kind kind, bool group16)
{
    const bool bfloats = kind == SL_LINEAR_BFLOATS;
    const int n_sums = bfloats ? 4 : 2;
    const int columns_bytes = bfloats ? 64 : group16 ? 16 : 32;
    struct tile_config config = {.palette = 1};
    for (int i = 0; i < n_sums + 4; i++) {
        const bool activations = i >= n_sums && i < n_sums + 2;
        config.rows[i] = (uint8_t)(i < n_sums + 2 ? TILE_ROWS : columns_bytes / 4);
        config.row_bytes[i] = (uint16_t)(activations ? columns_bytes : 64);
    }
    tile_configure(&config);
}

static void close_panels(void)
{
    tile_release();
}

/* The sums that come next. */
INLINE void fetch_sums(const float *y, int n_tokens, int64_t stride)
{
    for (int t = 0; t < n_tokens; t++) {
        prefetch(y + t * stride);
        prefetch(y + t * stride + 16);
    }
}

/* ---- Bytes ---- */

/* Make levels signed. */
static void less_offset(struct sl_linear_panel *panel, int n_cols, int offset)
{
    const vi v = _mm512_set1_epi8((char)offset);
    for (int i = 0; i < n_cols / 4 * LINE_BYTES; i += V_BYTES) {
        vi_store(panel->q + i, _mm512_sub_epi8(vi_load(panel->q + i), v));
    }
}

#define BUILD_SIGNED(name, offset)                                                                 \
    static void build_signed_##name(const uint8_t *w, size_t row_bytes, int n_rows, int n_cols,    \
                                    struct sl_linear_panel *panel)                                 \
    {                                                                                              \
        build_##name(w, row_bytes, n_rows, n_cols, panel);                                         \
        less_offset(panel, n_cols, offset);                                                        \
    }
BUILD_SIGNED(q4_0, 8)
BUILD_SIGNED(q5_0, 16)
BUILD_SIGNED(q8_0, BIAS_S8)
BUILD_SIGNED(mxfp4, 12)
BUILD_SIGNED(iq4_nl, BIAS_S8)
BUILD_SIGNED(q3_k, 4)
BUILD_SIGNED(q6_k, 32)
BUILD_SIGNED(iq4_xs, BIAS_S8)

/* Products between the start of one and the scaling of its sums. Vectors that are loaded soon after
 * a tile was stored there wait until the store has left the processor. */
#define SCALE_LAG 3
#define N_STORED 4

/* What one product needs: the columns of one scale. */
struct product {
    const int8_t *x; /* of the first token, 32 bytes from token to token */
    const uint8_t *q;
    const float *d, *m;   /* of the rows */
    const float *xd, *xs; /* of the tokens; xs where there are minimums */
};

/* sums = x * q in tiles of the number's parity; fewer tokens go through `rows`. */
INLINE void start_product(const int parity, const struct product *p, int n_tokens,
                          const bool group16, int8_t *rows)
{
    const int8_t *x = p->x;
    if (n_tokens < TILE_TOKENS) {
        memcpy(rows, x, 32 * (size_t)n_tokens - (group16 ? 16 : 0));
        x = rows;
    }
    if (parity == 0) {
        tile_load(2, x, 32);
        tile_load(4, p->q, LINE_BYTES);
        tile_zero(0);
        tile_multiply_bytes(0, 2, 4);
    } else {
        tile_load(3, x, 32);
        tile_load(5, p->q, LINE_BYTES);
        tile_zero(1);
        tile_multiply_bytes(1, 3, 5);
    }
}

INLINE void store_product(const int parity, int32_t *sums)
{
    if (parity == 0) {
        tile_store(0, sums, 64);
    } else {
        tile_store(1, sums, 64);
    }
}

INLINE void scale_product(const int32_t *sums, const struct product *p, const int n_tokens,
                          const bool with_m, vf *acc)
{
    const vf d = vf_load(p->d);
    for (int t = 0; t < n_tokens; t++) {
        const vf scaled = vf_mul(vf_from_int(vi_load(sums + 16 * t)), d);
        acc[t] = vf_fma(scaled, vf_set1(p->xd[t]), acc[t]);
    }
    if (with_m) {
        const vf m = vf_load(p->m);
        for (int t = 0; t < n_tokens; t++) {
            acc[t] = vf_fma(m, vf_set1(p->xs[t]), acc[t]);
        }
    }
}

/* The product of group i of a panel's columns with the rows that begin at `row`. */
INLINE struct product product_of(const struct sl_linear_panel *panel,
                                 const struct sl_linear_tile *x, int i, int row, int n_tokens,
                                 const bool with_m, const bool group16)
{
    const int block = group16 ? i / 2 : i;
    const int n_cols = group16 ? 16 : 32;
    return (struct product){
        .x = x->q + 32 * block * n_tokens + (group16 ? i % 2 * 16 : 0),
        .q = panel->q + (size_t)i * (size_t)(n_cols * PANEL_ROWS) + 4 * row,
        .d = panel->d + i * PANEL_ROWS + row,
        .m = panel->m + i * PANEL_ROWS + row,
        .xd = x->d + block * n_tokens,
        .xs = with_m ? (const float *)x->sums + i * n_tokens : NULL,
    };
}

INLINE void half_panel(const struct sl_linear_panel *panel, const struct sl_linear_tile *x, int row,
                       const int n_tokens, int n_groups, float *y, int64_t stride,
                       const bool with_m, const bool group16)
{
    _Alignas(64) int32_t sums[N_STORED][TILE_TOKENS * 16];
    _Alignas(64) int8_t rows[2][TILE_TOKENS * 32] = {{0}};
    vf acc[TILE_TOKENS];
    for (int t = 0; t < n_tokens; t++) {
        acc[t] = vf_load(y + t * stride + row);
    }
    for (int i = 0; i < n_groups + SCALE_LAG; i += 2) {
        for (int parity = 0; parity < 2; parity++) {
            const int now = i + parity;
            if (now < n_groups) {
                const struct product p = product_of(panel, x, now, row, n_tokens, with_m, group16);
                start_product(parity, &p, n_tokens, group16, rows[parity]);
            }
            if (now >= 1 && now - 1 < n_groups) {
                store_product(1 - parity, sums[(now - 1) % N_STORED]);
            }
            const int ready = now - SCALE_LAG;
            if (ready >= 0 && ready < n_groups) {
                const struct product p =
                    product_of(panel, x, ready, row, n_tokens, with_m, group16);
                scale_product(sums[ready % N_STORED], &p, n_tokens, with_m, acc);
            }
        }
    }
    for (int t = 0; t < n_tokens; t++) {
        vf_store(y + t * stride + row, acc[t]);
    }
}

INLINE void bytes_tile(const struct sl_linear_panel *panel, const struct sl_linear_tile *x,
                       int n_tokens, int n_cols, float *y, int64_t stride, const bool with_m,
                       const bool group16)
{
    const int n_groups = n_cols / (group16 ? 16 : 32);
    fetch_sums(y + TILE_TOKENS * stride, TILE_TOKENS, stride);
    for (int row = 0; row < PANEL_ROWS; row += 16) {
        if (n_tokens == TILE_TOKENS) { /* all sums in registers */
            half_panel(panel, x, row, TILE_TOKENS, n_groups, y, stride, with_m, group16);
        } else {
            half_panel(panel, x, row, n_tokens, n_groups, y, stride, with_m, group16);
        }
    }
}

#define TILE_FUNCTION(name, with_m, group16)                                                       \
    static void name(const void *panel, const void *x, int n_tokens, int n_cols, float *y,         \
                     int64_t stride)                                                               \
    {                                                                                              \
        bytes_tile(panel, x, n_tokens, n_cols, y, stride, with_m, group16);                        \
    }
TILE_FUNCTION(tile_plain, false, false)
TILE_FUNCTION(tile_min, true, false)
TILE_FUNCTION(tile_plain16, false, true)
TILE_FUNCTION(tile_min16, true, true)

/* ---- Bfloats ---- */

/* To [columns / 32][tokens][32]. */
static void pack_bfloats(const float *x, int64_t stride, int n_tokens, int64_t n_cols, void *dst)
{
    uint16_t *out = dst;
    for (int64_t i = 0; i < n_cols; i += 32) {
        for (int t = 0; t < n_tokens; t++) {
            const float *from = x + t * stride + i;
            const vi both = (vi)_mm512_cvtne2ps_pbh(vf_load(from + 16), vf_load(from));
            vi_store(out + i * n_tokens + 32 * t, both);
        }
    }
}

/* Up to 32 tokens of 32 columns, as they lie or, when fewer, in `rows`. */
INLINE const uint16_t *whole_tokens(const uint16_t *x, int n_tokens, uint16_t *rows)
{
    if (n_tokens == 2 * TILE_ROWS) {
        return x;
    }
    memcpy(rows, x, 64 * (size_t)n_tokens);
    return rows;
}

static void bfloats_sums(const uint8_t *panel, const uint16_t *x, int n_tokens, int n_steps,
                         float *y, int64_t stride)
{
    _Alignas(64) uint16_t rows[2 * TILE_ROWS * 32] = {0};
    const size_t row_bytes = (size_t)stride * sizeof(float);
    float *second = y + TILE_ROWS * stride;
    fetch_sums(y + PANEL_ROWS, 2 * TILE_ROWS, stride);
    tile_load(0, y, row_bytes);
    tile_load(1, y + 16, row_bytes);
    tile_load(2, second, row_bytes);
    tile_load(3, second + 16, row_bytes);
    for (int k = 0; k < n_steps; k += 16) {
        const uint16_t *at = whole_tokens(x + 2 * k * n_tokens, n_tokens, rows);
        const uint8_t *w = panel + (size_t)k * LINE_BYTES;
        tile_load(4, at, 64);
        tile_load(6, w, LINE_BYTES);
        tile_multiply_bfloats(0, 4, 6);
        tile_load(7, w + 64, LINE_BYTES);
        tile_multiply_bfloats(1, 4, 7);
        tile_load(5, at + TILE_ROWS * 32, 64);
        tile_multiply_bfloats(2, 5, 6);
        tile_multiply_bfloats(3, 5, 7);
    }
    tile_store(0, y, row_bytes);
    tile_store(1, y + 16, row_bytes);
    tile_store(2, second, row_bytes);
    tile_store(3, second + 16, row_bytes);
}

static void tile_bfloats(const void *panel, const void *x, int n_tokens, int n_steps, float *y,
                         int64_t stride)
{
    if (n_tokens == 2 * TILE_ROWS) {
        bfloats_sums(panel, x, n_tokens, n_steps, y, stride);
        return;
    }
    _Alignas(64) float sums[2 * TILE_ROWS][PANEL_ROWS] = {{0}};
    for (int t = 0; t < n_tokens; t++) {
        memcpy(sums[t], y + t * stride, sizeof(sums[t]));
    }
    bfloats_sums(panel, x, n_tokens, n_steps, sums[0], PANEL_ROWS);
    for (int t = 0; t < n_tokens; t++) {
        memcpy(y + t * stride, sums[t], sizeof(sums[t]));
    }
}

/* ---- The set ---- */

#define ENTRY(minimum, group16, name, tile)                                                        \
    {                                                                                              \
        SL_LINEAR_BYTES, {0, minimum, group16}, build_##name, tile                                 \
    }

static const struct sl_linear_panel_type types[SL_TYPE_N] = {
    [SL_TYPE_F32] = {.kind = SL_LINEAR_FLOATS},
    [SL_TYPE_F16] = {.kind = SL_LINEAR_WORDS,
                     .build = sl_linear_build_words_f16_avx512vnni,
                     .tile = sl_linear_tile_words_avx512vnni},
    [SL_TYPE_BF16] = {.kind = SL_LINEAR_BFLOATS},
    [SL_TYPE_Q4_0] = ENTRY(false, false, signed_q4_0, tile_plain),
    [SL_TYPE_Q4_1] = ENTRY(true, false, q4_1, tile_min),
    [SL_TYPE_Q5_0] = ENTRY(false, false, signed_q5_0, tile_plain),
    [SL_TYPE_Q5_1] = ENTRY(true, false, q5_1, tile_min),
    [SL_TYPE_Q8_0] = ENTRY(false, false, signed_q8_0, tile_plain),
    [SL_TYPE_MXFP4] = ENTRY(false, false, signed_mxfp4, tile_plain),
    [SL_TYPE_IQ4_NL] = ENTRY(false, false, signed_iq4_nl, tile_plain),
    [SL_TYPE_Q2_K] = ENTRY(true, true, q2_k, tile_min16),
    [SL_TYPE_Q3_K] = ENTRY(false, true, signed_q3_k, tile_plain16),
    [SL_TYPE_Q4_K] = ENTRY(true, false, q4_k, tile_min),
    [SL_TYPE_Q5_K] = ENTRY(true, false, q5_k, tile_min),
    [SL_TYPE_Q6_K] = ENTRY(false, true, signed_q6_k, tile_plain16),
    [SL_TYPE_IQ4_XS] = ENTRY(false, false, signed_iq4_xs, tile_plain),
};

const struct sl_linear_panel_kernels sl_linear_panels_amx = {
    .panel_rows = PANEL_ROWS,
    .tile_tokens = {[SL_LINEAR_BYTES] = TILE_TOKENS,
                    [SL_LINEAR_WORDS] = 6,
                    [SL_LINEAR_FLOATS] = 14,
                    [SL_LINEAR_BFLOATS] = 2 * TILE_ROWS},
    .types = types,
    .pack_bytes = sl_linear_pack_bytes_avx2,
    .pack_words = sl_linear_pack_words_avx512vnni,
    .build_floats = sl_linear_build_floats_avx512,
    .tile_floats = sl_linear_tile_floats_avx512,
    .pack_bfloats = pack_bfloats,
    .build_bfloats = sl_linear_build_bfloats_avx512bf16,
    .tile_bfloats = tile_bfloats,
    .open = open_panels,
    .close = close_panels,
};
