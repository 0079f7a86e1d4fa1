/* SPDX-License-Identifier: Apache-2.0
 *
 * The table of commands, Ctrl-C, the log sink and what every command line goes through: find the
 * command, parse its options, run it, report its error.
 */
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/types.h>

#include "base/error.h"
#include "base/log.h"
#include "cli/cli.h"
#include "cpu/cpu.h"

enum { EXIT_GOOD = 0, EXIT_FAILED = 1, EXIT_USAGE = 2, EXIT_INTERRUPTED = 130 };

const struct sl_command sl_commands[] = {
#define SL_COMMAND(name_, arguments_, min_, max_, summary_, details_)                              \
    {                                                                                              \
        .name = #name_,                                                                            \
        .arguments = (arguments_),                                                                 \
        .min_arguments = (min_),                                                                   \
        .max_arguments = (max_),                                                                   \
        .summary = (summary_),                                                                     \
        .details = (details_),                                                                     \
        .run = sl_cmd_##name_,                                                                     \
    },
#include "cli/commands.inc"
#undef SL_COMMAND
};
const size_t sl_n_commands = sizeof(sl_commands) / sizeof(sl_commands[0]);

const struct sl_command *sl_command_find(const char *name)
{
    for (size_t i = 0; i < sl_n_commands; i++) {
        if (strcmp(sl_commands[i].name, name) == 0) {
            return &sl_commands[i];
        }
    }
    return NULL;
}

const char *sl_command_nearest(const char *name)
{
    const char *nearest = NULL;
    size_t least = SIZE_MAX;
    for (size_t i = 0; i < sl_n_commands; i++) {
        const size_t distance = sl_edit_distance(name, sl_commands[i].name);
        if (distance < least) {
            least = distance;
            nearest = sl_commands[i].name;
        }
    }
    return nearest != NULL && sl_is_near(least, name) ? nearest : NULL;
}

/* ------------------------------------------------------------------ Ctrl-C */

static volatile sig_atomic_t interrupted;

static void on_interrupt(int signal_number)
{
    interrupted = 1;
    signal(signal_number, SIG_DFL);
}

bool sl_cli_interrupted(void)
{
    return interrupted != 0;
}

/* Without SA_RESTART, so that a read from the terminal returns. */
static void catch_interrupt(void)
{
    struct sigaction action = {.sa_handler = on_interrupt};
    sigemptyset(&action.sa_mask);
    sigaction(SIGINT, &action, NULL);
}

/* -------------------------------------------------------------------- log */

static void write_log(void *user, enum sl_log_level level, const char *message)
{
    static const char *const names[] = {"error: ", "warning: ", "", "debug: "};
    FILE *out = user;
    fprintf(out, "%s%s\n", names[level], message);
    fflush(out);
}

static enum sluice_status open_log(const struct sl_options *options, FILE **out,
                                   struct sluice_error *err)
{
    const char *path = sl_options_text(options, SL_OPT_LOG_FILE);
    *out = NULL;
    if (path != NULL) {
        *out = fopen(path, "a");
        SL_CHECK(*out != NULL, IO, err, "cannot write log file '%s': %s", path, strerror(errno));
    }
    const bool verbose = sl_options_flag(options, SL_OPT_VERBOSE);
    sl_log_set_sink(write_log, *out != NULL ? *out : stderr, verbose ? SL_LOG_DEBUG : SL_LOG_INFO);
    return SLUICE_STATUS_OK;
}

/* ------------------------------------------------------------------ running */

static int report(const char *command, enum sluice_status status, const struct sluice_error *err)
{
    if (status == SLUICE_STATUS_OK) {
        return EXIT_GOOD;
    }
    if (status == SLUICE_STATUS_CANCELLED) {
        return EXIT_INTERRUPTED;
    }
    fprintf(stderr, "sluice%s%s: %s\n", command[0] != '\0' ? " " : "", command, err->message);
    return status == SLUICE_STATUS_INVALID_ARGUMENT ? EXIT_USAGE : EXIT_FAILED;
}

/* A full disk or a closed pipe shows up only when the rest of the output is flushed. */
static enum sluice_status check_output(struct sluice_error *err)
{
    errno = 0;
    SL_CHECK(fflush(stdout) == 0 && !ferror(stdout), IO, err, "cannot write standard output: %s",
             strerror(errno));
    return SLUICE_STATUS_OK;
}

static enum sluice_status run_parsed(const struct sl_command *command,
                                     const struct sl_options *options, struct sluice_error *err)
{
    const char *cpu = sl_options_text(options, SL_OPT_CPU);
    if (cpu != NULL) {
        SL_TRY(sl_cpu_set_level_cap(cpu, err));
    }
    FILE *log_file;
    SL_TRY(open_log(options, &log_file, err));
    catch_interrupt();
    const enum sluice_status status = command->run(options, err);
    sl_log_set_sink(NULL, NULL, SL_LOG_ERROR);
    if (log_file != NULL) {
        fclose(log_file);
    }
    return status;
}

static int run_command(const struct sl_command *command, int argc, char **argv)
{
    struct sluice_error err = {0};
    struct sl_options options;
    enum sluice_status status = sl_options_parse(&options, command, argc, argv, &err);
    if (status == SLUICE_STATUS_OK && options.help) {
        sl_help_print_command(stdout, command);
    } else if (status == SLUICE_STATUS_OK) {
        status = run_parsed(command, &options, &err);
    }
    sl_options_finish(&options);
    if (status == SLUICE_STATUS_OK) {
        status = check_output(&err);
    }
    return report(command->name, status, &err);
}

static int unknown_command(const char *name)
{
    const char *nearest = sl_command_nearest(name);
    if (nearest != NULL) {
        fprintf(stderr, "sluice: unknown command '%s'; did you mean '%s'?\n", name, nearest);
    } else {
        fprintf(stderr, "sluice: unknown command '%s'; see 'sluice --help'\n", name);
    }
    return EXIT_USAGE;
}

static bool is_any(const char *word, const char *a, const char *b, const char *c)
{
    return strcmp(word, a) == 0 || strcmp(word, b) == 0 || strcmp(word, c) == 0;
}

int sl_cli_main(int argc, char **argv)
{
    struct sluice_error err = {0};
    if (argc < 2) {
        fputs("sluice: no command given; see 'sluice --help'\n", stderr);
        return EXIT_USAGE;
    }
    const char *word = argv[1];
    if (is_any(word, "help", "--help", "-h")) {
        const struct sl_command *command = argc > 2 ? sl_command_find(argv[2]) : NULL;
        if (argc > 2 && command == NULL) {
            return unknown_command(argv[2]);
        }
        if (command != NULL) {
            sl_help_print_command(stdout, command);
        } else {
            sl_help_print(stdout);
        }
        return report("", check_output(&err), &err);
    }
    if (is_any(word, "version", "--version", "-V")) {
        printf("sluice %s\n", SLUICE_VERSION);
        return report("", check_output(&err), &err);
    }
    if (strcmp(word, "--dump-options-md") == 0) { /* for docs/options.md; not in the help */
        sl_help_dump_markdown(stdout);
        return report("", check_output(&err), &err);
    }
    const struct sl_command *command = sl_command_find(word);
    return command == NULL ? unknown_command(word) : run_command(command, argc - 2, argv + 2);
}
