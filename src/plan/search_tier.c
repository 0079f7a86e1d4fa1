/* SPDX-License-Identifier: Apache-2.0
 *
 * The search of one tier, for a number of layers with KV in VRAM: ring size, where the head and the
 * remaining attention go, how many of the feed-forwards that are not resident are streamed, and
 * what becomes of a mixture's experts. Residency itself is hardly a variable: as much of the
 * resident order as fits, or the layers that are resident as a whole, or attention alone. (An FFN
 * on the GPU between two attentions on the CPU costs two moves of the hidden state, which can be
 * more than it gains.)
 */
#include "plan/search_internal.h"

#include <math.h>
#include <string.h>

#include "base/random.h"

#define FFN_GRID 12
#define MIXTURE_GRID 4 /* their slots vary what is streamed already */
#define SPLIT_GRID 6   /* so do cuts */
/* Feeding copies experts that nobody uses, too: not worth a try where they are most of them. */
#define FED_LEAST_READ 0.25
/* In longer passes the CPU's part is arithmetic for many tokens: gains are small, and gone when
 * something else wants the cores. */
#define FED_MOST_TOKENS 512
/* Half as fine as the number of a layer's experts that are fed is searched, and where the search
 * begins. */
#define FED_STEPS 64
#define FED_GUESS_STEP 8

/* Of the bound's rounding. */
#define LEAST_MARGIN 1e-9

/* Score a candidate whose counts are set; false when it cannot run, or not in less than `enough`.
 */
static bool score(struct sl_search *s, struct sl_candidate *c, double enough)
{
    if (sl_cost_least_ns(s, c) * (1 - LEAST_MARGIN) >= enough) {
        return false;
    }
    sl_search_place(s, c, s->placement);
    const struct sl_shard_cost *const *const cost = sl_cost_candidate(s, c);
    const struct sl_hop_cost *const hop = &s->hop[c->tier];
    if (enough < HUGE_VAL &&
        sl_steps_least_ns(s->placement, cost, s->n_shards, hop) * (1 - LEAST_MARGIN) >= enough) {
        return false;
    }
    const int32_t n_steps = sl_steps_compile(s->placement, s->item_bytes, s->n_shards,
                                             c->ring_bytes, s->steps, s->step_scratch);
    if (n_steps < 0) {
        return false;
    }
    c->result = sl_steps_simulate(s->steps, n_steps, s->placement, cost, hop, s->done_ns,
                                  s->ready_ns, s->timeline);
    return enough == HUGE_VAL || c->result.pass_ns < enough;
}

void sl_search_timeline(struct sl_search *s, const struct sl_candidate *c,
                        struct sl_timeline *timeline)
{
    struct sl_candidate again = *c;
    s->timeline = timeline;
    score(s, &again, HUGE_VAL);
    s->timeline = NULL;
}

/* Set n_resident to what fits; false when the fixed parts alone do not. */
static bool fill_resident(struct sl_search *s, struct sl_candidate *c, int32_t most)
{
    size_t used = sl_search_base_bytes(s, c->n_kv_layers) + c->top_bytes;
    if (used > s->budget_bytes) {
        return false;
    }
    const int32_t n_order = sl_search_resident_order(s, c->n_kv_layers);
    /* A whole head is the last in the order. */
    const bool no_head = !c->head_on_device && s->split.head == 0 && !s->head_on_host;
    int32_t fit = no_head ? n_order - 1 : n_order, none = 0;
    fit = most < fit ? most : fit;
    while (none < fit) { /* the first `none` do, more than `fit` do not or are not wanted */
        const int32_t middle = (none + fit + 1) / 2;
        if (used + s->order_bytes[middle] <= s->budget_bytes) {
            none = middle;
        } else {
            fit = middle - 1;
        }
    }
    c->n_resident = fit;
    used += s->order_bytes[fit];
    c->n_slots = 0;
    if (s->n_experts > 0 && c->n_resident == n_order) {
        const uint64_t slots = (s->budget_bytes - used) / s->slot_bytes;
        c->n_slots = slots < (uint64_t)s->n_experts ? (int32_t)slots : s->n_experts;
    }
    return true;
}

struct sl_bounds sl_bounds_of_strategy(enum sl_strategy strategy)
{
    struct sl_bounds b = {.most_resident = INT32_MAX};
    switch (strategy) {
    case SL_STRATEGY_AUTO:
    case SL_STRATEGY_SPLIT:
        b = (struct sl_bounds){{true, true, true, true},
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

size_t sl_search_activation_bytes(const struct sl_search *s, int32_t tier, bool head_on_device)
{
    const struct sl_tier_sizes *const z = &s->sizes[tier];
    return z->hidden_bytes + z->io_bytes + z->workspace_bytes + z->scratch_bytes +
           (head_on_device ? z->logits_bytes : 0);
}

/* The largest item of an attention that brings its KV; 0: none does. */
static size_t attention_item_bytes(const struct sl_search *s, const struct sl_candidate *c)
{
    return sl_search_streams_kv(s, c) ? s->max_attention_rest_bytes + s->kv_host_bytes : 0;
}

/* Ring size for a multiple of the largest shard that may be streamed in this candidate. Of
 * feed-forwards that are cut only the rest comes, if all have their part in the prefix. */
static size_t ring_bytes(const struct sl_search *s, const struct sl_candidate *c, int32_t multiple,
                         bool head_streamed, bool ffn_whole)
{
    size_t item = sl_max_size(ffn_whole ? s->max_ffn_bytes : s->max_rest_bytes,
                              sl_split_cuts_kv(s->split) ? 0 : s->max_attention_bytes);
    item = sl_max_size(item, attention_item_bytes(s, c));
    size_t bytes = (size_t)multiple * item;
    if (multiple > 0 && head_streamed) {
        bytes = sl_max_size(bytes, s->head_bytes);
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

/* A number below n, at least 1. */
static int32_t draw_below(struct sl_search *s, int32_t n)
{
    return (int32_t)((sl_random_next(s->random) >> 33) % (uint64_t)n);
}

void sl_search_keep_better(struct sl_search *s, struct sl_candidate *c, struct sl_candidate *best,
                           bool *found)
{
    if (s->random) { /* the k-th takes the place of the one that was drawn one time in k */
        if (score(s, c, HUGE_VAL) && is_unlike(s, c) && draw_below(s, ++s->n_drawn) == 0) {
            *best = *c;
            *found = true;
        }
        return;
    }
    if (score(s, c, *found ? best->result.pass_ns : HUGE_VAL) && is_unlike(s, c)) {
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
static void search_shares(struct sl_search *s, struct sl_candidate c, const struct sl_bounds *b,
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
        sl_search_keep_better(s, &c, best, found);
    }
}

/* Try every streamed count for a candidate that is otherwise set; keep the best in *best. */
static void search_ffn(struct sl_search *s, struct sl_candidate c, const struct sl_bounds *b,
                       bool feasible_only, struct sl_candidate *best, bool *found)
{
    const bool mixture = s->n_experts > 0;
    const bool head_resident = head_in_prefix(s, &c);
    const int32_t left = ffn_left(s, &c);
    const bool must_stream = c.n_resident < c.n_kv_layers || (c.head_on_device && !head_resident) ||
                             sl_search_streams_kv(s, &c);
    if (c.head_on_device && !head_resident && c.ring_bytes < s->head_bytes) {
        return; /* the head would have to be streamed and does not fit the ring */
    }
    if (sl_split_cuts_kv(s->split) && c.n_resident < c.n_kv_layers) {
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
        sl_search_keep_better(s, &c, best, found);
    }
}

/* One way to feed a mixture's layers: what fits. False: it cannot be. */
static bool fill_fed(struct sl_search *s, struct sl_candidate *c, const struct sl_bounds *b,
                     int32_t multiple, int32_t n_fed, bool head_streamed)
{
    size_t item = (size_t)n_fed * s->slot_bytes;
    item = sl_max_size(item, attention_item_bytes(s, c));
    c->n_fed = n_fed;
    c->ring_bytes = (size_t)multiple * item;
    if (head_streamed) {
        c->ring_bytes = sl_max_size(c->ring_bytes, s->head_bytes);
    }
    c->top_bytes = c->ring_bytes + sl_search_activation_bytes(s, c->tier, c->head_on_device);
    if (!fill_resident(s, c, b->most_resident) || ffn_in_prefix(s, c) < s->n_layers) {
        return false;
    }
    return !c->head_on_device || head_in_prefix(s, c) != head_streamed;
}

/* Where to begin: the number for which the counts alone promise most, or the middle. */
static int32_t guess_fed(struct sl_search *s, struct sl_candidate c, const struct sl_bounds *b,
                         int32_t multiple, bool head_streamed)
{
    const int32_t n = (int32_t)s->model->hp.n_experts;
    int32_t guess = n / 2;
    double least = HUGE_VAL;
    for (int32_t n_fed = FED_GUESS_STEP; s->layers_alike && n_fed < n; n_fed += FED_GUESS_STEP) {
        if (fill_fed(s, &c, b, multiple, n_fed, head_streamed)) {
            const double ns = sl_cost_least_ns(s, &c);
            guess = ns < least ? n_fed : guess;
            least = ns < least ? ns : least;
        }
    }
    return guess;
}

/* How many experts of a layer come through the ring: the more, the longer the copies take and the
 * shorter the CPU; so up or down by ever smaller steps. */
static void search_fed(struct sl_search *s, struct sl_candidate c, const struct sl_bounds *b,
                       int32_t multiple, bool head_streamed, struct sl_candidate *best, bool *found)
{
    const struct sl_hparams *const hp = &s->model->hp;
    const int32_t n = (int32_t)hp->n_experts, n_tokens = sl_tier_tokens[c.tier];
    const double read = sl_profile_experts_read(n, hp->n_experts_used, n_tokens);
    const bool too_long =
        n_tokens > FED_MOST_TOKENS && s->options.strategy != SL_STRATEGY_EXPERTS_FED;
    if (!b->ffn_fed || too_long || s->n_experts == 0 || multiple == 0 ||
        read < FED_LEAST_READ * n) {
        return;
    }
    c.uses_device = true;
    c.share = 0;
    if (s->random) {
        if (n > 1 && fill_fed(s, &c, b, multiple, 1 + draw_below(s, n - 1), head_streamed)) {
            sl_search_keep_better(s, &c, best, found);
        }
        return;
    }
    struct sl_candidate at = c, next = c;
    bool have = false;
    int32_t middle = guess_fed(s, c, b, multiple, head_streamed);
    int32_t step = s->layers_alike ? FED_GUESS_STEP : n / 4;
    for (bool first = true; step > n / FED_STEPS; step /= first ? 1 : 2, first = false) {
        const int32_t tries[] = {first ? middle : middle + step, middle - step};
        for (int i = 0; i < (first ? 1 : 2); i++) {
            if (tries[i] > 0 && tries[i] < n &&
                fill_fed(s, &next, b, multiple, tries[i], head_streamed) &&
                score(s, &next, have ? at.result.pass_ns : HUGE_VAL) && is_unlike(s, &next)) {
                at = next;
                have = true;
            }
        }
        middle = have ? at.n_fed : middle;
    }
    if (have && (!*found || at.result.pass_ns < best->result.pass_ns)) {
        *best = at;
        *found = true;
    }
}

/* Best candidate of a tier that uses the device, for a number of layers with KV in VRAM. */
bool sl_search_tier_within(struct sl_search *s, int32_t tier, int32_t n_kv_layers,
                           const struct sl_bounds *b, bool feasible_only, struct sl_candidate *best)
{
    bool found = false;
    for (int32_t k = 0; k < 4 * 2 * 2 && !(found && feasible_only); k++) {
        const int32_t multiple = k / 4, head = k / 2 % 2, attention = k % 2;
        if (!b->ring[multiple] || !b->head[head] || !b->attention[attention]) {
            continue;
        }
        if (attention == 1 && n_kv_layers == s->n_layers && b->attention[0] &&
            !sl_split_cuts_kv(s->split)) {
            continue; /* the same as attention == 0 */
        }
        if (attention == 0 && sl_split_cuts_kv(s->split) &&
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
            c.top_bytes = c.ring_bytes + sl_search_activation_bytes(s, tier, c.head_on_device);
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

void sl_search_refine(struct sl_search *s, struct sl_candidate *c)
{
    const int32_t left = s->n_experts > 0 || c->n_ffn_streamed == 0 ? 0 : ffn_left(s, c);
    bool found = true;
    for (int32_t step = (left + FFN_GRID - 1) / FFN_GRID; step > 0; step /= 2) {
        const int32_t middle = c->n_ffn_streamed;
        for (int32_t k = -1; k <= 1; k += 2) {
            struct sl_candidate next = *c;
            next.n_ffn_streamed = middle + k * step;
            if (next.n_ffn_streamed > 0 && next.n_ffn_streamed <= left) {
                sl_search_keep_better(s, &next, c, &found);
            }
        }
    }
}

/* The candidate with everything on the CPU. */
struct sl_candidate sl_search_host_candidate(struct sl_search *s, int32_t tier)
{
    struct sl_candidate c = {.tier = tier, .share = SL_SHARE_HOST};
    score(s, &c, HUGE_VAL);
    return c;
}

/* No GPU or no budget at all: every strategy means the CPU then. */
static bool cpu_only(const struct sl_search *s)
{
    return s->profile->kind == SL_DEVICE_NONE || s->options.budget_bytes == 0;
}

/* Whether the CPU alone is an answer too: attention there means that no KV is in VRAM. */
bool sl_search_host_counts(const struct sl_search *s, enum sl_strategy strategy,
                           int32_t n_kv_layers)
{
    return n_kv_layers == 0 &&
           (strategy == SL_STRATEGY_AUTO || strategy == SL_STRATEGY_HOST || cpu_only(s));
}

bool sl_search_tier(struct sl_search *s, enum sl_strategy strategy, int32_t tier,
                    int32_t n_kv_layers, struct sl_candidate *out)
{
    struct sl_bounds b = sl_bounds_of_strategy(strategy);
    b.head[1] = b.head[1] && !s->head_on_host;
    if (s->random && draw_below(s, 2) == 0) { /* or as much as fits, as the search has it */
        b.most_resident = draw_below(s, s->n_shards + 1);
    }
    bool found = s->budget_bytes > 0 && sl_search_tier_within(s, tier, n_kv_layers, &b, false, out);
    if (sl_search_host_counts(s, strategy, n_kv_layers)) {
        struct sl_candidate host = sl_search_host_candidate(s, tier);
        sl_search_keep_better(s, &host, out, &found);
    }
    return found;
}
