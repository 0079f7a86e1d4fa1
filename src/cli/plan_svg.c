/* SPDX-License-Identifier: Apache-2.0
 *
 * A plan as a picture (docs/trace.md shows one). For each tier, from the top:
 *
 *   where the attention and the feed-forward of every layer are computed, over the depth; of
 *   those that are cut, the part in VRAM from below
 *   the arena, to scale
 *   what each engine does when in the predicted pass
 *
 * Colours say where weights live. Every box has its name and figures as a title, which viewers show
 * under the pointer.
 */
#include "cli/plan_svg.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/file.h"

#define MIB 1048576.0
#define WIDTH 1200.0
#define LEFT 96.0 /* of the drawings; labels are before them */
#define RIGHT 16.0
#define PLOT (WIDTH - LEFT - RIGHT)
#define HEAD_HEIGHT 78.0
#define KEY_WIDTH 136.0 /* of a colour and what it stands for */
#define CELL_HEIGHT 11.0
#define MAP_HEIGHT 10.0
#define LANE_HEIGHT 13.0
#define LEAST_WIDTH 0.15 /* of what would be invisible */

#define COLOR_WAIT "#f2f2f2"
#define COLOR_DRIVER "#9a9a9a"
#define COLOR_KV "#7f5aa6"
#define COLOR_CONSTS "#444444"
#define COLOR_ACTIVATIONS "#b9b9b9"

static const struct {
    const char *name, *color;
} places[] = {
    [SL_PLACE_HOST] = {"on the CPU", "#6f9a3e"},
    [SL_PLACE_STREAMED] = {"streamed", "#e28a1f"},
    [SL_PLACE_RESIDENT] = {"resident in VRAM", "#2f6db3"},
    [SL_PLACE_SHARED] = {"shared by GPU and CPU", "#3f9a93"},
    [SL_PLACE_FED] = {"shared, and fed", "#8fae2d"},
};
#define N_PLACES (sizeof places / sizeof places[0])

static const char *const lane_names[SL_N_ENGINES] = {[SL_ENGINE_DRIVER] = "driver",
                                                     [SL_ENGINE_CPU] = "CPU",
                                                     [SL_ENGINE_GPU] = "GPU",
                                                     [SL_ENGINE_COPY] = "copy up",
                                                     [SL_ENGINE_DOWNLOAD] = "copy down"};

struct picture {
    FILE *out;
    const struct sl_engine *e;
    const struct sl_plan *plan;
    double y; /* where the next part begins */
};

static const char *place_color(unsigned place)
{
    return place < N_PLACES ? places[place].color : "#c03a3a";
}

static const char *shard_name(const struct picture *p, int32_t index, char *out, size_t room)
{
    static const char *const kinds[] = {"attention", "ffn"};
    const struct sl_shard *const shard = &p->e->model->shards[index];
    if (shard->kind == SL_SHARD_HEAD) {
        snprintf(out, room, "head");
    } else {
        snprintf(out, room, "%s %u", kinds[shard->kind], shard->layer);
    }
    return out;
}

static void text(struct picture *p, double x, double y, const char *anchor, const char *format, ...)
    __attribute__((format(printf, 5, 6)));

/* Only texts of our own and numbers come here, but for the model's name: that is escaped. */
static void text(struct picture *p, double x, double y, const char *anchor, const char *format, ...)
{
    char line[512];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    fprintf(p->out, "<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">", x, y, anchor);
    for (const char *c = line; *c; c++) {
        switch (*c) {
        case '<':
            fputs("&lt;", p->out);
            break;
        case '&':
            fputs("&amp;", p->out);
            break;
        default:
            fputc((unsigned char)*c < ' ' ? ' ' : *c, p->out);
        }
    }
    fputs("</text>\n", p->out);
}

static void box(struct picture *p, double x, double y, double width, double height,
                const char *color, const char *title)
{
    fprintf(p->out, "<rect x=\"%.2f\" y=\"%.1f\" width=\"%.2f\" height=\"%.1f\" fill=\"%s\"", x, y,
            width > LEAST_WIDTH ? width : LEAST_WIDTH, height, color);
    if (title) {
        fprintf(p->out, "><title>%s</title></rect>\n", title);
    } else {
        fputs("/>\n", p->out);
    }
}

static void draw_head(struct picture *p)
{
    const struct sl_plan *const plan = p->plan;
    const char *const path = sl_gguf_path(p->e->model->file, 0);
    const char *const slash = strrchr(path, '/');
    text(p, LEFT, 20, "start", "%s in %.0f MiB of VRAM, context %d, strategy %s",
         slash ? slash + 1 : path, (double)plan->options.budget_bytes / MIB, plan->options.n_ctx,
         sl_strategy_name(plan->options.strategy));
    text(p, LEFT, 37, "start",
         "%s; predicted: %.2f tokens/s at a depth of %d, %.3f s to the first "
         "token of 1024",
         p->e->profile.kind == SL_DEVICE_NONE ? p->e->profile.cpu : p->e->profile.gpu,
         sl_plan_tps(plan), plan->depth, sl_plan_ttft_ns(plan, 0, 1024) / 1e9);
    double x = LEFT;
    for (size_t i = 0; i < N_PLACES; i++) {
        box(p, x, 50, 12, 12, places[i].color, NULL);
        text(p, x + 17, 60, "start", "%s", places[i].name);
        x += KEY_WIDTH;
    }
    static const char *const others[][2] = {{COLOR_KV, "KV cache"},
                                            {COLOR_ACTIVATIONS, "activations"},
                                            {COLOR_DRIVER, "driver queues or waits"}};
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        box(p, x, 50, 12, 12, others[i][0], NULL);
        text(p, x + 17, 60, "start", "%s", others[i][1]);
        x += 110;
    }
}

/* How much of a shard is in VRAM because it is cut: 0 .. 1. */
static double part_in_vram(const struct picture *p, const struct sl_tier_plan *tier, int32_t i)
{
    const struct sl_model *const model = p->e->model;
    const int32_t cut = sl_shard_cut(model, &model->shards[i], p->plan->split);
    const bool there = cut > 0 && p->plan->resident_rank[i] < tier->n_resident;
    return there ? (double)cut / sl_shard_cut_end(model, &model->shards[i]) : 0;
}

/* A row of cells for attention and one for feed-forwards; the head is as high as both. */
static void draw_placement(struct picture *p, const struct sl_tier_plan *tier)
{
    const int32_t n_layers = (int32_t)p->e->model->hp.n_layers;
    const double cell = PLOT / (n_layers + 2);
    text(p, LEFT - 6, p->y + 9, "end", "attention");
    text(p, LEFT - 6, p->y + CELL_HEIGHT + 10, "end", "ffn, head");
    for (int32_t i = 0; i < p->plan->n_shards; i++) {
        const struct sl_shard *const shard = &p->e->model->shards[i];
        const bool head = shard->kind == SL_SHARD_HEAD;
        const double row = shard->kind == SL_SHARD_FFN ? CELL_HEIGHT + 1 : 0;
        const unsigned place = tier->placement[i];
        char name[32], title[96];
        snprintf(title, sizeof title, "%s: %s, %.1f MiB", shard_name(p, i, name, sizeof name),
                 place < N_PLACES ? places[place].name : "elsewhere", (double)shard->bytes / MIB);
        const double x = LEFT + cell * (head ? n_layers + 0.5 : shard->layer);
        const double width = (head ? 1.5 : 1) * cell - 1;
        const double height = head ? 2 * CELL_HEIGHT + 1 : CELL_HEIGHT;
        const double part = part_in_vram(p, tier, i);
        box(p, x, p->y + row, width, height, place_color(place), title);
        if (part > 0) {
            snprintf(title, sizeof title, "%s: %.1f %% in VRAM",
                     shard_name(p, i, name, sizeof name), 100 * part);
            box(p, x, p->y + row + (1 - part) * height, width, part * height,
                place_color(SL_PLACE_RESIDENT), title);
        }
    }
    p->y += 2 * CELL_HEIGHT + 6;
}

static void map_part(struct picture *p, size_t from, size_t to, const char *color, const char *name)
{
    if (to > from) {
        const double scale = PLOT / (double)p->plan->arena_bytes;
        char title[96];
        snprintf(title, sizeof title, "%s: %.1f MiB from %.1f on", name, (double)(to - from) / MIB,
                 (double)from / MIB);
        box(p, LEFT + (double)from * scale, p->y, (double)(to - from) * scale, MAP_HEIGHT, color,
            title);
    }
}

static void draw_map(struct picture *p, const struct sl_tier_plan *tier)
{
    const struct sl_plan *const plan = p->plan;
    if (!tier->uses_device) {
        return;
    }
    text(p, LEFT - 6, p->y + 9, "end", "VRAM");
    box(p, LEFT, p->y, PLOT, MAP_HEIGHT, COLOR_WAIT, NULL);
    map_part(p, plan->consts_offset, plan->kv_offset, COLOR_CONSTS, "constants");
    map_part(p, plan->kv_offset, plan->resident_base, COLOR_KV, "KV cache");
    for (int32_t i = 0; i < tier->n_resident; i++) {
        const int32_t shard = plan->resident_order[i];
        const size_t from = plan->resident_offset[shard];
        char name[32];
        const size_t bytes =
            sl_shard_resident_bytes(p->e->model, &p->e->model->shards[shard], plan->split);
        map_part(p, from, from + bytes, place_color(SL_PLACE_RESIDENT),
                 shard_name(p, shard, name, sizeof name));
    }
    if (tier->n_slots > 0) {
        map_part(p, plan->slots_offset,
                 plan->slots_offset + (size_t)tier->n_slots * plan->slot_bytes,
                 place_color(SL_PLACE_RESIDENT), "experts");
    }
    map_part(p, tier->ring_offset, tier->hidden_offset, place_color(SL_PLACE_STREAMED), "ring");
    map_part(p, tier->hidden_offset, tier->end_offset, COLOR_ACTIVATIONS, "activations");
    p->y += MAP_HEIGHT + 5;
}

static void draw_interval(struct picture *p, const struct sl_tier_plan *tier,
                          const struct sl_interval *item, double scale)
{
    const struct sl_step *const step = &tier->steps[item->step];
    const char *const color = item->engine == SL_ENGINE_DRIVER ? COLOR_DRIVER
                              : item->engine == SL_ENGINE_DOWNLOAD
                                  ? COLOR_KV
                                  : place_color(tier->placement[step->shard]);
    char name[32], title[96];
    snprintf(title, sizeof title, "%s: %.3f ms from %.3f on",
             shard_name(p, step->shard, name, sizeof name), (item->end_ns - item->begin_ns) / 1e6,
             item->begin_ns / 1e6);
    /* A hair of space keeps neighbours apart where there is room for it. */
    const double width = (item->end_ns - item->begin_ns) * scale;
    box(p, LEFT + item->begin_ns * scale, p->y + (LANE_HEIGHT + 1) * item->engine,
        width > 1 ? width - 0.3 : width, LANE_HEIGHT, color, title);
}

static void draw_axis(struct picture *p, double pass_ns)
{
    /* Ticks at 1, 2 or 5 times a power of ten, up to ten of them. */
    double tick = 1;
    for (int i = 0; pass_ns / tick > 10; i++) {
        tick *= i % 3 == 1 ? 2.5 : 2;
    }
    for (double at = 0; at <= pass_ns; at += tick) {
        const double x = LEFT + PLOT * at / pass_ns;
        fprintf(p->out,
                "<path d=\"M%.1f %.1fv4\" stroke=\"#666\" stroke-width=\"0.7\" fill=\"none\"/>\n",
                x, p->y);
        text(p, x, p->y + 14, "middle", "%g", at / 1e6);
    }
    text(p, LEFT - 6, p->y + 14, "end", "ms");
    p->y += 20;
}

static void draw_timeline(struct picture *p, const struct sl_tier_plan *tier)
{
    const double pass_ns = tier->predicted.pass_ns;
    for (int lane = 0; lane < SL_N_ENGINES; lane++) {
        const double y = p->y + (LANE_HEIGHT + 1) * lane;
        text(p, LEFT - 6, y + 10, "end", "%s", lane_names[lane]);
        box(p, LEFT, y, PLOT, LANE_HEIGHT, COLOR_WAIT, NULL);
    }
    for (int32_t i = 0; i < tier->timeline.n; i++) {
        draw_interval(p, tier, &tier->timeline.items[i], PLOT / pass_ns);
    }
    p->y += (LANE_HEIGHT + 1) * SL_N_ENGINES + 1;
    draw_axis(p, pass_ns);
}

static void draw_tier(struct picture *p, const struct sl_tier_plan *tier)
{
    const double ns = tier->predicted.pass_ns;
    p->y += 22;
    text(p, LEFT, p->y, "start",
         "passes of up to %d tokens: %.3g ms, %.4g tokens/s, %.0f %% of the limit", tier->n_tokens,
         ns / 1e6, 1e9 * tier->n_tokens / ns, 100 * tier->limit_ns / ns);
    p->y += 6;
    draw_placement(p, tier);
    draw_map(p, tier);
    draw_timeline(p, tier);
}

/* Everything below the first line, whose height is known at the end. */
static void draw(struct picture *p)
{
    fprintf(p->out, "<rect width=\"100%%\" height=\"100%%\" fill=\"#ffffff\"/>\n");
    draw_head(p);
    p->y = HEAD_HEIGHT - 12;
    for (int32_t t = 0; t < p->plan->n_tiers; t++) {
        draw_tier(p, &p->plan->tiers[t]);
    }
}

enum sluice_status sl_plan_svg_write(const char *path, const struct sl_engine *e,
                                     const struct sl_plan *plan, struct sluice_error *err)
{
    char *body = NULL, *whole = NULL;
    size_t body_bytes = 0, bytes = 0;
    enum sluice_status status = SLUICE_STATUS_OK;
    struct picture p = {.out = open_memstream(&body, &body_bytes), .e = e, .plan = plan};
    SL_CHECK(p.out, OUT_OF_MEMORY, err, "no memory for a picture");
    draw(&p);
    const bool good = fclose(p.out) == 0;
    FILE *const out = good ? open_memstream(&whole, &bytes) : NULL;
    if (out) {
        fprintf(
            out,
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %.0f %.0f\" width=\"%.0f\" "
            "height=\"%.0f\" font-family=\"sans-serif\" font-size=\"10.5\">\n%s</svg>\n",
            WIDTH, p.y + 6, WIDTH, p.y + 6, body);
    }
    if (out && fclose(out) == 0) {
        status = sl_file_write(path, whole, bytes, err);
    } else {
        status = sl_error_set(err, SLUICE_STATUS_OUT_OF_MEMORY, "no memory for a picture");
    }
    free(body);
    free(whole);
    return status;
}
