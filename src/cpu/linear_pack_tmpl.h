/* SPDX-License-Identifier: Apache-2.0
 *
 * Packing of activations to 8 bits with one scale per 32 columns, in the layouts of
 * linear_internal.h. Included after the architecture's pack_32.
 */
#ifndef SL_CPU_LINEAR_PACK_TMPL_H
#define SL_CPU_LINEAR_PACK_TMPL_H

#include <string.h>

#include "cpu/linear_internal.h"

/* Layouts of linear_internal.h. */
static inline void pack_halves_width(const float *x, int64_t n_cols, uint8_t *dst, int width)
{
    const int64_t n_blocks = n_cols / 32;
    const int per_group = width / 16;
    for (int64_t b = 0; b < (n_blocks + per_group - 1) / per_group * per_group; b++) {
        uint8_t *at = dst + b / per_group * 4 * width + b % per_group * 16;
        float d = 0.0f;
        int32_t sums[2] = {0, 0};
        if (b < n_blocks) {
            d = pack_32(x + 32 * b, (int8_t *)at, (int8_t *)at + width, sums);
        } else {
            memset(at, 0, 16);
            memset(at + width, 0, 16);
        }
        const float quarter = 0.25f * d * (float)(sums[0] + sums[1]);
        const float scales[4] = {d, d, d, d};
        const float quarters[4] = {quarter, quarter, quarter, quarter};
        memcpy(at + 2 * width, scales, sizeof(scales));
        memcpy(at + 3 * width, quarters, sizeof(quarters));
    }
}

static inline void pack_super(const float *x, int64_t n_cols, void *dst)
{
    for (int64_t b = 0; b < n_cols / 256; b++) {
        uint8_t *at = (uint8_t *)dst + b * SL_LINEAR_SUPER_BYTES;
        for (int i = 0; i < 8; i++) {
            int8_t *q = (int8_t *)at + 32 * i;
            int32_t sums[2];
            const float d = pack_32(x + 256 * b + 32 * i, q, q + 16, sums);
            const float scales[2] = {d, d};
            const float scaled[2] = {d * (float)sums[0], d * (float)sums[1]};
            memcpy(at + 256 + 8 * i, scales, sizeof(scales));
            memcpy(at + 320 + 8 * i, scaled, sizeof(scaled));
        }
    }
}

/* The sums of one block of one token, for the types of a correction; `out` is the tile's place for
 * the block and token. */
static inline void put_sums(const struct sl_linear_correction *c, const int32_t sums[2], float d,
                            void *out, int n_tokens)
{
    if (c->minimum) {
        float *to = out;
        to[0] = d * (float)(c->group16 ? sums[0] : sums[0] + sums[1]);
        if (c->group16) {
            to[n_tokens] = d * (float)sums[1];
        }
    } else {
        int32_t *to = out;
        to[0] = -c->offset * (c->group16 ? sums[0] : sums[0] + sums[1]);
        if (c->group16) {
            to[n_tokens] = -c->offset * sums[1];
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
            const int64_t at = block * n_tokens + t;
            int8_t *to = q + 32 * at;
            int32_t both[2];
            d[at] = pack_32(x + t * stride + 32 * block, to, to + 16, both);
            for (int i = 0; i < n_corrections; i++) {
                const int64_t item = corrections[i].group16 ? 2 * block * n_tokens + t : at;
                put_sums(&corrections[i], both, d[at], (float *)sums[i] + item, n_tokens);
            }
        }
    }
}

#endif
