/* SPDX-License-Identifier: Apache-2.0
 *
 * Byte-level byte-pair encoding ("gpt2"). In the vocabulary each byte is spelled as one printable
 * character: bytes that print in Latin-1 as themselves, the others, in order, as U+0100 and on.
 * Source: the GPT-2 tokenizer's table.
 */
#include <string.h>

#include "base/error.h"
#include "base/mem.h"
#include "text/tokenizer_internal.h"
#include "text/utf8.h"

static bool prints_as_itself(unsigned byte)
{
    return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

/* The character that spells a byte, and the byte that a character spells (-1: none). */
static uint32_t spell_byte(unsigned byte)
{
    if (prints_as_itself(byte)) {
        return byte;
    }
    /* 0x00-0x20 come first, then 0x7F-0xA0, then 0xAD. */
    return byte <= 0x20 ? 0x100 + byte : byte <= 0xA0 ? 0x121 + (byte - 0x7F) : 0x143;
}

static int unspell_byte(uint32_t cp)
{
    if (cp < 0x100) {
        return prints_as_itself(cp) ? (int)cp : -1;
    }
    if (cp <= 0x120) {
        return (int)(cp - 0x100);
    }
    if (cp <= 0x142) {
        return (int)(cp - 0x121 + 0x7F);
    }
    return cp == 0x143 ? 0xAD : -1;
}

size_t sl_bpe_piece(const char *text, size_t length, char *out)
{
    size_t written = 0;
    size_t i = 0;
    while (i < length) {
        const unsigned char *b = (const unsigned char *)text + i;
        const size_t n = sl_utf8_char_length(text + i, length - i);
        const uint32_t cp = n == 1   ? b[0]
                            : n == 2 ? (uint32_t)(b[0] & 0x1F) << 6 | (b[1] & 0x3F)
                                     : UINT32_MAX;
        const int byte = unspell_byte(cp);
        const size_t step = n == 0 ? 1 : n;
        if (byte >= 0) {
            out[written++] = (char)byte;
        } else {
            memcpy(out + written, text + i, step);
            written += step;
        }
        i += step;
    }
    return written;
}

enum sluice_status sl_bpe_init(struct sl_tokenizer *t, const struct sl_gguf *file,
                               struct sluice_error *err)
{
    struct sl_gguf_string pre = {.data = "default", .length = 7};
    if (sl_gguf_find(file, "tokenizer.ggml.pre") != NULL) {
        SL_TRY(sl_gguf_get_string(file, "tokenizer.ggml.pre", &pre, err));
    }
    SL_TRY(sl_pretokenizer_create(&t->pre, pre.data, pre.length, err));
    t->add_bos = sl_pretokenizer_adds_bos(t->pre);
    SL_TRY(sl_vocab_load_merges(&t->vocab, file, err));
    for (unsigned byte = 0; byte < 256; byte++) {
        char text[4];
        const size_t n = sl_utf8_write(text, spell_byte(byte));
        t->byte_ids[byte] = sl_vocab_find(&t->vocab, text, n);
    }
    return SLUICE_STATUS_OK;
}

static bool merge_by_rank(const void *context, const struct sl_symbol *left,
                          const struct sl_symbol *right, uint32_t *priority, int32_t *merged)
{
    const struct sl_merge_slot *merge = sl_vocab_find_merge(context, left->id, right->id);
    if (merge == NULL) {
        return false;
    }
    *priority = merge->rank;
    *merged = merge->merged;
    return true;
}

/* The token that a piece is as a whole, or SL_TOKEN_NONE. */
static int32_t find_whole(const struct sl_tokenizer *t, const char *piece, size_t length)
{
    char spelled[256];
    if (length > sizeof(spelled) / 2) {
        return SL_TOKEN_NONE;
    }
    size_t n = 0;
    for (size_t i = 0; i < length; i++) {
        n += sl_utf8_write(spelled + n, spell_byte((unsigned char)piece[i]));
    }
    return sl_vocab_find(&t->vocab, spelled, n);
}

static enum sluice_status encode_piece(const struct sl_tokenizer *t,
                                       struct sl_encode_scratch *scratch, const char *piece,
                                       size_t length, struct sluice_error *err)
{
    if (sl_pretokenizer_ignores_merges(t->pre)) {
        const int32_t whole = find_whole(t, piece, length);
        if (whole != SL_TOKEN_NONE) {
            return sl_token_list_push(&scratch->tokens, whole, err);
        }
    }
    struct sl_merger *merger = &scratch->merger;
    merger->n_symbols = 0;
    for (size_t i = 0; i < length; i++) {
        SL_TRY(sl_merger_push(merger, (uint32_t)i, 1, t->byte_ids[(unsigned char)piece[i]], err));
    }
    SL_TRY(sl_merger_run(merger, merge_by_rank, &t->vocab, err));
    for (int32_t i = 0; i >= 0; i = merger->symbols[i].next) {
        /* Vocabularies need not have a token for every byte; text in such bytes is left out, as
         * other implementations do (the unknown token would often be the end of the text). */
        if (merger->symbols[i].id >= 0) {
            SL_TRY(sl_token_list_push(&scratch->tokens, merger->symbols[i].id, err));
        }
    }
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_bpe_encode(const struct sl_tokenizer *t, struct sl_encode_scratch *scratch,
                                 const char *text, size_t length, struct sluice_error *err)
{
    if (sl_utf8_valid_prefix(text, length) < length) {
        SL_TRY(sl_encode_scratch_reserve(scratch, length * 3, err));
        length = sl_utf8_repair(scratch->text, text, length);
        text = scratch->text;
    }
    SL_TRY(sl_pretokenizer_split(t->pre, text, length, &scratch->ends, err));
    size_t start = 0;
    for (size_t i = 0; i < scratch->ends.n; i++) {
        const size_t end = scratch->ends.items[i];
        SL_TRY(encode_piece(t, scratch, text + start, end - start, err));
        start = end;
    }
    return SLUICE_STATUS_OK;
}
