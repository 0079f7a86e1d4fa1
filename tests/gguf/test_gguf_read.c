/* SPDX-License-Identifier: Apache-2.0
 *
 * Reading files that another program wrote: every kind of value, every type of tensor, alignments,
 * versions and split models are listed as that program's own reader lists them
 * (tools/fixtures/gguf_files.py). Then the typed getters, and a rewrite that must give the same
 * bytes.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "gguf/gguf.h"
#include "gguf/gguf_writer.h"
#include "test.h"

#define FOLDER SLUICE_FIXTURES "/gguf/"

static uint32_t crc32(const uint8_t *data, size_t bytes)
{
    uint32_t crc = 0xffffffff;
    for (size_t i = 0; i < bytes; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++) {
            crc = crc >> 1 ^ ((crc & 1) != 0 ? 0xedb88320 : 0);
        }
    }
    return ~crc;
}

static void list_item(FILE *out, const struct sl_gguf *file, const struct sl_gguf_value *value,
                      uint64_t i)
{
    if (value->item_kind == SL_GGUF_STRING) {
        const struct sl_gguf_string text = sl_gguf_item_string(file, value, i);
        for (size_t j = 0; j < text.length; j++) {
            fprintf(out, "%02x", (unsigned char)text.data[j]);
        }
        fputs(text.length == 0 ? "-" : "", out);
    } else if (value->item_kind == SL_GGUF_F32) {
        const float f = (float)sl_gguf_item_number(value, i);
        uint32_t bits;
        memcpy(&bits, &f, sizeof(bits));
        fprintf(out, "%08" PRIx32, bits);
    } else if (value->item_kind == SL_GGUF_F64) {
        const double f = sl_gguf_item_number(value, i);
        uint64_t bits;
        memcpy(&bits, &f, sizeof(bits));
        fprintf(out, "%016" PRIx64, bits);
    } else if (value->item_kind == SL_GGUF_U64 && sl_gguf_item_int(value, i) == INT64_MAX) {
        fprintf(out, "%.0f", sl_gguf_item_number(value, i) - 1); /* 2^64 - 1 rounds up */
    } else {
        fprintf(out, "%" PRId64, sl_gguf_item_int(value, i));
    }
}

static void list_file(FILE *out, const struct sl_gguf *file)
{
    fprintf(out, "version %u alignment %u\n", sl_gguf_version(file), sl_gguf_alignment(file));
    for (size_t i = 0; i < sl_gguf_n_values(file); i++) {
        const struct sl_gguf_value *value = sl_gguf_value(file, i);
        assert_ptr_equal(value, sl_gguf_find(file, sl_gguf_key(file, i)));
        fprintf(out, "key %s %s", sl_gguf_key(file, i), sl_gguf_kind_name(value->kind));
        if (value->kind == SL_GGUF_ARRAY) {
            fprintf(out, " %s %" PRIu64, sl_gguf_kind_name(value->item_kind), value->count);
        }
        for (uint64_t j = 0; j < value->count; j++) {
            fputc(' ', out);
            list_item(out, file, value, j);
        }
        fputc('\n', out);
    }
    for (size_t i = 0; i < sl_gguf_n_tensors(file); i++) {
        const struct sl_gguf_tensor *t = sl_gguf_tensor(file, i);
        assert_ptr_equal(t, sl_gguf_find_tensor(file, t->name));
        fprintf(out, "tensor %s %s ", t->name, sl_type_name((uint32_t)t->type));
        for (uint32_t j = 0; j < t->n_dims; j++) {
            fprintf(out, "%s%" PRId64, j > 0 ? "x" : "", t->dims[j]);
        }
        fprintf(out, " %zu %u %08x\n", t->bytes, t->file_index, crc32(t->data, t->bytes));
    }
}

/* 2^64 - 1 is no double: the listing's own digits for it. */
static char *listing_of(const struct sl_gguf *file)
{
    char *text = NULL;
    size_t bytes;
    FILE *out = open_memstream(&text, &bytes);
    assert_non_null(out);
    list_file(out, file);
    fclose(out);
    for (char *p = text; (p = strstr(p, "18446744073709551616")) != NULL;) {
        p[19] = '5';
    }
    return text;
}

static void check_listing(const char *name, const char *path)
{
    struct sluice_error err = {0};
    struct sl_gguf *file;
    char expected_path[512];
    snprintf(expected_path, sizeof(expected_path), FOLDER "%s.txt", name);
    assert_ok(sl_gguf_open(&file, path, &err), err);
    char *expected;
    assert_ok(sl_file_read(expected_path, 0, &expected, NULL, &err), err);
    char *found = listing_of(file);
    assert_string_equal(found, expected);
    free(found);
    sl_free(expected);
    sl_gguf_close(&file);
    assert_null(file);
}

static void test_listings(void **state)
{
    (void)state;
    check_listing("every_type", FOLDER "every_type.gguf");
    check_listing("shapes", FOLDER "shapes.gguf");
    check_listing("version2", FOLDER "version2.gguf");
    check_listing("split", FOLDER "split-00001-of-00003.gguf");
    check_listing("small", FOLDER "small-00001-of-00004.gguf");
    assert_int_equal(sl_mem_n_blocks(), 0);
}

static void test_parts(void **state)
{
    (void)state;
    struct sluice_error err = {0};
    struct sl_gguf *file;
    assert_ok(sl_gguf_open(&file, FOLDER "split-00001-of-00003.gguf", &err), err);
    assert_int_equal(sl_gguf_n_files(file), 3);
    assert_non_null(strstr(sl_gguf_path(file, 2), "split-00003-of-00003.gguf"));
    for (size_t i = 0; i < sl_gguf_n_tensors(file); i++) {
        const struct sl_gguf_tensor *t = sl_gguf_tensor(file, i);
        size_t bytes;
        const uint8_t *base = sl_gguf_mapping(file, t->file_index, &bytes);
        assert_int_equal(bytes, sl_gguf_file_bytes(file, t->file_index));
        assert_ptr_equal(t->data, base + t->file_offset);
        assert_true(t->file_offset + t->bytes <= bytes);
        assert_int_equal((uintptr_t)t->data % sl_gguf_alignment(file), 0);
    }
    assert_null(sl_gguf_find_tensor(file, "part.9"));
    assert_null(sl_gguf_find_tensor(file, ""));
    assert_null(sl_gguf_find(file, "split.nothing"));
    sl_gguf_close(&file);
    sl_gguf_close(&file); /* closing nothing is fine */
}

/* ----------------------------------------------------------------- getters */

static struct sl_gguf *open_every_type(void)
{
    struct sluice_error err = {0};
    struct sl_gguf *file;
    assert_ok(sl_gguf_open(&file, FOLDER "every_type.gguf", &err), err);
    return file;
}

static void test_get_u32(void **state)
{
    (void)state;
    struct sluice_error err = {0};
    struct sl_gguf *file = open_every_type();
    static const struct {
        const char *key;
        uint32_t value;
    } good[] = {
        {"test.u8.most", 255},    {"test.i8.most", 127},         {"test.u16.most", 65535},
        {"test.i16.most", 32767}, {"test.u32.most", UINT32_MAX}, {"test.i32.most", INT32_MAX},
        {"test.u64.least", 0},    {"test.bool.true", 1},         {"test.bool.false", 0},
    };
    for (size_t i = 0; i < sizeof(good) / sizeof(good[0]); i++) {
        uint32_t v;
        assert_ok(sl_gguf_get_u32(file, good[i].key, &v, &err), err);
        assert_int_equal(v, good[i].value);
    }
    static const struct {
        const char *key;
        const char *mention;
    } bad[] = {
        {"test.i8.least", "is -128 "},
        {"test.i64.least", "is -9223372036854775808 "},
        {"test.u64.most", "is 18446744073709551615 "},
        {"test.i64.most", "is 9223372036854775807 "},
        {"test.f32", "is f32, not an integer"},
        {"test.string", "is string, not an integer"},
        {"test.u8.array", "is array, not an integer"},
        {"test.missing", "key 'test.missing' is missing"},
    };
    for (size_t i = 0; i < sizeof(bad) / sizeof(bad[0]); i++) {
        uint32_t v = 7;
        assert_status(sl_gguf_get_u32(file, bad[i].key, &v, &err), FORMAT);
        assert_mentions(err, bad[i].mention);
        assert_mentions(err, bad[i].key);
        assert_mentions(err, "every_type.gguf");
        assert_int_equal(v, 0);
    }
    sl_gguf_close(&file);
}

static void test_get_others(void **state)
{
    (void)state;
    struct sluice_error err = {0};
    struct sl_gguf *file = open_every_type();
    float f;
    bool b;
    struct sl_gguf_string s;
    const struct sl_gguf_value *a;
    assert_ok(sl_gguf_get_f32(file, "test.f32", &f, &err), err);
    assert_true(f == -1234.5678f);
    assert_ok(sl_gguf_get_f32(file, "test.f64", &f, &err), err);
    assert_true(f == -1234.5678f);
    assert_ok(sl_gguf_get_f32(file, "test.i8.least", &f, &err), err);
    assert_true(f == -128.0f);
    assert_status(sl_gguf_get_f32(file, "test.string", &f, &err), FORMAT);
    assert_mentions(err, "'test.string', byte ");
    assert_ok(sl_gguf_get_bool(file, "test.bool.true", &b, &err), err);
    assert_true(b);
    assert_status(sl_gguf_get_bool(file, "test.u8.most", &b, &err), FORMAT);
    assert_mentions(err, "is u8, not bool");
    assert_ok(sl_gguf_get_string(file, "test.string.bytes", &s, &err), err);
    assert_int_equal(s.length, 3);
    assert_memory_equal(s.data, "\xff\x00\xfe", 3);
    assert_status(sl_gguf_get_string(file, "test.string.array", &s, &err), FORMAT);
    assert_ok(sl_gguf_get_array(file, "test.string.array", &a, &err), err);
    assert_int_equal(a->count, 5);
    assert_int_equal(sl_gguf_item_string(file, a, 4).length, 300);
    assert_status(sl_gguf_get_array(file, "test.string", &a, &err), FORMAT);
    assert_mentions(err, "is string, not an array");
    assert_null(a);
    assert_ok(sl_gguf_get_array(file, "test.f32.array", &a, &err), err);
    assert_int_equal(sl_gguf_item_int(a, 3), INT64_MAX); /* infinity is cut */
    sl_gguf_close(&file);
}

/* ----------------------------------------------------------------- rewrite */

/* Copy a file through the writer; what was read must be written back byte for byte. */
static void rewrite(const char *path, const char *copy)
{
    struct sluice_error err = {0};
    struct sl_gguf *file;
    struct sl_gguf_writer *w;
    assert_ok(sl_gguf_open(&file, path, &err), err);
    assert_ok(sl_gguf_writer_create(&w, copy, &err), err);
    for (size_t i = 0; i < sl_gguf_n_values(file); i++) {
        sl_gguf_writer_set_value(w, sl_gguf_key(file, i), file, sl_gguf_value(file, i));
    }
    for (size_t i = 0; i < sl_gguf_n_tensors(file); i++) {
        const struct sl_gguf_tensor *t = sl_gguf_tensor(file, i);
        sl_gguf_writer_add_tensor(w, t->name, t->type, t->dims, t->n_dims);
    }
    assert_ok(sl_gguf_writer_begin_data(w, &err), err);
    for (size_t i = 0; i < sl_gguf_n_tensors(file); i++) {
        const struct sl_gguf_tensor *t = sl_gguf_tensor(file, i);
        assert_ok(sl_gguf_writer_write(w, t->data, t->bytes / 3, &err), err);
        assert_ok(sl_gguf_writer_write(w, (const uint8_t *)t->data + t->bytes / 3,
                                       t->bytes - t->bytes / 3, &err),
                  err);
    }
    assert_ok(sl_gguf_writer_finish(w, &err), err);
    sl_gguf_writer_destroy(&w);
    size_t bytes;
    const void *original = sl_gguf_mapping(file, 0, &bytes);
    struct sl_file_map map;
    assert_ok(sl_file_map_init(&map, copy, &err), err);
    assert_int_equal(map.size, bytes);
    assert_memory_equal(map.data, original, bytes);
    sl_file_map_finish(&map);
    sl_gguf_close(&file);
    assert_int_equal(remove(copy), 0);
}

static void test_rewrite(void **state)
{
    (void)state;
    rewrite(FOLDER "every_type.gguf", "test_gguf_read.copy.gguf");
    rewrite(FOLDER "shapes.gguf", "test_gguf_read.copy.gguf");
    assert_int_equal(sl_mem_n_blocks(), 0);
}

/* For N = 0, 1, ...: the N-th allocation fails. Opening must say so and leave nothing, until no
 * fault fires. */
static void test_memory_faults(void **state)
{
    (void)state;
    static const char *const paths[] = {FOLDER "every_type.gguf",
                                        FOLDER "split-00001-of-00003.gguf"};
    for (size_t p = 0; p < 2; p++) {
        for (int sticky = 0; sticky < 2; sticky++) {
            bool fired = true;
            for (int64_t n = 0; fired; n++) {
                struct sluice_error err = {0};
                struct sl_gguf *file;
                assert_true(n < 1000);
                sl_mem_fail_after(n, sticky != 0);
                const enum sluice_status status = sl_gguf_open(&file, paths[p], &err);
                fired = sl_mem_fault_fired();
                sl_mem_fail_after(-1, false);
                if (fired) {
                    assert_status(status, OUT_OF_MEMORY);
                    assert_null(file);
                } else {
                    assert_ok(status, err);
                }
                sl_gguf_close(&file);
                assert_int_equal(sl_mem_n_blocks(), 0);
            }
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_listings), cmocka_unit_test(test_parts),
        cmocka_unit_test(test_get_u32),  cmocka_unit_test(test_get_others),
        cmocka_unit_test(test_rewrite),  cmocka_unit_test(test_memory_faults),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
