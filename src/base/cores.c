/* SPDX-License-Identifier: Apache-2.0
 *
 * Core topology from sched_getaffinity and /sys (Linux). What cannot be read counts as the common
 * case: no hyper-threads, no efficiency cores, no quota.
 */
#include "base/cores.h"

#include <fcntl.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define MAX_CPUS CPU_SETSIZE

/* Read the first line of a small system file; false when there is none. */
static bool read_line(const char *path, char *line, int capacity)
{
    FILE *file = fopen(path, "re");
    if (!file) {
        return false;
    }
    const bool ok = fgets(line, capacity, file) != NULL;
    fclose(file);
    return ok;
}

/* Add the processors of a list like "0-3,8" to `set`. */
static void parse_cpu_list(const char *text, cpu_set_t *set)
{
    while (*text >= '0' && *text <= '9') {
        char *end;
        const long first = strtol(text, &end, 10);
        long last = first;
        if (*end == '-') {
            last = strtol(end + 1, &end, 10);
        }
        for (long cpu = first; cpu <= last && cpu < MAX_CPUS; cpu++) {
            CPU_SET((size_t)cpu, set);
        }
        text = *end == ',' ? end + 1 : end;
    }
}

static void allowed_cpus(cpu_set_t *set)
{
    CPU_ZERO(set);
    if (sched_getaffinity(0, sizeof *set, set) != 0 || CPU_COUNT(set) == 0) {
        CPU_SET(0, set);
    }
}

/* One processor of each allowed physical core, in rising order. Returns the count, at least 1. */
static int physical_cores(int cores[MAX_CPUS])
{
    cpu_set_t allowed;
    cpu_set_t efficiency;
    allowed_cpus(&allowed);
    CPU_ZERO(&efficiency);
    char line[1024];
    if (read_line("/sys/devices/cpu_atom/cpus", line, sizeof line)) {
        parse_cpu_list(line, &efficiency);
    }
    cpu_set_t fast = allowed;
    for (size_t cpu = 0; cpu < MAX_CPUS; cpu++) {
        if (CPU_ISSET(cpu, &efficiency)) {
            CPU_CLR(cpu, &fast);
        }
    }
    if (CPU_COUNT(&fast) == 0) { /* confined to efficiency cores: they are what there is */
        fast = allowed;
    }
    int n = 0;
    cpu_set_t taken;
    CPU_ZERO(&taken);
    for (int cpu = 0; cpu < MAX_CPUS; cpu++) {
        if (!CPU_ISSET((size_t)cpu, &fast) || CPU_ISSET((size_t)cpu, &taken)) {
            continue;
        }
        cores[n++] = cpu;
        char path[96];
        snprintf(path, sizeof path, "/sys/devices/system/cpu/cpu%d/topology/thread_siblings_list",
                 cpu);
        if (read_line(path, line, sizeof line)) {
            parse_cpu_list(line, &taken);
        }
    }
    return n;
}

/* Processors that the container's quota is worth, rounded up; 0 when there is none. */
static int quota_cpus(void)
{
    char line[128];
    long long quota = 0;
    long long period = 0;
    if (!read_line("/sys/fs/cgroup/cpu.max", line, sizeof line) ||
        sscanf(line, "%lld %lld", &quota, &period) != 2 || quota <= 0 || period <= 0) {
        return 0;
    }
    const long long cpus = (quota + period - 1) / period;
    return cpus < MAX_CPUS ? (int)cpus : 0;
}

int sl_cores_n_allowed(void)
{
    cpu_set_t allowed;
    allowed_cpus(&allowed);
    const int n = CPU_COUNT(&allowed);
    const int quota = quota_cpus();
    return quota > 0 && quota < n ? quota : n;
}

int sl_cores_n_physical(void)
{
    int cores[MAX_CPUS];
    const int n = physical_cores(cores);
    const int quota = quota_cpus();
    return quota > 0 && quota < n ? quota : n;
}

void sl_cores_pin(pthread_t thread, int i)
{
    int cores[MAX_CPUS];
    const int n = physical_cores(cores);
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET((size_t)cores[i % n], &one);
    pthread_setaffinity_np(thread, sizeof one, &one);
}

int sl_cores_open_delay(void)
{
    return open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
}

uint64_t sl_cores_read_delay_ns(int handle)
{
    /* Time on a core, time waiting for one, number of turns. */
    char line[96];
    const ssize_t n = handle < 0 ? -1 : pread(handle, line, sizeof line - 1, 0);
    if (n <= 0) {
        return 0;
    }
    line[n] = '\0';
    unsigned long long delay = 0;
    return sscanf(line, "%*u %llu", &delay) == 1 ? delay : 0;
}

void sl_cores_close_delay(int handle)
{
    if (handle >= 0) {
        close(handle);
    }
}
