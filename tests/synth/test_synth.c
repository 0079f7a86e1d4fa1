/* SPDX-License-Identifier: Apache-2.0
 *
 * Synthetic models: every type has the spread it should, every tiny shape opens as a model and a
 * tokenizer and computes logits of sane size, the bytes do not depend on threads, and failure
 * leaves nothing behind.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "synth/synth.h"
#include "support/forward.h"
#include "test.h"
#include "text/tokenizer.h"

#define PATH "test_synth.gguf"

static struct sl_synth_options options_of(const char *shape, const char *type)
{
    struct sl_synth_options o = {.shape = *sl_synth_shape_find(shape), .seed = 1};
    assert_true(sl_synth_mix_from_name(type, &o.mix));
    return o;
}

static void write_model(const char *shape, const char *type)
{
    struct sluice_error err = {0};
    const struct sl_synth_options o = options_of(shape, type);
    assert_ok(sl_synth_write(&o, PATH, &err), err);
}

static struct sl_gguf *open_file(void)
{
    struct sluice_error err = {0};
    struct sl_gguf *file;
    assert_ok(sl_gguf_open(&file, PATH, &err), err);
    return file;
}

/* Mean and root mean square of all items, times sqrt(row length). */
static void measure(const struct sl_gguf_tensor *t, double *mean, double *rms)
{
    const int64_t cols = t->dims[0];
    const size_t row_bytes = sl_type_row_bytes(t->type, cols);
    float *row = calloc((size_t)cols, sizeof(float));
    double sum = 0;
    double squares = 0;
    for (int64_t r = 0; r < t->dims[1]; r++) {
        sl_dequantize_row(t->type, (const uint8_t *)t->data + (size_t)r * row_bytes, row, cols);
        for (int64_t c = 0; c < cols; c++) {
            sum += (double)row[c];
            squares += (double)row[c] * (double)row[c];
        }
    }
    free(row);
    const double n = (double)(cols * t->dims[1]);
    *mean = sum / n * sqrt((double)cols);
    *rms = sqrt(squares / n) * sqrt((double)cols);
}

/* Spread 1 / sqrt(row length), twice that for the output; centred on zero. The bound of the mean
 * is five times its own spread for the smallest matrix. */
static void test_spread(void **state)
{
    (void)state;
    for (uint32_t id = 0; id < SL_TYPE_N; id++) {
        if (sl_type_traits(id) == NULL || !sl_type_traits(id)->computes) {
            continue;
        }
        write_model("tiny-llama", sl_type_name(id));
        struct sl_gguf *file = open_file();
        size_t n_matrices = 0;
        for (size_t i = 0; i < sl_gguf_n_tensors(file); i++) {
            const struct sl_gguf_tensor *t = sl_gguf_tensor(file, i);
            if (t->n_dims < 2) {
                assert_int_equal(t->type, SL_TYPE_F32);
                continue;
            }
            n_matrices++;
            assert_int_equal(t->type, id);
            double mean;
            double rms;
            measure(t, &mean, &rms);
            const double wanted = strcmp(t->name, "output.weight") == 0 ? 2 : 1;
            if (fabs(rms / wanted - 1) > 0.08 || fabs(mean) > 0.06 * wanted) {
                fail_msg("%s %s: mean %g, rms %g", sl_type_name(id), t->name, mean, rms);
            }
        }
        assert_int_equal(n_matrices, 4 * 7 + 2);
        sl_gguf_close(&file);
    }
}

/* -------------------------------------------------------- use as a model */

static void check_text(const char *shape)
{
    struct sluice_error err = {0};
    struct sl_gguf *file = open_file();
    struct sl_tokenizer *tokenizer;
    assert_ok(sl_tokenizer_create(&tokenizer, file, &err), err);
    const char text[] = "the quick brown fox: 123 \xc3\xa9\xf0\x9f\x8c\x8d\n";
    int32_t *tokens;
    size_t n;
    char *back;
    size_t length;
    assert_ok(sl_tokenizer_encode(tokenizer, text, strlen(text), true, false, &tokens, &n, &err),
              err);
    assert_ok(sl_tokenizer_decode(tokenizer, tokens, n, false, &back, &length, &err), err);
    if (strcmp(back, text) != 0) {
        fail_msg("%s: came back as \"%s\"", shape, back);
    }
    assert_true(sl_tokenizer_eos(tokenizer) >= 0);
    assert_true(sl_tokenizer_is_eog(tokenizer, sl_tokenizer_eos(tokenizer)));
    sl_free(tokens);
    sl_free(back);
    sl_tokenizer_destroy(&tokenizer);
    sl_gguf_close(&file);
}

/* Logits have spread 2: hidden states leave the last norm at 1, and the output matrix doubles. */
static void check_logits(const char *shape)
{
    struct sluice_error err = {0};
    struct sl_model *model;
    struct forward f;
    assert_ok(sl_model_open(&model, PATH, 64, &err), err);
    forward_init(&f, model, 64, (struct sl_kv_types){SL_TYPE_F16, SL_TYPE_F16});
    int32_t tokens[12];
    for (int i = 0; i < 12; i++) {
        tokens[i] = 40 + 7 * i;
    }
    const size_t n_vocab = model->hp.n_vocab;
    float *logits = calloc(12 * n_vocab, sizeof(float));
    if (!forward_run(&f, tokens, 12, 0, 12, logits, &err)) {
        fail_msg("%s: %s", shape, err.message);
    }
    double squares = 0;
    for (size_t i = 0; i < 12 * n_vocab; i++) {
        squares += (double)logits[i] * (double)logits[i];
    }
    const double rms = sqrt(squares / (double)(12 * n_vocab));
    if (!(rms > 1.5 && rms < 3)) {
        fail_msg("%s: logits have spread %g", shape, rms);
    }
    free(logits);
    forward_finish(&f);
    sl_model_close(&model);
}

static void test_models(void **state)
{
    (void)state;
    static const char *const shapes[] = {"tiny-llama",  "tiny-qwen2",    "tiny-qwen3",
                                         "tiny-gemma3", "tiny-qwen3moe", "tiny-gpt-oss"};
    static const char *const types[] = {"F16", "Q4_K", "Q4_K_M", "MXFP4"};
    for (size_t s = 0; s < 6; s++) {
        for (size_t t = 0; t < 4; t++) {
            write_model(shapes[s], types[t]);
            check_text(shapes[s]);
            check_logits(shapes[s]);
        }
    }
    assert_int_equal(sl_mem_n_blocks(), 0);
}

/* -------------------------------------------------------- use of experts */

#define USE_LAYERS 12
#define USE_EXPERTS 32
#define USE_CHOSEN 4
#define USE_TOKENS 192

struct expert_use {
    int calls[USE_LAYERS][USE_EXPERTS];
};

static void count_choice(void *user, const struct sl_shard *shard, const struct sl_op *op)
{
    struct expert_use *use = user;
    if (op->kind == SL_OP_ROUTER) {
        for (int i = 0; i < op->n_tokens * op->router.n_used; i++) {
            use->calls[shard->layer][op->router.ids[i]]++;
        }
    }
}

static int by_calls(const void *a, const void *b)
{
    return *(const int *)b - *(const int *)a;
}

/* The part of all calls in a layer that its n busiest experts serve. */
static double busiest(const struct expert_use *use, int layer, int n)
{
    int calls[USE_EXPERTS];
    memcpy(calls, use->calls[layer], sizeof(calls));
    qsort(calls, USE_EXPERTS, sizeof(calls[0]), by_calls);
    int sum = 0;
    for (int i = 0; i < n; i++) {
        sum += calls[i];
    }
    return (double)sum / (USE_TOKENS * USE_CHOSEN);
}

/* Write a model of some depth and count the experts that a text uses. */
static void use_experts(const char *type, float skew, struct expert_use *use)
{
    struct sluice_error err = {0};
    struct sl_synth_options o = options_of("tiny-qwen3moe", type);
    o.shape.n_layers = USE_LAYERS;
    o.shape.n_embd = 512;
    o.shape.n_experts = USE_EXPERTS;
    o.shape.n_experts_used = USE_CHOSEN;
    o.shape.n_ff = 32;
    o.shape.expert_skew = skew;
    assert_ok(sl_synth_write(&o, PATH, &err), err);
    struct sl_model *model;
    struct forward f;
    int32_t tokens[USE_TOKENS];
    for (int i = 0; i < USE_TOKENS; i++) {
        tokens[i] = (40 + 7 * i) % (int32_t)o.shape.n_vocab;
    }
    assert_ok(sl_model_open(&model, PATH, 0, &err), err);
    forward_init(&f, model, USE_TOKENS, (struct sl_kv_types){SL_TYPE_F16, SL_TYPE_F16});
    f.watch = count_choice;
    f.watch_user = use;
    memset(use, 0, sizeof(*use));
    if (!forward_run(&f, tokens, USE_TOKENS, 0, 0, NULL, &err)) {
        fail_msg("%s", err.message);
    }
    forward_finish(&f);
    sl_model_close(&model);
}

/* 13 of 32 experts are 40 %. Without skew they serve little more than that in every layer, the
 * last like the first; with the skew of real models nearly all. */
static void test_expert_use(void **state)
{
    (void)state;
    static const char *const types[] = {"F16", "Q8_0", "Q4_K"};
    for (size_t t = 0; t < 3; t++) {
        struct expert_use use;
        use_experts(types[t], 0, &use);
        double even = 0;
        for (int layer = 0; layer < USE_LAYERS; layer++) {
            const double share = busiest(&use, layer, 13);
            even += share / USE_LAYERS;
            if (!(share < 0.62)) {
                fail_msg("%s: layer %d: 40 %% of the experts serve %g", types[t], layer, share);
            }
        }
        use_experts(types[t], 0.65F, &use);
        double skewed = 0;
        for (int layer = 0; layer < USE_LAYERS; layer++) {
            skewed += busiest(&use, layer, 13) / USE_LAYERS;
        }
        print_message("%s: 40 %% of the experts serve %.2f, with skew %.2f\n", types[t], even,
                      skewed);
        assert_true(skewed > 0.85);
    }
}

/* Every shape of the table is one that can be written; its names are unique. */
static void test_shapes(void **state)
{
    (void)state;
    const struct sl_synth_shape *shape;
    size_t n = 0;
    for (; (shape = sl_synth_shape_at(n)) != NULL; n++) {
        assert_ptr_equal(shape, sl_synth_shape_find(shape->name));
        assert_int_equal(shape->n_heads % shape->n_kv_heads, 0);
        assert_int_equal(shape->head_dim % 32, 0);
        assert_int_equal(shape->n_embd % 32, 0);
    }
    assert_true(n >= 21);
    assert_null(sl_synth_shape_find("nothing"));
}

/* Rows that are no whole number of blocks of 256 fall back to types with blocks of 32. */
static void test_fallback(void **state)
{
    (void)state;
    static const char *const pairs[][2] = {
        {"Q2_K", "IQ4_NL"}, {"Q3_K", "IQ4_NL"},   {"Q4_K", "Q5_0"}, {"Q5_K", "Q5_1"},
        {"Q6_K", "Q8_0"},   {"IQ4_XS", "IQ4_NL"}, {"Q8_0", "Q8_0"}};
    for (size_t i = 0; i < sizeof(pairs) / sizeof(pairs[0]); i++) {
        struct sluice_error err = {0};
        struct sl_synth_options o = options_of("tiny-llama", pairs[i][0]);
        o.shape.n_embd = 96;
        assert_ok(sl_synth_write(&o, PATH, &err), err);
        struct sl_gguf *file = open_file();
        const struct sl_gguf_tensor *q = sl_gguf_find_tensor(file, "blk.0.attn_q.weight");
        const struct sl_gguf_tensor *down = sl_gguf_find_tensor(file, "blk.0.ffn_down.weight");
        assert_string_equal(sl_type_name((uint32_t)q->type), pairs[i][1]);
        assert_string_equal(sl_type_name((uint32_t)down->type), pairs[i][0]);
        sl_gguf_close(&file);
    }
}

/* ------------------------------------------------------------ same bytes */

static char *read_back(size_t *bytes)
{
    struct sluice_error err = {0};
    char *data;
    assert_ok(sl_file_read(PATH, 0, &data, bytes, &err), err);
    return data;
}

static void test_threads(void **state)
{
    (void)state;
    struct sluice_error err = {0};
    struct sl_synth_options o = options_of("tiny-qwen2", "Q6_K");
    assert_ok(sl_synth_write(&o, PATH, &err), err);
    size_t bytes;
    size_t other_bytes;
    char *one = read_back(&bytes);
    const struct sl_pool_options pool = {.n_threads = 3};
    assert_ok(sl_pool_create(&o.pool, &pool, &err), err);
    assert_ok(sl_synth_write(&o, PATH, &err), err);
    char *three = read_back(&other_bytes);
    assert_int_equal(bytes, other_bytes);
    assert_memory_equal(one, three, bytes);
    sl_free(three);
    o.seed = 2;
    assert_ok(sl_synth_write(&o, PATH, &err), err);
    three = read_back(&other_bytes);
    assert_int_equal(bytes, other_bytes);
    assert_true(memcmp(one, three, bytes) != 0);
    sl_free(three);
    sl_free(one);
    sl_pool_destroy(&o.pool);
}

/* -------------------------------------------------------------- failures */

static bool cancel_halfway(void *user, uint64_t done_bytes, uint64_t total_bytes)
{
    (void)user;
    return done_bytes < total_bytes / 2;
}

static void test_failures(void **state)
{
    (void)state;
    struct sluice_error err = {0};
    struct sl_synth_options o = options_of("tiny-llama", "F16");
    remove(PATH);
    o.progress = cancel_halfway;
    assert_status(sl_synth_write(&o, PATH, &err), CANCELLED);
    assert_false(sl_file_exists(PATH));
    o.progress = NULL;
    o.shape.n_vocab = 260;
    assert_status(sl_synth_write(&o, PATH, &err), INVALID_ARGUMENT);
    assert_mentions(err, "vocabulary of 260");
    o = options_of("tiny-llama", "F16");
    o.shape.n_kv_heads = 3;
    assert_status(sl_synth_write(&o, PATH, &err), INVALID_ARGUMENT);
    assert_mentions(err, "kv-heads (3)");
    o = options_of("tiny-llama", "F16");
    o.shape.head_dim = 48;
    assert_status(sl_synth_write(&o, PATH, &err), INVALID_ARGUMENT);
    assert_mentions(err, "head-dim is 48");
    o = options_of("tiny-qwen3moe", "Q4_K");
    o.shape.n_experts_used = 17;
    assert_status(sl_synth_write(&o, PATH, &err), INVALID_ARGUMENT);
    assert_mentions(err, "experts-used is 17");
    o.shape.n_experts_used = 2;
    o.shape.expert_skew = 0.5F;
    assert_status(sl_synth_write(&o, PATH, &err), INVALID_ARGUMENT);
    assert_mentions(err, "at least two blocks");
    o = options_of("tiny-llama", "Q8_0");
    o.shape.expert_skew = 0.5F;
    assert_status(sl_synth_write(&o, PATH, &err), INVALID_ARGUMENT);
    assert_mentions(err, "mixtures");
    assert_false(sl_file_exists(PATH));
    struct sl_synth_mix mix;
    assert_false(sl_synth_mix_from_name("IQ2_XS", &mix)); /* listed, but does not compute */
    assert_false(sl_synth_mix_from_name("Q9", &mix));
    assert_int_equal(sl_mem_n_blocks(), 0);
}

static void test_memory_faults(void **state)
{
    (void)state;
    struct sl_synth_options o = options_of("tiny-llama", "Q8_0");
    o.shape.n_layers = 1;
    o.shape.n_embd = 32;
    o.shape.n_ff = 32;
    bool fired = true;
    remove(PATH);
    for (int64_t n = 0; fired; n++) {
        struct sluice_error err = {0};
        assert_true(n < 200);
        sl_mem_fail_after(n, false);
        const enum sluice_status status = sl_synth_write(&o, PATH, &err);
        fired = sl_mem_fault_fired();
        sl_mem_fail_after(-1, false);
        assert_string_equal(sluice_status_name(status), fired ? "OUT_OF_MEMORY" : "OK");
        assert_int_equal(sl_file_exists(PATH), !fired);
        assert_int_equal(sl_mem_n_blocks(), 0);
    }
}

static int clean_up(void **state)
{
    (void)state;
    remove(PATH);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_spread),        cmocka_unit_test(test_models),
        cmocka_unit_test(test_shapes),        cmocka_unit_test(test_fallback),
        cmocka_unit_test(test_threads),       cmocka_unit_test(test_failures),
        cmocka_unit_test(test_memory_faults), cmocka_unit_test(test_expert_use),
    };
    return cmocka_run_group_tests(tests, NULL, clean_up);
}
