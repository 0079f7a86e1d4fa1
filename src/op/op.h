/* SPDX-License-Identifier: Apache-2.0
 *
 * The operators. A shard's computation is a short list of `struct sl_op`, made by the model part
 * and run by a backend: the CPU (src/cpu), the sim device or the CUDA device. All addresses in an
 * op belong to the memory of the backend that runs it. Activations are float32, row-major, one row
 * a token; weights keep the bytes of the file.
 *
 * Everything residual is an accumulation (`accumulate`), and gate/up products carry their
 * activation, so five operators make a dense transformer; two more make a mixture of experts. Three
 * divide work between backends and put together what both have computed.
 */
#ifndef SL_OP_OP_H
#define SL_OP_OP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <sluice/status.h>

#include "quant/type.h"

enum sl_op_kind {
    SL_OP_NORM,   /* root-mean-square norm of rows, optionally scaled and accumulated */
    SL_OP_LINEAR, /* up to four products that share one input; optional bias and gated activation */
    SL_OP_ROPE,   /* rotary position embedding, in place */
    SL_OP_KV_STORE,  /* append keys and values to the cache */
    SL_OP_ATTENTION, /* causal attention of the pass's queries over the cache */
    SL_OP_ROUTER,    /* which experts each token goes to, and with what weights */
    SL_OP_EXPERTS,   /* feed-forward products of the chosen experts, weighted and summed */
    SL_OP_DIVIDE,    /* which of the chosen experts this backend computes */
    SL_OP_ADD,       /* add what another backend has computed */
    SL_OP_MERGE,     /* the same of attention over other positions */
    SL_OP_N_KINDS,
};

/* A matrix [n_rows, n_cols] in file layout: rows of n_cols packed elements, row after row. Some
 * columns of a wider matrix are one whose rows lie apart, which only the CPU computes with
 * (SL_OP_LINEAR). */
struct sl_matrix {
    const void *data;
    enum sl_type type;
    uint32_t pitch_bytes; /* from row to row; 0: no gaps */
    int64_t n_rows;       /* outputs */
    int64_t n_cols;       /* inputs; a multiple of the type's block size */
};

/* From the first byte of a row to that of the next. */
static inline size_t sl_matrix_pitch_bytes(const struct sl_matrix *m)
{
    return m->pitch_bytes > 0 ? m->pitch_bytes : sl_type_row_bytes(m->type, m->n_cols);
}

/* y = x * rsqrt(mean(x^2) + eps) * weight, each of n_tokens * rows_per_token rows on its own.
 * rows_per_token > 1 norms heads. x and y may be the same memory when not accumulating. */
struct sl_op_norm {
    const float *x;      /* [n_tokens, rows_per_token, n] */
    const float *weight; /* [n] or NULL */
    float *y;            /* [n_tokens, rows_per_token, n] */
    int32_t n;
    int32_t rows_per_token;
    float eps;
    bool accumulate; /* y += instead of y = */
};

/* act(gate) * up. SWIGLU_CLAMPED, of experts only:
 *   g = min(gate, SL_SWIGLU_LIMIT), u = up clamped to +-SL_SWIGLU_LIMIT,
 *   g * sigmoid(SL_SWIGLU_ALPHA * g) * (u + 1) */
enum sl_activation { SL_ACT_NONE, SL_ACT_SILU, SL_ACT_GELU_TANH, SL_ACT_SWIGLU_CLAMPED };
#define SL_SWIGLU_LIMIT 7.0f
#define SL_SWIGLU_ALPHA 1.702f

#define SL_LINEAR_MAX_PARTS 4

/* y_i = x W_i^T + bias_i for i < n_parts, all W_i with the same n_cols, any types.
 * With `activation` (n_parts == 2, part 0 the gate, part 1 up): y_0 = act(y_gate) * y_up; the
 * memory of y_1 is then scratch, its content undefined afterwards.
 *
 * A backend may round x: to f16 or bf16, to 8 bits in blocks of 32 where W_i is quantized, and,
 * where W_i is F16 or BF16, both sides to 14 bits of the largest of 32 activations and of 128
 * weights. */
struct sl_op_linear {
    const float *x; /* [n_tokens, n_cols] */
    int32_t n_parts;
    enum sl_activation activation;
    bool accumulate; /* y_0 += instead of y_0 =; n_parts == 1 only */
    struct {
        struct sl_matrix w;
        const float *bias; /* [n_rows] or NULL */
        float *y;          /* [n_tokens, n_rows] */
    } part[SL_LINEAR_MAX_PARTS];
};

/* Rotate the first n_rot elements of every head. Pair i turns by pos * freq[i]; the table holds
 * every scaling method (linear, Llama 3 factors, YaRN), `magnitude` scales the rotated elements
 * (YaRN's mscale). Pairs are (2i, 2i+1), or (i, i + n_rot/2) when `neox`. */
struct sl_op_rope {
    float *x;           /* [n_tokens, n_heads, head_dim], in place */
    const int32_t *pos; /* [n_tokens] */
    const float *freq;  /* [n_rot / 2] radians per position */
    int32_t n_heads;
    int32_t head_dim;
    int32_t n_rot; /* even, <= head_dim */
    float magnitude;
    bool neox;
};

/* What keys and values can be kept as, in any pair. */
#define SL_N_KV_TYPES 3
extern const enum sl_type sl_kv_type_list[SL_N_KV_TYPES]; /* F16, Q8_0, Q4_0 */

struct sl_kv_types {
    enum sl_type k, v;
};

/* The KV cache of one layer: physical blocks of SL_KV_BLOCK tokens. A block holds all keys, then
 * all values: K [n_kv_heads, SL_KV_BLOCK, head_dim], V [n_kv_heads, SL_KV_BLOCK, head_dim], packed
 * elements of their type. Token `pos` of sequence s lives at row pos % SL_KV_BLOCK of block
 * table[s * table_stride + pos / SL_KV_BLOCK]; without a table the block is pos / SL_KV_BLOCK. */
#define SL_KV_BLOCK 64
#define SL_KV_MAX_HEAD_DIM 256

/* Which blocks of a cache a backend has. */
enum sl_kv_here { SL_KV_ALL, SL_KV_FIRST, SL_KV_LATER };

struct sl_kv_view {
    void *data;
    struct sl_kv_types types;
    int32_t n_kv_heads;
    int32_t head_dim;
    const int32_t *table; /* [n_sequences, table_stride] or NULL */
    int32_t table_stride;
    /* A cache that is divided, which has no table: its first n_first blocks are at `data`, block
     * n_first + i is at `later` as block i. Of those that are not here nothing is read or written,
     * and their address does not matter. n_first 0: all blocks are at `data`. */
    int32_t n_first;
    enum sl_kv_here here;
    void *later;
};

/* The positions whose blocks are here: begin .. end - 1. */
static inline int32_t sl_kv_here_begin(const struct sl_kv_view *kv)
{
    return kv->here == SL_KV_LATER ? kv->n_first * SL_KV_BLOCK : 0;
}

static inline int32_t sl_kv_here_end(const struct sl_kv_view *kv)
{
    return kv->here == SL_KV_FIRST ? kv->n_first * SL_KV_BLOCK : INT32_MAX;
}

/* Keys of type Q4_0 are kept turned (sl_kv_turn in op/kv.h): a few large elements, as keys have
 * them, would take all steps of their block. Attention turns its queries alike, which leaves every
 * product of the two as it was. */
static inline bool sl_kv_turns_keys(struct sl_kv_types types)
{
    return types.k == SL_TYPE_Q4_0;
}

/* Store k and v of each token at its position, of those whose block is here. */
struct sl_op_kv_store {
    const float *k; /* [n_tokens, n_kv_heads, head_dim] */
    const float *v; /* the same shape */
    const int32_t *pos;
    const int32_t *seq; /* [n_tokens] or NULL: all 0 */
    struct sl_kv_view kv;
};

/* y = softmax(scale * q k^T, optional soft-cap) v over cache positions p <= pos of the token's own
 * sequence, and p > pos - window when window > 0. Query head h reads KV head
 * h / (n_heads / n_kv_heads). `n_kv_max` bounds the positions read by any token of the pass
 * (host-known: largest pos + 1, possibly rounded up).
 *
 * Of a divided cache only positions whose blocks are here count. `lse` says by what each row was
 * divided, so that SL_OP_MERGE can put both sides together. A sink counts, and must be given to one
 * side alone. A row that sees nothing is 0, its lse -INFINITY. */
struct sl_op_attention {
    const float *q; /* [n_tokens, n_heads, head_dim] */
    float *y;       /* [n_tokens, n_heads, head_dim] */
    const int32_t *pos;
    const int32_t *seq; /* or NULL */
    const float *sinks; /* [n_heads] extra logits without value, or NULL */
    float *lse;         /* [n_tokens, n_heads] logarithms of sums of exponentials, or NULL */
    struct sl_kv_view kv;
    int32_t n_heads; /* a multiple of kv.n_kv_heads */
    int32_t n_kv_max;
    int32_t window; /* 0: all earlier positions */
    float scale;
    float softcap; /* 0: none; else s = softcap * tanh(s / softcap) */
};

#define SL_MAX_EXPERTS 1024
#define SL_MAX_EXPERTS_USED 64

enum sl_gating {
    SL_GATING_SOFTMAX,        /* p = softmax over all experts */
    SL_GATING_SIGMOID,        /* p = sigmoid of each */
    SL_GATING_SOFTMAX_CHOSEN, /* choice by logits; p = softmax over the chosen ones alone */
};

/* Choose n_used experts for each token.
 *
 *   logits = x w^T + bias
 *   score  = p + selection_bias (SOFTMAX_CHOSEN: logit + selection_bias)
 *   ids    = experts of the n_used highest scores, highest first, the lower id first among equals
 *   weight = p of the expert (without selection_bias); divided by the sum over the chosen ones (at
 *            least SL_ROUTER_MIN_SUM) if `normalize`; times scale
 *
 * Whatever the numbers, NaN included, the ids of a token are distinct and in 0 .. n_experts - 1:
 * SL_OP_EXPERTS makes addresses of them. x and w are not rounded where w is F32, F16 or BF16, so
 * that the choice is the same everywhere but for ties within float rounding. `ids` and `weights`
 * stay in the backend's memory; nobody has to read them on the host. Made for two launches:
 * logits into scratch [n_tokens, n_experts] as by SL_OP_LINEAR, then the choice, a warp a token. */
#define SL_ROUTER_MIN_SUM 6.103515625e-5f
struct sl_op_router {
    const float *x;              /* [n_tokens, n_cols] */
    struct sl_matrix w;          /* n_rows: experts */
    const float *bias;           /* [n_experts] of the logits, or NULL */
    const float *selection_bias; /* [n_experts] of the choice alone, or NULL */
    int32_t *ids;                /* [n_tokens, n_used] */
    float *weights;              /* [n_tokens, n_used] */
    int32_t n_used;
    enum sl_gating gating;
    bool normalize;
    float scale;
};

/* One matrix of every expert, each as a struct sl_matrix of n_rows x n_cols. They lie one after
 * the other at `data` (as in the file's three-dimensional tensors), or where `table` says: an
 * address for each expert, in the backend's memory as the table itself is, so that the set of
 * experts that are here can change between launches of the same op. Entry NULL: not here; then it
 * is NULL for all three matrices. */
struct sl_experts_matrix {
    const void *data;         /* of expert `first` */
    const void *const *table; /* [n] entries for experts first .. first + n - 1; or NULL */
    enum sl_type type;
    int64_t n_rows;
    int64_t n_cols;
    const float *bias; /* [n, n_rows] for the same experts, always in place; or NULL */
};

/* y (+)= sum over j < n_used of weights[t, j] * down_e(act(gate_e(x_t)) * up_e(x_t)), with
 * e = ids[t, j] and biases as in SL_OP_LINEAR. Ids outside first .. first + n - 1 and experts that
 * are not here (table) are left out, so that several backends can each add their part; a token
 * without experts gets 0 (or keeps y). The ids of a token are distinct; x and y are apart.
 *
 * Which experts are used is known on the backend alone: launches must be sized by n_tokens, n_used
 * and n. The activations between may be rounded as the input of any product (to f16 or 8 bits). */
struct sl_op_experts {
    const float *x; /* [n_tokens, n_embd] */
    float *y;       /* [n_tokens, n_embd] */
    const int32_t *ids;
    const float *weights;
    int32_t n_used;
    int32_t first, n;
    struct sl_experts_matrix gate, up; /* [n_ff, n_embd] */
    struct sl_experts_matrix down;     /* [n_embd, n_ff] */
    enum sl_activation activation;     /* not NONE */
    bool accumulate;
};

/* A mixture that two backends share: the one that has some experts at hand computes those and a
 * part of the others, the other backend the rest. Of the d distinct experts that are chosen and not
 * at hand (d * share + 128) / 256 are taken too: those with the most tokens, the lower ids first
 * among equals. Bringing an expert takes this backend as long for many tokens as for one; the
 * other one computes the longer the more there are.
 *
 *   mine    = ids where the expert is taken, else -1
 *   uses[e] += number of tokens that go to expert e
 *
 * Integers only, so both backends would come to the same answer each for itself. */
#define SL_DIVIDE_ALL 256
struct sl_op_divide {
    const int32_t *ids;     /* [n_tokens, n_used] */
    const uint8_t *at_hand; /* [n_experts]: 0 or 1; NULL: nothing is divided, only counted */
    int32_t *mine;          /* [n_tokens, n_used]; not written without at_hand */
    int32_t *uses;          /* [n_experts] or NULL */
    int32_t n_used, n_experts;
    int32_t share; /* 0 .. SL_DIVIDE_ALL */
};

/* y += x, rows of n elements. */
struct sl_op_add {
    const float *x; /* [n_tokens, n] */
    float *y;       /* [n_tokens, n] */
    int64_t n;
};

/* Attention over some positions becomes attention over others, too: with a = exp(y_lse) and
 * b = exp(x_lse), y = (a y + b x) / (a + b) for each row of head_dim elements; 0 where both sides
 * have seen nothing. Method: online softmax, arXiv 1805.02867. */
struct sl_op_merge {
    const float *x;     /* [n_tokens, n_heads, head_dim] */
    const float *x_lse; /* [n_tokens, n_heads] */
    float *y;
    const float *y_lse;
    int32_t n_heads, head_dim; /* head_dim a multiple of 4 */
};

struct sl_op {
    enum sl_op_kind kind;
    int32_t n_tokens;
    union {
        struct sl_op_norm norm;
        struct sl_op_linear linear;
        struct sl_op_rope rope;
        struct sl_op_kv_store kv_store;
        struct sl_op_attention attention;
        struct sl_op_router router;
        struct sl_op_experts experts;
        struct sl_op_divide divide;
        struct sl_op_add add;
        struct sl_op_merge merge;
    };
};

const char *sl_op_kind_name(enum sl_op_kind kind);

/* Bytes of one KV block of a layer (keys and values). */
size_t sl_kv_block_bytes(struct sl_kv_types types, int32_t n_kv_heads, int32_t head_dim);
/* Place of a type in sl_kv_type_list; -1: no cache is kept so. */
int sl_kv_type_index(enum sl_type type);

/* Upper bound of the scratch a backend may use to run `op`: part of the contract, so that the
 * planner knows it from shapes alone. Pointers in `op` are not read. The sum of
 *   - linear: x rounded or packed (n_tokens padded to 64, 2.25 bytes an element),
 *   - attention: partial results of up to SL_ATTN_MAX_SPLITS KV ranges for up to
 *     SL_ATTN_SPLIT_TOKENS tokens; up to four times as many tokens have as many parts in all (more
 *     are not split),
 *   - router: logits, and x as for linear,
 *   - experts: (token, expert) pairs sorted by expert, 32 bytes a pair and an expert; x as for
 *     linear by token and once more by pair (4 bytes an element, which also holds the outputs by
 *     pair); the activations between as floats and packed by pair. If gate and up differ in type:
 *     x by pair in up's form, and up's outputs, too.
 *     Pairs are worked in chunks of sl_op_experts_chunk along the sorted list, which bounds both.
 */
#define SL_ATTN_MAX_SPLITS 64
#define SL_ATTN_SPLIT_TOKENS 16
size_t sl_op_scratch_bytes(const struct sl_op *op);

/* (token, expert) pairs whose activations are in scratch at a time: all of a small pass. */
int32_t sl_op_experts_chunk(const struct sl_op *op);

/* SL_OP_DIVIDE in host memory. */
void sl_op_divide_run(const struct sl_op_divide *op, int32_t n_tokens);

/* Check shapes, types and alignment of an op (not its addresses). INTERNAL names what is wrong. */
enum sluice_status sl_op_validate(const struct sl_op *op, struct sluice_error *err);

/* Scalar reference of every operator: plain loops, sums in double, weights through
 * sl_dequantize_row. The oracle of all kernels. Needs no scratch. */
void sl_op_run_ref(const struct sl_op *op);

#endif
