/* What a hostile program inside a sandbox would try, one attempt a run; prints one line. Built static by the tests. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/sysmacros.h>
#include <sys/uio.h>
#include <unistd.h>

static void capabilities(void) {
    char line[256];
    FILE *status = fopen("/proc/self/status", "r");
    while (status && fgets(line, sizeof line, status))
        if (!strncmp(line, "Cap", 3)) printf("%.6s=%s", line, line + 8);
}

static long attempt(const char *what) {
    char byte;
    struct iovec one = {&byte, 1}, other = {(void *)0x400000, 1};
    struct rlimit up = {1 << 22, 1 << 22};
    if (!strcmp(what, "mount")) return mount("x", "/tmp", "tmpfs", 0, "");
    if (!strcmp(what, "umount")) return umount2("/proc", MNT_DETACH);
    if (!strcmp(what, "remount")) return mount("", "/proc/sys", "", MS_REMOUNT | MS_BIND, "");
    if (!strcmp(what, "fsopen")) return syscall(SYS_fsopen, "tmpfs", 0);
    if (!strcmp(what, "open_tree")) return syscall(SYS_open_tree, AT_FDCWD, "/", 1);
    if (!strcmp(what, "pivot")) return syscall(SYS_pivot_root, "/", "/");
    if (!strcmp(what, "userns")) return unshare(CLONE_NEWUSER);
    if (!strcmp(what, "mntns")) return unshare(CLONE_NEWNS);
    if (!strcmp(what, "netns")) return unshare(CLONE_NEWNET);
    if (!strcmp(what, "join1")) { int fd = open("/proc/1/ns/mnt", O_RDONLY); return fd < 0 ? fd : setns(fd, 0); }
    if (!strcmp(what, "blockdev")) return mknod("/tmp/b", S_IFBLK | 0666, makedev(7, 0));
    if (!strcmp(what, "chardev")) return mknod("/tmp/c", S_IFCHR | 0666, makedev(1, 1));
    if (!strcmp(what, "kexec")) return syscall(SYS_kexec_load, 0, 0, 0, 0);
    if (!strcmp(what, "module")) return syscall(SYS_init_module, &byte, 1, "");
    if (!strcmp(what, "bpf")) return syscall(SYS_bpf, 0, 0, 0);
    if (!strcmp(what, "perf")) return syscall(SYS_perf_event_open, 0, 0, -1, -1, 0);
    if (!strcmp(what, "aio")) { unsigned long context = 0; return syscall(SYS_io_setup, 1, &context); }
    if (!strcmp(what, "iouring")) return syscall(SYS_io_uring_setup, 1, 0);
    if (!strcmp(what, "keyctl")) return syscall(SYS_keyctl, 0, 0, 0, 0, 0);
    if (!strcmp(what, "packet")) return socket(AF_PACKET, SOCK_RAW, 0);
    if (!strcmp(what, "alg")) return socket(38, SOCK_SEQPACKET, 0);
    if (!strcmp(what, "reboot")) return syscall(SYS_reboot, 0xfee1dead, 672274793, 0x1234567, 0);
    if (!strcmp(what, "swap")) return syscall(SYS_swapon, "/tmp/x", 0);
    if (!strcmp(what, "time")) { struct timespec t = {1, 0}; return syscall(SYS_clock_settime, 0, &t); }
    if (!strcmp(what, "nofile")) return setrlimit(RLIMIT_NOFILE, &up);
    if (!strcmp(what, "nice")) return setpriority(PRIO_PROCESS, 0, -5);
    if (!strcmp(what, "kill1")) return kill(1, SIGKILL);
    if (!strcmp(what, "stop1")) return kill(1, SIGSTOP);
    if (!strcmp(what, "ptrace1")) return ptrace(PTRACE_SEIZE, 1, 0, 0);
    if (!strcmp(what, "readv1")) return process_vm_readv(1, &one, 1, &other, 1, 0);
    if (!strcmp(what, "handle")) return syscall(SYS_open_by_handle_at, AT_FDCWD, &one, O_RDONLY);
    errno = EINVAL;
    return -1;
}

int main(int count, char **words) {
    if (count == 2 && !strcmp(words[1], "capabilities")) {
        capabilities();
        return 0;
    }
    if (count == 2 && !strcmp(words[1], "ids")) {
        printf("%d %d %d %d\n", getuid(), geteuid(), getgid(), getegid());
        return 0;
    }
    if (count == 3 && !strcmp(words[1], "try")) {
        long value = attempt(words[2]);
        printf("%s\n", value < 0 ? strerrorname_np(errno) : "done");
        return 0;
    }
    if (count == 3 && !strcmp(words[1], "open")) {
        int fd = open(words[2], O_RDONLY);
        char byte;
        long got = fd < 0 ? -1 : read(fd, &byte, 1);
        printf("%s\n", got < 0 ? strerrorname_np(errno) : got ? "data" : "empty");
        return 0;
    }
    if (count == 3 && !strcmp(words[1], "write")) {
        int fd = open(words[2], O_WRONLY);
        printf("%s\n", fd < 0 || write(fd, "1", 1) < 0 ? strerrorname_np(errno) : "done");
        return 0;
    }
    if (count == 3 && !strcmp(words[1], "touch")) { /* uses so many MiB of memory */
        size_t size = (size_t)atol(words[2]) << 20;
        char *memory = mmap(0, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        memset(memory, 1, size);
        puts("done");
        return 0;
    }
    if (count == 3 && !strcmp(words[1], "fork")) { /* children that stay; prints how many there could be */
        int made = 0;
        for (; made < atoi(words[2]); made++) {
            int pid = fork();
            if (pid == 0) pause();
            if (pid < 0) break;
        }
        printf("%d %s\n", made, errno ? strerrorname_np(errno) : "");
        fflush(stdout);
        kill(0, SIGKILL);
    }
    return 2;
}
