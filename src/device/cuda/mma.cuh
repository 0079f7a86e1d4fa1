/* SPDX-License-Identifier: Apache-2.0
 *
 * Shared-memory and asynchronous-copy instructions on addresses in shared memory, from sm_75 up:
 * what attention needs beside the instructions of linear_port.cuh. Where a target lacks an
 * instruction the function does the same with what it has: sm_75 copies through registers, so that
 * waiting for copies is nothing to do.
 *
 * Fragments of the 16 x 8 x 16 product (sl_mma_f16), for lane = 4 * g + t (g = 0..7, t = 0..3),
 * each register two f16, the lower column or row in the low half: A  a0 (row g,     cols 2t..)  a1
 * (row g + 8, cols 2t..) a2 (row g,     cols 2t+8)  a3 (row g + 8, cols 2t+8) B  b0 (rows 2t.., col
 * g)      b1 (rows 2t+8.., col g) C  c0 c1 (row g, cols 2t, 2t+1)   c2 c3 (row g + 8, cols 2t,
 * 2t+1)   f32
 */
#ifndef SL_DEVICE_CUDA_MMA_CUH
#define SL_DEVICE_CUDA_MMA_CUH

#include "device/cuda/common.cuh"
#include "device/cuda/linear_port.cuh"

#ifdef SL_CUDA_EMULATE

static inline uint32_t sl_shared_address(const void *p)
{
    return (uint32_t)((const uint8_t *)p - sl_emu.shared);
}

static inline void sl_ldmatrix_x4(uint32_t r[4], uint32_t address)
{
    sl_emulate_matrix_banks(address);
    sl_load_matrix4(r, sl_emu.shared + address);
}

static inline void sl_ldmatrix_x4_trans(uint32_t r[4], uint32_t address)
{
    sl_emulate_matrix_banks(address);
    sl_load_matrix4_trans(r, sl_emu.shared + address);
}

static inline void sl_store_shared_16(uint32_t address, uint4 v)
{
    sl_emulate_check(address % 16 == 0 && address + 16 <= sl_emu.shared_bytes, "shared store");
    memcpy(sl_emu.shared + address, &v, 16);
}

static inline uint32_t sl_load_shared_4(uint32_t address)
{
    uint32_t v;
    sl_emulate_check(address % 4 == 0 && address + 4 <= sl_emu.shared_bytes, "shared load");
    memcpy(&v, sl_emu.shared + address, 4);
    return v;
}

static inline uint32_t sl_load_shared_2(uint32_t address)
{
    uint16_t v;
    sl_emulate_check(address % 2 == 0 && address + 2 <= sl_emu.shared_bytes, "shared load");
    memcpy(&v, sl_emu.shared + address, 2);
    return v;
}

static inline void sl_copy_async_16(uint32_t address, const void *src, bool valid)
{
    sl_copy16(sl_emu.shared + address, src, valid ? 16 : 0);
}

static inline void sl_copy_async_commit(void)
{
    sl_copy_commit();
}

template <int N> static inline void sl_copy_async_wait(void)
{
    sl_copy_wait<N>();
}

static inline float sl_exp2(float x)
{
    return exp2f(x);
}

#else

static __device__ __forceinline__ uint32_t sl_shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* Four 8 x 8 matrices of f16 from shared memory; lanes 8i .. 8i + 7 give the addresses of the rows
 * of matrix i, 16 bytes each. Register i: row lane / 4, elements 2 (lane % 4) and the next. */
static __device__ __forceinline__ void sl_ldmatrix_x4(uint32_t r[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

/* The same, each matrix transposed. */
static __device__ __forceinline__ void sl_ldmatrix_x4_trans(uint32_t r[4], uint32_t address)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

static __device__ __forceinline__ void sl_store_shared_16(uint32_t address, uint4 v)
{
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
}

static __device__ __forceinline__ uint32_t sl_load_shared_4(uint32_t address)
{
    uint32_t v;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(v) : "r"(address) : "memory");
    return v;
}

static __device__ __forceinline__ uint32_t sl_load_shared_2(uint32_t address)
{
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
    return v;
}

/* Start copying 16 bytes from global to shared memory, or 16 zero bytes when not `valid` (the
 * source is not read then). */
static __device__ __forceinline__ void sl_copy_async_16(uint32_t address, const void *src,
                                                        bool valid)
{
#if __CUDA_ARCH__ >= 800
    const int bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(address), "l"(src),
                 "r"(bytes)
                 : "memory");
#else
    const uint4 v = valid ? *reinterpret_cast<const uint4 *>(src) : make_uint4(0, 0, 0, 0);
    sl_store_shared_16(address, v);
#endif
}

/* Close the group of copies that this thread has started since the last group. */
static __device__ __forceinline__ void sl_copy_async_commit(void)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

/* Wait until at most N groups of this thread are on their way. */
template <int N> static __device__ __forceinline__ void sl_copy_async_wait(void)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#endif
}

/* 2^x to about 2 units in the last place; 0 for -infinity. */
static __device__ __forceinline__ float sl_exp2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

#endif /* SL_CUDA_EMULATE */

#endif
