/* SPDX-License-Identifier: Apache-2.0
 *
 * Runs CUDA kernels on the CPU, one fiber per thread of a block, so that their index arithmetic,
 * barriers and asynchronous copies are tested without a GPU. Included by linear_port.cuh
 * and cuda_ops.h when SL_CUDA_EMULATE is defined; C++ on a system with ucontext.
 *
 * Fibers take turns at barriers and warp operations, in an order that changes with every launch.
 * Asynchronous copies happen as late as the waits allow in one mode, and at once in the other: a
 * missing wait reads stale bytes in the first, a slot that is refilled too early breaks the second.
 * Shared memory starts as garbage. Not modelled: memory ordering, bank conflicts, divergence inside
 * a warp operation.
 */
#ifndef SL_TESTS_CUDA_EMULATE_H
#define SL_TESTS_CUDA_EMULATE_H

#include <assert.h>
#include <math.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

#include <functional>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
/* Blocks run one after the other, so that one copy of a block's static memory serves all. */
#define __shared__ static
#define SL_KERNEL_ARG const
#define SL_SHARED(name) uint8_t *name = sl_emu.shared
#define SL_CHECK_ALIGN(p, n) sl_emulate_check(((uintptr_t)(p) & ((n)-1)) == 0, "alignment")

typedef void *cudaStream_t;

/* Of cuda_ops.h, which needs the CUDA toolkit. */
#define SL_CUDA_UNSUPPORTED (-1)
struct sl_cuda_props {
    int n_sm;
    int compute_capability;
    size_t max_shared_bytes;
    size_t shared_per_sm_bytes;
    size_t l2_bytes;
    int ordinal;
    bool portable;
};

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_)
    {
    }
};
struct uint2 {
    unsigned x, y;
};
struct uint4 {
    unsigned x, y, z, w;
};
struct float2 {
    float x, y;
};
struct float4 {
    float x, y, z, w;
};

static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w)
{
    return {x, y, z, w};
}
static inline float2 make_float2(float x, float y)
{
    return {x, y};
}
static inline float4 make_float4(float x, float y, float z, float w)
{
    return {x, y, z, w};
}

struct sl_emu_copy {
    void *to;
    const void *from;
    int bytes, size;
};

/* Fibers that meet at a barrier. */
struct sl_emu_group {
    int alive, arrived;
    unsigned round;
};

struct sl_emu_fiber {
    ucontext_t context; /* its start; later switches jump, which is no system call */
    jmp_buf jump;
    bool started;
    dim3 thread;
    int index;
    bool done;
    sl_emu_group *warp;
    unsigned warp_ops;                            /* which of the two exchange buffers is next */
    std::vector<std::vector<sl_emu_copy>> copies; /* groups under way, the open one last */
};

/* What the lanes of a warp show each other in one operation. */
struct sl_emu_exchange {
    uint64_t word[32][6];
};

struct sl_emulator {
    uint8_t *shared;
    size_t shared_bytes;
    dim3 block, grid, block_dim;
    std::vector<sl_emu_fiber> fibers;
    std::vector<sl_emu_group> warps;
    std::vector<sl_emu_exchange> exchange; /* two a warp */
    sl_emu_group all;
    int current, step;
    ucontext_t scheduler;
    const std::function<void()> *body;
    bool late_copies;
    unsigned launches;
};

static sl_emulator sl_emu;

#define threadIdx (sl_emu.fibers[(size_t)sl_emu.current].thread)
#define blockIdx (sl_emu.block)
#define gridDim (sl_emu.grid)
#define blockDim (sl_emu.block_dim)

static inline void sl_emulate_check(bool ok, const char *what)
{
    if (!ok) {
        fprintf(stderr, "emulated kernel: %s, block %u,%u thread %u\n", what, sl_emu.block.x,
                sl_emu.block.y, sl_emu.fibers.empty() ? 0 : threadIdx.x);
        abort();
    }
}

static inline sl_emu_fiber &sl_emu_me(void)
{
    return sl_emu.fibers[(size_t)sl_emu.current];
}

static inline void sl_emu_enter(sl_emu_fiber &f)
{
    if (f.started) {
        _longjmp(f.jump, 1);
    }
    f.started = true;
    setcontext(&f.context);
}

/* Let the next fiber that is not done run. */
static inline void sl_emu_yield(void)
{
    const int n = (int)sl_emu.fibers.size();
    const int me = sl_emu.current;
    int next = me;
    do {
        next = (next + sl_emu.step) % n;
    } while (sl_emu.fibers[(size_t)next].done && next != me);
    if (next != me) {
        sl_emu.current = next;
        if (_setjmp(sl_emu.fibers[(size_t)me].jump) == 0) {
            sl_emu_enter(sl_emu.fibers[(size_t)next]);
        }
    }
}

static inline void sl_emu_meet(sl_emu_group *group)
{
    const unsigned round = group->round;
    if (++group->arrived == group->alive) {
        group->arrived = 0;
        group->round++;
    }
    while (group->round == round) {
        sl_emu_yield();
    }
}

static inline void sl_emu_entry(void)
{
    (*sl_emu.body)();
    sl_emu_fiber &me = sl_emu_me();
    me.done = true;
    sl_emu_group *groups[2] = {me.warp, &sl_emu.all};
    for (sl_emu_group *group : groups) {
        group->alive--;
        if (group->alive > 0 && group->arrived == group->alive) {
            group->arrived = 0;
            group->round++;
        }
    }
    if (sl_emu.all.alive > 0) {
        sl_emu_yield();
    }
    setcontext(&sl_emu.scheduler);
}

static inline void sl_emulate_block(std::vector<uint8_t> &stacks, size_t stack_bytes)
{
    const int n = (int)(sl_emu.block_dim.x * sl_emu.block_dim.y);
    sl_emu.all = {n, 0, 0};
    for (size_t w = 0; w < sl_emu.warps.size(); w++) {
        sl_emu.warps[w] = {32, 0, 0};
    }
    for (int i = 0; i < n; i++) {
        sl_emu_fiber &f = sl_emu.fibers[(size_t)i];
        f.thread = dim3((unsigned)i % sl_emu.block_dim.x, (unsigned)i / sl_emu.block_dim.x, 0);
        f.index = i;
        f.done = f.started = false;
        f.warp = &sl_emu.warps[(size_t)i / 32];
        f.warp_ops = 0;
        f.copies.assign(1, {});
        getcontext(&f.context);
        f.context.uc_stack.ss_sp = stacks.data() + (size_t)i * stack_bytes;
        f.context.uc_stack.ss_size = stack_bytes;
        f.context.uc_link = NULL;
        makecontext(&f.context, sl_emu_entry, 0);
    }
    sl_emu.current = (int)(sl_emu.launches * 7u) % n;
    sl_emu.fibers[(size_t)sl_emu.current].started = true;
    swapcontext(&sl_emu.scheduler, &sl_emu.fibers[(size_t)sl_emu.current].context);
}

/* Run a kernel. Blocks are multiples of 32 threads in one or two dimensions. */
static inline int sl_emulate_launch(dim3 grid, dim3 block, size_t shared,
                                    const std::function<void()> &body)
{
    static const int steps[] = {1, 31, 37, 41, 43}; /* coprime to 32 times any number of warps */
    const size_t stack_bytes = 64 * 1024;
    sl_emulate_check(shared <= 80 * 1024, "shared memory");
    sl_emu.grid = grid;
    sl_emu.block_dim = block;
    sl_emu.launches++;
    sl_emu.step = steps[sl_emu.launches % 5];
    sl_emu.body = &body;
    const size_t n_threads = (size_t)block.x * block.y;
    sl_emu.fibers.resize(n_threads);
    sl_emu.warps.resize(n_threads / 32);
    sl_emu.exchange.resize(2 * n_threads / 32);
    std::vector<uint8_t> stacks(n_threads * stack_bytes);
    /* Exactly as many bytes as asked for, so that an address sanitizer sees every overrun but for
     * the reads that kernels may do past a row. */
    uint8_t *memory = (uint8_t *)aligned_alloc(128, (shared + 127 + 16) / 128 * 128 + 128);
    sl_emu.shared = memory;
    sl_emu.shared_bytes = shared;
    for (unsigned i = 0; i < grid.x * grid.y * grid.z; i++) {
        sl_emu.block = dim3(i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y);
        memset(memory, 0xff, shared); /* NaN in every float format */
        sl_emulate_block(stacks, stack_bytes);
    }
    free(memory);
    sl_emu.fibers.clear();
    return 0;
}

/* ---- instructions ---- */

/* Show words to the warp and see everyone's. Two buffers: nobody is two operations ahead. */
static inline const sl_emu_exchange &sl_emu_share(const uint64_t *words, int n)
{
    sl_emu_fiber &me = sl_emu_me();
    const size_t warp = (size_t)me.index / 32;
    sl_emu_exchange &e = sl_emu.exchange[2 * warp + (me.warp_ops++ & 1)];
    memcpy(e.word[me.index % 32], words, (size_t)n * 8);
    sl_emu_meet(me.warp);
    return e;
}

static inline float sl_shfl_xor(float v, int mask)
{
    uint64_t word = 0;
    memcpy(&word, &v, 4);
    const sl_emu_exchange &e = sl_emu_share(&word, 1);
    memcpy(&v, &e.word[(sl_emu_me().index % 32) ^ mask][0], 4);
    return v;
}

static inline void sl_warp_sync(void)
{
    sl_emu_meet(sl_emu_me().warp);
}

static inline void sl_block_sync(void)
{
    sl_emu_meet(&sl_emu.all);
}

static inline void sl_emu_copy_now(const sl_emu_copy &c)
{
    memcpy(c.to, c.from, (size_t)c.bytes);
    memset((uint8_t *)c.to + c.bytes, 0, (size_t)(c.size - c.bytes));
}

static inline void sl_emu_copy_async(void *to, const void *from, int bytes, int size)
{
    sl_emulate_check(((uintptr_t)to | (uintptr_t)from) % (uintptr_t)size == 0, "copy alignment");
    sl_emulate_check(bytes >= 0 && bytes <= size, "copy size");
    const sl_emu_copy c = {to, from, bytes, size};
    if (sl_emu.late_copies) {
        sl_emu_me().copies.back().push_back(c);
    } else {
        sl_emu_copy_now(c);
    }
}

static inline void sl_copy16(void *shared, const void *src, int bytes)
{
    sl_emu_copy_async(shared, src, bytes, 16);
}

static inline void sl_copy8(void *shared, const void *src, int bytes)
{
    sl_emu_copy_async(shared, src, bytes, 8);
}

static inline void sl_copy_commit(void)
{
    sl_emu_me().copies.push_back({});
}

template <int N> static inline void sl_copy_wait(void)
{
    std::vector<std::vector<sl_emu_copy>> &groups = sl_emu_me().copies;
    /* The last group is open and is not waited for. */
    while (groups.size() > (size_t)N + 1) {
        for (const sl_emu_copy &c : groups.front()) {
            sl_emu_copy_now(c);
        }
        groups.erase(groups.begin());
    }
}

static inline void sl_load_matrix4(uint32_t r[4], const void *shared)
{
    sl_emulate_check(((uintptr_t)shared & 15) == 0, "matrix row alignment");
    const uint64_t word = (uint64_t)(uintptr_t)shared;
    const sl_emu_exchange &e = sl_emu_share(&word, 1);
    const int lane = sl_emu_me().index % 32;
    for (int i = 0; i < 4; i++) {
        const uint8_t *row = (const uint8_t *)(uintptr_t)e.word[8 * i + lane / 4][0];
        memcpy(&r[i], row + 4 * (lane % 4), 4);
    }
    sl_warp_sync(); /* nobody changes the rows before all have read */
}

/* The same, each matrix transposed. */
static inline void sl_load_matrix4_trans(uint32_t r[4], const void *shared)
{
    sl_emulate_check(((uintptr_t)shared & 15) == 0, "matrix row alignment");
    const uint64_t word = (uint64_t)(uintptr_t)shared;
    const sl_emu_exchange &e = sl_emu_share(&word, 1);
    const int lane = sl_emu_me().index % 32;
    for (int i = 0; i < 4; i++) {
        uint16_t pair[2];
        for (int j = 0; j < 2; j++) {
            const uint8_t *row = (const uint8_t *)(uintptr_t)e.word[8 * i + 2 * (lane % 4) + j][0];
            memcpy(&pair[j], row + 2 * (lane / 4), 2);
        }
        r[i] = pair[0] | (uint32_t)pair[1] << 16;
    }
    sl_warp_sync();
}

/* The eight rows of each matrix lie in different groups of four banks. */
static inline void sl_emulate_matrix_banks(uint32_t address)
{
    const uint64_t word = address;
    const sl_emu_exchange &e = sl_emu_share(&word, 1);
    const int first = sl_emu_me().index % 32 / 8 * 8;
    unsigned groups = 0;
    for (int i = 0; i < 8; i++) {
        groups |= 1u << (e.word[first + i][0] / 16 % 8);
    }
    sl_emulate_check(groups == 0xff, "bank conflict of a matrix");
}

/* CUDA's own names, for kernels that use them; all lanes take part. */
template <class T> static inline T sl_emu_shuffle(T v, int from)
{
    static_assert(sizeof(T) == 4, "words only");
    uint64_t word = 0;
    memcpy(&word, &v, 4);
    const sl_emu_exchange &e = sl_emu_share(&word, 1);
    memcpy(&v, &e.word[from][0], 4);
    return v;
}

static inline int sl_emu_lane(void)
{
    return sl_emu_me().index % 32;
}

template <class T> static inline T __shfl_xor_sync(uint32_t, T v, int mask)
{
    return sl_emu_shuffle(v, sl_emu_lane() ^ mask);
}

template <class T> static inline T __shfl_sync(uint32_t, T v, int from)
{
    return sl_emu_shuffle(v, from & 31);
}

template <class T> static inline T __shfl_down_sync(uint32_t, T v, int by)
{
    const int from = sl_emu_lane() + by;
    return sl_emu_shuffle(v, from < 32 ? from : sl_emu_lane());
}

static inline uint32_t __ballot_sync(uint32_t, bool vote)
{
    const uint64_t word = vote;
    const sl_emu_exchange &e = sl_emu_share(&word, 1);
    uint32_t votes = 0;
    for (int i = 0; i < 32; i++) {
        votes |= (uint32_t)e.word[i][0] << i;
    }
    return votes;
}

static inline uint32_t sl_vote(bool v)
{
    return __ballot_sync(~0u, v);
}

static inline bool __any_sync(uint32_t mask, bool vote)
{
    return __ballot_sync(mask, vote) != 0;
}

static inline void __syncwarp(void)
{
    sl_warp_sync();
}

static inline void __syncthreads(void)
{
    sl_block_sync();
}

static inline int __ffs(int v)
{
    return __builtin_ffs(v);
}

static inline int __ffsll(long long v)
{
    return __builtin_ffsll(v);
}

static inline int __popc(uint32_t v)
{
    return __builtin_popcount(v);
}

// The threads of a block take turns.
template <class T> static inline T atomicAdd(T *at, T by)
{
    const T before = *at;
    *at += by;
    return before;
}

template <class T> static inline T atomicOr(T *at, T bits)
{
    const T before = *at;
    *at |= bits;
    return before;
}

static inline float __fdividef(float a, float b)
{
    return a / b;
}

static inline int min(int a, int b)
{
    return a < b ? a : b;
}

static inline int max(int a, int b)
{
    return a > b ? a : b;
}

/* f16 number i of a word, from a table: most of the time goes into products. */
static inline double sl_emu_half(uint64_t word, int i)
{
    static std::vector<double> table;
    if (table.empty()) {
        for (int h = 0; h < 65536; h++) {
            const int exponent = h >> 10 & 31;
            const double mantissa = h & 1023;
            const double v = exponent == 0    ? ldexp(mantissa, -24)
                             : exponent == 31 ? (h & 1023 ? (double)NAN : (double)INFINITY)
                                              : ldexp(1024 + mantissa, exponent - 25);
            table.push_back(h & 0x8000 ? -v : v);
        }
    }
    return table[word >> 16 * i & 0xffff];
}

static inline void sl_mma_f16(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    const uint64_t words[6] = {a[0], a[1], a[2], a[3], b0, b1};
    const sl_emu_exchange &e = sl_emu_share(words, 6);
    const int g = sl_emu_me().index % 32 / 4;
    const int t = sl_emu_me().index % 4;
    for (int i = 0; i < 4; i++) {
        const int high_row = i >> 1;
        const int column = 2 * t + (i & 1);
        double sum = c[i];
        for (int k = 0; k < 16; k++) {
            /* Row g + 8 * high_row at depth k: lane (g, k % 8 / 2), register high_row + 2 (k / 8).
             */
            const uint64_t av = e.word[4 * g + k % 8 / 2][high_row + 2 * (k / 8)];
            const uint64_t bv = e.word[4 * column + k % 8 / 2][4 + k / 8];
            sum += sl_emu_half(av, k & 1) * sl_emu_half(bv, k & 1);
        }
        c[i] = (float)sum;
    }
}

/* Depth k0 .. k0 + 15 of the product of bytes; registers as in linear_port.cuh. */
static inline void sl_emu_mma_s8(int c[4], const sl_emu_exchange &e, int a_first, int b_word)
{
    const int g = sl_emu_me().index % 32 / 4;
    const int t = sl_emu_me().index % 4;
    for (int i = 0; i < 4; i++) {
        const int column = 2 * t + (i & 1);
        for (int k = 0; k < 16; k++) {
            const int8_t av = (int8_t)(e.word[4 * g + k / 4][a_first + (i >> 1)] >> 8 * (k & 3));
            const int8_t bv = (int8_t)(e.word[4 * column + k / 4][b_word] >> 8 * (k & 3));
            c[i] += (int)av * (int)bv;
        }
    }
}

static inline void sl_mma_s8_k16(int c[4], uint32_t a0, uint32_t a1, uint32_t b0)
{
    const uint64_t words[3] = {a0, a1, b0};
    const sl_emu_exchange &e = sl_emu_share(words, 3);
    sl_emu_mma_s8(c, e, 0, 2);
}

static inline void sl_mma_s8_k32(int c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    const uint64_t words[6] = {a[0], a[1], a[2], a[3], b0, b1};
    const sl_emu_exchange &e = sl_emu_share(words, 6);
    sl_emu_mma_s8(c, e, 0, 4);
    sl_emu_mma_s8(c, e, 2, 5);
}

#endif
