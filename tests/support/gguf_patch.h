/* SPDX-License-Identifier: Apache-2.0
 *
 * Copies a GGUF file with one thing changed: how tests make a model wrong in one place.
 */
#ifndef SL_TESTS_SUPPORT_GGUF_PATCH_H
#define SL_TESTS_SUPPORT_GGUF_PATCH_H

#include <stdlib.h>
#include <string.h>

#include "gguf/gguf_writer.h"

enum patch_kind {
    PATCH_NONE,
    PATCH_DROP, /* leave the key or tensor `name` out */
    PATCH_U32,  /* set a key, replacing what was there */
    PATCH_F32,
    PATCH_BOOL,
    PATCH_STRING,
    PATCH_U32S,    /* array of two: number, number2 */
    PATCH_RESHAPE, /* tensor to dims[], zeros for data */
    PATCH_RETYPE,  /* tensor to `type`, zeros for data */
    PATCH_CONVERT, /* tensor of floats to `type`, the same values */
    PATCH_ADD,     /* a new F32 tensor of dims[], zeros */
};

struct patch {
    enum patch_kind kind;
    const char *name;
    double number, number2;
    const char *text;
    int64_t dims[3]; /* 0 ends */
    enum sl_type type;
};

static inline void patch_set_key(struct sl_gguf_writer *w, const struct patch *p)
{
    const uint32_t pair[2] = {(uint32_t)p->number, (uint32_t)p->number2};
    switch (p->kind) {
    case PATCH_U32:
        sl_gguf_writer_set_u32(w, p->name, (uint32_t)p->number);
        break;
    case PATCH_F32:
        sl_gguf_writer_set_f32(w, p->name, (float)p->number);
        break;
    case PATCH_BOOL:
        sl_gguf_writer_set_bool(w, p->name, p->number != 0.0);
        break;
    case PATCH_STRING:
        sl_gguf_writer_set_string(w, p->name, p->text);
        break;
    case PATCH_U32S:
        sl_gguf_writer_set_array(w, p->name, SL_GGUF_U32, pair, 2);
        break;
    default:
        break;
    }
}

/* How a tensor of the copy looks. */
static inline struct sl_gguf_tensor patch_tensor(const struct sl_gguf_tensor *from,
                                                 const struct patch *p)
{
    struct sl_gguf_tensor t = *from;
    if (strcmp(t.name, p->name) != 0) {
        return t;
    }
    if (p->kind == PATCH_RESHAPE) {
        for (t.n_dims = 0; t.n_dims < 3 && p->dims[t.n_dims] > 0; t.n_dims++) {
            t.dims[t.n_dims] = p->dims[t.n_dims];
        }
        t.data = NULL;
    } else if (p->kind == PATCH_RETYPE || p->kind == PATCH_CONVERT) {
        t.type = p->type;
        t.data = p->kind == PATCH_RETYPE ? NULL : from->data;
    }
    t.bytes = sl_type_row_bytes(t.type, t.dims[0]);
    for (uint32_t d = 1; d < t.n_dims; d++) {
        t.bytes *= (size_t)t.dims[d];
    }
    return t;
}

static inline enum sluice_status patch_write_data(struct sl_gguf_writer *w,
                                                  const struct sl_gguf_tensor *from,
                                                  const struct sl_gguf_tensor *to,
                                                  struct sluice_error *err)
{
    void *data = calloc(1, to->bytes);
    if (to->data != NULL && to->type == from->type) {
        memcpy(data, from->data, to->bytes);
    } else if (to->data != NULL) {
        sl_quantize_row(to->type, from->data, data, to->dims[0]); /* from F32 */
    }
    const enum sluice_status status = sl_gguf_writer_write(w, data, to->bytes, err);
    free(data);
    return status;
}

static inline enum sluice_status patch_write_all(struct sl_gguf_writer *w,
                                                 const struct sl_gguf *file, const struct patch *p,
                                                 struct sluice_error *err)
{
    for (size_t i = 0; i < sl_gguf_n_values(file); i++) {
        if (strcmp(sl_gguf_key(file, i), p->name) != 0) {
            sl_gguf_writer_set_value(w, sl_gguf_key(file, i), file, sl_gguf_value(file, i));
        }
    }
    patch_set_key(w, p);
    struct sl_gguf_tensor added = {.name = p->name, .type = SL_TYPE_F32};
    for (int pass = 0; pass < 2; pass++) {
        for (size_t i = 0; i < sl_gguf_n_tensors(file); i++) {
            const struct sl_gguf_tensor *from = sl_gguf_tensor(file, i);
            if (p->kind == PATCH_DROP && strcmp(from->name, p->name) == 0) {
                continue;
            }
            const struct sl_gguf_tensor to = patch_tensor(from, p);
            if (pass == 0) {
                sl_gguf_writer_add_tensor(w, to.name, to.type, to.dims, to.n_dims);
            } else if (patch_write_data(w, from, &to, err) != SLUICE_STATUS_OK) {
                return err->status;
            }
        }
        if (p->kind == PATCH_ADD && pass == 0) {
            const struct patch shape = {
                .kind = PATCH_RESHAPE, .name = p->name, .dims = {p->dims[0], p->dims[1]}};
            added = patch_tensor(&added, &shape);
            sl_gguf_writer_add_tensor(w, added.name, added.type, added.dims, added.n_dims);
        } else if (p->kind == PATCH_ADD &&
                   patch_write_data(w, &added, &added, err) != SLUICE_STATUS_OK) {
            return err->status;
        }
        if (pass == 0 && sl_gguf_writer_begin_data(w, err) != SLUICE_STATUS_OK) {
            return err->status;
        }
    }
    return sl_gguf_writer_finish(w, err);
}

/* Copy `from` to `to` with the patch. */
static inline enum sluice_status patch_copy(const char *from, const char *to, const struct patch *p,
                                            struct sluice_error *err)
{
    struct sl_gguf *file = NULL;
    struct sl_gguf_writer *w = NULL;
    enum sluice_status status = sl_gguf_open(&file, from, err);
    if (status == SLUICE_STATUS_OK) {
        status = sl_gguf_writer_create(&w, to, err);
    }
    if (status == SLUICE_STATUS_OK) {
        status = patch_write_all(w, file, p, err);
    }
    sl_gguf_writer_destroy(&w);
    sl_gguf_close(&file);
    return status;
}

#endif
