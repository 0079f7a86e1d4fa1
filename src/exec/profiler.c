/* SPDX-License-Identifier: Apache-2.0
 *
 * The profiler (see profiler.h). One large host buffer of harmless random bytes serves as every
 * matrix, KV cache and copy source; measurements walk through it so that caches stay cold.
 */
#include "exec/profiler.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/file.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/random.h"
#include "exec/profiler_internal.h"

#define MIB (1u << 20)

enum sluice_status sl_profiler_tick(struct sl_profiler *b, const char *what)
{
    b->n_done++;
    const double fraction = b->n_done < b->n_total ? (double)b->n_done / b->n_total : 1.0;
    SL_CHECK(!b->o->progress || !b->o->progress(b->o->user, what, fraction), CANCELLED, b->err,
             "cancelled");
    return SLUICE_STATUS_OK;
}

void sl_profiler_on_pool(struct sl_profiler *b, sl_pool_fn *fn, void *arg)
{
    if (b->o->pool) {
        sl_pool_run(b->o->pool, fn, arg);
    } else {
        fn(arg, 0, 1);
    }
}

/* A cold stretch of the host buffer. */
uint8_t *sl_profiler_cold(struct sl_profiler *b, size_t bytes)
{
    if (b->cursor + bytes > b->host.buffer_bytes) {
        b->cursor = 0;
    }
    uint8_t *const at = b->buffer + b->cursor;
    b->cursor += (bytes + 4095) & ~(size_t)4095;
    return at;
}

/* Bytes 0x28 .. 0x37: read as f16, bf16 or f32 they are normal numbers, so no kernel runs into
 * subnormals or NaN, and every quantized format finds sane scales. */
static void fill_pattern(void *arg, int thread, int n_threads)
{
    const struct sl_profiler *const b = arg;
    const size_t n = b->host.buffer_bytes / 8;
    const size_t from = n * (size_t)thread / (size_t)n_threads;
    const size_t to = n * ((size_t)thread + 1) / (size_t)n_threads;
    uint64_t state = 0x9e3779b97f4a7c15u * (uint64_t)(thread + 1);
    uint64_t *const out = (uint64_t *)b->buffer;
    for (size_t i = from; i < to; i++) {
        out[i] = (sl_random_next(&state) & 0x0f0f0f0f0f0f0f0fu) + 0x2828282828282828u;
    }
}

static size_t largest_scratch(const struct sl_profiler_scale *s)
{
    const struct sl_op ops[] = {
        sl_profiler_linear_op(SL_TYPE_F16, s->rows_prefill, s->n_cols, s->max_tokens),
        sl_profiler_attention_op(1, s->kv_tokens, SL_TYPE_F16),
        sl_profiler_attention_op(64, 512, SL_TYPE_F16)};
    size_t most = 0;
    for (size_t i = 0; i < sizeof ops / sizeof ops[0]; i++) {
        const size_t bytes = sl_op_scratch_bytes(&ops[i]);
        most = bytes > most ? bytes : most;
    }
    return most;
}

static size_t activation_floats(const struct sl_profiler_scale *s)
{
    const size_t wide = (size_t)(s->n_cols > SL_PROFILER_HEADS * SL_PROFILER_HEAD_DIM
                                     ? s->n_cols
                                     : SL_PROFILER_HEADS * SL_PROFILER_HEAD_DIM);
    const size_t rows =
        (size_t)(s->rows_decode > s->rows_prefill ? s->rows_decode : s->rows_prefill);
    const size_t most = wide > rows ? wide : rows;
    const size_t tokens = (size_t)(s->max_tokens > 128 ? s->max_tokens : 128);
    return most * tokens;
}

static enum sluice_status init_host(struct sl_profiler *b)
{
    b->host = (struct sl_profiler_scale){.buffer_bytes = 768u * MIB,
                                         .n_cols = SL_PROFILER_COLS,
                                         .rows_decode = 4096,
                                         .rows_prefill = 512,
                                         .max_tokens = 256,
                                         .kv_tokens = 8192};
    b->buffer = sl_alloc_aligned(SL_MEM_EXEC, b->host.buffer_bytes, 4096);
    if (!b->buffer) {
        b->host.buffer_bytes = 256u * MIB;
        b->buffer = sl_alloc_aligned(SL_MEM_EXEC, b->host.buffer_bytes, 4096);
    }
    const size_t floats = activation_floats(&b->host);
    b->x = sl_alloc_aligned(SL_MEM_EXEC, floats * sizeof(float), 4096);
    b->y = sl_alloc_aligned(SL_MEM_EXEC, floats * sizeof(float), 4096);
    b->pos = sl_calloc(SL_MEM_EXEC, 4096, sizeof *b->pos);
    b->scratch = sl_alloc_aligned(
        SL_MEM_EXEC, sl_cpu_scratch_bytes(largest_scratch(&b->host), b->n_threads), 4096);
    SL_CHECK(b->buffer && b->x && b->y && b->pos && b->scratch, OUT_OF_MEMORY, b->err,
             "no memory for the profiler");
    sl_profiler_on_pool(b, fill_pattern, b);
    for (size_t i = 0; i < floats; i++) {
        b->x[i] = (float)((double)((i * 2654435761u) & 0xffff) / 65536.0 - 0.5);
    }
    return SLUICE_STATUS_OK;
}

static enum sluice_status init_device(struct sl_profiler *b)
{
    struct sl_device *const dev = b->o->device;
    const bool sim = dev->kind == SL_DEVICE_SIM;
    b->dev = sim ? (struct sl_profiler_scale){.weights_bytes = 32u * MIB,
                                              .n_cols = SL_PROFILER_SIM_COLS,
                                              .rows_decode = 256,
                                              .rows_prefill = 128,
                                              .max_tokens = 64,
                                              .kv_tokens = 1024}
                 : (struct sl_profiler_scale){.weights_bytes = 256u * MIB,
                                              .n_cols = SL_PROFILER_COLS,
                                              .rows_decode = 8192,
                                              .rows_prefill = 4096,
                                              .max_tokens = 2048,
                                              .kv_tokens = 16384};
    b->vt = dev->vt;
    const size_t floats = activation_floats(&b->dev), sink = 64u * MIB;
    const size_t scratch = largest_scratch(&b->dev);
    const size_t total = b->dev.weights_bytes + sink + 2 * floats * sizeof(float) + scratch + 65536;
    void *mem = NULL;
    SL_TRY(b->vt->mem_alloc(dev, total, &mem, b->err));
    b->mem = mem;
    b->d_weights = b->mem;
    b->d_sink = b->d_weights + b->dev.weights_bytes;
    b->d_x = (float *)(b->d_sink + sink);
    b->d_y = b->d_x + floats;
    b->d_pos = (int32_t *)(b->d_y + floats);
    b->d_scratch = (uint8_t *)b->d_pos + 65536;
    SL_TRY(sl_timer_init(&b->timer, dev, b->err));
    SL_TRY(b->vt->stream_create(dev, SL_STREAM_COPIES, &b->copy, b->err));
    b->registered =
        b->vt->host_register(dev, b->buffer, b->host.buffer_bytes, false, NULL) == SLUICE_STATUS_OK;
    SL_TRY(b->vt->copy_to_device(dev, b->timer.stream, b->d_weights, b->buffer,
                                 b->dev.weights_bytes, b->err));
    const size_t x_bytes = floats * sizeof(float);
    const size_t host_bytes = activation_floats(&b->host) * sizeof(float);
    for (size_t at = 0; at < x_bytes; at += host_bytes) {
        const size_t n = x_bytes - at < host_bytes ? x_bytes - at : host_bytes;
        SL_TRY(
            b->vt->copy_to_device(dev, b->timer.stream, (uint8_t *)b->d_x + at, b->x, n, b->err));
    }
    return b->vt->stream_sync(dev, b->timer.stream, b->err);
}

static void finish(struct sl_profiler *b)
{
    if (b->vt) {
        struct sl_device *const dev = b->o->device;
        sl_timer_finish(&b->timer);
        if (b->copy) {
            b->vt->stream_sync(dev, b->copy, NULL);
            b->vt->stream_destroy(dev, b->copy);
        }
        if (b->registered) {
            b->vt->host_unregister(dev, b->buffer);
        }
        if (b->mem) {
            b->vt->mem_free(dev, b->mem);
        }
    }
    sl_free(b->buffer);
    sl_free(b->x);
    sl_free(b->y);
    sl_free(b->pos);
    sl_free(b->scratch);
}

/* Who this machine is: the key of the cache. */
static enum sluice_status identify(struct sl_profile *p, const struct sl_profiler_options *o,
                                   struct sluice_error *err)
{
    memset(p, 0, sizeof *p);
    sl_profile_clear_factors(p);
    p->n_threads = o->pool ? sl_pool_n_threads(o->pool) : 1;
    snprintf(p->cpu, sizeof p->cpu, "%s", sl_cpu_name());
    if (o->device) {
        struct sl_device_info info;
        SL_TRY(o->device->vt->info(o->device, &info, err));
        p->kind = info.kind;
        snprintf(p->gpu, sizeof p->gpu, "%s", info.name);
    }
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_profiler_run(struct sl_profile *out,
                                   const struct sl_profiler_options *options,
                                   struct sluice_error *err)
{
    SL_TRY(identify(out, options, err));
    struct sl_profiler b = {.o = options,
                            .kernels = options->kernels ? options->kernels
                                                        : sl_cpu_kernels(sl_cpu_level()),
                            .p = out,
                            .n_threads = out->n_threads,
                            .n_total = options->device ? 46 : 20,
                            .err = err};
    enum sluice_status status = SLUICE_STATUS_OK;
    SL_TRY_OUT(init_host(&b));
    if (options->device) {
        SL_TRY_OUT(init_device(&b));
        SL_TRY_OUT(sl_profiler_measure_link(&b));
    }
    SL_TRY_OUT(sl_profiler_measure_memory(&b));
    SL_TRY_OUT(sl_profiler_measure_cpu_linear(&b));
    SL_TRY_OUT(sl_profiler_measure_cpu_rest(&b));
    if (options->device) {
        SL_TRY_OUT(sl_profiler_measure_gpu(&b));
    }
out:
    finish(&b);
    return status;
}

enum sluice_status sl_profiler_get(struct sl_profile *out,
                                   const struct sl_profiler_options *options, bool *measured,
                                   struct sluice_error *err)
{
    if (measured) {
        *measured = false;
    }
    SL_TRY(identify(out, options, err));
    char name[64];
    sl_profile_file_name(name, sizeof name, out->kind, out->gpu, out->cpu, out->n_threads);
    char *path = NULL;
    struct sluice_error ignored;
    if (sl_file_cache_path(name, &path, &ignored) == SLUICE_STATUS_OK && sl_file_exists(path)) {
        if (sl_profile_load(out, path, &ignored) == SLUICE_STATUS_OK) {
            sl_free(path);
            return SLUICE_STATUS_OK;
        }
        sl_log(SL_LOG_WARN, "measuring again: %s", ignored.message);
    }
    const enum sluice_status status = sl_profiler_run(out, options, err);
    if (status == SLUICE_STATUS_OK) {
        if (measured) {
            *measured = true;
        }
        if (path && sl_profile_save(out, path, &ignored) != SLUICE_STATUS_OK) {
            sl_log(SL_LOG_WARN, "the profile is not kept: %s", ignored.message);
        }
    }
    sl_free(path);
    return status;
}
