/* SPDX-License-Identifier: Apache-2.0
 *
 * The rules that turn the counts of a candidate into placements (see search.h).
 */
#include "plan/search_internal.h"

#include <string.h>

static int32_t reverse_bits(int32_t value, int32_t n_bits)
{
    int32_t out = 0;
    for (int32_t i = 0; i < n_bits; i++) {
        out = out << 1 | (value >> i & 1);
    }
    return out;
}

int32_t sl_search_resident_order(struct sl_search *s, int32_t n_kv_layers)
{
    const struct sl_order_kind kind = {n_kv_layers, s->split.head > 0, s->head_on_host};
    if (s->n_order > 0 && memcmp(&kind, &s->order_kind, sizeof kind) == 0) {
        return s->n_order;
    }
    int32_t *const order = s->order;
    int32_t n = 0;
    for (int32_t i = 0; i < s->n_shards; i++) {
        const struct sl_shard *const shard = &s->model->shards[i];
        if (shard->kind == SL_SHARD_ATTENTION && (int32_t)shard->layer < n_kv_layers) {
            order[n++] = i;
        }
    }
    if (s->split.head > 0) {
        order[n++] = s->n_shards - 1;
    }
    /* Any prefix is spread evenly over the depth, so that the copies of the others hide behind the
     * work of the resident ones: layers in the order of their bits read backwards. */
    int32_t n_bits = 0;
    while ((1 << n_bits) < s->n_layers) {
        n_bits++;
    }
    for (int32_t r = 0; r < 1 << n_bits; r++) {
        const int32_t layer = reverse_bits(r, n_bits);
        if (layer < s->n_layers) {
            order[n++] = 2 * layer + 1; /* its FFN */
        }
    }
    if (!s->head_on_host && s->split.head == 0) {
        order[n++] = s->n_shards - 1;
    }
    for (int32_t i = 0; i < n; i++) {
        s->order_bytes[i + 1] = s->order_bytes[i] + s->resident_bytes[order[i]];
    }
    s->order_kind = kind;
    s->n_order = n;
    return n;
}

size_t sl_search_base_bytes(const struct sl_search *s, int32_t n_kv_layers)
{
    return s->consts_bytes + s->tables_bytes + s->kv_table_bytes +
           (size_t)n_kv_layers * s->kv_device_bytes;
}

/* FFN number j of m that are not resident: streamed when an even spread of n says so. The first of
 * a group stays on the host: the copy of the streamed one hides behind it. */
static bool spread(int32_t j, int32_t m, int32_t n)
{
    return n == m || (n > 0 && (int64_t)(j + 1) * n / m != (int64_t)j * n / m);
}

/* Where an FFN goes that is not resident as a whole: of a mixture, cut, or beyond the prefix. */
static enum sl_placement place_ffn(const struct sl_search *s, const struct sl_candidate *c,
                                   int32_t shard, bool streamed)
{
    if (c->n_fed > 0) {
        return SL_PLACE_FED;
    }
    if (streamed) {
        return SL_PLACE_STREAMED;
    }
    if (s->n_experts > 0) {
        return c->share == SL_SHARE_HOST   ? SL_PLACE_HOST
               : c->share == SL_DIVIDE_ALL ? SL_PLACE_RESIDENT
                                           : SL_PLACE_SHARED;
    }
    return s->is_in_prefix[shard] && c->share != SL_SHARE_HOST ? SL_PLACE_SHARED : SL_PLACE_HOST;
}

static enum sl_placement place_head(const struct sl_search *s, const struct sl_candidate *c)
{
    if (!c->head_on_device) {
        return SL_PLACE_HOST;
    }
    return !s->is_in_prefix[s->n_shards - 1] ? SL_PLACE_STREAMED
           : s->split.head > 0               ? SL_PLACE_SHARED
                                             : SL_PLACE_RESIDENT;
}

void sl_search_place(struct sl_search *s, const struct sl_candidate *c, uint8_t *placement)
{
    const int32_t n_order = sl_search_resident_order(s, c->n_kv_layers);
    memset(s->is_in_prefix, 0, (size_t)s->n_shards * sizeof *s->is_in_prefix);
    for (int32_t i = 0; i < c->n_resident; i++) {
        s->is_in_prefix[s->order[i]] = true;
    }
    const bool in_parts = s->n_experts > 0 || s->split.ffn > 0; /* no FFN is resident as a whole */
    int32_t n_ffn = in_parts ? s->n_layers : 0;
    for (int32_t i = c->n_resident; i < n_order && !in_parts; i++) {
        n_ffn += s->brief[s->order[i]].kind == SL_SHARD_FFN;
    }
    const bool cut = sl_split_cuts_kv(s->split);
    int32_t j = 0;
    for (int32_t i = 0; i < s->n_shards; i++) {
        const struct sl_shard_brief *const shard = &s->brief[i];
        const bool there = s->is_in_prefix[i];
        s->item_bytes[i] = there ? s->rest_bytes[i] : s->image_bytes[i];
        if (shard->kind == SL_SHARD_HEAD) {
            placement[i] = place_head(s, c);
        } else if (shard->kind == SL_SHARD_FFN) {
            placement[i] = there && !in_parts
                               ? SL_PLACE_RESIDENT
                               : place_ffn(s, c, i, spread(j++, n_ffn, c->n_ffn_streamed));
            if (placement[i] == SL_PLACE_FED) {
                s->item_bytes[i] = (size_t)c->n_fed * s->slot_bytes;
            }
        } else {
            const bool kv_here = shard->layer < c->n_kv_layers;
            s->item_bytes[i] += kv_here && !cut ? 0 : s->kv_host_bytes;
            placement[i] = there && cut
                               ? (c->attention_streamed ? SL_PLACE_STREAMED : SL_PLACE_SHARED)
                           : there                            ? SL_PLACE_RESIDENT
                           : kv_here || c->attention_streamed ? SL_PLACE_STREAMED
                                                              : SL_PLACE_HOST;
        }
    }
}
