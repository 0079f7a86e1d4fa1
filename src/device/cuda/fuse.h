/* SPDX-License-Identifier: Apache-2.0
 *
 * Launchers of several operators at once (see fuse.c), beside those of cuda_ops.h, and what each of
 * them takes. Results are theirs; scratch is that of the last operator.
 */
#ifndef SL_DEVICE_CUDA_FUSE_H
#define SL_DEVICE_CUDA_FUSE_H

#include <stdbool.h>

#include "device/cuda/cuda_ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Products and the norm that makes their x: `norm` (or NULL) is done on the way, its output written
 * too. No output may lie where the norm's input or output does. */
bool sl_cuda_linear_takes_norm(const struct sl_op *op, const struct sl_cuda_props *props);
int sl_cuda_linear_normed(cudaStream_t stream, const struct sl_op *op,
                          const struct sl_op_norm *norm, void *scratch, size_t scratch_bytes,
                          const struct sl_cuda_props *props);

/* The same for a router. */
bool sl_cuda_router_takes_norm(const struct sl_op *op);
int sl_cuda_router_normed(cudaStream_t stream, const struct sl_op *op,
                          const struct sl_op_norm *norm, void *scratch, size_t scratch_bytes,
                          const struct sl_cuda_props *props);

/* Norms of heads, rotary embeddings of q and k and the store of k and v: how many of the operators
 * at `ops` these are (0: they are something else), and the launch of that many. */
int sl_cuda_heads_fused(const struct sl_op *ops, int n_ops);
int sl_cuda_heads(cudaStream_t stream, const struct sl_op *ops, int n_ops,
                  const struct sl_cuda_props *props);

#ifdef __cplusplus
}
#endif
#endif
