/* Takes as much of one thing as it gets: `storm WHAT [COUNT]` prints how many it got and the errno's name that ended it, and
   with `hold` as a third word stays. Built static by the tests and by the benchmark of neighbours. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/fs.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <sys/ioctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/xattr.h>
#include <unistd.h>

static char block[1 << 16];

static long forks(long count) {
    long made = 0;
    for (; made < count; made++) {
        int pid = fork();
        if (pid == 0)
            for (;;)
                if (fork() < 0) sched_yield(); /* each of them goes on, as a bomb does */
        if (pid < 0) break;
    }
    return made;
}

static void *idle(void *nothing) {
    for (;;) pause();
    return nothing;
}

static long threads(long count) {
    long made = 0;
    pthread_attr_t small;
    pthread_attr_init(&small);
    pthread_attr_setstacksize(&small, PTHREAD_STACK_MIN);
    for (pthread_t one; made < count; made++)
        if ((errno = pthread_create(&one, &small, idle, 0))) break;
    return made;
}

/* Children share the work, each up to its own limit of descriptors. */
static long descriptors(long count, int (*open_one)(void)) {
    long total = 0;
    int pipes[2];
    if (pipe(pipes)) return 0;
    while (total < count) {
        int pid = fork();
        if (pid < 0) break;
        if (pid == 0) {
            long got[2] = {0, 0};
            while (total + got[0] < count && open_one() >= 0) got[0]++;
            got[1] = errno;
            if (write(pipes[1], got, sizeof got) < 0) _exit(1);
            for (;;) pause();
        }
        long got[2];
        if (read(pipes[0], got, sizeof got) != sizeof got) break;
        total += got[0];
        errno = got[1];
        if (got[0] == 0) break;
    }
    return total;
}

static int one_file(void) { return open("/dev/null", O_RDONLY); }
static int one_terminal(void) { return open("/dev/ptmx", O_RDWR | O_NOCTTY); }

static int one_socket(void) {
    int file = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in any = {.sin_family = AF_INET};
    if (file >= 0 && (bind(file, (void *)&any, sizeof any) || listen(file, 4096))) return -1;
    return file;
}

static int one_trigger(void) {
    int file = open("/proc/pressure/cpu", O_RDWR | O_NONBLOCK);
    static const char what[] = "some 150000 2000000";
    return file < 0 || write(file, what, sizeof what) < 0 ? -1 : file;
}

static long watches(long count) {
    char name[64];
    long made = 0;
    int file = inotify_init1(0);
    if (file < 0 || mkdir("/tmp/watched", 0700)) return 0;
    for (; made < count; made++) {
        snprintf(name, sizeof name, "/tmp/watched/%ld", made);
        int inner = open(name, O_CREAT | O_WRONLY, 0600);
        if (inner < 0) break;
        close(inner);
        if (inotify_add_watch(file, name, IN_ALL_EVENTS) < 0) break;
    }
    return made;
}

static long names(long count, const char *form) { /* files that hold nothing but their names */
    char name[512];
    long made = 0;
    for (; made < count; made++) {
        if (made % 10000 == 0) {
            snprintf(name, sizeof name, "/tmp/n%ld", made / 10000);
            if (mkdir(name, 0700) || chdir(name)) break;
        }
        snprintf(name, sizeof name, form, made);
        int file = open(name, O_CREAT | O_EXCL | O_WRONLY, 0600);
        if (file < 0) break;
        close(file);
    }
    return made;
}

static long deep(long count) {
    long made = 0;
    if (chdir("/tmp")) return 0;
    for (; made < count; made++)
        if (mkdir("d", 0700) || chdir("d")) break;
    return made;
}

static long links(long count) {
    char name[32];
    long made = 0;
    if (chdir("/tmp") || close(open("l", O_CREAT | O_WRONLY, 0600))) return 0;
    for (; made < count; made++) {
        snprintf(name, sizeof name, "l%ld", made);
        if (link("l", name)) break;
    }
    return made;
}

static long attributes(long count) {
    char name[32];
    long made = 0;
    if (chdir("/tmp")) return 0;
    memset(block, 'a', sizeof block);
    for (; made < count; made++) {
        snprintf(name, sizeof name, "a%ld", made);
        int file = open(name, O_CREAT | O_WRONLY, 0600);
        if (file < 0 || close(file) || setxattr(name, "user.a", block, 3800, 0)) break;
    }
    return made;
}

static long disk(long count) { /* blocks of 64 KiB that do not compress */
    long made = 0;
    int file = open("/tmp/full", O_CREAT | O_WRONLY, 0600), noise = open("/dev/urandom", O_RDONLY);
    if (read(noise, block, sizeof block) < 0) return 0;
    while (made < count && write(file, block, sizeof block) == sizeof block) made++;
    if (fsync(file) < 0) return made;
    return made;
}

static long kept(long count) { /* one block of many is kept of each written and deleted run: does the quota count what stays? */
    long made = 0;
    int file = open("/tmp/kept", O_CREAT | O_RDWR, 0600);
    for (; made < count; made++) {
        long at = (made + 1) * 4096;
        if (fallocate(file, 0, 0, 8L << 20)) break;
        if (fallocate(file, 3, 0, at) || fallocate(file, 3, at + 4096, (8L << 20) - at - 4096)) break;
        if (fsync(file)) break;
    }
    return made;
}

static long clones(long count) {
    long made = 0;
    int file = open("/tmp/from", O_CREAT | O_RDWR, 0600), target = open("/tmp/clones", O_CREAT | O_RDWR, 0600);
    if (write(file, block, sizeof block) < 0 || fsync(file)) return 0;
    for (; made < count; made++) {
        struct file_clone_range range = {.src_fd = file, .src_length = sizeof block, .dest_offset = made * (long)sizeof block};
        if (ioctl(target, FICLONERANGE, &range)) break;
    }
    return made;
}

static long swap(const char *one, const char *other) { /* two names that change places without end */
    for (;;)
        if (renameat2(AT_FDCWD, one, AT_FDCWD, other, RENAME_EXCHANGE)) return 0;
}

static long traced(long count) { /* aether is this program's parent, and so becomes its tracer */
    if (ptrace(PTRACE_TRACEME, 0, 0, 0)) return -1;
    raise(SIGWINCH);
    raise(SIGURG);
    return count;
}

static long silent(long count) { /* ignores all that can be ignored, and closes all that is open */
    for (int number = 1; number < 65; number++) signal(number, SIG_IGN);
    for (int file = 0; file < 1024; file++) close(file);
    setsid();
    for (;;) pause();
    return count;
}

int main(int argc, char **argv) {
    setpgid(0, 0); /* what it kills at its end is its own */
    const char *what = argc > 1 ? argv[1] : "";
    long count = argc > 2 ? atol(argv[2]) : 0, made = -2;
    errno = 0;
    if (!strcmp(what, "forks")) made = forks(count);
    if (!strcmp(what, "threads")) made = threads(count);
    if (!strcmp(what, "files")) made = descriptors(count, one_file);
    if (!strcmp(what, "terminals")) made = descriptors(count, one_terminal);
    if (!strcmp(what, "sockets")) made = descriptors(count, one_socket);
    if (!strcmp(what, "triggers")) made = descriptors(count, one_trigger);
    if (!strcmp(what, "watches")) made = watches(count);
    if (!strcmp(what, "names")) made = names(count, "%ld");
    if (!strcmp(what, "long")) made = names(count, "%0255ld");
    if (!strcmp(what, "deep")) made = deep(count);
    if (!strcmp(what, "links")) made = links(count);
    if (!strcmp(what, "attributes")) made = attributes(count);
    if (!strcmp(what, "disk")) made = disk(count);
    if (!strcmp(what, "kept")) made = kept(count);
    if (!strcmp(what, "clones")) made = clones(count);
    if (!strcmp(what, "traced")) made = traced(count);
    if (!strcmp(what, "swap") && argc > 3) made = swap(argv[2], argv[3]);
    if (!strcmp(what, "silent")) made = silent(count);
    if (made == -2) return 2;
    printf("%ld %s\n", made, errno ? strerrorname_np(errno) : "OK");
    fflush(stdout);
    if (argc > 3) /* hold */
        for (;;) pause();
    kill(0, SIGKILL);
}
