/* SPDX-License-Identifier: Apache-2.0
 *
 * Speed of the CUDA device's prefill operators other than dense products (bench-cuda_linear has
 * those), through the device interface:
 *
 *   bench-cuda_prefill [--only OPERATOR] [--tokens N] [--type NAME] [--ceiling TFLOPS] [--gpu N]
 *
 *   experts    128 experts, 8 for a token, width 2048, 768 wide each, routed evenly at random
 *   router     of the same mixture
 *   attention  32 heads of 128, 8 KV heads, F16: a pass of 1024 tokens that ends at a depth
 *
 * TFLOP/s counts what is asked for, not what tiles round up to. With the measured ceiling of the
 * GPU's tensor cores its share is shown too. That results are right is the business of kcheck.
 */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "cuda_bench.h"

#define N_OPS 8 /* timed launches of a run */
#define N_EXPERTS 128
#define N_USED 8
#define N_EMBD 2048
#define N_FF 768
#define MAX_TOKENS 4096
#define N_HEADS 32
#define N_KV_HEADS 8
#define HEAD_DIM 128
#define PASS_TOKENS 1024
#define MAX_DEPTH 32768

struct bench {
    const char *only, *type;
    double ceiling;
    int gpu, tokens;
    struct cuda_bench c;
    void *x, *y, *weights, *ids, *pair_weights, *scratch, *kv, *pos;
    int32_t *ids_host;
};

static uint32_t random_below(uint32_t n)
{
    return (uint32_t)(cuda_bench_random() >> 33) % n;
}

/* Median microseconds of one launch. */
static enum sluice_status time_op(struct bench *b, const struct sl_op *op, double *us,
                                  struct sluice_error *err)
{
    struct sl_op ops[N_OPS];
    for (int i = 0; i < N_OPS; i++) {
        ops[i] = *op;
    }
    SL_TRY(b->c.dev->vt->run(b->c.dev, b->c.stream, ops, 1, b->scratch, err));
    return cuda_bench_time(&b->c, ops, N_OPS, b->scratch, NULL, 0, us, err);
}

static void print_row(const struct bench *b, const char *what, int n, double us, double flop)
{
    printf("%-20s %6d %10.1f %9.1f", what, n, us, flop / us * 1e-6);
    if (b->ceiling > 0.0) {
        printf(" %7.0f %%", flop / us * 1e-6 / b->ceiling * 100.0);
    }
    printf("\n");
    fflush(stdout);
}

/* Distinct experts for each token, all equally likely. */
static void route(int32_t *ids)
{
    for (int t = 0; t < MAX_TOKENS; t++) {
        for (int j = 0; j < N_USED; j++) {
            bool fresh;
            do {
                ids[t * N_USED + j] = (int32_t)random_below(N_EXPERTS);
                fresh = true;
                for (int i = 0; i < j; i++) {
                    fresh = fresh && ids[t * N_USED + i] != ids[t * N_USED + j];
                }
            } while (!fresh);
        }
    }
}

static struct sl_op experts_op(const struct bench *b, enum sl_type type, int n_tokens)
{
    const size_t bytes = (size_t)N_EXPERTS * N_FF * sl_type_row_bytes(type, N_EMBD);
    char *w = b->weights;
    struct sl_op op;
    memset(&op, 0, sizeof op);
    op.kind = SL_OP_EXPERTS;
    op.n_tokens = n_tokens;
    op.experts.x = b->x;
    op.experts.y = b->y;
    op.experts.ids = b->ids;
    op.experts.weights = b->pair_weights;
    op.experts.n_used = N_USED;
    op.experts.n = N_EXPERTS;
    op.experts.activation = SL_ACT_SILU;
    op.experts.gate =
        (struct sl_experts_matrix){.data = w, .type = type, .n_rows = N_FF, .n_cols = N_EMBD};
    op.experts.up = op.experts.gate;
    op.experts.up.data = w + bytes;
    op.experts.down = (struct sl_experts_matrix){
        .data = w + 2 * bytes, .type = type, .n_rows = N_EMBD, .n_cols = N_FF};
    return op;
}

static enum sluice_status bench_experts(struct bench *b, struct sluice_error *err)
{
    static const enum sl_type types[] = {SL_TYPE_Q4_0, SL_TYPE_Q4_K, SL_TYPE_Q8_0};
    static const int tokens[] = {16, 32, 64, 128, 256, 512, 1024, 2048, 4096};
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        if (b->type && strcmp(b->type, sl_type_name(types[i])) != 0) {
            continue;
        }
        for (size_t j = 0; j < sizeof tokens / sizeof tokens[0]; j++) {
            if (b->tokens && b->tokens != tokens[j]) {
                continue;
            }
            const struct sl_op op = experts_op(b, types[i], tokens[j]);
            double us;
            char what[32];
            SL_TRY(time_op(b, &op, &us, err));
            snprintf(what, sizeof what, "experts %s", sl_type_name(types[i]));
            print_row(b, what, tokens[j], us, 6.0 * N_EMBD * N_FF * N_USED * tokens[j]);
        }
    }
    return SLUICE_STATUS_OK;
}

static enum sluice_status bench_router(struct bench *b, struct sluice_error *err)
{
    static const int tokens[] = {64, 512, 2048};
    for (size_t j = 0; j < sizeof tokens / sizeof tokens[0]; j++) {
        if (b->tokens && b->tokens != tokens[j]) {
            continue;
        }
        struct sl_op op;
        memset(&op, 0, sizeof op);
        op.kind = SL_OP_ROUTER;
        op.n_tokens = tokens[j];
        op.router.x = b->x;
        op.router.w = (struct sl_matrix){
            .data = b->weights, .type = SL_TYPE_F32, .n_rows = N_EXPERTS, .n_cols = N_EMBD};
        op.router.ids = b->ids;
        op.router.weights = b->pair_weights;
        op.router.n_used = N_USED;
        op.router.gating = SL_GATING_SOFTMAX;
        op.router.normalize = true;
        op.router.scale = 1.0f;
        double us;
        SL_TRY(time_op(b, &op, &us, err));
        print_row(b, "router F32", tokens[j], us, 2.0 * N_EMBD * N_EXPERTS * tokens[j]);
    }
    return SLUICE_STATUS_OK;
}

static enum sluice_status bench_attention(struct bench *b, struct sluice_error *err)
{
    static int32_t pos[PASS_TOKENS];
    for (int depth = PASS_TOKENS; depth <= MAX_DEPTH; depth *= 2) {
        double seen = 0.0;
        for (int t = 0; t < PASS_TOKENS; t++) {
            pos[t] = depth - PASS_TOKENS + t;
            seen += pos[t] + 1;
        }
        SL_TRY(cuda_bench_upload(&b->c, b->pos, pos, sizeof pos, err));
        struct sl_op op;
        memset(&op, 0, sizeof op);
        op.kind = SL_OP_ATTENTION;
        op.n_tokens = PASS_TOKENS;
        op.attention.q = b->x;
        op.attention.y = b->y;
        op.attention.pos = b->pos;
        op.attention.kv.data = b->kv;
        op.attention.kv.types = (struct sl_kv_types){SL_TYPE_F16, SL_TYPE_F16};
        op.attention.kv.n_kv_heads = N_KV_HEADS;
        op.attention.kv.head_dim = HEAD_DIM;
        op.attention.n_heads = N_HEADS;
        op.attention.n_kv_max = depth;
        op.attention.scale = 0.088f;
        double us;
        SL_TRY(time_op(b, &op, &us, err));
        print_row(b, "attention to", depth, us, 4.0 * HEAD_DIM * N_HEADS * seen);
    }
    return SLUICE_STATUS_OK;
}

/* Memory of `bytes` with small numbers in it: halves of random sign and size. */
static enum sluice_status make(struct bench *b, void **out, size_t bytes, bool floats,
                               struct sluice_error *err)
{
    SL_TRY(cuda_bench_alloc(&b->c, bytes, out, err));
    uint32_t *host = sl_alloc(SL_MEM_DEVICE, bytes);
    SL_CHECK(host != NULL, OUT_OF_MEMORY, err, "no memory for the operands");
    for (size_t i = 0; i < bytes / 4; i++) {
        const uint32_t r = random_below(UINT32_MAX);
        if (floats) {
            const float v = (float)(int32_t)r * 0x1p-31f;
            memcpy(&host[i], &v, 4);
        } else {
            host[i] = (r & 0x83ff83ffu) | 0x24002400u; /* +-1/64 .. 1/32 as f16 */
        }
    }
    const enum sluice_status status = cuda_bench_upload(&b->c, *out, host, bytes, err);
    sl_free(host);
    return status;
}

static enum sluice_status prepare(struct bench *b, struct sluice_error *err)
{
    SL_TRY(cuda_bench_create(&b->c, b->gpu, err));
    const size_t rows = (size_t)3 * N_EXPERTS * N_FF;
    const size_t kv_bytes =
        MAX_DEPTH / SL_KV_BLOCK *
        sl_kv_block_bytes((struct sl_kv_types){SL_TYPE_F16, SL_TYPE_F16}, N_KV_HEADS, HEAD_DIM);
    SL_TRY(make(b, &b->weights, rows * sl_type_row_bytes(SL_TYPE_Q8_0, N_EMBD), false, err));
    SL_TRY(make(b, &b->x, (size_t)MAX_TOKENS * N_HEADS * HEAD_DIM * sizeof(float), true, err));
    SL_TRY(make(b, &b->kv, kv_bytes, false, err));
    SL_TRY(make(b, &b->pair_weights, (size_t)MAX_TOKENS * N_USED * sizeof(float), true, err));
    SL_TRY(cuda_bench_alloc(&b->c, (size_t)MAX_TOKENS * N_HEADS * HEAD_DIM * sizeof(float), &b->y,
                            err));
    SL_TRY(cuda_bench_alloc(&b->c, PASS_TOKENS * sizeof(int32_t), &b->pos, err));
    const struct sl_op largest = experts_op(b, SL_TYPE_Q4_0, MAX_TOKENS);
    SL_TRY(cuda_bench_alloc(&b->c, sl_op_scratch_bytes(&largest), &b->scratch, err));
    const size_t ids_bytes = (size_t)MAX_TOKENS * N_USED * sizeof *b->ids_host;
    SL_TRY(cuda_bench_alloc(&b->c, ids_bytes, &b->ids, err));
    b->ids_host = sl_alloc(SL_MEM_DEVICE, ids_bytes);
    SL_CHECK(b->ids_host != NULL, OUT_OF_MEMORY, err, "no memory for ids");
    route(b->ids_host);
    SL_TRY(cuda_bench_upload(&b->c, b->ids, b->ids_host, ids_bytes, err));
    printf("%s, %d multiprocessors\n%-20s %6s %10s %9s\n", b->c.info.name,
           b->c.info.n_multiprocessors, "operator", "tokens", "us", "TFLOP/s");
    return SLUICE_STATUS_OK;
}

static bool wants(const struct bench *b, const char *name)
{
    return !b->only || strcmp(b->only, name) == 0;
}

static enum sluice_status bench_all(struct bench *b, struct sluice_error *err)
{
    SL_TRY(prepare(b, err));
    if (wants(b, "experts")) {
        SL_TRY(bench_experts(b, err));
    }
    if (wants(b, "attention")) {
        SL_TRY(bench_attention(b, err));
    }
    return wants(b, "router") ? bench_router(b, err) : SLUICE_STATUS_OK; /* overwrites the ids */
}

int main(int argc, char **argv)
{
    struct bench b = {0};
    for (int i = 1; i < argc; i += 2) {
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (value && strcmp(argv[i], "--ceiling") == 0) {
            b.ceiling = atof(value);
        } else if (value && strcmp(argv[i], "--only") == 0) {
            b.only = value;
        } else if (value && strcmp(argv[i], "--tokens") == 0) {
            b.tokens = atoi(value);
        } else if (value && strcmp(argv[i], "--type") == 0) {
            b.type = value;
        } else if (value && strcmp(argv[i], "--gpu") == 0) {
            b.gpu = atoi(value);
        } else {
            fputs("usage: bench-cuda_prefill [--only OPERATOR] [--tokens N] [--type NAME] "
                  "[--ceiling TFLOPS] [--gpu N]\n",
                  stderr);
            return 2;
        }
    }
    struct sluice_error err = {0};
    const enum sluice_status status = bench_all(&b, &err);
    cuda_bench_destroy(&b.c);
    sl_free(b.ids_host);
    if (status != SLUICE_STATUS_OK) {
        fprintf(stderr, "bench-cuda_prefill: %s\n", err.message);
        return 1;
    }
    return 0;
}
