/* What a hostile program tries against aether, the kernel and the host: `hostile GROUP [DIRECTORY]` makes every attempt of the group in a
   child of its own and prints "name result", where the result is "done" or the errno's name. Built static by the tests. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/btrfs.h>
#include <linux/fs.h>
#include <linux/sched.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/personality.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

/* Makes one attempt in a child: a death, or four seconds without an end, is no success. */
#define TRY(name, ...) \
    do { \
        fflush(stdout); \
        pid_t child = fork(); \
        if (child == 0) { \
            alarm(4); \
            errno = 0; \
            long value = (long)(__VA_ARGS__); \
            printf("%s %s\n", name, value >= 0 ? "done" : strerrorname_np(errno)); \
            fflush(stdout); \
            _exit(0); \
        } \
        int status = 0; \
        if (child < 0 || waitpid(child, &status, 0) != child || status) printf("%s died:%d\n", name, status); \
    } while (0)
#define CALL(name, ...) TRY(#name, syscall(SYS_##name, __VA_ARGS__))
#define CTL(file, request) TRY(#request, ioctl(file, request, memory))

static char memory[1 << 16];
static const char *place = "/tmp";

static long change(const char *path, const char *text) {
    int file = open(path, O_WRONLY);
    return file < 0 ? -1 : write(file, text, strlen(text));
}

static void signals(void) {
    int file = syscall(SYS_pidfd_open, 1, 0);
    siginfo_t info = {.si_code = SI_QUEUE};
    static const int numbers[] = {SIGKILL, SIGSTOP, SIGCONT, SIGTERM, SIGHUP, SIGCHLD, SIGPIPE, SIGSEGV, 32, 33, 64, 0};
    for (unsigned i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        TRY("kill", kill(1, numbers[i]));
        CALL(tkill, 1, numbers[i]);
        CALL(tgkill, 1, 1, numbers[i]);
        CALL(rt_sigqueueinfo, 1, numbers[i], &info);
        CALL(rt_tgsigqueueinfo, 1, 1, numbers[i], &info);
        TRY("pidfd_send_signal", file < 0 ? -1 : syscall(SYS_pidfd_send_signal, file, numbers[i], 0, 0));
    }
}

static void aether(void) {
    struct iovec here = {memory, 16}, there = {(void *)0x400000, 16};
    struct rlimit none = {0, 0};
    struct sched_param first = {1}, plain = {0};
    unsigned long mask = 1, attributes[8] = {sizeof attributes};
    int file = syscall(SYS_pidfd_open, 1, 0);
    signals();
    TRY("attach", ptrace(PTRACE_ATTACH, 1, 0, 0));
    TRY("seize", ptrace(PTRACE_SEIZE, 1, 0, 0));
    for (int number = 0; number < 24; number++) TRY("pidfd_getfd", file < 0 ? -1 : syscall(SYS_pidfd_getfd, file, number, 0));
    CALL(process_vm_readv, 1, &here, 1, &there, 1, 0);
    CALL(process_vm_writev, 1, &here, 1, &there, 1, 0);
    CALL(process_madvise, file, &there, 1, MADV_PAGEOUT, 0);
    CALL(process_mrelease, file, 0);
    for (int kind = 0; kind < 7; kind++) CALL(kcmp, getpid(), 1, kind, 0, 0);
    CALL(prlimit64, 1, RLIMIT_NOFILE, &none, 0);
    CALL(prlimit64, 1, RLIMIT_NOFILE, 0, memory);
    TRY("setaffinity", sched_setaffinity(1, sizeof mask, (cpu_set_t *)&mask));
    TRY("scheduler", sched_setscheduler(1, SCHED_IDLE, &plain));
    TRY("scheduler-first", sched_setscheduler(1, SCHED_FIFO, &first));
    CALL(sched_setattr, 1, attributes, 0);
    CALL(ioprio_set, 1, 1, 3 << 13);
    TRY("priority", setpriority(PRIO_PROCESS, 1, 19));
    CALL(setpgid, 1, 0);
    CALL(migrate_pages, 1, 64, &mask, &mask);
    CALL(move_pages, 1, 0, 0, 0, 0, 0);
    CALL(setns, file, CLONE_NEWNS);
    CALL(setns, file, CLONE_NEWPID | CLONE_NEWNET);
    CALL(capset, &(unsigned[]){0x20080522, 1}, memory);
    CALL(get_robust_list, 1, memory, memory + 64);
}

static void papers(void) { /* files of /proc/1: none may be read, followed or written */
    static const char *const parts[] = {
        "mem", "root/etc", "fd/3", "fd/4", "fd/5", "fd/6", "exe", "cwd/etc", "environ", "maps", "smaps", "pagemap", "auxv", "stack", "syscall",
        "io", "ns/mnt", "ns/pid", "ns/user", "ns/net", "ns/cgroup", "map_files/.", "fdinfo/4", "personality", "task/1/mem", "task/1/fd/4",
        "patch_state", "timerslack_ns", "clear_refs", "seccomp_cache", "mountstats", "numa_maps",
    };
    static const char *const changed[] = {
        "oom_score_adj", "oom_adj", "comm", "clear_refs", "coredump_filter", "autogroup", "timens_offsets", "uid_map", "gid_map", "setgroups", "projid_map",
        "attr/current", "loginuid", "sched", "timerslack_ns", "make-it-fail", "mem", "ksm_merging_pages", "task/1/comm",
    };
    char path[128];
    for (unsigned i = 0; i < sizeof parts / sizeof *parts; i++) {
        snprintf(path, sizeof path, "/proc/1/%s", parts[i]);
        TRY(path, ({ int f = open(path, O_RDONLY); f < 0 ? -1 : read(f, memory, 1) < 0 && errno != EISDIR ? -1 : 0; }));
        TRY(path, readlink(path, memory, sizeof memory));
        TRY(path, chdir(path));
    }
    for (unsigned i = 0; i < sizeof changed / sizeof *changed; i++) {
        snprintf(path, sizeof path, "/proc/1/%s", changed[i]);
        TRY(path, change(path, "0"));
    }
}

static void mounts(void) {
    CALL(mount, "x", "/tmp", "tmpfs", 0, "");
    CALL(mount, "/", "/tmp", 0, MS_BIND | MS_REC, 0);
    CALL(mount, "/proc/self/fd/0", "/tmp", 0, MS_BIND, 0);
    CALL(mount, "", "/proc/sys", "", MS_REMOUNT | MS_BIND, "");
    CALL(mount, "", "/", "", MS_REMOUNT, "");
    CALL(mount, "", "/", "", MS_SHARED | MS_REC, "");
    CALL(mount, "/tmp", "/srv", "", MS_MOVE, "");
    CALL(mount, "c", "/tmp", "cgroup2", 0, "");
    CALL(mount, "c", "/tmp", "cgroup", 0, "memory");
    CALL(mount, "o", "/tmp", "overlay", 0, "lowerdir=/,upperdir=/tmp/u,workdir=/tmp/w");
    CALL(mount, "p", "/tmp", "proc", 0, "");
    CALL(mount, "s", "/tmp", "sysfs", 0, "");
    CALL(umount2, "/proc", MNT_DETACH);
    CALL(umount2, "/dev", MNT_DETACH);
    CALL(fsopen, "tmpfs", 0);
    CALL(fspick, AT_FDCWD, "/", 0);
    CALL(fsconfig, 0, 0, 0, 0, 0);
    CALL(fsmount, 0, 0, 0);
    CALL(move_mount, AT_FDCWD, "/tmp", AT_FDCWD, "/srv", 0);
    CALL(open_tree, AT_FDCWD, "/", 1);
    TRY("open_tree_attr", syscall(467, AT_FDCWD, "/", 0, 0, 0));
    CALL(mount_setattr, AT_FDCWD, "/proc/sys", 0, memory, 32);
    CALL(pivot_root, "/", "/");
    CALL(quotactl, 0x80000700, "/", 0, memory);
    TRY("quotactl_fd", syscall(443, 0, 0x80000700, 0, memory));
    CALL(swapon, "/tmp/x", 0);
    CALL(swapoff, "/tmp/x");
    CALL(open_by_handle_at, AT_FDCWD, memory, O_RDONLY);
    CALL(fanotify_init, 0, 0);
    CALL(fanotify_mark, 0, 1, 8, AT_FDCWD, "/");
    static const long flags[] = {CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWTIME};
    for (unsigned i = 0; i < sizeof flags / sizeof *flags; i++) {
        struct clone_args arguments = {.flags = flags[i], .exit_signal = SIGCHLD};
        CALL(unshare, flags[i]);
        TRY("clone", ({ long p = syscall(SYS_clone, flags[i] | SIGCHLD, 0, 0, 0, 0); if (!p) _exit(0); p; }));
        TRY("clone3", ({ long p = syscall(SYS_clone3, &arguments, sizeof arguments); if (!p) _exit(0); p; }));
    }
    static const char *const spaces[] = {"mnt", "pid", "net", "user", "ipc", "uts", "cgroup", "time"};
    for (unsigned i = 0; i < sizeof spaces / sizeof *spaces; i++) {
        char path[64];
        snprintf(path, sizeof path, "/proc/self/ns/%s", spaces[i]);
        TRY("setns", setns(open(path, O_RDONLY), 0));
    }
}

static void kernel(void) {
    struct timespec then = {1, 0};
    CALL(bpf, 0, memory, 72);
    CALL(bpf, 5, memory, 72);
    CALL(io_uring_setup, 1, memory);
    CALL(io_uring_enter, 0, 0, 0, 0, 0, 0);
    CALL(io_uring_register, 0, 0, 0, 0);
    CALL(io_setup, 1, memory);
    CALL(keyctl, 0, 0, 0, 0, 0);
    CALL(add_key, "user", "x", "y", 1, -3);
    CALL(request_key, "user", "x", 0, -3);
    CALL(perf_event_open, memory, 0, -1, -1, 0);
    CALL(userfaultfd, 0);
    CALL(userfaultfd, 1);
    CALL(init_module, memory, 1, "");
    CALL(finit_module, 0, "", 0);
    CALL(delete_module, "x", 0);
    CALL(kexec_load, 0, 0, 0, 0);
    CALL(kexec_file_load, 0, 0, 0, 0, 0);
    CALL(reboot, 0xfee1dead, 672274793, 0, 0);
    CALL(acct, 0);
    CALL(syslog, 3, memory, 64);
    CALL(syslog, 10, 0, 0);
    CALL(iopl, 3);
    CALL(ioperm, 0x80, 1, 1);
    CALL(clock_settime, 0, &then);
    CALL(settimeofday, &then, 0);
    CALL(adjtimex, memory);
    CALL(clock_adjtime, 0, memory);
    CALL(sethostname, "x", 1);
    CALL(setdomainname, "x", 1);
    CALL(vhangup, 0);
    CALL(uselib, "/bin/sh");
    CALL(_sysctl, memory);
    CALL(nfsservctl, 0, 0, 0);
    CALL(lookup_dcookie, 0, memory, 64);
    CALL(personality, READ_IMPLIES_EXEC);
    CALL(personality, PER_BSD);
    TRY("unknown", syscall(1000, 0, 0, 0, 0)); /* a number that this list does not know */
    CALL(setrlimit, RLIMIT_NOFILE, &(struct rlimit){1 << 22, 1 << 22});
    CALL(setrlimit, RLIMIT_CORE, &(struct rlimit){1 << 22, 1 << 22});
    CALL(setrlimit, RLIMIT_RTPRIO, &(struct rlimit){50, 50});
    CALL(setrlimit, RLIMIT_NICE, &(struct rlimit){40, 40});
    TRY("nice", setpriority(PRIO_PROCESS, 0, -5));
    TRY("fifo", sched_setscheduler(0, SCHED_FIFO, &(struct sched_param){1}));
    CALL(ioprio_set, 1, 0, 1 << 13);
    CALL(capset, &(unsigned[]){0x20080522, 0}, &(unsigned[]){~0u, ~0u, 0, ~0u, ~0u, 0});
    TRY("mlock", mlock(mmap(0, 64 << 20, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), 64 << 20));
    TRY("int80", ({ long r; __asm__ volatile("int $0x80" : "=a"(r) : "a"(20) : "memory"); errno = -r; r > 0 ? 0 : -1; }));
    TRY("x32", syscall(0x40000000 | SYS_getpid));
}

static void settings(void) { /* files of the kernel that root of the host writes */
    static const char *const paths[] = {
        "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/kernel/pid_max", "/proc/sys/kernel/ns_last_pid", "/proc/sys/kernel/hostname",
        "/proc/sys/kernel/shmmax", "/proc/sys/kernel/msgmax", "/proc/sys/vm/overcommit_memory", "/proc/sys/fs/file-max", "/proc/sys/fs/mqueue/msg_max",
        "/proc/sys/user/max_user_namespaces", "/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/core/somaxconn", "/proc/sysrq-trigger",
        "/proc/self/uid_map", "/proc/self/setgroups", "/proc/self/projid_map", "/proc/self/loginuid", "/proc/self/timens_offsets",
        "/proc/pressure/cpu", "/proc/pressure/memory", "/proc/irq/0/smp_affinity", "/proc/bus/pci", "/proc/mtrr", "/proc/acpi/wakeup", "/proc/scsi/scsi",
        "/proc/driver/rtc", "/proc/tty/driver/serial", "/sys/devices/system/cpu/cpu0/online", "/sys/class/net/lo/mtu", "/sys/fs/cgroup/cgroup.procs",
        "/proc/fs/ext4/x", "/proc/dynamic_debug/control", "/proc/kallsyms", "/proc/net/netfilter/nf_log", "/proc/meminfo", "/proc/cpuinfo",
    };
    for (unsigned i = 0; i < sizeof paths / sizeof *paths; i++) TRY(paths[i], change(paths[i], "1"));
    TRY("score", change("/proc/self/oom_score_adj", "-900"));
}

static void sockets(void) {
    char name[32];
    for (int family = 0; family < 64; family++) {
        snprintf(name, sizeof name, "family-%d", family);
        TRY(name, ({ int f = -1; for (int type = 1; type < 6 && f < 0; type++) f = socket(family, type, 0); f; }));
        TRY(name, ({ int pair[2], f = -1; for (int type = 1; type < 6 && f < 0; type++) f = socketpair(family, type, 0, pair); f; }));
    }
    for (int kind = 0; kind < 24; kind++) {
        snprintf(name, sizeof name, "netlink-%d", kind);
        TRY(name, socket(AF_NETLINK, SOCK_RAW, kind));
    }
    for (int protocol = 0; protocol < 264; protocol++) {
        snprintf(name, sizeof name, "inet-%d", protocol);
        for (int type = 1; type < 7; type++)
            if (type != SOCK_RAW) TRY(name, socket(AF_INET, type, protocol));
    }
}

static void disk(void) {
    int directory = open(place, O_RDONLY | O_DIRECTORY), file = -1;
    if (!chdir(place)) file = open("ioctl", O_RDWR | O_CREAT, 0600);
    if (write(file, memory, sizeof memory) < 0) perror("write");
    for (int kind = 0; kind < 256; kind++) { /* btrfs, XFS, ext4 with fs-verity and fscrypt: every number, each way, three sizes */
        static const int families[] = {0x94, 0x58, 0x66, 0xf5, 0x12};
        for (unsigned i = 0; i < sizeof families / sizeof *families; i++)
            for (unsigned way = 0; way < 4; way++)
                for (int size = 0; size < 3; size++) {
                    static const int sizes[] = {8, 4096, 24};
                    unsigned request = _IOC(way, families[i], kind, sizes[size]);
                    if (ioctl(directory, request, memory) >= 0 || ioctl(file, request, memory) >= 0) printf("ioctl-%x-%x done\n", families[i], kind);
                }
    }
    CTL(directory, BTRFS_IOC_SNAP_CREATE); CTL(directory, BTRFS_IOC_SUBVOL_CREATE); CTL(directory, BTRFS_IOC_SNAP_DESTROY);
    CTL(directory, BTRFS_IOC_TREE_SEARCH); CTL(directory, BTRFS_IOC_TREE_SEARCH_V2); CTL(directory, BTRFS_IOC_INO_LOOKUP);
    CTL(directory, BTRFS_IOC_LOGICAL_INO); CTL(directory, BTRFS_IOC_DEV_INFO); CTL(directory, BTRFS_IOC_FS_INFO); CTL(directory, BTRFS_IOC_BALANCE_V2);
    CTL(directory, BTRFS_IOC_SCRUB); CTL(directory, BTRFS_IOC_QUOTA_CTL); CTL(directory, BTRFS_IOC_QGROUP_ASSIGN); CTL(directory, BTRFS_IOC_QGROUP_CREATE);
    CTL(directory, BTRFS_IOC_QGROUP_LIMIT); CTL(directory, BTRFS_IOC_SUBVOL_SETFLAGS); CTL(directory, BTRFS_IOC_SUBVOL_GETFLAGS);
    CTL(directory, BTRFS_IOC_SET_RECEIVED_SUBVOL); CTL(file, BTRFS_IOC_DEFRAG); CTL(file, BTRFS_IOC_DEFRAG_RANGE); CTL(directory, BTRFS_IOC_SEND);
    CTL(directory, BTRFS_IOC_SYNC); CTL(directory, BTRFS_IOC_START_SYNC); CTL(directory, BTRFS_IOC_DEFAULT_SUBVOL); CTL(directory, BTRFS_IOC_SPACE_INFO);
    CTL(directory, BTRFS_IOC_RM_DEV); CTL(directory, BTRFS_IOC_SET_FEATURES); CTL(directory, BTRFS_IOC_GET_SUBVOL_ROOTREF); CTL(directory, BTRFS_IOC_INO_PATHS);
    CTL(directory, FITRIM); CTL(directory, FIFREEZE); CTL(directory, FITHAW); CTL(file, FS_IOC_FSSETXATTR); CTL(file, FS_IOC_SETFSLABEL);
    CTL(file, FS_IOC_GETFSLABEL); CTL(file, FIBMAP);
    TRY("immutable", ioctl(file, FS_IOC_SETFLAGS, &(int){FS_IMMUTABLE_FL}));
    TRY("append", ioctl(file, FS_IOC_SETFLAGS, &(int){FS_APPEND_FL}));
    TRY("compress", ioctl(file, FS_IOC_SETFLAGS, &(int){FS_COMPR_FL}));
    TRY("block", mknod("b", S_IFBLK | 0666, 0x700));
    TRY("character", mknod("c", S_IFCHR | 0666, 0x101));
    TRY("whiteout", renameat2(AT_FDCWD, "ioctl", AT_FDCWD, "moved", RENAME_WHITEOUT));
}

int main(int count, char **words) {
    static const struct { const char *name; void (*act)(void); } groups[] = {
        {"aether", aether}, {"papers", papers}, {"mounts", mounts}, {"kernel", kernel}, {"settings", settings}, {"sockets", sockets}, {"disk", disk},
    };
    if (count > 2) place = words[2];
    for (unsigned i = 0; count > 1 && i < sizeof groups / sizeof *groups; i++)
        if (!strcmp(groups[i].name, words[1])) {
            groups[i].act();
            return 0;
        }
    return 2;
}
