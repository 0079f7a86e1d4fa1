/* SPDX-License-Identifier: Apache-2.0
 *
 * The writer: the bytes that another program writes for the same content, wrong use, and failures
 * of memory and disk, after which nothing may be left in the folder.
 */
#include <dirent.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "gguf/gguf_writer.h"
#include "test.h"

static char folder[] = "test_gguf_write.XXXXXX";
static char target[64];

static int set_up(void **state)
{
    (void)state;
    if (mkdtemp(folder) == NULL) {
        return -1;
    }
    snprintf(target, sizeof(target), "%s/out.gguf", folder);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    return rmdir(folder); /* fails when a test left something */
}

static size_t n_files(void)
{
    size_t n = 0;
    DIR *dir = opendir(folder);
    assert_non_null(dir);
    for (struct dirent *e; (e = readdir(dir)) != NULL;) {
        n += e->d_name[0] != '.';
    }
    closedir(dir);
    return n;
}

static struct sl_gguf_writer *create(void)
{
    struct sluice_error err = {0};
    struct sl_gguf_writer *w;
    assert_ok(sl_gguf_writer_create(&w, target, &err), err);
    return w;
}

/* -------------------------------------------------------------- same bytes */

/* The file "shapes.gguf" of tools/fixtures/gguf_files.py by calls instead of copying. */
static void test_same_bytes(void **state)
{
    (void)state;
    struct sluice_error err = {0};
    struct sl_gguf_writer *w = create();
    sl_gguf_writer_set_string(w, "general.architecture", "test");
    sl_gguf_writer_set_u32(w, "general.alignment", 64);
    static const int64_t dims[5][4] = {{1}, {7}, {3, 2}, {4, 3, 2}, {5, 4, 3, 2}};
    static const uint32_t n_dims[5] = {1, 1, 2, 3, 4};
    static const size_t n_items[5] = {1, 7, 6, 24, 120};
    for (int i = 0; i < 5; i++) {
        char name[32];
        snprintf(name, sizeof(name), "shape.%d", i);
        sl_gguf_writer_add_tensor(w, name, SL_TYPE_F32, dims[i], n_dims[i]);
    }
    char longest[65];
    memset(longest, 'n', 64);
    longest[64] = '\0';
    sl_gguf_writer_add_tensor(w, longest, SL_TYPE_F16, (const int64_t[]){3}, 1);
    assert_ok(sl_gguf_writer_begin_data(w, &err), err);
    for (int i = 0; i < 5; i++) {
        float items[120];
        for (int j = 0; j < 120; j++) {
            items[j] = (float)j;
        }
        assert_ok(sl_gguf_writer_write(w, items, n_items[i] * sizeof(float), &err), err);
    }
    assert_ok(sl_gguf_writer_write(w, "\0\0\0\0\0\0", 6, &err), err);
    assert_int_equal(n_files(), 1); /* only the temporary one */
    assert_false(sl_file_exists(target));
    assert_ok(sl_gguf_writer_finish(w, &err), err);
    sl_gguf_writer_destroy(&w);
    assert_int_equal(n_files(), 1);
    struct sl_file_map ours;
    struct sl_file_map theirs;
    assert_ok(sl_file_map_init(&ours, target, &err), err);
    assert_ok(sl_file_map_init(&theirs, SLUICE_FIXTURES "/gguf/shapes.gguf", &err), err);
    assert_int_equal(ours.size, theirs.size);
    assert_memory_equal(ours.data, theirs.data, theirs.size);
    sl_file_map_finish(&ours);
    sl_file_map_finish(&theirs);
    remove(target);
}

/* Every setter, read back; a scalar; an empty array. */
static void test_setters(void **state)
{
    (void)state;
    struct sluice_error err = {0};
    struct sl_gguf_writer *w = create();
    const char *const texts[] = {"", "one", "two words"};
    const int64_t numbers[] = {-5, 6, INT64_MAX};
    sl_gguf_writer_set_u32(w, "n", 7);
    sl_gguf_writer_set_f32(w, "f", 0.5f);
    sl_gguf_writer_set_bool(w, "b", true);
    sl_gguf_writer_set_string(w, "s", "text");
    sl_gguf_writer_set_strings(w, "texts", texts, 3);
    sl_gguf_writer_set_strings(w, "none", NULL, 0);
    sl_gguf_writer_set_array(w, "numbers", SL_GGUF_I64, numbers, 3);
    sl_gguf_writer_add_tensor(w, "scalar", SL_TYPE_F32, NULL, 0);
    assert_ok(sl_gguf_writer_begin_data(w, &err), err);
    assert_ok(sl_gguf_writer_write(w, "\0\0\200\77", 4, &err), err);
    assert_ok(sl_gguf_writer_finish(w, &err), err);
    sl_gguf_writer_destroy(&w);

    struct sl_gguf *file;
    uint32_t n;
    const struct sl_gguf_value *v;
    assert_ok(sl_gguf_open(&file, target, &err), err);
    assert_ok(sl_gguf_get_u32(file, "n", &n, &err), err);
    assert_int_equal(n, 7);
    assert_ok(sl_gguf_get_array(file, "texts", &v, &err), err);
    assert_int_equal(sl_gguf_item_string(file, v, 2).length, 9);
    assert_ok(sl_gguf_get_array(file, "none", &v, &err), err);
    assert_int_equal(v->count, 0);
    assert_ok(sl_gguf_get_array(file, "numbers", &v, &err), err);
    assert_true(sl_gguf_item_int(v, 2) == INT64_MAX && sl_gguf_item_int(v, 0) == -5);
    const struct sl_gguf_tensor *t = sl_gguf_find_tensor(file, "scalar");
    assert_int_equal(t->n_dims, 0);
    assert_true(*(const float *)t->data == 1.0f);
    sl_gguf_close(&file);
    remove(target);
}

/* --------------------------------------------------------------- wrong use */

static const int64_t two[] = {2};

static void twice(struct sl_gguf_writer *w)
{
    sl_gguf_writer_set_u32(w, "key", 1);
    sl_gguf_writer_set_bool(w, "key", true);
    sl_gguf_writer_set_u32(w, "later", 1); /* the first error stays */
}

static void tensor_twice(struct sl_gguf_writer *w)
{
    sl_gguf_writer_add_tensor(w, "t", SL_TYPE_F32, two, 1);
    sl_gguf_writer_add_tensor(w, "t", SL_TYPE_F32, two, 1);
}

static void no_name(struct sl_gguf_writer *w)
{
    sl_gguf_writer_set_u32(w, "", 1);
}

static void long_name(struct sl_gguf_writer *w)
{
    char name[66];
    memset(name, 'n', 65);
    name[65] = '\0';
    sl_gguf_writer_add_tensor(w, name, SL_TYPE_F32, two, 1);
}

static void part_block(struct sl_gguf_writer *w)
{
    sl_gguf_writer_add_tensor(w, "t", SL_TYPE_Q4_0, (const int64_t[]){33}, 1);
}

static void zero_dim(struct sl_gguf_writer *w)
{
    sl_gguf_writer_add_tensor(w, "t", SL_TYPE_F32, (const int64_t[]){4, 0}, 2);
}

static void huge(struct sl_gguf_writer *w)
{
    sl_gguf_writer_add_tensor(w, "t", SL_TYPE_F32,
                              (const int64_t[]){INT64_C(1) << 40, INT64_C(1) << 40}, 2);
}

static void huge_sum(struct sl_gguf_writer *w)
{
    const int64_t dims[] = {INT64_C(1) << 61};
    sl_gguf_writer_add_tensor(w, "a", SL_TYPE_I8, dims, 1);
    sl_gguf_writer_add_tensor(w, "b", SL_TYPE_I8, dims, 1);
    sl_gguf_writer_add_tensor(w, "c", SL_TYPE_I8, dims, 1);
    sl_gguf_writer_add_tensor(w, "d", SL_TYPE_I8, dims, 1);
}

static void no_type(struct sl_gguf_writer *w)
{
    sl_gguf_writer_add_tensor(w, "t", (enum sl_type)4, two, 1);
}

static void alignment(struct sl_gguf_writer *w)
{
    sl_gguf_writer_set_u32(w, "general.alignment", 24);
}

static void late_alignment(struct sl_gguf_writer *w)
{
    sl_gguf_writer_add_tensor(w, "t", SL_TYPE_F32, two, 1);
    sl_gguf_writer_set_u32(w, "general.alignment", 64);
}

static void bad_items(struct sl_gguf_writer *w)
{
    sl_gguf_writer_set_array(w, "a", SL_GGUF_STRING, "", 1);
}

static void test_wrong_use(void **state)
{
    (void)state;
    static const struct {
        void (*use)(struct sl_gguf_writer *w);
        const char *mention;
    } cases[] = {
        {twice, "key 'key' is set twice"},
        {tensor_twice, "tensor 't' is set twice"},
        {no_name, "0 bytes"},
        {long_name, "65 bytes"},
        {part_block, "tensor 't'"},
        {zero_dim, "tensor 't'"},
        {huge, "too large"},
        {huge_sum, "too large"},
        {no_type, "type 4"},
        {alignment, "alignment is 24"},
        {late_alignment, "before the first tensor"},
        {bad_items, "key 'a'"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct sluice_error err = {0};
        struct sl_gguf_writer *w = create();
        cases[i].use(w);
        assert_status(sl_gguf_writer_begin_data(w, &err), INVALID_ARGUMENT);
        assert_mentions(err, cases[i].mention);
        assert_status(sl_gguf_writer_finish(w, &err), INVALID_ARGUMENT);
        sl_gguf_writer_destroy(&w);
        assert_int_equal(n_files(), 0);
        assert_int_equal(sl_mem_n_blocks(), 0);
    }
}

static void test_wrong_order(void **state)
{
    (void)state;
    struct sluice_error err = {0};
    const float data[3] = {0};
    struct sl_gguf_writer *w = create();
    assert_status(sl_gguf_writer_write(w, data, 4, &err), INVALID_ARGUMENT);
    sl_gguf_writer_destroy(&w);

    w = create();
    sl_gguf_writer_add_tensor(w, "t", SL_TYPE_F32, two, 1);
    assert_ok(sl_gguf_writer_begin_data(w, &err), err);
    assert_ok(sl_gguf_writer_write(w, data, 4, &err), err);
    assert_status(sl_gguf_writer_finish(w, &err), INVALID_ARGUMENT);
    assert_mentions(err, "1 of 1 tensors is missing");
    sl_gguf_writer_destroy(&w);

    w = create();
    sl_gguf_writer_add_tensor(w, "t", SL_TYPE_F32, two, 1);
    assert_ok(sl_gguf_writer_begin_data(w, &err), err);
    assert_status(sl_gguf_writer_write(w, data, 12, &err), INVALID_ARGUMENT);
    assert_mentions(err, "4 bytes more");
    sl_gguf_writer_destroy(&w);

    w = create();
    assert_ok(sl_gguf_writer_begin_data(w, &err), err);
    sl_gguf_writer_set_u32(w, "late", 1);
    assert_status(sl_gguf_writer_finish(w, &err), INVALID_ARGUMENT);
    assert_mentions(err, "'late' comes after the data");
    sl_gguf_writer_destroy(&w);
    sl_gguf_writer_destroy(&w); /* nothing to destroy */
    assert_int_equal(n_files(), 0);
}

/* ---------------------------------------------------------------- failures */

static void test_bad_target(void **state)
{
    (void)state;
    struct sluice_error err = {0};
    struct sl_gguf_writer *w;
    assert_status(sl_gguf_writer_create(&w, "no_such_folder/out.gguf", &err), IO);
    assert_mentions(err, "no_such_folder/out.gguf");
    assert_null(w);
    assert_status(sl_gguf_writer_create(&w, "/dev/null", &err), IO);
    assert_mentions(err, "not a regular file");
    assert_status(sl_gguf_writer_create(&w, folder, &err), IO);
    assert_int_equal(sl_mem_n_blocks(), 0);
}

/* A file-size limit stands for a full disk. The file that was there before stays. */
static void test_disk_full(void **state)
{
    (void)state;
    struct sluice_error err = {0};
    assert_ok(sl_file_write(target, "old", 3, &err), err);
    signal(SIGXFSZ, SIG_IGN);
    struct rlimit old;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    const struct rlimit small = {.rlim_cur = 100000, .rlim_max = old.rlim_max};
    struct sl_gguf_writer *w = create();
    const int64_t dims[] = {100000};
    sl_gguf_writer_add_tensor(w, "t", SL_TYPE_F32, dims, 1);
    uint8_t *data = calloc(1, 400000);
    assert_ok(sl_gguf_writer_begin_data(w, &err), err);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    enum sluice_status status = sl_gguf_writer_write(w, data, 400000, &err);
    if (status == SLUICE_STATUS_OK) { /* it may still lie in a buffer */
        status = sl_gguf_writer_finish(w, &err);
    }
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    assert_status(status, IO);
    assert_mentions(err, "out.gguf: cannot write");
    sl_gguf_writer_destroy(&w);
    free(data);
    assert_int_equal(n_files(), 1);
    char *text;
    assert_ok(sl_file_read(target, 0, &text, NULL, &err), err);
    assert_string_equal(text, "old");
    sl_free(text);
    remove(target);
}

static enum sluice_status write_small(struct sluice_error *err)
{
    struct sl_gguf_writer *w;
    enum sluice_status status = sl_gguf_writer_create(&w, target, err);
    if (status == SLUICE_STATUS_OK) {
        sl_gguf_writer_set_string(w, "general.architecture", "test");
        sl_gguf_writer_add_tensor(w, "t", SL_TYPE_F32, two, 1);
        status = sl_gguf_writer_begin_data(w, err);
    }
    if (status == SLUICE_STATUS_OK) {
        status = sl_gguf_writer_write(w, "\0\0\0\0\0\0\0\0", 8, err);
    }
    if (status == SLUICE_STATUS_OK) {
        status = sl_gguf_writer_finish(w, err);
    }
    sl_gguf_writer_destroy(&w);
    return status;
}

static void test_memory_faults(void **state)
{
    (void)state;
    bool fired = true;
    for (int64_t n = 0; fired; n++) {
        struct sluice_error err = {0};
        assert_true(n < 100);
        sl_mem_fail_after(n, false);
        const enum sluice_status status = write_small(&err);
        fired = sl_mem_fault_fired();
        sl_mem_fail_after(-1, false);
        assert_string_equal(sluice_status_name(status), fired ? "OUT_OF_MEMORY" : "OK");
        assert_int_equal(n_files(), fired ? 0 : 1);
        assert_int_equal(sl_mem_n_blocks(), 0);
    }
    remove(target);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_same_bytes),    cmocka_unit_test(test_setters),
        cmocka_unit_test(test_wrong_use),     cmocka_unit_test(test_wrong_order),
        cmocka_unit_test(test_bad_target),    cmocka_unit_test(test_disk_full),
        cmocka_unit_test(test_memory_faults),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
