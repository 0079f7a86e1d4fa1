/* SPDX-License-Identifier: Apache-2.0
 *
 * Measuring the machine: fills a `struct sl_profile` by running real ops on the CPU (cold caches,
 * alone and while copies run) and on the device. Takes some seconds; the result is cached per GPU,
 * CPU and thread count.
 */
#ifndef SL_EXEC_PROFILER_H
#define SL_EXEC_PROFILER_H

#include "base/pool.h"
#include "cpu/cpu.h"
#include "device/device.h"
#include "plan/profile.h"

struct sl_profiler_options {
    struct sl_device *device;             /* borrowed; NULL: CPU only */
    struct sl_pool *pool;                 /* borrowed; NULL: the caller's thread alone */
    const struct sl_cpu_kernels *kernels; /* NULL: the best of this machine */
    /* Called between measurements with 0 .. 1; true stops with CANCELLED. May be NULL. */
    bool (*progress)(void *user, const char *what, double fraction);
    void *user;
};

/* Measure now. The device must be idle; about 400 MiB of its memory are used meanwhile. */
enum sluice_status sl_profiler_run(struct sl_profile *out,
                                   const struct sl_profiler_options *options,
                                   struct sluice_error *err);

/* The cached profile of this machine, or measure and save it. A cache that cannot be read or
 * written costs a measurement, not an error. `measured` (may be NULL) tells which it was. */
enum sluice_status sl_profiler_get(struct sl_profile *out,
                                   const struct sl_profiler_options *options, bool *measured,
                                   struct sluice_error *err);

#endif
