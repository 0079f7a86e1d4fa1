/* SPDX-License-Identifier: Apache-2.0
 *
 * The thread pool: a fixed team that runs one function at a time, the caller being thread 0.
 * Workers spin for a short while after a run and then sleep, so an idle pool costs nothing;
 * barriers spin with back-off and yield to a busy neighbour.
 */
#ifndef SL_BASE_POOL_H
#define SL_BASE_POOL_H

#include <stdbool.h>

#include <sluice/status.h>

struct sl_pool;

struct sl_pool_options {
    int n_threads; /* 1.. (1: no workers, everything runs in the caller); 0: physical cores */
    bool pin;      /* pin thread i to the i-th allowed physical core */
    bool yielding; /* use fewer threads while other programs keep some from their cores */
};

/* What each thread runs. `thread` is 0 .. n_threads - 1; n_threads is at most what
 * sl_pool_n_threads says, and fewer when a yielding pool finds the machine busy. */
typedef void sl_pool_fn(void *arg, int thread, int n_threads);

enum sluice_status sl_pool_create(struct sl_pool **out, const struct sl_pool_options *options,
                                  struct sluice_error *err);
void sl_pool_destroy(struct sl_pool **pool);

/* Run `fn` on every thread of the team and return when all have. One caller at a time. */
void sl_pool_run(struct sl_pool *pool, sl_pool_fn *fn, void *arg);
/* Inside `fn` only: wait until every thread of the team is here. All threads must call it the
 * same number of times. What was written before is visible after. */
void sl_pool_barrier(struct sl_pool *pool);
int sl_pool_n_threads(const struct sl_pool *pool);
/* Use only the first n threads from the next run on; at least one, at most all that there are. */
void sl_pool_limit(struct sl_pool *pool, int n_threads);

/* Physical cores this process may use (hyper-threads and efficiency cores left out), at least 1. */
int sl_pool_n_physical_cores(void);

#endif
