/* SPDX-License-Identifier: Apache-2.0
 *
 * Gated activation with AVX2.
 */
#define LINEAR_ACTIVATE sl_linear_activate_avx2
#include "cpu/linear_act_tmpl.h"
