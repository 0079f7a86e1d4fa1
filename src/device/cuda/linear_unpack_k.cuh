/* SPDX-License-Identifier: Apache-2.0
 *
 * Unpacking of the types with blocks of 256 weights (see linear_unpack.cuh). A block is four pieces
 * of 64; in the comments p is the piece of the block, h = p / 2 its half, c the unit of the piece.
 */
#ifndef SL_DEVICE_CUDA_LINEAR_UNPACK_K_CUH
#define SL_DEVICE_CUDA_LINEAR_UNPACK_K_CUH

#include "device/cuda/linear_unpack.cuh"

template <> struct sl_fmt<SL_TYPE_Q2_K> {
    static constexpr int items = 256, bytes = 84, align = 4, units = 8, offset = 0;
    static constexpr bool super_runs = true, far_groups = false, half_scales = true;
    static constexpr bool has_min = true, is_signed = false;
    static constexpr int n_raw = 6; /* levels, scales, d and dmin */

    template <class MEM>
    SL_HD_MEMBER static void load(uint32_t *raw, const uint8_t *block, int u, const MEM &mem)
    {
        sl_load_words<4, 4>(raw, block + 16 + 32 * (u >> 2) + 16 * (u & 1), mem);
        raw[4] = mem.u32(block + 4 * (u >> 1));
        raw[5] = mem.u32(block + 80);
    }

    SL_HD_MEMBER static void scale(uint32_t byte, float d, float dmin, float &s, float &m)
    {
        s = d * (float)(byte & 15);
        m = -dmin * (float)(byte >> 4 & 15);
    }

    SL_HD_MEMBER static void expand(const uint32_t *raw, const uint8_t *, int u, sl_unit &out)
    {
        const int shift = 4 * (u >> 1 & 1);
        const float d = sl_half_f32(raw[5]);
        const float dmin = sl_half_f32(raw[5] >> 16);
        const uint32_t sc = raw[4] >> 8 * (u & 1);
        scale(sc, d, dmin, out.s_lo, out.m_lo);
        scale(sc >> 16, d, dmin, out.s_hi, out.m_hi);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            out.lo[i] = raw[i] >> shift & 0x03030303u;
            out.hi[i] = raw[i] >> (shift + 2) & 0x03030303u;
        }
    }

    SL_HD_MEMBER static void frag(const uint8_t *block, int p, int t, int, sl_frag &out)
    {
        const sl_mem_shared mem;
        const int shift = 4 * (p & 1);
        const uint32_t sc = mem.u32(block + 4 * p);
        const uint32_t dd = mem.u32(block + 80);
        const float d = sl_half_f32(dd);
        const float dmin = sl_half_f32(dd >> 16);
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const uint32_t w = mem.u32(block + 16 + 32 * (p >> 1) + 16 * c + 4 * t);
            out.level[0][c] = w >> shift & 0x03030303u;
            out.level[1][c] = w >> (shift + 2) & 0x03030303u;
            scale(sc >> 8 * c, d, dmin, out.s[0][c], out.m[0][c]);
            scale(sc >> (8 * c + 16), d, dmin, out.s[1][c], out.m[1][c]);
        }
    }
};

template <> struct sl_fmt<SL_TYPE_Q3_K> {
    static constexpr int items = 256, bytes = 110, align = 2, units = 8, offset = 4;
    static constexpr bool super_runs = true, far_groups = false, half_scales = true;
    static constexpr bool has_min = false, is_signed = false;
    static constexpr int n_raw = 14; /* third bits 5, levels 5, scales and d 4 */

    template <class MEM>
    SL_HD_MEMBER static void load(uint32_t *raw, const uint8_t *block, int u, const MEM &mem)
    {
        sl_load_cover<16, 2, false>(raw, block + 16 * (u & 1), mem);
        sl_load_cover<16, 2, false>(raw + 5, block + 32 + 32 * (u >> 2) + 16 * (u & 1), mem);
        sl_load_cover<14, 2, true>(raw + 10, block + 96, mem);
    }

    /* Scales of the runs of unit (p, c); w is word p % 2 of the scales, s2 the last. */
    SL_HD_MEMBER static void scale(uint32_t w, uint32_t s2, int p, int c, float d, float &lo,
                                   float &hi)
    {
        const uint32_t low = w >> (4 * (p >> 1) + 8 * c);
        const uint32_t high = s2 >> (2 * p + 8 * c);
        lo = d * (float)((int)((low & 15) | (high & 3) << 4) - 32);
        hi = d * (float)((int)((low >> 16 & 15) | (high >> 16 & 3) << 4) - 32);
    }

    SL_HD_MEMBER static void levels(uint32_t qs, uint32_t mask, int p, uint32_t &lo, uint32_t &hi)
    {
        const int shift = 4 * (p & 1);
        lo = (qs >> shift & 0x03030303u) | (mask >> 2 * p & 0x01010101u) << 2;
        hi = (qs >> (shift + 2) & 0x03030303u) | (mask >> (2 * p + 1) & 0x01010101u) << 2;
    }

    SL_HD_MEMBER static void expand(const uint32_t *raw, const uint8_t *block, int u, sl_unit &out)
    {
        const uint32_t odd = sl_odd_bytes<2>(block);
        const int p = u >> 1;
        const float d = sl_half_f32(raw[13] >> 8 * odd);
        const uint32_t w =
            p & 1 ? sl_cover_word(raw + 10, 4, odd) : sl_cover_word(raw + 10, 0, odd);
        scale(w, sl_cover_word(raw + 10, 8, odd), p, u & 1, d, out.s_lo, out.s_hi);
        out.m_lo = out.m_hi = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            levels(sl_cover_word(raw + 5, 4 * i, odd), sl_cover_word(raw, 4 * i, odd), p, out.lo[i],
                   out.hi[i]);
        }
    }

    SL_HD_MEMBER static void frag(const uint8_t *block, int p, int t, int, sl_frag &out)
    {
        const float d = sl_half_f32(sl_mem_shared().u16(block + 108));
        const uint32_t w = sl_shared_word<2>(block + 96 + 4 * (p & 1));
        const uint32_t s2 = sl_shared_word<2>(block + 104);
#pragma unroll
        for (int c = 0; c < 2; c++) {
            levels(sl_shared_word<2>(block + 32 + 32 * (p >> 1) + 16 * c + 4 * t),
                   sl_shared_word<2>(block + 16 * c + 4 * t), p, out.level[0][c], out.level[1][c]);
            scale(w, s2, p, c, d, out.s[0][c], out.s[1][c]);
            out.m[0][c] = out.m[1][c] = 0.0f;
        }
    }
};

/* Scales and minima of both groups of piece p of Q4_K and Q5_K, as two bytes each; head: d and
 * dmin, then 12 bytes of scales. */
SL_HD void sl_k4_scales(const uint32_t *head, int p, float s[2], float m[2])
{
    const int shift = 16 * (p & 1);
    const uint32_t a = head[1] >> shift;
    const uint32_t b = head[2] >> shift;
    const uint32_t c = head[3] >> shift;
    const uint32_t sc = p < 2 ? a & 0x3f3fu : (c & 0x0f0fu) | (a >> 2 & 0x3030u);
    const uint32_t mn = p < 2 ? b & 0x3f3fu : (c >> 4 & 0x0f0fu) | (b >> 2 & 0x3030u);
    const float d = sl_half_f32(head[0]);
    const float dmin = sl_half_f32(head[0] >> 16);
    s[0] = d * (float)(sc & 0xff);
    s[1] = d * (float)(sc >> 8);
    m[0] = -dmin * (float)(mn & 0xff);
    m[1] = -dmin * (float)(mn >> 8);
}

/* Q4_K (HIGH false) and Q5_K. */
template <bool HIGH> struct sl_fmt_k4 {
    static constexpr int items = 256, bytes = HIGH ? 176 : 144, align = 16, units = 8, offset = 0;
    static constexpr bool super_runs = true, far_groups = false, half_scales = false;
    static constexpr bool has_min = true, is_signed = false;
    static constexpr int n_raw = HIGH ? 12 : 8; /* head, levels, fifth bits */
    static constexpr int qs = HIGH ? 48 : 16;

    template <class MEM>
    SL_HD_MEMBER static void load(uint32_t *raw, const uint8_t *block, int u, const MEM &mem)
    {
        sl_load_words<4, 16>(raw, block, mem);
        sl_load_words<4, 16>(raw + 4, block + qs + 16 * u, mem);
        if constexpr (HIGH) {
            sl_load_words<4, 16>(raw + 8, block + 16 + 16 * (u & 1), mem);
        }
    }

    SL_HD_MEMBER static void levels(uint32_t w, uint32_t high, int p, uint32_t &lo, uint32_t &hi)
    {
        lo = sl_nibbles(w, 0);
        hi = sl_nibbles(w, 1);
        if constexpr (HIGH) {
            lo |= (high >> 2 * p & 0x01010101u) << 4;
            hi |= (high >> (2 * p + 1) & 0x01010101u) << 4;
        }
    }

    SL_HD_MEMBER static void expand(const uint32_t *raw, const uint8_t *, int u, sl_unit &out)
    {
        float s[2], m[2];
        sl_k4_scales(raw, u >> 1, s, m);
        out.s_lo = s[0];
        out.s_hi = s[1];
        out.m_lo = m[0];
        out.m_hi = m[1];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            levels(raw[4 + i], HIGH ? raw[(HIGH ? 8 : 0) + i] : 0, u >> 1, out.lo[i], out.hi[i]);
        }
    }

    SL_HD_MEMBER static void frag(const uint8_t *block, int p, int t, int, sl_frag &out)
    {
        const sl_mem_shared mem;
        uint32_t head[4];
        float s[2], m[2];
        sl_load_words<4, 16>(head, block, mem);
        sl_k4_scales(head, p, s, m);
#pragma unroll
        for (int j = 0; j < 2; j++) {
            out.s[j][0] = s[j];
            out.m[j][0] = m[j];
        }
#pragma unroll
        for (int c = 0; c < 2; c++) {
            levels(mem.u32(block + qs + 32 * p + 16 * c + 4 * t),
                   HIGH ? mem.u32(block + 16 + 16 * c + 4 * t) : 0, p, out.level[0][c],
                   out.level[1][c]);
        }
    }
};

template <> struct sl_fmt<SL_TYPE_Q4_K> : sl_fmt_k4<false> {
};
template <> struct sl_fmt<SL_TYPE_Q5_K> : sl_fmt_k4<true> {
};

/* The two groups of a piece lie 64 weights apart: lo and hi nibbles of the same bytes. */
template <> struct sl_fmt<SL_TYPE_Q6_K> {
    static constexpr int items = 256, bytes = 210, align = 2, units = 8, offset = 32;
    static constexpr bool super_runs = true, far_groups = true, half_scales = true;
    static constexpr bool has_min = false, is_signed = false;
    static constexpr int n_raw = 13; /* low bits 5, high bits 5, two scales, d */

    template <class MEM>
    SL_HD_MEMBER static void load(uint32_t *raw, const uint8_t *block, int u, const MEM &mem)
    {
        sl_load_cover<16, 2, false>(raw, block + 16 * u, mem);
        sl_load_cover<16, 2, false>(raw + 5, block + 128 + 32 * (u >> 2) + 16 * (u & 1), mem);
        const uint8_t *sc = block + 192 + 8 * (u >> 2) + (u & 3);
        raw[10] = mem.u8(sc);
        raw[11] = mem.u8(sc + 4);
        raw[12] = mem.u16(block + 208);
    }

    SL_HD_MEMBER static void levels(uint32_t ql, uint32_t qh, int p, uint32_t &lo, uint32_t &hi)
    {
        const int shift = 2 * (p & 1);
        lo = sl_nibbles(ql, 0) | (qh >> shift & 0x03030303u) << 4;
        hi = sl_nibbles(ql, 1) | (qh >> (shift + 4) & 0x03030303u) << 4;
    }

    SL_HD_MEMBER static void expand(const uint32_t *raw, const uint8_t *block, int u, sl_unit &out)
    {
        const uint32_t odd = sl_odd_bytes<2>(block);
        const float d = sl_half_f32(raw[12]);
        out.s_lo = d * (float)(int8_t)raw[10];
        out.s_hi = d * (float)(int8_t)raw[11];
        out.m_lo = out.m_hi = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            levels(sl_cover_word(raw, 4 * i, odd), sl_cover_word(raw + 5, 4 * i, odd), u >> 1,
                   out.lo[i], out.hi[i]);
        }
    }

    SL_HD_MEMBER static void frag(const uint8_t *block, int p, int t, int, sl_frag &out)
    {
        const sl_mem_shared mem;
        const float d = sl_half_f32(mem.u16(block + 208));
        const uint8_t *sc = block + 192 + 8 * (p >> 1) + 2 * (p & 1);
#pragma unroll
        for (int c = 0; c < 2; c++) {
            levels(sl_shared_word<2>(block + 32 * p + 16 * c + 4 * t),
                   sl_shared_word<2>(block + 128 + 32 * (p >> 1) + 16 * c + 4 * t), p,
                   out.level[0][c], out.level[1][c]);
            out.s[0][c] = d * (float)(int8_t)mem.u8(sc + c);
            out.s[1][c] = d * (float)(int8_t)mem.u8(sc + c + 4);
            out.m[0][c] = out.m[1][c] = 0.0f;
        }
    }
};

/* Units are whole groups, ordered as blocks of 32. */
template <> struct sl_fmt<SL_TYPE_IQ4_XS> {
    static constexpr int items = 256, bytes = 136, align = 8, units = 8, offset = 0;
    static constexpr bool super_runs = false, far_groups = false, half_scales = false;
    static constexpr bool has_min = false, is_signed = true;
    static constexpr int n_raw = 6; /* head, levels */

    template <class MEM>
    SL_HD_MEMBER static void load(uint32_t *raw, const uint8_t *block, int u, const MEM &mem)
    {
        sl_load_words<2, 8>(raw, block, mem);
        sl_load_words<4, 8>(raw + 2, block + 8 + 16 * u, mem);
    }

    SL_HD_MEMBER static float scale(const uint32_t head[2], int g)
    {
        const uint32_t low = head[1] >> 4 * g & 15;
        const uint32_t high = head[0] >> (16 + 2 * g) & 3;
        return sl_half_f32(head[0]) * (float)((int)(low | high << 4) - 32);
    }

    SL_HD_MEMBER static void expand(const uint32_t *raw, const uint8_t *, int u, sl_unit &out)
    {
        out.s_lo = out.s_hi = scale(raw, u);
        out.m_lo = out.m_hi = 0.0f;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            sl_book_levels<SL_BOOK_IQ4>(raw[2 + i], out.lo[i], out.hi[i]);
        }
    }

    SL_HD_MEMBER static void frag(const uint8_t *block, int p, int t, int, sl_frag &out)
    {
        const sl_mem_shared mem;
        const uint2 h = mem.u64(block);
        const uint32_t head[2] = {h.x, h.y};
#pragma unroll
        for (int j = 0; j < 2; j++) {
            out.s[j][0] = scale(head, 2 * p + j);
            out.m[j][0] = 0.0f;
            sl_book_levels<SL_BOOK_IQ4>(mem.u32(block + 8 + 16 * (2 * p + j) + 4 * t),
                                        out.level[j][0], out.level[j][1]);
        }
    }
};

#endif
