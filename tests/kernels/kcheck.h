/* SPDX-License-Identifier: Apache-2.0
 *
 * kcheck holds every kernel to the scalar reference, and times it. Its inside:
 *
 *   case      the shape of one op, a way to fill its operands and a seed   (kcheck_cases.c)
 *   instance  the case with operands in one block of memory                (kcheck_instance.c)
 *   bounds    how far each output may be from the reference, and why       (kcheck_bounds.c)
 *   target    what runs the op: a CPU level or a device                    (kcheck_target.c)
 *
 * Router and experts have all of these in kcheck_experts.c.
 *
 * An instance is one contiguous block: operands with guard bytes between them. So it is copied,
 * moved to a device and compared as a whole, and a write outside an output is seen anywhere.
 */
#ifndef SL_KCHECK_H
#define SL_KCHECK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/pool.h"
#include "cpu/cpu.h"
#include "cpu/kernels.h"
#include "device/device.h"
#include "op/op.h"

enum kc_fill {
    KC_RANDOM,
    KC_ZEROS,
    KC_EXTREMES,  /* large values of either sign, highest codes */
    KC_OUTLIER,   /* one value a thousand times the others in each row */
    KC_SUBNORMAL, /* floats and block scales below the normal range */
    KC_N_FILLS,
};

struct kc_case {
    /* Shapes and options. A pointer that may be NULL is NULL here when it shall be absent, else
     * KC_PRESENT; the others are not looked at. */
    struct sl_op op;
    bool in_place;       /* norm: y is x */
    int32_t n_sequences; /* kv_store, attention */
    int32_t n_past;      /* attention: positions before the first token of sequence 0 */
    int32_t n_experts;   /* experts: ids are below this */
    bool skewed;         /* experts: some are chosen much more often */
    enum kc_fill fill;
    uint64_t seed;
};
#define KC_PRESENT ((void *)16)

enum kc_role { KC_INPUT, KC_OUTPUT, KC_OUTPUT_KV, KC_OUTPUT_CHOICE, KC_SCRATCH };

struct kc_region {
    enum kc_role role;
    size_t offset, bytes;
};

#define KC_MAX_REGIONS 24

struct kc_instance {
    struct kc_case c;
    struct sl_op op; /* its addresses lie in `base` */
    char *base;
    size_t bytes;
    struct kc_region regions[KC_MAX_REGIONS];
    int n_regions;
};

/* The op kinds that cases are made of: the first of enum sl_op_kind. */
#define KC_N_KINDS (SL_OP_MERGE + 1)

/* Random numbers: the same on every machine. */
struct kc_rng {
    uint64_t state;
};
uint64_t kc_rng_next(struct kc_rng *rng);
int kc_rng_below(struct kc_rng *rng, int n);               /* 0 .. n - 1 */
int kc_rng_pick(struct kc_rng *rng, int n, const int *of); /* one of n */
float kc_rng_float(struct kc_rng *rng);                    /* about normal, standard deviation 1 */

/* Case `index` of an op kind: the first ones are fixed, the others follow from the seed. */
void kc_case_make(struct kc_case *out, enum sl_op_kind kind, int index, uint64_t seed);
/* Cases of realistic size for timing; false past the last. */
bool kc_case_bench(struct kc_case *out, enum sl_op_kind kind, int index);
void kc_case_describe(const struct kc_case *c, char *out, size_t out_bytes);

/* false: out of memory. */
bool kc_instance_init(struct kc_instance *in, const struct kc_case *c);
void kc_instance_finish(struct kc_instance *in);
/* Room for an operand; n floats in rows; floats that stay ordinary; a packed row. While sizes are
 * being added up there is no memory yet and the address is NULL. */
struct kc_layout {
    struct kc_instance *in;
    struct kc_rng rng;
    size_t at;
};
void *kc_place(struct kc_layout *l, enum kc_role role, size_t bytes);
float *kc_floats(struct kc_layout *l, enum kc_role role, int64_t n, int64_t row_items);
float *kc_plain_floats(struct kc_layout *l, int64_t n, float scale, float shift);
const void *kc_matrix(struct kc_layout *l, enum sl_type type, int64_t n_rows, int64_t n_cols);

/* Tables in a copy of the block hold addresses of the original: make them point into the block at
 * `to`. */
void kc_tables_move(const struct kc_instance *in, char *copy, const char *to);
/* The op with its addresses moved from `from` to `to`. */
struct sl_op kc_op_moved(const struct sl_op *op, const char *from, char *to);

/* How a target may round: what the contract of the operators allows. */
struct kc_precision {
    double input;  /* relative rounding of activations, queries and softmax weights */
    double bf16;   /* of activations that meet BF16 weights */
    bool x_8bit;   /* products with quantized weights may round x to 8 bits in blocks of 32 */
    bool words;    /* products with F16 and BF16 weights may round both sides to 16-bit integers */
    bool kv_exact; /* packed KV is the reference's to the bit; else one level off is fine */
};

/* Fill `bounds`, as large as the instance: at the offset of every output float the largest
 * allowed distance from the reference. */
void kc_bounds(const struct kc_instance *in, const struct kc_precision *precision, char *bounds);

#define KC_ULP 0x1p-24 /* relative rounding of one float operation */

/* What is known of one product w . x. */
struct kc_product {
    double value;
    double error;
};
void kc_set_bound(const struct kc_instance *in, char *bounds, const float *y, double bound);
double kc_sum_error(double n);
struct kc_product kc_product_bound(const double *w, const float *x, int64_t n, enum sl_type type,
                                   const struct kc_precision *p, bool independent);
struct kc_product kc_gated(enum sl_activation activation, struct kc_product gate,
                           struct kc_product up);

/* Router and experts (kcheck_experts.c). */
void kc_router_make(struct kc_case *c, struct kc_rng *rng);
void kc_experts_make(struct kc_case *c, struct kc_rng *rng, int index);
bool kc_experts_bench(struct kc_case *c, int index);
void kc_divide_make(struct kc_case *c, struct kc_rng *rng);
void kc_divide_place(struct kc_layout *l, struct sl_op *op);
int kc_experts_describe(const struct kc_case *c, char *out, size_t out_bytes);
void kc_router_place(struct kc_layout *l, struct sl_op *op);
void kc_experts_place(struct kc_layout *l, struct sl_op *op);
void kc_experts_bounds(const struct kc_instance *in, const struct kc_precision *p, char *bounds);
/* Whether the choice and weights in `result` are right; else says why not. */
bool kc_router_compare(const struct kc_instance *in, const struct kc_precision *p,
                       const char *result, char *why, size_t why_bytes);

struct kc_target {
    char name[64];
    const struct sl_cpu_kernels *kernels; /* CPU levels */
    struct sl_pool *pool;
    int n_threads;            /* of the pool */
    struct sl_device *device; /* devices */
    struct kc_precision precision;
};

/* Run the op of an instance whose block (in->bytes) is a copy at `block`, in place. On the CPU
 * with `n_threads` threads (1: without the pool). UNSUPPORTED: the device has no such kernel. */
enum sluice_status kc_target_run(struct kc_target *t, const struct kc_instance *in, char *block,
                                 int n_threads, struct sluice_error *err);
/* Median time of one run in nanoseconds and half the distance between the quartiles. */
enum sluice_status kc_target_time(struct kc_target *t, const struct kc_instance *in,
                                  double *median_ns, double *spread_ns, struct sluice_error *err);

/* Bytes that the op must read and write at least, and its floating-point operations. */
void kc_case_work(const struct kc_instance *in, double *bytes, double *flops);

#endif
