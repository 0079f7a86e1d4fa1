/* SPDX-License-Identifier: Apache-2.0
 *
 * Help and docs/options.md, both from the tables of commands and options.
 */
#include <stdarg.h>
#include <string.h>

#include "cli/cli.h"

#define HELP_COLUMN 34
#define HELP_WIDTH 100

const char *sl_option_group_title(enum sl_option_group group)
{
    static const char *const titles[SL_N_GROUPS] = {
        [SL_GROUP_MODEL] = "Model",
        [SL_GROUP_PROMPT] = "Prompt and chat",
        [SL_GROUP_SAMPLING] = "Sampling",
        [SL_GROUP_PLACEMENT] = "Device and VRAM",
        [SL_GROUP_OUTPUT] = "Output",
        [SL_GROUP_BENCH] = "Benchmark",
        [SL_GROUP_SYNTH] = "Synthetic models",
    };
    return titles[group];
}

/* "-cnv, --conversation, -no-cnv": all names of a row, comma-separated. */
static void format_names(const struct sl_option *option, char *out, size_t out_bytes)
{
    size_t n = 0;
    for (const char *p = option->names; *p != '\0' && n + 3 < out_bytes; p++) {
        if (*p == ' ') {
            out[n++] = ',';
        }
        if (*p != '!') {
            out[n++] = *p;
        }
    }
    out[n] = '\0';
}

/* What the user should know beyond the help text: choices, default, environment variable. */
static void format_notes(const struct sl_option *option, char *out, size_t out_bytes)
{
    size_t n = 0;
    out[0] = '\0';
    if (option->choices != NULL) {
        const char *choices = option->choices + (option->choices[0] == '|');
        n += (size_t)snprintf(out, out_bytes, " (%s)", choices);
    }
    if (option->standard != NULL && n < out_bytes) {
        n += (size_t)snprintf(out + n, out_bytes - n, " [%s]", option->standard);
    }
    if (option->env != NULL && n < out_bytes) {
        snprintf(out + n, out_bytes - n, " (env %s)", option->env);
    }
}

/* Print words from `column` on, wrapped, continued at `indent`. */
static void print_wrapped(FILE *out, const char *text, int column, int indent)
{
    bool first = true;
    while (*text != '\0') {
        const int length = (int)strcspn(text, " ");
        if (!first && column + 1 + length > HELP_WIDTH) {
            fprintf(out, "\n%*s", indent, "");
            column = indent;
            first = true;
        }
        fprintf(out, "%s%.*s", first ? "" : " ", length, text);
        column += length + (first ? 0 : 1);
        first = false;
        text += length;
        text += *text == ' ';
    }
    fputc('\n', out);
}

static void print_option(FILE *out, const struct sl_option *option)
{
    char names[160];
    char notes[256];
    char text[512];
    format_names(option, names, sizeof(names));
    format_notes(option, notes, sizeof(notes));
    snprintf(text, sizeof(text), "%s%s", option->help, notes);
    int column = fprintf(out, "  %s %s", names, option->argument);
    if (column + 2 > HELP_COLUMN) {
        fputc('\n', out);
        column = 0;
    }
    fprintf(out, "%*s", HELP_COLUMN - column, "");
    print_wrapped(out, text, HELP_COLUMN, HELP_COLUMN);
}

static bool group_has(enum sl_option_group group, const char *command)
{
    for (size_t i = 0; i < SL_N_OPTIONS; i++) {
        if (sl_option_table[i].group == group && sl_option_applies(&sl_option_table[i], command)) {
            return true;
        }
    }
    return false;
}

void sl_help_print(FILE *out)
{
    fprintf(out,
            "sluice %s: runs language models inside a VRAM budget\n\n"
            "usage: sluice COMMAND [options]\n\ncommands:\n",
            SLUICE_VERSION);
    for (size_t i = 0; i < sl_n_commands; i++) {
        fprintf(out, "  %-12s %s\n", sl_commands[i].name, sl_commands[i].summary);
    }
    fprintf(out,
            "  %-12s %s\n  %-12s %s\n\n'sluice COMMAND --help' shows the options of a command.\n",
            "help", "show this, or the help of a command", "version", "show the version");
}

void sl_help_print_command(FILE *out, const struct sl_command *command)
{
    fprintf(out, "usage: sluice %s [options]%s%s\n\n%s.\n", command->name,
            command->arguments[0] != '\0' ? " " : "", command->arguments, command->summary);
    if (command->details[0] != '\0') {
        fprintf(out, "%s\n", command->details);
    }
    for (int group = 0; group < SL_N_GROUPS; group++) {
        if (!group_has((enum sl_option_group)group, command->name)) {
            continue;
        }
        fprintf(out, "\n%s:\n", sl_option_group_title((enum sl_option_group)group));
        for (size_t i = 0; i < SL_N_OPTIONS; i++) {
            if ((int)sl_option_table[i].group == group &&
                sl_option_applies(&sl_option_table[i], command->name)) {
                print_option(out, &sl_option_table[i]);
            }
        }
    }
}

/* ---------------------------------------------------------------- markdown */

/* Text inside a table cell: a bar would end the cell. */
static void print_cell(FILE *out, const char *text)
{
    fputs("| ", out);
    for (; *text != '\0'; text++) {
        fputs(*text == '|' ? "\\|" : (const char[]){*text, '\0'}, out);
    }
    fputc(' ', out);
}

/* The commands of a row that this program has. */
static void format_commands(const struct sl_option *option, char *out, size_t out_bytes)
{
    size_t n = 0;
    out[0] = '\0';
    for (size_t i = 0; i < sl_n_commands && n < out_bytes; i++) {
        if (sl_option_applies(option, sl_commands[i].name)) {
            n += (size_t)snprintf(out + n, out_bytes - n, "%s%s", n > 0 ? ", " : "",
                                  sl_commands[i].name);
        }
    }
}

static void dump_option(FILE *out, const struct sl_option *option, const char *commands)
{
    char names[160];
    char text[224];
    format_names(option, names, sizeof(names));
    snprintf(text, sizeof(text), "`%s%s%s`", names, option->argument[0] != '\0' ? " " : "",
             option->argument);
    print_cell(out, text);
    print_cell(out, option->standard != NULL ? option->standard : "");
    print_cell(out, option->env != NULL ? option->env : "");
    print_cell(out, commands);
    char help[512];
    const char *choices = option->choices != NULL ? option->choices : "";
    snprintf(help, sizeof(help), "%s%s%s%s", option->help, choices[0] != '\0' ? " (" : "",
             choices + (choices[0] == '|'), choices[0] != '\0' ? ")" : "");
    print_cell(out, help);
    fputs("|\n", out);
}

void sl_help_dump_markdown(FILE *out)
{
    fputs("# Options\n\nWritten by `sluice --dump-options-md`; do not edit.\n\n"
          "A value comes from the command line, else from the environment variable, else from the\n"
          "default. Sizes take K, M, G, T or KiB, MiB, GiB, TiB (1024) and KB, MB, GB, TB (1000).\n"
          "Flags in the environment are 1 or 0.\n\n## Commands\n\n| command | what it does |\n"
          "| --- | --- |\n",
          out);
    for (size_t i = 0; i < sl_n_commands; i++) {
        fprintf(out, "| `sluice %s%s%s` | %s |\n", sl_commands[i].name,
                sl_commands[i].arguments[0] != '\0' ? " " : "", sl_commands[i].arguments,
                sl_commands[i].summary);
    }
    for (int group = 0; group < SL_N_GROUPS; group++) {
        bool titled = false;
        for (size_t i = 0; i < SL_N_OPTIONS; i++) {
            char commands[128];
            format_commands(&sl_option_table[i], commands, sizeof(commands));
            if ((int)sl_option_table[i].group != group || commands[0] == '\0') {
                continue;
            }
            if (!titled) {
                fprintf(out,
                        "\n## %s\n\n| option | default | environment | commands | meaning |\n"
                        "| --- | --- | --- | --- | --- |\n",
                        sl_option_group_title((enum sl_option_group)group));
                titled = true;
            }
            dump_option(out, &sl_option_table[i], commands);
        }
    }
}
