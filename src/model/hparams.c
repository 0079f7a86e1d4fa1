/* SPDX-License-Identifier: Apache-2.0
 *
 * Hyper-parameters from the metadata. Every number is checked before anything is computed from it:
 * a file may hold anything. Messages name the key, its value and what would be accepted. Key names
 * are those of the GGUF specification.
 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "model/model_internal.h"

uint32_t sl_hparams_layer_window(const struct sl_hparams *hp, uint32_t layer)
{
    if (hp->window == 0 || hp->window_period == 0 || (layer + 1) % hp->window_period == 0) {
        return 0;
    }
    return hp->window;
}

const struct sl_gguf_value *sl_key_find(const struct sl_model *model, const char *name,
                                        char *buffer)
{
    snprintf(buffer, SL_KEY_BYTES, "%s.%s", model->arch->name, name);
    return sl_gguf_find(model->file, buffer);
}

enum sluice_status sl_key_u32(const struct sl_model *model, const char *name, uint32_t *out,
                              struct sluice_error *err)
{
    char key[SL_KEY_BYTES];
    if (sl_key_find(model, name, key) == NULL) {
        return SLUICE_STATUS_OK;
    }
    return sl_gguf_get_u32(model->file, key, out, err);
}

enum sluice_status sl_key_f32(const struct sl_model *model, const char *name, float *out,
                              struct sluice_error *err)
{
    char key[SL_KEY_BYTES];
    if (sl_key_find(model, name, key) == NULL) {
        return SLUICE_STATUS_OK;
    }
    SL_TRY(sl_gguf_get_f32(model->file, key, out, err));
    SL_CHECK(isfinite(*out), FORMAT, err, "'%s' is %g; must be finite", key, (double)*out);
    return SLUICE_STATUS_OK;
}

/* A number that some files give once and others layer by layer. Layers that differ are a kind of
 * model that is not built yet. */
static enum sluice_status read_array_as_one(const struct sl_model *model, const char *key,
                                            const struct sl_gguf_value *value, uint32_t *out,
                                            struct sluice_error *err)
{
    const struct sl_gguf_value *array = NULL;
    SL_TRY(sl_gguf_get_array(model->file, key, &array, err));
    const bool is_integer = array->item_kind != SL_GGUF_STRING && array->item_kind != SL_GGUF_F32 &&
                            array->item_kind != SL_GGUF_F64;
    SL_CHECK(is_integer && array->count > 0 && array->count <= SL_MAX_LAYERS, FORMAT, err,
             "'%s' is an array of %" PRIu64 " x %s; must be a number or one number a layer", key,
             value->count, sl_gguf_kind_name(value->item_kind));
    const int64_t first = sl_gguf_item_int(array, 0);
    for (uint64_t i = 1; i < array->count; i++) {
        SL_CHECK(sl_gguf_item_int(array, i) == first, UNSUPPORTED, err,
                 "'%s' differs between layers (%" PRId64 " and %" PRId64
                 "); models whose layers have different shapes are not supported",
                 key, first, sl_gguf_item_int(array, i));
    }
    SL_CHECK(first >= 0 && first <= UINT32_MAX, FORMAT, err,
             "'%s' holds %" PRId64 "; must be a positive number", key, first);
    *out = (uint32_t)first;
    return SLUICE_STATUS_OK;
}

/* A count between 1 and max. `fallback` is used when the key is missing; 0: it must be there. */
static enum sluice_status read_count(const struct sl_model *model, const char *name, uint32_t max,
                                     uint32_t fallback, uint32_t *out, struct sluice_error *err)
{
    char key[SL_KEY_BYTES];
    const struct sl_gguf_value *value = sl_key_find(model, name, key);
    if (value == NULL && fallback > 0) {
        *out = fallback;
        return SLUICE_STATUS_OK;
    }
    if (value != NULL && value->kind == SL_GGUF_ARRAY) {
        SL_TRY(read_array_as_one(model, key, value, out, err));
    } else {
        SL_TRY(sl_gguf_get_u32(model->file, key, out, err));
    }
    SL_CHECK(*out >= 1 && *out <= max, FORMAT, err, "'%s' is %" PRIu32 "; must be 1 to %" PRIu32,
             key, *out, max);
    return SLUICE_STATUS_OK;
}

/* Features that change the result and that no architecture of the table computes. Their keys are
 * harmless at the value that turns them off. */
static enum sluice_status refuse_features(const struct sl_model *model, struct sluice_error *err)
{
    static const struct {
        const char *key;
        float off;
    } features[] = {
        {"attention.max_alibi_bias", 0.0F},
        {"attention.clamp_kqv", 0.0F},
        {"attn_logit_softcapping", 0.0F},
        {"final_logit_softcapping", 0.0F},
        {"logit_scale", 1.0F},
        {"residual_scale", 1.0F},
        {"embedding_scale", 1.0F},
        {"expert_weights_scale", 1.0F},
    };
    /* Counts of things that some mixtures have. */
    static const char *const counts[] = {
        "expert_shared_count",       "expert_group_count",        "expert_group_used_count",
        "leading_dense_block_count", "interleave_moe_layer_step", "moe_every_n_layers",
    };
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        uint32_t value = 0;
        SL_TRY(sl_key_u32(model, counts[i], &value, err));
        SL_CHECK(value == 0, UNSUPPORTED, err, "'%s.%s' is %" PRIu32 "; this is not supported",
                 model->arch->name, counts[i], value);
    }
    for (size_t i = 0; i < sizeof features / sizeof features[0]; i++) {
        float value = features[i].off;
        SL_TRY(sl_key_f32(model, features[i].key, &value, err));
        SL_CHECK(value == 0.0F || value == features[i].off, UNSUPPORTED, err,
                 "'%s.%s' is %g; this feature is not supported", model->arch->name, features[i].key,
                 (double)value);
    }
    char key[SL_KEY_BYTES];
    bool causal = true;
    if (sl_key_find(model, "attention.causal", key) != NULL) {
        SL_TRY(sl_gguf_get_bool(model->file, key, &causal, err));
    }
    SL_CHECK(causal, UNSUPPORTED, err, "'%s' is false; only causal models are supported", key);
    return SLUICE_STATUS_OK;
}

static enum sluice_status load_arch(struct sl_model *model, struct sluice_error *err)
{
    struct sl_gguf_string name;
    SL_TRY(sl_gguf_get_string(model->file, "general.architecture", &name, err));
    model->arch = sl_arch_find(name.data, name.length);
    /* Bounded, because the name comes from the file. */
    SL_CHECK(model->arch != NULL, UNSUPPORTED, err,
             "architecture '%.*s' ('general.architecture') is not supported; known: %s",
             (int)(name.length < 64 ? name.length : 64), name.data, sl_model_known_archs());
    return SLUICE_STATUS_OK;
}

/* The vocabulary's size is that of the embedding: the only place where it must be right. */
static enum sluice_status load_embedding(struct sl_model *model, struct sluice_error *err)
{
    struct sl_hparams *hp = &model->hp;
    const struct sl_gguf_tensor *t = sl_gguf_find_tensor(model->file, "token_embd.weight");
    SL_CHECK(t != NULL, FORMAT, err, "tensor 'token_embd.weight' is missing");
    SL_CHECK(t->dims[0] == hp->n_embd && t->dims[1] >= 1 && t->dims[1] <= SL_MAX_VOCAB &&
                 t->dims[2] == 1 && t->dims[3] == 1,
             FORMAT, err,
             "tensor 'token_embd.weight' has shape [%" PRId64 ", %" PRId64 ", %" PRId64
             "]; must be ['%s.embedding_length' = %" PRIu32 ", 1 to %d tokens]",
             t->dims[0], t->dims[1], t->dims[2], model->arch->name, hp->n_embd, SL_MAX_VOCAB);
    hp->n_vocab = (uint32_t)t->dims[1];
    return SLUICE_STATUS_OK;
}

static enum sluice_status load_head_shape(struct sl_model *model, struct sluice_error *err)
{
    struct sl_hparams *hp = &model->hp;
    const char *arch = model->arch->name;
    SL_TRY(read_count(model, "attention.head_count", SL_MAX_HEADS, 0, &hp->n_heads, err));
    SL_TRY(read_count(model, "attention.head_count_kv", SL_MAX_HEADS, hp->n_heads, &hp->n_kv_heads,
                      err));
    SL_CHECK(hp->n_heads % hp->n_kv_heads == 0, FORMAT, err,
             "'%s.attention.head_count' (%" PRIu32 ") is no multiple of "
             "'%s.attention.head_count_kv' (%" PRIu32 ")",
             arch, hp->n_heads, arch, hp->n_kv_heads);
    char key[SL_KEY_BYTES];
    if (sl_key_find(model, "attention.key_length", key) == NULL) {
        SL_CHECK(hp->n_embd % hp->n_heads == 0, FORMAT, err,
                 "'%s' is missing and 'embedding_length' (%" PRIu32
                 ") is no multiple of 'attention.head_count' (%" PRIu32 ")",
                 key, hp->n_embd, hp->n_heads);
    }
    SL_TRY(read_count(model, "attention.key_length", SL_MAX_WIDTH, hp->n_embd / hp->n_heads,
                      &hp->head_dim, err));
    SL_CHECK(hp->head_dim % 32 == 0 && hp->head_dim <= SL_MAX_HEAD_DIM, UNSUPPORTED, err,
             "heads of %" PRIu32 " elements ('%s') are not supported; must be a multiple of 32 "
             "up to %d",
             hp->head_dim, key, SL_MAX_HEAD_DIM);
    uint32_t value_dim = hp->head_dim;
    SL_TRY(
        read_count(model, "attention.value_length", SL_MAX_WIDTH, hp->head_dim, &value_dim, err));
    SL_CHECK(value_dim == hp->head_dim, UNSUPPORTED, err,
             "value heads of %" PRIu32
             " elements ('%s.attention.value_length') beside key heads of %" PRIu32
             " are not supported",
             value_dim, arch, hp->head_dim);
    SL_TRY(read_count(model, "rope.dimension_count", SL_MAX_WIDTH, hp->head_dim, &hp->n_rot, err));
    SL_CHECK(hp->n_rot % 2 == 0 && hp->n_rot <= hp->head_dim, FORMAT, err,
             "'%s.rope.dimension_count' is %" PRIu32
             "; must be even and at most the head size %" PRIu32,
             arch, hp->n_rot, hp->head_dim);
    return SLUICE_STATUS_OK;
}

static enum sluice_status load_window(struct sl_model *model, struct sluice_error *err)
{
    struct sl_hparams *hp = &model->hp;
    if (model->arch->window_period == 0) {
        return SLUICE_STATUS_OK;
    }
    SL_TRY(sl_key_u32(model, "attention.sliding_window", &hp->window, err));
    SL_CHECK(hp->window <= INT32_MAX, FORMAT, err,
             "'%s.attention.sliding_window' is %" PRIu32 "; must be below 2^31", model->arch->name,
             hp->window);
    if (hp->window == 0) {
        return SLUICE_STATUS_OK;
    }
    char key[SL_KEY_BYTES];
    const struct sl_gguf_value *value = sl_key_find(model, "attention.sliding_window_pattern", key);
    SL_CHECK(value == NULL || value->kind != SL_GGUF_ARRAY, UNSUPPORTED, err,
             "'%s' is an array; only a period (one number) is supported", key);
    return read_count(model, "attention.sliding_window_pattern", SL_MAX_LAYERS,
                      model->arch->window_period, &hp->window_period, err);
}

static enum sluice_status load_scales(struct sl_model *model, struct sluice_error *err)
{
    struct sl_hparams *hp = &model->hp;
    const char *arch = model->arch->name;
    char key[SL_KEY_BYTES];
    sl_key_find(model, "attention.layer_norm_rms_epsilon", key);
    SL_TRY(sl_gguf_get_f32(model->file, key, &hp->norm_eps, err));
    SL_CHECK(hp->norm_eps >= 0.0F && hp->norm_eps < 1.0F, FORMAT, err, "'%s' is %g; must be 0 to 1",
             key, (double)hp->norm_eps);
    hp->embedding_scale = model->arch->scale_embedding ? sqrtf((float)hp->n_embd) : 1.0F;
    const double width = hp->n_layers == model->arch->width_scaled_layers
                             ? (double)hp->n_embd / hp->n_heads
                             : (double)hp->head_dim;
    hp->attention_scale = (float)(1.0 / sqrt(width));
    SL_TRY(sl_key_f32(model, "attention.scale", &hp->attention_scale, err));
    SL_CHECK(hp->attention_scale > 0.0F, FORMAT, err,
             "'%s.attention.scale' is %g; must be positive", arch, (double)hp->attention_scale);
    return SLUICE_STATUS_OK;
}

/* Files say how wide the shared expert is, or it is as wide as a dense feed-forward would be. */
static enum sluice_status load_shared_width(struct sl_model *model, struct sluice_error *err)
{
    char key[SL_KEY_BYTES];
    const char *const name = "expert_shared_feed_forward_length";
    const bool own_width = sl_key_find(model, name, key) != NULL;
    return read_count(model, own_width ? name : "feed_forward_length", SL_MAX_WIDTH, 0,
                      &model->hp.n_ff_shared, err);
}

/* A mixture's numbers, and n_ff. Files give the width of an expert where it is not that of the
 * dense feed-forward. */
static enum sluice_status load_experts(struct sl_model *model, struct sluice_error *err)
{
    struct sl_hparams *hp = &model->hp;
    const struct sl_arch *arch = model->arch;
    SL_TRY(sl_key_u32(model, "expert_count", &hp->n_experts, err));
    SL_CHECK(hp->n_experts == 0 || arch->mixture != SL_MIXTURE_NO, UNSUPPORTED, err,
             "'%s.expert_count' is %" PRIu32 "; mixtures of experts of this architecture are not "
             "supported",
             arch->name, hp->n_experts);
    SL_CHECK(hp->n_experts > 0 || arch->mixture != SL_MIXTURE_YES, FORMAT, err,
             "'%s.expert_count' is missing or 0; must be 1 to %d", arch->name, SL_MAX_EXPERTS);
    if (hp->n_experts == 0) {
        return read_count(model, "feed_forward_length", SL_MAX_WIDTH, 0, &hp->n_ff, err);
    }
    SL_CHECK(hp->n_experts <= SL_MAX_EXPERTS, FORMAT, err,
             "'%s.expert_count' is %" PRIu32 "; must be 1 to %d", arch->name, hp->n_experts,
             SL_MAX_EXPERTS);
    const uint32_t most = hp->n_experts < SL_MAX_EXPERTS_USED ? hp->n_experts : SL_MAX_EXPERTS_USED;
    SL_TRY(read_count(model, "expert_used_count", most, 0, &hp->n_experts_used, err));
    char key[SL_KEY_BYTES];
    const bool own_width = sl_key_find(model, "expert_feed_forward_length", key) != NULL;
    SL_TRY(read_count(model, own_width ? "expert_feed_forward_length" : "feed_forward_length",
                      SL_MAX_WIDTH, 0, &hp->n_ff, err));
    return arch->shared_expert ? load_shared_width(model, err) : SLUICE_STATUS_OK;
}

enum sluice_status sl_hparams_load(struct sl_model *model, struct sluice_error *err)
{
    struct sl_hparams *hp = &model->hp;
    SL_TRY(load_arch(model, err));
    SL_TRY(refuse_features(model, err));
    SL_TRY(read_count(model, "block_count", SL_MAX_LAYERS, 0, &hp->n_layers, err));
    SL_TRY(read_count(model, "embedding_length", SL_MAX_WIDTH, 0, &hp->n_embd, err));
    SL_TRY(load_experts(model, err));
    SL_TRY(read_count(model, "context_length", INT32_MAX, 0, &hp->n_ctx_train, err));
    SL_TRY(load_head_shape(model, err));
    SL_TRY(load_window(model, err));
    SL_TRY(load_scales(model, err));
    return load_embedding(model, err);
}
