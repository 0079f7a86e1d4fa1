/* SPDX-License-Identifier: Apache-2.0
 *
 * What a plan promises: which tier serves a pass, the time to the first token of a prompt, and
 * tokens per second, from the simulated passes of its tiers.
 */
#include "plan/plan.h"

int32_t sl_plan_tier(const struct sl_plan *plan, int32_t n_tokens)
{
    int32_t t = 0;
    while (t + 1 < plan->n_tiers && plan->tiers[t].n_tokens < n_tokens) {
        t++;
    }
    return t;
}

/* How long a full pass takes behind `depth` tokens, and its copies. */
struct duration {
    double pass_ns, copy_ns;
};

static double between(double from, double to, double part)
{
    return from + part * (to - from);
}

/* As predicted: up to the depth that was planned for along the line from the first token, or from
 * where a cache that is cut by blocks leaves VRAM; beyond, as another step adds. */
static struct duration predicted_at(const struct sl_plan *plan, const struct sl_tier_plan *tier,
                                    double depth)
{
    const struct sl_sim_result *const first = &tier->shallow, *const there = &tier->predicted;
    const double beyond = depth - plan->depth;
    if (beyond >= 0) {
        return (struct duration){there->pass_ns + beyond / SL_DEEPER * tier->deeper_ns,
                                 there->copy_busy_ns};
    }
    const double bound = (double)plan->split.kv_blocks * SL_KV_BLOCK;
    const double from = bound < plan->depth ? bound : 0;
    const double part = depth > from ? (depth - from) / (plan->depth - from) : 0;
    return (struct duration){between(first->pass_ns, there->pass_ns, part),
                             between(first->copy_busy_ns, there->copy_busy_ns, part)};
}

/* The same, or by what passes at some depth have taught. */
static struct duration duration_at(const struct sl_plan *plan, const struct sl_tier_plan *tier,
                                   double depth, bool corrected)
{
    struct duration d = predicted_at(plan, tier, depth);
    if (corrected) {
        const struct duration then = predicted_at(plan, tier, tier->corrected_depth);
        d.pass_ns *= then.pass_ns > 0 ? tier->corrected.pass_ns / then.pass_ns : 1;
        d.copy_ns *= then.copy_ns > 0 ? tier->corrected.copy_busy_ns / then.copy_ns : 1;
    }
    return d;
}

static double ttft_ns(const struct sl_plan *plan, int32_t n_past, int32_t n_prompt, bool corrected)
{
    double ns = 0;
    for (int32_t left = n_prompt; left > 0;) {
        const int32_t n = left < plan->n_ubatch ? left : plan->n_ubatch;
        const struct sl_tier_plan *const tier = &plan->tiers[sl_plan_tier(plan, n)];
        const struct duration full = duration_at(plan, tier, n_past + n_prompt - left, corrected);
        /* Copies cost the same whatever the pass holds; compute goes with the tokens. */
        const double floor_ns = full.copy_ns < full.pass_ns ? full.copy_ns : full.pass_ns;
        const double part = full.pass_ns * n / tier->n_tokens;
        ns += part > floor_ns ? part : floor_ns;
        left -= n;
    }
    return ns;
}

/* A pass of n sequences, whose time lies between those of full passes of two tiers. */
static double decode_pass_ns(const struct sl_plan *plan, int32_t n, double depth, bool corrected)
{
    const int32_t t = sl_plan_tier(plan, n);
    const struct sl_tier_plan *const tier = &plan->tiers[t];
    const double full = duration_at(plan, tier, depth, corrected).pass_ns;
    if (t == 0 || n >= tier->n_tokens) {
        return full;
    }
    const double below = duration_at(plan, tier - 1, depth, corrected).pass_ns;
    const int32_t n_below = tier[-1].n_tokens;
    return between(below, full, (double)(n - n_below) / (tier->n_tokens - n_below));
}

static double tps(const struct sl_plan *plan, int32_t depth, bool corrected)
{
    double ns = 0;
    for (int32_t left = plan->options.n_seqs; left > 0; left -= plan->n_ubatch) {
        ns += decode_pass_ns(plan, left < plan->n_ubatch ? left : plan->n_ubatch, depth, corrected);
    }
    return ns > 0 ? 1e9 * plan->options.n_seqs / ns : 0;
}

double sl_plan_ttft_ns(const struct sl_plan *plan, int32_t n_past, int32_t n_prompt)
{
    return ttft_ns(plan, n_past, n_prompt, false);
}

double sl_plan_tps(const struct sl_plan *plan)
{
    return tps(plan, plan->depth, false);
}

double sl_plan_tps_at(const struct sl_plan *plan, int32_t depth)
{
    return tps(plan, depth, false);
}

double sl_plan_corrected_ttft_ns(const struct sl_plan *plan, int32_t n_past, int32_t n_prompt)
{
    return ttft_ns(plan, n_past, n_prompt, true);
}

double sl_plan_corrected_tps_at(const struct sl_plan *plan, int32_t depth)
{
    return tps(plan, depth, true);
}
