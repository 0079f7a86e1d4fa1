/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention: choice of the kernel. Few rows a KV head go to the decode shape, more to the prefill
 * shape; both may split the positions as far as the scratch memory reaches. Compute capability 9.0
 * has a kernel of its own for passes that fill it.
 */
#include "device/cuda/attention_args.cuh"
#ifdef SL_CUDA_SM90
#include "device/cuda/sm90/attention_sm90.h"
#endif

#define DECODE_ROWS 32 /* two row tiles of 16: above, one tile of 64 reads the cache less often */

/* How many parts per row the scratch memory holds. */
static int splits_that_fit(const sl_attn_args *a, size_t scratch_bytes)
{
    const size_t part_bytes =
        (size_t)a->n_tokens * (size_t)a->n_heads * ((size_t)a->head_dim + 2) * sizeof(float);
    const size_t n = scratch_bytes / part_bytes;
    return n < SL_ATTN_MAX_SPLITS ? (int)n : SL_ATTN_MAX_SPLITS;
}

static sl_attn_args make_args(const struct sl_op *op)
{
    const struct sl_op_attention *p = &op->attention;
    sl_attn_args a = {};
    a.q = p->q;
    a.y = p->y;
    a.pos = p->pos;
    a.seq = p->seq;
    a.sinks = p->sinks;
    a.lse = p->lse;
    a.kv = sl_cuda_kv_make(&p->kv);
    a.n_tokens = op->n_tokens;
    a.n_heads = p->n_heads;
    a.head_dim = p->kv.head_dim;
    a.group = p->n_heads / p->kv.n_kv_heads;
    a.n_kv_max = p->n_kv_max < a.kv.here_end ? p->n_kv_max : a.kv.here_end;
    a.window = p->window;
    a.n_splits = 1;
    a.q_scale = p->softcap > 0.0f ? p->scale / p->softcap : p->scale * SL_LOG2E;
    a.cap_log2 = p->softcap * SL_LOG2E;
    a.kv_type[0] = p->kv.types.k;
    a.kv_type[1] = p->kv.types.v;
    return a;
}

extern "C" int sl_cuda_attention(cudaStream_t stream, const struct sl_op *op, void *scratch,
                                 size_t scratch_bytes, const struct sl_cuda_props *props)
{
    sl_attn_args a = make_args(op);
    if (!sl_is_aligned(a.q, 16) || !sl_is_aligned(a.y, 16) || !sl_cuda_kv_is_aligned(&a.kv, 16)) {
        return SL_CUDA_UNSUPPORTED;
    }
#ifdef SL_CUDA_SM90
    if (sl_attention_sm90_takes(&a, props)) {
        return sl_cuda_attention_sm90(stream, &a);
    }
#endif
    const int max_splits =
        scratch != nullptr && sl_is_aligned(scratch, 16) ? splits_that_fit(&a, scratch_bytes) : 1;
    if (max_splits > 1) {
        /* Values of all parts first, then the pairs; both sized for the most parts. */
        const size_t n_rows = (size_t)a.n_tokens * (size_t)a.n_heads;
        a.part_values = (float *)scratch;
        a.part_max_sum = (float2 *)(a.part_values + max_splits * n_rows * (size_t)a.head_dim);
    }
    const int64_t n_rows_per_kv_head = (int64_t)a.n_tokens * a.group;
    const int result = n_rows_per_kv_head <= DECODE_ROWS
                           ? sl_cuda_attention_decode(stream, &a, max_splits, props)
                           : sl_cuda_attention_prefill(stream, &a, max_splits, props);
    if (result != 0 || a.n_splits == 1) {
        return result;
    }
    return sl_cuda_attention_merge(stream, &a, props);
}
