/* SPDX-License-Identifier: Apache-2.0
 *
 * Plans for several sequences: room for the table of their blocks, a tier that goes on with all of
 * them, and predictions in which each of them has a cache of its own.
 */
#include "test.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "plan/plan.h"

#define N_CTX (64 * SL_KV_BLOCK)
#define PAGE 256

static struct sl_model *open_model(const char *name)
{
    struct sluice_error err;
    struct sl_model *model = NULL;
    char path[512];
    snprintf(path, sizeof path, "%s/model/%s.gguf", SLUICE_FIXTURES, name);
    assert_ok(sl_model_open(&model, path, 0, &err), err);
    return model;
}

static struct sl_plan_options plan_options(uint64_t budget, int32_t n_seqs)
{
    return (struct sl_plan_options){.budget_bytes = budget,
                                    .n_ctx = N_CTX,
                                    .n_seqs = n_seqs,
                                    .max_outputs = 4,
                                    .page_bytes = PAGE,
                                    .kv_types = {SL_TYPE_F16, SL_TYPE_F16}};
}

static struct sl_plan *make_plan(const struct sl_model *model, const struct sl_profile *profile,
                                 const struct sl_plan_options *options)
{
    struct sluice_error err;
    struct sl_plan *plan = NULL;
    assert_ok(sl_plan_create(&plan, model, profile, options, &err), err);
    assert_ok(sl_plan_check(plan, model, &err), err);
    return plan;
}

/* A machine on which only reading the cache takes time, and copying: 1 GB/s. */
static void attention_profile(struct sl_profile *p)
{
    sl_profile_typical(p, SL_DEVICE_SIM, 1);
    memset(p->linear_ns, 0, sizeof p->linear_ns);
    memset(p->attention_gflop_ns, 0, sizeof p->attention_gflop_ns);
    memset(p->elementwise_mib_ns, 0, sizeof p->elementwise_mib_ns);
    memset(p->op_ns, 0, sizeof p->op_ns);
    p->hop_ns = p->issue_ns = 0;
    for (int i = 0; i < SL_N_COPY_SIZES; i++) {
        p->h2d_bytes_per_s[i] = 1e9;
    }
    p->d2h_bytes_per_s = 1e9;
}

static const struct sl_tier_plan *tier_of(const struct sl_plan *plan, int32_t n_tokens)
{
    const struct sl_tier_plan *const tier = &plan->tiers[sl_plan_tier(plan, n_tokens)];
    assert_int_equal(tier->n_tokens, n_tokens);
    return tier;
}

/* The table has its place below the caches, and there is a pass for all sequences at once. */
static void test_map(void **state)
{
    (void)state;
    static const char *const names[] = {"llama_freqs", "qwen3moe"};
    static const int32_t counts[] = {1, 2, 10, 100, SL_MAX_SEQS};
    struct sl_profile profile;
    sl_profile_typical(&profile, SL_DEVICE_SIM, 4);
    for (size_t m = 0; m < sizeof names / sizeof names[0]; m++) {
        struct sl_model *model = open_model(names[m]);
        for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
            const int32_t n = counts[i];
            for (uint64_t budget = 0; budget <= 8u << 20; budget += 2u << 20) {
                const struct sl_plan_options options = plan_options(budget, n);
                struct sl_plan *plan = make_plan(model, &profile, &options);
                const size_t table =
                    n > 1 ? (size_t)n * (N_CTX / SL_KV_BLOCK) * sizeof(int32_t) : 0;
                assert_true(plan->kv_table_offset >= plan->consts_offset + model->consts_bytes);
                assert_true(plan->kv_table_offset + table <= plan->kv_offset);
                assert_true(n > 1 || plan->kv_table_offset == plan->kv_offset);
                assert_true(plan->n_ubatch >= n || plan->arena_bytes > 0);
                assert_true(plan->arena_bytes <= budget);
                assert_int_equal(plan->depth, N_CTX / n / 2);
                sl_plan_destroy(&plan);
            }
            /* With room enough no pass is too small. */
            const struct sl_plan_options options = plan_options(UINT64_C(1) << 34, n);
            struct sl_plan *plan = make_plan(model, &profile, &options);
            assert_true(plan->n_ubatch >= n);
            sl_plan_destroy(&plan);
        }
        sl_model_close(&model);
    }
}

/* Tokens of one sequence read its cache once, those of many read one each: passes up to the one
 * that goes on with all, not the longer ones of prompts. */
static void test_caches_apart(void **state)
{
    (void)state;
    struct sl_model *model = open_model("llama_freqs");
    struct sl_profile profile;
    attention_profile(&profile);
    for (int i = 0; i < SL_N_COPY_SIZES; i++) {
        profile.h2d_bytes_per_s[i] = 1e30;
    }
    profile.d2h_bytes_per_s = 1e30;
    for (int on_device = 0; on_device < 2; on_device++) {
        struct sl_plan_options options = plan_options(on_device ? UINT64_C(1) << 30 : 0, 16);
        options.strategy = on_device ? SL_STRATEGY_RESIDENT : SL_STRATEGY_HOST;
        options.depth = 200;
        options.max_ubatch = 64;
        struct sl_plan *many = make_plan(model, &profile, &options);
        options.n_seqs = 1;
        struct sl_plan *one = make_plan(model, &profile, &options);
        const double ns = tier_of(one, 1)->predicted.pass_ns;
        assert_true(ns > 0);
        assert_float_equal(tier_of(many, 1)->predicted.pass_ns / ns, 1, 1e-6);
        assert_float_equal(tier_of(many, 4)->predicted.pass_ns / ns, 4, 1e-6);
        assert_float_equal(tier_of(many, 16)->predicted.pass_ns / ns, 16, 1e-6);
        assert_true(tier_of(one, 16)->predicted.pass_ns < 1.2 * ns);
        assert_float_equal(tier_of(many, 64)->predicted.pass_ns,
                           tier_of(one, 64)->predicted.pass_ns, 1e-3);
        /* Together they are as fast as one, where nothing but the caches takes time. */
        assert_float_equal(sl_plan_tps(many) * ns / 1e9, 1, 1e-6);
        sl_plan_destroy(&many);
        sl_plan_destroy(&one);
    }
    sl_model_close(&model);
}

/* Caches that are streamed come up for every sequence. */
static void test_caches_streamed(void **state)
{
    (void)state;
    enum { DEPTH = 800, N = 4 };
    struct sl_model *model = open_model("llama_freqs");
    struct sl_profile profile;
    attention_profile(&profile);
    struct sluice_error err;
    struct sl_plan_options options = plan_options(PAGE, N);
    options.strategy = SL_STRATEGY_FFN_STREAMED;
    options.depth = DEPTH;
    options.max_ubatch = N;
    struct sl_plan *none = NULL;
    assert_status(sl_plan_create(&none, model, &profile, &options, &err), BUDGET);
    options.budget_bytes = err.needed + (256u << 10); /* for activations of N tokens */
    struct sl_plan *many = make_plan(model, &profile, &options);
    options.n_seqs = 1;
    struct sl_plan *one = make_plan(model, &profile, &options);
    assert_int_equal(many->n_kv_layers, one->n_kv_layers);
    const double n_layers = model->hp.n_layers - (double)many->n_kv_layers;
    const double bytes = (double)many->kv_layer_bytes / N_CTX * DEPTH;
    assert_true(n_layers > 0);
    /* Copies of less than 64 KiB take as long as one of that size. */
    const double least = 65536;
    const double wanted = n_layers * (fmax(N * bytes, least) - fmax(bytes, least));
    const double got =
        tier_of(many, N)->predicted.copy_busy_ns - tier_of(one, N)->predicted.copy_busy_ns;
    assert_true(wanted > 0);
    assert_float_equal(got / wanted, 1, 0.02);
    sl_plan_destroy(&many);
    sl_plan_destroy(&one);
    sl_model_close(&model);
}

/* More sequences are faster together, but never by more than their number. */
static void test_speed(void **state)
{
    (void)state;
    static const enum sl_strategy strategies[] = {SL_STRATEGY_HOST, SL_STRATEGY_RESIDENT};
    struct sl_model *model = open_model("qwen3moe");
    struct sl_profile profile;
    sl_profile_typical(&profile, SL_DEVICE_SIM, 4);
    for (size_t i = 0; i < sizeof strategies / sizeof strategies[0]; i++) {
        double alone = 0, last = 0;
        for (int32_t n = 1; n <= 64; n = n < 4 ? n + 1 : 2 * n) {
            struct sl_plan_options options = plan_options(UINT64_C(1) << 30, n);
            options.strategy = strategies[i];
            options.depth = 30;
            struct sl_plan *plan = make_plan(model, &profile, &options);
            const double tps = sl_plan_tps(plan);
            alone = n == 1 ? tps : alone;
            assert_true(tps < 1.001 * n * alone);
            assert_true(tps > 0.99 * last);
            last = tps;
            sl_plan_destroy(&plan);
        }
        assert_true(last > 1.5 * alone);
    }
    sl_model_close(&model);
}

static void test_options(void **state)
{
    (void)state;
    struct sl_model *model = open_model("llama_freqs");
    struct sl_profile profile;
    struct sluice_error err;
    struct sl_plan *plan = NULL;
    sl_profile_typical(&profile, SL_DEVICE_SIM, 4);
    static const int32_t wrong[] = {-1, SL_MAX_SEQS + 1};
    for (int i = 0; i < 2; i++) {
        const struct sl_plan_options options = plan_options(0, wrong[i]);
        assert_status(sl_plan_create(&plan, model, &profile, &options, &err), INVALID_ARGUMENT);
        assert_mentions(err, "sequences");
        assert_null(plan);
    }
    const struct sl_plan_options options = plan_options(0, 0);
    plan = make_plan(model, &profile, &options);
    assert_int_equal(plan->options.n_seqs, 1);
    sl_plan_destroy(&plan);
    sl_model_close(&model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_map),
        cmocka_unit_test(test_caches_apart),
        cmocka_unit_test(test_caches_streamed),
        cmocka_unit_test(test_speed),
        cmocka_unit_test(test_options),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
