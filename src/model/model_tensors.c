/* SPDX-License-Identifier: Apache-2.0
 *
 * The tensors of a model by name. Matrices become shards that point into the file mapping: their
 * data is not touched here, so that opening costs the same for a model of any size. Vectors (norms,
 * biases, rope tables) are small, needed by every plan, and copied as floats into one block:
 *
 *   consts: | output_norm | rope tables | layer 0: attn_norm, ... | layer 1: ... |   each
 * 256-aligned
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "model/model_internal.h"

enum dim {
    DIM_ONE,
    DIM_EMBD,
    DIM_Q,
    DIM_KV,
    DIM_FF,
    DIM_FF_SHARED,
    DIM_HEAD,
    DIM_N_HEADS,
    DIM_EXPERTS,
    DIM_VOCAB
};

struct matrix_spec {
    const char *name;
    enum dim rows, cols;
    bool experts; /* one such matrix for each expert: three dimensions */
    bool bias;    /* vectors, a row each: F32, because operators take them as floats */
};

/* Indexed by role. */
static const struct matrix_spec attention_matrices[SL_N_ATTENTION_WEIGHTS] = {
    [SL_W_Q] = {"attn_q.weight", DIM_Q, DIM_EMBD},
    [SL_W_K] = {"attn_k.weight", DIM_KV, DIM_EMBD},
    [SL_W_V] = {"attn_v.weight", DIM_KV, DIM_EMBD},
    [SL_W_O] = {"attn_output.weight", DIM_EMBD, DIM_Q},
};
static const struct matrix_spec ffn_matrices[SL_N_FFN_WEIGHTS] = {
    [SL_W_GATE] = {"ffn_gate.weight", DIM_FF, DIM_EMBD},
    [SL_W_UP] = {"ffn_up.weight", DIM_FF, DIM_EMBD},
    [SL_W_DOWN] = {"ffn_down.weight", DIM_EMBD, DIM_FF},
};
static const struct matrix_spec mixture_matrices[SL_N_MIXTURE_WEIGHTS] = {
    [SL_W_GATE] = {"ffn_gate_exps.weight", DIM_FF, DIM_EMBD, .experts = true},
    [SL_W_UP] = {"ffn_up_exps.weight", DIM_FF, DIM_EMBD, .experts = true},
    [SL_W_DOWN] = {"ffn_down_exps.weight", DIM_EMBD, DIM_FF, .experts = true},
    [SL_W_ROUTER] = {"ffn_gate_inp.weight", DIM_EXPERTS, DIM_EMBD},
    [SL_W_GATE_BIAS] = {"ffn_gate_exps.bias", DIM_EXPERTS, DIM_FF, .bias = true},
    [SL_W_UP_BIAS] = {"ffn_up_exps.bias", DIM_EXPERTS, DIM_FF, .bias = true},
    [SL_W_DOWN_BIAS] = {"ffn_down_exps.bias", DIM_EXPERTS, DIM_EMBD, .bias = true},
    [SL_W_SHARED_ROUTER] = {"ffn_gate_inp_shexp.weight", DIM_ONE, DIM_EMBD},
    [SL_W_SHARED_GATE] = {"ffn_gate_shexp.weight", DIM_FF_SHARED, DIM_EMBD},
    [SL_W_SHARED_UP] = {"ffn_up_shexp.weight", DIM_FF_SHARED, DIM_EMBD},
    [SL_W_SHARED_DOWN] = {"ffn_down_shexp.weight", DIM_EMBD, DIM_FF_SHARED},
};
static const struct matrix_spec output_matrix = {
    .name = "output.weight", .rows = DIM_VOCAB, .cols = DIM_EMBD};

static const struct {
    const char *name;
    enum dim length;
} vector_specs[SL_N_VECTORS] = {
    [SL_V_ATTN_NORM] = {"attn_norm.weight", DIM_EMBD},
    [SL_V_Q_BIAS] = {"attn_q.bias", DIM_Q},
    [SL_V_K_BIAS] = {"attn_k.bias", DIM_KV},
    [SL_V_V_BIAS] = {"attn_v.bias", DIM_KV},
    [SL_V_O_BIAS] = {"attn_output.bias", DIM_EMBD},
    [SL_V_SINKS] = {"attn_sinks.weight", DIM_N_HEADS},
    [SL_V_Q_NORM] = {"attn_q_norm.weight", DIM_HEAD},
    [SL_V_K_NORM] = {"attn_k_norm.weight", DIM_HEAD},
    [SL_V_POST_ATTN_NORM] = {"post_attention_norm.weight", DIM_EMBD},
    [SL_V_FFN_NORM] = {"ffn_norm.weight", DIM_EMBD},
    [SL_V_GATE_BIAS] = {"ffn_gate.bias", DIM_FF},
    [SL_V_UP_BIAS] = {"ffn_up.bias", DIM_FF},
    [SL_V_DOWN_BIAS] = {"ffn_down.bias", DIM_EMBD},
    [SL_V_ROUTER_BIAS] = {"ffn_gate_inp.bias", DIM_EXPERTS},
    [SL_V_POST_FFN_NORM] = {"post_ffw_norm.weight", DIM_EMBD},
    [SL_V_OUTPUT_NORM] = {"output_norm.weight", DIM_EMBD},
    [SL_V_OUTPUT_BIAS] = {"output.bias", DIM_VOCAB},
};

#define NAME_BYTES 64

/* State of one load. */
struct loader {
    struct sl_model *model;
    struct sl_tensor_uses uses;
    size_t n_const_floats;
    struct sluice_error *err;
};

static int64_t dim_size(const struct sl_hparams *hp, enum dim dim)
{
    switch (dim) {
    case DIM_ONE:
        return 1;
    case DIM_EMBD:
        return hp->n_embd;
    case DIM_Q:
        return (int64_t)hp->n_heads * hp->head_dim;
    case DIM_KV:
        return (int64_t)hp->n_kv_heads * hp->head_dim;
    case DIM_FF:
        return hp->n_ff;
    case DIM_FF_SHARED:
        return hp->n_ff_shared;
    case DIM_HEAD:
        return hp->head_dim;
    case DIM_N_HEADS:
        return hp->n_heads;
    case DIM_EXPERTS:
        return hp->n_experts;
    case DIM_VOCAB:
        return hp->n_vocab;
    }
    return 0;
}

const struct sl_gguf_tensor *sl_tensor_uses_find(struct sl_tensor_uses *uses,
                                                 const struct sl_model *model, const char *name)
{
    const struct sl_gguf_tensor *t = sl_gguf_find_tensor(model->file, name);
    if (t != NULL && uses->n < sl_gguf_n_tensors(model->file)) {
        uses->items[uses->n++] = t;
    }
    return t;
}

enum sluice_status sl_vector_read(const struct sl_gguf_tensor *t, size_t n, float *out,
                                  struct sluice_error *err)
{
    SL_CHECK((uint64_t)t->dims[0] == n && t->dims[1] == 1 && t->dims[2] == 1 && t->dims[3] == 1,
             FORMAT, err, "tensor '%s' has shape [%" PRId64 ", %" PRId64 "]; must be [%zu]",
             t->name, t->dims[0], t->dims[1], n);
    SL_CHECK(t->type == SL_TYPE_F32 || t->type == SL_TYPE_F16 || t->type == SL_TYPE_BF16,
             UNSUPPORTED, err, "tensor '%s' has type %s; vectors must be F32, F16 or BF16", t->name,
             sl_type_name(t->type));
    sl_dequantize_row(t->type, t->data, out, (int64_t)n);
    return SLUICE_STATUS_OK;
}

static enum sluice_status check_matrix(const struct sl_gguf_tensor *t, int64_t rows, int64_t cols,
                                       int64_t n_matrices, struct sluice_error *err)
{
    SL_CHECK(t->dims[0] == cols && t->dims[1] == rows && t->dims[2] == n_matrices &&
                 t->dims[3] == 1,
             FORMAT, err,
             "tensor '%s' has shape [%" PRId64 ", %" PRId64 ", %" PRId64 "]; must be [%" PRId64
             ", %" PRId64 ", %" PRId64 "]",
             t->name, t->dims[0], t->dims[1], t->dims[2], cols, rows, n_matrices);
    const struct sl_type_traits *traits = sl_type_traits(t->type);
    SL_CHECK(traits != NULL && traits->computes, UNSUPPORTED, err,
             "tensor '%s' has type %s, which this program cannot compute with", t->name,
             sl_type_name(t->type));
    SL_CHECK(cols % traits->block_items == 0, FORMAT, err,
             "tensor '%s' has rows of %" PRId64 " elements; type %s needs a multiple of %" PRIu32,
             t->name, cols, traits->name, traits->block_items);
    return SLUICE_STATUS_OK;
}

static enum sluice_status load_matrix(struct loader *ld, const char *name,
                                      const struct matrix_spec *spec, struct sl_weight *out)
{
    const struct sl_hparams *hp = &ld->model->hp;
    const struct sl_gguf_tensor *t = sl_tensor_uses_find(&ld->uses, ld->model, name);
    SL_CHECK(t != NULL, FORMAT, ld->err, "tensor '%s' is missing", name);
    const int64_t rows = dim_size(hp, spec->rows);
    const int64_t cols = dim_size(hp, spec->cols);
    const int64_t n_matrices = spec->experts ? hp->n_experts : 1;
    SL_TRY(check_matrix(t, rows, cols, n_matrices, ld->err));
    SL_CHECK(!spec->bias || t->type == SL_TYPE_F32, UNSUPPORTED, ld->err,
             "tensor '%s' has type %s; biases of experts must be F32", name, sl_type_name(t->type));
    *out = (struct sl_weight){
        .name = t->name,
        .m = {.data = t->data, .type = t->type, .n_rows = rows * n_matrices, .n_cols = cols},
        .bytes = t->bytes,
    };
    ld->model->weight_bytes += t->bytes;
    ld->model->n_params += (uint64_t)(rows * n_matrices) * (uint64_t)cols;
    return SLUICE_STATUS_OK;
}

static enum sluice_status load_layer_matrices(struct loader *ld, struct sl_shard *shard,
                                              const struct matrix_spec *specs, uint32_t first,
                                              uint32_t end)
{
    shard->n_weights = end;
    for (uint32_t i = first; i < end; i++) {
        char name[NAME_BYTES];
        snprintf(name, sizeof name, "blk.%" PRIu32 ".%s", shard->layer, specs[i].name);
        SL_TRY(load_matrix(ld, name, &specs[i], &shard->weights[i]));
    }
    return SLUICE_STATUS_OK;
}

/* Biases are there or not: a mixture without is told apart by the first of them, and a file with
 * only some has a tensor that is missing or that nothing uses. */
static enum sluice_status load_ffn(struct loader *ld, struct sl_shard *shard)
{
    if (ld->model->hp.n_experts == 0) {
        return load_layer_matrices(ld, shard, ffn_matrices, 0, SL_N_FFN_WEIGHTS);
    }
    SL_TRY(load_layer_matrices(ld, shard, mixture_matrices, 0, SL_W_GATE_BIAS));
    char name[NAME_BYTES];
    snprintf(name, sizeof name, "blk.%" PRIu32 ".%s", shard->layer,
             mixture_matrices[SL_W_GATE_BIAS].name);
    if (sl_gguf_find_tensor(ld->model->file, name) != NULL) {
        SL_TRY(
            load_layer_matrices(ld, shard, mixture_matrices, SL_W_GATE_BIAS, SL_W_SHARED_ROUTER));
    }
    return ld->model->hp.n_ff_shared == 0
               ? SLUICE_STATUS_OK
               : load_layer_matrices(ld, shard, mixture_matrices, SL_W_SHARED_ROUTER,
                                     SL_N_MIXTURE_WEIGHTS);
}

/* Models without an output matrix use the embedding. The head shard holds it like a matrix of its
 * own, because it may be resident while the embedding is not. */
static enum sluice_status load_output(struct loader *ld, struct sl_shard *head)
{
    struct sl_model *model = ld->model;
    struct sl_weight embedding;
    static const struct matrix_spec embedding_spec = {
        .name = "token_embd.weight", .rows = DIM_VOCAB, .cols = DIM_EMBD};
    SL_TRY(load_matrix(ld, embedding_spec.name, &embedding_spec, &embedding));
    model->embedding = embedding.m;
    head->n_weights = SL_N_HEAD_WEIGHTS;
    if (sl_gguf_find_tensor(model->file, output_matrix.name) == NULL) {
        head->weights[SL_W_OUTPUT] = embedding;
        return SLUICE_STATUS_OK;
    }
    return load_matrix(ld, output_matrix.name, &output_matrix, &head->weights[SL_W_OUTPUT]);
}

static enum sluice_status load_matrices(struct loader *ld)
{
    struct sl_model *model = ld->model;
    model->n_shards = 2 * model->hp.n_layers + 1;
    model->shards = sl_calloc(SL_MEM_MODEL, model->n_shards, sizeof *model->shards);
    SL_CHECK(model->shards != NULL, OUT_OF_MEMORY, ld->err, "no memory for %" PRIu32 " shards",
             model->n_shards);
    for (uint32_t i = 0; i < model->hp.n_layers; i++) {
        struct sl_shard *attention = &model->shards[2 * i];
        struct sl_shard *ffn = attention + 1;
        attention->kind = SL_SHARD_ATTENTION;
        attention->window = sl_hparams_layer_window(&model->hp, i);
        ffn->kind = SL_SHARD_FFN;
        attention->layer = ffn->layer = i;
        SL_TRY(load_layer_matrices(ld, attention, attention_matrices, 0, SL_N_ATTENTION_WEIGHTS));
        SL_TRY(load_ffn(ld, ffn));
    }
    struct sl_shard *head = &model->shards[model->n_shards - 1];
    head->kind = SL_SHARD_HEAD;
    head->layer = model->hp.n_layers;
    return load_output(ld, head);
}

static size_t reserve(struct loader *ld, size_t n_floats)
{
    const size_t align = SL_CONST_ALIGN_BYTES / sizeof(float);
    const size_t offset = ld->n_const_floats;
    ld->n_const_floats += (n_floats + align - 1) / align * align;
    return offset;
}

static void vector_name(char out[NAME_BYTES], const struct sl_model *model, uint32_t vector,
                        uint32_t layer)
{
    if (vector < SL_N_LAYER_VECTORS) {
        const bool renamed = vector == SL_V_FFN_NORM && model->arch->ffn_norm_after_attention;
        snprintf(out, NAME_BYTES, "blk.%" PRIu32 ".%s", layer,
                 vector_specs[renamed ? SL_V_POST_ATTN_NORM : vector].name);
    } else {
        snprintf(out, NAME_BYTES, "%s", vector_specs[vector].name);
    }
}

/* Decide whether a vector is there and where it will lie. Its shape is checked when it is read. */
static enum sluice_status place_vector(struct loader *ld, uint32_t vector, uint32_t layer,
                                       size_t *out_offset)
{
    struct sl_model *model = ld->model;
    const struct sl_arch *arch = model->arch;
    *out_offset = SL_NO_CONST;
    if (((arch->required | arch->optional) & SL_V_BIT(vector)) == 0) {
        return SLUICE_STATUS_OK;
    }
    char name[NAME_BYTES];
    vector_name(name, model, vector, layer);
    const struct sl_gguf_tensor *t = sl_tensor_uses_find(&ld->uses, model, name);
    SL_CHECK(t != NULL || (arch->required & SL_V_BIT(vector)) == 0, FORMAT, ld->err,
             "tensor '%s' is missing", name);
    if (t != NULL) {
        const int64_t n = dim_size(&model->hp, vector_specs[vector].length);
        *out_offset = reserve(ld, (size_t)n);
        model->n_params += (uint64_t)n;
    }
    return SLUICE_STATUS_OK;
}

static enum sluice_status place_vectors(struct loader *ld)
{
    struct sl_model *model = ld->model;
    struct sl_model_layout *layout = model->layout;
    SL_TRY(place_vector(ld, SL_V_OUTPUT_NORM, 0, &layout->output_norm));
    SL_TRY(place_vector(ld, SL_V_OUTPUT_BIAS, 0, &layout->output_bias));
    layout->rope_freq[SL_ROPE_GLOBAL] = reserve(ld, model->hp.n_rot / 2);
    layout->rope_freq[SL_ROPE_LOCAL] = model->hp.window > 0 && model->arch->local_rope_base > 0
                                           ? reserve(ld, model->hp.n_rot / 2)
                                           : SL_NO_CONST;
    for (uint32_t i = 0; i < model->hp.n_layers; i++) {
        for (uint32_t v = 0; v < SL_N_LAYER_VECTORS; v++) {
            SL_TRY(place_vector(ld, v, i, &layout->layer[i][v]));
        }
    }
    return SLUICE_STATUS_OK;
}

static enum sluice_status read_vector(struct loader *ld, uint32_t vector, uint32_t layer,
                                      size_t offset)
{
    if (offset == SL_NO_CONST) {
        return SLUICE_STATUS_OK;
    }
    const struct sl_model *model = ld->model;
    char name[NAME_BYTES];
    vector_name(name, model, vector, layer);
    return sl_vector_read(sl_gguf_find_tensor(model->file, name),
                          (size_t)dim_size(&model->hp, vector_specs[vector].length),
                          model->consts + offset, ld->err);
}

static enum sluice_status load_consts(struct loader *ld, uint32_t n_ctx)
{
    struct sl_model *model = ld->model;
    struct sl_model_layout *layout = model->layout;
    SL_TRY(place_vectors(ld));
    model->consts_bytes = ld->n_const_floats * sizeof(float);
    model->consts = sl_alloc_aligned(SL_MEM_MODEL, model->consts_bytes, SL_CONST_ALIGN_BYTES);
    SL_CHECK(model->consts != NULL, OUT_OF_MEMORY, ld->err, "no memory for %zu bytes of vectors",
             model->consts_bytes);
    memset(model->consts, 0, model->consts_bytes); /* the gaps are copied to devices too */
    SL_TRY(read_vector(ld, SL_V_OUTPUT_NORM, 0, layout->output_norm));
    SL_TRY(read_vector(ld, SL_V_OUTPUT_BIAS, 0, layout->output_bias));
    for (uint32_t i = 0; i < model->hp.n_layers; i++) {
        for (uint32_t v = 0; v < SL_N_LAYER_VECTORS; v++) {
            SL_TRY(read_vector(ld, v, i, layout->layer[i][v]));
        }
    }
    const size_t local = layout->rope_freq[SL_ROPE_LOCAL];
    return sl_rope_tables_build(model, n_ctx, &ld->uses,
                                model->consts + layout->rope_freq[SL_ROPE_GLOBAL],
                                local == SL_NO_CONST ? NULL : model->consts + local, ld->err);
}

/* Tables that some old files carry and nobody reads. */
static bool is_ignorable(const char *name)
{
    return strstr(name, ".attn_rot_embd.") != NULL || strstr(name, ".rotary_emb.") != NULL;
}

/* A tensor that nothing uses means that the model is not what its architecture says: computing it
 * without that tensor would give wrong text instead of an error. */
static enum sluice_status check_all_used(const struct loader *ld)
{
    const struct sl_gguf *file = ld->model->file;
    const size_t n = sl_gguf_n_tensors(file);
    for (size_t i = 0; i < n && ld->uses.n < n; i++) {
        const struct sl_gguf_tensor *t = sl_gguf_tensor(file, i);
        size_t k = 0;
        while (k < ld->uses.n && ld->uses.items[k] != t) {
            k++;
        }
        SL_CHECK(k < ld->uses.n || is_ignorable(t->name), UNSUPPORTED, ld->err,
                 "tensor '%s' has no place in a '%s' model; running without it would be wrong",
                 t->name, ld->model->arch->name);
    }
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_model_load_tensors(struct sl_model *model, uint32_t n_ctx,
                                         struct sluice_error *err)
{
    struct loader ld = {.model = model, .err = err};
    enum sluice_status status = SLUICE_STATUS_OK;
    struct sl_model_layout *layout = sl_calloc(SL_MEM_MODEL, 1, sizeof *layout);
    model->layout = layout;
    ld.uses.items = sl_calloc(SL_MEM_MODEL, sl_gguf_n_tensors(model->file), sizeof(*ld.uses.items));
    if (layout != NULL) {
        layout->layer = sl_calloc(SL_MEM_MODEL, model->hp.n_layers, sizeof *layout->layer);
    }
    if (layout == NULL || layout->layer == NULL || ld.uses.items == NULL) {
        status = sl_error_set(err, SLUICE_STATUS_OUT_OF_MEMORY, "no memory for tensor lists");
        goto out;
    }
    SL_TRY_OUT(load_matrices(&ld));
    SL_TRY_OUT(load_consts(&ld, n_ctx));
    SL_TRY_OUT(check_all_used(&ld));
out:
    sl_free(ld.uses.items);
    return status;
}
