/* SPDX-License-Identifier: Apache-2.0
 *
 * Append keys and values [n_tokens, n_kv_heads, head_dim] to the cache, rounded to its type.
 * Keys and values of one type go in one launch, blockIdx.y telling them apart. Keys of Q4_0 are
 * turned first (sl_kv_turn in op/kv.h), by the warp that packs them.
 *
 * F16: a thread rounds eight elements and writes them with one 16-byte store. Q8_0 and Q4_0: a
 * warp packs one block of 32 elements, a lane an element, with the roundings of the scalar
 * reference, so that the bytes are the same.
 */
#include "device/cuda/common.cuh"
#include "device/cuda/kv.cuh"

#define STORE_THREADS 256
#define F16_ITEMS 8 /* elements of a thread */
#define QK 32       /* elements of a quantization block */

struct store_args {
    const float *k;
    const float *v;
    const int32_t *pos;
    const int32_t *seq; /* or null: all 0 */
    sl_cuda_kv kv;
    uint32_t pieces_per_row;   /* pieces of a head's row: what a thread or a warp packs */
    uint32_t pieces_per_token; /* n_kv_heads * pieces_per_row */
    uint32_t n_pieces;
    int first_side; /* of blockIdx.y 0: 0 keys, 1 values */
    bool wide;      /* sources allow 16-byte loads */
};

static __device__ __forceinline__ int my_side(const store_args &a)
{
    return a.first_side + (int)blockIdx.y;
}

/* The row that piece `index` goes to, null where its block is not here; *piece is its place in the
 * row. */
static __device__ __forceinline__ char *target_row(const store_args &a, uint32_t index,
                                                   uint32_t *piece)
{
    const uint32_t token = index / a.pieces_per_token;
    const uint32_t in_token = index % a.pieces_per_token;
    const uint32_t head = in_token / a.pieces_per_row;
    *piece = in_token % a.pieces_per_row;
    const int32_t pos = a.pos[token];
    if (!sl_cuda_kv_is_here(a.kv, pos)) {
        return nullptr;
    }
    const int32_t seq = a.seq != nullptr ? a.seq[token] : 0;
    const int32_t block = sl_cuda_kv_block(a.kv, seq, pos / SL_KV_BLOCK);
    return sl_cuda_kv_row(a.kv, block, my_side(a), (int32_t)head, pos % SL_KV_BLOCK);
}

static __global__ void __launch_bounds__(STORE_THREADS) store_f16_kernel(const store_args a)
{
    const uint32_t index = blockIdx.x * STORE_THREADS + threadIdx.x;
    if (index >= a.n_pieces) {
        return;
    }
    uint32_t piece;
    char *row = target_row(a, index, &piece);
    if (row == nullptr) {
        return;
    }
    /* Pieces lie in the source in the order of their index. */
    const float *src = (my_side(a) == 0 ? a.k : a.v) + (int64_t)index * F16_ITEMS;
    float v[F16_ITEMS];
    if (a.wide) {
        const float4 low = reinterpret_cast<const float4 *>(src)[0];
        const float4 high = reinterpret_cast<const float4 *>(src)[1];
        v[0] = low.x, v[1] = low.y, v[2] = low.z, v[3] = low.w;
        v[4] = high.x, v[5] = high.y, v[6] = high.z, v[7] = high.w;
    } else {
#pragma unroll
        for (int i = 0; i < F16_ITEMS; i++) {
            v[i] = src[i];
        }
    }
    const uint4 packed = make_uint4(sl_pack_f16(v[0], v[1]), sl_pack_f16(v[2], v[3]),
                                    sl_pack_f16(v[4], v[5]), sl_pack_f16(v[6], v[7]));
    reinterpret_cast<uint4 *>(row)[piece] = packed;
}

/* Nearest whole number of x / d inside low..high; 0 when d is 0 or x is NaN. */
static __device__ __forceinline__ int level(float x, float d, int low, int high)
{
    const float steps = d != 0.0f ? x / d : 0.0f;
    if (steps != steps) {
        return 0;
    }
    return (int)rintf(fminf(fmaxf(steps, (float)low), (float)high));
}

/* The value of largest magnitude of a warp with its sign, the first one of equals; NaN counts as
 * nothing, like in the reference. */
static __device__ __forceinline__ float warp_extreme(float x)
{
    const float magnitude = x == x ? fabsf(x) : 0.0f;
    const float most = sl_warp_max(magnitude);
    const uint32_t holders = __ballot_sync(SL_ALL_LANES, magnitude == most);
    const float value = x == x ? x : 0.0f;
    return __shfl_sync(SL_ALL_LANES, value, __ffs((int)holders) - 1);
}

static __device__ __forceinline__ uint16_t scale_bits(float d)
{
    return sl_f16_bits(fminf(fmaxf(d, -65504.0f), 65504.0f));
}

/* A lane's element of the turned block. */
static __device__ __forceinline__ float turn(float x, int lane)
{
#pragma unroll
    for (int step = 1; step < SL_KV_TURN; step *= 2) {
        const float other = __shfl_xor_sync(SL_ALL_LANES, x, step);
        x = (lane & step) != 0 ? other - x : x + other;
    }
    return x * SL_KV_TURN_SCALE;
}

template <enum sl_type TYPE>
static __global__ void __launch_bounds__(STORE_THREADS) store_quantized_kernel(const store_args a)
{
    const uint32_t index = blockIdx.x * (STORE_THREADS / SL_WARP) + threadIdx.x / SL_WARP;
    const int lane = threadIdx.x % SL_WARP;
    if (index >= a.n_pieces) {
        return; /* the whole warp */
    }
    uint32_t piece;
    char *row = target_row(a, index, &piece);
    if (row == nullptr) {
        return; /* the whole warp: a piece has one row */
    }
    float x = (my_side(a) == 0 ? a.k : a.v)[(int64_t)index * QK + lane];
    if (TYPE == SL_TYPE_Q4_0 && my_side(a) == 0) {
        x = turn(x, lane);
    }
    const float extreme = warp_extreme(x);
    if constexpr (TYPE == SL_TYPE_Q8_0) {
        /* 2 bytes of scale, 32 signed bytes */
        char *block = row + piece * 34;
        const uint16_t bits = scale_bits(fabsf(extreme) / 127.0f);
        const float d = sl_f16_value(bits);
        block[2 + lane] = (char)level(x, d, -127, 127);
        if (lane == 0) {
            *reinterpret_cast<uint16_t *>(block) = bits;
        }
    } else {
        /* 2 bytes of scale, 16 bytes: element i in the low half of byte i, 16 + i in the high */
        char *block = row + piece * 18;
        const uint16_t bits = scale_bits(extreme / -8.0f);
        const float d = sl_f16_value(bits);
        const int mine = level(x, d, -8, 7) + 8;
        const int other = __shfl_down_sync(SL_ALL_LANES, mine, 16);
        if (lane < 16) {
            block[2 + lane] = (char)(mine | other << 4);
        }
        if (lane == 0) {
            *reinterpret_cast<uint16_t *>(block) = bits;
        }
    }
}

/* Queue n_sides sides from `first_side` on, all of one type. */
static int store_sides(cudaStream_t stream, const struct sl_op *op, enum sl_type type,
                       int first_side, int n_sides)
{
    const struct sl_op_kv_store *p = &op->kv_store;
    const bool f16 = type == SL_TYPE_F16;
    store_args a;
    a.k = p->k;
    a.v = p->v;
    a.pos = p->pos;
    a.seq = p->seq;
    a.kv = sl_cuda_kv_make(&p->kv);
    a.first_side = first_side;
    a.pieces_per_row = (uint32_t)p->kv.head_dim / (f16 ? F16_ITEMS : QK);
    a.wide = sl_is_aligned(p->k, 16) && sl_is_aligned(p->v, 16);
    const int64_t per_token = (int64_t)p->kv.n_kv_heads * a.pieces_per_row;
    const int64_t n_pieces = per_token * op->n_tokens;
    if (n_pieces > INT32_MAX || !sl_cuda_kv_is_aligned(&a.kv, f16 ? 16 : 2)) {
        return SL_CUDA_UNSUPPORTED;
    }
    a.pieces_per_token = (uint32_t)per_token;
    a.n_pieces = (uint32_t)n_pieces;

    const int per_block = f16 ? STORE_THREADS : STORE_THREADS / SL_WARP;
    const dim3 grid((unsigned)sl_div_up(n_pieces, per_block), (unsigned)n_sides);
    switch (type) {
    case SL_TYPE_F16:
        SL_QUEUE(store_f16_kernel, grid, STORE_THREADS, 0, stream, a);
        break;
    case SL_TYPE_Q8_0:
        SL_QUEUE(store_quantized_kernel<SL_TYPE_Q8_0>, grid, STORE_THREADS, 0, stream, a);
        break;
    case SL_TYPE_Q4_0:
        SL_QUEUE(store_quantized_kernel<SL_TYPE_Q4_0>, grid, STORE_THREADS, 0, stream, a);
        break;
    default:
        return SL_CUDA_UNSUPPORTED;
    }
    return sl_launch_result();
}

extern "C" int sl_cuda_kv_store(cudaStream_t stream, const struct sl_op *op,
                                const struct sl_cuda_props *props)
{
    (void)props;
    const struct sl_kv_types types = op->kv_store.kv.types;
    if (types.k == types.v) {
        return store_sides(stream, op, types.k, 0, 2);
    }
    const int result = store_sides(stream, op, types.k, 0, 1);
    return result != 0 ? result : store_sides(stream, op, types.v, 1, 1);
}
