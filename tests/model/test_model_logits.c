/* SPDX-License-Identifier: Apache-2.0
 *
 * Logits of tiny models of every architecture against those of llama.cpp (tools/fixtures/
 * tiny_models.py says how they were made), in one pass and in several, with a cache that keeps
 * everything and with the F16 cache of real runs.
 */
#include "test.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

#include "model/arch.h"
#include "model/model.h"
#include "support/forward.h"

#define MAX_TOKENS 64
#define MAX_VOCAB 64

/* Bounds of row_difference. The oracle computes in float, the reference sums in double: they agree
 * to 2e-6 here. An F16 cache keeps 11 bits. The oracle takes GELU from a table of F16 values, which
 * several layers let grow. A forgotten feature moves logits by 0.05 or more: the fixtures are made
 * so. */
#define TOLERANCE_EXACT 2e-5
#define TOLERANCE_F16 5e-3
#define TOLERANCE_GELU 1e-2

struct fixture {
    FILE *file;
    int32_t tokens[MAX_TOKENS];
    int n_tokens;
};

static void fixture_open(struct fixture *x, const char *name)
{
    char path[512];
    snprintf(path, sizeof path, "%s/model/%s.txt", SLUICE_FIXTURES, name);
    x->file = fopen(path, "r");
    assert_non_null(x->file);
    assert_int_equal(fscanf(x->file, "#%*[^\n] tokens %d", &x->n_tokens), 1);
    assert_in_range(x->n_tokens, 1, MAX_TOKENS);
    for (int i = 0; i < x->n_tokens; i++) {
        assert_int_equal(fscanf(x->file, "%" SCNd32, &x->tokens[i]), 1);
    }
}

/* Largest difference over a row, in standard deviations of the wanted row. */
static double row_difference(const float *got, const float *wanted, int n)
{
    double sum = 0.0;
    double squares = 0.0;
    double most = 0.0;
    for (int i = 0; i < n; i++) {
        sum += wanted[i];
        squares += (double)wanted[i] * wanted[i];
        const double d = fabs((double)got[i] - wanted[i]);
        most = d > most || isnan(d) ? d : most;
    }
    return most / sqrt(squares / n - (sum / n) * (sum / n));
}

/* Logits [n_tokens, n_vocab] by passes of `step` tokens (0: one pass). */
static void compute(const struct sl_model *model, const struct fixture *x, int step,
                    enum sl_type kv_type, float *logits)
{
    struct forward f;
    struct sluice_error err;
    forward_init(&f, model, x->n_tokens, (struct sl_kv_types){kv_type, kv_type});
    for (int at = 0; at < x->n_tokens;) {
        const int n = step > 0 && step < x->n_tokens - at ? step : x->n_tokens - at;
        if (!forward_run(&f, x->tokens + at, n, at, n, logits + (size_t)at * model->hp.n_vocab,
                         &err)) {
            fail_msg("%s", err.message);
        }
        at += n;
    }
    forward_finish(&f);
}

static void check_case(const char *name, struct fixture *x, int n_ctx)
{
    struct sluice_error err;
    struct sl_model *model = NULL;
    char path[512];
    snprintf(path, sizeof path, "%s/model/%s.gguf", SLUICE_FIXTURES, name);
    assert_ok(sl_model_open(&model, path, (uint32_t)n_ctx, &err), err);
    const int n_vocab = (int)model->hp.n_vocab;
    assert_in_range(n_vocab, 1, MAX_VOCAB);

    static float whole[MAX_TOKENS * MAX_VOCAB];
    static float steps[MAX_TOKENS * MAX_VOCAB];
    static float half[MAX_TOKENS * MAX_VOCAB];
    compute(model, x, 0, SL_TYPE_F32, whole);
    compute(model, x, 7, SL_TYPE_F32, steps);
    compute(model, x, 1, SL_TYPE_F16, half);

    int n_rows = 0;
    int position;
    while (fscanf(x->file, " row %d", &position) == 1) {
        float wanted[MAX_VOCAB];
        for (int i = 0; i < n_vocab; i++) {
            assert_int_equal(fscanf(x->file, "%f", &wanted[i]), 1);
        }
        const size_t at = (size_t)position * (size_t)n_vocab;
        const double d_whole = row_difference(whole + at, wanted, n_vocab);
        const double d_steps = row_difference(steps + at, wanted, n_vocab);
        const double d_half = row_difference(half + at, wanted, n_vocab);
        print_message("%s n_ctx %d row %d: %.2g whole, %.2g in steps, %.2g with F16 cache\n", name,
                      n_ctx, position, d_whole, d_steps, d_half);
        const bool gelu = model->arch->activation == SL_ACT_GELU_TANH;
        assert_true(d_whole < (gelu ? TOLERANCE_GELU : TOLERANCE_EXACT));
        assert_true(d_steps < (gelu ? TOLERANCE_GELU : TOLERANCE_EXACT));
        assert_true(d_half < (gelu ? TOLERANCE_GELU : TOLERANCE_F16));
        n_rows++;
    }
    assert_true(n_rows > 0);
    sl_model_close(&model);
    assert_null(model);
}

static void check_fixture(void **state)
{
    const char *name = *state;
    struct fixture x;
    fixture_open(&x, name);
    int n_cases = 0;
    int n_ctx;
    while (fscanf(x.file, " case %d", &n_ctx) == 1) {
        check_case(name, &x, n_ctx);
        n_cases++;
    }
    assert_true(n_cases > 0);
    fclose(x.file);
}

#define FIXTURE(name)                                                                              \
    {                                                                                              \
#name, check_fixture, NULL, NULL, (char[])                                                 \
        {                                                                                          \
#name                                                                                  \
        }                                                                                          \
    }

int main(void)
{
    const struct CMUnitTest tests[] = {
        FIXTURE(llama_tied_mixed), FIXTURE(llama_bias), FIXTURE(llama_freqs),
        FIXTURE(llama_linear),     FIXTURE(llama_yarn), FIXTURE(llama_longrope),
        FIXTURE(qwen2_yarn),       FIXTURE(qwen3),      FIXTURE(gemma3),
        FIXTURE(mixtral),          FIXTURE(qwen2moe),   FIXTURE(qwen3moe),
        FIXTURE(gpt_oss),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
