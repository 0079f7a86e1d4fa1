/* SPDX-License-Identifier: Apache-2.0
 *
 * The device test list on the first GPU, and once more with the kernels that are left for hosts
 * that share their graphics context, where those differ. Without a GPU the program says why and
 * counts as skipped (exit status 77), unless SLUICE_REQUIRE_GPU is set: then it fails.
 *
 *   test_device_cuda [PATTERN]   only tests whose names match ("test_linear*"), as slow tools want
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

static bool has_own_kernels(struct sl_device *dev)
{
    struct sl_device_info info;
    return dev->vt->info(dev, &info, &err) == SLUICE_STATUS_OK && info.compute_capability == 90;
}

/* The list with no kernel that needs more than others have. */
static int run_portable(void)
{
    struct sl_device *dev;
    setenv("SLUICE_CUDA_PORTABLE", "1", 1);
    const enum sluice_status status = sl_device_cuda_create(&dev, 0, &err);
    unsetenv("SLUICE_CUDA_PORTABLE");
    if (status != SLUICE_STATUS_OK) {
        printf("portable kernels: %s\n", err.message);
        return 1;
    }
    const int n_failed = device_tests_run("cuda, portable kernels", dev);
    sl_device_destroy(&dev);
    return n_failed;
}

int main(int argc, char **argv)
{
    if (argc > 1) {
        cmocka_set_test_filter(argv[1]);
    }
    const size_t blocks = sl_mem_n_blocks();
    struct sl_device *dev;
    if (sl_device_cuda_create(&dev, 0, &err) != SLUICE_STATUS_OK) {
        printf("no GPU tests: %s\n", err.message);
        const struct CMUnitTest tests[] = {cmocka_unit_test(test_gpu_present)};
        const int n_failed = cmocka_run_group_tests_name("cuda", tests, NULL, NULL);
        return n_failed ? n_failed : EXIT_SKIPPED;
    }
    int n_failed = device_tests_run("cuda", dev);
    const bool twice = has_own_kernels(dev);
    sl_device_destroy(&dev);
    if (twice) {
        n_failed += run_portable();
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_no_such_gpu)};
    n_failed += cmocka_run_group_tests_name("cuda: errors", tests, NULL, NULL);
    if (sl_mem_n_blocks() != blocks) {
        printf("memory was leaked\n");
        n_failed++;
    }
    return n_failed;
}
