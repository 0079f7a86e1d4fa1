/* SPDX-License-Identifier: Apache-2.0
 *
 * Speed of attention in decode, beside what the machine's memory gives.
 *
 *   cpu_attention [--threads N] [--depth N] [--heads N] [--kv-heads N] [--dim N] [--tokens N]
 *                 [--layers N] [--ms N] [--level NAME]
 *
 * One token (or a few, --tokens) attends over --depth positions of an F16 cache in each of --layers
 * layers, so that no CPU cache holds them. In GB/s of keys and values; passes alternate with plain
 * reads of the same memory.
 */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/pool.h"
#include "cpu/cpu.h"
#include "op/op.h"
#include "read_memory.h"

#define MAX_TOKENS 16

struct options {
    int threads, depth, heads, kv_heads, dim, tokens, layers, ms;
    const char *level;
};

struct bench {
    struct options o;
    struct sl_pool *pool;
    const struct sl_cpu_kernels *kernels;
    char *cache;
    size_t layer_bytes;
    float *q, *y;
    int32_t pos[MAX_TOKENS];
    void *scratch;
    struct read_memory read;
};

static struct sl_op attention(const struct bench *b, int layer)
{
    struct sl_op op = {.kind = SL_OP_ATTENTION, .n_tokens = b->o.tokens};
    op.attention = (struct sl_op_attention){
        .q = b->q,
        .y = b->y,
        .pos = b->pos,
        .kv = {.data = b->cache + (size_t)layer * b->layer_bytes,
               .types = {SL_TYPE_F16, SL_TYPE_F16},
               .n_kv_heads = b->o.kv_heads,
               .head_dim = b->o.dim},
        .n_heads = b->o.heads,
        .n_kv_max = b->o.depth,
        .scale = 0.1f,
    };
    return op;
}

static bool prepare(struct bench *b)
{
    const size_t n_blocks = ((size_t)b->o.depth + SL_KV_BLOCK - 1) / SL_KV_BLOCK;
    b->layer_bytes = n_blocks * sl_kv_block_bytes((struct sl_kv_types){SL_TYPE_F16, SL_TYPE_F16},
                                                  b->o.kv_heads, b->o.dim);
    const size_t bytes = b->layer_bytes * (size_t)b->o.layers;
    const size_t n_q = (size_t)b->o.tokens * (size_t)b->o.heads * (size_t)b->o.dim;
    const struct sl_op op = attention(b, 0);
    b->cache = sl_alloc_aligned(SL_MEM_CPU, bytes, 64);
    b->q = sl_alloc_aligned(SL_MEM_CPU, n_q * sizeof(float), 64);
    b->y = sl_alloc_aligned(SL_MEM_CPU, n_q * sizeof(float), 64);
    b->scratch = sl_alloc_aligned(SL_MEM_CPU,
                                  sl_cpu_scratch_bytes(sl_op_scratch_bytes(&op), b->o.threads), 64);
    if (b->cache == NULL || b->q == NULL || b->y == NULL || b->scratch == NULL) {
        return false;
    }
    b->read = (struct read_memory){.data = b->cache, .bytes = bytes};
    uint32_t state = 1;
    for (size_t i = 0; i < bytes / 2; i++) {
        state = state * 1664525u + 1013904223u;
        ((uint16_t *)(void *)b->cache)[i] = (uint16_t)(0x3000u | state >> 20); /* 1/8 .. 1/4 */
    }
    for (size_t i = 0; i < n_q; i++) {
        state = state * 1664525u + 1013904223u;
        b->q[i] = (float)(int32_t)state / 2147483648.0f;
    }
    for (int i = 0; i < b->o.tokens; i++) {
        b->pos[i] = b->o.depth - b->o.tokens + i;
    }
    return true;
}

static void measure(struct bench *b)
{
    double best[2] = {1e30, 1e30};
    const uint64_t begin = sl_clock_now_ns();
    for (int k = 0; k < 3 || sl_clock_now_ns() - begin < (uint64_t)b->o.ms * 1000000; k++) {
        for (int what = 0; what < 2; what++) {
            const uint64_t start = sl_clock_now_ns();
            for (int i = 0; what == 0 && i < b->o.layers; i++) {
                const struct sl_op op = attention(b, i);
                sl_cpu_run(b->kernels, b->pool, &op, 1, b->scratch);
            }
            if (what == 1) {
                sl_pool_run(b->pool, read_memory, &b->read);
            }
            const double ns = (double)(sl_clock_now_ns() - start);
            best[what] = ns < best[what] ? ns : best[what];
        }
    }
    const double bytes = (double)b->read.bytes;
    printf("%-11s %8.1f %8.1f %6.0f%%\n", sl_cpu_level_name(sl_cpu_level()), bytes / best[0],
           bytes / best[1], 100.0 * best[1] / best[0]);
}

static bool parse(struct options *o, int argc, char **argv)
{
    const struct {
        const char *name;
        int *value;
    } numbers[] = {
        {"--threads", &o->threads},   {"--depth", &o->depth}, {"--heads", &o->heads},
        {"--kv-heads", &o->kv_heads}, {"--dim", &o->dim},     {"--tokens", &o->tokens},
        {"--layers", &o->layers},     {"--ms", &o->ms},
    };
    for (int i = 1; i < argc; i += 2) {
        bool known = false;
        for (size_t k = 0; i + 1 < argc && k < sizeof(numbers) / sizeof(numbers[0]); k++) {
            if (strcmp(argv[i], numbers[k].name) == 0) {
                *numbers[k].value = atoi(argv[i + 1]);
                known = *numbers[k].value > 0;
            }
        }
        if (i + 1 < argc && strcmp(argv[i], "--level") == 0) {
            o->level = argv[i + 1];
            known = true;
        }
        if (!known) {
            return false;
        }
    }
    return o->threads <= READ_MEMORY_MAX_THREADS && o->tokens <= MAX_TOKENS &&
           o->tokens <= o->depth && o->heads % o->kv_heads == 0 && o->dim % 32 == 0 &&
           o->dim <= 256;
}

int main(int argc, char **argv)
{
    struct bench b = {.o = {.threads = 1,
                            .depth = 32768,
                            .heads = 32,
                            .kv_heads = 8,
                            .dim = 128,
                            .tokens = 1,
                            .layers = 4,
                            .ms = 1000}};
    if (!parse(&b.o, argc, argv)) {
        fputs(
            "usage: cpu_attention [--threads N] [--depth N] [--heads N] [--kv-heads N] [--dim N]\n"
            "                     [--tokens N] [--layers N] [--ms N] [--level NAME]\n",
            stderr);
        return 2;
    }
    struct sluice_error err = {0};
    const struct sl_pool_options pool = {.n_threads = b.o.threads};
    if ((b.o.level != NULL && sl_cpu_set_level_cap(b.o.level, &err) != SLUICE_STATUS_OK) ||
        sl_pool_create(&b.pool, &pool, &err) != SLUICE_STATUS_OK) {
        fprintf(stderr, "cpu_attention: %s\n", err.message);
        return 1;
    }
    b.kernels = sl_cpu_kernels(sl_cpu_level());
    const bool ready = prepare(&b);
    if (ready) {
        printf("%d positions, %d layers, %d tokens, %d heads of %d, %d KV heads, %d threads, %s\n",
               b.o.depth, b.o.layers, b.o.tokens, b.o.heads, b.o.dim, b.o.kv_heads, b.o.threads,
               sl_cpu_name());
        printf("%-11s %8s %8s\n", "level", "GB/s", "read");
        measure(&b);
    } else {
        fputs("cpu_attention: out of memory\n", stderr);
    }
    sl_free(b.scratch);
    sl_free(b.y);
    sl_free(b.q);
    sl_free(b.cache);
    sl_pool_destroy(&b.pool);
    return ready ? 0 : 1;
}
