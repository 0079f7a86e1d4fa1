/* SPDX-License-Identifier: Apache-2.0
 *
 * Running an op list: every thread of the team walks the whole list, with a barrier between ops, so
 * a list costs one wake-up of the team. Scratch layout:
 *
 *   | counters | own memory of thread 0 | 1 | ... | shared scratch of the op |
 *
 * Ops too small to share go to thread 0 alone, and a run of them needs no barriers inside: in
 * decode that is everything between two products but attention.
 */
#include <stddef.h>

#include "cpu/linear.h"
#include "cpu/team.h"

/* Below so many elements sharing out costs more than it gains. */
#define SMALL_ELEMENTS 16384

/* Two counters take turns: while one serves an op, the other is reset for the next. */
struct counters {
    _Alignas(64) atomic_int taken[2][32];
};

struct job {
    const struct sl_cpu_kernels *kernels;
    struct sl_pool *pool;
    const struct sl_op *ops;
    int n_ops;
    char *scratch;
};

size_t sl_cpu_scratch_bytes(size_t op_scratch_bytes, int n_threads)
{
    return sizeof(struct counters) + (size_t)n_threads * SL_CPU_THREAD_SCRATCH_BYTES +
           op_scratch_bytes;
}

/* Whether thread 0 should do the op alone. Depends on shapes only. */
static bool is_small(const struct sl_op *op)
{
    int64_t row_elements;
    switch (op->kind) {
    case SL_OP_NORM:
        if ((int64_t)op->n_tokens * op->norm.rows_per_token == 1) {
            return true;
        }
        row_elements = (int64_t)op->norm.rows_per_token * op->norm.n;
        break;
    case SL_OP_ROPE:
        if (op->n_tokens == 1) {
            return true;
        }
        row_elements = (int64_t)op->rope.n_heads * op->rope.head_dim;
        break;
    case SL_OP_KV_STORE:
        row_elements = 2 * (int64_t)op->kv_store.kv.n_kv_heads * op->kv_store.kv.head_dim;
        break;
    case SL_OP_DIVIDE:
        return true;
    case SL_OP_ADD:
        row_elements = op->add.n;
        break;
    case SL_OP_MERGE:
        row_elements = (int64_t)op->merge.n_heads * op->merge.head_dim;
        break;
    default:
        return false;
    }
    return op->n_tokens * row_elements <= SMALL_ELEMENTS;
}

static void run_op(const struct sl_cpu_thread *t, const struct sl_op *op)
{
    switch (op->kind) {
    case SL_OP_NORM:
        sl_cpu_norm(t, op);
        break;
    case SL_OP_LINEAR:
        sl_cpu_linear(t, op);
        break;
    case SL_OP_ROPE:
        sl_cpu_rope(t, op);
        break;
    case SL_OP_KV_STORE:
        sl_cpu_kv_store(t, op);
        break;
    case SL_OP_ATTENTION:
        sl_cpu_attention(t, op);
        break;
    case SL_OP_ROUTER:
        sl_cpu_router(t, op);
        break;
    case SL_OP_EXPERTS:
        sl_cpu_experts(t, op);
        break;
    case SL_OP_DIVIDE:
        sl_op_divide_run(&op->divide, op->n_tokens);
        break;
    case SL_OP_ADD:
        sl_cpu_add(t, op);
        break;
    case SL_OP_MERGE:
        sl_cpu_merge(t, op);
        break;
    case SL_OP_N_KINDS:
        break;
    }
}

/* Memory answers late: what the op reads first is asked for before the team is complete. */
static void fetch_first(const struct sl_cpu_thread *t, const struct sl_op *op)
{
    if (op->kind == SL_OP_LINEAR) {
        sl_cpu_linear_fetch(t, &op->linear, op->n_tokens);
    } else if (op->kind == SL_OP_ROUTER) {
        sl_cpu_router_fetch(t, op);
    }
}

static void run_list(void *arg, int thread, int n_threads)
{
    const struct job *job = arg;
    struct counters *counters = (struct counters *)(void *)job->scratch;
    char *own = job->scratch + sizeof(struct counters);
    struct sl_cpu_thread team = {
        .kernels = job->kernels,
        .pool = n_threads > 1 ? job->pool : NULL,
        .thread = thread,
        .n_threads = n_threads,
        .scratch = own + (size_t)n_threads * SL_CPU_THREAD_SCRATCH_BYTES,
        .own = own + (size_t)thread * SL_CPU_THREAD_SCRATCH_BYTES,
    };
    struct sl_cpu_thread alone = team;
    alone.pool = NULL;
    alone.n_threads = 1;
    bool after_small = false;
    for (int i = 0; i < job->n_ops; i++) {
        const struct sl_op *op = &job->ops[i];
        const bool small = is_small(op);
        /* The barrier stands before the op, unless thread 0 made the one before and makes this. */
        if (i > 0 && !(small && after_small)) {
            fetch_first(&team, op);
            sl_cpu_barrier(&team);
        }
        if (!small) {
            team.taken = counters->taken[i % 2];
            if (thread == 0) {
                /* Whoever still used it has passed the barrier above. */
                atomic_store_explicit(counters->taken[(i + 1) % 2], 0, memory_order_relaxed);
            }
            run_op(&team, op);
        } else if (thread == 0) {
            atomic_store_explicit(counters->taken[(i + 1) % 2], 0, memory_order_relaxed);
            run_op(&alone, op);
        }
        after_small = small;
    }
}

void sl_cpu_run(const struct sl_cpu_kernels *kernels, struct sl_pool *pool, const struct sl_op *ops,
                int n_ops, void *scratch)
{
    struct job job = {kernels, pool, ops, n_ops, scratch};
    struct counters *counters = scratch;
    atomic_init(&counters->taken[0][0], 0);
    atomic_init(&counters->taken[1][0], 0);
    if (pool != NULL) {
        sl_pool_run(pool, run_list, &job);
    } else {
        run_list(&job, 0, 1);
    }
}
