/* SPDX-License-Identifier: Apache-2.0
 *
 * Files: read-only mappings, whole reads, sequential writes, cache directory. All that differs
 * between systems about files stays here. Paths are UTF-8.
 */
#ifndef SL_BASE_FILE_H
#define SL_BASE_FILE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <sluice/status.h>

/* A read-only mapping of a whole file. `data` is NULL for an empty file. */
struct sl_file_map {
    const uint8_t *data;
    size_t size;
};

/* Map `path`. `out` is zeroed on failure. Errors: IO (no such file, directory, permission). */
enum sluice_status sl_file_map_init(struct sl_file_map *out, const char *path,
                                    struct sluice_error *err);
void sl_file_map_finish(struct sl_file_map *map); /* accepts a zeroed map */
/* Hints for a byte range of the mapping: will be needed soon; prefer huge pages. */
void sl_file_map_advise(const struct sl_file_map *map, size_t offset, size_t size);

/* Read all of a file ("-": standard input) into a new NUL-terminated block (sl_free). `max_bytes`
 * bounds it (0: 1 GiB). */
enum sluice_status sl_file_read(const char *path, size_t max_bytes, char **out, size_t *out_size,
                                struct sluice_error *err);

/* Write `size` bytes to `path` by a temporary file and rename, so that no half file is left. */
enum sluice_status sl_file_write(const char *path, const void *data, size_t size,
                                 struct sluice_error *err);

bool sl_file_exists(const char *path);

/* Name of a kept file about something: "<prefix>-<hash of what>.txt". */
void sl_file_cache_name(char *out, size_t room, const char *prefix, const char *what);
/* Path of `name` inside the user's cache folder for Sluice (SLUICE_CACHE_DIR, else
 * XDG_CACHE_HOME/sluice, else ~/.cache/sluice), made when missing. sl_free the result. */
enum sluice_status sl_file_cache_path(const char *name, char **out, struct sluice_error *err);

#endif
