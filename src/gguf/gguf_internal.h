/* SPDX-License-Identifier: Apache-2.0
 *
 * The inside of the GGUF reader.
 *
 *   gguf.c         opens files, joins the parts of a split model, plain accessors
 *   gguf_parse.c   walks the header, the keys and the tensor infos of one part
 *   gguf_value.c   typed getters and items of arrays
 *   gguf_names.c   the store of names and the hash table over them
 *
 * Every read goes through `struct sl_gguf_cursor`, which knows the end of the mapping and what is
 * being read, so that no length from a file is used unchecked and every error says where it is.
 */
#ifndef SL_GGUF_INTERNAL_H
#define SL_GGUF_INTERNAL_H

#include <stdarg.h>

#include "base/error.h"
#include "base/file.h"
#include "gguf/gguf.h"

#define SL_GGUF_VERSION 3
#define SL_GGUF_DEFAULT_ALIGNMENT 32
#define SL_GGUF_MIN_ALIGNMENT 8 /* the specification asks for a multiple of 8 */
#define SL_GGUF_MAX_KEY_BYTES 65535
#define SL_GGUF_MAX_NAME_BYTES 64 /* of a tensor name */

/* Names are copied out of the mapping because callers want a NUL behind them. They live in a list
 * of chunks that never move and are freed together. */
struct sl_gguf_chunk;
struct sl_gguf_names {
    struct sl_gguf_chunk *chunks;
};

/* Copy `length` bytes and a NUL; NULL when out of memory. */
const char *sl_gguf_names_add(struct sl_gguf_names *names, const char *data, size_t length);
void sl_gguf_names_finish(struct sl_gguf_names *names);

/* Open-addressing hash table from name to index. The names themselves are borrowed. */
struct sl_gguf_slot {
    const char *name; /* NULL: free */
    uint64_t hash;
    size_t index;
};
struct sl_gguf_table {
    struct sl_gguf_slot *slots;
    size_t n_slots; /* 0 or a power of two */
    size_t n_used;
    uint64_t seed;
};

/* The index of a name, or SIZE_MAX. */
size_t sl_gguf_table_find(const struct sl_gguf_table *table, const char *name, size_t length);
/* Add a name that is not there yet; false when out of memory. */
bool sl_gguf_table_add(struct sl_gguf_table *table, const char *name, size_t length, size_t index);
void sl_gguf_table_finish(struct sl_gguf_table *table);

/* A key and its value. `value` is first, so that a value handle leads back to its entry. */
struct sl_gguf_entry {
    struct sl_gguf_value value;
    const char *key;
    uint64_t *string_at; /* arrays of strings: where each item starts, from value.data */
};

struct sl_gguf_keys {
    struct sl_gguf_entry *entries;
    size_t n;
    size_t capacity;
    struct sl_gguf_table table;
};

void sl_gguf_keys_finish(struct sl_gguf_keys *keys);
const struct sl_gguf_value *sl_gguf_keys_find(const struct sl_gguf_keys *keys, const char *key);

struct sl_gguf_part {
    char *path;
    struct sl_file_map map;
    uint32_t version;
    uint32_t alignment;
};

struct sl_gguf {
    struct sl_gguf_part *parts;
    size_t n_parts;
    struct sl_gguf_names names;
    struct sl_gguf_keys keys; /* of the first part */
    struct sl_gguf_tensor *tensors;
    size_t n_tensors;
    size_t tensor_capacity;
    struct sl_gguf_table tensor_table;
};

/* Parse parts[index], whose path and mapping are set. Its keys go to `keys` (empty before; the
 * caller finishes it, also on failure), its tensors behind those of the parts before it. */
enum sluice_status sl_gguf_part_parse(struct sl_gguf *file, size_t index, struct sl_gguf_keys *keys,
                                      struct sluice_error *err);

/* Bytes of one item of a kind with a fixed size; 0 for strings, arrays and unknown kinds. */
size_t sl_gguf_kind_bytes(uint32_t kind);

/* The typed getters on a set of keys; `path` is for messages. */
enum sluice_status sl_gguf_keys_get_u32(const struct sl_gguf_keys *keys, const char *path,
                                        const char *key, uint32_t *out, struct sluice_error *err);

/* `text` made fit for a message: quotes and all but ASCII escaped, long texts cut, always
 * NUL-terminated. Returns `buffer`. */
const char *sl_gguf_printable(char *buffer, size_t buffer_bytes, const char *text, size_t length);
/* The end of a path, so that a long one does not push the reason out of a message. */
const char *sl_gguf_short_path(const char *path);

/* Little-endian integers at any address. */
static inline uint16_t sl_gguf_u16(const uint8_t *p)
{
    return (uint16_t)(p[0] | (uint16_t)(p[1] << 8));
}

static inline uint32_t sl_gguf_u32(const uint8_t *p)
{
    return (uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24;
}

static inline uint64_t sl_gguf_u64(const uint8_t *p)
{
    return (uint64_t)sl_gguf_u32(p) | (uint64_t)sl_gguf_u32(p + 4) << 32;
}

#endif
