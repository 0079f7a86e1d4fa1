/* SPDX-License-Identifier: Apache-2.0
 *
 * The planner, over models x machines x strategies x budgets: the VRAM map holds everything without
 * overlap and inside the budget, steps are sound, KV has one home; more budget is not predicted to
 * be slower, no forced strategy beats the search, and a budget that is refused comes with one that
 * works.
 */
#include "test.h"

#include <math.h>
#include <stdio.h>
#include <unistd.h>

#include "base/mem.h"
#include "plan/plan.h"
#include "plan/search.h"
#include "plan_check.h"
#include "synth/synth.h"

#define PAGE 256
#define N_BUDGETS 20
/* How a plan is judged: an answer of 128 tokens to a prompt of 512 (see search.c). */
#define SCORE_GENERATED 128.0
#define SCORE_PROMPT 512.0

/* ---- models: fixtures, and two deep ones made on the spot ---- */

static const char *const fixtures[] = {"llama_tied_mixed", "llama_freqs", "gemma3", "qwen3moe"};
#define N_FIXTURES (sizeof fixtures / sizeof fixtures[0])
static const struct {
    const char *name, *arch, *mix;
} deep[] = {{"deep Q8_0", "llama", "Q8_0"},
            {"deep Q4_K_M", "llama", "Q4_K_M"},
            {"deep mixture", "qwen3moe", "Q8_0"}};
#define N_DEEP (sizeof deep / sizeof deep[0])
#define N_MODELS (N_FIXTURES + N_DEEP)

static struct sl_model *models[N_MODELS];
static const char *model_names[N_MODELS];
static char deep_paths[N_DEEP][512];

static int set_up(void **state)
{
    (void)state;
    struct sluice_error err;
    for (size_t m = 0; m < N_FIXTURES; m++) {
        char path[512];
        snprintf(path, sizeof path, "%s/model/%s.gguf", SLUICE_FIXTURES, fixtures[m]);
        assert_ok(sl_model_open(&models[m], path, 0, &err), err);
        model_names[m] = fixtures[m];
    }
    for (size_t d = 0; d < N_DEEP; d++) {
        struct sl_synth_options o = {.seed = 1};
        assert_true(sl_synth_shape_base(deep[d].arch, &o.shape));
        assert_true(sl_synth_mix_from_name(deep[d].mix, &o.mix));
        o.shape.n_layers = 13;
        o.shape.n_embd = o.shape.n_ff = 256;
        snprintf(deep_paths[d], sizeof deep_paths[d], "%s/test_plan_%ld_%zu.gguf",
                 SLUICE_BINARY_DIR, (long)getpid(), d);
        assert_ok(sl_synth_write(&o, deep_paths[d], &err), err);
        assert_ok(sl_model_open(&models[N_FIXTURES + d], deep_paths[d], 0, &err), err);
        model_names[N_FIXTURES + d] = deep[d].name;
    }
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    for (size_t m = 0; m < N_MODELS; m++) {
        sl_model_close(&models[m]);
    }
    for (size_t d = 0; d < N_DEEP; d++) {
        unlink(deep_paths[d]);
    }
    return 0;
}

/* ---- machines ---- */

enum machine { MACHINE_TYPICAL, MACHINE_EAGER, MACHINE_SLOW_CPU, MACHINE_SLOW_LINK, N_MACHINES };

/* Fixed costs hide everything else in models this small, so three of four machines have none. */
static void make_profile(enum machine machine, struct sl_profile *p)
{
    sl_profile_typical(p, SL_DEVICE_SIM, 4);
    if (machine == MACHINE_TYPICAL) {
        return;
    }
    p->hop_ns = p->issue_ns = 0;
    memset(p->op_ns, 0, sizeof p->op_ns);
    for (int i = 0; i < SL_N_COPY_SIZES; i++) {
        p->h2d_bytes_per_s[i] = machine == MACHINE_SLOW_LINK ? 3e9 : 40e9;
    }
    p->mapped_bytes_per_s = 0.9 * p->h2d_bytes_per_s[0];
    p->mapped_tiles_bytes_per_s = 0.5 * p->h2d_bytes_per_s[0];
    for (uint32_t t = 0; machine == MACHINE_SLOW_CPU && t < SL_TYPE_N; t++) {
        for (int i = 0; i < SL_N_TIERS; i++) {
            p->linear_ns[SL_UNIT_CPU][t][i] *= 6;
            p->linear_ns[SL_UNIT_CPU_BUSY][t][i] *= 9;
        }
    }
}

static struct sl_plan_options plan_options(uint64_t budget, enum sl_strategy strategy, int ubatch)
{
    return (struct sl_plan_options){.budget_bytes = budget,
                                    .n_ctx = 300,
                                    .max_ubatch = ubatch,
                                    .max_outputs = 3,
                                    .page_bytes = PAGE,
                                    .kv_types = {SL_TYPE_F16, SL_TYPE_F16},
                                    .strategy = strategy};
}

/* ---- plans ---- */

/* What the planner minimizes. */
static double score_of(const struct sl_plan *plan)
{
    double best = HUGE_VAL;
    for (int32_t t = 0; t < plan->n_tiers; t++) {
        best = fmin(best, plan->tiers[t].predicted.pass_ns / plan->tiers[t].n_tokens);
    }
    return SCORE_GENERATED * plan->tiers[0].predicted.pass_ns + SCORE_PROMPT * best;
}

/* Make a plan and check it. False when it does not fit; then *needed says what would. */
static bool make_plan(const struct sl_model *model, const struct sl_profile *profile,
                      const struct sl_plan_options *options, double *score, uint64_t *needed)
{
    struct sluice_error err;
    struct sl_plan *plan = NULL;
    const enum sluice_status status = sl_plan_create(&plan, model, profile, options, &err);
    if (status == SLUICE_STATUS_BUDGET) {
        assert_null(plan);
        assert_true(err.needed > options->budget_bytes);
        assert_true(err.allowed == options->budget_bytes);
        assert_mentions(err, sl_strategy_name(options->strategy));
        *needed = err.needed;
        return false;
    }
    assert_ok(status, err);
    check_plan(plan, model);
    *score = score_of(plan);
    *needed = plan->smallest_budget_bytes;
    sl_plan_destroy(&plan);
    assert_null(plan);
    return true;
}

static uint64_t whole_budget(const struct sl_model *model, const struct sl_profile *profile,
                             int ubatch)
{
    struct sluice_error err;
    struct sl_plan *plan = NULL;
    const struct sl_plan_options o = plan_options(UINT64_C(1) << 40, SL_STRATEGY_RESIDENT, ubatch);
    assert_ok(sl_plan_create(&plan, model, profile, &o, &err), err);
    const uint64_t bytes = (plan->arena_bytes + PAGE - 1) / PAGE * PAGE;
    sl_plan_destroy(&plan);
    return bytes;
}

/* ---- tests ---- */

static const int ubatches[] = {0, 4, 64};
#define N_UBATCHES (sizeof ubatches / sizeof ubatches[0])

/* Every budget works, and more of it is never predicted to be slower by more than 5 %. */
static void test_budgets(void **state)
{
    (void)state;
    double worst = 1;
    for (size_t m = 0; m < N_MODELS; m++) {
        for (int machine = 0; machine < N_MACHINES; machine++) {
            struct sl_profile profile;
            make_profile((enum machine)machine, &profile);
            for (size_t u = 0; u < N_UBATCHES; u++) {
                const uint64_t whole = whole_budget(models[m], &profile, ubatches[u]);
                double best = HUGE_VAL;
                for (uint64_t k = 0; k <= N_BUDGETS + 2; k++) {
                    double score = 0;
                    uint64_t needed = 0;
                    const struct sl_plan_options o =
                        plan_options(whole * k / N_BUDGETS, SL_STRATEGY_AUTO, ubatches[u]);
                    assert_true(make_plan(models[m], &profile, &o, &score, &needed));
                    /* Shards are large steps in a model of a few layers. */
                    if (score > 1.05 * best) {
                        fail_msg("%s, machine %d, micro-batch %d, budget %llu of %llu: %.4g ns, "
                                 "%.3f times that of a smaller one",
                                 model_names[m], machine, ubatches[u],
                                 (unsigned long long)o.budget_bytes, (unsigned long long)whole,
                                 score, score / best);
                    }
                    worst = fmax(worst, score / best);
                    best = fmin(best, score);
                }
            }
        }
    }
    print_message("worst step up: %.2f %%\n", 100 * (worst - 1));
}

/* Whatever a forced strategy gives, the search gives at least, but for small gains by cuts. */
static void test_strategies(void **state)
{
    (void)state;
    int n_fit[SL_N_STRATEGIES] = {0}, n_refused[SL_N_STRATEGIES] = {0};
    for (size_t m = 0; m < N_MODELS; m++) {
        for (int machine = 0; machine < N_MACHINES; machine++) {
            struct sl_profile profile;
            make_profile((enum machine)machine, &profile);
            for (size_t u = 0; u < N_UBATCHES; u++) {
                const uint64_t whole = whole_budget(models[m], &profile, ubatches[u]);
                for (uint64_t k = 1; k <= 8; k++) {
                    double best = 0, score = 0;
                    uint64_t needed = 0;
                    struct sl_plan_options o =
                        plan_options(whole * k / 8, SL_STRATEGY_AUTO, ubatches[u]);
                    assert_true(make_plan(models[m], &profile, &o, &best, &needed));
                    for (int s = SL_STRATEGY_HOST; s < SL_N_STRATEGIES; s++) {
                        o.strategy = (enum sl_strategy)s;
                        if (!make_plan(models[m], &profile, &o, &score, &needed)) {
                            n_refused[s]++;
                            continue;
                        }
                        n_fit[s]++;
                        /* Cuts have to gain something. */
                        const double margin = s == SL_STRATEGY_SPLIT ? 1.02 : 1;
                        if (best > score * margin * (1 + 1e-9)) {
                            fail_msg("%s, machine %d, micro-batch %d, budget %llu of %llu: %s is "
                                     "%.3f times as fast as auto",
                                     model_names[m], machine, ubatches[u],
                                     (unsigned long long)o.budget_bytes, (unsigned long long)whole,
                                     sl_strategy_name((enum sl_strategy)s), best / score);
                        }
                    }
                }
            }
        }
    }
    for (int s = SL_STRATEGY_HOST; s < SL_N_STRATEGIES; s++) {
        print_message("%s: %d fit, %d refused\n", sl_strategy_name((enum sl_strategy)s), n_fit[s],
                      n_refused[s]);
        assert_true(n_fit[s] > 0);
        assert_true(s == SL_STRATEGY_HOST || n_refused[s] > 0);
    }
}

/* A refusal names a budget that works and that is the smallest, at any size of page; a budget below
 * one page is refused like any other. */
/* ---- plans at random ---- */

static uint64_t rng_state = 88172645463325252u;

static int32_t below(int32_t n)
{
    rng_state ^= rng_state << 13;
    rng_state ^= rng_state >> 7;
    rng_state ^= rng_state << 17;
    return (int32_t)((rng_state >> 33) % (uint64_t)n);
}

/* The cut of all tiers, or none. */
static void random_split(struct sl_search *s)
{
    const struct sl_shard *const head = &s->model->shards[s->n_shards - 1];
    const int32_t unit = sl_shard_cut_unit(s->model, head);
    const int32_t n_ff = sl_shard_cut_end(s->model, &s->model->shards[1]) / s->cut_unit;
    const int32_t n_rows = sl_shard_cut_end(s->model, head) / unit;
    struct sl_split split = {0};
    if (below(2)) {
        split.ffn = below(n_ff) * s->cut_unit;
        split.head = below(n_rows) * unit;
        split.kv_heads = below((int32_t)s->model->hp.n_kv_heads / s->heads_unit) * s->heads_unit;
        if (split.kv_heads == 0 && below(2)) {
            const int32_t n_blocks = (s->options.n_ctx + SL_KV_BLOCK - 1) / SL_KV_BLOCK;
            split.kv_blocks = below((n_blocks - 1) / SL_CUT_KV_BLOCKS + 1) * SL_CUT_KV_BLOCKS;
        }
    }
    sl_search_set_split(s, split);
}

/* Any placement that fits, tier by tier: residents need be no prefix of anything. Returns the time
 * of the pass, or HUGE_VAL. */
static double random_tier(struct sl_search *s, int32_t tier, int32_t n_kv_layers, int32_t taste)
{
    const struct sl_tier_sizes *const z = &s->sizes[tier];
    const int32_t n = s->n_shards;
    const size_t most = s->max_ffn_bytes > s->max_attention_bytes + s->kv_layer_bytes
                            ? s->max_ffn_bytes
                            : s->max_attention_bytes + s->kv_layer_bytes;
    size_t used = sl_search_base_bytes(s, n_kv_layers) + z->hidden_bytes + z->io_bytes +
                  z->workspace_bytes + z->scratch_bytes + z->logits_bytes;
    const size_t ring = (size_t)below(4) * (most > s->head_bytes ? most : s->head_bytes);
    used += ring;
    if (used > s->budget_bytes) {
        return HUGE_VAL;
    }
    for (int32_t k = 0, first = below(n); k < n; k++) {
        const int32_t i = (int32_t)(((int64_t)first + (int64_t)k * 7) % n);
        const struct sl_shard *const shard = &s->model->shards[i];
        const bool attention = shard->kind == SL_SHARD_ATTENTION;
        const bool kv_here = attention && (int32_t)shard->layer < n_kv_layers;
        const bool is_cut = sl_shard_can_share(s->model, shard, s->split);
        s->item_bytes[i] = s->image_bytes[i] + (attention && !kv_here ? s->kv_host_bytes : 0);
        s->is_in_prefix[i] = false;
        if (attention && is_cut) { /* its part has to be there */
            used += s->resident_bytes[i];
            s->is_in_prefix[i] = true;
            s->item_bytes[i] = s->rest_bytes[i] + s->kv_host_bytes;
            s->placement[i] = ring > 0 && below(3) == 0 ? SL_PLACE_STREAMED : SL_PLACE_SHARED;
            if (used > s->budget_bytes) {
                return HUGE_VAL;
            }
            continue;
        }
        if (!(attention && !kv_here) && used + s->resident_bytes[i] <= s->budget_bytes &&
            below(10) < taste) {
            used += s->resident_bytes[i];
            s->is_in_prefix[i] = true;
            s->item_bytes[i] = s->rest_bytes[i];
            if (!is_cut || below(3) > 0) {
                s->placement[i] = is_cut ? SL_PLACE_SHARED : SL_PLACE_RESIDENT;
                continue;
            }
        }
        const bool stream = kv_here || (ring > 0 && below(3) == 0);
        if (stream && ring == 0) {
            return HUGE_VAL;
        }
        s->placement[i] = stream ? SL_PLACE_STREAMED : SL_PLACE_HOST;
    }
    const int32_t n_steps =
        sl_steps_compile(s->placement, s->item_bytes, n, ring, s->steps, s->step_scratch);
    if (n_steps < 0) {
        return HUGE_VAL;
    }
    for (int32_t i = 0; i < n; i++) {
        const struct sl_shard *const shard = &s->model->shards[i];
        const bool is_cut = sl_shard_can_share(s->model, shard, s->split);
        s->candidate_cost[i] =
            is_cut && s->is_in_prefix[i] ? s->cut_cost[tier][shard->class_id] : s->cost[tier][i];
        if (shard->kind == SL_SHARD_ATTENTION && (is_cut || (int32_t)shard->layer >= n_kv_layers)) {
            sl_cost_stream_kv(s, tier, &s->candidate_cost[i]);
        }
        s->cost_of[i] = &s->candidate_cost[i];
    }
    return sl_steps_simulate(s->steps, n_steps, s->placement, s->cost_of, &s->hop[tier], s->done_ns,
                             s->ready_ns, NULL)
        .pass_ns;
}

static double random_score(struct sl_search *s)
{
    const int32_t taste = 1 + below(10);
    random_split(s);
    const int32_t n_kv_layers = sl_split_cuts_kv(s->split) ? s->n_layers : below(s->n_layers + 1);
    double decode = HUGE_VAL, best = HUGE_VAL;
    for (int32_t t = 0; t < s->n_tiers; t++) {
        double ns = HUGE_VAL; /* a tier must work, so it is tried again */
        for (int k = 0; k < 4 && ns == HUGE_VAL; k++) {
            ns = random_tier(s, t, n_kv_layers, taste);
        }
        if (ns == HUGE_VAL) {
            return HUGE_VAL;
        }
        decode = t == 0 ? ns : decode;
        best = fmin(best, ns / sl_tier_tokens[t]);
    }
    return SCORE_GENERATED * decode + SCORE_PROMPT * best;
}

/* Of 200 random plans none is predicted to be more than 3 % faster. */
static void test_random_plans(void **state)
{
    (void)state;
    int n_feasible = 0;
    for (size_t m = 0; m < N_MODELS; m++) {
        if (models[m]->hp.n_experts > 0) {
            continue; /* placed by counts: test_strategies */
        }
        for (int machine = 0; machine < N_MACHINES; machine++) {
            struct sluice_error err;
            struct sl_profile profile;
            make_profile((enum machine)machine, &profile);
            const uint64_t whole = whole_budget(models[m], &profile, 64);
            for (uint64_t k = 1; k <= 8; k++) {
                const struct sl_plan_options o = plan_options(whole * k / 8, SL_STRATEGY_AUTO, 64);
                double found = 0;
                uint64_t needed = 0;
                struct sl_search s;
                assert_true(make_plan(models[m], &profile, &o, &found, &needed));
                assert_ok(sl_search_init(&s, models[m], &profile, &o, SL_ALL_TIERS, &err), err);
                for (int i = 0; i < 200; i++) {
                    const double score = random_score(&s);
                    n_feasible += score < HUGE_VAL;
                    if (found > 1.03 * score) {
                        fail_msg("%s, machine %d, budget %llu of %llu: a random plan is %.3f times "
                                 "as fast",
                                 model_names[m], machine, (unsigned long long)o.budget_bytes,
                                 (unsigned long long)whole, found / score);
                    }
                }
                sl_search_finish(&s);
            }
        }
    }
    print_message("%d feasible plans\n", n_feasible);
    assert_true(n_feasible > 1000);
}

/* Draws ways of every tier within the map of plans; returns how many. */
static int draw_ways(const struct sl_model *model, const char *name, enum machine machine,
                     int32_t n_draws)
{
    int n_drawn = 0;
    struct sluice_error err;
    struct sl_profile profile;
    uint64_t random = 88172645463325252u;
    make_profile(machine, &profile);
    const uint64_t whole = whole_budget(model, &profile, 64);
    for (uint64_t k = 1; k <= 8; k++) {
        const struct sl_plan_options o = plan_options(whole * k / 8, SL_STRATEGY_AUTO, 64);
        struct sl_plan *plan = NULL;
        assert_ok(sl_plan_create(&plan, model, &profile, &o, &err), err);
        for (int32_t i = 0; plan->arena_bytes > 0 && i < n_draws * plan->n_tiers; i++) {
            const int32_t t = i % plan->n_tiers;
            const struct sl_replan replan = {.tier = t, .depth = o.n_ctx / 2, .random = &random};
            struct sl_tier_plan drawn;
            if (sl_plan_tier_anew(&drawn, plan, model, &profile, &replan, NULL) ==
                SLUICE_STATUS_OK) {
                const double ratio = plan->tiers[t].predicted.pass_ns / drawn.predicted.pass_ns;
                if (ratio > 1.005) {
                    fail_msg("%s, machine %d, budget %llu/8, passes of %d: a way at random is %.3f "
                             "times as fast",
                             name, machine, (unsigned long long)k, drawn.n_tokens, ratio);
                }
                n_drawn++;
            }
            sl_tier_plan_finish(&drawn);
        }
        sl_plan_destroy(&plan);
    }
    return n_drawn;
}

/* Within the map of a plan no tier has a clearly faster way, mixtures included. In a model of many
 * layers not either, where cuts are tried in a space that is coarse. */
static void test_random_ways(void **state)
{
    (void)state;
    int n_drawn = 0;
    struct sluice_error err;
    struct sl_model *deeper = NULL;
    char path[512];
    struct sl_synth_options o = {.seed = 2};
    assert_true(sl_synth_shape_base("llama", &o.shape));
    assert_true(sl_synth_mix_from_name("Q8_0", &o.mix));
    o.shape.n_layers = 40;
    o.shape.n_embd = 256;
    o.shape.n_ff = 1024;
    snprintf(path, sizeof path, "%s/test_plan_%ld_deeper.gguf", SLUICE_BINARY_DIR, (long)getpid());
    assert_ok(sl_synth_write(&o, path, &err), err);
    assert_ok(sl_model_open(&deeper, path, 0, &err), err);
    unlink(path);
    for (int machine = 0; machine < N_MACHINES; machine++) {
        for (size_t m = 0; m < N_MODELS; m++) {
            n_drawn += draw_ways(models[m], model_names[m], (enum machine)machine, 10);
        }
    }
    n_drawn += draw_ways(deeper, "40 layers", MACHINE_SLOW_LINK, 300);
    sl_model_close(&deeper);
    print_message("%d ways\n", n_drawn);
    assert_true(n_drawn > 1000);
}

static void test_smallest_budget(void **state)
{
    (void)state;
    static const size_t pages[] = {PAGE, 4096, 1 << 16};
    for (size_t m = 0; m < N_MODELS; m++) {
        struct sl_profile profile;
        make_profile(MACHINE_EAGER, &profile);
        for (size_t g = 0; g < sizeof pages / sizeof pages[0]; g++) {
            for (int s = SL_STRATEGY_RESIDENT; s < SL_N_STRATEGIES; s++) {
                uint64_t needed = 0, again = 0;
                double score = 0;
                struct sl_plan_options o = plan_options(1, (enum sl_strategy)s, 16);
                o.page_bytes = pages[g];
                assert_false(make_plan(models[m], &profile, &o, &score, &needed));
                assert_int_equal(needed % pages[g], 0);
                o.budget_bytes = needed - 1;
                assert_false(make_plan(models[m], &profile, &o, &score, &again));
                assert_int_equal(again, needed);
                o.budget_bytes = needed;
                assert_true(make_plan(models[m], &profile, &o, &score, &again));
                assert_int_equal(again, needed);
            }
        }
    }
}

/* With `auto` the smallest budget is where the GPU comes into use, if it is of use. */
static void test_smallest_auto(void **state)
{
    (void)state;
    struct sluice_error err;
    for (size_t m = 0; m < N_MODELS; m++) {
        struct sl_profile profile;
        make_profile(MACHINE_SLOW_CPU, &profile);
        struct sl_plan *plan = NULL;
        struct sl_plan_options o = plan_options(0, SL_STRATEGY_AUTO, 4);
        assert_ok(sl_plan_create(&plan, models[m], &profile, &o, &err), err);
        assert_int_equal(plan->arena_bytes, 0);
        const uint64_t smallest = plan->smallest_budget_bytes;
        assert_true(smallest > 0);
        sl_plan_destroy(&plan);
        for (int more = 0; more < 2; more++) {
            o.budget_bytes = more ? smallest : smallest - 1;
            assert_ok(sl_plan_create(&plan, models[m], &profile, &o, &err), err);
            check_plan(plan, models[m]);
            if (!more) {
                assert_int_equal(plan->arena_bytes, 0);
                assert_false(plan->tiers[0].uses_device);
            }
            assert_int_equal(plan->smallest_budget_bytes, smallest);
            sl_plan_destroy(&plan);
        }
    }
}

/* What each published strategy is: read off its placements. */
static void test_shapes(void **state)
{
    (void)state;
    struct sluice_error err;
    struct sl_profile profile;
    make_profile(MACHINE_EAGER, &profile);
    for (size_t m = 0; m < N_MODELS; m++) {
        const struct sl_model *const model = models[m];
        const uint64_t whole = whole_budget(model, &profile, 4);
        for (int s = SL_STRATEGY_HOST; s < SL_N_STRATEGIES; s++) {
            struct sl_plan *plan = NULL;
            const struct sl_plan_options o = plan_options(whole, (enum sl_strategy)s, 4);
            assert_ok(sl_plan_create(&plan, model, &profile, &o, &err), err);
            check_plan(plan, model);
            const struct sl_tier_plan *const tier = &plan->tiers[0];
            int n[SL_N_PLACEMENTS] = {0}, n_ffn[SL_N_PLACEMENTS] = {0};
            for (int32_t i = 0; i < plan->n_shards; i++) {
                n[tier->placement[i]]++;
                n_ffn[tier->placement[i]] += model->shards[i].kind == SL_SHARD_FFN;
            }
            const int head = tier->placement[plan->n_shards - 1];
            switch ((enum sl_strategy)s) {
            case SL_STRATEGY_HOST:
                assert_int_equal(n[SL_PLACE_HOST], plan->n_shards);
                assert_int_equal(plan->arena_bytes, 0);
                break;
            case SL_STRATEGY_RESIDENT:
                assert_int_equal(n[SL_PLACE_RESIDENT], plan->n_shards);
                assert_int_equal(plan->n_kv_layers, model->hp.n_layers);
                break;
            case SL_STRATEGY_RESIDENT_BUT_HEAD:
                assert_int_equal(n[SL_PLACE_RESIDENT], plan->n_shards - 1);
                assert_int_equal(head, SL_PLACE_HOST);
                break;
            case SL_STRATEGY_FFN_HOST:
                assert_int_equal(n_ffn[SL_PLACE_STREAMED], 0);
                break;
            case SL_STRATEGY_FFN_STREAMED:
                assert_int_equal(n[SL_PLACE_HOST], 0);
                break;
            case SL_STRATEGY_EXPERTS_SHARED:
            case SL_STRATEGY_EXPERTS_MAPPED:
            case SL_STRATEGY_EXPERTS_FED:
                assert_int_equal(n_ffn[SL_PLACE_STREAMED], 0);
                assert_true(model->hp.n_experts == 0 || n_ffn[SL_PLACE_HOST] == 0);
                break;
            case SL_STRATEGY_SPLIT:
                assert_true(plan->split.ffn > 0 || plan->split.head > 0 ||
                            sl_split_cuts_kv(plan->split));
                assert_true(model->hp.n_experts == 0 || plan->split.ffn == 0);
                break;
            case SL_STRATEGY_STREAMED:
            default:
                assert_int_equal(n[SL_PLACE_STREAMED], plan->n_shards);
                break;
            }
            sl_plan_destroy(&plan);
        }
    }
}

/* No budget or no GPU: the plan for the CPU alone, whatever the machine. */
static void test_cpu_only(void **state)
{
    (void)state;
    struct sluice_error err;
    for (size_t m = 0; m < N_MODELS; m++) {
        for (int none = 0; none < 2; none++) {
            struct sl_profile profile;
            struct sl_plan *plan = NULL;
            make_profile(MACHINE_TYPICAL, &profile);
            if (none) {
                sl_profile_typical(&profile, SL_DEVICE_NONE, 2);
            }
            const struct sl_plan_options o = plan_options(none ? 1 << 20 : 0, SL_STRATEGY_AUTO, 0);
            assert_ok(sl_plan_create(&plan, models[m], &profile, &o, &err), err);
            check_plan(plan, models[m]);
            assert_int_equal(plan->arena_bytes, 0);
            for (int32_t t = 0; t < plan->n_tiers; t++) {
                assert_false(plan->tiers[t].uses_device);
                assert_true(plan->tiers[t].predicted.gpu_busy_ns == 0);
            }
            sl_plan_destroy(&plan);
        }
    }
}

/* Predictions of whole prompts: longer ones take longer, and a full pass takes what its tier says.
 */
static void test_predictions(void **state)
{
    (void)state;
    struct sluice_error err;
    for (int machine = 0; machine < N_MACHINES; machine++) {
        struct sl_profile profile;
        struct sl_plan *plan = NULL;
        const struct sl_model *const model = models[N_MODELS - 1];
        make_profile((enum machine)machine, &profile);
        const struct sl_plan_options o =
            plan_options(whole_budget(model, &profile, 64) / 2, SL_STRATEGY_AUTO, 64);
        assert_ok(sl_plan_create(&plan, model, &profile, &o, &err), err);
        const struct sl_tier_plan *const last = &plan->tiers[plan->n_tiers - 1];
        assert_int_equal(plan->n_ubatch, 64);
        assert_true(sl_plan_ttft_ns(plan, 0, 0) == 0);
        /* What follows more takes longer, by the same for each position; at the depth that was
         * planned for, a pass takes what its tier says. */
        const double pass_ns = last->predicted.pass_ns;
        const double at_depth = sl_plan_ttft_ns(plan, plan->depth, 64);
        assert_true(fabs(at_depth / pass_ns - 1) < 1e-12);
        const double deeper = sl_plan_ttft_ns(plan, plan->depth + SL_DEEPER, 64);
        assert_true(deeper >= at_depth);
        assert_true(fabs((deeper - at_depth - last->deeper_ns) / pass_ns) < 1e-9);
        const double three = sl_plan_ttft_ns(plan, plan->depth, 192);
        assert_true(fabs((three - 3 * at_depth) / pass_ns -
                         (64 + 128) * last->deeper_ns / SL_DEEPER / pass_ns) < 1e-9);
        assert_true(fabs(sl_plan_tps(plan) * plan->tiers[0].predicted.pass_ns - 1e9) < 1);
        assert_true(fabs(sl_plan_tps_at(plan, 0) * plan->tiers[0].shallow.pass_ns - 1e9) < 1);
        const double halfway = 1e9 / sl_plan_tps_at(plan, plan->depth / 2);
        assert_true(halfway * (1 + 1e-9) >= plan->tiers[0].shallow.pass_ns &&
                    halfway <= plan->tiers[0].predicted.pass_ns * (1 + 1e-9));
        /* What passes at one depth have taught holds at others. */
        plan->tiers[0].corrected_depth = 7;
        plan->tiers[0].corrected.pass_ns = 3e9 / sl_plan_tps_at(plan, 7);
        assert_true(fabs(sl_plan_corrected_tps_at(plan, 7) * 3 / sl_plan_tps_at(plan, 7) - 1) <
                    1e-9);
        assert_true(fabs(sl_plan_corrected_tps_at(plan, 40) * 3 / sl_plan_tps_at(plan, 40) - 1) <
                    1e-9);
        for (int32_t n = 64; n < 640; n += 64) {
            assert_true(sl_plan_ttft_ns(plan, 0, n) < sl_plan_ttft_ns(plan, 0, n + 64));
        }
        sl_plan_destroy(&plan);
    }
}

/* Deeper caches cost more; a plan made for a long context is one for a small budget too. */
static void test_depth(void **state)
{
    (void)state;
    struct sluice_error err;
    struct sl_profile profile;
    make_profile(MACHINE_EAGER, &profile);
    const struct sl_model *const model = models[N_MODELS - 1];
    struct sl_plan_options o = plan_options(1 << 20, SL_STRATEGY_AUTO, 4);
    o.n_ctx = 1 << 16;
    double last = 0;
    for (o.depth = 1; o.depth <= o.n_ctx; o.depth *= 4) {
        struct sl_plan *plan = NULL;
        assert_ok(sl_plan_create(&plan, model, &profile, &o, &err), err);
        check_plan(plan, model);
        assert_int_equal(plan->depth, o.depth);
        assert_true(score_of(plan) >= last);
        last = score_of(plan);
        sl_plan_destroy(&plan);
    }
}

static double resident_pass_ns(const struct sl_profile *profile, int32_t depth)
{
    struct sluice_error err;
    struct sl_plan *plan = NULL;
    struct sl_plan_options o = plan_options(1u << 30, SL_STRATEGY_RESIDENT, 4);
    o.n_ctx = 1 << 14;
    o.depth = depth;
    assert_ok(sl_plan_create(&plan, models[0], profile, &o, &err), err);
    const double ns = plan->tiers[0].predicted.pass_ns;
    sl_plan_destroy(&plan);
    return ns;
}

/* What timing a model has found of its short lists holds for what they are, not for what a deeper
 * cache adds on the GPU. */
static void test_factors_and_depth(void **state)
{
    (void)state;
    struct sl_profile profile;
    make_profile(MACHINE_TYPICAL, &profile);
    const double near = resident_pass_ns(&profile, SL_CALIBRATED_DEPTH);
    const double far = resident_pass_ns(&profile, 1 << 13);
    for (int t = 0; t < SL_N_TIERS; t++) {
        profile.work_factor[SL_UNIT_GPU][SL_WORK_ATTENTION][t] = 3;
    }
    const double slow_near = resident_pass_ns(&profile, SL_CALIBRATED_DEPTH);
    const double slow_far = resident_pass_ns(&profile, 1 << 13);
    assert_true(far > near && slow_near > near);
    assert_true(fabs((slow_far - slow_near) - (far - near)) < 1e-6 * far);
}

/* Layers that the CPU takes thousands of times as long for as the link, and a head that is quick
 * there: no schedule saves the link anything but the head's bytes. */
static void test_limit(void **state)
{
    (void)state;
    struct sluice_error err;
    struct sl_profile profile;
    struct sl_plan *plan = NULL;
    const struct sl_model *const model = models[0];
    make_profile(MACHINE_EAGER, &profile);
    for (int i = 0; i < SL_N_COPY_SIZES; i++) {
        profile.h2d_bytes_per_s[i] = 1e9;
    }
    for (int t = 0; t < SL_N_TIERS; t++) {
        for (int unit = SL_UNIT_CPU; unit <= SL_UNIT_CPU_BUSY; unit++) {
            profile.work_factor[unit][SL_WORK_ATTENTION][t] = 1e6;
            profile.work_factor[unit][SL_WORK_FFN][t] = 1e6;
            profile.work_factor[unit][SL_WORK_HEAD][t] = 1e-3;
        }
    }
    const struct sl_plan_options o = plan_options(1u << 30, SL_STRATEGY_STREAMED, 64);
    assert_ok(sl_plan_create(&plan, model, &profile, &o, &err), err);
    const struct sl_tier_plan *const tier = &plan->tiers[plan->n_tiers - 1];
    double layer_bytes = 0;
    for (uint32_t i = 0; i + 1 < model->n_shards; i++) {
        assert_int_equal(tier->placement[i], SL_PLACE_STREAMED);
        layer_bytes += (double)model->shards[i].bytes;
    }
    assert_int_equal(tier->n_tokens, 64);
    assert_true(tier->limit_ns > 0.99 * layer_bytes && tier->limit_ns <= tier->predicted.pass_ns);
    sl_plan_destroy(&plan);
}

static void test_options(void **state)
{
    (void)state;
    static const struct {
        struct sl_plan_options change;
        const char *wanted;
    } cases[] = {
        {{.n_ctx = 0, .max_outputs = 1}, "context size 0"},
        {{.n_ctx = -5, .max_outputs = 1}, "context size -5"},
        {{.n_ctx = 10, .max_outputs = 0}, "output"},
        {{.n_ctx = 10, .max_outputs = 1, .max_ubatch = -1}, "micro-batch -1"},
        {{.n_ctx = 10, .max_outputs = 1, .strategy = SL_N_STRATEGIES}, "strategy"},
        {{.n_ctx = 10, .max_outputs = 1, .kv_types = {SL_TYPE_F16, SL_TYPE_Q4_K}}, "Q4_K"},
        {{.n_ctx = 10, .max_outputs = 1, .kv_types = {SL_TYPE_F32, SL_TYPE_F16}}, "F32"},
    };
    struct sl_profile profile;
    make_profile(MACHINE_TYPICAL, &profile);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct sluice_error err;
        struct sl_plan *plan = NULL;
        assert_status(sl_plan_create(&plan, models[0], &profile, &cases[i].change, &err),
                      INVALID_ARGUMENT);
        assert_null(plan);
        assert_mentions(err, cases[i].wanted);
    }
    for (int s = 0; s < SL_N_STRATEGIES; s++) {
        enum sl_strategy found = SL_N_STRATEGIES;
        assert_true(sl_strategy_from_name(sl_strategy_name((enum sl_strategy)s), &found));
        assert_int_equal(found, s);
    }
    enum sl_strategy unused;
    assert_false(sl_strategy_from_name("fastest", &unused));
}

/* The n-th allocation fails: an error, and nothing is lost. */
static void test_memory(void **state)
{
    (void)state;
    struct sl_profile profile;
    make_profile(MACHINE_EAGER, &profile);
    const struct sl_model *const model = models[N_MODELS - 1];
    const struct sl_plan_options o =
        plan_options(whole_budget(model, &profile, 16) / 2, SL_STRATEGY_AUTO, 16);
    int n_failed = 0;
    for (int64_t n = 0;; n++) {
        struct sluice_error err;
        struct sl_plan *plan = NULL;
        const size_t blocks = sl_mem_n_blocks();
        sl_mem_fail_after(n, false);
        const enum sluice_status status = sl_plan_create(&plan, model, &profile, &o, &err);
        const bool fired = sl_mem_fault_fired();
        sl_mem_fail_after(-1, false);
        if (!fired) {
            assert_ok(status, err);
            sl_plan_destroy(&plan);
            break;
        }
        assert_string_equal(sluice_status_name(status), "OUT_OF_MEMORY");
        assert_null(plan);
        assert_int_equal(sl_mem_n_blocks(), blocks);
        n_failed++;
    }
    assert_true(n_failed > 10);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_budgets),
        cmocka_unit_test(test_strategies),
        cmocka_unit_test(test_random_plans),
        cmocka_unit_test(test_random_ways),
        cmocka_unit_test(test_smallest_budget),
        cmocka_unit_test(test_smallest_auto),
        cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_cpu_only),
        cmocka_unit_test(test_predictions),
        cmocka_unit_test(test_depth),
        cmocka_unit_test(test_factors_and_depth),
        cmocka_unit_test(test_options),
        cmocka_unit_test(test_memory),
        cmocka_unit_test(test_limit),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
