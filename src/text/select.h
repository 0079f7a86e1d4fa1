/* SPDX-License-Identifier: Apache-2.0
 *
 * Ordering of logits without allocation: a logit and its token become one integer that sorts by
 * falling logit and, among equals, by rising token; then integers are selected and sorted in place.
 */
#ifndef SL_TEXT_SELECT_H
#define SL_TEXT_SELECT_H

#include <stddef.h>
#include <stdint.h>

/* `value` is no NaN. */
uint64_t sl_select_key(float value, uint32_t index);

static inline uint32_t sl_select_index(uint64_t key)
{
    return (uint32_t)key;
}

/* Rising order. */
void sl_select_sort(uint64_t *keys, size_t n);

/* Move the `k` smallest of n keys to the front and sort them. Linear in n. */
void sl_select_smallest(uint64_t *keys, size_t n, size_t k);

/* The keys of the `k` largest values [n], sorted, into `keys` [k], 0 < k <= n. One pass over the
 * values with a heap of k: for k far below n. */
void sl_select_largest_values(uint64_t *keys, size_t k, const float *values, size_t n);

#endif
