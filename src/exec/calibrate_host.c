/* SPDX-License-Identifier: Apache-2.0
 *
 * A model's work timed on the CPU: passes layer by layer, as they run, each shard with the clock
 * beside it. A lap over the layers reads more than a processor's caches hold, so that weights are
 * cold when their turn comes; the lap before the timed one faults pages in, which passes find in
 * memory. Where there is a link, short passes are timed beside copies too.
 */
#include <math.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/median.h"
#include "base/mem.h"
#include "exec/calibrate_internal.h"

#define MOST_TOKENS 512
#define MOST_PART_TOKENS 64         /* a mixture's parts in longer passes go as these */
#define LAP_BYTES ((size_t)1 << 30) /* feed-forward weights of a lap, if the model has as many */
#define LEAST_LAYERS 4
/* Laps of longer passes have as many layers as this is expected to be enough for; where it is not
 * for one, they are not timed. */
#define LONG_LAP_NS 0.3e9
#define MOST_BUSY_TOKENS 16 /* longer passes compute more than they read */
/* Beside a GPU the pool has waited about so long when a mixture's choice comes down. */
#define PAUSE_NS 50000

/* Copies of this size keep the link busy in another lap, out of as much of the file as no cache
 * holds. */
#define COPY_BYTES ((size_t)16 << 20)
#define SOURCE_BYTES ((size_t)1 << 30)
#define MOST_COPIES 1024

/* What is timed in each layer. The head comes once a lap. */
enum timed { ATTENTION, FFN, FEW, ALL, N_TIMED };

struct host {
    struct sl_cal *c;
    const struct sl_cpu_kernels *kernels;
    uint8_t *mem;
    void *scratch;
    double *figures[N_TIMED]; /* [n_layers]: of shards ratios to what is expected, of parts times */
    double n_few, n_all;      /* experts of the lap */
    enum sl_unit unit;        /* whose expectations they are beside */
    struct sl_stream *stream; /* of copies; NULL: there are none */
    const uint8_t *from;      /* page-locked */
    size_t piece_bytes, n_pieces;
    void *to;
};

static void bind_weights(struct sl_cal *c, const struct sl_shard *shard)
{
    memset(c->bind.weights, 0, sizeof c->bind.weights);
    for (uint32_t w = 0; w < shard->n_weights; w++) {
        c->bind.weights[w] = shard->weights[w].name ? shard->weights[w].m.data : NULL;
    }
}

static void run_part(struct host *h, const struct sl_shard *shard, enum sl_shard_part part)
{
    struct sl_op ops[SL_SHARD_MAX_OPS];
    struct sl_cal *const c = h->c;
    c->bind.part = part;
    const int n_ops = sl_shard_build(c->model, shard, &c->bind, ops);
    sl_cpu_run(h->kernels, c->o->pool, ops, n_ops, h->scratch);
    c->bind.part = SL_PART_WHOLE;
}

static double time_part(struct host *h, const struct sl_shard *shard, enum sl_shard_part part)
{
    const uint64_t begin = sl_clock_now_ns();
    run_part(h, shard, part);
    return (double)(sl_clock_now_ns() - begin);
}

/* Time of a shard beside what is expected of it. */
static double time_shard(struct host *h, const struct sl_shard *shard)
{
    struct sl_cal *const c = h->c;
    bind_weights(c, shard);
    memcpy(c->bind.hidden, c->noise,
           (size_t)c->bind.n_tokens * c->model->hp.n_embd * sizeof(float));
    return time_part(h, shard, SL_PART_WHOLE) / sl_cal_expected_ns(c, h->unit, shard);
}

static int32_t count_experts(const struct host *h, const struct sl_shard *shard)
{
    const struct sl_cal *const c = h->c;
    const int32_t n_pairs = c->bind.n_tokens * (int32_t)c->model->hp.n_experts_used;
    const struct sl_split none = {0};
    const size_t mine = sl_shard_choice(c->model, shard, none, c->bind.n_tokens).mine;
    const int32_t *const ids = (const int32_t *)(const void *)((uint8_t *)c->bind.workspace + mine);
    bool seen[SL_MAX_EXPERTS] = {false};
    int32_t n = 0;
    for (int32_t i = 0; i < n_pairs; i++) {
        if (ids[i] >= 0 && !seen[ids[i]]) {
            seen[ids[i]] = true;
            n++;
        }
    }
    return n;
}

/* The host's part of a shared mixture, when it has this share of the experts. */
static double time_others(struct host *h, const struct sl_shard *shard, int32_t share,
                          double *n_experts)
{
    struct sl_cal *const c = h->c;
    bind_weights(c, shard);
    memcpy(c->bind.hidden, c->noise,
           (size_t)c->bind.n_tokens * c->model->hp.n_embd * sizeof(float));
    c->bind.at_hand = c->none;
    c->bind.share = share;
    run_part(h, shard, SL_PART_ROUTE);
    c->bind.at_hand = NULL;
    *n_experts += count_experts(h, shard);
    const uint64_t pause =
        c->o->device && c->bind.n_tokens <= sl_tier_tokens[SL_N_GRAPH_TIERS - 1] ? PAUSE_NS : 0;
    for (const uint64_t begin = sl_clock_now_ns(); sl_clock_now_ns() - begin < pause;) {
    }
    return time_part(h, shard, SL_PART_OTHERS);
}

/* Layers of a lap through a long pass, by what the tier before came to. */
static uint32_t long_lap_layers(const struct sl_cal *c, int32_t tier)
{
    double ns = 0;
    for (int k = ATTENTION; k <= FFN; k++) {
        ns += c->profile->work_factor[SL_UNIT_CPU][k][tier - 1] *
              sl_cal_expected_ns(c, SL_UNIT_CPU, &c->model->shards[k]);
    }
    return ns > 0 ? (uint32_t)fmin(fmin(LEAST_LAYERS, c->model->hp.n_layers), LONG_LAP_NS / ns) : 0;
}

/* Layers of a lap: spread over the depth, as many as it takes to read LAP_BYTES. */
static uint32_t lap_layers(const struct sl_cal *c, int32_t n_tokens)
{
    const struct sl_hparams *const hp = &c->model->hp;
    const struct sl_shard *const ffn = &c->model->shards[1];
    const double read =
        sl_cal_is_mixture(c)
            ? (double)ffn->expert_bytes *
                  sl_profile_experts_read(hp->n_experts, hp->n_experts_used, n_tokens)
            : (double)ffn->bytes;
    const double wanted = (double)LAP_BYTES / read + 1;
    const uint32_t n = wanted < hp->n_layers ? (uint32_t)wanted : hp->n_layers;
    return n >= LEAST_LAYERS || n == hp->n_layers ? n
           : hp->n_layers < LEAST_LAYERS          ? hp->n_layers
                                                  : LEAST_LAYERS;
}

static bool times_parts(const struct sl_cal *c)
{
    return sl_cal_is_mixture(c) && c->bind.n_tokens <= MOST_PART_TOKENS;
}

/* One lap. A mixture's parts are timed on layers that lie a third of the lap apart, or they would
 * find the experts of their layer in the caches. Returns the figure of the head. */
static double lap(struct host *h, uint32_t n)
{
    const struct sl_model *const model = h->c->model;
    const uint32_t n_layers = model->hp.n_layers;
    h->n_few = h->n_all = 0;
    for (uint32_t i = 0; i < n; i++) {
        const struct sl_shard *const layer = &model->shards[2 * (size_t)(i * n_layers / n)];
        h->figures[ATTENTION][i] = time_shard(h, &layer[0]);
        h->figures[FFN][i] = time_shard(h, &layer[1]);
        if (times_parts(h->c)) {
            const uint32_t few = (i + n / 3) % n * n_layers / n;
            const uint32_t all = (i + 2 * n / 3) % n * n_layers / n;
            h->figures[FEW][i] = time_others(h, &model->shards[2 * few + 1], SL_CAL_FEW, &h->n_few);
            h->figures[ALL][i] = time_others(h, &model->shards[2 * all + 1], SL_CAL_ALL, &h->n_all);
        }
    }
    return time_shard(h, &model->shards[model->n_shards - 1]);
}

static void keep(struct host *h, int32_t tier, uint32_t n, double head)
{
    struct sl_cal *const c = h->c;
    sl_cal_keep(c, h->unit, SL_WORK_ATTENTION, tier, sl_median(h->figures[ATTENTION], (int)n), 1);
    sl_cal_keep(c, h->unit, SL_WORK_FFN, tier, sl_median(h->figures[FFN], (int)n), 1);
    sl_cal_keep(c, h->unit, SL_WORK_HEAD, tier, head, 1);
    if (times_parts(c)) {
        const struct sl_hparams *const hp = &c->model->hp;
        const double read =
            n * sl_profile_experts_read(hp->n_experts, hp->n_experts_used, c->bind.n_tokens);
        sl_cal_keep_experts(c, h->unit, tier, sl_median(h->figures[FEW], (int)n), h->n_few / read,
                            sl_median(h->figures[ALL], (int)n), h->n_all / read);
    }
}

/* Queue copies for longer than a lap takes. */
static enum sluice_status start_copies(struct host *h, double lap_ns)
{
    struct sl_device *const dev = h->c->o->device;
    const double rate = h->c->profile->h2d_bytes_per_s[SL_N_COPY_SIZES - 1];
    const double n = ceil(1.5e-9 * lap_ns * rate / (double)h->piece_bytes) + 1;
    for (int i = 0; i < (int)fmin(n, MOST_COPIES); i++) {
        const uint8_t *const piece = h->from + (size_t)i % h->n_pieces * h->piece_bytes;
        SL_TRY(dev->vt->copy_to_device(dev, h->stream, h->to, piece, h->piece_bytes, h->c->err));
    }
    return SLUICE_STATUS_OK;
}

static void copy_to_busy(struct sl_profile *p, int32_t tier)
{
    for (int work = 0; work < SL_N_WORKS; work++) {
        p->work_factor[SL_UNIT_CPU_BUSY][work][tier] = p->work_factor[SL_UNIT_CPU][work][tier];
    }
}

/* Passes that read more than they compute, cold and beside copies. */
static enum sluice_status calibrate_short(struct host *h, int32_t tier)
{
    struct sl_cal *const c = h->c;
    const uint32_t n = lap_layers(c, sl_tier_tokens[tier]);
    lap(h, n); /* faults pages in, wakes the pool, loads the code */
    const uint64_t begin = sl_clock_now_ns();
    const double head = lap(h, n);
    const double lap_ns = (double)(sl_clock_now_ns() - begin);
    keep(h, tier, n, head);
    if (!h->stream || sl_tier_tokens[tier] > MOST_BUSY_TOKENS) {
        copy_to_busy(c->profile, tier);
        return SLUICE_STATUS_OK;
    }
    h->unit = SL_UNIT_CPU_BUSY;
    SL_TRY(start_copies(h, lap_ns));
    keep(h, tier, n, lap(h, n));
    h->unit = SL_UNIT_CPU;
    return c->o->device->vt->stream_sync(c->o->device, h->stream, c->err);
}

/* Passes that compute: of another size than the last tier, at another part of the processor's
 * speed. What takes too long is taken to be half as far from the expected as the tier before. Each
 * expert has tokens enough for a part of them to go like the whole. */
static void calibrate_long(struct host *h, int32_t tier)
{
    struct sl_cal *const c = h->c;
    double(*const factor)[SL_N_TIERS] = c->profile->work_factor[SL_UNIT_CPU];
    const uint32_t n = long_lap_layers(c, tier);
    for (int work = 0; work < SL_N_WORKS; work++) {
        factor[work][tier] =
            work < SL_WORK_ROUTE && n == 0 ? sqrt(factor[work][tier - 1]) : factor[work][tier - 1];
    }
    if (n > 0) {
        keep(h, tier, n, lap(h, n));
    }
    factor[SL_WORK_EXPERTS][tier] = factor[SL_WORK_FFN][tier];
    copy_to_busy(c->profile, tier);
}

static enum sluice_status calibrate_tier(struct host *h, int32_t tier)
{
    h->unit = SL_UNIT_CPU;
    sl_cal_set_pass(h->c, sl_tier_tokens[tier]);
    if (sl_tier_tokens[tier] <= MOST_PART_TOKENS) {
        return calibrate_short(h, tier);
    }
    calibrate_long(h, tier);
    return SLUICE_STATUS_OK;
}

/* What copies need: memory of the device, within the budget, and a part of the file, page-locked.
 */
static enum sluice_status init_copies(struct host *h)
{
    const struct sl_cal *const c = h->c;
    struct sl_device *const dev = c->o->device;
    size_t bytes = 0;
    const void *const mapping = sl_gguf_mapping(c->model->file, 0, &bytes);
    bytes = bytes < SOURCE_BYTES ? bytes : SOURCE_BYTES;
    if (!dev || c->o->budget_bytes < COPY_BYTES ||
        dev->vt->host_register(dev, mapping, bytes, true, NULL) != SLUICE_STATUS_OK) {
        return SLUICE_STATUS_OK;
    }
    h->from = mapping;
    h->piece_bytes = bytes < COPY_BYTES ? bytes : COPY_BYTES;
    h->n_pieces = bytes / h->piece_bytes;
    SL_TRY(dev->vt->mem_alloc(dev, h->piece_bytes, &h->to, c->err));
    return dev->vt->stream_create(dev, SL_STREAM_COPIES, &h->stream, c->err);
}

static void finish(struct host *h)
{
    struct sl_device *const dev = h->c->o->device;
    if (h->stream) {
        dev->vt->stream_sync(dev, h->stream, NULL);
        dev->vt->stream_destroy(dev, h->stream);
    }
    if (h->to) {
        dev->vt->mem_free(dev, h->to);
    }
    if (h->from) {
        dev->vt->host_unregister(dev, h->from);
    }
    sl_free(h->figures[0]);
    sl_free(h->mem);
    sl_free(h->scratch);
}

static enum sluice_status init(struct host *h, int32_t n_tiers)
{
    struct sl_cal *const c = h->c;
    const int32_t most = sl_tier_tokens[n_tiers - 1];
    const struct sl_cal_sizes s = sl_cal_sizes_of(c, most, most);
    const int n_threads = c->o->pool ? sl_pool_n_threads(c->o->pool) : 1;
    const size_t n_layers = c->model->hp.n_layers;
    h->mem = sl_alloc_aligned(SL_MEM_EXEC, sl_cal_total(&s), 4096);
    h->scratch = sl_alloc_aligned(SL_MEM_EXEC, sl_cpu_scratch_bytes(s.scratch, n_threads), 4096);
    double *const ns = sl_calloc(SL_MEM_EXEC, N_TIMED * n_layers, sizeof *ns);
    h->figures[0] = ns;
    SL_CHECK(h->mem && h->scratch && ns, OUT_OF_MEMORY, c->err, "no memory to time the model");
    for (size_t k = 1; k < N_TIMED; k++) {
        h->figures[k] = ns + k * n_layers;
    }
    memset(h->mem, 0, sl_cal_total(&s));
    sl_cal_carve(c, h->mem, &s);
    memcpy((void *)(uintptr_t)c->bind.pos, c->pos, (size_t)most * sizeof(int32_t));
    c->bind.consts = c->model->consts;
    return init_copies(h);
}

enum sluice_status sl_calibrate_host(struct sl_cal *c)
{
    struct host h = {.c = c,
                     .kernels = c->o->kernels ? c->o->kernels : sl_cpu_kernels(sl_cpu_level())};
    int32_t n_tiers = 0;
    while (sl_tier_tokens[n_tiers] <= MOST_TOKENS) {
        n_tiers++;
    }
    enum sluice_status status = init(&h, n_tiers);
    for (int32_t t = 0; t < n_tiers && status == SLUICE_STATUS_OK; t++) {
        status = calibrate_tier(&h, t);
    }
    finish(&h);
    SL_TRY(status);
    sl_cal_extend(c, SL_UNIT_CPU, n_tiers);
    sl_cal_extend(c, SL_UNIT_CPU_BUSY, n_tiers);
    return SLUICE_STATUS_OK;
}
