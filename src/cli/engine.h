/* SPDX-License-Identifier: Apache-2.0
 *
 * What the model commands share: from options to an open model, device, pool, profile, budget and
 * context. Every command goes through here, so that they all plan and run alike.
 */
#ifndef SL_CLI_ENGINE_H
#define SL_CLI_ENGINE_H

#include "cli/cli.h"
#include "exec/context.h"
#include "exec/profiler.h"
#include "exec/trace.h"

struct sl_engine {
    struct sl_model *model;
    struct sl_device *device; /* NULL: CPU */
    struct sl_device_info info;
    struct sl_pool *pool;
    struct sl_profile profile;
    float *expert_uses; /* of a mixture, kept from run to run; or NULL */
    struct sl_context *ctx;
    struct sl_trace *trace; /* of --trace; NULL: none */
    int n_threads;
    int n_threads_short, n_threads_long; /* of those, by phase; 0: all */
    int32_t n_ctx;
    uint64_t budget_bytes;
};

/* Device and pool by --device, --threads, --cpu. */
enum sluice_status sl_engine_open_device(struct sl_engine *e, const struct sl_options *options,
                                         struct sluice_error *err);
/* The profile of this machine, measured with a progress bar when there is none. */
enum sluice_status sl_engine_open_profile(struct sl_engine *e, struct sluice_error *err);
/* Measure it anew and keep it; *out_path (sl_free) is where. */
enum sluice_status sl_engine_measure_profile(struct sl_engine *e, char **out_path,
                                             struct sluice_error *err);
/* Model, profile and budget for planning alone: with what is known of this machine's GPU from an
 * earlier run its context, which takes longer than a plan, is not made. */
enum sluice_status sl_engine_open_dry(struct sl_engine *e, const struct sl_options *options,
                                      struct sluice_error *err);
/* All of it: device, model, profile, budget. `n_ctx` > 0 overrides --ctx-size. */
enum sluice_status sl_engine_open(struct sl_engine *e, const struct sl_options *options,
                                  int32_t n_ctx, struct sluice_error *err);
void sl_engine_close(struct sl_engine *e);
/* Give up the context and complete the file of --trace, if there is one. */
enum sluice_status sl_engine_finish_trace(struct sl_engine *e, struct sluice_error *err);

/* A budget in bytes; 0 without a device. `with_context`: it counts the driver's context in. */
enum sluice_status sl_engine_resolve_budget(const struct sl_budget *budget, bool with_context,
                                            const struct sl_device_info *info, uint64_t *out,
                                            struct sluice_error *err);
/* --ctx-size for a model. */
int32_t sl_engine_n_ctx(const struct sl_options *options, const struct sl_model *model);

/* What to plan with: budget, context, strategy and micro-batch of the options. */
struct sl_plan_options sl_engine_plan_options(const struct sl_engine *e,
                                              const struct sl_options *options);
/* Make e->ctx (replacing one that is there). */
enum sluice_status sl_engine_create_context(struct sl_engine *e, const struct sl_plan_options *plan,
                                            struct sluice_error *err);

#endif
