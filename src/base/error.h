/* SPDX-License-Identifier: Apache-2.0
 *
 * Filling `struct sluice_error`, and the check-and-return macros used everywhere.
 */
#ifndef SL_BASE_ERROR_H
#define SL_BASE_ERROR_H

#include <sluice/status.h>

/* Write `status` and the formatted message to `err` (may be NULL) and return `status`. */
enum sluice_status sl_error_set(struct sluice_error *err, enum sluice_status status,
                                const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Put "prefix: " before the message that `err` (may be NULL) already holds. */
void sl_error_prefix(struct sluice_error *err, const char *format, ...)
    __attribute__((format(printf, 2, 3)));

/* Return with a message unless `cond` holds. For functions that own nothing yet. */
#define SL_CHECK(cond, status, err, ...)                                                           \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            return sl_error_set((err), SLUICE_STATUS_##status, __VA_ARGS__);                       \
        }                                                                                          \
    } while (0)

/* Return the status of `call` unless it is OK. */
#define SL_TRY(call)                                                                               \
    do {                                                                                           \
        const enum sluice_status sl_try_status = (call);                                           \
        if (sl_try_status != SLUICE_STATUS_OK) {                                                   \
            return sl_try_status;                                                                  \
        }                                                                                          \
    } while (0)

/* The same for functions with one clean-up label: expects `status` and label `out` in scope. */
#define SL_TRY_OUT(call)                                                                           \
    do {                                                                                           \
        status = (call);                                                                           \
        if (status != SLUICE_STATUS_OK) {                                                          \
            goto out;                                                                              \
        }                                                                                          \
    } while (0)

#endif
