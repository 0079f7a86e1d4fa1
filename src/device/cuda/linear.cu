/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrix products: choice of kernels, packing of x, and gates of unlike types.
 *
 * Parts of one type share a launch. By the number of tokens:
 *   1..4     vector kernels (linear_vec_stream): bound by the bytes of the matrix; x is normed and
 *            packed in place unless it is long
 *   ..64     linear_mid: tensor cores, 32 rows a block, still bound by bytes
 *   more     linear_gemm: tensor cores, 128 x 128 tiles, where its tiles fill the GPU; else
 *            linear_mid, 64 tokens at a time
 *   17..     sm90/linear_sm90 instead, on compute capability 9.0
 * F32 weights, and shapes of F16 and BF16 whose rows aren't 16-byte aligned, stay on linear_vecf.
 */
#include "device/cuda/fuse.h"
#include "device/cuda/launch.cuh"
#include "device/cuda/linear_args.cuh"
#include "device/cuda/linear_pack.cuh"

#ifndef SL_CUDA_EMULATE
#include "device/cuda/cuda_ops.h"
#endif
#include "device/cuda/sm90/sm90.cuh"

#define PACK_THREADS 256
#define SM90_MIN_TOKENS 17
#define MID_NARROW_TOKENS 16
#define VEC_MAX_TOKENS 4   /* of the vector kernels for quantized weights */
#define VEC_PACK_MAX 16384 /* elements of x that every block may pack for itself */

/* ---- packing ---- */

/* x as 8-bit blocks; see linear_args.cuh. n4: floats of x / 4. */
static __global__ void __launch_bounds__(PACK_THREADS)
    pack8_kernel(const float *x, uint8_t *levels, struct sl_xblock *blocks, int64_t n4, bool wide)
{
    const int64_t i = (int64_t)blockIdx.x * PACK_THREADS + (int)threadIdx.x;
    sl_let_follow();
    sl_await_ahead();
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (i < n4) {
        v = wide ? *(const float4 *)(x + 4 * i)
                 : make_float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
    }
    float d, sum;
    const uint32_t q = sl_pack_levels(v, d, sum);
    const float other = sl_shfl_xor(sum, 4);
    if (i < n4) {
        *(uint32_t *)(levels + 4 * i) = q;
        if ((i & 7) == 0) {
            blocks[i >> 3].d = d;
            blocks[i >> 3].sums = sl_pack_half2(sum, other);
        }
    }
}

/* x as f16 with a scale of each row; a block takes a row. */
static __global__ void __launch_bounds__(SL_PACK_THREADS)
    pack_half_kernel(const float *x, uint16_t *out, float *scales, int n, int n_out, int order)
{
    uint4 *row = (uint4 *)(out + (int64_t)blockIdx.x * n_out);
    sl_let_follow();
    sl_await_ahead();
    const float scale = sl_pack_half_row<SL_PACK_THREADS>(
        x + (int64_t)blockIdx.x * n, n, n_out, order, [&](int i, uint4 v) { row[i] = v; });
    if (threadIdx.x == 0) {
        scales[blockIdx.x] = scale;
    }
}

static __global__ void __launch_bounds__(PACK_THREADS)
    gate_kernel(float *gate, const float *up, int64_t n, int activation)
{
    const int64_t i = (int64_t)blockIdx.x * PACK_THREADS + (int)threadIdx.x;
    if (i < n) {
        gate[i] = sl_gate(gate[i], up[i], activation);
    }
}

static int pack8(cudaStream_t stream, const struct sl_linear_args *a, void *scratch,
                 const struct sl_cuda_props *props)
{
    const int64_t n = (int64_t)a->n_tokens * a->n_cols;
    uint8_t *levels = (uint8_t *)scratch;
    const unsigned blocks = (unsigned)((n / 4 + PACK_THREADS - 1) / PACK_THREADS);
    const bool wide = ((uintptr_t)a->x & 15) == 0;
    return SL_FOLLOW(pack8_kernel, blocks, PACK_THREADS, 0, stream, props, a->x, levels,
                     (struct sl_xblock *)(levels + n), n / 4, wide);
}

static int pack_half(cudaStream_t stream, const struct sl_linear_args *a, void *scratch, int order,
                     const struct sl_cuda_props *props)
{
    uint16_t *out = (uint16_t *)scratch;
    float *scales = (float *)(out + (int64_t)a->n_tokens * a->x_cols);
    return SL_FOLLOW(pack_half_kernel, (unsigned)a->n_tokens, SL_PACK_THREADS, 0, stream, props,
                     a->x, out, scales, a->n_cols, a->x_cols, order);
}

/* ---- choice ---- */

/* X_HALF + SL_ORDER_...: as f16, in an order. */
enum x_form { X_FLOAT, X_8BIT, X_HALF };

enum family { FAMILY_VEC, FAMILY_VECF, FAMILY_MID, FAMILY_GEMM, FAMILY_SM90 };

static bool is_float_type(int type)
{
    return type == SL_TYPE_F32 || type == SL_TYPE_F16 || type == SL_TYPE_BF16;
}

static bool is_k_type(int type)
{
    return type == SL_TYPE_Q2_K || type == SL_TYPE_Q3_K || type == SL_TYPE_Q4_K ||
           type == SL_TYPE_Q5_K || type == SL_TYPE_Q6_K || type == SL_TYPE_IQ4_XS;
}

static int64_t div_up(int64_t n, int64_t by)
{
    return (n + by - 1) / by;
}

/* Rows of the launch; two halves of a gated tile count as one tile's. */
static int64_t all_rows(const struct sl_linear_args *a)
{
    int64_t n = 0;
    for (int i = 0; i < a->n_parts; i++) {
        n += a->part[i].n_rows;
    }
    return n;
}

/* Times in units of one 32-row x 64-token tile of linear_mid on a multiprocessor of its own. A tile
 * of linear_gemm does eight times that work in about four and a half (six when two share one). */
static bool gemm_wins(const struct sl_linear_args *a, int n_sm)
{
    if (a->n_tokens <= SL_MID_MAX_TOKENS) {
        return false;
    }
    const int64_t mid = div_up(all_rows(a), SL_MID_ROWS) * div_up(a->n_tokens, 64);
    const int64_t gemm = div_up(all_rows(a), SL_GEMM_ROWS) * div_up(a->n_tokens, SL_GEMM_TOKENS);
    const double mid_time = (double)mid / n_sm;
    const double gemm_time = gemm <= n_sm ? 4.5 : 6.0 * (double)div_up(gemm, 2 * n_sm);
    return gemm_time < mid_time;
}

/* Whether row tiles of linear_mid are halved, so that a multiprocessor has several. */
static bool mid_is_narrow(const struct sl_linear_args *a, int n_sm)
{
    return a->n_tokens <= MID_NARROW_TOKENS && div_up(all_rows(a), SL_MID_ROWS) <= 2 * n_sm;
}

#ifdef SL_CUDA_SM90
static bool sm90_wins(const struct sl_linear_args *a, const struct sl_cuda_props *props)
{
    for (int i = 0; i < a->n_parts; i++) {
        if (a->part[i].n_rows % 2 != 0 || ((uintptr_t)a->part[i].y & 7) != 0) {
            return false; /* rows are stored two at a time */
        }
    }
    return sl_is_sm90(props) && a->n_tokens >= SM90_MIN_TOKENS;
}

static int run_sm90(cudaStream_t stream, int type, const struct sl_linear_args *a,
                    const struct sl_cuda_props *props)
{
    return is_float_type(type) ? sl_linear_sm90_f(stream, type, a, props)
           : is_k_type(type)   ? sl_linear_sm90_k(stream, type, a, props)
                               : sl_linear_sm90_q(stream, type, a, props);
}
#endif

static enum family choose_family(const struct sl_linear_args *a, int type,
                                 const struct sl_cuda_props *props)
{
    if (is_float_type(type)) {
        bool aligned = a->n_cols % 8 == 0;
        for (int i = 0; i < a->n_parts; i++) {
            aligned = aligned && ((uintptr_t)a->part[i].w & 15) == 0;
        }
        if (type == SL_TYPE_F32 || !aligned || a->n_tokens == 1) {
            return FAMILY_VECF;
        }
    } else if (a->n_tokens <= VEC_MAX_TOKENS && sl_linear_vec_fits(a, props)) {
        return FAMILY_VEC;
    }
#ifdef SL_CUDA_SM90
    if (sm90_wins(a, props)) {
        return FAMILY_SM90;
    }
#endif
    return gemm_wins(a, props->n_sm) ? FAMILY_GEMM : FAMILY_MID;
}

/* Number the row tiles of the parts. */
static void count_tiles(struct sl_linear_args *a, int tile_rows)
{
    const bool gated = a->activation != SL_ACT_NONE;
    const int rows = gated && tile_rows > 1 ? tile_rows / 2 : tile_rows;
    a->n_tiles = 0;
    for (int i = 0; i < a->n_parts; i++) {
        a->part[i].first = gated ? 0 : a->n_tiles;
        const int n = (int)div_up(a->part[i].n_rows, rows);
        a->n_tiles = gated ? n : a->n_tiles + n;
    }
}

/* Bring x into the form that the kernels want, unless it is there already. */
static int prepare_x(cudaStream_t stream, struct sl_linear_args *a, int want, int *have,
                     void *scratch, const struct sl_cuda_props *props)
{
    a->xs = scratch;
    a->x_packed = want == X_8BIT;
    if (want == X_FLOAT || want == *have) {
        return 0;
    }
    *have = want;
    return want == X_8BIT ? pack8(stream, a, scratch, props)
                          : pack_half(stream, a, scratch, want - X_HALF, props);
}

/* Rows of a tile, by family. */
static const int tile_rows[] = {1, 1, SL_MID_ROWS, SL_GEMM_ROWS, SL_SM90_ROWS};

/* Kernels that make what they want of x themselves. */
static bool takes_float(const struct sl_linear_args *a, enum family family)
{
    return family == FAMILY_VECF ||
           (family == FAMILY_VEC && (int64_t)a->n_tokens * a->n_cols <= VEC_PACK_MAX);
}

static int run_group(cudaStream_t stream, struct sl_linear_args *a, int type, void *scratch,
                     int *have, const struct sl_cuda_props *props)
{
    count_tiles(a, 1);
    const enum family family = choose_family(a, type, props);
    const bool is_float = is_float_type(type);
    int want = is_float || family == FAMILY_GEMM ? X_HALF : X_8BIT;
    if (takes_float(a, family) && (is_float || *have != X_8BIT)) {
        want = X_FLOAT;
    } else if (family == FAMILY_SM90) {
        want = X_HALF + sl_sm90_order(type);
        a->x_cols = is_float
                        ? a->n_cols
                        : (int32_t)div_up(a->n_cols, SL_SM90_PACKED_COLS) * SL_SM90_PACKED_COLS;
    }
    const bool narrow = family == FAMILY_MID && mid_is_narrow(a, props->n_sm);
    count_tiles(a, narrow ? SL_MID_ROWS / 2 : tile_rows[family]);
    const int failed = prepare_x(stream, a, want, have, scratch, props);
    if (failed) {
        return failed;
    }
    const bool k = is_k_type(type);
    switch (family) {
#ifdef SL_CUDA_SM90
    case FAMILY_SM90:
        return run_sm90(stream, type, a, props);
#endif
    case FAMILY_VECF:
        return sl_linear_vec_f(stream, type, a, props);
    case FAMILY_VEC:
        return k ? sl_linear_vec_k(stream, type, a, props)
                 : sl_linear_vec_q(stream, type, a, props);
    case FAMILY_MID:
        return is_float ? sl_linear_mid_f(stream, type, a, narrow, props)
               : k      ? sl_linear_mid_k(stream, type, a, narrow, props)
                        : sl_linear_mid_q(stream, type, a, narrow, props);
    default:
        return is_float ? sl_linear_gemm_f(stream, type, a)
               : k      ? sl_linear_gemm_k(stream, type, a)
                        : sl_linear_gemm_q(stream, type, a);
    }
}

/* ---- the operator ---- */

static bool is_supported(const struct sl_op_linear *op)
{
    for (int i = 0; i < op->n_parts; i++) {
        const struct sl_matrix *w = &op->part[i].w;
        /* Kernels of packed types read 16-byte pieces of a matrix from its start on. */
        if (!is_float_type((int)w->type) && ((uintptr_t)w->data & 15) != 0) {
            return false;
        }
        if (w->n_rows > INT32_MAX || w->n_cols > INT32_MAX / 8) {
            return false;
        }
    }
    return true;
}

static void set_part(struct sl_linear_part *to, const struct sl_op_linear *op, int i)
{
    const struct sl_matrix *w = &op->part[i].w;
    to->w = (const uint8_t *)w->data;
    to->end = to->w + w->n_rows * (int64_t)sl_type_row_bytes(w->type, w->n_cols);
    to->bias = op->part[i].bias;
    to->y = op->part[i].y;
    to->n_rows = (int32_t)w->n_rows;
}

/* The arguments of the parts that have the type of part `first`, `norm` (or NULL) ahead. A gate
 * and an up of different types are made one by one and combined at the end (`split`). */
static void make_group(struct sl_linear_args *a, const struct sl_op *op,
                       const struct sl_op_norm *norm, int first, bool split)
{
    const struct sl_op_linear *linear = &op->linear;
    const enum sl_type type = linear->part[first].w.type;
    memset(a, 0, sizeof(*a));
    a->x = linear->x;
    a->n_tokens = op->n_tokens;
    a->n_cols = a->x_cols = (int32_t)linear->part[first].w.n_cols;
    a->row_bytes = (int64_t)sl_type_row_bytes(type, a->n_cols);
    a->activation = split ? SL_ACT_NONE : (int)linear->activation;
    a->accumulate = linear->accumulate;
    if (norm) {
        a->x = norm->x;
        a->norm.on = true;
        a->norm.weight = norm->weight;
        a->norm.eps = norm->eps;
        a->norm.y = first == 0 ? norm->y : NULL;
    }
    for (int i = first; i < linear->n_parts; i++) {
        if (linear->part[i].w.type == type) {
            set_part(&a->part[a->n_parts++], linear, i);
        }
    }
}

static bool is_split(const struct sl_op_linear *linear)
{
    return linear->activation != SL_ACT_NONE && linear->part[0].w.type != linear->part[1].w.type;
}

/* Whether part i is the first of its type. */
static bool begins_group(const struct sl_op_linear *linear, int i)
{
    for (int j = 0; j < i; j++) {
        if (linear->part[j].w.type == linear->part[i].w.type) {
            return false;
        }
    }
    return true;
}

bool sl_cuda_linear_takes_norm(const struct sl_op *op, const struct sl_cuda_props *props)
{
    const struct sl_op_linear *linear = &op->linear;
    if (!is_supported(linear) || op->n_tokens <= 0) {
        return false;
    }
    for (int i = 0; i < linear->n_parts; i++) {
        struct sl_linear_args a;
        if (!begins_group(linear, i)) {
            continue;
        }
        const int type = (int)linear->part[i].w.type;
        make_group(&a, op, NULL, i, is_split(linear));
        count_tiles(&a, 1);
        const enum family family = choose_family(&a, type, props);
        if (!takes_float(&a, family) ||
            (family == FAMILY_VECF && !sl_linear_vec_f_streams(type, &a, props))) {
            return false;
        }
    }
    return true;
}

int sl_cuda_linear_normed(cudaStream_t stream, const struct sl_op *op,
                          const struct sl_op_norm *norm, void *scratch, size_t scratch_bytes,
                          const struct sl_cuda_props *props)
{
    const struct sl_op_linear *linear = &op->linear;
    if (!is_supported(linear) || scratch_bytes < sl_op_scratch_bytes(op)) {
        return SL_CUDA_UNSUPPORTED;
    }
    if (op->n_tokens <= 0) {
        return 0;
    }
    const bool split = is_split(linear);
    int have = X_FLOAT;
    for (int i = 0; i < linear->n_parts; i++) {
        if (!begins_group(linear, i)) {
            continue;
        }
        struct sl_linear_args a;
        make_group(&a, op, norm, i, split);
        const int failed =
            run_group(stream, &a, (int)linear->part[i].w.type, scratch, &have, props);
        if (failed) {
            return failed;
        }
    }
    if (split) {
        const int64_t n = op->n_tokens * linear->part[0].w.n_rows;
        return SL_LAUNCH(gate_kernel, dim3((unsigned)div_up(n, PACK_THREADS)), dim3(PACK_THREADS),
                         0, stream, linear->part[0].y, linear->part[1].y, n,
                         (int)linear->activation);
    }
    return 0;
}

int sl_cuda_linear(cudaStream_t stream, const struct sl_op *op, void *scratch, size_t scratch_bytes,
                   const struct sl_cuda_props *props)
{
    return sl_cuda_linear_normed(stream, op, NULL, scratch, scratch_bytes, props);
}
