/* SPDX-License-Identifier: Apache-2.0
 *
 * SentencePiece unigram ("t5"): of all ways to cut the normalized text into tokens, the one with
 * the highest sum of scores (log probabilities), by Viterbi over the byte positions.
 * Sources: Kudo 2018 (subword regularization), section 3; the charsmap is a double-array trie in
 * the layout of the Darts-clone library, as SentencePiece models carry it.
 */
#include <float.h>
#include <string.h>

#include "base/error.h"
#include "base/mem.h"
#include "text/tokenizer_internal.h"
#include "text/utf8.h"

#define UNKNOWN_PENALTY 10.0f

/* The best path to a byte position. */
struct node {
    double score;
    uint32_t from;
    int32_t id;
};

static enum sluice_status load_charsmap(struct sl_tokenizer *t, const struct sl_gguf *file,
                                        struct sluice_error *err)
{
    const char *key = "tokenizer.ggml.precompiled_charsmap";
    if (sl_gguf_find(file, key) == NULL) {
        return SLUICE_STATUS_OK;
    }
    const struct sl_gguf_value *value;
    SL_TRY(sl_gguf_get_array(file, key, &value, err));
    SL_CHECK(value->item_kind == SL_GGUF_U8 || value->item_kind == SL_GGUF_I8, FORMAT, err,
             "%s: is an array of %s, expected u8", key, sl_gguf_kind_name(value->item_kind));
    if (value->count == 0) {
        return SLUICE_STATUS_OK;
    }
    uint32_t trie_bytes = 0;
    if (value->count >= 4) {
        memcpy(&trie_bytes, value->data, 4);
    }
    SL_CHECK(value->count > 4 && trie_bytes % 4 == 0 && trie_bytes < value->count - 4, FORMAT, err,
             "%s: has %llu bytes, which do not hold a trie of %u bytes and its strings", key,
             (unsigned long long)value->count, (unsigned)trie_bytes);
    t->n_charsmap = trie_bytes / 4;
    t->n_replacements = (size_t)value->count - 4 - trie_bytes;
    t->charsmap = sl_alloc(SL_MEM_TEXT, trie_bytes + 4);
    t->replacements = sl_alloc(SL_MEM_TEXT, t->n_replacements);
    SL_CHECK(t->charsmap != NULL && t->replacements != NULL, OUT_OF_MEMORY, err, "no memory for %s",
             key);
    memcpy(t->charsmap, value->data + 4, trie_bytes);
    memcpy(t->replacements, value->data + 4 + trie_bytes, t->n_replacements);
    SL_CHECK(t->replacements[t->n_replacements - 1] == '\0', FORMAT, err,
             "%s: its last string has no end", key);
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_unigram_init(struct sl_tokenizer *t, const struct sl_gguf *file,
                                   struct sluice_error *err)
{
    const struct sl_vocab *vocab = &t->vocab;
    SL_CHECK(vocab->scores != NULL, FORMAT, err,
             "tokenizer.ggml.scores: missing, but tokenizer.ggml.model 't5' needs it");
    SL_TRY(sl_trie_init(&t->words, err));
    float lowest = FLT_MAX;
    for (int32_t id = 0; id < vocab->n_tokens; id++) {
        const uint8_t type = vocab->types[id];
        if (type == SL_TOKEN_NORMAL && vocab->scores[id] < lowest) {
            lowest = vocab->scores[id];
        }
        if (type == SL_TOKEN_NORMAL || type == SL_TOKEN_USER_DEFINED || type == SL_TOKEN_UNUSED) {
            size_t length;
            const char *text = sl_string_table_get(&vocab->texts, id, &length);
            SL_TRY(sl_trie_insert(&t->words, text, length, id, err));
        }
    }
    t->unknown_score = (lowest == FLT_MAX ? 0.0f : lowest) - UNKNOWN_PENALTY;
    const char *key = "tokenizer.ggml.remove_extra_whitespaces";
    if (sl_gguf_find(file, key) != NULL) {
        SL_TRY(sl_gguf_get_bool(file, key, &t->merge_spaces, err));
    }
    return load_charsmap(t, file, err);
}

/* Fields of a unit of the double array. */
static uint32_t unit_offset(uint32_t unit)
{
    return (unit >> 10) << ((unit & (1u << 9)) >> 6);
}

static uint32_t unit_label(uint32_t unit)
{
    return unit & ((1u << 31) | 0xFF);
}

/* The replacement of the longest prefix of `text` that has one; 0 consumed bytes when none has.
 * The trie comes from the file, so every index is checked. */
static size_t find_replacement(const struct sl_tokenizer *t, const char *text, size_t length,
                               const char **out)
{
    if (t->n_charsmap == 0) {
        return 0;
    }
    size_t consumed = 0;
    uint32_t at = unit_offset(t->charsmap[0]);
    for (size_t i = 0; i < length && text[i] != '\0'; i++) {
        at ^= (unsigned char)text[i];
        if (at >= t->n_charsmap ||
            unit_label(t->charsmap[at]) != (uint32_t)(unsigned char)text[i]) {
            break;
        }
        const uint32_t unit = t->charsmap[at];
        at ^= unit_offset(unit);
        if ((unit >> 8) & 1) {
            if (at >= t->n_charsmap) {
                break;
            }
            const uint32_t value = t->charsmap[at] & 0x7FFFFFFF;
            if (value < t->n_replacements) {
                *out = t->replacements + value;
                consumed = i + 1;
            }
        }
    }
    return consumed;
}

/* The normalized text, grown in scratch->text. */
struct builder {
    const struct sl_tokenizer *tokenizer;
    struct sl_encode_scratch *scratch;
    size_t n;
    bool in_word;
    bool any_word;
};

static enum sluice_status append(struct builder *b, const char *bytes, size_t n,
                                 struct sluice_error *err)
{
    struct sl_encode_scratch *scratch = b->scratch;
    if (b->n + n > scratch->max_text) {
        const size_t max = (b->n + n) * 2;
        char *text = sl_realloc(SL_MEM_TEXT, scratch->text, max, 1);
        SL_CHECK(text != NULL, OUT_OF_MEMORY, err, "no memory for a text of %zu bytes", max);
        scratch->text = text;
        scratch->max_text = max;
    }
    memcpy(scratch->text + b->n, bytes, n);
    b->n += n;
    return SLUICE_STATUS_OK;
}

/* Add normalized bytes: blanks become space marks; runs of them one, where the model wants that. */
static enum sluice_status append_normalized(struct builder *b, const char *bytes, size_t n,
                                            struct sluice_error *err)
{
    const bool merge = b->tokenizer->merge_spaces;
    for (size_t i = 0; i < n; i++) {
        if (bytes[i] == ' ') {
            b->in_word = false;
            if (!merge) {
                SL_TRY(append(b, SL_SPACE_MARK, SL_SPACE_MARK_BYTES, err));
            }
            continue;
        }
        if (!b->in_word) {
            const bool prefix = b->tokenizer->add_space_prefix && !b->any_word;
            if (prefix || (merge && b->any_word)) {
                SL_TRY(append(b, SL_SPACE_MARK, SL_SPACE_MARK_BYTES, err));
            }
            b->in_word = true;
            b->any_word = true;
        }
        SL_TRY(append(b, bytes + i, 1, err));
    }
    return SLUICE_STATUS_OK;
}

static enum sluice_status normalize(struct builder *b, const char *text, size_t length,
                                    struct sluice_error *err)
{
    size_t i = 0;
    while (i < length) {
        const char *bytes = text + i;
        size_t consumed = find_replacement(b->tokenizer, text + i, length - i, &bytes);
        size_t n = consumed > 0 ? strlen(bytes) : 0;
        if (consumed == 0) {
            consumed = n = sl_utf8_char_length(text + i, length - i);
            if (n == 0) {
                bytes = "\xEF\xBF\xBD";
                n = 3;
                consumed = 1;
            }
        }
        SL_TRY(append_normalized(b, bytes, n, err));
        i += consumed;
    }
    return SLUICE_STATUS_OK;
}

static void relax(struct node *node, double score, size_t from, int32_t id)
{
    if (score > node->score) {
        *node = (struct node){.score = score, .from = (uint32_t)from, .id = id};
    }
}

static void find_best_path(const struct sl_tokenizer *t, const char *text, size_t length,
                           struct node *path)
{
    const struct sl_vocab *vocab = &t->vocab;
    for (size_t i = 1; i <= length; i++) {
        path[i] = (struct node){.score = -DBL_MAX, .id = vocab->unk};
    }
    path[0] = (struct node){.score = 0, .id = vocab->unk};
    size_t at = 0;
    while (at < length) {
        const size_t valid = sl_utf8_char_length(text + at, length - at);
        const size_t char_bytes = valid == 0 ? 1 : valid;
        bool covers_char = false;
        uint32_t node = SL_TRIE_ROOT;
        for (size_t end = at; end < length; end++) {
            node = sl_trie_step(&t->words, node, (unsigned char)text[end]);
            if (node == SL_TRIE_NONE) {
                break;
            }
            const int32_t id = t->words.values[node];
            if (id >= 0) {
                /* User-defined tokens win over any scored path. */
                const double score =
                    vocab->types[id] == SL_TOKEN_USER_DEFINED ? 0.0 : (double)vocab->scores[id];
                relax(&path[end + 1], path[at].score + score, at, id);
                covers_char = covers_char || end + 1 - at == char_bytes;
            }
        }
        if (!covers_char) {
            relax(&path[at + char_bytes], path[at].score + (double)t->unknown_score, at,
                  vocab->unk);
        }
        at += char_bytes;
    }
}

/* Append the path, which is found from its end, and turn it round. Neighbouring unknown characters
 * are one unknown token. */
static enum sluice_status emit_path(const struct sl_tokenizer *t, struct sl_token_list *list,
                                    const struct node *path, size_t length,
                                    struct sluice_error *err)
{
    const size_t first = list->n;
    bool after_unknown = false;
    for (size_t at = length; at > 0; at = path[at].from) {
        const int32_t id = path[at].id;
        const bool unknown = id == t->vocab.unk;
        if (id >= 0 && !(unknown && after_unknown)) {
            SL_TRY(sl_token_list_push(list, id, err));
        }
        after_unknown = unknown;
    }
    for (size_t i = first, j = list->n; i + 1 < j; i++, j--) {
        const int32_t swap = list->items[i];
        list->items[i] = list->items[j - 1];
        list->items[j - 1] = swap;
    }
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_unigram_encode(const struct sl_tokenizer *t,
                                     struct sl_encode_scratch *scratch, const char *text,
                                     size_t length, struct sluice_error *err)
{
    struct builder b = {.tokenizer = t, .scratch = scratch};
    SL_TRY(normalize(&b, text, length, err));
    SL_CHECK(b.n <= INT32_MAX, INVALID_ARGUMENT, err, "a text of %zu bytes is too long", length);
    const size_t bytes = (b.n + 1) * sizeof(struct node);
    if (bytes > scratch->max_path_bytes) {
        sl_free(scratch->path);
        scratch->max_path_bytes = 0;
        scratch->path = sl_alloc(SL_MEM_TEXT, bytes);
        SL_CHECK(scratch->path != NULL, OUT_OF_MEMORY, err, "no memory for a text of %zu bytes",
                 b.n);
        scratch->max_path_bytes = bytes;
    }
    find_best_path(t, scratch->text, b.n, scratch->path);
    return emit_path(t, &scratch->tokens, scratch->path, b.n, err);
}
