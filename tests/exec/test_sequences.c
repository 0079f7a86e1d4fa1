/* SPDX-License-Identifier: Apache-2.0
 *
 * Many sequences in one context: each says what it says alone, whatever the others do meanwhile,
 * wherever the cache lives, and however its blocks came to be where they are.
 */
#include "test.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/mem.h"
#include "exec/context.h"

#define N_SEQS 6
#define N_STEPS 14 /* tokens that each generates */
#define MAX_PROMPT 150
#define MAX_VOCAB 128
#define N_CTX (14 * SL_KV_BLOCK)
#define PAGE 256
/* As in test_context.c: rounding is far below, a wrong cell of the cache far above. */
#define MAX_MEAN_KL 1e-4

/* What a sequence says alone. */
struct story {
    int32_t prompt[MAX_PROMPT];
    int n_prompt;
    int32_t tokens[N_STEPS]; /* the best after the prompt, and after each of them */
    float logits[N_STEPS][MAX_VOCAB];
};

struct cast {
    struct sl_model *model;
    struct sl_kv_types types;
    struct story story[N_SEQS];
    double bound;
};

static int32_t best_of(const float *logits, uint32_t n)
{
    int32_t best = 0;
    for (uint32_t i = 1; i < n; i++) {
        best = logits[i] > logits[best] ? (int32_t)i : best;
    }
    return best;
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

static void eager_profile(struct sl_profile *p, uint64_t seed)
{
    sl_profile_typical(p, SL_DEVICE_SIM, 2);
    p->hop_ns = p->issue_ns = 0;
    memset(p->op_ns, 0, sizeof p->op_ns);
    for (int i = 0; i < SL_N_COPY_SIZES; i++) {
        p->h2d_bytes_per_s[i] = 60e9;
    }
    p->mapped_bytes_per_s = (double)(seed % 3) * 20e9;
}

/* One sequence in a context of its own, on the CPU: prompt and greedy tokens; or, with `force`, the
 * tokens of that story, all in passes of up to `ubatch`. */
static void tell(const struct cast *c, int ubatch, const struct story *force, struct story *out)
{
    struct sluice_error err;
    struct sl_profile profile;
    struct sl_context *ctx = NULL;
    sl_profile_typical(&profile, SL_DEVICE_NONE, 1);
    const struct sl_context_options options = {.profile = &profile,
                                               .plan = {.n_ctx = MAX_PROMPT + N_STEPS,
                                                        .max_ubatch = ubatch,
                                                        .max_outputs = N_STEPS,
                                                        .kv_types = c->types}};
    assert_ok(sl_context_create(&ctx, c->model, &options, &err), err);
    if (force) {
        int32_t tokens[MAX_PROMPT + N_STEPS];
        memcpy(tokens, force->prompt, sizeof force->prompt);
        memcpy(tokens + force->n_prompt, force->tokens, sizeof force->tokens);
        assert_ok(sl_context_eval(ctx, tokens, force->n_prompt + N_STEPS - 1, N_STEPS,
                                  out->logits[0], &err),
                  err);
    } else {
        assert_ok(sl_context_eval(ctx, out->prompt, out->n_prompt, 1, out->logits[0], &err), err);
    }
    for (int i = 0; i < N_STEPS && !force; i++) {
        out->tokens[i] = best_of(out->logits[i], c->model->hp.n_vocab);
        if (i + 1 < N_STEPS) {
            assert_ok(sl_context_eval(ctx, &out->tokens[i], 1, 1, out->logits[i + 1], &err), err);
        }
    }
    sl_context_destroy(&ctx);
}

/* The stories, and how far rounding alone takes them: sums over tokens of a pass depend on its
 * size. */
static void open_cast(struct cast *c, const char *name, struct sl_kv_types types)
{
    static const int lengths[N_SEQS] = {75, 3, 64, 129, 20, 100};
    static struct story other;
    struct sluice_error err;
    char path[512];
    snprintf(path, sizeof path, "%s/model/%s.gguf", SLUICE_FIXTURES, name);
    assert_ok(sl_model_open(&c->model, path, 0, &err), err);
    const uint32_t n_vocab = c->model->hp.n_vocab;
    assert_true(n_vocab <= MAX_VOCAB);
    c->types = types;
    c->bound = MAX_MEAN_KL;
    for (int s = 0; s < N_SEQS; s++) {
        struct story *const story = &c->story[s];
        story->n_prompt = lengths[s];
        for (int i = 0; i < story->n_prompt; i++) {
            story->prompt[i] = (int32_t)((uint32_t)(i * (37 + 2 * s) + 11) % n_vocab);
        }
        tell(c, 16, NULL, story);
        for (int ubatch = 1; ubatch <= 16; ubatch *= 4) {
            double kl = 0;
            tell(c, ubatch, story, &other);
            for (int i = 0; i < N_STEPS; i++) {
                kl += kl_of(story->logits[i], other.logits[0] + (size_t)i * n_vocab, n_vocab);
            }
            c->bound = fmax(c->bound, 2 * kl / N_STEPS);
        }
    }
    print_message("%s: bound %.2g\n", name, c->bound);
    assert_true(c->bound < 5e-3);
}

/* A context on the simulated device. */
struct stage {
    struct sl_device *dev;
    struct sl_pool *pool;
    struct sl_context *ctx;
};

static enum sluice_status open_stage(struct stage *s, const struct cast *c,
                                     struct sl_plan_options plan, uint64_t seed,
                                     struct sluice_error *err)
{
    struct sl_profile profile;
    const struct sl_sim_options sim = {
        .memory_bytes = 64u << 20, .max_random_delay_ns = 20000, .seed = seed};
    *s = (struct stage){0};
    eager_profile(&profile, seed);
    SL_TRY(sl_device_sim_create(&s->dev, &sim, err));
    SL_TRY(sl_pool_create(&s->pool, &(struct sl_pool_options){.n_threads = 2}, err));
    const struct sl_context_options options = {
        .device = s->dev, .pool = s->pool, .profile = &profile, .plan = plan};
    return sl_context_create(&s->ctx, c->model, &options, err);
}

static void close_stage(struct stage *s)
{
    sl_context_destroy(&s->ctx);
    sl_pool_destroy(&s->pool);
    sl_device_destroy(&s->dev);
}

static struct sl_plan_options plan_options(const struct cast *c, uint64_t budget,
                                           enum sl_strategy strategy)
{
    return (struct sl_plan_options){.budget_bytes = budget,
                                    .n_ctx = N_CTX,
                                    .n_seqs = N_SEQS,
                                    .max_ubatch = 16,
                                    .max_outputs = N_SEQS,
                                    .page_bytes = PAGE,
                                    .kv_types = c->types,
                                    .strategy = strategy};
}

/* Where the caches of all plans were. */
static struct {
    int in_vram, streamed, on_host;
} homes;

static void count_homes(const struct sl_plan *plan, const struct sl_model *model)
{
    for (int32_t i = 0; i < plan->n_shards; i++) {
        if (model->shards[i].kind == SL_SHARD_ATTENTION) {
            const uint8_t placement = plan->tiers[plan->n_tiers - 1].placement[i];
            *((int32_t)model->shards[i].layer < plan->n_kv_layers ? &homes.in_vram
              : placement == SL_PLACE_STREAMED                    ? &homes.streamed
                                                                  : &homes.on_host) += 1;
        }
    }
}

/* Follow a sequence's story: sums of divergences by sequence. */
struct follower {
    const struct cast *c;
    struct sl_context *ctx;
    double kl[N_SEQS];
    int n_said[N_SEQS]; /* 0: the prompt is to come */
};

static void compare(struct follower *f, int s, const float *logits)
{
    const struct story *const story = &f->c->story[s];
    const int i = f->n_said[s]++;
    const uint32_t n_vocab = f->c->model->hp.n_vocab;
    const double kl = kl_of(story->logits[i], logits, n_vocab);
    if (!(kl < 20 * f->c->bound)) {
        fail_msg("sequence %d, step %d: KL %g, bound %g", s, i, kl, f->c->bound);
    }
    f->kl[s] += kl / N_STEPS;
    if (f->n_said[s] == N_STEPS && !(f->kl[s] < f->c->bound)) {
        fail_msg("sequence %d: mean KL %g, bound %g", s, f->kl[s], f->c->bound);
    }
}

static enum sluice_status begin(struct follower *f, int s, struct sluice_error *err)
{
    static float logits[MAX_VOCAB];
    const struct story *const story = &f->c->story[s];
    SL_TRY(sl_context_eval_seq(f->ctx, s, story->prompt, story->n_prompt, 1, logits, err));
    compare(f, s, logits);
    return SLUICE_STATUS_OK;
}

/* One more token for each of n sequences. */
static enum sluice_status go_on(struct follower *f, const int32_t *seqs, int n, bool own_buffer,
                                struct sluice_error *err)
{
    static float logits[N_SEQS * MAX_VOCAB];
    int32_t tokens[N_SEQS];
    const size_t n_vocab = f->c->model->hp.n_vocab;
    for (int i = 0; i < n; i++) {
        tokens[i] = f->c->story[seqs[i]].tokens[f->n_said[seqs[i]] - 1];
    }
    SL_TRY(sl_context_decode(f->ctx, seqs, tokens, n, own_buffer ? logits : NULL, err));
    const float *const rows = own_buffer ? logits : sl_context_logits(f->ctx);
    for (int i = 0; i < n; i++) {
        compare(f, seqs[i], rows + (size_t)i * n_vocab);
    }
    return SLUICE_STATUS_OK;
}

/* All stories twice over: sequences come in one after the other, in orders that change, leave when
 * they are done, and begin again in blocks that others have left. */
static enum sluice_status play(struct follower *f, struct sluice_error *err)
{
    int n_lives[N_SEQS] = {0};
    for (int step = 0;; step++) {
        int32_t seqs[N_SEQS];
        int n = 0, n_left = 0;
        for (int k = 0; k < N_SEQS; k++) {
            const int s = (k + step / 3) % N_SEQS;
            if (f->n_said[s] == N_STEPS) {
                sl_context_seq_truncate(f->ctx, s, 0);
                f->n_said[s] = 0;
                f->kl[s] = 0;
                n_lives[s]++;
            }
            n_left += n_lives[s] < 2;
            if (n_lives[s] < 2 && f->n_said[s] == 0 && step >= 2 * s) {
                SL_TRY(begin(f, s, err));
            } else if (f->n_said[s] > 0) {
                seqs[n++] = s;
            }
        }
        if (n_left == 0) {
            return SLUICE_STATUS_OK;
        }
        if (n > 0) {
            const bool in_one = n <= sl_context_plan(f->ctx)->n_ubatch;
            SL_TRY(go_on(f, seqs, n, step % 2 == 0 || !in_one, err));
        }
    }
}

/* VRAM that everything takes. */
static uint64_t whole_budget(const struct cast *c)
{
    struct sluice_error err;
    struct sl_profile profile;
    struct sl_plan *plan = NULL;
    eager_profile(&profile, 0);
    const struct sl_plan_options options = plan_options(c, UINT64_C(1) << 40, SL_STRATEGY_RESIDENT);
    assert_ok(sl_plan_create(&plan, c->model, &profile, &options, &err), err);
    const uint64_t bytes = (plan->arena_bytes + PAGE - 1) / PAGE * PAGE;
    sl_plan_destroy(&plan);
    return bytes;
}

/* False when the strategy does not fit. */
static bool play_once(const struct cast *c, uint64_t budget, enum sl_strategy strategy,
                      uint64_t seed)
{
    struct sluice_error err;
    struct stage stage;
    const enum sluice_status status =
        open_stage(&stage, c, plan_options(c, budget, strategy), seed, &err);
    if (status == SLUICE_STATUS_OK) {
        struct follower f = {.c = c, .ctx = stage.ctx};
        count_homes(sl_context_plan(stage.ctx), c->model);
        assert_ok(play(&f, &err), err);
        struct sl_context_stats stats;
        sl_context_get_stats(stage.ctx, &stats);
        assert_true(stats.arena_bytes <= budget);
    } else {
        assert_int_equal(status, SLUICE_STATUS_BUDGET);
    }
    close_stage(&stage);
    return status == SLUICE_STATUS_OK;
}

static void test_together(void **state)
{
    (void)state;
    static const char *const names[] = {"llama_freqs", "gemma3", "qwen3moe", "gpt_oss"};
    static const enum sl_strategy strategies[] = {SL_STRATEGY_STREAMED, SL_STRATEGY_FFN_STREAMED,
                                                  SL_STRATEGY_FFN_HOST, SL_STRATEGY_EXPERTS_SHARED,
                                                  SL_STRATEGY_RESIDENT};
    static struct cast c;
    for (size_t m = 0; m < sizeof names / sizeof names[0]; m++) {
        open_cast(&c, names[m], (struct sl_kv_types){SL_TYPE_F16, SL_TYPE_F16});
        const uint64_t whole = whole_budget(&c);
        for (uint64_t step = 0; step <= 4; step++) {
            assert_true(play_once(&c, whole * step / 4, SL_STRATEGY_AUTO, step + 1));
        }
        int n_ran = 0;
        for (size_t i = 0; i < sizeof strategies / sizeof strategies[0]; i++) {
            n_ran += play_once(&c, whole / 2, strategies[i], i);
        }
        assert_true(n_ran > 0);
        sl_model_close(&c.model);
    }
    print_message("caches of layers: %d in VRAM, %d streamed, %d on the host\n", homes.in_vram,
                  homes.streamed, homes.on_host);
    assert_true(homes.in_vram > 0 && homes.streamed > 0 && homes.on_host > 0);
}

/* Caches of fewer bits. */
static void test_quantized(void **state)
{
    (void)state;
    static const struct sl_kv_types types[] = {{SL_TYPE_Q8_0, SL_TYPE_Q8_0},
                                               {SL_TYPE_Q8_0, SL_TYPE_Q4_0}};
    static struct cast c;
    for (size_t t = 0; t < sizeof types / sizeof types[0]; t++) {
        open_cast(&c, "llama_freqs", types[t]);
        const uint64_t whole = whole_budget(&c);
        for (uint64_t step = 0; step <= 2; step++) {
            assert_true(play_once(&c, whole * step / 2, SL_STRATEGY_AUTO, step + 1));
        }
        play_once(&c, whole / 3, SL_STRATEGY_STREAMED, 9);
        sl_model_close(&c.model);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_together),
        cmocka_unit_test(test_quantized),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
