/* SPDX-License-Identifier: Apache-2.0
 *
 * How far a device's logits are from those of the CPU run: the same tokens go through both, for
 * each size of pass and each budget, the prompt in passes of that size and then one token at a
 * time, and the mean and largest KL divergence are printed, with the peak of VRAM. JSON rows as in
 * bench/results.
 *
 *   bench-device_kl [--exact] [--text FILE] [--passes N,...] MODEL DEVICE THREADS N_PROMPT N_DECODE
 *                   BUDGET_MIB...
 *
 * DEVICE: sim, cuda, or cpu: the machine's own kernels, to see what their rounding costs. A budget
 * of 0 is all of the card. --exact: the CPU run that is compared with multiplies floats (the
 * scalar kernels), otherwise it rounds activations to 8 bits as every CPU run does. --text: its
 * first tokens instead of random ones. --passes: 0, the default, is the micro-batch of the plan.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/mem.h"
#include "cpu/cpu.h"
#include "exec/context.h"
#include "exec/profiler.h"
#include "text/tokenizer.h"

#define MAX_PASSES 16
#define KEPT_FREE_BYTES (UINT64_C(1) << 30)
#define ROWS 64 /* logits of the prompt that are compared: its last */

struct job {
    struct sl_model *model;
    struct sl_pool *pool;
    struct sl_device *device; /* NULL: the CPU */
    struct sl_profile profile;
    bool exact;
    const char *text;
    int32_t passes[MAX_PASSES];
    int n_passes;
    int32_t n_prompt, n_decode, n_rows;
    int32_t *tokens;
    float *wanted, *got; /* [n_rows, n_vocab] */
};

static void die(const char *message)
{
    fprintf(stderr, "%s\n", message);
    exit(1);
}

static void check(enum sluice_status status, const struct sluice_error *err)
{
    if (status != SLUICE_STATUS_OK) {
        die(err->message);
    }
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

/* One run of all tokens. */
struct side {
    struct sl_device *device;
    const struct sl_cpu_kernels *kernels;
    uint64_t budget;
    int32_t pass; /* tokens of a pass of the prompt; 0: as the plan has it */
};

/* The prompt, and the logits of its last rows. */
static void prompt(struct sl_context *ctx, const struct job *j, int32_t pass, float *logits)
{
    struct sluice_error err;
    const int32_t first_row = j->n_prompt - (j->n_rows - j->n_decode);
    for (int32_t at = 0; at < j->n_prompt;) {
        const int32_t n = pass > 0 && pass < j->n_prompt - at ? pass : j->n_prompt - at;
        const int32_t from = at > first_row ? at : first_row;
        const int32_t rows = at + n > from ? at + n - from : 0;
        check(sl_context_eval(ctx, j->tokens + at, n, rows, logits, &err), &err);
        logits += (size_t)rows * j->model->hp.n_vocab;
        at += n;
    }
}

static void evaluate(const struct job *j, const struct side *side, float *logits,
                     struct sl_context_stats *stats)
{
    struct sluice_error err;
    const uint32_t n_vocab = j->model->hp.n_vocab;
    const struct sl_context_options options = {.device = side->device,
                                               .pool = j->pool,
                                               .kernels = side->kernels,
                                               .profile = &j->profile,
                                               .plan = {.budget_bytes = side->budget,
                                                        .n_ctx = j->n_prompt + j->n_decode,
                                                        .max_ubatch = side->pass,
                                                        .max_outputs = ROWS,
                                                        .kv_types = {SL_TYPE_F16, SL_TYPE_F16}}};
    struct sl_context *ctx = NULL;
    check(sl_context_create(&ctx, j->model, &options, &err), &err);
    prompt(ctx, j, side->pass, logits);
    for (int32_t i = 0; i < j->n_decode; i++) {
        float *const row = logits + (size_t)(j->n_rows - j->n_decode + i) * n_vocab;
        check(sl_context_eval(ctx, j->tokens + j->n_prompt + i, 1, 1, row, &err), &err);
    }
    sl_context_get_stats(ctx, stats);
    sl_context_destroy(&ctx);
}

static uint32_t likeliest(const float *logits, uint32_t n_vocab)
{
    uint32_t best = 0;
    for (uint32_t i = 1; i < n_vocab; i++) {
        best = logits[i] > logits[best] ? i : best;
    }
    return best;
}

static void compare(const struct job *j, uint64_t budget, int32_t pass)
{
    struct sl_context_stats stats;
    const uint32_t n_vocab = j->model->hp.n_vocab;
    const struct side side = {.device = j->device, .budget = budget, .pass = pass};
    evaluate(j, &side, j->got, &stats);
    double sum = 0, most = 0;
    int32_t n_same = 0;
    for (int32_t r = 0; r < j->n_rows; r++) {
        const float *const p = j->wanted + (size_t)r * n_vocab;
        const float *const q = j->got + (size_t)r * n_vocab;
        const double d = kl(p, q, n_vocab);
        n_same += likeliest(p, n_vocab) == likeliest(q, n_vocab);
        sum += d;
        most = fmax(most, d);
    }
    const char *const path = sl_gguf_path(j->model->file, 0);
    const char *const slash = strrchr(path, '/');
    printf("{\"model\": \"%s\", \"metric\": \"%s\", \"budget_mib\": %llu, \"batch\": %d, "
           "\"value\": %.3g, \"largest\": %.3g, \"same_top\": %.4f, \"rows\": %d, "
           "\"peak_vram_mib\": %.1f, \"within_budget\": %s}\n",
           slash ? slash + 1 : path, j->exact ? "kl_exact" : "kl",
           (unsigned long long)(budget >> 20), pass, sum / j->n_rows, most,
           (double)n_same / j->n_rows, j->n_rows, (double)stats.arena_bytes / 1048576.0,
           stats.arena_bytes <= budget ? "true" : "false");
    fflush(stdout);
}

static void random_tokens(struct job *j)
{
    uint32_t state = 12345;
    for (int32_t i = 0; i < j->n_prompt + j->n_decode; i++) {
        state = state * 1664525u + 1013904223u;
        j->tokens[i] = (int32_t)((state >> 8) % j->model->hp.n_vocab);
    }
}

static void text_tokens(struct job *j)
{
    struct sluice_error err;
    struct sl_tokenizer *tokenizer = NULL;
    char *text = NULL;
    int32_t *tokens = NULL;
    size_t size = 0, n = 0;
    const size_t wanted = (size_t)(j->n_prompt + j->n_decode);
    check(sl_file_read(j->text, 0, &text, &size, &err), &err);
    check(sl_tokenizer_create(&tokenizer, j->model->file, &err), &err);
    check(sl_tokenizer_encode(tokenizer, text, size, true, false, &tokens, &n, &err), &err);
    if (n < wanted) {
        die("the text has fewer tokens than were asked for");
    }
    memcpy(j->tokens, tokens, wanted * sizeof *tokens);
    sl_free(tokens);
    sl_free(text);
    sl_tokenizer_destroy(&tokenizer);
}

/* Returns the index of the first argument that is no option. */
static int read_options(struct job *j, int argc, char **argv)
{
    int i = 1;
    for (; i < argc && strncmp(argv[i], "--", 2) == 0; i++) {
        if (strcmp(argv[i], "--exact") == 0) {
            j->exact = true;
        } else if (strcmp(argv[i], "--text") == 0 && i + 1 < argc) {
            j->text = argv[++i];
        } else if (strcmp(argv[i], "--passes") == 0 && i + 1 < argc) {
            for (char *at = argv[++i]; *at != '\0' && j->n_passes < MAX_PASSES;) {
                j->passes[j->n_passes++] = (int32_t)strtol(at, &at, 10);
                at += *at == ',';
            }
        } else {
            die("options: --exact, --text FILE, --passes N,...");
        }
    }
    j->n_passes += j->n_passes == 0;
    return i;
}

static void open_all(struct job *j, char **argv)
{
    struct sluice_error err;
    const struct sl_pool_options pool = {.n_threads = atoi(argv[2])};
    check(sl_model_open(&j->model, argv[0], 0, &err), &err);
    check(sl_pool_create(&j->pool, &pool, &err), &err);
    if (strcmp(argv[1], "cuda") == 0) {
        check(sl_device_cuda_create(&j->device, 0, &err), &err);
    } else if (strcmp(argv[1], "sim") == 0) {
        check(sl_device_sim_create(&j->device, NULL, &err), &err);
    } else if (strcmp(argv[1], "cpu") != 0) {
        die("devices: cuda, sim, cpu");
    }
    const struct sl_profiler_options profiler = {.device = j->device, .pool = j->pool};
    check(sl_profiler_get(&j->profile, &profiler, NULL, &err), &err);
    j->n_prompt = atoi(argv[3]);
    j->n_decode = atoi(argv[4]);
    if (j->n_prompt < 1 || j->n_decode < 0) {
        die("a prompt has at least one token");
    }
    j->n_rows = (j->n_prompt < ROWS ? j->n_prompt : ROWS) + j->n_decode;
    const size_t n_logits = (size_t)j->n_rows * j->model->hp.n_vocab;
    j->tokens = calloc((size_t)(j->n_prompt + j->n_decode), sizeof *j->tokens);
    j->wanted = calloc(n_logits, sizeof(float));
    j->got = calloc(n_logits, sizeof(float));
    if (!j->tokens || !j->wanted || !j->got) {
        die("no memory");
    }
}

static void close_all(struct job *j)
{
    free(j->tokens);
    free(j->wanted);
    free(j->got);
    sl_device_destroy(&j->device);
    sl_pool_destroy(&j->pool);
    sl_model_close(&j->model);
}

int main(int argc, char **argv)
{
    struct sluice_error err;
    struct job j = {0};
    const int first = read_options(&j, argc, argv);
    if (argc - first < 6) {
        fprintf(stderr,
                "usage: %s [--exact] [--text FILE] [--passes N,...] MODEL sim|cuda|cpu THREADS "
                "N_PROMPT N_DECODE BUDGET_MIB...\n",
                argv[0]);
        return 2;
    }
    open_all(&j, argv + first);
    uint64_t free_bytes = KEPT_FREE_BYTES; /* of the CPU there is no VRAM */
    if (j.device != NULL) {
        struct sl_device_info info;
        check(j.device->vt->info(j.device, &info, &err), &err);
        free_bytes = info.free_bytes;
    }
    if (j.text != NULL) {
        text_tokens(&j);
    } else {
        random_tokens(&j);
    }
    struct sl_context_stats stats;
    const struct side reference = {.kernels = j.exact ? sl_cpu_kernels(SL_CPU_SCALAR) : NULL};
    evaluate(&j, &reference, j.wanted, &stats);
    for (int i = first + 5; i < argc; i++) {
        const uint64_t mib = strtoull(argv[i], NULL, 10);
        for (int p = 0; p < j.n_passes; p++) {
            compare(&j, mib > 0 ? mib << 20 : free_bytes - KEPT_FREE_BYTES, j.passes[p]);
        }
    }
    close_all(&j);
    return 0;
}
