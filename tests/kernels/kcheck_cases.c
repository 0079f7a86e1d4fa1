/* SPDX-License-Identifier: Apache-2.0
 *
 * The lists of cases. Fixed cases come first: shapes of real models and the edges that have gone
 * wrong before. The rest is drawn from the seed.
 */
#include <stdio.h>
#include <string.h>

#include "kcheck.h"

#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))
#define PICK(rng, ...)                                                                             \
    kc_rng_pick(rng, COUNT(((const int[]){__VA_ARGS__})), (const int[]){__VA_ARGS__})

uint64_t kc_rng_next(struct kc_rng *rng)
{
    /* splitmix64 */
    uint64_t z = rng->state += UINT64_C(0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    z = (z ^ z >> 27) * UINT64_C(0x94d049bb133111eb);
    return z ^ z >> 31;
}

int kc_rng_below(struct kc_rng *rng, int n)
{
    return (int)(kc_rng_next(rng) >> 33) % n;
}

int kc_rng_pick(struct kc_rng *rng, int n, const int *of)
{
    return of[kc_rng_below(rng, n)];
}

float kc_rng_float(struct kc_rng *rng)
{
    /* The sum of four uniform numbers is near enough to normal; 1.732 makes its deviation 1. */
    const uint64_t bits = kc_rng_next(rng);
    float sum = 0.0f;
    for (int i = 0; i < 4; i++) {
        sum += (float)(bits >> 16 * i & 0xffff) / 65536.0f - 0.5f;
    }
    return sum * 1.7320508f;
}

static bool coin(struct kc_rng *rng)
{
    return kc_rng_below(rng, 2) == 1;
}

static void make_norm(struct kc_case *c, struct kc_rng *rng)
{
    struct sl_op_norm *o = &c->op.norm;
    c->op.n_tokens = PICK(rng, 1, 1, 2, 3, 7, 33);
    o->n = PICK(rng, 1, 3, 8, 17, 32, 64, 100, 128, 256, 576, 1000, 2048, 4096);
    o->rows_per_token = PICK(rng, 1, 1, 1, 3, 8);
    o->weight = coin(rng) || coin(rng) ? KC_PRESENT : NULL;
    o->eps = coin(rng) ? 1e-6f : 1e-5f;
    o->accumulate = kc_rng_below(rng, 4) == 0;
    c->in_place = !o->accumulate && kc_rng_below(rng, 4) == 0;
}

static void make_rope(struct kc_case *c, struct kc_rng *rng)
{
    struct sl_op_rope *o = &c->op.rope;
    c->op.n_tokens = PICK(rng, 1, 1, 2, 5, 17, 40);
    o->n_heads = PICK(rng, 1, 3, 8, 14);
    o->head_dim = PICK(rng, 32, 64, 80, 96, 128, 256);
    o->n_rot = coin(rng) ? o->head_dim : PICK(rng, 2, 6, 16, 32);
    o->magnitude = coin(rng) ? 1.0f : 1.25f;
    o->neox = coin(rng);
}

static void make_add(struct kc_case *c, struct kc_rng *rng)
{
    c->op.n_tokens = PICK(rng, 1, 1, 2, 5, 17, 40);
    c->op.add.n = PICK(rng, 1, 7, 64, 576, 2048, 4097);
}

static void make_merge(struct kc_case *c, struct kc_rng *rng)
{
    c->op.n_tokens = PICK(rng, 1, 1, 2, 5, 17, 40);
    c->op.merge.n_heads = PICK(rng, 1, 3, 8, 14);
    c->op.merge.head_dim = PICK(rng, 4, 32, 64, 80, 128, 256);
}

static void make_kv(struct kc_case *c, struct sl_kv_view *kv, struct kc_rng *rng)
{
    kv->types.k = (enum sl_type)PICK(rng, SL_TYPE_F16, SL_TYPE_F16, SL_TYPE_Q8_0, SL_TYPE_Q4_0);
    kv->types.v =
        coin(rng) ? kv->types.k : (enum sl_type)PICK(rng, SL_TYPE_F16, SL_TYPE_Q8_0, SL_TYPE_Q4_0);
    kv->head_dim = PICK(rng, 32, 64, 64, 96, 128, 128, 160, 256);
    kv->n_kv_heads = PICK(rng, 1, 2, 3, 4);
    c->n_sequences = PICK(rng, 1, 1, 2, 3);
    kv->table = c->n_sequences > 1 || coin(rng) ? KC_PRESENT : NULL;
}

/* A third of the caches of one sequence is divided, behind any block: both sides may be empty, and
 * so may be what a token sees of its side. After the number of tokens and their past. */
static void divide_kv(const struct kc_case *c, struct sl_kv_view *kv, struct kc_rng *rng)
{
    if (c->n_sequences > 1 || kc_rng_below(rng, 3) > 0) {
        return;
    }
    const int n_blocks = (c->n_past + c->op.n_tokens - 1) / SL_KV_BLOCK + 1;
    kv->table = NULL;
    kv->n_first = 1 + kc_rng_below(rng, n_blocks + 1);
    kv->here = (enum sl_kv_here)PICK(rng, SL_KV_ALL, SL_KV_FIRST, SL_KV_LATER);
}

static void make_kv_store(struct kc_case *c, struct kc_rng *rng)
{
    struct sl_op_kv_store *o = &c->op.kv_store;
    make_kv(c, &o->kv, rng);
    c->op.n_tokens = PICK(rng, 1, 1, 2, 5, 63, 70);
    c->n_past = kc_rng_below(rng, 150);
    divide_kv(c, &o->kv, rng);
    o->seq = c->n_sequences > 1 || coin(rng) ? KC_PRESENT : NULL;
}

static void make_attention(struct kc_case *c, struct kc_rng *rng)
{
    struct sl_op_attention *o = &c->op.attention;
    make_kv(c, &o->kv, rng);
    c->op.n_tokens = PICK(rng, 1, 1, 1, 2, 3, 5, 15, 16, 17, 33, 70, 130);
    c->n_past = PICK(rng, 0, 0, 1, 62, 63, 64, 65, 127, 128, 300, 700);
    if (c->op.n_tokens > 5) {
        c->n_past = c->n_past % 70; /* the reference takes its time */
    }
    o->n_heads = o->kv.n_kv_heads * PICK(rng, 1, 2, 3, 4, 7, 8);
    o->seq = c->n_sequences > 1 || coin(rng) ? KC_PRESENT : NULL;
    o->window = coin(rng) ? 0 : PICK(rng, 1, 7, 64, 100, 256);
    o->softcap = coin(rng) ? 0.0f : 30.0f;
    o->sinks = kc_rng_below(rng, 3) == 0 ? KC_PRESENT : NULL;
    o->lse = coin(rng) ? KC_PRESENT : NULL;
    divide_kv(c, &o->kv, rng);
}

static const int linear_types[] = {
    SL_TYPE_F32,  SL_TYPE_F16,    SL_TYPE_BF16,   SL_TYPE_Q4_0,  SL_TYPE_Q4_1, SL_TYPE_Q5_0,
    SL_TYPE_Q5_1, SL_TYPE_Q8_0,   SL_TYPE_Q2_K,   SL_TYPE_Q3_K,  SL_TYPE_Q4_K, SL_TYPE_Q5_K,
    SL_TYPE_Q6_K, SL_TYPE_IQ4_NL, SL_TYPE_IQ4_XS, SL_TYPE_MXFP4,
};

/* Each type in turn, so that few cases already see them all. */
static void make_linear(struct kc_case *c, struct kc_rng *rng, int index)
{
    struct sl_op_linear *o = &c->op.linear;
    c->op.n_tokens = PICK(rng, 1, 1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 33, 65);
    o->n_parts = PICK(rng, 1, 1, 1, 2, 3, 4);
    const int first = linear_types[index % COUNT(linear_types)];
    int64_t n_cols = 256 * PICK(rng, 1, 2, 3, 5);
    bool ragged = true;
    for (int i = 0; i < o->n_parts; i++) {
        const bool same = i == 0 || coin(rng);
        o->part[i].w.type =
            (enum sl_type)(same ? first : kc_rng_pick(rng, COUNT(linear_types), linear_types));
        o->part[i].w.n_rows = PICK(rng, 1, 3, 16, 31, 64, 65, 100, 150);
        o->part[i].bias = coin(rng) ? KC_PRESENT : NULL;
        ragged = ragged && sl_type_traits(o->part[i].w.type)->block_items <= 32;
    }
    if (ragged) {
        n_cols = 32 * PICK(rng, 1, 2, 3, 7, 18, 19, 33);
        if (sl_type_traits((uint32_t)first)->block_items == 1 && o->n_parts == 1) {
            n_cols = PICK(rng, 1, 7, 100, 257, 576);
        }
    }
    for (int i = 0; i < o->n_parts; i++) {
        o->part[i].w.n_cols = n_cols;
    }
    if (o->n_parts == 2 && coin(rng)) {
        o->activation = coin(rng) ? SL_ACT_SILU : SL_ACT_GELU_TANH;
        o->part[1].w.n_rows = o->part[0].w.n_rows;
    }
    o->accumulate = o->n_parts == 1 && coin(rng);
}

/* Attention shapes of real models: heads, KV heads, head size, tokens, past; then how the cache is
 * divided. */
static const struct {
    int n_heads, n_kv_heads, head_dim, n_tokens, n_past, window;
    float softcap;
    bool sinks;
    int n_first;
    enum sl_kv_here here;
} attention_fixed[] = {
    {32, 8, 128, 1, 0, 0, 0.0f, false, 0, SL_KV_ALL},    /* very first token */
    {32, 8, 128, 1, 1023, 0, 0.0f, false, 0, SL_KV_ALL}, /* decode, whole blocks */
    {14, 2, 64, 1, 1000, 0, 0.0f, false, 0, SL_KV_ALL},  /* seven query heads a KV head */
    {9, 3, 64, 1, 500, 0, 0.0f, false, 0, SL_KV_ALL},    /* three */
    {4, 1, 256, 1, 600, 512, 0.0f, false, 0, SL_KV_ALL}, /* window, large heads */
    {8, 4, 256, 40, 30, 0, 50.0f, false, 0, SL_KV_ALL},  /* soft-cap */
    {64, 8, 64, 2, 300, 128, 0.0f, true, 0, SL_KV_ALL},  /* sinks and window */
    {32, 8, 128, 130, 0, 0, 0.0f, false, 0, SL_KV_ALL},  /* prefill */
    {16, 16, 96, 16, 200, 0, 0.0f, false, 0, SL_KV_ALL}, /* last size that is cut into ranges */
    {1, 1, 32, 1, 9000, 0, 0.0f, false, 0, SL_KV_ALL},   /* more blocks than ranges */
    {32, 8, 128, 1, 1023, 0, 0.0f, false, 11, SL_KV_FIRST},
    {32, 8, 128, 1, 1023, 0, 0.0f, false, 11, SL_KV_LATER},
    {14, 2, 64, 3, 1000, 0, 0.0f, false, 5, SL_KV_ALL},
    {64, 8, 64, 2, 300, 128, 0.0f, true, 2, SL_KV_FIRST},  /* the window is past it */
    {8, 4, 256, 40, 30, 0, 50.0f, false, 1, SL_KV_LATER},  /* half of the rows see nothing */
    {8, 2, 128, 130, 61, 20, 0.0f, true, 1, SL_KV_LATER},  /* the same with sinks, few to see */
    {8, 2, 128, 130, 61, 20, 0.0f, false, 1, SL_KV_FIRST}, /* the later rows see nothing */
    {8, 2, 128, 130, 61, 0, 0.0f, false, 2, SL_KV_ALL},
};

static void fix_attention(struct kc_case *c, int index)
{
    struct sl_op_attention *o = &c->op.attention;
    o->n_heads = attention_fixed[index].n_heads;
    o->kv.n_kv_heads = attention_fixed[index].n_kv_heads;
    o->kv.head_dim = attention_fixed[index].head_dim;
    o->kv.types = (struct sl_kv_types){SL_TYPE_F16, SL_TYPE_F16};
    o->window = attention_fixed[index].window;
    o->softcap = attention_fixed[index].softcap;
    o->sinks = attention_fixed[index].sinks ? KC_PRESENT : NULL;
    o->kv.n_first = attention_fixed[index].n_first;
    o->kv.here = attention_fixed[index].here;
    o->kv.table = o->kv.n_first > 0 ? NULL : KC_PRESENT;
    o->lse = o->kv.n_first > 0 ? KC_PRESENT : NULL;
    o->seq = NULL;
    c->n_sequences = 1;
    c->n_past = attention_fixed[index].n_past;
    c->op.n_tokens = attention_fixed[index].n_tokens;
}

void kc_case_make(struct kc_case *c, enum sl_op_kind kind, int index, uint64_t seed)
{
    struct kc_rng rng = {seed ^ (uint64_t)kind << 56 ^ (uint64_t)index << 24};
    memset(c, 0, sizeof(*c));
    c->op.kind = kind;
    c->n_sequences = 1;
    c->seed = kc_rng_next(&rng);
    /* Every other case is random; the hostile fills share the rest. */
    c->fill = index % 2 == 0 ? KC_RANDOM : (enum kc_fill)(1 + index / 2 % (KC_N_FILLS - 1));
    switch (kind) {
    case SL_OP_NORM:
        make_norm(c, &rng);
        break;
    case SL_OP_LINEAR:
        make_linear(c, &rng, index / 2);
        break;
    case SL_OP_ROPE:
        make_rope(c, &rng);
        break;
    case SL_OP_KV_STORE:
        make_kv_store(c, &rng);
        break;
    case SL_OP_ATTENTION:
        make_attention(c, &rng);
        if (index < COUNT(attention_fixed)) {
            fix_attention(c, index);
        }
        c->op.attention.scale = 1.0f / (float)PICK(&rng, 8, 11, 16);
        break;
    case SL_OP_ROUTER:
        kc_router_make(c, &rng);
        break;
    case SL_OP_EXPERTS:
        kc_experts_make(c, &rng, index);
        break;
    case SL_OP_DIVIDE:
        kc_divide_make(c, &rng);
        break;
    case SL_OP_ADD:
        make_add(c, &rng);
        break;
    case SL_OP_MERGE:
        make_merge(c, &rng);
        break;
    default:
        break;
    }
}

/* Timed shapes. Products: rows, columns; attention: as above. */
static const struct {
    int n_rows, n_cols, n_tokens;
} linear_bench[] = {{4096, 4096, 1}, {14336, 4096, 1}, {4096, 4096, 4}, {4096, 4096, 512}};
static const int bench_types[] = {SL_TYPE_Q4_K, SL_TYPE_Q6_K, SL_TYPE_Q8_0, SL_TYPE_Q4_0,
                                  SL_TYPE_F16};
static const struct {
    int n_heads, n_kv_heads, head_dim, n_tokens, n_past;
    struct sl_kv_types types;
} attention_bench[] = {
    {32, 8, 128, 1, 4095, {SL_TYPE_F16, SL_TYPE_F16}},
    {32, 8, 128, 1, 32767, {SL_TYPE_F16, SL_TYPE_F16}},
    {32, 8, 128, 1, 32767, {SL_TYPE_Q8_0, SL_TYPE_Q8_0}},
    {32, 8, 128, 1, 32767, {SL_TYPE_Q4_0, SL_TYPE_Q4_0}},
    {32, 32, 128, 1, 4095, {SL_TYPE_F16, SL_TYPE_F16}},
    {14, 2, 64, 1, 4095, {SL_TYPE_F16, SL_TYPE_F16}},
    {8, 4, 256, 1, 4095, {SL_TYPE_F16, SL_TYPE_F16}},
    {32, 8, 128, 512, 0, {SL_TYPE_F16, SL_TYPE_F16}},
    {32, 8, 128, 512, 3584, {SL_TYPE_F16, SL_TYPE_F16}},
    {32, 8, 128, 512, 3584, {SL_TYPE_Q8_0, SL_TYPE_Q8_0}},
    {32, 8, 128, 1, 32767, {SL_TYPE_Q8_0, SL_TYPE_Q4_0}},
    {32, 8, 128, 512, 3584, {SL_TYPE_Q4_0, SL_TYPE_Q4_0}},
};

static bool bench_attention(struct kc_case *c, int index)
{
    struct sl_op_attention *o = &c->op.attention;
    if (index >= COUNT(attention_bench)) {
        return false;
    }
    o->n_heads = attention_bench[index].n_heads;
    o->kv.n_kv_heads = attention_bench[index].n_kv_heads;
    o->kv.head_dim = attention_bench[index].head_dim;
    o->kv.types = attention_bench[index].types;
    o->scale = 0.088f;
    c->op.n_tokens = attention_bench[index].n_tokens;
    c->n_past = attention_bench[index].n_past;
    return true;
}

bool kc_case_bench(struct kc_case *c, enum sl_op_kind kind, int index)
{
    memset(c, 0, sizeof(*c));
    c->op.kind = kind;
    c->n_sequences = 1;
    c->seed = 1;
    c->op.n_tokens = index == 0 ? 1 : 512;
    switch (kind) {
    case SL_OP_NORM:
        c->op.norm =
            (struct sl_op_norm){.weight = KC_PRESENT, .n = 4096, .rows_per_token = 1, .eps = 1e-6f};
        return index < 2;
    case SL_OP_ROPE:
        c->op.rope = (struct sl_op_rope){
            .n_heads = 32, .head_dim = 128, .n_rot = 128, .magnitude = 1.0f, .neox = true};
        return index < 2;
    case SL_OP_KV_STORE:
        c->op.kv_store.kv = (struct sl_kv_view){
            .types = {SL_TYPE_F16, SL_TYPE_F16}, .n_kv_heads = 8, .head_dim = 128};
        return index < 2;
    case SL_OP_LINEAR: {
        const int shape = index % COUNT(linear_bench);
        if (index / COUNT(linear_bench) >= COUNT(bench_types)) {
            return false;
        }
        c->op.n_tokens = linear_bench[shape].n_tokens;
        c->op.linear.n_parts = 1;
        c->op.linear.part[0].w =
            (struct sl_matrix){.type = (enum sl_type)bench_types[index / COUNT(linear_bench)],
                               .n_rows = linear_bench[shape].n_rows,
                               .n_cols = linear_bench[shape].n_cols};
        return true;
    }
    case SL_OP_ATTENTION:
        return bench_attention(c, index);
    case SL_OP_ROUTER:
        c->op.router =
            (struct sl_op_router){.w = {.type = SL_TYPE_F32, .n_rows = 128, .n_cols = 2048},
                                  .n_used = 8,
                                  .normalize = true,
                                  .scale = 1.0f};
        return index < 2;
    case SL_OP_EXPERTS:
        return kc_experts_bench(c, index);
    default:
        break;
    }
    return false;
}

static const char *const fill_names[KC_N_FILLS] = {"random", "zeros", "extremes", "outlier",
                                                   "subnormal"};

static int describe_linear(const struct sl_op_linear *o, char *out, size_t bytes)
{
    static const char *const activations[] = {"", " silu", " gelu"};
    int n = snprintf(out, bytes, " cols %lld%s%s", (long long)o->part[0].w.n_cols,
                     activations[o->activation], o->accumulate ? " accumulate" : "");
    for (int i = 0; i < o->n_parts; i++) {
        n += snprintf(out + n, bytes - (size_t)n, " %s x %lld%s", sl_type_name(o->part[i].w.type),
                      (long long)o->part[i].w.n_rows, o->part[i].bias != NULL ? " bias" : "");
    }
    return n;
}

static const char *describe_kv(const struct sl_kv_view *kv, char *out, size_t bytes)
{
    static const char *const here[] = {"all", "the first", "the later"};
    if (kv->n_first == 0) {
        return kv->table != NULL ? " paged" : "";
    }
    snprintf(out, bytes, " divided at %d, %s", kv->n_first, here[kv->here]);
    return out;
}

void kc_case_describe(const struct kc_case *c, char *out, size_t bytes)
{
    const struct sl_op *op = &c->op;
    int n = snprintf(out, bytes, "%s", sl_op_kind_name(op->kind));
    char *rest = out + n;
    const size_t left = bytes - (size_t)n;
    char kv[48];
    switch (op->kind) {
    case SL_OP_NORM:
        n += snprintf(rest, left, " n %d rows %d%s%s%s", op->norm.n, op->norm.rows_per_token,
                      op->norm.weight != NULL ? " weight" : "",
                      op->norm.accumulate ? " accumulate" : "", c->in_place ? " in-place" : "");
        break;
    case SL_OP_LINEAR:
        n += describe_linear(&op->linear, rest, left);
        break;
    case SL_OP_ROPE:
        n += snprintf(rest, left, " heads %d of %d rotates %d%s", op->rope.n_heads,
                      op->rope.head_dim, op->rope.n_rot, op->rope.neox ? " neox" : "");
        break;
    case SL_OP_KV_STORE:
        n += snprintf(rest, left, " %s/%s heads %d of %d%s past %d sequences %d",
                      sl_type_name(op->kv_store.kv.types.k), sl_type_name(op->kv_store.kv.types.v),
                      op->kv_store.kv.n_kv_heads, op->kv_store.kv.head_dim,
                      describe_kv(&op->kv_store.kv, kv, sizeof(kv)), c->n_past, c->n_sequences);
        break;
    case SL_OP_ATTENTION:
        n += snprintf(
            rest, left, " %s/%s heads %d/%d of %d%s past %d window %d cap %g%s%s sequences %d",
            sl_type_name(op->attention.kv.types.k), sl_type_name(op->attention.kv.types.v),
            op->attention.n_heads, op->attention.kv.n_kv_heads, op->attention.kv.head_dim,
            describe_kv(&op->attention.kv, kv, sizeof(kv)), c->n_past, op->attention.window,
            (double)op->attention.softcap, op->attention.sinks != NULL ? " sinks" : "",
            op->attention.lse != NULL ? " lse" : "", c->n_sequences);
        break;
    case SL_OP_ROUTER:
    case SL_OP_EXPERTS:
        n += kc_experts_describe(c, rest, left);
        break;
    case SL_OP_DIVIDE:
        n += snprintf(rest, left, " %d of %d share %d", op->divide.n_used, op->divide.n_experts,
                      op->divide.share);
        break;
    case SL_OP_ADD:
        n += snprintf(rest, left, " %lld", (long long)op->add.n);
        break;
    case SL_OP_MERGE:
        n += snprintf(rest, left, " heads %d of %d", op->merge.n_heads, op->merge.head_dim);
        break;
    default:
        break;
    }
    snprintf(out + n, bytes - (size_t)n, " tokens %d %s", op->n_tokens, fill_names[c->fill]);
}
