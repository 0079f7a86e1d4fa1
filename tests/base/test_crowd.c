/* SPDX-License-Identifier: Apache-2.0
 *
 * The size of a team beside neighbours, on machines that are told in numbers: no clock, no threads.
 */
#include "base/crowd.h"
#include "test.h"

#define LOOK_NS 30000000
#define SECOND_NS UINT64_C(1000000000)

/* What a team of n loses where others keep `busy` of the cores busy all the time. */
static double lost_on(int n_cores, int busy, int n)
{
    const int over = n + busy - n_cores;
    return over > 0 ? 0.5 * (double)over : 0.0;
}

/* Looks for `seconds`; counts those with at most `most` threads, and the changes of size. */
struct story {
    struct sl_crowd crowd;
    uint64_t now_ns;
    int n_used;
    int n_changes;
    int looks, good;
};

static void go_on(struct story *s, int n_cores, int busy, int n_threads, int most, double seconds)
{
    s->looks = s->good = s->n_changes = 0;
    const uint64_t end = s->now_ns + (uint64_t)(seconds * (double)SECOND_NS);
    for (; s->now_ns < end; s->now_ns += LOOK_NS) {
        const int before = s->n_used;
        s->n_used = sl_crowd_look(&s->crowd, n_threads, lost_on(n_cores, busy, before), s->now_ns);
        assert_in_range(s->n_used, 1, n_threads);
        s->n_changes += s->n_used != before;
        s->looks++;
        s->good += s->n_used <= most;
    }
}

static void test_alone(void **state)
{
    (void)state;
    struct story s = {.n_used = 16};
    go_on(&s, 16, 0, 16, 16, 60.0);
    assert_int_equal(s.n_used, 16);
    assert_int_equal(s.n_changes, 0);
}

/* Beside k busy threads the team soon does without k, and tries ever more seldom. */
static void test_neighbours(void **state)
{
    (void)state;
    for (int busy = 1; busy <= 4; busy++) {
        struct story s = {.n_used = 16};
        go_on(&s, 16, busy, 16, 16 - busy, 0.5);
        assert_int_equal(s.n_used, 16 - busy);
        go_on(&s, 16, busy, 16, 16 - busy, 60.0);
        assert_true(s.good >= s.looks * 95 / 100);
        assert_true(s.n_changes <= 40);
    }
}

/* When they have gone, all threads are used again. */
static void test_neighbours_leave(void **state)
{
    (void)state;
    struct story s = {.n_used = 8};
    go_on(&s, 8, 2, 8, 6, 5.0);
    go_on(&s, 8, 0, 8, 8, 40.0);
    assert_int_equal(s.n_used, 8);
    go_on(&s, 8, 0, 8, 8, 20.0);
    assert_int_equal(s.n_changes, 0);
    /* And the next neighbour is met as the first was. */
    go_on(&s, 8, 1, 8, 7, 0.5);
    assert_int_equal(s.n_used, 7);
}

static void test_extremes(void **state)
{
    (void)state;
    struct story s = {.n_used = 2};
    go_on(&s, 2, 100, 2, 1, 5.0);
    assert_int_equal(s.n_used, 1);
    struct sl_crowd one = {0};
    for (int i = 0; i < 10; i++) {
        assert_int_equal(sl_crowd_look(&one, 1, 1e9, (uint64_t)i * LOOK_NS), 1);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_alone),
        cmocka_unit_test(test_neighbours),
        cmocka_unit_test(test_neighbours_leave),
        cmocka_unit_test(test_extremes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
