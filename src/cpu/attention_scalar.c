/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention kernels compiled for the baseline of the architecture: an instance of
 * cpu/attention_tmpl.h.
 */
#define ATTENTION_TABLE sl_cpu_attention_scalar
#include "cpu/attention_tmpl.h"
