/* SPDX-License-Identifier: Apache-2.0
 *
 * Row kernels compiled for AVX2, FMA and F16C: an instance of cpu/rows_tmpl.h.
 */
#define ROWS_TABLE sl_cpu_rows_avx2
#include "cpu/rows_tmpl.h"
