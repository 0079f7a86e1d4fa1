/* SPDX-License-Identifier: Apache-2.0
 *
 * The machine instructions that the matrix products are made of, each behind a small function:
 * integer dot products, byte permutes, asynchronous copies to shared memory, tensor-core products.
 * Older targets get the same result from the instructions that they have.
 *
 * The kernels use nothing of CUDA but what stands here and the thread indices. With SL_CUDA_EMULATE
 * they compile as plain C++ against tests/device/cuda_emulate.h, which runs every thread of a block
 * on the CPU: index arithmetic is tested without a GPU.
 */
#ifndef SL_DEVICE_CUDA_LINEAR_PORT_CUH
#define SL_DEVICE_CUDA_LINEAR_PORT_CUH

#include <stdint.h>
#include <string.h>

extern "C" {
#include "op/op.h"
}

#ifdef SL_CUDA_EMULATE
#include "cuda_emulate.h"
#else
#include <cuda_fp16.h>
#include <cuda_runtime.h>
/* Dynamic shared memory of the kernel, as bytes. */
#define SL_SHARED(name) extern __shared__ __align__(128) uint8_t name[]
#define SL_KERNEL_ARG const __grid_constant__
#endif

#define SL_DEV static __device__ __forceinline__
#define SL_HD static __host__ __device__ __forceinline__
#define SL_HD_MEMBER __host__ __device__ __forceinline__
#define SL_DEV_MEMBER __device__ __forceinline__

#ifdef __CUDA_ARCH__
#define SL_LDG(p) __ldg(p)
#define SL_LOAD_L2(p) __ldcg(p) /* past the L1 cache, which may hold what was there before */
#else
#define SL_LDG(p) (*(p))
#define SL_LOAD_L2(p) (*(p))
#endif
/* The emulation checks the alignment that the hardware demands. */
#ifndef SL_CHECK_ALIGN
#define SL_CHECK_ALIGN(p, n) (void)0
#endif

/* ---- bits and conversions, on host and device ---- */

SL_HD float sl_bits_f32(uint32_t bits)
{
#ifdef __CUDA_ARCH__
    return __uint_as_float(bits);
#else
    float f;
    memcpy(&f, &bits, 4);
    return f;
#endif
}

SL_HD uint32_t sl_f32_bits(float f)
{
#ifdef __CUDA_ARCH__
    return __float_as_uint(f);
#else
    uint32_t bits;
    memcpy(&bits, &f, 4);
    return bits;
#endif
}

/* f16 in the low 16 bits of `h`; the others are ignored. */
SL_HD float sl_half_f32(uint32_t h)
{
#ifdef __CUDA_ARCH__
    return __half2float(__ushort_as_half((unsigned short)h));
#else
    const uint32_t sign = (h & 0x8000u) << 16;
    const uint32_t rest = (h & 0x7fffu) << 13;
    if (rest >= 0x7c00u << 13) {
        return sl_bits_f32(sign | 0x7f800000u | (rest & 0x007fffffu));
    }
    /* 2^112 moves the exponent to float's bias, subnormals included. */
    return sl_bits_f32(sign | sl_f32_bits(sl_bits_f32(rest) * 0x1p112f));
#endif
}

/* Two floats rounded to f16 (nearest even), `lo` in the low half. */
SL_HD uint32_t sl_pack_half2(float lo, float hi)
{
#ifdef __CUDA_ARCH__
    const __half2 h = __floats2half2_rn(lo, hi);
    return *reinterpret_cast<const uint32_t *>(&h);
#else
    uint32_t out = 0;
    for (int i = 0; i < 2; i++) {
        const uint32_t bits = sl_f32_bits(i ? hi : lo);
        const uint32_t sign = bits >> 16 & 0x8000u;
        const float mag = sl_bits_f32(bits & 0x7fffffffu);
        uint32_t h;
        if (mag != mag) {
            h = 0x7e00u;
        } else if (mag >= 65520.0f) {
            h = 0x7c00u;
        } else if (mag < 0x1p-14f) {
            /* Adding 0.5 leaves steps of 2^-24 in the mantissa: the hardware rounds. */
            h = sl_f32_bits(mag + 0.5f) - 0x3f000000u;
        } else {
            const uint32_t m = sl_f32_bits(mag) - (112u << 23);
            h = (m + 0x0fffu + (m >> 13 & 1u)) >> 13;
        }
        out |= (h | sign) << 16 * i;
    }
    return out;
#endif
}

SL_HD int sl_count_bits(uint32_t v)
{
#ifdef __CUDA_ARCH__
    return __popc(v);
#else
    return __builtin_popcount(v);
#endif
}

/* a * b + c of two f16 each. */
SL_HD uint32_t sl_half2_fma(uint32_t a, uint32_t b, uint32_t c)
{
#ifdef __CUDA_ARCH__
    uint32_t d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
#else
    return sl_pack_half2(
        (float)((double)sl_half_f32(a) * sl_half_f32(b) + sl_half_f32(c)),
        (float)((double)sl_half_f32(a >> 16) * sl_half_f32(b >> 16) + sl_half_f32(c >> 16)));
#endif
}

SL_HD uint32_t sl_half2_sub(uint32_t a, uint32_t b)
{
#ifdef __CUDA_ARCH__
    uint32_t d;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
#else
    return sl_pack_half2(sl_half_f32(a) - sl_half_f32(b),
                         sl_half_f32(a >> 16) - sl_half_f32(b >> 16));
#endif
}

SL_HD uint32_t sl_half2_mul(uint32_t a, uint32_t b)
{
#ifdef __CUDA_ARCH__
    uint32_t d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
#else
    return sl_pack_half2(sl_half_f32(a) * sl_half_f32(b),
                         sl_half_f32(a >> 16) * sl_half_f32(b >> 16));
#endif
}

/* Two bf16 as two f16. Exact for magnitudes from 2^-14 to 65504: bf16 has the shorter mantissa. */
SL_HD uint32_t sl_bf16x2_half2(uint32_t v)
{
    return sl_pack_half2(sl_bits_f32(v << 16), sl_bits_f32(v & 0xffff0000u));
}

/* Bytes picked from the eight of (a, b), a in the low half: nibble i of `sel` for byte i. */
SL_HD uint32_t sl_bytes_pick(uint32_t a, uint32_t b, uint32_t sel)
{
#ifdef __CUDA_ARCH__
    return __byte_perm(a, b, sel);
#else
    const uint64_t both = (uint64_t)b << 32 | a;
    uint32_t out = 0;
    for (int i = 0; i < 4; i++) {
        out |= (uint32_t)(both >> 8 * (sel >> 4 * i & 7) & 0xff) << 8 * i;
    }
    return out;
#endif
}

/* The low 32 bits of (hi, lo) >> shift, shift 0..32. */
SL_HD uint32_t sl_funnel(uint32_t lo, uint32_t hi, uint32_t shift)
{
#ifdef __CUDA_ARCH__
    return __funnelshift_rc(lo, hi, shift);
#else
    return (uint32_t)(((uint64_t)hi << 32 | lo) >> shift);
#endif
}

/* sum + products of the four signed bytes of a and b. */
SL_HD int sl_dot4(uint32_t a, uint32_t b, int sum)
{
#ifdef __CUDA_ARCH__
    return __dp4a((int)a, (int)b, sum);
#else
    for (int i = 0; i < 4; i++) {
        sum += (int)(int8_t)(a >> 8 * i) * (int)(int8_t)(b >> 8 * i);
    }
    return sum;
#endif
}

/* Sums that start here come out as the float 12582912 + sum when their bits are read as one
 * (|sum| < 2^22): a float subtraction instead of a slower conversion. */
#define SL_MAGIC_BITS 0x4b400000
#define SL_MAGIC_F32 12582912.0f

SL_HD float sl_magic_f32(int sum)
{
    return sl_bits_f32((uint32_t)sum) - SL_MAGIC_F32;
}

/* ---- instructions of one warp or block; the emulation has its own ---- */
#ifndef SL_CUDA_EMULATE

#define SL_WARP_ALL 0xffffffffu

SL_DEV float sl_shfl_xor(float v, int mask)
{
    return __shfl_xor_sync(SL_WARP_ALL, v, mask);
}

SL_DEV int sl_shfl_xor(int v, int mask)
{
    return __shfl_xor_sync(SL_WARP_ALL, v, mask);
}

/* Which lanes of the warp say so, a bit each. */
SL_DEV uint32_t sl_vote(bool v)
{
    return __ballot_sync(SL_WARP_ALL, v);
}

SL_DEV void sl_warp_sync(void)
{
    __syncwarp();
}

SL_DEV void sl_block_sync(void)
{
    __syncthreads();
}

/* Queue a copy of `bytes` (0..16) to 16 aligned bytes of shared memory; the rest becomes zeros.
 * `src` is 16-byte aligned, and nothing past `bytes` is read. */
SL_DEV void sl_copy16(void *shared, const void *src, int bytes)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(
                     (uint32_t)__cvta_generic_to_shared(shared)),
                 "l"(src), "r"(bytes)
                 : "memory");
#else
    uint4 v = make_uint4(0, 0, 0, 0);
    if (bytes == 16) {
        v = *(const uint4 *)src;
    } else if (bytes > 0) {
        uint32_t w[4] = {0, 0, 0, 0};
        for (int i = 0; i < bytes; i++) {
            w[i / 4] |= (uint32_t)((const uint8_t *)src)[i] << 8 * (i & 3);
        }
        v = make_uint4(w[0], w[1], w[2], w[3]);
    }
    *(uint4 *)shared = v;
#endif
}

/* The same for 8 bytes: `bytes` is 8 or 0. */
SL_DEV void sl_copy8(void *shared, const void *src, int bytes)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8, %2;\n" ::"r"(
                     (uint32_t)__cvta_generic_to_shared(shared)),
                 "l"(src), "r"(bytes)
                 : "memory");
#else
    *(uint2 *)shared = bytes ? *(const uint2 *)src : make_uint2(0, 0);
#endif
}

/* End a group of copies. */
SL_DEV void sl_copy_commit(void)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.commit_group;\n" ::: "memory");
#endif
}

/* Wait until at most N of this thread's groups are under way. Other threads' need a barrier. */
template <int N> SL_DEV void sl_copy_wait(void)
{
#if __CUDA_ARCH__ >= 800
    asm volatile("cp.async.wait_group %0;\n" ::"n"(N) : "memory");
#endif
}

/* Four 8x8 matrices of f16; lane i gives the address of row i % 8 of matrix i / 8. */
SL_DEV void sl_load_matrix4(uint32_t r[4], const void *shared)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(shared))
                 : "memory");
}

/* c[16 x 8] += a[16 x 16] b[16 x 8], f16 with f32 sums. With g = lane / 4, t = lane % 4:
 * a: rows g, g+8, g, g+8 at k = 2t, 2t, 2t+8, 2t+8; b: column g at k = 2t, 2t+8;
 * c: row g columns 2t, 2t+1, then row g+8. */
SL_DEV void sl_mma_f16(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, "
        "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, "
        "{%4,%5}, {%6}, {%0,%1,%2,%3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b0));
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, "
        "{%4,%5}, {%6}, {%0,%1,%2,%3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[2]), "r"(a[3]), "r"(b1));
#endif
}

/* c[16 x 8] += a[16 x 16] b[16 x 8], signed bytes with 32-bit sums. a: rows g, g+8 at k = 4t;
 * b: column g at k = 4t; c as above. */
SL_DEV void sl_mma_s8_k16(int c[4], uint32_t a0, uint32_t a1, uint32_t b0)
{
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, "
        "{%4,%5}, {%6}, {%0,%1,%2,%3};\n"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a0), "r"(a1), "r"(b0));
#else
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};\n"
        : "+r"(c[0]), "+r"(c[1])
        : "r"(a0), "r"(b0));
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};\n"
        : "+r"(c[2]), "+r"(c[3])
        : "r"(a1), "r"(b0));
#endif
}

/* c[16 x 8] += a[16 x 32] b[32 x 8]. a: rows g, g+8, g, g+8 at k = 4t, 4t, 4t+16, 4t+16;
 * b: column g at k = 4t, 4t+16. */
SL_DEV void sl_mma_s8_k32(int c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, "
        "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#else
    sl_mma_s8_k16(c, a[0], a[1], b0);
    sl_mma_s8_k16(c, a[2], a[3], b1);
#endif
}

#endif /* SL_CUDA_EMULATE */
#endif
