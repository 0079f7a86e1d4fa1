/* SPDX-License-Identifier: Apache-2.0
 *
 * Plain reads of memory by a team, the yardstick of the benchmarks whose speed is that of memory.
 */
#ifndef SL_BENCH_READ_MEMORY_H
#define SL_BENCH_READ_MEMORY_H

#include <stddef.h>
#include <stdint.h>

#define READ_MEMORY_MAX_THREADS 256

struct read_memory {
    const void *data;
    size_t bytes;
    struct {
        _Alignas(128) uint64_t sum; /* keeps the reads from being left out */
    } sink[READ_MEMORY_MAX_THREADS];
};

typedef uint64_t read_vector __attribute__((vector_size(32)));

/* A function for sl_pool_run: the sum of a thread's share, as independent chains of vectors. */
static inline void read_memory(void *arg, int thread, int n_threads)
{
    struct read_memory *r = arg;
    const size_t n = r->bytes / 256 / (size_t)n_threads;
    const read_vector *p = (const read_vector *)r->data + 8 * n * (size_t)thread;
    read_vector sums[8] = {{0}};
    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k < 8; k++) {
            if (k % 2 == 0) {
                __builtin_prefetch(p + 8 * i + k + 128);
            }
            sums[k] += p[8 * i + k];
        }
    }
    for (int k = 0; k < 8; k++) {
        r->sink[thread].sum += sums[k][0] + sums[k][1] + sums[k][2] + sums[k][3];
    }
}

#endif
