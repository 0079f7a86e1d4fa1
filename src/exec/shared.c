/* SPDX-License-Identifier: Apache-2.0
 *
 * A shard that device and host share: a mixture by experts, or one that is cut: attention by KV
 * heads, a dense feed-forward by elements, the head by rows. The device sends the normed input
 * down, of a mixture with its choice of experts; then it computes its own part while the pool
 * computes the others from the same input; the host's sum joins the hidden state, which never
 * leaves the device. Of attention over a cache that is cut by blocks, queries, keys and values go
 * down, and the host's rows join before the device goes on with all of them; where no position is
 * in system memory yet, the device does it all in the first step.
 *
 *   compute stream   route | down | own part ...        | join
 *   driver + pool                 \ others .......... /
 *
 * Of a fed mixture a part of the experts is on its way into the ring since before the router spoke;
 * the device's own wait for that copy.
 *
 * What goes down lies in one stretch of the workspace on both sides (struct sl_shard_choice), so it
 * is one copy. The host's sums are read by the device in place where it can. Of the head both sides
 * leave logits of their rows in the host's buffer, and nothing is added.
 */
#include <string.h>

#include "base/error.h"
#include "exec/pass_internal.h"

static const struct sl_shard *shard_at(const struct sl_pass *p, int32_t shard)
{
    return &p->ctx->model->shards[shard];
}

static bool is_head(const struct sl_pass *p, int32_t shard)
{
    return shard_at(p, shard)->kind == SL_SHARD_HEAD;
}

/* ---- parts of shards that are cut ---- */

static struct sl_slice slice_of(const struct sl_pass *p, int32_t shard, bool rest)
{
    const struct sl_model *const model = p->ctx->model;
    const int32_t cut = sl_pass_cut(p, shard);
    const int32_t end = sl_shard_cut_end(model, shard_at(p, shard));
    return sl_shard_slice(model, shard_at(p, shard), rest ? cut : 0, rest ? end : cut);
}

size_t sl_shared_rest_bytes(const struct sl_pass *p, int32_t shard)
{
    return slice_of(p, shard, true).bytes;
}

enum sluice_status sl_shared_copy_part(struct sl_pass *p, int32_t shard, bool rest, uint8_t *to)
{
    struct sl_context *const ctx = p->ctx;
    const struct sl_slice slice = slice_of(p, shard, rest);
    for (uint32_t w = 0; w < slice.n_weights; w++) {
        const size_t row_bytes = slice.weights[w].row_bytes, n_rows = slice.weights[w].n_rows;
        uint8_t *const at = to + slice.weights[w].offset;
        SL_TRY(n_rows == 1 ? p->vt->copy_to_device(ctx->device, ctx->copy, at,
                                                   slice.weights[w].data, row_bytes, p->err)
                           : p->vt->copy_rows_to_device(
                                 ctx->device, ctx->copy, at, slice.weights[w].data, row_bytes,
                                 slice.weights[w].pitch_bytes, n_rows, p->err));
        ctx->stats.copied_bytes += row_bytes * n_rows;
    }
    return SLUICE_STATUS_OK;
}

void sl_shared_bind_parts(const struct sl_pass *p, int32_t shard, const uint8_t *own,
                          const uint8_t *rest, struct sl_shard_bind *bind)
{
    const struct sl_slice first = slice_of(p, shard, false), second = slice_of(p, shard, true);
    bind->cut = sl_pass_cut(p, shard);
    for (uint32_t w = 0; w < first.n_weights; w++) {
        bind->weights[w] = own + first.weights[w].offset;
        bind->rest[w] = rest ? rest + second.weights[w].offset : NULL;
    }
}

/* ---- the steps, for all tokens or for a group of the head's ---- */

static struct sl_shard_choice choice_of(const struct sl_pass *p, int32_t shard,
                                        const struct sl_group *g)
{
    return sl_shard_choice(p->ctx->model, shard_at(p, shard), p->ctx->plan->split, g->n);
}

static struct sl_shard_bind bind_part(const struct sl_pass *p, int32_t shard,
                                      const struct sl_group *g, enum sl_shard_part part)
{
    struct sl_shard_bind bind =
        part == SL_PART_OTHERS ? sl_pass_host_bind(p, shard) : sl_pass_device_bind(p, shard, 0);
    bind.part = part;
    bind.n_tokens = g->end;
    bind.n_outputs = g->n;
    return bind;
}

static enum sluice_status route(struct sl_pass *p, int32_t shard, const struct sl_group *g)
{
    struct sl_context *const ctx = p->ctx;
    const struct sl_shard_bind bind = bind_part(p, shard, g, SL_PART_ROUTE);
    const struct sl_shard_choice choice = choice_of(p, shard, g);
    SL_TRY(sl_pass_queue(p, shard, &bind));
    SL_TRY(p->vt->copy_to_host(ctx->device, ctx->compute, (char *)ctx->choice.data + choice.begin,
                               (char *)bind.workspace + choice.begin, choice.end - choice.begin,
                               p->err));
    return p->vt->event_record(ctx->device, ctx->hidden_event, ctx->compute, p->err);
}

static enum sluice_status own(struct sl_pass *p, int32_t shard, const struct sl_group *g)
{
    struct sl_context *const ctx = p->ctx;
    const struct sl_shard_bind bind = bind_part(p, shard, g, SL_PART_OWN);
    if (p->tier->placement[shard] != SL_PLACE_FED) {
        return sl_pass_queue(p, shard, &bind);
    }
    SL_TRY(p->vt->stream_wait(ctx->device, ctx->compute, ctx->ready[shard], p->err));
    SL_TRY(sl_pass_queue(p, shard, &bind));
    return p->vt->event_record(ctx->device, ctx->done[shard], ctx->compute, p->err);
}

/* The list of pairs that the device takes becomes that of the pairs it leaves. Returns how many. */
static int32_t turn_over(const struct sl_pass *p, const struct sl_shard_choice *choice)
{
    const struct sl_context *const ctx = p->ctx;
    const int32_t n_pairs = p->n * (int32_t)ctx->model->hp.n_experts_used;
    const int32_t *const ids = (const int32_t *)((char *)ctx->choice.data + choice->ids);
    int32_t *const mine = (int32_t *)((char *)ctx->choice.data + choice->mine);
    int32_t n_left = 0;
    for (int32_t i = 0; i < n_pairs; i++) {
        mine[i] = mine[i] < 0 ? ids[i] : -1;
        n_left += mine[i] >= 0;
    }
    return n_left;
}

/* In short passes the join is part of a recording. */
static bool joins_always(const struct sl_pass *p)
{
    return p->n <= sl_tier_tokens[SL_N_GRAPH_TIERS - 1];
}

/* The host's logits of several rows to their places between those of the device. */
static void spread_logits(const struct sl_pass *p, const struct sl_group *g, const float *logits,
                          size_t cut)
{
    const size_t n_vocab = p->ctx->model->hp.n_vocab;
    float *const rows = p->ctx->logits.data;
    for (size_t i = 0; i < (size_t)g->n; i++) {
        memcpy(rows + i * n_vocab + cut, logits + i * (n_vocab - cut),
               (n_vocab - cut) * sizeof(float));
    }
}

static enum sluice_status others(struct sl_pass *p, int32_t shard, const struct sl_group *g)
{
    struct sl_context *const ctx = p->ctx;
    const struct sl_shard_choice choice = choice_of(p, shard, g);
    const int32_t mark = sl_trace_begin(ctx->trace, SL_LANE_DRIVER, "wait for choice", shard);
    SL_TRY(p->vt->event_sync(ctx->device, ctx->hidden_event, p->err));
    sl_trace_end(ctx->trace, mark, 0);
    float *const partial = (float *)(void *)((char *)ctx->choice.data + choice.partial);
    p->nothing_left = shard_at(p, shard)->expert_bytes > 0 && turn_over(p, &choice) == 0;
    if (p->nothing_left) {
        if (joins_always(p)) {
            memset(partial, 0, (size_t)p->n * ctx->model->hp.n_embd * sizeof(float));
        }
        return SLUICE_STATUS_OK;
    }
    struct sl_shard_bind bind = bind_part(p, shard, g, SL_PART_OTHERS);
    bind.workspace = ctx->choice.data;
    bind.cut = sl_pass_cut(p, shard);
    bind.logits = g->n == 1 ? (float *)ctx->logits.data + bind.cut : partial;
    struct sl_op ops[SL_SHARD_MAX_OPS];
    const int n_ops = sl_shard_build(ctx->model, shard_at(p, shard), &bind, ops);
    const int32_t cpu = sl_trace_begin(ctx->trace, SL_LANE_CPU, "others of", shard);
    sl_pass_compute(p, ops, n_ops);
    if (is_head(p, shard) && g->n > 1) {
        spread_logits(p, g, partial, (size_t)bind.cut);
    }
    sl_trace_end(ctx->trace, cpu, 0);
    return SLUICE_STATUS_OK;
}

/* The device's logits to their places in the host's buffer. */
static enum sluice_status join_logits(struct sl_pass *p, int32_t shard, const struct sl_group *g)
{
    struct sl_context *const ctx = p->ctx;
    const struct sl_shard_bind bind = bind_part(p, shard, g, SL_PART_JOIN);
    for (int32_t i = 0; i < g->n; i++) {
        float *const row = (float *)ctx->logits.data + (size_t)i * ctx->model->hp.n_vocab;
        SL_TRY(p->vt->copy_to_host(ctx->device, ctx->compute, row,
                                   bind.logits + (size_t)i * (size_t)bind.cut,
                                   (size_t)bind.cut * sizeof(float), p->err));
    }
    return SLUICE_STATUS_OK;
}

/* The host's sums to where JOIN looks for them, unless the device reads them where they are. */
static enum sluice_status bring_sums(struct sl_pass *p, const struct sl_shard_choice *choice,
                                     struct sl_shard_bind *bind)
{
    struct sl_context *const ctx = p->ctx;
    char *const partial = (char *)ctx->choice.data + choice->partial;
    char *const lse = (char *)ctx->choice.data + choice->lse;
    if (ctx->choice_is_mapped) {
        bind->partial = (float *)(void *)partial;
        bind->partial_lse = (float *)(void *)lse;
        return SLUICE_STATUS_OK;
    }
    SL_TRY(p->vt->copy_to_device(ctx->device, ctx->compute,
                                 (char *)bind->workspace + choice->joined, partial,
                                 choice->partial_bytes, p->err));
    return choice->lse_bytes == 0
               ? SLUICE_STATUS_OK
               : p->vt->copy_to_device(ctx->device, ctx->compute,
                                       (char *)bind->workspace + choice->joined_lse, lse,
                                       choice->lse_bytes, p->err);
}

static enum sluice_status join(struct sl_pass *p, int32_t shard, const struct sl_group *g)
{
    const struct sl_shard_choice choice = choice_of(p, shard, g);
    if (is_head(p, shard)) {
        return join_logits(p, shard, g);
    }
    if (p->nothing_left && !joins_always(p)) {
        return SLUICE_STATUS_OK;
    }
    struct sl_shard_bind bind = bind_part(p, shard, g, SL_PART_JOIN);
    SL_TRY(bring_sums(p, &choice, &bind));
    return sl_pass_queue(p, shard, &bind);
}

/* What the steps are about: all tokens, or of the head the last group. */
static struct sl_group last_group(const struct sl_pass *p, int32_t shard)
{
    struct sl_group g = {.end = p->n, .n = p->n};
    for (int32_t at = 0; is_head(p, shard) && sl_pass_next_group(p, &at, &g);) {
    }
    return g;
}

enum sluice_status sl_shared_route(struct sl_pass *p, int32_t shard)
{
    const struct sl_group last = last_group(p, shard);
    if (sl_pass_is_shallow(p, shard)) { /* and the other steps are left out */
        const struct sl_shard_bind bind = bind_part(p, shard, &last, SL_PART_WHOLE);
        return sl_pass_queue(p, shard, &bind);
    }
    struct sl_group g;
    /* Groups before the last are done with here. */
    for (int32_t at = 0; is_head(p, shard) && sl_pass_next_group(p, &at, &g) && g.end < last.end;) {
        SL_TRY(route(p, shard, &g));
        SL_TRY(own(p, shard, &g));
        SL_TRY(others(p, shard, &g));
        SL_TRY(join(p, shard, &g));
        SL_TRY(p->vt->stream_sync(p->ctx->device, p->ctx->compute, p->err));
        sl_pass_keep_group(p, at, &g);
    }
    return route(p, shard, &last);
}

enum sluice_status sl_shared_own(struct sl_pass *p, int32_t shard)
{
    const struct sl_group g = last_group(p, shard);
    return own(p, shard, &g);
}

enum sluice_status sl_shared_others(struct sl_pass *p, int32_t shard)
{
    const struct sl_group g = last_group(p, shard);
    return others(p, shard, &g);
}

enum sluice_status sl_shared_join(struct sl_pass *p, int32_t shard)
{
    const struct sl_group g = last_group(p, shard);
    SL_TRY(join(p, shard, &g));
    if (is_head(p, shard)) {
        p->late_bytes = (size_t)g.n * p->ctx->model->hp.n_vocab * sizeof(float);
        p->late_rows =
            p->logits ? p->logits + (size_t)(p->n_outputs - g.n) * p->ctx->model->hp.n_vocab : NULL;
    }
    return SLUICE_STATUS_OK;
}
