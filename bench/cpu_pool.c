/* SPDX-License-Identifier: Apache-2.0
 *
 * What the thread pool costs, alone and beside busy neighbours.
 *
 *   cpu_pool [--threads N] [--neighbours N] [--work-ns N] [--ms N] [--yielding 0]
 *
 * First an empty barrier and an empty run, in nanoseconds. Then rounds of --work-ns of work and a
 * barrier, as the operators of a token are, alone and with --neighbours threads that compute
 * without a pause: how much of the speed is left, with a pool that yields to them (--yielding 0:
 * with one that does not). A neighbour takes its share of a core, so with as many threads as cores
 * about half is what is left when each round waits for the thread that shares.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/cores.h"
#include "base/pool.h"

#define MAX_NEIGHBOURS 64

struct rounds {
    struct sl_pool *pool;
    int n;
    uint64_t turns; /* of the loop that stands for work */
};

static volatile uint64_t sink;
static atomic_bool stop;

/* Work that no clock is asked for. */
static uint64_t work(uint64_t turns)
{
    uint64_t x = turns;
    for (uint64_t i = 0; i < turns; i++) {
        x = x * 6364136223846793005u + 1442695040888963407u;
    }
    return x;
}

static void run_rounds(void *arg, int thread, int n_threads)
{
    (void)thread;
    (void)n_threads;
    const struct rounds *r = arg;
    uint64_t x = 0;
    for (int i = 0; i < r->n; i++) {
        x += work(r->turns);
        sl_pool_barrier(r->pool);
    }
    if (x == 1) {
        sink = x;
    }
}

static void nothing(void *arg, int thread, int n_threads)
{
    (void)arg;
    (void)thread;
    (void)n_threads;
}

/* Nanoseconds of a round: the best of as many runs as fit the time, so that a preemption by
 * something else does not count; with `all` the mean, since neighbours are what is measured. */
static double time_rounds(struct rounds *r, int ms, bool all)
{
    double best = 1e30;
    double sum = 0.0;
    int n = 0;
    const uint64_t begin = sl_clock_now_ns();
    while (n < 3 || sl_clock_now_ns() - begin < (uint64_t)ms * 1000000) {
        const uint64_t start = sl_clock_now_ns();
        sl_pool_run(r->pool, run_rounds, r);
        const double ns = (double)(sl_clock_now_ns() - start) / r->n;
        best = ns < best ? ns : best;
        sum += ns;
        n++;
    }
    return all ? sum / n : best;
}

static double time_runs(struct sl_pool *pool, int ms)
{
    double best = 1e30;
    const uint64_t begin = sl_clock_now_ns();
    while (sl_clock_now_ns() - begin < (uint64_t)ms * 1000000) {
        const uint64_t start = sl_clock_now_ns();
        for (int i = 0; i < 100; i++) {
            sl_pool_run(pool, nothing, NULL);
        }
        const double ns = (double)(sl_clock_now_ns() - start) / 100.0;
        best = ns < best ? ns : best;
    }
    return best;
}

static void *neighbour(void *arg)
{
    (void)arg;
    while (!atomic_load_explicit(&stop, memory_order_relaxed)) {
        sink = work(10000);
    }
    return NULL;
}

static void run(struct sl_pool *pool, int n_neighbours, double work_ns, int ms)
{
    const uint64_t start = sl_clock_now_ns();
    sink = work(10000000);
    const double turn_ns = (double)(sl_clock_now_ns() - start) / 1e7;
    struct rounds empty = {.pool = pool, .n = 1000};
    struct rounds full = {.pool = pool, .n = 20, .turns = (uint64_t)(work_ns / turn_ns)};
    printf("%d threads on %d processors\n", sl_pool_n_threads(pool), sl_cores_n_allowed());
    printf("barrier %.0f ns, mean %.0f ns\n", time_rounds(&empty, ms, false),
           time_rounds(&empty, ms, true));
    printf("run %.0f ns\n", time_runs(pool, ms));
    const double alone = time_rounds(&full, ms, true);
    pthread_t threads[MAX_NEIGHBOURS];
    int started = 0;
    while (started < n_neighbours &&
           pthread_create(&threads[started], NULL, neighbour, NULL) == 0) {
        started++;
    }
    const double beside = time_rounds(&full, ms, true);
    atomic_store(&stop, true);
    for (int i = 0; i < started; i++) {
        pthread_join(threads[i], NULL);
    }
    printf("round of %.0f ns of work: alone %.0f ns, beside %d neighbours %.0f ns (%.0f %% of the "
           "speed)\n",
           work_ns, alone, started, beside, 100.0 * alone / beside);
}

int main(int argc, char **argv)
{
    int threads = 0, neighbours = 1, work_ns = 20000, ms = 300, yielding = 1;
    for (int i = 1; i < argc; i += 2) {
        int *value = strcmp(argv[i], "--threads") == 0      ? &threads
                     : strcmp(argv[i], "--neighbours") == 0 ? &neighbours
                     : strcmp(argv[i], "--work-ns") == 0    ? &work_ns
                     : strcmp(argv[i], "--ms") == 0         ? &ms
                     : strcmp(argv[i], "--yielding") == 0   ? &yielding
                                                            : NULL;
        if (value == NULL || i + 1 == argc || (*value = atoi(argv[i + 1])) < 0) {
            fputs("usage: cpu_pool [--threads N] [--neighbours N] [--work-ns N] [--ms N] "
                  "[--yielding 0]\n",
                  stderr);
            return 2;
        }
    }
    struct sluice_error err = {0};
    struct sl_pool *pool;
    const struct sl_pool_options options = {.n_threads = threads, .yielding = yielding != 0};
    if (sl_pool_create(&pool, &options, &err) != SLUICE_STATUS_OK) {
        fprintf(stderr, "cpu_pool: %s\n", err.message);
        return 1;
    }
    run(pool, neighbours < MAX_NEIGHBOURS ? neighbours : MAX_NEIGHBOURS, work_ns, ms);
    sl_pool_destroy(&pool);
    return 0;
}
