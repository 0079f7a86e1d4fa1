/* SPDX-License-Identifier: Apache-2.0
 *
 * The planner: places every shard for every tier inside a VRAM budget, from the file's header and
 * the machine profile alone. Pure functions of numbers; what a plan says is what the executor
 * allocates.
 *
 * The VRAM map, one arena:
 *
 *   0                                                                             arena_bytes
 *   | consts | tables | KV of layers < n_kv_layers | resident shards -> ... | ring | activations |
 *
 * The first three parts are the same in all tiers. Resident shards lie in one fixed order
 * (attention in file order, FFNs so that any prefix is spread over the depth, the head), each tier
 * holding a prefix of it, so that switching tiers uploads only what the longer prefix has more.
 * Mixtures: what is resident of a feed-forward is its base (router, biases); behind the head come
 * slots of one expert each, of which a tier has a prefix too. Which experts are in them changes
 * while running; the tables say so to the kernels. In plans that cut dense feed-forwards and the
 * head (struct sl_split), what is resident of one is what is before the cut, and the head's follows
 * attention. Ring and activations sit at the top and differ between tiers.
 *
 * KV has one home for all tiers: layers < n_kv_layers keep it in VRAM (their attention then runs
 * on the GPU in every tier), the others in system memory (attention on the CPU, or streamed with
 * its KV). Where attention is cut, so is the KV of every layer: that of the first KV heads is in
 * VRAM, that of the others in system memory. Or the cache alone is cut, by blocks: the first ones
 * are in VRAM, and so are all weights of attention.
 *
 * Method: pipelined sharding, arXiv 2604.26334, with the counts searched instead of fixed.
 */
#ifndef SL_PLAN_PLAN_H
#define SL_PLAN_PLAN_H

#include "model/model.h"
#include "plan/profile.h"
#include "plan/steps.h"

/* Published strategies, as points of the search space, ways to go about single experts (of dense
 * models the same as ffn-host), the search among plans that cut shards in two (of mixtures the head
 * alone), and the search itself. */
#define SL_STRATEGY_LIST(X)                                                                        \
    X(AUTO, "auto", "search for the fastest plan")                                                 \
    X(HOST, "host", "everything on the CPU")                                                       \
    X(RESIDENT, "resident", "everything in VRAM")                                                  \
    X(RESIDENT_BUT_HEAD, "resident-but-head", "everything but the output head in VRAM")            \
    X(FFN_HOST, "ffn-host", "attention first in VRAM, then what fits; the rest on the CPU")        \
    X(FFN_STREAMED, "ffn-streamed",                                                                \
      "attention first in VRAM, then what fits; the rest streamed through one slot")               \
    X(STREAMED, "streamed", "every layer streamed through two slots")                              \
    X(EXPERTS_SHARED, "experts-shared",                                                            \
      "attention first in VRAM, then single experts; the other experts on the CPU meanwhile")      \
    X(EXPERTS_MAPPED, "experts-mapped",                                                            \
      "the same, but the GPU reads the other experts in system memory")                            \
    X(EXPERTS_FED, "experts-fed",                                                                  \
      "as experts-shared; in longer passes a part of the other experts is copied ahead")           \
    X(SPLIT, "split",                                                                              \
      "attention first in VRAM, then a part of every feed-forward and of the head; the other "     \
      "parts on the CPU meanwhile, or streamed")

enum sl_strategy {
#define SL_STRATEGY_ENUM(name, text, help) SL_STRATEGY_##name,
    SL_STRATEGY_LIST(SL_STRATEGY_ENUM)
#undef SL_STRATEGY_ENUM
        SL_N_STRATEGIES
};

const char *sl_strategy_name(enum sl_strategy strategy);
bool sl_strategy_from_name(const char *name, enum sl_strategy *out);

#define SL_MAX_SEQS 1024

struct sl_plan_options {
    uint64_t budget_bytes;       /* of VRAM, the driver's context not counted; 0: CPU only */
    int32_t n_ctx;               /* positions of the KV cache, of all sequences together */
    int32_t n_seqs;              /* sequences that decode together; 0: 1 */
    int32_t max_ubatch;          /* largest pass in tokens; 0: the planner chooses */
    int32_t depth;               /* cache positions of a sequence assumed when predicting;
                                    0: half of its share of n_ctx */
    int32_t max_outputs;         /* rows of logits made at a time; at least 1 */
    size_t page_bytes;           /* granularity of the device's allocator; 0: 2 MiB */
    struct sl_kv_types kv_types; /* of the cache */
    enum sl_strategy strategy;
    /* Of a mixture, how often each expert was used [n_layers, n_experts], read while planning only;
     * NULL: evenly, as far as is known. */
    const float *expert_uses;
    struct sl_split split; /* strategy split: cut like this; all 0: search */
};

/* Tiers whose passes are short enough for launches to count: the executor replays their runs of
 * resident shards as graphs, one launch each. */
#define SL_N_GRAPH_TIERS 3

#define SL_DEEPER 1024

struct sl_tier_plan {
    int32_t n_tokens;   /* passes of up to this many tokens */
    uint8_t *placement; /* enum sl_placement by shard */
    struct sl_step *steps;
    int32_t n_steps;
    int32_t n_resident; /* prefix of sl_plan.resident_order */
    int32_t n_slots;    /* expert slots, after the whole of resident_order */
    int32_t share;      /* of the experts without a slot: see struct sl_op_divide */
    int32_t n_fed;      /* fed mixtures: experts without a slot that come through the ring */
    bool uses_device;   /* any shard on the GPU */
    size_t ring_offset; /* in the arena */
    size_t ring_bytes;
    size_t hidden_offset; /* [n_tokens, n_embd] float */
    size_t io_offset;     /* positions, then sequences: int32 [n_tokens] each */
    size_t logits_offset; /* [min(n_tokens, max_outputs), n_vocab] float */
    size_t workspace_offset;
    size_t scratch_offset;
    size_t end_offset;              /* one past the last byte used: at most arena_bytes */
    struct sl_sim_result predicted; /* of a full pass at the assumed depth */
    struct sl_sim_result shallow;   /* of one at the beginning of a sequence */
    double deeper_ns;               /* what SL_DEEPER more positions before it add to such a pass */
    /* A pass by what passes have taught since (exec/adapt.h), and their depth. */
    struct sl_sim_result corrected;
    int32_t corrected_depth;
    struct sl_timeline timeline; /* the same pass in detail */
    double limit_ns; /* no schedule can be faster on this machine (bytes and operations) */
};

struct sl_plan {
    struct sl_plan_options options; /* n_seqs is at least 1 */
    int32_t n_shards;
    int32_t n_tiers;
    struct sl_tier_plan tiers[SL_N_TIERS];
    int32_t n_ubatch; /* tokens of the last tier */
    int32_t depth;    /* the depth used for predictions */

    struct sl_split split;   /* where shards are cut, in all tiers */
    int32_t *resident_order; /* shard indices; the resident candidates */
    int32_t n_resident_order;
    size_t *resident_offset; /* by shard; SIZE_MAX where it is no candidate */
    int32_t *resident_rank;  /* by shard: index in resident_order; INT32_MAX where it is none */

    /* Mixtures; all 0 otherwise. */
    int32_t n_slots; /* of the tier that has most */
    size_t slot_bytes, slots_offset;
    size_t tables_offset, layer_tables_bytes; /* see sl_plan_tables_bytes */
    size_t uses_offset;                       /* counts [n_layers, n_experts] int32 */

    int32_t n_kv_layers;   /* layers whose KV lives in VRAM: 0 .. this - 1; all where it is cut */
    size_t kv_layer_bytes; /* of these */
    size_t kv_host_layer_bytes; /* of the others, or of all where it is cut */
    size_t consts_offset, kv_table_offset, kv_offset, resident_base;
    size_t arena_bytes;
    /* Smallest budget in which the chosen strategy works with the GPU in use. */
    uint64_t smallest_budget_bytes;
};

/* The first layer with KV, or a part of it, in system memory; so have all behind it. */
static inline int32_t sl_plan_first_host_kv(const struct sl_plan *plan)
{
    return sl_split_cuts_kv(plan->split) ? 0 : plan->n_kv_layers;
}

/* Make a plan. `profile->kind` NONE or a budget of 0 gives the CPU-only plan. BUDGET (with the
 * smallest budget that works) when a forced strategy does not fit. With `auto`, a budget too small
 * for any use of the GPU gives the CPU-only plan. On failure *out is NULL. */
enum sluice_status sl_plan_create(struct sl_plan **out, const struct sl_model *model,
                                  const struct sl_profile *profile,
                                  const struct sl_plan_options *options, struct sluice_error *err);
void sl_plan_destroy(struct sl_plan **plan);

/* One tier planned anew, within the map of a plan: the same arena, KV homes and resident order, so
 * that the passes of both can follow one another. */
struct sl_replan {
    int32_t tier;
    int32_t depth;            /* cache positions of a sequence */
    const float *expert_uses; /* see struct sl_plan_options */
    enum sl_strategy strategy;
    const struct sl_tier_plan *const *unlike; /* [n_unlike]: it must place the shards otherwise */
    int32_t n_unlike;
    /* Not NULL, the state of a random generator: not the fastest, but one of all that were looked
     * at and can run, drawn at random. To judge the search by. */
    uint64_t *random;
};

/* BUDGET when the strategy has no (other) way. Takes milliseconds. The result ends with
 * sl_tier_plan_finish. */
enum sluice_status sl_plan_tier_anew(struct sl_tier_plan *out, const struct sl_plan *plan,
                                     const struct sl_model *model, const struct sl_profile *profile,
                                     const struct sl_replan *replan, struct sluice_error *err);
void sl_tier_plan_finish(struct sl_tier_plan *tier);
/* What a full pass of a tier takes by another profile, at another depth, with other uses of
 * experts; strategy and unlike do not matter. */
enum sluice_status sl_plan_predict(struct sl_sim_result *out, const struct sl_plan *plan,
                                   const struct sl_model *model, const struct sl_profile *profile,
                                   const struct sl_replan *replan, struct sluice_error *err);

/* The tier for a pass of n tokens (at most n_ubatch): the smallest that holds it. */
int32_t sl_plan_tier(const struct sl_plan *plan, int32_t n_tokens);

/* Predicted time to the first token of a prompt that follows n_past positions, and tokens per
 * second of decode, of all sequences together. */
double sl_plan_ttft_ns(const struct sl_plan *plan, int32_t n_past, int32_t n_prompt);
double sl_plan_tps(const struct sl_plan *plan);
/* The same of sequences of `depth` tokens. */
double sl_plan_tps_at(const struct sl_plan *plan, int32_t depth);
/* The same by the corrected predictions. */
double sl_plan_corrected_ttft_ns(const struct sl_plan *plan, int32_t n_past, int32_t n_prompt);
double sl_plan_corrected_tps_at(const struct sl_plan *plan, int32_t depth);

/* The tables of one layer of a mixture: addresses of gate, up and down by expert, then a byte an
 * expert: 1 where it has a slot. */
static inline size_t sl_plan_tables_bytes(uint32_t n_experts)
{
    return ((size_t)n_experts * (3 * sizeof(void *) + 1) + 255) & ~(size_t)255;
}

/* Invariants: parts of the map do not overlap and end inside arena and budget, every streamed
 * shard fits the ring, KV homes agree with placements. INTERNAL names the broken one. */
enum sluice_status sl_plan_check(const struct sl_plan *plan, const struct sl_model *model,
                                 struct sluice_error *err);

#endif
