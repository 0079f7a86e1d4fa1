/* SPDX-License-Identifier: Apache-2.0
 *
 * The --stats report (see stats.h).
 */
#include "cli/stats.h"

#define MIB 1048576.0

static double rate(int64_t n, uint64_t ns)
{
    return ns > 0 ? 1e9 * (double)n / (double)ns : 0;
}

static void print_placement(FILE *out, const struct sl_plan *plan)
{
    static const char *const names[] = {"on the CPU", "streamed", "resident", "shared", "fed"};
    for (int32_t t = 0; t<plan->n_tiers; t += plan->n_tiers> 1 ? plan->n_tiers - 1 : 1) {
        int n[SL_N_PLACEMENTS] = {0};
        for (int32_t i = 0; i < plan->n_shards; i++) {
            n[plan->tiers[t].placement[i]]++;
        }
        fprintf(out, "shards      %s:", t == 0 ? "decode " : "prefill");
        for (int p = SL_N_PLACEMENTS - 1; p >= SL_PLACE_HOST; p--) {
            if (sl_place_is_shared((uint8_t)p) && n[p] == 0) {
                continue;
            }
            fprintf(out, " %d %s%s", n[p], names[p], p > 0 ? "," : "\n");
        }
    }
}

void sl_stats_print(FILE *out, const struct sl_engine *e, const struct sl_run_times *times)
{
    struct sl_context_stats s;
    const struct sl_plan *const plan = sl_context_plan(e->ctx);
    sl_context_get_stats(e->ctx, &s);
    if (times) {
        const int32_t depth = (int32_t)(times->n_prompt + times->n_generated / 2);
        fprintf(out, "prompt      %lld tokens in %.3f s, %.2f tokens/s\n",
                (long long)times->n_prompt, (double)times->prompt_ns / 1e9,
                rate(times->n_prompt, times->prompt_ns));
        fprintf(out,
                "generation  %lld tokens in %.3f s, %.2f tokens/s (predicted %.2f, "
                "%.2f by what was measured since)\n",
                (long long)times->n_generated, (double)times->generated_ns / 1e9,
                rate(times->n_generated, times->generated_ns), sl_plan_tps_at(plan, depth),
                sl_plan_corrected_tps_at(plan, depth));
    }
    print_placement(out, plan);
    fprintf(out, "VRAM        peak %.1f MiB of a budget of %.1f MiB", (double)s.arena_bytes / MIB,
            (double)plan->options.budget_bytes / MIB);
    if (e->info.kind == SL_DEVICE_CUDA) {
        fprintf(out, "; the driver's context takes %.1f MiB more",
                (double)e->info.context_bytes / MIB);
    }
    fprintf(out, "\nmemory      %.1f MiB of KV in system memory, %.1f MiB page-locked\n",
            (double)s.host_kv_bytes / MIB, (double)s.locked_bytes / MIB);
    if (s.n_expert_uses > 0) {
        fprintf(out, "experts     %.1f%% of %llu uses from VRAM, %llu brought in meanwhile\n",
                100.0 * (double)s.n_expert_hits / (double)s.n_expert_uses,
                (unsigned long long)s.n_expert_uses, (unsigned long long)s.n_expert_swaps);
    }
    fprintf(out, "copied      %.1f MiB to the device in %llu passes\n",
            (double)s.copied_bytes / MIB, (unsigned long long)s.n_passes);
}
