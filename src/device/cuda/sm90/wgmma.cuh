/* SPDX-License-Identifier: Apache-2.0
 *
 * Instructions that only compute capability 9.0 has, as functions: barriers in shared memory that
 * count bytes, copies of tensor tiles to all blocks of a cluster, and products of a warp group.
 *
 * A product multiplies A [64, 16] in registers by B [16, N] in shared memory. Warp w of the group
 * holds rows 16w .. 16w + 15 of A and of the sums, in the layout of mma.sync (see mma.cuh): for
 * lane = 4 g + t, c[4 j + e] is row g, column 8 j + 2 t + e, and c[4 j + 2 + e] is row g + 8.
 * B is N rows of 64 f16, 128 bytes each, whose 16-byte pieces are swizzled by the row (piece p of
 * row r lies at p ^ (r & 7)); the tile starts at a multiple of 1024 bytes.
 *
 * Products run asynchronously: until the wait for their group, neither sums nor A may be touched.
 */
#ifndef SL_DEVICE_CUDA_SM90_WGMMA_CUH
#define SL_DEVICE_CUDA_SM90_WGMMA_CUH

#include <cuda.h>

#include "device/cuda/linear_port.cuh"

SL_DEV uint32_t sl_shared_u32(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* ---- barriers; addresses are of shared memory ---- */

SL_DEV void sl_barrier_init(uint32_t barrier, int n_arrivals)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(n_arrivals)
                 : "memory");
}

/* Make initialized barriers visible to the cluster and to asynchronous copies. */
SL_DEV void sl_barrier_publish(void)
{
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

/* Arrive, and expect `bytes` more to be copied before the phase ends. */
SL_DEV void sl_barrier_expect(uint32_t barrier, int bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}

/* Arrive at the barrier that block `rank` of the cluster has at the same address. Says no more than
 * that this thread has read what it wanted: order at the scope of the cluster would wait for all
 * stores to device memory, a microsecond each time. */
SL_DEV void sl_barrier_arrive(uint32_t barrier, int rank)
{
    asm volatile("{\n"
                 ".reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %0, %1;\n"
                 "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
                 "}" ::"r"(barrier),
                 "r"(rank)
                 : "memory");
}

/* Arrive at the block's own. */
SL_DEV void sl_barrier_arrive_here(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* Wait for the end of the phase of this parity. */
SL_DEV void sl_barrier_wait(uint32_t barrier, int parity)
{
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@!done bra again;\n"
                 "}" ::"r"(barrier),
                 "r"(parity)
                 : "memory");
}

/* ---- clusters ---- */

SL_DEV int sl_cluster_rank(void)
{
    uint32_t rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return (int)rank;
}

/* Four floats at the same address in block `rank`. */
SL_DEV float4 sl_cluster_load(uint32_t address, int rank)
{
    float4 v;
    asm volatile("{\n"
                 ".reg .b32 there;\n"
                 "mapa.shared::cluster.u32 there, %4, %5;\n"
                 "ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [there];\n"
                 "}"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address), "r"(rank)
                 : "memory");
    return v;
}

/* All threads of the cluster meet. */
SL_DEV void sl_cluster_sync(void)
{
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}

/* Barriers of some threads of a block, by number: arrive and wait, or only arrive. */
SL_DEV void sl_named_sync(int number, int n_threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(n_threads) : "memory");
}

SL_DEV void sl_named_arrive(int number, int n_threads)
{
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(n_threads) : "memory");
}

/* Make this thread's writes to shared memory visible to products. */
SL_DEV void sl_publish_shared(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

/* ---- registers: a warp group gives back all but N a thread, or waits until it has N ---- */

template <int N> SL_DEV void sl_registers_give(void)
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}

template <int N> SL_DEV void sl_registers_take(void)
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}

/* ---- copies ---- */

/* Queue the copy of the tile at (col, row) to shared memory; its bytes count at `barrier`. */
SL_DEV void sl_tile_copy(uint32_t to, const CUtensorMap *map, int col, int row, uint32_t barrier)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];" ::"r"(to),
                 "l"(map), "r"(col), "r"(row), "r"(barrier)
                 : "memory");
}

/* The same to the blocks of `mask`, at the same address in each, each with its own barrier. */
SL_DEV void sl_tile_multicast(uint32_t to, const CUtensorMap *map, int col, int row,
                              uint32_t barrier, uint16_t mask)
{
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
                 ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
                 "l"(map), "r"(col), "r"(row), "r"(barrier), "h"(mask)
                 : "memory");
}

/* ---- products ---- */

/* Order register writes before the products that follow. */
SL_DEV void sl_wgmma_fence(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

SL_DEV void sl_wgmma_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

/* Wait until at most N groups are under way. */
template <int N> SL_DEV void sl_wgmma_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

/* Keep the compiler from moving uses of the sums across. */
template <int N> SL_DEV void sl_wgmma_pin(float (&c)[N])
{
#pragma unroll
    for (int i = 0; i < N; i++) {
        asm volatile("" : "+f"(c[i])::"memory");
    }
}

/* What describes B to a product: see the head. Add 2 for each 16 columns of A. */
SL_DEV uint64_t sl_wgmma_tile(uint32_t address)
{
    const uint64_t swizzle_128 = UINT64_C(1) << 62;
    const uint64_t group_of_8_rows = UINT64_C(1024 / 16) << 32;
    return swizzle_128 | group_of_8_rows | UINT64_C(1) << 16 | (address & 0x3ffff) >> 4;
}

/* B [16, N] that lies as rows of k: each row is N / 64 pieces of 64 columns (128 swizzled bytes),
 * whole tiles of which are `piece_bytes` apart. Add 128 for each 16 rows. */
SL_DEV uint64_t sl_wgmma_turned_tile(uint32_t address, int piece_bytes)
{
    const uint64_t swizzle_128 = UINT64_C(1) << 62;
    const uint64_t group_of_8_rows = UINT64_C(1024 / 16) << 32;
    return swizzle_128 | group_of_8_rows | (uint64_t)(piece_bytes / 16) << 16 |
           (address & 0x3ffff) >> 4;
}

/* The operands of N / 2 sums, sixteen at a time. */
#define SL_C4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define SL_C16(i) SL_C4(i), SL_C4(i + 4), SL_C4(i + 8), SL_C4(i + 12)
#define SL_C32 SL_C16(0), SL_C16(16)
#define SL_C48 SL_C32, SL_C16(32)
#define SL_C64 SL_C48, SL_C16(48)
#define SL_C80 SL_C64, SL_C16(64)
#define SL_C96 SL_C80, SL_C16(80)
#define SL_C128 SL_C96, SL_C16(96), SL_C16(112)
#define SL_R16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define SL_R32 SL_R16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define SL_R48 SL_R32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define SL_R64 SL_R48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define SL_R80 SL_R64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define SL_R96 SL_R80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define SL_R128                                                                                    \
    SL_R96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"          \
           ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"

/* c = a b, with `add` c += a b, for N columns; the last operands are numbered behind the sums.
 * TURNED 1: B lies the other way, see sl_wgmma_turned_tile. */
#define SL_WGMMA(NAME, N, TURNED, SUMS, REGISTERS, A0, A1, A2, A3, B, ADD)                         \
    SL_DEV void NAME(float(&c)[N / 2], const uint32_t a[4], uint64_t b, int add)                   \
    {                                                                                              \
        asm volatile("{\n"                                                                         \
                     ".reg .pred add;\n"                                                           \
                     "setp.ne.b32 add, " ADD ", 0;\n"                                              \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" REGISTERS "}, "    \
                     "{" A0 "," A1 "," A2 "," A3 "}, " B ", add, 1, 1, " #TURNED ";\n"             \
                     "}"                                                                           \
                     : SUMS                                                                        \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));              \
    }

SL_WGMMA(sl_wgmma, 32, 0, SL_C16(0), SL_R16, "%16", "%17", "%18", "%19", "%20", "%21")
SL_WGMMA(sl_wgmma, 64, 0, SL_C32, SL_R32, "%32", "%33", "%34", "%35", "%36", "%37")
SL_WGMMA(sl_wgmma, 96, 0, SL_C48, SL_R48, "%48", "%49", "%50", "%51", "%52", "%53")
SL_WGMMA(sl_wgmma, 128, 0, SL_C64, SL_R64, "%64", "%65", "%66", "%67", "%68", "%69")
SL_WGMMA(sl_wgmma, 256, 0, SL_C128, SL_R128, "%128", "%129", "%130", "%131", "%132", "%133")
SL_WGMMA(sl_wgmma_turned, 128, 1, SL_C64, SL_R64, "%64", "%65", "%66", "%67", "%68", "%69")

#undef SL_WGMMA
#undef SL_C4
#undef SL_C16
#undef SL_C32
#undef SL_C48
#undef SL_C64
#undef SL_C80
#undef SL_C96
#undef SL_C128
#undef SL_R16
#undef SL_R32
#undef SL_R48
#undef SL_R64
#undef SL_R80
#undef SL_R96
#undef SL_R128

#endif
