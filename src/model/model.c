/* SPDX-License-Identifier: Apache-2.0
 *
 * Opening and closing a model, and embedding lookup.
 */
#include "model/model.h"

#include "model/model_internal.h"

enum sluice_status sl_model_open(struct sl_model **out, const char *path, uint32_t n_ctx,
                                 struct sluice_error *err)
{
    *out = NULL;
    struct sl_model *model = sl_calloc(SL_MEM_MODEL, 1, sizeof *model);
    SL_CHECK(model != NULL, OUT_OF_MEMORY, err, "no memory for a model");
    enum sluice_status status = sl_gguf_open(&model->file, path, err);
    if (status != SLUICE_STATUS_OK) {
        goto out; /* its message names the file */
    }
    status = sl_hparams_load(model, err);
    if (status == SLUICE_STATUS_OK) {
        status = sl_model_load_tensors(model, n_ctx, err);
    }
    if (status != SLUICE_STATUS_OK) {
        sl_error_prefix(err, "%s", path);
        goto out;
    }
    sl_shards_finish(model);
    *out = model;
    return SLUICE_STATUS_OK;
out:
    sl_model_close(&model);
    return status;
}

void sl_model_close(struct sl_model **model)
{
    if (model == NULL || *model == NULL) {
        return;
    }
    struct sl_model *m = *model;
    if (m->layout != NULL) {
        sl_free(m->layout->layer);
        sl_free(m->layout);
    }
    sl_free(m->shards);
    sl_free(m->consts);
    sl_gguf_close(&m->file);
    sl_free(m);
    *model = NULL;
}

void sl_model_embed(const struct sl_model *model, const int32_t *tokens, int32_t n, float *out)
{
    const struct sl_matrix *e = &model->embedding;
    const size_t row_bytes = sl_type_row_bytes(e->type, e->n_cols);
    const float scale = model->hp.embedding_scale;
    for (int32_t i = 0; i < n; i++) {
        float *row = out + (size_t)i * model->hp.n_embd;
        const char *src = (const char *)e->data + (size_t)tokens[i] * row_bytes;
        sl_dequantize_row(e->type, src, row, e->n_cols);
        if (scale != 1.0F) {
            for (uint32_t k = 0; k < model->hp.n_embd; k++) {
                row[k] *= scale;
            }
        }
    }
}
