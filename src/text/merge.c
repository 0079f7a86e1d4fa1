/* SPDX-License-Identifier: Apache-2.0
 *
 * The merge loop; see merge.h. A candidate is never removed from the heap when a neighbour changes:
 * symbols only grow to the right and keep their start, so a candidate still holds exactly when both
 * symbols live and their lengths add up to the one noted.
 */
#include "text/merge.h"

#include "base/error.h"
#include "base/mem.h"

void sl_merger_finish(struct sl_merger *merger)
{
    sl_free(merger->symbols);
    sl_free(merger->heap);
    *merger = (struct sl_merger){0};
}

enum sluice_status sl_merger_push(struct sl_merger *merger, uint32_t start, uint32_t length,
                                  int32_t id, struct sluice_error *err)
{
    if (merger->n_symbols == merger->max_symbols) {
        const size_t max = merger->max_symbols < 32 ? 64 : merger->max_symbols * 2;
        struct sl_symbol *symbols = sl_realloc(SL_MEM_TEXT, merger->symbols, max, sizeof(*symbols));
        SL_CHECK(symbols != NULL, OUT_OF_MEMORY, err, "no memory for %zu symbols of a text", max);
        merger->symbols = symbols;
        merger->max_symbols = max;
    }
    merger->symbols[merger->n_symbols++] =
        (struct sl_symbol){.start = start, .length = length, .id = id};
    return SLUICE_STATUS_OK;
}

static enum sluice_status heap_push(struct sl_merger *merger, struct sl_merge_candidate item,
                                    struct sluice_error *err)
{
    if (merger->n_heap == merger->max_heap) {
        const size_t max = merger->max_heap < 32 ? 64 : merger->max_heap * 2;
        struct sl_merge_candidate *heap = sl_realloc(SL_MEM_TEXT, merger->heap, max, sizeof(*heap));
        SL_CHECK(heap != NULL, OUT_OF_MEMORY, err, "no memory for %zu merges of a text", max);
        merger->heap = heap;
        merger->max_heap = max;
    }
    struct sl_merge_candidate *heap = merger->heap;
    size_t i = merger->n_heap++;
    while (i > 0 && heap[(i - 1) / 2].key > item.key) {
        heap[i] = heap[(i - 1) / 2];
        i = (i - 1) / 2;
    }
    heap[i] = item;
    return SLUICE_STATUS_OK;
}

static struct sl_merge_candidate heap_pop(struct sl_merger *merger)
{
    struct sl_merge_candidate *heap = merger->heap;
    const struct sl_merge_candidate top = heap[0];
    const struct sl_merge_candidate last = heap[--merger->n_heap];
    const size_t n = merger->n_heap;
    size_t i = 0;
    for (;;) {
        size_t child = 2 * i + 1;
        if (child >= n) {
            break;
        }
        if (child + 1 < n && heap[child + 1].key < heap[child].key) {
            child++;
        }
        if (heap[child].key >= last.key) {
            break;
        }
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = last;
    return top;
}

static enum sluice_status consider(struct sl_merger *merger, int32_t left, int32_t right,
                                   sl_merge_fn *fn, const void *context, struct sluice_error *err)
{
    if (left < 0 || right < 0) {
        return SLUICE_STATUS_OK;
    }
    const struct sl_symbol *l = &merger->symbols[left];
    const struct sl_symbol *r = &merger->symbols[right];
    uint32_t priority;
    int32_t merged;
    if (!fn(context, l, r, &priority, &merged)) {
        return SLUICE_STATUS_OK;
    }
    return heap_push(merger,
                     (struct sl_merge_candidate){
                         .key = (uint64_t)priority << 32 | (uint32_t)left,
                         .right = right,
                         .merged = merged,
                         .length = l->length + r->length,
                     },
                     err);
}

enum sluice_status sl_merger_run(struct sl_merger *merger, sl_merge_fn *fn, const void *context,
                                 struct sluice_error *err)
{
    struct sl_symbol *symbols = merger->symbols;
    const int32_t n = (int32_t)merger->n_symbols;
    merger->n_heap = 0;
    for (int32_t i = 0; i < n; i++) {
        symbols[i].prev = i - 1;
        symbols[i].next = i + 1 < n ? i + 1 : -1;
    }
    for (int32_t i = 0; i + 1 < n; i++) {
        SL_TRY(consider(merger, i, i + 1, fn, context, err));
    }
    while (merger->n_heap > 0) {
        const struct sl_merge_candidate top = heap_pop(merger);
        const int32_t left = (int32_t)(top.key & UINT32_MAX);
        struct sl_symbol *l = &symbols[left];
        struct sl_symbol *r = &symbols[top.right];
        if (l->length == 0 || r->length == 0 || l->length + r->length != top.length) {
            continue;
        }
        l->length = top.length;
        l->id = top.merged;
        l->next = r->next;
        r->length = 0;
        if (r->next >= 0) {
            symbols[r->next].prev = left;
        }
        SL_TRY(consider(merger, l->prev, left, fn, context, err));
        SL_TRY(consider(merger, left, l->next, fn, context, err));
    }
    return SLUICE_STATUS_OK;
}
