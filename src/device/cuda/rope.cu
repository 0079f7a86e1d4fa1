/* SPDX-License-Identifier: Apache-2.0
 *
 * Rotary position embedding, in place, over x [n_tokens, n_heads, head_dim].
 *
 * A thread owns one pair of a token and walks a few heads with the same sine and cosine: the angle
 * depends on token and pair alone. Block (32, 8): x runs over pairs, y over groups of heads, so
 * that a warp reads consecutive elements. grid = (pairs, head groups, tokens).
 */
#include "device/cuda/common.cuh"
#include "device/cuda/launch.cuh"
#include "device/cuda/rope.cuh"

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

template <bool NEOX>
static __global__ void __launch_bounds__(PAIRS *GROUPS) rope_kernel(const rope_args a)
{
    sl_let_follow();
    sl_await_ahead();
    const int pair = blockIdx.x * PAIRS + threadIdx.x;
    const int first_head = (blockIdx.y * GROUPS + threadIdx.y) * GROUP_HEADS;
    if (pair >= a.half || first_head >= a.n_heads) {
        return;
    }
    const float freq = a.freq[pair];
    const int end_head = min(first_head + GROUP_HEADS, a.n_heads);
    for (int token = blockIdx.z; token < a.n_tokens; token += gridDim.z) {
        float s, c;
        sl_rope_angle(a.pos[token], freq, &s, &c);
        s *= a.magnitude;
        c *= a.magnitude;
        float *row = a.x + ((int64_t)token * a.n_heads + first_head) * a.head_dim;
        for (int head = first_head; head < end_head; head++, row += a.head_dim) {
            /* An odd head size or a tensor at an odd place forbids 8-byte accesses. */
            sl_rope_turn(NEOX ? row + pair : row + 2 * pair, NEOX ? a.half : 1, s, c);
        }
    }
}

extern "C" int sl_cuda_rope(cudaStream_t stream, const struct sl_op *op,
                            const struct sl_cuda_props *props)
{
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
    return p->neox ? SL_FOLLOW(rope_kernel<true>, grid, block, 0, stream, props, a)
                   : SL_FOLLOW(rope_kernel<false>, grid, block, 0, stream, props, a);
}
