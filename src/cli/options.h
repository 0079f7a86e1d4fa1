/* SPDX-License-Identifier: Apache-2.0
 *
 * The option table: one row an option (options.inc) makes parsing, environment variables, help and
 * docs/options.md. Commands read values by the row's id:
 *
 *   sl_options_int(options, SL_OPT_CTX_SIZE)
 *
 * A value comes from the command line, else from the environment, else from the default. A row
 * applies to the commands that it names; rows for different commands may share an option name.
 */
#ifndef SL_CLI_OPTIONS_H
#define SL_CLI_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <sluice/status.h>

#include "cli/units.h"

enum sl_option_type {
    SL_OPTION_FLAG,   /* no argument; names with a leading '!' turn it off */
    SL_OPTION_INT,    /* int64 within bounds */
    SL_OPTION_FLOAT,  /* double within bounds */
    SL_OPTION_TEXT,   /* any string */
    SL_OPTION_CHOICE, /* one of `choices` */
    SL_OPTION_LIST,   /* any string; may be given many times */
    SL_OPTION_BYTES,  /* a size with unit */
    SL_OPTION_BUDGET, /* a size with unit, a percentage or "auto" */
};

enum sl_option_group {
    SL_GROUP_MODEL,
    SL_GROUP_PROMPT,
    SL_GROUP_SAMPLING,
    SL_GROUP_PLACEMENT,
    SL_GROUP_OUTPUT,
    SL_GROUP_BENCH,
    SL_GROUP_SYNTH,
    SL_N_GROUPS,
};

enum sl_option_id {
#define SL_OPTION(id, ...) SL_OPT_##id,
#include "cli/options.inc"
#undef SL_OPTION
    SL_N_OPTIONS,
};

/* Says whether a value is good, beyond what its type asks. */
typedef enum sluice_status sl_option_check_fn(const char *value, struct sluice_error *err);

struct sl_option {
    const char *names; /* "-m --model", separated by spaces, the chief name being the first "--" */
    enum sl_option_type type;
    enum sl_option_group group;
    const char *argument; /* "FILE"; "" for flags */
    const char *standard; /* the default, as the user would write it; NULL: unset */
    double least;         /* bounds of numbers */
    double most;
    const char *env;           /* environment variable, or NULL */
    const char *choices;       /* "a|b|c" for choices */
    const char *commands;      /* names of the commands that take it, separated by spaces */
    sl_option_check_fn *check; /* or NULL */
    const char *help;
};

extern const struct sl_option sl_option_table[SL_N_OPTIONS];

struct sl_option_value {
    bool given; /* on the command line or in the environment */
    bool flag;
    int64_t integer;
    double number;
    const char *text; /* borrowed from the command line or the environment */
    uint64_t bytes;
    struct sl_budget budget;
    const char **items; /* of a list */
    size_t n_items;
};

struct sl_command;

struct sl_options {
    const struct sl_command *command;
    struct sl_option_value values[SL_N_OPTIONS];
    const char **arguments; /* what is no option: files */
    size_t n_arguments;
    bool help; /* -h or --help was given: nothing else was checked */
};

/* Parse what follows the command's name. INVALID_ARGUMENT names the option and what would work.
 * sl_options_finish is needed in either case. */
enum sluice_status sl_options_parse(struct sl_options *out, const struct sl_command *command,
                                    int argc, char **argv, struct sluice_error *err);
void sl_options_finish(struct sl_options *options);

bool sl_options_given(const struct sl_options *options, enum sl_option_id id);
bool sl_options_flag(const struct sl_options *options, enum sl_option_id id);
int64_t sl_options_int(const struct sl_options *options, enum sl_option_id id);
double sl_options_float(const struct sl_options *options, enum sl_option_id id);
const char *sl_options_text(const struct sl_options *options, enum sl_option_id id); /* or NULL */
uint64_t sl_options_bytes(const struct sl_options *options, enum sl_option_id id);
struct sl_budget sl_options_budget(const struct sl_options *options, enum sl_option_id id);
/* Items of a list, in the order given. */
const char *const *sl_options_list(const struct sl_options *options, enum sl_option_id id,
                                   size_t *out_n);
/* The text of an option that this command cannot do without. */
enum sluice_status sl_options_require(const struct sl_options *options, enum sl_option_id id,
                                      const char **out, struct sluice_error *err);

/* A logit bias is TOKEN+BIAS or TOKEN-BIAS; both numbers of one that was checked. */
enum sluice_status sl_logit_bias_parse(const char *text, int32_t *token, float *bias,
                                       struct sluice_error *err);

/* ---- the table itself, for help and documents ---- */

/* The chief name of an option ("--model"), copied to `buffer`. */
const char *sl_option_name(const struct sl_option *option, char *buffer, size_t buffer_bytes);
bool sl_option_applies(const struct sl_option *option, const char *command);
const char *sl_option_group_title(enum sl_option_group group);

/* Help of the whole command, and of one subcommand. */
void sl_help_print(FILE *out);
void sl_help_print_command(FILE *out, const struct sl_command *command);
/* docs/options.md. */
void sl_help_dump_markdown(FILE *out);

/* Letters to add, drop, change or swap to make one word of the other. */
size_t sl_edit_distance(const char *a, const char *b);
/* Near enough to be what was meant. */
bool sl_is_near(size_t distance, const char *word);

#endif
