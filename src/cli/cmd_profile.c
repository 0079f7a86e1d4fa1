/* SPDX-License-Identifier: Apache-2.0
 *
 * `sluice profile`: measure this machine now and keep the result.
 */
#include <stdio.h>
#include <stdlib.h>

#include <cjson/cJSON.h>

#include "base/error.h"
#include "base/file.h"
#include "base/mem.h"
#include "cli/engine.h"
#include "cli/progress.h"

static bool show_progress(void *user, const char *what, double fraction)
{
    (void)what;
    sl_progress_update(user, (uint64_t)(fraction * 1000), 1000);
    return sl_cli_interrupted();
}

static void print_text(const struct sl_profile *p, const char *path)
{
    printf("CPU      %s, %d threads\n", p->cpu, p->n_threads);
    printf("memory   %.1f GB/s by the CPU", p->dram_bytes_per_s / 1e9);
    if (p->kind != SL_DEVICE_NONE) {
        printf(", %.1f GB/s together with copies", p->dram_busy_bytes_per_s / 1e9);
    }
    printf("\n");
    if (p->kind != SL_DEVICE_NONE) {
        printf("GPU      %s\n", p->gpu);
        printf("VRAM     %.0f GB/s\n", p->vram_bytes_per_s / 1e9);
        printf("link     to the device:");
        for (int i = 0; i < SL_N_COPY_SIZES; i++) {
            printf(" %.1f", p->h2d_bytes_per_s[i] / 1e9);
        }
        printf(" GB/s in pieces of 64K, 256K, 1M, 4M, 64M; back: %.1f GB/s\n",
               p->d2h_bytes_per_s / 1e9);
        printf("latency  %.1f us to the device and back, %.1f us to queue an operation\n",
               p->hop_ns / 1e3, p->issue_ns / 1e3);
    }
    printf("\nproducts, ms per GiB of weights at 1 token | TFLOP/s at the most tokens measured\n");
    printf("%-8s %14s %18s %14s\n", "type", "CPU", "CPU during copies", "GPU");
    for (uint32_t t = 0; t < SL_TYPE_N; t++) {
        const struct sl_type_traits *const traits = sl_type_traits(t);
        if (!traits || !traits->computes || p->linear_ns[SL_UNIT_CPU][t][0] <= 0) {
            continue;
        }
        printf("%-8s", traits->name);
        for (int u = 0; u < SL_N_UNITS; u++) {
            const double *const ns = p->linear_ns[u][t];
            int last = 0;
            for (int i = 0; i < SL_N_TIERS; i++) {
                last = ns[i] > 0 ? i : last;
            }
            if (ns[0] <= 0) {
                printf(" %14s", "-");
                continue;
            }
            const double bytes = 1048576.0 * traits->block_bytes / traits->block_items;
            printf(" %7.1f %6.2f", ns[0] / bytes * 1073741824.0 / 1e6,
                   2 * 1048576.0 * sl_tier_tokens[last] / ns[last] / 1e3);
        }
        printf("\n");
    }
    if (path) {
        printf("\nkept in %s\n", path);
    }
}

static void print_json(const struct sl_profile *p, const char *path)
{
    cJSON *const root = cJSON_CreateObject();
    cJSON_AddStringToObject(root, "cpu", p->cpu);
    cJSON_AddNumberToObject(root, "threads", p->n_threads);
    cJSON_AddStringToObject(root, "gpu", p->gpu);
    cJSON_AddNumberToObject(root, "dram_bytes_per_s", p->dram_bytes_per_s);
    cJSON_AddNumberToObject(root, "dram_busy_bytes_per_s", p->dram_busy_bytes_per_s);
    cJSON_AddNumberToObject(root, "vram_bytes_per_s", p->vram_bytes_per_s);
    cJSON_AddItemToObject(root, "h2d_bytes_per_s",
                          cJSON_CreateDoubleArray(p->h2d_bytes_per_s, SL_N_COPY_SIZES));
    cJSON_AddNumberToObject(root, "d2h_bytes_per_s", p->d2h_bytes_per_s);
    cJSON_AddNumberToObject(root, "copy_busy_factor", p->copy_busy_factor);
    cJSON_AddNumberToObject(root, "hop_ns", p->hop_ns);
    cJSON_AddNumberToObject(root, "issue_ns", p->issue_ns);
    static const char *const units[SL_N_UNITS] = {"cpu", "cpu_busy", "gpu"};
    for (int u = 0; u < SL_N_UNITS; u++) {
        cJSON *const unit = cJSON_AddObjectToObject(root, units[u]);
        cJSON_AddNumberToObject(unit, "op_ns", p->op_ns[u]);
        cJSON_AddNumberToObject(unit, "attention_mib_ns", p->attention_mib_ns[u]);
        cJSON_AddNumberToObject(unit, "attention_gflop_ns", p->attention_gflop_ns[u]);
        cJSON_AddNumberToObject(unit, "elementwise_mib_ns", p->elementwise_mib_ns[u]);
        cJSON *const linear = cJSON_AddObjectToObject(unit, "linear_ns_per_2_20_weights");
        for (uint32_t t = 0; t < SL_TYPE_N; t++) {
            if (p->linear_ns[u][t][0] > 0) {
                cJSON_AddItemToObject(linear, sl_type_name(t),
                                      cJSON_CreateDoubleArray(p->linear_ns[u][t], SL_N_TIERS));
            }
        }
    }
    if (path) {
        cJSON_AddStringToObject(root, "file", path);
    }
    char *const text = cJSON_Print(root);
    printf("%s\n", text ? text : "{}");
    cJSON_free(text);
    cJSON_Delete(root);
}

enum sluice_status sl_cmd_profile(const struct sl_options *options, struct sluice_error *err)
{
    struct sl_engine e = {0};
    char *path = NULL;
    enum sluice_status status = SLUICE_STATUS_OK;
    SL_TRY_OUT(sl_engine_open_device(&e, options, err));
    struct sl_progress progress;
    sl_progress_start(&progress, "measuring this machine", false);
    const struct sl_profiler_options profiler = {
        .device = e.device, .pool = e.pool, .progress = show_progress, .user = &progress};
    status = sl_profiler_run(&e.profile, &profiler, err);
    sl_progress_finish(&progress);
    SL_TRY_OUT(status);
    char name[64];
    sl_profile_file_name(name, sizeof name, e.profile.kind, e.profile.gpu, e.profile.cpu,
                         e.profile.n_threads);
    SL_TRY_OUT(sl_file_cache_path(name, &path, err));
    SL_TRY_OUT(sl_profile_save(&e.profile, path, err));
    if (sl_options_flag(options, SL_OPT_JSON)) {
        print_json(&e.profile, path);
    } else {
        print_text(&e.profile, path);
    }
out:
    sl_free(path);
    sl_engine_close(&e);
    return status;
}
