/* SPDX-License-Identifier: Apache-2.0
 *
 * DRY ("don't repeat yourself"): finds how long a repetition each token would continue. Source: the
 * sampler's original description by its author, p-e-w, 2024.
 */
#ifndef SL_TEXT_DRY_H
#define SL_TEXT_DRY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <sluice/status.h>

#include "text/tokenizer.h"

/* Finds the breaker strings in the text as tokens come, over token borders. */
struct sl_dry_breaker {
    char *text;
    size_t length;
    size_t *fallback; /* per prefix length: the longest shorter prefix that is its suffix */
    size_t matched;
};

struct sl_dry {
    int32_t last_n; /* 0: off */
    int32_t allowed_length;
    double multiplier;
    double base;
    const struct sl_tokenizer *tokenizer;
    struct sl_dry_breaker *breakers;
    size_t n_breakers;
    int32_t *tokens; /* ring of the last last_n tokens */
    bool *breaks;    /* per ring place: a breaker ends in this token */
    int32_t n_tokens;
    int32_t head;     /* where the next token goes */
    int32_t *matches; /* scratch: length of the match at each distance */
    int32_t *longest; /* per token of the vocabulary: scratch, 0 between calls */
};

/* `dry` is zeroed when it is off. */
enum sluice_status sl_dry_init(struct sl_dry *dry, const struct sl_tokenizer *tokenizer,
                               const char *const *breakers, size_t n_breakers, int32_t last_n,
                               int32_t n_vocab, struct sluice_error *err);
void sl_dry_finish(struct sl_dry *dry);
void sl_dry_reset(struct sl_dry *dry);
void sl_dry_accept(struct sl_dry *dry, int32_t token);
void sl_dry_apply(struct sl_dry *dry, float *logits);

#endif
