/* SPDX-License-Identifier: Apache-2.0
 *
 * Sharing out work: a line of n units goes to the team in pieces.
 *
 *   | stretch of thread 0 | of thread 1 | ... | piece | piece | piece | ...
 *   |       the first half, known beforehand  | who comes first takes the next
 *
 * The stretches make long runs of memory that can be fetched before their turn; the pieces make all
 * threads end together, though the cores do not get the same bandwidth (the slowest of 14 was seen
 * to take a third longer for as much) and neighbours may take some away.
 */
#ifndef SL_CPU_SHARE_H
#define SL_CPU_SHARE_H

#include <stdatomic.h>
#include <stdint.h>

/* Pieces that half of a thread's share would make. */
#define SL_SHARE_PIECES 16

struct sl_share {
    int64_t n;
    int64_t fixed; /* units of the stretches */
    int64_t piece; /* units of a piece */
    int n_threads;
    int n_pieces; /* stretches and pieces */
};

/* `least`: units that are not worth cutting further. A team of one has one piece. */
static inline struct sl_share sl_share_make(int64_t n, int64_t least, int n_threads)
{
    const int64_t wanted = n / (2 * SL_SHARE_PIECES * (int64_t)n_threads);
    struct sl_share s = {.n = n, .piece = wanted > least ? wanted : least, .n_threads = n_threads};
    s.fixed = n_threads == 1 || n < 2 * least * n_threads ? n : n / 2;
    s.n_pieces = n_threads + (int)((n - s.fixed + s.piece - 1) / s.piece);
    return s;
}

static inline void sl_share_range(const struct sl_share *s, int index, int64_t *first, int64_t *end)
{
    if (index < s->n_threads) {
        /* Without overflow: fixed * index / n_threads. */
        const int64_t n = s->n_threads;
        *first = s->fixed / n * index + s->fixed % n * index / n;
        *end = s->fixed / n * (index + 1) + s->fixed % n * (index + 1) / n;
    } else {
        *first = s->fixed + (index - s->n_threads) * s->piece;
        *end = *first + s->piece < s->n ? *first + s->piece : s->n;
    }
}

/* A thread begins with the piece of its own number and goes on with these, from n_pieces on there
 * are no more. `taken` is the team's, counting from `base`; every thread asks once too often, so a
 * line takes n_pieces numbers of it. A team of one needs none. */
static inline int sl_share_take(const struct sl_share *s, atomic_int *taken, int base)
{
    if (s->fixed == s->n && s->n_threads == 1) {
        return s->n_pieces;
    }
    return s->n_threads + atomic_fetch_add_explicit(taken, 1, memory_order_relaxed) - base;
}

#endif
