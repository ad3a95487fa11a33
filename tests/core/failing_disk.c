/* For LD_PRELOAD: from the n-th call on that changes a disk, or for that one alone, such calls fail.
   Counts per process. An error below 0 is a signal: the process is killed right before the call. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static int at, number, for_good, calls;

void fail_at(int nth, int error, int from_then_on) { at = nth; number = error; for_good = from_then_on; calls = 0; }
int calls_so_far(void) { return calls; }

static int fails(void) {
    if (!at) return 0;
    calls++;
    if (calls == at && number < 0) kill(getpid(), -number);
    if (calls == at || (for_good && calls > at)) { errno = number; return 1; }
    return 0;
}

static int changes(const char *path, int flags) {
    return (flags & (O_CREAT | O_WRONLY | O_RDWR)) && strncmp(path, "/dev/", 5) && strncmp(path, "/proc/", 6);
}

#define NEXT(name) static __typeof__(name) *next; if (!next) next = dlsym(RTLD_NEXT, #name)
#define MODE mode_t mode = 0; if (flags & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }

int open(const char *path, int flags, ...) { NEXT(open); MODE; if (changes(path, flags) && fails()) return -1; return next(path, flags, mode); }
int open64(const char *path, int flags, ...) { NEXT(open64); MODE; if (changes(path, flags) && fails()) return -1; return next(path, flags, mode); }
int openat(int dir, const char *path, int flags, ...) { NEXT(openat); MODE; if (changes(path, flags) && fails()) return -1; return next(dir, path, flags, mode); }
int openat64(int dir, const char *path, int flags, ...) { NEXT(openat64); MODE; if (changes(path, flags) && fails()) return -1; return next(dir, path, flags, mode); }
ssize_t write(int fd, const void *data, size_t size) {
    NEXT(write);
    struct stat about;
    if (fd > 2 && !fstat(fd, &about) && S_ISREG(about.st_mode) && fails()) return -1;
    return next(fd, data, size);
}
int fsync(int fd) { NEXT(fsync); if (fails()) return -1; return next(fd); }
int mkdir(const char *path, mode_t mode) { NEXT(mkdir); if (fails()) return -1; return next(path, mode); }
int rename(const char *from, const char *to) { NEXT(rename); if (fails()) return -1; return next(from, to); }
int renameat(int a, const char *from, int b, const char *to) { NEXT(renameat); if (fails()) return -1; return next(a, from, b, to); }
