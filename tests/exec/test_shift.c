/* SPDX-License-Identifier: Apache-2.0
 *
 * Context shift: logits behind it are llama.cpp's (tests/fixtures/model/shift.txt, made by
 * tools/fixtures/context_shift.py), and the same wherever the cache lives.
 */
#include "test.h"

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "exec/context.h"
#include "exec/exec_helper.h"
#include "synth/synth.h"

#define MAX_TOKENS 64
#define MAX_VOCAB 64
#define N_CTX 512
#define PAGE 256
#define MAX_SYNTH_VOCAB 1024
#define ONE_LAYER "one_layer.gguf"

/* The oracle multiplies floats and keeps F16 keys, as we do here; a key that was turned by the
 * wrong angle, or a value of another position, moves logits by whole standard deviations. */
#define MAX_KL 1e-4
#define MAX_HOME_KL 1e-6

struct setup {
    struct sl_model *model;
    struct sl_device *dev;
    struct sl_pool *pool;
    struct sl_context *ctx;
    int32_t tokens[MAX_TOKENS];
    int n_tokens;
};

static void open_model(struct setup *s, const char *name)
{
    *s = (struct setup){.model = helper_open_model(name, N_CTX, MAX_VOCAB)};
    assert_int_equal(s->model->hp.n_vocab, MAX_VOCAB);
    s->n_tokens = helper_read_tokens(name, s->tokens, MAX_TOKENS);
}

static struct sl_plan_options plan_options(struct sl_kv_types types, int32_t ubatch)
{
    return (struct sl_plan_options){.n_ctx = N_CTX,
                                    .max_ubatch = ubatch,
                                    .max_outputs = 1,
                                    .page_bytes = PAGE,
                                    .kv_types = types};
}

static void open_on_cpu(struct setup *s, struct sl_kv_types types, int32_t ubatch)
{
    s->ctx = helper_cpu_context(s->model, plan_options(types, ubatch));
}

/* In the smallest budget of a strategy on the simulated device. */
static void open_on_device(struct setup *s, enum sl_strategy strategy, struct sl_kv_types types)
{
    struct sluice_error err;
    struct sl_profile profile;
    const struct sl_sim_options sim = {.max_random_delay_ns = 20000, .seed = 5};
    sl_profile_typical(&profile, SL_DEVICE_SIM, 1);
    profile.hop_ns = profile.issue_ns = 0;
    assert_ok(sl_device_sim_create(&s->dev, &sim, &err), err);
    assert_ok(sl_pool_create(&s->pool, &(struct sl_pool_options){.n_threads = 2}, &err), err);
    struct sl_context_options options = {
        .device = s->dev, .pool = s->pool, .profile = &profile, .plan = plan_options(types, 16)};
    options.plan.strategy = strategy;
    /* Cut by heads, each side has some of every layer. */
    options.plan.split.kv_heads = strategy == SL_STRATEGY_SPLIT && s->model->hp.n_kv_heads > 1;
    options.plan.budget_bytes = PAGE;
    assert_status(sl_context_create(&s->ctx, s->model, &options, &err), BUDGET);
    options.plan.budget_bytes = err.needed;
    assert_ok(sl_context_create(&s->ctx, s->model, &options, &err), err);
}

static void close_context(struct setup *s)
{
    sl_context_destroy(&s->ctx);
    sl_pool_destroy(&s->pool);
    sl_device_destroy(&s->dev);
}

static const float *next_logits(struct setup *s, int32_t token)
{
    struct sluice_error err;
    assert_ok(sl_context_eval(s->ctx, &token, 1, 1, NULL, &err), err);
    return sl_context_logits(s->ctx);
}

static void fill(struct setup *s)
{
    struct sluice_error err;
    assert_ok(sl_context_eval(s->ctx, s->tokens, s->n_tokens, 0, NULL, &err), err);
}

static void test_oracle(void **state)
{
    (void)state;
    static const struct sl_kv_types f16 = {SL_TYPE_F16, SL_TYPE_F16};
    struct sluice_error err;
    struct setup s = {0};
    char path[512], name[64];
    int n_keep = 0, n_drop = 0, next = 0, n_rows = 0;
    float wanted[MAX_VOCAB];
    snprintf(path, sizeof path, "%s/model/shift.txt", SLUICE_FIXTURES);
    FILE *const file = fopen(path, "r");
    assert_non_null(file);
    assert_int_equal(fscanf(file, "#%*[^\n]"), 0);
    while (fscanf(file, "%63s %d %d %d", name, &n_keep, &n_drop, &next) == 4) {
        for (int v = 0; v < MAX_VOCAB; v++) {
            assert_int_equal(fscanf(file, "%f", &wanted[v]), 1);
        }
        open_model(&s, name);
        open_on_cpu(&s, f16, 16);
        fill(&s);
        assert_ok(sl_context_shift(s.ctx, n_keep, n_drop, &err), err);
        assert_int_equal(sl_context_n_past(s.ctx), s.n_tokens - n_drop);
        const double difference = helper_mean_kl(wanted, next_logits(&s, next), 1, MAX_VOCAB);
        print_message("%s keep %d drop %d: KL %.2g\n", name, n_keep, n_drop, difference);
        assert_true(difference < MAX_KL);
        close_context(&s);
        sl_model_close(&s.model);
        n_rows++;
    }
    fclose(file);
    assert_true(n_rows >= 15);
}

/* With one layer keys and values depend on their own token alone, so that after a shift everything
 * is as if the dropped tokens had never been: in every way to scale positions, window or not. */
static void test_one_layer(void **state)
{
    (void)state;
    static const struct sl_kv_types f16 = {SL_TYPE_F16, SL_TYPE_F16};
    static const char *const archs[] = {"llama", "qwen2", "qwen3", "gemma3", "gpt-oss"};
    static float wanted[MAX_SYNTH_VOCAB];
    for (size_t a = 0; a < sizeof archs / sizeof archs[0]; a++) {
        struct sluice_error err;
        struct setup s = {.n_tokens = 60};
        struct sl_synth_options synth = {.mix = {.type = SL_TYPE_F16, .ftype = -1}, .seed = 3};
        assert_true(sl_synth_shape_base(archs[a], &synth.shape));
        synth.shape.n_layers = 1;
        assert_true(synth.shape.n_vocab <= MAX_SYNTH_VOCAB);
        assert_ok(sl_synth_write(&synth, ONE_LAYER, &err), err);
        assert_ok(sl_model_open(&s.model, ONE_LAYER, N_CTX, &err), err);
        const int32_t n_keep = 7, n_drop = 21, n_left = s.n_tokens - n_keep - n_drop;
        for (int i = 0; i < s.n_tokens; i++) {
            s.tokens[i] = 3 + 5 * i % 200;
        }
        open_on_cpu(&s, f16, 16);
        assert_ok(sl_context_eval(s.ctx, s.tokens, n_keep, 0, NULL, &err), err);
        assert_ok(sl_context_eval(s.ctx, s.tokens + n_keep + n_drop, n_left, 0, NULL, &err), err);
        memcpy(wanted, next_logits(&s, 9), s.model->hp.n_vocab * sizeof *wanted);
        sl_context_truncate(s.ctx, 0);
        fill(&s);
        assert_ok(sl_context_shift(s.ctx, n_keep, n_drop, &err), err);
        const double difference =
            helper_mean_kl(wanted, next_logits(&s, 9), 1, s.model->hp.n_vocab);
        print_message("%s of one layer: KL %.2g\n", archs[a], difference);
        assert_true(difference < 1e-5);
        close_context(&s);
        sl_model_close(&s.model);
    }
    unlink(ONE_LAYER);
}

/* Shifts again and again, on both sides of a block's end, then on: as on the CPU, in every home and
 * with every type. */
static void run_long(struct setup *s, float *logits)
{
    struct sluice_error err;
    for (int round = 0; round < 4; round++) {
        fill(s);
        const int32_t n_keep = 3 + 20 * round, n_drop = 11 + round;
        assert_ok(sl_context_shift(s->ctx, n_keep, n_drop, &err), err);
    }
    memcpy(logits, next_logits(s, 9), MAX_VOCAB * sizeof *logits);
}

static void test_homes(void **state)
{
    (void)state;
    static const char *const names[] = {"llama_yarn", "gemma3", "qwen3"};
    static const enum sl_strategy strategies[] = {SL_STRATEGY_STREAMED, SL_STRATEGY_FFN_HOST,
                                                  SL_STRATEGY_RESIDENT, SL_STRATEGY_SPLIT};
    int n_in_vram = 0, n_on_host = 0, n_cut = 0;
    for (size_t m = 0; m < sizeof names / sizeof names[0]; m++) {
        struct setup s;
        open_model(&s, names[m]);
        for (int pair = 0; pair < SL_N_KV_TYPES * SL_N_KV_TYPES; pair += 2) {
            const struct sl_kv_types types = {sl_kv_type_list[pair / SL_N_KV_TYPES],
                                              sl_kv_type_list[pair % SL_N_KV_TYPES]};
            float wanted[MAX_VOCAB], got[MAX_VOCAB];
            for (size_t i = 0; i < sizeof strategies / sizeof strategies[0]; i++) {
                open_on_device(&s, strategies[i], types);
                const int32_t n_ubatch = sl_context_plan(s.ctx)->n_ubatch;
                n_in_vram += sl_context_plan(s.ctx)->n_kv_layers;
                n_cut += sl_context_plan(s.ctx)->split.kv_heads > 0;
                n_on_host += (int)s.model->hp.n_layers - sl_context_plan(s.ctx)->n_kv_layers;
                run_long(&s, got);
                close_context(&s);
                open_on_cpu(&s, types, n_ubatch); /* passes of one size round alike */
                run_long(&s, wanted);
                close_context(&s);
                const double difference = helper_mean_kl(wanted, got, 1, MAX_VOCAB);
                /* Sums of two parts round otherwise, which packed keys can make a step of. */
                const bool in_parts = strategies[i] == SL_STRATEGY_SPLIT;
                if (!(difference < (in_parts ? MAX_KL : MAX_HOME_KL))) {
                    fail_msg("%s, %s/%s, %s: KL %g", names[m], sl_type_name(types.k),
                             sl_type_name(types.v), sl_strategy_name(strategies[i]), difference);
                }
            }
        }
        sl_model_close(&s.model);
    }
    assert_true(n_in_vram > 0 && n_on_host > 0 && n_cut > 0);
}

/* What a shift does not touch, and what it refuses. */
static void test_edges(void **state)
{
    (void)state;
    static const struct sl_kv_types f16 = {SL_TYPE_F16, SL_TYPE_F16};
    struct sluice_error err;
    struct setup s;
    float wanted[MAX_VOCAB];
    open_model(&s, "qwen3");
    open_on_device(&s, SL_STRATEGY_RESIDENT, f16);
    fill(&s);
    memcpy(wanted, next_logits(&s, 4), sizeof wanted);
    sl_context_truncate(s.ctx, s.n_tokens);
    assert_ok(sl_context_shift(s.ctx, 10, 0, &err), err);
    assert_memory_equal(next_logits(&s, 4), wanted, sizeof wanted);
    /* Dropping the end is truncating. */
    sl_context_truncate(s.ctx, s.n_tokens);
    assert_ok(sl_context_shift(s.ctx, 30, s.n_tokens - 30, &err), err);
    assert_int_equal(sl_context_n_past(s.ctx), 30);
    assert_ok(sl_context_eval(s.ctx, s.tokens + 30, s.n_tokens - 30, 0, NULL, &err), err);
    assert_true(helper_mean_kl(wanted, next_logits(&s, 4), 1, MAX_VOCAB) < 1e-4);
    assert_status(sl_context_shift(s.ctx, -1, 1, &err), INVALID_ARGUMENT);
    assert_status(sl_context_shift(s.ctx, 0, -1, &err), INVALID_ARGUMENT);
    assert_status(sl_context_shift(s.ctx, 0, 1000, &err), INVALID_ARGUMENT);
    assert_status(sl_context_shift(s.ctx, INT32_MAX, 1, &err), INVALID_ARGUMENT);
    assert_mentions(err, "49");
    assert_int_equal(sl_context_n_past(s.ctx), s.n_tokens + 1);
    /* A device that fails leaves an empty cache, and the context goes on. */
    sl_device_sim_set(s.dev, &(struct sl_sim_options){.fail_copy_at = 2});
    assert_status(sl_context_shift(s.ctx, 5, 5, &err), DEVICE);
    assert_int_equal(sl_context_n_past(s.ctx), 0);
    fill(&s);
    assert_true(helper_mean_kl(wanted, next_logits(&s, 4), 1, MAX_VOCAB) < 1e-4);
    close_context(&s);
    sl_model_close(&s.model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_oracle),
        cmocka_unit_test(test_one_layer),
        cmocka_unit_test(test_homes),
        cmocka_unit_test(test_edges),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
