/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside of the matrix products: packed activations, and the kernels that one level supplies.
 *
 * Two ways through an op. Up to SL_LINEAR_ROWS_TOKENS tokens: every weight row is read once and
 * multiplied with all tokens ("rows"), which is bound by memory. More tokens: blocks of rows are
 * unpacked into a small panel that stays in the cache and is reused for all tokens ("panels"),
 * which is bound by the multipliers.
 *
 * Quantized weights meet activations rounded to 8 bits, one scale per 32 columns. Floating-point
 * weights meet the float activations of the op.
 */
#ifndef SL_CPU_LINEAR_INTERNAL_H
#define SL_CPU_LINEAR_INTERNAL_H

#include "cpu/linear.h"
#include "op/op.h"

/* Most tokens that go the way of rows, and most of them in one call of a row kernel. */
#define SL_LINEAR_ROWS_TOKENS 8
#define SL_LINEAR_CALL_TOKENS 4
/* Rows of one call of a row kernel. */
#define SL_LINEAR_CALL_ROWS 64

/* How the activations for a type are packed, in both ways through an op. */
enum sl_linear_layout {
    SL_LINEAR_FLOAT, /* not packed */
    /* Groups of vector_bytes / 16 blocks of 32 columns: the first 16 bytes of each block; the last
     * 16 bytes of each; the block scales, 4 times each; scale times block sum, a quarter in each
     * of 4 lanes. 4 vectors a group; missing blocks of the last group are zero. */
    SL_LINEAR_HALVES,
    /* Super-blocks of 256 columns: the bytes in order; the scales of 16 columns; scale times sum
     * of 16 columns. 384 bytes. */
    SL_LINEAR_SUPER,
    SL_LINEAR_N_LAYOUTS,
};
#define SL_LINEAR_SUPER_BYTES 384

/* Packed activations of a few tokens, by layout. */
struct sl_linear_x {
    const void *data[SL_LINEAR_N_LAYOUTS]; /* token after token */
    void *out[SL_LINEAR_N_LAYOUTS];        /* the same memory, for packing */
    size_t stride[SL_LINEAR_N_LAYOUTS];    /* bytes from token to token */
    int64_t n_cols;
};

/* out[t * SL_LINEAR_CALL_ROWS + r] = w_r . x_t for n_rows <= SL_LINEAR_CALL_ROWS rows that lie one
 * after the other at w, and tokens first .. first + n_tokens - 1, n_tokens <=
 * SL_LINEAR_CALL_TOKENS. The result of a row and token depends on nothing else in the call. */
typedef void sl_linear_rows_fn(const void *w, size_t row_bytes, int n_rows,
                               const struct sl_linear_x *x, int first, int n_tokens, float *out);

/* Kernels of the way of rows. */
struct sl_linear_rows_kernels {
    int vector_bytes; /* of the layout SL_LINEAR_HALVES */
    void (*pack[SL_LINEAR_N_LAYOUTS])(const float *x, int64_t n_cols, void *dst);
    sl_linear_rows_fn *const *rows; /* by type; NULL where there is none */
};

struct sl_cpu_linear_kernels {
    const struct sl_linear_rows_kernels *rows; /* NULL: the scalar way for everything */
    /* y = act(gate) * up */
    void (*activate)(enum sl_activation activation, const float *gate, const float *up, float *y,
                     int64_t n);
};

/* One thread's part in one op. */
struct sl_linear_call {
    const struct sl_cpu_linear_kernels *kernels;
    const struct sl_op_linear *op;
    int n_tokens;
    char *scratch; /* of the team */
    char *own;     /* of this thread */
    struct sl_pool *pool;
    int thread, n_threads;
};

/* This thread's rows of part i: first .. end - 1, `first` a multiple of unit. The parts laid end to
 * end are cut into equal numbers of bytes. */
void sl_linear_share(const struct sl_linear_call *c, int i, int unit, int64_t *first, int64_t *end);

void sl_linear_run_rows(const struct sl_linear_call *c);
/* Rows first .. end - 1 of a part, without activation. */
void sl_linear_scalar_rows(const struct sl_op_linear *op, int part, int32_t n_tokens, int64_t first,
                           int64_t end);

void sl_linear_activate_scalar(enum sl_activation activation, const float *gate, const float *up,
                               float *y, int64_t n);
#if defined(__x86_64__)
extern const struct sl_linear_rows_kernels sl_linear_rows_avx2;
extern const struct sl_linear_rows_kernels sl_linear_rows_avx512;
extern const struct sl_linear_rows_kernels sl_linear_rows_avx512vnni;
void sl_linear_activate_avx2(enum sl_activation activation, const float *gate, const float *up,
                             float *y, int64_t n);
void sl_linear_activate_avx512(enum sl_activation activation, const float *gate, const float *up,
                               float *y, int64_t n);
#endif

static inline enum sl_linear_layout sl_linear_layout(enum sl_type type)
{
    switch (type) {
    case SL_TYPE_Q4_0:
    case SL_TYPE_Q4_1:
    case SL_TYPE_Q5_0:
    case SL_TYPE_Q5_1:
    case SL_TYPE_Q8_0:
    case SL_TYPE_IQ4_NL:
    case SL_TYPE_MXFP4:
        return SL_LINEAR_HALVES;
    case SL_TYPE_Q2_K:
    case SL_TYPE_Q3_K:
    case SL_TYPE_Q4_K:
    case SL_TYPE_Q5_K:
    case SL_TYPE_Q6_K:
    case SL_TYPE_IQ4_XS:
        return SL_LINEAR_SUPER;
    default:
        return SL_LINEAR_FLOAT;
    }
}

#endif
