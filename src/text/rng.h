/* SPDX-License-Identifier: Apache-2.0
 *
 * The random numbers of sampling: xoshiro256** with its state filled by splitmix64.
 * Source: Blackman and Vigna 2018, "Scrambled linear pseudorandom number generators".
 */
#ifndef SL_TEXT_RNG_H
#define SL_TEXT_RNG_H

#include <stdint.h>

struct sl_rng {
    uint64_t state[4];
};

void sl_rng_seed(struct sl_rng *rng, uint64_t seed);
uint64_t sl_rng_next(struct sl_rng *rng);
/* Evenly spread over [0, 1), 53 bits. */
double sl_rng_uniform(struct sl_rng *rng);

#endif
