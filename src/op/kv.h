/* SPDX-License-Identifier: Apache-2.0
 *
 * Addresses inside a KV cache view (see struct sl_kv_view in op/op.h for the layout):
 *
 *   block b:  | K head 0: 64 rows | K head 1 | ... | V head 0: 64 rows | V head 1 | ... |
 */
#ifndef SL_OP_KV_H
#define SL_OP_KV_H

#include "op/op.h"

/* First byte of the block that holds position `pos` of a sequence. */
static inline char *sl_kv_block(const struct sl_kv_view *kv, int32_t seq, int32_t pos)
{
    const int32_t index = pos / SL_KV_BLOCK;
    const int32_t block =
        kv->table != NULL ? kv->table[(int64_t)seq * kv->table_stride + index] : index;
    const size_t bytes = sl_kv_block_bytes(kv->types, kv->n_kv_heads, kv->head_dim);
    if (kv->n_first > 0 && block >= kv->n_first) {
        return (char *)kv->later + (size_t)(block - kv->n_first) * bytes;
    }
    return (char *)kv->data + (size_t)block * bytes;
}

static inline bool sl_kv_is_here(const struct sl_kv_view *kv, int32_t pos)
{
    return pos >= sl_kv_here_begin(kv) && pos < sl_kv_here_end(kv);
}

#define SL_KV_TURN 32 /* elements that are turned together: a block of Q4_0 */
#define SL_KV_TURN_SCALE 0.17677669529663687f /* 2^-2.5 */

/* Turn a row of n elements, a multiple of SL_KV_TURN, in place: each block by the orthonormal
 * Hadamard matrix, which is its own inverse. Everyone adds in this order, so that caches are the
 * same to the bit. */
static inline void sl_kv_turn(float *row, int32_t n)
{
    for (float *x = row; x < row + n; x += SL_KV_TURN) {
        for (int step = 1; step < SL_KV_TURN; step *= 2) {
            for (int i = 0; i < SL_KV_TURN; i += 2 * step) {
                for (int j = i; j < i + step; j++) {
                    const float a = x[j], b = x[j + step];
                    x[j] = a + b;
                    x[j + step] = a - b;
                }
            }
        }
        for (int i = 0; i < SL_KV_TURN; i++) {
            x[i] *= SL_KV_TURN_SCALE;
        }
    }
}

/* The packed key of (seq, pos) for one KV head: a row of head_dim elements. */
static inline void *sl_kv_key(const struct sl_kv_view *kv, int32_t seq, int32_t pos, int32_t head)
{
    const size_t row_bytes = sl_type_row_bytes(kv->types.k, kv->head_dim);
    const size_t row = (size_t)head * SL_KV_BLOCK + (size_t)(pos % SL_KV_BLOCK);
    return sl_kv_block(kv, seq, pos) + row * row_bytes;
}

static inline void *sl_kv_value(const struct sl_kv_view *kv, int32_t seq, int32_t pos, int32_t head)
{
    const size_t keys_bytes =
        (size_t)kv->n_kv_heads * SL_KV_BLOCK * sl_type_row_bytes(kv->types.k, kv->head_dim);
    const size_t row_bytes = sl_type_row_bytes(kv->types.v, kv->head_dim);
    const size_t row = (size_t)head * SL_KV_BLOCK + (size_t)(pos % SL_KV_BLOCK);
    return sl_kv_block(kv, seq, pos) + keys_bytes + row * row_bytes;
}

#endif
