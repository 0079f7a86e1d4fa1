/* SPDX-License-Identifier: Apache-2.0
 *
 * `sluice plan`: where every shard goes, the VRAM map, and what to expect, without loading weights.
 */
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "cli/engine.h"
#include "cli/json.h"
#include "cli/plan_svg.h"

#define PROMPT_TOKENS 1024 /* of the TTFT shown */
#define MIB 1048576.0

static const char *const place_names[] = {"host", "streamed", "resident", "shared", "fed"};

/* Whether some tier places a shard so: what no tier does is not listed. */
static bool is_used(const struct sl_plan *plan, enum sl_placement place)
{
    for (int32_t t = 0; t < plan->n_tiers; t++) {
        for (int32_t i = 0; i < plan->n_shards; i++) {
            if (plan->tiers[t].placement[i] == place) {
                return true;
            }
        }
    }
    return false;
}

/* "0-12,14" of the layers whose shard of a kind is placed so; "-" when none is. */
static void layer_list(const struct sl_plan *plan, const struct sl_model *model,
                       const struct sl_tier_plan *tier, enum sl_shard_kind kind,
                       enum sl_placement place, char *out, size_t room)
{
    size_t used = 0;
    int32_t from = -1;
    snprintf(out, room, "-");
    for (int32_t i = 0; i <= plan->n_shards; i++) {
        const struct sl_shard *const shard = i < plan->n_shards ? &model->shards[i] : NULL;
        if (shard && shard->kind != kind) {
            continue;
        }
        const bool in = shard && tier->placement[i] == place;
        const int32_t layer = shard ? (int32_t)shard->layer : (int32_t)model->hp.n_layers;
        if (in && from < 0) {
            from = layer;
        } else if (!in && from >= 0) {
            const char *const comma = used > 0 ? "," : "";
            const int n = layer - 1 > from
                              ? snprintf(out + used, room - used, "%s%d-%d", comma, from, layer - 1)
                              : snprintf(out + used, room - used, "%s%d", comma, from);
            used += n > 0 && (size_t)n < room - used ? (size_t)n : 0;
            from = -1;
        }
    }
}

/* What is in VRAM of shards that are cut. */
static void print_cuts(const struct sl_plan *plan, const struct sl_model *model)
{
    static const char *const names[] = {[SL_SHARD_ATTENTION] = "of each attention and its KV",
                                        [SL_SHARD_FFN] = "of each ffn",
                                        [SL_SHARD_HEAD] = "of the head"};
    const char *before = "  in parts   ";
    for (int32_t i = plan->n_shards - 3; i < plan->n_shards; i++) {
        const struct sl_shard *const shard = &model->shards[i];
        const int32_t cut = sl_shard_cut(model, shard, plan->split);
        if (cut > 0) {
            printf("%s%.1f%% %s", before, 100.0 * cut / sl_shard_cut_end(model, shard),
                   names[shard->kind]);
            before = ", ";
        }
    }
    if (before[0] == ',') {
        printf(" in VRAM as far as the prefix goes\n");
    }
}

static void print_tier(const struct sl_plan *plan, const struct sl_model *model, int32_t t)
{
    const struct sl_tier_plan *const tier = &plan->tiers[t];
    const double ns = tier->predicted.pass_ns;
    printf("\ntier %d: %.3g ms a pass, %.4g tokens/s, %.0f%% of the limit; busy: GPU %.0f%%, copy "
           "%.0f%%, CPU %.0f%%\n",
           tier->n_tokens, ns / 1e6, 1e9 * tier->n_tokens / ns, 100 * tier->limit_ns / ns,
           100 * tier->predicted.gpu_busy_ns / ns, 100 * tier->predicted.copy_busy_ns / ns,
           100 * tier->predicted.cpu_busy_ns / ns);
    static const char *const kinds[] = {"attention", "ffn"};
    char text[512];
    for (int kind = SL_SHARD_ATTENTION; kind <= SL_SHARD_FFN; kind++) {
        printf("  %-10s", kinds[kind]);
        for (int place = SL_N_PLACEMENTS - 1; place >= SL_PLACE_HOST; place--) {
            if (sl_place_is_shared((uint8_t)place) && !is_used(plan, (enum sl_placement)place)) {
                continue;
            }
            layer_list(plan, model, tier, (enum sl_shard_kind)kind, (enum sl_placement)place, text,
                       sizeof text);
            printf(" %s %s%s", place_names[place], text, place > 0 ? ";" : "\n");
        }
    }
    printf("  %-10s %s\n", "head", place_names[tier->placement[plan->n_shards - 1]]);
    print_cuts(plan, model);
    if (plan->slot_bytes > 0) {
        const uint32_t n = model->hp.n_layers * model->hp.n_experts;
        printf("  %-10s %d of %u in VRAM", "experts", tier->n_slots, n);
        if (tier->share > 0 && (uint32_t)tier->n_slots < n) {
            printf("; the GPU reads %.0f%% of the others in system memory",
                   100.0 * tier->share / SL_DIVIDE_ALL);
        }
        if (tier->n_fed > 0) {
            printf("; %d more of each layer copied ahead", tier->n_fed);
        }
        printf("\n");
    }
}

static void print_map(const struct sl_plan *plan)
{
    printf("\nVRAM map, bytes (one arena of %zu)\n", plan->arena_bytes);
    printf("  %14zu %14zu  constants\n", plan->consts_offset,
           (plan->layer_tables_bytes > 0 ? plan->tables_offset : plan->kv_table_offset) -
               plan->consts_offset);
    if (plan->layer_tables_bytes > 0) {
        printf("  %14zu %14zu  tables of experts\n", plan->tables_offset,
               plan->kv_table_offset - plan->tables_offset);
    }
    if (plan->options.n_seqs > 1) {
        printf("  %14zu %14zu  table of cache blocks\n", plan->kv_table_offset,
               plan->kv_offset - plan->kv_table_offset);
    }
    printf("  %14zu %14zu  KV cache of %d layers\n", plan->kv_offset,
           plan->resident_base - plan->kv_offset, plan->n_kv_layers);
    for (int32_t t = 0; t < plan->n_tiers; t++) {
        const struct sl_tier_plan *const tier = &plan->tiers[t];
        if (!tier->uses_device) {
            continue;
        }
        size_t end = plan->resident_base;
        if (tier->n_resident > 0) {
            const int32_t next = tier->n_resident < plan->n_resident_order ? tier->n_resident : -1;
            end = next >= 0 ? plan->resident_offset[plan->resident_order[next]]
                  : plan->slot_bytes > 0
                      ? plan->slots_offset + (size_t)tier->n_slots * plan->slot_bytes
                      : tier->ring_offset;
        }
        printf("  tier %-5d resident %zu..%zu, ring %zu..%zu, activations %zu..%zu\n",
               tier->n_tokens, plan->resident_base, end, tier->ring_offset, tier->hidden_offset,
               tier->hidden_offset, tier->end_offset);
    }
}

/* Bytes of cache that a token takes in a layer. */
static size_t kv_token_bytes(const struct sl_engine *e, const struct sl_plan *plan)
{
    const struct sl_hparams *const hp = &e->model->hp;
    return sl_kv_block_bytes(plan->options.kv_types, (int32_t)hp->n_kv_heads,
                             (int32_t)hp->head_dim) /
           SL_KV_BLOCK;
}

/* Bytes of the cache, on both sides. */
static size_t kv_bytes(const struct sl_engine *e, const struct sl_plan *plan)
{
    const size_t n_host = e->model->hp.n_layers - (size_t)sl_plan_first_host_kv(plan);
    return (size_t)plan->n_kv_layers * plan->kv_layer_bytes + n_host * plan->kv_host_layer_bytes;
}

static void print_text(const struct sl_engine *e, const struct sl_plan *plan)
{
    printf("model    %s, %.2f GiB of weights\n", sl_gguf_path(e->model->file, 0),
           (double)e->model->weight_bytes / 1073741824.0);
    printf("device   %s\n", e->profile.kind == SL_DEVICE_NONE ? "CPU only" : e->profile.gpu);
    printf("budget   %.1f MiB of VRAM, context %d tokens, micro-batch %d, strategy %s\n",
           (double)plan->options.budget_bytes / MIB, plan->options.n_ctx, plan->n_ubatch,
           sl_strategy_name(plan->options.strategy));
    const struct sl_kv_types kv = plan->options.kv_types;
    printf("cache    keys %s, values %s: %zu bytes a token and layer, %.1f MiB in all\n",
           sl_type_name(kv.k), sl_type_name(kv.v), kv_token_bytes(e, plan),
           (double)kv_bytes(e, plan) / MIB);
    if (plan->split.kv_blocks > 0) {
        printf("         of all layers the first %d tokens in VRAM, the others in system memory\n",
               plan->split.kv_blocks * SL_KV_BLOCK);
    }
    if (plan->smallest_budget_bytes > 0) {
        printf("needs    %.1f MiB at least for the GPU to be of use\n",
               (double)plan->smallest_budget_bytes / MIB);
    }
    printf("expect   TTFT %.3f s for %d tokens, %.2f tokens/s at a depth of %d",
           sl_plan_ttft_ns(plan, 0, PROMPT_TOKENS) / 1e9, PROMPT_TOKENS, sl_plan_tps(plan),
           plan->depth);
    if (plan->options.n_seqs > 1) {
        printf(" for %d sequences together", plan->options.n_seqs);
    }
    printf("\n");
    for (int32_t t = 0; t < plan->n_tiers; t++) {
        print_tier(plan, e->model, t);
    }
    if (plan->arena_bytes > 0) {
        print_map(plan);
    }
}

static void add_tier(struct sl_json *json, cJSON *tiers, const struct sl_plan *plan,
                     const struct sl_model *model, int32_t t)
{
    const struct sl_tier_plan *const tier = &plan->tiers[t];
    cJSON *const out = sl_json_object(json, tiers, NULL);
    sl_json_i64(json, out, "tokens", tier->n_tokens);
    sl_json_number(json, out, "predicted_ms", tier->predicted.pass_ns / 1e6);
    sl_json_number(json, out, "limit_ms", tier->limit_ns / 1e6);
    if (plan->slot_bytes > 0) {
        sl_json_i64(json, out, "experts_in_vram", tier->n_slots);
        sl_json_number(json, out, "share_of_others",
                       tier->share > 0 ? (double)tier->share / SL_DIVIDE_ALL : 0);
        sl_json_i64(json, out, "experts_fed_a_layer", tier->n_fed);
    }
    sl_json_u64(json, out, "ring_offset", tier->ring_offset);
    sl_json_u64(json, out, "ring_bytes", tier->ring_bytes);
    sl_json_u64(json, out, "activations_offset", tier->hidden_offset);
    sl_json_u64(json, out, "end_offset", tier->end_offset);
    cJSON *const shards = sl_json_array(json, out, "shards");
    static const char *const kinds[] = {"attention", "ffn", "head"};
    for (int32_t i = 0; i < plan->n_shards; i++) {
        const struct sl_shard *const shard = &model->shards[i];
        cJSON *const item = sl_json_object(json, shards, NULL);
        sl_json_string(json, item, "kind", kinds[shard->kind]);
        sl_json_u64(json, item, "layer", shard->layer);
        sl_json_u64(json, item, "bytes", shard->bytes);
        sl_json_string(json, item, "placement", place_names[tier->placement[i]]);
        if (tier->placement[i] == SL_PLACE_RESIDENT) {
            sl_json_u64(json, item, "offset", plan->resident_offset[i]);
        }
    }
}

static enum sluice_status print_json(const struct sl_engine *e, const struct sl_plan *plan,
                                     struct sluice_error *err)
{
    struct sl_json json;
    sl_json_init(&json);
    cJSON *const root = json.root;
    sl_json_string(&json, root, "model", sl_gguf_path(e->model->file, 0));
    sl_json_u64(&json, root, "weight_bytes", e->model->weight_bytes);
    sl_json_string(&json, root, "device",
                   e->profile.kind == SL_DEVICE_NONE ? "CPU" : e->profile.gpu);
    sl_json_u64(&json, root, "budget_bytes", plan->options.budget_bytes);
    sl_json_u64(&json, root, "smallest_budget_bytes", plan->smallest_budget_bytes);
    sl_json_string(&json, root, "strategy", sl_strategy_name(plan->options.strategy));
    sl_json_i64(&json, root, "n_ctx", plan->options.n_ctx);
    sl_json_i64(&json, root, "n_seqs", plan->options.n_seqs);
    sl_json_i64(&json, root, "n_ubatch", plan->n_ubatch);
    sl_json_number(&json, root, "predicted_ttft_ms", sl_plan_ttft_ns(plan, 0, PROMPT_TOKENS) / 1e6);
    sl_json_i64(&json, root, "predicted_ttft_prompt_tokens", PROMPT_TOKENS);
    sl_json_number(&json, root, "predicted_tps", sl_plan_tps(plan));
    sl_json_u64(&json, root, "arena_bytes", plan->arena_bytes);
    sl_json_u64(&json, root, "kv_offset", plan->kv_offset);
    sl_json_i64(&json, root, "kv_layers_in_vram", plan->n_kv_layers);
    sl_json_u64(&json, root, "kv_layer_bytes", plan->kv_layer_bytes);
    sl_json_i64(&json, root, "cut_ffn", plan->split.ffn);
    sl_json_i64(&json, root, "cut_head", plan->split.head);
    sl_json_i64(&json, root, "cut_kv_heads", plan->split.kv_heads);
    sl_json_i64(&json, root, "cut_kv_blocks", plan->split.kv_blocks);
    sl_json_u64(&json, root, "kv_host_layer_bytes", plan->kv_host_layer_bytes);
    sl_json_u64(&json, root, "kv_token_bytes", kv_token_bytes(e, plan));
    sl_json_string(&json, root, "kv_type_k", sl_type_name(plan->options.kv_types.k));
    sl_json_string(&json, root, "kv_type_v", sl_type_name(plan->options.kv_types.v));
    sl_json_u64(&json, root, "resident_offset", plan->resident_base);
    cJSON *const tiers = sl_json_array(&json, root, "tiers");
    for (int32_t t = 0; t < plan->n_tiers; t++) {
        add_tier(&json, tiers, plan, e->model, t);
    }
    return sl_json_print(stdout, &json, err);
}

enum sluice_status sl_cmd_plan(const struct sl_options *options, struct sluice_error *err)
{
    struct sl_engine e;
    struct sl_plan *plan = NULL;
    enum sluice_status status = sl_engine_open_dry(&e, options, err);
    if (status == SLUICE_STATUS_OK) {
        struct sl_plan_options o = sl_engine_plan_options(&e, options);
        o.n_seqs = (int32_t)sl_options_int(options, SL_OPT_PARALLEL);
        o.max_outputs = o.n_seqs > o.max_outputs ? o.n_seqs : o.max_outputs;
        status = sl_plan_create(&plan, e.model, &e.profile, &o, err);
    }
    const char *const svg = sl_options_text(options, SL_OPT_SVG);
    if (status == SLUICE_STATUS_OK && svg) {
        status = sl_plan_svg_write(svg, &e, plan, err);
    }
    if (status == SLUICE_STATUS_OK && sl_options_flag(options, SL_OPT_JSON)) {
        status = print_json(&e, plan, err);
    } else if (status == SLUICE_STATUS_OK) {
        print_text(&e, plan);
    }
    sl_plan_destroy(&plan);
    sl_engine_close(&e);
    return status;
}
