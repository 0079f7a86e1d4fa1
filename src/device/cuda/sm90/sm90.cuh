/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernels for compute capability 9.0 alone, as the others see them. They are compiled for that
 * target only (sm_90a) and stand in for linear_gemm there: `args` is the same, with tiles of
 * SL_SM90_ROWS rows.
 *
 * A block asks for all of the multiprocessor's memory, past the bound that all other kernels keep
 * (SL_CUDA_MAX_SHARED_BYTES), so that a host may tell the device to do without them.
 */
#ifndef SL_DEVICE_CUDA_SM90_SM90_CUH
#define SL_DEVICE_CUDA_SM90_SM90_CUH

#include "device/cuda/cuda_ops.h"
#include "device/cuda/experts.cuh"
#include "device/cuda/linear_pack.cuh"

#define SL_SM90_ROWS 128
#define SL_SM90_TOKENS 256 /* of a tile, or half of it */

/* Shared memory of a block: the ring of slots and its barriers. */
#define SL_SM90_SLOTS_BYTES (192 * 1024)
#define SL_SM90_SHARED_BYTES (SL_SM90_SLOTS_BYTES + 128)

/* A launch with more shared memory than SL_LAUNCH allows. */
#define SL_SM90_LAUNCH(kernel, grid, block, shared, stream, ...)                                   \
    sl_launch((const void *)kernel, shared, SIZE_MAX,                                              \
              [&]() { kernel<<<grid, block, shared, stream>>>(__VA_ARGS__); })

/* Packed types go through the depth by this many columns: x has zeros in those that a row lacks. */
#define SL_SM90_PACKED_COLS 128

/* The order in which the columns of x have to come for weights of a type. */
static inline constexpr int sl_sm90_order(int type)
{
    return type == SL_TYPE_F16 || type == SL_TYPE_BF16 ? SL_ORDER_PLAIN
           : type == SL_TYPE_Q6_K                      ? SL_ORDER_FAR
           : type == SL_TYPE_Q2_K || type == SL_TYPE_Q3_K || type == SL_TYPE_Q4_K ||
                   type == SL_TYPE_Q5_K
               ? SL_ORDER_SUPER
               : SL_ORDER_UNITS;
}

/* Whether the GPU is one of these, and they are allowed. */
static inline bool sl_is_sm90(const struct sl_cuda_props *props)
{
    return !props->portable && props->compute_capability == 90 &&
           props->shared_per_sm_bytes > SL_SM90_SHARED_BYTES;
}

/* By type. */
int sl_linear_sm90_f(cudaStream_t stream, int type, const struct sl_linear_args *args,
                     const struct sl_cuda_props *props);
int sl_linear_sm90_q(cudaStream_t stream, int type, const struct sl_linear_args *args,
                     const struct sl_cuda_props *props);
int sl_linear_sm90_k(cudaStream_t stream, int type, const struct sl_linear_args *args,
                     const struct sl_cuda_props *props);

/* Products of experts by tiles of SL_SM90_TOKENS / 2 pairs. x lies there as f16 by position,
 * [end - begin, n_cols], then the rows' scales. */
int sl_experts_sm90_q(cudaStream_t stream, int type, const struct sl_experts_args *args,
                      const struct sl_cuda_props *props);
int sl_experts_sm90_k(cudaStream_t stream, int type, const struct sl_experts_args *args,
                      const struct sl_cuda_props *props);

#endif
