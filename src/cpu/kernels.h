/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernel table of one instruction-set level, and what a kernel may rely on.
 *
 * A kernel is a function on rows or tiles; the loops around it (src/cpu/attention.c, norm.c, ...)
 * are the same for every level and share the work among threads. Work is cut by shapes alone,
 * never by the number of threads, so results do not depend on it.
 *
 * Kernels are written once over the vector type of cpu/vec.h (rows_tmpl.h, attention_tmpl.h) and
 * compiled once per level; the file name of the instance chooses the compiler flags.
 */
#ifndef SL_CPU_KERNELS_H
#define SL_CPU_KERNELS_H

#include "cpu/cpu.h"

/* Private memory of each thread while an op runs. */
#define SL_CPU_THREAD_SCRATCH_BYTES ((size_t)384 << 10)

/* Rows: any length, no alignment. */
struct sl_cpu_row_kernels {
    /* y = x * rsqrt(mean(x^2) + eps) * weight (NULL: 1); y += with `accumulate`. */
    void (*norm)(const float *x, const float *weight, float *y, int64_t n, float eps,
                 bool accumulate);
    /* Rotate n_pairs pairs: (i, i + n_pairs) or, interleaved, (2i, 2i + 1). */
    void (*rope_neox)(float *x, const float *cosines, const float *sines, int n_pairs);
    void (*rope_pairs)(float *x, const float *cosines, const float *sines, int n_pairs);
    /* Pack n floats (a multiple of 32) as F16, Q8_0 or Q4_0; the bytes are the reference's. */
    void (*pack)(enum sl_type type, const float *x, void *dst, int64_t n);
};

/* Attention of rows (a token's query head each) over one KV block. Two ways: the direct kernels
 * read packed keys and values where they lie, for few rows (decode); the tile kernels work on a
 * block unpacked to float, for many rows (prefill).
 *
 *   direct   q [n_rows, head_dim]   s [n_rows, SL_KV_BLOCK]   o [n_rows, head_dim]
 *   tile     q [head_dim, n_rows]   s [n_keys, n_rows]        o [n_rows, head_dim]
 *
 * In tiles rows are the vector lanes of q and s, so that no kernel needs a sum across lanes; n_rows
 * is a multiple of row_tile there. head_dim is a multiple of 32 up to 256. All memory but packed
 * rows is 64-byte aligned. */
struct sl_cpu_attention_kernels {
    int row_tile;
    int key_tile;      /* scores_tile computes whole multiples of this many keys */
    int tile_min_rows; /* from so many rows on tiles are faster */

    /* n packed rows to float [n, head_dim]. */
    void (*unpack)(enum sl_type type, const void *src, float *dst, int n, int head_dim);

    /* s[r][k] = q_r . key_k. `next` (or NULL): packed rows that will be read next, to be fetched.
     */
    void (*scores_direct)(enum sl_type type, const float *q, int n_rows, const void *keys,
                          int n_keys, int head_dim, float *s, const void *next);
    /* Online softmax of one row: scores soft-capped (0: not), keys outside first..end-1 weigh 0,
     * *max and *sum are updated, s becomes weights. Returns the factor for what was accumulated
     * before. */
    float (*softmax_direct)(float *s, int first, int end, float softcap, float *max, float *sum);
    /* o_r += sum of p[r][k] value_k */
    void (*values_direct)(enum sl_type type, const float *p, int n_rows, const void *values,
                          int n_keys, int head_dim, float *o, const void *next);

    void (*scores_tile)(const float *q, int n_rows, const float *keys, int n_keys, int head_dim,
                        float *s);
    /* The same softmax for a tile; first, end, max, sum and factor have n_rows elements. */
    void (*softmax_tile)(float *s, int n_rows, int n_keys, const float *first, const float *end,
                         float softcap, float *max, float *sum, float *factor);
    void (*values_tile)(const float *p, int n_rows, const float *values, int n_keys, int head_dim,
                        float *o);

    /* x *= factor; y += x * factor. n is a multiple of 32. */
    void (*scale)(float *x, float factor, int n);
    void (*add_scaled)(float *y, const float *x, float factor, int n);
};

/* Attention where the processor multiplies tiles, over caches of F16: used as the direct kernels
 * are, from min_rows rows on and up to SL_CPU_MATRIX_ROWS. A thread calls `open` before and `close`
 * after. `memory` holds SL_CPU_MATRIX_BYTES, `packed` SL_CPU_MATRIX_Q_BYTES, both 64-byte
 * aligned. */
#define SL_CPU_MATRIX_ROWS 64
#define SL_CPU_MATRIX_BYTES (SL_KV_BLOCK * 256 * 4 + SL_CPU_MATRIX_ROWS * SL_KV_BLOCK * 4)
#define SL_CPU_MATRIX_Q_BYTES (SL_CPU_MATRIX_ROWS * 256 * 6)
struct sl_cpu_attention_matrix_kernels {
    int min_rows;
    void (*open)(void);
    void (*close)(void);
    void (*pack_queries)(const float *q, int n_rows, int head_dim, void *packed);
    /* s[r][k] = q_r . key_k */
    void (*scores)(const void *packed, int n_rows, const void *keys, int n_keys, int head_dim,
                   float *s, void *memory, const void *next);
    /* o_r = factor_r * o_r + sum of p[r][k] value_k */
    void (*values)(const float *p, int n_rows, const void *values, int n_keys, int head_dim,
                   const float *factor, float *o, void *memory, const void *next);
};

/* The kernels of matrix products are found by the level: see cpu/linear.h. */
struct sl_cpu_kernels {
    enum sl_cpu_level level;
    const struct sl_cpu_row_kernels *rows;
    const struct sl_cpu_attention_kernels *attention;
    const struct sl_cpu_attention_matrix_kernels *matrix; /* NULL: none */
};

/* Instances, one a level; a level without its own uses the next lower one's. */
extern const struct sl_cpu_row_kernels sl_cpu_rows_scalar;
extern const struct sl_cpu_attention_kernels sl_cpu_attention_scalar;
#if defined(__x86_64__)
extern const struct sl_cpu_row_kernels sl_cpu_rows_avx2;
extern const struct sl_cpu_row_kernels sl_cpu_rows_avx512;
extern const struct sl_cpu_attention_kernels sl_cpu_attention_avx2;
extern const struct sl_cpu_attention_kernels sl_cpu_attention_avx512;
extern const struct sl_cpu_attention_matrix_kernels sl_cpu_attention_matrix_amx;
#elif defined(__aarch64__)
extern const struct sl_cpu_row_kernels sl_cpu_rows_neon;
extern const struct sl_cpu_attention_kernels sl_cpu_attention_neon;
#endif

#endif
