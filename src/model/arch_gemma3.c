/* SPDX-License-Identifier: Apache-2.0
 *
 * gemma3: the text part of Gemma 3. Norms before and after each sub-layer; q/k norms; five layers
 * with a sliding window to one that attends to everything, which alone uses the file's rope base
 * and scaling. Norm weights in the file already hold the "1 +" of the published form.
 */
#include "model/arch.h"

const struct sl_arch sl_arch_gemma3 = {
    .name = "gemma3",
    .required = SL_V_BASE | SL_V_BIT(SL_V_Q_NORM) | SL_V_BIT(SL_V_K_NORM) |
                SL_V_BIT(SL_V_POST_ATTN_NORM) | SL_V_BIT(SL_V_POST_FFN_NORM),
    .rope_neox = true,
    .activation = SL_ACT_GELU_TANH,
    .scale_embedding = true,
    .window_period = 6,
    .local_rope_base = 10000.0,
    .width_scaled_layers = 62, /* the 27B: query_pre_attn_scalar 168 = 5376 / 32 */
};
