"""What a service does to itself when it has started, and what it can tell of its walls.

The first wall was there before it (see `confine`). Here it lowers its limits, becomes
undumpable, puts Landlock on, and last adds the filter after which nothing can be executed.
"""

from __future__ import annotations

import errno
import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agent_box.process import landlock, linux
from agent_box.process.paths import told

if TYPE_CHECKING:
    from agent_box.process.confine import Profile

_NAMESPACES: Final = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")
_FILTER_MAX: Final = 65536  # bytes; the kernel takes 4096 instructions


class EnterError(Exception):
    """A wall that must stand does not. The service must not go on. One line."""


@dataclass(frozen=True)
class Entered:
    """What `enter` found.

    Attributes:
        landlock_abi: 0 when the kernel has no Landlock.
    """

    landlock_abi: int


def enter(wanted: Profile, inner_filter: int) -> Entered:
    """Closes the inner walls. Once, before the process has threads.

    Args:
        wanted: the profile that the process was started under.
        inner_filter: descriptor of the second seccomp program; it is closed.

    Raises:
        EnterError: the outer wall is not there, or an inner one cannot be put up.
    """
    with open(inner_filter, "rb") as file:
        program = file.read(_FILTER_MAX)
    before = _status()
    if before.get("Seccomp") != "2" or before.get("NoNewPrivs") != "1":
        raise EnterError("this process was not started behind its wall")
    if int(before.get("CapEff", "f"), 16):
        raise EnterError("this process has capabilities")
    try:
        _lower_limits(wanted)
        linux.prctl(linux.PR_SET_PDEATHSIG, 9)
        linux.prctl(linux.PR_SET_DUMPABLE, 0)
        abi = landlock.enforce(wanted.landlock(), network=wanted.host_network)
        linux.add_seccomp_filter(program)
    except (OSError, ValueError) as error:
        raise EnterError(f"a wall cannot be put up: {told(error)}") from error
    _prove()
    return Entered(abi)


def _lower_limits(wanted: Profile) -> None:
    for name, value in wanted.limits:
        number: int = getattr(resource, name, -1)
        if number < 0:
            raise ValueError(f"unknown limit {name}")
        _, hard = resource.getrlimit(number)
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)  # the host allows less: a lower wall is no gap
        resource.setrlimit(number, (value, value))


def _prove() -> None:
    """That nothing can be executed, by trying."""
    try:
        os.execv("/usr/bin/true", ["true"])
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EACCES):
            raise EnterError(f"executing fails for another reason: {told(error)}") from error


def facts(entered: Entered) -> dict[str, Any]:
    """What this process reads of itself: the fields of `bus.base.Confinement`, by name.

    Source: proc_pid_status(5), proc_pid_mountinfo(5), namespaces(7), prctl(2).

    Raises:
        OSError: /proc cannot be read.
    """
    status = _status()
    return {
        "uid": os.getuid(),
        "gid": os.getgid(),
        "no_new_privs": status.get("NoNewPrivs") == "1",
        "seccomp_mode": int(status.get("Seccomp", "0")),
        "seccomp_filters": int(status.get("Seccomp_filters", "0")),
        "capabilities_effective": status.get("CapEff", ""),
        "dumpable": linux.prctl(linux.PR_GET_DUMPABLE) != 0,
        "landlock_abi": entered.landlock_abi,
        "landlock_enforced": landlock.enforced(),
        "limits": _limits(),
        "mounts": mounts(Path("/proc/self/mountinfo").read_text()),
        "interfaces": interfaces(Path("/proc/self/net/dev").read_text()),
        "namespaces": {name: os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES},
    }


def mounts(mountinfo: str) -> list[str]:
    """``path mode`` of every mount, e.g. ``/usr ro``, sorted. From proc_pid_mountinfo(5)."""
    found = []
    for line in mountinfo.splitlines():
        fields = line.split(" ")
        path = fields[4].encode().decode("unicode_escape").encode("latin-1").decode()
        found.append(f"{path} {'ro' if 'ro' in fields[5].split(',') else 'rw'}")
    return sorted(found)


def interfaces(net_dev: str) -> list[str]:
    """Names of network interfaces, sorted. From /proc/PID/net/dev."""
    return sorted(line.split(":")[0].strip() for line in net_dev.splitlines() if ":" in line)


def _status() -> dict[str, str]:
    lines = Path("/proc/self/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _limits() -> dict[str, int]:
    """Soft limits by name; -1 for none."""
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    found = {name: resource.getrlimit(getattr(resource, name))[0] for name in names}
    return {name: -1 if v == resource.RLIM_INFINITY else v for name, v in found.items()}
