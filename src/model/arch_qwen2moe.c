/* SPDX-License-Identifier: Apache-2.0
 *
 * qwen2moe: Qwen 2 with a mixture of experts and a shared expert in every layer (Qwen1.5-MoE,
 * Qwen2-57B-A14B). Attention as in qwen2.
 */
#include "model/arch.h"

const struct sl_arch sl_arch_qwen2moe = {
    .name = "qwen2moe",
    .required = SL_V_BASE | SL_V_BIT(SL_V_Q_BIAS) | SL_V_BIT(SL_V_K_BIAS) | SL_V_BIT(SL_V_V_BIAS),
    .rope_neox = true,
    .activation = SL_ACT_SILU,
    .mixture = SL_MIXTURE_YES,
    .gating = SL_GATING_SOFTMAX,
    .shared_expert = true,
};
