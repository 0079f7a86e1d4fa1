/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention kernels over the vector of cpu/vec.h. Included once by each instance, which names the
 * table it defines by ATTENTION_TABLE. See struct sl_cpu_attention_kernels for the layouts.
 *
 * Register blocks: tiles hold BLOCK x 2 vectors of sums, which covers the latency of the
 * multiply-adds; direct kernels hold ROWS x 4 keys, which reads a packed key once for ROWS query
 * heads and turns four sums into numbers together. Many heads hold WIDE x 2 keys, which halves the
 * conversions of keys, and WIDE x 2 vectors of values.
 */
#include "cpu/kernels.h"
#include "cpu/vec.h"
#include "quant/blocks.h"

#if VN == 16 /* 32 vector registers */
#define BLOCK 8
#define ROWS 4
#define WIDE 8
#else
#define BLOCK 4
#define ROWS 2
#define WIDE 0 /* too few registers */
#endif
#define KEYS 4
#define MAX_HEAD_DIM 256
#define INLINE static inline __attribute__((always_inline))

/* ---- Packed rows to float ---- */

static void unpack_q8_0(const struct sl_block_q8_0 *b, float *dst)
{
    const vf d = vset1_f16(b->d);
    for (int i = 0; i < SL_QK; i += VN) {
        vstore(dst + i, vmul(d, vload_i8(b->qs + i)));
    }
}

static void unpack_q4_0(const struct sl_block_q4_0 *b, float *dst)
{
    const vf d = vset1_f16(b->d);
    const vf eight = vset1(8.0f);
    for (int i = 0; i < 16; i += VN) {
        vstore(dst + i, vmul(d, vsub(vload_low4(b->qs + i), eight)));
        vstore(dst + 16 + i, vmul(d, vsub(vload_high4(b->qs + i), eight)));
    }
}

/* Rows of a KV head lie one after the other, so n rows are n * head_dim packed elements. */
static void unpack(enum sl_type type, const void *src, float *dst, int n, int head_dim)
{
    const int n_items = n * head_dim;
    if (type == SL_TYPE_F16) {
        for (int i = 0; i < n_items; i += VN) {
            vstore(dst + i, vload_f16((const uint16_t *)src + i));
        }
    } else if (type == SL_TYPE_Q8_0) {
        for (int i = 0; i < n_items / SL_QK; i++) {
            unpack_q8_0((const struct sl_block_q8_0 *)src + i, dst + i * SL_QK);
        }
    } else {
        for (int i = 0; i < n_items / SL_QK; i++) {
            unpack_q4_0((const struct sl_block_q4_0 *)src + i, dst + i * SL_QK);
        }
    }
}

/* ---- Direct: few rows ---- */

/* Four rows of keys or values that a direct kernel reads: F16 where they lie, others unpacked into
 * a buffer. Rows past the end repeat the last one. */
struct quad {
    const void *row[KEYS];
    bool half;
};

INLINE vf quad_load(const struct quad *quad, int row, int at, bool half)
{
    return half ? vload_f16((const uint16_t *)quad->row[row] + at)
                : vload((const float *)quad->row[row] + at);
}

static void quad_open(struct quad *quad, enum sl_type type, const void *rows, int n, int head_dim,
                      float *buffer)
{
    const char *base = rows;
    size_t row_bytes = sizeof(uint16_t) * (size_t)head_dim;
    quad->half = type == SL_TYPE_F16;
    if (!quad->half) {
        unpack(type, rows, buffer, n < KEYS ? n : KEYS, head_dim);
        base = (const char *)buffer;
        row_bytes = sizeof(float) * (size_t)head_dim;
    }
    for (int i = 0; i < KEYS; i++) {
        quad->row[i] = base + row_bytes * (size_t)(i < n ? i : n - 1);
    }
}

static size_t packed_bytes(enum sl_type type, int head_dim)
{
    return type == SL_TYPE_F16    ? sizeof(uint16_t) * (size_t)head_dim
           : type == SL_TYPE_Q8_0 ? sizeof(struct sl_block_q8_0) * (size_t)(head_dim / SL_QK)
                                  : sizeof(struct sl_block_q4_0) * (size_t)(head_dim / SL_QK);
}

INLINE void quad_scores(const struct quad *quad, const float *q, int n_rows, int head_dim,
                        bool half, int n_keys, float *s)
{
    vf sum[ROWS][KEYS];
    for (int r = 0; r < n_rows; r++) {
        for (int k = 0; k < KEYS; k++) {
            sum[r][k] = vset1(0.0f);
        }
    }
    for (int i = 0; i < head_dim; i += VN) {
        vf key[KEYS];
        for (int k = 0; k < KEYS; k++) {
            key[k] = quad_load(quad, k, i, half);
        }
        for (int r = 0; r < n_rows; r++) {
            const vf query = vload(q + r * head_dim + i);
            for (int k = 0; k < KEYS; k++) {
                sum[r][k] = vfma(query, key[k], sum[r][k]);
            }
        }
    }
    for (int r = 0; r < n_rows; r++) {
        float out[KEYS];
        vhsum4(sum[r][0], sum[r][1], sum[r][2], sum[r][3], out);
        if (n_keys == KEYS) {
            memcpy(s + r * SL_KV_BLOCK, out, sizeof(out));
            continue;
        }
        for (int k = 0; k < n_keys; k++) {
            s[r * SL_KV_BLOCK + k] = out[k];
        }
    }
}

/* Fetch what is read after this block, as many bytes as are read of it now. Blocks lie apart in
 * memory, and the processor's own prefetching starts anew at each. */
INLINE void fetch(const void *next, size_t at, size_t bytes)
{
    for (size_t i = 0; next != NULL && i < bytes; i += 64) {
        __builtin_prefetch((const char *)next + at + i);
    }
}

#if WIDE > 0
/* Keys k and k + 1 of the quad for WIDE rows. */
INLINE void wide_scores(const struct quad *quad, int k, const float *q, int head_dim, bool half,
                        int n_keys, float *s)
{
    vf sum[2 * WIDE]; /* row after row */
    for (int r = 0; r < 2 * WIDE; r++) {
        sum[r] = vset1(0.0f);
    }
    for (int i = 0; i < head_dim; i += VN) {
        const vf key0 = quad_load(quad, k, i, half);
        const vf key1 = quad_load(quad, k + 1, i, half);
        for (int r = 0; r < WIDE; r++) {
            const vf query = vload(q + r * head_dim + i);
            sum[2 * r] = vfma(query, key0, sum[2 * r]);
            sum[2 * r + 1] = vfma(query, key1, sum[2 * r + 1]);
        }
    }
    float out[2 * WIDE];
    vstore(out, vhsum16(sum));
    for (int r = 0; r < WIDE; r++) {
        if (k + 1 < n_keys) {
            memcpy(s + r * SL_KV_BLOCK + k, out + 2 * r, 2 * sizeof(float));
        } else {
            s[r * SL_KV_BLOCK + k] = out[2 * r];
        }
    }
}

/* As many whole WIDE rows as there are; returns their number. */
static int scores_of_wide(const struct quad *quad, const float *q, int n_rows, int head_dim,
                          int n_keys, float *s)
{
    int r = 0;
    for (; r + WIDE <= n_rows; r += WIDE) {
        for (int k = 0; k < n_keys; k += 2) {
            if (quad->half) {
                wide_scores(quad, k, q + r * head_dim, head_dim, true, n_keys, s + r * SL_KV_BLOCK);
            } else {
                wide_scores(quad, k, q + r * head_dim, head_dim, false, n_keys,
                            s + r * SL_KV_BLOCK);
            }
        }
    }
    return r;
}

/* Values of all keys for WIDE rows, a few columns at a time: their sums stay in registers, and no
 * value is turned into floats twice. */
static void values_of_wide(const float *p, const uint16_t *values, int n_keys, int head_dim,
                           float *o, const uint16_t *next)
{
    for (int i = 0; i < head_dim; i += 2 * VN) {
        vf sum[WIDE][2];
        for (int r = 0; r < WIDE; r++) {
            sum[r][0] = vload(o + r * head_dim + i);
            sum[r][1] = vload(o + r * head_dim + i + VN);
        }
        for (int k = 0; k < n_keys; k++) {
            fetch(next, 2 * (size_t)(k * head_dim + i), 1);
            const vf value0 = vload_f16(values + k * head_dim + i);
            const vf value1 = vload_f16(values + k * head_dim + i + VN);
            for (int r = 0; r < WIDE; r++) {
                const vf weight = vset1(p[r * SL_KV_BLOCK + k]);
                sum[r][0] = vfma(weight, value0, sum[r][0]);
                sum[r][1] = vfma(weight, value1, sum[r][1]);
            }
        }
        for (int r = 0; r < WIDE; r++) {
            vstore(o + r * head_dim + i, sum[r][0]);
            vstore(o + r * head_dim + i + VN, sum[r][1]);
        }
    }
}
#endif

/* Compile the block for every number of rows and both kinds of quad: sums stay in registers. */
#define DISPATCH_ROWS(call)                                                                        \
    switch (rows) {                                                                                \
    case 1:                                                                                        \
        call(1);                                                                                   \
        break;                                                                                     \
    case 2:                                                                                        \
        call(2);                                                                                   \
        break;                                                                                     \
    case 3:                                                                                        \
        call(ROWS < 3 ? ROWS : 3);                                                                 \
        break;                                                                                     \
    default:                                                                                       \
        call(ROWS);                                                                                \
        break;                                                                                     \
    }

static void scores_direct(enum sl_type type, const float *q, int n_rows, const void *keys,
                          int n_keys, int head_dim, float *s, const void *next)
{
    float buffer[KEYS * MAX_HEAD_DIM] __attribute__((aligned(64)));
    const size_t row_bytes = packed_bytes(type, head_dim);
    for (int k = 0; k < n_keys; k += KEYS) {
        const int n = n_keys - k < KEYS ? n_keys - k : KEYS;
        struct quad quad;
        quad_open(&quad, type, (const char *)keys + row_bytes * (size_t)k, n, head_dim, buffer);
        fetch(next, row_bytes * (size_t)k, row_bytes * (size_t)n);
        int r = 0;
#if WIDE > 0
        r = scores_of_wide(&quad, q, n_rows, head_dim, n, s + k);
#endif
        for (; r < n_rows; r += ROWS) {
            const int rows = n_rows - r < ROWS ? n_rows - r : ROWS;
            const float *qr = q + r * head_dim;
            float *sr = s + r * SL_KV_BLOCK + k;
            if (quad.half) {
#define CALL(rows) quad_scores(&quad, qr, rows, head_dim, true, n, sr)
                DISPATCH_ROWS(CALL)
#undef CALL
            } else {
#define CALL(rows) quad_scores(&quad, qr, rows, head_dim, false, n, sr)
                DISPATCH_ROWS(CALL)
#undef CALL
            }
        }
    }
}

INLINE void quad_values(const struct quad *quad, const float *p, int n_rows, int head_dim,
                        bool half, int n_keys, float *o)
{
    vf weight[ROWS][KEYS];
    for (int r = 0; r < n_rows; r++) {
        for (int k = 0; k < KEYS; k++) {
            weight[r][k] = vset1(k < n_keys ? p[r * SL_KV_BLOCK + k] : 0.0f);
        }
    }
    for (int i = 0; i < head_dim; i += VN) {
        vf value[KEYS];
        for (int k = 0; k < KEYS; k++) {
            value[k] = quad_load(quad, k, i, half);
        }
        for (int r = 0; r < n_rows; r++) {
            float * or = o + r * head_dim + i;
            vf sum = vload(or);
            for (int k = 0; k < KEYS; k++) {
                sum = vfma(weight[r][k], value[k], sum);
            }
            vstore(or, sum);
        }
    }
}

static void values_direct(enum sl_type type, const float *p, int n_rows, const void *values,
                          int n_keys, int head_dim, float *o, const void *next)
{
    float buffer[KEYS * MAX_HEAD_DIM] __attribute__((aligned(64)));
    const size_t row_bytes = packed_bytes(type, head_dim);
    int first = 0; /* row */
#if WIDE > 0
    for (; type == SL_TYPE_F16 && first + WIDE <= n_rows; first += WIDE) {
        values_of_wide(p + first * SL_KV_BLOCK, values, n_keys, head_dim, o + first * head_dim,
                       first + WIDE == n_rows ? next : NULL);
    }
#endif
    for (int k = 0; first < n_rows && k < n_keys; k += KEYS) {
        const int n = n_keys - k < KEYS ? n_keys - k : KEYS;
        struct quad quad;
        quad_open(&quad, type, (const char *)values + row_bytes * (size_t)k, n, head_dim, buffer);
        fetch(next, row_bytes * (size_t)k, row_bytes * (size_t)n);
        for (int r = first; r < n_rows; r += ROWS) {
            const int rows = n_rows - r < ROWS ? n_rows - r : ROWS;
            const float *pr = p + r * SL_KV_BLOCK + k;
            float * or = o + r * head_dim;
            if (quad.half) {
#define CALL(rows) quad_values(&quad, pr, rows, head_dim, true, n, or)
                DISPATCH_ROWS(CALL)
#undef CALL
            } else {
#define CALL(rows) quad_values(&quad, pr, rows, head_dim, false, n, or)
                DISPATCH_ROWS(CALL)
#undef CALL
            }
        }
    }
}

/* ---- Softmax ---- */

INLINE vf capped(vf s, float softcap)
{
    return softcap > 0.0f ? vmul(vset1(softcap), vtanh(vdiv(s, vset1(softcap)))) : s;
}

/* x where first <= index < end, else other. */
INLINE vf inside(vf index, vf first, vf end, vf x, vf other)
{
    return vless(index, first, other, vless(index, end, x, other));
}

static float softmax_direct(float *s, int first, int end, float softcap, float *max, float *sum)
{
    const vf lowest = vset1(-INFINITY);
    const vf vfirst = vset1((float)first), vend = vset1((float)end);
    vf top = lowest;
    for (int k = 0; k < SL_KV_BLOCK; k += VN) {
        const vf index = vadd(viota(), vset1((float)k));
        const vf x = inside(index, vfirst, vend, capped(vload(s + k), softcap), lowest);
        top = vmax(top, x);
        vstore(s + k, x);
    }
    const float block_max = vhmax(top);
    const float new_max = block_max > *max ? block_max : *max;
    /* Before the first key both are -infinity, whose difference would be NaN. */
    const float base = new_max == -INFINITY ? 0.0f : new_max;
    vf total = vset1(0.0f);
    for (int k = 0; k < SL_KV_BLOCK; k += VN) {
        const vf p = vexp(vsub(vload(s + k), vset1(base)));
        total = vadd(total, p);
        vstore(s + k, p);
    }
    const float factor = *max == new_max ? 1.0f : expf(*max - base);
    *sum = *sum * factor + vhsum(total);
    *max = new_max;
    return factor;
}

static void softmax_tile(float *s, int n_rows, int n_keys, const float *first, const float *end,
                         float softcap, float *max, float *sum, float *factor)
{
    const vf lowest = vset1(-INFINITY);
    for (int r = 0; r < n_rows; r += VN) {
        const vf vfirst = vload(first + r), vend = vload(end + r);
        const vf old_max = vload(max + r);
        vf top = old_max;
        for (int k = 0; k < n_keys; k++) {
            float *at = s + k * n_rows + r;
            const vf index = vset1((float)k);
            const vf x = inside(index, vfirst, vend, capped(vload(at), softcap), lowest);
            top = vmax(top, x);
            vstore(at, x);
        }
        const vf base = vless(lowest, top, top, vset1(0.0f));
        vf total = vset1(0.0f);
        for (int k = 0; k < n_keys; k++) {
            float *at = s + k * n_rows + r;
            const vf p = vexp(vsub(vload(at), base));
            total = vadd(total, p);
            vstore(at, p);
        }
        const vf scale = vexp(vsub(old_max, base));
        vstore(factor + r, scale);
        vstore(sum + r, vfma(vload(sum + r), scale, total));
        vstore(max + r, top);
    }
}

/* ---- Tiles: many rows ---- */

static void scores_tile(const float *q, int n_rows, const float *keys, int n_keys, int head_dim,
                        float *s)
{
    for (int k = 0; k < n_keys; k += BLOCK) {
        for (int r = 0; r < n_rows; r += 2 * VN) {
            vf a[BLOCK], b[BLOCK];
            for (int j = 0; j < BLOCK; j++) {
                a[j] = vset1(0.0f);
                b[j] = vset1(0.0f);
            }
            const float *key = keys + k * head_dim;
            for (int i = 0; i < head_dim; i++) {
                const vf q0 = vload(q + i * n_rows + r);
                const vf q1 = vload(q + i * n_rows + r + VN);
                for (int j = 0; j < BLOCK; j++) {
                    const vf x = vset1(key[j * head_dim + i]);
                    a[j] = vfma(x, q0, a[j]);
                    b[j] = vfma(x, q1, b[j]);
                }
            }
            for (int j = 0; j < BLOCK; j++) {
                vstore(s + (k + j) * n_rows + r, a[j]);
                vstore(s + (k + j) * n_rows + r + VN, b[j]);
            }
        }
    }
}

static void values_tile(const float *p, int n_rows, const float *values, int n_keys, int head_dim,
                        float *o)
{
    for (int r = 0; r < n_rows; r += BLOCK) {
        for (int i = 0; i < head_dim; i += 2 * VN) {
            vf a[BLOCK], b[BLOCK];
            for (int j = 0; j < BLOCK; j++) {
                a[j] = vload(o + (r + j) * head_dim + i);
                b[j] = vload(o + (r + j) * head_dim + i + VN);
            }
            for (int k = 0; k < n_keys; k++) {
                const vf v0 = vload(values + k * head_dim + i);
                const vf v1 = vload(values + k * head_dim + i + VN);
                const float *weight = p + k * n_rows + r;
                for (int j = 0; j < BLOCK; j++) {
                    const vf x = vset1(weight[j]);
                    a[j] = vfma(x, v0, a[j]);
                    b[j] = vfma(x, v1, b[j]);
                }
            }
            for (int j = 0; j < BLOCK; j++) {
                vstore(o + (r + j) * head_dim + i, a[j]);
                vstore(o + (r + j) * head_dim + i + VN, b[j]);
            }
        }
    }
}

static void scale(float *x, float factor, int n)
{
    const vf f = vset1(factor);
    for (int i = 0; i < n; i += VN) {
        vstore(x + i, vmul(vload(x + i), f));
    }
}

static void add_scaled(float *y, const float *x, float factor, int n)
{
    const vf f = vset1(factor);
    for (int i = 0; i < n; i += VN) {
        vstore(y + i, vfma(vload(x + i), f, vload(y + i)));
    }
}

const struct sl_cpu_attention_kernels ATTENTION_TABLE = {
    .row_tile = 2 * VN,
    .key_tile = BLOCK,
    .tile_min_rows = VN + VN / 2, /* with fewer too many rows of a tile would be empty */
    .unpack = unpack,
    .scores_direct = scores_direct,
    .softmax_direct = softmax_direct,
    .values_direct = values_direct,
    .scores_tile = scores_tile,
    .softmax_tile = softmax_tile,
    .values_tile = values_tile,
    .scale = scale,
    .add_scaled = add_scaled,
};
