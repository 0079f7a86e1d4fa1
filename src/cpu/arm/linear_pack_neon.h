/* SPDX-License-Identifier: Apache-2.0
 *
 * Packing of 32 activations with NEON.
 */
#ifndef SL_CPU_ARM_LINEAR_PACK_NEON_H
#define SL_CPU_ARM_LINEAR_PACK_NEON_H

#include <arm_neon.h>
#include <stdint.h>

/* Round 32 floats to bytes, the first 16 to lo and the others to hi; their sums. Returns the scale,
 * the largest magnitude / 127. */
static inline float pack_32(const float *x, int8_t *lo, int8_t *hi, int32_t sums[2])
{
    float32x4_t v[8];
    float32x4_t largest = vdupq_n_f32(0.0f);
    for (int i = 0; i < 8; i++) {
        v[i] = vld1q_f32(x + 4 * i);
        largest = vmaxq_f32(largest, vabsq_f32(v[i]));
    }
    const float max = vmaxvq_f32(largest);
    /* So small that the inverse would overflow: zeros. */
    const float inverse = max > 1e-35f ? 127.0f / max : 0.0f;
    for (int i = 0; i < 8; i += 4) {
        int16x4_t n[4];
        for (int k = 0; k < 4; k++) {
            n[k] = vqmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(v[i + k], inverse)));
        }
        const int8x16_t q =
            vcombine_s8(vqmovn_s16(vcombine_s16(n[0], n[1])), vqmovn_s16(vcombine_s16(n[2], n[3])));
        vst1q_s8(i == 0 ? lo : hi, q);
        sums[i / 4] = vaddlvq_s8(q);
    }
    return max * (1.0f / 127.0f);
}

#endif
