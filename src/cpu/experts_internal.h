/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside of the experts: what experts_pack.c (sorting and packing) prepares for experts.c
 * (products). A position is a place in the list of pairs sorted by expert.
 */
#ifndef SL_CPU_EXPERTS_INTERNAL_H
#define SL_CPU_EXPERTS_INTERNAL_H

#include "cpu/linear_internal.h"
#include "cpu/team.h"

/* Rows of a task when tasks are handed out: whole panels of every level. */
#define SL_EXPERTS_ROWS SL_LINEAR_MAX_PANEL_ROWS
/* Most pairs of a group; an expert with more has several groups. */
#define SL_EXPERTS_GROUP 1024

/* Pairs of one expert (counted from op->first): positions first .. first + n - 1. */
struct sl_experts_group {
    int32_t expert;
    int32_t first;
    int32_t n;
};

/* The activations that a matrix is multiplied with. They come as `rows` of floats, of tokens
 * (by_token) or of the chunk's positions, and are put in order and packed for the kernels in
 * `memory`, `room` bytes a position. There a group has, by its size and the type of the matrix,
 *   rows of `stride` bytes for the way of rows,
 *   tiles (struct sl_linear_packed) or rows of n_cols floats for the way of panels.
 * Floats that lie by position already stay where they are. One token: a single row serves all
 * positions, room and stride are 0. */
struct sl_experts_input {
    const struct sl_experts_work *work;
    enum sl_type type;
    int64_t n_cols;
    const float *rows;
    bool by_token;
    char *memory;
    size_t room;
    size_t stride;
};

/* One thread's view of one op. */
struct sl_experts_work {
    const struct sl_cpu_thread *t;
    const struct sl_op_experts *op;
    const struct sl_cpu_linear_kernels *k;
    int32_t n_tokens;
    int64_t n_embd, n_ff;
    int32_t chunk; /* most positions of a chunk */
    bool few;      /* decode: every group is small, and rows are shared without counting */

    const int32_t *pairs; /* by position: token * n_used + place in the token's choice */
    const struct sl_experts_group *groups;
    int32_t n_groups;
    int32_t first_group, end_group; /* the chunk */
    int32_t begin, end;             /* its positions */

    struct sl_experts_input inputs[2];            /* gate, and up when its type differs */
    const struct sl_experts_input *x_gate, *x_up; /* of these */
    struct sl_experts_input h_in;                 /* down */
    float *h;                                     /* [chunk, n_ff] */
    char *own_x[2], *own_h;                       /* this thread's memory for small packed rows */
    float *sums; /* own: two arrays [SL_EXPERTS_GROUP, SL_EXPERTS_ROWS] */
    int n_taken; /* tickets of the phases before this one */
};

static inline bool sl_experts_is_small(const struct sl_experts_work *w,
                                       const struct sl_experts_group *g)
{
    return w->few || g->n <= SL_LINEAR_ROWS_TOKENS || w->k->panels == NULL;
}

static inline const float *sl_experts_input_row(const struct sl_experts_input *in, int32_t position)
{
    const struct sl_experts_work *w = in->work;
    const int32_t row = in->by_token ? w->pairs[position] / w->op->n_used : position - w->begin;
    return in->rows + row * in->n_cols;
}

static inline bool sl_experts_is_float(enum sl_type type)
{
    return sl_linear_layout(type) == SL_LINEAR_FLOAT;
}

/* A group's share of the memory. */
static inline char *sl_experts_input_memory(const struct sl_experts_input *in,
                                            const struct sl_experts_group *g)
{
    return in->memory + (size_t)(g->first - in->work->begin) * in->room;
}

/* Sort the pairs (a barrier, unless few) and lay out the memory. */
void sl_experts_work_init(struct sl_experts_work *w, const struct sl_cpu_thread *t,
                          const struct sl_op *op);
/* The next whole groups that fit the scratch; none at all when no expert is here. */
void sl_experts_next_chunk(struct sl_experts_work *w);
/* Pack the chunk's inputs, or its h. True: the team shares the result and needs a barrier. */
bool sl_experts_pack_x(struct sl_experts_work *w);
bool sl_experts_pack_h(struct sl_experts_work *w);

/* A call for the way of panels on a group's packed activations: an op of one part without data,
 * rows and output. */
void sl_experts_panel_call(const struct sl_experts_work *w, const struct sl_experts_input *in,
                           const struct sl_experts_group *g, struct sl_op_linear *op,
                           struct sl_linear_call *call);

#endif
