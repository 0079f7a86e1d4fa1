/* SPDX-License-Identifier: Apache-2.0
 *
 * The AMX kernels over emulated tiles: one more set of product kernels, and of attention.
 */
#include "cpu/amx_emulated.h"

#include <stddef.h>

#if defined(__x86_64__)
#include "cpu/amx_emulate.h"

#define sl_linear_panels_amx sl_linear_panels_amx_emulated
#include "../src/cpu/x86/linear_panels_amx.c"

#define sl_cpu_attention_matrix_amx sl_cpu_attention_matrix_amx_emulated
#include "../src/cpu/x86/attention_amx.c"

/* Everything but the tiles needs AVX-512 with VNNI and products of bfloats. */
static const struct sl_cpu_linear_kernels emulated = {"amx emulated",
                                                      SL_CPU_AVX512VNNI,
                                                      SL_LINEAR_NEEDS_AVX512_BF16,
                                                      &sl_linear_rows_avx512vnni,
                                                      &sl_linear_panels_amx,
                                                      sl_linear_activate_avx512};

const struct sl_cpu_linear_kernels *sl_test_linear_amx(void)
{
    const struct sl_cpu_linear_kernels *k;
    for (int i = 0; (k = sl_linear_variant(i)) != NULL; i++) {
        if (k->level == emulated.level && k->features == emulated.features) {
            return &emulated;
        }
    }
    return NULL;
}

const struct sl_cpu_attention_matrix_kernels *sl_test_attention_amx(void)
{
    static struct sl_cpu_attention_matrix_kernels any_rows;
    any_rows = sl_cpu_attention_matrix_amx;
    any_rows.min_rows = 1;
    return sl_test_linear_amx() != NULL ? &any_rows : NULL;
}
#else
const struct sl_cpu_linear_kernels *sl_test_linear_amx(void)
{
    return NULL;
}

const struct sl_cpu_attention_matrix_kernels *sl_test_attention_amx(void)
{
    return NULL;
}
#endif
