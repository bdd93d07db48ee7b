"""Descriptors are handed over, and none is left behind whatever either end does."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agent_box.bus import handover, wire
from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.handover import HandoverClient, HandoverServer
from agent_box.bus.schema import Wire
from agent_box.process.log import Log
from agent_box.process.tasks import TaskSet


class Want(Wire, frozen=True):
    name: str


class Other(Wire, frozen=True):
    number: int


def descriptors() -> set[str]:
    """What is open, by what it is: numbers are used again."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(f"{number} {os.readlink(f'/proc/self/fd/{number}')}")
    return found


class Scene:
    """A server whose answers the test makes."""

    def __init__(self, path: Path, serve: Callable[[Want], Awaitable[int]]) -> None:
        self.path = path
        self.failed: list[str] = []
        self.tasks = TaskSet(Log(service="test"), lambda name, error: self.failed.append(name))
        self.server = HandoverServer(path, Want, serve, self.tasks.hold)
        self.client = HandoverClient(path)

    def raw(self) -> socket.socket:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made.setblocking(False)
        made.connect(str(self.path))
        return made


@asynccontextmanager
async def scene(directory: Path, serve: Callable[[Want], Awaitable[int]]) -> AsyncIterator[Scene]:
    """Nothing may be left open at its end, and no task may have failed."""
    before = descriptors()
    made = Scene(directory / "sock", serve)
    made.server.start()
    try:
        yield made
    finally:
        made.client.close()
        made.server.close()
        await made.tasks.cancel()
        await asyncio.sleep(0)
    assert made.failed == []
    assert descriptors() - before == set()


async def a_file(request: Want) -> int:
    fd = os.memfd_create(request.name)
    os.write(fd, request.name.encode())
    return fd


async def never(_request: Want) -> int:
    await asyncio.Event().wait()
    raise AssertionError


def read(fd: int) -> bytes:
    try:
        assert not os.get_inheritable(fd)
        return os.pread(fd, 100, 0)
    finally:
        os.close(fd)


async def ended(sock: socket.socket) -> bool:
    return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, 100), 5) == b""


def test_each_gets_what_was_asked_for(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, a_file) as s:
            asked = [s.client.ask(Want(name=f"n{n}"), deadline_s=5) for n in range(50)]
            assert [read(fd) for fd in await asyncio.gather(*asked)] == [
                f"n{n}".encode() for n in range(50)
            ]

    asyncio.run(main())


def test_a_refusal_is_told_with_its_facts(tmp_path: Path) -> None:
    async def serve(_request: Want) -> int:
        raise Refusal(Reason.CONFLICT, "ä" * 5000, facts={"a": "b"})

    async def main() -> None:
        async with scene(tmp_path, serve) as s:
            with pytest.raises(Refusal) as refused:
                await s.client.ask(Want(name="x"), deadline_s=5)
            assert refused.value.reason is Reason.CONFLICT
            assert refused.value.facts == {"a": "b"}

    asyncio.run(main())


def test_who_gives_up_gets_nothing_later(tmp_path: Path) -> None:
    go = asyncio.Event()

    async def late(request: Want) -> int:
        await go.wait()
        return await a_file(request)

    async def main() -> None:
        async with scene(tmp_path, late) as s:
            with pytest.raises(Refusal) as refused:
                await s.client.ask(Want(name="x"), deadline_s=0.05)
            assert refused.value.reason is Reason.DEADLINE
            go.set()
            assert read(await s.client.ask(Want(name="y"), deadline_s=5)) == b"y"

    asyncio.run(main())


@pytest.mark.parametrize("steps", range(12))
def test_a_cancelled_caller_leaves_no_descriptor(tmp_path: Path, steps: int) -> None:
    async def main() -> None:
        async with scene(tmp_path, a_file) as s:
            asking = asyncio.ensure_future(s.client.ask(Want(name="x"), deadline_s=5))  # noqa: TID251
            for _ in range(steps):
                await asyncio.sleep(0)
            asking.cancel()
            try:
                os.close(await asking)
            except asyncio.CancelledError:
                pass
            assert read(await s.client.ask(Want(name="y"), deadline_s=5)) == b"y"

    asyncio.run(main())


def test_what_is_under_way_ends_with_its_connection(tmp_path: Path) -> None:
    cancelled: list[str] = []
    began = asyncio.Event()

    async def serve(request: Want) -> int:
        began.set()
        try:
            return await never(request)
        except asyncio.CancelledError:
            cancelled.append(request.name)
            raise

    async def main() -> None:
        async with scene(tmp_path, serve) as s:
            sock = s.raw()
            sock.send(bytes(8) + wire.encode_body(Want(name="x")))
            await asyncio.wait_for(began.wait(), 5)
            sock.close()
            await asyncio.wait_for(s.tasks.drain(), 5)
            assert cancelled == ["x"]

    asyncio.run(main())


@pytest.mark.parametrize(
    "untrusted",
    [b"x", bytes(8), bytes(8) + b"\xc1", bytes(8) + wire.encode_body(Other(number=1)), b"y" * 5000],
)
def test_what_is_no_request_ends_that_connection_alone(tmp_path: Path, untrusted: bytes) -> None:
    async def main() -> None:
        async with scene(tmp_path, a_file) as s:
            with s.raw() as sock:
                sock.send(untrusted)
                assert await ended(sock)
            assert read(await s.client.ask(Want(name="y"), deadline_s=5)) == b"y"

    asyncio.run(main())


def test_descriptors_are_not_taken(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, a_file) as s:
            with s.raw() as sock, socket.socket() as file:
                message = bytes(8) + wire.encode_body(Want(name="x"))
                socket.send_fds(sock, [message], [file.fileno()])
                assert await ended(sock)

    asyncio.run(main())


def test_a_number_twice_ends_the_connection(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, never) as s:
            with s.raw() as sock:
                for _ in range(2):
                    sock.send(bytes(8) + wire.encode_body(Want(name="x")))
                assert await ended(sock)

    asyncio.run(main())


def test_too_many_are_refused_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "UNDER_WAY_MAX", 2)

    async def main() -> None:
        async with scene(tmp_path, never) as s:
            waiting = [s.tasks.hold(s.client.ask(Want(name="x"), deadline_s=1), name="ask")
                       for _ in range(2)]  # fmt: skip
            await asyncio.sleep(0)
            with pytest.raises(Refusal) as refused:
                await s.client.ask(Want(name="z"), deadline_s=5)
            assert refused.value.reason is Reason.EXHAUSTED
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)

    asyncio.run(main())


def test_connections_are_limited(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, a_file) as s:
            socks = [s.raw() for _ in range(handover.CONNECTIONS_MAX + 1)]
            assert await ended(socks[-1])
            for sock in socks:
                sock.close()
            await asyncio.sleep(0.05)
            assert read(await s.client.ask(Want(name="y"), deadline_s=5)) == b"y"

    asyncio.run(main())


def test_without_descriptors_it_waits_and_serves_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(handover, "PAUSE_S", 0.05)
    tries = 0

    class Exhausted(socket.socket):
        def accept(self) -> tuple[socket.socket, object]:
            nonlocal tries
            tries += 1
            if tries < 3:
                raise OSError(24, "Too many open files")
            return super().accept()

    async def main() -> None:
        async with scene(tmp_path, a_file) as s:
            loop = asyncio.get_running_loop()
            listener = s.server._listener
            loop.remove_reader(listener)
            s.server._listener = Exhausted(fileno=listener.detach())
            s.server._listener.setblocking(False)
            s.server._listen()
            assert read(await s.client.ask(Want(name="y"), deadline_s=5)) == b"y"
            assert tries == 3

    asyncio.run(main())


def test_a_server_that_went_away_is_unavailable_and_found_again(tmp_path: Path) -> None:
    async def main() -> None:
        async with scene(tmp_path, a_file) as s:
            assert read(await s.client.ask(Want(name="y"), deadline_s=5)) == b"y"
            s.server.close()
            with pytest.raises(Refusal) as refused:
                await s.client.ask(Want(name="y"), deadline_s=5)
            assert refused.value.reason is Reason.UNAVAILABLE
            s.server = HandoverServer(s.path, Want, a_file, s.tasks.hold)
            s.server.start()
            assert read(await s.client.ask(Want(name="z"), deadline_s=5)) == b"z"

    asyncio.run(main())


@pytest.mark.parametrize("body", [b"", b"\xc1", b"x" * 5000])
def test_an_answer_that_is_none_loses_the_connection(tmp_path: Path, body: bytes) -> None:
    async def main() -> None:
        before = descriptors()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(tmp_path / "sock"))
        listener.listen()
        client = HandoverClient(tmp_path / "sock")
        tasks = TaskSet(Log(service="test"))
        asking = asyncio.ensure_future(client.ask(Want(name="x"), deadline_s=5))  # noqa: TID251
        await asyncio.sleep(0.01)
        other, _ = listener.accept()
        number = other.recv(100)[:8]
        other.send(number + body)
        with pytest.raises(Refusal) as refused:
            await asking
        assert refused.value.reason is Reason.UNAVAILABLE
        other.close()
        listener.close()
        assert len(tasks) == 0
        assert descriptors() - before == set()

    asyncio.run(main())


def test_a_descriptor_that_nobody_asked_for_is_closed(tmp_path: Path) -> None:
    async def main() -> None:
        before = descriptors()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        listener.bind(str(tmp_path / "sock"))
        listener.listen()
        client = HandoverClient(tmp_path / "sock")
        asking = asyncio.ensure_future(client.ask(Want(name="x"), deadline_s=5))  # noqa: TID251
        await asyncio.sleep(0.01)
        other, _ = listener.accept()
        number = other.recv(100)[:8]
        with socket.socket() as file:
            for answer in ((99).to_bytes(8, "little"), number, number):
                socket.send_fds(other, [answer], [file.fileno()])
            os.close(await asking)
            await asyncio.sleep(0.05)
        assert client._connection is not None
        client.close()
        other.close()
        listener.close()
        assert descriptors() - before == set()

    asyncio.run(main())
