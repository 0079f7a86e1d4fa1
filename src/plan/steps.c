/* SPDX-License-Identifier: Apache-2.0
 *
 * Step compiler and simulator (see steps.h). Both are linear in the number of shards: the planner
 * calls them thousands of times.
 */
#include "plan/steps.h"

#include <assert.h>
#include <math.h>

/* Ring offsets of the shards that use it, in order, and for each the latest earlier one whose bytes
 * it overwrites (as that shard's index + 1; 0: none). */
static bool place_in_ring(const uint8_t *placement, const size_t *item_bytes, int32_t n_shards,
                          size_t ring_bytes, size_t *offset, size_t *after)
{
    size_t head = 0;
    int32_t oldest = 0; /* the oldest shard that may still own bytes ahead of the head */
    bool wrapped = false;
    for (int32_t i = 0; i < n_shards; i++) {
        if (!sl_place_uses_ring(placement[i])) {
            continue;
        }
        const size_t bytes = item_bytes[i];
        if (bytes > ring_bytes) {
            return false;
        }
        size_t latest = 0;
        if (head + bytes > ring_bytes) {
            /* Whatever lies between the head and the end of the ring is passed over, so its owners
             * must be done before the ring is written from the start again in the same lap. */
            while (wrapped && oldest < i) {
                if (sl_place_uses_ring(placement[oldest])) {
                    if (offset[oldest] < head) {
                        break;
                    }
                    latest = (size_t)oldest + 1;
                }
                oldest++;
            }
            head = 0;
            wrapped = true;
        }
        while (wrapped && oldest < i) {
            if (sl_place_uses_ring(placement[oldest])) {
                if (offset[oldest] >= head + bytes || offset[oldest] + item_bytes[oldest] <= head) {
                    break;
                }
                latest = (size_t)oldest + 1;
            }
            oldest++;
        }
        offset[i] = head;
        after[i] = latest;
        head += bytes;
    }
    return true;
}

struct compiler {
    const uint8_t *placement;
    const size_t *offset;
    const size_t *after;
    struct sl_step *steps;
    int32_t n_steps;
    int32_t n_shards;
    int32_t next_copy; /* first shard whose copy has not been issued */
};

static void emit(struct compiler *c, enum sl_step_kind kind, int32_t shard)
{
    struct sl_step *const step = &c->steps[c->n_steps++];
    *step = (struct sl_step){.kind = kind, .shard = shard, .after = -1};
    if (sl_place_uses_ring(c->placement[shard])) {
        step->ring_offset = c->offset[shard];
        if (kind == SL_STEP_COPY) {
            step->after = (int32_t)c->after[shard] - 1;
        }
    }
}

/* Issue every copy whose bytes are free or will be once the GPU steps before shard `now` are done.
 */
static void emit_copies(struct compiler *c, int32_t now)
{
    for (; c->next_copy < c->n_shards; c->next_copy++) {
        const int32_t i = c->next_copy;
        if (!sl_place_uses_ring(c->placement[i])) {
            continue;
        }
        if ((int32_t)c->after[i] > now) {
            return;
        }
        emit(c, SL_STEP_COPY, i);
    }
}

/* The driver is busy with the others for long: copies into bytes that the device's own experts free
 * are queued before. */
static void emit_shared(struct compiler *c, int32_t i)
{
    emit(c, SL_STEP_ROUTE, i);
    emit(c, SL_STEP_OWN, i);
    emit_copies(c, i + 1);
    emit(c, SL_STEP_OTHERS, i);
    emit(c, SL_STEP_JOIN, i);
}

int32_t sl_steps_compile(const uint8_t *placement, const size_t *item_bytes, int32_t n_shards,
                         size_t ring_bytes, struct sl_step *steps, size_t *scratch)
{
    size_t *const offset = scratch;
    size_t *const after = scratch + n_shards;
    if (!place_in_ring(placement, item_bytes, n_shards, ring_bytes, offset, after)) {
        return -1;
    }
    struct compiler c = {.placement = placement,
                         .offset = offset,
                         .after = after,
                         .steps = steps,
                         .n_shards = n_shards};
    bool on_device = false;
    for (int32_t i = 0; i < n_shards; i++) {
        emit_copies(&c, i);
        if (placement[i] == SL_PLACE_HOST) {
            if (on_device) {
                emit(&c, SL_STEP_HIDDEN_DOWN, i);
                on_device = false;
            }
            emit(&c, SL_STEP_CPU, i);
        } else {
            if (!on_device) {
                emit(&c, SL_STEP_HIDDEN_UP, i);
                on_device = true;
            }
            assert(!sl_place_uses_ring(placement[i]) || c.next_copy > i);
            if (sl_place_is_shared(placement[i])) {
                emit_shared(&c, i);
                continue;
            }
            emit(&c, SL_STEP_GPU, i);
        }
    }
    assert(c.n_steps <= SL_STEPS_PER_SHARD * n_shards);
    return c.n_steps;
}

static double later(double a, double b)
{
    return a > b ? a : b;
}

double sl_steps_shared_least_ns(const struct sl_shard_cost *c, const struct sl_hop_cost *hop)
{
    return c->others_ns > 0 ? c->route_ns + later(c->own_ns, hop->down_ns + c->others_ns) +
                                  hop->up_ns + c->join_ns
                            : c->route_ns + c->own_ns + c->join_ns;
}

double sl_steps_least_ns(const uint8_t *placement, const struct sl_shard_cost *const *cost,
                         int32_t n_shards, const struct sl_hop_cost *hop)
{
    double chain = 0, copy = 0;
    bool on_device = false;
    for (int32_t i = 0; i < n_shards; i++) {
        const struct sl_shard_cost *const c = cost[i];
        const bool device = placement[i] != SL_PLACE_HOST;
        copy += sl_place_uses_ring(placement[i]) ? c->copy_ns : 0;
        chain += device == on_device ? 0 : device ? hop->up_ns : hop->down_ns;
        chain += !device                             ? c->cpu_ns
                 : !sl_place_is_shared(placement[i]) ? c->gpu_ns
                                                     : sl_steps_shared_least_ns(c, hop);
        on_device = device;
    }
    return later(chain, copy);
}

/* Time the CPU needs from `start` on when the bus stays busy until `busy_end`, given the time that
 * it needs alone and beside others. */
static double contended_ns(double alone_ns, double busy_ns, double start, double busy_end)
{
    const double overlap = busy_end - start;
    if (overlap <= 0 || busy_ns <= alone_ns) {
        return alone_ns;
    }
    if (overlap >= busy_ns) {
        return busy_ns;
    }
    const double done = overlap / busy_ns; /* part of the work done under contention */
    return overlap + (1 - done) * alone_ns;
}

/* Copies that may be on their way: of shards first .. end - 1. */
struct on_way {
    int32_t first, end;
};

/* The CPU works from `host` on for t: copies take longer by `slower` of the time that both work.
 * Returns by how much the last one is late. */
static double slow_copies(struct on_way *on_way, const uint8_t *placement, double *ready_ns,
                          double host, double copy, double t, double slower)
{
    if (slower <= 0 || copy <= host) {
        return 0;
    }
    while (on_way->first < on_way->end &&
           (!sl_place_uses_ring(placement[on_way->first]) || ready_ns[on_way->first] <= host)) {
        on_way->first++;
    }
    if (on_way->first >= on_way->end) {
        return 0;
    }
    for (int32_t i = on_way->first; i < on_way->end; i++) {
        if (sl_place_uses_ring(placement[i])) {
            ready_ns[i] += slower * fmin(t, ready_ns[i] - host);
        }
    }
    return slower * fmin(t, copy - host);
}

static void note(struct sl_timeline *t, enum sl_sim_engine engine, int32_t step, double begin_ns,
                 double end_ns)
{
    if (end_ns > begin_ns) {
        t->items[t->n++] = (struct sl_interval){engine, step, begin_ns, end_ns};
    }
}

/* Clocks of the engines. */
struct clocks {
    double host, copy, gpu, download;
};

/* What step k did, from the clocks and the work done before and after it. Work comes after waiting,
 * so an engine was busy at the end of its interval; of the host, the CPU's part is the pool's. */
static void note_step(struct sl_timeline *t, int32_t k, const struct clocks *before,
                      const struct clocks *after, const struct sl_sim_result *work_before,
                      const struct sl_sim_result *work, double download_ns)
{
    const double cpu = work->cpu_busy_ns - work_before->cpu_busy_ns;
    const double gpu = work->gpu_busy_ns - work_before->gpu_busy_ns;
    const double copy = work->copy_busy_ns - work_before->copy_busy_ns;
    note(t, SL_ENGINE_DRIVER, k, before->host, after->host - cpu);
    note(t, SL_ENGINE_CPU, k, after->host - cpu, after->host);
    note(t, SL_ENGINE_GPU, k, after->gpu - gpu, after->gpu);
    note(t, SL_ENGINE_COPY, k, after->copy - copy, after->copy);
    if (after->download > before->download) {
        note(t, SL_ENGINE_DOWNLOAD, k, after->download - download_ns, after->download);
    }
}

/* Whether a step is part of a segment that is replayed: it waits for nothing but the step before.
 */
static bool is_recorded(const struct sl_step *step, const uint8_t *placement,
                        const struct sl_shard_cost *c)
{
    switch (step->kind) {
    case SL_STEP_GPU:
        return placement[step->shard] == SL_PLACE_RESIDENT;
    case SL_STEP_OWN:
        return placement[step->shard] != SL_PLACE_FED;
    case SL_STEP_OTHERS:
        return c->others_ns <= 0;
    case SL_STEP_ROUTE:
    case SL_STEP_JOIN:
    case SL_STEP_HIDDEN_UP:
        return true;
    default:
        return false;
    }
}

/* The driver's time to queue a step. Where segments are replayed, the first step of one stands for
 * the launch; behind a change of sides that is part of the hop. */
static double issue_ns(const struct sl_step *step, const struct sl_shard_cost *c,
                       const struct sl_hop_cost *hop, bool recorded, bool in_segment)
{
    const bool graphs = hop->graph_ns > 0;
    switch (step->kind) {
    case SL_STEP_COPY:
        return c->copy_issue_ns;
    case SL_STEP_GPU:
    case SL_STEP_ROUTE:
        return !graphs || !recorded ? c->issue_ns : in_segment ? 0 : hop->graph_ns;
    case SL_STEP_OWN:
        return graphs && !recorded ? c->issue_ns : 0;
    default:
        return 0;
    }
}

struct sl_sim_result sl_steps_simulate(const struct sl_step *steps, int32_t n_steps,
                                       const uint8_t *placement,
                                       const struct sl_shard_cost *const *cost,
                                       const struct sl_hop_cost *hop, double *done_ns,
                                       double *ready_ns, struct sl_timeline *timeline)
{
    struct sl_sim_result r = {0};
    double host = 0, copy = 0, gpu = 0, download = 0;
    double chosen = 0, mapped = 0; /* the choice is down; the GPU reads system memory until */
    struct on_way on_way = {0, 0};
    const double slower = hop->copy_slowdown - 1;
    bool in_segment = false;
    if (timeline) {
        timeline->n = 0;
    }
    for (int32_t k = 0; k < n_steps; k++) {
        const struct sl_step *const step = &steps[k];
        const int32_t i = step->shard;
        const struct sl_shard_cost *const c = cost[i];
        const struct clocks before = {host, copy, gpu, download};
        const struct sl_sim_result work_before = r;
        const bool recorded = is_recorded(step, placement, c);
        host += issue_ns(step, c, hop, recorded, in_segment);
        in_segment = recorded;
        switch (step->kind) {
        case SL_STEP_COPY:
            copy = later(copy, later(host, step->after >= 0 ? done_ns[step->after] : 0));
            copy += c->copy_ns;
            ready_ns[i] = copy;
            on_way.end = i + 1;
            r.copy_busy_ns += c->copy_ns;
            break;
        case SL_STEP_GPU:
            gpu = later(gpu, host);
            if (placement[i] == SL_PLACE_STREAMED) {
                gpu = later(gpu, ready_ns[i]);
            }
            gpu += c->gpu_ns;
            r.gpu_busy_ns += c->gpu_ns;
            done_ns[i] = gpu;
            if (placement[i] == SL_PLACE_STREAMED && c->download_ns > 0) {
                download = later(download, gpu) + c->download_ns;
                done_ns[i] = download;
            }
            break;
        case SL_STEP_HIDDEN_DOWN:
            host = later(host, gpu) + hop->down_ns;
            break;
        case SL_STEP_HIDDEN_UP:
            gpu = later(gpu, host) + hop->up_ns;
            break;
        case SL_STEP_CPU: {
            const double t = contended_ns(c->cpu_ns, c->cpu_busy_ns, host, copy);
            const double late = slow_copies(&on_way, placement, ready_ns, host, copy, t, slower);
            copy += late;
            r.copy_busy_ns += late;
            host += t;
            r.cpu_busy_ns += t;
            break;
        }
        case SL_STEP_ROUTE:
            gpu = later(gpu, host) + c->route_ns;
            r.gpu_busy_ns += c->route_ns;
            chosen = gpu + hop->down_ns;
            break;
        case SL_STEP_OWN: {
            gpu = later(gpu, host);
            /* Copies on their way and what is read in place share the link: while both last, each
             * goes at half its speed. */
            if (placement[i] == SL_PLACE_FED) {
                gpu = later(gpu, ready_ns[i]);
            }
            const double both = copy > gpu ? fmin(c->mapped_ns, copy - gpu) : 0;
            mapped = gpu + c->mapped_ns + both;
            copy += both;
            gpu += c->own_ns + both;
            r.gpu_busy_ns += c->own_ns + both;
            done_ns[i] = gpu;
            break;
        }
        case SL_STEP_OTHERS: {
            if (c->others_ns <= 0) {
                break;
            }
            host = later(host, chosen);
            on_way.first =
                on_way.first > i ? on_way.first : i + 1; /* its own part has been awaited */
            const double t =
                contended_ns(c->others_ns, c->others_busy_ns, host, later(copy, mapped));
            const double late = slow_copies(&on_way, placement, ready_ns, host, copy, t, slower);
            copy += late;
            r.copy_busy_ns += late;
            host += t;
            r.cpu_busy_ns += t;
            break;
        }
        case SL_STEP_JOIN:
            gpu = later(gpu, host) + (c->others_ns > 0 ? hop->up_ns : 0) + c->join_ns;
            r.gpu_busy_ns += c->join_ns;
            break;
        }
        if (timeline) {
            const struct clocks after = {host, copy, gpu, download};
            note_step(timeline, k, &before, &after, &work_before, &r, c->download_ns);
        }
    }
    r.pass_ns = later(later(host, gpu), download);
    return r;
}
