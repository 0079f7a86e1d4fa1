/* SPDX-License-Identifier: Apache-2.0
 *
 * The step compiler and the simulator. Compiled steps are walked as the executor would run them:
 * what is copied, computed and moved, in which order, and whether bytes of the ring are ever
 * overwritten before their last use. The simulator is held to a second one that moves a clock from
 * event to event and keeps real queues, and to cases worked out by hand.
 */
#include "test.h"

#include <math.h>

#include "steps_walk.h"

#define N_CASES 4000

/* xorshift64*: the seed is the case's number, named in every failure. */
static uint64_t rng_state;

static uint32_t rng_below(uint32_t n)
{
    rng_state ^= rng_state >> 12;
    rng_state ^= rng_state << 25;
    rng_state ^= rng_state >> 27;
    return (uint32_t)((rng_state * UINT64_C(2685821657736338717)) >> 33) % n;
}

/* Random placements, with one kind of them left out now and then; a ring between the largest
 * streamed item and a little more than all of them. */
static void make_program(struct program *p, int number)
{
    memset(p, 0, sizeof *p);
    p->name = "case";
    p->number = number;
    rng_state = (uint64_t)number * 7919 + 1;
    p->n_shards = 1 + (int32_t)rng_below(MAX_SHARDS);
    const uint32_t left_out = rng_below(SL_N_PLACEMENTS + 1);
    const uint32_t largest = 1 + rng_below(60);
    size_t most = 0, all = 0;
    for (int32_t i = 0; i < p->n_shards; i++) {
        p->placement[i] = (uint8_t)rng_below(SL_N_PLACEMENTS);
        if (p->placement[i] == left_out) {
            p->placement[i] = SL_PLACE_STREAMED;
        }
        p->item_bytes[i] = 1 + rng_below(largest);
        if (sl_place_uses_ring(p->placement[i])) {
            most = p->item_bytes[i] > most ? p->item_bytes[i] : most;
            all += p->item_bytes[i];
        }
    }
    p->ring_bytes = most + rng_below((uint32_t)(all - most) + 8);
}

static void compile(struct program *p)
{
    size_t scratch[2 * MAX_SHARDS];
    memset(scratch, 0xa5, sizeof scratch);
    p->n_steps = sl_steps_compile(p->placement, p->item_bytes, p->n_shards, p->ring_bytes, p->steps,
                                  scratch);
    CHECK(p, p->n_steps > 0 && p->n_steps <= SL_STEPS_PER_SHARD * p->n_shards);
}

static void test_random_programs(void **state)
{
    (void)state;
    static struct program p;
    int n_waits = 0, n_copies = 0;
    for (int number = 0; number < N_CASES; number++) {
        struct walk w;
        make_program(&p, number);
        compile(&p);
        walk_program(&p, &w);
        size_t all = 0;
        for (int32_t i = 0; i < p.n_shards; i++) {
            CHECK(&p, w.copied[i] == sl_place_uses_ring(p.placement[i]));
            all += w.copied[i] ? p.item_bytes[i] : 0;
            n_copies += w.copied[i];
        }
        /* A ring that holds everything is never waited for. */
        CHECK(&p, all > p.ring_bytes || w.waited == -1);
        for (int32_t k = 0; k < p.n_steps; k++) {
            n_waits += p.steps[k].after >= 0;
        }
    }
    print_message("%d copies, %d of them wait\n", n_copies, n_waits);
    assert_true(n_waits > N_CASES && n_copies > n_waits);
}

static void test_ring_too_small(void **state)
{
    (void)state;
    static struct program p;
    size_t scratch[2 * MAX_SHARDS];
    int n_refused = 0;
    for (int number = 0; number < 200; number++) {
        make_program(&p, number);
        size_t most = 0;
        for (int32_t i = 0; i < p.n_shards; i++) {
            if (sl_place_uses_ring(p.placement[i]) && p.item_bytes[i] > most) {
                most = p.item_bytes[i];
            }
        }
        if (most > 0) {
            CHECK(&p, sl_steps_compile(p.placement, p.item_bytes, p.n_shards, most - 1, p.steps,
                                       scratch) == -1);
            p.ring_bytes = most; /* and the smallest that must do, does */
            compile(&p);
            struct walk w;
            walk_program(&p, &w);
            n_refused++;
        }
    }
    assert_true(n_refused > 100);
}

/* Two slots for items of one size: the published double buffer. */
static void test_two_slots(void **state)
{
    (void)state;
    struct program p = {.name = "two slots",
                        .n_shards = 4,
                        .placement = {1, 1, 1, 1},
                        .item_bytes = {10, 10, 10, 10},
                        .ring_bytes = 20};
    static const struct sl_step wanted[] = {
        {SL_STEP_COPY, 0, -1, 0}, {SL_STEP_COPY, 1, -1, 10}, {SL_STEP_HIDDEN_UP, 0, -1, 0},
        {SL_STEP_GPU, 0, -1, 0},  {SL_STEP_COPY, 2, 0, 0},   {SL_STEP_GPU, 1, -1, 10},
        {SL_STEP_COPY, 3, 1, 10}, {SL_STEP_GPU, 2, -1, 0},   {SL_STEP_GPU, 3, -1, 10},
    };
    compile(&p);
    assert_int_equal(p.n_steps, sizeof wanted / sizeof wanted[0]);
    for (int32_t k = 0; k < p.n_steps; k++) {
        assert_int_equal(p.steps[k].kind, wanted[k].kind);
        assert_int_equal(p.steps[k].shard, wanted[k].shard);
        assert_int_equal(p.steps[k].after, wanted[k].after);
        if (wanted[k].kind == SL_STEP_COPY || wanted[k].kind == SL_STEP_GPU) {
            assert_int_equal(p.steps[k].ring_offset, wanted[k].ring_offset);
        }
    }
}

/* One thing on an in-order queue of the second simulator. */
struct item {
    double length;
    const bool *waits_for; /* NULL: only for the one before */
    bool *sets[2];
};

struct queue {
    struct item items[SL_STEPS_PER_SHARD * MAX_SHARDS];
    int32_t n, next; /* issued; finished */
    bool busy;
    double until, total;
};

/* Engines that each do one thing at a time, and a clock. */
struct clockwork {
    const struct program *p;
    const struct sl_shard_cost *cost;
    const struct sl_hop_cost *hop;
    struct queue copy, gpu, download, choice;
    bool routed[MAX_SHARDS], chosen[MAX_SHARDS];
    bool ready[MAX_SHARDS], computed[MAX_SHARDS], done[MAX_SHARDS];
    int32_t pc;
    bool host_busy;
    bool replaying; /* the step before is part of a recording */
    double now, host_until, host_total;
};

static void queue_add(struct queue *q, struct item item)
{
    q->items[q->n++] = item;
}

static void queue_gpu(struct clockwork *c, int32_t i)
{
    const struct sl_shard_cost *const cost = &c->cost[i];
    const bool streamed = c->p->placement[i] == SL_PLACE_STREAMED;
    const bool downloads = streamed && cost->download_ns > 0;
    queue_add(&c->gpu, (struct item){cost->gpu_ns,
                                     streamed ? &c->ready[i] : NULL,
                                     {&c->computed[i], downloads ? NULL : &c->done[i]}});
    if (downloads) {
        queue_add(&c->download,
                  (struct item){cost->download_ns, &c->computed[i], {&c->done[i], NULL}});
    }
}

static void queue_copy(struct clockwork *c, const struct sl_step *step)
{
    queue_add(&c->copy, (struct item){c->cost[step->shard].copy_ns,
                                      step->after >= 0 ? &c->done[step->after] : NULL,
                                      {&c->ready[step->shard], NULL}});
}

static void queue_own(struct clockwork *c, int32_t i)
{
    const bool fed = c->p->placement[i] == SL_PLACE_FED;
    queue_add(&c->gpu, (struct item){c->cost[i].own_ns, fed ? &c->ready[i] : NULL, {&c->done[i]}});
}

/* What queueing GPU work takes: a recording costs one launch, and that is part of the hop where the
 * other side came before. */
static double queueing(struct clockwork *c, const struct sl_step *step, bool in_recording)
{
    const double each = c->cost[step->shard].issue_ns;
    const bool first = !c->replaying;
    c->replaying = in_recording;
    if (c->hop->graph_ns == 0) {
        return step->kind == SL_STEP_OWN ? 0 : each;
    }
    return !in_recording ? each : first && step->kind != SL_STEP_OWN ? c->hop->graph_ns : 0;
}

/* The driver thread takes the next step if it can at this moment. */
static bool host_advance(struct clockwork *c)
{
    if (c->host_busy) {
        if (c->now < c->host_until) {
            return false;
        }
        c->host_busy = false;
        const struct sl_step *const step = &c->p->steps[c->pc++];
        if (step->kind == SL_STEP_COPY) {
            queue_copy(c, step);
        } else if (step->kind == SL_STEP_OWN) {
            queue_own(c, step->shard);
        } else if (step->kind == SL_STEP_GPU) {
            queue_gpu(c, step->shard);
        } else if (step->kind == SL_STEP_ROUTE) {
            const int32_t i = step->shard;
            queue_add(&c->gpu, (struct item){c->cost[i].route_ns, NULL, {&c->routed[i], NULL}});
            if (c->cost[i].others_ns > 0) {
                queue_add(&c->choice,
                          (struct item){c->hop->down_ns, &c->routed[i], {&c->chosen[i], NULL}});
            }
        }
        return true;
    }
    if (c->pc == c->p->n_steps) {
        return false;
    }
    const struct sl_step *const step = &c->p->steps[c->pc];
    double length = 0;
    switch (step->kind) {
    case SL_STEP_COPY:
        length = c->cost[step->shard].copy_issue_ns;
        c->replaying = false;
        break;
    case SL_STEP_HIDDEN_UP:
        c->replaying = true;
        queue_add(&c->gpu, (struct item){c->hop->up_ns, NULL, {NULL, NULL}});
        c->pc++;
        return true;
    case SL_STEP_HIDDEN_DOWN:
        if (c->gpu.next < c->gpu.n) {
            return false;
        }
        length = c->hop->down_ns;
        c->replaying = false;
        break;
    case SL_STEP_GPU:
        length = queueing(c, step, c->p->placement[step->shard] == SL_PLACE_RESIDENT);
        break;
    case SL_STEP_ROUTE:
        length = queueing(c, step, true);
        break;
    case SL_STEP_OWN:
        length = queueing(c, step, c->p->placement[step->shard] != SL_PLACE_FED);
        break;
    case SL_STEP_OTHERS:
        if (c->cost[step->shard].others_ns == 0) { /* nothing is left: nobody waits */
            c->replaying = true;
            c->pc++;
            return true;
        }
        if (!c->chosen[step->shard]) {
            return false;
        }
        c->replaying = false;
        length = c->cost[step->shard].others_ns;
        c->host_total += length;
        break;
    case SL_STEP_JOIN:
        if (c->cost[step->shard].others_ns > 0) {
            queue_add(&c->gpu, (struct item){c->hop->up_ns, NULL, {NULL, NULL}});
        }
        queue_add(&c->gpu, (struct item){c->cost[step->shard].join_ns, NULL, {NULL, NULL}});
        c->replaying = true;
        c->pc++;
        return true;
    case SL_STEP_CPU:
        c->replaying = false;
        length = c->cost[step->shard].cpu_ns;
        c->host_total += length;
        break;
    }
    c->host_busy = true;
    c->host_until = c->now + length;
    return true;
}

static bool queue_advance(struct queue *q, double now, double *total)
{
    if (q->busy) {
        if (now < q->until) {
            return false;
        }
        q->busy = false;
        struct item *const item = &q->items[q->next++];
        for (int k = 0; k < 2; k++) {
            if (item->sets[k]) {
                *item->sets[k] = true;
            }
        }
        return true;
    }
    if (q->next == q->n || (q->items[q->next].waits_for && !*q->items[q->next].waits_for)) {
        return false;
    }
    q->busy = true;
    q->until = now + q->items[q->next].length;
    *total += q->items[q->next].length;
    return true;
}

/* The time of the next event; HUGE_VAL: nothing is under way. */
static double next_event(const struct clockwork *c)
{
    double next = c->host_busy ? c->host_until : HUGE_VAL;
    const struct queue *const queues[] = {&c->copy, &c->gpu, &c->download, &c->choice};
    for (int k = 0; k < 4; k++) {
        if (queues[k]->busy && queues[k]->until < next) {
            next = queues[k]->until;
        }
    }
    return next;
}

static double run_clockwork(struct clockwork *c)
{
    double ignored = 0;
    for (;;) {
        while (host_advance(c) || queue_advance(&c->copy, c->now, &c->copy.total) ||
               queue_advance(&c->gpu, c->now, &c->gpu.total) ||
               queue_advance(&c->download, c->now, &ignored) ||
               queue_advance(&c->choice, c->now, &ignored)) {
        }
        const double next = next_event(c);
        if (next == HUGE_VAL) {
            break;
        }
        c->now = next;
    }
    CHECK(c->p, c->pc == c->p->n_steps && c->copy.next == c->copy.n && c->gpu.next == c->gpu.n);
    return c->now;
}

/* An engine does one thing at a time, in order, and for as long as the totals say; the last of them
 * is done when the pass is. */
static void check_timeline(const struct program *p, const struct sl_timeline *t,
                           const struct sl_sim_result *r)
{
    double end[SL_N_ENGINES] = {0}, busy[SL_N_ENGINES] = {0}, last = 0;
    CHECK(p, t->n <= SL_INTERVALS_PER_STEP * p->n_steps);
    for (int32_t i = 0; i < t->n; i++) {
        const struct sl_interval *const item = &t->items[i];
        CHECK(p, item->begin_ns >= end[item->engine] - 1e-6 && item->end_ns > item->begin_ns);
        CHECK(p, item->step >= 0 && item->step < p->n_steps);
        end[item->engine] = item->end_ns;
        busy[item->engine] += item->end_ns - item->begin_ns;
        last = fmax(last, item->end_ns);
    }
    /* The hidden state's way up is nobody's, and may be the last thing of all. */
    CHECK(p, last <= r->pass_ns + 1e-6);
    CHECK(p, fabs(busy[SL_ENGINE_COPY] - r->copy_busy_ns) < 1e-6);
    CHECK(p, fabs(busy[SL_ENGINE_GPU] - r->gpu_busy_ns) < 1e-6);
    CHECK(p, fabs(busy[SL_ENGINE_CPU] - r->cpu_busy_ns) < 1e-6);
}

static struct sl_sim_result simulate(const struct program *p, const struct sl_shard_cost *cost,
                                     const struct sl_hop_cost *hop)
{
    static struct sl_interval items[SL_INTERVALS_PER_STEP * SL_STEPS_PER_SHARD * MAX_SHARDS];
    struct sl_timeline timeline = {.items = items};
    double done[MAX_SHARDS], ready[MAX_SHARDS];
    memset(done, 0xff, sizeof done); /* NaN: whatever is read must have been written */
    memset(ready, 0xff, sizeof ready);
    const struct sl_shard_cost *costs[MAX_SHARDS];
    for (int32_t i = 0; i < p->n_shards; i++) {
        costs[i] = &cost[i];
    }
    const struct sl_sim_result r =
        sl_steps_simulate(p->steps, p->n_steps, p->placement, costs, hop, done, ready, &timeline);
    check_timeline(p, &timeline, &r);
    CHECK(p, sl_steps_least_ns(p->placement, costs, p->n_shards, hop) <= r.pass_ns * (1 + 1e-9));
    return r;
}

/* Whole numbers, so that sums are exact and the two must agree to the last bit. */
static void test_simulator(void **state)
{
    (void)state;
    static struct program p;
    static struct clockwork c;
    for (int number = 0; number < N_CASES; number++) {
        struct sl_shard_cost cost[MAX_SHARDS];
        make_program(&p, number);
        compile(&p);
        const bool downloads = rng_below(2);
        for (int32_t i = 0; i < p.n_shards; i++) {
            cost[i] = (struct sl_shard_cost){.cpu_ns = rng_below(30),
                                             .gpu_ns = rng_below(20),
                                             .copy_ns = rng_below(40),
                                             .download_ns = downloads ? rng_below(25) : 0,
                                             .issue_ns = rng_below(6),
                                             .copy_issue_ns = rng_below(4),
                                             .route_ns = rng_below(10),
                                             .own_ns = rng_below(20),
                                             .others_ns = rng_below(4) * rng_below(30),
                                             .join_ns = rng_below(3) * rng_below(10)};
            cost[i].cpu_busy_ns = cost[i].cpu_ns;
            cost[i].others_busy_ns = cost[i].others_ns;
            if (!sl_place_uses_ring(p.placement[i])) {
                cost[i].copy_ns = 0;
            }
        }
        /* `gpu_busy` of the simulator leaves the hidden state's way up out. */
        const struct sl_hop_cost hop = {.down_ns = rng_below(9),
                                        .up_ns = rng_below(9),
                                        .graph_ns = rng_below(2) * rng_below(8)};
        double up_ns = 0;
        for (int32_t k = 0; k < p.n_steps; k++) {
            const enum sl_step_kind kind = p.steps[k].kind;
            const bool joins = kind == SL_STEP_JOIN && cost[p.steps[k].shard].others_ns > 0;
            up_ns += kind == SL_STEP_HIDDEN_UP || joins ? hop.up_ns : 0;
        }
        memset(&c, 0, sizeof c);
        c.p = &p;
        c.cost = cost;
        c.hop = &hop;
        const double wanted = run_clockwork(&c);
        const struct sl_sim_result got = simulate(&p, cost, &hop);
        if (got.pass_ns != wanted) {
            fail_msg("case %d: %g ns, should be %g", number, got.pass_ns, wanted);
        }
        CHECK(&p, got.copy_busy_ns == c.copy.total);
        CHECK(&p, got.gpu_busy_ns == c.gpu.total - up_ns);
        CHECK(&p, got.cpu_busy_ns == c.host_total);
    }
}

/* Cases worked out by hand: what runs beside what, and how copies slow the CPU. */
static void test_simulator_by_hand(void **state)
{
    (void)state;
    const struct sl_hop_cost hop = {.down_ns = 7, .up_ns = 3};
    const struct sl_shard_cost cost = {.cpu_ns = 100,
                                       .cpu_busy_ns = 150,
                                       .gpu_ns = 10,
                                       .copy_ns = 60,
                                       .download_ns = 0,
                                       .issue_ns = 1};
    struct sl_shard_cost costs[4] = {cost, cost, cost, cost};
    struct program p = {.name = "by hand", .n_shards = 2, .item_bytes = {1, 1}, .ring_bytes = 2};
    /* CPU alone. */
    compile(&p);
    assert_true(simulate(&p, costs, &hop).pass_ns == 200);
    /* All resident: up 3, then two steps of 10; queueing (1 each) hides behind. */
    p.placement[0] = p.placement[1] = SL_PLACE_RESIDENT;
    compile(&p);
    assert_true(simulate(&p, costs, &hop).pass_ns == 23);
    /* All streamed: copies end at 60 and 120, the last step runs after. */
    p.placement[0] = p.placement[1] = SL_PLACE_STREAMED;
    compile(&p);
    assert_true(simulate(&p, costs, &hop).pass_ns == 130);
    /* One slot: the second copy waits for the first step: 60 + 10 + 60 + 10. */
    p.ring_bytes = 1;
    compile(&p);
    assert_true(simulate(&p, costs, &hop).pass_ns == 140);
    /* CPU, then streamed. The copy runs beside the CPU for its 60: 60 / 150 of the CPU's work are
     * done meanwhile, the rest takes 0.6 * 100. Then up, and the step. */
    p.placement[0] = SL_PLACE_HOST;
    compile(&p);
    struct sl_sim_result r = simulate(&p, costs, &hop);
    assert_true(fabs(r.pass_ns - (60 + 60 + 3 + 10)) < 1e-9);
    assert_true(fabs(r.cpu_busy_ns - 120) < 1e-9);
    /* A copy that outlasts the CPU: the CPU takes its slow 150, the step waits for the copy. */
    costs[1].copy_ns = 400;
    assert_true(simulate(&p, costs, &hop).pass_ns == 410);
    costs[1].copy_ns = 60;
    /* Streamed, then CPU: 60 + 10, down 7, then the CPU alone. */
    p.placement[0] = SL_PLACE_STREAMED;
    p.placement[1] = SL_PLACE_HOST;
    compile(&p);
    assert_true(simulate(&p, costs, &hop).pass_ns == 177);
    /* One slot again, with KV that goes back first: 60 + 10 + 25, then the second copy. */
    p.placement[1] = SL_PLACE_STREAMED;
    costs[0].download_ns = 25;
    compile(&p);
    assert_true(simulate(&p, costs, &hop).pass_ns == 60 + 10 + 25 + 60 + 10);
    /* Shared, then streamed. The GPU has chosen after 3 + 10 and computes for 30; the CPU begins
     * after 20 and needs 40; join 3, the last step 10. */
    p.placement[0] = SL_PLACE_SHARED;
    costs[0] = (struct sl_shard_cost){
        .route_ns = 10, .own_ns = 30, .others_ns = 40, .others_busy_ns = 40, .issue_ns = 1};
    compile(&p);
    assert_true(simulate(&p, costs, &hop).pass_ns == 20 + 40 + 3 + 10);
    /* It reads system memory for those 30, beside the copy: both go half as fast. */
    costs[0].mapped_ns = 30;
    assert_true(simulate(&p, costs, &hop).pass_ns == 13 + 60 + 3 + 10);
    /* Two that are fed through one slot: the first computes its own when its copy is there, from 60
     * to 90, while the CPU has its part from 20 to 60; join 3, choice 10 until 103. The second copy
     * ends at 150, 30 of it beside the CPU. Own until 180, join 3. */
    p.placement[0] = p.placement[1] = SL_PLACE_FED;
    p.ring_bytes = 1;
    costs[0].mapped_ns = 0;
    costs[0].copy_ns = 60;
    costs[1] = costs[0];
    compile(&p);
    assert_true(simulate(&p, costs, &hop).pass_ns == 60 + 30 + 60 + 30 + 3);
    /* With room for both the second copy is there at 120, and the CPU ends last: 103, down 7. */
    p.ring_bytes = 2;
    compile(&p);
    costs[1].others_ns = costs[1].others_busy_ns = 50;
    assert_true(simulate(&p, costs, &hop).pass_ns == 110 + 50 + 3);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_programs),   cmocka_unit_test(test_ring_too_small),
        cmocka_unit_test(test_two_slots),         cmocka_unit_test(test_simulator),
        cmocka_unit_test(test_simulator_by_hand),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
