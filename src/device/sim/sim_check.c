/* SPDX-License-Identifier: Apache-2.0
 *
 * Address checks of the simulated device: whatever an op or copy names must lie inside one live
 * device allocation, and host memory must not. On a GPU the same mistakes read garbage or kill the
 * context, often much later.
 */
#include <stdio.h>

#include "base/error.h"
#include "device/sim/sim_internal.h"
#include "op/kv.h"

/* The live allocation that holds all of the range, or NULL. */
static const struct sl_sim_range *find(const struct sl_sim_device *sim, uintptr_t begin,
                                       size_t bytes)
{
    for (size_t i = 0; i < sim->device_memory.n; i++) {
        const struct sl_sim_range *range = &sim->device_memory.items[i];
        if (begin >= range->begin && bytes <= range->bytes &&
            begin - range->begin <= range->bytes - bytes) {
            return range;
        }
    }
    return NULL;
}

enum sluice_status sl_sim_check_device(const struct sl_sim_device *sim, const void *mem,
                                       size_t bytes, const char *what, struct sluice_error *err)
{
    SL_CHECK(bytes == 0 || find(sim, (uintptr_t)mem, bytes), INTERNAL, err,
             "%s: %zu bytes at %p are not inside device memory", what, bytes, mem);
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_sim_check_host(const struct sl_sim_device *sim, const void *mem, size_t bytes,
                                     const char *what, struct sluice_error *err)
{
    SL_CHECK(bytes == 0 || mem, INTERNAL, err, "%s: no address", what);
    for (size_t i = 0; i < sim->device_memory.n; i++) {
        const struct sl_sim_range *range = &sim->device_memory.items[i];
        SL_CHECK((uintptr_t)mem + bytes <= range->begin ||
                     range->begin + range->bytes <= (uintptr_t)mem,
                 INTERNAL, err, "%s: %zu bytes at %p are device memory", what, bytes, mem);
    }
    return SLUICE_STATUS_OK;
}

/* One address of an op: NULL only where the op allows it. */
static enum sluice_status check_part(const struct sl_sim_device *sim, const struct sl_op *op,
                                     const char *name, const void *mem, size_t bytes, bool optional,
                                     struct sluice_error *err)
{
    if (optional && !mem) {
        return SLUICE_STATUS_OK;
    }
    char what[64];
    snprintf(what, sizeof what, "%s: %s", sl_op_kind_name(op->kind), name);
    return sl_sim_check_device(sim, mem, bytes, what, err);
}

/* An address that may also lie in page-locked host memory: it is read in place. */
static enum sluice_status check_readable(const struct sl_sim_device *sim, const struct sl_op *op,
                                         const char *name, const void *mem, size_t bytes,
                                         struct sluice_error *err)
{
    return mem && sl_sim_host_locked(sim, mem, bytes)
               ? SLUICE_STATUS_OK
               : check_part(sim, op, name, mem, bytes, false, err);
}

static enum sluice_status check_linear(const struct sl_sim_device *sim, const struct sl_op *op,
                                       struct sluice_error *err)
{
    const struct sl_op_linear *linear = &op->linear;
    const size_t n_tokens = (size_t)op->n_tokens;
    const size_t n_cols = (size_t)linear->part[0].w.n_cols;
    SL_TRY(check_part(sim, op, "x", linear->x, n_tokens * n_cols * sizeof(float), false, err));
    for (int i = 0; i < linear->n_parts; i++) {
        const struct sl_matrix *w = &linear->part[i].w;
        const size_t n_rows = (size_t)w->n_rows;
        const size_t w_bytes = n_rows * sl_type_row_bytes(w->type, w->n_cols);
        SL_TRY(check_readable(sim, op, "weights", w->data, w_bytes, err));
        SL_TRY(
            check_part(sim, op, "bias", linear->part[i].bias, n_rows * sizeof(float), true, err));
        SL_TRY(check_part(sim, op, "y", linear->part[i].y, n_tokens * n_rows * sizeof(float), false,
                          err));
    }
    return SLUICE_STATUS_OK;
}

static enum sluice_status check_norm(const struct sl_sim_device *sim, const struct sl_op *op,
                                     struct sluice_error *err)
{
    const size_t row_bytes = (size_t)op->norm.n * sizeof(float);
    const size_t bytes = (size_t)op->n_tokens * (size_t)op->norm.rows_per_token * row_bytes;
    SL_TRY(check_part(sim, op, "x", op->norm.x, bytes, false, err));
    SL_TRY(check_part(sim, op, "weight", op->norm.weight, row_bytes, true, err));
    return check_part(sim, op, "y", op->norm.y, bytes, false, err);
}

static enum sluice_status check_rope(const struct sl_sim_device *sim, const struct sl_op *op,
                                     struct sluice_error *err)
{
    const struct sl_op_rope *rope = &op->rope;
    const size_t n = (size_t)op->n_tokens * (size_t)rope->n_heads * (size_t)rope->head_dim;
    SL_TRY(check_part(sim, op, "x", rope->x, n * sizeof(float), false, err));
    SL_TRY(check_part(sim, op, "positions", rope->pos, (size_t)op->n_tokens * sizeof(int32_t),
                      false, err));
    return check_part(sim, op, "frequencies", rope->freq, (size_t)rope->n_rot / 2 * sizeof(float),
                      false, err);
}

/* What kv_store and attention have in common. */
static enum sluice_status check_kv_view(const struct sl_sim_device *sim, const struct sl_op *op,
                                        const struct sl_kv_view *kv, const int32_t *pos,
                                        const int32_t *seq, struct sluice_error *err)
{
    const size_t index_bytes = (size_t)op->n_tokens * sizeof(int32_t);
    SL_TRY(check_part(sim, op, "positions", pos, index_bytes, false, err));
    SL_TRY(check_part(sim, op, "sequences", seq, index_bytes, true, err));
    SL_TRY(check_part(sim, op, "block table", kv->table, sizeof(int32_t), true, err));
    const size_t block_bytes = sl_kv_block_bytes(kv->types, kv->n_kv_heads, kv->head_dim);
    if (kv->n_first > 0 && kv->here != SL_KV_FIRST) {
        SL_TRY(check_part(sim, op, "later KV blocks", kv->later, block_bytes, false, err));
    }
    return kv->here == SL_KV_LATER
               ? SLUICE_STATUS_OK
               : check_part(sim, op, "KV cache", kv->data, block_bytes, false, err);
}

static enum sluice_status check_kv_store(const struct sl_sim_device *sim, const struct sl_op *op,
                                         struct sluice_error *err)
{
    const struct sl_op_kv_store *store = &op->kv_store;
    const size_t bytes = (size_t)op->n_tokens * (size_t)store->kv.n_kv_heads *
                         (size_t)store->kv.head_dim * sizeof(float);
    SL_TRY(check_part(sim, op, "k", store->k, bytes, false, err));
    SL_TRY(check_part(sim, op, "v", store->v, bytes, false, err));
    return check_kv_view(sim, op, &store->kv, store->pos, store->seq, err);
}

static enum sluice_status check_attention(const struct sl_sim_device *sim, const struct sl_op *op,
                                          struct sluice_error *err)
{
    const struct sl_op_attention *attention = &op->attention;
    const size_t n_heads = (size_t)attention->n_heads;
    const size_t bytes =
        (size_t)op->n_tokens * n_heads * (size_t)attention->kv.head_dim * sizeof(float);
    SL_TRY(check_part(sim, op, "q", attention->q, bytes, false, err));
    SL_TRY(check_part(sim, op, "y", attention->y, bytes, false, err));
    SL_TRY(check_part(sim, op, "sinks", attention->sinks, n_heads * sizeof(float), true, err));
    SL_TRY(check_part(sim, op, "lse", attention->lse,
                      (size_t)op->n_tokens * n_heads * sizeof(float), true, err));
    return check_kv_view(sim, op, &attention->kv, attention->pos, attention->seq, err);
}

static enum sluice_status check_router(const struct sl_sim_device *sim, const struct sl_op *op,
                                       struct sluice_error *err)
{
    const struct sl_op_router *router = &op->router;
    const size_t n_tokens = (size_t)op->n_tokens;
    const size_t n_experts = (size_t)router->w.n_rows;
    const size_t n_cols = (size_t)router->w.n_cols;
    const size_t w_bytes = n_experts * sl_type_row_bytes(router->w.type, router->w.n_cols);
    const size_t bias_bytes = n_experts * sizeof(float);
    const size_t n_chosen = n_tokens * (size_t)router->n_used;
    SL_TRY(check_part(sim, op, "x", router->x, n_tokens * n_cols * sizeof(float), false, err));
    SL_TRY(check_part(sim, op, "weights", router->w.data, w_bytes, false, err));
    SL_TRY(check_part(sim, op, "bias", router->bias, bias_bytes, true, err));
    SL_TRY(check_part(sim, op, "selection bias", router->selection_bias, bias_bytes, true, err));
    SL_TRY(check_part(sim, op, "ids", router->ids, n_chosen * sizeof(int32_t), false, err));
    return check_part(sim, op, "expert weights", router->weights, n_chosen * sizeof(float), false,
                      err);
}

static enum sluice_status check_experts_matrix(const struct sl_sim_device *sim,
                                               const struct sl_op *op, const char *name,
                                               const struct sl_experts_matrix *m,
                                               struct sluice_error *err)
{
    const size_t n = (size_t)op->experts.n;
    const size_t bytes = (size_t)m->n_rows * sl_type_row_bytes(m->type, m->n_cols);
    SL_TRY(check_part(sim, op, name, m->table, n * sizeof *m->table, true, err));
    SL_TRY(check_part(sim, op, name, m->bias, n * (size_t)m->n_rows * sizeof(float), true, err));
    return m->table ? SLUICE_STATUS_OK : check_part(sim, op, name, m->data, n * bytes, false, err);
}

static enum sluice_status check_experts(const struct sl_sim_device *sim, const struct sl_op *op,
                                        struct sluice_error *err)
{
    const struct sl_op_experts *experts = &op->experts;
    const size_t n_tokens = (size_t)op->n_tokens;
    const size_t x_bytes = n_tokens * (size_t)experts->gate.n_cols * sizeof(float);
    const size_t n_chosen = n_tokens * (size_t)experts->n_used;
    SL_TRY(check_part(sim, op, "x", experts->x, x_bytes, false, err));
    SL_TRY(check_part(sim, op, "y", experts->y, x_bytes, false, err));
    SL_TRY(check_part(sim, op, "ids", experts->ids, n_chosen * sizeof(int32_t), false, err));
    SL_TRY(check_part(sim, op, "expert weights", experts->weights, n_chosen * sizeof(float), false,
                      err));
    SL_TRY(check_experts_matrix(sim, op, "gate", &experts->gate, err));
    SL_TRY(check_experts_matrix(sim, op, "up", &experts->up, err));
    return check_experts_matrix(sim, op, "down", &experts->down, err);
}

enum sluice_status sl_sim_check_op(const struct sl_sim_device *sim, const struct sl_op *op,
                                   const void *scratch, struct sluice_error *err)
{
    const size_t scratch_bytes = sl_op_scratch_bytes(op);
    SL_TRY(check_part(sim, op, "scratch", scratch, scratch_bytes, false, err));
    switch (op->kind) {
    case SL_OP_NORM:
        return check_norm(sim, op, err);
    case SL_OP_LINEAR:
        return check_linear(sim, op, err);
    case SL_OP_ROPE:
        return check_rope(sim, op, err);
    case SL_OP_KV_STORE:
        return check_kv_store(sim, op, err);
    case SL_OP_ATTENTION:
        return check_attention(sim, op, err);
    case SL_OP_ROUTER:
        return check_router(sim, op, err);
    case SL_OP_EXPERTS:
        return check_experts(sim, op, err);
    case SL_OP_DIVIDE: {
        const struct sl_op_divide *o = &op->divide;
        const size_t bytes = (size_t)op->n_tokens * (size_t)o->n_used * sizeof(int32_t);
        SL_TRY(check_part(sim, op, "ids", o->ids, bytes, false, err));
        SL_TRY(check_part(sim, op, "at hand", o->at_hand, (size_t)o->n_experts, true, err));
        SL_TRY(check_part(sim, op, "uses", o->uses, (size_t)o->n_experts * sizeof(int32_t), true,
                          err));
        return check_part(sim, op, "mine", o->mine, bytes, !o->at_hand, err);
    }
    case SL_OP_ADD: {
        const size_t bytes = (size_t)op->n_tokens * (size_t)op->add.n * sizeof(float);
        SL_TRY(check_readable(sim, op, "x", op->add.x, bytes, err));
        return check_part(sim, op, "y", op->add.y, bytes, false, err);
    }
    case SL_OP_MERGE: {
        const struct sl_op_merge *o = &op->merge;
        const size_t lse_bytes = (size_t)op->n_tokens * (size_t)o->n_heads * sizeof(float);
        const size_t bytes = lse_bytes * (size_t)o->head_dim;
        SL_TRY(check_readable(sim, op, "x", o->x, bytes, err));
        SL_TRY(check_readable(sim, op, "lse of x", o->x_lse, lse_bytes, err));
        SL_TRY(check_part(sim, op, "lse of y", o->y_lse, lse_bytes, false, err));
        return check_part(sim, op, "y", o->y, bytes, false, err);
    }
    case SL_OP_N_KINDS:
        break;
    }
    return sl_error_set(err, SLUICE_STATUS_INTERNAL, "op of unknown kind %d", (int)op->kind);
}

/* The cache block of one position of one sequence. */
static enum sluice_status check_block(const struct sl_sim_device *sim, const struct sl_op *op,
                                      const struct sl_kv_view *kv, int32_t seq, int32_t pos,
                                      struct sluice_error *err)
{
    const char *name = sl_op_kind_name(op->kind);
    if (kv->table) {
        const int32_t index = pos / SL_KV_BLOCK;
        SL_CHECK(index < kv->table_stride, INTERNAL, err,
                 "%s: position %d is past the %d blocks of its table", name, pos, kv->table_stride);
        const int32_t *entry = kv->table + (int64_t)seq * kv->table_stride + index;
        SL_TRY(check_part(sim, op, "block table", entry, sizeof *entry, false, err));
        SL_CHECK(*entry >= 0, INTERNAL, err,
                 "%s: the table has no block for position %d of sequence %d", name, pos, seq);
    }
    return check_part(sim, op, "KV block", sl_kv_block(kv, seq, pos),
                      sl_kv_block_bytes(kv->types, kv->n_kv_heads, kv->head_dim), false, err);
}

/* What the table says of one expert, in all three matrices alike. */
static enum sluice_status check_table_entry(const struct sl_sim_device *sim, const struct sl_op *op,
                                            int32_t expert, struct sluice_error *err)
{
    const struct sl_op_experts *experts = &op->experts;
    const struct sl_experts_matrix *const matrices[] = {&experts->gate, &experts->up,
                                                        &experts->down};
    bool here[3];
    for (int i = 0; i < 3; i++) {
        const struct sl_experts_matrix *m = matrices[i];
        here[i] = !m->table || m->table[expert];
        if (m->table && here[i]) {
            SL_TRY(check_readable(sim, op, "table entry", m->table[expert],
                                  (size_t)m->n_rows * sl_type_row_bytes(m->type, m->n_cols), err));
        }
    }
    SL_CHECK(here[0] == here[1] && here[1] == here[2], INTERNAL, err,
             "experts: the tables disagree about expert %d", experts->first + expert);
    return SLUICE_STATUS_OK;
}

static enum sluice_status check_choice(const struct sl_sim_device *sim, const struct sl_op *op,
                                       struct sluice_error *err)
{
    const struct sl_op_experts *experts = &op->experts;
    for (int32_t t = 0; t < op->n_tokens; t++) {
        const int32_t *ids = experts->ids + (int64_t)t * experts->n_used;
        for (int32_t j = 0; j < experts->n_used; j++) {
            for (int32_t k = 0; k < j; k++) {
                SL_CHECK(ids[j] < 0 || ids[j] != ids[k], INTERNAL, err,
                         "experts: token %d goes to expert %d twice", t, ids[j]);
            }
            SL_CHECK(ids[j] >= -1 && ids[j] < SL_MAX_EXPERTS, INTERNAL, err,
                     "experts: token %d goes to expert %d", t, ids[j]);
        }
    }
    for (int32_t e = 0; e < experts->n; e++) {
        SL_TRY(check_table_entry(sim, op, e, err));
    }
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_sim_check_content(const struct sl_sim_device *sim, const struct sl_op *op,
                                        struct sluice_error *err)
{
    if (op->kind == SL_OP_EXPERTS) {
        return check_choice(sim, op, err);
    }
    const bool reads = op->kind == SL_OP_ATTENTION;
    if (!reads && op->kind != SL_OP_KV_STORE) {
        return SLUICE_STATUS_OK;
    }
    const struct sl_kv_view *kv = reads ? &op->attention.kv : &op->kv_store.kv;
    const int32_t *pos = reads ? op->attention.pos : op->kv_store.pos;
    const int32_t *seqs = reads ? op->attention.seq : op->kv_store.seq;
    for (int32_t t = 0; t < op->n_tokens; t++) {
        const int32_t seq = seqs ? seqs[t] : 0;
        SL_CHECK(pos[t] >= 0 && seq >= 0, INTERNAL, err,
                 "%s: token %d has position %d, sequence %d", sl_op_kind_name(op->kind), t, pos[t],
                 seq);
        int32_t first = pos[t];
        if (reads) {
            SL_CHECK(pos[t] < op->attention.n_kv_max, INTERNAL, err,
                     "attention: token %d has position %d, but n_kv_max is %d", t, pos[t],
                     op->attention.n_kv_max);
            const int32_t window = op->attention.window;
            first = window > 0 && pos[t] >= window ? pos[t] - window + 1 : 0;
        }
        for (int32_t block = first / SL_KV_BLOCK; block <= pos[t] / SL_KV_BLOCK; block++) {
            if (!sl_kv_is_here(kv, block * SL_KV_BLOCK)) {
                continue;
            }
            SL_TRY(check_block(sim, op, kv, seq, block * SL_KV_BLOCK, err));
        }
    }
    return SLUICE_STATUS_OK;
}
