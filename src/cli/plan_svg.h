/* SPDX-License-Identifier: Apache-2.0
 *
 * A plan as a picture, for `sluice plan --svg`.
 */
#ifndef SL_CLI_PLAN_SVG_H
#define SL_CLI_PLAN_SVG_H

#include "cli/engine.h"

enum sluice_status sl_plan_svg_write(const char *path, const struct sl_engine *e,
                                     const struct sl_plan *plan, struct sluice_error *err);

#endif
