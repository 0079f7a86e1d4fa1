/* SPDX-License-Identifier: Apache-2.0
 *
 * Kept uses of experts (see uses.h): a text file with one line a layer. What a file lacks or holds
 * too much of makes all of it worthless: it may be of another model with the same name.
 */
#include "exec/uses.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/file.h"
#include "base/mem.h"

#define HEADER "sluice-expert-uses 1\n"
#define DIGITS 14 /* of a number, its separator counted in */

static size_t count(const struct sl_model *model)
{
    return (size_t)model->hp.n_layers * model->hp.n_experts;
}

static enum sluice_status kept_path(const struct sl_model *model, char **out,
                                    struct sluice_error *err)
{
    char text[320], name[64];
    const char *const path = sl_gguf_path(model->file, 0);
    const char *const slash = strrchr(path, '/');
    snprintf(text, sizeof text, "%.200s|%zu|%u|%u", slash ? slash + 1 : path, model->weight_bytes,
             model->hp.n_layers, model->hp.n_experts);
    sl_file_cache_name(name, sizeof name, "uses", text);
    return sl_file_cache_path(name, out, err);
}

static bool parse(const char *text, float *out, size_t n)
{
    if (strncmp(text, HEADER, sizeof HEADER - 1) != 0) {
        return false;
    }
    text += sizeof HEADER - 1;
    for (size_t i = 0; i < n; i++) {
        char *end = NULL;
        out[i] = strtof(text, &end);
        if (end == text || !isfinite(out[i]) || out[i] < 0) {
            return false;
        }
        text = end;
    }
    return text[strspn(text, " \r\n")] == '\0';
}

float *sl_uses_load(const struct sl_model *model)
{
    const size_t n = count(model);
    char *path = NULL, *text = NULL;
    size_t size = 0;
    float *uses = NULL;
    if (n > 0 && kept_path(model, &path, NULL) == SLUICE_STATUS_OK && sl_file_exists(path) &&
        sl_file_read(path, sizeof HEADER + n * DIGITS, &text, &size, NULL) == SLUICE_STATUS_OK) {
        uses = sl_alloc(SL_MEM_EXEC, n * sizeof *uses);
        if (uses && !parse(text, uses, n)) {
            sl_free(uses);
            uses = NULL;
        }
    }
    sl_free(text);
    sl_free(path);
    return uses;
}

enum sluice_status sl_uses_save(const struct sl_model *model, const float *uses,
                                struct sluice_error *err)
{
    const size_t n = count(model), room = sizeof HEADER + n * DIGITS;
    char *path = NULL;
    SL_TRY(kept_path(model, &path, err));
    char *const text = sl_alloc(SL_MEM_EXEC, room);
    enum sluice_status status = SLUICE_STATUS_OK;
    if (text) {
        size_t length = (size_t)snprintf(text, room, "%s", HEADER);
        for (size_t i = 0; i < n; i++) {
            const bool last = (i + 1) % model->hp.n_experts == 0;
            length += (size_t)snprintf(text + length, room - length, "%.4g%c", (double)uses[i],
                                       last ? '\n' : ' ');
        }
        status = sl_file_write(path, text, length, err);
    } else {
        status = sl_error_set(err, SLUICE_STATUS_OUT_OF_MEMORY, "no memory to keep uses");
    }
    sl_free(text);
    sl_free(path);
    return status;
}
