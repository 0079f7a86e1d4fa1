/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrix times one or two vectors, quantized weights: bound by the bytes of the matrix.
 *
 * A warp takes whole rows. The bytes of its rows stream through a ring in shared memory that
 * belongs to the warp alone (no block barrier), filled by asynchronous 16-byte copies several
 * segments ahead and across row ends, so that the memory system always has kilobytes under way
 * whatever the alignment of the rows. A segment is 1024 weights, 32 to a lane.
 * x lies in shared memory as 8-bit blocks; the block packs it itself while the first segments
 * arrive. Its 16-byte pieces are swizzled so that all formats' run orders read without conflicts.
 */
#ifndef SL_DEVICE_CUDA_LINEAR_VEC_CUH
#define SL_DEVICE_CUDA_LINEAR_VEC_CUH

#include "device/cuda/linear_args.cuh"
#include "device/cuda/linear_pack.cuh"
#include "device/cuda/linear_unpack.cuh"

#define SL_VEC_WARPS 8
#define SL_VEC_THREADS (32 * SL_VEC_WARPS)
#define SL_VEC_RING 4096 /* bytes aimed at for a warp */

/* Geometry of a type's ring. A segment may start at any byte of a 16-byte piece. */
template <class F> struct sl_vec_ring {
    static constexpr int seg_bytes = 1024 / F::items * F::bytes;
    static constexpr int slot = F::align >= 16 ? seg_bytes : (seg_bytes + 15 + 15) / 16 * 16;
    static constexpr int want = SL_VEC_RING / slot;
    static constexpr int slots = want < 3 ? 3 : want > 8 ? 8 : want;
    static constexpr int bytes = slots * slot;
};

SL_HD int sl_vec_swizzle(int run)
{
    return run ^ (7 * (run >> 3 & 1));
}

/* Bytes of a token's packed levels, whole swizzle groups. */
SL_HD int sl_vec_x_stride(int n_cols)
{
    return (n_cols + 255) & ~255;
}

/* Pack x of up to N tokens into shared memory; missing tokens become zeros. Eight lanes share a
 * block of 32, four elements each. */
template <int N, int THREADS = SL_VEC_THREADS>
SL_DEV void sl_vec_pack_x(const struct sl_linear_args &a, uint8_t *levels, struct sl_xblock *blocks)
{
    const int lane = (int)threadIdx.x & 31;
    const int per_token = a.n_cols / 4;
    const int x_stride = sl_vec_x_stride(a.n_cols);
#pragma unroll 1
    for (int n = 0; n < N; n++) {
        const float *x = a.x + (int64_t)n * a.n_cols;
        const bool wide = ((uintptr_t)x & 15) == 0;
#pragma unroll 2
        for (int base = (int)threadIdx.x - lane; base < per_token; base += THREADS) {
            const int i = base + lane;
            float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            if (i < per_token && n < a.n_tokens) {
                if (wide) {
                    v = *(const float4 *)(x + 4 * i);
                } else {
                    v = make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
                }
            }
            float d, sum;
            const uint32_t q = sl_pack_levels(v, d, sum);
            const float other = sl_shfl_xor(sum, 4);
            if (i < per_token) {
                const int run = sl_vec_swizzle(i >> 2);
                *(uint32_t *)(levels + n * x_stride + 16 * run + 4 * (i & 3)) = q;
                if ((lane & 7) == 0) {
                    struct sl_xblock *b = &blocks[n * (a.n_cols / 32) + (i >> 3)];
                    b->d = d;
                    b->sums = sl_pack_half2(sum, other);
                }
            }
        }
    }
}

/* The same from scratch, where x was packed once for all blocks. */
template <int N, int THREADS = SL_VEC_THREADS>
SL_DEV void sl_vec_copy_x(const struct sl_linear_args &a, uint8_t *levels, struct sl_xblock *blocks)
{
    const int runs = a.n_cols / 16;
    const int x_stride = sl_vec_x_stride(a.n_cols);
    const uint8_t *src = (const uint8_t *)a.xs;
    const struct sl_xblock *src_blocks =
        (const struct sl_xblock *)(src + (int64_t)a.n_tokens * a.n_cols);
#pragma unroll 1
    for (int n = 0; n < N; n++) {
        const bool there = n < a.n_tokens;
        for (int i = (int)threadIdx.x; i < runs; i += THREADS) {
            const uint4 v = there ? *(const uint4 *)(src + (int64_t)n * a.n_cols + 16 * i)
                                  : make_uint4(0, 0, 0, 0);
            *(uint4 *)(levels + n * x_stride + 16 * sl_vec_swizzle(i)) = v;
        }
        for (int i = (int)threadIdx.x; i < runs / 2; i += THREADS) {
            struct sl_xblock b = {0.0f, 0};
            if (there) {
                b = src_blocks[n * (runs / 2) + i];
            }
            blocks[n * (runs / 2) + i] = b;
        }
    }
}

/* sum += the 16 levels of a run times those of x. */
SL_DEV int sl_vec_dot_run(const uint32_t w[4], const uint8_t *levels, int run, int sum)
{
    const uint4 x = *(const uint4 *)(levels + 16 * sl_vec_swizzle(run));
    sum = sl_dot4(w[0], x.x, sum);
    sum = sl_dot4(w[1], x.y, sum);
    sum = sl_dot4(w[2], x.z, sum);
    return sl_dot4(w[3], x.w, sum);
}

/* One unit of 32 weights times x: `u` counts from the row's start. */
template <class F>
SL_DEV float sl_vec_dot_unit(const sl_unit &w, const uint8_t *levels,
                             const struct sl_xblock *blocks, int u)
{
    const int lo = sl_run_lo<F>(u);
    const int hi = sl_run_hi<F>(u);
    if constexpr (!F::super_runs) {
        const struct sl_xblock b = blocks[u];
        int sum = sl_vec_dot_run(w.lo, levels, lo, SL_MAGIC_BITS);
        sum = sl_vec_dot_run(w.hi, levels, hi, sum);
        float v = sl_magic_f32(sum);
        if constexpr (F::offset != 0 || F::has_min) {
            const float x_sum = sl_half_f32(b.sums) + sl_half_f32(b.sums >> 16);
            v = F::offset ? w.s_lo * (v - (float)F::offset * x_sum) : w.s_lo * v + w.m_lo * x_sum;
        } else {
            v *= w.s_lo;
        }
        return b.d * v;
    } else {
        const struct sl_xblock b_lo = blocks[lo >> 1];
        const struct sl_xblock b_hi = blocks[hi >> 1];
        float v_lo = sl_magic_f32(sl_vec_dot_run(w.lo, levels, lo, SL_MAGIC_BITS));
        float v_hi = sl_magic_f32(sl_vec_dot_run(w.hi, levels, hi, SL_MAGIC_BITS));
        /* Unit u holds half u % 2 of either group. */
        const int half = 16 * (u & 1);
        const float x_lo = sl_half_f32(b_lo.sums >> half);
        const float x_hi = sl_half_f32(b_hi.sums >> half);
        if constexpr (F::offset != 0) {
            v_lo = w.s_lo * (v_lo - (float)F::offset * x_lo);
            v_hi = w.s_hi * (v_hi - (float)F::offset * x_hi);
        } else {
            v_lo = w.s_lo * v_lo + w.m_lo * x_lo;
            v_hi = w.s_hi * v_hi + w.m_hi * x_hi;
        }
        return b_lo.d * v_lo + b_hi.d * v_hi;
    }
}

/* The rows of a warp, in order: job after job; a gated job is the gate's row, then up's. */
struct sl_vec_rows {
    int first, stride, n;
};

SL_DEV const uint8_t *sl_vec_row(const struct sl_linear_args &a, const sl_vec_rows &rows, int i,
                                 int &part, int &row)
{
    if (a.activation != SL_ACT_NONE) {
        part = i & 1;
        row = rows.first + (i >> 1) * rows.stride;
    } else {
        row = rows.first + i * rows.stride;
        part = sl_part_of_tile(a, row);
        row -= a.part[part].first;
    }
    return a.part[part].w + row * a.row_bytes;
}

/* Queue the copies of a segment: the aligned 16-byte pieces that hold bytes [at, at + bytes). */
SL_DEV void sl_vec_fetch(uint8_t *slot, const uint8_t *at, int bytes, int lane)
{
    const uint8_t *from = at - ((uintptr_t)at & 15);
    const int n = (int)(at - from) + bytes;
    for (int i = 16 * lane; i < n; i += 512) {
        sl_copy16(slot + i, from + i, n - i < 16 ? n - i : 16);
    }
}

template <int TYPE, int N>
__global__ void __launch_bounds__(SL_VEC_THREADS)
    sl_vec_kernel(SL_KERNEL_ARG struct sl_linear_args a)
{
    using F = sl_fmt<TYPE>;
    using R = sl_vec_ring<F>;
    SL_SHARED(shared);
    const int lane = (int)threadIdx.x & 31;
    const int warp = (int)threadIdx.x >> 5;
    uint8_t *ring = shared + warp * R::bytes;
    uint8_t *levels = shared + SL_VEC_WARPS * R::bytes;
    const int x_stride = sl_vec_x_stride(a.n_cols);
    struct sl_xblock *blocks = (struct sl_xblock *)(levels + N * x_stride);

    const bool gated = a.activation != SL_ACT_NONE;
    sl_vec_rows rows;
    rows.first = (int)blockIdx.x * SL_VEC_WARPS + warp;
    rows.stride = (int)gridDim.x * SL_VEC_WARPS;
    rows.n = rows.first < a.n_tiles ? (a.n_tiles - rows.first + rows.stride - 1) / rows.stride : 0;
    rows.n = gated ? 2 * rows.n : rows.n;
    const int n_units = a.n_cols / 32;
    const int n_segs = (n_units + 31) / 32;

    /* Where copies are: row and segment, and how many segments are left to queue. */
    int part, row;
    int ahead_row = 0, ahead_seg = 0, ahead_slot = 0;
    int left = rows.n * n_segs;
    const uint8_t *ahead = rows.n ? sl_vec_row(a, rows, 0, part, row) : NULL;
    auto fetch_next = [&]() {
        if (left > 0) {
            const int64_t at = (int64_t)ahead_seg * R::seg_bytes;
            const int64_t rest = a.row_bytes - at;
            sl_vec_fetch(ring + ahead_slot * R::slot, ahead + at,
                         rest < R::seg_bytes ? (int)rest : R::seg_bytes, lane);
            left--;
            if (++ahead_seg == n_segs) {
                ahead_seg = 0;
                if (++ahead_row < rows.n) {
                    int p, r;
                    ahead = sl_vec_row(a, rows, ahead_row, p, r);
                }
            }
            ahead_slot = ahead_slot + 1 == R::slots ? 0 : ahead_slot + 1;
        }
        sl_copy_commit();
    };
    for (int i = 0; i < R::slots - 1; i++) {
        fetch_next();
    }
    if (a.x_packed) {
        sl_vec_copy_x<N>(a, levels, blocks);
    } else {
        sl_vec_pack_x<N>(a, levels, blocks);
    }
    sl_block_sync();

    float gate[N] = {};
    int slot = 0;
    for (int i = 0; i < rows.n; i++) {
        const uint8_t *w = sl_vec_row(a, rows, i, part, row);
        float sum[N];
#pragma unroll
        for (int n = 0; n < N; n++) {
            sum[n] = 0.0f;
        }
        for (int seg = 0; seg < n_segs; seg++) {
            sl_copy_wait<R::slots - 2>();
            sl_warp_sync(); /* every lane's pieces are there, and the slot before is free */
            fetch_next();
            const int u = 32 * seg + lane;
            if (u < n_units) {
                const uint8_t *block =
                    ring + slot * R::slot +
                    (F::align >= 16 ? 0 : (((uintptr_t)w + (uint32_t)(seg * R::seg_bytes)) & 15)) +
                    lane / F::units * F::bytes;
                uint32_t raw[F::n_raw];
                sl_unit unit;
                F::load(raw, block, lane % F::units, sl_mem_shared());
                F::expand(raw, block, lane % F::units, unit);
#pragma unroll
                for (int n = 0; n < N; n++) {
                    sum[n] +=
                        sl_vec_dot_unit<F>(unit, levels + n * x_stride, blocks + n * n_units, u);
                }
            }
            slot = slot + 1 == R::slots ? 0 : slot + 1;
        }
#pragma unroll
        for (int n = 0; n < N; n++) {
#pragma unroll
            for (int mask = 16; mask; mask >>= 1) {
                sum[n] += sl_shfl_xor(sum[n], mask);
            }
            if (gated && part == 0) {
                gate[n] = sum[n];
            } else if (lane == n && n < a.n_tokens) {
                if (gated) {
                    sl_store_gated(a, n, row, gate[n], sum[n]);
                } else {
                    sl_store_y(a, a.part[part], n, row, sum[n]);
                }
            }
        }
    }
}

template <int TYPE, int N>
static int sl_vec_launch(cudaStream_t stream, const struct sl_linear_args *args, int n_sm)
{
    using R = sl_vec_ring<sl_fmt<TYPE>>;
    const size_t shared = (size_t)SL_VEC_WARPS * R::bytes +
                          (size_t)N * ((size_t)sl_vec_x_stride(args->n_cols) +
                                       (size_t)args->n_cols / 32 * sizeof(struct sl_xblock));
    /* Two or three blocks to a multiprocessor, and as many rows to every warp. */
    const int most = 3 * n_sm * SL_VEC_WARPS;
    const int rounds = (args->n_tiles + most - 1) / most;
    const int warps = (args->n_tiles + rounds - 1) / rounds;
    const int blocks = (warps + SL_VEC_WARPS - 1) / SL_VEC_WARPS;
    return SL_LAUNCH((sl_vec_kernel<TYPE, N>), dim3((unsigned)blocks), dim3(SL_VEC_THREADS), shared,
                     stream, *args);
}

template <int TYPE>
static int sl_vec_dispatch(cudaStream_t stream, const struct sl_linear_args *args, int n_sm)
{
    return args->n_tokens == 1 ? sl_vec_launch<TYPE, 1>(stream, args, n_sm)
                               : sl_vec_launch<TYPE, 2>(stream, args, n_sm);
}

#endif
