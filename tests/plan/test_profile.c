/* SPDX-License-Identifier: Apache-2.0
 *
 * The machine profile: reading figures off it (measured points are hit, the way between them is
 * monotone, copies grow with their bytes) and its text form (round trip, and what a bad file is
 * told).
 */
#include "test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "plan/profile.h"

#define MIB 1048576.0

static char path[512];

static int set_up(void **state)
{
    (void)state;
    snprintf(path, sizeof path, "%s/test_profile_%ld.txt", SLUICE_BINARY_DIR, (long)getpid());
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    unlink(path);
    return 0;
}

/* Figures that are all different and grow with the tokens. */
static void odd_profile(struct sl_profile *p)
{
    sl_profile_typical(p, SL_DEVICE_SIM, 6);
    snprintf(p->gpu, sizeof p->gpu, "A GPU, with commas: and 1 2 3");
    snprintf(p->cpu, sizeof p->cpu, "cpu");
    double x = 1.0 / 3;
    for (int u = 0; u < SL_N_UNITS; u++) {
        for (uint32_t t = 0; t < SL_TYPE_N; t++) {
            for (int i = 0; p->linear_ns[u][t][0] > 0 && i < SL_N_TIERS; i++) {
                x *= 1.01;
                p->linear_ns[u][t][i] = 1000 * x * (1 + 0.2 * sl_tier_tokens[i]);
            }
        }
        p->op_ns[u] = 11 + u / 7.0;
        for (int i = 0; i < SL_N_KV_TYPES; i++) {
            p->attention_mib_ns[u][i] = 17e3 * (i + 1) + u / 7.0;
        }
        p->attention_gflop_ns[u] = 23e3 + u / 7.0;
        p->elementwise_mib_ns[u] = 29e3 + u / 7.0;
    }
}

static struct sl_op linear_op(enum sl_type type, int64_t rows, int64_t cols, int32_t n_tokens)
{
    struct sl_op op = {.kind = SL_OP_LINEAR, .n_tokens = n_tokens};
    op.linear.n_parts = 1;
    op.linear.part[0].w = (struct sl_matrix){.type = type, .n_rows = rows, .n_cols = cols};
    return op;
}

/* A product of 2^20 elements, without the fixed cost. */
static double element_ns(const struct sl_profile *p, enum sl_unit unit, enum sl_type type,
                         int32_t n_tokens)
{
    const struct sl_op op = linear_op(type, 1024, 1024, n_tokens);
    return sl_profile_op_ns(p, unit, &op, 0) - p->op_ns[unit];
}

static void assert_near(double got, double wanted)
{
    if (fabs(got - wanted) > 1e-9 * fabs(wanted)) {
        fail_msg("%.17g, should be %.17g", got, wanted);
    }
}

/* Same as measured where it was measured; between two points no less than the lower and no more
 * than the higher, and never falling; beyond the last in proportion. */
static void test_linear(void **state)
{
    (void)state;
    struct sl_profile p;
    odd_profile(&p);
    int n_types = 0;
    for (uint32_t t = 0; t < SL_TYPE_N; t++) {
        if (p.linear_ns[0][t][0] <= 0) {
            continue;
        }
        n_types++;
        const enum sl_type type = (enum sl_type)t;
        for (int u = 0; u < SL_N_UNITS; u++) {
            const double *const ns = p.linear_ns[u][t];
            for (int i = 0; i < SL_N_TIERS; i++) {
                assert_near(element_ns(&p, (enum sl_unit)u, type, sl_tier_tokens[i]), ns[i]);
            }
            double last = 0;
            int above = 0;
            const int32_t most = sl_tier_tokens[SL_N_TIERS - 1];
            for (int32_t n = 1; n <= most; n += 1 + n / 32) {
                while (sl_tier_tokens[above] < n) {
                    above++;
                }
                const double got = element_ns(&p, (enum sl_unit)u, type, n);
                assert_true(got >= last);
                assert_true(got <= ns[above] * (1 + 1e-12));
                assert_true(above == 0 || got >= ns[above - 1] * (1 - 1e-12));
                last = got;
            }
            assert_near(element_ns(&p, (enum sl_unit)u, type, 3 * most), 3 * ns[SL_N_TIERS - 1]);
        }
    }
    assert_true(n_types >= 16);
    /* The way between is a straight line in logarithms: 2 tokens lie halfway from 1 to 4. */
    p.linear_ns[SL_UNIT_GPU][SL_TYPE_F16][0] = 100;
    p.linear_ns[SL_UNIT_GPU][SL_TYPE_F16][1] = 400;
    assert_near(element_ns(&p, SL_UNIT_GPU, SL_TYPE_F16, 2), 200);
    /* Time goes with the elements, and parts add up. */
    struct sl_op op = linear_op(SL_TYPE_F16, 2048, 512, 1);
    op.linear.n_parts = 2;
    op.linear.part[1].w = (struct sl_matrix){.type = SL_TYPE_F16, .n_rows = 512, .n_cols = 512};
    assert_near(sl_profile_op_ns(&p, SL_UNIT_GPU, &op, 0), p.op_ns[SL_UNIT_GPU] + 100 * (1 + 0.25));
}

/* Points and whole types that were not measured. */
static void test_gaps(void **state)
{
    (void)state;
    struct sl_profile p;
    memset(&p, 0, sizeof p);
    double *const f16 = p.linear_ns[SL_UNIT_CPU][SL_TYPE_F16];
    double *const q4_0 = p.linear_ns[SL_UNIT_CPU][SL_TYPE_Q4_0];
    f16[0] = 160;
    f16[2] = 640; /* 4 tokens were left out: halfway in logarithms */
    q4_0[0] = 45;
    q4_0[7] = 9000;
    assert_near(element_ns(&p, SL_UNIT_CPU, SL_TYPE_F16, 4), 320);
    assert_near(element_ns(&p, SL_UNIT_CPU, SL_TYPE_F16, 64), 640 * 4);
    /* BF16 has F16's bits, Q4_K the 4.5 of Q4_0; Q5_0 has 5.5: as many more bytes at one token,
     * the same arithmetic with many. */
    assert_near(element_ns(&p, SL_UNIT_CPU, SL_TYPE_BF16, 1), 160);
    assert_near(element_ns(&p, SL_UNIT_CPU, SL_TYPE_Q4_K, 1), 45);
    assert_near(element_ns(&p, SL_UNIT_CPU, SL_TYPE_Q5_0, 1), 45 * 5.5 / 4.5);
    assert_near(element_ns(&p, SL_UNIT_CPU, SL_TYPE_Q5_0, 2048), 9000);
    assert_true(element_ns(&p, SL_UNIT_GPU, SL_TYPE_F16, 1) == 0); /* nothing was measured */
}

static double attention_types_ns(const struct sl_profile *p, struct sl_kv_types types,
                                 int32_t n_tokens, int32_t depth, int32_t window)
{
    struct sl_op op = {.kind = SL_OP_ATTENTION, .n_tokens = n_tokens};
    op.attention.kv = (struct sl_kv_view){.types = types, .n_kv_heads = 2, .head_dim = 64};
    op.attention.n_heads = 8;
    op.attention.window = window;
    return sl_profile_op_ns(p, SL_UNIT_CPU, &op, depth);
}

static double attention_ns(const struct sl_profile *p, int32_t n_tokens, int32_t depth,
                           int32_t window)
{
    const struct sl_kv_types types = {SL_TYPE_F16, SL_TYPE_F16};
    return attention_types_ns(p, types, n_tokens, depth, window);
}

/* By the bytes of the cache or by arithmetic, whichever takes longer. A position is 2 heads x 64 x
 * (key, value) x 2 bytes = 512 bytes, and costs 4 x 8 x 64 = 2048 operations a token. */
static void test_attention(void **state)
{
    (void)state;
    struct sl_profile p;
    memset(&p, 0, sizeof p);
    p.attention_mib_ns[SL_UNIT_CPU][0] = 1e6;
    assert_near(attention_ns(&p, 1, 1999, 0), 1e6 * (2000 + 1) * 512 / MIB);
    assert_near(attention_ns(&p, 1, 1999, 100), 1e6 * (100 + 1) * 512 / MIB);
    /* Keys and values each at the rate of their type: 2 x 64 elements in 136 or 72 bytes. */
    p.attention_mib_ns[SL_UNIT_CPU][1] = 2e6;
    p.attention_mib_ns[SL_UNIT_CPU][2] = 5e6;
    assert_near(attention_types_ns(&p, (struct sl_kv_types){SL_TYPE_Q8_0, SL_TYPE_Q4_0}, 1, 999, 0),
                1001 * (2e6 * 136 + 5e6 * 72) / MIB);
    assert_near(attention_types_ns(&p, (struct sl_kv_types){SL_TYPE_F16, SL_TYPE_Q8_0}, 1, 999, 0),
                1001 * (1e6 * 256 + 2e6 * 136) / MIB);
    p.attention_gflop_ns[SL_UNIT_CPU] = 1e9;
    assert_near(attention_ns(&p, 256, 1000, 0), 1e9 * 256 * (1000 + 128.5) * 2048 / 1e9);
    double last = 0;
    for (int32_t depth = 0; depth <= 1 << 20; depth += 1 + depth / 4) {
        const double ns = attention_ns(&p, 1, depth, 0);
        assert_true(ns > last);
        last = ns;
    }
}

static void test_elementwise(void **state)
{
    (void)state;
    struct sl_profile p;
    memset(&p, 0, sizeof p);
    p.elementwise_mib_ns[SL_UNIT_GPU] = 8e3;
    p.op_ns[SL_UNIT_GPU] = 5;
    struct sl_op op = {.kind = SL_OP_NORM, .n_tokens = 16};
    op.norm.n = 4096;
    op.norm.rows_per_token = 4; /* 16 x 4 x 4096 floats are 1 MiB */
    assert_near(sl_profile_op_ns(&p, SL_UNIT_GPU, &op, 0), 8005);
    op = (struct sl_op){.kind = SL_OP_ROPE, .n_tokens = 16};
    op.rope.n_heads = 32;
    op.rope.head_dim = 128; /* 256 KiB */
    assert_near(sl_profile_op_ns(&p, SL_UNIT_GPU, &op, 0), 2005);
    op = (struct sl_op){.kind = SL_OP_KV_STORE, .n_tokens = 16};
    op.kv_store.kv = (struct sl_kv_view){.n_kv_heads = 8, .head_dim = 128}; /* twice 64 KiB */
    assert_near(sl_profile_op_ns(&p, SL_UNIT_GPU, &op, 0), 1005);
}

/* A mixture: with one token the experts it uses, with many all of them. */
static void test_experts(void **state)
{
    (void)state;
    struct sl_profile p;
    memset(&p, 0, sizeof p);
    for (int i = 0; i < SL_N_TIERS; i++) {
        p.linear_ns[SL_UNIT_CPU][SL_TYPE_F16][i] = 100; /* bound by reading weights */
    }
    struct sl_op op = {.kind = SL_OP_EXPERTS, .n_tokens = 1};
    const struct sl_experts_matrix m = {.type = SL_TYPE_F16, .n_rows = 1024, .n_cols = 1024};
    op.experts.n = 32;
    op.experts.n_used = 4;
    op.experts.gate = op.experts.up = op.experts.down = m;
    assert_near(sl_profile_op_ns(&p, SL_UNIT_CPU, &op, 0), 4 * 3 * 100);
    double last = 0;
    for (op.n_tokens = 1; op.n_tokens <= 2048; op.n_tokens *= 2) {
        const double ns = sl_profile_op_ns(&p, SL_UNIT_CPU, &op, 0);
        assert_true(ns >= last * (1 - 1e-9) && ns <= 32 * 3 * 100 * (1 + 1e-9));
        last = ns;
    }
    assert_near(last, 32 * 3 * 100);
}

static void test_copies(void **state)
{
    (void)state;
    struct sl_profile p;
    odd_profile(&p);
    for (int i = 0; i < SL_N_COPY_SIZES; i++) {
        assert_near(sl_profile_copy_ns(&p, sl_copy_sizes[i]),
                    1e9 * (double)sl_copy_sizes[i] / p.h2d_bytes_per_s[i]);
    }
    double last = 0;
    for (size_t bytes = 1; bytes < (size_t)1 << 36; bytes += 1 + bytes / 16) {
        const double ns = sl_profile_copy_ns(&p, bytes);
        assert_true(ns >= last && ns > 0);
        assert_true(bytes <= sl_copy_sizes[0] || ns > last);
        last = ns;
    }
    /* A large copy runs at the speed of the largest measured one. */
    assert_near(sl_profile_copy_ns(&p, (size_t)1 << 33),
                1e9 * (double)((size_t)1 << 33) / p.h2d_bytes_per_s[SL_N_COPY_SIZES - 1]);
    assert_near(sl_profile_download_ns(&p, 25000), 1000);
    sl_profile_typical(&p, SL_DEVICE_NONE, 1);
    assert_true(sl_profile_copy_ns(&p, 1 << 20) == 0 && sl_profile_download_ns(&p, 1) == 0);
}

static void assert_same_figures(const double *got, const double *wanted, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        if (fabs(got[i] - wanted[i]) > 1e-5 * fabs(wanted[i])) {
            fail_msg("figure %zu of %zu: %.9g, should be %.9g", i, n, got[i], wanted[i]);
        }
    }
}

static void test_round_trip(void **state)
{
    (void)state;
    struct sluice_error err;
    struct sl_profile p, q;
    char *first = NULL, *second = NULL;
    odd_profile(&p);
    assert_ok(sl_profile_save(&p, path, &err), err);
    assert_ok(sl_file_read(path, 0, &first, NULL, &err), err);
    assert_ok(sl_profile_load(&q, path, &err), err);
    assert_int_equal(q.kind, p.kind);
    assert_int_equal(q.n_threads, p.n_threads);
    assert_string_equal(q.gpu, p.gpu);
    assert_string_equal(q.cpu, p.cpu);
    assert_same_figures(&q.linear_ns[0][0][0], &p.linear_ns[0][0][0],
                        sizeof p.linear_ns / sizeof(double));
    assert_same_figures(&q.attention_mib_ns[0][0], &p.attention_mib_ns[0][0],
                        SL_N_UNITS * SL_N_KV_TYPES);
    assert_same_figures(q.attention_gflop_ns, p.attention_gflop_ns, SL_N_UNITS);
    assert_same_figures(q.elementwise_mib_ns, p.elementwise_mib_ns, SL_N_UNITS);
    assert_same_figures(q.op_ns, p.op_ns, SL_N_UNITS);
    assert_same_figures(q.h2d_bytes_per_s, p.h2d_bytes_per_s, SL_N_COPY_SIZES);
    assert_same_figures(&q.d2h_bytes_per_s, &p.d2h_bytes_per_s, 1);
    assert_same_figures(&q.copy_busy_factor, &p.copy_busy_factor, 1);
    assert_same_figures(&q.hop_ns, &p.hop_ns, 1);
    assert_same_figures(&q.issue_ns, &p.issue_ns, 1);
    assert_same_figures(&q.dram_bytes_per_s, &p.dram_bytes_per_s, 1);
    assert_same_figures(&q.dram_busy_bytes_per_s, &p.dram_busy_bytes_per_s, 1);
    assert_same_figures(&q.vram_bytes_per_s, &p.vram_bytes_per_s, 1);
    /* What was loaded is saved as the same text. */
    assert_ok(sl_profile_save(&q, path, &err), err);
    assert_ok(sl_file_read(path, 0, &second, NULL, &err), err);
    assert_string_equal(first, second);
    sl_free(first);
    sl_free(second);
    /* A machine without a GPU has no name for it. */
    sl_profile_typical(&p, SL_DEVICE_NONE, 3);
    assert_ok(sl_profile_save(&p, path, &err), err);
    assert_ok(sl_profile_load(&q, path, &err), err);
    assert_int_equal(q.kind, SL_DEVICE_NONE);
    assert_string_equal(q.gpu, "");
    assert_int_equal(q.n_threads, 3);
}

/* Write the good text with line `number` (from 1) replaced by `line` (NULL: left out; "": the text
 * ends before it). */
static void write_changed(const char *good, int number, const char *line)
{
    struct sluice_error err;
    static char text[1 << 16];
    size_t n = 0;
    int at = 1;
    for (const char *c = good; *c; at++) {
        const size_t length = strcspn(c, "\n") + 1;
        if (at != number) {
            memcpy(text + n, c, length);
            n += length;
        } else if (line && *line) {
            n += (size_t)sprintf(text + n, "%s\n", line);
        } else if (line) {
            break;
        }
        c += length;
    }
    assert_ok(sl_file_write(path, text, n, &err), err);
}

static int find_line(const char *text, const char *start)
{
    int number = 1;
    for (const char *c = text; c; number++) {
        if (strncmp(c, start, strlen(start)) == 0) {
            return number;
        }
        c = strchr(c, '\n');
        c = c ? c + 1 : NULL;
    }
    fail_msg("no line begins with %s", start);
    return 0;
}

static void assert_refused(const char *wanted)
{
    struct sluice_error err;
    struct sl_profile p;
    const enum sluice_status status = sl_profile_load(&p, path, &err);
    assert_string_equal(sluice_status_name(status), "FORMAT");
    assert_mentions(err, path);
    assert_mentions(err, wanted);
    static const struct sl_profile nothing;
    assert_memory_equal(&p, &nothing, sizeof p);
}

static void test_malformed(void **state)
{
    (void)state;
    static const struct {
        const char *start; /* of the line that is replaced */
        const char *line;
    } cases[] = {
        {"sluice-profile", "sluice-profile 0"},
        {"sluice-profile", "sluice-profile 99"},
        {"sluice-profile", "something-else 1"},
        {"sluice-profile", "sluice-profile"},
        {"kind", "kind"},
        {"kind", "kind x"},
        {"kind", "kind 3"},
        {"kind", "kind -1"},
        {"n_threads", "n_threads 0"},
        {"n_threads", "n_threads 5000"},
        {"n_threads", "n_threads 4 4"},
        {"op_ns", "op_ns 1 2"},
        {"op_ns", "op_ns 1 2 3 4"},
        {"op_ns", "op_ns 1 2 -3"},
        {"op_ns", "op_ns 1 2 nan"},
        {"op_ns", "op_ns 1 2 inf"},
        {"op_ns", "op_ns 1 2 1e999"},
        {"op_ns", "op_ns 1 2 3x"},
        {"op_ns", "op_ns"},
        {"op_ns", "op_ns 1 2 3\nop_ns 1 2 3"},
        {"hop_ns", "hop_ms 1"},
        {"hop_ns", "no space"},
        {"hop_ns", "nospace"},
        {"hop_ns", " "},
        {"linear_ns.gpu.Q4_K", "linear_ns.gpu.Q4_K 1 2 3 4 5 6 7"},
        {"linear_ns.gpu.Q4_K", "linear_ns.gpu.Q4_Z 1 2 3 4 5 6 7 8"},
    };
    struct sluice_error err;
    struct sl_profile p;
    char *good = NULL;
    odd_profile(&p);
    assert_ok(sl_profile_save(&p, path, &err), err);
    assert_ok(sl_file_read(path, 0, &good, NULL, &err), err);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char wanted[32];
        int number = find_line(good, cases[i].start);
        write_changed(good, number, cases[i].line);
        number += strchr(cases[i].line, '\n') != NULL; /* the second of two is the bad one */
        snprintf(wanted, sizeof wanted, ".txt:%d:", number);
        assert_refused(wanted);
    }
    /* Every line has to be there, but for the names. */
    int n_lines = 0;
    for (const char *c = good; *c; c++) {
        n_lines += *c == '\n';
    }
    const int gpu = find_line(good, "gpu"), cpu = find_line(good, "cpu");
    const int kind = find_line(good, "kind");
    for (int number = 2; number <= n_lines; number++) {
        write_changed(good, number, NULL);
        if (number == gpu || number == cpu || number == kind) {
            assert_ok(sl_profile_load(&p, path, &err), err);
        } else {
            assert_refused("incomplete");
        }
        write_changed(good, number, "");
        assert_refused("incomplete");
    }
    sl_free(good);
    assert_ok(sl_file_write(path, "", 0, &err), err);
    assert_refused("incomplete");
    unlink(path);
    assert_status(sl_profile_load(&p, path, &err), IO);
    assert_mentions(err, path);
}

/* The n-th allocation fails: an error, nothing is lost. */
static void test_memory(void **state)
{
    (void)state;
    struct sluice_error err;
    struct sl_profile p, q;
    odd_profile(&p);
    for (int save = 0; save < 2; save++) {
        assert_ok(sl_profile_save(&p, path, &err), err);
        int n_failed = 0;
        for (int64_t n = 0;; n++) {
            const size_t blocks = sl_mem_n_blocks();
            sl_mem_fail_after(n, false);
            const enum sluice_status status =
                save ? sl_profile_save(&p, path, &err) : sl_profile_load(&q, path, &err);
            const bool fired = sl_mem_fault_fired();
            sl_mem_fail_after(-1, false);
            assert_int_equal(sl_mem_n_blocks(), blocks);
            if (!fired) {
                assert_ok(status, err);
                break;
            }
            assert_string_equal(sluice_status_name(status), "OUT_OF_MEMORY");
            n_failed++;
        }
        assert_true(n_failed > 0);
    }
}

static void test_file_name(void **state)
{
    (void)state;
    char names[6][64];
    sl_profile_file_name(names[0], 64, SL_DEVICE_CUDA, "gpu", "cpu", 8);
    sl_profile_file_name(names[1], 64, SL_DEVICE_SIM, "gpu", "cpu", 8);
    sl_profile_file_name(names[2], 64, SL_DEVICE_CUDA, "gpu 2", "cpu", 8);
    sl_profile_file_name(names[3], 64, SL_DEVICE_CUDA, "gpu", "cpu 2", 8);
    sl_profile_file_name(names[4], 64, SL_DEVICE_CUDA, "gpu", "cpu", 7);
    sl_profile_file_name(names[5], 64, SL_DEVICE_CUDA, "gpu", "cpu", 8);
    assert_string_equal(names[0], names[5]);
    for (int i = 0; i < 5; i++) {
        assert_null(strpbrk(names[i], "/\\: "));
        for (int k = 0; k < i; k++) {
            assert_string_not_equal(names[i], names[k]);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_linear),     cmocka_unit_test(test_gaps),
        cmocka_unit_test(test_attention),  cmocka_unit_test(test_elementwise),
        cmocka_unit_test(test_experts),    cmocka_unit_test(test_copies),
        cmocka_unit_test(test_round_trip), cmocka_unit_test(test_malformed),
        cmocka_unit_test(test_memory),     cmocka_unit_test(test_file_name),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
