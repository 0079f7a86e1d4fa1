/* SPDX-License-Identifier: Apache-2.0
 *
 * Rotary position embedding, in place, over x [n_tokens, n_heads, head_dim].
 *
 * A thread owns one pair of a token and walks a few heads with the same sine and cosine: the angle
 * depends on token and pair alone. Block (32, 8): x runs over pairs, y over groups of heads, so
 * that a warp reads consecutive elements. grid = (pairs, head groups, tokens).
 *
 * Positions go to hundreds of thousands, where pos * freq rounded to float is off by 0.01 rad. The
 * product's rounding error is therefore kept (one fused multiply-add) and put back, to second
 * order.
 */
#include "device/cuda/common.cuh"

#define PAIRS 32
#define GROUPS 8
#define GROUP_HEADS 4 /* heads that a thread rotates */

struct rope_args {
    float *x;
    const int32_t *pos;
    const float *freq;
    int n_tokens;
    int n_heads;
    int head_dim;
    int half; /* n_rot / 2 */
    float magnitude;
};

/* Sine and cosine of pos * freq; the position is exact in float below 2^24. */
static __device__ __forceinline__ void angle(int pos, float freq, float *s, float *c)
{
    const float p = (float)pos;
    const float high = p * freq;
    const float low = fmaf(p, freq, -high);
    float s0, c0;
    sincosf(high, &s0, &c0);
    *s = fmaf(fmaf(-0.5f * low, s0, c0), low, s0);
    *c = fmaf(fmaf(-0.5f * low, c0, -s0), low, c0);
}

template <bool NEOX>
static __global__ void __launch_bounds__(PAIRS *GROUPS) rope_kernel(const rope_args a)
{
    const int pair = blockIdx.x * PAIRS + threadIdx.x;
    const int first_head = (blockIdx.y * GROUPS + threadIdx.y) * GROUP_HEADS;
    if (pair >= a.half || first_head >= a.n_heads) {
        return;
    }
    const float freq = a.freq[pair];
    const int end_head = min(first_head + GROUP_HEADS, a.n_heads);
    for (int token = blockIdx.z; token < a.n_tokens; token += gridDim.z) {
        float s, c;
        angle(a.pos[token], freq, &s, &c);
        s *= a.magnitude;
        c *= a.magnitude;
        float *row = a.x + ((int64_t)token * a.n_heads + first_head) * a.head_dim;
        for (int head = first_head; head < end_head; head++, row += a.head_dim) {
            if constexpr (NEOX) {
                const float v0 = row[pair];
                const float v1 = row[pair + a.half];
                row[pair] = v0 * c - v1 * s;
                row[pair + a.half] = v0 * s + v1 * c;
            } else {
                /* An odd head size or a tensor at an odd place forbids 8-byte accesses. */
                const float v0 = row[2 * pair];
                const float v1 = row[2 * pair + 1];
                row[2 * pair] = v0 * c - v1 * s;
                row[2 * pair + 1] = v0 * s + v1 * c;
            }
        }
    }
}

extern "C" int sl_cuda_rope(cudaStream_t stream, const struct sl_op *op,
                            const struct sl_cuda_props *props)
{
    (void)props;
    const struct sl_op_rope *p = &op->rope;
    const rope_args a = {p->x,       p->pos,      p->freq,      op->n_tokens,
                         p->n_heads, p->head_dim, p->n_rot / 2, p->magnitude};
    const int64_t groups = sl_div_up(p->n_heads, GROUP_HEADS * GROUPS);
    if (groups > 65535) {
        return SL_CUDA_UNSUPPORTED;
    }
    const dim3 grid((unsigned)sl_div_up(a.half, PAIRS), (unsigned)groups,
                    (unsigned)min(op->n_tokens, 65535));
    const dim3 block(PAIRS, GROUPS);
    if (p->neox) {
        SL_QUEUE(rope_kernel<true>, grid, block, 0, stream, a);
    } else {
        SL_QUEUE(rope_kernel<false>, grid, block, 0, stream, a);
    }
    return sl_launch_result();
}
