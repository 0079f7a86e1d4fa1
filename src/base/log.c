/* SPDX-License-Identifier: Apache-2.0
 *
 * The log sink: one of the two mutable globals of the library. It is set before threads start.
 */
#include "base/log.h"

#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

static struct {
    sl_log_fn *fn;
    void *user;
    enum sl_log_level most;
} sink;

void sl_log_set_sink(sl_log_fn *fn, void *user, enum sl_log_level most)
{
    sink.fn = fn;
    sink.user = user;
    sink.most = most;
}

void sl_log(enum sl_log_level level, const char *format, ...)
{
    if (!sink.fn || level > sink.most) {
        return;
    }
    char message[1024];
    va_list args;
    va_start(args, format);
    const int length = vsnprintf(message, sizeof message, format, args);
    va_end(args);
    if (length >= 0) {
        sink.fn(sink.user, level, message);
    }
}
