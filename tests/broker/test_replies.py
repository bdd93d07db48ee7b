"""Replies that cannot be searched, and those with more than one header of a name."""

from __future__ import annotations

import pytest
from support.brokerscene import REAL, Scene, run
from support.upstreams import Raw


async def answering(scene: Scene, reply: bytes) -> None:
    """Binding `api`, whose upstream answers these bytes and hangs up."""

    async def serve(reader, writer) -> None:  # type: ignore[no-untyped-def]
        await raw.head(reader)
        writer.write(reply)
        await writer.drain()

    raw = await Raw(serve).start(scene.authority.server())
    scene.closing(raw.stop)
    scene.bind("api", raw.port)
    await scene.up()


def reply(*lines: bytes, body: bytes = b"") -> bytes:
    length = b"Content-Length: %d" % len(body)
    return b"\r\n".join([b"HTTP/1.1 200 OK", length, *lines, b"", body])


@pytest.mark.parametrize(
    "lines",
    [
        (b"Content-Encoding: x-own",),
        (b"Content-Encoding: compress",),
        (b"Content-Encoding: identity", b"Content-Encoding: x-own"),
    ],
)
def test_a_text_in_a_coding_that_cannot_be_read_is_held_back(lines: tuple[bytes, ...]) -> None:
    async def play(scene: Scene) -> None:
        await answering(scene, reply(b"Content-Type: text/plain", *lines, body=b"secret"))
        found = await scene.ask("api", method="GET")
        assert (found.status, found.code) == (502, "reply-bad")
        assert await scene.noted("reply-cut") != []

    run(play)


def test_a_reply_without_a_body_needs_no_coding() -> None:
    async def play(scene: Scene) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Encoding: x-own\r\nContent-Length: 5\r\n\r\n"
        await answering(scene, head)
        found = await scene.ask("api", method="HEAD")
        assert found.status == 200
        assert scene.kinds() == []

    run(play)


def test_a_second_content_type_hides_no_text() -> None:
    async def play(scene: Scene) -> None:
        types = (b"Content-Type: image/png", b"Content-Type: text/html")
        await answering(scene, reply(*types, body=b"key: " + REAL))
        found = await scene.ask("api", method="GET")
        assert REAL not in found.body
        assert (found.status, found.code) == (502, "reply-bad")
        assert await scene.noted("reply-cut") != []

    run(play)
