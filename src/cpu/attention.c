/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention on the CPU: one pass over the cache with a running maximum and sum for each row, never
 * a matrix of all scores.
 *
 * A row is one query head of one token. The rows that read one KV head are numbered token by token
 * and cut into tiles of up to 64, so that every key and value read serves the whole tile. An item
 * of work is (tile, KV head, range of positions):
 *
 *   - few tokens (decode): the positions are cut into ranges; each item leaves its values, maximum
 *     and sum in the scratch, and after a barrier the ranges of a row are merged exactly;
 *   - many tokens (prefill): one range, results go out at once.
 *
 * Tiles and ranges follow from shapes and positions alone, and ranges are merged in order, so the
 * result is the same for any number of threads.
 */
#include <limits.h>
#include <math.h>
#include <string.h>

#include "cpu/team.h"
#include "op/kv.h"

#define TILE_ROWS 64
/* With fewer items than this, tiles are halved so that more threads have work. */
#define FEW_ITEMS 32
#define MAX_HEAD_DIM 256
/* Shorter ranges cost more in merging and hand-outs than they gain. */
#define MIN_RANGE (2 * SL_KV_BLOCK)

/* A thread's working memory: 257 KiB, of which smaller heads use less. */
struct memory {
    float q[SL_CPU_MATRIX_Q_BYTES / sizeof(float)]; /* or as floats, which are fewer */
    float o[TILE_ROWS * MAX_HEAD_DIM];
    float kv[SL_CPU_MATRIX_BYTES / sizeof(float)]; /* keys, then values, of one block */
    float s[TILE_ROWS * SL_KV_BLOCK];
    float max[TILE_ROWS], sum[TILE_ROWS], factor[TILE_ROWS];
    float first[TILE_ROWS], end[TILE_ROWS]; /* bounds inside the block, for softmax_tile */
    int32_t first_pos[TILE_ROWS], end_pos[TILE_ROWS];
};
_Static_assert(sizeof(struct memory) <= SL_CPU_THREAD_SCRATCH_BYTES, "thread scratch");
_Static_assert(SL_CPU_MATRIX_ROWS == TILE_ROWS &&
                   SL_CPU_MATRIX_BYTES >= sizeof(float) * SL_KV_BLOCK * MAX_HEAD_DIM,
               "memory of a block");

struct work {
    const struct sl_op_attention *op;
    const struct sl_cpu_attention_kernels *k;
    const struct sl_cpu_attention_matrix_kernels *matrix; /* NULL: not for this cache */
    int32_t n_tokens;
    int32_t group; /* query heads of a KV head */
    int32_t start; /* first position of range 0 */
    int32_t range; /* positions of a range, whole blocks */
    int n_ranges;
    int tile_rows;
    int n_tiles;
    float *partials; /* [n_ranges, n_tokens, n_heads] of head_dim values, maximum, sum */
};

/* Rows [first, first + n) of a KV head, all of one sequence. */
struct tile {
    int32_t kv_head;
    int32_t first;
    int32_t n;
    int32_t seq;
};

static int32_t row_token(const struct work *w, int32_t row)
{
    return row / w->group;
}

static int32_t row_head(const struct work *w, const struct tile *tile, int32_t row)
{
    return tile->kv_head * w->group + row % w->group;
}

/* Positions first .. end - 1 that a token at `pos` sees of what is here; false: none. */
static bool seen_positions(const struct sl_op_attention *op, int32_t pos, int32_t *first,
                           int32_t *end)
{
    const int32_t here_begin = sl_kv_here_begin(&op->kv), here_end = sl_kv_here_end(&op->kv);
    *first = op->window > 0 && pos >= op->window ? pos - op->window + 1 : 0;
    *first = here_begin > *first ? here_begin : *first;
    *end = here_end < pos + 1 ? here_end : pos + 1;
    return *first < *end;
}

/* How the op is cut. Every thread computes the same. */
static void work_init(struct work *w, const struct sl_cpu_thread *t, const struct sl_op *op)
{
    const struct sl_op_attention *a = &op->attention;
    *w = (struct work){
        .op = a,
        .k = t->kernels->attention,
        .n_tokens = op->n_tokens,
        .group = a->n_heads / a->kv.n_kv_heads,
        .range = INT32_MAX,
        .n_ranges = 1,
        .partials = t->scratch,
    };
    if (a->kv.types.k == SL_TYPE_F16 && a->kv.types.v == SL_TYPE_F16) {
        w->matrix = t->kernels->matrix;
    }
    const int64_t n_rows = (int64_t)op->n_tokens * w->group;
    const bool split = op->n_tokens <= SL_ATTN_SPLIT_TOKENS;
    const bool few = n_rows * a->kv.n_kv_heads < FEW_ITEMS * TILE_ROWS;
    w->tile_rows = few && !split ? TILE_ROWS / 2 : TILE_ROWS;
    w->n_tiles = (int)((n_rows + w->tile_rows - 1) / w->tile_rows);
    if (!split) {
        return;
    }
    int32_t start = INT32_MAX;
    int32_t end = 0;
    for (int32_t i = 0; i < op->n_tokens; i++) {
        int32_t first, last;
        if (seen_positions(a, a->pos[i], &first, &last)) {
            start = first < start ? first : start;
            end = last > end ? last : end;
        }
    }
    if (start >= end) {
        return; /* nobody sees anything */
    }
    start -= start % SL_KV_BLOCK;
    const int32_t n_blocks = (end - start + SL_KV_BLOCK - 1) / SL_KV_BLOCK;
    const int32_t range = (n_blocks + SL_ATTN_MAX_SPLITS - 1) / SL_ATTN_MAX_SPLITS * SL_KV_BLOCK;
    w->start = start;
    w->range = range < MIN_RANGE ? MIN_RANGE : range;
    w->n_ranges = (end - start + w->range - 1) / w->range;
}

static float *partial(const struct work *w, int range, int32_t token, int32_t head)
{
    const int64_t row = ((int64_t)range * w->n_tokens + token) * w->op->n_heads + head;
    return w->partials + row * (w->op->kv.head_dim + 2);
}

/* Queries of the tile, scaled: as rows for the direct kernels, as columns (padded with zero rows)
 * for the tile kernels. */
static void gather_queries(const struct work *w, const struct tile *tile, int n_padded, float *q)
{
    const int n = w->op->kv.head_dim;
    const float scale = w->op->scale;
    for (int r = 0; r < tile->n; r++) {
        const int32_t row = tile->first + r;
        const int64_t at = (int64_t)row_token(w, row) * w->op->n_heads + row_head(w, tile, row);
        const float *src = w->op->q + at * n;
        float turned[SL_KV_MAX_HEAD_DIM];
        if (sl_kv_turns_keys(w->op->kv.types)) {
            memcpy(turned, src, sizeof(float) * (size_t)n);
            sl_kv_turn(turned, n);
            src = turned;
        }
        if (n_padded == 0) {
            for (int i = 0; i < n; i++) {
                q[r * n + i] = src[i] * scale;
            }
        } else {
            for (int i = 0; i < n; i++) {
                q[i * n_padded + r] = src[i] * scale;
            }
        }
    }
    for (int i = 0; n_padded > tile->n && i < n; i++) {
        memset(q + i * n_padded + tile->n, 0, sizeof(float) * (size_t)(n_padded - tile->n));
    }
}

/* Keys lo..hi-1 of the block at `base` (a multiple of SL_KV_BLOCK), few rows. `more`: the next
 * block will be read too. */
static void block_direct(const struct work *w, const struct tile *tile, struct memory *m,
                         int32_t base, int lo, int hi, bool more)
{
    const struct sl_kv_view *kv = &w->op->kv;
    const struct sl_cpu_attention_kernels *k = w->k;
    const int n = kv->head_dim;
    const void *keys = sl_kv_key(kv, tile->seq, base + lo, tile->kv_head);
    const void *values = sl_kv_value(kv, tile->seq, base + lo, tile->kv_head);
    const void *next = more ? sl_kv_key(kv, tile->seq, base + SL_KV_BLOCK, tile->kv_head) : NULL;
    k->scores_direct(kv->types.k, m->q, tile->n, keys, hi - lo, n, m->s + lo, values);
    for (int r = 0; r < tile->n; r++) {
        const float factor =
            k->softmax_direct(m->s + r * SL_KV_BLOCK, (int)(m->first_pos[r] - base),
                              (int)(m->end_pos[r] - base), w->op->softcap, &m->max[r], &m->sum[r]);
        if (factor != 1.0f) {
            k->scale(m->o + r * n, factor, n);
        }
    }
    k->values_direct(kv->types.v, m->s + lo, tile->n, values, hi - lo, n, m->o, next);
}

/* The same for many rows: the block is unpacked once for all of them. */
static void block_tile(const struct work *w, const struct tile *tile, struct memory *m,
                       int32_t base, int lo, int hi, int n_padded)
{
    const struct sl_kv_view *kv = &w->op->kv;
    const struct sl_cpu_attention_kernels *k = w->k;
    const int n = kv->head_dim;
    const int n_keys = hi - lo;
    for (int r = 0; r < n_padded; r++) {
        const bool real = r < tile->n;
        m->first[r] = real ? (float)(m->first_pos[r] - base - lo) : 0.0f;
        m->end[r] = real ? (float)(m->end_pos[r] - base - lo) : 0.0f;
    }
    k->unpack(kv->types.k, sl_kv_key(kv, tile->seq, base + lo, tile->kv_head), m->kv, n_keys, n);
    const int n_scored = (n_keys + k->key_tile - 1) / k->key_tile * k->key_tile;
    memset(m->kv + n_keys * n, 0, sizeof(float) * (size_t)((n_scored - n_keys) * n));
    k->scores_tile(m->q, n_padded, m->kv, n_scored, n, m->s);
    k->softmax_tile(m->s, n_padded, n_keys, m->first, m->end, w->op->softcap, m->max, m->sum,
                    m->factor);
    for (int r = 0; r < tile->n; r++) {
        if (m->factor[r] != 1.0f) {
            k->scale(m->o + r * n, m->factor[r], n);
        }
    }
    k->unpack(kv->types.v, sl_kv_value(kv, tile->seq, base + lo, tile->kv_head), m->kv, n_keys, n);
    k->values_tile(m->s, n_padded, m->kv, n_keys, n, m->o);
}

/* The same by products of tiles. */
static void block_matrix(const struct work *w, const struct tile *tile, struct memory *m,
                         int32_t base, int lo, int hi, bool more)
{
    const struct sl_kv_view *kv = &w->op->kv;
    const int n = kv->head_dim;
    const void *keys = sl_kv_key(kv, tile->seq, base + lo, tile->kv_head);
    const void *values = sl_kv_value(kv, tile->seq, base + lo, tile->kv_head);
    const void *next = more ? sl_kv_key(kv, tile->seq, base + SL_KV_BLOCK, tile->kv_head) : NULL;
    w->matrix->scores(m->q, tile->n, keys, hi - lo, n, m->s + lo, m->kv, values);
    for (int r = 0; r < tile->n; r++) {
        m->factor[r] = w->k->softmax_direct(m->s + r * SL_KV_BLOCK, (int)(m->first_pos[r] - base),
                                            (int)(m->end_pos[r] - base), w->op->softcap, &m->max[r],
                                            &m->sum[r]);
    }
    w->matrix->values(m->s + lo, tile->n, values, hi - lo, n, m->factor, m->o, m->kv, next);
}

/* Position bounds of every row of the tile; those of all of them in *first, *end. */
static void bounds_init(const struct work *w, const struct tile *tile, struct memory *m,
                        int32_t *first, int32_t *end)
{
    *first = INT32_MAX;
    *end = 0;
    for (int r = 0; r < tile->n; r++) {
        const int32_t pos = w->op->pos[row_token(w, tile->first + r)];
        if (!seen_positions(w->op, pos, &m->first_pos[r], &m->end_pos[r])) {
            m->first_pos[r] = m->end_pos[r] = 0;
            continue;
        }
        *first = m->first_pos[r] < *first ? m->first_pos[r] : *first;
        *end = m->end_pos[r] > *end ? m->end_pos[r] : *end;
    }
}

/* y = o / sum, after the sink has joined the sum. */
static void finish_row(const struct work *w, int32_t token, int32_t head, const float *o, float max,
                       float sum)
{
    const int n = w->op->kv.head_dim;
    const int64_t row = (int64_t)token * w->op->n_heads + head;
    float factor = 1.0f;
    if (w->op->sinks != NULL) {
        const float sink = w->op->sinks[head];
        const float top = sink > max ? sink : max;
        const float base = top > -INFINITY ? top : 0.0f; /* the difference would be NaN */
        factor = expf(max - base);
        sum = sum * factor + expf(sink - base);
        max = top;
    }
    float *y = w->op->y + row * n;
    memset(y, 0, sizeof(float) * (size_t)n);
    if (sum != 0.0f) {
        w->k->add_scaled(y, o, factor / sum, n);
    }
    if (w->op->lse != NULL) {
        w->op->lse[row] = max > -INFINITY ? max + logf(sum) : -INFINITY;
    }
}

static void store_rows(const struct work *w, const struct tile *tile, const struct memory *m,
                       int range)
{
    const int n = w->op->kv.head_dim;
    for (int r = 0; r < tile->n; r++) {
        const int32_t token = row_token(w, tile->first + r);
        const int32_t head = row_head(w, tile, tile->first + r);
        if (w->n_ranges == 1) {
            finish_row(w, token, head, m->o + r * n, m->max[r], m->sum[r]);
        } else {
            float *out = partial(w, range, token, head);
            memcpy(out, m->o + r * n, sizeof(float) * (size_t)n);
            out[n] = m->max[r];
            out[n + 1] = m->sum[r];
        }
    }
}

static void run_tile(const struct work *w, const struct tile *tile, struct memory *m, int range)
{
    const int n = w->op->kv.head_dim;
    const bool matrix = w->matrix != NULL && tile->n >= w->matrix->min_rows;
    const bool direct = !matrix && tile->n < w->k->tile_min_rows;
    const int n_padded =
        direct || matrix ? 0 : (tile->n + w->k->row_tile - 1) / w->k->row_tile * w->k->row_tile;
    const int n_rows = n_padded > 0 ? n_padded : tile->n;
    int32_t first, end;
    bounds_init(w, tile, m, &first, &end);
    gather_queries(w, tile, n_padded, matrix ? m->o : m->q);
    if (matrix) {
        w->matrix->pack_queries(m->o, tile->n, n, m->q);
        w->matrix->open();
    }
    memset(m->o, 0, sizeof(float) * (size_t)(n_rows * n));
    for (int r = 0; r < n_rows; r++) {
        m->max[r] = -INFINITY;
        m->sum[r] = 0.0f;
    }
    const int64_t range_first = w->start + (int64_t)range * w->range;
    const int64_t range_end = range_first + w->range;
    first = range_first > first ? (int32_t)range_first : first;
    end = range_end < end ? (int32_t)range_end : end;
    for (int32_t pos = first; pos < end;) {
        const int32_t base = pos - pos % SL_KV_BLOCK;
        const int lo = (int)(pos - base);
        const int hi = end - base < SL_KV_BLOCK ? (int)(end - base) : SL_KV_BLOCK;
        if (matrix) {
            block_matrix(w, tile, m, base, lo, hi, end - base > SL_KV_BLOCK);
        } else if (direct) {
            block_direct(w, tile, m, base, lo, hi, end - base > SL_KV_BLOCK);
        } else {
            block_tile(w, tile, m, base, lo, hi, n_padded);
        }
        pos = base + SL_KV_BLOCK;
    }
    if (matrix) {
        w->matrix->close();
    }
    store_rows(w, tile, m, range);
}

/* Item: a tile of rows, cut where the sequence changes. */
static void run_item(const struct work *w, struct memory *m, int item)
{
    const int n_kv_heads = w->op->kv.n_kv_heads;
    const int range = item / n_kv_heads % w->n_ranges;
    /* Later tokens have more to read: they go first, so that no thread ends on a long one. */
    const int index = w->n_tiles - 1 - item / n_kv_heads / w->n_ranges;
    struct tile tile = {.kv_head = item % n_kv_heads, .first = index * w->tile_rows};
    const int32_t n_rows = w->n_tokens * w->group;
    const int32_t end = tile.first + w->tile_rows < n_rows ? tile.first + w->tile_rows : n_rows;
    const int32_t *seq = w->op->seq;
    while (tile.first < end) {
        tile.seq = seq != NULL ? seq[row_token(w, tile.first)] : 0;
        tile.n = 1;
        while (tile.first + tile.n < end &&
               (seq == NULL || seq[row_token(w, tile.first + tile.n)] == tile.seq)) {
            tile.n++;
        }
        run_tile(w, &tile, m, range);
        tile.first += tile.n;
    }
}

/* Join the ranges of one row: each is weighted by e^(its maximum - the largest). */
static void merge_row(const struct work *w, struct memory *m, int32_t token, int32_t head)
{
    const int n = w->op->kv.head_dim;
    float max = -INFINITY;
    for (int i = 0; i < w->n_ranges; i++) {
        const float range_max = partial(w, i, token, head)[n];
        max = range_max > max ? range_max : max;
    }
    float sum = 0.0f;
    memset(m->o, 0, sizeof(float) * (size_t)n);
    for (int i = 0; i < w->n_ranges; i++) {
        const float *part = partial(w, i, token, head);
        if (part[n] == -INFINITY) {
            continue; /* nothing of this range was visible to the row */
        }
        const float factor = expf(part[n] - max);
        sum += part[n + 1] * factor;
        w->k->add_scaled(m->o, part, factor, n);
    }
    finish_row(w, token, head, m->o, max, sum);
}

void sl_cpu_attention(const struct sl_cpu_thread *t, const struct sl_op *op)
{
    struct work w;
    work_init(&w, t, op);
    const int n_items = w.n_tiles * w.n_ranges * op->attention.kv.n_kv_heads;
    for (int item = sl_cpu_take(t); item < n_items; item = sl_cpu_take(t)) {
        run_item(&w, t->own, item);
    }
    if (w.n_ranges == 1) {
        return;
    }
    sl_cpu_barrier(t);
    const int32_t n_rows = op->n_tokens * op->attention.n_heads;
    for (int32_t row = t->thread; row < n_rows; row += t->n_threads) {
        merge_row(&w, t->own, row / op->attention.n_heads, row % op->attention.n_heads);
    }
}
