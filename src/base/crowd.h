/* SPDX-License-Identifier: Apache-2.0
 *
 * How many threads of a team are worth using while other programs want the cores too. A team whose
 * threads wait for each other is as slow as the one that shares its core; without that thread it is
 * slower by its share only.
 *
 * The team shrinks by what its threads have spent waiting for a core, and tries one more thread
 * from time to time: soon at first, then ever more seldom while that fails.
 */
#ifndef SL_BASE_CROWD_H
#define SL_BASE_CROWD_H

#include <stdint.h>

struct sl_crowd {
    int n_missing; /* threads that the team does without */
    uint64_t next_try_ns;
    uint64_t patience_ns; /* until the next try */
};

/* A new look at a team of at most n_threads: `lost` is how many threads' worth of time its threads
 * waited for a core since the last look. Returns how many to use from now on. */
int sl_crowd_look(struct sl_crowd *crowd, int n_threads, double lost, uint64_t now_ns);

#endif
