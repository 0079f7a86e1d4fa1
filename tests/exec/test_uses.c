/* SPDX-License-Identifier: Apache-2.0
 *
 * Uses of experts from one run to the next: they come back as they were kept, files that are not
 * of the model are worth nothing, slots are filled by them, and plans expect hits by them.
 */
#include "test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "exec/context_internal.h"
#include "exec/uses.h"
#include "exec/exec_helper.h"

/* In each layer expert e of the last ones is used most. */
static float *rising_uses(const struct sl_model *model, float scale)
{
    const size_t n_experts = model->hp.n_experts, n = model->hp.n_layers * n_experts;
    float *const uses = sl_calloc(SL_MEM_EXEC, n, sizeof *uses);
    assert_non_null(uses);
    for (size_t i = 0; i < n; i++) {
        const float e = (float)(i % n_experts);
        uses[i] = scale * e * e * e;
    }
    return uses;
}

static void test_kept(void **state)
{
    (void)state;
    struct sluice_error err;
    char folder[512], path[600];
    snprintf(folder, sizeof folder, "%s/test_uses_cache", SLUICE_BINARY_DIR);
    setenv("SLUICE_CACHE_DIR", folder, 1);
    const size_t blocks = sl_mem_n_blocks();
    struct sl_model *model = helper_open_model("qwen3moe", 0, UINT32_MAX),
                    *dense = helper_open_model("llama_freqs", 0, UINT32_MAX);
    struct sl_model *other = helper_open_model("mixtral", 0, UINT32_MAX);
    float *const uses = rising_uses(model, 1.5F);
    assert_ok(sl_uses_save(model, uses, &err), err);
    float *again = sl_uses_load(model);
    assert_non_null(again);
    for (size_t i = 0; i < (size_t)model->hp.n_layers * model->hp.n_experts; i++) {
        assert_float_equal(again[i], uses[i], 1e-3 * (double)uses[i] + 1e-6);
    }
    assert_null(sl_uses_load(dense));
    assert_null(sl_uses_load(other));
    /* Whatever is wrong with a file: nothing is kept. */
    char key[320], name[64], *text = NULL;
    size_t size = 0;
    snprintf(key, sizeof key, "qwen3moe.gguf|%zu|%u|%u", model->weight_bytes, model->hp.n_layers,
             model->hp.n_experts);
    sl_file_cache_name(name, sizeof name, "uses", key);
    snprintf(path, sizeof path, "%s/%s", folder, name);
    assert_ok(sl_file_read(path, 0, &text, &size, &err), err);
    static const char *const tails[] = {"1", "nan", "-1", "x", ""};
    for (size_t i = 0; i < sizeof tails / sizeof tails[0]; i++) {
        char bad[8192];
        char *const last = strrchr(text, ' ');
        snprintf(bad, sizeof bad, "%.*s %s%s", (int)(last - text), text, tails[i],
                 i == 0 ? " 1\n" : "\n");
        assert_ok(sl_file_write(path, bad, strlen(bad), &err), err);
        assert_null(sl_uses_load(model));
    }
    text[0] = 'S';
    assert_ok(sl_file_write(path, text, size, &err), err);
    assert_null(sl_uses_load(model));
    sl_free(text);
    sl_free(again);
    sl_free(uses);
    sl_model_close(&model);
    sl_model_close(&dense);
    sl_model_close(&other);
    assert_int_equal(sl_mem_n_blocks(), blocks);
}

/* Options with a budget in which about half of the experts have slots. */
static struct sl_plan_options plan_options(const struct sl_model *model, const float *uses)
{
    struct sl_plan_options o = {.n_ctx = 64,
                                .max_ubatch = 16,
                                .max_outputs = 1,
                                .page_bytes = 256,
                                .kv_types = {SL_TYPE_F16, SL_TYPE_F16},
                                .strategy = SL_STRATEGY_EXPERTS_SHARED,
                                .expert_uses = uses};
    const int32_t wanted = (int32_t)(model->hp.n_layers * model->hp.n_experts / 2);
    struct sl_profile profile;
    sl_profile_typical(&profile, SL_DEVICE_SIM, 1);
    for (int32_t n_slots = 0; n_slots < wanted;) {
        struct sluice_error err;
        struct sl_plan *plan = NULL;
        o.budget_bytes += 4096;
        if (sl_plan_create(&plan, model, &profile, &o, &err) == SLUICE_STATUS_OK) {
            n_slots = plan->tiers[0].n_slots;
        }
        sl_plan_destroy(&plan);
    }
    return o;
}

/* Slots hold the experts that were used most, from the first pass on, and learning goes on from
 * there. */
static void test_filled(void **state)
{
    (void)state;
    struct sluice_error err;
    struct sl_model *model = helper_open_model("qwen3moe", 0, UINT32_MAX);
    struct sl_device *dev = NULL;
    struct sl_context *ctx = NULL;
    struct sl_profile profile;
    float *const uses = rising_uses(model, 1000);
    sl_profile_typical(&profile, SL_DEVICE_SIM, 1);
    assert_ok(sl_device_sim_create(&dev, NULL, &err), err);
    const struct sl_context_options o = {
        .device = dev, .profile = &profile, .plan = plan_options(model, uses)};
    assert_ok(sl_context_create(&ctx, model, &o, &err), err);
    const int32_t n_slots = ctx->plan->tiers[0].n_slots;
    const int32_t n_all = (int32_t)(model->hp.n_layers * model->hp.n_experts);
    assert_true(n_slots > 0 && n_slots < n_all);
    const int32_t token = 5;
    assert_ok(sl_context_eval(ctx, &token, 1, 1, NULL, &err), err);
    float least_in = 1e30F, most_out = 0;
    for (int32_t e = 0; e < n_all; e++) {
        if (ctx->experts.expert_slot[e] >= 0) {
            least_in = uses[e] < least_in ? uses[e] : least_in;
        } else {
            most_out = uses[e] > most_out ? uses[e] : most_out;
        }
    }
    assert_true(least_in >= most_out);
    float *const after = sl_calloc(SL_MEM_EXEC, (size_t)n_all, sizeof *after);
    assert_non_null(after);
    assert_true(sl_context_get_expert_uses(ctx, after));
    float before_sum = 0, after_sum = 0;
    for (int32_t e = 0; e < n_all; e++) {
        before_sum += uses[e];
        after_sum += after[e];
    }
    assert_true(after_sum > 0.9F * before_sum);
    sl_free(after);
    sl_free(uses);
    sl_context_destroy(&ctx);
    sl_device_destroy(&dev);
    sl_model_close(&model);
}

static double decode_ns(const struct sl_model *model, const float *uses)
{
    struct sluice_error err;
    struct sl_plan *plan = NULL;
    struct sl_profile profile;
    sl_profile_typical(&profile, SL_DEVICE_SIM, 1);
    const struct sl_plan_options o = plan_options(model, uses);
    assert_ok(sl_plan_create(&plan, model, &profile, &o, &err), err);
    const double ns = plan->tiers[0].predicted.pass_ns;
    assert_null(plan->options.expert_uses);
    sl_plan_destroy(&plan);
    return ns;
}

/* Experts that are used more than others make slots worth more; few uses prove nothing. */
static void test_planned(void **state)
{
    (void)state;
    struct sl_model *model = helper_open_model("qwen3moe", 0, UINT32_MAX);
    float *const none = rising_uses(model, 0), *const few = rising_uses(model, 1e-6F);
    float *const many = rising_uses(model, 1000);
    const double even_ns = decode_ns(model, NULL);
    assert_float_equal(decode_ns(model, none) / even_ns, 1, 1e-3);
    assert_float_equal(decode_ns(model, few) / even_ns, 1, 1e-3);
    assert_true(decode_ns(model, many) < even_ns);
    sl_free(none);
    sl_free(few);
    sl_free(many);
    sl_model_close(&model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_kept), cmocka_unit_test(test_filled),
                                       cmocka_unit_test(test_planned)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
