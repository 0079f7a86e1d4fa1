/* SPDX-License-Identifier: Apache-2.0
 *
 * The table of element types, and the 16-bit float conversions.
 */
#include "quant/type.h"

#include <string.h>
#include <strings.h>

#include "quant/blocks.h"

/* Ids without a row are unknown or retired (4, 5: Q4_2 and Q4_3; 31..33 and 36..38: layouts for
 * one processor family each). */
static const struct sl_type_traits traits[SL_TYPE_N] = {
    [SL_TYPE_F32] = {"F32", 1, 4, true},
    [SL_TYPE_F16] = {"F16", 1, 2, true},
    [SL_TYPE_Q4_0] = {"Q4_0", 32, 18, true},
    [SL_TYPE_Q4_1] = {"Q4_1", 32, 20, true},
    [SL_TYPE_Q5_0] = {"Q5_0", 32, 22, true},
    [SL_TYPE_Q5_1] = {"Q5_1", 32, 24, true},
    [SL_TYPE_Q8_0] = {"Q8_0", 32, 34, true},
    [SL_TYPE_Q8_1] = {"Q8_1", 32, 36, false},
    [SL_TYPE_Q2_K] = {"Q2_K", 256, 84, true},
    [SL_TYPE_Q3_K] = {"Q3_K", 256, 110, true},
    [SL_TYPE_Q4_K] = {"Q4_K", 256, 144, true},
    [SL_TYPE_Q5_K] = {"Q5_K", 256, 176, true},
    [SL_TYPE_Q6_K] = {"Q6_K", 256, 210, true},
    [SL_TYPE_Q8_K] = {"Q8_K", 256, 292, false},
    [SL_TYPE_IQ2_XXS] = {"IQ2_XXS", 256, 66, false},
    [SL_TYPE_IQ2_XS] = {"IQ2_XS", 256, 74, false},
    [SL_TYPE_IQ3_XXS] = {"IQ3_XXS", 256, 98, false},
    [SL_TYPE_IQ1_S] = {"IQ1_S", 256, 50, false},
    [SL_TYPE_IQ4_NL] = {"IQ4_NL", 32, 18, true},
    [SL_TYPE_IQ3_S] = {"IQ3_S", 256, 110, false},
    [SL_TYPE_IQ2_S] = {"IQ2_S", 256, 82, false},
    [SL_TYPE_IQ4_XS] = {"IQ4_XS", 256, 136, true},
    [SL_TYPE_I8] = {"I8", 1, 1, false},
    [SL_TYPE_I16] = {"I16", 1, 2, false},
    [SL_TYPE_I32] = {"I32", 1, 4, false},
    [SL_TYPE_I64] = {"I64", 1, 8, false},
    [SL_TYPE_F64] = {"F64", 1, 8, false},
    [SL_TYPE_IQ1_M] = {"IQ1_M", 256, 56, false},
    [SL_TYPE_BF16] = {"BF16", 1, 2, true},
    [SL_TYPE_TQ1_0] = {"TQ1_0", 256, 54, false},
    [SL_TYPE_TQ2_0] = {"TQ2_0", 256, 66, false},
    [SL_TYPE_MXFP4] = {"MXFP4", 32, 17, true},
    [40] = {"NVFP4", 64, 36, false},
    [41] = {"Q1_0", 128, 18, false},
};

const int8_t sl_iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                  1,    13,   25,  38,  53,  69,  89,  113};
const int8_t sl_mxfp4_values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

const struct sl_type_traits *sl_type_traits(uint32_t id)
{
    return id < SL_TYPE_N && traits[id].name != NULL ? &traits[id] : NULL;
}

const char *sl_type_name(uint32_t id)
{
    const struct sl_type_traits *t = sl_type_traits(id);
    return t != NULL ? t->name : "unknown";
}

bool sl_type_from_name(const char *name, enum sl_type *out)
{
    for (uint32_t id = 0; id < SL_TYPE_N; id++) {
        if (traits[id].name != NULL && strcasecmp(traits[id].name, name) == 0) {
            *out = (enum sl_type)id;
            return true;
        }
    }
    return false;
}

size_t sl_type_row_bytes(enum sl_type type, int64_t n_items)
{
    const struct sl_type_traits *t = &traits[type];
    return (size_t)(n_items / t->block_items) * t->block_bytes;
}

static uint32_t bits_of(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof(u));
    return u;
}

static float float_of(uint32_t u)
{
    float f;
    memcpy(&f, &u, sizeof(f));
    return f;
}

uint16_t sl_f32_to_f16(float f)
{
    const uint32_t bits = bits_of(f);
    const uint32_t sign = bits >> 16 & 0x8000;
    uint32_t x = bits & 0x7fffffff;
    if (x > 0x7f800000) {
        return (uint16_t)(sign | 0x7e00 | (x >> 13 & 0x1ff));
    }
    if (x >= 0x47800000) { /* 65536 and up; what rounds up to it is handled below */
        return (uint16_t)(sign | 0x7c00);
    }
    if (x < 0x38800000) {
        /* Subnormal result: beside 0.5 a float's last bit is worth 2^-24, so the addition rounds
         * to nearest even at the right place. */
        const float shifted = float_of(x) + 0.5f;
        return (uint16_t)(sign | (bits_of(shifted) - 0x3f000000));
    }
    x += 0xfff + (x >> 13 & 1);
    return (uint16_t)(sign | (x - 0x38000000) >> 13);
}

uint16_t sl_f32_to_bf16(float f)
{
    const uint32_t x = bits_of(f);
    if ((x & 0x7fffffff) > 0x7f800000) {
        return (uint16_t)(x >> 16 | 0x40);
    }
    return (uint16_t)((x + 0x7fff + (x >> 16 & 1)) >> 16);
}
