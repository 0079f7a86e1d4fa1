/* SPDX-License-Identifier: Apache-2.0
 *
 * Quantized weights in the vector kernels: how a lane loads a unit of 32 weights and multiplies it
 * by x in shared memory. Units of a lane lie 32 apart, so that everything about x but a multiple of
 * the step is known before the loop. Types aligned to less than 4 bytes are read by 8-byte words
 * that cover their bytes: loads of whole lines in few instructions are what the L1 cache is fast
 * at.
 */
#ifndef SL_DEVICE_CUDA_LINEAR_VEC_DIRECT_CUH
#define SL_DEVICE_CUDA_LINEAR_VEC_DIRECT_CUH

#include "device/cuda/linear_unpack_k.cuh"
#include "device/cuda/linear_vec_stream.cuh"

/* ---- loads ---- */

constexpr int sl_cover8_words(int n_bytes, int align)
{
    return (n_bytes + 8 - (align < 8 ? align : 8) + 7) / 8 * 2;
}

/* The 8-byte words that cover N_BYTES at an address that p is, brought down to a multiple of 8.
 * near_end: they may reach past the matrix. */
template <int N_BYTES, int ALIGN>
SL_HD void sl_load_cover8(uint32_t *w, const uint8_t *p, const sl_mem_global &mem, bool near_end)
{
    constexpr int n = sl_cover8_words(N_BYTES, ALIGN);
#pragma unroll
    for (int i = 0; i < n; i += 2) {
        if (i == n - 2 && near_end) {
            const uint8_t *at = p + 4 * i;
            w[i] = mem.u32_tail(at);
            w[i + 1] = mem.u32_tail(at + 4);
        } else {
            const uint2 v = mem.u64(p + 4 * i);
            w[i] = v.x;
            w[i + 1] = v.y;
        }
    }
}

/* The words that sl_load_cover would have loaded from p. */
template <int N_BYTES, int ALIGN>
SL_HD void sl_settle_cover8(uint32_t *to, const uint32_t *w, const uint8_t *p)
{
    const bool second = ((uintptr_t)p & 4) != 0;
#pragma unroll
    for (int i = 0; i < sl_cover_words(N_BYTES, ALIGN); i++) {
        to[i] = second ? w[i + 1] : w[i];
    }
}

/* A number that the compiler keeps in its register: for lack of one it would compute it anew from
 * the lane for every unit, which costs more than what the unit itself does. */
SL_DEV int sl_vec_keep(int v)
{
#ifdef __CUDA_ARCH__
    asm volatile("" : "+r"(v));
#endif
    return v;
}

/* What a lane knows of its units once and for all. */
struct sl_vec_lane {
    int unit;     /* of the block */
    int shift;    /* Q4_K, Q5_K: of its pair of scales, */
    int far_mask; /* and which bits of them lie apart from the others */
};

/* Groups 0..3 of Q4_K and Q5_K have the six bits of their scales in one place, the others two there
 * and four in another. */
template <class F> SL_DEV sl_vec_lane sl_vec_lane_of(int lane)
{
    sl_vec_lane l;
    l.unit = sl_vec_keep(lane % F::units);
    l.shift = sl_vec_keep(16 * (l.unit >> 1 & 1));
    l.far_mask = sl_vec_keep(l.unit < 4 ? 0 : 0x0f0f);
    return l;
}

/* How a lane loads a unit, and what it makes of that. */
template <int TYPE> struct sl_vec_load {
    using F = sl_fmt<TYPE>;
    static constexpr bool covers = F::align < 4 && F::units == 1;
    static constexpr bool times16 = false; /* second runs' bytes are 16 times the level */
    static constexpr int n = covers ? sl_cover8_words(F::bytes, F::align) : F::n_raw;

    /* block8: `block` brought down to a multiple of 8. */
    SL_DEV_MEMBER static void load(uint32_t *raw, const uint8_t *block, const uint8_t *block8,
                                   int u, const sl_mem_global &mem, bool near_end)
    {
        if constexpr (covers) {
            sl_load_cover8<F::bytes, F::align>(raw, block8, mem, near_end);
        } else {
            F::load(raw, block, u, mem);
        }
    }

    SL_DEV_MEMBER static void expand(const uint32_t *raw, const uint8_t *block,
                                     const sl_vec_lane &l, sl_unit &out)
    {
        if constexpr (covers) {
            uint32_t settled[F::n_raw];
            sl_settle_cover8<F::bytes, F::align>(settled, raw, block);
            F::expand(settled, block, l.unit, out);
        } else {
            F::expand(raw, block, l.unit, out);
        }
    }
};

/* d * byte, exact in one product: the byte becomes 2^23 + byte, and d_less is -d * 2^23. */
SL_DEV float sl_vec_byte_times(uint32_t w, int high, float d, float d_less)
{
    const uint32_t bits = sl_bytes_pick(w, 0x4b000000u, high ? 0x7441 : 0x7440);
#ifdef __CUDA_ARCH__
    return __fmaf_rn(d, sl_bits_f32(bits), d_less);
#else
    return d * (sl_bits_f32(bits) - 8388608.0f) + 0.0f * d_less;
#endif
}

/* Q4_K and Q5_K. Q4_K leaves second runs where they are in the bytes: 16 times the level. */
template <bool HIGH> struct sl_vec_load_k4 {
    using F = sl_fmt_k4<HIGH>;
    static constexpr int n = F::n_raw;
    static constexpr bool covers = false, times16 = !HIGH;

    SL_DEV_MEMBER static void load(uint32_t *raw, const uint8_t *block, const uint8_t *, int u,
                                   const sl_mem_global &mem, bool)
    {
        F::load(raw, block, u, mem);
    }

    SL_DEV_MEMBER static void expand(const uint32_t *raw, const uint8_t *, const sl_vec_lane &l,
                                     sl_unit &out)
    {
        const uint32_t far_mask = (uint32_t)l.far_mask;
        const uint32_t near_mask = 0x3f3fu & ~far_mask;
        const int near_shift = l.shift | (l.far_mask & 2);
        const uint32_t c = raw[3] >> l.shift;
        const uint32_t sc = (raw[1] >> near_shift & near_mask) | (c & far_mask);
        const uint32_t mn = (raw[2] >> near_shift & near_mask) | (c >> 4 & far_mask);
        const float d = sl_half_f32(raw[0]);
        const float d_hi = times16 ? d * 0.0625f : d;
        const float m = -sl_half_f32(raw[0] >> 16);
        const float m_less = m * -8388608.0f;
        out.s_lo = sl_vec_byte_times(sc, 0, d, d * -8388608.0f);
        out.s_hi = sl_vec_byte_times(sc, 1, d_hi, d_hi * -8388608.0f);
        out.m_lo = sl_vec_byte_times(mn, 0, m, m_less);
        out.m_hi = sl_vec_byte_times(mn, 1, m, m_less);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if constexpr (HIGH) {
                F::levels(raw[4 + i], raw[8 + i], l.unit >> 1, out.lo[i], out.hi[i]);
            } else {
                out.lo[i] = raw[4 + i] & 0x0f0f0f0fu;
                out.hi[i] = raw[4 + i] & 0xf0f0f0f0u;
            }
        }
    }
};

template <> struct sl_vec_load<SL_TYPE_Q4_K> : sl_vec_load_k4<false> {
};
template <> struct sl_vec_load<SL_TYPE_Q5_K> : sl_vec_load_k4<true> {
};

template <> struct sl_vec_load<SL_TYPE_Q6_K> {
    using F = sl_fmt<SL_TYPE_Q6_K>;
    static constexpr int n = 15; /* low bits 6, high bits 6, two scales, d */
    static constexpr bool covers = false, times16 = false;

    SL_DEV_MEMBER static void load(uint32_t *raw, const uint8_t *block, const uint8_t *block8,
                                   int u, const sl_mem_global &mem, bool)
    {
        /* All these words end before the block does. */
        sl_load_cover8<16, 2>(raw, block8 + 16 * u, mem, false);
        sl_load_cover8<16, 2>(raw + 6, block8 + 128 + 32 * (u >> 2) + 16 * (u & 1), mem, false);
        const uint8_t *sc = block + 192 + 8 * (u >> 2) + (u & 3);
        raw[12] = mem.u8(sc);
        raw[13] = mem.u8(sc + 4);
        raw[14] = mem.u16(block + 208);
    }

    SL_DEV_MEMBER static void expand(const uint32_t *raw, const uint8_t *block,
                                     const sl_vec_lane &l, sl_unit &out)
    {
        uint32_t low[5], high[5];
        sl_settle_cover8<16, 2>(low, raw, block);
        sl_settle_cover8<16, 2>(high, raw + 6, block);
        const uint32_t odd = sl_odd_bytes<2>(block);
        const int shift = l.unit & 2; /* two bits for every odd piece */
        const float d = sl_half_f32(raw[14]);
        out.s_lo = d * (float)(int8_t)raw[12];
        out.s_hi = d * (float)(int8_t)raw[13];
        out.m_lo = out.m_hi = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t w = sl_cover_word(low, 4 * i, odd);
            const uint32_t h = sl_cover_word(high, 4 * i, odd) >> shift;
            out.lo[i] = (w & 0x0f0f0f0fu) | (h << 4 & 0x30303030u);
            out.hi[i] = (w >> 4 & 0x0f0f0f0fu) | (h & 0x30303030u);
        }
    }
};

/* ---- x ---- */

/* Where a lane's first unit meets x of the first token; later ones lie a multiple of 1024 levels
 * or 32 blocks on. The second run lies 1, 2 or 4 runs behind the first: one bit apart, before and
 * after the swizzle. */
struct sl_vec_x {
    const uint8_t *levels;
    const struct sl_xblock *blocks;
    int at;    /* byte of the first run */
    int block; /* and its block */
    int half;  /* shift of the runs' sum in sl_xblock, where a run is half a group */
};

template <class F> constexpr int sl_vec_run_step(void)
{
    return !F::super_runs ? 1 : F::far_groups ? 4 : 2;
}

template <class F>
SL_DEV sl_vec_x sl_vec_x_at(const uint8_t *levels, const struct sl_xblock *blocks, int unit)
{
    const int lo = sl_run_lo<F>(unit);
    sl_vec_x x;
    x.levels = levels;
    x.blocks = blocks;
    x.at = sl_vec_keep(16 * sl_vec_swizzle(lo));
    x.block = sl_vec_keep(lo >> 1);
    x.half = sl_vec_keep(16 * (lo & 1));
    return x;
}

/* sl_dot4 with a's bytes unsigned. */
SL_DEV int sl_vec_dot4_unsigned(uint32_t a, uint32_t b, int sum)
{
#ifdef __CUDA_ARCH__
    int out;
    asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(out) : "r"(a), "r"(b), "r"(sum));
    return out;
#else
    for (int i = 0; i < 4; i++) {
        sum += (int)(a >> 8 * i & 255) * (int)(int8_t)(b >> 8 * i);
    }
    return sum;
#endif
}

template <bool UNSIGNED> SL_DEV int sl_vec_dot16(const uint32_t w[4], const uint32_t x[4], int sum)
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        sum = UNSIGNED ? sl_vec_dot4_unsigned(w[i], x[i], sum) : sl_dot4(w[i], x[i], sum);
    }
    return sum;
}

/* x in shared memory. */
template <bool UNSIGNED> SL_DEV int sl_vec_dot16(const uint32_t w[4], const uint8_t *x, int sum)
{
    const uint4 v = *(const uint4 *)x;
    const uint32_t xs[4] = {v.x, v.y, v.z, v.w};
    return sl_vec_dot16<UNSIGNED>(w, xs, sum);
}

/* A unit times x, `at` levels on from the lane's first unit. */
template <class F, bool TIMES16>
SL_DEV float sl_vec_dot_x(const sl_unit &w, const sl_vec_x &x, int at, int token_levels,
                          int token_blocks)
{
    constexpr int step = sl_vec_run_step<F>();
    const uint8_t *levels = x.levels + token_levels + at;
    const uint8_t *lo = levels + x.at;
    const uint8_t *hi = levels + (x.at ^ 16 * step);
    const struct sl_xblock *b = x.blocks + token_blocks + at / 32 + x.block;
    const struct sl_xblock b_lo = b[0];
    if constexpr (!F::super_runs) {
        int sum = sl_vec_dot16<false>(w.lo, lo, SL_MAGIC_BITS);
        sum = sl_vec_dot16<false>(w.hi, hi, sum);
        float v = sl_magic_f32(sum);
        if constexpr (F::offset != 0 || F::has_min) {
            const float x_sum = sl_half_f32(b_lo.sums) + sl_half_f32(b_lo.sums >> 16);
            v = F::offset ? w.s_lo * (v - (float)F::offset * x_sum) : w.s_lo * v + w.m_lo * x_sum;
        } else {
            v *= w.s_lo;
        }
        return b_lo.d * v;
    } else {
        const struct sl_xblock b_hi = b[step / 2];
        float v_lo = sl_magic_f32(sl_vec_dot16<false>(w.lo, lo, SL_MAGIC_BITS));
        float v_hi = sl_magic_f32(sl_vec_dot16<TIMES16>(w.hi, hi, SL_MAGIC_BITS));
        const float x_lo = sl_half_f32(b_lo.sums >> x.half);
        const float x_hi = sl_half_f32(b_hi.sums >> x.half);
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

/* ---- what the stream knows of a type ---- */

/* x of a piece, with several tokens: in shared memory. */
template <int TYPE, int N, int P> struct sl_vec_packed_x {
    sl_vec_x x;
    int levels, blocks; /* of a token */
};

/* With one token: levels of both runs; scale of each, and scale times sum (times the type's
 * offset). Where runs lie in one block the first of each serves both. */
template <int TYPE, int P> struct sl_vec_packed_x<TYPE, 1, P> {
    struct {
        uint32_t lo[4], hi[4];
        float d[2], s[2];
    } unit[P];
};

template <int TYPE, int N> struct sl_vec_packed {
    using F = sl_fmt<TYPE>;
    using L = sl_vec_load<TYPE>;
    using lane = sl_vec_lane;
    template <int P> using x_piece = sl_vec_packed_x<TYPE, N, P>;
    static constexpr int tokens = N;
    static constexpr int n = L::n;               /* words of a unit */
    static constexpr int items = 32;             /* weights of a unit */
    static constexpr int per_block = F::units;   /* units of a block */
    static constexpr int block_bytes = F::bytes; /* in the matrix */
    /* Words of 8 bytes are read whole where a byte of theirs belongs to the matrix; these types may
     * also read others. */
    static constexpr bool reads_past = TYPE == SL_TYPE_Q5_0 || TYPE == SL_TYPE_Q3_K;
    static constexpr int max_piece = N > 1 ? 4 : 2; /* chunks, for x in registers */
    /* What the registers allow: 80, 96 or 128 for a thread. */
    static constexpr int max_warps = L::n > 8 || N > 2                   ? 16
                                     : L::n > 6 || N > 1 || F::is_signed ? 20
                                                                         : 24;

    SL_DEV_MEMBER static lane make_lane()
    {
        return sl_vec_lane_of<F>((int)threadIdx.x & 31);
    }

    SL_DEV_MEMBER static void load(uint32_t *raw, const uint8_t *at, const uint8_t *at8,
                                   const lane &l, const sl_mem_global &mem, bool last)
    {
        L::load(raw, at, at8, l.unit, mem, last);
    }

    SL_DEV_MEMBER static void take_run(uint32_t *to, const uint8_t *levels, int run)
    {
        const uint4 v = *(const uint4 *)(levels + 16 * sl_vec_swizzle(run));
        to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
    }

    /* The piece of x, in shared memory at `levels`, that begins with the lane's unit `unit`. */
    template <int P>
    SL_DEV_MEMBER static void take_x(x_piece<P> &x, const uint8_t *levels, int n_cols, int unit,
                                     const lane &)
    {
        const int stride = sl_vec_x_stride(n_cols);
        const struct sl_xblock *blocks = (const struct sl_xblock *)(levels + N * stride);
        if constexpr (N > 1) {
            x.x = sl_vec_x_at<F>(levels, blocks, unit);
            x.levels = stride;
            x.blocks = n_cols / 32;
        } else {
            constexpr float factor = F::offset ? (float)F::offset : 1.0f;
#pragma unroll
            for (int k = 0; k < P; k++) {
                const int run[2] = {sl_run_lo<F>(unit + 32 * k), sl_run_hi<F>(unit + 32 * k)};
                take_run(x.unit[k].lo, levels, run[0]);
                take_run(x.unit[k].hi, levels, run[1]);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const struct sl_xblock b = blocks[run[i] >> 1];
                    const float sum = F::super_runs
                                          ? sl_half_f32(b.sums >> 16 * (run[0] & 1))
                                          : sl_half_f32(b.sums) + sl_half_f32(b.sums >> 16);
                    x.unit[k].d[i] = b.d;
                    x.unit[k].s[i] = factor * (b.d * sum);
                }
            }
        }
    }

    /* The unit that was loaded from `at` times chunk k of the piece, for each token. */
    template <int P>
    SL_DEV_MEMBER static void dot(const uint32_t *raw, const uint8_t *at, const lane &l,
                                  const sl_vec_packed_x<TYPE, N, P> &x, int k, float v[N])
    {
        sl_unit w;
        L::expand(raw, at, l, w);
        if constexpr (N > 1) {
#pragma unroll
            for (int t = 0; t < N; t++) {
                v[t] = sl_vec_dot_x<F, L::times16>(w, x.x, 1024 * k, t * x.levels, t * x.blocks);
            }
        } else if constexpr (!F::super_runs) {
            const auto &u = x.unit[k];
            int sum = sl_vec_dot16<false>(w.lo, u.lo, SL_MAGIC_BITS);
            sum = sl_vec_dot16<false>(w.hi, u.hi, sum);
            const float p = u.d[0] * sl_magic_f32(sum);
            v[0] = F::offset    ? w.s_lo * (p - u.s[0])
                   : F::has_min ? w.s_lo * p + w.m_lo * u.s[0]
                                : w.s_lo * p;
        } else {
            const auto &u = x.unit[k];
            const float lo = u.d[0] * sl_magic_f32(sl_vec_dot16<false>(w.lo, u.lo, SL_MAGIC_BITS));
            const float hi =
                u.d[1] * sl_magic_f32(sl_vec_dot16<L::times16>(w.hi, u.hi, SL_MAGIC_BITS));
            v[0] = F::offset ? w.s_lo * (lo - u.s[0]) + w.s_hi * (hi - u.s[1])
                             : w.s_lo * lo + w.m_lo * u.s[0] + w.s_hi * hi + w.m_hi * u.s[1];
        }
    }
};

template <int TYPE>
static int sl_vec_dispatch(cudaStream_t stream, const struct sl_linear_args *args,
                           const struct sl_cuda_props *props)
{
    switch (args->n_tokens) {
    case 1:
        return sl_vec_launch<sl_vec_packed<TYPE, 1>>(stream, args, props);
    case 2:
        return sl_vec_launch<sl_vec_packed<TYPE, 2>>(stream, args, props);
    default:
        return sl_vec_launch<sl_vec_packed<TYPE, 4>>(stream, args, props);
    }
}

#endif
