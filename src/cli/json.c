/* SPDX-License-Identifier: Apache-2.0
 *
 * Helpers around libcjson.
 */
#include "cli/json.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/mem.h"
#include "cli/units.h"
#include "text/utf8.h"

void sl_json_init(struct sl_json *json)
{
    json->root = cJSON_CreateObject();
    json->failed = json->root == NULL;
}

void sl_json_finish(struct sl_json *json)
{
    cJSON_Delete(json->root);
    *json = (struct sl_json){0};
}

enum sluice_status sl_json_print(FILE *out, struct sl_json *json, struct sluice_error *err)
{
    char *text = json->failed ? NULL : cJSON_Print(json->root);
    if (text != NULL) {
        fprintf(out, "%s\n", text);
        cJSON_free(text);
    }
    sl_json_finish(json);
    SL_CHECK(text != NULL, OUT_OF_MEMORY, err, "out of memory for the JSON text");
    return SLUICE_STATUS_OK;
}

/* Hand `item` to its parent; NULL when memory ran out. */
static cJSON *attach(struct sl_json *json, cJSON *parent, const char *key, cJSON *item)
{
    if (json->failed || parent == NULL || item == NULL) {
        json->failed = true;
        cJSON_Delete(item);
        return NULL;
    }
    const cJSON_bool good =
        key != NULL ? cJSON_AddItemToObject(parent, key, item) : cJSON_AddItemToArray(parent, item);
    if (!good) {
        json->failed = true;
        cJSON_Delete(item);
        return NULL;
    }
    return item;
}

cJSON *sl_json_object(struct sl_json *json, cJSON *parent, const char *key)
{
    return attach(json, parent, key, cJSON_CreateObject());
}

cJSON *sl_json_array(struct sl_json *json, cJSON *parent, const char *key)
{
    return attach(json, parent, key, cJSON_CreateArray());
}

/* cJSON keeps numbers as doubles and drops their last digits; raw text keeps them all. */
void sl_json_u64(struct sl_json *json, cJSON *parent, const char *key, uint64_t value)
{
    char text[32];
    snprintf(text, sizeof(text), "%" PRIu64, value);
    attach(json, parent, key, cJSON_CreateRaw(text));
}

void sl_json_i64(struct sl_json *json, cJSON *parent, const char *key, int64_t value)
{
    char text[32];
    snprintf(text, sizeof(text), "%" PRId64, value);
    attach(json, parent, key, cJSON_CreateRaw(text));
}

void sl_json_number(struct sl_json *json, cJSON *parent, const char *key, double value)
{
    char text[40];
    attach(json, parent, key,
           isfinite(value) ? cJSON_CreateRaw(sl_number_format(text, sizeof(text), value, false))
                           : cJSON_CreateNull());
}

void sl_json_float(struct sl_json *json, cJSON *parent, const char *key, float value)
{
    char text[40];
    attach(json, parent, key,
           isfinite(value)
               ? cJSON_CreateRaw(sl_number_format(text, sizeof(text), (double)value, true))
               : cJSON_CreateNull());
}

void sl_json_bool(struct sl_json *json, cJSON *parent, const char *key, bool value)
{
    attach(json, parent, key, cJSON_CreateBool(value));
}

void sl_json_text(struct sl_json *json, cJSON *parent, const char *key, const char *text,
                  size_t length)
{
    char *copy = length < SIZE_MAX / 5 ? sl_alloc(SL_MEM_CLI, length * 4 + 1) : NULL;
    if (copy == NULL) {
        json->failed = true;
        return;
    }
    /* A zero byte would end the C string: 0xff is as ill-formed as it is unwelcome, and becomes
     * U+FFFD with the others. */
    char *source = copy + length * 3 + 1;
    for (size_t i = 0; i < length; i++) {
        source[i] = text[i] == '\0' ? '\xff' : text[i];
    }
    copy[sl_utf8_repair(copy, source, length)] = '\0';
    attach(json, parent, key, cJSON_CreateString(copy));
    sl_free(copy);
}

void sl_json_string(struct sl_json *json, cJSON *parent, const char *key, const char *text)
{
    sl_json_text(json, parent, key, text, strlen(text));
}
