/* SPDX-License-Identifier: Apache-2.0
 *
 * Row kernels: whole weight rows times 1 to 4 tokens, for few tokens, where reading the weights
 * from memory is what takes the time. Included by one source file a level, after the unpacking of
 * blocks (linear_load_v512.h or linear_load_v256.h).
 *
 * A type is a loader, a dot product and an `offset`: the products of the unsigned levels are summed
 * with the scales in one register, minimums (or scales) times the sums of the activations in
 * another, and the row's result is first + offset * second. Bodies are inlined into one function a
 * type, for each number of tokens; what a row and a token give depends on no other row of the call.
 */
#ifndef SL_CPU_LINEAR_ROWS_TMPL_H
#define SL_CPU_LINEAR_ROWS_TMPL_H

#include "cpu/linear_internal.h"

typedef struct group load_group_fn(const uint8_t *p, int n_blocks);
typedef vi dot2_fn(vi w0, vi x0, vi w1, vi x1);
typedef struct super load_super_fn(const uint8_t *p);
typedef vi dot_fn(vi w, vi x);
typedef vf load_float_fn(const void *p);

#define MAX_TOKENS SL_LINEAR_CALL_TOKENS

/* The row to fetch while row r of a call is multiplied: at least SL_LINEAR_FETCH_BYTES ahead, and
 * as far as the same place of a later row, so that every line is fetched once. */
INLINE const uint8_t *fetch_row(const uint8_t *w, size_t row_bytes, int r,
                                const struct sl_linear_ahead *ahead)
{
    const size_t bytes = SL_LINEAR_FETCH_BYTES;
    const int64_t row = r + (row_bytes >= bytes ? 1 : (int64_t)(bytes / row_bytes) + 1);
    if (ahead->next == NULL || row < ahead->n_rows) {
        return w + (size_t)row * row_bytes;
    }
    return (const uint8_t *)ahead->next + (size_t)(row - ahead->n_rows) * row_bytes;
}

/* Fetch what group g of a row needs. A group is some lines and a part of one; the parts of 8 groups
 * are fetched with the last of them, so that no line is fetched twice. */
INLINE void fetch_group(const uint8_t *row, size_t group_bytes, size_t g)
{
    const size_t whole = group_bytes / 64 * 64;
    const size_t parts = (group_bytes - whole) * 8;
    const uint8_t *p = row + g * whole + g / 8 * ((parts + 63) / 64 * 64);
    for (size_t at = 0; at < whole; at += 64) {
        prefetch(p + at);
    }
    if (g % 8 == 7) {
        for (size_t at = 0; at < parts; at += 64) {
            prefetch(p + whole + at);
        }
    }
}

INLINE void group_products(struct group g, const uint8_t *x, dot2_fn *dot, bool with_m, vf *acc,
                           vf *acc_m)
{
    const vi products = dot(g.lo, vi_load(x), g.hi, vi_load(x + V_BYTES));
    const vf scale = vf_mul(g.d, vf_load(x + 2 * V_BYTES));
    *acc = vf_fma(vf_from_int(products), scale, *acc);
    if (with_m) {
        *acc_m = vf_fma(g.m, vf_load(x + 3 * V_BYTES), *acc_m);
    }
}

INLINE void groups_body(load_group_fn *load, dot2_fn *dot, size_t block_bytes, float offset,
                        const uint8_t *w, const uint8_t *ahead, const struct sl_linear_x *x,
                        int first, const int n_tokens, float *out)
{
    const size_t stride = x->stride[SL_LINEAR_HALVES];
    const uint8_t *xg = (const uint8_t *)x->data[SL_LINEAR_HALVES] + (size_t)first * stride;
    const int64_t n_blocks = x->n_cols / 32;
    const int64_t n_groups = n_blocks / GROUP_BLOCKS;
    const int n_rest = (int)(n_blocks % GROUP_BLOCKS);
    const bool with_m = offset != 0.0f;
    vf acc[MAX_TOKENS], acc_m[MAX_TOKENS];
    for (int t = 0; t < n_tokens; t++) {
        acc[t] = acc_m[t] = vf_zero();
    }
    for (int64_t g = 0; g < n_groups; g++) {
        fetch_group(ahead, GROUP_BLOCKS * block_bytes, (size_t)g);
        const struct group group = load(w, GROUP_BLOCKS);
        for (int t = 0; t < n_tokens; t++) {
            group_products(group, xg + (size_t)t * stride, dot, with_m, &acc[t], &acc_m[t]);
        }
        w += GROUP_BLOCKS * block_bytes;
        xg += 4 * V_BYTES;
    }
    if (n_rest > 0) {
        const struct group group = load(w, n_rest);
        for (int t = 0; t < n_tokens; t++) {
            group_products(group, xg + (size_t)t * stride, dot, with_m, &acc[t], &acc_m[t]);
        }
    }
    for (int t = 0; t < n_tokens; t++) {
        const vf sum = with_m ? vf_fma(acc_m[t], vf_set1(offset), acc[t]) : acc[t];
        out[t * SL_LINEAR_CALL_ROWS] = vf_sum(sum);
    }
}

INLINE void supers_body(load_super_fn *load, dot_fn *dot, size_t block_bytes, float offset,
                        const uint8_t *w, const uint8_t *ahead, const struct sl_linear_x *x,
                        int first, const int n_tokens, float *out)
{
    const size_t stride = x->stride[SL_LINEAR_SUPER];
    const uint8_t *xb = (const uint8_t *)x->data[SL_LINEAR_SUPER] + (size_t)first * stride;
    const bool with_m = offset != 0.0f;
    vf acc[MAX_TOKENS][2], acc_m[MAX_TOKENS];
    for (int t = 0; t < n_tokens; t++) {
        acc[t][0] = acc[t][1] = acc_m[t] = vf_zero();
    }
    for (int64_t b = 0; b < x->n_cols / 256; b++) {
        for (size_t line = 0; line < block_bytes; line += 64) {
            prefetch(ahead + line);
        }
        const struct super block = load(w);
        for (int t = 0; t < n_tokens; t++) {
            super_products(&block, xb + (size_t)t * stride, dot, with_m, acc[t], &acc_m[t]);
        }
        w += block_bytes;
        ahead += block_bytes;
        xb += SL_LINEAR_SUPER_BYTES;
    }
    for (int t = 0; t < n_tokens; t++) {
        const vf both = vf_add(acc[t][0], acc[t][1]);
        out[t * SL_LINEAR_CALL_ROWS] =
            vf_sum(with_m ? vf_fma(acc_m[t], vf_set1(offset), both) : both);
    }
}

/* Columns that fill no vector, in vectors with zeros. */
INLINE vf rest_products(vf sum, const uint8_t *w, load_float_fn *load, size_t item_bytes,
                        const float *x, size_t n)
{
    for (size_t i = 0; i < n; i += V_LANES) {
        const size_t some = n - i < V_LANES ? n - i : V_LANES;
        uint8_t wr[V_LANES * 4] = {0};
        float xr[V_LANES] = {0};
        memcpy(wr, w + i * item_bytes, some * item_bytes);
        memcpy(xr, x + i, some * sizeof(float));
        sum = vf_fma(load(wr), vf_load(xr), sum);
    }
    return sum;
}

/* How far ahead of a long row of floats is fetched: what is on its way shares the nearest cache
 * with the activations, so that a whole row ahead is too far. */
#define FLOATS_FETCH_BYTES 6144

/* Some columns of a row; from `fetch` on as many bytes are fetched meanwhile. */
INLINE void floats_columns(load_float_fn *load, size_t item_bytes, const uint8_t *w,
                           const uint8_t *fetch, const float *x, size_t n, vf sum[2])
{
    for (size_t i = 0; i < n; i += 2 * V_LANES) {
        const uint8_t *p = w + i * item_bytes;
        for (size_t line = 0; line < 2 * V_LANES * item_bytes; line += 64) {
            prefetch(fetch + i * item_bytes + line);
        }
        sum[0] = vf_fma(load(p), vf_load(x + i), sum[0]);
        sum[1] = vf_fma(load(p + V_LANES * item_bytes), vf_load(x + i + V_LANES), sum[1]);
    }
}

/* Float weights times the float activations of one token. */
INLINE void floats_body(load_float_fn *load, size_t item_bytes, const uint8_t *w,
                        const uint8_t *ahead, const struct sl_linear_x *x, int first, float *out)
{
    const size_t n = (size_t)x->n_cols;
    const size_t stride = x->stride[SL_LINEAR_FLOAT] / sizeof(float);
    const float *const x0 = (const float *)x->data[SL_LINEAR_FLOAT] + (size_t)first * stride;
    const size_t whole = n / (2 * V_LANES) * (2 * V_LANES), far = FLOATS_FETCH_BYTES / item_bytes;
    const size_t here = whole > far ? whole - far : 0; /* columns that fetch of the same row */
    vf sum[2] = {vf_zero(), vf_zero()};
    floats_columns(load, item_bytes, w, w + FLOATS_FETCH_BYTES, x0, here, sum);
    floats_columns(load, item_bytes, w + here * item_bytes, ahead, x0 + here, whole - here, sum);
    *out = vf_sum(rest_products(vf_add(sum[0], sum[1]), w + whole * item_bytes, load, item_bytes,
                                x0 + whole, n - whole));
}

/* Float activations of several tokens do not fit the nearest cache, so that reading them takes
 * longer than the weights: some rows share them. Registers hold the sums of 2 to MAX_TOKENS
 * tokens. */
#define SHARED_ROWS (V_LANES == 16 ? 4 : 2)

INLINE void shared_body(load_float_fn *load, size_t item_bytes, const uint8_t *w, size_t row_bytes,
                        const uint8_t *const *ahead, const struct sl_linear_x *x, int first,
                        const int n_rows, const int n_tokens, float *out)
{
    const size_t n = (size_t)x->n_cols;
    const size_t stride = x->stride[SL_LINEAR_FLOAT] / sizeof(float);
    const float *const x0 = (const float *)x->data[SL_LINEAR_FLOAT] + (size_t)first * stride;
    vf acc[MAX_TOKENS][SHARED_ROWS];
    for (int t = 0; t < n_tokens; t++) {
        for (int r = 0; r < n_rows; r++) {
            acc[t][r] = vf_zero();
        }
    }
    size_t i = 0;
    for (; i + V_LANES <= n; i += V_LANES) {
        vf weights[SHARED_ROWS];
        for (int r = 0; r < n_rows; r++) {
            if (i * item_bytes % 64 == 0) {
                prefetch(ahead[r] + i * item_bytes);
            }
            weights[r] = load(w + (size_t)r * row_bytes + i * item_bytes);
        }
        for (int t = 0; t < n_tokens; t++) {
            const vf xt = vf_load(x0 + (size_t)t * stride + i);
            for (int r = 0; r < n_rows; r++) {
                acc[t][r] = vf_fma(weights[r], xt, acc[t][r]);
            }
        }
    }
    for (int t = 0; t < n_tokens; t++) {
        for (int r = 0; r < n_rows; r++) {
            const vf sum = rest_products(acc[t][r], w + (size_t)r * row_bytes + i * item_bytes,
                                         load, item_bytes, x0 + (size_t)t * stride + i, n - i);
            out[t * SL_LINEAR_CALL_ROWS + r] = vf_sum(sum);
        }
    }
}

/* SHARED_ROWS rows at a time; the last ones alone, in the same order of sums. */
INLINE void shared_rows(load_float_fn *load, size_t item_bytes, const uint8_t *w, size_t row_bytes,
                        int n_rows, const struct sl_linear_ahead *ahead,
                        const struct sl_linear_x *x, int first, const int n_tokens, float *out)
{
    for (int r = 0; r < n_rows; r += n_rows - r < SHARED_ROWS ? 1 : SHARED_ROWS) {
        const uint8_t *const rows = w + (size_t)r * row_bytes;
        const uint8_t *fetched[SHARED_ROWS];
        for (int k = 0; k < SHARED_ROWS; k++) {
            fetched[k] = fetch_row(w, row_bytes, r + k + SHARED_ROWS - 1, ahead);
        }
        if (n_rows - r < SHARED_ROWS) {
            shared_body(load, item_bytes, rows, row_bytes, fetched, x, first, 1, n_tokens, out + r);
        } else {
            shared_body(load, item_bytes, rows, row_bytes, fetched, x, first, SHARED_ROWS, n_tokens,
                        out + r);
        }
    }
}

/* The rows of a call, one after the other: a single stream of memory is read fastest. */
#define ROWS_LOOP(BODY, n_tokens)                                                                  \
    for (int r = 0; r < n_rows; r++) {                                                             \
        BODY(n_tokens, (const uint8_t *)w + (size_t)r * row_bytes,                                 \
             fetch_row(w, row_bytes, r, ahead), out + r);                                          \
    }

#define ROWS_SWITCH(BODY)                                                                          \
    switch (n_tokens) {                                                                            \
    case 1:                                                                                        \
        ROWS_LOOP(BODY, 1)                                                                         \
        break;                                                                                     \
    case 2:                                                                                        \
        ROWS_LOOP(BODY, 2)                                                                         \
        break;                                                                                     \
    case 3:                                                                                        \
        ROWS_LOOP(BODY, 3)                                                                         \
        break;                                                                                     \
    default:                                                                                       \
        ROWS_LOOP(BODY, 4)                                                                         \
        break;                                                                                     \
    }

#define ROWS_ARGUMENTS                                                                             \
    const void *w, size_t row_bytes, int n_rows, const struct sl_linear_ahead *ahead,              \
        const struct sl_linear_x *x, int first, int n_tokens, float *out

#define GROUPS_CALL(name, dot, bytes, offset, t, w, ahead, out)                                    \
    groups_body(load_##name, dot, bytes, offset, w, ahead, x, first, t, out)
#define SUPERS_CALL(name, dot, bytes, offset, t, w, ahead, out)                                    \
    supers_body(load_##name, dot, bytes, offset, w, ahead, x, first, t, out)

#define BODY_Q4_0(t, w, ahead, out) GROUPS_CALL(q4_0, dot2_u, 18, -8.0f, t, w, ahead, out)
#define BODY_Q4_1(t, w, ahead, out) GROUPS_CALL(q4_1, dot2_u, 20, 1.0f, t, w, ahead, out)
#define BODY_Q5_0(t, w, ahead, out) GROUPS_CALL(q5_0, dot2_u, 22, -16.0f, t, w, ahead, out)
#define BODY_Q5_1(t, w, ahead, out) GROUPS_CALL(q5_1, dot2_u, 24, 1.0f, t, w, ahead, out)
#define BODY_Q8_0(t, w, ahead, out) GROUPS_CALL(q8_0, dot2_s, 34, -(float)BIAS_S8, t, w, ahead, out)
#define BODY_IQ4_NL(t, w, ahead, out)                                                              \
    GROUPS_CALL(iq4_nl, dot2_s, 18, -(float)BIAS_S8, t, w, ahead, out)
#define BODY_MXFP4(t, w, ahead, out) GROUPS_CALL(mxfp4, dot2_u, 17, -12.0f, t, w, ahead, out)
#define BODY_Q2_K(t, w, ahead, out) SUPERS_CALL(q2_k, dot_u, 84, -1.0f, t, w, ahead, out)
#define BODY_Q3_K(t, w, ahead, out) SUPERS_CALL(q3_k, dot_u, 110, -4.0f, t, w, ahead, out)
#define BODY_Q4_K(t, w, ahead, out) SUPERS_CALL(q4_k, dot_u, 144, -1.0f, t, w, ahead, out)
#define BODY_Q5_K(t, w, ahead, out) SUPERS_CALL(q5_k, dot_u, 176, -1.0f, t, w, ahead, out)
#define BODY_Q6_K(t, w, ahead, out) SUPERS_CALL(q6_k, dot_u, 210, -32.0f, t, w, ahead, out)
#define BODY_IQ4_XS(t, w, ahead, out)                                                              \
    SUPERS_CALL(iq4_xs, dot_s, 136, -(float)BIAS_S8, t, w, ahead, out)

#define ROWS_TYPES(X)                                                                              \
    X(Q4_0)                                                                                        \
    X(Q4_1)                                                                                        \
    X(Q5_0)                                                                                        \
    X(Q5_1)                                                                                        \
    X(Q8_0)                                                                                        \
    X(IQ4_NL)                                                                                      \
    X(MXFP4)                                                                                       \
    X(Q2_K)                                                                                        \
    X(Q3_K)                                                                                        \
    X(Q4_K)                                                                                        \
    X(Q5_K)                                                                                        \
    X(Q6_K)                                                                                        \
    X(IQ4_XS)

#define ROWS_FUNCTION(type)                                                                        \
    static void rows_##type(ROWS_ARGUMENTS)                                                        \
    {                                                                                              \
        ROWS_SWITCH(BODY_##type)                                                                   \
    }
ROWS_TYPES(ROWS_FUNCTION)

#define FLOAT_ROWS_FUNCTION(type, load, bytes)                                                     \
    static void rows_##type(ROWS_ARGUMENTS)                                                        \
    {                                                                                              \
        switch (n_tokens) {                                                                        \
        case 1:                                                                                    \
            for (int r = 0; r < n_rows; r++) {                                                     \
                floats_body(load, bytes, (const uint8_t *)w + (size_t)r * row_bytes,               \
                            fetch_row(w, row_bytes, r, ahead), x, first, out + r);                 \
            }                                                                                      \
            break;                                                                                 \
        case 2:                                                                                    \
            shared_rows(load, bytes, w, row_bytes, n_rows, ahead, x, first, 2, out);               \
            break;                                                                                 \
        case 3:                                                                                    \
            shared_rows(load, bytes, w, row_bytes, n_rows, ahead, x, first, 3, out);               \
            break;                                                                                 \
        default:                                                                                   \
            shared_rows(load, bytes, w, row_bytes, n_rows, ahead, x, first, 4, out);               \
            break;                                                                                 \
        }                                                                                          \
    }
FLOAT_ROWS_FUNCTION(F32, vf_load, 4)
FLOAT_ROWS_FUNCTION(F16, vf_load_f16, 2)
FLOAT_ROWS_FUNCTION(BF16, vf_load_bf16, 2)

#define ROWS_ENTRY(type) [SL_TYPE_##type] = rows_##type,
static sl_linear_rows_fn *const rows_table[SL_TYPE_N] = {
    ROWS_ENTRY(F32) ROWS_ENTRY(F16) ROWS_ENTRY(BF16) ROWS_TYPES(ROWS_ENTRY)};

#endif
