/* SPDX-License-Identifier: Apache-2.0
 *
 * Chat formats as data: one row a family. Sources: the chat templates that the families publish
 * with their models.
 */
#ifndef SL_TEXT_CHAT_FORMATS_H
#define SL_TEXT_CHAT_FORMATS_H

#include <stdbool.h>
#include <stddef.h>

/* Stand-ins inside the strings below. */
#define SL_CHAT_EOS "\1" /* the text of the end-of-text token */
#define SL_CHAT_BOS "\2" /* and of the beginning-of-text token */

/* Where a system message goes. */
enum sl_chat_system {
    SL_CHAT_SYSTEM_TURN,    /* it is a turn of its own */
    SL_CHAT_SYSTEM_IN_USER, /* in front of the next user message */
};

struct sl_chat_format {
    const char *name;
    /* Strings that a template of this format has (`has`), and has not (`lacks`). */
    const char *has[3];
    const char *lacks[2];

    const char *before_user, *after_user;
    const char *before_assistant; /* in front of an answer in the history */
    const char *generation;       /* in front of one that the model is to write */
    const char *end_of_turn;      /* what the model writes at the end of its answer */
    const char *after_assistant;  /* what follows that */
    enum sl_chat_system system;
    const char *before_system, *after_system;
    /* Other roles: before_other role after_other content after_other_content; NULL: none. */
    const char *before_other, *after_other, *after_other_content;
    bool trims;         /* white space around messages goes */
    bool trims_answers; /* around the model's alone */
};

extern const struct sl_chat_format sl_chat_formats[];
extern const size_t sl_chat_n_formats;

#endif
