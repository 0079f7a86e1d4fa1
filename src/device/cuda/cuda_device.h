/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA device's own structs, shared by its C files: device.c (vtable), transfer.c (copies and
 * page-locked memory), wait.c, probe.c (driver, GPU and context).
 */
#ifndef SL_DEVICE_CUDA_CUDA_DEVICE_H
#define SL_DEVICE_CUDA_CUDA_DEVICE_H

#include "device/cuda/cuda_ops.h"
#include "device/device.h"

/* Page-locked host memory that copies may use directly. A registration that the driver refuses as
 * a whole is made in chunks; no single copy may cross a chunk's end. */
struct sl_cuda_range {
    const char *begin;
    const char *end;
    size_t chunk_bytes; /* chunks end at addresses that are multiples of it; 0: one chunk */
    bool owned;         /* made by host_alloc, not registered */
};

/* The staging ring: page-locked memory through which copies from and to unlocked memory go.
 * A ticket is one piece on its way; tickets are used and retired in order. */
#define SL_CUDA_RING_BYTES ((size_t)16 << 20)
#define SL_CUDA_PIECE_BYTES ((size_t)4 << 20)
#define SL_CUDA_TICKETS 64

struct sl_cuda_ticket {
    cudaEvent_t done;
    uint64_t end; /* ring position after the piece */
    /* A download's last step on the host. */
    void *dst;
    const void *src;
    size_t bytes;
};

struct sl_cuda_ring {
    char *memory;                /* NULL when there is no ring */
    uint64_t head, tail;         /* bytes ever taken and given back; their difference is in use */
    uint64_t n_taken, n_retired; /* tickets */
    struct sl_cuda_ticket tickets[SL_CUDA_TICKETS];
};

/* How long the last waits for something took, in a ring. */
#define SL_CUDA_WAITS 8
struct sl_cuda_waits {
    uint64_t ns[SL_CUDA_WAITS];
    int next;
};

struct sl_stream {
    cudaStream_t handle;
    cudaEvent_t idle; /* recorded to wait for the stream */
    struct sl_cuda_waits waits;
    enum sl_stream_use use;
    bool recording; /* a graph */
};

struct sl_event {
    cudaEvent_t handle;
    struct sl_cuda_waits waits;
    bool timing;
    bool recorded;
};

struct sl_graph {
    cudaGraphExec_t handle;
};

struct sl_cuda_device {
    struct sl_device base;
    int ordinal;
    char name[96];
    uint64_t total_bytes;
    uint64_t context_bytes;
    bool reads_host_memory;  /* locked host memory has the host's addresses here */
    bool read_only_register; /* the driver can lock read-only memory */
    struct sl_cuda_props props;
    struct sl_cuda_ring ring;
    struct sl_cuda_range *ranges; /* sorted by address, without overlap */
    size_t n_ranges, ranges_capacity;
};

/* Report a failed CUDA call: "<doing>: <text of the error>". Clears the error where CUDA can. */
enum sluice_status sl_cuda_fail(struct sluice_error *err, cudaError_t code, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Return with a report unless the CUDA call succeeds; what follows says what was being done. */
#define SL_CUDA_TRY(call, err, ...)                                                                \
    do {                                                                                           \
        const cudaError_t sl_cuda_code = (call);                                                   \
        if (sl_cuda_code != cudaSuccess) {                                                         \
            return sl_cuda_fail((err), sl_cuda_code, __VA_ARGS__);                                 \
        }                                                                                          \
    } while (0)

/* wait.c: wait on the host for an event. `waits` (or NULL) is what is known of waits for it. */
cudaError_t sl_cuda_event_wait(cudaEvent_t event, struct sl_cuda_waits *waits);

/* probe.c: check driver, GPU and code for it; make the context; fill the description fields. */
enum sluice_status sl_cuda_probe(struct sl_cuda_device *dev, int ordinal, struct sluice_error *err);

/* fuse.c: queue the first operators of a list if they are some that one launch can do. *n_taken:
 * how many; 0 if they are not. All have been validated. Returns as launchers do. */
int sl_cuda_run_fused(cudaStream_t stream, const struct sl_op *ops, int n_ops, void *scratch,
                      const struct sl_cuda_props *props, int *n_taken);

/* transfer.c */
enum sluice_status sl_cuda_host_register(struct sl_device *dev, const void *mem, size_t bytes,
                                         bool read_only, struct sluice_error *err);
void sl_cuda_host_unregister(struct sl_device *dev, const void *mem);
enum sluice_status sl_cuda_host_alloc(struct sl_device *dev, size_t bytes, void **out,
                                      struct sluice_error *err);
void sl_cuda_host_free(struct sl_device *dev, void *mem);
enum sluice_status sl_cuda_copy_to_device(struct sl_device *dev, struct sl_stream *stream,
                                          void *dst, const void *src, size_t bytes,
                                          struct sluice_error *err);
enum sluice_status sl_cuda_copy_rows_to_device(struct sl_device *dev, struct sl_stream *stream,
                                               void *dst, const void *src, size_t row_bytes,
                                               size_t pitch_bytes, size_t n_rows,
                                               struct sluice_error *err);
enum sluice_status sl_cuda_copy_to_host(struct sl_device *dev, struct sl_stream *stream, void *dst,
                                        const void *src, size_t bytes, struct sluice_error *err);
enum sluice_status sl_cuda_copy_on_device(struct sl_device *dev, struct sl_stream *stream,
                                          void *dst, const void *src, size_t bytes,
                                          struct sluice_error *err);
/* Take the ring's memory. Where the system refuses it, copies of unlocked memory are left to CUDA,
 * which waits inside the call. */
void sl_cuda_ring_init(struct sl_cuda_ring *ring);
void sl_cuda_ring_finish(struct sl_cuda_ring *ring);
/* Give the ring and all registrations back; nothing may be in flight. */
void sl_cuda_transfer_finish(struct sl_cuda_device *dev);

#endif
