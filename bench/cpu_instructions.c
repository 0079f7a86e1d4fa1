/* SPDX-License-Identifier: Apache-2.0
 *
 * Instructions that the matrix products execute, counted one by one with the processor's trap flag:
 * a product runs once with few rows and once with more, and the difference is what the added rows
 * took, packing of activations and calls taken away. Writes the table of docs/adding-a-kernel.md.
 *
 *   cpu_instructions [--cols N]
 *
 * For each type and set of kernels: instructions per byte of weights with 1 token, and with 4. A
 * core that executes four instructions a cycle at 3 GHz and gets 8 GB/s from memory has time
 * for 1.5.
 */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#if defined(__linux__) && defined(__x86_64__)
#include <signal.h>
#endif

#include "base/mem.h"
#include "cpu/kernels.h"
#include "cpu/linear_internal.h"
#include "quant/type.h"

#define MAX_TOKENS 4
/* Whole numbers of rows that share activations. */
#define FEW_ROWS 4
#define MORE_ROWS 8

static const enum sl_type types[] = {
    SL_TYPE_F32,  SL_TYPE_F16,    SL_TYPE_BF16,   SL_TYPE_Q8_0,  SL_TYPE_Q4_0, SL_TYPE_Q4_1,
    SL_TYPE_Q5_0, SL_TYPE_Q5_1,   SL_TYPE_Q2_K,   SL_TYPE_Q3_K,  SL_TYPE_Q4_K, SL_TYPE_Q5_K,
    SL_TYPE_Q6_K, SL_TYPE_IQ4_NL, SL_TYPE_IQ4_XS, SL_TYPE_MXFP4,
};

struct product {
    struct sl_op_linear op;
    struct sl_linear_call call;
};

#if defined(__linux__) && defined(__x86_64__)
static volatile sig_atomic_t n_steps;

static void on_step(int signal)
{
    (void)signal;
    n_steps++;
}

/* The processor's trap flag: a signal after every instruction. The stack below may be in use. */
static void __attribute__((noinline)) trace(bool on)
{
    if (on) {
        __asm__ volatile("subq $128, %%rsp\n\tpushfq\n\torq $0x100, (%%rsp)\n\tpopfq\n\t"
                         "addq $128, %%rsp" ::
                             : "memory", "cc");
    } else {
        __asm__ volatile("subq $128, %%rsp\n\tpushfq\n\tandq $-0x101, (%%rsp)\n\tpopfq\n\t"
                         "addq $128, %%rsp" ::
                             : "memory", "cc");
    }
}

/* 0 where steps cannot be counted. */
static long count_steps(const struct product *p)
{
    signal(SIGTRAP, on_step);
    n_steps = 0;
    trace(true);
    sl_linear_run(&p->call);
    trace(false);
    return n_steps;
}
#else
static long count_steps(const struct product *p)
{
    (void)p;
    return 0;
}
#endif

struct bench {
    int64_t n_cols;
    float *x, *y;
    char *weights, *scratch, *own;
};

static long count(const struct bench *b, const struct sl_cpu_linear_kernels *kernels,
                  enum sl_type type, int n_tokens, int n_rows)
{
    struct product p = {.op = {.x = b->x, .n_parts = 1}};
    p.op.part[0].y = b->y;
    p.op.part[0].w =
        (struct sl_matrix){.data = b->weights, .type = type, .n_rows = n_rows, .n_cols = b->n_cols};
    p.call = (struct sl_linear_call){.kernels = kernels,
                                     .op = &p.op,
                                     .n_tokens = n_tokens,
                                     .scratch = b->scratch,
                                     .own = b->own,
                                     .n_threads = 1};
    return count_steps(&p);
}

static double added(const struct bench *b, const struct sl_cpu_linear_kernels *kernels,
                    enum sl_type type, int n_tokens)
{
    return (double)(count(b, kernels, type, n_tokens, MORE_ROWS) -
                    count(b, kernels, type, n_tokens, FEW_ROWS));
}

static bool fill(struct bench *b)
{
    struct sl_op op = {.kind = SL_OP_LINEAR, .n_tokens = MAX_TOKENS};
    op.linear.n_parts = 1;
    op.linear.part[0].w = (struct sl_matrix){.n_rows = MORE_ROWS, .n_cols = b->n_cols};
    b->x = sl_calloc(SL_MEM_CPU, (size_t)(MAX_TOKENS * b->n_cols), sizeof(float));
    b->y = sl_calloc(SL_MEM_CPU, MAX_TOKENS * MORE_ROWS, sizeof(float));
    b->weights = sl_alloc_aligned(SL_MEM_CPU, (size_t)(MORE_ROWS * b->n_cols) * sizeof(float), 64);
    b->scratch = sl_alloc_aligned(SL_MEM_CPU, sl_op_scratch_bytes(&op) + 64, 64);
    b->own = sl_alloc_aligned(SL_MEM_CPU, SL_CPU_THREAD_SCRATCH_BYTES, 64);
    if (b->x == NULL || b->y == NULL || b->weights == NULL || b->scratch == NULL ||
        b->own == NULL) {
        return false;
    }
    for (int64_t i = 0; i < MAX_TOKENS * b->n_cols; i++) {
        b->x[i] = (float)(i % 37) - 18.0f;
    }
    memset(b->weights, 0x11, (size_t)(MORE_ROWS * b->n_cols) * sizeof(float));
    return true;
}

/* The i-th set that has row kernels of its own; NULL past the last. */
static const struct sl_cpu_linear_kernels *set_at(int i)
{
    const struct sl_cpu_linear_kernels *kernels;
    const struct sl_linear_rows_kernels *before = NULL;
    for (int v = 0; (kernels = sl_linear_variant(v)) != NULL; v++) {
        if (kernels->rows != before && i-- == 0) {
            break;
        }
        before = kernels->rows;
    }
    return kernels;
}

static void print_type(const struct bench *b, enum sl_type type)
{
    const double bytes =
        (double)sl_type_row_bytes(type, b->n_cols) * (double)(MORE_ROWS - FEW_ROWS);
    printf("| %s |", sl_type_name(type));
    const struct sl_cpu_linear_kernels *kernels;
    for (int i = 0; (kernels = set_at(i)) != NULL; i++) {
        printf(" %.2f / %.2f |", added(b, kernels, type, 1) / bytes,
               added(b, kernels, type, MAX_TOKENS) / bytes);
        fflush(stdout);
    }
    puts("");
}

static void print_head(void)
{
    const struct sl_cpu_linear_kernels *kernels;
    printf("| type |");
    for (int i = 0; (kernels = set_at(i)) != NULL; i++) {
        printf(" %s |", kernels->name);
    }
    printf("\n| --- |");
    for (int i = 0; set_at(i) != NULL; i++) {
        printf(" ---: |");
    }
    puts("");
}

int main(int argc, char **argv)
{
    struct bench b = {.n_cols = 2048};
    if (argc == 3 && strcmp(argv[1], "--cols") == 0) {
        b.n_cols = atoll(argv[2]);
    } else if (argc != 1) {
        fputs("usage: cpu_instructions [--cols N]\n", stderr);
        return 2;
    }
    if (b.n_cols <= 0 || b.n_cols % 256 != 0 || !fill(&b)) {
        fputs("cpu_instructions: columns come in 256s, or there is no memory\n", stderr);
        return 1;
    }
    if (count(&b, sl_linear_variant(0), SL_TYPE_F32, 1, 1) == 0) {
        fputs("cpu_instructions: instructions cannot be counted one by one here\n", stderr);
        return 1;
    }
    print_head();
    for (size_t t = 0; t < sizeof(types) / sizeof(types[0]); t++) {
        print_type(&b, types[t]);
    }
    sl_free(b.own);
    sl_free(b.scratch);
    sl_free(b.weights);
    sl_free(b.y);
    sl_free(b.x);
    return 0;
}
