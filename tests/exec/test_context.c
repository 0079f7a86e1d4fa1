/* SPDX-License-Identifier: Apache-2.0
 *
 * The executor on the simulated device: whatever the budget, strategy, delays and pass sizes, the
 * text is that of the CPU run, the arena stays inside the budget, and failures leave nothing
 * behind.
 */
#include "test.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "exec/context.h"
#include "exec/exec_helper.h"

#define N_CTX 160
#define N_PROMPT 75
#define N_GENERATED 12
#define N_BUDGETS 8
#define MAX_VOCAB 128
#define PAGE 256

/* Rounding differs between orders of summation; a wrong byte, a missing wait or a stale cache cell
 * gives 0.01 and more. Tiny random models can be chaotic (qwen2_yarn: sharp attention over F16
 * keys): where the CPU alone differs from itself between pass sizes, that noise is allowed twice.
 */
#define MAX_MEAN_KL 1e-4
static double kl_bound;

static const char *const models[] = {"llama_freqs", "llama_bias",       "qwen2_yarn", "qwen3",
                                     "gemma3",      "llama_tied_mixed", "mixtral",    "qwen2moe",
                                     "qwen3moe",    "gpt_oss"};
#define N_MODELS (sizeof models / sizeof models[0])

static struct sl_plan_options plan_options(uint64_t budget, enum sl_strategy strategy, int ubatch)
{
    return (struct sl_plan_options){.budget_bytes = budget,
                                    .n_ctx = N_CTX,
                                    .max_ubatch = ubatch,
                                    .max_outputs = 3,
                                    .page_bytes = PAGE,
                                    .kv_types = {SL_TYPE_F16, SL_TYPE_F16},
                                    .strategy = strategy};
}

/* What a run gives: greedy tokens and the logits of every step. */
struct run {
    int32_t tokens[N_GENERATED];
    float logits[N_GENERATED][MAX_VOCAB];
    struct sl_context_stats stats;
};

/* Prompt and greedy tokens. With `force` the tokens of another run are fed, so that logits can be
 * compared step by step. */
static enum sluice_status generate(struct sl_context *ctx, const struct sl_model *model,
                                   const struct run *force, struct run *out,
                                   struct sluice_error *err)
{
    const uint32_t n_vocab = model->hp.n_vocab;
    int32_t prompt[N_PROMPT];
    for (int i = 0; i < N_PROMPT; i++) {
        prompt[i] = (int32_t)((uint32_t)(i * 37 + 11) % n_vocab);
    }
    enum sluice_status status = sl_context_eval(ctx, prompt, N_PROMPT, 1, NULL, err);
    for (int i = 0; i < N_GENERATED && status == SLUICE_STATUS_OK; i++) {
        memcpy(out->logits[i], sl_context_logits(ctx), n_vocab * sizeof(float));
        out->tokens[i] = helper_best_of(out->logits[i], n_vocab);
        const int32_t next = force ? force->tokens[i] : out->tokens[i];
        status = sl_context_eval(ctx, &next, 1, 1, NULL, err);
    }
    sl_context_get_stats(ctx, &out->stats);
    return status;
}

static double mean_kl(const struct run *p, const struct run *q, uint32_t n_vocab)
{
    double total = 0;
    for (int i = 0; i < N_GENERATED; i++) {
        total += helper_mean_kl(p->logits[i], q->logits[i], 1, n_vocab);
    }
    return total / N_GENERATED;
}

/* How many (tier, shard) pairs of all plans were placed how. */
static int n_placed[SL_N_PLACEMENTS];
/* The same of shards that are cut, by kind: shared, and streamed. */
static int n_cut_shared[3], n_cut_streamed[3];
static uint64_t n_swapped; /* experts that were given another's place */
static int n_mixed;        /* plans with a tier that has all three */

/* How the machine of a run differs from the eager one. */
static double link_speed = 1, cpu_slowness = 1;

static void make_machine(struct sl_profile *p)
{
    for (int i = 0; i < SL_N_COPY_SIZES; i++) {
        p->h2d_bytes_per_s[i] *= link_speed;
    }
    for (int t = 0; t < SL_TYPE_N; t++) {
        for (int i = 0; i < SL_N_TIERS; i++) {
            p->linear_ns[SL_UNIT_CPU][t][i] *= cpu_slowness;
            p->linear_ns[SL_UNIT_CPU_BUSY][t][i] *= cpu_slowness;
        }
    }
}

static void count_placements(const struct sl_plan *plan, const struct sl_model *model)
{
    bool mixed = false;
    for (int32_t t = 0; t < plan->n_tiers; t++) {
        int n[SL_N_PLACEMENTS] = {0};
        for (int32_t i = 0; i < plan->n_shards; i++) {
            n[plan->tiers[t].placement[i]]++;
            n_placed[plan->tiers[t].placement[i]]++;
            if (sl_shard_cut(model, &model->shards[i], plan->split) > 0) {
                const int kind = model->shards[i].kind;
                n_cut_shared[kind] += plan->tiers[t].placement[i] == SL_PLACE_SHARED;
                n_cut_streamed[kind] += plan->tiers[t].placement[i] == SL_PLACE_STREAMED &&
                                        plan->resident_rank[i] < plan->tiers[t].n_resident;
            }
        }
        mixed = mixed || (n[0] > 0 && n[1] > 0 && n[2] > 0);
    }
    n_mixed += mixed;
}

static void cpu_run_as(const struct sl_model *model, int ubatch, const struct run *force,
                       struct run *out)
{
    struct sluice_error err;
    struct sl_context *ctx = helper_cpu_context(model, plan_options(0, SL_STRATEGY_AUTO, ubatch));
    assert_ok(generate(ctx, model, force, out, &err), err);
    assert_int_equal(out->stats.arena_bytes, 0);
    sl_context_destroy(&ctx);
}

/* The run that all others must equal, and how far rounding alone takes it. */
static void cpu_run(const struct sl_model *model, int ubatch, struct run *out)
{
    static struct run other;
    cpu_run_as(model, ubatch, NULL, out);
    kl_bound = MAX_MEAN_KL;
    for (int u = 1; u <= 16; u *= 4) {
        cpu_run_as(model, u, out, &other);
        kl_bound = fmax(kl_bound, 2 * mean_kl(out, &other, model->hp.n_vocab));
    }
    assert_true(kl_bound < 5e-3);
}

/* Another token only where the two best are as close as rounding: logits that are off by d give a
 * divergence of about d^2 / 2. */
static void assert_same_tokens(const struct run *wanted, const struct run *got)
{
    for (int i = 0; i < N_GENERATED; i++) {
        const float *logits = wanted->logits[i];
        const double lead = (double)logits[wanted->tokens[i]] - (double)logits[got->tokens[i]];
        if (lead > 2 * sqrt(2 * kl_bound)) {
            fail_msg("step %d: token %d, not %d, which leads by %g", i, got->tokens[i],
                     wanted->tokens[i], lead);
        }
    }
}

/* One run on the sim device; false when the strategy does not fit the budget. */
static bool sim_run(const struct sl_model *model, struct sl_plan_options plan, uint64_t seed,
                    const struct run *wanted, double *kl)
{
    struct sluice_error err;
    const struct sl_sim_options sim = {
        .memory_bytes = 64u << 20, .max_random_delay_ns = 20000, .seed = seed};
    struct sl_device *dev = NULL;
    struct sl_pool *pool = NULL;
    struct sl_profile profile;
    helper_eager_profile(&profile, 2);
    make_machine(&profile);
    /* Mixtures: the GPU cannot read system memory, reads it as a card would, or as fast as the CPU.
     */
    profile.mapped_bytes_per_s = (double)(seed % 3) * 20e9;
    profile.mapped_tiles_bytes_per_s = profile.mapped_bytes_per_s;
    /* And copies cost so little that even these experts are worth being copied ahead. */
    const bool feeds = plan.strategy == SL_STRATEGY_EXPERTS_FED;
    for (int i = 0; i < SL_N_COPY_SIZES && feeds; i++) {
        profile.h2d_bytes_per_s[i] = 60e12;
    }
    assert_ok(sl_device_sim_create(&dev, &sim, &err), err);
    assert_ok(sl_pool_create(&pool, &(struct sl_pool_options){.n_threads = 2}, &err), err);
    const struct sl_context_options options = {
        .device = dev, .pool = pool, .profile = &profile, .plan = plan};
    struct sl_context *ctx = NULL;
    const enum sluice_status status = sl_context_create(&ctx, model, &options, &err);
    if (status == SLUICE_STATUS_BUDGET) {
        if (err.needed <= plan.budget_bytes) {
            fail_msg("refused with %s", err.message);
        }
        assert_null(ctx);
    } else {
        assert_ok(status, err);
        static struct run got;
        count_placements(sl_context_plan(ctx), model);
        assert_ok(generate(ctx, model, wanted, &got, &err), err);
        assert_true(got.stats.arena_bytes <= plan.budget_bytes);
        struct sl_device_info info;
        assert_ok(dev->vt->info(dev, &info, &err), err);
        assert_true(info.total_bytes - info.free_bytes <= plan.budget_bytes);
        n_swapped += got.stats.n_expert_swaps;
        assert_true(got.stats.n_expert_hits <= got.stats.n_expert_uses);
        assert_same_tokens(wanted, &got);
        *kl = mean_kl(wanted, &got, model->hp.n_vocab);
        if (*kl >= kl_bound) {
            fail_msg("mean KL %g, budget %llu", *kl, (unsigned long long)plan.budget_bytes);
        }
    }
    sl_context_destroy(&ctx);
    sl_pool_destroy(&pool);
    sl_device_destroy(&dev);
    return status == SLUICE_STATUS_OK;
}

/* VRAM that everything takes. */
static uint64_t whole_budget(const struct sl_model *model, int ubatch)
{
    struct sluice_error err;
    struct sl_profile profile;
    struct sl_plan *plan = NULL;
    helper_eager_profile(&profile, 2);
    const struct sl_plan_options options =
        plan_options(UINT64_C(1) << 40, SL_STRATEGY_RESIDENT, ubatch);
    assert_ok(sl_plan_create(&plan, model, &profile, &options, &err), err);
    const uint64_t bytes = (plan->arena_bytes + PAGE - 1) / PAGE * PAGE;
    sl_plan_destroy(&plan);
    return bytes;
}

/* Every budget from nothing to everything gives the same text. */
static void test_budgets(void **state)
{
    (void)state;
    static struct run wanted;
    for (size_t m = 0; m < N_MODELS; m++) {
        struct sl_model *model = helper_open_model(models[m], 0, MAX_VOCAB);
        cpu_run(model, 16, &wanted);
        const uint64_t whole = whole_budget(model, 16);
        double worst = 0;
        for (uint64_t step = 0; step <= N_BUDGETS; step++) {
            double kl = 0;
            assert_true(sim_run(model, plan_options(whole * step / N_BUDGETS, SL_STRATEGY_AUTO, 16),
                                step + 1, &wanted, &kl));
            worst = kl > worst ? kl : worst;
        }
        print_message("%s: %llu KiB, mean KL at most %.2g\n", models[m],
                      (unsigned long long)(whole >> 10), worst);
        sl_model_close(&model);
    }
    print_message("placed: %d host, %d streamed, %d resident; %d plans with all three at once\n",
                  n_placed[SL_PLACE_HOST], n_placed[SL_PLACE_STREAMED], n_placed[SL_PLACE_RESIDENT],
                  n_mixed);
    assert_true(n_mixed > 0);
}

/* Every published strategy at every budget in which it fits, with passes of several sizes: rings
 * that wrap, KV on the host, plan switches. */
static void test_strategies(void **state)
{
    (void)state;
    static struct run wanted;
    static const int ubatches[] = {4, 64};
    int n_ran[SL_N_STRATEGIES] = {0};
    for (size_t m = 0; m < N_MODELS; m += 2) {
        struct sl_model *model = helper_open_model(models[m], 0, MAX_VOCAB);
        for (size_t u = 0; u < 2; u++) {
            cpu_run(model, ubatches[u], &wanted);
            const uint64_t whole = whole_budget(model, ubatches[u]);
            for (int s = 1; s < SL_N_STRATEGIES; s++) {
                for (uint64_t step = 2; step <= 6; step += 2) {
                    double kl = 0;
                    n_ran[s] += sim_run(
                        model, plan_options(whole * step / 6, (enum sl_strategy)s, ubatches[u]),
                        step * 100 + (uint64_t)s, &wanted, &kl);
                }
            }
        }
        sl_model_close(&model);
    }
    for (int s = 1; s < SL_N_STRATEGIES; s++) {
        print_message("%s: %d runs\n", sl_strategy_name((enum sl_strategy)s), n_ran[s]);
        assert_true(n_ran[s] > 0);
    }
    assert_true(n_placed[SL_PLACE_SHARED] > 0 && n_placed[SL_PLACE_FED] > 0 && n_swapped > 0);
}

/* Some cut or none of each kind, another for every number. */
static struct sl_split choose_split(const struct sl_model *model, int32_t number)
{
    int32_t cut[3];
    for (int32_t k = 0; k < 3; k++) {
        int32_t unit = 0;
        const int32_t n = helper_cut_end(model, (enum sl_shard_kind)k, &unit);
        cut[k] = n > unit ? (number * (k + 3) + k) % (n / unit) * unit : 0;
    }
    return (struct sl_split){.kv_heads = cut[0], .ffn = cut[1], .head = cut[2]};
}

/* Shards cut in two, of every model and kind, shared and streamed: on machines where the CPU is
 * fast or slow beside the link. */
static void test_cuts(void **state)
{
    (void)state;
    static struct run wanted;
    int n_ran = 0;
    for (size_t m = 0; m < N_MODELS; m++) {
        struct sl_model *model = helper_open_model(models[m], 0, MAX_VOCAB);
        cpu_run(model, 16, &wanted);
        const uint64_t whole = whole_budget(model, 16);
        for (uint64_t step = 2; step <= 13; step++) {
            double kl = 0;
            struct sl_plan_options plan =
                plan_options(whole * (step + 2) / 12, SL_STRATEGY_SPLIT, 16);
            link_speed = step % 2 == 0 ? 1 : 8;
            cpu_slowness = step % 3 == 0 ? 8 : 1;
            plan.split = choose_split(model, (int32_t)step);
            n_ran += sim_run(model, plan, step, &wanted, &kl);
        }
        sl_model_close(&model);
    }
    link_speed = 1;
    cpu_slowness = 1;
    print_message("%d runs; cut and shared: %d attentions, %d feed-forwards, %d heads; streamed: "
                  "%d attentions, %d feed-forwards\n",
                  n_ran, n_cut_shared[SL_SHARD_ATTENTION], n_cut_shared[SL_SHARD_FFN],
                  n_cut_shared[SL_SHARD_HEAD], n_cut_streamed[SL_SHARD_ATTENTION],
                  n_cut_streamed[SL_SHARD_FFN]);
    for (int kind = SL_SHARD_ATTENTION; kind <= SL_SHARD_HEAD; kind++) {
        assert_true(n_cut_shared[kind] > 20);
        assert_true(kind == SL_SHARD_HEAD || n_cut_streamed[kind] > 20);
    }
}

/* A budget below a forced strategy's need names the need, and that need then works. */
static void test_smallest_budget(void **state)
{
    (void)state;
    static struct run wanted;
    struct sluice_error err;
    struct sl_model *model = helper_open_model("llama_freqs", 0, MAX_VOCAB);
    struct sl_profile profile;
    helper_eager_profile(&profile, 2);
    cpu_run(model, 4, &wanted);
    for (int s = SL_STRATEGY_RESIDENT; s < SL_N_STRATEGIES; s++) {
        struct sl_plan *plan = NULL;
        struct sl_plan_options options = plan_options(PAGE, (enum sl_strategy)s, 4);
        assert_status(sl_plan_create(&plan, model, &profile, &options, &err), BUDGET);
        assert_null(plan);
        const uint64_t needed = err.needed;
        double kl = 0;
        assert_true(needed > PAGE);
        options.budget_bytes = needed - PAGE;
        assert_false(sim_run(model, options, 1, &wanted, &kl));
        options.budget_bytes = needed;
        assert_true(sim_run(model, options, 2, &wanted, &kl));
    }
    sl_model_close(&model);
}

/* Outputs of many rows equal those of one row at a time, across passes and logits groups. */
static void test_outputs(void **state)
{
    (void)state;
    struct sluice_error err;
    struct sl_model *model = helper_open_model("qwen3", 0, MAX_VOCAB);
    const uint32_t n_vocab = model->hp.n_vocab;
    struct sl_profile profile;
    struct sl_device *dev = NULL;
    helper_eager_profile(&profile, 1);
    assert_ok(sl_device_sim_create(&dev, NULL, &err), err);
    static float rows[40 * MAX_VOCAB];
    int32_t tokens[40];
    for (int i = 0; i < 40; i++) {
        tokens[i] = (int32_t)((uint32_t)(i * 13 + 5) % n_vocab);
    }
    for (int on_device = 0; on_device < 2; on_device++) {
        const struct sl_context_options options = {
            .device = on_device ? dev : NULL,
            .profile = &profile,
            .plan = plan_options(8u << 20, SL_STRATEGY_AUTO, 16)};
        struct sl_context *ctx = NULL;
        assert_ok(sl_context_create(&ctx, model, &options, &err), err);
        assert_ok(sl_context_eval(ctx, tokens, 40, 33, rows, &err), err);
        assert_int_equal(sl_context_n_past(ctx), 40);
        sl_context_truncate(ctx, 0);
        for (int i = 0; i < 40; i++) {
            assert_ok(sl_context_eval(ctx, &tokens[i], 1, 1, NULL, &err), err);
            const float *const one = sl_context_logits(ctx);
            for (uint32_t v = 0; i >= 7 && v < n_vocab; v++) {
                assert_float_equal(one[v], rows[(size_t)(i - 7) * n_vocab + v], 2e-2);
            }
        }
        /* Full, and out of range. */
        struct sluice_error e;
        int32_t bad = (int32_t)n_vocab;
        assert_status(sl_context_eval(ctx, &bad, 1, 1, NULL, &e), INVALID_ARGUMENT);
        static int32_t many[N_CTX];
        assert_status(sl_context_eval(ctx, many, N_CTX - 39, 0, NULL, &e), INVALID_ARGUMENT);
        assert_mentions(e, "ctx-size");
        assert_int_equal(sl_context_n_past(ctx), 40);
        sl_context_destroy(&ctx);
    }
    sl_device_destroy(&dev);
    sl_model_close(&model);
}

/* Short passes and long ones each by their own number of threads, with the same result. */
static void test_phases(void **state)
{
    (void)state;
    struct sluice_error err;
    struct sl_model *model = helper_open_model("qwen3", 0, MAX_VOCAB);
    struct sl_profile profile;
    struct sl_pool *pool = NULL;
    static float rows[2][MAX_VOCAB];
    int32_t tokens[24];
    for (int i = 0; i < 24; i++) {
        tokens[i] = (int32_t)((uint32_t)(i * 13 + 5) % model->hp.n_vocab);
    }
    helper_eager_profile(&profile, 3);
    assert_ok(sl_pool_create(&pool, &(struct sl_pool_options){.n_threads = 3}, &err), err);
    for (int limited = 0; limited < 2; limited++) {
        const struct sl_context_options options = {.pool = pool,
                                                   .n_threads_short = limited,
                                                   .n_threads_long = 2 * limited,
                                                   .profile = &profile,
                                                   .plan = plan_options(0, SL_STRATEGY_AUTO, 64)};
        struct sl_context *ctx = NULL;
        assert_ok(sl_context_create(&ctx, model, &options, &err), err);
        assert_int_equal(sl_pool_n_threads(pool), 3);
        assert_ok(sl_context_eval(ctx, tokens, 23, 1, NULL, &err), err);
        assert_int_equal(sl_pool_n_threads(pool), limited ? 2 : 3);
        assert_ok(sl_context_eval(ctx, tokens + 23, 1, 1, rows[limited], &err), err);
        assert_int_equal(sl_pool_n_threads(pool), limited ? 1 : 3);
        sl_context_destroy(&ctx);
    }
    assert_memory_equal(rows[0], rows[1], model->hp.n_vocab * sizeof(float));
    sl_pool_destroy(&pool);
    sl_model_close(&model);
}

/* A pass that is longer than a piece (model/shard.c) gives what short passes give. */
static void test_long_pass(void **state)
{
    (void)state;
    enum { N = 1300 };
    struct sluice_error err;
    static const char *const names[] = {"llama_freqs", "gemma3"};
    static int32_t tokens[N];
    static float logits[2][MAX_VOCAB];
    struct sl_profile profile;
    helper_eager_profile(&profile, 1);
    for (size_t m = 0; m < 2; m++) {
        struct sl_model *model = helper_open_model(names[m], 0, MAX_VOCAB);
        for (int i = 0; i < N; i++) {
            tokens[i] = (int32_t)((uint32_t)(i * 29 + 3) % model->hp.n_vocab);
        }
        for (int long_pass = 0; long_pass < 2; long_pass++) {
            struct sl_device *dev = NULL;
            struct sl_context *ctx = NULL;
            assert_ok(sl_device_sim_create(&dev, NULL, &err), err);
            struct sl_context_options options = {
                .device = dev,
                .profile = &profile,
                .plan = plan_options(32u << 20, SL_STRATEGY_AUTO, long_pass ? 2048 : 64)};
            options.plan.n_ctx = N;
            assert_ok(sl_context_create(&ctx, model, &options, &err), err);
            assert_ok(sl_context_eval(ctx, tokens, N, 1, logits[long_pass], &err), err);
            sl_context_destroy(&ctx);
            sl_device_destroy(&dev);
        }
        for (uint32_t v = 0; v < model->hp.n_vocab; v++) {
            assert_float_equal(logits[0][v], logits[1][v], 2e-2);
        }
        sl_model_close(&model);
    }
}

/* The n-th allocation, copy or kernel fails, for every n: an error, no leak, and the context can go
 * on afterwards with the right text. */
static void test_device_faults(void **state)
{
    (void)state;
    static struct run wanted, got;
    struct sluice_error err;
    struct sl_model *model = helper_open_model("llama_freqs", 0, MAX_VOCAB);
    struct sl_profile profile;
    helper_eager_profile(&profile, 1);
    cpu_run(model, 64, &wanted);
    const uint64_t budget = whole_budget(model, 64) * 3 / 4;
    for (int kind = 0; kind < 3; kind++) {
        int n_failed = 0;
        for (uint64_t n = 1;; n += 1 + n / 3) {
            struct sl_sim_options sim = {.memory_bytes = 64u << 20};
            *(kind == 0   ? &sim.fail_alloc_at
              : kind == 1 ? &sim.fail_copy_at
                          : &sim.fail_run_at) = n;
            const size_t blocks = sl_mem_n_blocks();
            struct sl_device *dev = NULL;
            struct sl_context *ctx = NULL;
            assert_ok(sl_device_sim_create(&dev, &sim, &err), err);
            const struct sl_context_options options = {
                .device = dev,
                .profile = &profile,
                .plan = plan_options(budget, SL_STRATEGY_FFN_STREAMED, 64)};
            enum sluice_status status = sl_context_create(&ctx, model, &options, &err);
            bool failed = status != SLUICE_STATUS_OK;
            if (!failed) {
                status = generate(ctx, model, &wanted, &got, &err);
                failed = status != SLUICE_STATUS_OK;
                if (failed) {
                    sl_context_truncate(ctx, 0);
                    assert_ok(generate(ctx, model, &wanted, &got, &err), err);
                }
                assert_memory_equal(got.tokens, wanted.tokens, sizeof got.tokens);
            }
            sl_context_destroy(&ctx);
            sl_device_destroy(&dev);
            assert_int_equal(sl_mem_n_blocks(), blocks);
            if (!failed) {
                break;
            }
            assert_true(status == SLUICE_STATUS_DEVICE || status == SLUICE_STATUS_OUT_OF_MEMORY);
            n_failed++;
        }
        assert_true(n_failed > 0);
    }
    sl_model_close(&model);
}

/* The n-th host allocation fails: an error, no leak. And the token path allocates nothing. */
static void test_host_faults(void **state)
{
    (void)state;
    static struct run wanted, got;
    struct sluice_error err;
    struct sl_model *model = helper_open_model("llama_freqs", 0, MAX_VOCAB);
    struct sl_profile profile;
    struct sl_device *dev = NULL;
    struct sl_context *ctx = NULL;
    helper_eager_profile(&profile, 1);
    cpu_run(model, 16, &wanted);
    struct sl_context_options options = {
        .profile = &profile,
        .plan = plan_options(whole_budget(model, 16) * 2 / 3, SL_STRATEGY_AUTO, 16)};
    for (int64_t n = 0;; n++) {
        const size_t blocks = sl_mem_n_blocks();
        assert_ok(sl_device_sim_create(&dev, NULL, &err), err);
        options.device = dev;
        sl_mem_fail_after(n, false);
        const enum sluice_status status = sl_context_create(&ctx, model, &options, &err);
        const bool fired = sl_mem_fault_fired();
        sl_mem_fail_after(-1, false);
        if (status == SLUICE_STATUS_OK && !fired) {
            break;
        }
        sl_context_destroy(&ctx); /* it may have survived, e.g. without page-locked memory */
        sl_device_destroy(&dev);
        assert_int_equal(sl_mem_n_blocks(), blocks);
    }
    assert_ok(generate(ctx, model, NULL, &got, &err), err); /* first use may grow queues */
    sl_context_truncate(ctx, 0);
    sl_mem_forbid(true);
    const enum sluice_status status = generate(ctx, model, &wanted, &got, &err);
    sl_mem_forbid(false);
    assert_ok(status, err);
    assert_memory_equal(got.tokens, wanted.tokens, sizeof got.tokens);
    sl_context_destroy(&ctx);
    sl_device_destroy(&dev);
    sl_model_close(&model);
}

static bool cancel_third(void *user)
{
    return ++*(int *)user == 3;
}

/* A cancelled pass leaves the sequence as it was. */
static void test_cancel(void **state)
{
    (void)state;
    static struct run wanted, got;
    struct sluice_error err;
    struct sl_model *model = helper_open_model("llama_freqs", 0, MAX_VOCAB);
    struct sl_profile profile;
    struct sl_device *dev = NULL;
    int polls = 0;
    helper_eager_profile(&profile, 1);
    cpu_run(model, 16, &wanted);
    assert_ok(sl_device_sim_create(&dev, NULL, &err), err);
    const struct sl_context_options options = {
        .device = dev,
        .profile = &profile,
        .cancelled = cancel_third,
        .cancelled_user = &polls,
        .plan = plan_options(whole_budget(model, 16) / 2, SL_STRATEGY_AUTO, 16)};
    struct sl_context *ctx = NULL;
    assert_ok(sl_context_create(&ctx, model, &options, &err), err);
    assert_status(generate(ctx, model, NULL, &got, &err), CANCELLED);
    assert_int_equal(sl_context_n_past(ctx), 0);
    assert_ok(generate(ctx, model, NULL, &got, &err), err);
    assert_memory_equal(got.tokens, wanted.tokens, sizeof got.tokens);
    sl_context_destroy(&ctx);
    sl_device_destroy(&dev);
    sl_model_close(&model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_budgets),     cmocka_unit_test(test_strategies),
        cmocka_unit_test(test_cuts),        cmocka_unit_test(test_smallest_budget),
        cmocka_unit_test(test_outputs),     cmocka_unit_test(test_device_faults),
        cmocka_unit_test(test_host_faults), cmocka_unit_test(test_cancel),
        cmocka_unit_test(test_phases),      cmocka_unit_test(test_long_pass),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
