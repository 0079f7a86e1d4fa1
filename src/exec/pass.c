/* SPDX-License-Identifier: Apache-2.0
 *
 * Running a pass: the driver thread walks the steps of the tier's plan, queues copies and GPU work
 * on their streams, and runs CPU steps on the pool itself.
 *
 *   copy stream      c0 c1 c2 ...          waits for done[] of the step that frees its bytes
 *   compute stream        g0    g1 ...     waits for ready[] of its own copy
 *   download stream          d0 ...        new KV of streamed attention, after done[]
 *   driver + pool      cpu      cpu        after the hidden state is down
 *
 * Every pass ends with all streams idle, so the first copies of a pass need no wait.
 * In short passes steps are replayed as graphs (pass_graph.c).
 */
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "exec/experts.h"
#include "exec/pass_internal.h"

/* Whether the cache of an attention, or a part of it, is at home in system memory: streamed, it
 * brings that along. */
bool sl_pass_kv_on_host(const struct sl_context *ctx, const struct sl_shard *shard)
{
    return shard->kind == SL_SHARD_ATTENTION && sl_context_kv(ctx, shard->layer, false).data;
}

size_t sl_pass_image_bytes(const struct sl_shard *shard)
{
    return (shard->bytes + 255) & ~(size_t)255;
}

int32_t sl_pass_cut(const struct sl_pass *p, int32_t shard)
{
    const struct sl_context *const ctx = p->ctx;
    return sl_shard_cut(ctx->model, &ctx->model->shards[shard], ctx->plan->split);
}

bool sl_pass_in_prefix(const struct sl_pass *p, int32_t shard)
{
    return p->ctx->plan->resident_rank[shard] < p->tier->n_resident;
}

/* A shard of which a part is in VRAM for good, so that another part is all that comes. */
bool sl_pass_has_part(const struct sl_pass *p, int32_t shard)
{
    return sl_pass_cut(p, shard) > 0 && sl_pass_in_prefix(p, shard);
}

bool sl_pass_is_divided(const struct sl_pass *p, int32_t shard)
{
    return sl_shard_is_divided(&p->ctx->model->shards[shard], p->ctx->plan->split);
}

bool sl_pass_is_shallow(const struct sl_pass *p, int32_t shard)
{
    return sl_pass_is_divided(p, shard) &&
           p->n_kv_max <= p->ctx->plan->split.kv_blocks * SL_KV_BLOCK;
}

bool sl_pass_next_run(const struct sl_kv_runs *runs, const struct sl_kv_part *part, int32_t *i,
                      struct sl_kv_run *out)
{
    while (*i < runs->n) {
        const struct sl_kv_run run = runs->items[(*i)++];
        const int32_t begin = run.first > part->begin ? run.first : part->begin;
        const int32_t end = run.first + run.n < part->end ? run.first + run.n : part->end;
        if (begin < end) {
            *out = (struct sl_kv_run){begin - part->begin, end - begin};
            return true;
        }
    }
    return false;
}

/* Where a shard's weights are in VRAM; of what comes through the ring, there. */
uint8_t *sl_pass_device_image(const struct sl_pass *p, int32_t shard, size_t ring_offset)
{
    const struct sl_context *const ctx = p->ctx;
    if (p->tier->placement[shard] == SL_PLACE_RESIDENT) {
        return ctx->arena + ctx->plan->resident_offset[shard];
    }
    return ctx->arena + p->tier->ring_offset + ring_offset;
}

bool sl_pass_is_mixture(const struct sl_shard *shard)
{
    return shard->expert_bytes > 0;
}

/* What CPU and GPU bindings have in common. */
static struct sl_shard_bind common_bind(const struct sl_pass *p)
{
    const struct sl_context *const ctx = p->ctx;
    return (struct sl_shard_bind){.kv = {.types = ctx->plan->options.kv_types,
                                         .table_stride = ctx->cache.n_blocks,
                                         .n_first = ctx->plan->split.kv_blocks},
                                  .n_tokens = p->n,
                                  .n_kv_max = p->n_kv};
}

/* The cache in VRAM, or in the ring; of a cut one both, each its heads or blocks. */
static void bind_device_kv(const struct sl_pass *p, int32_t index, uint8_t *in_ring,
                           struct sl_shard_bind *bind)
{
    const uint32_t layer = p->ctx->model->shards[index].layer;
    const struct sl_kv_part there = sl_context_kv(p->ctx, layer, true);
    bind->kv.data = there.data ? there.data : in_ring;
    bind->kv_rest = bind->kv.later = in_ring;
    if (sl_pass_is_shallow(p, index)) {
        bind->kv.here = SL_KV_FIRST;
    }
}

struct sl_shard_bind sl_pass_device_bind(const struct sl_pass *p, int32_t index, size_t ring_offset)
{
    const struct sl_context *const ctx = p->ctx;
    const struct sl_plan *const plan = ctx->plan;
    const struct sl_shard *const shard = &ctx->model->shards[index];
    uint8_t *const image = sl_pass_device_image(p, index, ring_offset);
    struct sl_shard_bind bind = common_bind(p);
    bind.n_kv_max = p->n_kv_max;
    const bool base_alone = sl_pass_is_mixture(shard) && sl_pass_in_prefix(p, index);
    const uint8_t *const base = ctx->arena + plan->resident_offset[index];
    const uint8_t *const whole = sl_pass_is_divided(p, index) ? base : image;
    for (uint32_t w = 0; w < shard->n_weights; w++) {
        const struct sl_weight *const weight = &shard->weights[w];
        bind.weights[w] = !weight->name ? NULL
                          : base_alone  ? base + weight->part_offset
                                        : whole + weight->offset;
    }
    if (sl_pass_has_part(p, index)) {
        const bool streamed = p->tier->placement[index] == SL_PLACE_STREAMED;
        sl_shared_bind_parts(p, index, base, streamed ? image : NULL, &bind);
    }
    if (sl_pass_is_mixture(shard)) {
        sl_experts_bind(ctx, shard->layer, &bind);
    }
    bind.consts = (const float *)(ctx->arena + plan->consts_offset);
    bind.hidden = (float *)(ctx->arena + p->tier->hidden_offset);
    bind.workspace = ctx->arena + p->tier->workspace_offset;
    bind.pos = (const int32_t *)(ctx->arena + p->tier->io_offset);
    bind.logits = (float *)(ctx->arena + p->tier->logits_offset);
    if (shard->kind == SL_SHARD_ATTENTION) {
        bind_device_kv(p, index, image + sl_pass_ring_kv_offset(p, index), &bind);
    }
    if (ctx->cache.n_seqs > 1) {
        bind.seq = bind.pos + p->n;
        bind.kv.table = (const int32_t *)(ctx->arena + plan->kv_table_offset);
    }
    return bind;
}

struct sl_shard_bind sl_pass_host_bind(const struct sl_pass *p, int32_t index)
{
    const struct sl_context *const ctx = p->ctx;
    const struct sl_shard *const shard = &ctx->model->shards[index];
    struct sl_shard_bind bind = common_bind(p);
    for (uint32_t w = 0; w < shard->n_weights; w++) {
        bind.weights[w] = shard->weights[w].name ? shard->weights[w].m.data : NULL;
    }
    bind.consts = ctx->model->consts;
    bind.hidden = ctx->hidden.data;
    bind.workspace = ctx->workspace;
    bind.pos = ctx->io.data;
    bind.logits = ctx->logits.data;
    if (shard->kind == SL_SHARD_ATTENTION) {
        bind.kv.data = bind.kv.later = sl_context_kv(ctx, shard->layer, false).data;
    }
    if (ctx->cache.n_seqs > 1) {
        bind.seq = bind.pos + p->n;
        bind.kv.table = ctx->cache.table;
    }
    return bind;
}

enum sluice_status sl_pass_queue(struct sl_pass *p, int32_t shard, const struct sl_shard_bind *bind)
{
    struct sl_context *const ctx = p->ctx;
    struct sl_op ops[SL_SHARD_MAX_OPS];
    const int n_ops = sl_shard_build(ctx->model, &ctx->model->shards[shard], bind, ops);
    return p->vt->run(ctx->device, ctx->compute, ops, n_ops, ctx->arena + p->tier->scratch_offset,
                      p->err);
}

void sl_pass_compute(struct sl_pass *p, const struct sl_op *ops, int n_ops)
{
    const struct sl_context *const ctx = p->ctx;
    const uint64_t begin = sl_clock_now_ns();
    sl_cpu_run(ctx->kernels, ctx->pool, ops, n_ops, ctx->scratch);
    p->cpu_ns += sl_clock_now_ns() - begin;
}

bool sl_pass_next_group(const struct sl_pass *p, int32_t *at, struct sl_group *out)
{
    if (*at >= p->n_outputs) {
        return false;
    }
    const int32_t most = p->ctx->plan->options.max_outputs;
    out->n = p->n_outputs - *at < most ? p->n_outputs - *at : most;
    *at += out->n;
    out->end = p->n - p->n_outputs + *at;
    return true;
}

static float *group_logits(const struct sl_pass *p, int32_t at, const struct sl_group *g)
{
    return p->logits ? p->logits + (size_t)(at - g->n) * p->ctx->model->hp.n_vocab : NULL;
}

void sl_pass_keep_group(const struct sl_pass *p, int32_t at, const struct sl_group *g)
{
    float *const rows = group_logits(p, at, g);
    if (rows) {
        memcpy(rows, p->ctx->logits.data, (size_t)g->n * p->ctx->model->hp.n_vocab * sizeof(float));
    }
}

static enum sluice_status run_head_on_device(struct sl_pass *p, struct sl_shard_bind bind,
                                             const struct sl_shard *shard)
{
    struct sl_context *const ctx = p->ctx;
    struct sl_op ops[SL_SHARD_MAX_OPS];
    const size_t row_bytes = ctx->model->hp.n_vocab * sizeof(float);
    struct sl_group g;
    for (int32_t at = 0; sl_pass_next_group(p, &at, &g);) {
        bind.n_tokens = g.end;
        bind.n_outputs = g.n;
        const int n_ops = sl_shard_build(ctx->model, shard, &bind, ops);
        SL_TRY(p->vt->run(ctx->device, ctx->compute, ops, n_ops,
                          ctx->arena + p->tier->scratch_offset, p->err));
        SL_TRY(p->vt->copy_to_host(ctx->device, ctx->compute, ctx->logits.data, bind.logits,
                                   (size_t)g.n * row_bytes, p->err));
        if (at == p->n_outputs) {
            p->late_rows = group_logits(p, at, &g); /* taken when the pass is over */
            p->late_bytes = (size_t)g.n * row_bytes;
            break;
        }
        SL_TRY(p->vt->stream_sync(ctx->device, ctx->compute, p->err));
        sl_pass_keep_group(p, at, &g);
    }
    return SLUICE_STATUS_OK;
}

static void run_head_on_host(struct sl_pass *p, struct sl_shard_bind bind,
                             const struct sl_shard *shard)
{
    struct sl_context *const ctx = p->ctx;
    struct sl_op ops[SL_SHARD_MAX_OPS];
    struct sl_group g;
    for (int32_t at = 0; sl_pass_next_group(p, &at, &g);) {
        bind.n_tokens = g.end;
        bind.n_outputs = g.n;
        const int n_ops = sl_shard_build(ctx->model, shard, &bind, ops);
        sl_pass_compute(p, ops, n_ops);
        sl_pass_keep_group(p, at, &g);
    }
}

/* Bring the KV blocks that this pass wrote back to their home. */
static enum sluice_status download_kv(struct sl_pass *p, int32_t index,
                                      const struct sl_shard *shard, const uint8_t *device_kv)
{
    struct sl_context *const ctx = p->ctx;
    const struct sl_kv_part home = sl_context_kv(ctx, shard->layer, false);
    size_t all = 0;
    SL_TRY(p->vt->stream_wait(ctx->device, ctx->download, ctx->done[index], p->err));
    const int32_t mark = sl_trace_begin(ctx->trace, SL_LANE_DOWNLOAD, "KV of", index);
    struct sl_kv_run run;
    for (int32_t i = 0; sl_pass_next_run(&ctx->kv_written, &home, &i, &run);) {
        const size_t at = (size_t)run.first * home.block_bytes;
        const size_t bytes = (size_t)run.n * home.block_bytes;
        SL_TRY(p->vt->copy_to_host(ctx->device, ctx->download, home.data + at, device_kv + at,
                                   bytes, p->err));
        all += bytes;
    }
    sl_trace_end(ctx->trace, mark, all);
    p->last_download = index;
    return p->vt->event_record(ctx->device, ctx->downloaded[index], ctx->download, p->err);
}

static enum sluice_status run_gpu(struct sl_pass *p, const struct sl_step *step)
{
    struct sl_context *const ctx = p->ctx;
    const int32_t i = step->shard;
    const struct sl_shard *const shard = &ctx->model->shards[i];
    const bool streamed = p->tier->placement[i] == SL_PLACE_STREAMED;
    if (streamed || ctx->pending[i]) {
        SL_TRY(p->vt->stream_wait(ctx->device, ctx->compute, ctx->ready[i], p->err));
        ctx->pending[i] = false;
    }
    struct sl_shard_bind bind = sl_pass_device_bind(p, i, step->ring_offset);
    const int32_t mark = sl_trace_begin(ctx->trace, SL_LANE_GPU, "", i);
    if (shard->kind == SL_SHARD_HEAD) {
        SL_TRY(run_head_on_device(p, bind, shard));
        sl_trace_end(ctx->trace, mark, 0);
        return SLUICE_STATUS_OK;
    }
    SL_TRY(sl_pass_queue(p, i, &bind));
    sl_trace_end(ctx->trace, mark, 0);
    if (!streamed) {
        return SLUICE_STATUS_OK; /* nobody waits for it */
    }
    SL_TRY(p->vt->event_record(ctx->device, ctx->done[i], ctx->compute, p->err));
    return sl_pass_kv_on_host(ctx, shard) ? download_kv(p, i, shard, bind.kv_rest)
                                          : SLUICE_STATUS_OK;
}

static void run_cpu(struct sl_pass *p, const struct sl_step *step)
{
    struct sl_context *const ctx = p->ctx;
    const struct sl_shard *const shard = &ctx->model->shards[step->shard];
    const struct sl_shard_bind bind = sl_pass_host_bind(p, step->shard);
    if (shard->kind == SL_SHARD_HEAD) {
        run_head_on_host(p, bind, shard);
        return;
    }
    struct sl_op ops[SL_SHARD_MAX_OPS];
    const int n_ops = sl_shard_build(ctx->model, shard, &bind, ops);
    sl_pass_compute(p, ops, n_ops);
}

enum sl_shard_kind sl_pass_step_shard_kind(const struct sl_pass *p, const struct sl_step *step)
{
    return p->ctx->model->shards[step->shard].kind;
}

enum sluice_status sl_pass_move_rows(struct sl_pass *p, int32_t begin, int32_t n, bool up)
{
    struct sl_context *const ctx = p->ctx;
    const size_t row_bytes = ctx->model->hp.n_embd * sizeof(float);
    const size_t skip = (size_t)begin * row_bytes, bytes = (size_t)n * row_bytes;
    uint8_t *const host = (uint8_t *)ctx->hidden.data + skip;
    uint8_t *const device = ctx->arena + p->tier->hidden_offset + skip;
    const int32_t mark =
        sl_trace_begin(ctx->trace, SL_LANE_GPU, up ? "hidden up" : "hidden down", -1);
    SL_TRY(up ? p->vt->copy_to_device(ctx->device, ctx->compute, device, host, bytes, p->err)
              : p->vt->copy_to_host(ctx->device, ctx->compute, host, device, bytes, p->err));
    sl_trace_end(ctx->trace, mark, bytes);
    return SLUICE_STATUS_OK;
}

/* The head needs only the rows of its outputs. */
enum sluice_status sl_pass_move_hidden(struct sl_pass *p, const struct sl_step *step)
{
    const int32_t begin =
        sl_pass_step_shard_kind(p, step) == SL_SHARD_HEAD ? p->n - p->n_outputs : 0;
    return sl_pass_move_rows(p, begin, p->n - begin, step->kind == SL_STEP_HIDDEN_UP);
}

/* The driver waits for what the compute stream has brought down. */
enum sluice_status sl_pass_await_hidden(struct sl_pass *p)
{
    struct sl_context *const ctx = p->ctx;
    const int32_t mark = sl_trace_begin(ctx->trace, SL_LANE_DRIVER, "wait for hidden", -1);
    SL_TRY(p->vt->event_record(ctx->device, ctx->hidden_event, ctx->compute, p->err));
    SL_TRY(p->vt->event_sync(ctx->device, ctx->hidden_event, p->err));
    sl_trace_end(ctx->trace, mark, 0);
    return SLUICE_STATUS_OK;
}

static enum sluice_status check_cancelled(const struct sl_pass *p)
{
    const struct sl_context *const ctx = p->ctx;
    SL_CHECK(!ctx->cancelled || !ctx->cancelled(ctx->cancelled_user), CANCELLED, p->err,
             "cancelled");
    return SLUICE_STATUS_OK;
}

/* For traces. */
static const char *const step_names[] = {[SL_STEP_COPY] = "queue copy of",
                                         [SL_STEP_GPU] = "queue",
                                         [SL_STEP_CPU] = "",
                                         [SL_STEP_HIDDEN_DOWN] = "hidden down for",
                                         [SL_STEP_HIDDEN_UP] = "hidden up for",
                                         [SL_STEP_ROUTE] = "route",
                                         [SL_STEP_OWN] = "own part of",
                                         [SL_STEP_OTHERS] = "other part of",
                                         [SL_STEP_JOIN] = "join"};

/* Steps of a shared shard that only queue work. */
static enum sluice_status queue_shared(struct sl_pass *p, const struct sl_step *step)
{
    struct sl_context *const ctx = p->ctx;
    if (ctx->pending[step->shard]) {
        SL_TRY(p->vt->stream_wait(ctx->device, ctx->compute, ctx->ready[step->shard], p->err));
        ctx->pending[step->shard] = false;
    }
    const int32_t mark =
        sl_trace_begin(ctx->trace, SL_LANE_GPU, step_names[step->kind], step->shard);
    SL_TRY(step->kind == SL_STEP_ROUTE ? sl_shared_route(p, step->shard)
           : step->kind == SL_STEP_OWN ? sl_shared_own(p, step->shard)
                                       : sl_shared_join(p, step->shard));
    sl_trace_end(ctx->trace, mark, 0);
    return SLUICE_STATUS_OK;
}

/* Of a shallow attention the first step has done all. */
static bool is_done_already(const struct sl_pass *p, const struct sl_step *step)
{
    return (step->kind == SL_STEP_OWN || step->kind == SL_STEP_OTHERS ||
            step->kind == SL_STEP_JOIN) &&
           sl_pass_is_shallow(p, step->shard);
}

enum sluice_status sl_pass_run_step(struct sl_pass *p, const struct sl_step *step)
{
    if (is_done_already(p, step)) {
        return SLUICE_STATUS_OK;
    }
    switch (step->kind) {
    case SL_STEP_COPY:
        return sl_pass_copy(p, step);
    case SL_STEP_GPU:
        return run_gpu(p, step);
    case SL_STEP_CPU:
        run_cpu(p, step);
        return SLUICE_STATUS_OK;
    case SL_STEP_HIDDEN_DOWN:
        SL_TRY(sl_pass_move_hidden(p, step));
        return sl_pass_await_hidden(p);
    case SL_STEP_OTHERS:
        return sl_shared_others(p, step->shard);
    case SL_STEP_ROUTE:
    case SL_STEP_OWN:
    case SL_STEP_JOIN:
        return queue_shared(p, step);
    case SL_STEP_HIDDEN_UP:
    default:
        return sl_pass_move_hidden(p, step);
    }
}

static enum sluice_status run_step(struct sl_pass *p, const struct sl_step *step)
{
    const struct sl_context *const ctx = p->ctx;
    SL_TRY(check_cancelled(p));
    if (p->n_outputs == 0 && ctx->model->shards[step->shard].kind == SL_SHARD_HEAD) {
        return SLUICE_STATUS_OK; /* nobody asked for logits */
    }
    const int32_t mark =
        sl_trace_begin(ctx->trace, step->kind == SL_STEP_CPU ? SL_LANE_CPU : SL_LANE_DRIVER,
                       step_names[step->kind], step->shard);
    SL_TRY(sl_pass_run_step(p, step));
    sl_trace_end(ctx->trace, mark, 0);
    return SLUICE_STATUS_OK;
}

static enum sluice_status sync_all(struct sl_pass *p)
{
    struct sl_context *const ctx = p->ctx;
    const int32_t mark = sl_trace_begin(ctx->trace, SL_LANE_DRIVER, "wait for all", -1);
    SL_TRY(p->vt->stream_sync(ctx->device, ctx->compute, p->err));
    if (p->copied) {
        SL_TRY(p->vt->stream_sync(ctx->device, ctx->copy, p->err));
    }
    if (p->last_download >= 0) {
        SL_TRY(p->vt->stream_sync(ctx->device, ctx->download, p->err));
    }
    sl_trace_end(ctx->trace, mark, 0);
    if (p->late_rows) {
        memcpy(p->late_rows, ctx->logits.data, p->late_bytes);
    }
    return SLUICE_STATUS_OK;
}

/* Positions, and where there are several sequences these and what is new in their table. */
static enum sluice_status queue_inputs(struct sl_pass *p)
{
    struct sl_context *const ctx = p->ctx;
    struct sl_kv_pool *const cache = &ctx->cache;
    const size_t n = (size_t)p->n * (cache->n_seqs > 1 ? 2 : 1);
    SL_TRY(p->vt->copy_to_device(ctx->device, ctx->compute, ctx->arena + p->tier->io_offset,
                                 ctx->io.data, n * sizeof(int32_t), p->err));
    if (cache->n_seqs > 1 && cache->changed_begin < cache->changed_end) {
        const size_t at = (size_t)cache->changed_begin * sizeof(int32_t);
        const size_t bytes = (size_t)cache->changed_end * sizeof(int32_t) - at;
        SL_TRY(p->vt->copy_to_device(ctx->device, ctx->compute,
                                     ctx->arena + ctx->plan->kv_table_offset + at,
                                     (const uint8_t *)cache->table + at, bytes, p->err));
        cache->changed_begin = cache->changed_end = 0;
    }
    return SLUICE_STATUS_OK;
}

/* The hidden state to begin with, where the first shard is computed. Copies that wait for nothing
 * are on their way before. Steps up to *k are done. */
static enum sluice_status begin_steps(struct sl_pass *p, int32_t *k)
{
    const struct sl_step *const steps = p->tier->steps;
    while (*k < p->tier->n_steps && steps[*k].kind == SL_STEP_COPY && steps[*k].after < 0) {
        SL_TRY(run_step(p, &steps[(*k)++]));
    }
    if (*k < p->tier->n_steps && steps[*k].kind == SL_STEP_HIDDEN_UP &&
        sl_pass_step_shard_kind(p, &steps[*k]) != SL_SHARD_HEAD) {
        (*k)++;
        return sl_pass_embed_on_device(p);
    }
    sl_pass_embed(p, 0, p->n);
    return SLUICE_STATUS_OK;
}

static enum sluice_status run_steps(struct sl_pass *p)
{
    struct sl_context *const ctx = p->ctx;
    if (p->tier->uses_device) {
        SL_TRY(sl_pass_switch_tier(p));
        SL_TRY(queue_inputs(p));
    }
    const bool graphs = sl_pass_uses_graphs(p);
    int32_t k = 0;
    if (graphs) {
        sl_pass_embed(p, 0, p->n);
    } else {
        SL_TRY(begin_steps(p, &k));
    }
    while (k < p->tier->n_steps) {
        const int32_t end = graphs ? sl_pass_segment_end(p, k) : k;
        if (end > k) {
            SL_TRY(check_cancelled(p));
            SL_TRY(sl_pass_run_segment(p, k, end));
            k = end;
        } else {
            SL_TRY(run_step(p, &p->tier->steps[k]));
            k++;
        }
    }
    if (!p->tier->uses_device) {
        return SLUICE_STATUS_OK;
    }
    SL_TRY(sl_experts_end(ctx, p->err));
    SL_TRY(sync_all(p));
    sl_experts_learn(ctx);
    return SLUICE_STATUS_OK;
}

/* After a failed pass nothing may still be running, and what is in VRAM is not trusted. */
static void recover(struct sl_pass *p)
{
    struct sl_context *const ctx = p->ctx;
    if (!p->tier->uses_device) {
        return;
    }
    struct sl_stream *const streams[] = {ctx->compute, ctx->copy, ctx->download};
    for (size_t i = 0; i < sizeof streams / sizeof streams[0]; i++) {
        p->vt->stream_sync(ctx->device, streams[i], NULL);
    }
    ctx->n_valid = 0;
    ctx->cache.changed_begin = 0;
    ctx->cache.changed_end = ctx->cache.n_seqs * ctx->cache.n_blocks;
    sl_experts_forget(ctx);
    memset(ctx->pending, 0, ctx->model->n_shards * sizeof *ctx->pending);
}

static void count_pass(struct sl_context *ctx, const struct sl_pass *p, int32_t tier, uint64_t ns)
{
    const int32_t n = p->n;
    struct sl_context_stats *const s = &ctx->stats;
    s->n_passes++;
    s->n_tokens += (uint64_t)n;
    s->last_pass_ns = ns;
    s->last_tier = tier;
    if (n == ctx->plan->tiers[tier].n_tokens) {
        s->tier_passes[tier]++;
        s->tier_ns[tier] += ((double)ns - s->tier_ns[tier]) / (double)s->tier_passes[tier];
        const struct sl_pass_times times = {.pass_ns = (double)ns,
                                            .cpu_ns = (double)p->cpu_ns,
                                            .depth = p->n_kv - (ctx->cache.n_seqs > 1 ? 1 : n)};
        if (ctx->adapt.on) {
            sl_adapt_note(ctx, tier, &times);
        }
    }
}

/* Positions and sequences of the tokens, and the blocks that they need. */
static void place_tokens(struct sl_pass *p, const struct sl_batch *batch)
{
    struct sl_context *const ctx = p->ctx;
    struct sl_kv_pool *const cache = &ctx->cache;
    int32_t *const pos = ctx->io.data, *const seq = pos + p->n;
    for (int32_t i = 0; i < p->n; i++) {
        seq[i] = batch->seqs ? batch->seqs[i] : batch->seq;
        pos[i] = cache->n_past[seq[i]] + (batch->seqs ? 0 : i);
        p->n_kv = pos[i] >= p->n_kv ? pos[i] + 1 : p->n_kv;
    }
    if (!p->tier->uses_device || ctx->kv.bytes == 0) {
        return; /* nothing is streamed */
    }
    for (int32_t i = 0; i < p->n; i++) {
        sl_kv_pool_mark(cache, seq[i], pos[i], pos[i] + 1);
    }
    sl_kv_pool_take_marked(cache, &ctx->kv_written);
    const int32_t n_sequences = batch->seqs ? p->n : 1;
    for (int32_t i = 0; i < n_sequences; i++) {
        sl_kv_pool_mark(cache, seq[i], 0, pos[batch->seqs ? i : p->n - 1] + 1);
    }
    sl_kv_pool_take_marked(cache, &ctx->kv_in_use);
}

/* As many threads as the phase was given. */
static void limit_threads(const struct sl_context *ctx, int32_t n)
{
    const bool is_short = n <= sl_tier_tokens[SL_N_GRAPH_TIERS - 1];
    const int wanted = is_short ? ctx->n_threads_short : ctx->n_threads_long;
    if (ctx->pool && wanted > 0 && sl_pool_n_threads(ctx->pool) != wanted) {
        sl_pool_limit(ctx->pool, wanted);
    }
}

enum sluice_status sl_pass_run(struct sl_context *ctx, const struct sl_batch *batch,
                               struct sluice_error *err)
{
    const uint64_t start = sl_clock_now_ns();
    const int32_t n = batch->n, t = sl_plan_tier(ctx->plan, n);
    limit_threads(ctx, n);
    struct sl_pass p = {.ctx = ctx,
                        .vt = ctx->device ? ctx->device->vt : NULL,
                        .tier = &ctx->plan->tiers[t],
                        .tokens = batch->tokens,
                        .n = n,
                        .n_outputs = batch->n_outputs,
                        .logits = batch->logits,
                        .last_download = -1,
                        .err = err};
    place_tokens(&p, batch);
    p.n_kv_max = p.n_kv;
    if (sl_pass_uses_graphs(&p)) {
        const int32_t n_ctx = ctx->plan->options.n_ctx;
        const int32_t up = (p.n_kv + SL_GRAPH_KV_STEP - 1) / SL_GRAPH_KV_STEP * SL_GRAPH_KV_STEP;
        p.n_kv_max = up < n_ctx ? up : n_ctx;
    }
    sl_trace_pass_begin(ctx->trace, n, p.n_kv - (batch->seqs ? 1 : n));
    const enum sluice_status status = run_steps(&p);
    sl_trace_pass_end(ctx->trace, t, status == SLUICE_STATUS_OK);
    if (status != SLUICE_STATUS_OK) {
        recover(&p);
        return status;
    }
    for (int32_t i = 0; batch->seqs && i < n; i++) {
        ctx->cache.n_past[batch->seqs[i]]++;
    }
    ctx->cache.n_past[batch->seq] += batch->seqs ? 0 : n;
    count_pass(ctx, &p, t, sl_clock_now_ns() - start);
    return SLUICE_STATUS_OK;
}
