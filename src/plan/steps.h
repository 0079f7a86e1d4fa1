/* SPDX-License-Identifier: Apache-2.0
 *
 * From placements to steps: the order in which the driver thread issues the work of a pass. The
 * simulator and the executor walk the same list, so a prediction is of what will run.
 *
 * Copies are issued as early as the ring allows: right after the GPU step that frees their bytes.
 * The ring is a byte FIFO; an item never wraps. Since the copy stream and the compute stream are in
 * order, waiting for the latest GPU step whose bytes are overwritten is enough.
 */
#ifndef SL_PLAN_STEPS_H
#define SL_PLAN_STEPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* SHARED: both sides compute a part at the same time. Of a shard that is cut the device has what is
 * before the cut. Of a mixture it routes and computes the experts that it has and some more, which
 * it reads in system memory. FED, of mixtures: the same, but what the device has more comes through
 * the ring, chosen before anybody knows which experts are used. A mixture is RESIDENT when the
 * device computes all experts, from its own memory or the system's. */
enum sl_placement {
    SL_PLACE_HOST,
    SL_PLACE_STREAMED,
    SL_PLACE_RESIDENT,
    SL_PLACE_SHARED,
    SL_PLACE_FED,
    SL_N_PLACEMENTS
};

static inline bool sl_place_uses_ring(uint8_t placement)
{
    return placement == SL_PLACE_STREAMED || placement == SL_PLACE_FED;
}

/* Computed by the device and the CPU together. */
static inline bool sl_place_is_shared(uint8_t placement)
{
    return placement == SL_PLACE_SHARED || placement == SL_PLACE_FED;
}

enum sl_step_kind {
    SL_STEP_COPY,        /* copy stream: wait for `after`, bring the shard into the ring; of a fed
                            mixture a part of its experts */
    SL_STEP_GPU,         /* compute stream: wait for the shard's copy, run it */
    SL_STEP_CPU,         /* run the shard on the pool */
    SL_STEP_HIDDEN_DOWN, /* hidden state to the host, for `shard`; the driver waits */
    SL_STEP_HIDDEN_UP,   /* hidden state to the device, for `shard` */
    /* A shared shard, or a fed mixture, in this order. */
    SL_STEP_ROUTE,  /* compute stream: norm, of mixtures the choice of experts; send both down */
    SL_STEP_OWN,    /* compute stream: the device's part; fed, wait for its copy */
    SL_STEP_OTHERS, /* wait for what came down; the other part on the pool */
    SL_STEP_JOIN,   /* compute stream: add what the pool has computed */
};

struct sl_step {
    enum sl_step_kind kind;
    int32_t shard;
    int32_t after;      /* COPY: shard whose GPU step frees the bytes; -1: none in this pass */
    size_t ring_offset; /* of shards that use the ring */
};

#define SL_STEPS_PER_SHARD 6

/* Compile placements of n_shards in execution order. item_bytes[i] is what shard i needs in the
 * ring when it uses it. `steps` holds SL_STEPS_PER_SHARD * n_shards; `scratch` 2 * n_shards sizes.
 * Returns the number of steps, or -1 when an item is larger than the ring. */
int32_t sl_steps_compile(const uint8_t *placement, const size_t *item_bytes, int32_t n_shards,
                         size_t ring_bytes, struct sl_step *steps, size_t *scratch);

/* What one pass of a tier costs, per shard, in nanoseconds. */
struct sl_shard_cost {
    double cpu_ns;      /* alone */
    double cpu_busy_ns; /* while copies run */
    double gpu_ns;
    double copy_ns;       /* into the ring (weights, and KV that lives on the host) */
    double download_ns;   /* new KV back to the host, streamed attention only */
    double issue_ns;      /* host time to queue it on the GPU, launch by launch */
    double copy_issue_ns; /* host time to queue its copies */
    /* Shared or fed: */
    double route_ns;       /* GPU, until input and choice can go down */
    double own_ns;         /* GPU: what it has, and experts read in system memory */
    double mapped_ns;      /* of own_ns: while it reads system memory */
    double others_ns;      /* CPU, alone; 0: nothing is left for it, and nobody waits */
    double others_busy_ns; /* CPU, while the GPU reads system memory too */
    double join_ns;        /* GPU: what goes on with both parts */
};

/* Between the engines. */
struct sl_hop_cost {
    double down_ns; /* driver waits this long for the hidden state after the GPU has it */
    double up_ns;
    double
        copy_slowdown; /* time of copies while the CPU works beside that alone; below 1: the same */
    double graph_ns;   /* host time to replay a segment (exec/pass_graph.c); 0: there are none */
};

/* A shared shard takes no less: each side waits for what the other one has for it. */
double sl_steps_shared_least_ns(const struct sl_shard_cost *cost, const struct sl_hop_cost *hop);
/* No list of steps with these placements takes less: every engine has its own work to do, and
 * shards follow one another. */
double sl_steps_least_ns(const uint8_t *placement, const struct sl_shard_cost *const *cost,
                         int32_t n_shards, const struct sl_hop_cost *hop);

/* Simulated pass time and how busy the engines were. Costs are by shard; those that are alike may
 * be one. */
struct sl_sim_result {
    double pass_ns;
    double copy_busy_ns;
    double gpu_busy_ns;
    double cpu_busy_ns;
};

/* What an engine did when, in the simulation. The driver queues work and waits for it; between the
 * intervals of the others they wait, or the hidden state moves. */
enum sl_sim_engine {
    SL_ENGINE_DRIVER,
    SL_ENGINE_CPU,
    SL_ENGINE_GPU,
    SL_ENGINE_COPY,
    SL_ENGINE_DOWNLOAD,
    SL_N_ENGINES
};

struct sl_interval {
    enum sl_sim_engine engine;
    int32_t step;
    double begin_ns, end_ns;
};

#define SL_INTERVALS_PER_STEP 4

struct sl_timeline {
    struct sl_interval *items; /* [SL_INTERVALS_PER_STEP * n_steps]; the caller's */
    int32_t n;
};

/* `done_ns` and `ready_ns` are scratch of n_shards each; `timeline` may be NULL. */
struct sl_sim_result sl_steps_simulate(const struct sl_step *steps, int32_t n_steps,
                                       const uint8_t *placement,
                                       const struct sl_shard_cost *const *cost,
                                       const struct sl_hop_cost *hop, double *done_ns,
                                       double *ready_ns, struct sl_timeline *timeline);

#endif
