/* SPDX-License-Identifier: Apache-2.0
 *
 * Timing lists of operators on a device: as passes run them, so short ones as graphs. Used by what
 * measures the machine (profiler.c) and what measures a model on it (calibrate_device.c).
 */
#ifndef SL_EXEC_TIMER_H
#define SL_EXEC_TIMER_H

#include "device/device.h"

struct sl_timer {
    struct sl_device *device; /* borrowed */
    struct sl_stream *stream;
    struct sl_event *start, *stop;
    /* Device memory of twice flush_bytes: what is copied within it ahead of each run takes the
     * place of weights in the device's caches, and while it lasts the list is queued, so that what
     * is timed is the list and not the wait for its first launch. 0: nothing is copied. */
    void *flush;
    size_t flush_bytes;
    /* The list is run for so long before it is timed: a device that works for tens of milliseconds
     * gets warm and clocks down. 0: once. */
    double load_ns;
};

/* The stream and the events. Zeroed or half made, a timer may be finished. */
enum sluice_status sl_timer_init(struct sl_timer *timer, struct sl_device *device,
                                 struct sluice_error *err);
void sl_timer_finish(struct sl_timer *timer);

/* Median time of a list over a few runs, the first one not counted (it loads the code). As a graph
 * when asked for and where the device has them. */
enum sluice_status sl_timer_list(struct sl_timer *timer, const struct sl_op *ops, int n_ops,
                                 void *scratch, bool as_graph, double *out_ns,
                                 struct sluice_error *err);

#endif
