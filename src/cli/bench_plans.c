/* SPDX-License-Identifier: Apache-2.0
 *
 * Plans drawn at random beside the one in use (see bench_plans.h).
 */
#include "cli/bench_plans.h"

#include <math.h>

#include "base/error.h"
#include "base/median.h"

#define RUNS 5
#define TURNS 3
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
    const int n_ahead = p->tier < SL_N_GRAPH_TIERS ? UNTIL_RECORDED : UPLOADS;
    for (int i = 0; i < n_ahead; i++) {
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

/* A drawn plan in place of the plan in use, and back. *out stays as it is where it cannot run. */
static enum sluice_status measure_drawn(const struct sl_bench_passes *p, struct sl_tier_plan *drawn,
                                        double enough, double *out, struct sluice_error *err)
{
    struct sl_tier_plan chosen;
    if (!sl_context_exchange_tier(p->ctx, p->tier, drawn, &chosen)) {
        return SLUICE_STATUS_OK;
    }
    enum sluice_status status = measure(p, enough, out, err);
    if (!sl_context_exchange_tier(p->ctx, p->tier, &chosen, drawn)) {
        status = sl_error_set(err, SLUICE_STATUS_OUT_OF_MEMORY, "no memory for the plan");
    }
    sl_tier_plan_finish(&chosen);
    return status;
}

/* Draw a plan and measure it; the fastest so far is kept in *best. */
static enum sluice_status draw(const struct sl_bench_passes *p, uint64_t *random,
                               struct sl_bench_plans *out, struct sl_tier_plan *best,
                               struct sluice_error *err)
{
    const struct sl_replan replan = {.tier = p->tier, .depth = p->depth, .random = random};
    struct sl_tier_plan drawn;
    double ns = 0;
    if (sl_plan_tier_anew(&drawn, sl_context_plan(p->ctx), p->model, sl_context_profile(p->ctx),
                          &replan, NULL) != SLUICE_STATUS_OK) {
        return SLUICE_STATUS_OK;
    }
    const enum sluice_status status = measure_drawn(p, &drawn, HOPELESS * out->chosen_ns, &ns, err);
    out->n_drawn += ns > 0;
    if (ns > 0 && ns < out->best_ns) {
        const struct sl_tier_plan slower = *best;
        out->best_ns = ns;
        *best = drawn;
        drawn = slower;
    }
    sl_tier_plan_finish(&drawn);
    return status;
}

/* Of many readings the least is an accident as well: the fastest plan is measured again, in turns
 * with the plan in use. */
static enum sluice_status compare(const struct sl_bench_passes *p, struct sl_tier_plan *best,
                                  struct sl_bench_plans *out, struct sluice_error *err)
{
    double best_ns[TURNS], chosen_ns[TURNS];
    for (int i = 0; i < TURNS; i++) {
        best_ns[i] = out->best_ns;
        SL_TRY(measure_drawn(p, best, HUGE_VAL, &best_ns[i], err));
        SL_TRY(measure(p, HUGE_VAL, &chosen_ns[i], err));
    }
    out->best_ns = sl_median(best_ns, TURNS);
    out->chosen_ns = sl_median(chosen_ns, TURNS);
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_bench_plans_run(const struct sl_bench_passes *passes, int32_t n_plans,
                                      struct sl_bench_plans *out, struct sluice_error *err)
{
    uint64_t random = 88172645463325252u;
    struct sl_tier_plan best = {0};
    *out = (struct sl_bench_plans){.best_ns = HUGE_VAL};
    enum sluice_status status = measure(passes, HUGE_VAL, &out->chosen_ns, err);
    for (int32_t i = 0; i < n_plans && status == SLUICE_STATUS_OK; i++) {
        status = draw(passes, &random, out, &best, err);
    }
    if (status == SLUICE_STATUS_OK && out->n_drawn > 0) {
        status = compare(passes, &best, out, err);
    }
    sl_tier_plan_finish(&best);
    return status;
}
