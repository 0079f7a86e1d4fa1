/* SPDX-License-Identifier: Apache-2.0
 *
 * First part of the list: memory, copies, streams, events, errors.
 */
#include "device/device_tests.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "test.h"

static struct sl_device *dev;
static const struct sl_device_vtable *vt;
static struct sluice_error err;

/* The bytes that copy number `salt` moves. */
static void fill(unsigned char *data, size_t n, unsigned salt)
{
    for (size_t i = 0; i < n; i++) {
        data[i] = (unsigned char)(i * 31 + (i >> 8) * 7 + salt * 13 + 1);
    }
}

static void *device_memory(size_t bytes)
{
    void *mem;
    assert_ok(vt->mem_alloc(dev, bytes, &mem, &err), err);
    assert_non_null(mem);
    return mem;
}

static struct sl_stream *make_stream(void)
{
    struct sl_stream *stream;
    assert_ok(vt->stream_create(dev, SL_STREAM_OPERATORS, &stream, &err), err);
    return stream;
}

static struct sl_event *make_event(bool timing)
{
    struct sl_event *event;
    assert_ok(vt->event_create(dev, timing, &event, &err), err);
    return event;
}

static void sync(struct sl_stream *stream)
{
    assert_ok(vt->stream_sync(dev, stream, &err), err);
}

static void to_device(struct sl_stream *stream, void *dst, const void *src, size_t bytes)
{
    assert_ok(vt->copy_to_device(dev, stream, dst, src, bytes, &err), err);
}

static void to_host(struct sl_stream *stream, void *dst, const void *src, size_t bytes)
{
    assert_ok(vt->copy_to_host(dev, stream, dst, src, bytes, &err), err);
}

static void on_device(struct sl_stream *stream, void *dst, const void *src, size_t bytes)
{
    assert_ok(vt->copy_on_device(dev, stream, dst, src, bytes, &err), err);
}

static void record(struct sl_stream *stream, struct sl_event *event)
{
    assert_ok(vt->event_record(dev, event, stream, &err), err);
}

static void wait_for(struct sl_stream *stream, struct sl_event *event)
{
    assert_ok(vt->stream_wait(dev, stream, event, &err), err);
}

static void test_info(void **state)
{
    (void)state;
    struct sl_device_info info;
    struct sl_device_info after;
    assert_ok(vt->info(dev, &info, &err), err);
    assert_int_equal(info.kind, dev->kind);
    assert_true(info.name[0] != '\0' && memchr(info.name, '\0', sizeof info.name));
    assert_true(info.total_bytes > 0 && info.free_bytes <= info.total_bytes);
    assert_true(info.n_multiprocessors > 0);

    void *mem = device_memory((size_t)8 << 20);
    assert_ok(vt->info(dev, &after, &err), err);
    assert_true(after.free_bytes < info.free_bytes);
    vt->mem_free(dev, mem);
}

static void test_memory(void **state)
{
    (void)state;
    const size_t sizes[] = {1, 255, 256, 257, 100000, (size_t)3 << 20};
    void *mem[6];
    for (int i = 0; i < 6; i++) {
        mem[i] = device_memory(sizes[i]);
        assert_int_equal((uintptr_t)mem[i] % 256, 0);
        for (int j = 0; j < i; j++) {
            const uintptr_t a = (uintptr_t)mem[i];
            const uintptr_t b = (uintptr_t)mem[j];
            assert_true(a + sizes[i] <= b || b + sizes[j] <= a);
        }
    }
    for (int i = 0; i < 6; i++) {
        vt->mem_free(dev, mem[i]);
    }
    vt->mem_free(dev, NULL);

    /* More than there is: refused, and the device goes on. */
    void *none = &err;
    assert_status(vt->mem_alloc(dev, (size_t)1 << 50, &none, &err), OUT_OF_MEMORY);
    assert_null(none);
    assert_true(err.message[0] != '\0');
    vt->mem_free(dev, device_memory(4096));
}

/* There and back through `between` bytes of offset, with the neighbours untouched. */
static void check_round_trip(struct sl_stream *stream, unsigned char *src, unsigned char *dst,
                             size_t size, size_t offset)
{
    unsigned char *mem = device_memory(size + 64);
    unsigned char *twin = device_memory(size + 64);
    fill(src, size + 64, (unsigned)size);
    memset(dst, 0xee, size + 64);
    to_device(stream, mem, src, size + 64);
    on_device(stream, twin + offset, mem + 16, size);
    to_host(stream, dst + offset, twin + offset, size);
    sync(stream);
    if (memcmp(dst + offset, src + 16, size) != 0) {
        fail_msg("copy of %zu bytes at offset %zu differs", size, offset);
    }
    for (size_t i = 0; i < 64 - offset; i++) {
        assert_int_equal(dst[size + offset + i], 0xee);
    }
    for (size_t i = 0; i < offset; i++) {
        assert_int_equal(dst[i], 0xee);
    }
    vt->mem_free(dev, twin);
    vt->mem_free(dev, mem);
}

#define COPY_MAX_BYTES (((size_t)9 << 20) + 3)

static void test_copies(void **state)
{
    (void)state;
    const size_t sizes[] = {1,
                            3,
                            255,
                            256,
                            4096,
                            65537,
                            (512u << 10) - 64,
                            512u << 10,
                            1u << 20,
                            (3u << 20) + 5,
                            COPY_MAX_BYTES};
    const size_t capacity = COPY_MAX_BYTES + 64;
    unsigned char *plain[2] = {malloc(capacity), malloc(capacity)};
    unsigned char *registered[2] = {aligned_alloc(4096, (capacity + 4095) / 4096 * 4096),
                                    aligned_alloc(4096, (capacity + 4095) / 4096 * 4096)};
    void *locked[2];
    bool is_registered[2];
    for (int i = 0; i < 2; i++) {
        /* A refused registration is allowed; copies work all the same. */
        is_registered[i] =
            vt->host_register(dev, registered[i], capacity, false, &err) == SLUICE_STATUS_OK;
        assert_ok(vt->host_alloc(dev, capacity, &locked[i], &err), err);
    }
    struct sl_stream *stream = make_stream();
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        check_round_trip(stream, plain[0], plain[1], sizes[i], 0);
        check_round_trip(stream, plain[0], plain[1], sizes[i], 7);
        check_round_trip(stream, registered[0], registered[1], sizes[i], 1);
        check_round_trip(stream, locked[0], locked[1], sizes[i], 48);
        check_round_trip(stream, locked[0], plain[1], sizes[i], 5);
    }
    to_device(stream, locked[0], plain[0], 0); /* nothing to do is no mistake */
    sync(stream);
    vt->stream_destroy(dev, stream);
    for (int i = 0; i < 2; i++) {
        if (is_registered[i]) {
            vt->host_unregister(dev, registered[i]);
        }
        vt->host_free(dev, locked[i]);
        free(registered[i]);
        free(plain[i]);
    }
}

/* Columns of a matrix, from locked memory and from memory that is not. */
static void test_copy_rows(void **state)
{
    (void)state;
    static const struct {
        size_t row_bytes, pitch_bytes, n_rows;
    } cases[] = {{18, 18, 5}, {18, 54, 1}, {34, 340, 67}, {2048, 7000, 900}, {5000000, 5000100, 3}};
    struct sl_stream *const stream = make_stream();
    for (size_t c = 0; c < sizeof cases / sizeof cases[0]; c++) {
        const size_t row = cases[c].row_bytes, pitch = cases[c].pitch_bytes, n = cases[c].n_rows;
        void *locked = NULL;
        assert_ok(vt->host_alloc(dev, pitch * n, &locked, &err), err);
        unsigned char *const plain = malloc(pitch * n), *const back = malloc(row * n + 1);
        unsigned char *const mem = device_memory(row * n + 1);
        assert_true(plain && back);
        for (int k = 0; k < 2; k++) {
            unsigned char *const src = k == 0 ? plain : (unsigned char *)locked;
            fill(src, pitch * n, (unsigned)(2 * c) + (unsigned)k);
            memset(back, 0xee, row * n + 1);
            to_device(stream, mem, back, row * n + 1);
            assert_ok(vt->copy_rows_to_device(dev, stream, mem, src, row, pitch, n, &err), err);
            to_host(stream, back, mem, row * n + 1);
            sync(stream);
            for (size_t i = 0; i < n; i++) {
                assert_memory_equal(back + i * row, src + i * pitch, row);
            }
            assert_int_equal(back[row * n], 0xee);
        }
        assert_ok(vt->copy_rows_to_device(dev, stream, mem, plain, row, pitch, 0, &err), err);
        assert_status(vt->copy_rows_to_device(dev, stream, mem, plain, row, row - 1, n, &err),
                      INVALID_ARGUMENT);
        vt->host_free(dev, locked);
        vt->mem_free(dev, mem);
        free(plain);
        free(back);
    }
    vt->stream_destroy(dev, stream);
}

static void test_register_twice(void **state)
{
    (void)state;
    const size_t bytes = 1 << 16;
    unsigned char *host = aligned_alloc(4096, bytes);
    if (vt->host_register(dev, host, bytes, true, &err) == SLUICE_STATUS_OK) {
        assert_int_not_equal(vt->host_register(dev, host, bytes, true, &err), SLUICE_STATUS_OK);
        assert_true(err.message[0] != '\0');
        vt->host_unregister(dev, host);
    }
    /* The refusal did no harm. */
    struct sl_stream *stream = make_stream();
    void *mem = device_memory(bytes);
    to_device(stream, mem, host, bytes);
    sync(stream);
    vt->mem_free(dev, mem);
    vt->stream_destroy(dev, stream);
    free(host);
}

/* Later items of one stream see what earlier ones did, without any wait. */
static void test_stream_order(void **state)
{
    (void)state;
    enum { N = 700, BYTES = 512 }; /* more items than most queues hold */
    unsigned char(*src)[BYTES] = malloc(N * sizeof *src);
    unsigned char *got = malloc(BYTES);
    struct sl_stream *stream = make_stream();
    unsigned char *a = device_memory(BYTES);
    unsigned char *b = device_memory(BYTES);
    for (int i = 0; i < N; i++) {
        fill(src[i], BYTES, (unsigned)i);
        to_device(stream, a, src[i], BYTES);
        on_device(stream, b, a, BYTES);
    }
    to_host(stream, got, b, BYTES);
    sync(stream);
    assert_memory_equal(got, src[N - 1], BYTES);
    vt->stream_destroy(dev, stream);
    vt->mem_free(dev, a);
    vt->mem_free(dev, b);
    free(src);
    free(got);
}

/* A ring of two slots between a copying and a working stream, as the executor uses it: each slot's
 * events are recorded again and again. */
static void test_event_ring(void **state)
{
    (void)state;
    enum { N = 60, SLOTS = 2, BYTES = 20000 };
    unsigned char(*src)[BYTES] = malloc(N * sizeof *src);
    unsigned char(*got)[BYTES] = malloc(N * sizeof *got);
    struct sl_stream *copier = make_stream();
    struct sl_stream *worker = make_stream();
    unsigned char *slot[SLOTS];
    struct sl_event *full[SLOTS];
    struct sl_event *empty[SLOTS];
    unsigned char *work = device_memory(BYTES);
    for (int s = 0; s < SLOTS; s++) {
        slot[s] = device_memory(BYTES);
        full[s] = make_event(false);
        empty[s] = make_event(false);
    }
    for (int i = 0; i < N; i++) {
        const int s = i % SLOTS;
        fill(src[i], BYTES, (unsigned)i);
        wait_for(copier, empty[s]); /* never recorded the first time: no wait */
        to_device(copier, slot[s], src[i], BYTES);
        record(copier, full[s]);
        wait_for(worker, full[s]);
        on_device(worker, work, slot[s], BYTES);
        record(worker, empty[s]);
        to_host(worker, got[i], work, BYTES);
    }
    sync(worker);
    sync(copier);
    for (int i = 0; i < N; i++) {
        assert_memory_equal(got[i], src[i], BYTES);
    }
    for (int s = 0; s < SLOTS; s++) {
        vt->event_destroy(dev, full[s]);
        vt->event_destroy(dev, empty[s]);
        vt->mem_free(dev, slot[s]);
    }
    vt->mem_free(dev, work);
    vt->stream_destroy(dev, worker);
    vt->stream_destroy(dev, copier);
    free(src);
    free(got);
}

/* A chain over several streams, back to the host by event_sync alone. */
static void test_event_chain(void **state)
{
    (void)state;
    enum { N = 5, BYTES = 300000 };
    unsigned char *src = malloc(BYTES);
    unsigned char *got = malloc(BYTES);
    struct sl_stream *stream[N];
    struct sl_event *event[N];
    unsigned char *mem[N];
    for (int i = 0; i < N; i++) {
        stream[i] = make_stream();
        event[i] = make_event(i % 2 == 0);
        mem[i] = device_memory(BYTES);
    }
    for (unsigned round = 0; round < 5; round++) {
        fill(src, BYTES, round);
        to_device(stream[0], mem[0], src, BYTES);
        record(stream[0], event[0]);
        for (int i = 1; i < N; i++) {
            wait_for(stream[i], event[i - 1]);
            on_device(stream[i], mem[i], mem[i - 1], BYTES);
            if (i == N - 1) {
                to_host(stream[i], got, mem[i], BYTES);
            }
            record(stream[i], event[i]);
        }
        assert_ok(vt->event_sync(dev, event[N - 1], &err), err);
        assert_memory_equal(got, src, BYTES);
    }
    for (int i = 0; i < N; i++) {
        vt->stream_destroy(dev, stream[i]);
        vt->event_destroy(dev, event[i]);
        vt->mem_free(dev, mem[i]);
    }
    vt->event_destroy(dev, NULL);
    vt->stream_destroy(dev, NULL);
    free(src);
    free(got);
}

static void test_elapsed(void **state)
{
    (void)state;
    const size_t bytes = (size_t)4 << 20;
    unsigned char *src = malloc(bytes);
    fill(src, bytes, 1);
    struct sl_stream *stream = make_stream();
    struct sl_event *event[3] = {make_event(true), make_event(true), make_event(true)};
    struct sl_event *plain = make_event(false);
    unsigned char *mem = device_memory(bytes);
    uint64_t first_ns;
    uint64_t second_ns;
    uint64_t both_ns;
    record(stream, event[0]);
    to_device(stream, mem, src, bytes);
    record(stream, event[1]);
    to_device(stream, mem, src, bytes);
    record(stream, event[2]);
    record(stream, plain);
    sync(stream);
    assert_ok(vt->event_elapsed(dev, event[0], event[1], &first_ns, &err), err);
    assert_ok(vt->event_elapsed(dev, event[1], event[2], &second_ns, &err), err);
    assert_ok(vt->event_elapsed(dev, event[0], event[2], &both_ns, &err), err);
    /* No bounds on speed: the times are positive and add up, but for the clock's grain. */
    assert_true(first_ns > 0 && second_ns > 0);
    const uint64_t sum_ns = first_ns + second_ns;
    const uint64_t gap_ns = sum_ns > both_ns ? sum_ns - both_ns : both_ns - sum_ns;
    assert_true(gap_ns <= 4000 + both_ns / 100);

    assert_int_not_equal(vt->event_elapsed(dev, event[0], plain, &both_ns, &err), SLUICE_STATUS_OK);
    struct sl_event *never = make_event(true);
    assert_int_not_equal(vt->event_elapsed(dev, event[0], never, &both_ns, &err), SLUICE_STATUS_OK);
    assert_true(err.message[0] != '\0');
    assert_ok(vt->event_sync(dev, never, &err), err); /* nothing to wait for */
    sync(stream);                                     /* and the mistakes left no error behind */
    vt->event_destroy(dev, never);
    vt->event_destroy(dev, plain);
    for (int i = 0; i < 3; i++) {
        vt->event_destroy(dev, event[i]);
    }
    vt->mem_free(dev, mem);
    vt->stream_destroy(dev, stream);
    free(src);
}

/* Ops that make no sense or have no kernel are refused by the call, and the device goes on. */
static void test_refused_ops(void **state)
{
    (void)state;
    struct sl_stream *stream = make_stream();
    float *mem = device_memory(1 << 16);
    void *scratch = device_memory(1 << 20);
    struct sl_op op = {.kind = SL_OP_NORM, .n_tokens = 0};
    op.norm = (struct sl_op_norm){.x = mem, .y = mem, .n = 16, .rows_per_token = 1};
    assert_status(vt->run(dev, stream, &op, 1, scratch, &err), INTERNAL);
    assert_mentions(err, "norm");

    struct sl_op linear = {.kind = SL_OP_LINEAR, .n_tokens = 1};
    linear.linear = (struct sl_op_linear){.x = mem, .n_parts = 1};
    linear.linear.part[0].w =
        (struct sl_matrix){.data = mem + 1024, .type = SL_TYPE_IQ1_S, .n_rows = 1, .n_cols = 256};
    linear.linear.part[0].y = mem + 8192;
    assert_status(vt->run(dev, stream, &linear, 1, scratch, &err), UNSUPPORTED);
    assert_mentions(err, "IQ1_S");
    assert_mentions(err, "linear");
    linear.linear.part[0].w =
        (struct sl_matrix){.data = mem + 1024, .type = SL_TYPE_F32, .n_rows = 2, .n_cols = 32};
    linear.linear.part[0].w.pitch_bytes = 512;
    assert_status(vt->run(dev, stream, &linear, 1, scratch, &err), UNSUPPORTED);
    assert_mentions(err, "apart");

    op.n_tokens = 1;
    float host[16];
    for (int i = 0; i < 16; i++) {
        host[i] = i % 2 ? 2.0f : -2.0f;
    }
    to_device(stream, mem, host, sizeof host);
    assert_ok(vt->run(dev, stream, &op, 1, scratch, &err), err);
    assert_ok(vt->run(dev, stream, &op, 0, scratch, &err), err); /* an empty list */
    to_host(stream, host, mem, sizeof host);
    sync(stream);
    for (int i = 0; i < 16; i++) {
        assert_float_equal(host[i], (i % 2 ? 1.0f : -1.0f), 1e-6f);
    }
    vt->mem_free(dev, scratch);
    vt->mem_free(dev, mem);
    vt->stream_destroy(dev, stream);
}

/* Where the device has graphs: recorded work does not run before it is launched, runs as often as
 * it is launched, on any stream, and reads what its memory holds then. */
static void test_graph(void **state)
{
    (void)state;
    enum { N = 512, BYTES = N * sizeof(float) };
    if (!vt->graph_begin) {
        assert_true(!vt->graph_end && !vt->graph_launch && !vt->graph_destroy);
        skip();
    }
    void *locked[2];
    for (int i = 0; i < 2; i++) {
        assert_ok(vt->host_alloc(dev, BYTES, &locked[i], &err), err);
    }
    float *in = locked[0];
    float *out = locked[1];
    struct sl_stream *stream[2] = {make_stream(), make_stream()};
    char *mem = device_memory(3 * BYTES);
    void *scratch = device_memory(1 << 16);
    struct sl_op op = {.kind = SL_OP_NORM, .n_tokens = 1};
    op.norm = (struct sl_op_norm){.x = (const float *)(const void *)mem,
                                  .y = (float *)(void *)(mem + BYTES),
                                  .n = N,
                                  .rows_per_token = 1};
    struct sl_graph *graph;
    memset(out, 0, BYTES);
    assert_ok(vt->graph_begin(dev, stream[0], &err), err);
    to_device(stream[0], mem, in, BYTES);
    assert_ok(vt->run(dev, stream[0], &op, 1, scratch, &err), err);
    on_device(stream[0], mem + 2 * BYTES, mem + BYTES, BYTES);
    to_host(stream[0], out, mem + 2 * BYTES, BYTES);
    assert_ok(vt->graph_end(dev, stream[0], &graph, &err), err);
    memset(&op, 0xff, sizeof op);
    sync(stream[0]);
    assert_float_equal(out[0], 0.0f, 0.0f);

    for (int launch = 0; launch < 6; launch++) {
        for (int i = 0; i < N; i++) {
            in[i] = (i + launch) % 2 ? 3.0f : -3.0f;
        }
        memset(out, 0, BYTES);
        struct sl_stream *on = stream[launch % 2];
        assert_ok(vt->graph_launch(dev, on, graph, &err), err);
        sync(on);
        for (int i = 0; i < N; i++) {
            assert_float_equal(out[i], ((i + launch) % 2 ? 1.0f : -1.0f), 1e-5f);
        }
    }
    vt->graph_destroy(dev, graph);
    vt->graph_destroy(dev, NULL);
    vt->mem_free(dev, scratch);
    vt->mem_free(dev, mem);
    for (int i = 0; i < 2; i++) {
        vt->host_free(dev, locked[i]);
        vt->stream_destroy(dev, stream[i]);
    }
}

int device_tests_run_queues(const char *prefix, struct sl_device *device)
{
    dev = device;
    vt = device->vt;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_info),           cmocka_unit_test(test_memory),
        cmocka_unit_test(test_copies),         cmocka_unit_test(test_copy_rows),
        cmocka_unit_test(test_register_twice), cmocka_unit_test(test_stream_order),
        cmocka_unit_test(test_event_ring),     cmocka_unit_test(test_event_chain),
        cmocka_unit_test(test_elapsed),        cmocka_unit_test(test_refused_ops),
        cmocka_unit_test(test_graph),
    };
    char name[96];
    snprintf(name, sizeof name, "%s: queues", prefix);
    return cmocka_run_group_tests_name(name, tests, NULL, NULL);
}

int device_tests_run(const char *prefix, struct sl_device *device)
{
    return device_tests_run_queues(prefix, device) + device_tests_run_ops(prefix, device) +
           device_tests_run_kv(prefix, device);
}
