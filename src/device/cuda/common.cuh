/* SPDX-License-Identifier: Apache-2.0
 *
 * Small pieces that every kernel file of the CUDA device uses: warp sums, packed conversions,
 * alignment tests on the host side, launches.
 *
 * With SL_CUDA_EMULATE the kernels compile as plain C++ and run on the CPU, thread by thread
 * (tests/device/cuda_emulate.h); what differs between the two stands here and in mma.cuh.
 */
#ifndef SL_DEVICE_CUDA_COMMON_CUH
#define SL_DEVICE_CUDA_COMMON_CUH

#include <math.h>
#include <stdint.h>

#ifndef SL_CUDA_EMULATE
#include <cuda_fp16.h>
#endif

#include "device/cuda/cuda_ops.h"

#define SL_WARP 32
#define SL_ALL_LANES 0xffffffffu
#define SL_LOG2E 1.4426950408889634f

#ifdef SL_CUDA_EMULATE
#define SL_DYNAMIC_SHARED(name) char *name = (char *)sl_emu.shared
#define SL_QUEUE(kernel, grid, block, shared, stream, ...)                                         \
    ((void)(stream), (void)sl_emulate_launch(grid, block, shared, [&]() { kernel(__VA_ARGS__); }))
#else
/* The dynamic shared memory of a kernel, as bytes. */
#define SL_DYNAMIC_SHARED(name) extern __shared__ __align__(128) char name[]
/* Queue a kernel; `kernel` in parentheses when it has several template arguments. */
#define SL_QUEUE(kernel, grid, block, shared, stream, ...)                                         \
    kernel<<<grid, block, shared, stream>>>(__VA_ARGS__)
#endif

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

/* The bits of a float rounded to f16, and back. */
static __device__ __forceinline__ uint16_t sl_f16_bits(float f)
{
#ifdef SL_CUDA_EMULATE
    return sl_f32_to_f16(f);
#else
    return __half_as_ushort(__float2half_rn(f));
#endif
}

static __device__ __forceinline__ float sl_f16_value(uint16_t bits)
{
#ifdef SL_CUDA_EMULATE
    return sl_f16_to_f32(bits);
#else
    return __half2float(__ushort_as_half(bits));
#endif
}

/* Two floats rounded to f16, the first in the low half. */
static __device__ __forceinline__ uint32_t sl_pack_f16(float low, float high)
{
#ifdef SL_CUDA_EMULATE
    return sl_f16_bits(low) | (uint32_t)sl_f16_bits(high) << 16;
#else
    const __half2 packed = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t *>(&packed);
#endif
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
#ifdef SL_CUDA_EMULATE
    return 0;
#else
    return (int)cudaGetLastError();
#endif
}

#endif
