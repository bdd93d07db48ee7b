"""What a sealed worker can do no more, and what it still can, by the kernel's own judgement."""

from __future__ import annotations

import struct
import subprocess
import sys

import pytest

from agent_box.netstack import seal
from agent_box.process import allowed

TRY = """
import errno, os, select, socket, sys, threading, mmap, fcntl, signal
import encodings.idna
from agent_box.netstack import routes, seal
made = os.memfd_create("x")
listener = socket.create_server(("127.0.0.1", 0))
bound = socket.socket(); bound.bind(("127.0.0.1", 0))
seal.seal()
def refused(what):
    try:
        what()
    except (OSError, RuntimeError) as error:
        return getattr(error, "errno", errno.EAGAIN) in (errno.EPERM, errno.EAGAIN)
    return False
checks = {
    "write": lambda: open("/dev/null", "w"),
    "create": lambda: os.open("/tmp/made", os.O_RDONLY | os.O_CREAT),
    "fork": os.fork,
    "execute": lambda: os.execv("/bin/true", ["true"]),
    "thread": lambda: threading.Thread(target=print).start(),
    "signal": lambda: os.kill(1, 0),
    "listen": bound.listen,
    "unlink": lambda: os.unlink("/tmp/x"),
    "chmod": lambda: os.fchmod(made, 0o777),
    "memfd": lambda: os.memfd_create("y"),
    "directory": lambda: os.mkdir("/tmp/made"),
    "executable memory": lambda: mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC),
    "terminal": lambda: fcntl.ioctl(0, 0x5412, b"x"),
}
wrong = [name for name, what in checks.items() if not refused(what)]
client = socket.socket(); client.setblocking(False)
client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
assert client.connect_ex(listener.getsockname()) in (0, errno.EINPROGRESS)
server, _ = listener.accept()
poll = select.epoll(); poll.register(server, select.EPOLLIN)
poll.poll(0)
client.sendmsg([b"x"]); poll.poll(10)
assert server.recvmsg_into([bytearray(1), bytearray(1)])[0] == 1
assert server.getpeername() == client.getsockname()
assert open("/etc/hosts").read() is not None and os.listdir("/etc")
assert os.stat("/etc/hosts").st_size >= 0
socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", 9))
socket.socket(socket.AF_UNIX).connect_ex("/nowhere")
from pathlib import Path; assert routes.delivered()
print(",".join(wrong) or "all refused")
"""


def test_what_is_refused_and_what_is_not() -> None:
    ran = subprocess.run(
        [sys.executable, "-B", "-c", TRY], capture_output=True, text=True, timeout=60
    )
    assert (ran.stdout, ran.returncode) == ("all refused\n", 0), ran


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_every_call_of_the_list_is_known_and_every_way_ends(machine: str) -> None:
    code = allowed.program(machine, seal._CALLS, seal._CHECKS)
    steps = [struct.unpack_from("=HBBI", code, at) for at in range(0, len(code), 8)]
    for at, (op, yes, no, _) in enumerate(steps):
        if op in (0x15, 0x35, 0x45):
            assert at + 1 + max(yes, no) < len(steps)
    assert steps[-1] == (0x06, 0, 0, 0x00050001)
    assert len(seal._CALLS) == len(set(seal._CALLS))


def test_a_machine_that_we_do_not_know() -> None:
    with pytest.raises(allowed.NoFilter):
        allowed.program("pdp11", seal._CALLS, seal._CHECKS)
