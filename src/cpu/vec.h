/* SPDX-License-Identifier: Apache-2.0
 *
 * The vector of floats that kernel templates are written over. Which one is chosen by the flags
 * that the including file is compiled with:
 *
 *   vec_avx512.h    16 lanes      vec_avx2.h    8 lanes
 *   vec_generic.h    4 lanes, compiler vectors: SSE2, NEON, or plain code
 *
 * Each defines vf, VN (lanes) and: vload vstore vset1 vadd vsub vmul vdiv vfma (a * b + c) vmax
 * vabs vround (half to even) vpow2 (2^x of whole x in -126..127) vless (a < b ? x : y) vhsum vhmax
 * vhsum4 (four sums at once) vset1_f16 vload_f16 vstore_f16 vload_i8 vload_low4 vload_high4
 * (nibbles of VN bytes) viota (0, 1, 2, ...). Loads and stores need no alignment.
 */
#ifndef SL_CPU_VEC_H
#define SL_CPU_VEC_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#include "quant/type.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include "cpu/vec_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "cpu/vec_avx2.h"
#else
#include "cpu/vec_generic.h"
#endif

/* Below this the result of vexp is 0 (its float would be subnormal). */
#define VEXP_LOWEST (-87.0f)

/* e^x with a relative error of about 2e-7; 0 below VEXP_LOWEST and for -infinity, clamped above 88.
 * x = n ln 2 + r with n whole and |r| <= ln 2 / 2; e^r by its Taylor series to the sixth power,
 * whose rest is below 0.35^7 / 5040 = 1.3e-7. ln 2 in two parts keeps r exact. */
static inline vf vexp(vf x)
{
    const vf clamped = vmax(vset1(VEXP_LOWEST), vless(x, vset1(88.0f), x, vset1(88.0f)));
    const vf n = vround(vmul(clamped, vset1(1.44269504f)));
    vf r = vfma(n, vset1(-0.693359375f), clamped);
    r = vfma(n, vset1(2.12194440e-4f), r);
    vf p = vset1(1.0f / 720.0f);
    p = vfma(p, r, vset1(1.0f / 120.0f));
    p = vfma(p, r, vset1(1.0f / 24.0f));
    p = vfma(p, r, vset1(1.0f / 6.0f));
    p = vfma(p, r, vset1(0.5f));
    p = vfma(p, r, vset1(1.0f));
    p = vfma(p, r, vset1(1.0f));
    return vless(x, vset1(VEXP_LOWEST), vset1(0.0f), vmul(p, vpow2(n)));
}

/* tanh x = 1 - 2 / (e^2x + 1), absolute error about 2e-7. */
static inline vf vtanh(vf x)
{
    const vf e = vexp(vadd(x, x));
    return vsub(vset1(1.0f), vdiv(vset1(2.0f), vadd(e, vset1(1.0f))));
}

#endif
