"""Which system calls a service may make, as data, and the way to the kernel by libseccomp.

An allow-list, because a deny-list opens a little further with every new kernel. What is
neither allowed nor named below answers ENOSYS, not EPERM: a C library that tries a call
newer than this list then takes the older way, so one list serves kernels 5.10 to 6.18,
glibc 2.31 to 2.42 and Python 3.11 to 3.13. What an attacker would want answers EPERM, so
that a log shows an attempt for what it is.

There are two filters. The outer one stands before Python starts and lets bubblewrap execute
it. The inner one is added by the service when it has started: from then on nothing can be
executed, and what was given up cannot be taken back.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from agent_box.process.paths import told

NE: Final = 1  # libseccomp's SCMP_CMP_NE
EQ: Final = 4  # SCMP_CMP_EQ
MASKED_EQ: Final = 7  # SCMP_CMP_MASKED_EQ


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


BASE: Final = _names(
    """
    read write readv writev pread64 pwrite64 preadv pwritev preadv2 pwritev2 lseek close
    close_range open openat creat stat fstat lstat newfstatat statx access faccessat faccessat2
    readlink readlinkat getcwd chdir fchdir getdents getdents64 mkdir mkdirat rmdir unlink
    unlinkat rename renameat renameat2 link linkat symlink symlinkat truncate ftruncate
    fallocate fadvise64 fsync fdatasync sync_file_range statfs fstatfs umask dup dup2 dup3
    pipe pipe2 fcntl flock

    brk mmap munmap mremap mprotect madvise msync mincore mlock munlock mlock2 membarrier

    futex futex_waitv set_robust_list get_robust_list set_tid_address rseq arch_prctl
    sched_yield sched_getaffinity sched_getparam sched_getscheduler getcpu
    exit exit_group restart_syscall wait4 waitid gettid getpid getppid getpgrp getpgid getsid
    rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigtimedwait rt_sigsuspend
    rt_sigqueueinfo rt_tgsigqueueinfo sigaltstack signalfd4 kill tkill tgkill pause

    getuid geteuid getgid getegid getresuid getresgid getgroups capget uname sysinfo
    getrlimit prlimit64 setrlimit getrusage times getrandom
    clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time
    getitimer setitimer alarm timer_create timer_settime timer_gettime timer_getoverrun
    timer_delete timerfd_create timerfd_settime timerfd_gettime

    select pselect6 poll ppoll epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait
    epoll_pwait2 eventfd eventfd2

    bind listen accept accept4 connect shutdown getsockname getpeername getsockopt setsockopt
    sendto sendmsg sendmmsg recvfrom recvmsg recvmmsg

    execve seccomp landlock_create_ruleset landlock_add_rule landlock_restrict_self
    """
)
"""Allowed whatever the arguments: files, memory, threads, signals, time, sockets that exist."""

NEVER: Final = _names(
    """
    ptrace process_vm_readv process_vm_writev process_madvise process_mrelease kcmp
    pidfd_open pidfd_getfd pidfd_send_signal
    mount umount umount2 pivot_root chroot move_mount open_tree fsopen fsconfig fsmount fspick
    mount_setattr unshare setns swapon swapoff quotactl quotactl_fd
    bpf keyctl add_key request_key userfaultfd perf_event_open
    io_uring_setup io_uring_enter io_uring_register
    kexec_load kexec_file_load init_module finit_module delete_module reboot
    iopl ioperm modify_ldt personality acct syslog sethostname setdomainname
    settimeofday clock_settime clock_adjtime adjtimex stime
    fanotify_init fanotify_mark name_to_handle_at open_by_handle_at lookup_dcookie
    execveat fork vfork memfd_secret vhangup mknod mknodat capset
    setuid setgid setreuid setregid setresuid setresgid setgroups setfsuid setfsgid
    setsid setpgid sched_setattr sched_setparam
    migrate_pages move_pages mbind set_mempolicy
    """
)
"""Refused with EPERM, and no contract can ask for one of them."""

BY_REQUEST: Final = _names(
    """
    chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat
    setxattr lsetxattr fsetxattr removexattr lremovexattr fremovexattr
    utime utimes utimensat futimesat
    memfd_create inotify_init inotify_init1 inotify_add_watch inotify_rm_watch
    sendfile splice tee vmsplice copy_file_range
    setpriority sched_setaffinity ioprio_set
    socket.netlink
    """
)
"""Refused with EPERM unless the contract's wall names it with a reason.

``socket.netlink`` is no system call: it allows sockets of AF_NETLINK to NETLINK_ROUTE.
"""

_THREAD: Final = 0x00010000  # CLONE_THREAD
_NEW: Final = 0x7E020000  # every CLONE_NEW*: ns, cgroup, uts, ipc, user, pid, net
_IOCTLS: Final = {
    "FIONBIO": 0x5421,
    "FIOCLEX": 0x5451,
    "FIONCLEX": 0x5450,
    "FIONREAD": 0x541B,
    "TIOCOUTQ": 0x5411,
    "TCGETS": 0x5401,
    "TCGETS2": 0x802C542A,
    "TIOCGWINSZ": 0x5413,
}
_TERMINAL_IOCTLS: Final = {"TIOCSTI": 0x5412, "TIOCLINUX": 0x541C}  # type for the operator
_PRCTLS: Final = {
    "PR_SET_PDEATHSIG": 1,
    "PR_GET_PDEATHSIG": 2,
    "PR_GET_DUMPABLE": 3,
    "PR_SET_DUMPABLE": 4,
    "PR_SET_NAME": 15,
    "PR_GET_NAME": 16,
    "PR_GET_SECCOMP": 21,
    "PR_CAPBSET_READ": 23,
    "PR_SET_NO_NEW_PRIVS": 38,
    "PR_GET_NO_NEW_PRIVS": 39,
}
_GIVEN_UP: Final = {"PR_SET_PDEATHSIG": 1, "PR_SET_DUMPABLE": 4}
_PROTOCOLS: Final[dict[int, tuple[int, int]]] = {
    socket.SOCK_STREAM: (0, 6),
    socket.SOCK_DGRAM: (0, 17),
}  # TCP, UDP
_FAMILIES: Final = 47  # AF_MAX of Linux 6.18
_NETLINK: Final = 16
_TYPE: Final = 0xF  # of a socket's type; the rest are SOCK_NONBLOCK and SOCK_CLOEXEC


class SeccompError(Exception):
    """libseccomp is missing or refused. There is no weaker wall. One line for a person."""


@dataclass(frozen=True)
class Rule:
    """One line of a filter.

    Attributes:
        call: name of a system call; one that this libseccomp or machine does not know is
            left out, and with it the way to it.
        allow: let it pass, or answer EPERM.
        where: conditions on arguments, all of which must hold: argument number, `EQ`, `NE`
            or `MASKED_EQ`, then the value, or the mask and the value.
    """

    call: str
    allow: bool
    where: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Filter:
    """What a filter does, in the order in which it was written.

    Attributes:
        rules: what is allowed or refused by name.
        otherwise: `allow`, or the errno of everything else.
    """

    rules: tuple[Rule, ...]
    otherwise: int | None


def outer(*, host_network: bool, extra: Iterable[str]) -> Filter:
    """The filter under which the service starts.

    Args:
        host_network: whether it may have TCP and UDP sockets.
        extra: names out of `BY_REQUEST` that the contract asks for.

    Raises:
        ValueError: a name is not in `BY_REQUEST`.
    """
    extra = frozenset(extra)
    if unknown := extra - BY_REQUEST:
        raise ValueError(f"a contract cannot ask for {', '.join(sorted(unknown))}")
    rules = [Rule(call, True) for call in sorted(BASE | (extra - {"socket.netlink"}))]
    refused = (NEVER | BY_REQUEST) - extra - {"socket.netlink"}
    rules += [Rule(call, False) for call in sorted(refused)]
    # Threads, never processes. clone3 hides its flags behind a pointer, so it answers ENOSYS
    # and the C library takes clone.
    rules.append(Rule("clone", True, ((0, MASKED_EQ, _THREAD | _NEW, _THREAD),)))
    # libzmq aborts when a thread may not ask for the ordinary scheduling that it has.
    rules.append(Rule("sched_setscheduler", True, ((1, EQ, int(os.SCHED_OTHER)),)))
    for number in _IOCTLS.values():
        # The kernel looks at 32 bits only: comparing 64 would let a copy with high bits by.
        rules.append(Rule("ioctl", True, ((1, MASKED_EQ, 0xFFFFFFFF, number),)))
    for number in _TERMINAL_IOCTLS.values():
        rules.append(Rule("ioctl", False, ((1, MASKED_EQ, 0xFFFFFFFF, number),)))
    for number in _PRCTLS.values():
        rules.append(Rule("prctl", True, ((0, EQ, number),)))
    rules += _sockets(host_network=host_network, netlink="socket.netlink" in extra)
    return Filter(tuple(rules), errno.ENOSYS)


def inner() -> Filter:
    """The filter that the service adds when it has started: no way back, nothing executed."""
    rules = [Rule(call, False) for call in ("execve", "execveat", "setrlimit")]
    rules.append(Rule("prlimit64", False, ((2, NE, 0),)))  # reading stays allowed
    rules += [Rule("seccomp", False), Rule("landlock_restrict_self", False)]
    rules += [Rule("prctl", False, ((0, EQ, number),)) for number in _GIVEN_UP.values()]
    return Filter(tuple(rules), None)


def _sockets(*, host_network: bool, netlink: bool) -> list[Rule]:
    unix = int(socket.AF_UNIX)
    rules = [
        Rule("socket", True, ((0, EQ, unix),)),
        Rule("socketpair", True, ((0, EQ, unix),)),
    ]
    internet = [int(socket.AF_INET), int(socket.AF_INET6)] if host_network else []
    for family in internet:
        for kind, protocols in _PROTOCOLS.items():
            for protocol in protocols:
                where = ((0, EQ, family), (1, MASKED_EQ, _TYPE, int(kind)), (2, EQ, protocol))
                rules.append(Rule("socket", True, where))
        for kind in set(range(_TYPE + 1)) - set(_PROTOCOLS):  # raw sockets too
            rules.append(Rule("socket", False, ((0, EQ, family), (1, MASKED_EQ, _TYPE, kind))))
    if netlink:
        rules.append(Rule("socket", True, ((0, EQ, _NETLINK), (2, EQ, 0))))
    spoken_of = {unix, *internet, *([_NETLINK] if netlink else [])}
    for family in set(range(_FAMILIES)) - spoken_of:
        rules.append(Rule("socket", False, ((0, EQ, family),)))
    return rules


def program(wanted: Filter) -> bytes:
    """A filter for this machine as the BPF program that the kernel takes.

    Programs of another architecture, x32 among them, are killed.

    Raises:
        SeccompError: libseccomp or its binding is missing, or refuses a rule.
    """
    library = _libseccomp()
    default = library.ALLOW if wanted.otherwise is None else library.ERRNO(wanted.otherwise)
    try:
        compiled = library.SyscallFilter(default)
        compiled.set_attr(library.Attr.ACT_BADARCH, library.KILL_PROCESS)
        for rule in wanted.rules:
            number = _number(library, rule.call)
            if number is None:
                continue
            action = library.ALLOW if rule.allow else library.ERRNO(errno.EPERM)
            where = [library.Arg(*condition) for condition in rule.where]
            compiled.add_rule(action, number, *where)
        # It writes to a file alone, and says of every failure ECANCELED: memory is never full.
        with open(os.memfd_create("filter", os.MFD_CLOEXEC), "w+b") as file:
            compiled.export_bpf(file)
            file.seek(0)
            return file.read()
    except OSError as error:
        raise SeccompError(f"libseccomp refuses a rule: {told(error)}") from error


def export(wanted: Filter, target: Path) -> None:
    """Writes the program of a filter.

    Args:
        target: replaced in one step, mode 0600.

    Raises:
        SeccompError: as `program`.
        OSError: the file cannot be written; it names it.
    """
    import tempfile

    made = program(wanted)
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with open(descriptor, "wb") as file:
            file.write(made)
        os.replace(name, target)
    except BaseException as error:
        os.unlink(name)
        if isinstance(error, OSError):  # that of a write names no file
            raise OSError(error.errno, error.strerror, str(target)) from error
        raise


# From 424 on a system call has one number on every architecture, so an older libseccomp
# than the kernel can still be told about it. Source: Linux, scripts/syscall.tbl.
_UNIFIED: Final = {
    "pidfd_send_signal": 424,
    "io_uring_setup": 425,
    "io_uring_enter": 426,
    "io_uring_register": 427,
    "open_tree": 428,
    "move_mount": 429,
    "fsopen": 430,
    "fsconfig": 431,
    "fsmount": 432,
    "fspick": 433,
    "pidfd_open": 434,
    "close_range": 436,
    "pidfd_getfd": 438,
    "faccessat2": 439,
    "process_madvise": 440,
    "epoll_pwait2": 441,
    "mount_setattr": 442,
    "quotactl_fd": 443,
    "landlock_create_ruleset": 444,
    "landlock_add_rule": 445,
    "landlock_restrict_self": 446,
    "memfd_secret": 447,
    "process_mrelease": 448,
    "futex_waitv": 449,
    "fchmodat2": 452,
}


def _number(library: Any, call: str) -> int | None:
    number = int(library.resolve_syscall(library.Arch.NATIVE, call))
    if number >= 0:
        return number
    return _UNIFIED.get(call)


def _libseccomp() -> Any:
    try:
        import pyseccomp
    except ImportError as error:
        raise SeccompError(f"the Python package pyseccomp is missing: {error}") from error
    except (RuntimeError, OSError) as error:  # its way to say that there is no library
        raise SeccompError("libseccomp is missing: install the package libseccomp2") from error
    return pyseccomp
