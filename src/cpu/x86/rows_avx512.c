/* SPDX-License-Identifier: Apache-2.0
 *
 * Row kernels compiled for AVX-512 (F, BW, DQ, VL): an instance of cpu/rows_tmpl.h.
 */
#define ROWS_TABLE sl_cpu_rows_avx512
#include "cpu/rows_tmpl.h"
