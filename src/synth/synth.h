/* SPDX-License-Identifier: Apache-2.0
 *
 * Synthetic models: random weights in the shapes of real models, with a vocabulary that works,
 * written at disk speed. For benchmarks of models one does not have, and for tests. Weights are
 * scaled so that activations stay near 1 at any depth. In a mixture layers add little to what the
 * embedding gives, so that tokens stay different and use different experts at any depth. The same
 * shape, type and seed give the same file at every thread count.
 */
#ifndef SL_SYNTH_SYNTH_H
#define SL_SYNTH_SYNTH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <sluice/status.h>

#include "base/pool.h"
#include "quant/type.h"

enum sl_synth_arch {
    SL_SYNTH_LLAMA,
    SL_SYNTH_QWEN2,
    SL_SYNTH_QWEN3,
    SL_SYNTH_GEMMA3,
    SL_SYNTH_QWEN3MOE,
    SL_SYNTH_QWEN2MOE,
    SL_SYNTH_GPT_OSS,
};

/* How the vocabulary is made; the model's family decides. */
enum sl_synth_vocab {
    SL_SYNTH_VOCAB_LLAMA3, /* gpt2 style, pre-tokenizer llama-bpe */
    SL_SYNTH_VOCAB_TEKKEN, /* gpt2 style, tekken */
    SL_SYNTH_VOCAB_QWEN,   /* gpt2 style, qwen2, ChatML */
    SL_SYNTH_VOCAB_SMOLLM, /* gpt2 style, smollm, ChatML */
    SL_SYNTH_VOCAB_GEMMA,  /* SentencePiece style */
    SL_SYNTH_VOCAB_O200K,  /* gpt2 style, gpt-4o */
};

struct sl_synth_shape {
    const char *name;
    const char *title; /* general.name */
    enum sl_synth_arch arch;
    enum sl_synth_vocab vocab;
    uint32_t n_layers;
    uint32_t n_embd;
    uint32_t n_ff;      /* of a mixture: width of one expert */
    uint32_t n_experts; /* 0: dense */
    uint32_t n_experts_used;
    uint32_t n_ff_shared; /* width of the expert that all tokens use; 0: none */
    uint32_t n_heads;
    uint32_t n_kv_heads;
    uint32_t head_dim;
    uint32_t n_vocab;
    uint32_t n_ctx;
    float rope_base;
    float norm_eps;
    float rope_factor; /* linear scaling, or the factor of the Llama 3 table or YaRN; 0: none */
    uint32_t rope_ctx; /* Llama 3 table, or YaRN (gpt-oss): original context length; 0: neither */
    uint32_t window;   /* sliding window; 0: none */
    bool tied;         /* the output matrix is the embedding */
    /* Of mixtures: the part (0 .. below 1) of the hidden state's energy that is the same in every
     * token. It makes some experts of each layer popular: 0 gives uniform use, about 0.65 the use
     * that is seen in Qwen3-30B-A3B (40 % of the experts serve 95 % of the calls, and consecutive
     * tokens share 40 % of theirs). */
    float expert_skew;
};

/* All shapes by index (NULL past the end), and by name (NULL: no such). */
const struct sl_synth_shape *sl_synth_shape_at(size_t index);
const struct sl_synth_shape *sl_synth_shape_find(const char *name);

/* The smallest sensible shape of an architecture ("llama", "qwen2", ...), to be changed by
 * numbers; false when the name is unknown. */
bool sl_synth_shape_base(const char *arch, struct sl_synth_shape *out);
const char *sl_synth_arch_name(enum sl_synth_arch arch);

/* Which type each matrix gets: one for all ("Q4_K"), or a mixture ("Q4_K_M"). */
struct sl_synth_mix {
    enum sl_type type;
    bool mixed;    /* value and down matrices of some layers, and the output, in Q6_K */
    int32_t ftype; /* general.file_type; -1: none */
};

/* Names of types that compute, and of the mixtures Q4_K_M and Q5_K_M; false: unknown. */
bool sl_synth_mix_from_name(const char *name, struct sl_synth_mix *out);

/* Called now and then with bytes of weights written; returning false cancels. */
typedef bool sl_synth_progress_fn(void *user, uint64_t done_bytes, uint64_t total_bytes);

struct sl_synth_options {
    struct sl_synth_shape shape;
    struct sl_synth_mix mix;
    uint64_t seed;
    struct sl_pool *pool;           /* NULL: one thread */
    sl_synth_progress_fn *progress; /* or NULL */
    void *progress_user;
};

/* Write a model file. Nothing is left behind on failure. Errors: INVALID_ARGUMENT (a shape that
 * cannot be), IO, OUT_OF_MEMORY, CANCELLED. */
enum sluice_status sl_synth_write(const struct sl_synth_options *options, const char *path,
                                  struct sluice_error *err);

#endif
