/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention kernels compiled for Armv8.2 NEON: an instance of cpu/attention_tmpl.h.
 */
#define ATTENTION_TABLE sl_cpu_attention_neon
#include "cpu/attention_tmpl.h"
