/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention kernels compiled for AVX2, FMA and F16C: an instance of cpu/attention_tmpl.h.
 */
#define ATTENTION_TABLE sl_cpu_attention_avx2
#include "cpu/attention_tmpl.h"
