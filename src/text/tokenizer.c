/* SPDX-License-Identifier: Apache-2.0
 *
 * Tokenizer objects; see tokenizer.h. This file holds what the kinds have in common: choosing the
 * kind, special tokens, beginning- and end-of-text, and printing.
 */
#include "text/tokenizer.h"

#include <string.h>

#include "base/error.h"
#include "base/mem.h"
#include "text/tokenizer_internal.h"

static const struct {
    const char *name;
    enum sl_tokenizer_kind kind;
    int32_t bos, eos, unk, pad; /* ids when the file does not give them */
    bool add_bos, add_eos, add_space_prefix;
} KINDS[] = {
    {"gpt2", SL_TOKENIZER_BPE, SL_TOKEN_NONE, SL_TOKEN_NONE, SL_TOKEN_NONE, SL_TOKEN_NONE, false,
     false, false},
    {"llama", SL_TOKENIZER_SPM, 1, 2, 0, SL_TOKEN_NONE, true, false, true},
    {"t5", SL_TOKENIZER_UNIGRAM, SL_TOKEN_NONE, 1, 2, 0, false, true, false},
};
#define N_KINDS (sizeof(KINDS) / sizeof(KINDS[0]))

static enum sluice_status find_kind(const struct sl_gguf *file, size_t *out,
                                    struct sluice_error *err)
{
    struct sl_gguf_string model;
    SL_TRY(sl_gguf_get_string(file, "tokenizer.ggml.model", &model, err));
    for (size_t i = 0; i < N_KINDS; i++) {
        if (strlen(KINDS[i].name) == model.length &&
            memcmp(KINDS[i].name, model.data, model.length) == 0) {
            *out = i;
            return SLUICE_STATUS_OK;
        }
    }
    return sl_error_set(err, SLUICE_STATUS_UNSUPPORTED,
                        "tokenizer.ggml.model: unknown tokenizer '%.*s'; known are gpt2, llama, t5",
                        model.length < 60 ? (int)model.length : 60, model.data);
}

static enum sluice_status get_optional_bool(const struct sl_gguf *file, const char *key, bool *out,
                                            struct sluice_error *err)
{
    return sl_gguf_find(file, key) == NULL ? SLUICE_STATUS_OK
                                           : sl_gguf_get_bool(file, key, out, err);
}

static enum sluice_status load_flags(struct sl_tokenizer *t, const struct sl_gguf *file,
                                     struct sluice_error *err)
{
    SL_TRY(get_optional_bool(file, "tokenizer.ggml.add_space_prefix", &t->add_space_prefix, err));
    const struct {
        const char *key;
        bool *flag;
        int32_t id;
        const char *id_key;
    } ends[] = {
        {"tokenizer.ggml.add_bos_token", &t->add_bos, t->vocab.bos, "tokenizer.ggml.bos_token_id"},
        {"tokenizer.ggml.add_eos_token", &t->add_eos, t->vocab.eos, "tokenizer.ggml.eos_token_id"},
    };
    for (size_t i = 0; i < 2; i++) {
        const bool given = sl_gguf_find(file, ends[i].key) != NULL;
        SL_TRY(get_optional_bool(file, ends[i].key, ends[i].flag, err));
        if (*ends[i].flag && ends[i].id == SL_TOKEN_NONE) {
            SL_CHECK(!given, FORMAT, err, "%s: is true, but %s is missing", ends[i].key,
                     ends[i].id_key);
            *ends[i].flag = false;
        }
    }
    return SLUICE_STATUS_OK;
}

/* What every token prints as, worked out once. */
static enum sluice_status build_pieces(struct sl_tokenizer *t, struct sluice_error *err)
{
    const struct sl_vocab *vocab = &t->vocab;
    SL_TRY(sl_string_table_init(&t->pieces, vocab->n_tokens, vocab->texts.offsets[vocab->n_tokens],
                                err));
    size_t at = 0;
    for (int32_t id = 0; id < vocab->n_tokens; id++) {
        size_t length;
        const char *text = sl_string_table_get(&vocab->texts, id, &length);
        const enum sl_token_type type = vocab->types[id];
        const bool literal =
            type == SL_TOKEN_CONTROL || type == SL_TOKEN_UNKNOWN || type == SL_TOKEN_USER_DEFINED;
        size_t n = length;
        if (t->kind != SL_TOKENIZER_BPE) {
            n = sl_spm_piece(type, text, length, t->pieces.bytes + at);
        } else if (!literal) {
            n = sl_bpe_piece(text, length, t->pieces.bytes + at);
        } else {
            memcpy(t->pieces.bytes + at, text, length);
        }
        at += n;
        t->pieces.offsets[id + 1] = at;
        if (n > t->longest_piece) {
            t->longest_piece = n;
        }
    }
    return SLUICE_STATUS_OK;
}

static enum sluice_status build_special_tries(struct sl_tokenizer *t, struct sluice_error *err)
{
    SL_TRY(sl_trie_init(&t->user_defined, err));
    SL_TRY(sl_trie_init(&t->special, err));
    for (int32_t id = 0; id < t->vocab.n_tokens; id++) {
        size_t length;
        const char *text = sl_string_table_get(&t->vocab.texts, id, &length);
        switch (t->vocab.types[id]) {
        case SL_TOKEN_USER_DEFINED:
            SL_TRY(sl_trie_insert(&t->user_defined, text, length, id, err));
            SL_TRY(sl_trie_insert(&t->special, text, length, id, err));
            break;
        case SL_TOKEN_CONTROL:
        case SL_TOKEN_UNKNOWN:
            SL_TRY(sl_trie_insert(&t->special, text, length, id, err));
            break;
        default:
            break;
        }
    }
    return SLUICE_STATUS_OK;
}

static enum sluice_status fill(struct sl_tokenizer *t, const struct sl_gguf *file,
                               struct sluice_error *err)
{
    size_t kind = 0;
    SL_TRY(find_kind(file, &kind, err));
    t->kind = KINDS[kind].kind;
    t->add_bos = KINDS[kind].add_bos;
    t->add_eos = KINDS[kind].add_eos;
    t->add_space_prefix = KINDS[kind].add_space_prefix;
    SL_TRY(sl_vocab_init(&t->vocab, file, err));
    t->vocab.bos = KINDS[kind].bos;
    t->vocab.eos = KINDS[kind].eos;
    t->vocab.unk = KINDS[kind].unk;
    t->vocab.pad = KINDS[kind].pad;
    SL_TRY(sl_vocab_load_special(&t->vocab, file, err));
    switch (t->kind) {
    case SL_TOKENIZER_BPE:
        SL_TRY(sl_bpe_init(t, file, err));
        break;
    case SL_TOKENIZER_SPM:
        SL_TRY(sl_spm_init(t, file, err));
        break;
    case SL_TOKENIZER_UNIGRAM:
        SL_TRY(sl_unigram_init(t, file, err));
        break;
    }
    SL_TRY(load_flags(t, file, err));
    SL_TRY(build_special_tries(t, err));
    return build_pieces(t, err);
}

enum sluice_status sl_tokenizer_create(struct sl_tokenizer **out, const struct sl_gguf *file,
                                       struct sluice_error *err)
{
    *out = NULL;
    struct sl_tokenizer *t = sl_calloc(SL_MEM_TEXT, 1, sizeof(*t));
    SL_CHECK(t != NULL, OUT_OF_MEMORY, err, "no memory for a tokenizer");
    const enum sluice_status status = fill(t, file, err);
    if (status != SLUICE_STATUS_OK) {
        sl_tokenizer_destroy(&t);
    }
    *out = t;
    return status;
}

void sl_tokenizer_destroy(struct sl_tokenizer **tokenizer)
{
    struct sl_tokenizer *t = *tokenizer;
    if (t == NULL) {
        return;
    }
    sl_vocab_finish(&t->vocab);
    sl_string_table_finish(&t->pieces);
    sl_trie_finish(&t->user_defined);
    sl_trie_finish(&t->special);
    sl_trie_finish(&t->words);
    sl_pretokenizer_destroy(&t->pre);
    sl_free(t->charsmap);
    sl_free(t->replacements);
    sl_free(t);
    *tokenizer = NULL;
}

enum sluice_status sl_token_list_push(struct sl_token_list *list, int32_t id,
                                      struct sluice_error *err)
{
    if (list->n == list->max) {
        const size_t max = list->max < 32 ? 64 : list->max * 2;
        int32_t *items = sl_realloc(SL_MEM_TEXT, list->items, max, sizeof(*items));
        SL_CHECK(items != NULL, OUT_OF_MEMORY, err, "no memory for %zu tokens", max);
        list->items = items;
        list->max = max;
    }
    list->items[list->n++] = id;
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_encode_scratch_reserve(struct sl_encode_scratch *scratch, size_t bytes,
                                             struct sluice_error *err)
{
    if (bytes > scratch->max_text) {
        sl_free(scratch->text);
        scratch->max_text = 0;
        scratch->text = sl_alloc(SL_MEM_TEXT, bytes);
        SL_CHECK(scratch->text != NULL, OUT_OF_MEMORY, err, "no memory for a text of %zu bytes",
                 bytes);
        scratch->max_text = bytes;
    }
    return SLUICE_STATUS_OK;
}

static void scratch_finish(struct sl_encode_scratch *scratch)
{
    sl_free(scratch->tokens.items);
    sl_merger_finish(&scratch->merger);
    sl_piece_ends_finish(&scratch->ends);
    sl_free(scratch->text);
    sl_free(scratch->path);
}

static enum sluice_status encode_fragment(const struct sl_tokenizer *t,
                                          struct sl_encode_scratch *scratch, const char *text,
                                          size_t length, struct sluice_error *err)
{
    if (length == 0) {
        return SLUICE_STATUS_OK;
    }
    switch (t->kind) {
    case SL_TOKENIZER_BPE:
        return sl_bpe_encode(t, scratch, text, length, err);
    case SL_TOKENIZER_SPM:
        return sl_spm_encode(t, scratch, text, length, err);
    case SL_TOKENIZER_UNIGRAM:
        return sl_unigram_encode(t, scratch, text, length, err);
    }
    return SLUICE_STATUS_OK;
}

/* Cut special tokens out (the longest at each place, from the left) and encode what is between. */
static enum sluice_status encode_text(const struct sl_tokenizer *t,
                                      struct sl_encode_scratch *scratch, const char *text,
                                      size_t length, bool parse_special, struct sluice_error *err)
{
    const struct sl_trie *trie = parse_special ? &t->special : &t->user_defined;
    size_t start = 0;
    size_t at = 0;
    while (at < length) {
        size_t n;
        const int32_t id = sl_trie_longest(trie, text + at, length - at, &n);
        if (id < 0) {
            at++;
            continue;
        }
        SL_TRY(encode_fragment(t, scratch, text + start, at - start, err));
        SL_TRY(sl_token_list_push(&scratch->tokens, id, err));
        at += n;
        start = at;
    }
    return encode_fragment(t, scratch, text + start, length - start, err);
}

enum sluice_status sl_tokenizer_encode(const struct sl_tokenizer *tokenizer, const char *text,
                                       size_t length, bool add_special, bool parse_special,
                                       int32_t **out_tokens, size_t *out_n,
                                       struct sluice_error *err)
{
    const struct sl_tokenizer *t = tokenizer;
    *out_tokens = NULL;
    *out_n = 0;
    /* Symbols are counted in i32, and repairing or marking text can treble it. */
    SL_CHECK(length <= INT32_MAX / 3 - 1, INVALID_ARGUMENT, err,
             "a text of %zu bytes is too long to encode at once (at most %d)", length,
             INT32_MAX / 3 - 1);
    struct sl_encode_scratch scratch = {0};
    enum sluice_status status;
    if (add_special && t->add_bos) {
        SL_TRY_OUT(sl_token_list_push(&scratch.tokens, t->vocab.bos, err));
    }
    SL_TRY_OUT(encode_text(t, &scratch, text, length, parse_special, err));
    if (add_special && t->add_eos) {
        SL_TRY_OUT(sl_token_list_push(&scratch.tokens, t->vocab.eos, err));
    }
    *out_tokens = scratch.tokens.items;
    *out_n = scratch.tokens.n;
    scratch.tokens.items = NULL;
out:
    scratch_finish(&scratch);
    return status;
}

enum sluice_status sl_tokenizer_decode(const struct sl_tokenizer *tokenizer, const int32_t *tokens,
                                       size_t n, bool special, char **out, size_t *out_length,
                                       struct sluice_error *err)
{
    *out = NULL;
    *out_length = 0;
    size_t total = 0;
    for (size_t i = 0; i < n; i++) {
        size_t length = 0;
        SL_CHECK(sl_tokenizer_piece(tokenizer, tokens[i], &length) != NULL, INVALID_ARGUMENT, err,
                 "token %d at position %zu is outside the vocabulary of %d", (int)tokens[i], i,
                 (int)tokenizer->vocab.n_tokens);
        total += length;
    }
    char *text = sl_alloc(SL_MEM_TEXT, total + 1);
    SL_CHECK(text != NULL, OUT_OF_MEMORY, err, "no memory for a text of %zu bytes", total);
    size_t at = 0;
    for (size_t i = 0; i < n; i++) {
        size_t length;
        const char *piece = sl_tokenizer_piece(tokenizer, tokens[i], &length);
        if (special || !sl_tokenizer_is_special(tokenizer, tokens[i])) {
            memcpy(text + at, piece, length);
            at += length;
        }
    }
    text[at] = '\0';
    *out = text;
    *out_length = at;
    return SLUICE_STATUS_OK;
}

int32_t sl_tokenizer_n_vocab(const struct sl_tokenizer *tokenizer)
{
    return tokenizer->vocab.n_tokens;
}

int32_t sl_tokenizer_bos(const struct sl_tokenizer *tokenizer)
{
    return tokenizer->vocab.bos;
}

int32_t sl_tokenizer_eos(const struct sl_tokenizer *tokenizer)
{
    return tokenizer->vocab.eos;
}

int32_t sl_tokenizer_eot(const struct sl_tokenizer *tokenizer)
{
    return tokenizer->vocab.eot;
}

int32_t sl_tokenizer_unk(const struct sl_tokenizer *tokenizer)
{
    return tokenizer->vocab.unk;
}

int32_t sl_tokenizer_pad(const struct sl_tokenizer *tokenizer)
{
    return tokenizer->vocab.pad;
}

bool sl_tokenizer_adds_bos(const struct sl_tokenizer *tokenizer)
{
    return tokenizer->add_bos;
}

bool sl_tokenizer_adds_eos(const struct sl_tokenizer *tokenizer)
{
    return tokenizer->add_eos;
}

bool sl_tokenizer_is_eog(const struct sl_tokenizer *tokenizer, int32_t id)
{
    return id >= 0 && id < tokenizer->vocab.n_tokens && tokenizer->vocab.eog[id];
}

bool sl_tokenizer_is_special(const struct sl_tokenizer *tokenizer, int32_t id)
{
    if (id < 0 || id >= tokenizer->vocab.n_tokens) {
        return false;
    }
    const uint8_t type = tokenizer->vocab.types[id];
    return type == SL_TOKEN_CONTROL || type == SL_TOKEN_UNKNOWN;
}

const char *sl_tokenizer_piece(const struct sl_tokenizer *tokenizer, int32_t id, size_t *length)
{
    *length = 0;
    if (id < 0 || id >= tokenizer->vocab.n_tokens) {
        return NULL;
    }
    return sl_string_table_get(&tokenizer->pieces, id, length);
}

size_t sl_tokenizer_longest_piece(const struct sl_tokenizer *tokenizer)
{
    return tokenizer->longest_piece;
}

int32_t sl_tokenizer_find(const struct sl_tokenizer *tokenizer, const char *text)
{
    return sl_vocab_find(&tokenizer->vocab, text, strlen(text));
}

const char *sl_tokenizer_model(const struct sl_tokenizer *tokenizer)
{
    for (size_t i = 0; i < N_KINDS; i++) {
        if (KINDS[i].kind == tokenizer->kind) {
            return KINDS[i].name;
        }
    }
    return "";
}

const char *sl_tokenizer_pre(const struct sl_tokenizer *tokenizer)
{
    return tokenizer->pre != NULL ? sl_pretokenizer_name(tokenizer->pre) : "";
}
