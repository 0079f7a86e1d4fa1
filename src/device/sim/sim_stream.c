/* SPDX-License-Identifier: Apache-2.0
 *
 * Streams and events of the simulated device: their lives, and waiting for them on the host. A
 * destroyed stream keeps its struct and its count, because events may still refer to it; the next
 * stream made takes it over.
 */
#include "base/error.h"
#include "base/mem.h"
#include "device/sim/sim_internal.h"

static void stream_free(struct sl_stream *stream)
{
    pthread_cond_destroy(&stream->progress);
    pthread_cond_destroy(&stream->work);
    pthread_mutex_destroy(&stream->lock);
    sl_free(stream->cpu_scratch);
    sl_free(stream->ops);
    sl_free(stream->items);
    sl_free(stream);
}

/* A stream without a thread, in the device's list. */
static struct sl_stream *stream_make(struct sl_sim_device *sim)
{
    struct sl_stream *stream = sl_calloc(SL_MEM_DEVICE, 1, sizeof *stream);
    if (!stream) {
        return NULL;
    }
    stream->dev = sim;
    pthread_mutex_init(&stream->lock, NULL);
    pthread_cond_init(&stream->work, NULL);
    pthread_cond_init(&stream->progress, NULL);
    stream->n_ops_capacity = SL_SIM_N_OPS_FIRST;
    stream->items = sl_calloc(SL_MEM_DEVICE, SL_SIM_N_ITEMS, sizeof *stream->items);
    stream->ops = sl_calloc(SL_MEM_DEVICE, SL_SIM_N_OPS_FIRST, sizeof *stream->ops);
    if (!stream->items || !stream->ops) {
        stream_free(stream);
        return NULL;
    }
    stream->next = sim->streams;
    sim->streams = stream;
    return stream;
}

/* Copies of different streams never wait for each other here, so the use makes no difference. */
enum sluice_status sl_sim_stream_create(struct sl_device *dev, enum sl_stream_use use,
                                        struct sl_stream **out, struct sluice_error *err)
{
    (void)use;
    struct sl_sim_device *sim = sim_of(dev);
    *out = NULL;
    SL_TRY(sl_sim_failure(sim, err));
    uint64_t n_before = 0; /* gives each stream random numbers of its own */
    struct sl_stream *stream = NULL;
    for (struct sl_stream *s = sim->streams; s; s = s->next) {
        stream = s->in_use ? stream : s;
        n_before++;
    }
    if (!stream) {
        stream = stream_make(sim);
        SL_CHECK(stream, OUT_OF_MEMORY, err, "no memory for a stream");
        stream->random = (sim->options.seed + n_before + 1) * UINT64_C(0x9e3779b97f4a7c15) | 1;
    }
    stream->quit = false;
    SL_CHECK(pthread_create(&stream->thread, NULL, sl_sim_stream_main, stream) == 0, DEVICE, err,
             "cannot start a thread for a stream");
    stream->in_use = true;
    *out = stream;
    return SLUICE_STATUS_OK;
}

void sl_sim_stream_destroy(struct sl_device *dev, struct sl_stream *stream)
{
    if (!stream) {
        return;
    }
    pthread_mutex_lock(&stream->lock);
    stream->quit = true; /* once the queue is empty */
    pthread_cond_signal(&stream->work);
    pthread_mutex_unlock(&stream->lock);
    pthread_join(stream->thread, NULL);
    sl_sim_graph_destroy(dev, stream->recording);
    stream->recording = NULL;
    stream->in_use = false;
}

void sl_sim_streams_free(struct sl_sim_device *sim)
{
    for (struct sl_stream *s = sim->streams; s; s = s->next) {
        if (s->in_use) {
            sl_sim_stream_destroy(&sim->base, s);
        }
    }
    while (sim->streams) {
        struct sl_stream *next = sim->streams->next;
        stream_free(sim->streams);
        sim->streams = next;
    }
}

void sl_sim_stream_await(struct sl_stream *stream, uint64_t number)
{
    pthread_mutex_lock(&stream->lock);
    while (stream->n_done < number) {
        pthread_cond_wait(&stream->progress, &stream->lock);
    }
    pthread_mutex_unlock(&stream->lock);
}

enum sluice_status sl_sim_stream_sync(struct sl_device *dev, struct sl_stream *stream,
                                      struct sluice_error *err)
{
    sl_sim_stream_await(stream, stream->n_queued);
    return sl_sim_failure(sim_of(dev), err);
}

enum sluice_status sl_sim_event_create(struct sl_device *dev, bool timing, struct sl_event **out,
                                       struct sluice_error *err)
{
    *out = NULL;
    SL_TRY(sl_sim_failure(sim_of(dev), err));
    struct sl_event *event = sl_calloc(SL_MEM_DEVICE, 1, sizeof *event);
    SL_CHECK(event, OUT_OF_MEMORY, err, "no memory for an event");
    event->timing = timing;
    *out = event;
    return SLUICE_STATUS_OK;
}

void sl_sim_event_destroy(struct sl_device *dev, struct sl_event *event)
{
    struct sl_sim_device *sim = sim_of(dev);
    if (!event) {
        return;
    }
    /* Records still queued will write to it. */
    pthread_mutex_lock(&sim->lock);
    while (event->n_finished < event->generation) {
        pthread_cond_wait(&sim->event_done, &sim->lock);
    }
    pthread_mutex_unlock(&sim->lock);
    sl_free(event);
}

enum sluice_status sl_sim_event_sync(struct sl_device *dev, struct sl_event *event,
                                     struct sluice_error *err)
{
    if (event->stream) {
        sl_sim_stream_await(event->stream, event->number);
    }
    return sl_sim_failure(sim_of(dev), err);
}

/* The time of the last record, which must be done. */
static enum sluice_status event_time(struct sl_sim_device *sim, const struct sl_event *event,
                                     uint64_t *out_ns, struct sluice_error *err)
{
    *out_ns = 0;
    SL_CHECK(event->timing, INVALID_ARGUMENT, err, "elapsed: the event was made without timing");
    SL_CHECK(event->stream, INVALID_ARGUMENT, err, "elapsed: the event was never recorded");
    pthread_mutex_lock(&sim->lock);
    const bool done = event->time_generation == event->generation;
    *out_ns = event->time_ns;
    pthread_mutex_unlock(&sim->lock);
    SL_CHECK(done, DEVICE, err, "elapsed: the event is not finished yet");
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_sim_event_elapsed(struct sl_device *dev, struct sl_event *from,
                                        struct sl_event *to, uint64_t *out_ns,
                                        struct sluice_error *err)
{
    struct sl_sim_device *sim = sim_of(dev);
    uint64_t begin_ns;
    uint64_t end_ns;
    *out_ns = 0;
    SL_TRY(sl_sim_failure(sim, err));
    SL_TRY(event_time(sim, from, &begin_ns, err));
    SL_TRY(event_time(sim, to, &end_ns, err));
    *out_ns = end_ns > begin_ns ? end_ns - begin_ns : 0;
    return SLUICE_STATUS_OK;
}
