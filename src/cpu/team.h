/* SPDX-License-Identifier: Apache-2.0
 *
 * What one thread of the team that runs an op list knows. Inside the CPU backend only.
 */
#ifndef SL_CPU_TEAM_H
#define SL_CPU_TEAM_H

#include <stdatomic.h>

#include "cpu/cpu.h"
#include "cpu/kernels.h"

struct sl_cpu_thread {
    const struct sl_cpu_kernels *kernels;
    struct sl_pool *pool; /* NULL: this thread is alone */
    int thread, n_threads;
    void *scratch;     /* shared by the team, sl_op_scratch_bytes */
    void *own;         /* SL_CPU_THREAD_SCRATCH_BYTES of this thread */
    atomic_int *taken; /* items of the op given out so far; shared */
};

/* The next unclaimed item of the op, whoever asks. Threads that run late take fewer. */
static inline int sl_cpu_take(const struct sl_cpu_thread *t)
{
    return atomic_fetch_add_explicit(t->taken, 1, memory_order_relaxed);
}

static inline void sl_cpu_barrier(const struct sl_cpu_thread *t)
{
    if (t->pool != NULL) {
        sl_pool_barrier(t->pool);
    }
}

/* Each does this thread's share of the op; the caller makes the barrier after it. */
void sl_cpu_norm(const struct sl_cpu_thread *t, const struct sl_op *op);
void sl_cpu_rope(const struct sl_cpu_thread *t, const struct sl_op *op);
void sl_cpu_kv_store(const struct sl_cpu_thread *t, const struct sl_op *op);
void sl_cpu_attention(const struct sl_cpu_thread *t, const struct sl_op *op);
void sl_cpu_router(const struct sl_cpu_thread *t, const struct sl_op *op);
void sl_cpu_experts(const struct sl_cpu_thread *t, const struct sl_op *op);
void sl_cpu_add(const struct sl_cpu_thread *t, const struct sl_op *op);
void sl_cpu_merge(const struct sl_cpu_thread *t, const struct sl_op *op);

/* Before the barrier that the op waits for: fetch the first weights of this thread's share. */
void sl_cpu_router_fetch(const struct sl_cpu_thread *t, const struct sl_op *op);

#endif
