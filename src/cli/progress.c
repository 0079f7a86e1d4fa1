/* SPDX-License-Identifier: Apache-2.0
 *
 * The progress bar.
 */
#include "cli/progress.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "cli/units.h"

#define BAR_CELLS 24
#define REDRAW_NS 100000000u

void sl_progress_start(struct sl_progress *p, const char *label, bool bytes)
{
    *p = (struct sl_progress){.label = label,
                              .bytes = bytes,
                              .shown = isatty(STDERR_FILENO) == 1,
                              .start_ns = sl_clock_now_ns()};
}

void sl_progress_update(struct sl_progress *p, uint64_t done, uint64_t total)
{
    const uint64_t now = sl_clock_now_ns();
    if (!p->shown || total == 0 || (p->drawn && now - p->last_ns < REDRAW_NS)) {
        return;
    }
    p->last_ns = now;
    p->drawn = true;
    const double share = done >= total ? 1 : (double)done / (double)total;
    const double seconds = (double)(now - p->start_ns) * 1e-9;
    char bar[BAR_CELLS + 1];
    const int full = (int)(share * BAR_CELLS);
    memset(bar, '#', (size_t)full);
    memset(bar + full, '.', (size_t)(BAR_CELLS - full));
    bar[BAR_CELLS] = '\0';
    char rate[48] = "";
    if (p->bytes && seconds > 0.2) {
        char text[32];
        snprintf(rate, sizeof(rate), "  %s/s",
                 sl_bytes_format(text, sizeof(text), (uint64_t)((double)done / seconds)));
    }
    char left[32] = "";
    if (share > 0.01 && seconds > 1) {
        snprintf(left, sizeof(left), "  %.0f s left", seconds * (1 - share) / share);
    }
    /* Back to the start, draw, wipe what a longer line left. */
    fprintf(stderr, "\r%s [%s] %3.0f%%%s%s\033[K", p->label, bar, share * 100, rate, left);
    fflush(stderr);
}

void sl_progress_finish(struct sl_progress *p)
{
    if (p->drawn) {
        fputs("\r\033[K", stderr);
        fflush(stderr);
        p->drawn = false;
    }
}
