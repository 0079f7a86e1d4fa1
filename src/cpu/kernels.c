/* SPDX-License-Identifier: Apache-2.0
 *
 * The kernel table of every level. A level without kernels of its own for some op uses those of
 * the level below it. Nothing branches on the level once a table is chosen.
 */
#include "cpu/kernels.h"

#include <stddef.h>

#include "cpu/linear.h"

#if defined(__x86_64__)
#define ROWS_AVX2 &sl_cpu_rows_avx2
#define ROWS_AVX512 &sl_cpu_rows_avx512
#define ATTENTION_AVX2 &sl_cpu_attention_avx2
#define ATTENTION_AVX512 &sl_cpu_attention_avx512
#define MATRIX_AMX &sl_cpu_attention_matrix_amx
#else
#define ROWS_AVX2 &sl_cpu_rows_scalar
#define ROWS_AVX512 &sl_cpu_rows_scalar
#define ATTENTION_AVX2 &sl_cpu_attention_scalar
#define ATTENTION_AVX512 &sl_cpu_attention_scalar
#define MATRIX_AMX NULL
#endif
#if defined(__aarch64__)
#define ROWS_NEON &sl_cpu_rows_neon
#define ATTENTION_NEON &sl_cpu_attention_neon
#else
#define ROWS_NEON &sl_cpu_rows_scalar
#define ATTENTION_NEON &sl_cpu_attention_scalar
#endif

static const struct sl_cpu_kernels tables[SL_CPU_N_LEVELS] = {
    [SL_CPU_SCALAR] = {SL_CPU_SCALAR, &sl_cpu_rows_scalar, &sl_cpu_attention_scalar, NULL},
    [SL_CPU_AVX2] = {SL_CPU_AVX2, ROWS_AVX2, ATTENTION_AVX2, NULL},
    [SL_CPU_AVX512] = {SL_CPU_AVX512, ROWS_AVX512, ATTENTION_AVX512, NULL},
    [SL_CPU_AVX512VNNI] = {SL_CPU_AVX512VNNI, ROWS_AVX512, ATTENTION_AVX512, NULL},
    [SL_CPU_AMX] = {SL_CPU_AMX, ROWS_AVX512, ATTENTION_AVX512, MATRIX_AMX},
    [SL_CPU_NEON] = {SL_CPU_NEON, ROWS_NEON, ATTENTION_NEON, NULL},
};

const struct sl_cpu_kernels *sl_cpu_kernels(enum sl_cpu_level level)
{
    return (unsigned)level < SL_CPU_N_LEVELS ? &tables[level] : &tables[SL_CPU_SCALAR];
}
