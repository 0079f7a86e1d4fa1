/* SPDX-License-Identifier: Apache-2.0
 *
 * The operators that go row by row: norm, rotary embedding, KV store, add, merge. Rows are shared
 * out in equal runs; each is small and costs the same.
 */
#include <math.h>
#include <string.h>

#include "cpu/team.h"
#include "op/kv.h"

/* This thread's share [*first, *end) of n rows. */
static void share(const struct sl_cpu_thread *t, int64_t n, int64_t *first, int64_t *end)
{
    *first = n * t->thread / t->n_threads;
    *end = n * (t->thread + 1) / t->n_threads;
}

void sl_cpu_norm(const struct sl_cpu_thread *t, const struct sl_op *op)
{
    const struct sl_op_norm *norm = &op->norm;
    int64_t first, end;
    share(t, (int64_t)op->n_tokens * norm->rows_per_token, &first, &end);
    for (int64_t r = first; r < end; r++) {
        t->kernels->rows->norm(norm->x + r * norm->n, norm->weight, norm->y + r * norm->n, norm->n,
                               norm->eps, norm->accumulate);
    }
}

/* Cosines and sines of one token. The angle is reduced in double: at positions in the hundred
 * thousands a float angle would be off by a hundredth of a radian. */
static void rope_table(const struct sl_op_rope *rope, int32_t pos, float *cosines, float *sines)
{
    const double turn = 6.283185307179586476925;
    for (int32_t i = 0; i < rope->n_rot / 2; i++) {
        const double angle = (double)pos * (double)rope->freq[i];
        const float reduced = (float)(angle - turn * rint(angle / turn));
        float s, c;
        sincosf(reduced, &s, &c);
        cosines[i] = c * rope->magnitude;
        sines[i] = s * rope->magnitude;
    }
}

void sl_cpu_rope(const struct sl_cpu_thread *t, const struct sl_op *op)
{
    const struct sl_op_rope *rope = &op->rope;
    const struct sl_cpu_row_kernels *k = t->kernels->rows;
    const int n_pairs = rope->n_rot / 2;
    float *cosines = t->own;
    float *sines = cosines + n_pairs;
    int64_t first, end;
    share(t, op->n_tokens, &first, &end);
    for (int64_t token = first; token < end; token++) {
        rope_table(rope, rope->pos[token], cosines, sines);
        float *x = rope->x + token * rope->n_heads * rope->head_dim;
        for (int32_t h = 0; h < rope->n_heads; h++, x += rope->head_dim) {
            if (rope->neox) {
                k->rope_neox(x, cosines, sines, n_pairs);
            } else {
                k->rope_pairs(x, cosines, sines, n_pairs);
            }
        }
    }
}

void sl_cpu_kv_store(const struct sl_cpu_thread *t, const struct sl_op *op)
{
    const struct sl_op_kv_store *store = &op->kv_store;
    const struct sl_kv_view *kv = &store->kv;
    int64_t first, end;
    share(t, (int64_t)op->n_tokens * kv->n_kv_heads, &first, &end);
    for (int64_t row = first; row < end; row++) {
        const int32_t token = (int32_t)(row / kv->n_kv_heads);
        const int32_t head = (int32_t)(row % kv->n_kv_heads);
        const int32_t seq = store->seq != NULL ? store->seq[token] : 0;
        const int32_t pos = store->pos[token];
        if (!sl_kv_is_here(kv, pos)) {
            continue;
        }
        const int64_t at = row * kv->head_dim;
        const float *key = store->k + at;
        float turned[SL_KV_MAX_HEAD_DIM] __attribute__((aligned(64)));
        if (sl_kv_turns_keys(kv->types)) {
            memcpy(turned, key, sizeof(float) * (size_t)kv->head_dim);
            sl_kv_turn(turned, kv->head_dim);
            key = turned;
        }
        t->kernels->rows->pack(kv->types.k, key, sl_kv_key(kv, seq, pos, head), kv->head_dim);
        t->kernels->rows->pack(kv->types.v, store->v + at, sl_kv_value(kv, seq, pos, head),
                               kv->head_dim);
    }
}

void sl_cpu_add(const struct sl_cpu_thread *t, const struct sl_op *op)
{
    int64_t first, end;
    share(t, op->n_tokens, &first, &end);
    for (int64_t i = first * op->add.n; i < end * op->add.n; i++) {
        op->add.y[i] += op->add.x[i];
    }
}

void sl_cpu_merge(const struct sl_cpu_thread *t, const struct sl_op *op)
{
    const struct sl_op_merge *merge = &op->merge;
    int64_t first, end;
    share(t, (int64_t)op->n_tokens * merge->n_heads, &first, &end);
    for (int64_t row = first; row < end; row++) {
        const float a = merge->y_lse[row], b = merge->x_lse[row], max = a > b ? a : b;
        const bool seen = max > -INFINITY;
        const float by = seen ? expf(a - max) : 0.0f, bx = seen ? expf(b - max) : 0.0f;
        const float scale = seen ? 1.0f / (by + bx) : 0.0f;
        for (int64_t i = row * merge->head_dim; i < (row + 1) * merge->head_dim; i++) {
            merge->y[i] = (by * merge->y[i] + bx * merge->x[i]) * scale;
        }
    }
}
