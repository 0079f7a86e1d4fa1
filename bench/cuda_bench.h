/* SPDX-License-Identifier: Apache-2.0
 *
 * What the benchmarks of the CUDA device share: the device with a stream, two events and memory
 * that goes with it, random numbers, and the timing of operator lists. All through the device
 * interface.
 */
#ifndef SL_BENCH_CUDA_BENCH_H
#define SL_BENCH_CUDA_BENCH_H

#include <stdint.h>

#include "base/error.h"
#include "base/median.h"
#include "device/device.h"
#include "op/op.h"

#define CUDA_BENCH_RUNS 5
#define CUDA_BENCH_MAX_MEMORY 16

struct cuda_bench {
    struct sl_device *dev;
    struct sl_device_info info;
    struct sl_stream *stream;
    struct sl_event *from, *to;
    void *memory[CUDA_BENCH_MAX_MEMORY];
    int n_memory;
};

static inline enum sluice_status cuda_bench_create(struct cuda_bench *b, int gpu,
                                                   struct sluice_error *err)
{
    SL_TRY(sl_device_cuda_create(&b->dev, gpu, err));
    const struct sl_device_vtable *vt = b->dev->vt;
    SL_TRY(vt->info(b->dev, &b->info, err));
    SL_TRY(vt->stream_create(b->dev, SL_STREAM_OPERATORS, &b->stream, err));
    SL_TRY(vt->event_create(b->dev, true, &b->from, err));
    return vt->event_create(b->dev, true, &b->to, err);
}

/* Also what was made only in part. */
static inline void cuda_bench_destroy(struct cuda_bench *b)
{
    if (b->dev) {
        const struct sl_device_vtable *vt = b->dev->vt;
        while (b->n_memory > 0) {
            vt->mem_free(b->dev, b->memory[--b->n_memory]);
        }
        if (b->from) {
            vt->event_destroy(b->dev, b->from);
        }
        if (b->to) {
            vt->event_destroy(b->dev, b->to);
        }
        if (b->stream) {
            vt->stream_destroy(b->dev, b->stream);
        }
    }
    sl_device_destroy(&b->dev);
}

/* Device memory that goes with the benchmark. */
static inline enum sluice_status cuda_bench_alloc(struct cuda_bench *b, size_t bytes, void **out,
                                                  struct sluice_error *err)
{
    SL_CHECK(b->n_memory < CUDA_BENCH_MAX_MEMORY, INTERNAL, err, "more memory than foreseen");
    SL_TRY(b->dev->vt->mem_alloc(b->dev, bytes, out, err));
    b->memory[b->n_memory++] = *out;
    return SLUICE_STATUS_OK;
}

/* Copy to the device and wait. */
static inline enum sluice_status cuda_bench_upload(struct cuda_bench *b, void *to, const void *from,
                                                   size_t bytes, struct sluice_error *err)
{
    SL_TRY(b->dev->vt->copy_to_device(b->dev, b->stream, to, from, bytes, err));
    return b->dev->vt->stream_sync(b->dev, b->stream, err);
}

/* Nanoseconds from the mark to now, by the GPU's clock. */
static inline enum sluice_status cuda_bench_elapsed(struct cuda_bench *b, uint64_t *ns,
                                                    struct sluice_error *err)
{
    const struct sl_device_vtable *vt = b->dev->vt;
    SL_TRY(vt->event_record(b->dev, b->to, b->stream, err));
    SL_TRY(vt->event_sync(b->dev, b->to, err));
    return vt->event_elapsed(b->dev, b->from, b->to, ns, err);
}

static inline enum sluice_status cuda_bench_mark(struct cuda_bench *b, struct sluice_error *err)
{
    return b->dev->vt->event_record(b->dev, b->from, b->stream, err);
}

/* Median time of a list of operators, in microseconds an operator. Of `lead` (or NULL) half is
 * copied onto the other half ahead of them in the stream, so that all are queued when the first
 * begins: what is timed is the GPU, not the host. */
static inline enum sluice_status cuda_bench_time(struct cuda_bench *b, const struct sl_op *ops,
                                                 int n_ops, void *scratch, char *lead,
                                                 size_t lead_bytes, double *us,
                                                 struct sluice_error *err)
{
    const struct sl_device_vtable *vt = b->dev->vt;
    double times[CUDA_BENCH_RUNS];
    for (int i = 0; i < CUDA_BENCH_RUNS; i++) {
        uint64_t ns = 0;
        if (lead) {
            SL_TRY(vt->copy_on_device(b->dev, b->stream, lead, lead + lead_bytes / 2,
                                      lead_bytes / 2, err));
        }
        SL_TRY(cuda_bench_mark(b, err));
        SL_TRY(vt->run(b->dev, b->stream, ops, n_ops, scratch, err));
        SL_TRY(cuda_bench_elapsed(b, &ns, err));
        times[i] = (double)ns / 1e3 / n_ops;
    }
    *us = sl_median(times, CUDA_BENCH_RUNS);
    return SLUICE_STATUS_OK;
}

/* The same numbers in every run. */
static inline uint64_t cuda_bench_random(void)
{
    static uint64_t state = UINT64_C(88172645463325252);
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return state;
}

#endif
