/* SPDX-License-Identifier: Apache-2.0
 *
 * The vocabulary of a tokenizer: token texts, types, scores, merges and special tokens, read from
 * GGUF metadata and checked. Everything is copied, so the file may be closed afterwards.
 * Source of the keys: the GGUF specification, "tokenizer.ggml.*".
 */
#ifndef SL_TEXT_VOCAB_H
#define SL_TEXT_VOCAB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <sluice/status.h>

#include "gguf/gguf.h"

/* Values of tokenizer.ggml.token_type. */
enum sl_token_type {
    SL_TOKEN_UNDEFINED = 0,
    SL_TOKEN_NORMAL = 1,
    SL_TOKEN_UNKNOWN = 2,
    SL_TOKEN_CONTROL = 3,
    SL_TOKEN_USER_DEFINED = 4,
    SL_TOKEN_UNUSED = 5,
    SL_TOKEN_BYTE = 6,
};

#define SL_TOKEN_NONE (-1)

/* Many byte strings in one block: string i is bytes[offsets[i] .. offsets[i + 1]). */
struct sl_string_table {
    char *bytes;
    size_t *offsets;
    int32_t count;
};

enum sluice_status sl_string_table_init(struct sl_string_table *table, int32_t count,
                                        size_t n_bytes, struct sluice_error *err);
void sl_string_table_finish(struct sl_string_table *table);

static inline const char *sl_string_table_get(const struct sl_string_table *table, int32_t index,
                                              size_t *length)
{
    *length = table->offsets[index + 1] - table->offsets[index];
    return table->bytes + table->offsets[index];
}

struct sl_text_slot {
    uint32_t hash;
    int32_t id; /* SL_TOKEN_NONE: empty */
};

struct sl_merge_slot {
    uint64_t key; /* left id << 32 | right id */
    uint32_t rank;
    int32_t merged; /* SL_TOKEN_NONE: empty */
};

struct sl_vocab {
    int32_t n_tokens;
    struct sl_string_table texts; /* as in the file */
    uint8_t *types;               /* enum sl_token_type */
    float *scores;                /* NULL when the file has none */
    bool *eog;                    /* ends a generation */
    size_t longest;               /* bytes of the longest text */

    struct sl_text_slot *by_text;
    uint32_t text_mask;
    struct sl_merge_slot *merges; /* NULL: no merges */
    uint32_t merge_mask;

    int32_t bos, eos, eot, eom, unk, sep, pad, mask; /* or SL_TOKEN_NONE */
};

/* Texts, types, scores. `vocab` is zeroed on failure. */
enum sluice_status sl_vocab_init(struct sl_vocab *vocab, const struct sl_gguf *file,
                                 struct sluice_error *err);
void sl_vocab_finish(struct sl_vocab *vocab);

/* tokenizer.ggml.merges: "left right" pairs by falling priority; every part must be a token. */
enum sluice_status sl_vocab_load_merges(struct sl_vocab *vocab, const struct sl_gguf *file,
                                        struct sluice_error *err);

/* The *_token_id keys, and end-of-turn tokens by name. The ids in `vocab` are the defaults. */
enum sluice_status sl_vocab_load_special(struct sl_vocab *vocab, const struct sl_gguf *file,
                                         struct sluice_error *err);

/* The token with exactly this text, or SL_TOKEN_NONE. Of equal texts the first id counts. */
int32_t sl_vocab_find(const struct sl_vocab *vocab, const char *text, size_t length);

/* The merge of two neighbours, or NULL. */
const struct sl_merge_slot *sl_vocab_find_merge(const struct sl_vocab *vocab, int32_t left,
                                                int32_t right);

#endif
