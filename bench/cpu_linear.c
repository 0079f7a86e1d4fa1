/* SPDX-License-Identifier: Apache-2.0
 *
 * Speed of the matrix products, beside what the machine's memory gives.
 *
 *   cpu_linear [--rows N] [--cols N] [--threads N] [--tokens N] [--type NAME] [--level NAME]
 *              [--bytes N] [--ms N]
 *
 * For every type and level: decode (1 token) in GB/s of weights, over --bytes of matrices so that
 * no cache holds them, and prefill (--tokens) in billions of multiply-adds per second. Each figure
 * is the best of several runs within --ms milliseconds. Decode runs alternate with plain reads of
 * the same memory (column "read"), because a shared machine's memory speed changes by the minute.
 */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/mem.h"
#include "base/pool.h"
#include "cpu/cpu.h"
#include "cpu/kernels.h"
#include "op/op.h"
#include "read_memory.h"

struct options {
    int64_t rows, cols, bytes;
    int threads, tokens, ms;
    const char *type, *level;
};

struct bench {
    struct options o;
    struct sl_pool *pool;
    const struct sl_cpu_kernels *kernels;
    enum sl_type type;
    char *weights;
    size_t matrix_bytes;
    int n_matrices;
    float *x, *y;
    void *scratch;
    struct read_memory read;
};

static const enum sl_type types[] = {
    SL_TYPE_Q4_0, SL_TYPE_Q4_K,   SL_TYPE_Q6_K,   SL_TYPE_Q8_0,  SL_TYPE_F16,  SL_TYPE_BF16,
    SL_TYPE_F32,  SL_TYPE_Q4_1,   SL_TYPE_Q5_0,   SL_TYPE_Q5_1,  SL_TYPE_Q5_K, SL_TYPE_Q2_K,
    SL_TYPE_Q3_K, SL_TYPE_IQ4_NL, SL_TYPE_IQ4_XS, SL_TYPE_MXFP4,
};

static int usage(void)
{
    fputs("usage: cpu_linear [--rows N] [--cols N] [--threads N] [--tokens N] [--type NAME]\n"
          "                  [--level NAME] [--bytes N] [--ms N]\n",
          stderr);
    return 2;
}

static void products(struct bench *b, int n_tokens, int matrix)
{
    struct sl_op op = {.kind = SL_OP_LINEAR, .n_tokens = n_tokens};
    op.linear.x = b->x;
    op.linear.n_parts = 1;
    op.linear.part[0].y = b->y;
    op.linear.part[0].w = (struct sl_matrix){
        .data = b->weights + (size_t)matrix * b->matrix_bytes,
        .type = b->type,
        .n_rows = b->o.rows,
        .n_cols = b->o.cols,
    };
    sl_cpu_run(b->kernels, b->pool, &op, 1, b->scratch);
}

/* Nanoseconds of one pass over all matrices (decode), of reading them, of one product (prefill). */
static double time_once(struct bench *b, int what, int turn)
{
    const uint64_t start = sl_clock_now_ns();
    if (what == 0) {
        for (int i = 0; i < b->n_matrices; i++) {
            products(b, 1, i);
        }
    } else if (what == 1) {
        sl_pool_run(b->pool, read_memory, &b->read);
    } else {
        products(b, b->o.tokens, turn % b->n_matrices);
    }
    return (double)(sl_clock_now_ns() - start);
}

static void measure(struct bench *b)
{
    double best[3] = {1e30, 1e30, 1e30};
    const uint64_t budget = (uint64_t)b->o.ms * 1000000;
    for (int phase = 0; phase < 2; phase++) {
        const uint64_t start = sl_clock_now_ns();
        for (int k = 0; k < 3 || sl_clock_now_ns() - start < budget; k++) {
            for (int what = phase * 2; what < 2 + phase; what++) {
                const double ns = time_once(b, what, k);
                best[what] = ns < best[what] ? ns : best[what];
            }
        }
    }
    const double bytes = (double)b->matrix_bytes * b->n_matrices;
    const double macs = (double)b->o.rows * (double)b->o.cols * b->o.tokens;
    printf("%-8s %-11s %8.1f %8.1f %6.0f%% %10.1f\n", sl_type_name(b->type),
           sl_cpu_level_name(b->kernels->level), bytes / best[0], bytes / best[1],
           100.0 * best[1] / best[0], macs / best[2]);
    fflush(stdout);
}

/* Matrices of one random row, again and again: contents do not change the speed. */
static bool prepare(struct bench *b)
{
    const size_t row_bytes = sl_type_row_bytes(b->type, b->o.cols);
    b->matrix_bytes = row_bytes * (size_t)b->o.rows;
    b->n_matrices = (int)((size_t)b->o.bytes / b->matrix_bytes) + 1;
    b->weights = sl_alloc_aligned(SL_MEM_CPU, b->matrix_bytes * (size_t)b->n_matrices, 64);
    b->read =
        (struct read_memory){.data = b->weights, .bytes = b->matrix_bytes * (size_t)b->n_matrices};
    if (b->weights == NULL || !sl_quantize_row(b->type, b->x, b->weights, b->o.cols)) {
        return false;
    }
    for (size_t at = row_bytes; at < b->matrix_bytes * (size_t)b->n_matrices; at += row_bytes) {
        memcpy(b->weights + at, b->weights, row_bytes);
    }
    return true;
}

static int run(struct bench *b)
{
    printf("%lld x %lld, %d threads, prefill of %d tokens, %s\n", (long long)b->o.rows,
           (long long)b->o.cols, b->o.threads, b->o.tokens, sl_cpu_name());
    printf("%-8s %-11s %8s %8s %7s %10s\n", "type", "level", "decode", "read", "", "prefill");
    for (size_t t = 0; t < sizeof(types) / sizeof(types[0]); t++) {
        b->type = types[t];
        if ((b->o.type != NULL && strcmp(b->o.type, sl_type_name(b->type)) != 0) ||
            b->o.cols % sl_type_traits(b->type)->block_items != 0) {
            continue;
        }
        if (!prepare(b)) {
            return 1;
        }
        for (enum sl_cpu_level level = SL_CPU_AVX2; level < SL_CPU_N_LEVELS; level++) {
            if (sl_cpu_level_supported(level) &&
                (b->o.level == NULL || strcmp(b->o.level, sl_cpu_level_name(level)) == 0)) {
                b->kernels = sl_cpu_kernels(level);
                measure(b);
            }
        }
        sl_free(b->weights);
    }
    return 0;
}

static bool parse(struct options *o, int argc, char **argv)
{
    if (argc % 2 == 0) {
        return false;
    }
    for (int i = 1; i + 1 < argc; i += 2) {
        const char *name = argv[i];
        const char *value = argv[i + 1];
        if (strcmp(name, "--rows") == 0) {
            o->rows = atoll(value);
        } else if (strcmp(name, "--cols") == 0) {
            o->cols = atoll(value);
        } else if (strcmp(name, "--threads") == 0) {
            o->threads = atoi(value);
        } else if (strcmp(name, "--tokens") == 0) {
            o->tokens = atoi(value);
        } else if (strcmp(name, "--bytes") == 0) {
            o->bytes = atoll(value);
        } else if (strcmp(name, "--ms") == 0) {
            o->ms = atoi(value);
        } else if (strcmp(name, "--type") == 0) {
            o->type = value;
        } else if (strcmp(name, "--level") == 0) {
            o->level = value;
        } else {
            return false;
        }
    }
    return o->rows > 0 && o->cols > 0 && o->threads > 0 && o->threads <= READ_MEMORY_MAX_THREADS &&
           o->tokens > 0 && o->bytes >= 0 && o->ms > 0;
}

int main(int argc, char **argv)
{
    struct bench b = {.o = {.rows = 4096,
                            .cols = 4096,
                            .bytes = (int64_t)256 << 20,
                            .threads = 1,
                            .tokens = 512,
                            .ms = 300}};
    if (!parse(&b.o, argc, argv)) {
        return usage();
    }
    struct sluice_error err = {0};
    const struct sl_pool_options pool = {.n_threads = b.o.threads};
    if (sl_pool_create(&b.pool, &pool, &err) != SLUICE_STATUS_OK) {
        fprintf(stderr, "cpu_linear: %s\n", err.message);
        return 1;
    }
    const size_t n_x = (size_t)b.o.tokens * (size_t)b.o.cols;
    struct sl_op op = {.kind = SL_OP_LINEAR, .n_tokens = b.o.tokens};
    op.linear.n_parts = 1;
    op.linear.part[0].w = (struct sl_matrix){.n_rows = b.o.rows, .n_cols = b.o.cols};
    b.x = sl_alloc_aligned(SL_MEM_CPU, n_x * sizeof(float), 64);
    b.y = sl_alloc_aligned(SL_MEM_CPU, (size_t)(b.o.tokens * b.o.rows) * sizeof(float), 64);
    b.scratch = sl_alloc_aligned(SL_MEM_CPU,
                                 sl_cpu_scratch_bytes(sl_op_scratch_bytes(&op), b.o.threads), 64);
    int status = 1;
    if (b.x == NULL || b.y == NULL || b.scratch == NULL) {
        fputs("cpu_linear: out of memory\n", stderr);
    } else {
        uint32_t state = 1;
        for (size_t i = 0; i < n_x; i++) {
            state = state * 1664525u + 1013904223u;
            b.x[i] = (float)(int32_t)state / 2147483648.0f;
        }
        status = run(&b);
    }
    sl_free(b.scratch);
    sl_free(b.y);
    sl_free(b.x);
    sl_pool_destroy(&b.pool);
    return status;
}
