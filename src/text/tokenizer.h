/* SPDX-License-Identifier: Apache-2.0
 *
 * Tokenizers: text to token ids and back, from the metadata of a GGUF file.
 *
 *   "gpt2"    byte-level BPE: pre-tokenizer (tokenizer.ggml.pre), then merges by rank
 *   "llama"   SentencePiece BPE: merges of neighbours by score, byte fallback (Llama 1/2, Gemma)
 *   "t5"      SentencePiece unigram: the best path by Viterbi
 *
 * Input may be any bytes. Byte-level BPE and unigram read each byte that is not part of a
 * well-formed UTF-8 character as U+FFFD; SentencePiece BPE keeps it as a byte token.
 * A tokenizer is immutable after creation: any number of threads may use it at once.
 */
#ifndef SL_TEXT_TOKENIZER_H
#define SL_TEXT_TOKENIZER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <sluice/status.h>

#include "gguf/gguf.h"

struct sl_tokenizer;

/* The file may be closed afterwards. Errors: FORMAT naming the key, UNSUPPORTED naming the known
 * tokenizers or pre-tokenizers, OUT_OF_MEMORY. */
enum sluice_status sl_tokenizer_create(struct sl_tokenizer **out, const struct sl_gguf *file,
                                       struct sluice_error *err);
void sl_tokenizer_destroy(struct sl_tokenizer **tokenizer);

/* `add_special`: put the beginning- and end-of-text tokens that the file asks for around the text.
 * `parse_special`: text that spells a control token becomes that token; user-defined tokens are
 * always found. *out_tokens is owned by the caller (sl_free) and NULL when there are none. */
enum sluice_status sl_tokenizer_encode(const struct sl_tokenizer *tokenizer, const char *text,
                                       size_t length, bool add_special, bool parse_special,
                                       int32_t **out_tokens, size_t *out_n,
                                       struct sluice_error *err);

/* The bytes of all pieces in a row (sl_free; NUL-terminated). Control tokens print as their text
 * when `special`, else as nothing. Ids outside the vocabulary are INVALID_ARGUMENT. */
enum sluice_status sl_tokenizer_decode(const struct sl_tokenizer *tokenizer, const int32_t *tokens,
                                       size_t n, bool special, char **out, size_t *out_length,
                                       struct sluice_error *err);

int32_t sl_tokenizer_n_vocab(const struct sl_tokenizer *tokenizer);

/* Special tokens, or -1 when the model has none. */
int32_t sl_tokenizer_bos(const struct sl_tokenizer *tokenizer);
int32_t sl_tokenizer_eos(const struct sl_tokenizer *tokenizer);
int32_t sl_tokenizer_eot(const struct sl_tokenizer *tokenizer); /* end of turn */
int32_t sl_tokenizer_unk(const struct sl_tokenizer *tokenizer);
int32_t sl_tokenizer_pad(const struct sl_tokenizer *tokenizer);

bool sl_tokenizer_adds_bos(const struct sl_tokenizer *tokenizer);
bool sl_tokenizer_adds_eos(const struct sl_tokenizer *tokenizer);

/* Whether generation ends at this token: end of text, end of turn, and the like. */
bool sl_tokenizer_is_eog(const struct sl_tokenizer *tokenizer, int32_t id);

/* Control and unknown tokens: not part of the text. */
bool sl_tokenizer_is_special(const struct sl_tokenizer *tokenizer, int32_t id);

/* The bytes a token stands for (any bytes, maybe half a character; not NUL-terminated); for a
 * special token its name, as "<|im_end|>". NULL for an id outside the vocabulary. */
const char *sl_tokenizer_piece(const struct sl_tokenizer *tokenizer, int32_t id, size_t *length);

/* Bytes of the longest piece. */
size_t sl_tokenizer_longest_piece(const struct sl_tokenizer *tokenizer);

/* The token with this text in the vocabulary ("<|im_start|>"), or -1. */
int32_t sl_tokenizer_find(const struct sl_tokenizer *tokenizer, const char *text);

/* "gpt2", "llama" or "t5", and the pre-tokenizer's name ("" when the kind has none). */
const char *sl_tokenizer_model(const struct sl_tokenizer *tokenizer);
const char *sl_tokenizer_pre(const struct sl_tokenizer *tokenizer);

#endif
