/* SPDX-License-Identifier: Apache-2.0
 *
 * A model's work timed on the device. In passes one shard follows the other, so what is timed is a
 * row of shards, of different layers as far as it takes to outgrow the caches: in short passes
 * launches count, and of a row the first one alone is waited for. The parts of a shared mixture are
 * timed the same way: its route, then its route with its experts.
 */
#include <string.h>

#include "base/error.h"
#include "base/mem.h"
#include "exec/calibrate_internal.h"
#include "exec/timer.h"

#define MIB ((size_t)1 << 20)
#define ROW 8               /* shards in a row */
#define MOST_ROW_TOKENS 64  /* longer passes are timed by one shard */
#define MOST_PART_TOKENS 64 /* a mixture's parts in longer passes go as the whole */
#define IMAGE_BYTES (128 * MIB)
#define FLUSH_BYTES (64 * MIB)

struct device {
    struct sl_cal *c;
    const struct sl_device_vtable *vt;
    struct sl_timer timer;
    uint8_t *mem, *images, *scratch;
    uint8_t *none; /* no expert is at hand */
    struct sl_op *ops;
    const struct sl_shard *row[ROW];
    int n_images;
};

static int row_length(int32_t n_tokens)
{
    return n_tokens <= MOST_ROW_TOKENS ? ROW : 1;
}

/* The i-th shard of a row: layers apart. */
static const struct sl_shard *shard_of(const struct sl_cal *c, enum sl_shard_kind kind, int i)
{
    const uint32_t n_layers = c->model->hp.n_layers;
    const uint32_t layer = (uint32_t)i * n_layers / ROW;
    return kind == SL_SHARD_HEAD ? &c->model->shards[c->model->n_shards - 1]
                                 : &c->model->shards[2 * layer + (kind == SL_SHARD_FFN)];
}

/* Different shards of a row. */
static int count_images(const struct sl_cal *c, enum sl_shard_kind kind)
{
    const size_t bytes = sl_cal_align(shard_of(c, kind, 0)->bytes);
    const size_t n = IMAGE_BYTES / bytes + 1;
    return kind == SL_SHARD_HEAD ? 1 : n < ROW ? (int)n : ROW;
}

static size_t images_bytes(const struct sl_cal *c, enum sl_shard_kind kind)
{
    size_t bytes = 0;
    for (int i = 0; i < count_images(c, kind); i++) {
        bytes += sl_cal_align(shard_of(c, kind, i)->bytes);
    }
    return bytes;
}

static size_t most_images_bytes(const struct sl_cal *c)
{
    size_t most = 0;
    for (int kind = SL_SHARD_ATTENTION; kind <= SL_SHARD_HEAD; kind++) {
        const size_t bytes = images_bytes(c, (enum sl_shard_kind)kind);
        most = bytes > most ? bytes : most;
    }
    return most;
}

static struct sl_cal_sizes sizes_of(const struct sl_cal *c, int32_t n_tiers)
{
    const int32_t n = sl_tier_tokens[n_tiers - 1];
    return sl_cal_sizes_of(c, n, n < ROW * MOST_ROW_TOKENS ? ROW * MOST_ROW_TOKENS : n);
}

static size_t fixed_bytes(const struct sl_cal *c)
{
    return most_images_bytes(c) + sl_cal_align(c->model->consts_bytes) + 2 * FLUSH_BYTES;
}

int32_t sl_calibrate_device_tiers(const struct sl_cal *c)
{
    int32_t n_tiers = 0;
    while (c->o->device && n_tiers < SL_N_TIERS && sl_tier_tokens[n_tiers] <= SL_CAL_MOST_TOKENS) {
        const struct sl_cal_sizes s = sizes_of(c, n_tiers + 1);
        if (fixed_bytes(c) + sl_cal_total(&s) + s.scratch > c->o->budget_bytes) {
            break;
        }
        n_tiers++;
    }
    return n_tiers;
}

static enum sluice_status upload(struct device *d, const void *to, const void *from, size_t bytes)
{
    SL_TRY(d->vt->copy_to_device(d->timer.device, d->timer.stream, (void *)(uintptr_t)to, from,
                                 bytes, d->c->err));
    return d->vt->stream_sync(d->timer.device, d->timer.stream, d->c->err);
}

static enum sluice_status upload_images(struct device *d, enum sl_shard_kind kind)
{
    d->n_images = count_images(d->c, kind);
    uint8_t *image = d->images;
    for (int i = 0; i < d->n_images; i++) {
        d->row[i] = shard_of(d->c, kind, i);
        for (uint32_t w = 0; w < d->row[i]->n_weights; w++) {
            const struct sl_weight *const weight = &d->row[i]->weights[w];
            if (weight->name) {
                SL_TRY(upload(d, image + weight->offset, weight->m.data, weight->bytes));
            }
        }
        image += sl_cal_align(d->row[i]->bytes);
    }
    return SLUICE_STATUS_OK;
}

/* What is expected of one of a row, on average. */
static double expected_ns(const struct device *d)
{
    double ns = 0;
    for (int i = 0; i < d->n_images; i++) {
        ns += sl_cal_expected_ns(d->c, SL_UNIT_GPU, d->row[i]);
    }
    return ns / d->n_images;
}

/* Add the list of a part of shard `i` of the row to the ops. */
static int add_part(struct device *d, int i, enum sl_shard_part part, int n_ops)
{
    struct sl_cal *const c = d->c;
    struct sl_shard_bind bind = c->bind;
    const struct sl_shard *const shard = d->row[i % d->n_images];
    const uint8_t *image = d->images;
    for (int k = 0; k < i % d->n_images; k++) {
        image += sl_cal_align(d->row[k]->bytes);
    }
    for (uint32_t w = 0; w < shard->n_weights; w++) {
        bind.weights[w] = shard->weights[w].name ? image + shard->weights[w].offset : NULL;
    }
    /* Other tokens each time, or a mixture's experts would be those of the last one. */
    bind.hidden += (size_t)i * (size_t)bind.n_tokens * c->model->hp.n_embd;
    bind.part = part;
    return n_ops + sl_shard_build(c->model, shard, &bind, d->ops + n_ops);
}

/* Time of one of a row: of whole shards, or of route and experts (share 0: route alone). */
static enum sluice_status time_row(struct device *d, bool shared, int32_t share, double *out)
{
    struct sl_cal *const c = d->c;
    const int32_t n = c->bind.n_tokens;
    const int length = row_length(n);
    int n_ops = 0;
    c->bind.at_hand = shared ? d->none : NULL;
    c->bind.share = share;
    for (int i = 0; i < length; i++) {
        n_ops = add_part(d, i, shared ? SL_PART_ROUTE : SL_PART_WHOLE, n_ops);
        if (shared && share > 0) {
            n_ops = add_part(d, i, SL_PART_OWN, n_ops);
        }
    }
    SL_TRY(upload(d, c->bind.hidden, c->noise,
                  (size_t)(length * n) * c->model->hp.n_embd * sizeof(float)));
    d->timer.load_ns = length == 1 ? c->o->load_ns : 0;
    SL_TRY(sl_timer_list(&d->timer, d->ops, n_ops, d->scratch,
                         n <= sl_tier_tokens[SL_N_GRAPH_TIERS - 1], out, c->err));
    *out /= length;
    return SLUICE_STATUS_OK;
}

static enum sluice_status calibrate_whole(struct device *d, enum sl_shard_kind kind, int32_t tier)
{
    struct sl_cal *const c = d->c;
    double ns = 0;
    sl_cal_set_pass(c, sl_tier_tokens[tier]);
    SL_TRY(time_row(d, false, 0, &ns));
    sl_cal_keep(c, SL_UNIT_GPU, (enum sl_work)kind, tier, ns, expected_ns(d));
    return SLUICE_STATUS_OK;
}

static enum sluice_status calibrate_parts(struct device *d, int32_t tier)
{
    struct sl_cal *const c = d->c;
    const struct sl_hparams *const hp = &c->model->hp;
    const int32_t n = sl_tier_tokens[tier];
    double(*const factor)[SL_N_TIERS] = c->profile->work_factor[SL_UNIT_GPU];
    if (n > MOST_PART_TOKENS) {
        factor[SL_WORK_ROUTE][tier] = factor[SL_WORK_EXPERTS][tier] = factor[SL_WORK_FFN][tier];
        return SLUICE_STATUS_OK;
    }
    double route_ns = 0, few_ns = 0, all_ns = 0;
    sl_cal_set_pass(c, n);
    SL_TRY(time_row(d, true, 0, &route_ns));
    SL_TRY(time_row(d, true, SL_CAL_FEW, &few_ns));
    SL_TRY(time_row(d, true, SL_CAL_ALL, &all_ns));
    c->bind.part = SL_PART_ROUTE;
    sl_cal_keep(c, SL_UNIT_GPU, SL_WORK_ROUTE, tier, route_ns, expected_ns(d));
    const double read = sl_profile_experts_read(hp->n_experts, hp->n_experts_used, n);
    const int few = ((int)(read + 0.5) * SL_CAL_FEW + SL_DIVIDE_ALL / 2) / SL_DIVIDE_ALL;
    sl_cal_keep_experts(c, SL_UNIT_GPU, tier, few_ns - route_ns, few / read, all_ns - route_ns, 1);
    return SLUICE_STATUS_OK;
}

static enum sluice_status init(struct device *d, int32_t n_tiers)
{
    struct sl_cal *const c = d->c;
    const struct sl_cal_sizes s = sizes_of(c, n_tiers);
    const size_t images = most_images_bytes(c);
    void *mem = NULL;
    d->ops = sl_calloc(SL_MEM_EXEC, (size_t)ROW * SL_SHARD_MAX_OPS, sizeof *d->ops);
    SL_CHECK(d->ops, OUT_OF_MEMORY, c->err, "no memory to time the model");
    SL_TRY(d->vt->mem_alloc(c->o->device, fixed_bytes(c) + sl_cal_total(&s) + s.scratch, &mem,
                            c->err));
    d->mem = mem;
    SL_TRY(sl_timer_init(&d->timer, c->o->device, c->err));
    d->images = d->mem;
    d->timer.flush = d->images + images;
    d->timer.flush_bytes = FLUSH_BYTES;
    c->bind.consts = (const float *)(const void *)(d->images + images + 2 * FLUSH_BYTES);
    uint8_t *const rest = d->mem + fixed_bytes(c);
    d->none = sl_cal_carve(c, rest, &s);
    d->scratch = rest + sl_cal_total(&s);
    SL_TRY(upload(d, c->bind.consts, c->model->consts, c->model->consts_bytes));
    SL_TRY(upload(d, c->bind.pos, c->pos, (size_t)sl_tier_tokens[n_tiers - 1] * sizeof(int32_t)));
    if (sl_cal_is_mixture(c)) {
        SL_TRY(upload(d, d->none, c->none, c->model->hp.n_experts));
    }
    void *const zeros = sl_calloc(SL_MEM_EXEC, 1, s.kv);
    SL_CHECK(zeros, OUT_OF_MEMORY, c->err, "no memory to time the model");
    const enum sluice_status status = upload(d, c->bind.kv.data, zeros, s.kv);
    sl_free(zeros);
    return status;
}

static enum sluice_status calibrate(struct device *d, int32_t n_tiers)
{
    SL_TRY(init(d, n_tiers));
    for (int kind = SL_SHARD_ATTENTION; kind <= SL_SHARD_HEAD; kind++) {
        SL_TRY(upload_images(d, (enum sl_shard_kind)kind));
        for (int32_t t = 0; t < n_tiers; t++) {
            SL_TRY(calibrate_whole(d, (enum sl_shard_kind)kind, t));
            if (kind == SL_SHARD_FFN && sl_cal_is_mixture(d->c)) {
                SL_TRY(calibrate_parts(d, t));
            }
        }
    }
    sl_cal_extend(d->c, SL_UNIT_GPU, n_tiers);
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_calibrate_device(struct sl_cal *c)
{
    struct device d = {.c = c, .vt = c->o->device->vt};
    const int32_t n_tiers = sl_calibrate_device_tiers(c);
    if (n_tiers == 0) {
        return SLUICE_STATUS_OK;
    }
    const enum sluice_status status = calibrate(&d, n_tiers);
    sl_timer_finish(&d.timer);
    if (d.mem) {
        d.vt->mem_free(c->o->device, d.mem);
    }
    sl_free(d.ops);
    return status;
}
