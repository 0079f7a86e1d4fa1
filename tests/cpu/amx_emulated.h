/* SPDX-License-Identifier: Apache-2.0
 *
 * AMX kernels that run on processors without AMX.
 */
#ifndef SL_TESTS_AMX_EMULATED_H
#define SL_TESTS_AMX_EMULATED_H

#include "cpu/linear_internal.h"

/* NULL where the processor lacks what else they need. */
const struct sl_cpu_linear_kernels *sl_test_linear_amx(void);
/* For one row as for many. */
const struct sl_cpu_attention_matrix_kernels *sl_test_attention_amx(void);

#endif
