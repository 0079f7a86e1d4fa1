/* SPDX-License-Identifier: Apache-2.0
 *
 * Host memory: alignment, counting, overflow, the armed fault and the ban on allocation.
 */
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/mem.h"
#include "test.h"

static void test_counts(void **state)
{
    (void)state;
    const size_t blocks = sl_mem_n_blocks();
    const size_t text_bytes = sl_mem_bytes(SL_MEM_TEXT);
    char *a = sl_alloc(SL_MEM_TEXT, 100);
    char *b = sl_calloc(SL_MEM_TEXT, 10, 7);
    char *c = sl_strdup(SL_MEM_TEXT, "hello");
    char *d = sl_strndup(SL_MEM_TEXT, "hello", 2);
    assert_non_null(a);
    for (int i = 0; i < 70; i++) {
        assert_int_equal(b[i], 0);
    }
    assert_string_equal(c, "hello");
    assert_string_equal(d, "he");
    assert_int_equal(sl_mem_bytes(SL_MEM_TEXT) - text_bytes, 100 + 70 + 6 + 3);
    assert_int_equal(sl_mem_n_blocks() - blocks, 4);
    a[99] = 'x';
    a = sl_realloc(SL_MEM_TEXT, a, 100, 1000);
    assert_int_equal(a[99], 'x');
    assert_int_equal(sl_mem_bytes(SL_MEM_TEXT) - text_bytes, 100000 + 70 + 6 + 3);
    sl_free(a);
    sl_free(b);
    sl_free(c);
    sl_free(d);
    sl_free(NULL);
    assert_int_equal(sl_mem_n_blocks(), blocks);
    assert_int_equal(sl_mem_bytes(SL_MEM_TEXT), text_bytes);
}

static void test_alignment(void **state)
{
    (void)state;
    const size_t sizes[] = {0, 1, 4096, (size_t)5 << 20};
    for (size_t alignment = 1; alignment <= (size_t)2 << 20; alignment *= 2) {
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
            char *block = sl_alloc_aligned(SL_MEM_CPU, sizes[i], alignment);
            assert_non_null(block);
            assert_int_equal((uintptr_t)block % alignment, 0);
            assert_int_equal((uintptr_t)block % 16, 0);
            if (sizes[i]) {
                block[0] = block[sizes[i] - 1] = 1;
            }
            sl_free(block);
        }
    }
    /* An aligned block can be grown, keeping what it held. */
    unsigned char *block = sl_alloc_aligned(SL_MEM_CPU, 64, 4096);
    memset(block, 0x5a, 64);
    block = sl_realloc(SL_MEM_CPU, block, 128, 1);
    for (int i = 0; i < 64; i++) {
        assert_int_equal(block[i], 0x5a);
    }
    sl_free(block);
}

static void test_overflow(void **state)
{
    (void)state;
    const size_t blocks = sl_mem_n_blocks();
    assert_null(sl_calloc(SL_MEM_BASE, SIZE_MAX / 2, 3));
    assert_null(sl_alloc(SL_MEM_BASE, SIZE_MAX - 4));
    assert_null(sl_alloc_aligned(SL_MEM_BASE, SIZE_MAX - 64, 64));
    char *kept = sl_alloc(SL_MEM_BASE, 8);
    assert_null(sl_realloc(SL_MEM_BASE, kept, SIZE_MAX / 4, 8));
    memcpy(kept, "kept...", 8); /* still valid */
    sl_free(kept);
    assert_int_equal(sl_mem_n_blocks(), blocks);
}

static void test_fault(void **state)
{
    (void)state;
    sl_mem_fail_after(2, false);
    void *a = sl_alloc(SL_MEM_BASE, 1);
    void *b = sl_calloc(SL_MEM_BASE, 1, 1);
    assert_non_null(a);
    assert_non_null(b);
    assert_false(sl_mem_fault_fired());
    assert_null(sl_realloc(SL_MEM_BASE, a, 50, 1));
    assert_true(sl_mem_fault_fired());
    void *c = sl_alloc_aligned(SL_MEM_BASE, 1, 64); /* one only */
    assert_non_null(c);

    sl_mem_fail_after(0, true);
    assert_false(sl_mem_fault_fired());
    assert_null(sl_alloc(SL_MEM_BASE, 1));
    assert_null(sl_calloc(SL_MEM_BASE, 1, 1));
    assert_null(sl_strdup(SL_MEM_BASE, "x"));
    assert_null(sl_alloc_aligned(SL_MEM_BASE, 1, 64));
    sl_mem_fail_after(-1, false);
    assert_false(sl_mem_fault_fired());
    sl_free(a);
    sl_free(b);
    sl_free(c);
}

/* With asserts an allocation while forbidden ends the program, without them it fails. */
static void test_forbid(void **state)
{
    (void)state;
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        const struct rlimit no_core = {0};
        setrlimit(RLIMIT_CORE, &no_core);
        signal(SIGABRT, SIG_DFL);
        if (!freopen("/dev/null", "w", stderr)) {
            _exit(3);
        }
        sl_mem_forbid(true);
        _exit(sl_alloc(SL_MEM_BASE, 1) ? 1 : 2);
    }
    int result;
    assert_int_equal(waitpid(child, &result, 0), child);
#ifdef NDEBUG
    assert_true(WIFEXITED(result));
    assert_int_equal(WEXITSTATUS(result), 2);
#else
    assert_true(WIFSIGNALED(result));
    assert_int_equal(WTERMSIG(result), SIGABRT);
#endif
    sl_mem_forbid(true);
    sl_mem_forbid(false);
    void *block = sl_alloc(SL_MEM_BASE, 1);
    assert_non_null(block);
    sl_free(block);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_counts),   cmocka_unit_test(test_alignment),
        cmocka_unit_test(test_overflow), cmocka_unit_test(test_fault),
        cmocka_unit_test(test_forbid),
    };
    return cmocka_run_group_tests_name("mem", tests, NULL, NULL);
}
