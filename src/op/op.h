/* SPDX-License-Identifier: Apache-2.0
 *
 * The operators. A shard's computation is a short list of `struct sl_op`, made by the model part
 * and run by a backend: the CPU (src/cpu), the sim device or the CUDA device. All addresses in an
 * op belong to the memory of the backend that runs it. Activations are float32, row-major, one row
 * a token; weights keep the bytes of the file.
 *
 * Everything residual is an accumulation (`accumulate`), and gate/up products carry their
 * activation, so five operators make a dense transformer.
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
    SL_OP_N_KINDS,
};

/* A matrix [n_rows, n_cols] in file layout: rows of n_cols packed elements, row after row. */
struct sl_matrix {
    const void *data;
    enum sl_type type;
    int64_t n_rows; /* outputs */
    int64_t n_cols; /* inputs; a multiple of the type's block size */
};

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

enum sl_activation { SL_ACT_NONE, SL_ACT_SILU, SL_ACT_GELU_TANH };

#define SL_LINEAR_MAX_PARTS 4

/* y_i = x W_i^T + bias_i for i < n_parts, all W_i with the same n_cols, any types.
 * With `activation` (n_parts == 2, part 0 the gate, part 1 up): y_0 = act(y_gate) * y_up; the
 * memory of y_1 is then scratch, its content undefined afterwards. */
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

/* The KV cache of one layer: physical blocks of SL_KV_BLOCK tokens. A block holds all keys, then
 * all values: K [n_kv_heads, SL_KV_BLOCK, head_dim], V [n_kv_heads, SL_KV_BLOCK, head_dim], packed
 * elements of `type`. Token `pos` of sequence s lives at row pos % SL_KV_BLOCK of block
 * table[s * table_stride + pos / SL_KV_BLOCK]; without a table the block is pos / SL_KV_BLOCK. */
#define SL_KV_BLOCK 64

struct sl_kv_view {
    void *data;
    enum sl_type type; /* F16 (Q8_0 and Q4_0 to come) */
    int32_t n_kv_heads;
    int32_t head_dim;
    const int32_t *table; /* [n_sequences, table_stride] or NULL */
    int32_t table_stride;
};

/* Store k and v of each token at its position. */
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
 * (host-known: largest pos + 1, possibly rounded up). */
struct sl_op_attention {
    const float *q; /* [n_tokens, n_heads, head_dim] */
    float *y;       /* [n_tokens, n_heads, head_dim] */
    const int32_t *pos;
    const int32_t *seq; /* or NULL */
    const float *sinks; /* [n_heads] extra logits without value, or NULL */
    struct sl_kv_view kv;
    int32_t n_heads; /* a multiple of kv.n_kv_heads */
    int32_t n_kv_max;
    int32_t window; /* 0: all earlier positions */
    float scale;
    float softcap; /* 0: none; else s = softcap * tanh(s / softcap) */
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
    };
};

const char *sl_op_kind_name(enum sl_op_kind kind);

/* Bytes of one KV block of a layer (keys and values). */
size_t sl_kv_block_bytes(enum sl_type type, int32_t n_kv_heads, int32_t head_dim);

/* Upper bound of the scratch a backend may use to run `op`: part of the contract, so that the
 * planner knows it from shapes alone. Pointers in `op` are not read. The sum of
 *   - linear: x rounded to f16 or packed to 8-bit blocks (n_tokens padded to 64, 2.25 bytes an
 *     element),
 *   - attention: partial results of up to SL_ATTN_MAX_SPLITS KV ranges for up to
 *     SL_ATTN_SPLIT_TOKENS tokens (more tokens are not split). */
#define SL_ATTN_MAX_SPLITS 64
#define SL_ATTN_SPLIT_TOKENS 16
size_t sl_op_scratch_bytes(const struct sl_op *op);

/* Check shapes, types and alignment of an op (not its addresses). INTERNAL names what is wrong. */
enum sluice_status sl_op_validate(const struct sl_op *op, struct sluice_error *err);

/* Scalar reference of every operator: plain loops, sums in double, weights through
 * sl_dequantize_row. The oracle of all kernels. Needs no scratch. */
void sl_op_run_ref(const struct sl_op *op);

#endif
