/* SPDX-License-Identifier: Apache-2.0
 *
 * Token ids to text, one at a time, as a model writes. What comes out is always well-formed UTF-8
 * and never holds the beginning of a stop string: bytes are held back until it is clear what they
 * are.
 *
 *   push(token) ... push(token) -> text so far ; flush() at the end -> what was held back
 */
#ifndef SL_TEXT_DETOKENIZER_H
#define SL_TEXT_DETOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <sluice/status.h>

#include "text/tokenizer.h"

struct sl_detokenizer;

struct sl_detokenizer_options {
    bool special;           /* print control tokens as their text; else they print nothing */
    bool strip_first_space; /* drop one blank at the very start (SentencePiece adds it) */
    /* Stop strings: text ends before the one that is complete first. Copied. */
    const char *const *stop;
    size_t n_stop;
};

struct sl_detokenizer_options sl_detokenizer_options_default(void);

/* Borrows the tokenizer. `options` may be NULL. Empty stop strings are INVALID_ARGUMENT. */
enum sluice_status sl_detokenizer_create(struct sl_detokenizer **out,
                                         const struct sl_tokenizer *tokenizer,
                                         const struct sl_detokenizer_options *options,
                                         struct sluice_error *err);
void sl_detokenizer_destroy(struct sl_detokenizer **detokenizer);

/* Text that is ready after this token (maybe none): *length bytes, valid until the next call, not
 * NUL-terminated. Allocates nothing. Ids outside the vocabulary print nothing; after a stop string
 * nothing comes any more. */
const char *sl_detokenizer_push(struct sl_detokenizer *detokenizer, int32_t token, size_t *length);

/* The end: what was held back, an unfinished character as U+FFFD. */
const char *sl_detokenizer_flush(struct sl_detokenizer *detokenizer, size_t *length);

/* Which stop string was met (its index), or -1. */
int sl_detokenizer_stopped(const struct sl_detokenizer *detokenizer);

/* Begin a new text. */
void sl_detokenizer_reset(struct sl_detokenizer *detokenizer);

#endif
