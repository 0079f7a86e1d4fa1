/* SPDX-License-Identifier: Apache-2.0
 *
 * Plans drawn at random beside the one in use (see bench_plans.h).
 */
#include "cli/bench_plans.h"

#include <math.h>

#include "base/error.h"
#include "base/median.h"

#define RUNS 5
#define UPLOADS 2        /* passes ahead: what the plan keeps in VRAM is brought in */
#define UNTIL_RECORDED 7 /* the same where passes are recorded after some */
#define HOPELESS 1.4     /* beside the plan in use, before anything is recorded */

/* Median time of a pass by the plan that is in use now, or, where it takes longer than `enough` at
 * once, that. */
static enum sluice_status measure(const struct sl_bench_passes *p, double enough, double *out,
                                  struct sluice_error *err)
{
    double ns[RUNS];
    uint64_t once = 0;
    for (int i = 0; i < (p->recorded ? UNTIL_RECORDED : UPLOADS); i++) {
        SL_TRY(p->run(p->user, &once, err));
        if (i > 0 && (double)once > enough) {
            *out = (double)once;
            return SLUICE_STATUS_OK;
        }
    }
    for (int i = 0; i < RUNS; i++) {
        SL_TRY(p->run(p->user, &once, err));
        ns[i] = (double)once;
    }
    *out = sl_median(ns, RUNS);
    return SLUICE_STATUS_OK;
}

/* One of them in place of the plan in use, and back. *out stays as it is where there is none. */
static enum sluice_status run_one(const struct sl_bench_passes *p, uint64_t *random,
                                  double chosen_ns, double *out, struct sluice_error *err)
{
    const struct sl_replan replan = {.tier = p->tier, .depth = p->depth, .random = random};
    struct sl_tier_plan drawn, chosen;
    if (sl_plan_tier_anew(&drawn, sl_context_plan(p->ctx), p->model, sl_context_profile(p->ctx),
                          &replan, NULL) != SLUICE_STATUS_OK) {
        return SLUICE_STATUS_OK;
    }
    enum sluice_status status = SLUICE_STATUS_OK;
    if (sl_context_exchange_tier(p->ctx, p->tier, &drawn, &chosen)) {
        status = measure(p, HOPELESS * chosen_ns, out, err);
        if (!sl_context_exchange_tier(p->ctx, p->tier, &chosen, &drawn)) {
            status = sl_error_set(err, SLUICE_STATUS_OUT_OF_MEMORY, "no memory for the plan");
        }
        sl_tier_plan_finish(&chosen);
    }
    sl_tier_plan_finish(&drawn);
    return status;
}

enum sluice_status sl_bench_plans_run(const struct sl_bench_passes *passes, int32_t n_plans,
                                      struct sl_bench_plans *out, struct sluice_error *err)
{
    uint64_t random = 88172645463325252u;
    double again = 0;
    *out = (struct sl_bench_plans){.best_ns = HUGE_VAL};
    SL_TRY(measure(passes, HUGE_VAL, &out->chosen_ns, err));
    for (int32_t i = 0; i < n_plans; i++) {
        double ns = 0;
        SL_TRY(run_one(passes, &random, out->chosen_ns, &ns, err));
        out->n_drawn += ns > 0;
        out->best_ns = ns > 0 ? fmin(out->best_ns, ns) : out->best_ns;
    }
    SL_TRY(measure(passes, HUGE_VAL, &again, err));
    out->chosen_ns = fmin(out->chosen_ns, again);
    return SLUICE_STATUS_OK;
}
