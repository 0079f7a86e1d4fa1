/* SPDX-License-Identifier: Apache-2.0
 *
 * A recorder of what the engines do, pass by pass: the driver thread, the CPU's pool, and the three
 * streams of the device, as a file in the Chrome trace format (docs/trace.md shows one).
 *
 * Whoever runs the passes puts begin and end around what an engine does. On the lanes of streams
 * the times are the device's own, taken by timing events and put on the host's clock by an anchor
 * at the start of the pass; on the others they are the host's. Beside
 * every full pass stands what was predicted of it. Without a recorder (NULL) every call
 * returns at once. With one, a pass gets slower by two events an item and some tens of
 * microseconds.
 *
 * One thread at a time, the one that runs the passes.
 */
#ifndef SL_EXEC_TRACE_H
#define SL_EXEC_TRACE_H

#include "device/device.h"
#include "model/model.h"

struct sl_trace;
struct sl_plan;

/* One row of the picture each, in this order from the top. */
enum sl_trace_lane {
    SL_LANE_PASS,     /* the pass as a whole */
    SL_LANE_DRIVER,   /* the driver thread: queueing and waiting */
    SL_LANE_CPU,      /* shards that the pool computes */
    SL_LANE_GPU,      /* compute stream */
    SL_LANE_COPY,     /* copy stream: into VRAM */
    SL_LANE_DOWNLOAD, /* download stream: new KV to the host */
    SL_N_LANES
};

/* Open the file; it is complete after sl_trace_close, which tells if anything could not be written.
 * `model` is borrowed, for the names of shards. */
enum sluice_status sl_trace_open(struct sl_trace **out, const char *path,
                                 const struct sl_model *model, struct sluice_error *err);
enum sluice_status sl_trace_close(struct sl_trace **trace, struct sluice_error *err);

/* Before the first pass with this plan: makes room for what its longest pass does and, with a
 * device, its timing events. Streams: of the lanes GPU, COPY, DOWNLOAD. Replaces an earlier one. */
enum sluice_status sl_trace_attach(struct sl_trace *trace, const struct sl_plan *plan,
                                   struct sl_device *device, struct sl_stream *const streams[3],
                                   struct sluice_error *err);
/* While the device is still there and its streams are idle. */
void sl_trace_detach(struct sl_trace *trace);

/* Around a pass of n tokens that follow n_past others. After a pass that failed nothing of it is
 * written. Streams are idle at both ends. */
void sl_trace_pass_begin(struct sl_trace *trace, int32_t n_tokens, int32_t n_past);
void sl_trace_pass_end(struct sl_trace *trace, int32_t tier, bool complete);

/* What an engine does between begin and end; `what` must outlive the trace. shard < 0: of none. The
 * mark goes from begin to end; bytes: 0 where nothing moves. Between sl_trace_mute(true) and
 * (false) nothing is noted: work that is recorded as a graph does not run yet. */
int32_t sl_trace_begin(struct sl_trace *trace, enum sl_trace_lane lane, const char *what,
                       int32_t shard);
void sl_trace_end(struct sl_trace *trace, int32_t mark, size_t bytes);
void sl_trace_mute(struct sl_trace *trace, bool mute);

#endif
