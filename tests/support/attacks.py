"""What a service that was taken over would try. Runs by itself: `python -I -B -c SOURCE`.

Arguments: a JSON object of facts about what there is to attack, and, to try it from behind a
wall, the name of a service whose contract builds that wall: its confinement is then closed by
the product's own code before the first attack.

Each attack either raises OSError (refused) or returns what it got. The result is one JSON
object on stdout: name of the attack to `[succeeded, what it saw]`.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

Facts = dict[str, Any]
ATTACKS: dict[str, Callable[[Facts], str]] = {}

libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long

NUMBERS = {
    # name: x86_64, aarch64
    "ptrace": (101, 117),
    "mount": (165, 40),
    "unshare": (272, 97),
    "setns": (308, 268),
    "clone": (56, 220),
    "bpf": (321, 280),
    "add_key": (248, 217),
    "keyctl": (250, 219),
    "io_uring_setup": (425, 425),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "personality": (135, 92),
    "memfd_create": (319, 279),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "seccomp": (317, 277),
    "setsid": (112, 157),
}
MACHINE = 0 if os.uname().machine == "x86_64" else 1
CANARY = b"canary-4b1d-in-memory"

NEWNS, NEWUSER, NEWNET, NEWPID = 0x20000, 0x10000000, 0x40000000, 0x20000000


def attack(function: Callable[[Facts], str]) -> Callable[[Facts], str]:
    ATTACKS[function.__name__] = function
    return function


def call(name: str, *arguments: Any) -> int:
    """A system call by name. Raises OSError."""
    words = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = libc.syscall(ctypes.c_long(NUMBERS[name][MACHINE]), *words)
    if result < 0:
        raise OSError(ctypes.get_errno(), name)
    return int(result)


def looked_at(name: str, *arguments: Any) -> str:
    """For calls that cannot succeed for an ordinary account even outside of a wall: it is
    enough that the kernel looked at the arguments instead of refusing the call."""
    try:
        return f"gave {call(name, *arguments)}"
    except OSError as error:
        if error.errno in (errno.EPERM, errno.ENOSYS, errno.EACCES):
            raise
        return f"looked at: {errno.errorcode[error.errno or 0]}"


def connect(path: str) -> str:
    with socket.socket(socket.AF_UNIX) as s:
        s.settimeout(5)
        s.connect(path)
    return f"connected to {path}"


def any_of(what: list[str], one: Callable[[str], str]) -> str:
    """Succeeds when one succeeds; otherwise raises the last refusal."""
    refusal = OSError(errno.ENOENT, "nothing to try")
    for item in what:
        try:
            return one(item)
        except OSError as error:
            refusal = error
    raise refusal


def read(path: str) -> str:
    with open(path, "rb") as file:
        return f"read {len(file.read(4096))} bytes of {path}"


# ---------------------------------------------------------------- files of others


@attack
def read_key_of_another(facts: Facts) -> str:
    return any_of(facts["keys"], read)


@attack
def list_keys(facts: Facts) -> str:
    names = set(os.listdir(facts["key_directory"])) - {"public", facts.get("service")}
    if not names:
        raise OSError(errno.ENOENT, "only its own are there")
    return f"saw {names}"


@attack
def read_data_of_another(facts: Facts) -> str:
    return any_of(facts["data"], read)


@attack
def read_logs(facts: Facts) -> str:
    return any_of(facts["logs"], read)


@attack
def read_daemon_lock(facts: Facts) -> str:
    return read(facts["lock"])


@attack
def read_supervisor_directory(facts: Facts) -> str:
    return f"saw {os.listdir(facts['supervisor'])}"


@attack
def read_home(facts: Facts) -> str:
    return read(facts["home_file"])


@attack
def read_accounts(_facts: Facts) -> str:
    return read("/etc/passwd")


@attack
def read_config(facts: Facts) -> str:
    return read(facts["config"])


@attack
def change_config(facts: Facts) -> str:
    with open(facts["config"], "ab"):
        return "opened for writing"


@attack
def change_public_keys(facts: Facts) -> str:
    with open(facts["public_key"], "ab"):
        return "opened for writing"


@attack
def write_beside(facts: Facts) -> str:
    """In directories of others. What it left there is looked for on the host, because parents
    of what is mounted may be there in name only."""

    def one(directory: str) -> str:
        (Path(directory) / facts["planted"]).touch()
        return directory

    made = []
    for directory in facts["beside"]:
        try:
            made.append(one(directory))
        except OSError:
            continue
    if not made:
        raise OSError(errno.EACCES, "nowhere")
    return "\n".join(made)


@attack
def write_to_the_system(facts: Facts) -> str:
    def one(directory: str) -> str:
        path = Path(directory) / facts["planted"]
        path.touch()
        path.unlink()
        return f"made a file in {directory}"

    return any_of(["/", "/dev", "/usr", "/etc", "/proc", *sys.path[-1:]], one)


@attack
def list_root(_facts: Facts) -> str:
    return f"saw {os.listdir('/')}"


@attack
def change_mode(facts: Facts) -> str:
    path = Path(facts["own_directory"]) / "mode"
    path.touch()
    os.chmod(path, 0o644)
    return "changed the mode"


@attack
def change_mode_of_descriptor(facts: Facts) -> str:
    with open(Path(facts["own_directory"]) / "fmode", "wb") as file:
        os.fchmod(file.fileno(), 0o644)
    return "changed the mode"


@attack
def change_owner(facts: Facts) -> str:
    path = Path(facts["own_directory"]) / "owner"
    path.touch()
    os.chown(path, os.getuid(), os.getgid())
    return "changed the owner, to the same"


@attack
def set_attribute(facts: Facts) -> str:
    path = Path(facts["own_directory"]) / "attribute"
    path.touch()
    try:
        os.setxattr(path, "user.a", b"b")
    except OSError as error:
        if error.errno != errno.ENOTSUP:
            raise
    return "the file system was asked"


@attack
def make_device(facts: Facts) -> str:
    path = Path(facts["own_directory"]) / "fifo"
    os.mknod(path, 0o010600)
    path.unlink()
    return "made a node"


# ---------------------------------------------------------------- processes of others


@attack
def see_another_process(facts: Facts) -> str:
    others = {int(n) for n in os.listdir("/proc") if n.isdecimal()} - {os.getpid()}
    if not others:
        raise OSError(errno.ESRCH, "alone")
    return f"saw {len(others)}"


@attack
def read_environment_of_another(facts: Facts) -> str:
    if b"CANARY" not in Path(f"/proc/{facts['victim']}/environ").read_bytes():
        raise OSError(errno.ENOENT, "not the victim's")
    return "read it"


@attack
def read_memory_of_another(facts: Facts) -> str:
    with open(f"/proc/{facts['victim']}/mem", "rb", buffering=0) as memory:
        memory.seek(facts["address"])
        return f"read {memory.read(len(CANARY))!r}"


@attack
def read_memory_of_another_by_call(facts: Facts) -> str:
    return _vm("process_vm_readv", facts)


@attack
def write_memory_of_another_by_call(facts: Facts) -> str:
    return _vm("process_vm_writev", facts)


def _vm(name: str, facts: Facts) -> str:
    class Vector(ctypes.Structure):
        _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))

    buffer = ctypes.create_string_buffer(CANARY, len(CANARY))
    here = Vector(ctypes.addressof(buffer), len(CANARY))
    there = Vector(facts["address"], len(CANARY))
    call(name, facts["victim"], ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
    return f"{name} {buffer.raw!r}"


@attack
def read_own_memory_by_call(facts: Facts) -> str:
    """The call itself is refused, not only the victim hidden."""
    here = ctypes.create_string_buffer(CANARY, len(CANARY))
    return _vm(
        "process_vm_readv", {**facts, "victim": os.getpid(), "address": ctypes.addressof(here)}
    )


@attack
def signal_another(facts: Facts) -> str:
    return any_of(facts["pids"], _signal)


def _signal(pid: str) -> str:
    os.kill(int(pid), 0)
    return f"{pid} may be signalled"


@attack
def signal_everybody(_facts: Facts) -> str:
    os.kill(-1, 0)
    return "somebody may be signalled"


@attack
def trace_another(facts: Facts) -> str:
    call("ptrace", 16, facts["victim"], None, None)  # PTRACE_ATTACH
    os.waitpid(facts["victim"], 0x40000000)
    call("ptrace", 17, facts["victim"], None, None)
    return "attached"


@attack
def be_traced(_facts: Facts) -> str:
    """PTRACE_TRACEME in a child, or here when there can be no child."""
    return in_child(lambda: looked_at("ptrace", 0, 0, None, None))


@attack
def open_pidfd(facts: Facts) -> str:
    os.close(call("pidfd_open", facts["victim"], 0))
    return "opened"


@attack
def open_own_pidfd(_facts: Facts) -> str:
    os.close(call("pidfd_open", os.getpid(), 0))
    return "opened"


@attack
def fork(_facts: Facts) -> str:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return "forked"


@attack
def fork_by_clone(_facts: Facts) -> str:
    child = call("clone", int(signal.SIGCHLD), None, None, None, 0)
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return "forked"


@attack
def execute(_facts: Facts) -> str:
    return in_child(lambda: os.execv("/usr/bin/true", ["true"]))  # type: ignore[func-returns-value]


@attack
def leave_the_process_group(_facts: Facts) -> str:
    return in_child(lambda: f"session {call('setsid')}")


def in_child(work: Callable[[], str]) -> str:
    """Where it cannot fork it does the work itself: it has nothing to lose then."""
    try:
        child = os.fork()
    except OSError:
        return work()
    if child == 0:
        try:
            work()
        except OSError as error:
            os._exit(error.errno or 255)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code > 0:
        raise OSError(code, "in the child")
    return "done in a child"


# ---------------------------------------------------------------- sockets of others


@attack
def connect_to_supervisord(facts: Facts) -> str:
    return connect(facts["supervisord_socket"])


@attack
def connect_to_dbus(facts: Facts) -> str:
    return connect(facts["dbus_socket"])


@attack
def connect_to_a_socket_not_granted(facts: Facts) -> str:
    return any_of(facts["sockets_not_granted"], connect)


@attack
def connect_to_abstract(facts: Facts) -> str:
    return connect("\0" + facts["abstract"])


@attack
def send_to_abstract(facts: Facts) -> str:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as s:
        s.sendto(b"x", "\0" + facts["abstract_datagram"])
    return "sent"


@attack
def dial_vsock(_facts: Facts) -> str:
    """Only makes the socket: whether anything answers does not matter."""
    socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).close()
    return "made a socket"


@attack
def open_packet_socket(_facts: Facts) -> str:
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0).close()
    return "made a socket"


@attack
def open_raw_socket(_facts: Facts) -> str:
    socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP).close()
    return "made a socket"


@attack
def open_raw_socket_v6(_facts: Facts) -> str:
    socket.socket(socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6).close()
    return "made a socket"


@attack
def open_netlink_socket(_facts: Facts) -> str:
    socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).close()
    return "made a socket"


@attack
def open_crypto_socket(_facts: Facts) -> str:
    socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET).close()
    return "made a socket"


@attack
def tcp_to_loopback(facts: Facts) -> str:
    with socket.create_connection(("127.0.0.1", facts["tcp"]), timeout=5):
        return "connected"


@attack
def tcp_to_loopback_v6(facts: Facts) -> str:
    with socket.create_connection(("::1", facts["tcp6"]), timeout=5):
        return "connected"


@attack
def udp_to_loopback(facts: Facts) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect(("127.0.0.1", facts["udp"]))
        s.send(b"x")
        return "sent"


@attack
def listen_on_tcp(_facts: Facts) -> str:
    with socket.socket(socket.AF_INET) as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        return "listening"


@attack
def see_interfaces(_facts: Facts) -> str:
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    names = {line.split(":")[0].strip() for line in lines} - {"lo"}
    if not names:
        raise OSError(errno.ENODEV, "only lo")
    return f"saw {names}"


# ---------------------------------------------------------------- the kernel


@attack
def make_user_namespace(_facts: Facts) -> str:
    return in_child(lambda: f"gave {call('unshare', NEWUSER)}")


@attack
def make_network_namespace(_facts: Facts) -> str:
    return in_child(lambda: f"gave {call('unshare', NEWNET)}")


@attack
def clone_into_namespace(_facts: Facts) -> str:
    child = call("clone", NEWUSER | NEWPID | int(signal.SIGCHLD), None, None, None, 0)
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return "cloned"


@attack
def enter_namespace(facts: Facts) -> str:
    descriptor = os.open("/proc/self/ns/uts", os.O_RDONLY)
    try:
        return looked_at("setns", descriptor, 0x1)  # not a kind of namespace: EINVAL
    finally:
        os.close(descriptor)


@attack
def mount(facts: Facts) -> str:
    target = facts["own_directory"].encode()
    call("mount", b"tmpfs", target, b"tmpfs", 0, None)
    libc.umount2(target, 2)
    return "mounted"


@attack
def load_bpf(_facts: Facts) -> str:
    return looked_at("bpf", 9999, None, 0)


@attack
def use_keyring(_facts: Facts) -> str:
    return looked_at("keyctl", 0, -2, 1)  # KEYCTL_GET_KEYRING_ID of the process keyring


@attack
def add_key(_facts: Facts) -> str:
    return looked_at("add_key", b"user", b"agent-box-test", b"x", 1, -1)


@attack
def set_up_io_uring(_facts: Facts) -> str:
    return looked_at("io_uring_setup", 1, None)


@attack
def set_up_userfaultfd(_facts: Facts) -> str:
    return looked_at("userfaultfd", 1)  # UFFD_USER_MODE_ONLY


@attack
def open_perf_event(_facts: Facts) -> str:
    return looked_at("perf_event_open", None, 0, -1, -1, 0)


@attack
def change_personality(_facts: Facts) -> str:
    return looked_at("personality", 0xFFFFFFFF)


@attack
def make_memory_file(_facts: Facts) -> str:
    return looked_at("memfd_create", b"x", 0)


@attack
def name_handle(_facts: Facts) -> str:
    return looked_at("name_to_handle_at", -100, b"/", None, None, 0)


@attack
def type_for_the_operator(_facts: Facts) -> str:
    """TIOCSTI; not on a terminal, where it would be EIO or ENOTTY: only whether it is asked."""
    return ioctl(0x5412)


@attack
def type_for_the_operator_with_high_bits(_facts: Facts) -> str:
    return ioctl(0x1_0000_5412)


@attack
def paste_for_the_operator(_facts: Facts) -> str:
    return ioctl(0x541C)  # TIOCLINUX


def ioctl(request: int) -> str:
    descriptor = os.open("/dev/null", os.O_RDWR)
    try:
        number = ctypes.c_long(16 if MACHINE == 0 else 29)
        buffer = ctypes.create_string_buffer(8)
        if libc.syscall(number, ctypes.c_long(descriptor), ctypes.c_long(request), buffer) < 0:
            code = ctypes.get_errno()
            if code in (errno.EPERM, errno.ENOSYS):
                raise OSError(code, "ioctl")
            return f"looked at: {errno.errorcode[code]}"
        return "gave 0"
    finally:
        os.close(descriptor)


@attack
def open_terminal(_facts: Facts) -> str:
    os.close(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))
    return "opened a terminal"


@attack
def become_dumpable(_facts: Facts) -> str:
    if libc.prctl(4, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    return "dumpable"


@attack
def outlive_the_supervisor(_facts: Facts) -> str:
    if libc.prctl(1, 0, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
    return "no death signal"


@attack
def raise_a_limit(_facts: Facts) -> str:
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
    except ValueError as error:  # what `resource` makes of EPERM
        raise OSError(errno.EPERM, str(error)) from error
    return "set a limit"


@attack
def raise_a_limit_of_another(facts: Facts) -> str:
    resource.prlimit(facts["victim"], resource.RLIMIT_NOFILE)
    return "read a limit of another"


@attack
def fill_memory(_facts: Facts) -> str:
    size = 4 << 30
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS):
        return f"mapped {size} bytes"


@attack
def change_the_filter(_facts: Facts) -> str:
    return looked_at("seccomp", 99, 0, None)


@attack
def use_an_inherited_descriptor(_facts: Facts) -> str:
    """Standard streams apart there is none, and nothing that it could have from a parent."""
    found = {int(n) for n in os.listdir("/proc/self/fd")} - {0, 1, 2}
    open_ = sorted(n for n in found if os.path.exists(f"/proc/self/fd/{n}"))
    if not open_:
        raise OSError(errno.EBADF, "none")
    return f"has {open_}"


@attack
def read_the_environment(_facts: Facts) -> str:
    known = {"HOME", "LANG", "MALLOC_ARENA_MAX", "PATH", "PWD", "TZ"}
    if not set(os.environ) - known:
        raise OSError(errno.ENOENT, "built from nothing")
    return f"saw {sorted(set(os.environ) - known)}"


def main() -> None:
    facts: Facts = json.loads(sys.argv[1])
    if len(sys.argv) > 2:
        from agent_box.process import confine, inside
        from agent_box.process.paths import Paths

        facts["service"] = sys.argv[2]
        contract = import_module(f"agent_box.{sys.argv[2]}.contract").CONTRACT
        paths = Paths(Path(facts["runtime"]), Path(facts["state"]))
        inside.enter(confine.profile(contract, paths, Path(facts["config"])), confine.INNER_FD)
    os.makedirs(facts["own_directory"], exist_ok=True)
    wanted = facts.get("only") or list(ATTACKS)
    results: dict[str, tuple[bool, str]] = {}
    for name in wanted:
        try:
            results[name] = (True, ATTACKS[name](facts))
        except MemoryError:
            results[name] = (False, "MemoryError")
        except OSError as error:
            results[name] = (False, f"{errno.errorcode.get(error.errno or 0)}: {error}")
    granted = {path: _granted(path) for path in facts["sockets_granted"]}
    print(json.dumps({"attacks": results, "granted": granted}))


def _granted(path: str) -> str | None:
    try:
        connect(path)
    except OSError as error:
        return str(error)
    return None


if __name__ == "__main__":
    main()
