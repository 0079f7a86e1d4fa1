/* SPDX-License-Identifier: Apache-2.0
 *
 * The option table and unit parsing: what rows must keep to, values of every type, sources of a
 * value, sizes and budgets.
 */
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "cli/cli.h"
#include "cli/units.h"
#include "test.h"

static void test_bytes(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        uint64_t bytes;
    } good[] = {
        {"0", 0},
        {"123", 123},
        {"18446744073709551615", UINT64_MAX},
        {"1B", 1},
        {"1K", 1024},
        {"1k", 1024},
        {"64M", 64 << 20},
        {"1.5G", 3u << 29},
        {"1.5GiB", 3u << 29},
        {".5M", 1 << 19},
        {"2 MiB", 2 << 20},
        {"2T", UINT64_C(1) << 41},
        {"1KB", 1000},
        {"8GB", UINT64_C(8000000000)},
        {"8gib", UINT64_C(1) << 33},
    };
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        struct sluice_error err = {0};
        uint64_t bytes;
        assert_ok(sl_bytes_parse(good[i].text, &bytes, &err), err);
        assert_int_equal(bytes, good[i].bytes);
    }
    static const char *const bad[] = {
        "",         "M",    "-1",  "+1", "1.5", "1 2",   "1MM", "1XB",  "0x10",
        "1e3",      "nan",  "inf", ".",  ".M",  "1..5M", "5%",  "auto", "18446744073709551616",
        "9999999T", "1,5G",
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        struct sluice_error err = {0};
        uint64_t bytes = 1;
        if (sl_bytes_parse(bad[i], &bytes, &err) != SLUICE_STATUS_INVALID_ARGUMENT) {
            fail_msg("'%s' was taken as %llu", bad[i], (unsigned long long)bytes);
        }
        assert_mentions(err, bad[i]);
    }
}

static void test_budget(void **state)
{
    (void)state;
    struct sluice_error err = {0};
    struct sl_budget b;
    assert_ok(sl_budget_parse("auto", &b, &err), err);
    assert_int_equal(b.kind, SL_BUDGET_AUTO);
    assert_ok(sl_budget_parse("AUTO", &b, &err), err);
    assert_int_equal(b.kind, SL_BUDGET_AUTO);
    assert_ok(sl_budget_parse("12.5%", &b, &err), err);
    assert_true(b.kind == SL_BUDGET_PERCENT && b.percent == 12.5);
    assert_ok(sl_budget_parse("100%", &b, &err), err);
    assert_ok(sl_budget_parse("0", &b, &err), err);
    assert_true(b.kind == SL_BUDGET_BYTES && b.bytes == 0);
    assert_ok(sl_budget_parse("3G", &b, &err), err);
    assert_true(b.kind == SL_BUDGET_BYTES && b.bytes == UINT64_C(3) << 30);
    static const char *const bad[] = {"", "%", "101%", "-5%", "50 %%", "half", "5%%", "1.5"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        assert_status(sl_budget_parse(bad[i], &b, &err), INVALID_ARGUMENT);
    }
}

static void test_format(void **state)
{
    (void)state;
    char text[32];
    assert_string_equal(sl_bytes_format(text, sizeof(text), 0), "0 B");
    assert_string_equal(sl_bytes_format(text, sizeof(text), 1023), "1023 B");
    assert_string_equal(sl_bytes_format(text, sizeof(text), 1024), "1.00 KiB");
    assert_string_equal(sl_bytes_format(text, sizeof(text), (1 << 20) - 1), "1.00 MiB");
    assert_string_equal(sl_bytes_format(text, sizeof(text), UINT64_C(5) << 29), "2.50 GiB");
    assert_string_equal(sl_bytes_format(text, sizeof(text), UINT64_MAX), "16777216.00 TiB");
    assert_string_equal(sl_count_format(text, sizeof(text), 950), "950");
    assert_string_equal(sl_count_format(text, sizeof(text), 134515008), "135 M");
    assert_string_equal(sl_count_format(text, sizeof(text), UINT64_C(8030261248)), "8.03 B");
    assert_string_equal(sl_count_format(text, sizeof(text), UINT64_C(999600000)), "1.00 B");
    assert_string_equal(sl_number_format(text, sizeof(text), (double)1e-5f, true), "1e-05");
    assert_string_equal(sl_number_format(text, sizeof(text), 0.1, false), "0.1");
    assert_string_equal(sl_number_format(text, sizeof(text), 1.0 / 3, false), "0.3333333333333333");
    assert_string_equal(sl_number_format(text, sizeof(text), (double)(1.0f / 3), true),
                        "0.33333334");
}

/* ------------------------------------------------------------- the table */

/* What every row must keep to: a chief name, one meaning a name and command, a default that its own
 * parser takes (that of a command is parsed below), an environment variable of one row a command.
 */
static void test_rows(void **state)
{
    (void)state;
    for (size_t i = 0; i < SL_N_OPTIONS; i++) {
        const struct sl_option *a = &sl_option_table[i];
        char name[64];
        assert_non_null(strstr(a->names, "--"));
        assert_int_equal(strncmp(sl_option_name(a, name, sizeof(name)), "--", 2), 0);
        assert_true(a->help[0] != '\0' && a->commands[0] != '\0');
        assert_true((a->type == SL_OPTION_FLAG) == (a->argument[0] == '\0'));
        assert_true((a->type == SL_OPTION_CHOICE) == (a->choices != NULL));
        if (a->type == SL_OPTION_INT || a->type == SL_OPTION_FLOAT) {
            assert_true(a->least < a->most);
        }
        for (size_t j = 0; j < i; j++) {
            const struct sl_option *b = &sl_option_table[j];
            for (size_t c = 0; c < sl_n_commands; c++) {
                char other[64];
                if (!sl_option_applies(a, sl_commands[c].name) ||
                    !sl_option_applies(b, sl_commands[c].name)) {
                    continue;
                }
                if (strcmp(name, sl_option_name(b, other, sizeof(other))) == 0) {
                    fail_msg("'%s' has two options %s", sl_commands[c].name, name);
                }
            }
        }
    }
}

static void test_defaults(void **state)
{
    (void)state;
    for (size_t c = 0; c < sl_n_commands; c++) {
        struct sluice_error err = {0};
        struct sl_options options;
        struct sl_command command = sl_commands[c];
        command.min_arguments = 0;
        assert_ok(sl_options_parse(&options, &command, 0, NULL, &err), err);
        for (int i = 0; i < SL_N_OPTIONS; i++) {
            assert_false(sl_options_given(&options, (enum sl_option_id)i));
        }
        sl_options_finish(&options);
    }
    assert_int_equal(sl_mem_n_blocks(), 0);
}

/* ------------------------------------------------------------ command lines */

static enum sluice_status parse(struct sl_options *out, struct sluice_error *err, int argc,
                                const char *const *words)
{
    static const struct sl_command command = {
        .name = "run", .arguments = "FILE", .max_arguments = 2};
    char *argv[16];
    for (int i = 0; i < argc; i++) {
        argv[i] = (char *)(uintptr_t)words[i];
    }
    return sl_options_parse(out, &command, argc, argv, err);
}

#define PARSE(out, err, ...)                                                                       \
    parse((out), (err), (int)(sizeof((const char *[]){__VA_ARGS__}) / sizeof(const char *)),       \
          (const char *const[]){__VA_ARGS__})

static void test_values(void **state)
{
    (void)state;
    struct sluice_error err = {0};
    struct sl_options o;
    assert_ok(PARSE(&o, &err, "-m", "model", "-n", "-1", "--temp=0.25", "--top_k", "7", "file", "-",
                    "--vram", "50%", "-no-cnv"),
              err);
    assert_string_equal(sl_options_text(&o, SL_OPT_MODEL), "model");
    assert_int_equal(sl_options_int(&o, SL_OPT_PREDICT), -1);
    assert_true(sl_options_given(&o, SL_OPT_PREDICT));
    assert_true(sl_options_float(&o, SL_OPT_TEMP) == 0.25);
    assert_int_equal(sl_options_int(&o, SL_OPT_TOP_K), 7);
    assert_true(sl_options_float(&o, SL_OPT_TOP_P) == 0.95); /* the default */
    assert_false(sl_options_given(&o, SL_OPT_TOP_P));
    assert_int_equal(o.n_arguments, 2);
    assert_string_equal(o.arguments[1], "-");
    assert_true(sl_options_budget(&o, SL_OPT_VRAM).percent == 50);
    assert_true(sl_options_given(&o, SL_OPT_CONVERSATION));
    assert_false(sl_options_flag(&o, SL_OPT_CONVERSATION));
    sl_options_finish(&o);

    /* The last one wins; values may look like options; "--" ends them. */
    assert_ok(PARSE(&o, &err, "-cnv", "-no-cnv", "-cnv", "-p", "--temp", "--", "--temp"), err);
    assert_true(sl_options_flag(&o, SL_OPT_CONVERSATION));
    assert_string_equal(sl_options_text(&o, SL_OPT_PROMPT), "--temp");
    assert_string_equal(o.arguments[0], "--temp");
    sl_options_finish(&o);

    assert_ok(PARSE(&o, &err, "--stop", "a", "-r", "", "--stop=b=c"), err);
    size_t n;
    const char *const *stops = sl_options_list(&o, SL_OPT_STOP, &n);
    assert_int_equal(n, 3);
    assert_string_equal(stops[0], "a");
    assert_string_equal(stops[1], "");
    assert_string_equal(stops[2], "b=c");
    const char *model;
    assert_status(sl_options_require(&o, SL_OPT_MODEL, &model, &err), INVALID_ARGUMENT);
    assert_mentions(err, "--model FILE is needed");
    sl_options_finish(&o);
    assert_int_equal(sl_mem_n_blocks(), 0);
}

static void test_environment(void **state)
{
    (void)state;
    struct sluice_error err = {0};
    struct sl_options o;
    setenv("SLUICE_MODEL", "from-env", 1);
    setenv("SLUICE_VRAM", "2G", 1);
    setenv("SLUICE_VERBOSE", "1", 1);
    setenv("SLUICE_DEVICE", "", 1); /* empty: as if it were not there */
    assert_ok(PARSE(&o, &err, "--vram", "1G"), err);
    assert_string_equal(sl_options_text(&o, SL_OPT_MODEL), "from-env");
    assert_true(sl_options_given(&o, SL_OPT_MODEL));
    assert_true(sl_options_flag(&o, SL_OPT_VERBOSE));
    assert_true(sl_options_budget(&o, SL_OPT_VRAM).bytes == 1 << 30);
    assert_string_equal(sl_options_text(&o, SL_OPT_DEVICE), "auto");
    sl_options_finish(&o);
    setenv("SLUICE_VRAM", "lots", 1);
    assert_status(PARSE(&o, &err, "--vram", "1G"), INVALID_ARGUMENT);
    assert_mentions(err, "environment variable SLUICE_VRAM: 'lots'");
    sl_options_finish(&o);
    unsetenv("SLUICE_MODEL");
    unsetenv("SLUICE_VRAM");
    unsetenv("SLUICE_VERBOSE");
    unsetenv("SLUICE_DEVICE");
}

static void test_logit_bias(void **state)
{
    (void)state;
    struct sluice_error err = {0};
    int32_t token;
    float bias;
    assert_ok(sl_logit_bias_parse("15043+1.5", &token, &bias, &err), err);
    assert_true(token == 15043 && bias == 1.5f);
    assert_ok(sl_logit_bias_parse("0-inf", &token, &bias, &err), err);
    assert_true(token == 0 && bias < -1e30f);
    static const char *const bad[] = {
        "", "5", "5+", "+5", "a+1", "-5+1", "5+x", "5*2", "5+nan", "99999999999+1", "5 +1"};
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        if (sl_logit_bias_parse(bad[i], &token, &bias, &err) != SLUICE_STATUS_INVALID_ARGUMENT) {
            fail_msg("'%s' was taken", bad[i]);
        }
    }
}

static void test_nearest(void **state)
{
    (void)state;
    assert_int_equal(sl_edit_distance("", ""), 0);
    assert_int_equal(sl_edit_distance("abc", ""), 3);
    assert_int_equal(sl_edit_distance("--temp", "--tmep"), 1); /* a swap counts once */
    assert_int_equal(sl_edit_distance("--temp", "--temps"), 1);
    assert_int_equal(sl_edit_distance("kitten", "sitting"), 3);
    assert_string_equal(sl_command_nearest("inof"), "info");
    assert_string_equal(sl_command_nearest("sinth"), "synth");
    assert_null(sl_command_nearest("frobnicate"));
    char longest[200];
    memset(longest, 'x', sizeof(longest) - 1);
    longest[sizeof(longest) - 1] = '\0';
    assert_null(sl_command_nearest(longest));
    struct sluice_error err = {0};
    struct sl_options o;
    assert_status(PARSE(&o, &err, "--tmep", "1"), INVALID_ARGUMENT);
    assert_mentions(err, "did you mean --temp?");
    sl_options_finish(&o);
    memcpy(longest, "--", 2);
    assert_status(PARSE(&o, &err, longest), INVALID_ARGUMENT);
    assert_mentions(err, "unknown option --xxx");
    sl_options_finish(&o);
}

static void test_memory_faults(void **state)
{
    (void)state;
    bool fired = true;
    for (int64_t n = 0; fired; n++) {
        struct sluice_error err = {0};
        struct sl_options o;
        assert_true(n < 20);
        sl_mem_fail_after(n, false);
        const enum sluice_status status = PARSE(&o, &err, "file", "--stop", "a", "--stop", "b");
        fired = sl_mem_fault_fired();
        sl_mem_fail_after(-1, false);
        sl_options_finish(&o);
        assert_string_equal(sluice_status_name(status), fired ? "OUT_OF_MEMORY" : "OK");
        assert_int_equal(sl_mem_n_blocks(), 0);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bytes),       cmocka_unit_test(test_budget),
        cmocka_unit_test(test_format),      cmocka_unit_test(test_rows),
        cmocka_unit_test(test_defaults),    cmocka_unit_test(test_values),
        cmocka_unit_test(test_environment), cmocka_unit_test(test_logit_bias),
        cmocka_unit_test(test_nearest),     cmocka_unit_test(test_memory_faults),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
