/* SPDX-License-Identifier: Apache-2.0
 *
 * Operands of a case: laid out in one block with guard bytes between, and filled.
 *
 *   | guard | x | guard | weight | guard | y | guard |
 *
 * Laying out happens twice by the same code: once with no memory, to learn the size, and once to
 * place and fill.
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "kcheck.h"
#include "op/kv.h"

#define GUARD 256

/* Room for an operand. Operands that are floats may start at any float, others at any byte that
 * their type allows; devices want 16, so that is the least here, but never more. */
void *kc_place(struct kc_layout *l, enum kc_role role, size_t bytes)
{
    struct kc_instance *in = l->in;
    const size_t offset = l->at + 16;
    l->at = (offset + bytes + GUARD + 255) / 256 * 256;
    if (in->base == NULL) {
        return NULL;
    }
    in->regions[in->n_regions++] = (struct kc_region){role, offset, bytes};
    return in->base + offset;
}

static float value(struct kc_rng *rng, enum kc_fill fill, int64_t i, int64_t row_items)
{
    const float x = kc_rng_float(rng);
    switch (fill) {
    case KC_ZEROS:
        return 0.0f;
    case KC_EXTREMES:
        return x < 0.0f ? -1000.0f : 1000.0f;
    case KC_OUTLIER:
        return i % row_items == row_items / 3 ? 1000.0f * x : x;
    case KC_SUBNORMAL:
        return x * 1e-39f;
    case KC_RANDOM:
    case KC_N_FILLS:
        break;
    }
    return x;
}

/* n floats in rows of row_items. */
float *kc_floats(struct kc_layout *l, enum kc_role role, int64_t n, int64_t row_items)
{
    float *x = kc_place(l, role, (size_t)n * sizeof(float));
    for (int64_t i = 0; x != NULL && i < n; i++) {
        x[i] = value(&l->rng, l->in->c.fill, i, row_items);
    }
    return x;
}

/* Floats that stay ordinary: weights of norms, biases, sinks. */
float *kc_plain_floats(struct kc_layout *l, int64_t n, float scale, float shift)
{
    float *x = kc_place(l, KC_INPUT, (size_t)n * sizeof(float));
    for (int64_t i = 0; x != NULL && i < n; i++) {
        x[i] = kc_rng_float(&l->rng) * scale + shift;
    }
    return x;
}

/* Offsets of the f16 scales inside a block; -1: none. */
static void scale_offsets(enum sl_type type, int *first, int *second)
{
    *first = 0;
    *second = -1;
    switch (type) {
    case SL_TYPE_Q4_1:
    case SL_TYPE_Q5_1:
    case SL_TYPE_Q4_K:
    case SL_TYPE_Q5_K:
        *second = 2;
        break;
    case SL_TYPE_Q2_K:
        *first = 80;
        *second = 82;
        break;
    case SL_TYPE_Q3_K:
        *first = 108;
        break;
    case SL_TYPE_Q6_K:
        *first = 208;
        break;
    case SL_TYPE_MXFP4:
        *first = -1;
        break;
    default:
        break;
    }
}

static void put_scale(struct kc_rng *rng, enum kc_fill fill, uint8_t *at)
{
    const float x = kc_rng_float(rng) * 0.01f;
    uint16_t h = sl_f32_to_f16(x);
    if (fill == KC_ZEROS) {
        h = 0;
    } else if (fill == KC_SUBNORMAL) {
        h = (uint16_t)(1 + kc_rng_below(rng, 1023)); /* below 2^-14 */
    } else if (fill == KC_EXTREMES) {
        h = sl_f32_to_f16(x < 0.0f ? -4.0f : 4.0f);
    }
    memcpy(at, &h, sizeof(h));
}

/* One block: any code may appear, unlike in what the packing routines write; only scales are
 * chosen. */
static void fill_block(struct kc_rng *rng, enum kc_fill fill, enum sl_type type, uint8_t *block)
{
    const uint32_t bytes = sl_type_traits(type)->block_bytes;
    for (uint32_t i = 0; i < bytes; i++) {
        block[i] =
            fill == KC_EXTREMES ? (uint8_t)(kc_rng_below(rng, 2) * 255) : (uint8_t)kc_rng_next(rng);
    }
    int first, second;
    scale_offsets(type, &first, &second);
    if (first >= 0) {
        put_scale(rng, fill, block + first);
    }
    if (second >= 0) {
        put_scale(rng, fill, block + second);
    }
    if (type == SL_TYPE_MXFP4) {
        block[0] =
            (uint8_t)(fill == KC_ZEROS || fill == KC_SUBNORMAL ? 0 : 115 + kc_rng_below(rng, 8));
    }
}

/* A packed row of any type that computes. */
static void fill_row(struct kc_rng *rng, enum kc_fill fill, enum sl_type type, void *dst, int64_t n)
{
    const struct sl_type_traits *t = sl_type_traits(type);
    if (t->block_items == 1) {
        for (int64_t i = 0; i < n; i++) {
            const float x = value(rng, fill, i, n);
            sl_quantize_row(type, &x, (char *)dst + i * t->block_bytes, 1);
        }
        return;
    }
    for (int64_t i = 0; i < n / t->block_items; i++) {
        fill_block(rng, fill, type, (uint8_t *)dst + i * t->block_bytes);
    }
}

const void *kc_matrix(struct kc_layout *l, enum sl_type type, int64_t n_rows, int64_t n_cols)
{
    const size_t row_bytes = sl_type_row_bytes(type, n_cols);
    char *data = kc_place(l, KC_INPUT, row_bytes * (size_t)n_rows);
    for (int64_t r = 0; data != NULL && r < n_rows; r++) {
        fill_row(&l->rng, l->in->c.fill, type, data + (size_t)r * row_bytes, n_cols);
    }
    return data;
}

static void place_norm(struct kc_layout *l, struct sl_op *op)
{
    struct sl_op_norm *o = &op->norm;
    const int64_t n = (int64_t)op->n_tokens * o->rows_per_token * o->n;
    const bool in_place = l->in->c.in_place;
    float *x = kc_floats(l, in_place ? KC_OUTPUT : KC_INPUT, n, o->n);
    o->x = x;
    o->y = in_place ? x : kc_floats(l, KC_OUTPUT, n, o->n);
    o->weight = o->weight != NULL ? kc_plain_floats(l, o->n, 0.3f, 1.0f) : NULL;
}

static void place_linear(struct kc_layout *l, struct sl_op *op)
{
    struct sl_op_linear *o = &op->linear;
    o->x = kc_floats(l, KC_INPUT, op->n_tokens * o->part[0].w.n_cols, o->part[0].w.n_cols);
    for (int i = 0; i < o->n_parts; i++) {
        struct sl_matrix *w = &o->part[i].w;
        w->data = kc_matrix(l, w->type, w->n_rows, w->n_cols);
        o->part[i].bias =
            o->part[i].bias != NULL ? kc_plain_floats(l, w->n_rows, 1.0f, 0.0f) : NULL;
        const bool scratch = i == 1 && o->activation != SL_ACT_NONE;
        o->part[i].y =
            kc_floats(l, scratch ? KC_SCRATCH : KC_OUTPUT, op->n_tokens * w->n_rows, w->n_rows);
    }
}

static void place_rope(struct kc_layout *l, struct sl_op *op)
{
    struct sl_op_rope *o = &op->rope;
    o->x = kc_floats(l, KC_OUTPUT, (int64_t)op->n_tokens * o->n_heads * o->head_dim, o->head_dim);
    float *freq = kc_place(l, KC_INPUT, sizeof(float) * (size_t)o->n_rot / 2);
    int32_t *pos = kc_place(l, KC_INPUT, sizeof(int32_t) * (size_t)op->n_tokens);
    for (int i = 0; freq != NULL && i < o->n_rot / 2; i++) {
        freq[i] = 1.0f / (1.0f + (float)i * (float)i * 3.7f);
    }
    for (int i = 0; pos != NULL && i < op->n_tokens; i++) {
        pos[i] = kc_rng_below(&l->rng, i % 3 == 0 ? 200000 : 300);
    }
    o->freq = freq;
    o->pos = pos;
}

/* Sequence and position of each token: sequences own equal runs, each after its own past. */
static void place_positions(struct kc_layout *l, struct sl_op *op, const int32_t **pos,
                            const int32_t **seq, int32_t *max_pos)
{
    const struct kc_case *c = &l->in->c;
    const size_t bytes = sizeof(int32_t) * (size_t)op->n_tokens;
    int32_t *p = kc_place(l, KC_INPUT, bytes);
    int32_t *s = *seq != NULL ? kc_place(l, KC_INPUT, bytes) : NULL;
    *max_pos = 0;
    int32_t last_seq = -1;
    int32_t next = 0;
    for (int32_t i = 0; i < op->n_tokens; i++) {
        const int32_t this_seq = (int32_t)((int64_t)i * c->n_sequences / op->n_tokens);
        next = this_seq == last_seq ? next : c->n_past + this_seq * 37;
        last_seq = this_seq;
        *max_pos = next > *max_pos ? next : *max_pos;
        if (p != NULL) {
            p[i] = next;
        }
        if (s != NULL) {
            s[i] = this_seq;
        }
        next++;
    }
    *pos = p;
    *seq = s;
}

/* n_blocks blocks with every bit set: NaN as an F16 and as a scale. What no token may see must not
 * matter. */
static void *place_blocks(struct kc_layout *l, const struct sl_kv_view *kv, int32_t n_blocks,
                          enum kc_role role)
{
    const size_t bytes =
        (size_t)n_blocks * sl_kv_block_bytes(kv->types, kv->n_kv_heads, kv->head_dim);
    void *blocks = kc_place(l, role, bytes);
    if (blocks != NULL) {
        memset(blocks, 0xff, bytes);
    }
    return blocks;
}

/* Both sides of a divided cache, but nothing where the side is not here. Of the later blocks there
 * is one at least. */
static void place_divided(struct kc_layout *l, struct sl_kv_view *kv, int32_t n_blocks,
                          enum kc_role role)
{
    const int32_t n_later = n_blocks > kv->n_first ? n_blocks - kv->n_first : 1;
    kv->data = kv->here != SL_KV_LATER ? place_blocks(l, kv, kv->n_first, role) : NULL;
    kv->later = kv->here != SL_KV_FIRST ? place_blocks(l, kv, n_later, role) : NULL;
}

/* Blocks of all sequences in shuffled physical order. */
static void place_cache(struct kc_layout *l, struct sl_kv_view *kv, int32_t max_pos,
                        enum kc_role role)
{
    const int32_t n_sequences = l->in->c.n_sequences;
    const int32_t per_sequence = max_pos / SL_KV_BLOCK + 1;
    const int32_t n_blocks = per_sequence * n_sequences;
    if (kv->n_first > 0) {
        place_divided(l, kv, n_blocks, role);
        return;
    }
    kv->table_stride = per_sequence;
    if (kv->table != NULL) {
        int32_t *table = kc_place(l, KC_INPUT, sizeof(int32_t) * (size_t)n_blocks);
        for (int32_t i = 0; table != NULL && i < n_blocks; i++) {
            const int32_t j = kc_rng_below(&l->rng, i + 1);
            table[i] = table[j];
            table[j] = i;
        }
        kv->table = table;
    }
    kv->data = place_blocks(l, kv, n_blocks, role);
}

static void place_kv_store(struct kc_layout *l, struct sl_op *op)
{
    struct sl_op_kv_store *o = &op->kv_store;
    const int64_t n = (int64_t)op->n_tokens * o->kv.n_kv_heads * o->kv.head_dim;
    int32_t max_pos;
    o->k = kc_floats(l, KC_INPUT, n, o->kv.head_dim);
    o->v = kc_floats(l, KC_INPUT, n, o->kv.head_dim);
    place_positions(l, op, &o->pos, &o->seq, &max_pos);
    place_cache(l, &o->kv, max_pos, KC_OUTPUT_KV);
}

static bool visible(const struct sl_op *op, int32_t seq, int32_t pos)
{
    const struct sl_op_attention *o = &op->attention;
    for (int32_t t = 0; t < op->n_tokens && sl_kv_is_here(&o->kv, pos); t++) {
        if ((o->seq != NULL ? o->seq[t] : 0) == seq && pos <= o->pos[t] &&
            (o->window == 0 || pos > o->pos[t] - o->window)) {
            return true;
        }
    }
    return false;
}

static void place_attention(struct kc_layout *l, struct sl_op *op)
{
    struct sl_op_attention *o = &op->attention;
    const struct kc_case *c = &l->in->c;
    const int64_t n = (int64_t)op->n_tokens * o->n_heads * o->kv.head_dim;
    int32_t max_pos;
    o->q = kc_floats(l, KC_INPUT, n, o->kv.head_dim);
    o->y = kc_floats(l, KC_OUTPUT, n, o->kv.head_dim);
    o->sinks = o->sinks != NULL ? kc_plain_floats(l, o->n_heads, 3.0f, 0.0f) : NULL;
    o->lse = o->lse != NULL ? kc_floats(l, KC_OUTPUT, n / o->kv.head_dim, o->n_heads) : NULL;
    place_positions(l, op, &o->pos, &o->seq, &max_pos);
    o->n_kv_max = max_pos + 1;
    place_cache(l, &o->kv, max_pos, KC_INPUT);
    for (int32_t s = 0; l->in->base != NULL && s < c->n_sequences; s++) {
        for (int32_t p = 0; p <= max_pos; p++) {
            for (int32_t h = 0; visible(op, s, p) && h < o->kv.n_kv_heads; h++) {
                fill_row(&l->rng, c->fill, o->kv.types.k, sl_kv_key(&o->kv, s, p, h),
                         o->kv.head_dim);
                fill_row(&l->rng, c->fill, o->kv.types.v, sl_kv_value(&o->kv, s, p, h),
                         o->kv.head_dim);
            }
        }
    }
}

/* Logarithms of sums as they meet: about equal, far apart, large, and of rows that have seen
 * nothing on one side or both. */
static float lse_value(struct kc_rng *rng, float near)
{
    switch (kc_rng_below(rng, 8)) {
    case 0:
        return -INFINITY;
    case 1:
        return kc_rng_float(rng) * 60.0f;
    case 2:
        return kc_rng_float(rng) * 1e4f;
    case 3:
        return near;
    default:
        return near + kc_rng_float(rng) * 2.0f;
    }
}

static void place_merge(struct kc_layout *l, struct sl_op *op)
{
    struct sl_op_merge *o = &op->merge;
    const int64_t n_rows = (int64_t)op->n_tokens * o->n_heads;
    float *lse[2];
    o->x = kc_floats(l, KC_INPUT, n_rows * o->head_dim, o->head_dim);
    o->y = kc_floats(l, KC_OUTPUT, n_rows * o->head_dim, o->head_dim);
    for (int side = 0; side < 2; side++) {
        lse[side] = kc_place(l, KC_INPUT, sizeof(float) * (size_t)n_rows);
    }
    for (int64_t row = 0; lse[0] != NULL && row < n_rows; row++) {
        const float near = kc_rng_float(&l->rng) * 10.0f;
        lse[0][row] = lse_value(&l->rng, near);
        lse[1][row] = lse_value(&l->rng, near);
    }
    o->x_lse = lse[0];
    o->y_lse = lse[1];
}

static void lay_out(struct kc_layout *l, struct sl_op *op)
{
    l->at = GUARD;
    switch (op->kind) {
    case SL_OP_NORM:
        place_norm(l, op);
        break;
    case SL_OP_LINEAR:
        place_linear(l, op);
        break;
    case SL_OP_ROPE:
        place_rope(l, op);
        break;
    case SL_OP_KV_STORE:
        place_kv_store(l, op);
        break;
    case SL_OP_ATTENTION:
        place_attention(l, op);
        break;
    case SL_OP_ROUTER:
        kc_router_place(l, op);
        break;
    case SL_OP_EXPERTS:
        kc_experts_place(l, op);
        break;
    case SL_OP_DIVIDE:
        kc_divide_place(l, op);
        break;
    case SL_OP_ADD:
        op->add.x = kc_floats(l, KC_INPUT, op->n_tokens * op->add.n, op->add.n);
        op->add.y = kc_floats(l, KC_OUTPUT, op->n_tokens * op->add.n, op->add.n);
        break;
    case SL_OP_MERGE:
        place_merge(l, op);
        break;
    default:
        break;
    }
}

bool kc_instance_init(struct kc_instance *in, const struct kc_case *c)
{
    memset(in, 0, sizeof(*in));
    in->c = *c;
    in->op = c->op;
    struct kc_layout l = {.in = in, .rng = {c->seed}};
    lay_out(&l, &in->op);
    in->bytes = l.at;
    in->base = sl_alloc_aligned(SL_MEM_BASE, in->bytes, 256);
    if (in->base == NULL) {
        return false;
    }
    memset(in->base, 0xa5, in->bytes);
    in->op = c->op;
    l.rng.state = c->seed;
    lay_out(&l, &in->op);
    return true;
}

void kc_instance_finish(struct kc_instance *in)
{
    sl_free(in->base);
    memset(in, 0, sizeof(*in));
}

/* Move one address, whatever it points to. */
#define MOVE(field)                                                                                \
    do {                                                                                           \
        if ((field) != NULL) {                                                                     \
            (field) = (void *)(to + ((const char *)(field)-from));                                 \
        }                                                                                          \
    } while (0)

static void move_experts_matrix(struct sl_experts_matrix *m, const char *from, char *to)
{
    MOVE(m->data);
    MOVE(m->table);
    MOVE(m->bias);
}

static void move_table(const struct kc_instance *in, const struct sl_experts_matrix *m, char *copy,
                       const char *to)
{
    if (m->table == NULL) {
        return;
    }
    const void **entries =
        (const void **)(void *)(copy + ((const char *)(const void *)m->table - in->base));
    for (int32_t i = 0; i < in->op.experts.n; i++) {
        const char *address = m->table[i];
        entries[i] = address != NULL ? to + (address - in->base) : NULL;
    }
}

void kc_tables_move(const struct kc_instance *in, char *copy, const char *to)
{
    if (in->op.kind == SL_OP_EXPERTS) {
        move_table(in, &in->op.experts.gate, copy, to);
        move_table(in, &in->op.experts.up, copy, to);
        move_table(in, &in->op.experts.down, copy, to);
    }
}

struct sl_op kc_op_moved(const struct sl_op *op, const char *from, char *to)
{
    struct sl_op m = *op;
    switch (m.kind) {
    case SL_OP_NORM:
        MOVE(m.norm.x);
        MOVE(m.norm.weight);
        MOVE(m.norm.y);
        break;
    case SL_OP_LINEAR:
        MOVE(m.linear.x);
        for (int i = 0; i < m.linear.n_parts; i++) {
            MOVE(m.linear.part[i].w.data);
            MOVE(m.linear.part[i].bias);
            MOVE(m.linear.part[i].y);
        }
        break;
    case SL_OP_ROPE:
        MOVE(m.rope.x);
        MOVE(m.rope.pos);
        MOVE(m.rope.freq);
        break;
    case SL_OP_KV_STORE:
        MOVE(m.kv_store.k);
        MOVE(m.kv_store.v);
        MOVE(m.kv_store.pos);
        MOVE(m.kv_store.seq);
        MOVE(m.kv_store.kv.data);
        MOVE(m.kv_store.kv.later);
        MOVE(m.kv_store.kv.table);
        break;
    case SL_OP_ATTENTION:
        MOVE(m.attention.q);
        MOVE(m.attention.y);
        MOVE(m.attention.pos);
        MOVE(m.attention.seq);
        MOVE(m.attention.sinks);
        MOVE(m.attention.lse);
        MOVE(m.attention.kv.data);
        MOVE(m.attention.kv.later);
        MOVE(m.attention.kv.table);
        break;
    case SL_OP_ROUTER:
        MOVE(m.router.x);
        MOVE(m.router.w.data);
        MOVE(m.router.bias);
        MOVE(m.router.selection_bias);
        MOVE(m.router.ids);
        MOVE(m.router.weights);
        break;
    case SL_OP_EXPERTS:
        MOVE(m.experts.x);
        MOVE(m.experts.y);
        MOVE(m.experts.ids);
        MOVE(m.experts.weights);
        move_experts_matrix(&m.experts.gate, from, to);
        move_experts_matrix(&m.experts.up, from, to);
        move_experts_matrix(&m.experts.down, from, to);
        break;
    case SL_OP_DIVIDE:
        MOVE(m.divide.ids);
        MOVE(m.divide.at_hand);
        MOVE(m.divide.mine);
        MOVE(m.divide.uses);
        break;
    case SL_OP_ADD:
        MOVE(m.add.x);
        MOVE(m.add.y);
        break;
    case SL_OP_MERGE:
        MOVE(m.merge.x);
        MOVE(m.merge.x_lse);
        MOVE(m.merge.y);
        MOVE(m.merge.y_lse);
        break;
    default:
        break;
    }
    return m;
}
