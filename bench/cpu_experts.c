/* SPDX-License-Identifier: Apache-2.0
 *
 * Speed of a mixture's feed-forward in decode, as it runs between the attentions of a GPU.
 *
 *   cpu_experts [--threads N] [--layers N] [--experts N] [--used N] [--embd N] [--ff N]
 *               [--tokens N] [--pause-us N] [--ms N] [--type NAME] [--pages huge|small|FILE]
 *
 * Passes over --layers layers of random weights (together more than any CPU cache holds), each
 * norm, router and experts of a token that chooses anew, with a pause before each in which the team
 * has nothing to do. The weights are in huge pages, in small ones, or in FILE, which is made,
 * mapped as a model is, and removed. Microseconds of the whole and of its first parts, medians;
 * beside them plain reads of as many bytes, in one piece and under the same conditions.
 */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "base/clock.h"
#include "base/file.h"
#include "base/median.h"
#include "base/mem.h"
#include "base/pool.h"
#include "cpu/cpu.h"
#include "op/op.h"
#include "read_memory.h"

#define MAX_TIMES 4096
#define N_PARTS 4 /* norm; + router; + experts; plain reads */

struct options {
    int threads, layers, experts, used, embd, ff, tokens, pause_us, ms;
    enum sl_type type;
    const char *pages;
};

struct bench {
    struct options o;
    struct sl_pool *pool;
    const struct sl_cpu_kernels *kernels;
    size_t expert_bytes; /* of one matrix of one expert */
    size_t layer_bytes;
    char *own; /* the weights, or NULL when they are in a file */
    struct sl_file_map map;
    const char *weights;
    float *router;    /* [layers, experts, embd] */
    float *x, *n, *y; /* [tokens, embd] */
    int32_t *ids;
    float *chosen;
    void *scratch;
    struct read_memory read;
    double times[N_PARTS][MAX_TIMES];
    int n_times;
};

static uint32_t random_bits(void)
{
    static uint32_t state = 1;
    state = state * 1664525u + 1013904223u;
    return state >> 8;
}

static void fill_floats(float *p, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        p[i] = (float)random_bits() / 8388608.0f - 1.0f;
    }
}

static struct sl_experts_matrix matrix(const struct bench *b, int layer, int index)
{
    const bool down = index == 2;
    return (struct sl_experts_matrix){
        .data = b->weights + (size_t)layer * b->layer_bytes +
                (size_t)index * (size_t)b->o.experts * b->expert_bytes,
        .type = b->o.type,
        .n_rows = down ? b->o.embd : b->o.ff,
        .n_cols = down ? b->o.ff : b->o.embd,
    };
}

static void make_ops(const struct bench *b, int layer, struct sl_op ops[3])
{
    memset(ops, 0, 3 * sizeof ops[0]);
    ops[0].kind = SL_OP_NORM;
    ops[1].kind = SL_OP_ROUTER;
    ops[2].kind = SL_OP_EXPERTS;
    for (int i = 0; i < 3; i++) {
        ops[i].n_tokens = b->o.tokens;
    }
    ops[0].norm = (struct sl_op_norm){
        .x = b->x, .y = b->n, .n = b->o.embd, .rows_per_token = 1, .eps = 1e-6f};
    ops[1].router = (struct sl_op_router){
        .x = b->n,
        .w = {.data = b->router + (size_t)layer * (size_t)b->o.experts * (size_t)b->o.embd,
              .type = SL_TYPE_F32,
              .n_rows = b->o.experts,
              .n_cols = b->o.embd},
        .ids = b->ids,
        .weights = b->chosen,
        .n_used = b->o.used,
        .gating = SL_GATING_SOFTMAX,
        .normalize = true,
        .scale = 1.0f};
    ops[2].experts = (struct sl_op_experts){.x = b->n,
                                            .y = b->y,
                                            .ids = b->ids,
                                            .weights = b->chosen,
                                            .n_used = b->o.used,
                                            .n = b->o.experts,
                                            .gate = matrix(b, layer, 0),
                                            .up = matrix(b, layer, 1),
                                            .down = matrix(b, layer, 2),
                                            .activation = SL_ACT_SILU};
}

/* Weights of one random row after the other: what they are does not change the speed. */
static bool fill_weights(const struct bench *b, char *weights, size_t bytes)
{
    const size_t row_bytes = sl_type_row_bytes(b->o.type, b->o.embd);
    float *row = sl_alloc(SL_MEM_CPU, (size_t)b->o.embd * sizeof(float));
    if (row == NULL) {
        return false;
    }
    fill_floats(row, (size_t)b->o.embd);
    const bool ok = sl_quantize_row(b->o.type, row, weights, b->o.embd);
    for (size_t at = row_bytes; ok && at < bytes; at += row_bytes) {
        memcpy(weights + at, weights, bytes - at < row_bytes ? bytes - at : row_bytes);
    }
    sl_free(row);
    return ok;
}

static bool write_file(const struct bench *b, size_t bytes)
{
    FILE *file = fopen(b->o.pages, "wb");
    if (file == NULL) {
        return false;
    }
    const size_t layer = bytes / (size_t)b->o.layers;
    char *piece = sl_alloc_aligned(SL_MEM_CPU, layer, 64);
    bool ok = piece != NULL && fill_weights(b, piece, layer);
    for (int i = 0; ok && i < b->o.layers; i++) {
        ok = fwrite(piece, 1, layer, file) == layer;
    }
    sl_free(piece);
    return fclose(file) == 0 && ok;
}

static bool make_weights(struct bench *b, struct sluice_error *err)
{
    const size_t bytes = b->layer_bytes * (size_t)b->o.layers;
    if (strcmp(b->o.pages, "huge") == 0 || strcmp(b->o.pages, "small") == 0) {
        b->own = sl_alloc_aligned(SL_MEM_CPU, bytes, 64);
#if defined(__linux__) && defined(MADV_NOHUGEPAGE)
        if (b->own != NULL && strcmp(b->o.pages, "small") == 0) {
            char *page = b->own + (-(uintptr_t)b->own & 4095);
            madvise(page, bytes - 4096, MADV_NOHUGEPAGE);
        }
#endif
        b->weights = b->own;
        return b->own != NULL && fill_weights(b, b->own, bytes);
    }
    const bool written = write_file(b, bytes);
    const bool mapped = written && sl_file_map_init(&b->map, b->o.pages, err) == SLUICE_STATUS_OK;
    remove(b->o.pages);
    b->weights = (const char *)b->map.data;
    return mapped;
}

static bool prepare(struct bench *b, struct sluice_error *err)
{
    const struct options *o = &b->o;
    b->expert_bytes = sl_type_row_bytes(o->type, o->embd) * (size_t)o->ff;
    b->layer_bytes = 3 * (size_t)o->experts * b->expert_bytes;
    const size_t n_router = (size_t)o->layers * (size_t)o->experts * (size_t)o->embd;
    const size_t n_x = (size_t)o->tokens * (size_t)o->embd;
    const size_t n_ids = (size_t)o->tokens * (size_t)o->used;
    struct sl_op ops[3];
    make_ops(b, 0, ops);
    size_t scratch_bytes = 0;
    for (int i = 0; i < 3; i++) {
        const size_t bytes = sl_op_scratch_bytes(&ops[i]);
        scratch_bytes = bytes > scratch_bytes ? bytes : scratch_bytes;
    }
    b->router = sl_alloc_aligned(SL_MEM_CPU, n_router * sizeof(float), 64);
    b->x = sl_alloc_aligned(SL_MEM_CPU, 3 * n_x * sizeof(float), 64);
    b->ids = sl_alloc_aligned(SL_MEM_CPU, n_ids * 2 * sizeof(float), 64);
    b->scratch = sl_alloc_aligned(SL_MEM_CPU, sl_cpu_scratch_bytes(scratch_bytes, o->threads), 64);
    if (b->router == NULL || b->x == NULL || b->ids == NULL || b->scratch == NULL) {
        return false;
    }
    b->n = b->x + n_x;
    b->y = b->n + n_x;
    b->chosen = (float *)(void *)(b->ids + n_ids);
    fill_floats(b->router, n_router);
    return make_weights(b, err);
}

static void pause_for(int us)
{
    const uint64_t end = sl_clock_now_ns() + (uint64_t)us * 1000;
    while (sl_clock_now_ns() < end) {
    }
}

/* Each layer once more, its first `part` + 1 operators, or the plain reads. */
static void time_part(struct bench *b, int part)
{
    const size_t read_bytes =
        3 * (size_t)b->o.used * (size_t)b->o.tokens * b->expert_bytes / 4096 * 4096;
    for (int layer = 0; layer < b->o.layers && b->n_times + layer < MAX_TIMES; layer++) {
        struct sl_op ops[3];
        make_ops(b, layer, ops);
        fill_floats(b->x, (size_t)b->o.tokens * (size_t)b->o.embd);
        const size_t room = b->layer_bytes - read_bytes;
        b->read.data = b->weights + (size_t)layer * b->layer_bytes +
                       (size_t)(random_bits() / 16777216.0 * (double)room) / 4096 * 4096;
        b->read.bytes = read_bytes;
        pause_for(b->o.pause_us);
        const uint64_t start = sl_clock_now_ns();
        if (part == 3) {
            sl_pool_run(b->pool, read_memory, &b->read);
        } else {
            sl_cpu_run(b->kernels, b->pool, ops, part + 1, b->scratch);
        }
        b->times[part][b->n_times + layer] = (double)(sl_clock_now_ns() - start);
    }
}

static void measure(struct bench *b)
{
    static const char *const names[N_PARTS] = {"norm", "norm, router", "norm, router, experts",
                                               "plain reads"};
    const uint64_t begin = sl_clock_now_ns();
    while (
        b->n_times + b->o.layers <= MAX_TIMES &&
        (b->n_times < 3 * b->o.layers || sl_clock_now_ns() - begin < (uint64_t)b->o.ms * 1000000)) {
        for (int part = N_PARTS - 1; part >= 0; part--) {
            time_part(b, part);
        }
        b->n_times += b->o.layers;
    }
    const double bytes = 3.0 * (double)b->o.used * (double)b->o.tokens * (double)b->expert_bytes;
    for (int part = 0; part < N_PARTS; part++) {
        const double ns = sl_median(b->times[part], b->n_times);
        printf("%-22s %8.1f us", names[part], ns / 1000.0);
        printf(part >= 2 ? " %8.1f GB/s\n" : "\n", bytes / ns);
    }
}

static bool parse(struct options *o, int argc, char **argv)
{
    const struct {
        const char *name;
        int *value;
    } numbers[] = {
        {"--threads", &o->threads}, {"--layers", &o->layers},     {"--experts", &o->experts},
        {"--used", &o->used},       {"--embd", &o->embd},         {"--ff", &o->ff},
        {"--tokens", &o->tokens},   {"--pause-us", &o->pause_us}, {"--ms", &o->ms},
    };
    for (int i = 1; i < argc; i += 2) {
        bool known = false;
        for (size_t k = 0; i + 1 < argc && k < sizeof(numbers) / sizeof(numbers[0]); k++) {
            if (strcmp(argv[i], numbers[k].name) == 0) {
                *numbers[k].value = atoi(argv[i + 1]);
                known = *numbers[k].value >= (numbers[k].value == &o->pause_us ? 0 : 1);
            }
        }
        if (i + 1 < argc && strcmp(argv[i], "--type") == 0) {
            known = sl_type_from_name(argv[i + 1], &o->type);
        } else if (i + 1 < argc && strcmp(argv[i], "--pages") == 0) {
            o->pages = argv[i + 1];
            known = true;
        }
        if (!known) {
            return false;
        }
    }
    return o->threads <= READ_MEMORY_MAX_THREADS && o->used <= SL_MAX_EXPERTS_USED &&
           o->used <= o->experts && o->used * o->tokens <= o->experts && o->tokens <= 8 &&
           o->embd % 256 == 0 && o->ff % 256 == 0;
}

int main(int argc, char **argv)
{
    static struct bench b = {.o = {.threads = 1,
                                   .layers = 8,
                                   .experts = 128,
                                   .used = 8,
                                   .embd = 2048,
                                   .ff = 768,
                                   .tokens = 1,
                                   .pause_us = 50,
                                   .ms = 500,
                                   .type = SL_TYPE_Q4_0,
                                   .pages = "huge"}};
    if (!parse(&b.o, argc, argv)) {
        fputs("usage: cpu_experts [--threads N] [--layers N] [--experts N] [--used N] [--embd N]\n"
              "                   [--ff N] [--tokens N] [--pause-us N] [--ms N] [--type NAME]\n"
              "                   [--pages huge|small|FILE]\n",
              stderr);
        return 2;
    }
    struct sluice_error err = {0};
    const struct sl_pool_options pool = {.n_threads = b.o.threads};
    bool ready = sl_pool_create(&b.pool, &pool, &err) == SLUICE_STATUS_OK;
    b.kernels = sl_cpu_kernels(sl_cpu_level());
    ready = ready && prepare(&b, &err);
    if (ready) {
        printf(
            "%d layers of %d experts %d x %d %s, %d used, %d tokens, %d threads, pauses of %d us, "
            "pages %s, %s\n",
            b.o.layers, b.o.experts, b.o.ff, b.o.embd, sl_type_name(b.o.type), b.o.used, b.o.tokens,
            b.o.threads, b.o.pause_us, b.o.pages, sl_cpu_name());
        measure(&b);
    } else {
        fprintf(stderr, "cpu_experts: %s\n",
                err.message[0] != '\0' ? err.message : "no memory, or the file cannot be written");
    }
    sl_file_map_finish(&b.map);
    sl_free(b.own);
    sl_free(b.scratch);
    sl_free(b.ids);
    sl_free(b.x);
    sl_free(b.router);
    sl_pool_destroy(&b.pool);
    return ready ? 0 : 1;
}
