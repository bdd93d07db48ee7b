"""Filters of system calls for jails, without a library: lists of what is refused.

A program in a jail may be as large as QEMU, whose calls differ from version to version, so what
it never needs is refused, and everything that came after this list was written. QEMU's own
`-sandbox` and the device's list of allowed calls come on top.

Source: seccomp(2), linux/filter.h, linux/seccomp.h, arch/x86/entry/syscalls/syscall_64.tbl.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterable
from typing import Final

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW: Final = 0x7FFF0000
_KILL: Final = 0x80000000
_ERRNO: Final = 0x00050000
_NUMBER, _ARCHITECTURE, _ARGUMENT = 0, 4, 16  # offsets in struct seccomp_data
_X86_64: Final = 0xC000003E
_X32: Final = 0x40000000
_LAST: Final = 456  # Linux 6.7; what came later answers as on a kernel that does not have it
_NEW_NAMESPACE: Final = 0x7E020000  # every CLONE_NEW* but CLONE_NEWTIME, which clone cannot make
_TIOCSTI, _TIOCLINUX = 0x5412, 0x541C

AF_UNIX, AF_INET, AF_INET6, AF_NETLINK = 1, 2, 10, 16

# By what they would reach. None is made by QEMU as we start it, by Python, or by the C library
# on the way to either.
REFUSED: Final[dict[str, dict[str, int]]] = {
    "other processes": {
        "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
        "process_madvise": 440, "pidfd_getfd": 438, "pidfd_open": 434,
        "pidfd_send_signal": 424, "perf_event_open": 298, "process_mrelease": 448,
        "move_pages": 279, "migrate_pages": 256,
    },
    "mounts and namespaces": {
        "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "unshare": 272,
        "setns": 308, "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431,
        "fsmount": 432, "fspick": 433, "mount_setattr": 442, "swapon": 167, "swapoff": 168,
        "quotactl": 179, "quotactl_fd": 443, "name_to_handle_at": 303,
        "open_by_handle_at": 304, "fanotify_init": 300, "fanotify_mark": 301,
    },
    # A read-only descriptor of a file of one's own uid could be made writable again by these.
    "rights of files": {
        "chmod": 90, "fchmod": 91, "fchmodat": 268, "fchmodat2": 452, "chown": 92,
        "fchown": 93, "lchown": 94, "fchownat": 260, "setxattr": 188, "lsetxattr": 189,
        "fsetxattr": 190, "removexattr": 197, "lremovexattr": 198, "fremovexattr": 199,
        "mknod": 133, "mknodat": 259, "link": 86, "linkat": 265,
    },
    "the kernel": {
        "bpf": 321, "userfaultfd": 323, "io_uring_setup": 425, "io_uring_enter": 426,
        "io_uring_register": 427, "init_module": 175, "finit_module": 313, "delete_module": 176,
        "kexec_load": 246, "kexec_file_load": 320, "reboot": 169, "acct": 163, "syslog": 103,
        "add_key": 248, "request_key": 249, "keyctl": 250, "iopl": 172, "ioperm": 173,
        "modify_ldt": 154, "personality": 135, "settimeofday": 164, "clock_settime": 227,
        "adjtimex": 159, "clock_adjtime": 305, "sethostname": 170, "setdomainname": 171,
        "vhangup": 153, "lookup_dcookie": 212, "nfsservctl": 180, "_sysctl": 156, "uselib": 134,
        "ustat": 136, "sysfs": 139, "vmsplice": 278, "memfd_secret": 447,
    },
    "System V and POSIX queues": {
        "shmget": 29, "shmat": 30, "shmctl": 31, "shmdt": 67, "semget": 64, "semop": 65,
        "semctl": 66, "semtimedop": 220, "msgget": 68, "msgsnd": 69, "msgrcv": 70,
        "msgctl": 71, "mq_open": 240, "mq_unlink": 241, "mq_timedsend": 242,
        "mq_timedreceive": 243, "mq_notify": 244, "mq_getsetattr": 245,
    },
}  # fmt: skip
_CLONE, _CLONE3, _IOCTL, _SOCKET, _SOCKETPAIR = 56, 435, 16, 41, 53


class FilterError(Exception):
    """No filter for this machine; then there is no jail. One line."""


def program(families: Iterable[int], machine: str | None = None) -> bytes:
    """The filter of a jail, as an array of struct sock_filter.

    Args:
        families: of the sockets that may be made, as numbers of linux/socket.h; with none,
            no socket can be made at all. AF_VSOCK needs saying no to here and nowhere else:
            no namespace hides it.
        machine: as `os.uname` names it; None for this one.

    Raises:
        FilterError: a machine that we do not know.
    """
    machine = machine or os.uname().machine
    if machine != "x86_64":
        raise FilterError(f"no filter of system calls for {machine}")
    code = [
        _op(_LOAD, _ARCHITECTURE),
        _op(_EQUAL, _X86_64, 1, 0),
        _op(_RETURN, _KILL),
        _op(_LOAD, _NUMBER),
        _op(_AT_LEAST, _X32, 0, 1),
        _op(_RETURN, _KILL),
        _op(_AT_LEAST, _LAST + 1, 0, 1),
        _op(_RETURN, _ERRNO | errno.ENOSYS),
        # Its flags are behind a pointer, so the C library is told to take clone.
        _op(_EQUAL, _CLONE3, 0, 1),
        _op(_RETURN, _ERRNO | errno.ENOSYS),
    ]
    for group in REFUSED.values():
        for number in group.values():
            code += [_op(_EQUAL, number, 0, 1), _op(_RETURN, _ERRNO | errno.EPERM)]
    code += _argument(_CLONE, 0, [_op(_ANY_BIT, _NEW_NAMESPACE, 0, 1), _eperm()])
    typing = [_op(_EQUAL, n, 0, 1) for n in (_TIOCSTI, _TIOCLINUX)]
    code += _argument(_IOCTL, 1, [part for test in typing for part in (test, _eperm())])
    for number in (_SOCKET, _SOCKETPAIR):
        allowed = [part for f in families for part in (_op(_EQUAL, f, 0, 1), _allow())]
        refuse = _op(_RETURN, _ERRNO | errno.EAFNOSUPPORT)
        code += _argument(number, 0, [*allowed, refuse])
    code.append(_allow())
    return b"".join(code)


def _argument(number: int, index: int, body: list[bytes]) -> list[bytes]:
    """For one call: load the lower half of an argument, do `body`, else allow. The kernel looks
    at no more than that half of an int."""
    body = [_op(_LOAD, _ARGUMENT + 8 * index), *body, _allow()]
    return [_op(_EQUAL, number, 0, len(body)), *body]


def _allow() -> bytes:
    return _op(_RETURN, _ALLOW)


def _eperm() -> bytes:
    return _op(_RETURN, _ERRNO | errno.EPERM)


def _op(code: int, value: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("=HBBI", code, yes, no, value)
