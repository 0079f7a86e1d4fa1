/* SPDX-License-Identifier: Apache-2.0
 *
 * Speed of the CUDA device's operators other than dense products (bench-cuda_linear has those),
 * through the device interface:
 *
 *   bench-cuda_ops [--only OPERATOR] [--tokens N] [--type NAME] [--gpu N] [--json]
 *
 *   experts    128 experts, 8 for a token, width 2048, 768 wide each, routed evenly at random
 *   router     of the same mixture
 *   attention  32 heads of 128, 8 KV heads: 1024 tokens that end at a depth, and one token there
 *
 * TFLOP/s counts what is asked for, not what tiles round up to; GB/s what has to be read once: the
 * weights of the experts that are used, the cache. Short passes read other experts or another cache
 * each time, more than the GPU's caches hold. That results are right is the business of kcheck.
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
#define KV_BYTES ((size_t)512 << 20) /* caches in turn; also both sides of the copy ahead */

struct bench {
    const char *only, *type;
    int gpu, tokens, n_rows;
    bool json;
    struct cuda_bench c;
    void *x, *y, *weights, *ids, *pair_weights, *scratch, *kv, *pos;
    int32_t *ids_host;
};

static uint32_t random_below(uint32_t n)
{
    return (uint32_t)(cuda_bench_random() >> 33) % n;
}

/* What one launch reads and computes, and how long it takes (a median). */
struct row {
    const char *op, *type;
    int tokens, depth;
    double us, flop, bytes;
};

/* Operators of one run: as many as are in `ops`. */
static enum sluice_status measure(struct bench *b, const struct sl_op ops[N_OPS], struct row *row,
                                  struct sluice_error *err)
{
    SL_TRY(b->c.dev->vt->run(b->c.dev, b->c.stream, ops, 1, b->scratch, err));
    SL_TRY(cuda_bench_time(&b->c, ops, N_OPS, b->scratch, b->kv, KV_BYTES, &row->us, err));
    const double tflop = row->flop / row->us * 1e-6, gb = row->bytes / row->us * 1e-3;
    if (b->json) {
        printf(
            "%s\n {\"op\": \"%s\", \"type\": \"%s\", \"tokens\": %d, \"depth\": %d, \"us\": %.2f, "
            "\"tflop_per_s\": %.2f, \"gb_per_s\": %.1f}",
            b->n_rows > 0 ? "," : "[", row->op, row->type, row->tokens, row->depth, row->us, tflop,
            gb);
    } else {
        printf("%-10s %-5s %6d %6d %10.1f %9.1f %9.0f\n", row->op, row->type, row->tokens,
               row->depth, row->us, tflop, gb);
    }
    fflush(stdout);
    b->n_rows++;
    return SLUICE_STATUS_OK;
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

/* For tokens of which the first is `first` of those that were routed. */
static struct sl_op experts_op(const struct bench *b, enum sl_type type, int n_tokens, int first)
{
    const size_t bytes = (size_t)N_EXPERTS * N_FF * sl_type_row_bytes(type, N_EMBD);
    char *w = b->weights;
    struct sl_op op;
    memset(&op, 0, sizeof op);
    op.kind = SL_OP_EXPERTS;
    op.n_tokens = n_tokens;
    op.experts.x = b->x;
    op.experts.y = b->y;
    op.experts.ids = (const int32_t *)b->ids + first * N_USED;
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

/* How many different experts the tokens go to. */
static int count_used(const struct bench *b, int n_tokens, int first)
{
    bool used[N_EXPERTS] = {false};
    int n = 0;
    for (int i = first * N_USED; i < (first + n_tokens) * N_USED; i++) {
        n += !used[b->ids_host[i]];
        used[b->ids_host[i]] = true;
    }
    return n;
}

static enum sluice_status bench_experts(struct bench *b, struct sluice_error *err)
{
    static const enum sl_type types[] = {SL_TYPE_Q4_0, SL_TYPE_Q4_K, SL_TYPE_Q8_0, SL_TYPE_MXFP4};
    static const int tokens[] = {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096};
    for (size_t i = 0; i < sizeof types / sizeof types[0]; i++) {
        if (b->type && strcmp(b->type, sl_type_name(types[i])) != 0) {
            continue;
        }
        const double expert_bytes = 3.0 * N_FF * (double)sl_type_row_bytes(types[i], N_EMBD);
        for (size_t j = 0; j < sizeof tokens / sizeof tokens[0]; j++) {
            const int n = tokens[j];
            if (b->tokens && b->tokens != n) {
                continue;
            }
            struct sl_op ops[N_OPS];
            struct row row = {"experts", sl_type_name(types[i]),           n, 0,
                              0,         6.0 * N_EMBD * N_FF * N_USED * n, 0};
            for (int k = 0; k < N_OPS; k++) {
                const int first = n <= MAX_TOKENS / N_OPS ? k * n : 0;
                ops[k] = experts_op(b, types[i], n, first);
                row.bytes += expert_bytes * count_used(b, n, first) / N_OPS;
            }
            SL_TRY(measure(b, ops, &row, err));
        }
    }
    return SLUICE_STATUS_OK;
}

/* The same operator N_OPS times. */
static enum sluice_status measure_same(struct bench *b, const struct sl_op *op, struct row *row,
                                       struct sluice_error *err)
{
    struct sl_op ops[N_OPS];
    for (int i = 0; i < N_OPS; i++) {
        ops[i] = *op;
    }
    return measure(b, ops, row, err);
}

static enum sluice_status bench_router(struct bench *b, struct sluice_error *err)
{
    static const int tokens[] = {1, 64, 512, 2048};
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
        struct row row = {"router",
                          "F32",
                          tokens[j],
                          0,
                          0,
                          2.0 * N_EMBD * N_EXPERTS * tokens[j],
                          4.0 * N_EMBD * N_EXPERTS};
        SL_TRY(measure_same(b, &op, &row, err));
    }
    return SLUICE_STATUS_OK;
}

/* Positions of the last n tokens before `depth`, and how many each of them sees in all. */
static enum sluice_status set_positions(struct bench *b, int n, int depth, double *seen,
                                        struct sluice_error *err)
{
    static int32_t pos[PASS_TOKENS];
    *seen = 0.0;
    for (int t = 0; t < n; t++) {
        pos[t] = depth - n + t;
        *seen += pos[t] + 1;
    }
    return cuda_bench_upload(&b->c, b->pos, pos, (size_t)n * sizeof *pos, err);
}

static enum sluice_status bench_attention_to(struct bench *b, enum sl_type type, int n, int depth,
                                             struct sluice_error *err)
{
    const struct sl_kv_types types = {type, type};
    const size_t kv_bytes =
        (size_t)depth / SL_KV_BLOCK * sl_kv_block_bytes(types, N_KV_HEADS, HEAD_DIM);
    double seen;
    SL_TRY(set_positions(b, n, depth, &seen, err));
    struct sl_op ops[N_OPS];
    memset(ops, 0, sizeof ops);
    for (int i = 0; i < N_OPS; i++) {
        struct sl_op *const op = &ops[i];
        op->kind = SL_OP_ATTENTION;
        op->n_tokens = n;
        op->attention.q = b->x;
        op->attention.y = b->y;
        op->attention.pos = b->pos;
        op->attention.kv.data = (char *)b->kv + (size_t)i % (KV_BYTES / kv_bytes) * kv_bytes;
        op->attention.kv.types = types;
        op->attention.kv.n_kv_heads = N_KV_HEADS;
        op->attention.kv.head_dim = HEAD_DIM;
        op->attention.n_heads = N_HEADS;
        op->attention.n_kv_max = depth;
        op->attention.scale = 0.088f;
    }
    struct row row = {
        "attention",     sl_type_name(type), n, depth, 0, 4.0 * HEAD_DIM * N_HEADS * seen,
        (double)kv_bytes};
    return measure(b, ops, &row, err);
}

static enum sluice_status bench_attention(struct bench *b, struct sluice_error *err)
{
    for (int i = 0; i < SL_N_KV_TYPES; i++) {
        const enum sl_type type = sl_kv_type_list[i];
        for (int depth = PASS_TOKENS; depth <= MAX_DEPTH; depth *= 2) {
            if (b->type && strcmp(b->type, sl_type_name(type)) != 0) {
                continue;
            }
            if (!b->tokens || b->tokens == PASS_TOKENS) {
                SL_TRY(bench_attention_to(b, type, PASS_TOKENS, depth, err));
            }
            if (!b->tokens || b->tokens == 1) {
                SL_TRY(bench_attention_to(b, type, 1, depth, err));
            }
        }
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
    SL_TRY(make(b, &b->weights, rows * sl_type_row_bytes(SL_TYPE_Q8_0, N_EMBD), false, err));
    SL_TRY(make(b, &b->x, (size_t)MAX_TOKENS * N_HEADS * HEAD_DIM * sizeof(float), true, err));
    SL_TRY(make(b, &b->kv, KV_BYTES, false, err));
    SL_TRY(make(b, &b->pair_weights, (size_t)MAX_TOKENS * N_USED * sizeof(float), true, err));
    SL_TRY(cuda_bench_alloc(&b->c, (size_t)MAX_TOKENS * N_HEADS * HEAD_DIM * sizeof(float), &b->y,
                            err));
    SL_TRY(cuda_bench_alloc(&b->c, PASS_TOKENS * sizeof(int32_t), &b->pos, err));
    const struct sl_op largest = experts_op(b, SL_TYPE_Q4_0, MAX_TOKENS, 0);
    SL_TRY(cuda_bench_alloc(&b->c, sl_op_scratch_bytes(&largest), &b->scratch, err));
    const size_t ids_bytes = (size_t)MAX_TOKENS * N_USED * sizeof *b->ids_host;
    SL_TRY(cuda_bench_alloc(&b->c, ids_bytes, &b->ids, err));
    b->ids_host = sl_alloc(SL_MEM_DEVICE, ids_bytes);
    SL_CHECK(b->ids_host != NULL, OUT_OF_MEMORY, err, "no memory for ids");
    route(b->ids_host);
    SL_TRY(cuda_bench_upload(&b->c, b->ids, b->ids_host, ids_bytes, err));
    if (!b->json) {
        printf("%s, %d multiprocessors\n%-10s %-5s %6s %6s %10s %9s %9s\n", b->c.info.name,
               b->c.info.n_multiprocessors, "operator", "type", "tokens", "depth", "us", "TFLOP/s",
               "GB/s");
    }
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
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--json") == 0) {
            b.json = true;
            continue;
        }
        const char *value = i + 1 < argc ? argv[i + 1] : NULL;
        if (value && strcmp(argv[i], "--only") == 0) {
            b.only = value;
        } else if (value && strcmp(argv[i], "--tokens") == 0) {
            b.tokens = atoi(value);
        } else if (value && strcmp(argv[i], "--type") == 0) {
            b.type = value;
        } else if (value && strcmp(argv[i], "--gpu") == 0) {
            b.gpu = atoi(value);
        } else {
            fputs("usage: bench-cuda_ops [--only OPERATOR] [--tokens N] [--type NAME] [--gpu N] "
                  "[--json]\n",
                  stderr);
            return 2;
        }
        i++;
    }
    struct sluice_error err = {0};
    const enum sluice_status status = bench_all(&b, &err);
    if (b.json && b.n_rows > 0) {
        printf("\n]\n");
    }
    cuda_bench_destroy(&b.c);
    sl_free(b.ids_host);
    if (status != SLUICE_STATUS_OK) {
        fprintf(stderr, "bench-cuda_ops: %s\n", err.message);
        return 1;
    }
    return 0;
}
