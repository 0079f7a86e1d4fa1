/* SPDX-License-Identifier: Apache-2.0
 *
 * SentencePiece BPE ("llama"): of all neighbours whose joined text is a token, the pair with the
 * highest score merges first, the leftmost on a tie. Characters that are no token become byte
 * tokens <0xNN>. Source: Kudo and Richardson 2018 (SentencePiece), section 3.
 */
#include <string.h>

#include "base/error.h"
#include "base/mem.h"
#include "text/tokenizer_internal.h"
#include "text/utf8.h"

int sl_spm_parse_byte(const char *text, size_t length)
{
    if (length != 6 || memcmp(text, "<0x", 3) != 0 || text[5] != '>') {
        return -1;
    }
    int byte = 0;
    for (int i = 3; i < 5; i++) {
        const char c = text[i];
        const int digit = c >= '0' && c <= '9'   ? c - '0'
                          : c >= 'A' && c <= 'F' ? c - 'A' + 10
                          : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                                 : -1;
        if (digit < 0) {
            return -1;
        }
        byte = byte * 16 + digit;
    }
    return byte;
}

size_t sl_spm_piece(enum sl_token_type type, const char *text, size_t length, char *out)
{
    const int byte = type == SL_TOKEN_BYTE ? sl_spm_parse_byte(text, length) : -1;
    if (byte >= 0) {
        out[0] = (char)byte;
        return 1;
    }
    if (type != SL_TOKEN_NORMAL && type != SL_TOKEN_UNUSED && type != SL_TOKEN_UNDEFINED) {
        memcpy(out, text, length);
        return length;
    }
    size_t written = 0;
    size_t i = 0;
    while (i < length) {
        if (length - i >= SL_SPACE_MARK_BYTES &&
            memcmp(text + i, SL_SPACE_MARK, SL_SPACE_MARK_BYTES) == 0) {
            out[written++] = ' ';
            i += SL_SPACE_MARK_BYTES;
        } else {
            out[written++] = text[i++];
        }
    }
    return written;
}

/* Tokens that text may merge into; the others only stand for something. */
static bool is_text(const struct sl_vocab *vocab, int32_t id)
{
    const uint8_t type = vocab->types[id];
    return type != SL_TOKEN_CONTROL && type != SL_TOKEN_UNKNOWN && type != SL_TOKEN_BYTE;
}

static void find_byte_tokens(struct sl_tokenizer *t)
{
    for (int i = 0; i < 256; i++) {
        static const char DIGITS[] = "0123456789ABCDEF";
        const char text[6] = {'<', '0', 'x', DIGITS[i >> 4], DIGITS[i & 15], '>'};
        t->byte_ids[i] = sl_vocab_find(&t->vocab, text, sizeof(text));
        if (t->byte_ids[i] == SL_TOKEN_NONE) {
            t->byte_ids[i] = t->vocab.unk;
        }
    }
}

static void note_inner_spaces(struct sl_tokenizer *t)
{
    for (int32_t id = 0; id < t->vocab.n_tokens; id++) {
        size_t length;
        const char *text = sl_string_table_get(&t->vocab.texts, id, &length);
        if (!is_text(&t->vocab, id)) {
            continue;
        }
        for (size_t i = 1; i + SL_SPACE_MARK_BYTES <= length; i++) {
            if (memcmp(text + i, SL_SPACE_MARK, SL_SPACE_MARK_BYTES) == 0) {
                t->joins_space[(unsigned char)text[i - 1]] = true;
            }
        }
    }
}

enum sluice_status sl_spm_init(struct sl_tokenizer *t, const struct sl_gguf *file,
                               struct sluice_error *err)
{
    (void)file;
    SL_CHECK(t->vocab.scores != NULL, FORMAT, err,
             "tokenizer.ggml.scores: missing, but tokenizer.ggml.model 'llama' needs it");
    find_byte_tokens(t);
    note_inner_spaces(t);
    return SLUICE_STATUS_OK;
}

/* A score as an integer that sorts the other way round: the highest score is the smallest. */
static uint32_t score_priority(float score)
{
    uint32_t bits;
    memcpy(&bits, &score, sizeof(bits));
    /* -0 and 0 are one score. */
    if ((bits << 1) == 0) {
        bits = 0;
    }
    const uint32_t rising = bits >> 31 ? ~bits : bits | UINT32_C(0x80000000);
    return ~rising;
}

struct merge_context {
    const struct sl_vocab *vocab;
    const char *text;
};

static bool merge_by_score(const void *context, const struct sl_symbol *left,
                           const struct sl_symbol *right, uint32_t *priority, int32_t *merged)
{
    const struct merge_context *c = context;
    const int32_t id =
        sl_vocab_find(c->vocab, c->text + left->start, (size_t)left->length + right->length);
    if (id == SL_TOKEN_NONE || !is_text(c->vocab, id)) {
        return false;
    }
    *priority = score_priority(c->vocab->scores[id]);
    *merged = id;
    return true;
}

static enum sluice_status emit_symbols(const struct sl_tokenizer *t,
                                       struct sl_encode_scratch *scratch, const char *word,
                                       struct sluice_error *err)
{
    const struct sl_symbol *symbols = scratch->merger.symbols;
    for (int32_t i = 0; i >= 0; i = symbols[i].next) {
        if (symbols[i].id >= 0) {
            SL_TRY(sl_token_list_push(&scratch->tokens, symbols[i].id, err));
            continue;
        }
        for (uint32_t j = 0; j < symbols[i].length; j++) {
            const int32_t id = t->byte_ids[(unsigned char)word[symbols[i].start + j]];
            if (id >= 0) {
                SL_TRY(sl_token_list_push(&scratch->tokens, id, err));
            }
        }
    }
    return SLUICE_STATUS_OK;
}

static enum sluice_status encode_word(const struct sl_tokenizer *t,
                                      struct sl_encode_scratch *scratch, const char *word,
                                      size_t length, struct sluice_error *err)
{
    struct sl_merger *merger = &scratch->merger;
    merger->n_symbols = 0;
    size_t i = 0;
    while (i < length) {
        const size_t valid = sl_utf8_char_length(word + i, length - i);
        const size_t n = valid == 0 ? 1 : valid;
        int32_t id = sl_vocab_find(&t->vocab, word + i, n);
        if (id != SL_TOKEN_NONE && !is_text(&t->vocab, id)) {
            id = SL_TOKEN_NONE;
        }
        SL_TRY(sl_merger_push(merger, (uint32_t)i, (uint32_t)n, id, err));
        i += n;
    }
    const struct merge_context context = {.vocab = &t->vocab, .text = word};
    SL_TRY(sl_merger_run(merger, merge_by_score, &context, err));
    return emit_symbols(t, scratch, word, err);
}

/* Blanks as space marks, with one more in front where the model wants it; returns the bytes. */
static size_t mark_spaces(const struct sl_tokenizer *t, const char *text, size_t length, char *out)
{
    size_t n = 0;
    if (t->add_space_prefix) {
        memcpy(out, SL_SPACE_MARK, SL_SPACE_MARK_BYTES);
        n = SL_SPACE_MARK_BYTES;
    }
    for (size_t i = 0; i < length; i++) {
        if (text[i] == ' ') {
            memcpy(out + n, SL_SPACE_MARK, SL_SPACE_MARK_BYTES);
            n += SL_SPACE_MARK_BYTES;
        } else {
            out[n++] = text[i];
        }
    }
    return n;
}

/* Whether no token reaches over the position `at` of the marked text. */
static bool can_cut(const struct sl_tokenizer *t, const char *text, size_t at)
{
    if (memcmp(text + at, SL_SPACE_MARK, SL_SPACE_MARK_BYTES) != 0) {
        return false;
    }
    return !t->joins_space[(unsigned char)text[at - 1]];
}

enum sluice_status sl_spm_encode(const struct sl_tokenizer *t, struct sl_encode_scratch *scratch,
                                 const char *text, size_t length, struct sluice_error *err)
{
    SL_TRY(sl_encode_scratch_reserve(scratch, (length + 1) * SL_SPACE_MARK_BYTES, err));
    const char *marked = scratch->text;
    const size_t n = mark_spaces(t, text, length, scratch->text);
    SL_CHECK(n <= INT32_MAX, INVALID_ARGUMENT, err, "a text of %zu bytes is too long", length);
    size_t start = 0;
    for (size_t at = 1; at + SL_SPACE_MARK_BYTES <= n; at++) {
        if (can_cut(t, marked, at)) {
            SL_TRY(encode_word(t, scratch, marked + start, at - start, err));
            start = at;
        }
    }
    return encode_word(t, scratch, marked + start, n - start, err);
}
