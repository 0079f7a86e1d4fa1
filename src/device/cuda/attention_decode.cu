/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention of few rows over many positions (see attention.cuh): 16 rows a block, warps along the
 * positions, each streaming its own part of every tile without ever waiting for another warp.
 * Bound by memory: what counts is bytes in flight. Up to head size 128 four warps keep three of
 * four slots on their way; above, registers are short, Q moves to shared memory, and two warps
 * with two slots each leave room for more blocks.
 */
#include "device/cuda/attention.cuh"

template <int D, enum sl_attn_cache CACHE>
static int launch_decode(cudaStream_t stream, sl_attn_args *args, int max_splits,
                         const struct sl_cuda_props *props)
{
    constexpr bool small = D <= 128;
    using shape = sl_attn_shape<D, 1, small ? 4 : 2, 16, small && CACHE != SL_ATTN_MIXED ? 4 : 2,
                                !small, CACHE>;
    return sl_attn_launch<shape>(stream, args, max_splits, props);
}

template <enum sl_attn_cache CACHE>
static int launch_decode_head_dim(cudaStream_t stream, sl_attn_args *args, int max_splits,
                                  const struct sl_cuda_props *props)
{
    switch (args->head_dim) {
    case 32:
        return launch_decode<32, CACHE>(stream, args, max_splits, props);
    case 64:
        return launch_decode<64, CACHE>(stream, args, max_splits, props);
    case 96:
        return launch_decode<96, CACHE>(stream, args, max_splits, props);
    case 128:
        return launch_decode<128, CACHE>(stream, args, max_splits, props);
    case 160:
        return launch_decode<160, CACHE>(stream, args, max_splits, props);
    case 192:
        return launch_decode<192, CACHE>(stream, args, max_splits, props);
    case 224:
        return launch_decode<224, CACHE>(stream, args, max_splits, props);
    case 256:
        return launch_decode<256, CACHE>(stream, args, max_splits, props);
    default:
        return SL_CUDA_UNSUPPORTED;
    }
}

int sl_cuda_attention_decode(cudaStream_t stream, sl_attn_args *args, int max_splits,
                             const struct sl_cuda_props *props)
{
    const bool keys = args->kv_type[0] != SL_TYPE_F16, values = args->kv_type[1] != SL_TYPE_F16;
    if (!keys && !values) {
        return launch_decode_head_dim<SL_ATTN_F16>(stream, args, max_splits, props);
    }
    return keys && values ? launch_decode_head_dim<SL_ATTN_PACKED>(stream, args, max_splits, props)
                          : launch_decode_head_dim<SL_ATTN_MIXED>(stream, args, max_splits, props);
}
