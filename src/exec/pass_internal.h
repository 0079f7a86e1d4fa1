/* SPDX-License-Identifier: Apache-2.0
 *
 * A pass on its way, used by pass.c (which walks the steps) and shared.c (steps of shards that
 * device and host share).
 */
#ifndef SL_EXEC_PASS_INTERNAL_H
#define SL_EXEC_PASS_INTERNAL_H

#include "exec/context_internal.h"

struct sl_pass {
    struct sl_context *ctx;
    const struct sl_device_vtable *vt;
    const struct sl_tier_plan *tier;
    const int32_t *tokens;
    int32_t n;             /* how many */
    int32_t n_kv;          /* the last position of any of them, plus 1 */
    int32_t n_kv_max;      /* the same of GPU steps: rounded up where graphs are in use */
    int32_t n_outputs;     /* logits of the last n_outputs */
    float *logits;         /* or NULL: the context's buffer */
    uint64_t cpu_ns;       /* of CPU steps so far */
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

/* The embedding of tokens begin .. begin + n - 1 into the host's hidden state; of all of them, and
 * up to the device. */
void sl_pass_embed(const struct sl_pass *p, int32_t begin, int32_t n);
enum sluice_status sl_pass_embed_on_device(struct sl_pass *p);
/* Queue the move of rows of the hidden state between host and device. */
enum sluice_status sl_pass_move_rows(struct sl_pass *p, int32_t begin, int32_t n, bool up);

/* Run operators on the pool. */
void sl_pass_compute(struct sl_pass *p, const struct sl_op *ops, int n_ops);

/* Where this plan cuts a shard; 0: it does not. And whether the resident prefix has what it has of
 * a shard: all of it, a mixture's base, or what is before the cut. */
int32_t sl_pass_cut(const struct sl_pass *p, int32_t shard);
bool sl_pass_in_prefix(const struct sl_pass *p, int32_t shard);

/* Whether a shard is attention over a cache that is cut by blocks, and whether all positions of
 * this pass are in the first ones: then the device does it alone. */
bool sl_pass_is_divided(const struct sl_pass *p, int32_t shard);
bool sl_pass_is_shallow(const struct sl_pass *p, int32_t shard);

/* The head makes logits for groups of up to max_outputs rows, so that its buffer stays small. */
struct sl_group {
    int32_t end; /* tokens of the pass up to the end of this group */
    int32_t n;
};
/* The group that begins `*at` rows behind the first; false when there is none. */
bool sl_pass_next_group(const struct sl_pass *p, int32_t *at, struct sl_group *out);
/* Put the logits of the group that ends at `at` where the caller wants them. */
void sl_pass_keep_group(const struct sl_pass *p, int32_t at, const struct sl_group *g);

/* The four steps of a shared shard. */
enum sluice_status sl_shared_route(struct sl_pass *p, int32_t shard);
enum sluice_status sl_shared_own(struct sl_pass *p, int32_t shard);
enum sluice_status sl_shared_others(struct sl_pass *p, int32_t shard);
enum sluice_status sl_shared_join(struct sl_pass *p, int32_t shard);

/* Shards that are cut. Bytes of what is behind the cut as an image. Copy what is before the cut, or
 * behind it, to an image; and bind images of both (`rest` NULL: only the first is there). */
size_t sl_shared_rest_bytes(const struct sl_pass *p, int32_t shard);
enum sluice_status sl_shared_copy_part(struct sl_pass *p, int32_t shard, bool rest, uint8_t *to);
void sl_shared_bind_parts(const struct sl_pass *p, int32_t shard, const uint8_t *own,
                          const uint8_t *rest, struct sl_shard_bind *bind);

/* The next run of blocks, as far as this part of a cache has them; `first` counts from the part's
 * first block. */
bool sl_pass_next_run(const struct sl_kv_runs *runs, const struct sl_kv_part *part, int32_t *i,
                      struct sl_kv_run *out);

/* Of steps and shards (pass.c). */
bool sl_pass_kv_on_host(const struct sl_context *ctx, const struct sl_shard *shard);
size_t sl_pass_image_bytes(const struct sl_shard *shard);
bool sl_pass_has_part(const struct sl_pass *p, int32_t shard);
uint8_t *sl_pass_device_image(const struct sl_pass *p, int32_t shard, size_t ring_offset);
bool sl_pass_is_mixture(const struct sl_shard *shard);
enum sluice_status sl_pass_move_hidden(struct sl_pass *p, const struct sl_step *step);
enum sluice_status sl_pass_await_hidden(struct sl_pass *p);
enum sl_shard_kind sl_pass_step_shard_kind(const struct sl_pass *p, const struct sl_step *step);
enum sluice_status sl_pass_run_step(struct sl_pass *p, const struct sl_step *step);

/* The copy stream (pass_copy.c). */
enum sluice_status sl_pass_switch_tier(struct sl_pass *p);
size_t sl_pass_ring_kv_offset(const struct sl_pass *p, int32_t shard);
enum sluice_status sl_pass_copy(struct sl_pass *p, const struct sl_step *step);

/* Segments that are replayed (pass_graph.c): where one ends that begins at step k (k: there is
 * none), running it, and whether this pass has them. */
int32_t sl_pass_segment_end(const struct sl_pass *p, int32_t k);
enum sluice_status sl_pass_run_segment(struct sl_pass *p, int32_t k, int32_t end);
bool sl_pass_uses_graphs(const struct sl_pass *p);

#endif
