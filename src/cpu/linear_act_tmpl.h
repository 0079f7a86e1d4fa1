/* SPDX-License-Identifier: Apache-2.0
 *
 * Gated activation, over the vector type of cpu/vec.h. Both functions are x / (1 + e^-s): SiLU with
 * s = x, and the tanh form of GELU with s = 2 sqrt(2 / pi) (x + 0.044715 x^3), because
 * (1 + tanh z) / 2 = 1 / (1 + e^-2z). The including file names the function.
 */
#include "cpu/linear_internal.h"
#include "cpu/vec.h"

static inline vf gated(enum sl_activation activation, vf gate, vf up)
{
    vf s = gate;
    if (activation == SL_ACT_GELU_TANH) {
        const vf cubic = vfma(vmul(gate, gate), vset1(0.044715f), vset1(1.0f));
        s = vmul(vmul(gate, vset1(1.59576912f)), cubic);
    }
    const vf e = vexp(vsub(vset1(0.0f), s));
    return vmul(vdiv(gate, vadd(vset1(1.0f), e)), up);
}

void LINEAR_ACTIVATE(enum sl_activation activation, const float *gate, const float *up, float *y,
                     int64_t n)
{
    int64_t i = 0;
    for (; i + VN <= n; i += VN) {
        vstore(y + i, gated(activation, vload(gate + i), vload(up + i)));
    }
    if (i < n) {
        float rest[2][VN] = {{0}};
        const size_t bytes = (size_t)(n - i) * sizeof(float);
        memcpy(rest[0], gate + i, bytes);
        memcpy(rest[1], up + i, bytes);
        vstore(rest[0], gated(activation, vload(rest[0]), vload(rest[1])));
        memcpy(y + i, rest[0], bytes);
    }
}
