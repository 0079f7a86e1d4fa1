/* SPDX-License-Identifier: Apache-2.0
 *
 * DRY; see dry.h. Read backwards from its end, the text is a string r; z[k] is how far r and r from
 * place k on agree, that is, how long a stretch ending k tokens back equals the end of the text.
 * The token after that stretch is r[k - 1]. All z together take linear time (the Z algorithm).
 */
#include "text/dry.h"

#include <math.h>
#include <string.h>

#include "base/error.h"
#include "base/mem.h"

/* Prepare the search for one string (Knuth, Morris and Pratt). */
static enum sluice_status breaker_init(struct sl_dry_breaker *b, const char *text,
                                       struct sluice_error *err)
{
    b->length = strlen(text);
    b->text = sl_strdup(SL_MEM_TEXT, text);
    b->fallback = sl_calloc(SL_MEM_TEXT, b->length + 1, sizeof(*b->fallback));
    SL_CHECK(b->text != NULL && b->fallback != NULL, OUT_OF_MEMORY, err,
             "no memory for DRY sequence breakers");
    size_t matched = 0;
    for (size_t i = 1; i < b->length; i++) {
        while (matched > 0 && text[i] != text[matched]) {
            matched = b->fallback[matched];
        }
        if (text[i] == text[matched]) {
            matched++;
        }
        b->fallback[i + 1] = matched;
    }
    return SLUICE_STATUS_OK;
}

static bool breaker_feed(struct sl_dry_breaker *b, const char *bytes, size_t length)
{
    bool found = false;
    for (size_t i = 0; i < length; i++) {
        while (b->matched > 0 && b->text[b->matched] != bytes[i]) {
            b->matched = b->fallback[b->matched];
        }
        if (b->text[b->matched] == bytes[i]) {
            b->matched++;
        }
        if (b->matched == b->length) {
            found = true;
            b->matched = b->fallback[b->matched];
        }
    }
    return found;
}

enum sluice_status sl_dry_init(struct sl_dry *dry, const struct sl_tokenizer *tokenizer,
                               const char *const *breakers, size_t n_breakers, int32_t last_n,
                               int32_t n_vocab, struct sluice_error *err)
{
    const size_t n = (size_t)last_n;
    dry->last_n = last_n;
    dry->tokenizer = tokenizer;
    dry->tokens = sl_calloc(SL_MEM_TEXT, n, sizeof(*dry->tokens));
    dry->breaks = sl_calloc(SL_MEM_TEXT, n, sizeof(*dry->breaks));
    dry->matches = sl_calloc(SL_MEM_TEXT, n, sizeof(*dry->matches));
    dry->longest = sl_calloc(SL_MEM_TEXT, (size_t)n_vocab, sizeof(*dry->longest));
    dry->breakers = sl_calloc(SL_MEM_TEXT, n_breakers + 1, sizeof(*dry->breakers));
    SL_CHECK(dry->tokens != NULL && dry->breaks != NULL && dry->matches != NULL &&
                 dry->longest != NULL && dry->breakers != NULL,
             OUT_OF_MEMORY, err, "no memory for the DRY sampler");
    for (size_t i = 0; i < n_breakers; i++) {
        dry->n_breakers = i + 1;
        SL_TRY(breaker_init(&dry->breakers[i], breakers[i], err));
    }
    return SLUICE_STATUS_OK;
}

void sl_dry_finish(struct sl_dry *dry)
{
    for (size_t i = 0; i < dry->n_breakers; i++) {
        sl_free(dry->breakers[i].text);
        sl_free(dry->breakers[i].fallback);
    }
    sl_free(dry->breakers);
    sl_free(dry->tokens);
    sl_free(dry->breaks);
    sl_free(dry->matches);
    sl_free(dry->longest);
    *dry = (struct sl_dry){0};
}

void sl_dry_reset(struct sl_dry *dry)
{
    dry->n_tokens = 0;
    dry->head = 0;
    for (size_t i = 0; i < dry->n_breakers; i++) {
        dry->breakers[i].matched = 0;
    }
}

void sl_dry_accept(struct sl_dry *dry, int32_t token)
{
    if (dry->last_n == 0) {
        return;
    }
    bool breaks = false;
    size_t length = 0;
    const char *piece = dry->tokenizer != NULL && dry->n_breakers > 0
                            ? sl_tokenizer_piece(dry->tokenizer, token, &length)
                            : NULL;
    for (size_t i = 0; piece != NULL && i < dry->n_breakers; i++) {
        breaks = breaker_feed(&dry->breakers[i], piece, length) || breaks;
    }
    dry->tokens[dry->head] = token;
    dry->breaks[dry->head] = breaks;
    dry->head = dry->head + 1 == dry->last_n ? 0 : dry->head + 1;
    if (dry->n_tokens < dry->last_n) {
        dry->n_tokens++;
    }
}

/* Ring place of the token `back` places before the last. */
static int32_t place(const struct sl_dry *dry, int32_t back)
{
    const int32_t at = dry->head - 1 - back;
    return at >= 0 ? at : at + dry->last_n;
}

/* How many tokens from the end lie after the last breaker. */
static int32_t unbroken(const struct sl_dry *dry)
{
    int32_t n = 0;
    while (n < dry->n_tokens && !dry->breaks[place(dry, n)]) {
        n++;
    }
    return n;
}

/* z[k] for all 0 < k < n, as the file head says. */
static void find_matches(const struct sl_dry *dry, int32_t *z)
{
    const int32_t n = dry->n_tokens;
    int32_t left = 0; /* the stretch [left, right) that is known to equal the start of r */
    int32_t right = 0;
    for (int32_t k = 1; k < n; k++) {
        int32_t length = 0;
        if (k < right) {
            length = z[k - left] < right - k ? z[k - left] : right - k;
        }
        while (k + length < n &&
               dry->tokens[place(dry, length)] == dry->tokens[place(dry, k + length)]) {
            length++;
        }
        z[k] = length;
        if (k + length > right) {
            left = k;
            right = k + length;
        }
    }
}

void sl_dry_apply(struct sl_dry *dry, float *logits)
{
    if (dry->last_n == 0 || dry->n_tokens < 2) {
        return;
    }
    const int32_t limit = unbroken(dry);
    const int32_t least = dry->allowed_length > 1 ? dry->allowed_length : 1;
    if (limit < least) {
        return;
    }
    int32_t *z = dry->matches;
    find_matches(dry, z);
    for (int32_t k = 1; k < dry->n_tokens; k++) {
        const int32_t length = z[k] < limit ? z[k] : limit;
        const int32_t next = dry->tokens[place(dry, k - 1)];
        if (length >= least && length > dry->longest[next]) {
            dry->longest[next] = length;
        }
    }
    for (int32_t k = 0; k < dry->n_tokens; k++) {
        const int32_t token = dry->tokens[place(dry, k)];
        if (dry->longest[token] > 0) {
            const int32_t excess = dry->longest[token] - dry->allowed_length;
            logits[token] =
                (float)((double)logits[token] - dry->multiplier * pow(dry->base, (double)excess));
            dry->longest[token] = 0;
        }
    }
}
