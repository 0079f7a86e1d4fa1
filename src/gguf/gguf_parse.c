/* SPDX-License-Identifier: Apache-2.0
 *
 * Walks one part of a GGUF file: header, keys, tensor infos. Nothing here trusts a number from the
 * file: counts are held against the bytes that are left before memory is taken for them, and
 * arrays grow only as items are really found.
 *
 *   "GGUF" | version u32 | tensors u64 | keys u64 | key, kind u32, value ... |
 *   name, dims u32, dim u64 ..., type u32, offset u64 ... | padding | data
 */
#include "gguf/gguf_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"

/* The least bytes that a key (length, one byte, kind, one byte of value) and a tensor info (length,
 * one byte, dims, type, offset) take: bounds for the counts in the header. */
#define MIN_KEY_BYTES (8 + 1 + 4 + 1)
#define MIN_TENSOR_BYTES (8 + 1 + 4 + 4 + 8)

#define SUBJECT_BYTES 160

/* Where we are, and what is being read, for messages ("key 'general.name'"). */
struct cursor {
    const uint8_t *data;
    size_t size;
    size_t pos;
    const char *path;
    char subject[SUBJECT_BYTES];
    struct sluice_error *err;
};

__attribute__((format(printf, 4, 5))) static enum sluice_status
fail(const struct cursor *c, enum sluice_status status, size_t at, const char *format, ...)
{
    char reason[256];
    va_list args;
    va_start(args, format);
    vsnprintf(reason, sizeof(reason), format, args);
    va_end(args);
    return sl_error_set(c->err, status, "%s: %s, byte %zu: %s", sl_gguf_short_path(c->path),
                        c->subject, at, reason);
}

static enum sluice_status fail_memory(const struct cursor *c)
{
    return fail(c, SLUICE_STATUS_OUT_OF_MEMORY, c->pos, "out of memory");
}

static void set_subject(struct cursor *c, const char *what, const char *name, size_t length)
{
    char text[SUBJECT_BYTES - 32];
    snprintf(c->subject, sizeof(c->subject), "%s '%s'", what,
             sl_gguf_printable(text, sizeof(text), name, length));
}

static size_t bytes_left(const struct cursor *c)
{
    return c->size - c->pos;
}

/* Step over `bytes` and point at them. */
static enum sluice_status take(struct cursor *c, uint64_t bytes, const char *what,
                               const uint8_t **out)
{
    *out = NULL;
    if (bytes > bytes_left(c)) {
        return fail(c, SLUICE_STATUS_FORMAT, c->pos,
                    "%s needs %llu bytes, but the file ends after %zu", what,
                    (unsigned long long)bytes, bytes_left(c));
    }
    *out = c->data + c->pos;
    c->pos += (size_t)bytes;
    return SLUICE_STATUS_OK;
}

static enum sluice_status take_u32(struct cursor *c, const char *what, uint32_t *out)
{
    *out = 0;
    const uint8_t *p;
    SL_TRY(take(c, 4, what, &p));
    *out = sl_gguf_u32(p);
    return SLUICE_STATUS_OK;
}

static enum sluice_status take_u64(struct cursor *c, const char *what, uint64_t *out)
{
    *out = 0;
    const uint8_t *p;
    SL_TRY(take(c, 8, what, &p));
    *out = sl_gguf_u64(p);
    return SLUICE_STATUS_OK;
}

static enum sluice_status take_string(struct cursor *c, const char *what,
                                      struct sl_gguf_string *out)
{
    uint64_t length;
    SL_TRY(take_u64(c, what, &length));
    const uint8_t *p;
    SL_TRY(take(c, length, what, &p));
    *out = (struct sl_gguf_string){.data = (const char *)p, .length = (size_t)length};
    return SLUICE_STATUS_OK;
}

/* A key or tensor name: bounded, not empty, without NUL (callers get a C string). */
static enum sluice_status take_name(struct cursor *c, const char *what, size_t max_bytes,
                                    struct sl_gguf_string *out)
{
    const size_t at = c->pos;
    uint64_t length;
    SL_TRY(take_u64(c, what, &length));
    if (length == 0 || length > max_bytes) {
        return fail(c, SLUICE_STATUS_FORMAT, at, "%s has %llu bytes (allowed: 1 to %zu)", what,
                    (unsigned long long)length, max_bytes);
    }
    const uint8_t *p;
    SL_TRY(take(c, length, what, &p));
    if (memchr(p, 0, (size_t)length) != NULL) {
        return fail(c, SLUICE_STATUS_FORMAT, at, "%s contains a zero byte", what);
    }
    *out = (struct sl_gguf_string){.data = (const char *)p, .length = (size_t)length};
    return SLUICE_STATUS_OK;
}

/* ------------------------------------------------------------------ header */

static enum sluice_status parse_version(struct cursor *c, struct sl_gguf_part *part)
{
    const uint8_t *magic;
    SL_TRY(take(c, 4, "the magic number", &magic));
    if (memcmp(magic, "GGUF", 4) != 0) {
        return fail(c, SLUICE_STATUS_FORMAT, 0,
                    "not a GGUF file (it starts with %02x %02x %02x %02x, not 47 47 55 46)",
                    magic[0], magic[1], magic[2], magic[3]);
    }
    SL_TRY(take_u32(c, "the version", &part->version));
    const uint32_t version = part->version;
    if (version == 2 || version == 3) {
        return SLUICE_STATUS_OK;
    }
    if (version == 1) {
        return fail(c, SLUICE_STATUS_UNSUPPORTED, 4,
                    "GGUF version 1 is not supported (2 and 3 are); convert the model again");
    }
    /* A swapped small number has its digits in the top byte. */
    if (version != 0 && (version & 0xffff) == 0) {
        return fail(c, SLUICE_STATUS_UNSUPPORTED, 4,
                    "big-endian GGUF files are not supported; convert the model as little-endian");
    }
    return fail(c, SLUICE_STATUS_UNSUPPORTED, 4, "GGUF version %u is not supported (2 and 3 are)",
                version);
}

static enum sluice_status take_count(struct cursor *c, const char *what, size_t min_bytes,
                                     uint64_t *out)
{
    const size_t at = c->pos;
    SL_TRY(take_u64(c, what, out));
    if (*out > bytes_left(c) / min_bytes) {
        return fail(c, SLUICE_STATUS_FORMAT, at, "%s is %llu, more than the file can hold", what,
                    (unsigned long long)*out);
    }
    return SLUICE_STATUS_OK;
}

/* -------------------------------------------------------------------- keys */

/* Find where each string of an array starts. Each takes 8 bytes or more of the file, so the index
 * is never larger than the array itself. */
static enum sluice_status index_strings(struct cursor *c, struct sl_gguf_entry *entry)
{
    const uint64_t count = entry->value.count;
    if (count > bytes_left(c) / 8) {
        return fail(c, SLUICE_STATUS_FORMAT, c->pos,
                    "an array of %llu strings is more than the file can hold",
                    (unsigned long long)count);
    }
    if (count == 0) {
        return SLUICE_STATUS_OK;
    }
    entry->string_at = sl_calloc(SL_MEM_GGUF, (size_t)count, sizeof(*entry->string_at));
    if (entry->string_at == NULL) {
        return fail_memory(c);
    }
    const size_t base = c->pos;
    for (uint64_t i = 0; i < count; i++) {
        struct sl_gguf_string item;
        entry->string_at[i] = c->pos - base;
        SL_TRY(take_string(c, "a string of the array", &item));
    }
    return SLUICE_STATUS_OK;
}

static enum sluice_status check_bools(struct cursor *c, const uint8_t *bytes, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++) {
        if (bytes[i] > 1) {
            return fail(c, SLUICE_STATUS_FORMAT, (size_t)(bytes + i - c->data),
                        "a bool is %u (allowed: 0 and 1)", bytes[i]);
        }
    }
    return SLUICE_STATUS_OK;
}

static enum sluice_status parse_fixed(struct cursor *c, struct sl_gguf_value *value,
                                      enum sl_gguf_kind kind)
{
    uint64_t bytes;
    if (__builtin_mul_overflow(value->count, (uint64_t)sl_gguf_kind_bytes(kind), &bytes)) {
        return fail(c, SLUICE_STATUS_FORMAT, c->pos,
                    "an array of %llu items is more than the file can hold",
                    (unsigned long long)value->count);
    }
    const uint8_t *p;
    SL_TRY(take(c, bytes, "the value", &p));
    if (kind == SL_GGUF_BOOL) {
        SL_TRY(check_bools(c, p, value->count));
    }
    return SLUICE_STATUS_OK;
}

static enum sluice_status parse_array(struct cursor *c, struct sl_gguf_entry *entry)
{
    struct sl_gguf_value *value = &entry->value;
    const size_t at = c->pos;
    uint32_t item_kind;
    SL_TRY(take_u32(c, "the kind of the array's items", &item_kind));
    SL_TRY(take_u64(c, "the array's length", &value->count));
    if (item_kind == SL_GGUF_ARRAY) {
        return fail(c, SLUICE_STATUS_UNSUPPORTED, at, "arrays of arrays are not supported");
    }
    if (item_kind != SL_GGUF_STRING && sl_gguf_kind_bytes(item_kind) == 0) {
        return fail(c, SLUICE_STATUS_FORMAT, at, "unknown kind %u of array items", item_kind);
    }
    value->item_kind = (enum sl_gguf_kind)item_kind;
    value->data = c->data + c->pos;
    value->file_offset = c->pos;
    return item_kind == SL_GGUF_STRING ? index_strings(c, entry)
                                       : parse_fixed(c, value, value->item_kind);
}

static enum sluice_status parse_value(struct cursor *c, struct sl_gguf_entry *entry)
{
    struct sl_gguf_value *value = &entry->value;
    const size_t at = c->pos;
    uint32_t kind;
    SL_TRY(take_u32(c, "the value's kind", &kind));
    if (kind != SL_GGUF_STRING && kind != SL_GGUF_ARRAY && sl_gguf_kind_bytes(kind) == 0) {
        return fail(c, SLUICE_STATUS_FORMAT, at, "unknown kind %u of value", kind);
    }
    value->kind = (enum sl_gguf_kind)kind;
    value->item_kind = value->kind;
    value->count = 1;
    value->data = c->data + c->pos;
    value->file_offset = c->pos;
    if (kind == SL_GGUF_ARRAY) {
        return parse_array(c, entry);
    }
    if (kind == SL_GGUF_STRING) {
        struct sl_gguf_string text;
        return take_string(c, "the string", &text);
    }
    return parse_fixed(c, value, value->kind);
}

/* Room for one more item of an array that doubles. */
static bool reserve(void **items, size_t *capacity, size_t n, size_t item_bytes)
{
    if (n < *capacity) {
        return true;
    }
    const size_t wanted = *capacity == 0 ? 32 : *capacity * 2;
    void *grown = sl_realloc(SL_MEM_GGUF, *items, wanted, item_bytes);
    if (grown == NULL) {
        return false;
    }
    *items = grown;
    *capacity = wanted;
    return true;
}

static enum sluice_status parse_key(struct cursor *c, struct sl_gguf *file,
                                    struct sl_gguf_keys *keys, uint64_t number)
{
    snprintf(c->subject, sizeof(c->subject), "key number %llu", (unsigned long long)number);
    const size_t at = c->pos;
    struct sl_gguf_string name;
    SL_TRY(take_name(c, "the key", SL_GGUF_MAX_KEY_BYTES, &name));
    set_subject(c, "key", name.data, name.length);
    if (sl_gguf_table_find(&keys->table, name.data, name.length) != SIZE_MAX) {
        return fail(c, SLUICE_STATUS_FORMAT, at, "the key occurs twice");
    }
    void *entries = keys->entries;
    const bool room = reserve(&entries, &keys->capacity, keys->n, sizeof(*keys->entries));
    keys->entries = entries;
    if (!room) {
        return fail_memory(c);
    }
    struct sl_gguf_entry *entry = &keys->entries[keys->n];
    *entry = (struct sl_gguf_entry){.key = sl_gguf_names_add(&file->names, name.data, name.length)};
    if (entry->key == NULL || !sl_gguf_table_add(&keys->table, entry->key, name.length, keys->n)) {
        return fail_memory(c);
    }
    keys->n++; /* from here on sl_gguf_keys_finish frees what the value holds */
    return parse_value(c, entry);
}

static enum sluice_status parse_alignment(struct cursor *c, struct sl_gguf_part *part,
                                          const struct sl_gguf_keys *keys)
{
    const struct sl_gguf_value *value = sl_gguf_keys_find(keys, "general.alignment");
    part->alignment = SL_GGUF_DEFAULT_ALIGNMENT;
    if (value == NULL) {
        return SLUICE_STATUS_OK;
    }
    SL_TRY(sl_gguf_keys_get_u32(keys, part->path, "general.alignment", &part->alignment, c->err));
    if (part->alignment < SL_GGUF_MIN_ALIGNMENT || (part->alignment & (part->alignment - 1)) != 0) {
        set_subject(c, "key", "general.alignment", strlen("general.alignment"));
        return fail(c, SLUICE_STATUS_FORMAT, (size_t)value->file_offset,
                    "the alignment is %u (allowed: powers of two from %d)", part->alignment,
                    SL_GGUF_MIN_ALIGNMENT);
    }
    return SLUICE_STATUS_OK;
}

/* ----------------------------------------------------------------- tensors */

/* Type numbers that were given out once and taken back. */
static const char *retired_type(uint32_t id)
{
    static const struct {
        uint32_t id;
        const char *name;
    } retired[] = {
        {4, "Q4_2"},      {5, "Q4_3"},        {31, "Q4_0_4_4"},   {32, "Q4_0_4_8"},
        {33, "Q4_0_8_8"}, {36, "IQ4_NL_4_4"}, {37, "IQ4_NL_4_8"}, {38, "IQ4_NL_8_8"},
    };
    for (size_t i = 0; i < sizeof(retired) / sizeof(retired[0]); i++) {
        if (retired[i].id == id) {
            return retired[i].name;
        }
    }
    return NULL;
}

static enum sluice_status parse_dims(struct cursor *c, struct sl_gguf_tensor *tensor,
                                     int64_t *n_items)
{
    *n_items = 1;
    size_t at = c->pos;
    SL_TRY(take_u32(c, "the number of dimensions", &tensor->n_dims));
    if (tensor->n_dims > SL_GGUF_MAX_DIMS) {
        return fail(c, SLUICE_STATUS_FORMAT, at, "%u dimensions (allowed: up to %d)",
                    tensor->n_dims, SL_GGUF_MAX_DIMS);
    }
    for (uint32_t i = 0; i < SL_GGUF_MAX_DIMS; i++) {
        tensor->dims[i] = 1;
        if (i >= tensor->n_dims) {
            continue;
        }
        uint64_t dim;
        at = c->pos;
        SL_TRY(take_u64(c, "a dimension", &dim));
        if (dim == 0 || dim > INT64_MAX) {
            return fail(c, SLUICE_STATUS_FORMAT, at, "dimension %u is %llu", i,
                        (unsigned long long)dim);
        }
        tensor->dims[i] = (int64_t)dim;
        if (__builtin_mul_overflow(*n_items, tensor->dims[i], n_items)) {
            return fail(c, SLUICE_STATUS_FORMAT, at,
                        "the product of the dimensions up to %u (%llu) overflows", i,
                        (unsigned long long)dim);
        }
    }
    return SLUICE_STATUS_OK;
}

static enum sluice_status parse_type(struct cursor *c, struct sl_gguf_tensor *tensor,
                                     int64_t n_items)
{
    const size_t at = c->pos;
    uint32_t id;
    SL_TRY(take_u32(c, "the type", &id));
    const struct sl_type_traits *traits = sl_type_traits(id);
    if (traits == NULL) {
        const char *name = retired_type(id);
        return name != NULL ? fail(c, SLUICE_STATUS_UNSUPPORTED, at,
                                   "type %u (%s) is retired; convert the model again", id, name)
                            : fail(c, SLUICE_STATUS_UNSUPPORTED, at, "type %u is not known", id);
    }
    tensor->type = (enum sl_type)id;
    if (tensor->dims[0] % traits->block_items != 0) {
        return fail(c, SLUICE_STATUS_FORMAT, at,
                    "rows of %lld items are no whole number of %s blocks of %u",
                    (long long)tensor->dims[0], traits->name, traits->block_items);
    }
    if (__builtin_mul_overflow((uint64_t)(n_items / traits->block_items),
                               (uint64_t)traits->block_bytes, &tensor->bytes)) {
        return fail(c, SLUICE_STATUS_FORMAT, at, "the size of %lld items of %s overflows",
                    (long long)n_items, traits->name);
    }
    return SLUICE_STATUS_OK;
}

/* One tensor info. Its offset counts from the data section, which is not known yet. */
static enum sluice_status parse_tensor(struct cursor *c, struct sl_gguf *file, size_t part_index,
                                       uint64_t number)
{
    snprintf(c->subject, sizeof(c->subject), "tensor number %llu", (unsigned long long)number);
    const size_t at = c->pos;
    struct sl_gguf_string name;
    SL_TRY(take_name(c, "the tensor's name", SL_GGUF_MAX_NAME_BYTES, &name));
    set_subject(c, "tensor", name.data, name.length);
    if (sl_gguf_table_find(&file->tensor_table, name.data, name.length) != SIZE_MAX) {
        return fail(c, SLUICE_STATUS_FORMAT, at, "the tensor occurs twice");
    }
    struct sl_gguf_tensor tensor = {.file_index = (uint32_t)part_index};
    int64_t n_items;
    SL_TRY(parse_dims(c, &tensor, &n_items));
    SL_TRY(parse_type(c, &tensor, n_items));
    const size_t offset_at = c->pos;
    SL_TRY(take_u64(c, "the offset", &tensor.file_offset));
    const uint32_t alignment = file->parts[part_index].alignment;
    if (tensor.file_offset % alignment != 0) {
        return fail(c, SLUICE_STATUS_FORMAT, offset_at,
                    "offset %llu is no multiple of the alignment %u",
                    (unsigned long long)tensor.file_offset, alignment);
    }
    void *tensors = file->tensors;
    const bool room =
        reserve(&tensors, &file->tensor_capacity, file->n_tensors, sizeof(*file->tensors));
    file->tensors = tensors;
    tensor.name = room ? sl_gguf_names_add(&file->names, name.data, name.length) : NULL;
    if (tensor.name == NULL ||
        !sl_gguf_table_add(&file->tensor_table, tensor.name, name.length, file->n_tensors)) {
        return fail_memory(c);
    }
    file->tensors[file->n_tensors++] = tensor;
    return SLUICE_STATUS_OK;
}

/* Turn offsets into addresses, all of them inside the file. */
static enum sluice_status place_tensors(struct cursor *c, struct sl_gguf *file, size_t part_index,
                                        size_t first)
{
    const size_t alignment = file->parts[part_index].alignment;
    snprintf(c->subject, sizeof(c->subject), "tensor data");
    const size_t rest = c->pos % alignment;
    const size_t start = c->pos + (rest == 0 ? 0 : alignment - rest); /* both far from SIZE_MAX */
    if (first < file->n_tensors && start > c->size) {
        return fail(c, SLUICE_STATUS_FORMAT, c->pos,
                    "the data section would start at byte %zu, but the file ends at %zu", start,
                    c->size);
    }
    for (size_t i = first; i < file->n_tensors; i++) {
        struct sl_gguf_tensor *tensor = &file->tensors[i];
        const size_t room = c->size - start;
        if (tensor->file_offset > room || tensor->bytes > room - tensor->file_offset) {
            set_subject(c, "tensor", tensor->name, strlen(tensor->name));
            return fail(c, SLUICE_STATUS_FORMAT, c->size,
                        "the file ends inside its data: %zu bytes at offset %llu of %zu",
                        tensor->bytes, (unsigned long long)tensor->file_offset, room);
        }
        tensor->file_offset += start;
        tensor->data = c->data + tensor->file_offset;
    }
    return SLUICE_STATUS_OK;
}

static int by_offset(const void *a, const void *b)
{
    const struct sl_gguf_tensor *x = *(const struct sl_gguf_tensor *const *)a;
    const struct sl_gguf_tensor *y = *(const struct sl_gguf_tensor *const *)b;
    return x->file_offset < y->file_offset ? -1 : x->file_offset > y->file_offset;
}

/* No two tensors share bytes, so that sums of sizes never pass the size of the files. Files are
 * written in order; only one that is not needs sorting. */
static enum sluice_status check_overlaps(struct cursor *c, struct sl_gguf *file, size_t first)
{
    const size_t n = file->n_tensors - first;
    bool in_order = true;
    for (size_t i = first + 1; i < file->n_tensors && in_order; i++) {
        const struct sl_gguf_tensor *previous = &file->tensors[i - 1];
        in_order = file->tensors[i].file_offset >= previous->file_offset + previous->bytes;
    }
    if (in_order) {
        return SLUICE_STATUS_OK;
    }
    const struct sl_gguf_tensor **order = sl_calloc(SL_MEM_GGUF, n, sizeof(*order));
    if (order == NULL) {
        return fail_memory(c);
    }
    for (size_t i = 0; i < n; i++) {
        order[i] = &file->tensors[first + i];
    }
    qsort(order, n, sizeof(*order), by_offset);
    enum sluice_status status = SLUICE_STATUS_OK;
    for (size_t i = 1; i < n && status == SLUICE_STATUS_OK; i++) {
        if (order[i]->file_offset < order[i - 1]->file_offset + order[i - 1]->bytes) {
            char text[80];
            set_subject(c, "tensor", order[i]->name, strlen(order[i]->name));
            status = fail(c, SLUICE_STATUS_FORMAT, (size_t)order[i]->file_offset,
                          "its data overlaps that of tensor '%s'",
                          sl_gguf_printable(text, sizeof(text), order[i - 1]->name,
                                            strlen(order[i - 1]->name)));
        }
    }
    sl_free(order);
    return status;
}

enum sluice_status sl_gguf_part_parse(struct sl_gguf *file, size_t index, struct sl_gguf_keys *keys,
                                      struct sluice_error *err)
{
    struct sl_gguf_part *part = &file->parts[index];
    struct cursor c = {.data = part->map.data,
                       .size = part->map.size,
                       .path = part->path,
                       .subject = "header",
                       .err = err};
    SL_TRY(parse_version(&c, part));
    uint64_t n_tensors;
    uint64_t n_keys;
    SL_TRY(take_count(&c, "the number of tensors", MIN_TENSOR_BYTES, &n_tensors));
    SL_TRY(take_count(&c, "the number of keys", MIN_KEY_BYTES, &n_keys));
    for (uint64_t i = 0; i < n_keys; i++) {
        SL_TRY(parse_key(&c, file, keys, i));
    }
    SL_TRY(parse_alignment(&c, part, keys));
    const size_t first = file->n_tensors;
    for (uint64_t i = 0; i < n_tensors; i++) {
        SL_TRY(parse_tensor(&c, file, index, i));
    }
    SL_TRY(place_tensors(&c, file, index, first));
    return check_overlaps(&c, file, first);
}
