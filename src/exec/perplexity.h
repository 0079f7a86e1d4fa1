/* SPDX-License-Identifier: Apache-2.0
 *
 * Perplexity of a text in chunks, the way that figures of GGUF models are usually given: each chunk
 * of n_ctx tokens starts from an empty cache, BOS takes the place of its first token when the model
 * adds one, and only tokens n_ctx/2 + 1 .. n_ctx - 1 are scored.
 */
#ifndef SL_EXEC_PERPLEXITY_H
#define SL_EXEC_PERPLEXITY_H

#include "exec/context.h"

struct sl_perplexity_options {
    int32_t n_ctx; /* tokens in a chunk: at least 4, at most the context's size */
    int32_t bos;   /* token that replaces the first of each chunk; < 0: none */
    /* Called after each chunk with the perplexity so far; true stops with CANCELLED. May be NULL.
     */
    bool (*progress)(void *user, size_t done, size_t total, double perplexity);
    void *user;
};

struct sl_perplexity {
    double perplexity;     /* exp(mean negative log likelihood) */
    double standard_error; /* of the perplexity */
    size_t n_chunks;
    size_t n_scored; /* tokens */
};

/* INVALID_ARGUMENT when the text is shorter than one chunk. */
enum sluice_status sl_perplexity_run(struct sl_context *ctx, const int32_t *tokens, size_t n_tokens,
                                     int32_t n_vocab, const struct sl_perplexity_options *options,
                                     struct sl_perplexity *out, struct sluice_error *err);

/* -ln softmax(logits)[token], in double. */
double sl_negative_log_likelihood(const float *logits, int32_t n_vocab, int32_t token);

#endif
