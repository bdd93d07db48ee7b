"""The first wall: each service in a bubblewrap of its own, built from its contract's `Wall`.

`profile` says what the service sees, `command` puts it into a command line that anybody can
read in /proc/PID/cmdline, `write_filters` makes the seccomp programs that the command names.
What the service then does to itself is in `inside`.

The service gets a mount namespace with nothing in it but what is listed here, its own user,
PID, IPC, UTS and cgroup namespaces, no capabilities, and an empty network namespace unless
its contract says otherwise. bubblewrap stays its parent, as a process of 0.2 MB that passes
on its exit status; the service itself is PID 1 of its namespace, so when it ends all ends.

`--new-session` is not used: the supervisor's SIGTERM to the process group must reach the
service. What that option guards against, typing for the operator by TIOCSTI, is refused by
the filter, and no terminal device is there to be opened.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from agent_box.process import hostfiles, seccomp
from agent_box.process.landlock import Rule
from agent_box.process.paths import Paths, make_private

if TYPE_CHECKING:
    from agent_box.bus.schema import Contract, Wall

BWRAP: Final = "/usr/bin/bwrap"
SHELL: Final = "/bin/sh"
OUTER_FD: Final = 3  # bubblewrap reads the filter from it and closes it
INNER_FD: Final = 4  # the service reads its second filter from it and closes it
TMP_BYTES: Final = 64 << 20
DEV_BYTES: Final = 64 << 10
FILE_BYTES: Final = 4 << 30  # RLIMIT_FSIZE
THREADS: Final = 128  # RLIMIT_NPROC
_PROBE_SECONDS: Final = 20.0
DEVICES: Final = ("null", "zero", "full", "random", "urandom")
_SYSTEM_LINKS: Final = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
_CERTIFICATES: Final = (
    "/etc/ssl/certs",
    "/etc/ssl/openssl.cnf",
    "/etc/pki/tls/certs",
    "/etc/pki/ca-trust/extracted",
)
_OURS_BELOW_RUNTIME: Final = ("bus", "supervisor", "host")


class ConfineError(Exception):
    """The wall cannot be built as the contract says, so the service must not start.

    One line for a person that names what is in the way.
    """


@dataclass(frozen=True)
class Mount:
    """A path that the service sees, under its own name.

    Attributes:
        optional: left out when the host has no such path.
    """

    path: Path
    writable: bool = False
    optional: bool = False


@dataclass(frozen=True)
class Profile:
    """All that a wall is made of. Derived from a contract and the host's paths alone.

    Attributes:
        mounts: in the order in which they are made.
        links: symbolic links, path and target.
        host_network: whether it shares the host's network.
        syscalls: beyond the base set.
        limits: rlimits by name as in module `resource`, soft and hard alike.
        environment: the whole environment.
    """

    service: str
    mounts: tuple[Mount, ...]
    links: tuple[tuple[Path, str], ...]
    host_network: bool
    syscalls: tuple[str, ...]
    limits: tuple[tuple[str, int], ...]
    environment: tuple[tuple[str, str], ...]

    def landlock(self) -> tuple[Rule, ...]:
        """The rules of the second wall: what is mounted, and nothing more."""
        rules = [Rule(mount.path, mount.writable) for mount in self.mounts]
        rules += [Rule(Path("/dev") / name, True) for name in DEVICES]
        return (*rules, Rule(Path("/proc"), False), Rule(Path("/tmp"), True))

    def filter(self) -> seccomp.Filter:
        return seccomp.outer(host_network=self.host_network, extra=self.syscalls)


@dataclass(frozen=True)
class Filters:
    """Files with seccomp programs: the one bubblewrap loads and the one the service adds."""

    outer: Path
    inner: Path

    @classmethod
    def at(cls, directory: Path, service: str) -> Filters:
        return cls(directory / f"{service}.bpf", directory / f"{service}.inner.bpf")


@dataclass(frozen=True)
class Gap:
    """Why this host cannot confine anything.

    Attributes:
        name: ``bwrap-missing``, ``bwrap-too-old``, ``libseccomp-missing``,
            ``userns-denied`` or ``confinement-failed``.
        fix: what to do, one line.
    """

    name: str
    fix: str


def profile(contract: Contract, paths: Paths, config: Path | None) -> Profile:
    """The wall of a service on this host. Touches nothing.

    Args:
        config: the config file, absolute, when there is one.

    Raises:
        ConfineError: the wall would let more be seen than the contract says, e.g. because
            the config file lies in the home directory, whose all would be mounted.
    """
    service, wall = contract.service, contract.wall
    host_network = wall.network.value == "host"
    mounts = [Mount(Path("/usr"))]
    links: list[tuple[Path, str]] = []
    for name in _SYSTEM_LINKS:
        path = Path("/") / name
        if path.is_symlink():
            links.append((path, os.readlink(path)))
        elif path.is_dir():
            mounts.append(Mount(path))
    mounts.append(Mount(Path("/etc/ld.so.cache"), optional=True))
    code, code_links = _code()
    mounts += code
    links += code_links
    if host_network:
        mounts.append(Mount(paths.host_files))
        mounts += [Mount(Path(path), optional=True) for path in _CERTIFICATES]
        links += [(Path("/etc") / name, str(paths.host_files / name)) for name in hostfiles.NAMES]
    if wall.config and config is not None:
        mounts.append(Mount(_config_directory(config, paths)))
    mounts += [
        Mount(paths.public_keys),
        Mount(paths.keys(service), writable=True),
        Mount(paths.data(service), writable=True),
        Mount(paths.bus(service), writable=True),
        *(Mount(paths.bus(callee)) for callee in wall.calls),
        *(Mount(path, writable=True) for path in _below_runtime(paths, wall.sockets)),
        *(Mount(path) for path in _below_runtime(paths, wall.dials)),
    ]
    _refuse_exposure(mounts, paths)
    try:
        seccomp.outer(host_network=host_network, extra=(name for name, _ in wall.syscalls))
    except ValueError as error:
        raise ConfineError(f"{service}: {error}") from error
    return Profile(
        service=service,
        mounts=tuple(mounts),
        links=tuple(links),
        host_network=host_network,
        syscalls=tuple(name for name, _ in wall.syscalls),
        limits=_limits(wall),
        environment=(
            ("HOME", "/nonexistent"),
            ("LANG", "C.UTF-8"),
            ("MALLOC_ARENA_MAX", "2"),
            ("PATH", "/usr/bin:/bin"),
            ("TZ", "UTC"),
        ),
    )


def prepare(contract: Contract, paths: Paths) -> None:
    """Makes the directories that the profile mounts, besides those of `Paths.make`.

    Raises:
        PathsError: one is not ours, open to others or cannot be made.
    """
    wall = contract.wall
    for directory in _below_runtime(paths, (*wall.sockets, *wall.dials)):
        for part in (*reversed(directory.relative_to(paths.runtime).parents), None):
            make_private(directory if part is None else paths.runtime / part)
    if wall.network.value == "host":
        hostfiles.refresh(paths)


def write_filters(wanted: Profile, directory: Path) -> Filters:
    """Compiles the filters of a service into files, 0600, each replaced in one step.

    Args:
        directory: `Paths.supervisor`, which no service sees.

    Raises:
        SeccompError: libseccomp is missing or refuses.
        OSError: the directory cannot be written.
    """
    filters = Filters.at(directory, wanted.service)
    seccomp.export(wanted.filter(), filters.outer)
    seccomp.export(seccomp.inner(), filters.inner)
    return filters


def arguments(
    contract: Contract, paths: Paths, config: Path | None, options: Mapping[str, str] | None = None
) -> list[str]:
    """The command line of a service itself, which runs inside the wall.

    Args:
        options: further ``--name value`` pairs, which reach the service as
            `Context.options`, e.g. the number of a descriptor that holds a key.
    """
    words = [sys.executable, "-I", "-B", "-m", f"agent_box.{contract.service}"]
    words += ["--runtime", str(paths.runtime), "--state", str(paths.state)]
    if config is not None and contract.wall.config:
        words += ["--config", str(config)]
    words += ["--inner-filter", str(INNER_FD)]
    for name, value in (options or {}).items():
        words += [f"--{name}", value]
    return words


def bwrap_arguments(wanted: Profile) -> list[str]:
    """The wall as bubblewrap's options, complete but for the filter and the program."""
    words = ["--die-with-parent", "--as-pid-1", "--cap-drop", "ALL"]
    words += ["--unshare-user", "--unshare-pid", "--unshare-ipc", "--unshare-uts"]
    words += ["--unshare-cgroup-try", "--hostname", wanted.service]
    if not wanted.host_network:
        words.append("--unshare-net")
    words.append("--clearenv")
    for name, value in wanted.environment:
        words += ["--setenv", name, value]
    words += ["--proc", "/proc", "--remount-ro", "/proc"]
    words += ["--size", str(DEV_BYTES), "--tmpfs", "/dev"]
    for name in DEVICES:
        words += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    words += ["--remount-ro", "/dev", "--size", str(TMP_BYTES), "--tmpfs", "/tmp"]
    for mount in wanted.mounts:
        kind = ("--bind" if mount.writable else "--ro-bind") + ("-try" if mount.optional else "")
        words += [kind, str(mount.path), str(mount.path)]
    for path, target in wanted.links:
        words += ["--symlink", target, str(path)]
    return [*words, "--remount-ro", "/", "--chdir", "/"]


def command(wanted: Profile, argv: Sequence[str], filters: Filters) -> list[str]:
    """The command line that starts `argv` behind the wall.

    SIGTERM is ignored by bubblewrap, which would answer it by killing the service; sent to
    the process group it reaches the service, which drains and ends. Descriptors above
    `INNER_FD` that are inheritable reach the service too.

    Args:
        argv: `arguments`, as a rule.

    Raises:
        ConfineError: there is no bubblewrap.
    """
    bwrap = _bwrap()
    inner = [bwrap, *bwrap_arguments(wanted), "--seccomp", str(OUTER_FD), "--", *argv]
    script = (
        f"trap '' TERM; exec {shlex.join(inner)}"
        f" {OUTER_FD}<{shlex.quote(str(filters.outer))}"
        f" {INNER_FD}<{shlex.quote(str(filters.inner))}"
    )
    return [SHELL, "-c", script]


def probe(directory: Path) -> Gap | None:
    """Whether this host can confine a service, by confining a program for real.

    Args:
        directory: ours and writable; two small files are written to it and removed.

    Returns:
        None when it works, else what is missing and the way to mend it.

    Raises:
        OSError: `directory` cannot be written.
    """
    import subprocess  # 1 MB that no service needs

    try:
        bwrap = _bwrap()
    except ConfineError as error:
        return Gap("bwrap-missing", str(error))
    wanted = Profile(
        service="probe",
        mounts=(Mount(Path("/usr")), Mount(Path("/etc/ld.so.cache"), optional=True)),
        links=tuple(
            (Path("/") / name, os.readlink(Path("/") / name))
            for name in _SYSTEM_LINKS
            if (Path("/") / name).is_symlink()
        ),
        host_network=False,
        syscalls=(),
        limits=(),
        environment=(("PATH", "/usr/bin:/bin"),),
    )
    filters = Filters.at(directory, wanted.service)
    try:
        try:
            write_filters(wanted, directory)
        except seccomp.SeccompError as error:
            return Gap("libseccomp-missing", str(error))
        try:
            tried = subprocess.run(
                command(wanted, ["/usr/bin/true"], filters),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_PROBE_SECONDS,
                check=False,
                env={"LC_ALL": "C"},
            )
        except subprocess.TimeoutExpired:
            return Gap("confinement-failed", f"{bwrap} does not end")
    finally:
        filters.outer.unlink(missing_ok=True)
        filters.inner.unlink(missing_ok=True)
    if tried.returncode == 0:
        return None
    return _explain(tried.stderr.decode(errors="replace"))


def _explain(untrusted_stderr: str) -> Gap:
    said = next((line for line in untrusted_stderr.splitlines() if line.strip()), "it says nothing")
    said = "".join(c if c.isprintable() else "?" for c in said)[:200]
    if re.search(r"[Uu]nknown option", said):
        return Gap("bwrap-too-old", "bubblewrap 0.7 or newer is needed")
    if re.search(r"namespace|uid map|setting up|Operation not permitted|Permission denied", said):
        return Gap("userns-denied", f"{_userns_fix()} ({said})")
    return Gap("confinement-failed", said)


def _userns_fix() -> str:
    if _sysctl("kernel/apparmor_restrict_unprivileged_userns") == "1":
        return (
            "AppArmor forbids user namespaces: give /usr/bin/bwrap a profile with `userns,` "
            "(deploy/apparmor/bwrap), or sysctl kernel.apparmor_restrict_unprivileged_userns=0"
        )
    if _sysctl("kernel/unprivileged_userns_clone") == "0":
        return "user namespaces are switched off: sysctl kernel.unprivileged_userns_clone=1"
    if _sysctl("user/max_user_namespaces") == "0":
        return "user namespaces are switched off: sysctl user.max_user_namespaces=10000"
    return "the kernel, a container or a security module forbids user namespaces to this account"


def _sysctl(name: str) -> str:
    try:
        return Path("/proc/sys", name).read_text(encoding="ascii").strip()
    except OSError:
        return ""  # this kernel does not have it


def _bwrap() -> str:
    if not os.access(BWRAP, os.X_OK):
        raise ConfineError(f"{BWRAP} is missing: install the package bubblewrap")
    return BWRAP


def _code() -> tuple[list[Mount], list[tuple[Path, str]]]:
    """Where Python and our code lie, without what else lies beside them."""
    from importlib.util import find_spec

    found: list[Path] = []
    for prefix in dict.fromkeys((sys.base_prefix, sys.base_exec_prefix, sys.prefix)):
        found += [Path(prefix) / part for part in ("bin", "lib", "lib64", "pyvenv.cfg")]
    for package in ("agent_box", "agent_box.guest"):  # in a checkout they lie apart
        spec = find_spec(package)
        found += [Path(path) for path in (spec and spec.submodule_search_locations) or ()]
    step = Path(sys.executable)
    while step.is_symlink():  # from the venv to the interpreter it may go by other places
        step = Path(os.path.normpath(step.parent / os.readlink(step)))
        found.append(step)
    mounts: list[Path] = [Path("/usr")]
    links: list[tuple[Path, str]] = []
    for path in found:
        if any(path.is_relative_to(other) for other in mounts) or not path.exists():
            continue
        if path.is_symlink() and path.is_dir():
            links.append((path, os.readlink(path)))  # a venv's lib64
        else:
            mounts.append(path)
    return [Mount(path) for path in mounts[1:]], links


def _config_directory(config: Path, paths: Paths) -> Path:
    """The directory of the config file, unless mounting it would show more than config."""
    directory = config.parent
    if not config.is_absolute():
        raise ConfineError(f"not an absolute path: {config}")
    real = directory.resolve()
    home = Path(os.path.expanduser("~")).resolve()
    kept = f"services see the directory of the config file, so {config} cannot lie in"
    if real == Path("/") or home.is_relative_to(real):
        raise ConfineError(f"{kept} {directory}: give it a directory of its own")
    for private in (paths.runtime, paths.state):
        private = private.resolve()
        if private.is_relative_to(real) or real.is_relative_to(private):
            raise ConfineError(f"{kept} {directory}, next to {private}")
    if real.stat().st_mode & 0o022:
        raise ConfineError(f"{kept} {directory}, which others can write to")
    return directory


def _below_runtime(paths: Paths, names: tuple[str, ...]) -> list[Path]:
    found = []
    for name in names:
        parts = PurePosixPath(name).parts
        if not parts or not all(re.fullmatch(r"[a-z][a-z-]*", part) for part in parts):
            raise ConfineError(f"not a directory below the runtime directory: {name!r}")
        if parts[0] in _OURS_BELOW_RUNTIME:
            raise ConfineError(f"no contract can ask for {parts[0]} below the runtime directory")
        found.append(paths.runtime.joinpath(*parts))
    return found


def _refuse_exposure(mounts: list[Mount], paths: Paths) -> None:
    """No mount may be above the directories of another role, wherever Python is installed."""
    ours = [(private, private.resolve()) for private in (paths.runtime, paths.state)]
    for mount in mounts:
        shown = mount.path.resolve()
        for private, real in ours:
            if real.is_relative_to(shown):
                raise ConfineError(f"{private} lies in {mount.path}, which every service sees")


def _limits(wall: Wall) -> tuple[tuple[str, int], ...]:
    limits = {
        "RLIMIT_CORE": 0,
        "RLIMIT_DATA": wall.memory_mib << 20,
        "RLIMIT_FSIZE": FILE_BYTES,
        "RLIMIT_MSGQUEUE": 0,
        "RLIMIT_NOFILE": wall.open_files,
    }
    major, minor = (int(n) for n in re.findall(r"\d+", os.uname().release)[:2])
    if (major, minor) >= (5, 14):
        limits["RLIMIT_NPROC"] = THREADS  # before, it counted what the account runs elsewhere
    return tuple(limits.items())
