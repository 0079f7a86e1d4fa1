/* SPDX-License-Identifier: Apache-2.0
 *
 * The streaming detokenizer; see detokenizer.h. New bytes join those held back; a stop string among
 * them ends the text; else the longest tail that could still become a stop string or a character
 * stays and the rest goes out.
 */
#include "text/detokenizer.h"

#include <string.h>

#include "base/error.h"
#include "base/mem.h"
#include "text/utf8.h"

struct sl_detokenizer {
    const struct sl_tokenizer *tokenizer;
    bool special;
    bool strip_first_space;
    bool at_start;
    int stopped; /* index of the stop string met, or -1 */
    char **stop;
    size_t *stop_bytes;
    size_t n_stop;
    char *held; /* room for one piece after the longest tail that can be held back */
    size_t n_held;
    char *out; /* three times that: every byte may turn into U+FFFD */
};

struct sl_detokenizer_options sl_detokenizer_options_default(void)
{
    return (struct sl_detokenizer_options){0};
}

static enum sluice_status copy_stops(struct sl_detokenizer *d,
                                     const struct sl_detokenizer_options *options,
                                     size_t *out_longest, struct sluice_error *err)
{
    d->stop = sl_calloc(SL_MEM_TEXT, options->n_stop + 1, sizeof(*d->stop));
    d->stop_bytes = sl_calloc(SL_MEM_TEXT, options->n_stop + 1, sizeof(*d->stop_bytes));
    SL_CHECK(d->stop != NULL && d->stop_bytes != NULL, OUT_OF_MEMORY, err,
             "no memory for %zu stop strings", options->n_stop);
    for (size_t i = 0; i < options->n_stop; i++) {
        const size_t bytes = strlen(options->stop[i]);
        SL_CHECK(bytes > 0, INVALID_ARGUMENT, err, "stop string %zu is empty", i);
        d->stop[i] = sl_strndup(SL_MEM_TEXT, options->stop[i], bytes);
        SL_CHECK(d->stop[i] != NULL, OUT_OF_MEMORY, err, "no memory for a stop string");
        d->stop_bytes[i] = bytes;
        d->n_stop = i + 1;
        if (bytes > *out_longest) {
            *out_longest = bytes;
        }
    }
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_detokenizer_create(struct sl_detokenizer **out,
                                         const struct sl_tokenizer *tokenizer,
                                         const struct sl_detokenizer_options *options,
                                         struct sluice_error *err)
{
    *out = NULL;
    const struct sl_detokenizer_options defaults = sl_detokenizer_options_default();
    if (options == NULL) {
        options = &defaults;
    }
    struct sl_detokenizer *d = sl_calloc(SL_MEM_TEXT, 1, sizeof(*d));
    SL_CHECK(d != NULL, OUT_OF_MEMORY, err, "no memory for a detokenizer");
    d->tokenizer = tokenizer;
    d->special = options->special;
    d->strip_first_space = options->strip_first_space;
    size_t longest_stop = 0;
    enum sluice_status status;
    SL_TRY_OUT(copy_stops(d, options, &longest_stop, err));
    const size_t room = sl_tokenizer_longest_piece(tokenizer) + longest_stop + 4;
    d->held = sl_alloc(SL_MEM_TEXT, room);
    d->out = sl_alloc(SL_MEM_TEXT, room * 3);
    if (d->held == NULL || d->out == NULL) {
        status = sl_error_set(err, SLUICE_STATUS_OUT_OF_MEMORY, "no memory for a detokenizer");
    }
out:
    if (status != SLUICE_STATUS_OK) {
        sl_detokenizer_destroy(&d);
        return status;
    }
    sl_detokenizer_reset(d);
    *out = d;
    return status;
}

void sl_detokenizer_destroy(struct sl_detokenizer **detokenizer)
{
    struct sl_detokenizer *d = *detokenizer;
    if (d == NULL) {
        return;
    }
    for (size_t i = 0; i < d->n_stop; i++) {
        sl_free(d->stop[i]);
    }
    sl_free(d->stop);
    sl_free(d->stop_bytes);
    sl_free(d->held);
    sl_free(d->out);
    sl_free(d);
    *detokenizer = NULL;
}

void sl_detokenizer_reset(struct sl_detokenizer *detokenizer)
{
    detokenizer->n_held = 0;
    detokenizer->stopped = -1;
    detokenizer->at_start = true;
}

int sl_detokenizer_stopped(const struct sl_detokenizer *detokenizer)
{
    return detokenizer->stopped;
}

/* Where the stop string in the held bytes starts that is complete first (of several that end there,
 * the longest), or n_held. Going by ends makes the result the same however the text is cut into
 * tokens. Only ends after the first `n_old` bytes are new. */
static size_t find_stop(struct sl_detokenizer *d, size_t n_old)
{
    size_t start = d->n_held;
    for (size_t end = n_old + 1; end <= d->n_held && d->stopped < 0; end++) {
        for (size_t i = 0; i < d->n_stop; i++) {
            const size_t bytes = d->stop_bytes[i];
            if (bytes <= end && (d->stopped < 0 || end - bytes < start) &&
                memcmp(d->held + end - bytes, d->stop[i], bytes) == 0) {
                d->stopped = (int)i;
                start = end - bytes;
            }
        }
    }
    return start;
}

/* How many bytes at the end of the held ones a stop string could begin with. */
static size_t stop_tail(const struct sl_detokenizer *d)
{
    for (size_t at = 0; at < d->n_held; at++) {
        const size_t tail = d->n_held - at;
        for (size_t i = 0; i < d->n_stop; i++) {
            if (tail < d->stop_bytes[i] && memcmp(d->held + at, d->stop[i], tail) == 0) {
                return tail;
            }
        }
    }
    return 0;
}

/* Put out the first `n` held bytes. */
static const char *release(struct sl_detokenizer *d, size_t n, size_t *length)
{
    *length = sl_utf8_repair(d->out, d->held, n);
    memmove(d->held, d->held + n, d->n_held - n);
    d->n_held -= n;
    return d->out;
}

const char *sl_detokenizer_push(struct sl_detokenizer *detokenizer, int32_t token, size_t *length)
{
    struct sl_detokenizer *d = detokenizer;
    *length = 0;
    size_t n;
    const char *piece = sl_tokenizer_piece(d->tokenizer, token, &n);
    if (d->stopped >= 0 || n == 0 ||
        (!d->special && sl_tokenizer_is_special(d->tokenizer, token))) {
        return d->out;
    }
    if (d->at_start && d->strip_first_space && piece[0] == ' ') {
        piece++;
        n--;
    }
    d->at_start = false;
    const size_t n_old = d->n_held;
    memcpy(d->held + n_old, piece, n);
    d->n_held = n_old + n;

    size_t ready = find_stop(d, n_old);
    if (d->stopped >= 0) {
        const char *text = release(d, ready, length);
        d->n_held = 0;
        return text;
    }
    ready -= stop_tail(d);
    ready -= sl_utf8_incomplete_tail(d->held, ready);
    return release(d, ready, length);
}

const char *sl_detokenizer_flush(struct sl_detokenizer *detokenizer, size_t *length)
{
    return release(detokenizer, detokenizer->n_held, length);
}
