/* SPDX-License-Identifier: Apache-2.0
 *
 * `sluice bench`: prompt and generation speed at depths and budgets, as a table or as rows for
 * bench/results (see docs/performance.md for their fields). Every figure stands beside what the
 * planner predicted and the share of the machine's limit that was reached. Several sequences
 * (--parallel) are measured generating together; their speed is that of all.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/median.h"
#include "base/mem.h"
#include "cli/bench_plans.h"
#include "cli/engine.h"
#include "cli/json.h"
#include "cli/progress.h"

#define MAX_VALUES 32
#define MAX_REPEATS 100
#define MOST_SETTLING_NS UINT64_C(3000000000)

/* Numbers of a list option. */
struct values {
    int32_t v[MAX_VALUES];
    int n;
};

enum metric { METRIC_PREFILL, METRIC_DECODE };

struct row {
    enum metric metric;
    int64_t budget_mib; /* -1: no limit given */
    int32_t n_prompt, n_generated, depth;
    int32_t n_ubatch, n_seqs;
    double value, spread, predicted, corrected, limit_fraction;
    double peak_mib;
    struct sl_bench_plans plans;
};

struct bench {
    const struct sl_options *options;
    struct sl_engine e;
    struct values prompts, generated, depths, parallel;
    bool after_prompt; /* generate at the end of each prompt, else at the depths alone */
    int32_t n_seqs;    /* that generate together now */
    struct sl_kv_types kv_types;
    int repeats;
    int32_t n_random_plans;
    int32_t n_longest; /* tokens of a sequence */
    int32_t *tokens;   /* [sequences, n_longest] */
    int32_t *seqs;     /* 0, 1, ... */
    int32_t *next;     /* a token for each */
    uint32_t random;
    struct row *rows;
    int n_rows, room;
    struct sl_progress progress;
    int n_done, n_total;
};

static enum sluice_status parse_values(const char *text, const char *name, struct values *out,
                                       struct sluice_error *err)
{
    out->n = 0;
    for (const char *at = text;;) {
        char *end = NULL;
        const long value = strtol(at, &end, 10);
        SL_CHECK(end != at && value >= 0 && value <= (1 << 24) && (*end == ',' || *end == '\0') &&
                     out->n < MAX_VALUES,
                 INVALID_ARGUMENT, err, "%s %s: give up to %d numbers, as in 128,512", name, text,
                 MAX_VALUES);
        out->v[out->n++] = (int32_t)value;
        if (*end == '\0') {
            return SLUICE_STATUS_OK;
        }
        at = end + 1;
    }
}

static int32_t most_of(const struct values *v)
{
    int32_t most = 0;
    for (int i = 0; i < v->n; i++) {
        most = v->v[i] > most ? v->v[i] : most;
    }
    return most;
}

/* Fill the cache of each sequence up to `depth`. It always holds the first of the same tokens: what
 * is there stays. */
static enum sluice_status eval_depth(struct bench *b, int32_t depth, struct sluice_error *err)
{
    for (int32_t s = 0; s < b->n_seqs; s++) {
        const int32_t have = sl_context_seq_n_past(b->e.ctx, s);
        const int32_t *const tokens = b->tokens + (size_t)s * (size_t)b->n_longest;
        sl_context_seq_truncate(b->e.ctx, s, depth);
        if (have < depth) {
            SL_TRY(sl_context_eval_seq(b->e.ctx, s, tokens + have, depth - have, 0, NULL, err));
        }
    }
    return SLUICE_STATUS_OK;
}

static int32_t random_token(struct bench *b)
{
    b->random = b->random * 1664525u + 1013904223u;
    return (int32_t)((b->random >> 8) % b->e.model->hp.n_vocab);
}

/* One more token for every sequence, in as few passes as the plan takes. Others each time: experts
 * of tokens that come again would soon all be in VRAM. */
static enum sluice_status decode_all(struct bench *b, struct sluice_error *err)
{
    const int32_t most = sl_context_plan(b->e.ctx)->n_ubatch;
    for (int32_t s = 0; s < b->n_seqs; s++) {
        b->next[s] = random_token(b);
    }
    for (int32_t s = 0; s < b->n_seqs; s += most) {
        const int32_t n = b->n_seqs - s < most ? b->n_seqs - s : most;
        SL_TRY(sl_context_decode(b->e.ctx, b->seqs + s, b->next + s, n, NULL, err));
    }
    return SLUICE_STATUS_OK;
}

/* Time one test once, from a cache of `depth` tokens. */
static enum sluice_status time_once(struct bench *b, enum metric metric, int32_t n, int32_t depth,
                                    uint64_t *ns, struct sluice_error *err)
{
    for (int32_t s = 0; s < b->n_seqs; s++) {
        sl_context_seq_truncate(b->e.ctx, s, depth);
    }
    const uint64_t start = sl_clock_now_ns();
    if (metric == METRIC_PREFILL) {
        SL_TRY(sl_context_eval(b->e.ctx, b->tokens + depth, n, 1, NULL, err));
    } else {
        for (int32_t i = 0; i < n; i++) {
            SL_TRY(decode_all(b, err));
        }
    }
    *ns = sl_clock_now_ns() - start;
    return SLUICE_STATUS_OK;
}

/* What no schedule of this plan could beat, for n tokens of each sequence. */
static double limit_ns(const struct sl_plan *plan, enum metric metric, int32_t n)
{
    double ns = 0;
    if (metric == METRIC_DECODE) {
        for (int32_t left = plan->options.n_seqs; left > 0; left -= plan->n_ubatch) {
            const int32_t m = left < plan->n_ubatch ? left : plan->n_ubatch;
            ns += n * plan->tiers[sl_plan_tier(plan, m)].limit_ns;
        }
        return ns;
    }
    for (int32_t left = n; left > 0;) {
        const int32_t m = left < plan->n_ubatch ? left : plan->n_ubatch;
        const struct sl_tier_plan *const tier = &plan->tiers[sl_plan_tier(plan, m)];
        ns += tier->limit_ns * m / tier->n_tokens;
        left -= m;
    }
    return ns;
}

/* Generate until no other plan is being tried, but not for long: what is measured is what a long
 * answer gets. */
static enum sluice_status settle(struct bench *b, int32_t n, int32_t depth,
                                 struct sluice_error *err)
{
    const uint64_t end = sl_clock_now_ns() + MOST_SETTLING_NS;
    uint64_t ns = 0;
    while (!sl_context_is_settled(b->e.ctx, b->n_seqs) && sl_clock_now_ns() < end) {
        SL_TRY(time_once(b, METRIC_DECODE, n < 8 ? n : 8, depth, &ns, err));
    }
    sl_context_settle(b->e.ctx);
    return SLUICE_STATUS_OK;
}

static enum sluice_status run_test(struct bench *b, enum metric metric, int32_t n, int32_t depth,
                                   int64_t budget_mib, struct sluice_error *err)
{
    const struct sl_plan *const plan = sl_context_plan(b->e.ctx);
    double ns[MAX_REPEATS];
    uint64_t once = 0;
    const int32_t warm = metric == METRIC_DECODE ? 4 : plan->n_ubatch;
    SL_TRY(eval_depth(b, depth, err));
    SL_TRY(time_once(b, metric, n < warm ? n : warm, depth, &once, err));
    if (metric == METRIC_DECODE) {
        SL_TRY(settle(b, n, depth, err));
    }
    for (int r = 0; r < b->repeats; r++) {
        SL_TRY(time_once(b, metric, n, depth, &once, err));
        ns[r] = (double)once;
    }
    const double median = sl_median(ns, b->repeats);
    const int32_t middle = depth + n / 2; /* of what was generated */
    struct sl_context_stats stats;
    sl_context_get_stats(b->e.ctx, &stats);
    b->rows[b->n_rows++] = (struct row){
        .metric = metric,
        .budget_mib = budget_mib,
        .n_prompt = metric == METRIC_PREFILL ? n : 0,
        .n_generated = metric == METRIC_DECODE ? n : 0,
        .depth = depth,
        .n_ubatch = plan->n_ubatch,
        .n_seqs = b->n_seqs,
        .value = 1e9 * n * b->n_seqs / median,
        .spread = (ns[b->repeats - 1] - ns[0]) / median,
        .predicted = metric == METRIC_DECODE ? sl_plan_tps_at(plan, middle)
                                             : 1e9 * n / sl_plan_ttft_ns(plan, depth, n),
        .corrected = metric == METRIC_DECODE ? sl_plan_corrected_tps_at(plan, middle)
                                             : 1e9 * n / sl_plan_corrected_ttft_ns(plan, depth, n),
        .limit_fraction = limit_ns(plan, metric, n) / median,
        .peak_mib = (double)stats.arena_bytes / 1048576.0};
    sl_progress_update(&b->progress, (uint64_t)++b->n_done, (uint64_t)b->n_total);
    return SLUICE_STATUS_OK;
}

/* A pass of a row's tier. */
struct pass_of_row {
    struct bench *b;
    const struct row *row;
};

static enum sluice_status run_pass(void *user, uint64_t *ns, struct sluice_error *err)
{
    const struct pass_of_row *const p = user;
    const int32_t n = p->row->metric == METRIC_PREFILL ? p->row->n_prompt : 1;
    return time_once(p->b, p->row->metric, n, p->row->depth, ns, err);
}

/* Other plans for the passes of a row. A prompt of several passes is left out. */
static enum sluice_status run_other_plans(struct bench *b, struct row *row,
                                          struct sluice_error *err)
{
    const struct sl_plan *const plan = sl_context_plan(b->e.ctx);
    const int32_t n = row->metric == METRIC_PREFILL ? row->n_prompt : b->n_seqs;
    if (n > plan->n_ubatch) {
        return SLUICE_STATUS_OK;
    }
    struct pass_of_row pass = {b, row};
    const struct sl_bench_passes passes = {.ctx = b->e.ctx,
                                           .model = b->e.model,
                                           .tier = sl_plan_tier(plan, n),
                                           .depth = row->depth,
                                           .run = run_pass,
                                           .user = &pass};
    SL_TRY(eval_depth(b, row->depth, err));
    return sl_bench_plans_run(&passes, b->n_random_plans, &row->plans, err);
}

static enum sluice_status run_generations(struct bench *b, int32_t depth, int64_t mib,
                                          struct sluice_error *err)
{
    for (int i = 0; i < b->generated.n; i++) {
        if (b->generated.v[i] > 0) {
            SL_TRY(run_test(b, METRIC_DECODE, b->generated.v[i], depth, mib, err));
        }
    }
    return SLUICE_STATUS_OK;
}

static enum sluice_status run_depth(struct bench *b, int32_t depth, int64_t mib,
                                    struct sluice_error *err)
{
    for (int i = 0; i < b->prompts.n; i++) {
        const int32_t n = b->prompts.v[i];
        if (n > 0 && b->n_seqs == 1) {
            SL_TRY(run_test(b, METRIC_PREFILL, n, depth, mib, err));
        }
        if (b->after_prompt) {
            SL_TRY(run_generations(b, depth + n, mib, err));
        }
    }
    return b->after_prompt ? SLUICE_STATUS_OK : run_generations(b, depth, mib, err);
}

/* All tests of a context of `n_seqs` sequences. */
static enum sluice_status run_budget(struct bench *b, const char *text, int32_t n_seqs,
                                     struct sluice_error *err)
{
    struct sl_budget budget;
    struct sl_plan_options plan = sl_engine_plan_options(&b->e, b->options);
    b->kv_types = plan.kv_types;
    b->n_seqs = plan.n_seqs = n_seqs;
    if (n_seqs > 1) {
        /* Each has whole blocks. */
        const int32_t n_blocks = (plan.n_ctx + SL_KV_BLOCK - 1) / SL_KV_BLOCK;
        plan.n_ctx = n_seqs * n_blocks * SL_KV_BLOCK;
        plan.max_outputs = n_seqs > plan.max_outputs ? n_seqs : plan.max_outputs;
    }
    SL_TRY(sl_budget_parse(text, &budget, err));
    SL_TRY(sl_engine_resolve_budget(&budget, false, &b->e.info, &plan.budget_bytes, err));
    plan.depth = most_of(&b->depths) + (b->after_prompt ? most_of(&b->prompts) : 0) +
                 most_of(&b->generated) / 2;
    plan.depth = plan.depth > 0 ? plan.depth : 1;
    SL_TRY(sl_engine_create_context(&b->e, &plan, err));
    const int first = b->n_rows;
    const int64_t mib = budget.kind == SL_BUDGET_AUTO ? -1 : (int64_t)(plan.budget_bytes >> 20);
    for (int d = 0; d < b->depths.n; d++) {
        SL_TRY(run_depth(b, b->depths.v[d], mib, err));
    }
    if (b->n_random_plans == 0) {
        return SLUICE_STATUS_OK;
    }
    sl_context_freeze(b->e.ctx); /* nothing is learned from plans that nobody chose */
    for (int i = first; i < b->n_rows; i++) {
        SL_TRY(run_other_plans(b, &b->rows[i], err));
    }
    return SLUICE_STATUS_OK;
}

static const char *metric_name(const struct row *r)
{
    return r->metric == METRIC_PREFILL ? "prefill_tps" : "decode_tps";
}

static const char *model_name(const struct bench *b)
{
    const char *const path = sl_gguf_path(b->e.model->file, 0);
    const char *const slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static const char *device_name(const struct bench *b)
{
    return b->e.info.kind == SL_DEVICE_CUDA  ? "cuda"
           : b->e.info.kind == SL_DEVICE_SIM ? "sim"
                                             : "cpu";
}

static void budget_text(const struct row *r, char *out, size_t room)
{
    if (r->budget_mib < 0) {
        snprintf(out, room, "auto");
    } else {
        snprintf(out, room, "%lld MiB", (long long)r->budget_mib);
    }
}

static void test_text(const struct row *r, char *out, size_t room)
{
    if (r->metric == METRIC_PREFILL) {
        snprintf(out, room, "prompt %d", r->n_prompt);
    } else if (r->n_seqs == 1) {
        snprintf(out, room, "generate %d", r->n_generated);
    } else {
        snprintf(out, room, "generate %d x %d", r->n_seqs, r->n_generated);
    }
}

static void print_other_plans(const struct bench *b)
{
    printf("\n| budget | test | plans at random | ms a pass by the fastest | by the plan in use "
           "|\n| ---: | --- | ---: | ---: | ---: |\n");
    for (int i = 0; i < b->n_rows; i++) {
        const struct row *const r = &b->rows[i];
        char budget[32], test[64];
        budget_text(r, budget, sizeof budget);
        test_text(r, test, sizeof test);
        if (r->plans.n_drawn > 0) {
            printf("| %s | %s at %d | %d | %.3f | %.3f |\n", budget, test, r->depth,
                   r->plans.n_drawn, r->plans.best_ns * 1e-6, r->plans.chosen_ns * 1e-6);
        }
    }
}

static void print_markdown(const struct bench *b)
{
    printf("%s, %s, %d threads\n\n", model_name(b), b->e.device ? b->e.info.name : sl_cpu_name(),
           b->e.n_threads);
    printf("| budget | test | tokens/s | spread | predicted | corrected | of the limit | peak VRAM "
           "MiB |\n");
    printf("| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: |\n");
    for (int i = 0; i < b->n_rows; i++) {
        const struct row *const r = &b->rows[i];
        char budget[32], test[64];
        budget_text(r, budget, sizeof budget);
        test_text(r, test, sizeof test);
        printf("| %s | %s at %d | %.2f | %.1f%% | %.2f | %.2f | %.0f%% | %.1f |\n", budget, test,
               r->depth, r->value, 100 * r->spread, r->predicted, r->corrected,
               100 * r->limit_fraction, r->peak_mib);
    }
    if (b->n_random_plans > 0) {
        print_other_plans(b);
    }
}

static void print_csv(const struct bench *b)
{
    printf(
        "model,device,threads,budget_mib,metric,prompt_tokens,generated_tokens,depth,ubatch,batch,"
        "value,spread,predicted,corrected,limit_fraction,peak_vram_mib\n");
    for (int i = 0; i < b->n_rows; i++) {
        const struct row *const r = &b->rows[i];
        printf("%s,%s,%d,%lld,%s,%d,%d,%d,%d,%d,%.4f,%.4f,%.4f,%.4f,%.4f,%.2f\n", model_name(b),
               device_name(b), b->e.n_threads, (long long)r->budget_mib, metric_name(r),
               r->n_prompt, r->n_generated, r->depth, r->n_ubatch, r->n_seqs, r->value, r->spread,
               r->predicted, r->corrected, r->limit_fraction, r->peak_mib);
    }
}

static enum sluice_status print_json(const struct bench *b, struct sluice_error *err)
{
    char date[16], command[512], host[128] = "";
    const time_t now = time(NULL);
    struct tm tm;
    strftime(date, sizeof date, "%Y-%m-%d", gmtime_r(&now, &tm));
    snprintf(host, sizeof host, "%s%s%s", sl_cpu_name(), b->e.device ? " + " : "",
             b->e.device ? b->e.info.name : "");
    snprintf(command, sizeof command, "sluice bench -m %s -t %d -r %d", model_name(b),
             b->e.n_threads, b->repeats);
    struct sl_json json;
    sl_json_init(&json);
    cJSON *const rows = sl_json_array(&json, json.root, "rows");
    for (int i = 0; i < b->n_rows; i++) {
        const struct row *const r = &b->rows[i];
        cJSON *const o = sl_json_object(&json, rows, NULL);
        sl_json_string(&json, o, "date", date);
        sl_json_string(&json, o, "commit", SLUICE_COMMIT);
        sl_json_string(&json, o, "machine", host);
        sl_json_string(&json, o, "device", device_name(b));
        sl_json_string(&json, o, "command", command);
        sl_json_string(&json, o, "model", model_name(b));
        if (r->budget_mib >= 0) {
            sl_json_i64(&json, o, "budget_mib", r->budget_mib);
        }
        sl_json_i64(&json, o, "prompt_tokens", r->n_prompt);
        sl_json_i64(&json, o, "generated_tokens", r->n_generated);
        sl_json_i64(&json, o, "depth", r->depth);
        sl_json_i64(&json, o, "ubatch", r->n_ubatch);
        sl_json_i64(&json, o, "batch", r->n_seqs);
        sl_json_i64(&json, o, "threads", b->e.n_threads);
        sl_json_string(&json, o, "kv_type_k", sl_type_name(b->kv_types.k));
        sl_json_string(&json, o, "kv_type_v", sl_type_name(b->kv_types.v));
        sl_json_string(&json, o, "metric", metric_name(r));
        sl_json_number(&json, o, "value", r->value);
        sl_json_string(&json, o, "unit", "tokens/s");
        sl_json_i64(&json, o, "runs", b->repeats);
        sl_json_number(&json, o, "spread", r->spread);
        sl_json_number(&json, o, "predicted", r->predicted);
        sl_json_number(&json, o, "corrected", r->corrected);
        sl_json_number(&json, o, "limit_fraction", r->limit_fraction);
        sl_json_number(&json, o, "peak_vram_mib", r->peak_mib);
        if (r->plans.n_drawn > 0) {
            sl_json_i64(&json, o, "random_plans", r->plans.n_drawn);
            sl_json_number(&json, o, "random_best_ms", r->plans.best_ns * 1e-6);
            sl_json_number(&json, o, "chosen_ms", r->plans.chosen_ns * 1e-6);
        }
    }
    return sl_json_print(stdout, &json, err);
}

static enum sluice_status print_rows(const struct bench *b, struct sluice_error *err)
{
    const char *const format = sl_options_text(b->options, SL_OPT_BENCH_OUTPUT);
    if (sl_options_flag(b->options, SL_OPT_JSON) || strcmp(format, "json") == 0) {
        return print_json(b, err);
    }
    if (strcmp(format, "csv") == 0) {
        print_csv(b);
    } else {
        print_markdown(b);
    }
    return SLUICE_STATUS_OK;
}

static enum sluice_status parse_options(struct bench *b, struct sluice_error *err)
{
    const struct sl_options *const o = b->options;
    SL_TRY(parse_values(sl_options_text(o, SL_OPT_BENCH_PROMPT), "--n-prompt", &b->prompts, err));
    SL_TRY(parse_values(sl_options_text(o, SL_OPT_BENCH_GENERATE), "--n-gen", &b->generated, err));
    SL_TRY(parse_values(sl_options_text(o, SL_OPT_BENCH_DEPTH), "--n-depth", &b->depths, err));
    b->repeats = (int)sl_options_int(o, SL_OPT_BENCH_REPEATS);
    b->n_random_plans = (int32_t)sl_options_int(o, SL_OPT_BENCH_RANDOM_PLANS);
    const char *const parallel = sl_options_text(o, SL_OPT_BENCH_PARALLEL);
    b->after_prompt = parallel || sl_options_flag(o, SL_OPT_BENCH_AFTER_PROMPT);
    SL_TRY(parse_values(parallel ? parallel : "1", "--parallel", &b->parallel, err));
    for (int i = 0; i < b->parallel.n; i++) {
        SL_CHECK(b->parallel.v[i] >= 1 && b->parallel.v[i] <= SL_MAX_SEQS, INVALID_ARGUMENT, err,
                 "--parallel %s: 1 to %d sequences work", parallel, SL_MAX_SEQS);
    }
    return SLUICE_STATUS_OK;
}

static enum sluice_status run_all(struct bench *b, const char *budgets, struct sluice_error *err)
{
    char *const list = sl_strdup(SL_MEM_CLI, budgets);
    SL_CHECK(list, OUT_OF_MEMORY, err, "no memory for the benchmark");
    int n_budgets = 1;
    for (const char *c = list; *c; c++) {
        n_budgets += *c == ',';
    }
    b->n_total = n_budgets * b->parallel.n * b->depths.n * b->prompts.n * (1 + b->generated.n);
    if (!b->after_prompt) {
        b->n_total = n_budgets * b->depths.n * (b->prompts.n + b->generated.n);
    }
    b->rows = sl_calloc(SL_MEM_CLI, (size_t)b->n_total, sizeof *b->rows);
    enum sluice_status status =
        b->rows ? SLUICE_STATUS_OK
                : sl_error_set(err, SLUICE_STATUS_OUT_OF_MEMORY, "no memory for the benchmark");
    sl_progress_start(&b->progress, "bench", false);
    char *rest = NULL;
    for (char *one = strtok_r(list, ",", &rest); one && status == SLUICE_STATUS_OK;
         one = strtok_r(NULL, ",", &rest)) {
        for (int i = 0; i < b->parallel.n && status == SLUICE_STATUS_OK; i++) {
            status = run_budget(b, one, b->parallel.v[i], err);
        }
    }
    sl_progress_finish(&b->progress);
    sl_free(list);
    return status;
}

/* Random tokens, others for every sequence. */
static enum sluice_status make_tokens(struct bench *b, int32_t n_longest, struct sluice_error *err)
{
    const size_t n_seqs = (size_t)most_of(&b->parallel), n = n_seqs * (size_t)n_longest;
    b->n_longest = n_longest;
    b->tokens = sl_calloc(SL_MEM_CLI, n, sizeof *b->tokens);
    b->seqs = sl_calloc(SL_MEM_CLI, n_seqs, sizeof *b->seqs);
    b->next = sl_calloc(SL_MEM_CLI, n_seqs, sizeof *b->next);
    SL_CHECK(b->tokens && b->seqs && b->next, OUT_OF_MEMORY, err, "no memory for tokens");
    b->random = 12345;
    for (size_t i = 0; i < n; i++) {
        b->tokens[i] = random_token(b);
    }
    for (size_t i = 0; i < n_seqs; i++) {
        b->seqs[i] = (int32_t)i;
    }
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_cmd_bench(const struct sl_options *options, struct sluice_error *err)
{
    struct bench b = {.options = options};
    SL_TRY(parse_options(&b, err));
    const int32_t prompt = most_of(&b.prompts), generated = most_of(&b.generated);
    const int32_t longest = b.after_prompt       ? prompt + generated
                            : prompt > generated ? prompt
                                                 : generated;
    const int32_t n_ctx = most_of(&b.depths) + longest;
    SL_CHECK(n_ctx > 0, INVALID_ARGUMENT, err, "nothing to measure: --n-prompt and --n-gen are 0");
    enum sluice_status status = sl_engine_open(&b.e, options, n_ctx, err);
    if (status == SLUICE_STATUS_OK) {
        status = make_tokens(&b, n_ctx, err);
    }
    if (status == SLUICE_STATUS_OK) {
        status = run_all(&b, sl_options_text(options, SL_OPT_BENCH_VRAM), err);
    }
    if (status == SLUICE_STATUS_OK) {
        status = print_rows(&b, err);
    }
    if (status == SLUICE_STATUS_OK) {
        status = sl_engine_finish_trace(&b.e, err);
    }
    sl_free(b.rows);
    sl_free(b.tokens);
    sl_free(b.seqs);
    sl_free(b.next);
    sl_engine_close(&b.e);
    return status;
}
