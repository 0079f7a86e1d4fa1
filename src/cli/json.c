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

/* cJSON keeps numbers as doubles; raw text keeps all digits of a 64-bit integer. */
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
    attach(json, parent, key, isfinite(value) ? cJSON_CreateNumber(value) : cJSON_CreateNull());
}

void sl_json_bool(struct sl_json *json, cJSON *parent, const char *key, bool value)
{
    attach(json, parent, key, cJSON_CreateBool(value));
}

/* Length of the UTF-8 character at `p`, 0 when there is none. */
static size_t utf8_length(const unsigned char *p, size_t left)
{
    if (p[0] < 0x80) {
        return 1;
    }
    const size_t n = p[0] >= 0xc2 && p[0] < 0xe0   ? 2
                     : p[0] >= 0xe0 && p[0] < 0xf0 ? 3
                     : p[0] >= 0xf0 && p[0] < 0xf5 ? 4
                                                   : 0;
    if (n == 0 || n > left) {
        return 0;
    }
    for (size_t i = 1; i < n; i++) {
        if ((p[i] & 0xc0) != 0x80) {
            return 0;
        }
    }
    const bool overlong = (p[0] == 0xe0 && p[1] < 0xa0) || (p[0] == 0xf0 && p[1] < 0x90);
    const bool outside = (p[0] == 0xed && p[1] > 0x9f) || (p[0] == 0xf4 && p[1] > 0x8f);
    return overlong || outside ? 0 : n;
}

void sl_json_text(struct sl_json *json, cJSON *parent, const char *key, const char *text,
                  size_t length)
{
    char *copy = length < SIZE_MAX / 4 ? sl_alloc(SL_MEM_CLI, length * 3 + 1) : NULL;
    if (copy == NULL) {
        json->failed = true;
        return;
    }
    size_t n = 0;
    for (size_t i = 0; i < length;) {
        const unsigned char *p = (const unsigned char *)text + i;
        const size_t bytes = *p == 0 ? 0 : utf8_length(p, length - i);
        if (bytes == 0) { /* also a zero byte, which would end the C string */
            memcpy(copy + n, "\xef\xbf\xbd", 3);
            n += 3;
            i++;
        } else {
            memcpy(copy + n, p, bytes);
            n += bytes;
            i += bytes;
        }
    }
    copy[n] = '\0';
    attach(json, parent, key, cJSON_CreateString(copy));
    sl_free(copy);
}

void sl_json_string(struct sl_json *json, cJSON *parent, const char *key, const char *text)
{
    sl_json_text(json, parent, key, text, strlen(text));
}
