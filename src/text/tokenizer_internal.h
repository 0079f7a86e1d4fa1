/* SPDX-License-Identifier: Apache-2.0
 *
 * The tokenizer object and what its kinds share. Text goes: special tokens cut out -> each fragment
 * between them encoded by the kind -> ids appended to one list.
 */
#ifndef SL_TEXT_TOKENIZER_INTERNAL_H
#define SL_TEXT_TOKENIZER_INTERNAL_H

#include "text/merge.h"
#include "text/pretokenizer.h"
#include "text/tokenizer.h"
#include "text/trie.h"
#include "text/vocab.h"

enum sl_tokenizer_kind { SL_TOKENIZER_BPE, SL_TOKENIZER_SPM, SL_TOKENIZER_UNIGRAM };

#define SL_SPACE_MARK "\xE2\x96\x81" /* U+2581, how SentencePiece spells a blank */
#define SL_SPACE_MARK_BYTES 3

struct sl_tokenizer {
    enum sl_tokenizer_kind kind;
    struct sl_vocab vocab;
    struct sl_string_table pieces; /* what each token prints as */
    size_t longest_piece;
    struct sl_trie user_defined; /* tokens found in any text */
    struct sl_trie special;      /* those and control and unknown tokens */
    bool add_bos;
    bool add_eos;
    bool add_space_prefix;

    /* Byte-level BPE: tokens of single bytes. SentencePiece: byte fallback. Or SL_TOKEN_NONE. */
    int32_t byte_ids[256];
    struct sl_pretokenizer *pre; /* byte-level BPE, else NULL */

    /* SentencePiece BPE: bytes that some token has just before a space mark. At a mark after any
     * other byte no merge can happen, so text is cut there into short words. */
    bool joins_space[256];

    /* Unigram. */
    struct sl_trie words;
    float unknown_score;
    bool merge_spaces;
    uint32_t *charsmap; /* double array of replacements, or NULL */
    size_t n_charsmap;
    char *replacements; /* NUL-terminated strings, the last byte is NUL */
    size_t n_replacements;
};

/* A growing list of ids. A zeroed one is empty. */
struct sl_token_list {
    int32_t *items;
    size_t n;
    size_t max;
};

/* Memory that lives through one encode call. A zeroed one is empty. */
struct sl_encode_scratch {
    struct sl_token_list tokens;
    struct sl_merger merger;
    struct sl_piece_ends ends;
    char *text; /* the fragment as the kind wants it */
    size_t max_text;
    void *path; /* unigram: the lattice */
    size_t max_path_bytes;
};

enum sluice_status sl_token_list_push(struct sl_token_list *list, int32_t id,
                                      struct sluice_error *err);

/* Make room for `bytes` in scratch->text (not kept). */
enum sluice_status sl_encode_scratch_reserve(struct sl_encode_scratch *scratch, size_t bytes,
                                             struct sluice_error *err);

/* The kinds: fill the tokenizer from the file, and encode a fragment without special tokens.
 * `length` > 0. */
enum sluice_status sl_bpe_init(struct sl_tokenizer *t, const struct sl_gguf *file,
                               struct sluice_error *err);
enum sluice_status sl_bpe_encode(const struct sl_tokenizer *t, struct sl_encode_scratch *scratch,
                                 const char *text, size_t length, struct sluice_error *err);
enum sluice_status sl_spm_init(struct sl_tokenizer *t, const struct sl_gguf *file,
                               struct sluice_error *err);
enum sluice_status sl_spm_encode(const struct sl_tokenizer *t, struct sl_encode_scratch *scratch,
                                 const char *text, size_t length, struct sluice_error *err);
enum sluice_status sl_unigram_init(struct sl_tokenizer *t, const struct sl_gguf *file,
                                   struct sluice_error *err);
enum sluice_status sl_unigram_encode(const struct sl_tokenizer *t,
                                     struct sl_encode_scratch *scratch, const char *text,
                                     size_t length, struct sluice_error *err);

/* What a token's text prints as, written to `out` (room for `length` bytes); returns the bytes. */
size_t sl_bpe_piece(const char *text, size_t length, char *out);
size_t sl_spm_piece(enum sl_token_type type, const char *text, size_t length, char *out);

/* The byte in "<0x4F>", or -1. */
int sl_spm_parse_byte(const char *text, size_t length);

#endif
