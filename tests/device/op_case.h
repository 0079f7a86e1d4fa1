/* SPDX-License-Identifier: Apache-2.0
 *
 * One run of an op list on a device, held to the scalar reference. A case owns a block of host
 * memory in which all operands lie with guard bytes between them; the device gets a copy of the
 * block, and the same ops with their addresses moved over. Afterwards the declared outputs agree
 * within their bounds, and every other byte is as it was.
 */
#ifndef SL_TESTS_OP_CASE_H
#define SL_TESTS_OP_CASE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "device/device.h"

#define CASE_MAX_OPS 16
#define CASE_MAX_OUTPUTS 32

enum case_output_kind {
    CASE_FLOATS,    /* compared by value */
    CASE_ROWS,      /* packed rows, compared unpacked */
    CASE_EXACT,     /* the same bytes */
    CASE_UNDEFINED, /* may hold anything */
};

struct case_output {
    enum case_output_kind kind;
    size_t offset;
    size_t bytes;
    enum sl_type type; /* of CASE_ROWS */
    double bound;      /* on |difference| / |reference|, both Euclidean norms */
};

struct op_case {
    char name[160]; /* shown when it fails */
    uint64_t random;
    char *block;
    size_t used;
    size_t capacity;
    struct sl_op ops[CASE_MAX_OPS];
    int n_ops;
    struct case_output outputs[CASE_MAX_OUTPUTS];
    int n_outputs;
};

void case_init(struct op_case *c, uint64_t seed, const char *format, ...)
    __attribute__((format(printf, 3, 4)));
void case_finish(struct op_case *c);

/* Room for operands. The block never moves, so addresses stay good. */
void *case_room(struct op_case *c, size_t bytes);
/* Normally distributed numbers times `scale`, with one much larger among them now and then. */
float *case_floats(struct op_case *c, size_t n, float scale);
/* A matrix of such numbers, packed. */
struct sl_matrix case_matrix(struct op_case *c, enum sl_type type, int64_t n_rows, int64_t n_cols);
/* n values that rise by one from `first`. */
int32_t *case_positions(struct op_case *c, int n, int32_t first);
uint32_t case_random(struct op_case *c, uint32_t below);

/* A cache for sequences with `n_blocks` blocks each, scattered over memory by a table or, with one
 * sequence, in order without one. */
struct sl_kv_view case_cache(struct op_case *c, struct sl_kv_types types, int n_kv_heads,
                             int head_dim, int n_seqs, int n_blocks, bool with_table);
/* One that is divided; what is not here has no address, and what is not written holds NaN. */
struct sl_kv_view case_divided_cache(struct op_case *c, struct sl_kv_types types, int n_kv_heads,
                                     int head_dim, int n_blocks, int n_first, enum sl_kv_here here);
/* Fill positions 0 .. n-1 of a sequence with random keys and values, by the reference. */
void case_fill_cache(struct op_case *c, const struct sl_kv_view *kv, int32_t seq, int n);
/* The whole cache is output: what the type loses is in both, one step of rounding is allowed. */
void case_output_cache(struct op_case *c, const struct sl_kv_view *kv, int n_blocks,
                       double least_bound);

struct sl_op *case_op(struct op_case *c, enum sl_op_kind kind, int n_tokens);
void case_output(struct op_case *c, enum case_output_kind kind, const void *at, size_t bytes,
                 enum sl_type type, double bound);

/* Run and compare; fails the test on any difference. False: the device says UNSUPPORTED, which is
 * a failure too unless `optional`; its message must hold `naming`. */
bool case_check(struct op_case *c, struct sl_device *dev, bool optional, const char *naming);

#endif
