/* Faults of storage. Preload this library (LD_PRELOAD) into a process; one call on the files of a folder then fails,
 * kills the process, or interrupts it like Ctrl-C. The process chooses which: `fault_arm` and `fault_count`, by ctypes. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <unistd.h>

enum { FAILS, KEEPS_FAILING, KILLS, INTERRUPTS };

static char watched[PATH_MAX];
static size_t watched_length;
static long chosen, count;
static int what, error_number, can_exchange = 1;
static char struck[PATH_MAX + 64];

/* Watch the files of `folder`, and do `action` at call number `number`, from 1; 0 only counts. */
void fault_arm(const char *folder, long number, int action, int error, int exchange) {
    watched_length = strlen(strcpy(watched, folder));
    chosen = number, what = action, error_number = error, can_exchange = exchange;
    count = 0;
}

long fault_count(void) { return count; }

/* The call that was struck. */
const char *fault_struck(void) { return struck; }

/* Return the error of this call, or 0 if it goes on. */
static int strike(const char *call, const char *path) {
    if (!watched_length || strncmp(path, watched, watched_length)) return 0;
    long number = __atomic_add_fetch(&count, 1, __ATOMIC_SEQ_CST);
    if (!chosen || number < chosen || (number > chosen && what != KEEPS_FAILING)) return 0;
    if (number == chosen) snprintf(struck, sizeof struck, "%s %s", call, path + watched_length);
    if (what == KILLS) kill(getpid(), SIGKILL);
    if (what == INTERRUPTS) kill(getpid(), SIGINT);
    return what == FAILS || what == KEEPS_FAILING ? error_number : 0;
}

static const char *get_path_of(int descriptor, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = watched_length ? readlink(link, path, PATH_MAX - 1) : 0;
    path[length > 0 ? length : 0] = 0;
    return path;
}

static const char *join(int folder, const char *name, char *path) {
    if (folder == AT_FDCWD || name[0] == '/') return name;
    size_t length = strlen(get_path_of(folder, path));
    snprintf(path + length, PATH_MAX - length, "/%s", name);
    return path;
}

#define FAULTY(failed, type, name, parameters, arguments, path) \
    type name parameters { \
        static type(*real) parameters; \
        char buffer[2 * PATH_MAX]; \
        (void)buffer; \
        if (!real) real = (type(*) parameters)dlsym(RTLD_NEXT, #name); \
        int error = strike(#name, path); \
        if (error) { \
            errno = error; \
            return failed; \
        } \
        return real arguments; \
    }

FAULTY(-1, ssize_t, read, (int f, void *d, size_t n), (f, d, n), get_path_of(f, buffer))
FAULTY(-1, ssize_t, write, (int f, const void *d, size_t n), (f, d, n), get_path_of(f, buffer))
FAULTY(-1, ssize_t, writev, (int f, const struct iovec *v, int n), (f, v, n), get_path_of(f, buffer))
FAULTY(-1, ssize_t, pwrite64, (int f, const void *d, size_t n, off64_t o), (f, d, n, o), get_path_of(f, buffer))
FAULTY(-1, int, ftruncate64, (int f, off64_t n), (f, n), get_path_of(f, buffer))
FAULTY(-1, int, fsync, (int f), (f), get_path_of(f, buffer))
FAULTY(-1, int, fdatasync, (int f), (f), get_path_of(f, buffer))
FAULTY(-1, int, flock, (int f, int o), (f, o), get_path_of(f, buffer))
FAULTY(-1, int, fstat64, (int f, struct stat64 *s), (f, s), get_path_of(f, buffer))
FAULTY(-1, int, stat64, (const char *p, struct stat64 *s), (p, s), p)
FAULTY(-1, int, lstat64, (const char *p, struct stat64 *s), (p, s), p)
FAULTY(-1, int, fstatat64, (int d, const char *p, struct stat64 *s, int o), (d, p, s, o), join(d, p, buffer))
FAULTY(-1, int, statvfs64, (const char *p, struct statvfs64 *s), (p, s), p)
FAULTY(-1, int, rename, (const char *p, const char *q), (p, q), p)
FAULTY(-1, int, renameat, (int d, const char *p, int e, const char *q), (d, p, e, q), join(d, p, buffer))
FAULTY(-1, int, mkdir, (const char *p, mode_t m), (p, m), p)
FAULTY(-1, int, mkdirat, (int d, const char *p, mode_t m), (d, p, m), join(d, p, buffer))
FAULTY(-1, int, rmdir, (const char *p), (p), p)
FAULTY(-1, int, unlink, (const char *p), (p), p)
FAULTY(-1, int, unlinkat, (int d, const char *p, int o), (d, p, o), join(d, p, buffer))
FAULTY(-1, int, symlink, (const char *t, const char *p), (t, p), p)
FAULTY(-1, int, symlinkat, (const char *t, int d, const char *p), (t, d, p), join(d, p, buffer))
FAULTY(NULL, DIR *, opendir, (const char *p), (p), p)
FAULTY(NULL, DIR *, fdopendir, (int f), (f), get_path_of(f, buffer))

/* Fail as on NFS where two folders cannot be exchanged. */
int renameat2(int d, const char *p, int e, const char *q, unsigned o) {
    static int (*real)(int, const char *, int, const char *, unsigned);
    char buffer[2 * PATH_MAX];
    if (!real) real = (int (*)(int, const char *, int, const char *, unsigned))dlsym(RTLD_NEXT, "renameat2");
    int error = strike("renameat2", join(d, p, buffer));
    if (!error && !can_exchange) error = EINVAL;
    if (!error) return real(d, p, e, q, o);
    errno = error;
    return -1;
}

/* A file is closed even if that fails. */
int close(int f) {
    static int (*real)(int);
    char buffer[2 * PATH_MAX];
    if (!real) real = (int (*)(int))dlsym(RTLD_NEXT, "close");
    int error = strike("close", get_path_of(f, buffer)), result = real(f);
    if (!error) return result;
    errno = error;
    return -1;
}

/* The mode is there only if a file may be made. */
#define OPENS(name, parameters, arguments, path) \
    int name parameters { \
        static int(*real) parameters; \
        char buffer[2 * PATH_MAX]; \
        (void)buffer; \
        mode_t mode = 0; \
        if (flags & (O_CREAT | O_TMPFILE)) { \
            va_list list; \
            va_start(list, flags); \
            mode = va_arg(list, int); \
            va_end(list); \
        } \
        if (!real) real = (int(*) parameters)dlsym(RTLD_NEXT, #name); \
        int error = strike(#name, path); \
        if (!error) return real arguments; \
        errno = error; \
        return -1; \
    }

OPENS(open, (const char *p, int flags, ...), (p, flags, mode), p)
OPENS(open64, (const char *p, int flags, ...), (p, flags, mode), p)
OPENS(openat, (int d, const char *p, int flags, ...), (d, p, flags, mode), join(d, p, buffer))
OPENS(openat64, (int d, const char *p, int flags, ...), (d, p, flags, mode), join(d, p, buffer))
