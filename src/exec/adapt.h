/* SPDX-License-Identifier: Apache-2.0
 *
 * What passes teach: measured times correct the figures that plans are made by, and in the tiers of
 * generation other plans are tried on real passes.
 *
 * Full passes of a tier are noted in windows of a few. At the end of a window the tier's prediction
 * is compared with the median: the CPU's figures are set right by what its steps took, what is left
 * of the difference by those of the busier of GPU and link. Each window counts less than the one
 * before it did, down to a quarter, so that figures follow a change and not the noise.
 *
 * The contest of a tier begins with its first window. The plan in use stands against the plain one
 * (attention and what fits in VRAM, the rest on the CPU; of a mixture experts that are shared), and
 * then against the best other one by the corrected figures. Who is clearly faster on real passes
 * stays. When the tier's passes have been slower by more than 15 % for some windows, there is
 * another contest. All plans of a tier fit the map of the context's plan, so a
 * change of plans is a change of tiers: what the next one holds in VRAM is uploaded beside its
 * first pass.
 *
 * The decisions are functions of numbers; nothing here reads a clock. Nothing fails either: without
 * memory for another plan the one in use stays.
 */
#ifndef SL_EXEC_ADAPT_H
#define SL_EXEC_ADAPT_H

#include "plan/plan.h"

struct sl_context;

#define SL_ADAPT_WINDOW 8
#define SL_ADAPT_MOST_TRIED 2

/* A full pass that was run. */
struct sl_pass_times {
    double pass_ns;
    double cpu_ns; /* of CPU steps */
    int32_t depth; /* cache positions before it */
};

/* What has been seen of a tier. */
struct sl_adapt_tier {
    int32_t n_to_skip; /* passes after a change: uploads, graphs that are not recorded yet */
    int32_t n;
    double pass_ns[SL_ADAPT_WINDOW], cpu_ns[SL_ADAPT_WINDOW];
    int32_t n_windows, n_noted; /* that corrected figures; that were compared */
    uint32_t n_settled;         /* while there is nothing to decide */
    double unexplained;         /* time beside what the corrected figures give */
    /* The contest. While another plan is tried, `best` is the one that it has to beat. */
    bool settled, trying;
    struct sl_tier_plan best;
    double best_ns;     /* of the best plan so far; when settled, of the plan in use */
    int32_t n_strikes;  /* windows in a row that were slower by much */
    int32_t n_contests; /* again */
    struct sl_tier_plan tried[SL_ADAPT_MOST_TRIED];
    int32_t n_tried;
};

struct sl_adapt {
    bool on;
    struct sl_profile profile; /* the model's, corrected */
    struct sl_adapt_tier tiers[SL_N_TIERS];
};

void sl_adapt_init(struct sl_context *ctx, const struct sl_profile *profile);
void sl_adapt_finish(struct sl_context *ctx);
/* After a full pass of a tier, all streams idle. May change the tier's plan. */
void sl_adapt_note(struct sl_context *ctx, int32_t tier, const struct sl_pass_times *times);
/* Between passes: what is being tried is given up, the best plan so far stays. */
void sl_adapt_settle(struct sl_context *ctx);
/* `next`, emptied, becomes the tier's plan, and *old what was it; false: it cannot run, or no
 * memory. */
bool sl_adapt_exchange(struct sl_context *ctx, int32_t tier, struct sl_tier_plan *next,
                       struct sl_tier_plan *old);

#endif
