/* SPDX-License-Identifier: Apache-2.0
 *
 * The search (see search.h). Outer loop: how many layers keep their KV in VRAM, one number for all
 * tiers. Inner loop: each tier by itself (search_tier.c). Where shards are cut in two, where is one
 * more outer loop, over the few cuts that fill VRAM or let both sides end together.
 */
#include "plan/search_internal.h"

#include <math.h>
#include <string.h>

#include "base/error.h"

/* What a plan is judged by: an answer of GENERATED tokens to a prompt of PROMPT. */
#define SCORE_GENERATED 128.0
#define SCORE_PROMPT 512.0
#define MAX_KV_CANDIDATES 10
#define MAX_SPLITS 48
/* What cuts have to gain: both sides wait for each other more often, which prediction thinks too
 * little of. */
#define SPLIT_MARGIN 1.02
#define LEAST_HEAD_PART (1 / 16.0) /* less is not worth one more meeting of both sides */

/* Where cuts would be tried: a part of every feed-forward so large that all fill VRAM beside a
 * ring, and of the head what is left then; and less, where both sides then end together. Where all
 * layers have KV in VRAM, that of some of the KV heads or of the first blocks, too. */
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
    bool is_new = split.ffn > 0 || split.head > 0 || sl_split_cuts_kv(split);
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
static int32_t head_rows(const struct sl_search *s, const struct sl_bounds *b, double bytes)
{
    const struct sl_shard *const head = &s->model->shards[s->n_shards - 1];
    const int32_t n_rows = sl_shard_cut_end(s->model, head);
    const double part = fmin(bytes / (double)s->head_bytes, even_part(s, s->n_shards - 1));
    return b->head[1] && part > LEAST_HEAD_PART ? (int32_t)(part * n_rows) : 0;
}

/* Bytes for feed-forwards and head beside everything else that decode needs, but for its ring; with
 * this cut of attention or cache. */
static double bytes_left(struct sl_search *s, int32_t n_kv_layers, struct sl_split kv)
{
    sl_search_set_split(s, kv);
    double bytes = (double)s->budget_bytes - (double)sl_search_base_bytes(s, n_kv_layers) -
                   (double)sl_search_activation_bytes(s, s->decode_tier, true);
    for (int32_t i = 0; i < 2 * n_kv_layers; i += 2) {
        bytes -= (double)s->resident_bytes[i];
    }
    return bytes;
}

/* Cuts of dense feed-forwards and the head for what is left beside KV and attention. */
static void list_dense_splits(const struct sl_search *s, const struct sl_bounds *b, double left,
                              struct sl_split kv, struct split_list *list)
{
    const double n = s->n_layers, ffn = (double)s->max_ffn_bytes;
    const int32_t n_ff = sl_shard_cut_end(s->model, &s->model->shards[1]);
    struct sl_split split = kv;
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
static void list_head_splits(const struct sl_search *s, struct sl_split kv, struct split_list *list)
{
    const struct sl_shard *const head = &s->model->shards[s->n_shards - 1];
    const double even = even_part(s, s->n_shards - 1) * sl_shard_cut_end(s->model, head);
    struct sl_split split = kv;
    for (int32_t i = 1; i <= 4 && !sl_split_cuts_kv(kv); i *= 2) {
        split.head = (int32_t)(even / i);
        add_split(s, list, split);
    }
    split.head = sl_split_cuts_kv(kv) ? 0 : sl_shard_cut_unit(s->model, head);
    add_split(s, list, split);
}

/* Cuts of the other shards for this one of attention or cache; false when it leaves no room. */
static bool list_for_kv(struct sl_search *s, const struct sl_bounds *b, int32_t n_kv_layers,
                        struct sl_split kv, struct split_list *list)
{
    const double left = bytes_left(s, n_kv_layers, kv);
    if (left <= 0 && sl_split_cuts_kv(kv)) {
        return false;
    }
    if (s->n_experts > 0) {
        list_head_splits(s, kv, list);
    } else {
        list_dense_splits(s, b, left, kv, list);
    }
    return true;
}

/* By KV heads: the most that fit, and fewer. */
static void list_head_cuts(struct sl_search *s, const struct sl_bounds *b, struct split_list *list)
{
    int32_t last = 0;
    for (int32_t units = (int32_t)s->model->hp.n_kv_heads / s->heads_unit - 1; units > 0;) {
        const struct sl_split kv = {.kv_heads = units * s->heads_unit};
        if (list_for_kv(s, b, s->n_layers, kv, list)) {
            last = last > 0 ? last : units;
        }
        units -= last > 0 && last / 3 > 1 ? last / 3 : 1;
    }
}

/* By blocks, of one sequence: as many as hold the depth that is planned for, the most that fit, and
 * fewer. */
static void list_block_cuts(struct sl_search *s, const struct sl_bounds *b, struct split_list *list)
{
    const struct sl_split least = {.kv_blocks = SL_CUT_KV_BLOCKS};
    const int32_t n_blocks = (s->options.n_ctx + SL_KV_BLOCK - 1) / SL_KV_BLOCK;
    if (s->options.n_seqs > 1 || n_blocks <= least.kv_blocks) {
        return;
    }
    const double left = bytes_left(s, s->n_layers, least);
    const double unit_bytes = (double)s->kv_device_bytes * s->n_layers;
    const double room = 1 + floor(left / unit_bytes);
    if (room < 1) {
        return;
    }
    const int32_t n_units = (n_blocks - 1) / SL_CUT_KV_BLOCKS;
    const int32_t most = room < n_units ? (int32_t)room : n_units;
    const int32_t unit_tokens = SL_CUT_KV_BLOCKS * SL_KV_BLOCK;
    const int32_t at_depth = (s->depth + 2 * unit_tokens - 1) / unit_tokens;
    const int32_t units[] = {at_depth, most, most / 2, most / 4};
    for (size_t i = 0; i < sizeof units / sizeof units[0]; i++) {
        if (units[i] > 0 && units[i] <= most && (i == 0 || units[i] != at_depth)) {
            const struct sl_split kv = {.kv_blocks = units[i] * SL_CUT_KV_BLOCKS};
            list_for_kv(s, b, s->n_layers, kv, list);
        }
    }
}

static void list_splits(struct sl_search *s, const struct sl_bounds *b, int32_t n_kv_layers,
                        struct split_list *list)
{
    *list = (struct split_list){.n = 0};
    if (!b->split) {
        list->items[list->n++] = (struct sl_split){0};
        return;
    }
    const struct sl_split asked = s->options.split;
    if (asked.ffn > 0 || asked.head > 0 || sl_split_cuts_kv(asked)) {
        list->n = !sl_split_cuts_kv(asked) || n_kv_layers == s->n_layers;
        list->items[0] = asked;
        return;
    }
    if (n_kv_layers == s->n_layers) {
        list_head_cuts(s, b, list);
        list_block_cuts(s, b, list);
    }
    list_for_kv(s, b, n_kv_layers, (struct sl_split){0}, list);
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

/* VRAM of all tiers, of which each begins with the same. */
static void set_arena(struct sl_search *s, struct sl_choice *out)
{
    out->arena_bytes = 0;
    for (int32_t t = 0; t < out->n_tiers; t++) {
        const struct sl_candidate *const c = &out->tiers[t];
        if (!c->uses_device) {
            continue;
        }
        size_t used = sl_search_base_bytes(s, out->n_kv_layers) + c->top_bytes;
        sl_search_resident_order(s, out->n_kv_layers);
        for (int32_t i = 0; i < c->n_resident; i++) {
            used += s->resident_bytes[s->order[i]];
        }
        used += (size_t)c->n_slots * s->slot_bytes;
        out->arena_bytes = sl_max_size(out->arena_bytes, used);
    }
}

/* Plan every tier for one number of KV layers and one cut. Returns the score (lower is better), or
 * HUGE_VAL: also when it is clear that it would not be below `enough`. */
static double plan_tiers(struct sl_search *s, const struct sl_bounds *b, int32_t n_kv_layers,
                         double enough, struct sl_choice *out)
{
    *out = (struct sl_choice){.n_kv_layers = n_kv_layers, .split = s->split};
    const double least = SCORE_GENERATED * n_decode_passes(s, s->decode_tier);
    double best_ns_per_token = HUGE_VAL;
    int32_t best_tier = 0;
    for (int32_t t = 0; t < s->n_tiers; t++) {
        struct sl_candidate *const c = &out->tiers[t];
        bool found = s->budget_bytes > 0 && sl_search_tier_within(s, t, n_kv_layers, b, false, c);
        if (sl_search_host_counts(s, s->options.strategy, n_kv_layers)) {
            struct sl_candidate host = sl_search_host_candidate(s, t);
            sl_search_keep_better(s, &host, c, &found);
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
    set_arena(s, out);
    return SCORE_GENERATED * n_decode_passes(s, decode_tier) *
               out->tiers[decode_tier].result.pass_ns +
           SCORE_PROMPT * s->options.n_seqs * best_ns_per_token;
}

/* Numbers of KV layers worth trying: the most that fit beside their attention, fewer down to none,
 * and all (attention that has its KV in VRAM may be streamed). */
static int32_t kv_candidates(const struct sl_search *s, const struct sl_bounds *b, int32_t *out)
{
    if (s->budget_bytes == 0) {
        out[0] = 0;
        return 1;
    }
    if (b->kv_all_only) {
        out[0] = s->n_layers;
        return 1;
    }
    const size_t fixed = sl_search_base_bytes(s, 0) + sl_search_activation_bytes(s, 0, false);
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
static bool feasible(struct sl_search *s, const struct sl_bounds *b, uint64_t budget)
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
            found = sl_search_tier_within(s, 0, kv[i], b, true, &c);
        }
    }
    s->budget_bytes = kept;
    return found;
}

static uint64_t smallest_budget(struct sl_search *s, const struct sl_bounds *b)
{
    sl_search_set_split(s, (struct sl_split){0});
    uint64_t high =
        sl_search_base_bytes(s, s->n_layers) + sl_search_activation_bytes(s, 0, true) +
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
static bool try_kv_layers(struct sl_search *s, const struct sl_bounds *b, int32_t n_kv_layers,
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
static void refine_kv_layers(struct sl_search *s, const struct sl_bounds *b, int32_t step,
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

/* The best plan of a space, and its score; HUGE_VAL: none fits, or none that scores less than
 * `enough`. */
static double search_bounds(struct sl_search *s, const struct sl_bounds *b, double enough,
                            struct sl_choice *out)
{
    s->head_on_host = !b->head[1];
    int32_t kv[MAX_KV_CANDIDATES + 1];
    const int32_t n = kv_candidates(s, b, kv);
    double best = enough;
    bool found = false;
    for (int32_t i = 0; i < n; i++) {
        found = try_kv_layers(s, b, kv[i], &best, out) || found;
    }
    if (!found) {
        return HUGE_VAL;
    }
    if (n > 1) {
        refine_kv_layers(s, b, (kv[0] + MAX_KV_CANDIDATES - 1) / MAX_KV_CANDIDATES, &best, out);
    }
    return best;
}

/* Cuts are tried in a coarse space, since there are many: each tier of the one that was chosen in
 * the whole space, and by single feed-forwards. */
static void refine_tiers(struct sl_search *s, struct sl_choice *out)
{
    struct sl_bounds b = sl_bounds_of_strategy(SL_STRATEGY_AUTO);
    b.head[1] = !out->head_on_host;
    s->head_on_host = out->head_on_host;
    sl_search_set_split(s, out->split);
    for (int32_t t = 0; t < out->n_tiers; t++) {
        struct sl_candidate c;
        if (sl_search_tier_within(s, t, out->n_kv_layers, &b, false, &c) &&
            c.result.pass_ns < out->tiers[t].result.pass_ns) {
            out->tiers[t] = c;
        }
        sl_search_refine(s, &out->tiers[t]);
    }
    set_arena(s, out);
}

enum sluice_status sl_search_run(struct sl_search *s, struct sl_choice *out,
                                 struct sluice_error *err)
{
    const enum sl_strategy strategy = s->options.strategy;
    const struct sl_bounds b = sl_bounds_of_strategy(strategy);
    double best = search_bounds(s, &b, HUGE_VAL, out);
    if (strategy == SL_STRATEGY_AUTO) {
        /* The way to the best number of KV layers is local: make sure that it ends no worse than
         * that of a narrower space. */
        for (int32_t i = SL_STRATEGY_RESIDENT; i < SL_N_STRATEGIES; i++) {
            const struct sl_bounds narrow = sl_bounds_of_strategy((enum sl_strategy)i);
            struct sl_choice choice;
            const double enough = i == SL_STRATEGY_SPLIT ? best / SPLIT_MARGIN : best;
            const double value = search_bounds(s, &narrow, enough, &choice);
            if (value < enough) {
                best = value;
                *out = choice;
            }
        }
        if (best < HUGE_VAL && s->budget_bytes > 0) {
            refine_tiers(s, out);
        }
    }
    const bool device = s->profile->kind != SL_DEVICE_NONE && strategy != SL_STRATEGY_HOST;
    uint64_t smallest = device ? smallest_budget(s, &b) : 0;
    if (device && strategy == SL_STRATEGY_AUTO) { /* a part of a shard may fit where none does */
        const struct sl_bounds split = sl_bounds_of_strategy(SL_STRATEGY_SPLIT);
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
