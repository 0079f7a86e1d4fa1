/* SPDX-License-Identifier: Apache-2.0
 *
 * The tile operations of cpu/x86/amx_tiles.h in plain C, so that AMX kernels are tested without
 * AMX. Include it before the kernels. Every use is checked: a tile that is not configured, or of a
 * shape that does not fit its operands, stops the test.
 */
#ifndef SL_TESTS_AMX_EMULATE_H
#define SL_TESTS_AMX_EMULATE_H

#define SL_CPU_X86_AMX_TILES_H /* in place of the real one */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TILE_ROWS 16

struct tile_config {
    uint8_t palette, start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

/* A processor's tiles belong to a thread. */
struct tile_state {
    struct tile_config config;
    uint8_t data[8][16][64];
};
static _Thread_local struct tile_state state_of_tiles;

static void tile_check(int ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "amx_emulate: %s\n", what);
        abort();
    }
}

static void tile_configure(const struct tile_config *config)
{
    tile_check(config->palette == 1 && config->start_row == 0, "palette");
    for (int i = 0; i < 16; i++) {
        tile_check(config->rows[i] <= 16 && config->row_bytes[i] <= 64, "shape");
        tile_check((config->rows[i] == 0) == (config->row_bytes[i] == 0), "half a shape");
        tile_check(i < 8 || config->rows[i] == 0, "more than 8 tiles");
    }
    memset(&state_of_tiles, 0, sizeof(state_of_tiles));
    state_of_tiles.config = *config;
}

static void tile_release(void)
{
    memset(&state_of_tiles, 0, sizeof(state_of_tiles));
}

static void tile_used(int tile)
{
    tile_check(state_of_tiles.config.palette == 1 && state_of_tiles.config.rows[tile] > 0,
               "tile not configured");
}

static void tile_zero(int tile)
{
    tile_used(tile);
    memset(state_of_tiles.data[tile], 0, sizeof(state_of_tiles.data[tile]));
}

/* What lies beyond a tile's shape is zero. */
static void tile_load(int tile, const void *from, size_t stride)
{
    tile_zero(tile);
    for (int r = 0; r < state_of_tiles.config.rows[tile]; r++) {
        memcpy(state_of_tiles.data[tile][r], (const char *)from + (size_t)r * stride,
               state_of_tiles.config.row_bytes[tile]);
    }
}

static void tile_store(int tile, void *to, size_t stride)
{
    tile_used(tile);
    for (int r = 0; r < state_of_tiles.config.rows[tile]; r++) {
        memcpy((char *)to + (size_t)r * stride, state_of_tiles.data[tile][r],
               state_of_tiles.config.row_bytes[tile]);
    }
}

static void tile_check_product(int sums, int a, int b)
{
    const struct tile_config *c = &state_of_tiles.config;
    tile_used(sums);
    tile_used(a);
    tile_used(b);
    tile_check(sums != a && sums != b && a != b, "operands of a product are not apart");
    tile_check(c->rows[sums] == c->rows[a] && c->row_bytes[sums] == c->row_bytes[b] &&
                   c->row_bytes[a] == 4 * c->rows[b],
               "shapes of a product");
}

static void tile_multiply_bytes(int sums, int a, int b)
{
    tile_check_product(sums, a, b);
    for (int m = 0; m < state_of_tiles.config.rows[sums]; m++) {
        int32_t row[16];
        memcpy(row, state_of_tiles.data[sums][m], sizeof(row));
        for (int k = 0; k < state_of_tiles.config.rows[b]; k++) {
            const int8_t *x = (const int8_t *)state_of_tiles.data[a][m] + 4 * k;
            for (int n = 0; n < state_of_tiles.config.row_bytes[b] / 4; n++) {
                const int8_t *w = (const int8_t *)state_of_tiles.data[b][k] + 4 * n;
                row[n] += x[0] * w[0] + x[1] * w[1] + x[2] * w[2] + x[3] * w[3];
            }
        }
        memcpy(state_of_tiles.data[sums][m], row, sizeof(row));
    }
}

/* Subnormal bfloats count as zero. */
static float tile_bfloat(const uint8_t *p)
{
    uint16_t half;
    memcpy(&half, p, sizeof(half));
    const uint32_t bits = (half & 0x7f80) != 0 ? (uint32_t)half << 16 : 0;
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

static void tile_multiply_bfloats(int sums, int a, int b)
{
    tile_check_product(sums, a, b);
    for (int m = 0; m < state_of_tiles.config.rows[sums]; m++) {
        float row[16];
        memcpy(row, state_of_tiles.data[sums][m], sizeof(row));
        for (int k = 0; k < state_of_tiles.config.rows[b]; k++) {
            for (int i = 0; i < 2; i++) {
                const float x = tile_bfloat(state_of_tiles.data[a][m] + 4 * k + 2 * i);
                for (int n = 0; n < state_of_tiles.config.row_bytes[b] / 4; n++) {
                    row[n] += x * tile_bfloat(state_of_tiles.data[b][k] + 4 * n + 2 * i);
                }
            }
        }
        memcpy(state_of_tiles.data[sums][m], row, sizeof(row));
    }
}

#endif
