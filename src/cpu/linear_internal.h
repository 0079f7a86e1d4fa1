/* SPDX-License-Identifier: Apache-2.0
 *
 * Inside of the matrix products: packed activations, and the kernels that one level supplies.
 *
 * Two ways through an op. Up to SL_LINEAR_ROWS_TOKENS tokens (half as many where a weight type is
 * not quantized): every weight row is read once and multiplied with all tokens ("rows"), which is
 * bound by memory. More tokens: blocks of rows are unpacked into a small panel that stays in the
 * cache and is reused for all tokens ("panels"), which is bound by the multipliers.
 *
 * Quantized weights meet activations rounded to 8 bits, one scale per 32 columns. Floating-point
 * weights meet the float activations of the op, or in panels what the processor multiplies faster.
 */
#ifndef SL_CPU_LINEAR_INTERNAL_H
#define SL_CPU_LINEAR_INTERNAL_H

#include <stdatomic.h>

#include "cpu/linear.h"
#include "op/op.h"

/* Most tokens that go the way of rows, and most of them in one call of a row kernel. */
#define SL_LINEAR_ROWS_TOKENS 8
#define SL_LINEAR_CALL_TOKENS 4
/* Rows of one call of a row kernel. */
#define SL_LINEAR_CALL_ROWS 64

/* How the activations for a type are packed, in both ways through an op. */
enum sl_linear_layout {
    SL_LINEAR_FLOAT, /* not packed */
    /* Groups of vector_bytes / 16 blocks of 32 columns: the first 16 bytes of each block; the last
     * 16 bytes of each; the block scales, 4 times each; scale times block sum, a quarter in each
     * of 4 lanes. 4 vectors a group; missing blocks of the last group are zero. */
    SL_LINEAR_HALVES,
    /* Super-blocks of 256 columns: the bytes in order; the scales of 16 columns; scale times sum
     * of 16 columns. 384 bytes. */
    SL_LINEAR_SUPER,
    SL_LINEAR_N_LAYOUTS,
};
#define SL_LINEAR_SUPER_BYTES 384

/* Packed activations of a few tokens, by layout. */
struct sl_linear_x {
    const void *data[SL_LINEAR_N_LAYOUTS]; /* token after token */
    void *out[SL_LINEAR_N_LAYOUTS];        /* the same memory, for packing */
    size_t stride[SL_LINEAR_N_LAYOUTS];    /* bytes from token to token */
    int64_t n_cols;
};

/* What a thread will read: the rows from a call's first on to the end of its stretch, and what
 * follows it (NULL: nothing known). Rows are fetched ahead along this line. */
struct sl_linear_ahead {
    int64_t n_rows;
    const void *next;
};
/* So much is fetched ahead at least, and at the start of a stretch. */
#define SL_LINEAR_FETCH_BYTES 4096

/* out[t * SL_LINEAR_CALL_ROWS + r] = w_r . x_t for n_rows <= SL_LINEAR_CALL_ROWS rows that lie one
 * after the other at w, and tokens first .. first + n_tokens - 1, n_tokens <=
 * SL_LINEAR_CALL_TOKENS. The result of a row and token depends on nothing else in the call. */
typedef void sl_linear_rows_fn(const void *w, size_t row_bytes, int n_rows,
                               const struct sl_linear_ahead *ahead, const struct sl_linear_x *x,
                               int first, int n_tokens, float *out);

/* Kernels of the way of rows. */
struct sl_linear_rows_kernels {
    int vector_bytes; /* of the layout SL_LINEAR_HALVES */
    void (*pack[SL_LINEAR_N_LAYOUTS])(const float *x, int64_t n_cols, void *dst);
    sl_linear_rows_fn *const *rows; /* by type; NULL where there is none */
};

/* Panels: a block of rows times a range of columns, unpacked so that one vector holds the same
 * columns of consecutive rows. A panel meets tiles of tokens. */
enum sl_linear_panel_kind {
    SL_LINEAR_BYTES,   /* 8-bit levels, 4 columns a lane; activations packed to 8 bits */
    SL_LINEAR_WORDS,   /* 16-bit integers, 2 columns a lane; activations packed to 16 bits */
    SL_LINEAR_FLOATS,  /* floats, 1 column a lane; activations as they are */
    SL_LINEAR_BFLOATS, /* bfloats, 2 columns a lane; activations rounded to bfloats */
    SL_LINEAR_N_KINDS,
};
#define SL_LINEAR_MAX_PANEL_ROWS 32
#define SL_LINEAR_BYTES_COLS 768 /* most columns of a panel; half of it with words */
#define SL_LINEAR_FLOATS_STEPS 128
#define SL_LINEAR_FLOATS_TOKENS 16 /* most tokens of a tile of floats */
/* Not a power of two, or the rows of a tile would share their cache sets. */
#define SL_LINEAR_FLOATS_STRIDE (SL_LINEAR_FLOATS_STEPS + 16)
#define SL_LINEAR_MAX_TILE_TOKENS 32
#define SL_LINEAR_SUMS (64 << 10) /* sums that a thread has memory for, behind the panels */

/* How the activations' sums enter: nothing else depends on the type once a panel is made. */
struct sl_linear_correction {
    int offset;   /* taken off every level */
    bool minimum; /* or the type has minimums (and no offset) */
    bool group16; /* scales and minimums of 16 columns, else of 32 */
};

/* Panel of bytes or words. Scales and minimums: [columns / 16 or 32][panel_rows]. */
struct sl_linear_panel {
    uint8_t q[SL_LINEAR_BYTES_COLS * SL_LINEAR_MAX_PANEL_ROWS];
    float d[SL_LINEAR_BYTES_COLS / 16 * SL_LINEAR_MAX_PANEL_ROWS];
    float m[SL_LINEAR_BYTES_COLS / 16 * SL_LINEAR_MAX_PANEL_ROWS];
    uint8_t rows[SL_LINEAR_BYTES_COLS * SL_LINEAR_MAX_PANEL_ROWS]; /* levels row by row */
};

/* The columns of a panel for one tile of tokens. */
struct sl_linear_tile {
    const int8_t *q; /* [columns / 32][tokens][32], bytes or words */
    const float *d;  /* [columns / 32][tokens] */
    /* [columns / 16 or 32][tokens]: -offset times the sums (int32), or the sums times the scales
     * (float) where the type has minimums. */
    const void *sums;
};

/* y[t * stride + row] += panel x tile, for all rows of a panel and 1 .. tile tokens. n_steps:
 * columns, or pairs of columns for bfloats. */
typedef void sl_linear_tile_fn(const void *panel, const void *x, int n_tokens, int n_steps,
                               float *y, int64_t stride);

typedef void sl_linear_build_fn(const uint8_t *w, size_t row_bytes, int n_rows, int n_cols,
                                struct sl_linear_panel *panel);

struct sl_linear_panel_type {
    enum sl_linear_panel_kind kind;
    struct sl_linear_correction correction; /* of bytes */
    /* For bytes and words. Unpack n_rows <= panel_rows rows (the others become zero) from column 0
     * of `w` on. n_cols is whole 32s, and whole 256s (words: 128s) but at the end of a row. */
    sl_linear_build_fn *build;
    sl_linear_tile_fn *tile; /* panel: struct sl_linear_panel, x: struct sl_linear_tile */
};

/* n_cols (whole 32s) of n_tokens tokens, `stride` floats apart, as the arrays of a tile. */
typedef void sl_linear_pack_bytes_fn(const float *x, int64_t stride, int n_tokens, int64_t n_cols,
                                     int8_t *q, float *d,
                                     const struct sl_linear_correction *corrections,
                                     void *const *sums, int n_corrections);
typedef void sl_linear_pack_words_fn(const float *x, int64_t stride, int n_tokens, int64_t n_cols,
                                     int16_t *q, float *d);
/* To bfloats, as the set's tile kernel wants them: [pair of columns][tokens] or
 * [columns / 32][tokens][32]. */
typedef void sl_linear_pack_bfloats_fn(const float *x, int64_t stride, int n_tokens, int64_t n_cols,
                                       void *dst);
/* Columns first .. first + n_cols - 1 of rows of a type to panel[column][panel_rows] of floats, or
 * panel[pair of columns][..] of bfloats (whole 32s of columns); missing rows and columns are zero.
 * `rows` is scratch of as many bytes. n_cols is at most SL_LINEAR_FLOATS_STEPS, or as many pairs.
 */
typedef void sl_linear_build_floats_fn(enum sl_type type, const void *w, size_t row_bytes,
                                       int n_rows, int64_t first, int n_cols, void *panel,
                                       void *rows);
/* y = act(gate) * up */
typedef void sl_linear_activate_fn(enum sl_activation activation, const float *gate,
                                   const float *up, float *y, int64_t n);

struct sl_linear_panel_kernels {
    int panel_rows;
    int tile_tokens[SL_LINEAR_N_KINDS];       /* most tokens of a tile, by kind of panel */
    const struct sl_linear_panel_type *types; /* by type */
    sl_linear_pack_bytes_fn *pack_bytes;
    sl_linear_pack_words_fn *pack_words; /* where there are types of words */
    sl_linear_build_floats_fn *build_floats;
    sl_linear_tile_fn *tile_floats; /* tiles: [tokens][SL_LINEAR_FLOATS_STRIDE] */
    /* NULL where the processor has no product of bfloats. */
    sl_linear_pack_bfloats_fn *pack_bfloats;
    sl_linear_build_floats_fn *build_bfloats;
    sl_linear_tile_fn *tile_bfloats;
    /* Where tile kernels need the processor in a state of its own (NULL: they do not): a thread
     * calls `open` before those of a kind of panel, and `close` after. */
    void (*open)(enum sl_linear_panel_kind kind, bool group16);
    void (*close)(void);
};

struct sl_cpu_linear_kernels {
    const char *name;
    enum sl_cpu_level level; /* that this set belongs to; a level may have several */
    unsigned features;       /* what it needs beyond its level: SL_LINEAR_NEEDS_* */
    const struct sl_linear_rows_kernels *rows; /* NULL: the scalar way for everything */
    const struct sl_linear_panel_kernels *panels;
    sl_linear_activate_fn *activate;
};

#define SL_LINEAR_NEEDS_AVX_VNNI 1u
#define SL_LINEAR_NEEDS_AVX512_BF16 2u

/* The sets that this processor runs, rising; NULL past the last. */
const struct sl_cpu_linear_kernels *sl_linear_variant(int i);

/* One thread's part in one op. */
struct sl_linear_call {
    const struct sl_cpu_linear_kernels *kernels;
    const struct sl_op_linear *op;
    int n_tokens;
    char *scratch; /* of the team */
    char *own;     /* of this thread */
    struct sl_pool *pool;
    int thread, n_threads;
    atomic_int *taken; /* pieces given out so far, of the team; NULL when alone */
    bool exact;        /* activations stay floats where the weights are floats, halves or bfloats */
};

/* Activations packed for panels: tile by tile; inside a tile as in struct sl_linear_tile. */
struct sl_linear_packed {
    int64_t n_cols;
    int8_t *q;
    float *d;
    struct sl_linear_correction corrections[SL_LINEAR_MAX_PARTS];
    void *sums[SL_LINEAR_MAX_PARTS];
    int n_corrections; /* 0: not bytes */
    bool words;
    char *bfloats;
};

/* The way of panels in steps, for ops that bring their activations and share their work in their
 * own way (experts). Layout: where the packed arrays for c->n_tokens tokens lie in c->scratch
 * (nothing of the op is read but shapes and types). */
void sl_linear_packed_layout(const struct sl_linear_call *c, struct sl_linear_packed *x);
/* Tokens of a tile; 0: floats are multiplied as they are, there is nothing to pack. */
int sl_linear_packed_tile(const struct sl_linear_call *c, const struct sl_linear_packed *x);
/* Pack columns col .. col + n_cols - 1 of the tile of n_tokens tokens that begins at `token`, from
 * rows `stride` floats apart; src is column `col` of the first. Columns come in pieces of
 * SL_LINEAR_PACK_COLS, the last may be shorter. */
#define SL_LINEAR_PACK_COLS 512
void sl_linear_packed_fill(const struct sl_linear_call *c, const struct sl_linear_packed *x,
                           const float *src, int64_t stride, int token, int n_tokens, int64_t col,
                           int64_t n_cols);
/* Part 0, at most SL_LINEAR_MAX_PANEL_ROWS rows and all tokens, by this thread alone. y is written
 * as [tokens][SL_LINEAR_MAX_PANEL_ROWS]; there is no bias. Uses SL_LINEAR_PANELS_BYTES of c->own.
 */
#define SL_LINEAR_PANELS_BYTES ((size_t)96 << 10)
void sl_linear_run_packed(const struct sl_linear_call *c, const struct sl_linear_packed *x);

/* The line of all weights: the parts that are swept one after the other (gate and up are swept
 * together, by the rows of the gate), laid end to end. */
int sl_linear_n_swept(const struct sl_op_linear *op);
size_t sl_linear_line_bytes(const struct sl_op_linear *op);
/* The rows of part i between two bytes of the line, whole fours but at the end of the part. */
void sl_linear_rows_between(const struct sl_op_linear *op, int i, int64_t from, int64_t to,
                            int64_t *first, int64_t *end);

/* The whole of a thread's part, whichever way it goes. */
void sl_linear_run(const struct sl_linear_call *c);
void sl_linear_run_rows(const struct sl_linear_call *c);
/* Fetch the first of what sl_linear_run_rows will read. */
void sl_linear_fetch_rows(const struct sl_linear_call *c);
void sl_linear_run_panels(const struct sl_linear_call *c);
/* Rows first .. end - 1 of a part, without activation. */
void sl_linear_scalar_rows(const struct sl_op_linear *op, int part, int32_t n_tokens, int64_t first,
                           int64_t end);

sl_linear_activate_fn sl_linear_activate_scalar;
#if defined(__x86_64__)
extern const struct sl_linear_rows_kernels sl_linear_rows_avx2;
extern const struct sl_linear_rows_kernels sl_linear_rows_avxvnni;
extern const struct sl_linear_rows_kernels sl_linear_rows_avx512;
extern const struct sl_linear_rows_kernels sl_linear_rows_avx512vnni;
extern const struct sl_linear_panel_kernels sl_linear_panels_avx2;
extern const struct sl_linear_panel_kernels sl_linear_panels_avxvnni;
extern const struct sl_linear_panel_kernels sl_linear_panels_avx512;
extern const struct sl_linear_panel_kernels sl_linear_panels_avx512vnni;
extern const struct sl_linear_panel_kernels sl_linear_panels_avx512bf16; /* with VNNI */
extern const struct sl_linear_panel_kernels sl_linear_panels_amx;
sl_linear_activate_fn sl_linear_activate_avx2, sl_linear_activate_avx512;
sl_linear_pack_bytes_fn sl_linear_pack_bytes_avx2;
sl_linear_build_floats_fn sl_linear_build_floats_avx2, sl_linear_build_floats_avx512;
sl_linear_build_floats_fn sl_linear_build_bfloats_avx512bf16;
sl_linear_pack_bfloats_fn sl_linear_pack_bfloats_avx512bf16;
sl_linear_tile_fn sl_linear_tile_floats_avx2, sl_linear_tile_floats_avx512;
sl_linear_tile_fn sl_linear_tile_bfloats_avx512bf16;
sl_linear_pack_words_fn sl_linear_pack_words_avx512vnni;
sl_linear_build_fn sl_linear_build_words_f16_avx512vnni;
sl_linear_tile_fn sl_linear_tile_words_avx512vnni;
#elif defined(__aarch64__)
extern const struct sl_linear_rows_kernels sl_linear_rows_neon;
extern const struct sl_linear_panel_kernels sl_linear_panels_neon;
#endif

/* Fetch the first lines of a stretch, when it is known before its turn. */
static inline void sl_linear_fetch_first(const void *w)
{
    for (size_t at = 0; at < SL_LINEAR_FETCH_BYTES; at += 64) {
        __builtin_prefetch((const char *)w + at);
    }
}

static inline enum sl_linear_layout sl_linear_layout(enum sl_type type)
{
    switch (type) {
    case SL_TYPE_Q4_0:
    case SL_TYPE_Q4_1:
    case SL_TYPE_Q5_0:
    case SL_TYPE_Q5_1:
    case SL_TYPE_Q8_0:
    case SL_TYPE_IQ4_NL:
    case SL_TYPE_MXFP4:
        return SL_LINEAR_HALVES;
    case SL_TYPE_Q2_K:
    case SL_TYPE_Q3_K:
    case SL_TYPE_Q4_K:
    case SL_TYPE_Q5_K:
    case SL_TYPE_Q6_K:
    case SL_TYPE_IQ4_XS:
        return SL_LINEAR_SUPER;
    default:
        return SL_LINEAR_FLOAT;
    }
}

#endif
