// SPDX-License-Identifier: Apache-2.0
//
// Router, division and experts of the CUDA device without a GPU: the kernels' own source, compiled
// as C++ and run thread by thread (cuda_emulate.h), held to sl_op_run_ref.
//
// Inputs of experts are whole multiples of a power of two with a largest level of 127 in every
// block, so that packing them is exact; the activations between are rounded to 8 bits or f16, which
// the bounds allow for. Outputs and scratch hold NaN before, and guard bytes lie behind scratch.
#include <algorithm>
#include <map>

#define SL_CUDA_EMULATE
#include "device/cuda/cuda_ops.h"
#include "device/cuda/divide.cu"

// Chunks smaller than the contract's, so that small cases have several.
static int32_t most_in_chunk;

static int32_t small_chunk(const struct sl_op *op)
{
    const int32_t chunk = sl_op_experts_chunk(op);
    return most_in_chunk && chunk > most_in_chunk ? most_in_chunk : chunk;
}
#define sl_op_experts_chunk small_chunk
#include "device/cuda/experts.cu"
#include "device/cuda/experts_gemm_f.cu"
#include "device/cuda/experts_gemm_k.cu"
#include "device/cuda/experts_gemm_q.cu"
#include "device/cuda/experts_mid_f.cu"
#include "device/cuda/experts_mid_k.cu"
#include "device/cuda/experts_mid_q.cu"
#include "device/cuda/experts_pack.cu"
#include "device/cuda/experts_plain.cu"
#include "device/cuda/experts_sort.cu"
#include "device/cuda/experts_vec_k.cu"
#include "device/cuda/experts_vec_q.cu"
#include "device/cuda/linear.cu"
#include "device/cuda/linear_gemm_f.cu"
#include "device/cuda/linear_gemm_k.cu"
#include "device/cuda/linear_gemm_q.cu"
#include "device/cuda/linear_mid_f.cu"
#include "device/cuda/linear_mid_k.cu"
#include "device/cuda/linear_mid_q.cu"
#include "device/cuda/linear_vec_f.cu"
#include "device/cuda/linear_vec_k.cu"
#include "device/cuda/linear_vec_q.cu"
#include "device/cuda/router.cu"

#define GUARD_BYTES 256

static int n_failed;
static uint64_t random_state = 88172645463325252u;

static uint32_t random_below(uint32_t n)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 33) % n;
}

static float random_unit(void)
{
    return (float)random_below(2001) * 1e-3f - 1.0f;
}

static void check(bool ok, const char *what, double found, double bound)
{
    if (!ok) {
        fprintf(stderr, "FAILED %s: %g, bound %g\n", what, found, bound);
        n_failed++;
    }
}

static struct sl_cuda_props make_props(void)
{
    struct sl_cuda_props props;
    memset(&props, 0, sizeof(props));
    props.n_sm = 4;
    props.max_shared_bytes = 64 * 1024;
    return props;
}

// Memory that holds NaN, with a guard behind.
struct room {
    uint8_t *at;
    size_t n;

    explicit room(size_t n_) : n(n_)
    {
        at = (uint8_t *)aligned_alloc(256, (n + GUARD_BYTES + 255) / 256 * 256);
        memset(at, 0xff, n + GUARD_BYTES);
    }
    room(const room &) = delete;
    ~room()
    {
        free(at);
    }
    bool guarded() const
    {
        for (size_t i = 0; i < GUARD_BYTES; i++) {
            if (at[n + i] != 0xff) {
                return false;
            }
        }
        return true;
    }
};

static void fill_matrix(enum sl_type type, uint8_t *to, int64_t n_rows, int64_t n_cols)
{
    std::vector<float> row((size_t)n_cols);
    const float scale = 1.0f / sqrtf((float)n_cols);
    for (int64_t r = 0; r < n_rows; r++) {
        for (float &v : row) {
            v = scale * random_unit();
        }
        const size_t row_bytes = sl_type_row_bytes(type, n_cols);
        check(sl_quantize_row(type, row.data(), to + (size_t)r * row_bytes, n_cols), "type", 0, 0);
    }
}

static std::vector<float> exact_x(int n_tokens, int n_cols)
{
    std::vector<float> x((size_t)n_tokens * (size_t)n_cols);
    for (size_t i = 0; i < x.size(); i++) {
        const int level = i % 32 == 7 ? 127 : (int)random_below(255) - 127;
        x[i] = ldexpf((float)level, -6);
    }
    return x;
}

static double difference(const std::vector<float> &found, const std::vector<float> &want)
{
    double d = 0.0, n = 1e-30;
    for (size_t i = 0; i < want.size(); i++) {
        d += ((double)found[i] - want[i]) * ((double)found[i] - want[i]);
        n += (double)want[i] * want[i];
    }
    return sqrt(d / n);
}

// ---- experts ----

struct shape {
    int n_tokens, n_embd, n_ff, n, n_used;
    enum sl_type gate, up, down;
    enum sl_activation activation;
    bool bias, accumulate, table;
    int first;   // experts before those of the op
    int n_ids;   // ids are below this
    bool skewed; // half of the pairs go to one expert
};

struct expert_matrix {
    room data;
    std::vector<const void *> table;
    std::vector<float> bias;

    expert_matrix(const shape &s, struct sl_experts_matrix *m, enum sl_type type, int n_rows,
                  int n_cols)
        : data((size_t)s.n * (size_t)n_rows * sl_type_row_bytes(type, n_cols))
    {
        memset(m, 0, sizeof(*m));
        fill_matrix(type, data.at, (int64_t)s.n * n_rows, n_cols);
        m->type = type;
        m->n_rows = n_rows;
        m->n_cols = n_cols;
        m->data = data.at;
        const size_t bytes = (size_t)n_rows * sl_type_row_bytes(type, n_cols);
        for (int e = 0; e < s.n; e++) {
            // The last ones first, and every third one not here.
            table.push_back(e % 3 == 1 ? NULL : data.at + (size_t)(s.n - 1 - e) * bytes);
        }
        if (s.table) {
            m->data = NULL;
            m->table = table.data();
        }
        for (int i = 0; i < s.n * n_rows; i++) {
            bias.push_back(random_unit());
        }
        m->bias = s.bias ? bias.data() : NULL;
    }
};

static std::vector<int32_t> random_ids(const shape &s)
{
    std::vector<int32_t> ids;
    for (int t = 0; t < s.n_tokens; t++) {
        std::vector<int32_t> own;
        while ((int)own.size() < s.n_used) {
            int32_t id = (int32_t)random_below((uint32_t)s.n_ids);
            if (s.skewed && own.empty() && t % 8) {
                id = s.first + s.n / 2;
            }
            bool twice = false;
            for (int32_t other : own) {
                twice = twice || other == id;
            }
            if (!twice) {
                own.push_back(id);
            }
        }
        ids.insert(ids.end(), own.begin(), own.end());
    }
    return ids;
}

static void check_experts(const shape &s, double bound)
{
    sl_emu.late_copies = !sl_emu.late_copies;
    struct sl_op op;
    memset(&op, 0, sizeof(op));
    op.kind = SL_OP_EXPERTS;
    op.n_tokens = s.n_tokens;
    const std::vector<float> x = exact_x(s.n_tokens, s.n_embd);
    const std::vector<int32_t> ids = random_ids(s);
    std::vector<float> weights;
    for (size_t i = 0; i < ids.size(); i++) {
        weights.push_back(0.1f + 0.01f * (float)random_below(90));
    }
    struct sl_op_experts *e = &op.experts;
    e->x = x.data();
    e->ids = ids.data();
    e->weights = weights.data();
    e->n_used = s.n_used;
    e->first = s.first;
    e->n = s.n;
    e->activation = s.activation;
    e->accumulate = s.accumulate;
    const expert_matrix gate(s, &e->gate, s.gate, s.n_ff, s.n_embd);
    const expert_matrix up(s, &e->up, s.up, s.n_ff, s.n_embd);
    const expert_matrix down(s, &e->down, s.down, s.n_embd, s.n_ff);
    std::vector<float> want(x.size(), NAN), y(x.size(), NAN);
    for (size_t i = 0; s.accumulate && i < y.size(); i++) {
        want[i] = y[i] = random_unit();
    }
    struct sluice_error error;
    memset(&error, 0, sizeof(error));
    check(sl_op_validate(&op, &error) == SLUICE_STATUS_OK, error.message, 0, 0);
    e->y = want.data();
    sl_op_run_ref(&op);
    const room scratch(sl_op_scratch_bytes(&op));
    e->y = y.data();
    const struct sl_cuda_props props = make_props();
    const int result = sl_cuda_experts(NULL, &op, scratch.at, scratch.n, &props);
    char what[200];
    snprintf(what, sizeof(what), "experts %s %s %s: %d tokens x %d of %d, %d x %d, activation %d%s",
             sl_type_name((uint32_t)s.gate), sl_type_name((uint32_t)s.up),
             sl_type_name((uint32_t)s.down), s.n_tokens, s.n_used, s.n, s.n_ff, s.n_embd,
             (int)s.activation, s.table ? ", table" : "");
    check(result == 0, what, result, 0);
    check(scratch.guarded(), what, -1, 0);
    const double d = difference(y, want);
    check(d <= bound, what, d, bound);
}

// 8 bits an element of the activations between: under a per cent; f16 and float: hardly anything.
#define BOUND_8BIT 1.2e-2
#define BOUND_HALF 1.5e-3
#define BOUND_FLOAT 2e-6

static void check_type(enum sl_type type)
{
    const int items = (int)sl_type_traits((uint32_t)type)->block_items;
    const bool is_float = items == 1;
    const int ff = items == 256 ? 256 : 96;
    const int embd = items == 256 ? 256 : 160;
    const double small = type == SL_TYPE_F32 ? BOUND_FLOAT : is_float ? BOUND_HALF : BOUND_8BIT;
    const double large = type == SL_TYPE_F32 ? BOUND_FLOAT : BOUND_HALF;
    const enum sl_activation silu = SL_ACT_SILU;
    // Vector products want 1024 columns at least, in all pairs together for down.
    const int wide = items == 256 ? 1280 : 1056, high = items == 256 ? 512 : 352;
    check_experts({1, wide, high, 6, 3, type, type, type, silu, true, true, false, 2, 9, false},
                  small);
    check_experts({2, embd, ff, 6, 3, type, type, type, silu, true, true, false, 2, 9, false},
                  small);
    check_experts({11, embd, ff, 5, 2, type, type, type, silu, true, false, true, 0, 6, true},
                  small);
    check_experts({66, embd, ff, 1, 1, type, type, type, silu, true, false, false, 0, 1, false},
                  large);
}

static void check_shapes(void)
{
    const enum sl_type q4 = SL_TYPE_Q4_0, q8 = SL_TYPE_Q8_0, f16 = SL_TYPE_F16, f32 = SL_TYPE_F32;
    const enum sl_type bf16 = SL_TYPE_BF16;
    const enum sl_activation silu = SL_ACT_SILU, gelu = SL_ACT_GELU_TANH;
    const enum sl_activation clamped = SL_ACT_SWIGLU_CLAMPED;
    // Every tile size, with tiles of one pair and several tiles an expert.
    check_experts({2, 64, 32, 4, 4, q8, q8, q8, gelu, false, false, false, 0, 4, false},
                  BOUND_8BIT);
    check_experts({3, 64, 32, 40, 4, q4, q4, q8, clamped, true, true, true, 3, 50, false},
                  BOUND_8BIT);
    check_experts({50, 64, 32, 9, 3, q4, q4, q4, silu, true, false, false, 1, 11, true},
                  BOUND_8BIT);
    check_experts({90, 64, 32, 4, 2, q8, q8, q8, clamped, true, false, true, 0, 4, true},
                  BOUND_8BIT);
    check_experts({300, 64, 64, 3, 2, q4, q4, q8, silu, false, true, true, 1, 5, true}, BOUND_HALF);
    // Vector products of more tokens, with few pairs an expert.
    check_experts({9, 1024, 128, 36, 8, q4, q4, q8, silu, true, false, false, 2, 40, false},
                  BOUND_8BIT);
    check_experts({20, 1024, 128, 80, 8, q8, q8, q4, clamped, true, true, true, 0, 80, true},
                  BOUND_8BIT);
    // More experts a token than a warp has lanes.
    check_experts({1, 1024, 32, 60, 40, q4, q4, q8, silu, true, false, false, 3, 70, false},
                  BOUND_8BIT);
    // Gates and ups of different types; floats of odd shapes; experts none of which are here.
    check_experts({5, 64, 64, 4, 2, q4, f16, q8, silu, true, false, true, 0, 4, false}, BOUND_8BIT);
    check_experts({1, 64, 64, 4, 2, f32, q8, f16, clamped, true, false, false, 0, 4, false},
                  BOUND_HALF);
    check_experts({140, 64, 64, 2, 1, q8, f32, bf16, silu, true, false, false, 0, 2, false},
                  BOUND_HALF);
    check_experts({7, 37, 13, 4, 2, f16, bf16, f32, gelu, true, false, false, 0, 4, false},
                  BOUND_FLOAT);
    check_experts({4, 64, 32, 2, 1, q4, q4, q4, silu, true, true, false, 7, 7, false}, BOUND_8BIT);
    check_experts({2, 64, 32, 2, 1, q4, q4, q4, silu, true, false, false, 7, 7, false}, BOUND_8BIT);
    // Chunks whose borders cut experts and tiles.
    most_in_chunk = 37;
    check_experts({60, 64, 32, 5, 3, q4, q4, q8, silu, true, true, true, 1, 7, true}, BOUND_8BIT);
    most_in_chunk = 150;
    check_experts({200, 64, 64, 3, 2, q4, q8, f16, silu, true, false, false, 0, 3, true},
                  BOUND_HALF);
    most_in_chunk = 0;
}

// ---- router ----

static void check_router(int n_tokens, int n, int n_used, int n_cols, enum sl_type type,
                         enum sl_gating gating, bool normalize, bool biases, bool odd)
{
    struct sl_op op;
    memset(&op, 0, sizeof(op));
    op.kind = SL_OP_ROUTER;
    op.n_tokens = n_tokens;
    struct sl_op_router *r = &op.router;
    std::vector<float> x = exact_x(n_tokens, n_cols);
    room w((size_t)n * sl_type_row_bytes(type, n_cols));
    fill_matrix(type, w.at, n, n_cols);
    std::vector<float> bias, selection;
    for (int e = 0; e < n; e++) {
        // Odd numbers: NaN, infinities, equal ones.
        bias.push_back(!odd ? random_unit() : e % 5 == 1 ? NAN : e % 7 == 3 ? -INFINITY : 0.0f);
        selection.push_back(odd ? 0.0f : random_unit());
    }
    if (odd) {
        memset(w.at, 0, w.n);
    }
    r->x = x.data();
    r->w.data = w.at;
    r->w.type = type;
    r->w.n_rows = n;
    r->w.n_cols = n_cols;
    r->bias = biases ? bias.data() : NULL;
    r->selection_bias = biases ? selection.data() : NULL;
    r->n_used = n_used;
    r->gating = gating;
    r->normalize = normalize;
    r->scale = 1.5f;
    const size_t n_pairs = (size_t)n_tokens * (size_t)n_used;
    std::vector<int32_t> want_ids(n_pairs, -1), ids(n_pairs, -1);
    std::vector<float> want(n_pairs, NAN), weights(n_pairs, NAN);
    struct sluice_error error;
    memset(&error, 0, sizeof(error));
    // The kernels also take packed weights, whatever the contract says of them.
    const bool packed = sl_type_traits((uint32_t)type)->block_items > 1;
    check(packed || sl_op_validate(&op, &error) == SLUICE_STATUS_OK, error.message, 0, 0);
    r->ids = want_ids.data();
    r->weights = want.data();
    sl_op_run_ref(&op);
    const room scratch(sl_op_scratch_bytes(&op));
    r->ids = ids.data();
    r->weights = weights.data();
    const struct sl_cuda_props props = make_props();
    const int result = sl_cuda_router(NULL, &op, scratch.at, scratch.n, &props);
    char what[160];
    snprintf(what, sizeof(what), "router %s: %d tokens, %d of %d, gating %d%s%s",
             sl_type_name((uint32_t)type), n_tokens, n_used, n, (int)gating,
             normalize ? ", normalized" : "", odd ? ", odd numbers" : "");
    check(result == 0, what, result, 0);
    check(scratch.guarded(), what, -1, 0);
    check(ids == want_ids, what, ids[0], want_ids[0]);
    if (!odd) {
        const double d = difference(weights, want);
        check(d <= 1e-5, what, d, 1e-5);
    }
}

static void check_routers(void)
{
    const enum sl_gating softmax = SL_GATING_SOFTMAX, sigmoid = SL_GATING_SIGMOID;
    const enum sl_gating chosen = SL_GATING_SOFTMAX_CHOSEN;
    const enum sl_type f32 = SL_TYPE_F32;
    check_router(1, 128, 8, 64, f32, softmax, true, false, false);
    check_router(5, 8, 2, 64, f32, softmax, false, true, false);
    check_router(9, 33, 33, 37, SL_TYPE_F16, sigmoid, true, true, false);
    check_router(2, 32, 4, 96, SL_TYPE_BF16, chosen, false, true, false);
    check_router(3, 1024, 64, 32, SL_TYPE_Q8_0, chosen, true, true, false);
    check_router(4, 70, 40, 32, SL_TYPE_Q4_0, sigmoid, false, true, false);
    check_router(2, 40, 40, 32, f32, chosen, true, true, true);
    check_router(1, 60, 35, 32, f32, sigmoid, false, true, true);
    check_router(3, 100, 64, 32, f32, softmax, true, false, true);
}

// ---- divide ----

// The definition in words: missing experts by falling tokens, then rising ids; the first are taken.
static void check_divide(int n_tokens, int n, int n_used, int share, bool divided)
{
    const size_t n_pairs = (size_t)n_tokens * (size_t)n_used;
    std::vector<int32_t> ids, mine(n_pairs, -7), want(n_pairs, -7), uses((size_t)n, 3);
    for (int t = 0; t < n_tokens; t++) {
        std::vector<int32_t> one;
        while (one.size() < (size_t)n_used) { // low ids more often
            const int32_t e = (int32_t)(random_below(2) ? random_below((uint32_t)n)
                                                        : random_below((uint32_t)n / 4 + 1));
            if (std::find(one.begin(), one.end(), e) == one.end()) {
                one.push_back(e);
            }
        }
        ids.insert(ids.end(), one.begin(), one.end());
    }
    std::vector<uint8_t> at_hand((size_t)n);
    for (uint8_t &here : at_hand) {
        here = random_below(3) == 0;
    }
    std::map<int32_t, int> tokens;
    for (int32_t e : ids) {
        tokens[e]++;
    }
    std::vector<std::pair<int, int32_t>> missing;
    for (const auto &[e, count] : tokens) {
        if (!at_hand[(size_t)e]) {
            missing.emplace_back(-count, e);
        }
    }
    std::sort(missing.begin(), missing.end());
    missing.resize((missing.size() * (size_t)share + 128) / 256);
    for (size_t i = 0; divided && i < n_pairs; i++) {
        want[i] = at_hand[(size_t)ids[i]] ? ids[i] : -1;
        for (const auto &taken : missing) {
            want[i] = taken.second == ids[i] ? ids[i] : want[i];
        }
    }
    struct sl_op op;
    memset(&op, 0, sizeof(op));
    op.kind = SL_OP_DIVIDE;
    op.n_tokens = n_tokens;
    op.divide = {ids.data(), divided ? at_hand.data() : NULL, mine.data(), uses.data(), n_used, n,
                 share};
    char what[80];
    snprintf(what, sizeof(what), "divide: %d tokens, %d of %d, share %d", n_tokens, n_used, n,
             share);
    const struct sl_cuda_props props = make_props();
    check(sl_cuda_divide(NULL, &op, &props) == 0 && mine == want, what, 0, 0);
    std::fill(mine.begin(), mine.end(), -7);
    std::vector<int32_t> counts((size_t)n, 3);
    op.divide.uses = counts.data();
    sl_op_divide_run(&op.divide, n_tokens);
    check(mine == want && counts == uses, what, 1, 1);
    for (int e = 0; e < n; e++) {
        check(uses[(size_t)e] == 3 + (tokens.count(e) ? tokens[e] : 0), what, uses[(size_t)e], e);
    }
}

static void check_divides(void)
{
    for (int share : {0, 32, 100, 200, SL_DIVIDE_ALL}) {
        check_divide(1, 128, 8, share, true);
        check_divide(2, 60, 4, share, true);
        check_divide(16, 128, 8, share, true);
        check_divide(33, 8, 2, share, true);
        check_divide(200, 1024, 10, share, true);
    }
    check_divide(40, 40, 5, 128, false);
}

int main(void)
{
    static const enum sl_type types[] = {
        SL_TYPE_F32,  SL_TYPE_F16,    SL_TYPE_BF16,   SL_TYPE_Q4_0,  SL_TYPE_Q4_1, SL_TYPE_Q5_0,
        SL_TYPE_Q5_1, SL_TYPE_Q8_0,   SL_TYPE_Q2_K,   SL_TYPE_Q3_K,  SL_TYPE_Q4_K, SL_TYPE_Q5_K,
        SL_TYPE_Q6_K, SL_TYPE_IQ4_NL, SL_TYPE_IQ4_XS, SL_TYPE_MXFP4,
    };
    check_routers();
    check_divides();
    check_shapes();
    for (enum sl_type type : types) {
        check_type(type);
    }
    if (n_failed) {
        fprintf(stderr, "%d checks failed\n", n_failed);
    }
    return n_failed != 0;
}
