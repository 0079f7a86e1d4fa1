/* SPDX-License-Identifier: Apache-2.0
 *
 * The launchers of the CUDA device: one per operator, called by device.c (C) and written in
 * CUDA C (<op>.cu). A launcher only queues work on `stream`: it allocates nothing, waits for
 * nothing and reads no device memory, so that a run of operators can be captured into a graph.
 *
 * Result of a launcher: 0, a cudaError_t value (> 0) when a launch failed, or
 * SL_CUDA_UNSUPPORTED when there is no kernel for the shape or type. Shapes have passed
 * sl_op_validate; addresses are device memory, aligned as their element type at least.
 */
#ifndef SL_DEVICE_CUDA_CUDA_OPS_H
#define SL_DEVICE_CUDA_CUDA_OPS_H

#include <stddef.h>

/* Tests compile the kernels for the CPU, without the CUDA toolkit. */
#ifdef SL_CUDA_EMULATE
#include "cuda_emulate.h"
#else
#include <cuda_runtime_api.h>
#endif

#ifdef __cplusplus
extern "C" {
#endif
#include "op/op.h"
#ifdef __cplusplus
}
#endif

#ifndef SL_CUDA_EMULATE
#define SL_CUDA_UNSUPPORTED (-1)
#endif

/* Most dynamic shared memory that a kernel may ask for. Hosts that share their graphics context
 * (CUDA in Graphics) leave no more than this to a block. */
#define SL_CUDA_MAX_SHARED_BYTES (80 * 1024)

#ifndef SL_CUDA_EMULATE
/* What launchers need to know of the GPU; read once when the device is made. */
struct sl_cuda_props {
    int n_sm;                   /* multiprocessors */
    int compute_capability;     /* 90 for 9.0 */
    size_t max_shared_bytes;    /* dynamic, a block, opted in; at most SL_CUDA_MAX_SHARED_BYTES */
    size_t shared_per_sm_bytes; /* of a multiprocessor, for occupancy */
    size_t l2_bytes;
    int ordinal;   /* of the GPU, as CUDA counts */
    bool portable; /* no kernel may pass SL_CUDA_MAX_SHARED_BYTES, though the GPU has more */
};
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* Whether the library holds machine code that runs on the current GPU: 0 or a cudaError_t. */
int sl_cuda_has_code(void);

/* Copy between device memory and host memory that the device reaches by its address, whichever is
 * which, past the copy engines. SL_CUDA_UNSUPPORTED: not in whole 16-byte words. */
int sl_cuda_copy_direct(cudaStream_t stream, void *dst, const void *src, size_t bytes);

int sl_cuda_norm(cudaStream_t stream, const struct sl_op *op, const struct sl_cuda_props *props);
int sl_cuda_divide(cudaStream_t stream, const struct sl_op *op, const struct sl_cuda_props *props);
int sl_cuda_add(cudaStream_t stream, const struct sl_op *op, const struct sl_cuda_props *props);
int sl_cuda_merge(cudaStream_t stream, const struct sl_op *op, const struct sl_cuda_props *props);
int sl_cuda_rope(cudaStream_t stream, const struct sl_op *op, const struct sl_cuda_props *props);
int sl_cuda_kv_store(cudaStream_t stream, const struct sl_op *op,
                     const struct sl_cuda_props *props);
/* `scratch` holds sl_op_scratch_bytes(op) bytes. */
int sl_cuda_linear(cudaStream_t stream, const struct sl_op *op, void *scratch, size_t scratch_bytes,
                   const struct sl_cuda_props *props);
int sl_cuda_attention(cudaStream_t stream, const struct sl_op *op, void *scratch,
                      size_t scratch_bytes, const struct sl_cuda_props *props);
int sl_cuda_router(cudaStream_t stream, const struct sl_op *op, void *scratch, size_t scratch_bytes,
                   const struct sl_cuda_props *props);
int sl_cuda_experts(cudaStream_t stream, const struct sl_op *op, void *scratch,
                    size_t scratch_bytes, const struct sl_cuda_props *props);

#ifdef __cplusplus
}
#endif
#endif
