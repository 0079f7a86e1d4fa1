/* SPDX-License-Identifier: Apache-2.0
 *
 * All host memory. Every block is preceded by a 32-byte header that knows its size, tag and the
 * address that malloc gave:
 *
 *     raw ... padding ... | header | block ...
 *                                  ^ aligned as asked
 *
 * so one sl_free serves plain and aligned blocks. Counters are atomic; the library may allocate
 * from any thread.
 */
#include "base/mem.h"

#include <assert.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define HEADER_BYTES sizeof(struct header)
#define HEADER_LIVE UINT32_C(0x51ce11fe)
#define HEADER_DEAD UINT32_C(0x51cedead)
#define HUGE_PAGE_BYTES ((size_t)2 << 20)
/* Below this, huge pages would waste more than the saved TLB misses are worth. */
#define HUGE_MIN_BYTES ((size_t)4 << 20)

struct header {
    void *raw;
    size_t bytes;
    uint32_t tag;
    uint32_t state;
    uint64_t unused; /* keeps the block behind it on a 16-byte boundary */
};
static_assert(sizeof(struct header) == 32, "blocks must stay 16-byte aligned");

static atomic_size_t held_bytes[SL_MEM_N_TAGS];
static atomic_size_t held_blocks;

static atomic_int_fast64_t fail_after = -1;
static atomic_bool fail_sticky;
static atomic_bool fail_fired;
static atomic_bool forbidden_now;

void sl_mem_fail_after(int64_t n, bool sticky)
{
    atomic_store(&fail_sticky, sticky);
    atomic_store(&fail_fired, false);
    atomic_store(&fail_after, n < 0 ? -1 : n);
}

bool sl_mem_fault_fired(void)
{
    return atomic_load(&fail_fired);
}

void sl_mem_forbid(bool forbidden)
{
    atomic_store(&forbidden_now, forbidden);
}

/* Whether the call may go on: counts down an armed fault and refuses while forbidden. Without
 * asserts a forbidden call fails, which the caller reports as out of memory. */
static bool admit(void)
{
    if (atomic_load_explicit(&forbidden_now, memory_order_relaxed)) {
#ifndef NDEBUG
        fputs("sluice: memory was allocated while that is forbidden\n", stderr);
        abort();
#else
        return false;
#endif
    }
    int_fast64_t left = atomic_load_explicit(&fail_after, memory_order_relaxed);
    while (left >= 0) {
        const bool fails = left == 0;
        const int_fast64_t next = fails ? (atomic_load(&fail_sticky) ? 0 : -1) : left - 1;
        if (atomic_compare_exchange_weak(&fail_after, &left, next)) {
            if (fails) {
                atomic_store(&fail_fired, true);
            }
            return !fails;
        }
    }
    return true;
}

static struct header *header_of(void *block)
{
    struct header *header = (struct header *)((char *)block - HEADER_BYTES);
    assert(header->state == HEADER_LIVE && "not a block, or freed twice");
    return header;
}

static void count_block(const struct header *header)
{
    atomic_fetch_add_explicit(&held_bytes[header->tag], header->bytes, memory_order_relaxed);
    atomic_fetch_add_explicit(&held_blocks, 1, memory_order_relaxed);
}

static void uncount_block(const struct header *header)
{
    atomic_fetch_sub_explicit(&held_bytes[header->tag], header->bytes, memory_order_relaxed);
    atomic_fetch_sub_explicit(&held_blocks, 1, memory_order_relaxed);
}

/* Write the header in front of `block` and count it. */
static void *adopt(void *raw, char *block, enum sl_mem_tag tag, size_t bytes)
{
    struct header *header = (struct header *)(block - HEADER_BYTES);
    *header = (struct header){.raw = raw, .bytes = bytes, .tag = tag, .state = HEADER_LIVE};
    count_block(header);
    return block;
}

void *sl_alloc(enum sl_mem_tag tag, size_t bytes)
{
    if (!admit() || bytes > PTRDIFF_MAX - HEADER_BYTES) {
        return NULL;
    }
    char *raw = malloc(bytes + HEADER_BYTES);
    return raw ? adopt(raw, raw + HEADER_BYTES, tag, bytes) : NULL;
}

void *sl_calloc(enum sl_mem_tag tag, size_t count, size_t item_bytes)
{
    size_t bytes;
    if (!admit() || __builtin_mul_overflow(count, item_bytes, &bytes) ||
        bytes > PTRDIFF_MAX - HEADER_BYTES) {
        return NULL;
    }
    char *raw = calloc(1, bytes + HEADER_BYTES);
    return raw ? adopt(raw, raw + HEADER_BYTES, tag, bytes) : NULL;
}

void *sl_realloc(enum sl_mem_tag tag, void *block, size_t count, size_t item_bytes)
{
    size_t bytes;
    if (__builtin_mul_overflow(count, item_bytes, &bytes) || bytes > PTRDIFF_MAX - HEADER_BYTES) {
        return NULL;
    }
    if (!block) {
        return sl_alloc(tag, bytes);
    }
    struct header *header = header_of(block);
    if (header->raw != header) { /* an aligned block: move it by hand */
        void *moved = sl_alloc(tag, bytes);
        if (moved) {
            memcpy(moved, block, bytes < header->bytes ? bytes : header->bytes);
            sl_free(block);
        }
        return moved;
    }
    if (!admit()) {
        return NULL;
    }
    const struct header old = *header;
    char *raw = realloc(header, bytes + HEADER_BYTES);
    if (!raw) {
        return NULL;
    }
    uncount_block(&old);
    return adopt(raw, raw + HEADER_BYTES, tag, bytes);
}

char *sl_strdup(enum sl_mem_tag tag, const char *text)
{
    return sl_strndup(tag, text, strlen(text));
}

char *sl_strndup(enum sl_mem_tag tag, const char *text, size_t length)
{
    const size_t n = strnlen(text, length);
    char *copy = sl_alloc(tag, n + 1);
    if (copy) {
        memcpy(copy, text, n);
        copy[n] = '\0';
    }
    return copy;
}

void *sl_alloc_aligned(enum sl_mem_tag tag, size_t bytes, size_t alignment)
{
    assert(alignment != 0 && (alignment & (alignment - 1)) == 0 && alignment <= HUGE_PAGE_BYTES);
    if (!admit()) {
        return NULL;
    }
    const bool huge = bytes >= HUGE_MIN_BYTES;
    size_t align = alignment < 16 ? 16 : alignment;
    align = huge ? HUGE_PAGE_BYTES : align;
    if (bytes > PTRDIFF_MAX - HEADER_BYTES - align) {
        return NULL;
    }
    char *raw = malloc(bytes + HEADER_BYTES + align);
    if (!raw) {
        return NULL;
    }
    const uintptr_t first = (uintptr_t)raw + HEADER_BYTES;
    char *block = raw + HEADER_BYTES + (-first & (align - 1));
#ifdef MADV_HUGEPAGE
    if (huge) { /* only whole huge pages inside the block; a refusal costs speed alone */
        madvise(block, bytes & ~(HUGE_PAGE_BYTES - 1), MADV_HUGEPAGE);
    }
#endif
    return adopt(raw, block, tag, bytes);
}

void sl_free(void *block)
{
    if (!block) {
        return;
    }
    struct header *header = header_of(block);
    uncount_block(header);
    header->state = HEADER_DEAD;
    free(header->raw);
}

size_t sl_mem_bytes(enum sl_mem_tag tag)
{
    return atomic_load(&held_bytes[tag]);
}

size_t sl_mem_n_blocks(void)
{
    return atomic_load(&held_blocks);
}
