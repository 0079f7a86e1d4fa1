/* SPDX-License-Identifier: Apache-2.0
 *
 * Expert slots and tables (see experts.h).
 */
#include "exec/experts.h"

#include <math.h>
#include <string.h>

#include "base/error.h"
#include "base/mem.h"

/* Slots that are compared when a cold one is looked for. */
#define SLOTS_LOOKED_AT 64
/* Passes up to this long have experts swapped beside them. */
#define SWAP_TOKENS 16
/* How much hotter an expert must be to take another's slot, beside one use. */
#define HOTTER 1.25F
/* Uses of a pass count so much more than those of the pass before. */
#define GAIN_A_PASS 1.01F

static uint32_t n_experts(const struct sl_context *ctx)
{
    return ctx->model->hp.n_experts;
}

/* The feed-forward of a layer. */
static const struct sl_shard *ffn(const struct sl_context *ctx, uint32_t layer)
{
    return &ctx->model->shards[2 * layer + 1];
}

static size_t matrix_bytes(const struct sl_context *ctx, const struct sl_weight *weight)
{
    return weight->bytes / n_experts(ctx);
}

static const uint8_t *in_file(const struct sl_context *ctx, const struct sl_weight *weight,
                              uint32_t expert)
{
    return (const uint8_t *)weight->m.data + expert * matrix_bytes(ctx, weight);
}

static uint8_t *slot_at(const struct sl_context *ctx, int32_t slot)
{
    return ctx->arena + ctx->plan->slots_offset + (size_t)slot * ctx->plan->slot_bytes;
}

/* Where host memory that grows with the model is needed. */
static enum sluice_status allocate(struct sl_context *ctx, size_t n_all, struct sluice_error *err)
{
    struct sl_experts *const x = &ctx->experts;
    bool good = true;
#define GRAB(field, n)                                                                             \
    good = good && (x->field = sl_calloc(SL_MEM_EXEC, (n), sizeof *x->field)) != NULL
    /* Plans that are tried while running may have more of them. */
    const struct sl_plan *const plan = ctx->plan;
    const size_t fit = (plan->arena_bytes - plan->slots_offset) / plan->slot_bytes;
    x->n_room = plan->arena_bytes <= plan->slots_offset ? 0
                : fit < n_all                           ? (int32_t)fit
                                                        : (int32_t)n_all;
    GRAB(slot_expert, (size_t)x->n_room + 1);
    GRAB(expert_slot, n_all);
    GRAB(is_stale, ctx->model->hp.n_layers);
    GRAB(uses_seen, n_all);
    GRAB(score, n_all);
    GRAB(order, n_all);
    GRAB(fed, n_all);
#undef GRAB
    SL_CHECK(good, OUT_OF_MEMORY, err, "no memory for the context");
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_experts_init(struct sl_context *ctx, const float *uses,
                                   struct sluice_error *err)
{
    const struct sl_plan *const plan = ctx->plan;
    if (!ctx->device || plan->layer_tables_bytes == 0) {
        return SLUICE_STATUS_OK;
    }
    struct sl_experts *const x = &ctx->experts;
    const size_t n_all = (size_t)ctx->model->hp.n_layers * n_experts(ctx);
    SL_TRY(allocate(ctx, n_all, err));
    SL_TRY(sl_host_buffer_init(ctx, &x->uses, n_all * sizeof(int32_t), "counts of experts", err));
    memset(x->uses.data, 0, x->uses.bytes);
    for (size_t e = 0; e < n_all; e++) {
        x->expert_slot[e] = -1;
        x->score[e] = uses ? uses[e] : 0;
    }
    x->gain = 1;
    SL_TRY(ctx->device->vt->event_create(ctx->device, false, &x->filled, err));
    SL_TRY(ctx->device->vt->copy_to_device(ctx->device, ctx->compute,
                                           ctx->arena + plan->uses_offset, x->uses.data,
                                           x->uses.bytes, err));
    return ctx->device->vt->stream_sync(ctx->device, ctx->compute, err);
}

void sl_experts_finish(struct sl_context *ctx)
{
    struct sl_experts *const x = &ctx->experts;
    if (x->filled) {
        ctx->device->vt->event_destroy(ctx->device, x->filled);
    }
    sl_host_buffer_finish(ctx, &x->uses);
    sl_free(x->slot_expert);
    sl_free(x->expert_slot);
    sl_free(x->is_stale);
    sl_free(x->uses_seen);
    sl_free(x->score);
    sl_free(x->order);
    sl_free(x->fed);
    memset(x, 0, sizeof *x);
}

static void give_slot(struct sl_context *ctx, int32_t slot, int32_t expert)
{
    struct sl_experts *const x = &ctx->experts;
    x->slot_expert[slot] = expert;
    x->expert_slot[expert] = slot;
    x->is_stale[(uint32_t)expert / n_experts(ctx)] = true;
}

static void empty_slot(struct sl_context *ctx, int32_t slot)
{
    struct sl_experts *const x = &ctx->experts;
    const int32_t expert = x->slot_expert[slot];
    if (expert >= 0) {
        x->expert_slot[expert] = -1;
        x->is_stale[(uint32_t)expert / n_experts(ctx)] = true;
    }
    x->slot_expert[slot] = -1;
}

/* Slots from `first` on have lost their bytes. */
static void lose_slots(struct sl_context *ctx, int32_t first)
{
    struct sl_experts *const x = &ctx->experts;
    for (int32_t s = first; s < x->n_valid; s++) {
        empty_slot(ctx, s);
    }
    x->n_valid = first < x->n_valid ? first : x->n_valid;
}

void sl_experts_forget(struct sl_context *ctx)
{
    lose_slots(ctx, 0);
    ctx->experts.tables_of = NULL;
    ctx->experts.n_swaps = 0;
}

static enum sluice_status fill_slot(struct sl_context *ctx, int32_t slot, int32_t id,
                                    struct sluice_error *err)
{
    const uint32_t expert = (uint32_t)id % n_experts(ctx);
    const struct sl_shard *const shard = ffn(ctx, (uint32_t)id / n_experts(ctx));
    const int32_t mark = sl_trace_begin(ctx->trace, SL_LANE_COPY, "an expert of",
                                        (int32_t)(shard - ctx->model->shards));
    size_t all = 0;
    for (uint32_t w = 0; w < SL_N_FFN_WEIGHTS; w++) {
        const struct sl_weight *const weight = &shard->weights[w];
        const size_t bytes = matrix_bytes(ctx, weight);
        SL_TRY(ctx->device->vt->copy_to_device(ctx->device, ctx->copy,
                                               slot_at(ctx, slot) + weight->part_offset,
                                               in_file(ctx, weight, expert), bytes, err));
        ctx->stats.copied_bytes += bytes;
        all += bytes;
    }
    sl_trace_end(ctx->trace, mark, all);
    return SLUICE_STATUS_OK;
}

/* With all experts in VRAM, or none, nobody needs to know which are used. */
static bool counts_uses(const struct sl_context *ctx)
{
    const size_t n_all = (size_t)ctx->model->hp.n_layers * n_experts(ctx);
    bool some = ctx->plan->n_slots > 0;
    for (int32_t t = 0; t < ctx->plan->n_tiers; t++) {
        some = some || ctx->plan->tiers[t].n_fed > 0;
    }
    return some && (size_t)ctx->plan->n_slots < n_all;
}

static bool has_slot(const struct sl_context *ctx, const struct sl_tier_plan *tier, uint32_t layer,
                     uint32_t expert)
{
    const int32_t slot = ctx->experts.expert_slot[layer * n_experts(ctx) + expert];
    return slot >= 0 && slot < tier->n_slots;
}

/* Where the ring has the item of a layer's feed-forward in this tier; NULL: it does not use it. */
static const uint8_t *ring_image(const struct sl_context *ctx, const struct sl_tier_plan *tier,
                                 uint32_t layer)
{
    const int32_t shard = (int32_t)(2 * layer + 1);
    for (int32_t k = 0; k < tier->n_steps; k++) {
        const struct sl_step *const step = &tier->steps[k];
        if (step->shard == shard && step->kind == SL_STEP_COPY) {
            return ctx->arena + tier->ring_offset + step->ring_offset;
        }
    }
    return NULL;
}

/* Whose use has come to so much of the mean goes ahead of those below it. */
static const float feed_classes[] = {2.8F, 1.4F, 0.7F, 0};
#define N_FEED_CLASSES (sizeof feed_classes / sizeof feed_classes[0])

/* Choose the experts of a layer that come through the ring: by classes of use, so that what is
 * chance does not part neighbours, which are copied together. Each gets its number in the item. */
static void choose_fed(const struct sl_context *ctx, const struct sl_tier_plan *tier,
                       uint32_t layer)
{
    const uint32_t n = n_experts(ctx);
    const float *const score = ctx->experts.score + (size_t)layer * n;
    int32_t *const fed = ctx->experts.fed + (size_t)layer * n;
    float sum = 0;
    int32_t n_missing = 0;
    for (uint32_t e = 0; e < n; e++) {
        const bool missing = !has_slot(ctx, tier, layer, e);
        sum += missing ? score[e] : 0;
        n_missing += missing;
        fed[e] = -1;
    }
    const float mean = sum / (float)(n_missing > 0 ? n_missing : 1);
    int32_t left = ctx->experts.n_fed;
    for (size_t c = 0; c < N_FEED_CLASSES; c++) {
        for (uint32_t e = 0; e < n && left > 0; e++) {
            if (fed[e] < 0 && score[e] >= feed_classes[c] * mean &&
                !has_slot(ctx, tier, layer, e)) {
                fed[e] = 0;
                left--;
            }
        }
    }
    int32_t k = 0;
    for (uint32_t e = 0; e < n; e++) {
        fed[e] = fed[e] == 0 ? k++ : -1;
    }
}

/* Of a fed layer's item: all gates, then all ups, then all downs. */
static size_t fed_offset(const struct sl_context *ctx, const struct sl_tier_plan *tier,
                         const struct sl_weight *weight, int32_t k)
{
    return (size_t)tier->n_fed * weight->part_offset + (size_t)k * matrix_bytes(ctx, weight);
}

/* Addresses of a layer's experts as the kernels of this tier see them. */
static void make_tables(const struct sl_context *ctx, const struct sl_tier_plan *tier,
                        uint32_t layer, uint8_t *out)
{
    const uint32_t n = n_experts(ctx);
    const struct sl_shard *const shard = ffn(ctx, layer);
    const uint8_t *const image = ring_image(ctx, tier, layer);
    const int32_t *const fed = ctx->experts.fed + (size_t)layer * n;
    const bool is_fed = tier->n_fed > 0;
    if (is_fed) {
        choose_fed(ctx, tier, layer);
    }
    const void **const table = (const void **)(void *)out;
    uint8_t *const at_hand = out + 3 * n * sizeof *table;
    for (uint32_t e = 0; e < n; e++) {
        const bool slotted = has_slot(ctx, tier, layer, e);
        at_hand[e] = slotted || (is_fed && fed[e] >= 0);
        const int32_t slot = ctx->experts.expert_slot[layer * n + e];
        for (uint32_t w = 0; w < SL_N_FFN_WEIGHTS; w++) {
            const struct sl_weight *const weight = &shard->weights[w];
            const uint8_t *at = NULL;
            if (slotted) {
                at = slot_at(ctx, slot) + weight->part_offset;
            } else if (at_hand[e]) {
                at = image + fed_offset(ctx, tier, weight, fed[e]);
            } else if (image && !is_fed) {
                at = image + weight->offset + e * matrix_bytes(ctx, weight);
            } else if (ctx->files_are_mapped) {
                at = in_file(ctx, weight, e);
            }
            table[w * n + e] = at;
        }
    }
}

/* Of two experts the one to have a slot first: by score, among equals evenly over the layers. */
static bool goes_first(const struct sl_context *ctx, int32_t a, int32_t b)
{
    const struct sl_experts *const x = &ctx->experts;
    if (x->score[a] != x->score[b]) {
        return x->score[a] > x->score[b];
    }
    const int32_t n = (int32_t)n_experts(ctx);
    return a % n != b % n ? a % n < b % n : a < b;
}

/* Shell's sort: no memory of its own, and it runs when a prompt ends, not for every token. */
static void sort_by_score(struct sl_context *ctx)
{
    int32_t *const order = ctx->experts.order;
    const int32_t n_all = (int32_t)(ctx->model->hp.n_layers * n_experts(ctx));
    for (int32_t k = 0; k < n_all; k++) {
        order[k] = k;
    }
    int32_t gap = 1;
    while (gap < n_all / 3) {
        gap = 3 * gap + 1;
    }
    for (; gap > 0; gap /= 3) {
        for (int32_t k = gap; k < n_all; k++) {
            const int32_t moved = order[k];
            int32_t at = k;
            for (; at >= gap && goes_first(ctx, moved, order[at - gap]); at -= gap) {
                order[at] = order[at - gap];
            }
            order[at] = moved;
        }
    }
}

/* The tier has more slots than the last one: the experts that are used most and have none go there.
 */
static enum sluice_status fill_up(struct sl_context *ctx, const struct sl_tier_plan *tier,
                                  struct sluice_error *err)
{
    struct sl_experts *const x = &ctx->experts;
    sort_by_score(ctx);
    for (int32_t k = 0; x->n_valid < tier->n_slots; k++) {
        const int32_t expert = x->order[k];
        if (x->expert_slot[expert] < 0) {
            SL_TRY(fill_slot(ctx, x->n_valid, expert, err));
            give_slot(ctx, x->n_valid++, expert);
        }
    }
    SL_TRY(ctx->device->vt->event_record(ctx->device, x->filled, ctx->copy, err));
    return ctx->device->vt->stream_wait(ctx->device, ctx->compute, x->filled, err);
}

/* The slot of lowest score among the next few; going round, all get their turn. */
static int32_t cold_slot(struct sl_context *ctx)
{
    struct sl_experts *const x = &ctx->experts;
    int32_t coldest = -1;
    for (int32_t k = 0; k < SLOTS_LOOKED_AT && k < x->n_valid; k++) {
        x->hand = (x->hand + 1) % x->n_valid;
        const int32_t expert = x->slot_expert[x->hand];
        if (expert >= 0 && (coldest < 0 || x->score[expert] < x->score[x->slot_expert[coldest]])) {
            coldest = x->hand;
        }
    }
    return coldest;
}

/* Experts whose copies were queued in the last pass are there now. */
static void finish_swaps(struct sl_context *ctx)
{
    struct sl_experts *const x = &ctx->experts;
    for (int32_t i = 0; i < x->n_swaps; i++) {
        if (x->swaps[i].slot < x->n_valid) {
            give_slot(ctx, x->swaps[i].slot, x->swaps[i].expert);
        }
    }
    x->n_swaps = 0;
}

/* Give slots of cold experts to hot ones that have none: those that the last pass missed. */
static enum sluice_status begin_swaps(struct sl_context *ctx, struct sluice_error *err)
{
    struct sl_experts *const x = &ctx->experts;
    while (x->n_swaps < x->n_wanted) {
        const int32_t expert = x->wanted[x->n_swaps];
        const int32_t slot = cold_slot(ctx);
        if (slot < 0 || x->score[expert] < HOTTER * x->score[x->slot_expert[slot]] + x->gain) {
            break;
        }
        empty_slot(ctx, slot);
        SL_TRY(fill_slot(ctx, slot, expert, err));
        x->swaps[x->n_swaps++] = (struct sl_swap){slot, expert};
        ctx->stats.n_expert_swaps++;
    }
    x->n_wanted = 0;
    return SLUICE_STATUS_OK;
}

static enum sluice_status send_tables(struct sl_context *ctx, const struct sl_tier_plan *tier,
                                      struct sluice_error *err)
{
    struct sl_experts *const x = &ctx->experts;
    const struct sl_plan *const plan = ctx->plan;
    uint8_t *const tables = ctx->tables.data;
    const uint32_t n_layers = ctx->model->hp.n_layers;
    const size_t each = plan->layer_tables_bytes;
    for (uint32_t layer = 0; layer < n_layers; layer++) {
        /* What is fed is chosen anew for every pass. */
        x->is_stale[layer] = x->is_stale[layer] || x->tables_of != tier || tier->n_fed > 0;
        if (x->is_stale[layer]) {
            make_tables(ctx, tier, layer, tables + layer * each);
        }
    }
    for (uint32_t layer = 0; layer < n_layers;) {
        uint32_t end = layer;
        while (end < n_layers && x->is_stale[end]) {
            x->is_stale[end++] = false;
        }
        if (end > layer) {
            SL_TRY(ctx->device->vt->copy_to_device(
                ctx->device, ctx->compute, ctx->arena + plan->tables_offset + layer * each,
                tables + layer * each, (end - layer) * each, err));
        }
        layer = end + 1;
    }
    x->tables_of = tier;
    return SLUICE_STATUS_OK;
}

/* What the plan settled for full passes, of a shorter one: fewer experts are used, so less is worth
 * being fed. Between this tier and the one below along a straight line over the logarithm of the
 * tokens. */
static void set_pass(struct sl_context *ctx, const struct sl_tier_plan *tier, int32_t n_tokens)
{
    struct sl_experts *const x = &ctx->experts;
    x->n_fed = tier->n_fed;
    x->share = tier->share;
    if (tier == ctx->plan->tiers || n_tokens >= tier->n_tokens) {
        return;
    }
    const struct sl_tier_plan *const below = tier - 1;
    const double part =
        log((double)n_tokens / below->n_tokens) / log((double)tier->n_tokens / below->n_tokens);
    if (below->n_fed < tier->n_fed) {
        x->n_fed = below->n_fed + (int32_t)lround(part * (tier->n_fed - below->n_fed));
    }
    const bool both =
        tier->n_fed == 0 && below->n_fed == 0 && tier->share >= 0 && below->share >= 0;
    if (both && tier->share < SL_DIVIDE_ALL) { /* else nobody computes what is left */
        x->share = below->share + (int32_t)lround(part * (tier->share - below->share));
    }
}

enum sluice_status sl_experts_begin(struct sl_context *ctx, const struct sl_tier_plan *tier,
                                    int32_t n_tokens, bool *copied, struct sluice_error *err)
{
    struct sl_experts *const x = &ctx->experts;
    if (ctx->plan->layer_tables_bytes == 0) {
        return SLUICE_STATUS_OK;
    }
    set_pass(ctx, tier, n_tokens);
    finish_swaps(ctx);
    lose_slots(ctx, tier->n_slots);
    if (x->n_valid < tier->n_slots) {
        SL_TRY(fill_up(ctx, tier, err));
        *copied = true;
    } else if (tier->n_tokens <= SWAP_TOKENS && x->n_wanted > 0) {
        SL_TRY(begin_swaps(ctx, err));
        *copied = *copied || x->n_swaps > 0;
    }
    return send_tables(ctx, tier, err);
}

enum sluice_status sl_experts_end(struct sl_context *ctx, struct sluice_error *err)
{
    const struct sl_plan *const plan = ctx->plan;
    if (!counts_uses(ctx)) {
        return SLUICE_STATUS_OK;
    }
    return ctx->device->vt->copy_to_host(ctx->device, ctx->compute, ctx->experts.uses.data,
                                         ctx->arena + plan->uses_offset, ctx->experts.uses.bytes,
                                         err);
}

/* Keep the missing experts of highest score in `wanted`. */
static void want(struct sl_experts *x, int32_t expert)
{
    int32_t at = x->n_wanted < SL_MAX_SWAPS ? x->n_wanted++ : SL_MAX_SWAPS - 1;
    if (at == SL_MAX_SWAPS - 1 && x->n_wanted == SL_MAX_SWAPS && x->wanted[at] >= 0 &&
        x->score[x->wanted[at]] >= x->score[expert]) {
        return;
    }
    for (; at > 0 && x->score[expert] > x->score[x->wanted[at - 1]]; at--) {
        x->wanted[at] = x->wanted[at - 1];
    }
    x->wanted[at] = expert;
}

void sl_experts_learn(struct sl_context *ctx)
{
    struct sl_experts *const x = &ctx->experts;
    if (!counts_uses(ctx)) {
        return;
    }
    const size_t n_all = (size_t)ctx->model->hp.n_layers * n_experts(ctx);
    const int32_t *const uses = x->uses.data;
    x->n_wanted = 0;
    for (size_t e = 0; e < n_all; e++) {
        const int32_t n = uses[e] - x->uses_seen[e];
        if (n != 0) {
            x->uses_seen[e] = uses[e];
            x->score[e] += (float)n * x->gain;
            ctx->stats.n_expert_uses += (uint64_t)n;
            if (x->expert_slot[e] < 0) {
                want(x, (int32_t)e);
            } else {
                ctx->stats.n_expert_hits += (uint64_t)n;
            }
        }
    }
    x->gain *= GAIN_A_PASS;
    if (x->gain > 1e6F) {
        for (size_t e = 0; e < n_all; e++) {
            x->score[e] /= x->gain;
        }
        x->gain = 1;
    }
}

bool sl_context_get_expert_uses(const struct sl_context *ctx, float *out)
{
    const struct sl_experts *const x = &ctx->experts;
    if (!x->score) {
        return false;
    }
    for (size_t e = 0; e < (size_t)ctx->model->hp.n_layers * n_experts(ctx); e++) {
        out[e] = x->score[e] / x->gain;
    }
    return true;
}

static bool comes_through_ring(const struct sl_context *ctx, const struct sl_tier_plan *tier,
                               uint32_t layer, uint32_t expert)
{
    return tier->n_fed > 0 ? ctx->experts.fed[layer * n_experts(ctx) + expert] >= 0
                           : !has_slot(ctx, tier, layer, expert);
}

enum sluice_status sl_experts_stream(struct sl_context *ctx, const struct sl_tier_plan *tier,
                                     int32_t shard_index, uint8_t *image, struct sluice_error *err)
{
    const struct sl_shard *const shard = &ctx->model->shards[shard_index];
    const int32_t *const fed = ctx->experts.fed + (size_t)shard->layer * n_experts(ctx);
    for (uint32_t w = 0; w < SL_N_FFN_WEIGHTS; w++) {
        const struct sl_weight *const weight = &shard->weights[w];
        const size_t each = matrix_bytes(ctx, weight);
        for (uint32_t e = 0; e < n_experts(ctx);) {
            if (!comes_through_ring(ctx, tier, shard->layer, e)) {
                e++;
                continue;
            }
            uint32_t end = e + 1; /* neighbours go in one copy */
            while (end < n_experts(ctx) && comes_through_ring(ctx, tier, shard->layer, end)) {
                end++;
            }
            const size_t bytes = (end - e) * each;
            const size_t at =
                tier->n_fed > 0 ? fed_offset(ctx, tier, weight, fed[e]) : weight->offset + e * each;
            SL_TRY(ctx->device->vt->copy_to_device(ctx->device, ctx->copy, image + at,
                                                   in_file(ctx, weight, e), bytes, err));
            ctx->stats.copied_bytes += bytes;
            e = end;
        }
    }
    return SLUICE_STATUS_OK;
}

void sl_experts_bind(const struct sl_context *ctx, uint32_t layer, struct sl_shard_bind *bind)
{
    const struct sl_plan *const plan = ctx->plan;
    const uint8_t *const tables =
        ctx->arena + plan->tables_offset + layer * plan->layer_tables_bytes;
    const void *const *const table = (const void *const *)(const void *)tables;
    for (uint32_t w = 0; w < SL_N_FFN_WEIGHTS; w++) {
        bind->experts[w] = table + w * n_experts(ctx);
    }
    bind->at_hand = tables + 3 * n_experts(ctx) * sizeof *table;
    bind->uses = !counts_uses(ctx)
                     ? NULL
                     : (int32_t *)(void *)(ctx->arena + plan->uses_offset) + layer * n_experts(ctx);
    bind->share = ctx->experts.share < 0 || !ctx->files_are_mapped ? 0 : ctx->experts.share;
}
