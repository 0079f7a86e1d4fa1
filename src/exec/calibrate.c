/* SPDX-License-Identifier: Apache-2.0
 *
 * Timing the shards of a model (see calibrate.h). Weights are cold: the CPU takes another layer
 * each time, the device has its caches flushed by a copy.
 */
#include "exec/calibrate.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "base/median.h"
#include "base/mem.h"
#include "plan/plan.h"

#define MIB ((size_t)1 << 20)
#define REPEATS 3
#define DEPTH 256 /* cache positions before the pass */
#define MOST_CPU_TOKENS 64
#define MOST_GPU_TOKENS 2048
#define FLUSH_BYTES (64 * MIB)
/* Beyond these something else was measured. */
#define LEAST_FACTOR 0.2
#define MOST_FACTOR 5.0

struct cal {
    struct sl_profile *profile;
    const struct sl_model *model;
    const struct sl_calibrate_options *o;
    const struct sl_cpu_kernels *kernels;
    struct sl_shard_bind bind; /* of the side that is measured */
    /* Host. */
    uint8_t *host;
    float *noise; /* a hidden state */
    int32_t *pos;
    void *scratch;
    /* Device. */
    const struct sl_device_vtable *vt;
    struct sl_stream *stream;
    struct sl_event *start, *stop;
    uint8_t *mem, *image, *d_scratch, *sink;
    struct sluice_error *err;
};

static size_t align_up(size_t n)
{
    return (n + 255) & ~(size_t)255;
}

static int32_t n_tiers_up_to(int32_t most)
{
    int32_t n = 0;
    while (n < SL_N_TIERS && sl_tier_tokens[n] <= most) {
        n++;
    }
    return n;
}

/* The r-th shard of a kind, layers apart so that none is in a cache. */
static const struct sl_shard *shard_of(const struct cal *c, enum sl_shard_kind kind, int r)
{
    const uint32_t n_layers = c->model->hp.n_layers;
    const uint32_t layer = (uint32_t)r * n_layers / (REPEATS + 1) % n_layers;
    return kind == SL_SHARD_HEAD ? &c->model->shards[c->model->n_shards - 1]
                                 : &c->model->shards[2 * layer + (kind == SL_SHARD_FFN)];
}

static size_t kv_bytes(const struct cal *c, int32_t n_tokens)
{
    const size_t n_blocks = ((size_t)DEPTH + (size_t)n_tokens + SL_KV_BLOCK - 1) / SL_KV_BLOCK;
    return n_blocks *
           sl_kv_block_bytes(c->bind.kv.types, c->bind.kv.n_kv_heads, c->bind.kv.head_dim);
}

/* What a pass of n tokens needs beside the weights, in this order. */
struct sizes {
    size_t hidden, workspace, logits, pos, kv, scratch;
};

static struct sizes sizes_of(const struct cal *c, int32_t n)
{
    const struct sl_hparams *const hp = &c->model->hp;
    struct sizes s = {.hidden = align_up((size_t)n * hp->n_embd * sizeof(float)),
                      .logits = align_up(hp->n_vocab * sizeof(float)),
                      .pos = align_up((size_t)n * sizeof(int32_t)),
                      .kv = align_up(kv_bytes(c, n))};
    for (int kind = SL_SHARD_ATTENTION; kind <= SL_SHARD_HEAD; kind++) {
        const struct sl_shard *const shard = shard_of(c, (enum sl_shard_kind)kind, 0);
        const size_t workspace = sl_shard_workspace_bytes(c->model, shard, n, 1);
        const size_t scratch = sl_shard_most_scratch_bytes(c->model, shard, n, 1);
        s.workspace = workspace > s.workspace ? align_up(workspace) : s.workspace;
        s.scratch = scratch > s.scratch ? align_up(scratch) : s.scratch;
    }
    return s;
}

static size_t total_of(const struct sizes *s)
{
    return s->hidden + s->workspace + s->logits + s->pos + s->kv;
}

static void carve(struct cal *c, uint8_t *at, const struct sizes *s)
{
    c->bind.hidden = (float *)(void *)at;
    at += s->hidden;
    c->bind.workspace = at;
    at += s->workspace;
    c->bind.logits = (float *)(void *)at;
    at += s->logits;
    c->bind.pos = (const int32_t *)(const void *)at;
    at += s->pos;
    c->bind.kv.data = at;
}

/* What the machine's profile makes of a list. */
static double expected_ns(const struct cal *c, const struct sl_op *ops, int n_ops,
                          enum sl_unit unit)
{
    double ns = 0;
    int32_t depth = DEPTH;
    for (int i = 0; i < n_ops; i++) {
        ns += sl_profile_op_ns(c->profile, unit, &ops[i], depth);
        depth += ops[i].kind == SL_OP_ATTENTION ? ops[i].n_tokens : 0;
    }
    return ns;
}

static void keep_factor(struct cal *c, enum sl_unit unit, enum sl_shard_kind kind, int32_t tier,
                        double measured_ns, double expected)
{
    const double factor = expected > 0 ? measured_ns / expected : 1;
    c->profile->shard_factor[unit][kind][tier] =
        fmin(MOST_FACTOR, fmax(LEAST_FACTOR, isfinite(factor) ? factor : 1));
}

/* Tiers beyond the last measured one. */
static void extend(struct cal *c, enum sl_unit unit, int32_t n_measured)
{
    for (int kind = 0; kind < SL_N_SHARD_KINDS && n_measured > 0; kind++) {
        double *const factor = c->profile->shard_factor[unit][kind];
        for (int32_t t = n_measured; t < SL_N_TIERS; t++) {
            factor[t] = factor[n_measured - 1];
        }
    }
}

static void set_pass(struct cal *c, int32_t n)
{
    c->bind.n_tokens = n;
    c->bind.n_outputs = 1;
    c->bind.n_kv_max = DEPTH + n;
}

/* ---- CPU ---- */

static void bind_host_weights(struct cal *c, const struct sl_shard *shard)
{
    memset(c->bind.weights, 0, sizeof c->bind.weights);
    for (uint32_t w = 0; w < shard->n_weights; w++) {
        c->bind.weights[w] = shard->weights[w].name ? shard->weights[w].m.data : NULL;
    }
}

static void calibrate_cpu_tier(struct cal *c, enum sl_shard_kind kind, int32_t tier)
{
    const int32_t n = sl_tier_tokens[tier];
    const size_t hidden_bytes = (size_t)n * c->model->hp.n_embd * sizeof(float);
    double ns[REPEATS] = {0}, expected = 0;
    struct sl_op ops[SL_SHARD_MAX_OPS];
    set_pass(c, n);
    for (int r = -1; r < REPEATS; r++) { /* the first one wakes the pool and faults pages in */
        const struct sl_shard *const shard = shard_of(c, kind, r + 1);
        bind_host_weights(c, shard);
        memcpy(c->bind.hidden, c->noise, hidden_bytes);
        const int n_ops = sl_shard_build(c->model, shard, &c->bind, ops);
        const uint64_t begin = sl_clock_now_ns();
        sl_cpu_run(c->kernels, c->o->pool, ops, n_ops, c->scratch);
        if (r >= 0) {
            ns[r] = (double)(sl_clock_now_ns() - begin);
        }
        expected = expected_ns(c, ops, n_ops, SL_UNIT_CPU);
    }
    keep_factor(c, SL_UNIT_CPU, kind, tier, sl_median(ns, REPEATS), expected);
}

static enum sluice_status calibrate_cpu(struct cal *c)
{
    const int32_t n_tiers = n_tiers_up_to(MOST_CPU_TOKENS);
    const int32_t most = sl_tier_tokens[n_tiers - 1];
    const struct sizes s = sizes_of(c, most);
    const int n_threads = c->o->pool ? sl_pool_n_threads(c->o->pool) : 1;
    c->host = sl_alloc_aligned(SL_MEM_EXEC, total_of(&s), 4096);
    c->scratch = sl_alloc_aligned(SL_MEM_EXEC, sl_cpu_scratch_bytes(s.scratch, n_threads), 4096);
    SL_CHECK(c->host && c->scratch, OUT_OF_MEMORY, c->err, "no memory to time the model");
    memset(c->host, 0, total_of(&s));
    carve(c, c->host, &s);
    memcpy((void *)(uintptr_t)c->bind.pos, c->pos, (size_t)most * sizeof(int32_t));
    c->bind.consts = c->model->consts;
    for (int kind = SL_SHARD_ATTENTION; kind <= SL_SHARD_HEAD; kind++) {
        for (int32_t t = 0; t < n_tiers; t++) {
            calibrate_cpu_tier(c, (enum sl_shard_kind)kind, t);
        }
    }
    extend(c, SL_UNIT_CPU, n_tiers);
    for (int kind = 0; kind < SL_N_SHARD_KINDS; kind++) {
        memcpy(c->profile->shard_factor[SL_UNIT_CPU_BUSY][kind],
               c->profile->shard_factor[SL_UNIT_CPU][kind],
               sizeof c->profile->shard_factor[SL_UNIT_CPU][kind]);
    }
    return SLUICE_STATUS_OK;
}

/* ---- device ---- */

static size_t largest_image(const struct cal *c)
{
    size_t most = 0;
    for (int kind = SL_SHARD_ATTENTION; kind <= SL_SHARD_HEAD; kind++) {
        const size_t bytes = shard_of(c, (enum sl_shard_kind)kind, 0)->bytes;
        most = bytes > most ? bytes : most;
    }
    return align_up(most);
}

static enum sluice_status upload(struct cal *c, void *to, const void *from, size_t bytes)
{
    SL_TRY(c->vt->copy_to_device(c->o->device, c->stream, to, from, bytes, c->err));
    return c->vt->stream_sync(c->o->device, c->stream, c->err);
}

static enum sluice_status upload_image(struct cal *c, const struct sl_shard *shard)
{
    memset(c->bind.weights, 0, sizeof c->bind.weights);
    for (uint32_t w = 0; w < shard->n_weights; w++) {
        const struct sl_weight *const weight = &shard->weights[w];
        if (weight->name) {
            SL_TRY(upload(c, c->image + weight->offset, weight->m.data, weight->bytes));
            c->bind.weights[w] = c->image + weight->offset;
        }
    }
    return SLUICE_STATUS_OK;
}

/* Short passes are replayed as graphs. */
static enum sluice_status record(struct cal *c, const struct sl_op *ops, int n_ops,
                                 struct sl_graph **out)
{
    struct sl_device *const dev = c->o->device;
    *out = NULL;
    if (!c->vt->graph_begin || c->bind.n_tokens > sl_tier_tokens[SL_N_GRAPH_TIERS - 1]) {
        return SLUICE_STATUS_OK;
    }
    SL_TRY(c->vt->graph_begin(dev, c->stream, c->err));
    const enum sluice_status queued = c->vt->run(dev, c->stream, ops, n_ops, c->d_scratch, c->err);
    const enum sluice_status ended = c->vt->graph_end(dev, c->stream, out, c->err);
    SL_TRY(queued);
    return ended;
}

static enum sluice_status time_gpu(struct cal *c, const struct sl_op *ops, int n_ops,
                                   struct sl_graph *graph, double *out)
{
    struct sl_device *const dev = c->o->device;
    double ns[REPEATS];
    for (int r = -1; r < REPEATS; r++) {
        SL_TRY(c->vt->copy_on_device(dev, c->stream, c->sink, c->sink + FLUSH_BYTES, FLUSH_BYTES,
                                     c->err));
        SL_TRY(c->vt->event_record(dev, c->start, c->stream, c->err));
        SL_TRY(graph ? c->vt->graph_launch(dev, c->stream, graph, c->err)
                     : c->vt->run(dev, c->stream, ops, n_ops, c->d_scratch, c->err));
        SL_TRY(c->vt->event_record(dev, c->stop, c->stream, c->err));
        SL_TRY(c->vt->stream_sync(dev, c->stream, c->err));
        uint64_t elapsed = 0;
        SL_TRY(c->vt->event_elapsed(dev, c->start, c->stop, &elapsed, c->err));
        if (r >= 0) {
            ns[r] = (double)elapsed;
        }
    }
    *out = sl_median(ns, REPEATS);
    return SLUICE_STATUS_OK;
}

static enum sluice_status calibrate_gpu_tier(struct cal *c, enum sl_shard_kind kind, int32_t tier)
{
    const int32_t n = sl_tier_tokens[tier];
    struct sl_op ops[SL_SHARD_MAX_OPS];
    struct sl_graph *graph = NULL;
    double ns = 0;
    set_pass(c, n);
    SL_TRY(upload(c, c->bind.hidden, c->noise, (size_t)n * c->model->hp.n_embd * sizeof(float)));
    const int n_ops = sl_shard_build(c->model, shard_of(c, kind, 0), &c->bind, ops);
    enum sluice_status status = record(c, ops, n_ops, &graph);
    if (status == SLUICE_STATUS_OK) {
        status = time_gpu(c, ops, n_ops, graph, &ns);
    }
    if (graph) {
        c->vt->graph_destroy(c->o->device, graph);
    }
    SL_TRY(status);
    keep_factor(c, SL_UNIT_GPU, kind, tier, ns, expected_ns(c, ops, n_ops, SL_UNIT_GPU));
    return SLUICE_STATUS_OK;
}

static enum sluice_status init_device(struct cal *c, int32_t *n_tiers)
{
    struct sl_device *const dev = c->o->device;
    const size_t fixed = largest_image(c) + align_up(c->model->consts_bytes) + 2 * FLUSH_BYTES;
    struct sizes s = {0};
    for (*n_tiers = n_tiers_up_to(MOST_GPU_TOKENS); *n_tiers > 0; --*n_tiers) {
        s = sizes_of(c, sl_tier_tokens[*n_tiers - 1]);
        if (fixed + total_of(&s) + s.scratch <= c->o->budget_bytes) {
            break;
        }
    }
    if (*n_tiers == 0) {
        return SLUICE_STATUS_OK;
    }
    void *mem = NULL;
    const size_t others = total_of(&s);
    SL_TRY(c->vt->mem_alloc(dev, fixed + others + s.scratch, &mem, c->err));
    c->mem = mem;
    c->image = c->mem;
    c->sink = c->image + largest_image(c);
    c->bind.consts = (const float *)(const void *)(c->sink + 2 * FLUSH_BYTES);
    uint8_t *const rest = c->mem + fixed;
    c->d_scratch = rest + others;
    SL_TRY(c->vt->stream_create(dev, &c->stream, c->err));
    SL_TRY(c->vt->event_create(dev, true, &c->start, c->err));
    SL_TRY(c->vt->event_create(dev, true, &c->stop, c->err));
    carve(c, rest, &s);
    SL_TRY(upload(c, (void *)(uintptr_t)c->bind.consts, c->model->consts, c->model->consts_bytes));
    SL_TRY(upload(c, (void *)(uintptr_t)c->bind.pos, c->pos,
                  (size_t)sl_tier_tokens[*n_tiers - 1] * sizeof(int32_t)));
    void *const zeros = sl_calloc(SL_MEM_EXEC, 1, s.kv);
    SL_CHECK(zeros, OUT_OF_MEMORY, c->err, "no memory to time the model");
    const enum sluice_status status = upload(c, c->bind.kv.data, zeros, s.kv);
    sl_free(zeros);
    return status;
}

static enum sluice_status calibrate_gpu(struct cal *c)
{
    int32_t n_tiers = 0;
    SL_TRY(init_device(c, &n_tiers));
    for (int kind = SL_SHARD_ATTENTION; kind <= SL_SHARD_HEAD && n_tiers > 0; kind++) {
        SL_TRY(upload_image(c, shard_of(c, (enum sl_shard_kind)kind, 0)));
        for (int32_t t = 0; t < n_tiers; t++) {
            SL_TRY(calibrate_gpu_tier(c, (enum sl_shard_kind)kind, t));
        }
    }
    extend(c, SL_UNIT_GPU, n_tiers);
    return SLUICE_STATUS_OK;
}

static void finish(struct cal *c)
{
    if (c->vt) {
        struct sl_device *const dev = c->o->device;
        if (c->stream) {
            c->vt->stream_sync(dev, c->stream, NULL);
            c->vt->stream_destroy(dev, c->stream);
        }
        if (c->start) {
            c->vt->event_destroy(dev, c->start);
        }
        if (c->stop) {
            c->vt->event_destroy(dev, c->stop);
        }
        if (c->mem) {
            c->vt->mem_free(dev, c->mem);
        }
    }
    sl_free(c->host);
    sl_free(c->noise);
    sl_free(c->pos);
    sl_free(c->scratch);
}

/* A hidden state of rows that differ, or a mixture would send all to the same experts. */
static enum sluice_status init_inputs(struct cal *c)
{
    const size_t n = (size_t)MOST_GPU_TOKENS * c->model->hp.n_embd;
    c->noise = sl_alloc(SL_MEM_EXEC, n * sizeof *c->noise);
    c->pos = sl_alloc(SL_MEM_EXEC, MOST_GPU_TOKENS * sizeof *c->pos);
    SL_CHECK(c->noise && c->pos, OUT_OF_MEMORY, c->err, "no memory to time the model");
    uint64_t state = 0x9e3779b97f4a7c15u;
    for (size_t i = 0; i < n; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        c->noise[i] = (float)((double)(state >> 40) / (1 << 24) - 0.5) * 3.0f;
    }
    for (int32_t i = 0; i < MOST_GPU_TOKENS; i++) {
        c->pos[i] = DEPTH + i;
    }
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_calibrate_run(struct sl_profile *profile, const struct sl_model *model,
                                    const struct sl_calibrate_options *options,
                                    struct sluice_error *err)
{
    struct cal c = {.profile = profile,
                    .model = model,
                    .o = options,
                    .kernels = options->kernels ? options->kernels : sl_cpu_kernels(sl_cpu_level()),
                    .vt = options->device ? options->device->vt : NULL,
                    .err = err};
    c.bind.kv = (struct sl_kv_view){.types = {SL_TYPE_F16, SL_TYPE_F16},
                                    .n_kv_heads = (int32_t)model->hp.n_kv_heads,
                                    .head_dim = (int32_t)model->hp.head_dim};
    enum sluice_status status = SLUICE_STATUS_OK;
    sl_profile_clear_factors(profile);
    SL_TRY_OUT(init_inputs(&c));
    SL_TRY_OUT(calibrate_cpu(&c));
    if (options->device) {
        SL_TRY_OUT(calibrate_gpu(&c));
    }
out:
    finish(&c);
    if (status != SLUICE_STATUS_OK) {
        sl_profile_clear_factors(profile);
    }
    return status;
}

/* Where the profile of this model on this machine, as it was measured last, is kept. */
static enum sluice_status kept_path(const struct sl_profile *p, const struct sl_model *model,
                                    char **out)
{
    char key[256], name[64];
    const char *const path = sl_gguf_path(model->file, 0);
    const char *const slash = strrchr(path, '/');
    snprintf(key, sizeof key, "%.80s|%.100s|%zu|%u|%.3g|%.3g|%.3g", p->cpu,
             slash ? slash + 1 : path, model->weight_bytes, model->n_shards, p->vram_bytes_per_s,
             p->dram_bytes_per_s, p->hop_ns);
    sl_profile_file_name(name, sizeof name, p->kind, p->gpu, key, p->n_threads);
    return sl_file_cache_path(name, out, NULL);
}

/* Take the factors of a kept profile. */
static bool load(struct sl_profile *profile, const char *path)
{
    struct sl_profile kept;
    if (!sl_file_exists(path) || sl_profile_load(&kept, path, NULL) != SLUICE_STATUS_OK) {
        return false;
    }
    memcpy(profile->shard_factor, kept.shard_factor, sizeof kept.shard_factor);
    return true;
}

void sl_calibrate_load(struct sl_profile *profile, const struct sl_model *model)
{
    char *path = NULL;
    if (kept_path(profile, model, &path) == SLUICE_STATUS_OK) {
        (void)load(profile, path);
    }
    sl_free(path);
}

void sl_calibrate_get(struct sl_profile *profile, const struct sl_model *model,
                      const struct sl_calibrate_options *options)
{
    if (options->device && options->device->kind == SL_DEVICE_SIM) {
        return;
    }
    char *path = NULL;
    const bool can_keep = kept_path(profile, model, &path) == SLUICE_STATUS_OK;
    enum sluice_status status = SLUICE_STATUS_OK;
    if (!can_keep || !load(profile, path)) {
        struct sluice_error ignored;
        status = sl_calibrate_run(profile, model, options, &ignored);
        if (status == SLUICE_STATUS_OK && can_keep) {
            status = sl_profile_save(profile, path, &ignored);
        }
        if (status != SLUICE_STATUS_OK) {
            sl_log(SL_LOG_WARN, "predictions are those of the machine's profile alone: %s",
                   ignored.message);
        }
    }
    sl_free(path);
}
