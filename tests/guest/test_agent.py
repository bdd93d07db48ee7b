"""The agent process: its streams, what it writes and where, and how it ends."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_box.channel.control import Session, refused
from agent_box.guest import agent, disk, system
from agent_box.guest.agent import Agent
from agent_box.guest.disk import Disk
from agent_box.guest.ports import Inherited
from agent_box.guest.wire import CONTROL_PORT, HOST_CID

PROVISION: dict[str, Any] = {
    "boot": 4,
    "hostname": "work",
    "environment": [],
    "files": [],
    "harness": None,
    "hook": None,
    "sudo": False,
    "time_ns": 10,
    "at_ns": 20,
}


class Listener:
    """A vsock listener made of socket pairs; the peer's address is what the test says."""

    def __init__(self) -> None:
        self._ready, self._knock = socket.socketpair()
        self._waiting: list[tuple[socket.socket, int]] = []

    def fileno(self) -> int:
        return self._ready.fileno()

    def dial(self, cid: int = HOST_CID) -> socket.socket:
        ours, theirs = socket.socketpair()
        self._waiting.append((theirs, cid))
        self._knock.send(b".")
        ours.settimeout(10)
        return ours

    def accept(self) -> tuple[socket.socket, tuple[int, int]]:
        self._ready.recv(1)
        sock, cid = self._waiting.pop(0)
        return sock, (cid, 1)

    def close(self) -> None:
        self._ready.close()
        self._knock.close()


class Guest:
    """An agent in a thread of this process, without root: what needs it is replaced."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.state = Disk("ok", 5, "")
        self.clock: list[int] = []
        self.names: list[str] = []
        self.work: list[tuple[int, Any]] = []
        self.off = threading.Event()
        self.listeners = {CONTROL_PORT: Listener(), 5005: Listener()}
        monkeypatch.setattr(disk, "prepare", lambda: self.state)
        monkeypatch.setattr(agent, "KEPT", str(tmp_path / "provision.json"))
        monkeypatch.setattr(system, "set_clock", lambda ns: self.clock.append(ns) or 1)
        monkeypatch.setattr(system, "log", lambda _: None)
        monkeypatch.setattr(system, "trim", lambda _: 7)
        monkeypatch.setattr(agent.socket, "sethostname", self.names.append)
        monkeypatch.setattr(agent, "in_root", lambda work, *, uid: self.work.append((uid, work)))
        monkeypatch.setattr(agent, "power_off", self.off.set)
        self.thread: threading.Thread | None = None

    def start(self) -> Guest:
        made = Agent(Inherited(self.listeners, None))  # type: ignore[arg-type]
        self.thread = threading.Thread(target=made.run, daemon=True)
        self.thread.start()
        return self

    def host(self, port: int = CONTROL_PORT) -> Host:
        return Host(self.listeners[port].dial())

    def close(self) -> None:
        if self.thread is not None:
            if not self.off.is_set():
                with self.host() as host:
                    host.ask("poweroff", {})
            self.thread.join(10)
            assert not self.thread.is_alive()
        for listener in self.listeners.values():
            listener.close()


class Host:
    """A blocking host on one stream."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.session = Session()
        while self.session.hello is None:
            self._feed()
        self.sock.sendall(self.session.greet())

    def _feed(self) -> dict[str, Any] | None:
        data = self.sock.recv(65536)
        if not data:
            raise EOFError
        return self.session.feed(data)

    def ask(self, op: str, fields: dict[str, Any]) -> dict[str, Any]:
        self.sock.sendall(self.session.request(op, fields))
        while (reply := self._feed()) is None:
            pass
        return reply

    def __enter__(self) -> Host:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()


@pytest.fixture
def guest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Guest]:
    made = Guest(monkeypatch, tmp_path)
    yield made
    made.close()


def test_hello_tells_the_disk_and_the_boot(guest: Guest) -> None:
    guest.state = Disk("damaged", 5, "data disk: no ext4")
    with guest.start().host() as host:
        assert host.session.hello is not None
        assert (host.session.hello.disk, host.session.hello.boot) == ("damaged", None)
        assert host.session.hello.disk_text == "data disk: no ext4"
        assert host.ask("provision", PROVISION)["ok"] is True
        assert guest.work == []  # nothing is written anywhere
        assert refused(host.ask("trim", {})) == "trim: data disk: no ext4"


def test_what_was_provisioned_is_kept_for_the_next_agent(guest: Guest, tmp_path: Path) -> None:
    with guest.start().host() as host:
        reply = host.ask("provision", PROVISION)
        assert reply["off_ns"] == 1 and reply["now_ns"] > 0
    assert guest.names == ["work"] and guest.clock == [10]
    assert [uid for uid, _ in guest.work] == [0]
    kept = json.loads((tmp_path / "provision.json").read_text())
    assert kept == {k: v for k, v in PROVISION.items() if k not in ("time_ns", "at_ns")}
    assert (tmp_path / "provision.json").stat().st_mode & 0o777 == 0o600
    second = Agent(Inherited({}, None))
    assert second.greeting()["boot"] == 4


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"boot": true}', '{"boot": "1"}'])
def test_what_was_kept_and_is_torn_is_nothing(guest: Guest, tmp_path: Path, text: str) -> None:
    (tmp_path / "provision.json").write_text(text)
    assert Agent(Inherited({}, None)).greeting()["boot"] is None


def test_an_older_request_does_not_set_the_clock_back(guest: Guest) -> None:
    with guest.start().host() as late, guest.host() as host:
        assert host.ask("time", {"time_ns": 500, "at_ns": 50})["ok"] is True
        assert refused(late.ask("time", {"time_ns": 400, "at_ns": 49})) is not None
        assert refused(late.ask("provision", {**PROVISION, "at_ns": 49})) is not None
        assert host.ask("time", {"time_ns": 300, "at_ns": 51})["ok"] is True  # set back by hand
    assert guest.clock == [500, 300]


def test_files_are_written_as_the_agent(guest: Guest) -> None:
    files = [{"path": "/home/agent/x", "mode": 0o600, "content": "a", "yields": True}]
    with guest.start().host() as host:
        host.ask("provision", {**PROVISION, "files": files})
    assert [uid for uid, _ in guest.work] == [0, disk.AGENT_UID]


def test_only_the_host_is_heard(guest: Guest) -> None:
    guest.start()
    for cid in (1, 3, 0xFFFFFFFF):
        with guest.listeners[CONTROL_PORT].dial(cid) as sock:
            assert sock.recv(10) == b""


def test_a_port_that_nothing_serves_says_so_at_once(guest: Guest) -> None:
    guest.start()
    with guest.listeners[5005].dial() as sock:
        assert sock.recv(10) == b""


def test_a_host_that_goes_away_at_once_ends_nothing(guest: Guest) -> None:
    guest.start()
    for _ in range(50):
        guest.listeners[CONTROL_PORT].dial().close()
    with guest.host() as host:
        assert host.ask("ping", {})["ok"] is True


@pytest.mark.parametrize("untrusted", [b"\0" * 9, b"\xff" * 9, b"\5\0\0\0\1{}{}", os.urandom(500)])
def test_a_bad_frame_ends_that_stream_alone(guest: Guest, untrusted: bytes) -> None:
    with guest.start().host() as good, guest.listeners[CONTROL_PORT].dial() as bad:
        bad.sendall(untrusted + bytes(1 << 12))
        with pytest.raises((EOFError, ConnectionError)):
            while True:
                if not bad.recv(65536):
                    raise EOFError
        assert good.ask("ping", {})["ok"] is True


def test_the_newest_streams_are_served_and_the_oldest_end(guest: Guest) -> None:
    guest.start()
    hosts = [guest.host() for _ in range(agent.SESSIONS_MAX + 3)]
    for host in hosts[:3]:
        with pytest.raises((EOFError, ConnectionError)):
            host.ask("ping", {})
    for host in hosts[3:]:
        assert host.ask("ping", {})["ok"] is True
    for host in hosts:
        host.sock.close()


def test_a_defect_in_one_operation_is_told_and_the_others_go_on(
    guest: Guest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def defect(_: str) -> int:
        raise KeyError

    monkeypatch.setattr(system, "trim", defect)
    with guest.start().host() as host:
        assert refused(host.ask("trim", {})) == "trim: KeyError"
        assert host.ask("ping", {})["ok"] is True


def test_poweroff_is_answered_before_it_is_done(guest: Guest) -> None:
    with guest.start().host() as host:
        assert host.ask("poweroff", {})["ok"] is True
        assert guest.off.wait(10)


def test_what_blocks_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("chroot", "chdir", "setgroups", "setresgid", "setresuid"):
        monkeypatch.setattr(os, name, lambda *_: None)
    monkeypatch.setattr(agent, "CHILD_S", 0.3)
    monkeypatch.setattr(system, "spare", lambda _: None)
    began = time.monotonic()
    with pytest.raises(OSError, match="took too long"):
        agent.in_root(lambda: time.sleep(60), uid=1000)
    assert time.monotonic() - began < 10

    def defect() -> None:
        raise ValueError("\ud800 no")

    with pytest.raises(OSError, match="no"):
        agent.in_root(defect, uid=1000)
    with pytest.raises(OSError, match="ended at once"):
        agent.in_root(lambda: os._exit(3), uid=1000)
    agent.in_root(lambda: (tmp_path / "x").write_text("done") and None, uid=1000)
    assert (tmp_path / "x").read_text() == "done"


def test_whatever_fails_at_the_end_the_machine_goes_off(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def fail(*_: object) -> None:
        raise OSError("no")

    monkeypatch.setattr(agent.os, "kill", fail)
    monkeypatch.setattr(disk, "release", lambda: done.append("released"))
    monkeypatch.setattr(system, "power_off", lambda: done.append("off"))
    monkeypatch.setattr(system, "log", lambda _: None)
    agent.power_off()
    assert done == ["off"]
