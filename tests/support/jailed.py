"""The real worker in the jail in which a machine's shim starts it, and its control connection."""

from __future__ import annotations

import json
import os
import signal
import socket
from pathlib import Path
from typing import Any, Final

from agent_box.helper import jail, link, procs
from agent_box.netstack import control, rights

WAIT_S = 30.0  # a bound on a hang
_UP: Final = '/usr/sbin/ip link set lo up && exec "$@"'
ALONE: Final = ("/usr/bin/unshare", "--map-root-user", "--net", "/bin/sh", "-c", _UP, "sh")


class Jailed:
    """A worker under `root`; `alone`: in a network namespace that has a loopback address only."""

    def __init__(self, root: Path, *, alone: bool = False) -> None:
        for name in ("broker", "host", "room"):
            (root / name).mkdir()
        for name in ("hosts", "nsswitch.conf", "resolv.conf"):
            (root / "host" / name).touch()
        self.room = root / "room"
        room = os.open(self.room, os.O_RDONLY | os.O_CLOEXEC)
        self.listener = link.listen(room, "ctl", socket.SOCK_STREAM, 16)
        os.close(room)
        wanted = jail.worker("ab" * 16, str(root / "broker"), str(root / "host"))
        filter_fd = os.memfd_create("filter", os.MFD_CLOEXEC)
        os.write(filter_fd, wanted.filter())
        os.lseek(filter_fd, 0, os.SEEK_SET)
        status, status_end = jail.status_pipe()
        gate_end, gate = os.pipe()
        self.ready, ready_end = os.pipe()
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        argv = jail.python(
            "agent_box.netstack.worker",
            *("--ctl-fd", str(jail.FIRST_FD), "--ready-fd", str(jail.FIRST_FD + 1)),
            *("--instance", "ab" * 16, "--restarts", "2"),
        )
        given = (null, null, null, filter_fd, status_end, gate_end, self.listener.fileno())
        prefix = ALONE if alone else ()
        command = [*prefix, *jail.command(wanted, argv)]
        self.outer = procs.spawn(command, (*given, ready_end))
        os.write(gate, jail.GO)
        said = b""
        while b"}" not in said:  # it comes in pieces
            said += os.read(status, 4096)
        self.pid = int(json.loads(said.split(b"\n")[0])["child-pid"])
        link.close((filter_fd, status, status_end, gate_end, gate, ready_end, null))

    def dial(self) -> Talk:
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(WAIT_S)
        sock.connect(str(self.room / "ctl"))
        return Talk(sock)

    def close(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.outer, 0)
        if self.ready >= 0:
            os.close(self.ready)
        self.listener.close()


class Talk:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._reader = control.Reader(worker=False)
        self._got: list[Any] = []

    def ask(self, message: control.ToWorker) -> Any:
        self.sock.sendall(control.frame(message))
        return self.next()

    def give(self, message: control.ToWorker, fd: int) -> Any:
        """As `ask`, with a descriptor."""
        rights.send(self.sock, memoryview(control.frame(message)), fd)
        return self.next()

    def next(self) -> Any:
        while not self._got:
            data = self.sock.recv(65536)
            assert data, "the worker ended the connection"
            self._got += self._reader.feed(data)
        return self._got.pop(0)
