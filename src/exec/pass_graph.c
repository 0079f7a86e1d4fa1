/* SPDX-License-Identifier: Apache-2.0
 *
 * Segments: in short passes the runs of steps between two waits of the compute stream are recorded
 * as graphs once passes of one kind keep coming. What changes from token to token lies in memory,
 * not in the graph (see pass.c).
 */
#include "base/error.h"
#include "exec/pass_internal.h"

/* Whether a step only queues work on the compute stream, waiting for no other. */
static bool step_is_plain(const struct sl_pass *p, const struct sl_step *step)
{
    const struct sl_context *const ctx = p->ctx;
    if (p->n_outputs == 0 && ctx->model->shards[step->shard].kind == SL_SHARD_HEAD) {
        return false;
    }
    const bool waits_for_copy =
        step->kind == SL_STEP_OWN && p->tier->placement[step->shard] == SL_PLACE_FED;
    const bool shared =
        (step->kind == SL_STEP_ROUTE || step->kind == SL_STEP_OWN || step->kind == SL_STEP_JOIN ||
         (step->kind == SL_STEP_OTHERS && sl_pass_is_shallow(p, step->shard))) &&
        !waits_for_copy;
    return step->kind == SL_STEP_HIDDEN_UP || (shared && !ctx->pending[step->shard]) ||
           (step->kind == SL_STEP_GPU && p->tier->placement[step->shard] == SL_PLACE_RESIDENT &&
            !ctx->pending[step->shard]);
}

/* One past the last step of the segment that begins at step k; k when there is none. The hidden
 * state's way down ends a segment and belongs to it. */
int32_t sl_pass_segment_end(const struct sl_pass *p, int32_t k)
{
    const struct sl_step *const steps = p->tier->steps;
    int32_t end = k;
    bool computes = false;
    while (end < p->tier->n_steps && step_is_plain(p, &steps[end])) {
        computes = computes || steps[end].kind != SL_STEP_HIDDEN_UP;
        end++;
    }
    if (!computes) {
        return k;
    }
    if (end < p->tier->n_steps && steps[end].kind == SL_STEP_HIDDEN_DOWN &&
        (p->n_outputs > 0 || sl_pass_step_shard_kind(p, &steps[end]) != SL_SHARD_HEAD)) {
        end++;
    }
    return end;
}

/* A step of a segment, or the move down at its end without the wait. */
static enum sluice_status run_plain(struct sl_pass *p, const struct sl_step *step)
{
    return step->kind == SL_STEP_HIDDEN_DOWN ? sl_pass_move_hidden(p, step)
                                             : sl_pass_run_step(p, step);
}

static enum sluice_status queue_segment(struct sl_pass *p, int32_t k, int32_t end)
{
    for (; k < end; k++) {
        const struct sl_step *const step = &p->tier->steps[k];
        SL_TRY(run_plain(p, step));
    }
    return SLUICE_STATUS_OK;
}

static enum sluice_status record_segment(struct sl_pass *p, int32_t k, int32_t end,
                                         struct sl_graph **out)
{
    struct sl_context *const ctx = p->ctx;
    SL_TRY(p->vt->graph_begin(ctx->device, ctx->compute, p->err));
    sl_trace_mute(ctx->trace, true);
    const enum sluice_status status = queue_segment(p, k, end);
    sl_trace_mute(ctx->trace, false);
    if (status != SLUICE_STATUS_OK) {
        struct sl_graph *half = NULL;
        if (p->vt->graph_end(ctx->device, ctx->compute, &half, NULL) == SLUICE_STATUS_OK) {
            p->vt->graph_destroy(ctx->device, half);
        }
        return status;
    }
    return p->vt->graph_end(ctx->device, ctx->compute, out, p->err);
}

/* The graph of steps k .. end - 1: recorded when such passes have come some times in a row; NULL:
 * not yet. A pass that has to wait for weights cuts its steps otherwise: it does without, and the
 * graph stays for the next one. */
static enum sluice_status find_graph(struct sl_pass *p, int32_t k, int32_t end,
                                     struct sl_graph **out)
{
    struct sl_context *const ctx = p->ctx;
    struct sl_segment *const seg = &ctx->segments[p->tier - ctx->plan->tiers][k];
    const bool same =
        seg->n_tokens == p->n && seg->n_outputs == p->n_outputs && seg->n_kv_max == p->n_kv_max;
    *out = NULL;
    if (same && seg->graph && seg->end != end) {
        return SLUICE_STATUS_OK;
    }
    if (!same && seg->graph) {
        p->vt->graph_destroy(ctx->device, seg->graph);
        seg->graph = NULL;
    }
    seg->n_same = same && seg->end == end ? seg->n_same + 1 : 0;
    if (seg->n_same >= SL_GRAPH_AFTER && !seg->graph) {
        SL_TRY(record_segment(p, k, end, &seg->graph));
    }
    seg->n_tokens = p->n;
    seg->n_outputs = p->n_outputs;
    seg->n_kv_max = p->n_kv_max;
    seg->end = end;
    *out = seg->graph;
    return SLUICE_STATUS_OK;
}

/* Run steps k .. end - 1: as they are until passes of this kind keep coming, then recorded once and
 * replayed. */
enum sluice_status sl_pass_run_segment(struct sl_pass *p, int32_t k, int32_t end)
{
    struct sl_context *const ctx = p->ctx;
    struct sl_graph *graph = NULL;
    SL_TRY(find_graph(p, k, end, &graph));
    if (graph) {
        const int32_t mark =
            sl_trace_begin(ctx->trace, SL_LANE_GPU, "graph up to", p->tier->steps[end - 1].shard);
        SL_TRY(p->vt->graph_launch(ctx->device, ctx->compute, graph, p->err));
        sl_trace_end(ctx->trace, mark, 0);
    } else {
        SL_TRY(queue_segment(p, k, end));
    }
    /* Replayed or not, the last group of logits lands in the context's buffer. */
    const struct sl_step *const last = &p->tier->steps[end - 1];
    if (sl_pass_step_shard_kind(p, last) == SL_SHARD_HEAD &&
        (last->kind == SL_STEP_GPU || last->kind == SL_STEP_JOIN)) {
        p->late_rows = p->logits;
        p->late_bytes = (size_t)p->n_outputs * ctx->model->hp.n_vocab * sizeof(float);
    }
    return last->kind == SL_STEP_HIDDEN_DOWN ? sl_pass_await_hidden(p) : SLUICE_STATUS_OK;
}

bool sl_pass_uses_graphs(const struct sl_pass *p)
{
    const struct sl_context *const ctx = p->ctx;
    const ptrdiff_t t = p->tier - ctx->plan->tiers;
    return p->tier->uses_device && t < SL_N_GRAPH_TIERS && ctx->segments[t] &&
           p->n_outputs > 0 && /* the chunks of a prompt ask for no logits */
           p->n_outputs <= ctx->plan->options.max_outputs;
}
