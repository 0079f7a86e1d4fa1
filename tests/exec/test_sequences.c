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
#include "exec/context_internal.h"
#include "exec/exec_helper.h"

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
    int n_common; /* first tokens that all prompts have from the first one */
    struct story story[N_SEQS];
    double bound;
};

static void eager_profile(struct sl_profile *p, uint64_t seed)
{
    helper_eager_profile(p, 2);
    p->mapped_bytes_per_s = (double)(seed % 3) * 20e9;
    p->mapped_tiles_bytes_per_s = p->mapped_bytes_per_s;
}

/* One sequence in a context of its own, on the CPU: prompt and greedy tokens; or, with `force`, the
 * tokens of that story, all in passes of up to `ubatch`. */
static void tell(const struct cast *c, int ubatch, const struct story *force, struct story *out)
{
    struct sluice_error err;
    struct sl_context *ctx =
        helper_cpu_context(c->model, (struct sl_plan_options){.n_ctx = MAX_PROMPT + N_STEPS,
                                                              .max_ubatch = ubatch,
                                                              .max_outputs = N_STEPS,
                                                              .kv_types = c->types});
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
        out->tokens[i] = helper_best_of(out->logits[i], c->model->hp.n_vocab);
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
    static const int lengths[N_SEQS] = {75, 3, 64, 129, 20, 119};
    static struct story other;
    c->model = helper_open_model(name, 0, MAX_VOCAB);
    const uint32_t n_vocab = c->model->hp.n_vocab;
    c->types = types;
    c->n_common = 70;
    c->bound = MAX_MEAN_KL;
    for (int s = 0; s < N_SEQS; s++) {
        struct story *const story = &c->story[s];
        story->n_prompt = lengths[s];
        for (int i = 0; i < story->n_prompt; i++) {
            const uint32_t own = (uint32_t)(i * (37 + 2 * s) + 11 + s) % n_vocab;
            story->prompt[i] = i < c->n_common ? c->story[0].prompt[i] : (int32_t)own;
        }
        tell(c, 16, NULL, story);
        for (int ubatch = 1; ubatch <= 16; ubatch *= 4) {
            double kl = 0;
            tell(c, ubatch, story, &other);
            for (int i = 0; i < N_STEPS; i++) {
                kl += helper_mean_kl(story->logits[i], other.logits[0] + (size_t)i * n_vocab, 1,
                                     n_vocab);
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
                                    .strategy = strategy,
                                    .split.kv_heads = strategy == SL_STRATEGY_SPLIT &&
                                                      c->model->hp.n_kv_heads > 1};
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

/* Sequences that follow stories: by sequence which one, what was said of it, and how far off. */
struct follower {
    const struct cast *c;
    struct sl_context *ctx;
    int story[N_SEQS];
    int n_said[N_SEQS]; /* 0: the prompt is to come */
    double kl[N_SEQS];
};

static struct follower follow(const struct cast *c, struct sl_context *ctx)
{
    struct follower f = {.c = c, .ctx = ctx};
    for (int s = 0; s < N_SEQS; s++) {
        f.story[s] = s;
    }
    return f;
}

static void compare(struct follower *f, int s, const float *logits)
{
    const struct story *const story = &f->c->story[f->story[s]];
    const int i = f->n_said[s]++;
    const uint32_t n_vocab = f->c->model->hp.n_vocab;
    const double kl = helper_mean_kl(story->logits[i], logits, 1, n_vocab);
    if (!(kl < 20 * f->c->bound)) {
        fail_msg("sequence %d, step %d: KL %g, bound %g", s, i, kl, f->c->bound);
    }
    f->kl[s] += kl / N_STEPS;
    if (f->n_said[s] == N_STEPS && !(f->kl[s] < f->c->bound)) {
        fail_msg("sequence %d: mean KL %g, bound %g", s, f->kl[s], f->c->bound);
    }
}

/* The prompt, or what is not in the cache yet. */
static enum sluice_status begin(struct follower *f, int s, struct sluice_error *err)
{
    static float logits[MAX_VOCAB];
    const struct story *const story = &f->c->story[f->story[s]];
    const int32_t have = sl_context_seq_n_past(f->ctx, s);
    SL_TRY(sl_context_eval_seq(f->ctx, s, story->prompt + have, story->n_prompt - have, 1, logits,
                               err));
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
        tokens[i] = f->c->story[f->story[seqs[i]]].tokens[f->n_said[seqs[i]] - 1];
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
        struct follower f = follow(c, stage.ctx);
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
    static const char *const names[] = {"llama_freqs", "gemma3", "qwen2moe", "qwen3moe", "gpt_oss"};
    static const enum sl_strategy strategies[] = {SL_STRATEGY_STREAMED, SL_STRATEGY_FFN_STREAMED,
                                                  SL_STRATEGY_FFN_HOST, SL_STRATEGY_EXPERTS_SHARED,
                                                  SL_STRATEGY_RESIDENT, SL_STRATEGY_SPLIT};
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

/* Go on with the sequences of a list until the first is done. */
static void go_on_all(struct follower *f, const int32_t *seqs, int n)
{
    struct sluice_error err;
    while (f->n_said[seqs[0]] < N_STEPS) {
        assert_ok(go_on(f, seqs, n, true, &err), err);
        assert_true(sl_kv_pool_is_sound(&f->ctx->cache));
    }
}

/* Prompts that begin alike use the same blocks; who writes to a block that is not full gets a copy
 * of it, and nobody else sees what was written. */
static void share_once(const struct cast *c, uint64_t budget, enum sl_strategy strategy)
{
    static const int32_t seqs[] = {0, 3, 5, 2, 1, 4};
    struct sluice_error err;
    struct stage stage;
    assert_ok(open_stage(&stage, c, plan_options(c, budget, strategy), budget, &err), err);
    struct follower f = follow(c, stage.ctx);
    const struct sl_kv_pool *const cache = &stage.ctx->cache;
    assert_ok(begin(&f, 0, &err), err);
    const int32_t n_free = cache->n_free;
    for (int s = 1; s < N_SEQS; s++) {
        const int32_t n = c->story[s].n_prompt - 1;
        assert_ok(sl_context_seq_copy(stage.ctx, 0, s, n < c->n_common ? n : c->n_common, &err),
                  err);
    }
    assert_int_equal(cache->n_free, n_free); /* nothing is copied yet */
    for (int s = 1; s < N_SEQS; s++) {
        assert_ok(begin(&f, s, &err), err);
        assert_true(sl_kv_pool_is_sound(cache));
    }
    for (int i = 0; i < 5; i++) {
        const bool in_one = stage.ctx->plan->n_ubatch >= N_SEQS;
        assert_ok(go_on(&f, seqs, N_SEQS, i % 2 == 0 || !in_one, &err), err);
    }
    /* One becomes another in the middle of its story; both end it. */
    sl_context_seq_truncate(stage.ctx, 1, 0);
    assert_ok(sl_context_seq_copy(stage.ctx, 3, 1, sl_context_seq_n_past(stage.ctx, 3), &err), err);
    f.story[1] = f.story[3];
    f.n_said[1] = f.n_said[3];
    f.kl[1] = f.kl[3];
    /* And one goes back to a place in a block that is shared. */
    sl_context_seq_truncate(stage.ctx, 5, 66);
    f.n_said[5] = 0;
    f.kl[5] = 0;
    assert_ok(begin(&f, 5, &err), err);
    go_on_all(&f, seqs, 2);
    go_on_all(&f, seqs + 2, 1);
    go_on_all(&f, seqs + 3, 3);
    for (int s = 0; s < N_SEQS; s++) {
        sl_context_seq_truncate(stage.ctx, s, 0);
    }
    assert_int_equal(cache->n_free, cache->n_blocks);
    close_stage(&stage);
}

static void test_sharing(void **state)
{
    (void)state;
    static struct cast c;
    open_cast(&c, "llama_freqs", (struct sl_kv_types){SL_TYPE_F16, SL_TYPE_Q8_0});
    const uint64_t whole = whole_budget(&c);
    for (uint64_t step = 0; step <= 3; step++) {
        share_once(&c, whole * step / 3, SL_STRATEGY_AUTO);
    }
    share_once(&c, whole / 2, SL_STRATEGY_STREAMED);
    share_once(&c, whole / 2, SL_STRATEGY_SPLIT);
    sl_model_close(&c.model);
}

static int n_graphs(const struct sl_context *ctx)
{
    int n = 0;
    for (int t = 0; t < SL_N_GRAPH_TIERS && t < ctx->plan->n_tiers; t++) {
        for (int32_t k = 0; ctx->segments[t] && k < ctx->plan->tiers[t].n_steps; k++) {
            n += ctx->segments[t][k].graph != NULL;
        }
    }
    return n;
}

/* A recorded pass serves on when sequences get new blocks: the table is no part of it. */
static void test_graphs(void **state)
{
    (void)state;
    static struct cast c;
    struct sluice_error err;
    struct stage stage;
    static const int32_t seqs[] = {5, 0, 2};
    open_cast(&c, "llama_freqs", (struct sl_kv_types){SL_TYPE_F16, SL_TYPE_F16});
    assert_ok(
        open_stage(&stage, &c, plan_options(&c, whole_budget(&c), SL_STRATEGY_RESIDENT), 5, &err),
        err);
    struct follower f = follow(&c, stage.ctx);
    for (int i = 0; i < 3; i++) {
        assert_ok(begin(&f, seqs[i], &err), err);
    }
    const struct sl_kv_pool *const cache = &stage.ctx->cache;
    int32_t n_held = 0; /* of the sequence that grows, when the graph was recorded */
    while (f.n_said[5] < N_STEPS) {
        assert_ok(go_on(&f, seqs, 3, true, &err), err);
        n_held = n_held == 0 && n_graphs(stage.ctx) > 0 ? cache->n_held[5] : n_held;
    }
    assert_true(n_held > 0 && n_graphs(stage.ctx) == 1);
    assert_int_equal(cache->n_held[5], n_held + 1);
    close_stage(&stage);
    sl_model_close(&c.model);
}

/* A pool that is full says so and nothing is lost; what others give up can be used. */
static void test_full(void **state)
{
    (void)state;
    static struct cast c;
    struct sluice_error err;
    struct stage stage;
    static const int32_t both[] = {3, 2}, alone[] = {2};
    static int32_t many[5 * SL_KV_BLOCK];
    open_cast(&c, "llama_freqs", (struct sl_kv_types){SL_TYPE_F16, SL_TYPE_F16});
    struct sl_plan_options plan = plan_options(&c, whole_budget(&c) / 2, SL_STRATEGY_AUTO);
    plan.n_ctx = 4 * SL_KV_BLOCK;
    assert_ok(open_stage(&stage, &c, plan, 7, &err), err);
    struct follower f = follow(&c, stage.ctx);
    const struct sl_kv_pool *const cache = &stage.ctx->cache;
    assert_status(sl_context_eval_seq(stage.ctx, 1, many, 5 * SL_KV_BLOCK, 0, NULL, &err),
                  INVALID_ARGUMENT);
    assert_mentions(err, "--ctx-size");
    assert_int_equal(cache->n_free, 4);
    assert_ok(begin(&f, 3, &err), err); /* 129 tokens: 3 blocks */
    assert_status(begin(&f, 0, &err), INVALID_ARGUMENT);
    assert_mentions(err, "full");
    assert_int_equal(sl_context_seq_n_past(stage.ctx, 0), 0);
    assert_ok(begin(&f, 2, &err), err); /* 64 tokens: 1 block, which is full too */
    assert_status(go_on(&f, both, 2, true, &err), INVALID_ARGUMENT);
    assert_mentions(err, "full");
    assert_int_equal(sl_context_seq_n_past(stage.ctx, 3), 129);
    assert_int_equal(sl_context_seq_n_past(stage.ctx, 2), 64);
    assert_int_equal(cache->n_free, 0);
    assert_true(sl_kv_pool_is_sound(cache));
    /* No block to copy a shared one to. */
    assert_ok(sl_context_seq_copy(stage.ctx, 3, 0, 129, &err), err);
    assert_status(go_on(&f, (const int32_t[]){3}, 1, true, &err), INVALID_ARGUMENT);
    assert_mentions(err, "others use");
    sl_context_seq_truncate(stage.ctx, 0, 0);
    assert_ok(go_on(&f, (const int32_t[]){3}, 1, true, &err), err);
    sl_context_seq_truncate(stage.ctx, 3, 0);
    assert_int_equal(cache->n_free, 3);
    go_on_all(&f, alone, 1);
    /* What makes no sense. */
    assert_status(sl_context_decode(stage.ctx, (const int32_t[]){1, 1}, many, 2, NULL, &err),
                  INVALID_ARGUMENT);
    assert_mentions(err, "twice");
    assert_status(sl_context_decode(stage.ctx, (const int32_t[]){N_SEQS}, many, 1, NULL, &err),
                  INVALID_ARGUMENT);
    assert_status(sl_context_eval_seq(stage.ctx, -1, many, 1, 0, NULL, &err), INVALID_ARGUMENT);
    assert_status(sl_context_seq_copy(stage.ctx, 2, 2, 1, &err), INVALID_ARGUMENT);
    assert_status(sl_context_seq_copy(stage.ctx, 2, 1, 500, &err), INVALID_ARGUMENT);
    assert_status(sl_context_seq_shift(stage.ctx, N_SEQS, 0, 1, &err), INVALID_ARGUMENT);
    close_stage(&stage);
    sl_model_close(&c.model);
}

/* A sequence in shared and scattered blocks loses its middle: it goes on as one that is alone on
 * the CPU does after the same loss, and whoever shared its blocks does not notice. */
static void shift_once(const struct cast *c, uint64_t budget, enum sl_strategy strategy)
{
    enum { KEEP = 10, DROP = 40 };
    static float wanted[MAX_VOCAB], got[MAX_VOCAB];
    struct sluice_error err;
    struct stage alone, stage;
    struct sl_plan_options plan = plan_options(c, 0, SL_STRATEGY_HOST);
    plan.n_seqs = 1;
    assert_ok(open_stage(&alone, c, plan, 1, &err), err);
    assert_ok(open_stage(&stage, c, plan_options(c, budget, strategy), budget, &err), err);
    struct follower single = follow(c, alone.ctx), f = follow(c, stage.ctx);
    single.story[0] = 3;
    assert_ok(begin(&single, 0, &err), err);
    for (int s = 0; s < 3; s++) { /* blocks in no order */
        assert_ok(begin(&f, s, &err), err);
    }
    sl_context_seq_truncate(stage.ctx, 0, 0);
    assert_ok(begin(&f, 3, &err), err);
    assert_ok(sl_context_seq_copy(stage.ctx, 3, 0, 129, &err), err);
    f.story[0] = 3;
    f.n_said[0] = 1;
    assert_ok(sl_context_shift(alone.ctx, KEEP, DROP, &err), err);
    assert_ok(sl_context_seq_shift(stage.ctx, 3, KEEP, DROP, &err), err);
    assert_int_equal(sl_context_seq_n_past(stage.ctx, 3), 129 - DROP);
    assert_true(sl_kv_pool_is_sound(&stage.ctx->cache));
    for (int i = 0; i < N_STEPS; i++) {
        const int32_t token = c->story[3].tokens[i], seq = 3;
        assert_ok(sl_context_eval(alone.ctx, &token, 1, 1, wanted, &err), err);
        assert_ok(sl_context_decode(stage.ctx, &seq, &token, 1, got, &err), err);
        const double kl = helper_mean_kl(wanted, got, 1, c->model->hp.n_vocab);
        if (!(kl < c->bound)) {
            fail_msg("step %d after the shift: KL %g, bound %g", i, kl, c->bound);
        }
    }
    go_on_all(&f, (const int32_t[]){0, 2}, 2);
    close_stage(&stage);
    close_stage(&alone);
}

static void test_shift(void **state)
{
    (void)state;
    static struct cast c;
    open_cast(&c, "llama_freqs", (struct sl_kv_types){SL_TYPE_F16, SL_TYPE_F16});
    const uint64_t whole = whole_budget(&c);
    for (uint64_t step = 0; step <= 3; step++) {
        shift_once(&c, whole * step / 3, SL_STRATEGY_AUTO);
    }
    shift_once(&c, whole / 2, SL_STRATEGY_STREAMED);
    shift_once(&c, whole / 2, SL_STRATEGY_SPLIT);
    sl_model_close(&c.model);
}

/* A short scene with a shared block that is copied, in actions that can fail and be tried again. */
#define N_ACTIONS 10
static enum sluice_status act(struct follower *f, int action, struct sluice_error *err)
{
    static const int32_t seqs[] = {3, 0};
    if (action == 0) {
        return begin(f, 3, err);
    }
    if (action == 1) {
        SL_TRY(sl_context_seq_copy(f->ctx, 3, 0, f->c->n_common, err));
        f->n_said[0] = 0;
        return begin(f, 0, err);
    }
    return go_on(f, seqs, 2, true, err);
}

/* The n-th copy or kernel fails, for every n: an error, sequences as they were, and the same words
 * when it is tried again. */
static void test_faults(void **state)
{
    (void)state;
    static struct cast c;
    struct sluice_error err;
    open_cast(&c, "llama_freqs", (struct sl_kv_types){SL_TYPE_F16, SL_TYPE_F16});
    const uint64_t whole = whole_budget(&c);
    for (int kind = 0; kind < 4; kind++) {
        int n_failed = 0;
        for (uint64_t n = 1;; n += 1 + n / 4) {
            const size_t blocks = sl_mem_n_blocks();
            struct stage stage;
            assert_ok(open_stage(&stage, &c,
                                 plan_options(&c, whole * 3 / 4,
                                              kind < 2 ? SL_STRATEGY_AUTO : SL_STRATEGY_STREAMED),
                                 n, &err),
                      err);
            struct sl_sim_options sim = {0};
            *(kind % 2 == 0 ? &sim.fail_copy_at : &sim.fail_run_at) = n;
            sl_device_sim_set(stage.dev, &sim);
            struct follower f = follow(&c, stage.ctx);
            bool failed = false;
            for (int action = 0; action < N_ACTIONS; action++) {
                const int32_t n_past[] = {sl_context_seq_n_past(stage.ctx, 3),
                                          sl_context_seq_n_past(stage.ctx, 0)};
                if (act(&f, action, &err) == SLUICE_STATUS_OK) {
                    continue;
                }
                assert_int_equal(err.status, SLUICE_STATUS_DEVICE);
                assert_false(failed);
                failed = true;
                assert_true(sl_kv_pool_is_sound(&stage.ctx->cache));
                if (action > 1) {
                    assert_int_equal(sl_context_seq_n_past(stage.ctx, 3), n_past[0]);
                    assert_int_equal(sl_context_seq_n_past(stage.ctx, 0), n_past[1]);
                }
                assert_ok(act(&f, action, &err), err);
            }
            close_stage(&stage);
            assert_int_equal(sl_mem_n_blocks(), blocks);
            if (!failed) {
                break;
            }
            n_failed++;
        }
        assert_true(n_failed > 5);
    }
    sl_model_close(&c.model);
}

/* The n-th host allocation fails: an error, no leak. And nothing is allocated while sequences grow,
 * share and part. */
static void test_memory(void **state)
{
    (void)state;
    static struct cast c;
    struct sluice_error err;
    struct stage stage;
    open_cast(&c, "llama_freqs", (struct sl_kv_types){SL_TYPE_F16, SL_TYPE_F16});
    const struct sl_plan_options plan =
        plan_options(&c, whole_budget(&c) / 2, SL_STRATEGY_FFN_STREAMED);
    for (int64_t n = 0;; n++) {
        const size_t blocks = sl_mem_n_blocks();
        sl_mem_fail_after(n, false);
        const enum sluice_status status = open_stage(&stage, &c, plan, 3, &err);
        const bool fired = sl_mem_fault_fired();
        sl_mem_fail_after(-1, false);
        if (status == SLUICE_STATUS_OK && !fired) {
            break;
        }
        close_stage(&stage); /* it may have survived, e.g. without page-locked memory */
        assert_int_equal(sl_mem_n_blocks(), blocks);
    }
    for (int round = 0; round < 2; round++) {
        struct follower f = follow(&c, stage.ctx);
        sl_mem_forbid(round == 1); /* first use may grow queues */
        enum sluice_status status = SLUICE_STATUS_OK;
        for (int action = 0; action < N_ACTIONS && status == SLUICE_STATUS_OK; action++) {
            status = act(&f, action, &err);
        }
        sl_context_seq_truncate(stage.ctx, 3, 0);
        sl_mem_forbid(false);
        assert_ok(status, err);
    }
    close_stage(&stage);
    sl_model_close(&c.model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_together), cmocka_unit_test(test_quantized),
        cmocka_unit_test(test_sharing),  cmocka_unit_test(test_full),
        cmocka_unit_test(test_shift),    cmocka_unit_test(test_faults),
        cmocka_unit_test(test_memory),   cmocka_unit_test(test_graphs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
