/* SPDX-License-Identifier: Apache-2.0
 *
 * F32, F16 and BF16 weights in the vector kernels, in float throughout: a lane loads 16 bytes at a
 * time and multiplies them by floats in shared memory. Rows are 16-byte aligned and whole units.
 */
#ifndef SL_DEVICE_CUDA_LINEAR_VEC_FLOAT_CUH
#define SL_DEVICE_CUDA_LINEAR_VEC_FLOAT_CUH

#include "device/cuda/linear_vec_stream.cuh"
#include "device/cuda/linear_vecf.cuh"

template <int TYPE, int N> struct sl_vec_floats {
    static constexpr int warps = N > 1 ? 16 : 32;
    static constexpr int threads = 32 * warps;
    static constexpr int slots = N > 1 ? 4 : 6;
    static constexpr int n = 4;
    static constexpr int items = TYPE == SL_TYPE_F32 ? 4 : 8;
    static constexpr int per_block = 1, block_bytes = 16;
    static constexpr bool covers = false;

    const float *x; /* of the lane's first unit */
    int x_stride, half;

    SL_DEV_MEMBER void prepare()
    {
    }

    SL_DEV_MEMBER void set_x(const uint8_t *shared, int n_cols)
    {
        const int lane = (int)threadIdx.x & 31;
        x_stride = sl_vec_float_bytes(n_cols, 1) / 4;
        half = x_stride / 2;
        x = (const float *)shared;
        x += items == 8 ? 4 * lane : sl_vec_float_at(n_cols, 4 * lane);
    }

    SL_DEV_MEMBER void load(uint32_t *raw, const uint8_t *block, const sl_mem_global &mem,
                            bool) const
    {
        sl_load_words<4, 16>(raw, block, mem);
    }

    SL_DEV_MEMBER void add(const uint32_t *raw, const uint8_t *, int k, float sum[N]) const
    {
        float w[items];
        sl_vecf_unpack<TYPE>(make_uint4(raw[0], raw[1], raw[2], raw[3]), w);
#pragma unroll
        for (int i = 0; i < N; i++) {
            const float *at = x + i * x_stride + (items == 8 ? 128 : 64) * k;
#pragma unroll
            for (int j = 0; j < items; j += 4) {
                const float4 v = *(const float4 *)(at + (j ? half : 0));
                sum[i] += w[j] * v.x;
                sum[i] += w[j + 1] * v.y;
                sum[i] += w[j + 2] * v.z;
                sum[i] += w[j + 3] * v.w;
            }
        }
    }
};

#endif
