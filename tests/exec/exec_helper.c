/* SPDX-License-Identifier: Apache-2.0
 */
#include "exec/exec_helper.h"

#include "test.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

struct sl_model *helper_open_model(const char *name, int n_ctx, uint32_t max_vocab)
{
    struct sluice_error err;
    struct sl_model *model = NULL;
    char path[512];
    snprintf(path, sizeof path, "%s/model/%s.gguf", SLUICE_FIXTURES, name);
    assert_ok(sl_model_open(&model, path, n_ctx, &err), err);
    assert_true(model->hp.n_vocab <= max_vocab);
    return model;
}

int helper_read_tokens(const char *name, int32_t *tokens, int max)
{
    char path[512];
    int n = 0;
    snprintf(path, sizeof path, "%s/model/%s.txt", SLUICE_FIXTURES, name);
    FILE *const file = fopen(path, "r");
    assert_non_null(file);
    assert_int_equal(fscanf(file, "#%*[^\n] tokens %d", &n), 1);
    assert_in_range(n, 1, max);
    for (int i = 0; i < n; i++) {
        assert_int_equal(fscanf(file, "%d", &tokens[i]), 1);
    }
    fclose(file);
    return n;
}

struct sl_context *helper_cpu_context(const struct sl_model *model, struct sl_plan_options plan)
{
    struct sluice_error err;
    struct sl_profile profile;
    struct sl_context *ctx = NULL;
    sl_profile_typical(&profile, SL_DEVICE_NONE, 1);
    const struct sl_context_options options = {.profile = &profile, .plan = plan};
    assert_ok(sl_context_create(&ctx, model, &options, &err), err);
    return ctx;
}

int32_t helper_best_of(const float *logits, uint32_t n)
{
    int32_t best = 0;
    for (uint32_t i = 1; i < n; i++) {
        best = logits[i] > logits[best] ? (int32_t)i : best;
    }
    return best;
}

double helper_mean_kl(const float *p, const float *q, int n_rows, uint32_t n_vocab)
{
    double total = 0;
    for (int i = 0; i < n_rows; i++, p += n_vocab, q += n_vocab) {
        double zp = 0, zq = 0;
        for (uint32_t v = 0; v < n_vocab; v++) {
            zp += exp((double)p[v]);
            zq += exp((double)q[v]);
        }
        for (uint32_t v = 0; v < n_vocab; v++) {
            const double lp = p[v] - log(zp), lq = q[v] - log(zq);
            total += exp(lp) * (lp - lq);
        }
    }
    return total / n_rows;
}

int32_t helper_cut_end(const struct sl_model *model, enum sl_shard_kind kind, int32_t *unit)
{
    int32_t n = 0;
    *unit = 1; /* types may change from layer to layer */
    for (uint32_t i = 0; i < model->n_shards; i++) {
        const struct sl_shard *const shard = &model->shards[i];
        if (shard->kind == kind) {
            n = sl_shard_cut_end(model, shard);
            const int32_t own = n > 0 ? sl_shard_cut_unit(model, shard) : 1;
            *unit = own > *unit ? own : *unit;
        }
    }
    return n;
}

void helper_eager_profile(struct sl_profile *p, int n_threads)
{
    sl_profile_typical(p, SL_DEVICE_SIM, n_threads);
    p->hop_ns = p->issue_ns = 0;
    memset(p->op_ns, 0, sizeof p->op_ns);
    for (int i = 0; i < SL_N_COPY_SIZES; i++) {
        p->h2d_bytes_per_s[i] = 60e9;
    }
}
