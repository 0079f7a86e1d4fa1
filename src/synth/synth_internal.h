/* SPDX-License-Identifier: Apache-2.0
 *
 * The inside of the synthetic model writer.
 *
 *   synth.c          shape checks, metadata, the writing loop
 *   synth_shape.c    the table of shapes and of type mixtures
 *   synth_tensors.c  which tensors a shape has, with type and spread
 *   synth_fill.c     random bytes that are valid blocks of a type
 *   synth_vocab.c    vocabularies
 *
 */
#ifndef SL_SYNTH_INTERNAL_H
#define SL_SYNTH_INTERNAL_H

#include "gguf/gguf_writer.h"
#include "synth/synth.h"

struct sl_synth_tensor {
    char name[64];
    enum sl_type type;
    uint32_t n_dims;
    int64_t dims[SL_GGUF_MAX_DIMS];
    float mean;   /* of F32 vectors */
    float spread; /* standard deviation of the items */
    /* The first n_common columns are the same in every row, with a spread of their own. */
    int64_t n_common;
    float common_spread;
    const float *values; /* exact content of an F32 vector instead; borrowed from the list */
};

struct sl_synth_tensors {
    struct sl_synth_tensor *items;
    size_t n;
    size_t capacity;
    float *rope_factors; /* [head_dim / 2] or NULL */
    float *output_norm;  /* [n_embd] or NULL */
    bool out_of_memory;
};

/* List the tensors of a shape, in file order. */
enum sluice_status sl_synth_tensors_init(struct sl_synth_tensors *list,
                                         const struct sl_synth_shape *shape,
                                         const struct sl_synth_mix *mix, struct sluice_error *err);
void sl_synth_tensors_finish(struct sl_synth_tensors *list);

/* Tokens, merges or scores, special tokens and the chat template. */
enum sluice_status sl_synth_vocab_write(struct sl_gguf_writer *w,
                                        const struct sl_synth_shape *shape,
                                        struct sluice_error *err);

/* Levels of a normal distribution: random bits pick one of them for float types. */
#define SL_SYNTH_N_LEVELS 4096
struct sl_synth_levels {
    float normal[SL_SYNTH_N_LEVELS];
};
void sl_synth_levels_init(struct sl_synth_levels *levels);

/* One tensor's generator: its spread as each float type wants it. */
struct sl_synth_filler {
    enum sl_type type;
    float mean;
    float spread;
    uint64_t seed;
    size_t row_blocks;    /* blocks of a row */
    size_t common_blocks; /* at the start of each row, alike in all */
    float common_spread;
    union {
        float f32[SL_SYNTH_N_LEVELS];
        uint16_t u16[SL_SYNTH_N_LEVELS];
    } levels;
};
void sl_synth_filler_init(struct sl_synth_filler *filler, const struct sl_synth_levels *levels,
                          const struct sl_synth_tensor *tensor, uint64_t seed);

/* Fill blocks with random content that depends on the filler and `piece` alone. `first_block` is
 * the number of the first of them in the tensor. Thread-safe. */
void sl_synth_fill(const struct sl_synth_filler *filler, uint64_t piece, uint64_t first_block,
                   void *dst, size_t n_blocks);

#endif
