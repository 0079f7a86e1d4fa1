/* SPDX-License-Identifier: Apache-2.0
 *
 * Row kernels compiled for the baseline of the architecture: an instance of cpu/rows_tmpl.h.
 */
#define ROWS_TABLE sl_cpu_rows_scalar
#include "cpu/rows_tmpl.h"
