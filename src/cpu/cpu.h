/* SPDX-License-Identifier: Apache-2.0
 *
 * CPU backend: runs op lists on a thread pool with the best kernels this processor has.
 */
#ifndef SL_CPU_CPU_H
#define SL_CPU_CPU_H

#include <stddef.h>

#include <sluice/status.h>

#include "base/pool.h"
#include "op/op.h"

/* Instruction-set levels, rising. Each includes the ones before it on its architecture. */
enum sl_cpu_level {
    SL_CPU_SCALAR,
    SL_CPU_AVX2,       /* AVX2 + FMA + F16C */
    SL_CPU_AVX512,     /* F, BW, DQ, VL */
    SL_CPU_AVX512VNNI, /* + VNNI (and BF16 where present) */
    SL_CPU_AMX,        /* + BF16 and AMX tiles of bytes and bfloats */
    SL_CPU_NEON,       /* Armv8.2 with dot product */
    SL_CPU_N_LEVELS,
};

/* The best level of this machine, capped by SLUICE_CPU or sl_cpu_set_level_cap. */
enum sl_cpu_level sl_cpu_level(void);
bool sl_cpu_level_supported(enum sl_cpu_level level);
const char *sl_cpu_level_name(enum sl_cpu_level level);
/* "scalar", "avx2", ...; INVALID_ARGUMENT names the levels that exist and this machine's. */
enum sluice_status sl_cpu_set_level_cap(const char *name, struct sluice_error *err);
/* Processor name for reports ("AMD EPYC 9554"), never NULL. */
const char *sl_cpu_name(void);

struct sl_cpu_kernels; /* the kernel table of one level (cpu/kernels.h) */
const struct sl_cpu_kernels *sl_cpu_kernels(enum sl_cpu_level level);

/* Bytes of scratch for sl_cpu_run: the largest sl_op_scratch_bytes of the list plus what each
 * thread needs for panels and scores. */
size_t sl_cpu_scratch_bytes(size_t op_scratch_bytes, int n_threads);

/* Run the ops in order on every thread of `pool` (NULL: in the caller alone). `scratch` holds
 * sl_cpu_scratch_bytes, 64-byte aligned. Allocates nothing. The ops
 * must be valid (sl_op_validate). */
void sl_cpu_run(const struct sl_cpu_kernels *kernels, struct sl_pool *pool, const struct sl_op *ops,
                int n_ops, void *scratch);

#endif
