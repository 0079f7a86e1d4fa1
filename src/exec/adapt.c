/* SPDX-License-Identifier: Apache-2.0
 *
 * Learning from passes (see adapt.h).
 */
#include "exec/adapt.h"

#include <math.h>
#include <string.h>

#include "base/error.h"
#include "base/log.h"
#include "base/median.h"
#include "base/mem.h"
#include "exec/context_internal.h"

#define LONG_WINDOW 2  /* of tiers that are too long for graphs: they come seldom */
#define CLEARLY 0.97   /* the winner's time beside the loser's */
#define HOPELESS 1.25  /* a plan in trial is given up after a few passes beyond this */
#define EARLY 3        /* that many */
#define PLAIN_HOPE 1.4 /* the plain plan is tried when predicted within this of the plan in use */
#define OTHER_HOPE 1.0 /* and other plans within this */
#define DRIFT 0.15
/* Windows of slow passes before a second contest; twice as many before each further one. A busy
 * machine is slow for a while with any plan, and a contest costs some passes without graphs. */
#define STRIKES 8
/* Windows between two corrections when there is nothing left to decide: each takes some tenths of a
 * millisecond of the time between two tokens. */
#define SELDOM 8
#define MOST_DOUBLINGS 5
#define LEAST_WEIGHT 0.25
#define GOOD_ENOUGH 0.02 /* off by less, figures stay */
#define LEAST_PART 0.25  /* of a pass that the CPU is busy, for its figures to be corrected */
#define DECISIVE 0.85    /* of a pass that an engine is busy which alone decides */
#define BUSIER 1.5 /* than the CPU, which draws on the same memory, for the link to be blamed */
#define NEAR 1.1   /* beside the depth that models are timed at, for factors to be at fault */
#define LEAST_FACTOR 0.05
#define MOST_FACTOR 200.0

static bool has_contest(int32_t tier)
{
    return tier < SL_N_GRAPH_TIERS;
}

static void start_over(struct sl_adapt_tier *a, int32_t tier)
{
    a->n = 0;
    a->n_to_skip = has_contest(tier) ? SL_GRAPH_AFTER + 2 : 1;
}

void sl_adapt_init(struct sl_context *ctx, const struct sl_profile *profile)
{
    struct sl_adapt *const adapt = &ctx->adapt;
    adapt->profile = *profile;
    if (!ctx->files_are_mapped) {
        adapt->profile.mapped_bytes_per_s = adapt->profile.mapped_tiles_bytes_per_s = 0;
    }
    for (int32_t t = 0; t < ctx->plan->n_tiers; t++) {
        start_over(&adapt->tiers[t], t);
        adapt->tiers[t].unexplained = 1;
        adapt->tiers[t].settled = !ctx->device || !has_contest(t);
    }
}

static void forget_tried(struct sl_adapt_tier *a)
{
    while (a->n_tried > 0) {
        sl_tier_plan_finish(&a->tried[--a->n_tried]);
    }
}

void sl_adapt_finish(struct sl_context *ctx)
{
    for (int32_t t = 0; t < SL_N_TIERS; t++) {
        sl_tier_plan_finish(&ctx->adapt.tiers[t].best);
        forget_tried(&ctx->adapt.tiers[t]);
    }
}

/* ---- figures ---- */

static void scale(double *factor, double ratio, double weight)
{
    *factor = fmin(MOST_FACTOR, fmax(LEAST_FACTOR, *factor * pow(ratio, weight)));
}

static void scale_unit(struct sl_profile *p, enum sl_unit unit, int32_t tier, double ratio,
                       double weight)
{
    for (int work = 0; work < SL_N_WORKS; work++) {
        scale(&p->work_factor[unit][work][tier], ratio, weight);
    }
}

static bool predict(const struct sl_context *ctx, int32_t tier, int32_t depth,
                    struct sl_sim_result *out)
{
    const struct sl_replan at = {.tier = tier, .depth = depth, .expert_uses = ctx->experts.score};
    return sl_plan_predict(out, ctx->plan, ctx->model, &ctx->adapt.profile, &at, NULL) ==
           SLUICE_STATUS_OK;
}

static void correct_cpu(struct sl_context *ctx, int32_t tier, const struct sl_pass_times *times,
                        const struct sl_sim_result *now, double weight)
{
    struct sl_profile *const p = &ctx->adapt.profile;
    if (now->cpu_busy_ns > LEAST_PART * now->pass_ns && times->cpu_ns > 0) {
        const double ratio = times->cpu_ns / now->cpu_busy_ns;
        scale_unit(p, SL_UNIT_CPU, tier, ratio, weight);
        scale_unit(p, SL_UNIT_CPU_BUSY, tier, ratio, weight);
    }
}

/* Whether the GPU reads experts in place: its time is the link's then. */
static bool reads_system_memory(const struct sl_context *ctx, int32_t tier)
{
    const struct sl_tier_plan *const plan = &ctx->plan->tiers[tier];
    return plan->share > 0 &&
           (size_t)plan->n_slots < (size_t)ctx->model->hp.n_layers * ctx->model->hp.n_experts;
}

/* Whether a pass of a tier takes about what it would at the depth that factors are for. */
static bool is_near(const struct sl_context *ctx, int32_t tier, double pass_ns)
{
    struct sl_sim_result timed;
    return predict(ctx, tier, SL_CALIBRATED_DEPTH, &timed) && pass_ns < NEAR * timed.pass_ns;
}

/* What the CPU does not explain: only where a single engine decides is it the one to blame. A pass
 * is not quite proportional to it, so the way is made in steps. */
static void correct_others(struct sl_context *ctx, int32_t tier, const struct sl_pass_times *times,
                           double weight)
{
    struct sl_profile *const p = &ctx->adapt.profile;
    for (int step = 0; step < 3; step++) {
        struct sl_sim_result now;
        if (!predict(ctx, tier, times->depth, &now)) {
            return;
        }
        const double ratio = times->pass_ns / now.pass_ns;
        if (fabs(ratio - 1) < GOOD_ENOUGH) {
            return;
        }
        if (now.copy_busy_ns > DECISIVE * now.pass_ns &&
            now.copy_busy_ns > BUSIER * now.cpu_busy_ns) {
            scale(&p->copy_factor, ratio, weight);
        } else if (now.gpu_busy_ns > DECISIVE * now.pass_ns && now.cpu_busy_ns == 0 &&
                   now.copy_busy_ns == 0 && !reads_system_memory(ctx, tier) &&
                   is_near(ctx, tier, now.pass_ns)) {
            scale_unit(p, SL_UNIT_GPU, tier, ratio, weight);
        } else {
            return;
        }
    }
}

static void correct(struct sl_context *ctx, int32_t tier, const struct sl_pass_times *times)
{
    struct sl_adapt_tier *const a = &ctx->adapt.tiers[tier];
    struct sl_sim_result now;
    bool good = predict(ctx, tier, times->depth, &now);
    if (good && fabs(times->pass_ns / now.pass_ns - 1) >= GOOD_ENOUGH) {
        const double weight = fmax(LEAST_WEIGHT, 1.0 / ++a->n_windows);
        correct_cpu(ctx, tier, times, &now, weight);
        correct_others(ctx, tier, times, weight);
        good = predict(ctx, tier, times->depth, &now);
    }
    if (good) {
        struct sl_sim_result *const said = &ctx->plan->tiers[tier].corrected;
        const double weight = fmax(LEAST_WEIGHT, 1.0 / ++a->n_noted);
        scale(&a->unexplained, times->pass_ns / (now.pass_ns * a->unexplained), weight);
        *said = now;
        said->pass_ns *= a->unexplained;
        ctx->plan->tiers[tier].corrected_depth = times->depth;
    }
}

/* ---- plans ---- */

/* Whether the context has what passes by this plan need. */
static bool can_run(const struct sl_context *ctx, const struct sl_tier_plan *tier)
{
    return tier->n_slots <= ctx->experts.n_room &&
           sl_context_exchange_bytes(ctx, tier, false) <= ctx->choice.bytes;
}

bool sl_adapt_exchange(struct sl_context *ctx, int32_t t, struct sl_tier_plan *next,
                       struct sl_tier_plan *old)
{
    memset(old, 0, sizeof *old);
    if (!can_run(ctx, next) || !sl_context_set_segments(ctx, t, next->n_steps)) {
        return false;
    }
    *old = ctx->plan->tiers[t];
    ctx->plan->tiers[t] = *next;
    if (next->n_slots > ctx->plan->n_slots) {
        ctx->plan->n_slots = next->n_slots;
    }
    ctx->plan->tiers[t].predicted = old->predicted; /* what was said before any pass */
    ctx->plan->tiers[t].shallow = old->shallow;
    ctx->plan->tiers[t].deeper_ns = old->deeper_ns;
    memset(next, 0, sizeof *next);
    ctx->experts.tables_of = NULL; /* they were made for another plan in the same place */
    start_over(&ctx->adapt.tiers[t], t);
    return true;
}

/* A plan that has not been tried, if the figures promise that it stays within `hope` times the time
 * of the one in use. */
static bool find_other(const struct sl_context *ctx, int32_t t, int32_t depth,
                       enum sl_strategy strategy, double hope, struct sl_tier_plan *out)
{
    const struct sl_adapt_tier *const a = &ctx->adapt.tiers[t];
    const struct sl_tier_plan *unlike[SL_ADAPT_MOST_TRIED + 1] = {&ctx->plan->tiers[t]};
    for (int32_t i = 0; i < a->n_tried; i++) {
        unlike[1 + i] = &a->tried[i];
    }
    const struct sl_replan replan = {.tier = t,
                                     .depth = depth,
                                     .expert_uses = ctx->experts.score,
                                     .strategy = strategy,
                                     .unlike = unlike,
                                     .n_unlike = 1 + a->n_tried};
    if (sl_plan_tier_anew(out, ctx->plan, ctx->model, &ctx->adapt.profile, &replan, NULL) !=
        SLUICE_STATUS_OK) {
        return false;
    }
    struct sl_sim_result now; /* what the plan in use would take, by the same figures */
    if (!predict(ctx, t, depth, &now) ||
        out->predicted.pass_ns > hope * fmax(now.pass_ns, a->best_ns) || !can_run(ctx, out)) {
        sl_tier_plan_finish(out);
        return false;
    }
    return true;
}

/* Begin to try another plan; false: there is none worth it. */
static bool try_other(struct sl_context *ctx, int32_t t, int32_t depth)
{
    struct sl_adapt_tier *const a = &ctx->adapt.tiers[t];
    const enum sl_strategy plain =
        ctx->plan->slot_bytes > 0 ? SL_STRATEGY_EXPERTS_SHARED : SL_STRATEGY_FFN_HOST;
    struct sl_tier_plan other;
    if (a->n_tried == SL_ADAPT_MOST_TRIED ||
        (!(a->n_tried == 0 && find_other(ctx, t, depth, plain, PLAIN_HOPE, &other)) &&
         !find_other(ctx, t, depth, SL_STRATEGY_AUTO, OTHER_HOPE, &other))) {
        return false;
    }
    a->trying = sl_adapt_exchange(ctx, t, &other, &a->best);
    sl_tier_plan_finish(&other);
    return a->trying;
}

/* The plan in trial has been measured: the better one goes on, the other one is not tried again. */
static void end_trial(struct sl_context *ctx, int32_t t, double ns)
{
    struct sl_adapt_tier *const a = &ctx->adapt.tiers[t];
    const bool won = ns < CLEARLY * a->best_ns;
    sl_log(SL_LOG_DEBUG, "passes of %d tokens: %.3g ms by another plan, %.3g ms before: %s",
           ctx->plan->tiers[t].n_tokens, ns * 1e-6, a->best_ns * 1e-6,
           won ? "it stays" : "back again");
    struct sl_tier_plan *const loser = &a->tried[a->n_tried++];
    if (won || !sl_adapt_exchange(ctx, t, &a->best, loser)) {
        *loser = a->best;
        a->best_ns = ns;
    }
    memset(&a->best, 0, sizeof a->best);
    a->trying = false;
}

static void contest(struct sl_context *ctx, int32_t t, double ns, int32_t depth)
{
    struct sl_adapt_tier *const a = &ctx->adapt.tiers[t];
    if (a->trying) {
        end_trial(ctx, t, ns);
    } else {
        a->best_ns = ns;
    }
    if (!try_other(ctx, t, depth)) {
        a->settled = true;
        a->n_strikes = 0;
        forget_tried(a);
    }
}

void sl_adapt_settle(struct sl_context *ctx)
{
    for (int32_t t = 0; t < ctx->plan->n_tiers; t++) {
        struct sl_adapt_tier *const a = &ctx->adapt.tiers[t];
        struct sl_tier_plan other = {0};
        if (a->trying && sl_adapt_exchange(ctx, t, &a->best, &other)) {
            a->trying = false;
        }
        sl_tier_plan_finish(&other);
        if (!a->trying) {
            a->settled = true;
            forget_tried(a);
        }
    }
}

/* Passes that have become slower than those that the contest was about: another contest. */
static void watch(struct sl_adapt_tier *a, double ns)
{
    a->n_strikes = ns > (1 + DRIFT) * a->best_ns ? a->n_strikes + 1 : 0;
    if (a->n_strikes >= STRIKES << a->n_contests) {
        a->settled = false;
        a->n_contests += a->n_contests < MOST_DOUBLINGS;
    }
}

void sl_adapt_note(struct sl_context *ctx, int32_t tier, const struct sl_pass_times *times)
{
    struct sl_adapt_tier *const a = &ctx->adapt.tiers[tier];
    if (a->n_to_skip > 0) {
        a->n_to_skip--;
        return;
    }
    a->pass_ns[a->n] = times->pass_ns;
    a->cpu_ns[a->n++] = times->cpu_ns;
    double sorted[SL_ADAPT_WINDOW];
    memcpy(sorted, a->pass_ns, (size_t)a->n * sizeof *sorted);
    const double pass_ns = sl_median(sorted, a->n);
    const bool hopeless = a->trying && a->n >= EARLY && pass_ns > HOPELESS * a->best_ns;
    if (a->n < (has_contest(tier) ? SL_ADAPT_WINDOW : LONG_WINDOW) && !hopeless) {
        return;
    }
    const struct sl_pass_times median = {
        .pass_ns = pass_ns, .cpu_ns = sl_median(a->cpu_ns, a->n), .depth = times->depth};
    a->n = 0;
    if (!a->settled || !has_contest(tier) || a->n_settled++ % SELDOM == 0) {
        correct(ctx, tier, &median);
    }
    if (!has_contest(tier) || !ctx->device) {
        return;
    }
    if (a->settled) {
        watch(a, pass_ns);
    }
    if (!a->settled) {
        contest(ctx, tier, pass_ns, times->depth);
    }
}
