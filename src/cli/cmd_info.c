/* SPDX-License-Identifier: Apache-2.0
 *
 * sluice info: what a model file holds, as text. As JSON: info_json.c.
 */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "base/error.h"
#include "cli/cli.h"
#include "cli/info.h"
#include "text/utf8.h"

#define SHOWN_ITEMS 8
#define SHOWN_BYTES 120

/* Write text for a terminal, cut after about `most` bytes. Control characters, also the two-byte
 * ones (U+0080 to U+009F), and what is no UTF-8 are escaped. */
static void print_text(struct sl_gguf_string text, size_t most)
{
    size_t i = 0;
    while (i < text.length && i < most) {
        const unsigned char ch = (unsigned char)text.data[i];
        const size_t bytes = sl_utf8_char_length(text.data + i, text.length - i);
        const bool control = ch < 0x20 || ch == 0x7f ||
                             (bytes == 2 && ch == 0xc2 && (unsigned char)text.data[i + 1] < 0xa0);
        if (ch == '\n') {
            fputs("\\n", stdout);
        } else if (bytes == 0 || control) {
            printf("\\x%02x", ch);
        } else {
            fwrite(text.data + i, 1, bytes, stdout);
        }
        i += bytes == 0 || control ? 1 : bytes;
    }
    if (i < text.length) {
        printf("... (%zu bytes)", text.length);
    }
}

static void print_item(const struct sl_gguf *file, const struct sl_gguf_value *value, uint64_t i)
{
    char number[40];
    switch (value->item_kind) {
    case SL_GGUF_STRING:
        print_text(sl_gguf_item_string(file, value, i),
                   value->kind == SL_GGUF_ARRAY ? SHOWN_BYTES / 4 : SHOWN_BYTES);
        break;
    case SL_GGUF_F32:
    case SL_GGUF_F64:
        fputs(sl_number_format(number, sizeof(number), sl_gguf_item_number(value, i),
                               value->item_kind == SL_GGUF_F32),
              stdout);
        break;
    case SL_GGUF_BOOL:
        fputs(sl_gguf_item_int(value, i) != 0 ? "true" : "false", stdout);
        break;
    case SL_GGUF_U64:
        printf("%" PRIu64, sl_info_item_u64(value, i));
        break;
    default:
        printf("%" PRId64, sl_gguf_item_int(value, i));
        break;
    }
}

static void print_value(const struct sl_gguf *file, size_t index)
{
    const struct sl_gguf_value *value = sl_gguf_value(file, index);
    const char *key = sl_gguf_key(file, index);
    fputs("  ", stdout);
    print_text((struct sl_gguf_string){.data = key, .length = strlen(key)}, SHOWN_BYTES);
    if (value->kind != SL_GGUF_ARRAY) {
        printf(" (%s) = ", sl_gguf_kind_name(value->kind));
        print_item(file, value, 0);
        putchar('\n');
        return;
    }
    printf(" (%" PRIu64 " x %s) = [", value->count, sl_gguf_kind_name(value->item_kind));
    for (uint64_t i = 0; i < value->count && i < SHOWN_ITEMS; i++) {
        fputs(i > 0 ? ", " : "", stdout);
        print_item(file, value, i);
    }
    puts(value->count > SHOWN_ITEMS ? ", ...]" : "]");
}

static void print_tensor(const struct sl_gguf_tensor *tensor)
{
    char dims[96];
    int n = 0;
    dims[0] = '\0';
    for (uint32_t i = 0; i < tensor->n_dims; i++) {
        n += snprintf(dims + n, sizeof(dims) - (size_t)n, "%s%" PRId64, i > 0 ? " x " : "",
                      tensor->dims[i]);
    }
    char size[32];
    printf("  %-8s %20s %12s  ", sl_type_name((uint32_t)tensor->type), dims,
           sl_bytes_format(size, sizeof(size), tensor->bytes));
    print_text((struct sl_gguf_string){.data = tensor->name, .length = strlen(tensor->name)},
               SHOWN_BYTES);
    putchar('\n');
}

static void print_files(const struct sl_gguf *file)
{
    char size[32];
    for (size_t i = 0; i < sl_gguf_n_files(file); i++) {
        printf("file: %s (%s)\n", sl_gguf_path(file, i),
               sl_bytes_format(size, sizeof(size), sl_gguf_file_bytes(file, i)));
    }
    printf("GGUF version %u, alignment %u\n", sl_gguf_version(file), sl_gguf_alignment(file));
}

static void print_totals(const struct sl_gguf *file)
{
    struct sl_info_totals totals;
    sl_info_count(file, &totals);
    char size[32];
    char count[32];
    printf("\nsizes by type:\n");
    for (uint32_t type = 0; type < SL_TYPE_N; type++) {
        if (totals.by_type[type].n_tensors > 0) {
            const size_t n = totals.by_type[type].n_tensors;
            printf("  %-8s %6zu %-7s %12s\n", sl_type_name(type), n, n == 1 ? "tensor" : "tensors",
                   sl_bytes_format(size, sizeof(size), totals.by_type[type].bytes));
        }
    }
    printf("\nparameters: %" PRIu64 " (%s), weights: %s", totals.n_params,
           sl_count_format(count, sizeof(count), totals.n_params),
           sl_bytes_format(size, sizeof(size), totals.bytes));
    if (totals.n_params > 0) {
        printf(", %.2f bits per weight", (double)totals.bytes * 8 / (double)totals.n_params);
    }
    putchar('\n');
}

static void print_info(const struct sl_gguf *file)
{
    print_files(file);
    printf("\nmetadata (%zu):\n", sl_gguf_n_values(file));
    for (size_t i = 0; i < sl_gguf_n_values(file); i++) {
        print_value(file, i);
    }
    printf("\ntensors (%zu):\n", sl_gguf_n_tensors(file));
    for (size_t i = 0; i < sl_gguf_n_tensors(file); i++) {
        print_tensor(sl_gguf_tensor(file, i));
    }
    print_totals(file);
}

void sl_info_count(const struct sl_gguf *file, struct sl_info_totals *out)
{
    *out = (struct sl_info_totals){0};
    for (size_t i = 0; i < sl_gguf_n_tensors(file); i++) {
        const struct sl_gguf_tensor *tensor = sl_gguf_tensor(file, i);
        const uint64_t items = sl_info_n_items(tensor);
        out->n_params += items;
        out->bytes += tensor->bytes;
        out->by_type[tensor->type].n_tensors++;
        out->by_type[tensor->type].bytes += tensor->bytes;
        out->by_type[tensor->type].n_params += items;
    }
}

uint64_t sl_info_n_items(const struct sl_gguf_tensor *tensor)
{
    uint64_t items = 1; /* opening has checked that the product fits */
    for (uint32_t i = 0; i < tensor->n_dims; i++) {
        items *= (uint64_t)tensor->dims[i];
    }
    return items;
}

uint64_t sl_info_item_u64(const struct sl_gguf_value *value, uint64_t index)
{
    uint64_t number = 0;
    for (int i = 7; i >= 0; i--) {
        number = number << 8 | value->data[index * 8 + (uint64_t)i];
    }
    return number;
}

enum sluice_status sl_cmd_info(const struct sl_options *options, struct sluice_error *err)
{
    struct sl_gguf *file;
    SL_TRY(sl_gguf_open(&file, options->arguments[0], err));
    enum sluice_status status = SLUICE_STATUS_OK;
    if (sl_options_flag(options, SL_OPT_JSON)) {
        status = sl_info_print_json(stdout, file, err);
    } else {
        print_info(file);
    }
    sl_gguf_close(&file);
    return status;
}
