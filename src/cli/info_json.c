/* SPDX-License-Identifier: Apache-2.0
 *
 * sluice info --json. Arrays are shortened to their first items beside their length, as in the
 * text form: a vocabulary would drown the rest.
 */
#include <string.h>

#include "base/error.h"
#include "cli/info.h"
#include "cli/json.h"

#define SHOWN_ITEMS 8

static void add_item(struct sl_json *json, cJSON *parent, const char *key,
                     const struct sl_gguf *file, const struct sl_gguf_value *value, uint64_t i)
{
    switch (value->item_kind) {
    case SL_GGUF_STRING: {
        const struct sl_gguf_string text = sl_gguf_item_string(file, value, i);
        sl_json_text(json, parent, key, text.data, text.length);
        break;
    }
    case SL_GGUF_F32:
        sl_json_float(json, parent, key, (float)sl_gguf_item_number(value, i));
        break;
    case SL_GGUF_F64:
        sl_json_number(json, parent, key, sl_gguf_item_number(value, i));
        break;
    case SL_GGUF_BOOL:
        sl_json_bool(json, parent, key, sl_gguf_item_int(value, i) != 0);
        break;
    case SL_GGUF_U64:
        sl_json_u64(json, parent, key, sl_info_item_u64(value, i));
        break;
    default:
        sl_json_i64(json, parent, key, sl_gguf_item_int(value, i));
        break;
    }
}

static void add_value(struct sl_json *json, cJSON *parent, const struct sl_gguf *file, size_t index)
{
    const struct sl_gguf_value *value = sl_gguf_value(file, index);
    cJSON *entry = sl_json_object(json, parent, NULL);
    sl_json_string(json, entry, "key", sl_gguf_key(file, index));
    sl_json_string(json, entry, "kind", sl_gguf_kind_name(value->kind));
    if (value->kind != SL_GGUF_ARRAY) {
        add_item(json, entry, "value", file, value, 0);
        return;
    }
    sl_json_string(json, entry, "item_kind", sl_gguf_kind_name(value->item_kind));
    sl_json_u64(json, entry, "count", value->count);
    cJSON *items = sl_json_array(json, entry, "first");
    for (uint64_t i = 0; i < value->count && i < SHOWN_ITEMS; i++) {
        add_item(json, items, NULL, file, value, i);
    }
}

static void add_tensor(struct sl_json *json, cJSON *parent, const struct sl_gguf_tensor *tensor)
{
    cJSON *entry = sl_json_object(json, parent, NULL);
    sl_json_string(json, entry, "name", tensor->name);
    sl_json_string(json, entry, "type", sl_type_name((uint32_t)tensor->type));
    cJSON *dims = sl_json_array(json, entry, "dims");
    for (uint32_t i = 0; i < tensor->n_dims; i++) {
        sl_json_i64(json, dims, NULL, tensor->dims[i]);
    }
    sl_json_u64(json, entry, "bytes", tensor->bytes);
    sl_json_u64(json, entry, "file", tensor->file_index);
    sl_json_u64(json, entry, "offset", tensor->file_offset);
}

static void add_totals(struct sl_json *json, const struct sl_gguf *file)
{
    struct sl_info_totals totals;
    sl_info_count(file, &totals);
    cJSON *types = sl_json_array(json, json->root, "types");
    for (uint32_t type = 0; type < SL_TYPE_N; type++) {
        if (totals.by_type[type].n_tensors == 0) {
            continue;
        }
        cJSON *entry = sl_json_object(json, types, NULL);
        sl_json_string(json, entry, "type", sl_type_name(type));
        sl_json_u64(json, entry, "tensors", totals.by_type[type].n_tensors);
        sl_json_u64(json, entry, "parameters", totals.by_type[type].n_params);
        sl_json_u64(json, entry, "bytes", totals.by_type[type].bytes);
    }
    sl_json_u64(json, json->root, "parameters", totals.n_params);
    sl_json_u64(json, json->root, "weight_bytes", totals.bytes);
}

enum sluice_status sl_info_print_json(FILE *out, const struct sl_gguf *file,
                                      struct sluice_error *err)
{
    struct sl_json json;
    sl_json_init(&json);
    cJSON *files = sl_json_array(&json, json.root, "files");
    for (size_t i = 0; i < sl_gguf_n_files(file); i++) {
        cJSON *entry = sl_json_object(&json, files, NULL);
        sl_json_string(&json, entry, "path", sl_gguf_path(file, i));
        sl_json_u64(&json, entry, "bytes", sl_gguf_file_bytes(file, i));
    }
    sl_json_u64(&json, json.root, "version", sl_gguf_version(file));
    sl_json_u64(&json, json.root, "alignment", sl_gguf_alignment(file));
    cJSON *metadata = sl_json_array(&json, json.root, "metadata");
    for (size_t i = 0; i < sl_gguf_n_values(file); i++) {
        add_value(&json, metadata, file, i);
    }
    cJSON *tensors = sl_json_array(&json, json.root, "tensors");
    for (size_t i = 0; i < sl_gguf_n_tensors(file); i++) {
        add_tensor(&json, tensors, sl_gguf_tensor(file, i));
    }
    add_totals(&json, file);
    return sl_json_print(out, &json, err);
}
