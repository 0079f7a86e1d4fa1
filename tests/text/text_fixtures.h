/* SPDX-License-Identifier: Apache-2.0
 *
 * What the tests of the text part share: the corpus and its expected token ids (written by
 * tools/fixtures/text_*.py), and variants of the small vocabularies.
 */
#ifndef SL_TESTS_TEXT_FIXTURES_H
#define SL_TESTS_TEXT_FIXTURES_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "test.h"

#include "base/file.h"
#include "base/mem.h"
#include "gguf/gguf.h"
#include "gguf/gguf_writer.h"
#include "text/tokenizer.h"

/* A fixture file read from front to back: LEB128 numbers and byte strings. */
struct fixture {
    char *data;
    size_t size;
    size_t at;
};

static inline struct fixture fixture_open(const char *name)
{
    struct sluice_error err = {0};
    struct fixture f = {0};
    char path[1024];
    snprintf(path, sizeof(path), "%s/text/%s", SLUICE_FIXTURES, name);
    assert_ok(sl_file_read(path, 0, &f.data, &f.size, &err), err);
    return f;
}

static inline void fixture_close(struct fixture *f)
{
    sl_free(f->data);
    *f = (struct fixture){0};
}

static inline uint32_t fixture_number(struct fixture *f)
{
    uint32_t n = 0;
    for (int shift = 0;; shift += 7) {
        assert_true(f->at < f->size);
        const unsigned char byte = (unsigned char)f->data[f->at++];
        n |= (uint32_t)(byte & 0x7F) << shift;
        if (byte < 0x80) {
            return n;
        }
    }
}

static inline const char *fixture_bytes(struct fixture *f, size_t *length)
{
    *length = fixture_number(f);
    const char *bytes = f->data + f->at;
    f->at += *length;
    assert_true(f->at <= f->size);
    return bytes;
}

static inline void fixture_path(char *path, size_t size, const char *name)
{
    snprintf(path, size, "%s/text/%s", SLUICE_FIXTURES, name);
}

/* Open a small vocabulary with one key set anew (NULL: none). The tokenizer does not need the file,
 * so it is gone again on return. */
static inline void fixture_tokenizer_with(const char *name, const char *key, const char *text,
                                          struct sl_tokenizer **out)
{
    struct sluice_error err = {0};
    char path[1024];
    fixture_path(path, sizeof(path), name);
    struct sl_gguf *file;
    assert_ok(sl_gguf_open(&file, path, &err), err);
    if (key != NULL) {
        char copy[1024];
        snprintf(copy, sizeof(copy), "%s/text_variant_%ld.gguf", SLUICE_BINARY_DIR, (long)getpid());
        struct sl_gguf_writer *w;
        assert_ok(sl_gguf_writer_create(&w, copy, &err), err);
        for (size_t i = 0; i < sl_gguf_n_values(file); i++) {
            if (strcmp(sl_gguf_key(file, i), key) != 0) {
                sl_gguf_writer_set_value(w, sl_gguf_key(file, i), file, sl_gguf_value(file, i));
            }
        }
        sl_gguf_writer_set_string(w, key, text);
        assert_ok(sl_gguf_writer_begin_data(w, &err), err);
        assert_ok(sl_gguf_writer_finish(w, &err), err);
        sl_gguf_writer_destroy(&w);
        sl_gguf_close(&file);
        assert_ok(sl_gguf_open(&file, copy, &err), err);
        unlink(copy);
    }
    assert_ok(sl_tokenizer_create(out, file, &err), err);
    sl_gguf_close(&file);
}

/* Path of a real model in the models folder (SLUICE_MODELS, else models/ in the repository), or
 * NULL when it is not there. */
static inline const char *fixture_model(char *path, size_t size, const char *name)
{
    const char *folder = getenv("SLUICE_MODELS");
    if (folder != NULL) {
        snprintf(path, size, "%s/%s", folder, name);
    } else {
        snprintf(path, size, "%s/../../models/%s", SLUICE_FIXTURES, name);
    }
    return sl_file_exists(path) ? path : NULL;
}

#endif
