/* SPDX-License-Identifier: Apache-2.0
 *
 * How far from the reference an output may be. Each bound follows from what the operator's contract
 * lets a kernel round: float arithmetic in any order, activations in f16 or 8-bit blocks where
 * struct kc_precision says so. Nothing else is allowed for, so a wrong scale, a swapped nibble or a
 * lost key shows up.
 */
#include <math.h>
#include <string.h>

#include "base/mem.h"
#include "kcheck.h"
#include "op/kv.h"

#define ULP KC_ULP
/* Results below this may be flushed to zero. */
#define FLOOR 1e-33

void kc_set_bound(const struct kc_instance *in, char *bounds, const float *y, double bound)
{
    const size_t offset = (size_t)((const char *)y - in->base);
    const double padded = bound + FLOOR;
    const float b = padded < 3e38 ? (float)padded : 3e38f;
    memcpy(bounds + offset, &b, sizeof(b));
}

/* n additions of mixed signs in any order: the error grows like the root of n, with room. */
double kc_sum_error(double n)
{
    return (16.0 + 2.0 * sqrt(n)) * ULP;
}

/* The sum of squares is off by sum_error, the result by half that, and five roundings. */
static void norm_bounds(const struct kc_instance *in, char *bounds)
{
    const struct sl_op_norm *o = &in->op.norm;
    const int64_t n_rows = (int64_t)in->op.n_tokens * o->rows_per_token;
    for (int64_t r = 0; r < n_rows; r++) {
        double sum = 0.0;
        for (int32_t i = 0; i < o->n; i++) {
            sum += (double)o->x[r * o->n + i] * (double)o->x[r * o->n + i];
        }
        const double scale = 1.0 / sqrt(sum / o->n + (double)o->eps);
        for (int32_t i = 0; i < o->n; i++) {
            const int64_t at = r * o->n + i;
            const double weight = o->weight != NULL ? (double)o->weight[i] : 1.0;
            const double old = o->accumulate ? fabs((double)o->y[at]) : 0.0;
            const double value = fabs((double)o->x[at] * scale * weight);
            kc_set_bound(in, bounds, &o->y[at],
                         value * (kc_sum_error(o->n) + 5.0 * ULP) + 2.0 * ULP * (old + value));
        }
    }
}

static void add_bounds(const struct kc_instance *in, char *bounds)
{
    const struct sl_op_add *o = &in->op.add;
    for (int64_t i = 0; i < in->op.n_tokens * o->n; i++) {
        kc_set_bound(in, bounds, &o->y[i], ULP * (fabs((double)o->x[i]) + fabs((double)o->y[i])));
    }
}

/* y = w y + (1 - w) x, w = 1 / (1 + e^d) with d the difference of both sides. An exponential's
 * argument is off by two units of |d|, the exponential itself by four: so much of the weights moves
 * the result between x and y. Sum and quotient, which both share, a product and a sum for each, and
 * the last product are roundings of the result: six units with room. */
static void merge_bounds(const struct kc_instance *in, char *bounds)
{
    const struct sl_op_merge *o = &in->op.merge;
    for (int64_t row = 0; row < (int64_t)in->op.n_tokens * o->n_heads; row++) {
        const double a = (double)o->y_lse[row], b = (double)o->x_lse[row], max = fmax(a, b);
        const bool seen = max > -INFINITY, both = fmin(a, b) > -INFINITY;
        const double wy = seen ? exp(a - max) / (exp(a - max) + exp(b - max)) : 0.0;
        const double wx = seen ? exp(b - max) / (exp(a - max) + exp(b - max)) : 0.0;
        const double moved = both ? wy * wx * (2.0 * fabs(a - b) + 8.0) * ULP : 0.0;
        for (int64_t i = row * o->head_dim; i < (row + 1) * o->head_dim; i++) {
            const double x = (double)o->x[i], y = (double)o->y[i];
            kc_set_bound(in, bounds, &o->y[i],
                         moved * fabs(x - y) + 6.0 * ULP * (wy * fabs(y) + wx * fabs(x)));
        }
    }
}

/* The angle is exact to 2^-23 radian after reduction to one turn, sine and cosine to two units,
 * and three roundings follow: twelve units of |a| + |b|. */
static void rope_bounds(const struct kc_instance *in, char *bounds)
{
    const struct sl_op_rope *o = &in->op.rope;
    const int32_t half = o->n_rot / 2;
    for (int64_t row = 0; row < (int64_t)in->op.n_tokens * o->n_heads; row++) {
        const float *x = o->x + row * o->head_dim;
        for (int32_t i = 0; i < half; i++) {
            const float *a = &x[o->neox ? i : 2 * i];
            const float *b = &x[o->neox ? i + half : 2 * i + 1];
            const double size = (fabs((double)*a) + fabs((double)*b)) * (double)o->magnitude;
            kc_set_bound(in, bounds, a, 12.0 * ULP * size);
            kc_set_bound(in, bounds, b, 12.0 * ULP * size);
        }
    }
}

/* A block of 32 columns of a product. */
struct span {
    double w_max, w_sum, w_square;
    double x_max, x_sum, x_square;
};

static struct span span_of(const double *w, const float *x, int64_t n)
{
    struct span s = {0};
    for (int64_t i = 0; i < n; i++) {
        const double xi = fabs((double)x[i]);
        s.w_max = fmax(s.w_max, fabs(w[i]));
        s.w_sum += fabs(w[i]);
        s.w_square += w[i] * w[i];
        s.x_max = fmax(s.x_max, xi);
        s.x_sum += xi;
        s.x_square += xi * xi;
    }
    return s;
}

/* Errors of one kind: the sum of the worst, and of the squared deviations. */
struct rounding {
    double worst, square;
};

/* Values of these magnitudes off by up to `step` / 2 each, times the others. */
static void add_rounding(struct rounding *r, double step, double others_sum, double others_square)
{
    r->worst += step / 2.0 * others_sum;
    r->square += step * step / 12.0 * others_square;
}

static double rounding_error(const struct rounding *r, bool independent)
{
    return independent ? fmin(r->worst, 8.0 * sqrt(r->square)) : r->worst;
}

/* Where 16-bit integers stand for halves: within +-8191 of the largest of 32 activations or of 128
 * weights. */
#define WORD_STEPS 8191.0
#define WORD_COLS 128

/* Sources: float sums (terms as large as the largest weight of each 32, since formats with a
 * minimum subtract terms of that size); and one of these: x rounded to f16 or bf16, x rounded to 8
 * bits by blocks of 32, both sides rounded to words. For random data rounding errors are
 * independent: eight deviations hold where the worst case is far away. For hostile data the worst
 * case counts. */
struct kc_product kc_product_bound(const double *w, const float *x, int64_t n, enum sl_type type,
                                   const struct kc_precision *p, bool independent)
{
    const bool quantized = sl_type_traits(type)->block_items > 1;
    const bool halves = type == SL_TYPE_F16 || type == SL_TYPE_BF16;
    const double relative = type == SL_TYPE_BF16 ? fmax(p->input, p->bf16) : p->input;
    double value = 0.0, terms = 0.0, w_max = 0.0;
    struct rounding floats = {0}, bytes = {0}, words = {0};
    for (int64_t b = 0; b < n; b += 32) {
        const int64_t end = b + 32 < n ? b + 32 : n;
        const struct span s = span_of(w + b, x + b, end - b);
        for (int64_t i = b; i < end; i++) {
            const double wx = w[i] * (double)x[i];
            value += wx;
            add_rounding(&floats, 2.0 * relative * fabs(wx), 1.0, 1.0);
        }
        for (int64_t i = b; b % WORD_COLS == 0 && i < b + WORD_COLS && i < n; i++) {
            w_max = fmax(i == b ? 0.0 : w_max, fabs(w[i]));
        }
        terms += s.w_max * s.x_sum;
        add_rounding(&bytes, s.x_max / 127.0, s.w_sum, s.w_square);
        add_rounding(&words, s.x_max / WORD_STEPS, s.w_sum, s.w_square);
        add_rounding(&words, w_max / WORD_STEPS, s.x_sum, s.x_square);
    }
    double error = rounding_error(&floats, independent);
    if (quantized && p->x_8bit) {
        error = fmax(error, rounding_error(&bytes, independent));
    }
    if (halves && p->words) {
        error = fmax(error, rounding_error(&words, independent));
    }
    return (struct kc_product){value, 1.01 * error + kc_sum_error((double)n) * terms};
}

static double gate_value(enum sl_activation activation, double x)
{
    if (activation == SL_ACT_SWIGLU_CLAMPED) {
        const double g = fmin(x, (double)SL_SWIGLU_LIMIT);
        return g / (1.0 + exp(-(double)SL_SWIGLU_ALPHA * g));
    }
    return activation == SL_ACT_SILU
               ? x / (1.0 + exp(-x))
               : 0.5 * x * (1.0 + tanh(0.7978845608 * (x + 0.044715 * x * x * x)));
}

/* All activations have slopes below 1.13; computing one costs a few roundings of its argument. The
 * clamped one's factor up + 1 is off by as much as up. */
struct kc_product kc_gated(enum sl_activation activation, struct kc_product gate,
                           struct kc_product up)
{
    if (activation == SL_ACT_SWIGLU_CLAMPED) {
        const double limit = (double)SL_SWIGLU_LIMIT;
        up.value = fmax(-limit, fmin(up.value, limit)) + 1.0;
        up.error += 4.0 * ULP * (fabs(up.value) + 1.0);
    }
    const double g = gate_value(activation, gate.value);
    const double g_error = 1.13 * gate.error + 16.0 * ULP * (fabs(g) + fabs(gate.value));
    const double error =
        g_error * (fabs(up.value) + up.error) + fabs(g) * up.error + 4.0 * ULP * fabs(g * up.value);
    return (struct kc_product){g * up.value, error};
}

static void part_products(const struct kc_instance *in, const struct kc_precision *p, int part,
                          struct kc_product *out)
{
    const struct sl_op_linear *o = &in->op.linear;
    const struct sl_matrix *w = &o->part[part].w;
    const size_t row_bytes = sl_type_row_bytes(w->type, w->n_cols);
    float *row = sl_alloc(SL_MEM_BASE, (size_t)w->n_cols * sizeof(float));
    double *row_double = sl_alloc(SL_MEM_BASE, (size_t)w->n_cols * sizeof(double));
    for (int64_t r = 0; row != NULL && row_double != NULL && r < w->n_rows; r++) {
        sl_dequantize_row(w->type, (const char *)w->data + (size_t)r * row_bytes, row, w->n_cols);
        for (int64_t i = 0; i < w->n_cols; i++) {
            row_double[i] = (double)row[i];
        }
        for (int32_t t = 0; t < in->op.n_tokens; t++) {
            struct kc_product *product = &out[t * w->n_rows + r];
            *product = kc_product_bound(row_double, o->x + t * w->n_cols, w->n_cols, w->type, p,
                                        in->c.fill == KC_RANDOM);
            if (o->part[part].bias != NULL) {
                product->value += (double)o->part[part].bias[r];
            }
            product->error += 2.0 * ULP * fabs(product->value);
        }
    }
    sl_free(row);
    sl_free(row_double);
}

static void linear_bounds(const struct kc_instance *in, const struct kc_precision *p, char *bounds)
{
    const struct sl_op_linear *o = &in->op.linear;
    struct kc_product *products[SL_LINEAR_MAX_PARTS] = {NULL};
    for (int i = 0; i < o->n_parts; i++) {
        const int64_t n = in->op.n_tokens * o->part[i].w.n_rows;
        products[i] = sl_calloc(SL_MEM_BASE, (size_t)n, sizeof(*products[i]));
        if (products[i] != NULL) {
            part_products(in, p, i, products[i]);
        }
    }
    const int n_outputs = o->activation != SL_ACT_NONE ? 1 : o->n_parts;
    for (int i = 0; i < n_outputs; i++) {
        const int64_t n = in->op.n_tokens * o->part[i].w.n_rows;
        for (int64_t k = 0; products[i] != NULL && k < n; k++) {
            const float *y = &o->part[i].y[k];
            double bound = products[i][k].error;
            if (o->activation != SL_ACT_NONE && products[1] != NULL) {
                bound = kc_gated(o->activation, products[0][k], products[1][k]).error;
            } else if (o->accumulate) {
                bound += 2.0 * ULP * fabs((double)*y);
            }
            kc_set_bound(in, bounds, y, bound);
        }
    }
    for (int i = 0; i < o->n_parts; i++) {
        sl_free(products[i]);
    }
}

/* y is a mean of values with weights e^s. An error d of every logit changes weights by the factor
 * e^d at most, so y by 2 d times the largest value. Logits are off by the roundings of a product of
 * head_dim terms; weights by those of the exponential (some units) and of their sum.
 *
 * lse is off by d and by what the sum of weights is off. Then come roundings of its own size, which
 * a large logit, sink or number of positions makes: of the sink or logit in units of log2, of
 * the logarithm, of adding it, and back. A soft-cap's result is off by units of the cap. Where a
 * row sees nothing it is -infinity to the bit. */
static void attention_row_bounds(const struct kc_instance *in, const struct kc_precision *p,
                                 int32_t token, int32_t head, char *bounds)
{
    const struct sl_op_attention *o = &in->op.attention;
    const int32_t n = o->kv.head_dim;
    const int64_t row = (int64_t)token * o->n_heads + head;
    const int32_t kv_head = head / (o->n_heads / o->kv.n_kv_heads);
    const int32_t seq = o->seq != NULL ? o->seq[token] : 0;
    const int32_t here_begin = sl_kv_here_begin(&o->kv), here_end = sl_kv_here_end(&o->kv);
    const int32_t token_pos = o->pos[token];
    const int32_t in_window =
        o->window > 0 && token_pos >= o->window ? token_pos - o->window + 1 : 0;
    const int32_t first = in_window > here_begin ? in_window : here_begin;
    const int32_t last = token_pos < here_end ? token_pos : here_end - 1;
    float q[SL_KV_MAX_HEAD_DIM];
    memcpy(q, &o->q[row * n], sizeof(float) * (size_t)n);
    if (sl_kv_turns_keys(o->kv.types)) {
        sl_kv_turn(q, n);
    }
    double top_value = 0.0, top_logit = 0.0;
    for (int32_t pos = first; pos <= last; pos++) {
        float key[256], value[256];
        sl_dequantize_row(o->kv.types.k, sl_kv_key(&o->kv, seq, pos, kv_head), key, n);
        sl_dequantize_row(o->kv.types.v, sl_kv_value(&o->kv, seq, pos, kv_head), value, n);
        double logit = 0.0;
        for (int32_t i = 0; i < n; i++) {
            logit += fabs((double)q[i] * (double)key[i]);
            top_value = fmax(top_value, fabs((double)value[i]));
        }
        top_logit = fmax(top_logit, logit * (double)o->scale);
    }
    const double logit_error = top_logit * (2.0 * p->input + kc_sum_error(n));
    const double n_seen = last >= first ? last - first + 1 : 0;
    const double weight_error = p->input + 16.0 * ULP + kc_sum_error(n_seen);
    const double relative = fmin(2.0, 2.0 * (logit_error + weight_error));
    for (int32_t i = 0; i < n; i++) {
        kc_set_bound(in, bounds, &o->y[row * n + i], relative * top_value);
    }
    if (o->lse != NULL && (n_seen > 0 || o->sinks != NULL)) {
        const double cap = (double)o->softcap;
        const double logit = cap > 0.0 ? fmin(top_logit, cap) : top_logit;
        const double sink = o->sinks != NULL ? fabs((double)o->sinks[head]) : 0.0;
        const double size = fmax(logit, sink) + log(n_seen + 1.0);
        kc_set_bound(in, bounds, &o->lse[row],
                     logit_error + weight_error + 8.0 * ULP * (size + cap));
    }
}

void kc_bounds(const struct kc_instance *in, const struct kc_precision *precision, char *bounds)
{
    memset(bounds, 0, in->bytes);
    switch (in->op.kind) {
    case SL_OP_NORM:
        norm_bounds(in, bounds);
        break;
    case SL_OP_LINEAR:
        linear_bounds(in, precision, bounds);
        break;
    case SL_OP_ROPE:
        rope_bounds(in, bounds);
        break;
    case SL_OP_ATTENTION:
        for (int32_t t = 0; t < in->op.n_tokens; t++) {
            for (int32_t h = 0; h < in->op.attention.n_heads; h++) {
                attention_row_bounds(in, precision, t, h, bounds);
            }
        }
        break;
    case SL_OP_ADD:
        add_bounds(in, bounds);
        break;
    case SL_OP_MERGE:
        merge_bounds(in, bounds);
        break;
    case SL_OP_EXPERTS:
        kc_experts_bounds(in, precision, bounds);
        break;
    case SL_OP_DIVIDE:   /* integers */
    case SL_OP_ROUTER:   /* see kc_router_compare */
    case SL_OP_KV_STORE: /* packed bytes are compared as such */
    default:
        break;
    }
}
