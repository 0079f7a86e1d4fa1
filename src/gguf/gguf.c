/* SPDX-License-Identifier: Apache-2.0
 *
 * Opens GGUF files and joins the parts of a split model. A split model is named by its first part
 * ("NAME-00001-of-00003.gguf"); each part says which it is (split.no, from 0) and of how many
 * (split.count), and the first holds all the metadata.
 */
#include "gguf/gguf_internal.h"

#include <stdio.h>
#include <string.h>

#include "base/mem.h"

/* Five digits are what a part's name has room for. */
#define MAX_PARTS 99999
#define SPLIT_SUFFIX_BYTES (sizeof("-00001-of-00003.gguf") - 1)

const char *sl_gguf_printable(char *buffer, size_t buffer_bytes, const char *text, size_t length)
{
    static const char digits[] = "0123456789abcdef";
    size_t n = 0;
    for (size_t i = 0; i < length; i++) {
        const unsigned char ch = (unsigned char)text[i];
        const bool plain = ch >= 0x20 && ch < 0x7f && ch != '\\' && ch != '\'';
        if (n + 4 + 4 > buffer_bytes) { /* one escape, dots and NUL */
            memcpy(buffer + n, "...", 3);
            n += 3;
            break;
        }
        if (plain) {
            buffer[n++] = (char)ch;
        } else {
            const char escape[4] = {'\\', 'x', digits[ch >> 4], digits[ch & 15]};
            memcpy(buffer + n, escape, sizeof(escape));
            n += sizeof(escape);
        }
    }
    buffer[n] = '\0';
    return buffer;
}

const char *sl_gguf_short_path(const char *path)
{
    const size_t most = 160;
    const size_t length = strlen(path);
    if (length <= most) {
        return path;
    }
    /* Start at a folder if there is one, so that the name is not cut in its middle. */
    const char *tail = path + length - most;
    const char *slash = strchr(tail, '/');
    return slash != NULL && slash[1] != '\0' ? slash + 1 : tail;
}

void sl_gguf_keys_finish(struct sl_gguf_keys *keys)
{
    for (size_t i = 0; i < keys->n; i++) {
        sl_free(keys->entries[i].string_at);
    }
    sl_free(keys->entries);
    sl_gguf_table_finish(&keys->table);
    *keys = (struct sl_gguf_keys){0};
}

const struct sl_gguf_value *sl_gguf_keys_find(const struct sl_gguf_keys *keys, const char *key)
{
    const size_t index = sl_gguf_table_find(&keys->table, key, strlen(key));
    return index == SIZE_MAX ? NULL : &keys->entries[index].value;
}

/* ------------------------------------------------------------------- parts */

/* Map and parse the next part; `path` is taken. */
static enum sluice_status add_part(struct sl_gguf *file, char *path, struct sl_gguf_keys *keys,
                                   struct sluice_error *err)
{
    struct sl_gguf_part *parts =
        path == NULL ? NULL
                     : sl_realloc(SL_MEM_GGUF, file->parts, file->n_parts + 1, sizeof(*parts));
    if (parts == NULL) {
        sl_free(path);
        return sl_error_set(err, SLUICE_STATUS_OUT_OF_MEMORY, "out of memory for a model file");
    }
    file->parts = parts;
    const size_t index = file->n_parts++;
    parts[index] = (struct sl_gguf_part){.path = path};
    SL_TRY(sl_file_map_init(&parts[index].map, path, err));
    return sl_gguf_part_parse(file, index, keys, err);
}

static bool has_suffix(const char *path, const char *suffix)
{
    const size_t length = strlen(path);
    const size_t suffix_length = strlen(suffix);
    return length > suffix_length && strcmp(path + length - suffix_length, suffix) == 0;
}

/* The path of a part, from that of the first. */
static char *part_path(const char *first, uint32_t number, uint32_t count)
{
    const size_t length = strlen(first);
    char *path = sl_strdup(SL_MEM_GGUF, first);
    if (path != NULL) {
        snprintf(path + length - SPLIT_SUFFIX_BYTES, SPLIT_SUFFIX_BYTES + 1, "-%05u-of-%05u.gguf",
                 (number + 1) % (MAX_PARTS + 1), count % (MAX_PARTS + 1));
    }
    return path;
}

/* split.count of a set of keys; 1 when it is not there. */
static enum sluice_status split_count(const struct sl_gguf_keys *keys, const char *path,
                                      uint32_t *out, struct sluice_error *err)
{
    *out = 1;
    if (sl_gguf_keys_find(keys, "split.count") == NULL) {
        return SLUICE_STATUS_OK;
    }
    SL_TRY(sl_gguf_keys_get_u32(keys, path, "split.count", out, err));
    SL_CHECK(*out <= MAX_PARTS, FORMAT, err,
             "%s: key 'split.count', byte %llu: is %u (allowed: %d)", sl_gguf_short_path(path),
             (unsigned long long)sl_gguf_keys_find(keys, "split.count")->file_offset, *out,
             MAX_PARTS);
    *out = *out == 0 ? 1 : *out;
    return SLUICE_STATUS_OK;
}

/* A part must say that it is number `number` of `count`. */
static enum sluice_status check_split(const struct sl_gguf_keys *keys, const char *path,
                                      uint32_t number, uint32_t count, struct sluice_error *err)
{
    uint32_t its_count;
    uint32_t its_number;
    SL_TRY(split_count(keys, path, &its_count, err));
    SL_CHECK(its_count == count, FORMAT, err,
             "%s: key 'split.count', byte %llu: is %u, but the model has %u parts",
             sl_gguf_short_path(path),
             sl_gguf_keys_find(keys, "split.count") != NULL
                 ? (unsigned long long)sl_gguf_keys_find(keys, "split.count")->file_offset
                 : 0ull,
             its_count, count);
    SL_TRY(sl_gguf_keys_get_u32(keys, path, "split.no", &its_number, err));
    SL_CHECK(its_number == number, FORMAT, err,
             "%s: key 'split.no', byte %llu: is %u, but part %u was expected%s",
             sl_gguf_short_path(path),
             (unsigned long long)sl_gguf_keys_find(keys, "split.no")->file_offset, its_number,
             number, number == 0 ? "; give the first part (-00001-of-...)" : "");
    return SLUICE_STATUS_OK;
}

static enum sluice_status check_tensor_count(const struct sl_gguf *file, struct sluice_error *err)
{
    const char *key = "split.tensors.count";
    const struct sl_gguf_value *value = sl_gguf_find(file, key);
    if (value == NULL) {
        return SLUICE_STATUS_OK;
    }
    uint32_t count;
    SL_TRY(sl_gguf_get_u32(file, key, &count, err));
    SL_CHECK(count == file->n_tensors, FORMAT, err,
             "%s: key '%s', byte %llu: is %u, but the parts hold %zu tensors",
             sl_gguf_short_path(file->parts[0].path), key, (unsigned long long)value->file_offset,
             count, file->n_tensors);
    return SLUICE_STATUS_OK;
}

static enum sluice_status open_other_parts(struct sl_gguf *file, struct sluice_error *err)
{
    uint32_t count;
    SL_TRY(split_count(&file->keys, file->parts[0].path, &count, err));
    if (count <= 1) {
        return SLUICE_STATUS_OK;
    }
    SL_TRY(check_split(&file->keys, file->parts[0].path, 0, count, err));
    char suffix[SPLIT_SUFFIX_BYTES + 16];
    snprintf(suffix, sizeof(suffix), "-00001-of-%05u.gguf", count);
    SL_CHECK(has_suffix(file->parts[0].path, suffix), FORMAT, err,
             "%s: key 'split.count', byte %llu: is %u, but the name of the first of %u parts must "
             "end in '%s'",
             sl_gguf_short_path(file->parts[0].path),
             (unsigned long long)sl_gguf_find(file, "split.count")->file_offset, count, count,
             suffix);
    for (uint32_t i = 1; i < count; i++) {
        struct sl_gguf_keys keys = {0};
        enum sluice_status status =
            add_part(file, part_path(file->parts[0].path, i, count), &keys, err);
        if (status == SLUICE_STATUS_OK) {
            status = check_split(&keys, file->parts[i].path, i, count, err);
        } else if (status == SLUICE_STATUS_IO) {
            sl_error_prefix(err, "part %u of %u", i + 1, count);
        }
        sl_gguf_keys_finish(&keys);
        SL_TRY(status);
    }
    return check_tensor_count(file, err);
}

enum sluice_status sl_gguf_open(struct sl_gguf **out, const char *path, struct sluice_error *err)
{
    *out = NULL;
    struct sl_gguf *file = sl_calloc(SL_MEM_GGUF, 1, sizeof(*file));
    SL_CHECK(file != NULL, OUT_OF_MEMORY, err, "out of memory for '%s'", sl_gguf_short_path(path));
    enum sluice_status status = add_part(file, sl_strdup(SL_MEM_GGUF, path), &file->keys, err);
    if (status == SLUICE_STATUS_OK) {
        status = open_other_parts(file, err);
    }
    if (status != SLUICE_STATUS_OK) {
        sl_gguf_close(&file);
        return status;
    }
    *out = file;
    return SLUICE_STATUS_OK;
}

void sl_gguf_close(struct sl_gguf **file)
{
    struct sl_gguf *f = file == NULL ? NULL : *file;
    if (f == NULL) {
        return;
    }
    for (size_t i = 0; i < f->n_parts; i++) {
        sl_file_map_finish(&f->parts[i].map);
        sl_free(f->parts[i].path);
    }
    sl_free(f->parts);
    sl_gguf_keys_finish(&f->keys);
    sl_gguf_table_finish(&f->tensor_table);
    sl_free(f->tensors);
    sl_gguf_names_finish(&f->names);
    sl_free(f);
    *file = NULL;
}

/* --------------------------------------------------------------- accessors */

uint32_t sl_gguf_version(const struct sl_gguf *file)
{
    return file->parts[0].version;
}

uint32_t sl_gguf_alignment(const struct sl_gguf *file)
{
    return file->parts[0].alignment;
}

size_t sl_gguf_n_files(const struct sl_gguf *file)
{
    return file->n_parts;
}

const char *sl_gguf_path(const struct sl_gguf *file, size_t file_index)
{
    return file->parts[file_index].path;
}

uint64_t sl_gguf_file_bytes(const struct sl_gguf *file, size_t file_index)
{
    return file->parts[file_index].map.size;
}

const void *sl_gguf_mapping(const struct sl_gguf *file, size_t file_index, size_t *out_bytes)
{
    *out_bytes = file->parts[file_index].map.size;
    return file->parts[file_index].map.data;
}

size_t sl_gguf_n_tensors(const struct sl_gguf *file)
{
    return file->n_tensors;
}

const struct sl_gguf_tensor *sl_gguf_tensor(const struct sl_gguf *file, size_t index)
{
    return &file->tensors[index];
}

const struct sl_gguf_tensor *sl_gguf_find_tensor(const struct sl_gguf *file, const char *name)
{
    const size_t index = sl_gguf_table_find(&file->tensor_table, name, strlen(name));
    return index == SIZE_MAX ? NULL : &file->tensors[index];
}

size_t sl_gguf_n_values(const struct sl_gguf *file)
{
    return file->keys.n;
}

const char *sl_gguf_key(const struct sl_gguf *file, size_t index)
{
    return file->keys.entries[index].key;
}

const struct sl_gguf_value *sl_gguf_value(const struct sl_gguf *file, size_t index)
{
    return &file->keys.entries[index].value;
}

const struct sl_gguf_value *sl_gguf_find(const struct sl_gguf *file, const char *key)
{
    return sl_gguf_keys_find(&file->keys, key);
}
