"""What leaves in one piece, in which order, and what a slow reader gets of the end."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest
from support import simclock

from agent_box.broker.line import WHOLE, Line

HIGH = 1 << 18
LIMIT = 1 << 16


def play(
    scene: Callable[[Line, socket.socket], Awaitable[None]],
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
) -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        loop = asyncio.get_running_loop()
        transport, line = await loop.create_connection(lambda: Line(LIMIT, HIGH), sock=ours)
        try:
            await scene(line, theirs)
        finally:
            transport.abort()
            theirs.close()

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(main())


async def all_of(theirs: socket.socket) -> bytes:
    found = bytearray()
    while more := await asyncio.get_running_loop().sock_recv(theirs, 4096):
        found += more
    return bytes(found)


def test_what_is_written_in_a_turn_leaves_at_its_end_together() -> None:
    async def scene(out: Line, theirs: socket.socket) -> None:
        out.write(b"head ")
        out.write(b"body")
        with pytest.raises(BlockingIOError):
            theirs.recv(99)
        await asyncio.sleep(0)
        assert theirs.recv(99) == b"head body"

    play(scene)


def test_large_pieces_keep_their_place() -> None:
    async def scene(out: Line, theirs: socket.socket) -> None:
        out.write(b"head")
        out.write(b"x" * WHOLE)
        out.write(b"end")
        read, _ = await asyncio.gather(all_of(theirs), out.finish(60))
        assert read == b"head" + b"x" * WHOLE + b"end"

    play(scene)


def test_finish_waits_until_a_slow_reader_can_have_everything() -> None:
    async def scene(out: Line, theirs: socket.socket) -> None:
        whole = bytes(range(256)) * (HIGH // 256 * 4)
        out.write(whole)
        with pytest.raises(TimeoutError):
            await out.finish(0.01)
        read, _ = await asyncio.gather(all_of(theirs), out.finish(60))
        assert read == whole

    play(scene)


def test_a_reader_that_stopped_is_waited_for_no_longer_than_said() -> None:
    async def scene(out: Line, theirs: socket.socket) -> None:
        out.write(bytes(HIGH * 4))
        with pytest.raises(TimeoutError):
            await out.drain(0.01)
        with pytest.raises(TimeoutError):
            await out.finish(0.01)

    play(scene)


def test_after_abort_nothing_more_leaves() -> None:
    async def scene(out: Line, theirs: socket.socket) -> None:
        out.write(b"never")
        out.abort()
        assert await all_of(theirs) == b""
        with pytest.raises(OSError):
            await out.drain(60)

    play(scene)


def test_what_is_relayed_arrives_whole_and_the_rest_can_be_read() -> None:
    async def scene(out: Line, theirs: socket.socket) -> None:
        whole = bytes(range(256)) * 4096
        seen = bytearray()

        def sink(piece: memoryview) -> bool:
            seen.extend(piece)
            return len(seen) < len(whole)

        async def feed() -> None:
            await asyncio.get_running_loop().sock_sendall(theirs, whole)

        await asyncio.gather(feed(), out.relay(sink, asyncio.get_running_loop().time() + 60))
        assert seen == whole
        theirs.send(b"rest")
        assert await out.read(asyncio.get_running_loop().time() + 60) == b"rest"

    play(scene)


def test_a_relay_ends_with_its_connection_and_with_its_time() -> None:
    async def scene(out: Line, theirs: socket.socket) -> None:
        now = asyncio.get_running_loop().time
        theirs.send(b"some")
        with pytest.raises(TimeoutError):
            await out.relay(lambda piece: True, now() + 0.05)
        theirs.close()
        with pytest.raises(OSError, match="ended"):
            await out.relay(lambda piece: True, now() + 60)

    play(scene)


def test_each_wait_ends_at_its_own_time_whatever_the_one_before_was_for() -> None:
    async def scene(out: Line, theirs: socket.socket) -> None:
        now = asyncio.get_running_loop().time

        async def late(seconds: float) -> float:
            began = now()
            with pytest.raises(TimeoutError):
                await out.read(began + seconds)
            return now() - began

        for first, second in ((10.0, 100.0), (100.0, 10.0)):
            theirs.send(b"x")
            assert await out.read(now() + first) == b"x"
            assert await late(second) == pytest.approx(second, abs=0.1)
            assert await late(1.0) == pytest.approx(1.0, abs=0.1)

    play(scene, simclock.Loop)


def test_a_sender_is_held_back_while_nobody_reads() -> None:
    async def scene(out: Line, theirs: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        sending = loop.create_task(loop.sock_sendall(theirs, bytes(16 << 20)))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(sending), 0.2)
        got = 0
        while got < 16 << 20:
            got += len(await out.read(loop.time() + 60))
        await sending

    play(scene)


def test_the_end_is_told_once_and_a_loss_is_not_an_end_in_order() -> None:
    async def scene(out: Line, theirs: socket.socket) -> None:
        told: list[str] = []
        out.ended = lambda: told.append("ended")
        theirs.send(b"last")
        theirs.shutdown(socket.SHUT_WR)
        until = asyncio.get_running_loop().time() + 60
        assert (await out.read(until), await out.read(until)) == (b"last", b"")
        out.abort()
        with pytest.raises(OSError, match="lost"):
            await out.read(until)
        assert told == ["ended"] and out.over and not out.quiet

    play(scene)
