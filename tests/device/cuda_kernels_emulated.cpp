// SPDX-License-Identifier: Apache-2.0
//
// Norm, rotary embedding, KV store (alone and fused), attention and merge of the CUDA device
// without a GPU: the kernels' own source, compiled as C++ and run thread by thread
// (cuda_emulate.h), held to sl_op_run_ref.
//
// Every case of attention runs twice, with asynchronous copies as late and as early as the waits
// allow. Memory that no one has written holds NaN: the cache beyond the last position, scratch,
// outputs. Behind outputs and scratch lie guard bytes.
#define SL_CUDA_EMULATE
#include "device/cuda/add.cu"
#include "device/cuda/merge.cu"
#include "device/cuda/norm.cu"
#include "device/cuda/rope.cu"
#include "device/cuda/heads.cu"
#include "device/cuda/kv_store.cu"
#include "device/cuda/attention.cu"
#include "device/cuda/attention_decode.cu"
#include "device/cuda/attention_merge.cu"
#include "device/cuda/attention_prefill.cu"

#define GUARD_BYTES 256
#define BOUND_EXACT 1e-6
// Queries and weights are rounded to f16: 0.03 % each.
#define BOUND_ATTENTION 1e-3

static int n_failed;
static int n_checks;
static uint64_t random_state = 88172645463325252u;
static const struct sl_cuda_props props = {132, 90, 80 * 1024, 228 * 1024, 50 << 20, 0, false};

static uint32_t random_below(uint32_t n)
{
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    random_state ^= random_state << 17;
    return (uint32_t)(random_state >> 33) % n;
}

static float random_normal(void)
{
    float sum = 0.0f;
    for (int i = 0; i < 6; i++) {
        sum += (float)random_below(1 << 16) / 65536.0f - 0.5f;
    }
    return sum * 1.4142135f * (random_below(200) == 0 ? 6.0f : 1.0f);
}

// Memory of n elements, 256-byte aligned and all ones (NaN), with a guard behind.
template <class T> struct room {
    T *at;
    size_t n;

    explicit room(size_t n_) : n(n_)
    {
        at = (T *)aligned_alloc(256, (bytes() + GUARD_BYTES + 255) / 256 * 256);
        memset((void *)at, 0xff, bytes() + GUARD_BYTES);
    }
    room(const room &) = delete;
    ~room()
    {
        free(at);
    }
    size_t bytes() const
    {
        return n * sizeof(T);
    }
    bool guarded() const
    {
        for (size_t i = 0; i < GUARD_BYTES; i++) {
            if (((const uint8_t *)at)[bytes() + i] != 0xff) {
                return false;
            }
        }
        return true;
    }
    void fill_normal()
    {
        for (size_t i = 0; i < n; i++) {
            at[i] = random_normal();
        }
    }
};

static void check(bool ok, const char *name, const char *what, double found)
{
    n_checks++;
    if (!ok) {
        fprintf(stderr, "FAILED %s: %s %g\n", name, what, found);
        n_failed++;
    }
}

// Difference in the Euclidean norm; NaN fails.
static void check_near(const char *name, const float *got, const float *want, size_t n,
                       double bound)
{
    double difference = 0.0;
    double size = 0.0;
    for (size_t i = 0; i < n; i++) {
        const double d = (double)got[i] - (double)want[i];
        difference += d * d;
        size += (double)want[i] * (double)want[i];
    }
    const double relative = sqrt(difference) / (sqrt(size) + 1e-30);
    check(relative <= bound, name, "relative error", relative);
}

static struct sl_op make_op(enum sl_op_kind kind, int n_tokens)
{
    struct sl_op op;
    memset(&op, 0, sizeof op);
    op.kind = kind;
    op.n_tokens = n_tokens;
    return op;
}

// ---- norm and rotary embedding ----

static void check_norm(int n_tokens, int rows, int n, bool weight, bool accumulate, bool in_place,
                       int misplaced)
{
    char name[96];
    snprintf(name, sizeof name, "norm %d x %d x %d%s%s%s%s", n_tokens, rows, n,
             weight ? " weight" : "", accumulate ? " accumulate" : "", in_place ? " in place" : "",
             misplaced ? " misplaced" : "");
    const size_t n_items = (size_t)n_tokens * (size_t)rows * (size_t)n;
    room<float> x(n_items + (size_t)misplaced), y(n_items + (size_t)misplaced), want(n_items);
    room<float> w((size_t)n);
    x.fill_normal();
    y.fill_normal();
    w.fill_normal();
    float *out = (in_place ? x.at : y.at) + misplaced;
    memcpy(want.at, out, want.bytes());
    struct sl_op op = make_op(SL_OP_NORM, n_tokens);
    op.norm.x = x.at + misplaced;
    op.norm.weight = weight ? w.at : NULL;
    op.norm.y = want.at;
    op.norm.n = n;
    op.norm.rows_per_token = rows;
    op.norm.eps = 1e-6f;
    op.norm.accumulate = accumulate;
    sl_op_run_ref(&op);
    op.norm.y = out;
    check(sl_cuda_norm(NULL, &op, &props) == 0, name, "result", 1);
    check_near(name, out, want.at, n_items, BOUND_EXACT);
    check(x.guarded() && y.guarded(), name, "guard", 0);
}

static void check_norms(void)
{
    check_norm(1, 1, 576, true, false, false, 0);
    check_norm(7, 1, 2048, true, false, true, 0);
    check_norm(33, 1, 640, true, true, false, 0);
    check_norm(4, 8, 128, true, false, true, 0);
    check_norm(5, 3, 64, false, false, false, 0);
    check_norm(2, 1, 37, true, false, false, 0);
    check_norm(1, 1, 1, false, false, false, 0);
    check_norm(3, 1, 4096, true, true, false, 0);
    check_norm(2, 1, 36864, true, false, false, 0); // more than registers keep
    check_norm(2, 1, 9001, false, true, false, 0);
    check_norm(3, 1, 512, true, false, false, 1); // no 16-byte accesses
}

static void check_rope(int n_tokens, int n_heads, int head_dim, int n_rot, bool neox,
                       int32_t first_pos, float magnitude)
{
    char name[96];
    snprintf(name, sizeof name, "rope %d x %d x %d, n_rot %d%s, from %d", n_tokens, n_heads,
             head_dim, n_rot, neox ? " neox" : "", first_pos);
    room<float> x((size_t)n_tokens * (size_t)n_heads * (size_t)head_dim), want(x.n);
    room<float> freq((size_t)n_rot / 2);
    room<int32_t> pos((size_t)n_tokens);
    x.fill_normal();
    memcpy(want.at, x.at, x.bytes());
    for (int i = 0; i < n_rot / 2; i++) {
        freq.at[i] = powf(10000.0f, -2.0f * (float)i / (float)n_rot);
    }
    for (int i = 0; i < n_tokens; i++) {
        pos.at[i] = first_pos + i;
    }
    struct sl_op op = make_op(SL_OP_ROPE, n_tokens);
    op.rope.x = want.at;
    op.rope.pos = pos.at;
    op.rope.freq = freq.at;
    op.rope.n_heads = n_heads;
    op.rope.head_dim = head_dim;
    op.rope.n_rot = n_rot;
    op.rope.magnitude = magnitude;
    op.rope.neox = neox;
    sl_op_run_ref(&op);
    op.rope.x = x.at;
    check(sl_cuda_rope(NULL, &op, &props) == 0, name, "result", 1);
    check_near(name, x.at, want.at, x.n, BOUND_EXACT);
    check(x.guarded(), name, "guard", 0);
}

static void check_ropes(void)
{
    for (int neox = 0; neox < 2; neox++) {
        check_rope(1, 9, 64, 64, neox, 0, 1.0f);
        check_rope(1, 9, 64, 64, neox, 5000, 1.0f);
        check_rope(5, 40, 256, 256, neox, 1000003, 1.2f);
        check_rope(6, 2, 96, 32, neox, 7, 1.0f);
        check_rope(3, 1, 80, 2, neox, 2, 0.5f);
    }
}

// ---- cache and attention ----

struct attention_case {
    struct sl_kv_types types;
    int n_tokens, n_heads, n_kv_heads, head_dim;
    int first_pos;
    int n_seqs;
    bool runs; // tokens of a sequence stand together, else they take turns
    bool table, sinks;
    int window;
    float softcap;
    int n_kv_extra; // how much n_kv_max is rounded up
    int n_first = 0;
    enum sl_kv_here here = SL_KV_ALL;
};

// One sequence without a table.
static struct sl_kv_view make_view(struct sl_kv_types types, int n_kv_heads, int head_dim)
{
    struct sl_kv_view kv;
    memset(&kv, 0, sizeof kv);
    kv.types = types;
    kv.n_kv_heads = n_kv_heads;
    kv.head_dim = head_dim;
    return kv;
}

// Memory of a cache: all blocks in a row, or divided with each side in a place of its own, but
// nothing where the side is not here.
struct cache_room {
    room<uint8_t> first, later;
    struct sl_kv_view kv;

    cache_room(const struct sl_kv_view &view, int n_blocks)
        : first(view.here == SL_KV_LATER ? 0 : bytes_of(view, n_first(view, n_blocks))),
          later(view.here == SL_KV_FIRST ? 0 : bytes_of(view, n_blocks - n_first(view, n_blocks))),
          kv(view)
    {
        kv.data = first.n > 0 ? first.at : NULL;
        kv.later = later.n > 0 ? later.at : NULL;
    }
    static size_t bytes_of(const struct sl_kv_view &view, int n_blocks)
    {
        return (size_t)n_blocks * sl_kv_block_bytes(view.types, view.n_kv_heads, view.head_dim);
    }
    static int n_first(const struct sl_kv_view &view, int n_blocks)
    {
        return view.n_first > 0 && view.n_first < n_blocks ? view.n_first : n_blocks;
    }
    void copy(const cache_room &from)
    {
        memcpy(first.at, from.first.at, first.bytes());
        memcpy(later.at, from.later.at, later.bytes());
    }
    bool same(const cache_room &as) const
    {
        return memcmp(first.at, as.first.at, first.bytes()) == 0 &&
               memcmp(later.at, as.later.at, later.bytes()) == 0;
    }
    bool guarded() const
    {
        return first.guarded() && later.guarded();
    }
};

// Fill positions 0 .. n-1 of a sequence by the kernel, which must write the reference's bytes.
static void fill_sequence(const char *name, const cache_room *cache, int n_blocks, int seq, int n)
{
    const struct sl_kv_view *kv = &cache->kv;
    room<float> k((size_t)n * (size_t)kv->n_kv_heads * (size_t)kv->head_dim), v(k.n);
    room<int32_t> pos((size_t)n), seqs((size_t)n);
    k.fill_normal();
    v.fill_normal();
    for (int i = 0; i < n; i++) {
        pos.at[i] = n - 1 - i; // any order
        seqs.at[i] = seq;
    }
    cache_room want(*kv, n_blocks);
    want.copy(*cache);
    struct sl_op op = make_op(SL_OP_KV_STORE, n);
    op.kv_store.k = k.at;
    op.kv_store.v = v.at;
    op.kv_store.pos = pos.at;
    op.kv_store.seq = seqs.at;
    op.kv_store.kv = *kv;
    check(sl_cuda_kv_store(NULL, &op, &props) == 0, name, "result of kv_store", 1);
    op.kv_store.kv = want.kv;
    sl_op_run_ref(&op);
    check(want.same(*cache) && cache->guarded(), name, "bytes of kv_store", 0);
}

// Elements that are more than their last bit apart.
static size_t n_apart(const room<uint8_t> &got, const room<uint8_t> &want)
{
    size_t n = 0;
    for (size_t i = 0; i < got.n; i += 2) {
        uint16_t a, b;
        memcpy(&a, got.at + i, 2);
        memcpy(&b, want.at + i, 2);
        n += abs((int)a - (int)b) > 1;
    }
    return n;
}

// Norms of heads, rotary embeddings and store in one launch, against the operators one by one.
static void check_heads(int n_tokens, int n_heads, int n_kv_heads, int head_dim, int n_rot,
                        bool neox, bool normed, int first_pos, int n_first = 0,
                        enum sl_kv_here here = SL_KV_ALL)
{
    char name[160];
    snprintf(name, sizeof name, "heads %d x %d/%d x %d, n_rot %d%s%s, from %d, divided at %d, %d",
             n_tokens, n_heads, n_kv_heads, head_dim, n_rot, neox ? " neox" : "",
             normed ? " normed" : "", first_pos, n_first, (int)here);
    const size_t n = (size_t)n_tokens * (size_t)head_dim;
    room<float> q(n * (size_t)n_heads), k(n * (size_t)n_kv_heads), v(k.n), q_want(q.n), k_want(k.n);
    room<float> q_norm((size_t)head_dim), freq((size_t)n_rot / 2);
    room<int32_t> pos((size_t)n_tokens);
    const struct sl_kv_types types = {SL_TYPE_F16, SL_TYPE_F16};
    const int n_blocks = (first_pos + n_tokens) / SL_KV_BLOCK + 1;
    struct sl_kv_view view = make_view(types, n_kv_heads, head_dim);
    view.n_first = n_first;
    view.here = here;
    cache_room cache(view, n_blocks), cache_want(view, n_blocks);
    q.fill_normal();
    k.fill_normal();
    v.fill_normal();
    q_norm.fill_normal();
    memcpy(q_want.at, q.at, q.bytes());
    memcpy(k_want.at, k.at, k.bytes());
    for (int i = 0; i < n_rot / 2; i++) {
        freq.at[i] = powf(10000.0f, -2.0f * (float)i / (float)n_rot);
    }
    for (int i = 0; i < n_tokens; i++) {
        pos.at[i] = first_pos + i;
    }
    struct sl_op ops[2][5]; // on the kernel's memory, on the reference's
    int n_ops = 0;
    for (int which = 0; which < 2; which++) {
        float *qs = which ? q_want.at : q.at;
        float *ks = which ? k_want.at : k.at;
        n_ops = 0;
        for (int side = 0; side < 2 && normed; side++) {
            struct sl_op op = make_op(SL_OP_NORM, n_tokens);
            op.norm.x = side ? ks : qs;
            op.norm.y = side ? ks : qs;
            op.norm.weight = side ? NULL : q_norm.at;
            op.norm.n = head_dim;
            op.norm.rows_per_token = side ? n_kv_heads : n_heads;
            op.norm.eps = 1e-6f;
            ops[which][n_ops++] = op;
        }
        for (int side = 0; side < 2; side++) {
            struct sl_op op = make_op(SL_OP_ROPE, n_tokens);
            op.rope = {side ? ks : qs, pos.at, freq.at, side ? n_kv_heads : n_heads,
                       head_dim,       n_rot,  1.1f,    neox};
            ops[which][n_ops++] = op;
        }
        struct sl_op op = make_op(SL_OP_KV_STORE, n_tokens);
        op.kv_store.k = ks;
        op.kv_store.v = v.at;
        op.kv_store.pos = pos.at;
        op.kv_store.kv = which ? cache_want.kv : cache.kv;
        ops[which][n_ops++] = op;
    }
    for (int i = 0; i < n_ops; i++) {
        sl_op_run_ref(&ops[1][i]);
    }
    check(sl_cuda_heads_fused(ops[0], n_ops) == n_ops, name, "operators fused", n_ops);
    check(sl_cuda_heads_fused(ops[0], n_ops - 1) == 0, name, "operators fused of a cut list", 0);
    check(sl_cuda_heads(NULL, ops[0], n_ops, &props) == 0, name, "result", 1);
    check_near(name, q.at, q_want.at, q.n, 1e-5);
    check_near(name, k.at, k_want.at, k.n, 1e-5);
    check(q.guarded() && k.guarded() && cache.guarded(), name, "guard", 0);
    // Keys may differ in their last bit; what no one wrote is still all ones.
    const size_t n_off =
        n_apart(cache.first, cache_want.first) + n_apart(cache.later, cache_want.later);
    check(n_off == 0, name, "elements of the cache", (double)n_off);
}

static void check_all_heads(void)
{
    check_heads(1, 32, 8, 128, 128, false, false, 77);
    check_heads(1, 32, 4, 128, 128, true, true, 63);
    check_heads(5, 9, 3, 64, 64, true, false, 60);
    check_heads(3, 4, 1, 256, 256, true, true, 1000);
    check_heads(2, 3, 3, 96, 32, true, true, 0);
    check_heads(2, 3, 1, 80, 20, false, false, 9);
    check_heads(5, 9, 3, 64, 64, true, false, 60, 1, SL_KV_ALL);
    check_heads(5, 9, 3, 64, 64, true, false, 60, 1, SL_KV_FIRST);
    check_heads(5, 9, 3, 64, 64, true, true, 60, 1, SL_KV_LATER);
    check_heads(1, 9, 3, 64, 64, true, true, 60, 1, SL_KV_LATER);
}

static void check_attention(const struct attention_case *a)
{
    char name[200];
    snprintf(
        name, sizeof name,
        "attention %s/%s, %d tokens from %d, %d heads over %d, size %d, %d sequences%s, window "
        "%d, cap %g, n_kv_max + %d, divided at %d, %d, copies %s",
        sl_type_name((uint32_t)a->types.k), sl_type_name((uint32_t)a->types.v), a->n_tokens,
        a->first_pos, a->n_heads, a->n_kv_heads, a->head_dim, a->n_seqs, a->runs ? " in runs" : "",
        a->window, (double)a->softcap, a->n_kv_extra, a->n_first, (int)a->here,
        sl_emu.late_copies ? "late" : "early");
    const int n_kv = a->first_pos + a->n_tokens;
    const int n_blocks = n_kv / SL_KV_BLOCK + 1;
    const int n_all = n_blocks * a->n_seqs;
    const size_t n_tokens = (size_t)a->n_tokens;
    room<float> q(n_tokens * (size_t)a->n_heads * (size_t)a->head_dim), y(q.n), want(q.n);
    room<float> sinks((size_t)a->n_heads);
    room<float> lse(n_tokens * (size_t)a->n_heads), lse_want(lse.n);
    room<int32_t> pos(n_tokens), seq(n_tokens), table((size_t)n_all);
    struct sl_kv_view view = make_view(a->types, a->n_kv_heads, a->head_dim);
    view.table = a->table ? table.at : NULL;
    view.table_stride = n_blocks;
    view.n_first = a->n_first;
    view.here = a->here;
    const cache_room cache(view, n_all);
    q.fill_normal();
    sinks.fill_normal();
    for (int i = 0; i < n_all; i++) { // a random permutation
        const int j = (int)random_below((uint32_t)i + 1);
        table.at[i] = table.at[j];
        table.at[j] = i;
    }
    for (int i = 0; i < a->n_tokens; i++) {
        pos.at[i] = a->first_pos + i;
        seq.at[i] = a->runs ? i * a->n_seqs / a->n_tokens : i % a->n_seqs;
    }
    struct sl_op op = make_op(SL_OP_ATTENTION, a->n_tokens);
    struct sl_op_attention *o = &op.attention;
    o->q = q.at;
    o->y = want.at;
    o->pos = pos.at;
    o->seq = a->n_seqs > 1 ? seq.at : NULL;
    o->sinks = a->sinks ? sinks.at : NULL;
    o->lse = lse_want.at;
    o->kv = cache.kv;
    o->n_heads = a->n_heads;
    o->n_kv_max = n_kv + a->n_kv_extra;
    o->window = a->window;
    o->scale = 1.0f / sqrtf((float)a->head_dim);
    o->softcap = a->softcap;
    for (int s = 0; s < a->n_seqs; s++) {
        fill_sequence(name, &cache, n_all, s, n_kv);
    }
    sl_op_run_ref(&op);
    o->y = y.at;
    o->lse = lse.at;
    const size_t scratch_bytes = sl_op_scratch_bytes(&op);
    room<uint8_t> scratch(scratch_bytes);
    check(sl_cuda_attention(NULL, &op, scratch.at, scratch_bytes, &props) == 0, name, "result", 1);
    size_t n_unlike = 0; // rows that see nothing only here or only there
    for (size_t row = 0; row < lse.n; row++) {
        if (lse_want.at[row] == -INFINITY || lse.at[row] == -INFINITY) {
            n_unlike += lse.at[row] != lse_want.at[row] || y.at[row * (size_t)a->head_dim] != 0.0f;
            lse.at[row] = lse_want.at[row] = 0.0f;
        }
    }
    check(n_unlike == 0, name, "rows that see nothing", (double)n_unlike);
    check_near(name, y.at, want.at, y.n, BOUND_ATTENTION);
    check_near(name, lse.at, lse_want.at, lse.n, BOUND_ATTENTION);
    check(y.guarded() && lse.guarded() && scratch.guarded(), name, "guard", 0);
    memset((void *)y.at, 0xff, y.bytes());
    o->lse = NULL; // nobody asks for it: the same without
    check(sl_cuda_attention(NULL, &op, scratch.at, scratch_bytes, &props) == 0, name, "result", 1);
    check_near(name, y.at, want.at, y.n, BOUND_ATTENTION);
}

static void check_attentions(void)
{
    const struct sl_kv_types f16 = {SL_TYPE_F16, SL_TYPE_F16}, q8 = {SL_TYPE_Q8_0, SL_TYPE_Q8_0},
                             q4 = {SL_TYPE_Q4_0, SL_TYPE_Q4_0};
    const struct attention_case cases[] = {
        {f16, 1, 9, 3, 64, 0, 1, 0, 0, 0, 0, 0, 0},
        {f16, 1, 9, 3, 64, 62, 1, 0, 0, 0, 0, 0, 0},
        {f16, 1, 9, 3, 64, 63, 1, 0, 1, 0, 0, 0, 0},
        {f16, 1, 9, 3, 64, 64, 1, 0, 1, 0, 0, 0, 300},
        {f16, 1, 4, 1, 256, 700, 1, 0, 1, 0, 0, 0, 0},
        {f16, 1, 8, 2, 128, 333, 1, 0, 1, 1, 100, 0, 0},
        {f16, 2, 4, 4, 96, 200, 1, 0, 1, 0, 0, 30.0f, 0},
        {f16, 16, 6, 2, 64, 130, 1, 0, 1, 0, 0, 0, 0},
        {f16, 17, 6, 2, 64, 130, 1, 0, 1, 0, 0, 0, 0},
        {f16, 70, 8, 4, 64, 0, 1, 0, 0, 0, 0, 0, 0},
        {f16, 130, 4, 2, 128, 61, 1, 0, 1, 0, 0, 0, 0},
        {f16, 65, 4, 1, 256, 100, 1, 0, 1, 0, 64, 50.0f, 0},
        {f16, 33, 4, 2, 64, 90, 1, 0, 1, 1, 16, 0, 0},
        {f16, 5, 4, 2, 64, 150, 5, 0, 1, 0, 0, 0, 0},
        {f16, 30, 4, 2, 64, 70, 3, 0, 1, 0, 40, 0, 0},
        {f16, 40, 2, 1, 64, 70, 3, 1, 1, 0, 40, 0, 0},
        {f16, 70, 2, 2, 64, 20, 2, 1, 1, 0, 0, 0, 100},
        {f16, 1, 2, 1, 32, 5, 1, 0, 0, 1, 0, 0, 0},
        {f16, 3, 24, 1, 64, 40, 1, 0, 0, 0, 1, 0, 0},
        {q8, 1, 8, 2, 64, 300, 1, 0, 1, 0, 0, 0, 0},
        {q8, 40, 8, 2, 128, 50, 1, 0, 1, 0, 0, 0, 0},
        {q8, 33, 2, 1, 192, 50, 1, 0, 1, 0, 0, 0, 0},
        {q4, 1, 8, 2, 64, 300, 1, 0, 1, 0, 0, 0, 0},
        {q4, 40, 8, 2, 128, 50, 1, 0, 1, 0, 0, 0, 0},
        {q4, 3, 2, 1, 256, 50, 1, 0, 1, 0, 0, 0, 0},
        // later parts that nobody sees, that some do; windows that end before
        {f16, 1, 9, 3, 64, 333, 1, 0, 0, 0, 0, 0, 0, 2, SL_KV_ALL},
        {f16, 1, 9, 3, 64, 333, 1, 0, 0, 0, 0, 0, 0, 2, SL_KV_FIRST},
        {f16, 1, 9, 3, 64, 333, 1, 0, 0, 0, 0, 0, 300, 2, SL_KV_LATER},
        {f16, 1, 9, 3, 64, 100, 1, 0, 0, 0, 0, 0, 0, 2, SL_KV_LATER},
        {f16, 1, 9, 3, 64, 100, 1, 0, 0, 1, 0, 0, 300, 2, SL_KV_LATER},
        {f16, 1, 8, 2, 128, 333, 1, 0, 0, 1, 100, 0, 0, 3, SL_KV_FIRST},
        {f16, 1, 8, 2, 128, 333, 1, 0, 0, 0, 100, 0, 0, 3, SL_KV_FIRST},
        {f16, 1, 4, 1, 256, 700, 1, 0, 0, 0, 0, 30.0f, 0, 10, SL_KV_LATER},
        {f16, 33, 4, 2, 64, 110, 1, 0, 0, 0, 16, 0, 0, 2, SL_KV_FIRST},
        {f16, 33, 4, 2, 64, 110, 1, 0, 0, 1, 16, 0, 0, 2, SL_KV_LATER},
        {f16, 70, 8, 4, 64, 20, 1, 0, 0, 0, 0, 0, 0, 1, SL_KV_LATER},
        {f16, 70, 8, 4, 64, 20, 1, 0, 0, 0, 0, 0, 0, 1, SL_KV_ALL},
        {f16, 65, 4, 1, 256, 100, 1, 0, 0, 0, 64, 50.0f, 0, 2, SL_KV_LATER},
        {f16, 40, 2, 1, 64, 300, 1, 0, 0, 0, 0, 0, 0, 4, SL_KV_FIRST},
    };
    for (const struct attention_case &a : cases) {
        check_attention(&a);
    }
    const enum sl_type each[] = {SL_TYPE_F16, SL_TYPE_Q8_0, SL_TYPE_Q4_0};
    for (int pair = 0; pair < 9; pair++) {
        const struct sl_kv_types types = {each[pair / 3], each[pair % 3]};
        const struct attention_case mixed[] = {
            {types, 1, 6, 2, 64, 150, 1, 0, 1, 0, 0, 0, 0},
            {types, 12, 4, 2, 128, 70, 3, 0, 1, 0, 40, 0, 0},
            {types, 37, 2, 1, 256, 30, 1, 0, 0, 1, 0, 20.0f, 0},
        };
        for (size_t i = 0; types.k != types.v && i < sizeof mixed / sizeof mixed[0]; i++) {
            check_attention(&mixed[i]);
        }
        for (int here = SL_KV_ALL; here <= SL_KV_LATER; here++) {
            const struct attention_case divided[] = {
                {types, 1, 6, 2, 64, 150, 1, 0, 0, 0, 0, 0, 0, 2, (enum sl_kv_here)here},
                {types, 37, 2, 1, 128, 40, 1, 0, 0, 1, 0, 0, 0, 1, (enum sl_kv_here)here},
            };
            for (const struct attention_case &a : divided) {
                check_attention(&a);
            }
        }
    }
    for (int head_dim = 32; head_dim <= 256; head_dim += 32) {
        const struct attention_case shapes[] = {
            {f16, 1, 6, 2, head_dim, 150, 1, 0, 1, 1, 0, 0, 0},
            {f16, 9, 12, 2, head_dim, 130, 1, 0, 1, 1, 50, 0, 0},
            {f16, 37, 2, 1, head_dim, 30, 1, 0, 1, 0, 0, 20.0f, 0},
        };
        for (const struct attention_case &a : shapes) {
            check_attention(&a);
        }
    }
}

// Rows of about equal weight, far apart, and with nothing on one side or both.
static void check_merge(int n_tokens, int n_heads, int head_dim, int misplaced)
{
    char name[96];
    snprintf(name, sizeof name, "merge %d x %d x %d%s", n_tokens, n_heads, head_dim,
             misplaced ? " misplaced" : "");
    const size_t n_rows = (size_t)n_tokens * (size_t)n_heads;
    room<float> x(n_rows * (size_t)head_dim + (size_t)misplaced), y(x.n), want(x.n);
    room<float> x_lse(n_rows), y_lse(n_rows);
    x.fill_normal();
    y.fill_normal();
    memcpy(want.at, y.at, y.bytes());
    for (size_t i = 0; i < n_rows; i++) {
        const bool far = random_below(4) == 0;
        x_lse.at[i] = random_below(5) == 0 ? -INFINITY : random_normal() * (far ? 1e3f : 2.0f);
        y_lse.at[i] = random_below(5) == 0 ? -INFINITY : random_normal() * 2.0f;
    }
    struct sl_op op = make_op(SL_OP_MERGE, n_tokens);
    op.merge.x = x.at + misplaced;
    op.merge.x_lse = x_lse.at;
    op.merge.y = want.at + misplaced;
    op.merge.y_lse = y_lse.at;
    op.merge.n_heads = n_heads;
    op.merge.head_dim = head_dim;
    sl_op_run_ref(&op);
    op.merge.y = y.at + misplaced;
    check(sl_cuda_merge(NULL, &op, &props) == 0, name, "result", 1);
    check_near(name, y.at, want.at, y.n, BOUND_EXACT);
    check(y.guarded(), name, "guard", 0);
}

static void check_merges(void)
{
    check_merge(1, 32, 128, 0);
    check_merge(9, 7, 96, 0);
    check_merge(70, 3, 4, 0);
    check_merge(3, 5, 64, 1); // no 16-byte accesses
}

int main(void)
{
    check_norms();
    check_merges();
    check_ropes();
    for (int late = 0; late < 2; late++) {
        sl_emu.late_copies = late != 0;
        check_all_heads();
        check_attentions();
    }
    if (n_failed > 0) {
        fprintf(stderr, "%d of %d checks failed\n", n_failed, n_checks);
    }
    return n_failed != 0;
}
