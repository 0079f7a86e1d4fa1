/* SPDX-License-Identifier: Apache-2.0
 *
 * Status codes and the error report that every fallible Sluice call fills.
 */
#ifndef SLUICE_STATUS_H
#define SLUICE_STATUS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* X(name, number, text). The numbers are part of the ABI: never reuse one. */
#define SLUICE_STATUS_LIST(X)                                                                      \
    X(OK, 0, "success")                                                                            \
    X(INVALID_ARGUMENT, 1, "invalid argument")                                                     \
    X(OUT_OF_MEMORY, 2, "out of memory")                                                           \
    X(IO, 3, "input/output error")                                                                 \
    X(FORMAT, 4, "malformed file")                                                                 \
    X(UNSUPPORTED, 5, "not supported")                                                             \
    X(BUDGET, 6, "VRAM budget too small")                                                          \
    X(DEVICE, 7, "device error")                                                                   \
    X(CANCELLED, 8, "cancelled")                                                                   \
    X(INTERNAL, 9, "internal error")

enum sluice_status {
#define SLUICE_STATUS_ENUM(name, number, text) SLUICE_STATUS_##name = number,
    SLUICE_STATUS_LIST(SLUICE_STATUS_ENUM)
#undef SLUICE_STATUS_ENUM
};

/* What went wrong. `message` names the thing, where it is and what would work.
 * `needed` and `allowed` carry bytes for SLUICE_STATUS_BUDGET (the smallest budget that works and
 * the one given) and are 0 otherwise. Owned by the caller; may be reused between calls. */
struct sluice_error {
    enum sluice_status status;
    uint64_t needed;
    uint64_t allowed;
    char message[512];
};

#if defined(SLUICE_BUILD_SHARED) && defined(__GNUC__)
#define SLUICE_API __attribute__((visibility("default")))
#else
#define SLUICE_API
#endif

/* Short English text of a status ("malformed file"); never NULL. Thread-safe. */
SLUICE_API const char *sluice_status_text(enum sluice_status status);

/* Identifier of a status ("FORMAT"); never NULL. Thread-safe. */
SLUICE_API const char *sluice_status_name(enum sluice_status status);

#ifdef __cplusplus
}
#endif
#endif
