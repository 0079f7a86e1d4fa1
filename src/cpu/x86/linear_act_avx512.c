/* SPDX-License-Identifier: Apache-2.0
 *
 * Gated activation with AVX-512.
 */
#define LINEAR_ACTIVATE sl_linear_activate_avx512
#include "cpu/linear_act_tmpl.h"
