/* SPDX-License-Identifier: Apache-2.0
 *
 * Caches of fewer bits. What they cost in the text is what they cost llama.cpp (tests/fixtures/
 * model/kv_types.txt, made by tools/fixtures/kv_types.py); and wherever the cache lives, in VRAM,
 * on the host, or streamed through the ring, the text is that of the CPU with the same cache.
 */
#include "test.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "exec/context.h"
#include "exec/exec_helper.h"

#define MAX_TOKENS 64
#define MAX_VOCAB 64
#define PAGE 256

/* Both round values, and keys of eight bits, alike, so that they lose alike; the products around
 * them round in ways of their own, which is the noise. Keys of four bits are turned before they are
 * rounded here (op/kv.h), and lose less. A cache that silently stayed F16 would lose nothing: the
 * lower bounds find that wherever four bits are asked for. */
#define MOST_OF_ORACLE 1.5
#define LEAST_OF_ORACLE 0.7
#define MOST_WHEN_TURNED 3.0
#define LEAST_WHEN_TURNED 0.1
#define NOISE_KL 2e-4
#define MAX_DEVICE_KL 1e-6

struct setup {
    struct sl_model *model;
    int32_t tokens[MAX_TOKENS];
    int n_tokens;
};

static void open_setup(struct setup *s, const char *name)
{
    s->model = helper_open_model(name, 0, MAX_VOCAB);
    s->n_tokens = helper_read_tokens(name, s->tokens, MAX_TOKENS);
}

static struct sl_plan_options plan_options(struct sl_kv_types types)
{
    return (struct sl_plan_options){.n_ctx = 2 * SL_KV_BLOCK,
                                    .max_ubatch = 16,
                                    .max_outputs = 16,
                                    .page_bytes = PAGE,
                                    .kv_types = types};
}

/* Logits of every token. */
static void compute(struct sl_context *ctx, const struct setup *s, float *logits)
{
    struct sluice_error err;
    sl_context_truncate(ctx, 0);
    assert_ok(sl_context_eval(ctx, s->tokens, s->n_tokens, s->n_tokens, logits, &err), err);
}

static void compute_on_cpu(const struct setup *s, struct sl_kv_types types, int32_t ubatch,
                           float *logits)
{
    struct sl_plan_options plan = plan_options(types);
    plan.max_ubatch = ubatch;
    struct sl_context *ctx = helper_cpu_context(s->model, plan);
    compute(ctx, s, logits);
    sl_context_destroy(&ctx);
}

static enum sl_type type_by_name(const char *name)
{
    for (int i = 0; i < SL_N_KV_TYPES; i++) {
        if (strcasecmp(name, sl_type_name(sl_kv_type_list[i])) == 0) {
            return sl_kv_type_list[i];
        }
    }
    fail_msg("%s is no type of a cache", name);
    return SL_TYPE_F16;
}

static void test_oracle(void **state)
{
    (void)state;
    static float exact[MAX_TOKENS * MAX_VOCAB], got[MAX_TOKENS * MAX_VOCAB];
    static const struct sl_kv_types f16 = {SL_TYPE_F16, SL_TYPE_F16};
    char path[512], name[64], now[64] = "", k[16], v[16];
    double wanted = 0;
    int n_rows = 0;
    struct setup s = {0};
    snprintf(path, sizeof path, "%s/model/kv_types.txt", SLUICE_FIXTURES);
    FILE *const file = fopen(path, "r");
    assert_non_null(file);
    assert_int_equal(fscanf(file, "#%*[^\n]"), 0);
    while (fscanf(file, "%63s %15s %15s %lf", name, k, v, &wanted) == 4) {
        if (strcmp(name, now) != 0) {
            sl_model_close(&s.model);
            open_setup(&s, name);
            compute_on_cpu(&s, f16, 16, exact);
            snprintf(now, sizeof now, "%s", name);
        }
        compute_on_cpu(&s, (struct sl_kv_types){type_by_name(k), type_by_name(v)}, 16, got);
        const double kl = helper_mean_kl(exact, got, s.n_tokens, s.model->hp.n_vocab);
        print_message("%s %s/%s: mean KL %.3g, llama.cpp %.3g\n", name, k, v, kl, wanted);
        const bool turned = type_by_name(k) == SL_TYPE_Q4_0;
        const double most = turned ? MOST_WHEN_TURNED : MOST_OF_ORACLE;
        const double least = turned ? LEAST_WHEN_TURNED : LEAST_OF_ORACLE;
        if (kl > most * wanted + NOISE_KL || kl < least * wanted - NOISE_KL) {
            fail_msg("%s, keys %s, values %s: mean KL %g, llama.cpp %g", name, k, v, kl, wanted);
        }
        n_rows++;
    }
    fclose(file);
    sl_model_close(&s.model);
    assert_true(n_rows >= SL_N_KV_TYPES * SL_N_KV_TYPES - 1);
}

/* How many layers of a plan's prompt tier have their cache where. */
struct homes {
    int in_vram, streamed, on_host;
};

static void count_homes(const struct sl_plan *plan, const struct sl_model *model, struct homes *out)
{
    const struct sl_tier_plan *const tier = &plan->tiers[plan->n_tiers - 1];
    for (int32_t i = 0; i < plan->n_shards; i++) {
        const struct sl_shard *const shard = &model->shards[i];
        if (shard->kind == SL_SHARD_ATTENTION) {
            *((int32_t)shard->layer < plan->n_kv_layers ? &out->in_vram
              : tier->placement[i] == SL_PLACE_STREAMED ? &out->streamed
                                                        : &out->on_host) += 1;
        }
    }
}

/* One run on the simulated device against the CPU's in passes of the same size: another size rounds
 * otherwise, and a key on the border of two steps then goes the other way. */
static void check_on_device(const struct setup *s, struct sl_plan_options plan, uint64_t seed,
                            struct homes *homes)
{
    static float wanted[MAX_TOKENS * MAX_VOCAB], got[MAX_TOKENS * MAX_VOCAB];
    struct sluice_error err;
    struct sl_profile profile;
    struct sl_device *dev = NULL;
    struct sl_context *ctx = NULL;
    const struct sl_sim_options sim = {
        .memory_bytes = 64u << 20, .max_random_delay_ns = 20000, .seed = seed};
    sl_profile_typical(&profile, SL_DEVICE_SIM, 1);
    profile.hop_ns = profile.issue_ns = 0;
    assert_ok(sl_device_sim_create(&dev, &sim, &err), err);
    const struct sl_context_options options = {.device = dev, .profile = &profile, .plan = plan};
    assert_ok(sl_context_create(&ctx, s->model, &options, &err), err);
    count_homes(sl_context_plan(ctx), s->model, homes);
    compute(ctx, s, got);
    compute_on_cpu(s, plan.kv_types, sl_context_plan(ctx)->n_ubatch, wanted);
    const double kl = helper_mean_kl(wanted, got, s->n_tokens, s->model->hp.n_vocab);
    if (!(kl < MAX_DEVICE_KL)) {
        fail_msg("keys %s, values %s, strategy %s, %llu bytes: mean KL %g (at most %g)",
                 sl_type_name(plan.kv_types.k), sl_type_name(plan.kv_types.v),
                 sl_strategy_name(plan.strategy), (unsigned long long)plan.budget_bytes, kl,
                 MAX_DEVICE_KL);
    }
    sl_context_destroy(&ctx);
    sl_device_destroy(&dev);
}

/* The smallest budget of a strategy. */
static uint64_t least_budget(const struct setup *s, struct sl_plan_options options)
{
    struct sluice_error err;
    struct sl_profile profile;
    struct sl_plan *plan = NULL;
    sl_profile_typical(&profile, SL_DEVICE_SIM, 1);
    options.budget_bytes = PAGE;
    assert_status(sl_plan_create(&plan, s->model, &profile, &options, &err), BUDGET);
    return err.needed;
}

/* Every pair, its cache in each of its homes. */
static void test_homes(void **state)
{
    (void)state;
    static const char *const names[] = {"llama_freqs", "gemma3", "qwen3"};
    static const enum sl_strategy strategies[] = {SL_STRATEGY_STREAMED, SL_STRATEGY_FFN_HOST,
                                                  SL_STRATEGY_FFN_STREAMED, SL_STRATEGY_RESIDENT,
                                                  SL_STRATEGY_SPLIT};
    struct homes homes = {0};
    for (size_t m = 0; m < sizeof names / sizeof names[0]; m++) {
        struct setup s = {0};
        open_setup(&s, names[m]);
        for (int pair = 0; pair < SL_N_KV_TYPES * SL_N_KV_TYPES; pair++) {
            struct sl_plan_options plan = plan_options((struct sl_kv_types){
                sl_kv_type_list[pair / SL_N_KV_TYPES], sl_kv_type_list[pair % SL_N_KV_TYPES]});
            for (size_t i = 0; i < sizeof strategies / sizeof strategies[0]; i++) {
                plan.strategy = strategies[i];
                plan.split.kv_heads =
                    plan.strategy == SL_STRATEGY_SPLIT && s.model->hp.n_kv_heads > 1;
                plan.budget_bytes = least_budget(&s, plan);
                check_on_device(&s, plan, (uint64_t)(pair * 10) + i, &homes);
            }
        }
        sl_model_close(&s.model);
    }
    print_message("caches of layers: %d in VRAM, %d streamed, %d on the host\n", homes.in_vram,
                  homes.streamed, homes.on_host);
    assert_true(homes.in_vram > 0 && homes.streamed > 0 && homes.on_host > 0);
}

/* A cache of fewer bits takes less memory, so that a budget goes further. */
static void test_smaller(void **state)
{
    (void)state;
    struct setup s = {0};
    open_setup(&s, "llama_freqs");
    uint64_t last = UINT64_MAX;
    for (int i = 0; i < SL_N_KV_TYPES; i++) {
        struct sl_plan_options plan =
            plan_options((struct sl_kv_types){sl_kv_type_list[i], sl_kv_type_list[i]});
        plan.strategy = SL_STRATEGY_RESIDENT;
        plan.n_ctx = 64 * SL_KV_BLOCK;
        const uint64_t bytes = least_budget(&s, plan);
        const uint64_t cache = s.model->hp.n_layers * 64 *
                               sl_kv_block_bytes(plan.kv_types, (int32_t)s.model->hp.n_kv_heads,
                                                 (int32_t)s.model->hp.head_dim);
        assert_true(bytes < last);
        assert_true(bytes > cache && bytes < cache + (1u << 20));
        last = bytes;
    }
    sl_model_close(&s.model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_oracle),
        cmocka_unit_test(test_homes),
        cmocka_unit_test(test_smaller),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
