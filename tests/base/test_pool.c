/* SPDX-License-Identifier: Apache-2.0
 *
 * The thread pool: every thread runs once, barriers separate phases, limits and sleeping workers,
 * far more threads than cores, failing memory. The thread sanitizer runs this program too.
 */
#include <stdio.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/pool.h"
#include "test.h"

#define MAX_TEAM 64

static struct sl_pool *make_pool(int n, bool pin)
{
    struct sluice_error err;
    struct sl_pool *pool;
    const struct sl_pool_options options = {.n_threads = n, .pin = pin};
    assert_ok(sl_pool_create(&pool, &options, &err), err);
    return pool;
}

struct visits {
    int n[MAX_TEAM]; /* plain on purpose: the pool itself must order them */
    int n_threads;
};

static void visit(void *arg, int thread, int n_threads)
{
    struct visits *visits = arg;
    visits->n[thread]++;
    if (thread == 0) {
        visits->n_threads = n_threads;
    }
}

static void test_every_thread_once(void **state)
{
    (void)state;
    const int sizes[] = {1, 2, 3, 4, 5, 9, 33};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        struct sl_pool *pool = make_pool(sizes[i], i % 2 == 0);
        assert_int_equal(sl_pool_n_threads(pool), sizes[i]);
        struct visits visits = {0};
        const int n_runs = 300;
        for (int run = 0; run < n_runs; run++) {
            sl_pool_run(pool, visit, &visits);
        }
        for (int t = 0; t < sizes[i]; t++) {
            assert_int_equal(visits.n[t], n_runs);
        }
        assert_int_equal(visits.n_threads, sizes[i]);
        sl_pool_destroy(&pool);
        assert_null(pool);
    }
}

/* A sum that travels: in each round every thread adds what its neighbour wrote in the round
 * before. A barrier that lets anyone through too early gives another result. */
struct relay {
    struct sl_pool *pool;
    int n_rounds;
    uint32_t value[2][MAX_TEAM];
};

static void run_relay(void *arg, int thread, int n_threads)
{
    struct relay *relay = arg;
    for (int round = 0; round < relay->n_rounds; round++) {
        const uint32_t *from = relay->value[round % 2];
        uint32_t *to = relay->value[(round + 1) % 2];
        to[thread] = from[thread] * 3 + from[(thread + 1) % n_threads] + (uint32_t)thread;
        sl_pool_barrier(relay->pool);
    }
}

static void check_relay(struct sl_pool *pool, int n_threads, int n_rounds)
{
    struct relay relay = {.pool = pool, .n_rounds = n_rounds};
    uint32_t expected[2][MAX_TEAM];
    for (int t = 0; t < n_threads; t++) {
        relay.value[0][t] = expected[0][t] = (uint32_t)t + 1;
    }
    for (int round = 0; round < n_rounds; round++) {
        const uint32_t *from = expected[round % 2];
        for (int t = 0; t < n_threads; t++) {
            expected[(round + 1) % 2][t] = from[t] * 3 + from[(t + 1) % n_threads] + (uint32_t)t;
        }
    }
    sl_pool_run(pool, run_relay, &relay);
    assert_memory_equal(relay.value[n_rounds % 2], expected[n_rounds % 2],
                        (size_t)n_threads * sizeof(uint32_t));
}

static void test_barrier(void **state)
{
    (void)state;
    /* 17 and 40 threads are more than most machines that run this have: nobody may starve. */
    const int sizes[] = {1, 2, 4, 5, 8, 17, 40};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        struct sl_pool *pool = make_pool(sizes[i], false);
        for (int run = 0; run < 5; run++) {
            check_relay(pool, sizes[i], sizes[i] > 8 ? 60 + run : 500 + run);
        }
        sl_pool_destroy(&pool);
    }
}

static void test_limit(void **state)
{
    (void)state;
    struct sl_pool *pool = make_pool(6, false);
    struct visits visits = {0};
    const int limits[] = {6, 2, 5, 1, 3, 6, 4};
    int expected[MAX_TEAM] = {0};
    for (int i = 0; i < 70; i++) {
        const int n = limits[i % 7];
        sl_pool_limit(pool, n);
        assert_int_equal(sl_pool_n_threads(pool), n);
        sl_pool_run(pool, visit, &visits);
        assert_int_equal(visits.n_threads, n);
        for (int t = 0; t < n; t++) {
            expected[t]++;
        }
        check_relay(pool, n, 20);
    }
    assert_memory_equal(visits.n, expected, sizeof expected);
    sl_pool_destroy(&pool);
}

/* A limit that the pool has no threads for must neither hang a run nor leave it without a thread.
 */
static void test_limit_out_of_range(void **state)
{
    (void)state;
    for (int size = 1; size <= 4; size += 3) {
        struct sl_pool *pool = make_pool(size, false);
        const int limits[][2] = {{size + 1, size}, {1000000, size}, {0, 1}, {-3, 1}};
        for (size_t i = 0; i < sizeof limits / sizeof limits[0]; i++) {
            struct visits visits = {0};
            sl_pool_limit(pool, limits[i][0]);
            assert_int_equal(sl_pool_n_threads(pool), limits[i][1]);
            sl_pool_run(pool, visit, &visits);
            assert_int_equal(visits.n_threads, limits[i][1]);
            check_relay(pool, limits[i][1], 20);
        }
        sl_pool_destroy(&pool);
    }
}

/* However busy the machine is while this runs, a yielding team is whole in itself. */
static void test_yielding(void **state)
{
    (void)state;
    struct sluice_error err;
    struct sl_pool *pool;
    const struct sl_pool_options options = {.n_threads = 8, .yielding = true};
    assert_ok(sl_pool_create(&pool, &options, &err), err);
    const uint64_t start = sl_clock_now_ns();
    for (int i = 0; i < 20 || sl_clock_now_ns() - start < 200000000; i++) {
        struct visits visits = {0};
        sl_pool_run(pool, visit, &visits);
        assert_in_range(visits.n_threads, 1, 8);
        for (int t = 0; t < MAX_TEAM; t++) {
            assert_int_equal(visits.n[t], t < visits.n_threads);
        }
    }
    assert_int_equal(sl_pool_n_threads(pool), 8);
    sl_pool_destroy(&pool);
}

/* Runs after pauses long enough for the workers to sleep, so that waking is tested too; the
 * pauses vary to hit the moment of falling asleep. */
static void test_sleeping_workers(void **state)
{
    (void)state;
    struct sl_pool *pool = make_pool(4, false);
    struct visits visits = {0};
    const int n_runs = 60;
    for (int run = 0; run < n_runs; run++) {
        sl_clock_sleep_ns((uint64_t)(run % 12) * 100000);
        sl_pool_run(pool, visit, &visits);
    }
    for (int t = 0; t < 4; t++) {
        assert_int_equal(visits.n[t], n_runs);
    }
    sl_pool_destroy(&pool);
}

/* A pool used inside another pool's function, as when a device thread runs operators. */
struct nest {
    struct sl_pool *outer;
    struct sl_pool *inner[2];
    struct visits visits[2];
};

static void run_nested(void *arg, int thread, int n_threads)
{
    (void)n_threads;
    struct nest *nest = arg;
    sl_pool_run(nest->inner[thread], visit, &nest->visits[thread]);
    sl_pool_barrier(nest->outer);
    sl_pool_run(nest->inner[1 - thread], visit, &nest->visits[1 - thread]);
}

static void test_nested_pools(void **state)
{
    (void)state;
    struct nest nest = {.outer = make_pool(2, false)};
    nest.inner[0] = make_pool(3, false);
    nest.inner[1] = make_pool(2, false);
    for (int i = 0; i < 20; i++) {
        sl_pool_run(nest.outer, run_nested, &nest);
    }
    assert_int_equal(nest.visits[0].n[2], 40);
    assert_int_equal(nest.visits[1].n[1], 40);
    sl_pool_destroy(&nest.inner[0]);
    sl_pool_destroy(&nest.inner[1]);
    sl_pool_destroy(&nest.outer);
}

static void test_bad_options(void **state)
{
    (void)state;
    struct sluice_error err;
    struct sl_pool *pool = (struct sl_pool *)&err;
    const struct sl_pool_options options = {.n_threads = -2};
    assert_status(sl_pool_create(&pool, &options, &err), INVALID_ARGUMENT);
    assert_mentions(err, "-2");
    assert_null(pool);
    const struct sl_pool_options many = {.n_threads = 1 << 20};
    assert_status(sl_pool_create(&pool, &many, &err), INVALID_ARGUMENT);
    sl_pool_destroy(NULL);
    sl_pool_destroy(&pool);

    const struct sl_pool_options all = {0};
    assert_true(sl_pool_n_physical_cores() >= 1);
    assert_ok(sl_pool_create(&pool, &all, &err), err);
    assert_int_equal(sl_pool_n_threads(pool), sl_pool_n_physical_cores());
    sl_pool_destroy(&pool);
}

static void test_memory_faults(void **state)
{
    (void)state;
    struct sluice_error err;
    const struct sl_pool_options options = {.n_threads = 3};
    const size_t blocks = sl_mem_n_blocks();
    bool fired = true;
    for (int n = 0; fired; n++) {
        struct sl_pool *pool;
        sl_mem_fail_after(n, false);
        const enum sluice_status status = sl_pool_create(&pool, &options, &err);
        fired = sl_mem_fault_fired();
        sl_mem_fail_after(-1, false);
        assert_int_equal(status, fired ? SLUICE_STATUS_OUT_OF_MEMORY : SLUICE_STATUS_OK);
        sl_pool_destroy(&pool);
        assert_int_equal(sl_mem_n_blocks(), blocks);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_thread_once),
        cmocka_unit_test(test_barrier),
        cmocka_unit_test(test_limit),
        cmocka_unit_test(test_limit_out_of_range),
        cmocka_unit_test(test_yielding),
        cmocka_unit_test(test_sleeping_workers),
        cmocka_unit_test(test_nested_pools),
        cmocka_unit_test(test_bad_options),
        cmocka_unit_test(test_memory_faults),
    };
    return cmocka_run_group_tests_name("pool", tests, NULL, NULL);
}
