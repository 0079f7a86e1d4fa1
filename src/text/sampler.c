/* SPDX-License-Identifier: Apache-2.0
 *
 * The sampler chain; see sampler.h. Logits are changed in place by bias, penalties and DRY; then
 * the best are taken out in falling order and the list only gets shorter. Probabilities are worked
 * out in double.
 */
#include "text/sampler.h"

#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "base/error.h"
#include "base/mem.h"
#include "text/dry.h"
#include "text/rng.h"
#include "text/select.h"

/* Up to here the best logits are found in one pass with a small heap. */
#define MAX_HEAP_K 1024
#define STRETCH 1024 /* logits that are looked at together */
#define LANES 32

struct sl_sampler {
    struct sl_sampler_options options;
    int32_t n_vocab;
    struct sl_logit_bias *biases;
    struct sl_rng rng;
    struct sl_dry dry;

    /* Penalties: the last tokens in a ring, and how often each occurs among them. */
    int32_t *window;
    int32_t window_size; /* 0: penalties are off */
    int32_t n_window;
    int32_t window_head;
    int32_t *counts; /* per token of the vocabulary */

    uint64_t *keys;
    struct sl_candidate *candidates; /* falling logits */
    size_t n_candidates;
};

static const char *const DEFAULT_BREAKERS[] = {"\n", ":", "\"", "*"};

struct sl_sampler_options sl_sampler_options_default(void)
{
    return (struct sl_sampler_options){
        .temperature = 0.8f,
        .top_k = 40,
        .top_p = 0.95f,
        .min_p = 0.05f,
        .typical_p = 1.0f,
        .min_keep = 1,
        .penalty_last_n = 64,
        .repeat_penalty = 1.0f,
        .dry_base = 1.75f,
        .dry_allowed_length = 2,
        .dry_last_n = -1,
        .dry_breakers = DEFAULT_BREAKERS,
        .n_dry_breakers = sizeof(DEFAULT_BREAKERS) / sizeof(DEFAULT_BREAKERS[0]),
        .n_context = 4096,
    };
}

static enum sluice_status check_options(const struct sl_sampler_options *o, int32_t n_vocab,
                                        struct sluice_error *err)
{
    const struct {
        const char *name;
        float value, least, most;
    } ranges[] = {
        {"temperature", o->temperature, -FLT_MAX, FLT_MAX},
        {"top-p", o->top_p, 0, 1},
        {"min-p", o->min_p, 0, 1},
        {"typical-p", o->typical_p, 0, 1},
        {"repeat penalty", o->repeat_penalty, FLT_MIN, FLT_MAX},
        {"presence penalty", o->presence_penalty, -FLT_MAX, FLT_MAX},
        {"frequency penalty", o->frequency_penalty, -FLT_MAX, FLT_MAX},
        {"DRY multiplier", o->dry_multiplier, 0, FLT_MAX},
        {"DRY base", o->dry_base, 1, FLT_MAX},
        {"DRY allowed length", (float)o->dry_allowed_length, 0, FLT_MAX},
        {"penalty window", (float)o->penalty_last_n, -1, FLT_MAX},
        {"DRY window", (float)o->dry_last_n, -1, FLT_MAX},
        {"context size", (float)o->n_context, 1, FLT_MAX},
    };
    SL_CHECK(n_vocab > 0, INVALID_ARGUMENT, err, "a vocabulary of %d tokens", (int)n_vocab);
    for (size_t i = 0; i < sizeof(ranges) / sizeof(ranges[0]); i++) {
        /* Written so that NaN fails. */
        const bool fits = ranges[i].value >= ranges[i].least && ranges[i].value <= ranges[i].most;
        SL_CHECK(fits, INVALID_ARGUMENT, err, "sampling: %s is %g, expected %g to %g",
                 ranges[i].name, (double)ranges[i].value, (double)ranges[i].least,
                 (double)ranges[i].most);
    }
    for (size_t i = 0; i < o->n_biases; i++) {
        SL_CHECK(o->biases[i].token >= 0 && o->biases[i].token < n_vocab, INVALID_ARGUMENT, err,
                 "sampling: logit bias for token %d, but the vocabulary has %d",
                 (int)o->biases[i].token, (int)n_vocab);
        SL_CHECK(!isnan(o->biases[i].bias), INVALID_ARGUMENT, err,
                 "sampling: logit bias for token %d is not a number", (int)o->biases[i].token);
    }
    for (size_t i = 0; i < o->n_dry_breakers; i++) {
        SL_CHECK(o->dry_breakers[i][0] != '\0', INVALID_ARGUMENT, err,
                 "sampling: DRY sequence breaker %zu is empty", i);
    }
    return SLUICE_STATUS_OK;
}

static bool has_penalties(const struct sl_sampler_options *o)
{
    return o->repeat_penalty != 1.0f || o->presence_penalty != 0.0f || o->frequency_penalty != 0.0f;
}

static enum sluice_status allocate(struct sl_sampler *s, struct sluice_error *err)
{
    const struct sl_sampler_options *o = &s->options;
    const size_t n_vocab = (size_t)s->n_vocab;
    s->keys = sl_calloc(SL_MEM_TEXT, n_vocab, sizeof(*s->keys));
    s->candidates = sl_calloc(SL_MEM_TEXT, n_vocab, sizeof(*s->candidates));
    s->biases = sl_calloc(SL_MEM_TEXT, o->n_biases + 1, sizeof(*s->biases));
    SL_CHECK(s->keys != NULL && s->candidates != NULL && s->biases != NULL, OUT_OF_MEMORY, err,
             "no memory for a sampler over %zu tokens", n_vocab);
    if (o->n_biases > 0) {
        memcpy(s->biases, o->biases, o->n_biases * sizeof(*s->biases));
    }
    const int32_t window = o->penalty_last_n < 0 ? o->n_context : o->penalty_last_n;
    if (has_penalties(o) && window > 0) {
        s->window = sl_calloc(SL_MEM_TEXT, (size_t)window, sizeof(*s->window));
        s->counts = sl_calloc(SL_MEM_TEXT, n_vocab, sizeof(*s->counts));
        SL_CHECK(s->window != NULL && s->counts != NULL, OUT_OF_MEMORY, err,
                 "no memory for penalties over %d tokens", (int)window);
        s->window_size = window;
    }
    const int32_t dry_last_n = o->dry_last_n < 0 ? o->n_context : o->dry_last_n;
    if (o->dry_multiplier > 0 && dry_last_n > 0) {
        s->dry.allowed_length = o->dry_allowed_length;
        s->dry.multiplier = (double)o->dry_multiplier;
        s->dry.base = (double)o->dry_base;
        SL_TRY(sl_dry_init(&s->dry, o->tokenizer, o->dry_breakers, o->n_dry_breakers, dry_last_n,
                           s->n_vocab, err));
    }
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_sampler_create(struct sl_sampler **out,
                                     const struct sl_sampler_options *options, int32_t n_vocab,
                                     struct sluice_error *err)
{
    *out = NULL;
    SL_TRY(check_options(options, n_vocab, err));
    struct sl_sampler *s = sl_calloc(SL_MEM_TEXT, 1, sizeof(*s));
    SL_CHECK(s != NULL, OUT_OF_MEMORY, err, "no memory for a sampler");
    s->options = *options;
    s->n_vocab = n_vocab;
    const enum sluice_status status = allocate(s, err);
    if (status != SLUICE_STATUS_OK) {
        sl_sampler_destroy(&s);
        return status;
    }
    /* What these pointed to belongs to the caller; the copies are elsewhere. */
    s->options.biases = NULL;
    s->options.dry_breakers = NULL;
    sl_sampler_reset(s);
    *out = s;
    return SLUICE_STATUS_OK;
}

void sl_sampler_destroy(struct sl_sampler **sampler)
{
    struct sl_sampler *s = *sampler;
    if (s == NULL) {
        return;
    }
    sl_dry_finish(&s->dry);
    sl_free(s->biases);
    sl_free(s->window);
    sl_free(s->counts);
    sl_free(s->keys);
    sl_free(s->candidates);
    sl_free(s);
    *sampler = NULL;
}

void sl_sampler_reset(struct sl_sampler *sampler)
{
    sl_rng_seed(&sampler->rng, sampler->options.seed);
    sl_dry_reset(&sampler->dry);
    sampler->n_window = 0;
    sampler->window_head = 0;
    sampler->n_candidates = 0;
    if (sampler->counts != NULL) {
        memset(sampler->counts, 0, (size_t)sampler->n_vocab * sizeof(*sampler->counts));
    }
}

void sl_sampler_accept(struct sl_sampler *sampler, int32_t token)
{
    struct sl_sampler *s = sampler;
    if (token < 0 || token >= s->n_vocab) {
        return;
    }
    sl_dry_accept(&s->dry, token);
    if (s->window_size == 0) {
        return;
    }
    if (s->n_window == s->window_size) {
        s->counts[s->window[s->window_head]]--;
    } else {
        s->n_window++;
    }
    s->window[s->window_head] = token;
    s->counts[token]++;
    s->window_head = s->window_head + 1 == s->window_size ? 0 : s->window_head + 1;
}

static void apply_penalties(const struct sl_sampler *s, float *logits)
{
    const struct sl_sampler_options *o = &s->options;
    for (int32_t i = 0; i < s->n_window; i++) {
        const int32_t token = s->window[i];
        if (s->counts[token] < 0) {
            continue; /* done: the sign marks tokens that were met already */
        }
        const float count = (float)s->counts[token];
        float logit = logits[token];
        logit = logit <= 0 ? logit * o->repeat_penalty : logit / o->repeat_penalty;
        logits[token] = logit - count * o->frequency_penalty - o->presence_penalty;
        s->counts[token] = -s->counts[token];
    }
    for (int32_t i = 0; i < s->n_window; i++) {
        const int32_t token = s->window[i];
        if (s->counts[token] < 0) {
            s->counts[token] = -s->counts[token];
        }
    }
}

/* The steps after this compare and subtract: no NaN, no positive infinity. Looked for in stretches,
 * without a branch: next to never is there one, and there are a hundred thousand and more. */
static void make_comparable(float *logits, int32_t n)
{
    for (int32_t begin = 0; begin < n; begin += STRETCH) {
        const int32_t end = n - begin < STRETCH ? n : begin + STRETCH;
        int n_bad = 0;
        for (int32_t i = begin; i < end; i++) {
            n_bad += !(logits[i] <= FLT_MAX);
        }
        for (int32_t i = begin; n_bad > 0 && i < end; i++) {
            if (!(logits[i] <= FLT_MAX)) {
                logits[i] = isnan(logits[i]) ? -INFINITY : FLT_MAX;
            }
        }
    }
}

static void change_logits(struct sl_sampler *s, float *logits)
{
    for (size_t i = 0; i < s->options.n_biases; i++) {
        logits[s->biases[i].token] += s->biases[i].bias;
    }
    apply_penalties(s, logits);
    sl_dry_apply(&s->dry, logits);
    make_comparable(logits, s->n_vocab);
}

/* The largest logit. Maxima of several lanes, so that no comparison waits for the one before. */
static float largest(const float *logits, int32_t n)
{
    float best = -INFINITY, lanes[LANES];
    for (int k = 0; k < LANES; k++) {
        lanes[k] = -INFINITY;
    }
    int32_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (int k = 0; k < LANES; k++) {
            lanes[k] = logits[i + k] > lanes[k] ? logits[i + k] : lanes[k];
        }
    }
    for (; i < n; i++) {
        best = logits[i] > best ? logits[i] : best;
    }
    for (int k = 0; k < LANES; k++) {
        best = lanes[k] > best ? lanes[k] : best;
    }
    return best;
}

/* Sum of exp(logit - best) over all tokens. */
static double total_weight(const float *logits, int32_t n, float best)
{
    double sum = 0;
    for (int32_t i = 0; i < n; i++) {
        sum += exp((double)logits[i] - (double)best);
    }
    return sum;
}

/* Put keys[0 .. k) in order and into the list. */
static void list_candidates(struct sl_sampler *s, const float *logits, size_t from, size_t to)
{
    for (size_t i = from; i < to; i++) {
        const int32_t id = (int32_t)sl_select_index(s->keys[i]);
        s->candidates[i] = (struct sl_candidate){.id = id, .logit = logits[id]};
    }
    s->n_candidates = to;
}

/* Order just as many of all tokens as top-p needs: eight times more each time it is not enough.
 * Returns the weight of all tokens. */
static double list_nucleus(struct sl_sampler *s, const float *logits)
{
    const size_t n = (size_t)s->n_vocab;
    size_t done = 0;
    double sum = 0;
    double all = 0;
    for (size_t k = 256; done < n; k *= 8) {
        const size_t wanted = k < n - done ? k : n - done;
        sl_select_smallest(s->keys + done, n - done, wanted);
        list_candidates(s, logits, done, done + wanted);
        if (done == 0) {
            all = total_weight(logits, s->n_vocab, s->candidates[0].logit);
        }
        for (size_t i = done; i < done + wanted; i++) {
            sum += exp((double)s->candidates[i].logit - (double)s->candidates[0].logit) / all;
        }
        done += wanted;
        /* A little more than asked, so that rounding cannot cut the list short of top-p. */
        if (sum >= (double)s->options.top_p + 1e-9 && done >= (size_t)s->options.min_keep) {
            break;
        }
    }
    return all;
}

static size_t least_kept(const struct sl_sampler *s)
{
    return s->options.min_keep > 1 ? (size_t)s->options.min_keep : 1;
}

/* The least logit that min-p keeps beside `best`. */
static double least_logit(const struct sl_sampler *s, float best)
{
    return (double)best + log((double)s->options.min_p);
}

/* Move the keys of tokens that min-p keeps to the front, so that only they need sorting; returns
 * how many. All when that is fewer than must stay. */
static size_t move_plausible(struct sl_sampler *s, const float *logits)
{
    const size_t n = (size_t)s->n_vocab;
    const float best = largest(logits, s->n_vocab);
    if (s->options.min_p <= 0.0f || best == -INFINITY) {
        return n;
    }
    const double least = least_logit(s, best);
    size_t n_kept = 0;
    for (size_t i = 0; i < n; i++) {
        n_kept += (double)logits[i] >= least;
    }
    if (n_kept < least_kept(s)) {
        return n;
    }
    size_t next = 0;
    for (size_t i = 0; i < n; i++) {
        if ((double)logits[i] >= least) {
            s->keys[next++] = sl_select_key(logits[i], (uint32_t)i);
        }
    }
    return n_kept;
}

/* Fill the list with what the chain goes on with, by falling logit: the top k, or all tokens (only
 * those that the first of the later steps can keep). Returns the weight that probabilities of that
 * step are shares of, relative to the best. */
static double list_best(struct sl_sampler *s, const float *logits)
{
    const struct sl_sampler_options *o = &s->options;
    const size_t n = (size_t)s->n_vocab;
    if (o->top_k > 0 && (size_t)o->top_k < n && o->top_k <= MAX_HEAP_K) {
        sl_select_largest_values(s->keys, (size_t)o->top_k, logits, n);
        list_candidates(s, logits, 0, (size_t)o->top_k);
        return 0;
    }
    for (size_t i = 0; i < n; i++) {
        s->keys[i] = sl_select_key(logits[i], (uint32_t)i);
    }
    if (o->top_k > 0 && (size_t)o->top_k < n) {
        sl_select_smallest(s->keys, n, (size_t)o->top_k);
        list_candidates(s, logits, 0, (size_t)o->top_k);
        return 0;
    }
    if (o->typical_p >= 1.0f && o->top_p < 1.0f) {
        return list_nucleus(s, logits);
    }
    const size_t wanted = o->typical_p < 1.0f ? n : move_plausible(s, logits);
    sl_select_sort(s->keys, wanted);
    list_candidates(s, logits, 0, wanted);
    return 0;
}

/* Probabilities as shares of `weight`, or of the list's own sum when that is 0. */
static void set_probabilities(struct sl_sampler *s, double weight, double temperature)
{
    struct sl_candidate *c = s->candidates;
    double sum = 0;
    for (size_t i = 0; i < s->n_candidates; i++) {
        c[i].p = exp(((double)c[i].logit - (double)c[0].logit) / temperature);
        sum += c[i].p;
    }
    if (weight > 0) {
        sum = weight;
    }
    for (size_t i = 0; i < s->n_candidates; i++) {
        c[i].p /= sum;
    }
}

/* Keep the tokens whose surprise is nearest to the expected one, until they have enough
 * probability together. */
static void keep_typical(struct sl_sampler *s)
{
    if (s->options.typical_p >= 1.0f) {
        return;
    }
    struct sl_candidate *c = s->candidates;
    const size_t n = s->n_candidates;
    set_probabilities(s, 0, 1);
    double entropy = 0;
    for (size_t i = 0; i < n; i++) {
        entropy -= c[i].p > 0 ? c[i].p * log(c[i].p) : 0;
    }
    for (size_t i = 0; i < n; i++) {
        const double surprise = c[i].p > 0 ? -log(c[i].p) : INFINITY;
        s->keys[i] = sl_select_key((float)-fabs(surprise - entropy), (uint32_t)i);
    }
    sl_select_sort(s->keys, n);
    double sum = 0;
    size_t kept = 0;
    while (kept < n) {
        sum += c[sl_select_index(s->keys[kept])].p;
        kept++;
        if (sum > (double)s->options.typical_p && kept >= least_kept(s)) {
            break;
        }
    }
    for (size_t i = kept; i < n; i++) {
        c[sl_select_index(s->keys[i])].p = -1;
    }
    size_t next = 0;
    for (size_t i = 0; i < n; i++) {
        if (c[i].p >= 0) {
            c[next++] = c[i];
        }
    }
    s->n_candidates = next;
}

static void keep_top_p(struct sl_sampler *s, double weight)
{
    if (s->options.top_p >= 1.0f) {
        return;
    }
    set_probabilities(s, weight, 1);
    double sum = 0;
    for (size_t i = 0; i < s->n_candidates; i++) {
        sum += s->candidates[i].p;
        if (sum >= (double)s->options.top_p && i + 1 >= least_kept(s)) {
            s->n_candidates = i + 1;
            return;
        }
    }
}

static void keep_min_p(struct sl_sampler *s)
{
    if (s->options.min_p <= 0.0f) {
        return;
    }
    const double least = least_logit(s, s->candidates[0].logit);
    size_t n = s->n_candidates < least_kept(s) ? s->n_candidates : least_kept(s);
    while (n < s->n_candidates && (double)s->candidates[n].logit >= least) {
        n++;
    }
    s->n_candidates = n;
}

/* Forbidden tokens are no candidates, unless there is nothing else. */
static void drop_forbidden(struct sl_sampler *s)
{
    while (s->n_candidates > 1 && s->candidates[s->n_candidates - 1].logit == -INFINITY) {
        s->n_candidates--;
    }
}

static int32_t draw(struct sl_sampler *s)
{
    const double u = sl_rng_uniform(&s->rng);
    double sum = 0;
    for (size_t i = 0; i < s->n_candidates; i++) {
        sum += s->candidates[i].p;
        if (u < sum) {
            return s->candidates[i].id;
        }
    }
    /* The sum may end just below 1. */
    return s->candidates[s->n_candidates - 1].id;
}

static bool has_filters(const struct sl_sampler *s)
{
    const struct sl_sampler_options *o = &s->options;
    return (o->top_k > 0 && o->top_k < s->n_vocab) || o->typical_p < 1.0f || o->top_p < 1.0f ||
           o->min_p > 0.0f;
}

/* Draw from all tokens: put them in order only as far as the draw goes. The token is the one that
 * draw() would take from the whole list. */
static int32_t draw_from_all(struct sl_sampler *s, const float *logits)
{
    const size_t n = (size_t)s->n_vocab;
    const double u = sl_rng_uniform(&s->rng);
    double all = 0;
    double sum = 0;
    for (size_t i = 0; i < n; i++) {
        s->keys[i] = sl_select_key(logits[i], (uint32_t)i);
    }
    for (size_t done = 0, k = 256; done < n; k *= 8) {
        const size_t wanted = k < n - done ? k : n - done;
        sl_select_smallest(s->keys + done, n - done, wanted);
        list_candidates(s, logits, done, done + wanted);
        drop_forbidden(s);
        const bool rest_is_forbidden = s->n_candidates < done + wanted;
        const double best = (double)s->candidates[0].logit;
        if (best == -INFINITY) {
            s->candidates[0].p = 1;
            return s->candidates[0].id;
        }
        for (size_t i = 0; done == 0 && i < n; i++) {
            all += exp(((double)logits[i] - best) / (double)s->options.temperature);
        }
        for (size_t i = done; i < s->n_candidates; i++) {
            struct sl_candidate *c = &s->candidates[i];
            c->p = exp(((double)c->logit - best) / (double)s->options.temperature) / all;
        }
        for (; done < s->n_candidates; done++) {
            sum += s->candidates[done].p;
            if (u < sum) {
                return s->candidates[done].id;
            }
        }
        if (rest_is_forbidden) {
            break;
        }
    }
    return s->candidates[s->n_candidates - 1].id;
}

/* The first of the most likely. */
static int32_t take_best(struct sl_sampler *s, const float *logits)
{
    const float most = largest(logits, s->n_vocab);
    int32_t best = 0;
    while (logits[best] < most) {
        best++;
    }
    s->candidates[0] = (struct sl_candidate){.id = best, .logit = logits[best], .p = 1};
    s->n_candidates = 1;
    return best;
}

int32_t sl_sampler_sample(struct sl_sampler *sampler, float *logits)
{
    struct sl_sampler *s = sampler;
    change_logits(s, logits);
    if (s->options.temperature <= 0.0f) {
        return take_best(s, logits);
    }
    if (!has_filters(s)) {
        return draw_from_all(s, logits);
    }
    const double weight = list_best(s, logits);
    drop_forbidden(s);
    if (s->candidates[0].logit == -INFINITY) {
        s->candidates[0].p = 1;
        return s->candidates[0].id;
    }
    keep_typical(s);
    keep_top_p(s, weight);
    keep_min_p(s);
    set_probabilities(s, 0, (double)s->options.temperature);
    return draw(s);
}

const struct sl_candidate *sl_sampler_candidates(const struct sl_sampler *sampler, size_t *n)
{
    *n = sampler->n_candidates;
    return sampler->candidates;
}
