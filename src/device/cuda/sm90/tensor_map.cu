/* SPDX-License-Identifier: Apache-2.0
 *
 * Descriptions of matrices are made by the driver, which the runtime finds: the library links to no
 * driver.
 */
#include "device/cuda/sm90/tensor_map.cuh"

#include <cuda_runtime.h>

typedef CUresult encode_fn(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *,
                           const cuuint64_t *, const cuuint64_t *, const cuuint32_t *,
                           const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                           CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* The driver's function, looked up once; every thread finds the same. */
static encode_fn *find_encode(void)
{
    static encode_fn *found;
    encode_fn *encode = __atomic_load_n(&found, __ATOMIC_RELAXED);
    if (!encode) {
        void *entry = NULL;
        cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
        const cudaError_t code = cudaGetDriverEntryPointByVersion(
            "cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result);
#else
        const cudaError_t code =
            cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &result);
#endif
        if (code != cudaSuccess || result != cudaDriverEntryPointSuccess) {
            cudaGetLastError();
            return NULL;
        }
        encode = (encode_fn *)entry;
        __atomic_store_n(&found, encode, __ATOMIC_RELAXED);
    }
    return encode;
}

int sl_tensor_map_rows(CUtensorMap *map, const void *data, int64_t n_rows, int64_t n_cols,
                       int box_rows)
{
    encode_fn *encode = find_encode();
    if (!encode) {
        return (int)cudaErrorNotSupported;
    }
    const cuuint64_t sizes[2] = {(cuuint64_t)n_cols, (cuuint64_t)n_rows};
    const cuuint64_t strides[1] = {(cuuint64_t)n_cols * 2};
    const cuuint32_t box[2] = {64, (cuuint32_t)box_rows};
    const cuuint32_t steps[2] = {1, 1};
    const CUresult code =
        encode(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, (void *)(uintptr_t)data, sizes, strides,
               box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
               CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return code == CUDA_SUCCESS ? 0 : (int)cudaErrorInvalidValue;
}
