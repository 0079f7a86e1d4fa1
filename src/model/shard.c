/* SPDX-License-Identifier: Apache-2.0
 *
 * Shards: their packed image, their classes, and the list of operators that each one is.
 *
 *   attention   a = norm(h); q, k, v = linear(a); q/k norms; rope; store k, v;
 *               a = attention(q); h += o(a)            or  b = o(a); h += norm(b)
 *   ffn         a = norm(h); g = act(gate(a)) * up(a); h += down(g)  or  a = down(g); h += norm(a)
 *   mixture     a = norm(h); ids, w = router(a); h += experts(a, ids, w)
 *               with a shared expert: it is a mixture of one, with a router of its own
 *   shared      a = norm(h); ids, w = router(a); mine = divide(ids); h += experts(a, mine, w)
 *               elsewhere: p = experts(a, ids but mine, w); here: h += p
 *   head        a = norm(last rows of h); logits = output(a)
 *
 * Operators without memory (NULL addresses) serve for sizes and costs.
 */
#include <assert.h>
#include <stdint.h>
#include <string.h>

#include "model/model_internal.h"

#define IMAGE_ALIGN_BYTES 256
/* Long passes go through a shard in pieces of this many tokens: workspace and scratch then stay
 * small whatever the micro-batch, and products are as fast as they get. Attention may be cut like
 * that because a token only looks back. Mixtures are not cut: each piece would read the experts
 * again. */
#define PIECE_TOKENS 1024

static size_t align_up(size_t bytes)
{
    return (bytes + IMAGE_ALIGN_BYTES - 1) / IMAGE_ALIGN_BYTES * IMAGE_ALIGN_BYTES;
}

/* Same work, same bytes: shards of a class are interchangeable for the planner. */
static bool same_class(const struct sl_shard *a, const struct sl_shard *b)
{
    if (a->kind != b->kind || a->window != b->window || a->n_weights != b->n_weights) {
        return false;
    }
    for (uint32_t i = 0; i < a->n_weights; i++) {
        const struct sl_matrix *x = &a->weights[i].m;
        const struct sl_matrix *y = &b->weights[i].m;
        if (x->type != y->type || x->n_rows != y->n_rows || x->n_cols != y->n_cols) {
            return false;
        }
    }
    return true;
}

/* Where the parts of a mixture lie when its experts are placed one by one. */
static void lay_out_experts(struct sl_shard *shard, uint32_t n_experts)
{
    for (uint32_t w = 0; w < shard->n_weights; w++) {
        struct sl_weight *const weight = &shard->weights[w];
        const bool expert = w < SL_N_FFN_WEIGHTS;
        size_t *const at = expert ? &shard->expert_bytes : &shard->base_bytes;
        weight->part_offset = *at;
        *at += align_up(expert ? weight->bytes / n_experts : weight->bytes);
    }
}

void sl_shards_finish(struct sl_model *model)
{
    for (uint32_t i = 0; i < model->n_shards; i++) {
        struct sl_shard *shard = &model->shards[i];
        for (uint32_t w = 0; w < shard->n_weights; w++) {
            shard->weights[w].offset = shard->bytes;
            shard->bytes += align_up(shard->weights[w].bytes);
        }
        if (shard->kind == SL_SHARD_FFN && model->hp.n_experts > 0) {
            lay_out_experts(shard, model->hp.n_experts);
        }
        uint32_t k = 0;
        while (k < i && !same_class(shard, &model->shards[k])) {
            k++;
        }
        shard->class_id = k < i ? model->shards[k].class_id : model->n_classes++;
    }
}

/* Where the activations of a shard lie in its workspace: offsets in bytes. Regions that are dead
 * when another is written share memory. */
struct workspace {
    size_t a;             /* normed input; then attention output; ffn: then down output */
    size_t b;             /* q; then o output. ffn: gate. */
    size_t k, v;          /* attention. ffn: k is up. */
    size_t ids, weights;  /* mixture: the router's choice */
    size_t mine, partial; /* shared mixture */
    size_t one, gate;     /* of the shared expert: its choice, which is always 0, and its weight */
    size_t bytes;
};

static size_t take(struct workspace *ws, int32_t n_rows, size_t n_cols)
{
    const size_t offset = ws->bytes;
    ws->bytes += align_up((size_t)n_rows * n_cols * sizeof(float));
    return offset;
}

static bool goes_in_pieces(const struct sl_model *model, const struct sl_shard *shard)
{
    return shard->kind == SL_SHARD_ATTENTION ||
           (shard->kind == SL_SHARD_FFN && model->hp.n_experts == 0);
}

/* The one place that knows the carving; sl_shard_build and sl_shard_workspace_bytes use it. */
static struct workspace carve(const struct sl_model *model, const struct sl_shard *shard,
                              int32_t n_tokens, int32_t n_outputs)
{
    const struct sl_hparams *hp = &model->hp;
    const size_t n_embd = hp->n_embd;
    const size_t n_q = (size_t)hp->n_heads * hp->head_dim;
    const size_t n_kv = (size_t)hp->n_kv_heads * hp->head_dim;
    const size_t widest = n_embd > n_q ? n_embd : n_q;
    struct workspace ws = {0};
    if (goes_in_pieces(model, shard) && n_tokens > PIECE_TOKENS) {
        n_tokens = PIECE_TOKENS;
    }
    switch (shard->kind) {
    case SL_SHARD_ATTENTION:
        ws.a = take(&ws, n_tokens, widest);
        ws.b = take(&ws, n_tokens, widest);
        ws.k = take(&ws, n_tokens, n_kv);
        ws.v = take(&ws, n_tokens, n_kv);
        break;
    case SL_SHARD_FFN:
        ws.a = take(&ws, n_tokens, n_embd);
        if (hp->n_experts > 0) {
            ws.ids = take(&ws, n_tokens, hp->n_experts_used);
            ws.weights = take(&ws, n_tokens, hp->n_experts_used);
            ws.mine = take(&ws, n_tokens, hp->n_experts_used);
            ws.partial = take(&ws, n_tokens, n_embd);
            ws.one = take(&ws, n_tokens, hp->n_ff_shared > 0);
            ws.gate = take(&ws, n_tokens, hp->n_ff_shared > 0);
            break;
        }
        ws.b = take(&ws, n_tokens, hp->n_ff);
        ws.k = take(&ws, n_tokens, hp->n_ff);
        break;
    case SL_SHARD_HEAD:
        ws.a = take(&ws, n_outputs, n_embd);
        break;
    }
    return ws;
}

size_t sl_shard_workspace_bytes(const struct sl_model *model, const struct sl_shard *shard,
                                int32_t n_tokens, int32_t n_outputs)
{
    return carve(model, shard, n_tokens, n_outputs).bytes;
}

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

/* The last product of a sub-layer: into the residual stream, or through a norm by way of `temp`. */
static void add_residual(struct builder *b, const float *x, uint32_t role, size_t bias,
                         size_t post_norm, float *temp)
{
    const struct sl_shard_bind *bind = b->bind;
    struct sl_op_linear *linear = add_linear(b, bind->n_tokens, x);
    if (post_norm == SL_NO_CONST) {
        add_part(b, linear, role, bias, bind->hidden);
        linear->accumulate = true;
        return;
    }
    add_part(b, linear, role, bias, temp);
    add_norm(b, bind->n_tokens, post_norm, temp, bind->hidden, b->model->hp.n_embd, 1)->accumulate =
        true;
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

/* The cache as the caller gave it, with the shape that the model knows. */
static struct sl_kv_view kv_view(const struct builder *b)
{
    struct sl_kv_view kv = b->bind->kv;
    kv.n_kv_heads = (int32_t)b->model->hp.n_kv_heads;
    kv.head_dim = (int32_t)b->model->hp.head_dim;
    return kv;
}

static void add_attention(struct builder *b, const float *q, float *y)
{
    const struct sl_hparams *hp = &b->model->hp;
    struct sl_op_attention *op = &add_op(b, SL_OP_ATTENTION, b->bind->n_tokens)->attention;
    op->q = q;
    op->y = y;
    op->pos = b->bind->pos;
    op->seq = b->bind->seq;
    op->sinks = constant(b, layer_vector(b, SL_V_SINKS));
    op->kv = kv_view(b);
    op->n_heads = (int32_t)hp->n_heads;
    op->n_kv_max = b->bind->n_kv_max;
    op->window = (int32_t)b->shard->window;
    op->scale = hp->attention_scale;
    op->softcap = hp->attention_softcap;
}

static void build_attention(struct builder *b)
{
    const struct sl_hparams *hp = &b->model->hp;
    const struct sl_shard_bind *bind = b->bind;
    const int32_t n = bind->n_tokens;
    const struct workspace ws = carve(b->model, b->shard, n, 0);
    float *q = work(b, ws.b);
    float *k = work(b, ws.k);
    float *v = work(b, ws.v);
    float *a = work(b, ws.a);

    add_norm(b, n, layer_vector(b, SL_V_ATTN_NORM), bind->hidden, a, hp->n_embd, 1);
    struct sl_op_linear *qkv = add_linear(b, n, a);
    add_part(b, qkv, SL_W_Q, layer_vector(b, SL_V_Q_BIAS), q);
    add_part(b, qkv, SL_W_K, layer_vector(b, SL_V_K_BIAS), k);
    add_part(b, qkv, SL_W_V, layer_vector(b, SL_V_V_BIAS), v);
    const size_t q_norm = layer_vector(b, SL_V_Q_NORM);
    if (q_norm != SL_NO_CONST) {
        add_norm(b, n, q_norm, q, q, hp->head_dim, hp->n_heads);
    }
    const size_t k_norm = layer_vector(b, SL_V_K_NORM);
    if (k_norm != SL_NO_CONST) {
        add_norm(b, n, k_norm, k, k, hp->head_dim, hp->n_kv_heads);
    }
    add_rope(b, q, hp->n_heads);
    add_rope(b, k, hp->n_kv_heads);
    struct sl_op_kv_store *store = &add_op(b, SL_OP_KV_STORE, n)->kv_store;
    store->k = k;
    store->v = v;
    store->pos = bind->pos;
    store->seq = bind->seq;
    store->kv = kv_view(b);
    /* The normed input is no longer needed, nor q after attention. */
    add_attention(b, q, a);
    add_residual(b, a, SL_W_O, layer_vector(b, SL_V_O_BIAS), layer_vector(b, SL_V_POST_ATTN_NORM),
                 q);
}

static void build_ffn(struct builder *b)
{
    const struct sl_shard_bind *bind = b->bind;
    const int32_t n = bind->n_tokens;
    const struct workspace ws = carve(b->model, b->shard, n, 0);
    float *a = work(b, ws.a);
    float *gate = work(b, ws.b);

    add_norm(b, n, layer_vector(b, SL_V_FFN_NORM), bind->hidden, a, b->model->hp.n_embd, 1);
    struct sl_op_linear *gate_up = add_linear(b, n, a);
    gate_up->activation = b->model->arch->activation;
    add_part(b, gate_up, SL_W_GATE, layer_vector(b, SL_V_GATE_BIAS), gate);
    add_part(b, gate_up, SL_W_UP, layer_vector(b, SL_V_UP_BIAS), work(b, ws.k));
    add_residual(b, gate, SL_W_DOWN, layer_vector(b, SL_V_DOWN_BIAS),
                 layer_vector(b, SL_V_POST_FFN_NORM), a);
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

static void add_route(struct builder *b, const struct workspace *ws)
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
static void add_experts(struct builder *b, const struct workspace *ws, size_t ids, float *y,
                        bool accumulate)
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
static void add_shared_expert(struct builder *b, const struct workspace *ws)
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

static void add_join(struct builder *b, const struct workspace *ws)
{
    const struct sl_shard_bind *bind = b->bind;
    struct sl_op_add *add = &add_op(b, SL_OP_ADD, bind->n_tokens)->add;
    add->x = bind->partial ? bind->partial : work(b, ws->partial);
    add->y = bind->hidden;
    add->n = b->model->hp.n_embd;
}

static void build_mixture(struct builder *b)
{
    const struct workspace ws = carve(b->model, b->shard, b->bind->n_tokens, 0);
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
        add_join(b, &ws);
        break;
    }
}

struct sl_shard_choice sl_shard_choice(const struct sl_model *model, const struct sl_shard *shard,
                                       int32_t n_tokens)
{
    const struct workspace ws = carve(model, shard, n_tokens, 0);
    return (struct sl_shard_choice){.ids = ws.ids,
                                    .mine = ws.mine,
                                    .end = ws.partial,
                                    .partial = ws.partial,
                                    .bytes = ws.bytes};
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
    const struct workspace ws = carve(model, b->shard, bind->n_tokens, n);
    float *a = work(b, ws.a);
    const float *last = bind->hidden == NULL
                            ? NULL
                            : bind->hidden + (size_t)(bind->n_tokens - n) * model->hp.n_embd;
    add_norm(b, n, model->layout->output_norm, last, a, model->hp.n_embd, 1);
    add_part(b, add_linear(b, n, a), SL_W_OUTPUT, model->layout->output_bias, bind->logits);
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
    if (!goes_in_pieces(model, shard)) {
        build_piece(&b);
        return b.n_ops;
    }
    assert(bind->n_tokens <= SL_SHARD_MAX_PIECES * PIECE_TOKENS);
    for (int32_t at = 0; at < bind->n_tokens; at += PIECE_TOKENS) {
        const int32_t left = bind->n_tokens - at;
        struct sl_shard_bind piece = *bind;
        piece.n_tokens = left < PIECE_TOKENS ? left : PIECE_TOKENS;
        piece.hidden = bind->hidden ? bind->hidden + (size_t)at * model->hp.n_embd : NULL;
        piece.pos = bind->pos ? bind->pos + at : NULL;
        piece.seq = bind->seq ? bind->seq + at : NULL;
        b.bind = &piece;
        build_piece(&b);
    }
    return b.n_ops;
}

size_t sl_shard_scratch_bytes(const struct sl_model *model, const struct sl_shard *shard,
                              int32_t n_tokens, int32_t n_outputs)
{
    const struct sl_shard_bind bind = {
        .n_tokens = n_tokens,
        .n_outputs = n_outputs,
        .n_kv_max = INT32_MAX,
    };
    struct sl_op ops[SL_SHARD_MAX_OPS];
    const int n = sl_shard_build(model, shard, &bind, ops);
    size_t most = 0;
    for (int i = 0; i < n; i++) {
        const size_t bytes = sl_op_scratch_bytes(&ops[i]);
        most = bytes > most ? bytes : most;
    }
    return most;
}

size_t sl_shard_most_scratch_bytes(const struct sl_model *model, const struct sl_shard *shard,
                                   int32_t n_tokens, int32_t n_outputs)
{
    const size_t all = sl_shard_scratch_bytes(model, shard, n_tokens, n_outputs);
    if (n_tokens <= SL_ATTN_SPLIT_TOKENS) {
        return all;
    }
    const int32_t n = SL_ATTN_SPLIT_TOKENS;
    const size_t split = sl_shard_scratch_bytes(model, shard, n, n_outputs < n ? n_outputs : n);
    return split > all ? split : all;
}
