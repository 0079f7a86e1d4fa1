/* SPDX-License-Identifier: Apache-2.0
 *
 * Monotonic time. Unlike the wall clock it never steps, so differences are always durations.
 */
#include "base/clock.h"

#include <errno.h>
#include <time.h>

#define NS_PER_S UINT64_C(1000000000)

uint64_t sl_clock_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * NS_PER_S + (uint64_t)now.tv_nsec;
}

void sl_clock_sleep_ns(uint64_t ns)
{
    struct timespec left = {.tv_sec = (time_t)(ns / NS_PER_S), .tv_nsec = (long)(ns % NS_PER_S)};
    while (nanosleep(&left, &left) != 0 && errno == EINTR) {
    }
}
