/* SPDX-License-Identifier: Apache-2.0
 *
 * The one list of tests that every device passes.
 */
#ifndef SL_TESTS_DEVICE_TESTS_H
#define SL_TESTS_DEVICE_TESTS_H

#include "device/device.h"

/* Run all tests on the device; returns the number that failed. `prefix` names the group. */
int device_tests_run(const char *prefix, struct sl_device *dev);

/* The parts of the list, one file each. */
int device_tests_run_queues(const char *prefix, struct sl_device *dev);
int device_tests_run_kv(const char *prefix, struct sl_device *dev);
int device_tests_run_ops(const char *prefix, struct sl_device *dev);

#endif
