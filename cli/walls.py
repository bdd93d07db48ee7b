"""The walls of a service: what its contract declares beside what is in force.

What is in force is asked of two who see it from different sides: the kernel, by /proc of the
running processes, and the service, by its `confinement` method. A service that was taken over
may lie about itself, but not in /proc; what /proc does not show stands on its word alone, and
has no host's view beside it.
"""

from __future__ import annotations

import os
import resource
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from agent_box.process import confine, inside, seccomp
from agent_box.process.paths import told

if TYPE_CHECKING:
    from collections.abc import Iterator

    from agent_box.bus.base import Confinement
    from agent_box.bus.schema import Contract
    from agent_box.process.confine import Profile
    from agent_box.process.paths import Paths

NAMESPACES: Final = ("user", "mnt", "pid", "ipc", "uts", "cgroup")
_LIMITS: Final = {  # the names in /proc/PID/limits
    "RLIMIT_CORE": "Max core file size",
    "RLIMIT_DATA": "Max data size",
    "RLIMIT_FSIZE": "Max file size",
    "RLIMIT_MSGQUEUE": "Max msgqueue size",
    "RLIMIT_NOFILE": "Max open files",
    "RLIMIT_NPROC": "Max processes",
}
_MADE_BY_BWRAP: Final = ("/ ro", "/proc ro", "/dev ro", "/tmp rw")


@dataclass(frozen=True)
class Line:
    """One property of the wall.

    Attributes:
        declared: by the contract.
        host: as /proc shows it; None where it does not.
        service: as the service says; None where it says nothing.
    """

    key: str
    declared: str
    host: str | None
    service: str | None

    @property
    def verdict(self) -> str:
        """``same`` when all who see it see what is declared, ``differs`` when one does not,
        ``unseen`` when nobody could look."""
        seen = [each for each in (self.host, self.service) if each is not None]
        if not seen:
            return "unseen"
        return "same" if all(each == self.declared for each in seen) else "differs"

    def fields(self) -> dict[str, Any]:
        return {**asdict(self), "verdict": self.verdict}

    def text(self) -> str:
        if self.verdict == "same":
            return f"same     {self.key}: {self.declared}"
        parts = [f"{self.key}: declared {self.declared}"]
        parts += [] if self.host is None else [f"in force {self.host}"]
        parts += [] if self.service is None else [f"says itself {self.service}"]
        return f"{self.verdict.upper():<8} {', '.join(parts)}"


@dataclass(frozen=True)
class Seen:
    """What /proc shows of a running service, read once.

    Attributes:
        argv: of the outer process, bubblewrap.
        status: /proc/PID/status of the service itself, by name.
        limits: soft and hard, by the kernel's name, -1 for unlimited.
        mounts: as `inside.mounts`.
        interfaces: as `inside.interfaces`.
        shared: those of `NAMESPACES` and ``net`` that it shares with us.
        dumpable: whether its files in /proc are its account's.
    """

    argv: tuple[str, ...]
    status: dict[str, str]
    limits: dict[str, tuple[int, int]]
    mounts: tuple[str, ...]
    interfaces: tuple[str, ...]
    shared: frozenset[str]
    dumpable: bool


def see(outer: int, pid: int) -> Seen:
    """Reads /proc.

    Args:
        outer: pid of bubblewrap, as supervisord started it.
        pid: of the service itself.

    Raises:
        OSError: a process is gone, or /proc does not show it to us.
    """
    proc = Path(f"/proc/{pid}")
    status = {
        name: value.strip()
        for name, _, value in (
            line.partition(":") for line in (proc / "status").read_text().splitlines()
        )
    }
    return Seen(
        argv=tuple(
            word.decode(errors="surrogateescape")
            for word in Path(f"/proc/{outer}/cmdline").read_bytes().split(b"\0")[:-1]
        ),
        status=status,
        limits=_parse_limits((proc / "limits").read_text()),
        mounts=tuple(inside.mounts((proc / "mountinfo").read_text())),
        interfaces=tuple(inside.interfaces((proc / "net/dev").read_text())),
        shared=frozenset(
            name
            for name in (*NAMESPACES, "net")
            if os.readlink(proc / "ns" / name) == os.readlink(f"/proc/self/ns/{name}")
        ),
        dumpable=(proc / "status").stat().st_uid == int(status["Uid"].split()[0]),
    )


def _parse_limits(text: str) -> dict[str, tuple[int, int]]:
    """From /proc/PID/limits: fixed columns, the name of 26 characters first."""
    found = {}
    for line in text.splitlines()[1:]:
        soft, hard = line[26:].split()[:2]
        found[line[:26].strip()] = (_number(soft), _number(hard))
    return found


def _number(text: str) -> int:
    return -1 if text == "unlimited" else int(text)


def lines(
    contract: Contract, paths: Paths, config: Path | None, seen: Seen, said: Confinement | None
) -> list[Line]:
    """Every property, in the order from the outermost wall inwards.

    Args:
        said: None when the service does not answer.

    Raises:
        ConfineError: the contract's wall cannot be built on this host at all.
    """
    wanted = confine.profile(contract, paths, config)
    return [
        _command(wanted, contract, paths, config, seen),
        *_filters(wanted, paths),
        *_rights(seen, said),
        *_namespaces(wanted, seen, said),
        *_limits_lines(wanted, seen, said),
        *_mounts(wanted, seen, said),
    ]


def _command(
    wanted: Profile, contract: Contract, paths: Paths, config: Path | None, seen: Seen
) -> Line:
    """The whole command line of bubblewrap, to the letter."""
    expected = [
        confine.BWRAP,
        *confine.bwrap_arguments(wanted),
        "--seccomp",
        str(confine.OUTER_FD),
        "--",
        *confine.arguments(contract, paths, config),
    ]
    program = expected.index("--") + 1
    if _same_program(seen.argv[program : program + 1], expected[program]):
        expected[program] = seen.argv[program]
    declared = f"{len(expected)} words"
    if list(seen.argv) == expected:
        return Line("bubblewrap", declared, declared, None)
    gone = [word for word in expected if word not in seen.argv]
    more = [word for word in seen.argv if word not in expected]
    parts = [f"without {' '.join(gone)}" if gone else "", f"with {' '.join(more)}" if more else ""]
    how = "; ".join(filter(None, parts)) or "in another order"
    return Line("bubblewrap", declared, how, None)


def _same_program(seen: tuple[str, ...], expected: str) -> bool:
    """An environment has one interpreter under several names, e.g. python and python3."""
    return (
        len(seen) == 1
        and os.path.dirname(seen[0]) == os.path.dirname(expected)
        and os.path.realpath(seen[0]) == os.path.realpath(expected)
    )


def _filters(wanted: Profile, paths: Paths) -> Iterator[Line]:
    """The programs that services are started with, against those of the contract."""
    from hashlib import sha256

    files = confine.Filters.at(paths.supervisor, wanted.service)
    for key, declared, file in (
        ("seccomp-outer", wanted.filter(), files.outer),
        ("seccomp-inner", seccomp.inner(), files.inner),
    ):
        program = f"sha256 {sha256(seccomp.program(declared)).hexdigest()[:16]}"
        try:
            host = f"sha256 {sha256(file.read_bytes()).hexdigest()[:16]}"
        except OSError as error:
            host = told(error)
        yield Line(key, program, host, None)


def _rights(seen: Seen, said: Confinement | None) -> Iterator[Line]:
    status = seen.status
    uid = str(os.getuid())
    yield Line(
        "uid",
        uid,
        " ".join(dict.fromkeys(status["Uid"].split())),
        None if said is None else str(said.uid),
    )
    yield Line(
        "no-new-privs",
        "yes",
        _yes(status.get("NoNewPrivs") == "1"),
        None if said is None else _yes(said.no_new_privs),
    )
    yield Line(
        "seccomp",
        "2 filters",
        f"{status.get('Seccomp_filters', '0')} filters",
        None if said is None else f"{said.seccomp_filters} filters",
    )
    held = sorted({status[name] for name in ("CapPrm", "CapEff", "CapBnd", "CapInh", "CapAmb")})
    yield Line(
        "capabilities",
        "none",
        "none" if not any(int(each, 16) for each in held) else " ".join(held),
        None if said is None else _none(said.capabilities_effective),
    )
    yield Line(
        "dumpable",
        "no",
        _yes(seen.dumpable),
        None if said is None else _yes(said.dumpable),
    )
    if said is None:
        yield Line("landlock", "enforced", None, None)
    elif said.landlock_abi:
        yield Line("landlock", "enforced", None, "enforced" if said.landlock_enforced else "off")
    # Without Landlock in the kernel there is no such wall, and doctor says so.


def _namespaces(wanted: Profile, seen: Seen, said: Confinement | None) -> Iterator[Line]:
    for name in (*NAMESPACES, "net"):
        declared = "shared" if name == "net" and wanted.host_network else "own"
        host = "shared" if name in seen.shared else "own"
        service = None
        if said is not None and name in said.namespaces:
            ours = os.readlink(f"/proc/self/ns/{name}")
            service = "shared" if said.namespaces[name] == ours else "own"
        yield Line(f"namespace-{name}", declared, host, service)
    if not wanted.host_network:
        yield Line(
            "interfaces",
            "lo",
            " ".join(_real(seen.interfaces)),
            None if said is None else " ".join(_real(said.interfaces)),
        )


def _real(interfaces: list[str] | tuple[str, ...]) -> list[str]:
    return [name for name in interfaces if name]


def _limits_lines(wanted: Profile, seen: Seen, said: Confinement | None) -> Iterator[Line]:
    for name, value in wanted.limits:
        _, hard = resource.getrlimit(getattr(resource, name))
        if hard != resource.RLIM_INFINITY:
            value = min(value, hard)  # as `inside` does: the account itself may have less
        soft, hard = seen.limits.get(_LIMITS.get(name, ""), (-2, -2))
        yield Line(
            name.lower().replace("_", "-"),
            str(value),
            str(soft) if soft == hard else f"{soft} to {hard}",
            None if said is None else str(said.limits.get(name, "unknown")),
        )


def _mounts(wanted: Profile, seen: Seen, said: Confinement | None) -> Iterator[Line]:
    """One line for each path that is declared or there."""
    declared = dict(map(_split, _MADE_BY_BWRAP))
    declared |= {f"/dev/{name}": "rw" for name in confine.DEVICES}
    for mount in wanted.mounts:
        if not mount.optional or mount.path.exists():
            declared[str(mount.path)] = "rw" if mount.writable else "ro"
    host = dict(map(_split, seen.mounts))
    service = {} if said is None else dict(map(_split, said.mounts))
    for path in sorted(declared.keys() | host.keys() | service.keys()):
        yield Line(
            f"mount {path}",
            declared.get(path, "none"),
            host.get(path, "none"),
            None if said is None else service.get(path, "none"),
        )


def _split(mount: str) -> tuple[str, str]:
    path, _, mode = mount.rpartition(" ")
    return path, mode


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _none(capabilities: str) -> str:
    return "none" if not int(capabilities or "f", 16) else capabilities
