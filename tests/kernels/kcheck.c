/* SPDX-License-Identifier: Apache-2.0
 *
 * kcheck: every kernel against the scalar reference, and timing. Walks the CPU levels upward and
 * checks a kernel family only where a level brings a new one; or checks one device.
 *
 *   kcheck [--seed N] [--only TEXT] [--cpu LEVEL] [--device cpu|sim|cuda] [--cases N] [--from N]
 *          [--bench] [--threads N] [--json]
 *
 * The first cases of an op have shapes of real models, the others are random and small:
 * --from 16 leaves the large ones out, where the processor is an emulated one.
 *
 * A failure prints the seed, the case and the first wrong element; `--seed` and `--only` with part
 * of the case's text repeat it. Exit status 1 when anything failed.
 */
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/mem.h"
#include "cpu/amx_emulated.h"
#include "kcheck.h"

struct options {
    uint64_t seed;
    const char *only;
    int cpu_level; /* -1: all */
    const char *device;
    int from, n_cases; /* of each op kind */
    int n_threads;
    bool bench, json;
};

struct totals {
    int passed, failed, unsupported;
    bool first_row; /* of JSON output */
};

/* The worst error of a run as a part of its bound: near 1 the bound is tight, near 0 loose. */
struct verdict {
    bool ok;
    double worst;
    char why[256];
};

static void fail(struct verdict *v, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void fail(struct verdict *v, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    if (v->ok) {
        vsnprintf(v->why, sizeof(v->why), format, args);
    }
    v->ok = false;
    va_end(args);
}

static void compare_floats(struct verdict *v, const struct kc_region *r, const char *reference,
                           const char *result, const char *bounds)
{
    const float *want = (const float *)(const void *)(reference + r->offset);
    const float *got = (const float *)(const void *)(result + r->offset);
    const float *bound = (const float *)(const void *)(bounds + r->offset);
    for (size_t i = 0; i < r->bytes / sizeof(float); i++) {
        /* Elements without a bound are not touched by the op (rope beyond n_rot). */
        const bool same = bound[i] == 0.0f && memcmp(&want[i], &got[i], sizeof(float)) == 0;
        const double error = fabs((double)want[i] - (double)got[i]);
        if (!same && !(error <= (double)bound[i])) {
            fail(v, "output at byte %zu, element %zu: %.9g, should be %.9g within %.3g", r->offset,
                 i, (double)got[i], (double)want[i], (double)bound[i]);
        }
        v->worst = bound[i] > 0.0f ? fmax(v->worst, error / (double)bound[i]) : v->worst;
    }
}

/* Packed rows of one type: equal bytes, or (on devices) equal within one level of each block. */
static void compare_packed(struct verdict *v, enum sl_type type, const struct kc_precision *p,
                           size_t first, size_t bytes, const char *reference, const char *result)
{
    const struct sl_type_traits *t = sl_type_traits(type);
    const size_t step = t->block_bytes;
    for (size_t at = first; at < first + bytes; at += step) {
        if (memcmp(reference + at, result + at, step) == 0) {
            continue;
        }
        if (p->kv_exact || t->block_items == 1) {
            fail(v, "cache byte %zu (block of %zu) differs", at, step);
            return;
        }
        float want[32], got[32], top = 0.0f;
        sl_dequantize_row(type, reference + at, want, 32);
        sl_dequantize_row(type, result + at, got, 32);
        for (int i = 0; i < 32; i++) {
            top = fmaxf(top, fabsf(want[i]));
        }
        for (int i = 0; i < 32; i++) {
            const float level = top / (type == SL_TYPE_Q8_0 ? 127.0f : 8.0f);
            if (!(fabsf(want[i] - got[i]) <= 1.01f * level)) {
                fail(v, "cache byte %zu: %g, should be %g", at, (double)got[i], (double)want[i]);
            }
        }
    }
}

/* Keys and values of every block of a cache. */
static void compare_kv(struct verdict *v, const struct kc_instance *in,
                       const struct kc_precision *p, const struct kc_region *r,
                       const char *reference, const char *result)
{
    const struct sl_kv_view *kv = &in->op.kv_store.kv;
    const size_t rows = (size_t)kv->n_kv_heads * SL_KV_BLOCK;
    const size_t keys = rows * sl_type_row_bytes(kv->types.k, kv->head_dim);
    const size_t values = rows * sl_type_row_bytes(kv->types.v, kv->head_dim);
    for (size_t at = r->offset; at < r->offset + r->bytes; at += keys + values) {
        compare_packed(v, kv->types.k, p, at, keys, reference, result);
        compare_packed(v, kv->types.v, p, at + keys, values, reference, result);
    }
}

/* Everything outside the outputs must be as before. */
static void compare_rest(struct verdict *v, const struct kc_instance *in, const char *result)
{
    size_t at = 0;
    for (int i = 0; i <= in->n_regions; i++) {
        const bool last = i == in->n_regions;
        if (!last && in->regions[i].role == KC_INPUT) {
            continue;
        }
        const size_t end = last ? in->bytes : in->regions[i].offset;
        for (; at < end; at++) {
            if (in->base[at] != result[at]) {
                fail(v, "wrote to byte %zu, outside its outputs (next output at %zu)", at, end);
                break;
            }
        }
        at = last ? end : end + in->regions[i].bytes;
    }
}

static void compare(struct verdict *v, const struct kc_instance *in, const struct kc_precision *p,
                    const char *reference, const char *result, const char *bounds)
{
    for (int i = 0; i < in->n_regions; i++) {
        if (in->regions[i].role == KC_OUTPUT) {
            compare_floats(v, &in->regions[i], reference, result, bounds);
        } else if (in->regions[i].role == KC_OUTPUT_KV) {
            compare_kv(v, in, p, &in->regions[i], reference, result);
        }
    }
    char why[160];
    if (in->op.kind == SL_OP_ROUTER && !kc_router_compare(in, p, result, why, sizeof(why))) {
        fail(v, "%s", why);
    }
    compare_rest(v, in, result);
}

/* Memory of one check: three more blocks of the instance's size. */
struct blocks {
    char *reference, *result, *bounds;
};

static enum sluice_status check_blocks(struct kc_target *t, const struct kc_instance *in,
                                       struct blocks *b, struct verdict *v,
                                       struct sluice_error *err)
{
    SL_CHECK(b->reference != NULL && b->result != NULL && b->bounds != NULL, OUT_OF_MEMORY, err,
             "no memory");
    memcpy(b->reference, in->base, in->bytes);
    const struct sl_op op = kc_op_moved(&in->op, in->base, b->reference);
    SL_TRY(sl_op_validate(&op, err));
    kc_tables_move(in, b->reference, b->reference);
    sl_op_run_ref(&op);
    kc_tables_move(in, b->reference, in->base);
    kc_bounds(in, &t->precision, b->bounds);
    memcpy(b->result, in->base, in->bytes);
    SL_TRY(kc_target_run(t, in, b->result, 1, err));
    compare(v, in, &t->precision, b->reference, b->result, b->bounds);
    if (t->pool == NULL || !v->ok) {
        return SLUICE_STATUS_OK;
    }
    /* The work is cut by shapes alone: any number of threads gives the same bits. */
    for (int n_threads = 2; n_threads <= t->n_threads; n_threads++) {
        memcpy(b->reference, in->base, in->bytes);
        SL_TRY(kc_target_run(t, in, b->reference, n_threads, err));
        for (int i = 0; i < in->n_regions; i++) {
            const struct kc_region *r = &in->regions[i];
            if (r->role != KC_INPUT && r->role != KC_SCRATCH &&
                memcmp(b->reference + r->offset, b->result + r->offset, r->bytes) != 0) {
                fail(v, "%d threads give another result than one", n_threads);
            }
        }
    }
    return SLUICE_STATUS_OK;
}

static enum sluice_status check_instance(struct kc_target *t, const struct kc_instance *in,
                                         struct verdict *v, struct sluice_error *err)
{
    struct blocks b = {
        .reference = sl_alloc_aligned(SL_MEM_BASE, in->bytes, 256),
        .result = sl_alloc_aligned(SL_MEM_BASE, in->bytes, 256),
        .bounds = sl_alloc_aligned(SL_MEM_BASE, in->bytes, 256),
    };
    *v = (struct verdict){.ok = true};
    const enum sluice_status status = check_blocks(t, in, &b, v, err);
    sl_free(b.reference);
    sl_free(b.result);
    sl_free(b.bounds);
    return status;
}

static void json_row(struct totals *totals)
{
    printf("%s\n  ", totals->first_row ? "" : ",");
    totals->first_row = false;
}

static void report(const struct options *o, const struct kc_target *t, const char *text,
                   const struct verdict *v, enum sluice_status status,
                   const struct sluice_error *err, struct totals *totals)
{
    const bool unsupported = status == SLUICE_STATUS_UNSUPPORTED && t->device != NULL;
    const bool ok = status == SLUICE_STATUS_OK && v->ok;
    const char *why = status != SLUICE_STATUS_OK ? err->message : v->why;
    totals->passed += ok;
    totals->unsupported += unsupported;
    totals->failed += !ok && !unsupported;
    if (o->json) {
        json_row(totals);
        printf("{\"target\": \"%s\", \"case\": \"%s\", \"result\": \"%s\", \"worst\": %.4g}",
               t->name, text,
               ok            ? "ok"
               : unsupported ? "unsupported"
                             : "failed",
               v->worst);
    } else if (!ok) {
        printf("%s %s: %s\n    %s (seed %llu)\n", unsupported ? "unsupported" : "FAILED", t->name,
               text, why, (unsigned long long)o->seed);
    }
}

/* Check cases of one kind on a target. Returns the worst error as part of the bound. */
static double check_kind(const struct options *o, struct kc_target *t, enum sl_op_kind kind,
                         struct totals *totals)
{
    double worst = 0.0;
    for (int i = o->from; i < o->from + o->n_cases; i++) {
        struct kc_case c;
        struct kc_instance in;
        struct verdict v = {.ok = true};
        struct sluice_error err = {0};
        char text[512];
        kc_case_make(&c, kind, i, o->seed);
        kc_case_describe(&c, text, sizeof(text));
        if (o->only != NULL && strstr(text, o->only) == NULL) {
            continue;
        }
        enum sluice_status status;
        if (kc_instance_init(&in, &c)) {
            status = check_instance(t, &in, &v, &err);
        } else {
            status = sl_error_set(&err, SLUICE_STATUS_OUT_OF_MEMORY, "no memory for the operands");
        }
        report(o, t, text, &v, status, &err, totals);
        kc_instance_finish(&in);
        worst = fmax(worst, v.worst);
    }
    return worst;
}

static void bench_row(const struct options *o, const struct kc_target *t, const char *text,
                      const struct kc_instance *in, double median, double spread,
                      struct totals *totals)
{
    double bytes, flops;
    kc_case_work(in, &bytes, &flops);
    if (o->json) {
        json_row(totals);
        printf("{\"target\": \"%s\", \"case\": \"%s\", \"median_ns\": %.0f, \"spread_ns\": %.0f, "
               "\"gb_per_s\": %.3f, \"gflop_per_s\": %.3f}",
               t->name, text, median, spread, bytes / median, flops / median);
    } else {
        printf("%-12s %10.1f us +- %3.0f%% %8.2f GB/s %9.2f GFLOP/s  %s\n", t->name, median / 1e3,
               100.0 * spread / median, bytes / median, flops / median, text);
    }
}

/* Only what is right gets timed. */
static void bench_kind(const struct options *o, struct kc_target *t, enum sl_op_kind kind,
                       struct totals *totals)
{
    struct kc_case c;
    for (int i = 0; kc_case_bench(&c, kind, i); i++) {
        struct kc_instance in;
        struct sluice_error err = {0};
        char text[512];
        double median = 0.0, spread = 0.0;
        kc_case_describe(&c, text, sizeof(text));
        if (o->only != NULL && strstr(text, o->only) == NULL) {
            continue;
        }
        if (!kc_instance_init(&in, &c) ||
            kc_target_time(t, &in, &median, &spread, &err) != SLUICE_STATUS_OK) {
            totals->failed++;
            fprintf(stderr, "%s: %s: %s\n", t->name, text, err.message);
        } else {
            bench_row(o, t, text, &in, median, spread, totals);
        }
        kc_instance_finish(&in);
    }
}

/* Whether the level has another implementation of the op than the one below it. */
static bool is_new(const struct sl_cpu_kernels *k, const struct sl_cpu_kernels *below,
                   enum sl_op_kind kind)
{
    if (below == NULL || kind == SL_OP_LINEAR || kind == SL_OP_ROUTER || kind == SL_OP_EXPERTS) {
        return true;
    }
    return kind == SL_OP_ATTENTION ? k->attention != below->attention || k->matrix != below->matrix
                                   : k->rows != below->rows;
}

static void run_kind(const struct options *o, struct kc_target *t, enum sl_op_kind kind,
                     struct totals *totals)
{
    const int failed_before = totals->failed;
    const int done_before = totals->passed + totals->unsupported;
    const double worst = check_kind(o, t, kind, totals);
    const int done = totals->passed + totals->unsupported - done_before;
    if (!o->json && done > 0) {
        printf("%-12s %-10s %4d ok, worst error %.2f of the bound\n", t->name,
               sl_op_kind_name(kind), done, worst);
    }
    if (o->bench && totals->failed == failed_before) {
        bench_kind(o, t, kind, totals);
    }
}

static void run_target(const struct options *o, struct kc_target *t,
                       const struct sl_cpu_kernels *below, struct totals *totals)
{
    for (int kind = 0; kind < KC_N_KINDS; kind++) {
        if (t->kernels == NULL || is_new(t->kernels, below, (enum sl_op_kind)kind)) {
            run_kind(o, t, (enum sl_op_kind)kind, totals);
        }
    }
}

/* Of AMX, attention by emulated tiles, where the processor has all else that it needs; products are
 * in test_linear. */
static void run_emulated_amx(const struct options *o, struct sl_pool *pool, struct totals *totals)
{
    struct sl_cpu_kernels kernels = *sl_cpu_kernels(SL_CPU_AVX512VNNI);
    struct kc_target t = {.name = "amx emulated",
                          .kernels = &kernels,
                          .pool = pool,
                          .n_threads = sl_pool_n_threads(pool),
                          .precision = {.kv_exact = true}};
    kernels.matrix = sl_test_attention_amx();
    if (kernels.matrix != NULL) {
        run_kind(o, &t, SL_OP_ATTENTION, totals);
    }
}

static enum sluice_status run_cpu_levels(const struct options *o, struct totals *totals,
                                         struct sluice_error *err)
{
    struct sl_pool *pool = NULL;
    const struct sl_pool_options pool_options = {.n_threads = o->n_threads};
    SL_TRY(sl_pool_create(&pool, &pool_options, err));
    const struct sl_cpu_kernels *below = NULL;
    for (int level = 0; level < SL_CPU_N_LEVELS; level++) {
        if (!sl_cpu_level_supported((enum sl_cpu_level)level) ||
            (o->cpu_level >= 0 && level != o->cpu_level)) {
            continue;
        }
        struct kc_target t = {
            .kernels = sl_cpu_kernels((enum sl_cpu_level)level),
            .pool = pool,
            .n_threads = sl_pool_n_threads(pool),
            .precision = {.input = 0.0,
                          .bf16 = 0x1p-8,
                          .x_8bit = true,
                          .words = level == SL_CPU_AVX2 || level == SL_CPU_AVX512VNNI ||
                                   level == SL_CPU_AMX,
                          .kv_exact = true},
        };
        snprintf(t.name, sizeof(t.name), "%s", sl_cpu_level_name((enum sl_cpu_level)level));
        run_target(o, &t, below, totals);
        below = t.kernels;
    }
    if (!sl_cpu_level_supported(SL_CPU_AMX) && (o->cpu_level < 0 || o->cpu_level == SL_CPU_AMX)) {
        run_emulated_amx(o, pool, totals);
    }
    sl_pool_destroy(&pool);
    return SLUICE_STATUS_OK;
}

static enum sluice_status run_device(const struct options *o, struct totals *totals,
                                     struct sluice_error *err)
{
    const bool sim = strcmp(o->device, "sim") == 0;
    struct kc_target t = {
        /* GPUs may multiply f16: eleven bits of each factor. */
        .precision = {.input = sim ? 0.0 : 0x1p-11,
                      .bf16 = 0x1p-8,
                      .x_8bit = true,
                      .words = sim,
                      .kv_exact = sim},
    };
    snprintf(t.name, sizeof(t.name), "%s", o->device);
    SL_TRY(sim ? sl_device_sim_create(&t.device, NULL, err)
               : sl_device_cuda_create(&t.device, 0, err));
    run_target(o, &t, NULL, totals);
    sl_device_destroy(&t.device);
    return SLUICE_STATUS_OK;
}

static int usage(const char *what)
{
    fprintf(stderr,
            "kcheck: %s\nusage: kcheck [--seed N] [--only TEXT] [--cpu LEVEL] "
            "[--device cpu|sim|cuda] [--cases N] [--from N] [--bench] [--threads N] [--json]\n",
            what);
    return 2;
}

static bool level_option(const char *name, int *out)
{
    for (int i = 0; i < SL_CPU_N_LEVELS; i++) {
        if (strcmp(sl_cpu_level_name((enum sl_cpu_level)i), name) == 0) {
            *out = i;
            return true;
        }
    }
    return false;
}

/* 0: go on; else the exit status. */
static int parse(struct options *o, int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        const char *name = argv[i];
        if (strcmp(name, "--bench") == 0) {
            o->bench = true;
        } else if (strcmp(name, "--json") == 0) {
            o->json = true;
        } else if (i + 1 == argc) {
            return usage(name);
        } else if (strcmp(name, "--seed") == 0) {
            o->seed = strtoull(argv[++i], NULL, 0);
        } else if (strcmp(name, "--only") == 0) {
            o->only = argv[++i];
        } else if (strcmp(name, "--device") == 0) {
            o->device = argv[++i];
        } else if (strcmp(name, "--cases") == 0) {
            o->n_cases = atoi(argv[++i]);
        } else if (strcmp(name, "--from") == 0) {
            o->from = atoi(argv[++i]);
        } else if (strcmp(name, "--threads") == 0) {
            o->n_threads = atoi(argv[++i]);
        } else if (strcmp(name, "--cpu") != 0 || !level_option(argv[++i], &o->cpu_level)) {
            return usage(name);
        }
    }
    const bool known = strcmp(o->device, "cpu") == 0 || strcmp(o->device, "sim") == 0 ||
                       strcmp(o->device, "cuda") == 0;
    return known ? 0 : usage(o->device);
}

int main(int argc, char **argv)
{
    struct options o = {.seed = 1, .cpu_level = -1, .device = "cpu", .n_cases = 64, .n_threads = 3};
    struct totals totals = {.first_row = true};
    struct sluice_error err = {0};
    const int bad = parse(&o, argc, argv);
    if (bad != 0) {
        return bad;
    }
    if (o.json) {
        printf("[");
    }
    const enum sluice_status status = strcmp(o.device, "cpu") == 0
                                          ? run_cpu_levels(&o, &totals, &err)
                                          : run_device(&o, &totals, &err);
    if (o.json) {
        printf("\n]\n");
    }
    if (status != SLUICE_STATUS_OK) {
        fprintf(stderr, "kcheck: %s\n", err.message);
        return 1;
    }
    fprintf(stderr, "kcheck: %d passed, %d failed, %d unsupported (seed %llu)\n", totals.passed,
            totals.failed, totals.unsupported, (unsigned long long)o.seed);
    return totals.failed > 0 || totals.passed == 0;
}
