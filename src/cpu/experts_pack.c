/* SPDX-License-Identifier: Apache-2.0
 *
 * Experts: sorting the pairs, and packing activations by position. Memory:
 *
 *   scratch, many tokens   | list | groups, pairs | x for gate | x for up | h floats | h packed |
 *   own, few tokens        | groups, pairs | x for gate | x for up | h packed |
 *   own, many tokens       | panels (or rows being gathered) | sums |
 *
 * With few tokens every thread sorts for itself, and packs for itself what is small: cheaper than
 * the barrier that sharing takes.
 */
#include <string.h>

#include "cpu/experts_internal.h"

/* Up to so many activations a thread can pack all of them itself, */
#define PRIVATE_ELEMENTS 16384
/* and does where sharing would cost more: a barrier is worth about so many. */
#define WORTH_SHARING 2048
#define PRIVATE_BYTES ((size_t)PRIVATE_ELEMENTS * 9 / 4)
/* Sorted lists of a few tokens: counts, groups and pairs. */
#define MAX_FEW_PAIRS (SL_LINEAR_ROWS_TOKENS * SL_MAX_EXPERTS_USED)
#define FEW_LIST_BYTES                                                                             \
    ((size_t)SL_MAX_EXPERTS * 4 + (size_t)MAX_FEW_PAIRS * (sizeof(struct sl_experts_group) + 4) +  \
     64)

_Static_assert(FEW_LIST_BYTES % 64 == 0 &&
                   FEW_LIST_BYTES + 3 * PRIVATE_BYTES <= SL_CPU_THREAD_SCRATCH_BYTES,
               "thread scratch");
_Static_assert(SL_LINEAR_PANELS_BYTES + sizeof(float) * 2 * SL_EXPERTS_GROUP * SL_EXPERTS_ROWS <=
                   SL_CPU_THREAD_SCRATCH_BYTES,
               "thread scratch");
_Static_assert(sizeof(float) * SL_LINEAR_MAX_TILE_TOKENS * SL_LINEAR_PACK_COLS <=
                   SL_LINEAR_PANELS_BYTES,
               "rows being gathered");

/* ------------------------------------------------------------------- lists */

/* The sorted list: this head, groups, pairs. */
struct list {
    int32_t n_groups;
    int32_t n_pairs;
    struct sl_experts_group *groups;
    int32_t *pairs;
    int32_t *next; /* [experts] while sorting */
};

static int32_t expert_of(const struct sl_op_experts *o, int64_t pair)
{
    const int32_t expert = o->ids[pair] - o->first;
    const bool here =
        expert >= 0 && expert < o->n && (o->gate.table == NULL || o->gate.table[expert] != NULL);
    return here ? expert : -1;
}

/* Counting sort by expert, in the order of tokens inside each. */
static void sort_pairs(const struct sl_experts_work *w, struct list *list, int32_t most)
{
    const struct sl_op_experts *o = w->op;
    const int64_t n = (int64_t)w->n_tokens * o->n_used;
    memset(list->next, 0, (size_t)o->n * sizeof(int32_t));
    for (int64_t i = 0; i < n; i++) {
        const int32_t expert = expert_of(o, i);
        if (expert >= 0) {
            list->next[expert]++;
        }
    }
    list->n_groups = 0;
    int32_t position = 0;
    for (int32_t e = 0; e < o->n; e++) {
        int32_t left = list->next[e];
        list->next[e] = position;
        while (left > 0) {
            const int32_t some = left < most ? left : most;
            list->groups[list->n_groups++] = (struct sl_experts_group){e, position, some};
            position += some;
            left -= some;
        }
    }
    list->n_pairs = position;
    for (int64_t i = 0; i < n; i++) {
        const int32_t expert = expert_of(o, i);
        if (expert >= 0) {
            list->pairs[list->next[expert]++] = (int32_t)i;
        }
    }
}

static char *align_64(char *p)
{
    return p + (-(uintptr_t)p & 63);
}

/* Bytes of the sorted list: within what sl_op_scratch_bytes counts for pairs and experts. */
static char *place_list(const struct sl_experts_work *w, struct list *list, char *at,
                        int64_t max_groups)
{
    const size_t n_pairs = (size_t)w->n_tokens * (size_t)w->op->n_used;
    list->next = (int32_t *)(void *)at;
    list->pairs = list->next + w->op->n;
    list->groups = (struct sl_experts_group *)(void *)(list->pairs + n_pairs);
    return align_64((char *)(list->groups + max_groups));
}

/* ------------------------------------------------------------------ layout */

/* Bytes of a row packed for the way of rows, and at most of its part of tiles. */
static size_t packed_stride(int64_t n_cols)
{
    return (size_t)((n_cols + 255) / 256) * 256 * 9 / 4;
}

/* Some kernels multiply packed types as floats, and then want floats. */
static bool panels_want_floats(const struct sl_experts_work *w, enum sl_type type)
{
    return w->k->panels != NULL && w->k->panels->types[type].kind == SL_LINEAR_FLOATS;
}

static void set_room(const struct sl_experts_work *w, struct sl_experts_input *in)
{
    const size_t floats = (size_t)in->n_cols * sizeof(float);
    const bool is_float = sl_experts_is_float(in->type);
    in->stride = is_float ? floats : packed_stride(in->n_cols);
    in->room = in->stride;
    if (in->by_token && panels_want_floats(w, in->type) && floats > in->room) {
        in->room = floats;
    }
}

static char *place_input(struct sl_experts_input *in, char *at)
{
    in->memory = at;
    return align_64(at + (size_t)in->work->chunk * in->room);
}

static void place_own(struct sl_experts_work *w)
{
    char *own = w->t->own;
    w->sums = (float *)(void *)(own + SL_LINEAR_PANELS_BYTES);
    w->own_x[0] = own + FEW_LIST_BYTES;
    w->own_x[1] = w->own_x[0] + PRIVATE_BYTES;
    w->own_h = w->own_x[1] + PRIVATE_BYTES;
}

static void make_inputs(struct sl_experts_work *w)
{
    const struct sl_op_experts *o = w->op;
    w->inputs[0] = (struct sl_experts_input){
        .work = w, .type = o->gate.type, .n_cols = w->n_embd, .rows = o->x, .by_token = true};
    w->inputs[1] = w->inputs[0];
    w->inputs[1].type = o->up.type;
    w->h_in = (struct sl_experts_input){.work = w, .type = o->down.type, .n_cols = w->n_ff};
    w->x_gate = &w->inputs[0];
    w->x_up = &w->inputs[o->up.type == o->gate.type ? 0 : 1];
    for (int i = 0; i < 2; i++) {
        /* The scratch counts packed types as packed: where they are wanted as floats, fewer
         * positions fit. */
        set_room(w, &w->inputs[i]);
        const size_t counted = w->inputs[i].stride;
        w->chunk = (int32_t)((size_t)w->chunk * counted / w->inputs[i].room);
    }
    w->chunk = w->chunk > 0 ? w->chunk : 1; /* one pair: the slack of the scratch holds it */
    w->h_in.room = w->h_in.stride = packed_stride(w->n_ff); /* floats are in place */
}

static void place_activations(struct sl_experts_work *w, char *at)
{
    at = place_input(&w->inputs[0], at);
    at = w->x_up == w->x_gate ? at : place_input(&w->inputs[1], at);
    w->h = (float *)(void *)at;
    w->h_in.rows = w->h;
    place_input(&w->h_in, align_64(at + (size_t)w->chunk * (size_t)w->n_ff * sizeof(float)));
}

void sl_experts_work_init(struct sl_experts_work *w, const struct sl_cpu_thread *t,
                          const struct sl_op *op)
{
    const struct sl_op_experts *o = &op->experts;
    const int64_t n_pairs = (int64_t)op->n_tokens * o->n_used;
    *w = (struct sl_experts_work){
        .t = t,
        .op = o,
        .k = sl_cpu_linear_kernels(t->kernels->level),
        .n_tokens = op->n_tokens,
        .n_embd = o->gate.n_cols,
        .n_ff = o->gate.n_rows,
        .chunk = sl_op_experts_chunk(op),
        .few = op->n_tokens <= SL_LINEAR_ROWS_TOKENS,
    };
    make_inputs(w);
    const int32_t most = w->chunk < SL_EXPERTS_GROUP ? w->chunk : SL_EXPERTS_GROUP;
    const int64_t max_groups = n_pairs < o->n + n_pairs / most ? n_pairs : o->n + n_pairs / most;
    struct list *list = t->scratch;
    char *at = (char *)t->scratch + 64;
    struct list own_list;
    if (w->few) {
        list = &own_list;
        place_list(w, list, t->own, max_groups);
        sort_pairs(w, list, most);
    } else {
        struct list placed;
        at = place_list(w, &placed, at, max_groups);
        if (t->thread == 0) {
            *list = placed;
            sort_pairs(w, list, most);
        }
        sl_cpu_barrier(t);
    }
    w->pairs = list->pairs;
    w->groups = list->groups;
    w->n_groups = list->n_groups;
    place_own(w);
    place_activations(w, at);
}

void sl_experts_next_chunk(struct sl_experts_work *w)
{
    w->first_group = w->end_group;
    w->begin = w->end;
    while (w->end_group < w->n_groups &&
           w->end + w->groups[w->end_group].n - w->begin <= w->chunk) {
        w->end += w->groups[w->end_group++].n;
    }
}

/* ----------------------------------------------------------------- packing */

void sl_experts_panel_call(const struct sl_experts_work *w, const struct sl_experts_input *in,
                           const struct sl_experts_group *g, struct sl_op_linear *op,
                           struct sl_linear_call *call)
{
    char *memory = sl_experts_input_memory(in, g);
    memset(op, 0, sizeof(*op));
    op->x = in->by_token ? (const float *)(const void *)memory : sl_experts_input_row(in, g->first);
    op->n_parts = 1;
    op->part[0].w = (struct sl_matrix){.type = in->type, .n_rows = 1, .n_cols = in->n_cols};
    *call = (struct sl_linear_call){.kernels = w->k,
                                    .op = op,
                                    .n_tokens = g->n,
                                    .scratch = memory,
                                    .own = w->t->own,
                                    .n_threads = 1};
}

/* Row i of a group as floats, or packed for the way of rows. */
static void pack_row(const struct sl_experts_work *w, const struct sl_experts_input *in,
                     const struct sl_experts_group *g, int32_t i, bool floats)
{
    char *memory = sl_experts_input_memory(in, g);
    const float *src = sl_experts_input_row(in, g->first + i);
    if (floats) {
        const size_t bytes = (size_t)in->n_cols * sizeof(float);
        memcpy(memory + (size_t)i * bytes, src, bytes);
    } else {
        w->k->rows->pack[sl_linear_layout(in->type)](src, in->n_cols,
                                                     memory + (size_t)i * in->stride);
    }
}

/* A piece of a tile: rows are brought together first, since a tile's come at one distance. */
static void pack_tile(const struct sl_experts_work *w, const struct sl_experts_input *in,
                      const struct sl_experts_group *g, const struct sl_linear_call *call,
                      const struct sl_linear_packed *packed, int token, int n_tokens, int64_t col)
{
    const int64_t left = in->n_cols - col;
    const int64_t n = left < SL_LINEAR_PACK_COLS ? left : SL_LINEAR_PACK_COLS;
    float *rows = w->t->own;
    for (int i = 0; i < n_tokens; i++) {
        memcpy(rows + i * SL_LINEAR_PACK_COLS, sl_experts_input_row(in, g->first + token + i) + col,
               (size_t)n * sizeof(float));
    }
    sl_linear_packed_fill(call, packed, rows, SL_LINEAR_PACK_COLS, token, n_tokens, col, n);
}

/* The pieces of a group that are this thread's; `piece` counts through the chunk. */
static void pack_group(const struct sl_experts_work *w, const struct sl_experts_input *in,
                       const struct sl_experts_group *g, int *piece)
{
    struct sl_op_linear op;
    struct sl_linear_call call;
    struct sl_linear_packed packed;
    int tile = 0;
    bool floats = sl_experts_is_float(in->type);
    if (!sl_experts_is_small(w, g)) {
        sl_experts_panel_call(w, in, g, &op, &call);
        sl_linear_packed_layout(&call, &packed);
        tile = sl_linear_packed_tile(&call, &packed);
        floats = tile == 0;
    }
    const bool in_place = floats && tile == 0 && !in->by_token;
    for (int32_t i = 0; tile == 0 && !in_place && i < g->n; i++) {
        if ((*piece)++ % w->t->n_threads == w->t->thread) {
            pack_row(w, in, g, i, floats);
        }
    }
    for (int32_t i = 0; tile > 0 && i < g->n; i += tile) {
        const int n = g->n - i < tile ? g->n - i : tile;
        for (int64_t col = 0; col < in->n_cols; col += SL_LINEAR_PACK_COLS) {
            if ((*piece)++ % w->t->n_threads == w->t->thread) {
                pack_tile(w, in, g, &call, &packed, i, n, col);
            }
        }
    }
}

/* True when there was anything to pack, by any thread. */
static bool pack_chunk(const struct sl_experts_work *w, const struct sl_experts_input *in)
{
    int piece = 0;
    for (int32_t i = w->first_group; i < w->end_group; i++) {
        pack_group(w, in, &w->groups[i], &piece);
    }
    return piece > 0;
}

/* One token: its row serves every expert. */
static void pack_one(const struct sl_experts_work *w, struct sl_experts_input *in, char *own)
{
    in->room = in->stride = 0;
    if (sl_experts_is_float(in->type)) {
        in->memory = (char *)(uintptr_t)in->rows; /* only read */
    } else {
        in->memory = own;
        w->k->rows->pack[sl_linear_layout(in->type)](in->rows, in->n_cols, own);
    }
}

bool sl_experts_pack_x(struct sl_experts_work *w)
{
    if (w->k->rows == NULL) {
        return false; /* the scalar way takes floats where they are */
    }
    const bool two = w->x_up != w->x_gate;
    if (w->n_tokens == 1 && w->n_embd <= PRIVATE_ELEMENTS) {
        for (int i = 0; i < (two ? 2 : 1) && w->begin == 0; i++) {
            pack_one(w, &w->inputs[i], w->own_x[i]);
        }
        return false;
    }
    bool shared = false;
    for (int i = 0; i < (two ? 2 : 1); i++) {
        shared = pack_chunk(w, &w->inputs[i]) || shared;
    }
    return shared;
}

bool sl_experts_pack_h(struct sl_experts_work *w)
{
    if (w->k->rows == NULL) {
        return false;
    }
    const int64_t n = w->end - w->begin;
    const bool alone = w->t->n_threads == 1 || n * w->n_ff <= WORTH_SHARING;
    if (w->few && alone && !sl_experts_is_float(w->h_in.type) && n * w->n_ff <= PRIVATE_ELEMENTS &&
        (size_t)n * w->h_in.room <= PRIVATE_BYTES) {
        w->h_in.memory = w->own_h;
        for (int32_t i = w->first_group; i < w->end_group; i++) {
            for (int32_t k = 0; k < w->groups[i].n; k++) {
                pack_row(w, &w->h_in, &w->groups[i], k, false);
            }
        }
        return false;
    }
    return pack_chunk(w, &w->h_in);
}
