/* SPDX-License-Identifier: Apache-2.0
 *
 * Could experts be fetched before their router speaks? For every layer of every token the router of
 * the next layer is asked on the hidden state that is there already, and what it says is held
 * against what it chooses when its turn comes.
 *
 *   expert_prefetch MODEL [--tokens N] [--threads N] [--slots PERCENT,...]
 *
 * The hidden state is that before this layer's feed-forward (a whole feed-forward and an attention
 * ahead of the choice), or that after it (an attention ahead). Of the experts that have no slot,
 * slots going to those used most in the first half of the tokens, the table shows for the second
 * half: how many a layer uses, how many of these were among the foretold, and how often the one,
 * two and four foretold first were used. Everything is computed by the CPU.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "base/pool.h"
#include "cpu/cpu.h"
#include "model/model.h"

#define MAX_PERCENTS 8
#define N_AHEAD 2 /* before and after the feed-forward */
#define N_FIRST 3
static const int first_counts[N_FIRST] = {1, 2, 4};

struct walker {
    struct sl_model *model;
    struct sl_pool *pool;
    const struct sl_cpu_kernels *kernels;
    struct sl_shard_bind bind;
    uint8_t *kv; /* of all layers, one after the other */
    size_t kv_layer_bytes;
    void *scratch;
    int32_t pos;
    int32_t n_used, n_experts, n_layers, n_tokens;
    int32_t *chosen;            /* [tokens, layers, used] */
    int32_t *foretold[N_AHEAD]; /* [tokens, layers, used]; of layer 0 nothing */
};

static int32_t *ids_of(const struct walker *w, int32_t *list, int32_t token, int32_t layer)
{
    return list + ((size_t)token * (size_t)w->n_layers + (size_t)layer) * (size_t)w->n_used;
}

static void run(struct walker *w, int32_t index, enum sl_shard_part part)
{
    const struct sl_shard *const shard = &w->model->shards[index];
    struct sl_op ops[SL_SHARD_MAX_OPS];
    for (uint32_t i = 0; i < shard->n_weights; i++) {
        w->bind.weights[i] = shard->weights[i].name ? shard->weights[i].m.data : NULL;
    }
    w->bind.part = part;
    w->bind.kv.data = w->kv + shard->layer * w->kv_layer_bytes;
    const int n_ops = sl_shard_build(w->model, shard, &w->bind, ops);
    sl_cpu_run(w->kernels, w->pool, ops, n_ops, w->scratch);
}

/* What a layer's router says of the hidden state as it is. */
static void ask(struct walker *w, int32_t layer, int32_t *out)
{
    const int32_t index = 2 * layer + 1;
    run(w, index, SL_PART_ROUTE);
    const struct sl_split none = {0};
    const struct sl_shard_choice at = sl_shard_choice(w->model, &w->model->shards[index], none, 1);
    memcpy(out, (const char *)w->bind.workspace + at.ids, (size_t)w->n_used * sizeof *out);
}

static void one_token(struct walker *w, int32_t t, int32_t token)
{
    w->pos = t;
    w->bind.n_kv_max = t + 1;
    sl_model_embed(w->model, &token, 1, w->bind.hidden);
    for (int32_t layer = 0; layer < w->n_layers; layer++) {
        run(w, 2 * layer, SL_PART_WHOLE);
        ask(w, layer, ids_of(w, w->chosen, t, layer));
        const bool next = layer + 1 < w->n_layers;
        if (next) {
            ask(w, layer + 1, ids_of(w, w->foretold[0], t, layer + 1));
        }
        run(w, 2 * layer + 1, SL_PART_WHOLE);
        if (next) {
            ask(w, layer + 1, ids_of(w, w->foretold[1], t, layer + 1));
        }
    }
}

/* Uses in the first half, by expert of all layers; sorted for qsort. */
static const int32_t *use_counts;

static int by_use(const void *a, const void *b)
{
    const int32_t i = *(const int32_t *)a, j = *(const int32_t *)b;
    return use_counts[i] != use_counts[j] ? (use_counts[i] < use_counts[j] ? 1 : -1)
                                          : (i > j) - (i < j);
}

static void give_slots(const struct walker *w, int percent, bool *has_slot)
{
    const size_t n = (size_t)w->n_layers * (size_t)w->n_experts;
    int32_t *const counts = calloc(n, sizeof *counts), *const order = calloc(n, sizeof *order);
    if (!counts || !order) {
        exit(1);
    }
    for (int32_t t = 0; t < w->n_tokens / 2; t++) {
        for (int32_t layer = 0; layer < w->n_layers; layer++) {
            for (int32_t j = 0; j < w->n_used; j++) {
                counts[layer * w->n_experts + ids_of(w, w->chosen, t, layer)[j]]++;
            }
        }
    }
    for (size_t i = 0; i < n; i++) {
        order[i] = (int32_t)i;
        has_slot[i] = false;
    }
    use_counts = counts;
    qsort(order, n, sizeof *order, by_use);
    for (size_t i = 0; i < n * (size_t)percent / 100; i++) {
        has_slot[order[i]] = true;
    }
    free(counts);
    free(order);
}

static bool is_among(const int32_t *ids, int32_t n, int32_t id)
{
    for (int32_t j = 0; j < n; j++) {
        if (ids[j] == id) {
            return true;
        }
    }
    return false;
}

/* Counts of one line of the table. */
struct tally {
    int64_t n_layers, n_missing, n_foretold;
    int64_t n_first[N_FIRST], n_first_used[N_FIRST];
};

static void count_layer(const struct walker *w, const bool *slots, const int32_t *chosen,
                        const int32_t *foretold, struct tally *out)
{
    out->n_layers++;
    int32_t rank = 0;
    for (int32_t j = 0; j < w->n_used; j++) {
        if (!slots[chosen[j]]) {
            out->n_missing++;
            out->n_foretold += is_among(foretold, w->n_used, chosen[j]);
        }
        if (slots[foretold[j]]) {
            continue;
        }
        for (int k = 0; k < N_FIRST; k++) {
            if (rank < first_counts[k]) {
                out->n_first[k]++;
                out->n_first_used[k] += is_among(chosen, w->n_used, foretold[j]);
            }
        }
        rank++;
    }
}

static double share(int64_t part, int64_t all)
{
    return all > 0 ? 100.0 * (double)part / (double)all : 0;
}

static void report(struct walker *w, int percent)
{
    bool *const has_slot = calloc((size_t)w->n_layers * (size_t)w->n_experts, sizeof *has_slot);
    if (!has_slot) {
        exit(1);
    }
    give_slots(w, percent, has_slot);
    for (int a = 0; a < N_AHEAD; a++) {
        struct tally c = {0};
        for (int32_t t = w->n_tokens / 2; t < w->n_tokens; t++) {
            for (int32_t layer = 1; layer < w->n_layers; layer++) {
                count_layer(w, has_slot + layer * w->n_experts, ids_of(w, w->chosen, t, layer),
                            ids_of(w, w->foretold[a], t, layer), &c);
            }
        }
        printf("| %d%% | %s the feed-forward | %.2f | %.1f%% | %.1f%% | %.1f%% | %.1f%% |\n",
               percent, a == 0 ? "before" : "after", (double)c.n_missing / (double)c.n_layers,
               share(c.n_foretold, c.n_missing), share(c.n_first_used[0], c.n_first[0]),
               share(c.n_first_used[1], c.n_first[1]), share(c.n_first_used[2], c.n_first[2]));
    }
    free(has_slot);
}

static bool prepare(struct walker *w, int n_threads)
{
    const struct sl_model *const model = w->model;
    const struct sl_hparams *const hp = &model->hp;
    w->n_layers = (int32_t)hp->n_layers;
    w->n_experts = (int32_t)hp->n_experts;
    w->n_used = (int32_t)hp->n_experts_used;
    w->kernels = sl_cpu_kernels(sl_cpu_level());
    w->bind.kv = (struct sl_kv_view){.types = {SL_TYPE_F16, SL_TYPE_F16},
                                     .n_kv_heads = (int32_t)hp->n_kv_heads,
                                     .head_dim = (int32_t)hp->head_dim};
    const size_t n_blocks = ((size_t)w->n_tokens + SL_KV_BLOCK - 1) / SL_KV_BLOCK;
    w->kv_layer_bytes =
        n_blocks * sl_kv_block_bytes(w->bind.kv.types, w->bind.kv.n_kv_heads, w->bind.kv.head_dim);
    size_t workspace = 0, scratch = 0;
    for (uint32_t i = 0; i < model->n_shards; i++) {
        const size_t a = sl_shard_workspace_bytes(model, &model->shards[i], 1, 1);
        const size_t b = sl_shard_most_scratch_bytes(model, &model->shards[i], 1, 1);
        workspace = a > workspace ? a : workspace;
        scratch = b > scratch ? b : scratch;
    }
    const size_t n = (size_t)w->n_tokens * hp->n_layers * hp->n_experts_used;
    w->kv = calloc(hp->n_layers, w->kv_layer_bytes);
    w->chosen = calloc(n, sizeof *w->chosen);
    w->foretold[0] = calloc(n, sizeof *w->chosen);
    w->foretold[1] = calloc(n, sizeof *w->chosen);
    w->scratch = sl_alloc_aligned(SL_MEM_EXEC, sl_cpu_scratch_bytes(scratch, n_threads), 256);
    w->bind.workspace = sl_alloc_aligned(SL_MEM_EXEC, workspace, 256);
    w->bind.hidden = sl_alloc_aligned(SL_MEM_EXEC, hp->n_embd * sizeof(float), 256);
    w->bind.consts = model->consts;
    w->bind.pos = &w->pos;
    w->bind.n_tokens = 1;
    return w->kv && w->chosen && w->foretold[0] && w->foretold[1] && w->scratch &&
           w->bind.workspace && w->bind.hidden;
}

static void finish(struct walker *w)
{
    free(w->kv);
    free(w->chosen);
    free(w->foretold[0]);
    free(w->foretold[1]);
    sl_free(w->scratch);
    sl_free(w->bind.workspace);
    sl_free(w->bind.hidden);
    sl_pool_destroy(&w->pool);
    sl_model_close(&w->model);
}

int main(int argc, char **argv)
{
    struct sluice_error err;
    struct walker w = {.n_tokens = 64};
    int n_threads = 1;
    char percents[64] = "0,10,40";
    for (int i = 2; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--tokens") == 0) {
            w.n_tokens = atoi(argv[i + 1]);
        } else if (strcmp(argv[i], "--threads") == 0) {
            n_threads = atoi(argv[i + 1]);
        } else if (strcmp(argv[i], "--slots") == 0) {
            snprintf(percents, sizeof percents, "%s", argv[i + 1]);
        }
    }
    if (argc < 2 || w.n_tokens < 2 || n_threads < 1) {
        fprintf(stderr, "usage: %s MODEL [--tokens N] [--threads N] [--slots PERCENT,...]\n",
                argv[0]);
        return 2;
    }
    if (sl_model_open(&w.model, argv[1], 0, &err) != SLUICE_STATUS_OK ||
        sl_pool_create(&w.pool, &(struct sl_pool_options){.n_threads = n_threads}, &err) !=
            SLUICE_STATUS_OK) {
        fprintf(stderr, "%s\n", err.message);
        return 1;
    }
    if (w.model->hp.n_experts == 0 || !prepare(&w, n_threads)) {
        fprintf(stderr, "no mixture of experts, or no memory\n");
        return 1;
    }
    uint32_t state = 12345;
    for (int32_t t = 0; t < w.n_tokens; t++) {
        state = state * 1664525u + 1013904223u;
        one_token(&w, t, (int32_t)((state >> 8) % w.model->hp.n_vocab));
    }
    printf("| slots | asked | missing a layer | foretold | of the first | first 2 | first 4 |\n"
           "| ---: | --- | ---: | ---: | ---: | ---: | ---: |\n");
    for (const char *at = percents; at; at = strchr(at, ',') ? strchr(at, ',') + 1 : NULL) {
        report(&w, atoi(at));
    }
    finish(&w);
    return 0;
}
