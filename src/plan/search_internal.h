/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside of the search: what its outer loops (search.c) use of the search of one tier
 * (search_tier.c), and small things that all of it needs.
 */
#ifndef SL_PLAN_SEARCH_INTERNAL_H
#define SL_PLAN_SEARCH_INTERNAL_H

#include "plan/search.h"

#define SL_SEARCH_ALIGN 256u

static inline size_t sl_align_up(size_t n)
{
    return (n + SL_SEARCH_ALIGN - 1) & ~(size_t)(SL_SEARCH_ALIGN - 1);
}

static inline size_t sl_max_size(size_t a, size_t b)
{
    return a > b ? a : b;
}

static inline int32_t sl_max_int(int32_t a, int32_t b)
{
    return a > b ? a : b;
}

/* What a strategy leaves open. */
struct sl_bounds {
    bool ring[4];                     /* ring of 0, 1, 2, 3 largest shards */
    bool head[2];                     /* head on the host, on the device */
    bool attention[2];                /* attention with host KV: on the CPU, streamed */
    bool ffn_none, ffn_some, ffn_all; /* streamed share of the FFNs that are not resident */
    /* Mixtures that are not streamed: all on the CPU; shared by who has what; shared for equal
     * finish; all on the GPU. */
    bool ffn_host, ffn_shared, ffn_balanced, ffn_mapped;
    bool ffn_fed; /* shared, with a part through the ring */
    int32_t most_resident;
    bool fewer_resident; /* whole layers, or attention alone, where more would fit */
    bool whole;          /* resident must reach everything (that is on the device) */
    bool kv_all_only;    /* KV of all layers must be in VRAM */
    bool split;          /* shards are cut in two; else none is */
};

struct sl_bounds sl_bounds_of_strategy(enum sl_strategy strategy);

/* VRAM of a tier's activations. */
size_t sl_search_activation_bytes(const struct sl_search *s, int32_t tier, bool head_on_device);
/* Take a candidate whose counts are set, if it can run and is the fastest so far. */
void sl_search_keep_better(struct sl_search *s, struct sl_candidate *c, struct sl_candidate *best,
                           bool *found);
/* Best candidate of a tier that uses the device, for a number of layers with KV in VRAM; with
 * `feasible_only` the first that fits. False: none. */
bool sl_search_tier_within(struct sl_search *s, int32_t tier, int32_t n_kv_layers,
                           const struct sl_bounds *b, bool feasible_only,
                           struct sl_candidate *best);
/* The same plan with more or fewer of the feed-forwards streamed, if that is faster. */
void sl_search_refine(struct sl_search *s, struct sl_candidate *c);
/* Everything on the CPU; and whether that is an answer, too. */
struct sl_candidate sl_search_host_candidate(struct sl_search *s, int32_t tier);
bool sl_search_host_counts(const struct sl_search *s, enum sl_strategy strategy,
                           int32_t n_kv_layers);

#endif
