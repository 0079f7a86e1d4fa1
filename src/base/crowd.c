/* SPDX-License-Identifier: Apache-2.0
 *
 * The size of a team beside busy neighbours: see crowd.h.
 */
#include "base/crowd.h"

/* Waking up costs some waiting too: less than this is no neighbour. One that takes half of a core
 * makes about a half. */
#define LOST_LIMIT 0.35
#define FIRST_PATIENCE_NS UINT64_C(500000000)
#define MOST_PATIENCE_NS UINT64_C(16000000000)

int sl_crowd_look(struct sl_crowd *crowd, int n_threads, double lost, uint64_t now_ns)
{
    const int most = n_threads - 1;
    if (lost > LOST_LIMIT && crowd->n_missing < most) {
        const int more = lost < most ? (int)(lost + 1.0 - LOST_LIMIT) : most;
        const uint64_t longer = 2 * crowd->patience_ns;
        /* Lost again right after a try: the neighbour is still there. */
        crowd->patience_ns = crowd->patience_ns == 0     ? FIRST_PATIENCE_NS
                             : longer < MOST_PATIENCE_NS ? longer
                                                         : MOST_PATIENCE_NS;
        crowd->n_missing = crowd->n_missing + more < most ? crowd->n_missing + more : most;
        crowd->next_try_ns = now_ns + crowd->patience_ns;
    } else if (crowd->n_missing > 0 && now_ns >= crowd->next_try_ns) {
        crowd->n_missing--;
        crowd->next_try_ns = now_ns + crowd->patience_ns;
    } else if (crowd->n_missing == 0 && now_ns >= crowd->next_try_ns) {
        crowd->patience_ns = 0; /* the last try has held for as long as it was waited for */
    }
    return n_threads - (crowd->n_missing < most ? crowd->n_missing : most);
}
