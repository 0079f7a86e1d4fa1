/* SPDX-License-Identifier: Apache-2.0
 *
 * Products of experts on compute capability 9.0; see gemm_sm90.cuh. Weights are loaded by those who
 * unpack them, so that the addresses of experts need not be known on the host.
 */
#ifndef SL_DEVICE_CUDA_SM90_EXPERTS_SM90_CUH
#define SL_DEVICE_CUDA_SM90_EXPERTS_SM90_CUH

#include "device/cuda/sm90/gemm_sm90.cuh"

#define SL_SM90_EXPERTS_TOKENS (SL_SM90_TOKENS / 2)

struct sl_sm90_experts {
    struct sl_sm90_maps maps;
    struct sl_experts_args g;
    int32_t n_row_pairs;
};

/* Row tiles are the fast index: clusters that run at the same time share x. */
struct sl_sm90_experts_source {
    const struct sl_sm90_experts &k;

    SL_DEV_MEMBER int n_items(void) const
    {
        return k.n_row_pairs * k.g.most;
    }

    SL_DEV_MEMBER const sl_linear_args *bind(int i, int rank, sl_linear_args &a,
                                             sl_sm90_tile &tile) const
    {
        const bool gated = k.g.activation != SL_ACT_NONE;
        sl_experts_tile pairs;
        if (!sl_experts_find(k.g.order, k.g.begin, k.g.end, i / k.n_row_pairs, pairs)) {
            return NULL;
        }
        sl_experts_fill(k.g, pairs, a);
        tile.part = 0;
        tile.row0 = (i % k.n_row_pairs * 2 + rank) * (gated ? SL_SM90_ROWS / 2 : SL_SM90_ROWS);
        tile.token0 = 0;
        tile.n_tokens = pairs.n;
        tile.x_row = pairs.first - k.g.begin;
        return &a;
    }

    SL_DEV_MEMBER const float *scales(const sl_sm90_tile &tile) const
    {
        const int64_t n_rows = k.g.end - k.g.begin;
        return (const float *)(k.g.xs + n_rows * k.g.n_cols * 2) + tile.x_row;
    }
};

template <class W>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(SL_SM90_THREADS, 1)
    sl_sm90_experts_kernel(SL_KERNEL_ARG struct sl_sm90_experts k)
{
    const sl_sm90_experts_source source = {k};
    sl_sm90_work<W, SL_SM90_EXPERTS_TOKENS>(source, k.maps, k.g.activation != SL_ACT_NONE,
                                            k.g.n_cols);
}

template <class W>
static int sl_sm90_launch_experts(cudaStream_t stream, const struct sl_experts_args *args,
                                  const struct sl_cuda_props *props)
{
    static_assert(W::tile_bytes == 0, "tensor copies want addresses on the host");
    struct sl_sm90_experts k;
    k.g = *args;
    k.n_row_pairs = (args->n_tiles + 1) / 2;
    const int failed = sl_tensor_map_rows(&k.maps.x, args->xs, args->end - args->begin,
                                          args->n_cols, SL_SM90_BOX_TOKENS);
    if (failed) {
        return failed;
    }
    const unsigned blocks = sl_sm90_blocks((int64_t)k.n_row_pairs * args->most, props);
    return SL_SM90_LAUNCH((sl_sm90_experts_kernel<W>), dim3(blocks), dim3(SL_SM90_THREADS),
                          (size_t)SL_SM90_SHARED_BYTES, stream, k);
}

#endif
