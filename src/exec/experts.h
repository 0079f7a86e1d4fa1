/* SPDX-License-Identifier: Apache-2.0
 *
 * Which experts of a mixture are in VRAM, and the tables that tell the kernels where each one is:
 * in its slot, in the ring, or in system memory. Slots are those of the plan; tiers have prefixes
 * of them. Of a fed layer's experts without a slot the plan's number come through the ring, those
 * that are used clearly more than others first.
 */
#ifndef SL_EXEC_EXPERTS_H
#define SL_EXEC_EXPERTS_H

#include "exec/context_internal.h"

/* Room for what the plan says; slots are given to experts evenly over the depth. Nothing to do
 * where the plan has no mixture on the device. `uses` [n_layers, n_experts], of earlier runs, or
 * NULL. */
enum sluice_status sl_experts_init(struct sl_context *ctx, const float *uses,
                                   struct sluice_error *err);
void sl_experts_finish(struct sl_context *ctx);

/* At the start of a pass of n tokens, all streams idle. Queues on the copy stream the experts of
 * slots that the tier has and the last one did not, those that were used most first, and in short
 * passes a few that were used more than others that have a slot (*copied is set); then the tables
 * on the compute stream. Experts that are on their way count as missing: nobody waits for them. */
enum sluice_status sl_experts_begin(struct sl_context *ctx, const struct sl_tier_plan *tier,
                                    int32_t n_tokens, bool *copied, struct sluice_error *err);
/* At the end of a pass: queue the counts on their way down; and when they are there, learn. */
enum sluice_status sl_experts_end(struct sl_context *ctx, struct sluice_error *err);
void sl_experts_learn(struct sl_context *ctx);
/* What is in VRAM is not trusted any more. */
void sl_experts_forget(struct sl_context *ctx);

/* Copy into the ring what a mixture lacks: all experts without a slot into the image of a streamed
 * one; of a fed one those that the tables of this pass say are there. */
enum sluice_status sl_experts_stream(struct sl_context *ctx, const struct sl_tier_plan *tier,
                                     int32_t shard, uint8_t *image, struct sluice_error *err);

/* The tables of a layer in VRAM, and how it is divided in this pass. */
void sl_experts_bind(const struct sl_context *ctx, uint32_t layer, struct sl_shard_bind *bind);

#endif
