/* SPDX-License-Identifier: Apache-2.0
 *
 * Packing of tiles of activations to 8 bits, for byte panels of every x86 level.
 */
#include "cpu/x86/linear_pack_v256.h"
#include "cpu/linear_pack_tmpl.h"

void sl_linear_pack_bytes_avx2(const float *x, int64_t stride, int n_tokens, int64_t n_cols,
                               int8_t *q, float *d, const struct sl_linear_correction *corrections,
                               void *const *sums, int n_corrections)
{
    pack_bytes_body(x, stride, n_tokens, n_cols, q, d, corrections, sums, n_corrections);
}
