/* SPDX-License-Identifier: Apache-2.0
 *
 * Launches that overlap with the kernel ahead of them in the stream.
 *
 * A decoded token is hundreds of short kernels in a row, and between two of them the GPU idles for
 * about as long as one takes. From compute capability 9.0 on a kernel launched by SL_FOLLOW may
 * begin as soon as every block of the one ahead has begun and there is room for it. It does what
 * depends on nothing, above all the first loads of its weights, and then calls sl_await_ahead
 * before it reads or writes anything that earlier work of the stream writes or reads.
 *
 * Every kernel launched by SL_FOLLOW must call
 *   sl_let_follow    at its start: what comes next may begin
 *   sl_await_ahead   in every thread that touches memory other than weights and constants; at
 *                    least one thread of the grid must, so that the end of a kernel
 *                    means the end of all before it
 * What comes before the first kernel of a stretch (copies, waits for events) is waited for as ever,
 * and so is everything by kernels that are launched in another way. On older GPUs SL_FOLLOW is a
 * plain launch. Graphs record it as it is.
 */
#ifndef SL_DEVICE_CUDA_LAUNCH_CUH
#define SL_DEVICE_CUDA_LAUNCH_CUH

#include "device/cuda/cuda_ops.h"

#ifdef SL_CUDA_EMULATE

#define SL_FOLLOW(kernel, grid, block, shared, stream, props, ...)                                 \
    ((void)(stream), (void)(props),                                                                \
     sl_emulate_launch(grid, block, shared, [&]() { kernel(__VA_ARGS__); }))

static inline void sl_let_follow(void)
{
}

static inline void sl_await_ahead(void)
{
}

static inline void sl_prefetch_l2(const void *)
{
}

#else

/* Queue a kernel; 0 or a cudaError_t. `kernel` in parentheses when it has several template
 * arguments. */
#define SL_FOLLOW(kernel, grid, block, shared, stream, props, ...)                                 \
    sl_follow((kernel), dim3(grid), dim3(block), (size_t)(shared), (stream), (props), __VA_ARGS__)

template <class... PARAMETERS, class... ARGUMENTS>
static inline int sl_follow(void (*kernel)(PARAMETERS...), dim3 grid, dim3 block, size_t shared,
                            cudaStream_t stream, const struct sl_cuda_props *props,
                            const ARGUMENTS &...arguments)
{
    if (shared > SL_CUDA_MAX_SHARED_BYTES) {
        return (int)cudaErrorInvalidValue;
    }
    if (shared > 48 * 1024) {
        const cudaError_t code = cudaFuncSetAttribute(
            (const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
        if (code != cudaSuccess) {
            cudaGetLastError();
            return (int)code;
        }
    }
    cudaLaunchAttribute attribute;
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = grid;
    config.blockDim = block;
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = props->compute_capability >= 90 ? 1 : 0;
    const cudaError_t code = cudaLaunchKernelEx(&config, kernel, PARAMETERS(arguments)...);
    cudaGetLastError();
    return (int)code;
}

static __device__ __forceinline__ void sl_let_follow(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

static __device__ __forceinline__ void sl_await_ahead(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* Ask for the line of an address, which must be of device memory. */
static __device__ __forceinline__ void sl_prefetch_l2(const void *p)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
}

#endif
#endif
