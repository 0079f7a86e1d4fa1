/* SPDX-License-Identifier: Apache-2.0
 *
 * Cases, operands and bounds of router and experts.
 *
 * What a router chose is not compared with what the reference chose: where two scores are as near
 * as rounding, either is right. It is compared with the scores themselves.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "kcheck.h"

#define COUNT(array) ((int)(sizeof(array) / sizeof((array)[0])))
#define PICK(rng, ...)                                                                             \
    kc_rng_pick(rng, COUNT(((const int[]){__VA_ARGS__})), (const int[]){__VA_ARGS__})

static const int small_types[] = {SL_TYPE_F32,    SL_TYPE_F16,  SL_TYPE_BF16, SL_TYPE_Q4_0,
                                  SL_TYPE_Q4_1,   SL_TYPE_Q5_0, SL_TYPE_Q5_1, SL_TYPE_Q8_0,
                                  SL_TYPE_IQ4_NL, SL_TYPE_MXFP4};
static const int large_types[] = {SL_TYPE_Q2_K, SL_TYPE_Q3_K, SL_TYPE_Q4_K,
                                  SL_TYPE_Q5_K, SL_TYPE_Q6_K, SL_TYPE_IQ4_XS};

static bool coin(struct kc_rng *rng)
{
    return kc_rng_below(rng, 2) == 1;
}

/* ------------------------------------------------------------------- cases */

void kc_router_make(struct kc_case *c, struct kc_rng *rng)
{
    struct sl_op_router *o = &c->op.router;
    c->op.n_tokens = PICK(rng, 1, 1, 2, 5, 8, 9, 40, 70, 330);
    o->w.type =
        (enum sl_type)PICK(rng, SL_TYPE_F32, SL_TYPE_F32, SL_TYPE_F32, SL_TYPE_F16, SL_TYPE_BF16);
    o->w.n_rows = PICK(rng, 1, 4, 8, 17, 32, 60, 128, 256);
    o->w.n_cols = 32 * PICK(rng, 1, 2, 9, 16, 64);
    o->n_used = 1 + kc_rng_below(rng, (int)(o->w.n_rows < 8 ? o->w.n_rows : 8));
    o->bias = coin(rng) ? KC_PRESENT : NULL;
    o->selection_bias = coin(rng) ? KC_PRESENT : NULL;
    o->gating =
        (enum sl_gating)PICK(rng, SL_GATING_SOFTMAX, SL_GATING_SIGMOID, SL_GATING_SOFTMAX_CHOSEN);
    o->normalize = coin(rng);
    o->scale = coin(rng) ? 1.0f : 2.5f;
}

void kc_divide_make(struct kc_case *c, struct kc_rng *rng)
{
    struct sl_op_divide *o = &c->op.divide;
    c->op.n_tokens = PICK(rng, 1, 1, 2, 7, 16, 70);
    o->n_experts = PICK(rng, 1, 4, 32, 60, 128, 1024);
    o->n_used = 1 + kc_rng_below(rng, o->n_experts < 8 ? o->n_experts : 8);
    o->share = PICK(rng, 0, 64, 100, 128, 200, SL_DIVIDE_ALL);
    o->uses = coin(rng) ? KC_PRESENT : NULL;
}

void kc_divide_place(struct kc_layout *l, struct sl_op *op)
{
    struct sl_op_divide *o = &op->divide;
    const size_t n_pairs = (size_t)op->n_tokens * (size_t)o->n_used;
    int32_t *ids = kc_place(l, KC_INPUT, n_pairs * sizeof *ids);
    uint8_t *at_hand = kc_place(l, KC_INPUT, (size_t)o->n_experts);
    o->mine = kc_place(l, KC_OUTPUT, n_pairs * sizeof *o->mine);
    if (o->uses != NULL) {
        o->uses = kc_place(l, KC_OUTPUT, (size_t)o->n_experts * sizeof *o->uses);
        for (int e = 0; o->uses != NULL && e < o->n_experts; e++) {
            o->uses[e] = e % 7;
        }
    }
    for (size_t i = 0; ids != NULL && i < n_pairs; i++) {
        /* Distinct within a token. */
        const size_t j = i % (size_t)o->n_used;
        const int per_rank = o->n_experts / o->n_used;
        ids[i] = (int32_t)j * per_rank + kc_rng_below(&l->rng, per_rank);
    }
    for (int e = 0; at_hand != NULL && e < o->n_experts; e++) {
        at_hand[e] = kc_rng_below(&l->rng, 3) == 0;
    }
    o->ids = ids;
    o->at_hand = at_hand;
}

/* Shapes that take every way: all of a group's kinds at once, groups that are cut, chunks. */
static const struct {
    int n_tokens, n_used, n_experts, n_embd, n_ff;
    enum sl_type type;
} fixed[] = {
    {1100, 2, 2, 32, 32, SL_TYPE_Q8_0},    /* more pairs of an expert than a group holds */
    {300, 1, 2, 8, 32800, SL_TYPE_F32},    /* more pairs than a chunk holds */
    {1, 8, 128, 256, 96, SL_TYPE_Q4_0},    /* decode */
    {8, 8, 128, 256, 256, SL_TYPE_Q4_K},   /* the most tokens of decode */
    {16, 8, 128, 1024, 128, SL_TYPE_Q4_0}, /* as many sequences; the most of few pairs an expert */
    {32, 8, 128, 1024, 256, SL_TYPE_Q4_K},
    {130, 4, 32, 64, 96, SL_TYPE_MXFP4}, /* groups around the limit between rows and panels */
    {150, 2, 8, 96, 64, SL_TYPE_F16},
    {1, 1, 1, 256, 512, SL_TYPE_Q4_0}, /* a shared expert */
    {70, 1, 1, 256, 512, SL_TYPE_Q4_K},
};

static void set_shape(struct sl_op_experts *o, int n_embd, int n_ff, enum sl_type type)
{
    o->gate.type = o->up.type = o->down.type = type;
    o->gate.n_rows = o->up.n_rows = o->down.n_cols = n_ff;
    o->gate.n_cols = o->up.n_cols = o->down.n_rows = n_embd;
}

static enum sl_type pick_type(const struct kc_case *c, struct kc_rng *rng, int64_t n_cols)
{
    if (n_cols % 256 == 0 && coin(rng)) {
        return (enum sl_type)kc_rng_pick(rng, COUNT(large_types), large_types);
    }
    /* With one value a thousand times the others products of floats would leave the range of
     * f16, to which a device may round what lies between. */
    const int first = c->fill == KC_OUTLIER ? 3 : 0;
    return (enum sl_type)kc_rng_pick(rng, COUNT(small_types) - first, small_types + first);
}

static void make_random(struct kc_case *c, struct kc_rng *rng)
{
    struct sl_op_experts *o = &c->op.experts;
    c->op.n_tokens = PICK(rng, 1, 1, 2, 3, 5, 8, 9, 20, 33, 70);
    c->n_experts = PICK(rng, 1, 2, 4, 7, 16, 40);
    o->n_used = 1 + kc_rng_below(rng, c->n_experts < 6 ? c->n_experts : 6);
    const int n_embd = PICK(rng, 32, 64, 96, 256, 256, 512);
    const int n_ff = PICK(rng, 32, 64, 96, 160, 256);
    set_shape(o, n_embd, n_ff, pick_type(c, rng, n_embd));
    o->down.type = coin(rng) && n_ff % 256 == n_embd % 256 ? o->gate.type : pick_type(c, rng, n_ff);
    if (kc_rng_below(rng, 4) == 0) {
        o->up.type = pick_type(c, rng, n_embd);
    }
    c->skewed = coin(rng);
    o->n = c->n_experts;
    if (c->n_experts > 1 && coin(rng)) { /* only some are here */
        o->first = kc_rng_below(rng, c->n_experts);
        o->n = 1 + kc_rng_below(rng, c->n_experts - o->first);
    }
}

void kc_experts_make(struct kc_case *c, struct kc_rng *rng, int index)
{
    struct sl_op_experts *o = &c->op.experts;
    c->fill = c->fill == KC_EXTREMES ? KC_OUTLIER : c->fill;
    if (index < COUNT(fixed)) {
        c->fill = KC_RANDOM;
        c->op.n_tokens = fixed[index].n_tokens;
        c->n_experts = o->n = fixed[index].n_experts;
        o->n_used = fixed[index].n_used;
        set_shape(o, fixed[index].n_embd, fixed[index].n_ff, fixed[index].type);
    } else {
        make_random(c, rng);
    }
    const bool table = coin(rng);
    const bool bias = coin(rng);
    struct sl_experts_matrix *const matrices[] = {&o->gate, &o->up, &o->down};
    for (int i = 0; i < 3; i++) {
        matrices[i]->table = table ? KC_PRESENT : NULL;
        matrices[i]->bias = bias && coin(rng) ? KC_PRESENT : NULL;
    }
    o->activation = (enum sl_activation)PICK(rng, SL_ACT_SILU, SL_ACT_SILU, SL_ACT_GELU_TANH,
                                             SL_ACT_SWIGLU_CLAMPED);
    o->accumulate = coin(rng);
}

bool kc_experts_bench(struct kc_case *c, int index)
{
    static const struct {
        int n_tokens, n_used, n_experts, n_embd, n_ff;
        enum sl_type type;
    } list[] = {
        {1, 8, 128, 2048, 768, SL_TYPE_Q4_0},   {4, 8, 128, 2048, 768, SL_TYPE_Q4_0},
        {16, 8, 128, 2048, 768, SL_TYPE_Q4_0},  {64, 8, 128, 2048, 768, SL_TYPE_Q4_0},
        {512, 8, 128, 2048, 768, SL_TYPE_Q4_0}, {1, 8, 128, 2048, 768, SL_TYPE_Q4_K},
        {512, 8, 128, 2048, 768, SL_TYPE_Q4_K}, {1, 2, 8, 4096, 14336, SL_TYPE_Q4_0},
        {1, 4, 32, 2880, 2880, SL_TYPE_MXFP4},  {512, 4, 32, 2880, 2880, SL_TYPE_MXFP4},
    };
    if (index >= COUNT(list)) {
        return false;
    }
    struct sl_op_experts *o = &c->op.experts;
    c->op.n_tokens = list[index].n_tokens;
    c->n_experts = o->n = list[index].n_experts;
    o->n_used = list[index].n_used;
    o->activation = SL_ACT_SILU;
    set_shape(o, list[index].n_embd, list[index].n_ff, list[index].type);
    return true;
}

static int describe_matrix(const char *name, const struct sl_experts_matrix *m, char *out,
                           size_t bytes)
{
    return snprintf(out, bytes, " %s %s%s%s", name, sl_type_name(m->type),
                    m->bias != NULL ? " bias" : "", m->table != NULL ? " table" : "");
}

int kc_experts_describe(const struct kc_case *c, char *out, size_t bytes)
{
    if (c->op.kind == SL_OP_ROUTER) {
        const struct sl_op_router *o = &c->op.router;
        static const char *const gatings[] = {"softmax", "sigmoid", "softmax-chosen"};
        return snprintf(out, bytes, " %s %d of %lld x %lld %s%s%s%s scale %g",
                        sl_type_name(o->w.type), o->n_used, (long long)o->w.n_rows,
                        (long long)o->w.n_cols, gatings[o->gating],
                        o->normalize ? " normalized" : "", o->bias != NULL ? " bias" : "",
                        o->selection_bias != NULL ? " selection-bias" : "", (double)o->scale);
    }
    const struct sl_op_experts *o = &c->op.experts;
    static const char *const activations[] = {"", "silu", "gelu", "swiglu-clamped"};
    int n = snprintf(out, bytes, " %d of %d, %d from %d, embd %lld ff %lld %s%s%s", o->n_used,
                     c->n_experts, o->n, o->first, (long long)o->gate.n_cols,
                     (long long)o->gate.n_rows, activations[o->activation],
                     o->accumulate ? " accumulate" : "", c->skewed ? " skewed" : "");
    n += describe_matrix("gate", &o->gate, out + n, bytes - (size_t)n);
    n += describe_matrix("up", &o->up, out + n, bytes - (size_t)n);
    return n + describe_matrix("down", &o->down, out + n, bytes - (size_t)n);
}

/* ---------------------------------------------------------------- operands */

void kc_router_place(struct kc_layout *l, struct sl_op *op)
{
    struct sl_op_router *o = &op->router;
    const size_t n_chosen = (size_t)op->n_tokens * (size_t)o->n_used;
    o->x = kc_floats(l, KC_INPUT, op->n_tokens * o->w.n_cols, o->w.n_cols);
    o->w.data = kc_matrix(l, o->w.type, o->w.n_rows, o->w.n_cols);
    o->bias = o->bias != NULL ? kc_plain_floats(l, o->w.n_rows, 0.5f, 0.0f) : NULL;
    o->selection_bias =
        o->selection_bias != NULL ? kc_plain_floats(l, o->w.n_rows, 0.3f, 0.0f) : NULL;
    o->ids = kc_place(l, KC_OUTPUT_CHOICE, n_chosen * sizeof(int32_t));
    o->weights = kc_place(l, KC_OUTPUT_CHOICE, n_chosen * sizeof(float));
}

/* n_used distinct ids for each token; skewed: the first experts turn up most. */
static const int32_t *place_ids(struct kc_layout *l, int32_t n_tokens, int32_t n_used)
{
    const struct kc_case *c = &l->in->c;
    int32_t *ids = kc_place(l, KC_INPUT, sizeof(int32_t) * (size_t)(n_tokens * n_used));
    for (int32_t t = 0; ids != NULL && t < n_tokens; t++) {
        int32_t *mine = ids + t * n_used;
        for (int32_t j = 0; j < n_used;) {
            int32_t id = kc_rng_below(&l->rng, c->n_experts);
            for (int i = 0; c->skewed && i < 2; i++) {
                const int32_t other = kc_rng_below(&l->rng, c->n_experts);
                id = other < id ? other : id;
            }
            bool taken = false;
            for (int32_t k = 0; k < j; k++) {
                taken = taken || mine[k] == id;
            }
            mine[j] = id;
            j += !taken;
        }
    }
    return ids;
}

/* The matrices of op->n experts, one after the other; or by a table in another order, with one in
 * five missing. */
static void place_matrix(struct kc_layout *l, const struct sl_op_experts *o,
                         struct sl_experts_matrix *m, uint64_t missing)
{
    const char *data = kc_matrix(l, m->type, m->n_rows * o->n, m->n_cols);
    m->bias = m->bias != NULL ? kc_plain_floats(l, m->n_rows * o->n, 0.5f, 0.0f) : NULL;
    m->data = data;
    if (m->table == NULL) {
        return;
    }
    const size_t bytes = (size_t)m->n_rows * sl_type_row_bytes(m->type, m->n_cols);
    const void **table = kc_place(l, KC_INPUT, sizeof(*table) * (size_t)o->n);
    m->data = NULL;
    for (int32_t e = 0; table != NULL && e < o->n; e++) {
        struct kc_rng rng = {missing + (uint64_t)e};
        const bool here = kc_rng_below(&rng, 5) > 0;
        table[e] = here ? data + (size_t)(o->n - 1 - e) * bytes : NULL;
    }
    m->table = table;
}

void kc_experts_place(struct kc_layout *l, struct sl_op *op)
{
    struct sl_op_experts *o = &op->experts;
    const int64_t n_embd = o->gate.n_cols;
    const uint64_t missing = kc_rng_next(&l->rng);
    o->x = kc_floats(l, KC_INPUT, op->n_tokens * n_embd, n_embd);
    o->y = kc_floats(l, KC_OUTPUT, op->n_tokens * n_embd, n_embd);
    o->ids = place_ids(l, op->n_tokens, o->n_used);
    o->weights = kc_plain_floats(l, (int64_t)op->n_tokens * o->n_used, 0.2f, 0.3f);
    place_matrix(l, o, &o->gate, missing);
    place_matrix(l, o, &o->up, missing);
    place_matrix(l, o, &o->down, missing);
}

/* ------------------------------------------------------------------ bounds */

static void unpack_row(enum sl_type type, const void *data, int64_t row, int64_t n_cols,
                       float *floats, double *out)
{
    sl_dequantize_row(type, (const char *)data + (size_t)row * sl_type_row_bytes(type, n_cols),
                      floats, n_cols);
    for (int64_t i = 0; i < n_cols; i++) {
        out[i] = (double)floats[i];
    }
}

/* Working memory of the bounds of one pair. */
struct pair_work {
    const struct kc_instance *in;
    const struct kc_precision *p;
    float *floats, *h;
    double *row, *h_error;
    bool independent;
};

static const void *expert_data(const struct sl_experts_matrix *m, int32_t expert)
{
    const size_t bytes = (size_t)m->n_rows * sl_type_row_bytes(m->type, m->n_cols);
    return m->table != NULL ? m->table[expert] : (const char *)m->data + (size_t)expert * bytes;
}

static struct kc_product row_product(struct pair_work *w, const struct sl_experts_matrix *m,
                                     int32_t expert, int64_t row, const float *x)
{
    unpack_row(m->type, expert_data(m, expert), row, m->n_cols, w->floats, w->row);
    struct kc_product product =
        kc_product_bound(w->row, x, m->n_cols, m->type, w->p, w->independent);
    product.value += m->bias != NULL ? (double)m->bias[expert * m->n_rows + row] : 0.0;
    product.error += 2.0 * KC_ULP * fabs(product.value);
    return product;
}

/* Down is off by what its own product may round, and by what gate and up were off. */
static void pair_bounds(struct pair_work *w, int32_t expert, int32_t token, double weight,
                        double *value, double *error)
{
    const struct sl_op_experts *o = &w->in->op.experts;
    const float *x = o->x + token * o->gate.n_cols;
    for (int64_t i = 0; i < o->gate.n_rows; i++) {
        const struct kc_product h = kc_gated(o->activation, row_product(w, &o->gate, expert, i, x),
                                             row_product(w, &o->up, expert, i, x));
        w->h[i] = (float)h.value;
        w->h_error[i] = h.error + 2.0 * KC_ULP * fabs(h.value);
    }
    for (int64_t r = 0; r < o->down.n_rows; r++) {
        struct kc_product y = row_product(w, &o->down, expert, r, w->h);
        double worst = 0.0, square = 0.0;
        for (int64_t i = 0; i < o->down.n_cols; i++) {
            const double e = fabs(w->row[i]) * w->h_error[i];
            worst += e;
            square += e * e;
        }
        y.error += w->independent ? fmin(worst, sqrt(square)) : worst;
        value[r] += fabs(weight * y.value);
        error[r] += fabs(weight) * y.error + 8.0 * KC_ULP * fabs(weight * y.value);
    }
}

static void token_bounds(struct pair_work *w, int32_t token, double *value, double *error,
                         char *bounds)
{
    const struct sl_op_experts *o = &w->in->op.experts;
    const int64_t n_embd = o->gate.n_cols;
    memset(value, 0, (size_t)n_embd * sizeof(*value));
    memset(error, 0, (size_t)n_embd * sizeof(*error));
    for (int32_t j = 0; j < o->n_used; j++) {
        const int32_t expert = o->ids[token * o->n_used + j] - o->first;
        if (expert >= 0 && expert < o->n && expert_data(&o->gate, expert) != NULL) {
            pair_bounds(w, expert, token, (double)o->weights[token * o->n_used + j], value, error);
        }
    }
    for (int64_t r = 0; r < n_embd; r++) {
        const float *y = &o->y[token * n_embd + r];
        const double old = o->accumulate ? fabs((double)*y) : 0.0;
        kc_set_bound(w->in, bounds, y,
                     error[r] + 2.0 * (o->n_used + 2) * KC_ULP * (value[r] + old));
    }
}

void kc_experts_bounds(const struct kc_instance *in, const struct kc_precision *p, char *bounds)
{
    const struct sl_op_experts *o = &in->op.experts;
    const size_t most = (size_t)(o->gate.n_cols > o->gate.n_rows ? o->gate.n_cols : o->gate.n_rows);
    float *floats = sl_calloc(SL_MEM_BASE, 2 * most, sizeof(*floats));
    double *doubles = sl_calloc(SL_MEM_BASE, 4 * most, sizeof(*doubles));
    struct pair_work w = {.in = in,
                          .p = p,
                          .floats = floats,
                          .h = floats + most,
                          .row = doubles,
                          .h_error = doubles + most,
                          .independent = in->c.fill == KC_RANDOM};
    for (int32_t t = 0; floats != NULL && doubles != NULL && t < in->op.n_tokens; t++) {
        token_bounds(&w, t, doubles + 2 * most, doubles + 3 * most, bounds);
    }
    sl_free(floats);
    sl_free(doubles);
}

/* ------------------------------------------------------------------ choice */

/* Everything about one token's experts, exact to double precision. */
struct scores {
    int32_t n;
    double p[SL_MAX_EXPERTS]; /* or the logit, where p depends on the choice */
    double score[SL_MAX_EXPERTS];
    double error[SL_MAX_EXPERTS]; /* of the score */
    double relative; /* error of any p, of its size; above 1 where logits have large errors */
};

/* What is taken for a probability that underflowed, so that large errors of logits cover it. */
#define KC_GONE 1e-40

/* Errors d of the logits change a softmax or a sigmoid by the factor e^(2d) at most, and neither
 * leaves 0 to 1. */
static bool make_scores(const struct kc_instance *in, const struct kc_precision *p, int32_t token,
                        struct scores *s)
{
    const struct sl_op_router *o = &in->op.router;
    struct kc_precision precision = *p;
    precision.input = precision.bf16 = 0.0; /* no rounding where w is a float type */
    precision.words = false;
    float *floats = sl_alloc(SL_MEM_BASE, (size_t)o->w.n_cols * sizeof(*floats));
    double *row = sl_alloc(SL_MEM_BASE, (size_t)o->w.n_cols * sizeof(*row));
    double max = -INFINITY, sum = 0.0, logit_error = 0.0;
    s->n = (int32_t)o->w.n_rows;
    for (int32_t e = 0; floats != NULL && row != NULL && e < s->n; e++) {
        unpack_row(o->w.type, o->w.data, e, o->w.n_cols, floats, row);
        const struct kc_product logit =
            kc_product_bound(row, o->x + token * o->w.n_cols, o->w.n_cols, o->w.type, &precision,
                             in->c.fill == KC_RANDOM);
        s->p[e] = logit.value + (o->bias != NULL ? (double)o->bias[e] : 0.0);
        s->error[e] = logit.error + 2.0 * KC_ULP * fabs(s->p[e]);
        logit_error = fmax(logit_error, s->error[e]);
        max = fmax(max, s->p[e]);
    }
    for (int32_t e = 0; e < s->n; e++) {
        sum += exp(s->p[e] - max);
    }
    s->relative = expm1(2.0 * fmin(logit_error, 100.0)) + 32.0 * KC_ULP + kc_sum_error(s->n);
    for (int32_t e = 0; e < s->n; e++) {
        if (o->gating != SL_GATING_SOFTMAX_CHOSEN) {
            s->p[e] = o->gating == SL_GATING_SOFTMAX ? exp(s->p[e] - max) / sum
                                                     : 1.0 / (1.0 + exp(-s->p[e]));
            s->error[e] = fmin(1.0, s->relative * (s->p[e] + KC_GONE));
        }
        const double bias = o->selection_bias != NULL ? (double)o->selection_bias[e] : 0.0;
        s->score[e] = s->p[e] + bias;
        s->error[e] += 2.0 * KC_ULP * (fabs(s->score[e]) + fabs(bias)) + 1e-37;
    }
    const bool ok = floats != NULL && row != NULL;
    sl_free(floats);
    sl_free(row);
    return ok;
}

/* No expert that was left out scores higher than one chosen, none later than one before. Equal
 * scores show only where nothing is rounded: all zero. */
static bool right_choice(const struct kc_instance *in, const struct scores *s, const int32_t *ids,
                         int32_t token, char *why, size_t bytes)
{
    const struct sl_op_router *o = &in->op.router;
    bool chosen[SL_MAX_EXPERTS] = {false};
    const bool ties = in->c.fill == KC_ZEROS && o->bias == NULL && o->selection_bias == NULL;
    for (int32_t j = 0; j < o->n_used; j++) {
        const int32_t id = ids[j];
        if (id < 0 || id >= s->n || chosen[id]) {
            snprintf(why, bytes, "token %d: choice %d is expert %d, no or not a new expert", token,
                     j, id);
            return false;
        }
        chosen[id] = true;
        if (ties && id != j) {
            snprintf(why, bytes, "token %d: choice %d among equals is expert %d", token, j, id);
            return false;
        }
    }
    for (int32_t j = 0; j < o->n_used; j++) {
        const int32_t id = ids[j];
        for (int32_t e = 0; e < s->n; e++) {
            const bool later = !chosen[e] || (j + 1 < o->n_used && e == ids[j + 1]);
            if (later && s->score[e] > s->score[id] + s->error[e] + s->error[id]) {
                snprintf(why, bytes, "token %d: choice %d is expert %d with %.9g, %d has %.9g",
                         token, j, id, s->score[id], e, s->score[e]);
                return false;
            }
        }
    }
    return true;
}

static bool right_weights(const struct kc_instance *in, const struct scores *s, const int32_t *ids,
                          const float *weights, int32_t token, char *why, size_t bytes)
{
    const struct sl_op_router *o = &in->op.router;
    double p[SL_MAX_EXPERTS_USED], sum = 0.0;
    for (int32_t j = 0; j < o->n_used; j++) {
        p[j] = s->p[ids[j]];
        for (int32_t k = 0; o->gating == SL_GATING_SOFTMAX_CHOSEN && k < o->n_used; k++) {
            const double part = exp(s->p[ids[k]] - s->p[ids[j]]);
            p[j] = k == 0 ? part : p[j] + part;
        }
        p[j] = o->gating == SL_GATING_SOFTMAX_CHOSEN ? 1.0 / p[j] : p[j];
        sum += p[j];
    }
    for (int32_t j = 0; j < o->n_used; j++) {
        const double by = o->normalize ? fmax(sum, (double)SL_ROUTER_MIN_SUM) : 1.0;
        const double want = p[j] / by * (double)o->scale;
        /* An error of p and one of the sum. */
        const double off = s->relative * (2.0 + s->relative) * (fabs(want) + KC_GONE);
        const double bound = fmin(fabs((double)o->scale), off) + 1e-32;
        if (!(fabs(want - (double)weights[j]) <= bound)) {
            snprintf(why, bytes, "token %d: weight %d (expert %d) is %.9g, should be %.9g", token,
                     j, ids[j], (double)weights[j], want);
            return false;
        }
    }
    return true;
}

bool kc_router_compare(const struct kc_instance *in, const struct kc_precision *p,
                       const char *result, char *why, size_t bytes)
{
    const struct sl_op_router *o = &in->op.router;
    const struct sl_op moved = kc_op_moved(&in->op, in->base, (char *)(uintptr_t)result);
    struct scores *s = sl_alloc(SL_MEM_BASE, sizeof(*s));
    bool ok = s != NULL;
    snprintf(why, bytes, "no memory");
    for (int32_t t = 0; ok && t < in->op.n_tokens; t++) {
        const int32_t *ids = moved.router.ids + (int64_t)t * o->n_used;
        const float *weights = moved.router.weights + (int64_t)t * o->n_used;
        ok = make_scores(in, p, t, s) && right_choice(in, s, ids, t, why, bytes) &&
             right_weights(in, s, ids, weights, t, why, bytes);
    }
    sl_free(s);
    return ok;
}
