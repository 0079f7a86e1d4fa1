/* SPDX-License-Identifier: Apache-2.0
 *
 * What all devices share: the end of their lives.
 */
#include "device/device.h"

void sl_device_destroy(struct sl_device **dev)
{
    if (dev && *dev) {
        struct sl_device *const gone = *dev;
        *dev = NULL;
        gone->vt->destroy(gone);
    }
}
