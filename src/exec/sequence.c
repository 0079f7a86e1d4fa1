/* SPDX-License-Identifier: Apache-2.0
 *
 * The sequences of a context: tokens appended to one or to many of them, shared, forgotten. Before
 * a pass its sequences get the blocks that it will write; after it they keep what they need.
 */
#include <string.h>

#include "base/error.h"
#include "exec/context_internal.h"

struct sl_kv_part sl_context_kv(const struct sl_context *ctx, uint32_t layer, bool in_vram)
{
    const struct sl_plan *const plan = ctx->plan;
    const struct sl_hparams *const hp = &ctx->model->hp;
    const uint32_t n_kv_layers = (uint32_t)plan->n_kv_layers;
    const int32_t n = (int32_t)hp->n_kv_heads, cut = plan->split.kv_heads;
    const uint32_t first = (uint32_t)sl_plan_first_host_kv(plan);
    const int32_t n_blocks = sl_kv_pool_blocks(plan->options.n_ctx);
    const int32_t n_first = plan->split.kv_blocks > 0 ? plan->split.kv_blocks : n_blocks;
    struct sl_kv_part part = {.n_heads = cut == 0  ? n
                                         : in_vram ? cut
                                                   : n - cut,
                              .begin = !in_vram && plan->split.kv_blocks > 0 ? n_first : 0,
                              .end = in_vram ? n_first : n_blocks};
    if (in_vram && layer < n_kv_layers) {
        part.data = ctx->arena + plan->kv_offset + layer * plan->kv_layer_bytes;
    } else if (!in_vram && layer >= first) {
        part.data = (uint8_t *)ctx->kv.data + (layer - first) * plan->kv_host_layer_bytes;
    }
    part.block_bytes =
        sl_kv_block_bytes(plan->options.kv_types, part.n_heads, (int32_t)hp->head_dim);
    return part;
}

/* The content of a block in all layers. */
static enum sluice_status copy_block(struct sl_context *ctx, int32_t from, int32_t to,
                                     struct sluice_error *err)
{
    enum sluice_status status = SLUICE_STATUS_OK;
    for (uint32_t layer = 0; layer < ctx->model->hp.n_layers && status == SLUICE_STATUS_OK;
         layer++) {
        const struct sl_kv_part there = sl_context_kv(ctx, layer, true);
        const struct sl_kv_part here = sl_context_kv(ctx, layer, false);
        if (there.data) {
            const size_t bytes = there.block_bytes;
            status = ctx->device->vt->copy_on_device(ctx->device, ctx->compute,
                                                     there.data + (size_t)to * bytes,
                                                     there.data + (size_t)from * bytes, bytes, err);
        }
        if (here.data) {
            memcpy(here.data + (size_t)to * here.block_bytes,
                   here.data + (size_t)from * here.block_bytes, here.block_bytes);
        }
    }
    if (ctx->plan->n_kv_layers > 0) {
        const bool good = status == SLUICE_STATUS_OK;
        const enum sluice_status end =
            ctx->device->vt->stream_sync(ctx->device, ctx->compute, good ? err : NULL);
        status = good ? end : status;
    }
    return status;
}

enum sluice_status sl_context_own_block(struct sl_context *ctx, int32_t seq, int32_t index,
                                        struct sluice_error *err)
{
    struct sl_kv_split split;
    SL_TRY(sl_kv_pool_split(&ctx->cache, seq, index, &split, err));
    if (split.from == split.to) {
        return SLUICE_STATUS_OK;
    }
    const enum sluice_status status = copy_block(ctx, split.from, split.to, err);
    if (status != SLUICE_STATUS_OK) {
        sl_kv_pool_unsplit(&ctx->cache, &split);
    }
    return status;
}

/* Give up blocks beyond what the sequence holds. */
static void trim(struct sl_context *ctx, int32_t seq)
{
    sl_kv_pool_truncate(&ctx->cache, seq, ctx->cache.n_past[seq]);
}

/* Blocks for n more tokens, all the sequence's own; nothing changes on failure. */
static enum sluice_status reserve(struct sl_context *ctx, int32_t seq, int32_t n,
                                  struct sluice_error *err)
{
    const int32_t n_past = ctx->cache.n_past[seq], n_ctx = ctx->plan->options.n_ctx;
    SL_CHECK(n <= n_ctx - n_past, INVALID_ARGUMENT, err,
             "the context of %d tokens is full: %d are used and %d more were given; use a larger "
             "-c/--ctx-size",
             n_ctx, n_past, n);
    SL_TRY(sl_kv_pool_reserve(&ctx->cache, seq, n, err));
    if (n_past % SL_KV_BLOCK == 0) {
        return SLUICE_STATUS_OK;
    }
    const enum sluice_status status = sl_context_own_block(ctx, seq, n_past / SL_KV_BLOCK, err);
    if (status != SLUICE_STATUS_OK) {
        trim(ctx, seq);
    }
    return status;
}

static enum sluice_status check_seq(const struct sl_context *ctx, int32_t seq,
                                    struct sluice_error *err)
{
    SL_CHECK(seq >= 0 && seq < ctx->cache.n_seqs, INVALID_ARGUMENT, err,
             "sequence %d: the context has %d", seq, ctx->cache.n_seqs);
    return SLUICE_STATUS_OK;
}

static enum sluice_status check_tokens(const struct sl_context *ctx, const int32_t *tokens,
                                       int32_t n, struct sluice_error *err)
{
    const uint32_t n_vocab = ctx->model->hp.n_vocab;
    for (int32_t i = 0; i < n; i++) {
        SL_CHECK(tokens[i] >= 0 && (uint32_t)tokens[i] < n_vocab, INVALID_ARGUMENT, err,
                 "token %d at %d is outside the vocabulary of %u", tokens[i], i, n_vocab);
    }
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_context_eval_seq(struct sl_context *ctx, int32_t seq, const int32_t *tokens,
                                       int32_t n, int32_t n_outputs, float *logits,
                                       struct sluice_error *err)
{
    SL_CHECK(n >= 1 && n_outputs >= 0 && n_outputs <= n, INVALID_ARGUMENT, err,
             "%d tokens with %d outputs asked for", n, n_outputs);
    SL_TRY(check_seq(ctx, seq, err));
    SL_TRY(check_tokens(ctx, tokens, n, err));
    SL_TRY(reserve(ctx, seq, n, err));
    enum sluice_status status = SLUICE_STATUS_OK;
    for (int32_t at = 0; at < n && status == SLUICE_STATUS_OK;) {
        const int32_t m = n - at < ctx->plan->n_ubatch ? n - at : ctx->plan->n_ubatch;
        /* Outputs of this pass: the part of the last n_outputs tokens that lies in it. */
        const int32_t first_output = n - n_outputs;
        const int32_t skip = first_output > at ? first_output - at : 0;
        struct sl_batch batch = {
            .tokens = tokens + at, .n = m, .seq = seq, .n_outputs = skip < m ? m - skip : 0};
        if (logits && batch.n_outputs > 0) {
            batch.logits = logits + (size_t)(at + skip - first_output) * ctx->model->hp.n_vocab;
        }
        status = sl_pass_run(ctx, &batch, err);
        at += m;
    }
    if (status != SLUICE_STATUS_OK) {
        trim(ctx, seq);
    }
    return status;
}

enum sluice_status sl_context_eval(struct sl_context *ctx, const int32_t *tokens, int32_t n,
                                   int32_t n_outputs, float *logits, struct sluice_error *err)
{
    return sl_context_eval_seq(ctx, 0, tokens, n, n_outputs, logits, err);
}

static enum sluice_status check_decode(const struct sl_context *ctx, const int32_t *seqs, int32_t n,
                                       const float *logits, struct sluice_error *err)
{
    const struct sl_plan *const plan = ctx->plan;
    SL_CHECK(n >= 1, INVALID_ARGUMENT, err, "%d sequences to go on with", n);
    for (int32_t i = 0; i < n; i++) {
        SL_TRY(check_seq(ctx, seqs[i], err));
        for (int32_t k = 0; k < i; k++) {
            SL_CHECK(seqs[i] != seqs[k], INVALID_ARGUMENT, err, "sequence %d is given twice",
                     seqs[i]);
        }
    }
    SL_CHECK(logits || (n <= plan->options.max_outputs && n <= plan->n_ubatch), INVALID_ARGUMENT,
             err, "logits of %d sequences do not fit the context's buffer of %d rows", n,
             plan->options.max_outputs < plan->n_ubatch ? plan->options.max_outputs
                                                        : plan->n_ubatch);
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_context_decode(struct sl_context *ctx, const int32_t *seqs,
                                     const int32_t *tokens, int32_t n, float *logits,
                                     struct sluice_error *err)
{
    SL_TRY(check_decode(ctx, seqs, n, logits, err));
    SL_TRY(check_tokens(ctx, tokens, n, err));
    enum sluice_status status = SLUICE_STATUS_OK;
    int32_t n_reserved = 0, n_done = 0;
    while (n_reserved < n && status == SLUICE_STATUS_OK) {
        status = reserve(ctx, seqs[n_reserved], 1, err);
        n_reserved += status == SLUICE_STATUS_OK;
    }
    while (n_done < n && status == SLUICE_STATUS_OK) {
        const int32_t m = n - n_done < ctx->plan->n_ubatch ? n - n_done : ctx->plan->n_ubatch;
        const struct sl_batch batch = {
            .tokens = tokens + n_done,
            .n = m,
            .seqs = seqs + n_done,
            .n_outputs = m,
            .logits = logits ? logits + (size_t)n_done * ctx->model->hp.n_vocab : NULL};
        status = sl_pass_run(ctx, &batch, err);
        n_done += status == SLUICE_STATUS_OK ? m : 0;
    }
    for (int32_t i = 0; i < n_reserved && status != SLUICE_STATUS_OK; i++) {
        ctx->cache.n_past[seqs[i]] -= i < n_done;
        trim(ctx, seqs[i]);
    }
    return status;
}

int32_t sl_context_seq_n_past(const struct sl_context *ctx, int32_t seq)
{
    return ctx->cache.n_past[seq];
}

int32_t sl_context_n_past(const struct sl_context *ctx)
{
    return sl_context_seq_n_past(ctx, 0);
}

void sl_context_seq_truncate(struct sl_context *ctx, int32_t seq, int32_t n)
{
    if (n >= 0) {
        sl_kv_pool_truncate(&ctx->cache, seq, n);
    }
}

void sl_context_truncate(struct sl_context *ctx, int32_t n)
{
    sl_context_seq_truncate(ctx, 0, n);
}

enum sluice_status sl_context_seq_copy(struct sl_context *ctx, int32_t from, int32_t to, int32_t n,
                                       struct sluice_error *err)
{
    SL_TRY(check_seq(ctx, from, err));
    SL_TRY(check_seq(ctx, to, err));
    SL_CHECK(from != to, INVALID_ARGUMENT, err, "sequence %d cannot become a part of itself", to);
    SL_CHECK(n >= 0 && n <= ctx->cache.n_past[from], INVALID_ARGUMENT, err,
             "the first %d tokens of sequence %d, which has %d", n, from, ctx->cache.n_past[from]);
    sl_kv_pool_share(&ctx->cache, from, to, n);
    return SLUICE_STATUS_OK;
}
