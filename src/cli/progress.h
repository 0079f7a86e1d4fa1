/* SPDX-License-Identifier: Apache-2.0
 *
 * A progress bar for long work: one line on standard error that is drawn over itself, on a terminal
 * only. In a pipe or a file nothing is written.
 */
#ifndef SL_CLI_PROGRESS_H
#define SL_CLI_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

struct sl_progress {
    const char *label;
    bool bytes; /* counts are bytes: show sizes and a rate */
    bool shown; /* standard error is a terminal */
    bool drawn;
    uint64_t start_ns;
    uint64_t last_ns;
};

/* `label` is borrowed. Call finish (or fail) before anything else is printed. */
void sl_progress_start(struct sl_progress *p, const char *label, bool bytes);
/* Cheap: draws ten times a second at most. */
void sl_progress_update(struct sl_progress *p, uint64_t done, uint64_t total);
/* Wipe the line. */
void sl_progress_finish(struct sl_progress *p);

#endif
