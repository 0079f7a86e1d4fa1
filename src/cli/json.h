/* SPDX-License-Identifier: Apache-2.0
 *
 * Small helpers around libcjson for what commands print: exact integers, texts of any bytes, and
 * one out-of-memory check at the end instead of one a call.
 */
#ifndef SL_CLI_JSON_H
#define SL_CLI_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cjson/cJSON.h>

#include <sluice/status.h>

/* A document being built. `failed` is set when memory runs out; later calls then do nothing. */
struct sl_json {
    cJSON *root;
    bool failed;
};

void sl_json_init(struct sl_json *json); /* root: an object */
void sl_json_finish(struct sl_json *json);
/* Print it with a newline, then sl_json_finish. */
enum sluice_status sl_json_print(FILE *out, struct sl_json *json, struct sluice_error *err);

/* Each adds to an object under `key`, or to an array when `key` is NULL. */
cJSON *sl_json_object(struct sl_json *json, cJSON *parent, const char *key);
cJSON *sl_json_array(struct sl_json *json, cJSON *parent, const char *key);
void sl_json_u64(struct sl_json *json, cJSON *parent, const char *key, uint64_t value);
void sl_json_i64(struct sl_json *json, cJSON *parent, const char *key, int64_t value);
/* What is not finite becomes null. */
void sl_json_number(struct sl_json *json, cJSON *parent, const char *key, double value);
void sl_json_float(struct sl_json *json, cJSON *parent, const char *key, float value);
void sl_json_bool(struct sl_json *json, cJSON *parent, const char *key, bool value);
/* What is not UTF-8 becomes U+FFFD. */
void sl_json_text(struct sl_json *json, cJSON *parent, const char *key, const char *text,
                  size_t length);
void sl_json_string(struct sl_json *json, cJSON *parent, const char *key, const char *text);

#endif
