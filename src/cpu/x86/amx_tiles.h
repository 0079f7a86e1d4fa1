/* SPDX-License-Identifier: Apache-2.0
 *
 * The tile operations that the AMX kernels use, by short names. Tests have an emulation of the
 * same names (tests/cpu/amx_emulate.h), so that the kernels are checked on any processor with
 * AVX-512. Tile numbers are constants.
 *
 * A tile has up to 16 rows of up to 64 bytes, as the configuration says. In a product of bytes,
 *
 *   sums[m][n] += sum over k of a[m][4 k .. 4 k + 3] . b[k][4 n .. 4 n + 3],
 *
 * so a row of b holds 4 columns of each of 16 weight rows: a line of a panel. Bfloats go by pairs.
 */
#ifndef SL_CPU_X86_AMX_TILES_H
#define SL_CPU_X86_AMX_TILES_H

#include <immintrin.h>
#include <stdint.h>

#define TILE_ROWS 16

/* As the processor reads it. */
struct tile_config {
    uint8_t palette, start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};
_Static_assert(sizeof(struct tile_config) == 64, "layout");

/* Compilers do not know what these read. */
#define TILE_FENCE __asm__ volatile("" ::: "memory")

#define tile_configure(config)                                                                     \
    do {                                                                                           \
        TILE_FENCE;                                                                                \
        _tile_loadconfig(config);                                                                  \
    } while (0)
#define tile_release() _tile_release()
#define tile_zero(tile) _tile_zero(tile)
/* `stride` bytes from row to row. */
#define tile_load(tile, from, stride)                                                              \
    do {                                                                                           \
        TILE_FENCE;                                                                                \
        _tile_loadd(tile, from, stride);                                                           \
    } while (0)
#define tile_store(tile, to, stride) _tile_stored(tile, to, stride)
/* sums += a x b: signed bytes; bfloats. */
#define tile_multiply_bytes(sums, a, b) _tile_dpbssd(sums, a, b)
#define tile_multiply_bfloats(sums, a, b) _tile_dpbf16ps(sums, a, b)

#endif
