/* SPDX-License-Identifier: Apache-2.0
 *
 * Building a plan around the search (search.c): options in, VRAM map and compiled tiers out.
 */
#include "plan/plan.h"

#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/error.h"
#include "base/mem.h"
#include "plan/search.h"

static const char *const strategy_names[SL_N_STRATEGIES] = {
#define STRATEGY_NAME(name, text, help) text,
    SL_STRATEGY_LIST(STRATEGY_NAME)
#undef STRATEGY_NAME
};

const char *sl_strategy_name(enum sl_strategy strategy)
{
    return strategy < SL_N_STRATEGIES ? strategy_names[strategy] : "unknown";
}

bool sl_strategy_from_name(const char *name, enum sl_strategy *out)
{
    for (int i = 0; i < SL_N_STRATEGIES; i++) {
        if (strcasecmp(name, strategy_names[i]) == 0) {
            *out = (enum sl_strategy)i;
            return true;
        }
    }
    return false;
}

void sl_tier_plan_finish(struct sl_tier_plan *tier)
{
    sl_free(tier->placement);
    sl_free(tier->steps);
    sl_free(tier->timeline.items);
    memset(tier, 0, sizeof *tier);
}

void sl_plan_destroy(struct sl_plan **plan)
{
    if (!plan || !*plan) {
        return;
    }
    for (int32_t t = 0; t < (*plan)->n_tiers; t++) {
        sl_tier_plan_finish(&(*plan)->tiers[t]);
    }
    sl_free((*plan)->resident_order);
    sl_free((*plan)->resident_offset);
    sl_free((*plan)->resident_rank);
    sl_free(*plan);
    *plan = NULL;
}

/* Carve the activations of a tier out of the top of the arena. */
static void map_tier(struct sl_tier_plan *tier, const struct sl_search *s,
                     const struct sl_candidate *c, size_t arena_bytes)
{
    const struct sl_tier_sizes *const sizes = &s->sizes[c->tier];
    tier->uses_device = c->uses_device;
    if (!c->uses_device) {
        return;
    }
    tier->ring_bytes = c->ring_bytes;
    tier->ring_offset = arena_bytes - c->top_bytes;
    tier->hidden_offset = tier->ring_offset + c->ring_bytes;
    tier->io_offset = tier->hidden_offset + sizes->hidden_bytes;
    tier->workspace_offset = tier->io_offset + sizes->io_bytes;
    tier->scratch_offset = tier->workspace_offset + sizes->workspace_bytes;
    tier->logits_offset = tier->scratch_offset + sizes->scratch_bytes;
    tier->end_offset = tier->logits_offset + (c->head_on_device ? sizes->logits_bytes : 0);
}

/* `tier` is zeroed, and to be finished in any case. */
static enum sluice_status build_tier(struct sl_tier_plan *tier, const struct sl_plan *plan,
                                     struct sl_search *s, const struct sl_candidate *c,
                                     struct sluice_error *err)
{
    const int32_t n = plan->n_shards;
    tier->n_tokens = sl_tier_tokens[c->tier];
    tier->n_resident = c->n_resident;
    tier->n_slots = c->n_slots;
    tier->share = c->share;
    tier->n_fed = c->n_fed;
    tier->placement = sl_calloc(SL_MEM_PLAN, (size_t)n, sizeof *tier->placement);
    tier->steps = sl_calloc(SL_MEM_PLAN, (size_t)n * SL_STEPS_PER_SHARD, sizeof *tier->steps);
    SL_CHECK(tier->placement && tier->steps, OUT_OF_MEMORY, err, "no memory for a plan");
    sl_search_place(s, c, tier->placement);
    tier->n_steps = sl_steps_compile(tier->placement, s->item_bytes, n, c->ring_bytes, tier->steps,
                                     s->step_scratch);
    SL_CHECK(tier->n_steps > 0, INTERNAL, err, "a shard does not fit its ring");
    tier->timeline.items = sl_calloc(SL_MEM_PLAN, (size_t)tier->n_steps * SL_INTERVALS_PER_STEP,
                                     sizeof *tier->timeline.items);
    SL_CHECK(tier->timeline.items, OUT_OF_MEMORY, err, "no memory for a plan");
    sl_search_timeline(s, c, &tier->timeline);
    tier->predicted = tier->corrected = c->result;
    tier->corrected_depth = s->depth;
    tier->limit_ns = sl_search_limit_ns(s, c, tier->placement);
    map_tier(tier, s, c, plan->arena_bytes);
    return SLUICE_STATUS_OK;
}

/* Offsets that all tiers share. */
static enum sluice_status map_shared(struct sl_plan *plan, struct sl_search *s,
                                     const struct sl_choice *choice, struct sluice_error *err)
{
    const int32_t n = plan->n_shards;
    plan->resident_order = sl_calloc(SL_MEM_PLAN, (size_t)n, sizeof *plan->resident_order);
    plan->resident_offset = sl_calloc(SL_MEM_PLAN, (size_t)n, sizeof *plan->resident_offset);
    plan->resident_rank = sl_calloc(SL_MEM_PLAN, (size_t)n, sizeof *plan->resident_rank);
    SL_CHECK(plan->resident_order && plan->resident_offset && plan->resident_rank, OUT_OF_MEMORY,
             err, "no memory for a plan");
    plan->n_kv_layers = choice->n_kv_layers;
    plan->kv_layer_bytes = s->kv_device_bytes;
    plan->kv_host_layer_bytes = s->kv_host_bytes;
    plan->arena_bytes = choice->arena_bytes;
    plan->consts_offset = 0;
    plan->tables_offset = s->consts_bytes;
    plan->kv_table_offset = s->consts_bytes + s->tables_bytes;
    plan->kv_offset = plan->kv_table_offset + s->kv_table_bytes;
    plan->resident_base = sl_search_base_bytes(s, choice->n_kv_layers);
    memset(plan->resident_offset, 0xff, (size_t)n * sizeof *plan->resident_offset);
    plan->n_resident_order = sl_search_resident_order(s, choice->n_kv_layers);
    memcpy(plan->resident_order, s->order,
           (size_t)plan->n_resident_order * sizeof *plan->resident_order);
    for (int32_t i = 0; i < n; i++) {
        plan->resident_rank[i] = INT32_MAX;
    }
    size_t offset = plan->resident_base;
    for (int32_t i = 0; i < plan->n_resident_order; i++) {
        plan->resident_offset[plan->resident_order[i]] = offset;
        plan->resident_rank[plan->resident_order[i]] = i;
        offset += s->resident_bytes[plan->resident_order[i]];
    }
    plan->slots_offset = offset;
    plan->slot_bytes = s->slot_bytes;
    if (s->n_experts > 0) {
        plan->layer_tables_bytes = sl_plan_tables_bytes(s->model->hp.n_experts);
        plan->uses_offset = plan->tables_offset + (size_t)s->n_layers * plan->layer_tables_bytes;
    }
    for (int32_t t = 0; t < choice->n_tiers; t++) {
        plan->n_slots =
            choice->tiers[t].n_slots > plan->n_slots ? choice->tiers[t].n_slots : plan->n_slots;
    }
    return SLUICE_STATUS_OK;
}

static enum sluice_status check_split(const struct sl_model *model,
                                      const struct sl_plan_options *options, struct sl_split split,
                                      struct sluice_error *err)
{
    const int32_t blocks = split.kv_blocks;
    SL_CHECK(blocks == 0 || (blocks > 0 && blocks % SL_CUT_KV_BLOCKS == 0 &&
                             (blocks - 1) < (options->n_ctx - 1) / SL_KV_BLOCK &&
                             options->n_seqs <= 1 && split.kv_heads == 0),
             INVALID_ARGUMENT, err, "the cache cannot be cut at block %d", blocks);
    for (uint32_t i = 0; i < model->n_shards; i++) {
        const struct sl_shard *const shard = &model->shards[i];
        const int32_t cut = sl_shard_cut(model, shard, split);
        const int32_t end = sl_shard_cut_end(model, shard);
        SL_CHECK(cut == 0 || (cut > 0 && cut < end && cut % sl_shard_cut_unit(model, shard) == 0),
                 INVALID_ARGUMENT, err, "shard %u cannot be cut at %d of %d", i, cut, end);
    }
    return SLUICE_STATUS_OK;
}

static enum sluice_status check_options(const struct sl_plan_options *o, struct sluice_error *err)
{
    SL_CHECK(o->n_ctx >= 1, INVALID_ARGUMENT, err, "context size %d: at least 1 token is needed",
             o->n_ctx);
    SL_CHECK(o->n_seqs >= 0 && o->n_seqs <= SL_MAX_SEQS, INVALID_ARGUMENT, err,
             "%d sequences: up to %d work", o->n_seqs, SL_MAX_SEQS);
    SL_CHECK(o->max_ubatch >= 0, INVALID_ARGUMENT, err, "micro-batch %d: must not be negative",
             o->max_ubatch);
    SL_CHECK(o->max_outputs >= 1, INVALID_ARGUMENT, err, "at least one output row is needed");
    SL_CHECK(o->strategy < SL_N_STRATEGIES, INVALID_ARGUMENT, err, "unknown strategy");
    SL_CHECK(sl_kv_type_index(o->kv_types.k) >= 0 && sl_kv_type_index(o->kv_types.v) >= 0,
             INVALID_ARGUMENT, err, "KV cache of %s keys and %s values (F16, Q8_0 and Q4_0 work)",
             sl_type_name(o->kv_types.k), sl_type_name(o->kv_types.v));
    return SLUICE_STATUS_OK;
}

static enum sluice_status check_tier(const struct sl_plan *plan, const struct sl_model *model,
                                     const struct sl_tier_plan *tier, struct sluice_error *err)
{
    size_t resident_end = plan->resident_base;
    for (int32_t i = 0; i < tier->n_resident; i++) {
        const int32_t index = plan->resident_order[i];
        const struct sl_shard *const shard = &model->shards[index];
        const bool is_part = sl_shard_can_share(model, shard, plan->split);
        SL_CHECK(is_part || tier->placement[index] == SL_PLACE_RESIDENT, INTERNAL, err,
                 "plan: shard %d of the resident prefix is not resident", index);
        const size_t bytes = sl_shard_resident_bytes(model, shard, plan->split);
        resident_end = plan->resident_offset[index] + ((bytes + 255) & ~(size_t)255);
    }
    if (tier->n_slots > 0) {
        SL_CHECK(tier->n_resident == plan->n_resident_order, INTERNAL, err,
                 "plan: expert slots behind a resident prefix that is not whole");
        resident_end = plan->slots_offset + (size_t)tier->n_slots * plan->slot_bytes;
    }
    if (tier->uses_device) {
        SL_CHECK(resident_end <= tier->ring_offset, INTERNAL, err,
                 "plan: resident shards end at %zu, inside the ring at %zu", resident_end,
                 tier->ring_offset);
        SL_CHECK(tier->end_offset <= plan->arena_bytes, INTERNAL, err,
                 "plan: activations end at %zu, after the arena of %zu", tier->end_offset,
                 plan->arena_bytes);
    }
    for (int32_t i = 0; i < plan->n_shards; i++) {
        const struct sl_shard *const shard = &model->shards[i];
        const bool host = tier->placement[i] == SL_PLACE_HOST;
        SL_CHECK(host || tier->uses_device, INTERNAL, err,
                 "plan: shard %d is on a device that the tier does not use", i);
        const bool shared = sl_place_is_shared(tier->placement[i]);
        const bool needs_part =
            shared || (shard->expert_bytes > 0 && tier->placement[i] == SL_PLACE_RESIDENT);
        SL_CHECK(!needs_part || plan->resident_rank[i] < tier->n_resident, INTERNAL, err,
                 "plan: the GPU takes part in shard %d without what it needs of it", i);
        const bool can_share =
            shard->expert_bytes > 0 ||
            (sl_shard_can_share(model, shard, plan->split) &&
             (shard->kind == SL_SHARD_HEAD || tier->n_tokens <= SL_SHARD_PIECE_TOKENS));
        SL_CHECK(!shared || can_share, INTERNAL, err, "plan: shard %d cannot be shared", i);
        if (shard->kind == SL_SHARD_ATTENTION) {
            SL_CHECK(!host || (int32_t)shard->layer >= plan->n_kv_layers, INTERNAL, err,
                     "plan: attention of layer %u is on the CPU, its KV in VRAM", shard->layer);
            SL_CHECK(!sl_split_cuts_kv(plan->split) || (plan->resident_rank[i] < tier->n_resident &&
                                                        tier->placement[i] != SL_PLACE_RESIDENT),
                     INTERNAL, err, "plan: attention of layer %u does not follow its cut KV",
                     shard->layer);
        }
    }
    return SLUICE_STATUS_OK;
}

/* A search within the map of a plan. */
static enum sluice_status open_again(struct sl_search *s, const struct sl_plan *plan,
                                     const struct sl_model *model, const struct sl_profile *profile,
                                     const struct sl_replan *replan, struct sluice_error *err)
{
    struct sl_plan_options options = plan->options;
    options.depth = replan->depth > 0 ? replan->depth : 1;
    options.expert_uses = replan->expert_uses;
    SL_TRY(sl_search_init(s, model, profile, &options, replan->tier, err));
    s->budget_bytes = plan->arena_bytes;
    s->head_on_host = plan->resident_rank[plan->n_shards - 1] == INT32_MAX;
    sl_search_set_split(s, plan->split);
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_plan_tier_anew(struct sl_tier_plan *out, const struct sl_plan *plan,
                                     const struct sl_model *model, const struct sl_profile *profile,
                                     const struct sl_replan *replan, struct sluice_error *err)
{
    struct sl_search s;
    struct sl_candidate c = {0};
    enum sluice_status status = SLUICE_STATUS_OK;
    memset(out, 0, sizeof *out);
    SL_TRY(open_again(&s, plan, model, profile, replan, err));
    s.unlike = replan->unlike;
    s.n_unlike = replan->n_unlike;
    s.random = replan->random;
    if (sl_search_tier(&s, replan->strategy, replan->tier, plan->n_kv_layers, &c)) {
        status = build_tier(out, plan, &s, &c, err);
    } else {
        status = sl_error_set(err, SLUICE_STATUS_BUDGET, "no other way for passes of %d tokens",
                              sl_tier_tokens[replan->tier]);
    }
    if (status == SLUICE_STATUS_OK) {
        status = check_tier(plan, model, out, err);
    }
    if (status != SLUICE_STATUS_OK) {
        sl_tier_plan_finish(out);
    }
    sl_search_finish(&s);
    return status;
}

/* The counts that costs depend on. */
static struct sl_candidate candidate_of(const struct sl_plan *plan, int32_t t)
{
    const struct sl_tier_plan *const tier = &plan->tiers[t];
    struct sl_candidate c = {.tier = t,
                             .n_kv_layers = plan->n_kv_layers,
                             .n_resident = tier->n_resident,
                             .n_slots = tier->n_slots,
                             .share = tier->share,
                             .n_fed = tier->n_fed,
                             .uses_device = tier->uses_device,
                             .ring_bytes = tier->ring_bytes};
    for (int32_t layer = sl_plan_first_host_kv(plan); 2 * layer + 1 < plan->n_shards; layer++) {
        c.attention_streamed |= tier->placement[2 * layer] == SL_PLACE_STREAMED;
    }
    return c;
}

static struct sl_sim_result simulate_again(struct sl_search *s, const struct sl_plan *plan,
                                           int32_t t)
{
    const struct sl_tier_plan *const tier = &plan->tiers[t];
    const struct sl_candidate c = candidate_of(plan, t);
    sl_search_place(s, &c, s->placement); /* which shards bring KV along */
    return sl_steps_simulate(tier->steps, tier->n_steps, tier->placement, sl_cost_candidate(s, &c),
                             &s->hop[t], s->done_ns, s->ready_ns, NULL);
}

enum sluice_status sl_plan_predict(struct sl_sim_result *out, const struct sl_plan *plan,
                                   const struct sl_model *model, const struct sl_profile *profile,
                                   const struct sl_replan *replan, struct sluice_error *err)
{
    struct sl_search s;
    SL_TRY(open_again(&s, plan, model, profile, replan, err));
    *out = simulate_again(&s, plan, replan->tier);
    sl_search_finish(&s);
    return SLUICE_STATUS_OK;
}

/* What depth costs in each tier: on the way from the first token to the depth that is planned for,
 * and beyond. */
static enum sluice_status look_around(struct sl_plan *plan, const struct sl_model *model,
                                      const struct sl_profile *profile, const float *expert_uses,
                                      struct sluice_error *err)
{
    struct sl_search s;
    struct sl_replan at = {
        .tier = SL_ALL_TIERS, .depth = plan->depth + SL_DEEPER, .expert_uses = expert_uses};
    SL_TRY(open_again(&s, plan, model, profile, &at, err));
    for (int32_t t = 0; t < plan->n_tiers; t++) {
        const double ns = simulate_again(&s, plan, t).pass_ns - plan->tiers[t].predicted.pass_ns;
        plan->tiers[t].deeper_ns = ns > 0 ? ns : 0;
    }
    sl_search_finish(&s);
    at.depth = 0;
    SL_TRY(open_again(&s, plan, model, profile, &at, err));
    for (int32_t t = 0; t < plan->n_tiers; t++) {
        plan->tiers[t].shallow = simulate_again(&s, plan, t);
    }
    sl_search_finish(&s);
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_plan_check(const struct sl_plan *plan, const struct sl_model *model,
                                 struct sluice_error *err)
{
    SL_CHECK(!sl_split_cuts_kv(plan->split) || plan->n_kv_layers == (int32_t)model->hp.n_layers,
             INTERNAL, err, "plan: cut KV in %d layers alone", plan->n_kv_layers);
    SL_TRY(check_split(model, &plan->options, plan->split, err));
    SL_CHECK(plan->arena_bytes <= plan->options.budget_bytes, INTERNAL, err,
             "plan: the arena of %zu bytes is larger than the budget of %llu", plan->arena_bytes,
             (unsigned long long)plan->options.budget_bytes);
    for (int32_t t = 0; t < plan->n_tiers; t++) {
        SL_TRY(check_tier(plan, model, &plan->tiers[t], err));
    }
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_plan_create(struct sl_plan **out, const struct sl_model *model,
                                  const struct sl_profile *profile,
                                  const struct sl_plan_options *options, struct sluice_error *err)
{
    *out = NULL;
    SL_TRY(check_options(options, err));
    SL_TRY(check_split(model, options, options->split, err));
    struct sl_search s;
    SL_TRY(sl_search_init(&s, model, profile, options, SL_ALL_TIERS, err));
    enum sluice_status status = SLUICE_STATUS_OK;
    struct sl_choice choice;
    struct sl_plan *const plan = sl_calloc(SL_MEM_PLAN, 1, sizeof *plan);
    if (!plan) {
        status = sl_error_set(err, SLUICE_STATUS_OUT_OF_MEMORY, "no memory for a plan");
        goto out;
    }
    plan->options = s.options;
    plan->options.expert_uses = NULL; /* they are the caller's */
    plan->n_shards = (int32_t)model->n_shards;
    plan->depth = s.depth;
    SL_TRY_OUT(sl_search_run(&s, &choice, err));
    plan->smallest_budget_bytes = choice.smallest_budget_bytes;
    s.head_on_host = choice.head_on_host;
    sl_search_set_split(&s, choice.split);
    plan->split = choice.split;
    SL_TRY_OUT(map_shared(plan, &s, &choice, err));
    for (int32_t t = 0; t < choice.n_tiers; t++) {
        SL_TRY_OUT(build_tier(&plan->tiers[plan->n_tiers++], plan, &s, &choice.tiers[t], err));
    }
    plan->n_ubatch = plan->tiers[plan->n_tiers - 1].n_tokens;
    if (options->max_ubatch > 0 && options->max_ubatch < plan->n_ubatch) {
        plan->n_ubatch = options->max_ubatch;
    }
    SL_TRY_OUT(sl_plan_check(plan, model, err));
    SL_TRY_OUT(look_around(plan, model, profile, options->expert_uses, err));
    *out = plan;
out:
    sl_search_finish(&s);
    if (status != SLUICE_STATUS_OK) {
        struct sl_plan *half = plan;
        sl_plan_destroy(&half);
    }
    return status;
}
