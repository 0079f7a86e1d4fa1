/* SPDX-License-Identifier: Apache-2.0
 *
 * The device test list on the first GPU. Without one the program says why and counts as skipped
 * (exit status 77), unless SLUICE_REQUIRE_GPU is set: then it fails.
 */
#include <stdio.h>
#include <stdlib.h>

#include "base/mem.h"
#include "device/device_tests.h"
#include "test.h"

#define EXIT_SKIPPED 77

static struct sluice_error err;

static void test_gpu_present(void **state)
{
    (void)state;
    if (getenv("SLUICE_REQUIRE_GPU")) {
        fail_msg("%s", err.message);
    }
    skip();
}

static void test_no_such_gpu(void **state)
{
    (void)state;
    struct sl_device *dev = (struct sl_device *)&err;
    assert_status(sl_device_cuda_create(&dev, 1000, &err), DEVICE);
    assert_null(dev);
    assert_mentions(err, "1000");
}

int main(void)
{
    const size_t blocks = sl_mem_n_blocks();
    struct sl_device *dev;
    if (sl_device_cuda_create(&dev, 0, &err) != SLUICE_STATUS_OK) {
        printf("no GPU tests: %s\n", err.message);
        const struct CMUnitTest tests[] = {cmocka_unit_test(test_gpu_present)};
        const int n_failed = cmocka_run_group_tests_name("cuda", tests, NULL, NULL);
        return n_failed ? n_failed : EXIT_SKIPPED;
    }
    int n_failed = device_tests_run("cuda", dev);
    sl_device_destroy(&dev);
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_no_such_gpu)};
    n_failed += cmocka_run_group_tests_name("cuda: errors", tests, NULL, NULL);
    if (sl_mem_n_blocks() != blocks) {
        printf("memory was leaked\n");
        n_failed++;
    }
    return n_failed;
}
