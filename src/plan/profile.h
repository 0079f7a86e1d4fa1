/* SPDX-License-Identifier: Apache-2.0
 *
 * The machine profile: how fast each kind of work runs on the CPU alone, on the CPU while copies
 * run, and on the GPU. Numbers only; src/exec/profiler.c measures them. Saved as a text file per
 * GPU, CPU and thread count; missing points are interpolated over tokens and bits per weight.
 */
#ifndef SL_PLAN_PROFILE_H
#define SL_PLAN_PROFILE_H

#include <stdbool.h>

#include "device/device.h"
#include "op/op.h"

/* Where work runs. CPU_BUSY is the CPU while the copy engine draws on system memory too. */
enum sl_unit { SL_UNIT_CPU, SL_UNIT_CPU_BUSY, SL_UNIT_GPU, SL_N_UNITS };

/* Token counts at which products are measured: also the tiers of a plan. */
#define SL_N_TIERS 9
extern const int32_t sl_tier_tokens[SL_N_TIERS]; /* 1 4 16 64 256 512 1024 2048 4096 */

/* Copy sizes at which the link is measured. */
#define SL_N_COPY_SIZES 5
extern const size_t sl_copy_sizes[SL_N_COPY_SIZES]; /* 64K 256K 1M 4M 64M */

/* What a model's own figures are kept for: whole shards, by enum sl_shard_kind, and what a
 * mixture's layer is made of when GPU and CPU share it. */
enum sl_work {
    SL_WORK_ATTENTION,
    SL_WORK_FFN,
    SL_WORK_HEAD,
    SL_WORK_ROUTE,   /* norm, router and division */
    SL_WORK_FIXED,   /* of the experts of one side: what their number does not matter for */
    SL_WORK_EXPERTS, /* the rest of it, in proportion to their number */
    SL_N_WORKS
};

/* Cache positions before the passes that a model is timed with. */
#define SL_CALIBRATED_DEPTH 256

struct sl_profile {
    enum sl_device_kind kind; /* NONE: no GPU, the CPU rows alone count */
    char gpu[96];
    char cpu[96];
    int32_t n_threads;

    /* Nanoseconds per 2^20 weight elements of a product, by type and tier; 0: not measured. */
    double linear_ns[SL_N_UNITS][SL_TYPE_N][SL_N_TIERS];
    double attention_mib_ns[SL_N_UNITS][SL_N_KV_TYPES]; /* per MiB of KV read (decode) */
    double attention_gflop_ns[SL_N_UNITS];              /* per 1e9 operations (prefill) */
    double elementwise_mib_ns[SL_N_UNITS]; /* per MiB of activations through norm and rope */
    double op_ns[SL_N_UNITS];              /* fixed cost of an op: launch or barrier */

    double h2d_bytes_per_s[SL_N_COPY_SIZES]; /* page-locked */
    double d2h_bytes_per_s;
    double copy_busy_factor; /* speed of a copy while the CPU reads too, of its own: 0 .. 1 */
    /* Kernels reading page-locked system memory in place: vector products, and the tiles of more
     * tokens, which may read it in smaller pieces. 0: cannot. */
    double mapped_bytes_per_s, mapped_tiles_bytes_per_s;
    double hop_ns;   /* GPU to host to GPU round trip of a small hidden state */
    double issue_ns; /* host time to queue one op */

    /* Time that a model's work takes beside what the figures above make of its operators: by unit,
     * work and tier, behind SL_CALIBRATED_DEPTH tokens. 1 where only the machine was measured. */
    double work_factor[SL_N_UNITS][SL_N_WORKS][SL_N_TIERS];
    double copy_factor; /* the same of copies into VRAM */

    double dram_bytes_per_s; /* CPU reading alone, and together with copies */
    double dram_busy_bytes_per_s;
    double vram_bytes_per_s;
};

/* Time of one op on a unit, in nanoseconds. `depth` is the number of cache positions before the
 * pass (attention). Pointers in `op` are not read. */
double sl_profile_op_ns(const struct sl_profile *profile, enum sl_unit unit, const struct sl_op *op,
                        int32_t depth);
/* Time of a list of ops, one after the other; `n_seqs` sequences of `depth` positions each share
 * the tokens of its attention (1: they all belong to one). */
double sl_profile_list_ns(const struct sl_profile *profile, enum sl_unit unit,
                          const struct sl_op *ops, int n_ops, int32_t depth, int32_t n_seqs);
/* How many of n experts a pass reads when each token goes to `used` of them: expected for choices
 * that are independent and even. */
double sl_profile_experts_read(double n, double used, int32_t n_tokens);
/* How fast kernels read system memory in passes of n tokens. */
double sl_profile_mapped_rate(const struct sl_profile *profile, int32_t n_tokens);
/* Time to copy `bytes` to the device in one piece. */
double sl_profile_copy_ns(const struct sl_profile *profile, size_t bytes);
double sl_profile_download_ns(const struct sl_profile *profile, size_t bytes);

/* All factors 1; and those of another profile. */
void sl_profile_clear_factors(struct sl_profile *profile);
void sl_profile_take_factors(struct sl_profile *profile, const struct sl_profile *from);

/* Text form. Loading checks version and ranges: FORMAT names the line. */
enum sluice_status sl_profile_save(const struct sl_profile *profile, const char *path,
                                   struct sluice_error *err);
enum sluice_status sl_profile_load(struct sl_profile *out, const char *path,
                                   struct sluice_error *err);
/* File name in the cache for this machine: "profile-<hash>.txt". */
void sl_profile_file_name(char *out, size_t out_bytes, enum sl_device_kind kind, const char *gpu,
                          const char *cpu, int32_t n_threads);

/* A plausible machine (a client PC of 2025), for tests and for planning without measuring. */
void sl_profile_typical(struct sl_profile *out, enum sl_device_kind kind, int32_t n_threads);

#endif
