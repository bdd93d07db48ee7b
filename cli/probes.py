"""The probes of `doctor` that ask this host: each does the real thing and looks what came.

That a file is there proves nothing; a probe opens it, runs it, loads it. Nothing stays
behind, and nothing is changed that another process could notice. A probe that fails is a
line with a name, never an exception: the report is made on every host.

Each probe gives the lines it is about. The names of gaps and notes are those of `gaps`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent_box.cli.gaps import GAPS, NOTES
from agent_box.process.paths import told

PATIENCE_S: Final = 20  # for a program that is run; a busy emulated host is slow
KVM_GET_API_VERSION: Final = 0xAE00  # linux/kvm.h: _IO(KVMIO, 0x00)
FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE = 0x01, 0x02  # linux/falloc.h
VALIDATED: Final = ("5.10", "6.1", "6.18")  # kernels that Firecracker 1.17 validates
QEMU: Final = "qemu-system-x86_64"
VSOCK: Final = "vhost-user-vsock-device"


@dataclass(frozen=True)
class Line:
    """One fact of the report.

    Attributes:
        key: what it is about.
        value: the fact.
        status: ``ok``, ``gap`` (something will be refused) or ``note``.
        name: of the gap or note; None with ``ok``.
        evidence: the operation that produced it.
    """

    key: str
    value: str
    status: str
    name: str | None
    evidence: str


def ok(key: str, value: str, evidence: str) -> Line:
    return Line(key, value, "ok", None, evidence)


def gap(key: str, value: str, name: str, evidence: str) -> Line:
    """Raises KeyError: no such gap is declared."""
    GAPS[name]
    return Line(key, value, "gap", name, evidence)


def note(key: str, value: str, name: str, evidence: str) -> Line:
    """Raises KeyError: no such note is declared."""
    NOTES[name]
    return Line(key, value, "note", name, evidence)


def run(command: Sequence[str], *, feed: str = "") -> tuple[int, str]:
    """Runs a program with little environment: its exit status and all that it said.

    A program that is missing or does not end in time is -1 with the reason.
    """
    try:
        done = subprocess.run(
            command,
            input=feed,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=PATIENCE_S,
            env={"PATH": os.environ.get("PATH", ""), "LANG": "C.UTF-8"},
            cwd="/",
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired:
        return -1, f"{command[0]} did not end within {PATIENCE_S} s"
    except OSError as error:
        return -1, f"{command[0]}: {error.strerror}"
    return done.returncode, done.stdout


def last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip()[:200] if lines else "no word"


# --------------------------------------------------------------------------- host


def account() -> Iterator[Line]:
    uid = os.geteuid()
    if uid == 0:
        yield gap(
            "account",
            "root; nothing that serves runs as root: use an ordinary account",
            "account-root",
            "geteuid",
        )
    else:
        yield ok("account", f"uid {uid}", "geteuid")


def host() -> Iterator[Line]:
    found = os.uname()
    page = os.sysconf("SC_PAGE_SIZE")
    value = f"{found.sysname} {found.release}, {found.machine}, page size {page // 1024}K"
    if page != 4096:
        yield gap("host", value, "page-size-unsupported", "uname, sysconf")
    else:
        yield ok("host", value, "uname, sysconf")


def host_kernel() -> Iterator[Line]:
    """Only with Firecracker: QEMU names no set of kernels."""
    release = os.uname().release
    if any(release == v or release.startswith((v + ".", v + "-")) for v in VALIDATED):
        yield ok("host-kernel", f"{release} is in the Firecracker validated set", "uname")
    else:
        value = f"{release} is outside the Firecracker validated set ({', '.join(VALIDATED)})"
        yield note("host-kernel", value, "host-kernel-unvalidated", "uname")


def virtualization(*, needed: bool) -> Iterator[Line]:
    """Whether KVM answers us. It is a gap only where the configured engine needs it."""
    evidence = "open /dev/kvm, KVM_GET_API_VERSION"
    try:
        descriptor = os.open("/dev/kvm", os.O_RDWR | os.O_CLOEXEC)
        try:
            version = fcntl.ioctl(descriptor, KVM_GET_API_VERSION)
        finally:
            os.close(descriptor)
    except OSError as error:
        value = f"/dev/kvm: {error.strerror}"
        if needed:
            yield gap("virtualization", value, "no-kvm", evidence)
        else:
            yield ok("virtualization", f"{value}; the configured engine needs no KVM", evidence)
        return
    value = f"opened /dev/kvm, KVM_GET_API_VERSION answered {version}"
    if _in_a_virtual_machine():
        yield note("virtualization", f"{value}, in a VM", "nested-virtualization", evidence)
    else:
        yield ok("virtualization", value, evidence)


def _in_a_virtual_machine() -> bool:
    """Whether the processor says so (x86 only: the flag `hypervisor`)."""
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as info:
            return any(line.startswith("flags") and "hypervisor" in line.split() for line in info)
    except OSError:
        return False


def qemu(accel: str | None) -> Iterator[Line]:
    """Runs QEMU: its version, its devices, then the machine that we use.

    Args:
        accel: kvm or tcg as configured; None while setup has not chosen.
    """
    program = shutil.which(QEMU)
    if program is None:
        yield gap("engine", f"{QEMU} is not on PATH", "engine-missing", "search on PATH")
        return
    code, said = run([program, "--version"])
    if code != 0:
        yield gap("engine", f"{program}: {last_line(said)}", "engine-missing", "qemu --version")
        return
    version = said.partition("\n")[0].removeprefix("QEMU emulator version ").strip()
    code, said = run([program, "-device", f"{VSOCK},help"])
    if code != 0 or f"{VSOCK} options:" not in said:
        value = f"qemu {version} has no {VSOCK}: {last_line(said)}"
        yield gap("engine", value, "engine-missing", "qemu -device help")
        return
    yield ok("engine", f"qemu {version}, {VSOCK}", "qemu --version, qemu -device help")
    yield from _accel(program, accel)


def _accel(program: str, accel: str | None) -> Iterator[Line]:
    """Starts the machine, stopped and without memory to speak of, and lets it go again."""
    if accel is None:
        value = "not chosen: `agent-box setup` tries them, or set [engine] accel to kvm or tcg"
        yield gap("accel", value, "engine-accel", "read the config and what setup found")
        return
    machine = f"microvm,accel={accel}"
    evidence = f"qemu -machine {machine} -S, then quit over QMP"
    code, said = run(
        [
            *(program, "-machine", machine, "-cpu", "host" if accel == "kvm" else "max"),
            *("-nodefaults", "-no-user-config", "-display", "none", "-S", "-m", "64M"),
            *("-qmp", "stdio"),
        ],
        feed='{"execute":"qmp_capabilities"}\n{"execute":"quit"}\n',
    )
    if code != 0:
        yield gap("accel", f"{accel}: {last_line(said)}", "engine-accel", evidence)
    else:
        yield ok("accel", f"{accel}; the machine microvm starts", evidence)


def firecracker() -> Iterator[Line]:
    yield gap(
        "engine",
        "firecracker: this version of agent-box cannot drive it yet",
        "engine-missing",
        "this program",
    )


def helper(mode: str, path: Path) -> Iterator[Line]:
    """Whether anybody listens where the helper would, while no daemon runs whose engine could
    ask it. In user mode the daemon starts the helper, so without one its absence is no gap."""
    evidence = f"connect to {path}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as tried:
        tried.settimeout(PATIENCE_S)
        try:
            tried.connect(str(path))
        except PermissionError as error:
            value = f"{mode} mode; {path}: {error.strerror}"
            yield gap("helper", value, "helper-refused", evidence)
        except OSError as error:
            if mode == "user":
                value = "user mode; not running, because the daemon is not: it starts the helper"
                yield ok("helper", value, evidence)
            else:
                value = f"{mode} mode; {path}: {error.strerror or error}"
                yield gap("helper", value, "helper-missing", evidence)
        else:
            yield ok("helper", f"{mode} mode; {path} is listened on", evidence)


# ------------------------------------------------------------------------- the walls

_LOAD_FILTER: Final = """
import errno, os, sys
from agent_box.process import linux, seccomp
program = seccomp.program(seccomp.inner())
linux.prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
linux.add_seccomp_filter(program)
try:
    os.execv("/usr/bin/true", ["true"])
except OSError as error:
    sys.exit("held" if error.errno == errno.EPERM else str(error))
"""


def jail() -> Iterator[Line]:
    """Confines a program as services are confined, and lets it run."""
    from agent_box.process import confine

    evidence = "a program confined by bubblewrap with a service's filter"
    try:
        with tempfile.TemporaryDirectory(prefix="agent-box-doctor-") as directory:
            found = confine.probe(Path(directory))
    except OSError as error:
        yield gap("jail", f"cannot be tried: {told(error)}", "confinement-failed", evidence)
        return
    if found is not None:
        yield gap("jail", found.fix, found.name, evidence)
    else:
        value = "bubblewrap: user, mount, PID, IPC, UTS and network namespaces, seccomp"
        yield ok("jail", value, evidence)


def seccomp() -> Iterator[Line]:
    """Loads the filter of a service in a child and sees it bite."""
    evidence = "a filter of libseccomp, loaded in a child, refused execve"
    _, said = run([sys.executable, "-I", "-c", _LOAD_FILTER])
    if said.strip() == "held":
        yield ok("seccomp", "libseccomp makes filters, the kernel holds to them", evidence)
    else:
        yield gap("seccomp", last_line(said), "libseccomp-missing", evidence)


def landlock() -> Iterator[Line]:
    """The second wall; services do without where the kernel has none."""
    from agent_box.process import landlock as wall
    from agent_box.process import linux

    evidence = "landlock_create_ruleset(LANDLOCK_CREATE_RULESET_VERSION)"
    abi = linux.landlock_abi()
    reach = "broker and netstack can reach abstract sockets of this host"
    if abi >= wall.SCOPE_ABI:
        yield ok("landlock", f"ABI {abi}", evidence)
    elif abi:
        value = f"ABI {abi}, without the scopes of {wall.SCOPE_ABI}: {reach}"
        yield note("landlock", value, "landlock-old", evidence)
    else:
        value = f"not in this kernel: services have one wall less, and {reach}"
        yield note("landlock", value, "landlock-missing", evidence)


def cgroup(*, needed: bool) -> Iterator[Line]:
    """Whether we may divide our own cgroup. Only the system helper limits by cgroup."""
    evidence = "mkdir in our own cgroup"
    try:
        entries = Path("/proc/self/cgroup").read_text().splitlines()
        (unified,) = (e.removeprefix("0::") for e in entries if e.startswith("0::"))
        own = Path("/sys/fs/cgroup") / unified.lstrip("/")
        controllers = (own / "cgroup.controllers").read_text().split()
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "not mounted"
        value = f"no cgroup v2 ({why})"
        if needed:
            yield gap("cgroup", value, "cgroup-delegation-missing", "read /proc/self/cgroup")
        else:
            yield ok("cgroup", f"{value}; not used in user mode", "read /proc/self/cgroup")
        return
    try:
        child = tempfile.mkdtemp(prefix="agent-box-doctor-", dir=own)
        os.rmdir(child)
        delegated = f"delegated {unified}"
    except OSError as error:
        delegated = f"not delegated ({error.strerror})"
    value = f"v2, {delegated}, controllers {' '.join(controllers) or 'none'}"
    if not needed:
        yield ok("cgroup", f"{value}; not used in user mode", evidence)
    elif not delegated.startswith("delegated"):
        yield gap("cgroup", value, "cgroup-delegation-missing", evidence)
    elif "memory" not in controllers:
        yield gap("cgroup", value, "memory-max-missing", evidence)
    elif "io" not in controllers:
        yield note("cgroup", value, "io-max-missing", evidence)
    else:
        yield ok("cgroup", value, evidence)


def thp() -> Iterator[Line]:
    file = "/sys/kernel/mm/transparent_hugepage/enabled"
    try:
        modes = Path(file).read_text()
        value = modes[modes.index("[") + 1 : modes.index("]")]
    except (OSError, ValueError):
        value = "not in this kernel"
    yield ok("thp", value, f"read {file}")


# -------------------------------------------------------------------------- the disk


def disk(state: Path) -> Iterator[Line]:
    """Each file system that holds what is large: that of the state directory, and those of
    instances and images where they are others."""
    seen = set()
    for key, where in (
        ("disk", state),
        ("disk-instances", state / "instances"),
        ("disk-images", state / "images"),
    ):
        while not os.path.lexists(where) and where != where.parent:
            where = where.parent
        try:
            device = where.stat().st_dev
        except OSError as error:
            yield gap(key, told(error), "state-unwritable", f"stat {where}")
            continue
        if device not in seen:
            seen.add(device)
            yield _disk(key, where)


def _disk(key: str, where: Path) -> Line:
    """Punches a hole into a file, as data disks need it, and counts what came free."""
    evidence = f"write, punch and measure an unnamed file in {where}"
    try:
        with tempfile.TemporaryFile(dir=where) as file:
            data = os.urandom(1 << 20)  # nothing that a file system could leave out by itself
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            full = os.fstat(file.fileno()).st_blocks * 512
            failure = _punch(file.fileno(), 0, len(data))
            os.fsync(file.fileno())
            left = os.fstat(file.fileno()).st_blocks * 512
        free = os.statvfs(where)
    except OSError as error:
        return gap(key, f"{where}: {error.strerror}", "state-unwritable", evidence)
    room = f"{free.f_bavail * free.f_frsize >> 30} GiB free at {where}"
    if failure or left >= full:
        value = f"{room}, no hole punching: {failure or 'nothing came free'}"
        return note(key, value, "discard-unsupported", evidence)
    return ok(key, f"{room}, sparse files, hole punching works", evidence)


def _punch(descriptor: int, offset: int, length: int) -> str | None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE
    while libc.fallocate(descriptor, mode, offset, length) != 0:
        code = ctypes.get_errno()
        if code != errno.EINTR:
            return os.strerror(code)
    return None


def swap() -> Iterator[Line]:
    """Guest memory that is swapped out lies on the host's disk in the clear."""
    try:
        areas = [line.split()[0] for line in Path("/proc/swaps").read_text().splitlines()[1:]]
    except OSError as error:
        yield ok("swap", f"unknown: {error.strerror}", "read /proc/swaps")
        return
    if areas:
        value = f"on ({', '.join(areas)}): guest memory may reach the disk"
        yield note("swap", value, "host-swap", "read /proc/swaps")
    else:
        yield ok("swap", "none", "read /proc/swaps")


def triple() -> str:
    libc, _ = platform.libc_ver()
    return f"{platform.machine()}-linux-{'gnu' if libc == 'glibc' else libc or 'unknown'}"
