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

static const struct sl_sim_result *said(const struct sl_tier_plan *tier, bool corrected)
{
    return corrected ? &tier->corrected : &tier->predicted;
}

static double ttft_ns(const struct sl_plan *plan, int32_t n_past, int32_t n_prompt, bool corrected)
{
    double ns = 0;
    for (int32_t left = n_prompt; left > 0;) {
        const int32_t n = left < plan->n_ubatch ? left : plan->n_ubatch;
        const struct sl_tier_plan *const tier = &plan->tiers[sl_plan_tier(plan, n)];
        const struct sl_sim_result *const pass = said(tier, corrected);
        /* Copies cost the same whatever the pass holds and follows; compute goes with the tokens
         * and what they look back on. */
        const double floor_ns =
            pass->copy_busy_ns < pass->pass_ns ? pass->copy_busy_ns : pass->pass_ns;
        const double before = n_past + n_prompt - left - plan->depth;
        const double full = pass->pass_ns + before / SL_DEEPER * tier->deeper_ns;
        const double part = full * n / tier->n_tokens;
        ns += part > floor_ns ? part : floor_ns;
        left -= n;
    }
    return ns;
}

/* A pass of n sequences, whose time lies between those of full passes of two tiers. */
static double decode_pass_ns(const struct sl_plan *plan, int32_t n, bool corrected)
{
    const int32_t t = sl_plan_tier(plan, n);
    const struct sl_tier_plan *const tier = &plan->tiers[t];
    const double full = said(tier, corrected)->pass_ns;
    if (t == 0 || n >= tier->n_tokens) {
        return full;
    }
    const double below = said(tier - 1, corrected)->pass_ns;
    const int32_t n_below = tier[-1].n_tokens;
    return below + (double)(n - n_below) / (tier->n_tokens - n_below) * (full - below);
}

static double tps(const struct sl_plan *plan, bool corrected)
{
    double ns = 0;
    for (int32_t left = plan->options.n_seqs; left > 0; left -= plan->n_ubatch) {
        ns += decode_pass_ns(plan, left < plan->n_ubatch ? left : plan->n_ubatch, corrected);
    }
    return ns > 0 ? 1e9 * plan->options.n_seqs / ns : 0;
}

double sl_plan_ttft_ns(const struct sl_plan *plan, int32_t n_past, int32_t n_prompt)
{
    return ttft_ns(plan, n_past, n_prompt, false);
}

double sl_plan_tps(const struct sl_plan *plan)
{
    return tps(plan, false);
}

double sl_plan_corrected_ttft_ns(const struct sl_plan *plan, int32_t n_past, int32_t n_prompt)
{
    return ttft_ns(plan, n_past, n_prompt, true);
}

double sl_plan_corrected_tps(const struct sl_plan *plan)
{
    return tps(plan, true);
}
