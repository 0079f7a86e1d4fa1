// SPDX-License-Identifier: Apache-2.0
//
// The matrix products of the CUDA device without a GPU: the kernels' own source, compiled as C++
// and run thread by thread (cuda_emulate.h), held to sl_dequantize_row and sl_op_run_ref.
//
// Activations are whole multiples of a power of two with a largest level of 127 in every block, so
// that packing them is exact and what is left is the rounding of float sums: a wrong index cannot
// hide behind a loose bound. Matrices lie in allocations of exactly their size for the address
// sanitizer's sake, at the 256-byte alignment that the arena gives.
#define SL_CUDA_EMULATE
// One unit: the kernels' files, in the order that the build compiles them.
#include "device/cuda/linear.cu"
#include "device/cuda/linear_gemm_f.cu"
#include "device/cuda/linear_gemm_k.cu"
#include "device/cuda/linear_gemm_q.cu"
#include "device/cuda/linear_mid_f.cu"
#include "device/cuda/linear_mid_k.cu"
#include "device/cuda/linear_mid_q.cu"
#include "device/cuda/linear_vec_f.cu"
#include "device/cuda/linear_vec_k.cu"
#include "device/cuda/linear_vec_q.cu"

static int n_failed;
static uint64_t random_state = 88172645463325252u;

static uint32_t random_below(uint32_t n)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 33) % n;
}

static void check(bool ok, const char *what, double found, double bound)
{
    if (!ok) {
        fprintf(stderr, "FAILED %s: %g, bound %g\n", what, found, bound);
        n_failed++;
    }
}

static const enum sl_type packed_types[] = {
    SL_TYPE_Q4_0,   SL_TYPE_Q4_1,   SL_TYPE_Q5_0,  SL_TYPE_Q5_1, SL_TYPE_Q8_0,
    SL_TYPE_Q2_K,   SL_TYPE_Q3_K,   SL_TYPE_Q4_K,  SL_TYPE_Q5_K, SL_TYPE_Q6_K,
    SL_TYPE_IQ4_NL, SL_TYPE_IQ4_XS, SL_TYPE_MXFP4,
};
static const enum sl_type float_types[] = {SL_TYPE_F32, SL_TYPE_F16, SL_TYPE_BF16};

// Where the f16 scales of a block lie.
static void scale_offsets(enum sl_type type, int at[2])
{
    at[0] = type == SL_TYPE_Q2_K    ? 80
            : type == SL_TYPE_Q3_K  ? 108
            : type == SL_TYPE_Q6_K  ? 208
            : type == SL_TYPE_MXFP4 ? -1
                                    : 0;
    at[1] = type == SL_TYPE_Q2_K ? 82
            : type == SL_TYPE_Q4_1 || type == SL_TYPE_Q5_1 || type == SL_TYPE_Q4_K ||
                    type == SL_TYPE_Q5_K
                ? 2
                : -1;
}

// Random bits everywhere, and scales of a sensible size.
static uint8_t *random_matrix(enum sl_type type, int64_t n_rows, int64_t n_cols, size_t *bytes)
{
    const struct sl_type_traits *traits = sl_type_traits((uint32_t)type);
    *bytes = (size_t)n_rows * sl_type_row_bytes(type, n_cols);
    void *memory = NULL;
    check(posix_memalign(&memory, 256, *bytes) == 0, "memory", 0, 0);
    uint8_t *w = (uint8_t *)memory;
    for (size_t i = 0; i < *bytes; i++) {
        w[i] = (uint8_t)random_below(256);
    }
    int at[2];
    scale_offsets(type, at);
    for (size_t b = 0; b < *bytes / traits->block_bytes; b++) {
        uint8_t *block = w + b * traits->block_bytes;
        const float v = (float)(1 + (int)random_below(2000)) * (random_below(2) ? 1e-5f : -1e-5f);
        if (type == SL_TYPE_F32) {
            const float f = v * 100;
            memcpy(block, &f, 4);
        } else if (type == SL_TYPE_F16 || type == SL_TYPE_BF16) {
            const uint16_t h =
                type == SL_TYPE_F16 ? sl_f32_to_f16(v * 100) : sl_f32_to_bf16(v * 100);
            memcpy(block, &h, 2);
        } else if (type == SL_TYPE_MXFP4) {
            block[0] = (uint8_t)(118 + random_below(8));
        } else {
            for (int i = 0; i < 2; i++) {
                if (at[i] >= 0) {
                    const uint16_t h = sl_f32_to_f16(v * (float)(1 + i));
                    memcpy(block + at[i], &h, 2);
                }
            }
        }
    }
    return w;
}

// ---- unpacking, helper by helper ----

template <int TYPE>
static void check_unit(const uint8_t *row, const uint8_t *end, int u, bool shared,
                       const float *want)
{
    using F = sl_fmt<TYPE>;
    uint32_t raw[F::n_raw];
    sl_unit unit;
    const uint8_t *block = row + u / F::units * F::bytes;
    if (shared) {
        F::load(raw, block, u % F::units, sl_mem_shared());
    } else {
        const sl_mem_global mem = {end};
        F::load(raw, block, u % F::units, mem);
    }
    F::expand(raw, block, u % F::units, unit);
    for (int run = 0; run < 2; run++) {
        const uint32_t *w = run ? unit.hi : unit.lo;
        const int first = 16 * (run ? sl_run_hi<F>(u) : sl_run_lo<F>(u));
        for (int i = 0; i < 16; i++) {
            const uint32_t byte = w[i / 4] >> 8 * (i % 4) & 255;
            const int level = (F::is_signed ? (int)(int8_t)byte : (int)byte) - F::offset;
            const float found =
                (run ? unit.s_hi : unit.s_lo) * (float)level + (run ? unit.m_hi : unit.m_lo);
            const float wanted = want[first + i];
            check(fabsf(found - wanted) <= 1e-6f * fabsf(wanted) + 1e-9f, sl_type_name(TYPE), found,
                  wanted);
        }
        // The f16 form of the same levels.
        for (int i = 0; i < 4; i++) {
            uint32_t h[2];
            sl_levels_half<F>(w[i], h[0], h[1]);
            for (int j = 0; j < 4; j++) {
                const uint32_t byte = w[i] >> 8 * j & 255;
                const int level = (F::is_signed ? (int)(int8_t)byte : (int)byte) - F::offset;
                const float found = sl_half_f32(h[j / 2] >> 16 * (j & 1));
                check(found == (float)level, "level as f16", found, level);
            }
        }
    }
}

template <int TYPE>
static void check_frag(const uint8_t *block, int p, int n_valid, const float *want)
{
    using F = sl_fmt<TYPE>;
    for (int t = 0; t < 4; t++) {
        sl_frag f;
        F::frag(block, p, t, n_valid, f);
        for (int i = 0; i < 2 * n_valid * 4; i++) {
            const int group = i / 8, half = i / 4 % 2;
            const int at =
                32 * (group ? sl_group_b<F>(p) : sl_group_a<F>(p)) + 16 * half + 4 * t + i % 4;
            const int scale = F::half_scales ? half : 0;
            uint32_t w = f.level[group][half];
            w = F::offset ? sl_bytes_less(w, F::offset) : w;
            const float found =
                f.s[group][scale] * (float)(int8_t)(w >> 8 * (i % 4)) + f.m[group][scale];
            check(fabsf(found - want[at]) <= 1e-6f * fabsf(want[at]) + 1e-9f, "fragment", found,
                  want[at]);
        }
        if (n_valid == 1) {
            check(f.level[1][0] == 0 && f.level[1][1] == 0 && f.s[1][0] == 0, "missing block", 1,
                  0);
        }
    }
}

/* Columns of x in the order that weights come in when they are unpacked into registers: every
 * column has the place of its weight, and no other has it. */
template <int TYPE> static void check_order(void)
{
    using F = sl_fmt<TYPE>;
    const int n_cols = 512;
    std::vector<int> times((size_t)n_cols, 0);
    bool ok = true;
    for (int u = 0; u < n_cols / 32; u++) {
        for (int half = 0; half < 2; half++) {
            const int column = 16 * (half ? sl_run_hi<F>(u) : sl_run_lo<F>(u));
            for (int w = 0; w < 16; w += 4) {
                const int at = u / 4 * 128 + 64 * half + 4 * w + 2 * (u % 4);
                for (int p = 0; p < 2; p++) {
                    const int from = sl_order_from(at / 8 + p, u % 4, sl_sm90_order(TYPE));
                    ok = ok && from == column + w + 2 * p;
                    times[(size_t)(at + 8 * p)]++;
                    times[(size_t)(at + 8 * p + 1)]++;
                }
            }
        }
    }
    for (const int n : times) {
        ok = ok && n == 1;
    }
    check(ok, sl_type_name(TYPE), ok ? 0.0 : 1.0, 0.0);
}

template <int TYPE> static void check_unpack(void)
{
    check_order<TYPE>();
    using F = sl_fmt<TYPE>;
    const enum sl_type type = (enum sl_type)TYPE;
    check(F::items == (int)sl_type_traits(TYPE)->block_items, "items", F::items, 0);
    check(F::bytes == (int)sl_type_traits(TYPE)->block_bytes, "bytes", F::bytes, 0);
    const int n_cols = 1536;
    size_t bytes;
    uint8_t *w = random_matrix(type, 3, n_cols, &bytes);
    // Exactly as large as the matrix: reading past its end is a fault under the address sanitizer.
    uint8_t *exact = (uint8_t *)malloc(bytes + 16);
    uint8_t *odd = (uint8_t *)aligned_alloc(256, (bytes + 64 + 255) / 256 * 256);
    std::vector<float> want((size_t)n_cols);
    for (int r = 0; r < 3; r++) {
        const size_t at = (size_t)r * sl_type_row_bytes(type, n_cols);
        sl_dequantize_row(type, w + at, want.data(), n_cols);
        uint8_t *copy = exact + (16 - (uintptr_t)exact % 16) % 16;
        memcpy(copy, w, bytes);
        for (int u = 0; u < n_cols / 32; u++) {
            check_unit<TYPE>(copy + at, copy + bytes, u, false, want.data());
        }
        for (int shift = 0; shift < 16; shift += F::align) {
            memcpy(odd + shift, w + at, sl_type_row_bytes(type, n_cols));
            for (int u = 0; u < n_cols / 32; u++) {
                check_unit<TYPE>(odd + shift, NULL, u, true, want.data());
            }
            for (int p = 0; p < n_cols / 64; p++) {
                const int blocks = p / 4 * (256 / F::items);
                check_frag<TYPE>(odd + shift + blocks * F::bytes, p % 4, 2,
                                 want.data() + p / 4 * 256);
            }
            if (!F::super_runs && F::items == 32) {
                check_frag<TYPE>(odd + shift, 1, 1, want.data());
            }
        }
    }
    free(odd);
    free(exact);
    free(w);
}

// Every f16, and rounding to it, against the library's own conversions.
static void check_halves(void)
{
    for (uint32_t h = 0; h < 65536; h++) {
        const float found = sl_half_f32(h | 0xabcd0000u);
        const float want = sl_f16_to_f32((uint16_t)h);
        check(memcmp(&found, &want, 4) == 0 || (found != found && want != want), "f16", found,
              want);
        const float v = want * 1.0003f;
        const uint32_t packed = sl_pack_half2(v, -v);
        const uint16_t same = sl_f32_to_f16(v);
        check(v != v || ((packed & 0xffff) == same && packed >> 16 == (same ^ 0x8000u)), "to f16",
              v, same);
    }
}

// ---- whole operators ----

struct shape {
    int n_tokens;
    int n_cols;
    int n_parts;
    int rows[4];
    enum sl_type types[4];
    int activation;
    bool bias, accumulate;
};

// Multiples of a power of two up to 127 of them, in every block and with another power per block.
static std::vector<float> exact_x(int n_tokens, int n_cols)
{
    std::vector<float> x((size_t)n_tokens * (size_t)n_cols);
    float unit = 1.0f;
    for (size_t i = 0; i < x.size(); i++) {
        if (i % 32 == 0) {
            unit = ldexpf(1.0f, -7 - (int)random_below(4));
        }
        const int level = i % 32 == 7 ? 127 : (int)random_below(255) - 127;
        x[i] = unit * (float)level;
    }
    return x;
}

static std::vector<float> random_y(size_t n)
{
    std::vector<float> y(n);
    for (float &v : y) {
        v = (float)random_below(2001) * 1e-3f - 1.0f;
    }
    return y;
}

static double difference(const std::vector<float> &found, const std::vector<float> &want)
{
    double d = 0.0, n = 1e-30;
    for (size_t i = 0; i < want.size(); i++) {
        d += ((double)found[i] - want[i]) * ((double)found[i] - want[i]);
        n += (double)want[i] * want[i];
    }
    return sqrt(d / n);
}

static void check_op(const struct shape &s, double bound, int n_sm)
{
    // Both timings of the asynchronous copies in turn; the number of cases of a type is odd, so
    // that the next type has them the other way round.
    sl_emu.late_copies = !sl_emu.late_copies;
    struct sl_op op;
    memset(&op, 0, sizeof(op));
    op.kind = SL_OP_LINEAR;
    op.n_tokens = s.n_tokens;
    std::vector<float> x = exact_x(s.n_tokens, s.n_cols);
    op.linear.x = x.data();
    op.linear.n_parts = s.n_parts;
    op.linear.activation = (enum sl_activation)s.activation;
    op.linear.accumulate = s.accumulate;
    std::vector<std::vector<float>> y, want, bias;
    std::vector<uint8_t *> w;
    for (int i = 0; i < s.n_parts; i++) {
        size_t bytes;
        w.push_back(random_matrix(s.types[i], s.rows[i], s.n_cols, &bytes));
        y.push_back(random_y((size_t)s.n_tokens * (size_t)s.rows[i]));
        want.push_back(y.back());
        bias.push_back(random_y((size_t)s.rows[i]));
    }
    for (int i = 0; i < s.n_parts; i++) {
        op.linear.part[i].w.data = w[(size_t)i];
        op.linear.part[i].w.type = s.types[i];
        op.linear.part[i].w.n_rows = s.rows[i];
        op.linear.part[i].w.n_cols = s.n_cols;
        op.linear.part[i].bias = s.bias ? bias[(size_t)i].data() : NULL;
        op.linear.part[i].y = want[(size_t)i].data();
    }
    struct sluice_error error;
    memset(&error, 0, sizeof(error));
    check(sl_op_validate(&op, &error) == SLUICE_STATUS_OK, error.message, 0, 0);
    sl_op_run_ref(&op);
    const size_t scratch_bytes = sl_op_scratch_bytes(&op);
    uint8_t *scratch = (uint8_t *)aligned_alloc(256, (scratch_bytes + 255) / 256 * 256);
    memset(scratch, 0xff, scratch_bytes);
    for (int i = 0; i < s.n_parts; i++) {
        op.linear.part[i].y = y[(size_t)i].data();
    }
    struct sl_cuda_props props;
    memset(&props, 0, sizeof(props));
    props.n_sm = n_sm;
    props.max_shared_bytes = 64 * 1024;
    props.compute_capability = 90;
    const int result = sl_cuda_linear(NULL, &op, scratch, scratch_bytes, &props);
    char what[160];
    snprintf(what, sizeof(what), "%s x%d: %d tokens, %d columns, %d rows, activation %d%s%s",
             sl_type_name((uint32_t)s.types[0]), s.n_parts, s.n_tokens, s.n_cols, s.rows[0],
             s.activation, s.bias ? ", bias" : "", s.accumulate ? ", accumulate" : "");
    check(result == 0, what, result, 0);
    for (int i = 0; i < (s.activation ? 1 : s.n_parts); i++) {
        const double d = difference(y[(size_t)i], want[(size_t)i]);
        check(d <= bound, what, d, bound);
    }
    free(scratch);
    for (uint8_t *m : w) {
        free(m);
    }
}

// Sums in float against sums in double; f16 rounding of weights in the products of many tokens.
#define BOUND_EXACT 2e-6
#define BOUND_HALF 6e-4

static void check_type(enum sl_type type, bool is_float)
{
    const bool k = sl_type_traits((uint32_t)type)->block_items == 256;
    const double exact = BOUND_EXACT;
    // Packed weights are rounded to f16 in linear_gemm; f16 ones and bf16 ones are not.
    const double half = is_float ? exact : BOUND_HALF;
    // Vector kernels: a row in pieces, several rows a warp, two tokens.
    check_op({1, k ? 1280 : 1312, 1, {37}, {type}, 0, true, false}, exact, 1);
    check_op({2, k ? 512 : 96, 1, {70}, {type}, 0, false, true}, exact, 1);
    check_op({1, k ? 2304 : 2272, 3, {9, 40, 17}, {type, type, type}, 0, true, false}, exact, 1);
    check_op({1, 256, 2, {33, 33}, {type, type}, SL_ACT_SILU, true, false}, exact, 1);
    check_op({2, 256, 2, {19, 19}, {type, type}, SL_ACT_GELU_TANH, false, false}, exact, 1);
    // Few tokens: every token tile, ragged rows and tokens, depth that is no whole chunk.
    check_op({3, k ? 768 : 672, 1, {45}, {type}, 0, true, false}, exact, 1);
    check_op({8, k ? 2048 : 1952, 2, {32, 5}, {type, type}, 0, false, false}, exact, 1);
    check_op({13, k ? 512 : 544, 1, {33}, {type}, 0, false, true}, exact, 1);
    check_op({6, k ? 768 : 736, 1, {70}, {type}, 0, true, false}, exact, 1);
    check_op({12, k ? 512 : 544, 2, {21, 21}, {type, type}, SL_ACT_SILU, true, false}, exact, 1);
    check_op({16, k ? 256 : 288, 2, {41, 41}, {type, type}, SL_ACT_SILU, false, false}, exact, 1);
    check_op({27, k ? 256 : 288, 2, {35, 35}, {type, type}, SL_ACT_SILU, true, false}, exact, 1);
    check_op({50, k ? 512 : 480, 1, {34}, {type}, 0, true, false}, exact, 1);
    check_op({67, 256, 1, {31}, {type}, 0, false, false}, exact, 1000);
    // Many tokens: one multiprocessor makes the large tiles worth it.
    check_op({130, k ? 768 : 608, 1, {261}, {type}, 0, true, false}, half, 1);
    check_op({129, 256, 2, {130, 140}, {type, type}, 0, false, false}, half, 1);
    check_op({200, 256, 2, {150, 150}, {type, type}, SL_ACT_SILU, true, false}, 2 * half, 1);
    check_op({140, k ? 256 : 64, 1, {256}, {type}, 0, true, true}, half, 1);
}

// A norm on the way into the products, against the two operators. Normed x is rounded to 8 bits
// where weights are packed.
static void check_normed(enum sl_type type, enum sl_type other, int n_tokens, int n_cols,
                         bool weighted, double bound, int n_sm = 3)
{
    const int n_rows[2] = {37, 21};
    std::vector<float> from = random_y((size_t)n_tokens * (size_t)n_cols);
    std::vector<float> weight = random_y((size_t)n_cols), normed[2], y[2][2];
    struct sl_op norm, op;
    memset(&norm, 0, sizeof(norm));
    memset(&op, 0, sizeof(op));
    norm.kind = SL_OP_NORM;
    op.kind = SL_OP_LINEAR;
    norm.n_tokens = op.n_tokens = n_tokens;
    uint8_t *w[2];
    size_t bytes;
    w[0] = random_matrix(type, n_rows[0], n_cols, &bytes);
    w[1] = random_matrix(other, n_rows[1], n_cols, &bytes);
    struct sl_cuda_props props;
    memset(&props, 0, sizeof(props));
    props.n_sm = n_sm;
    props.max_shared_bytes = 64 * 1024;
    for (int which = 0; which < 2; which++) {
        normed[which].assign(from.size(), NAN);
        norm.norm = {
            from.data(), weighted ? weight.data() : NULL, normed[which].data(), n_cols, 1, 1e-5f,
            false};
        op.linear.x = normed[which].data();
        op.linear.n_parts = 2;
        for (int i = 0; i < 2; i++) {
            y[which][i] = random_y((size_t)n_tokens * (size_t)n_rows[i]);
            op.linear.part[i].w = {w[i], i ? other : type, 0, n_rows[i], n_cols};
            op.linear.part[i].y = y[which][i].data();
        }
        if (which == 0) {
            sl_op_run_ref(&norm);
            sl_op_run_ref(&op);
        }
    }
    char what[160];
    snprintf(what, sizeof(what), "%s and %s of a norm%s: %d tokens, %d columns, %d multiprocessors",
             sl_type_name((uint32_t)type), sl_type_name((uint32_t)other),
             weighted ? " with weights" : "", n_tokens, n_cols, n_sm);
    const size_t scratch_bytes = sl_op_scratch_bytes(&op);
    uint8_t *scratch = (uint8_t *)aligned_alloc(256, (scratch_bytes + 255) / 256 * 256);
    check(sl_cuda_linear_takes_norm(&op, &props), what, 0, 1);
    const int result = sl_cuda_linear_normed(NULL, &op, &norm.norm, scratch, scratch_bytes, &props);
    check(result == 0, what, result, 0);
    check(difference(normed[1], normed[0]) <= BOUND_EXACT, what, difference(normed[1], normed[0]),
          BOUND_EXACT);
    for (int i = 0; i < 2; i++) {
        check(difference(y[1][i], y[0][i]) <= bound, what, difference(y[1][i], y[0][i]), bound);
        free(w[i]);
    }
    free(scratch);
}

static void check_all_normed(void)
{
    const enum sl_type q4 = SL_TYPE_Q4_K, q6 = SL_TYPE_Q6_K, f16 = SL_TYPE_F16;
    check_normed(q4, q4, 1, 1280, true, 1.5e-2);
    check_normed(q4, q6, 2, 512, true, 1.5e-2);
    check_normed(SL_TYPE_Q4_0, SL_TYPE_Q8_0, 4, 2272, false, 1.5e-2);
    check_normed(f16, f16, 1, 1288, true, BOUND_EXACT);
    check_normed(SL_TYPE_F32, SL_TYPE_BF16, 1, 520, true, BOUND_EXACT);
    check_normed(q4, f16, 1, 768, true, 1.5e-2);
    // A row a block: fewer warps than tokens.
    check_normed(SL_TYPE_Q8_0, q6, 3, 256, true, 1.5e-2, 64);
    check_normed(q4, SL_TYPE_Q4_0, 4, 512, true, 1.5e-2, 64);
}

static void check_mixtures(void)
{
    const enum sl_type q4 = SL_TYPE_Q4_K, q6 = SL_TYPE_Q6_K, f16 = SL_TYPE_F16, bf16 = SL_TYPE_BF16;
    const double exact = BOUND_EXACT;
    check_op({1, 512, 3, {64, 16, 16}, {q4, q4, q6}, 0, true, false}, exact, 1);
    check_op({5, 512, 4, {64, 16, 8, 9}, {q4, f16, q6, q4}, 0, true, false}, exact, 1);
    check_op({1, 256, 2, {50, 50}, {q4, q6}, SL_ACT_SILU, true, false}, exact, 1);
    check_op({130, 256, 2, {140, 140}, {q6, f16}, SL_ACT_GELU_TANH, false, false}, 2 * BOUND_HALF,
             1);
    check_op({2, 37, 1, {5}, {f16}, 0, true, false}, exact, 1);
    // In float, by tiles of either size.
    check_op({330, 132, 1, {70}, {SL_TYPE_F32}, 0, true, false}, exact, 1);
    check_op({330, 132, 1, {70}, {SL_TYPE_F32}, 0, false, true}, exact, 1000);
    check_op({70, 39, 2, {5, 5}, {bf16, bf16}, SL_ACT_SILU, true, false}, exact, 1);
    // Wide enough that x is packed by a kernel of its own for two tokens.
    check_op({2, 9216, 1, {18}, {q4}, 0, false, false}, exact, 1);
}

int main(int argc, char **argv)
{
    check_halves();
    check_unpack<SL_TYPE_Q4_0>();
    check_unpack<SL_TYPE_Q4_1>();
    check_unpack<SL_TYPE_Q5_0>();
    check_unpack<SL_TYPE_Q5_1>();
    check_unpack<SL_TYPE_Q8_0>();
    check_unpack<SL_TYPE_Q2_K>();
    check_unpack<SL_TYPE_Q3_K>();
    check_unpack<SL_TYPE_Q4_K>();
    check_unpack<SL_TYPE_Q5_K>();
    check_unpack<SL_TYPE_Q6_K>();
    check_unpack<SL_TYPE_IQ4_NL>();
    check_unpack<SL_TYPE_IQ4_XS>();
    check_unpack<SL_TYPE_MXFP4>();
    // A type named on the command line alone, or all and mixtures of them.
    for (enum sl_type type : packed_types) {
        if (argc < 2 || strcmp(argv[1], sl_type_name((uint32_t)type)) == 0) {
            check_type(type, false);
        }
    }
    for (enum sl_type type : float_types) {
        if (argc < 2 || strcmp(argv[1], sl_type_name((uint32_t)type)) == 0) {
            check_type(type, true);
        }
    }
    if (argc < 2) {
        check_mixtures();
        check_all_normed();
    }
    if (n_failed) {
        fprintf(stderr, "%d checks failed\n", n_failed);
    }
    return n_failed != 0;
}
