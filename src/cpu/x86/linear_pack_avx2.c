/* SPDX-License-Identifier: Apache-2.0
 *
 * Packing of tiles of activations to 8 bits, for byte panels of every x86 level.
 */
#include "cpu/x86/linear_pack_tmpl.h"

static void put_sums(const struct packed *p, const struct sl_linear_correction *c, void *sums,
                     int64_t block, int n_tokens, int t)
{
    const int n = c->group16 ? 2 : 1;
    for (int g = 0; g < n; g++) {
        const int32_t sum = c->group16 ? p->sum[g] : p->sum[0] + p->sum[1];
        const int64_t at = (block * n + g) * n_tokens + t;
        if (c->offset != 0) {
            ((int32_t *)sums)[at] = -c->offset * sum;
        } else {
            ((float *)sums)[at] = p->d * (float)sum;
        }
    }
}

void sl_linear_pack_bytes_avx2(const float *x, int64_t stride, int n_tokens, int64_t n_cols,
                               int8_t *q, float *d, const struct sl_linear_correction *corrections,
                               void *const *sums, int n_corrections)
{
    for (int64_t block = 0; block < n_cols / 32; block++) {
        for (int t = 0; t < n_tokens; t++) {
            const struct packed p = pack_32(x + t * stride + 32 * block);
            const int64_t at = block * n_tokens + t;
            _mm256_storeu_si256((void *)(q + 32 * at), p.q);
            d[at] = p.d;
            for (int i = 0; i < n_corrections; i++) {
                put_sums(&p, &corrections[i], sums[i], block, n_tokens, t);
            }
        }
    }
}
