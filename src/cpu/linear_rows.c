/* SPDX-License-Identifier: Apache-2.0
 *
 * The way of rows: products for few tokens. The activations are packed once, by every thread for
 * itself when they are small (which saves a barrier) and by the team otherwise. Then the threads
 * share the weights of all parts as one line of bytes (cpu/share.h), gate and up in turns of a few
 * rows. A thread always knows the stretch that follows, so that its rows are fetched in time.
 */
#include <string.h>

#include "base/pool.h"
#include "cpu/linear_internal.h"
#include "cpu/share.h"

/* Up to so many activations each thread packs all of them itself: with more, a barrier costs less.
 */
#define PRIVATE_ELEMENTS 4096
/* Columns that one thread packs at a time; a multiple of every layout's unit. */
#define PACK_COLS 2048

static size_t packed_bytes(enum sl_linear_layout layout, int vector_bytes, int64_t n_cols)
{
    if (layout == SL_LINEAR_SUPER) {
        return (size_t)(n_cols / 256) * SL_LINEAR_SUPER_BYTES;
    }
    const int64_t group_cols = 2 * vector_bytes;
    return (size_t)((n_cols + group_cols - 1) / group_cols) * 4 * (size_t)vector_bytes;
}

/* Pack columns first .. of one token, in this layout. */
static void pack_piece(const struct sl_linear_call *c, const struct sl_linear_x *x,
                       enum sl_linear_layout layout, int token, int64_t first)
{
    const int64_t left = x->n_cols - first;
    const int64_t n = left < PACK_COLS ? left : PACK_COLS;
    const size_t at = packed_bytes(layout, c->kernels->rows->vector_bytes, first);
    char *dst = (char *)x->out[layout] + (size_t)token * x->stride[layout] + at;
    c->kernels->rows->pack[layout](c->op->x + token * x->n_cols + first, n, dst);
}

static void pack(const struct sl_linear_call *c, struct sl_linear_x *x)
{
    const int n_tokens = c->n_tokens;
    const bool private = n_tokens * x->n_cols <= PRIVATE_ELEMENTS;
    char *memory = private ? c->own : c->scratch;
    bool needed[SL_LINEAR_N_LAYOUTS] = {false};
    for (int i = 0; i < c->op->n_parts; i++) {
        needed[sl_linear_layout(c->op->part[i].w.type)] = true;
    }
    int64_t piece = 0;
    for (int layout = SL_LINEAR_HALVES; layout < SL_LINEAR_N_LAYOUTS; layout++) {
        if (!needed[layout]) {
            continue;
        }
        x->stride[layout] =
            packed_bytes((enum sl_linear_layout)layout, c->kernels->rows->vector_bytes, x->n_cols);
        x->data[layout] = x->out[layout] = memory;
        memory += (size_t)n_tokens * x->stride[layout];
        for (int t = 0; t < n_tokens; t++) {
            for (int64_t first = 0; first < x->n_cols; first += PACK_COLS, piece++) {
                if (private || piece % c->n_threads == c->thread) {
                    pack_piece(c, x, (enum sl_linear_layout)layout, t, first);
                }
            }
        }
    }
    if (piece > 0 && !private && c->pool != NULL) {
        sl_pool_barrier(c->pool);
    }
}

/* Less is not worth handing out. */
#define LEAST_BYTES 8192

/* Rows of one part that a thread reads one after the other. */
struct stretch {
    int part;
    int64_t first, end;
    const void *next;   /* what it reads then, or NULL, */
    int64_t next_first; /* and which row that is */
};

/* A thread's way along the line. */
struct walk {
    const struct sl_linear_call *c;
    struct sl_share share;
    int piece;
    int part; /* next of the piece */
};

static struct walk walk_make(const struct sl_linear_call *c)
{
    return (struct walk){
        .c = c,
        .share = sl_share_make((int64_t)sl_linear_line_bytes(c->op), LEAST_BYTES, c->n_threads),
        .piece = c->thread,
    };
}

/* The next rows of this piece; false when there are no more. */
static bool next_in_piece(struct walk *w, struct stretch *s)
{
    int64_t from, to;
    sl_share_range(&w->share, w->piece, &from, &to);
    while (w->part < sl_linear_n_swept(w->c->op)) {
        *s = (struct stretch){.part = w->part++};
        sl_linear_rows_between(w->c->op, s->part, from, to, &s->first, &s->end);
        if (s->first < s->end) {
            return true;
        }
    }
    return false;
}

static bool next_stretch(struct walk *w, struct stretch *s)
{
    while (w->piece < w->share.n_pieces) {
        if (next_in_piece(w, s)) {
            return true;
        }
        w->piece = sl_share_take(&w->share, w->c->taken, 0);
        w->part = 0;
    }
    return false;
}

static const char *row_of(const struct sl_matrix *w, int64_t row)
{
    return (const char *)w->data + (size_t)row * sl_matrix_pitch_bytes(w);
}

/* n rows of a stretch times all tokens, to out[t * SL_LINEAR_CALL_ROWS + r]. */
static void products(const struct sl_linear_call *c, const struct sl_linear_x *x,
                     const struct stretch *s, int64_t row, int n, float *out)
{
    const struct sl_matrix *w = &c->op->part[s->part].w;
    const size_t row_bytes = sl_matrix_pitch_bytes(w);
    const struct sl_linear_ahead ahead = {s->end - row, s->next};
    for (int t = 0; t < c->n_tokens; t += SL_LINEAR_CALL_TOKENS) {
        const int left = c->n_tokens - t;
        c->kernels->rows->rows[w->type](row_of(w, row), row_bytes, n, &ahead, x, t,
                                        left < SL_LINEAR_CALL_TOKENS ? left : SL_LINEAR_CALL_TOKENS,
                                        out + t * SL_LINEAR_CALL_ROWS);
    }
    const float *bias = c->op->part[s->part].bias;
    for (int t = 0; bias != NULL && t < c->n_tokens; t++) {
        for (int r = 0; r < n; r++) {
            out[t * SL_LINEAR_CALL_ROWS + r] += bias[row + r];
        }
    }
}

static void store(const struct sl_linear_call *c, int i, int64_t row, int n, const float *out)
{
    const int64_t n_rows = c->op->part[i].w.n_rows;
    for (int t = 0; t < c->n_tokens; t++) {
        float *y = c->op->part[i].y + t * n_rows + row;
        const float *from = out + t * SL_LINEAR_CALL_ROWS;
        for (int r = 0; r < n; r++) {
            y[r] = c->op->accumulate ? y[r] + from[r] : from[r];
        }
    }
}

void sl_linear_fetch_rows(const struct sl_linear_call *c)
{
    struct walk w = walk_make(c);
    struct stretch s;
    const bool gated = c->op->activation != SL_ACT_NONE;
    if (next_in_piece(&w, &s)) {
        for (int i = s.part; i <= s.part + (gated ? 1 : 0); i++) {
            sl_linear_fetch_first(row_of(&c->op->part[i].w, s.first));
        }
    }
}

/* All rows of a stretch, or of gate and up in turns. */
static void run_stretch(const struct sl_linear_call *c, const struct sl_linear_x *x,
                        const struct stretch *s)
{
    /* With more than one call for the same rows, these should still be in the first-level cache. */
    const int step = c->n_tokens > SL_LINEAR_CALL_TOKENS ? 8 : SL_LINEAR_CALL_ROWS;
    const bool gated = c->op->activation != SL_ACT_NONE;
    const struct sl_matrix *up_w = &c->op->part[1].w;
    struct stretch up = {.part = 1, .first = s->first, .end = s->end};
    if (gated && s->next != NULL) { /* up's rows lie as those of the gate do */
        up.next = row_of(up_w, s->next_first);
    }
    float out[2][SL_LINEAR_ROWS_TOKENS * SL_LINEAR_CALL_ROWS];
    for (int64_t row = s->first; row < s->end; row += step) {
        const int n = s->end - row < step ? (int)(s->end - row) : step;
        products(c, x, s, row, n, out[0]);
        if (gated) {
            products(c, x, &up, row, n, out[1]);
            for (int t = 0; t < c->n_tokens; t++) {
                float *gate = out[0] + t * SL_LINEAR_CALL_ROWS;
                c->kernels->activate(c->op->activation, gate, out[1] + t * SL_LINEAR_CALL_ROWS,
                                     gate, n);
            }
        }
        store(c, s->part, row, n, out[0]);
    }
}

void sl_linear_run_rows(const struct sl_linear_call *c)
{
    struct sl_linear_x x = {.n_cols = c->op->part[0].w.n_cols};
    x.data[SL_LINEAR_FLOAT] = c->op->x;
    x.stride[SL_LINEAR_FLOAT] = (size_t)x.n_cols * sizeof(float);
    pack(c, &x);
    struct walk w = walk_make(c);
    struct stretch now, then;
    bool more = next_stretch(&w, &now);
    while (more) {
        more = next_stretch(&w, &then);
        if (more) {
            now.next_first = then.first;
            now.next = row_of(&c->op->part[then.part].w, then.first);
        }
        run_stretch(c, &x, &now);
        now = then;
    }
}
