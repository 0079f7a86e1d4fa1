/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention of many rows (see attention.cuh): 64 rows a block, four warps that share every tile of
 * keys and values. Up to head size 128 a tile is one block of the cache (64 positions) and Q stays
 * in registers; above, a tile is half a block and Q lies in shared memory, because the accumulators
 * alone take half of the registers.
 */
#include "device/cuda/attention.cuh"

template <int D, bool QUANTIZED>
static int launch_prefill(cudaStream_t stream, sl_attn_args *args, int max_splits,
                          const struct sl_cuda_props *props)
{
    constexpr bool small = D <= 128;
    using shape = sl_attn_shape<D, 4, 1, small ? 64 : 32, 2, !small, QUANTIZED>;
    return sl_attn_launch<shape>(stream, args, max_splits, props);
}

template <bool QUANTIZED>
static int launch_prefill_head_dim(cudaStream_t stream, sl_attn_args *args, int max_splits,
                                   const struct sl_cuda_props *props)
{
    switch (args->head_dim) {
    case 32:
        return launch_prefill<32, QUANTIZED>(stream, args, max_splits, props);
    case 64:
        return launch_prefill<64, QUANTIZED>(stream, args, max_splits, props);
    case 96:
        return launch_prefill<96, QUANTIZED>(stream, args, max_splits, props);
    case 128:
        return launch_prefill<128, QUANTIZED>(stream, args, max_splits, props);
    case 160:
        return launch_prefill<160, QUANTIZED>(stream, args, max_splits, props);
    case 192:
        return launch_prefill<192, QUANTIZED>(stream, args, max_splits, props);
    case 224:
        return launch_prefill<224, QUANTIZED>(stream, args, max_splits, props);
    case 256:
        return launch_prefill<256, QUANTIZED>(stream, args, max_splits, props);
    default:
        return SL_CUDA_UNSUPPORTED;
    }
}

int sl_cuda_attention_prefill(cudaStream_t stream, sl_attn_args *args, bool quantized,
                              int max_splits, const struct sl_cuda_props *props)
{
    return quantized ? launch_prefill_head_dim<true>(stream, args, max_splits, props)
                     : launch_prefill_head_dim<false>(stream, args, max_splits, props);
}
