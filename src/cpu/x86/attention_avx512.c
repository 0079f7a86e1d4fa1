/* SPDX-License-Identifier: Apache-2.0
 *
 * Attention kernels compiled for AVX-512 (F, BW, DQ, VL): an instance of cpu/attention_tmpl.h.
 */
#define ATTENTION_TABLE sl_cpu_attention_avx512
#include "cpu/attention_tmpl.h"
