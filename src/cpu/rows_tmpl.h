/* SPDX-License-Identifier: Apache-2.0
 *
 * Row kernels over the vector of cpu/vec.h: norm, rotary embedding, packing of KV rows. Included
 * once by each instance, which names the table it defines by ROWS_TABLE.
 */
#include "cpu/kernels.h"
#include "cpu/vec.h"
#include "quant/blocks.h"

/* Four sums, so that the additions do not wait for each other. */
static float sum_squares(const float *x, int64_t n)
{
    vf s0 = vset1(0.0f), s1 = s0, s2 = s0, s3 = s0;
    int64_t i = 0;
    for (; i + 4 * VN <= n; i += 4 * VN) {
        const vf a = vload(x + i), b = vload(x + i + VN);
        const vf c = vload(x + i + 2 * VN), d = vload(x + i + 3 * VN);
        s0 = vfma(a, a, s0);
        s1 = vfma(b, b, s1);
        s2 = vfma(c, c, s2);
        s3 = vfma(d, d, s3);
    }
    for (; i + VN <= n; i += VN) {
        const vf a = vload(x + i);
        s0 = vfma(a, a, s0);
    }
    float sum = vhsum(vadd(vadd(s0, s1), vadd(s2, s3)));
    for (; i < n; i++) {
        sum += x[i] * x[i];
    }
    return sum;
}

static void norm(const float *x, const float *weight, float *y, int64_t n, float eps,
                 bool accumulate)
{
    const float scale = 1.0f / sqrtf(sum_squares(x, n) / (float)n + eps);
    const vf vscale = vset1(scale);
    int64_t i = 0;
    for (; i + VN <= n; i += VN) {
        vf v = vmul(vload(x + i), vscale);
        if (weight != NULL) {
            v = vmul(v, vload(weight + i));
        }
        vstore(y + i, accumulate ? vadd(vload(y + i), v) : v);
    }
    for (; i < n; i++) {
        const float v = x[i] * scale * (weight != NULL ? weight[i] : 1.0f);
        y[i] = accumulate ? y[i] + v : v;
    }
}

static void rope_neox(float *x, const float *cosines, const float *sines, int n_pairs)
{
    float *second = x + n_pairs;
    int i = 0;
    for (; i + VN <= n_pairs; i += VN) {
        const vf a = vload(x + i), b = vload(second + i);
        const vf c = vload(cosines + i), s = vload(sines + i);
        vstore(x + i, vsub(vmul(a, c), vmul(b, s)));
        vstore(second + i, vfma(a, s, vmul(b, c)));
    }
    for (; i < n_pairs; i++) {
        const float a = x[i], b = second[i];
        x[i] = a * cosines[i] - b * sines[i];
        second[i] = a * sines[i] + b * cosines[i];
    }
}

/* A plain loop: compilers make the even-odd shuffles themselves. */
static void rope_pairs(float *restrict x, const float *restrict cosines,
                       const float *restrict sines, int n_pairs)
{
    for (int i = 0; i < n_pairs; i++) {
        const float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a * cosines[i] - b * sines[i];
        x[2 * i + 1] = a * sines[i] + b * cosines[i];
    }
}

static float max_abs32(const float *x)
{
    vf m = vabs(vload(x));
    for (int i = VN; i < SL_QK; i += VN) {
        m = vmax(m, vabs(vload(x + i)));
    }
    return vhmax(m);
}

/* Levels as the reference rounds them: a division, half to even, clamped. */
static void levels32(const float *x, float d, float low, float high, float levels[32])
{
    for (int i = 0; i < SL_QK; i += VN) {
        vf q = vset1(0.0f);
        if (d != 0.0f) {
            q = vround(vdiv(vload(x + i), vset1(d)));
            q = vmax(q, vset1(low));
            q = vless(q, vset1(high), q, vset1(high));
        }
        vstore(levels + i, q);
    }
}

static uint16_t pack_scale(float scale)
{
    const float most = scale > 65504.0f ? 65504.0f : scale;
    return sl_f32_to_f16(most < -65504.0f ? -65504.0f : most);
}

static void pack_q8_0(const float *x, struct sl_block_q8_0 *b)
{
    float levels[32];
    b->d = pack_scale(max_abs32(x) / 127.0f);
    levels32(x, sl_f16_to_f32(b->d), -127.0f, 127.0f, levels);
    for (int i = 0; i < 32; i++) {
        b->qs[i] = (int8_t)levels[i];
    }
}

static void pack_q4_0(const float *x, struct sl_block_q4_0 *b)
{
    /* The sign of the scale is that of the first value of largest magnitude. */
    const float largest = max_abs32(x);
    int at = 0;
    while (at < 31 && fabsf(x[at]) != largest) {
        at++;
    }
    float levels[32];
    b->d = pack_scale(x[at] / -8.0f);
    levels32(x, sl_f16_to_f32(b->d), -8.0f, 7.0f, levels);
    for (int i = 0; i < 16; i++) {
        b->qs[i] = (uint8_t)(((int)levels[i] + 8) | ((int)levels[16 + i] + 8) << 4);
    }
}

static void pack(enum sl_type type, const float *x, void *dst, int64_t n)
{
    if (type == SL_TYPE_F16) {
        for (int64_t i = 0; i < n; i += VN) {
            vstore_f16((uint16_t *)dst + i, vload(x + i));
        }
    } else if (type == SL_TYPE_Q8_0) {
        for (int64_t i = 0; i < n / SL_QK; i++) {
            pack_q8_0(x + i * SL_QK, (struct sl_block_q8_0 *)dst + i);
        }
    } else {
        for (int64_t i = 0; i < n / SL_QK; i++) {
            pack_q4_0(x + i * SL_QK, (struct sl_block_q4_0 *)dst + i);
        }
    }
}

const struct sl_cpu_row_kernels ROWS_TABLE = {
    .norm = norm,
    .rope_neox = rope_neox,
    .rope_pairs = rope_pairs,
    .pack = pack,
};
