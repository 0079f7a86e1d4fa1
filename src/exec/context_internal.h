/* SPDX-License-Identifier: Apache-2.0
 *
 * The context's own data, shared by context.c (life cycle) and pass.c (execution).
 */
#ifndef SL_EXEC_CONTEXT_INTERNAL_H
#define SL_EXEC_CONTEXT_INTERNAL_H

#include "exec/context.h"

/* Host memory that the device copies from and to: page-locked when the device grants it. */
struct sl_host_buffer {
    void *data;
    size_t bytes;
    bool locked;
};

struct sl_context {
    const struct sl_model *model;
    struct sl_device *device;
    struct sl_pool *pool;
    const struct sl_cpu_kernels *kernels;
    bool (*cancelled)(void *user);
    void *cancelled_user;
    struct sl_plan *plan;
    int32_t n_past;

    /* Host side of a pass of up to n_ubatch tokens. */
    struct sl_host_buffer hidden; /* [n_ubatch, n_embd] float */
    struct sl_host_buffer io;     /* [n_ubatch] int32 positions */
    struct sl_host_buffer logits; /* [max_outputs, n_vocab] float */
    void *workspace;
    void *scratch;
    struct sl_host_buffer kv; /* layers n_kv_layers .. n_layers - 1, kv_layer_bytes each */

    /* Device side; all NULL in a CPU-only context. */
    uint8_t *arena;
    struct sl_stream *compute, *copy, *download;
    struct sl_event **ready;      /* by shard: its copy into VRAM is done */
    struct sl_event **done;       /* by shard: its GPU step is done */
    struct sl_event **downloaded; /* by shard: its new KV is back on the host */
    struct sl_event *hidden_event;
    int32_t n_valid;     /* prefix of the resident order whose bytes are in VRAM now */
    bool *pending;       /* by shard: resident weights still on their way, see `ready` */
    uint8_t *registered; /* by file: its mapping is page-locked */
    struct sl_context_stats stats;
};

/* One pass of n tokens (at most n_ubatch) from n_past on; logits of the last n_outputs. */
enum sluice_status sl_pass_run(struct sl_context *ctx, const int32_t *tokens, int32_t n,
                               int32_t n_outputs, float *logits, struct sluice_error *err);

#endif
