/* SPDX-License-Identifier: Apache-2.0
 *
 * The recorder (see trace.h). Items of a pass are kept in an array that is as long as the longest
 * pass needs and written when the pass is over, so that nothing is allocated or written while the
 * engines run.
 */
#include "exec/trace.h"

#include <errno.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/mem.h"
#include "plan/plan.h"

/* A step makes at most these: itself on the driver's lane, a copy or computation, a download. */
#define ITEMS_PER_STEP 3
/* Beside the steps: uploads of a longer resident prefix (one a shard) and of experts (one a slot),
 * and waiting at the end. */
#define ITEMS_EXTRA 8
/* Processes of the file. */
#define MEASURED 1
#define PREDICTED 2

struct item {
    enum sl_trace_lane lane;
    const char *what;
    int32_t shard;
    size_t bytes;
    uint64_t begin_ns, end_ns;    /* host clock; of streams: set when the pass is over */
    struct sl_event *begin, *end; /* of streams */
};

struct sl_trace {
    FILE *file;
    char *path;
    const struct sl_model *model;
    const struct sl_plan *plan;
    bool failed; /* something could not be written */
    bool muted;

    struct sl_device *device; /* NULL: CPU only */
    struct sl_stream *streams[3];
    struct sl_event *anchor; /* at the start of the pass, on the compute stream */
    struct item *items;
    int32_t n_items, room;

    uint64_t start_ns; /* time 0 of the file */
    uint64_t pass_ns, anchor_ns;
    uint64_t n_passes;
    int32_t n_tokens, n_past;
};

static const char *const lane_names[SL_N_LANES] = {"pass", "driver",       "CPU",
                                                   "GPU",  "copy to VRAM", "download"};

static bool on_stream(enum sl_trace_lane lane)
{
    return lane >= SL_LANE_GPU;
}

static void put(struct sl_trace *t, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void put(struct sl_trace *t, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    t->failed = vfprintf(t->file, format, args) < 0 || t->failed;
    va_end(args);
}

/* Lanes in their order, named: of what was measured and of what was predicted. */
static void put_head(struct sl_trace *t)
{
    static const char *const processes[] = {"measured", "predicted"};
    put(t, "{\"displayTimeUnit\":\"ms\",\"traceEvents\":[");
    for (int p = 0; p < 2; p++) {
        put(t, "%s\n{\"name\":\"process_name\",\"ph\":\"M\",\"pid\":%d,\"args\":{\"name\":\"%s\"}}",
            p > 0 ? "," : "", p + 1, processes[p]);
        for (int lane = 0; lane < SL_N_LANES; lane++) {
            put(t,
                ",\n{\"name\":\"thread_name\",\"ph\":\"M\",\"pid\":%d,\"tid\":%d,\"args\":{"
                "\"name\":"
                "\"%s\"}},\n{\"name\":\"thread_sort_index\",\"ph\":\"M\",\"pid\":%d,\"tid\":%d,"
                "\"args\":{\"sort_index\":%d}}",
                p + 1, lane, lane_names[lane], p + 1, lane, lane);
        }
    }
}

enum sluice_status sl_trace_open(struct sl_trace **out, const char *path,
                                 const struct sl_model *model, struct sluice_error *err)
{
    *out = NULL;
    enum sluice_status status = SLUICE_STATUS_OK;
    struct sl_trace *t = sl_calloc(SL_MEM_EXEC, 1, sizeof *t);
    SL_CHECK(t, OUT_OF_MEMORY, err, "no memory for a trace");
    t->path = sl_strdup(SL_MEM_EXEC, path);
    t->file = t->path ? fopen(path, "w") : NULL;
    if (!t->file) {
        status = t->path ? sl_error_set(err, SLUICE_STATUS_IO, "%s: %s", path, strerror(errno))
                         : sl_error_set(err, SLUICE_STATUS_OUT_OF_MEMORY, "no memory for a trace");
        sl_free(t->path);
        sl_free(t);
        return status;
    }
    t->model = model;
    t->start_ns = sl_clock_now_ns();
    put_head(t);
    *out = t;
    return status;
}

void sl_trace_detach(struct sl_trace *t)
{
    if (!t) {
        return;
    }
    for (int32_t i = 0; t->device && t->items && i < t->room; i++) {
        struct sl_event *const events[] = {t->items[i].begin, t->items[i].end};
        for (int k = 0; k < 2; k++) {
            if (events[k]) {
                t->device->vt->event_destroy(t->device, events[k]);
            }
        }
    }
    if (t->anchor) {
        t->device->vt->event_destroy(t->device, t->anchor);
    }
    sl_free(t->items);
    t->items = NULL;
    t->anchor = NULL;
    t->device = NULL;
    t->plan = NULL;
    t->n_items = t->room = 0;
}

enum sluice_status sl_trace_attach(struct sl_trace *t, const struct sl_plan *plan,
                                   struct sl_device *device, struct sl_stream *const streams[3],
                                   struct sluice_error *err)
{
    sl_trace_detach(t);
    int32_t n_steps = 0;
    for (int32_t i = 0; i < plan->n_tiers; i++) {
        n_steps = plan->tiers[i].n_steps > n_steps ? plan->tiers[i].n_steps : n_steps;
    }
    t->plan = plan;
    t->room = ITEMS_PER_STEP * n_steps + plan->n_shards + plan->n_slots + ITEMS_EXTRA;
    t->items = sl_calloc(SL_MEM_EXEC, (size_t)t->room, sizeof *t->items);
    SL_CHECK(t->items, OUT_OF_MEMORY, err, "no memory for a trace");
    if (!device) {
        return SLUICE_STATUS_OK;
    }
    t->device = device;
    memcpy(t->streams, streams, sizeof t->streams);
    SL_TRY(device->vt->event_create(device, true, &t->anchor, err));
    for (int32_t i = 0; i < t->room; i++) {
        SL_TRY(device->vt->event_create(device, true, &t->items[i].begin, err));
        SL_TRY(device->vt->event_create(device, true, &t->items[i].end, err));
    }
    return SLUICE_STATUS_OK;
}

void sl_trace_pass_begin(struct sl_trace *t, int32_t n_tokens, int32_t n_past)
{
    if (!t) {
        return;
    }
    t->n_items = 0;
    t->muted = false;
    t->n_tokens = n_tokens;
    t->n_past = n_past;
    t->pass_ns = sl_clock_now_ns();
    t->anchor_ns = t->pass_ns;
    if (t->device) {
        /* The compute stream is idle, so the event is taken between the two readings. */
        const uint64_t before = sl_clock_now_ns();
        if (t->device->vt->event_record(t->device, t->anchor, t->streams[0], NULL) ==
            SLUICE_STATUS_OK) {
            t->device->vt->event_sync(t->device, t->anchor, NULL);
        }
        t->anchor_ns = before + (sl_clock_now_ns() - before) / 2;
    }
}

int32_t sl_trace_begin(struct sl_trace *t, enum sl_trace_lane lane, const char *what, int32_t shard)
{
    if (!t || t->muted || t->n_items >= t->room || (on_stream(lane) && !t->device)) {
        return -1;
    }
    const int32_t mark = t->n_items++;
    struct item *const item = &t->items[mark];
    item->lane = lane;
    item->what = what;
    item->shard = shard;
    item->bytes = 0;
    item->begin_ns = item->end_ns = 0;
    if (!on_stream(lane)) {
        item->begin_ns = sl_clock_now_ns();
    } else if (t->device->vt->event_record(t->device, item->begin, t->streams[lane - SL_LANE_GPU],
                                           NULL) != SLUICE_STATUS_OK) {
        t->n_items--;
        return -1;
    }
    return mark;
}

void sl_trace_end(struct sl_trace *t, int32_t mark, size_t bytes)
{
    if (!t || mark < 0) {
        return;
    }
    struct item *const item = &t->items[mark];
    item->bytes = bytes;
    item->end_ns = sl_clock_now_ns();
    if (on_stream(item->lane) &&
        t->device->vt->event_record(t->device, item->end, t->streams[item->lane - SL_LANE_GPU],
                                    NULL) != SLUICE_STATUS_OK) {
        item->end_ns = 0; /* left out */
    }
}

void sl_trace_mute(struct sl_trace *t, bool mute)
{
    if (t) {
        t->muted = mute;
    }
}

/* The device's times of an item on the host's clock. */
static bool take_times(struct sl_trace *t, struct item *item)
{
    uint64_t begin = 0, length = 0;
    if (item->end_ns == 0) {
        return false; /* begun, but the pass went another way */
    }
    if (!on_stream(item->lane)) {
        return true;
    }
    const struct sl_device_vtable *const vt = t->device->vt;
    if (vt->event_elapsed(t->device, t->anchor, item->begin, &begin, NULL) != SLUICE_STATUS_OK ||
        vt->event_elapsed(t->device, item->begin, item->end, &length, NULL) != SLUICE_STATUS_OK) {
        return false;
    }
    item->begin_ns = t->anchor_ns + begin;
    item->end_ns = item->begin_ns + length;
    return true;
}

static void put_name(struct sl_trace *t, const char *what, int32_t index)
{
    static const char *const kinds[] = {"attention", "ffn", "head"};
    if (index < 0) {
        put(t, "%s", what);
        return;
    }
    const struct sl_shard *const shard = &t->model->shards[index];
    put(t, "%s%s%s", what, what[0] ? " " : "", kinds[shard->kind]);
    if (shard->kind != SL_SHARD_HEAD) {
        put(t, " %" PRIu32, shard->layer);
    }
}

/* An event but for its end: begin and end in nanoseconds of the host's clock. */
static void put_event(struct sl_trace *t, int process, enum sl_trace_lane lane, double begin_ns,
                      double end_ns, const char *what, int32_t shard)
{
    put(t, ",\n{\"ph\":\"X\",\"pid\":%d,\"tid\":%d,\"ts\":%.3f,\"dur\":%.3f,\"name\":\"", process,
        (int)lane, (begin_ns - (double)t->start_ns) / 1e3, (end_ns - begin_ns) / 1e3);
    put_name(t, what, shard);
    put(t, "\",\"args\":{\"pass\":%" PRIu64 ",\"tokens\":%" PRId32, t->n_passes, t->n_tokens);
}

static void put_item(struct sl_trace *t, const struct item *item)
{
    put_event(t, MEASURED, item->lane, (double)item->begin_ns, (double)item->end_ns, item->what,
              item->shard);
    if (item->bytes > 0) {
        put(t, ",\"bytes\":%zu", item->bytes);
    }
    put(t, "}}");
}

/* What the planner thought of a pass of this tier, begun at the same time. */
static void put_prediction(struct sl_trace *t, const struct sl_tier_plan *tier)
{
    static const enum sl_trace_lane lanes[SL_N_ENGINES] = {
        [SL_ENGINE_DRIVER] = SL_LANE_DRIVER,     [SL_ENGINE_CPU] = SL_LANE_CPU,
        [SL_ENGINE_GPU] = SL_LANE_GPU,           [SL_ENGINE_COPY] = SL_LANE_COPY,
        [SL_ENGINE_DOWNLOAD] = SL_LANE_DOWNLOAD,
    };
    const double start = (double)t->pass_ns;
    put_event(t, PREDICTED, SL_LANE_PASS, start, start + tier->predicted.pass_ns, "pass", -1);
    put(t, "}}");
    for (int32_t i = 0; i < tier->timeline.n; i++) {
        const struct sl_interval *const item = &tier->timeline.items[i];
        put_event(t, PREDICTED, lanes[item->engine], start + item->begin_ns, start + item->end_ns,
                  "", tier->steps[item->step].shard);
        put(t, "}}");
    }
}

void sl_trace_pass_end(struct sl_trace *t, int32_t tier, bool complete)
{
    if (!t || !complete) {
        return;
    }
    const uint64_t now = sl_clock_now_ns();
    const struct sl_tier_plan *const plan = &t->plan->tiers[tier];
    char name[64];
    snprintf(name, sizeof name, "%" PRId32 " tokens at %" PRId32, t->n_tokens, t->n_past);
    put_event(t, MEASURED, SL_LANE_PASS, (double)t->pass_ns, (double)now, name, -1);
    put(t, ",\"depth\":%" PRId32 ",\"tier\":%" PRId32 "}}", t->n_past, plan->n_tokens);
    if (t->n_tokens == plan->n_tokens) {
        put_prediction(t, plan);
    }
    for (int32_t i = 0; i < t->n_items; i++) {
        if (take_times(t, &t->items[i])) {
            put_item(t, &t->items[i]);
        }
    }
    t->n_passes++;
}

enum sluice_status sl_trace_close(struct sl_trace **trace, struct sluice_error *err)
{
    if (!trace || !*trace) {
        return SLUICE_STATUS_OK;
    }
    struct sl_trace *const t = *trace;
    enum sluice_status status = SLUICE_STATUS_OK;
    *trace = NULL;
    sl_trace_detach(t);
    put(t, "\n]}\n");
    if (fclose(t->file) != 0 || t->failed) {
        status = sl_error_set(err, SLUICE_STATUS_IO, "%s: the trace could not be written whole",
                              t->path);
    }
    sl_free(t->path);
    sl_free(t);
    return status;
}
