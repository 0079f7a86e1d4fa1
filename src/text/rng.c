/* SPDX-License-Identifier: Apache-2.0
 *
 * Random numbers; see rng.h.
 */
#include "text/rng.h"

static uint64_t rotate_left(uint64_t x, int k)
{
    return (x << k) | (x >> (64 - k));
}

void sl_rng_seed(struct sl_rng *rng, uint64_t seed)
{
    for (int i = 0; i < 4; i++) {
        seed += UINT64_C(0x9E3779B97F4A7C15);
        uint64_t z = seed;
        z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
        z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
        rng->state[i] = z ^ (z >> 31);
    }
}

uint64_t sl_rng_next(struct sl_rng *rng)
{
    uint64_t *s = rng->state;
    const uint64_t result = rotate_left(s[1] * 5, 7) * 9;
    const uint64_t t = s[1] << 17;
    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = rotate_left(s[3], 45);
    return result;
}

double sl_rng_uniform(struct sl_rng *rng)
{
    return (double)(sl_rng_next(rng) >> 11) * 0x1p-53;
}
