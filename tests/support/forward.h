/* SPDX-License-Identifier: Apache-2.0
 *
 * A forward pass in the simplest way: every shard in order, every operator by the scalar reference,
 * one sequence, cache blocks in their natural order. What the executor does must equal this.
 */
#ifndef SL_TESTS_SUPPORT_FORWARD_H
#define SL_TESTS_SUPPORT_FORWARD_H

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "model/model.h"

struct forward {
    const struct sl_model *model;
    struct sl_kv_types kv_types;
    size_t kv_layer_bytes;
    char *kv;
    int32_t n_ctx; /* positions that the cache holds */
    /* Called after each operator; or NULL. */
    void (*watch)(void *user, const struct sl_shard *shard, const struct sl_op *op);
    void *watch_user;
};

static inline void forward_init(struct forward *f, const struct sl_model *model, int32_t n_ctx,
                                struct sl_kv_types kv_types)
{
    const int32_t n_blocks = (n_ctx + SL_KV_BLOCK - 1) / SL_KV_BLOCK;
    *f = (struct forward){.model = model, .kv_types = kv_types, .n_ctx = n_blocks * SL_KV_BLOCK};
    f->kv_layer_bytes =
        (size_t)n_blocks *
        sl_kv_block_bytes(kv_types, (int32_t)model->hp.n_kv_heads, (int32_t)model->hp.head_dim);
    f->kv = calloc(model->hp.n_layers, f->kv_layer_bytes);
}

static inline void forward_finish(struct forward *f)
{
    free(f->kv);
    memset(f, 0, sizeof *f);
}

/* Everything of a bind but the weights, the cache and the workspace. */
static inline void forward_bind_weights(struct sl_shard_bind *bind, const struct sl_shard *shard)
{
    for (uint32_t w = 0; w < shard->n_weights; w++) {
        bind->weights[w] = shard->weights[w].m.data;
    }
}

/* The reference runs an F32 cache too, for exact comparisons; backends do not, nor do checks. */
static inline bool forward_validate(const struct sl_op *op, struct sluice_error *err)
{
    struct sl_op checked = *op;
    struct sl_kv_types *types = op->kind == SL_OP_KV_STORE    ? &checked.kv_store.kv.types
                                : op->kind == SL_OP_ATTENTION ? &checked.attention.kv.types
                                                              : NULL;
    if (types != NULL && types->k == SL_TYPE_F32 && types->v == SL_TYPE_F32) {
        *types = (struct sl_kv_types){SL_TYPE_F16, SL_TYPE_F16};
    }
    return sl_op_validate(&checked, err) == SLUICE_STATUS_OK;
}

/* Run `n` tokens at positions from `first` on; logits [n_outputs, n_vocab] of the last ones. False
 * when an op is not valid (its message is in err). */
static inline bool forward_run(struct forward *f, const int32_t *tokens, int32_t n, int32_t first,
                               int32_t n_outputs, float *logits, struct sluice_error *err)
{
    const struct sl_model *model = f->model;
    int32_t *pos = malloc((size_t)n * sizeof *pos);
    float *hidden = malloc((size_t)n * model->hp.n_embd * sizeof *hidden);
    bool ok = true;
    for (int32_t i = 0; i < n; i++) {
        pos[i] = first + i;
    }
    sl_model_embed(model, tokens, n, hidden);
    for (uint32_t s = 0; s < model->n_shards && ok; s++) {
        const struct sl_shard *shard = &model->shards[s];
        struct sl_shard_bind bind = {
            .consts = model->consts,
            .hidden = hidden,
            .pos = pos,
            .n_tokens = n,
            .n_kv_max = first + n,
            .logits = logits,
            .n_outputs = n_outputs,
            .workspace = malloc(sl_shard_workspace_bytes(model, shard, n, n_outputs)),
        };
        forward_bind_weights(&bind, shard);
        if (shard->kind == SL_SHARD_ATTENTION) {
            bind.kv.data = f->kv + (size_t)shard->layer * f->kv_layer_bytes;
            bind.kv.types = f->kv_types;
        }
        struct sl_op ops[SL_SHARD_MAX_OPS];
        const int n_ops = sl_shard_build(model, shard, &bind, ops);
        for (int i = 0; i < n_ops && ok; i++) {
            ok = forward_validate(&ops[i], err);
            if (ok) {
                sl_op_run_ref(&ops[i]);
            }
            if (ok && f->watch != NULL) {
                f->watch(f->watch_user, shard, &ops[i]);
            }
        }
        free(bind.workspace);
    }
    free(pos);
    free(hidden);
    return ok;
}

#endif
