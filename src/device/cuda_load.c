/* SPDX-License-Identifier: Apache-2.0
 *
 * Finding and loading the CUDA device library, so that the program itself needs no CUDA to start.
 * The places, in order:
 *
 *     SLUICE_CUDA_LIBRARY (then no other place counts)
 *     the folder of the running executable, and ../lib beside it
 *     the folder of the library (or program) that holds this code
 *     wherever the system's loader looks
 *
 * A loaded library stays loaded: driver threads may run its code until the process ends.
 */
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/error.h"
#include "base/file.h"
#include "device/device.h"

#define LIBRARY_NAME "libsluice-cuda.so"

/* Put the folder of `file` and "/<below>LIBRARY_NAME" together; false when it does not fit. */
static bool beside(char out[PATH_MAX], const char *file, const char *below)
{
    const char *slash = strrchr(file, '/');
    if (!slash) {
        return false;
    }
    const int length =
        snprintf(out, PATH_MAX, "%.*s/%s" LIBRARY_NAME, (int)(slash - file), file, below);
    return length > 0 && length < PATH_MAX;
}

/* The first existing file among the places; the plain name when there is none. */
static void find_library(char out[PATH_MAX])
{
    char executable[PATH_MAX];
    const ssize_t length = readlink("/proc/self/exe", executable, sizeof executable - 1);
    if (length > 0) {
        executable[length] = '\0';
        if ((beside(out, executable, "") && sl_file_exists(out)) ||
            (beside(out, executable, "../lib/") && sl_file_exists(out))) {
            return;
        }
    }
    Dl_info self;
    static const char here; /* an address inside this library */
    if (dladdr(&here, &self) && self.dli_fname && beside(out, self.dli_fname, "") &&
        sl_file_exists(out)) {
        return;
    }
    snprintf(out, PATH_MAX, "%s", LIBRARY_NAME);
}

static enum sluice_status load(sl_cuda_entry_fn **entry, struct sluice_error *err)
{
    char path[PATH_MAX];
    const char *chosen = getenv("SLUICE_CUDA_LIBRARY");
    if (chosen && chosen[0]) {
        SL_CHECK(sl_file_exists(chosen), DEVICE, err,
                 "no GPU: SLUICE_CUDA_LIBRARY names '%s', which does not exist", chosen);
    } else {
        find_library(path);
        chosen = path;
    }
    void *library = dlopen(chosen, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        const char *reason = dlerror();
        SL_CHECK(sl_file_exists(chosen) || strchr(chosen, '/'), DEVICE, err,
                 "no GPU: the CUDA part of Sluice (%s) is not installed; put it beside the program "
                 "or name it in SLUICE_CUDA_LIBRARY",
                 LIBRARY_NAME);
        return sl_error_set(err, SLUICE_STATUS_DEVICE, "no GPU: cannot load '%s': %s", chosen,
                            reason ? reason : "unknown reason");
    }
    void *symbol = dlsym(library, SL_CUDA_ENTRY_NAME);
    if (!symbol) {
        dlclose(library);
        return sl_error_set(err, SLUICE_STATUS_DEVICE,
                            "no GPU: '%s' is not a CUDA library of Sluice (it lacks %s)", chosen,
                            SL_CUDA_ENTRY_NAME);
    }
    memcpy(entry, &symbol, sizeof symbol); /* ISO C has no cast from data to function pointer */
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_device_cuda_create(struct sl_device **out, int ordinal,
                                         struct sluice_error *err)
{
    *out = NULL;
    sl_cuda_entry_fn *entry = NULL;
    SL_CHECK(ordinal >= 0, INVALID_ARGUMENT, err, "GPU number %d", ordinal);
    SL_TRY(load(&entry, err));
    return entry(SL_CUDA_ENTRY_VERSION, out, ordinal, err);
}
