/* SPDX-License-Identifier: Apache-2.0
 *
 * The stream thread of the simulated device: takes item after item, dawdles as the options say,
 * checks the addresses once more (memory may have been freed since), and does the work. After a
 * failure it still counts items as done, so that nobody waits for ever, but does none of them.
 */
#include <string.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/random.h"
#include "cpu/cpu.h"
#include "device/sim/sim_internal.h"

#define POISON 0xff
/* How much slower a copy is that goes through the staging ring. */
#define STAGED_SLOWDOWN 2.0

static struct sl_sim_options options_now(struct sl_sim_device *sim)
{
    pthread_mutex_lock(&sim->lock);
    const struct sl_sim_options options = sim->options;
    pthread_mutex_unlock(&sim->lock);
    return options;
}

/* Take the link in one direction for the time that the copy needs and wait until it is over.
 * Copies of several streams share a link, as they share the bus. */
static void spend_copy_time(struct sl_sim_device *sim, const struct sl_sim_item *item)
{
    pthread_mutex_lock(&sim->lock);
    const double bytes_per_s = sim->options.copy_bytes_per_s;
    uint64_t end_ns = 0;
    if (bytes_per_s > 0 && item->kind != SL_SIM_ITEM_COPY_ON_DEVICE) {
        uint64_t *free_ns = &sim->link_free_ns[item->kind == SL_SIM_ITEM_COPY_TO_HOST];
        const double slowdown = item->staged ? STAGED_SLOWDOWN : 1.0;
        const uint64_t now_ns = sl_clock_now_ns();
        end_ns = now_ns > *free_ns ? now_ns : *free_ns;
        end_ns += (uint64_t)((double)item->copy.bytes * slowdown / bytes_per_s * 1e9);
        *free_ns = end_ns;
    }
    pthread_mutex_unlock(&sim->lock);
    const uint64_t now_ns = sl_clock_now_ns();
    if (end_ns > now_ns) {
        sl_clock_sleep_ns(end_ns - now_ns);
    }
}

static enum sluice_status execute_copy(struct sl_sim_device *sim, const struct sl_sim_item *item,
                                       struct sluice_error *err)
{
    /* The bytes move at the end of the time: who does not wait sees what was there before, and
     * who reuses the source too early spoils the copy. */
    spend_copy_time(sim, item);
    enum sluice_status status = SLUICE_STATUS_OK;
    pthread_rwlock_rdlock(&sim->memory_lock);
    if (item->kind != SL_SIM_ITEM_COPY_TO_HOST) {
        SL_TRY_OUT(sl_sim_check_device(sim, item->copy.dst, item->copy.bytes,
                                       "queued copy: destination", err));
    }
    if (item->kind != SL_SIM_ITEM_COPY_TO_DEVICE) {
        SL_TRY_OUT(
            sl_sim_check_device(sim, item->copy.src, item->copy.bytes, "queued copy: source", err));
    }
    const size_t row_bytes = item->copy.bytes / item->copy.n_rows;
    for (size_t i = 0; i < item->copy.n_rows && row_bytes > 0; i++) {
        memmove((char *)item->copy.dst + i * row_bytes,
                (const char *)item->copy.src + i * item->copy.pitch_bytes, row_bytes);
    }
out:
    pthread_rwlock_unlock(&sim->memory_lock);
    return status;
}

/* Make what the op leaves undefined as bad as can be. */
static void poison_undefined(const struct sl_op *op, void *scratch)
{
    const size_t scratch_bytes = sl_op_scratch_bytes(op);
    if (scratch_bytes > 0) {
        memset(scratch, POISON, scratch_bytes);
    }
    if (op->kind == SL_OP_LINEAR && op->linear.activation != SL_ACT_NONE) {
        const size_t n = (size_t)op->n_tokens * (size_t)op->linear.part[1].w.n_rows;
        memset(op->linear.part[1].y, POISON, n * sizeof(float));
    }
}

static enum sluice_status execute_run(struct sl_stream *stream, const struct sl_sim_item *item,
                                      const struct sl_sim_options *options,
                                      struct sluice_error *err)
{
    struct sl_sim_device *sim = stream->dev;
    const struct sl_op *ops = stream->ops + item->run.first_op % stream->n_ops_capacity;
    const struct sl_cpu_kernels *kernels = sl_cpu_kernels(sl_cpu_level());
    for (int i = 0; i < item->run.n_ops; i++) {
        const uint64_t begin_ns = sl_clock_now_ns();
        pthread_rwlock_rdlock(&sim->memory_lock);
        enum sluice_status status = sl_sim_check_op(sim, &ops[i], item->run.scratch, err);
        if (status == SLUICE_STATUS_OK) {
            status = sl_sim_check_content(sim, &ops[i], err);
        }
        if (status == SLUICE_STATUS_OK) {
            sl_cpu_run(kernels, NULL, &ops[i], 1, stream->cpu_scratch);
            poison_undefined(&ops[i], item->run.scratch);
        }
        pthread_rwlock_unlock(&sim->memory_lock);
        SL_TRY(status);
        if (options->compute_slowdown > 0) {
            const double own_ns = (double)(sl_clock_now_ns() - begin_ns);
            sl_clock_sleep_ns((uint64_t)(own_ns * options->compute_slowdown));
        }
    }
    return SLUICE_STATUS_OK;
}

static void execute_record(struct sl_sim_device *sim, const struct sl_sim_item *item)
{
    struct sl_event *event = item->record.event;
    pthread_mutex_lock(&sim->lock);
    if (item->record.generation > event->time_generation) {
        event->time_generation = item->record.generation;
        event->time_ns = sl_clock_now_ns();
    }
    event->n_finished++;
    pthread_cond_broadcast(&sim->event_done);
    pthread_mutex_unlock(&sim->lock);
}

static enum sluice_status execute(struct sl_stream *stream, const struct sl_sim_item *item,
                                  struct sluice_error *err)
{
    struct sl_sim_device *sim = stream->dev;
    if (item->kind == SL_SIM_ITEM_RECORD) { /* also after a failure: its destruction waits for it */
        execute_record(sim, item);
        return SLUICE_STATUS_OK;
    }
    if (sl_sim_failure(sim, NULL) != SLUICE_STATUS_OK) {
        return SLUICE_STATUS_OK;
    }
    const struct sl_sim_options options = options_now(sim);
    if (options.max_random_delay_ns > 0) {
        sl_clock_sleep_ns(sl_random_next(&stream->random) % options.max_random_delay_ns);
    }
    SL_CHECK(!item->fails, DEVICE, err, "simulated fault: queued %s failed",
             item->kind == SL_SIM_ITEM_RUN ? "op list" : "copy");
    switch (item->kind) {
    case SL_SIM_ITEM_COPY_TO_DEVICE:
    case SL_SIM_ITEM_COPY_TO_HOST:
    case SL_SIM_ITEM_COPY_ON_DEVICE:
        return execute_copy(sim, item, err);
    case SL_SIM_ITEM_RUN:
        return execute_run(stream, item, &options, err);
    case SL_SIM_ITEM_WAIT:
        sl_sim_stream_await(item->wait.stream, item->wait.number);
        return SLUICE_STATUS_OK;
    case SL_SIM_ITEM_RECORD:
        break;
    }
    return SLUICE_STATUS_OK;
}

void *sl_sim_stream_main(void *arg)
{
    struct sl_stream *stream = arg;
    pthread_mutex_lock(&stream->lock);
    for (;;) {
        while (stream->n_done == stream->n_queued && !stream->quit) {
            pthread_cond_wait(&stream->work, &stream->lock);
        }
        if (stream->n_done == stream->n_queued) {
            break;
        }
        const struct sl_sim_item item = stream->items[stream->n_done % SL_SIM_N_ITEMS];
        pthread_mutex_unlock(&stream->lock);

        struct sluice_error failure;
        if (execute(stream, &item, &failure) != SLUICE_STATUS_OK) {
            sl_sim_fail(stream->dev, &failure);
        }

        pthread_mutex_lock(&stream->lock);
        stream->n_done++;
        stream->ops_tail = item.ops_end;
        pthread_cond_broadcast(&stream->progress);
    }
    pthread_mutex_unlock(&stream->lock);
    return NULL;
}
