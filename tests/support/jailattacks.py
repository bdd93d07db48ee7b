"""What a VMM or its vsock device would try after a guest took it over.

Runs by itself inside the jail: `python3 -I -S -B -c SOURCE FACTS`. Each attack raises OSError
(refused) or returns what it got; the result is one JSON object on stdout: the name of each
attack to `[succeeded, what it saw]`. It runs outside of a jail too, so that a test can show
that the attacks are real.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any

Facts = dict[str, Any]
ATTACKS: dict[str, Callable[[Facts], object]] = {}
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
NEWUSER, NEWNS, NEWNET = 0x10000000, 0x20000, 0x40000000
CALLS = {
    "ptrace": 101, "mount": 165, "pivot_root": 155, "chroot": 161, "setns": 308, "bpf": 321,
    "userfaultfd": 323, "io_uring_setup": 425, "perf_event_open": 298, "add_key": 248,
    "keyctl": 250, "process_vm_readv": 310, "pidfd_open": 434, "pidfd_getfd": 438,
    "open_by_handle_at": 304, "name_to_handle_at": 303, "open_tree": 428, "fsopen": 430,
    "kexec_load": 246, "init_module": 175, "personality": 135, "modify_ldt": 154,
    "shmget": 29, "msgget": 68, "mq_open": 240, "syslog": 103, "swapon": 167, "iopl": 172,
    "fchmodat2": 452, "memfd_secret": 447,
}  # fmt: skip


def attack(function: Callable[[Facts], object]) -> Callable[[Facts], object]:
    ATTACKS[function.__name__] = function
    return function


def call(number: int, *arguments: Any) -> int:
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = libc.syscall(ctypes.c_long(number), *words)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"call {number}")
    return int(result)


def looked_at(number: int) -> str:
    """With senseless arguments: refused, or looked at by the kernel."""
    try:
        first = 16 if number == CALLS["ptrace"] else 0  # not to be traced ourselves
        return f"gave {call(number, first, 0, 0, 0, 0, 0)}"
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOSYS):
            raise
        return f"looked at: {errno.errorcode[error.errno or 0]}"


@attack
def have_a_descriptor_that_was_not_given(facts: Facts) -> object:
    open_ones = []
    for fd in range(3, 1024):
        try:
            os.fstat(fd)
            open_ones.append(fd)
        except OSError:
            continue
    extra = sorted(set(open_ones) - set(facts["fds"]))
    if not extra:
        raise OSError(errno.EBADF, "only those")
    return extra


for name, number in CALLS.items():
    ATTACKS[f"call_{name}"] = lambda _facts, number=number: looked_at(number)
for family in range(1, 46):
    ATTACKS[f"socket_{family}"] = lambda _facts, family=family: (
        socket.socket(
            family, socket.SOCK_STREAM if family in (1, 2, 10, 40) else socket.SOCK_RAW
        ).family
    )
ATTACKS["socketpair"] = lambda _facts: socket.socketpair()
for each in ("datagram", "raw"):
    kind = socket.SOCK_DGRAM if each == "datagram" else socket.SOCK_RAW
    ATTACKS[f"socket_inet_{each}"] = lambda _facts, kind=kind: socket.socket(socket.AF_INET, kind)


@attack
def reach_a_path_of_the_host(facts: Facts) -> object:
    seen = [path for path in facts["paths"] if os.path.lexists(path)]
    if not seen:
        raise FileNotFoundError(errno.ENOENT, "none is there")
    return seen


@attack
def connect_to_a_socket_of_the_host(facts: Facts) -> object:
    last = OSError(errno.ENOENT, "none")
    for path in facts["sockets"]:
        for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
            try:
                with socket.socket(socket.AF_UNIX, kind) as sock:
                    sock.connect(path)
                    return path
            except OSError as error:
                last = error
    raise last


@attack
def see_processes(_facts: Facts) -> object:
    return os.listdir("/proc")


@attack
def see_accounts(_facts: Facts) -> object:
    return open("/etc/passwd").read()


@attack
def signal_a_process_of_the_host(facts: Facts) -> object:
    return os.kill(facts["pid"], 0)


@attack
def signal_everybody(_facts: Facts) -> object:
    if os.getpid() != 1:
        return "not the first process of its own namespace"
    return os.kill(-1, 0)


@attack
def make_a_namespace(_facts: Facts) -> object:
    return call(272, NEWUSER)


@attack
def clone_into_a_namespace(_facts: Facts) -> object:
    pid = call(56, NEWUSER | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        os._exit(0)
    return pid


@attack
def clone3(_facts: Facts) -> object:
    return looked_at(435)


@attack
def become_root(_facts: Facts) -> object:
    return os.setuid(0)


@attack
def type_for_the_operator(_facts: Facts) -> object:
    import fcntl

    try:
        return fcntl.ioctl(0, 0x5412, b"x")
    except OSError as error:
        if error.errno == errno.EPERM:
            raise
        return f"looked at: {errno.errorcode[error.errno or 0]}"


@attack
def call_as_x32(_facts: Facts) -> object:
    pid = os.fork()
    if pid == 0:
        result = libc.syscall(ctypes.c_long(0x40000000 + 39))
        os._exit(0 if result > 0 else 1)
    _, status = os.waitpid(pid, 0)
    if status:
        raise OSError(errno.EPERM, f"status {status}")
    return "answered"


@attack
def write_an_image(facts: Facts) -> object:
    """By every way to a file of one's own uid that one may read."""
    last = OSError(errno.ENOENT, "none")
    for path in facts["images"]:
        number = None
        try:
            number = os.open(path, os.O_RDONLY)
        except OSError as error:
            last = error
        ways: list[Callable[[], object]] = [
            lambda p=path: os.chmod(p, 0o660),
            lambda p=path: os.write(os.open(p, os.O_RDWR), b"evil"),
            lambda p=path: os.truncate(p, 0),
            lambda p=path: os.unlink(p),
            lambda p=path: os.rename(p, p + "x"),
            lambda p=path: os.link(p, "/dev/x"),
            lambda p=path: os.utime(p),
            lambda p=path: os.setxattr(p, "user.x", b"x"),
        ]
        if number is not None:
            ways += [
                lambda n=number: os.fchmod(n, 0o660),
                lambda n=number: os.ftruncate(n, 0),
                lambda n=number: os.write(n, b"evil"),
                lambda n=number: os.write(os.open(f"/proc/self/fd/{n}", os.O_RDWR), b"evil"),
                lambda n=number: os.write(os.open(f"/dev/fd/{n}", os.O_RDWR), b"evil"),
            ]
        for way in ways:
            try:
                return f"{path}: {way()}"
            except OSError as error:
                last = error
    raise last


@attack
def make_a_file_anywhere(_facts: Facts) -> object:
    made = []
    for directory, names, _ in os.walk("/"):
        names[:] = [n for n in names if not os.path.islink(os.path.join(directory, n))]
        if directory.count("/") > 1:
            names.clear()
        try:
            os.close(os.open(f"{directory}/agent-box-was-here", os.O_CREAT | os.O_WRONLY))
            os.unlink(f"{directory}/agent-box-was-here")
            made.append(directory)
        except OSError:
            continue
    if not made:
        raise OSError(errno.EROFS, "nowhere")
    return made[:9]


@attack
def find_something_in_the_environment(_facts: Facts) -> object:
    found = set(os.environ) - {"PATH", "LANG", "MALLOC_ARENA_MAX", "PWD", "LC_CTYPE"}
    if not found:
        raise OSError(errno.ENOENT, "nothing")
    return sorted(found)


@attack
def have_a_capability(facts: Facts) -> object:
    """capget(2), since there is no /proc to read."""
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    data = (ctypes.c_uint32 * 6)()
    call(125, header, data)
    if not any(data):
        raise OSError(errno.EPERM, "none")
    return list(data)


@attack
def gain_privileges(_facts: Facts) -> object:
    if libc.prctl(39, 0, 0, 0, 0) == 1:
        raise OSError(errno.EPERM, "no new privileges")
    return "may"


@attack
def take_more_memory(facts: Facts) -> object:
    """mmap(2): private, anonymous, not reserved, so that only a limit can be in the way."""
    return call(9, 0, facts["memory"], 3, 0x4022, -1, 0)


@attack
def take_more_descriptors(facts: Facts) -> object:
    held = []
    try:
        while len(held) < facts["open_files"]:
            held.append(os.dup(0))
    finally:
        for fd in held:
            os.close(fd)
    return len(held)


@attack
def write_a_larger_file(facts: Facts) -> object:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if facts["data_fd"] is None:
        fd = os.memfd_create("x")
        return os.write(fd, b"x")
    return os.pwrite(facts["data_fd"], b"x", facts["disk"])


@attack
def dump_core(_facts: Facts) -> object:
    import resource

    if resource.getrlimit(resource.RLIMIT_CORE) == (0, 0):
        raise OSError(errno.EPERM, "no core")
    return resource.getrlimit(resource.RLIMIT_CORE)


@attack
def raise_a_limit(_facts: Facts) -> object:
    import resource

    try:
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))
    except ValueError as error:
        raise OSError(errno.EPERM, str(error)) from error
    return "raised"


def main() -> None:
    facts = json.loads(sys.argv[1])
    results = {}
    for each, function in ATTACKS.items():
        print(each, file=sys.stderr, flush=True)
        try:
            results[each] = [True, str(function(facts))[:200]]
        except OSError as error:
            results[each] = [False, str(error)[:200]]
    print(json.dumps(results))


main()
