/* SPDX-License-Identifier: Apache-2.0
 *
 * Which tensors a shape has. A matrix of n columns gets the spread 1 / sqrt(n), so that a product
 * with a normed input has spread 1 again; the output matrix gets more, so that the next token is
 * not a toss-up between near-equal logits.
 *
 * In mixtures the embedding has spread 1 and what layers add is small beside it: were it large, all
 * tokens would be alike after some layers and go to the same experts. A wanted skew comes from
 * columns of the embedding that all rows have in common: through a layer's router they favour some
 * experts in every token. The output norm leaves those columns out, or all logits would share them.
 */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>

#include "base/error.h"
#include "base/mem.h"
#include "synth/synth_internal.h"

#define OUTPUT_GAIN 2.0f
#define MIXTURE_RESIDUAL_GAIN 0.2f
#define VECTOR_SPREAD 0.1f

enum role { ROLE_OTHER, ROLE_VALUE, ROLE_RESIDUAL, ROLE_DOWN, ROLE_OUTPUT };

/* What a type becomes when rows are no whole number of its blocks: the next larger type with
 * blocks of 32, then F16. The same choice that common quantization programs make. */
static enum sl_type fit_type(enum sl_type type, int64_t n_cols)
{
    static const struct {
        enum sl_type from;
        enum sl_type to;
    } fallback[] = {
        {SL_TYPE_Q2_K, SL_TYPE_IQ4_NL}, {SL_TYPE_Q3_K, SL_TYPE_IQ4_NL},
        {SL_TYPE_Q4_K, SL_TYPE_Q5_0},   {SL_TYPE_Q5_K, SL_TYPE_Q5_1},
        {SL_TYPE_Q6_K, SL_TYPE_Q8_0},   {SL_TYPE_IQ4_XS, SL_TYPE_IQ4_NL},
    };
    if (n_cols % sl_type_traits((uint32_t)type)->block_items == 0) {
        return type;
    }
    for (size_t i = 0; i < sizeof(fallback) / sizeof(fallback[0]); i++) {
        if (fallback[i].from == type &&
            n_cols % sl_type_traits((uint32_t)fallback[i].to)->block_items == 0) {
            return fallback[i].to;
        }
    }
    return SL_TYPE_F16;
}

/* In a mixture the first and last eighth of the layers, and every third between, get more bits. */
static bool gets_more_bits(uint32_t layer, uint32_t n_layers)
{
    return layer < n_layers / 8 || layer >= 7 * n_layers / 8 || (layer - n_layers / 8) % 3 == 2;
}

static enum sl_type pick_type(const struct sl_synth_mix *mix, enum role role, uint32_t layer,
                              uint32_t n_layers)
{
    if (!mix->mixed || role == ROLE_OTHER || role == ROLE_RESIDUAL) {
        return mix->type;
    }
    return role == ROLE_OUTPUT || gets_more_bits(layer, n_layers) ? SL_TYPE_Q6_K : mix->type;
}

/* A new row of the list; NULL when out of memory. The name is formatted. */
__attribute__((format(printf, 2, 3))) static struct sl_synth_tensor *
add(struct sl_synth_tensors *list, const char *format, ...)
{
    if (list->n == list->capacity) {
        const size_t wanted = list->capacity == 0 ? 64 : list->capacity * 2;
        struct sl_synth_tensor *grown =
            sl_realloc(SL_MEM_GGUF, list->items, wanted, sizeof(*grown));
        if (grown == NULL) {
            list->out_of_memory = true;
            return NULL;
        }
        list->items = grown;
        list->capacity = wanted;
    }
    struct sl_synth_tensor *tensor = &list->items[list->n++];
    *tensor = (struct sl_synth_tensor){.type = SL_TYPE_F32, .n_dims = 1};
    va_list args;
    va_start(args, format);
    vsnprintf(tensor->name, sizeof(tensor->name), format, args);
    va_end(args);
    return tensor;
}

/* Everything the helpers below need about the layer being listed. */
struct listing {
    struct sl_synth_tensors *list;
    const struct sl_synth_shape *shape;
    const struct sl_synth_mix *mix;
    uint32_t layer;
};

static struct sl_synth_tensor *add_matrix(const struct listing *l, const char *name, enum role role,
                                          int64_t n_cols, int64_t n_rows)
{
    struct sl_synth_tensor *t = add(l->list, "blk.%u.%s.weight", l->layer, name);
    if (t != NULL) {
        t->type = fit_type(pick_type(l->mix, role, l->layer, l->shape->n_layers), n_cols);
        t->n_dims = 2;
        t->dims[0] = n_cols;
        t->dims[1] = n_rows;
        t->spread = 1.0f / sqrtf((float)n_cols);
        if (l->shape->n_experts > 0 && (role == ROLE_RESIDUAL || role == ROLE_DOWN)) {
            t->spread *= MIXTURE_RESIDUAL_GAIN;
        }
    }
    return t;
}

/* One such matrix for every expert. */
static void add_experts(const struct listing *l, const char *name, enum role role, int64_t n_cols,
                        int64_t n_rows)
{
    struct sl_synth_tensor *t = add_matrix(l, name, role, n_cols, n_rows);
    if (t != NULL) {
        t->n_dims = 3;
        t->dims[2] = l->shape->n_experts;
    }
}

static void add_router(const struct listing *l)
{
    struct sl_synth_tensor *t =
        add_matrix(l, "ffn_gate_inp", ROLE_OTHER, l->shape->n_embd, l->shape->n_experts);
    if (t != NULL) {
        t->type = SL_TYPE_F32;
    }
}

static struct sl_synth_tensor *add_vector(const struct listing *l, const char *name, float mean,
                                          int64_t n)
{
    struct sl_synth_tensor *t = add(l->list, "blk.%u.%s", l->layer, name);
    if (t != NULL) {
        t->dims[0] = n;
        t->mean = mean;
        t->spread = VECTOR_SPREAD;
    }
    return t;
}

/* A bias that is added to the hidden state, in every token alike: as small as what layers add. */
static void add_small_vector(const struct listing *l, const char *name, int64_t n)
{
    struct sl_synth_tensor *t = add_vector(l, name, 0, n);
    if (t != NULL) {
        t->spread *= MIXTURE_RESIDUAL_GAIN;
    }
}

/* The biases of all experts. */
static void add_expert_biases(const struct listing *l, const char *name, int64_t n, float gain)
{
    struct sl_synth_tensor *t = add_vector(l, name, 0, n);
    if (t != NULL) {
        t->n_dims = 2;
        t->dims[1] = l->shape->n_experts;
        t->spread *= gain;
    }
}

static void add_mixture(const struct listing *l)
{
    const struct sl_synth_shape *s = l->shape;
    add_router(l);
    add_experts(l, "ffn_gate_exps", ROLE_OTHER, s->n_embd, s->n_ff);
    add_experts(l, "ffn_up_exps", ROLE_OTHER, s->n_embd, s->n_ff);
    add_experts(l, "ffn_down_exps", ROLE_DOWN, s->n_ff, s->n_embd);
    if (s->n_ff_shared > 0) {
        add_vector(l, "ffn_gate_inp_shexp.weight", 0, s->n_embd);
        add_matrix(l, "ffn_gate_shexp", ROLE_OTHER, s->n_embd, s->n_ff_shared);
        add_matrix(l, "ffn_up_shexp", ROLE_OTHER, s->n_embd, s->n_ff_shared);
        add_matrix(l, "ffn_down_shexp", ROLE_DOWN, s->n_ff_shared, s->n_embd);
    }
    if (s->arch == SL_SYNTH_GPT_OSS) {
        add_vector(l, "ffn_gate_inp.bias", 0, s->n_experts);
        add_expert_biases(l, "ffn_gate_exps.bias", s->n_ff, 1);
        add_expert_biases(l, "ffn_up_exps.bias", s->n_ff, 1);
        add_expert_biases(l, "ffn_down_exps.bias", s->n_embd, MIXTURE_RESIDUAL_GAIN);
    }
}

static void add_layer(const struct listing *l)
{
    const struct sl_synth_shape *s = l->shape;
    const int64_t embd = s->n_embd;
    const int64_t q = (int64_t)s->n_heads * s->head_dim;
    const int64_t kv = (int64_t)s->n_kv_heads * s->head_dim;
    add_vector(l, "attn_norm.weight", 1, embd);
    add_matrix(l, "attn_q", ROLE_OTHER, embd, q);
    add_matrix(l, "attn_k", ROLE_OTHER, embd, kv);
    add_matrix(l, "attn_v", ROLE_VALUE, embd, kv);
    if (s->arch == SL_SYNTH_QWEN2 || s->arch == SL_SYNTH_QWEN2MOE || s->arch == SL_SYNTH_GPT_OSS) {
        add_vector(l, "attn_q.bias", 0, q);
        add_vector(l, "attn_k.bias", 0, kv);
        add_vector(l, "attn_v.bias", 0, kv);
    }
    if (s->arch == SL_SYNTH_QWEN3 || s->arch == SL_SYNTH_QWEN3MOE || s->arch == SL_SYNTH_GEMMA3) {
        add_vector(l, "attn_q_norm.weight", 1, s->head_dim);
        add_vector(l, "attn_k_norm.weight", 1, s->head_dim);
    }
    add_matrix(l, "attn_output", ROLE_RESIDUAL, q, embd);
    if (s->arch == SL_SYNTH_GEMMA3) {
        add_vector(l, "post_attention_norm.weight", 1, embd);
    }
    if (s->arch == SL_SYNTH_GPT_OSS) {
        add_small_vector(l, "attn_output.bias", embd);
        add_vector(l, "attn_sinks.weight", 0, s->n_heads);
        add_vector(l, "post_attention_norm.weight", 1, embd);
    } else {
        add_vector(l, "ffn_norm.weight", 1, embd);
    }
    if (s->n_experts > 0) {
        add_mixture(l);
        return;
    }
    add_matrix(l, "ffn_gate", ROLE_OTHER, embd, s->n_ff);
    add_matrix(l, "ffn_up", ROLE_OTHER, embd, s->n_ff);
    add_matrix(l, "ffn_down", ROLE_DOWN, s->n_ff, embd);
    if (s->arch == SL_SYNTH_GEMMA3) {
        add_vector(l, "post_ffw_norm.weight", 1, embd);
    }
}

static struct sl_synth_tensor *add_vocab_matrix(const struct listing *l, const char *name,
                                                enum role role, float gain)
{
    struct sl_synth_tensor *t = add(l->list, "%s", name);
    if (t != NULL) {
        t->type = fit_type(pick_type(l->mix, role, 0, l->shape->n_layers), l->shape->n_embd);
        t->n_dims = 2;
        t->dims[0] = l->shape->n_embd;
        t->dims[1] = l->shape->n_vocab;
        t->spread = gain / sqrtf((float)l->shape->n_embd);
    }
    return t;
}

/* An eighth of the columns, in whole blocks, carries the common part of the energy. */
static void add_mixture_embedding(const struct listing *l)
{
    const struct sl_synth_shape *s = l->shape;
    struct sl_synth_tensor *t = add_vocab_matrix(l, "token_embd.weight", ROLE_OTHER, 1);
    if (t == NULL) {
        return;
    }
    t->spread = 1;
    const int64_t block = sl_type_traits((uint32_t)t->type)->block_items;
    const int64_t n_common = (s->n_embd / 8 + block - 1) / block * block;
    if (s->expert_skew == 0 || n_common == s->n_embd) {
        return; /* sl_synth_tensors_init refuses a skew that has no room */
    }
    const float n = (float)s->n_embd;
    t->n_common = n_common;
    t->common_spread = sqrtf(s->expert_skew * n / (float)n_common);
    t->spread = sqrtf((1 - s->expert_skew) * n / (n - (float)n_common));
    l->list->output_norm = sl_calloc(SL_MEM_GGUF, s->n_embd, sizeof(float));
    l->list->out_of_memory = l->list->out_of_memory || l->list->output_norm == NULL;
    for (int64_t i = n_common; l->list->output_norm != NULL && i < s->n_embd; i++) {
        l->list->output_norm[i] = 1 / t->spread;
    }
}

/* Llama 3's table: long waves are slowed down by `factor`, short ones kept, those between
 * blended. */
static void add_rope_factors(const struct listing *l)
{
    const struct sl_synth_shape *s = l->shape;
    const uint32_t n = s->head_dim / 2;
    const double low = 1;
    const double high = 4;
    float *factors = sl_calloc(SL_MEM_GGUF, n, sizeof(*factors));
    struct sl_synth_tensor *t = factors == NULL ? NULL : add(l->list, "rope_freqs.weight");
    l->list->rope_factors = factors;
    if (t == NULL) {
        l->list->out_of_memory = true;
        return;
    }
    for (uint32_t i = 0; i < n; i++) {
        const double frequency = pow((double)s->rope_base, -2.0 * i / s->head_dim);
        const double turns = s->rope_ctx * frequency / (2 * acos(-1)); /* in the old context */
        const double keep = fmin(fmax((turns - low) / (high - low), 0), 1);
        factors[i] = (float)(1 / (keep + (1 - keep) / (double)s->rope_factor));
    }
    t->dims[0] = n;
    t->values = factors;
}

enum sluice_status sl_synth_tensors_init(struct sl_synth_tensors *list,
                                         const struct sl_synth_shape *shape,
                                         const struct sl_synth_mix *mix, struct sluice_error *err)
{
    *list = (struct sl_synth_tensors){0};
    struct listing l = {.list = list, .shape = shape, .mix = mix};
    if (shape->n_experts > 0) {
        add_mixture_embedding(&l);
    } else {
        add_vocab_matrix(&l, "token_embd.weight", shape->tied ? ROLE_OUTPUT : ROLE_OTHER,
                         shape->tied ? OUTPUT_GAIN : 1);
    }
    if (shape->rope_ctx > 0 && shape->arch != SL_SYNTH_GPT_OSS) {
        add_rope_factors(&l);
    }
    for (l.layer = 0; l.layer < shape->n_layers; l.layer++) {
        add_layer(&l);
    }
    struct sl_synth_tensor *norm = add(list, "output_norm.weight");
    if (norm != NULL) {
        norm->dims[0] = shape->n_embd;
        /* With an output matrix that is the embedding a token would mostly predict itself; random
         * signs take that away. */
        norm->mean = shape->tied ? 0 : 1;
        norm->spread = shape->tied ? 1 : VECTOR_SPREAD;
        norm->values = list->output_norm;
    }
    if (!shape->tied) {
        add_vocab_matrix(&l, "output.weight", ROLE_OUTPUT, OUTPUT_GAIN);
    }
    enum sluice_status status = SLUICE_STATUS_OK;
    if (list->out_of_memory) {
        status =
            sl_error_set(err, SLUICE_STATUS_OUT_OF_MEMORY, "out of memory for the tensor list");
    } else if (shape->expert_skew > 0 && list->output_norm == NULL) {
        status = sl_error_set(err, SLUICE_STATUS_INVALID_ARGUMENT,
                              "expert-skew needs embedding rows of at least two blocks; %u columns "
                              "of %s have one",
                              shape->n_embd, sl_type_name((uint32_t)list->items[0].type));
    }
    if (status != SLUICE_STATUS_OK) {
        sl_synth_tensors_finish(list);
    }
    return status;
}

void sl_synth_tensors_finish(struct sl_synth_tensors *list)
{
    sl_free(list->items);
    sl_free(list->rope_factors);
    sl_free(list->output_norm);
    *list = (struct sl_synth_tensors){0};
}
