/* SPDX-License-Identifier: Apache-2.0
 *
 * Files: mapping, reading, writing and the cache folder, with what goes wrong: absent files,
 * folders, pipes, limits, failing memory. Works in a new folder below the current one.
 */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "test.h"

static char folder[] = "test_file.XXXXXX";
static char path_buffer[4][128];

/* A path inside the test's folder; `slot` tells those alive at once apart. */
static const char *path_of(int slot, const char *name)
{
    snprintf(path_buffer[slot], sizeof path_buffer[slot], "%s/%s", folder, name);
    return path_buffer[slot];
}

static int set_up(void **state)
{
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    return system(command);
}

static void test_write_and_map(void **state)
{
    (void)state;
    struct sluice_error err;
    struct sl_file_map map;
    const size_t size = 3 * 4096 + 17;
    char *data = sl_alloc(SL_MEM_BASE, size);
    for (size_t i = 0; i < size; i++) {
        data[i] = (char)(i * 7);
    }
    const char *path = path_of(0, "data");
    assert_ok(sl_file_write(path, "short", 5, &err), err);
    assert_ok(sl_file_write(path, data, size, &err), err); /* replaces */
    assert_true(sl_file_exists(path));
    assert_ok(sl_file_map_init(&map, path, &err), err);
    assert_int_equal(map.size, size);
    assert_memory_equal(map.data, data, size);
    sl_file_map_advise(&map, 0, size);
    sl_file_map_advise(&map, 5000, SIZE_MAX);
    sl_file_map_advise(&map, size, 1);
    sl_file_map_finish(&map);
    assert_null(map.data);
    sl_file_map_finish(&map);
    sl_file_map_finish(NULL);
    sl_free(data);
}

static void test_map_special(void **state)
{
    (void)state;
    struct sluice_error err;
    struct sl_file_map map = {.size = 9};
    const char *path = path_of(0, "absent");
    assert_status(sl_file_map_init(&map, path, &err), IO);
    assert_mentions(err, path);
    assert_int_equal(map.size, 0);
    assert_status(sl_file_map_init(&map, folder, &err), IO);
    assert_mentions(err, "folder");

    path = path_of(0, "pipe");
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_status(sl_file_map_init(&map, path, &err), IO); /* and does not wait for a writer */
    assert_mentions(err, path);

    path = path_of(0, "empty");
    assert_ok(sl_file_write(path, NULL, 0, &err), err);
    assert_ok(sl_file_map_init(&map, path, &err), err);
    assert_null(map.data);
    assert_int_equal(map.size, 0);
    sl_file_map_advise(&map, 0, 1);
    sl_file_map_finish(&map);
}

static void test_read(void **state)
{
    (void)state;
    struct sluice_error err;
    char *text;
    size_t size;
    const char *path = path_of(0, "text");
    assert_ok(sl_file_write(path, "hello", 5, &err), err);
    assert_ok(sl_file_read(path, 0, &text, &size, &err), err);
    assert_string_equal(text, "hello");
    assert_int_equal(size, 5);
    sl_free(text);
    assert_ok(sl_file_read(path, 5, &text, NULL, &err), err); /* just fits */
    sl_free(text);
    assert_status(sl_file_read(path, 4, &text, &size, &err), IO);
    assert_mentions(err, "limit of 4");
    assert_null(text);
    assert_status(sl_file_read(path_of(1, "absent"), 0, &text, &size, &err), IO);
    assert_status(sl_file_read(folder, 0, &text, &size, &err), IO);
    assert_mentions(err, folder);

    path = path_of(0, "empty");
    assert_ok(sl_file_write(path, "", 0, &err), err);
    assert_ok(sl_file_read(path, 0, &text, &size, &err), err);
    assert_string_equal(text, "");
    assert_int_equal(size, 0);
    sl_free(text);
}

/* A pipe has no size beforehand, so the block must grow. */
static void test_read_standard_input(void **state)
{
    (void)state;
    struct sluice_error err;
    char *text;
    size_t size;
    const char *path = path_of(0, "long");
    const size_t length = 300000;
    char *data = sl_calloc(SL_MEM_BASE, length, 1);
    memset(data, 'x', length);
    assert_ok(sl_file_write(path, data, length, &err), err);
    const int saved = dup(STDIN_FILENO);
    assert_non_null(freopen(path, "r", stdin));
    assert_ok(sl_file_read("-", 0, &text, &size, &err), err);
    assert_int_equal(size, length);
    assert_memory_equal(text, data, length);
    sl_free(text);
    dup2(saved, STDIN_FILENO);
    close(saved);
    sl_free(data);
}

static int n_entries(const char *path)
{
    DIR *dir = opendir(path);
    assert_non_null(dir);
    int n = 0;
    while (readdir(dir)) {
        n++;
    }
    closedir(dir);
    return n;
}

static void test_write_failures(void **state)
{
    (void)state;
    struct sluice_error err;
    assert_status(sl_file_write(path_of(0, "no/such/place"), "x", 1, &err), IO);
    assert_mentions(err, "no/such/place");
    const char *taken = path_of(0, "taken");
    assert_int_equal(mkdir(taken, 0700), 0);
    const int before = n_entries(folder);
    assert_status(sl_file_write(taken, "x", 1, &err), IO);
    assert_int_equal(n_entries(folder), before); /* the temporary file is gone */
}

static void test_cache_path(void **state)
{
    (void)state;
    struct sluice_error err;
    struct stat info;
    char *path;
    setenv("SLUICE_CACHE_DIR", path_of(0, "cache/of/mine"), 1);
    assert_ok(sl_file_cache_path("profile.json", &path, &err), err);
    assert_string_equal(path, path_of(1, "cache/of/mine/profile.json"));
    assert_int_equal(stat(path_of(0, "cache/of/mine"), &info), 0);
    assert_true(S_ISDIR(info.st_mode));
    sl_free(path);

    unsetenv("SLUICE_CACHE_DIR");
    setenv("XDG_CACHE_HOME", path_of(0, "xdg"), 1);
    assert_ok(sl_file_cache_path("a", &path, &err), err);
    assert_string_equal(path, path_of(1, "xdg/sluice/a"));
    sl_free(path);

    unsetenv("XDG_CACHE_HOME");
    setenv("HOME", path_of(0, "home"), 1);
    assert_ok(sl_file_cache_path("a", &path, &err), err);
    assert_string_equal(path, path_of(1, "home/.cache/sluice/a"));
    sl_free(path);

    unsetenv("HOME");
    assert_status(sl_file_cache_path("a", &path, &err), IO);
    assert_mentions(err, "SLUICE_CACHE_DIR");

    assert_ok(sl_file_write(path_of(0, "plain"), "x", 1, &err), err);
    setenv("SLUICE_CACHE_DIR", path_of(0, "plain/below"), 1);
    assert_status(sl_file_cache_path("a", &path, &err), IO);
    assert_null(path);
}

/* Every allocation of every call fails once; nothing is left behind. */
static void test_memory_faults(void **state)
{
    (void)state;
    struct sluice_error err;
    const char *path = path_of(0, "faulty");
    setenv("SLUICE_CACHE_DIR", folder, 1);
    assert_ok(sl_file_write(path, "hello", 5, &err), err);
    const size_t blocks = sl_mem_n_blocks();
    bool fired = true;
    for (int n = 0; fired; n++) {
        sl_mem_fail_after(n, false);
        char *text = NULL;
        char *cache = NULL;
        const enum sluice_status a = sl_file_write(path, "hello", 5, &err);
        const enum sluice_status b = sl_file_read(path, 0, &text, NULL, &err);
        const enum sluice_status c = sl_file_cache_path("x", &cache, &err);
        fired = sl_mem_fault_fired();
        sl_mem_fail_after(-1, false);
        const int n_failed = (a == SLUICE_STATUS_OUT_OF_MEMORY) +
                             (b == SLUICE_STATUS_OUT_OF_MEMORY) +
                             (c == SLUICE_STATUS_OUT_OF_MEMORY);
        assert_int_equal(n_failed, fired ? 1 : 0);
        sl_free(text);
        sl_free(cache);
        assert_int_equal(sl_mem_n_blocks(), blocks);
        assert_true(n < 100);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_write_and_map),  cmocka_unit_test(test_map_special),
        cmocka_unit_test(test_read),           cmocka_unit_test(test_read_standard_input),
        cmocka_unit_test(test_write_failures), cmocka_unit_test(test_cache_path),
        cmocka_unit_test(test_memory_faults),
    };
    return cmocka_run_group_tests_name("file", tests, set_up, tear_down);
}
