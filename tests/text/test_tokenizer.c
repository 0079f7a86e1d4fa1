/* SPDX-License-Identifier: Apache-2.0
 *
 * Token ids against foreign tokenizers: every text of the corpus, for every pre-tokenizer family
 * and tokenizer kind on small vocabularies, and for two real vocabularies where the models are
 * there.
 */
#include "text_fixtures.h"

/* Every text of the corpus gives the expected ids. With `only` (a fixture of text numbers), texts
 * that it does not list are left out: the oracle cannot read them. */
static void check_corpus(const struct sl_tokenizer *t, const char *ids_name, const char *only)
{
    struct sluice_error err = {0};
    struct fixture corpus = fixture_open("corpus.bin");
    struct fixture expected = fixture_open(ids_name);
    struct fixture list = {0};
    uint32_t n_listed = UINT32_MAX;
    if (only != NULL) {
        list = fixture_open(only);
        n_listed = fixture_number(&list);
    }
    uint32_t next = n_listed == 0 || only == NULL ? UINT32_MAX : fixture_number(&list);
    size_t n_checked = 0;
    for (uint32_t i = 0; corpus.at < corpus.size; i++) {
        size_t length;
        const char *text = fixture_bytes(&corpus, &length);
        int32_t *ids;
        size_t n;
        assert_ok(sl_tokenizer_encode(t, text, length, false, true, &ids, &n, &err), err);
        const uint32_t n_expected = fixture_number(&expected);
        const bool checked = only == NULL || i == next;
        for (uint32_t j = 0; j < n_expected; j++) {
            const uint32_t id = fixture_number(&expected);
            if (checked && (j >= n || ids[j] != (int32_t)id)) {
                fail_msg("%s: text %u '%.*s': token %u is %d of %zu, expected %u of %u", ids_name,
                         i, (int)length, text, j, j < n ? (int)ids[j] : -1, n, id, n_expected);
            }
        }
        if (checked) {
            if (n != n_expected) {
                fail_msg("%s: text %u '%.*s': %zu tokens, expected %u", ids_name, i, (int)length,
                         text, n, n_expected);
            }
            n_checked++;
        }
        if (only != NULL && i == next) {
            next = list.at < list.size ? fixture_number(&list) : UINT32_MAX;
        }
        sl_free(ids);
    }
    assert_int_equal(expected.at, expected.size);
    assert_true(n_checked > 900);
    fixture_close(&corpus);
    fixture_close(&expected);
    fixture_close(&list);
}

static void test_families(void **state)
{
    (void)state;
    static const char *const FAMILIES[] = {
        "llama-bpe", "qwen2",        "smollm",         "gpt-2",       "gpt-4o",
        "tekken",    "deepseek-llm", "deepseek-coder", "deepseek-v3", "default",
    };
    for (size_t i = 0; i < sizeof(FAMILIES) / sizeof(FAMILIES[0]); i++) {
        struct sl_tokenizer *t;
        fixture_tokenizer_with("bpe.gguf", "tokenizer.ggml.pre", FAMILIES[i], &t);
        assert_string_equal(sl_tokenizer_pre(t), FAMILIES[i]);
        char name[64];
        snprintf(name, sizeof(name), "ids_%s.bin", FAMILIES[i]);
        check_corpus(t, name, NULL);
        sl_tokenizer_destroy(&t);
    }
}

static void test_sentencepiece(void **state)
{
    (void)state;
    struct sl_tokenizer *t;
    fixture_tokenizer_with("spm.gguf", NULL, NULL, &t);
    check_corpus(t, "ids_spm.bin", "sentencepiece_texts.bin");
    sl_tokenizer_destroy(&t);
}

static void test_unigram(void **state)
{
    (void)state;
    struct sl_tokenizer *t;
    fixture_tokenizer_with("unigram.gguf", NULL, NULL, &t);
    check_corpus(t, "ids_unigram.bin", "sentencepiece_texts.bin");
    sl_tokenizer_destroy(&t);
}

static void check_real(const char *model, const char *ids, const char *only)
{
    struct sluice_error err = {0};
    char path[1024];
    if (fixture_model(path, sizeof(path), model) == NULL) {
        skip();
    }
    struct sl_gguf *file;
    struct sl_tokenizer *t;
    assert_ok(sl_gguf_open(&file, path, &err), err);
    assert_ok(sl_tokenizer_create(&t, file, &err), err);
    sl_gguf_close(&file);
    check_corpus(t, ids, only);
    sl_tokenizer_destroy(&t);
}

static void test_real_smollm2(void **state)
{
    (void)state;
    check_real("SmolLM2-135M-Instruct.Q4_1.gguf", "ids_real_smollm2.bin", NULL);
}

static void test_real_gemma3(void **state)
{
    (void)state;
    check_real("gemma-3-270m-q4_k_m.gguf", "ids_real_gemma3.bin", "real_gemma3_texts.bin");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_families),    cmocka_unit_test(test_sentencepiece),
        cmocka_unit_test(test_unigram),     cmocka_unit_test(test_real_smollm2),
        cmocka_unit_test(test_real_gemma3),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
