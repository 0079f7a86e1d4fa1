/* SPDX-License-Identifier: Apache-2.0
 *
 * What timing a model on the CPU (calibrate_host.c) and on the device (calibrate_device.c) have in
 * common, and calibrate.c keeps.
 */
#ifndef SL_EXEC_CALIBRATE_INTERNAL_H
#define SL_EXEC_CALIBRATE_INTERNAL_H

#include "exec/calibrate.h"
#include "plan/plan.h"

#define SL_CAL_MOST_TOKENS 2048 /* larger tiers take the figures of this one */

/* Of a shared mixture two amounts of experts are timed, all that a pass uses and a quarter: the
 * line through both is what the planner needs. In the terms of struct sl_op_divide. */
#define SL_CAL_ALL SL_DIVIDE_ALL
#define SL_CAL_FEW (SL_DIVIDE_ALL / 4)

struct sl_cal {
    struct sl_profile *profile;
    const struct sl_model *model;
    const struct sl_calibrate_options *o;
    float *noise;              /* hidden states [SL_CAL_MOST_TOKENS, n_embd], all different */
    int32_t *pos;              /* [SL_CAL_MOST_TOKENS] */
    uint8_t *none;             /* [n_experts] zeros: no expert is at hand */
    struct sl_shard_bind bind; /* of the side that is measured */
    struct sluice_error *err;
};

/* What passes need beside the weights, in this order in one block of memory. */
struct sl_cal_sizes {
    size_t hidden, workspace, logits, pos, kv, none, scratch; /* scratch is apart */
};

static inline size_t sl_cal_align(size_t n)
{
    return (n + 255) & ~(size_t)255;
}

static inline bool sl_cal_is_mixture(const struct sl_cal *c)
{
    return c->model->shards[1].expert_bytes > 0;
}

/* For passes of n tokens that begin in any of n_rows rows of hidden states. */
struct sl_cal_sizes sl_cal_sizes_of(const struct sl_cal *c, int32_t n, int32_t n_rows);
size_t sl_cal_total(const struct sl_cal_sizes *s);
/* Operands at `at`; returns where `none` lies. */
uint8_t *sl_cal_carve(struct sl_cal *c, uint8_t *at, const struct sl_cal_sizes *s);
void sl_cal_set_pass(struct sl_cal *c, int32_t n);

/* What the machine's profile makes of the list that `bind` gives for a shard. */
double sl_cal_expected_ns(const struct sl_cal *c, enum sl_unit unit, const struct sl_shard *shard);
/* The ratio of both becomes the factor of a work in a tier. */
void sl_cal_keep(struct sl_cal *c, enum sl_unit unit, enum sl_work work, int32_t tier,
                 double measured_ns, double expected_ns);
/* The same for fixed cost and experts, from times of a few and of all; `part_few` and `part_all`
 * are the parts of the experts that an average pass of the tier reads. */
void sl_cal_keep_experts(struct sl_cal *c, enum sl_unit unit, int32_t tier, double few_ns,
                         double part_few, double all_ns, double part_all);
/* Tiers from n_measured on take the factors of the one before. */
void sl_cal_extend(struct sl_cal *c, enum sl_unit unit, int32_t n_measured);

enum sluice_status sl_calibrate_host(struct sl_cal *c);
/* Tiers that can be measured within the budget; and do it. */
int32_t sl_calibrate_device_tiers(const struct sl_cal *c);
enum sluice_status sl_calibrate_device(struct sl_cal *c);

#endif
