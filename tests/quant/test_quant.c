/* SPDX-License-Identifier: Apache-2.0
 *
 * Block formats: unpacking is bit-exact against the gguf package (fixtures/quant), packing stays
 * within the step that its format has, and the table of types is sound.
 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/file.h"
#include "base/mem.h"
#include "quant/blocks.h"
#include "quant/type.h"
#include "test.h"

static const enum sl_type computing[] = {
    SL_TYPE_F32,  SL_TYPE_F16,    SL_TYPE_BF16,   SL_TYPE_Q4_0,  SL_TYPE_Q4_1, SL_TYPE_Q5_0,
    SL_TYPE_Q5_1, SL_TYPE_Q8_0,   SL_TYPE_Q2_K,   SL_TYPE_Q3_K,  SL_TYPE_Q4_K, SL_TYPE_Q5_K,
    SL_TYPE_Q6_K, SL_TYPE_IQ4_NL, SL_TYPE_IQ4_XS, SL_TYPE_MXFP4,
};
#define N_COMPUTING (sizeof(computing) / sizeof(computing[0]))

static char *read_fixture(const char *name, size_t *size)
{
    char path[512];
    char *data = NULL;
    struct sluice_error err = {0};
    snprintf(path, sizeof(path), "%s/quant/%s.bin", SLUICE_FIXTURES, name);
    for (char *c = strrchr(path, '/'); *c != '\0'; c++) {
        *c = (char)(*c >= 'A' && *c <= 'Z' ? *c + 32 : *c);
    }
    assert_ok(sl_file_read(path, 0, &data, size, &err), err);
    return data;
}

static uint32_t bits_of(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof(u));
    return u;
}

static void check_type(enum sl_type type)
{
    const struct sl_type_traits *t = sl_type_traits(type);
    size_t size;
    char *data = read_fixture(t->name, &size);
    uint32_t n_blocks, block_bytes;
    memcpy(&n_blocks, data, 4);
    memcpy(&block_bytes, data + 4, 4);
    assert_int_equal(block_bytes, t->block_bytes);
    const size_t n_items = (size_t)n_blocks * t->block_items;
    assert_int_equal(size, 8 + (size_t)n_blocks * block_bytes + 4 * n_items);

    /* Blocks have no alignment but that of their 16-bit scales. */
    char *blocks = sl_alloc(SL_MEM_BASE, (size_t)n_blocks * block_bytes + 2);
    float *got = sl_alloc(SL_MEM_BASE, 4 * n_items);
    assert_non_null(blocks);
    assert_non_null(got);
    memcpy(blocks + 2, data + 8, (size_t)n_blocks * block_bytes);
    sl_dequantize_row(type, blocks + 2, got, (int64_t)n_items);
    const char *wanted = data + 8 + (size_t)n_blocks * block_bytes;
    for (size_t i = 0; i < n_items; i++) {
        float want;
        memcpy(&want, wanted + 4 * i, sizeof(want));
        if (bits_of(want) != bits_of(got[i])) {
            fail_msg("%s item %zu: %a, should be %a", t->name, i, (double)got[i], (double)want);
        }
    }
    sl_free(got);
    sl_free(blocks);
    sl_free(data);
}

static void test_dequantize(void **state)
{
    (void)state;
    for (size_t i = 1; i < N_COMPUTING; i++) { /* F32 is a copy and has no fixture */
        check_type(computing[i]);
    }
}

static void test_halves(void **state)
{
    (void)state;
    enum { N = 2048 };
    size_t size;
    char *data = read_fixture("halves", &size);
    assert_int_equal(size, N * 8);
    for (int i = 0; i < N; i++) {
        float x;
        uint16_t f16, bf16;
        memcpy(&x, data + 4 * i, 4);
        memcpy(&f16, data + 4 * N + 2 * i, 2);
        memcpy(&bf16, data + 6 * N + 2 * i, 2);
        assert_int_equal(sl_f32_to_f16(x), f16);
        assert_int_equal(sl_f32_to_bf16(x), bf16);
    }
    sl_free(data);

    for (uint32_t h = 0; h < 0x10000; h++) {
        const float f = sl_f16_to_f32((uint16_t)h);
        const float b = sl_bf16_to_f32((uint16_t)h);
        if ((h & 0x7fff) <= 0x7c00) {
            assert_int_equal(sl_f32_to_f16(f), h);
        } else {
            assert_true(isnan(f) && isnan(sl_f16_to_f32(sl_f32_to_f16(f))));
        }
        if ((h & 0x7fff) <= 0x7f80) {
            assert_int_equal(sl_f32_to_bf16(b), h);
        } else {
            assert_true(isnan(b) && isnan(sl_bf16_to_f32(sl_f32_to_bf16(b))));
        }
    }
}

/* Largest error that packing may make, as a part of the largest magnitude in the (super-)block.
 * Formats without a minimum use levels -n .. n - 1 and lose at most one level at the far end;
 * with a minimum half a level of the range 2. Super-blocks add the rounding of their group scales:
 * signed ones lose one unit at the far end in the same way, the others half a unit times the top
 * level, and as much for minimums. */
static double error_part(enum sl_type type)
{
    switch (type) {
    case SL_TYPE_F32:
        return 0.0;
    case SL_TYPE_F16:
        return 0x1p-11;
    case SL_TYPE_BF16:
        return 0x1p-8;
    case SL_TYPE_Q4_0:
        return 1.0 / 8;
    case SL_TYPE_Q4_1:
        return 2.0 / 15 / 2;
    case SL_TYPE_Q5_0:
        return 1.0 / 16;
    case SL_TYPE_Q5_1:
        return 2.0 / 31 / 2;
    case SL_TYPE_Q8_0:
        return 1.0 / 127 / 2;
    case SL_TYPE_Q2_K:
        return 2.0 / 3 / 2 + 2.0 / 30 + 1.0 / 30;
    case SL_TYPE_Q3_K:
        return 1.0 / 4 + 1.0 / 32;
    case SL_TYPE_Q4_K:
        return 2.0 / 15 / 2 + 2.0 / 126 + 1.0 / 126;
    case SL_TYPE_Q5_K:
        return 2.0 / 31 / 2 + 2.0 / 126 + 1.0 / 126;
    case SL_TYPE_Q6_K:
        return 1.0 / 32 + 1.0 / 128;
    case SL_TYPE_IQ4_NL: /* the far end of the table, 127 against 113, is its widest gap */
        return 14.0 / 127;
    case SL_TYPE_IQ4_XS:
        return 14.0 / 127 + 1.0 / 32;
    case SL_TYPE_MXFP4: /* values up to 8 units become 6 */
        return 2.0 / 8;
    default:
        return -1.0;
    }
}

static uint32_t next_random(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return *state >> 8;
}

/* Rows of all kinds: symmetric, one-sided, constant, tiny, large. */
static void fill_row(float *x, int n, int kind, uint32_t *rng)
{
    static const float sizes[] = {1.0f, 1e-3f, 100.0f, 1.0f, 1.0f, 1e-6f};
    for (int i = 0; i < n; i++) {
        const float u = (float)next_random(rng) / 16777216.0f;
        x[i] = (kind == 3 ? u : kind == 4 ? -0.75f : 2.0f * u - 1.0f) * sizes[kind % 6];
    }
}

static void check_round_trip(enum sl_type type, int kind, uint32_t *rng)
{
    enum { N = 1024 };
    static float x[N], y[N];
    static char packed[4 * N];
    const struct sl_type_traits *t = sl_type_traits(type);
    fill_row(x, N, kind, rng);
    assert_true(sl_quantize_row(type, x, packed, N));
    sl_dequantize_row(type, packed, y, N);
    const int block = t->block_items == 1 ? 1 : (int)t->block_items;
    for (int b = 0; b < N; b += block) {
        double top = 0.0;
        for (int i = b; i < b + block; i++) {
            top = fmax(top, fabs((double)x[i]));
        }
        for (int i = b; i < b + block; i++) {
            /* Scales are f16: 2^-11 of the value, and no finer than 2^-25 times the top level
             * (with its group scale: at most 128 x 32). */
            const double top_level = block == 256 ? 4096.0 : 128.0;
            const double bound = top * (error_part(type) + 0x1p-10) + 2.0 * top_level * 0x1p-25;
            const double error = fabs((double)x[i] - (double)y[i]);
            if (!(error <= bound)) {
                fail_msg("%s kind %d item %d: %g became %g", t->name, kind, i, (double)x[i],
                         (double)y[i]);
            }
        }
    }
}

static void test_round_trip(void **state)
{
    (void)state;
    uint32_t rng = 7;
    for (size_t i = 0; i < N_COMPUTING; i++) {
        for (int kind = 0; kind < 6; kind++) {
            check_round_trip(computing[i], kind, &rng);
        }
    }
}

/* Zeros stay zeros; infinities, NaN and the largest floats give finite scales, so that no other
 * item of the block is lost. */
static void test_hostile_rows(void **state)
{
    (void)state;
    static const float hostile[] = {0.0f, INFINITY, -INFINITY, NAN, 3e38f, -3e38f, 1e-42f};
    for (size_t i = 0; i < N_COMPUTING; i++) {
        const struct sl_type_traits *t = sl_type_traits(computing[i]);
        for (size_t k = 0; k < sizeof(hostile) / sizeof(hostile[0]); k++) {
            float x[256] = {0};
            float y[256];
            char packed[1024];
            x[17] = hostile[k];
            assert_true(sl_quantize_row(computing[i], x, packed, 256));
            sl_dequantize_row(computing[i], packed, y, 256);
            for (int j = 0; j < 256; j++) {
                const bool float_item = t->block_items == 1;
                if (hostile[k] == 0.0f || (float_item && j != 17)) {
                    assert_true(y[j] == 0.0f);
                } else if (!float_item) {
                    assert_true(isfinite(y[j]));
                }
            }
        }
    }
}

static void test_table(void **state)
{
    (void)state;
    int n_computing = 0;
    for (uint32_t id = 0; id < SL_TYPE_N + 8; id++) {
        const struct sl_type_traits *t = sl_type_traits(id);
        if (t == NULL) {
            assert_string_equal(sl_type_name(id), "unknown");
            continue;
        }
        enum sl_type found;
        assert_true(sl_type_from_name(t->name, &found));
        assert_int_equal(found, id);
        assert_true(t->block_items > 0 && t->block_bytes > 0);
        n_computing += t->computes;
        float x[256] = {0};
        char packed[1024];
        assert_int_equal(sl_quantize_row((enum sl_type)id, x, packed, 256), t->computes);
    }
    assert_int_equal(n_computing, N_COMPUTING);
    enum sl_type type;
    assert_true(sl_type_from_name("q4_k", &type));
    assert_int_equal(type, SL_TYPE_Q4_K);
    assert_false(sl_type_from_name("Q4_2", &type));
    assert_false(sl_type_from_name("", &type));
    assert_null(sl_type_traits(4));
    assert_null(sl_type_traits(31));
    assert_null(sl_type_traits(UINT32_MAX));
    assert_int_equal(sl_type_row_bytes(SL_TYPE_Q4_K, 4096), 2304);
    assert_int_equal(sl_type_row_bytes(SL_TYPE_F32, 3), 12);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dequantize), cmocka_unit_test(test_halves),
        cmocka_unit_test(test_round_trip), cmocka_unit_test(test_hostile_rows),
        cmocka_unit_test(test_table),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
