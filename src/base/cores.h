/* SPDX-License-Identifier: Apache-2.0
 *
 * Which cores this process may use: affinity mask, hyper-thread siblings, efficiency cores and the
 * CPU quota of a container. All that differs between systems about cores stays here.
 */
#ifndef SL_BASE_CORES_H
#define SL_BASE_CORES_H

#include <pthread.h>
#include <stdint.h>

/* Logical processors this process may use, at least 1. */
int sl_cores_n_allowed(void);
/* Physical performance cores among them, and no more than the CPU quota; at least 1. */
int sl_cores_n_physical(void);
/* Keep `thread` on the i-th of those cores (round again past the last). A refusal is harmless. */
void sl_cores_pin(pthread_t thread, int i);

/* How long the calling thread has waited for a core so far, to be read from any thread. Open gives
 * a handle or -1 where the system does not say; read gives nanoseconds, 0 for -1. */
int sl_cores_open_delay(void);
uint64_t sl_cores_read_delay_ns(int handle);
void sl_cores_close_delay(int handle);

#endif
