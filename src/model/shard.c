/* SPDX-License-Identifier: Apache-2.0
 *
 * Shards: their packed image, their classes, where they may be cut in two, and where their
 * activations lie. What they compute: shard_ops.c.
 */
#include <assert.h>
#include <stdint.h>
#include <string.h>

#include "model/model_internal.h"

/* Cuts are whole blocks, and of more than SMALL elements wide enough for whole lines of memory. */
#define CUT_UNIT 64
#define SMALL 1024
#define SMALL_CUT_UNIT 16

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
        *at += sl_shard_align(expert ? weight->bytes / n_experts : weight->bytes);
    }
}

void sl_shards_finish(struct sl_model *model)
{
    for (uint32_t i = 0; i < model->n_shards; i++) {
        struct sl_shard *shard = &model->shards[i];
        for (uint32_t w = 0; w < shard->n_weights; w++) {
            shard->weights[w].offset = shard->bytes;
            shard->bytes += sl_shard_align(shard->weights[w].bytes);
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

static bool is_dense_ffn(const struct sl_model *model, const struct sl_shard *shard)
{
    return shard->kind == SL_SHARD_FFN && model->hp.n_experts == 0;
}

int32_t sl_shard_cut(const struct sl_model *model, const struct sl_shard *shard,
                     struct sl_split split)
{
    return shard->kind == SL_SHARD_ATTENTION ? split.kv_heads
           : shard->kind == SL_SHARD_HEAD    ? split.head
           : is_dense_ffn(model, shard)      ? split.ffn
                                             : 0;
}

bool sl_shard_is_divided(const struct sl_shard *shard, struct sl_split split)
{
    return shard->kind == SL_SHARD_ATTENTION && split.kv_blocks > 0;
}

bool sl_shard_can_share(const struct sl_model *model, const struct sl_shard *shard,
                        struct sl_split split)
{
    return shard->expert_bytes > 0 || sl_shard_cut(model, shard, split) > 0 ||
           sl_shard_is_divided(shard, split);
}

int32_t sl_shard_cut_end(const struct sl_model *model, const struct sl_shard *shard)
{
    return shard->kind == SL_SHARD_ATTENTION ? (int32_t)model->hp.n_kv_heads
           : shard->kind == SL_SHARD_HEAD    ? (int32_t)shard->weights[SL_W_OUTPUT].m.n_rows
           : is_dense_ffn(model, shard)      ? (int32_t)model->hp.n_ff
                                             : 0;
}

int32_t sl_shard_head_rows(const struct sl_model *model)
{
    const struct sl_hparams *const hp = &model->hp;
    return (int32_t)(hp->n_heads / hp->n_kv_heads * hp->head_dim);
}

int32_t sl_shard_cut_unit(const struct sl_model *model, const struct sl_shard *shard)
{
    if (shard->kind == SL_SHARD_ATTENTION) {
        const enum sl_type type = shard->weights[SL_W_O].m.type;
        const int32_t block = (int32_t)sl_type_traits(type)->block_items;
        int32_t n = 1;
        while (n * sl_shard_head_rows(model) % block != 0) {
            n++;
        }
        return n;
    }
    const int32_t least = sl_shard_cut_end(model, shard) > SMALL ? CUT_UNIT : SMALL_CUT_UNIT;
    if (shard->kind == SL_SHARD_HEAD) {
        return least;
    }
    const int32_t block = (int32_t)sl_type_traits(shard->weights[SL_W_DOWN].m.type)->block_items;
    return block > least ? block : least;
}

int32_t sl_shard_cut_width(const struct sl_model *model, const struct sl_shard *shard, uint32_t w)
{
    if (shard->kind != SL_SHARD_ATTENTION) {
        return 1;
    }
    return w == SL_W_Q || w == SL_W_O ? sl_shard_head_rows(model) : (int32_t)model->hp.head_dim;
}

struct sl_slice sl_shard_slice(const struct sl_model *model, const struct sl_shard *shard,
                               int32_t begin, int32_t end)
{
    struct sl_slice s = {.n_weights = shard->n_weights};
    assert(s.n_weights <= SL_N_ATTENTION_WEIGHTS);
    for (uint32_t w = 0; w < shard->n_weights; w++) {
        const struct sl_matrix *const m = &shard->weights[w].m;
        const bool columns = (shard->kind == SL_SHARD_FFN && w == SL_W_DOWN) ||
                             (shard->kind == SL_SHARD_ATTENTION && w == SL_W_O);
        const int64_t width = sl_shard_cut_width(model, shard, w), n = (end - begin) * width;
        const size_t row_bytes = sl_type_row_bytes(m->type, m->n_cols);
        const size_t at = columns ? sl_type_row_bytes(m->type, begin * width)
                                  : (size_t)(begin * width) * row_bytes;
        s.weights[w].data = m->data ? (const char *)m->data + at : NULL;
        s.weights[w].row_bytes = columns ? sl_type_row_bytes(m->type, n) : (size_t)n * row_bytes;
        s.weights[w].pitch_bytes = columns ? row_bytes : s.weights[w].row_bytes;
        s.weights[w].n_rows = columns ? (size_t)m->n_rows : 1;
        s.weights[w].offset = s.bytes;
        s.bytes += sl_shard_align(s.weights[w].row_bytes * s.weights[w].n_rows);
    }
    return s;
}

size_t sl_shard_resident_bytes(const struct sl_model *model, const struct sl_shard *shard,
                               struct sl_split split)
{
    const int32_t cut = sl_shard_cut(model, shard, split);
    return cut > 0                   ? sl_shard_slice(model, shard, 0, cut).bytes
           : shard->expert_bytes > 0 ? shard->base_bytes
                                     : shard->bytes;
}

static size_t take(struct sl_shard_workspace *ws, int32_t n_rows, size_t n_cols)
{
    const size_t offset = ws->bytes;
    ws->bytes += sl_shard_align((size_t)n_rows * n_cols * sizeof(float));
    return offset;
}

/* With room for both sides of a cut to be aligned. */
static size_t take_cut(struct sl_shard_workspace *ws, int32_t n_rows, size_t n_cols)
{
    const size_t offset = take(ws, n_rows, n_cols);
    ws->bytes += SL_IMAGE_ALIGN_BYTES;
    return offset;
}

bool sl_shard_goes_in_pieces(const struct sl_model *model, const struct sl_shard *shard)
{
    return shard->kind == SL_SHARD_ATTENTION || is_dense_ffn(model, shard);
}

struct sl_shard_workspace sl_shard_carve(const struct sl_model *model, const struct sl_shard *shard,
                                         int32_t n_tokens, int32_t n_outputs)
{
    const struct sl_hparams *hp = &model->hp;
    const size_t n_embd = hp->n_embd;
    const size_t n_q = (size_t)hp->n_heads * hp->head_dim;
    const size_t n_kv = (size_t)hp->n_kv_heads * hp->head_dim;
    const size_t widest = n_embd > n_q ? n_embd : n_q;
    struct sl_shard_workspace ws = {0};
    if (sl_shard_goes_in_pieces(model, shard) && n_tokens > SL_SHARD_PIECE_TOKENS) {
        n_tokens = SL_SHARD_PIECE_TOKENS;
    }
    switch (shard->kind) {
    case SL_SHARD_ATTENTION:
        ws.a = ws.joined = take_cut(&ws, n_tokens, widest);
        ws.b = ws.partial = take_cut(&ws, n_tokens, widest);
        ws.k = take_cut(&ws, n_tokens, n_kv);
        ws.v = take_cut(&ws, n_tokens, n_kv);
        ws.lse = take(&ws, n_tokens, hp->n_heads);
        ws.joined_lse = take(&ws, n_tokens, hp->n_heads);
        break;
    case SL_SHARD_FFN:
        ws.a = take(&ws, n_tokens, n_embd);
        if (hp->n_experts > 0) {
            ws.ids = take(&ws, n_tokens, hp->n_experts_used);
            ws.weights = take(&ws, n_tokens, hp->n_experts_used);
            ws.mine = take(&ws, n_tokens, hp->n_experts_used);
            ws.partial = ws.joined = take(&ws, n_tokens, n_embd);
            ws.one = take(&ws, n_tokens, hp->n_ff_shared > 0);
            ws.gate = take(&ws, n_tokens, hp->n_ff_shared > 0);
            break;
        }
        ws.b = take_cut(&ws, n_tokens, hp->n_ff);
        ws.k = take_cut(&ws, n_tokens, hp->n_ff > n_embd ? hp->n_ff : n_embd);
        ws.partial = ws.joined = ws.k;
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
    return sl_shard_carve(model, shard, n_tokens, n_outputs).bytes;
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
