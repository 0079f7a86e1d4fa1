/* SPDX-License-Identifier: Apache-2.0
 *
 * Which instruction-set level this processor has, and the cap that a user can put on it
 * (SLUICE_CPU=avx2, or sl_cpu_set_level_cap). A level counts only when the system saves its
 * registers, which the processor tells in XCR0.
 */
#include "cpu/cpu.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/error.h"
#include "base/log.h"

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

static const char *const names[SL_CPU_N_LEVELS] = {
    [SL_CPU_SCALAR] = "scalar",         [SL_CPU_AVX2] = "avx2", [SL_CPU_AVX512] = "avx512",
    [SL_CPU_AVX512VNNI] = "avx512vnni", [SL_CPU_AMX] = "amx",   [SL_CPU_NEON] = "neon",
};

/* The cap: a level, or one of these. Set from any thread, so atomic. */
#define CAP_UNREAD (-1) /* SLUICE_CPU not looked at yet */
#define CAP_NONE SL_CPU_N_LEVELS
static atomic_int cap = CAP_UNREAD;

const char *sl_cpu_level_name(enum sl_cpu_level level)
{
    return (unsigned)level < SL_CPU_N_LEVELS ? names[level] : "unknown";
}

#if defined(__x86_64__)
static uint64_t xcr0(void)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return (uint64_t)high << 32 | low;
}

/* Whether the system lets this process use tiles: it saves their 8 KB for those only who have
 * asked, once and for all threads, and may say no (kernels before 5.16, small signal stacks). */
static bool tiles_allowed(void)
{
#if defined(__linux__)
    const long request = 0x1023; /* ARCH_REQ_XCOMP_PERM */
    const long tile_data = 18;
    return syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
    return false;
#endif
}

/* Levels of this processor, a bit each. */
static unsigned detect(void)
{
    unsigned levels = 1u << SL_CPU_SCALAR;
    unsigned a, b, c, d, a7, b7, c7, d7;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !__get_cpuid_count(7, 0, &a7, &b7, &c7, &d7) ||
        (c & bit_OSXSAVE) == 0) {
        return levels;
    }
    const uint64_t saved = xcr0();
    const unsigned avx2_1 = bit_AVX | bit_FMA | bit_F16C;
    const unsigned avx2_7 = bit_AVX2 | bit_BMI2;
    const unsigned avx512_7 = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL;
    /* VNNI kernels may permute bytes: with VBMI, which all but the first VNNI processors have. */
    const unsigned vnni_7 = bit_AVX512VNNI | bit_AVX512VBMI;
    if ((saved & 0x06) != 0x06 || (c & avx2_1) != avx2_1 || (b7 & avx2_7) != avx2_7) {
        return levels;
    }
    levels |= 1u << SL_CPU_AVX2;
    if ((saved & 0xe6) != 0xe6 || (b7 & avx512_7) != avx512_7) {
        return levels;
    }
    levels |= 1u << SL_CPU_AVX512;
    if ((c7 & vnni_7) != vnni_7) {
        return levels;
    }
    levels |= 1u << SL_CPU_AVX512VNNI;
    const unsigned amx_7 = 1u << 22 | 1u << 24 | 1u << 25; /* bfloats, tiles, bytes */
    if ((saved & 0x60000) != 0x60000 || (d7 & amx_7) != amx_7 || !tiles_allowed()) {
        return levels;
    }
    return levels | 1u << SL_CPU_AMX;
}
#else
static unsigned detect(void)
{
    unsigned levels = 1u << SL_CPU_SCALAR;
#if defined(__aarch64__) && defined(__linux__)
    const unsigned long has_dotprod = 1ul << 20; /* HWCAP_ASIMDDP */
    levels |= (getauxval(AT_HWCAP) & has_dotprod) != 0 ? 1u << SL_CPU_NEON : 0;
#elif defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
    levels |= 1u << SL_CPU_NEON; /* the baseline that this was compiled for has it */
#endif
    return levels;
}
#endif

bool sl_cpu_level_supported(enum sl_cpu_level level)
{
    /* Asked once: in a virtual machine the question traps, which takes tens of microseconds. */
    static atomic_uint known;
    unsigned levels = atomic_load_explicit(&known, memory_order_relaxed);
    if (levels == 0) {
        levels = detect();
        atomic_store_explicit(&known, levels, memory_order_relaxed);
    }
    return (unsigned)level < SL_CPU_N_LEVELS && (levels >> level & 1) != 0;
}

static bool level_from_name(const char *name, int *out)
{
    for (int i = 0; i < SL_CPU_N_LEVELS; i++) {
        if (strcasecmp(names[i], name) == 0) {
            *out = i;
            return true;
        }
    }
    return false;
}

static enum sl_cpu_level best_level(int most)
{
    enum sl_cpu_level best = SL_CPU_SCALAR;
    for (int i = 0; i < SL_CPU_N_LEVELS && i <= most; i++) {
        if (sl_cpu_level_supported((enum sl_cpu_level)i)) {
            best = (enum sl_cpu_level)i;
        }
    }
    return best;
}

enum sl_cpu_level sl_cpu_level(void)
{
    int most = atomic_load(&cap);
    if (most == CAP_UNREAD) {
        most = CAP_NONE;
        const char *name = getenv("SLUICE_CPU");
        if (name != NULL && name[0] != '\0' && !level_from_name(name, &most)) {
            sl_log(SL_LOG_WARN,
                   "SLUICE_CPU=%s is no level (scalar, avx2, avx512, avx512vnni, amx, "
                   "neon); using the best one",
                   name);
        }
        atomic_store(&cap, most);
    }
    return best_level(most);
}

enum sluice_status sl_cpu_set_level_cap(const char *name, struct sluice_error *err)
{
    int level = CAP_NONE;
    if (name != NULL && !level_from_name(name, &level)) {
        return sl_error_set(err, SLUICE_STATUS_INVALID_ARGUMENT,
                            "unknown CPU level \"%s\": levels are scalar, avx2, avx512, "
                            "avx512vnni, amx and neon; this machine has %s",
                            name, sl_cpu_level_name(best_level(CAP_NONE)));
    }
    atomic_store(&cap, level);
    return SLUICE_STATUS_OK;
}

#if defined(__x86_64__)
/* Three cpuid leaves of 16 characters, padded with blanks at either end. */
static void read_name(char out[49])
{
    unsigned regs[12];
    memset(out, 0, 49);
    if ((unsigned)__get_cpuid_max(0x80000000u, NULL) < 0x80000004u) {
        return;
    }
    for (unsigned i = 0; i < 3; i++) {
        __get_cpuid(0x80000002u + i, &regs[4 * i], &regs[4 * i + 1], &regs[4 * i + 2],
                    &regs[4 * i + 3]);
    }
    memcpy(out, regs, 48);
    size_t length = strlen(out);
    while (length > 0 && out[length - 1] == ' ') {
        out[--length] = '\0';
    }
    const size_t blanks = strspn(out, " ");
    memmove(out, out + blanks, length - blanks + 1);
}
#endif

const char *sl_cpu_name(void)
{
#if defined(__x86_64__)
    static _Thread_local char name[49];
    read_name(name);
    return name[0] != '\0' ? name : "unknown x86-64 processor";
#elif defined(__aarch64__)
    return "64-bit Arm processor";
#else
    return "unknown processor";
#endif
}
