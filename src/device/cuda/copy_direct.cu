/* SPDX-License-Identifier: Apache-2.0
 *
 * Copies between the GPU and page-locked host memory, by a kernel that reads or writes the host's
 * memory over the link itself. The copy engine takes copies in the order in which they were queued,
 * of all streams: a hidden state would wait there behind the weights that are on their way,
 * milliseconds long. A kernel shares the link with them, and it starts sooner, too.
 */
#include "device/cuda/common.cuh"

#define COPY_THREADS 256
#define COPY_ITEMS                                                                                 \
    2 /* 16-byte words of a thread: all on their way before the first is waited for */

static __global__ void __launch_bounds__(COPY_THREADS)
    copy_direct_kernel(uint4 *dst, const uint4 *src, uint32_t n_words)
{
    const uint32_t first = blockIdx.x * (COPY_THREADS * COPY_ITEMS) + threadIdx.x;
    uint4 words[COPY_ITEMS];
#pragma unroll
    for (int i = 0; i < COPY_ITEMS; i++) {
        const uint32_t at = first + i * COPY_THREADS;
        words[i] = make_uint4(0, 0, 0, 0);
        if (at < n_words) {
            words[i] = __ldcv(src + at); /* never from a cache: the host writes there */
        }
    }
#pragma unroll
    for (int i = 0; i < COPY_ITEMS; i++) {
        const uint32_t at = first + i * COPY_THREADS;
        if (at < n_words) {
            dst[at] = words[i];
        }
    }
}

extern "C" int sl_cuda_copy_direct(cudaStream_t stream, void *dst, const void *src, size_t bytes)
{
    const uint32_t n_words = (uint32_t)(bytes / sizeof(uint4));
    if (bytes == 0 || bytes % sizeof(uint4) != 0 || bytes / sizeof(uint4) > UINT32_MAX ||
        !sl_is_aligned(dst, 16) || !sl_is_aligned(src, 16)) {
        return SL_CUDA_UNSUPPORTED;
    }
    const unsigned n_blocks = (unsigned)sl_div_up(n_words, COPY_THREADS * COPY_ITEMS);
    copy_direct_kernel<<<n_blocks, COPY_THREADS, 0, stream>>>((uint4 *)dst, (const uint4 *)src,
                                                              n_words);
    return sl_launch_result();
}
