/* SPDX-License-Identifier: Apache-2.0
 *
 * Writing GGUF. Keys and tensor infos gather in two buffers, since their counts come first in the
 * file; begin_data writes both, and from then on data goes straight through. Everything goes to a
 * temporary file beside the wanted one, which only finish renames: a writer that fails or is
 * destroyed leaves nothing behind.
 */
#include "gguf/gguf_writer.h"

#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/mem.h"
#include "gguf/gguf_internal.h"

struct buffer {
    uint8_t *data;
    size_t size;
    size_t capacity;
};

enum stage { STAGE_HEADER, STAGE_DATA, STAGE_DONE };

struct sl_gguf_writer {
    char *path;
    char *temporary;
    FILE *stream;
    enum stage stage;
    struct sluice_error error; /* the first one */
    uint32_t alignment;
    struct buffer keys;
    struct buffer infos;
    uint64_t n_keys;
    uint64_t n_tensors;
    struct sl_gguf_names names; /* of keys and tensors, to find doubles */
    struct sl_gguf_table key_table;
    struct sl_gguf_table tensor_table;
    /* Sizes of the tensors in order, and how much of which one is written. */
    uint64_t *tensor_bytes;
    size_t tensor_capacity;
    uint64_t data_bytes; /* next free offset in the data section */
    size_t current;
    uint64_t current_bytes;
};

/* Remember the first error; later calls do nothing. */
#define REMEMBER(w, code, ...)                                                                     \
    do {                                                                                           \
        if ((w)->error.status == SLUICE_STATUS_OK) {                                               \
            sl_error_set(&(w)->error, SLUICE_STATUS_##code, __VA_ARGS__);                          \
        }                                                                                          \
    } while (0)

static bool failed(const struct sl_gguf_writer *w)
{
    return w->error.status != SLUICE_STATUS_OK;
}

static enum sluice_status report(const struct sl_gguf_writer *w, struct sluice_error *err)
{
    if (err != NULL && failed(w)) {
        *err = w->error;
    }
    return w->error.status;
}

/* ----------------------------------------------------------------- buffers */

static void append(struct sl_gguf_writer *w, struct buffer *b, const void *data, size_t bytes)
{
    if (failed(w) || bytes == 0) {
        return;
    }
    if (bytes > b->capacity - b->size) {
        size_t wanted = b->capacity == 0 ? 4096 : b->capacity;
        while (wanted - b->size < bytes && wanted < SIZE_MAX / 2) {
            wanted *= 2;
        }
        uint8_t *grown = sl_realloc(SL_MEM_GGUF, b->data, wanted, 1);
        if (grown == NULL || wanted - b->size < bytes) {
            b->data = grown != NULL ? grown : b->data;
            REMEMBER(w, OUT_OF_MEMORY, "out of memory for the metadata of '%s'",
                     sl_gguf_short_path(w->path));
            return;
        }
        b->data = grown;
        b->capacity = wanted;
    }
    memcpy(b->data + b->size, data, bytes);
    b->size += bytes;
}

static void append_u32(struct sl_gguf_writer *w, struct buffer *b, uint32_t v)
{
    const uint8_t bytes[4] = {(uint8_t)v, (uint8_t)(v >> 8), (uint8_t)(v >> 16),
                              (uint8_t)(v >> 24)};
    append(w, b, bytes, sizeof(bytes));
}

static void append_u64(struct sl_gguf_writer *w, struct buffer *b, uint64_t v)
{
    append_u32(w, b, (uint32_t)v);
    append_u32(w, b, (uint32_t)(v >> 32));
}

static void append_string(struct sl_gguf_writer *w, struct buffer *b, const char *text,
                          size_t length)
{
    append_u64(w, b, length);
    append(w, b, text, length);
}

/* Numbers are little-endian in the file; `items` are the host's. */
static void append_items(struct sl_gguf_writer *w, const void *items, size_t count,
                         size_t item_bytes)
{
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    size_t bytes;
    if (__builtin_mul_overflow(count, item_bytes, &bytes)) {
        REMEMBER(w, INVALID_ARGUMENT, "an array of %zu items is too large", count);
        return;
    }
    append(w, &w->keys, items, bytes);
#else
    for (size_t i = 0; i < count; i++) {
        for (size_t j = item_bytes; j-- > 0;) {
            append(w, &w->keys, (const uint8_t *)items + i * item_bytes + j, 1);
        }
    }
#endif
}

/* -------------------------------------------------------------------- keys */

/* Note a name; false when it is not usable or there already. */
static bool note_name(struct sl_gguf_writer *w, const char *what, struct sl_gguf_table *table,
                      const char *name, size_t max_bytes)
{
    if (w->stage != STAGE_HEADER) {
        REMEMBER(w, INVALID_ARGUMENT, "%s '%.100s' comes after the data has begun", what, name);
    }
    if (failed(w)) {
        return false;
    }
    const size_t length = strlen(name);
    if (length == 0 || length > max_bytes) {
        REMEMBER(w, INVALID_ARGUMENT, "%s '%.100s' has %zu bytes (allowed: 1 to %zu)", what, name,
                 length, max_bytes);
        return false;
    }
    if (sl_gguf_table_find(table, name, length) != SIZE_MAX) {
        REMEMBER(w, INVALID_ARGUMENT, "%s '%.100s' is set twice", what, name);
        return false;
    }
    const char *copy = sl_gguf_names_add(&w->names, name, length);
    if (copy == NULL || !sl_gguf_table_add(table, copy, length, 0)) {
        REMEMBER(w, OUT_OF_MEMORY, "out of memory for %s '%.100s'", what, name);
        return false;
    }
    return true;
}

static bool begin_key(struct sl_gguf_writer *w, const char *key, enum sl_gguf_kind kind)
{
    if (!note_name(w, "key", &w->key_table, key, SL_GGUF_MAX_KEY_BYTES)) {
        return false;
    }
    append_string(w, &w->keys, key, strlen(key));
    append_u32(w, &w->keys, (uint32_t)kind);
    w->n_keys++;
    return true;
}

void sl_gguf_writer_set_u32(struct sl_gguf_writer *w, const char *key, uint32_t value)
{
    const bool is_alignment = strcmp(key, "general.alignment") == 0;
    if (is_alignment && (value < SL_GGUF_MIN_ALIGNMENT || (value & (value - 1)) != 0)) {
        REMEMBER(w, INVALID_ARGUMENT, "the alignment is %u (allowed: powers of two from %d)", value,
                 SL_GGUF_MIN_ALIGNMENT);
    }
    if (is_alignment && w->n_tensors > 0) {
        REMEMBER(w, INVALID_ARGUMENT, "the alignment must be set before the first tensor");
    }
    if (begin_key(w, key, SL_GGUF_U32)) {
        append_u32(w, &w->keys, value);
        w->alignment = is_alignment ? value : w->alignment;
    }
}

void sl_gguf_writer_set_f32(struct sl_gguf_writer *w, const char *key, float value)
{
    if (begin_key(w, key, SL_GGUF_F32)) {
        append_items(w, &value, 1, sizeof(value));
    }
}

void sl_gguf_writer_set_bool(struct sl_gguf_writer *w, const char *key, bool value)
{
    if (begin_key(w, key, SL_GGUF_BOOL)) {
        const uint8_t byte = value;
        append(w, &w->keys, &byte, 1);
    }
}

void sl_gguf_writer_set_string(struct sl_gguf_writer *w, const char *key, const char *value)
{
    if (begin_key(w, key, SL_GGUF_STRING)) {
        append_string(w, &w->keys, value, strlen(value));
    }
}

void sl_gguf_writer_set_strings(struct sl_gguf_writer *w, const char *key,
                                const char *const *values, size_t count)
{
    if (!begin_key(w, key, SL_GGUF_ARRAY)) {
        return;
    }
    append_u32(w, &w->keys, SL_GGUF_STRING);
    append_u64(w, &w->keys, count);
    for (size_t i = 0; i < count; i++) {
        append_string(w, &w->keys, values[i], strlen(values[i]));
    }
}

void sl_gguf_writer_set_array(struct sl_gguf_writer *w, const char *key,
                              enum sl_gguf_kind item_kind, const void *items, size_t count)
{
    const size_t item_bytes = sl_gguf_kind_bytes((uint32_t)item_kind);
    if (item_bytes == 0) {
        REMEMBER(w, INVALID_ARGUMENT, "key '%.100s': cannot set an array of %s", key,
                 sl_gguf_kind_name(item_kind));
    }
    if (begin_key(w, key, SL_GGUF_ARRAY)) {
        append_u32(w, &w->keys, (uint32_t)item_kind);
        append_u64(w, &w->keys, count);
        append_items(w, items, count, item_bytes);
    }
}

/* Bytes of a value's data as it lies in its file. */
static size_t value_bytes(const struct sl_gguf *from, const struct sl_gguf_value *value)
{
    if (value->item_kind != SL_GGUF_STRING) {
        return (size_t)value->count * sl_gguf_kind_bytes((uint32_t)value->item_kind);
    }
    if (value->count == 0) {
        return 0;
    }
    const struct sl_gguf_string last = sl_gguf_item_string(from, value, value->count - 1);
    return (size_t)((const uint8_t *)last.data - value->data) + last.length;
}

void sl_gguf_writer_set_value(struct sl_gguf_writer *w, const char *key, const struct sl_gguf *from,
                              const struct sl_gguf_value *value)
{
    if (strcmp(key, "general.alignment") == 0 && value->kind != SL_GGUF_ARRAY &&
        value->kind != SL_GGUF_STRING) {
        sl_gguf_writer_set_u32(w, key, (uint32_t)sl_gguf_item_int(value, 0));
        return;
    }
    if (!begin_key(w, key, value->kind)) {
        return;
    }
    if (value->kind == SL_GGUF_ARRAY) {
        append_u32(w, &w->keys, (uint32_t)value->item_kind);
        append_u64(w, &w->keys, value->count);
    }
    append(w, &w->keys, value->data, value_bytes(from, value));
}

/* ----------------------------------------------------------------- tensors */

/* Bytes of a tensor, or an error remembered. */
static bool tensor_size(struct sl_gguf_writer *w, const char *name, enum sl_type type,
                        const int64_t *dims, uint32_t n_dims, uint64_t *out)
{
    const struct sl_type_traits *traits = sl_type_traits((uint32_t)type);
    if (traits == NULL || n_dims > SL_GGUF_MAX_DIMS) {
        REMEMBER(w, INVALID_ARGUMENT,
                 "tensor '%.100s': type %u with %u dimensions cannot be written", name,
                 (unsigned)type, n_dims);
        return false;
    }
    uint64_t n_items = 1;
    bool good = true;
    for (uint32_t i = 0; i < n_dims && good; i++) {
        good = dims[i] > 0 && !__builtin_mul_overflow(n_items, (uint64_t)dims[i], &n_items) &&
               n_items <= INT64_MAX;
    }
    good =
        good && (n_dims == 0 || dims[0] % traits->block_items == 0) &&
        n_items % traits->block_items == 0 &&
        !__builtin_mul_overflow(n_items / traits->block_items, (uint64_t)traits->block_bytes, out);
    if (!good) {
        REMEMBER(w, INVALID_ARGUMENT,
                 "tensor '%.100s': dimensions are zero or too large, or rows are no whole number "
                 "of %s blocks of %u",
                 name, traits->name, traits->block_items);
    }
    return good;
}

void sl_gguf_writer_add_tensor(struct sl_gguf_writer *w, const char *name, enum sl_type type,
                               const int64_t *dims, uint32_t n_dims)
{
    uint64_t bytes;
    uint64_t end;
    if (!note_name(w, "tensor", &w->tensor_table, name, SL_GGUF_MAX_NAME_BYTES) ||
        !tensor_size(w, name, type, dims, n_dims, &bytes)) {
        return;
    }
    if (__builtin_add_overflow(w->data_bytes, bytes, &end) ||
        end > (uint64_t)INT64_MAX - w->alignment) {
        REMEMBER(w, INVALID_ARGUMENT, "tensor '%.100s': the file would be too large", name);
        return;
    }
    if (w->n_tensors == w->tensor_capacity) {
        const size_t wanted = w->tensor_capacity == 0 ? 64 : w->tensor_capacity * 2;
        uint64_t *grown = sl_realloc(SL_MEM_GGUF, w->tensor_bytes, wanted, sizeof(*grown));
        if (grown == NULL) {
            REMEMBER(w, OUT_OF_MEMORY, "out of memory for tensor '%.100s'", name);
            return;
        }
        w->tensor_bytes = grown;
        w->tensor_capacity = wanted;
    }
    append_string(w, &w->infos, name, strlen(name));
    append_u32(w, &w->infos, n_dims);
    for (uint32_t i = 0; i < n_dims; i++) {
        append_u64(w, &w->infos, (uint64_t)dims[i]);
    }
    append_u32(w, &w->infos, (uint32_t)type);
    append_u64(w, &w->infos, w->data_bytes);
    w->tensor_bytes[w->n_tensors++] = bytes;
    w->data_bytes = (end + w->alignment - 1) / w->alignment * w->alignment;
}

/* ------------------------------------------------------------------ output */

static void put(struct sl_gguf_writer *w, const void *data, size_t bytes)
{
    if (failed(w) || bytes == 0) {
        return;
    }
    errno = 0;
    if (fwrite(data, 1, bytes, w->stream) != bytes) {
        REMEMBER(w, IO, "%s: cannot write: %s", sl_gguf_short_path(w->path), strerror(errno));
    }
}

/* Zeros up to the next multiple of the alignment, from a length counted from an aligned start. */
static void put_padding(struct sl_gguf_writer *w, uint64_t length)
{
    static const uint8_t zeros[256];
    uint64_t left = (w->alignment - length % w->alignment) % w->alignment;
    while (left > 0 && !failed(w)) {
        const size_t n = left < sizeof(zeros) ? (size_t)left : sizeof(zeros);
        put(w, zeros, n);
        left -= n;
    }
}

/* Refuse to replace what is not a plain file (a folder, a device). */
static void check_target(struct sl_gguf_writer *w)
{
    struct stat info;
    if (stat(w->path, &info) == 0 && !S_ISREG(info.st_mode)) {
        REMEMBER(w, IO, "%s: exists and is not a regular file", sl_gguf_short_path(w->path));
    }
}

/* Open a new file beside the wanted one; exclusively, so that two writers never share it. */
static void open_temporary(struct sl_gguf_writer *w)
{
    const size_t bytes = strlen(w->path) + 40;
    w->temporary = sl_alloc(SL_MEM_GGUF, bytes);
    if (w->temporary == NULL) {
        REMEMBER(w, OUT_OF_MEMORY, "out of memory for '%s'", sl_gguf_short_path(w->path));
        return;
    }
    for (int attempt = 0; attempt < 16 && w->stream == NULL; attempt++) {
        snprintf(w->temporary, bytes, "%s.%016llx.tmp", w->path,
                 (unsigned long long)(sl_clock_now_ns() ^ (uint64_t)(uintptr_t)w << 20));
        errno = 0;
        w->stream = fopen(w->temporary, "wbx");
        if (w->stream == NULL && errno != EEXIST) {
            break;
        }
    }
    if (w->stream == NULL) {
        REMEMBER(w, IO, "%s: cannot create: %s", sl_gguf_short_path(w->path), strerror(errno));
    }
}

enum sluice_status sl_gguf_writer_create(struct sl_gguf_writer **out, const char *path,
                                         struct sluice_error *err)
{
    *out = NULL;
    struct sl_gguf_writer *w = sl_calloc(SL_MEM_GGUF, 1, sizeof(*w));
    SL_CHECK(w != NULL, OUT_OF_MEMORY, err, "out of memory for '%s'", sl_gguf_short_path(path));
    w->alignment = SL_GGUF_DEFAULT_ALIGNMENT;
    w->path = sl_strdup(SL_MEM_GGUF, path);
    if (w->path == NULL) {
        sl_free(w);
        return sl_error_set(err, SLUICE_STATUS_OUT_OF_MEMORY, "out of memory for '%s'",
                            sl_gguf_short_path(path));
    }
    check_target(w);
    if (!failed(w)) {
        open_temporary(w);
    }
    const enum sluice_status status = report(w, err);
    if (status != SLUICE_STATUS_OK) {
        sl_gguf_writer_destroy(&w);
    }
    *out = w;
    return status;
}

void sl_gguf_writer_destroy(struct sl_gguf_writer **writer)
{
    struct sl_gguf_writer *w = writer == NULL ? NULL : *writer;
    if (w == NULL) {
        return;
    }
    if (w->stream != NULL) {
        fclose(w->stream);
        remove(w->temporary);
    }
    sl_free(w->temporary);
    sl_free(w->path);
    sl_free(w->keys.data);
    sl_free(w->infos.data);
    sl_free(w->tensor_bytes);
    sl_gguf_table_finish(&w->key_table);
    sl_gguf_table_finish(&w->tensor_table);
    sl_gguf_names_finish(&w->names);
    sl_free(w);
    *writer = NULL;
}

enum sluice_status sl_gguf_writer_begin_data(struct sl_gguf_writer *w, struct sluice_error *err)
{
    if (w->stage != STAGE_HEADER) {
        REMEMBER(w, INVALID_ARGUMENT, "the data has begun already");
    }
    struct buffer head = {0};
    append(w, &head, "GGUF", 4);
    append_u32(w, &head, SL_GGUF_VERSION);
    append_u64(w, &head, w->n_tensors);
    append_u64(w, &head, w->n_keys);
    put(w, head.data, head.size);
    put(w, w->keys.data, w->keys.size);
    put(w, w->infos.data, w->infos.size);
    put_padding(w, head.size + w->keys.size + w->infos.size);
    sl_free(head.data);
    w->stage = STAGE_DATA;
    return report(w, err);
}

enum sluice_status sl_gguf_writer_write(struct sl_gguf_writer *w, const void *data, size_t bytes,
                                        struct sluice_error *err)
{
    if (w->stage != STAGE_DATA) {
        REMEMBER(w, INVALID_ARGUMENT, "tensor data comes before begin_data or after finish");
    }
    const uint8_t *p = data;
    while (bytes > 0 && !failed(w)) {
        if (w->current == w->n_tensors) {
            REMEMBER(w, INVALID_ARGUMENT, "%zu bytes more than the tensors take", bytes);
            break;
        }
        const uint64_t left = w->tensor_bytes[w->current] - w->current_bytes;
        const size_t n = bytes < left ? bytes : (size_t)left;
        put(w, p, n);
        p += n;
        bytes -= n;
        w->current_bytes += n;
        if (w->current_bytes == w->tensor_bytes[w->current]) {
            put_padding(w, w->current_bytes);
            w->current++;
            w->current_bytes = 0;
        }
    }
    return report(w, err);
}

enum sluice_status sl_gguf_writer_finish(struct sl_gguf_writer *w, struct sluice_error *err)
{
    if (w->stage != STAGE_DATA) {
        REMEMBER(w, INVALID_ARGUMENT, "finish comes before begin_data or twice");
    }
    if (w->current != w->n_tensors) {
        REMEMBER(w, INVALID_ARGUMENT, "the data of %llu of %llu tensors is missing",
                 (unsigned long long)(w->n_tensors - w->current), (unsigned long long)w->n_tensors);
    }
    SL_TRY(report(w, err));
    w->stage = STAGE_DONE;
    errno = 0;
    const bool closed = fclose(w->stream) == 0;
    w->stream = NULL;
    if (!closed || rename(w->temporary, w->path) != 0) {
        REMEMBER(w, IO, "%s: cannot write: %s", sl_gguf_short_path(w->path), strerror(errno));
        remove(w->temporary);
    }
    return report(w, err);
}
