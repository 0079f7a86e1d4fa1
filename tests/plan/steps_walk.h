/* SPDX-License-Identifier: Apache-2.0
 *
 * Walks compiled steps as the executor would run them and fails the test when one of them is wrong:
 * a copy after its use, bytes of the ring overwritten before their last use, a shard left out or
 * computed on the wrong side, a hidden state that is elsewhere.
 */
#ifndef SL_TESTS_PLAN_STEPS_WALK_H
#define SL_TESTS_PLAN_STEPS_WALK_H

#include "plan/steps.h"

#define MAX_SHARDS 64

struct program {
    const char *name; /* in messages */
    int number;
    int32_t n_shards;
    uint8_t placement[MAX_SHARDS];
    size_t item_bytes[MAX_SHARDS];
    size_t ring_bytes;
    int32_t n_steps;
    struct sl_step steps[SL_STEPS_PER_SHARD * MAX_SHARDS];
};

struct walk {
    int32_t n_computed;  /* shards 0 .. n_computed - 1, in order */
    int32_t n_queued;    /* and those whose work on the ring's bytes is queued */
    bool on_device;      /* where the hidden state is */
    int32_t n_of_shared; /* steps of a shared shard so far */
    int32_t last_copied; /* shard; -1: none */
    int32_t waited;      /* the copy stream has waited for GPU steps up to this shard */
    size_t ring_at[MAX_SHARDS];
    bool copied[MAX_SHARDS];
};

#define CHECK(p, cond)                                                                             \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            fail_msg("%s %d, line %d: %s", (p)->name, (p)->number, __LINE__, #cond);               \
        }                                                                                          \
    } while (0)

void walk_program(const struct program *p, struct walk *w);

#endif
