"""An ambiguous request is refused, and any other is one and the same for all who read it.

The corpus goes through the broker to three parsers that are not ours: nginx, aiohttp behind
it, and h11. After each request that is accepted comes a last one, so that whoever finds
another end of a body sees other requests.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import h11
import pytest
from support.brokerscene import REAL, Scene, run
from support.nginx import FOUND, Nginx
from support.upstreams import App, Raw

from agent_box.broker.head import Head, end, parse

CORPUS = json.loads((Path(__file__).parent / "corpus" / "requests.json").read_text())
LAST = "/v1/last"
Seen = tuple[str, str, bytes]


class ByH11:
    """An upstream that reads by h11 alone, and remembers."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.raw = Raw(self._serve)

    async def _serve(self, reader, writer) -> None:  # type: ignore[no-untyped-def]
        machine = h11.Connection(h11.SERVER)
        method, target, body = "", "", bytearray()
        while True:
            event = machine.next_event()
            if event is h11.NEED_DATA:
                data = await reader.read(65536)
                machine.receive_data(data)
                if machine.they_are_waiting_for_100_continue:
                    go = h11.InformationalResponse(status_code=100, headers=[])
                    writer.write(machine.send(go))
            elif isinstance(event, h11.Request):
                method, target = event.method.decode(), event.target.decode()
                assert [v for n, v in event.headers if n == b"x-api-key"] == [REAL]
                body.clear()
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                self.seen.append((method, target, bytes(body)))
                answer = h11.Response(status_code=200, headers=[("content-length", "2")])
                writer.write(machine.send(answer) or b"")
                writer.write(machine.send(h11.Data(data=b"ok")) or b"")
                writer.write(machine.send(h11.EndOfMessage()) or b"")
                await writer.drain()
                if machine.our_state is h11.MUST_CLOSE:
                    return
                machine.start_next_cycle()
            else:
                return  # closed, and nothing half sent


def keyed(raw: bytes, nonce: str, host: str) -> bytes:
    """The request as it is, with this binding's nonce and host in it."""
    raw = raw.replace(b"anthropic.broker.internal", f"{host}.broker.internal".encode())
    line = f"x-api-key: {nonce}\r\n".encode()
    first, mark, rest = raw.partition(b" HTTP/1.1\r\n")
    parts = [first + mark + line + rest] if mark else [raw]
    # two in a row
    return (
        parts[0]
        .replace(b"\r\n\r\nGET /v1", b"\r\n\r\nGET /v1")
        .replace(b"?second HTTP/1.1\r\n", b"?second HTTP/1.1\r\n" + line)
    )


def expected(raw: bytes) -> list[Seen]:
    """What one strict reader sees in a request of the corpus that is accepted."""
    found: list[Seen] = []
    rest = raw
    while rest:
        length = end(rest)
        assert length is not None
        head = parse(rest[:length], 1)
        assert isinstance(head, Head)
        machine = h11.Connection(h11.SERVER)
        machine.receive_data(rest)
        body = b""
        while not isinstance(event := machine.next_event(), h11.EndOfMessage):
            body += bytes(event.data) if isinstance(event, h11.Data) else b""
        query = b"" if head.target.query is None else b"?" + head.target.query
        found.append((head.method, (head.target.encoded() + query).decode(), body))
        rest = machine.trailing_data[0]
    return found


async def upstreams(scene: Scene) -> tuple[App, ByH11]:
    """Bindings `nginx` and `eleven`."""
    behind = await App().start(None)
    nginx = await Nginx(scene.root / "nginx", scene.authority, behind.port).start()
    eleven = ByH11()
    await eleven.raw.start(scene.authority.server())
    for stop in (nginx.stop, behind.stop, eleven.raw.stop):
        scene.closing(stop)
    scene.bind("nginx", nginx.port)
    scene.bind("eleven", eleven.raw.port)
    await scene.up()
    return behind, eleven


needs_nginx = pytest.mark.skipif(FOUND is None, reason="nginx is not installed")


@needs_nginx
def test_what_is_accepted_is_the_same_for_all() -> None:
    async def play(scene: Scene) -> None:
        behind, eleven = await upstreams(scene)
        for case in CORPUS["accepted"]:
            if case["name"] == "websocket":
                continue  # the bindings do not allow it
            raw = case["bytes"].encode("latin-1")
            closes = b"close" in raw
            wanted = expected(raw) + ([] if closes else [("GET", LAST, b"")])
            behind.asked.clear()
            eleven.seen.clear()
            for binding in ("nginx", "eleven"):
                nonce = scene.nonce(binding)
                last = (
                    f"GET {LAST} HTTP/1.1\r\nHost: {binding}.broker.internal\r\n"
                    f"x-api-key: {nonce}\r\nConnection: close\r\n\r\n"
                )
                whole = keyed(raw, nonce, binding) + (b"" if closes else last.encode())
                said = await scene.talk(whole)
                assert said.count(b"HTTP/1.1 200") == len(wanted), (case["name"], said)
            through = [(asked.method, asked.target, asked.body) for asked in behind.asked]
            assert through == wanted, case["name"]
            assert eleven.seen == wanted, case["name"]
            assert all(asked.get("x-api-key") == [REAL.decode()] for asked in behind.asked)

    run(play)


@needs_nginx
def test_what_is_refused_reaches_nobody() -> None:
    async def play(scene: Scene) -> None:
        behind, eleven = await upstreams(scene)
        for case in CORPUS["refused"]:
            if case["why"] == "never-ends":
                continue  # refused when its time is up
            raw = case["bytes"].encode("latin-1")
            for binding in ("nginx", "eleven"):
                reader, writer = await scene.connect()
                writer.write(keyed(raw, scene.nonce(binding), binding))
                said = await asyncio.wait_for(reader.readuntil(b"\r\n"), 60)
                assert said.startswith((b"HTTP/1.1 4", b"HTTP/1.1 5")), case
                writer.transport.abort()
            assert (behind.asked, eleven.seen) == ([], []), case["name"]
        assert eleven.raw.connections == 0
        assert "nonce-refused" not in scene.kinds()

    run(play)
