/* SPDX-License-Identifier: Apache-2.0 */
#ifndef SL_BASE_CLOCK_H
#define SL_BASE_CLOCK_H

#include <stdint.h>

/* Monotonic time in nanoseconds. Thread-safe. */
uint64_t sl_clock_now_ns(void);
void sl_clock_sleep_ns(uint64_t ns);

#endif
