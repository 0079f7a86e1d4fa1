/* SPDX-License-Identifier: Apache-2.0
 *
 * The profile of a model: every figure is there and sane on both sides, it changes what is
 * predicted, the budget is kept while measuring, failures leave nothing behind, and what is kept is
 * found again.
 */
#include "test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "exec/calibrate.h"
#include "exec/exec_helper.h"
#include "plan/plan.h"

static void check_factors(const struct sl_profile *p, enum sl_unit unit, bool measured)
{
    int n_other = 0;
    for (int k = 0; k < SL_N_WORKS; k++) {
        for (int t = 0; t < SL_N_TIERS; t++) {
            const double f = p->work_factor[unit][k][t];
            assert_true(isfinite(f) && f >= 0.1 && f <= (k == SL_WORK_FIXED ? 200 : 10));
            n_other += f != 1;
        }
    }
    assert_true(measured ? n_other > 0 : n_other == 0);
}

static double decode_ns(const struct sl_model *model, const struct sl_profile *profile)
{
    struct sluice_error err;
    struct sl_plan *plan = NULL;
    const struct sl_plan_options o = {.budget_bytes = 64u << 20,
                                      .n_ctx = 300,
                                      .max_outputs = 1,
                                      .kv_types = {SL_TYPE_F16, SL_TYPE_F16},
                                      .strategy = SL_STRATEGY_HOST};
    assert_ok(sl_plan_create(&plan, model, profile, &o, &err), err);
    const double ns = plan->tiers[0].predicted.pass_ns;
    sl_plan_destroy(&plan);
    return ns;
}

static void test_run(void **state)
{
    (void)state;
    static const char *const names[] = {"llama_tied_mixed", "gemma3", "qwen2moe", "qwen3moe",
                                        "gpt_oss"};
    for (size_t m = 0; m < sizeof names / sizeof names[0]; m++) {
        struct sluice_error err;
        struct sl_model *model = helper_open_model(names[m], 0, UINT32_MAX);
        struct sl_device *dev = NULL;
        struct sl_profile p;
        struct sl_device_info info;
        const size_t blocks = sl_mem_n_blocks();
        assert_ok(sl_device_sim_create(&dev, NULL, &err), err);
        sl_profile_typical(&p, SL_DEVICE_SIM, 1);
        const double before = decode_ns(model, &p);
        struct sl_calibrate_options o = {.device = dev, .budget_bytes = 900u << 20, .load_ns = 1e5};
        assert_ok(sl_calibrate_run(&p, model, &o, &err), err);
        check_factors(&p, SL_UNIT_CPU, true);
        check_factors(&p, SL_UNIT_GPU, true);
        assert_true(decode_ns(model, &p) != before);
        /* In a budget that holds nothing the device is not touched. */
        o.budget_bytes = 1u << 20;
        assert_ok(sl_calibrate_run(&p, model, &o, &err), err);
        check_factors(&p, SL_UNIT_GPU, false);
        assert_ok(dev->vt->info(dev, &info, &err), err);
        assert_true(info.free_bytes == info.total_bytes);
        /* Faults: an error, the machine's own figures, no leak. */
        o.budget_bytes = 900u << 20;
        sl_device_sim_set(dev, &(struct sl_sim_options){.fail_run_at = 3});
        assert_status(sl_calibrate_run(&p, model, &o, &err), DEVICE);
        check_factors(&p, SL_UNIT_CPU, false);
        sl_device_destroy(&dev);
        assert_int_equal(sl_mem_n_blocks(), blocks);
        sl_model_close(&model);
    }
}

/* Where figures end. */
#define LEAST_FACTOR 0.1
#define MOST_FACTOR 10.0

/* How far off one tier is says nothing about another one: passes of up to 512 tokens have figures
 * of their own, which are neither those of the tier before nor made of them; unless kernels are so
 * slow (under a sanitizer) that figures end at their bound. */
static void test_long_passes(void **state)
{
    (void)state;
    struct sluice_error err;
    struct sl_model *model = helper_open_model("llama_freqs", 0, UINT32_MAX);
    struct sl_profile p;
    sl_profile_typical(&p, SL_DEVICE_NONE, 1);
    assert_ok(sl_calibrate_run(&p, model, &(struct sl_calibrate_options){0}, &err), err);
    const double *const factor = p.work_factor[SL_UNIT_CPU][SL_WORK_FFN];
    for (int32_t t = 1; sl_tier_tokens[t] <= 512 && factor[t - 1] < MOST_FACTOR; t++) {
        assert_true(factor[t] == MOST_FACTOR || factor[t] == LEAST_FACTOR ||
                    (factor[t] != factor[t - 1] && factor[t] != sqrt(factor[t - 1])));
    }
    sl_model_close(&model);
}

static void test_kept(void **state)
{
    (void)state;
    struct sl_model *model = helper_open_model("qwen3moe", 0, UINT32_MAX);
    struct sl_profile p, again;
    char folder[512];
    snprintf(folder, sizeof folder, "%s/test_calibrate_cache", SLUICE_BINARY_DIR);
    setenv("SLUICE_CACHE_DIR", folder, 1);
    sl_profile_typical(&p, SL_DEVICE_NONE, 1);
    again = p;
    sl_calibrate_get(&p, model, &(struct sl_calibrate_options){0});
    check_factors(&p, SL_UNIT_CPU, true);
    sl_calibrate_load(&again, model);
    for (int t = 0; t < SL_N_TIERS; t++) {
        assert_float_equal(again.work_factor[SL_UNIT_CPU][SL_WORK_FFN][t],
                           p.work_factor[SL_UNIT_CPU][SL_WORK_FFN][t], 1e-4);
    }
    sl_model_close(&model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_run),
                                       cmocka_unit_test(test_long_passes),
                                       cmocka_unit_test(test_kept)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
