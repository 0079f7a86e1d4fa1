/* SPDX-License-Identifier: Apache-2.0
 *
 * The simulated device: the whole device contract in host memory, with worse manners than a GPU.
 * It delays, checks every address, fills fresh memory with NaN and unmaps freed memory, so that a
 * program that is right by luck fails here. Made for tests and for machines without a GPU.
 */
#include <string.h>

#include "base/error.h"
#include "base/mem.h"
#include "device/sim/sim_internal.h"

#define DEFAULT_MEMORY_BYTES (UINT64_C(1) << 30)

static void sim_destroy(struct sl_device *dev)
{
    struct sl_sim_device *sim = sim_of(dev);
    sl_sim_streams_free(sim);
    sl_sim_mem_free_all(sim);
    pthread_cond_destroy(&sim->event_done);
    pthread_mutex_destroy(&sim->lock);
    pthread_rwlock_destroy(&sim->memory_lock);
    sl_free(sim);
}

static enum sluice_status sim_info(struct sl_device *dev, struct sl_device_info *out,
                                   struct sluice_error *err)
{
    (void)err;
    const struct sl_sim_device *sim = sim_of(dev);
    *out = (struct sl_device_info){
        .kind = SL_DEVICE_SIM,
        .name = "Simulated device",
        .total_bytes = sim->memory_bytes,
        .free_bytes = sim->memory_bytes - sim->used_bytes,
        .reads_host_memory = true,
        .n_multiprocessors = 1,
    };
    return SLUICE_STATUS_OK;
}

static const struct sl_device_vtable sim_vtable = {
    .destroy = sim_destroy,
    .info = sim_info,
    .mem_alloc = sl_sim_mem_alloc,
    .mem_free = sl_sim_mem_free,
    .host_register = sl_sim_host_register,
    .host_unregister = sl_sim_host_unregister,
    .host_alloc = sl_sim_host_alloc,
    .host_free = sl_sim_host_free,
    .stream_create = sl_sim_stream_create,
    .stream_destroy = sl_sim_stream_destroy,
    .stream_sync = sl_sim_stream_sync,
    .event_create = sl_sim_event_create,
    .event_destroy = sl_sim_event_destroy,
    .event_record = sl_sim_event_record,
    .stream_wait = sl_sim_stream_wait,
    .event_sync = sl_sim_event_sync,
    .event_elapsed = sl_sim_event_elapsed,
    .copy_to_device = sl_sim_copy_to_device,
    .copy_rows_to_device = sl_sim_copy_rows_to_device,
    .copy_to_host = sl_sim_copy_to_host,
    .copy_on_device = sl_sim_copy_on_device,
    .run = sl_sim_run,
    .graph_begin = sl_sim_graph_begin,
    .graph_end = sl_sim_graph_end,
    .graph_launch = sl_sim_graph_launch,
    .graph_destroy = sl_sim_graph_destroy,
};

enum sluice_status sl_device_sim_create(struct sl_device **out, const struct sl_sim_options *sim,
                                        struct sluice_error *err)
{
    *out = NULL;
    struct sl_sim_device *made = sl_calloc(SL_MEM_DEVICE, 1, sizeof *made);
    SL_CHECK(made, OUT_OF_MEMORY, err, "no memory for a simulated device");
    made->base.vt = &sim_vtable;
    made->base.kind = SL_DEVICE_SIM;
    if (sim) {
        made->options = *sim;
    }
    made->memory_bytes =
        made->options.memory_bytes ? made->options.memory_bytes : DEFAULT_MEMORY_BYTES;
    pthread_rwlock_init(&made->memory_lock, NULL);
    pthread_mutex_init(&made->lock, NULL);
    pthread_cond_init(&made->event_done, NULL);
    *out = &made->base;
    return SLUICE_STATUS_OK;
}

void sl_device_sim_set(struct sl_device *dev, const struct sl_sim_options *options)
{
    struct sl_sim_device *sim = sim_of(dev);
    pthread_mutex_lock(&sim->lock);
    sim->options = *options;
    pthread_mutex_unlock(&sim->lock);
}

enum sluice_status sl_sim_failure(struct sl_sim_device *sim, struct sluice_error *err)
{
    pthread_mutex_lock(&sim->lock);
    const bool failed = sim->failed;
    if (failed && err) {
        *err = sim->failure;
    }
    pthread_mutex_unlock(&sim->lock);
    return failed ? SLUICE_STATUS_DEVICE : SLUICE_STATUS_OK;
}

void sl_sim_fail(struct sl_sim_device *sim, const struct sluice_error *failure)
{
    pthread_mutex_lock(&sim->lock);
    if (!sim->failed) {
        sim->failed = true;
        sim->failure = *failure;
        sim->failure.status = SLUICE_STATUS_DEVICE;
    }
    pthread_mutex_unlock(&sim->lock);
}

bool sl_sim_fault_due(struct sl_sim_device *sim, uint64_t *count)
{
    pthread_mutex_lock(&sim->lock);
    const bool due = *count == 1;
    if (*count > 0) {
        (*count)--;
    }
    pthread_mutex_unlock(&sim->lock);
    return due;
}
