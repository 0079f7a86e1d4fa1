/* SPDX-License-Identifier: Apache-2.0
 *
 * Descriptions of matrices for the tensor copies of compute capability 9.0.
 */
#ifndef SL_DEVICE_CUDA_SM90_TENSOR_MAP_CUH
#define SL_DEVICE_CUDA_SM90_TENSOR_MAP_CUH

#include <cuda.h>
#include <stdint.h>

/* A matrix of f16 [n_rows, n_cols], as boxes of 64 columns x box_rows (256 at most) that come to
 * shared memory as rows of 128 swizzled bytes; what lies outside comes as zeros. `data` is aligned
 * to 16 bytes and n_cols a multiple of 8. BF16 is the same to a copy. Returns 0 or a cudaError_t;
 * touches no device. */
int sl_tensor_map_rows(CUtensorMap *map, const void *data, int64_t n_rows, int64_t n_cols,
                       int box_rows);

/* What a kernel copies from: x, and the parts of a product whose weights are copied as they are. */
struct sl_sm90_maps {
    CUtensorMap x, w[4];
};

#endif
