/* SPDX-License-Identifier: Apache-2.0
 *
 * F32, F16 and BF16 weights in the vector kernels, one token, in float throughout: a unit is 16
 * bytes. Rows are 16-byte aligned and whole units.
 */
#ifndef SL_DEVICE_CUDA_LINEAR_VEC_FLOAT_CUH
#define SL_DEVICE_CUDA_LINEAR_VEC_FLOAT_CUH

#include "device/cuda/linear_vec_stream.cuh"
#include "device/cuda/linear_vecf.cuh"

template <int TYPE> struct sl_vec_floats {
    static constexpr int tokens = 1;
    static constexpr int n = 4;
    static constexpr int items = TYPE == SL_TYPE_F32 ? 4 : 8;
    static constexpr int per_block = 1, block_bytes = 16;
    static constexpr bool reads_past = false;
    static constexpr int max_piece = 4;
    static constexpr int max_warps = 28;

    struct lane {
    };
    template <int P> struct x_piece {
        float v[P][items];
    };

    SL_DEV_MEMBER static lane make_lane()
    {
        return lane();
    }

    SL_DEV_MEMBER static void load(uint32_t *raw, const uint8_t *at, const uint8_t *, const lane &,
                                   const sl_mem_global &mem, bool)
    {
        sl_load_words<4, 16>(raw, at, mem);
    }

    template <int P>
    SL_DEV_MEMBER static void take_x(x_piece<P> &x, const uint8_t *shared, int n_cols, int unit,
                                     const lane &)
    {
#pragma unroll
        for (int k = 0; k < P; k++) {
#pragma unroll
            for (int i = 0; i < items; i += 4) {
                const int at = sl_vec_float_at(n_cols, (unit + 32 * k) * items + i);
                const float4 v = *(const float4 *)((const float *)shared + at);
                x.v[k][i] = v.x, x.v[k][i + 1] = v.y, x.v[k][i + 2] = v.z, x.v[k][i + 3] = v.w;
            }
        }
    }

    template <int P>
    SL_DEV_MEMBER static void dot(const uint32_t *raw, const uint8_t *, const lane &,
                                  const x_piece<P> &x, int k, float v[1])
    {
        float w[items];
        sl_vecf_unpack<TYPE>(make_uint4(raw[0], raw[1], raw[2], raw[3]), w);
        v[0] = w[0] * x.v[k][0];
#pragma unroll
        for (int i = 1; i < items; i++) {
            v[0] += w[i] * x.v[k][i];
        }
    }
};

#endif
