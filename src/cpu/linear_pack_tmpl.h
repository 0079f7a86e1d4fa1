/* SPDX-License-Identifier: Apache-2.0
 *
 * Packing of activations to 8 bits with one scale per 32 columns, in the layouts of
 * linear_internal.h. Included after the architecture's pack_32.
 */
#ifndef SL_CPU_LINEAR_PACK_TMPL_H
#define SL_CPU_LINEAR_PACK_TMPL_H

#include <string.h>

#include "cpu/linear_internal.h"
#include "cpu/linear_packed.h"

/* Layouts of linear_internal.h. */
static inline void pack_halves_width(const float *x, int64_t n_cols, uint8_t *dst, int width)
{
    const int64_t n_blocks = n_cols / 32;
    const int per_group = width / 16;
    for (int64_t b = 0; b < (n_blocks + per_group - 1) / per_group * per_group; b++) {
        uint8_t *group = dst + b / per_group * 4 * width;
        uint8_t *at = group + b % per_group * 16;
        const struct packed none = {.d = 0.0f};
        const struct packed p = b < n_blocks ? pack_32(x + 32 * b) : none;
        const float quarter = 0.25f * p.d * (float)(p.sum[0] + p.sum[1]);
        const float scales[4] = {p.d, p.d, p.d, p.d};
        const float sums[4] = {quarter, quarter, quarter, quarter};
        memcpy(at, p.q, 16);
        memcpy(at + width, p.q + 16, 16);
        memcpy(at + 2 * width, scales, sizeof(scales));
        memcpy(at + 3 * width, sums, sizeof(sums));
    }
}

static inline void pack_super(const float *x, int64_t n_cols, void *dst)
{
    for (int64_t b = 0; b < n_cols / 256; b++) {
        uint8_t *at = (uint8_t *)dst + b * SL_LINEAR_SUPER_BYTES;
        for (int i = 0; i < 8; i++) {
            const struct packed p = pack_32(x + 256 * b + 32 * i);
            const float scales[2] = {p.d, p.d};
            const float sums[2] = {p.d * (float)p.sum[0], p.d * (float)p.sum[1]};
            memcpy(at + 32 * i, p.q, sizeof(p.q));
            memcpy(at + 256 + 8 * i, scales, sizeof(scales));
            memcpy(at + 320 + 8 * i, sums, sizeof(sums));
        }
    }
}

/* The sums of one block of one token, for the types of a correction. */
static inline void put_sums(const struct packed *p, const struct sl_linear_correction *c,
                            void *sums, int64_t block, int n_tokens, int t)
{
    const int n = c->group16 ? 2 : 1;
    for (int g = 0; g < n; g++) {
        const int32_t sum = c->group16 ? p->sum[g] : p->sum[0] + p->sum[1];
        const int64_t at = (block * n + g) * n_tokens + t;
        if (!c->minimum) {
            ((int32_t *)sums)[at] = -c->offset * sum;
        } else {
            ((float *)sums)[at] = p->d * (float)sum;
        }
    }
}

/* Tiles of byte panels. */
static inline void pack_bytes_body(const float *x, int64_t stride, int n_tokens, int64_t n_cols,
                                   int8_t *q, float *d,
                                   const struct sl_linear_correction *corrections,
                                   void *const *sums, int n_corrections)
{
    for (int64_t block = 0; block < n_cols / 32; block++) {
        for (int t = 0; t < n_tokens; t++) {
            const struct packed p = pack_32(x + t * stride + 32 * block);
            const int64_t at = block * n_tokens + t;
            memcpy(q + 32 * at, p.q, sizeof(p.q));
            d[at] = p.d;
            for (int i = 0; i < n_corrections; i++) {
                put_sums(&p, &corrections[i], sums[i], block, n_tokens, t);
            }
        }
    }
}

#endif
