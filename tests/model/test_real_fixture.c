/* SPDX-License-Identifier: Apache-2.0
 *
 * The fixtures of real models are complete and agree with themselves.
 */
#include "test.h"

#include <math.h>
#include <stdio.h>

#include "support/real_fixture.h"

#define N_PROMPTS 10
#define N_STEPS 32

static const char *const names[] = {
    "smollm2_135m_q4_1.txt",
    "smollm2_135m_q4_1.exact.txt",
    "gemma3_270m_q4_k_m.txt",
    "gemma3_270m_q4_k_m.exact.txt",
};

static void read_named(struct real_fixture *x, const char *name)
{
    char path[512];
    snprintf(path, sizeof path, "%s/real/%s", SLUICE_FIXTURES, name);
    assert_true(real_fixture_read(x, path));
}

static void check_prompt(const struct real_prompt *p)
{
    assert_true(strlen(p->text) > 5);
    assert_in_range(p->n_tokens, 1, 64);
    assert_int_equal(p->n_top, 20);
    assert_in_range(p->n_steps, 1, N_STEPS);
    for (int i = 1; i < p->n_top; i++) {
        assert_true(p->top[i - 1].logit >= p->top[i].logit);
    }
    for (int i = 0; i < p->n_steps; i++) {
        assert_true(p->steps[i].logit >= p->steps[i].second_logit);
    }
    assert_int_equal(p->steps[0].id, p->top[0].id);
    assert_int_equal(p->steps[0].second_id, p->top[1].id);
}

static void complete(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        struct real_fixture x;
        read_named(&x, names[i]);
        assert_int_equal(x.n_ctx, 512);
        assert_int_equal(x.n_chunks, x.n_text_tokens / x.n_ctx);
        assert_int_equal(x.n_scored, x.n_chunks * (x.n_ctx / 2 - 1));
        assert_string_equal(x.text, "GPL-3");
        assert_int_equal(x.text_bytes, 35149);
        assert_int_equal(strlen(x.text_sha256), 64);
        assert_true(x.model_bytes > 90000000);
        double sum = 0.0;
        for (int c = 0; c < x.n_chunks; c++) {
            sum += x.chunk_nll[c];
        }
        assert_true(fabs(exp(sum / x.n_scored) / x.perplexity - 1.0) < 1e-6);
        assert_int_equal(x.n_prompts, N_PROMPTS);
        for (int p = 0; p < x.n_prompts; p++) {
            check_prompt(&x.prompts[p]);
        }
        real_fixture_free(&x);
    }
}

/* Both variants of a model are about the same text and prompts. */
static void variants_match(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i += 2) {
        struct real_fixture a;
        struct real_fixture b;
        read_named(&a, names[i]);
        read_named(&b, names[i + 1]);
        assert_string_equal(a.model, b.model);
        assert_int_equal(a.n_text_tokens, b.n_text_tokens);
        assert_memory_equal(a.text_tokens, b.text_tokens,
                            (size_t)a.n_text_tokens * sizeof *a.text_tokens);
        for (int p = 0; p < N_PROMPTS; p++) {
            assert_string_equal(a.prompts[p].text, b.prompts[p].text);
            assert_int_equal(a.prompts[p].n_tokens, b.prompts[p].n_tokens);
        }
        assert_string_equal(a.prompts[9].text, "Dear Sir or Madam,\n\nI am writing to");
        real_fixture_free(&a);
        real_fixture_free(&b);
    }
}

static void refused(void **state)
{
    (void)state;
    struct real_fixture x;
    assert_false(real_fixture_read(&x, SLUICE_FIXTURES "/real/none.txt"));
    assert_false(real_fixture_read(&x, SLUICE_FIXTURES "/model/qwen3.txt"));
    assert_null(x.prompts);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(complete),
        cmocka_unit_test(variants_match),
        cmocka_unit_test(refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
