/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside of the simulated device. One thread a stream takes items from that stream's queue:
 *
 *     caller --> ring of items (and ring of op copies) --> stream thread --> n_done
 *
 * Everything queued has a number in its stream, and an event is no more than (stream, number): a
 * wait is over when that stream's n_done has got there. Nothing else orders two streams.
 *
 * Locks, in the order in which they may be taken: sl_stream.lock, sl_sim_device.memory_lock,
 * sl_sim_device.lock. No thread holds the locks of two streams.
 */
#ifndef SL_DEVICE_SIM_INTERNAL_H
#define SL_DEVICE_SIM_INTERNAL_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "device/device.h"

/* Items and ops that a stream holds before its caller has to wait. */
#define SL_SIM_N_ITEMS 512
#define SL_SIM_N_OPS_FIRST 1024

enum sl_sim_item_kind {
    SL_SIM_ITEM_COPY_TO_DEVICE,
    SL_SIM_ITEM_COPY_TO_HOST,
    SL_SIM_ITEM_COPY_ON_DEVICE,
    SL_SIM_ITEM_RUN,
    SL_SIM_ITEM_RECORD,
    SL_SIM_ITEM_WAIT,
};

struct sl_sim_item {
    enum sl_sim_item_kind kind;
    bool fails;  /* an injected fault that shows only now */
    bool staged; /* a copy whose host side is not locked */
    union {
        struct {
            void *dst;
            const void *src;
            size_t bytes;               /* of all rows */
            size_t n_rows, pitch_bytes; /* rows lie apart in the source; one row: they do not */
        } copy;
        struct {
            uint64_t first_op; /* in the ring of ops, not wrapped */
            int n_ops;
            void *scratch;
        } run;
        struct {
            struct sl_event *event;
            uint64_t generation;
        } record;
        struct {
            struct sl_stream *stream;
            uint64_t number;
        } wait;
    };
    uint64_t ops_end; /* ops before this one are free once the item is done */
};

struct sl_stream {
    struct sl_sim_device *dev;
    struct sl_stream *next; /* all streams of the device, those in disuse too */
    bool in_use;            /* the caller's */

    pthread_mutex_t lock;
    pthread_cond_t work;     /* an item was queued, or quit */
    pthread_cond_t progress; /* n_done grew */
    pthread_t thread;
    bool quit;         /* lock */
    uint64_t n_queued; /* lock; items ever */
    uint64_t n_done;   /* lock */
    uint64_t ops_head; /* lock; ops ever written, counting those skipped at the ring's end */
    uint64_t ops_tail; /* lock */

    struct sl_graph *recording; /* the caller's; NULL: items are queued */
    struct sl_sim_item *items;  /* [SL_SIM_N_ITEMS]; slot: n_queued's writer, then the thread */
    struct sl_op *ops;          /* [n_ops_capacity]; replaced only while the stream is idle */
    size_t n_ops_capacity;
    void *cpu_scratch; /* the host scratch of the kernels; replaced only while idle */
    size_t cpu_scratch_bytes;
    uint64_t random; /* the thread's */
};

/* Recorded items; their `run.first_op` counts from the start of `ops`. */
struct sl_graph {
    struct sl_sim_item *items;
    size_t n_items, items_room;
    struct sl_op *ops;
    size_t n_ops, ops_room;
    size_t scratch_bytes; /* of the kernels, on whichever stream it is launched */
    bool failed;          /* something could not be recorded */
};

struct sl_event {
    bool timing;
    struct sl_stream *stream; /* of the last record; NULL: never recorded. The caller's. */
    uint64_t number;          /* its n_done when the record is done. The caller's. */
    uint64_t generation;      /* records ever. The caller's. */
    uint64_t n_finished;      /* device lock; records that have run */
    uint64_t time_generation; /* device lock; which record the time is of */
    uint64_t time_ns;         /* device lock */
};

struct sl_sim_range {
    uintptr_t begin;
    size_t bytes;
    size_t mapped_bytes; /* 0: not ours to unmap */
};

struct sl_sim_ranges {
    struct sl_sim_range *items;
    size_t n;
    size_t capacity;
};

struct sl_sim_device {
    struct sl_device base;
    struct sl_stream *streams; /* the caller's */
    uint64_t memory_bytes;     /* the caller's */
    uint64_t used_bytes;       /* the caller's */

    /* Stream threads hold it for reading while they touch device memory, the caller for writing
     * while the set of allocations changes: no item runs on memory that is being freed. */
    pthread_rwlock_t memory_lock;
    struct sl_sim_ranges device_memory; /* memory_lock */
    struct sl_sim_ranges locked_host;   /* the caller's */

    pthread_mutex_t lock;
    pthread_cond_t event_done;     /* some record ran */
    struct sl_sim_options options; /* lock; the fault counts are those left */
    uint64_t link_free_ns[2];      /* lock; when the link to and from the device is idle */
    bool failed;                 /* lock; queued work failed: nothing runs any more, as on a GPU */
    struct sluice_error failure; /* lock */
};

/* Memory (sim_memory.c). */
enum sluice_status sl_sim_mem_alloc(struct sl_device *dev, size_t bytes, void **out,
                                    struct sluice_error *err);
void sl_sim_mem_free(struct sl_device *dev, void *mem);
void sl_sim_mem_free_all(struct sl_sim_device *sim);
enum sluice_status sl_sim_host_register(struct sl_device *dev, const void *mem, size_t bytes,
                                        bool read_only, struct sluice_error *err);
void sl_sim_host_unregister(struct sl_device *dev, const void *mem);
enum sluice_status sl_sim_host_alloc(struct sl_device *dev, size_t bytes, void **out,
                                     struct sluice_error *err);
void sl_sim_host_free(struct sl_device *dev, void *mem);
bool sl_sim_host_locked(const struct sl_sim_device *sim, const void *mem, size_t bytes);

/* Address checks (sim_check.c). The caller holds memory_lock. `what` names the range. */
enum sluice_status sl_sim_check_device(const struct sl_sim_device *sim, const void *mem,
                                       size_t bytes, const char *what, struct sluice_error *err);
enum sluice_status sl_sim_check_host(const struct sl_sim_device *sim, const void *mem, size_t bytes,
                                     const char *what, struct sluice_error *err);
enum sluice_status sl_sim_check_op(const struct sl_sim_device *sim, const struct sl_op *op,
                                   const void *scratch, struct sluice_error *err);
/* What only the content of device memory tells: positions and KV blocks, chosen experts and where
 * they are. For the stream thread. */
enum sluice_status sl_sim_check_content(const struct sl_sim_device *sim, const struct sl_op *op,
                                        struct sluice_error *err);

/* Streams and events (sim_stream.c), what the caller queues (sim_queue.c). */
enum sluice_status sl_sim_stream_create(struct sl_device *dev, enum sl_stream_use use,
                                        struct sl_stream **out, struct sluice_error *err);
void sl_sim_stream_destroy(struct sl_device *dev, struct sl_stream *stream);
enum sluice_status sl_sim_stream_sync(struct sl_device *dev, struct sl_stream *stream,
                                      struct sluice_error *err);
void sl_sim_streams_free(struct sl_sim_device *sim);
/* Wait until `number` items of the stream are done. */
void sl_sim_stream_await(struct sl_stream *stream, uint64_t number);
enum sluice_status sl_sim_event_create(struct sl_device *dev, bool timing, struct sl_event **out,
                                       struct sluice_error *err);
void sl_sim_event_destroy(struct sl_device *dev, struct sl_event *event);
enum sluice_status sl_sim_event_record(struct sl_device *dev, struct sl_event *event,
                                       struct sl_stream *stream, struct sluice_error *err);
enum sluice_status sl_sim_stream_wait(struct sl_device *dev, struct sl_stream *stream,
                                      struct sl_event *event, struct sluice_error *err);
enum sluice_status sl_sim_event_sync(struct sl_device *dev, struct sl_event *event,
                                     struct sluice_error *err);
enum sluice_status sl_sim_event_elapsed(struct sl_device *dev, struct sl_event *from,
                                        struct sl_event *to, uint64_t *out_ns,
                                        struct sluice_error *err);
enum sluice_status sl_sim_copy_to_device(struct sl_device *dev, struct sl_stream *stream, void *dst,
                                         const void *src, size_t bytes, struct sluice_error *err);
enum sluice_status sl_sim_copy_rows_to_device(struct sl_device *dev, struct sl_stream *stream,
                                              void *dst, const void *src, size_t row_bytes,
                                              size_t pitch_bytes, size_t n_rows,
                                              struct sluice_error *err);
enum sluice_status sl_sim_copy_to_host(struct sl_device *dev, struct sl_stream *stream, void *dst,
                                       const void *src, size_t bytes, struct sluice_error *err);
enum sluice_status sl_sim_copy_on_device(struct sl_device *dev, struct sl_stream *stream, void *dst,
                                         const void *src, size_t bytes, struct sluice_error *err);
enum sluice_status sl_sim_run(struct sl_device *dev, struct sl_stream *stream,
                              const struct sl_op *ops, int n_ops, void *scratch,
                              struct sluice_error *err);

enum sluice_status sl_sim_graph_begin(struct sl_device *dev, struct sl_stream *stream,
                                      struct sluice_error *err);
enum sluice_status sl_sim_graph_end(struct sl_device *dev, struct sl_stream *stream,
                                    struct sl_graph **out, struct sluice_error *err);
enum sluice_status sl_sim_graph_launch(struct sl_device *dev, struct sl_stream *stream,
                                       struct sl_graph *graph, struct sluice_error *err);
void sl_sim_graph_destroy(struct sl_device *dev, struct sl_graph *graph);

/* Execution on the stream's thread (sim_execute.c). */
void *sl_sim_stream_main(void *stream);

/* State shared with the stream threads (sim.c). */
/* DEVICE with the first failure of queued work, if any. */
enum sluice_status sl_sim_failure(struct sl_sim_device *sim, struct sluice_error *err);
void sl_sim_fail(struct sl_sim_device *sim, const struct sluice_error *failure);
/* Count down one fault of the options; whether this call is the one to fail. */
bool sl_sim_fault_due(struct sl_sim_device *sim, uint64_t *count);

static inline struct sl_sim_device *sim_of(struct sl_device *dev)
{
    return (struct sl_sim_device *)dev; /* base is the first member */
}

#endif
