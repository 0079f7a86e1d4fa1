/* SPDX-License-Identifier: Apache-2.0
 *
 * Small pieces that every kernel file of the CUDA device uses: warp sums, packed conversions,
 * alignment tests on the host side, and the end of a launch.
 */
#ifndef SL_DEVICE_CUDA_COMMON_CUH
#define SL_DEVICE_CUDA_COMMON_CUH

#include <cuda_fp16.h>
#include <stdint.h>

#include "device/cuda/cuda_ops.h"

#define SL_WARP 32
#define SL_ALL_LANES 0xffffffffu
#define SL_LOG2E 1.4426950408889634f

static __device__ __forceinline__ float sl_warp_sum(float v)
{
#pragma unroll
    for (int step = SL_WARP / 2; step > 0; step /= 2) {
        v += __shfl_xor_sync(SL_ALL_LANES, v, step);
    }
    return v;
}

static __device__ __forceinline__ float sl_warp_max(float v)
{
#pragma unroll
    for (int step = SL_WARP / 2; step > 0; step /= 2) {
        v = fmaxf(v, __shfl_xor_sync(SL_ALL_LANES, v, step));
    }
    return v;
}

/* Two floats rounded to f16, the first in the low half. */
static __device__ __forceinline__ uint32_t sl_pack_f16(float low, float high)
{
    const __half2 packed = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&packed);
}

/* Whether `address` (host side, of device memory) allows accesses of `bytes`, a power of two. */
static inline bool sl_is_aligned(const void *address, size_t bytes)
{
    return ((uintptr_t)address & (bytes - 1)) == 0;
}

static inline int64_t sl_div_up(int64_t n, int64_t by)
{
    return (n + by - 1) / by;
}

/* The result of a launcher after its last launch: also finds errors of the launch itself. */
static inline int sl_launch_result(void)
{
    return (int)cudaGetLastError();
}

/* Let a kernel use `bytes` of dynamic shared memory (needed above 48 KiB). The driver is asked once
 * per GPU: `done` is the kernel's own bit set of GPUs, shared by all threads. */
static inline int sl_allow_shared(const void *kernel, int bytes, int ordinal, uint64_t *done)
{
    const uint64_t bit = ordinal < 64 ? UINT64_C(1) << ordinal : 0;
    if ((__atomic_load_n(done, __ATOMIC_RELAXED) & bit) != 0) {
        return 0;
    }
    const cudaError_t code =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (code != cudaSuccess) {
        cudaGetLastError();
        return (int)code;
    }
    __atomic_fetch_or(done, bit, __ATOMIC_RELAXED);
    return 0;
}

#endif
