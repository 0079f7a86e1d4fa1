/* SPDX-License-Identifier: Apache-2.0
 *
 * Selection and sorting; see select.h. Keys are all different (each holds its index), so runs of
 * equal logits do not slow the partitioning down.
 */
#include "text/select.h"

#include <string.h>

#define SMALL 16    /* at most so many keys are sorted by insertion */
#define STRETCH 256 /* values that are looked at together */

uint64_t sl_select_key(float value, uint32_t index)
{
    uint32_t bits;
    value += 0.0f; /* -0 becomes 0: they are equal and must not be ordered */
    memcpy(&bits, &value, sizeof(bits));
    const uint32_t rising = bits >> 31 ? ~bits : bits | UINT32_C(0x80000000);
    return (uint64_t)~rising << 32 | index;
}

static void swap_keys(uint64_t *a, uint64_t *b)
{
    const uint64_t t = *a;
    *a = *b;
    *b = t;
}

static void sort_by_insertion(uint64_t *keys, size_t n)
{
    for (size_t i = 1; i < n; i++) {
        const uint64_t key = keys[i];
        size_t j = i;
        while (j > 0 && keys[j - 1] > key) {
            keys[j] = keys[j - 1];
            j--;
        }
        keys[j] = key;
    }
}

/* Split n > 2 keys around the median of three; returns how many are below the pivot, which stands
 * there. */
static size_t partition(uint64_t *keys, size_t n)
{
    const size_t mid = n / 2;
    if (keys[mid] < keys[0]) {
        swap_keys(&keys[mid], &keys[0]);
    }
    if (keys[n - 1] < keys[0]) {
        swap_keys(&keys[n - 1], &keys[0]);
    }
    if (keys[n - 1] < keys[mid]) {
        swap_keys(&keys[n - 1], &keys[mid]);
    }
    const uint64_t pivot = keys[mid];
    swap_keys(&keys[mid], &keys[n - 2]);
    size_t i = 0;
    size_t j = n - 2;
    for (;;) {
        do {
            i++;
        } while (keys[i] < pivot);
        do {
            j--;
        } while (keys[j] > pivot);
        if (i >= j) {
            break;
        }
        swap_keys(&keys[i], &keys[j]);
    }
    swap_keys(&keys[i], &keys[n - 2]);
    return i;
}

void sl_select_sort(uint64_t *keys, size_t n)
{
    while (n > SMALL) {
        const size_t below = partition(keys, n);
        const size_t above = n - below - 1;
        /* Recursion takes the smaller side, so the stack stays logarithmic. */
        if (below < above) {
            sl_select_sort(keys, below);
            keys += below + 1;
            n = above;
        } else {
            sl_select_sort(keys + below + 1, above);
            n = below;
        }
    }
    sort_by_insertion(keys, n);
}

void sl_select_smallest(uint64_t *keys, size_t n, size_t k)
{
    uint64_t *part = keys;
    size_t size = n;
    size_t wanted = k; /* of the smallest in `part` */
    while (size > SMALL && wanted > 0 && wanted < size) {
        const size_t below = partition(part, size);
        if (wanted <= below) {
            size = below;
        } else {
            part += below + 1;
            size -= below + 1;
            wanted -= below + 1;
        }
    }
    if (size <= SMALL) {
        sort_by_insertion(part, size);
    }
    sl_select_sort(keys, k);
}

/* Restore the heap (largest key on top) from `i` down. */
static void sift_down(uint64_t *heap, size_t n, size_t i)
{
    const uint64_t key = heap[i];
    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= n) {
            break;
        }
        if (child + 1 < n && heap[child + 1] > heap[child]) {
            child++;
        }
        if (heap[child] <= key) {
            break;
        }
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = key;
}

void sl_select_largest_values(uint64_t *keys, size_t k, const float *values, size_t n)
{
    for (size_t i = 0; i < k; i++) {
        keys[i] = sl_select_key(values[i], (uint32_t)i);
    }
    for (size_t i = k / 2; i-- > 0;) {
        sift_down(keys, k, i);
    }
    float least = values[sl_select_index(keys[0])];
    for (size_t begin = k; begin < n; begin += STRETCH) {
        const size_t end = n - begin < STRETCH ? n : begin + STRETCH;
        int n_larger = 0; /* none in most stretches: found without a branch a value */
        for (size_t i = begin; i < end; i++) {
            n_larger += values[i] > least;
        }
        for (size_t i = begin; n_larger > 0 && i < end; i++) {
            /* A later equal value has a larger index and loses, so only larger ones go in. */
            if (values[i] > least) {
                keys[0] = sl_select_key(values[i], (uint32_t)i);
                sift_down(keys, k, 0);
                least = values[sl_select_index(keys[0])];
            }
        }
    }
    sl_select_sort(keys, k);
}
