/* SPDX-License-Identifier: Apache-2.0
 *
 * Timing lists of operators on a device (see timer.h).
 */
#include "exec/timer.h"

#include <math.h>
#include <string.h>

#include "base/error.h"
#include "base/median.h"

#define REPEATS 3

enum sluice_status sl_timer_init(struct sl_timer *timer, struct sl_device *device,
                                 struct sluice_error *err)
{
    *timer = (struct sl_timer){.device = device};
    SL_TRY(device->vt->stream_create(device, SL_STREAM_OPERATORS, &timer->stream, err));
    SL_TRY(device->vt->event_create(device, true, &timer->start, err));
    return device->vt->event_create(device, true, &timer->stop, err);
}

void sl_timer_finish(struct sl_timer *timer)
{
    struct sl_device *const dev = timer->device;
    if (timer->stream) {
        dev->vt->stream_sync(dev, timer->stream, NULL);
        dev->vt->stream_destroy(dev, timer->stream);
    }
    if (timer->start) {
        dev->vt->event_destroy(dev, timer->start);
    }
    if (timer->stop) {
        dev->vt->event_destroy(dev, timer->stop);
    }
    memset(timer, 0, sizeof *timer);
}

static enum sluice_status record(struct sl_timer *timer, const struct sl_op *ops, int n_ops,
                                 void *scratch, struct sl_graph **out, struct sluice_error *err)
{
    struct sl_device *const dev = timer->device;
    SL_TRY(dev->vt->graph_begin(dev, timer->stream, err));
    const enum sluice_status queued = dev->vt->run(dev, timer->stream, ops, n_ops, scratch, err);
    const bool good = queued == SLUICE_STATUS_OK;
    const enum sluice_status ended = dev->vt->graph_end(dev, timer->stream, out, good ? err : NULL);
    if (!good && *out) {
        dev->vt->graph_destroy(dev, *out);
        *out = NULL;
    }
    return good ? ended : queued;
}

static enum sluice_status run_once(struct sl_timer *timer, const struct sl_op *ops, int n_ops,
                                   void *scratch, struct sl_graph *graph, double *out_ns,
                                   struct sluice_error *err)
{
    struct sl_device *const dev = timer->device;
    const struct sl_device_vtable *const vt = dev->vt;
    if (timer->flush_bytes > 0) {
        SL_TRY(vt->copy_on_device(dev, timer->stream, timer->flush,
                                  (uint8_t *)timer->flush + timer->flush_bytes, timer->flush_bytes,
                                  err));
    }
    SL_TRY(vt->event_record(dev, timer->start, timer->stream, err));
    SL_TRY(graph ? vt->graph_launch(dev, timer->stream, graph, err)
                 : vt->run(dev, timer->stream, ops, n_ops, scratch, err));
    SL_TRY(vt->event_record(dev, timer->stop, timer->stream, err));
    SL_TRY(vt->stream_sync(dev, timer->stream, err));
    uint64_t elapsed = 0;
    SL_TRY(vt->event_elapsed(dev, timer->start, timer->stop, &elapsed, err));
    *out_ns = (double)elapsed;
    return SLUICE_STATUS_OK;
}

/* Lists queued at a time, so that the queue never fills. */
#define LOAD_BATCH 16

static enum sluice_status put_under_load(struct sl_timer *timer, const struct sl_op *ops, int n_ops,
                                         void *scratch, double list_ns, struct sluice_error *err)
{
    struct sl_device *const dev = timer->device;
    for (double ns = 0; ns < timer->load_ns;) {
        for (int i = 0; i < LOAD_BATCH && ns < timer->load_ns; i++, ns += fmax(list_ns, 1)) {
            SL_TRY(dev->vt->run(dev, timer->stream, ops, n_ops, scratch, err));
        }
        SL_TRY(dev->vt->stream_sync(dev, timer->stream, err));
    }
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_timer_list(struct sl_timer *timer, const struct sl_op *ops, int n_ops,
                                 void *scratch, bool as_graph, double *out_ns,
                                 struct sluice_error *err)
{
    const struct sl_device_vtable *const vt = timer->device->vt;
    struct sl_graph *graph = NULL;
    enum sluice_status status = SLUICE_STATUS_OK;
    double ns[REPEATS], first = 0;
    if (as_graph && vt->graph_begin) {
        SL_TRY(record(timer, ops, n_ops, scratch, &graph, err));
    }
    status = run_once(timer, ops, n_ops, scratch, graph, &first, err);
    if (status == SLUICE_STATUS_OK) {
        status = put_under_load(timer, ops, n_ops, scratch, first, err);
    }
    for (int r = 0; r < REPEATS && status == SLUICE_STATUS_OK; r++) {
        status = run_once(timer, ops, n_ops, scratch, graph, &ns[r], err);
    }
    if (graph) {
        vt->stream_sync(timer->device, timer->stream, NULL);
        vt->graph_destroy(timer->device, graph);
    }
    SL_TRY(status);
    *out_ns = sl_median(ns, REPEATS);
    return SLUICE_STATUS_OK;
}
