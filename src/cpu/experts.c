/* SPDX-License-Identifier: Apache-2.0
 *
 * The experts of a mixture. The (token, expert) pairs of the pass are sorted by expert; a group is
 * the pairs of one expert, its activations lie one after the other. In chunks of whole groups:
 *
 *   pack     the input rows of the chunk's pairs, group by group          -> x by position
 *   gate/up  activated, times the pair's weight                           -> h by position
 *   pack     h
 *   down     each thread owns rows of y and adds all groups' products to them
 *
 * Small groups go the way of rows and large ones the way of panels of the matrix products (see
 * cpu/linear_internal.h), so an expert's weights are read once and unpacked once a task.
 *
 * Who does what: in decode all rows of all experts are one line that the team shares
 * (cpu/share.h), and each thread packs what is small for itself, which leaves one barrier inside
 * the op. With more tokens the groups differ in size, so tasks (rows of an expert) are handed out.
 *
 * Sums over experts run in the order of the groups whatever the number of threads.
 */
#include <string.h>

#include "cpu/experts_internal.h"
#include "cpu/share.h"

/* ---------------------------------------------------------------- products */

/* One row block of an expert's matrix. */
struct block {
    const struct sl_experts_matrix *m;
    int32_t expert;
    int64_t row;
    int n;
    struct sl_linear_ahead ahead; /* of row blocks that are read one after the other */
};

static const char *row_data(const struct sl_experts_matrix *m, int32_t expert, int64_t row)
{
    const size_t row_bytes = sl_type_row_bytes(m->type, m->n_cols);
    const char *data = m->table != NULL
                           ? m->table[expert]
                           : (const char *)m->data + (size_t)expert * (size_t)m->n_rows * row_bytes;
    return data + (size_t)row * row_bytes;
}

static const char *block_data(const struct block *b)
{
    return row_data(b->m, b->expert, b->row);
}

/* Rows of one group that a thread reads one after the other. */
struct stretch {
    const struct sl_experts_group *g;
    int64_t row, end;
};

/* Where the matrix is read after this stretch; NULL: not known. */
static struct sl_linear_ahead ahead_of(const struct sl_experts_matrix *m, int64_t row,
                                       const struct stretch *s, const struct stretch *next)
{
    return (struct sl_linear_ahead){s->end - row,
                                    next != NULL ? row_data(m, next->g->expert, next->row) : NULL};
}

static const float *block_bias(const struct block *b)
{
    return b->m->bias != NULL ? b->m->bias + b->expert * b->m->n_rows + b->row : NULL;
}

/* Up to SL_LINEAR_ROWS_TOKENS positions of a group, from its `at`th on, by rows:
 * out[t * SL_LINEAR_CALL_ROWS + r]. */
static void multiply_rows(const struct sl_experts_work *w, const struct block *b,
                          const struct sl_experts_input *in, const struct sl_experts_group *g,
                          int32_t at, int n, float *out)
{
    const char *data = block_data(b);
    if (w->k->rows == NULL) {
        for (int t = 0; t < n; t++) {
            struct sl_op_linear op = {.x = sl_experts_input_row(in, g->first + at + t),
                                      .n_parts = 1};
            op.part[0].w = (struct sl_matrix){
                .data = data, .type = b->m->type, .n_rows = b->n, .n_cols = b->m->n_cols};
            op.part[0].y = out + t * SL_LINEAR_CALL_ROWS;
            sl_linear_scalar_rows(&op, 0, 1, 0, b->n);
        }
        return;
    }
    const enum sl_linear_layout layout = sl_linear_layout(b->m->type);
    struct sl_linear_x x = {.n_cols = b->m->n_cols};
    if (layout == SL_LINEAR_FLOAT && !in->by_token) {
        x.data[layout] = sl_experts_input_row(in, g->first);
        x.stride[layout] = (size_t)in->n_cols * sizeof(float);
    } else {
        x.data[layout] = sl_experts_input_memory(in, g);
        x.stride[layout] = in->stride;
    }
    const size_t row_bytes = sl_type_row_bytes(b->m->type, b->m->n_cols);
    for (int t = 0; t < n; t += SL_LINEAR_CALL_TOKENS) {
        const int some = n - t < SL_LINEAR_CALL_TOKENS ? n - t : SL_LINEAR_CALL_TOKENS;
        w->k->rows->rows[b->m->type](data, row_bytes, b->n, &b->ahead, &x, at + t, some,
                                     out + t * SL_LINEAR_CALL_ROWS);
    }
}

/* All positions of a group by panels: out[t * SL_EXPERTS_ROWS + r]. */
static void multiply_panels(const struct sl_experts_work *w, const struct block *b,
                            const struct sl_experts_input *in, const struct sl_experts_group *g,
                            float *out)
{
    struct sl_op_linear op;
    struct sl_linear_packed packed;
    struct sl_linear_call call;
    sl_experts_panel_call(w, in, g, &op, &call);
    op.part[0].w.data = block_data(b);
    op.part[0].w.n_rows = b->n;
    op.part[0].y = out;
    sl_linear_packed_layout(&call, &packed);
    sl_linear_run_packed(&call, &packed);
}

/* ----------------------------------------------------------------- gate, up */

/* gate = act(gate + bias) * (up + bias) * weight for the rows of a block. The clamped activation
 * is put in terms of SiLU: g sigmoid(a g) (u + 1) = silu(a g) (u + 1) / a. */
static void activate(const struct sl_experts_work *w, const struct block *gate_block,
                     const struct block *up_block, float *gate, float *up, float weight)
{
    const float *gate_bias = block_bias(gate_block);
    const float *up_bias = block_bias(up_block);
    const int n = gate_block->n;
    for (int r = 0; gate_bias != NULL && r < n; r++) {
        gate[r] += gate_bias[r];
    }
    for (int r = 0; up_bias != NULL && r < n; r++) {
        up[r] += up_bias[r];
    }
    enum sl_activation activation = w->op->activation;
    if (activation == SL_ACT_SWIGLU_CLAMPED) {
        const float limit = SL_SWIGLU_LIMIT;
        for (int r = 0; r < n; r++) {
            const float u = up[r] < -limit ? -limit : up[r] > limit ? limit : up[r];
            gate[r] = SL_SWIGLU_ALPHA * (gate[r] > limit ? limit : gate[r]);
            up[r] = (u + 1.0f) / SL_SWIGLU_ALPHA;
        }
        activation = SL_ACT_SILU;
    }
    w->k->activate(activation, gate, up, gate, n);
    for (int r = 0; r < n; r++) {
        gate[r] *= weight;
    }
}

static float pair_weight(const struct sl_experts_work *w, int32_t position)
{
    return w->op->weights[w->pairs[position]];
}

static void put_h(const struct sl_experts_work *w, int32_t position, const struct block *b,
                  const float *values)
{
    float *h = w->h + (int64_t)(position - w->begin) * w->n_ff + b->row;
    memcpy(h, values, (size_t)b->n * sizeof(float));
}

/* Rows of one call: with more than one call for the same rows, these should still be in the
 * first-level cache. */
static int call_rows(int32_t n_positions)
{
    return n_positions > SL_LINEAR_CALL_TOKENS ? 8 : SL_LINEAR_CALL_ROWS;
}

static void gate_up_small(const struct sl_experts_work *w, const struct stretch *s,
                          const struct stretch *next)
{
    const struct sl_experts_group *g = s->g;
    float out[2][SL_LINEAR_ROWS_TOKENS * SL_LINEAR_CALL_ROWS];
    const int step = call_rows(g->n);
    for (int64_t row = s->row; row < s->end; row += step) {
        const int n = s->end - row < step ? (int)(s->end - row) : step;
        const struct block gate = {&w->op->gate, g->expert, row, n,
                                   ahead_of(&w->op->gate, row, s, next)};
        const struct block up = {&w->op->up, g->expert, row, n, ahead_of(&w->op->up, row, s, next)};
        for (int32_t at = 0; at < g->n; at += SL_LINEAR_ROWS_TOKENS) {
            const int some = g->n - at < SL_LINEAR_ROWS_TOKENS ? g->n - at : SL_LINEAR_ROWS_TOKENS;
            multiply_rows(w, &gate, w->x_gate, g, at, some, out[0]);
            multiply_rows(w, &up, w->x_up, g, at, some, out[1]);
            for (int t = 0; t < some; t++) {
                float *values = out[0] + t * SL_LINEAR_CALL_ROWS;
                activate(w, &gate, &up, values, out[1] + t * SL_LINEAR_CALL_ROWS,
                         pair_weight(w, g->first + at + t));
                put_h(w, g->first + at + t, &gate, values);
            }
        }
    }
}

static void gate_up_large(const struct sl_experts_work *w, const struct sl_experts_group *g,
                          int64_t row, int64_t end)
{
    const int n = (int)(end - row);
    const struct block gate = {.m = &w->op->gate, .expert = g->expert, .row = row, .n = n};
    const struct block up = {.m = &w->op->up, .expert = g->expert, .row = row, .n = n};
    float *sums = w->sums;
    float *up_sums = w->sums + SL_EXPERTS_GROUP * SL_EXPERTS_ROWS;
    multiply_panels(w, &gate, w->x_gate, g, sums);
    multiply_panels(w, &up, w->x_up, g, up_sums);
    for (int32_t t = 0; t < g->n; t++) {
        float *values = sums + t * SL_EXPERTS_ROWS;
        activate(w, &gate, &up, values, up_sums + t * SL_EXPERTS_ROWS,
                 pair_weight(w, g->first + t));
        put_h(w, g->first + t, &gate, values);
    }
}

/* --------------------------------------------------------------------- down */

static void add_to_y(const struct sl_experts_work *w, int32_t position, const struct block *b,
                     const float *values)
{
    const int32_t token = w->pairs[position] / w->op->n_used;
    float *y = w->op->y + (int64_t)token * w->n_embd + b->row;
    const float *bias = block_bias(b);
    if (bias == NULL && b->n % 32 == 0) {
        w->t->kernels->attention->add_scaled(y, values, 1.0f, b->n);
        return;
    }
    const float weight = bias != NULL ? pair_weight(w, position) : 0.0f;
    for (int r = 0; r < b->n; r++) {
        y[r] += bias != NULL ? values[r] + weight * bias[r] : values[r];
    }
}

static void down_small(const struct sl_experts_work *w, const struct stretch *s,
                       const struct stretch *next)
{
    const struct sl_experts_group *g = s->g;
    float out[SL_LINEAR_ROWS_TOKENS * SL_LINEAR_CALL_ROWS];
    const int step = call_rows(g->n);
    for (int64_t row = s->row; row < s->end; row += step) {
        const int n = s->end - row < step ? (int)(s->end - row) : step;
        const struct block down = {&w->op->down, g->expert, row, n,
                                   ahead_of(&w->op->down, row, s, next)};
        for (int32_t at = 0; at < g->n; at += SL_LINEAR_ROWS_TOKENS) {
            const int some = g->n - at < SL_LINEAR_ROWS_TOKENS ? g->n - at : SL_LINEAR_ROWS_TOKENS;
            multiply_rows(w, &down, &w->h_in, g, at, some, out);
            for (int t = 0; t < some; t++) {
                add_to_y(w, g->first + at + t, &down, out + t * SL_LINEAR_CALL_ROWS);
            }
        }
    }
}

static void start_y(const struct sl_experts_work *w, int64_t row, int64_t end)
{
    for (int32_t t = 0; w->begin == 0 && !w->op->accumulate && t < w->n_tokens; t++) {
        memset(w->op->y + t * w->n_embd + row, 0, (size_t)(end - row) * sizeof(float));
    }
}

/* Rows row .. end - 1 of y: their start value, then every group of the chunk. */
static void down(const struct sl_experts_work *w, int64_t row, int64_t end)
{
    start_y(w, row, end);
    for (int32_t i = w->first_group; i < w->end_group; i++) {
        const struct sl_experts_group *g = &w->groups[i];
        if (sl_experts_is_small(w, g)) {
            down_small(w, &(struct stretch){g, row, end}, NULL);
            continue;
        }
        const struct block block = {
            .m = &w->op->down, .expert = g->expert, .row = row, .n = (int)(end - row)};
        multiply_panels(w, &block, &w->h_in, g, w->sums);
        for (int32_t t = 0; t < g->n; t++) {
            add_to_y(w, g->first + t, &block, w->sums + t * SL_EXPERTS_ROWS);
        }
    }
}

/* ------------------------------------------------------------------- decode */

/* A thread's way along the line of a phase: for gate and up all rows of one group after the other,
 * for down the rows of y, each with all groups. */
struct walk {
    struct sl_experts_work *w;
    struct sl_share share;
    bool is_down;
    int piece;
    int64_t at, end; /* what is left of the piece; for down all of it */
    int32_t group;   /* for down, the next */
};

static struct walk walk_make(struct sl_experts_work *w, bool is_down)
{
    const struct sl_experts_matrix *m = is_down ? &w->op->down : &w->op->gate;
    const int32_t n_groups = w->end_group - w->first_group;
    /* Shorter stretches would be over before what is fetched ahead begins. */
    const size_t row_bytes = sl_type_row_bytes(m->type, m->n_cols);
    const int64_t least = (int64_t)(SL_LINEAR_FETCH_BYTES / row_bytes) / 4 * 4 + 4;
    struct walk k = {.w = w, .is_down = is_down, .piece = w->t->thread, .group = w->end_group};
    k.share = sl_share_make(is_down ? w->n_embd : n_groups * w->n_ff, least, w->t->n_threads);
    sl_share_range(&k.share, k.piece, &k.at, &k.end);
    if (is_down && k.at < k.end) {
        k.group = w->first_group;
    }
    return k;
}

static bool next_stretch(struct walk *k, struct stretch *s)
{
    const struct sl_experts_work *w = k->w;
    if (k->is_down && k->group < w->end_group) {
        *s = (struct stretch){&w->groups[k->group++], k->at, k->end};
        return true;
    }
    if (!k->is_down && k->at < k->end) {
        const int64_t row = k->at % w->n_ff;
        const int64_t left = w->n_ff - row;
        const int64_t n = left < k->end - k->at ? left : k->end - k->at;
        *s = (struct stretch){&w->groups[w->first_group + k->at / w->n_ff], row, row + n};
        k->at += n;
        return true;
    }
    return false;
}

/* Take the next piece; false when there are no more. */
static bool next_piece(struct walk *k)
{
    k->piece = sl_share_take(&k->share, k->w->t->taken, k->w->n_taken);
    if (k->piece >= k->share.n_pieces) {
        k->w->n_taken += k->share.n_threads > 1 ? k->share.n_pieces : 0;
        return false;
    }
    sl_share_range(&k->share, k->piece, &k->at, &k->end);
    k->group = k->w->first_group;
    return true;
}

/* The stretches of a phase, each with the one that follows it. */
static void run_few(struct sl_experts_work *w, bool is_down)
{
    struct walk k = walk_make(w, is_down);
    struct stretch now, then;
    bool have = false;
    do {
        if (is_down) {
            start_y(w, k.at, k.end);
        }
        while (next_stretch(&k, &then)) {
            if (have) {
                (is_down ? down_small : gate_up_small)(w, &now, &then);
            }
            now = then;
            have = true;
        }
    } while (next_piece(&k));
    if (have) {
        (is_down ? down_small : gate_up_small)(w, &now, NULL);
    }
}

/* Fetch the first of what this thread will read in a phase. */
static void fetch_few(struct sl_experts_work *w, bool is_down)
{
    struct walk k = walk_make(w, is_down);
    struct stretch s;
    if (w->few && next_stretch(&k, &s)) {
        const struct sl_experts_matrix *m = is_down ? &w->op->down : &w->op->gate;
        sl_linear_fetch_first(row_data(m, s.g->expert, s.row));
        if (!is_down) {
            sl_linear_fetch_first(row_data(&w->op->up, s.g->expert, s.row));
        }
    }
}

/* ------------------------------------------------------------- many tokens */

/* The next of n tasks of this phase, or -1. Every thread draws one number too many a phase, so all
 * know where the next phase begins. */
static int take(const struct sl_experts_work *w, int n)
{
    const int task = sl_cpu_take(w->t) - w->n_taken;
    return task < n ? task : -1;
}

static void end_phase(struct sl_experts_work *w, int n)
{
    w->n_taken += n + w->t->n_threads;
}

static int n_blocks(int64_t n_rows)
{
    return (int)((n_rows + SL_EXPERTS_ROWS - 1) / SL_EXPERTS_ROWS);
}

static void run_gate_up(struct sl_experts_work *w)
{
    if (w->few) {
        run_few(w, false);
        return;
    }
    const int blocks = n_blocks(w->n_ff);
    const int n = (w->end_group - w->first_group) * blocks;
    for (int task; (task = take(w, n)) >= 0;) {
        const int64_t row = (int64_t)(task % blocks) * SL_EXPERTS_ROWS;
        const int64_t end = row + SL_EXPERTS_ROWS < w->n_ff ? row + SL_EXPERTS_ROWS : w->n_ff;
        const struct stretch s = {&w->groups[w->first_group + task / blocks], row, end};
        if (sl_experts_is_small(w, s.g)) {
            gate_up_small(w, &s, NULL);
        } else {
            gate_up_large(w, s.g, row, end);
        }
    }
    end_phase(w, n);
}

static void run_down(struct sl_experts_work *w)
{
    if (w->few) {
        run_few(w, true);
        return;
    }
    const int n = n_blocks(w->n_embd);
    for (int task; (task = take(w, n)) >= 0;) {
        const int64_t row = (int64_t)task * SL_EXPERTS_ROWS;
        const int64_t end = row + SL_EXPERTS_ROWS < w->n_embd ? row + SL_EXPERTS_ROWS : w->n_embd;
        down(w, row, end);
    }
    end_phase(w, n);
}

void sl_cpu_experts(const struct sl_cpu_thread *t, const struct sl_op *op)
{
    struct sl_experts_work w;
    sl_experts_work_init(&w, t, op);
    do {
        sl_experts_next_chunk(&w);
        fetch_few(&w, false);
        if (sl_experts_pack_x(&w)) {
            sl_cpu_barrier(t);
        }
        run_gate_up(&w);
        fetch_few(&w, true);
        sl_cpu_barrier(t);
        if (sl_experts_pack_h(&w)) {
            sl_cpu_barrier(t);
        }
        run_down(&w);
        if (w.end_group < w.n_groups) {
            sl_cpu_barrier(t); /* the next chunk's activations take the place of these */
        }
    } while (w.end_group < w.n_groups);
}
