/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention with AMX tiles, for caches of F16: products of bfloats, made exact by splitting. A half
 * is the sum of two bfloats; queries are split into three (24 bits), softmax weights into two
 * (16 bits). A few keys, or columns of values, are split at a time, into tiles that stay in the
 * nearest cache for all rows that read them.
 *
 *   scores    tiles of 16 keys x 32 columns times 32 columns x 16 rows
 *   values    tiles of 16 rows x 32 keys times 32 keys x 16 columns
 *
 * Up to 8 rows are narrow: the first part of their queries and weights takes half of a tile and
 * the second part the other, so one product makes two, which are added when sums leave the tiles.
 *
 * Tiles are split one step before they are multiplied, and sums, which alternate between two tiles,
 * used one step after they were stored: what is loaded by a tile after it was stored by vectors, or
 * the other way round, waits until the store has left the processor.
 */
#include "cpu/x86/amx_tiles.h"

#include "cpu/kernels.h"
#include "cpu/x86/linear_v512.h"

#define NARROW_ROWS 8
#define TILE_BYTES 1024
#define BLOCK SL_KV_BLOCK
#define MAX_STEPS (256 / 32) /* of 32 columns */

/* Memory of a thread: tiles that split keys or values fill, and those of the weights. */
struct tiles_memory {
    char operands[2][2 * MAX_STEPS * TILE_BYTES]; /* the next while these are multiplied */
    char weights[2 * 2 * SL_CPU_MATRIX_ROWS / TILE_ROWS * TILE_BYTES];
};
_Static_assert(sizeof(struct tiles_memory) <= SL_CPU_MATRIX_BYTES, "memory of a thread");

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

/* Tiles 0 and 1 hold sums, by parity. */
INLINE void clear_sums(int parity)
{
    if (parity == 0) {
        tile_zero(0);
    } else {
        tile_zero(1);
    }
}

INLINE void store_sums(int parity, float *sums)
{
    if (parity == 0) {
        tile_store(0, sums, 64);
    } else {
        tile_store(1, sums, 64);
    }
}

/* sums += tile a x tile b, 4 or 5 and 6 or 7. */
#define MULTIPLY(parity, a, b)                                                                     \
    do {                                                                                           \
        if ((parity) == 0) {                                                                       \
            tile_multiply_bfloats(0, a, b);                                                        \
        } else {                                                                                   \
            tile_multiply_bfloats(1, a, b);                                                        \
        }                                                                                          \
    } while (0)

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
INLINE void pack_columns(const float *q, int n_rows, bool narrow, int head_dim, void *tiles)
{
    _Alignas(64) uint32_t parts[3][TILE_ROWS][16] = {{{0}}};
    for (int r = 0; r < n_rows; r++) {
        vf a = vf_load(q + r * head_dim), b = vf_load(q + r * head_dim + 16);
        for (int part = 0; part < 3; part++) {
            const vf ra = rounded(a), rb = rounded(b);
            const int to = narrow ? part / 2 : part;
            vi_store(parts[to][narrow && part == 1 ? NARROW_ROWS + r : r], pairs_of(ra, rb));
            a = less_upper(a, ra);
            b = less_upper(b, rb);
        }
    }
    for (int part = 0; part < (narrow ? 2 : 3); part++) {
        vi columns[16];
        transpose_32((const uint8_t *)parts[part], 64, columns);
        for (int i = 0; i < 16; i++) {
            vi_store((char *)tiles + part * TILE_BYTES + 64 * i, columns[i]);
        }
    }
}

/* Packed queries: for each 32 columns, for each 16 rows, 3 tiles; narrow ones 2. */
static void pack_queries(const float *q, int n_rows, int head_dim, void *packed)
{
    const bool narrow = n_rows <= NARROW_ROWS;
    char *to = packed;
    for (int i = 0; i < head_dim; i += 32) {
        for (int r = 0; r < n_rows; r += TILE_ROWS) {
            const int n = n_rows - r < TILE_ROWS ? n_rows - r : TILE_ROWS;
            pack_columns(q + r * head_dim + i, n, narrow, head_dim, to);
            to += (narrow ? 2 : 3) * TILE_BYTES;
        }
    }
}

/* 16 keys as first operands, high and low for each 32 columns; keys past the last are zero. */
static void split_keys(const uint16_t *keys, int n_keys, int head_dim, char *tiles,
                       const uint16_t *next)
{
    for (int k = 0; k < TILE_ROWS; k++) {
        for (int i = 0; i < head_dim; i += 32) {
            char *to = tiles + 2 * (i / 32) * TILE_BYTES + 64 * k;
            if (k < n_keys) {
                const uint16_t *key = keys + k * head_dim + i;
                fetch(next, 2 * (size_t)(k * head_dim + i), 64);
                split_halves(vf_load_f16(key), vf_load_f16(key + 16), to, to + TILE_BYTES);
            } else {
                vi_store(to, vi_zero());
                vi_store(to + TILE_BYTES, vi_zero());
            }
        }
    }
}

/* 16 keys times a tile of rows. */
INLINE void start_scores(const int parity, const char *keys, const char *q, size_t q_stride,
                         const bool narrow, int head_dim)
{
    clear_sums(parity);
    for (int i = 0; i < head_dim; i += 32) {
        tile_load(4, keys, 64);
        tile_load(5, keys + TILE_BYTES, 64);
        tile_load(6, q, 64);
        tile_load(7, q + TILE_BYTES, 64);
        MULTIPLY(parity, 4, 6);
        MULTIPLY(parity, 5, 6);
        MULTIPLY(parity, 4, 7);
        if (!narrow) {
            MULTIPLY(parity, 5, 7);
            tile_load(6, q + 2 * TILE_BYTES, 64);
            MULTIPLY(parity, 4, 6);
        }
        keys += 2 * TILE_BYTES;
        q += q_stride;
    }
}

/* Sums of 16 keys and 16 rows to s[row][key] for the first keys and rows. */
INLINE void store_scores(const float *sums, int n_rows, const bool narrow, int n_keys, float *s)
{
    const __mmask16 mask = (__mmask16)((1u << (n_keys < 16 ? n_keys : 16)) - 1);
    vi rows[16];
    transpose_32((const uint8_t *)sums, 64, rows);
    for (int r = 0; r < (narrow ? NARROW_ROWS : 16); r++) {
        vf sum = _mm512_castsi512_ps(rows[r]);
        if (narrow) {
            sum = vf_add(sum, _mm512_castsi512_ps(rows[r + NARROW_ROWS]));
        }
        if (r < n_rows) {
            _mm512_mask_storeu_ps(s + r * BLOCK, mask, sum);
        }
    }
}

INLINE void scores_body(const char *q, int n_rows, const bool narrow, const uint16_t *keys,
                        int n_keys, int head_dim, float *s, struct tiles_memory *m,
                        const uint16_t *next)
{
    _Alignas(64) float sums[2][TILE_ROWS * 16];
    const int n_tiles = (n_rows + TILE_ROWS - 1) / TILE_ROWS;
    const size_t q_bytes = (narrow ? 2 : 3) * TILE_BYTES, q_stride = (size_t)n_tiles * q_bytes;
    const int n_steps = (n_keys + 15) / 16 * n_tiles; /* keys by rows */
    split_keys(keys, n_keys, head_dim, m->operands[0], next);
    for (int i = 0; i <= n_steps; i++) {
        const int group = i / n_tiles, tile = i % n_tiles;
        const int k = 16 * (group + 1);
        if (tile == 0 && k < n_keys) {
            split_keys(keys + k * head_dim, n_keys - k, head_dim, m->operands[k / 16 % 2],
                       next != NULL ? next + k * head_dim : NULL);
        }
        if (i < n_steps && i % 2 == 0) {
            start_scores(0, m->operands[group % 2], q + (size_t)tile * q_bytes, q_stride, narrow,
                         head_dim);
            store_sums(0, sums[0]);
        } else if (i < n_steps) {
            start_scores(1, m->operands[group % 2], q + (size_t)tile * q_bytes, q_stride, narrow,
                         head_dim);
            store_sums(1, sums[1]);
        }
        if (i > 0) { /* what the step before left */
            const int k_before = (i - 1) / n_tiles * 16, row = (i - 1) % n_tiles * TILE_ROWS;
            store_scores(sums[(i - 1) % 2], n_rows - row, narrow, n_keys - k_before,
                         s + row * BLOCK + k_before);
        }
    }
}

static void scores(const void *packed, int n_rows, const void *keys, int n_keys, int head_dim,
                   float *s, void *memory, const void *next)
{
    if (n_rows <= NARROW_ROWS) {
        scores_body(packed, n_rows, true, keys, n_keys, head_dim, s, memory, next);
    } else {
        scores_body(packed, n_rows, false, keys, n_keys, head_dim, s, memory, next);
    }
}

/* ---- Values ---- */

/* 16 columns of all values as second operands, high and low for each 32 keys. Pairs are keys i and
 * i + 16, as weights are paired. */
static void split_values(const uint16_t *values, int n_keys, int head_dim, char *tiles,
                         const uint16_t *next)
{
    for (int step = 0; 32 * step < n_keys; step++, tiles += 2 * TILE_BYTES) {
        for (int i = 0; i < 16; i++) {
            const int a = 32 * step + i, b = a + 16;
            const vf first = a < n_keys ? vf_load_f16(values + a * head_dim) : vf_zero();
            const vf second = b < n_keys ? vf_load_f16(values + b * head_dim) : vf_zero();
            fetch(next, 2 * (size_t)(a * head_dim), 1);
            fetch(next, 2 * (size_t)(b * head_dim), 1);
            split_halves(first, second, tiles + 64 * i, tiles + TILE_BYTES + 64 * i);
        }
    }
}

/* 32 weights of up to 16 rows as first operands: the two parts in a tile each, or, narrow, in one.
 */
INLINE void pack_weights(const float *p, int n_rows, const bool narrow, int n_keys, char *tiles)
{
    const __mmask16 first = (__mmask16)((1u << (n_keys < 16 ? n_keys : 16)) - 1);
    const int left = n_keys < 16 ? 0 : n_keys - 16;
    const __mmask16 second = (__mmask16)((1u << (left < 16 ? left : 16)) - 1);
    char *rest = tiles + (narrow ? NARROW_ROWS * 64 : TILE_BYTES);
    for (int r = 0; r < (narrow ? NARROW_ROWS : TILE_ROWS); r++) {
        const bool real = r < n_rows;
        const vf a = _mm512_maskz_loadu_ps(real ? first : 0, p + r * BLOCK);
        const vf b = _mm512_maskz_loadu_ps(real ? second : 0, p + r * BLOCK + 16);
        const vf ra = rounded(a), rb = rounded(b);
        vi_store(tiles + 64 * r, pairs_of(ra, rb));
        vi_store(rest + 64 * r, pairs_of(rounded(less_upper(a, ra)), rounded(less_upper(b, rb))));
    }
}

/* o = o * factor + sums, 16 columns. */
INLINE void add_values(const float *sums, int n_rows, const bool narrow, const float *factor,
                       int head_dim, float *o)
{
    for (int r = 0; r < n_rows && r < TILE_ROWS; r++) {
        vf sum = vf_load(sums + 16 * r);
        if (narrow) {
            sum = vf_add(sum, vf_load(sums + 16 * (r + NARROW_ROWS)));
        }
        vf_store(o + r * head_dim, vf_fma(vf_load(o + r * head_dim), vf_set1(factor[r]), sum));
    }
}

/* A tile of rows times 16 columns of values, over all keys. */
INLINE void start_values(const int parity, const char *weights, size_t weights_stride,
                         const char *values, const bool narrow, int n_keys)
{
    clear_sums(parity);
    for (int k = 0; k < n_keys; k += 32) {
        tile_load(4, weights, 64);
        tile_load(6, values, 64);
        tile_load(7, values + TILE_BYTES, 64);
        MULTIPLY(parity, 4, 6);
        MULTIPLY(parity, 4, 7);
        if (!narrow) {
            tile_load(5, weights + TILE_BYTES, 64);
            MULTIPLY(parity, 5, 6);
            MULTIPLY(parity, 5, 7);
        }
        weights += weights_stride;
        values += 2 * TILE_BYTES;
    }
}

INLINE void values_body(const float *p, int n_rows, const bool narrow, const uint16_t *values,
                        int n_keys, int head_dim, const float *factor, float *o,
                        struct tiles_memory *m, const uint16_t *next)
{
    _Alignas(64) float sums[2][TILE_ROWS * 16];
    const int n_tiles = (n_rows + TILE_ROWS - 1) / TILE_ROWS;
    const size_t bytes = (narrow ? 1 : 2) * TILE_BYTES;
    for (int k = 0; k < n_keys; k += 32) {
        for (int i = 0; i < n_tiles; i++) {
            pack_weights(p + i * TILE_ROWS * BLOCK + k, n_rows - i * TILE_ROWS, narrow, n_keys - k,
                         m->weights + (size_t)(k / 32 * n_tiles + i) * bytes);
        }
    }
    const int n_steps = head_dim / 16 * n_tiles; /* columns by rows */
    split_values(values, n_keys, head_dim, m->operands[0], next);
    for (int i = 0; i <= n_steps; i++) {
        const int group = i / n_tiles, tile = i % n_tiles;
        const int col = 16 * (group + 1);
        const char *weights = m->weights + (size_t)tile * bytes;
        if (tile == 0 && col < head_dim) {
            split_values(values + col, n_keys, head_dim, m->operands[col / 16 % 2],
                         next != NULL && col % 32 == 0 ? next + col : NULL);
        }
        if (i < n_steps && i % 2 == 0) {
            start_values(0, weights, (size_t)n_tiles * bytes, m->operands[group % 2], narrow,
                         n_keys);
            store_sums(0, sums[0]);
        } else if (i < n_steps) {
            start_values(1, weights, (size_t)n_tiles * bytes, m->operands[group % 2], narrow,
                         n_keys);
            store_sums(1, sums[1]);
        }
        if (i > 0) { /* what the step before left */
            const int col_before = (i - 1) / n_tiles * 16, row = (i - 1) % n_tiles * TILE_ROWS;
            add_values(sums[(i - 1) % 2], n_rows - row, narrow, factor + row, head_dim,
                       o + row * head_dim + col_before);
        }
    }
}

static void values(const float *p, int n_rows, const void *packed, int n_keys, int head_dim,
                   const float *factor, float *o, void *memory, const void *next)
{
    if (n_rows <= NARROW_ROWS) {
        values_body(p, n_rows, true, packed, n_keys, head_dim, factor, o, memory, next);
    } else {
        values_body(p, n_rows, false, packed, n_keys, head_dim, factor, o, memory, next);
    }
}

const struct sl_cpu_attention_matrix_kernels sl_cpu_attention_matrix_amx = {
    .min_rows = NARROW_ROWS + 1,
    .open = open_tiles,
    .close = close_tiles,
    .pack_queries = pack_queries,
    .scores = scores,
    .values = values,
};
