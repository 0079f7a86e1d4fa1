/* SPDX-License-Identifier: Apache-2.0
 *
 * Traces of runs on the simulated device: the file is JSON, holds every step of every complete pass
 * once, and its times agree with what must wait for what.
 */
#include "test.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "exec/context.h"
#include "exec/exec_helper.h"
#include "exec/trace.h"

#define PAGE 256
#define N_PROMPT 40
#define N_GENERATED 8
#define PATH "trace.json"

struct event {
    int lane, pass;
    double begin_us, end_us;
    const char *name;
    uint64_t bytes;
};

struct trace {
    cJSON *root;
    struct event *events;
    int n;
    int n_predicted; /* events of the other process */
};

static int number_of(const cJSON *object, const char *key)
{
    const cJSON *const item = cJSON_GetObjectItemCaseSensitive(object, key);
    assert_true(cJSON_IsNumber(item));
    return (int)item->valuedouble;
}

static void read_trace(struct trace *t)
{
    struct sluice_error err;
    char *text = NULL;
    assert_ok(sl_file_read(PATH, 0, &text, NULL, &err), err);
    t->root = cJSON_Parse(text);
    assert_non_null(t->root);
    sl_free(text);
    const cJSON *const list = cJSON_GetObjectItemCaseSensitive(t->root, "traceEvents");
    assert_true(cJSON_IsArray(list));
    t->events = test_calloc((size_t)cJSON_GetArraySize(list), sizeof *t->events);
    t->n = t->n_predicted = 0;
    const cJSON *e = NULL;
    cJSON_ArrayForEach(e, list)
    {
        if (strcmp(cJSON_GetObjectItemCaseSensitive(e, "ph")->valuestring, "X") != 0) {
            continue;
        }
        if (number_of(e, "pid") != 1) {
            t->n_predicted++;
            continue;
        }
        const cJSON *const args = cJSON_GetObjectItemCaseSensitive(e, "args");
        const cJSON *const bytes = cJSON_GetObjectItemCaseSensitive(args, "bytes");
        const double begin = cJSON_GetObjectItemCaseSensitive(e, "ts")->valuedouble;
        t->events[t->n++] = (struct event){
            .lane = number_of(e, "tid"),
            .pass = number_of(args, "pass"),
            .begin_us = begin,
            .end_us = begin + cJSON_GetObjectItemCaseSensitive(e, "dur")->valuedouble,
            .name = cJSON_GetObjectItemCaseSensitive(e, "name")->valuestring,
            .bytes = bytes ? (uint64_t)bytes->valuedouble : 0,
        };
    }
}

static void free_trace(struct trace *t)
{
    cJSON_Delete(t->root);
    test_free(t->events);
    unlink(PATH);
}

/* The event of a shard on a lane; NULL when there is none. Two are a failure. */
static const struct event *find(const struct trace *t, int pass, int lane, const char *name)
{
    const struct event *found = NULL;
    for (int i = 0; i < t->n; i++) {
        const struct event *const e = &t->events[i];
        if (e->pass == pass && e->lane == lane && strcmp(e->name, name) == 0) {
            assert_null(found);
            found = e;
        }
    }
    return found;
}

static void shard_name(const struct sl_shard *shard, const char *before, char *out, size_t room)
{
    static const char *const kinds[] = {"attention", "ffn"};
    if (shard->kind == SL_SHARD_HEAD) {
        snprintf(out, room, "%shead", before);
    } else {
        snprintf(out, room, "%s%s %u", before, kinds[shard->kind], shard->layer);
    }
}

/* One pass: what its tier says was done, once each, and nobody was too early. */
static void check_pass(const struct trace *t, int pass, const struct sl_tier_plan *tier,
                       const struct sl_model *model, bool head)
{
    char name[64];
    const struct event *last_gpu = NULL, *last_copy = NULL;
    for (int32_t i = 0; i < (int32_t)model->n_shards; i++) {
        const struct sl_shard *const shard = &model->shards[i];
        if (shard->kind == SL_SHARD_HEAD && !head) {
            continue;
        }
        shard_name(shard, "", name, sizeof name);
        const struct event *const cpu = find(t, pass, SL_LANE_CPU, name);
        const struct event *const gpu = find(t, pass, SL_LANE_GPU, name);
        const struct event *const copy = find(t, pass, SL_LANE_COPY, name);
        const enum sl_placement place = (enum sl_placement)tier->placement[i];
        assert_true((cpu != NULL) == (place == SL_PLACE_HOST));
        assert_true((gpu != NULL) == (place != SL_PLACE_HOST));
        assert_true((copy != NULL) == sl_place_uses_ring((uint8_t)place));
        if (copy) {
            assert_true(place == SL_PLACE_FED ||
                        copy->bytes >= shard->bytes - 256 * SL_SHARD_MAX_WEIGHTS);
            assert_true(copy->end_us <= gpu->begin_us);
            assert_true(!last_copy || last_copy->end_us <= copy->begin_us);
            last_copy = copy;
        }
        if (gpu) {
            assert_true(!last_gpu || last_gpu->end_us <= gpu->begin_us);
            last_gpu = gpu;
        }
        shard_name(shard, "KV of ", name, sizeof name);
        const struct event *const kv = find(t, pass, SL_LANE_DOWNLOAD, name);
        assert_true(!kv || kv->begin_us >= gpu->end_us);
    }
}

struct run {
    struct sl_model *model;
    struct sl_device *dev;
    struct sl_context *ctx;
    struct sl_trace *trace;
    struct sl_profile profile;
    struct sl_plan_options plan;
    struct sl_context_stats stats;
};

/* PAGE as a budget: the smallest that the strategy works with. */
static void open_run(struct run *r, const char *model, enum sl_strategy strategy, uint64_t budget,
                     int32_t ubatch, const struct sl_sim_options *sim)
{
    struct sluice_error err;
    *r = (struct run){.plan = {.budget_bytes = budget,
                               .n_ctx = 128,
                               .max_ubatch = ubatch,
                               .max_outputs = 1,
                               .page_bytes = PAGE,
                               .kv_types = {SL_TYPE_F16, SL_TYPE_F16},
                               .strategy = strategy}};
    r->model = helper_open_model(model, 0, UINT32_MAX);
    assert_ok(sl_trace_open(&r->trace, PATH, r->model, &err), err);
    helper_eager_profile(&r->profile, 4);
    struct sl_context_options options = {
        .profile = &r->profile, .trace = r->trace, .plan = r->plan};
    if (budget > 0) {
        assert_ok(sl_device_sim_create(&r->dev, sim, &err), err);
        options.device = r->dev;
    }
    if (budget == PAGE) {
        assert_status(sl_context_create(&r->ctx, r->model, &options, &err), BUDGET);
        r->plan.budget_bytes = options.plan.budget_bytes = err.needed;
    }
    assert_ok(sl_context_create(&r->ctx, r->model, &options, &err), err);
}

static enum sluice_status generate(struct run *r, struct sluice_error *err)
{
    static const int32_t tokens[N_PROMPT] = {1, 2, 3, 4, 5};
    enum sluice_status status = sl_context_eval(r->ctx, tokens, N_PROMPT, 1, NULL, err);
    for (int i = 0; i < N_GENERATED && status == SLUICE_STATUS_OK; i++) {
        status = sl_context_eval(r->ctx, tokens, 1, 1, NULL, err);
    }
    return status;
}

/* The file is complete; the model stays, for what it should say. */
static void finish_run(struct run *r)
{
    struct sluice_error err;
    sl_context_get_stats(r->ctx, &r->stats);
    sl_context_destroy(&r->ctx);
    assert_ok(sl_trace_close(&r->trace, &err), err);
    assert_null(r->trace);
    sl_device_destroy(&r->dev);
}

/* Everything in the file lies inside its pass, and copies add up to what the context counted. */
static void check_whole(const struct trace *t, const struct run *r)
{
    uint64_t copied = 0;
    int n_passes = 0;
    for (int i = 0; i < t->n; i++) {
        const struct event *const e = &t->events[i];
        n_passes += e->lane == SL_LANE_PASS;
        copied += e->lane == SL_LANE_COPY ? e->bytes : 0;
        const struct event *pass = NULL;
        for (int k = 0; k < t->n && !pass; k++) {
            const struct event *const other = &t->events[k];
            pass = other->lane == SL_LANE_PASS && other->pass == e->pass ? other : NULL;
        }
        assert_non_null(pass);
        /* The clocks of host and device meet to within the time that an event needs to be seen, and
         * on a busy machine that is long. What must wait for what is checked on one clock. */
        const double slack_us = e->lane >= SL_LANE_GPU ? 1e6 : 0.002;
        assert_true(e->begin_us >= pass->begin_us - slack_us);
        assert_true(e->end_us <= pass->end_us + slack_us);
    }
    assert_int_equal(n_passes, r->stats.n_passes);
    assert_int_equal(copied, r->stats.copied_bytes);
}

static void check_strategy(enum sl_strategy strategy, uint64_t budget)
{
    const struct sl_sim_options sim = {.max_random_delay_ns = 20000, .seed = 3};
    struct sluice_error err;
    struct run r;
    struct trace t;
    struct sl_plan *plan = NULL;
    open_run(&r, "gemma3", strategy, budget, 16, &sim);
    assert_ok(generate(&r, &err), err);
    finish_run(&r);
    assert_ok(sl_plan_create(&plan, r.model, &r.profile, &r.plan, &err), err);
    read_trace(&t);
    check_whole(&t, &r);
    /* The first pass is full and asks for no logits; the first of one token uses no graph yet. */
    const struct sl_tier_plan *const last = &plan->tiers[plan->n_tiers - 1];
    assert_true(plan->n_ubatch == last->n_tokens && plan->n_ubatch < N_PROMPT);
    /* The plan stands beside every full pass: those of the prompt but its last, and of one token.
     */
    const int n_full = N_PROMPT / plan->n_ubatch;
    assert_int_equal(t.n_predicted, n_full * (1 + last->timeline.n) +
                                        N_GENERATED * (1 + plan->tiers[0].timeline.n));
    check_pass(&t, 0, last, r.model, false);
    check_pass(&t, (int)r.stats.n_passes - N_GENERATED, &plan->tiers[0], r.model, true);
    free_trace(&t);
    sl_plan_destroy(&plan);
    sl_model_close(&r.model);
}

static void test_strategies(void **state)
{
    (void)state;
    check_strategy(SL_STRATEGY_HOST, 0);
    check_strategy(SL_STRATEGY_STREAMED, PAGE);
    check_strategy(SL_STRATEGY_FFN_HOST, PAGE);
    check_strategy(SL_STRATEGY_FFN_STREAMED, PAGE);
}

/* Resident shards that are replayed as a graph are one event. */
static void test_graphs(void **state)
{
    (void)state;
    struct sluice_error err;
    struct run r;
    struct trace t;
    open_run(&r, "gemma3", SL_STRATEGY_RESIDENT, PAGE, 16, NULL);
    assert_ok(generate(&r, &err), err);
    finish_run(&r);
    read_trace(&t);
    check_whole(&t, &r);
    const int last = (int)r.stats.n_passes - 1;
    assert_non_null(find(&t, last, SL_LANE_GPU, "graph up to head"));
    assert_null(find(&t, last, SL_LANE_GPU, "head"));
    assert_non_null(find(&t, last - N_GENERATED + 1, SL_LANE_GPU, "head"));
    free_trace(&t);
    sl_model_close(&r.model);
}

/* Mixtures in several budgets: whatever steps their layers take is inside its pass, and the experts
 * that are copied into their slots are there too. */
static void test_mixtures(void **state)
{
    (void)state;
    static const char *const models[] = {"mixtral", "qwen3moe", "gpt_oss"};
    int n_experts = 0;
    for (size_t m = 0; m < sizeof models / sizeof models[0]; m++) {
        for (uint64_t budget = 96u << 10; budget <= 288u << 10; budget += 32u << 10) {
            struct sluice_error err;
            struct run r;
            struct trace t;
            open_run(&r, models[m], SL_STRATEGY_FFN_HOST, budget, 4, NULL);
            assert_ok(generate(&r, &err), err);
            finish_run(&r);
            read_trace(&t);
            check_whole(&t, &r);
            for (int i = 0; i < t.n; i++) {
                n_experts += strncmp(t.events[i].name, "an expert of", 12) == 0;
            }
            free_trace(&t);
            sl_model_close(&r.model);
        }
    }
    assert_true(n_experts > 0);
}

/* A pass that fails is left out, and those after it are there. */
static void test_failed_pass(void **state)
{
    (void)state;
    struct sluice_error err;
    struct run r;
    struct trace t;
    open_run(&r, "gemma3", SL_STRATEGY_STREAMED, PAGE, 16, NULL);
    sl_device_sim_set(r.dev, &(struct sl_sim_options){.fail_run_at = 5});
    assert_status(generate(&r, &err), DEVICE);
    sl_context_truncate(r.ctx, 0);
    assert_ok(generate(&r, &err), err);
    finish_run(&r);
    read_trace(&t);
    assert_true(r.stats.n_passes > N_GENERATED);
    int n_passes = 0;
    for (int i = 0; i < t.n; i++) {
        n_passes += t.events[i].lane == SL_LANE_PASS;
    }
    assert_int_equal(n_passes, r.stats.n_passes);
    free_trace(&t);
    sl_model_close(&r.model);
}

/* Files that cannot be made or written whole are errors that name them. */
static void test_files(void **state)
{
    (void)state;
    struct sluice_error err;
    struct sl_trace *trace = NULL;
    assert_status(sl_trace_open(&trace, "no/such/folder/trace.json", NULL, &err), IO);
    assert_mentions(err, "no/such/folder/trace.json");
    assert_null(trace);
    if (access("/dev/full", W_OK) == 0) {
        assert_ok(sl_trace_open(&trace, "/dev/full", NULL, &err), err);
        assert_status(sl_trace_close(&trace, &err), IO);
        assert_mentions(err, "/dev/full");
        assert_null(trace);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_strategies), cmocka_unit_test(test_graphs),
        cmocka_unit_test(test_mixtures),   cmocka_unit_test(test_failed_pass),
        cmocka_unit_test(test_files),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
