/* SPDX-License-Identifier: Apache-2.0
 *
 * Opening what the model commands share (see engine.h).
 */
#include "cli/engine.h"

#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/log.h"
#include "cli/progress.h"

/* Kept free of the card under --vram auto, for the desktop and what is opened later. */
#define AUTO_MARGIN_BYTES (UINT64_C(512) << 20)
#define DEFAULT_OUTPUTS 1

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

enum sluice_status sl_engine_open_device(struct sl_engine *e, const struct sl_options *options,
                                         struct sluice_error *err)
{
    const char *const level = sl_options_text(options, SL_OPT_CPU);
    if (level) {
        SL_TRY(sl_cpu_set_level_cap(level, err));
    }
    struct sl_budget budget = {0};
    const char *device = sl_options_text(options, SL_OPT_DEVICE);
    if (sl_options_given(options, SL_OPT_VRAM)) {
        budget = sl_options_budget(options, SL_OPT_VRAM);
        if (budget.kind == SL_BUDGET_BYTES && budget.bytes == 0) {
            device = "cpu"; /* no context either: nothing of the card is touched */
        }
    }
    SL_TRY(open_gpu(e, device, err));
    if (e->device) {
        SL_TRY(e->device->vt->info(e->device, &e->info, err));
    }
    e->n_threads = (int)sl_options_int(options, SL_OPT_THREADS);
    if (e->n_threads == 0) {
        const int cores = sl_pool_n_physical_cores();
        /* The thread that drives the GPU needs a core: never spin on both sides. */
        e->n_threads = e->device && cores > 1 ? cores - 1 : cores;
    }
    const struct sl_pool_options pool = {.n_threads = e->n_threads};
    return sl_pool_create(&e->pool, &pool, err);
}

static bool show_progress(void *user, const char *what, double fraction)
{
    struct sl_progress *const p = user;
    (void)what;
    sl_progress_update(p, (uint64_t)(fraction * 1000), 1000);
    return sl_cli_interrupted();
}

enum sluice_status sl_engine_open_profile(struct sl_engine *e, struct sluice_error *err)
{
    struct sl_progress progress;
    sl_progress_start(&progress, "measuring this machine (once)", false);
    const struct sl_profiler_options options = {
        .device = e->device, .pool = e->pool, .progress = show_progress, .user = &progress};
    const enum sluice_status status = sl_profiler_get(&e->profile, &options, NULL, err);
    sl_progress_finish(&progress);
    return status;
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

enum sluice_status sl_engine_open(struct sl_engine *e, const struct sl_options *options,
                                  int32_t n_ctx, struct sluice_error *err)
{
    const char *path = NULL;
    memset(e, 0, sizeof *e);
    SL_TRY(sl_options_require(options, SL_OPT_MODEL, &path, err));
    const int64_t asked = n_ctx > 0 ? n_ctx : sl_options_int(options, SL_OPT_CTX_SIZE);
    /* The model first: a wrong file should not wait for a GPU. */
    SL_TRY(sl_model_open(&e->model, path, (uint32_t)asked, err));
    e->n_ctx = n_ctx > 0 ? n_ctx : sl_engine_n_ctx(options, e->model);
    SL_TRY(sl_engine_open_device(e, options, err));
    SL_TRY(sl_engine_open_profile(e, err));
    const struct sl_budget budget = sl_options_budget(options, SL_OPT_VRAM);
    return sl_engine_resolve_budget(&budget, sl_options_flag(options, SL_OPT_VRAM_TOTAL), &e->info,
                                    &e->budget_bytes, err);
}

void sl_engine_close(struct sl_engine *e)
{
    sl_context_destroy(&e->ctx);
    sl_pool_destroy(&e->pool);
    sl_device_destroy(&e->device);
    sl_model_close(&e->model);
}

struct sl_plan_options sl_engine_plan_options(const struct sl_engine *e,
                                              const struct sl_options *options)
{
    struct sl_plan_options plan = {.budget_bytes = e->budget_bytes,
                                   .n_ctx = e->n_ctx,
                                   .max_ubatch =
                                       (int32_t)sl_options_int(options, SL_OPT_UBATCH_SIZE),
                                   .max_outputs = DEFAULT_OUTPUTS,
                                   .kv_type = SL_TYPE_F16};
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
    sl_context_destroy(&e->ctx);
    const struct sl_context_options options = {.device = e->device,
                                               .pool = e->pool,
                                               .profile = &e->profile,
                                               .plan = *plan,
                                               .cancelled = interrupted};
    return sl_context_create(&e->ctx, e->model, &options, err);
}
