/* SPDX-License-Identifier: Apache-2.0
 *
 * Tokenizers on hostile input: malformed vocabularies give errors that name the key; any bytes can
 * be encoded and come back; very long runs are fine; no allocation failure leaks or crashes.
 */
#include <math.h>

#include "text_fixtures.h"

#include "text/rng.h"
#include "text/utf8.h"

/* --- malformed vocabularies --- */

enum change {
    REMOVE,
    STRING,
    STRINGS,
    U32,
    I32,
    BOOL,
    F32,
    I32_ARRAY, /* as many items as `number` says, each with the value of the text */
    F32_ARRAY,
};

struct bad_vocab {
    const char *file;
    const char *key;
    enum change change;
    const char *text; /* strings are separated by '|' */
    uint32_t number;
    enum sluice_status status;
    const char *mentions; /* besides the key */
};

#define T "tokenizer.ggml."
static const struct bad_vocab BAD_VOCABS[] = {
    {"bpe.gguf", T "model", REMOVE, NULL, 0, SLUICE_STATUS_FORMAT, ""},
    {"bpe.gguf", T "model", U32, NULL, 3, SLUICE_STATUS_FORMAT, ""},
    {"bpe.gguf", T "model", STRING, "bert2", 0, SLUICE_STATUS_UNSUPPORTED, "gpt2, llama, t5"},
    {"bpe.gguf", T "pre", STRING, "unheard-of", 0, SLUICE_STATUS_UNSUPPORTED, "qwen2"},
    {"bpe.gguf", T "pre", STRING, "", 0, SLUICE_STATUS_UNSUPPORTED, "llama-bpe"},
    {"bpe.gguf", T "pre", U32, NULL, 1, SLUICE_STATUS_FORMAT, ""},
    {"bpe.gguf", T "tokens", REMOVE, NULL, 0, SLUICE_STATUS_FORMAT, ""},
    {"bpe.gguf", T "tokens", STRING, "a", 0, SLUICE_STATUS_FORMAT, ""},
    {"bpe.gguf", T "tokens", I32_ARRAY, "1", 8, SLUICE_STATUS_FORMAT, "string"},
    {"bpe.gguf", T "tokens", STRINGS, NULL, 0, SLUICE_STATUS_FORMAT, "0 tokens"},
    {"bpe.gguf", T "token_type", I32_ARRAY, "1", 12, SLUICE_STATUS_FORMAT, "12 items"},
    {"bpe.gguf", T "token_type", I32_ARRAY, "7", UINT32_MAX, SLUICE_STATUS_FORMAT, "type 7"},
    {"bpe.gguf", T "token_type", I32_ARRAY, "-1", UINT32_MAX, SLUICE_STATUS_FORMAT, "type -1"},
    {"bpe.gguf", T "token_type", F32_ARRAY, "1", UINT32_MAX, SLUICE_STATUS_FORMAT, "f32"},
    {"bpe.gguf", T "token_type", STRINGS, "a|b", 0, SLUICE_STATUS_FORMAT, "string"},
    {"bpe.gguf", T "token_type", U32, NULL, 1, SLUICE_STATUS_FORMAT, ""},
    {"bpe.gguf", T "scores", F32_ARRAY, "1", 3, SLUICE_STATUS_FORMAT, "3 items"},
    {"bpe.gguf", T "merges", REMOVE, NULL, 0, SLUICE_STATUS_FORMAT, ""},
    {"bpe.gguf", T "merges", I32_ARRAY, "1", 5, SLUICE_STATUS_FORMAT, "string"},
    {"bpe.gguf", T "merges", STRINGS, "ab", 0, SLUICE_STATUS_FORMAT, "not a pair"},
    {"bpe.gguf", T "merges", STRINGS, "", 0, SLUICE_STATUS_FORMAT, "not a pair"},
    {"bpe.gguf", T "merges", STRINGS, "a ", 0, SLUICE_STATUS_FORMAT, "not a pair"},
    {"bpe.gguf", T "merges", STRINGS, " a", 0, SLUICE_STATUS_FORMAT, "not a pair"},
    {"bpe.gguf", T "merges", STRINGS, "t h|qqqq h", 0, SLUICE_STATUS_FORMAT, "left part"},
    {"bpe.gguf", T "merges", STRINGS, "t h|h qqqq", 0, SLUICE_STATUS_FORMAT, "right part"},
    {"bpe.gguf", T "merges", STRINGS, "t h|Q Q", 0, SLUICE_STATUS_FORMAT, "result"},
    {"bpe.gguf", T "bos_token_id", U32, NULL, 5000000, SLUICE_STATUS_FORMAT, "5000000"},
    {"bpe.gguf", T "eos_token_id", I32, NULL, (uint32_t)-2, SLUICE_STATUS_FORMAT, ""},
    {"bpe.gguf", T "eot_token_id", STRING, "x", 0, SLUICE_STATUS_FORMAT, ""},
    {"bpe.gguf", T "add_bos_token", STRING, "yes", 0, SLUICE_STATUS_FORMAT, ""},
    {"bpe.gguf", T "add_eos_token", F32, NULL, 1, SLUICE_STATUS_FORMAT, ""},
    {"spm.gguf", T "scores", REMOVE, NULL, 0, SLUICE_STATUS_FORMAT, "llama"},
    {"spm.gguf", T "scores", F32_ARRAY, "nan", UINT32_MAX, SLUICE_STATUS_FORMAT, "nan"},
    {"spm.gguf", T "scores", F32_ARRAY, "inf", UINT32_MAX, SLUICE_STATUS_FORMAT, "inf"},
    {"spm.gguf", T "scores", STRINGS, "a", 0, SLUICE_STATUS_FORMAT, "string"},
    {"spm.gguf", T "add_space_prefix", U32, NULL, 7, SLUICE_STATUS_FORMAT, ""},
    {"unigram.gguf", T "scores", REMOVE, NULL, 0, SLUICE_STATUS_FORMAT, "t5"},
    {"unigram.gguf", T "precompiled_charsmap", STRINGS, "a", 0, SLUICE_STATUS_FORMAT, "string"},
    {"unigram.gguf", T "remove_extra_whitespaces", STRING, "a", 0, SLUICE_STATUS_FORMAT, ""},
};

static void set_array(struct sl_gguf_writer *w, const struct bad_vocab *bad, uint64_t n_tokens)
{
    const size_t n = bad->number == UINT32_MAX ? (size_t)n_tokens : bad->number;
    if (bad->change == I32_ARRAY) {
        int32_t *items = malloc(n * sizeof(*items));
        for (size_t i = 0; i < n; i++) {
            items[i] = atoi(bad->text);
        }
        sl_gguf_writer_set_array(w, bad->key, SL_GGUF_I32, items, n);
        free(items);
    } else {
        float *items = malloc(n * sizeof(*items));
        for (size_t i = 0; i < n; i++) {
            items[i] = strtof(bad->text, NULL);
        }
        sl_gguf_writer_set_array(w, bad->key, SL_GGUF_F32, items, n);
        free(items);
    }
}

static void set_strings(struct sl_gguf_writer *w, const struct bad_vocab *bad)
{
    char copy[128] = "";
    const char *items[8];
    size_t n = 0;
    if (bad->text != NULL) {
        snprintf(copy, sizeof(copy), "%s", bad->text);
        for (char *at = copy; at != NULL;) {
            items[n++] = at;
            at = strchr(at, '|');
            if (at != NULL) {
                *at++ = '\0';
            }
        }
    }
    sl_gguf_writer_set_strings(w, bad->key, items, n);
}

/* Copy the vocabulary with the change. */
static struct sl_gguf *make_bad(const struct bad_vocab *bad)
{
    struct sluice_error err = {0};
    char path[1024];
    fixture_path(path, sizeof(path), bad->file);
    struct sl_gguf *file;
    assert_ok(sl_gguf_open(&file, path, &err), err);
    snprintf(path, sizeof(path), "%s/text_bad_%ld.gguf", SLUICE_BINARY_DIR, (long)getpid());
    struct sl_gguf_writer *w;
    assert_ok(sl_gguf_writer_create(&w, path, &err), err);
    for (size_t i = 0; i < sl_gguf_n_values(file); i++) {
        if (strcmp(sl_gguf_key(file, i), bad->key) != 0) {
            sl_gguf_writer_set_value(w, sl_gguf_key(file, i), file, sl_gguf_value(file, i));
        }
    }
    const int32_t i32 = (int32_t)bad->number;
    switch (bad->change) {
    case REMOVE:
        break;
    case STRING:
        sl_gguf_writer_set_string(w, bad->key, bad->text);
        break;
    case STRINGS:
        set_strings(w, bad);
        break;
    case U32:
        sl_gguf_writer_set_u32(w, bad->key, bad->number);
        break;
    case I32:
        sl_gguf_writer_set_array(w, bad->key, SL_GGUF_I32, &i32, 1);
        break;
    case BOOL:
        sl_gguf_writer_set_bool(w, bad->key, bad->number != 0);
        break;
    case F32:
        sl_gguf_writer_set_f32(w, bad->key, (float)bad->number);
        break;
    case I32_ARRAY:
    case F32_ARRAY:
        set_array(w, bad, sl_gguf_find(file, "tokenizer.ggml.tokens")->count);
        break;
    }
    assert_ok(sl_gguf_writer_begin_data(w, &err), err);
    assert_ok(sl_gguf_writer_finish(w, &err), err);
    sl_gguf_writer_destroy(&w);
    sl_gguf_close(&file);
    assert_ok(sl_gguf_open(&file, path, &err), err);
    unlink(path);
    return file;
}

static void test_bad_vocabularies(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(BAD_VOCABS) / sizeof(BAD_VOCABS[0]); i++) {
        const struct bad_vocab *bad = &BAD_VOCABS[i];
        struct sl_gguf *file = make_bad(bad);
        const size_t blocks = sl_mem_n_blocks();
        struct sluice_error err = {0};
        struct sl_tokenizer *t;
        const enum sluice_status status = sl_tokenizer_create(&t, file, &err);
        if (status != bad->status || strstr(err.message, bad->key) == NULL ||
            strstr(err.message, bad->mentions) == NULL) {
            fail_msg("case %zu (%s): %s: %s", i, bad->key, sluice_status_name(status), err.message);
        }
        assert_null(t);
        assert_int_equal(sl_mem_n_blocks(), blocks);
        sl_gguf_close(&file);
    }
}

/* A charsmap of random bytes behind a well-formed head must not lead anywhere. */
static void test_bad_charsmap(void **state)
{
    (void)state;
    struct sluice_error err = {0};
    struct sl_rng rng;
    sl_rng_seed(&rng, 3);
    char path[1024];
    fixture_path(path, sizeof(path), "unigram.gguf");
    struct sl_gguf *file;
    assert_ok(sl_gguf_open(&file, path, &err), err);
    snprintf(path, sizeof(path), "%s/text_charsmap_%ld.gguf", SLUICE_BINARY_DIR, (long)getpid());
    const char *key = "tokenizer.ggml.precompiled_charsmap";
    int n_created = 0;
    for (int round = 0; round < 60; round++) {
        uint8_t blob[512];
        const size_t n = 1 + sl_rng_next(&rng) % sizeof(blob);
        for (size_t i = 0; i < n; i++) {
            blob[i] = (uint8_t)sl_rng_next(&rng);
        }
        uint32_t trie = (uint32_t)(sl_rng_next(&rng) % (n + 8)) & ~3u;
        if (n >= 4) {
            memcpy(blob, &trie, 4);
        }
        if (round % 3 != 0) {
            blob[n - 1] = 0;
        }
        struct sl_gguf_writer *w;
        assert_ok(sl_gguf_writer_create(&w, path, &err), err);
        for (size_t i = 0; i < sl_gguf_n_values(file); i++) {
            if (strcmp(sl_gguf_key(file, i), key) != 0) {
                sl_gguf_writer_set_value(w, sl_gguf_key(file, i), file, sl_gguf_value(file, i));
            }
        }
        sl_gguf_writer_set_array(w, key, SL_GGUF_U8, blob, n);
        assert_ok(sl_gguf_writer_begin_data(w, &err), err);
        assert_ok(sl_gguf_writer_finish(w, &err), err);
        sl_gguf_writer_destroy(&w);
        struct sl_gguf *copy;
        assert_ok(sl_gguf_open(&copy, path, &err), err);
        unlink(path);
        struct sl_tokenizer *t;
        if (sl_tokenizer_create(&t, copy, &err) == SLUICE_STATUS_OK) {
            char text[300];
            for (size_t i = 0; i < sizeof(text); i++) {
                text[i] = (char)sl_rng_next(&rng);
            }
            int32_t *ids;
            size_t n_ids;
            assert_ok(sl_tokenizer_encode(t, text, sizeof(text), true, true, &ids, &n_ids, &err),
                      err);
            sl_free(ids);
            n_created++;
        } else {
            assert_mentions(err, key);
        }
        sl_tokenizer_destroy(&t);
        sl_gguf_close(&copy);
    }
    assert_in_range(n_created, 10, 50);
    sl_gguf_close(&file);
}

/* --- any bytes --- */

static const char *const FAMILIES[] = {"llama-bpe",   "qwen2",  "smollm",       "gpt-2",
                                       "gpt-4o",      "tekken", "deepseek-llm", "deepseek-coder",
                                       "deepseek-v3", "qwen35", "seed-coder",   "default"};
#define N_FAMILIES (sizeof(FAMILIES) / sizeof(FAMILIES[0]))

/* decode(encode(text)) against `expected`. */
static void check_round_trip(const struct sl_tokenizer *t, const char *text, size_t length,
                             const char *expected, size_t n_expected)
{
    struct sluice_error err = {0};
    int32_t *ids;
    size_t n;
    assert_ok(sl_tokenizer_encode(t, text, length, false, false, &ids, &n, &err), err);
    char *back;
    size_t n_back;
    assert_ok(sl_tokenizer_decode(t, ids, n, true, &back, &n_back, &err), err);
    if (n_back != n_expected || memcmp(back, expected, n_expected) != 0) {
        fail_msg("%s %s: %zu bytes came back as %zu", sl_tokenizer_model(t), sl_tokenizer_pre(t),
                 n_expected, n_back);
    }
    sl_free(back);
    sl_free(ids);
}

/* Random text: characters of all planes and byte lengths, or plain bytes. */
static size_t random_text(struct sl_rng *rng, bool bytes, char *out, size_t room)
{
    size_t n = 0;
    const size_t wanted = sl_rng_next(rng) % (room - 4);
    while (n < wanted) {
        const uint64_t r = sl_rng_next(rng);
        if (bytes) {
            out[n++] = (char)(r >> 32);
            continue;
        }
        uint32_t cp = (uint32_t)(r >> 32) % (r % 5 == 0 ? 0x110000 : r % 5 == 1 ? 0x3000 : 0x80);
        if ((cp >= 0xD800 && cp <= 0xDFFF) || cp == 0x2581) {
            cp = ' ';
        }
        n += sl_utf8_write(out + n, cp);
    }
    return n;
}

static void test_round_trip(void **state)
{
    (void)state;
    static char text[600], expected[1900];
    struct sl_rng rng;
    sl_rng_seed(&rng, 99);
    for (size_t f = 0; f < N_FAMILIES; f++) {
        struct sl_tokenizer *t;
        fixture_tokenizer_with("bpe.gguf", "tokenizer.ggml.pre", FAMILIES[f], &t);
        for (int round = 0; round < 120; round++) {
            const size_t n = random_text(&rng, round % 3 == 0, text, sizeof(text));
            const size_t n_expected = sl_utf8_repair(expected, text, n);
            check_round_trip(t, text, n, expected, n_expected);
        }
        sl_tokenizer_destroy(&t);
    }
    /* SentencePiece keeps every byte, after a blank of its own. */
    struct sl_tokenizer *t;
    fixture_tokenizer_with("spm.gguf", NULL, NULL, &t);
    for (int round = 0; round < 300; round++) {
        const size_t n = random_text(&rng, round % 3 == 0, text, sizeof(text));
        expected[0] = ' ';
        memcpy(expected + 1, text, n);
        if (memmem(text, n, "\xE2\x96\x81", 3) == NULL) {
            check_round_trip(t, text, n, expected, n > 0 ? n + 1 : 0);
        }
    }
    sl_tokenizer_destroy(&t);
}

/* Long runs of everything: no limit of the pattern engine, no quadratic time (which would take
 * minutes here). */
static void test_long_runs(void **state)
{
    (void)state;
    enum { LENGTH = 300000 };
    static const char *const UNITS[] = {"a",   " ",   "\n",           "1",        "!", "aB",
                                        " \n", "\t ", "\xE6\x97\xA5", "\xCC\x81", "'", "\xFF",
                                        "a ",  "A1 ", "\xE3\x80\x80", "\x01"};
    char *text = malloc(LENGTH + 8);
    for (size_t f = 0; f < N_FAMILIES + 2; f++) {
        struct sl_tokenizer *t;
        if (f < N_FAMILIES) {
            fixture_tokenizer_with("bpe.gguf", "tokenizer.ggml.pre", FAMILIES[f], &t);
        } else {
            fixture_tokenizer_with(f == N_FAMILIES ? "spm.gguf" : "unigram.gguf", NULL, NULL, &t);
        }
        for (size_t u = 0; u < sizeof(UNITS) / sizeof(UNITS[0]); u++) {
            struct sluice_error err = {0};
            const size_t unit = strlen(UNITS[u]);
            size_t n = 0;
            while (n + unit <= LENGTH / N_FAMILIES) {
                memcpy(text + n, UNITS[u], unit);
                n += unit;
            }
            text[n++] = 'x'; /* so that a run does not end with the text */
            int32_t *ids;
            size_t n_ids;
            assert_ok(sl_tokenizer_encode(t, text, n, true, true, &ids, &n_ids, &err), err);
            assert_true(n_ids > 0);
            sl_free(ids);
        }
        sl_tokenizer_destroy(&t);
    }
    /* And one family on the full length. */
    struct sl_tokenizer *t;
    fixture_tokenizer_with("bpe.gguf", "tokenizer.ggml.pre", "deepseek-llm", &t);
    for (size_t u = 0; u < 4; u++) {
        memset(text, UNITS[u][0], LENGTH);
        text[LENGTH] = '\xE6';
        text[LENGTH + 1] = '\x97';
        text[LENGTH + 2] = '\xA5';
        check_round_trip(t, text, LENGTH + 3, text, LENGTH + 3);
    }
    sl_tokenizer_destroy(&t);
    free(text);
}

/* --- special tokens --- */

static void check_ids(const struct sl_tokenizer *t, const char *text, bool add, bool parse,
                      const int32_t *expected, size_t n_expected)
{
    struct sluice_error err = {0};
    int32_t *ids;
    size_t n;
    assert_ok(sl_tokenizer_encode(t, text, strlen(text), add, parse, &ids, &n, &err), err);
    if (n != n_expected || (n > 0 && memcmp(ids, expected, n * sizeof(*ids)) != 0)) {
        fail_msg("'%s' (add %d, parse %d): %zu tokens, first %d", text, add, parse, n,
                 n > 0 ? (int)ids[0] : -1);
    }
    sl_free(ids);
}

static void test_special_tokens(void **state)
{
    (void)state;
    struct sl_tokenizer *t;
    fixture_tokenizer_with("bpe.gguf", NULL, NULL, &t);
    const int32_t start = sl_tokenizer_find(t, "<|im_start|>");
    const int32_t end = sl_tokenizer_find(t, "<|im_end|>");
    const int32_t tool = sl_tokenizer_find(t, "<tool>");
    const int32_t tools = sl_tokenizer_find(t, "<tool><tools>");
    const int32_t a = sl_tokenizer_find(t, "a");
    assert_true(start > 0 && end > 0 && tool > 0 && tools > 0 && a > 0);
    assert_true(sl_tokenizer_is_special(t, start));
    assert_false(sl_tokenizer_is_special(t, tool));
    assert_false(sl_tokenizer_is_special(t, -1));
    assert_true(sl_tokenizer_is_eog(t, end));
    assert_true(sl_tokenizer_is_eog(t, sl_tokenizer_find(t, "<|endoftext|>")));
    assert_false(sl_tokenizer_is_eog(t, a));
    assert_false(sl_tokenizer_is_eog(t, 1 << 30));
    assert_int_equal(sl_tokenizer_eot(t), end);
    check_ids(t, "a<|im_end|>a", false, true, (const int32_t[]){a, end, a}, 3);
    check_ids(t, "<|im_start|><|im_end|>", false, true, (const int32_t[]){start, end}, 2);
    /* User-defined tokens are found always, control tokens only when asked. */
    check_ids(t, "<tool>", false, false, &tool, 1);
    check_ids(t, "<tool><tools>", false, false, &tools, 1);
    check_ids(t, "<tool><tool>", false, false, (const int32_t[]){tool, tool}, 2);
    check_ids(t, "", true, true, NULL, 0);
    struct sluice_error err = {0};
    int32_t *ids;
    size_t n;
    assert_ok(sl_tokenizer_encode(t, "<|im_end|>", 10, false, false, &ids, &n, &err), err);
    for (size_t i = 0; i < n; i++) {
        assert_false(sl_tokenizer_is_special(t, ids[i]));
    }
    sl_free(ids);
    char *text;
    size_t length;
    const int32_t outside[] = {a, sl_tokenizer_n_vocab(t)};
    assert_status(sl_tokenizer_decode(t, outside, 2, true, &text, &length, &err), INVALID_ARGUMENT);
    assert_null(text);
    const int32_t mixed[] = {start, a, end};
    assert_ok(sl_tokenizer_decode(t, mixed, 3, false, &text, &length, &err), err);
    assert_string_equal(text, "a");
    sl_free(text);
    sl_tokenizer_destroy(&t);

    /* Beginning and end of text: kinds that add them, and text with none. */
    fixture_tokenizer_with("spm.gguf", NULL, NULL, &t);
    assert_true(sl_tokenizer_adds_bos(t));
    check_ids(t, "", true, true, (const int32_t[]){1}, 1);
    check_ids(t, "</s><s>", true, true, (const int32_t[]){1, 2, 1}, 3);
    sl_tokenizer_destroy(&t);
    fixture_tokenizer_with("unigram.gguf", NULL, NULL, &t);
    assert_true(sl_tokenizer_adds_eos(t));
    check_ids(t, "", true, true, (const int32_t[]){1}, 1);
    sl_tokenizer_destroy(&t);
}

/* --- memory --- */

static void test_memory(void **state)
{
    (void)state;
    static const char *const FILES[] = {"bpe.gguf", "spm.gguf", "unigram.gguf"};
    static const char TEXT[] =
        "Some text \xF0\x9F\x98\x80, \xFF not <|im_end|> quite valid.\n\n 12345";
    struct sluice_error err = {0};
    for (size_t f = 0; f < 3; f++) {
        char path[1024];
        fixture_path(path, sizeof(path), FILES[f]);
        struct sl_gguf *file;
        assert_ok(sl_gguf_open(&file, path, &err), err);
        const size_t blocks = sl_mem_n_blocks();
        struct sl_tokenizer *t = NULL;
        for (int64_t n = 0; t == NULL; n++) {
            sl_mem_fail_after(n, false);
            const enum sluice_status status = sl_tokenizer_create(&t, file, &err);
            const bool fired = sl_mem_fault_fired();
            sl_mem_fail_after(-1, false);
            if (status != SLUICE_STATUS_OK) {
                assert_status(status, OUT_OF_MEMORY);
                assert_null(t);
                assert_int_equal(sl_mem_n_blocks(), blocks);
            } else if (fired) {
                /* Just-in-time compilation may do without. */
                sl_tokenizer_destroy(&t);
                assert_int_equal(sl_mem_n_blocks(), blocks);
            }
        }
        const size_t created = sl_mem_n_blocks();
        int32_t *ids = NULL;
        for (int64_t n = 0; ids == NULL; n++) {
            size_t n_ids;
            sl_mem_fail_after(n, false);
            const enum sluice_status status =
                sl_tokenizer_encode(t, TEXT, sizeof(TEXT) - 1, true, true, &ids, &n_ids, &err);
            sl_mem_fail_after(-1, false);
            if (status != SLUICE_STATUS_OK) {
                assert_status(status, OUT_OF_MEMORY);
                assert_null(ids);
                assert_int_equal(sl_mem_n_blocks(), created);
            }
        }
        sl_free(ids);
        sl_tokenizer_destroy(&t);
        assert_int_equal(sl_mem_n_blocks(), blocks);
        sl_gguf_close(&file);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bad_vocabularies), cmocka_unit_test(test_bad_charsmap),
        cmocka_unit_test(test_round_trip),       cmocka_unit_test(test_long_runs),
        cmocka_unit_test(test_special_tokens),   cmocka_unit_test(test_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
