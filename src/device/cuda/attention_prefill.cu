/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention of many rows (see attention.cuh): 64 rows a block, four warps that share every tile of
 * keys and values. Up to head size 128 a tile is one block of the cache (64 positions) and Q stays
 * in registers; above, a tile is half a block and Q lies in shared memory, because the accumulators
 * alone take half of the registers.
 */
#include "device/cuda/attention.cuh"

template <int D, enum sl_attn_cache CACHE>
static int launch_prefill(cudaStream_t stream, sl_attn_args *args, int max_splits,
                          const struct sl_cuda_props *props)
{
    constexpr bool small = D <= 128;
    constexpr int rows = small ? 64 : CACHE == SL_ATTN_F16 ? 32 : 16; /* what fits into sm_75 */
    using shape = sl_attn_shape<D, 4, 1, rows, 2, !small, CACHE>;
    return sl_attn_launch<shape>(stream, args, max_splits, props);
}

template <enum sl_attn_cache CACHE>
static int launch_prefill_head_dim(cudaStream_t stream, sl_attn_args *args, int max_splits,
                                   const struct sl_cuda_props *props)
{
    switch (args->head_dim) {
    case 32:
        return launch_prefill<32, CACHE>(stream, args, max_splits, props);
    case 64:
        return launch_prefill<64, CACHE>(stream, args, max_splits, props);
    case 96:
        return launch_prefill<96, CACHE>(stream, args, max_splits, props);
    case 128:
        return launch_prefill<128, CACHE>(stream, args, max_splits, props);
    case 160:
        return launch_prefill<160, CACHE>(stream, args, max_splits, props);
    case 192:
        return launch_prefill<192, CACHE>(stream, args, max_splits, props);
    case 224:
        return launch_prefill<224, CACHE>(stream, args, max_splits, props);
    case 256:
        return launch_prefill<256, CACHE>(stream, args, max_splits, props);
    default:
        return SL_CUDA_UNSUPPORTED;
    }
}

int sl_cuda_attention_prefill(cudaStream_t stream, sl_attn_args *args, int max_splits,
                              const struct sl_cuda_props *props)
{
    const bool keys = args->kv_type[0] != SL_TYPE_F16, values = args->kv_type[1] != SL_TYPE_F16;
    if (!keys && !values) {
        return launch_prefill_head_dim<SL_ATTN_F16>(stream, args, max_splits, props);
    }
    return keys && values ? launch_prefill_head_dim<SL_ATTN_PACKED>(stream, args, max_splits, props)
                          : launch_prefill_head_dim<SL_ATTN_MIXED>(stream, args, max_splits, props);
}
