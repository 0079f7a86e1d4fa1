/* SPDX-License-Identifier: Apache-2.0
 *
 * A context: one user of a model, with its plan, KV cache, VRAM arena and host buffers. Runs passes
 * of tokens through the plan and gives logits. One thread at a time per context.
 */
#ifndef SL_EXEC_CONTEXT_H
#define SL_EXEC_CONTEXT_H

#include "base/pool.h"
#include "cpu/cpu.h"
#include "device/device.h"
#include "model/model.h"
#include "plan/plan.h"

struct sl_context;
struct sl_trace;

struct sl_context_options {
    struct sl_device *device; /* borrowed; NULL: CPU only */
    struct sl_pool *pool;     /* borrowed; NULL: the caller's thread alone */
    /* Of the pool's threads, in passes that could be recorded (up to 16 tokens) and in longer ones;
     * both 0: all, and nobody changes the pool's limit. */
    int n_threads_short, n_threads_long;
    const struct sl_cpu_kernels *kernels; /* NULL: the best of this machine */
    const struct sl_profile *profile;     /* read during creation only */
    /* Passes correct the figures of the profile, and plans of generation are compared on real
     * passes (exec/adapt.h). Only where the plan is the planner's choice, and without a trace. */
    bool adapt;
    struct sl_plan_options plan;
    /* Of a mixture: how often each expert was used in earlier runs [n_layers, n_experts], read
     * during creation only; or NULL. */
    const float *expert_uses;
    struct sl_trace *trace; /* borrowed, records every pass; or NULL. See exec/trace.h */
    /* Polled between steps; true stops the pass with CANCELLED. May be NULL. */
    bool (*cancelled)(void *user);
    void *cancelled_user;
};

struct sl_context_stats {
    uint64_t arena_bytes;   /* VRAM allocated: the high-water mark, never over the budget */
    uint64_t host_kv_bytes; /* KV cache in system memory */
    uint64_t locked_bytes;  /* page-locked system memory */
    uint64_t copied_bytes;  /* weights and KV copied to the device by all passes */
    /* Mixtures of which some experts are in VRAM: how often an expert was chosen, how often it was
     * there, and how many were brought in beside the work. */
    uint64_t n_expert_uses, n_expert_hits, n_expert_swaps;
    uint64_t n_passes;
    uint64_t n_tokens;
    uint64_t last_pass_ns;
    int32_t last_tier;
    /* By tier: passes that were full, and their mean time, beside the plan's prediction. */
    uint64_t tier_passes[SL_N_TIERS];
    double tier_ns[SL_N_TIERS];
};

/* Plan, allocate, page-lock. BUDGET carries the smallest budget that works; nothing is left behind
 * on failure. `model` is borrowed and must outlive the context. */
enum sluice_status sl_context_create(struct sl_context **out, const struct sl_model *model,
                                     const struct sl_context_options *options,
                                     struct sluice_error *err);
void sl_context_destroy(struct sl_context **ctx);

/* A context has plan.n_seqs sequences, numbered from 0, all empty at first. They share one pool of
 * plan.n_ctx cache positions, in blocks of SL_KV_BLOCK that a sequence takes as it grows. Functions
 * without a `seq` are those of sequence 0. */

/* Append `n` tokens to a sequence, in passes of up to the micro-batch, and compute the logits of
 * the last n_outputs of them (0 .. n) into `logits` [n_outputs, n_vocab]. With logits NULL the
 * last min(n_outputs, max_outputs) rows stay in the context's own buffer (sl_context_logits).
 * INVALID_ARGUMENT when the context is full (nothing is computed then) or a token is out of range.
 * On any failure the sequence keeps the length of the last complete pass. */
enum sluice_status sl_context_eval_seq(struct sl_context *ctx, int32_t seq, const int32_t *tokens,
                                       int32_t n, int32_t n_outputs, float *logits,
                                       struct sluice_error *err);
enum sluice_status sl_context_eval(struct sl_context *ctx, const int32_t *tokens, int32_t n,
                                   int32_t n_outputs, float *logits, struct sluice_error *err);
/* Append tokens[i] to sequence seqs[i] for i < n, all different, in one pass (more where n is above
 * the micro-batch). Logits of all into `logits` [n, n_vocab]; with NULL they stay in the context's
 * own buffer, which takes n <= max_outputs and one pass. On any failure every sequence keeps the
 * length it had. */
enum sluice_status sl_context_decode(struct sl_context *ctx, const int32_t *seqs,
                                     const int32_t *tokens, int32_t n, float *logits,
                                     struct sluice_error *err);
/* The rows of the last evaluation with logits NULL; the caller may write to them (samplers do). */
float *sl_context_logits(struct sl_context *ctx);

/* Tokens in the cache; and forget all but the first n of them, which gives up their blocks. */
int32_t sl_context_seq_n_past(const struct sl_context *ctx, int32_t seq);
int32_t sl_context_n_past(const struct sl_context *ctx);
void sl_context_seq_truncate(struct sl_context *ctx, int32_t seq, int32_t n);
void sl_context_truncate(struct sl_context *ctx, int32_t n);
/* Sequence `to` becomes the first n tokens of `from`. Nothing is copied: both use the same blocks,
 * until one of them writes to a block that is not full, which it gets a copy of then. */
enum sluice_status sl_context_seq_copy(struct sl_context *ctx, int32_t from, int32_t to, int32_t n,
                                       struct sluice_error *err);
/* Forget n_drop tokens after the first n_keep; those behind them move up, their keys turned to the
 * new positions. What they saw of the dropped tokens stays in them. Takes the time of reading the
 * cache once or twice, not that of computing it. INVALID_ARGUMENT when there are not so many.
 * Should the device fail, the sequence is empty afterwards. */
enum sluice_status sl_context_seq_shift(struct sl_context *ctx, int32_t seq, int32_t n_keep,
                                        int32_t n_drop, struct sluice_error *err);
enum sluice_status sl_context_shift(struct sl_context *ctx, int32_t n_keep, int32_t n_drop,
                                    struct sluice_error *err);

/* Whether the plan of passes of n tokens is the last word: nothing else is being tried. And the
 * profile as passes have corrected it. */
bool sl_context_is_settled(const struct sl_context *ctx, int32_t n);
/* Try no longer: the best plans so far stay, until passes change. */
void sl_context_settle(struct sl_context *ctx);
const struct sl_profile *sl_context_profile(const struct sl_context *ctx);
/* Learn nothing from passes from now on: figures and plans stay as they are. */
void sl_context_freeze(struct sl_context *ctx);
/* Another plan of a tier, made by sl_plan_tier_anew for this context's plan, takes the place of the
 * one in use, which comes to *old; *next is empty then. False: it needs more than the context has,
 * and nothing changed. What is in either is the caller's to finish. Of a frozen context. */
bool sl_context_exchange_tier(struct sl_context *ctx, int32_t tier, struct sl_tier_plan *next,
                              struct sl_tier_plan *old);

/* Uses of experts, earlier runs counted in; the older the less they count. False where nobody
 * counts them: no mixture on the device. */
bool sl_context_get_expert_uses(const struct sl_context *ctx, float *out);

const struct sl_plan *sl_context_plan(const struct sl_context *ctx);
void sl_context_get_stats(const struct sl_context *ctx, struct sl_context_stats *out);

#endif
