/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrix products on the CPU. Every thread of the team calls sl_cpu_linear for the same op; the
 * threads share the rows among themselves.
 */
#ifndef SL_CPU_LINEAR_H
#define SL_CPU_LINEAR_H

#include "cpu/cpu.h"
#include "cpu/kernels.h"

/* The product kernels and tile sizes of one level. */
struct sl_cpu_linear_kernels;
const struct sl_cpu_linear_kernels *sl_cpu_linear_kernels(enum sl_cpu_level level);

/* Thread `thread` of `n_threads` does its share of a valid SL_OP_LINEAR. `scratch` is shared by
 * the team (sl_op_scratch_bytes), `thread_scratch` is this thread's own
 * (SL_CPU_THREAD_SCRATCH_BYTES); both are 64-byte aligned. `pool_or_null` is for barriers between
 * phases (NULL when n_threads is 1). On return this thread's share is done; the caller makes the
 * barrier that ends the op. */
void sl_cpu_linear(const struct sl_cpu_kernels *k, const struct sl_op *op, void *scratch,
                   void *thread_scratch, struct sl_pool *pool_or_null, int thread, int n_threads);

/* The same, but activations stay floats where the weights are F32, F16 or BF16: for choices that
 * must not depend on rounding (routers). */
void sl_cpu_linear_exact(const struct sl_cpu_kernels *k, const struct sl_op *op, void *scratch,
                         void *thread_scratch, struct sl_pool *pool_or_null, int thread,
                         int n_threads);

#endif
