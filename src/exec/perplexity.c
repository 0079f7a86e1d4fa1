/* SPDX-License-Identifier: Apache-2.0
 *
 * Perplexity (see perplexity.h). Scored tokens go through in pieces, so that their logits need
 * little memory whatever the vocabulary.
 */
#include "exec/perplexity.h"

#include <math.h>
#include <string.h>

#include "base/error.h"
#include "base/mem.h"

#define PIECE 64 /* scored tokens in a pass */

double sl_negative_log_likelihood(const float *logits, int32_t n_vocab, int32_t token)
{
    float most = logits[0];
    for (int32_t i = 1; i < n_vocab; i++) {
        most = logits[i] > most ? logits[i] : most;
    }
    double sum = 0;
    for (int32_t i = 0; i < n_vocab; i++) {
        sum += exp((double)(logits[i] - most));
    }
    return log(sum) + (double)(most - logits[token]);
}

struct sums {
    double nll, squares;
    size_t n;
};

static enum sluice_status score_chunk(struct sl_context *ctx, const int32_t *chunk, int32_t n_vocab,
                                      const struct sl_perplexity_options *o, float *logits,
                                      int32_t *tokens, struct sums *sums, struct sluice_error *err)
{
    const int32_t first = o->n_ctx / 2;
    memcpy(tokens, chunk, (size_t)o->n_ctx * sizeof *tokens);
    if (o->bos >= 0) {
        tokens[0] = o->bos;
    }
    sl_context_truncate(ctx, 0);
    SL_TRY(sl_context_eval(ctx, tokens, first, 0, NULL, err));
    for (int32_t at = first; at < o->n_ctx - 1;) {
        const int32_t n = o->n_ctx - 1 - at < PIECE ? o->n_ctx - 1 - at : PIECE;
        SL_TRY(sl_context_eval(ctx, tokens + at, n, n, logits, err));
        for (int32_t i = 0; i < n; i++) {
            const double nll = sl_negative_log_likelihood(logits + (size_t)i * (size_t)n_vocab,
                                                          n_vocab, tokens[at + i + 1]);
            sums->nll += nll;
            sums->squares += nll * nll;
            sums->n++;
        }
        at += n;
    }
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_perplexity_run(struct sl_context *ctx, const int32_t *tokens, size_t n_tokens,
                                     int32_t n_vocab, const struct sl_perplexity_options *options,
                                     struct sl_perplexity *out, struct sluice_error *err)
{
    memset(out, 0, sizeof *out);
    SL_CHECK(options->n_ctx >= 4, INVALID_ARGUMENT, err,
             "chunks of %d tokens: at least 4 are needed", options->n_ctx);
    const size_t n_chunks = n_tokens / (size_t)options->n_ctx;
    SL_CHECK(n_chunks > 0, INVALID_ARGUMENT, err,
             "the text has %zu tokens, one chunk is %d; give a longer text or a smaller context",
             n_tokens, options->n_ctx);
    enum sluice_status status = SLUICE_STATUS_OK;
    struct sums sums = {0};
    float *const logits = sl_calloc(SL_MEM_EXEC, PIECE * (size_t)n_vocab, sizeof *logits);
    int32_t *const chunk = sl_calloc(SL_MEM_EXEC, (size_t)options->n_ctx, sizeof *chunk);
    if (!logits || !chunk) {
        status = sl_error_set(err, SLUICE_STATUS_OUT_OF_MEMORY, "no memory for logits");
        goto out;
    }
    for (size_t c = 0; c < n_chunks; c++) {
        SL_TRY_OUT(score_chunk(ctx, tokens + c * (size_t)options->n_ctx, n_vocab, options, logits,
                               chunk, &sums, err));
        const double so_far = exp(sums.nll / (double)sums.n);
        if (options->progress && options->progress(options->user, c + 1, n_chunks, so_far)) {
            status = sl_error_set(err, SLUICE_STATUS_CANCELLED, "cancelled");
            goto out;
        }
    }
    const double n = (double)sums.n, mean = sums.nll / n;
    out->perplexity = exp(mean);
    out->standard_error =
        out->perplexity * sqrt(fmax(0, sums.squares / n - mean * mean) / fmax(1, n - 1));
    out->n_chunks = n_chunks;
    out->n_scored = sums.n;
out:
    sl_free(logits);
    sl_free(chunk);
    return status;
}
