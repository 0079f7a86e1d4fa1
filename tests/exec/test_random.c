/* SPDX-License-Identifier: Apache-2.0
 *
 * Random models, budgets, strategies, machines, delays and failures on the simulated device: the
 * logits are those of the CPU run, or there is an error; nothing leaks, nothing hangs, and after a
 * failure that the device survives the same context gives the right answer.
 *
 * SLUICE_RANDOM_CASES sets the number of cases, SLUICE_RANDOM_SEED where they begin; a failing case
 * is named by its number.
 */
#include "test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/mem.h"
#include "exec/context.h"
#include "exec/exec_helper.h"
#include "model/arch.h"
#include "synth/synth.h"

#define N_CASES 320
#define CASES_A_MODEL 8
#define N_CTX 384 /* enough for caches that are cut by blocks */
#define SHORT_PROMPT 48
#define MAX_PROMPT 300
#define N_STEPS 5
#define MAX_VOCAB 2048
/* See test_context.c: rounding gives far less, a mistake far more. */
#define MAX_MEAN_KL 2e-4

static uint64_t rng_state;

static uint32_t below(uint32_t n)
{
    rng_state ^= rng_state << 13;
    rng_state ^= rng_state >> 7;
    rng_state ^= rng_state << 17;
    return (uint32_t)(rng_state >> 33) % n;
}

static char path[512];

static struct sl_model *make_model(int number)
{
    static const char *const archs[] = {"llama",    "qwen2",    "qwen3",   "gemma3",
                                        "qwen3moe", "qwen2moe", "gpt-oss", "llama"};
    static const char *const mixes[] = {"F16", "Q8_0", "Q4_0", "Q5_1", "BF16"};
    struct sluice_error err;
    struct sl_synth_options o = {.seed = (uint64_t)number + 1};
    const uint32_t arch = below(8);
    assert_true(sl_synth_shape_base(archs[arch], &o.shape));
    assert_true(sl_synth_mix_from_name(mixes[below(5)], &o.mix));
    o.shape.n_layers = 1 + below(5);
    if (o.shape.n_experts > 0) {
        o.shape.n_experts = 4 + below(13);
        o.shape.n_experts_used = 1 + below(4);
        o.shape.expert_skew = below(2) ? 0.6F : 0.0F;
    }
    assert_ok(sl_synth_write(&o, path, &err), err);
    struct sl_model *model = NULL;
    assert_ok(sl_model_open(&model, path, 0, &err), err);
    assert_true(model->hp.n_vocab <= MAX_VOCAB);
    return model;
}

struct run {
    int32_t prompt[MAX_PROMPT];
    int32_t n_prompt;
    int32_t next[N_STEPS];
    float *logits; /* [N_STEPS, n_vocab] */
};

static enum sluice_status evaluate(struct sl_context *ctx, const struct run *r, uint32_t n_vocab,
                                   float *logits, struct sluice_error *err)
{
    sl_context_truncate(ctx, 0);
    enum sluice_status status = sl_context_eval(ctx, r->prompt, r->n_prompt, 1, NULL, err);
    for (int i = 0; i < N_STEPS && status == SLUICE_STATUS_OK; i++) {
        memcpy(logits + (size_t)i * n_vocab, sl_context_logits(ctx), n_vocab * sizeof(float));
        status = sl_context_eval(ctx, &r->next[i], 1, 1, NULL, err);
    }
    return status;
}

static void random_run(struct run *r, uint32_t n_vocab)
{
    r->n_prompt = 1 + (int32_t)(below(16) ? below(SHORT_PROMPT) : 200 + below(MAX_PROMPT - 200));
    for (int i = 0; i < r->n_prompt; i++) {
        r->prompt[i] = (int32_t)below(n_vocab);
    }
    for (int i = 0; i < N_STEPS; i++) {
        r->next[i] = (int32_t)below(n_vocab);
    }
}

static struct sl_plan_options random_plan(uint64_t whole)
{
    static const int32_t ubatches[] = {0, 4, 16, 64};
    return (struct sl_plan_options){.budget_bytes = whole * below(23) / 20,
                                    .n_ctx = N_CTX,
                                    .max_ubatch = ubatches[below(4)],
                                    .max_outputs = 1 + (int32_t)below(3),
                                    .page_bytes = 256,
                                    .kv_types = {SL_TYPE_F16, SL_TYPE_F16},
                                    .strategy = below(2) ? SL_STRATEGY_AUTO
                                                : below(3)
                                                    ? (enum sl_strategy)below(SL_N_STRATEGIES)
                                                    : SL_STRATEGY_SPLIT};
}

/* Cuts of some of the kinds of shards, or of none: then they are searched. */
static struct sl_split random_split(const struct sl_model *model)
{
    int32_t cut[3];
    for (int k = 0; k < 3; k++) {
        int32_t unit = 0;
        const int32_t n = helper_cut_end(model, (enum sl_shard_kind)k, &unit);
        cut[k] = n > unit && below(3) > 0 ? (int32_t)below((uint32_t)(n / unit)) * unit : 0;
    }
    const bool blocks = below(3) == 0;
    return (struct sl_split){.kv_heads = blocks ? 0 : cut[0],
                             .kv_blocks = blocks ? SL_CUT_KV_BLOCKS : 0,
                             .ffn = cut[1],
                             .head = cut[2]};
}

static void random_profile(struct sl_profile *p)
{
    sl_profile_typical(p, SL_DEVICE_SIM, 2);
    if (below(2)) { /* small models are worth placing only where nothing has a fixed cost */
        p->hop_ns = p->issue_ns = 0;
        memset(p->op_ns, 0, sizeof p->op_ns);
    }
    static const double links[] = {6e9, 60e9, 60e12};
    const double link = links[below(3)];
    for (int i = 0; i < SL_N_COPY_SIZES; i++) {
        p->h2d_bytes_per_s[i] = link;
    }
    p->mapped_bytes_per_s = below(3) * 0.45 * fmin(link, 60e9);
    p->mapped_tiles_bytes_per_s = p->mapped_bytes_per_s;
}

static struct sl_sim_options random_sim(void)
{
    struct sl_sim_options sim = {.memory_bytes = 256u << 20,
                                 .max_random_delay_ns = below(3) * 10000,
                                 .seed = below(1u << 30) + 1};
    uint64_t *const faults[] = {&sim.fail_alloc_at, &sim.fail_copy_at, &sim.fail_run_at,
                                &sim.fail_register_at};
    if (below(3) == 0) {
        const uint32_t which = below(4);
        *faults[which] = 1 + below(which == 3 ? 2 : 60);
        sim.fail_late = below(4) == 0;
    }
    return sim;
}

/* What the run needs with everything in VRAM, about. */
static uint64_t whole_budget(const struct sl_model *model)
{
    return model->weight_bytes + model->weight_bytes / 2 + (4u << 20);
}

/* The CPU alone, and how far rounding takes it: with another pass size, and where activations stay
 * floats. (Rounded to 8 bits a last digit can become a step, which small random models make much
 * of.) */
static double reference(const struct sl_model *model, const struct run *r, float *logits,
                        float *other)
{
    struct sluice_error err;
    struct sl_profile profile;
    sl_profile_typical(&profile, SL_DEVICE_NONE, 1);
    double kl[3] = {0};
    for (int k = 0; k < 3; k++) {
        const struct sl_context_options options = {
            .profile = &profile,
            .kernels = k < 2 ? NULL : sl_cpu_kernels(SL_CPU_SCALAR),
            .plan = {.n_ctx = N_CTX,
                     .max_ubatch = k == 1 ? 4 : 64,
                     .max_outputs = 1,
                     .kv_types = {SL_TYPE_F16, SL_TYPE_F16}}};
        struct sl_context *ctx = NULL;
        assert_ok(sl_context_create(&ctx, model, &options, &err), err);
        assert_ok(evaluate(ctx, r, model->hp.n_vocab, k == 0 ? logits : other, &err), err);
        sl_context_destroy(&ctx);
        kl[k] = k == 0 ? 0 : helper_mean_kl(logits, other, N_STEPS, model->hp.n_vocab);
    }
    return fmax(MAX_MEAN_KL, fmax(3 * kl[1], kl[2]));
}

static int n_right, n_failed, n_refused, n_recovered, n_fed, n_by_blocks;

static void assert_right(int number, const float *wanted, const float *got, uint32_t n_vocab,
                         double bound)
{
    const double kl = helper_mean_kl(wanted, got, N_STEPS, n_vocab);
    if (!(kl <= bound)) {
        fail_msg("case %d: mean KL %g, bound %g", number, kl, bound);
    }
    n_right++;
}

static void one_case(int number, const struct sl_model *model, float *wanted, float *got)
{
    struct sluice_error err;
    const uint32_t n_vocab = model->hp.n_vocab;
    struct run r;
    random_run(&r, n_vocab);
    const double bound = reference(model, &r, wanted, got);
    struct sl_profile profile;
    random_profile(&profile);
    const struct sl_sim_options sim = random_sim();
    struct sl_plan_options plan = random_plan(whole_budget(model));
    if (plan.strategy == SL_STRATEGY_SPLIT && below(4) > 0) {
        plan.split = random_split(model);
    }
    const int n_turns = below(3) ? 0 : 3; /* what was recorded or left in VRAM by the first */
    const size_t blocks = sl_mem_n_blocks();
    struct sl_device *dev = NULL;
    struct sl_pool *pool = NULL;
    struct sl_context *ctx = NULL;
    if (getenv("SLUICE_RANDOM_SEED")) {
        print_message(
            "case %d: %s, %u layers, %u experts; prompt %d; budget %llu KiB, strategy %s, "
            "micro-batch %d, mapped %g; faults %d %d %d %d%s\n",
            number, model->arch->name, model->hp.n_layers, model->hp.n_experts, r.n_prompt,
            (unsigned long long)plan.budget_bytes >> 10, sl_strategy_name(plan.strategy),
            plan.max_ubatch, profile.mapped_bytes_per_s, (int)sim.fail_alloc_at,
            (int)sim.fail_copy_at, (int)sim.fail_run_at, (int)sim.fail_register_at,
            sim.fail_late ? ", late" : "");
    }
    assert_ok(sl_device_sim_create(&dev, &sim, &err), err);
    assert_ok(
        sl_pool_create(&pool, &(struct sl_pool_options){.n_threads = 1 + (int)below(2)}, &err),
        err);
    const struct sl_context_options options = {
        .device = dev, .pool = pool, .profile = &profile, .plan = plan};
    enum sluice_status status = sl_context_create(&ctx, model, &options, &err);
    if (status == SLUICE_STATUS_BUDGET) {
        n_refused++;
    } else if (status == SLUICE_STATUS_OK) {
        for (int32_t t = 0; t < sl_context_plan(ctx)->n_tiers; t++) {
            n_fed += sl_context_plan(ctx)->tiers[t].n_fed > 0;
        }
        n_by_blocks += sl_context_plan(ctx)->split.kv_blocks > 0;
        status = evaluate(ctx, &r, n_vocab, got, &err);
        for (int turn = 0; status == SLUICE_STATUS_OK && turn < n_turns; turn++) {
            assert_right(number, wanted, got, n_vocab, bound);
            status = evaluate(ctx, &r, n_vocab, got, &err);
        }
        if (status == SLUICE_STATUS_OK) {
            assert_right(number, wanted, got, n_vocab, bound);
        } else if (!sim.fail_late) {
            /* Faults fire once: the same context goes on. */
            n_recovered++;
            assert_ok(evaluate(ctx, &r, n_vocab, got, &err), err);
            assert_right(number, wanted, got, n_vocab, bound);
        }
    }
    if (status != SLUICE_STATUS_OK && status != SLUICE_STATUS_BUDGET) {
        if (status != SLUICE_STATUS_DEVICE && status != SLUICE_STATUS_OUT_OF_MEMORY) {
            fail_msg("case %d: %s", number, err.message);
        }
        n_failed++;
    }
    sl_context_destroy(&ctx);
    sl_pool_destroy(&pool);
    sl_device_destroy(&dev);
    assert_int_equal(sl_mem_n_blocks(), blocks);
}

static int from_environment(const char *name, int otherwise)
{
    const char *const text = getenv(name);
    return text ? atoi(text) : otherwise;
}

static void test_random(void **state)
{
    (void)state;
    const int first = from_environment("SLUICE_RANDOM_SEED", 0);
    const int end = first + from_environment("SLUICE_RANDOM_CASES", N_CASES);
    float *const logits = malloc(2 * sizeof(float) * N_STEPS * MAX_VOCAB);
    assert_non_null(logits);
    snprintf(path, sizeof path, "%s/test_random_%ld.gguf", SLUICE_BINARY_DIR, (long)getpid());
    struct sl_model *model = NULL;
    for (int number = first; number < end; number++) {
        if (number % CASES_A_MODEL == 0 || !model) {
            sl_model_close(&model);
            rng_state = 0x9e3779b97f4a7c15u * (uint64_t)(number / CASES_A_MODEL + 1);
            model = make_model(number / CASES_A_MODEL);
        }
        rng_state = 0xda942042e4dd58b5u * (uint64_t)(number + 1);
        one_case(number, model, logits, logits + N_STEPS * MAX_VOCAB);
    }
    sl_model_close(&model);
    unlink(path);
    free(logits);
    print_message("%d right, %d of them after a failure; %d failures, %d budgets refused; %d tiers "
                  "fed, %d caches cut by blocks\n",
                  n_right, n_recovered, n_failed, n_refused, n_fed, n_by_blocks);
    assert_true(n_right > (end - first) / 2);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_random)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
