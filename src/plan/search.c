/* SPDX-License-Identifier: Apache-2.0
 *
 * The search (see search.h). Outer loop: how many layers keep their KV in VRAM, one number for all
 * tiers. Inner loop, per tier: ring size, where the head and the remaining attention go, and how
 * many of the FFNs that are not resident are streamed. Residency itself is hardly a variable: as
 * much of the resident order as fits, or the layers that are resident as a whole, or attention
 * alone. (An FFN on the GPU between two attentions on the CPU costs two moves of the hidden state,
 * which can be more than it gains.)
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
/* Feeding copies experts that nobody uses, too: not worth a try where they are most of them. */
#define FED_LEAST_READ 0.25
#define FED_STEPS 64 /* half as fine as the number of a layer's experts that are fed is searched   \
                      */

static size_t align_up(size_t n)
{
    return (n + ALIGN - 1) & ~(size_t)(ALIGN - 1);
}

static size_t max_size(size_t a, size_t b)
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
    init_tier_kv(s, t);
}

static void measure_shards(struct sl_search *s)
{
    for (int32_t i = 0; i < s->n_shards; i++) {
        const struct sl_shard *const shard = &s->model->shards[i];
        s->image_bytes[i] = align_up(shard->bytes);
        s->resident_bytes[i] = align_up(sl_shard_resident_bytes(shard));
        switch (shard->kind) {
        case SL_SHARD_ATTENTION: {
            const size_t n_blocks = ((size_t)s->options.n_ctx + SL_KV_BLOCK - 1) / SL_KV_BLOCK;
            if (s->options.n_seqs > 1) {
                s->kv_table_bytes =
                    align_up((size_t)s->options.n_seqs * n_blocks * sizeof(int32_t));
            }
            s->max_attention_bytes = max_size(s->max_attention_bytes, s->image_bytes[i]);
            s->kv_layer_bytes = align_up(
                n_blocks * sl_kv_block_bytes(s->options.kv_types, (int32_t)s->model->hp.n_kv_heads,
                                             (int32_t)s->model->hp.head_dim));
            break;
        }
        case SL_SHARD_FFN:
            s->max_ffn_bytes = max_size(s->max_ffn_bytes, s->image_bytes[i]);
            s->slot_bytes = max_size(s->slot_bytes, shard->expert_bytes);
            break;
        case SL_SHARD_HEAD:
            s->head_bytes = s->image_bytes[i];
            break;
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
        GRAB(mixture[t], model->n_classes);
    }
#undef GRAB
    if (!good) {
        sl_search_finish(s);
        return sl_error_set(err, SLUICE_STATUS_OUT_OF_MEMORY, "no memory for the planner");
    }
    measure_shards(s);
    if (s->slot_bytes > 0) {
        s->n_experts = s->n_layers * (int32_t)model->hp.n_experts;
        s->tables_bytes = (size_t)s->n_layers * sl_plan_tables_bytes(model->hp.n_experts) +
                          align_up((size_t)s->n_experts * sizeof(int32_t));
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
        sl_free(s->mixture[t]);
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
    if (!s->head_on_host) {
        order[n++] = s->n_shards - 1;
    }
    return n;
}

size_t sl_search_base_bytes(const struct sl_search *s, int32_t n_kv_layers)
{
    return s->consts_bytes + s->tables_bytes + s->kv_table_bytes +
           (size_t)n_kv_layers * s->kv_layer_bytes;
}

/* FFN number j of m that are not resident: streamed when an even spread of n says so. The first of
 * a group stays on the host: the copy of the streamed one hides behind it. */
static bool spread(int32_t j, int32_t m, int32_t n)
{
    return (int64_t)(j + 1) * n / m != (int64_t)j * n / m;
}

void sl_search_place(struct sl_search *s, const struct sl_candidate *c, uint8_t *placement)
{
    const int32_t n_order = sl_search_resident_order(s, c->n_kv_layers, s->order);
    memset(placement, SL_PLACE_HOST, (size_t)s->n_shards);
    for (int32_t i = 0; i < c->n_resident; i++) {
        placement[s->order[i]] = SL_PLACE_RESIDENT;
    }
    const bool mixture = s->n_experts > 0;
    int32_t n_ffn = mixture ? s->n_layers : 0;
    for (int32_t i = c->n_resident; i < n_order && !mixture; i++) {
        n_ffn += s->model->shards[s->order[i]].kind == SL_SHARD_FFN;
    }
    int32_t j = 0;
    for (int32_t i = 0; i < s->n_shards; i++) {
        const struct sl_shard *const shard = &s->model->shards[i];
        s->item_bytes[i] = s->image_bytes[i];
        if (shard->kind == SL_SHARD_ATTENTION && (int32_t)shard->layer >= c->n_kv_layers) {
            s->item_bytes[i] += s->kv_layer_bytes;
        }
        if (mixture && shard->kind == SL_SHARD_FFN && c->n_fed > 0) {
            placement[i] = SL_PLACE_FED;
            s->item_bytes[i] = (size_t)c->n_fed * s->slot_bytes;
            continue;
        }
        if (mixture && shard->kind == SL_SHARD_FFN) {
            placement[i] = spread(j++, n_ffn, c->n_ffn_streamed) ? SL_PLACE_STREAMED
                           : c->share == SL_SHARE_HOST           ? SL_PLACE_HOST
                           : c->share == SL_DIVIDE_ALL           ? SL_PLACE_RESIDENT
                                                                 : SL_PLACE_SHARED;
            continue;
        }
        if (placement[i] == SL_PLACE_RESIDENT) {
            continue;
        }
        bool streamed = false;
        if (shard->kind == SL_SHARD_ATTENTION) {
            streamed = (int32_t)shard->layer < c->n_kv_layers || c->attention_streamed;
        } else if (shard->kind == SL_SHARD_FFN) {
            streamed = spread(j++, n_ffn, c->n_ffn_streamed);
        } else {
            streamed = c->head_on_device;
        }
        placement[i] = streamed ? SL_PLACE_STREAMED : SL_PLACE_HOST;
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
        if (i == s->n_shards - 1 && !c->head_on_device) {
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
};

static struct bounds strategy_bounds(enum sl_strategy strategy)
{
    struct bounds b = {.most_resident = INT32_MAX};
    switch (strategy) {
    case SL_STRATEGY_AUTO:
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
                            false};
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

/* Ring size for a multiple of the largest shard that may be streamed in this candidate. */
static size_t ring_bytes(const struct sl_search *s, const struct sl_candidate *c, int32_t multiple,
                         bool head_streamed)
{
    size_t item = max_size(s->max_ffn_bytes, s->max_attention_bytes);
    if (c->attention_streamed && c->n_kv_layers < s->n_layers) {
        item = max_size(item, s->max_attention_bytes + s->kv_layer_bytes);
    }
    size_t bytes = (size_t)multiple * item;
    if (multiple > 0 && head_streamed) {
        bytes = max_size(bytes, s->head_bytes);
    }
    return bytes;
}

/* The FFNs, and whether the head, beyond the resident prefix. */
static int32_t ffn_left(const struct sl_search *s, const struct sl_candidate *c)
{
    const int32_t attention = c->n_kv_layers;
    if (s->n_experts > 0) {
        return c->n_slots < s->n_experts ? s->n_layers : 0;
    }
    const int32_t resident = c->n_resident > attention ? c->n_resident - attention : 0;
    return resident < s->n_layers ? s->n_layers - resident : 0;
}

static void keep_better(struct sl_search *s, struct sl_candidate *c, struct sl_candidate *best,
                        bool *found)
{
    if (score(s, c) && (!*found || c->result.pass_ns < best->result.pass_ns)) {
        *best = *c;
        *found = true;
    }
}

/* The share of missing experts at which a balanced layer's two sides are done at the same time. */
static double even_share(const struct sl_search *s, const struct sl_candidate *c)
{
    const struct sl_profile *const p = s->profile;
    const struct sl_mixture_cost *const m = &s->mixture[c->tier][s->model->shards[1].class_id];
    const double hit = (double)c->n_slots / s->n_experts;
    const double host_ns = m->host_busy_ns * (1 - hit);
    const double mapped_ns =
        1e9 * (1 - hit) * m->read_bytes / (p->mapped_bytes_per_s * p->copy_busy_factor);
    const double share = (host_ns - m->experts_ns * hit) / (host_ns + mapped_ns);
    return share > 0 ? share : 0;
}

/* Ways to go through a mixture's layers with their bases in VRAM and without streaming them. */
static void search_shares(struct sl_search *s, struct sl_candidate c, const struct bounds *b,
                          bool feasible_only, struct sl_candidate *best, bool *found)
{
    const bool all = c.n_slots == s->n_experts;
    const bool can_map = s->profile->mapped_bytes_per_s > 0;
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
    const int32_t n_order = sl_search_resident_order(s, c.n_kv_layers, s->order);
    const bool mixture = s->n_experts > 0;
    const bool head_resident = c.n_resident == n_order && !s->head_on_host;
    const int32_t left = ffn_left(s, &c);
    const bool must_stream = c.n_resident < c.n_kv_layers || (c.head_on_device && !head_resident) ||
                             (c.attention_streamed && c.n_kv_layers < s->n_layers);
    if (c.head_on_device && !head_resident && c.ring_bytes < s->head_bytes) {
        return; /* the head would have to be streamed and does not fit the ring */
    }
    if (b->whole &&
        (left > 0 || c.n_resident < c.n_kv_layers || (c.head_on_device && !head_resident))) {
        return;
    }
    c.share = SL_SHARE_HOST;
    if (mixture && c.n_resident >= c.n_kv_layers + s->n_layers &&
        must_stream == (c.ring_bytes > 0)) {
        search_shares(s, c, b, feasible_only, best, found);
    }
    if (mixture && (left == 0 || (feasible_only && *found))) {
        return;
    }
    const int32_t grid = mixture ? MIXTURE_GRID : FFN_GRID;
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
        /* Bases alone are of no use. */
        const bool resident =
            mixture ? head_resident || (c.n_resident > 0 && c.n_kv_layers > 0) : c.n_resident > 0;
        c.uses_device = resident || streams;
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
    if (c->attention_streamed && c->n_kv_layers < s->n_layers) {
        item = max_size(item, s->max_attention_bytes + s->kv_layer_bytes);
    }
    c->n_fed = n_fed;
    c->ring_bytes = (size_t)multiple * item;
    if (head_streamed) {
        c->ring_bytes = max_size(c->ring_bytes, s->head_bytes);
    }
    c->top_bytes = c->ring_bytes + activation_bytes(s, c->tier, c->head_on_device);
    if (!fill_resident(s, c, b->most_resident) || c->n_resident < c->n_kv_layers + s->n_layers) {
        return false;
    }
    const bool head_resident = c->n_resident == c->n_kv_layers + s->n_layers + 1;
    return (!c->head_on_device || head_resident || head_streamed) && score(s, c);
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
    if (have && (!*found || at.result.pass_ns < best->result.pass_ns)) {
        *best = at;
        *found = true;
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
        if (attention == 1 && n_kv_layers == s->n_layers && b->attention[0]) {
            continue; /* the same as attention == 0 */
        }
        struct sl_candidate c = {.tier = tier,
                                 .n_kv_layers = n_kv_layers,
                                 .head_on_device = head == 1,
                                 .attention_streamed = attention == 1};
        /* First as if the head were resident; when it turns out not to be, its slot counts. */
        for (int32_t head_streamed = 0; head_streamed <= head; head_streamed++) {
            if (!feasible_only) {
                search_fed(s, c, b, multiple, head_streamed == 1, best, &found);
            }
            c.ring_bytes = ring_bytes(s, &c, multiple, head_streamed == 1);
            c.top_bytes = c.ring_bytes + activation_bytes(s, tier, c.head_on_device);
            if (!fill_resident(s, &c, b->most_resident)) {
                continue;
            }
            search_ffn(s, c, b, feasible_only, best, &found);
            if (!b->fewer_resident || feasible_only) {
                continue;
            }
            const int32_t fit = c.n_resident;
            const int32_t cuts[] = {2 * n_kv_layers, n_kv_layers};
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

/* Plan every tier for one number of KV layers. Returns the score (lower is better), or HUGE_VAL. */
static double plan_tiers(struct sl_search *s, const struct bounds *b, int32_t n_kv_layers,
                         struct sl_choice *out)
{
    *out = (struct sl_choice){.n_kv_layers = n_kv_layers};
    double best_ns_per_token = HUGE_VAL;
    int32_t best_tier = 0;
    for (int32_t t = 0; t < s->n_tiers; t++) {
        struct sl_candidate *const c = &out->tiers[t];
        bool found = s->budget_bytes > 0 && search_tier(s, t, n_kv_layers, b, false, c);
        if (n_kv_layers == 0 && (s->options.strategy == SL_STRATEGY_AUTO ||
                                 s->options.strategy == SL_STRATEGY_HOST || cpu_only(s))) {
            const struct sl_candidate host = host_candidate(s, t);
            if (!found || host.result.pass_ns < c->result.pass_ns) {
                *c = host;
                found = true;
            }
        }
        if (!found) {
            break;
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
    const int32_t n_seqs = s->options.n_seqs, n_most = sl_tier_tokens[decode_tier];
    const int32_t n_passes = (n_seqs + n_most - 1) / n_most;
    return SCORE_GENERATED * n_passes * out->tiers[decode_tier].result.pass_ns +
           SCORE_PROMPT * n_seqs * best_ns_per_token;
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
        struct sl_candidate c;
        found = search_tier(s, 0, kv[i], b, true, &c);
    }
    s->budget_bytes = kept;
    return found;
}

static uint64_t smallest_budget(struct sl_search *s, const struct bounds *b)
{
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
    struct sl_choice choice;
    const double value = plan_tiers(s, b, n_kv_layers, &choice);
    if (value >= *best) {
        return false;
    }
    *best = value;
    *out = choice;
    out->head_on_host = s->head_on_host;
    return true;
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
            if (value < best) {
                best = value;
                *out = choice;
            }
        }
    }
    const bool device = s->profile->kind != SL_DEVICE_NONE && strategy != SL_STRATEGY_HOST;
    const uint64_t smallest = device ? smallest_budget(s, &b) : 0;
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
