/* SPDX-License-Identifier: Apache-2.0
 *
 * Addresses in the KV cache (struct sl_kv_view in op/op.h) on the device, in bytes:
 *
 *   block: | K head 0: 64 rows | K head 1 | ... | V head 0: 64 rows | V head 1 | ... |
 */
#ifndef SL_DEVICE_CUDA_KV_CUH
#define SL_DEVICE_CUDA_KV_CUH

#include "device/cuda/common.cuh"
#include "op/kv.h"

/* A view with its sizes worked out, passed to kernels by value. */
struct sl_cuda_kv {
    char *data;
    const int32_t *table;
    int64_t block_bytes;
    int64_t values_offset; /* of the values in a block */
    int32_t row_bytes[2];  /* keys, values */
    int32_t table_stride;
    int32_t n_kv_heads;
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
    kv.data = (char *)view->data;
    kv.table = view->table;
    kv.row_bytes[0] = sl_cuda_kv_row_bytes(view->types.k, view->head_dim);
    kv.row_bytes[1] = sl_cuda_kv_row_bytes(view->types.v, view->head_dim);
    const int64_t n_rows = (int64_t)view->n_kv_heads * SL_KV_BLOCK; /* of keys in a block */
    kv.values_offset = n_rows * kv.row_bytes[0];
    kv.block_bytes = kv.values_offset + n_rows * kv.row_bytes[1];
    kv.table_stride = view->table_stride;
    kv.n_kv_heads = view->n_kv_heads;
    return kv;
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
    const int64_t first = block * kv.block_bytes + (side != 0 ? kv.values_offset : 0);
    return kv.data + first + (int64_t)(head * SL_KV_BLOCK + row) * kv.row_bytes[side];
}

#endif
