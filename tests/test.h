/* SPDX-License-Identifier: Apache-2.0
 *
 * What every test program includes: cmocka with the headers it needs before it, and an assertion
 * that shows the error message of a failed call.
 */
#ifndef SL_TESTS_TEST_H
#define SL_TESTS_TEST_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include <sluice/status.h>

/* The call succeeds; otherwise show what it said. `e` is a struct sluice_error. */
#define assert_ok(call, e)                                                                         \
    do {                                                                                           \
        const enum sluice_status test_status = (call);                                             \
        if (test_status != SLUICE_STATUS_OK) {                                                     \
            fail_msg("%s: %s: %s", #call, sluice_status_name(test_status), (e).message);           \
        }                                                                                          \
    } while (0)

/* The call fails with the status. */
#define assert_status(call, wanted)                                                                \
    assert_string_equal(sluice_status_name(call), sluice_status_name(SLUICE_STATUS_##wanted))

/* The message holds the text. */
#define assert_mentions(e, text)                                                                   \
    do {                                                                                           \
        if (!strstr((e).message, (text))) {                                                        \
            fail_msg("message lacks \"%s\": %s", (text), (e).message);                             \
        }                                                                                          \
    } while (0)

#endif
