/* SPDX-License-Identifier: Apache-2.0
 *
 * Packing of activations: blocks of 32 floats to int8 with a scale, the same in every kernel.
 */
#ifndef SL_DEVICE_CUDA_LINEAR_PACK_CUH
#define SL_DEVICE_CUDA_LINEAR_PACK_CUH

#include "device/cuda/linear_args.cuh"

/* Eight neighbouring lanes hold a block of 32, four elements each. Returns this lane's levels;
 * `d` is the block's scale and `sum` the sum of the levels in this lane's half (of 16). The whole
 * warp takes part. */
SL_DEV uint32_t sl_pack_levels(float4 v, float &d, float &sum)
{
    float most = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
    most = fmaxf(most, sl_shfl_xor(most, 1));
    most = fmaxf(most, sl_shfl_xor(most, 2));
    most = fmaxf(most, sl_shfl_xor(most, 4));
    /* Below this 127 / most would overflow; such a block is as good as zero. */
    const bool tiny = most < 1e-30f;
    d = tiny ? 0.0f : most / 127.0f;
    const float inverse = tiny ? 0.0f : 127.0f / most;
    /* Levels as magic sums: the low byte of the bits is the level, rounded to nearest even. */
    const float x = v.x * inverse + SL_MAGIC_F32;
    const float y = v.y * inverse + SL_MAGIC_F32;
    const float z = v.z * inverse + SL_MAGIC_F32;
    const float w = v.w * inverse + SL_MAGIC_F32;
    sum = (x - SL_MAGIC_F32) + (y - SL_MAGIC_F32) + (z - SL_MAGIC_F32) + (w - SL_MAGIC_F32);
    sum += sl_shfl_xor(sum, 1);
    sum += sl_shfl_xor(sum, 2);
    const uint32_t low = sl_bytes_pick(sl_f32_bits(x), sl_f32_bits(y), 0x0040);
    const uint32_t high = sl_bytes_pick(sl_f32_bits(z), sl_f32_bits(w), 0x0040);
    return sl_bytes_pick(low, high, 0x5410);
}

#endif
