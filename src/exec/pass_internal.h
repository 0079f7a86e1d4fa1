/* SPDX-License-Identifier: Apache-2.0
 *
 * A pass on its way, shared by pass.c (which walks the steps) and mixture.c (steps of mixtures that
 * device and host share).
 */
#ifndef SL_EXEC_PASS_INTERNAL_H
#define SL_EXEC_PASS_INTERNAL_H

#include "exec/context_internal.h"

struct sl_pass {
    struct sl_context *ctx;
    const struct sl_device_vtable *vt;
    const struct sl_tier_plan *tier;
    int32_t n;             /* tokens */
    int32_t n_kv;          /* the last position of any of them, plus 1 */
    int32_t n_kv_max;      /* the same of GPU steps: rounded up where graphs are in use */
    int32_t n_outputs;     /* logits of the last n_outputs */
    float *logits;         /* or NULL: the context's buffer */
    bool copied;           /* the copy stream was used */
    bool nothing_left;     /* of the shared mixture under way: the device has all that was chosen */
    int32_t last_download; /* latest shard with a KV download in this pass; -1: none */
    float *late_rows;  /* logits that the device leaves in the context's buffer at the end, to */
    size_t late_bytes; /* be put here */
    struct sluice_error *err;
};

/* Operands of a shard on either side. */
struct sl_shard_bind sl_pass_device_bind(const struct sl_pass *p, int32_t shard,
                                         size_t ring_offset);
struct sl_shard_bind sl_pass_host_bind(const struct sl_pass *p, int32_t shard);
/* Queue the operators of a shard on the compute stream. */
enum sluice_status sl_pass_queue(struct sl_pass *p, int32_t shard,
                                 const struct sl_shard_bind *bind);

/* The four steps of a shared mixture. */
enum sluice_status sl_mixture_route(struct sl_pass *p, int32_t shard);
enum sluice_status sl_mixture_own(struct sl_pass *p, int32_t shard);
enum sluice_status sl_mixture_others(struct sl_pass *p, int32_t shard);
enum sluice_status sl_mixture_join(struct sl_pass *p, int32_t shard);

#endif
