/* SPDX-License-Identifier: Apache-2.0
 *
 * Opening what the model commands share (see engine.h).
 */
#include "cli/engine.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "base/mem.h"
#include "cli/progress.h"
#include "exec/calibrate.h"
#include "exec/uses.h"

/* Kept free of the card under --vram auto, for the desktop and what is opened later. */
#define AUTO_MARGIN_BYTES (UINT64_C(512) << 20)
#define DEFAULT_OUTPUTS 1
#define CALIBRATION_LOAD_NS 50e6 /* enough for a GPU to reach the limit of its power */
/* What an earlier run saw of the GPU (cache folder): name, total, free and context bytes. */
#define DESCRIPTION_FILE "gpu.txt"
#define DESCRIPTION_FORMAT "sluice-gpu 1\n%s\n%llu %llu %llu\n"

static enum sluice_status open_gpu(struct sl_engine *e, const char *name, struct sluice_error *err)
{
    if (strcmp(name, "cpu") == 0) {
        return SLUICE_STATUS_OK;
    }
    if (strcmp(name, "sim") == 0) {
        return sl_device_sim_create(&e->device, NULL, err);
    }
    const enum sluice_status status = sl_device_cuda_create(&e->device, 0, err);
    if (status != SLUICE_STATUS_OK && strcmp(name, "auto") == 0) {
        sl_log(SL_LOG_INFO, "running on the CPU: %s", err ? err->message : "no GPU");
        return SLUICE_STATUS_OK;
    }
    return status;
}

/* Keep the description of the GPU; not being able to is no error. */
static void save_description(const struct sl_device_info *info)
{
    char text[256];
    char *path = NULL;
    const int n = snprintf(
        text, sizeof text, DESCRIPTION_FORMAT, info->name, (unsigned long long)info->total_bytes,
        (unsigned long long)info->free_bytes, (unsigned long long)info->context_bytes);
    if (sl_file_cache_path(DESCRIPTION_FILE, &path, NULL) == SLUICE_STATUS_OK) {
        (void)sl_file_write(path, text, (size_t)n, NULL);
    }
    sl_free(path);
}

static bool load_description(struct sl_device_info *out)
{
    char *path = NULL, *text = NULL;
    size_t size = 0;
    unsigned long long total = 0, free_bytes = 0, context = 0;
    bool good = sl_file_cache_path(DESCRIPTION_FILE, &path, NULL) == SLUICE_STATUS_OK &&
                sl_file_exists(path) &&
                sl_file_read(path, 4096, &text, &size, NULL) == SLUICE_STATUS_OK;
    good = good && sscanf(text, "sluice-gpu 1\n%95[^\n]\n%llu %llu %llu", out->name, &total,
                          &free_bytes, &context) == 4;
    out->kind = good ? SL_DEVICE_CUDA : SL_DEVICE_NONE;
    out->total_bytes = total;
    out->free_bytes = free_bytes;
    out->context_bytes = context;
    sl_free(text);
    sl_free(path);
    return good;
}

/* --threads, or physical cores. The thread that drives the GPU needs one: never spin on both
 * sides. With --threads-batch the pool is for the larger number, and contexts take part of it. */
static void choose_threads(struct sl_engine *e, const struct sl_options *options, bool gpu)
{
    const int asked = (int)sl_options_int(options, SL_OPT_THREADS);
    const int cores = sl_pool_n_physical_cores();
    const int n = asked > 0 ? asked : gpu && cores > 1 ? cores - 1 : cores;
    e->n_threads_long = (int)sl_options_int(options, SL_OPT_THREADS_BATCH);
    e->n_threads_short = e->n_threads_long > 0 ? n : 0;
    e->n_threads = e->n_threads_long > n ? e->n_threads_long : n;
}

/* The device that --device and --vram ask for. */
static const char *wanted_device(const struct sl_options *options)
{
    if (sl_options_given(options, SL_OPT_VRAM)) {
        const struct sl_budget budget = sl_options_budget(options, SL_OPT_VRAM);
        if (budget.kind == SL_BUDGET_BYTES && budget.bytes == 0) {
            return "cpu"; /* no context either: nothing of the card is touched */
        }
    }
    return sl_options_text(options, SL_OPT_DEVICE);
}

enum sluice_status sl_engine_open_device(struct sl_engine *e, const struct sl_options *options,
                                         struct sluice_error *err)
{
    const char *const level = sl_options_text(options, SL_OPT_CPU);
    if (level) {
        SL_TRY(sl_cpu_set_level_cap(level, err));
    }
    SL_TRY(open_gpu(e, wanted_device(options), err));
    if (e->device) {
        SL_TRY(e->device->vt->info(e->device, &e->info, err));
        if (e->info.kind == SL_DEVICE_CUDA) {
            save_description(&e->info);
        }
    }
    choose_threads(e, options, e->device != NULL);
    const struct sl_pool_options pool = {.n_threads = e->n_threads, .yielding = true};
    return sl_pool_create(&e->pool, &pool, err);
}

static bool show_progress(void *user, const char *what, double fraction)
{
    struct sl_progress *const p = user;
    (void)what;
    sl_progress_update(p, (uint64_t)(fraction * 1000), 1000);
    return sl_cli_interrupted();
}

/* The profile with a progress bar: measured in any case when `anew`, else only when none is kept.
 */
static enum sluice_status get_profile(struct sl_engine *e, bool anew, struct sluice_error *err)
{
    struct sl_progress progress;
    sl_progress_start(&progress, anew ? "measuring this machine" : "measuring this machine (once)",
                      false);
    const struct sl_profiler_options options = {
        .device = e->device, .pool = e->pool, .progress = show_progress, .user = &progress};
    const enum sluice_status status = anew ? sl_profiler_run(&e->profile, &options, err)
                                           : sl_profiler_get(&e->profile, &options, NULL, err);
    sl_progress_finish(&progress);
    return status;
}

enum sluice_status sl_engine_open_profile(struct sl_engine *e, struct sluice_error *err)
{
    return get_profile(e, false, err);
}

enum sluice_status sl_engine_measure_profile(struct sl_engine *e, char **out_path,
                                             struct sluice_error *err)
{
    char name[64];
    const struct sl_profile *const p = &e->profile;
    *out_path = NULL;
    SL_TRY(get_profile(e, true, err));
    sl_profile_file_name(name, sizeof name, p->kind, p->gpu, p->cpu, p->n_threads);
    SL_TRY(sl_file_cache_path(name, out_path, err));
    return sl_profile_save(p, *out_path, err);
}

enum sluice_status sl_engine_resolve_budget(const struct sl_budget *budget, bool with_context,
                                            const struct sl_device_info *info, uint64_t *out,
                                            struct sluice_error *err)
{
    *out = 0;
    if (info->kind == SL_DEVICE_NONE) {
        return SLUICE_STATUS_OK;
    }
    switch (budget->kind) {
    case SL_BUDGET_BYTES:
        *out = budget->bytes;
        break;
    case SL_BUDGET_PERCENT:
        *out = (uint64_t)((double)info->total_bytes * budget->percent / 100.0);
        break;
    case SL_BUDGET_AUTO:
    default:
        *out = info->free_bytes > AUTO_MARGIN_BYTES ? info->free_bytes - AUTO_MARGIN_BYTES : 0;
        return SLUICE_STATUS_OK; /* free memory is without the context already */
    }
    if (with_context && *out > 0) {
        if (*out <= info->context_bytes) {
            if (err) {
                err->needed = info->context_bytes + (2u << 20);
                err->allowed = *out;
            }
            return sl_error_set(err, SLUICE_STATUS_BUDGET,
                                "--vram-total: the driver's own context takes %llu MiB of the %llu "
                                "MiB given; give more, or --vram 0 for the CPU alone",
                                (unsigned long long)(info->context_bytes >> 20),
                                (unsigned long long)(*out >> 20));
        }
        *out -= info->context_bytes;
    }
    return SLUICE_STATUS_OK;
}

int32_t sl_engine_n_ctx(const struct sl_options *options, const struct sl_model *model)
{
    const int64_t asked = sl_options_int(options, SL_OPT_CTX_SIZE);
    const int64_t trained = model->hp.n_ctx_train;
    if (asked == 0) {
        return (int32_t)trained;
    }
    /* The default is cut to what the model knows; an explicit size is the user's word. */
    return (int32_t)(!sl_options_given(options, SL_OPT_CTX_SIZE) && asked > trained ? trained
                                                                                    : asked);
}

/* The model first: a wrong file should not wait for a GPU. */
static enum sluice_status open_model(struct sl_engine *e, const struct sl_options *options,
                                     int32_t n_ctx, struct sluice_error *err)
{
    const char *path = NULL;
    memset(e, 0, sizeof *e);
    SL_TRY(sl_options_require(options, SL_OPT_MODEL, &path, err));
    const int64_t asked = n_ctx > 0 ? n_ctx : sl_options_int(options, SL_OPT_CTX_SIZE);
    SL_TRY(sl_model_open(&e->model, path, (uint32_t)asked, err));
    e->n_ctx = n_ctx > 0 ? n_ctx : sl_engine_n_ctx(options, e->model);
    return SLUICE_STATUS_OK;
}

static enum sluice_status set_budget(struct sl_engine *e, const struct sl_options *options,
                                     struct sluice_error *err)
{
    const struct sl_budget budget = sl_options_budget(options, SL_OPT_VRAM);
    return sl_engine_resolve_budget(&budget, sl_options_flag(options, SL_OPT_VRAM_TOTAL), &e->info,
                                    &e->budget_bytes, err);
}

static struct sl_calibrate_options calibrate_options(const struct sl_engine *e)
{
    return (struct sl_calibrate_options){.load_ns = CALIBRATION_LOAD_NS,
                                         .device = e->device,
                                         .pool = e->pool,
                                         .budget_bytes = e->budget_bytes};
}

/* Kept for GPUs alone; what is not kept costs speed at the next start, no more. */
static void load_expert_uses(struct sl_engine *e)
{
    if (e->info.kind == SL_DEVICE_CUDA) {
        e->expert_uses = sl_uses_load(e->model);
    }
}

static void keep_expert_uses(struct sl_engine *e)
{
    const struct sl_hparams *const hp = &e->model->hp;
    const size_t n = (size_t)hp->n_layers * hp->n_experts;
    if (e->info.kind != SL_DEVICE_CUDA || n == 0) {
        return;
    }
    float *const uses = sl_calloc(SL_MEM_CLI, n, sizeof *uses);
    if (!uses || !sl_context_get_expert_uses(e->ctx, uses)) {
        sl_free(uses);
        return;
    }
    (void)sl_uses_save(e->model, uses, NULL);
    sl_free(e->expert_uses);
    e->expert_uses = uses;
}

enum sluice_status sl_engine_open(struct sl_engine *e, const struct sl_options *options,
                                  int32_t n_ctx, struct sluice_error *err)
{
    SL_TRY(open_model(e, options, n_ctx, err));
    SL_TRY(sl_engine_open_device(e, options, err));
    SL_TRY(sl_engine_open_profile(e, err));
    const char *const trace = sl_options_text(options, SL_OPT_TRACE);
    if (trace) {
        SL_TRY(sl_trace_open(&e->trace, trace, e->model, err));
    }
    SL_TRY(set_budget(e, options, err));
    const struct sl_calibrate_options model = calibrate_options(e);
    sl_calibrate_get(&e->profile, e->model, &model);
    load_expert_uses(e);
    return SLUICE_STATUS_OK;
}

/* End of a context: what its passes have taught is for the next one, and kept. */
static void close_context(struct sl_engine *e)
{
    if (e->ctx) {
        const struct sl_calibrate_options model = calibrate_options(e);
        sl_profile_take_factors(&e->profile, sl_context_profile(e->ctx));
        sl_calibrate_keep(&e->profile, e->model, &model);
        keep_expert_uses(e);
        sl_context_destroy(&e->ctx);
    }
}

/* The kept profile of the described GPU; false when either is missing. */
static bool load_known_machine(struct sl_engine *e, const struct sl_options *options)
{
    char name[64];
    char *path = NULL;
    if (!load_description(&e->info)) {
        return false;
    }
    choose_threads(e, options, true);
    sl_profile_file_name(name, sizeof name, SL_DEVICE_CUDA, e->info.name, sl_cpu_name(),
                         e->n_threads);
    const bool good = sl_file_cache_path(name, &path, NULL) == SLUICE_STATUS_OK &&
                      sl_file_exists(path) &&
                      sl_profile_load(&e->profile, path, NULL) == SLUICE_STATUS_OK;
    sl_free(path);
    return good;
}

enum sluice_status sl_engine_open_dry(struct sl_engine *e, const struct sl_options *options,
                                      struct sluice_error *err)
{
    SL_TRY(open_model(e, options, 0, err));
    const char *const device = wanted_device(options);
    const bool gpu = strcmp(device, "auto") == 0 || strcmp(device, "cuda") == 0;
    if (!gpu || !load_known_machine(e, options)) {
        memset(&e->info, 0, sizeof e->info);
        SL_TRY(sl_engine_open_device(e, options, err));
        SL_TRY(sl_engine_open_profile(e, err));
    }
    sl_calibrate_load(&e->profile, e->model);
    load_expert_uses(e);
    return set_budget(e, options, err);
}

void sl_engine_close(struct sl_engine *e)
{
    close_context(e);
    sl_free(e->expert_uses);
    sl_trace_close(&e->trace, NULL);
    sl_pool_destroy(&e->pool);
    sl_device_destroy(&e->device);
    sl_model_close(&e->model);
}

enum sluice_status sl_engine_finish_trace(struct sl_engine *e, struct sluice_error *err)
{
    if (!e->trace) {
        return SLUICE_STATUS_OK;
    }
    close_context(e);
    return sl_trace_close(&e->trace, err);
}

/* The options' choices are the names of the types, in lower case. */
static enum sl_type cache_type(const struct sl_options *options, enum sl_option_id id)
{
    for (int i = 0; i < SL_N_KV_TYPES; i++) {
        if (strcasecmp(sl_options_text(options, id), sl_type_name(sl_kv_type_list[i])) == 0) {
            return sl_kv_type_list[i];
        }
    }
    return SL_TYPE_F16;
}

struct sl_plan_options sl_engine_plan_options(const struct sl_engine *e,
                                              const struct sl_options *options)
{
    struct sl_plan_options plan = {.budget_bytes = e->budget_bytes,
                                   .n_ctx = e->n_ctx,
                                   .max_ubatch =
                                       (int32_t)sl_options_int(options, SL_OPT_UBATCH_SIZE),
                                   .max_outputs = DEFAULT_OUTPUTS,
                                   .kv_types = {cache_type(options, SL_OPT_CACHE_TYPE_K),
                                                cache_type(options, SL_OPT_CACHE_TYPE_V)},
                                   .expert_uses = e->expert_uses};
    (void)sl_strategy_from_name(sl_options_text(options, SL_OPT_STRATEGY), &plan.strategy);
    return plan;
}

static bool interrupted(void *user)
{
    (void)user;
    return sl_cli_interrupted();
}

enum sluice_status sl_engine_create_context(struct sl_engine *e, const struct sl_plan_options *plan,
                                            struct sluice_error *err)
{
    close_context(e);
    struct sl_context_options options = {.device = e->device,
                                         .pool = e->pool,
                                         .n_threads_short = e->n_threads_short,
                                         .n_threads_long = e->n_threads_long,
                                         .profile = &e->profile,
                                         .adapt = true,
                                         .plan = *plan,
                                         .trace = e->trace,
                                         .cancelled = interrupted};
    options.plan.expert_uses = e->expert_uses; /* the last context has left others */
    return sl_context_create(&e->ctx, e->model, &options, err);
}
