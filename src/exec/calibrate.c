/* SPDX-License-Identifier: Apache-2.0
 *
 * The profile of a model (see calibrate.h): what both sides of the measurement share, and keeping
 * its results. Factors are found in calibrate_host.c and calibrate_device.c.
 */
#include "exec/calibrate.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "base/mem.h"
#include "exec/calibrate_internal.h"

/* Beyond these something else was measured. */
#define LEAST_FACTOR 0.1
#define MOST_FACTOR 10.0
#define MOST_FIXED_FACTOR 200.0 /* beside the cost of one small operator */

struct sl_cal_sizes sl_cal_sizes_of(const struct sl_cal *c, int32_t n, int32_t n_rows)
{
    const struct sl_hparams *const hp = &c->model->hp;
    const size_t n_blocks =
        ((size_t)SL_CALIBRATED_DEPTH + (size_t)n + SL_KV_BLOCK - 1) / SL_KV_BLOCK;
    struct sl_cal_sizes s = {
        .hidden = sl_cal_align((size_t)n_rows * hp->n_embd * sizeof(float)),
        .logits = sl_cal_align(hp->n_vocab * sizeof(float)),
        .pos = sl_cal_align((size_t)n * sizeof(int32_t)),
        .kv = sl_cal_align(n_blocks * sl_kv_block_bytes(c->bind.kv.types, c->bind.kv.n_kv_heads,
                                                        c->bind.kv.head_dim)),
        .none = sl_cal_align(hp->n_experts)};
    for (uint32_t i = 0; i < c->model->n_shards; i++) {
        const struct sl_shard *const shard = &c->model->shards[i];
        const size_t workspace = sl_shard_workspace_bytes(c->model, shard, n, 1);
        const size_t scratch = sl_shard_most_scratch_bytes(c->model, shard, n, 1);
        s.workspace = workspace > s.workspace ? sl_cal_align(workspace) : s.workspace;
        s.scratch = scratch > s.scratch ? sl_cal_align(scratch) : s.scratch;
    }
    return s;
}

size_t sl_cal_total(const struct sl_cal_sizes *s)
{
    return s->hidden + s->workspace + s->logits + s->pos + s->kv + s->none;
}

uint8_t *sl_cal_carve(struct sl_cal *c, uint8_t *at, const struct sl_cal_sizes *s)
{
    c->bind.hidden = (float *)(void *)at;
    at += s->hidden;
    c->bind.workspace = at;
    at += s->workspace;
    c->bind.logits = (float *)(void *)at;
    at += s->logits;
    c->bind.pos = (const int32_t *)(const void *)at;
    at += s->pos;
    c->bind.kv.data = at;
    return at + s->kv;
}

void sl_cal_set_pass(struct sl_cal *c, int32_t n)
{
    c->bind.part = SL_PART_WHOLE;
    c->bind.at_hand = NULL;
    c->bind.n_tokens = n;
    c->bind.n_outputs = 1;
    c->bind.n_kv_max = SL_CALIBRATED_DEPTH + n;
}

double sl_cal_expected_ns(const struct sl_cal *c, enum sl_unit unit, const struct sl_shard *shard)
{
    struct sl_op ops[SL_SHARD_MAX_OPS];
    const int n_ops = sl_shard_build(c->model, shard, &c->bind, ops);
    return sl_profile_list_ns(c->profile, unit, ops, n_ops, SL_CALIBRATED_DEPTH, 1);
}

void sl_cal_keep(struct sl_cal *c, enum sl_unit unit, enum sl_work work, int32_t tier,
                 double measured_ns, double expected_ns)
{
    const double factor = expected_ns > 0 ? measured_ns / expected_ns : 1;
    const double most = work == SL_WORK_FIXED ? MOST_FIXED_FACTOR : MOST_FACTOR;
    c->profile->work_factor[unit][work][tier] =
        fmin(most, fmax(LEAST_FACTOR, isfinite(factor) ? factor : 1));
}

void sl_cal_keep_experts(struct sl_cal *c, enum sl_unit unit, int32_t tier, double few_ns,
                         double part_few, double all_ns, double part_all)
{
    const double fixed = 2 * c->profile->op_ns[unit];
    struct sl_cal part = *c;
    part.bind.part = unit == SL_UNIT_GPU ? SL_PART_OWN : SL_PART_OTHERS;
    const double experts = sl_cal_expected_ns(&part, unit, &c->model->shards[1]) - fixed;
    const double slope_ns =
        part_all > part_few ? fmax(0, (all_ns - few_ns) / (part_all - part_few)) : all_ns;
    sl_cal_keep(c, unit, SL_WORK_EXPERTS, tier, slope_ns, experts);
    sl_cal_keep(c, unit, SL_WORK_FIXED, tier, fmax(0, all_ns - slope_ns * part_all), fixed);
}

void sl_cal_extend(struct sl_cal *c, enum sl_unit unit, int32_t n_measured)
{
    for (int work = 0; work < SL_N_WORKS && n_measured > 0; work++) {
        double *const factor = c->profile->work_factor[unit][work];
        for (int32_t t = n_measured; t < SL_N_TIERS; t++) {
            factor[t] = factor[n_measured - 1];
        }
    }
}

/* Rows that differ, or a mixture would send all to the same experts. */
static enum sluice_status init_inputs(struct sl_cal *c)
{
    const size_t n = (size_t)SL_CAL_MOST_TOKENS * c->model->hp.n_embd;
    c->noise = sl_alloc(SL_MEM_EXEC, n * sizeof *c->noise);
    c->pos = sl_alloc(SL_MEM_EXEC, SL_CAL_MOST_TOKENS * sizeof *c->pos);
    c->none = sl_calloc(SL_MEM_EXEC, c->model->hp.n_experts + 1, 1);
    SL_CHECK(c->noise && c->pos && c->none, OUT_OF_MEMORY, c->err, "no memory to time the model");
    uint64_t state = 0x9e3779b97f4a7c15u;
    for (size_t i = 0; i < n; i++) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        c->noise[i] = (float)((double)(state >> 40) / (1 << 24) - 0.5) * 3.0f;
    }
    for (int32_t i = 0; i < SL_CAL_MOST_TOKENS; i++) {
        c->pos[i] = SL_CALIBRATED_DEPTH + i;
    }
    return SLUICE_STATUS_OK;
}

static struct sl_cal cal_of(struct sl_profile *profile, const struct sl_model *model,
                            const struct sl_calibrate_options *options, struct sluice_error *err)
{
    return (struct sl_cal){.profile = profile,
                           .model = model,
                           .o = options,
                           .bind.kv = {.types = {SL_TYPE_F16, SL_TYPE_F16},
                                       .n_kv_heads = (int32_t)model->hp.n_kv_heads,
                                       .head_dim = (int32_t)model->hp.head_dim},
                           .err = err};
}

enum sluice_status sl_calibrate_run(struct sl_profile *profile, const struct sl_model *model,
                                    const struct sl_calibrate_options *options,
                                    struct sluice_error *err)
{
    struct sl_cal c = cal_of(profile, model, options, err);
    enum sluice_status status = SLUICE_STATUS_OK;
    sl_profile_clear_factors(profile);
    SL_TRY_OUT(init_inputs(&c));
    SL_TRY_OUT(sl_calibrate_host(&c));
    if (options->device) {
        SL_TRY_OUT(sl_calibrate_device(&c));
    }
out:
    sl_free(c.noise);
    sl_free(c.pos);
    sl_free(c.none);
    if (status != SLUICE_STATUS_OK) {
        sl_profile_clear_factors(profile);
    }
    return status;
}

/* Where the profile of this model on this machine, as it was measured last, is kept. In small
 * budgets the device measures fewer tiers: that is another profile. */
static enum sluice_status kept_path(const struct sl_profile *p, const struct sl_model *model,
                                    int32_t n_tiers, char **out, struct sluice_error *err)
{
    char key[256], name[64];
    const char *const path = sl_gguf_path(model->file, 0);
    const char *const slash = strrchr(path, '/');
    snprintf(key, sizeof key, "%.80s|%.100s|%zu|%u|%.3g|%.3g|%.3g|%d", p->cpu,
             slash ? slash + 1 : path, model->weight_bytes, model->n_shards, p->vram_bytes_per_s,
             p->dram_bytes_per_s, p->hop_ns, n_tiers);
    sl_profile_file_name(name, sizeof name, p->kind, p->gpu, key, p->n_threads);
    return sl_file_cache_path(name, out, err);
}

/* Take the factors of a kept profile. */
static bool load(struct sl_profile *profile, const char *path)
{
    struct sl_profile kept;
    if (!sl_file_exists(path) || sl_profile_load(&kept, path, NULL) != SLUICE_STATUS_OK) {
        return false;
    }
    sl_profile_take_factors(profile, &kept);
    return true;
}

/* The kept one with the most tiers, at least as many. */
static bool load_any(struct sl_profile *profile, const struct sl_model *model, int32_t least_tiers)
{
    bool loaded = false;
    for (int32_t n = SL_N_TIERS; n >= least_tiers && !loaded; n--) {
        char *path = NULL;
        loaded =
            kept_path(profile, model, n, &path, NULL) == SLUICE_STATUS_OK && load(profile, path);
        sl_free(path);
    }
    return loaded;
}

void sl_calibrate_load(struct sl_profile *profile, const struct sl_model *model)
{
    (void)load_any(profile, model, 0);
}

static enum sluice_status save(const struct sl_profile *profile, const struct sl_model *model,
                               int32_t n_tiers, struct sluice_error *err)
{
    char *path = NULL;
    SL_TRY(kept_path(profile, model, n_tiers, &path, err));
    const enum sluice_status status = sl_profile_save(profile, path, err);
    sl_free(path);
    return status;
}

/* How many tiers of the device are measured in this budget; -1: nothing is kept. */
static int32_t kept_tiers(const struct sl_profile *profile, const struct sl_model *model,
                          const struct sl_calibrate_options *options)
{
    struct sl_profile unused = *profile;
    const struct sl_cal c = cal_of(&unused, model, options, NULL);
    const bool sim = options->device && options->device->kind == SL_DEVICE_SIM;
    return sim ? -1 : sl_calibrate_device_tiers(&c);
}

void sl_calibrate_keep(const struct sl_profile *profile, const struct sl_model *model,
                       const struct sl_calibrate_options *options)
{
    const int32_t n_tiers = kept_tiers(profile, model, options);
    for (int32_t n = SL_N_TIERS; n_tiers >= 0 && n >= n_tiers; n--) {
        char *path = NULL;
        /* The file that they came from. */
        const bool from =
            kept_path(profile, model, n, &path, NULL) == SLUICE_STATUS_OK && sl_file_exists(path);
        sl_free(path);
        if (from) {
            (void)save(profile, model, n, NULL);
            return;
        }
    }
}

void sl_calibrate_get(struct sl_profile *profile, const struct sl_model *model,
                      const struct sl_calibrate_options *options)
{
    const int32_t n_tiers = kept_tiers(profile, model, options);
    if (n_tiers < 0 || load_any(profile, model, n_tiers)) {
        return;
    }
    struct sluice_error ignored;
    enum sluice_status status = sl_calibrate_run(profile, model, options, &ignored);
    if (status == SLUICE_STATUS_OK) {
        status = save(profile, model, n_tiers, &ignored);
    }
    if (status != SLUICE_STATUS_OK) {
        sl_log(SL_LOG_WARN, "predictions are those of the machine's profile alone: %s",
               ignored.message);
    }
}
