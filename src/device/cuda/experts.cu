/* SPDX-License-Identifier: Apache-2.0
 *
 * The experts of a mixture: choice of kernels, and the order of what there is to do. What happens
 * between the products is in experts_pack.cu.
 *
 * Few tokens with quantized weights are vector products (experts_vec.cuh). Otherwise:
 *
 *   sort      pairs by expert, and tiles (experts_sort.cu); not for a token or two
 *   then for each chunk of positions
 *     pack    the tokens' x by position, in the form that gate and up want
 *     gate/up with the activation, to h by position
 *     pack    h
 *     down    to out by position (in the place of the packed x)
 *     sum     y of each token from its pairs in the chunk, in the order of its ids
 *
 * No sum depends on timing. Tiles are small (8 to 64 pairs, linear_mid) while experts have few
 * pairs each, and large (128, linear_gemm) from 64 pairs an expert on. On compute capability 9.0
 * tiles of packed types are large from 8 pairs on (sm90/experts_sm90).
 *
 *   scratch: | order | x by position, later out | x in up's form | h | up | h packed |
 */
#include "device/cuda/experts_pack.cuh"
#include "device/cuda/experts_vec.cuh"

#ifndef SL_CUDA_EMULATE
#include "device/cuda/cuda_ops.h"
#endif
#include "device/cuda/sm90/sm90.cuh"

#define VEC_TOKENS 8 /* vector products whatever the experts */
#define VEC_MOST_TOKENS 32
#define VEC_MOST_MEAN 2 /* pairs an expert */
#define DIRECT_MAX_TOKENS 2
#define GEMM_MIN_MEAN 64 /* pairs an expert */
#define SM90_MIN_MEAN 8

enum products { PRODUCTS_PLAIN, PRODUCTS_MID, PRODUCTS_GEMM, PRODUCTS_SM90 };

/* What the tiles of a pass are for. */
enum size { SIZE_SMALL, SIZE_LARGE, SIZE_SM90 };

/* ---- choice ---- */

static bool is_float_kind(int type)
{
    return type == SL_TYPE_F32 || type == SL_TYPE_F16 || type == SL_TYPE_BF16;
}

static bool has_large_blocks(int type)
{
    return sl_type_traits((uint32_t)type)->block_items == 256;
}

#ifdef SL_CUDA_SM90
/* Rows are stored two at a time, to scratch. */
static bool is_for_sm90(const struct sl_experts_matrix *m)
{
    return !is_float_kind((int)m->type) && m->n_cols % SL_SM90_PACKED_COLS == 0 &&
           m->n_rows % 2 == 0;
}
#endif

static enum size choose_size(const struct sl_op_experts *op, int mean,
                             const struct sl_cuda_props *props)
{
#ifdef SL_CUDA_SM90
    if (sl_is_sm90(props) && is_for_sm90(&op->gate) && is_for_sm90(&op->up) &&
        is_for_sm90(&op->down)) {
        return mean >= SM90_MIN_MEAN ? SIZE_SM90 : SIZE_SMALL;
    }
#endif
    (void)op, (void)props;
    return mean >= GEMM_MIN_MEAN ? SIZE_LARGE : SIZE_SMALL;
}

static enum products choose_products(const struct sl_experts_matrix *m, enum size size)
{
    if (size == SIZE_SM90) {
        return PRODUCTS_SM90;
    }
    if (is_float_kind((int)m->type)) {
        const bool aligned = m->n_cols % 8 == 0 && ((uintptr_t)m->data & 15) == 0;
        if (m->type == SL_TYPE_F32 || !aligned) {
            return PRODUCTS_PLAIN;
        }
    }
    return size == SIZE_LARGE ? PRODUCTS_GEMM : PRODUCTS_MID;
}

static enum sl_experts_form choose_form(const struct sl_experts_matrix *m, enum size size)
{
    const enum products products = choose_products(m, size);
    return products == PRODUCTS_SM90                                  ? SL_EXPERTS_ROWS
           : products == PRODUCTS_PLAIN                               ? SL_EXPERTS_FLOAT
           : products == PRODUCTS_GEMM || is_float_kind((int)m->type) ? SL_EXPERTS_HALF
                                                                      : SL_EXPERTS_8BIT;
}

/* In which SL_EXPERTS_ROWS wants the columns. */
static int column_order(const struct sl_experts_matrix *m)
{
    return sl_sm90_order((int)m->type);
}

static int multiply(cudaStream_t stream, const struct sl_experts_matrix *m, enum size size,
                    struct sl_experts_args *g, const struct sl_cuda_props *props)
{
    const int type = (int)m->type;
    const enum products products = choose_products(m, size);
    const int rows = products == PRODUCTS_SM90   ? SL_SM90_ROWS
                     : products == PRODUCTS_GEMM ? SL_GEMM_ROWS
                                                 : SL_MID_ROWS;
    const int tile_rows = g->activation != SL_ACT_NONE ? rows / 2 : rows;
    g->n_tiles = (g->n_rows + tile_rows - 1) / tile_rows;
    if (products == PRODUCTS_PLAIN) {
        return sl_experts_plain(stream, type, g);
    }
#ifdef SL_CUDA_SM90
    if (products == PRODUCTS_SM90) {
        return has_large_blocks(type) ? sl_experts_sm90_k(stream, type, g, props)
                                      : sl_experts_sm90_q(stream, type, g, props);
    }
#endif
    (void)props;
    if (products == PRODUCTS_GEMM) {
        return is_float_kind(type)      ? sl_experts_gemm_f(stream, type, g)
               : has_large_blocks(type) ? sl_experts_gemm_k(stream, type, g)
                                        : sl_experts_gemm_q(stream, type, g);
    }
    return is_float_kind(type)      ? sl_experts_mid_f(stream, type, g)
           : has_large_blocks(type) ? sl_experts_mid_k(stream, type, g)
                                    : sl_experts_mid_q(stream, type, g);
}

static void set_part(struct sl_experts_part *to, const struct sl_experts_matrix *m)
{
    to->data = (const uint8_t *)m->data;
    to->table = m->table;
    to->bias = m->bias;
    to->bytes = m->n_rows * (int64_t)sl_type_row_bytes(m->type, m->n_cols);
}

/* ---- the operator, its pairs sorted ---- */

/* An op on its way, and where things lie in scratch. */
struct work {
    const struct sl_op_experts *op;
    const struct sl_cuda_props *props;
    struct sl_experts_order order;
    int32_t n_tokens, n_embd, n_ff;
    enum size size;
    bool split; /* gate and up differ in type */
    uint8_t *x, *x_up, *h_packed;
    float *h, *up;
};

static uint8_t *take(uint8_t **at, size_t bytes)
{
    uint8_t *p = *at;
    *at += (bytes + 255) / 256 * 256;
    return p;
}

static void choose_tiles(struct work *w)
{
    struct sl_experts_order *o = &w->order;
    const int mean = (o->n_pairs + o->n - 1) / o->n;
    o->direct = w->n_tokens <= DIRECT_MAX_TOKENS;
    w->size = o->direct ? SIZE_SMALL : choose_size(w->op, mean, w->props);
    /* The ids of a token are distinct: an expert has n_tokens pairs at most. */
    o->tile_tokens = w->size != SIZE_SMALL           ? SL_GEMM_TOKENS
                     : w->n_tokens <= 8 || mean <= 4 ? 8
                     : mean <= 24                    ? 32
                                                     : 64;
}

/* Returns whether it fits. */
static bool lay_out(struct work *w, const struct sl_op *op, uint8_t *scratch, size_t bytes)
{
    struct sl_experts_order *o = &w->order;
    const size_t n_pairs = (size_t)o->n_pairs;
    const size_t chunk = (size_t)o->chunk;
    uint8_t *at = scratch;
    o->tiles = (struct sl_experts_tile *)take(&at, n_pairs * sizeof(struct sl_experts_tile));
    o->tile_of = (int32_t *)take(&at, n_pairs * sizeof(int32_t));
    o->pair_at = (int32_t *)take(&at, n_pairs * sizeof(int32_t));
    o->position = (int32_t *)take(&at, n_pairs * sizeof(int32_t));
    o->group_first = (int32_t *)take(&at, (size_t)o->n * sizeof(int32_t));
    o->group_tile = (int32_t *)take(&at, (size_t)o->n * sizeof(int32_t));
    const int64_t out_bytes = (int64_t)w->n_embd * 4;
    const int64_t x_bytes =
        sl_experts_row_stride(choose_form(&op->experts.gate, w->size), w->n_embd);
    w->x = take(&at, chunk * (size_t)(x_bytes > out_bytes ? x_bytes : out_bytes));
    w->h = (float *)take(&at, chunk * (size_t)w->n_ff * sizeof(float));
    w->x_up = w->x;
    w->up = NULL;
    if (w->split) {
        w->x_up = take(&at, chunk * (size_t)sl_experts_row_stride(
                                        choose_form(&op->experts.up, w->size), w->n_embd));
        w->up = (float *)take(&at, chunk * (size_t)w->n_ff * sizeof(float));
    }
    const enum sl_experts_form h_form = choose_form(&op->experts.down, w->size);
    w->h_packed = (uint8_t *)w->h;
    if (h_form != SL_EXPERTS_FLOAT) {
        w->h_packed = take(&at, chunk * (size_t)sl_experts_row_stride(h_form, w->n_ff));
    }
    return (size_t)(at - scratch) <= bytes;
}

/* Gate, or up, or both, from x by position. */
static int run_up(cudaStream_t stream, const struct work *w, const struct sl_experts_args *base,
                  const struct sl_experts_matrix *m, uint8_t *xs, float *y)
{
    const struct sl_op_experts *op = w->op;
    struct sl_experts_args g = *base;
    const struct sl_experts_order *o = &w->order;
    const enum sl_experts_form form = choose_form(m, w->size);
    g.xs = xs;
    g.y = y;
    g.n_cols = w->n_embd;
    g.n_rows = w->n_ff;
    g.x_stride = sl_experts_row_stride(form, w->n_embd);
    g.row_bytes = (int64_t)sl_type_row_bytes(m->type, m->n_cols);
    g.x_share = o->direct ? o->n_used : 1;
    g.activation = w->split ? (int)SL_ACT_NONE : (int)op->activation;
    set_part(&g.part[0], m);
    if (!w->split) {
        set_part(&g.part[1], &op->up);
    }
    const struct sl_experts_pack p = {*o,    op->x,       xs,        g.x_stride,     g.begin,
                                      g.end, w->n_tokens, w->n_embd, column_order(m)};
    const int failed = sl_experts_pack_tokens(stream, &p, form);
    return failed ? failed : multiply(stream, m, w->size, &g, w->props);
}

static int run_down(cudaStream_t stream, const struct work *w, const struct sl_experts_args *base)
{
    const struct sl_experts_matrix *m = &w->op->down;
    struct sl_experts_args g = *base;
    const enum sl_experts_form form = choose_form(m, w->size);
    g.xs = w->h_packed;
    g.y = (float *)w->x;
    g.n_cols = w->n_ff;
    g.n_rows = w->n_embd;
    g.x_stride = sl_experts_row_stride(form, w->n_ff);
    g.row_bytes = (int64_t)sl_type_row_bytes(m->type, m->n_cols);
    g.x_share = 1;
    g.activation = SL_ACT_NONE;
    set_part(&g.part[0], m);
    if (form != SL_EXPERTS_FLOAT) {
        const struct sl_experts_pack p = {w->order,    w->h,    w->h_packed,
                                          g.x_stride,  g.begin, g.end,
                                          w->n_tokens, w->n_ff, column_order(m)};
        const int failed = sl_experts_pack_pairs(stream, &p, form);
        if (failed) {
            return failed;
        }
    }
    return multiply(stream, m, w->size, &g, w->props);
}

static int run_chunk(cudaStream_t stream, const struct work *w, int begin, int end)
{
    const struct sl_op_experts *op = w->op;
    struct sl_experts_args base;
    memset(&base, 0, sizeof(base));
    base.order = w->order;
    base.begin = begin;
    base.end = end;
    const int n = end - begin;
    const int groups = w->order.n < n ? w->order.n : n;
    const int most = n / w->order.tile_tokens + groups;
    base.most = w->order.direct || most > n ? n : most;
    int failed = run_up(stream, w, &base, &op->gate, w->x, w->h);
    if (!failed && w->split) {
        failed = run_up(stream, w, &base, &op->up, w->x_up, w->up);
        if (!failed) {
            failed =
                sl_experts_gate(stream, w->h, w->up, (int64_t)n * w->n_ff, (int)op->activation);
        }
    }
    if (!failed) {
        failed = run_down(stream, w, &base);
    }
    if (failed) {
        return failed;
    }
    const struct sl_experts_sum sum = {
        w->order,  (const float *)w->x,        op->weights, op->y, begin, end,
        w->n_embd, op->accumulate || begin > 0};
    return sl_experts_sum_pairs(stream, &sum, w->n_tokens);
}

/* ---- vector products ---- */

/* Kernels of packed types read 16-byte pieces from a matrix' start on. Addresses of a table are
 * not known here: they are as aligned as the arena's, 16 bytes at least. */
static bool is_supported(const struct sl_experts_matrix *m)
{
    return (is_float_kind((int)m->type) || ((uintptr_t)m->data & 15) == 0) &&
           m->n_rows <= INT32_MAX / 8 && m->n_cols <= INT32_MAX / 8;
}

/* Where they are the better way: the matrices of few tokens have little in common. An expert is
 * read by each of its tokens, if mostly from the L2 cache, so that longer passes must have few
 * pairs for one; tiles, which read it once, get a fifth of the bandwidth. */
static bool takes_vec(const struct sl_op *op, const struct sl_cuda_props *props)
{
    const struct sl_op_experts *e = &op->experts;
    const int64_t n_h = (int64_t)op->n_tokens * e->n_used * e->gate.n_rows;
    const bool few = op->n_tokens <= VEC_TOKENS ||
                     (op->n_tokens <= VEC_MOST_TOKENS &&
                      (int64_t)op->n_tokens * e->n_used <= VEC_MOST_MEAN * (int64_t)e->n);
    return few && e->gate.type == e->up.type && !is_float_kind((int)e->gate.type) &&
           !is_float_kind((int)e->down.type) &&
           (size_t)n_h * sizeof(float) <= sl_op_scratch_bytes(op) && sl_experts_vec_fits(op, props);
}

/* h: scratch. */
static int run_vec(cudaStream_t stream, const struct sl_op *op, float *h,
                   const struct sl_cuda_props *props)
{
    const struct sl_op_experts *e = &op->experts;
    struct sl_experts_vec_args up;
    memset(&up, 0, sizeof(up));
    up.order.ids = e->ids;
    up.order.table = e->gate.table;
    up.order.n_used = e->n_used;
    up.order.first = e->first;
    up.order.n = e->n;
    up.n_tokens = op->n_tokens;
    up.weights = e->weights;
    struct sl_experts_vec_args down = up;
    up.x = e->x;
    up.y = h;
    up.n_cols = (int32_t)e->gate.n_cols;
    up.n_rows = (int32_t)e->gate.n_rows;
    up.row_bytes = (int64_t)sl_type_row_bytes(e->gate.type, e->gate.n_cols);
    up.activation = (int32_t)e->activation;
    set_part(&up.part[0], &e->gate);
    set_part(&up.part[1], &e->up);
    down.x = h;
    down.y = e->y;
    down.n_cols = (int32_t)e->down.n_cols;
    down.n_rows = (int32_t)e->down.n_rows;
    down.row_bytes = (int64_t)sl_type_row_bytes(e->down.type, e->down.n_cols);
    down.accumulate = e->accumulate;
    set_part(&down.part[0], &e->down);
    const int type = (int)e->gate.type;
    const int down_type = (int)e->down.type;
    const int failed = has_large_blocks(type) ? sl_experts_vec_up_k(stream, type, &up, props)
                                              : sl_experts_vec_up_q(stream, type, &up, props);
    if (failed) {
        return failed;
    }
    return has_large_blocks(down_type) ? sl_experts_vec_down_k(stream, down_type, &down, props)
                                       : sl_experts_vec_down_q(stream, down_type, &down, props);
}

/* ---- the operator ---- */

extern "C" int sl_cuda_experts(cudaStream_t stream, const struct sl_op *op, void *scratch,
                               size_t scratch_bytes, const struct sl_cuda_props *props)
{
    const struct sl_op_experts *e = &op->experts;
    const int64_t n_pairs = (int64_t)op->n_tokens * e->n_used;
    if (!is_supported(&e->gate) || !is_supported(&e->up) || !is_supported(&e->down) ||
        n_pairs > INT32_MAX / 2) {
        return SL_CUDA_UNSUPPORTED;
    }
    if (takes_vec(op, props) && scratch_bytes >= sl_op_scratch_bytes(op)) {
        return run_vec(stream, op, (float *)scratch, props);
    }
    struct work w;
    memset(&w, 0, sizeof(w));
    w.op = e;
    w.props = props;
    w.n_tokens = op->n_tokens;
    w.n_embd = (int32_t)e->gate.n_cols;
    w.n_ff = (int32_t)e->gate.n_rows;
    w.split = e->gate.type != e->up.type;
    w.order.ids = e->ids;
    w.order.table = e->gate.table;
    w.order.n_pairs = (int32_t)n_pairs;
    w.order.n_used = e->n_used;
    w.order.first = e->first;
    w.order.n = e->n;
    w.order.chunk = sl_op_experts_chunk(op);
    choose_tiles(&w);
    if (!lay_out(&w, op, (uint8_t *)scratch, scratch_bytes)) {
        return SL_CUDA_UNSUPPORTED;
    }
    int failed = sl_experts_sort(stream, &w.order);
    for (int32_t at = 0; !failed && at < w.order.n_pairs; at += w.order.chunk) {
        const int32_t left = w.order.n_pairs - at;
        failed = run_chunk(stream, &w, at, at + (left < w.order.chunk ? left : w.order.chunk));
    }
    return failed;
}
