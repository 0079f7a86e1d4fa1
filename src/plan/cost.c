/* SPDX-License-Identifier: Apache-2.0
 *
 * What things cost on this machine: a shard in a tier from its operators and the profile, one that
 * is cut by its parts, a mixture's layer by the counts of a candidate, and the limit that no
 * schedule can beat.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/mem.h"
#include "plan/search.h"

/* The driver's time to queue a copy, or to mark or await one, beside that of an operator. */
#define COPY_ISSUE 0.5

/* What a row that lies apart from the next costs a copy beside its bytes: found from two plans that
 * streamed such rows, of 1 and 4 KiB, on an H200. */
#define APART_ROW_NS 24

static int32_t tier_of(int32_t n_tokens)
{
    int32_t t = 0;
    while (t + 1 < SL_N_TIERS && sl_tier_tokens[t] < n_tokens) {
        t++;
    }
    return t;
}

static struct sl_shard_bind bind_for_cost(const struct sl_search *s, int32_t n_tokens)
{
    const struct sl_hparams *const hp = &s->model->hp;
    return (struct sl_shard_bind){.n_tokens = n_tokens,
                                  .n_kv_max = s->depth + n_tokens,
                                  .n_outputs = 1,
                                  .kv = {.types = s->options.kv_types,
                                         .n_kv_heads = (int32_t)hp->n_kv_heads,
                                         .n_first = s->split.kv_blocks,
                                         .head_dim = (int32_t)hp->head_dim}};
}

static double list_ns(const struct sl_search *s, enum sl_unit unit, const struct sl_op *ops,
                      int n_ops, int32_t n_tokens)
{
    return sl_profile_list_ns(s->profile, unit, ops, n_ops, s->depth,
                              sl_search_sequences(s, n_tokens));
}

/* The same by what the model was timed at. On the GPU what a deeper cache adds to that is by the
 * machine's own figures: the factor of a short list is mostly one of launches, of which depth adds
 * none. */
static double timed_ns(const struct sl_search *s, enum sl_unit unit, const struct sl_shard *shard,
                       const struct sl_op *ops, int n_ops, int32_t n_tokens)
{
    const double factor = s->profile->work_factor[unit][shard->kind][tier_of(n_tokens)];
    const double ns = list_ns(s, unit, ops, n_ops, n_tokens);
    if (unit != SL_UNIT_GPU || s->depth <= SL_CALIBRATED_DEPTH) {
        return factor * ns;
    }
    const double timed = sl_profile_list_ns(s->profile, unit, ops, n_ops, SL_CALIBRATED_DEPTH,
                                            sl_search_sequences(s, n_tokens));
    return factor * timed + ns - timed;
}

static double copies_issue_ns(const struct sl_search *s, double n_copies)
{
    return (n_copies + 1) * COPY_ISSUE * s->profile->issue_ns;
}

struct sl_shard_cost sl_cost_shard(const struct sl_search *s, const struct sl_shard *shard,
                                   int32_t n_tokens)
{
    const struct sl_shard_bind bind = bind_for_cost(s, n_tokens);
    struct sl_op ops[SL_SHARD_MAX_OPS];
    const int n_ops = sl_shard_build(s->model, shard, &bind, ops);
    struct sl_shard_cost cost = {
        .cpu_ns = timed_ns(s, SL_UNIT_CPU, shard, ops, n_ops, n_tokens),
        .cpu_busy_ns = timed_ns(s, SL_UNIT_CPU_BUSY, shard, ops, n_ops, n_tokens),
        .gpu_ns = timed_ns(s, SL_UNIT_GPU, shard, ops, n_ops, n_tokens),
        .issue_ns = n_ops * s->profile->issue_ns,
    };
    int n_copies = 0;
    for (uint32_t w = 0; w < shard->n_weights; w++) {
        if (shard->weights[w].name) {
            cost.copy_ns += sl_profile_copy_ns(s->profile, shard->weights[w].bytes);
            n_copies++;
        }
    }
    cost.copy_issue_ns = copies_issue_ns(s, n_copies);
    return cost;
}

static int part_ops(const struct sl_search *s, const struct sl_shard *shard, int32_t n_tokens,
                    enum sl_shard_part part, struct sl_op *ops)
{
    static const uint8_t some = 1; /* the division costs an operator too */
    struct sl_shard_bind bind = bind_for_cost(s, n_tokens);
    bind.part = part;
    bind.at_hand = &some;
    bind.cut = sl_shard_cut(s->model, shard, s->split);
    return sl_shard_build(s->model, shard, &bind, ops);
}

/* Time of one part of a shard on a unit, by the machine's profile. */
static double part_ns(const struct sl_search *s, const struct sl_shard *shard, int32_t n_tokens,
                      enum sl_shard_part part, enum sl_unit unit)
{
    struct sl_op ops[SL_SHARD_MAX_OPS];
    const int n_ops = part_ops(s, shard, n_tokens, part, ops);
    return list_ns(s, unit, ops, n_ops, n_tokens);
}

struct sl_shard_cost sl_cost_cut(const struct sl_search *s, const struct sl_shard *shard,
                                 int32_t n_tokens)
{
    struct sl_shard_cost cost = sl_cost_shard(s, shard, n_tokens);
    const int32_t cut = sl_shard_cut(s->model, shard, s->split);
    const struct sl_slice rest =
        sl_shard_slice(s->model, shard, cut, sl_shard_cut_end(s->model, shard));
    cost.copy_ns = 0;
    for (uint32_t w = 0; w < rest.n_weights && cut > 0; w++) {
        const size_t n_rows = rest.weights[w].n_rows, bytes = rest.weights[w].row_bytes * n_rows;
        cost.copy_ns += sl_profile_copy_ns(s->profile, bytes);
        cost.copy_ns += n_rows > 1 ? APART_ROW_NS * (double)n_rows : 0;
    }
    cost.copy_issue_ns = copies_issue_ns(s, cut > 0 ? rest.n_weights : 0);
    const struct {
        double *ns;
        enum sl_shard_part part;
        enum sl_unit unit;
    } parts[] = {{&cost.gpu_ns, SL_PART_WHOLE, SL_UNIT_GPU},
                 {&cost.route_ns, SL_PART_ROUTE, SL_UNIT_GPU},
                 {&cost.own_ns, SL_PART_OWN, SL_UNIT_GPU},
                 {&cost.others_ns, SL_PART_OTHERS, SL_UNIT_CPU},
                 {&cost.others_busy_ns, SL_PART_OTHERS, SL_UNIT_CPU_BUSY},
                 {&cost.join_ns, SL_PART_JOIN, SL_UNIT_GPU}};
    const bool divided = sl_shard_is_divided(shard, s->split);
    if (divided && s->depth + n_tokens <= s->split.kv_blocks * SL_KV_BLOCK) {
        cost.route_ns = cost.gpu_ns;
        return cost;
    }
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        if (i > 0 && shard->kind != SL_SHARD_HEAD && n_tokens > SL_SHARD_PIECE_TOKENS) {
            break; /* not shared */
        }
        if (parts[i].part == SL_PART_JOIN && !divided) {
            break; /* an addition, which moving the sum up counts in */
        }
        struct sl_op ops[SL_SHARD_MAX_OPS];
        const int n_ops = part_ops(s, shard, n_tokens, parts[i].part, ops);
        *parts[i].ns = timed_ns(s, parts[i].unit, shard, ops, n_ops, n_tokens);
    }
    return cost;
}

/* An expert and how often it was used. */
struct use {
    float n;
    double log_missed; /* logarithm of the part of tokens that do not go to it */
};

static int by_use(const void *a, const void *b)
{
    const float x = ((const struct use *)a)->n, y = ((const struct use *)b)->n;
    return x < y ? 1 : x > y ? -1 : 0;
}

enum sluice_status sl_cost_init_uses(struct sl_search *s, const float *uses,
                                     struct sluice_error *err)
{
    const struct sl_hparams *const hp = &s->model->hp;
    for (int32_t t = 0; t < s->n_tiers; t++) {
        s->reads[t] = 1;
    }
    if (!uses) {
        return SLUICE_STATUS_OK;
    }
    const uint32_t n = hp->n_experts;
    struct use *const all = sl_calloc(SL_MEM_PLAN, (size_t)s->n_experts, sizeof *all);
    bool good = all != NULL;
    for (uint32_t layer = 0; good && layer < hp->n_layers; layer++) {
        double sum = n; /* everyone has been used once: few uses prove nothing */
        for (uint32_t e = layer * n; e < (layer + 1) * n; e++) {
            sum += (double)uses[e];
        }
        for (uint32_t e = layer * n; e < (layer + 1) * n; e++) {
            const double part = hp->n_experts_used * ((double)uses[e] + 1) / sum;
            all[e] = (struct use){.n = uses[e], .log_missed = log1p(-fmin(part, 0.9999))};
        }
    }
    if (good) {
        qsort(all, (size_t)s->n_experts, sizeof *all, by_use); /* as slots are filled */
    }
    for (int32_t t = s->first_tier; t < s->end_tier && good; t++) {
        float *const hits = sl_calloc(SL_MEM_PLAN, (size_t)s->n_experts + 1, sizeof *hits);
        good = (s->hits[t] = hits) != NULL;
        double read = 0;
        for (int32_t e = 0; good && e < s->n_experts; e++) {
            read += 1 - exp(sl_tier_tokens[t] * all[e].log_missed);
            hits[e + 1] = (float)read;
        }
        for (int32_t e = 0; good && e < s->n_experts; e++) {
            hits[e + 1] /= (float)read;
        }
        s->reads[t] = read / (hp->n_layers *
                              sl_profile_experts_read(n, hp->n_experts_used, sl_tier_tokens[t]));
    }
    sl_free(all);
    SL_CHECK(good, OUT_OF_MEMORY, err, "no memory for the planner");
    return SLUICE_STATUS_OK;
}

double sl_cost_hit(const struct sl_search *s, const struct sl_candidate *c)
{
    const float *const hits = s->hits[c->tier];
    return hits ? (double)hits[c->n_slots] : (double)c->n_slots / s->n_experts;
}

struct sl_mixture_cost sl_cost_mixture(const struct sl_search *s, const struct sl_shard *shard,
                                       int32_t n_tokens)
{
    const struct sl_hparams *const hp = &s->model->hp;
    const struct sl_profile *const p = s->profile;
    const double(*const factor)[SL_N_WORKS][SL_N_TIERS] = p->work_factor;
    const int32_t tier = tier_of(n_tokens);
    const double read =
        s->reads[tier] * sl_profile_experts_read(hp->n_experts, hp->n_experts_used, n_tokens);
    /* Fixed costs and experts of each unit, as the machine's profile has them. */
    double fixed[SL_N_UNITS], experts[SL_N_UNITS];
    for (int u = 0; u < SL_N_UNITS; u++) {
        const enum sl_shard_part part = u == SL_UNIT_GPU ? SL_PART_OWN : SL_PART_OTHERS;
        fixed[u] = 2 * p->op_ns[u];
        experts[u] = part_ns(s, shard, n_tokens, part, (enum sl_unit)u) - fixed[u];
        fixed[u] *= factor[u][SL_WORK_FIXED][tier];
        experts[u] *= factor[u][SL_WORK_EXPERTS][tier] * s->reads[tier];
    }
    return (struct sl_mixture_cost){
        .route_ns = part_ns(s, shard, n_tokens, SL_PART_ROUTE, SL_UNIT_GPU) *
                    factor[SL_UNIT_GPU][SL_WORK_ROUTE][tier],
        .fixed_ns = fixed[SL_UNIT_GPU],
        .experts_ns = experts[SL_UNIT_GPU],
        .host_fixed_ns = fixed[SL_UNIT_CPU],
        .host_ns = experts[SL_UNIT_CPU],
        .host_busy_ns = experts[SL_UNIT_CPU_BUSY],
        .read_bytes = read * (double)shard->expert_bytes,
        .base_copy_ns = sl_profile_copy_ns(p, shard->base_bytes),
    };
}

/* Copies of experts of one matrix, of those outside VRAM: neighbours go in one, and slots lie
 * anywhere between them. */
static double n_expert_copies(double n_copied, double outside)
{
    return n_copied * (1 - outside) + 1;
}

/* The driver's time to queue them. */
static double experts_issue_ns(const struct sl_search *s, double n_copied, double outside)
{
    return copies_issue_ns(s, SL_N_FFN_WEIGHTS * n_expert_copies(n_copied, outside));
}

/* The copy engine's pauses between them: what a copy of some size takes beside its bytes. */
static double experts_pauses_ns(const struct sl_search *s, double n_copied, double outside)
{
    const size_t large = sl_copy_sizes[SL_N_COPY_SIZES - 1], piece = large / 16;
    const double pause_ns = sl_profile_copy_ns(s->profile, piece) -
                            sl_profile_copy_ns(s->profile, large) * (double)piece / (double)large;
    return fmax(pause_ns, 0) * SL_N_FFN_WEIGHTS * (n_expert_copies(n_copied, outside) - 1);
}

/* A part of the experts comes through the ring, used or not; the CPU has the rest, and both draw on
 * system memory for most of the pass. */
static void feed_cost(const struct sl_search *s, const struct sl_candidate *c,
                      const struct sl_mixture_cost *m, struct sl_shard_cost *cost)
{
    const double outside = 1 - (double)c->n_slots / s->n_experts, hit = sl_cost_hit(s, c);
    const double copied = fmin((double)c->n_fed / s->model->hp.n_experts, outside);
    const double fed = outside > 0 ? (1 - hit) * copied / outside : 0;
    cost->copy_ns =
        (cost->copy_ns - m->base_copy_ns) * copied + experts_pauses_ns(s, c->n_fed, outside);
    cost->copy_issue_ns = experts_issue_ns(s, c->n_fed, outside);
    cost->route_ns = m->route_ns;
    cost->own_ns = m->fixed_ns + m->experts_ns * (hit + fed);
    cost->others_ns = m->host_fixed_ns + m->host_ns * (1 - hit - fed);
    cost->others_busy_ns = m->host_fixed_ns + m->host_busy_ns * (1 - hit - fed);
}

/* What a mixture's layer costs when part of its experts have slots. A GPU that computes experts of
 * system memory reads them at the speed of the link; that copies share it meanwhile is the
 * simulator's matter. */
static void share_cost(const struct sl_search *s, const struct sl_candidate *c,
                       const struct sl_shard *shard, struct sl_shard_cost *cost)
{
    const struct sl_profile *const p = s->profile;
    const double hit = sl_cost_hit(s, c);
    const double missing = 1 - hit;
    const struct sl_mixture_cost *const m = &s->mixture[c->tier][shard->class_id];
    if (c->n_fed > 0) {
        feed_cost(s, c, m, cost);
        return;
    }
    const double outside = 1 - (double)c->n_slots / s->n_experts;
    const double n_outside = outside * s->model->hp.n_experts;
    cost->copy_ns -= (cost->copy_ns - m->base_copy_ns) * (1 - outside);
    cost->copy_ns += experts_pauses_ns(s, n_outside, outside);
    cost->copy_issue_ns = experts_issue_ns(s, n_outside, outside);
    if (c->share == SL_SHARE_HOST) {
        return;
    }
    const double taken = missing * c->share / SL_DIVIDE_ALL;
    const double beside = c->share < SL_DIVIDE_ALL ? p->copy_busy_factor : 1;
    cost->route_ns = m->route_ns;
    cost->mapped_ns = taken > 0 ? 1e9 * taken * m->read_bytes /
                                      (sl_profile_mapped_rate(p, sl_tier_tokens[c->tier]) * beside)
                                : 0;
    cost->own_ns =
        m->fixed_ns + fmax(m->experts_ns * (hit + taken), m->experts_ns * hit + cost->mapped_ns);
    cost->others_ns = m->host_fixed_ns + m->host_ns * (missing - taken);
    cost->others_busy_ns = m->host_fixed_ns + m->host_busy_ns * (missing - taken);
    if (c->share == SL_DIVIDE_ALL) {
        cost->gpu_ns = cost->route_ns + cost->own_ns;
    }
}

/* Of a cache that is cut by blocks what is behind the first ones. */
void sl_cost_stream_kv(const struct sl_search *s, int32_t tier, struct sl_shard_cost *cost)
{
    double part = (double)s->kv_host_bytes / (double)s->kv_layer_bytes, new_part = part;
    if (s->split.kv_blocks > 0) {
        const double first = s->split.kv_blocks * SL_KV_BLOCK, n = sl_tier_tokens[tier];
        part = s->depth > 0 ? fmax(0, 1 - first / s->depth) : 0;
        new_part = fmin(1, fmax(0, (s->depth + n - first) / n));
    }
    cost->copy_ns += part * s->kv_copy_ns[tier];
    cost->copy_issue_ns += copies_issue_ns(s, 0);
    cost->issue_ns += 2 * copies_issue_ns(s, 0);
    cost->download_ns = new_part * s->kv_download_ns[tier];
}

/* What depends on a candidate's counts, in a shard's costs of its tier. */
static struct sl_shard_cost shard_cost(const struct sl_search *s, const struct sl_candidate *c,
                                       int32_t i, bool streams_kv)
{
    const struct sl_shard *const shard = &s->model->shards[i];
    struct sl_shard_cost cost = s->is_in_prefix[i] && shard->expert_bytes == 0 &&
                                        sl_shard_can_share(s->model, shard, s->split)
                                    ? s->cut_cost[c->tier][shard->class_id]
                                    : s->cost[c->tier][i];
    if (streams_kv) {
        sl_cost_stream_kv(s, c->tier, &cost);
    }
    if (shard->expert_bytes > 0) {
        share_cost(s, c, shard, &cost);
    }
    return cost;
}

/* The costs of a candidate: those of the tier, with what depends on its counts. Most shards are
 * like the one of their kind before them and have the same. */
const struct sl_shard_cost *const *sl_cost_candidate(struct sl_search *s,
                                                     const struct sl_candidate *c)
{
    const bool cut = sl_split_cuts_kv(s->split);
    const bool streams_kv = sl_search_streams_kv(s, c);
    for (int32_t i = 0; i < s->n_shards; i++) {
        const struct sl_shard_brief *const shard = &s->brief[i];
        const bool kv = streams_kv && shard->kind == SL_SHARD_ATTENTION;
        const bool like_before = i >= 2 && shard->class_id == shard[-2].class_id &&
                                 s->is_in_prefix[i] == s->is_in_prefix[i - 2] &&
                                 (!kv || shard->layer != c->n_kv_layers);
        if (!like_before) {
            const bool kv_comes = kv && (cut || shard->layer >= c->n_kv_layers);
            s->candidate_cost[i] = shard_cost(s, c, i, kv_comes);
        }
        s->cost_of[i] = like_before ? s->cost_of[i - 2] : &s->candidate_cost[i];
    }
    return s->cost_of;
}

/* What attentions take one after the other, and the copies of those that are streamed. `on_device`:
 * so are all feed-forwards, so that the hidden state comes and goes for attention on the CPU. */
static double attentions_least_ns(const struct sl_search *s, const struct sl_candidate *c,
                                  bool on_device, double *copy_ns)
{
    const struct sl_hop_cost *const hop = &s->hop[c->tier];
    const bool cut = sl_split_cuts_kv(s->split);
    const struct sl_shard_cost *const cost =
        cut ? &s->cut_cost[c->tier][s->brief[0].class_id] : &s->cost[c->tier][0];
    if (c->attention_streamed) {
        struct sl_shard_cost with_kv = *cost;
        sl_cost_stream_kv(s, c->tier, &with_kv);
        *copy_ns += (s->n_layers - (cut ? 0 : c->n_kv_layers)) * with_kv.copy_ns;
        return s->n_layers * cost->gpu_ns;
    }
    if (cut) {
        return s->n_layers * sl_steps_shared_least_ns(cost, hop);
    }
    const double on_host_ns = cost->cpu_ns + (on_device ? hop->up_ns + hop->down_ns : 0);
    /* The first of all finds it on the host. */
    const double first_ns = on_device && c->n_kv_layers == 0 ? hop->down_ns : 0;
    return c->n_kv_layers * cost->gpu_ns + (s->n_layers - c->n_kv_layers) * on_host_ns - first_ns;
}

double sl_cost_least_ns(const struct sl_search *s, const struct sl_candidate *c)
{
    if (!s->layers_alike || !c->uses_device) {
        return 0;
    }
    struct sl_shard_cost ffn = s->cost[c->tier][1];
    share_cost(s, c, &s->model->shards[1], &ffn);
    const bool shared = c->n_fed > 0 || (c->share != SL_SHARE_HOST && c->share != SL_DIVIDE_ALL);
    const int32_t n_streamed = c->n_fed > 0 ? 0 : c->n_ffn_streamed;
    const double others_ns = shared ? sl_steps_shared_least_ns(&ffn, &s->hop[c->tier])
                             : c->share == SL_SHARE_HOST ? ffn.cpu_ns
                                                         : ffn.gpu_ns;
    const bool on_device = c->share != SL_SHARE_HOST || n_streamed == s->n_layers;
    const struct sl_shard_cost *const head = &s->cost[c->tier][s->n_shards - 1];
    double copy_ns = (c->n_fed > 0 ? s->n_layers : n_streamed) * ffn.copy_ns;
    double chain_ns = n_streamed * ffn.gpu_ns + (s->n_layers - n_streamed) * others_ns +
                      attentions_least_ns(s, c, on_device, &copy_ns);
    if (s->split.head == 0) {
        chain_ns += c->head_on_device ? head->gpu_ns : head->cpu_ns;
    }
    return fmax(chain_ns, copy_ns);
}

/* Bytes that a pass must read of a shard: of a mixture the experts that are used. */
static double read_bytes(const struct sl_search *s, int32_t tier, int32_t shard)
{
    const struct sl_hparams *const hp = &s->model->hp;
    const struct sl_weight *const weights = s->model->shards[shard].weights;
    const double all = (double)s->image_bytes[shard];
    if (hp->n_experts == 0 || s->model->shards[shard].kind != SL_SHARD_FFN) {
        return all;
    }
    const double experts =
        (double)(weights[SL_W_GATE].bytes + weights[SL_W_UP].bytes + weights[SL_W_DOWN].bytes);
    const double read =
        sl_profile_experts_read(hp->n_experts, hp->n_experts_used, sl_tier_tokens[tier]);
    return all - experts * (1 - read / hp->n_experts);
}

static int by_ratio(const void *a, const void *b)
{
    const struct sl_relief *const x = a, *const y = b;
    const double left = x->saved_ns * y->cpu_ns, right = y->saved_ns * x->cpu_ns;
    return left < right ? 1 : left > right ? -1 : 0;
}

/* The least time for work_ns of an engine beside the CPU, which takes over what it saves most with,
 * the last thing in part, until both are done. Sorts the items. */
static double relieved_ns(double work_ns, struct sl_relief *items, int32_t n)
{
    double cpu_ns = 0;
    qsort(items, (size_t)n, sizeof *items, by_ratio);
    for (int32_t i = 0; i < n && cpu_ns < work_ns; i++) {
        const double both = items[i].saved_ns + items[i].cpu_ns;
        if (cpu_ns + both >= work_ns) {
            return cpu_ns + items[i].cpu_ns * (work_ns - cpu_ns) / both;
        }
        work_ns -= items[i].saved_ns;
        cpu_ns += items[i].cpu_ns;
    }
    return work_ns;
}

/* How much of the bytes that a pass reads of a shard is in VRAM. */
static double resident_part(const struct sl_search *s, const struct sl_candidate *c, int32_t i,
                            enum sl_placement placement, double bytes)
{
    const struct sl_shard *const shard = &s->model->shards[i];
    if (shard->expert_bytes > 0) {
        return placement == SL_PLACE_HOST ? 0 : sl_cost_hit(s, c);
    }
    return s->is_in_prefix[i] && sl_shard_can_share(s->model, shard, s->split)
               ? (double)s->resident_bytes[i] / bytes
               : placement == SL_PLACE_RESIDENT;
}

/* The least that the CPU needs for a shard. */
static double least_cpu_ns(const struct sl_search *s, int32_t tier, int32_t i)
{
    const struct sl_shard *const shard = &s->model->shards[i];
    const double whole = s->cost[tier][i].cpu_ns;
    return shard->expert_bytes > 0 ? fmin(whole, s->mixture[tier][shard->class_id].host_ns) : whole;
}

double sl_search_limit_ns(const struct sl_search *s, const struct sl_candidate *c,
                          const uint8_t *placement)
{
    const struct sl_profile *const p = s->profile;
    const bool device = p->kind != SL_DEVICE_NONE && c->uses_device;
    const double link = p->h2d_bytes_per_s[SL_N_COPY_SIZES - 1];
    const double link_byte_ns = link > 0 ? 1e9 / link : 0;
    struct sl_relief *const on_gpu = s->relief, *const on_link = s->relief + s->n_shards;
    double outside = 0, inside = 0, compute_ns = 0;
    int32_t n = 0;
    for (int32_t i = 0; i < s->n_shards; i++) {
        const double bytes = read_bytes(s, c->tier, i);
        const double resident = resident_part(s, c, i, (enum sl_placement)placement[i], bytes);
        const double left = 1 - resident, gpu_ns = s->cost[c->tier][i].gpu_ns;
        inside += bytes * resident;
        outside += bytes * left;
        compute_ns += gpu_ns;
        if (left > 0) {
            const double cpu_ns = left * least_cpu_ns(s, c->tier, i);
            on_gpu[n] = (struct sl_relief){left * gpu_ns, cpu_ns};
            on_link[n++] = (struct sl_relief){left * bytes * link_byte_ns, cpu_ns};
        }
    }
    if (sl_tier_tokens[c->tier] <= 16 || !device) {
        const double dram =
            device ? fmax(p->dram_bytes_per_s, p->dram_busy_bytes_per_s) : p->dram_bytes_per_s;
        const double by_dram = dram > 0 ? 1e9 * outside / dram : 0;
        const double by_vram = p->vram_bytes_per_s > 0 ? 1e9 * inside / p->vram_bytes_per_s : 0;
        return fmax(by_dram, by_vram);
    }
    return fmax(relieved_ns(compute_ns, on_gpu, n),
                relieved_ns(outside * link_byte_ns, on_link, n));
}
