/* SPDX-License-Identifier: Apache-2.0
 *
 * What the copy stream does in a pass: shards into the ring, with their KV where it lives in system
 * memory, and what a longer resident prefix needs (see pass.c).
 */
#include "base/error.h"
#include "exec/experts.h"
#include "exec/pass_internal.h"

static enum sluice_status copy_weight(struct sl_pass *p, const struct sl_weight *weight,
                                      uint8_t *to)
{
    struct sl_context *const ctx = p->ctx;
    if (!weight->name) {
        return SLUICE_STATUS_OK;
    }
    ctx->stats.copied_bytes += weight->bytes;
    return p->vt->copy_to_device(ctx->device, ctx->copy, to, weight->m.data, weight->bytes, p->err);
}

/* What the resident prefix holds of a shard. */
static enum sluice_status copy_resident(struct sl_pass *p, int32_t index, uint8_t *to)
{
    const struct sl_shard *const shard = &p->ctx->model->shards[index];
    if (sl_pass_cut(p, index) > 0) {
        return sl_shared_copy_part(p, index, false, to);
    }
    for (uint32_t w = sl_pass_is_mixture(shard) ? SL_N_FFN_WEIGHTS : 0; w < shard->n_weights; w++) {
        const struct sl_weight *const weight = &shard->weights[w];
        SL_TRY(copy_weight(
            p, weight, to + (sl_pass_is_mixture(shard) ? weight->part_offset : weight->offset)));
    }
    return SLUICE_STATUS_OK;
}

/* What a streamed shard, or a fed mixture, needs in the ring. */
static enum sluice_status copy_streamed(struct sl_pass *p, int32_t index, uint8_t *image)
{
    const struct sl_shard *const shard = &p->ctx->model->shards[index];
    uint32_t w = 0, end = shard->n_weights;
    if (sl_pass_has_part(p, index)) {
        return sl_shared_copy_part(p, index, true, image);
    }
    if (sl_pass_is_divided(p, index)) {
        return SLUICE_STATUS_OK; /* its weights are there */
    }
    if (sl_pass_is_mixture(shard)) {
        SL_TRY(sl_experts_stream(p->ctx, p->tier, index, image, p->err));
        w = SL_N_FFN_WEIGHTS;
        end = sl_pass_in_prefix(p, index) ? w : end;
    }
    for (; w < end; w++) {
        SL_TRY(copy_weight(p, &shard->weights[w], image + shard->weights[w].offset));
    }
    return SLUICE_STATUS_OK;
}

/* Make the tier's resident prefix valid: upload what a shorter prefix had given up. The passes that
 * ran since may have used those bytes for their ring and activations. */
enum sluice_status sl_pass_switch_tier(struct sl_pass *p)
{
    struct sl_context *const ctx = p->ctx;
    const struct sl_plan *const plan = ctx->plan;
    while (ctx->n_valid < p->tier->n_resident) {
        const int32_t i = plan->resident_order[ctx->n_valid];
        const int32_t mark = sl_trace_begin(ctx->trace, SL_LANE_COPY, "upload", i);
        const uint64_t copied_before = ctx->stats.copied_bytes;
        p->copied = true;
        SL_TRY(copy_resident(p, i, ctx->arena + plan->resident_offset[i]));
        sl_trace_end(ctx->trace, mark, (size_t)(ctx->stats.copied_bytes - copied_before));
        SL_TRY(p->vt->event_record(ctx->device, ctx->ready[i], ctx->copy, p->err));
        ctx->pending[i] = true;
        ctx->n_valid++;
    }
    ctx->n_valid = p->tier->n_resident;
    return sl_experts_begin(ctx, p->tier, p->n, &p->copied, p->err);
}

/* Where KV lies in the ring's item of a streamed attention: behind the weights that come. */
size_t sl_pass_ring_kv_offset(const struct sl_pass *p, int32_t shard)
{
    return sl_pass_is_divided(p, shard) ? 0
           : sl_pass_has_part(p, shard) ? sl_shared_rest_bytes(p, shard)
                                        : sl_pass_image_bytes(&p->ctx->model->shards[shard]);
}

/* Bring the KV blocks of the pass's sequences into the ring, each to its place in the pool. With
 * those that this pass will write: their other cells must hold finite values. */
static enum sluice_status upload_kv(struct sl_pass *p, const struct sl_shard *shard, uint8_t *to)
{
    struct sl_context *const ctx = p->ctx;
    const struct sl_kv_part home = sl_context_kv(ctx, shard->layer, false);
    struct sl_kv_run run;
    for (int32_t i = 0; sl_pass_next_run(&ctx->kv_in_use, &home, &i, &run);) {
        const size_t at = (size_t)run.first * home.block_bytes;
        const size_t bytes = (size_t)run.n * home.block_bytes;
        SL_TRY(
            p->vt->copy_to_device(ctx->device, ctx->copy, to + at, home.data + at, bytes, p->err));
        ctx->stats.copied_bytes += bytes;
    }
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_pass_copy(struct sl_pass *p, const struct sl_step *step)
{
    struct sl_context *const ctx = p->ctx;
    const struct sl_shard *const shard = &ctx->model->shards[step->shard];
    uint8_t *const image = sl_pass_device_image(p, step->shard, step->ring_offset);
    p->copied = true;
    if (step->after >= 0) {
        SL_TRY(p->vt->stream_wait(ctx->device, ctx->copy, ctx->done[step->after], p->err));
        /* The bytes may also belong to a KV slot that is still being downloaded. */
        for (int32_t i = step->after; i >= 0 && p->last_download >= 0; i--) {
            if (p->tier->placement[i] == SL_PLACE_STREAMED &&
                sl_pass_kv_on_host(ctx, &ctx->model->shards[i])) {
                SL_TRY(p->vt->stream_wait(ctx->device, ctx->copy, ctx->downloaded[i], p->err));
                break;
            }
        }
    }
    const int32_t mark = sl_trace_begin(ctx->trace, SL_LANE_COPY, "", step->shard);
    const uint64_t copied_before = ctx->stats.copied_bytes;
    SL_TRY(copy_streamed(p, step->shard, image));
    if (sl_pass_kv_on_host(ctx, shard)) {
        SL_TRY(upload_kv(p, shard, image + sl_pass_ring_kv_offset(p, step->shard)));
    }
    sl_trace_end(ctx->trace, mark, (size_t)(ctx->stats.copied_bytes - copied_before));
    return p->vt->event_record(ctx->device, ctx->ready[step->shard], ctx->copy, p->err);
}
