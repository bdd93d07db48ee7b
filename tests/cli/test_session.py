"""The command line's session, the channel's desk and the guest's terminals, all as they are, one
step at a time: streams are cut wherever the seed says, and every byte arrives once.

What lies between them is a test's: the bus a pair of queues, a machine's stream a socket pair,
the program what the test reads and writes itself. One thread, no time but a clock that is set.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import random
import socket
import tty
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.until import until

from agent_box.bus.errors import Reason, Refusal
from agent_box.channel.contract import Attach, Ended, Exec, Size
from agent_box.channel.terminals import Desk
from agent_box.cli.session import CommandSession, Session, TerminalSession
from agent_box.engine.contract import Dial
from agent_box.guest import launch, streams
from agent_box.guest.loop import Loop
from agent_box.guest.terminal import Terminals
from agent_box.process.log import Log
from agent_box.process.tasks import TaskSet

WINDOW = 8  # items; small, so that it fills
STEPS_MAX = 200_000  # only ends a test that hangs
GROUND = launch.Ground(None, "/", "/")


class Wire:
    """A stream of the bus: what the command line sees of it, and what the handler sees."""

    deadline_ns = 1 << 62

    def __init__(self, request: Any) -> None:
        self.request = request
        self.accepted = self.done = False
        self.error: Refusal | None = None
        self.reply: Ended | None = None
        self.credit = WINDOW
        self.task: asyncio.Task[None] | None = None
        self._up: deque[Any] = deque()  # under way
        self._down: deque[Any] = deque()
        self._arrived: deque[Any] = deque()  # at the command line
        self._inbox: deque[Any] = deque()  # at the handler
        self._room = WINDOW
        self._change = asyncio.Event()

    # the command line's end

    @property
    def waiting(self) -> int:
        return len(self._arrived)

    def send(self, item: Any) -> None:
        assert self.credit > 0
        self.credit -= 1
        self._up.append(item)

    def recv(self) -> Any:
        self._room += 1
        self._change.set()
        return self._arrived.popleft()

    def close(self) -> None:
        if not self.done:
            self.break_(Refusal(Reason.CONNECTION_LOST, "closed"))

    # the handler's end

    async def serve(self, handler: Any) -> None:
        self._down.append("accepted")
        try:
            self._down.append(await handler(self.request, None, Handled(self)))
        except Refusal as refusal:
            self._down.append(refusal)

    async def put(self, item: Any) -> None:
        while self._room <= 0:
            self._change.clear()
            await self._change.wait()
        self._room -= 1
        self._down.append(item)

    async def get(self) -> Any:
        while not self._inbox:
            self._change.clear()
            await self._change.wait()
        self.credit += 1
        return self._inbox.popleft()

    # what is between them

    def carry(self, most: int) -> None:
        for _ in range(most):
            if self._up:
                self._inbox.append(self._up.popleft())
                self._change.set()
            if self._down and not self.done:
                self._tell(self._down.popleft())

    def _tell(self, item: Any) -> None:
        if item == "accepted":
            self.accepted = True
        elif isinstance(item, Refusal):
            self.error, self.done = item, True
        elif isinstance(item, Ended):
            self.reply, self.done = item, True
        else:
            self._arrived.append(item)

    def break_(self, why: Refusal) -> None:
        """Both ends find out, and what is under way is lost."""
        self._up.clear()
        self._down.clear()
        self.error, self.done = why, True
        if self.task is not None:
            self.task.cancel()


class Handled:
    """`bus.server.StreamIO`."""

    def __init__(self, wire: Wire) -> None:
        self.send = wire.put
        self.recv = wire.get


class Eager(Loop):
    """Waits for nothing."""

    def _wait(self) -> float | None:
        return 0.0


class Played:
    """A program whose part the test plays. It ends when it is told to."""

    def __init__(self, wanted: launch.Launch) -> None:
        ready, told = os.pipe2(os.O_CLOEXEC)
        os.close(told)
        stdin, self._end = os.pipe2(os.O_CLOEXEC)
        pid = os.posix_spawn(
            "/bin/cat", ["cat"], {}, file_actions=[(os.POSIX_SPAWN_DUP2, stdin, 0)]
        )
        os.close(stdin)
        if wanted.size is None:
            self.input, theirs = _pipe()
            pairs = [_pipe(), _pipe()]
            outputs, self.outputs = [r for r, _ in pairs], [w for _, w in pairs]
            terminal = None
        else:
            terminal, slave = os.openpty()
            tty.setraw(slave)
            theirs, outputs, self.outputs = os.dup(terminal), [terminal], [slave]
            self.input = os.dup(slave)
        for fd in (self.input, theirs, *outputs, *self.outputs):
            os.set_blocking(fd, False)
        self.started = launch.Started(pid, ready, theirs, outputs, terminal)

    def end(self) -> None:
        for fd in (self.input, *self.outputs, self._end):
            os.close(fd)


def _pipe() -> tuple[int, int]:
    pair = os.pipe2(os.O_CLOEXEC)
    fcntl.fcntl(pair[0], fcntl.F_SETPIPE_SZ, 4096)
    return pair


class Scene:
    """All of it. `turn` does a few things in an order that the seed decides."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rnd = random.Random(seed)
        self.aio = asyncio.new_event_loop()
        self.guest = Eager()
        self.terminals = Terminals(self.guest, lambda: ([], {}), GROUND)
        self.programs: list[Played] = []
        self.wire: Wire | None = None
        self.lines: list[socket.socket] = []  # the guest's ends
        self.now = 0.0
        self._turn: list[Callable[[], None]] = [self._carry, self._serve, self._run]
        monkeypatch.setattr(launch, "start", self._start)
        self._asyncio(self._new_channel)

    # what the parts ask for

    def _start(self, wanted: launch.Launch, _: launch.Ground) -> launch.Started:
        self.programs.append(Played(wanted))
        return self.programs[-1].started

    def opening(self, name: str, request: Any, *, deadline_s: float) -> Wire:
        """`bus.client.Client.opening`."""

        def begin() -> Wire:
            wire = Wire(request)
            wire.task = self.tasks.hold(wire.serve(getattr(self.desk, name)), name="handler")
            return wire

        self.wire = self._asyncio(begin)
        return self.wire

    def boot_of(self, instance: str) -> int:
        return 1

    def note(self, *_: object) -> None:
        raise AssertionError("nothing of root's")

    def forged(self, instance: str, port: int, error: Exception) -> Refusal:
        raise AssertionError(f"box-guest was taken for a liar: {error}")

    async def ask(self, dial: Dial, *, deadline_s: float) -> int:
        """`HandoverClient.ask`."""
        ours, theirs = socket.socketpair()
        if dial.port != streams.PORT:
            theirs.close()
            return ours.detach()
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.rnd.choice((1, 1 << 18)))
            end.setblocking(False)
        self.lines.append(theirs.dup())
        self.terminals.serve(theirs)
        return ours.detach()

    # what goes on

    def turn(self) -> None:
        for work in self.rnd.sample(self._turn, len(self._turn)):
            if self.rnd.random() < 0.7:
                work()
        self.now += 0.06

    def _carry(self) -> None:
        if self.wire is not None:
            self.wire.carry(self.rnd.randrange(1, 5))

    def _serve(self) -> None:
        for _ in range(self.rnd.randrange(1, 4)):
            self.guest.turn()

    def _run(self) -> None:
        for _ in range(self.rnd.randrange(1, 6)):
            self._asyncio(lambda: None)

    def _asyncio(self, work: Callable[[], Any]) -> Any:
        """Runs it in the loop, and whatever is due there."""
        found: list[Any] = []

        def do() -> None:
            found.append(work())
            self.aio.stop()

        self.aio.call_soon(do)
        self.aio.run_forever()
        return found[0]

    def _new_channel(self) -> None:
        self.tasks = TaskSet(Log(service="channel"))
        self.desk = Desk(self, self, self.tasks)  # type: ignore[arg-type]

    # what goes wrong

    def kill_channel(self) -> None:
        """Nothing of it says anything any more, and what it had not sent is lost."""
        self.cut_line()
        self._forget_wire()
        self._asyncio(self._new_channel)

    def drain_channel(self) -> None:
        self._asyncio(self.desk.starts_again)

    def cut_line(self) -> None:
        """The guest's streams end, in the middle of a frame or behind one."""
        for line in self.lines:
            if self.rnd.random() < 0.5:
                with contextlib.suppress(OSError):
                    while line.recv(1 << 16):
                        pass
            with contextlib.suppress(OSError):  # it has ended already
                line.shutdown(socket.SHUT_RDWR)
            line.close()
        self.lines.clear()

    def lose_bus(self) -> None:
        """The line of the bus breaks; the channel takes it for a caller that goes."""
        self._forget_wire()

    def _forget_wire(self) -> None:
        if self.wire is not None and not self.wire.done:
            self.wire.break_(Refusal(Reason.CONNECTION_LOST, "on purpose"))

    def close(self) -> None:
        self.cut_line()
        self._forget_wire()
        self.aio.run_until_complete(self.tasks.cancel())
        self.aio.close()
        until("the guest has noticed", self._settled)
        self.guest.close()

    def _settled(self) -> bool:
        self.guest.turn()
        return not self.guest.get_map()


@pytest.fixture
def scene(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    made = Scene(request.param, monkeypatch)
    try:
        yield made
    finally:
        made.close()


FIELDS: dict[str, Any] = {
    "instance": "0" * 32,
    "new": True,
    "argv": [b"x"],
    "user": "agent",
    "directory": None,
    "environment": [],
    "timeout_ms": None,
}


def begin(scene: Scene, *, terminal: bool, join: bool = False) -> Session:
    if terminal:
        size = Size(rows=24, columns=80)
        more = FIELDS | {"new": not join}
        attach = Attach(terminal="a", offset=0, shell=True, term="xterm", size=size, **more)
        return TerminalSession(scene, attach, lambda: None, lambda: scene.now)  # type: ignore[arg-type]
    command = Exec(command="a", stdout=0, stderr=0, **FIELDS)
    return CommandSession(scene, command, lambda: None, lambda: scene.now)  # type: ignore[arg-type]


class Play:
    """What is typed and what is put out, and how much of both has arrived where it should."""

    def __init__(self, scene: Scene, *, terminal: bool, size: int) -> None:
        rnd = scene.rnd
        self.scene = scene
        self.terminal = terminal
        self.piece = max(1, size // 20)
        self.typed = rnd.randbytes(rnd.randrange(size))
        self.said = [rnd.randbytes(rnd.randrange(1, size)) for _ in range(1 if terminal else 2)]
        self.session = begin(scene, terminal=terminal)
        self.put = 0  # of `typed`, into the session
        self.came = b""  # to the program
        self.out = [0] * len(self.said)  # of the program's, written
        self.got = [b""] * len(self.said)  # by the command line
        self.ended = False

    @property
    def done(self) -> bool:
        return self.came == self.typed and self.got == self.said

    def step(self) -> None:
        rnd, session = self.scene.rnd, self.session
        if (
            self.put < len(self.typed)
            and session.begun
            and session.input.room
            and rnd.random() < 0.3
        ):
            piece = self.typed[self.put :][: rnd.choice((1, 7, 300, self.piece))]
            session.input.put(piece)
            self.put += len(piece)
            if self.put == len(self.typed) and isinstance(session, CommandSession):
                session.finish()
        session.step()
        for _ in range(rnd.randrange(3)):
            found = session.receive()
            if found is not None:
                self.got[found[0] - 1] += found[1]
        session.step()
        if self.scene.programs and not self.ended:
            self._play(self.scene.programs[0])

    def _play(self, program: Played) -> None:
        rnd = self.scene.rnd
        for source, said in enumerate(self.said):
            if rnd.random() < 0.5:
                piece = said[self.out[source] :][: rnd.choice((1, 100, self.piece))]
                with contextlib.suppress(BlockingIOError):
                    self.out[source] += os.write(program.outputs[source], piece)
        if rnd.random() < 0.5:
            with contextlib.suppress(BlockingIOError):
                self.came += os.read(program.input, rnd.choice((1, 100, self.piece)))
        assert self.typed.startswith(self.came), "input was lost, doubled or moved"
        for got, said in zip(self.got, self.said, strict=True):
            assert said.startswith(got), "output was lost, doubled or moved"

    def join_anew(self) -> None:
        """The command line is killed; another joins, and is shown what there was."""
        self.session = begin(self.scene, terminal=True, join=True)
        self.got = [b""]
        while not self.session.begun:
            self.session.step()
            self.scene.turn()
            self._receive_nothing()
        self.put = self.session.input.taken

    def _receive_nothing(self) -> None:
        found = self.session.receive()
        if found is not None:
            self.got[0] += found[1]


def play(scene: Scene, *, terminal: bool, size: int, cuts: int) -> int:
    """Gives how often it was cut."""
    ways = [scene.kill_channel, scene.drain_channel, scene.cut_line]
    play = Play(scene, terminal=terminal, size=size)
    if terminal:
        ways += [scene.lose_bus]
    chance, made = 0.05, 0
    for _ in range(STEPS_MAX):
        play.step()
        scene.turn()
        if play.session.begun and cuts and scene.rnd.random() < chance:
            cuts -= 1
            made += 1
            way = scene.rnd.choice([*ways, play.join_anew] if terminal and not play.ended else ways)
            if way == play.join_anew:
                scene.lose_bus()
            way()
        if play.done and not play.ended:
            play.ended, chance = True, 0.2  # the end itself is where much may go wrong
            scene.programs[0].end()
        if play.session.reply is not None:
            break
    assert play.done and len(scene.programs) == 1
    assert play.session.reply == Ended(how="exited", status=0, signal=None)
    return made


@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "command"])
@pytest.mark.parametrize("scene", range(12), indirect=True)
def test_every_byte_once_wherever_it_is_cut(scene: Scene, terminal: bool) -> None:
    assert play(scene, terminal=terminal, size=40_000, cuts=12)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("terminal", [True, False], ids=["terminal", "command"])
@pytest.mark.parametrize("scene", range(1000, 1600), indirect=True)
def test_much_is_cut(scene: Scene, terminal: bool) -> None:
    play(scene, terminal=terminal, size=scene.rnd.choice((300, 40_000, 600_000)), cuts=40)
