/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention of few rows over many positions (see attention.cuh): 16 rows a block, warps along the
 * positions, each streaming its own part of every tile without ever waiting for another warp.
 * Bound by memory: what counts is bytes in flight. Up to head size 128 four warps keep three of
 * four slots on their way; above, registers are short, Q moves to shared memory, and two warps
 * with two slots each leave room for more blocks.
 */
#include "device/cuda/attention.cuh"

template <int D, bool QUANTIZED>
static int launch_decode(cudaStream_t stream, sl_attn_args *args, int max_splits,
                         const struct sl_cuda_props *props)
{
    constexpr bool small = D <= 128;
    using shape = sl_attn_shape<D, 1, small ? 4 : 2, 16, small ? 4 : 2, !small, QUANTIZED>;
    return sl_attn_launch<shape>(stream, args, max_splits, props);
}

template <bool QUANTIZED>
static int launch_decode_head_dim(cudaStream_t stream, sl_attn_args *args, int max_splits,
                                  const struct sl_cuda_props *props)
{
    switch (args->head_dim) {
    case 32:
        return launch_decode<32, QUANTIZED>(stream, args, max_splits, props);
    case 64:
        return launch_decode<64, QUANTIZED>(stream, args, max_splits, props);
    case 96:
        return launch_decode<96, QUANTIZED>(stream, args, max_splits, props);
    case 128:
        return launch_decode<128, QUANTIZED>(stream, args, max_splits, props);
    case 160:
        return launch_decode<160, QUANTIZED>(stream, args, max_splits, props);
    case 192:
        return launch_decode<192, QUANTIZED>(stream, args, max_splits, props);
    case 224:
        return launch_decode<224, QUANTIZED>(stream, args, max_splits, props);
    case 256:
        return launch_decode<256, QUANTIZED>(stream, args, max_splits, props);
    default:
        return SL_CUDA_UNSUPPORTED;
    }
}

int sl_cuda_attention_decode(cudaStream_t stream, sl_attn_args *args, bool quantized,
                             int max_splits, const struct sl_cuda_props *props)
{
    return quantized ? launch_decode_head_dim<true>(stream, args, max_splits, props)
                     : launch_decode_head_dim<false>(stream, args, max_splits, props);
}
