/* SPDX-License-Identifier: Apache-2.0
 *
 * Rendering chats; see chat.h. A conversation is rendered message by message into one growing
 * buffer; what a context holds already is left out by starting later.
 */
#include "text/chat.h"

#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/mem.h"
#include "text/chat_formats.h"

struct sl_chat {
    const struct sl_chat_format *format;
    char *bos; /* texts of the special tokens */
    char *eos;
    char *end_of_turn;
    char *default_system;    /* when a conversation has no system message; NULL: none */
    const char *preamble;    /* in front of every system message, and alone where there is none */
    const char *generation2; /* after the generation prompt */
    bool drops_reasoning;    /* answers before the last question lose all up to "</think>" */
    bool drops_newlines;     /* and the newlines after it */
};

/* Text being built. The first failure stays and makes the rest do nothing. */
struct builder {
    const struct sl_chat *chat;
    char *text;
    size_t n;
    size_t max;
    bool follows; /* the context holds text before this */
    bool failed;
};

static void add_bytes(struct builder *b, const char *bytes, size_t n)
{
    if (b->failed) {
        return;
    }
    if (b->n + n + 1 > b->max) {
        const size_t max = (b->n + n + 1) * 2;
        char *text = sl_realloc(SL_MEM_TEXT, b->text, max, 1);
        if (text == NULL) {
            b->failed = true;
            return;
        }
        b->text = text;
        b->max = max;
    }
    memcpy(b->text + b->n, bytes, n);
    b->n += n;
    b->text[b->n] = '\0';
}

static void add_text(struct builder *b, const char *text)
{
    add_bytes(b, text, strlen(text));
}

/* Add a string of the format table, with its stand-ins replaced. */
static void add_pattern(struct builder *b, const char *pattern)
{
    for (; *pattern != '\0'; pattern++) {
        if (*pattern == SL_CHAT_EOS[0]) {
            add_text(b, b->chat->eos);
        } else if (*pattern == SL_CHAT_BOS[0]) {
            /* The first one of all comes from the tokenizer. */
            if (b->n > 0 || b->follows) {
                add_text(b, b->chat->bos);
            }
        } else {
            add_bytes(b, pattern, 1);
        }
    }
}

/* Bytes of white space at the start of `text`: one character, or 0. */
static size_t space_length(const char *text, size_t length)
{
    const unsigned char *c = (const unsigned char *)text;
    if (c[0] <= 0x20) {
        return c[0] == ' ' || (c[0] >= 0x09 && c[0] <= 0x0D) || c[0] >= 0x1C ? 1 : 0;
    }
    if (length >= 2 && c[0] == 0xC2) {
        return c[1] == 0x85 || c[1] == 0xA0 ? 2 : 0;
    }
    if (length < 3) {
        return 0;
    }
    const unsigned cp = (c[0] & 0x0Fu) << 12 | (c[1] & 0x3Fu) << 6 | (c[2] & 0x3Fu);
    const bool lead = (c[0] & 0xF0) == 0xE0;
    const bool space = cp == 0x1680 || (cp >= 0x2000 && cp <= 0x200A) || cp == 0x2028 ||
                       cp == 0x2029 || cp == 0x202F || cp == 0x205F || cp == 0x3000;
    return lead && space ? 3 : 0;
}

/* Leave out white space at both ends. */
static void trim(const char **text, size_t *length)
{
    size_t n;
    while (*length > 0 && (n = space_length(*text, *length)) > 0) {
        *text += n;
        *length -= n;
    }
    for (;;) {
        size_t back = 0;
        for (size_t k = 1; k <= 3 && k <= *length; k++) {
            if (space_length(*text + *length - k, k) == k) {
                back = k;
                break;
            }
        }
        if (back == 0) {
            break;
        }
        *length -= back;
    }
}

static void add_content(struct builder *b, const char *content, bool trims)
{
    size_t length = strlen(content);
    if (trims) {
        trim(&content, &length);
    }
    add_bytes(b, content, length);
}

static void add_system(struct builder *b, const char *content)
{
    add_pattern(b, b->chat->format->before_system);
    if (b->chat->preamble != NULL) {
        add_text(b, b->chat->preamble);
    }
    /* In front of a user message the system message keeps its white space. */
    if (b->chat->format->system == SL_CHAT_SYSTEM_IN_USER) {
        add_text(b, content);
    } else {
        add_content(b, content, b->chat->format->trims);
    }
    add_pattern(b, b->chat->format->after_system);
}

static void add_assistant(struct builder *b, const char *content, bool old)
{
    const struct sl_chat_format *f = b->chat->format;
    if (old && b->chat->drops_reasoning) {
        const char *end = NULL;
        for (const char *at = content; (at = strstr(at, "</think>")) != NULL; at++) {
            end = at;
        }
        if (end != NULL) {
            content = end + strlen("</think>");
            content += b->chat->drops_newlines ? strspn(content, "\n") : 0;
        }
    }
    add_pattern(b, f->before_assistant);
    add_content(b, content, f->trims || f->trims_answers);
    add_pattern(b, f->end_of_turn);
    add_pattern(b, f->after_assistant);
}

static enum sluice_status add_message(struct builder *b, const struct sl_chat_message *messages,
                                      size_t index, size_t last_user, struct sluice_error *err)
{
    const struct sl_chat_format *f = b->chat->format;
    const struct sl_chat_message *m = &messages[index];
    if (strcmp(m->role, "system") == 0) {
        if (f->system == SL_CHAT_SYSTEM_TURN) {
            add_system(b, m->content);
        }
    } else if (strcmp(m->role, "user") == 0) {
        add_pattern(b, f->before_user);
        const bool has_system = index > 0 && strcmp(messages[index - 1].role, "system") == 0;
        if (has_system && f->system == SL_CHAT_SYSTEM_IN_USER) {
            add_system(b, messages[index - 1].content);
        }
        add_content(b, m->content, f->trims);
        add_pattern(b, f->after_user);
    } else if (strcmp(m->role, "assistant") == 0) {
        add_assistant(b, m->content, index < last_user);
    } else {
        SL_CHECK(f->before_other != NULL, INVALID_ARGUMENT, err,
                 "message %zu has role '%.40s'; the %s chat format knows system, user, assistant",
                 index, m->role, f->name);
        add_pattern(b, f->before_other);
        add_text(b, m->role);
        add_pattern(b, f->after_other);
        add_content(b, m->content, f->trims);
        add_pattern(b, f->after_other_content);
    }
    return SLUICE_STATUS_OK;
}

/* What comes before the first message of a conversation without a system message. */
static void add_opening(struct builder *b, const struct sl_chat_message *messages, size_t n)
{
    if (n > 0 && strcmp(messages[0].role, "system") == 0) {
        return;
    }
    if (b->chat->default_system != NULL) {
        add_system(b, b->chat->default_system);
    } else if (b->chat->preamble != NULL) {
        add_system(b, "");
    }
}

enum sluice_status sl_chat_render_next(const struct sl_chat *chat,
                                       const struct sl_chat_message *messages, size_t n,
                                       size_t n_done, bool ended, bool generate, char **out,
                                       size_t *out_length, struct sluice_error *err)
{
    *out = NULL;
    *out_length = 0;
    SL_CHECK(n_done <= n, INVALID_ARGUMENT, err, "%zu of %zu messages are done", n_done, n);
    struct builder b = {.chat = chat, .follows = n_done > 0};
    add_bytes(&b, "", 0);
    if (n_done == 0) {
        add_opening(&b, messages, n);
    } else if (strcmp(messages[n_done - 1].role, "assistant") == 0) {
        if (!ended) {
            add_pattern(&b, chat->format->end_of_turn);
        }
        add_pattern(&b, chat->format->after_assistant);
    }
    size_t last_user = 0;
    for (size_t i = 0; i < n; i++) {
        if (strcmp(messages[i].role, "user") == 0) {
            last_user = i;
        }
    }
    for (size_t i = n_done; i < n; i++) {
        const enum sluice_status status = add_message(&b, messages, i, last_user, err);
        if (status != SLUICE_STATUS_OK) {
            sl_free(b.text);
            return status;
        }
    }
    if (generate) {
        add_pattern(&b, chat->format->generation);
        if (chat->generation2 != NULL) {
            add_text(&b, chat->generation2);
        }
    }
    if (b.failed) {
        sl_free(b.text);
        return sl_error_set(err, SLUICE_STATUS_OUT_OF_MEMORY,
                            "no memory for a chat of %zu messages", n);
    }
    *out = b.text;
    *out_length = b.n;
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_chat_render(const struct sl_chat *chat,
                                  const struct sl_chat_message *messages, size_t n, bool generate,
                                  char **out, size_t *out_length, struct sluice_error *err)
{
    return sl_chat_render_next(chat, messages, n, 0, true, generate, out, out_length, err);
}

/* The format of a template, or NULL. */
static const struct sl_chat_format *detect(const char *template)
{
    for (size_t i = 0; i < sl_chat_n_formats; i++) {
        const struct sl_chat_format *f = &sl_chat_formats[i];
        bool fits = true;
        for (size_t j = 0; j < 3 && f->has[j] != NULL; j++) {
            fits = fits && strstr(template, f->has[j]) != NULL;
        }
        for (size_t j = 0; j < 2 && f->lacks[j] != NULL; j++) {
            fits = fits && strstr(template, f->lacks[j]) == NULL;
        }
        if (fits) {
            return f;
        }
    }
    return NULL;
}

static const struct sl_chat_format *find_format(const char *name)
{
    for (size_t i = 0; i < sl_chat_n_formats; i++) {
        if (strcmp(sl_chat_formats[i].name, name) == 0) {
            return &sl_chat_formats[i];
        }
    }
    return NULL;
}

static enum sluice_status unknown_format(const char *what, struct sluice_error *err)
{
    char known[300];
    size_t at = 0;
    for (size_t i = 0; i < sl_chat_n_formats; i++) {
        const size_t n = strlen(sl_chat_formats[i].name);
        if (at + n + 3 < sizeof(known)) {
            memcpy(known + at, sl_chat_formats[i].name, n);
            memcpy(known + at + n, ", ", 2);
            at += n + 2;
        }
    }
    known[at - 2] = '\0';
    return sl_error_set(err, SLUICE_STATUS_UNSUPPORTED, "%.100s; known chat formats are %s", what,
                        known);
}

/* ChatML templates spell their default system message out, as one string between the markers:
 * '<|im_start|>system\nYou are ...<|im_end|>\n'. Within a template the newline is written \n, or is
 * one. Returns a new string, or NULL with *failed when memory is out. */
static char *find_default_system(const char *template, bool *failed)
{
    static const char START[] = "<|im_start|>system";
    static const char END[] = "<|im_end|>";
    for (const char *at = template; (at = strstr(at, START)) != NULL; at++) {
        const char *text = at + strlen(START);
        if (text[0] == '\n') {
            text += 1;
        } else if (text[0] == '\\' && text[1] == 'n') {
            text += 2;
        } else {
            continue;
        }
        const char *end = strstr(text, END);
        const size_t length = end != NULL ? (size_t)(end - text) : 0;
        /* Quotes, braces or escapes in between: it is not one plain string. */
        if (length == 0 || strcspn(text, "'\"{}\\+") < length) {
            continue;
        }
        char *copy = sl_strndup(SL_MEM_TEXT, text, length);
        *failed = copy == NULL;
        return copy;
    }
    return NULL;
}

/* What a template says beyond the layout of its format. */
static enum sluice_status read_details(struct sl_chat *chat, const char *template,
                                       struct sluice_error *err)
{
    bool failed = false;
    if (strcmp(chat->format->name, "chatml") == 0) {
        chat->default_system = find_default_system(template, &failed);
    }
    SL_CHECK(!failed, OUT_OF_MEMORY, err, "no memory for a chat template");
    if (strcmp(chat->format->name, "llama3") == 0 &&
        strstr(template, "Cutting Knowledge Date: December 2023") != NULL) {
        /* The date is the one such templates fall back to: the same prompt on every day. */
        chat->preamble = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n";
    }
    if (strcmp(chat->format->name, "deepseek3") == 0 &&
        strstr(template, "\xBD\x9C><think>\\n") != NULL) {
        chat->generation2 = "<think>\n";
    }
    chat->drops_reasoning = strstr(template, "</think>") != NULL;
    chat->drops_newlines = strstr(template, "lstrip('\\n')") != NULL;
    return SLUICE_STATUS_OK;
}

/* The text of the token under an id key, or `fallback`. Bad ids are the tokenizer's to report. */
static char *token_text(const struct sl_gguf *file, const char *key, const char *fallback)
{
    uint32_t id;
    const struct sl_gguf_value *tokens;
    const bool known =
        sl_gguf_find(file, key) != NULL &&
        sl_gguf_get_u32(file, key, &id, NULL) == SLUICE_STATUS_OK &&
        sl_gguf_find(file, "tokenizer.ggml.tokens") != NULL &&
        sl_gguf_get_array(file, "tokenizer.ggml.tokens", &tokens, NULL) == SLUICE_STATUS_OK &&
        tokens->item_kind == SL_GGUF_STRING && id < tokens->count;
    if (!known) {
        return sl_strdup(SL_MEM_TEXT, fallback);
    }
    const struct sl_gguf_string text = sl_gguf_item_string(file, tokens, id);
    return sl_strndup(SL_MEM_TEXT, text.data, text.length);
}

static enum sluice_status fill(struct sl_chat *chat, const struct sl_gguf *file,
                               struct sluice_error *err)
{
    chat->bos = token_text(file, "tokenizer.ggml.bos_token_id", "<s>");
    chat->eos = token_text(file, "tokenizer.ggml.eos_token_id", "</s>");
    const char *end = chat->format->end_of_turn;
    if (strchr(end, SL_CHAT_EOS[0]) != NULL) {
        end = chat->eos;
    }
    chat->end_of_turn = end != NULL ? sl_strdup(SL_MEM_TEXT, end) : NULL;
    SL_CHECK(chat->bos != NULL && chat->eos != NULL && chat->end_of_turn != NULL, OUT_OF_MEMORY,
             err, "no memory for a chat template");
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_chat_create(struct sl_chat **out, const struct sl_gguf *file,
                                  const char *name, struct sluice_error *err)
{
    *out = NULL;
    const char *key = "tokenizer.chat_template";
    char *template = NULL;
    struct sl_chat *chat = NULL;
    enum sluice_status status = SLUICE_STATUS_OK;
    const struct sl_chat_format *format = name != NULL ? find_format(name) : NULL;
    if (name != NULL && format == NULL) {
        char what[100];
        snprintf(what, sizeof what, "unknown chat format '%.60s'", name);
        return unknown_format(what, err);
    }
    if (sl_gguf_find(file, key) != NULL) {
        struct sl_gguf_string text;
        SL_TRY(sl_gguf_get_string(file, key, &text, err));
        template = sl_strndup(SL_MEM_TEXT, text.data, text.length);
        SL_CHECK(template != NULL, OUT_OF_MEMORY, err, "no memory for %s", key);
    } else if (name == NULL) {
        return SLUICE_STATUS_OK;
    }
    const struct sl_chat_format *detected = template != NULL ? detect(template) : NULL;
    if (name == NULL && detected == NULL) {
        status = unknown_format("tokenizer.chat_template: not recognized", err);
        goto out;
    }
    chat = sl_calloc(SL_MEM_TEXT, 1, sizeof(*chat));
    if (chat == NULL) {
        status = sl_error_set(err, SLUICE_STATUS_OUT_OF_MEMORY, "no memory for a chat template");
        goto out;
    }
    chat->format = name != NULL ? format : detected;
    SL_TRY_OUT(fill(chat, file, err));
    /* A chosen format takes the template's details only when it is the template's own. */
    if (detected == chat->format) {
        SL_TRY_OUT(read_details(chat, template, err));
    }
out:
    sl_free(template);
    if (status != SLUICE_STATUS_OK) {
        sl_chat_destroy(&chat);
    }
    *out = chat;
    return status;
}

void sl_chat_destroy(struct sl_chat **chat)
{
    if (*chat == NULL) {
        return;
    }
    sl_free((*chat)->bos);
    sl_free((*chat)->eos);
    sl_free((*chat)->end_of_turn);
    sl_free((*chat)->default_system);
    sl_free(*chat);
    *chat = NULL;
}

const char *sl_chat_name(const struct sl_chat *chat)
{
    return chat->format->name;
}

const char *sl_chat_format_name(size_t index)
{
    return index < sl_chat_n_formats ? sl_chat_formats[index].name : NULL;
}

const char *sl_chat_end_of_turn(const struct sl_chat *chat)
{
    return chat->end_of_turn;
}
