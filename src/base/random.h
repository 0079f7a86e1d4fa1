/* SPDX-License-Identifier: Apache-2.0 */
#ifndef SL_BASE_RANDOM_H
#define SL_BASE_RANDOM_H

#include <stdint.h>

/* The next number of a generator (xorshift of 64 bits), whose state is never 0. Good enough for
 * delays, test patterns and draws; not for sampling. */
static inline uint64_t sl_random_next(uint64_t *state)
{
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    return *state;
}

#endif
