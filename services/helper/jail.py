"""The jails of a machine's processes: command lines of bubblewrap, and limits.

Each process has its own user, mount, PID, IPC, UTS, network and cgroup namespace, no
capability, no new privileges, an empty environment, a filter of system calls, and sees of the
host /usr and the files that are named here, read-only. It gets what it works with as open
descriptors: there is no socket and no directory that it could name. It has no /proc. The
network worker alone has more: the host's network, and its broker's socket.

A jail is started shut: a shell waits at a pipe, and becomes the program when a line comes, so
that the process can be written down, and its limits set, before it does anything. When whoever
started it dies first, the pipe ends and the jail with it.

bubblewrap must not be told `--die-with-parent`: a machine outlives its shim.
"""

from __future__ import annotations

import importlib.util
import os
import re
import resource
import sys
from collections.abc import Sequence
from typing import Final, NamedTuple

import agent_box
from agent_box.helper import bpf

BWRAP: Final = "/usr/bin/bwrap"
# Descriptors inside, the same in every jail.
FILTER_FD: Final = 3
STATUS_FD: Final = 4
GATE_FD: Final = 5  # one digit: the shell knows no more
FIRST_FD: Final = 6  # of those that the program is given
GO: Final = b"go\n"
_GATE: Final = f'read -r word <&{GATE_FD} && [ "$word" = go ] && exec "$@" {GATE_FD}<&-'
_SYSTEM_LINKS: Final = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_DEVICES: Final = ("null", "zero", "full", "random", "urandom")
_DEV_BYTES: Final = 65536
CODE: Final = "/code"
MACHINE_FILES: Final = "/machine"
WORKER_FILES: Final = 16384  # two for each flow, and some
_WORKER_PACKAGES: Final = ("msgspec", "idna")
_HOST_FILES: Final = "/host"
_RESOLVER: Final = ("hosts", "nsswitch.conf", "resolv.conf")
_MAX_NPROC: Final = 512
TOLD: Final = 12  # digits of an id in a name


class Jail(NamedTuple):
    """What one process sees and may use.

    Attributes:
        name: what it is, and of which instance; its host name, so that it is seen in `ps`.
        files: shown read-only: a path of the host and its name inside.
        links: symbolic links inside: target and name.
        devices: of the host, e.g. ``/dev/kvm``, under the same name.
        families: of the sockets that it may make.
        host_network: whether it shares the host's network.
        limits: numbers of `resource.RLIMIT_*` and their values, soft and hard alike.
    """

    name: str
    files: tuple[tuple[str, str], ...]
    links: tuple[tuple[str, str], ...]
    devices: tuple[str, ...]
    families: tuple[int, ...]
    host_network: bool
    limits: tuple[tuple[int, int], ...]

    def filter(self) -> bytes:
        """Raises:
        bpf.FilterError: not on this machine.
        """
        return bpf.program(self.families)


def vmm(
    instance: str,
    images: Sequence[tuple[str, str]],
    *,
    kvm: bool,
    memory_mib: int,
    disk: int,
) -> Jail:
    """The jail of QEMU.

    Its images are bound read-only, and the calls that change the rights of files are refused:
    either alone would keep it, though it has the uid that owns them, from writing to what other
    machines read.

    Args:
        instance: its id.
        images: name inside `MACHINE_FILES`, and path on the host.
        disk: size of the data disk in bytes, which it cannot make larger.
    """
    memory = memory_mib << 20
    return Jail(
        name=f"vmm-{instance[:TOLD]}",
        files=tuple((path, f"{MACHINE_FILES}/{name}") for name, path in images),
        links=(),
        devices=("/dev/kvm",) if kvm else (),
        families=(),
        host_network=False,
        limits=_limits(
            # The guest's memory, translated code, and what QEMU's threads reserve. Of that
            # little is used; the limit stops what runs away.
            address_space=memory + (2 << 30),
            file_size=max(disk, memory),
            open_files=1024,
        ),
    )


def device(instance: str, memory_mib: int) -> Jail:
    """The jail of the vsock device, which maps the machine's memory."""
    return Jail(
        name=f"vsock-{instance[:TOLD]}",
        files=code(),
        links=(),
        devices=(),
        families=(),
        host_network=False,
        limits=_limits(
            address_space=2 * (memory_mib << 20) + (2 << 30), file_size=0, open_files=4160
        ),
    )


def worker(instance: str, broker_directory: str, host_files: str) -> Jail:
    """The jail of a network worker: the host's network, and its instance's broker socket.

    Args:
        broker_directory: in which the broker listens for this instance alone.
        host_files: with the copies of the host's resolver files, which the daemon renews.
    """
    return Jail(
        name=f"worker-{instance[:TOLD]}",
        files=(
            *code(),
            *(package(name) for name in _WORKER_PACKAGES),
            (broker_directory, "/broker"),
            (host_files, _HOST_FILES),
        ),
        links=tuple((f"{_HOST_FILES}/{name}", f"/etc/{name}") for name in _RESOLVER),
        devices=(),
        families=(bpf.AF_UNIX, bpf.AF_INET, bpf.AF_INET6, bpf.AF_NETLINK),
        host_network=True,
        limits=_limits(address_space=2 << 30, file_size=0, open_files=WORKER_FILES),
    )


def package(name: str) -> tuple[str, str]:
    """Where a package of others lies, and its name inside, for a program of ours that needs it.

    Raises:
        ImportError: it is not installed.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"the package {name} is missing")
    return os.path.realpath(spec.submodule_search_locations[0]), f"{CODE}/{name}"


def code() -> tuple[tuple[str, str], ...]:
    """What a Python program of ours needs to see, besides /usr."""
    files = [(os.fspath(agent_box.__path__[0]), f"{CODE}/agent_box")]
    for prefix in dict.fromkeys((sys.base_prefix, sys.base_exec_prefix)):
        if not _below_usr(prefix):
            files.append((prefix, prefix))
    return tuple(files)


def python(module: str, *arguments: str) -> list[str]:
    """The command line, inside a jail with `code`, of a module's `main`, which takes a list."""
    start = (
        f"import sys; sys.path.insert(0, {CODE!r}); from {module} import main; "
        "sys.exit(main(sys.argv[1:]))"
    )
    return [os.path.realpath(sys.executable), "-I", "-S", "-B", "-c", start, *arguments]


def command(jail: Jail, argv: Sequence[str]) -> list[str]:
    """The whole command line that starts `argv` in a jail.

    `FILTER_FD` must be a file with the filter, `STATUS_FD` takes what bubblewrap tells, and
    from `GATE_FD` comes `GO`; the program is given `FIRST_FD` and what follows.
    """
    words = [BWRAP, "--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
    words += ["--unshare-cgroup-try", "--cap-drop", "ALL", "--new-session", "--as-pid-1"]
    words += ["--hostname", jail.name, "--clearenv"]
    words += ["--setenv", "PATH", "/usr/bin", "--setenv", "LANG", "C.UTF-8"]
    words += ["--setenv", "MALLOC_ARENA_MAX", "4"]
    if not jail.host_network:
        words.append("--unshare-net")
    words += ["--ro-bind", "/usr", "/usr"]
    for name in _SYSTEM_LINKS:
        path = f"/{name}"
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            words += ["--ro-bind", path, path]
    words += ["--size", str(_DEV_BYTES), "--tmpfs", "/dev"]
    for device_path in (*(f"/dev/{name}" for name in _DEVICES), *jail.devices):
        words += ["--dev-bind", device_path, device_path]
    words += ["--remount-ro", "/dev"]
    for path, inside in jail.files:
        words += ["--ro-bind", path, inside]
    for target, inside in jail.links:
        words += ["--symlink", target, inside]
    words += ["--remount-ro", "/", "--chdir", "/"]
    words += ["--json-status-fd", str(STATUS_FD), "--seccomp", str(FILTER_FD)]
    return [*words, "--", "/bin/sh", "-c", _GATE, "gate", *argv]


def status_pipe() -> tuple[int, int]:
    """A pipe for `STATUS_FD`: the reading end, and the one for bubblewrap.

    That one can be read from, too, so that the pipe has a reader as long as bubblewrap lives.
    Else, when we die while it builds a jail, it would be ended by its own word to us, and the
    process that it has made would wait for it for ever.
    """
    reader, writer = os.pipe()
    try:
        return reader, os.open(f"/proc/self/fd/{reader}", os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.close(writer)


def limit(pid: int, jail: Jail) -> None:
    """Sets the limits of a process that waits at its gate; never above what there is.

    Raises:
        OSError: it is gone.
    """
    for which, value in jail.limits:
        _, hard = resource.prlimit(pid, which)
        allowed = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.prlimit(pid, which, (allowed, allowed))


def _limits(*, address_space: int, file_size: int, open_files: int) -> tuple[tuple[int, int], ...]:
    limits = [
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_AS, address_space),
        (resource.RLIMIT_FSIZE, file_size),
        (resource.RLIMIT_NOFILE, open_files),
        (resource.RLIMIT_MSGQUEUE, 0),
        (resource.RLIMIT_RTPRIO, 0),
    ]
    major, minor = (int(n) for n in re.findall(r"\d+", os.uname().release)[:2])
    if (major, minor) >= (5, 14):  # before, it counted what the account runs elsewhere
        limits.append((resource.RLIMIT_NPROC, _MAX_NPROC))
    return tuple(limits)


def _below_usr(path: str) -> bool:
    return path == "/usr" or path.startswith("/usr/")
