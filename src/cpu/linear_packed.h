/* SPDX-License-Identifier: Apache-2.0
 *
 * What packing 32 activations gives. Each architecture has its own pack_32.
 */
#ifndef SL_CPU_LINEAR_PACKED_H
#define SL_CPU_LINEAR_PACKED_H

#include <stdint.h>

struct packed {
    _Alignas(32) int8_t q[32];
    float d;        /* scale: the largest magnitude / 127 */
    int32_t sum[2]; /* of 16 bytes each */
};

#endif
