/* SPDX-License-Identifier: Apache-2.0
 *
 * `bench --random-plans`: how the plan in use compares with others that fit, on real passes.
 */
#ifndef SL_CLI_BENCH_PLANS_H
#define SL_CLI_BENCH_PLANS_H

#include "exec/context.h"

/* What is measured: passes of one tier. */
struct sl_bench_passes {
    struct sl_context *ctx; /* frozen */
    const struct sl_model *model;
    int32_t tier, depth;
    /* Runs a pass of the tier from the cache of `depth` tokens. */
    enum sluice_status (*run)(void *user, uint64_t *ns, struct sluice_error *err);
    void *user;
};

struct sl_bench_plans {
    int32_t n_drawn;           /* that were run */
    double best_ns, chosen_ns; /* the fastest of them, and the plan in use in the same way */
};

/* Measure n_plans drawn at random among those that the planner looks at and that fit; the plan in
 * use is there again afterwards. Those that are clearly slower get few passes. */
enum sluice_status sl_bench_plans_run(const struct sl_bench_passes *passes, int32_t n_plans,
                                      struct sl_bench_plans *out, struct sluice_error *err);

#endif
