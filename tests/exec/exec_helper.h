/* SPDX-License-Identifier: Apache-2.0
 *
 * What the tests of the executor share: the tiny models of the fixtures, how far two runs are
 * apart, and a machine on which such models are worth splitting.
 */
#ifndef SL_TESTS_EXEC_HELPER_H
#define SL_TESTS_EXEC_HELPER_H

#include <stdint.h>

#include "exec/context.h"

/* The model of a fixture; the test fails unless it has at most `max_vocab` tokens. */
struct sl_model *helper_open_model(const char *name, int n_ctx, uint32_t max_vocab);
/* The tokens that the oracle was given; returns their number. */
int helper_read_tokens(const char *name, int32_t *tokens, int max);

/* A context on the CPU alone, with one thread. */
struct sl_context *helper_cpu_context(const struct sl_model *model, struct sl_plan_options plan);

/* What shards of a kind may be cut in, sl_shard_cut_end, and the unit that serves all of them. */
int32_t helper_cut_end(const struct sl_model *model, enum sl_shard_kind kind, int32_t *unit);

int32_t helper_best_of(const float *logits, uint32_t n);
/* Mean KL divergence of q from p, both [n_rows, n_vocab] logits. */
double helper_mean_kl(const float *p, const float *q, int n_rows, uint32_t n_vocab);

/* A machine on which tiny models are worth splitting: no fixed costs, and a link about as fast as
 * the CPU, so that plans mix all placements. */
void helper_eager_profile(struct sl_profile *p, int n_threads);

#endif
