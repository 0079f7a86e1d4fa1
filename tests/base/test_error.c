/* SPDX-License-Identifier: Apache-2.0
 *
 * Error reports: names and texts of the list, formatting, prefixes, and messages that are too long.
 */
#include <string.h>

#include "base/error.h"
#include "base/log.h"
#include "test.h"

static void test_names(void **state)
{
    (void)state;
    assert_string_equal(sluice_status_name(SLUICE_STATUS_OK), "OK");
    assert_string_equal(sluice_status_name(SLUICE_STATUS_BUDGET), "BUDGET");
    assert_string_equal(sluice_status_text(SLUICE_STATUS_FORMAT), "malformed file");
    assert_string_equal(sluice_status_name((enum sluice_status)999), "UNKNOWN");
    assert_string_equal(sluice_status_text((enum sluice_status)999), "unknown status");
}

static void test_set_and_prefix(void **state)
{
    (void)state;
    struct sluice_error err = {.needed = 7, .allowed = 8};
    assert_int_equal(sl_error_set(&err, SLUICE_STATUS_IO, "no %s in %d", "disk", 5),
                     SLUICE_STATUS_IO);
    assert_int_equal(err.status, SLUICE_STATUS_IO);
    assert_int_equal(err.needed, 0); /* nothing stays from an earlier error */
    assert_int_equal(err.allowed, 0);
    assert_string_equal(err.message, "no disk in 5");
    sl_error_prefix(&err, "file %d", 3);
    assert_string_equal(err.message, "file 3: no disk in 5");

    assert_int_equal(sl_error_set(NULL, SLUICE_STATUS_FORMAT, "dropped"), SLUICE_STATUS_FORMAT);
    sl_error_prefix(NULL, "dropped");
}

static void test_long_messages(void **state)
{
    (void)state;
    struct sluice_error err;
    char text[2000];
    for (size_t i = 0; i + 2 < sizeof text; i += 2) { /* two-byte characters, none may be cut */
        memcpy(text + i, "\xc3\xa9", 3);
    }
    for (int shift = 0; shift < 3; shift++) {
        sl_error_set(&err, SLUICE_STATUS_IO, "%.*s%s", shift, "abc", text);
        const size_t length = strlen(err.message);
        assert_true(length < sizeof err.message && length > sizeof err.message - 8);
        assert_string_equal(err.message + length - 3, "...");
        assert_int_equal((unsigned char)err.message[length - 4], 0xa9);
        sl_error_prefix(&err, "again");
        assert_true(strlen(err.message) < sizeof err.message);
        assert_memory_equal(err.message, "again: ", 7);
    }
}

struct seen {
    int n;
    char last[256];
};

static void remember(void *user, enum sl_log_level level, const char *message)
{
    (void)level;
    struct seen *seen = user;
    seen->n++;
    strncpy(seen->last, message, sizeof seen->last - 1);
}

static void test_log_levels(void **state)
{
    (void)state;
    struct seen seen = {0};
    sl_log(SL_LOG_ERROR, "nobody listens");
    sl_log_set_sink(remember, &seen, SL_LOG_WARN);
    sl_log(SL_LOG_INFO, "too quiet");
    assert_int_equal(seen.n, 0);
    sl_log(SL_LOG_WARN, "%d apples", 12);
    assert_int_equal(seen.n, 1);
    assert_string_equal(seen.last, "12 apples");
    sl_log_set_sink(NULL, NULL, SL_LOG_ERROR);
    sl_log(SL_LOG_ERROR, "nobody listens again");
    assert_int_equal(seen.n, 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_set_and_prefix),
        cmocka_unit_test(test_long_messages),
        cmocka_unit_test(test_log_levels),
    };
    return cmocka_run_group_tests_name("error", tests, NULL, NULL);
}
