/* SPDX-License-Identifier: Apache-2.0
 *
 * A mixture's feed-forward that device and host share. The device chooses the experts and sends the
 * choice down; then it computes those that it takes while the pool computes the others from the
 * same normed input; the host's sum joins the hidden state, which never leaves the device.
 *
 *   compute stream   route | down | own experts ...        | join
 *   driver + pool                 \ others ............. /
 *
 * Of a fed layer a part of the experts is on its way into the ring since before the router spoke;
 * the device's own wait for that copy.
 *
 * What goes down lies in one stretch of the workspace on both sides (struct sl_shard_choice), so it
 * is one copy. The host's sums are read by the device in place where it can.
 */
#include <string.h>

#include "base/error.h"
#include "exec/pass_internal.h"

static const struct sl_shard *shard_at(const struct sl_pass *p, int32_t shard)
{
    return &p->ctx->model->shards[shard];
}

static struct sl_shard_choice choice_of(const struct sl_pass *p, int32_t shard)
{
    return sl_shard_choice(p->ctx->model, shard_at(p, shard), p->n);
}

enum sluice_status sl_mixture_route(struct sl_pass *p, int32_t shard)
{
    struct sl_context *const ctx = p->ctx;
    struct sl_shard_bind bind = sl_pass_device_bind(p, shard, 0);
    bind.part = SL_PART_ROUTE;
    SL_TRY(sl_pass_queue(p, shard, &bind));
    SL_TRY(p->vt->copy_to_host(ctx->device, ctx->compute, ctx->choice.data, bind.workspace,
                               choice_of(p, shard).end, p->err));
    return p->vt->event_record(ctx->device, ctx->hidden_event, ctx->compute, p->err);
}

enum sluice_status sl_mixture_own(struct sl_pass *p, int32_t shard)
{
    struct sl_context *const ctx = p->ctx;
    struct sl_shard_bind bind = sl_pass_device_bind(p, shard, 0);
    bind.part = SL_PART_OWN;
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

enum sluice_status sl_mixture_others(struct sl_pass *p, int32_t shard)
{
    struct sl_context *const ctx = p->ctx;
    const struct sl_shard_choice choice = choice_of(p, shard);
    const int32_t mark = sl_trace_begin(ctx->trace, SL_LANE_DRIVER, "wait for choice", shard);
    SL_TRY(p->vt->event_sync(ctx->device, ctx->hidden_event, p->err));
    sl_trace_end(ctx->trace, mark, 0);
    p->nothing_left = turn_over(p, &choice) == 0;
    if (p->nothing_left) {
        if (joins_always(p)) {
            memset((char *)ctx->choice.data + choice.partial, 0,
                   (size_t)p->n * ctx->model->hp.n_embd * sizeof(float));
        }
        return SLUICE_STATUS_OK;
    }
    struct sl_shard_bind bind = sl_pass_host_bind(p, shard);
    bind.part = SL_PART_OTHERS;
    bind.workspace = ctx->choice.data;
    struct sl_op ops[SL_SHARD_MAX_OPS];
    const int n_ops = sl_shard_build(ctx->model, shard_at(p, shard), &bind, ops);
    const int32_t cpu = sl_trace_begin(ctx->trace, SL_LANE_CPU, "experts of", shard);
    sl_cpu_run(ctx->kernels, ctx->pool, ops, n_ops, ctx->scratch);
    sl_trace_end(ctx->trace, cpu, 0);
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_mixture_join(struct sl_pass *p, int32_t shard)
{
    struct sl_context *const ctx = p->ctx;
    const struct sl_shard_choice choice = choice_of(p, shard);
    struct sl_shard_bind bind = sl_pass_device_bind(p, shard, 0);
    bind.part = SL_PART_JOIN;
    if (p->nothing_left && !joins_always(p)) {
        return SLUICE_STATUS_OK;
    }
    char *const partial = (char *)ctx->choice.data + choice.partial;
    if (ctx->choice_is_mapped) {
        bind.partial = (float *)(void *)partial;
    } else {
        SL_TRY(p->vt->copy_to_device(ctx->device, ctx->compute,
                                     (char *)bind.workspace + choice.partial, partial,
                                     (size_t)p->n * ctx->model->hp.n_embd * sizeof(float), p->err));
    }
    return sl_pass_queue(p, shard, &bind);
}
