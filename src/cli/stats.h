/* SPDX-License-Identifier: Apache-2.0
 *
 * The --stats report: speeds, where the model was, and the highest VRAM use.
 */
#ifndef SL_CLI_STATS_H
#define SL_CLI_STATS_H

#include <stdio.h>

#include "cli/engine.h"

/* What a generation measured. */
struct sl_run_times {
    int64_t n_prompt, n_generated;
    uint64_t prompt_ns, generated_ns;
};

/* `times` may be NULL. */
void sl_stats_print(FILE *out, const struct sl_engine *e, const struct sl_run_times *times);

#endif
