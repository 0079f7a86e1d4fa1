/* SPDX-License-Identifier: Apache-2.0
 *
 * The log sink. The library never prints: it calls a sink that the host sets (default: none; the
 * command sets standard error).
 */
#ifndef SL_BASE_LOG_H
#define SL_BASE_LOG_H

enum sl_log_level { SL_LOG_ERROR, SL_LOG_WARN, SL_LOG_INFO, SL_LOG_DEBUG };

typedef void sl_log_fn(void *user, enum sl_log_level level, const char *message);

/* Set the sink (NULL: drop). Call before other threads log. */
void sl_log_set_sink(sl_log_fn *fn, void *user, enum sl_log_level most);
void sl_log(enum sl_log_level level, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
