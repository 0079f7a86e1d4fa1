/* SPDX-License-Identifier: Apache-2.0
 *
 * What happens between the products of experts: inputs are packed by position, gates of unlike
 * types applied, and each token's pairs summed. Positions are those of a chunk (experts.cuh).
 */
#ifndef SL_DEVICE_CUDA_EXPERTS_PACK_CUH
#define SL_DEVICE_CUDA_EXPERTS_PACK_CUH

#include "device/cuda/experts.cuh"
#include "device/cuda/linear_pack.cuh"

/* What a product wants of its inputs: floats; 8-bit blocks, or f16 with scales, both tile by tile;
 * ROWS: f16 as the kernels of sm90/ want it, all rows first and then all scales. */
enum sl_experts_form { SL_EXPERTS_FLOAT, SL_EXPERTS_8BIT, SL_EXPERTS_HALF, SL_EXPERTS_ROWS };

struct sl_experts_pack {
    struct sl_experts_order order;
    const float *x; /* rows by token, or by position from `begin` on */
    uint8_t *out;
    int64_t stride;
    int32_t begin, end, n_tokens, n_cols;
    int32_t column_order; /* of SL_EXPERTS_ROWS */
};

/* y of each token from its pairs at positions [begin, end), in the order of its ids. */
struct sl_experts_sum {
    struct sl_experts_order order;
    const float *out;     /* [end - begin, n_cols] */
    const float *weights; /* of the pairs */
    float *y;
    int32_t begin, end, n_cols;
    bool accumulate;
};

/* Bytes from a packed row to the next. */
int64_t sl_experts_row_stride(enum sl_experts_form form, int n_cols);

/* Launchers: 0 or a cudaError_t. */
int sl_experts_pack_tokens(cudaStream_t stream, const struct sl_experts_pack *args,
                           enum sl_experts_form form);
int sl_experts_pack_pairs(cudaStream_t stream, const struct sl_experts_pack *args,
                          enum sl_experts_form form);
int sl_experts_gate(cudaStream_t stream, float *gate, const float *up, int64_t n, int activation);
int sl_experts_sum_pairs(cudaStream_t stream, const struct sl_experts_sum *args, int n_tokens);

#endif
