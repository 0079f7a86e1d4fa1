/* SPDX-License-Identifier: Apache-2.0
 *
 * The sets of product kernels, and which of them serves a level on this processor. Some processors
 * have more than their level says (VNNI without AVX-512, products of bfloats): a level then has
 * several sets, and the last that runs is used.
 */
#include <stdatomic.h>

#include "cpu/linear_internal.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

static const struct sl_cpu_linear_kernels variants[] = {
    {"scalar", SL_CPU_SCALAR, 0, NULL, NULL, sl_linear_activate_scalar},
#if defined(__x86_64__)
    {"avx2", SL_CPU_AVX2, 0, &sl_linear_rows_avx2, &sl_linear_panels_avx2, sl_linear_activate_avx2},
    {"avxvnni", SL_CPU_AVX2, SL_LINEAR_NEEDS_AVX_VNNI, &sl_linear_rows_avxvnni,
     &sl_linear_panels_avxvnni, sl_linear_activate_avx2},
    {"avx512", SL_CPU_AVX512, 0, &sl_linear_rows_avx512, &sl_linear_panels_avx512,
     sl_linear_activate_avx512},
    {"avx512vnni", SL_CPU_AVX512VNNI, 0, &sl_linear_rows_avx512vnni, &sl_linear_panels_avx512vnni,
     sl_linear_activate_avx512},
    {"avx512bf16", SL_CPU_AVX512VNNI, SL_LINEAR_NEEDS_AVX512_BF16, &sl_linear_rows_avx512vnni,
     &sl_linear_panels_avx512bf16, sl_linear_activate_avx512},
    {"amx", SL_CPU_AMX, SL_LINEAR_NEEDS_AVX512_BF16, &sl_linear_rows_avx512vnni,
     &sl_linear_panels_amx, sl_linear_activate_avx512},
#elif defined(__aarch64__)
    {"neon", SL_CPU_NEON, 0, &sl_linear_rows_neon, &sl_linear_panels_neon,
     sl_linear_activate_scalar},
#endif
};
#define N_VARIANTS (int)(sizeof(variants) / sizeof(variants[0]))

static unsigned detect_features(void)
{
    unsigned features = 0;
#if defined(__x86_64__)
    unsigned a, b, c, d;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d) && a >= 1) {
        __cpuid_count(7, 1, a, b, c, d);
        features |= (a & 1u << 4) != 0 ? SL_LINEAR_NEEDS_AVX_VNNI : 0;
        features |= (a & 1u << 5) != 0 ? SL_LINEAR_NEEDS_AVX512_BF16 : 0;
    }
#endif
    return features;
}

static bool runs(const struct sl_cpu_linear_kernels *k)
{
    return sl_cpu_level_supported(k->level) && (k->features & ~detect_features()) == 0;
}

const struct sl_cpu_linear_kernels *sl_linear_variant(int i)
{
    for (int k = 0; k < N_VARIANTS; k++) {
        if (runs(&variants[k]) && i-- == 0) {
            return &variants[k];
        }
    }
    return NULL;
}

static const struct sl_cpu_linear_kernels *choose(enum sl_cpu_level level)
{
    const struct sl_cpu_linear_kernels *best = &variants[0];
    for (int i = 1; i < N_VARIANTS; i++) {
        if (variants[i].level <= level && runs(&variants[i])) {
            best = &variants[i];
        }
    }
    return best;
}

const struct sl_cpu_linear_kernels *sl_cpu_linear_kernels(enum sl_cpu_level level)
{
    /* Asking the processor takes long, under virtual machines above all, and this is asked for
     * every op. Threads that ask at the same time find the same answer. */
    static _Atomic(const struct sl_cpu_linear_kernels *) chosen[SL_CPU_N_LEVELS];
    if ((unsigned)level >= SL_CPU_N_LEVELS) {
        return &variants[0];
    }
    const struct sl_cpu_linear_kernels *kernels =
        atomic_load_explicit(&chosen[level], memory_order_relaxed);
    if (kernels == NULL) {
        kernels = choose(level);
        atomic_store_explicit(&chosen[level], kernels, memory_order_relaxed);
    }
    return kernels;
}
