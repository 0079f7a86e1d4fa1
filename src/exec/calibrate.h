/* SPDX-License-Identifier: Apache-2.0
 *
 * The profile of a model on a machine: the shards of the model, as the lists of operators that
 * passes run, timed on the CPU and on the device beside what the machine's profile makes of them.
 * The ratio goes into the profile, by kind of work and tier (struct sl_profile.work_factor).
 * Takes about a second; kept like the machine's profile.
 */
#ifndef SL_EXEC_CALIBRATE_H
#define SL_EXEC_CALIBRATE_H

#include "base/pool.h"
#include "cpu/cpu.h"
#include "device/device.h"
#include "model/model.h"
#include "plan/profile.h"

struct sl_calibrate_options {
    struct sl_device *device;             /* borrowed, idle; NULL: CPU only */
    struct sl_pool *pool;                 /* borrowed; NULL: the caller's thread alone */
    const struct sl_cpu_kernels *kernels; /* NULL: the best of this machine */
    uint64_t budget_bytes;                /* of VRAM: what does not fit is not measured */
    /* How long the device works before each of the long passes is timed, whose speed is that of a
     * device that is warm; 0: not at all. */
    double load_ns;
};

/* Measure now. Tiers that were not measured take the figures of the last one that was. */
enum sluice_status sl_calibrate_run(struct sl_profile *profile, const struct sl_model *model,
                                    const struct sl_calibrate_options *options,
                                    struct sluice_error *err);

/* `profile` of this machine becomes that of the model: the kept one, or measured and kept. Nothing
 * is done for a simulated device. What cannot be measured or kept is a warning: plans are made with
 * the machine's profile then. */
void sl_calibrate_get(struct sl_profile *profile, const struct sl_model *model,
                      const struct sl_calibrate_options *options);
/* Keep factors that passes have corrected, in the place of those that sl_calibrate_get gave. */
void sl_calibrate_keep(const struct sl_profile *profile, const struct sl_model *model,
                       const struct sl_calibrate_options *options);
/* Only the kept one, if there is one. */
void sl_calibrate_load(struct sl_profile *profile, const struct sl_model *model);

#endif
