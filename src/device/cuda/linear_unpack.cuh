/* SPDX-License-Identifier: Apache-2.0
 *
 * Unpacking of quantized blocks for the matrix products. `sl_fmt<TYPE>` describes a type by
 *
 *   unit     32 weights of a row that one thread unpacks: two runs of 16. Unit u of a row lies in
 *            block u / units. `raw` holds the 4-byte words that cover its bytes: loading and
 *            expanding are apart, so that loads can be under way while other work is done.
 *   piece    64 weights: units 2p and 2p + 1, made of two groups of 32 ("A" and "B").
 *            For types with `super_runs`, A is made of both units' first runs and B of their second
 *            ones; otherwise A is the first unit and B the second.
 *   weight   s * (level - offset) + m, with `s` and `m` of the run; levels are bytes.
 *
 * Rows may start at any byte: words are loaded aligned and shifted together. All helpers also
 * compile for the CPU, where a test holds them against sl_dequantize_row.
 */
#ifndef SL_DEVICE_CUDA_LINEAR_UNPACK_CUH
#define SL_DEVICE_CUDA_LINEAR_UNPACK_CUH

#include "device/cuda/linear_port.cuh"

/* ---- loads ---- */

/* Shared memory: reading some bytes past a row is harmless. */
struct sl_mem_shared {
    SL_HD_MEMBER uint32_t u8(const uint8_t *p) const
    {
        return *p;
    }
    SL_HD_MEMBER uint32_t u16(const uint8_t *p) const
    {
        SL_CHECK_ALIGN(p, 2);
        return *(const uint16_t *)p;
    }
    SL_HD_MEMBER uint32_t u32(const uint8_t *p) const
    {
        SL_CHECK_ALIGN(p, 4);
        return *(const uint32_t *)p;
    }
    SL_HD_MEMBER uint32_t u32_tail(const uint8_t *p) const
    {
        return u32(p);
    }
    SL_HD_MEMBER uint2 u64(const uint8_t *p) const
    {
        SL_CHECK_ALIGN(p, 8);
        return *(const uint2 *)p;
    }
    SL_HD_MEMBER uint4 u128(const uint8_t *p) const
    {
        SL_CHECK_ALIGN(p, 16);
        return *(const uint4 *)p;
    }
};

/* Device memory of a matrix that ends at `end`: nothing past it is read by u32_tail. */
struct sl_mem_global {
    const uint8_t *end;

    SL_HD_MEMBER uint32_t u8(const uint8_t *p) const
    {
        return SL_LDG(p);
    }
    SL_HD_MEMBER uint32_t u16(const uint8_t *p) const
    {
        SL_CHECK_ALIGN(p, 2);
        return SL_LDG((const unsigned short *)p);
    }
    SL_HD_MEMBER uint32_t u32(const uint8_t *p) const
    {
        SL_CHECK_ALIGN(p, 4);
        return SL_LDG((const unsigned int *)p);
    }
    SL_HD_MEMBER uint32_t u32_tail(const uint8_t *p) const
    {
        if (p + 4 <= end) {
            return u32(p);
        }
        uint32_t v = 0;
        for (int i = 0; i < 3; i++) {
            v |= p + i < end ? u8(p + i) << 8 * i : 0;
        }
        return v;
    }
    SL_HD_MEMBER uint2 u64(const uint8_t *p) const
    {
        SL_CHECK_ALIGN(p, 8);
        return SL_LDG((const uint2 *)p);
    }
    SL_HD_MEMBER uint4 u128(const uint8_t *p) const
    {
        SL_CHECK_ALIGN(p, 16);
        return SL_LDG((const uint4 *)p);
    }
};

/* N words from p, which is aligned to ALIGN (4 at least). */
template <int N, int ALIGN, class MEM>
SL_HD void sl_load_words(uint32_t *w, const uint8_t *p, const MEM &mem)
{
    if constexpr (ALIGN >= 16 && N % 4 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            const uint4 v = mem.u128(p + 4 * i);
            w[i] = v.x;
            w[i + 1] = v.y;
            w[i + 2] = v.z;
            w[i + 3] = v.w;
        }
    } else if constexpr (ALIGN >= 8 && N % 2 == 0) {
#pragma unroll
        for (int i = 0; i < N; i += 2) {
            const uint2 v = mem.u64(p + 4 * i);
            w[i] = v.x;
            w[i + 1] = v.y;
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) {
            w[i] = mem.u32(p + 4 * i);
        }
    }
}

/* Bytes that an address lies past a multiple of 4, as far as ALIGN leaves that open. */
template <int ALIGN> SL_HD uint32_t sl_odd_bytes(const uint8_t *p)
{
    return ALIGN >= 4 ? 0u : (uint32_t)(uintptr_t)p & 3u;
}

/* Words that cover `n_bytes` at any address of alignment `align`. */
constexpr int sl_cover_words(int n_bytes, int align)
{
    return align >= 4 ? (n_bytes + 3) / 4 : (n_bytes + 4 - align + 3) / 4;
}

/* Load the cover of N_BYTES at p. TAIL: the cover may reach past the matrix. */
template <int N_BYTES, int ALIGN, bool TAIL, class MEM>
SL_HD void sl_load_cover(uint32_t *w, const uint8_t *p, const MEM &mem)
{
    constexpr int n = sl_cover_words(N_BYTES, ALIGN);
    if constexpr (ALIGN >= 4) {
        sl_load_words<n, ALIGN>(w, p, mem);
    } else {
        p -= sl_odd_bytes<ALIGN>(p);
#pragma unroll
        for (int i = 0; i < n; i++) {
            w[i] = TAIL && i == n - 1 ? mem.u32_tail(p + 4 * i) : mem.u32(p + 4 * i);
        }
    }
}

/* The word at byte `off` of a cover, for off % 4 + odd <= 4. */
SL_HD uint32_t sl_cover_word(const uint32_t *w, int off, uint32_t odd)
{
    return sl_funnel(w[off / 4], w[off / 4 + 1], 8 * ((uint32_t)(off % 4) + odd));
}

/* A word at any address of shared memory. */
template <int ALIGN> SL_HD uint32_t sl_shared_word(const uint8_t *p)
{
    const sl_mem_shared mem;
    if constexpr (ALIGN >= 4) {
        return mem.u32(p);
    } else {
        const uint32_t odd = sl_odd_bytes<ALIGN>(p);
        return sl_funnel(mem.u32(p - odd), mem.u32(p - odd + 4), 8 * odd);
    }
}

/* ---- pieces that formats share ---- */

struct sl_unit {
    uint32_t lo[4], hi[4]; /* levels of the first and the second run, four to a word */
    float s_lo, s_hi, m_lo, m_hi;
};

/* What thread t of a group of four holds of a piece: levels 4t..4t+3 and 16+4t.. of groups A and B
 * as [group][half], and scales as [group][half of 16] (half 1 only with `half_scales`). */
struct sl_frag {
    uint32_t level[2][2];
    float s[2][2], m[2][2];
};

SL_HD uint32_t sl_nibbles(uint32_t w, int high)
{
    return (high ? w >> 4 : w) & 0x0f0f0f0fu;
}

/* Bits 0..3 of `h` as bit 4 of four bytes. */
SL_HD uint32_t sl_spread_bit4(uint32_t h)
{
    return ((h & 15u) * 0x02040810u) & 0x10101010u;
}

/* Sixteen signed bytes looked up by the eight nibbles of w. */
SL_HD void sl_lookup16(uint32_t w, uint32_t t0, uint32_t t1, uint32_t t2, uint32_t t3, uint32_t &lo,
                       uint32_t &hi)
{
    const uint32_t index = w & 0x77777777u;
    /* Nibble i picks byte i of the first or of the second table half. */
    const uint32_t half = (w & 0x88888888u) >> 1 | 0x32103210u;
    const uint32_t a =
        sl_bytes_pick(sl_bytes_pick(t0, t1, index), sl_bytes_pick(t2, t3, index), half);
    const uint32_t b = sl_bytes_pick(sl_bytes_pick(t0, t1, index >> 16),
                                     sl_bytes_pick(t2, t3, index >> 16), half >> 16);
    lo = sl_bytes_pick(a, b, 0x6420);
    hi = sl_bytes_pick(a, b, 0x7531);
}

/* Levels less `offset` in every byte: bit 7 set first so that no byte borrows from the next. */
SL_HD uint32_t sl_bytes_less(uint32_t w, uint32_t offset)
{
    return ((w | 0x80808080u) - offset * 0x01010101u) ^ 0x80808080u;
}

SL_HD float sl_e8m0_half(uint32_t e)
{
    return sl_bits_f32(e < 2 ? 0x00200000u << e : (e - 1) << 23);
}

template <int TYPE> struct sl_fmt;

/* Where the runs of unit `u` of a row start, in runs of 16 weights from the row's start, and the
 * groups of 32 of piece `p`. */
template <class F> SL_HD int sl_run_lo(int u)
{
    if constexpr (!F::super_runs) {
        return 2 * u;
    } else if constexpr (F::far_groups) {
        return (u >> 3) * 16 + (u >> 2 & 1) * 8 + (u & 3);
    } else {
        return (u >> 1) * 4 + (u & 1);
    }
}

template <class F> SL_HD int sl_run_hi(int u)
{
    return sl_run_lo<F>(u) + (!F::super_runs ? 1 : F::far_groups ? 4 : 2);
}

template <class F> SL_HD int sl_group_a(int p)
{
    return F::far_groups ? (p >> 1) * 4 + (p & 1) : 2 * p;
}

template <class F> SL_HD int sl_group_b(int p)
{
    return sl_group_a<F>(p) + (F::far_groups ? 2 : 1);
}

/* ---- blocks of 32: scale, perhaps minimum, perhaps fifth bits, 16 bytes of nibbles ---- */

enum sl_book { SL_BOOK_NONE, SL_BOOK_IQ4, SL_BOOK_E2M1 };

template <int BOOK> SL_HD void sl_book_levels(uint32_t w, uint32_t &lo, uint32_t &hi)
{
    if constexpr (BOOK == SL_BOOK_IQ4) {
        sl_lookup16(w, 0xbfad9881u, 0xf6eaddcfu, 0x26190d01u, 0x71594535u, lo, hi);
    } else if constexpr (BOOK == SL_BOOK_E2M1) {
        sl_lookup16(w, 0x03020100u, 0x0c080604u, 0xfdfeff00u, 0xf4f8fafcu, lo, hi);
    } else {
        lo = sl_nibbles(w, 0);
        hi = sl_nibbles(w, 1);
    }
}

template <int BYTES, int ALIGN, int QS, int QH, bool MIN, int OFFSET, int BOOK>
struct sl_fmt_nibbles {
    static constexpr int items = 32, bytes = BYTES, align = ALIGN, units = 1, offset = OFFSET;
    static constexpr bool super_runs = false, far_groups = false, half_scales = false;
    static constexpr bool has_min = MIN, is_signed = BOOK != SL_BOOK_NONE;
    static constexpr int n_raw = sl_cover_words(BYTES, ALIGN);

    template <class MEM>
    SL_HD_MEMBER static void load(uint32_t *raw, const uint8_t *block, int, const MEM &mem)
    {
        sl_load_cover<BYTES, ALIGN, true>(raw, block, mem);
    }

    /* Bytes 0..3 of the block: scale and minimum. */
    SL_HD_MEMBER static void scales(uint32_t head, float &s, float &m)
    {
        s = BOOK == SL_BOOK_E2M1 ? sl_e8m0_half(head & 0xff) : sl_half_f32(head & 0xffff);
        m = MIN ? sl_half_f32(head >> 16) : 0.0f;
    }

    SL_HD_MEMBER static void levels(uint32_t w, uint32_t qh, int i, uint32_t &lo, uint32_t &hi)
    {
        sl_book_levels<BOOK>(w, lo, hi);
        if constexpr (QH > 0) {
            lo |= sl_spread_bit4(qh >> 4 * i);
            hi |= sl_spread_bit4(qh >> (16 + 4 * i));
        }
    }

    SL_HD_MEMBER static void expand(const uint32_t *raw, const uint8_t *block, int, sl_unit &out)
    {
        const uint32_t odd = sl_odd_bytes<ALIGN>(block);
        scales(ALIGN >= 4 ? raw[0] : sl_cover_word(raw, 0, odd), out.s_lo, out.m_lo);
        out.s_hi = out.s_lo;
        out.m_hi = out.m_lo;
        uint32_t qh = 0;
        if constexpr (QH > 0) {
            qh = ALIGN >= 4 ? raw[QH / 4] : sl_cover_word(raw, QH, odd);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t w = ALIGN >= 4 ? raw[QS / 4 + i] : sl_cover_word(raw, QS + 4 * i, odd);
            levels(w, qh, i, out.lo[i], out.hi[i]);
        }
    }

    /* Piece `p` counts from `block`, in shared memory; n_valid (1 or 2) of its blocks exist. */
    SL_HD_MEMBER static void frag(const uint8_t *block, int p, int t, int n_valid, sl_frag &out)
    {
        const sl_mem_shared mem;
        block += 2 * p * BYTES;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            if (j < n_valid) {
                uint32_t head;
                if constexpr (BOOK == SL_BOOK_E2M1) {
                    head = mem.u8(block);
                } else if constexpr (MIN) {
                    head = mem.u32(block);
                } else {
                    head = mem.u16(block);
                }
                scales(head, out.s[j][0], out.m[j][0]);
                const uint32_t qh = QH > 0 ? sl_shared_word<ALIGN>(block + QH) : 0;
                levels(sl_shared_word<ALIGN>(block + QS + 4 * t), qh, t, out.level[j][0],
                       out.level[j][1]);
            } else {
                out.s[j][0] = out.m[j][0] = 0.0f;
                out.level[j][0] = out.level[j][1] = 0;
            }
            block += BYTES;
        }
    }
};

template <> struct sl_fmt<SL_TYPE_Q4_0> : sl_fmt_nibbles<18, 2, 2, 0, false, 8, SL_BOOK_NONE> {
};
template <> struct sl_fmt<SL_TYPE_Q4_1> : sl_fmt_nibbles<20, 4, 4, 0, true, 0, SL_BOOK_NONE> {
};
template <> struct sl_fmt<SL_TYPE_Q5_0> : sl_fmt_nibbles<22, 2, 6, 2, false, 16, SL_BOOK_NONE> {
};
template <> struct sl_fmt<SL_TYPE_Q5_1> : sl_fmt_nibbles<24, 8, 8, 4, true, 0, SL_BOOK_NONE> {
};
template <> struct sl_fmt<SL_TYPE_IQ4_NL> : sl_fmt_nibbles<18, 2, 2, 0, false, 0, SL_BOOK_IQ4> {
};
template <> struct sl_fmt<SL_TYPE_MXFP4> : sl_fmt_nibbles<17, 1, 1, 0, false, 0, SL_BOOK_E2M1> {
};

template <> struct sl_fmt<SL_TYPE_Q8_0> {
    static constexpr int items = 32, bytes = 34, align = 2, units = 1, offset = 0;
    static constexpr bool super_runs = false, far_groups = false, half_scales = false;
    static constexpr bool has_min = false, is_signed = true;
    static constexpr int n_raw = sl_cover_words(34, 2);

    template <class MEM>
    SL_HD_MEMBER static void load(uint32_t *raw, const uint8_t *block, int, const MEM &mem)
    {
        sl_load_cover<34, 2, true>(raw, block, mem);
    }

    SL_HD_MEMBER static void expand(const uint32_t *raw, const uint8_t *block, int, sl_unit &out)
    {
        const uint32_t odd = sl_odd_bytes<2>(block);
        out.s_lo = out.s_hi = sl_half_f32(sl_cover_word(raw, 0, odd));
        out.m_lo = out.m_hi = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            out.lo[i] = sl_cover_word(raw, 2 + 4 * i, odd);
            out.hi[i] = sl_cover_word(raw, 18 + 4 * i, odd);
        }
    }

    SL_HD_MEMBER static void frag(const uint8_t *block, int p, int t, int n_valid, sl_frag &out)
    {
        block += 2 * p * 34;
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const bool valid = j < n_valid;
            out.m[j][0] = 0.0f;
            out.s[j][0] = valid ? sl_half_f32(sl_mem_shared().u16(block)) : 0.0f;
            out.level[j][0] = valid ? sl_shared_word<2>(block + 2 + 4 * t) : 0;
            out.level[j][1] = valid ? sl_shared_word<2>(block + 18 + 4 * t) : 0;
            block += 34;
        }
    }
};

#endif
