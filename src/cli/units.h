/* SPDX-License-Identifier: Apache-2.0
 *
 * Sizes as people write them. K, M, G, T and KiB, MiB, GiB, TiB count in 1024; KB, MB, GB, TB in
 * 1000. Case does not matter, fractions are allowed with a unit, a bare number is bytes.
 */
#ifndef SL_CLI_UNITS_H
#define SL_CLI_UNITS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <sluice/status.h>

enum sluice_status sl_bytes_parse(const char *text, uint64_t *out, struct sluice_error *err);

/* A VRAM budget: a size, a share of the card, or the program's choice. */
enum sl_budget_kind { SL_BUDGET_AUTO, SL_BUDGET_BYTES, SL_BUDGET_PERCENT };
struct sl_budget {
    enum sl_budget_kind kind;
    uint64_t bytes;
    double percent; /* 0 .. 100 */
};
enum sluice_status sl_budget_parse(const char *text, struct sl_budget *out,
                                   struct sluice_error *err);

/* "1.50 GiB", "512 B"; returns `buffer`. */
const char *sl_bytes_format(char *buffer, size_t buffer_bytes, uint64_t bytes);
/* "8.03 B", "135 M", "950"; returns `buffer`. */
const char *sl_count_format(char *buffer, size_t buffer_bytes, uint64_t count);

/* As few digits as read back to the same double, or float when `single`; returns `buffer`. */
const char *sl_number_format(char *buffer, size_t buffer_bytes, double number, bool single);

#endif
