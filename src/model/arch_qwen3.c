/* SPDX-License-Identifier: Apache-2.0
 *
 * qwen3: dense Qwen 3. Each query and key head is normed before it is rotated; no biases.
 */
#include "model/arch.h"

const struct sl_arch sl_arch_qwen3 = {
    .name = "qwen3",
    .required = SL_V_BASE | SL_V_BIT(SL_V_Q_NORM) | SL_V_BIT(SL_V_K_NORM),
    .rope_neox = true,
    .activation = SL_ACT_SILU,
};
