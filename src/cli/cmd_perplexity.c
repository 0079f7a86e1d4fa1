/* SPDX-License-Identifier: Apache-2.0
 *
 * `sluice perplexity FILE`: how well a model predicts a text.
 */
#include <stdio.h>

#include "base/error.h"
#include "base/file.h"
#include "base/mem.h"
#include "cli/engine.h"
#include "cli/json.h"
#include "cli/progress.h"
#include "cli/stats.h"
#include "exec/perplexity.h"
#include "text/tokenizer.h"

#define CHUNK_TOKENS 512 /* unless --ctx-size says otherwise: what published figures use */
#define OUTPUT_ROWS 64

static bool show_progress(void *user, size_t done, size_t total, double perplexity)
{
    (void)perplexity;
    sl_progress_update(user, done, total);
    return sl_cli_interrupted();
}

static enum sluice_status evaluate(struct sl_engine *e, const struct sl_options *options,
                                   const char *path, struct sluice_error *err)
{
    char *text = NULL;
    size_t size = 0, n = 0;
    int32_t *tokens = NULL;
    struct sl_tokenizer *tokenizer = NULL;
    enum sluice_status status = SLUICE_STATUS_OK;
    SL_TRY_OUT(sl_file_read(path, 0, &text, &size, err));
    SL_TRY_OUT(sl_tokenizer_create(&tokenizer, e->model->file, err));
    SL_TRY_OUT(sl_tokenizer_encode(tokenizer, text, size, true, false, &tokens, &n, err));
    struct sl_progress progress;
    sl_progress_start(&progress, "perplexity", false);
    const struct sl_perplexity_options o = {
        .n_ctx = e->n_ctx,
        .bos = sl_tokenizer_adds_bos(tokenizer) ? sl_tokenizer_bos(tokenizer) : -1,
        .progress = show_progress,
        .user = &progress};
    struct sl_perplexity p;
    status = sl_perplexity_run(e->ctx, tokens, n, (int32_t)e->model->hp.n_vocab, &o, &p, err);
    sl_progress_finish(&progress);
    SL_TRY_OUT(status);
    if (sl_options_flag(options, SL_OPT_JSON)) {
        struct sl_json json;
        sl_json_init(&json);
        sl_json_number(&json, json.root, "perplexity", p.perplexity);
        sl_json_number(&json, json.root, "standard_error", p.standard_error);
        sl_json_u64(&json, json.root, "tokens", n);
        sl_json_u64(&json, json.root, "scored", p.n_scored);
        sl_json_u64(&json, json.root, "chunks", p.n_chunks);
        sl_json_i64(&json, json.root, "n_ctx", e->n_ctx);
        status = sl_json_print(stdout, &json, err);
    } else {
        printf("perplexity %.4f +/- %.4f (%zu tokens scored in %zu chunks of %d)\n", p.perplexity,
               p.standard_error, p.n_scored, p.n_chunks, e->n_ctx);
    }
    if (sl_options_flag(options, SL_OPT_STATS)) {
        sl_stats_print(stderr, e, NULL);
    }
out:
    sl_free(tokens);
    sl_tokenizer_destroy(&tokenizer);
    sl_free(text);
    return status;
}

enum sluice_status sl_cmd_perplexity(const struct sl_options *options, struct sluice_error *err)
{
    const char *path = sl_options_text(options, SL_OPT_FILE);
    path = options->n_arguments > 0 ? options->arguments[0] : path;
    SL_CHECK(path, INVALID_ARGUMENT, err, "perplexity needs a text: sluice perplexity FILE");
    struct sl_engine e;
    const int32_t n_ctx = sl_options_given(options, SL_OPT_CTX_SIZE)
                              ? (int32_t)sl_options_int(options, SL_OPT_CTX_SIZE)
                              : CHUNK_TOKENS;
    enum sluice_status status = sl_engine_open(&e, options, n_ctx, err);
    if (status == SLUICE_STATUS_OK) {
        struct sl_plan_options plan = sl_engine_plan_options(&e, options);
        plan.max_outputs = OUTPUT_ROWS;
        status = sl_engine_create_context(&e, &plan, err);
    }
    if (status == SLUICE_STATUS_OK) {
        status = evaluate(&e, options, path, err);
    }
    sl_engine_close(&e);
    return status;
}
