/* SPDX-License-Identifier: Apache-2.0
 *
 * The thread pool. One word, `ticket`, starts a run: its upper bits count runs, its lower bits say
 * how many threads take part. A worker that is not among them looks at nothing else and goes to
 * sleep. Each worker sleeps on a condition of its own, so a limited team wakes only its members.
 *
 * The barrier is a two-level tree: threads arrive at the counter of their group of four, the last
 * of each group at the root, the last of all opens the next phase. No line is then written by more
 * than four threads, which keeps the cost near that of two cache-line hand-overs a level.
 *
 * Waiting spins for about as long as a sleep would cost, then sleeps: a core that is left idle
 * takes over the thread that is waited for when a neighbour has taken its core. Yielding would not
 * do: a core that yields is still busy. Who completes something wakes those who sleep for it.
 */
#include "base/pool.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#include "base/clock.h"
#include "base/cores.h"
#include "base/crowd.h"
#include "base/error.h"
#include "base/mem.h"

#define CACHE_LINE 128 /* two lines: neighbours are fetched in pairs */
#define GROUP_THREADS 4
#define MAX_THREADS 1024
#define TICKET_BITS 16
#define TICKET_MASK ((UINT64_C(1) << TICKET_BITS) - 1)

/* How long to spin for the others of the team before sleeping, and for the next run: longer than
 * the gap between two shards of a token. With more threads than cores somebody needs this core. */
#define SPIN_NS 50000
#define IDLE_SPIN_NS 3000000
#define SPIN_NS_CROWDED 2000
/* Rounds of `pause` between looks at the clock. */
#define SPIN_ROUNDS 32
/* Time in runs between two looks at how long threads waited for a core, and barriers that came late
 * below which nothing is amiss: the scheduler's turns are some milliseconds. */
#define LOOK_NS 30000000
#define LATE_LIMIT 10

struct counter {
    _Alignas(CACHE_LINE) atomic_uint_fast64_t n;
};

/* What is known of a thread, the caller (0) too. */
struct worker {
    _Alignas(CACHE_LINE) atomic_bool asleep;
    pthread_mutex_t lock; /* guards the change of `asleep` against a lost wake-up */
    pthread_cond_t wake;
    pthread_t thread;
    struct sl_pool *pool;
    int index;
    bool started;
    bool synced;      /* lock and wake are initialized */
    atomic_int delay; /* handle of sl_cores_open_delay, of a yielding pool's workers; or -1 */
    uint64_t seen_delay_ns;
};

struct sl_pool {
    /* Written by the caller before `ticket`, read by the workers after it. */
    sl_pool_fn *fn;
    void *arg;
    int n_threads;
    int n_active; /* takes part in the next run; the caller's own */
    uint64_t spin_ns;
    uint64_t idle_spin_ns;
    bool quit; /* published by `ticket` too */
    bool yielding;
    struct sl_crowd crowd;
    int n_used;      /* of n_active */
    uint64_t run_ns; /* time in runs since the last look */

    _Alignas(CACHE_LINE) atomic_uint_fast64_t ticket;
    struct counter n_running; /* workers that have not finished this run */
    struct counter phase;     /* of the barrier */
    struct counter root;
    struct counter n_asleep; /* inside the barrier */
    struct counter n_late;   /* barriers that others slept for, since the last look */
    struct counter *groups;  /* [n_threads / GROUP_THREADS rounded up] */
    struct worker *workers;  /* [n_threads], entry 0 the caller's */
};

/* Index and team size of the thread that is inside a pool function. */
static _Thread_local int current_thread;
static _Thread_local int current_n_threads = 1;

static inline void pause_core(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory");
#endif
}

/* Spin until the word is no longer `old`; false when the time is over first. */
static bool spin_while(atomic_uint_fast64_t *word, uint64_t old, uint64_t limit_ns)
{
    uint64_t end = 0;
    for (;;) {
        for (int i = 0; i < SPIN_ROUNDS; i++) {
            if (atomic_load_explicit(word, memory_order_acquire) != old) {
                return true;
            }
            pause_core();
        }
        /* The clock is asked only when the wait is not a short one. */
        const uint64_t now = sl_clock_now_ns();
        end = end == 0 ? now + limit_ns : end;
        if (now >= end) {
            return false;
        }
    }
}

/* Announce first, then look once more: who changes the word stores it first and looks at `asleep`
 * then, so one of the two sees the other. Both need sequential consistency. */
static void sleep_while(struct worker *self, atomic_uint_fast64_t *word, uint64_t old)
{
    pthread_mutex_lock(&self->lock);
    atomic_store(&self->asleep, true);
    while (atomic_load(word) == old) {
        pthread_cond_wait(&self->wake, &self->lock);
    }
    atomic_store(&self->asleep, false);
    pthread_mutex_unlock(&self->lock);
}

/* Wake those of threads first .. end - 1 that sleep. The word that they wait for has changed. */
static void wake_threads(struct sl_pool *pool, int first, int end)
{
    for (int i = first; i < end; i++) {
        struct worker *worker = &pool->workers[i];
        if (atomic_load(&worker->asleep)) {
            pthread_mutex_lock(&worker->lock); /* it is inside its wait, or not yet at its look */
            pthread_mutex_unlock(&worker->lock);
            pthread_cond_signal(&worker->wake);
        }
    }
}

/* The last to arrive. */
static void open_phase(struct sl_pool *pool, uint64_t phase, int n_threads)
{
    atomic_store(&pool->phase.n, phase + 1);
    if (atomic_load(&pool->n_asleep.n) != 0) {
        atomic_fetch_add_explicit(&pool->n_late.n, 1, memory_order_relaxed);
        wake_threads(pool, 0, n_threads);
    }
}

void sl_pool_barrier(struct sl_pool *pool)
{
    const int n = current_n_threads;
    if (n == 1) {
        return;
    }
    /* The phase cannot move before this thread arrives. */
    const uint64_t phase = atomic_load_explicit(&pool->phase.n, memory_order_relaxed);
    const int group = current_thread / GROUP_THREADS;
    const uint64_t n_groups = ((uint64_t)n + GROUP_THREADS - 1) / GROUP_THREADS;
    const int left = n - group * GROUP_THREADS;
    const uint64_t members = (uint64_t)(left < GROUP_THREADS ? left : GROUP_THREADS);

    atomic_uint_fast64_t *const at = &pool->groups[group].n;
    if (atomic_fetch_add_explicit(at, 1, memory_order_acq_rel) == members - 1) {
        atomic_store_explicit(at, 0, memory_order_relaxed);
        if (atomic_fetch_add_explicit(&pool->root.n, 1, memory_order_acq_rel) == n_groups - 1) {
            atomic_store_explicit(&pool->root.n, 0, memory_order_relaxed);
            open_phase(pool, phase, n);
            return;
        }
    }
    if (!spin_while(&pool->phase.n, phase, pool->spin_ns)) {
        atomic_fetch_add(&pool->n_asleep.n, 1);
        sleep_while(&pool->workers[current_thread], &pool->phase.n, phase);
        atomic_fetch_sub(&pool->n_asleep.n, 1);
    }
}

/* Run the function as one thread of the team. */
static void run_as(struct sl_pool *pool, int thread, int n_threads)
{
    const int outer_thread = current_thread;
    const int outer_n_threads = current_n_threads;
    current_thread = thread;
    current_n_threads = n_threads;
    pool->fn(pool->arg, thread, n_threads);
    current_thread = outer_thread;
    current_n_threads = outer_n_threads;
}

static bool takes_part(uint64_t ticket, int thread)
{
    return (uint64_t)thread < (ticket & TICKET_MASK);
}

/* Wait for a ticket other than `seen`; asleep at once when the last run left this worker out. */
static uint64_t await_ticket(struct worker *self, uint64_t seen)
{
    struct sl_pool *pool = self->pool;
    if (!takes_part(seen, self->index) || !spin_while(&pool->ticket, seen, pool->idle_spin_ns)) {
        sleep_while(self, &pool->ticket, seen);
    }
    return atomic_load(&pool->ticket);
}

static void *worker_main(void *arg)
{
    struct worker *self = arg;
    struct sl_pool *pool = self->pool;
    uint64_t ticket = 0;
    if (pool->yielding) {
        atomic_store(&self->delay, sl_cores_open_delay());
    }
    for (;;) {
        ticket = await_ticket(self, ticket);
        if (!takes_part(ticket, self->index)) {
            continue;
        }
        if (pool->quit) {
            return NULL;
        }
        run_as(pool, self->index, (int)(ticket & TICKET_MASK));
        if (atomic_fetch_sub(&pool->n_running.n, 1) == 1) {
            wake_threads(pool, 0, 1);
        }
    }
}

/* Publish a run for the first n threads and wake those of them that sleep. */
static void issue_ticket(struct sl_pool *pool, int n)
{
    const uint64_t last = atomic_load_explicit(&pool->ticket, memory_order_relaxed);
    const uint64_t next = (((last >> TICKET_BITS) + 1) << TICKET_BITS) | (uint64_t)n;
    atomic_store(&pool->ticket, next);
    wake_threads(pool, 1, n);
}

/* Until all workers have finished. Only the last one wakes. */
static void await_workers(struct sl_pool *pool)
{
    uint64_t n;
    while ((n = atomic_load(&pool->n_running.n)) != 0) {
        if (!spin_while(&pool->n_running.n, n, pool->spin_ns)) {
            sleep_while(&pool->workers[0], &pool->n_running.n, n);
        }
    }
}

/* Use as many threads as have cores to themselves. */
static void look_at_neighbours(struct sl_pool *pool, uint64_t now_ns)
{
    uint64_t delay_ns = 0;
    for (int i = 1; i < pool->n_threads; i++) {
        struct worker *worker = &pool->workers[i];
        const uint64_t total = sl_cores_read_delay_ns(atomic_load(&worker->delay));
        delay_ns += total - worker->seen_delay_ns;
        worker->seen_delay_ns = total;
    }
    /* Waking up takes a while on idle cores too; a thread that shares its core makes others late.
     */
    const bool late = atomic_exchange(&pool->n_late.n, 0) >= LATE_LIMIT;
    const double lost = late ? (double)delay_ns / (double)pool->run_ns : 0.0;
    pool->n_used = sl_crowd_look(&pool->crowd, pool->n_active, lost, now_ns);
    pool->run_ns = 0;
}

static void run_team(struct sl_pool *pool, int n, sl_pool_fn *fn, void *arg)
{
    pool->fn = fn;
    pool->arg = arg;
    if (n > 1) {
        atomic_store_explicit(&pool->n_running.n, (uint64_t)n - 1, memory_order_relaxed);
        issue_ticket(pool, n);
    }
    run_as(pool, 0, n);
    await_workers(pool);
}

void sl_pool_run(struct sl_pool *pool, sl_pool_fn *fn, void *arg)
{
    if (!pool->yielding) {
        run_team(pool, pool->n_active, fn, arg);
        return;
    }
    const uint64_t start = sl_clock_now_ns();
    run_team(pool, pool->n_used, fn, arg);
    const uint64_t now = sl_clock_now_ns();
    pool->run_ns += now - start;
    if (pool->run_ns >= LOOK_NS) {
        look_at_neighbours(pool, now);
    }
}

static void init_worker(struct sl_pool *pool, int index)
{
    struct worker *worker = &pool->workers[index];
    worker->pool = pool;
    worker->index = index;
    pthread_mutex_init(&worker->lock, NULL);
    pthread_cond_init(&worker->wake, NULL);
    worker->synced = true;
    atomic_init(&worker->delay, -1);
}

static enum sluice_status start_worker(struct sl_pool *pool, int index, bool pin,
                                       struct sluice_error *err)
{
    struct worker *worker = &pool->workers[index];
    init_worker(pool, index);
    const int code = pthread_create(&worker->thread, NULL, worker_main, worker);
    SL_CHECK(code == 0, OUT_OF_MEMORY, err, "cannot start thread %d of %d: %s", index,
             pool->n_threads, code == EAGAIN ? "too many threads or no memory" : "refused");
    worker->started = true;
    if (pin) {
        sl_cores_pin(worker->thread, index);
    }
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_pool_create(struct sl_pool **out, const struct sl_pool_options *options,
                                  struct sluice_error *err)
{
    *out = NULL;
    const int n = options->n_threads ? options->n_threads : sl_pool_n_physical_cores();
    SL_CHECK(n >= 1 && n <= MAX_THREADS, INVALID_ARGUMENT, err,
             "a thread count of %d is not possible; use 1 to %d", n, MAX_THREADS);
    struct sl_pool *pool = sl_alloc_aligned(SL_MEM_BASE, sizeof *pool, CACHE_LINE);
    SL_CHECK(pool, OUT_OF_MEMORY, err, "no memory for a pool of %d threads", n);
    memset(pool, 0, sizeof *pool);
    pool->n_threads = n;
    pool->n_active = pool->n_used = n;
    pool->yielding = options->yielding;
    const bool crowded = n > sl_cores_n_allowed();
    pool->spin_ns = crowded ? SPIN_NS_CROWDED : SPIN_NS;
    pool->idle_spin_ns = crowded ? SPIN_NS_CROWDED : IDLE_SPIN_NS;

    enum sluice_status status = SLUICE_STATUS_OK;
    const size_t n_groups = ((size_t)n + GROUP_THREADS - 1) / GROUP_THREADS;
    const size_t groups_bytes = n_groups * sizeof *pool->groups;
    const size_t workers_bytes = (size_t)n * sizeof *pool->workers;
    pool->groups = sl_alloc_aligned(SL_MEM_BASE, groups_bytes, CACHE_LINE);
    pool->workers = sl_alloc_aligned(SL_MEM_BASE, workers_bytes, CACHE_LINE);
    if (pool->workers) { /* destruction reads it */
        memset(pool->workers, 0, workers_bytes);
    }
    if (!pool->groups || !pool->workers) {
        status =
            sl_error_set(err, SLUICE_STATUS_OUT_OF_MEMORY, "no memory for a pool of %d threads", n);
        goto out;
    }
    memset(pool->groups, 0, groups_bytes);
    init_worker(pool, 0);
    for (int i = 1; i < n; i++) {
        SL_TRY_OUT(start_worker(pool, i, options->pin, err));
    }
    *out = pool;
    return SLUICE_STATUS_OK;
out:
    sl_pool_destroy(&pool);
    return status;
}

void sl_pool_destroy(struct sl_pool **pool_ptr)
{
    struct sl_pool *pool = pool_ptr ? *pool_ptr : NULL;
    if (!pool) {
        return;
    }
    *pool_ptr = NULL;
    if (pool->workers) {
        /* Half-built pools have started a first part of the team only. */
        int n = 1;
        while (n < pool->n_threads && pool->workers[n].started) {
            n++;
        }
        pool->quit = true;
        issue_ticket(pool, n);
        for (int i = 1; i < n; i++) {
            pthread_join(pool->workers[i].thread, NULL);
        }
        for (int i = 0; i < pool->n_threads && pool->workers[i].synced; i++) {
            sl_cores_close_delay(atomic_load(&pool->workers[i].delay));
            pthread_cond_destroy(&pool->workers[i].wake);
            pthread_mutex_destroy(&pool->workers[i].lock);
        }
    }
    sl_free(pool->workers);
    sl_free(pool->groups);
    sl_free(pool);
}

int sl_pool_n_threads(const struct sl_pool *pool)
{
    return pool->n_active;
}

void sl_pool_limit(struct sl_pool *pool, int n_threads)
{
    const int most = n_threads < pool->n_threads ? n_threads : pool->n_threads;
    pool->n_active = pool->n_used = most > 1 ? most : 1;
    pool->crowd = (struct sl_crowd){0};
}

int sl_pool_n_physical_cores(void)
{
    return sl_cores_n_physical();
}
