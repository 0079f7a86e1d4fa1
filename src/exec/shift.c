/* SPDX-License-Identifier: Apache-2.0
 *
 * Context shift: tokens in the middle of the sequence are dropped and the later ones move up. In
 * the cache that is a move of rows by a fixed number of positions; keys are turned back by the
 * same number, which undoes nothing but the rotation: turning by p - d is turning by p, then by -d.
 *
 *   | kept | dropped | later ...... |   ->   | kept | later ...... |
 *
 * Rows move to lower positions, so going up through them nothing is overwritten too early, and
 * every head of every layer is work of its own. Caches in VRAM come down a layer at a time, and go
 * back: shifts are rare, and no device needs an operator for them.
 */
#include <math.h>
#include <string.h>

#include "base/error.h"
#include "base/mem.h"
#include "cpu/kernels.h"
#include "exec/context_internal.h"
#include "op/kv.h"

#define MAX_HEAD_DIM 256

/* How far rows move, and what is to be done with keys. */
struct shift {
    const struct sl_cpu_kernels *kernels;
    int32_t n_keep, n_drop, n_left; /* tokens; n_left after the shift */
    int32_t n_pairs;                /* elements that turn, by two */
    bool neox;
    float cosine[MAX_HEAD_DIM / 2], sine[MAX_HEAD_DIM / 2];
};

/* Layers that are next to each other in memory, and turn alike. */
struct shift_work {
    const struct shift *shift;
    struct sl_kv_view kv; /* of the layer */
};

/* The rotation of a layer's keys is that of the operator which made them. */
static void shift_init(struct shift *s, const struct sl_context *ctx, const struct sl_shard *shard)
{
    const struct sl_shard_bind bind = {.consts = ctx->model->consts,
                                       .n_tokens = 1,
                                       .n_kv_max = 1,
                                       .kv = {.types = ctx->plan->options.kv_types}};
    struct sl_op ops[SL_SHARD_MAX_OPS];
    const int n_ops = sl_shard_build(ctx->model, shard, &bind, ops);
    s->n_pairs = 0;
    for (int i = 0; i < n_ops; i++) {
        if (ops[i].kind != SL_OP_ROPE) {
            continue;
        }
        const struct sl_op_rope *const rope = &ops[i].rope;
        s->n_pairs = rope->n_rot / 2;
        s->neox = rope->neox;
        for (int32_t k = 0; k < s->n_pairs; k++) {
            const double angle = -(double)s->n_drop * (double)rope->freq[k];
            s->cosine[k] = (float)cos(angle);
            s->sine[k] = (float)sin(angle);
        }
    }
}

static void shift_keys(const struct shift_work *w, int32_t head)
{
    const struct shift *const s = w->shift;
    const struct sl_kv_view *const kv = &w->kv;
    float row[MAX_HEAD_DIM] __attribute__((aligned(64)));
    for (int32_t pos = s->n_keep; pos < s->n_left; pos++) {
        s->kernels->attention->unpack(kv->types.k, sl_kv_key(kv, 0, pos + s->n_drop, head), row, 1,
                                      kv->head_dim);
        if (s->neox) {
            s->kernels->rows->rope_neox(row, s->cosine, s->sine, s->n_pairs);
        } else {
            s->kernels->rows->rope_pairs(row, s->cosine, s->sine, s->n_pairs);
        }
        s->kernels->rows->pack(kv->types.k, row, sl_kv_key(kv, 0, pos, head), kv->head_dim);
    }
}

static void shift_values(const struct shift_work *w, int32_t head)
{
    const struct shift *const s = w->shift;
    const size_t row_bytes = sl_type_row_bytes(w->kv.types.v, w->kv.head_dim);
    for (int32_t pos = s->n_keep; pos < s->n_left; pos++) {
        memcpy(sl_kv_value(&w->kv, 0, pos, head), sl_kv_value(&w->kv, 0, pos + s->n_drop, head),
               row_bytes);
    }
}

/* Keys and values of every head of a layer, shared out among the threads. */
static void shift_heads(void *arg, int thread, int n_threads)
{
    const struct shift_work *const w = arg;
    for (int32_t item = thread; item < 2 * w->kv.n_kv_heads; item += n_threads) {
        if (item % 2 == 0) {
            shift_keys(w, item / 2);
        } else {
            shift_values(w, item / 2);
        }
    }
}

static void shift_layer(const struct sl_context *ctx, const struct shift *s, void *data)
{
    struct shift_work w = {.shift = s,
                           .kv = {.data = data,
                                  .types = ctx->plan->options.kv_types,
                                  .n_kv_heads = (int32_t)ctx->model->hp.n_kv_heads,
                                  .head_dim = (int32_t)ctx->model->hp.head_dim}};
    if (ctx->pool) {
        sl_pool_run(ctx->pool, shift_heads, &w);
    } else {
        shift_heads(&w, 0, 1);
    }
}

/* A layer whose cache is in VRAM, by way of `buffer`: the blocks from the first that changes on. */
static enum sluice_status shift_device_layer(struct sl_context *ctx, const struct shift *s,
                                             uint32_t layer, uint8_t *buffer,
                                             struct sluice_error *err)
{
    const struct sl_device_vtable *const vt = ctx->device->vt;
    const size_t block_bytes =
        sl_kv_block_bytes(ctx->plan->options.kv_types, (int32_t)ctx->model->hp.n_kv_heads,
                          (int32_t)ctx->model->hp.head_dim);
    const size_t first = (size_t)(s->n_keep / SL_KV_BLOCK) * block_bytes;
    const size_t old_end = (size_t)((ctx->n_past - 1) / SL_KV_BLOCK + 1) * block_bytes;
    const size_t new_end = (size_t)((s->n_left - 1) / SL_KV_BLOCK + 1) * block_bytes;
    uint8_t *const home = ctx->arena + ctx->plan->kv_offset + layer * ctx->plan->kv_layer_bytes;
    SL_TRY(vt->copy_to_host(ctx->device, ctx->compute, buffer + first, home + first,
                            old_end - first, err));
    SL_TRY(vt->stream_sync(ctx->device, ctx->compute, err));
    shift_layer(ctx, s, buffer);
    SL_TRY(vt->copy_to_device(ctx->device, ctx->compute, home + first, buffer + first,
                              new_end - first, err));
    return vt->stream_sync(ctx->device, ctx->compute, err);
}

static enum sluice_status shift_all(struct sl_context *ctx, struct shift *s, uint8_t *buffer,
                                    struct sluice_error *err)
{
    for (uint32_t i = 0; i < ctx->model->n_shards; i++) {
        const struct sl_shard *const shard = &ctx->model->shards[i];
        if (shard->kind != SL_SHARD_ATTENTION) {
            continue;
        }
        shift_init(s, ctx, shard);
        const size_t n_kv_layers = (size_t)ctx->plan->n_kv_layers;
        if (shard->layer < n_kv_layers) {
            SL_TRY(shift_device_layer(ctx, s, shard->layer, buffer, err));
        } else {
            shift_layer(ctx, s,
                        (uint8_t *)ctx->kv.data +
                            (shard->layer - n_kv_layers) * ctx->plan->kv_layer_bytes);
        }
    }
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_context_shift(struct sl_context *ctx, int32_t n_keep, int32_t n_drop,
                                    struct sluice_error *err)
{
    SL_CHECK(n_keep >= 0 && n_drop >= 0 && n_drop <= ctx->n_past - n_keep, INVALID_ARGUMENT, err,
             "dropping %d tokens after the first %d of %d", n_drop, n_keep, ctx->n_past);
    struct shift s = {.kernels = ctx->kernels,
                      .n_keep = n_keep,
                      .n_drop = n_drop,
                      .n_left = ctx->n_past - n_drop};
    enum sluice_status status = SLUICE_STATUS_OK;
    if (n_drop > 0 && s.n_left > n_keep) {
        uint8_t *buffer = NULL;
        if (ctx->plan->n_kv_layers > 0) {
            buffer = sl_alloc_aligned(SL_MEM_EXEC, ctx->plan->kv_layer_bytes, 64);
            SL_CHECK(buffer, OUT_OF_MEMORY, err, "no memory to shift the KV cache (%zu MiB)",
                     ctx->plan->kv_layer_bytes >> 20);
        }
        status = shift_all(ctx, &s, buffer, err);
        sl_free(buffer);
    }
    /* Half shifted, the cache is of no use. */
    ctx->n_past = status == SLUICE_STATUS_OK ? s.n_left : 0;
    return status;
}
