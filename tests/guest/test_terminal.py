"""Terminals and commands over socket pairs, with real programs of this host."""

from __future__ import annotations

import hashlib
import json
import os
import selectors
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent_box.guest import launch, program, streams, terminal
from agent_box.guest.loop import Loop
from agent_box.guest.streams import Frame
from agent_box.guest.terminal import Terminals
from agent_box.guest.wire import Decoder

LONG_S = 30.0  # a bound on a hang


class House:
    """A guest's terminals, turned by hand."""

    def __init__(self, work: Path) -> None:
        self.loop = Loop()
        self.around: tuple[list[tuple[str, str]], dict[str, str]] | None = (
            [("P", "1")],
            {"H": "2"},
        )
        ground = launch.Ground(None, str(work), "/")
        self.terminals = Terminals(self.loop, lambda: self.around, ground)
        self.hosts: list[Host] = []

    def host(self) -> Host:
        ours, theirs = socket.socketpair()
        for sock in (ours, theirs):
            sock.setblocking(False)
        self.terminals.serve(theirs)
        self.hosts.append(Host(self, ours))
        return self.hosts[-1]

    def turn(self) -> None:
        timer = self.loop.later(0.02, lambda: None)
        self.loop.turn()
        timer.cancel()

    def close(self) -> None:
        for host in self.hosts:
            host.close()
        until = time.monotonic() + LONG_S
        while self.terminals._attachments:
            assert time.monotonic() < until
            self.turn()
        for found in list(self.terminals._programs.values()):
            found._kill(9)
            while found._status is None or found._open:
                assert time.monotonic() < until
                self.turn()
        self.loop.close()


class Host:
    """The other end of one stream."""

    def __init__(self, house: House, sock: socket.socket) -> None:
        self.house = house
        self.sock = sock
        self.decoder = Decoder(streams.FRAME_MAX)
        self.opened: dict[str, Any] | None = None
        self.refused: dict[str, Any] | None = None
        self.ended: dict[str, Any] | None = None
        self.out = [bytearray(), bytearray()]
        self.start = [0, 0]
        self.taken = 0
        self.over = False
        self.acks = True
        self.unsent = b""

    def open(self, op: str, id: str = "a", *argv: str, **more: Any) -> Host:
        fields: dict[str, Any] = {
            "new": True,
            "offsets": [0] if op == "terminal" else [0, 0],
            "argv": [os.fsencode(word) for word in argv],
            "user": "agent",
            "directory": None,
            "environment": [],
            "timeout_ms": None,
            "term": "xterm",
            "size": (24, 80) if op == "terminal" else None,
        } | more
        self.send(streams.opening(op, id, **fields))
        return self

    def send(self, data: bytes) -> None:
        self.unsent += data

    def turn(self) -> None:
        try:
            self.unsent = self.unsent[self.sock.send(self.unsent) :] if self.unsent else b""
        except BlockingIOError:
            pass
        except OSError:
            self.unsent = b""
        self.house.turn()
        while not self.over:
            try:
                data = self.sock.recv(1 << 16)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                self.over = True
            for kind, payload in self.decoder.feed(data):
                self.take(kind, payload)

    def take(self, kind: int, payload: bytes) -> None:
        assert self.ended is None and self.refused is None
        if kind == Frame.OPENED:
            self.opened = json.loads(payload)
            self.start = list(self.opened.get("offsets", []))
            self.taken = self.opened.get("taken", 0)
        elif kind == Frame.REFUSED:
            self.refused = json.loads(payload)
        elif kind == Frame.ENDED:
            self.ended = json.loads(payload)
        elif kind == Frame.TAKEN:
            self.taken = streams.read_input(payload)[0]
        else:
            assert kind == Frame.OUTPUT
            source, offset, data = streams.read_output(payload)
            assert offset == self.start[source] + len(self.out[source])
            self.out[source] += data
            if self.acks:
                self.send(streams.data(Frame.SEEN, offset + len(data), b"", source))

    def until(self, look: Any) -> Host:
        stop = time.monotonic() + LONG_S
        while not look(self):
            assert time.monotonic() < stop, (
                self.opened,
                self.refused,
                self.ended,
                self.out[0][-200:],
            )
            self.turn()
        return self

    def end(self) -> dict[str, Any]:
        self.until(lambda host: host.ended is not None)
        assert self.ended is not None
        return self.ended

    def status(self) -> Any:
        ended = self.end()
        assert ended["how"] == "exited"
        return ended["status"]

    def type(self, data: bytes, offset: int = 0) -> None:
        self.send(streams.data(Frame.INPUT, offset, data))

    def close(self) -> None:
        self.sock.close()


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    before = set(os.listdir("/proc/self/fd"))
    made = House(tmp_path)
    yield made
    made.close()
    left = set(os.listdir("/proc/self/fd")) - before
    assert not left


def test_a_command_keeps_its_sources_apart_and_its_status(house: House) -> None:
    host = house.host().open("command", "a", "sh", "-c", "echo out; echo err >&2; exit 7")
    assert host.status() == 7
    assert (bytes(host.out[0]), bytes(host.out[1])) == (b"out\n", b"err\n")
    assert host.opened == {"id": "a", "offsets": [0, 0], "taken": 0}


def test_input_reaches_a_command_and_its_end_too(house: House) -> None:
    host = house.host().open("command", "a", "sha256sum")
    data = os.urandom(200_000)
    for start in range(0, len(data), 50_000):
        host.type(data[start : start + 50_000], start)
    host.send(streams.data(Frame.INPUT_END, len(data), b""))
    assert host.status() == 0
    assert host.out[0].decode().split()[0] == hashlib.sha256(data).hexdigest()
    assert host.taken == len(data)


def test_a_megabyte_goes_through_both_ways(house: House) -> None:
    host = house.host().open("command", "a", "cat")
    data = os.urandom(1 << 20)
    sent = 0
    while len(host.out[0]) < len(data):
        if sent < len(data) and sent - host.taken < streams.INPUT_MAX - streams.CHUNK_MAX:
            host.type(data[sent : sent + streams.CHUNK_MAX], sent)
            sent += streams.CHUNK_MAX
        host.turn()
    host.send(streams.data(Frame.INPUT_END, len(data), b""))
    assert host.status() == 0 and bytes(host.out[0]) == data


def test_who_does_not_read_stops_the_command_and_loses_nothing(house: House) -> None:
    host = house.host()
    host.acks = False
    host.open("command", "a", "sh", "-c", "head -c 3000000 /dev/zero; echo end")
    host.until(lambda h: len(h.out[0]) >= program.COMMAND_WINDOW)
    for _ in range(20):
        host.turn()
    assert len(host.out[0]) == program.COMMAND_WINDOW and host.ended is None
    host.acks = True
    host.send(streams.data(Frame.SEEN, len(host.out[0]), b"", 0))
    assert host.status() == 0 and len(host.out[0]) == 3_000_004


def test_what_is_not_there_is_127_and_what_cannot_run_126(house: House, tmp_path: Path) -> None:
    host = house.host().open("command", "a", "no-such-program")
    assert host.status() == 127
    assert bytes(host.out[1]) == b"no-such-program: No such file or directory\n"
    (tmp_path / "file").write_text("no program")
    host = house.host().open("command", "b", str(tmp_path / "file"))
    assert host.status() == 126 and b"denied" in host.out[1]


def test_a_directory_that_is_not_there_is_refused(house: House, tmp_path: Path) -> None:
    for directory in (str(tmp_path / "none"), "relative"):
        host = house.host().open("command", "a", "pwd", directory=directory)
        host.until(lambda h: h.refused)
        assert host.refused is not None and host.refused["reason"] == "bad-request"
        assert directory in host.refused["text"]
    (tmp_path / "some").mkdir()
    host = house.host().open("command", "a", "pwd", directory=str(tmp_path / "some"))
    assert host.status() == 0 and host.out[0].decode().strip() == str(tmp_path / "some")
    host = house.host().open("command", "b", "pwd")
    assert host.status() == 0 and host.out[0].decode().strip() == str(tmp_path)


def test_the_environment_is_built(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_HOST", "1")
    host = house.host().open("command", "a", "env", environment=[("A", "b c")])
    assert host.status() == 0
    found = dict(line.split("=", 1) for line in host.out[0].decode().splitlines())
    assert found["A"] == "b c" and found["P"] == "1" and found["H"] == "2"
    assert found["HOME"] == "/home/agent" and found["LANG"] == "C.UTF-8"
    assert "SECRET_OF_THE_HOST" not in found and "TERM" not in found


@pytest.mark.parametrize("op", ["command", "terminal"])
def test_no_signal_is_ignored_or_blocked_from_the_start(house: House, op: str) -> None:
    host = house.host().open(op, "a", "grep", "-E", "Sig(Ign|Blk)", "/proc/self/status")
    assert host.status() == 0
    assert host.out[0].split() == [b"SigBlk:", b"0" * 16, b"SigIgn:", b"0" * 16]


def test_a_signal_reaches_the_group(house: House) -> None:
    host = house.host().open("command", "a", "sh", "-c", "echo up; sleep 1000 & wait")
    host.until(lambda h: h.out[0])
    host.send(streams.signal(15))
    assert host.end() == {"how": "signalled", "status": None, "signal": 15}


def test_a_timeout_ends_the_group(house: House) -> None:
    host = house.host().open("command", "a", "sh", "-c", "trap '' TERM; sleep 1000", timeout_ms=50)
    assert host.end() == {"how": "timed-out", "status": None, "signal": None}


def test_a_child_that_keeps_the_pipe_keeps_nobody_waiting(house: House) -> None:
    host = house.host().open("command", "a", "sh", "-c", "sleep 1000 & echo $!")
    assert host.status() == 0
    os.kill(int(host.out[0]), 9)


def test_a_lost_stream_is_resumed_where_it_stopped(house: House) -> None:
    first = house.host()
    first.open("command", "a", "sh", "-c", "cat; echo end >&2")
    first.until(lambda h: h.opened)
    first.type(b"one ")
    first.until(lambda h: bytes(h.out[0]) == b"one ")
    first.close()
    again = house.host().open("command", "a", new=False, offsets=[4, 0])
    again.until(lambda h: h.opened)
    assert again.taken == 4
    again.type(b"one two", 0)  # what is there already is dropped
    again.send(streams.data(Frame.INPUT_END, 7, b""))
    assert again.status() == 0
    assert bytes(again.out[0]) == b"two" and bytes(again.out[1]) == b"end\n"
    third = house.host().open("command", "a", new=False, offsets=[7, 0])
    assert third.status() == 0 and bytes(third.out[1]) in (b"", b"end\n")


def test_the_same_opening_twice_begins_it_once(house: House, tmp_path: Path) -> None:
    words = ("sh", "-c", f"echo x >> {tmp_path}/times; sleep 0.2")
    first = house.host().open("command", "a", *words).until(lambda h: h.opened)
    second = house.host().open("command", "a", *words)
    assert second.status() == 0
    assert first.end()["how"] == "taken"
    assert (tmp_path / "times").read_text() == "x\n"


def test_a_command_that_is_left_is_hung_up(house: House) -> None:
    host = house.host().open("command", "a", "sh", "-c", "echo $$; sleep 1000")
    host.until(lambda h: h.out[0].endswith(b"\n"))
    pid = int(host.out[0])
    host.send(streams.leave())
    host.until(lambda _: not Path(f"/proc/{pid}").exists())
    host.until(lambda h: "a" not in h.house.terminals._programs)


def test_a_terminal_has_its_size_before_the_first_byte(house: House) -> None:
    host = house.host().open("terminal", "a", "stty", "size", size=(31, 97))
    assert host.status() == 0 and bytes(host.out[0]) == b"31 97\r\n"


def test_a_resize_is_a_signal(house: House) -> None:
    script = "trap 'stty size; exit 3' WINCH; echo up; while :; do sleep 0.05; done"
    host = house.host().open("terminal", "a", "sh", "-c", script)
    host.until(lambda h: b"up" in h.out[0])
    host.send(streams.size(50, 132))
    assert host.status() == 3 and b"50 132" in host.out[0]


def test_every_control_byte_passes(house: House) -> None:
    host = house.host().open(
        "terminal", "a", "sh", "-c", "stty raw -echo; echo up; head -c 32 | od -An -tx1"
    )
    host.until(lambda h: b"up" in h.out[0])
    for number in range(32):
        host.type(bytes((number,)), number)
    assert host.status() == 0
    shown = host.out[0].split(b"up")[1].split()
    assert [int(word, 16) for word in shown] == list(range(32))


def test_a_login_shell_with_term_and_utf8(house: House) -> None:
    host = house.host().open("terminal", "a", environment=[("SHELL", "/bin/sh")])
    host.until(lambda h: h.opened)
    host.type("echo $0 $TERM $COLORTERM 'ä漢🙂'; exit 5\n".encode())
    assert host.status() == 5
    assert "-sh xterm truecolor ä漢🙂".encode() in host.out[0]


def test_a_terminal_lives_on_and_keeps_what_it_showed(house: House) -> None:
    host = house.host().open("terminal", "a", "sh", "-c", "echo before; read x; echo got $x")
    host.until(lambda h: b"before" in h.out[0])
    host.send(streams.leave())
    host.until(lambda h: h.over)
    listed = house.host()
    listed.open("list", "", offsets=[]).until(lambda h: h.opened)
    assert listed.opened is not None
    assert [t["terminal"] for t in listed.opened["terminals"]] == ["a"]
    assert listed.opened["terminals"][0]["attached"] is False
    again = house.host().open("terminal", "a", new=False)
    again.until(lambda h: b"before" in h.out[0])
    again.type(b"it\n", again.taken)
    assert again.status() == 0 and b"got it" in again.out[0]


def test_what_was_typed_and_not_taken_is_kept_of_who_left_and_sent_again_else(
    house: House,
) -> None:
    script = "stty raw -echo; echo up; sleep 0.5; head -c 60000 | sha256sum"
    data = os.urandom(60_000)
    host = house.host().open("terminal", "a", "sh", "-c", script)
    host.until(lambda h: b"up" in h.out[0])
    host.type(data[:30_000])
    for _ in range(3):
        host.turn()
    host.close()  # broken: what was not taken is sent again
    again = house.host().open("terminal", "a", new=False)
    again.until(lambda h: h.opened)
    assert again.taken < 30_000
    again.type(data[again.taken : 50_000], again.taken)
    for _ in range(3):
        again.turn()
    again.send(streams.leave())  # left: nobody sends it again
    again.until(lambda h: h.over)
    third = house.host().open("terminal", "a", new=False)
    third.until(lambda h: h.opened)
    assert third.taken == 50_000
    third.type(data[50_000:], 50_000)
    assert third.status() == 0
    assert hashlib.sha256(data).hexdigest().encode() in third.out[0]


def test_a_terminal_that_nobody_watches_runs_on(house: House, tmp_path: Path) -> None:
    put_out = "head -c 5000000 /dev/zero | tr '\\0' x"
    script = f"echo up; read x; {put_out}; echo; echo > {tmp_path}/done; echo last; sleep 1000"
    host = house.host().open("terminal", "a", "sh", "-c", script)
    host.until(lambda h: b"up" in h.out[0])
    host.type(b"\n")
    host.send(streams.leave())
    host.until(lambda _: (tmp_path / "done").exists())
    again = house.host().open("terminal", "a", new=False)
    again.until(lambda h: b"last" in h.out[0])
    assert len(again.out[0]) <= program.RING + (1 << 16) and again.start[0] > 3_000_000


def test_a_terminal_that_was_given_up_to_a_child_ends_when_all_is_read(house: House) -> None:
    """The kernel tells no end then: the child has it still."""
    size = program.TERMINAL_WINDOW + 2000  # more than is read before somebody sees it
    code = (
        "import fcntl, os, sys, termios, signal\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "if os.fork() == 0: os.read(0, 1)\n"
        f"else: os.write(1, b'x' * {size}); fcntl.ioctl(0, termios.TIOCNOTTY); os._exit(4)"
    )
    host = house.host()
    host.acks = False
    host.open("terminal", "a", sys.executable, "-c", code)
    host.until(lambda h: any(p._is_full for p in house.terminals._programs.values()))
    assert len(host.out[0]) == program.TERMINAL_WINDOW
    host.acks = True
    host.send(streams.data(Frame.SEEN, len(host.out[0]), b"", 0))
    assert host.status() == 4
    assert len(host.out[0]) == size


def test_the_newest_attachment_has_it(house: House) -> None:
    first = house.host().open("terminal", "a", "cat")
    first.until(lambda h: h.opened)
    second = house.host().open("terminal", "a", new=False)
    second.until(lambda h: h.opened)
    assert first.end()["how"] == "taken"
    second.type(b"hello\n")
    second.until(lambda h: b"hello" in h.out[0])


def test_a_defect_ends_its_stream_so_that_nobody_waits_for_ever(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = house.host().open("terminal", "a", "cat")
    first.until(lambda h: h.opened)

    def fails(*_: object) -> None:
        raise RuntimeError("on purpose")

    with monkeypatch.context() as patched:
        patched.setattr(program.Program, "typed", fails)
        first.type(b"x")
        first.until(lambda h: h.over)
    second = house.host().open("terminal", "a", new=False)
    second.until(lambda h: h.opened)
    second.type(b"hello\n")
    second.until(lambda h: b"hello" in h.out[0])


def test_who_comes_for_what_is_not_there_is_told(house: House) -> None:
    host = house.host().open("terminal", "abc", new=False)
    host.until(lambda h: h.refused)
    assert host.refused is not None and host.refused["reason"] == "not-found"
    house.host().open("terminal", "a", "cat").until(lambda h: h.opened)
    host = house.host().open("command", "a", new=False)
    host.until(lambda h: h.refused)
    assert host.refused is not None and host.refused["reason"] == "bad-request"
    host = house.host().open("terminal", "a", new=False, offsets=[10**9])
    host.until(lambda h: h.refused)


def test_who_comes_too_early_waits_for_the_hook(house: House) -> None:
    around, house.around = house.around, None
    host = house.host().open("command", "a", "sh", "-c", "echo $H")
    for _ in range(5):
        host.turn()
    assert host.opened is None
    house.around = around
    house.terminals.settled()
    assert host.status() == 0 and bytes(host.out[0]) == b"2\n"


@pytest.mark.parametrize(
    "bad",
    [
        b"\0\0\0\0",
        b"\xff\xff\xff\xff",
        streams.data(Frame.INPUT, 7, b"gap"),
        streams.data(Frame.SEEN, 1 << 40, b"", 0),
        streams.data(Frame.SEEN, 0, b"", 9),
        streams.size(1, 1),
        streams.signal(65),
        streams.note(Frame.OPEN, {}),
        b"".join(streams.data(Frame.INPUT, n << 16, bytes(1 << 16)) for n in range(6)),
    ],
)  # fmt: skip
def test_a_bad_frame_ends_its_stream_alone(house: House, bad: bytes) -> None:
    host = house.host().open("command", "a", "sleep", "1000")
    other = house.host().open("command", "b", "cat")
    host.until(lambda h: h.opened)
    other.until(lambda h: h.opened)
    host.send(bad)
    host.until(lambda h: h.over)
    assert host.ended is None
    other.type(b"fine")
    other.until(lambda h: bytes(h.out[0]) == b"fine")
    again = house.host().open("command", "a", new=False)
    again.until(lambda h: h.opened)


@pytest.mark.parametrize("field", ["op", "id", "offsets", "argv", "user", "size", "environment"])
def test_an_opening_with_a_bad_field_is_no_opening(house: House, field: str) -> None:
    good = json.loads(
        streams.opening(
            "terminal", "a", new=True, offsets=[0], argv=[b"cat"], user="agent", directory=None,
            environment=[], timeout_ms=None, term="", size=(1, 1),
        )[5:]
    )  # fmt: skip
    for value in (None, 7, "x\0", [1], [[]], {}, [["a", "b", "c"]], [0, 0, 0], "Z" * 40):
        if field == "environment" and value == {} or field == "size" and value == [0, 0]:
            continue
        host = house.host()
        host.send(streams.note(Frame.OPEN, good | {field: value}))
        host.until(lambda h: h.over or h.refused)
        assert host.opened is None


def test_there_are_only_so_many(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "COMMANDS_MAX", 2)
    for id in ("a", "b"):
        house.host().open("command", id, "sleep", "1000").until(lambda h: h.opened)
    host = house.host().open("command", "c", "true")
    host.until(lambda h: h.refused)
    assert host.refused is not None and host.refused["reason"] == "exhausted"


def _many(house: House, count: int) -> None:
    fds = 0
    for number in range(count):
        host = house.host().open("command", f"{number:x}", "true")
        assert host.status() == 0
        host.close()
        house.hosts.remove(host)
        if number == 20:
            fds = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        house.turn()
    assert len(os.listdir("/proc/self/fd")) <= fds + 3
    assert len(house.terminals._programs) <= terminal.ENDED_MAX + 1
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_commands_in_a_row_leave_nothing(house: House) -> None:
    _many(house, 150)


@pytest.mark.slow
def test_5000_commands_in_a_row_leave_nothing(house: House) -> None:
    _many(house, 5000)


def test_a_callback_that_fails_ends_nothing_else(house: House) -> None:
    ours, theirs = socket.socketpair()

    def fails(_: int) -> None:
        raise RuntimeError("on purpose")

    house.loop.register(theirs, selectors.EVENT_READ, fails)
    ours.send(b"x")
    host = house.host().open("command", "a", "true")
    assert host.status() == 0
    assert theirs.fileno() not in house.loop.get_map()
    ours.close()
    theirs.close()
