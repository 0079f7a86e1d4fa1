/* SPDX-License-Identifier: Apache-2.0
 *
 * A cache whose first blocks are in VRAM and the others in system memory: while a sequence grows
 * past them, is cut short and shifted, in short and in long passes, its logits are those of the
 * CPU.
 */
#include "test.h"

#include <stdio.h>
#include <string.h>

#include "exec/context.h"
#include "exec/exec_helper.h"

#define PAGE 256
#define MAX_VOCAB 300
#define N_FIRST SL_CUT_KV_BLOCKS
#define N_CTX (7 * SL_KV_BLOCK)
#define N_PROMPT 246  /* ends inside the first blocks, */
#define N_STEPS 20    /* which these tokens leave, */
#define N_LONG 100    /* far behind them */
#define N_LONG_ROWS 9 /* of logits */
#define N_AGAIN 8     /* after going back into them, and after a shift */
#define N_ROWS (N_STEPS + N_LONG_ROWS + 2 * N_AGAIN)
/* A wrong byte, a missing wait or a position too many gives 0.01 and more. */
#define MAX_KL 5e-5
/* Keys on the border of two steps go the other way when the passes before them round otherwise, and
 * so do choices of experts. */
#define MAX_ROUNDED_KL 1e-3

struct rows {
    float logits[N_ROWS][MAX_VOCAB];
    int n;
};

static int32_t token_at(const struct sl_context *ctx, uint32_t n_vocab)
{
    return (int32_t)((uint32_t)sl_context_n_past(ctx) * 37 % n_vocab);
}

static void step(struct sl_context *ctx, uint32_t n_vocab, int n, struct rows *out)
{
    struct sluice_error err;
    for (int i = 0; i < n; i++) {
        const int32_t token = token_at(ctx, n_vocab);
        assert_ok(sl_context_eval(ctx, &token, 1, 1, NULL, &err), err);
        memcpy(out->logits[out->n++], sl_context_logits(ctx), n_vocab * sizeof(float));
    }
}

static void run(struct sl_context *ctx, uint32_t n_vocab, struct rows *out)
{
    struct sluice_error err;
    int32_t tokens[N_PROMPT];
    for (int i = 0; i < N_PROMPT; i++) {
        tokens[i] = (int32_t)((uint32_t)(i * 31 + 7) % n_vocab);
    }
    out->n = 0;
    assert_ok(sl_context_eval(ctx, tokens, N_PROMPT, 0, NULL, &err), err);
    step(ctx, n_vocab, N_STEPS, out);
    float *const rows = out->logits[out->n];
    float packed[N_LONG_ROWS * MAX_VOCAB];
    assert_ok(sl_context_eval(ctx, tokens, N_LONG, N_LONG_ROWS, packed, &err), err);
    for (int i = 0; i < N_LONG_ROWS; i++, out->n++) {
        memcpy(rows + (size_t)i * MAX_VOCAB, packed + (size_t)i * n_vocab, n_vocab * sizeof(float));
    }
    sl_context_truncate(ctx, N_FIRST * SL_KV_BLOCK - N_AGAIN / 2);
    step(ctx, n_vocab, N_AGAIN, out);
    assert_ok(sl_context_eval(ctx, tokens, N_LONG, 0, NULL, &err), err);
    assert_ok(sl_context_shift(ctx, 5, 77, &err), err);
    step(ctx, n_vocab, N_AGAIN, out);
}

/* Attentions in all tiers of all plans. */
static int n_shared, n_streamed;

static void count(const struct sl_plan *plan, const struct sl_model *model)
{
    for (int32_t t = 0; t < plan->n_tiers; t++) {
        for (int32_t i = 0; i < plan->n_shards; i++) {
            const uint8_t placement = plan->tiers[t].placement[i];
            if (model->shards[i].kind == SL_SHARD_ATTENTION) {
                n_shared += placement == SL_PLACE_SHARED;
                n_streamed += placement == SL_PLACE_STREAMED;
            }
        }
    }
}

/* The smallest budget of a plan like this, or more. */
static uint64_t find_budget(const struct sl_model *model, const struct sl_profile *profile,
                            struct sl_plan_options options, int more)
{
    struct sluice_error err;
    struct sl_plan *plan = NULL;
    options.budget_bytes = PAGE;
    assert_status(sl_plan_create(&plan, model, profile, &options, &err), BUDGET);
    return err.needed + err.needed * (uint64_t)more / 4;
}

static void check(const struct sl_model *model, struct sl_plan_options plan, uint64_t seed)
{
    static struct rows wanted, got;
    struct sluice_error err;
    const uint32_t n_vocab = model->hp.n_vocab;
    const struct sl_sim_options sim = {
        .memory_bytes = 64u << 20, .max_random_delay_ns = 20000, .seed = seed};
    struct sl_device *dev = NULL;
    struct sl_pool *pool = NULL;
    struct sl_context *ctx = NULL;
    struct sl_profile profile;
    helper_eager_profile(&profile, 2);
    for (int i = 0; i < SL_N_COPY_SIZES; i++) {
        profile.h2d_bytes_per_s[i] *= seed % 2 == 0 ? 1 : 64;
    }
    plan.budget_bytes = find_budget(model, &profile, plan, (int)(seed % 3));
    assert_ok(sl_device_sim_create(&dev, &sim, &err), err);
    assert_ok(sl_pool_create(&pool, &(struct sl_pool_options){.n_threads = 2}, &err), err);
    const struct sl_context_options options = {
        .device = dev, .pool = pool, .profile = &profile, .plan = plan};
    assert_ok(sl_context_create(&ctx, model, &options, &err), err);
    const struct sl_plan *const made = sl_context_plan(ctx);
    assert_int_equal(made->split.kv_blocks, N_FIRST);
    count(made, model);
    run(ctx, n_vocab, &got);
    struct sl_plan_options alone = plan;
    alone.strategy = SL_STRATEGY_AUTO;
    alone.budget_bytes = 0;
    alone.split = (struct sl_split){0};
    alone.max_ubatch = made->n_ubatch;
    sl_context_destroy(&ctx);
    sl_device_destroy(&dev);
    sl_pool_destroy(&pool);
    ctx = helper_cpu_context(model, alone);
    run(ctx, n_vocab, &wanted);
    sl_context_destroy(&ctx);
    const bool rounds = plan.kv_types.k != SL_TYPE_F16 || model->hp.n_experts > 0;
    for (int i = 0; i < N_ROWS; i++) {
        const double kl = helper_mean_kl(wanted.logits[i], got.logits[i], 1, n_vocab);
        if (!(kl < (rounds ? MAX_ROUNDED_KL : MAX_KL))) {
            fail_msg("row %d of %d, seed %d: KL %g", i, N_ROWS, (int)seed, kl);
        }
    }
}

static void test_growing(void **state)
{
    (void)state;
    static const char *const names[] = {"gemma3", "qwen3", "gpt_oss"};
    for (size_t m = 0; m < sizeof names / sizeof names[0]; m++) {
        struct sl_model *model = helper_open_model(names[m], 0, MAX_VOCAB);
        for (uint64_t seed = 0; seed < 6; seed++) {
            const enum sl_type type = sl_kv_type_list[seed < 4 ? 0 : seed - 3];
            const struct sl_plan_options plan = {.n_ctx = N_CTX,
                                                 .max_ubatch = seed % 4 < 2 ? 16 : 64,
                                                 .max_outputs = 4,
                                                 .page_bytes = PAGE,
                                                 .depth = 300,
                                                 .kv_types = {type, type},
                                                 .strategy = SL_STRATEGY_SPLIT,
                                                 .split.kv_blocks = N_FIRST};
            check(model, plan, seed);
        }
        sl_model_close(&model);
    }
    print_message("attentions: %d shared, %d streamed\n", n_shared, n_streamed);
    assert_true(n_shared > 20 && n_streamed > 20);
}

/* Cuts that cannot be. */
static void test_refused(void **state)
{
    (void)state;
    struct sluice_error err;
    struct sl_model *model = helper_open_model("llama_freqs", 0, MAX_VOCAB);
    struct sl_profile profile;
    helper_eager_profile(&profile, 2);
    static const struct {
        struct sl_split split;
        int32_t n_seqs;
    } bad[] = {{{.kv_blocks = 3}, 1},
               {{.kv_blocks = -4}, 1},
               {{.kv_blocks = 8}, 1},
               {{.kv_blocks = 4, .kv_heads = 1}, 1},
               {{.kv_blocks = 4}, 2}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        struct sl_plan *plan = NULL;
        const struct sl_plan_options options = {.n_ctx = N_CTX,
                                                .n_seqs = bad[i].n_seqs,
                                                .max_outputs = 4,
                                                .budget_bytes = 64u << 20,
                                                .page_bytes = PAGE,
                                                .kv_types = {SL_TYPE_F16, SL_TYPE_F16},
                                                .strategy = SL_STRATEGY_SPLIT,
                                                .split = bad[i].split};
        assert_status(sl_plan_create(&plan, model, &profile, &options, &err), INVALID_ARGUMENT);
        assert_mentions(err, "cut");
        assert_null(plan);
    }
    sl_model_close(&model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_growing),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
