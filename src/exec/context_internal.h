/* SPDX-License-Identifier: Apache-2.0
 *
 * The context's own data, shared by context.c (life cycle), sequence.c (what is in the cache),
 * pass.c (execution) and shift.c.
 */
#ifndef SL_EXEC_CONTEXT_INTERNAL_H
#define SL_EXEC_CONTEXT_INTERNAL_H

#include "exec/adapt.h"
#include "exec/context.h"
#include "exec/kv_pool.h"
#include "exec/trace.h"

/* Host memory that the device copies from and to: page-locked when the device grants it. */
struct sl_host_buffer {
    void *data;
    size_t bytes;
    bool locked;
};

/* A run of steps on the compute stream that wait for nothing: recorded once as a graph and queued
 * at the cost of one launch. Kept per tier by the index of its first step; recorded again when the
 * pass has another size or the cache has outgrown the bound that the graph was made for. */
struct sl_segment {
    int32_t n_tokens, n_outputs, n_kv_max; /* of the last pass that came here */
    int32_t end;                           /* one past its last step then */
    int32_t n_same;                        /* passes in a row that were like the one before */
    struct sl_graph *graph;                /* NULL: not recorded yet */
};

/* n_kv_max is rounded up to this, so that a graph serves many passes. */
#define SL_GRAPH_KV_STEP 256
/* Recording costs as much as some passes. */
#define SL_GRAPH_AFTER 4

/* A slot that gets another expert. */
struct sl_swap {
    int32_t slot, expert;
};
#define SL_MAX_SWAPS 4 /* at a time: some MB beside a pass that reads hundreds */

/* Which experts are in VRAM; see exec/experts.h. An expert's id is layer * n_experts + its number.
 */
struct sl_experts {
    int32_t n_room;                       /* slots that fit the arena */
    int32_t *slot_expert;                 /* [n_room]; -1: on its way */
    int32_t *expert_slot;                 /* by expert; -1: none */
    int32_t n_valid;                      /* slots whose bytes are in VRAM, or on their way */
    const struct sl_tier_plan *tables_of; /* the tier whose tables are in VRAM; NULL: none */
    bool *is_stale;                       /* by layer: its tables in VRAM are not right any more */
    struct sl_event *filled;              /* the copy stream is past the last filling */
    /* Use: what the device has counted so far, and what of it has gone into the scores. */
    struct sl_host_buffer uses; /* [n_layers, n_experts] int32 */
    int32_t *uses_seen;
    float *score; /* uses, the older the less they count */
    float gain;   /* what a use counts now */
    int32_t *order;
    int32_t *fed; /* by expert: which one of its layer's item in the ring; -1: not in the ring */
    int32_t n_fed, share;         /* of this pass: see sl_tier_plan */
    int32_t wanted[SL_MAX_SWAPS]; /* missed by the last pass, highest score first */
    int32_t n_wanted;
    int32_t hand; /* where the search for a cold slot goes on */
    struct sl_swap swaps[SL_MAX_SWAPS];
    int32_t n_swaps; /* whose copies were queued in the last pass */
};

struct sl_context {
    const struct sl_model *model;
    struct sl_device *device;
    struct sl_pool *pool;
    int n_threads_short, n_threads_long; /* see struct sl_context_options */
    const struct sl_cpu_kernels *kernels;
    bool (*cancelled)(void *user);
    void *cancelled_user;
    struct sl_trace *trace; /* or NULL */
    struct sl_plan *plan;
    struct sl_kv_pool cache; /* which sequence has which blocks */

    /* Host side of a pass of up to n_ubatch tokens. */
    struct sl_host_buffer hidden; /* [n_ubatch, n_embd] float */
    struct sl_host_buffer io;     /* positions, then sequences: [n] int32 each */
    struct sl_host_buffer logits; /* [max_outputs, n_vocab] float */
    void *workspace;
    void *scratch;
    struct sl_host_buffer kv; /* layers n_kv_layers .. n_layers - 1, or of all what is behind the
                                 cut; kv_host_layer_bytes each */
    struct sl_host_buffer kv_table;
    struct sl_kv_runs kv_in_use, kv_written; /* blocks of the pass; only where KV is streamed */

    /* Device side; all NULL in a CPU-only context. */
    uint8_t *arena;
    struct sl_stream *compute, *copy, *download;
    struct sl_event **ready;      /* by shard: its copy into VRAM is done */
    struct sl_event **done;       /* by shard: its GPU step is done */
    struct sl_event **downloaded; /* by shard: its new KV is back on the host */
    struct sl_event *hidden_event;
    int32_t n_valid;              /* prefix of the resident order whose bytes are in VRAM now */
    bool *pending;                /* by shard: resident weights still on their way, see `ready` */
    uint8_t *registered;          /* by file: its mapping is page-locked */
    bool files_are_mapped;        /* all files: kernels can read weights in system memory */
    struct sl_host_buffer choice; /* what a shared shard sends down, and the host's sums for it */
    bool choice_is_mapped;        /* the device reads those sums in place */
    /* Mixtures. */
    struct sl_experts experts;
    struct sl_host_buffer tables;                  /* as in VRAM */
    struct sl_segment *segments[SL_N_GRAPH_TIERS]; /* by first step; NULL: no graphs */
    struct sl_adapt adapt;
    struct sl_context_stats stats;
};

/* `what` is for the message when there is no memory. */
enum sluice_status sl_host_buffer_init(struct sl_context *ctx, struct sl_host_buffer *buffer,
                                       size_t bytes, const char *what, struct sluice_error *err);
void sl_host_buffer_finish(struct sl_context *ctx, struct sl_host_buffer *buffer);

/* The tokens of a pass, at most n_ubatch. */
struct sl_batch {
    const int32_t *tokens;
    int32_t n;
    int32_t seq;         /* all go on with this sequence, or */
    const int32_t *seqs; /* [n], each with another; NULL */
    int32_t n_outputs;   /* logits of the last n_outputs */
    float *logits;       /* or NULL: the context's buffer */
};

/* Host memory for what shared shards of a tier's plan exchange, or (any) those that could be
 * shared. */
size_t sl_context_exchange_bytes(const struct sl_context *ctx, const struct sl_tier_plan *tier,
                                 bool any);
/* Segments for a plan of so many steps in a tier, none of them recorded; false without memory. */
bool sl_context_set_segments(struct sl_context *ctx, int32_t tier, int32_t n_steps);

/* One pass. The blocks that it writes are there, and nobody else's. */
enum sluice_status sl_pass_run(struct sl_context *ctx, const struct sl_batch *batch,
                               struct sluice_error *err);

/* What a side has of a layer's cache: all of it, the heads or the blocks before or behind a cut, or
 * nothing. */
struct sl_kv_part {
    uint8_t *data; /* of block `begin`; NULL: nothing */
    int32_t n_heads;
    int32_t begin, end; /* blocks */
    size_t block_bytes;
};
struct sl_kv_part sl_context_kv(const struct sl_context *ctx, uint32_t layer, bool in_vram);
/* Make block `index` of a sequence its own, to be written: one that others use is copied. */
enum sluice_status sl_context_own_block(struct sl_context *ctx, int32_t seq, int32_t index,
                                        struct sluice_error *err);

#endif
