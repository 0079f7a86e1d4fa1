/* SPDX-License-Identifier: Apache-2.0
 *
 * See steps_walk.h.
 */
#include "steps_walk.h"

#include "test.h"

/* The copy stream and the compute stream are in order: what an earlier copy waited for need not be
 * waited for again, and a wait for one GPU step covers all before it. */
static void walk_copy(const struct program *p, struct walk *w, const struct sl_step *step)
{
    const int32_t i = step->shard;
    CHECK(p, sl_place_uses_ring(p->placement[i]));
    CHECK(p, i > w->last_copied);
    CHECK(p, i >= w->n_queued);
    CHECK(p, step->ring_offset + p->item_bytes[i] <= p->ring_bytes);
    CHECK(p, step->after >= -1 && step->after < w->n_queued);
    /* Only shards that use the ring record an event that can be waited for. */
    CHECK(p, step->after < 0 || sl_place_uses_ring(p->placement[step->after]));
    w->waited = step->after > w->waited ? step->after : w->waited;
    for (int32_t j = 0; j < i; j++) {
        const bool overlaps = w->copied[j] &&
                              w->ring_at[j] < step->ring_offset + p->item_bytes[i] &&
                              step->ring_offset < w->ring_at[j] + p->item_bytes[j];
        CHECK(p, !overlaps || j <= w->waited);
    }
    /* As early as that allows: before anything else is computed. */
    CHECK(p, w->n_queued == w->waited + 1);
    w->copied[i] = true;
    w->ring_at[i] = step->ring_offset;
    w->last_copied = i;
}

static void walk_compute(const struct program *p, struct walk *w, const struct sl_step *step)
{
    const int32_t i = step->shard;
    CHECK(p, i == w->n_computed);
    const bool gpu = step->kind == SL_STEP_GPU;
    CHECK(p, gpu == (p->placement[i] != SL_PLACE_HOST) && !sl_place_is_shared(p->placement[i]));
    CHECK(p, gpu == w->on_device && w->n_of_shared == 0);
    if (p->placement[i] == SL_PLACE_STREAMED) {
        CHECK(p, w->copied[i]);
        CHECK(p, step->ring_offset == w->ring_at[i]);
    }
    w->n_queued = ++w->n_computed;
}

/* Route, own, others, join, one after the other; the hidden state stays on the device. With its own
 * experts the device is through with the ring. */
static void walk_shared(const struct program *p, struct walk *w, const struct sl_step *step)
{
    const int32_t i = step->shard;
    CHECK(p, i == w->n_computed && sl_place_is_shared(p->placement[i]) && w->on_device);
    CHECK(p, (int)step->kind == (int)SL_STEP_ROUTE + w->n_of_shared);
    CHECK(p, step->kind != SL_STEP_OWN || p->placement[i] != SL_PLACE_FED ||
                 (w->copied[i] && step->ring_offset == w->ring_at[i]));
    w->n_of_shared = step->kind == SL_STEP_JOIN ? 0 : w->n_of_shared + 1;
    w->n_queued += step->kind == SL_STEP_OWN;
    w->n_computed += step->kind == SL_STEP_JOIN;
}

void walk_program(const struct program *p, struct walk *w)
{
    CHECK(p, p->n_shards <= MAX_SHARDS);
    *w = (struct walk){.last_copied = -1, .waited = -1};
    for (int32_t k = 0; k < p->n_steps; k++) {
        const struct sl_step *const step = &p->steps[k];
        CHECK(p, step->shard >= 0 && step->shard < p->n_shards);
        switch (step->kind) {
        case SL_STEP_COPY:
            walk_copy(p, w, step);
            break;
        case SL_STEP_GPU:
        case SL_STEP_CPU:
            walk_compute(p, w, step);
            break;
        case SL_STEP_HIDDEN_DOWN:
        case SL_STEP_HIDDEN_UP:
            /* Only when it has to move, for the very next shard. */
            CHECK(p, w->on_device == (step->kind == SL_STEP_HIDDEN_DOWN));
            CHECK(p, step->shard == w->n_computed);
            w->on_device = !w->on_device;
            CHECK(p, w->on_device == (p->placement[step->shard] != SL_PLACE_HOST));
            break;
        case SL_STEP_ROUTE:
        case SL_STEP_OWN:
        case SL_STEP_OTHERS:
        case SL_STEP_JOIN:
            walk_shared(p, w, step);
            break;
        }
    }
    CHECK(p, w->n_computed == p->n_shards);
}
