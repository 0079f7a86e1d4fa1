/* SPDX-License-Identifier: Apache-2.0
 *
 * Sizes as people write them.
 */
#include "cli/units.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/error.h"

/* A plain decimal number: digits, perhaps a point and digits. Nothing that depends on the locale,
 * and no sign, exponent, "inf" or "nan". Returns what follows, or NULL. */
static const char *scan_decimal(const char *text, double *number, bool *fraction)
{
    const char *p = text;
    double value = 0;
    while (isdigit((unsigned char)*p)) {
        value = value * 10 + (*p++ - '0');
    }
    size_t n_digits = (size_t)(p - text);
    *fraction = *p == '.';
    if (*fraction) {
        const char *start = ++p;
        double scale = 1;
        while (isdigit((unsigned char)*p)) {
            scale /= 10;
            value += (*p++ - '0') * scale;
        }
        n_digits += (size_t)(p - start);
    }
    *number = value;
    return n_digits == 0 ? NULL : p;
}

static bool find_unit(const char *text, double *out)
{
    static const struct {
        const char *name;
        double bytes;
    } units[] = {
        {"B", 1},        {"K", 0x1p10},   {"M", 0x1p20},   {"G", 0x1p30},   {"T", 0x1p40},
        {"KiB", 0x1p10}, {"MiB", 0x1p20}, {"GiB", 0x1p30}, {"TiB", 0x1p40}, {"KB", 1e3},
        {"MB", 1e6},     {"GB", 1e9},     {"TB", 1e12},
    };
    for (size_t i = 0; i < sizeof(units) / sizeof(units[0]); i++) {
        if (strcasecmp(units[i].name, text) == 0) {
            *out = units[i].bytes;
            return true;
        }
    }
    return false;
}

/* All digits: exact, beyond what a double can hold. */
static bool parse_whole(const char *text, uint64_t *out)
{
    uint64_t value = 0;
    for (const char *p = text; *p != '\0'; p++) {
        if (!isdigit((unsigned char)*p) || __builtin_mul_overflow(value, (uint64_t)10, &value) ||
            __builtin_add_overflow(value, (uint64_t)(*p - '0'), &value)) {
            return false;
        }
    }
    *out = value;
    return *text != '\0';
}

enum sluice_status sl_bytes_parse(const char *text, uint64_t *out, struct sluice_error *err)
{
    *out = 0;
    if (parse_whole(text, out)) {
        return SLUICE_STATUS_OK;
    }
    *out = 0;
    double number;
    double unit = 1;
    bool fraction;
    const char *rest = scan_decimal(text, &number, &fraction);
    while (rest != NULL && *rest == ' ') {
        rest++;
    }
    const bool has_unit = rest != NULL && *rest != '\0';
    SL_CHECK(rest != NULL && (has_unit ? find_unit(rest, &unit) : !fraction), INVALID_ARGUMENT, err,
             "'%s' is not a size (examples: 6G, 1.5GiB, 512M, 1000000)", text);
    SL_CHECK(number * unit < 0x1p63, INVALID_ARGUMENT, err, "'%s' is too large", text);
    *out = (uint64_t)(number * unit);
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_budget_parse(const char *text, struct sl_budget *out,
                                   struct sluice_error *err)
{
    *out = (struct sl_budget){.kind = SL_BUDGET_AUTO};
    if (strcasecmp(text, "auto") == 0) {
        return SLUICE_STATUS_OK;
    }
    double number;
    bool fraction;
    const char *rest = scan_decimal(text, &number, &fraction);
    if (rest != NULL && strcmp(rest, "%") == 0) {
        SL_CHECK(number <= 100, INVALID_ARGUMENT, err, "'%s' is more than all of the card", text);
        *out = (struct sl_budget){.kind = SL_BUDGET_PERCENT, .percent = number};
        return SLUICE_STATUS_OK;
    }
    out->kind = SL_BUDGET_BYTES;
    const enum sluice_status status = sl_bytes_parse(text, &out->bytes, NULL);
    SL_CHECK(status == SLUICE_STATUS_OK, INVALID_ARGUMENT, err,
             "'%s' is not a VRAM budget (examples: 6G, 512MiB, 50%%, auto, 0)", text);
    return SLUICE_STATUS_OK;
}

const char *sl_bytes_format(char *buffer, size_t buffer_bytes, uint64_t bytes)
{
    static const char *const units[] = {"KiB", "MiB", "GiB", "TiB"};
    if (bytes < 1024) {
        snprintf(buffer, buffer_bytes, "%u B", (unsigned)bytes);
        return buffer;
    }
    double value = (double)bytes / 1024;
    size_t unit = 0;
    while (value >= 1023.995 && unit < 3) {
        value /= 1024;
        unit++;
    }
    snprintf(buffer, buffer_bytes, "%.2f %s", value, units[unit]);
    return buffer;
}

const char *sl_count_format(char *buffer, size_t buffer_bytes, uint64_t count)
{
    const double value = (double)count;
    if (count < 100000) {
        snprintf(buffer, buffer_bytes, "%u", (unsigned)count);
    } else if (value < 999.5e6) {
        snprintf(buffer, buffer_bytes, value < 9.995e6 ? "%.2f M" : "%.0f M", value / 1e6);
    } else {
        snprintf(buffer, buffer_bytes, "%.2f B", value / 1e9);
    }
    return buffer;
}

const char *sl_number_format(char *buffer, size_t buffer_bytes, double number, bool single)
{
    for (int digits = 6; digits <= 17; digits++) {
        snprintf(buffer, buffer_bytes, "%.*g", digits, number);
        const double back = strtod(buffer, NULL);
        if (single ? (float)back == (float)number : back == number) {
            break;
        }
    }
    return buffer;
}
