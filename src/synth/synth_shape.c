/* SPDX-License-Identifier: Apache-2.0
 *
 * Shapes of real models, from their published configurations, tiny ones for tests, and the type
 * mixtures.
 */
#include <string.h>
#include <strings.h>

#include "synth/synth_internal.h"

#define LLAMA3(factor)                                                                             \
    .rope_base = 500000, .norm_eps = 1e-5f, .rope_factor = (factor), .rope_ctx = 8192,             \
    .vocab = SL_SYNTH_VOCAB_LLAMA3
#define SIZES(layers, embd, ff, heads, kv_heads, dim, vocab_size, ctx)                             \
    .n_layers = (layers), .n_embd = (embd), .n_ff = (ff), .n_heads = (heads),                      \
    .n_kv_heads = (kv_heads), .head_dim = (dim), .n_vocab = (vocab_size), .n_ctx = (ctx)

/* clang-format off */
static const struct sl_synth_shape shapes[] = {
    /*                                         layers  embd     ff heads kv  dim   vocab     ctx */
    {.name = "minitron4b", .title = "Llama 3.1 Minitron 4B Width shape", .arch = SL_SYNTH_LLAMA,
     SIZES(                                        32, 3072,  9216, 32,  8, 128, 128256, 131072), LLAMA3(8)},
    {.name = "minitron8b", .title = "Mistral NeMo Minitron 8B shape", .arch = SL_SYNTH_LLAMA,
     SIZES(                                        40, 4096, 11520, 32,  8, 128, 131072,   8192),
     .rope_base = 1000000, .norm_eps = 1e-5f, .vocab = SL_SYNTH_VOCAB_TEKKEN},
    {.name = "llama8b", .title = "Llama 3.1 8B shape", .arch = SL_SYNTH_LLAMA,
     SIZES(                                        32, 4096, 14336, 32,  8, 128, 128256, 131072), LLAMA3(8)},
    {.name = "llama3b", .title = "Llama 3.2 3B shape", .arch = SL_SYNTH_LLAMA, .tied = true,
     SIZES(                                        28, 3072,  8192, 24,  8, 128, 128256, 131072), LLAMA3(32)},
    {.name = "llama1b", .title = "Llama 3.2 1B shape", .arch = SL_SYNTH_LLAMA, .tied = true,
     SIZES(                                        16, 2048,  8192, 32,  8,  64, 128256, 131072), LLAMA3(32)},
    {.name = "smollm2-135m", .title = "SmolLM2 135M shape", .arch = SL_SYNTH_LLAMA, .tied = true,
     SIZES(                                        30,  576,  1536,  9,  3,  64,  49152,   8192),
     .rope_base = 100000, .norm_eps = 1e-5f, .vocab = SL_SYNTH_VOCAB_SMOLLM},
    {.name = "qwen2.5-0.5b", .title = "Qwen 2.5 0.5B shape", .arch = SL_SYNTH_QWEN2, .tied = true,
     SIZES(                                        24,  896,  4864, 14,  2,  64, 151936,  32768),
     .rope_base = 1000000, .norm_eps = 1e-6f, .vocab = SL_SYNTH_VOCAB_QWEN},
    {.name = "qwen3-4b", .title = "Qwen 3 4B shape", .arch = SL_SYNTH_QWEN3, .tied = true,
     SIZES(                                        36, 2560,  9728, 32,  8, 128, 151936,  40960),
     .rope_base = 1000000, .norm_eps = 1e-6f, .vocab = SL_SYNTH_VOCAB_QWEN},
    {.name = "gemma3-1b", .title = "Gemma 3 1B shape", .arch = SL_SYNTH_GEMMA3, .tied = true,
     SIZES(                                        26, 1152,  6912,  4,  1, 256, 262144,  32768),
     .rope_base = 1000000, .norm_eps = 1e-6f, .window = 512, .vocab = SL_SYNTH_VOCAB_GEMMA},
    {.name = "gemma3-4b", .title = "Gemma 3 4B shape", .arch = SL_SYNTH_GEMMA3, .tied = true,
     SIZES(                                        34, 2560, 10240,  8,  4, 256, 262144, 131072),
     .rope_base = 1000000, .norm_eps = 1e-6f, .rope_factor = 8, .window = 1024,
     .vocab = SL_SYNTH_VOCAB_GEMMA},
    {.name = "qwen30b", .title = "Qwen 3 30B-A3B shape", .arch = SL_SYNTH_QWEN3MOE,
     SIZES(                                        48, 2048,   768, 32,  4, 128, 151936,  40960),
     .n_experts = 128, .n_experts_used = 8,
     .rope_base = 1000000, .norm_eps = 1e-6f, .vocab = SL_SYNTH_VOCAB_QWEN},
    {.name = "qwen235b", .title = "Qwen 3 235B-A22B shape", .arch = SL_SYNTH_QWEN3MOE,
     SIZES(                                        94, 4096,  1536, 64,  4, 128, 151936,  40960),
     .n_experts = 128, .n_experts_used = 8,
     .rope_base = 1000000, .norm_eps = 1e-6f, .vocab = SL_SYNTH_VOCAB_QWEN},
    {.name = "qwen57b", .title = "Qwen 2 57B-A14B shape", .arch = SL_SYNTH_QWEN2MOE,
     SIZES(                                        28, 3584,  2560, 28,  4, 128, 151936,  32768),
     .n_experts = 64, .n_experts_used = 8, .n_ff_shared = 20480,
     .rope_base = 1000000, .norm_eps = 1e-6f, .vocab = SL_SYNTH_VOCAB_QWEN},
    {.name = "mixtral", .title = "Mixtral 8x7B shape", .arch = SL_SYNTH_LLAMA,
     SIZES(                                        32, 4096, 14336, 32,  8, 128,  32000,  32768),
     .n_experts = 8, .n_experts_used = 2,
     .rope_base = 1000000, .norm_eps = 1e-5f, .vocab = SL_SYNTH_VOCAB_TEKKEN},
    {.name = "gpt-oss-20b", .title = "gpt-oss 20B shape", .arch = SL_SYNTH_GPT_OSS,
     SIZES(                                        24, 2880,  2880, 64,  8,  64, 201088, 131072),
     .n_experts = 32, .n_experts_used = 4, .rope_factor = 32, .rope_ctx = 4096, .window = 128,
     .rope_base = 150000, .norm_eps = 1e-5f, .vocab = SL_SYNTH_VOCAB_O200K},
    {.name = "gpt-oss-120b", .title = "gpt-oss 120B shape", .arch = SL_SYNTH_GPT_OSS,
     SIZES(                                        36, 2880,  2880, 64,  8,  64, 201088, 131072),
     .n_experts = 128, .n_experts_used = 4, .rope_factor = 32, .rope_ctx = 4096, .window = 128,
     .rope_base = 150000, .norm_eps = 1e-5f, .vocab = SL_SYNTH_VOCAB_O200K},
    {.name = "tiny-llama", .title = "Tiny Llama", .arch = SL_SYNTH_LLAMA,
     SIZES(                                         4,  256,   512,  8,  2,  32,    320,   2048),
     .rope_base = 10000, .norm_eps = 1e-5f, .rope_factor = 8, .rope_ctx = 512,
     .vocab = SL_SYNTH_VOCAB_LLAMA3},
    {.name = "tiny-qwen2", .title = "Tiny Qwen 2", .arch = SL_SYNTH_QWEN2, .tied = true,
     SIZES(                                         3,  256,   768,  4,  2,  64,    320,   2048),
     .rope_base = 1000000, .norm_eps = 1e-6f, .vocab = SL_SYNTH_VOCAB_QWEN},
    {.name = "tiny-qwen3", .title = "Tiny Qwen 3", .arch = SL_SYNTH_QWEN3, .tied = true,
     SIZES(                                         3,  256,   768,  4,  2, 128,    320,   2048),
     .rope_base = 1000000, .norm_eps = 1e-6f, .vocab = SL_SYNTH_VOCAB_QWEN},
    {.name = "tiny-gemma3", .title = "Tiny Gemma 3", .arch = SL_SYNTH_GEMMA3, .tied = true,
     SIZES(                                         8,  256,   512,  4,  1,  64,    384,   2048),
     .rope_base = 1000000, .norm_eps = 1e-6f, .rope_factor = 8, .window = 32,
     .vocab = SL_SYNTH_VOCAB_GEMMA},
    {.name = "tiny-qwen2moe", .title = "Tiny Qwen 2 mixture", .arch = SL_SYNTH_QWEN2MOE,
     SIZES(                                         4,  256,   256,  4,  2,  64,    320,   2048),
     .n_experts = 12, .n_experts_used = 4, .n_ff_shared = 512,
     .rope_base = 1000000, .norm_eps = 1e-6f, .vocab = SL_SYNTH_VOCAB_QWEN},
    {.name = "tiny-qwen3moe", .title = "Tiny Qwen 3 mixture", .arch = SL_SYNTH_QWEN3MOE,
     SIZES(                                         4,  256,   256,  4,  2,  64,    320,   2048),
     .n_experts = 16, .n_experts_used = 4,
     .rope_base = 1000000, .norm_eps = 1e-6f, .vocab = SL_SYNTH_VOCAB_QWEN},
    {.name = "tiny-gpt-oss", .title = "Tiny gpt-oss", .arch = SL_SYNTH_GPT_OSS,
     SIZES(                                         4,  256,   256,  4,  2,  64,    320,   2048),
     .n_experts = 8, .n_experts_used = 2, .rope_factor = 32, .rope_ctx = 64, .window = 16,
     .rope_base = 150000, .norm_eps = 1e-5f, .vocab = SL_SYNTH_VOCAB_O200K},
};
/* clang-format on */
#define N_SHAPES (sizeof(shapes) / sizeof(shapes[0]))

static const char *const arch_names[] = {
    [SL_SYNTH_LLAMA] = "llama",       [SL_SYNTH_QWEN2] = "qwen2",
    [SL_SYNTH_QWEN3] = "qwen3",       [SL_SYNTH_GEMMA3] = "gemma3",
    [SL_SYNTH_QWEN3MOE] = "qwen3moe", [SL_SYNTH_GPT_OSS] = "gpt-oss",
    [SL_SYNTH_QWEN2MOE] = "qwen2moe",
};

const struct sl_synth_shape *sl_synth_shape_at(size_t index)
{
    return index < N_SHAPES ? &shapes[index] : NULL;
}

const struct sl_synth_shape *sl_synth_shape_find(const char *name)
{
    for (size_t i = 0; i < N_SHAPES; i++) {
        if (strcasecmp(shapes[i].name, name) == 0) {
            return &shapes[i];
        }
    }
    return NULL;
}

bool sl_synth_shape_base(const char *arch, struct sl_synth_shape *out)
{
    for (size_t i = 0; i < N_SHAPES; i++) {
        if (strncmp(shapes[i].name, "tiny-", 5) == 0 && strcmp(shapes[i].name + 5, arch) == 0) {
            *out = shapes[i];
            return true;
        }
    }
    return false;
}

const char *sl_synth_arch_name(enum sl_synth_arch arch)
{
    return arch_names[arch];
}

/* general.file_type of a model that is all of one type. */
static int32_t file_type(enum sl_type type)
{
    static const struct {
        enum sl_type type;
        int32_t ftype;
    } known[] = {
        {SL_TYPE_F32, 0},     {SL_TYPE_F16, 1},     {SL_TYPE_Q4_0, 2},  {SL_TYPE_Q4_1, 3},
        {SL_TYPE_Q8_0, 7},    {SL_TYPE_Q5_0, 8},    {SL_TYPE_Q5_1, 9},  {SL_TYPE_Q2_K, 10},
        {SL_TYPE_Q3_K, 12},   {SL_TYPE_Q4_K, 14},   {SL_TYPE_Q5_K, 16}, {SL_TYPE_Q6_K, 18},
        {SL_TYPE_IQ4_NL, 25}, {SL_TYPE_IQ4_XS, 30}, {SL_TYPE_BF16, 32}, {SL_TYPE_MXFP4, 38},
    };
    for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++) {
        if (known[i].type == type) {
            return known[i].ftype;
        }
    }
    return -1;
}

bool sl_synth_mix_from_name(const char *name, struct sl_synth_mix *out)
{
    if (strcasecmp(name, "Q4_K_M") == 0) {
        *out = (struct sl_synth_mix){.type = SL_TYPE_Q4_K, .mixed = true, .ftype = 15};
        return true;
    }
    if (strcasecmp(name, "Q5_K_M") == 0) {
        *out = (struct sl_synth_mix){.type = SL_TYPE_Q5_K, .mixed = true, .ftype = 17};
        return true;
    }
    enum sl_type type;
    if (!sl_type_from_name(name, &type) || !sl_type_traits((uint32_t)type)->computes) {
        return false;
    }
    *out = (struct sl_synth_mix){.type = type, .ftype = file_type(type)};
    return true;
}
