/* SPDX-License-Identifier: Apache-2.0
 *
 * qwen3moe: Qwen 3 with a mixture of experts in every layer. Attention as in qwen3.
 */
#include "model/arch.h"

const struct sl_arch sl_arch_qwen3moe = {
    .name = "qwen3moe",
    .required = SL_V_BASE | SL_V_BIT(SL_V_Q_NORM) | SL_V_BIT(SL_V_K_NORM),
    .rope_neox = true,
    .activation = SL_ACT_SILU,
    .mixture = SL_MIXTURE_YES,
    .gating = SL_GATING_SOFTMAX,
    .normalize_weights = true,
};
