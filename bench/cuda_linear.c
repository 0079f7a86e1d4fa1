/* SPDX-License-Identifier: Apache-2.0
 *
 * Speed of the CUDA device's matrix products, through the device interface.
 *
 *   bench-cuda_linear [--type NAME] [--shape ROWSxCOLS] [--tokens N,...] [--gated]
 *                     [--ceiling TFLOPS] [--gpu N] [--json]
 *
 * For every type, shape and number of tokens: first some outputs of the product are compared with
 * sums in double, then it is timed over matrices that no cache holds together. GB/s counts the
 * bytes of the matrix, TFLOP/s two operations a weight and token; the copy speed of the GPU's
 * memory (read and write counted) stands above the table. A shape given on the command line need
 * not be one of the list. `--gated` makes products of gate and up, two matrices of that shape and
 * SiLU between. `--ceiling` is what the GPU's tensor cores were measured at: its share is shown
 * too. Exit status 1 when a product is wrong.
 *
 * A long copy goes ahead of the timed launches in the stream, so that all of them are queued when
 * the first begins: what is timed is the GPU, not the host.
 */
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "cuda_bench.h"

#define POOL_ROWS 61                      /* different rows of a matrix; the others repeat them */
#define ROTATE_BYTES (INT64_C(320) << 20) /* of matrices in turn: several times any L2 cache */
#define LEAD_BYTES (INT64_C(3) << 30)     /* of the copy ahead: about two milliseconds */
#define MAX_OPS 64                        /* timed launches of a run */
#define N_SAMPLES 32

static const enum sl_type types[] = {
    SL_TYPE_F16,  SL_TYPE_BF16,   SL_TYPE_Q4_0,   SL_TYPE_Q4_1,  SL_TYPE_Q5_0, SL_TYPE_Q5_1,
    SL_TYPE_Q8_0, SL_TYPE_Q2_K,   SL_TYPE_Q3_K,   SL_TYPE_Q4_K,  SL_TYPE_Q5_K, SL_TYPE_Q6_K,
    SL_TYPE_F32,  SL_TYPE_IQ4_NL, SL_TYPE_IQ4_XS, SL_TYPE_MXFP4,
};
static const int64_t shapes[][2] = {{4096, 4096}, {14336, 4096}, {4096, 14336}};
static const int token_counts[] = {1,  2,  3,  4,  5,  6,   8,   12,  16,   17,
                                   24, 32, 48, 64, 96, 128, 256, 512, 1024, 2048};
#define MAX_TOKENS 2048
#define MAX_ROWS 14336
#define MAX_COLS 14336

struct bench {
    const char *type, *tokens;
    int64_t rows, cols;
    int gpu;
    double ceiling;
    bool gated, json;

    struct cuda_bench c;
    float *x_host, *y_host;
    char *w_host;  /* one matrix */
    char *weights; /* device: matrices in turn; also both sides of the copy ahead */
    size_t weights_bytes;
    float *x, *y; /* device */
    void *scratch;
    int n_rows_out;
    bool wrong;
};

struct result {
    double us, error;
};

/* ---- data ---- */

static float random_normal(void)
{
    float sum = 0.0f;
    for (int i = 0; i < 4; i++) {
        sum += (float)(cuda_bench_random() >> 40) * 0x1p-24f - 0.5f;
    }
    return sum * 1.7320508f;
}

/* Row r of a matrix is row r % POOL_ROWS of a pool. */
static bool make_matrix(struct bench *b, enum sl_type type, int64_t rows, int64_t cols)
{
    const size_t row_bytes = sl_type_row_bytes(type, cols);
    float *row = sl_alloc(SL_MEM_DEVICE, (size_t)cols * sizeof *row);
    if (!row) {
        return false;
    }
    bool ok = true;
    for (int64_t r = 0; r < rows && ok; r++) {
        char *to = b->w_host + (size_t)r * row_bytes;
        if (r >= POOL_ROWS) {
            memcpy(to, b->w_host + (size_t)(r % POOL_ROWS) * row_bytes, row_bytes);
            continue;
        }
        for (int64_t i = 0; i < cols; i++) {
            row[i] = random_normal() * 0.02f;
        }
        ok = sl_quantize_row(type, row, to, cols);
    }
    sl_free(row);
    return ok;
}

/* ---- one point ---- */

static void fill_op(struct sl_op *op, const struct bench *b, const char *w, enum sl_type type,
                    int64_t rows, int64_t cols, int n_tokens)
{
    memset(op, 0, sizeof *op);
    op->kind = SL_OP_LINEAR;
    op->n_tokens = n_tokens;
    op->linear.x = b->x;
    op->linear.n_parts = b->gated ? 2 : 1;
    op->linear.activation = b->gated ? SL_ACT_SILU : SL_ACT_NONE;
    for (int i = 0; i < op->linear.n_parts; i++) {
        op->linear.part[i].w =
            (struct sl_matrix){.data = w, .type = type, .n_rows = rows, .n_cols = cols};
        op->linear.part[i].y = b->y;
    }
}

/* Root mean square of the error of some outputs over that of the outputs. */
static enum sluice_status check(struct bench *b, const struct sl_op *op, double *out,
                                struct sluice_error *err)
{
    const struct sl_device_vtable *vt = b->c.dev->vt;
    const struct sl_matrix *w = &op->linear.part[0].w;
    const size_t y_bytes = (size_t)op->n_tokens * (size_t)w->n_rows * sizeof(float);
    SL_TRY(vt->run(b->c.dev, b->c.stream, op, 1, b->scratch, err));
    SL_TRY(vt->copy_to_host(b->c.dev, b->c.stream, b->y_host, b->y, y_bytes, err));
    SL_TRY(vt->stream_sync(b->c.dev, b->c.stream, err));
    float *row = sl_alloc(SL_MEM_DEVICE, (size_t)w->n_cols * sizeof *row);
    SL_CHECK(row != NULL, OUT_OF_MEMORY, err, "no memory for a row");
    double wrong = 0.0, all = 1e-30;
    for (int i = 0; i < N_SAMPLES; i++) {
        /* Corners first, then spread by steps that share no factor with the sizes. */
        const int64_t r = i == 0 ? 0 : i == 1 ? w->n_rows - 1 : (int64_t)i * 2711 % w->n_rows;
        const int64_t t = i == 1 ? op->n_tokens - 1 : (int64_t)i * 1013 % op->n_tokens;
        sl_dequantize_row(w->type, b->w_host + (size_t)r * sl_type_row_bytes(w->type, w->n_cols),
                          row, w->n_cols);
        double sum = 0.0;
        for (int64_t k = 0; k < w->n_cols; k++) {
            sum += (double)row[k] * b->x_host[t * w->n_cols + k];
        }
        if (b->gated) {
            sum *= sum / (1.0 + exp(-sum)); /* gate and up are the same matrix */
        }
        const double d = b->y_host[t * w->n_rows + r] - sum;
        wrong += d * d;
        all += sum * sum;
    }
    sl_free(row);
    *out = sqrt(wrong / all);
    return SLUICE_STATUS_OK;
}

static void print_result(struct bench *b, enum sl_type type, int64_t rows, int64_t cols,
                         int n_tokens, const struct result *r)
{
    const double n_products = b->gated ? 2.0 : 1.0;
    const double bytes = n_products * (double)rows * (double)sl_type_row_bytes(type, cols);
    const double gb_s = bytes / r->us * 1e-3;
    const double tflop_s = n_products * 2.0 * (double)rows * (double)cols * n_tokens / r->us * 1e-6;
    if (b->json) {
        printf("%s\n  {\"type\": \"%s\", \"rows\": %lld, \"cols\": %lld, \"tokens\": %d, "
               "\"us\": %.3f, \"gb_per_s\": %.1f, \"tflop_per_s\": %.2f, \"error\": %.2e}",
               b->n_rows_out ? "," : "", sl_type_name(type), (long long)rows, (long long)cols,
               n_tokens, r->us, gb_s, tflop_s, r->error);
    } else {
        printf("%-7s %6lld x %-6lld %5d %10.2f %9.1f %9.2f %10.1e", sl_type_name(type),
               (long long)rows, (long long)cols, n_tokens, r->us, gb_s, tflop_s, r->error);
        if (b->ceiling > 0.0) {
            printf(" %5.0f %%", tflop_s / b->ceiling * 100.0);
        }
        printf("\n");
    }
    fflush(stdout);
    b->n_rows_out++;
}

/* Whether the count is among those asked for. */
static bool wants_tokens(const struct bench *b, int n_tokens)
{
    for (const char *at = b->tokens; at; at = strchr(at, ',')) {
        at += *at == ',';
        if (atoi(at) == n_tokens) {
            return true;
        }
    }
    return b->tokens == NULL;
}

static enum sluice_status bench_shape(struct bench *b, enum sl_type type, int64_t rows,
                                      int64_t cols, struct sluice_error *err)
{
    const struct sl_device_vtable *vt = b->c.dev->vt;
    const size_t bytes = (size_t)rows * sl_type_row_bytes(type, cols);
    const size_t pitch = (bytes + 255) / 256 * 256;
    int n_matrices = (int)(ROTATE_BYTES / (int64_t)pitch) + 1;
    n_matrices = n_matrices > MAX_OPS ? MAX_OPS : n_matrices;
    while (n_matrices > 1 && (size_t)n_matrices * pitch > b->weights_bytes) {
        n_matrices--;
    }
    SL_CHECK(make_matrix(b, type, rows, cols), INTERNAL, err, "cannot make a %s matrix",
             sl_type_name(type));
    for (int i = 0; i < n_matrices; i++) {
        SL_TRY(vt->copy_to_device(b->c.dev, b->c.stream, b->weights + (size_t)i * pitch, b->w_host,
                                  bytes, err));
    }
    SL_TRY(vt->stream_sync(b->c.dev, b->c.stream, err));
    for (size_t i = 0; i < sizeof token_counts / sizeof token_counts[0]; i++) {
        const int n_tokens = token_counts[i];
        /* F32 is for small matrices of real models: no kernel for many tokens. */
        if (!wants_tokens(b, n_tokens) || (type == SL_TYPE_F32 && n_tokens > 64)) {
            continue;
        }
        /* Enough launches for a steady figure, few enough for a short run. */
        const int n_ops = n_tokens <= 64 ? MAX_OPS : n_tokens <= 512 ? 8 : 3;
        struct sl_op ops[MAX_OPS];
        for (int j = 0; j < n_ops; j++) {
            fill_op(&ops[j], b, b->weights + (size_t)(j % n_matrices) * pitch, type, rows, cols,
                    n_tokens);
        }
        struct result r = {0};
        SL_TRY(check(b, &ops[n_ops - 1], &r.error, err));
        SL_TRY(cuda_bench_time(&b->c, ops, n_ops, b->scratch, b->weights + b->weights_bytes,
                               2 * (size_t)LEAD_BYTES, &r.us, err));
        print_result(b, type, rows, cols, n_tokens, &r);
        const double bound =
            type == SL_TYPE_F16 || type == SL_TYPE_BF16 || type == SL_TYPE_F32 ? 1e-3 : 1.5e-2;
        if (!(r.error <= bound)) {
            fprintf(stderr, "wrong: %s %lld x %lld, %d tokens: error %g, bound %g\n",
                    sl_type_name(type), (long long)rows, (long long)cols, n_tokens, r.error, bound);
            b->wrong = true;
        }
    }
    return SLUICE_STATUS_OK;
}

/* ---- the whole ---- */

static enum sluice_status prepare(struct bench *b, struct sluice_error *err)
{
    const size_t x_bytes = (size_t)MAX_TOKENS * MAX_COLS * sizeof(float);
    const size_t y_bytes = (size_t)MAX_TOKENS * MAX_ROWS * sizeof(float);
    struct sl_op largest;
    SL_TRY(cuda_bench_create(&b->c, b->gpu, err));
    fill_op(&largest, b, NULL, SL_TYPE_F32, MAX_ROWS, MAX_COLS, MAX_TOKENS);
    const size_t scratch_bytes = sl_op_scratch_bytes(&largest);
    b->weights_bytes = (size_t)ROTATE_BYTES * 2;
    b->x_host = sl_alloc(SL_MEM_DEVICE, x_bytes);
    b->y_host = sl_alloc(SL_MEM_DEVICE, y_bytes);
    b->w_host = sl_alloc(SL_MEM_DEVICE, (size_t)MAX_ROWS * MAX_COLS * sizeof(float));
    SL_CHECK(b->x_host && b->y_host && b->w_host, OUT_OF_MEMORY, err, "no memory for the operands");
    for (size_t i = 0; i < x_bytes / sizeof(float); i++) {
        b->x_host[i] = random_normal();
    }
    void *at = NULL;
    SL_TRY(cuda_bench_alloc(&b->c, b->weights_bytes + 2 * (size_t)LEAD_BYTES, &at, err));
    b->weights = at;
    SL_TRY(cuda_bench_alloc(&b->c, x_bytes, &at, err));
    b->x = at;
    SL_TRY(cuda_bench_alloc(&b->c, y_bytes, &at, err));
    b->y = at;
    SL_TRY(cuda_bench_alloc(&b->c, scratch_bytes, &b->scratch, err));
    SL_TRY(cuda_bench_upload(&b->c, b->x, b->x_host, x_bytes, err));
    if (!b->json) {
        printf("%s, %d multiprocessors\n", b->c.info.name, b->c.info.n_multiprocessors);
        printf("%-7s %15s %5s %10s %9s %9s %10s\n", "type", "matrix", "tok.", "us", "GB/s",
               "TFLOP/s", "error");
    }
    return SLUICE_STATUS_OK;
}

/* Copies within device memory, reads and writes counted. */
static enum sluice_status bench_copy(struct bench *b, struct sluice_error *err)
{
    double best = 0.0;
    for (int i = 0; i < CUDA_BENCH_RUNS; i++) {
        uint64_t ns = 0;
        SL_TRY(cuda_bench_mark(&b->c, err));
        SL_TRY(b->c.dev->vt->copy_on_device(b->c.dev, b->c.stream, b->weights + b->weights_bytes,
                                            b->weights + b->weights_bytes + LEAD_BYTES, LEAD_BYTES,
                                            err));
        SL_TRY(cuda_bench_elapsed(&b->c, &ns, err));
        const double gb_s = 2.0 * (double)LEAD_BYTES / (double)ns;
        best = gb_s > best ? gb_s : best;
    }
    if (b->json) {
        printf("%s\n  {\"copy_gb_per_s\": %.1f}", b->n_rows_out ? "," : "", best);
        b->n_rows_out++;
    } else {
        printf("copy within memory: %.0f GB/s\n", best);
    }
    return SLUICE_STATUS_OK;
}

static enum sluice_status bench_all(struct bench *b, struct sluice_error *err)
{
    SL_TRY(prepare(b, err));
    SL_TRY(bench_copy(b, err));
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        if (b->type && strcmp(b->type, sl_type_name(types[i])) != 0) {
            continue;
        }
        if (b->rows) {
            SL_TRY(bench_shape(b, types[i], b->rows, b->cols, err));
            continue;
        }
        for (size_t j = 0; j < sizeof shapes / sizeof shapes[0]; j++) {
            SL_TRY(bench_shape(b, types[i], shapes[j][0], shapes[j][1], err));
        }
    }
    return SLUICE_STATUS_OK;
}

static void finish(struct bench *b)
{
    cuda_bench_destroy(&b->c);
    sl_free(b->x_host);
    sl_free(b->y_host);
    sl_free(b->w_host);
}

static int usage(void)
{
    fputs("usage: bench-cuda_linear [--type NAME] [--shape ROWSxCOLS] [--tokens N,...] [--gated] "
          "[--ceiling TFLOPS] [--gpu N] [--json]\n",
          stderr);
    return 2;
}

int main(int argc, char **argv)
{
    struct bench b = {0};
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--json") == 0) {
            b.json = true;
            continue;
        }
        if (strcmp(argv[i], "--gated") == 0) {
            b.gated = true;
            continue;
        }
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        long long rows, cols;
        if (!value) {
            return usage();
        }
        if (strcmp(argv[i], "--type") == 0) {
            b.type = value;
        } else if (strcmp(argv[i], "--tokens") == 0) {
            b.tokens = value;
        } else if (strcmp(argv[i], "--ceiling") == 0) {
            b.ceiling = atof(value);
        } else if (strcmp(argv[i], "--gpu") == 0) {
            b.gpu = atoi(value);
        } else if (strcmp(argv[i], "--shape") == 0 &&
                   sscanf(value, "%lldx%lld", &rows, &cols) == 2 && rows > 0 && rows <= MAX_ROWS &&
                   cols > 0 && cols <= MAX_COLS) {
            b.rows = rows;
            b.cols = cols;
        } else {
            return usage();
        }
        i++;
    }
    struct sluice_error err = {0};
    if (b.json) {
        printf("[");
    }
    const enum sluice_status status = bench_all(&b, &err);
    if (b.json) {
        printf("\n]\n");
    }
    finish(&b);
    if (status != SLUICE_STATUS_OK) {
        fprintf(stderr, "bench-cuda_linear: %s\n", err.message);
        return 1;
    }
    return b.wrong ? 1 : 0;
}
