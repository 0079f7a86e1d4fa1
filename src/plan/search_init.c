/* SPDX-License-Identifier: Apache-2.0
 *
 * What the search knows before it begins: sizes and costs of every shard in every tier, and what
 * cuts make of them.
 */
#include "plan/search_internal.h"

#include <math.h>
#include <string.h>

#include "base/error.h"
#include "base/mem.h"

/* The driver's time to replay a segment, beside that to queue an operator. */
#define GRAPH_ISSUE 2.0

#define PAGE_BYTES (2u << 20) /* what device allocators round to, unless told */

/* Streamed attention: the caches of its sequences come up, and what is new goes down, whole blocks
 * where each sequence has one of its own. */
static void init_tier_kv(struct sl_search *s, int32_t t)
{
    const int32_t n = sl_tier_tokens[t], n_sequences = sl_search_sequences(s, n);
    const double position_bytes = (double)s->kv_layer_bytes / s->options.n_ctx;
    const double in_use = fmin((double)s->depth * n_sequences, s->options.n_ctx);
    const double written = n_sequences > 1 ? (double)n * SL_KV_BLOCK : n;
    s->kv_copy_ns[t] = sl_profile_copy_ns(s->profile, (size_t)(in_use * position_bytes));
    s->kv_download_ns[t] = sl_profile_download_ns(s->profile, (size_t)(written * position_bytes));
}

static void init_tier(struct sl_search *s, int32_t t)
{
    const struct sl_model *const model = s->model;
    const int32_t n = sl_tier_tokens[t];
    const int32_t n_out = n < s->options.max_outputs ? n : s->options.max_outputs;
    struct sl_tier_sizes *const sizes = &s->sizes[t];
    sizes->hidden_bytes = sl_align_up((size_t)n * model->hp.n_embd * sizeof(float));
    sizes->io_bytes = sl_align_up((size_t)n * 2 * sizeof(int32_t));
    sizes->logits_bytes = sl_align_up((size_t)n_out * model->hp.n_vocab * sizeof(float));
    /* Classes repeat over the depth: cost one shard of each and copy it to its likes. */
    for (int32_t i = 0; i < s->n_shards; i++) {
        const struct sl_shard *const shard = &model->shards[i];
        int32_t twin = i - 1;
        while (twin >= 0 && model->shards[twin].class_id != shard->class_id) {
            twin--;
        }
        if (twin >= 0) {
            s->cost[t][i] = s->cost[t][twin];
            continue;
        }
        s->cost[t][i] = sl_cost_shard(s, shard, n);
        if (shard->expert_bytes > 0) {
            s->mixture[t][shard->class_id] = sl_cost_mixture(s, shard, n);
        }
        sizes->workspace_bytes = sl_max_size(
            sizes->workspace_bytes, sl_align_up(sl_shard_workspace_bytes(model, shard, n, n_out)));
        sizes->scratch_bytes = sl_max_size(
            sizes->scratch_bytes, sl_align_up(sl_shard_scratch_bytes(model, shard, n, n_out)));
    }
    const size_t hidden = (size_t)n * model->hp.n_embd * sizeof(float);
    s->hop[t].down_ns = s->profile->hop_ns / 2 + sl_profile_download_ns(s->profile, hidden);
    s->hop[t].up_ns = s->profile->hop_ns / 2 + sl_profile_copy_ns(s->profile, hidden);
    s->hop[t].graph_ns = t < SL_N_GRAPH_TIERS ? GRAPH_ISSUE * s->profile->issue_ns : 0;
    s->hop[t].copy_slowdown =
        s->profile->copy_busy_factor > 0 ? 1 / s->profile->copy_busy_factor : 1;
    init_tier_kv(s, t);
}

static size_t n_kv_blocks(const struct sl_search *s)
{
    return ((size_t)s->options.n_ctx + SL_KV_BLOCK - 1) / SL_KV_BLOCK;
}

/* Blocks of some KV heads of a layer. */
static size_t kv_bytes(const struct sl_search *s, int32_t n_heads, size_t n_blocks)
{
    return sl_align_up(
        n_blocks * sl_kv_block_bytes(s->options.kv_types, n_heads, (int32_t)s->model->hp.head_dim));
}

static void measure_shards(struct sl_search *s)
{
    for (int32_t i = 0; i < s->n_shards; i++) {
        const struct sl_shard *const shard = &s->model->shards[i];
        s->image_bytes[i] = sl_align_up(shard->bytes);
        s->brief[i] = (struct sl_shard_brief){(uint8_t)shard->kind, (int32_t)shard->layer,
                                              (int32_t)shard->class_id};
        switch (shard->kind) {
        case SL_SHARD_ATTENTION:
            if (s->options.n_seqs > 1) {
                s->kv_table_bytes =
                    sl_align_up((size_t)s->options.n_seqs * n_kv_blocks(s) * sizeof(int32_t));
            }
            s->max_attention_bytes = sl_max_size(s->max_attention_bytes, s->image_bytes[i]);
            s->heads_unit = sl_max_int(s->heads_unit, sl_shard_cut_unit(s->model, shard));
            s->kv_layer_bytes = kv_bytes(s, (int32_t)s->model->hp.n_kv_heads, n_kv_blocks(s));
            break;
        case SL_SHARD_FFN:
            s->max_ffn_bytes = sl_max_size(s->max_ffn_bytes, s->image_bytes[i]);
            s->slot_bytes = sl_max_size(s->slot_bytes, shard->expert_bytes);
            s->cut_unit = sl_max_int(s->cut_unit, sl_shard_cut_unit(s->model, shard));
            break;
        case SL_SHARD_HEAD:
            s->head_bytes = s->image_bytes[i];
            break;
        }
    }
}

/* Costs of the classes that are cut or look at a cut cache, once each. */
static void cost_cut_shard(struct sl_search *s, int32_t shard)
{
    const struct sl_shard *const shards = s->model->shards;
    for (int32_t k = 0; k < shard; k++) {
        if (shards[k].class_id == shards[shard].class_id) {
            return;
        }
    }
    for (int32_t t = s->first_tier; t < s->end_tier; t++) {
        s->cut_cost[t][shards[shard].class_id] = sl_cost_cut(s, &shards[shard], sl_tier_tokens[t]);
    }
}

static void set_kv_parts(struct sl_search *s)
{
    const int32_t n = (int32_t)s->model->hp.n_kv_heads, cut = s->split.kv_heads;
    const size_t n_blocks = n_kv_blocks(s), n_first = (size_t)s->split.kv_blocks;
    s->kv_device_bytes = kv_bytes(s, cut > 0 ? cut : n, n_first > 0 ? n_first : n_blocks);
    s->kv_host_bytes = kv_bytes(s, n - cut, n_blocks - n_first);
}

void sl_search_set_split(struct sl_search *s, struct sl_split split)
{
    const struct sl_model *const model = s->model;
    s->split = split;
    s->n_order = 0; /* its bytes are others now */
    s->max_rest_bytes = s->max_attention_rest_bytes = 0;
    set_kv_parts(s);
    for (int32_t i = 0; i < s->n_shards; i++) {
        const struct sl_shard *const shard = &model->shards[i];
        const int32_t cut = sl_shard_cut(model, shard, split);
        const int32_t end = sl_shard_cut_end(model, shard);
        s->resident_bytes[i] = sl_align_up(sl_shard_resident_bytes(model, shard, split));
        s->rest_bytes[i] = s->image_bytes[i];
        if (cut > 0) {
            s->rest_bytes[i] = sl_align_up(sl_shard_slice(model, shard, cut, end).bytes);
            cost_cut_shard(s, i);
        } else if (sl_shard_is_divided(shard, split)) {
            s->rest_bytes[i] = 0; /* its weights are in VRAM */
            cost_cut_shard(s, i);
        }
        if (shard->kind == SL_SHARD_FFN) {
            s->max_rest_bytes = sl_max_size(s->max_rest_bytes, s->rest_bytes[i]);
        } else if (shard->kind == SL_SHARD_ATTENTION) {
            s->max_attention_rest_bytes =
                sl_max_size(s->max_attention_rest_bytes, s->rest_bytes[i]);
        }
    }
}

static bool are_layers_alike(const struct sl_search *s)
{
    bool alike = s->n_experts > 0;
    for (int32_t i = 2; i + 1 < s->n_shards; i++) {
        alike = alike && s->brief[i].class_id == s->brief[i - 2].class_id;
    }
    return alike;
}

static int32_t count_tiers(const struct sl_plan_options *o)
{
    const int32_t most = o->max_ubatch > 0 ? o->max_ubatch : sl_tier_tokens[SL_N_TIERS - 1];
    const int32_t useful = most < o->n_ctx ? most : o->n_ctx;
    int32_t n = 1;
    while (n < SL_N_TIERS && sl_tier_tokens[n - 1] < useful) {
        n++;
    }
    return n;
}

enum sluice_status sl_search_init(struct sl_search *s, const struct sl_model *model,
                                  const struct sl_profile *profile,
                                  const struct sl_plan_options *options, int32_t only_tier,
                                  struct sluice_error *err)
{
    memset(s, 0, sizeof *s);
    s->model = model;
    s->profile = profile;
    s->options = *options;
    s->options.n_seqs = options->n_seqs > 0 ? options->n_seqs : 1;
    s->depth = options->depth > 0 ? options->depth : options->n_ctx / s->options.n_seqs / 2;
    s->n_shards = (int32_t)model->n_shards;
    s->n_layers = (int32_t)model->hp.n_layers;
    s->n_tiers = count_tiers(options);
    s->first_tier = only_tier == SL_ALL_TIERS ? 0 : only_tier;
    s->end_tier = only_tier == SL_ALL_TIERS ? s->n_tiers : only_tier + 1;
    while (s->decode_tier + 1 < s->n_tiers && sl_tier_tokens[s->decode_tier] < s->options.n_seqs) {
        s->decode_tier++;
    }
    s->page_bytes = options->page_bytes > 0 ? options->page_bytes : PAGE_BYTES;
    s->budget_bytes =
        profile->kind == SL_DEVICE_NONE ? 0 : options->budget_bytes / s->page_bytes * s->page_bytes;
    s->consts_bytes = sl_align_up(model->consts_bytes);
    const size_t n = (size_t)s->n_shards;
    bool good = true;
#define GRAB(field, count)                                                                         \
    good = good && (s->field = sl_calloc(SL_MEM_PLAN, (count), sizeof *s->field)) != NULL
    GRAB(brief, n);
    GRAB(image_bytes, n);
    GRAB(resident_bytes, n);
    GRAB(rest_bytes, n);
    GRAB(is_in_prefix, n);
    GRAB(item_bytes, n);
    GRAB(candidate_cost, n);
    GRAB(cost_of, n);
    GRAB(placement, n);
    GRAB(steps, n * SL_STEPS_PER_SHARD);
    GRAB(step_scratch, 2 * n);
    GRAB(done_ns, n);
    GRAB(ready_ns, n);
    GRAB(relief, 2 * n);
    GRAB(order, n);
    GRAB(order_bytes, n + 1);
    for (int32_t t = 0; t < s->n_tiers; t++) {
        GRAB(cost[t], n);
        GRAB(cut_cost[t], model->n_classes);
        GRAB(mixture[t], model->n_classes);
    }
#undef GRAB
    if (!good) {
        sl_search_finish(s);
        return sl_error_set(err, SLUICE_STATUS_OUT_OF_MEMORY, "no memory for the planner");
    }
    measure_shards(s);
    sl_search_set_split(s, (struct sl_split){0});
    if (s->slot_bytes > 0) {
        s->n_experts = s->n_layers * (int32_t)model->hp.n_experts;
        s->tables_bytes = (size_t)s->n_layers * sl_plan_tables_bytes(model->hp.n_experts) +
                          sl_align_up((size_t)s->n_experts * sizeof(int32_t));
    }
    if (s->n_experts > 0) {
        const enum sluice_status status = sl_cost_init_uses(s, options->expert_uses, err);
        if (status != SLUICE_STATUS_OK) {
            sl_search_finish(s);
            return status;
        }
    }
    for (int32_t t = s->first_tier; t < s->end_tier; t++) {
        init_tier(s, t);
    }
    s->layers_alike = are_layers_alike(s);
    return SLUICE_STATUS_OK;
}

void sl_search_finish(struct sl_search *s)
{
    sl_free(s->brief);
    sl_free(s->image_bytes);
    sl_free(s->resident_bytes);
    sl_free(s->rest_bytes);
    sl_free(s->is_in_prefix);
    sl_free(s->item_bytes);
    sl_free(s->candidate_cost);
    sl_free(s->cost_of);
    sl_free(s->placement);
    sl_free(s->steps);
    sl_free(s->step_scratch);
    sl_free(s->done_ns);
    sl_free(s->ready_ns);
    sl_free(s->relief);
    sl_free(s->order);
    sl_free(s->order_bytes);
    for (int32_t t = 0; t < SL_N_TIERS; t++) {
        sl_free(s->cost[t]);
        sl_free(s->cut_cost[t]);
        sl_free(s->mixture[t]);
        sl_free(s->hits[t]);
    }
    memset(s, 0, sizeof *s);
}
