/* SPDX-License-Identifier: Apache-2.0
 *
 * The way of panels: products for many tokens. Activations are packed once by the team. Each thread
 * then takes its rows in blocks, and a block's columns in ranges: the range is unpacked into panels
 * in the thread's own memory, small enough for the nearest cache, and multiplied with every tile of
 * tokens, whose sums grow in the thread's own memory too. So a weight is unpacked once, and no
 * matrix is ever whole in unpacked form. While a panel is used, the memory of the next is fetched.
 *
 * Scratch of the team: packed bytes, scales, and one array of sums for each kind of correction
 * among the parts (at most 1 + 1/8 + 4 * 1/4 bytes an activation); or words and scales
 * (2 + 1/8), or 2 bytes each as bfloats.
 */
#include <string.h>

#include "base/pool.h"
#include "cpu/linear_internal.h"
#include "cpu/share.h"

/* Float panels that share the copy of a tile of activations. */
#define FLOAT_PANELS 4
#define PACK_COLS SL_LINEAR_PACK_COLS

/* Own memory of a thread. Byte and float panels take turns. */
union panels {
    struct sl_linear_panel bytes;
    struct {
        float panel[FLOAT_PANELS][SL_LINEAR_FLOATS_STEPS * SL_LINEAR_MAX_PANEL_ROWS];
        float rows[SL_LINEAR_FLOATS_STEPS * SL_LINEAR_MAX_PANEL_ROWS];
        float tile[SL_LINEAR_FLOATS_TOKENS * SL_LINEAR_FLOATS_STRIDE];
    } floats;
};
_Static_assert(sizeof(union panels) <= SL_LINEAR_PANELS_BYTES &&
                   SL_LINEAR_PANELS_BYTES + sizeof(float) * SL_LINEAR_SUMS <=
                       SL_CPU_THREAD_SCRATCH_BYTES,
               "thread scratch");

/* A piece of work: some rows of a part (and of its partner, when gated) times some tokens. */
struct piece {
    int part;
    int n; /* rows */
    int64_t first;
    int token, end_token; /* `token` is the first of a tile */
    /* Sums, [tokens][stride], where stride is whole panels: in memory of their own, because the
     * rows of y mostly lie a power of two apart, which only a few places of a cache can hold. */
    float *sums;
    int stride;
};

static int min_int(int a, int b)
{
    return a < b ? a : b;
}

static char *align_64(char *p)
{
    return p + (-(uintptr_t)p & 63);
}

static const struct sl_linear_panel_type *panel_type(const struct sl_linear_call *c, int part)
{
    return &c->kernels->panels->types[c->op->part[part].w.type];
}

/* Two packed forms together would not fit the scratch: then words and bfloats are treated as
 * floats. So they are where the caller wants it, and where columns are no whole 32s. */
static enum sl_linear_panel_kind panel_kind(const struct sl_linear_call *c, int part)
{
    const enum sl_linear_panel_kind kind = panel_type(c, part)->kind;
    if (kind != SL_LINEAR_WORDS && kind != SL_LINEAR_BFLOATS) {
        return kind;
    }
    bool mixed = false;
    for (int i = 0; i < c->op->n_parts; i++) {
        const enum sl_linear_panel_kind other = panel_type(c, i)->kind;
        mixed = mixed || (other != kind && other != SL_LINEAR_FLOATS);
    }
    const bool ragged = c->op->part[part].w.n_cols % 32 != 0;
    return c->exact || mixed || ragged ? SL_LINEAR_FLOATS : kind;
}

static int find_correction(const struct sl_linear_packed *x, struct sl_linear_correction c)
{
    int i = 0;
    while (i < x->n_corrections &&
           (x->corrections[i].offset != c.offset || x->corrections[i].minimum != c.minimum ||
            x->corrections[i].group16 != c.group16)) {
        i++;
    }
    return i;
}

void sl_linear_packed_layout(const struct sl_linear_call *c, struct sl_linear_packed *x)
{
    *x = (struct sl_linear_packed){.n_cols = c->op->part[0].w.n_cols};
    const size_t n = (size_t)c->n_tokens * (size_t)x->n_cols;
    for (int i = 0; i < c->op->n_parts; i++) {
        const enum sl_linear_panel_kind kind = panel_kind(c, i);
        const struct sl_linear_correction correction = panel_type(c, i)->correction;
        if (kind == SL_LINEAR_WORDS) {
            x->words = true;
        } else if (kind == SL_LINEAR_BFLOATS) {
            x->bfloats = c->scratch;
        } else if (kind == SL_LINEAR_BYTES && find_correction(x, correction) == x->n_corrections) {
            x->corrections[x->n_corrections++] = correction;
        }
    }
    x->q = (int8_t *)c->scratch;
    x->d = (float *)(void *)align_64(c->scratch + n * (x->words ? 2 : 1));
    if (x->n_corrections > 0) {
        char *at = align_64((char *)(x->d + n / 32));
        for (int i = 0; i < x->n_corrections; i++) {
            x->sums[i] = at;
            at = align_64(at + n / (x->corrections[i].group16 ? 16 : 32) * sizeof(float));
        }
    }
}

/* The tile of tokens first .. first + n - 1 from column `col` on, for correction i. */
static struct sl_linear_tile tile_at(const struct sl_linear_packed *x, int i, int64_t first, int n,
                                     int64_t col)
{
    const int64_t blocks = first * (x->n_cols / 32) + n * (col / 32);
    struct sl_linear_tile tile = {.q = x->q + 32 * blocks * (x->words ? 2 : 1), .d = x->d + blocks};
    if (x->n_corrections > 0) {
        tile.sums = (const float *)x->sums[i] + blocks * (x->corrections[i].group16 ? 2 : 1);
    }
    return tile;
}

static char *bfloats_at(const struct sl_linear_packed *x, int64_t token, int n_tokens, int64_t col)
{
    return x->bfloats + 2 * (token * x->n_cols + n_tokens * col);
}

int sl_linear_packed_tile(const struct sl_linear_call *c, const struct sl_linear_packed *x)
{
    const int *tokens = c->kernels->panels->tile_tokens;
    return x->n_corrections > 0 ? tokens[SL_LINEAR_BYTES]
           : x->words           ? tokens[SL_LINEAR_WORDS]
           : x->bfloats != NULL ? tokens[SL_LINEAR_BFLOATS]
                                : 0;
}

void sl_linear_packed_fill(const struct sl_linear_call *c, const struct sl_linear_packed *x,
                           const float *src, int64_t stride, int token, int n_tokens, int64_t col,
                           int64_t n_cols)
{
    const struct sl_linear_panel_kernels *k = c->kernels->panels;
    const int64_t blocks = token * (x->n_cols / 32) + n_tokens * (col / 32);
    if (x->bfloats != NULL) {
        k->pack_bfloats(src, stride, n_tokens, n_cols, bfloats_at(x, token, n_tokens, col));
        return;
    }
    if (x->words) {
        k->pack_words(src, stride, n_tokens, n_cols, (int16_t *)(void *)x->q + 32 * blocks,
                      x->d + blocks);
        return;
    }
    void *sums[SL_LINEAR_MAX_PARTS];
    for (int i = 0; i < x->n_corrections; i++) {
        sums[i] = (float *)x->sums[i] + blocks * (x->corrections[i].group16 ? 2 : 1);
    }
    k->pack_bytes(src, stride, n_tokens, n_cols, x->q + 32 * blocks, x->d + blocks, x->corrections,
                  sums, x->n_corrections);
}

static void pack_x(const struct sl_linear_call *c, const struct sl_linear_packed *x)
{
    const int tile = sl_linear_packed_tile(c, x);
    if (tile == 0) {
        return;
    }
    int piece = 0;
    for (int t = 0; t < c->n_tokens; t += tile) {
        const int n = min_int(tile, c->n_tokens - t);
        for (int64_t col = 0; col < x->n_cols; col += PACK_COLS, piece++) {
            if (piece % c->n_threads != c->thread) {
                continue;
            }
            const int64_t n_cols = x->n_cols - col < PACK_COLS ? x->n_cols - col : PACK_COLS;
            sl_linear_packed_fill(c, x, c->op->x + t * x->n_cols + col, x->n_cols, t, n, col,
                                  n_cols);
        }
    }
    if (c->pool != NULL) {
        sl_pool_barrier(c->pool);
    }
}

/* Fetching what the next panel needs, a few lines at a time. */
struct fetch {
    const char *at;          /* first row */
    size_t row_bytes, bytes; /* to the next row; of each row */
    int n_rows;
    int row;
    size_t done; /* bytes of that row */
    int n_lines; /* at a time */
};

#define MOST_LINES 32

static void fetch_some(struct fetch *f)
{
    for (int i = 0; i < f->n_lines && f->row < f->n_rows; i++) {
        __builtin_prefetch(f->at + (size_t)f->row * f->row_bytes + f->done, 0, 2);
        f->done += 64;
        if (f->done >= f->bytes + 63) { /* a row may begin anywhere in its first line */
            f->done = 0;
            f->row++;
        }
    }
}

static const char *weights_at(const struct sl_linear_call *c, const struct piece *p, int64_t col)
{
    const struct sl_matrix *w = &c->op->part[p->part].w;
    return (const char *)w->data + (size_t)p->first * sl_matrix_pitch_bytes(w) +
           sl_type_row_bytes(w->type, col);
}

/* Columns of the panels of a row: as equal as whole super-blocks (or 128 words) allow. */
static int panel_cols(int64_t n_cols, bool words)
{
    const int most = words ? SL_LINEAR_BYTES_COLS / 2 : SL_LINEAR_BYTES_COLS;
    const int unit = words ? 128 : 256;
    const int64_t n = (n_cols + most - 1) / most;
    return (int)(((n_cols + n - 1) / n + unit - 1) / unit * unit);
}

/* n_rows rows of a piece from row `row` on, `step` columns from col on. Past the last column it is
 * the first ones of the rows behind the piece, which may lie past the end of the matrix (a fetch
 * never faults). */
static struct fetch fetch_of(const struct sl_linear_call *c, const struct piece *p, int row,
                             int n_rows, int64_t col, int step, int n_tiles)
{
    const struct sl_matrix *w = &c->op->part[p->part].w;
    const bool behind = col >= w->n_cols;
    const int64_t at = behind ? 0 : col;
    const int64_t n_cols = w->n_cols - at < step ? w->n_cols - at : step;
    struct fetch f = {.row_bytes = sl_matrix_pitch_bytes(w),
                      .bytes = sl_type_row_bytes(w->type, n_cols),
                      .n_rows = n_rows};
    f.at = weights_at(c, p, at) + (size_t)(behind ? p->n : row) * f.row_bytes;
    f.n_lines = (int)(f.bytes / 64 + 2) * f.n_rows / n_tiles + 1;
    /* More at once than the processor can have under way would only stop it; when there are few
     * tiles, unpacking fetches for itself. */
    f.n_lines = min_int(f.n_lines, MOST_LINES);
    return f;
}

static float *sums_at(const struct piece *p, int token, int row)
{
    return p->sums + (size_t)(token - p->token) * (size_t)p->stride + row;
}

/* A panel with all tiles of tokens. */
static void bytes_panel(const struct sl_linear_call *c, const struct sl_linear_packed *x,
                        const struct piece *p, int row, int64_t col, int n_cols,
                        struct fetch *fetch)
{
    const struct sl_linear_panel_kernels *k = c->kernels->panels;
    const struct sl_matrix *w = &c->op->part[p->part].w;
    const struct sl_linear_panel_type *type = panel_type(c, p->part);
    struct sl_linear_panel *panel = &((union panels *)(void *)c->own)->bytes;
    const size_t row_bytes = sl_matrix_pitch_bytes(w);
    const int correction = x->words ? 0 : find_correction(x, type->correction);
    const int most = k->tile_tokens[type->kind];
    const int n_rows = min_int(k->panel_rows, p->n - row);
    type->build((const uint8_t *)weights_at(c, p, col) + (size_t)row * row_bytes, row_bytes, n_rows,
                n_cols, panel);
    for (int t = p->token; t < p->end_token; t += most) {
        const int n = min_int(most, p->end_token - t);
        const struct sl_linear_tile tile = tile_at(x, correction, t, n, col);
        fetch_some(fetch);
        type->tile(panel, &tile, n, n_cols, sums_at(p, t, row), p->stride);
    }
}

/* By panels of bytes or words. All rows with some columns before the next columns: those of all
 * tokens stay in the cache meanwhile. */
static void bytes_rows(const struct sl_linear_call *c, const struct sl_linear_packed *x,
                       const struct piece *p)
{
    const int panel_rows = c->kernels->panels->panel_rows;
    const int most = c->kernels->panels->tile_tokens[panel_type(c, p->part)->kind];
    const int n_tiles = (p->end_token - p->token + most - 1) / most;
    const int step = panel_cols(x->n_cols, x->words);
    for (int64_t col = 0; col < x->n_cols; col += step) {
        const int n_cols = (int)(x->n_cols - col < step ? x->n_cols - col : step);
        for (int row = 0; row < p->n; row += panel_rows) {
            const int next = row + panel_rows;
            struct fetch fetch = next < p->n
                                     ? fetch_of(c, p, next, panel_rows, col, step, n_tiles)
                                     : fetch_of(c, p, 0, panel_rows, col + step, step, n_tiles);
            bytes_panel(c, x, p, row, col, n_cols, &fetch);
        }
    }
}

/* Up to FLOAT_PANELS * panel_rows rows by float or bfloat panels. */
static void floats_rows(const struct sl_linear_call *c, const struct sl_linear_packed *x,
                        const struct piece *p, bool bfloats)
{
    const struct sl_linear_panel_kernels *kernels = c->kernels->panels;
    const struct sl_matrix *w = &c->op->part[p->part].w;
    union panels *own = (union panels *)(void *)c->own;
    const size_t row_bytes = sl_matrix_pitch_bytes(w);
    const int range = SL_LINEAR_FLOATS_STEPS * (bfloats ? 2 : 1);
    const int most = kernels->tile_tokens[bfloats ? SL_LINEAR_BFLOATS : SL_LINEAR_FLOATS];
    const int n_tiles = (p->end_token - p->token + most - 1) / most;
    sl_linear_tile_fn *const multiply = bfloats ? kernels->tile_bfloats : kernels->tile_floats;
    for (int64_t col = 0; col < x->n_cols; col += range) {
        const int n_cols = (int)(x->n_cols - col < range ? x->n_cols - col : range);
        const int n_steps = bfloats ? n_cols / 2 : n_cols;
        for (int r = 0, i = 0; r < p->n; r += kernels->panel_rows, i++) {
            const char *data = weights_at(c, p, 0) + (size_t)r * row_bytes;
            const int n = min_int(kernels->panel_rows, p->n - r);
            (bfloats ? kernels->build_bfloats : kernels->build_floats)(
                w->type, data, row_bytes, n, col, n_cols, own->floats.panel[i], own->floats.rows);
        }
        struct fetch fetch = {0};
        if (bfloats) { /* the others are bound by arithmetic alone */
            fetch = fetch_of(c, p, 0, p->n, col + range, range, n_tiles * FLOAT_PANELS);
        }
        for (int t = p->token; t < p->end_token; t += most) {
            const int n = min_int(most, p->end_token - t);
            const void *tile = bfloats ? (void *)bfloats_at(x, t, n, col) : own->floats.tile;
            for (int k = 0; !bfloats && k < n; k++) {
                memcpy(own->floats.tile + k * SL_LINEAR_FLOATS_STRIDE,
                       c->op->x + (t + k) * x->n_cols + col, (size_t)n_cols * sizeof(float));
            }
            for (int r = 0, i = 0; r < p->n; r += kernels->panel_rows, i++) {
                fetch_some(&fetch);
                multiply(own->floats.panel[i], tile, n, n_steps, sums_at(p, t, r), p->stride);
            }
        }
    }
}

/* A piece whose sums have their start values. */
static void multiply(const struct sl_linear_call *c, const struct sl_linear_packed *x,
                     const struct piece *p)
{
    const struct sl_linear_panel_kernels *k = c->kernels->panels;
    const enum sl_linear_panel_kind kind = panel_kind(c, p->part);
    if (k->open != NULL) {
        k->open(kind, panel_type(c, p->part)->correction.group16);
    }
    if (kind == SL_LINEAR_FLOATS || kind == SL_LINEAR_BFLOATS) {
        floats_rows(c, x, p, kind == SL_LINEAR_BFLOATS);
    } else {
        bytes_rows(c, x, p);
    }
    if (k->close != NULL) {
        k->close();
    }
}

static void start_sums(const struct sl_linear_call *c, const struct piece *p)
{
    const int64_t stride = c->op->part[p->part].w.n_rows;
    const float *bias = c->op->part[p->part].bias;
    for (int t = p->token; t < p->end_token; t++) {
        float *sums = sums_at(p, t, 0);
        memset(sums, 0, (size_t)p->stride * sizeof(float));
        if (c->op->accumulate) {
            memcpy(sums, c->op->part[p->part].y + t * stride + p->first,
                   (size_t)p->n * sizeof(float));
        }
        for (int r = 0; bias != NULL && r < p->n; r++) {
            sums[r] += bias[p->first + r];
        }
    }
}

static void store_sums(const struct sl_linear_call *c, const struct piece *p)
{
    const int64_t stride = c->op->part[p->part].w.n_rows;
    for (int t = p->token; t < p->end_token; t++) {
        memcpy(c->op->part[p->part].y + t * stride + p->first, sums_at(p, t, 0),
               (size_t)p->n * sizeof(float));
    }
}

/* In parts that the memory for sums holds: fewer rows rather than fewer tokens, for which rows
 * would be unpacked again, but not with fewer than two panels, which share their tokens. */
static void run_part(const struct sl_linear_call *c, const struct sl_linear_packed *x,
                     const struct piece *p)
{
    const int panel_rows = c->kernels->panels->panel_rows;
    const int tile = c->kernels->panels->tile_tokens[panel_kind(c, p->part)];
    const int n_tokens = p->end_token - p->token;
    int stride = (p->n + panel_rows - 1) / panel_rows * panel_rows;
    while (stride > 2 * panel_rows && stride * n_tokens > SL_LINEAR_SUMS) {
        stride -= panel_rows;
    }
    const int tokens = SL_LINEAR_SUMS / stride / tile * tile;
    struct piece some = *p;
    some.sums = (float *)(void *)(c->own + SL_LINEAR_PANELS_BYTES);
    some.stride = stride;
    for (int r = 0; r < p->n; r += stride) {
        some.first = p->first + r;
        some.n = min_int(stride, p->n - r);
        for (int t = p->token; t < p->end_token; t += tokens) {
            some.token = t;
            some.end_token = min_int(t + tokens, p->end_token);
            start_sums(c, &some);
            multiply(c, x, &some);
            store_sums(c, &some);
        }
    }
}

static void run_piece(const struct sl_linear_call *c, const struct sl_linear_packed *x,
                      struct piece p)
{
    run_part(c, x, &p);
    if (c->op->activation == SL_ACT_NONE) {
        return;
    }
    p.part = 1;
    run_part(c, x, &p);
    const int64_t stride = c->op->part[0].w.n_rows;
    for (int t = p.token; t < p.end_token; t++) {
        float *gate = c->op->part[0].y + t * stride + p.first;
        const float *up = c->op->part[1].y + t * stride + p.first;
        c->kernels->activate(c->op->activation, gate, up, gate, p.n);
    }
}

/* How the work is shared: each part is cut into units of panel_rows rows, and the tokens of a unit
 * into the same number of splits. Split after split, unit after unit, part after part, each thread
 * takes a contiguous stretch of equal cost; so at most two threads unpack the same rows. */
struct shares {
    int n_parts, n_splits;
    int token_unit; /* splits begin at whole tiles of every part */
    int64_t units[SL_LINEAR_MAX_PARTS];
    int64_t cost[SL_LINEAR_MAX_PARTS]; /* of one split of one unit */
    int64_t total;
};

#define SPLITS_PER_THREAD 8
/* With fewer tokens in a split unpacking would count. */
#define LEAST_SPLIT 42

static int common_multiple(int a, int b)
{
    int both = a;
    while (both % b != 0) {
        both += a;
    }
    return both;
}

static struct shares make_shares(const struct sl_linear_call *c)
{
    /* Cost of a multiplication by kind of panel. */
    static const int cost[] = {[SL_LINEAR_BYTES] = 2,
                               [SL_LINEAR_WORDS] = 4,
                               [SL_LINEAR_FLOATS] = 7,
                               [SL_LINEAR_BFLOATS] = 4};
    const struct sl_linear_panel_kernels *k = c->kernels->panels;
    struct shares s = {.n_parts = c->op->activation != SL_ACT_NONE ? 1 : c->op->n_parts,
                       .token_unit = 1};
    for (int i = 0; i < c->op->n_parts; i++) {
        s.token_unit = common_multiple(s.token_unit, k->tile_tokens[panel_kind(c, i)]);
    }
    s.token_unit *= (LEAST_SPLIT + s.token_unit - 1) / s.token_unit;
    int64_t n_units = 0;
    for (int i = 0; i < s.n_parts; i++) {
        s.units[i] = (c->op->part[i].w.n_rows + k->panel_rows - 1) / k->panel_rows;
        s.cost[i] = cost[panel_kind(c, i)];
        n_units += s.units[i];
    }
    const int64_t wanted = (SPLITS_PER_THREAD * (int64_t)c->n_threads + n_units - 1) / n_units;
    const int64_t most = (c->n_tokens + s.token_unit - 1) / s.token_unit;
    s.n_splits = c->n_threads == 1 ? 1 : (int)(wanted < most ? wanted : most);
    for (int i = 0; i < s.n_parts; i++) {
        s.total += s.units[i] * s.n_splits * s.cost[i];
    }
    return s;
}

/* The first item (split of a unit) of part i at or after `cost` of all. */
static int64_t item_at(const struct shares *s, int i, int64_t cost)
{
    for (int before = 0; before < i; before++) {
        cost -= s->units[before] * s->n_splits * s->cost[before];
    }
    const int64_t item = cost <= 0 ? 0 : (cost + s->cost[i] - 1) / s->cost[i];
    const int64_t n_items = s->units[i] * s->n_splits;
    return item < n_items ? item : n_items;
}

static int split_token(const struct sl_linear_call *c, const struct shares *s, int split)
{
    const int n_units = (c->n_tokens + s->token_unit - 1) / s->token_unit;
    return min_int(c->n_tokens, n_units * split / s->n_splits * s->token_unit);
}

static void run_items(const struct sl_linear_call *c, const struct sl_linear_packed *x,
                      const struct shares *s, int part, int64_t item, int64_t end)
{
    const int panel_rows = c->kernels->panels->panel_rows;
    while (item < end) {
        const int split = (int)(item % s->n_splits);
        int64_t n_items = s->n_splits - split < end - item ? s->n_splits - split : end - item;
        int64_t n_units = 1;
        if (n_items == s->n_splits) { /* all tokens: several units at once */
            n_units = (end - item) / s->n_splits;
            n_units = n_units < FLOAT_PANELS ? n_units : FLOAT_PANELS;
        }
        struct piece p = {.part = part,
                          .first = item / s->n_splits * panel_rows,
                          .token = split_token(c, s, split),
                          .end_token = split_token(c, s, split + (int)n_items)};
        const int64_t left = c->op->part[part].w.n_rows - p.first;
        p.n = (int)(left < n_units * panel_rows ? left : n_units * panel_rows);
        run_piece(c, x, p);
        item += n_units * n_items;
    }
}

void sl_linear_run_panels(const struct sl_linear_call *c)
{
    struct sl_linear_packed x;
    sl_linear_packed_layout(c, &x);
    pack_x(c, &x);
    const struct shares s = make_shares(c);
    /* Float panels share the copy of a tile. */
    const struct sl_share share =
        sl_share_make(s.total, FLOAT_PANELS * s.n_splits * s.cost[0], c->n_threads);
    for (int piece = c->thread; piece < share.n_pieces;
         piece = sl_share_take(&share, c->taken, 0)) {
        int64_t from, to;
        sl_share_range(&share, piece, &from, &to);
        for (int i = 0; i < s.n_parts; i++) {
            run_items(c, &x, &s, i, item_at(&s, i, from), item_at(&s, i, to));
        }
    }
}

void sl_linear_run_packed(const struct sl_linear_call *c, const struct sl_linear_packed *x)
{
    const struct piece p = {.n = (int)c->op->part[0].w.n_rows,
                            .end_token = c->n_tokens,
                            .sums = c->op->part[0].y,
                            .stride = SL_LINEAR_MAX_PANEL_ROWS};
    memset(p.sums, 0, (size_t)(p.end_token * p.stride) * sizeof(float));
    multiply(c, x, &p);
}
