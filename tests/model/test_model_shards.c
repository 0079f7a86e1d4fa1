/* SPDX-License-Identifier: Apache-2.0
 *
 * What the planner and the executor rely on: order, packing and classes of shards, and operators
 * that read and write only memory they were given, without clobbering what a later one reads; and
 * that a shard which is cut in two gives what it gives whole.
 */
#include "test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/arch.h"
#include "model/model.h"

#define N_TOKENS 5
#define N_OUTPUTS 2

static const char *const fixtures[] = {
    "llama_tied_mixed", "llama_bias", "llama_freqs", "llama_linear", "llama_yarn",
    "llama_longrope",   "qwen2_yarn", "qwen3",       "gemma3",       "mixtral",
    "qwen2moe",         "qwen3moe",   "gpt_oss",
};
#define N_FIXTURES (sizeof fixtures / sizeof fixtures[0])

static struct sl_model *open_fixture(const char *name)
{
    struct sluice_error err;
    struct sl_model *model = NULL;
    char path[512];
    snprintf(path, sizeof path, "%s/model/%s.gguf", SLUICE_FIXTURES, name);
    assert_ok(sl_model_open(&model, path, 0, &err), err);
    return model;
}

static void check_shard(const struct sl_model *model, uint32_t s)
{
    static const uint32_t n_weights[] = {SL_N_ATTENTION_WEIGHTS, SL_N_FFN_WEIGHTS,
                                         SL_N_HEAD_WEIGHTS};
    const struct sl_shard *shard = &model->shards[s];
    const bool is_head = s == 2 * model->hp.n_layers;
    assert_int_equal(shard->kind, is_head      ? SL_SHARD_HEAD
                                  : s % 2 == 0 ? SL_SHARD_ATTENTION
                                               : SL_SHARD_FFN);
    assert_int_equal(shard->layer, s / 2);
    if (shard->kind == SL_SHARD_FFN && model->hp.n_experts > 0) {
        assert_int_equal(shard->n_weights, model->hp.n_ff_shared > 0         ? SL_N_MIXTURE_WEIGHTS
                                           : model->arch == &sl_arch_gpt_oss ? SL_W_SHARED_ROUTER
                                                                             : SL_W_GATE_BIAS);
    } else {
        assert_int_equal(shard->n_weights, n_weights[shard->kind]);
    }
    size_t end = 0;
    for (uint32_t w = 0; w < shard->n_weights; w++) {
        const struct sl_weight *weight = &shard->weights[w];
        if (w >= SL_W_GATE_BIAS && w < SL_W_SHARED_ROUTER && model->hp.n_ff_shared > 0) {
            assert_null(weight->name); /* this one has no biases */
            continue;
        }
        assert_non_null(weight->name);
        assert_non_null(weight->m.data);
        assert_int_equal(weight->offset % 256, 0);
        assert_true(weight->offset >= end && weight->offset < end + 256);
        assert_int_equal(weight->bytes, sl_type_row_bytes(weight->m.type, weight->m.n_cols) *
                                            (size_t)weight->m.n_rows);
        end = weight->offset + weight->bytes;
    }
    assert_true(shard->bytes >= end && shard->bytes < end + 256);
    assert_int_equal(shard->bytes % 256, 0);
}

static void structure(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_FIXTURES; i++) {
        struct sl_model *model = open_fixture(fixtures[i]);
        assert_int_equal(model->n_shards, 2 * model->hp.n_layers + 1);
        assert_int_equal((uintptr_t)model->consts % 256, 0);
        for (uint32_t s = 0; s < model->n_shards; s++) {
            check_shard(model, s);
            assert_true(model->shards[s].class_id < model->n_classes);
        }
        sl_model_close(&model);
    }
}

/* Figures worked out by hand from the files' shapes. */
static void figures(void **state)
{
    (void)state;
    struct sl_model *model = open_fixture("qwen3"); /* tied, all matrices F16 */
    const uint64_t embedding = 64 * 32;
    const uint64_t attention = 2 * 256 * 32 + 2 * 64 * 32;
    const uint64_t ffn = 3 * 64 * 32;
    const uint64_t vectors = 32 + 2 * (2 * 32 + 2 * 64);
    assert_int_equal(model->n_params, embedding + 2 * (attention + ffn) + vectors);
    assert_int_equal(model->weight_bytes, 2 * (embedding + 2 * (attention + ffn)));
    assert_int_equal(model->n_classes, 3);
    const struct sl_shard *head = &model->shards[model->n_shards - 1];
    assert_ptr_equal(head->weights[SL_W_OUTPUT].m.data, model->embedding.data);
    assert_string_equal(head->weights[SL_W_OUTPUT].name, "token_embd.weight");
    assert_true(model->hp.attention_scale == 0.125F);
    sl_model_close(&model);

    model = open_fixture("gemma3");
    for (uint32_t layer = 0; layer < 7; layer++) {
        assert_int_equal(model->shards[2 * layer].window, layer == 5 ? 0 : 8);
    }
    /* Local attention, global attention, feed-forward, head. */
    assert_int_equal(model->n_classes, 4);
    assert_int_equal(model->shards[0].class_id, model->shards[12].class_id);
    assert_int_not_equal(model->shards[0].class_id, model->shards[10].class_id);
    sl_model_close(&model);

    model = open_fixture("llama_tied_mixed"); /* types change from layer to layer */
    assert_int_equal(model->n_classes, 5);
    sl_model_close(&model);

    model = open_fixture("qwen3moe"); /* tied; 16 experts of three 32 x 32 matrices */
    const uint64_t experts = 16 * 3 * 32 * 32;
    const uint64_t router = 16 * 32;
    const uint64_t heads = 2 * 128 * 32 + 2 * 32 * 32;
    assert_int_equal(model->n_params,
                     embedding + 2 * (heads + experts + router) + 32 + 2 * (2 * 32 + 2 * 32));
    assert_int_equal(model->hp.n_experts, 16);
    assert_int_equal(model->hp.n_experts_used, 4);
    assert_int_equal(model->hp.n_ff, 32);
    sl_model_close(&model);

    model = open_fixture("gpt_oss"); /* every other layer sees all, and all rotate alike */
    for (uint32_t layer = 0; layer < 3; layer++) {
        assert_int_equal(model->shards[2 * layer].window, layer == 1 ? 0 : 8);
    }
    sl_model_close(&model);
}

static void known_archs(void **state)
{
    (void)state;
    assert_string_equal(sl_model_known_archs(),
                        "llama, qwen2, qwen2moe, qwen3, qwen3moe, gemma3, gpt-oss");
    assert_ptr_equal(sl_arch_find("gemma3", 6), &sl_arch_gemma3);
    assert_null(sl_arch_find("gemma3n", 7));
    assert_null(sl_arch_find("gemma", 5));
    assert_null(sl_arch_find("", 0));
}

static void embedding(void **state)
{
    (void)state;
    static const int32_t tokens[] = {63, 0, 7};
    struct sl_model *model = open_fixture("gemma3");
    float rows[3 * 32];
    sl_model_embed(model, tokens, 3, rows);
    for (int i = 0; i < 3; i++) {
        const uint16_t *f16 = (const uint16_t *)model->embedding.data + (size_t)tokens[i] * 32;
        for (int k = 0; k < 32; k++) {
            assert_float_equal(rows[32 * i + k], sl_f16_to_f32(f16[k]) * 5.656854F, 1e-6);
        }
    }
    sl_model_close(&model);
}

/* A range of memory that ops may use. */
struct region {
    const char *start;
    size_t bytes;
};

struct regions {
    struct region hidden, workspace, logits;
};

static bool contains(struct region r, const void *p, size_t n_floats)
{
    const char *at = p;
    return at >= r.start && at + n_floats * sizeof(float) <= r.start + r.bytes;
}

static void assert_inside(const struct regions *r, const void *p, size_t n_floats)
{
    assert_true(contains(r->hidden, p, n_floats) || contains(r->workspace, p, n_floats) ||
                contains(r->logits, p, n_floats));
}

static void assert_apart(const float *a, size_t n_a, const float *b, size_t n_b)
{
    assert_true(a + n_a <= b || b + n_b <= a);
}

static void check_linear(const struct sl_op *op, const struct regions *r)
{
    const struct sl_op_linear *linear = &op->linear;
    const size_t n = (size_t)op->n_tokens;
    const size_t n_x = n * (size_t)linear->part[0].w.n_cols;
    assert_inside(r, linear->x, n_x);
    for (int i = 0; i < linear->n_parts; i++) {
        const size_t n_y = n * (size_t)linear->part[i].w.n_rows;
        assert_inside(r, linear->part[i].y, n_y);
        assert_apart(linear->x, n_x, linear->part[i].y, n_y);
        for (int k = 0; k < i; k++) {
            assert_apart(linear->part[k].y, n * (size_t)linear->part[k].w.n_rows, linear->part[i].y,
                         n_y);
        }
        assert_int_equal(linear->part[i].w.n_cols, linear->part[0].w.n_cols);
    }
}

static void check_router(const struct sl_op *op, const struct regions *r)
{
    const size_t n_x = (size_t)op->n_tokens * (size_t)op->router.w.n_cols;
    const size_t n = (size_t)op->n_tokens * (size_t)op->router.n_used;
    const float *ids = (const float *)(const void *)op->router.ids;
    assert_inside(r, op->router.x, n_x);
    assert_inside(r, ids, n);
    assert_inside(r, op->router.weights, n);
    assert_apart(ids, n, op->router.weights, n);
    assert_apart(op->router.x, n_x, ids, n);
    assert_apart(op->router.x, n_x, op->router.weights, n);
}

static void check_op(const struct sl_op *op, const struct regions *r)
{
    struct sluice_error err;
    assert_ok(sl_op_validate(op, &err), err);
    const size_t n = (size_t)op->n_tokens;
    size_t bytes;
    switch (op->kind) {
    case SL_OP_NORM:
        bytes = n * (size_t)op->norm.n * (size_t)op->norm.rows_per_token;
        assert_inside(r, op->norm.x, bytes);
        assert_inside(r, op->norm.y, bytes);
        if (op->norm.x != op->norm.y || op->norm.accumulate) {
            assert_apart(op->norm.x, bytes, op->norm.y, bytes);
        }
        break;
    case SL_OP_LINEAR:
        check_linear(op, r);
        break;
    case SL_OP_ROPE:
        assert_inside(r, op->rope.x, n * (size_t)op->rope.n_heads * (size_t)op->rope.head_dim);
        break;
    case SL_OP_KV_STORE:
        bytes = n * (size_t)op->kv_store.kv.n_kv_heads * (size_t)op->kv_store.kv.head_dim;
        assert_inside(r, op->kv_store.k, bytes);
        assert_inside(r, op->kv_store.v, bytes);
        assert_apart(op->kv_store.k, bytes, op->kv_store.v, bytes);
        break;
    case SL_OP_ATTENTION:
        bytes = n * (size_t)op->attention.n_heads * (size_t)op->attention.kv.head_dim;
        assert_inside(r, op->attention.q, bytes);
        assert_inside(r, op->attention.y, bytes);
        assert_apart(op->attention.q, bytes, op->attention.y, bytes);
        break;
    case SL_OP_ROUTER:
        check_router(op, r);
        break;
    case SL_OP_EXPERTS:
        bytes = n * (size_t)op->experts.gate.n_cols;
        assert_inside(r, op->experts.x, bytes);
        assert_inside(r, op->experts.y, bytes);
        assert_apart(op->experts.x, bytes, op->experts.y, bytes);
        assert_inside(r, op->experts.ids, n * (size_t)op->experts.n_used);
        assert_inside(r, op->experts.weights, n * (size_t)op->experts.n_used);
        break;
    default:
        fail_msg("op kind %d", (int)op->kind);
    }
}

/* All addresses lie in what was bound, inputs and outputs apart, and the sizes agree. */
static void operators(void **state)
{
    (void)state;
    for (size_t i = 0; i < N_FIXTURES; i++) {
        struct sl_model *model = open_fixture(fixtures[i]);
        const size_t hidden_bytes = N_TOKENS * model->hp.n_embd * sizeof(float);
        const size_t logits_bytes = N_OUTPUTS * model->hp.n_vocab * sizeof(float);
        float *hidden = malloc(hidden_bytes);
        float *logits = malloc(logits_bytes);
        for (uint32_t s = 0; s < model->n_shards; s++) {
            const struct sl_shard *shard = &model->shards[s];
            const size_t bytes = sl_shard_workspace_bytes(model, shard, N_TOKENS, N_OUTPUTS);
            char *workspace = malloc(bytes);
            const struct sl_shard_bind bind = {
                .consts = model->consts,
                .hidden = hidden,
                .logits = logits,
                .workspace = workspace,
                .kv = {.types = {SL_TYPE_F16, SL_TYPE_F16}},
                .n_tokens = N_TOKENS,
                .n_outputs = N_OUTPUTS,
                .n_kv_max = N_TOKENS,
            };
            const struct regions regions = {
                .hidden = {(const char *)hidden, hidden_bytes},
                .workspace = {workspace, bytes},
                .logits = {(const char *)logits, logits_bytes},
            };
            struct sl_op ops[SL_SHARD_MAX_OPS];
            const int n_ops = sl_shard_build(model, shard, &bind, ops);
            assert_in_range(n_ops, 1, SL_SHARD_MAX_OPS);
            size_t scratch = 0;
            for (int k = 0; k < n_ops; k++) {
                check_op(&ops[k], &regions);
                const size_t need = sl_op_scratch_bytes(&ops[k]);
                scratch = need > scratch ? need : scratch;
            }
            assert_true(scratch <= sl_shard_scratch_bytes(model, shard, N_TOKENS, N_OUTPUTS));
            /* Short passes split their attention and may want more than long ones. */
            for (int32_t n = 1; n <= 64; n++) {
                assert_true(sl_shard_scratch_bytes(model, shard, n, 1) <=
                            sl_shard_most_scratch_bytes(model, shard, 64, 1));
            }
            free(workspace);
        }
        free(hidden);
        free(logits);
        sl_model_close(&model);
    }
}

/* A pass that nobody wants logits of skips the head. */
static void no_outputs(void **state)
{
    (void)state;
    struct sl_model *model = open_fixture("qwen3");
    const struct sl_shard *head = &model->shards[model->n_shards - 1];
    const struct sl_shard_bind bind = {.n_tokens = N_TOKENS};
    struct sl_op ops[SL_SHARD_MAX_OPS];
    assert_int_equal(sl_shard_build(model, head, &bind, ops), 0);
    assert_int_equal(sl_shard_workspace_bytes(model, head, N_TOKENS, 0), 0);
    assert_int_equal(sl_shard_scratch_bytes(model, head, N_TOKENS, 0), 0);
    sl_model_close(&model);
}

/* ---- shards that are cut in two ---- */

#define MAX_WORK (1 << 20)

/* The memory of one side; caches are of the first KV heads, or of those behind a cut. */
struct side {
    float *hidden, *logits;
    char *workspace;
    void *kv, *kv_rest;
};

static const struct sl_kv_types kv_types = {SL_TYPE_F16, SL_TYPE_F16};

static void *make_cache(const struct sl_model *model, int32_t n_heads)
{
    const size_t bytes = sl_kv_block_bytes(kv_types, n_heads, (int32_t)model->hp.head_dim);
    void *const cache = calloc(1, bytes + 1);
    assert_non_null(cache);
    return cache;
}

static struct side make_side(const struct sl_model *model, const float *hidden)
{
    struct side s = {.hidden = malloc(N_TOKENS * model->hp.n_embd * sizeof(float)),
                     .logits = malloc(N_TOKENS * model->hp.n_vocab * sizeof(float)),
                     .workspace = aligned_alloc(256, MAX_WORK)};
    assert_true(s.hidden && s.logits && s.workspace);
    memcpy(s.hidden, hidden, N_TOKENS * model->hp.n_embd * sizeof(float));
    memset(s.workspace, 0xff, MAX_WORK); /* not a number */
    s.kv = make_cache(model, (int32_t)model->hp.n_kv_heads);
    s.kv_rest = make_cache(model, (int32_t)model->hp.n_kv_heads);
    return s;
}

static float *make_hidden(const struct sl_model *model)
{
    const size_t n = N_TOKENS * model->hp.n_embd;
    float *const hidden = malloc(n * sizeof *hidden);
    assert_non_null(hidden);
    for (size_t i = 0; i < n; i++) {
        hidden[i] = sinf((float)(i * i % 977));
    }
    return hidden;
}

static void free_side(struct side *s)
{
    free(s->hidden);
    free(s->logits);
    free(s->workspace);
    free(s->kv);
    free(s->kv_rest);
}

/* Run a list; what an op leaves undefined is no number. */
static void run_list(const struct sl_model *model, const struct sl_shard *shard,
                     const struct sl_shard_bind *bind)
{
    struct sl_op ops[SL_SHARD_MAX_OPS];
    const int n_ops = sl_shard_build(model, shard, bind, ops);
    for (int i = 0; i < n_ops; i++) {
        struct sluice_error err;
        assert_ok(sl_op_validate(&ops[i], &err), err);
        sl_op_run_ref(&ops[i]);
        if (ops[i].kind == SL_OP_LINEAR && ops[i].linear.activation != SL_ACT_NONE) {
            memset(ops[i].linear.part[1].y, 0xff,
                   N_TOKENS * (size_t)ops[i].linear.part[1].w.n_rows * sizeof(float));
        }
    }
}

static void run_part(const struct sl_model *model, const struct sl_shard *shard,
                     const struct side *side, enum sl_shard_part part, int32_t cut,
                     const void *const *weights, const void *const *rest, const float *partial)
{
    static const int32_t pos[N_TOKENS] = {0, 1, 2, 3, 4};
    struct sl_shard_bind bind = {.consts = model->consts,
                                 .pos = pos,
                                 .kv = {.data = side->kv, .types = kv_types},
                                 .kv_rest = side->kv_rest,
                                 .n_kv_max = N_TOKENS,
                                 .hidden = side->hidden,
                                 .logits = side->logits,
                                 .workspace = side->workspace,
                                 .n_tokens = N_TOKENS,
                                 .n_outputs = N_OUTPUTS,
                                 .part = part,
                                 .cut = cut,
                                 .partial = (float *)(uintptr_t)partial};
    for (uint32_t w = 0; w < shard->n_weights; w++) {
        bind.weights[w] = weights ? weights[w] : shard->weights[w].m.data;
        bind.rest[w] = rest ? rest[w] : NULL;
    }
    run_list(model, shard, &bind);
}

/* An image of a slice, gathered row by row. */
static char *make_image(const struct sl_slice *slice, const void **weights)
{
    char *const image = malloc(slice->bytes);
    assert_non_null(image);
    for (uint32_t w = 0; w < slice->n_weights; w++) {
        char *const to = image + slice->weights[w].offset;
        for (size_t r = 0; r < slice->weights[w].n_rows; r++) {
            memcpy(to + r * slice->weights[w].row_bytes,
                   (const char *)slice->weights[w].data + r * slice->weights[w].pitch_bytes,
                   slice->weights[w].row_bytes);
        }
        weights[w] = to;
    }
    return image;
}

static void assert_close(const float *wanted, const float *got, size_t n)
{
    double off = 0, all = 0;
    for (size_t i = 0; i < n; i++) {
        off += pow((double)wanted[i] - (double)got[i], 2);
        all += pow((double)wanted[i], 2);
    }
    assert_true(off <= 1e-12 * all);
}

/* Whole; both parts on one side; a part on each side. */
static void check_cut(const struct sl_model *model, const struct sl_shard *shard, int32_t cut,
                      const float *hidden)
{
    const size_t n_hidden = N_TOKENS * model->hp.n_embd, n_vocab = model->hp.n_vocab;
    const int32_t end = sl_shard_cut_end(model, shard);
    const struct sl_slice first = sl_shard_slice(model, shard, 0, cut);
    const struct sl_slice second = sl_shard_slice(model, shard, cut, end);
    const void *own[SL_N_ATTENTION_WEIGHTS], *rest[SL_N_ATTENTION_WEIGHTS];
    char *const images[] = {make_image(&first, own), make_image(&second, rest)};
    const bool head = shard->kind == SL_SHARD_HEAD;
    struct side whole = make_side(model, hidden), both = make_side(model, hidden);
    struct side device = make_side(model, hidden), host = make_side(model, hidden);
    run_part(model, shard, &whole, SL_PART_WHOLE, 0, NULL, NULL, NULL);
    if (!head) {
        run_part(model, shard, &both, SL_PART_WHOLE, cut, own, rest, NULL);
        assert_close(whole.hidden, both.hidden, n_hidden);
    }
    const struct sl_shard_choice choice =
        sl_shard_choice(model, shard, (struct sl_split){0}, head ? N_OUTPUTS : N_TOKENS);
    assert_true(choice.bytes <= MAX_WORK && choice.partial >= choice.end);
    run_part(model, shard, &device, SL_PART_ROUTE, cut, own, NULL, NULL);
    memcpy(host.workspace, device.workspace, choice.end);
    run_part(model, shard, &device, SL_PART_OWN, cut, own, NULL, NULL);
    run_part(model, shard, &host, SL_PART_OTHERS, cut, NULL, NULL, NULL);
    assert_memory_equal(host.hidden, hidden, n_hidden * sizeof(float));
    run_part(model, shard, &device, SL_PART_JOIN, cut, own, NULL,
             (const float *)(const void *)(host.workspace + choice.partial));
    if (head) {
        const size_t n = (size_t)cut, n_others = n_vocab - n;
        for (size_t i = 0; i < N_OUTPUTS; i++) {
            assert_close(whole.logits + i * n_vocab, device.logits + i * n, n);
            assert_close(whole.logits + i * n_vocab + n, host.logits + i * n_others, n_others);
        }
    } else {
        assert_close(whole.hidden, device.hidden, n_hidden);
    }
    struct side *const sides[] = {&whole, &both, &device, &host};
    for (size_t i = 0; i < 4; i++) {
        free_side(sides[i]);
    }
    free(images[0]);
    free(images[1]);
}

static void cuts(void **state)
{
    (void)state;
    int n_cut[3] = {0};
    for (size_t f = 0; f < N_FIXTURES; f++) {
        struct sl_model *model = open_fixture(fixtures[f]);
        float *const hidden = make_hidden(model);
        for (uint32_t s = 0; s < model->n_shards; s++) {
            const struct sl_shard *const shard = &model->shards[s];
            const int32_t end = sl_shard_cut_end(model, shard);
            const bool can = shard->kind != SL_SHARD_FFN || model->hp.n_experts == 0;
            assert_true((end > 0) == can);
            if (!can) {
                continue;
            }
            const int32_t unit = sl_shard_cut_unit(model, shard);
            for (int32_t cut = unit; cut < end; cut += unit) {
                check_cut(model, shard, cut, hidden);
                n_cut[shard->kind]++;
            }
        }
        free(hidden);
        sl_model_close(&model);
    }
    print_message("cut: %d attentions, %d feed-forwards, %d heads\n", n_cut[SL_SHARD_ATTENTION],
                  n_cut[SL_SHARD_FFN], n_cut[SL_SHARD_HEAD]);
    assert_true(n_cut[SL_SHARD_ATTENTION] > 10 && n_cut[SL_SHARD_FFN] > 20 &&
                n_cut[SL_SHARD_HEAD] > 10);
}

/* ---- a cache that is cut by blocks ---- */

/* Tokens at the end of the first block and behind it; or all of them in the one or the other. */
static const int32_t places[][N_TOKENS] = {
    {61, 63, 64, 65, 90}, {0, 1, 2, 3, 4}, {70, 71, 72, 73, 127}};

/* Finite keys and values from -1 to 1. */
static void fill_cache(uint16_t *cache, size_t bytes)
{
    for (size_t i = 0; i < bytes / sizeof *cache; i++) {
        cache[i] = (uint16_t)(0x3000 + i * 2654435761u % 0xc00 + (i % 3 == 0 ? 0x8000 : 0));
    }
}

static void run_divided(const struct sl_model *model, const struct sl_shard *shard,
                        const struct side *side, enum sl_shard_part part, const int32_t *pos,
                        struct sl_kv_view kv, const struct side *other)
{
    const struct sl_shard_choice choice =
        sl_shard_choice(model, shard, (struct sl_split){.kv_blocks = SL_CUT_KV_BLOCKS}, N_TOKENS);
    struct sl_shard_bind bind = {.consts = model->consts,
                                 .pos = pos,
                                 .kv = kv,
                                 .n_kv_max = 2 * SL_KV_BLOCK,
                                 .hidden = side->hidden,
                                 .workspace = side->workspace,
                                 .n_tokens = N_TOKENS,
                                 .part = part};
    if (other) {
        bind.partial = (float *)(void *)(other->workspace + choice.partial);
        bind.partial_lse = (float *)(void *)(other->workspace + choice.lse);
        assert_int_equal(choice.partial_bytes, choice.lse_bytes * model->hp.head_dim);
    }
    for (uint32_t w = 0; w < shard->n_weights; w++) {
        bind.weights[w] = part == SL_PART_OTHERS ? NULL : shard->weights[w].m.data;
    }
    run_list(model, shard, &bind);
    if (part == SL_PART_ROUTE) { /* what goes down */
        assert_true(choice.begin < choice.end && choice.end <= choice.bytes);
    }
}

/* All on one side; and each side with a block of its own. */
static void check_divided(const struct sl_model *model, const struct sl_shard *shard,
                          const int32_t *pos, const float *hidden)
{
    const int32_t n_heads = (int32_t)model->hp.n_kv_heads;
    const size_t n_hidden = N_TOKENS * model->hp.n_embd;
    const size_t block = sl_kv_block_bytes(kv_types, n_heads, (int32_t)model->hp.head_dim);
    char *const both = malloc(2 * block), *const first = malloc(block),
                *const second = malloc(block);
    assert_true(both && first && second);
    fill_cache((uint16_t *)(void *)both, 2 * block);
    memcpy(first, both, block);
    memcpy(second, both + block, block);
    struct side whole = make_side(model, hidden), device = make_side(model, hidden);
    struct side host = make_side(model, hidden);
    const struct sl_kv_view undivided = {.data = both, .types = kv_types};
    const struct sl_kv_view here = {.data = first, .types = kv_types, .n_first = 1};
    const struct sl_kv_view there = {.later = second, .types = kv_types, .n_first = 1};
    run_divided(model, shard, &whole, SL_PART_WHOLE, pos, undivided, NULL);
    run_divided(model, shard, &device, SL_PART_ROUTE, pos, here, NULL);
    const struct sl_shard_choice choice =
        sl_shard_choice(model, shard, (struct sl_split){.kv_blocks = SL_CUT_KV_BLOCKS}, N_TOKENS);
    memcpy(host.workspace + choice.begin, device.workspace + choice.begin,
           choice.end - choice.begin);
    run_divided(model, shard, &device, SL_PART_OWN, pos, here, NULL);
    run_divided(model, shard, &host, SL_PART_OTHERS, pos, there, NULL);
    assert_memory_equal(host.hidden, hidden, n_hidden * sizeof(float));
    run_divided(model, shard, &device, SL_PART_JOIN, pos, here, &host);
    assert_close(whole.hidden, device.hidden, n_hidden);
    assert_memory_equal(first, both, block);
    assert_memory_equal(second, both + block, block);
    struct side *const sides[] = {&whole, &device, &host};
    for (size_t i = 0; i < 3; i++) {
        free_side(sides[i]);
    }
    free(both);
    free(first);
    free(second);
}

static void divided_caches(void **state)
{
    (void)state;
    int n = 0;
    for (size_t f = 0; f < N_FIXTURES; f++) {
        struct sl_model *model = open_fixture(fixtures[f]);
        float *const hidden = make_hidden(model);
        for (uint32_t s = 0; s < model->n_shards; s++) {
            for (size_t p = 0; p < 3 && model->shards[s].kind == SL_SHARD_ATTENTION; p++) {
                check_divided(model, &model->shards[s], places[p], hidden);
                n++;
            }
        }
        free(hidden);
        sl_model_close(&model);
    }
    assert_true(n > 50);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(divided_caches), cmocka_unit_test(structure), cmocka_unit_test(figures),
        cmocka_unit_test(known_archs),    cmocka_unit_test(embedding), cmocka_unit_test(operators),
        cmocka_unit_test(no_outputs),     cmocka_unit_test(cuts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
