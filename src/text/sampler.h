/* SPDX-License-Identifier: Apache-2.0
 *
 * Choosing the next token from logits. The chain, in this order:
 *
 *   logit bias -> penalties (repeat, presence, frequency) -> DRY -> top-k -> typical -> top-p
 *   -> min-p -> temperature -> draw
 *
 * A step whose option is neutral is left out. Everything is allocated at creation; sampling and
 * accepting allocate nothing. One sampler serves one sequence; it is not thread-safe.
 *
 * Draws come from xoshiro256** seeded through splitmix64 (Blackman and Vigna 2018), one number a
 * token: the top 53 bits as a fraction u, and the first candidate in the order of falling logits
 * whose running sum of probabilities passes u is the token. Same seed and logits, same tokens.
 */
#ifndef SL_TEXT_SAMPLER_H
#define SL_TEXT_SAMPLER_H

#include <stddef.h>
#include <stdint.h>

#include <sluice/status.h>

#include "text/tokenizer.h"

struct sl_logit_bias {
    int32_t token;
    float bias; /* added to the logit; -INFINITY forbids the token */
};

struct sl_sampler_options {
    float temperature; /* 0.8; 0 or less: greedy, always the most likely token */
    int32_t top_k;     /* 40; the k most likely; 0 or less: all */
    float top_p;       /* 0.95; the fewest that have this probability together; 1: all */
    float min_p;       /* 0.05; at least this fraction of the best probability; 0: all */
    float typical_p;   /* 1: off; locally typical sampling (Meister et al. 2022) */
    int32_t min_keep;  /* 1; top-p, min-p and typical leave at least so many */

    int32_t penalty_last_n;  /* 64; tokens that penalties look at; 0: none, -1: n_context */
    float repeat_penalty;    /* 1: off; divides positive and multiplies negative logits */
    float presence_penalty;  /* 0: off; taken off once from tokens that occur */
    float frequency_penalty; /* 0: off; taken off for each occurrence */

    /* DRY: tokens that would go on with a repeated sequence of length n lose
     * multiplier * base ^ (n - allowed_length). */
    float dry_multiplier;            /* 0: off */
    float dry_base;                  /* 1.75 */
    int32_t dry_allowed_length;      /* 2; shorter repetitions are free */
    int32_t dry_last_n;              /* -1: n_context; how far back it looks; 0: off */
    const char *const *dry_breakers; /* newline, colon, quote, star; repetitions do not reach over
                                        tokens that hold one of these */
    size_t n_dry_breakers;
    const struct sl_tokenizer
        *tokenizer; /* needed for breakers only; borrowed while the sampler lives */

    int32_t n_context; /* 4096; what -1 above means */
    const struct sl_logit_bias *biases;
    size_t n_biases;
    uint64_t seed; /* 0 is a seed like any other */
};

struct sl_sampler_options sl_sampler_options_default(void);

/* A token that may be drawn. */
struct sl_candidate {
    int32_t id;
    float logit;
    double p; /* after all steps */
};

struct sl_sampler;

/* INVALID_ARGUMENT names the option that is out of range. */
enum sluice_status sl_sampler_create(struct sl_sampler **out,
                                     const struct sl_sampler_options *options, int32_t n_vocab,
                                     struct sluice_error *err);
void sl_sampler_destroy(struct sl_sampler **sampler);

/* Choose from `logits` [n_vocab], which are changed. NaN counts as -INFINITY. Does not accept. */
int32_t sl_sampler_sample(struct sl_sampler *sampler, float *logits);

/* Note a token as part of the text, for penalties and DRY: prompt tokens too. */
void sl_sampler_accept(struct sl_sampler *sampler, int32_t token);

/* Forget all tokens and begin the draws anew from the seed. */
void sl_sampler_reset(struct sl_sampler *sampler);

/* What the last sample chose from, by falling logit; valid until the next one. Without any of the
 * filters (top-k, typical, top-p, min-p) only as far as the draw went. */
const struct sl_candidate *sl_sampler_candidates(const struct sl_sampler *sampler, size_t *n);

#endif
