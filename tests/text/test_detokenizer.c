/* SPDX-License-Identifier: Apache-2.0
 *
 * The streaming detokenizer: what comes out piece by piece is the text, always well-formed, cut at
 * the first stop string, and never ahead of what is known.
 */
#include "text_fixtures.h"

#include "text/detokenizer.h"
#include "text/rng.h"
#include "text/utf8.h"

/* Output collected from a detokenizer. */
struct collected {
    char text[8192];
    size_t n;
};

static void collect(struct collected *c, const char *text, size_t length)
{
    assert_true(c->n + length <= sizeof(c->text));
    /* Every single chunk is well-formed, not only the whole. */
    assert_int_equal(sl_utf8_valid_prefix(text, length), length);
    memcpy(c->text + c->n, text, length);
    c->n += length;
}

static void run(struct sl_detokenizer *d, const int32_t *ids, size_t n, struct collected *out)
{
    out->n = 0;
    size_t length;
    for (size_t i = 0; i < n; i++) {
        const char *text = sl_detokenizer_push(d, ids[i], &length);
        collect(out, text, length);
    }
    const char *text = sl_detokenizer_flush(d, &length);
    collect(out, text, length);
}

/* Token by token, the corpus comes back; bytes that are no text come back as U+FFFD. */
static void test_corpus(void **state)
{
    (void)state;
    static const char *const FILES[] = {"bpe.gguf", "spm.gguf"};
    struct sluice_error err = {0};
    static struct collected out;
    static char expected[8192];
    for (int f = 0; f < 2; f++) {
        struct sl_tokenizer *t;
        fixture_tokenizer_with(FILES[f], NULL, NULL, &t);
        const struct sl_detokenizer_options options = {.special = true,
                                                       .strip_first_space = f == 1};
        struct sl_detokenizer *d;
        assert_ok(sl_detokenizer_create(&d, t, &options, &err), err);
        struct fixture corpus = fixture_open("corpus.bin");
        while (corpus.at < corpus.size) {
            size_t length;
            const char *text = fixture_bytes(&corpus, &length);
            /* SentencePiece cannot tell its space mark from a blank. */
            if (f == 1 && memmem(text, length, "\xE2\x96\x81", 3) != NULL) {
                continue;
            }
            int32_t *ids;
            size_t n;
            assert_ok(sl_tokenizer_encode(t, text, length, false, f == 0, &ids, &n, &err), err);
            sl_detokenizer_reset(d);
            run(d, ids, n, &out);
            const size_t n_expected = sl_utf8_repair(expected, text, length);
            if (out.n != n_expected || memcmp(out.text, expected, n_expected) != 0) {
                fail_msg("%s: '%.*s' came back as '%.*s'", FILES[f], (int)length, text, (int)out.n,
                         out.text);
            }
            sl_free(ids);
        }
        fixture_close(&corpus);
        sl_detokenizer_destroy(&d);
        sl_tokenizer_destroy(&t);
    }
}

/* Random texts over a small alphabet with random stop strings over the same: the output is the text
 * before the one that is complete first, and no chunk ever had to be taken back. */
static void test_stop_strings(void **state)
{
    (void)state;
    static const char *const ALPHABET[] = {"a", "b", "ab", "\n", "\xC3\xA9", "\xE6\x97\xA5", " "};
    struct sluice_error err = {0};
    struct sl_tokenizer *t;
    fixture_tokenizer_with("bpe.gguf", NULL, NULL, &t);
    struct sl_rng rng;
    sl_rng_seed(&rng, 11);
    static struct collected out;
    int n_stopped = 0;
    for (int round = 0; round < 2000; round++) {
        char stops[3][64];
        const char *list[3];
        for (int i = 0; i < 3; i++) {
            stops[i][0] = '\0';
            const uint64_t parts = 2 + sl_rng_next(&rng) % 4;
            for (uint64_t j = 0; j < parts; j++) {
                strcat(stops[i], ALPHABET[sl_rng_next(&rng) % 7]);
            }
            list[i] = stops[i];
        }
        char text[512] = "";
        for (uint64_t i = 0, n = sl_rng_next(&rng) % 60; i < n; i++) {
            strcat(text, ALPHABET[sl_rng_next(&rng) % 7]);
        }
        size_t cut = strlen(text);
        int which = -1;
        for (size_t end = 1; end <= strlen(text) && which < 0; end++) {
            for (int i = 0; i < 3; i++) {
                const size_t bytes = strlen(stops[i]);
                if (bytes <= end && memcmp(text + end - bytes, stops[i], bytes) == 0 &&
                    (which < 0 || bytes > strlen(stops[which]))) {
                    cut = end - bytes;
                    which = i;
                }
            }
        }
        const struct sl_detokenizer_options options = {.stop = list, .n_stop = 3};
        struct sl_detokenizer *d;
        assert_ok(sl_detokenizer_create(&d, t, &options, &err), err);
        int32_t *ids;
        size_t n;
        assert_ok(sl_tokenizer_encode(t, text, strlen(text), false, false, &ids, &n, &err), err);
        run(d, ids, n, &out);
        if (out.n != cut || memcmp(out.text, text, cut) != 0) {
            fail_msg("'%s' with stops '%s' '%s' '%s' gave '%.*s'", text, stops[0], stops[1],
                     stops[2], (int)out.n, out.text);
        }
        assert_int_equal(sl_detokenizer_stopped(d), which);
        n_stopped += which >= 0;
        sl_free(ids);
        sl_detokenizer_destroy(&d);
    }
    assert_in_range(n_stopped, 500, 1900);
    sl_tokenizer_destroy(&t);
}

/* What is ready goes out at once: only a possible stop string or half a character waits. */
static void test_holds_back_little(void **state)
{
    (void)state;
    struct sluice_error err = {0};
    struct sl_tokenizer *t;
    fixture_tokenizer_with("bpe.gguf", NULL, NULL, &t);
    const char *stop[] = {"zq!"};
    const struct sl_detokenizer_options options = {.stop = stop, .n_stop = 1};
    struct sl_detokenizer *d;
    assert_ok(sl_detokenizer_create(&d, t, &options, &err), err);
    const int32_t a = sl_tokenizer_find(t, "a");
    const int32_t z = sl_tokenizer_find(t, "z");
    const int32_t q = sl_tokenizer_find(t, "q");
    const int32_t high = sl_tokenizer_find(t, "\xC3\xB0"); /* spells the byte F0 */
    size_t n;
    assert_memory_equal(sl_detokenizer_push(d, a, &n), "a", 1);
    assert_int_equal(n, 1);
    sl_detokenizer_push(d, z, &n);
    assert_int_equal(n, 0);
    sl_detokenizer_push(d, q, &n);
    assert_int_equal(n, 0);
    assert_memory_equal(sl_detokenizer_push(d, z, &n), "zq", 2);
    assert_int_equal(n, 2);
    assert_memory_equal(sl_detokenizer_push(d, a, &n), "za", 2);
    assert_int_equal(n, 2);
    /* Half a character waits for its other half, and becomes U+FFFD when that does not come. */
    sl_detokenizer_push(d, high, &n);
    assert_int_equal(n, 0);
    assert_memory_equal(sl_detokenizer_push(d, a, &n),
                        "\xEF\xBF\xBD"
                        "a",
                        4);
    assert_int_equal(n, 4);
    sl_detokenizer_push(d, high, &n);
    assert_int_equal(n, 0);
    assert_memory_equal(sl_detokenizer_flush(d, &n), "\xEF\xBF\xBD", 3);
    assert_int_equal(n, 3);
    sl_detokenizer_destroy(&d);
    sl_tokenizer_destroy(&t);
}

static void test_special_tokens(void **state)
{
    (void)state;
    struct sluice_error err = {0};
    struct sl_tokenizer *t;
    fixture_tokenizer_with("bpe.gguf", NULL, NULL, &t);
    static struct collected out;
    const int32_t ids[] = {sl_tokenizer_find(t, "<|im_start|>"),
                           sl_tokenizer_find(t, "\xC4\xA0"),
                           sl_tokenizer_find(t, "a"),
                           sl_tokenizer_find(t, "<tool>"),
                           -5,
                           1 << 30,
                           sl_tokenizer_find(t, "<|im_end|>")};
    static const char *const EXPECTED[2][2] = {
        {" a<tool>", "a<tool>"},
        {"<|im_start|> a<tool><|im_end|>", "<|im_start|> a<tool><|im_end|>"}};
    for (int special = 0; special < 2; special++) {
        for (int strip = 0; strip < 2; strip++) {
            struct sl_detokenizer_options options = sl_detokenizer_options_default();
            options.special = special;
            options.strip_first_space = strip;
            struct sl_detokenizer *d;
            assert_ok(sl_detokenizer_create(&d, t, &options, &err), err);
            run(d, ids, 7, &out);
            assert_int_equal(out.n, strlen(EXPECTED[special][strip]));
            assert_memory_equal(out.text, EXPECTED[special][strip], out.n);
            sl_detokenizer_destroy(&d);
        }
    }
    sl_tokenizer_destroy(&t);
}

static void test_memory(void **state)
{
    (void)state;
    struct sluice_error err = {0};
    struct sl_tokenizer *t;
    fixture_tokenizer_with("bpe.gguf", NULL, NULL, &t);
    const char *stop[] = {"one", "two"};
    const char *bad[] = {"one", ""};
    struct sl_detokenizer_options options = {.stop = stop, .n_stop = 2};
    struct sl_detokenizer *d;
    const size_t blocks = sl_mem_n_blocks();
    for (int64_t n = 0;; n++) {
        sl_mem_fail_after(n, true);
        const enum sluice_status status = sl_detokenizer_create(&d, t, &options, &err);
        sl_mem_fail_after(-1, false);
        if (status == SLUICE_STATUS_OK) {
            break;
        }
        assert_status(status, OUT_OF_MEMORY);
        assert_null(d);
        assert_int_equal(sl_mem_n_blocks(), blocks);
    }
    /* The token path allocates nothing. */
    sl_mem_fail_after(0, true);
    size_t length;
    for (int32_t id = 0; id < sl_tokenizer_n_vocab(t); id++) {
        sl_detokenizer_push(d, id, &length);
    }
    sl_detokenizer_flush(d, &length);
    assert_false(sl_mem_fault_fired());
    sl_mem_fail_after(-1, false);
    sl_detokenizer_destroy(&d);
    options.stop = bad;
    assert_status(sl_detokenizer_create(&d, t, &options, &err), INVALID_ARGUMENT);
    assert_null(d);
    assert_int_equal(sl_mem_n_blocks(), blocks);
    sl_tokenizer_destroy(&t);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_corpus),
        cmocka_unit_test(test_stop_strings),
        cmocka_unit_test(test_holds_back_little),
        cmocka_unit_test(test_special_tokens),
        cmocka_unit_test(test_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
