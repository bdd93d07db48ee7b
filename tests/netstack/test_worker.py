"""The real worker, in the jail in which a machine's shim starts it."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.workers import policy

from agent_box.helper import jail, link, procs
from agent_box.netstack import control

WAIT_S = 30.0  # a bound on a hang


class Jailed:
    def __init__(self, root: Path) -> None:
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
        self.outer = procs.spawn(jail.command(wanted, argv), (*given, ready_end))
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

    def next(self) -> Any:
        while not self._got:
            data = self.sock.recv(65536)
            assert data, "the worker ended the connection"
            self._got += self._reader.feed(data)
        return self._got.pop(0)


@pytest.fixture
def jailed(tmp_path: Path) -> Iterator[Jailed]:
    made = Jailed(tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_it_serves_in_its_jail_and_keeps_what_it_was_told(jailed: Jailed) -> None:
    assert select.select([jailed.ready], [], [], WAIT_S)[0]
    assert os.read(jailed.ready, 100) == b"READY\n"
    talk = jailed.dial()
    hello = talk.next()
    assert (hello.version, hello.instance, hello.restarts) == (control.VERSION, "ab" * 16, 2)
    assert (hello.boot, hello.policy, hello.linked, hello.forwards) == (None, None, False, [])
    assert isinstance(talk.ask(control.Count(n=1)), control.Refused)
    done = talk.ask(control.Up(n=2, boot=1, name="web", policy=policy()))
    assert (done.n, done.applied.generation) == (2, 1)
    assert talk.ask(control.Count(n=3)).counters.flows == 0
    talk.sock.close()
    talk = jailed.dial()
    again = talk.next()
    assert (again.boot, again.name, again.policy) == (1, "web", policy())
    assert again.epoch == hello.epoch
    talk.sock.close()


def test_it_has_no_new_privileges_and_no_capability(jailed: Jailed) -> None:
    assert os.read(jailed.ready, 100) == b"READY\n"
    status = Path(f"/proc/{jailed.pid}/status").read_text()
    facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert (facts["NoNewPrivs"], facts["Seccomp"]) == ("1", "2")
    assert {int(facts[cap], 16) for cap in ("CapEff", "CapPrm", "CapBnd", "CapAmb")} == {0}


def test_it_goes_on_when_the_shim_that_started_it_is_gone(jailed: Jailed) -> None:
    os.close(jailed.ready)
    jailed.ready = -1
    talk = jailed.dial()
    assert talk.next().version == control.VERSION
    assert talk.ask(control.Up(n=1, boot=1, name="web", policy=policy())).n == 1
    talk.sock.close()
