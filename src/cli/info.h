/* SPDX-License-Identifier: Apache-2.0
 *
 * What the text and the JSON form of `sluice info` share.
 */
#ifndef SL_CLI_INFO_H
#define SL_CLI_INFO_H

#include <stdio.h>

#include "gguf/gguf.h"

struct sl_info_totals {
    uint64_t n_params;
    uint64_t bytes;
    struct {
        size_t n_tensors;
        uint64_t bytes;
        uint64_t n_params;
    } by_type[SL_TYPE_N];
};

void sl_info_count(const struct sl_gguf *file, struct sl_info_totals *out);
uint64_t sl_info_n_items(const struct sl_gguf_tensor *tensor);
/* An item of a u64 value, over its whole range. */
uint64_t sl_info_item_u64(const struct sl_gguf_value *value, uint64_t index);

enum sluice_status sl_info_print_json(FILE *out, const struct sl_gguf *file,
                                      struct sluice_error *err);

#endif
