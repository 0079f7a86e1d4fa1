/* SPDX-License-Identifier: Apache-2.0
 *
 * See plan_check.h.
 */
#include "plan_check.h"

#include "test.h"

#include <math.h>
#include <string.h>

#include "steps_walk.h"

static size_t up(size_t n)
{
    return (n + 255) & ~(size_t)255;
}

/* Of a layer's cache, on one side where it is cut. */
static size_t kv_bytes(const struct sl_plan *plan, const struct sl_model *model, bool in_vram)
{
    const size_t n_blocks = ((size_t)plan->options.n_ctx + SL_KV_BLOCK - 1) / SL_KV_BLOCK;
    const size_t n_first = (size_t)plan->split.kv_blocks;
    const size_t blocks = in_vram && n_first > 0 ? n_first : n_blocks - n_first;
    const int32_t cut = plan->split.kv_heads, n = (int32_t)model->hp.n_kv_heads;
    const int32_t n_here = cut == 0 ? n : in_vram ? cut : n - cut;
    const struct sl_kv_types types = {SL_TYPE_F16, SL_TYPE_F16};
    return blocks * sl_kv_block_bytes(types, n_here, (int32_t)model->hp.head_dim);
}

/* All of it, or what is behind a cut. */
static bool kv_on_host(const struct sl_plan *plan, const struct sl_shard *shard)
{
    return shard->kind == SL_SHARD_ATTENTION &&
           ((int32_t)shard->layer >= plan->n_kv_layers || plan->split.kv_heads > 0 ||
            plan->split.kv_blocks > 0);
}

static bool is_mixture(const struct sl_shard *shard)
{
    return shard->expert_bytes > 0;
}

static bool is_cut(const struct sl_plan *plan, const struct sl_shard *shard)
{
    return (shard->kind == SL_SHARD_HEAD && plan->split.head > 0) ||
           (shard->kind == SL_SHARD_ATTENTION && plan->split.kv_heads > 0) ||
           (shard->kind == SL_SHARD_FFN && !is_mixture(shard) && plan->split.ffn > 0);
}

/* Attention over a cache that is cut by blocks. */
static bool is_divided(const struct sl_plan *plan, const struct sl_shard *shard)
{
    return shard->kind == SL_SHARD_ATTENTION && plan->split.kv_blocks > 0;
}

/* Bytes of a shard's image, or of what is before or behind a cut of it. */
static size_t part_bytes(const struct sl_plan *plan, const struct sl_model *model,
                         const struct sl_shard *shard, bool rest)
{
    if (!is_cut(plan, shard)) {
        return rest && is_divided(plan, shard) ? 0 : shard->bytes;
    }
    const struct sl_hparams *const hp = &model->hp;
    size_t bytes = 0;
    for (uint32_t w = 0; w < shard->n_weights; w++) {
        const struct sl_matrix *const m = &shard->weights[w].m;
        const bool ffn = shard->kind == SL_SHARD_FFN, head = shard->kind == SL_SHARD_HEAD;
        const bool columns = w == (ffn ? SL_W_DOWN : SL_W_O) && !head;
        const int64_t heads = w == SL_W_Q || w == SL_W_O ? hp->n_heads / hp->n_kv_heads : 1;
        const int64_t cut =
            ffn ? plan->split.ffn
                : (head ? plan->split.head : heads * plan->split.kv_heads * hp->head_dim);
        const int64_t n = rest ? (columns ? m->n_cols : m->n_rows) - cut : cut;
        assert_true(n > 0);
        bytes += up((size_t)(columns ? m->n_rows : n) *
                    sl_type_row_bytes(m->type, columns ? n : m->n_cols));
    }
    return bytes;
}

/* The map of a tier from bottom to top. */
static void check_map(const struct sl_plan *plan, const struct sl_model *model,
                      const struct sl_tier_plan *tier)
{
    const size_t n = (size_t)tier->n_tokens;
    const int32_t n_out =
        tier->n_tokens < plan->options.max_outputs ? tier->n_tokens : plan->options.max_outputs;
    assert_true(plan->consts_offset + model->consts_bytes <= plan->kv_offset);
    assert_true(plan->kv_layer_bytes >= kv_bytes(plan, model, true));
    assert_true(plan->kv_host_layer_bytes >= kv_bytes(plan, model, false));
    assert_true(plan->kv_offset + (size_t)plan->n_kv_layers * plan->kv_layer_bytes <=
                plan->resident_base);
    size_t end = plan->resident_base;
    for (int32_t i = 0; i < tier->n_resident; i++) {
        const int32_t shard = plan->resident_order[i];
        assert_true(plan->resident_offset[shard] >= end);
        assert_int_equal(plan->resident_offset[shard] % 256, 0);
        const struct sl_shard *const s = &model->shards[shard];
        end = plan->resident_offset[shard] +
              (is_mixture(s) ? s->base_bytes : part_bytes(plan, model, s, false));
    }
    if (tier->n_slots > 0) {
        assert_int_equal(tier->n_resident, plan->n_resident_order);
        assert_true(plan->slots_offset >= end && tier->n_slots <= plan->n_slots);
        end = plan->slots_offset + (size_t)tier->n_slots * plan->slot_bytes;
    }
    size_t workspace = 0, scratch = 0;
    for (int32_t i = 0; i < plan->n_shards; i++) {
        const struct sl_shard *const shard = &model->shards[i];
        if (tier->placement[i] != SL_PLACE_HOST) {
            const size_t w = sl_shard_workspace_bytes(model, shard, tier->n_tokens, n_out);
            const size_t s = sl_shard_scratch_bytes(model, shard, tier->n_tokens, n_out);
            workspace = w > workspace ? w : workspace;
            scratch = s > scratch ? s : scratch;
        }
    }
    const bool head = tier->placement[plan->n_shards - 1] != SL_PLACE_HOST;
    const struct {
        size_t offset, bytes;
    } parts[] = {
        {tier->ring_offset, tier->ring_bytes},
        {tier->hidden_offset, n * model->hp.n_embd * sizeof(float)},
        {tier->io_offset, n * 2 * sizeof(int32_t)},
        {tier->workspace_offset, workspace},
        {tier->scratch_offset, scratch},
        {tier->logits_offset, head ? (size_t)n_out * model->hp.n_vocab * sizeof(float) : 0},
    };
    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        assert_true(parts[i].offset >= end);
        assert_int_equal(parts[i].offset % 256, 0);
        end = parts[i].offset + parts[i].bytes;
    }
    assert_true(end <= tier->end_offset);
    assert_true(tier->end_offset <= plan->arena_bytes);
}

static void check_steps(const struct sl_plan *plan, const struct sl_model *model,
                        const struct sl_tier_plan *tier, int number)
{
    static struct program p;
    struct walk w;
    p = (struct program){.name = "tier of plan",
                         .number = number,
                         .n_shards = plan->n_shards,
                         .ring_bytes = tier->ring_bytes,
                         .n_steps = tier->n_steps};
    assert_true(plan->n_shards <= MAX_SHARDS);
    memcpy(p.placement, tier->placement, (size_t)plan->n_shards);
    memcpy(p.steps, tier->steps, (size_t)tier->n_steps * sizeof *p.steps);
    for (int32_t i = 0; i < plan->n_shards; i++) {
        const struct sl_shard *const shard = &model->shards[i];
        /* A streamed layer whose KV is at home on the host brings it along. */
        const bool rest = (is_cut(plan, shard) || is_divided(plan, shard)) &&
                          plan->resident_rank[i] < tier->n_resident;
        const size_t bytes = up(rest ? part_bytes(plan, model, shard, true) : shard->bytes);
        p.item_bytes[i] =
            tier->placement[i] == SL_PLACE_FED
                ? (size_t)tier->n_fed * plan->slot_bytes
                : bytes + (kv_on_host(plan, shard) ? kv_bytes(plan, model, false) : 0);
    }
    walk_program(&p, &w);
}

static void check_tier(const struct sl_plan *plan, const struct sl_model *model,
                       const struct sl_tier_plan *tier, int number)
{
    int32_t n_resident = 0, n_on_device = 0;
    for (int32_t i = 0; i < plan->n_shards; i++) {
        const struct sl_shard *const shard = &model->shards[i];
        const enum sl_placement placement = (enum sl_placement)tier->placement[i];
        n_resident += placement == SL_PLACE_RESIDENT && !is_mixture(shard);
        const bool in_two = is_cut(plan, shard) || is_divided(plan, shard);
        assert_true(placement != SL_PLACE_RESIDENT || !in_two);
        assert_true(placement != SL_PLACE_SHARED || is_mixture(shard) || in_two);
        assert_true(placement != SL_PLACE_SHARED || plan->resident_rank[i] < tier->n_resident);
        /* All experts on the device: in slots, or read in place. */
        assert_true(placement != SL_PLACE_RESIDENT || !is_mixture(shard) ||
                    tier->share == SL_DIVIDE_ALL);
        assert_true(!is_mixture(shard) || shard->expert_bytes <= plan->slot_bytes);
        n_on_device += placement != SL_PLACE_HOST;
        if (shard->kind == SL_SHARD_ATTENTION && (int32_t)shard->layer < plan->n_kv_layers) {
            assert_true(placement != SL_PLACE_HOST);
        }
        if (kv_on_host(plan, shard)) {
            assert_true(placement != SL_PLACE_RESIDENT);
        }
    }
    for (int32_t i = 0; i < tier->n_resident; i++) {
        const int32_t shard = plan->resident_order[i];
        if (!is_mixture(&model->shards[shard]) && !is_cut(plan, &model->shards[shard]) &&
            !is_divided(plan, &model->shards[shard])) {
            assert_int_equal(tier->placement[shard], SL_PLACE_RESIDENT);
            n_resident--;
        }
    }
    assert_int_equal(n_resident, 0);
    assert_true(tier->uses_device == (n_on_device > 0));
    assert_true(tier->predicted.pass_ns > 0 && isfinite(tier->predicted.pass_ns));
    /* No engine is busy for longer than the pass takes. */
    const double pass = tier->predicted.pass_ns * (1 + 1e-9);
    assert_true(tier->predicted.copy_busy_ns <= pass && tier->predicted.gpu_busy_ns <= pass &&
                tier->predicted.cpu_busy_ns <= pass);
    /* The limit is one. */
    if (tier->limit_ns > pass) {
        fail_msg("tier %d takes %g ns, its limit is %g", tier->n_tokens, tier->predicted.pass_ns,
                 tier->limit_ns);
    }
    if (tier->uses_device) {
        check_map(plan, model, tier);
    }
    check_steps(plan, model, tier, number);
}

void check_plan(const struct sl_plan *plan, const struct sl_model *model)
{
    struct sluice_error err;
    assert_ok(sl_plan_check(plan, model, &err), err);
    assert_true(plan->arena_bytes <= plan->options.budget_bytes);
    assert_int_equal(plan->n_shards, model->n_shards);
    assert_true(plan->n_tiers >= 1 && plan->n_tiers <= SL_N_TIERS);
    for (int32_t t = 0; t < plan->n_tiers; t++) {
        assert_int_equal(plan->tiers[t].n_tokens, sl_tier_tokens[t]);
        check_tier(plan, model, &plan->tiers[t], t);
    }
    assert_true(plan->n_ubatch >= 1);
    assert_true(plan->n_ubatch <= plan->tiers[plan->n_tiers - 1].n_tokens);
    assert_true(plan->options.max_ubatch == 0 || plan->n_ubatch <= plan->options.max_ubatch);
    for (int32_t n = 1; n <= plan->n_ubatch; n++) {
        const int32_t t = sl_plan_tier(plan, n);
        assert_true(plan->tiers[t].n_tokens >= n);
        assert_true(t == 0 || plan->tiers[t - 1].n_tokens < n);
    }
}
