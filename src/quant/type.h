/* SPDX-License-Identifier: Apache-2.0
 *
 * Tensor element types of GGUF: ids, names, block sizes. One table knows them all; types with
 * `computes` set can be multiplied with, the others can only be listed.
 * Source of the ids and sizes: the GGUF specification.
 */
#ifndef SL_QUANT_TYPE_H
#define SL_QUANT_TYPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

enum sl_type {
    SL_TYPE_F32 = 0,
    SL_TYPE_F16 = 1,
    SL_TYPE_Q4_0 = 2,
    SL_TYPE_Q4_1 = 3,
    SL_TYPE_Q5_0 = 6,
    SL_TYPE_Q5_1 = 7,
    SL_TYPE_Q8_0 = 8,
    SL_TYPE_Q8_1 = 9,
    SL_TYPE_Q2_K = 10,
    SL_TYPE_Q3_K = 11,
    SL_TYPE_Q4_K = 12,
    SL_TYPE_Q5_K = 13,
    SL_TYPE_Q6_K = 14,
    SL_TYPE_Q8_K = 15,
    SL_TYPE_IQ2_XXS = 16,
    SL_TYPE_IQ2_XS = 17,
    SL_TYPE_IQ3_XXS = 18,
    SL_TYPE_IQ1_S = 19,
    SL_TYPE_IQ4_NL = 20,
    SL_TYPE_IQ3_S = 21,
    SL_TYPE_IQ2_S = 22,
    SL_TYPE_IQ4_XS = 23,
    SL_TYPE_I8 = 24,
    SL_TYPE_I16 = 25,
    SL_TYPE_I32 = 26,
    SL_TYPE_I64 = 27,
    SL_TYPE_F64 = 28,
    SL_TYPE_IQ1_M = 29,
    SL_TYPE_BF16 = 30,
    SL_TYPE_TQ1_0 = 34,
    SL_TYPE_TQ2_0 = 35,
    SL_TYPE_MXFP4 = 39,
    SL_TYPE_N = 64, /* one past the largest id that the table covers */
};

struct sl_type_traits {
    const char *name;     /* "Q4_K"; NULL: no such type */
    uint32_t block_items; /* elements in a block */
    uint32_t block_bytes;
    bool computes; /* rows of it can be multiplied, dequantized and quantized */
};

/* Traits of a type id as found in a file; NULL when the id is unknown or retired. */
const struct sl_type_traits *sl_type_traits(uint32_t id);
/* Name for messages; "unknown" when there is none. */
const char *sl_type_name(uint32_t id);
/* Look a name up, case-insensitively; false when there is none. */
bool sl_type_from_name(const char *name, enum sl_type *out);
/* Bytes of a row of n_items (a multiple of the block size). */
size_t sl_type_row_bytes(enum sl_type type, int64_t n_items);

/* Unpack n_items (a multiple of the block size) to float. Scalar reference. */
void sl_dequantize_row(enum sl_type type, const void *src, float *dst, int64_t n_items);
/* Pack n_items by simple rounding (no importance weights): for tests and synthetic models.
 * Returns false for types that do not compute. */
bool sl_quantize_row(enum sl_type type, const float *src, void *dst, int64_t n_items);

/* Without a branch, so that loops of it become vectors. The product also brings what is subnormal
 * in f16 to its place. A NaN comes out quiet, as the processors' own conversion makes it. */
static inline float sl_f16_to_f32(uint16_t h)
{
    const uint32_t rest = (uint32_t)(h & 0x7fff) << 13, infinity = 0x7c00U << 13;
    float f;
    memcpy(&f, &rest, sizeof f);
    f *= 0x1p112F;
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    bits = rest < infinity ? bits : 0x7f800000 | rest | (rest > infinity ? 0x00400000 : 0);
    bits |= (uint32_t)(h & 0x8000) << 16;
    memcpy(&f, &bits, sizeof f);
    return f;
}
uint16_t sl_f32_to_f16(float f); /* round to nearest even, overflow to infinity */
static inline float sl_bf16_to_f32(uint16_t h)
{
    const union {
        uint32_t u;
        float f;
    } v = {.u = (uint32_t)h << 16};
    return v.f;
}
uint16_t sl_f32_to_bf16(float f); /* round to nearest even, NaN stays NaN */

#endif
