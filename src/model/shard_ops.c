/* SPDX-License-Identifier: Apache-2.0
 *
 * Shards as lists of operators:
 *
 *   attention   a = norm(h); q, k, v = linear(a); q/k norms; rope; store k, v;
 *               a = attention(q); h += o(a)            or  b = o(a); h += norm(b)
 *   att., cut   the same for q, k and v of the first KV heads, with their columns of o; elsewhere
 *               p = o(a) of the others; here: h += p  or  b += p; h += norm(b)
 *   att., cache p, l = attention(q) over the first blocks; elsewhere k, v are stored and
 *   divided     p', l' = attention(q) over the later ones; here: a = merge(p, p'); h += o(a)
 *   ffn         a = norm(h); g = act(gate(a)) * up(a); h += down(g)  or  a = down(g); h += norm(a)
 *   ffn, cut    a = norm(h); the rest with the first elements of g; elsewhere: p = down(g) of the
 *               others; here: h += p  or  a += p; h += norm(a)
 *   mixture     a = norm(h); ids, w = router(a); h += experts(a, ids, w)
 *               with a shared expert: it is a mixture of one, with a router of its own
 *   shared      a = norm(h); ids, w = router(a); mine = divide(ids); h += experts(a, mine, w)
 *               elsewhere: p = experts(a, ids but mine, w); here: h += p
 *   head        a = norm(last rows of h); logits = output(a), each side its own rows where cut
 *
 * Operators without memory (NULL addresses) serve for sizes and costs.
 */
#include <assert.h>
#include <stdint.h>
#include <string.h>

#include "model/model_internal.h"

/* The op list being written. */
struct builder {
    const struct sl_model *model;
    const struct sl_shard *shard;
    const struct sl_shard_bind *bind;
    struct sl_op *ops;
    int n_ops;
};

static struct sl_op *add_op(struct builder *b, enum sl_op_kind kind, int32_t n_tokens)
{
    assert(b->n_ops < SL_SHARD_MAX_OPS);
    struct sl_op *op = &b->ops[b->n_ops++];
    memset(op, 0, sizeof *op);
    op->kind = kind;
    op->n_tokens = n_tokens;
    return op;
}

static float *work(const struct builder *b, size_t offset)
{
    return b->bind->workspace == NULL ? NULL : (float *)((char *)b->bind->workspace + offset);
}

static const float *constant(const struct builder *b, size_t offset)
{
    return b->bind->consts == NULL || offset == SL_NO_CONST ? NULL : b->bind->consts + offset;
}

static size_t layer_vector(const struct builder *b, enum sl_vector vector)
{
    return b->model->layout->layer[b->shard->layer][vector];
}

/* Norm of rows of n floats, n_heads of them a token. */
static struct sl_op_norm *add_norm(struct builder *b, int32_t n_tokens, size_t weight,
                                   const float *x, float *y, uint32_t n, uint32_t n_heads)
{
    struct sl_op_norm *norm = &add_op(b, SL_OP_NORM, n_tokens)->norm;
    norm->x = x;
    norm->y = y;
    norm->weight = constant(b, weight);
    norm->n = (int32_t)n;
    norm->rows_per_token = (int32_t)n_heads;
    norm->eps = b->model->hp.norm_eps;
    return norm;
}

static void add_part(const struct builder *b, struct sl_op_linear *linear, uint32_t role,
                     size_t bias, float *y)
{
    const int32_t i = linear->n_parts++;
    linear->part[i].w = b->shard->weights[role].m;
    linear->part[i].w.data = b->bind->weights[role];
    linear->part[i].bias = constant(b, bias);
    linear->part[i].y = y;
}

static struct sl_op_linear *add_linear(struct builder *b, int32_t n_tokens, const float *x)
{
    struct sl_op_linear *linear = &add_op(b, SL_OP_LINEAR, n_tokens)->linear;
    linear->x = x;
    return linear;
}

static void add_rope(struct builder *b, float *x, uint32_t n_heads)
{
    const struct sl_model *model = b->model;
    const bool local =
        b->shard->window > 0 && model->layout->rope_freq[SL_ROPE_LOCAL] != SL_NO_CONST;
    const enum sl_rope_kind kind = local ? SL_ROPE_LOCAL : SL_ROPE_GLOBAL;
    struct sl_op_rope *rope = &add_op(b, SL_OP_ROPE, b->bind->n_tokens)->rope;
    rope->x = x;
    rope->pos = b->bind->pos;
    rope->freq = constant(b, model->layout->rope_freq[kind]);
    rope->n_heads = (int32_t)n_heads;
    rope->head_dim = (int32_t)model->hp.head_dim;
    rope->n_rot = (int32_t)model->hp.n_rot;
    rope->magnitude = model->layout->rope_magnitude[kind];
    rope->neox = model->arch->rope_neox;
}

/* A piece of a shard that may be cut: elements begin .. end - 1. */
struct cut_part {
    int32_t begin, end;
    const void *const *weights;
    bool in_file; /* the matrices are whole; else images of the piece */
};

/* KV heads of an attention, with their query heads. */
struct attention_part {
    struct cut_part cut;
    void *cache; /* of these heads alone */
    float *q, *k, *v, *a;
};

/* The cache as the caller gave it, with the shape that the model knows. Of a divided one each side
 * of a shared attention has its part. */
static struct sl_kv_view kv_view(const struct builder *b, const struct attention_part *part)
{
    struct sl_kv_view kv = b->bind->kv;
    kv.data = part->cache;
    kv.n_kv_heads = part->cut.end - part->cut.begin;
    kv.head_dim = (int32_t)b->model->hp.head_dim;
    if (kv.n_first > 0 && b->bind->part != SL_PART_WHOLE) {
        kv.here = b->bind->part == SL_PART_OTHERS ? SL_KV_LATER : SL_KV_FIRST;
    }
    return kv;
}

static const void *after(const void *data, size_t bytes)
{
    return data ? (const char *)data + bytes : NULL;
}

/* The part's rows of a matrix, with their bias. */
static void add_rows(const struct builder *b, struct sl_op_linear *linear, uint32_t role,
                     const struct cut_part *part, size_t bias, float *y)
{
    const int64_t width = sl_shard_cut_width(b->model, b->shard, role);
    const int64_t begin = part->begin * width;
    const float *const biases = constant(b, bias);
    add_part(b, linear, role, SL_NO_CONST, y);
    struct sl_matrix *const w = &linear->part[linear->n_parts - 1].w;
    const size_t skip = (size_t)begin * sl_type_row_bytes(w->type, w->n_cols);
    w->data = after(part->weights[role], part->in_file ? skip : 0);
    w->n_rows = part->end * width - begin;
    linear->part[linear->n_parts - 1].bias = biases ? biases + begin : NULL;
}

/* A product with the part's columns. The bias is the first columns'. */
static void add_columns(struct builder *b, uint32_t role, const struct cut_part *part, size_t bias,
                        const float *x, float *y, bool accumulate)
{
    const int64_t width = sl_shard_cut_width(b->model, b->shard, role);
    const int64_t begin = part->begin * width, n = part->end * width - begin;
    struct sl_op_linear *const linear = add_linear(b, b->bind->n_tokens, x);
    linear->accumulate = accumulate;
    add_part(b, linear, role, begin == 0 ? bias : SL_NO_CONST, y);
    struct sl_matrix *const w = &linear->part[0].w;
    w->data = part->weights[role];
    if (part->in_file && n < w->n_cols) {
        w->data = after(w->data, sl_type_row_bytes(w->type, begin));
        w->pitch_bytes = (uint32_t)sl_type_row_bytes(w->type, w->n_cols);
    }
    w->n_cols = n;
}

static void add_store(struct builder *b, const struct attention_part *part)
{
    struct sl_op_kv_store *store = &add_op(b, SL_OP_KV_STORE, b->bind->n_tokens)->kv_store;
    store->k = part->k;
    store->v = part->v;
    store->pos = b->bind->pos;
    store->seq = b->bind->seq;
    store->kv = kv_view(b, part);
}

/* Queries, keys and values of the part's heads, the latter to the cache. */
static void add_heads(struct builder *b, const struct attention_part *part, const float *a)
{
    const struct sl_hparams *hp = &b->model->hp;
    const int32_t n = b->bind->n_tokens, n_heads = part->cut.end - part->cut.begin;
    const int32_t group = (int32_t)(hp->n_heads / hp->n_kv_heads);
    static const enum sl_vector biases[] = {SL_V_Q_BIAS, SL_V_K_BIAS, SL_V_V_BIAS};
    float *const y[] = {part->q, part->k, part->v};
    struct sl_op_linear *qkv = add_linear(b, n, a);
    for (uint32_t w = SL_W_Q; w <= SL_W_V; w++) {
        add_rows(b, qkv, w, &part->cut, layer_vector(b, biases[w]), y[w]);
    }
    const size_t q_norm = layer_vector(b, SL_V_Q_NORM);
    if (q_norm != SL_NO_CONST) {
        add_norm(b, n, q_norm, part->q, part->q, hp->head_dim, (uint32_t)(n_heads * group));
    }
    const size_t k_norm = layer_vector(b, SL_V_K_NORM);
    if (k_norm != SL_NO_CONST) {
        add_norm(b, n, k_norm, part->k, part->k, hp->head_dim, (uint32_t)n_heads);
    }
    add_rope(b, part->q, (uint32_t)(n_heads * group));
    add_rope(b, part->k, (uint32_t)n_heads);
    add_store(b, part);
}

static struct sl_op_attention *add_attention(struct builder *b, const struct attention_part *part)
{
    const struct sl_hparams *hp = &b->model->hp;
    const int32_t group = (int32_t)(hp->n_heads / hp->n_kv_heads);
    const float *const sinks = constant(b, layer_vector(b, SL_V_SINKS));
    struct sl_op_attention *op = &add_op(b, SL_OP_ATTENTION, b->bind->n_tokens)->attention;
    op->q = part->q;
    op->y = part->a;
    op->pos = b->bind->pos;
    op->seq = b->bind->seq;
    op->sinks = sinks ? sinks + part->cut.begin * group : NULL;
    op->kv = kv_view(b, part);
    op->n_heads = (part->cut.end - part->cut.begin) * group;
    op->n_kv_max = b->bind->n_kv_max;
    op->window = (int32_t)b->shard->window;
    op->scale = hp->attention_scale;
    op->softcap = hp->attention_softcap;
    return op;
}

/* The pieces of a shard of `end` elements that this list computes: all of it, one side of its cut,
 * or both. */
static int cut_parts(const struct builder *b, int32_t end, struct cut_part parts[2])
{
    const struct sl_shard_bind *const bind = b->bind;
    const bool others = bind->part == SL_PART_OTHERS;
    parts[0] = (struct cut_part){.begin = others ? bind->cut : 0,
                                 .end = others || bind->cut == 0 ? end : bind->cut,
                                 .weights = bind->weights,
                                 .in_file = others};
    parts[1] = (struct cut_part){.begin = bind->cut, .end = end, .weights = bind->rest};
    return bind->cut > 0 && bind->part == SL_PART_WHOLE ? 2 : 1;
}

/* Memory of part i of what has `width` floats an element, each part behind the one before. */
static float *part_work(const struct builder *b, size_t offset, int i, size_t width)
{
    const size_t n = (size_t)b->bind->n_tokens * (size_t)b->bind->cut * width;
    return work(b, offset + (i > 0 ? sl_shard_align(n * sizeof(float)) : 0));
}

/* The parts of an attention that this list computes. */
static int attention_parts(const struct builder *b, const struct sl_shard_workspace *ws,
                           struct attention_part parts[2])
{
    const struct sl_hparams *const hp = &b->model->hp;
    const size_t head_rows = (size_t)sl_shard_head_rows(b->model);
    struct cut_part cuts[2];
    const int n_parts = cut_parts(b, (int32_t)hp->n_kv_heads, cuts);
    for (int i = 0; i < n_parts; i++) {
        parts[i] = (struct attention_part){.cut = cuts[i],
                                           .cache = i == 0 ? b->bind->kv.data : b->bind->kv_rest,
                                           .q = part_work(b, ws->b, i, head_rows),
                                           .k = part_work(b, ws->k, i, hp->head_dim),
                                           .v = part_work(b, ws->v, i, hp->head_dim),
                                           .a = part_work(b, ws->a, i, head_rows)};
    }
    return n_parts;
}

/* The normed input is no longer needed when all heads are there, nor q after attention. */
static void add_attention_parts(struct builder *b, const struct sl_shard_workspace *ws, float *y,
                                bool accumulate)
{
    struct attention_part parts[2];
    const int n_parts = attention_parts(b, ws, parts);
    for (int i = 0; i < n_parts; i++) {
        add_heads(b, &parts[i], work(b, ws->a));
    }
    for (int i = 0; i < n_parts; i++) {
        add_attention(b, &parts[i]);
    }
    for (int i = 0; i < n_parts; i++) {
        add_columns(b, SL_W_O, &parts[i].cut, layer_vector(b, SL_V_O_BIAS), parts[i].a, y,
                    accumulate || i > 0);
    }
}

static void add_join(struct builder *b, const struct sl_shard_workspace *ws, float *y)
{
    const struct sl_shard_bind *bind = b->bind;
    struct sl_op_add *add = &add_op(b, SL_OP_ADD, bind->n_tokens)->add;
    add->x = bind->partial ? bind->partial : work(b, ws->joined);
    add->y = y;
    add->n = b->model->hp.n_embd;
}

/* Both parts' gate and up come before either's down, which may take the memory of their input. */
static void add_ffn_parts(struct builder *b, const struct sl_shard_workspace *ws, float *y,
                          bool accumulate)
{
    struct cut_part parts[2];
    const int n_parts = cut_parts(b, (int32_t)b->model->hp.n_ff, parts);
    float *gate[2];
    for (int i = 0; i < n_parts; i++) {
        struct sl_op_linear *const linear = add_linear(b, b->bind->n_tokens, work(b, ws->a));
        linear->activation = b->model->arch->activation;
        gate[i] = part_work(b, ws->b, i, 1);
        add_rows(b, linear, SL_W_GATE, &parts[i], layer_vector(b, SL_V_GATE_BIAS), gate[i]);
        add_rows(b, linear, SL_W_UP, &parts[i], layer_vector(b, SL_V_UP_BIAS),
                 part_work(b, ws->k, i, 1));
    }
    for (int i = 0; i < n_parts; i++) {
        add_columns(b, SL_W_DOWN, &parts[i], layer_vector(b, SL_V_DOWN_BIAS), gate[i], y,
                    accumulate || i > 0);
    }
}

/* Where the sums of a sub-layer go: into the residual stream, or by way of `temp` through a norm.
 */
static float *sum_of(const struct builder *b, size_t post_norm, size_t temp)
{
    return post_norm == SL_NO_CONST ? b->bind->hidden : work(b, temp);
}

/* All sums are there. */
static void end_sublayer(struct builder *b, size_t post_norm, const float *sum)
{
    if (post_norm != SL_NO_CONST) {
        add_norm(b, b->bind->n_tokens, post_norm, sum, b->bind->hidden, b->model->hp.n_embd, 1)
            ->accumulate = true;
    }
}

typedef void add_parts_fn(struct builder *b, const struct sl_shard_workspace *ws, float *y,
                          bool accumulate);

/* A sub-layer of the residual stream, or a part of it: its sums go into the stream, or by way of
 * `temp` through a norm, which comes when all are there. */
static void build_sublayer(struct builder *b, size_t pre_norm, size_t post_norm,
                           const struct sl_shard_workspace *ws, size_t temp,
                           add_parts_fn *add_parts)
{
    const struct sl_shard_bind *bind = b->bind;
    const int32_t n = bind->n_tokens;
    const uint32_t n_embd = b->model->hp.n_embd;
    const bool direct = post_norm == SL_NO_CONST;
    float *const sum = sum_of(b, post_norm, temp);
    if (bind->part == SL_PART_WHOLE || bind->part == SL_PART_ROUTE) {
        add_norm(b, n, pre_norm, bind->hidden, work(b, ws->a), n_embd, 1);
    }
    if (bind->part == SL_PART_OTHERS) {
        add_parts(b, ws, work(b, ws->partial), false);
    } else if (bind->part == SL_PART_JOIN) {
        add_join(b, ws, sum);
    } else if (bind->part != SL_PART_ROUTE) {
        add_parts(b, ws, sum, direct);
    }
    if (bind->part == SL_PART_WHOLE || bind->part == SL_PART_JOIN) {
        end_sublayer(b, post_norm, sum);
    }
}

/* The other side's rows into this one's, and on with all of them. */
static void add_merged(struct builder *b, const struct sl_shard_workspace *ws,
                       const struct attention_part *part)
{
    const struct sl_shard_bind *const bind = b->bind;
    const size_t post_norm = layer_vector(b, SL_V_POST_ATTN_NORM);
    float *const sum = sum_of(b, post_norm, ws->b);
    struct sl_op_merge *const merge = &add_op(b, SL_OP_MERGE, bind->n_tokens)->merge;
    merge->x = bind->partial ? bind->partial : work(b, ws->b);
    merge->x_lse = bind->partial_lse ? bind->partial_lse : work(b, ws->joined_lse);
    merge->y = part->a;
    merge->y_lse = work(b, ws->lse);
    merge->n_heads = (int32_t)b->model->hp.n_heads;
    merge->head_dim = (int32_t)b->model->hp.head_dim;
    add_columns(b, SL_W_O, &part->cut, layer_vector(b, SL_V_O_BIAS), part->a, sum,
                post_norm == SL_NO_CONST);
    end_sublayer(b, post_norm, sum);
}

/* One side's part of attention over a divided cache. */
static void build_divided_attention(struct builder *b, const struct sl_shard_workspace *ws)
{
    struct attention_part part[2];
    attention_parts(b, ws, part);
    switch (b->bind->part) {
    case SL_PART_WHOLE: /* no matter how the cache is divided: build_sublayer */
        break;
    case SL_PART_ROUTE:
        add_norm(b, b->bind->n_tokens, layer_vector(b, SL_V_ATTN_NORM), b->bind->hidden,
                 work(b, ws->a), b->model->hp.n_embd, 1);
        add_heads(b, part, work(b, ws->a));
        break;
    case SL_PART_OWN:
        add_attention(b, part)->lse = work(b, ws->lse);
        break;
    case SL_PART_OTHERS: {
        add_store(b, part);
        struct sl_op_attention *const attention = add_attention(b, part);
        attention->lse = work(b, ws->lse);
        attention->sinks = NULL; /* they count on the other side */
        break;
    }
    case SL_PART_JOIN:
        add_merged(b, ws, part);
        break;
    }
}

static void build_attention(struct builder *b)
{
    const struct sl_shard_workspace ws = sl_shard_carve(b->model, b->shard, b->bind->n_tokens, 0);
    if (b->bind->kv.n_first > 0 && b->bind->part != SL_PART_WHOLE) {
        build_divided_attention(b, &ws);
        return;
    }
    build_sublayer(b, layer_vector(b, SL_V_ATTN_NORM), layer_vector(b, SL_V_POST_ATTN_NORM), &ws,
                   ws.b, add_attention_parts);
}

static void build_ffn(struct builder *b)
{
    const struct sl_shard_workspace ws = sl_shard_carve(b->model, b->shard, b->bind->n_tokens, 0);
    build_sublayer(b, layer_vector(b, SL_V_FFN_NORM), layer_vector(b, SL_V_POST_FFN_NORM), &ws,
                   ws.a, add_ffn_parts);
}

static const void *bound_weight(const struct builder *b, uint32_t role)
{
    return role < b->shard->n_weights ? b->bind->weights[role] : NULL;
}

static struct sl_experts_matrix experts_matrix(const struct builder *b, uint32_t role,
                                               uint32_t bias_role)
{
    const struct sl_matrix *m = &b->shard->weights[role].m;
    return (struct sl_experts_matrix){.data = b->bind->weights[role],
                                      .table = b->bind->experts[role],
                                      .type = m->type,
                                      .n_rows = m->n_rows / b->model->hp.n_experts,
                                      .n_cols = m->n_cols,
                                      .bias = bound_weight(b, bias_role)};
}

static void add_route(struct builder *b, const struct sl_shard_workspace *ws)
{
    const struct sl_hparams *hp = &b->model->hp;
    const struct sl_arch *arch = b->model->arch;
    const struct sl_shard_bind *bind = b->bind;
    const int32_t n = bind->n_tokens;
    float *a = work(b, ws->a);
    add_norm(b, n, layer_vector(b, SL_V_FFN_NORM), bind->hidden, a, hp->n_embd, 1);
    struct sl_op_router *router = &add_op(b, SL_OP_ROUTER, n)->router;
    router->x = a;
    router->w = b->shard->weights[SL_W_ROUTER].m;
    router->w.data = bind->weights[SL_W_ROUTER];
    router->bias = constant(b, layer_vector(b, SL_V_ROUTER_BIAS));
    router->ids = (int32_t *)(void *)work(b, ws->ids);
    router->weights = work(b, ws->weights);
    router->n_used = (int32_t)hp->n_experts_used;
    router->gating = arch->gating;
    router->normalize = arch->normalize_weights;
    router->scale = 1.0F;
    const bool divides = bind->at_hand != NULL && bind->part == SL_PART_ROUTE;
    if (!divides && bind->uses == NULL) {
        return;
    }
    const struct sl_op_router choice = *router;
    struct sl_op_divide *divide = &add_op(b, SL_OP_DIVIDE, n)->divide;
    divide->ids = choice.ids;
    divide->at_hand = divides ? bind->at_hand : NULL;
    divide->uses = bind->uses;
    divide->mine = (int32_t *)(void *)work(b, ws->mine);
    divide->n_used = choice.n_used;
    divide->n_experts = (int32_t)hp->n_experts;
    divide->share = bind->share;
}

/* The experts in the list at `ids`: added to y, or y itself. */
static void add_experts(struct builder *b, const struct sl_shard_workspace *ws, size_t ids,
                        float *y, bool accumulate)
{
    const struct sl_hparams *hp = &b->model->hp;
    struct sl_op_experts *experts = &add_op(b, SL_OP_EXPERTS, b->bind->n_tokens)->experts;
    experts->x = work(b, ws->a);
    experts->y = y;
    experts->ids = (const int32_t *)(const void *)work(b, ids);
    experts->weights = work(b, ws->weights);
    experts->n_used = (int32_t)hp->n_experts_used;
    experts->n = (int32_t)hp->n_experts;
    experts->gate = experts_matrix(b, SL_W_GATE, SL_W_GATE_BIAS);
    experts->up = experts_matrix(b, SL_W_UP, SL_W_UP_BIAS);
    experts->down = experts_matrix(b, SL_W_DOWN, SL_W_DOWN_BIAS);
    experts->activation = b->model->arch->activation;
    experts->accumulate = accumulate;
}

static struct sl_experts_matrix shared_matrix(const struct builder *b, uint32_t role)
{
    const struct sl_matrix *m = &b->shard->weights[role].m;
    return (struct sl_experts_matrix){
        .data = b->bind->weights[role], .type = m->type, .n_rows = m->n_rows, .n_cols = m->n_cols};
}

/* The expert that every token uses, if there is one, added to the hidden state. */
static void add_shared_expert(struct builder *b, const struct sl_shard_workspace *ws)
{
    if (b->model->hp.n_ff_shared == 0) {
        return;
    }
    const int32_t n = b->bind->n_tokens;
    struct sl_op_router *router = &add_op(b, SL_OP_ROUTER, n)->router;
    router->x = work(b, ws->a);
    router->w = b->shard->weights[SL_W_SHARED_ROUTER].m;
    router->w.data = b->bind->weights[SL_W_SHARED_ROUTER];
    router->ids = (int32_t *)(void *)work(b, ws->one);
    router->weights = work(b, ws->gate);
    router->n_used = 1;
    router->gating = SL_GATING_SIGMOID;
    router->scale = 1.0F;
    struct sl_op_experts *expert = &add_op(b, SL_OP_EXPERTS, n)->experts;
    expert->x = work(b, ws->a);
    expert->y = b->bind->hidden;
    expert->ids = (const int32_t *)(const void *)work(b, ws->one);
    expert->weights = work(b, ws->gate);
    expert->n_used = 1;
    expert->n = 1;
    expert->gate = shared_matrix(b, SL_W_SHARED_GATE);
    expert->up = shared_matrix(b, SL_W_SHARED_UP);
    expert->down = shared_matrix(b, SL_W_SHARED_DOWN);
    expert->activation = b->model->arch->activation;
    expert->accumulate = true;
}

static void build_mixture(struct builder *b)
{
    const struct sl_shard_workspace ws = sl_shard_carve(b->model, b->shard, b->bind->n_tokens, 0);
    switch (b->bind->part) {
    case SL_PART_WHOLE:
        add_route(b, &ws);
        add_experts(b, &ws, ws.ids, b->bind->hidden, true);
        add_shared_expert(b, &ws);
        break;
    case SL_PART_ROUTE:
        add_route(b, &ws);
        break;
    case SL_PART_OWN:
        add_experts(b, &ws, ws.mine, b->bind->hidden, true);
        add_shared_expert(b, &ws);
        break;
    case SL_PART_OTHERS:
        add_experts(b, &ws, ws.mine, work(b, ws.partial), false);
        break;
    case SL_PART_JOIN:
        add_join(b, &ws, b->bind->hidden);
        break;
    }
}

/* Over a divided cache: q, k and v go down; the host's rows lie where its input would. */
static struct sl_shard_choice divided_choice(const struct sl_model *model,
                                             const struct sl_shard_workspace *ws, size_t n_tokens)
{
    const struct sl_hparams *const hp = &model->hp;
    const size_t n_kv = (size_t)hp->n_kv_heads * hp->head_dim;
    return (struct sl_shard_choice){.begin = ws->b,
                                    .end = ws->v + n_tokens * n_kv * sizeof(float),
                                    .partial = ws->a,
                                    .partial_bytes =
                                        n_tokens * hp->n_heads * hp->head_dim * sizeof(float),
                                    .lse = ws->lse,
                                    .lse_bytes = n_tokens * hp->n_heads * sizeof(float),
                                    .bytes = ws->bytes,
                                    .joined = ws->b,
                                    .joined_lse = ws->joined_lse};
}

struct sl_shard_choice sl_shard_choice(const struct sl_model *model, const struct sl_shard *shard,
                                       struct sl_split split, int32_t n_tokens)
{
    const struct sl_shard_workspace ws = sl_shard_carve(model, shard, n_tokens, n_tokens);
    if (shard->kind == SL_SHARD_HEAD) {
        const size_t n_logits = (size_t)n_tokens * model->hp.n_vocab;
        return (struct sl_shard_choice){
            .end = ws.bytes, .partial = ws.bytes, .bytes = ws.bytes + n_logits * sizeof(float)};
    }
    if (sl_shard_is_divided(shard, split)) {
        return divided_choice(model, &ws, (size_t)n_tokens);
    }
    const size_t sum_bytes = (size_t)n_tokens * model->hp.n_embd * sizeof(float);
    const size_t input = sl_shard_align(sum_bytes);
    return (struct sl_shard_choice){.ids = ws.ids,
                                    .partial_bytes = sum_bytes,
                                    .mine = ws.mine,
                                    .end = shard->expert_bytes > 0 ? ws.partial : input,
                                    .partial = ws.partial,
                                    .bytes = ws.bytes,
                                    .joined = ws.joined};
}

/* Logits of the rows that this list computes: all, those before the cut, or those behind it. */
static void add_logits(struct builder *b, const float *a)
{
    const struct sl_shard_bind *bind = b->bind;
    const bool others = bind->part == SL_PART_OTHERS;
    struct sl_op_linear *linear = add_linear(b, bind->n_outputs, a);
    add_part(b, linear, SL_W_OUTPUT, b->model->layout->output_bias, bind->logits);
    struct sl_matrix *const w = &linear->part[0].w;
    if (others) {
        const float *const bias = linear->part[0].bias;
        w->data = after(w->data, (size_t)bind->cut * sl_type_row_bytes(w->type, w->n_cols));
        linear->part[0].bias = bias ? bias + bind->cut : NULL;
    }
    w->n_rows = others ? w->n_rows - bind->cut : bind->cut > 0 ? bind->cut : w->n_rows;
}

/* Only rows that someone reads are normed and multiplied: in prefill one of hundreds. */
static void build_head(struct builder *b)
{
    const struct sl_model *model = b->model;
    const struct sl_shard_bind *bind = b->bind;
    const int32_t n = bind->n_outputs;
    if (n == 0) {
        return;
    }
    assert(n <= bind->n_tokens);
    const struct sl_shard_workspace ws = sl_shard_carve(model, b->shard, bind->n_tokens, n);
    float *a = work(b, ws.a);
    const float *last = bind->hidden == NULL
                            ? NULL
                            : bind->hidden + (size_t)(bind->n_tokens - n) * model->hp.n_embd;
    if (bind->part == SL_PART_WHOLE || bind->part == SL_PART_ROUTE) {
        add_norm(b, n, model->layout->output_norm, last, a, model->hp.n_embd, 1);
    }
    if (bind->part != SL_PART_ROUTE && bind->part != SL_PART_JOIN) {
        add_logits(b, a);
    }
}

/* The ops of one piece of the pass (or all of it). */
static void build_piece(struct builder *b)
{
    switch (b->shard->kind) {
    case SL_SHARD_ATTENTION:
        build_attention(b);
        break;
    case SL_SHARD_FFN:
        if (b->model->hp.n_experts > 0) {
            build_mixture(b);
        } else {
            build_ffn(b);
        }
        break;
    case SL_SHARD_HEAD:
        build_head(b);
        break;
    }
}

int sl_shard_build(const struct sl_model *model, const struct sl_shard *shard,
                   const struct sl_shard_bind *bind, struct sl_op *ops)
{
    struct builder b = {.model = model, .shard = shard, .bind = bind, .ops = ops};
    if (!sl_shard_goes_in_pieces(model, shard)) {
        build_piece(&b);
        return b.n_ops;
    }
    assert(bind->n_tokens <=
           (bind->part == SL_PART_WHOLE ? SL_SHARD_MAX_PIECES : 1) * SL_SHARD_PIECE_TOKENS);
    for (int32_t at = 0; at < bind->n_tokens; at += SL_SHARD_PIECE_TOKENS) {
        const int32_t left = bind->n_tokens - at;
        struct sl_shard_bind piece = *bind;
        piece.n_tokens = left < SL_SHARD_PIECE_TOKENS ? left : SL_SHARD_PIECE_TOKENS;
        piece.hidden = bind->hidden ? bind->hidden + (size_t)at * model->hp.n_embd : NULL;
        piece.pos = bind->pos ? bind->pos + at : NULL;
        piece.seq = bind->seq ? bind->seq + at : NULL;
        b.bind = &piece;
        build_piece(&b);
    }
    return b.n_ops;
}
