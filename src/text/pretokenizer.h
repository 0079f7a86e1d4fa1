/* SPDX-License-Identifier: Apache-2.0
 *
 * Pre-tokenizers of byte-level BPE: they cut text into the pieces within which merges happen. Each
 * family is a list of regular expressions; one after the other cuts every piece at its matches
 * (matches and the text between them both stay as pieces).
 */
#ifndef SL_TEXT_PRETOKENIZER_H
#define SL_TEXT_PRETOKENIZER_H

#include <stdbool.h>
#include <stddef.h>

#include <sluice/status.h>

struct sl_pretokenizer;

/* Ends of consecutive pieces, as byte offsets. A zeroed list is empty. */
struct sl_piece_ends {
    size_t *items;
    size_t n;
    size_t max;
};

void sl_piece_ends_finish(struct sl_piece_ends *ends);

/* By the name in tokenizer.ggml.pre; an unknown one is UNSUPPORTED, naming those there are. */
enum sluice_status sl_pretokenizer_create(struct sl_pretokenizer **out, const char *name,
                                          size_t name_length, struct sluice_error *err);
void sl_pretokenizer_destroy(struct sl_pretokenizer **pretokenizer);

/* Its own name ("llama-bpe"). */
const char *sl_pretokenizer_name(const struct sl_pretokenizer *pretokenizer);
/* A piece that is a token as a whole is taken as it is, whatever its merges say. */
bool sl_pretokenizer_ignores_merges(const struct sl_pretokenizer *pretokenizer);
/* Whether models of this family begin with BOS when the file does not say. */
bool sl_pretokenizer_adds_bos(const struct sl_pretokenizer *pretokenizer);

/* Cut well-formed UTF-8. `out` is overwritten; the last end is `length`. Thread-safe. */
enum sluice_status sl_pretokenizer_split(const struct sl_pretokenizer *pretokenizer,
                                         const char *text, size_t length, struct sl_piece_ends *out,
                                         struct sluice_error *err);

#endif
