/* SPDX-License-Identifier: Apache-2.0
 *
 * The planner's search space. A candidate of a tier is a handful of counts; everything else (what
 * is resident, where streamed shards lie over the depth, the map) follows from them by rule, so the
 * space is small enough to be searched whole, each point scored by the simulator.
 */
#ifndef SL_PLAN_SEARCH_H
#define SL_PLAN_SEARCH_H

#include "plan/plan.h"

/* VRAM for activations of a full pass of a tier, each rounded to 256 bytes. */
struct sl_tier_sizes {
    size_t hidden_bytes, io_bytes, workspace_bytes, scratch_bytes, logits_bytes;
};

/* No sharing: the CPU has the whole feed-forward. Of dense ones that are cut 0 means sharing. */
#define SL_SHARE_HOST (-1)

/* Costs of a class of mixture layers in one tier, taken apart. Of all experts that a full pass
 * uses. */
struct sl_mixture_cost {
    double route_ns;              /* GPU: norm, router, division */
    double fixed_ns, experts_ns;  /* GPU */
    double host_fixed_ns;         /* CPU */
    double host_ns, host_busy_ns; /* CPU alone, beside copies */
    double read_bytes, base_copy_ns;
};

struct sl_candidate {
    int32_t tier;
    int32_t n_kv_layers;     /* layers with KV in VRAM */
    int32_t n_resident;      /* prefix of the resident order */
    int32_t n_ffn_streamed;  /* of the FFNs that are not resident, spread evenly */
    int32_t n_slots;         /* mixtures: experts in VRAM */
    int32_t share;           /* FFNs that are not streamed, of mixtures or cut */
    int32_t n_fed;           /* mixtures: experts a layer that come through the ring; 0: none */
    bool attention_streamed; /* layers with KV on the host: streamed, else on the CPU */
    bool head_on_device;     /* resident or shared when the prefix reaches it, else streamed */
    bool uses_device;
    size_t ring_bytes;
    size_t top_bytes; /* ring and activations */
    struct sl_sim_result result;
};

/* What the search settled on. */
struct sl_choice {
    bool head_on_host; /* in all tiers: no place in the resident order */
    struct sl_split split;
    int32_t n_kv_layers;
    int32_t n_tiers;
    struct sl_candidate tiers[SL_N_TIERS];
    size_t arena_bytes;
    uint64_t smallest_budget_bytes;
};

struct sl_shard_brief {
    uint8_t kind; /* enum sl_shard_kind */
    int32_t layer, class_id;
};

/* What the resident order depends on. */
struct sl_order_kind {
    int32_t n_kv_layers, head_first, no_head;
};

/* What the CPU can take over from another engine: that one's time, and its own. */
struct sl_relief {
    double saved_ns, cpu_ns;
};

struct sl_search {
    const struct sl_model *model;
    const struct sl_profile *profile;
    struct sl_plan_options options;
    int32_t depth;
    int32_t n_shards, n_layers;
    int32_t n_tiers;              /* tiers up to the largest micro-batch asked for */
    int32_t first_tier, end_tier; /* those whose costs are known */
    /* The tier that goes on with all sequences. Where there are several, full passes of this tier
     * and of those below it are taken to be of as many sequences as tokens. */
    int32_t decode_tier;
    size_t page_bytes;
    uint64_t budget_bytes; /* usable: whole pages of the device allocator */
    bool head_on_host;     /* in the space that is searched */
    struct sl_split split; /* the one that is tried (sl_search_set_split) */
    size_t consts_bytes, kv_table_bytes, kv_layer_bytes;
    /* Of a layer's cache: in VRAM where it has a part there, and in system memory. Both all of it
     * but where attention is cut. */
    size_t kv_device_bytes, kv_host_bytes;
    size_t max_ffn_bytes, max_attention_bytes, head_bytes; /* packed images */
    size_t max_rest_bytes, max_attention_rest_bytes;       /* what is behind the cut */
    int32_t cut_unit, heads_unit;                          /* of feed-forwards, of attention */
    /* Mixtures, else 0: experts of all layers, bytes of a slot, and of the tables of all layers. */
    int32_t n_experts;
    size_t slot_bytes, tables_bytes;
    struct sl_tier_sizes sizes[SL_N_TIERS];
    struct sl_hop_cost hop[SL_N_TIERS];
    /* By shard: what the loops over candidates need of the model, close together. */
    struct sl_shard_brief *brief;
    /* By shard: packed, as part of the resident prefix (of a mixture its base alone, of one that is
     * cut what is before the cut), behind the cut, in the ring. item_bytes and is_in_prefix are of
     * the candidate that was placed last (sl_search_place). */
    size_t *image_bytes, *resident_bytes, *rest_bytes, *item_bytes;
    bool *is_in_prefix;
    struct sl_shard_cost *cost[SL_N_TIERS]; /* weights only; KV added per candidate */
    /* By class: of shards with what is before the cut in VRAM. */
    struct sl_shard_cost *cut_cost[SL_N_TIERS];
    double kv_copy_ns[SL_N_TIERS], kv_download_ns[SL_N_TIERS];
    struct sl_mixture_cost *mixture[SL_N_TIERS]; /* by class; NULL where dense */
    /* Where uses of experts are known, by tier: the part of what a pass reads of experts that the
     * first n slots hold [n_experts + 1], and what it reads beside what it would by even use. */
    float *hits[SL_N_TIERS];
    double reads[SL_N_TIERS];
    /* Scratch of the scoring loop. */
    struct sl_shard_cost *candidate_cost;
    const struct sl_shard_cost **cost_of; /* by shard, see sl_cost_candidate */
    uint8_t *placement;
    struct sl_step *steps;
    size_t *step_scratch;
    double *done_ns, *ready_ns;
    struct sl_relief *relief;     /* [2, n_shards], of sl_search_limit_ns */
    struct sl_timeline *timeline; /* filled by the next score; NULL: none */
    /* The resident order that was asked for last, and the bytes of its first n. */
    int32_t *order, n_order;
    size_t *order_bytes;
    struct sl_order_kind order_kind;
    bool layers_alike; /* a mixture, all layers of one class */
    /* Ways that are not looked for: candidates that place all shards as one of these are left out.
     */
    const struct sl_tier_plan *const *unlike;
    int32_t n_unlike;
    /* Not NULL: the search of a tier draws one of its candidates; of n_drawn so far. */
    uint64_t *random;
    int32_t n_drawn;
};

/* `only_tier`: the one that will be asked for, or SL_ALL_TIERS. */
#define SL_ALL_TIERS (-1)
enum sluice_status sl_search_init(struct sl_search *s, const struct sl_model *model,
                                  const struct sl_profile *profile,
                                  const struct sl_plan_options *options, int32_t only_tier,
                                  struct sluice_error *err);
void sl_search_finish(struct sl_search *s);

/* Find the best choice. BUDGET when the strategy does not fit. */
enum sluice_status sl_search_run(struct sl_search *s, struct sl_choice *out,
                                 struct sluice_error *err);

/* The best candidate of one tier in the space of a strategy, for a number of layers with KV in
 * VRAM; false when there is none. */
bool sl_search_tier(struct sl_search *s, enum sl_strategy strategy, int32_t tier,
                    int32_t n_kv_layers, struct sl_candidate *out);

/* How many sequences a full pass of a tier of n tokens belongs to: 1 or n. */
static inline int32_t sl_search_sequences(const struct sl_search *s, int32_t n_tokens)
{
    const bool many = s->options.n_seqs > 1 && n_tokens <= sl_tier_tokens[s->decode_tier];
    return many ? n_tokens : 1;
}

/* Whether attention brings its KV through the ring: of all layers where it is cut, else of those
 * with KV in system memory. */
static inline bool sl_search_streams_kv(const struct sl_search *s, const struct sl_candidate *c)
{
    return c->attention_streamed && (sl_split_cuts_kv(s->split) || c->n_kv_layers < s->n_layers);
}

/* From now on shards are cut like this. */
void sl_search_set_split(struct sl_search *s, struct sl_split split);

/* Rules that turn counts into placements; used by the search and to build the final plan. */
/* Fills s->order and returns how many there are; the same again costs nothing. */
int32_t sl_search_resident_order(struct sl_search *s, int32_t n_kv_layers);
size_t sl_search_base_bytes(const struct sl_search *s, int32_t n_kv_layers);
void sl_search_place(struct sl_search *s, const struct sl_candidate *c, uint8_t *placement);

/* Costs (cost.c). The candidate's are those of its tier with what depends on its counts; they live
 * until the next call. */
struct sl_shard_cost sl_cost_shard(const struct sl_search *s, const struct sl_shard *shard,
                                   int32_t n_tokens);
struct sl_shard_cost sl_cost_cut(const struct sl_search *s, const struct sl_shard *shard,
                                 int32_t n_tokens);
/* Add what the part of the cache costs that streamed attention brings along. */
void sl_cost_stream_kv(const struct sl_search *s, int32_t tier, struct sl_shard_cost *cost);
struct sl_mixture_cost sl_cost_mixture(const struct sl_search *s, const struct sl_shard *shard,
                                       int32_t n_tokens);
/* `hits` and `reads` of all tiers. */
enum sluice_status sl_cost_init_uses(struct sl_search *s, const float *uses,
                                     struct sluice_error *err);
/* No pass by this candidate takes less, as its counts alone tell; 0: they do not tell. */
double sl_cost_least_ns(const struct sl_search *s, const struct sl_candidate *c);
/* How much of what a pass reads of experts is in VRAM. */
double sl_cost_hit(const struct sl_search *s, const struct sl_candidate *c);
const struct sl_shard_cost *const *sl_cost_candidate(struct sl_search *s,
                                                     const struct sl_candidate *c);

/* What each engine does in a pass by this candidate; items for its steps must be there. */
void sl_search_timeline(struct sl_search *s, const struct sl_candidate *c,
                        struct sl_timeline *timeline);

/* Lower bound on the pass with these shards outside VRAM: docs/design.md, "The limit". */
double sl_search_limit_ns(const struct sl_search *s, const struct sl_candidate *c,
                          const uint8_t *placement);

#endif
