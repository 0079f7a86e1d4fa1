/* SPDX-License-Identifier: Apache-2.0
 *
 * What holds for every plan, worked out from outside: the VRAM map, placements, homes of the cache,
 * steps and predictions.
 */
#ifndef SL_TESTS_PLAN_PLAN_CHECK_H
#define SL_TESTS_PLAN_PLAN_CHECK_H

#include "plan/plan.h"

/* The test fails when one of them does not hold. */
void check_plan(const struct sl_plan *plan, const struct sl_model *model);

#endif
