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

/* How far rows move, and what is to be done with keys. */
struct shift {
    const struct sl_cpu_kernels *kernels;
    int32_t seq;
    int32_t n_keep, n_drop, n_left; /* tokens; n_left after the shift */
    int32_t n_pairs;                /* elements that turn, by two */
    bool neox;
    float cosine[SL_KV_MAX_HEAD_DIM / 2], sine[SL_KV_MAX_HEAD_DIM / 2];
};

/* The cache of one layer. */
struct shift_work {
    const struct shift *shift;
    struct sl_kv_view kv;
    int32_t seq;
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
    float row[SL_KV_MAX_HEAD_DIM] __attribute__((aligned(64)));
    for (int32_t pos = s->n_keep; pos < s->n_left; pos++) {
        s->kernels->attention->unpack(kv->types.k, sl_kv_key(kv, w->seq, pos + s->n_drop, head),
                                      row, 1, kv->head_dim);
        if (sl_kv_turns_keys(kv->types)) {
            sl_kv_turn(row, kv->head_dim);
        }
        if (s->neox) {
            s->kernels->rows->rope_neox(row, s->cosine, s->sine, s->n_pairs);
        } else {
            s->kernels->rows->rope_pairs(row, s->cosine, s->sine, s->n_pairs);
        }
        if (sl_kv_turns_keys(kv->types)) {
            sl_kv_turn(row, kv->head_dim);
        }
        s->kernels->rows->pack(kv->types.k, row, sl_kv_key(kv, w->seq, pos, head), kv->head_dim);
    }
}

static void shift_values(const struct shift_work *w, int32_t head)
{
    const struct shift *const s = w->shift;
    const size_t row_bytes = sl_type_row_bytes(w->kv.types.v, w->kv.head_dim);
    for (int32_t pos = s->n_keep; pos < s->n_left; pos++) {
        memcpy(sl_kv_value(&w->kv, w->seq, pos, head),
               sl_kv_value(&w->kv, w->seq, pos + s->n_drop, head), row_bytes);
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

/* `data` holds the whole pool, or with `in_order` the sequence's blocks one after the other; of a
 * cache that is cut by blocks the first ones, and `later` the others. */
static void shift_layer(const struct sl_context *ctx, const struct shift *s, void *data,
                        void *later, int32_t n_heads, bool in_order)
{
    struct shift_work w = {.shift = s,
                           .kv = {.data = data,
                                  .later = later,
                                  .n_first = later ? ctx->plan->split.kv_blocks : 0,
                                  .types = ctx->plan->options.kv_types,
                                  .n_kv_heads = n_heads,
                                  .head_dim = (int32_t)ctx->model->hp.head_dim,
                                  .table = in_order ? NULL : ctx->cache.table,
                                  .table_stride = ctx->cache.n_blocks},
                           .seq = in_order ? 0 : s->seq};
    if (ctx->pool) {
        sl_pool_run(ctx->pool, shift_heads, &w);
    } else {
        shift_heads(&w, 0, 1);
    }
}

/* Blocks begin .. end - 1 of the sequence between a layer's cache in VRAM and `buffer`, where they
 * are in order. */
static enum sluice_status move_blocks(struct sl_context *ctx, const struct shift *s,
                                      const struct sl_kv_part *part, uint8_t *buffer, int32_t begin,
                                      int32_t end, bool up, struct sluice_error *err)
{
    const struct sl_device_vtable *const vt = ctx->device->vt;
    const int32_t *const table = ctx->cache.table + (size_t)s->seq * (size_t)ctx->cache.n_blocks;
    for (int32_t i = begin; i < end;) {
        int32_t n = 1;
        while (i + n < end && table[i + n] == table[i] + n) {
            n++;
        }
        uint8_t *const device = part->data + (size_t)table[i] * part->block_bytes;
        uint8_t *const host = buffer + (size_t)i * part->block_bytes;
        const size_t bytes = (size_t)n * part->block_bytes;
        SL_TRY(up ? vt->copy_to_device(ctx->device, ctx->compute, device, host, bytes, err)
                  : vt->copy_to_host(ctx->device, ctx->compute, host, device, bytes, err));
        i += n;
    }
    return vt->stream_sync(ctx->device, ctx->compute, err);
}

static int32_t blocks_in(const struct sl_kv_part *part, int32_t n_tokens)
{
    const int32_t n = sl_kv_pool_blocks(n_tokens);
    return n < part->end ? n : part->end;
}

/* What is in VRAM of a layer's cache, by way of `buffer`: the blocks from the first that changes
 * on. With the later blocks of one that is cut. */
static enum sluice_status shift_device_layer(struct sl_context *ctx, const struct shift *s,
                                             const struct sl_kv_part *part, uint8_t *buffer,
                                             void *later, struct sluice_error *err)
{
    const int32_t first = s->n_keep / SL_KV_BLOCK;
    SL_TRY(move_blocks(ctx, s, part, buffer, first, blocks_in(part, s->n_left + s->n_drop), false,
                       err));
    shift_layer(ctx, s, buffer, later, part->n_heads, true);
    return move_blocks(ctx, s, part, buffer, first, blocks_in(part, s->n_left), true, err);
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
        const struct sl_kv_part there = sl_context_kv(ctx, shard->layer, true);
        const struct sl_kv_part here = sl_context_kv(ctx, shard->layer, false);
        const bool by_blocks = ctx->plan->split.kv_blocks > 0;
        if (there.data) {
            void *const later = by_blocks ? here.data : NULL;
            SL_TRY(shift_device_layer(ctx, s, &there, buffer, later, err));
        }
        if (here.data && !by_blocks) {
            shift_layer(ctx, s, here.data, NULL, here.n_heads, false);
        }
    }
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_context_seq_shift(struct sl_context *ctx, int32_t seq, int32_t n_keep,
                                        int32_t n_drop, struct sluice_error *err)
{
    SL_CHECK(seq >= 0 && seq < ctx->cache.n_seqs, INVALID_ARGUMENT, err,
             "sequence %d: the context has %d", seq, ctx->cache.n_seqs);
    const int32_t n_past = ctx->cache.n_past[seq];
    SL_CHECK(n_keep >= 0 && n_drop >= 0 && n_drop <= n_past - n_keep, INVALID_ARGUMENT, err,
             "dropping %d tokens after the first %d of %d", n_drop, n_keep, n_past);
    struct shift s = {.kernels = ctx->kernels,
                      .seq = seq,
                      .n_keep = n_keep,
                      .n_drop = n_drop,
                      .n_left = n_past - n_drop};
    enum sluice_status status = SLUICE_STATUS_OK;
    if (n_drop > 0 && s.n_left > n_keep) {
        for (int32_t i = n_keep / SL_KV_BLOCK; i < sl_kv_pool_blocks(s.n_left); i++) {
            SL_TRY(sl_context_own_block(ctx, seq, i, err));
        }
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
    sl_kv_pool_truncate(&ctx->cache, seq, status == SLUICE_STATUS_OK ? s.n_left : 0);
    return status;
}

enum sluice_status sl_context_shift(struct sl_context *ctx, int32_t n_keep, int32_t n_drop,
                                    struct sluice_error *err)
{
    return sl_context_seq_shift(ctx, 0, n_keep, n_drop, err);
}
