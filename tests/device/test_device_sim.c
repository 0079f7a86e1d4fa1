/* SPDX-License-Identifier: Apache-2.0
 *
 * The device test list on the simulated device, calm and with random delays, and what only the
 * simulated device can show: mistakes in synchronization and addresses, faults, simulated time.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/mem.h"
#include "device/device_tests.h"
#include "test.h"

#if defined(__SANITIZE_THREAD__)
#define THREAD_SANITIZER true
#else
#define THREAD_SANITIZER false
#endif

static struct sluice_error err;

static struct sl_device *make_device(const struct sl_sim_options *options)
{
    struct sl_device *dev;
    assert_ok(sl_device_sim_create(&dev, options, &err), err);
    return dev;
}

/* A device with a stream, memory there and a block here: what most tests below need. */
struct bench {
    struct sl_device *dev;
    const struct sl_device_vtable *vt;
    struct sl_stream *stream;
    char *mem;
    char *host;
    size_t bytes;
};

static struct bench make_bench(const struct sl_sim_options *options, size_t bytes)
{
    struct bench b = {.dev = make_device(options), .bytes = bytes};
    b.vt = b.dev->vt;
    void *mem;
    assert_ok(b.vt->stream_create(b.dev, SL_STREAM_OPERATORS, &b.stream, &err), err);
    assert_ok(b.vt->mem_alloc(b.dev, bytes, &mem, &err), err);
    b.mem = mem;
    b.host = malloc(bytes);
    assert_non_null(b.host);
    memset(b.host, 1, bytes);
    return b;
}

static void free_bench(struct bench *b)
{
    free(b->host);
    b->vt->stream_destroy(b->dev, b->stream);
    b->vt->mem_free(b->dev, b->mem);
    sl_device_destroy(&b->dev);
    assert_null(b->dev);
}

/* A second stream reads the result without waiting, while the first is still on its way: what
 * arrives is the poison of fresh memory. With the wait it is right. */
static void test_missing_wait(void **state)
{
    (void)state;
    if (THREAD_SANITIZER) {
        skip(); /* the sanitizer rightly calls it a data race */
    }
    const struct sl_sim_options slow = {.copy_bytes_per_s = 200e6};
    struct bench b = make_bench(&slow, 4 << 20);
    struct sl_stream *other;
    struct sl_event *event;
    assert_ok(b.vt->stream_create(b.dev, SL_STREAM_OPERATORS, &other, &err), err);
    assert_ok(b.vt->event_create(b.dev, false, &event, &err), err);
    for (int with_wait = 0; with_wait < 2; with_wait++) {
        unsigned char got[16] = {0};
        memset(b.host, 10 + with_wait, b.bytes);
        assert_ok(b.vt->copy_to_device(b.dev, b.stream, b.mem, b.host, b.bytes, &err), err);
        assert_ok(b.vt->event_record(b.dev, event, b.stream, &err), err);
        if (with_wait) {
            assert_ok(b.vt->stream_wait(b.dev, other, event, &err), err);
        }
        assert_ok(b.vt->copy_to_host(b.dev, other, got, b.mem, sizeof got, &err), err);
        assert_ok(b.vt->stream_sync(b.dev, other, &err), err);
        assert_int_equal(got[0], with_wait ? 11 : 0xff);
        assert_ok(b.vt->stream_sync(b.dev, b.stream, &err), err);
    }
    b.vt->event_destroy(b.dev, event);
    b.vt->stream_destroy(b.dev, other);
    free_bench(&b);
}

/* The source of a copy is reused before the copy is done. */
static void test_source_reused(void **state)
{
    (void)state;
    if (THREAD_SANITIZER) {
        skip();
    }
    const struct sl_sim_options slow = {.copy_bytes_per_s = 100e6};
    struct bench b = make_bench(&slow, 4 << 20);
    unsigned char got = 0;
    assert_ok(b.vt->copy_to_device(b.dev, b.stream, b.mem, b.host, b.bytes, &err), err);
    memset(b.host, 2, b.bytes);
    assert_ok(b.vt->copy_to_host(b.dev, b.stream, &got, b.mem, 1, &err), err);
    assert_ok(b.vt->stream_sync(b.dev, b.stream, &err), err);
    assert_int_equal(got, 2);
    free_bench(&b);
}

static void test_fresh_memory_is_poison(void **state)
{
    (void)state;
    struct bench b = make_bench(NULL, 1000);
    assert_ok(b.vt->copy_to_host(b.dev, b.stream, b.host, b.mem, b.bytes, &err), err);
    assert_ok(b.vt->stream_sync(b.dev, b.stream, &err), err);
    for (size_t i = 0; i < b.bytes; i++) {
        assert_int_equal((unsigned char)b.host[i], 0xff);
    }
    free_bench(&b);
}

static void test_bad_addresses(void **state)
{
    (void)state;
    struct bench b = make_bench(NULL, 4096);
    struct sl_device *d = b.dev;
    /* Host memory where device memory belongs and the reverse, and one byte too many. */
    assert_status(b.vt->copy_to_device(d, b.stream, b.host, b.host, 1, &err), INTERNAL);
    assert_mentions(err, "destination");
    assert_status(b.vt->copy_to_device(d, b.stream, b.mem, b.mem, 1, &err), INTERNAL);
    assert_mentions(err, "source");
    assert_status(b.vt->copy_to_host(d, b.stream, b.mem, b.mem, 1, &err), INTERNAL);
    assert_status(b.vt->copy_on_device(d, b.stream, b.mem, b.mem + 4096, 1, &err), INTERNAL);
    assert_status(b.vt->copy_to_device(d, b.stream, b.mem, b.host, 4097, &err), INTERNAL);
    assert_status(b.vt->copy_to_device(d, b.stream, b.mem + 1, b.host, 4096, &err), INTERNAL);
    assert_status(b.vt->host_register(d, b.mem, 16, false, &err), INTERNAL);

    struct sl_op op = {.kind = SL_OP_NORM, .n_tokens = 2};
    float *mem = (float *)(void *)b.mem;
    op.norm = (struct sl_op_norm){
        .x = mem, .y = mem, .weight = mem, .n = 512, .rows_per_token = 1, .eps = 1e-5f};
    assert_ok(b.vt->run(d, b.stream, &op, 1, NULL, &err), err);
    op.norm.n = 513;
    assert_status(b.vt->run(d, b.stream, &op, 1, NULL, &err), INTERNAL);
    assert_mentions(err, "norm: x");
    op.norm.n = 512;
    op.norm.weight = (const float *)(const void *)b.host;
    assert_status(b.vt->run(d, b.stream, &op, 1, NULL, &err), INTERNAL);
    assert_mentions(err, "norm: weight");
    op.norm.weight = NULL; /* allowed */
    assert_ok(b.vt->run(d, b.stream, &op, 1, NULL, &err), err);
    op.norm.y = NULL;
    assert_status(b.vt->run(d, b.stream, &op, 1, NULL, &err), INTERNAL);
    assert_mentions(err, "norm: y");

    struct sl_op linear = {.kind = SL_OP_LINEAR, .n_tokens = 1};
    linear.linear.x = mem;
    linear.linear.n_parts = 1;
    linear.linear.part[0].w =
        (struct sl_matrix){.data = mem, .type = SL_TYPE_F32, .n_rows = 4, .n_cols = 32};
    linear.linear.part[0].y = mem + 512;
    assert_status(b.vt->run(d, b.stream, &linear, 1, NULL, &err), INTERNAL);
    assert_mentions(err, "linear: scratch");
    assert_ok(b.vt->stream_sync(d, b.stream, &err), err); /* none of it was queued */
    free_bench(&b);
}

/* Positions and tables are known only when the op runs; the error comes with synchronization. */
static void test_bad_cache_blocks(void **state)
{
    (void)state;
    for (int mistake = 0; mistake < 4; mistake++) {
        struct bench b = make_bench(NULL, 1 << 20);
        const size_t block_bytes =
            sl_kv_block_bytes((struct sl_kv_types){SL_TYPE_F16, SL_TYPE_F16}, 1, 32);
        int32_t index[3] = {0, 0, 1};                    /* position, then a table of two blocks */
        char *cache = b.mem + b.bytes - 2 * block_bytes; /* two blocks up to the end */
        if (mistake == 1) {
            index[0] = -1;
        } else if (mistake == 2) {
            index[0] = 128;
        } else if (mistake == 3) {
            index[1] = 2;
        }
        float zeros[64] = {0};
        assert_ok(b.vt->copy_to_device(b.dev, b.stream, b.mem, index, sizeof index, &err), err);
        assert_ok(b.vt->copy_to_device(b.dev, b.stream, b.mem + 256, zeros, sizeof zeros, &err),
                  err);
        struct sl_op op = {.kind = SL_OP_KV_STORE, .n_tokens = 1};
        op.kv_store =
            (struct sl_op_kv_store){.k = (const float *)(const void *)(b.mem + 256),
                                    .v = (const float *)(const void *)(b.mem + 384),
                                    .pos = (const int32_t *)(const void *)b.mem,
                                    .kv = {.data = cache,
                                           .types = {SL_TYPE_F16, SL_TYPE_F16},
                                           .n_kv_heads = 1,
                                           .head_dim = 32,
                                           .table = (const int32_t *)(const void *)(b.mem + 4),
                                           .table_stride = 2}};
        assert_ok(b.vt->run(b.dev, b.stream, &op, 1, NULL, &err), err);
        if (mistake) {
            assert_status(b.vt->stream_sync(b.dev, b.stream, &err), DEVICE);
            assert_mentions(err, "kv_store");
        } else {
            assert_ok(b.vt->stream_sync(b.dev, b.stream, &err), err);
        }
        free_bench(&b);
    }
}

/* Of a divided cache the part that is here is looked at: its first block at once, the others when
 * the op runs. The other part may be anywhere. */
static void test_bad_cache_parts(void **state)
{
    (void)state;
    static const struct {
        enum sl_kv_here here;
        int32_t pos;
        bool no_first, no_later;
        bool refused, fails;
    } cases[] = {
        {SL_KV_ALL, 127, false, false, false, false},  {SL_KV_ALL, 128, false, false, false, true},
        {SL_KV_ALL, 0, true, false, true, false},      {SL_KV_ALL, 0, false, true, true, false},
        {SL_KV_FIRST, 128, false, true, false, false}, {SL_KV_FIRST, 0, true, false, true, false},
        {SL_KV_LATER, 0, true, false, false, false},   {SL_KV_LATER, 128, true, false, false, true},
        {SL_KV_LATER, 64, false, true, true, false},
    };
    const struct sl_kv_types f16 = {SL_TYPE_F16, SL_TYPE_F16};
    const size_t block_bytes = sl_kv_block_bytes(f16, 1, 32);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct bench b = make_bench(NULL, 1 << 20);
        float zeros[64] = {0};
        assert_ok(
            b.vt->copy_to_device(b.dev, b.stream, b.mem, &cases[i].pos, sizeof(int32_t), &err),
            err);
        assert_ok(b.vt->copy_to_device(b.dev, b.stream, b.mem + 256, zeros, sizeof zeros, &err),
                  err);
        struct sl_op op = {.kind = SL_OP_KV_STORE, .n_tokens = 1};
        op.kv_store = (struct sl_op_kv_store){
            .k = (const float *)(const void *)(b.mem + 256),
            .v = (const float *)(const void *)(b.mem + 384),
            .pos = (const int32_t *)(const void *)b.mem,
            .kv = {.data = cases[i].no_first ? NULL : b.mem + 1024,
                   .types = f16,
                   .n_kv_heads = 1,
                   .head_dim = 32,
                   .n_first = 1,
                   .here = cases[i].here,
                   /* one block up to the end */
                   .later = cases[i].no_later ? NULL : b.mem + b.bytes - block_bytes}};
        const enum sluice_status queued = b.vt->run(b.dev, b.stream, &op, 1, NULL, &err);
        assert_int_equal(queued, cases[i].refused ? SLUICE_STATUS_INTERNAL : SLUICE_STATUS_OK);
        const enum sluice_status ran = b.vt->stream_sync(b.dev, b.stream, &err);
        assert_int_equal(ran, cases[i].fails ? SLUICE_STATUS_DEVICE : SLUICE_STATUS_OK);
        free_bench(&b);
    }
}

/* Memory is freed while work on it is still queued. */
static void test_freed_too_early(void **state)
{
    (void)state;
    const struct sl_sim_options slow = {.copy_bytes_per_s = 40e6};
    struct bench b = make_bench(&slow, 1 << 20);
    void *gone;
    assert_ok(b.vt->mem_alloc(b.dev, 4096, &gone, &err), err);
    assert_ok(b.vt->copy_to_device(b.dev, b.stream, b.mem, b.host, b.bytes, &err), err);
    assert_ok(b.vt->copy_to_device(b.dev, b.stream, gone, b.host, 4096, &err), err);
    b.vt->mem_free(b.dev, gone);
    assert_status(b.vt->stream_sync(b.dev, b.stream, &err), DEVICE);
    assert_mentions(err, "queued copy");
    /* A device that failed stays failed and says why. */
    assert_status(b.vt->copy_to_device(b.dev, b.stream, b.mem, b.host, 1, &err), DEVICE);
    assert_mentions(err, "queued copy");
    free_bench(&b);
}

static void test_memory_limit(void **state)
{
    (void)state;
    const struct sl_sim_options small = {.memory_bytes = 1 << 20};
    struct bench b = make_bench(&small, (1 << 20) - 1024);
    struct sl_device_info info;
    assert_ok(b.vt->info(b.dev, &info, &err), err);
    assert_int_equal(info.total_bytes, 1 << 20);
    assert_int_equal(info.free_bytes, 1024);
    void *mem;
    assert_status(b.vt->mem_alloc(b.dev, 1025, &mem, &err), OUT_OF_MEMORY);
    assert_mentions(err, "1024 bytes free");
    assert_ok(b.vt->mem_alloc(b.dev, 1024, &mem, &err), err);
    b.vt->mem_free(b.dev, mem);
    free_bench(&b);
}

/* Simulated bandwidth. A lower bound only: other work can make it longer, nothing shorter. */
static void test_bandwidth(void **state)
{
    (void)state;
    const struct sl_sim_options slow = {.copy_bytes_per_s = 100e6};
    struct bench b = make_bench(&slow, 1 << 20);
    struct sl_stream *other;
    struct sl_event *begin;
    struct sl_event *end;
    uint64_t ns;
    assert_ok(b.vt->host_register(b.dev, b.host, b.bytes, true, &err), err);
    assert_ok(b.vt->stream_create(b.dev, SL_STREAM_OPERATORS, &other, &err), err);
    assert_ok(b.vt->event_create(b.dev, true, &begin, &err), err);
    assert_ok(b.vt->event_create(b.dev, true, &end, &err), err);
    assert_ok(b.vt->event_record(b.dev, begin, other, &err), err);
    assert_ok(b.vt->stream_wait(b.dev, b.stream, begin, &err), err);
    const size_t most = b.bytes - 256;
    assert_ok(b.vt->copy_to_device(b.dev, b.stream, b.mem, b.host, most, &err), err);
    assert_ok(b.vt->copy_to_device(b.dev, other, b.mem + most, b.host, 256, &err), err);
    assert_ok(b.vt->event_record(b.dev, end, b.stream, &err), err);
    assert_ok(b.vt->stream_sync(b.dev, b.stream, &err), err);
    assert_ok(b.vt->stream_sync(b.dev, other, &err), err);
    assert_ok(b.vt->event_elapsed(b.dev, begin, end, &ns, &err), err);
    assert_true(ns >= most * 10); /* 100 MB/s are 10 ns a byte */
    b.vt->host_unregister(b.dev, b.host);
    b.vt->event_destroy(b.dev, begin);
    b.vt->event_destroy(b.dev, end);
    b.vt->stream_destroy(b.dev, other);
    free_bench(&b);
}

/* What a user of the device does from start to end; returns the first failure. Everything it made
 * is given back on every path. */
static enum sluice_status use_device(struct sl_device *dev)
{
    const struct sl_device_vtable *vt = dev->vt;
    enum sluice_status status;
    struct sl_stream *stream = NULL;
    struct sl_event *event = NULL;
    void *mem[2] = {NULL, NULL};
    void *locked = NULL;
    float host[64] = {1.0f};
    bool registered = false;
    if ((status = vt->stream_create(dev, SL_STREAM_OPERATORS, &stream, &err)) != SLUICE_STATUS_OK ||
        (status = vt->event_create(dev, true, &event, &err)) != SLUICE_STATUS_OK ||
        (status = vt->mem_alloc(dev, 4096, &mem[0], &err)) != SLUICE_STATUS_OK ||
        (status = vt->mem_alloc(dev, 4096, &mem[1], &err)) != SLUICE_STATUS_OK ||
        (status = vt->host_alloc(dev, 4096, &locked, &err)) != SLUICE_STATUS_OK ||
        (status = vt->host_register(dev, host, sizeof host, false, &err)) != SLUICE_STATUS_OK) {
        goto out;
    }
    registered = true;
    for (int i = 0; i < 3; i++) {
        struct sl_op op = {.kind = SL_OP_NORM, .n_tokens = 1};
        op.norm =
            (struct sl_op_norm){.x = mem[0], .y = mem[1], .n = 64, .rows_per_token = 1, .eps = 1};
        if ((status = vt->copy_to_device(dev, stream, mem[0], host, sizeof host, &err)) !=
                SLUICE_STATUS_OK ||
            (status = vt->run(dev, stream, &op, 1, NULL, &err)) != SLUICE_STATUS_OK ||
            (status = vt->copy_to_host(dev, stream, locked, mem[1], sizeof host, &err)) !=
                SLUICE_STATUS_OK ||
            (status = vt->event_record(dev, event, stream, &err)) != SLUICE_STATUS_OK) {
            goto out;
        }
    }
    status = vt->event_sync(dev, event, &err);
out:
    vt->event_destroy(dev, event);
    if (stream) { /* queued copies still use the memory below */
        (void)vt->stream_sync(dev, stream, NULL);
    }
    vt->stream_destroy(dev, stream);
    if (registered) {
        vt->host_unregister(dev, host);
    }
    vt->host_free(dev, locked);
    vt->mem_free(dev, mem[0]);
    vt->mem_free(dev, mem[1]);
    return status;
}

/* For each kind of fault: the n-th call fails for n = 1, 2, ... until none does. */
static void test_faults(void **state)
{
    (void)state;
    const size_t blocks = sl_mem_n_blocks();
    for (int kind = 0; kind < 4; kind++) {
        for (int late = 0; late < 2; late++) {
            uint64_t n = 0;
            enum sluice_status status;
            do {
                n++;
                struct sl_sim_options options = {.fail_late = late, .max_random_delay_ns = 20000};
                uint64_t *counts[] = {&options.fail_alloc_at, &options.fail_copy_at,
                                      &options.fail_run_at, &options.fail_register_at};
                *counts[kind] = n;
                struct sl_device *dev = make_device(NULL);
                sl_device_sim_set(dev, &options);
                status = use_device(dev);
                if (status != SLUICE_STATUS_OK) {
                    assert_status(status, DEVICE);
                    assert_mentions(err, "simulated fault");
                }
                if (status != SLUICE_STATUS_OK && (!late || kind == 0 || kind == 3)) {
                    /* The call failed; the device is well. */
                    const struct sl_sim_options calm = {0};
                    sl_device_sim_set(dev, &calm);
                    assert_ok(use_device(dev), err);
                }
                sl_device_destroy(&dev);
                assert_int_equal(sl_mem_n_blocks(), blocks);
            } while (status != SLUICE_STATUS_OK);
            const uint64_t n_calls[] = {3, 6, 3, 1};
            assert_int_equal(n, n_calls[kind] + 1);
        }
    }
}

/* The same over the host memory that the device itself needs. */
static void test_memory_faults(void **state)
{
    (void)state;
    const size_t blocks = sl_mem_n_blocks();
    bool fired = true;
    int n = 0;
    for (; fired; n++) {
        struct sl_device *dev = NULL;
        sl_mem_fail_after(n, false);
        enum sluice_status status = sl_device_sim_create(&dev, NULL, &err);
        if (status == SLUICE_STATUS_OK) {
            status = use_device(dev);
        }
        fired = sl_mem_fault_fired();
        sl_mem_fail_after(-1, false);
        assert_int_equal(status, fired ? SLUICE_STATUS_OUT_OF_MEMORY : SLUICE_STATUS_OK);
        sl_device_destroy(&dev);
        assert_int_equal(sl_mem_n_blocks(), blocks);
    }
    assert_true(n > 5);
}

/* Once warmed up the queues take work without allocating. */
static void test_no_allocation_per_item(void **state)
{
    (void)state;
    struct bench b = make_bench(NULL, 1 << 16);
    struct sl_op ops[64];
    for (int i = 0; i < 64; i++) {
        ops[i] = (struct sl_op){.kind = SL_OP_NORM, .n_tokens = 1};
        float *mem = (float *)(void *)(b.mem + 256 * i);
        ops[i].norm =
            (struct sl_op_norm){.x = mem, .y = mem, .n = 64, .rows_per_token = 1, .eps = 1};
    }
    struct sl_event *event;
    assert_ok(b.vt->event_create(b.dev, false, &event, &err), err);
    assert_ok(b.vt->run(b.dev, b.stream, ops, 64, NULL, &err), err);
    sl_mem_forbid(true);
    for (int i = 0; i < 100; i++) {
        assert_ok(b.vt->copy_to_device(b.dev, b.stream, b.mem, b.host, b.bytes, &err), err);
        assert_ok(b.vt->run(b.dev, b.stream, ops, i % 65, NULL, &err), err);
        assert_ok(b.vt->event_record(b.dev, event, b.stream, &err), err);
        assert_ok(b.vt->stream_wait(b.dev, b.stream, event, &err), err);
    }
    assert_ok(b.vt->event_sync(b.dev, event, &err), err);
    sl_mem_forbid(false);
    b.vt->event_destroy(b.dev, event);
    free_bench(&b);
}

static void test_library_missing(void **state)
{
    (void)state;
    struct sl_device *dev = (struct sl_device *)&err;
    setenv("SLUICE_CUDA_LIBRARY", "no/such/library.so", 1);
    assert_status(sl_device_cuda_create(&dev, 0, &err), DEVICE);
    assert_null(dev);
    assert_mentions(err, "no/such/library.so");
    /* Something that is there but no library. */
    setenv("SLUICE_CUDA_LIBRARY", "/dev/null", 1);
    assert_status(sl_device_cuda_create(&dev, 0, &err), DEVICE);
    assert_mentions(err, "/dev/null");
    unsetenv("SLUICE_CUDA_LIBRARY");
    assert_status(sl_device_cuda_create(&dev, -1, &err), INVALID_ARGUMENT);
}

int main(void)
{
    const size_t blocks = sl_mem_n_blocks();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_missing_wait),
        cmocka_unit_test(test_source_reused),
        cmocka_unit_test(test_fresh_memory_is_poison),
        cmocka_unit_test(test_bad_addresses),
        cmocka_unit_test(test_bad_cache_blocks),
        cmocka_unit_test(test_bad_cache_parts),
        cmocka_unit_test(test_freed_too_early),
        cmocka_unit_test(test_memory_limit),
        cmocka_unit_test(test_bandwidth),
        cmocka_unit_test(test_faults),
        cmocka_unit_test(test_memory_faults),
        cmocka_unit_test(test_no_allocation_per_item),
        cmocka_unit_test(test_library_missing),
    };
    int n_failed = cmocka_run_group_tests_name("sim", tests, NULL, NULL);

    struct sl_device *dev;
    if (sl_device_sim_create(&dev, NULL, &err) != SLUICE_STATUS_OK) {
        return 1;
    }
    n_failed += device_tests_run("sim", dev);
    /* The order of queues is all that delays can change; the operators were tried above. */
    const struct sl_sim_options delays = {.max_random_delay_ns = 100000, .seed = 7};
    sl_device_sim_set(dev, &delays);
    n_failed += device_tests_run_queues("sim with delays", dev);
    sl_device_destroy(&dev);
    if (sl_mem_n_blocks() != blocks) {
        printf("memory was leaked\n");
        n_failed++;
    }
    return n_failed;
}
