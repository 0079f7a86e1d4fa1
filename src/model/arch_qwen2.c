/* SPDX-License-Identifier: Apache-2.0
 *
 * qwen2: Qwen 2 and 2.5. Biases on q, k and v.
 */
#include "model/arch.h"

const struct sl_arch sl_arch_qwen2 = {
    .name = "qwen2",
    .required = SL_V_BASE | SL_V_BIT(SL_V_Q_BIAS) | SL_V_BIT(SL_V_K_BIAS) | SL_V_BIT(SL_V_V_BIAS),
    .optional = SL_V_BIT(SL_V_OUTPUT_BIAS),
    .rope_neox = true,
    .activation = SL_ACT_SILU,
};
