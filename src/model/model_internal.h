/* SPDX-License-Identifier: Apache-2.0
 *
 * What the files of this part share: where each vector lies in `consts`, and the steps of loading.
 */
#ifndef SL_MODEL_MODEL_INTERNAL_H
#define SL_MODEL_MODEL_INTERNAL_H

#include "base/error.h"
#include "base/mem.h"
#include "model/arch.h"
#include "model/model.h"

/* Range limits of hyper-parameters. Far above any real model, low enough that products of two
 * sizes of one token stay inside int32. */
#define SL_MAX_LAYERS 1024
#define SL_MAX_WIDTH (1 << 20)
#define SL_MAX_HEADS 4096
#define SL_MAX_HEAD_DIM 256
#define SL_MAX_VOCAB (1 << 24)

/* Vectors start at this alignment inside consts, whose block has it too. */
#define SL_CONST_ALIGN_BYTES 256
/* No such vector in this model. */
#define SL_NO_CONST SIZE_MAX

enum sl_rope_kind { SL_ROPE_GLOBAL, SL_ROPE_LOCAL, SL_N_ROPE_KINDS };

/* Offsets are in floats from the start of consts. */
struct sl_model_layout {
    size_t (*layer)[SL_N_LAYER_VECTORS]; /* [n_layers] */
    size_t output_norm;
    size_t output_bias;
    size_t rope_freq[SL_N_ROPE_KINDS]; /* [n_rot / 2]; LOCAL only where windows have one */
    float rope_magnitude[SL_N_ROPE_KINDS];
};

/* Which layers see a window: 0 for a layer that attends to everything. */
uint32_t sl_hparams_layer_window(const struct sl_hparams *hp, uint32_t layer);

/* Fill model->arch and model->hp from the metadata and the shape of the embedding. */
enum sluice_status sl_hparams_load(struct sl_model *model, struct sluice_error *err);

/* Find every tensor: shards with their matrices, consts with vectors and rope tables, layout. */
enum sluice_status sl_model_load_tensors(struct sl_model *model, uint32_t n_ctx,
                                         struct sluice_error *err);

/* The tensors that were asked for, so that one that no part of the model uses can be named. */
struct sl_tensor_uses {
    const struct sl_gguf_tensor **items; /* room for all of the file's */
    size_t n;
};

/* A tensor by name, remembered as used; NULL when the file has none. */
const struct sl_gguf_tensor *sl_tensor_uses_find(struct sl_tensor_uses *uses,
                                                 const struct sl_model *model, const char *name);

/* Copy a vector of `n` floats stored as F32, F16 or BF16. FORMAT or UNSUPPORTED name the tensor. */
enum sluice_status sl_vector_read(const struct sl_gguf_tensor *tensor, size_t n, float *out,
                                  struct sluice_error *err);

/* Rope tables of the model: [n_rot / 2] floats each, and the magnitudes in the layout. `local` may
 * be NULL when no layer has its own. */
enum sluice_status sl_rope_tables_build(struct sl_model *model, uint32_t n_ctx,
                                        struct sl_tensor_uses *uses, float *global, float *local,
                                        struct sluice_error *err);

/* Packed offsets, sizes and classes of the shards, once their matrices are known. */
void sl_shards_finish(struct sl_model *model);

/* Parts of images and workspaces begin at such bytes. */
#define SL_IMAGE_ALIGN_BYTES 256
static inline size_t sl_shard_align(size_t bytes)
{
    return (bytes + SL_IMAGE_ALIGN_BYTES - 1) / SL_IMAGE_ALIGN_BYTES * SL_IMAGE_ALIGN_BYTES;
}

/* Where the activations of a shard lie in its workspace: offsets in bytes. Regions that are dead
 * when another is written share memory. */
struct sl_shard_workspace {
    size_t a;            /* normed input; then attention output; ffn: then down output */
    size_t b;            /* q; then o output. ffn: gate. */
    size_t k, v;         /* attention. ffn: k is up. */
    size_t ids, weights; /* mixture: the router's choice */
    size_t mine;         /* shared mixture */
    size_t partial;      /* shared: where up was, or q */
    size_t joined;       /* the same where it is added: attention's output is no longer needed */
    size_t lse;          /* attention over a part of the cache */
    size_t joined_lse;   /* the other part's */
    size_t one, gate;    /* of the shared expert: its choice, which is always 0, and its weight */
    size_t bytes;
};

/* The one place that knows the carving; lists of operators and sizes follow it. */
struct sl_shard_workspace sl_shard_carve(const struct sl_model *model, const struct sl_shard *shard,
                                         int32_t n_tokens, int32_t n_outputs);
/* Long passes go through a shard in pieces of so many tokens: workspace and scratch then stay
 * small whatever the micro-batch, and products are as fast as they get. Attention may be cut like
 * that because a token only looks back. Mixtures are not cut: each piece would read the experts
 * again. */
bool sl_shard_goes_in_pieces(const struct sl_model *model, const struct sl_shard *shard);
/* Query rows of a KV head; and rows or columns of a matrix that one element of a cut stands for. */
int32_t sl_shard_head_rows(const struct sl_model *model);
int32_t sl_shard_cut_width(const struct sl_model *model, const struct sl_shard *shard, uint32_t w);

/* Optional keys "<architecture>.<name>" of a file. A missing key leaves *out alone. */
enum sluice_status sl_key_u32(const struct sl_model *model, const char *name, uint32_t *out,
                              struct sluice_error *err);
enum sluice_status sl_key_f32(const struct sl_model *model, const char *name, float *out,
                              struct sluice_error *err);
/* The full key in `buffer` (SL_KEY_BYTES), and its value or NULL. */
#define SL_KEY_BYTES 96
const struct sl_gguf_value *sl_key_find(const struct sl_model *model, const char *name,
                                        char *buffer);

#endif
