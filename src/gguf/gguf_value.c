/* SPDX-License-Identifier: Apache-2.0
 *
 * Values of keys: kinds, items of arrays and the typed getters. Values lie unaligned in the
 * mapping, so every number is put together from bytes.
 */
#include "gguf/gguf_internal.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const struct {
    const char *name;
    uint8_t bytes; /* 0: no fixed size */
} kinds[] = {
    [SL_GGUF_U8] = {"u8", 1},       [SL_GGUF_I8] = {"i8", 1},     [SL_GGUF_U16] = {"u16", 2},
    [SL_GGUF_I16] = {"i16", 2},     [SL_GGUF_U32] = {"u32", 4},   [SL_GGUF_I32] = {"i32", 4},
    [SL_GGUF_F32] = {"f32", 4},     [SL_GGUF_BOOL] = {"bool", 1}, [SL_GGUF_STRING] = {"string", 0},
    [SL_GGUF_ARRAY] = {"array", 0}, [SL_GGUF_U64] = {"u64", 8},   [SL_GGUF_I64] = {"i64", 8},
    [SL_GGUF_F64] = {"f64", 8},
};
#define N_KINDS (sizeof(kinds) / sizeof(kinds[0]))

const char *sl_gguf_kind_name(enum sl_gguf_kind kind)
{
    return (size_t)kind < N_KINDS ? kinds[kind].name : "unknown";
}

size_t sl_gguf_kind_bytes(uint32_t kind)
{
    return kind < N_KINDS ? kinds[kind].bytes : 0;
}

/* An integer of any kind, as far as it fits 64 bits with sign. */
struct integer {
    bool is_integer;
    bool above; /* a u64 over INT64_MAX */
    int64_t number;
};

static struct integer read_integer(enum sl_gguf_kind kind, const uint8_t *p)
{
    struct integer out = {.is_integer = true};
    switch (kind) {
    case SL_GGUF_U8:
    case SL_GGUF_BOOL:
        out.number = *p;
        break;
    case SL_GGUF_I8:
        out.number = (int8_t)*p;
        break;
    case SL_GGUF_U16:
        out.number = sl_gguf_u16(p);
        break;
    case SL_GGUF_I16:
        out.number = (int16_t)sl_gguf_u16(p);
        break;
    case SL_GGUF_U32:
        out.number = sl_gguf_u32(p);
        break;
    case SL_GGUF_I32:
        out.number = (int32_t)sl_gguf_u32(p);
        break;
    case SL_GGUF_I64:
    case SL_GGUF_U64:
        out.number = (int64_t)sl_gguf_u64(p);
        out.above = kind == SL_GGUF_U64 && out.number < 0;
        break;
    default:
        out.is_integer = false;
        break;
    }
    return out;
}

static double read_float(enum sl_gguf_kind kind, const uint8_t *p)
{
    if (kind == SL_GGUF_F32) {
        const union {
            uint32_t u;
            float f;
        } v = {.u = sl_gguf_u32(p)};
        return (double)v.f;
    }
    const union {
        uint64_t u;
        double f;
    } v = {.u = sl_gguf_u64(p)};
    return v.f;
}

static const uint8_t *item_data(const struct sl_gguf_value *value, uint64_t index)
{
    return value->data + index * sl_gguf_kind_bytes(value->item_kind);
}

double sl_gguf_item_number(const struct sl_gguf_value *value, uint64_t index)
{
    const uint8_t *p = item_data(value, index);
    if (value->item_kind == SL_GGUF_F32 || value->item_kind == SL_GGUF_F64) {
        return read_float(value->item_kind, p);
    }
    const struct integer v = read_integer(value->item_kind, p);
    return v.above ? (double)(uint64_t)v.number : (double)v.number;
}

int64_t sl_gguf_item_int(const struct sl_gguf_value *value, uint64_t index)
{
    const uint8_t *p = item_data(value, index);
    if (value->item_kind == SL_GGUF_F32 || value->item_kind == SL_GGUF_F64) {
        const double v = read_float(value->item_kind, p);
        if (isnan(v)) {
            return 0;
        }
        return v >= 0x1p63 ? INT64_MAX : v <= -0x1p63 ? INT64_MIN : (int64_t)v;
    }
    const struct integer v = read_integer(value->item_kind, p);
    return v.above ? INT64_MAX : v.number;
}

static struct sl_gguf_string string_at(const uint8_t *p)
{
    return (struct sl_gguf_string){.data = (const char *)p + 8, .length = (size_t)sl_gguf_u64(p)};
}

struct sl_gguf_string sl_gguf_item_string(const struct sl_gguf *file,
                                          const struct sl_gguf_value *value, uint64_t index)
{
    (void)file;
    if (value->kind == SL_GGUF_STRING) {
        return string_at(value->data);
    }
    /* A handle is the first member of its entry. */
    const struct sl_gguf_entry *entry = (const struct sl_gguf_entry *)value;
    return string_at(value->data + entry->string_at[index]);
}

/* ----------------------------------------------------------------- getters */

static enum sluice_status find(const struct sl_gguf_keys *keys, const char *path, const char *key,
                               const struct sl_gguf_value **out, struct sluice_error *err)
{
    *out = sl_gguf_keys_find(keys, key);
    SL_CHECK(*out != NULL, FORMAT, err, "%s: key '%s' is missing", sl_gguf_short_path(path), key);
    return SLUICE_STATUS_OK;
}

static enum sluice_status wrong_kind(const char *path, const char *key,
                                     const struct sl_gguf_value *value, const char *wanted,
                                     struct sluice_error *err)
{
    return sl_error_set(err, SLUICE_STATUS_FORMAT, "%s: key '%s', byte %llu: is %s, not %s",
                        sl_gguf_short_path(path), key, (unsigned long long)value->file_offset,
                        sl_gguf_kind_name(value->kind), wanted);
}

enum sluice_status sl_gguf_keys_get_u32(const struct sl_gguf_keys *keys, const char *path,
                                        const char *key, uint32_t *out, struct sluice_error *err)
{
    *out = 0;
    const struct sl_gguf_value *value;
    SL_TRY(find(keys, path, key, &value, err));
    const struct integer v =
        value->kind == SL_GGUF_ARRAY ? (struct integer){0} : read_integer(value->kind, value->data);
    if (!v.is_integer) {
        return wrong_kind(path, key, value, "an integer", err);
    }
    if (v.above || v.number < 0 || v.number > UINT32_MAX) {
        char number[32];
        snprintf(number, sizeof(number), v.above ? "%llu" : "%lld", (unsigned long long)v.number);
        return sl_error_set(err, SLUICE_STATUS_FORMAT,
                            "%s: key '%s', byte %llu: is %s (allowed: 0 to %lu)",
                            sl_gguf_short_path(path), key, (unsigned long long)value->file_offset,
                            number, (unsigned long)UINT32_MAX);
    }
    *out = (uint32_t)v.number;
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_gguf_get_u32(const struct sl_gguf *file, const char *key, uint32_t *out,
                                   struct sluice_error *err)
{
    return sl_gguf_keys_get_u32(&file->keys, file->parts[0].path, key, out, err);
}

enum sluice_status sl_gguf_get_f32(const struct sl_gguf *file, const char *key, float *out,
                                   struct sluice_error *err)
{
    *out = 0;
    const char *path = file->parts[0].path;
    const struct sl_gguf_value *value;
    SL_TRY(find(&file->keys, path, key, &value, err));
    if (value->kind == SL_GGUF_STRING || value->kind == SL_GGUF_ARRAY ||
        value->kind == SL_GGUF_BOOL) {
        return wrong_kind(path, key, value, "a number", err);
    }
    const double number = sl_gguf_item_number(value, 0);
    if (isfinite(number) && !isfinite((float)number)) {
        return sl_error_set(
            err, SLUICE_STATUS_FORMAT, "%s: key '%s', byte %llu: %g is outside the range of f32",
            sl_gguf_short_path(path), key, (unsigned long long)value->file_offset, number);
    }
    *out = (float)number;
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_gguf_get_bool(const struct sl_gguf *file, const char *key, bool *out,
                                    struct sluice_error *err)
{
    *out = false;
    const char *path = file->parts[0].path;
    const struct sl_gguf_value *value;
    SL_TRY(find(&file->keys, path, key, &value, err));
    if (value->kind != SL_GGUF_BOOL) {
        return wrong_kind(path, key, value, "bool", err);
    }
    *out = *value->data != 0;
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_gguf_get_string(const struct sl_gguf *file, const char *key,
                                      struct sl_gguf_string *out, struct sluice_error *err)
{
    *out = (struct sl_gguf_string){.data = "", .length = 0};
    const char *path = file->parts[0].path;
    const struct sl_gguf_value *value;
    SL_TRY(find(&file->keys, path, key, &value, err));
    if (value->kind != SL_GGUF_STRING) {
        return wrong_kind(path, key, value, "a string", err);
    }
    *out = string_at(value->data);
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_gguf_get_array(const struct sl_gguf *file, const char *key,
                                     const struct sl_gguf_value **out, struct sluice_error *err)
{
    const char *path = file->parts[0].path;
    const struct sl_gguf_value *value;
    *out = NULL;
    SL_TRY(find(&file->keys, path, key, &value, err));
    if (value->kind != SL_GGUF_ARRAY) {
        return wrong_kind(path, key, value, "an array", err);
    }
    *out = value;
    return SLUICE_STATUS_OK;
}
