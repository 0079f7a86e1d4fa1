/* SPDX-License-Identifier: Apache-2.0
 *
 * Parsing by the option table. Options are whole words ("-ub", "--temp"); a value is the next word
 * or follows '=' after a long name; '_' counts as '-' in long names; "--" ends the options.
 */
#include "cli/options.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "base/mem.h"
#include "cli/cli.h"
#include "plan/plan.h"
#include "synth/synth.h"

/* "|auto|host|...": an empty first choice does no harm, nobody can type it by accident. */
#define STRATEGY_CHOICE(name, text, help) "|" text
#define STRATEGY_CHOICES SL_STRATEGY_LIST(STRATEGY_CHOICE)

static enum sluice_status check_logit_bias(const char *value, struct sluice_error *err)
{
    int32_t token;
    float bias;
    return sl_logit_bias_parse(value, &token, &bias, err);
}

static enum sluice_status check_synth_type(const char *value, struct sluice_error *err)
{
    struct sl_synth_mix mix;
    SL_CHECK(sl_synth_mix_from_name(value, &mix), INVALID_ARGUMENT, err,
             "'%s' is not a type that can be written (examples: F16, Q8_0, Q4_K, Q4_K_M)", value);
    return SLUICE_STATUS_OK;
}

const struct sl_option sl_option_table[SL_N_OPTIONS] = {
#define SL_OPTION(id, names_, type_, group_, argument_, standard_, least_, most_, env_, choices_,  \
                  commands_, check_, help_)                                                        \
    [SL_OPT_##id] = {                                                                              \
        .names = (names_),                                                                         \
        .type = SL_OPTION_##type_,                                                                 \
        .group = SL_GROUP_##group_,                                                                \
        .argument = (argument_),                                                                   \
        .standard = (standard_),                                                                   \
        .least = (least_),                                                                         \
        .most = (most_),                                                                           \
        .env = (env_),                                                                             \
        .choices = (choices_),                                                                     \
        .commands = (commands_),                                                                   \
        .check = (check_),                                                                         \
        .help = (help_),                                                                           \
    },
#include "cli/options.inc"
#undef SL_OPTION
};

/* -------------------------------------------------------------- word lists */

/* The next of the words separated by `separator`; NULL at the end. */
static const char *next_word(const char **list, char separator, size_t *length)
{
    const char *p = *list;
    while (*p == separator) {
        p++;
    }
    if (*p == '\0') {
        return NULL;
    }
    *length = strcspn(p, (const char[]){separator, '\0'});
    *list = p + *length;
    return p;
}

static bool holds_word(const char *list, char separator, const char *word)
{
    const char *item;
    size_t length;
    while ((item = next_word(&list, separator, &length)) != NULL) {
        if (strlen(word) == length && memcmp(item, word, length) == 0) {
            return true;
        }
    }
    return false;
}

bool sl_option_applies(const struct sl_option *option, const char *command)
{
    return holds_word(option->commands, ' ', command);
}

const char *sl_option_name(const struct sl_option *option, char *buffer, size_t buffer_bytes)
{
    const char *list = option->names;
    const char *item;
    size_t length;
    buffer[0] = '\0';
    while ((item = next_word(&list, ' ', &length)) != NULL) {
        snprintf(buffer, buffer_bytes, "%.*s", (int)length, item);
        if (item[0] == '-' && item[1] == '-') {
            break;
        }
    }
    return buffer;
}

/* The row that a word names; `*off` tells that it is the name that turns a flag off. */
static const struct sl_option *find_option(const char *command, const char *name, bool *off)
{
    char off_name[64];
    snprintf(off_name, sizeof(off_name), "!%s", name);
    for (size_t i = 0; i < SL_N_OPTIONS; i++) {
        const struct sl_option *option = &sl_option_table[i];
        if (command != NULL && !sl_option_applies(option, command)) {
            continue;
        }
        *off = holds_word(option->names, ' ', off_name);
        if (*off || holds_word(option->names, ' ', name)) {
            return option;
        }
    }
    return NULL;
}

/* ------------------------------------------------------------------ values */

static enum sluice_status parse_int(const struct sl_option *option, const char *text, int64_t *out,
                                    struct sluice_error *err)
{
    char *end;
    errno = 0;
    const long long value = strtoll(text, &end, 10);
    SL_CHECK(end != text && *end == '\0', INVALID_ARGUMENT, err, "'%s' is not a whole number",
             text);
    SL_CHECK(errno == 0 && (double)value >= option->least && (double)value <= option->most,
             INVALID_ARGUMENT, err, "%s is out of range (allowed: %.0f to %.0f)", text,
             option->least, option->most);
    *out = value;
    return SLUICE_STATUS_OK;
}

static enum sluice_status parse_float(const struct sl_option *option, const char *text, double *out,
                                      struct sluice_error *err)
{
    char *end;
    const double value = strtod(text, &end);
    SL_CHECK(end != text && *end == '\0' && isfinite(value), INVALID_ARGUMENT, err,
             "'%s' is not a number", text);
    SL_CHECK(value >= option->least && value <= option->most, INVALID_ARGUMENT, err,
             "%s is out of range (allowed: %g to %g)", text, option->least, option->most);
    *out = value;
    return SLUICE_STATUS_OK;
}

static enum sluice_status parse_choice(const struct sl_option *option, const char *text,
                                       struct sluice_error *err)
{
    if (holds_word(option->choices, '|', text)) {
        return SLUICE_STATUS_OK;
    }
    char known[256] = "";
    const char *list = option->choices;
    const char *item;
    size_t length;
    while ((item = next_word(&list, '|', &length)) != NULL) {
        const size_t used = strlen(known);
        snprintf(known + used, sizeof(known) - used, "%s%.*s", used > 0 ? ", " : "", (int)length,
                 item);
    }
    return sl_error_set(err, SLUICE_STATUS_INVALID_ARGUMENT, "'%s' is none of: %s", text, known);
}

static enum sluice_status append_item(struct sl_option_value *value, const char *text,
                                      struct sluice_error *err)
{
    const char **items = sl_realloc(SL_MEM_CLI, value->items, value->n_items + 1, sizeof(*items));
    SL_CHECK(items != NULL, OUT_OF_MEMORY, err, "out of memory for options");
    items[value->n_items++] = text;
    value->items = items;
    return SLUICE_STATUS_OK;
}

/* Environment variables switch flags with 1 or 0. */
static enum sluice_status parse_flag(const char *text, bool *out, struct sluice_error *err)
{
    *out = strcmp(text, "1") == 0;
    SL_CHECK(*out || strcmp(text, "0") == 0, INVALID_ARGUMENT, err, "'%s' is neither 0 nor 1",
             text);
    return SLUICE_STATUS_OK;
}

static enum sluice_status parse_value(const struct sl_option *option, const char *text,
                                      struct sl_option_value *value, struct sluice_error *err)
{
    if (option->check != NULL) {
        SL_TRY(option->check(text, err));
    }
    value->text = text;
    switch (option->type) {
    case SL_OPTION_FLAG:
        return parse_flag(text, &value->flag, err);
    case SL_OPTION_INT:
        return parse_int(option, text, &value->integer, err);
    case SL_OPTION_FLOAT:
        return parse_float(option, text, &value->number, err);
    case SL_OPTION_CHOICE:
        return parse_choice(option, text, err);
    case SL_OPTION_BYTES:
        return sl_bytes_parse(text, &value->bytes, err);
    case SL_OPTION_BUDGET:
        return sl_budget_parse(text, &value->budget, err);
    case SL_OPTION_LIST:
        return append_item(value, text, err);
    case SL_OPTION_TEXT:
        break;
    }
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_logit_bias_parse(const char *text, int32_t *token, float *bias,
                                       struct sluice_error *err)
{
    *token = 0;
    *bias = 0;
    char *middle;
    char *end;
    errno = 0;
    const long id = strtol(text, &middle, 10);
    const float value = strtof(middle, &end);
    SL_CHECK(
        middle != text && errno == 0 && id >= 0 && id <= INT32_MAX &&
            (*middle == '+' || *middle == '-') && end != middle && *end == '\0' && !isnan(value),
        INVALID_ARGUMENT, err,
        "'%s' is not a token number with a bias (examples: 15043+1, 15043-100, 15043-inf)", text);
    *token = (int32_t)id;
    *bias = value;
    return SLUICE_STATUS_OK;
}

/* --------------------------------------------------------------- nearness */

size_t sl_edit_distance(const char *a, const char *b)
{
    enum { MAX = 40 };
    size_t rows[3][MAX + 1]; /* the row being made and the two before it */
    const size_t n = strlen(a);
    const size_t m = strlen(b);
    if (n > MAX || m > MAX) {
        return n + m; /* too long for any name: far from all */
    }
    for (size_t i = 0; i <= n; i++) {
        size_t *row = rows[i % 3];
        const size_t *above = rows[(i + 2) % 3];
        const size_t *above2 = rows[(i + 1) % 3];
        for (size_t j = 0; j <= m; j++) {
            if (i == 0 || j == 0) {
                row[j] = i + j;
                continue;
            }
            size_t best = above[j - 1] + (a[i - 1] != b[j - 1]);
            best = above[j] + 1 < best ? above[j] + 1 : best;
            best = row[j - 1] + 1 < best ? row[j - 1] + 1 : best;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] &&
                above2[j - 2] + 1 < best) {
                best = above2[j - 2] + 1;
            }
            row[j] = best;
        }
    }
    return rows[n % 3][m];
}

bool sl_is_near(size_t distance, const char *word)
{
    const size_t length = strlen(word);
    /* One letter apart is all of a name of two. */
    return length > 3 && distance <= (length < 6 ? 1 : length / 3);
}

static enum sluice_status unknown_option(const char *command, const char *name,
                                         struct sluice_error *err)
{
    bool off;
    const struct sl_option *elsewhere = find_option(NULL, name, &off);
    if (elsewhere != NULL) {
        return sl_error_set(err, SLUICE_STATUS_INVALID_ARGUMENT, "%s does not apply to '%s'", name,
                            command);
    }
    char nearest[64] = "";
    size_t least = SIZE_MAX;
    for (size_t i = 0; i < SL_N_OPTIONS; i++) {
        const char *list = sl_option_table[i].names;
        const char *item;
        size_t length;
        while (sl_option_applies(&sl_option_table[i], command) &&
               (item = next_word(&list, ' ', &length)) != NULL) {
            char word[64];
            const int skip = item[0] == '!';
            snprintf(word, sizeof(word), "%.*s", (int)length - skip, item + skip);
            const size_t distance = sl_edit_distance(name, word);
            if (distance < least) {
                least = distance;
                snprintf(nearest, sizeof(nearest), "%s", word);
            }
        }
    }
    if (sl_is_near(least, name)) {
        return sl_error_set(err, SLUICE_STATUS_INVALID_ARGUMENT,
                            "unknown option %s; did you mean %s?", name, nearest);
    }
    return sl_error_set(err, SLUICE_STATUS_INVALID_ARGUMENT,
                        "unknown option %s; see 'sluice %s --help'", name, command);
}

/* ----------------------------------------------------------------- parsing */

/* Default and environment of every option of the command. */
static enum sluice_status set_defaults(struct sl_options *o, struct sluice_error *err)
{
    for (size_t i = 0; i < SL_N_OPTIONS; i++) {
        const struct sl_option *option = &sl_option_table[i];
        struct sl_option_value *value = &o->values[i];
        if (!sl_option_applies(option, o->command->name)) {
            continue;
        }
        if (option->standard != NULL) {
            SL_TRY(parse_value(option, option->standard, value, err));
        }
        const char *text = option->env != NULL ? getenv(option->env) : NULL;
        if (text != NULL && text[0] != '\0') {
            const enum sluice_status status = parse_value(option, text, value, err);
            if (status != SLUICE_STATUS_OK) {
                sl_error_prefix(err, "environment variable %s", option->env);
                return status;
            }
            value->given = true;
        }
    }
    return SLUICE_STATUS_OK;
}

static enum sluice_status add_argument(struct sl_options *o, const char *text,
                                       struct sluice_error *err)
{
    const char **arguments =
        sl_realloc(SL_MEM_CLI, o->arguments, o->n_arguments + 1, sizeof(*arguments));
    SL_CHECK(arguments != NULL, OUT_OF_MEMORY, err, "out of memory for arguments");
    arguments[o->n_arguments++] = text;
    o->arguments = arguments;
    return SLUICE_STATUS_OK;
}

/* The name in an option word: up to '=' in long ones, '_' read as '-'. */
static const char *split_name(const char *word, char name[64])
{
    const bool is_long = word[0] == '-' && word[1] == '-';
    const size_t length = is_long ? strcspn(word, "=") : strlen(word);
    snprintf(name, 64, "%.*s", (int)(length < 63 ? length : 63), word);
    for (char *p = name; is_long && *p != '\0'; p++) {
        *p = *p == '_' ? '-' : *p;
    }
    return is_long && word[length] == '=' ? word + length + 1 : NULL;
}

/* One option word, and the word after it when it takes a value. */
static enum sluice_status parse_option(struct sl_options *o, int *index, int argc, char **argv,
                                       struct sluice_error *err)
{
    char name[64];
    const char *text = split_name(argv[*index], name);
    bool off;
    const struct sl_option *option = find_option(o->command->name, name, &off);
    if (option == NULL) {
        return unknown_option(o->command->name, name, err);
    }
    struct sl_option_value *value = &o->values[option - sl_option_table];
    value->given = true;
    if (option->type == SL_OPTION_FLAG) {
        SL_CHECK(text == NULL, INVALID_ARGUMENT, err, "%s takes no value", name);
        value->flag = !off;
        return SLUICE_STATUS_OK;
    }
    if (text == NULL) {
        SL_CHECK(*index + 1 < argc, INVALID_ARGUMENT, err, "%s needs a value (%s)", name,
                 option->argument);
        text = argv[++*index];
    }
    const enum sluice_status status = parse_value(option, text, value, err);
    if (status != SLUICE_STATUS_OK) {
        sl_error_prefix(err, "%s", name);
    }
    return status;
}

static bool wants_help(int argc, char **argv)
{
    for (int i = 0; i < argc && strcmp(argv[i], "--") != 0; i++) {
        if (strcmp(argv[i], "-h") == 0 || strcmp(argv[i], "--help") == 0) {
            return true;
        }
    }
    return false;
}

enum sluice_status sl_options_parse(struct sl_options *out, const struct sl_command *command,
                                    int argc, char **argv, struct sluice_error *err)
{
    *out = (struct sl_options){.command = command, .help = wants_help(argc, argv)};
    if (out->help) {
        return SLUICE_STATUS_OK;
    }
    SL_TRY(set_defaults(out, err));
    bool options_ended = false;
    for (int i = 0; i < argc; i++) {
        const bool is_option = !options_ended && argv[i][0] == '-' && argv[i][1] != '\0';
        if (is_option && strcmp(argv[i], "--") == 0) {
            options_ended = true;
        } else if (is_option) {
            SL_TRY(parse_option(out, &i, argc, argv, err));
        } else {
            SL_CHECK(out->n_arguments < (size_t)command->max_arguments, INVALID_ARGUMENT, err,
                     "unexpected argument '%s'; see 'sluice %s --help'", argv[i], command->name);
            SL_TRY(add_argument(out, argv[i], err));
        }
    }
    SL_CHECK(out->n_arguments >= (size_t)command->min_arguments, INVALID_ARGUMENT, err,
             "'%s' needs %s", command->name, command->arguments);
    return SLUICE_STATUS_OK;
}

void sl_options_finish(struct sl_options *options)
{
    for (size_t i = 0; i < SL_N_OPTIONS; i++) {
        sl_free(options->values[i].items);
    }
    sl_free(options->arguments);
    *options = (struct sl_options){0};
}

/* --------------------------------------------------------------- accessors */

bool sl_options_given(const struct sl_options *options, enum sl_option_id id)
{
    return options->values[id].given;
}

bool sl_options_flag(const struct sl_options *options, enum sl_option_id id)
{
    return options->values[id].flag;
}

int64_t sl_options_int(const struct sl_options *options, enum sl_option_id id)
{
    return options->values[id].integer;
}

double sl_options_float(const struct sl_options *options, enum sl_option_id id)
{
    return options->values[id].number;
}

const char *sl_options_text(const struct sl_options *options, enum sl_option_id id)
{
    return options->values[id].text;
}

uint64_t sl_options_bytes(const struct sl_options *options, enum sl_option_id id)
{
    return options->values[id].bytes;
}

struct sl_budget sl_options_budget(const struct sl_options *options, enum sl_option_id id)
{
    return options->values[id].budget;
}

const char *const *sl_options_list(const struct sl_options *options, enum sl_option_id id,
                                   size_t *out_n)
{
    *out_n = options->values[id].n_items;
    return options->values[id].items;
}

enum sluice_status sl_options_require(const struct sl_options *options, enum sl_option_id id,
                                      const char **out, struct sluice_error *err)
{
    *out = options->values[id].text;
    char name[64];
    const struct sl_option *option = &sl_option_table[id];
    SL_CHECK(*out != NULL, INVALID_ARGUMENT, err, "%s %s is needed",
             sl_option_name(option, name, sizeof(name)), option->argument);
    return SLUICE_STATUS_OK;
}
