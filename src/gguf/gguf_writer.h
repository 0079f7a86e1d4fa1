/* SPDX-License-Identifier: Apache-2.0
 *
 * Writing GGUF version 3: metadata first, then tensor infos, then data in the same order, streamed
 * so that files of any size need no memory.
 *
 *   create -> set_* ... -> add_tensor ... -> begin_data -> write_tensor_data (whole tensors, in
 * order, in pieces) -> finish (writes the file under its name) ; destroy at any point leaves no
 * file behind
 */
#ifndef SL_GGUF_WRITER_H
#define SL_GGUF_WRITER_H

#include "gguf/gguf.h"

struct sl_gguf_writer;

enum sluice_status sl_gguf_writer_create(struct sl_gguf_writer **out, const char *path,
                                         struct sluice_error *err);
void sl_gguf_writer_destroy(struct sl_gguf_writer **writer);

/* Metadata; setting a key twice is INVALID_ARGUMENT. Errors are remembered: the first one is
 * returned by begin_data, so these need no checks. */
void sl_gguf_writer_set_u32(struct sl_gguf_writer *w, const char *key, uint32_t value);
void sl_gguf_writer_set_f32(struct sl_gguf_writer *w, const char *key, float value);
void sl_gguf_writer_set_bool(struct sl_gguf_writer *w, const char *key, bool value);
void sl_gguf_writer_set_string(struct sl_gguf_writer *w, const char *key, const char *value);
void sl_gguf_writer_set_strings(struct sl_gguf_writer *w, const char *key,
                                const char *const *values, size_t count);
void sl_gguf_writer_set_array(struct sl_gguf_writer *w, const char *key,
                              enum sl_gguf_kind item_kind, const void *items, size_t count);
/* Copy a value as it is from another file. */
void sl_gguf_writer_set_value(struct sl_gguf_writer *w, const char *key, const struct sl_gguf *from,
                              const struct sl_gguf_value *value);

/* dims[0] is the row length. */
void sl_gguf_writer_add_tensor(struct sl_gguf_writer *w, const char *name, enum sl_type type,
                               const int64_t *dims, uint32_t n_dims);

enum sluice_status sl_gguf_writer_begin_data(struct sl_gguf_writer *w, struct sluice_error *err);
enum sluice_status sl_gguf_writer_write(struct sl_gguf_writer *w, const void *data, size_t bytes,
                                        struct sluice_error *err);
/* Checks that all data is there, then moves the file into place. */
enum sluice_status sl_gguf_writer_finish(struct sl_gguf_writer *w, struct sluice_error *err);

#endif
