/* SPDX-License-Identifier: Apache-2.0
 *
 * Row kernels compiled for Armv8.2 NEON: an instance of cpu/rows_tmpl.h.
 */
#define ROWS_TABLE sl_cpu_rows_neon
#include "cpu/rows_tmpl.h"
