/* SPDX-License-Identifier: Apache-2.0
 *
 * Copies between host and device, and page-locked host memory.
 *
 * A copy is cut into pieces: parts of locked ranges go to the copy engine as they are; the rest
 * passes through the staging ring, so that every copy is asynchronous and in stream order. An
 * upload's piece is copied into the ring by the caller at once. A download's piece is moved out of
 * the ring by a host function that CUDA calls in stream order.
 *
 *        tail                     head         positions only grow; place = position % size
 *   ......|ticket|ticket| ... |ticket|......   a piece never wraps: the rest of the ring is skipped
 *
 * Tickets are retired in order when room is needed; the caller waits only when the ring is full.
 *
 * Copies that an operator waits for go past the copy engine: see copy_direct.cu.
 */
#include <string.h>

#include "base/error.h"
#include "base/mem.h"
#include "device/cuda/cuda_device.h"

#define RING_ALIGN 256
#define SMALL_COPY_BYTES ((size_t)512 << 10)

static struct sl_cuda_device *cuda_device(struct sl_device *dev)
{
    return (struct sl_cuda_device *)dev;
}

/* ---- locked ranges ---- */

/* Index of the first range that ends after `p`; n_ranges when there is none. */
static size_t range_at(const struct sl_cuda_device *dev, const char *p)
{
    size_t low = 0;
    size_t high = dev->n_ranges;
    while (low < high) {
        const size_t mid = (low + high) / 2;
        if (dev->ranges[mid].end > p) {
            high = mid;
        } else {
            low = mid + 1;
        }
    }
    return low;
}

static enum sluice_status ranges_reserve(struct sl_cuda_device *dev, struct sluice_error *err)
{
    if (dev->n_ranges < dev->ranges_capacity) {
        return SLUICE_STATUS_OK;
    }
    const size_t capacity = dev->ranges_capacity > 0 ? 2 * dev->ranges_capacity : 16;
    struct sl_cuda_range *ranges =
        sl_realloc(SL_MEM_DEVICE, dev->ranges, capacity, sizeof *dev->ranges);
    SL_CHECK(ranges != NULL, OUT_OF_MEMORY, err, "no memory for the table of locked ranges");
    dev->ranges = ranges;
    dev->ranges_capacity = capacity;
    return SLUICE_STATUS_OK;
}

/* Room must have been reserved. */
static void ranges_insert(struct sl_cuda_device *dev, struct sl_cuda_range range)
{
    const size_t at = range_at(dev, range.begin);
    memmove(&dev->ranges[at + 1], &dev->ranges[at], (dev->n_ranges - at) * sizeof range);
    dev->ranges[at] = range;
    dev->n_ranges++;
}

static void ranges_remove(struct sl_cuda_device *dev, size_t at)
{
    dev->n_ranges--;
    memmove(&dev->ranges[at], &dev->ranges[at + 1], (dev->n_ranges - at) * sizeof *dev->ranges);
}

/* End of the registration that holds `p` of the range. Chunks end at multiples of their size. */
static const char *chunk_end(const struct sl_cuda_range *range, const char *p)
{
    if (range->chunk_bytes == 0) {
        return range->end;
    }
    const size_t left = range->chunk_bytes - ((uintptr_t)p & (range->chunk_bytes - 1));
    return (size_t)(range->end - p) <= left ? range->end : p + left;
}

/* Registers the chunks of `range`; on failure none. */
static cudaError_t register_chunks(const struct sl_cuda_range *range, unsigned flags)
{
    for (const char *p = range->begin; p < range->end;) {
        const char *end = chunk_end(range, p);
        /* The function takes writable memory, but with the read-only flag it writes nothing. */
        const cudaError_t code = cudaHostRegister((void *)(uintptr_t)p, (size_t)(end - p), flags);
        if (code != cudaSuccess) {
            cudaGetLastError();
            for (const char *q = range->begin; q < p; q = chunk_end(range, q)) {
                cudaHostUnregister((void *)(uintptr_t)q);
            }
            cudaGetLastError();
            return code;
        }
        p = end;
    }
    return cudaSuccess;
}

static void unregister_chunks(const struct sl_cuda_range *range)
{
    for (const char *p = range->begin; p < range->end; p = chunk_end(range, p)) {
        cudaHostUnregister((void *)(uintptr_t)p);
    }
    cudaGetLastError();
}

/* Whole, then in smaller and smaller chunks: some systems refuse large registrations only. */
static cudaError_t register_range(const struct sl_cuda_device *dev, struct sl_cuda_range *range,
                                  bool read_only)
{
    static const size_t chunk_sizes[] = {0, (size_t)1 << 30, (size_t)128 << 20};
    const bool as_read_only = read_only && dev->read_only_register;
    cudaError_t code = cudaErrorUnknown;
    for (size_t i = 0; i < sizeof chunk_sizes / sizeof *chunk_sizes; i++) {
        if (i > 0 && (size_t)(range->end - range->begin) <= chunk_sizes[i]) {
            continue;
        }
        range->chunk_bytes = chunk_sizes[i];
        if (as_read_only) {
            code = register_chunks(range, cudaHostRegisterPortable | cudaHostRegisterReadOnly);
        }
        /* Memory that is writable after all can be locked without the flag. */
        if (!as_read_only || code != cudaSuccess) {
            code = register_chunks(range, cudaHostRegisterPortable);
        }
        if (code == cudaSuccess) {
            return code;
        }
    }
    return code;
}

enum sluice_status sl_cuda_host_register(struct sl_device *device, const void *mem, size_t bytes,
                                         bool read_only, struct sluice_error *err)
{
    struct sl_cuda_device *dev = cuda_device(device);
    SL_CHECK(mem != NULL && bytes > 0 && (uintptr_t)mem + bytes > (uintptr_t)mem, INVALID_ARGUMENT,
             err, "page-locking %zu bytes at %p", bytes, mem);
    struct sl_cuda_range range = {.begin = mem, .end = (const char *)mem + bytes};
    const size_t at = range_at(dev, range.begin);
    SL_CHECK(at == dev->n_ranges || dev->ranges[at].begin >= range.end, INVALID_ARGUMENT, err,
             "page-locking %zu bytes that are partly locked already", bytes);
    SL_CUDA_TRY(cudaSetDevice(dev->ordinal), err, "choosing GPU %d", dev->ordinal);
    SL_TRY(ranges_reserve(dev, err));
    SL_CUDA_TRY(register_range(dev, &range, read_only), err, "page-locking %zu bytes", bytes);
    ranges_insert(dev, range);
    return SLUICE_STATUS_OK;
}

void sl_cuda_host_unregister(struct sl_device *device, const void *mem)
{
    struct sl_cuda_device *dev = cuda_device(device);
    const size_t at = range_at(dev, mem);
    if (mem == NULL || at == dev->n_ranges || dev->ranges[at].begin != mem ||
        dev->ranges[at].owned) {
        return;
    }
    cudaSetDevice(dev->ordinal);
    unregister_chunks(&dev->ranges[at]);
    ranges_remove(dev, at);
}

enum sluice_status sl_cuda_host_alloc(struct sl_device *device, size_t bytes, void **out,
                                      struct sluice_error *err)
{
    struct sl_cuda_device *dev = cuda_device(device);
    *out = NULL;
    SL_CHECK(bytes > 0, INVALID_ARGUMENT, err, "page-locked memory of 0 bytes");
    SL_CUDA_TRY(cudaSetDevice(dev->ordinal), err, "choosing GPU %d", dev->ordinal);
    SL_TRY(ranges_reserve(dev, err));
    void *mem = NULL;
    SL_CUDA_TRY(cudaHostAlloc(&mem, bytes, cudaHostAllocPortable), err,
                "taking %zu bytes of page-locked memory", bytes);
    ranges_insert(
        dev, (struct sl_cuda_range){.begin = mem, .end = (const char *)mem + bytes, .owned = true});
    *out = mem;
    return SLUICE_STATUS_OK;
}

void sl_cuda_host_free(struct sl_device *device, void *mem)
{
    struct sl_cuda_device *dev = cuda_device(device);
    const size_t at = range_at(dev, mem);
    if (mem == NULL || at == dev->n_ranges || dev->ranges[at].begin != mem ||
        !dev->ranges[at].owned) {
        return;
    }
    cudaSetDevice(dev->ordinal);
    cudaFreeHost(mem);
    cudaGetLastError();
    ranges_remove(dev, at);
}

/* Length of the piece at `p` that one copy can take, at most `bytes`, and the locked range that it
 * lies in, or NULL. */
static size_t next_piece(const struct sl_cuda_device *dev, const char *p, size_t bytes,
                         const struct sl_cuda_range **locked)
{
    const size_t at = range_at(dev, p);
    size_t limit = bytes;
    *locked = NULL;
    if (at < dev->n_ranges) {
        const struct sl_cuda_range *range = &dev->ranges[at];
        *locked = range->begin <= p ? range : NULL;
        limit = *locked ? (size_t)(chunk_end(range, p) - p) : (size_t)(range->begin - p);
    }
    return limit < bytes ? limit : bytes;
}

/* ---- the staging ring ---- */

static enum sluice_status ring_retire(struct sl_cuda_ring *ring, struct sluice_error *err)
{
    struct sl_cuda_ticket *ticket = &ring->tickets[ring->n_retired % SL_CUDA_TICKETS];
    SL_CUDA_TRY(sl_cuda_event_wait(ticket->done, NULL), err, "waiting for an earlier copy");
    ring->tail = ticket->end;
    ring->n_retired++;
    return SLUICE_STATUS_OK;
}

/* Find room for a piece and a ticket, waiting for earlier pieces when there is none. Nothing is
 * taken before ring_commit. */
static enum sluice_status ring_reserve(struct sl_cuda_ring *ring, size_t bytes, char **memory,
                                       struct sl_cuda_ticket **ticket, struct sluice_error *err)
{
    const size_t rounded = (bytes + RING_ALIGN - 1) / RING_ALIGN * RING_ALIGN;
    const size_t place = ring->head % SL_CUDA_RING_BYTES;
    const size_t skipped = place + rounded > SL_CUDA_RING_BYTES ? SL_CUDA_RING_BYTES - place : 0;
    const uint64_t end = ring->head + skipped + rounded;
    while (ring->n_taken - ring->n_retired == SL_CUDA_TICKETS ||
           end - ring->tail > SL_CUDA_RING_BYTES) {
        SL_TRY(ring_retire(ring, err));
    }
    *memory = ring->memory + (ring->head + skipped) % SL_CUDA_RING_BYTES;
    *ticket = &ring->tickets[ring->n_taken % SL_CUDA_TICKETS];
    (*ticket)->end = end;
    return SLUICE_STATUS_OK;
}

static enum sluice_status ring_commit(struct sl_cuda_ring *ring, struct sl_cuda_ticket *ticket,
                                      cudaStream_t stream, struct sluice_error *err)
{
    SL_CUDA_TRY(cudaEventRecord(ticket->done, stream), err, "marking a staged copy");
    ring->head = ticket->end;
    ring->n_taken++;
    return SLUICE_STATUS_OK;
}

void sl_cuda_ring_init(struct sl_cuda_ring *ring)
{
    void *memory = NULL;
    cudaError_t code = cudaHostAlloc(&memory, SL_CUDA_RING_BYTES, cudaHostAllocPortable);
    for (int i = 0; code == cudaSuccess && i < SL_CUDA_TICKETS; i++) {
        code = cudaEventCreateWithFlags(&ring->tickets[i].done, cudaEventDisableTiming);
    }
    ring->memory = memory;
    if (code != cudaSuccess) {
        cudaGetLastError();
        sl_cuda_ring_finish(ring);
    }
}

void sl_cuda_ring_finish(struct sl_cuda_ring *ring)
{
    for (int i = 0; i < SL_CUDA_TICKETS; i++) {
        if (ring->tickets[i].done != NULL) {
            cudaEventDestroy(ring->tickets[i].done);
        }
    }
    if (ring->memory != NULL) {
        cudaFreeHost(ring->memory);
    }
    cudaGetLastError();
    *ring = (struct sl_cuda_ring){0};
}

static enum sluice_status stage_up(struct sl_cuda_device *dev, cudaStream_t stream, void *dst,
                                   const char *src, size_t row_bytes, size_t pitch_bytes,
                                   size_t n_rows, struct sluice_error *err)
{
    char *memory;
    struct sl_cuda_ticket *ticket;
    const size_t bytes = row_bytes * n_rows;
    SL_TRY(ring_reserve(&dev->ring, bytes, &memory, &ticket, err));
    for (size_t i = 0; i < n_rows; i++) {
        memcpy(memory + i * row_bytes, src + i * pitch_bytes, row_bytes);
    }
    SL_CUDA_TRY(cudaMemcpyAsync(dst, memory, bytes, cudaMemcpyHostToDevice, stream), err,
                "copying %zu staged bytes to the GPU", bytes);
    return ring_commit(&dev->ring, ticket, stream, err);
}

/* Runs on a thread of CUDA's, in stream order. The ticket is not reused before its event. */
static void CUDART_CB finish_download(void *arg)
{
    const struct sl_cuda_ticket *ticket = arg;
    memcpy(ticket->dst, ticket->src, ticket->bytes);
}

static enum sluice_status stage_down(struct sl_cuda_device *dev, cudaStream_t stream, void *dst,
                                     const void *src, size_t bytes, struct sluice_error *err)
{
    char *memory;
    struct sl_cuda_ticket *ticket;
    SL_TRY(ring_reserve(&dev->ring, bytes, &memory, &ticket, err));
    ticket->dst = dst;
    ticket->src = memory;
    ticket->bytes = bytes;
    SL_CUDA_TRY(cudaMemcpyAsync(memory, src, bytes, cudaMemcpyDeviceToHost, stream), err,
                "copying %zu staged bytes from the GPU", bytes);
    SL_CUDA_TRY(cudaLaunchHostFunc(stream, finish_download, ticket), err,
                "queueing the end of a staged copy");
    return ring_commit(&dev->ring, ticket, stream, err);
}

/* ---- copies ---- */

/* Whether a copy goes past the copy engines. Of those to the GPU all that operators wait for: the
 * engine has weights to bring. The one from the GPU is mostly idle, so that only starting sooner
 * counts there. */
static bool goes_direct(const struct sl_stream *stream, size_t bytes, bool up)
{
    return bytes <= SMALL_COPY_BYTES || (up && stream->use == SL_STREAM_OPERATORS);
}

/* A piece of locked memory. */
static enum sluice_status copy_locked(const struct sl_stream *stream,
                                      const struct sl_cuda_range *range, void *to, const void *from,
                                      size_t bytes, bool up, struct sluice_error *err)
{
    const char *const way = up ? "to" : "from";
    if (range != NULL && range->owned && goes_direct(stream, bytes, up)) {
        const int code = sl_cuda_copy_direct(stream->handle, to, from, bytes);
        if (code != SL_CUDA_UNSUPPORTED) {
            SL_CUDA_TRY((cudaError_t)code, err, "copying %zu bytes %s the GPU", bytes, way);
            return SLUICE_STATUS_OK;
        }
    }
    SL_CUDA_TRY(cudaMemcpyAsync(to, from, bytes,
                                up ? cudaMemcpyHostToDevice : cudaMemcpyDeviceToHost,
                                stream->handle),
                err, "copying %zu bytes %s the GPU", bytes, way);
    return SLUICE_STATUS_OK;
}

/* Copy between the GPU and host memory, piece by piece: directly where the host side is locked,
 * through the ring elsewhere. */
static enum sluice_status copy_pieces(struct sl_device *device, struct sl_stream *stream, void *dst,
                                      const void *src, size_t bytes, bool up,
                                      struct sluice_error *err)
{
    struct sl_cuda_device *dev = cuda_device(device);
    SL_CUDA_TRY(cudaSetDevice(dev->ordinal), err, "choosing GPU %d", dev->ordinal);
    char *to = dst;
    const char *from = src;
    while (bytes > 0) {
        const struct sl_cuda_range *locked;
        size_t piece = next_piece(dev, up ? from : to, bytes, &locked);
        if (locked != NULL || dev->ring.memory == NULL) {
            SL_TRY(copy_locked(stream, locked, to, from, piece, up, err));
        } else {
            piece = piece < SL_CUDA_PIECE_BYTES ? piece : SL_CUDA_PIECE_BYTES;
            SL_TRY(up ? stage_up(dev, stream->handle, to, from, piece, piece, 1, err)
                      : stage_down(dev, stream->handle, to, from, piece, err));
        }
        to += piece;
        from += piece;
        bytes -= piece;
    }
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_cuda_copy_to_device(struct sl_device *device, struct sl_stream *stream,
                                          void *dst, const void *src, size_t bytes,
                                          struct sluice_error *err)
{
    return copy_pieces(device, stream, dst, src, bytes, true, err);
}

/* Whole rows go together as long as they lie in one locked chunk; rows that are not locked are
 * gathered in the ring, several in a piece. One that is neither is copied by itself, in pieces. */
static enum sluice_status copy_some_rows(struct sl_cuda_device *dev, struct sl_stream *stream,
                                         char *to, const char *from, size_t row_bytes,
                                         size_t pitch_bytes, size_t n_rows, size_t *n_done,
                                         struct sluice_error *err)
{
    const struct sl_cuda_range *locked;
    const size_t all = (n_rows - 1) * pitch_bytes + row_bytes;
    const size_t piece = next_piece(dev, from, all, &locked);
    size_t n = piece < row_bytes ? 0 : (piece - row_bytes) / pitch_bytes + 1;
    if (n > 0 && (locked != NULL || dev->ring.memory == NULL)) {
        SL_CUDA_TRY(cudaMemcpy2DAsync(to, row_bytes, from, pitch_bytes, row_bytes, n,
                                      cudaMemcpyHostToDevice, stream->handle),
                    err, "copying %zu rows of %zu bytes to the GPU", n, row_bytes);
    } else if (n > 0 && row_bytes <= SL_CUDA_PIECE_BYTES) {
        n = n * row_bytes <= SL_CUDA_PIECE_BYTES ? n : SL_CUDA_PIECE_BYTES / row_bytes;
        SL_TRY(stage_up(dev, stream->handle, to, from, row_bytes, pitch_bytes, n, err));
    } else {
        n = 1;
        SL_TRY(copy_pieces(&dev->base, stream, to, from, row_bytes, true, err));
    }
    *n_done = n;
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_cuda_copy_rows_to_device(struct sl_device *device, struct sl_stream *stream,
                                               void *dst, const void *src, size_t row_bytes,
                                               size_t pitch_bytes, size_t n_rows,
                                               struct sluice_error *err)
{
    struct sl_cuda_device *dev = cuda_device(device);
    SL_CHECK(pitch_bytes >= row_bytes, INVALID_ARGUMENT, err, "rows of %zu bytes, %zu apart",
             row_bytes, pitch_bytes);
    SL_CUDA_TRY(cudaSetDevice(dev->ordinal), err, "choosing GPU %d", dev->ordinal);
    char *to = dst;
    const char *from = src;
    for (size_t n = 0; row_bytes > 0 && n_rows > 0; n_rows -= n) {
        SL_TRY(copy_some_rows(dev, stream, to, from, row_bytes, pitch_bytes, n_rows, &n, err));
        to += n * row_bytes;
        from += n * pitch_bytes;
    }
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_cuda_copy_to_host(struct sl_device *device, struct sl_stream *stream,
                                        void *dst, const void *src, size_t bytes,
                                        struct sluice_error *err)
{
    return copy_pieces(device, stream, dst, src, bytes, false, err);
}

enum sluice_status sl_cuda_copy_on_device(struct sl_device *device, struct sl_stream *stream,
                                          void *dst, const void *src, size_t bytes,
                                          struct sluice_error *err)
{
    struct sl_cuda_device *dev = cuda_device(device);
    SL_CUDA_TRY(cudaSetDevice(dev->ordinal), err, "choosing GPU %d", dev->ordinal);
    if (bytes > 0) {
        SL_CUDA_TRY(cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToDevice, stream->handle), err,
                    "copying %zu bytes on the GPU", bytes);
    }
    return SLUICE_STATUS_OK;
}

void sl_cuda_transfer_finish(struct sl_cuda_device *dev)
{
    while (dev->n_ranges > 0) {
        struct sl_cuda_range *range = &dev->ranges[dev->n_ranges - 1];
        if (range->owned) {
            cudaFreeHost((void *)(uintptr_t)range->begin);
        } else {
            unregister_chunks(range);
        }
        dev->n_ranges--;
    }
    cudaGetLastError();
    sl_free(dev->ranges);
    dev->ranges = NULL;
    dev->ranges_capacity = 0;
    sl_cuda_ring_finish(&dev->ring);
}
