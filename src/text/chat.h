/* SPDX-License-Identifier: Apache-2.0
 *
 * Chat templates: a list of messages to the text a model was trained to see. The format is known by
 * tell-tale strings in the file's template, or chosen by name; what a family's templates say beyond
 * the layout (a default system prompt, dates, dropping old reasoning) is read from the template
 * too.
 *
 * Rendered text has no beginning-of-text token: encode the first render with add_special and
 * parse_special, later ones with parse_special alone.
 *
 *   render(messages)                                  the whole conversation, for a new context
 *   render_next(messages, n_done, ended)              only what a context lacks that holds the
 * first n_done messages, the last written by the model
 */
#ifndef SL_TEXT_CHAT_H
#define SL_TEXT_CHAT_H

#include <stdbool.h>
#include <stddef.h>

#include <sluice/status.h>

#include "gguf/gguf.h"

struct sl_chat_message {
    const char *role; /* "system", "user", "assistant", or what else the format allows */
    const char *content;
};

struct sl_chat;

/* `name` chooses a format; NULL: by the file's template. *out is NULL with OK when there is no name
 * and the file has no template. UNSUPPORTED: an unknown name or template, naming the known ones. */
enum sluice_status sl_chat_create(struct sl_chat **out, const struct sl_gguf *file,
                                  const char *name, struct sluice_error *err);
void sl_chat_destroy(struct sl_chat **chat);

/* The format's name ("chatml"); and all names, for listings (NULL past the last). */
const char *sl_chat_name(const struct sl_chat *chat);
const char *sl_chat_format_name(size_t index);

/* `generate`: end with what makes the model answer. *out is owned by the caller (sl_free),
 * NUL-terminated. INVALID_ARGUMENT: a role that the format does not have. */
enum sluice_status sl_chat_render(const struct sl_chat *chat,
                                  const struct sl_chat_message *messages, size_t n, bool generate,
                                  char **out, size_t *out_length, struct sluice_error *err);

/* As above, less what is in the context already: the first `n_done` messages as render() gives
 * them. `ended`: the model's end-of-turn token is in the context too; not so after an interruption
 * or at a length limit. */
enum sluice_status sl_chat_render_next(const struct sl_chat *chat,
                                       const struct sl_chat_message *messages, size_t n,
                                       size_t n_done, bool ended, bool generate, char **out,
                                       size_t *out_length, struct sluice_error *err);

/* Text that ends an answer ("<|im_end|>"): a stop string for models in which it is no token. */
const char *sl_chat_end_of_turn(const struct sl_chat *chat);

#endif
