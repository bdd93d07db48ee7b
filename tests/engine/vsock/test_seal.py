"""The filter: what it lets through, by the kernel's own judgement and by its text."""

from __future__ import annotations

import struct
import subprocess
import sys

import pytest

from agent_box.engine.vsock import seal

TRY = """
import errno, os, socket, sys
from agent_box.engine.vsock import seal
import ctypes, mmap, signal, threading, fcntl
a, b = socket.socketpair()
libc = ctypes.CDLL(None, use_errno=True)
fd = os.memfd_create("x")
seal.seal()
def refused(what):
    try:
        what()
    except (OSError, RuntimeError) as error:
        return getattr(error, "errno", errno.EAGAIN) in (errno.EPERM, errno.EAGAIN)
    return False
checks = {
    "open": lambda: open("/etc/passwd"),
    "create": lambda: open("/tmp/made", "w"),
    "socket": lambda: socket.socket(socket.AF_UNIX),
    "vsock": lambda: socket.socket(socket.AF_VSOCK),
    "pair": socket.socketpair,
    "connect": lambda: a.connect("/tmp/x"),
    "fork": os.fork,
    "execute": lambda: os.execv("/bin/true", ["true"]),
    "thread": lambda: threading.Thread(target=print).start(),
    "kill": lambda: os.kill(1, 0),
    "unlink": lambda: os.unlink("/tmp/x"),
    "chmod": lambda: os.fchmod(fd, 0o777),
    "memfd": lambda: os.memfd_create("y"),
    "executable memory": lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC),
    "terminal": lambda: fcntl.ioctl(0, 0x5412, b"x"),
    "trace": lambda: [1 for _ in [0] if libc.ptrace(0, 0, 0, 0) == 0] or fail(),
}
def fail():
    raise OSError(ctypes.get_errno(), "ptrace")
wrong = [name for name, what in checks.items() if not refused(what)]
a.sendall(b"x"); assert b.recv(1) == b"x"  # what the loop needs still works
a.setblocking(False)
print(",".join(wrong) or "all refused")
"""


def test_what_is_refused_and_what_is_not() -> None:
    ran = subprocess.run(
        [sys.executable, "-B", "-c", TRY], capture_output=True, text=True, timeout=60
    )
    assert (ran.stdout, ran.returncode) == ("all refused\n", 0), ran


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_jumps_stay_inside_and_every_way_ends(machine: str) -> None:
    code = seal.program(machine)
    steps = [struct.unpack_from("=HBBI", code, at) for at in range(0, len(code), 8)]
    assert len(steps) <= 4096
    for at, (op, yes, no, _) in enumerate(steps):
        if op in (0x15, 0x35, 0x45):
            assert at + 1 + max(yes, no) < len(steps)
    assert steps[-1] == (0x06, 0, 0, 0x00050001)


def verdict(code: bytes, number: int, arguments: tuple[int, ...], audit: int) -> int:
    """Runs the filter as the kernel would."""
    data = struct.pack("=IIQ6Q", number, audit, 0, *arguments, *[0] * (6 - len(arguments)))
    at = value = 0
    while True:
        op, yes, no, k = struct.unpack_from("=HBBI", code, 8 * at)
        at += 1
        if op == 0x06:
            return int(k)
        if op == 0x20:
            value = struct.unpack_from("=I", data, k)[0]
        elif op == 0x15:
            at += yes if value == k else no
        elif op == 0x35:
            at += yes if value >= k else no
        else:
            assert op == 0x45
            at += yes if value & k else no


ALLOW, EPERM, KILL = 0x7FFF0000, 0x00050001, 0x80000000


@pytest.mark.parametrize(
    ("machine", "audit", "read", "mmap", "ioctl", "openat", "clone"),
    [("x86_64", 0xC000003E, 0, 9, 16, 257, 56), ("aarch64", 0xC00000B7, 63, 222, 29, 56, 220)],
)
def test_verdicts(
    machine: str, audit: int, read: int, mmap: int, ioctl: int, openat: int, clone: int
) -> None:
    code = seal.program(machine)
    assert verdict(code, read, (), audit) == ALLOW
    assert verdict(code, openat, (), audit) == EPERM
    assert verdict(code, clone, (), audit) == EPERM
    assert verdict(code, mmap, (0, 4096, 3), audit) == ALLOW
    assert verdict(code, mmap, (0, 4096, 7), audit) == EPERM
    assert verdict(code, ioctl, (0, 0x5421), audit) == ALLOW
    assert verdict(code, ioctl, (0, 0x5412), audit) == EPERM
    assert verdict(code, read, (), 0x40000003) == KILL
    assert verdict(code, read | 0x40000000, (), audit) == KILL


def test_a_machine_that_we_do_not_know() -> None:
    with pytest.raises(seal.SealError):
        seal.program("pdp11")


def test_too_few_descriptors_are_told() -> None:
    run = (
        "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (60, 60));"
        "from agent_box.engine.vsock import seal\n"
        "try: seal.limit_descriptors()\n"
        "except seal.SealError as error: print(error)"
    )
    ran = subprocess.run([sys.executable, "-B", "-c", run], capture_output=True, text=True)
    assert ran.stdout == "only 60 descriptors may be open\n"
