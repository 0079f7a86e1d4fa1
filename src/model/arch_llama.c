/* SPDX-License-Identifier: Apache-2.0
 *
 * llama: Llama 1 to 3, Mistral, Minitron, SmolLM2 and the many models that share their shape. Some
 * carry biases; Llama 3.1 and later carry rope_freqs.weight (see rope_table.c). With experts:
 * Mixtral.
 */
#include "model/arch.h"

const struct sl_arch sl_arch_llama = {
    .name = "llama",
    .required = SL_V_BASE,
    .optional = SL_V_BIT(SL_V_Q_BIAS) | SL_V_BIT(SL_V_K_BIAS) | SL_V_BIT(SL_V_V_BIAS) |
                SL_V_BIT(SL_V_O_BIAS) | SL_V_BIT(SL_V_GATE_BIAS) | SL_V_BIT(SL_V_UP_BIAS) |
                SL_V_BIT(SL_V_DOWN_BIAS),
    .rope_neox = false,
    .activation = SL_ACT_SILU,
    .mixture = SL_MIXTURE_MAYBE,
    .gating = SL_GATING_SOFTMAX,
    .normalize_weights = true,
};
