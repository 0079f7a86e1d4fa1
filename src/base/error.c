/* SPDX-License-Identifier: Apache-2.0
 *
 * Status names and texts, both from the one list in the public header, and the filling of error
 * reports. A message that does not fit is cut at a UTF-8 character and ends in "...".
 */
#include "base/error.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

const char *sluice_status_text(enum sluice_status status)
{
    switch (status) {
#define STATUS_TEXT(name, number, text)                                                            \
    case SLUICE_STATUS_##name:                                                                     \
        return text;
        SLUICE_STATUS_LIST(STATUS_TEXT)
#undef STATUS_TEXT
    }
    return "unknown status";
}

const char *sluice_status_name(enum sluice_status status)
{
    switch (status) {
#define STATUS_NAME(name, number, text)                                                            \
    case SLUICE_STATUS_##name:                                                                     \
        return #name;
        SLUICE_STATUS_LIST(STATUS_NAME)
#undef STATUS_NAME
    }
    return "UNKNOWN";
}

/* Mark a message of `length` wanted bytes as cut when it did not fit. */
static void finish_message(char *message, size_t capacity, int length)
{
    if (length >= 0 && (size_t)length < capacity) {
        return;
    }
    size_t end = strlen(message);
    end = end > 3 ? end - 3 : 0;
    /* Do not leave half of a multi-byte character before the dots. */
    while (end > 0 && ((unsigned char)message[end] & 0xC0u) == 0x80u) {
        end--;
    }
    memcpy(message + end, "...", 4);
}

enum sluice_status sl_error_set(struct sluice_error *err, enum sluice_status status,
                                const char *format, ...)
{
    if (err) {
        err->status = status;
        err->needed = 0;
        err->allowed = 0;
        err->message[0] = '\0';
        va_list args;
        va_start(args, format);
        const int length = vsnprintf(err->message, sizeof err->message, format, args);
        va_end(args);
        finish_message(err->message, sizeof err->message, length);
    }
    return status;
}

void sl_error_prefix(struct sluice_error *err, const char *format, ...)
{
    if (!err) {
        return;
    }
    char text[sizeof err->message];
    text[0] = '\0';
    va_list args;
    va_start(args, format);
    int length = vsnprintf(text, sizeof text, format, args);
    va_end(args);
    finish_message(text, sizeof text, length);

    const size_t used = strlen(text);
    length = snprintf(text + used, sizeof text - used, ": %s", err->message);
    finish_message(text, sizeof text, (int)used + length);
    memcpy(err->message, text, sizeof text);
}
