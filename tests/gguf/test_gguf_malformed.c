/* SPDX-License-Identifier: Apache-2.0
 *
 * Malformed files, all made from one valid small file: cut at every byte, every field set to what
 * it must not be, parts of split models that do not fit, and random damage. Each must give an
 * error that names the file, the key or tensor and the byte; none may crash, hang or leak.
 */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/file.h"
#include "base/mem.h"
#include "gguf/gguf.h"
#include "test.h"

#define PATH "test_gguf_malformed.gguf"

/* ------------------------------------------------------- the valid file */

/* Where the fields are that the cases change. */
enum mark {
    AT_MAGIC,
    AT_VERSION,
    AT_N_TENSORS,
    AT_N_KEYS,
    AT_KEY_LENGTH, /* "general.architecture" */
    AT_KEY_NAME,
    AT_KEY_KIND,
    AT_STRING_LENGTH,
    AT_ALIGN_KIND, /* "general.alignment" */
    AT_ALIGN_VALUE,
    AT_BOOL,              /* "a.bool" */
    AT_NUMBERS_ITEM_KIND, /* "a.numbers": array of u32 */
    AT_NUMBERS_COUNT,
    AT_TEXTS_ITEM_KIND, /* "a.texts": array of strings */
    AT_TEXTS_COUNT,
    AT_TEXTS_LENGTH, /* of its second string */
    AT_BOOLS_NAME,   /* "a.bools" */
    AT_BOOLS,        /* its second item */
    AT_ONE_LENGTH,   /* tensor "t.one" */
    AT_ONE_NAME,
    AT_ONE_N_DIMS,
    AT_ONE_DIM0,
    AT_ONE_DIM1,
    AT_ONE_TYPE,
    AT_ONE_OFFSET,
    AT_TWO_NAME, /* tensor "t.two" */
    AT_TWO_DIM0,
    AT_TWO_TYPE,
    AT_TWO_OFFSET,
    AT_END,
    N_MARKS,
};

struct bytes {
    uint8_t data[2048];
    size_t size;
    size_t marks[N_MARKS];
};

static void put(struct bytes *b, const void *data, size_t bytes)
{
    assert_true(bytes <= sizeof(b->data) - b->size);
    memcpy(b->data + b->size, data, bytes);
    b->size += bytes;
}

static void put_number(struct bytes *b, uint64_t value, size_t bytes)
{
    for (size_t i = 0; i < bytes; i++) {
        const uint8_t byte = (uint8_t)(value >> 8 * i);
        put(b, &byte, 1);
    }
}

static void put_text(struct bytes *b, const char *text)
{
    put_number(b, strlen(text), 8);
    put(b, text, strlen(text));
}

static void mark(struct bytes *b, enum mark m)
{
    b->marks[m] = b->size;
}

static void put_key(struct bytes *b, const char *key, uint32_t kind)
{
    put_text(b, key);
    put_number(b, kind, 4);
}

static void put_keys(struct bytes *b)
{
    mark(b, AT_KEY_LENGTH);
    put_text(b, "general.architecture");
    b->marks[AT_KEY_NAME] = b->marks[AT_KEY_LENGTH] + 8;
    mark(b, AT_KEY_KIND);
    put_number(b, SL_GGUF_STRING, 4);
    mark(b, AT_STRING_LENGTH);
    put_text(b, "llama");
    put_text(b, "general.alignment");
    mark(b, AT_ALIGN_KIND);
    put_number(b, SL_GGUF_U32, 4);
    mark(b, AT_ALIGN_VALUE);
    put_number(b, 32, 4);
    put_key(b, "a.bool", SL_GGUF_BOOL);
    mark(b, AT_BOOL);
    put_number(b, 1, 1);
    put_key(b, "a.numbers", SL_GGUF_ARRAY);
    mark(b, AT_NUMBERS_ITEM_KIND);
    put_number(b, SL_GGUF_U32, 4);
    mark(b, AT_NUMBERS_COUNT);
    put_number(b, 3, 8);
    put(b, "\1\0\0\0\2\0\0\0\3\0\0\0", 12);
    put_key(b, "a.texts", SL_GGUF_ARRAY);
    mark(b, AT_TEXTS_ITEM_KIND);
    put_number(b, SL_GGUF_STRING, 4);
    mark(b, AT_TEXTS_COUNT);
    put_number(b, 2, 8);
    put_text(b, "first");
    mark(b, AT_TEXTS_LENGTH);
    put_text(b, "second");
    b->marks[AT_BOOLS_NAME] = b->size + 8;
    put_key(b, "a.bools", SL_GGUF_ARRAY);
    put_number(b, SL_GGUF_BOOL, 4);
    put_number(b, 2, 8);
    b->marks[AT_BOOLS] = b->size + 1;
    put(b, "\1\0", 2);
}

/* Two tensors: "t.one" F32 [4, 2] at offset 0, "t.two" Q4_0 [64] at offset 32. */
static void build(struct bytes *b)
{
    *b = (struct bytes){0};
    put(b, "GGUF", 4);
    mark(b, AT_VERSION);
    put_number(b, 3, 4);
    mark(b, AT_N_TENSORS);
    put_number(b, 2, 8);
    mark(b, AT_N_KEYS);
    put_number(b, 6, 8);
    put_keys(b);
    mark(b, AT_ONE_LENGTH);
    b->marks[AT_ONE_NAME] = b->size + 8;
    put_text(b, "t.one");
    mark(b, AT_ONE_N_DIMS);
    put_number(b, 2, 4);
    mark(b, AT_ONE_DIM0);
    put_number(b, 4, 8);
    mark(b, AT_ONE_DIM1);
    put_number(b, 2, 8);
    mark(b, AT_ONE_TYPE);
    put_number(b, SL_TYPE_F32, 4);
    mark(b, AT_ONE_OFFSET);
    put_number(b, 0, 8);
    b->marks[AT_TWO_NAME] = b->size + 8;
    put_text(b, "t.two");
    put_number(b, 1, 4);
    mark(b, AT_TWO_DIM0);
    put_number(b, 64, 8);
    mark(b, AT_TWO_TYPE);
    put_number(b, SL_TYPE_Q4_0, 4);
    mark(b, AT_TWO_OFFSET);
    put_number(b, 32, 8);
    while (b->size % 32 != 0) {
        put_number(b, 0, 1);
    }
    for (int i = 0; i < 32 + 36; i++) {
        put_number(b, (uint64_t)i, 1);
    }
    mark(b, AT_END);
}

static void save(const char *path, const void *data, size_t size)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, size, f), size);
    assert_int_equal(fclose(f), 0);
}

static void check_refused(const char *path, const char *what, enum sluice_status wanted,
                          const char *subject, const char *reason)
{
    struct sluice_error err = {0};
    struct sl_gguf *file;
    const enum sluice_status status = sl_gguf_open(&file, path, &err);
    if (status != wanted || file != NULL) {
        fail_msg("%s: %s (%s)", what, sluice_status_name(status), err.message);
    }
    const char *const needed[] = {"test_gguf_malformed", subject, reason};
    for (size_t i = 0; i < 3; i++) {
        if (strstr(err.message, needed[i]) == NULL) {
            fail_msg("%s: message lacks \"%s\": %s", what, needed[i], err.message);
        }
    }
    assert_int_equal(sl_mem_n_blocks(), 0);
}

static void test_valid(void **state)
{
    (void)state;
    struct bytes b;
    struct sluice_error err = {0};
    struct sl_gguf *file;
    build(&b);
    save(PATH, b.data, b.size);
    assert_ok(sl_gguf_open(&file, PATH, &err), err);
    assert_int_equal(sl_gguf_n_tensors(file), 2);
    assert_int_equal(sl_gguf_n_values(file), 6);
    sl_gguf_close(&file);
}

static void test_truncated(void **state)
{
    (void)state;
    struct bytes b;
    build(&b);
    for (size_t size = 0; size < b.size; size++) {
        char what[32];
        snprintf(what, sizeof(what), "cut at %zu", size);
        save(PATH, b.data, size);
        check_refused(PATH, what, SLUICE_STATUS_FORMAT, ", byte ", "");
    }
}

/* ------------------------------------------------------------- the cases */

struct patch {
    enum mark at;
    uint64_t value;
    size_t bytes; /* of the value; 0: `text` instead */
    const char *text;
};

static const struct {
    const char *what;
    struct patch patch[2]; /* the second may be empty */
    enum sluice_status status;
    const char *subject;
    const char *reason;
    enum mark where; /* the byte that the message must name; N_MARKS: not checked */
} cases[] = {
#define KEY_ARCH "key 'general.architecture'"
#define ONE "tensor 't.one'"
#define TWO "tensor 't.two'"
#define F SLUICE_STATUS_FORMAT
#define U SLUICE_STATUS_UNSUPPORTED
    {"magic", {{AT_MAGIC, 0, 0, "GGUX"}}, F, "header", "not a GGUF file", AT_MAGIC},
    {"older format", {{AT_MAGIC, 0, 0, "tjgg"}}, F, "header", "not a GGUF file", AT_MAGIC},
    {"version 0", {{AT_VERSION, 0, 4, NULL}}, U, "header", "version 0", AT_VERSION},
    {"version 1", {{AT_VERSION, 1, 4, NULL}}, U, "header", "version 1", AT_VERSION},
    {"version 4", {{AT_VERSION, 4, 4, NULL}}, U, "header", "version 4", AT_VERSION},
    {"big-endian", {{AT_VERSION, 0x03000000, 4, NULL}}, U, "header", "big-endian", AT_VERSION},
    {"tensor count huge",
     {{AT_N_TENSORS, UINT64_MAX, 8, NULL}},
     F,
     "header",
     "number of tensors",
     AT_N_TENSORS},
    {"tensor count large",
     {{AT_N_TENSORS, 1000, 8, NULL}},
     F,
     "header",
     "number of tensors",
     AT_N_TENSORS},
    {"one tensor too many", {{AT_N_TENSORS, 3, 8, NULL}}, F, "tensor number 2", "", N_MARKS},
    {"key count huge",
     {{AT_N_KEYS, UINT64_MAX, 8, NULL}},
     F,
     "header",
     "number of keys",
     AT_N_KEYS},
    {"key count wraps",
     {{AT_N_KEYS, UINT64_C(1) << 61, 8, NULL}},
     F,
     "header",
     "number of keys",
     AT_N_KEYS},
    {"one key too many",
     {{AT_N_KEYS, 7, 8, NULL}},
     F,
     "tensor number 0",
     "the tensor's name has",
     N_MARKS},
    {"key length huge",
     {{AT_KEY_LENGTH, UINT64_MAX, 8, NULL}},
     F,
     "key number 0",
     "18446744073709551615 bytes",
     AT_KEY_LENGTH},
    {"key length over the limit",
     {{AT_KEY_LENGTH, 65536, 8, NULL}},
     F,
     "key number 0",
     "65536 bytes",
     AT_KEY_LENGTH},
    {"key length past the end",
     {{AT_KEY_LENGTH, 60000, 8, NULL}},
     F,
     "key number 0",
     "the file ends",
     AT_KEY_NAME},
    {"key empty", {{AT_KEY_LENGTH, 0, 8, NULL}}, F, "key number 0", "0 bytes", AT_KEY_LENGTH},
    {"key with a zero byte",
     {{AT_KEY_NAME, 0, 1, NULL}},
     F,
     "key number 0",
     "zero byte",
     AT_KEY_LENGTH},
    {"key twice", {{AT_BOOLS_NAME, 0, 0, "a.texts"}}, F, "key 'a.texts'", "occurs twice", N_MARKS},
    {"key with control bytes",
     {{AT_BOOLS_NAME, 0, 0, "\x1b[31m'\n"}, {AT_BOOLS, 2, 1, NULL}},
     F,
     "key '\\x1b[31m\\x27\\x0a'",
     "bool is 2",
     AT_BOOLS},
    {"kind unknown", {{AT_KEY_KIND, 13, 4, NULL}}, F, KEY_ARCH, "unknown kind 13", AT_KEY_KIND},
    {"kind huge", {{AT_KEY_KIND, UINT32_MAX, 4, NULL}}, F, KEY_ARCH, "unknown kind", AT_KEY_KIND},
    {"string length huge",
     {{AT_STRING_LENGTH, UINT64_MAX, 8, NULL}},
     F,
     KEY_ARCH,
     "the file ends",
     N_MARKS},
    {"string length wraps",
     {{AT_STRING_LENGTH, UINT64_MAX - 7, 8, NULL}},
     F,
     KEY_ARCH,
     "the file ends",
     N_MARKS},
    {"string length past the end",
     {{AT_STRING_LENGTH, 5000, 8, NULL}},
     F,
     KEY_ARCH,
     "the file ends",
     N_MARKS},
    {"alignment 0",
     {{AT_ALIGN_VALUE, 0, 4, NULL}},
     F,
     "key 'general.alignment'",
     "alignment is 0",
     AT_ALIGN_VALUE},
    {"alignment 3",
     {{AT_ALIGN_VALUE, 3, 4, NULL}},
     F,
     "key 'general.alignment'",
     "alignment is 3",
     AT_ALIGN_VALUE},
    {"alignment 4",
     {{AT_ALIGN_VALUE, 4, 4, NULL}},
     F,
     "key 'general.alignment'",
     "alignment is 4",
     AT_ALIGN_VALUE},
    {"alignment 48",
     {{AT_ALIGN_VALUE, 48, 4, NULL}},
     F,
     "key 'general.alignment'",
     "alignment is 48",
     AT_ALIGN_VALUE},
    {"alignment 2^31",
     {{AT_ALIGN_VALUE, UINT32_C(1) << 31, 4, NULL}},
     F,
     TWO,
     "no multiple",
     AT_TWO_OFFSET},
    {"alignment of another kind",
     {{AT_ALIGN_KIND, SL_GGUF_F32, 4, NULL}},
     F,
     "key 'general.alignment'",
     "not an integer",
     AT_ALIGN_VALUE},
    {"alignment negative",
     {{AT_ALIGN_KIND, SL_GGUF_I32, 4, NULL}, {AT_ALIGN_VALUE, UINT32_MAX, 4, NULL}},
     F,
     "key 'general.alignment'",
     "is -1",
     AT_ALIGN_VALUE},
    {"bool of 2", {{AT_BOOL, 2, 1, NULL}}, F, "key 'a.bool'", "bool is 2", AT_BOOL},
    {"bool in an array", {{AT_BOOLS, 255, 1, NULL}}, F, "key 'a.bools'", "bool is 255", AT_BOOLS},
    {"array of arrays",
     {{AT_NUMBERS_ITEM_KIND, SL_GGUF_ARRAY, 4, NULL}},
     U,
     "key 'a.numbers'",
     "arrays of arrays",
     AT_NUMBERS_ITEM_KIND},
    {"item kind unknown",
     {{AT_NUMBERS_ITEM_KIND, 99, 4, NULL}},
     F,
     "key 'a.numbers'",
     "unknown kind 99",
     AT_NUMBERS_ITEM_KIND},
    {"array length huge",
     {{AT_NUMBERS_COUNT, UINT64_MAX, 8, NULL}},
     F,
     "key 'a.numbers'",
     "more than the file can hold",
     N_MARKS},
    {"array bytes wrap",
     {{AT_NUMBERS_COUNT, (UINT64_C(1) << 62) + 3, 8, NULL}},
     F,
     "key 'a.numbers'",
     "more than the file can hold",
     N_MARKS},
    {"array past the end",
     {{AT_NUMBERS_COUNT, 4000, 8, NULL}},
     F,
     "key 'a.numbers'",
     "the file ends",
     N_MARKS},
    {"string array length huge",
     {{AT_TEXTS_COUNT, UINT64_MAX, 8, NULL}},
     F,
     "key 'a.texts'",
     "more than the file can hold",
     N_MARKS},
    {"string array index wraps",
     {{AT_TEXTS_COUNT, UINT64_C(1) << 61, 8, NULL}},
     F,
     "key 'a.texts'",
     "more than the file can hold",
     N_MARKS},
    {"string array too long", {{AT_TEXTS_COUNT, 40, 8, NULL}}, F, "key 'a.texts'", "", N_MARKS},
    {"string in an array huge",
     {{AT_TEXTS_LENGTH, UINT64_MAX - 3, 8, NULL}},
     F,
     "key 'a.texts'",
     "the file ends",
     N_MARKS},
    {"tensor name empty",
     {{AT_ONE_LENGTH, 0, 8, NULL}},
     F,
     "tensor number 0",
     "0 bytes",
     AT_ONE_LENGTH},
    {"tensor name too long",
     {{AT_ONE_LENGTH, 65, 8, NULL}},
     F,
     "tensor number 0",
     "65 bytes",
     AT_ONE_LENGTH},
    {"tensor name huge",
     {{AT_ONE_LENGTH, UINT64_MAX, 8, NULL}},
     F,
     "tensor number 0",
     "bytes",
     AT_ONE_LENGTH},
    {"tensor name with a zero byte",
     {{AT_ONE_NAME, 0, 1, NULL}},
     F,
     "tensor number 0",
     "zero byte",
     AT_ONE_LENGTH},
    {"tensor twice", {{AT_TWO_NAME, 0, 0, "t.one"}}, F, ONE, "occurs twice", N_MARKS},
    {"five dimensions", {{AT_ONE_N_DIMS, 5, 4, NULL}}, F, ONE, "5 dimensions", AT_ONE_N_DIMS},
    {"dimensions huge",
     {{AT_ONE_N_DIMS, UINT32_MAX, 4, NULL}},
     F,
     ONE,
     "dimensions",
     AT_ONE_N_DIMS},
    {"dimension 0", {{AT_ONE_DIM1, 0, 8, NULL}}, F, ONE, "dimension 1 is 0", AT_ONE_DIM1},
    {"dimension negative",
     {{AT_ONE_DIM0, UINT64_MAX, 8, NULL}},
     F,
     ONE,
     "dimension 0 is",
     AT_ONE_DIM0},
    {"product overflows",
     {{AT_ONE_DIM0, UINT64_C(1) << 32, 8, NULL}, {AT_ONE_DIM1, UINT64_C(1) << 31, 8, NULL}},
     F,
     ONE,
     "overflows",
     AT_ONE_DIM1},
    {"bytes overflow", {{AT_ONE_DIM0, UINT64_C(1) << 61, 8, NULL}}, F, ONE, "overflows", N_MARKS},
    {"tensor past the end",
     {{AT_TWO_DIM0, 96, 8, NULL}},
     F,
     TWO,
     "the file ends inside its data",
     AT_END},
    {"tensor far past the end",
     {{AT_TWO_DIM0, UINT64_C(1) << 40, 8, NULL}},
     F,
     TWO,
     "the file ends inside its data",
     AT_END},
    {"row of part blocks",
     {{AT_TWO_DIM0, 63, 8, NULL}},
     F,
     TWO,
     "no whole number of Q4_0 blocks",
     AT_TWO_TYPE},
    {"type unknown", {{AT_ONE_TYPE, 63, 4, NULL}}, U, ONE, "type 63 is not known", AT_ONE_TYPE},
    {"type huge", {{AT_ONE_TYPE, UINT32_MAX, 4, NULL}}, U, ONE, "is not known", AT_ONE_TYPE},
    {"type retired", {{AT_ONE_TYPE, 4, 4, NULL}}, U, ONE, "type 4 (Q4_2) is retired", AT_ONE_TYPE},
    {"type of repacked rows",
     {{AT_TWO_TYPE, 31, 4, NULL}},
     U,
     TWO,
     "(Q4_0_4_4) is retired",
     AT_TWO_TYPE},
    {"offset off alignment",
     {{AT_TWO_OFFSET, 33, 8, NULL}},
     F,
     TWO,
     "offset 33 is no multiple",
     AT_TWO_OFFSET},
    {"offset past the end",
     {{AT_TWO_OFFSET, 64, 8, NULL}},
     F,
     TWO,
     "the file ends inside its data",
     AT_END},
    {"offset huge",
     {{AT_TWO_OFFSET, UINT64_MAX - 31, 8, NULL}},
     F,
     TWO,
     "the file ends inside its data",
     AT_END},
    {"tensors overlap", {{AT_TWO_OFFSET, 0, 8, NULL}}, F, "tensor 't.", "overlaps", N_MARKS},
    {"tensors overlap, out of order",
     {{AT_ONE_OFFSET, 32, 8, NULL}, {AT_TWO_OFFSET, 0, 8, NULL}},
     F,
     ONE,
     "overlaps that of tensor 't.two'",
     N_MARKS},
#undef KEY_ARCH
#undef ONE
#undef TWO
#undef F
#undef U
};

static void apply(struct bytes *b, const struct patch *p)
{
    const size_t at = b->marks[p->at];
    for (size_t i = 0; i < p->bytes; i++) {
        b->data[at + i] = (uint8_t)(p->value >> 8 * i);
    }
    if (p->text != NULL) {
        memcpy(b->data + at, p->text, strlen(p->text));
    }
}

static void test_fields(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct bytes b;
        build(&b);
        apply(&b, &cases[i].patch[0]);
        apply(&b, &cases[i].patch[1]);
        save(PATH, b.data, b.size);
        char where[40] = ", byte ";
        if (cases[i].where != N_MARKS) {
            snprintf(where, sizeof(where), ", byte %zu: ", b.marks[cases[i].where]);
        }
        check_refused(PATH, cases[i].what, cases[i].status, cases[i].subject, cases[i].reason);
        check_refused(PATH, cases[i].what, cases[i].status, where, "");
    }
}

/* Damage of one to three bytes anywhere in the header: refused, or opened with everything inside
 * the file. */
static void test_random_damage(void **state)
{
    (void)state;
    struct bytes valid;
    build(&valid);
    save(PATH, valid.data, valid.size);
    const int fd = open(PATH, O_WRONLY); /* kept open: rewriting in place is much faster */
    assert_true(fd >= 0);
    uint64_t random = 12345;
    size_t n_opened = 0;
    for (int round = 0; round < 20000; round++) {
        struct bytes b = valid;
        for (int i = 0; i <= round % 3; i++) {
            random = random * 6364136223846793005u + 1442695040888963407u;
            b.data[(random >> 33) % b.size] = (uint8_t)(random >> 24);
        }
        assert_int_equal(pwrite(fd, b.data, b.size, 0), b.size);
        struct sluice_error err = {0};
        struct sl_gguf *file;
        if (sl_gguf_open(&file, PATH, &err) == SLUICE_STATUS_OK) {
            n_opened++;
            for (size_t i = 0; i < sl_gguf_n_tensors(file); i++) {
                const struct sl_gguf_tensor *t = sl_gguf_tensor(file, i);
                assert_true(t->file_offset + t->bytes <= b.size);
            }
            for (size_t i = 0; i < sl_gguf_n_values(file); i++) {
                const struct sl_gguf_value *v = sl_gguf_value(file, i);
                for (uint64_t j = 0; v->item_kind == SL_GGUF_STRING && j < v->count; j++) {
                    const struct sl_gguf_string s = sl_gguf_item_string(file, v, j);
                    assert_true(s.length <= b.size);
                }
            }
        } else {
            assert_true(err.message[0] != '\0');
        }
        sl_gguf_close(&file);
        assert_int_equal(sl_mem_n_blocks(), 0);
    }
    close(fd);
    assert_true(n_opened > 0);
}

static void test_no_file(void **state)
{
    (void)state;
    check_refused("test_gguf_malformed.absent", "absent", SLUICE_STATUS_IO, "absent", "");
    save("test_gguf_malformed.empty", "", 0);
    check_refused("test_gguf_malformed.empty", "empty", SLUICE_STATUS_FORMAT, "header, byte 0",
                  "ends after 0");
    remove("test_gguf_malformed.empty");
}

/* ----------------------------------------------------------- split models */

/* A part: number, count and tensor count (0: no such key), and one tensor. */
static void save_part(const char *path, uint32_t number, uint32_t count, uint32_t n_tensors,
                      const char *tensor)
{
    struct bytes b = {0};
    put(&b, "GGUF", 4);
    put_number(&b, 3, 4);
    put_number(&b, 1, 8);
    put_number(&b, (count != 0 ? 2 : 0) + (n_tensors != 0 ? 1 : 0), 8);
    if (count != 0) {
        put_key(&b, "split.no", SL_GGUF_U16);
        put_number(&b, number, 2);
        put_key(&b, "split.count", SL_GGUF_U16);
        put_number(&b, count, 2);
    }
    if (n_tensors != 0) {
        put_key(&b, "split.tensors.count", SL_GGUF_I32);
        put_number(&b, n_tensors, 4);
    }
    put_text(&b, tensor);
    put_number(&b, 1, 4);
    put_number(&b, 8, 8);
    put_number(&b, SL_TYPE_F32, 4);
    put_number(&b, 0, 8);
    while (b.size % 32 != 0) {
        put_number(&b, 0, 1);
    }
    for (int i = 0; i < 32; i++) {
        put_number(&b, 0, 1);
    }
    save(path, b.data, b.size);
}

#define PART1 "test_gguf_malformed-00001-of-00002.gguf"
#define PART2 "test_gguf_malformed-00002-of-00002.gguf"

static void test_split(void **state)
{
    (void)state;
    struct sluice_error err = {0};
    struct sl_gguf *file;
    save_part(PART1, 0, 2, 2, "t.one");
    save_part(PART2, 1, 2, 0, "t.two");
    assert_ok(sl_gguf_open(&file, PART1, &err), err);
    assert_int_equal(sl_gguf_n_tensors(file), 2);
    sl_gguf_close(&file);
    check_refused(PART2, "second part given", SLUICE_STATUS_FORMAT, "'split.no', byte ",
                  "give the first part");
}

static void test_split_broken(void **state)
{
    (void)state;
    const enum sluice_status f = SLUICE_STATUS_FORMAT;
    save_part(PART1, 0, 2, 2, "t.one");
    remove(PART2);
    check_refused(PART1, "part missing", SLUICE_STATUS_IO, "part 2 of 2", "00002-of-00002");
    save_part(PART2, 0, 2, 0, "t.two");
    check_refused(PART1, "wrong number", f, "'split.no', byte ", "is 0, but part 1 was expected");
    save_part(PART2, 1, 3, 0, "t.two");
    check_refused(PART1, "other count", f, "'split.count', byte ", "is 3, but the model has 2");
    save_part(PART2, 0, 0, 0, "t.two");
    check_refused(PART1, "no split keys", f, "'split.count'", "00002-of-00002");
    save_part(PART2, 1, 2, 0, "t.one");
    check_refused(PART1, "tensor twice", f, "tensor 't.one'", "occurs twice");
    save_part(PART1, 0, 2, 5, "t.one");
    save_part(PART2, 1, 2, 0, "t.two");
    check_refused(PART1, "tensors missing", f, "'split.tensors.count', byte ",
                  "is 5, but the parts hold 2");
    save_part(PATH, 0, 2, 2, "t.one");
    check_refused(PATH, "name without numbers", f, "'split.count', byte ", "must end in");
    save_part(PART1, 0, 3, 3, "t.one");
    check_refused(PART1, "name with another count", f, "'split.count', byte ", "must end in");
    remove(PART1);
    remove(PART2);
}

static int clean_up(void **state)
{
    (void)state;
    remove(PATH);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_valid),        cmocka_unit_test(test_truncated),
        cmocka_unit_test(test_fields),       cmocka_unit_test(test_random_damage),
        cmocka_unit_test(test_no_file),      cmocka_unit_test(test_split),
        cmocka_unit_test(test_split_broken),
    };
    return cmocka_run_group_tests(tests, NULL, clean_up);
}
