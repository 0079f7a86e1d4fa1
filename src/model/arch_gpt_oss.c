/* SPDX-License-Identifier: Apache-2.0
 *
 * gpt-oss: biases everywhere, attention sinks, a sliding window in every other layer (rotated like
 * the others), and mixtures whose weights are a softmax over the chosen experts alone, with a
 * clamped activation.
 */
#include "model/arch.h"

const struct sl_arch sl_arch_gpt_oss = {
    .name = "gpt-oss",
    .required = SL_V_BASE | SL_V_BIT(SL_V_Q_BIAS) | SL_V_BIT(SL_V_K_BIAS) | SL_V_BIT(SL_V_V_BIAS) |
                SL_V_BIT(SL_V_O_BIAS) | SL_V_BIT(SL_V_SINKS) | SL_V_BIT(SL_V_ROUTER_BIAS),
    .rope_neox = true,
    .activation = SL_ACT_SWIGLU_CLAMPED,
    .mixture = SL_MIXTURE_YES,
    .gating = SL_GATING_SOFTMAX_CHOSEN,
    .ffn_norm_after_attention = true,
    .window_period = 2,
};
