/* SPDX-License-Identifier: Apache-2.0
 *
 * Chat formats: detection, and text equal to what the families' own templates give by Jinja
 * (tools/fixtures/text_chats.py); incremental rendering; errors.
 */
#include "text_fixtures.h"

#include "text/chat.h"

/* A file whose template is `template` (NULL: none), with special tokens of these texts. */
static struct sl_gguf *make_file(const char *template, const char *bos, const char *eos)
{
    struct sluice_error err = {0};
    char path[1024];
    snprintf(path, sizeof(path), "%s/text_chat_%ld.gguf", SLUICE_BINARY_DIR, (long)getpid());
    struct sl_gguf_writer *w;
    assert_ok(sl_gguf_writer_create(&w, path, &err), err);
    const char *tokens[] = {"a", bos, eos};
    sl_gguf_writer_set_string(w, "general.architecture", "llama");
    sl_gguf_writer_set_strings(w, "tokenizer.ggml.tokens", tokens, 3);
    sl_gguf_writer_set_u32(w, "tokenizer.ggml.bos_token_id", 1);
    sl_gguf_writer_set_u32(w, "tokenizer.ggml.eos_token_id", 2);
    if (template != NULL) {
        sl_gguf_writer_set_string(w, "tokenizer.chat_template", template);
    }
    assert_ok(sl_gguf_writer_begin_data(w, &err), err);
    assert_ok(sl_gguf_writer_finish(w, &err), err);
    sl_gguf_writer_destroy(&w);
    struct sl_gguf *file;
    assert_ok(sl_gguf_open(&file, path, &err), err);
    unlink(path);
    return file;
}

static char *fixture_text(struct fixture *f)
{
    size_t length;
    const char *bytes = fixture_bytes(f, &length);
    char *text = malloc(length + 1);
    memcpy(text, bytes, length);
    text[length] = '\0';
    return text;
}

/* Rendering turn by turn gives the same text as rendering at once, when what the model writes (the
 * answer and its end) is put in between. */
static void check_incremental(const struct sl_chat *chat, const struct sl_chat_message *messages,
                              size_t n, const char *whole)
{
    struct sluice_error err = {0};
    size_t at = 0;
    size_t n_done = 0;
    for (size_t i = 0; i < n; i++) {
        const bool last = i + 1 == n;
        if (!last && strcmp(messages[i + 1].role, "assistant") != 0) {
            continue;
        }
        char *text;
        size_t length;
        assert_ok(
            sl_chat_render_next(chat, messages, i + 1, n_done, true, true, &text, &length, &err),
            err);
        if (strncmp(whole + at, text, length) != 0) {
            fail_msg("%s: turn %zu adds '%s', the whole goes on with '%s'", sl_chat_name(chat), i,
                     text, whole + at);
        }
        at += length;
        sl_free(text);
        if (last) {
            break;
        }
        /* The model's turn: find its end in the whole text. */
        const char *end = strstr(whole + at, sl_chat_end_of_turn(chat));
        assert_non_null(end);
        at = (size_t)(end - whole) + strlen(sl_chat_end_of_turn(chat));
        n_done = i + 2;
        i++;
    }
    assert_int_equal(at, strlen(whole));
}

static void check_conversation(const struct sl_chat *chat, const char *name, struct fixture *f,
                               bool incremental)
{
    struct sluice_error err = {0};
    struct sl_chat_message messages[8];
    char *owned[16];
    const bool generate = fixture_number(f) != 0;
    const uint32_t n = fixture_number(f);
    assert_true(n <= 8);
    for (uint32_t i = 0; i < n; i++) {
        messages[i].role = owned[2 * i] = fixture_text(f);
        messages[i].content = owned[2 * i + 1] = fixture_text(f);
    }
    char *expected = fixture_text(f);
    char *text;
    size_t length;
    assert_ok(sl_chat_render(chat, messages, n, generate, &text, &length, &err), err);
    if (strcmp(text, expected) != 0 || length != strlen(text)) {
        fail_msg("%s as %s: rendered\n%s\nexpected\n%s", name, sl_chat_name(chat), text, expected);
    }
    if (generate && incremental) {
        check_incremental(chat, messages, n, expected);
    }
    sl_free(text);
    free(expected);
    for (uint32_t i = 0; i < 2 * n; i++) {
        free(owned[i]);
    }
}

static void test_templates(void **state)
{
    (void)state;
    struct sluice_error err = {0};
    struct fixture f = fixture_open("chats.bin");
    int n_templates = 0;
    while (f.at < f.size) {
        char *name = fixture_text(&f);
        char *literals = fixture_text(&f);
        char *bos = fixture_text(&f);
        char *eos = fixture_text(&f);
        struct sl_gguf *file = make_file(literals, bos, eos);
        struct sl_chat *chat;
        assert_ok(sl_chat_create(&chat, file, NULL, &err), err);
        assert_non_null(chat);
        sl_gguf_close(&file);
        /* Old reasoning stays in a context that goes on, so the two ways differ there. */
        const bool incremental = strstr(literals, "</think>") == NULL;
        const uint32_t n = fixture_number(&f);
        assert_true(n > 0);
        for (uint32_t i = 0; i < n; i++) {
            check_conversation(chat, name, &f, incremental);
        }
        sl_chat_destroy(&chat);
        free(name);
        free(literals);
        free(bos);
        free(eos);
        n_templates++;
    }
    assert_true(n_templates > 15);
    fixture_close(&f);
}

/* Every format has its own row of tell-tale strings, and can be chosen by name without a template.
 */
static void test_names(void **state)
{
    (void)state;
    struct sluice_error err = {0};
    struct sl_gguf *file = make_file(NULL, "<s>", "</s>");
    size_t n = 0;
    for (; sl_chat_format_name(n) != NULL; n++) {
        struct sl_chat *chat;
        assert_ok(sl_chat_create(&chat, file, sl_chat_format_name(n), &err), err);
        assert_string_equal(sl_chat_name(chat), sl_chat_format_name(n));
        const struct sl_chat_message messages[] = {{"system", "SYS"}, {"user", "USER"}};
        char *text;
        size_t length;
        assert_ok(sl_chat_render(chat, messages, 2, true, &text, &length, &err), err);
        assert_non_null(strstr(text, "SYS"));
        assert_non_null(strstr(text, "USER"));
        assert_true(strlen(sl_chat_end_of_turn(chat)) > 0);
        sl_free(text);
        sl_chat_destroy(&chat);
    }
    assert_true(n > 10);
    sl_gguf_close(&file);
}

/* A chosen format does not take details from a template of another one. */
static void test_override(void **state)
{
    (void)state;
    struct sluice_error err = {0};
    struct sl_gguf *file =
        make_file("'<|im_start|>system\\nBe a default.<|im_end|>\\n'", "<s>", "</s>");
    struct sl_chat *chat;
    char *text;
    size_t length;
    const struct sl_chat_message hi = {"user", "Hi"};
    assert_ok(sl_chat_create(&chat, file, "gemma", &err), err);
    assert_ok(sl_chat_render(chat, &hi, 1, true, &text, &length, &err), err);
    assert_string_equal(text, "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n");
    sl_free(text);
    sl_chat_destroy(&chat);
    assert_ok(sl_chat_create(&chat, file, NULL, &err), err);
    assert_ok(sl_chat_render(chat, &hi, 1, true, &text, &length, &err), err);
    assert_string_equal(text, "<|im_start|>system\nBe a default.<|im_end|>\n<|im_start|>user\n"
                              "Hi<|im_end|>\n<|im_start|>assistant\n");
    sl_free(text);
    sl_chat_destroy(&chat);
    sl_gguf_close(&file);
}

/* After an interruption the end of the turn is put in as text. */
static void test_interrupted(void **state)
{
    (void)state;
    struct sluice_error err = {0};
    struct sl_gguf *file = make_file(NULL, "<s>", "</s>");
    struct sl_chat *chat;
    char *text;
    size_t length;
    const struct sl_chat_message messages[] = {
        {"user", "Hi"}, {"assistant", "Hel"}, {"user", "Go on"}};
    assert_ok(sl_chat_create(&chat, file, "chatml", &err), err);
    assert_ok(sl_chat_render_next(chat, messages, 3, 2, false, true, &text, &length, &err), err);
    assert_string_equal(text, "<|im_end|>\n<|im_start|>user\nGo on<|im_end|>\n"
                              "<|im_start|>assistant\n");
    sl_free(text);
    assert_status(sl_chat_render_next(chat, messages, 3, 4, false, true, &text, &length, &err),
                  INVALID_ARGUMENT);
    sl_chat_destroy(&chat);
    sl_gguf_close(&file);
}

static void test_errors(void **state)
{
    (void)state;
    struct sluice_error err = {0};
    struct sl_chat *chat;
    struct sl_gguf *file = make_file("{{ something else }}", "<s>", "</s>");
    assert_status(sl_chat_create(&chat, file, NULL, &err), UNSUPPORTED);
    assert_null(chat);
    assert_mentions(err, "chatml");
    assert_status(sl_chat_create(&chat, file, "nonsense", &err), UNSUPPORTED);
    assert_mentions(err, "nonsense");
    assert_mentions(err, "llama3");
    assert_ok(sl_chat_create(&chat, file, "gemma", &err), err);
    const struct sl_chat_message tool = {"tool", "x"};
    char *text;
    size_t length;
    assert_status(sl_chat_render(chat, &tool, 1, true, &text, &length, &err), INVALID_ARGUMENT);
    assert_null(text);
    assert_mentions(err, "tool");
    sl_chat_destroy(&chat);
    sl_gguf_close(&file);

    /* No template: nothing to chat with, and no error. */
    file = make_file(NULL, "<s>", "</s>");
    assert_ok(sl_chat_create(&chat, file, NULL, &err), err);
    assert_null(chat);
    sl_gguf_close(&file);
}

static void test_memory(void **state)
{
    (void)state;
    struct sluice_error err = {0};
    struct sl_gguf *file =
        make_file("'<|im_start|>system\\nBe a default.<|im_end|>\\n'", "<s>", "</s>");
    const size_t blocks = sl_mem_n_blocks();
    const struct sl_chat_message messages[] = {
        {"user", "Hi"}, {"assistant", "A long answer, longer than the rest"}, {"user", "Go on"}};
    for (int64_t n = 0;; n++) {
        struct sl_chat *chat;
        char *text = NULL;
        size_t length;
        sl_mem_fail_after(n, true);
        enum sluice_status status = sl_chat_create(&chat, file, NULL, &err);
        if (status == SLUICE_STATUS_OK) {
            status = sl_chat_render(chat, messages, 3, true, &text, &length, &err);
        }
        sl_mem_fail_after(-1, false);
        sl_free(text);
        sl_chat_destroy(&chat);
        assert_int_equal(sl_mem_n_blocks(), blocks);
        if (status == SLUICE_STATUS_OK) {
            break;
        }
        assert_status(status, OUT_OF_MEMORY);
    }
    sl_gguf_close(&file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_templates), cmocka_unit_test(test_names),
        cmocka_unit_test(test_override),  cmocka_unit_test(test_interrupted),
        cmocka_unit_test(test_errors),    cmocka_unit_test(test_memory),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
