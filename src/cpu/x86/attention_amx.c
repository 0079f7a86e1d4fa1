/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention with AMX tiles, for caches of F16: products of bfloats, made exact by splitting. A half
 * is the sum of two bfloats; queries are split into three (24 bits), softmax weights into two
 * (16 bits). A block of keys or values is split once, into memory that stays in the cache, for all
 * rows that read it.
 *
 *   scores    tiles of 16 keys x 32 columns times 32 columns x 16 rows
 *   values    tiles of 16 rows x 32 keys times 32 keys x 16 columns
 *
 * Four tiles hold sums, so that no product waits for the one before it: of four tiles of keys (or
 * columns of values) where the rows make one, else of the tiles of rows.
 */
#include "cpu/x86/amx_tiles.h"

#include "cpu/kernels.h"
#include "cpu/x86/linear_v512.h"

#define TILE_BYTES 1024
#define N_SUMS 4 /* tiles 0 .. 3; the others are operands */
#define MAX_HEAD_DIM 256
#define BLOCK SL_KV_BLOCK

/* sums of number j, which tiles want to know when they are compiled */
#define ON_SUMS(j, call)                                                                           \
    switch (j) {                                                                                   \
    case 0:                                                                                        \
        call(0);                                                                                   \
        break;                                                                                     \
    case 1:                                                                                        \
        call(1);                                                                                   \
        break;                                                                                     \
    case 2:                                                                                        \
        call(2);                                                                                   \
        break;                                                                                     \
    default:                                                                                       \
        call(3);                                                                                   \
        break;                                                                                     \
    }

static void open_tiles(void)
{
    struct tile_config config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.rows[i] = TILE_ROWS;
        config.row_bytes[i] = 64;
    }
    tile_configure(&config);
}

static void close_tiles(void)
{
    tile_release();
}

INLINE void clear_sums(void)
{
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
}

/* All of them before any is used: vectors that are loaded soon after a tile was stored there wait
 * until the store has left the processor. */
INLINE void store_sums(float sums[N_SUMS][TILE_ROWS * 16])
{
    tile_store(0, sums[0], 64);
    tile_store(1, sums[1], 64);
    tile_store(2, sums[2], 64);
    tile_store(3, sums[3], 64);
}

/* ---- Splitting. Pair i of the result is number i of a and number i of b. ---- */

INLINE vi bits(vf a)
{
    return _mm512_castps_si512(a);
}

/* The upper halves of two vectors of floats, which are the bfloats below them. */
INLINE vi pairs_of(vf a, vf b)
{
    return _mm512_mask_mov_epi16(_mm512_srli_epi32(bits(a), 16), 0xaaaaaaaau, bits(b));
}

/* What is left of a float without its upper half. */
INLINE vf rest_of(vf a)
{
    const vf upper = _mm512_castsi512_ps(vi_and(bits(a), vi_set1((int32_t)0xffff0000u)));
    return _mm512_sub_ps(a, upper);
}

/* The upper half is the nearest bfloat; the lower half means nothing. */
INLINE vf rounded(vf a)
{
    return _mm512_castsi512_ps(vi_add(bits(a), vi_set1(0x8000)));
}

INLINE vf less_upper(vf a, vf rounded_a)
{
    const vf upper = _mm512_castsi512_ps(vi_and(bits(rounded_a), vi_set1((int32_t)0xffff0000u)));
    return _mm512_sub_ps(a, upper);
}

/* Halves: 11 bits are two bfloats exactly. */
INLINE void split_halves(vf a, vf b, void *high, void *low)
{
    vi_store(high, pairs_of(a, b));
    vi_store(low, pairs_of(rest_of(a), rest_of(b)));
}

INLINE void fetch(const void *next, size_t at, size_t bytes)
{
    for (size_t i = 0; next != NULL && i < bytes; i += 64) {
        __builtin_prefetch((const char *)next + at + i, 0, 2);
    }
}

/* ---- Scores ---- */

/* The three parts of 32 columns of up to 16 rows as second operands: [pair][row]. */
INLINE void pack_columns(const float *q, int n_rows, int head_dim, void *tiles)
{
    _Alignas(64) uint32_t parts[3][TILE_ROWS][16] = {{{0}}};
    for (int r = 0; r < n_rows; r++) {
        vf a = vf_load(q + r * head_dim), b = vf_load(q + r * head_dim + 16);
        for (int part = 0; part < 3; part++) {
            const vf ra = rounded(a), rb = rounded(b);
            vi_store(parts[part][r], pairs_of(ra, rb));
            a = less_upper(a, ra);
            b = less_upper(b, rb);
        }
    }
    for (int part = 0; part < 3; part++) {
        vi columns[16];
        transpose_32((const uint8_t *)parts[part], 64, columns);
        for (int i = 0; i < 16; i++) {
            vi_store((char *)tiles + part * TILE_BYTES + 64 * i, columns[i]);
        }
    }
}

/* Packed queries: for each 32 columns, for each 16 rows, 3 tiles. */
static void pack_queries(const float *q, int n_rows, int head_dim, void *packed)
{
    char *to = packed;
    for (int i = 0; i < head_dim; i += 32) {
        for (int r = 0; r < n_rows; r += TILE_ROWS) {
            const int n = n_rows - r < TILE_ROWS ? n_rows - r : TILE_ROWS;
            pack_columns(q + r * head_dim + i, n, head_dim, to);
            to += 3 * TILE_BYTES;
        }
    }
}

struct split_rows {
    uint16_t *high, *low;
};

/* Keys as first operands: [keys][head_dim], whole tiles of keys. */
static struct split_rows split_keys(const uint16_t *keys, int n_keys, int head_dim, void *memory,
                                    const void *next)
{
    const struct split_rows to = {memory, (uint16_t *)memory + BLOCK * head_dim};
    for (int k = 0; k < n_keys; k++) {
        fetch(next, 2 * (size_t)(k * head_dim), 2 * (size_t)head_dim);
        for (int i = k * head_dim; i < (k + 1) * head_dim; i += 32) {
            split_halves(vf_load_f16(keys + i), vf_load_f16(keys + i + 16), to.high + i,
                         to.low + i);
        }
    }
    for (int i = n_keys * head_dim; i % (TILE_ROWS * head_dim) != 0; i += 32) {
        vi_store(to.high + i, vi_zero());
        vi_store(to.low + i, vi_zero());
    }
    return to;
}

/* Sums of 16 keys and 16 rows to s[row][key] for the first keys and rows. */
INLINE void store_scores(const float *sums, int n_rows, int n_keys, float *s)
{
    const __mmask16 mask = (__mmask16)((1u << (n_keys < 16 ? n_keys : 16)) - 1);
    vi rows[16];
    transpose_32((const uint8_t *)sums, 64, rows);
    for (int r = 0; r < 16 && r < n_rows; r++) {
        _mm512_mask_storeu_ps(s + r * BLOCK, mask, _mm512_castsi512_ps(rows[r]));
    }
}

/* One tile of rows, up to four of keys. */
static void scores_few_rows(const char *q, int n_rows, struct split_rows keys, int n_keys,
                            int head_dim, float *s)
{
    _Alignas(64) float sums[N_SUMS][TILE_ROWS * 16];
    const size_t stride = 2 * (size_t)head_dim;
    const int n_tiles = (n_keys + TILE_ROWS - 1) / TILE_ROWS;
    clear_sums();
    for (int i = 0; i < head_dim; i += 32) {
        tile_load(6, q, 64);
        tile_load(7, q + TILE_BYTES, 64);
        for (int j = 0; j < n_tiles; j++) {
            const int at = j * TILE_ROWS * head_dim + i;
            tile_load(4, keys.high + at, stride);
            tile_load(5, keys.low + at, stride);
#define MULTIPLY(j)                                                                                \
    tile_multiply_bfloats(j, 4, 6);                                                                \
    tile_multiply_bfloats(j, 5, 6);                                                                \
    tile_multiply_bfloats(j, 4, 7);                                                                \
    tile_multiply_bfloats(j, 5, 7)
            ON_SUMS(j, MULTIPLY)
#undef MULTIPLY
        }
        tile_load(6, q + 2 * TILE_BYTES, 64);
        for (int j = 0; j < n_tiles; j++) {
            tile_load(4, keys.high + j * TILE_ROWS * head_dim + i, stride);
#define MULTIPLY(j) tile_multiply_bfloats(j, 4, 6)
            ON_SUMS(j, MULTIPLY)
#undef MULTIPLY
        }
        q += 3 * TILE_BYTES;
    }
    store_sums(sums);
    for (int j = 0; j < n_tiles; j++) {
        store_scores(sums[j], n_rows, n_keys - j * TILE_ROWS, s + j * TILE_ROWS);
    }
}

/* One tile of keys, two to four of rows. */
static void scores_many_rows(const char *q, int n_rows, const uint16_t *high, const uint16_t *low,
                             int n_keys, int head_dim, float *s)
{
    _Alignas(64) float sums[N_SUMS][TILE_ROWS * 16];
    const size_t stride = 2 * (size_t)head_dim;
    const int n_tiles = (n_rows + TILE_ROWS - 1) / TILE_ROWS;
    clear_sums();
    for (int i = 0; i < head_dim; i += 32) {
        tile_load(4, high + i, stride);
        tile_load(5, low + i, stride);
        for (int j = 0; j < n_tiles; j++) {
            tile_load(6, q, 64);
            tile_load(7, q + TILE_BYTES, 64);
#define MULTIPLY(j)                                                                                \
    tile_multiply_bfloats(j, 4, 6);                                                                \
    tile_multiply_bfloats(j, 5, 6);                                                                \
    tile_multiply_bfloats(j, 4, 7);                                                                \
    tile_multiply_bfloats(j, 5, 7);                                                                \
    tile_load(6, q + 2 * TILE_BYTES, 64);                                                          \
    tile_multiply_bfloats(j, 4, 6)
            ON_SUMS(j, MULTIPLY)
#undef MULTIPLY
            q += 3 * TILE_BYTES;
        }
    }
    store_sums(sums);
    for (int j = 0; j < n_tiles; j++) {
        store_scores(sums[j], n_rows - j * TILE_ROWS, n_keys, s + j * TILE_ROWS * BLOCK);
    }
}

static void scores(const void *packed, int n_rows, const void *keys, int n_keys, int head_dim,
                   float *s, void *memory, const void *next)
{
    const struct split_rows split = split_keys(keys, n_keys, head_dim, memory, next);
    if (n_rows <= TILE_ROWS) {
        scores_few_rows(packed, n_rows, split, n_keys, head_dim, s);
        return;
    }
    for (int k = 0; k < n_keys; k += TILE_ROWS) {
        scores_many_rows(packed, n_rows, split.high + k * head_dim, split.low + k * head_dim,
                         n_keys - k, head_dim, s + k);
    }
}

/* ---- Values ---- */

/* Values as second operands: [pair of keys][head_dim], whole 32s of keys. Pairs are keys i and
 * i + 16 of each 32, as weights are paired. */
static struct split_rows split_values(const uint16_t *values, int n_keys, int head_dim,
                                      void *memory, const void *next)
{
    const struct split_rows to = {memory, (uint16_t *)memory + BLOCK * head_dim};
    for (int k = 0; k < (n_keys + 31) / 32 * 32; k += k % 32 == 15 ? 17 : 1) {
        const uint16_t *a = values + k * head_dim;
        const uint16_t *b = a + 16 * head_dim;
        const int pair = k / 32 * 16 + k % 32;
        fetch(next, 4 * (size_t)(pair * head_dim), 4 * (size_t)head_dim);
        for (int i = 0; i < head_dim; i += 16) {
            const vf first = k < n_keys ? vf_load_f16(a + i) : vf_zero();
            const vf second = k + 16 < n_keys ? vf_load_f16(b + i) : vf_zero();
            const int at = 2 * (pair * head_dim + i);
            split_halves(first, second, to.high + at, to.low + at);
        }
    }
    return to;
}

/* 32 weights of up to 16 rows as first operands, a tile for each part. */
INLINE void pack_weights(const float *p, int n_rows, int n_keys, char *tiles)
{
    const __mmask16 first = (__mmask16)((1u << (n_keys < 16 ? n_keys : 16)) - 1);
    const int left = n_keys < 16 ? 0 : n_keys - 16;
    const __mmask16 second = (__mmask16)((1u << (left < 16 ? left : 16)) - 1);
    for (int r = 0; r < TILE_ROWS; r++) {
        const bool real = r < n_rows;
        const vf a = _mm512_maskz_loadu_ps(real ? first : 0, p + r * BLOCK);
        const vf b = _mm512_maskz_loadu_ps(real ? second : 0, p + r * BLOCK + 16);
        const vf ra = rounded(a), rb = rounded(b);
        vi_store(tiles + 64 * r, pairs_of(ra, rb));
        vi_store(tiles + TILE_BYTES + 64 * r,
                 pairs_of(rounded(less_upper(a, ra)), rounded(less_upper(b, rb))));
    }
}

/* o = o * factor + sums, 16 columns. */
INLINE void add_values(const float *sums, int n_rows, const float *factor, int head_dim, float *o)
{
    for (int r = 0; r < n_rows && r < TILE_ROWS; r++) {
        float *row = o + r * head_dim;
        vf_store(row, vf_fma(vf_load(row), vf_set1(factor[r]), vf_load(sums + 16 * r)));
    }
}

#define MULTIPLY(j)                                                                                \
    tile_multiply_bfloats(j, 4, 6);                                                                \
    tile_multiply_bfloats(j, 4, 7);                                                                \
    tile_multiply_bfloats(j, 5, 6);                                                                \
    tile_multiply_bfloats(j, 5, 7)

/* One tile of rows, up to four of columns. */
static void values_few_rows(const char *p, int n_rows, const struct split_rows *values, int n_steps,
                            int n_tiles, const float *factor, int head_dim, float *o)
{
    _Alignas(64) float sums[N_SUMS][TILE_ROWS * 16];
    const size_t stride = 4 * (size_t)head_dim;
    clear_sums();
    for (int step = 0; step < n_steps; step++) {
        tile_load(4, p, 64);
        tile_load(5, p + TILE_BYTES, 64);
        p += 2 * TILE_BYTES;
        for (int j = 0; j < n_tiles; j++) {
            const int at = 2 * (step * 16 * head_dim + 16 * j);
            tile_load(6, values->high + at, stride);
            tile_load(7, values->low + at, stride);
            ON_SUMS(j, MULTIPLY)
        }
    }
    store_sums(sums);
    for (int j = 0; j < n_tiles; j++) {
        add_values(sums[j], n_rows, factor, head_dim, o + 16 * j);
    }
}

/* One tile of columns, two to four of rows. */
static void values_many_rows(const char *p, int n_rows, const struct split_rows *values,
                             int n_steps, const float *factor, int head_dim, float *o)
{
    _Alignas(64) float sums[N_SUMS][TILE_ROWS * 16];
    const size_t stride = 4 * (size_t)head_dim;
    const int n_tiles = (n_rows + TILE_ROWS - 1) / TILE_ROWS;
    clear_sums();
    for (int step = 0; step < n_steps; step++) {
        tile_load(6, values->high + 32 * step * head_dim, stride);
        tile_load(7, values->low + 32 * step * head_dim, stride);
        for (int j = 0; j < n_tiles; j++) {
            tile_load(4, p, 64);
            tile_load(5, p + TILE_BYTES, 64);
            p += 2 * TILE_BYTES;
            ON_SUMS(j, MULTIPLY)
        }
    }
    store_sums(sums);
    for (int j = 0; j < n_tiles; j++) {
        add_values(sums[j], n_rows - j * TILE_ROWS, factor + j * TILE_ROWS, head_dim,
                   o + j * TILE_ROWS * head_dim);
    }
}

#undef MULTIPLY

static void values(const float *p, int n_rows, const void *packed, int n_keys, int head_dim,
                   const float *factor, float *o, void *memory, const void *next)
{
    const struct split_rows split = split_values(packed, n_keys, head_dim, memory, next);
    const int n_steps = (n_keys + 31) / 32;
    char *weights = (char *)memory + sizeof(float) * BLOCK * MAX_HEAD_DIM;
    char *to = weights;
    for (int step = 0; step < n_steps; step++) {
        for (int r = 0; r < n_rows; r += TILE_ROWS) {
            pack_weights(p + r * BLOCK + 32 * step, n_rows - r, n_keys - 32 * step, to);
            to += 2 * TILE_BYTES;
        }
    }
    const int n_tiles = head_dim / 16;
    if (n_rows > TILE_ROWS) {
        for (int i = 0; i < n_tiles; i++) {
            const struct split_rows at = {split.high + 32 * i, split.low + 32 * i};
            values_many_rows(weights, n_rows, &at, n_steps, factor, head_dim, o + 16 * i);
        }
        return;
    }
    for (int i = 0; i < n_tiles; i += N_SUMS) {
        const struct split_rows at = {split.high + 32 * i, split.low + 32 * i};
        values_few_rows(weights, n_rows, &at, n_steps, n_tiles - i < N_SUMS ? n_tiles - i : N_SUMS,
                        factor, head_dim, o + 16 * i);
    }
}

const struct sl_cpu_attention_matrix_kernels sl_cpu_attention_matrix_amx = {
    .min_rows = 9, /* with fewer splitting takes as long as floats take for all */
    .open = open_tiles,
    .close = close_tiles,
    .pack_queries = pack_queries,
    .scores = scores,
    .values = values,
};
