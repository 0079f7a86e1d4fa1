/* SPDX-License-Identifier: Apache-2.0
 *
 * Loading and lookup of vocabularies; see vocab.h. Both lookups are open-addressing hash tables at
 * most half full: texts by their bytes, merges by the pair of ids.
 */
#include "text/vocab.h"

#include <inttypes.h>
#include <string.h>

#include "base/error.h"
#include "base/mem.h"

/* Token ids are i32 and tables hold twice as many slots, so this keeps every index in range. */
#define MAX_TOKENS (1 << 26)

enum sluice_status sl_string_table_init(struct sl_string_table *table, int32_t count,
                                        size_t n_bytes, struct sluice_error *err)
{
    *table = (struct sl_string_table){.count = count};
    table->bytes = sl_alloc(SL_MEM_TEXT, n_bytes + 1);
    table->offsets = sl_calloc(SL_MEM_TEXT, (size_t)count + 1, sizeof(*table->offsets));
    if (table->bytes == NULL || table->offsets == NULL) {
        sl_string_table_finish(table);
        return sl_error_set(err, SLUICE_STATUS_OUT_OF_MEMORY, "no memory for %d token texts",
                            (int)count);
    }
    return SLUICE_STATUS_OK;
}

void sl_string_table_finish(struct sl_string_table *table)
{
    sl_free(table->bytes);
    sl_free(table->offsets);
    *table = (struct sl_string_table){0};
}

static uint32_t text_hash(const char *text, size_t length)
{
    uint64_t h = UINT64_C(0xCBF29CE484222325) ^ length;
    while (length >= 8) {
        uint64_t word;
        memcpy(&word, text, 8);
        h = (h ^ word) * UINT64_C(0x9E3779B97F4A7C15);
        h ^= h >> 32;
        text += 8;
        length -= 8;
    }
    uint64_t rest = 0;
    memcpy(&rest, text, length);
    h = (h ^ rest) * UINT64_C(0x9E3779B97F4A7C15);
    return (uint32_t)(h >> 32);
}

static uint32_t pair_hash(uint64_t key)
{
    key *= UINT64_C(0x9E3779B97F4A7C15);
    key ^= key >> 29;
    return (uint32_t)((key * UINT64_C(0xBF58476D1CE4E5B9)) >> 32);
}

/* Slots for `count` entries: a power of two, at least twice as many. */
static uint32_t table_slots(uint64_t count)
{
    uint32_t slots = 16;
    while (slots < count * 2) {
        slots *= 2;
    }
    return slots;
}

int32_t sl_vocab_find(const struct sl_vocab *vocab, const char *text, size_t length)
{
    if (length == 0 || length > vocab->longest) {
        return SL_TOKEN_NONE;
    }
    const uint32_t hash = text_hash(text, length);
    uint32_t i = hash & vocab->text_mask;
    for (; vocab->by_text[i].id != SL_TOKEN_NONE; i = (i + 1) & vocab->text_mask) {
        if (vocab->by_text[i].hash == hash) {
            size_t n;
            const char *other = sl_string_table_get(&vocab->texts, vocab->by_text[i].id, &n);
            if (n == length && memcmp(other, text, length) == 0) {
                return vocab->by_text[i].id;
            }
        }
    }
    return SL_TOKEN_NONE;
}

const struct sl_merge_slot *sl_vocab_find_merge(const struct sl_vocab *vocab, int32_t left,
                                                int32_t right)
{
    if (left < 0 || right < 0) {
        return NULL;
    }
    const uint64_t key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    uint32_t i = pair_hash(key) & vocab->merge_mask;
    for (; vocab->merges[i].merged != SL_TOKEN_NONE; i = (i + 1) & vocab->merge_mask) {
        if (vocab->merges[i].key == key) {
            return &vocab->merges[i];
        }
    }
    return NULL;
}

/* The array under `key`, checked to hold strings. */
static enum sluice_status get_strings(const struct sl_gguf *file, const char *key,
                                      const struct sl_gguf_value **out, struct sluice_error *err)
{
    SL_TRY(sl_gguf_get_array(file, key, out, err));
    SL_CHECK((*out)->item_kind == SL_GGUF_STRING, FORMAT, err,
             "%s: is an array of %s at offset %" PRIu64 ", expected string", key,
             sl_gguf_kind_name((*out)->item_kind), (*out)->file_offset);
    return SLUICE_STATUS_OK;
}

static enum sluice_status load_texts(struct sl_vocab *vocab, const struct sl_gguf *file,
                                     struct sluice_error *err)
{
    const char *key = "tokenizer.ggml.tokens";
    const struct sl_gguf_value *value;
    SL_TRY(get_strings(file, key, &value, err));
    SL_CHECK(value->count > 0 && value->count <= MAX_TOKENS, FORMAT, err,
             "%s: has %" PRIu64 " tokens, expected 1 to %d", key, value->count, MAX_TOKENS);
    const int32_t n = (int32_t)value->count;
    size_t n_bytes = 0;
    for (int32_t i = 0; i < n; i++) {
        n_bytes += sl_gguf_item_string(file, value, (uint64_t)i).length;
    }
    SL_TRY(sl_string_table_init(&vocab->texts, n, n_bytes, err));
    size_t at = 0;
    for (int32_t i = 0; i < n; i++) {
        const struct sl_gguf_string text = sl_gguf_item_string(file, value, (uint64_t)i);
        if (text.length > 0) {
            memcpy(vocab->texts.bytes + at, text.data, text.length);
        }
        at += text.length;
        vocab->texts.offsets[i + 1] = at;
        if (text.length > vocab->longest) {
            vocab->longest = text.length;
        }
    }
    vocab->n_tokens = n;
    return SLUICE_STATUS_OK;
}

static enum sluice_status index_texts(struct sl_vocab *vocab, struct sluice_error *err)
{
    const uint32_t slots = table_slots((uint64_t)vocab->n_tokens);
    vocab->by_text = sl_alloc(SL_MEM_TEXT, slots * sizeof(*vocab->by_text));
    SL_CHECK(vocab->by_text != NULL, OUT_OF_MEMORY, err, "no memory for the vocabulary index");
    memset(vocab->by_text, 0xFF, slots * sizeof(*vocab->by_text));
    vocab->text_mask = slots - 1;
    for (int32_t id = 0; id < vocab->n_tokens; id++) {
        size_t length;
        const char *text = sl_string_table_get(&vocab->texts, id, &length);
        if (length == 0 || sl_vocab_find(vocab, text, length) != SL_TOKEN_NONE) {
            continue;
        }
        const uint32_t hash = text_hash(text, length);
        uint32_t i = hash & vocab->text_mask;
        while (vocab->by_text[i].id != SL_TOKEN_NONE) {
            i = (i + 1) & vocab->text_mask;
        }
        vocab->by_text[i] = (struct sl_text_slot){.hash = hash, .id = id};
    }
    return SLUICE_STATUS_OK;
}

/* An optional numeric array with one item for each token. */
static enum sluice_status get_per_token(const struct sl_vocab *vocab, const struct sl_gguf *file,
                                        const char *key, bool is_float,
                                        const struct sl_gguf_value **out, struct sluice_error *err)
{
    *out = NULL;
    if (sl_gguf_find(file, key) == NULL) {
        return SLUICE_STATUS_OK;
    }
    SL_TRY(sl_gguf_get_array(file, key, out, err));
    const enum sl_gguf_kind kind = (*out)->item_kind;
    const bool fits = is_float ? kind == SL_GGUF_F32 || kind == SL_GGUF_F64 || kind == SL_GGUF_I32
                               : kind != SL_GGUF_F32 && kind != SL_GGUF_F64 &&
                                     kind != SL_GGUF_STRING && kind != SL_GGUF_BOOL;
    SL_CHECK(fits, FORMAT, err, "%s: is an array of %s at offset %" PRIu64 ", expected %s", key,
             sl_gguf_kind_name(kind), (*out)->file_offset, is_float ? "f32" : "i32");
    SL_CHECK((*out)->count == (uint64_t)vocab->n_tokens, FORMAT, err,
             "%s: has %" PRIu64 " items at offset %" PRIu64 ", but the vocabulary has %d tokens",
             key, (*out)->count, (*out)->file_offset, (int)vocab->n_tokens);
    return SLUICE_STATUS_OK;
}

static enum sluice_status load_types(struct sl_vocab *vocab, const struct sl_gguf *file,
                                     struct sluice_error *err)
{
    const char *key = "tokenizer.ggml.token_type";
    const struct sl_gguf_value *value;
    SL_TRY(get_per_token(vocab, file, key, false, &value, err));
    vocab->types = sl_alloc(SL_MEM_TEXT, (size_t)vocab->n_tokens);
    SL_CHECK(vocab->types != NULL, OUT_OF_MEMORY, err, "no memory for token types");
    for (int32_t i = 0; i < vocab->n_tokens; i++) {
        const int64_t type = value != NULL ? sl_gguf_item_int(value, (uint64_t)i) : SL_TOKEN_NORMAL;
        SL_CHECK(type >= SL_TOKEN_UNDEFINED && type <= SL_TOKEN_BYTE, FORMAT, err,
                 "%s: token %d has type %" PRId64 ", expected 0 to 6", key, (int)i, type);
        vocab->types[i] = (uint8_t)type;
    }
    return SLUICE_STATUS_OK;
}

static enum sluice_status load_scores(struct sl_vocab *vocab, const struct sl_gguf *file,
                                      struct sluice_error *err)
{
    const char *key = "tokenizer.ggml.scores";
    const struct sl_gguf_value *value;
    SL_TRY(get_per_token(vocab, file, key, true, &value, err));
    if (value == NULL) {
        return SLUICE_STATUS_OK;
    }
    vocab->scores = sl_alloc(SL_MEM_TEXT, (size_t)vocab->n_tokens * sizeof(*vocab->scores));
    SL_CHECK(vocab->scores != NULL, OUT_OF_MEMORY, err, "no memory for token scores");
    for (int32_t i = 0; i < vocab->n_tokens; i++) {
        const double score = sl_gguf_item_number(value, (uint64_t)i);
        /* Rejects NaN too, which would leave merges without an order. */
        SL_CHECK(score >= -1e30 && score <= 1e30, FORMAT, err, "%s: token %d has score %g", key,
                 (int)i, score);
        vocab->scores[i] = (float)score;
    }
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_vocab_init(struct sl_vocab *vocab, const struct sl_gguf *file,
                                 struct sluice_error *err)
{
    *vocab = (struct sl_vocab){0};
    vocab->bos = vocab->eos = vocab->eot = vocab->eom = SL_TOKEN_NONE;
    vocab->unk = vocab->sep = vocab->pad = vocab->mask = SL_TOKEN_NONE;
    enum sluice_status status;
    SL_TRY_OUT(load_texts(vocab, file, err));
    SL_TRY_OUT(index_texts(vocab, err));
    SL_TRY_OUT(load_types(vocab, file, err));
    SL_TRY_OUT(load_scores(vocab, file, err));
    vocab->eog = sl_calloc(SL_MEM_TEXT, (size_t)vocab->n_tokens, sizeof(*vocab->eog));
    if (vocab->eog == NULL) {
        status = sl_error_set(err, SLUICE_STATUS_OUT_OF_MEMORY, "no memory for token flags");
    }
out:
    if (status != SLUICE_STATUS_OK) {
        sl_vocab_finish(vocab);
    }
    return status;
}

void sl_vocab_finish(struct sl_vocab *vocab)
{
    sl_string_table_finish(&vocab->texts);
    sl_free(vocab->types);
    sl_free(vocab->scores);
    sl_free(vocab->eog);
    sl_free(vocab->by_text);
    sl_free(vocab->merges);
    *vocab = (struct sl_vocab){0};
}

/* Cut "left right" at its first space after the first byte (a part may itself begin with one in
 * vocabularies that keep raw spaces) and find the ids. */
static enum sluice_status parse_merge(const struct sl_vocab *vocab, struct sl_gguf_string text,
                                      uint64_t rank, struct sl_merge_slot *out,
                                      struct sluice_error *err)
{
    const char *key = "tokenizer.ggml.merges";
    const int shown = text.length < 80 ? (int)text.length : 80;
    const char *space = text.length < 3 ? NULL : memchr(text.data + 1, ' ', text.length - 2);
    SL_CHECK(space != NULL, FORMAT, err, "%s: item %" PRIu64 " '%.*s' is not a pair", key, rank,
             shown, text.data);
    char whole[512];
    const size_t left_length = (size_t)(space - text.data);
    const size_t right_length = text.length - left_length - 1;
    SL_CHECK(text.length <= sizeof(whole), FORMAT, err,
             "%s: item %" PRIu64 " '%.*s...' has more than 512 bytes", key, rank, shown, text.data);
    memcpy(whole, text.data, left_length);
    memcpy(whole + left_length, space + 1, right_length);
    const int32_t left = sl_vocab_find(vocab, whole, left_length);
    const int32_t right = sl_vocab_find(vocab, space + 1, right_length);
    const int32_t merged = sl_vocab_find(vocab, whole, left_length + right_length);
    SL_CHECK(left >= 0 && right >= 0 && merged >= 0, FORMAT, err,
             "%s: item %" PRIu64 " '%.*s': its %s is not a token", key, rank, shown, text.data,
             left < 0    ? "left part"
             : right < 0 ? "right part"
                         : "result");
    out->key = (uint64_t)(uint32_t)left << 32 | (uint32_t)right;
    out->rank = (uint32_t)rank;
    out->merged = merged;
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_vocab_load_merges(struct sl_vocab *vocab, const struct sl_gguf *file,
                                        struct sluice_error *err)
{
    const char *key = "tokenizer.ggml.merges";
    const struct sl_gguf_value *value;
    SL_TRY(get_strings(file, key, &value, err));
    SL_CHECK(value->count <= MAX_TOKENS, FORMAT, err, "%s: has %" PRIu64 " items, at most %d", key,
             value->count, MAX_TOKENS);
    const uint32_t slots = table_slots(value->count);
    vocab->merges = sl_alloc(SL_MEM_TEXT, slots * sizeof(*vocab->merges));
    SL_CHECK(vocab->merges != NULL, OUT_OF_MEMORY, err, "no memory for %" PRIu64 " merges",
             value->count);
    memset(vocab->merges, 0xFF, slots * sizeof(*vocab->merges));
    vocab->merge_mask = slots - 1;
    for (uint64_t rank = 0; rank < value->count; rank++) {
        struct sl_merge_slot merge;
        SL_TRY(parse_merge(vocab, sl_gguf_item_string(file, value, rank), rank, &merge, err));
        uint32_t i = pair_hash(merge.key) & vocab->merge_mask;
        while (vocab->merges[i].merged != SL_TOKEN_NONE && vocab->merges[i].key != merge.key) {
            i = (i + 1) & vocab->merge_mask;
        }
        if (vocab->merges[i].merged == SL_TOKEN_NONE) {
            vocab->merges[i] = merge;
        }
    }
    return SLUICE_STATUS_OK;
}

/* Read one *_token_id key. An id that is no token is an error when the file gives it, and quietly
 * none when it is only the default of the tokenizer kind. */
static enum sluice_status load_id(const struct sl_vocab *vocab, const struct sl_gguf *file,
                                  const char *key, int32_t *id, struct sluice_error *err)
{
    if (sl_gguf_find(file, key) == NULL) {
        if (*id >= vocab->n_tokens) {
            *id = SL_TOKEN_NONE;
        }
        return SLUICE_STATUS_OK;
    }
    /* Some converters write -1 for "none", as i32. */
    const struct sl_gguf_value *value = sl_gguf_find(file, key);
    if (value->kind == SL_GGUF_I32 && sl_gguf_item_int(value, 0) == -1) {
        *id = SL_TOKEN_NONE;
        return SLUICE_STATUS_OK;
    }
    uint32_t number;
    SL_TRY(sl_gguf_get_u32(file, key, &number, err));
    if (number == UINT32_MAX) {
        *id = SL_TOKEN_NONE;
        return SLUICE_STATUS_OK;
    }
    SL_CHECK(number < (uint32_t)vocab->n_tokens, FORMAT, err,
             "%s: is %" PRIu32 " at offset %" PRIu64 ", but the vocabulary has %d tokens", key,
             number, value->file_offset, (int)vocab->n_tokens);
    *id = (int32_t)number;
    return SLUICE_STATUS_OK;
}

/* Texts that end a turn or a document in the model families there are. The first part also serves
 * as end-of-turn token when the file names none. */
static const char *const END_OF_TURN[] = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|eot|>",         "<end_of_utterance>",
    "[EOT]",      "<EOT>",      "_<EOT>",  "<turn|>",       "<|end_of_turn|>",
};
/* With full-width bars and lower blocks. */
#define DEEPSEEK_END "<\357\275\234end\342\226\201of\342\226\201sentence\357\275\234>"
static const char *const END_OF_TEXT[] = {
    "<|endoftext|>", "<|end_of_text|>", "</s>",     "<eos>",       DEEPSEEK_END,    "<|eom_id|>",
    "[EOS]",         "<|return|>",      "<|call|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
};

static void mark_eog(struct sl_vocab *vocab, int32_t id)
{
    if (id != SL_TOKEN_NONE) {
        vocab->eog[id] = true;
    }
}

/* A token found by name only counts when the file does not call it ordinary text: "</s>" may well
 * be a normal token of a vocabulary trained on HTML. */
static int32_t find_control(const struct sl_vocab *vocab, const char *text)
{
    const int32_t id = sl_vocab_find(vocab, text, strlen(text));
    if (id == SL_TOKEN_NONE || vocab->types[id] == SL_TOKEN_CONTROL ||
        vocab->types[id] == SL_TOKEN_USER_DEFINED) {
        return id;
    }
    return SL_TOKEN_NONE;
}

enum sluice_status sl_vocab_load_special(struct sl_vocab *vocab, const struct sl_gguf *file,
                                         struct sluice_error *err)
{
    const struct {
        const char *key;
        int32_t *id;
    } ids[] = {
        {"tokenizer.ggml.bos_token_id", &vocab->bos},
        {"tokenizer.ggml.eos_token_id", &vocab->eos},
        {"tokenizer.ggml.eot_token_id", &vocab->eot},
        {"tokenizer.ggml.eom_token_id", &vocab->eom},
        {"tokenizer.ggml.unknown_token_id", &vocab->unk},
        {"tokenizer.ggml.seperator_token_id", &vocab->sep},
        {"tokenizer.ggml.padding_token_id", &vocab->pad},
        {"tokenizer.ggml.mask_token_id", &vocab->mask},
    };
    for (size_t i = 0; i < sizeof(ids) / sizeof(ids[0]); i++) {
        SL_TRY(load_id(vocab, file, ids[i].key, ids[i].id, err));
    }
    for (size_t i = 0; i < sizeof(END_OF_TURN) / sizeof(END_OF_TURN[0]); i++) {
        const int32_t id = find_control(vocab, END_OF_TURN[i]);
        mark_eog(vocab, id);
        if (vocab->eot == SL_TOKEN_NONE) {
            vocab->eot = id;
        }
    }
    for (size_t i = 0; i < sizeof(END_OF_TEXT) / sizeof(END_OF_TEXT[0]); i++) {
        mark_eog(vocab, find_control(vocab, END_OF_TEXT[i]));
    }
    mark_eog(vocab, vocab->eos);
    mark_eog(vocab, vocab->eot);
    mark_eog(vocab, vocab->eom);
    return SLUICE_STATUS_OK;
}
