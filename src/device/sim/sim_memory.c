/* SPDX-License-Identifier: Apache-2.0
 *
 * Memory of the simulated device. Each allocation is a mapping of its own with an inaccessible
 * page behind it. Fresh memory is all ones, which is NaN as float and -1 as an integer; freed
 * memory is unmapped, so a kernel that still uses it cannot go unnoticed.
 */
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/error.h"
#include "base/mem.h"
#include "device/sim/sim_internal.h"

#define POISON 0xff
#define ALIGNMENT 256
#define HOST_ALIGNMENT 4096

static enum sluice_status add_range(struct sl_sim_ranges *ranges, struct sl_sim_range range,
                                    struct sluice_error *err)
{
    if (ranges->n == ranges->capacity) {
        const size_t capacity = ranges->capacity ? ranges->capacity * 2 : 16;
        struct sl_sim_range *grown =
            sl_realloc(SL_MEM_DEVICE, ranges->items, capacity, sizeof *grown);
        SL_CHECK(grown, OUT_OF_MEMORY, err, "no memory to note an allocation");
        ranges->items = grown;
        ranges->capacity = capacity;
    }
    ranges->items[ranges->n++] = range;
    return SLUICE_STATUS_OK;
}

/* Take the range that begins at `mem` out of the list; all zero when there is none. */
static struct sl_sim_range take_range(struct sl_sim_ranges *ranges, const void *mem)
{
    for (size_t i = 0; i < ranges->n; i++) {
        if (ranges->items[i].begin == (uintptr_t)mem) {
            const struct sl_sim_range range = ranges->items[i];
            ranges->items[i] = ranges->items[--ranges->n];
            return range;
        }
    }
    return (struct sl_sim_range){0};
}

static size_t round_up(size_t bytes, size_t to)
{
    return (bytes + to - 1) / to * to;
}

enum sluice_status sl_sim_mem_alloc(struct sl_device *dev, size_t bytes, void **out,
                                    struct sluice_error *err)
{
    struct sl_sim_device *sim = sim_of(dev);
    *out = NULL;
    SL_TRY(sl_sim_failure(sim, err));
    SL_CHECK(!sl_sim_fault_due(sim, &sim->options.fail_alloc_at), DEVICE, err,
             "simulated fault: allocation of %zu bytes refused", bytes);
    SL_CHECK(bytes > 0, INVALID_ARGUMENT, err, "device allocation of 0 bytes");
    const uint64_t free_bytes = sim->memory_bytes - sim->used_bytes;
    SL_CHECK(bytes <= free_bytes && round_up(bytes, ALIGNMENT) <= free_bytes, OUT_OF_MEMORY, err,
             "the simulated device has %llu bytes free, %zu were asked for",
             (unsigned long long)free_bytes, bytes);

    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t usable = round_up(bytes, page);
    char *mem = mmap(NULL, usable + page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    SL_CHECK(mem != MAP_FAILED, OUT_OF_MEMORY, err,
             "no host memory for %zu bytes of the simulated device", bytes);
    if (mprotect(mem, usable, PROT_READ | PROT_WRITE) != 0) {
        munmap(mem, usable + page);
        return sl_error_set(err, SLUICE_STATUS_OUT_OF_MEMORY,
                            "no host memory for %zu bytes of the simulated device", bytes);
    }
    const struct sl_sim_range range = {
        .begin = (uintptr_t)mem, .bytes = bytes, .mapped_bytes = usable + page};
    pthread_rwlock_wrlock(&sim->memory_lock);
    const enum sluice_status status = add_range(&sim->device_memory, range, err);
    pthread_rwlock_unlock(&sim->memory_lock);
    if (status != SLUICE_STATUS_OK) {
        munmap(mem, usable + page);
        return status;
    }
    memset(mem, POISON, usable);
    sim->used_bytes += round_up(bytes, ALIGNMENT);
    *out = mem;
    return SLUICE_STATUS_OK;
}

void sl_sim_mem_free(struct sl_device *dev, void *mem)
{
    struct sl_sim_device *sim = sim_of(dev);
    if (!mem) {
        return;
    }
    /* Waits for the items that are running now; those still queued will be refused. */
    pthread_rwlock_wrlock(&sim->memory_lock);
    const struct sl_sim_range range = take_range(&sim->device_memory, mem);
    if (range.mapped_bytes) {
        munmap(mem, range.mapped_bytes);
        sim->used_bytes -= round_up(range.bytes, ALIGNMENT);
    }
    pthread_rwlock_unlock(&sim->memory_lock);
}

/* Page-locked host memory is looked up by the streams too: kernels may read it in place. */
static enum sluice_status add_locked(struct sl_sim_device *sim, struct sl_sim_range range,
                                     struct sluice_error *err)
{
    pthread_rwlock_wrlock(&sim->memory_lock);
    const enum sluice_status status = add_range(&sim->locked_host, range, err);
    pthread_rwlock_unlock(&sim->memory_lock);
    return status;
}

static struct sl_sim_range take_locked(struct sl_sim_device *sim, const void *mem)
{
    pthread_rwlock_wrlock(&sim->memory_lock);
    const struct sl_sim_range range = take_range(&sim->locked_host, mem);
    pthread_rwlock_unlock(&sim->memory_lock);
    return range;
}

void sl_sim_mem_free_all(struct sl_sim_device *sim)
{
    while (sim->device_memory.n > 0) {
        sl_sim_mem_free(&sim->base, (void *)sim->device_memory.items[0].begin);
    }
    sl_free(sim->device_memory.items);
    sl_free(sim->locked_host.items);
}

enum sluice_status sl_sim_host_register(struct sl_device *dev, const void *mem, size_t bytes,
                                        bool read_only, struct sluice_error *err)
{
    (void)read_only;
    struct sl_sim_device *sim = sim_of(dev);
    SL_TRY(sl_sim_failure(sim, err));
    SL_CHECK(!sl_sim_fault_due(sim, &sim->options.fail_register_at), DEVICE, err,
             "simulated fault: locking of %zu bytes refused", bytes);
    SL_CHECK(mem && bytes > 0, INVALID_ARGUMENT, err, "locking of no memory");
    SL_TRY(sl_sim_check_host(sim, mem, bytes, "memory to lock", err));
    for (size_t i = 0; i < sim->locked_host.n; i++) {
        const struct sl_sim_range *range = &sim->locked_host.items[i];
        SL_CHECK((uintptr_t)mem + bytes <= range->begin ||
                     range->begin + range->bytes <= (uintptr_t)mem,
                 DEVICE, err, "memory to lock overlaps memory that is locked already");
    }
    const struct sl_sim_range range = {.begin = (uintptr_t)mem, .bytes = bytes};
    return add_locked(sim, range, err);
}

void sl_sim_host_unregister(struct sl_device *dev, const void *mem)
{
    take_locked(sim_of(dev), mem);
}

enum sluice_status sl_sim_host_alloc(struct sl_device *dev, size_t bytes, void **out,
                                     struct sluice_error *err)
{
    struct sl_sim_device *sim = sim_of(dev);
    *out = NULL;
    SL_TRY(sl_sim_failure(sim, err));
    SL_CHECK(!sl_sim_fault_due(sim, &sim->options.fail_alloc_at), DEVICE, err,
             "simulated fault: %zu bytes of locked host memory refused", bytes);
    SL_CHECK(bytes > 0, INVALID_ARGUMENT, err, "host allocation of 0 bytes");
    void *mem = sl_alloc_aligned(SL_MEM_DEVICE, bytes, HOST_ALIGNMENT);
    SL_CHECK(mem, OUT_OF_MEMORY, err, "no memory for %zu bytes of locked host memory", bytes);
    const struct sl_sim_range range = {.begin = (uintptr_t)mem, .bytes = bytes};
    const enum sluice_status status = add_locked(sim, range, err);
    if (status != SLUICE_STATUS_OK) {
        sl_free(mem);
        return status;
    }
    memset(mem, POISON, bytes);
    *out = mem;
    return SLUICE_STATUS_OK;
}

void sl_sim_host_free(struct sl_device *dev, void *mem)
{
    if (mem && take_locked(sim_of(dev), mem).bytes) {
        sl_free(mem);
    }
}

bool sl_sim_host_locked(const struct sl_sim_device *sim, const void *mem, size_t bytes)
{
    for (size_t i = 0; i < sim->locked_host.n; i++) {
        const struct sl_sim_range *range = &sim->locked_host.items[i];
        if ((uintptr_t)mem >= range->begin && bytes <= range->bytes &&
            (uintptr_t)mem - range->begin <= range->bytes - bytes) {
            return true;
        }
    }
    return false;
}
