"""What leaves in one piece, in which order, and what a slow reader gets of the end."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from agent_box.broker.line import WHOLE, Line

HIGH = 1 << 18
LIMIT = 1 << 16


def play(scene: Callable[[Line, socket.socket], Awaitable[None]]) -> None:
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

    asyncio.run(main())


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
