/* SPDX-License-Identifier: Apache-2.0
 *
 * sluice synth: writes a model of random weights.
 */
#include <stdio.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/log.h"
#include "cli/cli.h"
#include "cli/progress.h"
#include "synth/synth.h"

static void list_shapes(void)
{
    printf("%-14s %-8s %6s %6s %6s %8s %6s %8s %8s %7s %8s\n", "shape", "arch", "layers", "embd",
           "ff", "experts", "heads", "kv-heads", "head-dim", "vocab", "ctx");
    const struct sl_synth_shape *s;
    for (size_t i = 0; (s = sl_synth_shape_at(i)) != NULL; i++) {
        char experts[24] = "-";
        if (s->n_experts > 0) {
            snprintf(experts, sizeof(experts), "%u/%u", s->n_experts_used, s->n_experts);
        }
        printf("%-14s %-8s %6u %6u %6u %8s %6u %8u %8u %7u %8u\n", s->name,
               sl_synth_arch_name(s->arch), s->n_layers, s->n_embd, s->n_ff, experts, s->n_heads,
               s->n_kv_heads, s->head_dim, s->n_vocab, s->n_ctx);
    }
}

static enum sluice_status find_shape(const struct sl_options *options, struct sl_synth_shape *out,
                                     struct sluice_error *err)
{
    const char *name = sl_options_text(options, SL_OPT_SHAPE);
    const char *arch = sl_options_text(options, SL_OPT_ARCH);
    SL_CHECK((name != NULL) != (arch != NULL), INVALID_ARGUMENT, err,
             "give either --shape NAME or --arch NAME (see --list-shapes)");
    if (arch != NULL) {
        sl_synth_shape_base(arch, out);
        return SLUICE_STATUS_OK;
    }
    const struct sl_synth_shape *shape = sl_synth_shape_find(name);
    if (shape != NULL) {
        *out = *shape;
        return SLUICE_STATUS_OK;
    }
    const char *nearest = NULL;
    size_t least = SIZE_MAX;
    for (size_t i = 0; (shape = sl_synth_shape_at(i)) != NULL; i++) {
        const size_t distance = sl_edit_distance(name, shape->name);
        nearest = distance < least ? shape->name : nearest;
        least = distance < least ? distance : least;
    }
    SL_CHECK(sl_is_near(least, name), INVALID_ARGUMENT, err,
             "unknown shape '%s'; see --list-shapes", name);
    return sl_error_set(err, SLUICE_STATUS_INVALID_ARGUMENT, "unknown shape '%s'; did you mean %s?",
                        name, nearest);
}

/* Numbers that were given replace those of the shape. */
static void change_shape(const struct sl_options *options, struct sl_synth_shape *shape)
{
    const struct {
        enum sl_option_id id;
        uint32_t *field;
    } numbers[] = {
        {SL_OPT_LAYERS, &shape->n_layers},
        {SL_OPT_EMBD, &shape->n_embd},
        {SL_OPT_FF, &shape->n_ff},
        {SL_OPT_HEADS, &shape->n_heads},
        {SL_OPT_KV_HEADS, &shape->n_kv_heads},
        {SL_OPT_HEAD_DIM, &shape->head_dim},
        {SL_OPT_VOCAB, &shape->n_vocab},
        {SL_OPT_SYNTH_CTX, &shape->n_ctx},
        {SL_OPT_EXPERTS, &shape->n_experts},
        {SL_OPT_EXPERTS_USED, &shape->n_experts_used},
    };
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++) {
        if (sl_options_given(options, numbers[i].id)) {
            *numbers[i].field = (uint32_t)sl_options_int(options, numbers[i].id);
        }
    }
    if (sl_options_given(options, SL_OPT_EXPERT_SKEW)) {
        shape->expert_skew = (float)sl_options_float(options, SL_OPT_EXPERT_SKEW);
    }
}

struct watch {
    struct sl_progress progress;
    uint64_t total_bytes;
};

static bool on_progress(void *user, uint64_t done_bytes, uint64_t total_bytes)
{
    struct watch *watch = user;
    watch->total_bytes = total_bytes;
    sl_progress_update(&watch->progress, done_bytes, total_bytes);
    return !sl_cli_interrupted();
}

enum sluice_status sl_cmd_synth(const struct sl_options *options, struct sluice_error *err)
{
    if (sl_options_flag(options, SL_OPT_LIST_SHAPES)) {
        list_shapes();
        return SLUICE_STATUS_OK;
    }
    SL_CHECK(options->n_arguments == 1, INVALID_ARGUMENT, err, "'synth' needs OUT.gguf");
    struct watch watch = {0};
    struct sl_synth_options synth = {.seed = (uint64_t)sl_options_int(options, SL_OPT_SYNTH_SEED),
                                     .progress = on_progress,
                                     .progress_user = &watch};
    SL_TRY(find_shape(options, &synth.shape, err));
    change_shape(options, &synth.shape);
    sl_synth_mix_from_name(sl_options_text(options, SL_OPT_TYPE), &synth.mix);
    const struct sl_pool_options pool = {.n_threads = (int)sl_options_int(options, SL_OPT_THREADS)};
    SL_TRY(sl_pool_create(&synth.pool, &pool, err));
    const uint64_t start_ns = sl_clock_now_ns();
    sl_progress_start(&watch.progress, "writing", true);
    const enum sluice_status status = sl_synth_write(&synth, options->arguments[0], err);
    sl_progress_finish(&watch.progress);
    sl_pool_destroy(&synth.pool);
    SL_TRY(status);
    char size[32];
    sl_log(SL_LOG_DEBUG, "%s of weights in %.2f s",
           sl_bytes_format(size, sizeof(size), watch.total_bytes),
           (double)(sl_clock_now_ns() - start_ns) * 1e-9);
    return SLUICE_STATUS_OK;
}
