/* SPDX-License-Identifier: Apache-2.0
 *
 * Matrix products of every set of kernels against the scalar reference.
 *
 * The kernels round activations to 8 bits in blocks of 32. Most tests use activations that survive
 * this exactly (whole multiples of a power of two up to 127, with 127 in every block), so that the
 * only difference left is the order of float additions and the bound can be tight.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <cmocka.h>

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/mem.h"
#include "cpu/amx_emulated.h"
#include "cpu/cpu.h"
#include "cpu/kernels.h"
#include "cpu/linear_internal.h"
#include "op/op.h"

#define N_TYPES 16
static const enum sl_type types[N_TYPES] = {
    SL_TYPE_F32,  SL_TYPE_F16,    SL_TYPE_BF16,   SL_TYPE_Q4_0,  SL_TYPE_Q4_1, SL_TYPE_Q5_0,
    SL_TYPE_Q5_1, SL_TYPE_Q8_0,   SL_TYPE_Q2_K,   SL_TYPE_Q3_K,  SL_TYPE_Q4_K, SL_TYPE_Q5_K,
    SL_TYPE_Q6_K, SL_TYPE_IQ4_NL, SL_TYPE_IQ4_XS, SL_TYPE_MXFP4,
};
#define GUARD 1234.5f

static uint64_t state;

static float uniform(void) /* -1 .. 1 */
{
    state = state * 6364136223846793005u + 1442695040888963407u;
    return (float)(int32_t)(state >> 32) / 2147483648.0f;
}

/* Memory whose last byte is the last byte of a page, with no page after it: reading past a matrix
 * faults. */
struct fenced {
    char *map;
    size_t map_bytes;
    void *data;
};

static struct fenced fenced_create(size_t bytes)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t body = (bytes + page - 1) / page * page;
    struct fenced f = {.map_bytes = body + page};
    f.map = mmap(NULL, f.map_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(f.map != MAP_FAILED);
    assert_int_equal(mprotect(f.map + body, page, PROT_NONE), 0);
    f.data = f.map + body - bytes;
    return f;
}

static void fenced_destroy(struct fenced *f)
{
    munmap(f->map, f->map_bytes);
}

/* An op with its memory. y has guard values around it. */
struct problem {
    struct sl_op op;
    float *x;
    struct fenced w[SL_LINEAR_MAX_PARTS];
    float *bias[SL_LINEAR_MAX_PARTS];
    float *y[SL_LINEAR_MAX_PARTS];
    float *expected[SL_LINEAR_MAX_PARTS];
    float *initial[SL_LINEAR_MAX_PARTS];
};

static void fill_x(float *x, int64_t n, bool exact)
{
    for (int64_t i = 0; i < n; i++) {
        if (exact) {
            x[i] = i % 32 == 7 ? 127.0f / 64.0f : floorf(uniform() * 127.0f) / 64.0f;
        } else {
            x[i] = uniform() + uniform() + uniform();
        }
    }
}

static void fill_w(const struct sl_matrix *w, void *data)
{
    const size_t row_bytes = sl_type_row_bytes(w->type, w->n_cols);
    float *row = malloc((size_t)w->n_cols * sizeof(float));
    assert_non_null(row);
    for (int64_t r = 0; r < w->n_rows; r++) {
        for (int64_t i = 0; i < w->n_cols; i++) {
            row[i] = uniform() * (float)(1 + (i / 16 + r) % 3);
        }
        assert_true(sl_quantize_row(w->type, row, (char *)data + (size_t)r * row_bytes, w->n_cols));
    }
    free(row);
}

static size_t y_items(const struct problem *p, int i)
{
    return (size_t)p->op.n_tokens * (size_t)p->op.linear.part[i].w.n_rows;
}

static void add_part(struct problem *p, enum sl_type type, int64_t n_rows, int64_t n_cols,
                     bool bias)
{
    const int i = p->op.linear.n_parts++;
    struct sl_matrix *w = &p->op.linear.part[i].w;
    *w = (struct sl_matrix){.type = type, .n_rows = n_rows, .n_cols = n_cols};
    p->w[i] = fenced_create((size_t)n_rows * sl_type_row_bytes(type, n_cols));
    fill_w(w, p->w[i].data);
    w->data = p->w[i].data;
    if (bias) {
        p->bias[i] = malloc((size_t)n_rows * sizeof(float));
        assert_non_null(p->bias[i]);
        fill_x(p->bias[i], n_rows, false);
        p->op.linear.part[i].bias = p->bias[i];
    }
    const size_t n = y_items(p, i);
    p->y[i] = malloc((n + 2) * sizeof(float));
    p->expected[i] = malloc(n * sizeof(float));
    p->initial[i] = malloc(n * sizeof(float));
    assert_true(p->y[i] != NULL && p->expected[i] != NULL && p->initial[i] != NULL);
    fill_x(p->initial[i], (int64_t)n, false);
}

static struct problem problem_create(int n_tokens, int64_t n_cols, bool exact)
{
    struct problem p = {.op = {.kind = SL_OP_LINEAR, .n_tokens = n_tokens}};
    p.x = malloc((size_t)n_tokens * (size_t)n_cols * sizeof(float));
    assert_non_null(p.x);
    fill_x(p.x, n_tokens * n_cols, exact);
    p.op.linear.x = p.x;
    return p;
}

/* Compute what is expected, once all parts are there. */
static void problem_finish(struct problem *p)
{
    struct sluice_error err;
    assert_int_equal(sl_op_validate(&p->op, &err), SLUICE_STATUS_OK);
    for (int i = 0; i < p->op.linear.n_parts; i++) {
        memcpy(p->expected[i], p->initial[i], y_items(p, i) * sizeof(float));
        p->op.linear.part[i].y = p->expected[i];
    }
    sl_op_run_ref(&p->op);
}

static void problem_destroy(struct problem *p)
{
    for (int i = 0; i < p->op.linear.n_parts; i++) {
        fenced_destroy(&p->w[i]);
        free(p->bias[i]);
        free(p->y[i]);
        free(p->expected[i]);
        free(p->initial[i]);
    }
    free(p->x);
}

/* The sets of kernels that run here, and AMX by emulation; NULL past the last. */
static const struct sl_cpu_linear_kernels *variant(int i)
{
    const struct sl_cpu_linear_kernels *k = sl_linear_variant(i);
    return k == NULL && (i == 0 || sl_linear_variant(i - 1) != NULL) ? sl_test_linear_amx() : k;
}

static bool exact; /* of the next calls */

struct team_run {
    const struct problem *p;
    const struct sl_cpu_linear_kernels *kernels;
    struct sl_pool *pool;
    char *scratch, *own;
    atomic_int taken;
};

static void run_thread(void *arg, int thread, int n_threads)
{
    struct team_run *r = arg;
    const struct sl_linear_call call = {
        .kernels = r->kernels,
        .op = &r->p->op.linear,
        .n_tokens = r->p->op.n_tokens,
        .scratch = r->scratch,
        .own = r->own + (size_t)thread * SL_CPU_THREAD_SCRATCH_BYTES,
        .pool = n_threads > 1 ? r->pool : NULL,
        .thread = thread,
        .n_threads = n_threads,
        .taken = &r->taken,
        .exact = exact,
    };
    sl_linear_run(&call);
}

static void run(struct problem *p, const struct sl_cpu_linear_kernels *kernels,
                struct sl_pool *pool, int n_threads)
{
    for (int i = 0; i < p->op.linear.n_parts; i++) {
        const size_t n = y_items(p, i);
        p->y[i][0] = p->y[i][n + 1] = GUARD;
        memcpy(p->y[i] + 1, p->initial[i], n * sizeof(float));
        p->op.linear.part[i].y = p->y[i] + 1;
    }
    const size_t own_bytes = (size_t)n_threads * SL_CPU_THREAD_SCRATCH_BYTES;
    const size_t bytes = sl_op_scratch_bytes(&p->op);
    struct team_run r = {.p = p, .kernels = kernels, .pool = pool};
    r.scratch = sl_alloc_aligned(SL_MEM_CPU, bytes + own_bytes + 64, 64);
    assert_non_null(r.scratch);
    r.own = r.scratch + bytes + 64;
    memset(r.scratch, 0xff, bytes + 64 + own_bytes); /* NaN wherever stale memory is used */
    if (pool != NULL) {
        sl_pool_run(pool, run_thread, &r);
    } else {
        run_thread(&r, 0, 1);
    }
    for (size_t i = 0; i < 64; i++) {
        assert_int_equal((uint8_t)r.scratch[bytes + i], 0xff); /* the op's scratch was enough */
    }
    sl_free(r.scratch);
    for (int i = 0; i < p->op.linear.n_parts; i++) {
        assert_true(p->y[i][0] == GUARD && p->y[i][y_items(p, i) + 1] == GUARD);
    }
}

/* Relative L2 distance of part i from what is expected; infinite when something is not finite. */
static double distance(const struct problem *p, int i)
{
    double error = 0.0, size = 0.0;
    for (size_t k = 0; k < y_items(p, i); k++) {
        const double d = (double)p->y[i][k + 1] - (double)p->expected[i][k];
        error += d * d;
        size += (double)p->expected[i][k] * p->expected[i][k];
    }
    return isfinite(error) ? sqrt(error / (size + 1e-30)) : INFINITY;
}

static void check(struct problem *p, double bound, const char *what)
{
    const int n_results = p->op.linear.activation != SL_ACT_NONE ? 1 : p->op.linear.n_parts;
    const struct sl_cpu_linear_kernels *kernels;
    for (int v = 0; (kernels = variant(v)) != NULL; v++) {
        run(p, kernels, NULL, 1);
        for (int i = 0; i < n_results; i++) {
            const double d = distance(p, i);
            if (!(d <= bound)) {
                const struct sl_matrix *w = &p->op.linear.part[i].w;
                fail_msg("%s, %s, part %d: %s [%d, %d], %d tokens: distance %g above %g", what,
                         kernels->name, i, sl_type_name(w->type), (int)w->n_rows, (int)w->n_cols,
                         p->op.n_tokens, d, bound);
            }
        }
    }
}

/* Sums of up to some thousand terms in float: 2^-24 for each of the additions in a chain, and some
 * more for results that nearly cancel. One wrong level of one weight is 1e-3. */
#define EXACT_BOUND 1e-5

/* Some sets round halves and bfloats, and what they multiply, to 14 bits of the largest of some. */
#define WORDS_BOUND 3e-4

static double exact_bound(enum sl_type type)
{
    return type == SL_TYPE_F16 || type == SL_TYPE_BF16 ? WORDS_BOUND : EXACT_BOUND;
}

static const int token_counts[] = {1, 2, 3, 4, 5, 8, 9, 16, 33, 64, 100};

static void test_types(void **unused)
{
    (void)unused;
    static const int64_t shapes[][2] = {{1, 256}, {35, 512}, {70, 768}};
    for (int t = 0; t < N_TYPES; t++) {
        for (size_t s = 0; s < sizeof(shapes) / sizeof(shapes[0]); s++) {
            for (size_t k = 0; k < sizeof(token_counts) / sizeof(token_counts[0]); k++) {
                struct problem p = problem_create(token_counts[k], shapes[s][1], true);
                add_part(&p, types[t], shapes[s][0], shapes[s][1], false);
                problem_finish(&p);
                check(&p, exact_bound(types[t]), "types");
                problem_destroy(&p);
            }
        }
    }
}

/* Rows that end in the middle of a group of blocks, or of a vector. */
static void test_ragged_columns(void **unused)
{
    (void)unused;
    for (int t = 0; t < N_TYPES; t++) {
        const int64_t unit = sl_type_traits(types[t])->block_items;
        for (int n = 1; unit * n < 256 && n < 40; n += unit == 1 ? 3 : 1) {
            for (int tokens = 1; tokens <= 11; tokens += 5) {
                struct problem p = problem_create(tokens, unit * n, true);
                add_part(&p, types[t], 21, unit * n, false);
                problem_finish(&p);
                check(&p, exact_bound(types[t]), "ragged columns");
                problem_destroy(&p);
            }
        }
        struct problem p = problem_create(17, unit == 1 ? 1057 : 1024 + unit, true);
        add_part(&p, types[t], 5, unit == 1 ? 1057 : 1024 + unit, false);
        problem_finish(&p);
        check(&p, exact_bound(types[t]), "ragged columns");
        problem_destroy(&p);
    }
}

/* Activations as they come: what rounding them to 8 bits costs. */
static void test_rounding(void **unused)
{
    (void)unused;
    for (int t = 0; t < N_TYPES; t++) {
        const bool floats = sl_type_traits(types[t])->block_items == 1;
        for (int tokens = 2; tokens <= 20; tokens += 18) {
            struct problem p = problem_create(tokens, 2048, false);
            add_part(&p, types[t], 64, 2048, true);
            problem_finish(&p);
            /* 8-bit steps of 1/127 of the largest in 32, bfloats of 8 significant bits. */
            const double bound = floats ? exact_bound(types[t]) : 1e-2;
            check(&p, types[t] == SL_TYPE_BF16 ? 3e-3 : bound, "rounding");
            problem_destroy(&p);
        }
    }
}

static void test_parts(void **unused)
{
    (void)unused;
    static const enum sl_type mixes[][3] = {
        {SL_TYPE_Q4_K, SL_TYPE_Q4_K, SL_TYPE_Q6_K},
        {SL_TYPE_Q4_0, SL_TYPE_Q5_K, SL_TYPE_F16},
        {SL_TYPE_BF16, SL_TYPE_F32, SL_TYPE_Q8_0},
    };
    for (size_t m = 0; m < 3; m++) {
        for (size_t k = 0; k < sizeof(token_counts) / sizeof(token_counts[0]); k++) {
            struct problem p = problem_create(token_counts[k], 512, true);
            add_part(&p, mixes[m][0], 96, 512, true);
            add_part(&p, mixes[m][1], 33, 512, false);
            add_part(&p, mixes[m][2], 7, 512, true);
            problem_finish(&p);
            check(&p, WORDS_BOUND, "parts");
            problem_destroy(&p);
        }
    }
}

/* Rows that lie apart, as columns of a wider matrix do. What is between them is no number, and
 * after the last row there is nothing. */
static void spread_rows(struct problem *p, int i)
{
    struct sl_matrix *const w = &p->op.linear.part[i].w;
    const struct sl_type_traits *const t = sl_type_traits(w->type);
    const size_t row_bytes = sl_type_row_bytes(w->type, w->n_cols);
    const size_t pitch = row_bytes + 3 * t->block_bytes, n = (size_t)w->n_rows;
    struct fenced wide = fenced_create((n - 1) * pitch + row_bytes);
    memset(wide.data, 0xff, (n - 1) * pitch + row_bytes);
    for (size_t r = 0; r < n; r++) {
        memcpy((char *)wide.data + r * pitch, (const char *)w->data + r * row_bytes, row_bytes);
    }
    fenced_destroy(&p->w[i]);
    p->w[i] = wide;
    w->data = wide.data;
    w->pitch_bytes = (uint32_t)pitch;
}

static void test_gaps(void **unused)
{
    (void)unused;
    for (int t = 0; t < N_TYPES; t++) {
        for (size_t k = 0; k < sizeof(token_counts) / sizeof(token_counts[0]); k++) {
            struct problem p = problem_create(token_counts[k], 1280, true);
            add_part(&p, types[t], 81, 1280, k % 2 == 0);
            p.op.linear.accumulate = true;
            problem_finish(&p);
            spread_rows(&p, 0);
            check(&p, exact_bound(types[t]), "gaps");
            problem_destroy(&p);
        }
    }
}

static void test_accumulate(void **unused)
{
    (void)unused;
    static const enum sl_type some[] = {SL_TYPE_Q4_0, SL_TYPE_Q6_K, SL_TYPE_F16, SL_TYPE_BF16};
    for (size_t m = 0; m < 4; m++) {
        for (size_t k = 0; k < sizeof(token_counts) / sizeof(token_counts[0]); k++) {
            struct problem p = problem_create(token_counts[k], 1280, true);
            add_part(&p, some[m], 81, 1280, k % 2 == 0);
            p.op.linear.accumulate = true;
            problem_finish(&p);
            check(&p, exact_bound(some[m]), "accumulate");
            problem_destroy(&p);
        }
    }
}

static void test_activation(void **unused)
{
    (void)unused;
    static const enum sl_type mixes[][2] = {{SL_TYPE_Q4_K, SL_TYPE_Q4_K},
                                            {SL_TYPE_Q8_0, SL_TYPE_Q5_1},
                                            {SL_TYPE_F16, SL_TYPE_F16},
                                            {SL_TYPE_BF16, SL_TYPE_IQ4_XS}};
    for (size_t m = 0; m < 4; m++) {
        for (size_t k = 0; k < sizeof(token_counts) / sizeof(token_counts[0]); k++) {
            struct problem p = problem_create(token_counts[k], 256, true);
            for (int64_t i = 0; i < p.op.n_tokens * 256; i++) {
                p.x[i] /= 8.0f; /* gates around the bend of the activation */
            }
            add_part(&p, mixes[m][0], 73, 256, k % 2 == 0);
            add_part(&p, mixes[m][1], 73, 256, k % 2 == 0);
            p.op.linear.activation = k % 3 == 0 ? SL_ACT_SILU : SL_ACT_GELU_TANH;
            problem_finish(&p);
            check(&p, WORDS_BOUND, "activation");
            problem_destroy(&p);
        }
    }
}

static void test_extremes(void **unused)
{
    (void)unused;
    for (int t = 0; t < N_TYPES; t++) {
        for (int tokens = 1; tokens <= 10; tokens += 9) {
            struct problem p = problem_create(tokens, 512, false);
            for (int64_t i = 0; i < tokens * 512; i++) {
                const int block = (int)(i / 32 % 5);
                const float one = i % 2 == 0 ? 1.0f : -1.0f;
                p.x[i] = block == 0   ? 0.0f
                         : block == 1 ? one
                         : block == 2 ? 1e-42f * one
                         : block == 3 ? (i % 32 == 3 ? 3e4f : 0.0f)
                                      : 1.0f;
            }
            add_part(&p, types[t], 40, 512, false);
            problem_finish(&p);
            check(&p, types[t] == SL_TYPE_BF16 ? 3e-3 : exact_bound(types[t]), "extremes");
            problem_destroy(&p);
        }
    }
}

/* Bit for bit the same with any number of threads, more than there are rows included. */
static void test_threads(void **unused)
{
    (void)unused;
    struct sl_pool *pool = NULL;
    const struct sl_pool_options options = {.n_threads = 5};
    assert_int_equal(sl_pool_create(&pool, &options, NULL), SLUICE_STATUS_OK);
    for (int t = 0; t < N_TYPES; t++) {
        for (int k = 0; k < 4; k++) {
            static const int tokens[] = {1, 7, 130, 9};
            static const int64_t rows[] = {3, 100, 70, 1};
            const int64_t n_cols = k == 1 ? 6144 : 512;
            struct problem p = problem_create(tokens[k], n_cols, false);
            add_part(&p, types[t], rows[k], n_cols, true);
            add_part(&p, types[(t + 3) % N_TYPES], rows[k] + 40, n_cols, false);
            problem_finish(&p);
            const struct sl_cpu_linear_kernels *kernels;
            for (int v = 0; (kernels = variant(v)) != NULL; v++) {
                run(&p, kernels, NULL, 1);
                for (int i = 0; i < 2; i++) {
                    memcpy(p.expected[i], p.y[i] + 1, y_items(&p, i) * sizeof(float));
                }
                for (int n = 2; n <= 5; n++) {
                    sl_pool_limit(pool, n);
                    run(&p, kernels, pool, n);
                    for (int i = 0; i < 2; i++) {
                        assert_memory_equal(p.expected[i], p.y[i] + 1,
                                            y_items(&p, i) * sizeof(float));
                    }
                }
            }
            problem_destroy(&p);
        }
    }
    sl_pool_destroy(&pool);
}

static void test_many_tokens(void **unused)
{
    (void)unused;
    static const enum sl_type some[] = {SL_TYPE_Q4_0, SL_TYPE_Q4_K, SL_TYPE_Q6_K, SL_TYPE_Q8_0,
                                        SL_TYPE_F16};
    for (size_t m = 0; m < 5; m++) {
        struct problem p = problem_create(512, 256, true);
        add_part(&p, some[m], 50, 256, false);
        problem_finish(&p);
        check(&p, exact_bound(some[m]), "many tokens");
        problem_destroy(&p);
    }
}

/* Where floats are asked for, nothing is rounded but sums. */
static void test_exact(void **unused)
{
    (void)unused;
    static const enum sl_type floats[] = {SL_TYPE_F32, SL_TYPE_F16, SL_TYPE_BF16};
    for (int t = 0; t < 3; t++) {
        for (int tokens = 3; tokens <= 30; tokens += 27) {
            struct problem p = problem_create(tokens, 768, false);
            add_part(&p, floats[t], 40, 768, true);
            problem_finish(&p);
            const struct sl_cpu_linear_kernels *kernels;
            for (int v = 0; (kernels = variant(v)) != NULL; v++) {
                exact = true;
                run(&p, kernels, NULL, 1);
                exact = false;
                assert_true(distance(&p, 0) <= EXACT_BOUND);
            }
            problem_destroy(&p);
        }
    }
}

/* Through the op list: the set that a level stands for. */
static void test_levels(void **unused)
{
    (void)unused;
    for (enum sl_cpu_level level = SL_CPU_SCALAR; level < SL_CPU_N_LEVELS; level++) {
        if (!sl_cpu_level_supported(level)) {
            continue;
        }
        assert_true(sl_cpu_linear_kernels(level)->level <= level);
        struct problem p = problem_create(3, 512, true);
        add_part(&p, SL_TYPE_Q4_K, 100, 512, true);
        problem_finish(&p);
        run(&p, sl_cpu_linear_kernels(level), NULL, 1);
        memcpy(p.expected[0], p.y[0] + 1, y_items(&p, 0) * sizeof(float));
        void *scratch =
            sl_alloc_aligned(SL_MEM_CPU, sl_cpu_scratch_bytes(sl_op_scratch_bytes(&p.op), 1), 64);
        assert_non_null(scratch);
        sl_cpu_run(sl_cpu_kernels(level), NULL, &p.op, 1, scratch);
        sl_free(scratch);
        assert_memory_equal(p.expected[0], p.y[0] + 1, y_items(&p, 0) * sizeof(float));
        problem_destroy(&p);
    }
}

int main(void)
{
    state = 20260601;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_types),       cmocka_unit_test(test_ragged_columns),
        cmocka_unit_test(test_rounding),    cmocka_unit_test(test_parts),
        cmocka_unit_test(test_accumulate),  cmocka_unit_test(test_activation),
        cmocka_unit_test(test_extremes),    cmocka_unit_test(test_threads),
        cmocka_unit_test(test_many_tokens), cmocka_unit_test(test_levels),
        cmocka_unit_test(test_exact),       cmocka_unit_test(test_gaps),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
