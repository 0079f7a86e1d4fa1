/* SPDX-License-Identifier: Apache-2.0
 *
 * The CUDA device: device.h's table over the CUDA runtime. Memory is plain cudaMalloc memory (no
 * virtual memory management, no pools: hosts that share their graphics context forbid them);
 * streams do not synchronize with the default stream; waits on the host spin for a moment and then
 * sleep.
 *
 * The runtime keeps the current GPU per thread, and calls may come from any one thread at a time,
 * so every entry chooses its GPU first (nanoseconds when it is the current one already).
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "base/mem.h"
#include "device/cuda/cuda_device.h"

static struct sl_cuda_device *cuda_device(struct sl_device *dev)
{
    return (struct sl_cuda_device *)dev;
}

/* Errors after which the context can do nothing more. */
static bool is_sticky(cudaError_t code)
{
    switch (code) {
    case cudaErrorIllegalAddress:
    case cudaErrorLaunchFailure:
    case cudaErrorLaunchTimeout:
    case cudaErrorHardwareStackError:
    case cudaErrorIllegalInstruction:
    case cudaErrorMisalignedAddress:
    case cudaErrorInvalidAddressSpace:
    case cudaErrorInvalidPc:
    case cudaErrorAssert:
    case cudaErrorECCUncorrectable:
        return true;
    default:
        return false;
    }
}

enum sluice_status sl_cuda_fail(struct sluice_error *err, cudaError_t code, const char *format, ...)
{
    cudaGetLastError();
    char doing[256];
    va_list args;
    va_start(args, format);
    vsnprintf(doing, sizeof doing, format, args);
    va_end(args);
    const enum sluice_status status =
        code == cudaErrorMemoryAllocation ? SLUICE_STATUS_OUT_OF_MEMORY : SLUICE_STATUS_DEVICE;
    return sl_error_set(err, status, "CUDA: %s: %s (%s)%s", doing, cudaGetErrorString(code),
                        cudaGetErrorName(code),
                        is_sticky(code) ? "; the GPU context is lost, this device must be made anew"
                                          " in a new process"
                                        : "");
}

/* ---- memory and description ---- */

static enum sluice_status device_info(struct sl_device *device, struct sl_device_info *out,
                                      struct sluice_error *err)
{
    const struct sl_cuda_device *dev = cuda_device(device);
    *out = (struct sl_device_info){
        .kind = SL_DEVICE_CUDA,
        .total_bytes = dev->total_bytes,
        .context_bytes = dev->context_bytes,
        .reads_host_memory = dev->reads_host_memory,
        .n_multiprocessors = dev->props.n_sm,
        .compute_capability = dev->props.compute_capability,
    };
    memcpy(out->name, dev->name, sizeof out->name);
    SL_CUDA_TRY(cudaSetDevice(dev->ordinal), err, "choosing GPU %d", dev->ordinal);
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    SL_CUDA_TRY(cudaMemGetInfo(&free_bytes, &total_bytes), err, "asking for free GPU memory");
    out->free_bytes = free_bytes;
    return SLUICE_STATUS_OK;
}

static enum sluice_status mem_alloc(struct sl_device *device, size_t bytes, void **out,
                                    struct sluice_error *err)
{
    const struct sl_cuda_device *dev = cuda_device(device);
    *out = NULL;
    SL_CHECK(bytes > 0, INVALID_ARGUMENT, err, "GPU memory of 0 bytes");
    SL_CUDA_TRY(cudaSetDevice(dev->ordinal), err, "choosing GPU %d", dev->ordinal);
    void *mem = NULL;
    const cudaError_t code = cudaMalloc(&mem, bytes);
    if (code == cudaErrorMemoryAllocation) {
        cudaGetLastError();
        size_t free_bytes = 0;
        size_t total_bytes = 0;
        if (cudaMemGetInfo(&free_bytes, &total_bytes) != cudaSuccess) {
            cudaGetLastError();
        }
        return sl_error_set(err, SLUICE_STATUS_OUT_OF_MEMORY,
                            "out of GPU memory: %zu bytes wanted, %zu of %zu free on GPU %d", bytes,
                            free_bytes, total_bytes, dev->ordinal);
    }
    SL_CUDA_TRY(code, err, "taking %zu bytes of GPU memory", bytes);
    *out = mem;
    return SLUICE_STATUS_OK;
}

static void mem_free(struct sl_device *device, void *mem)
{
    if (mem == NULL) {
        return;
    }
    cudaSetDevice(cuda_device(device)->ordinal);
    cudaFree(mem);
    cudaGetLastError();
}

/* ---- streams and events ---- */

static void stream_destroy(struct sl_device *device, struct sl_stream *stream)
{
    if (stream == NULL) {
        return;
    }
    cudaSetDevice(cuda_device(device)->ordinal);
    if (stream->handle != NULL) {
        cudaStreamSynchronize(stream->handle);
        cudaStreamDestroy(stream->handle);
    }
    if (stream->idle != NULL) {
        cudaEventDestroy(stream->idle);
    }
    cudaGetLastError();
    sl_free(stream);
}

static enum sluice_status stream_create(struct sl_device *device, enum sl_stream_use use,
                                        struct sl_stream **out, struct sluice_error *err)
{
    const struct sl_cuda_device *dev = cuda_device(device);
    *out = NULL;
    SL_CUDA_TRY(cudaSetDevice(dev->ordinal), err, "choosing GPU %d", dev->ordinal);
    struct sl_stream *stream = sl_calloc(SL_MEM_DEVICE, 1, sizeof *stream);
    SL_CHECK(stream != NULL, OUT_OF_MEMORY, err, "no memory for a stream");
    stream->use = use;
    cudaError_t code = cudaStreamCreateWithFlags(&stream->handle, cudaStreamNonBlocking);
    if (code == cudaSuccess) {
        code = cudaEventCreateWithFlags(&stream->idle, cudaEventDisableTiming);
    }
    if (code != cudaSuccess) {
        stream_destroy(device, stream);
        return sl_cuda_fail(err, code, "making a stream");
    }
    *out = stream;
    return SLUICE_STATUS_OK;
}

static enum sluice_status stream_sync(struct sl_device *device, struct sl_stream *stream,
                                      struct sluice_error *err)
{
    const struct sl_cuda_device *dev = cuda_device(device);
    SL_CUDA_TRY(cudaSetDevice(dev->ordinal), err, "choosing GPU %d", dev->ordinal);
    SL_CUDA_TRY(cudaEventRecord(stream->idle, stream->handle), err, "waiting for a stream");
    SL_CUDA_TRY(sl_cuda_event_wait(stream->idle, &stream->waits), err, "waiting for a stream");
    return SLUICE_STATUS_OK;
}

static enum sluice_status event_create(struct sl_device *device, bool timing, struct sl_event **out,
                                       struct sluice_error *err)
{
    const struct sl_cuda_device *dev = cuda_device(device);
    *out = NULL;
    SL_CUDA_TRY(cudaSetDevice(dev->ordinal), err, "choosing GPU %d", dev->ordinal);
    struct sl_event *event = sl_calloc(SL_MEM_DEVICE, 1, sizeof *event);
    SL_CHECK(event != NULL, OUT_OF_MEMORY, err, "no memory for an event");
    const unsigned flags = timing ? cudaEventDefault : cudaEventDisableTiming;
    const cudaError_t code = cudaEventCreateWithFlags(&event->handle, flags);
    if (code != cudaSuccess) {
        sl_free(event);
        return sl_cuda_fail(err, code, "making an event");
    }
    event->timing = timing;
    *out = event;
    return SLUICE_STATUS_OK;
}

static void event_destroy(struct sl_device *device, struct sl_event *event)
{
    if (event == NULL) {
        return;
    }
    cudaSetDevice(cuda_device(device)->ordinal);
    cudaEventDestroy(event->handle);
    cudaGetLastError();
    sl_free(event);
}

static enum sluice_status event_record(struct sl_device *device, struct sl_event *event,
                                       struct sl_stream *stream, struct sluice_error *err)
{
    const struct sl_cuda_device *dev = cuda_device(device);
    SL_CUDA_TRY(cudaSetDevice(dev->ordinal), err, "choosing GPU %d", dev->ordinal);
    /* In a graph: a node that records the event anew whenever the graph runs. */
    const unsigned flags = stream->recording ? cudaEventRecordExternal : cudaEventRecordDefault;
    SL_CUDA_TRY(cudaEventRecordWithFlags(event->handle, stream->handle, flags), err,
                "recording an event");
    event->recorded = true;
    return SLUICE_STATUS_OK;
}

static enum sluice_status stream_wait(struct sl_device *device, struct sl_stream *stream,
                                      struct sl_event *event, struct sluice_error *err)
{
    const struct sl_cuda_device *dev = cuda_device(device);
    if (!event->recorded) {
        return SLUICE_STATUS_OK;
    }
    SL_CUDA_TRY(cudaSetDevice(dev->ordinal), err, "choosing GPU %d", dev->ordinal);
    SL_CUDA_TRY(cudaStreamWaitEvent(stream->handle, event->handle, 0), err,
                "making a stream wait for an event");
    return SLUICE_STATUS_OK;
}

static enum sluice_status event_sync(struct sl_device *device, struct sl_event *event,
                                     struct sluice_error *err)
{
    const struct sl_cuda_device *dev = cuda_device(device);
    if (!event->recorded) {
        return SLUICE_STATUS_OK;
    }
    SL_CUDA_TRY(cudaSetDevice(dev->ordinal), err, "choosing GPU %d", dev->ordinal);
    SL_CUDA_TRY(sl_cuda_event_wait(event->handle, &event->waits), err, "waiting for an event");
    return SLUICE_STATUS_OK;
}

static enum sluice_status event_elapsed(struct sl_device *device, struct sl_event *from,
                                        struct sl_event *to, uint64_t *out_ns,
                                        struct sluice_error *err)
{
    const struct sl_cuda_device *dev = cuda_device(device);
    *out_ns = 0;
    SL_CHECK(from->timing && to->timing && from->recorded && to->recorded, INVALID_ARGUMENT, err,
             "elapsed time wants two recorded timing events");
    SL_CUDA_TRY(cudaSetDevice(dev->ordinal), err, "choosing GPU %d", dev->ordinal);
    float ms = 0.0f;
    SL_CUDA_TRY(cudaEventElapsedTime(&ms, from->handle, to->handle), err,
                "reading the time between two events");
    *out_ns = ms > 0.0f ? (uint64_t)((double)ms * 1e6 + 0.5) : 0;
    return SLUICE_STATUS_OK;
}

/* ---- operators ---- */

/* Types that no kernel can ever multiply are "not supported" rather than a mistake of the caller.
 */
static enum sluice_status check_types(const struct sl_op *op, struct sluice_error *err)
{
    for (int i = 0; op->kind == SL_OP_LINEAR && i < op->linear.n_parts && i < SL_LINEAR_MAX_PARTS;
         i++) {
        const uint32_t type = (uint32_t)op->linear.part[i].w.type;
        const struct sl_type_traits *traits = sl_type_traits(type);
        SL_CHECK(traits != NULL && traits->computes, UNSUPPORTED, err,
                 "the CUDA device has no kernel for linear with type %s", sl_type_name(type));
        SL_CHECK(op->linear.part[i].w.pitch_bytes == 0, UNSUPPORTED, err,
                 "the CUDA device has no kernel for linear with rows that lie apart");
    }
    return SLUICE_STATUS_OK;
}

static const char *op_type_name(const struct sl_op *op)
{
    switch (op->kind) {
    case SL_OP_LINEAR:
        return sl_type_name(op->linear.part[0].w.type);
    case SL_OP_KV_STORE:
        return sl_type_name(op->kv_store.kv.types.k);
    case SL_OP_ATTENTION:
        return sl_type_name(op->attention.kv.types.k);
    case SL_OP_ROUTER:
        return sl_type_name(op->router.w.type);
    case SL_OP_EXPERTS:
        return sl_type_name(op->experts.gate.type);
    default:
        return "F32";
    }
}

static int launch(const struct sl_cuda_device *dev, cudaStream_t stream, const struct sl_op *op,
                  void *scratch)
{
    const struct sl_cuda_props *props = &dev->props;
    switch (op->kind) {
    case SL_OP_NORM:
        return sl_cuda_norm(stream, op, props);
    case SL_OP_LINEAR:
        return sl_cuda_linear(stream, op, scratch, sl_op_scratch_bytes(op), props);
    case SL_OP_ROPE:
        return sl_cuda_rope(stream, op, props);
    case SL_OP_KV_STORE:
        return sl_cuda_kv_store(stream, op, props);
    case SL_OP_ATTENTION:
        return sl_cuda_attention(stream, op, scratch, sl_op_scratch_bytes(op), props);
    case SL_OP_ROUTER:
        return sl_cuda_router(stream, op, scratch, sl_op_scratch_bytes(op), props);
    case SL_OP_EXPERTS:
        return sl_cuda_experts(stream, op, scratch, sl_op_scratch_bytes(op), props);
    case SL_OP_DIVIDE:
        return sl_cuda_divide(stream, op, props);
    case SL_OP_ADD:
        return sl_cuda_add(stream, op, props);
    case SL_OP_MERGE:
        return sl_cuda_merge(stream, op, props);
    case SL_OP_N_KINDS:
        break;
    }
    return SL_CUDA_UNSUPPORTED;
}

static enum sluice_status device_run(struct sl_device *device, struct sl_stream *stream,
                                     const struct sl_op *ops, int n_ops, void *scratch,
                                     struct sluice_error *err)
{
    const struct sl_cuda_device *dev = cuda_device(device);
    SL_CUDA_TRY(cudaSetDevice(dev->ordinal), err, "choosing GPU %d", dev->ordinal);
    for (int i = 0; i < n_ops; i++) {
        SL_TRY(check_types(&ops[i], err));
        SL_TRY(sl_op_validate(&ops[i], err));
    }
    for (int i = 0; i < n_ops;) {
        const struct sl_op *op = &ops[i];
        int n_taken = 0;
        int result =
            sl_cuda_run_fused(stream->handle, op, n_ops - i, scratch, &dev->props, &n_taken);
        if (n_taken == 0) {
            result = launch(dev, stream->handle, op, scratch);
            n_taken = 1;
        }
        SL_CHECK(result != SL_CUDA_UNSUPPORTED, UNSUPPORTED, err,
                 "the CUDA device has no kernel for %s with type %s in this shape",
                 sl_op_kind_name(op->kind), op_type_name(op));
        SL_CUDA_TRY((cudaError_t)result, err, "queueing %s (operator %d of %d)",
                    sl_op_kind_name(op->kind), i + 1, n_ops);
        i += n_taken;
    }
    return SLUICE_STATUS_OK;
}

/* ---- life ---- */

static void device_destroy(struct sl_device *device)
{
    struct sl_cuda_device *dev = cuda_device(device);
    cudaSetDevice(dev->ordinal);
    /* The context stays: it is the process's, and a host program may use it too. */
    sl_cuda_transfer_finish(dev);
    sl_free(dev);
}

/* ---- graphs ---- */

static enum sluice_status graph_begin(struct sl_device *device, struct sl_stream *stream,
                                      struct sluice_error *err)
{
    const struct sl_cuda_device *dev = cuda_device(device);
    SL_CUDA_TRY(cudaSetDevice(dev->ordinal), err, "choosing GPU %d", dev->ordinal);
    SL_CUDA_TRY(cudaStreamBeginCapture(stream->handle, cudaStreamCaptureModeThreadLocal), err,
                "beginning a graph");
    stream->recording = true;
    return SLUICE_STATUS_OK;
}

static void graph_destroy(struct sl_device *device, struct sl_graph *graph)
{
    if (graph == NULL) {
        return;
    }
    cudaSetDevice(cuda_device(device)->ordinal);
    if (graph->handle != NULL) {
        cudaGraphExecDestroy(graph->handle);
    }
    cudaGetLastError();
    sl_free(graph);
}

static enum sluice_status graph_end(struct sl_device *device, struct sl_stream *stream,
                                    struct sl_graph **out, struct sluice_error *err)
{
    *out = NULL;
    cudaGraph_t recorded = NULL;
    stream->recording = false;
    SL_CUDA_TRY(cudaStreamEndCapture(stream->handle, &recorded), err, "ending a graph");
    struct sl_graph *graph = sl_calloc(SL_MEM_DEVICE, 1, sizeof *graph);
    if (graph == NULL) {
        cudaGraphDestroy(recorded);
        return sl_error_set(err, SLUICE_STATUS_OUT_OF_MEMORY, "no memory for a graph");
    }
    const cudaError_t code = cudaGraphInstantiate(&graph->handle, recorded, 0);
    cudaGraphDestroy(recorded);
    if (code != cudaSuccess) {
        graph->handle = NULL;
        graph_destroy(device, graph);
        return sl_cuda_fail(err, code, "making a graph");
    }
    *out = graph;
    return SLUICE_STATUS_OK;
}

static enum sluice_status graph_launch(struct sl_device *device, struct sl_stream *stream,
                                       struct sl_graph *graph, struct sluice_error *err)
{
    const struct sl_cuda_device *dev = cuda_device(device);
    SL_CUDA_TRY(cudaSetDevice(dev->ordinal), err, "choosing GPU %d", dev->ordinal);
    SL_CUDA_TRY(cudaGraphLaunch(graph->handle, stream->handle), err, "queueing a graph");
    return SLUICE_STATUS_OK;
}

static const struct sl_device_vtable cuda_vtable = {
    .destroy = device_destroy,
    .info = device_info,
    .mem_alloc = mem_alloc,
    .mem_free = mem_free,
    .host_register = sl_cuda_host_register,
    .host_unregister = sl_cuda_host_unregister,
    .host_alloc = sl_cuda_host_alloc,
    .host_free = sl_cuda_host_free,
    .stream_create = stream_create,
    .stream_destroy = stream_destroy,
    .stream_sync = stream_sync,
    .event_create = event_create,
    .event_destroy = event_destroy,
    .event_record = event_record,
    .stream_wait = stream_wait,
    .event_sync = event_sync,
    .event_elapsed = event_elapsed,
    .copy_to_device = sl_cuda_copy_to_device,
    .copy_rows_to_device = sl_cuda_copy_rows_to_device,
    .copy_to_host = sl_cuda_copy_to_host,
    .copy_on_device = sl_cuda_copy_on_device,
    .run = device_run,
    .graph_begin = graph_begin,
    .graph_end = graph_end,
    .graph_launch = graph_launch,
    .graph_destroy = graph_destroy,
};

sl_cuda_entry_fn sl_cuda_device_create;

__attribute__((visibility("default"))) enum sluice_status
sl_cuda_device_create(int version, struct sl_device **out, int ordinal, struct sluice_error *err)
{
    *out = NULL;
    SL_CHECK(version == SL_CUDA_ENTRY_VERSION, DEVICE, err,
             "the CUDA library has interface version %d, the program wants %d; install both from "
             "one build",
             SL_CUDA_ENTRY_VERSION, version);
    struct sl_cuda_device *dev = sl_calloc(SL_MEM_DEVICE, 1, sizeof *dev);
    SL_CHECK(dev != NULL, OUT_OF_MEMORY, err, "no memory for a CUDA device");
    dev->base.vt = &cuda_vtable;
    dev->base.kind = SL_DEVICE_CUDA;
    const enum sluice_status status = sl_cuda_probe(dev, ordinal, err);
    if (status != SLUICE_STATUS_OK) {
        sl_free(dev);
        return status;
    }
    sl_cuda_ring_init(&dev->ring);
    *out = &dev->base;
    return SLUICE_STATUS_OK;
}
