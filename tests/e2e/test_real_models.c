/* SPDX-License-Identifier: Apache-2.0
 *
 * Real models against llama.cpp (tests/fixtures/real, made by tools/fixtures/real_models.py):
 * perplexity over a text that every Debian machine has, and greedy text of ten prompts. On the CPU,
 * and with the model split between the simulated device, its stream ring and the CPU.
 *
 * The oracle ran each file twice: as it is, its activations rounded to 8 bits in its own way, and
 * with the weights unpacked to F32. The two differ from one another by 0.2 in the gap between the
 * top two logits (root mean square) and by up to 0.5 % in perplexity. Our rounding is another one,
 * so figures are held to the range that the two span, and a step is a tie when its gap is within
 * that noise.
 */
#include "test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "exec/perplexity.h"
#include "support/real_fixture.h"
#include "text/tokenizer.h"

#define TEXT_PATH "/usr/share/common-licenses/GPL-3"
#define MAX_PERPLEXITY_RATIO 1.003
#define TIE_GAP 0.05
#define EXACT_PROMPTS 2
#define NOISE_FACTOR 2.5   /* noise is about normal: one step in a hundred lies beyond */
#define MAX_FLIPS_IN_100 8 /* steps within the noise that came out the other way */

static const char *model_path(const char *file)
{
    static char path[1024];
    const char *const folder = getenv("SLUICE_MODELS");
    snprintf(path, sizeof path, "%s/%s", folder ? folder : SLUICE_MODELS_DIR, file);
    return path;
}

struct setup {
    struct real_fixture x;     /* the file as it is */
    struct real_fixture exact; /* weights unpacked to F32 */
    struct sl_model *model;
    struct sl_tokenizer *tokenizer;
    struct sl_pool *pool;
    struct sl_device *device;
    struct sl_context *ctx;
};

/* Skips when the model is not there. `budget` > 0: on the sim device, planned as for a fast GPU. */
static void open_setup(struct setup *s, const char *fixture, uint64_t budget)
{
    struct sluice_error err;
    char path[1024];
    memset(s, 0, sizeof *s);
    snprintf(path, sizeof path, "%s/real/%s.txt", SLUICE_FIXTURES, fixture);
    assert_true(real_fixture_read(&s->x, path));
    snprintf(path, sizeof path, "%s/real/%s.exact.txt", SLUICE_FIXTURES, fixture);
    assert_true(real_fixture_read(&s->exact, path));
    const char *const file = model_path(s->x.model);
    if (!sl_file_exists(file)) {
        print_message("%s is not there (tools/fetch-models.sh gets it)\n", file);
        real_fixture_free(&s->x);
        real_fixture_free(&s->exact);
        skip();
    }
    assert_ok(sl_model_open(&s->model, file, 0, &err), err);
    assert_ok(sl_tokenizer_create(&s->tokenizer, s->model->file, &err), err);
    assert_ok(sl_pool_create(&s->pool, &(struct sl_pool_options){.n_threads = 0}, &err), err);
    struct sl_profile profile;
    sl_profile_typical(&profile, budget > 0 ? SL_DEVICE_SIM : SL_DEVICE_NONE, 2);
    if (budget > 0) {
        assert_ok(sl_device_sim_create(&s->device, NULL, &err), err);
    }
    const struct sl_context_options options = {.device = s->device,
                                               .pool = s->pool,
                                               .profile = &profile,
                                               .plan = {.budget_bytes = budget,
                                                        .n_ctx = 512,
                                                        .max_ubatch = 256,
                                                        .max_outputs = 64,
                                                        .kv_types = {SL_TYPE_F16, SL_TYPE_F16}}};
    assert_ok(sl_context_create(&s->ctx, s->model, &options, &err), err);
}

static void close_setup(struct setup *s)
{
    sl_context_destroy(&s->ctx);
    sl_device_destroy(&s->device);
    sl_pool_destroy(&s->pool);
    sl_tokenizer_destroy(&s->tokenizer);
    sl_model_close(&s->model);
    real_fixture_free(&s->x);
    real_fixture_free(&s->exact);
}

static void check_perplexity(const char *fixture)
{
    struct setup s;
    struct sluice_error err;
    char *text = NULL;
    size_t size = 0, n = 0;
    int32_t *tokens = NULL;
    open_setup(&s, fixture, 0);
    assert_ok(sl_file_read(TEXT_PATH, 0, &text, &size, &err), err);
    assert_ok(sl_tokenizer_encode(s.tokenizer, text, size, true, false, &tokens, &n, &err), err);
    assert_int_equal(n, s.x.n_text_tokens);
    if (s.x.text_tokens) {
        assert_memory_equal(tokens, s.x.text_tokens, n * sizeof *tokens);
    }
    const struct sl_perplexity_options options = {
        .n_ctx = s.x.n_ctx,
        .bos = sl_tokenizer_adds_bos(s.tokenizer) ? sl_tokenizer_bos(s.tokenizer) : -1};
    struct sl_perplexity p;
    assert_ok(sl_perplexity_run(s.ctx, tokens, n, (int32_t)s.model->hp.n_vocab, &options, &p, &err),
              err);
    const double rounded = s.x.perplexity, exact = s.exact.perplexity;
    print_message("%s: perplexity %.4f, llama.cpp %.4f, on F32 weights %.4f\n", fixture,
                  p.perplexity, rounded, exact);
    assert_int_equal(p.n_chunks, s.x.n_chunks);
    assert_int_equal(p.n_scored, s.x.n_scored);
    assert_true(p.perplexity < fmax(rounded, exact) * MAX_PERPLEXITY_RATIO);
    assert_true(p.perplexity > fmin(rounded, exact) / MAX_PERPLEXITY_RATIO);
    sl_free(tokens);
    sl_free(text);
    close_setup(&s);
}

static int32_t best_of(const float *logits, uint32_t n)
{
    int32_t best = 0;
    for (uint32_t i = 1; i < n; i++) {
        best = logits[i] > logits[best] ? (int32_t)i : best;
    }
    return best;
}

/* How far the oracle's two runs differ in the gap between the top two: root mean square over the
 * steps at which they have the same two. */
static double oracle_noise(const struct setup *s)
{
    double sum = 0;
    int n = 0;
    for (int i = 0; i < s->x.n_prompts && i < s->exact.n_prompts; i++) {
        const struct real_prompt *const p = &s->x.prompts[i], *const q = &s->exact.prompts[i];
        for (int k = 0; k < p->n_steps && k < q->n_steps; k++) {
            const struct real_step *const a = &p->steps[k], *const b = &q->steps[k];
            if (a->id != b->id) {
                break; /* other texts from here on */
            }
            if (a->second_id == b->second_id) {
                const double d =
                    (double)(a->logit - a->second_logit) - (b->logit - b->second_logit);
                sum += d * d;
                n++;
            }
        }
    }
    assert_true(n > 50);
    return sqrt(sum / n);
}

/* Feeds the fixture's tokens, so that one tie does not hide the steps after it. */
static void check_greedy(const char *fixture, uint64_t budget)
{
    struct setup s;
    struct sluice_error err;
    open_setup(&s, fixture, budget);
    const double tie = fmax(TIE_GAP, NOISE_FACTOR * oracle_noise(&s));
    int n_steps = 0, n_flips = 0;
    double largest = 0; /* gap of a step that came out the other way */
    for (int i = 0; i < s.x.n_prompts; i++) {
        const struct real_prompt *const p = &s.x.prompts[i];
        size_t n = 0;
        int32_t *tokens = NULL;
        assert_ok(sl_tokenizer_encode(s.tokenizer, p->text, strlen(p->text), true, true, &tokens,
                                      &n, &err),
                  err);
        assert_int_equal(n, p->n_tokens);
        assert_memory_equal(tokens, p->tokens, n * sizeof *tokens);
        sl_context_truncate(s.ctx, 0);
        assert_ok(sl_context_eval(s.ctx, tokens, (int32_t)n, 1, NULL, &err), err);
        for (int k = 0; k < p->n_steps; k++) {
            const int32_t best = best_of(sl_context_logits(s.ctx), s.model->hp.n_vocab);
            const double gap = (double)p->steps[k].logit - (double)p->steps[k].second_logit;
            if (best != p->steps[k].id) {
                n_flips++;
                largest = fmax(largest, gap);
                if (gap > tie) {
                    fail_msg("%s, prompt %d, step %d: token %d, llama.cpp has %d by %.3f over %d",
                             fixture, i, k, best, p->steps[k].id, gap, p->steps[k].second_id);
                }
            }
            n_steps++;
            assert_ok(sl_context_eval(s.ctx, &p->steps[k].id, 1, 1, NULL, &err), err);
        }
        sl_free(tokens);
    }
    struct sl_context_stats stats;
    sl_context_get_stats(s.ctx, &stats);
    print_message(
        "%s: %d steps, %d within the noise of %.3f came out otherwise (largest gap %.3f), "
        "arena %llu KiB\n",
        fixture, n_steps, n_flips, tie, largest, (unsigned long long)(stats.arena_bytes >> 10));
    assert_true(n_steps > 200 && 100 * n_flips <= MAX_FLIPS_IN_100 * n_steps);
    assert_true(stats.arena_bytes <= budget);
    close_setup(&s);
}

/* Without any rounding of activations (the scalar kernels) every step must be that of the oracle on
 * F32 weights, but for ties. A few prompts: these kernels are slow. */
static void test_greedy_exact(void **state)
{
    (void)state;
    struct setup s;
    struct sluice_error err;
    open_setup(&s, "smollm2_135m_q4_1", 0);
    sl_context_destroy(&s.ctx);
    struct sl_profile profile;
    sl_profile_typical(&profile, SL_DEVICE_NONE, 2);
    const struct sl_context_options options = {.pool = s.pool,
                                               .kernels = sl_cpu_kernels(SL_CPU_SCALAR),
                                               .profile = &profile,
                                               .plan = {.n_ctx = 128,
                                                        .max_ubatch = 64,
                                                        .max_outputs = 1,
                                                        .kv_types = {SL_TYPE_F16, SL_TYPE_F16}}};
    assert_ok(sl_context_create(&s.ctx, s.model, &options, &err), err);
    int n_steps = 0;
    for (int i = 0; i < EXACT_PROMPTS; i++) {
        const struct real_prompt *const p = &s.exact.prompts[i];
        sl_context_truncate(s.ctx, 0);
        assert_ok(sl_context_eval(s.ctx, p->tokens, p->n_tokens, 1, NULL, &err), err);
        for (int k = 0; k < p->n_steps; k++) {
            const int32_t best = best_of(sl_context_logits(s.ctx), s.model->hp.n_vocab);
            if (best != p->steps[k].id && !real_step_is_tie(&p->steps[k])) {
                fail_msg("prompt %d, step %d: token %d, llama.cpp has %d", i, k, best,
                         p->steps[k].id);
            }
            n_steps++;
            assert_ok(sl_context_eval(s.ctx, &p->steps[k].id, 1, 1, NULL, &err), err);
        }
    }
    print_message("%d steps equal\n", n_steps);
    assert_true(n_steps >= 32);
    close_setup(&s);
}

static void test_perplexity_smollm2(void **state)
{
    (void)state;
    check_perplexity("smollm2_135m_q4_1");
}

static void test_perplexity_gemma3(void **state)
{
    (void)state;
    check_perplexity("gemma3_270m_q4_k_m");
}

static void test_greedy_smollm2(void **state)
{
    (void)state;
    check_greedy("smollm2_135m_q4_1", 0);
}

static void test_greedy_gemma3(void **state)
{
    (void)state;
    check_greedy("gemma3_270m_q4_k_m", 0);
}

static void test_greedy_smollm2_split(void **state)
{
    (void)state;
    check_greedy("smollm2_135m_q4_1", 48u << 20);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_greedy_smollm2),     cmocka_unit_test(test_greedy_gemma3),
        cmocka_unit_test(test_greedy_exact),       cmocka_unit_test(test_greedy_smollm2_split),
        cmocka_unit_test(test_perplexity_smollm2), cmocka_unit_test(test_perplexity_gemma3),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
