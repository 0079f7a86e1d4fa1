/* SPDX-License-Identifier: Apache-2.0
 *
 * See op_case.h.
 */
#include "device/op_case.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "op/kv.h"
#include "test.h"

#define BLOCK_BYTES ((size_t)24 << 20)
#define GUARD_BYTES 256
#define GUARD 0x5c

void case_init(struct op_case *c, uint64_t seed, const char *format, ...)
{
    memset(c, 0, sizeof *c);
    va_list args;
    va_start(args, format);
    vsnprintf(c->name, sizeof c->name, format, args);
    va_end(args);
    c->random = seed * UINT64_C(0x9e3779b97f4a7c15) + 1;
    c->capacity = BLOCK_BYTES;
    c->block = malloc(c->capacity);
    assert_non_null(c->block);
    memset(c->block, GUARD, GUARD_BYTES);
    c->used = GUARD_BYTES;
}

void case_finish(struct op_case *c)
{
    free(c->block);
    c->block = NULL;
}

void *case_room(struct op_case *c, size_t bytes)
{
    char *room = c->block + c->used;
    /* Operands begin at multiples of 256 as in an arena; a guard fills the gap behind. */
    const size_t next = (c->used + bytes + GUARD_BYTES + 255) / 256 * 256;
    assert_true(next <= c->capacity);
    memset(room, GUARD, next - c->used);
    c->used = next;
    return room;
}

uint32_t case_random(struct op_case *c, uint32_t below)
{
    c->random = c->random * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)((c->random >> 33) % below);
}

/* A sum of uniform numbers is normal enough. */
static float random_normal(struct op_case *c)
{
    float sum = 0.0f;
    for (int i = 0; i < 6; i++) {
        sum += (float)case_random(c, 1 << 16) / 65536.0f - 0.5f;
    }
    return sum * 1.4142135f;
}

float *case_floats(struct op_case *c, size_t n, float scale)
{
    float *x = case_room(c, n * sizeof *x);
    for (size_t i = 0; i < n; i++) {
        const float outlier = case_random(c, 200) == 0 ? 6.0f : 1.0f;
        x[i] = random_normal(c) * scale * outlier;
    }
    return x;
}

struct sl_matrix case_matrix(struct op_case *c, enum sl_type type, int64_t n_rows, int64_t n_cols)
{
    const size_t row_bytes = sl_type_row_bytes(type, n_cols);
    char *data = case_room(c, (size_t)n_rows * row_bytes);
    float *row = malloc((size_t)n_cols * sizeof *row);
    assert_non_null(row);
    for (int64_t r = 0; r < n_rows; r++) {
        for (int64_t i = 0; i < n_cols; i++) {
            row[i] = random_normal(c) / sqrtf((float)n_cols);
        }
        assert_true(sl_quantize_row(type, row, data + (size_t)r * row_bytes, n_cols));
    }
    free(row);
    return (struct sl_matrix){.data = data, .type = type, .n_rows = n_rows, .n_cols = n_cols};
}

int32_t *case_positions(struct op_case *c, int n, int32_t first)
{
    int32_t *pos = case_room(c, (size_t)n * sizeof *pos);
    for (int i = 0; i < n; i++) {
        pos[i] = first + i;
    }
    return pos;
}

struct sl_op *case_op(struct op_case *c, enum sl_op_kind kind, int n_tokens)
{
    assert_true(c->n_ops < CASE_MAX_OPS);
    struct sl_op *op = &c->ops[c->n_ops++];
    memset(op, 0, sizeof *op);
    op->kind = kind;
    op->n_tokens = n_tokens;
    return op;
}

void case_output(struct op_case *c, enum case_output_kind kind, const void *at, size_t bytes,
                 enum sl_type type, double bound)
{
    assert_true(c->n_outputs < CASE_MAX_OUTPUTS);
    c->outputs[c->n_outputs++] =
        (struct case_output){.kind = kind,
                             .offset = (size_t)((const char *)at - c->block),
                             .bytes = bytes,
                             .type = type,
                             .bound = bound};
}

/* ---- caches ---- */

struct sl_kv_view case_cache(struct op_case *c, struct sl_kv_types types, int n_kv_heads,
                             int head_dim, int n_seqs, int n_blocks, bool with_table)
{
    const int n_all = n_seqs * n_blocks;
    const size_t bytes = (size_t)n_all * sl_kv_block_bytes(types, n_kv_heads, head_dim);
    struct sl_kv_view kv = {.data = case_room(c, bytes),
                            .types = types,
                            .n_kv_heads = n_kv_heads,
                            .head_dim = head_dim};
    memset(kv.data, 0, bytes);
    if (with_table) {
        int32_t *table = case_positions(c, n_all, 0);
        for (int i = n_all - 1; i > 0; i--) {
            const uint32_t j = case_random(c, (uint32_t)i + 1);
            const int32_t swapped = table[i];
            table[i] = table[j];
            table[j] = swapped;
        }
        kv.table = table;
        kv.table_stride = n_blocks;
    }
    return kv;
}

struct sl_kv_view case_divided_cache(struct op_case *c, struct sl_kv_types types, int n_kv_heads,
                                     int head_dim, int n_blocks, int n_first, enum sl_kv_here here)
{
    struct sl_kv_view kv = {.types = types,
                            .n_kv_heads = n_kv_heads,
                            .head_dim = head_dim,
                            .n_first = n_first,
                            .here = here};
    const size_t block_bytes = sl_kv_block_bytes(types, n_kv_heads, head_dim);
    const size_t n_later = n_blocks > n_first ? (size_t)(n_blocks - n_first) : 1;
    /* Either part may be the lower one in memory. */
    for (int i = 0; i < 2; i++) {
        const bool later = (i + n_first) % 2 == 0;
        if (here != (later ? SL_KV_FIRST : SL_KV_LATER)) {
            const size_t bytes = (later ? n_later : (size_t)n_first) * block_bytes;
            void *blocks = case_room(c, bytes);
            memset(blocks, 0xff, bytes);
            *(later ? &kv.later : &kv.data) = blocks;
        }
    }
    return kv;
}

void case_fill_cache(struct op_case *c, const struct sl_kv_view *kv, int32_t seq, int n)
{
    const size_t n_items = (size_t)n * (size_t)kv->n_kv_heads * (size_t)kv->head_dim;
    int32_t *seqs = case_positions(c, n, 0);
    for (int i = 0; i < n; i++) {
        seqs[i] = seq;
    }
    struct sl_op op = {.kind = SL_OP_KV_STORE, .n_tokens = n};
    op.kv_store = (struct sl_op_kv_store){.k = case_floats(c, n_items, 1.0f),
                                          .v = case_floats(c, n_items, 1.0f),
                                          .pos = case_positions(c, n, 0),
                                          .seq = seqs,
                                          .kv = *kv};
    sl_op_run_ref(&op);
}

/* One step of rounding in the odd element is allowed; the type's own loss is in both. */
static double store_bound(enum sl_type type)
{
    return type == SL_TYPE_F16 ? 1e-4 : type == SL_TYPE_Q8_0 ? 2e-3 : 2e-2;
}

/* Keys and values of each block by their types. */
static void output_blocks(struct op_case *c, const struct sl_kv_view *kv, const char *at,
                          int n_blocks, double least_bound)
{
    const size_t rows = (size_t)kv->n_kv_heads * SL_KV_BLOCK;
    for (int side = 0; side < 2 * n_blocks; side++) {
        const enum sl_type type = side % 2 == 0 ? kv->types.k : kv->types.v;
        const size_t bytes = rows * sl_type_row_bytes(type, kv->head_dim);
        case_output(c, CASE_ROWS, at, bytes, type, fmax(store_bound(type), least_bound));
        at += bytes;
    }
}

void case_output_cache(struct op_case *c, const struct sl_kv_view *kv, int n_blocks,
                       double least_bound)
{
    const int n_first = kv->n_first > 0 && kv->n_first < n_blocks ? kv->n_first : n_blocks;
    if (kv->here != SL_KV_LATER) {
        output_blocks(c, kv, kv->data, n_first, least_bound);
    }
    if (kv->here != SL_KV_FIRST) {
        output_blocks(c, kv, kv->later, n_blocks - n_first, least_bound);
    }
}

/* ---- running ---- */

/* Move one address from the host block to its copy. */
#define MOVE(pointer) ((pointer) = (pointer) ? (void *)(to + ((const char *)(pointer)-from)) : NULL)

static void move_kv(struct sl_kv_view *kv, const char *from, char *to)
{
    MOVE(kv->data);
    MOVE(kv->later);
    MOVE(kv->table);
}

static void move_experts_matrix(struct sl_experts_matrix *m, const char *from, char *to)
{
    MOVE(m->data);
    MOVE(m->table);
    MOVE(m->bias);
}

static void move_op(struct sl_op *op, const char *from, char *to)
{
    switch (op->kind) {
    case SL_OP_NORM:
        MOVE(op->norm.x);
        MOVE(op->norm.weight);
        MOVE(op->norm.y);
        break;
    case SL_OP_LINEAR:
        MOVE(op->linear.x);
        for (int i = 0; i < op->linear.n_parts; i++) {
            MOVE(op->linear.part[i].w.data);
            MOVE(op->linear.part[i].bias);
            MOVE(op->linear.part[i].y);
        }
        break;
    case SL_OP_ROPE:
        MOVE(op->rope.x);
        MOVE(op->rope.pos);
        MOVE(op->rope.freq);
        break;
    case SL_OP_KV_STORE:
        MOVE(op->kv_store.k);
        MOVE(op->kv_store.v);
        MOVE(op->kv_store.pos);
        MOVE(op->kv_store.seq);
        move_kv(&op->kv_store.kv, from, to);
        break;
    case SL_OP_ATTENTION:
        MOVE(op->attention.q);
        MOVE(op->attention.y);
        MOVE(op->attention.pos);
        MOVE(op->attention.seq);
        MOVE(op->attention.sinks);
        MOVE(op->attention.lse);
        move_kv(&op->attention.kv, from, to);
        break;
    case SL_OP_ROUTER:
        MOVE(op->router.x);
        MOVE(op->router.w.data);
        MOVE(op->router.bias);
        MOVE(op->router.selection_bias);
        MOVE(op->router.ids);
        MOVE(op->router.weights);
        break;
    case SL_OP_EXPERTS:
        MOVE(op->experts.x);
        MOVE(op->experts.y);
        MOVE(op->experts.ids);
        MOVE(op->experts.weights);
        move_experts_matrix(&op->experts.gate, from, to);
        move_experts_matrix(&op->experts.up, from, to);
        move_experts_matrix(&op->experts.down, from, to);
        break;
    case SL_OP_DIVIDE:
        MOVE(op->divide.ids);
        MOVE(op->divide.at_hand);
        MOVE(op->divide.mine);
        MOVE(op->divide.uses);
        break;
    case SL_OP_ADD:
        MOVE(op->add.x);
        MOVE(op->add.y);
        break;
    case SL_OP_MERGE:
        MOVE(op->merge.x);
        MOVE(op->merge.x_lse);
        MOVE(op->merge.y);
        MOVE(op->merge.y_lse);
        break;
    case SL_OP_N_KINDS:
        fail_msg("op of no kind");
    }
}

static void move_table(const struct op_case *c, const struct sl_experts_matrix *m, char *block,
                       const char *to, int32_t n)
{
    if (m->table == NULL) {
        return;
    }
    const char *table = (const char *)(const void *)m->table;
    const void **entries = (const void **)(void *)(block + (table - c->block));
    for (int32_t i = 0; i < n; i++) {
        const char *address = m->table[i];
        entries[i] = address != NULL ? to + (address - c->block) : NULL;
    }
}

/* Tables in a copy of the block hold addresses of the original: let them point into `to`. */
static void move_tables(const struct op_case *c, char *block, const char *to)
{
    for (int i = 0; i < c->n_ops; i++) {
        const struct sl_op_experts *experts = &c->ops[i].experts;
        if (c->ops[i].kind == SL_OP_EXPERTS) {
            move_table(c, &experts->gate, block, to, experts->n);
            move_table(c, &experts->up, block, to, experts->n);
            move_table(c, &experts->down, block, to, experts->n);
        }
    }
}

/* The output's values as floats; the caller frees. */
static float *values_of(const struct case_output *output, const char *block, size_t *n)
{
    const char *data = block + output->offset;
    if (output->kind == CASE_FLOATS) {
        *n = output->bytes / sizeof(float);
    } else {
        const struct sl_type_traits *traits = sl_type_traits((uint32_t)output->type);
        *n = output->bytes / traits->block_bytes * traits->block_items;
    }
    float *values = malloc(*n * sizeof *values);
    assert_non_null(values);
    if (output->kind == CASE_FLOATS) {
        memcpy(values, data, output->bytes);
    } else {
        sl_dequantize_row(output->type, data, values, (int64_t)*n);
    }
    return values;
}

static void compare_output(const struct op_case *c, const struct case_output *output, int index,
                           const char *expected, const char *got)
{
    size_t n;
    float *want = values_of(output, expected, &n);
    float *have = values_of(output, got, &n);
    double difference = 0.0;
    double size = 0.0;
    size_t worst = 0;
    size_t n_bad = 0; /* not finite in one but not the same in the other */
    for (size_t i = 0; i < n; i++) {
        if (!isfinite(want[i]) || !isfinite(have[i])) {
            n_bad += memcmp(&want[i], &have[i], sizeof want[i]) != 0;
            continue;
        }
        const double d = (double)have[i] - (double)want[i];
        if (fabs(d) > fabs((double)have[worst] - (double)want[worst])) {
            worst = i;
        }
        difference += d * d;
        size += (double)want[i] * (double)want[i];
    }
    const double relative = sqrt(difference) / (sqrt(size) + 1e-30);
    const double at_worst[2] = {(double)have[worst], (double)want[worst]};
    free(want);
    free(have);
    if (n_bad > 0 || !(relative <= output->bound)) {
        fail_msg("%s: output %d: relative error %.3g (bound %.3g), %zu not finite; worst at %zu of "
                 "%zu: %g instead of %g",
                 c->name, index, relative, output->bound, n_bad, worst, n, at_worst[0],
                 at_worst[1]);
    }
}

static void compare_bytes(const struct op_case *c, const struct case_output *output, int index,
                          const char *expected, const char *got)
{
    for (size_t i = output->offset; i < output->offset + output->bytes; i++) {
        if (expected[i] != got[i]) {
            fail_msg("%s: output %d: byte %zu is %d instead of %d", c->name, index,
                     i - output->offset, got[i], expected[i]);
        }
    }
}

static void compare_rest(const struct op_case *c, const char *expected, char *got)
{
    for (int i = 0; i < c->n_outputs; i++) {
        const struct case_output *output = &c->outputs[i];
        memcpy(got + output->offset, expected + output->offset, output->bytes);
    }
    for (size_t i = 0; i < c->used; i++) {
        if (expected[i] != got[i]) {
            fail_msg("%s: byte %zu, which is no output, was changed", c->name, i);
        }
    }
}

/* Run the moved ops on a copy of the block in device memory; `block` comes back changed. */
static enum sluice_status run_on_device(const struct op_case *c, struct sl_device *dev, char *block,
                                        struct sluice_error *err)
{
    size_t scratch_bytes = 256;
    for (int i = 0; i < c->n_ops; i++) {
        const size_t bytes = sl_op_scratch_bytes(&c->ops[i]);
        scratch_bytes = bytes > scratch_bytes ? bytes : scratch_bytes;
    }
    void *mem;
    void *scratch;
    struct sl_stream *stream;
    assert_ok(dev->vt->mem_alloc(dev, c->used, &mem, err), *err);
    assert_ok(dev->vt->mem_alloc(dev, scratch_bytes, &scratch, err), *err);
    assert_ok(dev->vt->stream_create(dev, SL_STREAM_OPERATORS, &stream, err), *err);
    struct sl_op ops[CASE_MAX_OPS];
    memcpy(ops, c->ops, sizeof ops);
    for (int i = 0; i < c->n_ops; i++) {
        move_op(&ops[i], c->block, mem);
    }
    move_tables(c, block, mem);
    assert_ok(dev->vt->copy_to_device(dev, stream, mem, block, c->used, err), *err);
    const enum sluice_status status = dev->vt->run(dev, stream, ops, c->n_ops, scratch, err);
    memset(ops, 0xff, sizeof ops); /* the list is the caller's again after the call */
    if (status == SLUICE_STATUS_OK) {
        assert_ok(dev->vt->copy_to_host(dev, stream, block, mem, c->used, err), *err);
    }
    const enum sluice_status end = dev->vt->stream_sync(dev, stream, err);
    if (end != SLUICE_STATUS_OK) {
        fail_msg("%s: %s", c->name, err->message);
    }
    move_tables(c, block, c->block);
    dev->vt->stream_destroy(dev, stream);
    dev->vt->mem_free(dev, scratch);
    dev->vt->mem_free(dev, mem);
    return status;
}

bool case_check(struct op_case *c, struct sl_device *dev, bool optional, const char *naming)
{
    struct sluice_error err = {0};
    for (int i = 0; i < c->n_ops; i++) {
        assert_ok(sl_op_validate(&c->ops[i], &err), err);
    }
    char *got = malloc(c->used);
    assert_non_null(got);
    memcpy(got, c->block, c->used);
    const enum sluice_status status = run_on_device(c, dev, got, &err);
    if (status == SLUICE_STATUS_UNSUPPORTED && optional) {
        assert_mentions(err, naming);
        free(got);
        return false;
    }
    if (status != SLUICE_STATUS_OK) {
        fail_msg("%s: %s: %s", c->name, sluice_status_name(status), err.message);
    }
    for (int i = 0; i < c->n_ops; i++) {
        sl_op_run_ref(&c->ops[i]);
    }
    for (int i = 0; i < c->n_outputs; i++) {
        const struct case_output *output = &c->outputs[i];
        if (output->kind == CASE_EXACT) {
            compare_bytes(c, output, i, c->block, got);
        } else if (output->kind != CASE_UNDEFINED) {
            compare_output(c, output, i, c->block, got);
        }
    }
    compare_rest(c, c->block, got);
    free(got);
    return true;
}
