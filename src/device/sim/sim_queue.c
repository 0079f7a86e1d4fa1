/* SPDX-License-Identifier: Apache-2.0
 *
 * The caller's side of the queues. Once the rings have their size nothing here allocates. A full
 * ring makes the caller wait, which cannot deadlock: whatever a queued item waits for was queued
 * before it.
 */
#include <string.h>

#include "base/error.h"
#include "base/mem.h"
#include "cpu/cpu.h"
#include "device/sim/sim_internal.h"

/* Make room for one more of `room` things; false without memory. */
static bool grow(void **items, size_t n, size_t *room, size_t item_bytes)
{
    if (n <= *room) {
        return true;
    }
    void *grown = sl_realloc(SL_MEM_DEVICE, *items, 2 * n, item_bytes);
    if (grown) {
        *items = grown;
        *room = 2 * n;
    }
    return grown != NULL;
}

/* Add an item, and the ops of a list, to the graph that is being recorded. */
static void record(struct sl_graph *graph, const struct sl_sim_item *item, const struct sl_op *ops)
{
    const size_t n_ops = item->kind == SL_SIM_ITEM_RUN ? (size_t)item->run.n_ops : 0;
    void *items = graph->items;
    void *list = graph->ops;
    graph->failed = graph->failed ||
                    !grow(&items, graph->n_items + 1, &graph->items_room, sizeof *graph->items) ||
                    !grow(&list, graph->n_ops + n_ops, &graph->ops_room, sizeof *graph->ops);
    graph->items = items;
    graph->ops = list;
    if (graph->failed) {
        return; /* sl_sim_graph_end says so */
    }
    struct sl_sim_item *added = &graph->items[graph->n_items++];
    *added = *item;
    if (n_ops > 0) {
        memcpy(graph->ops + graph->n_ops, ops, n_ops * sizeof *ops);
        added->run.first_op = graph->n_ops;
        graph->n_ops += n_ops;
    }
}

/* Append an item; waits while the ring is full. */
static void push(struct sl_stream *stream, const struct sl_sim_item *item)
{
    pthread_mutex_lock(&stream->lock);
    while (stream->n_queued - stream->n_done == SL_SIM_N_ITEMS) {
        pthread_cond_wait(&stream->progress, &stream->lock);
    }
    struct sl_sim_item *slot = &stream->items[stream->n_queued % SL_SIM_N_ITEMS];
    *slot = *item;
    slot->ops_end = stream->ops_head;
    stream->n_queued++;
    pthread_cond_signal(&stream->work);
    pthread_mutex_unlock(&stream->lock);
}

/* Decide whether this call of a kind with fault count `count` fails: at once, by a returned error,
 * or late, by an item that fails on the stream. */
static enum sluice_status inject(struct sl_sim_device *sim, uint64_t *count, const char *what,
                                 bool *late, struct sluice_error *err)
{
    *late = false;
    if (!sl_sim_fault_due(sim, count)) {
        return SLUICE_STATUS_OK;
    }
    SL_CHECK(sim->options.fail_late, DEVICE, err, "simulated fault: %s refused", what);
    *late = true;
    return SLUICE_STATUS_OK;
}

/* `src_bytes`: from the first to the last byte, gaps between rows included. */
static enum sluice_status queue_copy(struct sl_stream *stream, struct sl_sim_item item,
                                     size_t src_bytes, struct sluice_error *err)
{
    struct sl_sim_device *sim = stream->dev;
    const enum sl_sim_item_kind kind = item.kind;
    void *const dst = item.copy.dst;
    const void *const src = item.copy.src;
    const size_t bytes = item.copy.bytes;
    SL_TRY(sl_sim_failure(sim, err));
    SL_TRY(inject(sim, &sim->options.fail_copy_at, "copy", &item.fails, err));
    if (kind == SL_SIM_ITEM_COPY_TO_HOST) {
        SL_TRY(sl_sim_check_host(sim, dst, bytes, "copy to host: destination", err));
        item.staged = !sl_sim_host_locked(sim, dst, bytes);
    } else {
        SL_TRY(sl_sim_check_device(sim, dst, bytes, "copy: destination", err));
    }
    if (kind == SL_SIM_ITEM_COPY_TO_DEVICE) {
        SL_TRY(sl_sim_check_host(sim, src, src_bytes, "copy to device: source", err));
        item.staged = !sl_sim_host_locked(sim, src, src_bytes);
    } else {
        SL_TRY(sl_sim_check_device(sim, src, bytes, "copy: source", err));
    }
    if (stream->recording) {
        SL_CHECK(!item.staged, INVALID_ARGUMENT, err,
                 "a copy of memory that is not locked cannot be part of a graph");
        record(stream->recording, &item, NULL);
        return SLUICE_STATUS_OK;
    }
    push(stream, &item);
    return SLUICE_STATUS_OK;
}

static struct sl_sim_item whole_copy(enum sl_sim_item_kind kind, void *dst, const void *src,
                                     size_t bytes)
{
    return (struct sl_sim_item){.kind = kind,
                                .copy = {.dst = dst, .src = src, .bytes = bytes, .n_rows = 1}};
}

/* The checks above read the list of allocations without memory_lock: only this thread changes it,
 * and the stream threads only read it. */

enum sluice_status sl_sim_copy_to_device(struct sl_device *dev, struct sl_stream *stream, void *dst,
                                         const void *src, size_t bytes, struct sluice_error *err)
{
    (void)dev;
    return queue_copy(stream, whole_copy(SL_SIM_ITEM_COPY_TO_DEVICE, dst, src, bytes), bytes, err);
}

enum sluice_status sl_sim_copy_rows_to_device(struct sl_device *dev, struct sl_stream *stream,
                                              void *dst, const void *src, size_t row_bytes,
                                              size_t pitch_bytes, size_t n_rows,
                                              struct sluice_error *err)
{
    (void)dev;
    SL_CHECK(pitch_bytes >= row_bytes, INVALID_ARGUMENT, err, "rows of %zu bytes, %zu apart",
             row_bytes, pitch_bytes);
    if (n_rows == 0) {
        return SLUICE_STATUS_OK;
    }
    struct sl_sim_item item = whole_copy(SL_SIM_ITEM_COPY_TO_DEVICE, dst, src, row_bytes * n_rows);
    item.copy.n_rows = n_rows;
    item.copy.pitch_bytes = pitch_bytes;
    return queue_copy(stream, item, (n_rows - 1) * pitch_bytes + row_bytes, err);
}

enum sluice_status sl_sim_copy_to_host(struct sl_device *dev, struct sl_stream *stream, void *dst,
                                       const void *src, size_t bytes, struct sluice_error *err)
{
    (void)dev;
    return queue_copy(stream, whole_copy(SL_SIM_ITEM_COPY_TO_HOST, dst, src, bytes), bytes, err);
}

enum sluice_status sl_sim_copy_on_device(struct sl_device *dev, struct sl_stream *stream, void *dst,
                                         const void *src, size_t bytes, struct sluice_error *err)
{
    (void)dev;
    return queue_copy(stream, whole_copy(SL_SIM_ITEM_COPY_ON_DEVICE, dst, src, bytes), bytes, err);
}

static void push_event(struct sl_stream *stream, struct sl_event *event)
{
    const struct sl_sim_item item = {
        .kind = SL_SIM_ITEM_RECORD,
        .record = {.event = event, .generation = event->generation + 1}};
    event->generation++;
    push(stream, &item);
    event->stream = stream;
    event->number = stream->n_queued;
}

enum sluice_status sl_sim_event_record(struct sl_device *dev, struct sl_event *event,
                                       struct sl_stream *stream, struct sluice_error *err)
{
    SL_TRY(sl_sim_failure(sim_of(dev), err));
    if (stream->recording) {
        const struct sl_sim_item item = {.kind = SL_SIM_ITEM_RECORD, .record = {.event = event}};
        record(stream->recording, &item, NULL);
    } else {
        push_event(stream, event);
    }
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_sim_stream_wait(struct sl_device *dev, struct sl_stream *stream,
                                      struct sl_event *event, struct sluice_error *err)
{
    SL_TRY(sl_sim_failure(sim_of(dev), err));
    SL_CHECK(!stream->recording, INVALID_ARGUMENT, err, "a wait cannot be part of a graph");
    if (event->stream && event->stream != stream) {
        const struct sl_sim_item item = {
            .kind = SL_SIM_ITEM_WAIT, .wait = {.stream = event->stream, .number = event->number}};
        push(stream, &item);
    }
    return SLUICE_STATUS_OK;
}

/* Whether the device has a kernel for the op at all. */
static enum sluice_status check_supported(const struct sl_op *op, struct sluice_error *err)
{
    if (op->kind != SL_OP_LINEAR) {
        return SLUICE_STATUS_OK;
    }
    for (int i = 0; i < op->linear.n_parts && i < SL_LINEAR_MAX_PARTS; i++) {
        const enum sl_type type = op->linear.part[i].w.type;
        SL_CHECK(op->linear.part[i].w.pitch_bytes == 0, UNSUPPORTED, err,
                 "the simulated device has no linear kernel for rows that lie apart");
        const struct sl_type_traits *traits = sl_type_traits((uint32_t)type);
        SL_CHECK(traits && traits->computes, UNSUPPORTED, err,
                 "the simulated device has no linear kernel for %s", sl_type_name((uint32_t)type));
    }
    return SLUICE_STATUS_OK;
}

/* Make room for n ops in a row and for the kernels' host scratch. Growing waits for the stream. */
static enum sluice_status grow_buffers(struct sl_stream *stream, int n_ops, size_t scratch_bytes,
                                       struct sluice_error *err)
{
    /* Twice, so that a list always fits behind or before the one that runs. */
    if ((size_t)n_ops * 2 > stream->n_ops_capacity) {
        sl_sim_stream_await(stream, stream->n_queued);
        const size_t capacity = (size_t)n_ops * 4;
        struct sl_op *ops = sl_alloc(SL_MEM_DEVICE, capacity * sizeof *ops);
        SL_CHECK(ops, OUT_OF_MEMORY, err, "no memory to queue %d ops", n_ops);
        sl_free(stream->ops);
        stream->ops = ops;
        stream->n_ops_capacity = capacity;
        stream->ops_head = stream->ops_tail = 0;
    }
    if (scratch_bytes > stream->cpu_scratch_bytes) {
        sl_sim_stream_await(stream, stream->n_queued);
        void *scratch = sl_alloc_aligned(SL_MEM_DEVICE, scratch_bytes, 64);
        SL_CHECK(scratch, OUT_OF_MEMORY, err, "no memory for %zu bytes of kernel scratch",
                 scratch_bytes);
        sl_free(stream->cpu_scratch);
        stream->cpu_scratch = scratch;
        stream->cpu_scratch_bytes = scratch_bytes;
    }
    return SLUICE_STATUS_OK;
}

/* Copy the list into the ring in one piece; returns where. Waits for room. */
static uint64_t push_ops(struct sl_stream *stream, const struct sl_op *ops, int n_ops)
{
    const size_t n = (size_t)n_ops;
    const size_t capacity = stream->n_ops_capacity;
    pthread_mutex_lock(&stream->lock);
    const size_t at = stream->ops_head % capacity;
    if (at + n > capacity) {
        stream->ops_head += capacity - at; /* skip the end of the ring */
    }
    const uint64_t first = stream->ops_head;
    /* Ends: in an idle stream less than half of the ring is skipped and at most half is wanted. */
    while (first + n - stream->ops_tail > capacity) {
        pthread_cond_wait(&stream->progress, &stream->lock);
    }
    stream->ops_head = first + n;
    pthread_mutex_unlock(&stream->lock);
    memcpy(stream->ops + first % capacity, ops, n * sizeof *ops);
    return first;
}

enum sluice_status sl_sim_run(struct sl_device *dev, struct sl_stream *stream,
                              const struct sl_op *ops, int n_ops, void *scratch,
                              struct sluice_error *err)
{
    struct sl_sim_device *sim = sim_of(dev);
    struct sl_sim_item item = {.kind = SL_SIM_ITEM_RUN,
                               .run = {.n_ops = n_ops, .scratch = scratch}};
    SL_TRY(sl_sim_failure(sim, err));
    SL_TRY(inject(sim, &sim->options.fail_run_at, "op list", &item.fails, err));
    SL_CHECK(n_ops >= 0, INVALID_ARGUMENT, err, "list of %d ops", n_ops);
    size_t scratch_bytes = 0;
    for (int i = 0; i < n_ops; i++) {
        SL_TRY(check_supported(&ops[i], err));
        SL_TRY(sl_op_validate(&ops[i], err));
        SL_TRY(sl_sim_check_op(sim, &ops[i], scratch, err));
        const size_t bytes = sl_op_scratch_bytes(&ops[i]);
        scratch_bytes = bytes > scratch_bytes ? bytes : scratch_bytes;
    }
    scratch_bytes = sl_cpu_scratch_bytes(scratch_bytes, 1);
    if (stream->recording) {
        struct sl_graph *graph = stream->recording;
        graph->scratch_bytes =
            scratch_bytes > graph->scratch_bytes ? scratch_bytes : graph->scratch_bytes;
        record(graph, &item, ops);
        return SLUICE_STATUS_OK;
    }
    SL_TRY(grow_buffers(stream, n_ops, scratch_bytes, err));
    item.run.first_op = push_ops(stream, ops, n_ops);
    push(stream, &item);
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_sim_graph_begin(struct sl_device *dev, struct sl_stream *stream,
                                      struct sluice_error *err)
{
    SL_TRY(sl_sim_failure(sim_of(dev), err));
    SL_CHECK(!stream->recording, INVALID_ARGUMENT, err, "a graph is being recorded already");
    stream->recording = sl_calloc(SL_MEM_DEVICE, 1, sizeof *stream->recording);
    SL_CHECK(stream->recording, OUT_OF_MEMORY, err, "no memory for a graph");
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_sim_graph_end(struct sl_device *dev, struct sl_stream *stream,
                                    struct sl_graph **out, struct sluice_error *err)
{
    struct sl_graph *graph = stream->recording;
    *out = NULL;
    SL_CHECK(graph, INVALID_ARGUMENT, err, "no graph is being recorded");
    stream->recording = NULL;
    if (graph->failed) {
        sl_sim_graph_destroy(dev, graph);
        return sl_error_set(err, SLUICE_STATUS_OUT_OF_MEMORY, "no memory for a graph");
    }
    *out = graph;
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_sim_graph_launch(struct sl_device *dev, struct sl_stream *stream,
                                       struct sl_graph *graph, struct sluice_error *err)
{
    SL_TRY(sl_sim_failure(sim_of(dev), err));
    for (size_t i = 0; i < graph->n_items; i++) {
        struct sl_sim_item item = graph->items[i];
        if (item.kind == SL_SIM_ITEM_RECORD) {
            push_event(stream, item.record.event);
            continue;
        }
        if (item.kind == SL_SIM_ITEM_RUN) {
            const struct sl_op *ops = graph->ops + item.run.first_op;
            SL_TRY(grow_buffers(stream, item.run.n_ops, graph->scratch_bytes, err));
            item.run.first_op = push_ops(stream, ops, item.run.n_ops);
        }
        push(stream, &item);
    }
    return SLUICE_STATUS_OK;
}

void sl_sim_graph_destroy(struct sl_device *dev, struct sl_graph *graph)
{
    (void)dev;
    if (graph) {
        sl_free(graph->items);
        sl_free(graph->ops);
        sl_free(graph);
    }
}
