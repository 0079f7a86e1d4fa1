/* SPDX-License-Identifier: Apache-2.0
 *
 * The `sluice` command: one row a subcommand in commands.inc, one row an option in options.inc, one
 * file cmd_<name>.c for what a subcommand does.
 *
 * To add a subcommand: a row in commands.inc, `sl_cmd_<name>` in cmd_<name>.c, its name in the
 * `commands` column of the options it takes, and docs/options.md written again
 * (`sluice --dump-options-md > docs/options.md`).
 *
 * A subcommand writes its result to standard output, everything else to standard error, and
 * returns its first error; main prints it as one line and turns it into the exit code: 2 for
 * INVALID_ARGUMENT (the user asked wrongly), 130 for CANCELLED, 1 for the rest.
 */
#ifndef SL_CLI_CLI_H
#define SL_CLI_CLI_H

#include <stdbool.h>
#include <stddef.h>

#include "cli/options.h"

struct sl_command {
    const char *name;
    const char *arguments; /* for the usage line: "FILE"; "" when there are none */
    int min_arguments;
    int max_arguments;
    const char *summary; /* one line */
    const char *details; /* paragraphs for its own help; may be "" */
    enum sluice_status (*run)(const struct sl_options *options, struct sluice_error *err);
};

#define SL_COMMAND(name, arguments, min, max, summary, details)                                    \
    enum sluice_status sl_cmd_##name(const struct sl_options *options, struct sluice_error *err);
#include "cli/commands.inc"
#undef SL_COMMAND

/* All commands, in the order of the help; and by name, NULL when there is none. */
extern const struct sl_command sl_commands[];
extern const size_t sl_n_commands;
const struct sl_command *sl_command_find(const char *name);
/* The command name nearest to a misspelt one, or NULL. */
const char *sl_command_nearest(const char *name);

/* Run the command line; returns the exit code. */
int sl_cli_main(int argc, char **argv);

/* True once Ctrl-C was pressed. A second Ctrl-C ends the program at once. */
bool sl_cli_interrupted(void);

#endif
