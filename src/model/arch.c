/* SPDX-License-Identifier: Apache-2.0
 *
 * The list of architectures.
 */
#include "model/arch.h"

#include <string.h>

#include "model/model.h"

static const struct sl_arch *const archs[] = {
    &sl_arch_llama,
    &sl_arch_qwen2,
    &sl_arch_qwen3,
    &sl_arch_gemma3,
};

const struct sl_arch *sl_arch_find(const char *name, size_t length)
{
    for (size_t i = 0; i < sizeof archs / sizeof archs[0]; i++) {
        if (strlen(archs[i]->name) == length && memcmp(archs[i]->name, name, length) == 0) {
            return archs[i];
        }
    }
    return NULL;
}

/* Kept as text because callers want it without a buffer; a test compares it with the table. */
const char *sl_model_known_archs(void)
{
    return "llama, qwen2, qwen3, gemma3";
}
