"""Attachments among guests that lie, break off, stop and flood."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from support.guests import ID, FakeClocks, Good, Scene, call

from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.schema import Empty
from agent_box.channel.contract import (
    Attach,
    Ended,
    Exec,
    ExecInput,
    ExecOutput,
    Guest,
    Instance,
    Size,
)
from agent_box.guest import streams
from agent_box.guest.streams import Frame
from agent_box.guest.wire import Decoder

OPENED = streams.note(Frame.OPENED, {"id": "a", "offsets": [0, 0], "taken": 0})
EXITED = streams.note(Frame.ENDED, {"how": "exited", "status": 3, "signal": None})
LONG_S = 20.0


class Caller:
    """The other end of a stream of the bus."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self.queue: asyncio.Queue[Any] = asyncio.Queue()
        self.came = asyncio.Event()
        self.reads = asyncio.Event()
        self.reads.set()

    async def send(self, item: Any) -> None:
        await self.reads.wait()
        self.items.append(item)
        self.came.set()

    async def recv(self) -> Any:
        return await self.queue.get()


class Port:
    """A guest whose port 5001 does as a test says; its other ports are good."""

    def __init__(self, says: bytes = b"", *, ends: bool = False, floods: bytes = b"") -> None:
        self.says, self.ends, self.floods = says, ends, floods
        self.frames: list[tuple[int, bytes]] = []
        self.closed = asyncio.Event()
        self.sent = 0
        self.good = Good()

    async def __call__(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, self.says)
        if self.ends:
            return
        while self.floods:
            await loop.sock_sendall(sock, self.floods)
            self.sent += len(self.floods)
        decoder = Decoder(streams.FRAME_MAX)
        while data := await loop.sock_recv(sock, 65536):
            self.frames += decoder.feed(data)
        self.closed.set()


def played(root: Path, play: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        async with Scene(root, FakeClocks()) as scene:
            scene.guests[ID] = Good()
            await scene.provision()
            async with asyncio.timeout(LONG_S):
                await play(scene)

    asyncio.run(main())


async def noted(scene: Scene, kind: str) -> None:
    """The fakes run in this loop, and nothing tells when one was served."""
    for _ in range(1000):
        if scene.noted(kind):
            return
        await asyncio.sleep(0)
    raise AssertionError(f"{kind} was not noted")


def command(**more: Any) -> Exec:
    fields: dict[str, Any] = {
        "instance": ID, "command": "ab", "new": True, "stdout": 0, "stderr": 0, "argv": [b"x"],
        "user": "agent", "directory": None, "environment": [], "timeout_ms": None,
    } | more  # fmt: skip
    return Exec(**fields)


def run(scene: Scene, caller: Caller, request: Exec | None = None) -> asyncio.Task[Ended]:
    handler: Any = scene.channel.handlers["exec"]
    loop = asyncio.get_running_loop()
    work = handler(request or command(), call(10), caller)
    return loop.create_task(work)


def test_output_and_its_end_are_told(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        out = streams.data(Frame.OUTPUT, 0, b"hello", 1)
        scene.guests[ID] = Port(OPENED + out + EXITED)
        caller = Caller()
        ended = await run(scene, caller, command(user="root"))
        assert ended == Ended(how="exited", status=3, signal=None)
        assert caller.items == [
            ExecOutput(source="stdout", offset=0, data=b"", taken=0),
            ExecOutput(source="stderr", offset=0, data=b"hello", taken=0),
        ]
        await noted(scene, "root-session")

    played(tmp_path, play)


@pytest.mark.parametrize(
    "lie", [b"\xff" * 9, OPENED + OPENED, OPENED + streams.data(Frame.OUTPUT, 9, b"x", 0)]
)
def test_a_lie_ends_its_stream_and_is_counted(tmp_path: Path, lie: bytes) -> None:
    async def play(scene: Scene) -> None:
        port = scene.guests[ID] = Port(lie)
        with pytest.raises(Refusal, match="no box-guest") as refused:
            await run(scene, Caller())
        assert refused.value.reason is Reason.CONNECTION_LOST
        await port.closed.wait()
        await noted(scene, "forgery-refused")
        assert scene.noted("forgery-refused")[0]["port"] == 5001

    played(tmp_path, play)


def test_a_stream_that_breaks_is_lost_and_a_machine_that_ended_is_left(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        scene.guests[ID] = Port(OPENED, ends=True)
        with pytest.raises(Refusal) as refused:
            await run(scene, Caller())
        assert refused.value.reason is Reason.CONNECTION_LOST

        async def dies(sock: socket.socket) -> None:
            await asyncio.get_running_loop().sock_sendall(sock, OPENED)
            scene.guests[ID] = Refusal(Reason.CONFLICT, "it ended")

        scene.guests[ID] = dies
        assert (await run(scene, Caller())).how == "left-running"
        with pytest.raises(Refusal) as refused:
            await run(scene, Caller())
        assert refused.value.reason is Reason.WRONG_STATE

    played(tmp_path, play)


def test_a_caller_that_goes_leaves_and_a_service_that_ends_does_not(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        for leaves in (True, False):
            port = scene.guests[ID] = Port(OPENED)
            caller = Caller()
            running = run(scene, caller)
            await caller.came.wait()
            if leaves:
                running.cancel()
            else:
                scene.bus.drain_asked.set()
                with pytest.raises(Refusal) as refused:
                    await running
                assert refused.value.reason is Reason.UNAVAILABLE
            await port.closed.wait()
            assert [kind for kind, _ in port.frames] == (
                [Frame.OPEN, Frame.LEAVE] if leaves else [Frame.OPEN]
            )

    played(tmp_path, play)


def test_a_pause_ends_it_until_the_guest_has_the_time_again(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        scene.guests[ID] = Port(OPENED)
        caller = Caller()
        running = run(scene, caller)
        await caller.came.wait()
        release: Any = scene.channel.handlers["release"]
        assert release(Guest(instance=ID, boot=1), call(1)) == Empty()
        assert (await running).how == "left-running"
        with pytest.raises(Refusal) as refused:
            await run(scene, Caller())
        assert refused.value.reason is Reason.WRONG_STATE
        scene.guests[ID] = Good()
        await scene.set_time()
        scene.guests[ID] = Port(OPENED + EXITED)
        assert (await run(scene, Caller())).status == 3

    played(tmp_path, play)


def test_a_flood_is_read_only_as_fast_as_somebody_wants_it(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        port = scene.guests[ID] = Port(OPENED, floods=bytes(streams.data(Frame.TAKEN, 0, b"")) * 99)
        caller = Caller()
        caller.reads.clear()
        running = run(scene, caller)
        before = -1
        while port.sent != before:  # until nobody takes anything any more
            before = port.sent
            await asyncio.sleep(0.2)  # long for a loop that has something to do
        assert port.sent < 4 << 20
        running.cancel()
        await asyncio.wait([running])

    played(tmp_path, play)


def test_what_a_caller_does_wrong_is_its_own(tmp_path: Path) -> None:
    async def play(scene: Scene) -> None:
        for item in (
            ExecInput(offset=5, data=b"x", end=False, signal=None, stdout=0, stderr=0),
            ExecInput(offset=0, data=b"", end=False, signal=65, stdout=0, stderr=0),
            ExecInput(offset=0, data=b"", end=False, signal=None, stdout=1, stderr=0),
        ):
            scene.guests[ID] = Port(OPENED)
            caller = Caller()
            running = run(scene, caller)
            await caller.came.wait()
            caller.queue.put_nowait(item)
            with pytest.raises(Refusal) as refused:
                await running
            assert refused.value.reason is Reason.BAD_REQUEST
        for request in (command(argv=[]), command(command="Z"), command(argv=[b"a\0"])):
            with pytest.raises(Refusal) as refused:
                await run(scene, Caller(), request)
            assert refused.value.reason is Reason.BAD_REQUEST
        attach: Any = scene.channel.handlers["attach"]
        fields: dict[str, Any] = {
            "instance": ID, "terminal": "a", "new": True, "offset": 0, "argv": [], "user": "agent",
            "directory": None, "environment": [], "timeout_ms": None, "term": "",
        }  # fmt: skip
        for size, shell, reason in (
            (Size(rows=0, columns=80), True, Reason.BAD_REQUEST),
            (Size(rows=1, columns=1 << 16), True, Reason.BAD_REQUEST),
            (Size(rows=1, columns=1), False, Reason.UNAVAILABLE),
        ):
            with pytest.raises(Refusal) as refused:
                await attach(Attach(size=size, shell=shell, **fields), call(1), Caller())
            assert refused.value.reason is reason

    played(tmp_path, play)


@pytest.mark.parametrize(
    ("rows", "good"),
    [
        ([], True),
        ([{"terminal": "a", "user": "root", "attached": True, "command": "x\x1b"}], True),
        ([{"terminal": "a", "user": "nobody", "attached": True, "command": ""}], False),
        ([{"terminal": "\x1b", "user": "root", "attached": True, "command": ""}], False),
        ([{}], False),
        ([1], False),
        (None, False),
        ([{}] * 1000, False),
    ],
)
def test_a_list_is_a_claim(tmp_path: Path, rows: Any, good: bool) -> None:
    async def play(scene: Scene) -> None:
        scene.guests[ID] = Port(streams.note(Frame.OPENED, {"terminals": rows}))
        ask: Any = scene.channel.handlers["terminals"]
        if good:
            found = await ask(Instance(instance=ID), call(5))
            assert [t.command for t in found.terminals] == ["x?"] * len(rows)
        else:
            with pytest.raises(Refusal) as refused:
                await ask(Instance(instance=ID), call(5))
            assert refused.value.reason is Reason.CONNECTION_LOST

    played(tmp_path, play)
