/* SPDX-License-Identifier: Apache-2.0
 *
 * `sluice profile`: measure this machine now and keep the result.
 */
#include <stdio.h>

#include "base/error.h"
#include "base/mem.h"
#include "cli/engine.h"
#include "cli/json.h"

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
    printf("\nkept in %s\n", path);
}

static void add_numbers(struct sl_json *json, cJSON *parent, const char *key, const double *values,
                        int n)
{
    cJSON *const array = sl_json_array(json, parent, key);
    for (int i = 0; i < n; i++) {
        sl_json_number(json, array, NULL, values[i]);
    }
}

static void add_unit(struct sl_json *json, cJSON *units, const struct sl_profile *p, int u,
                     const char *name)
{
    cJSON *const unit = sl_json_object(json, units, name);
    sl_json_number(json, unit, "op_ns", p->op_ns[u]);
    cJSON *const attention = sl_json_object(json, unit, "attention_mib_ns");
    for (int i = 0; i < SL_N_KV_TYPES; i++) {
        sl_json_number(json, attention, sl_type_name(sl_kv_type_list[i]),
                       p->attention_mib_ns[u][i]);
    }
    sl_json_number(json, unit, "attention_gflop_ns", p->attention_gflop_ns[u]);
    sl_json_number(json, unit, "elementwise_mib_ns", p->elementwise_mib_ns[u]);
    cJSON *const linear = sl_json_object(json, unit, "linear_ns_per_2_20_weights");
    for (uint32_t t = 0; t < SL_TYPE_N; t++) {
        if (p->linear_ns[u][t][0] > 0) {
            add_numbers(json, linear, sl_type_name(t), p->linear_ns[u][t], SL_N_TIERS);
        }
    }
}

static enum sluice_status print_json(const struct sl_profile *p, const char *path,
                                     struct sluice_error *err)
{
    struct sl_json json;
    sl_json_init(&json);
    sl_json_string(&json, json.root, "cpu", p->cpu);
    sl_json_i64(&json, json.root, "threads", p->n_threads);
    sl_json_string(&json, json.root, "gpu", p->gpu);
    sl_json_number(&json, json.root, "dram_bytes_per_s", p->dram_bytes_per_s);
    sl_json_number(&json, json.root, "dram_busy_bytes_per_s", p->dram_busy_bytes_per_s);
    sl_json_number(&json, json.root, "vram_bytes_per_s", p->vram_bytes_per_s);
    add_numbers(&json, json.root, "h2d_bytes_per_s", p->h2d_bytes_per_s, SL_N_COPY_SIZES);
    sl_json_number(&json, json.root, "d2h_bytes_per_s", p->d2h_bytes_per_s);
    sl_json_number(&json, json.root, "copy_busy_factor", p->copy_busy_factor);
    sl_json_number(&json, json.root, "mapped_bytes_per_s", p->mapped_bytes_per_s);
    sl_json_number(&json, json.root, "mapped_tiles_bytes_per_s", p->mapped_tiles_bytes_per_s);
    sl_json_number(&json, json.root, "hop_ns", p->hop_ns);
    sl_json_number(&json, json.root, "issue_ns", p->issue_ns);
    static const char *const names[SL_N_UNITS] = {"cpu", "cpu_busy", "gpu"};
    cJSON *const units = sl_json_object(&json, json.root, "units"); /* "cpu" is its name above */
    for (int u = 0; u < SL_N_UNITS; u++) {
        add_unit(&json, units, p, u, names[u]);
    }
    sl_json_string(&json, json.root, "file", path);
    return sl_json_print(stdout, &json, err);
}

enum sluice_status sl_cmd_profile(const struct sl_options *options, struct sluice_error *err)
{
    struct sl_engine e = {0};
    char *path = NULL;
    enum sluice_status status = SLUICE_STATUS_OK;
    SL_TRY_OUT(sl_engine_open_device(&e, options, err));
    SL_TRY_OUT(sl_engine_measure_profile(&e, &path, err));
    if (sl_options_flag(options, SL_OPT_JSON)) {
        status = print_json(&e.profile, path, err);
    } else {
        print_text(&e.profile, path);
    }
out:
    sl_free(path);
    sl_engine_close(&e);
    return status;
}
