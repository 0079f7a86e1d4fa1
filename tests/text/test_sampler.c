/* SPDX-License-Identifier: Apache-2.0
 *
 * Samplers: what is left to draw from after all steps, and its probabilities, against a
 * re-implementation in float64 (tools/fixtures/text_samplers.py); draws, bounds and memory.
 */
#include <float.h>
#include <math.h>

#include "text_fixtures.h"

#include "text/rng.h"
#include "text/sampler.h"
#include "text/select.h"

static void fill_logits(float *logits, int32_t n, int64_t seed)
{
    for (int64_t i = 0; i < n; i++) {
        logits[i] = (float)((double)((i * 7919 + 31) * seed % 1009) / 97.0 - 5.0);
    }
}

/* One case of the fixture. */
struct sampler_case {
    char name[64];
    int32_t n_vocab;
    int64_t seed;
    struct sl_sampler_options options;
    struct sl_logit_bias biases[64];
    char breakers[8][64];
    const char *breaker_list[8];
    int32_t history[256];
    size_t n_history;
};

static void set_option(struct sampler_case *c, const char *key, double value)
{
    struct sl_sampler_options *o = &c->options;
    const struct {
        const char *key;
        float *f;
        int32_t *i;
    } fields[] = {
        {"temperature", &o->temperature, NULL},
        {"top_k", NULL, &o->top_k},
        {"top_p", &o->top_p, NULL},
        {"min_p", &o->min_p, NULL},
        {"typical_p", &o->typical_p, NULL},
        {"min_keep", NULL, &o->min_keep},
        {"penalty_last_n", NULL, &o->penalty_last_n},
        {"repeat_penalty", &o->repeat_penalty, NULL},
        {"presence_penalty", &o->presence_penalty, NULL},
        {"frequency_penalty", &o->frequency_penalty, NULL},
        {"dry_multiplier", &o->dry_multiplier, NULL},
        {"dry_base", &o->dry_base, NULL},
        {"dry_allowed_length", NULL, &o->dry_allowed_length},
        {"dry_last_n", NULL, &o->dry_last_n},
    };
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]); i++) {
        if (strcmp(fields[i].key, key) == 0) {
            if (fields[i].f != NULL) {
                *fields[i].f = (float)value;
            } else {
                *fields[i].i = (int32_t)value;
            }
            return;
        }
    }
    fail_msg("unknown option %s", key);
}

static void read_breaker(struct sampler_case *c, FILE *file)
{
    char hex[128];
    assert_int_equal(fscanf(file, "%127s", hex), 1);
    char *text = c->breakers[c->options.n_dry_breakers];
    size_t n = 0;
    for (; hex[2 * n] != '\0'; n++) {
        unsigned byte;
        assert_int_equal(sscanf(hex + 2 * n, "%2x", &byte), 1);
        text[n] = (char)byte;
    }
    text[n] = '\0';
    c->breaker_list[c->options.n_dry_breakers++] = text;
}

/* Read up to the result line of the next case; false at the end of the file. */
static bool read_case(struct sampler_case *c, FILE *file)
{
    char key[64];
    long long seed;
    *c = (struct sampler_case){.options = sl_sampler_options_default()};
    if (fscanf(file, " case %63s %d %lld", c->name, &c->n_vocab, &seed) != 3) {
        return false;
    }
    c->seed = seed;
    c->options.biases = c->biases;
    c->options.dry_breakers = c->breaker_list;
    c->options.n_dry_breakers = 0;
    while (fscanf(file, "%63s", key) == 1 && strcmp(key, "result") != 0) {
        if (strcmp(key, "history") == 0) {
            assert_int_equal(fscanf(file, "%zu", &c->n_history), 1);
            for (size_t i = 0; i < c->n_history; i++) {
                assert_int_equal(fscanf(file, "%d", &c->history[i]), 1);
            }
        } else if (strcmp(key, "bias") == 0) {
            struct sl_logit_bias *b = &c->biases[c->options.n_biases++];
            assert_int_equal(fscanf(file, "%d %f", &b->token, &b->bias), 2);
        } else if (strcmp(key, "breaker") == 0) {
            read_breaker(c, file);
        } else {
            double value;
            assert_int_equal(fscanf(file, "%lf", &value), 1);
            set_option(c, key, value);
        }
    }
    return true;
}

static void run_case(struct sampler_case *c, FILE *file)
{
    struct sluice_error err = {0};
    struct sl_sampler *s;
    assert_ok(sl_sampler_create(&s, &c->options, c->n_vocab, &err), err);
    /* Tokens of another text must leave no trace. */
    for (int32_t i = 0; i < 10; i++) {
        sl_sampler_accept(s, i % c->n_vocab);
    }
    sl_sampler_reset(s);
    for (size_t i = 0; i < c->n_history; i++) {
        sl_sampler_accept(s, c->history[i]);
    }
    float *logits = malloc((size_t)c->n_vocab * sizeof(*logits));
    size_t n_expected;
    assert_int_equal(fscanf(file, "%zu", &n_expected), 1);
    int32_t *ids = malloc(n_expected * sizeof(*ids));
    double *p = malloc(n_expected * sizeof(*p));
    for (size_t i = 0; i < n_expected; i++) {
        assert_int_equal(fscanf(file, "%d %lf", &ids[i], &p[i]), 2);
    }
    /* Twice: sampling must not change the state. */
    for (int round = 0; round < 2; round++) {
        fill_logits(logits, c->n_vocab, c->seed);
        const int32_t token = sl_sampler_sample(s, logits);
        size_t n;
        const struct sl_candidate *candidates = sl_sampler_candidates(s, &n);
        if (n != n_expected) {
            fail_msg("%s (seed %d): %zu candidates, expected %zu", c->name, (int)c->seed, n,
                     n_expected);
        }
        bool drawn = false;
        for (size_t i = 0; i < n; i++) {
            if (candidates[i].id != ids[i] || fabs(candidates[i].p - p[i]) > 2e-6 * (p[i] + 1e-3)) {
                fail_msg("%s (seed %d): candidate %zu is %d with %.9g, expected %d with %.9g",
                         c->name, (int)c->seed, i, candidates[i].id, candidates[i].p, ids[i], p[i]);
            }
            drawn = drawn || candidates[i].id == token;
        }
        assert_true(drawn);
    }
    free(ids);
    free(p);
    free(logits);
    sl_sampler_destroy(&s);
}

static void test_distributions(void **state)
{
    (void)state;
    struct sl_tokenizer *t;
    fixture_tokenizer_with("bpe.gguf", NULL, NULL, &t);
    char path[1024];
    fixture_path(path, sizeof(path), "samplers.txt");
    FILE *file = fopen(path, "r");
    assert_non_null(file);
    static struct sampler_case c;
    int n = 0;
    while (read_case(&c, file)) {
        c.options.tokenizer = t;
        run_case(&c, file);
        n++;
    }
    assert_true(n > 100);
    fclose(file);
    sl_tokenizer_destroy(&t);
}

/* Draws follow the probabilities: a chi-squared test over fixed seeds, so it never fails by chance.
 */
static void test_draws(void **state)
{
    (void)state;
    enum { N_VOCAB = 20, N_DRAWS = 20000 };
    struct sluice_error err = {0};
    struct sl_sampler_options o = sl_sampler_options_default();
    o.top_k = 0;
    o.top_p = 1;
    o.min_p = 0;
    o.temperature = 3.0f;
    o.seed = 42;
    struct sl_sampler *s;
    assert_ok(sl_sampler_create(&s, &o, N_VOCAB, &err), err);
    float logits[N_VOCAB];
    int counts[N_VOCAB] = {0};
    int32_t first[16];
    for (int i = 0; i < N_DRAWS; i++) {
        fill_logits(logits, N_VOCAB, 1);
        const int32_t token = sl_sampler_sample(s, logits);
        counts[token]++;
        if (i < 16) {
            first[i] = token;
        }
    }
    size_t n;
    const struct sl_candidate *c = sl_sampler_candidates(s, &n);
    assert_int_equal(n, N_VOCAB);
    double chi_squared = 0;
    for (size_t i = 0; i < n; i++) {
        const double expected = c[i].p * N_DRAWS;
        chi_squared += (counts[c[i].id] - expected) * (counts[c[i].id] - expected) / expected;
    }
    assert_true(chi_squared < 43.8); /* the 0.1 % point of 19 degrees of freedom */
    /* The same seed draws the same again. */
    sl_sampler_reset(s);
    for (int i = 0; i < 16; i++) {
        fill_logits(logits, N_VOCAB, 1);
        assert_int_equal(sl_sampler_sample(s, logits), first[i]);
    }
    sl_sampler_destroy(&s);
}

/* Without filters the list is only ordered as far as the draw goes; the tokens drawn and their
 * probabilities are those of the whole list, which a filter that keeps all makes. */
static void test_draw_from_all(void **state)
{
    (void)state;
    enum { N_VOCAB = 3000 };
    struct sluice_error err = {0};
    static float logits[N_VOCAB];
    struct sl_sampler *all;
    struct sl_sampler *filtered;
    struct sl_sampler_options o = sl_sampler_options_default();
    o.top_k = 0;
    o.top_p = 1;
    o.min_p = 0;
    o.temperature = 1.5f;
    o.seed = 7;
    assert_ok(sl_sampler_create(&all, &o, N_VOCAB, &err), err);
    o.top_k = N_VOCAB - 1; /* leaves out the last one alone, whose probability is next to nothing */
    assert_ok(sl_sampler_create(&filtered, &o, N_VOCAB, &err), err);
    size_t most = 0;
    for (int i = 0; i < 200; i++) {
        fill_logits(logits, N_VOCAB, 5);
        logits[17] = -1e4f;
        const int32_t a = sl_sampler_sample(all, logits);
        fill_logits(logits, N_VOCAB, 5);
        logits[17] = -1e4f;
        const int32_t b = sl_sampler_sample(filtered, logits);
        assert_int_equal(a, b);
        size_t n_all;
        size_t n_filtered;
        const struct sl_candidate *x = sl_sampler_candidates(all, &n_all);
        const struct sl_candidate *y = sl_sampler_candidates(filtered, &n_filtered);
        assert_int_equal(n_filtered, N_VOCAB - 1);
        for (size_t j = 0; j < n_all && j < n_filtered; j++) {
            assert_int_equal(x[j].id, y[j].id);
            assert_true(fabs(x[j].p - y[j].p) < 1e-12);
        }
        most = n_all > most ? n_all : most;
    }
    assert_true(most > 256);
    sl_sampler_destroy(&all);
    sl_sampler_destroy(&filtered);
}

/* The first numbers of xoshiro256** after seeding by splitmix64, from an independent computation
 * (Python integers, by the published definitions). */
static void test_rng(void **state)
{
    (void)state;
    static const uint64_t EXPECTED[2][4] = {
        {UINT64_C(0x99EC5F36CB75F2B4), UINT64_C(0xBF6E1F784956452A), UINT64_C(0x1A5F849D4933E6E0),
         UINT64_C(0x6AA594F1262D2D2C)},
        {UINT64_C(0x15780B2E0C2EC716), UINT64_C(0x6104D9866D113A7E), UINT64_C(0xAE17533239E499A1),
         UINT64_C(0xECB8AD4703B360A1)},
    };
    static const uint64_t SEEDS[2] = {0, 42};
    for (int i = 0; i < 2; i++) {
        struct sl_rng rng;
        sl_rng_seed(&rng, SEEDS[i]);
        for (int j = 0; j < 4; j++) {
            assert_true(sl_rng_next(&rng) == EXPECTED[i][j]);
        }
    }
}

/* Logits that are no use give a token all the same. */
static void test_odd_logits(void **state)
{
    (void)state;
    struct sluice_error err = {0};
    struct sl_sampler_options o = sl_sampler_options_default();
    struct sl_sampler *s;
    for (int variant = 0; variant < 5; variant++) {
        o.temperature = variant == 1 ? 0 : variant == 2 ? 1e-30f : 0.8f;
        o.typical_p = variant == 3 ? 0.5f : 1.0f;
        o.top_k = variant == 4 ? 0 : 40;
        assert_ok(sl_sampler_create(&s, &o, 5, &err), err);
        float nan_logits[5] = {NAN, 1, NAN, -1, NAN};
        const int32_t a = sl_sampler_sample(s, nan_logits);
        assert_true(a == 1 || a == 3);
        float infinite[5] = {0, INFINITY, -INFINITY, FLT_MAX, 3};
        const int32_t b = sl_sampler_sample(s, infinite);
        assert_true(b == 1 || b == 3);
        float none[5] = {-INFINITY, NAN, -INFINITY, -INFINITY, -INFINITY};
        const int32_t c = sl_sampler_sample(s, none);
        assert_true(c >= 0 && c < 5);
        size_t n;
        assert_non_null(sl_sampler_candidates(s, &n));
        assert_int_equal(n, 1);
        sl_sampler_destroy(&s);
    }
}

static void test_bad_options(void **state)
{
    (void)state;
    struct sluice_error err;
    struct sl_sampler *s;
    const struct sl_sampler_options good = sl_sampler_options_default();
    const struct sl_logit_bias bias = {.token = 10, .bias = 1};
    const struct sl_logit_bias nan_bias = {.token = 1, .bias = NAN};
    static const char *const EMPTY[] = {""};
    struct sl_sampler_options bad[12];
    for (size_t i = 0; i < 12; i++) {
        bad[i] = good;
    }
    bad[0].temperature = NAN;
    bad[1].top_p = 1.5f;
    bad[2].min_p = -0.1f;
    bad[3].typical_p = NAN;
    bad[4].repeat_penalty = 0;
    bad[5].dry_base = 0.5f;
    bad[6].penalty_last_n = -2;
    bad[7].biases = &bias;
    bad[7].n_biases = 1;
    bad[8].biases = &nan_bias;
    bad[8].n_biases = 1;
    bad[9].dry_breakers = EMPTY;
    bad[9].n_dry_breakers = 1;
    bad[10].n_context = 0;
    bad[11].dry_multiplier = -1;
    static const char *const WORDS[] = {
        "temperature",    "top-p",    "min-p",   "typical-p", "repeat",  "DRY base",
        "penalty window", "token 10", "token 1", "breaker",   "context", "DRY multiplier"};
    for (size_t i = 0; i < 12; i++) {
        assert_status(sl_sampler_create(&s, &bad[i], 10, &err), INVALID_ARGUMENT);
        assert_null(s);
        assert_mentions(err, WORDS[i]);
    }
    assert_status(sl_sampler_create(&s, &good, 0, &err), INVALID_ARGUMENT);
}

/* Sampling and accepting allocate nothing; creation survives every failing allocation. */
static void test_memory(void **state)
{
    (void)state;
    struct sluice_error err = {0};
    struct sl_sampler_options o = sl_sampler_options_default();
    o.repeat_penalty = 1.1f;
    o.dry_multiplier = 0.8f;
    o.n_context = 50;
    const size_t blocks = sl_mem_n_blocks();
    struct sl_sampler *s = NULL;
    for (int64_t n = 0;; n++) {
        sl_mem_fail_after(n, true);
        const enum sluice_status status = sl_sampler_create(&s, &o, 300, &err);
        sl_mem_fail_after(-1, false);
        if (status == SLUICE_STATUS_OK) {
            break;
        }
        assert_status(status, OUT_OF_MEMORY);
        assert_null(s);
        assert_int_equal(sl_mem_n_blocks(), blocks);
    }
    float logits[300];
    sl_mem_fail_after(0, true);
    for (int i = 0; i < 200; i++) {
        fill_logits(logits, 300, i % 7 + 1);
        sl_sampler_accept(s, sl_sampler_sample(s, logits));
    }
    assert_false(sl_mem_fault_fired());
    sl_mem_fail_after(-1, false);
    sl_sampler_destroy(&s);
    assert_int_equal(sl_mem_n_blocks(), blocks);
}

static int compare_keys(const void *a, const void *b)
{
    const uint64_t x = *(const uint64_t *)a;
    const uint64_t y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* Selection and sorting against the C library, over sizes and patterns. */
static void test_select(void **state)
{
    (void)state;
    enum { MOST = 700 };
    static float values[MOST];
    static uint64_t keys[MOST], sorted[MOST], some[MOST];
    struct sl_rng rng;
    sl_rng_seed(&rng, 5);
    for (int round = 0; round < 600; round++) {
        const size_t n = 1 + sl_rng_next(&rng) % MOST;
        const uint64_t range = 1 + sl_rng_next(&rng) % 40;
        for (size_t i = 0; i < n; i++) {
            values[i] = round % 4 == 0   ? (float)i
                        : round % 4 == 1 ? -(float)i
                                         : (float)(sl_rng_next(&rng) % range) - 7.5f;
            keys[i] = sorted[i] = sl_select_key(values[i], (uint32_t)i);
        }
        qsort(sorted, n, sizeof(sorted[0]), compare_keys);
        const size_t k = 1 + sl_rng_next(&rng) % n;
        memcpy(some, keys, n * sizeof(keys[0]));
        sl_select_smallest(some, n, k);
        assert_memory_equal(some, sorted, k * sizeof(keys[0]));
        sl_select_largest_values(some, k, values, n);
        assert_memory_equal(some, sorted, k * sizeof(keys[0]));
        sl_select_sort(keys, n);
        assert_memory_equal(keys, sorted, n * sizeof(keys[0]));
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_distributions), cmocka_unit_test(test_draws),
        cmocka_unit_test(test_draw_from_all), cmocka_unit_test(test_rng),
        cmocka_unit_test(test_odd_logits),    cmocka_unit_test(test_bad_options),
        cmocka_unit_test(test_memory),        cmocka_unit_test(test_select),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
