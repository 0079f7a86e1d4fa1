/* SPDX-License-Identifier: Apache-2.0
 *
 * Files by POSIX calls. Every message names the path. Mappings are shared and read-only, so the
 * page cache holds the one copy of a model that all processes use.
 */
#include "base/file.h"

#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "base/mem.h"

#define READ_MAX_DEFAULT ((size_t)1 << 30)
#define READ_FIRST_BYTES ((size_t)64 << 10)

static enum sluice_status fail_errno(struct sluice_error *err, const char *what, const char *path)
{
    const int code = errno;
    char text[128];
    /* The GNU form may return a text of its own instead of filling the buffer. */
    return sl_error_set(err, SLUICE_STATUS_IO, "cannot %s '%s': %s", what, path,
                        strerror_r(code, text, sizeof text));
}

static int open_retry(const char *path, int flags, mode_t mode)
{
    int fd;
    do {
        fd = open(path, flags | O_CLOEXEC, mode);
    } while (fd < 0 && errno == EINTR);
    return fd;
}

enum sluice_status sl_file_map_init(struct sl_file_map *out, const char *path,
                                    struct sluice_error *err)
{
    *out = (struct sl_file_map){0};
    /* Not blocking: opening a FIFO must not hang before it can be refused. */
    const int fd = open_retry(path, O_RDONLY | O_NONBLOCK, 0);
    if (fd < 0) {
        return fail_errno(err, "open", path);
    }
    enum sluice_status status = SLUICE_STATUS_OK;
    struct stat info;
    if (fstat(fd, &info) != 0) {
        status = fail_errno(err, "examine", path);
        goto out;
    }
    if (!S_ISREG(info.st_mode)) {
        status = sl_error_set(err, SLUICE_STATUS_IO, "cannot map '%s': it is %s, not a file", path,
                              S_ISDIR(info.st_mode) ? "a folder" : "a device or pipe");
        goto out;
    }
    if ((uintmax_t)info.st_size > PTRDIFF_MAX) {
        status = sl_error_set(err, SLUICE_STATUS_IO, "cannot map '%s': too large", path);
        goto out;
    }
    if (info.st_size > 0) {
        void *data = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_SHARED, fd, 0);
        if (data == MAP_FAILED) {
            status = fail_errno(err, "map", path);
            goto out;
        }
        out->data = data;
        out->size = (size_t)info.st_size;
    }
out:
    close(fd); /* the mapping keeps the file */
    return status;
}

void sl_file_map_finish(struct sl_file_map *map)
{
    if (map && map->data) {
        munmap((void *)(uintptr_t)map->data, map->size);
    }
    if (map) {
        *map = (struct sl_file_map){0};
    }
}

void sl_file_map_advise(const struct sl_file_map *map, size_t offset, size_t size)
{
    if (!map->data || offset >= map->size) {
        return;
    }
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const size_t end = size < map->size - offset ? offset + size : map->size;
    const size_t begin = offset & ~(page - 1);
    void *address = (void *)((uintptr_t)map->data + begin);
    madvise(address, end - begin, MADV_WILLNEED);
#ifdef MADV_HUGEPAGE
    madvise(address, end - begin, MADV_HUGEPAGE);
#endif
}

/* Read up to `capacity` bytes, fewer only at the end. Returns the count or -1 with errno. */
static ssize_t read_fully(int fd, char *data, size_t capacity)
{
    size_t got = 0;
    while (got < capacity) {
        const ssize_t n = read(fd, data + got, capacity - got);
        if (n == 0) {
            break;
        }
        if (n > 0) {
            got += (size_t)n;
        } else if (errno != EINTR) {
            return -1;
        }
    }
    return (ssize_t)got;
}

/* Read until the end into a growing block: sizes from fstat are not to be relied on for pipes and
 * files that grow. */
static enum sluice_status read_stream(int fd, const char *path, size_t first_bytes,
                                      size_t max_bytes, char **out, size_t *out_size,
                                      struct sluice_error *err)
{
    size_t capacity = first_bytes < max_bytes ? first_bytes : max_bytes;
    size_t size = 0;
    char *data = NULL;
    for (;;) {
        /* One more than wanted tells a file that ends here from one that goes on; and one for
         * the final NUL. */
        char *grown = sl_realloc(SL_MEM_BASE, data, capacity + 2, 1);
        if (!grown) {
            sl_free(data);
            return sl_error_set(err, SLUICE_STATUS_OUT_OF_MEMORY,
                                "no memory to read %zu bytes of '%s'", capacity, path);
        }
        data = grown;
        const ssize_t n = read_fully(fd, data + size, capacity + 1 - size);
        if (n < 0) {
            const enum sluice_status status = fail_errno(err, "read", path);
            sl_free(data);
            return status;
        }
        size += (size_t)n;
        if (size <= capacity) {
            data[size] = '\0';
            *out = data;
            *out_size = size;
            return SLUICE_STATUS_OK;
        }
        if (capacity == max_bytes) {
            sl_free(data);
            return sl_error_set(err, SLUICE_STATUS_IO, "'%s' is larger than the limit of %zu bytes",
                                path, max_bytes);
        }
        capacity = capacity > max_bytes / 2 ? max_bytes : capacity * 2;
    }
}

enum sluice_status sl_file_read(const char *path, size_t max_bytes, char **out, size_t *out_size,
                                struct sluice_error *err)
{
    *out = NULL;
    size_t unused;
    size_t *const size = out_size ? out_size : &unused;
    *size = 0;
    const size_t limit = max_bytes ? max_bytes : READ_MAX_DEFAULT;
    if (strcmp(path, "-") == 0) {
        return read_stream(STDIN_FILENO, "standard input", READ_FIRST_BYTES, limit, out, size, err);
    }
    const int fd = open_retry(path, O_RDONLY, 0);
    if (fd < 0) {
        return fail_errno(err, "open", path);
    }
    struct stat info;
    size_t first = READ_FIRST_BYTES;
    if (fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && info.st_size > 0) {
        first = (uintmax_t)info.st_size < limit ? (size_t)info.st_size : limit;
    }
    const enum sluice_status status = read_stream(fd, path, first, limit, out, size, err);
    close(fd);
    return status;
}

static bool write_fully(int fd, const char *data, size_t size)
{
    while (size > 0) {
        const ssize_t n = write(fd, data, size);
        if (n >= 0) {
            data += n;
            size -= (size_t)n;
        } else if (errno != EINTR) {
            return false;
        }
    }
    return true;
}

enum sluice_status sl_file_write(const char *path, const void *data, size_t size,
                                 struct sluice_error *err)
{
    static atomic_uint counter; /* tells the temporary files of this process's threads apart */
    const size_t capacity = strlen(path) + 48;
    char *temporary = sl_alloc(SL_MEM_BASE, capacity);
    SL_CHECK(temporary, OUT_OF_MEMORY, err, "no memory to write '%s'", path);
    snprintf(temporary, capacity, "%s.%ld-%u.tmp", path, (long)getpid(),
             atomic_fetch_add(&counter, 1));

    enum sluice_status status = SLUICE_STATUS_OK;
    const int fd = open_retry(temporary, O_WRONLY | O_CREAT | O_EXCL, 0666);
    if (fd < 0) {
        status = fail_errno(err, "create", path);
        goto out;
    }
    if (!write_fully(fd, data, size) || fsync(fd) != 0) {
        status = fail_errno(err, "write", path);
    }
    if (close(fd) != 0 && status == SLUICE_STATUS_OK) {
        status = fail_errno(err, "write", path);
    }
    if (status == SLUICE_STATUS_OK && rename(temporary, path) != 0) {
        status = fail_errno(err, "create", path);
    }
    if (status != SLUICE_STATUS_OK) {
        unlink(temporary);
    }
out:
    sl_free(temporary);
    return status;
}

bool sl_file_exists(const char *path)
{
    return access(path, F_OK) == 0;
}

/* Make the folder `path` and those above it. */
static enum sluice_status make_folders(char *path, struct sluice_error *err)
{
    for (char *slash = path + 1;; slash++) {
        if (*slash != '/' && *slash != '\0') {
            continue;
        }
        const char saved = *slash;
        *slash = '\0';
        if (mkdir(path, 0700) != 0 && errno != EEXIST) {
            const enum sluice_status status = fail_errno(err, "create folder", path);
            *slash = saved;
            return status;
        }
        *slash = saved;
        if (saved == '\0') {
            return SLUICE_STATUS_OK;
        }
    }
}

void sl_file_cache_name(char *out, size_t room, const char *prefix, const char *what)
{
    uint64_t hash = 1469598103934665603u; /* FNV-1a */
    for (const char *c = what; *c; c++) {
        hash = (hash ^ (uint8_t)*c) * 1099511628211u;
    }
    snprintf(out, room, "%s-%016llx.txt", prefix, (unsigned long long)hash);
}

enum sluice_status sl_file_cache_path(const char *name, char **out, struct sluice_error *err)
{
    *out = NULL;
    const char *base = getenv("SLUICE_CACHE_DIR");
    const char *below = "";
    if (!base || !base[0]) {
        base = getenv("XDG_CACHE_HOME");
        below = "/sluice";
    }
    if (!base || !base[0]) {
        base = getenv("HOME");
        below = "/.cache/sluice";
    }
    SL_CHECK(base && base[0], IO, err,
             "no cache folder: set SLUICE_CACHE_DIR, XDG_CACHE_HOME or HOME");
    const size_t folder_length = strlen(base) + strlen(below);
    const size_t capacity = folder_length + strlen(name) + 2;
    char *path = sl_alloc(SL_MEM_BASE, capacity);
    SL_CHECK(path, OUT_OF_MEMORY, err, "no memory for the path of '%s'", name);
    snprintf(path, capacity, "%s%s", base, below);
    const enum sluice_status status = make_folders(path, err);
    if (status != SLUICE_STATUS_OK) {
        sl_free(path);
        return status;
    }
    snprintf(path + folder_length, capacity - folder_length, "/%s", name);
    *out = path;
    return SLUICE_STATUS_OK;
}
