/* SPDX-License-Identifier: Apache-2.0
 *
 * How far a device's logits are from those of the CPU run: for each budget the same tokens go
 * through both, in passes of the micro-batch and then one at a time, and the mean and largest KL
 * divergence are printed, with the peak of VRAM. JSON rows as in bench/results.
 *
 *   bench-device_kl MODEL DEVICE THREADS N_PROMPT N_DECODE BUDGET_MIB... (0: all of the card)
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "exec/context.h"
#include "exec/profiler.h"

#define MAX_BUDGETS 16
#define ROWS 64 /* logits compared at a time */

struct job {
    struct sl_model *model;
    struct sl_pool *pool;
    struct sl_device *device;
    struct sl_profile profile;
    int32_t n_prompt, n_decode;
    int32_t *tokens;
    float *wanted, *got; /* [rows, n_vocab] */
};

static void die(const struct sluice_error *err)
{
    fprintf(stderr, "%s\n", err->message);
    exit(1);
}

static double kl(const float *p, const float *q, uint32_t n)
{
    double mp = p[0], mq = q[0], zp = 0, zq = 0, sum = 0;
    for (uint32_t i = 1; i < n; i++) {
        mp = fmax(mp, p[i]);
        mq = fmax(mq, q[i]);
    }
    for (uint32_t i = 0; i < n; i++) {
        zp += exp(p[i] - mp);
        zq += exp(q[i] - mq);
    }
    for (uint32_t i = 0; i < n; i++) {
        const double lp = p[i] - mp - log(zp), lq = q[i] - mq - log(zq);
        sum += exp(lp) * (lp - lq);
    }
    return isnan(sum) ? HUGE_VAL : sum;
}

/* Logits of the last rows of the prompt and of every decode step. Returns how many rows. */
static int32_t evaluate(const struct job *j, struct sl_device *device, uint64_t budget,
                        float *logits, struct sl_context_stats *stats)
{
    struct sluice_error err;
    const uint32_t n_vocab = j->model->hp.n_vocab;
    const struct sl_context_options options = {.device = device,
                                               .pool = j->pool,
                                               .profile = &j->profile,
                                               .plan = {.budget_bytes = budget,
                                                        .n_ctx = j->n_prompt + j->n_decode,
                                                        .max_outputs = ROWS,
                                                        .kv_types = {SL_TYPE_F16, SL_TYPE_F16}}};
    struct sl_context *ctx = NULL;
    if (sl_context_create(&ctx, j->model, &options, &err) != SLUICE_STATUS_OK) {
        die(&err);
    }
    const int32_t rows = j->n_prompt < ROWS ? j->n_prompt : ROWS;
    if (sl_context_eval(ctx, j->tokens, j->n_prompt, rows, logits, &err) != SLUICE_STATUS_OK) {
        die(&err);
    }
    for (int32_t i = 0; i < j->n_decode; i++) {
        if (sl_context_eval(ctx, j->tokens + j->n_prompt + i, 1, 1,
                            logits + (size_t)(rows + i) * n_vocab, &err) != SLUICE_STATUS_OK) {
            die(&err);
        }
    }
    sl_context_get_stats(ctx, stats);
    sl_context_destroy(&ctx);
    return rows + j->n_decode;
}

static void compare(const struct job *j, uint64_t budget, int32_t n_rows)
{
    struct sl_context_stats stats;
    const uint32_t n_vocab = j->model->hp.n_vocab;
    evaluate(j, j->device, budget, j->got, &stats);
    double sum = 0, most = 0;
    int32_t n_same = 0;
    for (int32_t r = 0; r < n_rows; r++) {
        const float *const p = j->wanted + (size_t)r * n_vocab;
        const float *const q = j->got + (size_t)r * n_vocab;
        const double d = kl(p, q, n_vocab);
        uint32_t bp = 0, bq = 0;
        for (uint32_t i = 1; i < n_vocab; i++) {
            bp = p[i] > p[bp] ? i : bp;
            bq = q[i] > q[bq] ? i : bq;
        }
        n_same += bp == bq;
        sum += d;
        most = fmax(most, d);
    }
    const char *const path = sl_gguf_path(j->model->file, 0);
    const char *const slash = strrchr(path, '/');
    printf("{\"model\": \"%s\", \"metric\": \"kl\", \"budget_mib\": %llu, \"value\": %.3g, "
           "\"largest\": %.3g, \"same_top\": %.4f, \"rows\": %d, \"peak_vram_mib\": %.1f, "
           "\"within_budget\": %s}\n",
           slash ? slash + 1 : path, (unsigned long long)(budget >> 20), sum / n_rows, most,
           (double)n_same / n_rows, n_rows, (double)stats.arena_bytes / 1048576.0,
           stats.arena_bytes <= budget ? "true" : "false");
    fflush(stdout);
}

int main(int argc, char **argv)
{
    struct sluice_error err;
    struct job j = {0};
    if (argc < 7) {
        fprintf(stderr, "usage: %s MODEL sim|cuda THREADS N_PROMPT N_DECODE BUDGET_MIB...\n",
                argv[0]);
        return 2;
    }
    j.n_prompt = atoi(argv[4]);
    j.n_decode = atoi(argv[5]);
    const struct sl_pool_options pool = {.n_threads = atoi(argv[3])};
    if (sl_model_open(&j.model, argv[1], 0, &err) != SLUICE_STATUS_OK ||
        sl_pool_create(&j.pool, &pool, &err) != SLUICE_STATUS_OK ||
        (strcmp(argv[2], "cuda") == 0
             ? sl_device_cuda_create(&j.device, 0, &err)
             : sl_device_sim_create(&j.device, NULL, &err)) != SLUICE_STATUS_OK) {
        die(&err);
    }
    const struct sl_profiler_options profiler = {.device = j.device, .pool = j.pool};
    if (sl_profiler_get(&j.profile, &profiler, NULL, &err) != SLUICE_STATUS_OK) {
        die(&err);
    }
    struct sl_device_info info;
    if (j.device->vt->info(j.device, &info, &err) != SLUICE_STATUS_OK) {
        die(&err);
    }
    const uint32_t n_vocab = j.model->hp.n_vocab;
    const int32_t n = j.n_prompt + j.n_decode;
    j.tokens = calloc((size_t)n, sizeof *j.tokens);
    j.wanted = calloc((size_t)(ROWS + j.n_decode) * n_vocab, sizeof(float));
    j.got = calloc((size_t)(ROWS + j.n_decode) * n_vocab, sizeof(float));
    uint32_t state = 12345;
    for (int32_t i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        j.tokens[i] = (int32_t)((state >> 8) % n_vocab);
    }
    struct sl_context_stats stats;
    const int32_t n_rows = evaluate(&j, NULL, 0, j.wanted, &stats);
    for (int i = 6; i < argc; i++) {
        const uint64_t mib = strtoull(argv[i], NULL, 10);
        compare(&j, mib > 0 ? mib << 20 : info.free_bytes - (UINT64_C(1) << 30), n_rows);
    }
    free(j.tokens);
    free(j.wanted);
    free(j.got);
    sl_device_destroy(&j.device);
    sl_pool_destroy(&j.pool);
    sl_model_close(&j.model);
    return 0;
}
