/* SPDX-License-Identifier: Apache-2.0
 *
 * What the kernels of the matrix products get, and the entries of the files they are spread over
 * (to compile in parallel). One launch computes parts of one type that share x.
 *
 * Scratch layouts of x, n_tokens rows each:
 *   8 bits   int8 [n_tokens, n_cols], then struct sl_xblock [n_tokens, n_cols / 32]
 *   f16      f16 [n_tokens, n_cols], then the rows' float scales [n_tokens]; a row is divided by a
 *            power of two so that its largest magnitude lies below 2^11: no activation overflows,
 *            and sums in float lose nothing by it.
 */
#ifndef SL_DEVICE_CUDA_LINEAR_ARGS_CUH
#define SL_DEVICE_CUDA_LINEAR_ARGS_CUH

#include "device/cuda/cuda_ops.h"
#include "device/cuda/linear_port.cuh"

/* 32 elements of x as int8: x = d * q. The sums of either half, as two f16 (whole, at most 2032).
 */
struct sl_xblock {
    float d;
    uint32_t sums;
};

struct sl_linear_part {
    const uint8_t *w;
    const uint8_t *end; /* of the matrix */
    const float *bias;  /* or NULL */
    float *y;
    int32_t n_rows;
    int32_t first; /* row tile where the part starts; tiles of different parts never mix */
};

/* A norm of x on its way into the product (vector kernels only). */
struct sl_linear_norm {
    const float *weight; /* [n_cols] or NULL */
    float *y;            /* where the normed x goes too, or NULL */
    float eps;
    bool on;
};

struct sl_linear_args {
    const float *x;
    const void *xs; /* scratch, as its kernel made it */
    int64_t row_bytes;
    int32_t n_tokens;
    int32_t n_cols;
    int32_t x_cols; /* of a row of x as f16: n_cols, and zeros up to what an order needs */
    int32_t n_parts;
    int32_t n_tiles;    /* row tiles of all parts; of part 0 when gated */
    int32_t activation; /* enum sl_activation; other than NONE: part 0 is gate, part 1 up */
    bool accumulate;
    bool x_packed; /* xs holds x as 8 bits (vector kernels: otherwise they pack it themselves) */
    struct sl_linear_norm norm;
    struct sl_linear_part part[SL_LINEAR_MAX_PARTS];
};

/* Token tiles of the kernels that have them. */
#define SL_MID_MAX_TOKENS 64
#define SL_GEMM_TOKENS 128

/* Rows of one tile: `first` and `n_tiles` count these. A gated tile takes half from each part. */
#define SL_MID_ROWS 32
#define SL_GEMM_ROWS 128

/* Launchers by type: 0, a cudaError_t or SL_CUDA_UNSUPPORTED. The _k files hold the types with
 * blocks of 256, the _f files those that are not quantized. */
int sl_linear_vec_q(cudaStream_t stream, int type, const struct sl_linear_args *args,
                    const struct sl_cuda_props *props);
int sl_linear_vec_k(cudaStream_t stream, int type, const struct sl_linear_args *args,
                    const struct sl_cuda_props *props);
int sl_linear_vec_f(cudaStream_t stream, int type, const struct sl_linear_args *args,
                    const struct sl_cuda_props *props);
int sl_linear_mid_q(cudaStream_t stream, int type, const struct sl_linear_args *args, bool narrow,
                    const struct sl_cuda_props *props);
int sl_linear_mid_k(cudaStream_t stream, int type, const struct sl_linear_args *args, bool narrow,
                    const struct sl_cuda_props *props);
int sl_linear_mid_f(cudaStream_t stream, int type, const struct sl_linear_args *args, bool narrow,
                    const struct sl_cuda_props *props);
int sl_linear_gemm_q(cudaStream_t stream, int type, const struct sl_linear_args *args);
int sl_linear_gemm_k(cudaStream_t stream, int type, const struct sl_linear_args *args);
int sl_linear_gemm_f(cudaStream_t stream, int type, const struct sl_linear_args *args);

/* Whether the vector kernels for quantized weights have room for x and a block's sums (n_tiles
 * counts rows). */
bool sl_linear_vec_fits(const struct sl_linear_args *args, const struct sl_cuda_props *props);
/* The same for weights that are not quantized; otherwise sl_linear_vec_f has a slower kernel, which
 * takes no norm along. */
bool sl_linear_vec_f_streams(int type, const struct sl_linear_args *args,
                             const struct sl_cuda_props *props);

/* The part that row tile `tile` belongs to. */
SL_DEV int sl_part_of_tile(const struct sl_linear_args &a, int tile)
{
    int p = 0;
    while (p + 1 < a.n_parts && tile >= a.part[p + 1].first) {
        p++;
    }
    return p;
}

SL_DEV float sl_gate(float g, float up, int activation)
{
    if (activation == SL_ACT_SILU) {
        return up * (g / (1.0f + expf(-g)));
    }
    if (activation == SL_ACT_SWIGLU_CLAMPED) {
        g = fminf(g, SL_SWIGLU_LIMIT);
        up = fminf(fmaxf(up, -SL_SWIGLU_LIMIT), SL_SWIGLU_LIMIT);
        return (up + 1.0f) * (g / (1.0f + expf(-SL_SWIGLU_ALPHA * g)));
    }
    const float inner = 0.7978845608028654f * (g + 0.044715f * g * g * g);
    return up * (0.5f * g * (1.0f + tanhf(inner)));
}

/* y = v + bias (or y += v); row and token are valid. */
SL_DEV void sl_store_y(const struct sl_linear_args &a, const struct sl_linear_part &part, int token,
                       int row, float v)
{
    float *y = part.y + (int64_t)token * part.n_rows + row;
    if (part.bias) {
        v += part.bias[row];
    }
    *y = a.accumulate ? *y + v : v;
}

/* The gated result from the two plain sums. */
SL_DEV void sl_store_gated(const struct sl_linear_args &a, int token, int row, float g, float up)
{
    if (a.part[0].bias) {
        g += a.part[0].bias[row];
    }
    if (a.part[1].bias) {
        up += a.part[1].bias[row];
    }
    a.part[0].y[(int64_t)token * a.part[0].n_rows + row] = sl_gate(g, up, a.activation);
}

/* A launch with `shared` bytes of dynamic shared memory, SL_CUDA_MAX_SHARED_BYTES at most. */
#ifdef SL_CUDA_EMULATE
#define SL_LAUNCH(kernel, grid, block, shared, stream, ...)                                        \
    ((void)(stream), sl_emulate_launch(grid, block, shared, [&]() { kernel(__VA_ARGS__); }))
#else
#define SL_LAUNCH(kernel, grid, block, shared, stream, ...)                                        \
    sl_launch((const void *)kernel, shared, SL_CUDA_MAX_SHARED_BYTES,                              \
              [&]() { kernel<<<grid, block, shared, stream>>>(__VA_ARGS__); })

template <class LAUNCH>
static inline int sl_launch(const void *kernel, size_t shared, size_t most, LAUNCH launch)
{
    if (shared > most) {
        return (int)cudaErrorInvalidValue;
    }
    if (shared > 48 * 1024) {
        const cudaError_t e =
            cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared);
        if (e != cudaSuccess) {
            return (int)e;
        }
    }
    launch();
    return (int)cudaGetLastError();
}
#endif

#endif
