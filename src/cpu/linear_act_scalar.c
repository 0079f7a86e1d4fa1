/* SPDX-License-Identifier: Apache-2.0
 *
 * Gated activation compiled for the baseline of the architecture.
 */
#define LINEAR_ACTIVATE sl_linear_activate_scalar
#include "cpu/linear_act_tmpl.h"
