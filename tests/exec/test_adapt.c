/* SPDX-License-Identifier: Apache-2.0
 *
 * Learning from passes. Times are made up from what the plan in use places where, so that every
 * decision is known beforehand: a link that is slower than the profile says, a CPU that is, passes
 * that are as predicted, and passes that change. Plans change between real passes on the simulated
 * device, whose logits must stay those of the CPU alone.
 */
#include "test.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "exec/context_internal.h"
#include "synth/synth.h"

#define N_CTX 128
#define N_PASSES 300
#define MAX_MEAN_KL 1e-3 /* rounding gives a third of it, a wrong byte much more */

static const char *const names[] = {"llama", "gemma3", "qwen3moe", "gpt-oss"};
#define N_NAMES (sizeof names / sizeof names[0])

static void path_of(const char *name, char *out, size_t room)
{
    snprintf(out, room, "%s/test_adapt_%s.gguf", SLUICE_BINARY_DIR, name);
}

/* Models of which a feed-forward takes longer than the moves around it. */
static int write_models(void **state)
{
    (void)state;
    for (size_t m = 0; m < N_NAMES; m++) {
        struct sluice_error err;
        char path[512];
        struct sl_synth_options o = {.mix = {.type = SL_TYPE_Q8_0, .ftype = -1}, .seed = m + 1};
        assert_true(sl_synth_shape_base(names[m], &o.shape));
        o.shape.n_layers = 6;
        o.shape.n_ff = o.shape.n_experts > 0 ? 256 : 2048;
        path_of(names[m], path, sizeof path);
        assert_ok(sl_synth_write(&o, path, &err), err);
    }
    return 0;
}

static int remove_models(void **state)
{
    (void)state;
    for (size_t m = 0; m < N_NAMES; m++) {
        char path[512];
        path_of(names[m], path, sizeof path);
        unlink(path);
    }
    return 0;
}

struct set_up {
    struct sl_model *model;
    struct sl_device *dev;
    struct sl_context *ctx;
};

/* A machine whose plans stream: a link as fast as the device's own work, and a slow CPU. */
static void streaming_profile(struct sl_profile *p)
{
    sl_profile_typical(p, SL_DEVICE_SIM, 1);
    p->hop_ns = p->issue_ns = 0;
    memset(p->op_ns, 0, sizeof p->op_ns);
    for (int i = 0; i < SL_N_COPY_SIZES; i++) {
        p->h2d_bytes_per_s[i] = 20e9;
    }
    p->mapped_bytes_per_s = 15e9;
}

static int count(const struct sl_tier_plan *tier, int32_t n_shards, enum sl_placement placement)
{
    int n = 0;
    for (int32_t i = 0; i < n_shards; i++) {
        n += tier->placement[i] == (uint8_t)placement;
    }
    return n;
}

/* The smallest budget in which as many different things as possible are done with shards. */
static uint64_t mixed_budget(const struct set_up *s, const struct sl_profile *profile,
                             struct sl_plan_options o)
{
    uint64_t best = 0;
    int most = 0;
    for (int k = 1; k <= 64; k++) {
        struct sluice_error err;
        struct sl_plan *plan = NULL;
        o.budget_bytes = s->model->weight_bytes * (uint64_t)k / 32 + (256u << 10);
        if (sl_plan_create(&plan, s->model, profile, &o, &err) != SLUICE_STATUS_OK) {
            continue;
        }
        int n = 0;
        for (int p = 0; p < SL_N_PLACEMENTS; p++) {
            n += count(&plan->tiers[0], plan->n_shards, (enum sl_placement)p) > 0;
        }
        if (n > most && plan->arena_bytes > 0) {
            most = n;
            best = o.budget_bytes;
        }
        sl_plan_destroy(&plan);
    }
    assert_true(best > 0);
    return best;
}

/* budget 0: the one in which most different things are done. */
static void begin_in(struct set_up *s, const char *name, const struct sl_profile *profile,
                     enum sl_strategy strategy, uint64_t seed, uint64_t budget)
{
    struct sluice_error err;
    char path[512];
    const struct sl_sim_options sim = {
        .memory_bytes = 64u << 20, .max_random_delay_ns = 20000, .seed = seed};
    memset(s, 0, sizeof *s);
    path_of(name, path, sizeof path);
    assert_ok(sl_model_open(&s->model, path, 0, &err), err);
    assert_ok(sl_device_sim_create(&s->dev, &sim, &err), err);
    struct sl_context_options o = {.device = s->dev,
                                   .profile = profile,
                                   .adapt = true,
                                   .plan = {.n_ctx = N_CTX,
                                            .max_outputs = 1,
                                            .page_bytes = 256,
                                            .kv_types = {SL_TYPE_F16, SL_TYPE_F16},
                                            .strategy = strategy}};
    o.plan.max_ubatch = 16;
    o.plan.budget_bytes = budget > 0 ? budget : mixed_budget(s, profile, o.plan);
    assert_ok(sl_context_create(&s->ctx, s->model, &o, &err), err);
    assert_true(s->ctx->adapt.on == (strategy == SL_STRATEGY_AUTO));
    s->ctx->adapt.on = false; /* passes are noted here, with other times */
}

static void begin(struct set_up *s, const char *name, const struct sl_profile *profile,
                  enum sl_strategy strategy, uint64_t seed)
{
    begin_in(s, name, profile, strategy, seed, 0);
}

static void end(struct set_up *s)
{
    sl_context_destroy(&s->ctx);
    sl_device_destroy(&s->dev);
    sl_model_close(&s->model);
}

/* What a pass takes on the machine of a test. */
typedef struct sl_pass_times times_fn(const struct sl_context *ctx);

static const struct sl_tier_plan *tier_of(const struct sl_context *ctx)
{
    return &ctx->plan->tiers[0];
}

static struct sl_pass_times slow_link(const struct sl_context *ctx)
{
    const int32_t n = ctx->plan->n_shards;
    const double cpu = 2e5 * count(tier_of(ctx), n, SL_PLACE_HOST);
    return (struct sl_pass_times){.pass_ns =
                                      1e5 + cpu + 1e6 * count(tier_of(ctx), n, SL_PLACE_STREAMED),
                                  .cpu_ns = cpu,
                                  .depth = 20};
}

static struct sl_pass_times slow_cpu(const struct sl_context *ctx)
{
    const int32_t n = ctx->plan->n_shards;
    const double cpu =
        1e6 * (count(tier_of(ctx), n, SL_PLACE_HOST) + count(tier_of(ctx), n, SL_PLACE_SHARED));
    return (struct sl_pass_times){.pass_ns =
                                      1e5 + cpu + 1e5 * count(tier_of(ctx), n, SL_PLACE_STREAMED),
                                  .cpu_ns = cpu,
                                  .depth = 20};
}

static double initial_ns; /* what the first plan takes in `as_before` */

static struct sl_pass_times as_before(const struct sl_context *ctx)
{
    (void)ctx;
    return (struct sl_pass_times){.pass_ns = initial_ns, .depth = 20};
}

/* Note passes until nothing is tried any more; the plan must never have been worse than the first
 * one when it is over. Returns how often the plan changed. */
static int settle(struct set_up *s, times_fn *times)
{
    struct sl_context *const ctx = s->ctx;
    const struct sl_pass_times first = times(ctx);
    const uint8_t *placement = tier_of(ctx)->placement;
    int n_changes = 0;
    for (int i = 0; i < N_PASSES && !ctx->adapt.tiers[0].settled; i++) {
        const struct sl_pass_times t = times(ctx);
        sl_adapt_note(ctx, 0, &t);
        n_changes += tier_of(ctx)->placement != placement;
        placement = tier_of(ctx)->placement;
    }
    struct sluice_error err;
    assert_true(ctx->adapt.tiers[0].settled);
    assert_true(times(ctx).pass_ns <= first.pass_ns);
    assert_ok(sl_plan_check(ctx->plan, ctx->model, &err), err);
    return n_changes;
}

static void test_slow_link(void **state)
{
    (void)state;
    for (size_t m = 0; m < N_NAMES; m++) {
        struct set_up s;
        struct sl_profile profile;
        streaming_profile(&profile);
        for (int u = SL_UNIT_CPU; u <= SL_UNIT_CPU_BUSY; u++) {
            for (int work = 0; work < SL_N_WORKS; work++) {
                profile.work_factor[u][work][0] = 9;
            }
        }
        profile.mapped_bytes_per_s = 0;
        begin(&s, names[m], &profile, SL_STRATEGY_AUTO, 1);
        const int n_before = count(tier_of(s.ctx), s.ctx->plan->n_shards, SL_PLACE_STREAMED);
        const double predicted = tier_of(s.ctx)->predicted.pass_ns;
        settle(&s, slow_link);
        const int n_after = count(tier_of(s.ctx), s.ctx->plan->n_shards, SL_PLACE_STREAMED);
        print_message("%s: streamed %d, then %d, copies %.1f times as long\n", names[m], n_before,
                      n_after, s.ctx->adapt.profile.copy_factor);
        if (n_before > 0) {
            assert_true(n_after < n_before);
            /* Where the link alone decided it is to blame. */
            assert_true(s.model->hp.n_experts > 0 || s.ctx->adapt.profile.copy_factor > 1.5);
        }
        /* What was said at first is still known beside what is said now. */
        assert_true(tier_of(s.ctx)->predicted.pass_ns == predicted);
        end(&s);
    }
}

static void test_slow_cpu(void **state)
{
    (void)state;
    for (size_t m = 0; m < N_NAMES; m++) {
        struct set_up s;
        struct sl_profile profile;
        streaming_profile(&profile);
        profile.mapped_bytes_per_s = m % 2 ? 15e9 : 0;
        begin(&s, names[m], &profile, SL_STRATEGY_AUTO, 1);
        const double cpu_before = slow_cpu(s.ctx).cpu_ns;
        const double factor = profile.work_factor[SL_UNIT_CPU][SL_WORK_FFN][0];
        settle(&s, slow_cpu);
        print_message("%s: CPU %.1f ms, then %.1f ms\n", names[m], cpu_before * 1e-6,
                      slow_cpu(s.ctx).cpu_ns * 1e-6);
        if (cpu_before > 0) {
            assert_true(s.ctx->adapt.profile.work_factor[SL_UNIT_CPU][SL_WORK_FFN][0] > 2 * factor);
        }
        end(&s);
    }
}

/* Equal times are no reason to change; other times than before are one to try again. */
static void test_steady(void **state)
{
    (void)state;
    struct set_up s;
    struct sl_profile profile;
    streaming_profile(&profile);
    begin(&s, "llama", &profile, SL_STRATEGY_AUTO, 1);
    const int32_t n = s.ctx->plan->n_shards;
    uint8_t before[64];
    assert_true(n <= 64);
    memcpy(before, tier_of(s.ctx)->placement, (size_t)n);
    initial_ns = tier_of(s.ctx)->predicted.pass_ns;
    settle(&s, as_before);
    assert_memory_equal(before, tier_of(s.ctx)->placement, (size_t)n);
    /* A little slower: nothing. Much slower: another contest, which ends. */
    initial_ns *= 1.1;
    for (int i = 0; i < N_PASSES; i++) {
        const struct sl_pass_times t = as_before(s.ctx);
        sl_adapt_note(s.ctx, 0, &t);
        assert_true(s.ctx->adapt.tiers[0].settled);
    }
    initial_ns *= 1.5;
    assert_int_equal(s.ctx->adapt.tiers[0].n_contests, 0);
    for (int i = 0; i < N_PASSES; i++) {
        const struct sl_pass_times t = as_before(s.ctx);
        sl_adapt_note(s.ctx, 0, &t);
    }
    assert_int_equal(s.ctx->adapt.tiers[0].n_contests, 1);
    assert_true(s.ctx->adapt.tiers[0].settled);
    /* The prediction follows. */
    assert_true(fabs(tier_of(s.ctx)->corrected.pass_ns / initial_ns - 1) < 0.15);
    end(&s);
}

/* Where the GPU alone decides, short passes correct what was timed of the model; deep ones, whose
 * time is that of the cache, do not. */
static void test_deep(void **state)
{
    (void)state;
    struct sl_profile profile;
    streaming_profile(&profile);
    for (int t = 0; t < SL_N_TIERS; t++) {
        for (int type = 0; type < SL_TYPE_N; type++) {
            profile.linear_ns[SL_UNIT_CPU][type][t] *= 1000;
            profile.linear_ns[SL_UNIT_CPU_BUSY][type][t] *= 1000;
        }
    }
    for (int is_deep = 0; is_deep < 2; is_deep++) {
        struct set_up s;
        begin_in(&s, "llama", &profile, SL_STRATEGY_AUTO, 1, 48u << 20);
        assert_int_equal(count(tier_of(s.ctx), s.ctx->plan->n_shards, SL_PLACE_RESIDENT),
                         s.ctx->plan->n_shards);
        struct sl_sim_result at;
        const struct sl_replan replan = {.depth = is_deep ? 1 << 20 : 20};
        assert_ok(sl_plan_predict(&at, s.ctx->plan, s.model, &profile, &replan, NULL),
                  (struct sluice_error){0});
        assert_true(at.cpu_busy_ns == 0 && at.copy_busy_ns == 0);
        const struct sl_pass_times t = {.pass_ns = at.pass_ns / 2, .depth = replan.depth};
        for (int i = 0; i < N_PASSES; i++) {
            sl_adapt_note(s.ctx, 0, &t);
        }
        const double factor = s.ctx->adapt.profile.work_factor[SL_UNIT_GPU][SL_WORK_FFN][0] /
                              profile.work_factor[SL_UNIT_GPU][SL_WORK_FFN][0];
        assert_true(is_deep ? factor == 1 : factor < 0.7);
        assert_true(fabs(tier_of(s.ctx)->corrected.pass_ns / t.pass_ns - 1) < 0.15);
        end(&s);
    }
}

/* Whenever it is told to, a contest ends with the best plan so far. */
static void test_told(void **state)
{
    (void)state;
    for (int n_passes = 0; n_passes < 80; n_passes += 3) {
        struct sluice_error err;
        struct set_up s;
        struct sl_profile profile;
        static uint64_t budget;
        streaming_profile(&profile);
        begin_in(&s, "llama", &profile, SL_STRATEGY_AUTO, 1, budget);
        budget = s.ctx->plan->options.budget_bytes;
        double best_ns = slow_cpu(s.ctx).pass_ns;
        for (int i = 0; i < n_passes; i++) {
            const struct sl_pass_times t = slow_cpu(s.ctx);
            sl_adapt_note(s.ctx, 0, &t);
            if (!s.ctx->adapt.tiers[0].trying) {
                best_ns = slow_cpu(s.ctx).pass_ns;
            }
        }
        sl_context_settle(s.ctx);
        assert_true(s.ctx->adapt.tiers[0].settled);
        assert_true(slow_cpu(s.ctx).pass_ns <= best_ns);
        assert_ok(sl_plan_check(s.ctx->plan, s.model, &err), err);
        const int32_t token = 7;
        assert_ok(sl_context_eval(s.ctx, &token, 1, 1, NULL, &err), err);
        end(&s);
    }
}

/* A forced strategy is what was asked for. */
static void test_forced(void **state)
{
    (void)state;
    struct set_up s;
    struct sl_profile profile;
    streaming_profile(&profile);
    begin(&s, "llama", &profile, SL_STRATEGY_FFN_STREAMED, 1);
    assert_true(sl_context_is_settled(s.ctx, 1));
    end(&s);
}

static double kl_of(const float *p, const float *q, uint32_t n)
{
    double zp = 0, zq = 0, kl = 0;
    for (uint32_t v = 0; v < n; v++) {
        zp += exp((double)p[v]);
        zq += exp((double)q[v]);
    }
    for (uint32_t v = 0; v < n; v++) {
        const double lp = p[v] - log(zp), lq = q[v] - log(zq);
        kl += exp(lp) * (lp - lq);
    }
    return kl;
}

/* Plans change between real passes. */
static void test_same_text(void **state)
{
    (void)state;
    static times_fn *const machines[] = {slow_link, slow_cpu};
    int n_changes = 0;
    for (size_t m = 0; m < N_NAMES * 2; m++) {
        struct sluice_error err;
        struct set_up s;
        struct sl_profile profile, host;
        struct sl_context *reference = NULL;
        streaming_profile(&profile);
        sl_profile_typical(&host, SL_DEVICE_NONE, 1);
        begin(&s, names[m / 2], &profile, SL_STRATEGY_AUTO, 3 + m);
        const struct sl_context_options o = {.profile = &host, .plan = s.ctx->plan->options};
        assert_ok(sl_context_create(&reference, s.model, &o, &err), err);
        const uint32_t n_vocab = s.model->hp.n_vocab;
        double kl = 0;
        for (int i = 0; i < N_CTX; i++) {
            const int32_t token = (int32_t)((uint32_t)(i * 37 + 11) % n_vocab);
            assert_ok(sl_context_eval(s.ctx, &token, 1, 1, NULL, &err), err);
            assert_ok(sl_context_eval(reference, &token, 1, 1, NULL, &err), err);
            kl += kl_of(sl_context_logits(reference), sl_context_logits(s.ctx), n_vocab) / N_CTX;
            const uint8_t *const placement = tier_of(s.ctx)->placement;
            const struct sl_pass_times t = machines[m % 2](s.ctx);
            sl_adapt_note(s.ctx, 0, &t);
            n_changes += tier_of(s.ctx)->placement != placement;
        }
        if (kl > MAX_MEAN_KL) {
            fail_msg("%s: mean divergence %g", names[m / 2], kl);
        }
        sl_context_destroy(&reference);
        end(&s);
    }
    print_message("%d changes of plans\n", n_changes);
    assert_true(n_changes > 10);
}

/* So they do when any plan that fits takes the place of the one before, and none of them is
 * promised to be faster than the one that was found. */
static void test_random_plans(void **state)
{
    (void)state;
    int n_changes = 0;
    for (size_t m = 0; m < N_NAMES; m++) {
        struct sluice_error err;
        struct set_up s;
        struct sl_profile profile, host;
        struct sl_context *reference = NULL;
        uint64_t random = 12345 + m;
        streaming_profile(&profile);
        sl_profile_typical(&host, SL_DEVICE_NONE, 1);
        begin(&s, names[m], &profile, SL_STRATEGY_AUTO, 30 + m);
        const struct sl_context_options o = {.profile = &host, .plan = s.ctx->plan->options};
        assert_ok(sl_context_create(&reference, s.model, &o, &err), err);
        const struct sl_plan *const plan = sl_context_plan(s.ctx);
        const double found_ns = plan->tiers[0].predicted.pass_ns;
        const uint32_t n_vocab = s.model->hp.n_vocab;
        double kl = 0;
        for (int i = 0; i < N_CTX; i++) {
            const struct sl_replan replan = {
                .tier = 0, .depth = plan->options.n_ctx / 2, .random = &random};
            struct sl_tier_plan next, old;
            if (sl_plan_tier_anew(&next, plan, s.model, &profile, &replan, &err) ==
                SLUICE_STATUS_OK) {
                assert_true(found_ns <= 1.03 * next.predicted.pass_ns);
                if (sl_context_exchange_tier(s.ctx, 0, &next, &old)) {
                    n_changes += memcmp(old.placement, plan->tiers[0].placement,
                                        (size_t)plan->n_shards) != 0;
                    sl_tier_plan_finish(&old);
                }
                sl_tier_plan_finish(&next);
            }
            assert_ok(sl_plan_check(plan, s.model, &err), err);
            const int32_t token = (int32_t)((uint32_t)(i * 37 + 11) % n_vocab);
            assert_ok(sl_context_eval(s.ctx, &token, 1, 1, NULL, &err), err);
            assert_ok(sl_context_eval(reference, &token, 1, 1, NULL, &err), err);
            kl += kl_of(sl_context_logits(reference), sl_context_logits(s.ctx), n_vocab) / N_CTX;
        }
        if (kl > MAX_MEAN_KL) {
            fail_msg("%s: mean divergence %g", names[m], kl);
        }
        sl_context_destroy(&reference);
        end(&s);
    }
    print_message("%d changes of plans\n", n_changes);
    assert_true(n_changes > N_CTX);
}

/* The same with nothing made up: a link that takes many times as long as the CPU would. */
static void test_real_passes(void **state)
{
    (void)state;
    struct sluice_error err;
    struct set_up s;
    struct sl_profile profile, host;
    struct sl_context *reference = NULL;
    streaming_profile(&profile);
    for (int u = SL_UNIT_CPU; u <= SL_UNIT_CPU_BUSY; u++) {
        for (int work = 0; work < SL_N_WORKS; work++) {
            profile.work_factor[u][work][0] = 9;
        }
    }
    sl_profile_typical(&host, SL_DEVICE_NONE, 1);
    begin(&s, "llama", &profile, SL_STRATEGY_AUTO, 1);
    s.ctx->adapt.on = true;
    sl_device_sim_set(s.dev, &(struct sl_sim_options){.copy_bytes_per_s = 50e6});
    const struct sl_context_options o = {.profile = &host, .plan = s.ctx->plan->options};
    assert_ok(sl_context_create(&reference, s.model, &o, &err), err);
    const int n_before = count(tier_of(s.ctx), s.ctx->plan->n_shards, SL_PLACE_STREAMED);
    assert_true(n_before > 0);
    double kl = 0;
    int i = 0;
    for (; i < N_CTX && !sl_context_is_settled(s.ctx, 1); i++) {
        const int32_t token = (int32_t)((uint32_t)(i * 37 + 11) % s.model->hp.n_vocab);
        assert_ok(sl_context_eval(s.ctx, &token, 1, 1, NULL, &err), err);
        assert_ok(sl_context_eval(reference, &token, 1, 1, NULL, &err), err);
        kl += kl_of(sl_context_logits(reference), sl_context_logits(s.ctx), s.model->hp.n_vocab);
    }
    const int n_after = count(tier_of(s.ctx), s.ctx->plan->n_shards, SL_PLACE_STREAMED);
    print_message("streamed %d, then %d\n", n_before, n_after);
    assert_true(n_after < n_before);
    assert_true(sl_context_profile(s.ctx)->copy_factor > 2);
    assert_true(kl / i < MAX_MEAN_KL);
    sl_context_destroy(&reference);
    end(&s);
}

/* Without memory for another plan the one in use goes on. */
static void test_no_memory(void **state)
{
    (void)state;
    const size_t blocks = sl_mem_n_blocks();
    uint64_t budgets[2] = {0};
    for (int64_t at = 0; at < 200; at++) {
        struct sluice_error err;
        struct set_up s;
        struct sl_profile profile;
        streaming_profile(&profile);
        begin_in(&s, names[at % 2 ? 0 : 2], &profile, SL_STRATEGY_AUTO, 1, budgets[at % 2]);
        budgets[at % 2] = s.ctx->plan->options.budget_bytes;
        sl_mem_fail_after(at, at % 3 == 0);
        for (int i = 0; i < 60; i++) {
            const struct sl_pass_times t = slow_link(s.ctx);
            sl_adapt_note(s.ctx, 0, &t);
        }
        sl_mem_fail_after(-1, false);
        assert_ok(sl_plan_check(s.ctx->plan, s.model, &err), err);
        const int32_t token = 3;
        assert_ok(sl_context_eval(s.ctx, &token, 1, 1, NULL, &err), err);
        end(&s);
        assert_int_equal(sl_mem_n_blocks(), blocks);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_slow_link),   cmocka_unit_test(test_slow_cpu),
        cmocka_unit_test(test_steady),      cmocka_unit_test(test_forced),
        cmocka_unit_test(test_told),        cmocka_unit_test(test_deep),
        cmocka_unit_test(test_same_text),   cmocka_unit_test(test_random_plans),
        cmocka_unit_test(test_real_passes), cmocka_unit_test(test_no_memory)};
    return cmocka_run_group_tests(tests, write_models, remove_models);
}
