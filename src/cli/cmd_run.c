/* SPDX-License-Identifier: Apache-2.0
 *
 * `sluice run`: complete a prompt, or chat. The model's text alone goes to standard output.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/file.h"
#include "base/mem.h"
#include "cli/engine.h"
#include "cli/stats.h"
#include "text/chat.h"
#include "text/detokenizer.h"
#include "text/sampler.h"
#include "text/tokenizer.h"

/* One conversation or completion. */
struct session {
    const struct sl_options *options;
    struct sl_engine engine;
    struct sl_tokenizer *tokenizer;
    struct sl_sampler *sampler;
    struct sl_detokenizer *detokenizer;
    struct sl_chat *chat;
    bool chatting;
    struct sl_run_times times;
    int32_t n_first; /* tokens of the first prompt */
    bool turn_ended; /* the model's last answer ended with its own end-of-turn token */
    char *answer;    /* text of the answer being written (chat) */
    size_t answer_length, answer_room;
};

static enum sluice_status create_sampler(struct session *s, struct sluice_error *err)
{
    const struct sl_options *const o = s->options;
    struct sl_sampler_options so = sl_sampler_options_default();
    so.temperature = (float)sl_options_float(o, SL_OPT_TEMP);
    so.top_k = (int32_t)sl_options_int(o, SL_OPT_TOP_K);
    so.top_p = (float)sl_options_float(o, SL_OPT_TOP_P);
    so.min_p = (float)sl_options_float(o, SL_OPT_MIN_P);
    so.typical_p = (float)sl_options_float(o, SL_OPT_TYPICAL);
    so.penalty_last_n = (int32_t)sl_options_int(o, SL_OPT_REPEAT_LAST_N);
    so.repeat_penalty = (float)sl_options_float(o, SL_OPT_REPEAT_PENALTY);
    so.presence_penalty = (float)sl_options_float(o, SL_OPT_PRESENCE_PENALTY);
    so.frequency_penalty = (float)sl_options_float(o, SL_OPT_FREQUENCY_PENALTY);
    so.dry_multiplier = (float)sl_options_float(o, SL_OPT_DRY_MULTIPLIER);
    so.dry_base = (float)sl_options_float(o, SL_OPT_DRY_BASE);
    so.dry_allowed_length = (int32_t)sl_options_int(o, SL_OPT_DRY_ALLOWED_LENGTH);
    so.dry_last_n = (int32_t)sl_options_int(o, SL_OPT_DRY_PENALTY_LAST_N);
    so.tokenizer = s->tokenizer;
    so.n_context = s->engine.n_ctx;
    const int64_t seed = sl_options_int(o, SL_OPT_SEED);
    so.seed = seed >= 0 ? (uint64_t)seed : sl_clock_now_ns();

    size_t n_biases = 0;
    const char *const *const texts = sl_options_list(o, SL_OPT_LOGIT_BIAS, &n_biases);
    struct sl_logit_bias *const biases = sl_calloc(SL_MEM_CLI, n_biases + 1, sizeof *biases);
    SL_CHECK(biases, OUT_OF_MEMORY, err, "no memory for logit biases");
    enum sluice_status status = SLUICE_STATUS_OK;
    for (size_t i = 0; i < n_biases && status == SLUICE_STATUS_OK; i++) {
        status = sl_logit_bias_parse(texts[i], &biases[i].token, &biases[i].bias, err);
    }
    so.biases = biases;
    so.n_biases = n_biases;
    if (status == SLUICE_STATUS_OK) {
        status = sl_sampler_create(&s->sampler, &so, (int32_t)s->engine.model->hp.n_vocab, err);
    }
    sl_free(biases);
    return status;
}

static enum sluice_status create_detokenizer(struct session *s, struct sluice_error *err)
{
    struct sl_detokenizer_options o = sl_detokenizer_options_default();
    o.stop = sl_options_list(s->options, SL_OPT_STOP, &o.n_stop);
    return sl_detokenizer_create(&s->detokenizer, s->tokenizer, &o, err);
}

static enum sluice_status write_text(struct session *s, const char *text, size_t length,
                                     struct sluice_error *err)
{
    if (length == 0) {
        return SLUICE_STATUS_OK;
    }
    SL_CHECK(fwrite(text, 1, length, stdout) == length && fflush(stdout) == 0, IO, err,
             "cannot write to standard output");
    if (!s->chatting) {
        return SLUICE_STATUS_OK;
    }
    if (s->answer_length + length + 1 > s->answer_room) {
        const size_t room = 2 * (s->answer_length + length + 1);
        char *const grown = sl_realloc(SL_MEM_CLI, s->answer, room, 1);
        SL_CHECK(grown, OUT_OF_MEMORY, err, "no memory for the answer");
        s->answer = grown;
        s->answer_room = room;
    }
    memcpy(s->answer + s->answer_length, text, length);
    s->answer_length += length;
    s->answer[s->answer_length] = '\0';
    return SLUICE_STATUS_OK;
}

/* Make room for n more tokens where the context is full and --context-shift allows: half of what is
 * not to be kept goes, the oldest first. */
static enum sluice_status make_room(struct session *s, int32_t n, struct sluice_error *err)
{
    struct sl_context *const ctx = s->engine.ctx;
    const int32_t n_past = sl_context_n_past(ctx), lacking = n_past + n - s->engine.n_ctx;
    if (lacking <= 0 || !sl_options_flag(s->options, SL_OPT_CONTEXT_SHIFT)) {
        return SLUICE_STATUS_OK;
    }
    const int64_t asked = sl_options_int(s->options, SL_OPT_KEEP);
    const int32_t n_first = s->n_first < n_past ? s->n_first : n_past;
    const int32_t n_keep = asked < 0 || asked > n_first ? n_first : (int32_t)asked;
    const int32_t half = (n_past - n_keep + 1) / 2;
    const int32_t n_drop = half > lacking ? half : lacking;
    SL_CHECK(n_drop <= n_past - n_keep, INVALID_ARGUMENT, err,
             "the context of %d tokens cannot hold %d more beside the %d that are kept; use a "
             "larger -c/--ctx-size or a smaller --keep",
             s->engine.n_ctx, n, n_keep);
    return sl_context_shift(ctx, n_keep, n_drop, err);
}

/* Write tokens until the model ends, a stop string, -n, the context's end or Ctrl-C. The logits of
 * the first one are there. */
static enum sluice_status generate(struct session *s, struct sluice_error *err)
{
    const int64_t most = sl_options_int(s->options, SL_OPT_PREDICT);
    const uint64_t start = sl_clock_now_ns();
    enum sluice_status status = SLUICE_STATUS_OK;
    size_t length = 0;
    int64_t n = 0;
    s->turn_ended = false;
    sl_detokenizer_reset(s->detokenizer);
    while ((most < 0 || n < most) && !sl_cli_interrupted()) {
        const int32_t token = sl_sampler_sample(s->sampler, sl_context_logits(s->engine.ctx));
        sl_sampler_accept(s->sampler, token);
        n++;
        if (sl_tokenizer_is_eog(s->tokenizer, token)) {
            s->turn_ended = true;
            break;
        }
        const char *const text = sl_detokenizer_push(s->detokenizer, token, &length);
        SL_TRY_OUT(write_text(s, text, length, err));
        if (sl_detokenizer_stopped(s->detokenizer) >= 0) {
            break;
        }
        SL_TRY_OUT(make_room(s, 1, err));
        if (sl_context_n_past(s->engine.ctx) >= s->engine.n_ctx) {
            fprintf(stderr, "\nthe context of %d tokens is full; use a larger -c/--ctx-size\n",
                    s->engine.n_ctx);
            break;
        }
        SL_TRY_OUT(sl_context_eval(s->engine.ctx, &token, 1, 1, NULL, err));
    }
out:
    s->times.n_generated += n;
    s->times.generated_ns += sl_clock_now_ns() - start;
    if (status == SLUICE_STATUS_OK) {
        const char *const rest = sl_detokenizer_flush(s->detokenizer, &length);
        status = write_text(s, rest, length, err);
    }
    return status;
}

/* Tokenize and evaluate a text that continues what is in the context. */
static enum sluice_status feed(struct session *s, const char *text, size_t length, bool first,
                               bool parse_special, struct sluice_error *err)
{
    int32_t *tokens = NULL;
    size_t n = 0;
    SL_TRY(sl_tokenizer_encode(s->tokenizer, text, length, first, parse_special, &tokens, &n, err));
    enum sluice_status status = SLUICE_STATUS_OK;
    if (n == 0) {
        sl_free(tokens);
        return sl_error_set(err, SLUICE_STATUS_INVALID_ARGUMENT,
                            "the prompt is empty; give one with -p, -f or a pipe");
    }
    /* A rendered chat may hold the BOS text that the tokenizer adds as well: once is enough. */
    const size_t skip =
        first && n > 1 && tokens[0] == tokens[1] && tokens[0] == sl_tokenizer_bos(s->tokenizer) ? 1
                                                                                                : 0;
    for (size_t i = skip; i < n; i++) {
        sl_sampler_accept(s->sampler, tokens[i]);
    }
    const uint64_t start = sl_clock_now_ns();
    if (first) {
        s->n_first = (int32_t)(n - skip);
    } else {
        status = make_room(s, (int32_t)(n - skip), err);
    }
    if (status == SLUICE_STATUS_OK) {
        status = sl_context_eval(s->engine.ctx, tokens + skip, (int32_t)(n - skip), 1, NULL, err);
    }
    s->times.n_prompt += (int64_t)(n - skip);
    s->times.prompt_ns += sl_clock_now_ns() - start;
    sl_free(tokens);
    return status;
}

static enum sluice_status complete(struct session *s, const char *prompt, size_t length,
                                   struct sluice_error *err)
{
    SL_TRY(feed(s, prompt, length, true, true, err));
    SL_TRY(generate(s, err));
    SL_CHECK(putchar('\n') != EOF && fflush(stdout) == 0, IO, err,
             "cannot write to standard output");
    return SLUICE_STATUS_OK;
}

/* The messages so far; contents are owned. */
struct history {
    struct sl_chat_message *messages;
    size_t n, room, n_done;
};

static enum sluice_status history_add(struct history *h, const char *role, const char *content,
                                      struct sluice_error *err)
{
    if (h->n == h->room) {
        const size_t room = h->room ? 2 * h->room : 8;
        struct sl_chat_message *const grown =
            sl_realloc(SL_MEM_CLI, h->messages, room, sizeof *grown);
        SL_CHECK(grown, OUT_OF_MEMORY, err, "no memory for the chat");
        h->messages = grown;
        h->room = room;
    }
    char *const copy = sl_strdup(SL_MEM_CLI, content);
    SL_CHECK(copy, OUT_OF_MEMORY, err, "no memory for the chat");
    h->messages[h->n++] = (struct sl_chat_message){.role = role, .content = copy};
    return SLUICE_STATUS_OK;
}

static void history_finish(struct history *h)
{
    for (size_t i = 0; i < h->n; i++) {
        sl_free((void *)(uintptr_t)h->messages[i].content);
    }
    sl_free(h->messages);
}

/* A user's message in, the model's answer out. */
static enum sluice_status answer(struct session *s, struct history *h, const char *message,
                                 struct sluice_error *err)
{
    char *text = NULL;
    size_t length = 0;
    const bool first = h->n_done == 0;
    SL_TRY(history_add(h, "user", message, err));
    SL_TRY(sl_chat_render_next(s->chat, h->messages, h->n, h->n_done, s->turn_ended, true, &text,
                               &length, err));
    enum sluice_status status = feed(s, text, length, first, true, err);
    sl_free(text);
    SL_TRY(status);
    s->answer_length = 0;
    SL_TRY(generate(s, err));
    /* The end-of-turn token was sampled, not evaluated: render_next adds it before the next turn.
     */
    s->turn_ended = false;
    SL_TRY(history_add(h, "assistant", s->answer_length > 0 ? s->answer : "", err));
    h->n_done = h->n;
    SL_CHECK(fputs("\n", stdout) != EOF && fflush(stdout) == 0, IO, err,
             "cannot write to standard output");
    return SLUICE_STATUS_OK;
}

static enum sluice_status chat(struct session *s, const char *prompt, struct sluice_error *err)
{
    struct history h = {0};
    enum sluice_status status = SLUICE_STATUS_OK;
    char *line = NULL;
    size_t room = 0;
    const char *const system = sl_options_text(s->options, SL_OPT_SYSTEM_PROMPT);
    const bool terminal = isatty(STDIN_FILENO);
    if (system) {
        SL_TRY_OUT(history_add(&h, "system", system, err));
    }
    if (prompt) {
        SL_TRY_OUT(answer(s, &h, prompt, err));
    }
    while (terminal && !sl_cli_interrupted()) {
        fprintf(stderr, "\n> ");
        const ssize_t n = getline(&line, &room, stdin);
        if (n <= 0) {
            break;
        }
        line[strcspn(line, "\r\n")] = '\0';
        if (line[0] == '\0') {
            continue;
        }
        SL_TRY_OUT(answer(s, &h, line, err));
    }
out:
    free(line);
    history_finish(&h);
    return status;
}

/* -p, -f or a pipe. *out is NULL when there is none (a terminal). */
static enum sluice_status read_prompt(const struct sl_options *options, char **out, size_t *length,
                                      struct sluice_error *err)
{
    const char *const text = sl_options_text(options, SL_OPT_PROMPT);
    const char *path = sl_options_text(options, SL_OPT_FILE);
    *out = NULL;
    *length = 0;
    SL_CHECK(!text || !path, INVALID_ARGUMENT, err, "give -p/--prompt or -f/--file, not both");
    if (text) {
        *out = sl_strdup(SL_MEM_CLI, text);
        SL_CHECK(*out, OUT_OF_MEMORY, err, "no memory for the prompt");
        *length = strlen(text);
        return SLUICE_STATUS_OK;
    }
    if (!path && isatty(STDIN_FILENO)) {
        return SLUICE_STATUS_OK;
    }
    return sl_file_read(path ? path : "-", 0, out, length, err);
}

static enum sluice_status open_session(struct session *s, bool have_prompt,
                                       struct sluice_error *err)
{
    const struct sl_options *const o = s->options;
    SL_TRY(sl_engine_open(&s->engine, o, 0, err));
    SL_TRY(sl_tokenizer_create(&s->tokenizer, s->engine.model->file, err));
    SL_TRY(sl_chat_create(&s->chat, s->engine.model->file, sl_options_text(o, SL_OPT_CHAT_TEMPLATE),
                          err));
    s->chatting = sl_options_given(o, SL_OPT_CONVERSATION)
                      ? sl_options_flag(o, SL_OPT_CONVERSATION)
                      : s->chat && isatty(STDIN_FILENO) && isatty(STDOUT_FILENO);
    SL_CHECK(!s->chatting || s->chat, INVALID_ARGUMENT, err,
             "the model has no chat template that is known; name one with --chat-template");
    SL_CHECK(s->chatting || have_prompt, INVALID_ARGUMENT, err,
             "a prompt is needed: give one with -p, -f or a pipe");
    SL_TRY(create_sampler(s, err));
    SL_TRY(create_detokenizer(s, err));
    const struct sl_plan_options plan = sl_engine_plan_options(&s->engine, o);
    return sl_engine_create_context(&s->engine, &plan, err);
}

static void close_session(struct session *s)
{
    sl_free(s->answer);
    sl_chat_destroy(&s->chat);
    sl_detokenizer_destroy(&s->detokenizer);
    sl_sampler_destroy(&s->sampler);
    sl_tokenizer_destroy(&s->tokenizer);
    sl_engine_close(&s->engine);
}

enum sluice_status sl_cmd_run(const struct sl_options *options, struct sluice_error *err)
{
    struct session s = {.options = options};
    char *prompt = NULL;
    size_t length = 0;
    SL_TRY(read_prompt(options, &prompt, &length, err));
    enum sluice_status status = open_session(&s, prompt != NULL, err);
    if (status == SLUICE_STATUS_OK) {
        status = s.chatting ? chat(&s, prompt, err) : complete(&s, prompt, length, err);
    }
    if (s.engine.ctx && sl_options_flag(options, SL_OPT_STATS)) {
        sl_stats_print(stderr, &s.engine, &s.times);
    }
    if (status == SLUICE_STATUS_OK) {
        status = sl_engine_finish_trace(&s.engine, err);
    }
    if (status == SLUICE_STATUS_OK && sl_cli_interrupted()) {
        status = sl_error_set(err, SLUICE_STATUS_CANCELLED, "interrupted");
    }
    close_session(&s);
    sl_free(prompt);
    return status;
}
