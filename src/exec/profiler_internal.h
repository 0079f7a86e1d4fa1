/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of the profiler share: profiler.c sets up and decides the order, profiler_link.c
 * measures memories and copies, profiler_ops.c operators.
 */
#ifndef SL_EXEC_PROFILER_INTERNAL_H
#define SL_EXEC_PROFILER_INTERNAL_H

#include "exec/profiler.h"
#include "exec/timer.h"

/* Shapes that are measured. */
#define SL_PROFILER_COLS 4096
#define SL_PROFILER_SIM_COLS 1024
#define SL_PROFILER_HEADS 32
#define SL_PROFILER_KV_HEADS 8
#define SL_PROFILER_HEAD_DIM 128

/* How large the measurements are. */
struct sl_profiler_scale {
    size_t buffer_bytes;  /* host: beyond the last-level cache */
    size_t weights_bytes; /* device */
    int32_t n_cols;
    int32_t rows_decode, rows_prefill;
    int32_t max_tokens; /* larger tiers are extrapolated */
    int32_t kv_tokens;
};

struct sl_profiler {
    const struct sl_profiler_options *o;
    const struct sl_cpu_kernels *kernels;
    struct sl_profile *p;
    struct sl_profiler_scale host, dev;
    int n_threads;
    /* Host. */
    uint8_t *buffer;
    size_t cursor; /* next cold byte */
    float *x, *y;
    int32_t *pos;
    void *scratch;
    bool registered;
    /* Device. */
    const struct sl_device_vtable *vt;
    struct sl_timer timer; /* its stream is the compute stream */
    struct sl_stream *copy;
    uint8_t *mem;
    uint8_t *d_weights, *d_scratch, *d_sink;
    float *d_x, *d_y;
    int32_t *d_pos;
    size_t d_cursor;
    int n_done, n_total;
    struct sluice_error *err;
};

/* A part is done: tells who asked; CANCELLED when they want no more. */
enum sluice_status sl_profiler_tick(struct sl_profiler *b, const char *what);
void sl_profiler_on_pool(struct sl_profiler *b, sl_pool_fn *fn, void *arg);
/* A cold stretch of the host buffer. */
uint8_t *sl_profiler_cold(struct sl_profiler *b, size_t bytes);

/* Operators without operands, what one reads that is cold, and its operands in one memory. */
struct sl_op sl_profiler_linear_op(enum sl_type type, int32_t rows, int32_t cols, int32_t n_tokens);
struct sl_op sl_profiler_attention_op(int32_t n_tokens, int32_t n_kv, enum sl_type type);
struct sl_op sl_profiler_norm_op(int32_t n_tokens, int32_t n);
size_t sl_profiler_op_bytes(const struct sl_op *op);
void sl_profiler_bind_op(struct sl_op *op, uint8_t *cold_bytes, float *x, float *y, int32_t *pos);

/* Queue copies that keep the link busy for about `ns`. */
enum sluice_status sl_profiler_start_copies(struct sl_profiler *b, double ns);

/* In this order; all but the CPU's need a device. */
enum sluice_status sl_profiler_measure_link(struct sl_profiler *b);
enum sluice_status sl_profiler_measure_memory(struct sl_profiler *b);
enum sluice_status sl_profiler_measure_cpu_linear(struct sl_profiler *b);
enum sluice_status sl_profiler_measure_cpu_rest(struct sl_profiler *b);
enum sluice_status sl_profiler_measure_gpu(struct sl_profiler *b);

#endif
