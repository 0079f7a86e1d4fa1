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

struct sl_cpu_thread;

/* This thread's share of a valid SL_OP_LINEAR, with barriers between phases. On return its share is
 * done; the caller makes the barrier that ends the op. The op takes numbers of t->taken from 0. */
void sl_cpu_linear(const struct sl_cpu_thread *t, const struct sl_op *op);

/* The same, but activations stay floats where the weights are F32, F16 or BF16: for choices that
 * must not depend on rounding (routers). `scratch` takes the place of the thread's. */
void sl_cpu_linear_exact(const struct sl_cpu_thread *t, const struct sl_op *op, void *scratch);

/* Fetch the first weights that this thread will read when it comes to the product. */
void sl_cpu_linear_fetch(const struct sl_cpu_thread *t, const struct sl_op_linear *op,
                         int n_tokens);

#endif
