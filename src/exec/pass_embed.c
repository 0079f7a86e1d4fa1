/* SPDX-License-Identifier: Apache-2.0
 *
 * The hidden state that a pass begins with: the tokens' rows of the embedding. The GPU has nothing
 * to do meanwhile, so that many rows are unpacked by all threads, and go up in stretches.
 */
#include "base/error.h"
#include "exec/pass_internal.h"

#define MIN_SHARED 64 /* tokens: below, waking the pool costs more than it saves */
#define STRETCH 512   /* tokens that go up while the next ones are unpacked */

struct embed_args {
    const struct sl_model *model;
    const int32_t *tokens;
    int32_t n;
    float *out;
};

static void embed_part(void *arg, int thread, int n_threads)
{
    const struct embed_args *const a = arg;
    const int32_t begin = (int32_t)((int64_t)a->n * thread / n_threads);
    const int32_t end = (int32_t)((int64_t)a->n * (thread + 1) / n_threads);
    sl_model_embed(a->model, a->tokens + begin, end - begin,
                   a->out + (size_t)begin * a->model->hp.n_embd);
}

/* Rows of the embedding of tokens begin .. begin + n - 1, as their hidden state. The GPU has
 * nothing to do meanwhile, so that many rows are unpacked by all threads. */
void sl_pass_embed(const struct sl_pass *p, int32_t begin, int32_t n)
{
    const struct sl_context *const ctx = p->ctx;
    struct embed_args a = {ctx->model, p->tokens + begin, n,
                           (float *)ctx->hidden.data + (size_t)begin * ctx->model->hp.n_embd};
    if (!ctx->pool || n < MIN_SHARED) {
        embed_part(&a, 0, 1);
    } else {
        sl_pool_run(ctx->pool, embed_part, &a);
    }
}

enum sluice_status sl_pass_embed_on_device(struct sl_pass *p)
{
    for (int32_t begin = 0; begin < p->n; begin += STRETCH) {
        const int32_t rest = p->n - begin, n = rest < STRETCH ? rest : STRETCH;
        sl_pass_embed(p, begin, n);
        SL_TRY(sl_pass_move_rows(p, begin, n, true));
    }
    return SLUICE_STATUS_OK;
}
