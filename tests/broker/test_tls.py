"""TLS under a line, against asyncio's own on the other side."""

import asyncio
import os
import ssl
from collections.abc import Awaitable, Callable

import pytest
from support.upstreams import HOST, Authority

from agent_box.broker import upstream
from agent_box.broker.line import Line
from agent_box.broker.tls import Tls

HIGH = 1 << 18
LIMIT = 1 << 16
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def play(serve: Serve, scene: Callable[[Line], Awaitable[None]]) -> None:
    async def main() -> None:
        authority = Authority()
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=authority.server())
        port = server.sockets[0].getsockname()[1]
        line = Line(LIMIT, HIGH)
        made = Tls(upstream.tls(authority.pem.decode()), HOST, line)
        loop = asyncio.get_running_loop()
        raw, _ = await loop.create_connection(lambda: made, "127.0.0.1", port)
        try:
            await made.handshake(30)
            await scene(line)
        finally:
            raw.abort()
            server.close()

    asyncio.run(main())


async def all_of(line: Line) -> bytes:
    found = bytearray()
    while more := await line.read(asyncio.get_running_loop().time() + 60):
        found += more
    return bytes(found)


def test_much_passes_in_both_directions_at_once() -> None:
    sent = os.urandom(3_000_000)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(len(sent) // 100_000):
            writer.write(await reader.readexactly(100_000))
            await writer.drain()
        writer.close()

    async def scene(line: Line) -> None:
        async def up() -> None:
            for at in range(0, len(sent), 100_000):
                line.write(sent[at : at + 100_000])
                await line.drain(60)

        found, _ = await asyncio.gather(all_of(line), up())
        assert found == sent

    play(serve, scene)


def test_what_is_relayed_comes_in_pieces_of_many_records() -> None:
    sent = os.urandom(8 << 20)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(sent)
        await writer.drain()
        writer.close()

    async def scene(line: Line) -> None:
        found: list[bytes] = []

        def sink(piece: memoryview) -> bool:
            found.append(bytes(piece))
            return sum(map(len, found)) < len(sent)

        loop = asyncio.get_running_loop()
        await line.relay(sink, loop.time() + 60)
        assert b"".join(found) == sent
        assert max(map(len, found)) > 1 << 14  # a record has no more

    play(serve, scene)


@pytest.mark.parametrize("goodbye", [True, False])
def test_the_end_is_an_end_with_a_goodbye_and_without(goodbye: bool) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"the last")
        await writer.drain()
        if goodbye:
            writer.close()
        else:
            sock = writer.transport.get_extra_info("socket")
            sock.shutdown(1)
            await reader.read()

    async def scene(line: Line) -> None:
        assert await all_of(line) == b"the last"
        assert line.over and not line.quiet

    play(serve, scene)


def test_what_is_no_record_is_a_loss_and_not_an_end() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        os.write(writer.transport.get_extra_info("socket").fileno(), b"HTTP/1.1 200 OK\r\n\r\n")
        await reader.read()

    async def scene(line: Line) -> None:
        with pytest.raises(OSError, match="lost"):
            await all_of(line)

    play(serve, scene)


def test_a_handshake_that_fails_tells_no_line() -> None:
    async def main() -> None:
        server = await asyncio.start_server(
            lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=Authority().server()
        )
        port = server.sockets[0].getsockname()[1]
        line = Line(LIMIT, HIGH)
        made = Tls(upstream.tls(None), HOST, line)
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: made, "127.0.0.1", port)
        with pytest.raises(ssl.SSLCertVerificationError):
            await made.handshake(30)
        assert made.is_closing()
        assert line._transport is None
        server.close()

    asyncio.run(main())
