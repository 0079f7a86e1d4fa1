/* SPDX-License-Identifier: Apache-2.0
 *
 * Writes a synthetic model: shape checks, metadata, then tensor after tensor. Data is made in
 * batches of pieces: every thread fills pieces of the next batch, and the first thread writes the
 * batch before it meanwhile, so that disk and processor work at the same time.
 */
#include "synth/synth.h"

#include <math.h>
#include <stdatomic.h>
#include <stdio.h>

#include "base/error.h"
#include "base/mem.h"
#include "synth/synth_internal.h"

/* A piece has one random stream, so its size is part of what a seed means: do not change it. */
#define PIECE_BYTES (64 << 10)
#define BATCH_PIECES 128

/* ------------------------------------------------------------------ checks */

/* Bounds that any real model keeps, so that no size can overflow. */
static enum sluice_status check_shape(const struct sl_synth_shape *s, struct sluice_error *err)
{
    const struct {
        const char *name;
        uint32_t value;
        uint32_t least;
        uint32_t most;
        uint32_t multiple;
    } rules[] = {
        {"layers", s->n_layers, 1, 1024, 1},     {"embd", s->n_embd, 32, 65536, 32},
        {"ff", s->n_ff, 32, 1 << 20, 32},        {"heads", s->n_heads, 1, 1024, 1},
        {"kv-heads", s->n_kv_heads, 1, 1024, 1}, {"head-dim", s->head_dim, 32, 256, 32},
        {"vocab", s->n_vocab, 256, 1 << 21, 1},  {"ctx", s->n_ctx, 1, 1 << 30, 1},
    };
    for (size_t i = 0; i < sizeof(rules) / sizeof(rules[0]); i++) {
        SL_CHECK(rules[i].value >= rules[i].least && rules[i].value <= rules[i].most &&
                     rules[i].value % rules[i].multiple == 0,
                 INVALID_ARGUMENT, err, "%s is %u (allowed: %u to %u, a multiple of %u)",
                 rules[i].name, rules[i].value, rules[i].least, rules[i].most, rules[i].multiple);
    }
    SL_CHECK(s->n_heads % s->n_kv_heads == 0, INVALID_ARGUMENT, err,
             "heads (%u) is no multiple of kv-heads (%u)", s->n_heads, s->n_kv_heads);
    SL_CHECK(s->n_experts <= 1024, INVALID_ARGUMENT, err, "experts is %u (allowed: up to 1024)",
             s->n_experts);
    const uint32_t most = s->n_experts < 64 ? s->n_experts : 64;
    const bool used = s->n_experts == 0 ? s->n_experts_used == 0
                                        : s->n_experts_used >= 1 && s->n_experts_used <= most;
    SL_CHECK(used, INVALID_ARGUMENT, err, "experts-used is %u (allowed with %u experts: %u to %u)",
             s->n_experts_used, s->n_experts, s->n_experts > 0 ? 1 : 0, most);
    const bool always =
        s->arch == SL_SYNTH_QWEN3MOE || s->arch == SL_SYNTH_QWEN2MOE || s->arch == SL_SYNTH_GPT_OSS;
    SL_CHECK(s->n_experts == 0 || always || s->arch == SL_SYNTH_LLAMA, INVALID_ARGUMENT, err,
             "an architecture '%s' has no experts", sl_synth_arch_name(s->arch));
    SL_CHECK(s->n_experts > 0 || !always, INVALID_ARGUMENT, err, "a %s model needs experts",
             sl_synth_arch_name(s->arch));
    SL_CHECK(s->expert_skew >= 0 && s->expert_skew <= 0.95f, INVALID_ARGUMENT, err,
             "expert-skew is %g (allowed: 0 to 0.95)", (double)s->expert_skew);
    SL_CHECK(s->expert_skew == 0 || s->n_experts > 0, INVALID_ARGUMENT, err,
             "expert-skew is for mixtures of experts");
    SL_CHECK(s->n_experts == 0 || !s->tied, INVALID_ARGUMENT, err,
             "mixtures of experts have an output matrix of their own");
    return SLUICE_STATUS_OK;
}

/* ---------------------------------------------------------------- metadata */

struct keys {
    struct sl_gguf_writer *writer;
    const char *arch;
};

static void format_key(char key[96], const struct keys *k, const char *name)
{
    snprintf(key, 96, "%s.%s", k->arch, name);
}

static void set_u32(const struct keys *k, const char *name, uint32_t value)
{
    char key[96];
    format_key(key, k, name);
    sl_gguf_writer_set_u32(k->writer, key, value);
}

static void set_f32(const struct keys *k, const char *name, float value)
{
    char key[96];
    format_key(key, k, name);
    sl_gguf_writer_set_f32(k->writer, key, value);
}

static void write_hparams(struct sl_gguf_writer *w, const struct sl_synth_options *o)
{
    const struct sl_synth_shape *s = &o->shape;
    const struct keys k = {.writer = w, .arch = sl_synth_arch_name(s->arch)};
    sl_gguf_writer_set_string(w, "general.architecture", k.arch);
    sl_gguf_writer_set_string(w, "general.name", s->title);
    sl_gguf_writer_set_string(w, "general.description", "random weights written by sluice synth");
    if (o->mix.ftype >= 0) {
        sl_gguf_writer_set_u32(w, "general.file_type", (uint32_t)o->mix.ftype);
    }
    sl_gguf_writer_set_u32(w, "general.quantization_version", 2);
    set_u32(&k, "block_count", s->n_layers);
    set_u32(&k, "context_length", s->n_ctx);
    set_u32(&k, "embedding_length", s->n_embd);
    if (s->arch == SL_SYNTH_GPT_OSS) {
        set_u32(&k, "feed_forward_length", s->n_ff);
        set_u32(&k, "expert_feed_forward_length", s->n_ff);
    } else if (s->arch == SL_SYNTH_QWEN3MOE ||
               s->arch == SL_SYNTH_QWEN2MOE) { /* as if all of a token's experts were one */
        set_u32(&k, "feed_forward_length", s->n_ff * s->n_experts_used);
        set_u32(&k, "expert_feed_forward_length", s->n_ff);
    } else {
        set_u32(&k, "feed_forward_length", s->n_ff);
    }
    if (s->n_ff_shared > 0) {
        set_u32(&k, "expert_shared_feed_forward_length", s->n_ff_shared);
    }
    if (s->n_experts > 0) {
        set_u32(&k, "expert_count", s->n_experts);
        set_u32(&k, "expert_used_count", s->n_experts_used);
    }
    set_u32(&k, "attention.head_count", s->n_heads);
    set_u32(&k, "attention.head_count_kv", s->n_kv_heads);
    set_u32(&k, "attention.key_length", s->head_dim);
    set_u32(&k, "attention.value_length", s->head_dim);
    set_f32(&k, "attention.layer_norm_rms_epsilon", s->norm_eps);
    if (s->window > 0) {
        set_u32(&k, "attention.sliding_window", s->window);
    }
    set_f32(&k, "rope.freq_base", s->rope_base);
    set_u32(&k, "rope.dimension_count", s->head_dim);
    const bool yarn = s->arch == SL_SYNTH_GPT_OSS && s->rope_ctx > 0;
    if (s->rope_factor > 0 && (s->rope_ctx == 0 || yarn)) {
        char key[96];
        format_key(key, &k, "rope.scaling.type");
        sl_gguf_writer_set_string(w, key, yarn ? "yarn" : "linear");
        set_f32(&k, "rope.scaling.factor", s->rope_factor);
        if (yarn) {
            set_u32(&k, "rope.scaling.original_context_length", s->rope_ctx);
        }
    }
    set_u32(&k, "vocab_size", s->n_vocab);
}

/* -------------------------------------------------------------------- data */

struct batch {
    uint8_t *data;
    size_t bytes;
};

/* The state of one pool run: the batch being filled and the one being written. */
struct job {
    const struct sl_synth_filler *filler;
    struct batch fill;
    struct batch write;
    size_t blocks_per_piece;
    size_t block_bytes;
    uint64_t first_piece;
    atomic_size_t next_piece;
    struct sl_gguf_writer *writer;
    enum sluice_status status; /* of the write: thread 0 only */
    struct sluice_error *err;
};

static void run_job(void *arg, int thread, int n_threads)
{
    (void)n_threads;
    struct job *job = arg;
    if (thread == 0 && job->write.bytes > 0) {
        job->status =
            sl_gguf_writer_write(job->writer, job->write.data, job->write.bytes, job->err);
    }
    const size_t piece_bytes = job->blocks_per_piece * job->block_bytes;
    for (;;) {
        const size_t piece = atomic_fetch_add(&job->next_piece, 1);
        const size_t at = piece * piece_bytes;
        if (at >= job->fill.bytes) {
            return;
        }
        const size_t left = (job->fill.bytes - at) / job->block_bytes;
        const uint64_t number = job->first_piece + piece;
        sl_synth_fill(job->filler, number, number * job->blocks_per_piece, job->fill.data + at,
                      left < job->blocks_per_piece ? left : job->blocks_per_piece);
    }
}

struct output {
    const struct sl_synth_options *options;
    struct sl_gguf_writer *writer;
    struct sl_synth_levels levels;
    struct sl_synth_filler filler;
    uint8_t *buffers[2];
    int current;          /* which buffer is filled next */
    size_t waiting_bytes; /* in the other buffer, not yet written */
    uint64_t done_bytes;
    uint64_t total_bytes;
};

/* Fill a batch (0 bytes: none) and write the one before it. */
static enum sluice_status step(struct output *o, size_t fill_bytes, uint64_t first_piece,
                               size_t blocks_per_piece, size_t block_bytes,
                               struct sluice_error *err)
{
    struct job job = {.filler = &o->filler,
                      .fill = {o->buffers[o->current], fill_bytes},
                      .write = {o->buffers[1 - o->current], o->waiting_bytes},
                      .blocks_per_piece = blocks_per_piece,
                      .block_bytes = block_bytes,
                      .first_piece = first_piece,
                      .writer = o->writer,
                      .status = SLUICE_STATUS_OK,
                      .err = err};
    atomic_init(&job.next_piece, 0);
    if (o->options->pool != NULL) {
        sl_pool_run(o->options->pool, run_job, &job);
    } else {
        run_job(&job, 0, 1);
    }
    SL_TRY(job.status);
    o->done_bytes += o->waiting_bytes;
    o->waiting_bytes = fill_bytes;
    o->current = 1 - o->current;
    if (o->options->progress != NULL &&
        !o->options->progress(o->options->progress_user, o->done_bytes, o->total_bytes)) {
        return sl_error_set(err, SLUICE_STATUS_CANCELLED, "cancelled");
    }
    return SLUICE_STATUS_OK;
}

/* Bytes of a listed tensor; its shape was checked, so nothing overflows. */
static uint64_t tensor_bytes(const struct sl_synth_tensor *t)
{
    uint64_t rows = 1;
    for (uint32_t i = 1; i < t->n_dims; i++) {
        rows *= (uint64_t)t->dims[i];
    }
    return rows * sl_type_row_bytes(t->type, t->dims[0]);
}

static enum sluice_status write_tensor(struct output *o, const struct sl_synth_tensor *tensor,
                                       struct sluice_error *err)
{
    const uint64_t bytes = tensor_bytes(tensor);
    if (tensor->values != NULL) {
        SL_TRY(step(o, 0, 0, 1, 1, err)); /* what waits comes first */
        SL_TRY(sl_gguf_writer_write(o->writer, tensor->values, (size_t)bytes, err));
        o->done_bytes += bytes;
        return SLUICE_STATUS_OK;
    }
    const size_t block_bytes = sl_type_traits((uint32_t)tensor->type)->block_bytes;
    const size_t blocks_per_piece = PIECE_BYTES / block_bytes;
    const size_t batch_bytes = BATCH_PIECES * blocks_per_piece * block_bytes;
    sl_synth_filler_init(&o->filler, &o->levels, tensor, o->options->seed);
    uint64_t piece = 0;
    for (uint64_t at = 0; at < bytes; at += batch_bytes, piece += BATCH_PIECES) {
        const size_t n = bytes - at < batch_bytes ? (size_t)(bytes - at) : batch_bytes;
        SL_TRY(step(o, n, piece, blocks_per_piece, block_bytes, err));
    }
    return SLUICE_STATUS_OK;
}

static enum sluice_status write_data(const struct sl_synth_options *options,
                                     struct sl_gguf_writer *writer,
                                     const struct sl_synth_tensors *tensors,
                                     struct sluice_error *err)
{
    enum sluice_status status = SLUICE_STATUS_OK;
    struct output *o = sl_calloc(SL_MEM_GGUF, 1, sizeof(*o));
    uint8_t *buffers = sl_alloc(SL_MEM_GGUF, 2 * (size_t)BATCH_PIECES * PIECE_BYTES);
    if (o == NULL || buffers == NULL) {
        status = sl_error_set(err, SLUICE_STATUS_OUT_OF_MEMORY, "out of memory for write buffers");
        goto out;
    }
    o->options = options;
    o->writer = writer;
    o->buffers[0] = buffers;
    o->buffers[1] = buffers + (size_t)BATCH_PIECES * PIECE_BYTES;
    sl_synth_levels_init(&o->levels);
    for (size_t i = 0; i < tensors->n; i++) {
        o->total_bytes += tensor_bytes(&tensors->items[i]);
    }
    for (size_t i = 0; i < tensors->n; i++) {
        SL_TRY_OUT(write_tensor(o, &tensors->items[i], err));
    }
    status = step(o, 0, 0, 1, 1, err);
out:
    sl_free(buffers);
    sl_free(o);
    return status;
}

enum sluice_status sl_synth_write(const struct sl_synth_options *options, const char *path,
                                  struct sluice_error *err)
{
    SL_TRY(check_shape(&options->shape, err));
    struct sl_synth_tensors tensors;
    struct sl_gguf_writer *w = NULL;
    SL_TRY(sl_synth_tensors_init(&tensors, &options->shape, &options->mix, err));
    enum sluice_status status = sl_gguf_writer_create(&w, path, err);
    if (status != SLUICE_STATUS_OK) {
        goto out;
    }
    write_hparams(w, options);
    SL_TRY_OUT(sl_synth_vocab_write(w, &options->shape, err));
    for (size_t i = 0; i < tensors.n; i++) {
        const struct sl_synth_tensor *t = &tensors.items[i];
        sl_gguf_writer_add_tensor(w, t->name, t->type, t->dims, t->n_dims);
    }
    SL_TRY_OUT(sl_gguf_writer_begin_data(w, err));
    SL_TRY_OUT(write_data(options, w, &tensors, err));
    status = sl_gguf_writer_finish(w, err);
out:
    sl_gguf_writer_destroy(&w);
    sl_synth_tensors_finish(&tensors);
    return status;
}
