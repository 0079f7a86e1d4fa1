/* SPDX-License-Identifier: Apache-2.0
 *
 * Reading figures off a profile, and its text form (one "name value..." line a figure).
 */
#include "plan/profile.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/file.h"
#include "base/mem.h"

const int32_t sl_tier_tokens[SL_N_TIERS] = {1, 4, 16, 64, 256, 512, 1024, 2048, 4096};
const size_t sl_copy_sizes[SL_N_COPY_SIZES] = {64u << 10, 256u << 10, 1u << 20, 4u << 20,
                                               64u << 20};

#define PROFILE_VERSION 8
#define VECTOR_TOKENS 8 /* passes up to this long are vector products on a GPU */
#define MIB 1048576.0

static const char *const unit_names[SL_N_UNITS] = {"cpu", "cpu_busy", "gpu"};

static double bits_per_item(uint32_t type)
{
    const struct sl_type_traits *const t = sl_type_traits(type);
    return t ? 8.0 * t->block_bytes / t->block_items : 0;
}

/* The measured type nearest in bits per weight; -1: none on this unit. */
static int32_t nearest_type(const struct sl_profile *p, enum sl_unit unit, uint32_t type)
{
    int32_t best = -1;
    double best_distance = HUGE_VAL;
    for (uint32_t t = 0; t < SL_TYPE_N; t++) {
        if (p->linear_ns[unit][t][0] <= 0) {
            continue;
        }
        const double distance = fabs(bits_per_item(t) - bits_per_item(type));
        if (distance < best_distance) {
            best = (int32_t)t;
            best_distance = distance;
        }
    }
    return best;
}

/* Time per 2^20 elements at n tokens: between measured points along a straight line in
 * (log tokens, log time), beyond the last one in proportion to the tokens. */
static double interpolate_tokens(const double *ns, int32_t n_tokens)
{
    int32_t below = -1;
    for (int32_t i = 0; i < SL_N_TIERS; i++) {
        if (ns[i] <= 0) {
            continue;
        }
        if (sl_tier_tokens[i] == n_tokens) {
            return ns[i];
        }
        if (sl_tier_tokens[i] < n_tokens) {
            below = i;
            continue;
        }
        if (below < 0) {
            return ns[i];
        }
        const double span = log((double)sl_tier_tokens[i] / sl_tier_tokens[below]);
        const double at = log((double)n_tokens / sl_tier_tokens[below]) / span;
        return exp(log(ns[below]) + at * (log(ns[i]) - log(ns[below])));
    }
    return below < 0 ? 0 : ns[below] * n_tokens / sl_tier_tokens[below];
}

static double linear_element_ns(const struct sl_profile *p, enum sl_unit unit, enum sl_type type,
                                int32_t n_tokens)
{
    if (p->linear_ns[unit][type][0] > 0) {
        return interpolate_tokens(p->linear_ns[unit][type], n_tokens);
    }
    const int32_t other = nearest_type(p, unit, type);
    if (other < 0) {
        return 0;
    }
    /* At one token time goes with the bytes; with many, arithmetic decides and types are alike. */
    const double scale = n_tokens < 16 ? bits_per_item(type) / bits_per_item((uint32_t)other) : 1.0;
    return scale * interpolate_tokens(p->linear_ns[unit][other], n_tokens);
}

static double linear_ns(const struct sl_profile *p, enum sl_unit unit, const struct sl_op *op)
{
    double ns = 0;
    for (int32_t i = 0; i < op->linear.n_parts; i++) {
        const struct sl_matrix *const w = &op->linear.part[i].w;
        ns += (double)w->n_rows * (double)w->n_cols / MIB *
              linear_element_ns(p, unit, w->type, op->n_tokens);
    }
    return ns;
}

static double attention_ns(const struct sl_profile *p, enum sl_unit unit, const struct sl_op *op,
                           int32_t depth)
{
    const struct sl_op_attention *const a = &op->attention;
    const double end = depth + 0.5 * (op->n_tokens + 1); /* of what an average token reads */
    const double begin = a->window > 0 && end > a->window ? end - a->window : 0;
    const double here = fmin(end, sl_kv_here_end(&a->kv)) - fmax(begin, sl_kv_here_begin(&a->kv));
    const double span = fmax(here, 0);
    const enum sl_type sides[] = {a->kv.types.k, a->kv.types.v};
    double position_ns = 0;
    for (int i = 0; i < 2; i++) {
        const int type = sl_kv_type_index(sides[i]);
        const size_t row_bytes = sl_type_row_bytes(sides[i], a->kv.head_dim);
        position_ns += (double)a->kv.n_kv_heads * (double)row_bytes / MIB *
                       p->attention_mib_ns[unit][type >= 0 ? type : 0];
    }
    const double gflop = 4e-9 * op->n_tokens * span * a->n_heads * a->kv.head_dim;
    const double by_bytes = (span + op->n_tokens) * position_ns;
    const double by_flops = gflop * p->attention_gflop_ns[unit];
    return by_bytes > by_flops ? by_bytes : by_flops;
}

double sl_profile_experts_read(double n, double used, int32_t n_tokens)
{
    return n * (1 - pow(1 - fmin(used, n) / n, n_tokens));
}

/* The experts that are read, each for its part of the tokens: with many tokens all of them. */
static double experts_ns(const struct sl_profile *p, enum sl_unit unit, const struct sl_op *op)
{
    const struct sl_op_experts *const e = &op->experts;
    const double n = e->n;
    const double used = fmin(e->n_used, n);
    const double distinct = sl_profile_experts_read(n, used, op->n_tokens);
    const int32_t tokens = (int32_t)fmax(1, round(op->n_tokens * used / distinct));
    const struct sl_experts_matrix *const matrices[] = {&e->gate, &e->up, &e->down};
    double ns = 0;
    for (int i = 0; i < 3; i++) {
        const struct sl_experts_matrix *const m = matrices[i];
        ns += distinct * (double)m->n_rows * (double)m->n_cols / MIB *
              linear_element_ns(p, unit, m->type, tokens);
    }
    return ns;
}

double sl_profile_op_ns(const struct sl_profile *profile, enum sl_unit unit, const struct sl_op *op,
                        int32_t depth)
{
    const double fixed = profile->op_ns[unit];
    const double f32 = sizeof(float) * (double)op->n_tokens / MIB;
    switch (op->kind) {
    case SL_OP_LINEAR:
        return fixed + linear_ns(profile, unit, op);
    case SL_OP_ATTENTION:
        return fixed + attention_ns(profile, unit, op, depth);
    case SL_OP_NORM:
        return fixed +
               profile->elementwise_mib_ns[unit] * f32 * op->norm.n * op->norm.rows_per_token;
    case SL_OP_ROPE:
        return fixed +
               profile->elementwise_mib_ns[unit] * f32 * op->rope.n_heads * op->rope.head_dim;
    case SL_OP_KV_STORE:
        return fixed + profile->elementwise_mib_ns[unit] * f32 * 2 * op->kv_store.kv.n_kv_heads *
                           op->kv_store.kv.head_dim;
    case SL_OP_ROUTER: {
        const struct sl_matrix *const w = &op->router.w;
        return 2 * fixed + (double)w->n_rows * (double)w->n_cols / MIB *
                               linear_element_ns(profile, unit, w->type, op->n_tokens);
    }
    case SL_OP_EXPERTS:
        return 2 * fixed + experts_ns(profile, unit, op);
    case SL_OP_ADD:
        return fixed + profile->elementwise_mib_ns[unit] * f32 * (double)op->add.n;
    case SL_OP_MERGE:
        return fixed +
               profile->elementwise_mib_ns[unit] * f32 * op->merge.n_heads * op->merge.head_dim;
    default:
        return fixed;
    }
}

double sl_profile_list_ns(const struct sl_profile *profile, enum sl_unit unit,
                          const struct sl_op *ops, int n_ops, int32_t depth, int32_t n_seqs)
{
    const double fixed = profile->op_ns[unit];
    double ns = 0;
    for (int i = 0; i < n_ops; i++) {
        const bool attention = ops[i].kind == SL_OP_ATTENTION;
        if (attention && n_seqs > 1) {
            struct sl_op one = ops[i]; /* each sequence reads a cache of its own */
            one.n_tokens = 1;
            ns += fixed + n_seqs * (sl_profile_op_ns(profile, unit, &one, depth) - fixed);
            continue;
        }
        ns += sl_profile_op_ns(profile, unit, &ops[i], depth);
        /* Later pieces of a long pass look back on the earlier ones. */
        depth += attention ? ops[i].n_tokens : 0;
    }
    return ns;
}

/* Between measured sizes time grows along the line between the two. */
static double copy_ns(const struct sl_profile *profile, size_t bytes)
{
    int32_t i = 0;
    while (i + 1 < SL_N_COPY_SIZES && sl_copy_sizes[i + 1] <= bytes) {
        i++;
    }
    const double here = 1e9 * (double)sl_copy_sizes[i] / profile->h2d_bytes_per_s[i];
    if (bytes < sl_copy_sizes[0]) {
        return here;
    }
    if (i + 1 == SL_N_COPY_SIZES) {
        return 1e9 * (double)bytes / profile->h2d_bytes_per_s[i];
    }
    const double next = 1e9 * (double)sl_copy_sizes[i + 1] / profile->h2d_bytes_per_s[i + 1];
    const double at =
        (double)(bytes - sl_copy_sizes[i]) / (double)(sl_copy_sizes[i + 1] - sl_copy_sizes[i]);
    return here + at * (next - here);
}

double sl_profile_copy_ns(const struct sl_profile *profile, size_t bytes)
{
    return profile->h2d_bytes_per_s[0] > 0 ? profile->copy_factor * copy_ns(profile, bytes) : 0;
}

double sl_profile_download_ns(const struct sl_profile *profile, size_t bytes)
{
    return profile->d2h_bytes_per_s > 0 ? 1e9 * (double)bytes / profile->d2h_bytes_per_s : 0;
}

double sl_profile_mapped_rate(const struct sl_profile *profile, int32_t n_tokens)
{
    return n_tokens <= VECTOR_TOKENS ? profile->mapped_bytes_per_s
                                     : profile->mapped_tiles_bytes_per_s;
}

void sl_profile_clear_factors(struct sl_profile *profile)
{
    profile->copy_factor = 1;
    for (int u = 0; u < SL_N_UNITS; u++) {
        for (int k = 0; k < SL_N_WORKS; k++) {
            for (int t = 0; t < SL_N_TIERS; t++) {
                profile->work_factor[u][k][t] = 1;
            }
        }
    }
}

void sl_profile_take_factors(struct sl_profile *profile, const struct sl_profile *from)
{
    memcpy(profile->work_factor, from->work_factor, sizeof from->work_factor);
}

/* One figure of the text form: a name and where its numbers are. */
struct field {
    char name[48];
    double *values;
    int32_t n;
    bool seen; /* while loading */
};

#define MAX_FIELDS (SL_N_UNITS * (SL_TYPE_N + SL_N_WORKS) + 32)

/* All figures of a profile, in a fixed order. Returns their number. */
static int32_t list_fields(struct sl_profile *p, struct field *fields)
{
    int32_t n = 0;
    const struct field scalars[] = {
        {"attention_mib_ns", &p->attention_mib_ns[0][0], SL_N_UNITS * SL_N_KV_TYPES, false},
        {"attention_gflop_ns", p->attention_gflop_ns, SL_N_UNITS, false},
        {"elementwise_mib_ns", p->elementwise_mib_ns, SL_N_UNITS, false},
        {"op_ns", p->op_ns, SL_N_UNITS, false},
        {"h2d_bytes_per_s", p->h2d_bytes_per_s, SL_N_COPY_SIZES, false},
        {"d2h_bytes_per_s", &p->d2h_bytes_per_s, 1, false},
        {"copy_busy_factor", &p->copy_busy_factor, 1, false},
        {"mapped_bytes_per_s", &p->mapped_bytes_per_s, 1, false},
        {"mapped_tiles_bytes_per_s", &p->mapped_tiles_bytes_per_s, 1, false},
        {"copy_factor", &p->copy_factor, 1, false},
        {"hop_ns", &p->hop_ns, 1, false},
        {"issue_ns", &p->issue_ns, 1, false},
        {"dram_bytes_per_s", &p->dram_bytes_per_s, 1, false},
        {"dram_busy_bytes_per_s", &p->dram_busy_bytes_per_s, 1, false},
        {"vram_bytes_per_s", &p->vram_bytes_per_s, 1, false},
    };
    for (size_t i = 0; i < sizeof scalars / sizeof scalars[0]; i++) {
        fields[n++] = scalars[i];
    }
    static const char *const works[SL_N_WORKS] = {"attention", "ffn",   "head",
                                                  "route",     "fixed", "experts"};
    for (int32_t u = 0; u < SL_N_UNITS; u++) {
        for (int32_t k = 0; k < SL_N_WORKS; k++) {
            struct field *const f = &fields[n++];
            snprintf(f->name, sizeof f->name, "work_factor.%s.%s", unit_names[u], works[k]);
            f->values = p->work_factor[u][k];
            f->n = SL_N_TIERS;
        }
    }
    for (int32_t u = 0; u < SL_N_UNITS; u++) {
        for (uint32_t t = 0; t < SL_TYPE_N; t++) {
            const struct sl_type_traits *const traits = sl_type_traits(t);
            if (traits && traits->computes) {
                struct field *const f = &fields[n++];
                snprintf(f->name, sizeof f->name, "linear_ns.%s.%s", unit_names[u], traits->name);
                f->values = p->linear_ns[u][t];
                f->n = SL_N_TIERS;
            }
        }
    }
    return n;
}

/* snprintf at the end of a growing text of known room. */
static void append(char *text, size_t room, size_t *length, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    const int n = vsnprintf(text + *length, room - *length, format, args);
    va_end(args);
    if (n > 0 && (size_t)n < room - *length) {
        *length += (size_t)n;
    }
}

enum sluice_status sl_profile_save(const struct sl_profile *profile, const char *path,
                                   struct sluice_error *err)
{
    const size_t room = 64u << 10;
    enum sluice_status status = SLUICE_STATUS_OK;
    struct sl_profile copy = *profile; /* list_fields hands out writable places */
    char *const text = sl_alloc(SL_MEM_PLAN, room);
    struct field *const fields = sl_calloc(SL_MEM_PLAN, MAX_FIELDS, sizeof *fields);
    if (!text || !fields) {
        status = sl_error_set(err, SLUICE_STATUS_OUT_OF_MEMORY, "no memory to save the profile");
        goto out;
    }
    size_t length = 0;
    append(text, room, &length, "sluice-profile %d\nkind %d\nn_threads %d\ngpu %s\ncpu %s\n",
           PROFILE_VERSION, (int)copy.kind, copy.n_threads, copy.gpu, copy.cpu);
    const int32_t n = list_fields(&copy, fields);
    for (int32_t i = 0; i < n; i++) {
        append(text, room, &length, "%s", fields[i].name);
        for (int32_t k = 0; k < fields[i].n; k++) {
            append(text, room, &length, " %.6g", fields[i].values[k]);
        }
        append(text, room, &length, "\n");
    }
    status = sl_file_write(path, text, length, err);
out:
    sl_free(fields);
    sl_free(text);
    return status;
}

/* Read exactly n finite, non-negative numbers from a line. */
static bool parse_numbers(const char *text, double *out, int32_t n)
{
    for (int32_t i = 0; i < n; i++) {
        char *end = NULL;
        errno = 0;
        out[i] = strtod(text, &end);
        if (end == text || errno != 0 || !isfinite(out[i]) || out[i] < 0) {
            return false;
        }
        text = end;
    }
    return text[strspn(text, " \r")] == '\0';
}

/* One line "name rest"; unknown and repeated figures are errors: the version would have changed. */
static bool parse_line(struct sl_profile *p, struct field *fields, int32_t n_fields,
                       const char *name, const char *rest)
{
    double number = 0;
    if (strcmp(name, "gpu") == 0) {
        snprintf(p->gpu, sizeof p->gpu, "%s", rest);
        return true;
    }
    if (strcmp(name, "cpu") == 0) {
        snprintf(p->cpu, sizeof p->cpu, "%s", rest);
        return true;
    }
    if (strcmp(name, "kind") == 0) {
        if (!parse_numbers(rest, &number, 1) || number > SL_DEVICE_CUDA) {
            return false;
        }
        p->kind = (enum sl_device_kind)(int)number;
        return true;
    }
    if (strcmp(name, "n_threads") == 0) {
        if (!parse_numbers(rest, &number, 1) || number < 1 || number > 4096) {
            return false;
        }
        p->n_threads = (int32_t)number;
        return true;
    }
    for (int32_t i = 0; i < n_fields; i++) {
        if (strcmp(fields[i].name, name) == 0) {
            const bool again = fields[i].seen;
            fields[i].seen = true;
            return !again && parse_numbers(rest, fields[i].values, fields[i].n);
        }
    }
    return false;
}

enum sluice_status sl_profile_load(struct sl_profile *out, const char *path,
                                   struct sluice_error *err)
{
    memset(out, 0, sizeof *out);
    char *text = NULL;
    size_t size = 0;
    SL_TRY(sl_file_read(path, 1u << 20, &text, &size, err));
    enum sluice_status status = SLUICE_STATUS_OK;
    struct field *const fields = sl_calloc(SL_MEM_PLAN, MAX_FIELDS, sizeof *fields);
    if (!fields) {
        status = sl_error_set(err, SLUICE_STATUS_OUT_OF_MEMORY, "no memory to load the profile");
        goto out;
    }
    const int32_t n_fields = list_fields(out, fields);
    int line_number = 0;
    for (char *line = text; line && *line;) {
        char *const next = strchr(line, '\n');
        if (next) {
            *next = '\0';
        }
        line_number++;
        char *const space = strchr(line, ' ');
        bool good = space != NULL;
        if (good) {
            *space = '\0';
            good = line_number == 1
                       ? strcmp(line, "sluice-profile") == 0 && atoi(space + 1) == PROFILE_VERSION
                       : parse_line(out, fields, n_fields, line, space + 1);
        }
        if (!good) {
            status = sl_error_set(err, SLUICE_STATUS_FORMAT,
                                  "%s:%d: not a line of a profile of version %d; delete the file "
                                  "and run `sluice profile`",
                                  path, line_number, PROFILE_VERSION);
            goto out;
        }
        line = next ? next + 1 : NULL;
    }
    /* A figure that is not there would count as work that takes no time. */
    const char *missing = out->n_threads < 1 ? "n_threads" : NULL;
    for (int32_t i = 0; i < n_fields && !missing; i++) {
        missing = fields[i].seen ? NULL : fields[i].name;
    }
    if (!missing && out->dram_bytes_per_s <= 0) {
        missing = "dram_bytes_per_s";
    }
    if (missing) {
        status = sl_error_set(err, SLUICE_STATUS_FORMAT,
                              "%s: the profile is incomplete, it lacks %s; delete the file and run "
                              "`sluice profile`",
                              path, missing);
    }
out:
    sl_free(fields);
    sl_free(text);
    if (status != SLUICE_STATUS_OK) {
        memset(out, 0, sizeof *out);
    }
    return status;
}

void sl_profile_file_name(char *out, size_t out_bytes, enum sl_device_kind kind, const char *gpu,
                          const char *cpu, int32_t n_threads)
{
    char text[512];
    snprintf(text, sizeof text, "%d|%s|%s|%d", (int)kind, gpu, cpu, n_threads);
    sl_file_cache_name(out, out_bytes, "profile", text);
}

void sl_profile_typical(struct sl_profile *out, enum sl_device_kind kind, int32_t n_threads)
{
    memset(out, 0, sizeof *out);
    sl_profile_clear_factors(out);
    out->kind = kind;
    out->n_threads = n_threads;
    snprintf(out->cpu, sizeof out->cpu, "typical CPU");
    snprintf(out->gpu, sizeof out->gpu, "%s", kind == SL_DEVICE_NONE ? "" : "typical GPU");
    out->dram_bytes_per_s = 60e9;
    out->dram_busy_bytes_per_s = 75e9;
    const double cpu_gflops = 40.0 * n_threads;
    const double vram = 500e9, gpu_flops = 80e12;
    for (uint32_t t = 0; t < SL_TYPE_N; t++) {
        const struct sl_type_traits *const traits = sl_type_traits(t);
        if (!traits || !traits->computes) {
            continue;
        }
        const double mib_bytes = MIB * bits_per_item(t) / 8;
        for (int32_t i = 0; i < SL_N_TIERS; i++) {
            const double flops = 2 * MIB * sl_tier_tokens[i];
            out->linear_ns[SL_UNIT_CPU][t][i] =
                fmax(1e9 * mib_bytes / out->dram_bytes_per_s, flops / cpu_gflops);
            out->linear_ns[SL_UNIT_CPU_BUSY][t][i] =
                fmax(1.4e9 * mib_bytes / out->dram_bytes_per_s, flops / cpu_gflops);
            out->linear_ns[SL_UNIT_GPU][t][i] =
                fmax(1e9 * mib_bytes / vram, 1e9 * flops / gpu_flops);
        }
    }
    const double unit_bw[SL_N_UNITS] = {60e9, 43e9, vram};
    const double unit_gflops[SL_N_UNITS] = {cpu_gflops, cpu_gflops, gpu_flops / 2e9};
    for (int32_t u = 0; u < SL_N_UNITS; u++) {
        for (int type = 0; type < SL_N_KV_TYPES; type++) {
            out->attention_mib_ns[u][type] = 1e9 * MIB / unit_bw[u];
        }
        out->attention_gflop_ns[u] = 1e9 / unit_gflops[u];
        out->elementwise_mib_ns[u] = 2e9 * MIB / unit_bw[u];
        out->op_ns[u] = u == SL_UNIT_GPU ? 3000 : 2000;
    }
    if (kind != SL_DEVICE_NONE) {
        const double link[SL_N_COPY_SIZES] = {5e9, 12e9, 20e9, 24e9, 25e9};
        memcpy(out->h2d_bytes_per_s, link, sizeof link);
        out->d2h_bytes_per_s = 25e9;
        out->copy_busy_factor = 0.9;
        out->mapped_bytes_per_s = out->mapped_tiles_bytes_per_s = 22e9;
        out->hop_ns = 25000;
        out->issue_ns = 3000;
        out->vram_bytes_per_s = vram;
    }
}
