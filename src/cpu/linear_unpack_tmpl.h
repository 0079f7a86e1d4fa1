/* SPDX-License-Identifier: Apache-2.0
 *
 * Byte panels: quantized rows unpacked to 8-bit levels, scales and minimums. Included by one source
 * file a level, after the unpacking of blocks.
 *
 * Panel, for each 4 columns one line of two vectors; a lane holds 4 columns of one row:
 *
 *   columns 0..3    | row 0 | row 1 | ... | row PANEL_ROWS - 1 |
 *   columns 4..7    | row 0 | ...
 */
#ifndef SL_CPU_LINEAR_UNPACK_TMPL_H
#define SL_CPU_LINEAR_UNPACK_TMPL_H

#include "cpu/linear_internal.h"

#define PANEL_ROWS (2 * V_LANES)
#define ROW_STRIDE SL_LINEAR_BYTES_COLS

typedef struct group load_group_fn(const uint8_t *p, int n_blocks);
typedef struct super load_super_fn(const uint8_t *p);

/* panel->rows to panel->q, n_vectors of each row. In the layout of groups a vector holds the first
 * or the second half of its blocks, otherwise the columns in order. */
INLINE void transpose_rows(struct sl_linear_panel *panel, int n_vectors, bool groups)
{
    for (int half = 0; half < 2; half++) {
        const uint8_t *src = panel->rows + half * V_LANES * ROW_STRIDE;
        for (int c = 0; c < n_vectors; c++) {
            vi columns[V_LANES];
            transpose_32(src + c * V_BYTES, ROW_STRIDE, columns);
            for (int i = 0; i < V_LANES; i++) {
                const int step = groups ? c / 2 * 8 * GROUP_BLOCKS + i / 4 * 8 + c % 2 * 4 + i % 4
                                        : c * V_LANES + i;
                vi_store(panel->q + (2 * step + half) * V_BYTES, columns[i]);
            }
        }
    }
}

/* While a row is unpacked, the same columns of a later row are fetched, so that few tokens, which
 * leave little time between panels, still find their weights in the cache. */
#define PANEL_FETCH_ROWS 8

INLINE void fetch_segment(const uint8_t *p, size_t bytes)
{
    for (size_t at = 0; at < bytes + 63; at += 64) {
        prefetch(p + at);
    }
}

/* Rows from n_rows on: no level matters where the scale is zero, but let none be indeterminate. */
static void clear_rows(struct sl_linear_panel *panel, int n_rows)
{
    for (int r = n_rows; r < PANEL_ROWS; r++) {
        memset(panel->rows + r * ROW_STRIDE, 0, ROW_STRIDE);
        for (int i = 0; i < SL_LINEAR_BYTES_COLS / 16; i++) {
            panel->d[i * PANEL_ROWS + r] = 0.0f;
            panel->m[i * PANEL_ROWS + r] = 0.0f;
        }
    }
}

INLINE void build_groups(load_group_fn *load, size_t block_bytes, bool with_m, const uint8_t *w,
                         size_t row_bytes, int n_rows, int n_cols, struct sl_linear_panel *panel)
{
    const int n_blocks = n_cols / 32;
    const int n_groups = (n_blocks + GROUP_BLOCKS - 1) / GROUP_BLOCKS;
    for (int r = 0; r < n_rows; r++) {
        fetch_segment(w + (size_t)(r + PANEL_FETCH_ROWS) * row_bytes,
                      (size_t)n_blocks * block_bytes);
        for (int g = 0; g < n_groups; g++) {
            const uint8_t *p = w + (size_t)r * row_bytes + (size_t)(g * GROUP_BLOCKS) * block_bytes;
            const int left = n_blocks - g * GROUP_BLOCKS;
            const struct group v = left >= GROUP_BLOCKS ? load(p, GROUP_BLOCKS) : load(p, left);
            uint8_t *row = panel->rows + r * ROW_STRIDE + g * 2 * V_BYTES;
            float d[V_LANES], m[V_LANES];
            vi_store(row, v.lo);
            vi_store(row + V_BYTES, v.hi);
            vf_store(d, v.d);
            vf_store(m, v.m);
            for (int b = 0; b < GROUP_BLOCKS; b++) {
                const int at = (g * GROUP_BLOCKS + b) * PANEL_ROWS + r;
                panel->d[at] = d[4 * b];
                if (with_m) {
                    panel->m[at] = m[4 * b];
                }
            }
        }
    }
    clear_rows(panel, n_rows);
    transpose_rows(panel, 2 * n_groups, true);
}

INLINE void build_supers(load_super_fn *load, size_t block_bytes, bool with_m, bool group16,
                         const uint8_t *w, size_t row_bytes, int n_rows, int n_cols,
                         struct sl_linear_panel *panel)
{
    const int n_vectors = 256 / V_BYTES;
    const int step = group16 ? 1 : 2;
    for (int r = 0; r < n_rows; r++) {
        fetch_segment(w + (size_t)(r + PANEL_FETCH_ROWS) * row_bytes,
                      (size_t)(n_cols / 256) * block_bytes);
        for (int b = 0; b < n_cols / 256; b++) {
            const struct super v = load(w + (size_t)r * row_bytes + (size_t)b * block_bytes);
            float d[16], m[16];
            for (int i = 0; i < n_vectors; i++) {
                vi_store(panel->rows + r * ROW_STRIDE + 256 * b + i * V_BYTES, v.q[i]);
            }
            memcpy(d, &v.s, sizeof(d));
            memcpy(m, &v.m, sizeof(m));
            for (int i = 0; i < 16; i += step) {
                const int at = (16 * b + i) / step * PANEL_ROWS + r;
                panel->d[at] = d[i];
                if (with_m) {
                    panel->m[at] = -m[i];
                }
            }
        }
    }
    clear_rows(panel, n_rows);
    transpose_rows(panel, n_cols / 256 * n_vectors, false);
}

#define BUILD_GROUPS(name, bytes, with_m)                                                          \
    static void build_##name(const uint8_t *w, size_t row_bytes, int n_rows, int n_cols,           \
                             struct sl_linear_panel *panel)                                        \
    {                                                                                              \
        build_groups(load_##name, bytes, with_m, w, row_bytes, n_rows, n_cols, panel);             \
    }
#define BUILD_SUPERS(name, bytes, with_m, group16)                                                 \
    static void build_##name(const uint8_t *w, size_t row_bytes, int n_rows, int n_cols,           \
                             struct sl_linear_panel *panel)                                        \
    {                                                                                              \
        build_supers(load_##name, bytes, with_m, group16, w, row_bytes, n_rows, n_cols, panel);    \
    }
BUILD_GROUPS(q4_0, 18, false)
BUILD_GROUPS(q4_1, 20, true)
BUILD_GROUPS(q5_0, 22, false)
BUILD_GROUPS(q5_1, 24, true)
BUILD_GROUPS(mxfp4, 17, false)
BUILD_SUPERS(q2_k, 84, true, true)
BUILD_SUPERS(q3_k, 110, false, true)
BUILD_SUPERS(q4_k, 144, true, false)
BUILD_SUPERS(q5_k, 176, true, false)
BUILD_SUPERS(q6_k, 210, false, true)

#if HAVE_DPBUSD
/* Levels of all 8 bits overflow 16-bit sums, so these types need VNNI here. */
BUILD_GROUPS(q8_0, 34, false)
BUILD_GROUPS(iq4_nl, 18, false)
BUILD_SUPERS(iq4_xs, 136, false, false)
#endif

#endif
