/* SPDX-License-Identifier: Apache-2.0
 *
 * The register side of the attention kernel: what a warp holds of its 16 rows and the steps on it
 * (S = Q K^T, soft-cap, mask, running soft-max, O += P V). Fragment layouts: mma.cuh.
 */
#ifndef SL_DEVICE_CUDA_ATTENTION_STATE_CUH
#define SL_DEVICE_CUDA_ATTENTION_STATE_CUH

#include "device/cuda/attention_feed.cuh"

/* Everything a warp holds in registers. A thread has rows g and g + 8 of its warp's 16. */
template <class S> struct sl_attn_state {
    static constexpr int KS = S::D / 16;
    uint32_t q[S::Q_SHARED ? 1 : KS][4];
    float o[S::D / 8][4];
    float s[S::NB / 8][4];
    float max[2];
    float sum[2]; /* of this thread's columns only, until the end */
    int low[2];   /* positions that the row may see: low..high */
    int high[2];
    uint32_t q_address; /* Q_SHARED: of this lane's ldmatrix row */
    int turn;           /* this lane's swizzle, the same for all its rows */

    __device__ __forceinline__ void init(void)
    {
#pragma unroll
        for (int i = 0; i < S::D / 8; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                o[i][j] = 0.0f;
            }
        }
        max[0] = max[1] = -INFINITY;
        sum[0] = sum[1] = 0.0f;
        const int in8 = threadIdx.x & 7;
        turn = S::D % 64 == 0 ? in8 : in8 >> 1;
    }

    /* s = Q K^T for the NB positions in `slot`. */
    __device__ __forceinline__ void multiply_keys(uint32_t slot)
    {
        const int lane = threadIdx.x % SL_WARP;
        /* Matrices of an x4 load: positions 0-7 at columns c, c + 8, positions 8-15 at the same. */
        const uint32_t row = slot + ((lane & 7) + ((lane >> 4) << 3)) * (S::D * 2);
        const int half = (lane >> 3) & 1;
#pragma unroll
        for (int n = 0; n < S::NB / 8; n++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                s[n][j] = 0.0f;
            }
        }
#pragma unroll
        for (int k = 0; k < KS; k++) {
            uint32_t shared_q[4];
            if constexpr (S::Q_SHARED) {
                const int q_half = lane >> 4;
                sl_ldmatrix_x4(shared_q, q_address + (((2 * k + q_half) ^ turn) << 4));
            }
            const uint32_t *a = S::Q_SHARED ? shared_q : q[S::Q_SHARED ? 0 : k];
            const uint32_t column = ((2 * k + half) ^ turn) << 4;
#pragma unroll
            for (int n = 0; n < S::NB / 16; n++) {
                uint32_t b[4];
                sl_ldmatrix_x4(b, row + n * (16 * S::D * 2) + column);
                sl_mma_f16(s[2 * n], a, b[0], b[1]);
                sl_mma_f16(s[2 * n + 1], a, b[2], b[3]);
            }
        }
    }

    /* s = cap * tanh(s): the exact form in exponentials, good to a few units of 1e-7. */
    __device__ __forceinline__ void soft_cap(float cap_log2)
    {
#pragma unroll
        for (int n = 0; n < S::NB / 8; n++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const float e = sl_exp2(s[n][j] * (2.0f * SL_LOG2E));
                s[n][j] = cap_log2 * (1.0f - __fdividef(2.0f, e + 1.0f));
            }
        }
    }

    /* Hide what a row may not see; `pos0` is the position of the first column. */
    __device__ __forceinline__ void mask(int pos0)
    {
        const int first = pos0 + 2 * ((int)threadIdx.x & 3);
#pragma unroll
        for (int n = 0; n < S::NB / 8; n++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                const int pos = first + n * 8 + (j & 1);
                const bool seen = pos >= low[j >> 1] && pos <= high[j >> 1];
                s[n][j] = seen ? s[n][j] : -INFINITY;
            }
        }
    }

    /* Move the running maxima on, rescale what is summed, and turn s into weights. */
    __device__ __forceinline__ void soft_max(void)
    {
        float base[2];
        float factor[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float most = max[r];
#pragma unroll
            for (int n = 0; n < S::NB / 8; n++) {
                most = fmaxf(most, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
            }
            most = fmaxf(most, __shfl_xor_sync(SL_ALL_LANES, most, 1));
            most = fmaxf(most, __shfl_xor_sync(SL_ALL_LANES, most, 2));
            /* A row that has seen nothing yet: any finite base makes its weights 0. */
            base[r] = most > -INFINITY ? most : 0.0f;
            factor[r] = sl_exp2(max[r] - base[r]);
            max[r] = most;
            sum[r] *= factor[r];
        }
#pragma unroll
        for (int n = 0; n < S::NB / 8; n++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                s[n][j] = sl_exp2(s[n][j] - base[j >> 1]);
                sum[j >> 1] += s[n][j];
            }
        }
        /* Mostly no maximum moves; one vote saves the rescaling. */
        if (__any_sync(SL_ALL_LANES, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
            for (int i = 0; i < S::D / 8; i++) {
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    o[i][j] *= factor[j >> 1];
                }
            }
        }
    }

    /* o += P V for the NB positions in `slot`. The C layout of two column tiles of s is the A
     * layout of one step of 16 positions. */
    __device__ __forceinline__ void multiply_values(uint32_t slot)
    {
        const int lane = threadIdx.x % SL_WARP;
        /* Matrices of an x4 load: positions 0-7 and 8-15 at column c, the same at c + 8. */
        const uint32_t row = slot + ((lane & 7) + (((lane >> 3) & 1) << 3)) * (S::D * 2);
        const int half = lane >> 4;
#pragma unroll
        for (int k = 0; k < S::NB / 16; k++) {
            const uint32_t a[4] = {sl_pack_f16(s[2 * k][0], s[2 * k][1]),
                                   sl_pack_f16(s[2 * k][2], s[2 * k][3]),
                                   sl_pack_f16(s[2 * k + 1][0], s[2 * k + 1][1]),
                                   sl_pack_f16(s[2 * k + 1][2], s[2 * k + 1][3])};
#pragma unroll
            for (int c = 0; c < S::CHUNKS; c += 2) {
                uint32_t b[4];
                sl_ldmatrix_x4_trans(b, row + k * (16 * S::D * 2) + (((c + half) ^ turn) << 4));
                sl_mma_f16(o[c], a, b[0], b[1]);
                sl_mma_f16(o[c + 1], a, b[2], b[3]);
            }
        }
    }
};

#endif
