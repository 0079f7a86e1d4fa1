/* SPDX-License-Identifier: Apache-2.0
 *
 * The device interface: the only door to a GPU. Implementations: `sim` (always built) and `cuda`
 * (a library loaded at run time). Both pass tests/device's one list of tests.
 *
 * Streams are in-order queues. Work on different streams is ordered by events alone; a missing wait
 * is a wrong answer, on the sim device too. All calls of one device come from one thread at a time.
 * Errors of queued work may surface at a later call or at synchronization, as DEVICE.
 */
#ifndef SL_DEVICE_DEVICE_H
#define SL_DEVICE_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <sluice/status.h>

#include "op/op.h"

struct sl_device; /* begins every implementation's own struct; see below */
struct sl_stream;
struct sl_event;
struct sl_graph;

/* What a stream is for. Copies of a stream of operators to the device, out of memory of host_alloc,
 * do not queue behind the copies of other streams: a hidden state need not wait for the weights
 * that are on their way. */
enum sl_stream_use { SL_STREAM_OPERATORS, SL_STREAM_COPIES };

enum sl_device_kind { SL_DEVICE_NONE, SL_DEVICE_SIM, SL_DEVICE_CUDA };

struct sl_device_info {
    enum sl_device_kind kind;
    char name[96];        /* "NVIDIA H200" */
    uint64_t total_bytes; /* of the card */
    uint64_t free_bytes;  /* when asked */
    uint64_t
        context_bytes; /* what the driver took for this process's context; outside the budget */
    bool reads_host_memory; /* kernels can read page-locked host memory at the host's addresses */
    int n_multiprocessors;
    int compute_capability; /* 90 for 9.0; 0 where it means nothing */
};

/* One table a device. Every function but destroy reports through `err`. */
struct sl_device_vtable {
    void (*destroy)(struct sl_device *dev);
    enum sluice_status (*info)(struct sl_device *dev, struct sl_device_info *out,
                               struct sluice_error *err);

    /* Plain device memory, 256-byte aligned. Only the arena calls this. */
    enum sluice_status (*mem_alloc)(struct sl_device *dev, size_t bytes, void **out,
                                    struct sluice_error *err);
    void (*mem_free)(struct sl_device *dev, void *mem);

    /* Page-lock host memory in place, for asynchronous copies at full speed. `read_only` for file
     * mappings. Failing is normal (quota): copies from memory that is not locked still work
     * through the device's own locked staging ring, slower. */
    enum sluice_status (*host_register)(struct sl_device *dev, const void *mem, size_t bytes,
                                        bool read_only, struct sluice_error *err);
    void (*host_unregister)(struct sl_device *dev, const void *mem);
    /* New page-locked memory. */
    enum sluice_status (*host_alloc)(struct sl_device *dev, size_t bytes, void **out,
                                     struct sluice_error *err);
    void (*host_free)(struct sl_device *dev, void *mem);

    enum sluice_status (*stream_create)(struct sl_device *dev, enum sl_stream_use use,
                                        struct sl_stream **out, struct sluice_error *err);
    void (*stream_destroy)(struct sl_device *dev, struct sl_stream *stream);
    /* Wait on the host until everything queued is done; returns its errors. */
    enum sluice_status (*stream_sync)(struct sl_device *dev, struct sl_stream *stream,
                                      struct sluice_error *err);

    /* `timing` events can be passed to event_elapsed. */
    enum sluice_status (*event_create)(struct sl_device *dev, bool timing, struct sl_event **out,
                                       struct sluice_error *err);
    void (*event_destroy)(struct sl_device *dev, struct sl_event *event);
    enum sluice_status (*event_record)(struct sl_device *dev, struct sl_event *event,
                                       struct sl_stream *stream, struct sluice_error *err);
    /* Later work of `stream` waits for the last record of `event` (none: no wait). */
    enum sluice_status (*stream_wait)(struct sl_device *dev, struct sl_stream *stream,
                                      struct sl_event *event, struct sluice_error *err);
    /* Wait on the host without burning the core for long. */
    enum sluice_status (*event_sync)(struct sl_device *dev, struct sl_event *event,
                                     struct sluice_error *err);
    /* Nanoseconds between two recorded, finished timing events. */
    enum sluice_status (*event_elapsed)(struct sl_device *dev, struct sl_event *from,
                                        struct sl_event *to, uint64_t *out_ns,
                                        struct sluice_error *err);

    /* Queue copies. The host side must stay valid until the copy is done (stream_sync/event). */
    enum sluice_status (*copy_to_device)(struct sl_device *dev, struct sl_stream *stream, void *dst,
                                         const void *src, size_t bytes, struct sluice_error *err);
    /* The same for n_rows of row_bytes that lie pitch_bytes apart; without gaps at dst. */
    enum sluice_status (*copy_rows_to_device)(struct sl_device *dev, struct sl_stream *stream,
                                              void *dst, const void *src, size_t row_bytes,
                                              size_t pitch_bytes, size_t n_rows,
                                              struct sluice_error *err);
    enum sluice_status (*copy_to_host)(struct sl_device *dev, struct sl_stream *stream, void *dst,
                                       const void *src, size_t bytes, struct sluice_error *err);
    enum sluice_status (*copy_on_device)(struct sl_device *dev, struct sl_stream *stream, void *dst,
                                         const void *src, size_t bytes, struct sluice_error *err);

    /* Queue an op list. The list is read during the call only. If the device reads host memory,
     * matrices of LINEAR and EXPERTS and the input of ADD may lie in page-locked host memory.
     * `scratch` is device memory of at least the largest sl_op_scratch_bytes, used by one stream at
     * a time. UNSUPPORTED names the op and type that this device has no kernel for. */
    enum sluice_status (*run)(struct sl_device *dev, struct sl_stream *stream,
                              const struct sl_op *ops, int n_ops, void *scratch,
                              struct sluice_error *err);

    /* Optional (all four or none): a list of work that is queued again and again at the cost of
     * one launch. Between begin and end what is queued on `stream` (copies whose host side is
     * locked, op lists, records of events that are not waited for within the graph) is recorded,
     * not run; everything else on that stream is refused or fails. Addresses and sizes are those of
     * the recording; contents are read when it runs. */
    enum sluice_status (*graph_begin)(struct sl_device *dev, struct sl_stream *stream,
                                      struct sluice_error *err);
    /* Ends the recording in any case; on failure *out is NULL. */
    enum sluice_status (*graph_end)(struct sl_device *dev, struct sl_stream *stream,
                                    struct sl_graph **out, struct sluice_error *err);
    enum sluice_status (*graph_launch)(struct sl_device *dev, struct sl_stream *stream,
                                       struct sl_graph *graph, struct sluice_error *err);
    void (*graph_destroy)(struct sl_device *dev, struct sl_graph *graph); /* not while it runs */
};

struct sl_device {
    const struct sl_device_vtable *vt;
    enum sl_device_kind kind;
};

/* How the simulated device behaves. Zeroes: instant copies, no delays, no faults. */
struct sl_sim_options {
    uint64_t memory_bytes;        /* total; 0: 1 GiB */
    double copy_bytes_per_s;      /* 0: as fast as memcpy */
    double compute_slowdown;      /* extra time per op as a multiple of its own; 0: none */
    uint64_t max_random_delay_ns; /* before each queued item */
    uint64_t seed;
    /* Faults: the n-th call from now on of the kind fails (0: never). */
    uint64_t fail_alloc_at, fail_copy_at, fail_run_at, fail_register_at;
    /* Copy and run faults: false: the call itself fails, and the device stays usable. true: the
     * queued work fails and takes the device with it; any later call or synchronization tells. */
    bool fail_late;
};

/* Make a device. `sim` may be NULL for defaults. On failure *out is NULL. */
enum sluice_status sl_device_sim_create(struct sl_device **out, const struct sl_sim_options *sim,
                                        struct sluice_error *err);
/* Change how a sim device behaves from now on and arm the faults anew; its memory keeps its size.
 */
void sl_device_sim_set(struct sl_device *dev, const struct sl_sim_options *sim);
/* Load the CUDA library (next to the executable or the library, or SLUICE_CUDA_LIBRARY) and make a
 * context on GPU `ordinal`. DEVICE with a plain message when there is no library, driver or GPU. */
enum sluice_status sl_device_cuda_create(struct sl_device **out, int ordinal,
                                         struct sluice_error *err);
void sl_device_destroy(struct sl_device **dev); /* accepts NULL and a pointer to NULL */

/* The symbol that the CUDA library exports, and its interface version. */
#define SL_CUDA_ENTRY_NAME "sl_cuda_device_create"
#define SL_CUDA_ENTRY_VERSION 7
typedef enum sluice_status sl_cuda_entry_fn(int version, struct sl_device **out, int ordinal,
                                            struct sluice_error *err);

#endif
