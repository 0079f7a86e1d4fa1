/* SPDX-License-Identifier: Apache-2.0
 *
 * All host memory of the library. Counted by tag; tests can make the N-th call fail and can forbid
 * allocation (the token path allocates nothing).
 */
#ifndef SL_BASE_MEM_H
#define SL_BASE_MEM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum sl_mem_tag {
    SL_MEM_BASE,
    SL_MEM_GGUF,
    SL_MEM_QUANT,
    SL_MEM_CPU,
    SL_MEM_DEVICE,
    SL_MEM_MODEL,
    SL_MEM_PLAN,
    SL_MEM_EXEC,
    SL_MEM_TEXT,
    SL_MEM_CLI,
    SL_MEM_N_TAGS,
};

/* Like malloc, zeroed calloc and realloc; NULL on failure or overflow. 16-byte aligned. */
void *sl_alloc(enum sl_mem_tag tag, size_t bytes);
void *sl_calloc(enum sl_mem_tag tag, size_t count, size_t item_bytes);
/* Grow or shrink an array; on failure NULL and the old block stays valid. */
void *sl_realloc(enum sl_mem_tag tag, void *block, size_t count, size_t item_bytes);
char *sl_strdup(enum sl_mem_tag tag, const char *text);
char *sl_strndup(enum sl_mem_tag tag, const char *text, size_t length);
/* `alignment` is a power of two up to 2 MiB; large blocks ask for transparent huge pages.
 * Freed by sl_free too. */
void *sl_alloc_aligned(enum sl_mem_tag tag, size_t bytes, size_t alignment);
void sl_free(void *block); /* accepts NULL */

/* Bytes now held under a tag, and blocks now held in all. */
size_t sl_mem_bytes(enum sl_mem_tag tag);
size_t sl_mem_n_blocks(void);

/* Test hooks. After `n` more successful calls every allocation fails (`sticky`) or one fails.
 * n < 0 turns it off. `sl_mem_fault_fired` tells whether one failed since the last arming. */
void sl_mem_fail_after(int64_t n, bool sticky);
bool sl_mem_fault_fired(void);
/* While forbidden, any allocation aborts the test with a message (asserts builds only). */
void sl_mem_forbid(bool forbidden);

#endif
