/* SPDX-License-Identifier: Apache-2.0
 *
 * Models that are wrong in one place: each gives an error that names it, and holds no memory after.
 * Numbers pulled to every extreme either give an error or a model whose operators are valid.
 */
#include "test.h"

#include <inttypes.h>
#include <stdio.h>

#include "base/mem.h"
#include "model/model.h"
#include "support/gguf_patch.h"

static const char patched_path[] = SLUICE_BINARY_DIR "/test_model_malformed.gguf";

static void fixture_path(char out[512], const char *name)
{
    snprintf(out, 512, "%s/model/%s.gguf", SLUICE_FIXTURES, name);
}

static void make(const char *base, const struct patch *patch)
{
    struct sluice_error err;
    char path[512];
    fixture_path(path, base);
    assert_ok(patch_copy(path, patched_path, patch, &err), err);
}

struct bad {
    const char *base;
    struct patch patch;
    enum sluice_status status;
    const char *mentions;  /* key or tensor */
    const char *mentions2; /* what is wrong; or NULL */
};

#define DROP(key)                                                                                  \
    {                                                                                              \
        .kind = PATCH_DROP, .name = key                                                            \
    }
#define U32(key, value)                                                                            \
    {                                                                                              \
        .kind = PATCH_U32, .name = key, .number = value                                            \
    }
#define F32(key, value)                                                                            \
    {                                                                                              \
        .kind = PATCH_F32, .name = key, .number = value                                            \
    }
#define BOOL(key, value)                                                                           \
    {                                                                                              \
        .kind = PATCH_BOOL, .name = key, .number = value                                           \
    }
#define U32S(key, a, b)                                                                            \
    {                                                                                              \
        .kind = PATCH_U32S, .name = key, .number = a, .number2 = b                                 \
    }
#define STRING(key, value)                                                                         \
    {                                                                                              \
        .kind = PATCH_STRING, .name = key, .text = value                                           \
    }
#define RESHAPE(tensor, ...)                                                                       \
    {                                                                                              \
        .kind = PATCH_RESHAPE, .name = tensor, .dims = { __VA_ARGS__ }                             \
    }
#define RETYPE(tensor, to)                                                                         \
    {                                                                                              \
        .kind = PATCH_RETYPE, .name = tensor, .type = to                                           \
    }
#define ADD(tensor, ...)                                                                           \
    {                                                                                              \
        .kind = PATCH_ADD, .name = tensor, .dims = { __VA_ARGS__ }                                 \
    }

#define F SLUICE_STATUS_FORMAT
#define U SLUICE_STATUS_UNSUPPORTED

static const struct bad bad_keys[] = {
    {"qwen3", DROP("general.architecture"), F, "general.architecture", NULL},
    {"qwen3", U32("general.architecture", 3), F, "general.architecture", NULL},
    {"qwen3", STRING("general.architecture", "mamba"), U, "mamba",
     "llama, qwen2, qwen2moe, qwen3, qwen3moe, gemma3, gpt-oss"},
    {"qwen3", STRING("general.architecture", "deepseek2"), U, "deepseek2", NULL},
    {"qwen3", STRING("general.architecture", ""), U, "general.architecture", NULL},
    {"qwen3", DROP("qwen3.block_count"), F, "qwen3.block_count", NULL},
    {"qwen3", U32("qwen3.block_count", 0), F, "qwen3.block_count", "is 0"},
    {"qwen3", U32("qwen3.block_count", 4e9), F, "qwen3.block_count", "1024"},
    {"qwen3", U32("qwen3.block_count", 3), F, "blk.2.attn_q.weight", "missing"},
    {"qwen3", U32("qwen3.block_count", 1), U, "blk.1.", "no place"},
    {"qwen3", F32("qwen3.block_count", 2), F, "qwen3.block_count", NULL},
    {"qwen3", STRING("qwen3.block_count", "2"), F, "qwen3.block_count", NULL},
    {"qwen3", DROP("qwen3.embedding_length"), F, "qwen3.embedding_length", NULL},
    {"qwen3", U32("qwen3.embedding_length", 64), F, "token_embd.weight", "64"},
    {"qwen3", U32("qwen3.embedding_length", 1 << 30), F, "qwen3.embedding_length", NULL},
    {"qwen3", DROP("qwen3.context_length"), F, "qwen3.context_length", NULL},
    {"qwen3", U32("qwen3.context_length", 0), F, "qwen3.context_length", "is 0"},
    {"qwen3", U32("qwen3.context_length", 4e9), F, "qwen3.context_length", NULL},
    {"qwen3", DROP("qwen3.feed_forward_length"), F, "qwen3.feed_forward_length", NULL},
    {"qwen3", U32("qwen3.feed_forward_length", 96), F, "blk.0.ffn_gate.weight", "96"},
    {"qwen3", U32S("qwen3.feed_forward_length", 64, 32), U, "feed_forward_length", "layers"},
    {"qwen3", DROP("qwen3.attention.head_count"), F, "attention.head_count", NULL},
    {"qwen3", U32("qwen3.attention.head_count", 0), F, "attention.head_count", "is 0"},
    {"qwen3", U32("qwen3.attention.head_count", 1e9), F, "attention.head_count", NULL},
    {"qwen3", U32("qwen3.attention.head_count", 8), F, "attn_q.weight", "512"},
    {"qwen3", U32S("qwen3.attention.head_count", 4, 2), U, "attention.head_count", "layers"},
    {"qwen3", U32("qwen3.attention.head_count_kv", 3), F, "head_count_kv", "multiple"},
    {"qwen3", U32("qwen3.attention.head_count_kv", 0), F, "head_count_kv", "is 0"},
    {"qwen3", U32("qwen3.attention.head_count_kv", 2), F, "attn_k.weight", "128"},
    {"qwen3", DROP("qwen3.attention.head_count_kv"), F, "attn_k.weight", "256"},
    {"qwen3", U32("qwen3.attention.key_length", 48), U, "key_length", "multiple of 32"},
    {"qwen3", U32("qwen3.attention.key_length", 512), U, "key_length", "256"},
    {"qwen3", U32("qwen3.attention.key_length", 0), F, "key_length", "is 0"},
    {"qwen3", DROP("qwen3.attention.key_length"), U, "key_length", "8 elements"},
    {"qwen3", U32("qwen3.attention.value_length", 32), U, "value_length", NULL},
    {"qwen3", U32("qwen3.rope.dimension_count", 63), F, "dimension_count", "even"},
    {"qwen3", U32("qwen3.rope.dimension_count", 66), F, "dimension_count", "64"},
    {"qwen3", F32("qwen3.rope.freq_base", 0), F, "rope.freq_base", "is 0"},
    {"qwen3", F32("qwen3.rope.freq_base", -1e4), F, "rope.freq_base", NULL},
    {"qwen3", F32("qwen3.rope.freq_base", 1e60), F, "rope.freq_base", "finite"},
    {"qwen3", STRING("qwen3.rope.scaling.type", "su"), U, "scaling.type", "'su'"},
    {"qwen3", U32("qwen3.rope.scaling.type", 1), F, "scaling.type", NULL},
    {"qwen3", F32("qwen3.rope.scaling.factor", -2), F, "rope.scaling.factor", "-2"},
    {"qwen3", F32("qwen3.rope.scaling.factor", 1e30), F, "rope.scaling.factor", NULL},
    {"qwen3", F32("qwen3.rope.scaling.yarn_beta_fast", 0), F, "yarn_beta_fast", NULL},
    {"qwen3", DROP("qwen3.attention.layer_norm_rms_epsilon"), F, "rms_epsilon", NULL},
    {"qwen3", F32("qwen3.attention.layer_norm_rms_epsilon", -1), F, "rms_epsilon", "-1"},
    {"qwen3", F32("qwen3.attention.scale", -1), F, "qwen3.attention.scale", "positive"},
    {"qwen3", U32("qwen3.expert_count", 8), U, "qwen3.expert_count", "experts"},
    {"qwen3moe", DROP("qwen3moe.expert_count"), F, "qwen3moe.expert_count", "missing"},
    {"qwen3moe", U32("qwen3moe.expert_count", 0), F, "qwen3moe.expert_count", "missing or 0"},
    {"qwen3moe", U32("qwen3moe.expert_count", 2000), F, "qwen3moe.expert_count", "2000"},
    {"qwen3moe", U32("qwen3moe.expert_count", 8), F, "blk.0.ffn_gate_exps.weight", "32, 32, 8"},
    {"qwen3moe", DROP("qwen3moe.expert_used_count"), F, "qwen3moe.expert_used_count", NULL},
    {"qwen3moe", U32("qwen3moe.expert_used_count", 0), F, "qwen3moe.expert_used_count", "is 0"},
    {"qwen3moe", U32("qwen3moe.expert_used_count", 17), F, "expert_used_count", "1 to 16"},
    {"qwen3moe", U32("qwen3moe.expert_feed_forward_length", 64), F, "ffn_gate_exps", "64"},
    {"qwen3moe", F32("qwen3moe.expert_weights_scale", 2.5), U, "expert_weights_scale", "2.5"},
    {"qwen3moe", U32("qwen3moe.expert_shared_count", 1), U, "expert_shared_count", "is 1"},
    {"qwen3moe", U32("qwen3moe.leading_dense_block_count", 1), U, "leading_dense", "is 1"},
    {"mixtral", U32("llama.expert_count", 0), F, "blk.0.ffn_gate.weight", "missing"},
    {"qwen3", F32("qwen3.final_logit_softcapping", 30), U, "final_logit_softcapping", NULL},
    {"qwen3", F32("qwen3.logit_scale", 8), U, "logit_scale", NULL},
    {"qwen3", BOOL("qwen3.attention.causal", 0), U, "attention.causal", "causal"},
    {"gemma3", U32("gemma3.attention.sliding_window", 3e9), F, "sliding_window", NULL},
    {"gemma3", U32("gemma3.attention.sliding_window_pattern", 0), F, "sliding_window_pattern",
     "is 0"},
    {"gemma3", U32S("gemma3.attention.sliding_window_pattern", 1, 0), U, "sliding_window_pattern",
     "array"},
    {"gemma3", F32("gemma3.rope.freq_base_swa", 0), F, "freq_base_swa", NULL},
};

static const struct bad bad_tensors[] = {
    {"qwen3", DROP("token_embd.weight"), F, "token_embd.weight", "missing"},
    {"qwen3", DROP("output_norm.weight"), F, "output_norm.weight", "missing"},
    {"qwen3", DROP("blk.1.attn_norm.weight"), F, "blk.1.attn_norm.weight", "missing"},
    {"qwen3", DROP("blk.0.ffn_norm.weight"), F, "blk.0.ffn_norm.weight", "missing"},
    {"qwen3", DROP("blk.0.attn_q.weight"), F, "blk.0.attn_q.weight", "missing"},
    {"qwen3", DROP("blk.0.attn_k.weight"), F, "blk.0.attn_k.weight", "missing"},
    {"qwen3", DROP("blk.0.attn_v.weight"), F, "blk.0.attn_v.weight", "missing"},
    {"qwen3", DROP("blk.1.attn_output.weight"), F, "blk.1.attn_output.weight", "missing"},
    {"qwen3", DROP("blk.1.ffn_gate.weight"), F, "blk.1.ffn_gate.weight", "missing"},
    {"qwen3", DROP("blk.1.ffn_up.weight"), F, "blk.1.ffn_up.weight", "missing"},
    {"qwen3", DROP("blk.1.ffn_down.weight"), F, "blk.1.ffn_down.weight", "missing"},
    {"qwen3", DROP("blk.0.attn_q_norm.weight"), F, "blk.0.attn_q_norm.weight", "missing"},
    {"qwen3", DROP("blk.1.attn_k_norm.weight"), F, "blk.1.attn_k_norm.weight", "missing"},
    {"qwen2_yarn", DROP("blk.0.attn_q.bias"), F, "blk.0.attn_q.bias", "missing"},
    {"qwen2_yarn", DROP("blk.0.attn_v.bias"), F, "blk.0.attn_v.bias", "missing"},
    {"gemma3", DROP("blk.6.post_attention_norm.weight"), F, "blk.6.post_attention_norm.weight",
     "missing"},
    {"gemma3", DROP("blk.6.post_ffw_norm.weight"), F, "blk.6.post_ffw_norm.weight", "missing"},
    {"llama_longrope", DROP("rope_factors_short.weight"), F, "rope_factors_short.weight",
     "missing"},
    {"llama_longrope", DROP("rope_factors_long.weight"), F, "rope_factors_long.weight", "missing"},
    {"qwen3", RESHAPE("token_embd.weight", 64, 64), F, "token_embd.weight", "[64, 64"},
    {"qwen3", RESHAPE("token_embd.weight", 32, 64, 2), F, "token_embd.weight", NULL},
    {"qwen3", RESHAPE("blk.0.attn_q.weight", 256, 32), F, "blk.0.attn_q.weight", "[256, 32"},
    {"qwen3", RESHAPE("blk.0.attn_k.weight", 32, 32), F, "blk.0.attn_k.weight", NULL},
    {"qwen3", RESHAPE("blk.0.ffn_down.weight", 64, 32, 2), F, "blk.0.ffn_down.weight", NULL},
    {"qwen3", RESHAPE("blk.0.ffn_up.weight", 32), F, "blk.0.ffn_up.weight", NULL},
    {"qwen3", RESHAPE("output_norm.weight", 64), F, "output_norm.weight", "[32]"},
    {"qwen3", RESHAPE("blk.1.attn_norm.weight", 32, 2), F, "blk.1.attn_norm.weight", NULL},
    {"qwen3", RESHAPE("blk.1.attn_q_norm.weight", 32), F, "blk.1.attn_q_norm.weight", "[64]"},
    {"llama_bias", RESHAPE("blk.0.attn_q.bias", 64), F, "blk.0.attn_q.bias", "[128]"},
    {"llama_bias", RESHAPE("output.weight", 32, 65), F, "output.weight", "65"},
    {"llama_freqs", RESHAPE("rope_freqs.weight", 32), F, "rope_freqs.weight", "[16]"},
    /* Zeros are no divisors. */
    {"llama_freqs", RESHAPE("rope_freqs.weight", 16), F, "rope_freqs.weight", "positive"},
    {"qwen2moe", U32("qwen2moe.expert_shared_feed_forward_length", 0), F, "_shared_feed", "is 0"},
    {"qwen2moe", U32("qwen2moe.expert_shared_feed_forward_length", 32), F, "_shexp", "64, 96"},
    {"qwen2moe", DROP("qwen2moe.expert_shared_feed_forward_length"), F, "_shexp", "96"},
    {"qwen2moe", DROP("blk.1.ffn_gate_inp_shexp.weight"), F, "blk.1.ffn_gate_inp_shexp", "missing"},
    {"qwen2moe", DROP("blk.0.ffn_down_shexp.weight"), F, "blk.0.ffn_down_shexp.weight", "missing"},
    {"qwen2moe", RESHAPE("blk.0.ffn_gate_inp_shexp.weight", 32, 2), F, "blk.0.ffn_gate_inp_shexp",
     "[64, 1"},
    {"qwen3moe", ADD("blk.0.ffn_up_shexp.weight", 32, 64), U, "blk.0.ffn_up_shexp", "no place"},
    {"qwen3moe", DROP("blk.1.ffn_gate_inp.weight"), F, "blk.1.ffn_gate_inp.weight", "missing"},
    {"qwen3moe", DROP("blk.0.ffn_up_exps.weight"), F, "blk.0.ffn_up_exps.weight", "missing"},
    {"qwen3moe", DROP("blk.1.ffn_down_exps.weight"), F, "blk.1.ffn_down_exps.weight", "missing"},
    {"qwen3moe", RESHAPE("blk.0.ffn_gate_inp.weight", 32, 8), F, "blk.0.ffn_gate_inp", "[32, 16"},
    {"qwen3moe", RESHAPE("blk.0.ffn_down_exps.weight", 32, 512), F, "blk.0.ffn_down_exps.weight",
     "[32, 32, 16]"},
    {"qwen3moe", ADD("blk.0.ffn_gate_inp.bias", 16), U, "blk.0.ffn_gate_inp.bias", "no place"},
    {"qwen3moe", ADD("blk.0.exp_probs_b.bias", 16), U, "blk.0.exp_probs_b.bias", "no place"},
    {"qwen3moe", ADD("blk.0.ffn_up_exps.bias", 32, 16), U, "blk.0.ffn_up_exps.bias", "no place"},
    {"gpt_oss", DROP("blk.0.attn_sinks.weight"), F, "blk.0.attn_sinks.weight", "missing"},
    {"gpt_oss", DROP("blk.2.ffn_gate_inp.bias"), F, "blk.2.ffn_gate_inp.bias", "missing"},
    {"gpt_oss", DROP("blk.1.post_attention_norm.weight"), F, "blk.1.post_attention_norm.weight",
     "missing"},
    {"gpt_oss", DROP("blk.0.ffn_down_exps.bias"), F, "blk.0.ffn_down_exps.bias", "missing"},
    {"gpt_oss", DROP("blk.0.ffn_gate_exps.bias"), U, "blk.0.ffn_", "no place"},
    {"gpt_oss", RESHAPE("blk.0.ffn_up_exps.bias", 32, 7), F, "blk.0.ffn_up_exps.bias", "[32, 8"},
    {"gpt_oss", RETYPE("blk.0.ffn_up_exps.bias", SL_TYPE_F16), U, "blk.0.ffn_up_exps.bias", "F16"},
    {"qwen3", RETYPE("blk.0.attn_q.weight", SL_TYPE_I32), U, "blk.0.attn_q.weight", "I32"},
    {"qwen3", RETYPE("token_embd.weight", SL_TYPE_I8), U, "token_embd.weight", "I8"},
    {"qwen3", RETYPE("output_norm.weight", SL_TYPE_Q8_0), U, "output_norm.weight", "Q8_0"},
    {"qwen3", ADD("blk.0.attn_q.bias", 256), U, "blk.0.attn_q.bias", "no place"},
    {"qwen3", ADD("blk.0.ffn_gate_inp.weight", 32, 8), U, "blk.0.ffn_gate_inp.weight", "no place"},
    {"llama_bias", ADD("rope_factors_long.weight", 16), U, "rope_factors_long.weight", "no place"},
};

static void check_bad(const struct bad *cases, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        make(cases[i].base, &cases[i].patch);
        const size_t n_blocks = sl_mem_n_blocks();
        struct sluice_error err = {0};
        struct sl_model *model = (struct sl_model *)&err; /* must become NULL */
        const enum sluice_status status = sl_model_open(&model, patched_path, 0, &err);
        if (status != cases[i].status) {
            fail_msg("case %zu (%s %s): %s: %s", i, cases[i].base, cases[i].patch.name,
                     sluice_status_name(status), err.message);
        }
        assert_null(model);
        assert_int_equal(err.status, status);
        assert_mentions(err, patched_path);
        assert_mentions(err, cases[i].mentions);
        if (cases[i].mentions2 != NULL) {
            assert_mentions(err, cases[i].mentions2);
        }
        assert_int_equal(sl_mem_n_blocks(), n_blocks);
        /* The message is optional. */
        assert_int_equal(sl_model_open(&model, patched_path, 0, NULL), status);
    }
}

static void keys(void **state)
{
    (void)state;
    check_bad(bad_keys, sizeof bad_keys / sizeof bad_keys[0]);
}

static void tensors(void **state)
{
    (void)state;
    check_bad(bad_tensors, sizeof bad_tensors / sizeof bad_tensors[0]);
}

/* Changes that a loader must take. */
static void tolerated(void **state)
{
    (void)state;
    static const struct {
        const char *base;
        struct patch patch;
    } good[] = {
        {"qwen3", U32S("qwen3.attention.head_count", 4, 4)},
        {"qwen3", DROP("qwen3.rope.dimension_count")},
        {"qwen3", DROP("qwen3.attention.value_length")},
        {"qwen3", U32("qwen3.expert_count", 0)},
        {"qwen3", F32("qwen3.rope.scaling.factor", 0)},
        {"qwen3", BOOL("qwen3.attention.causal", 1)},
        {"qwen3", ADD("blk.0.attn_rot_embd.weight", 8)},
        {"gemma3", DROP("gemma3.attention.sliding_window")},
        {"gemma3", U32("gemma3.attention.sliding_window_pattern", 1)},
    };
    for (size_t i = 0; i < sizeof good / sizeof good[0]; i++) {
        struct sluice_error err = {0};
        struct sl_model *model = NULL;
        make(good[i].base, &good[i].patch);
        assert_ok(sl_model_open(&model, patched_path, 0, &err), err);
        sl_model_close(&model);
    }
}

/* Vectors may be stored in half precision. */
static void vector_types(void **state)
{
    (void)state;
    struct sluice_error err = {0};
    char path[512];
    fixture_path(path, "qwen3");
    struct sl_model *plain = NULL;
    assert_ok(sl_model_open(&plain, path, 0, &err), err);
    static const struct {
        enum sl_type type;
        float precision;
    } types[] = {{SL_TYPE_F16, 0x1p-11F}, {SL_TYPE_BF16, 0x1p-8F}};
    for (size_t t = 0; t < 2; t++) {
        const struct patch patch = {PATCH_CONVERT, "blk.1.attn_q_norm.weight",
                                    .type = types[t].type};
        make("qwen3", &patch);
        struct sl_model *model = NULL;
        assert_ok(sl_model_open(&model, patched_path, 0, &err), err);
        assert_int_equal(model->consts_bytes, plain->consts_bytes);
        size_t n_changed = 0;
        for (size_t i = 0; i < plain->consts_bytes / sizeof(float); i++) {
            const float a = plain->consts[i];
            n_changed += a != model->consts[i];
            assert_float_equal(a, model->consts[i], (a < 0 ? -a : a) * types[t].precision);
        }
        assert_in_range(n_changed, 1, 64);
        sl_model_close(&model);
    }
    sl_model_close(&plain);
}

static void check_ops(const struct sl_model *model)
{
    for (uint32_t s = 0; s < model->n_shards; s++) {
        struct sl_op ops[SL_SHARD_MAX_OPS];
        const struct sl_shard_bind bind = {.kv = {.types = {SL_TYPE_F16, SL_TYPE_F16}},
                                           .n_tokens = 3,
                                           .n_outputs = 1,
                                           .n_kv_max = 3};
        const int n = sl_shard_build(model, &model->shards[s], &bind, ops);
        assert_in_range(n, 1, SL_SHARD_MAX_OPS);
        for (int i = 0; i < n; i++) {
            struct sluice_error err;
            assert_ok(sl_op_validate(&ops[i], &err), err);
        }
        assert_true(sl_shard_workspace_bytes(model, &model->shards[s], 3, 1) < (size_t)1 << 40);
    }
}

/* Every number of the metadata at every extreme: an error with a message, or a valid model. */
static void check_extremes(const char *base, int *n_good, int *n_bad)
{
    static const double values[] = {0,   1,   2,   3,         31,          33,         64,
                                    255, 256, 257, INT32_MAX, 2147483648., UINT32_MAX, 1e30};
    struct sluice_error err;
    char path[512];
    fixture_path(path, base);
    struct sl_gguf *file = NULL;
    assert_ok(sl_gguf_open(&file, path, &err), err);
    for (size_t k = 0; k < sl_gguf_n_values(file); k++) {
        const bool is_float = sl_gguf_value(file, k)->kind == SL_GGUF_F32;
        if (!is_float && sl_gguf_value(file, k)->kind != SL_GGUF_U32) {
            continue;
        }
        for (size_t v = 0; v < sizeof values / sizeof values[0]; v++) {
            if (!is_float && values[v] > UINT32_MAX) {
                continue;
            }
            const struct patch patch = {.kind = is_float ? PATCH_F32 : PATCH_U32,
                                        .name = sl_gguf_key(file, k),
                                        .number = values[v]};
            make(base, &patch);
            struct sl_model *model = NULL;
            memset(&err, 0, sizeof err);
            if (sl_model_open(&model, patched_path, 0, &err) == SLUICE_STATUS_OK) {
                check_ops(model);
                (*n_good)++;
            } else {
                assert_true(err.message[0] != '\0');
                (*n_bad)++;
            }
            sl_model_close(&model);
        }
    }
    sl_gguf_close(&file);
}

static void extremes(void **state)
{
    (void)state;
    static const char *const bases[] = {"gemma3", "gpt_oss"};
    for (int i = 0; i < 2; i++) {
        int n_good = 0;
        int n_bad = 0;
        check_extremes(bases[i], &n_good, &n_bad);
        assert_true(n_good > 20 && n_bad > 50);
    }
}

/* Every allocation of an open fails once. */
static void out_of_memory(void **state)
{
    (void)state;
    char path[512];
    fixture_path(path, "gemma3");
    const size_t n_blocks = sl_mem_n_blocks();
    int n_faults = 0;
    for (;; n_faults++) {
        struct sluice_error err = {0};
        struct sl_model *model = NULL;
        sl_mem_fail_after(n_faults, false);
        const enum sluice_status status = sl_model_open(&model, path, 0, &err);
        const bool fired = sl_mem_fault_fired();
        sl_mem_fail_after(-1, false);
        if (!fired) {
            assert_ok(status, err);
            sl_model_close(&model);
            break;
        }
        assert_int_equal(status, SLUICE_STATUS_OUT_OF_MEMORY);
        assert_null(model);
        assert_int_equal(sl_mem_n_blocks(), n_blocks);
    }
    assert_true(n_faults > 5);
    assert_int_equal(sl_mem_n_blocks(), n_blocks);
}

static int remove_patched(void **state)
{
    (void)state;
    remove(patched_path);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(keys),         cmocka_unit_test(tensors),  cmocka_unit_test(tolerated),
        cmocka_unit_test(vector_types), cmocka_unit_test(extremes), cmocka_unit_test(out_of_memory),
    };
    return cmocka_run_group_tests(tests, NULL, remove_patched);
}
