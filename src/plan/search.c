/* SPDX-License-Identifier: Apache-2.0
 *
 * The search (see search.h). Outer loop: how many layers keep their KV in VRAM, one number for all
 * tiers. Inner loop, per tier: ring size, where the head and the remaining attention go, and how
 * many of the FFNs that are not resident are streamed. Residency itself is hardly a variable: as
 * much of the resident order as fits, or the layers that are resident as a whole, or attention
 * alone. (An FFN on the GPU between two attentions on the CPU costs two moves of the hidden state,
 * which can be more than it gains.) Where shards are cut in two, where is one more outer loop, over
 * the few cuts that fill VRAM or let both sides end together.
 */
#include "plan/search.h"

#include <math.h>
#include <string.h>

#include "base/error.h"
#include "base/mem.h"

#define ALIGN 256u
#define PAGE_BYTES (2u << 20) /* what device allocators round to, unless told */
/* What a plan is judged by: an answer of GENERATED tokens to a prompt of PROMPT. */
#define SCORE_GENERATED 128.0
#define SCORE_PROMPT 512.0
#define MAX_KV_CANDIDATES 10
#define FFN_GRID 12
#define MIXTURE_GRID 4 /* their slots vary what is streamed already */
#define SPLIT_GRID 6   /* so do cuts */
/* Feeding copies experts that nobody uses, too: not worth a try where they are most of them. */
#define FED_LEAST_READ 0.25
/* Half as fine as the number of a layer's experts that are fed is searched. */
#define FED_STEPS 64
#define MAX_SPLITS 24
/* What cuts have to gain: both sides wait for each other more often, which prediction thinks too
 * little of. */
#define SPLIT_MARGIN 1.02
#define LEAST_HEAD_PART (1 / 16.0) /* less is not worth one more meeting of both sides */

static size_t align_up(size_t n)
{
    return (n + ALIGN - 1) & ~(size_t)(ALIGN - 1);
}

static size_t max_size(size_t a, size_t b)
{
    return a > b ? a : b;
}

static int32_t max_int(int32_t a, int32_t b)
{
    return a > b ? a : b;
}

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
    sizes->hidden_bytes = align_up((size_t)n * model->hp.n_embd * sizeof(float));
    sizes->io_bytes = align_up((size_t)n * 2 * sizeof(int32_t));
    sizes->logits_bytes = align_up((size_t)n_out * model->hp.n_vocab * sizeof(float));
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
        sizes->workspace_bytes = max_size(
            sizes->workspace_bytes, align_up(sl_shard_workspace_bytes(model, shard, n, n_out)));
        sizes->scratch_bytes = max_size(sizes->scratch_bytes,
                                        align_up(sl_shard_scratch_bytes(model, shard, n, n_out)));
    }
    const size_t hidden = (size_t)n * model->hp.n_embd * sizeof(float);
    s->hop[t].down_ns = s->profile->hop_ns / 2 + sl_profile_download_ns(s->profile, hidden);
    s->hop[t].up_ns = s->profile->hop_ns / 2 + sl_profile_copy_ns(s->profile, hidden);
    s->hop[t].copy_slowdown =
        s->profile->copy_busy_factor > 0 ? 1 / s->profile->copy_busy_factor : 1;
    init_tier_kv(s, t);
}

static void measure_shards(struct sl_search *s)
{
    for (int32_t i = 0; i < s->n_shards; i++) {
        const struct sl_shard *const shard = &s->model->shards[i];
        s->image_bytes[i] = align_up(shard->bytes);
        switch (shard->kind) {
        case SL_SHARD_ATTENTION: {
            const size_t n_blocks = ((size_t)s->options.n_ctx + SL_KV_BLOCK - 1) / SL_KV_BLOCK;
            if (s->options.n_seqs > 1) {
                s->kv_table_bytes =
                    align_up((size_t)s->options.n_seqs * n_blocks * sizeof(int32_t));
            }
            s->max_attention_bytes = max_size(s->max_attention_bytes, s->image_bytes[i]);
            s->heads_unit = max_int(s->heads_unit, sl_shard_cut_unit(s->model, shard));
            s->kv_layer_bytes = align_up(
                n_blocks * sl_kv_block_bytes(s->options.kv_types, (int32_t)s->model->hp.n_kv_heads,
                                             (int32_t)s->model->hp.head_dim));
            break;
        }
        case SL_SHARD_FFN:
            s->max_ffn_bytes = max_size(s->max_ffn_bytes, s->image_bytes[i]);
            s->slot_bytes = max_size(s->slot_bytes, shard->expert_bytes);
            s->cut_unit = max_int(s->cut_unit, sl_shard_cut_unit(s->model, shard));
            break;
        case SL_SHARD_HEAD:
            s->head_bytes = s->image_bytes[i];
            break;
        }
    }
}

/* Costs of the classes that are cut, once each. */
static void cost_cut_shard(struct sl_search *s, int32_t shard)
{
    const struct sl_shard *const shards = s->model->shards;
    for (int32_t k = 0; k < shard; k++) {
        if (shards[k].class_id == shards[shard].class_id) {
            return;
        }
    }
    for (int32_t t = 0; t < s->n_tiers; t++) {
        s->cut_cost[t][shards[shard].class_id] = sl_cost_cut(s, &shards[shard], sl_tier_tokens[t]);
    }
}

static void set_kv_parts(struct sl_search *s)
{
    const struct sl_hparams *const hp = &s->model->hp;
    const int32_t n = (int32_t)hp->n_kv_heads, cut = s->split.kv_heads;
    const int32_t head_dim = (int32_t)hp->head_dim;
    const size_t n_blocks = ((size_t)s->options.n_ctx + SL_KV_BLOCK - 1) / SL_KV_BLOCK;
    const struct sl_kv_types types = s->options.kv_types;
    s->kv_device_bytes = align_up(n_blocks * sl_kv_block_bytes(types, cut > 0 ? cut : n, head_dim));
    s->kv_host_bytes = align_up(n_blocks * sl_kv_block_bytes(types, n - cut, head_dim));
}

void sl_search_set_split(struct sl_search *s, struct sl_split split)
{
    const struct sl_model *const model = s->model;
    s->split = split;
    s->max_rest_bytes = s->max_attention_rest_bytes = 0;
    set_kv_parts(s);
    for (int32_t i = 0; i < s->n_shards; i++) {
        const struct sl_shard *const shard = &model->shards[i];
        const int32_t cut = sl_shard_cut(model, shard, split);
        const int32_t end = sl_shard_cut_end(model, shard);
        s->resident_bytes[i] = align_up(sl_shard_resident_bytes(model, shard, split));
        s->rest_bytes[i] = s->image_bytes[i];
        if (cut > 0) {
            s->rest_bytes[i] = align_up(sl_shard_slice(model, shard, cut, end).bytes);
            cost_cut_shard(s, i);
        }
        if (shard->kind == SL_SHARD_FFN) {
            s->max_rest_bytes = max_size(s->max_rest_bytes, s->rest_bytes[i]);
        } else if (shard->kind == SL_SHARD_ATTENTION) {
            s->max_attention_rest_bytes = max_size(s->max_attention_rest_bytes, s->rest_bytes[i]);
        }
    }
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
                                  const struct sl_plan_options *options, struct sluice_error *err)
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
    while (s->decode_tier + 1 < s->n_tiers && sl_tier_tokens[s->decode_tier] < s->options.n_seqs) {
        s->decode_tier++;
    }
    s->page_bytes = options->page_bytes > 0 ? options->page_bytes : PAGE_BYTES;
    s->budget_bytes =
        profile->kind == SL_DEVICE_NONE ? 0 : options->budget_bytes / s->page_bytes * s->page_bytes;
    s->consts_bytes = align_up(model->consts_bytes);
    const size_t n = (size_t)s->n_shards;
    bool good = true;
#define GRAB(field, count)                                                                         \
    good = good && (s->field = sl_calloc(SL_MEM_PLAN, (count), sizeof *s->field)) != NULL
    GRAB(image_bytes, n);
    GRAB(resident_bytes, n);
    GRAB(rest_bytes, n);
    GRAB(is_in_prefix, n);
    GRAB(item_bytes, n);
    GRAB(candidate_cost, n);
    GRAB(placement, n);
    GRAB(steps, n * SL_STEPS_PER_SHARD);
    GRAB(step_scratch, 2 * n);
    GRAB(done_ns, n);
    GRAB(ready_ns, n);
    GRAB(order, n);
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
                          align_up((size_t)s->n_experts * sizeof(int32_t));
    }
    if (s->n_experts > 0) {
        const enum sluice_status status = sl_cost_init_uses(s, options->expert_uses, err);
        if (status != SLUICE_STATUS_OK) {
            sl_search_finish(s);
            return status;
        }
    }
    for (int32_t t = 0; t < s->n_tiers; t++) {
        init_tier(s, t);
    }
    return SLUICE_STATUS_OK;
}

void sl_search_finish(struct sl_search *s)
{
    sl_free(s->image_bytes);
    sl_free(s->resident_bytes);
    sl_free(s->rest_bytes);
    sl_free(s->is_in_prefix);
    sl_free(s->item_bytes);
    sl_free(s->candidate_cost);
    sl_free(s->placement);
    sl_free(s->steps);
    sl_free(s->step_scratch);
    sl_free(s->done_ns);
    sl_free(s->ready_ns);
    sl_free(s->order);
    for (int32_t t = 0; t < SL_N_TIERS; t++) {
        sl_free(s->cost[t]);
        sl_free(s->cut_cost[t]);
        sl_free(s->mixture[t]);
        sl_free(s->hits[t]);
    }
    memset(s, 0, sizeof *s);
}

static int32_t reverse_bits(int32_t value, int32_t n_bits)
{
    int32_t out = 0;
    for (int32_t i = 0; i < n_bits; i++) {
        out = out << 1 | (value >> i & 1);
    }
    return out;
}

int32_t sl_search_resident_order(const struct sl_search *s, int32_t n_kv_layers, int32_t *order)
{
    int32_t n = 0;
    for (int32_t i = 0; i < s->n_shards; i++) {
        const struct sl_shard *const shard = &s->model->shards[i];
        if (shard->kind == SL_SHARD_ATTENTION && (int32_t)shard->layer < n_kv_layers) {
            order[n++] = i;
        }
    }
    if (s->split.head > 0) {
        order[n++] = s->n_shards - 1;
    }
    /* Any prefix is spread evenly over the depth, so that the copies of the others hide behind the
     * work of the resident ones: layers in the order of their bits read backwards. */
    int32_t n_bits = 0;
    while ((1 << n_bits) < s->n_layers) {
        n_bits++;
    }
    for (int32_t r = 0; r < 1 << n_bits; r++) {
        const int32_t layer = reverse_bits(r, n_bits);
        if (layer < s->n_layers) {
            order[n++] = 2 * layer + 1; /* its FFN */
        }
    }
    if (!s->head_on_host && s->split.head == 0) {
        order[n++] = s->n_shards - 1;
    }
    return n;
}

size_t sl_search_base_bytes(const struct sl_search *s, int32_t n_kv_layers)
{
    return s->consts_bytes + s->tables_bytes + s->kv_table_bytes +
           (size_t)n_kv_layers * s->kv_device_bytes;
}

/* FFN number j of m that are not resident: streamed when an even spread of n says so. The first of
 * a group stays on the host: the copy of the streamed one hides behind it. */
static bool spread(int32_t j, int32_t m, int32_t n)
{
    return (int64_t)(j + 1) * n / m != (int64_t)j * n / m;
}

/* Where an FFN goes that is not resident as a whole: of a mixture, cut, or beyond the prefix. */
static enum sl_placement place_ffn(const struct sl_search *s, const struct sl_candidate *c,
                                   int32_t shard, bool streamed)
{
    if (c->n_fed > 0) {
        return SL_PLACE_FED;
    }
    if (streamed) {
        return SL_PLACE_STREAMED;
    }
    if (s->n_experts > 0) {
        return c->share == SL_SHARE_HOST   ? SL_PLACE_HOST
               : c->share == SL_DIVIDE_ALL ? SL_PLACE_RESIDENT
                                           : SL_PLACE_SHARED;
    }
    return s->is_in_prefix[shard] && c->share != SL_SHARE_HOST ? SL_PLACE_SHARED : SL_PLACE_HOST;
}

static enum sl_placement place_head(const struct sl_search *s, const struct sl_candidate *c)
{
    if (!c->head_on_device) {
        return SL_PLACE_HOST;
    }
    return !s->is_in_prefix[s->n_shards - 1] ? SL_PLACE_STREAMED
           : s->split.head > 0               ? SL_PLACE_SHARED
                                             : SL_PLACE_RESIDENT;
}

void sl_search_place(struct sl_search *s, const struct sl_candidate *c, uint8_t *placement)
{
    const int32_t n_order = sl_search_resident_order(s, c->n_kv_layers, s->order);
    memset(s->is_in_prefix, 0, (size_t)s->n_shards * sizeof *s->is_in_prefix);
    for (int32_t i = 0; i < c->n_resident; i++) {
        s->is_in_prefix[s->order[i]] = true;
    }
    const bool in_parts = s->n_experts > 0 || s->split.ffn > 0; /* no FFN is resident as a whole */
    int32_t n_ffn = in_parts ? s->n_layers : 0;
    for (int32_t i = c->n_resident; i < n_order && !in_parts; i++) {
        n_ffn += s->model->shards[s->order[i]].kind == SL_SHARD_FFN;
    }
    int32_t j = 0;
    for (int32_t i = 0; i < s->n_shards; i++) {
        const struct sl_shard *const shard = &s->model->shards[i];
        const bool there = s->is_in_prefix[i];
        s->item_bytes[i] = there ? s->rest_bytes[i] : s->image_bytes[i];
        if (shard->kind == SL_SHARD_HEAD) {
            placement[i] = place_head(s, c);
        } else if (shard->kind == SL_SHARD_FFN) {
            placement[i] = there && !in_parts
                               ? SL_PLACE_RESIDENT
                               : place_ffn(s, c, i, spread(j++, n_ffn, c->n_ffn_streamed));
            if (placement[i] == SL_PLACE_FED) {
                s->item_bytes[i] = (size_t)c->n_fed * s->slot_bytes;
            }
        } else {
            const bool kv_here = (int32_t)shard->layer < c->n_kv_layers;
            const bool cut = s->split.kv_heads > 0;
            s->item_bytes[i] += kv_here && !cut ? 0 : s->kv_host_bytes;
            placement[i] = there && cut
                               ? (c->attention_streamed ? SL_PLACE_STREAMED : SL_PLACE_SHARED)
                           : there                            ? SL_PLACE_RESIDENT
                           : kv_here || c->attention_streamed ? SL_PLACE_STREAMED
                                                              : SL_PLACE_HOST;
        }
    }
}

/* Score a candidate whose counts are set; false when it cannot run. */
static bool score(struct sl_search *s, struct sl_candidate *c)
{
    sl_search_place(s, c, s->placement);
    const int32_t n_steps = sl_steps_compile(s->placement, s->item_bytes, s->n_shards,
                                             c->ring_bytes, s->steps, s->step_scratch);
    if (n_steps < 0) {
        return false;
    }
    c->result = sl_steps_simulate(s->steps, n_steps, s->placement, sl_cost_candidate(s, c),
                                  &s->hop[c->tier], s->done_ns, s->ready_ns, s->timeline);
    return true;
}

void sl_search_timeline(struct sl_search *s, const struct sl_candidate *c,
                        struct sl_timeline *timeline)
{
    struct sl_candidate again = *c;
    s->timeline = timeline;
    score(s, &again);
    s->timeline = NULL;
}

/* Set n_resident to what fits; false when the fixed parts alone do not. */
static bool fill_resident(struct sl_search *s, struct sl_candidate *c, int32_t most)
{
    size_t used = sl_search_base_bytes(s, c->n_kv_layers) + c->top_bytes;
    if (used > s->budget_bytes) {
        return false;
    }
    const int32_t n_order = sl_search_resident_order(s, c->n_kv_layers, s->order);
    c->n_resident = 0;
    while (c->n_resident < n_order && c->n_resident < most) {
        const int32_t i = s->order[c->n_resident];
        if (i == s->n_shards - 1 && !c->head_on_device && s->split.head == 0) {
            break;
        }
        if (used + s->resident_bytes[i] > s->budget_bytes) {
            break;
        }
        used += s->resident_bytes[i];
        c->n_resident++;
    }
    c->n_slots = 0;
    if (s->n_experts > 0 && c->n_resident == n_order) {
        const uint64_t fit = (s->budget_bytes - used) / s->slot_bytes;
        c->n_slots = fit < (uint64_t)s->n_experts ? (int32_t)fit : s->n_experts;
    }
    return true;
}

/* What a strategy leaves open. */
struct bounds {
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

static struct bounds strategy_bounds(enum sl_strategy strategy)
{
    struct bounds b = {.most_resident = INT32_MAX};
    switch (strategy) {
    case SL_STRATEGY_AUTO:
    case SL_STRATEGY_SPLIT:
        b = (struct bounds){{true, true, true, true},
                            {true, true},
                            {true, true},
                            true,
                            true,
                            true,
                            true,
                            true,
                            true,
                            true,
                            true,
                            INT32_MAX,
                            true,
                            false,
                            false,
                            false};
        if (strategy == SL_STRATEGY_SPLIT) { /* there are many cuts: the rest is kept small */
            b.split = true;
            b.fewer_resident = false;
        }
        break;
    case SL_STRATEGY_HOST:
        break;
    case SL_STRATEGY_RESIDENT:
    case SL_STRATEGY_RESIDENT_BUT_HEAD:
        b.ring[0] = true;
        b.head[strategy == SL_STRATEGY_RESIDENT] = true;
        b.attention[0] = true;
        b.ffn_none = true;
        b.whole = true;
        b.kv_all_only = true;
        break;
    case SL_STRATEGY_FFN_HOST:
    case SL_STRATEGY_EXPERTS_SHARED:
    case SL_STRATEGY_EXPERTS_MAPPED:
    case SL_STRATEGY_EXPERTS_FED:
        b.ring[0] = true;
        b.head[0] = b.head[1] = true;
        b.attention[0] = true;
        b.ffn_none = true;
        b.ffn_host = strategy == SL_STRATEGY_FFN_HOST;
        b.ffn_shared = strategy != SL_STRATEGY_EXPERTS_MAPPED;
        b.ffn_balanced =
            strategy == SL_STRATEGY_EXPERTS_SHARED || strategy == SL_STRATEGY_EXPERTS_FED;
        b.ffn_mapped = strategy == SL_STRATEGY_EXPERTS_MAPPED;
        b.ffn_fed = strategy == SL_STRATEGY_EXPERTS_FED;
        b.ring[1] = b.ring[2] = b.ring[3] = b.ffn_fed;
        break;
    case SL_STRATEGY_FFN_STREAMED:
        b.ring[0] = b.ring[1] = true;
        b.head[1] = true;
        b.attention[1] = true;
        b.ffn_all = true;
        break;
    case SL_STRATEGY_STREAMED:
    default:
        b.ring[2] = true;
        b.head[1] = true;
        b.attention[1] = true;
        b.ffn_all = true;
        b.most_resident = 0;
        break;
    }
    return b;
}

static size_t activation_bytes(const struct sl_search *s, int32_t tier, bool head_on_device)
{
    const struct sl_tier_sizes *const z = &s->sizes[tier];
    return z->hidden_bytes + z->io_bytes + z->workspace_bytes + z->scratch_bytes +
           (head_on_device ? z->logits_bytes : 0);
}

/* Whether attention brings its KV through the ring; and the largest such item, else 0. */
static bool streams_kv(const struct sl_search *s, const struct sl_candidate *c)
{
    return c->attention_streamed && (s->split.kv_heads > 0 || c->n_kv_layers < s->n_layers);
}

static size_t attention_item_bytes(const struct sl_search *s, const struct sl_candidate *c)
{
    return streams_kv(s, c) ? s->max_attention_rest_bytes + s->kv_host_bytes : 0;
}

/* Ring size for a multiple of the largest shard that may be streamed in this candidate. Of
 * feed-forwards that are cut only the rest comes, if all have their part in the prefix. */
static size_t ring_bytes(const struct sl_search *s, const struct sl_candidate *c, int32_t multiple,
                         bool head_streamed, bool ffn_whole)
{
    size_t item = max_size(ffn_whole ? s->max_ffn_bytes : s->max_rest_bytes,
                           s->split.kv_heads > 0 ? 0 : s->max_attention_bytes);
    item = max_size(item, attention_item_bytes(s, c));
    size_t bytes = (size_t)multiple * item;
    if (multiple > 0 && head_streamed) {
        bytes = max_size(bytes, s->head_bytes);
    }
    return bytes;
}

/* FFNs of which the resident prefix has what it has of any. */
static int32_t ffn_in_prefix(const struct sl_search *s, const struct sl_candidate *c)
{
    const int32_t before = c->n_kv_layers + (s->split.head > 0);
    const int32_t n = c->n_resident > before ? c->n_resident - before : 0;
    return n < s->n_layers ? n : s->n_layers;
}

/* Whether the prefix has the head, or its part of one that is cut. */
static bool head_in_prefix(const struct sl_search *s, const struct sl_candidate *c)
{
    return s->split.head > 0 ? c->n_resident > c->n_kv_layers
                             : c->n_resident == c->n_kv_layers + s->n_layers + 1;
}

/* FFNs that are not resident as a whole. */
static int32_t ffn_left(const struct sl_search *s, const struct sl_candidate *c)
{
    if (s->n_experts > 0) {
        return c->n_slots < s->n_experts ? s->n_layers : 0;
    }
    return s->n_layers - (s->split.ffn > 0 ? 0 : ffn_in_prefix(s, c));
}

static bool is_unlike(const struct sl_search *s, const struct sl_candidate *c)
{
    for (int32_t i = 0; i < s->n_unlike; i++) {
        const struct sl_tier_plan *const other = s->unlike[i];
        if (c->share == other->share && c->n_fed == other->n_fed &&
            memcmp(s->placement, other->placement, (size_t)s->n_shards) == 0) {
            return false;
        }
    }
    return true;
}

static void keep_better(struct sl_search *s, struct sl_candidate *c, struct sl_candidate *best,
                        bool *found)
{
    if (score(s, c) && is_unlike(s, c) && (!*found || c->result.pass_ns < best->result.pass_ns)) {
        *best = *c;
        *found = true;
    }
}

/* The share of missing experts at which a balanced layer's two sides are done at the same time. */
static double even_share(const struct sl_search *s, const struct sl_candidate *c)
{
    const struct sl_profile *const p = s->profile;
    const struct sl_mixture_cost *const m = &s->mixture[c->tier][s->model->shards[1].class_id];
    const double hit = sl_cost_hit(s, c);
    const double host_ns = m->host_busy_ns * (1 - hit);
    const double mapped_ns =
        1e9 * (1 - hit) * m->read_bytes /
        (sl_profile_mapped_rate(p, sl_tier_tokens[c->tier]) * p->copy_busy_factor);
    const double share = (host_ns - m->experts_ns * hit) / (host_ns + mapped_ns);
    return share > 0 ? share : 0;
}

/* Ways to go through a mixture's layers with their bases in VRAM and without streaming them. */
static void search_shares(struct sl_search *s, struct sl_candidate c, const struct bounds *b,
                          bool feasible_only, struct sl_candidate *best, bool *found)
{
    const bool all = c.n_slots == s->n_experts;
    const bool can_map = sl_profile_mapped_rate(s->profile, sl_tier_tokens[c.tier]) > 0;
    int32_t shares[4];
    int n = 0;
    if (all || (can_map && b->ffn_mapped)) {
        shares[n++] = SL_DIVIDE_ALL;
    }
    if (!all && b->ffn_shared) {
        shares[n++] = 0;
    }
    if (!all && b->ffn_balanced && can_map) {
        /* Of a handful of experts only whole ones can be shared out. */
        const int32_t eighths = (int32_t)(even_share(s, &c) * 8);
        for (int32_t k = eighths; k <= eighths + 1; k++) {
            if (k > 0 && k < 8) {
                shares[n++] = k * SL_DIVIDE_ALL / 8;
            }
        }
    }
    c.n_ffn_streamed = 0;
    c.uses_device = true;
    for (int i = 0; i < n; i++) {
        c.share = shares[i];
        if (feasible_only) {
            *best = c;
            *found = true;
            return;
        }
        keep_better(s, &c, best, found);
    }
}

/* Try every streamed count for a candidate that is otherwise set; keep the best in *best. */
static void search_ffn(struct sl_search *s, struct sl_candidate c, const struct bounds *b,
                       bool feasible_only, struct sl_candidate *best, bool *found)
{
    const bool mixture = s->n_experts > 0;
    const bool head_resident = head_in_prefix(s, &c);
    const int32_t left = ffn_left(s, &c);
    const bool must_stream =
        c.n_resident < c.n_kv_layers || (c.head_on_device && !head_resident) || streams_kv(s, &c);
    if (c.head_on_device && !head_resident && c.ring_bytes < s->head_bytes) {
        return; /* the head would have to be streamed and does not fit the ring */
    }
    if (s->split.kv_heads > 0 && c.n_resident < c.n_kv_layers) {
        return; /* a part of the KV is in VRAM, so must be the weights that go with it */
    }
    if (b->whole &&
        (left > 0 || c.n_resident < c.n_kv_layers || (c.head_on_device && !head_resident))) {
        return;
    }
    c.share = SL_SHARE_HOST;
    if (mixture && ffn_in_prefix(s, &c) == s->n_layers && must_stream == (c.ring_bytes > 0)) {
        search_shares(s, c, b, feasible_only, best, found);
    }
    if (mixture && (left == 0 || (feasible_only && *found))) {
        return;
    }
    if (s->split.ffn > 0 && ffn_in_prefix(s, &c) > 0 &&
        sl_tier_tokens[c.tier] <= SL_SHARD_PIECE_TOKENS) {
        c.share = 0;
    }
    const int32_t grid = mixture ? MIXTURE_GRID : b->split ? SPLIT_GRID : FFN_GRID;
    for (int32_t g = 0; g <= grid; g++) {
        c.n_ffn_streamed = (int32_t)((int64_t)left * g / grid);
        if (g > 0 && c.n_ffn_streamed == (int32_t)((int64_t)left * (g - 1) / grid)) {
            continue;
        }
        const bool none = c.n_ffn_streamed == 0, all = c.n_ffn_streamed == left;
        if (!((none && b->ffn_none) || (all && b->ffn_all) || (!none && !all && b->ffn_some)) ||
            (mixture && !all && !b->ffn_host)) {
            continue;
        }
        const bool streams = must_stream || !none;
        if (streams != (c.ring_bytes > 0)) {
            continue;
        }
        /* Bases alone are of no use, nor parts of what the CPU computes. */
        const bool ffn =
            ffn_in_prefix(s, &c) > 0 && (s->split.ffn > 0 ? c.share != SL_SHARE_HOST : !mixture);
        c.uses_device = streams || ffn || (c.n_resident > 0 && c.n_kv_layers > 0) ||
                        (c.head_on_device && head_resident);
        if (!c.uses_device) {
            continue;
        }
        if (feasible_only) {
            *best = c;
            *found = true;
            return;
        }
        keep_better(s, &c, best, found);
    }
}

/* One way to feed a mixture's layers: what fits, and its time. False: it cannot be. */
static bool score_fed(struct sl_search *s, struct sl_candidate *c, const struct bounds *b,
                      int32_t multiple, int32_t n_fed, bool head_streamed)
{
    size_t item = (size_t)n_fed * s->slot_bytes;
    item = max_size(item, attention_item_bytes(s, c));
    c->n_fed = n_fed;
    c->ring_bytes = (size_t)multiple * item;
    if (head_streamed) {
        c->ring_bytes = max_size(c->ring_bytes, s->head_bytes);
    }
    c->top_bytes = c->ring_bytes + activation_bytes(s, c->tier, c->head_on_device);
    if (!fill_resident(s, c, b->most_resident) || ffn_in_prefix(s, c) < s->n_layers) {
        return false;
    }
    return (!c->head_on_device || head_in_prefix(s, c) || head_streamed) && score(s, c) &&
           is_unlike(s, c);
}

/* How many experts of a layer come through the ring: the more, the longer the copies take and the
 * shorter the CPU; so up or down from the middle by ever smaller steps. */
static void search_fed(struct sl_search *s, struct sl_candidate c, const struct bounds *b,
                       int32_t multiple, bool head_streamed, struct sl_candidate *best, bool *found)
{
    const struct sl_hparams *const hp = &s->model->hp;
    const int32_t n = (int32_t)hp->n_experts, n_tokens = sl_tier_tokens[c.tier];
    const double read = sl_profile_experts_read(n, hp->n_experts_used, n_tokens);
    if (!b->ffn_fed || s->n_experts == 0 || multiple == 0 || read < FED_LEAST_READ * n) {
        return;
    }
    c.uses_device = true;
    c.share = 0;
    struct sl_candidate at = c, next = c;
    bool have = false;
    for (int32_t step = n / 2; step > n / FED_STEPS; step /= 2) {
        const int32_t tries[] = {at.n_fed + step, at.n_fed - step};
        for (int i = 0; i < 2; i++) {
            if (tries[i] > 0 && tries[i] < n &&
                score_fed(s, &next, b, multiple, tries[i], head_streamed) &&
                (!have || next.result.pass_ns < at.result.pass_ns)) {
                at = next;
                have = true;
            }
        }
    }
    if (have) {
        keep_better(s, &at, best, found);
    }
}

/* Best candidate of a tier that uses the device, for a number of layers with KV in VRAM. */
static bool search_tier(struct sl_search *s, int32_t tier, int32_t n_kv_layers,
                        const struct bounds *b, bool feasible_only, struct sl_candidate *best)
{
    bool found = false;
    for (int32_t k = 0; k < 4 * 2 * 2 && !(found && feasible_only); k++) {
        const int32_t multiple = k / 4, head = k / 2 % 2, attention = k % 2;
        if (!b->ring[multiple] || !b->head[head] || !b->attention[attention]) {
            continue;
        }
        if (attention == 1 && n_kv_layers == s->n_layers && b->attention[0] &&
            s->split.kv_heads == 0) {
            continue; /* the same as attention == 0 */
        }
        if (attention == 0 && s->split.kv_heads > 0 &&
            sl_tier_tokens[tier] > SL_SHARD_PIECE_TOKENS) {
            continue; /* not shared */
        }
        struct sl_candidate c = {.tier = tier,
                                 .n_kv_layers = n_kv_layers,
                                 .head_on_device = head == 1,
                                 .attention_streamed = attention == 1};
        /* First as if the head were resident, and a part of all FFNs where they are cut; when they
         * turn out not to be, they count whole. */
        for (int32_t whole = 0; whole < 4; whole++) {
            const bool head_streamed = whole % 2 == 1, ffn_whole = whole / 2 == 1;
            if ((head_streamed && head == 0) ||
                (ffn_whole && (s->split.ffn == 0 || multiple == 0))) {
                continue;
            }
            if (!feasible_only && !ffn_whole) {
                search_fed(s, c, b, multiple, head_streamed, best, &found);
            }
            c.ring_bytes = ring_bytes(s, &c, multiple, head_streamed, ffn_whole);
            c.top_bytes = c.ring_bytes + activation_bytes(s, tier, c.head_on_device);
            if (!fill_resident(s, &c, b->most_resident) ||
                (s->split.ffn > 0 && multiple > 0 &&
                 ffn_whole == (ffn_in_prefix(s, &c) == s->n_layers))) {
                continue;
            }
            search_ffn(s, c, b, feasible_only, best, &found);
            if (!b->fewer_resident || feasible_only) {
                continue;
            }
            const int32_t fit = c.n_resident, head_part = s->split.head > 0;
            const int32_t cuts[] = {2 * n_kv_layers + head_part, n_kv_layers + head_part};
            for (int32_t i = s->n_experts > 0; i < 2; i++) {
                c.n_resident = cuts[i];
                c.n_slots = 0;
                if (cuts[i] < fit && (i == 0 || s->n_experts > 0 || cuts[i] != cuts[i - 1])) {
                    search_ffn(s, c, b, false, best, &found);
                }
            }
        }
    }
    return found;
}

/* The candidate with everything on the CPU. */
static struct sl_candidate host_candidate(struct sl_search *s, int32_t tier)
{
    struct sl_candidate c = {.tier = tier, .share = SL_SHARE_HOST};
    score(s, &c);
    return c;
}

/* No GPU or no budget at all: every strategy means the CPU then. */
static bool cpu_only(const struct sl_search *s)
{
    return s->profile->kind == SL_DEVICE_NONE || s->options.budget_bytes == 0;
}

/* Whether the CPU alone is an answer too: attention there means that no KV is in VRAM. */
static bool host_counts(const struct sl_search *s, enum sl_strategy strategy, int32_t n_kv_layers)
{
    return n_kv_layers == 0 &&
           (strategy == SL_STRATEGY_AUTO || strategy == SL_STRATEGY_HOST || cpu_only(s));
}

bool sl_search_tier(struct sl_search *s, enum sl_strategy strategy, int32_t tier,
                    int32_t n_kv_layers, struct sl_candidate *out)
{
    struct bounds b = strategy_bounds(strategy);
    b.head[1] = b.head[1] && !s->head_on_host;
    bool found = s->budget_bytes > 0 && search_tier(s, tier, n_kv_layers, &b, false, out);
    if (host_counts(s, strategy, n_kv_layers)) {
        struct sl_candidate host = host_candidate(s, tier);
        keep_better(s, &host, out, &found);
    }
    return found;
}

/* Where cuts would be tried: a part of every feed-forward so large that all fill VRAM beside a
 * ring, and of the head what is left then; and less, where both sides then end together. Where all
 * layers have KV in VRAM, that of some of the KV heads, too. */
struct split_list {
    struct sl_split items[MAX_SPLITS];
    int32_t n;
};

static int32_t whole_units(int32_t value, int32_t unit, int32_t end)
{
    const int32_t n = value / unit * unit;
    return n < 0 || n >= end ? 0 : n;
}

static void add_split(const struct sl_search *s, struct split_list *list, struct sl_split split)
{
    const struct sl_model *const model = s->model;
    const struct sl_shard *const head = &model->shards[s->n_shards - 1];
    split.ffn = whole_units(split.ffn, s->cut_unit, sl_shard_cut_end(model, &model->shards[1]));
    split.head =
        whole_units(split.head, sl_shard_cut_unit(model, head), sl_shard_cut_end(model, head));
    bool is_new = split.ffn > 0 || split.head > 0 || split.kv_heads > 0;
    for (int32_t i = 0; i < list->n && is_new; i++) {
        is_new = memcmp(&list->items[i], &split, sizeof split) != 0;
    }
    if (is_new && list->n < MAX_SPLITS) {
        list->items[list->n++] = split;
    }
}

/* The share of a shard at which GPU and CPU need the same time for their parts of it. */
static double even_part(const struct sl_search *s, int32_t shard)
{
    const struct sl_shard_cost *const c = &s->cost[s->decode_tier][shard];
    return c->cpu_ns > 0 ? c->cpu_ns / (c->cpu_ns + c->gpu_ns) : 0;
}

/* The rows of the head that `bytes` have room for, up to those that are worth having. */
static int32_t head_rows(const struct sl_search *s, const struct bounds *b, double bytes)
{
    const struct sl_shard *const head = &s->model->shards[s->n_shards - 1];
    const int32_t n_rows = sl_shard_cut_end(s->model, head);
    const double part = fmin(bytes / (double)s->head_bytes, even_part(s, s->n_shards - 1));
    return b->head[1] && part > LEAST_HEAD_PART ? (int32_t)(part * n_rows) : 0;
}

/* Bytes for feed-forwards and head beside everything else that decode needs, but for its ring; with
 * this cut of attention. */
static double bytes_left(struct sl_search *s, int32_t n_kv_layers, int32_t kv_heads)
{
    const struct sl_split split = {.kv_heads = kv_heads};
    sl_search_set_split(s, split);
    double bytes = (double)s->budget_bytes - (double)sl_search_base_bytes(s, n_kv_layers) -
                   (double)activation_bytes(s, s->decode_tier, true);
    for (int32_t i = 0; i < 2 * n_kv_layers; i += 2) {
        bytes -= (double)s->resident_bytes[i];
    }
    return bytes;
}

/* Cuts of dense feed-forwards and the head for what is left beside KV and attention. */
static void list_dense_splits(const struct sl_search *s, const struct bounds *b, double left,
                              int32_t kv_heads, struct split_list *list)
{
    const double n = s->n_layers, ffn = (double)s->max_ffn_bytes;
    const int32_t n_ff = sl_shard_cut_end(s->model, &s->model->shards[1]);
    struct sl_split split = {.kv_heads = kv_heads};
    for (int32_t ring = 0; ring <= 1; ring++) {
        /* The ring takes what is behind the cut of one. */
        const double part = n > ring ? fmin((left - ring * ffn) / (n - ring) / ffn, 1) : 0;
        split.ffn = (int32_t)(part * n_ff) / s->cut_unit * s->cut_unit;
        if (split.ffn > 0) {
            const double kept = (double)split.ffn / n_ff * ffn;
            split.head = head_rows(s, b, left - n * kept - ring * (ffn - kept));
            add_split(s, list, split);
            const double even = even_part(s, 1);
            if (ring == 0 && even < part) {
                split.ffn = (int32_t)(even * n_ff);
                split.head = head_rows(s, b, left - n * even * ffn);
                add_split(s, list, split);
            }
        }
        /* Whole feed-forwards as far as they go. */
        const double n_fit = fmax(0, fmin(n, floor((left - ring * ffn) / ffn)));
        split.ffn = 0;
        split.head = head_rows(s, b, left - (n_fit + ring) * ffn);
        add_split(s, list, split);
    }
}

/* Mixtures: whatever the head leaves goes to experts. */
static void list_head_splits(const struct sl_search *s, int32_t kv_heads, struct split_list *list)
{
    const struct sl_shard *const head = &s->model->shards[s->n_shards - 1];
    const double even = even_part(s, s->n_shards - 1) * sl_shard_cut_end(s->model, head);
    struct sl_split split = {.kv_heads = kv_heads};
    for (int32_t i = 1; i <= 4 && kv_heads == 0; i *= 2) {
        split.head = (int32_t)(even / i);
        add_split(s, list, split);
    }
    split.head = kv_heads > 0 ? 0 : sl_shard_cut_unit(s->model, head);
    add_split(s, list, split);
}

static void list_splits(struct sl_search *s, const struct bounds *b, int32_t n_kv_layers,
                        struct split_list *list)
{
    *list = (struct split_list){.n = 0};
    if (!b->split) {
        list->items[list->n++] = (struct sl_split){0};
        return;
    }
    const struct sl_split asked = s->options.split;
    if (asked.ffn > 0 || asked.head > 0 || asked.kv_heads > 0) {
        list->n = asked.kv_heads == 0 || n_kv_layers == s->n_layers;
        list->items[0] = asked;
        return;
    }
    /* The most heads that fit, and fewer; 0: attention is not cut. */
    const int32_t n_units = (int32_t)s->model->hp.n_kv_heads / s->heads_unit;
    int32_t last = 0;
    for (int32_t units = n_kv_layers == s->n_layers ? n_units - 1 : 0; units >= 0;) {
        const int32_t heads = units * s->heads_unit;
        const double left = bytes_left(s, n_kv_layers, heads);
        if (left > 0 || units == 0) {
            if (s->n_experts > 0) {
                list_head_splits(s, heads, list);
            } else {
                list_dense_splits(s, b, left, heads, list);
            }
            last = last > 0 ? last : units;
        }
        units -= last > 0 && units > 1 && last / 3 > 1 ? last / 3 : 1;
    }
    if (list->n == 0) { /* the least, so that the strategy works where the GPU is of any use */
        add_split(s, list, (struct sl_split){.ffn = s->cut_unit});
    }
}

/* Passes of a tier that take all sequences one token further. */
static int32_t n_decode_passes(const struct sl_search *s, int32_t tier)
{
    const int32_t n_most = sl_tier_tokens[tier];
    return (s->options.n_seqs + n_most - 1) / n_most;
}

/* Plan every tier for one number of KV layers and one cut. Returns the score (lower is better), or
 * HUGE_VAL: also when it is clear that it would not be below `enough`. */
static double plan_tiers(struct sl_search *s, const struct bounds *b, int32_t n_kv_layers,
                         double enough, struct sl_choice *out)
{
    *out = (struct sl_choice){.n_kv_layers = n_kv_layers, .split = s->split};
    const double least = SCORE_GENERATED * n_decode_passes(s, s->decode_tier);
    double best_ns_per_token = HUGE_VAL;
    int32_t best_tier = 0;
    for (int32_t t = 0; t < s->n_tiers; t++) {
        struct sl_candidate *const c = &out->tiers[t];
        bool found = s->budget_bytes > 0 && search_tier(s, t, n_kv_layers, b, false, c);
        if (host_counts(s, s->options.strategy, n_kv_layers)) {
            struct sl_candidate host = host_candidate(s, t);
            keep_better(s, &host, c, &found);
        }
        if (!found) {
            break;
        }
        if (t == s->decode_tier && least * c->result.pass_ns >= enough) {
            return HUGE_VAL;
        }
        out->n_tiers = t + 1;
        const double per_token = c->result.pass_ns / sl_tier_tokens[t];
        if (per_token < best_ns_per_token) {
            best_ns_per_token = per_token;
            best_tier = t;
        }
    }
    if (out->n_tiers == 0) {
        return HUGE_VAL;
    }
    const int32_t decode_tier = s->decode_tier < out->n_tiers ? s->decode_tier : out->n_tiers - 1;
    if (s->options.max_ubatch == 0) {
        out->n_tiers = (best_tier > decode_tier ? best_tier : decode_tier) + 1;
    }
    for (int32_t t = 0; t < out->n_tiers; t++) {
        const struct sl_candidate *const c = &out->tiers[t];
        if (!c->uses_device) {
            continue;
        }
        size_t used = sl_search_base_bytes(s, n_kv_layers) + c->top_bytes;
        sl_search_resident_order(s, n_kv_layers, s->order);
        for (int32_t i = 0; i < c->n_resident; i++) {
            used += s->resident_bytes[s->order[i]];
        }
        used += (size_t)c->n_slots * s->slot_bytes;
        out->arena_bytes = max_size(out->arena_bytes, used);
    }
    return SCORE_GENERATED * n_decode_passes(s, decode_tier) *
               out->tiers[decode_tier].result.pass_ns +
           SCORE_PROMPT * s->options.n_seqs * best_ns_per_token;
}

/* Numbers of KV layers worth trying: the most that fit beside their attention, fewer down to none,
 * and all (attention that has its KV in VRAM may be streamed). */
static int32_t kv_candidates(const struct sl_search *s, const struct bounds *b, int32_t *out)
{
    if (s->budget_bytes == 0) {
        out[0] = 0;
        return 1;
    }
    if (b->kv_all_only) {
        out[0] = s->n_layers;
        return 1;
    }
    const size_t fixed = sl_search_base_bytes(s, 0) + activation_bytes(s, 0, false);
    const size_t unit = s->kv_layer_bytes + s->max_attention_bytes;
    int32_t most = 0;
    if (fixed < s->budget_bytes) {
        const uint64_t fit = (s->budget_bytes - fixed) / (unit ? unit : 1);
        most = fit < (uint64_t)s->n_layers ? (int32_t)fit : s->n_layers;
    }
    int32_t n = 0;
    for (int32_t k = 0; k < MAX_KV_CANDIDATES - 1; k++) {
        const int32_t a = most - most * k / (MAX_KV_CANDIDATES - 2);
        if (n == 0 || out[n - 1] != a) {
            out[n++] = a;
        }
    }
    if (most < s->n_layers) {
        out[n++] = s->n_layers;
    }
    return n;
}

/* Whether the strategy can use the device in a budget at all (one token at a time). */
static bool feasible(struct sl_search *s, const struct bounds *b, uint64_t budget)
{
    const uint64_t kept = s->budget_bytes;
    s->head_on_host = !b->head[1];
    s->budget_bytes = budget;
    int32_t kv[MAX_KV_CANDIDATES + 1];
    const int32_t n = kv_candidates(s, b, kv);
    bool found = false;
    for (int32_t i = 0; i < n && !found; i++) {
        struct split_list splits;
        list_splits(s, b, kv[i], &splits);
        for (int32_t k = 0; k < splits.n && !found; k++) {
            struct sl_candidate c;
            sl_search_set_split(s, splits.items[k]);
            found = search_tier(s, 0, kv[i], b, true, &c);
        }
    }
    s->budget_bytes = kept;
    return found;
}

static uint64_t smallest_budget(struct sl_search *s, const struct bounds *b)
{
    sl_search_set_split(s, (struct sl_split){0});
    uint64_t high =
        sl_search_base_bytes(s, s->n_layers) + activation_bytes(s, 0, true) +
        4 * (s->max_ffn_bytes + s->max_attention_bytes + s->head_bytes + s->kv_layer_bytes);
    for (int32_t i = 0; i < s->n_shards; i++) {
        high += s->resident_bytes[i];
    }
    high += (uint64_t)s->n_experts * s->slot_bytes;
    uint64_t low_pages = 0, high_pages = high / s->page_bytes + 1;
    while (low_pages + 1 < high_pages) {
        const uint64_t middle = (low_pages + high_pages) / 2;
        if (feasible(s, b, middle * s->page_bytes)) {
            high_pages = middle;
        } else {
            low_pages = middle;
        }
    }
    return high_pages * s->page_bytes;
}

/* Plan with this number of KV layers; keep the plan when it is the best so far. */
static bool try_kv_layers(struct sl_search *s, const struct bounds *b, int32_t n_kv_layers,
                          double *best, struct sl_choice *out)
{
    bool better = false;
    struct split_list splits;
    list_splits(s, b, n_kv_layers, &splits);
    for (int32_t i = 0; i < splits.n; i++) {
        struct sl_choice choice;
        sl_search_set_split(s, splits.items[i]);
        const double value = plan_tiers(s, b, n_kv_layers, *best, &choice);
        if (value < *best) {
            *best = value;
            *out = choice;
            out->head_on_host = s->head_on_host;
            better = true;
        }
    }
    return better;
}

/* The first list is coarse in deep models: look around its best with ever smaller steps. */
static void refine_kv_layers(struct sl_search *s, const struct bounds *b, int32_t step,
                             double *best, struct sl_choice *out)
{
    while (step > 0 && *best < HUGE_VAL) {
        const int32_t at = out->n_kv_layers;
        bool better = at + step <= s->n_layers && try_kv_layers(s, b, at + step, best, out);
        better = (at >= step && try_kv_layers(s, b, at - step, best, out)) || better;
        if (!better || step > 1) {
            step /= 2;
        }
    }
}

/* The best plan of a space, and its score; HUGE_VAL: none fits. */
static double search_bounds(struct sl_search *s, const struct bounds *b, struct sl_choice *out)
{
    s->head_on_host = !b->head[1];
    int32_t kv[MAX_KV_CANDIDATES + 1];
    const int32_t n = kv_candidates(s, b, kv);
    double best = HUGE_VAL;
    for (int32_t i = 0; i < n; i++) {
        try_kv_layers(s, b, kv[i], &best, out);
    }
    if (n > 1) {
        refine_kv_layers(s, b, (kv[0] + MAX_KV_CANDIDATES - 1) / MAX_KV_CANDIDATES, &best, out);
    }
    return best;
}

enum sluice_status sl_search_run(struct sl_search *s, struct sl_choice *out,
                                 struct sluice_error *err)
{
    const enum sl_strategy strategy = s->options.strategy;
    const struct bounds b = strategy_bounds(strategy);
    double best = search_bounds(s, &b, out);
    if (strategy == SL_STRATEGY_AUTO) {
        /* The way to the best number of KV layers is local: make sure that it ends no worse than
         * that of a narrower space. */
        for (int32_t i = SL_STRATEGY_RESIDENT; i < SL_N_STRATEGIES; i++) {
            const struct bounds narrow = strategy_bounds((enum sl_strategy)i);
            struct sl_choice choice;
            const double value = search_bounds(s, &narrow, &choice);
            if (value * (i == SL_STRATEGY_SPLIT ? SPLIT_MARGIN : 1) < best) {
                best = value;
                *out = choice;
            }
        }
    }
    const bool device = s->profile->kind != SL_DEVICE_NONE && strategy != SL_STRATEGY_HOST;
    uint64_t smallest = device ? smallest_budget(s, &b) : 0;
    if (device && strategy == SL_STRATEGY_AUTO) { /* a part of a shard may fit where none does */
        const struct bounds split = strategy_bounds(SL_STRATEGY_SPLIT);
        const uint64_t other = smallest_budget(s, &split);
        smallest = other < smallest ? other : smallest;
    }
    if (best == HUGE_VAL) {
        if (err) {
            sl_error_set(err, SLUICE_STATUS_BUDGET,
                         "strategy %s needs %llu MiB of VRAM, the budget is %llu MiB; give "
                         "--vram %lluM or choose --strategy auto",
                         sl_strategy_name(strategy), (unsigned long long)(smallest >> 20),
                         (unsigned long long)(s->options.budget_bytes >> 20),
                         (unsigned long long)(smallest >> 20));
            err->needed = smallest;
            err->allowed = s->options.budget_bytes;
        }
        return SLUICE_STATUS_BUDGET;
    }
    out->smallest_budget_bytes = smallest;
    return SLUICE_STATUS_OK;
}
