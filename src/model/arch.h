/* SPDX-License-Identifier: Apache-2.0
 *
 * Architectures as data. One row (struct sl_arch, one file each) states how a family of models
 * differs from the plain decoder
 *
 *   h += o(attention(rope(q), rope(k), v)),  q, k, v = qkv(norm(h))
 *   h += down(act(gate(norm(h))) * up(norm(h)))            dense, or
 *   h += sum over the chosen e of w_e * the same of expert e     a mixture: ids, w =
 * router(norm(h)); with a shared expert, sigmoid(router'(norm(h))) * the same of it on top
 *
 * The optional vectors of a layer (biases, q/k norms, norms after a sub-layer) take effect by
 * being in the file, so a row only says which of them must and which may be there.
 */
#ifndef SL_MODEL_ARCH_H
#define SL_MODEL_ARCH_H

#include <stdbool.h>
#include <stdint.h>

#include "op/op.h"

/* Float vectors of a layer, "blk.N.<name>" in the file (model_tensors.c has names and lengths). */
enum sl_vector {
    SL_V_ATTN_NORM,
    SL_V_Q_BIAS,
    SL_V_K_BIAS,
    SL_V_V_BIAS,
    SL_V_O_BIAS,
    SL_V_SINKS,          /* one logit a head that attention adds to its sum */
    SL_V_Q_NORM,         /* of each query head */
    SL_V_K_NORM,         /* of each key head */
    SL_V_POST_ATTN_NORM, /* of the attention output, before it is added */
    SL_V_FFN_NORM,
    SL_V_GATE_BIAS,
    SL_V_UP_BIAS,
    SL_V_DOWN_BIAS,
    SL_V_ROUTER_BIAS,
    SL_V_POST_FFN_NORM, /* of the feed-forward output, before it is added */
    SL_N_LAYER_VECTORS,
    /* Once a model. */
    SL_V_OUTPUT_NORM = SL_N_LAYER_VECTORS,
    SL_V_OUTPUT_BIAS,
    SL_N_VECTORS,
};

#define SL_V_BIT(vector) (1u << (vector))
/* What every architecture has. */
#define SL_V_BASE (SL_V_BIT(SL_V_ATTN_NORM) | SL_V_BIT(SL_V_FFN_NORM) | SL_V_BIT(SL_V_OUTPUT_NORM))

/* Whether the feed-forwards of an architecture are mixtures of experts. */
enum sl_mixture { SL_MIXTURE_NO, SL_MIXTURE_MAYBE /* the file says */, SL_MIXTURE_YES };

struct sl_arch {
    const char *name;  /* general.architecture, and the prefix of its keys */
    uint32_t required; /* vectors (SL_V_BIT) that must be in the file */
    uint32_t optional; /* vectors that may be */
    bool rope_neox;    /* rotated pairs are (i, i + n_rot/2) instead of (2i, 2i+1) */
    enum sl_activation activation;
    enum sl_mixture mixture;
    enum sl_gating gating;  /* of the router */
    bool normalize_weights; /* of the chosen experts, to a sum of 1 */
    bool shared_expert;     /* every layer has one that all tokens use */
    /* The norm before the feed-forward is called post_attention_norm in the file. */
    bool ffn_norm_after_attention;
    bool scale_embedding; /* embedding rows times sqrt(n_embd) */
    /* Sliding-window layers: every window_period-th layer attends to everything, the others to
     * `attention.sliding_window` positions. 0: the architecture has no window. The file may give
     * another period. Window layers rotate by local_rope_base, unscaled; 0: as the others. */
    uint32_t window_period;
    double local_rope_base;
    /* Models with this many layers scale attention by 1/sqrt(n_embd / n_heads) instead of
     * 1/sqrt(head_dim): no key says so. 0: none. */
    uint32_t width_scaled_layers;
};

extern const struct sl_arch sl_arch_llama;
extern const struct sl_arch sl_arch_qwen2;
extern const struct sl_arch sl_arch_qwen2moe;
extern const struct sl_arch sl_arch_qwen3;
extern const struct sl_arch sl_arch_qwen3moe;
extern const struct sl_arch sl_arch_gemma3;
extern const struct sl_arch sl_arch_gpt_oss;

/* The row of a name of `length` bytes; NULL when there is none. */
const struct sl_arch *sl_arch_find(const char *name, size_t length);

#endif
