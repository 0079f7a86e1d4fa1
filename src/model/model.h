/* SPDX-License-Identifier: Apache-2.0
 *
 * A model: hyper-parameters and weights of a GGUF file, cut into shards, and the operators of each
 * shard. Architectures are data (model/arch.h, one row each); nothing here knows devices or plans.
 *
 *   layer i:  shard ATTENTION (norm, q/k/v/o, q/k norms, KV) -> shard FFN (norm, gate/up/down)
 *             or, in a mixture, FFN (norm, router, gate/up/down of all experts)
 *   last:     shard HEAD (output norm, output matrix)
 *
 * The token embedding is no shard: it stays in system memory and is read row by row.
 */
#ifndef SL_MODEL_MODEL_H
#define SL_MODEL_MODEL_H

#include "base/pool.h"
#include "gguf/gguf.h"
#include "op/op.h"

enum sl_shard_kind { SL_SHARD_ATTENTION, SL_SHARD_FFN, SL_SHARD_HEAD };

/* Roles of a shard's matrices: index into sl_shard.weights and sl_shard_bind.weights. */
enum { SL_W_Q, SL_W_K, SL_W_V, SL_W_O, SL_N_ATTENTION_WEIGHTS };
enum { SL_W_GATE, SL_W_UP, SL_W_DOWN, SL_N_FFN_WEIGHTS };
/* A mixture's FFN: the same three hold all experts, one after the other; and these. Biases (F32,
 * a row an expert) are there in all of gate, up and down or in none, and so are the matrices of the
 * shared expert, which every token uses, weighted by a router of its own. */
enum {
    SL_W_ROUTER = SL_N_FFN_WEIGHTS,
    SL_W_GATE_BIAS,
    SL_W_UP_BIAS,
    SL_W_DOWN_BIAS,
    SL_W_SHARED_ROUTER,
    SL_W_SHARED_GATE,
    SL_W_SHARED_UP,
    SL_W_SHARED_DOWN,
    SL_N_MIXTURE_WEIGHTS
};
enum { SL_W_OUTPUT, SL_N_HEAD_WEIGHTS };
#define SL_SHARD_MAX_WEIGHTS 12

struct sl_hparams {
    uint32_t n_layers;
    uint32_t n_embd;
    uint32_t n_heads;
    uint32_t n_kv_heads;
    uint32_t head_dim;
    uint32_t n_ff; /* of a dense feed-forward, or of one expert */
    uint32_t n_vocab;
    uint32_t n_ctx_train;
    uint32_t n_rot;
    uint32_t n_experts; /* 0: dense */
    uint32_t n_experts_used;
    uint32_t n_ff_shared; /* width of a mixture's shared expert; 0: it has none */
    float norm_eps;
    uint32_t window; /* sliding window of the layers that have one; 0: none */
    /* Every window_period-th layer attends to everything (gemma3: 6); 0: all do. */
    uint32_t window_period;
    float embedding_scale; /* applied to embedding rows (gemma: sqrt(n_embd)); else 1 */
    float attention_scale;
    float attention_softcap; /* 0: none */
    float logit_softcap;     /* 0: none */
};

struct sl_weight {
    const char *name;   /* as in the file; NULL: this shard has no such matrix */
    struct sl_matrix m; /* data points into the file mapping; the rows of all experts */
    size_t bytes;
    size_t offset; /* of this matrix inside the shard's packed image (256-byte aligned) */
    /* Mixtures: of one expert's matrix inside an expert's slot, of router, biases and shared
     * expert inside the base. */
    size_t part_offset;
};

struct sl_shard {
    enum sl_shard_kind kind;
    uint32_t layer; /* n_layers for the head */
    uint32_t n_weights;
    struct sl_weight weights[SL_SHARD_MAX_WEIGHTS];
    size_t bytes; /* of the packed image: what residency or a stream slot costs */
    /* Mixtures can be placed expert by expert: what each one takes (gate, up and down, 256-byte
     * aligned), and the base (all other matrices) that any of them needs. 0 where dense. */
    size_t expert_bytes, base_bytes;
    uint32_t window;   /* attention: 0 or the sliding window */
    uint32_t class_id; /* shards of one kind, shape and type set share it (planner) */
};

struct sl_arch;

struct sl_model {
    struct sl_gguf *file;
    const struct sl_arch *arch;
    struct sl_hparams hp;
    struct sl_matrix embedding;
    struct sl_shard *shards; /* in execution order: 2 * n_layers + 1 */
    uint32_t n_shards;
    uint32_t n_classes;
    size_t weight_bytes; /* of all shards and the embedding */
    uint64_t n_params;
    /* All float vectors (norms, biases, rope tables, sinks) in one block, so that a device copy of
     * them is one copy; they are always resident. */
    float *consts;
    size_t consts_bytes;
    struct sl_model_layout *layout; /* offsets into consts, per layer (model_internal.h) */
};

/* Load a model from a file. `n_ctx` (0: as trained) chooses rope tables that depend on the context
 * length. FORMAT names a missing or misshapen tensor or key; UNSUPPORTED names an unknown
 * architecture or type, listing what is known. */
enum sluice_status sl_model_open(struct sl_model **out, const char *path, uint32_t n_ctx,
                                 struct sluice_error *err);
void sl_model_close(struct sl_model **model);

/* Float rows of the embedding, scaled, for tokens (each < n_vocab): out [n, n_embd]. */
void sl_model_embed(const struct sl_model *model, const int32_t *tokens, int32_t n, float *out);

/* Where shards are cut in two, the same in all layers: what comes first of the elements between
 * gate, up and down of a dense feed-forward (rows of gate and up, columns of down), of the rows of
 * the output matrix, and of the KV heads with their query heads (rows of q, k and v, columns of o,
 * and the cache). Or of the cache alone: its first blocks, of all heads; no matrix is cut then. 0:
 * not cut. */
struct sl_split {
    int32_t ffn;
    int32_t head;
    int32_t kv_heads;
    int32_t kv_blocks; /* a multiple of SL_CUT_KV_BLOCKS; not together with kv_heads */
};

/* So that a pass whose bound on positions is rounded up to whole recordings
 * (exec/context_internal.h) is inside the first blocks exactly when its positions are. */
#define SL_CUT_KV_BLOCKS 4

/* Whether the cache of every layer is in two parts. */
static inline bool sl_split_cuts_kv(struct sl_split split)
{
    return split.kv_heads > 0 || split.kv_blocks > 0;
}

/* Where this shard is cut; 0: it is not. How much there is to cut; 0: mixtures are never. And what
 * cuts are multiples of: whole blocks. */
int32_t sl_shard_cut(const struct sl_model *model, const struct sl_shard *shard,
                     struct sl_split split);
int32_t sl_shard_cut_end(const struct sl_model *model, const struct sl_shard *shard);
int32_t sl_shard_cut_unit(const struct sl_model *model, const struct sl_shard *shard);
/* Whether this attention looks at a cache that is cut by blocks. And whether two sides can compute
 * a shard together: a mixture, one that is cut, or such an attention. */
bool sl_shard_is_divided(const struct sl_shard *shard, struct sl_split split);
bool sl_shard_can_share(const struct sl_model *model, const struct sl_shard *shard,
                        struct sl_split split);

/* A piece of a shard that can be cut, elements (rows, KV heads) begin .. end - 1: where its
 * matrices lie in the file, and where in an image of the piece alone. */
struct sl_slice {
    struct {
        const void *data; /* n_rows of row_bytes, pitch_bytes apart; NULL: no such matrix */
        size_t row_bytes, pitch_bytes, n_rows;
        size_t offset; /* in the image, without gaps */
    } weights[SL_N_ATTENTION_WEIGHTS];
    uint32_t n_weights;
    size_t bytes; /* of the image */
};
struct sl_slice sl_shard_slice(const struct sl_model *model, const struct sl_shard *shard,
                               int32_t begin, int32_t end);

/* What the resident prefix holds of a shard: all of it, of a mixture its base, or what is before
 * the cut. */
size_t sl_shard_resident_bytes(const struct sl_model *model, const struct sl_shard *shard,
                               struct sl_split split);

/* What a list of operators is of a shard. One may be shared by two sides. A mixture: the device
 * routes, divides the chosen experts and computes its own, the host computes the others. A shard
 * that is cut: the device has what is before the cut, the host the rest. The host's sum joins the
 * device's; of the head, each side makes logits of its own. Attention over a cache that is cut by
 * blocks (kv.n_first): each side attends to the positions that it has, and the host's rows are
 * merged into the device's, which has all weights. */
enum sl_shard_part {
    SL_PART_WHOLE,
    SL_PART_ROUTE,  /* norm; of mixtures the router too, and with at_hand: what is mine; over a
                       divided cache: queries, keys and values */
    SL_PART_OWN,    /* the experts in `mine` and the shared one, or what is before the cut */
    SL_PART_OTHERS, /* the experts in `mine` (the host's list of them), or the rest: to `partial` */
    SL_PART_JOIN,   /* add or merge partial; nothing to do for the head */
};

/* Where the operands of a shard live in the memory of the backend that will run it. */
struct sl_shard_bind {
    const void *weights[SL_SHARD_MAX_WEIGHTS]; /* by role */
    const float *consts;                       /* this memory's copy of model->consts */
    float *hidden;                             /* [n_tokens, n_embd]: read and updated in place */
    void *workspace;                           /* sl_shard_workspace_bytes, 256-byte aligned */
    const int32_t *pos;                        /* [n_tokens] */
    const int32_t *seq;                        /* [n_tokens] or NULL */
    struct sl_kv_view kv;                      /* attention only; of the heads that are computed */
    int32_t n_tokens;
    int32_t n_kv_max; /* see sl_op_attention */
    float *logits;    /* head only: [n_outputs, n_vocab] of the last n_outputs tokens */
    int32_t n_outputs;
    enum sl_shard_part part;
    /* Of a shard that is cut (0: not). Then `weights` are an image of what is before the cut, and
     * for WHOLE `rest` of what is behind it; for OTHERS they are those of the file. */
    int32_t cut;
    const void *rest[SL_N_ATTENTION_WEIGHTS];
    void *kv_rest; /* WHOLE: the cache of the KV heads behind the cut, as `kv` otherwise */
    /* Mixtures only. */
    const void *const *experts[3]; /* tables of gate, up, down by expert; NULL: in the image */
    const uint8_t *at_hand;        /* ROUTE: by expert; NULL: no division */
    int32_t *uses;                 /* counts of this layer's experts; or NULL */
    int32_t share;                 /* ROUTE: see struct sl_op_divide */
    /* Where the other side's sums are. */
    float *partial;     /* JOIN: [n_tokens, n_embd]; NULL: in the workspace */
    float *partial_lse; /* the same, of attention over a divided cache */
};

/* Where ROUTE leaves its results in the workspace, and OTHERS reads and writes them: one stretch,
 * the normed input and of mixtures [ids | weights | mine], or queries, keys and values; and the
 * partial sums, over a divided cache with lse. Offsets in bytes. Of the head n_tokens are those
 * with logits, and its partial sums logits of all rows. */
struct sl_shard_choice {
    size_t ids, mine, begin, end; /* the stretch is begin .. end */
    size_t partial, bytes;        /* bytes: all that OTHERS works in */
    size_t partial_bytes, lse, lse_bytes;
    size_t joined, joined_lse; /* where JOIN looks for partial sums in its own workspace */
};
struct sl_shard_choice sl_shard_choice(const struct sl_model *model, const struct sl_shard *shard,
                                       struct sl_split split, int32_t n_tokens);

/* Long passes are cut into pieces, but for shards that are shared: those take no more tokens. */
#define SL_SHARD_PIECE_TOKENS 1024
#define SL_SHARD_MAX_PIECES 4
#define SL_SHARD_MAX_OPS (SL_SHARD_MAX_PIECES * 18)

/* The ops of one shard. Returns how many were written to `ops` (SL_SHARD_MAX_OPS). Weights left
 * NULL in `bind` give ops fit for sl_op_scratch_bytes and cost models only. */
int sl_shard_build(const struct sl_model *model, const struct sl_shard *shard,
                   const struct sl_shard_bind *bind, struct sl_op *ops);

/* Bytes of activations that a shard needs for a pass of n_tokens (n_outputs: head), beside
 * hidden and logits; and the largest op scratch. */
size_t sl_shard_workspace_bytes(const struct sl_model *model, const struct sl_shard *shard,
                                int32_t n_tokens, int32_t n_outputs);
size_t sl_shard_scratch_bytes(const struct sl_model *model, const struct sl_shard *shard,
                              int32_t n_tokens, int32_t n_outputs);
/* The largest op scratch of passes of 1 to n_tokens: short ones split their attention. */
size_t sl_shard_most_scratch_bytes(const struct sl_model *model, const struct sl_shard *shard,
                                   int32_t n_tokens, int32_t n_outputs);

/* Names of all known architectures, comma-separated, for messages. */
const char *sl_model_known_archs(void);

#endif
