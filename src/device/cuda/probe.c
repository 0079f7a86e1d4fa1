/* SPDX-License-Identifier: Apache-2.0
 *
 * Finding a usable GPU: driver, device, machine code for it, context. Every way in which this
 * fails on an ordinary machine has a message of its own.
 *
 * The context's size is what the GPU's used memory grows by while it is made. No memory can be
 * asked of CUDA before there is a context, so the management library that comes with the driver
 * (NVML) is asked when it is there, before and after. Where it is not, the size is unknown and
 * reported as 0. Other processes that allocate at that very moment blur the figure. A context that
 * the process had already (a host program that uses CUDA itself) costs nothing more: about 0.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/error.h"
#include "device/cuda/cuda_device.h"

#define OLDEST_CAPABILITY 75

/* The few entries of NVML that are needed; its header does not come with every toolkit. */
struct nvml_memory {
    unsigned long long total, free, used;
};

struct nvml {
    void *library;
    void *device;
    int (*shutdown)(void);
    int (*memory)(void *device, struct nvml_memory *out);
};

static void nvml_close(struct nvml *nvml)
{
    if (nvml->library != NULL) {
        if (nvml->shutdown != NULL) {
            nvml->shutdown();
        }
        dlclose(nvml->library);
    }
    *nvml = (struct nvml){0};
}

/* Leaves `nvml` zeroed when it is not there or does not know the GPU. */
static void nvml_open(struct nvml *nvml, int ordinal)
{
    *nvml = (struct nvml){0};
    char bus_id[32];
    if (cudaDeviceGetPCIBusId(bus_id, (int)sizeof bus_id, ordinal) != cudaSuccess) {
        cudaGetLastError();
        return;
    }
    nvml->library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (nvml->library == NULL) {
        return;
    }
    int (*init)(void);
    int (*by_bus_id)(const char *id, void **device);
    *(void **)&init = dlsym(nvml->library, "nvmlInit_v2");
    *(void **)&by_bus_id = dlsym(nvml->library, "nvmlDeviceGetHandleByPciBusId_v2");
    *(void **)&nvml->memory = dlsym(nvml->library, "nvmlDeviceGetMemoryInfo");
    if (init == NULL || by_bus_id == NULL || nvml->memory == NULL || init() != 0) {
        nvml_close(nvml);
        return;
    }
    *(void **)&nvml->shutdown = dlsym(nvml->library, "nvmlShutdown");
    if (by_bus_id(bus_id, &nvml->device) != 0) {
        nvml_close(nvml);
    }
}

static bool nvml_used_bytes(const struct nvml *nvml, uint64_t *out)
{
    struct nvml_memory memory;
    if (nvml->library == NULL || nvml->memory(nvml->device, &memory) != 0) {
        return false;
    }
    *out = memory.used;
    return true;
}

static enum sluice_status check_driver(int ordinal, struct sluice_error *err)
{
    int driver = 0;
    int runtime = 0;
    cudaDriverGetVersion(&driver);
    cudaRuntimeGetVersion(&runtime);
    SL_CHECK(driver > 0, DEVICE, err, "no NVIDIA driver was found");
    int n_devices = 0;
    const cudaError_t code = cudaGetDeviceCount(&n_devices);
    cudaGetLastError();
    SL_CHECK(code != cudaErrorInsufficientDriver, DEVICE, err,
             "the NVIDIA driver is too old: it serves CUDA %d.%d, and %d.%d is needed",
             driver / 1000, driver % 1000 / 10, runtime / 1000, runtime % 1000 / 10);
    SL_CHECK(code != cudaErrorNoDevice && (code != cudaSuccess || n_devices > 0), DEVICE, err,
             "no NVIDIA GPU was found");
    SL_CUDA_TRY(code, err, "counting GPUs");
    SL_CHECK(ordinal >= 0 && ordinal < n_devices, DEVICE, err,
             "there is no GPU %d: this machine has %d, counted from 0", ordinal, n_devices);
    return SLUICE_STATUS_OK;
}

static enum sluice_status attribute(int *out, enum cudaDeviceAttr which, int ordinal,
                                    struct sluice_error *err)
{
    SL_CUDA_TRY(cudaDeviceGetAttribute(out, which, ordinal), err, "reading properties of GPU %d",
                ordinal);
    return SLUICE_STATUS_OK;
}

/* Whether the host asks for kernels that keep to what it leaves them (docs/design.md, Devices). */
static bool wants_portable(void)
{
    const char *value = getenv("SLUICE_CUDA_PORTABLE");
    return value != NULL && value[0] != '\0' && strcmp(value, "0") != 0;
}

static enum sluice_status read_props(struct sl_cuda_device *dev, struct sluice_error *err)
{
    int major, minor, n_sm, shared, shared_sm, l2, read_only;
    const int gpu = dev->ordinal;
    SL_TRY(attribute(&major, cudaDevAttrComputeCapabilityMajor, gpu, err));
    SL_TRY(attribute(&minor, cudaDevAttrComputeCapabilityMinor, gpu, err));
    SL_TRY(attribute(&n_sm, cudaDevAttrMultiProcessorCount, gpu, err));
    SL_TRY(attribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, gpu, err));
    SL_TRY(attribute(&shared_sm, cudaDevAttrMaxSharedMemoryPerMultiprocessor, gpu, err));
    SL_TRY(attribute(&l2, cudaDevAttrL2CacheSize, gpu, err));
    SL_TRY(attribute(&read_only, cudaDevAttrHostRegisterReadOnlySupported, gpu, err));
    int same_address;
    SL_TRY(attribute(&same_address, cudaDevAttrCanUseHostPointerForRegisteredMem, gpu, err));
    dev->reads_host_memory = same_address != 0;
    struct sl_cuda_props *props = &dev->props;
    props->compute_capability = major * 10 + minor;
    props->n_sm = n_sm;
    props->ordinal = gpu;
    props->portable = wants_portable();
    props->max_shared_bytes =
        shared < SL_CUDA_MAX_SHARED_BYTES ? (size_t)shared : SL_CUDA_MAX_SHARED_BYTES;
    props->shared_per_sm_bytes = (size_t)shared_sm;
    props->l2_bytes = (size_t)l2;
    dev->read_only_register = read_only != 0;
    SL_CHECK(props->compute_capability >= OLDEST_CAPABILITY, UNSUPPORTED, err,
             "GPU %d (%s) has compute capability %d.%d; %d.%d or newer is needed", gpu, dev->name,
             major, minor, OLDEST_CAPABILITY / 10, OLDEST_CAPABILITY % 10);
    return SLUICE_STATUS_OK;
}

static enum sluice_status make_context(struct sl_cuda_device *dev, struct sluice_error *err)
{
    struct nvml nvml;
    uint64_t before = 0;
    uint64_t after = 0;
    nvml_open(&nvml, dev->ordinal);
    const bool known = nvml_used_bytes(&nvml, &before);
    cudaError_t code = cudaSetDevice(dev->ordinal);
    if (code == cudaSuccess) {
        /* Runtimes before 12 make the context at the first call that needs it. */
        code = cudaFree(NULL);
    }
    if (code == cudaSuccess && known && nvml_used_bytes(&nvml, &after) && after > before) {
        dev->context_bytes = after - before;
    }
    nvml_close(&nvml);
    SL_CUDA_TRY(code, err, "making a context on GPU %d (%s)", dev->ordinal, dev->name);
    return SLUICE_STATUS_OK;
}

enum sluice_status sl_cuda_probe(struct sl_cuda_device *dev, int ordinal, struct sluice_error *err)
{
    SL_TRY(check_driver(ordinal, err));
    dev->ordinal = ordinal;
    struct cudaDeviceProp prop;
    SL_CUDA_TRY(cudaGetDeviceProperties(&prop, ordinal), err, "reading properties of GPU %d",
                ordinal);
    dev->total_bytes = prop.totalGlobalMem;
    snprintf(dev->name, sizeof dev->name, "%.64s", prop.name);
    SL_TRY(read_props(dev, err));
    if (dev->props.portable) {
        /* The profile of a GPU goes by its name, and other kernels have other speeds. */
        snprintf(dev->name, sizeof dev->name, "%.64s (portable kernels)", prop.name);
    }
    SL_TRY(make_context(dev, err));
    const int code = sl_cuda_has_code();
    SL_CHECK(
        code != (int)cudaErrorNoKernelImageForDevice && code != (int)cudaErrorInvalidDeviceFunction,
        UNSUPPORTED, err,
        "this build has no code for GPU %d (%s, compute capability %d.%d); build it with that "
        "target in SLUICE_CUDA_ARCHS",
        ordinal, dev->name, dev->props.compute_capability / 10, dev->props.compute_capability % 10);
    SL_CUDA_TRY((cudaError_t)code, err, "loading kernels on GPU %d (%s)", ordinal, dev->name);
    return SLUICE_STATUS_OK;
}
