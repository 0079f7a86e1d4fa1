/* SPDX-License-Identifier: Apache-2.0
 *
 * Addresses in the KV cache (struct sl_kv_view in op/op.h) on the device, in bytes:
 *
 *   block: | K head 0: 64 rows | K head 1 | ... | V head 0: 64 rows | V head 1 | ... |
 *
 * Of a divided cache the blocks from n_first on lie elsewhere. An undivided one has no such block,
 * so that the same comparison, once for each tile or row, serves both.
 */
#ifndef SL_DEVICE_CUDA_KV_CUH
#define SL_DEVICE_CUDA_KV_CUH

#include "device/cuda/common.cuh"
#include "op/kv.h"

/* A view with its sizes worked out, passed to kernels by value. */
struct sl_cuda_kv {
    char *data;
    char *later; /* blocks from n_first on */
    const int32_t *table;
    int64_t block_bytes;
    int64_t values_offset; /* of the values in a block */
    int32_t row_bytes[2];  /* keys, values */
    int32_t table_stride;
    int32_t n_kv_heads;
    int32_t n_first;
    int32_t here_begin, here_end; /* positions whose blocks are here: begin .. end - 1 */
};

static inline int32_t sl_cuda_kv_row_bytes(enum sl_type type, int32_t head_dim)
{
    switch (type) {
    case SL_TYPE_Q8_0:
        return head_dim / 32 * 34;
    case SL_TYPE_Q4_0:
        return head_dim / 32 * 18;
    default:
        return head_dim * 2;
    }
}

static inline sl_cuda_kv sl_cuda_kv_make(const struct sl_kv_view *view)
{
    sl_cuda_kv kv;
    /* An address that is good for either part, though nothing of it be read. */
    kv.data = (char *)(view->here == SL_KV_LATER ? view->later : view->data);
    kv.later = (char *)(view->n_first == 0 || view->here == SL_KV_FIRST ? view->data : view->later);
    kv.table = view->table;
    kv.row_bytes[0] = sl_cuda_kv_row_bytes(view->types.k, view->head_dim);
    kv.row_bytes[1] = sl_cuda_kv_row_bytes(view->types.v, view->head_dim);
    const int64_t n_rows = (int64_t)view->n_kv_heads * SL_KV_BLOCK; /* of keys in a block */
    kv.values_offset = n_rows * kv.row_bytes[0];
    kv.block_bytes = kv.values_offset + n_rows * kv.row_bytes[1];
    kv.table_stride = view->table_stride;
    kv.n_kv_heads = view->n_kv_heads;
    kv.n_first = view->n_first > 0 ? view->n_first : INT32_MAX;
    kv.here_begin = sl_kv_here_begin(view);
    kv.here_end = sl_kv_here_end(view);
    return kv;
}

/* Whether all blocks that are here lie at multiples of `bytes`. */
static inline bool sl_cuda_kv_is_aligned(const sl_cuda_kv *kv, size_t bytes)
{
    return sl_is_aligned(kv->data, bytes) && sl_is_aligned(kv->later, bytes);
}

static __device__ __forceinline__ bool sl_cuda_kv_is_here(const sl_cuda_kv &kv, int32_t pos)
{
    return pos >= kv.here_begin && pos < kv.here_end;
}

/* Physical block of the `index`-th block of a sequence. */
static __device__ __forceinline__ int32_t sl_cuda_kv_block(const sl_cuda_kv &kv, int32_t seq,
                                                           int32_t index)
{
    return kv.table != nullptr ? kv.table[(int64_t)seq * kv.table_stride + index] : index;
}

/* Row `row` of a head in a physical block; side: 0 keys, 1 values. */
static __device__ __forceinline__ char *sl_cuda_kv_row(const sl_cuda_kv &kv, int32_t block,
                                                       int side, int32_t head, int32_t row)
{
    const bool later = block >= kv.n_first;
    const int64_t first =
        (later ? block - kv.n_first : block) * kv.block_bytes + (side != 0 ? kv.values_offset : 0);
    return (later ? kv.later : kv.data) + first +
           (int64_t)(head * SL_KV_BLOCK + row) * kv.row_bytes[side];
}

#endif
