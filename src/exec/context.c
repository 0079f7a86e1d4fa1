/* SPDX-License-Identifier: Apache-2.0
 *
 * Life cycle of a context: everything is planned first, then allocated once; the token path
 * (sequence.c, pass.c) allocates nothing.
 */
#include "exec/context.h"

#include <limits.h>
#include <string.h>

#include "base/error.h"
#include "base/mem.h"
#include "exec/context_internal.h"
#include "exec/experts.h"

#define HOST_ALIGN 64

static size_t max_size(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* Page-locked when there is a device and its quota allows, plain memory otherwise. */
enum sluice_status sl_host_buffer_init(struct sl_context *ctx, struct sl_host_buffer *buffer,
                                       size_t bytes, const char *what, struct sluice_error *err)
{
    buffer->bytes = bytes;
    if (bytes == 0) {
        return SLUICE_STATUS_OK;
    }
    if (ctx->device &&
        ctx->device->vt->host_alloc(ctx->device, bytes, &buffer->data, NULL) == SLUICE_STATUS_OK) {
        buffer->locked = true;
        ctx->stats.locked_bytes += bytes;
        return SLUICE_STATUS_OK;
    }
    buffer->data = sl_alloc_aligned(SL_MEM_EXEC, bytes, HOST_ALIGN);
    SL_CHECK(buffer->data, OUT_OF_MEMORY, err, "no memory for %s (%zu MiB)", what, bytes >> 20);
    return SLUICE_STATUS_OK;
}

void sl_host_buffer_finish(struct sl_context *ctx, struct sl_host_buffer *buffer)
{
    if (buffer->locked) {
        ctx->device->vt->host_free(ctx->device, buffer->data);
    } else {
        sl_free(buffer->data);
    }
    memset(buffer, 0, sizeof *buffer);
}

static void drop_segments(struct sl_context *ctx, int32_t t)
{
    for (int32_t k = 0; ctx->segments[t] && k < ctx->plan->tiers[t].n_steps; k++) {
        if (ctx->segments[t][k].graph) {
            ctx->device->vt->graph_destroy(ctx->device, ctx->segments[t][k].graph);
        }
    }
    sl_free(ctx->segments[t]);
    ctx->segments[t] = NULL;
}

bool sl_context_set_segments(struct sl_context *ctx, int32_t tier, int32_t n_steps)
{
    if (!ctx->segments[tier]) {
        return true; /* no graphs here */
    }
    struct sl_segment *const segments = sl_calloc(SL_MEM_EXEC, (size_t)n_steps, sizeof *segments);
    if (!segments) {
        return false;
    }
    drop_segments(ctx, tier);
    ctx->segments[tier] = segments;
    return true;
}

/* Graphs need a device that has them and host buffers that the GPU can reach by itself. */
static enum sluice_status init_segments(struct sl_context *ctx, struct sluice_error *err)
{
    const bool locked =
        ctx->hidden.locked && ctx->logits.locked && (ctx->choice.locked || ctx->choice.bytes == 0);
    if (!ctx->device || !ctx->device->vt->graph_begin || !locked) {
        return SLUICE_STATUS_OK;
    }
    for (int32_t t = 0; t < ctx->plan->n_tiers && t < SL_N_GRAPH_TIERS; t++) {
        ctx->segments[t] =
            sl_calloc(SL_MEM_EXEC, (size_t)ctx->plan->tiers[t].n_steps, sizeof *ctx->segments[t]);
        SL_CHECK(ctx->segments[t], OUT_OF_MEMORY, err, "no memory for the context");
    }
    return SLUICE_STATUS_OK;
}

size_t sl_context_exchange_bytes(const struct sl_context *ctx, const struct sl_tier_plan *tier,
                                 bool any)
{
    const struct sl_model *const model = ctx->model;
    const int32_t n_out = ctx->plan->options.max_outputs;
    size_t bytes = 0;
    for (int32_t i = 0; i < ctx->plan->n_shards; i++) {
        const struct sl_shard *const shard = &model->shards[i];
        const bool can_share = sl_shard_can_share(model, shard, ctx->plan->split);
        if (sl_place_is_shared(tier->placement[i]) || (any && can_share)) {
            const bool head = shard->kind == SL_SHARD_HEAD && n_out < tier->n_tokens;
            const struct sl_shard_choice choice =
                sl_shard_choice(model, shard, ctx->plan->split, head ? n_out : tier->n_tokens);
            bytes = max_size(bytes, choice.bytes);
        }
    }
    return bytes;
}

/* Host side of what shared shards exchange with the device. Plans of generation may come to share
 * what they do not at first. */
static enum sluice_status init_shared_buffer(struct sl_context *ctx, struct sluice_error *err)
{
    size_t bytes = 0;
    for (int32_t t = 0; t < ctx->plan->n_tiers && ctx->device; t++) {
        bytes = max_size(
            bytes, sl_context_exchange_bytes(ctx, &ctx->plan->tiers[t], t < SL_N_GRAPH_TIERS));
    }
    if (bytes == 0) {
        return SLUICE_STATUS_OK;
    }
    SL_TRY(sl_host_buffer_init(ctx, &ctx->choice, bytes, "what GPU and CPU exchange", err));
    struct sl_device_info info;
    SL_TRY(ctx->device->vt->info(ctx->device, &info, err));
    ctx->choice_is_mapped = ctx->choice.locked && info.reads_host_memory;
    return SLUICE_STATUS_OK;
}

/* Tables of a mixture's experts. */
static enum sluice_status init_mixture(struct sl_context *ctx, const float *uses,
                                       struct sluice_error *err)
{
    const struct sl_plan *const plan = ctx->plan;
    if (!ctx->device || plan->layer_tables_bytes == 0) {
        return SLUICE_STATUS_OK;
    }
    SL_TRY(sl_host_buffer_init(ctx, &ctx->tables,
                               ctx->model->hp.n_layers * plan->layer_tables_bytes,
                               "tables of experts", err));
    return sl_experts_init(ctx, uses, err);
}

/* The cache of layers that have it in system memory, and the table of its blocks. */
static enum sluice_status init_cache(struct sl_context *ctx, struct sluice_error *err)
{
    const struct sl_plan *const plan = ctx->plan;
    const size_t n_layers = ctx->model->hp.n_layers - (size_t)sl_plan_first_host_kv(plan);
    SL_TRY(sl_host_buffer_init(ctx, &ctx->kv, n_layers * plan->kv_host_layer_bytes, "the KV cache",
                               err));
    if (ctx->kv.bytes > 0) {
        memset(ctx->kv.data, 0, ctx->kv.bytes);
    }
    ctx->stats.host_kv_bytes = ctx->kv.bytes;
    const int32_t n_seqs = plan->options.n_seqs;
    const int32_t n_blocks = sl_kv_pool_blocks(plan->options.n_ctx);
    SL_TRY(sl_host_buffer_init(ctx, &ctx->kv_table,
                               (size_t)n_seqs * (size_t)n_blocks * sizeof(int32_t),
                               "the table of the KV cache", err));
    SL_TRY(sl_kv_pool_init(&ctx->cache, n_seqs, n_blocks, ctx->kv_table.data, err));
    SL_TRY(sl_kv_runs_init(&ctx->kv_in_use, &ctx->cache, err));
    return sl_kv_runs_init(&ctx->kv_written, &ctx->cache, err);
}

static enum sluice_status init_host(struct sl_context *ctx, const float *uses,
                                    struct sluice_error *err)
{
    const struct sl_model *const model = ctx->model;
    const struct sl_plan *const plan = ctx->plan;
    const size_t n = (size_t)plan->n_ubatch;
    const int32_t n_out = plan->options.max_outputs;
    const int32_t n_most = n_out < plan->n_ubatch ? n_out : plan->n_ubatch; /* of one pass */
    size_t workspace = 0, scratch = 0;
    for (uint32_t i = 0; i < model->n_shards; i++) {
        const struct sl_shard *const shard = &model->shards[i];
        workspace =
            max_size(workspace, sl_shard_workspace_bytes(model, shard, plan->n_ubatch, n_most));
        scratch =
            max_size(scratch, sl_shard_most_scratch_bytes(model, shard, plan->n_ubatch, n_most));
    }
    scratch = sl_cpu_scratch_bytes(scratch, ctx->pool ? sl_pool_n_threads(ctx->pool) : 1);
    ctx->workspace = sl_alloc_aligned(SL_MEM_EXEC, workspace, 256);
    ctx->scratch = sl_alloc_aligned(SL_MEM_EXEC, scratch, 256);
    SL_CHECK(ctx->workspace && ctx->scratch, OUT_OF_MEMORY, err,
             "no memory for activations (%zu MiB)", (workspace + scratch) >> 20);
    SL_TRY(sl_host_buffer_init(ctx, &ctx->hidden, n * model->hp.n_embd * sizeof(float),
                               "the hidden state", err));
    SL_TRY(sl_host_buffer_init(ctx, &ctx->io, 2 * n * sizeof(int32_t), "positions", err));
    SL_TRY(sl_host_buffer_init(ctx, &ctx->logits, (size_t)n_out * model->hp.n_vocab * sizeof(float),
                               "logits", err));
    SL_TRY(init_cache(ctx, err));
    SL_TRY(init_shared_buffer(ctx, err));
    return init_mixture(ctx, uses, err);
}

/* Page-lock the file mappings. A refusal is normal: those copies go through the device's staging.
 */
static enum sluice_status register_files(struct sl_context *ctx, struct sluice_error *err)
{
    const struct sl_gguf *const file = ctx->model->file;
    const size_t n_files = sl_gguf_n_files(file);
    ctx->registered = sl_calloc(SL_MEM_EXEC, n_files, sizeof *ctx->registered);
    SL_CHECK(ctx->registered, OUT_OF_MEMORY, err, "no memory for the context");
    bool all = true;
    for (size_t i = 0; i < n_files; i++) {
        size_t bytes = 0;
        const void *const mapping = sl_gguf_mapping(file, i, &bytes);
        ctx->registered[i] = ctx->device->vt->host_register(ctx->device, mapping, bytes, true,
                                                            NULL) == SLUICE_STATUS_OK;
        ctx->stats.locked_bytes += ctx->registered[i] ? bytes : 0;
        all = all && ctx->registered[i];
    }
    struct sl_device_info info;
    SL_TRY(ctx->device->vt->info(ctx->device, &info, err));
    ctx->files_are_mapped = all && info.reads_host_memory;
    return SLUICE_STATUS_OK;
}

static void unregister_files(struct sl_context *ctx)
{
    for (size_t i = 0; ctx->registered && i < sl_gguf_n_files(ctx->model->file); i++) {
        if (ctx->registered[i]) {
            size_t bytes = 0;
            const void *const mapping = sl_gguf_mapping(ctx->model->file, i, &bytes);
            ctx->device->vt->host_unregister(ctx->device, mapping);
        }
    }
    sl_free(ctx->registered);
    ctx->registered = NULL;
    ctx->stats.locked_bytes = 0;
}

static enum sluice_status init_events(struct sl_context *ctx, struct sluice_error *err)
{
    const size_t n = ctx->model->n_shards;
    const struct sl_device_vtable *const vt = ctx->device->vt;
    ctx->ready = sl_calloc(SL_MEM_EXEC, n, sizeof(struct sl_event *));
    ctx->done = sl_calloc(SL_MEM_EXEC, n, sizeof(struct sl_event *));
    ctx->downloaded = sl_calloc(SL_MEM_EXEC, n, sizeof(struct sl_event *));
    ctx->pending = sl_calloc(SL_MEM_EXEC, n, sizeof *ctx->pending);
    SL_CHECK(ctx->ready && ctx->done && ctx->downloaded && ctx->pending, OUT_OF_MEMORY, err,
             "no memory for the context");
    for (size_t i = 0; i < n; i++) {
        SL_TRY(vt->event_create(ctx->device, false, &ctx->ready[i], err));
        SL_TRY(vt->event_create(ctx->device, false, &ctx->done[i], err));
        SL_TRY(vt->event_create(ctx->device, false, &ctx->downloaded[i], err));
    }
    SL_TRY(vt->event_create(ctx->device, false, &ctx->hidden_event, err));
    SL_TRY(vt->stream_create(ctx->device, SL_STREAM_OPERATORS, &ctx->compute, err));
    SL_TRY(vt->stream_create(ctx->device, SL_STREAM_COPIES, &ctx->copy, err));
    return vt->stream_create(ctx->device, SL_STREAM_COPIES, &ctx->download, err);
}

/* Cells that were never written are masked, but must not hold NaN: 0 * NaN is NaN. */
static enum sluice_status clear_device_kv(struct sl_context *ctx, struct sluice_error *err)
{
    const struct sl_plan *const plan = ctx->plan;
    const size_t bytes = (size_t)plan->n_kv_layers * plan->kv_layer_bytes;
    const size_t piece = bytes < (16u << 20) ? bytes : (16u << 20);
    if (bytes == 0) {
        return SLUICE_STATUS_OK;
    }
    void *const zeros = sl_calloc(SL_MEM_EXEC, 1, piece);
    SL_CHECK(zeros, OUT_OF_MEMORY, err, "no memory to clear the KV cache");
    enum sluice_status status = SLUICE_STATUS_OK;
    for (size_t at = 0; at < bytes && status == SLUICE_STATUS_OK; at += piece) {
        const size_t n = bytes - at < piece ? bytes - at : piece;
        status = ctx->device->vt->copy_to_device(ctx->device, ctx->compute,
                                                 ctx->arena + plan->kv_offset + at, zeros, n, err);
    }
    if (status == SLUICE_STATUS_OK) {
        status = ctx->device->vt->stream_sync(ctx->device, ctx->compute, err);
    } else {
        ctx->device->vt->stream_sync(ctx->device, ctx->compute, NULL);
    }
    sl_free(zeros);
    return status;
}

/* Everything of the plan that lives in VRAM, in one allocation; consts go up at once. */
static enum sluice_status init_device(struct sl_context *ctx, struct sluice_error *err)
{
    const struct sl_device_vtable *const vt = ctx->device->vt;
    const struct sl_plan *const plan = ctx->plan;
    void *arena = NULL;
    SL_TRY(vt->mem_alloc(ctx->device, plan->arena_bytes, &arena, err));
    ctx->arena = arena;
    ctx->stats.arena_bytes = plan->arena_bytes;
    SL_TRY(init_events(ctx, err));
    SL_TRY(vt->copy_to_device(ctx->device, ctx->compute, ctx->arena + plan->consts_offset,
                              ctx->model->consts, ctx->model->consts_bytes, err));
    SL_TRY(vt->stream_sync(ctx->device, ctx->compute, err));
    return clear_device_kv(ctx, err);
}

static void finish_device(struct sl_context *ctx)
{
    const struct sl_device_vtable *const vt = ctx->device->vt;
    struct sl_stream *const streams[] = {ctx->compute, ctx->copy, ctx->download};
    for (size_t i = 0; i < sizeof streams / sizeof streams[0]; i++) {
        if (streams[i]) {
            vt->stream_sync(ctx->device, streams[i], NULL);
        }
    }
    struct sl_event **const lists[] = {ctx->ready, ctx->done, ctx->downloaded};
    for (size_t k = 0; k < sizeof lists / sizeof lists[0]; k++) {
        for (size_t i = 0; lists[k] && i < ctx->model->n_shards; i++) {
            if (lists[k][i]) {
                vt->event_destroy(ctx->device, lists[k][i]);
            }
        }
        sl_free(lists[k]);
    }
    if (ctx->hidden_event) {
        vt->event_destroy(ctx->device, ctx->hidden_event);
    }
    for (size_t i = 0; i < sizeof streams / sizeof streams[0]; i++) {
        if (streams[i]) {
            vt->stream_destroy(ctx->device, streams[i]);
        }
    }
    for (int32_t t = 0; t < SL_N_GRAPH_TIERS; t++) {
        drop_segments(ctx, t);
    }
    sl_experts_finish(ctx);
    unregister_files(ctx);
    sl_free(ctx->pending);
    if (ctx->arena) {
        vt->mem_free(ctx->device, ctx->arena);
    }
}

void sl_context_destroy(struct sl_context **ctx)
{
    if (!ctx || !*ctx) {
        return;
    }
    struct sl_context *const c = *ctx;
    *ctx = NULL;
    sl_trace_detach(c->trace);
    if (c->device) {
        finish_device(c);
    }
    sl_host_buffer_finish(c, &c->hidden);
    sl_host_buffer_finish(c, &c->io);
    sl_host_buffer_finish(c, &c->logits);
    sl_host_buffer_finish(c, &c->kv);
    sl_kv_pool_finish(&c->cache);
    sl_kv_runs_finish(&c->kv_in_use);
    sl_kv_runs_finish(&c->kv_written);
    sl_host_buffer_finish(c, &c->kv_table);
    sl_host_buffer_finish(c, &c->choice);
    sl_host_buffer_finish(c, &c->tables);
    sl_free(c->workspace);
    sl_free(c->scratch);
    sl_adapt_finish(c);
    sl_plan_destroy(&c->plan);
    sl_free(c);
}

/* Files are page-locked first: a plan may have the GPU read them in place. */
static enum sluice_status make_plan(struct sl_context *ctx, const struct sl_profile *measured,
                                    const struct sl_plan_options *options, struct sluice_error *err)
{
    struct sl_profile profile = *measured;
    if (ctx->device && options->budget_bytes > 0) {
        SL_TRY(register_files(ctx, err));
        if (!ctx->files_are_mapped) {
            profile.mapped_bytes_per_s = profile.mapped_tiles_bytes_per_s = 0;
        }
    }
    SL_TRY(sl_plan_create(&ctx->plan, ctx->model, &profile, options, err));
    if (ctx->plan->arena_bytes == 0 && ctx->device) {
        unregister_files(ctx); /* nothing runs on the device */
        ctx->device = NULL;
    }
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_context_create(struct sl_context **out, const struct sl_model *model,
                                     const struct sl_context_options *options,
                                     struct sluice_error *err)
{
    *out = NULL;
    struct sl_context *ctx = sl_calloc(SL_MEM_EXEC, 1, sizeof *ctx);
    SL_CHECK(ctx, OUT_OF_MEMORY, err, "no memory for a context");
    ctx->model = model;
    ctx->pool = options->pool;
    ctx->n_threads_short = options->n_threads_short;
    ctx->n_threads_long = options->n_threads_long;
    if (ctx->pool && (ctx->n_threads_short > 0 || ctx->n_threads_long > 0)) {
        sl_pool_limit(ctx->pool, INT_MAX); /* scratch is for all of them */
    }
    ctx->kernels = options->kernels ? options->kernels : sl_cpu_kernels(sl_cpu_level());
    ctx->cancelled = options->cancelled;
    ctx->cancelled_user = options->cancelled_user;
    enum sluice_status status = SLUICE_STATUS_OK;
    struct sl_plan_options plan_options = options->plan;
    if (!options->device) {
        plan_options.budget_bytes = 0;
    }
    ctx->device = options->device;
    SL_TRY_OUT(make_plan(ctx, options->profile, &plan_options, err));
    if (ctx->device) {
        SL_TRY_OUT(init_device(ctx, err));
    }
    SL_TRY_OUT(init_host(ctx, options->plan.expert_uses, err));
    SL_TRY_OUT(init_segments(ctx, err));
    sl_adapt_init(ctx, options->profile);
    ctx->adapt.on = options->adapt && !options->trace && plan_options.strategy == SL_STRATEGY_AUTO;
    if (options->trace) {
        struct sl_stream *const streams[] = {ctx->compute, ctx->copy, ctx->download};
        ctx->trace = options->trace;
        SL_TRY_OUT(sl_trace_attach(ctx->trace, ctx->plan, ctx->device, streams, err));
    }
    *out = ctx;
    return SLUICE_STATUS_OK;
out:
    sl_context_destroy(&ctx);
    return status;
}

float *sl_context_logits(struct sl_context *ctx)
{
    return ctx->logits.data;
}

bool sl_context_is_settled(const struct sl_context *ctx, int32_t n)
{
    return !ctx->adapt.on || ctx->adapt.tiers[sl_plan_tier(ctx->plan, n)].settled;
}

void sl_context_settle(struct sl_context *ctx)
{
    sl_adapt_settle(ctx);
}

void sl_context_freeze(struct sl_context *ctx)
{
    sl_adapt_settle(ctx);
    ctx->adapt.on = false;
}

bool sl_context_exchange_tier(struct sl_context *ctx, int32_t tier, struct sl_tier_plan *next,
                              struct sl_tier_plan *old)
{
    return sl_adapt_exchange(ctx, tier, next, old);
}

const struct sl_profile *sl_context_profile(const struct sl_context *ctx)
{
    return &ctx->adapt.profile;
}

const struct sl_plan *sl_context_plan(const struct sl_context *ctx)
{
    return ctx->plan;
}

void sl_context_get_stats(const struct sl_context *ctx, struct sl_context_stats *out)
{
    *out = ctx->stats;
}
