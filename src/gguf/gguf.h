/* SPDX-License-Identifier: Apache-2.0
 *
 * Reading GGUF (versions 2 and 3): memory-mapped, split files joined, everything validated at the
 * door with overflow-safe arithmetic. After a successful open every tensor's data range lies inside
 * its file, every string is inside the mapping, and no key or tensor name occurs twice.
 * Source: the GGUF specification (ggml/docs/gguf.md).
 */
#ifndef SL_GGUF_GGUF_H
#define SL_GGUF_GGUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <sluice/status.h>

#include "quant/type.h"

enum sl_gguf_kind {
    SL_GGUF_U8 = 0,
    SL_GGUF_I8 = 1,
    SL_GGUF_U16 = 2,
    SL_GGUF_I16 = 3,
    SL_GGUF_U32 = 4,
    SL_GGUF_I32 = 5,
    SL_GGUF_F32 = 6,
    SL_GGUF_BOOL = 7,
    SL_GGUF_STRING = 8,
    SL_GGUF_ARRAY = 9,
    SL_GGUF_U64 = 10,
    SL_GGUF_I64 = 11,
    SL_GGUF_F64 = 12,
};

/* A string inside the mapping: not NUL-terminated, any bytes. */
struct sl_gguf_string {
    const char *data;
    size_t length;
};

#define SL_GGUF_MAX_DIMS 4

struct sl_gguf_tensor {
    const char *name; /* NUL-terminated, owned by the file */
    enum sl_type type;
    uint32_t n_dims;
    int64_t dims[SL_GGUF_MAX_DIMS]; /* dims[0] is the row length; unused ones are 1 */
    const void *data;               /* in the mapping; NULL when opened header-only */
    size_t bytes;
    uint64_t file_offset; /* of the data, in its own file */
    uint32_t file_index;  /* which part of a split model */
};

struct sl_gguf;

/* Open a model file. The name of the first part of a split model ("...-00001-of-00003.gguf") opens
 * all parts. On failure *out is NULL and `err` names file, key or tensor, and byte offset. */
enum sluice_status sl_gguf_open(struct sl_gguf **out, const char *path, struct sluice_error *err);
void sl_gguf_close(struct sl_gguf **file);

uint32_t sl_gguf_version(const struct sl_gguf *file);
uint32_t sl_gguf_alignment(const struct sl_gguf *file);
size_t sl_gguf_n_files(const struct sl_gguf *file);
const char *sl_gguf_path(const struct sl_gguf *file, size_t file_index);
uint64_t sl_gguf_file_bytes(const struct sl_gguf *file, size_t file_index);

/* The mapping of a part, for page-locking and prefetch hints. */
const void *sl_gguf_mapping(const struct sl_gguf *file, size_t file_index, size_t *out_bytes);

size_t sl_gguf_n_tensors(const struct sl_gguf *file);
const struct sl_gguf_tensor *sl_gguf_tensor(const struct sl_gguf *file, size_t index);
/* By name, hashed; NULL when there is none. */
const struct sl_gguf_tensor *sl_gguf_find_tensor(const struct sl_gguf *file, const char *name);

/* Metadata. A value handle is valid while the file is open. */
struct sl_gguf_value {
    enum sl_gguf_kind kind;
    enum sl_gguf_kind item_kind; /* arrays: kind of the items (never ARRAY) */
    uint64_t count;              /* arrays: number of items; else 1 */
    const uint8_t *data;         /* little-endian bytes in the mapping (unaligned) */
    uint64_t file_offset;
};
size_t sl_gguf_n_values(const struct sl_gguf *file);
const char *sl_gguf_key(const struct sl_gguf *file, size_t index); /* NUL-terminated */
const struct sl_gguf_value *sl_gguf_value(const struct sl_gguf *file, size_t index);
const struct sl_gguf_value *sl_gguf_find(const struct sl_gguf *file, const char *key); /* or NULL */

/* Typed getters. A missing key is FORMAT naming it; so is a value of another kind or outside the
 * range. Integers of every width convert when they fit; u8..i64 also read from bool. */
enum sluice_status sl_gguf_get_u32(const struct sl_gguf *file, const char *key, uint32_t *out,
                                   struct sluice_error *err);
enum sluice_status sl_gguf_get_f32(const struct sl_gguf *file, const char *key, float *out,
                                   struct sluice_error *err);
enum sluice_status sl_gguf_get_bool(const struct sl_gguf *file, const char *key, bool *out,
                                    struct sluice_error *err);
enum sluice_status sl_gguf_get_string(const struct sl_gguf *file, const char *key,
                                      struct sl_gguf_string *out, struct sluice_error *err);
/* An array of `item_kind` (any integer width for U32/I32). */
enum sluice_status sl_gguf_get_array(const struct sl_gguf *file, const char *key,
                                     const struct sl_gguf_value **out, struct sluice_error *err);

/* Items of an array value (index < count; numeric kinds convert). String items are found in O(1)
 * through an index that open builds for string arrays. */
struct sl_gguf_string sl_gguf_item_string(const struct sl_gguf *file,
                                          const struct sl_gguf_value *value, uint64_t index);
double sl_gguf_item_number(const struct sl_gguf_value *value, uint64_t index);
int64_t sl_gguf_item_int(const struct sl_gguf_value *value, uint64_t index);

/* Names of kinds for messages and listings ("u32", "string"). */
const char *sl_gguf_kind_name(enum sl_gguf_kind kind);

#endif
