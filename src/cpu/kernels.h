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

/* Attention over one KV block. Row counts are multiples of row_tile where a tile kernel is called,
 * head_dim is a multiple of 32 up to 256, a block has SL_KV_BLOCK keys, all memory but packed
 * keys and values is 64-byte aligned. */
struct sl_cpu_attention_kernels {
    int row_tile;
    /* Fewer rows than this go through the direct kernels, which read packed keys and values
     * without unpacking the block first. */
    int tile_min_rows;
    /* Packed rows to float: as rows [n, head_dim], or as columns [head_dim, SL_KV_BLOCK]. */
    void (*unpack)(enum sl_type type, const void *src, float *dst, int n, int head_dim);
    void (*unpack_columns)(enum sl_type type, const void *src, float *dst, int n, int head_dim);
    /* s[r][k] = q_r . k_k for n_keys packed keys; s has SL_KV_BLOCK columns. */
    void (*scores_direct)(enum sl_type type, const float *q, int n_rows, const void *keys,
                          int n_keys, int head_dim, float *s);
    /* o_r += sum over keys of p[r][k] v_k. */
    void (*values_direct)(enum sl_type type, const float *p, int n_rows, const void *values,
                          int n_keys, int head_dim, float *o);
    /* The same over unpacked blocks, for whole tiles of rows. Always SL_KV_BLOCK keys. */
    void (*scores_tile)(const float *q, int n_rows, const float *columns, int head_dim, float *s);
    void (*values_tile)(const float *p, int n_rows, const float *rows, int n_keys, int head_dim,
                        float *o);
    /* Online softmax of one row of scores: soft-cap (0: none), keys outside first..end-1 get
     * weight 0, running maximum and sum are updated, s becomes weights. Returns the factor by
     * which what was accumulated so far must be multiplied. */
    float (*softmax)(float *s, int first, int end, float softcap, float *max, float *sum);
    /* x *= factor; y += x * factor. n is a multiple of 32. */
    void (*scale)(float *x, float factor, int n);
    void (*add_scaled)(float *y, const float *x, float factor, int n);
};

struct sl_cpu_linear_kernels; /* cpu/linear.h */

struct sl_cpu_kernels {
    enum sl_cpu_level level;
    const struct sl_cpu_row_kernels *rows;
    const struct sl_cpu_attention_kernels *attention;
    const struct sl_cpu_linear_kernels *linear;
};

/* Instances, one a level; a level without its own uses the next lower one's. */
extern const struct sl_cpu_row_kernels sl_cpu_rows_scalar;
extern const struct sl_cpu_attention_kernels sl_cpu_attention_scalar;
#if defined(__x86_64__)
extern const struct sl_cpu_row_kernels sl_cpu_rows_avx2;
extern const struct sl_cpu_row_kernels sl_cpu_rows_avx512;
extern const struct sl_cpu_attention_kernels sl_cpu_attention_avx2;
extern const struct sl_cpu_attention_kernels sl_cpu_attention_avx512;
#elif defined(__aarch64__)
extern const struct sl_cpu_row_kernels sl_cpu_rows_neon;
extern const struct sl_cpu_attention_kernels sl_cpu_attention_neon;
#endif

#endif
