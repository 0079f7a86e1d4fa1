/* SPDX-License-Identifier: Apache-2.0
 *
 * The list of architectures.
 */
#include "model/arch.h"

#include <string.h>

#include "model/model.h"

/* Everything that lists architectures comes from here. */
#define ARCHS(X)                                                                                   \
    X(llama, "llama")                                                                              \
    X(qwen2, "qwen2")                                                                              \
    X(qwen2moe, "qwen2moe")                                                                        \
    X(qwen3, "qwen3")                                                                              \
    X(qwen3moe, "qwen3moe")                                                                        \
    X(gemma3, "gemma3")                                                                            \
    X(gpt_oss, "gpt-oss")

#define AS_ROW(name, text) &sl_arch_##name,
static const struct sl_arch *const archs[] = {ARCHS(AS_ROW)};

const struct sl_arch *sl_arch_find(const char *name, size_t length)
{
    for (size_t i = 0; i < sizeof archs / sizeof archs[0]; i++) {
        if (strlen(archs[i]->name) == length && memcmp(archs[i]->name, name, length) == 0) {
            return archs[i];
        }
    }
    return NULL;
}

const char *sl_model_known_archs(void)
{
#define AS_TEXT(name, text) ", " text
    static const char names[] = ARCHS(AS_TEXT);
    return names + 2;
}
