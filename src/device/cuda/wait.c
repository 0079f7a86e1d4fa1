/* SPDX-License-Identifier: Apache-2.0
 *
 * How the host waits for the GPU: it asks, and never sleeps in the driver. A thread that does comes
 * back 0.3 to 0.6 ms after the event on a virtual machine, and an event that can be slept for
 * (cudaEventBlockingSync) interrupts one of the processor's cores every time it is reached: a
 * worker of the pool that runs there is 30 us late, in every layer, and all others wait for it. But
 * a thread that only spins keeps a core busy for nothing through a prompt. So waits are remembered:
 * what has always taken long is slept through in short naps until shortly before its usual end, and
 * spun through from there; so is most of what takes much longer than ever.
 */
#include "base/clock.h"
#include "device/cuda/cuda_device.h"

#define NAP_NS 1000000
#define MARGIN_NS 1500000 /* before the usual end: naps are overslept, too */
#define SPIN_NS 5000000   /* beyond the usual end */

/* The shortest of the last waits: the next one takes at least about as long. */
static uint64_t usual_ns(const struct sl_cuda_waits *waits)
{
    uint64_t least = waits->ns[0];
    for (int i = 1; i < SL_CUDA_WAITS; i++) {
        least = waits->ns[i] < least ? waits->ns[i] : least;
    }
    return least;
}

cudaError_t sl_cuda_event_wait(cudaEvent_t event, struct sl_cuda_waits *waits)
{
    const uint64_t start_ns = sl_clock_now_ns(), usual = waits ? usual_ns(waits) : 0;
    cudaError_t code;
    uint64_t waited_ns = 0;
    while ((code = cudaEventQuery(event)) == cudaErrorNotReady) {
        cudaGetLastError(); /* "not ready" would be found as the error of a later launch */
        if (waited_ns + NAP_NS + MARGIN_NS < usual || waited_ns > usual + SPIN_NS) {
            sl_clock_sleep_ns(NAP_NS);
        }
        waited_ns = sl_clock_now_ns() - start_ns;
    }
    if (waits) {
        waits->ns[waits->next] = waited_ns;
        waits->next = (waits->next + 1) % SL_CUDA_WAITS;
    }
    return code;
}
