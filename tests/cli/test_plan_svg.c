/* SPDX-License-Identifier: Apache-2.0
 *
 * The picture of a plan: every shard, part of the arena and interval of the timeline is drawn once,
 * inside the picture, and what comes from outside (the name of the file) is escaped.
 */
#include "test.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "cli/plan_svg.h"

#define MODEL "a&b<c>.gguf"
#define PICTURE "plan.svg"
#define PAGE 256

static int count(const char *text, const char *part)
{
    int n = 0;
    for (const char *at = strstr(text, part); at; at = strstr(at + 1, part)) {
        n++;
    }
    return n;
}

/* A file whose name would break the picture. */
static void copy_model(void)
{
    struct sluice_error err;
    char path[512];
    char *bytes = NULL;
    size_t size = 0;
    snprintf(path, sizeof path, "%s/model/gemma3.gguf", SLUICE_FIXTURES);
    assert_ok(sl_file_read(path, 0, &bytes, &size, &err), err);
    assert_ok(sl_file_write(MODEL, bytes, size, &err), err);
    sl_free(bytes);
}

/* Boxes beside those of shards and intervals: background, legend, lanes, and the arena's parts. */
static int n_other_boxes(const struct sl_plan *plan)
{
    int n = 1 + SL_N_PLACEMENTS + 3;
    for (int32_t t = 0; t < plan->n_tiers; t++) {
        const struct sl_tier_plan *const tier = &plan->tiers[t];
        n += SL_N_ENGINES;
        if (tier->uses_device) {
            n += 1 + (plan->kv_offset > plan->consts_offset) +
                 (plan->resident_base > plan->kv_offset) + tier->n_resident + (tier->n_slots > 0) +
                 (tier->ring_bytes > 0) + (tier->end_offset > tier->hidden_offset);
        }
    }
    return n;
}

static void check_inside(const char *text)
{
    double width = 0, height = 0;
    const char *const view = strstr(text, "viewBox=\"0 0 ");
    assert_non_null(view);
    assert_int_equal(sscanf(view, "viewBox=\"0 0 %lf %lf", &width, &height), 2);
    for (const char *at = strstr(text, "<rect x="); at; at = strstr(at + 1, "<rect x=")) {
        double x = 0, y = 0, w = 0, h = 0;
        assert_int_equal(
            sscanf(at, "<rect x=\"%lf\" y=\"%lf\" width=\"%lf\" height=\"%lf\"", &x, &y, &w, &h),
            4);
        assert_true(x >= 0 && y >= 0 && w > 0 && h > 0);
        assert_true(x + w <= width && y + h <= height);
    }
}

static void check_picture(enum sl_strategy strategy, uint64_t budget)
{
    struct sluice_error err;
    struct sl_engine e = {0};
    struct sl_plan *plan = NULL;
    char *text = NULL;
    struct sl_plan_options options = {.budget_bytes = budget,
                                      .n_ctx = 300,
                                      .max_ubatch = 64,
                                      .max_outputs = 1,
                                      .page_bytes = PAGE,
                                      .kv_types = {SL_TYPE_F16, SL_TYPE_F16},
                                      .strategy = strategy};
    assert_ok(sl_model_open(&e.model, MODEL, 0, &err), err);
    sl_profile_typical(&e.profile, SL_DEVICE_SIM, 2);
    if (budget == PAGE) {
        assert_status(sl_plan_create(&plan, e.model, &e.profile, &options, &err), BUDGET);
        options.budget_bytes = err.needed;
    }
    assert_ok(sl_plan_create(&plan, e.model, &e.profile, &options, &err), err);
    assert_ok(sl_plan_svg_write(PICTURE, &e, plan, &err), err);
    assert_ok(sl_file_read(PICTURE, 0, &text, NULL, &err), err);
    int n_boxes = n_other_boxes(plan);
    for (int32_t t = 0; t < plan->n_tiers; t++) {
        assert_true(plan->tiers[t].timeline.n > 0);
        n_boxes += plan->n_shards + plan->tiers[t].timeline.n;
    }
    assert_int_equal(count(text, "<rect"), n_boxes);
    assert_int_equal(count(text, "<rect"),
                     count(text, "</rect>") + count(text, "\"/>\n") - count(text, "<path"));
    assert_int_equal(count(text, "<text"), count(text, "</text>"));
    assert_int_equal(count(text, "<title>"), count(text, "</title>"));
    assert_int_equal(count(text, "a&amp;b&lt;c>.gguf"), 1);
    assert_null(strstr(text, "nan"));
    assert_null(strstr(text, "inf\""));
    check_inside(text);
    sl_free(text);
    sl_plan_destroy(&plan);
    sl_model_close(&e.model);
    unlink(PICTURE);
}

static void test_pictures(void **state)
{
    (void)state;
    copy_model();
    check_picture(SL_STRATEGY_HOST, 0);
    check_picture(SL_STRATEGY_STREAMED, PAGE);
    check_picture(SL_STRATEGY_FFN_HOST, PAGE);
    check_picture(SL_STRATEGY_RESIDENT, PAGE);
    unlink(MODEL);
}

static void test_no_place(void **state)
{
    (void)state;
    struct sluice_error err;
    struct sl_engine e = {0};
    struct sl_plan *plan = NULL;
    const struct sl_plan_options options = {
        .n_ctx = 8, .max_outputs = 1, .kv_types = {SL_TYPE_F16, SL_TYPE_F16}};
    copy_model();
    assert_ok(sl_model_open(&e.model, MODEL, 0, &err), err);
    sl_profile_typical(&e.profile, SL_DEVICE_NONE, 2);
    assert_ok(sl_plan_create(&plan, e.model, &e.profile, &options, &err), err);
    assert_status(sl_plan_svg_write("no/such/folder/plan.svg", &e, plan, &err), IO);
    assert_mentions(err, "no/such/folder");
    sl_plan_destroy(&plan);
    sl_model_close(&e.model);
    unlink(MODEL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pictures),
        cmocka_unit_test(test_no_place),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
