"""A hostile guest on the real socket: refused, and the upstream sees nothing of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from support.brokerscene import REAL, Client, Scene, run, secrets_in
from support.upstreams import App, Raw

from agent_box.broker.limits import LIMITS


async def up(scene: Scene) -> App:
    made = await App().start(scene.authority.server())
    scene.closing(made.stop)
    scene.bind(
        "api",
        made.port,
        routes=(
            ("/v1/messages", "exact", ("POST", "GET")),
            ("/v1/files/", "prefix", ("GET",)),
            ("/v1/models/{model}", "template", ("GET",)),
        ),
    )
    scene.bind("code", made.port, "git-basic", more=_GIT, routes=None)
    await scene.up()
    return made


_GIT = 'basic_user = "x"\n[[bindings.code.repos]]\nname = "o/app"\npush = true'


GET = "GET /v1/messages HTTP/1.1"
POST = "POST /v1/messages HTTP/1.1"
TE = "Transfer-Encoding: chunked"


def heads(host: str, key: str) -> dict[str, bytes]:
    """Heads that no parser may be left to guess about, each with the right nonce."""
    h, k = f"Host: {host}", f"x-api-key: {key}"

    def made(start: str, *lines: str, body: str = "", end: str = "\r\n") -> bytes:
        return (end.join([start, *lines]) + end + end + body).encode("latin-1")

    return {
        "absolute form": made(f"GET http://{host}/v1/messages HTTP/1.1", h, k),
        "authority form": made(f"CONNECT {host}:80 HTTP/1.1", h, k),
        "asterisk": made("OPTIONS * HTTP/1.1", h, k),
        "no host": made(GET, k),
        "two hosts": made(GET, h, h, k),
        "host of a list": made(GET, f"{h}, x", k),
        "other host": made(GET, "Host: localhost", k),
        "host with user": made(GET, f"Host: a@{host}", k),
        "host with another port": made(GET, f"{h}:443", k),
        "space before the colon": made(GET, f"Host : {host}", k),
        "folded": made(GET, h, k, "X: a\r\n b"),
        "folded host": made(GET, f"Host:\r\n {host}", k),
        "bare lf": made(GET, h, k, end="\n"),
        "bare lf inside": made(GET, h, k, "X: a\nY: b"),
        "bare cr": made(GET, h, k, "X: a\rY: b"),
        "nul": made(GET, h, k, "X: a\0b"),
        "nul in the path": made("GET /v1/mess\0ages HTTP/1.1", h, k),
        "version 1.0": made("GET /v1/messages HTTP/1.0", h, k),
        "version 2": made("GET /v1/messages HTTP/2.0", h, k),
        "no version": made("GET /v1/messages", h, k),
        "lower case method": made("get /v1/messages HTTP/1.1", h, k),
        "tabs": made("GET\t/v1/messages\tHTTP/1.1", h, k),
        "two spaces": made("GET  /v1/messages HTTP/1.1", h, k),
        "empty line first": made("\r\n" + GET, h, k),
        "http2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "cl and te": made(POST, h, k, "Content-Length: 4", TE, body="0\r\n\r\n"),
        "two cl": made(POST, h, k, "Content-Length: 1", "Content-Length: 2", body="xx"),
        "two equal cl": made(POST, h, k, "Content-Length: 1", "Content-Length: 1", body="x"),
        "cl list": made(POST, h, k, "Content-Length: 1, 1", body="x"),
        "cl plus": made(POST, h, k, "Content-Length: +1", body="x"),
        "cl hex": made(POST, h, k, "Content-Length: 0x1", body="x"),
        "cl negative": made(POST, h, k, "Content-Length: -1", body="x"),
        "te te": made(POST, h, k, TE, "Transfer-Encoding: identity", body="0\r\n\r\n"),
        "te identity": made(POST, h, k, "Transfer-Encoding: identity"),
        "te list": made(POST, h, k, "Transfer-Encoding: gzip, chunked", body="0\r\n\r\n"),
        "te vertical tab": made(POST, h, k, "Transfer-Encoding: \x0bchunked", body="0\r\n\r\n"),
        "te with space": made(POST, h, k, "Transfer-Encoding : chunked", body="0\r\n\r\n"),
        "te underscore": made(POST, h, k, "Transfer_Encoding: chunked", "Content-Length: 0"),
        "many headers": made(GET, h, k, *["X: y"] * 500),
        "huge header": made(GET, h, k, "X: " + "a" * 40_000),
        "huge head": made(GET, h, k, "X: " + "a" * 200_000),
        "upgrade to h2c": made(GET, h, k, "Upgrade: h2c", "Connection: Upgrade"),
        "upgrade without connection": made(GET, h, k, "Upgrade: websocket"),
        "connection names the key": made(GET, h, k, "Connection: x-api-key"),
        "trace": made("TRACE /v1/messages HTTP/1.1", h, k),
        "expect more": made(POST, h, k, "Expect: 200-maybe", "Content-Length: 0"),
    }


def test_no_ambiguous_head_is_forwarded() -> None:
    async def play(scene: Scene) -> None:
        upstream = await up(scene)
        for name, data in heads("api.broker.internal", scene.nonce("api")).items():
            answer = await scene.talk(data, eof=True)
            status = answer.split(b" ", 2)[1:2]
            assert status and status[0][:1] in (b"4", b"5"), name
            assert secrets_in(answer) == [] and b"sk-agentbox" not in answer, name
            assert upstream.asked == [], name
        assert scene.store.asked == 0
        for note in scene.registry.notes:
            assert set(note.facts) <= {"reason", "count", "binding", "route"}

    run(play)


PATHS = (
    *("/v1/messages/", "/v1//messages", "//v1/messages", "/v1/./messages", "/v1/x/../messages"),
    *("/v1/%2e%2e/v1/messages", "/v1/%2E/messages", "/v1%2fmessages", "/v1%2Fmessages"),
    *("/v1/messages;x=1", "/v1/messages%3bx", "/v1\\messages", "/v1/%5cmessages"),
    *("/V1/messages", "/v1/Messages", "/v1/messages%00", "/v1/messages%0d%0aX:%20y"),
    *("/v1/%c0%ae%c0%ae/messages", "/v1/messages%c0%af", "/v1/%252e%252e/messages"),
    *("/v1/files/../messages", "/v1/files/%2e%2e/%2e%2e/admin", "/v1/filesx/a"),
    *("/v1/files/..%2fadmin", "/v1/files/a/..;/b", "/v1/files/%2e%2e%5cadmin"),
    *("/v1/models/", "/v1/models/a/b", "/v1/models/a%2fb", "/v1/models/..", "/v1/models/%2e"),
    *("/admin", "/", "/v1", "v1/messages", "/v1/messages#x", "/v1/messages?%zz", "/v1/mess ages"),
)


def test_no_path_game_is_forwarded() -> None:
    async def play(scene: Scene) -> None:
        upstream = await up(scene)
        good = f"Host: api.broker.internal\r\nx-api-key: {scene.nonce('api')}\r\n"
        for path in PATHS:
            answer = await scene.talk(
                f"GET {path} HTTP/1.1\r\n{good}Connection: close\r\n\r\n".encode()
            )
            assert answer.split(b" ", 2)[1][:1] == b"4", path
            assert upstream.asked == [], path
        for path in ("/v1/messages", "/v1/files/a/b", "/v1/models/a%20b"):
            assert (await scene.ask("api", path, method="GET")).status == 200
        assert [asked.target for asked in upstream.asked] == [
            "/v1/messages",
            "/v1/files/a/b",
            "/v1/models/a%20b",
        ]

    run(play)


def test_a_request_that_is_hidden_in_a_body_stays_a_body() -> None:
    async def play(scene: Scene) -> None:
        upstream = await up(scene)
        good = f"Host: api.broker.internal\r\nx-api-key: {scene.nonce('api')}\r\n"
        hidden = f"GET /v1/files/stolen HTTP/1.1\r\n{good}\r\n".encode()
        start = f"{POST}\r\n{good}Connection: close\r\n"
        length = f"{start}Content-Length: {len(hidden)}\r\n\r\n"
        await scene.talk(length.encode() + hidden)
        size = f"{len(hidden):x}\r\n".encode()
        await scene.talk(f"{start}{TE}\r\n\r\n".encode() + size + hidden + b"\r\n0\r\n\r\n")
        assert [(a.target, a.body) for a in upstream.asked] == [("/v1/messages", hidden)] * 2

    run(play)


@pytest.mark.parametrize(
    "body",
    [
        b"5\r\nab\r\n0\r\n\r\n",  # more than there is
        b"2\nab\r\n0\r\n\r\n",
        b"0x2\r\nab\r\n0\r\n\r\n",
        b"-2\r\nab\r\n0\r\n\r\n",
        b"2\r\nabX\r\n0\r\n\r\n",  # no end of the chunk
        b"fffffffffffffffffffff\r\nab\r\n",
        b"zz\r\n",
    ],
)
def test_a_chunk_that_is_none_is_refused_and_not_completed_upstream(body: bytes) -> None:
    async def play(scene: Scene) -> None:
        upstream = await up(scene)
        good = f"Host: api.broker.internal\r\nx-api-key: {scene.nonce('api')}\r\n"
        head = f"POST /v1/messages HTTP/1.1\r\n{good}Transfer-Encoding: chunked\r\n\r\n"
        reader, writer = await scene.connect()
        writer.write(head.encode() + body)
        writer.write_eof()
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        assert answer == b"" or answer.split(b" ", 2)[1] == b"400"
        assert all(asked.body == b"" for asked in upstream.asked)

    run(play)


def test_slow_heads_are_cut_off_and_cost_nobody_else() -> None:
    async def play(scene: Scene) -> None:
        await up(scene)
        slow = [await scene.connect() for _ in range(100)]
        for _, writer in slow:
            writer.write(b"GET /v1/messages HTTP/1.1\r\nHost: api")
        assert (await scene.ask("api", body=b"{}")).status == 200
        for reader, writer in slow:
            answer = await asyncio.wait_for(reader.read(), 30)
            assert answer.split(b" ", 2)[1] == b"408"
            writer.close()

    run(play, replace(LIMITS, head_s=0.5))


def test_a_guest_has_so_many_connections_and_no_more() -> None:
    async def play(scene: Scene) -> None:
        await up(scene)
        held = [Client(*await scene.connect()) for _ in range(4)]
        for client in held:
            assert (
                await client.ask("POST", "/v1/messages", scene.headers("api"), b"{}")
            ).status == 200
        assert await scene.talk(b"GET / HTTP/1.1\r\n\r\n") == b""
        for client in held:
            client.close()

    run(play, replace(LIMITS, connections=4))


def test_a_hundred_thousand_refusals_are_a_handful_of_events() -> None:
    async def play(scene: Scene) -> None:
        await up(scene)
        client = Client(*await scene.connect())
        for number in range(500):
            reply = await client.ask("GET", f"/secret-{number}", scene.headers("api"))
            assert reply.status == 404
        client.close()
        facts = await scene.noted("request-refused")
        assert len(facts) == 1 and "secret" not in repr(facts)
        await scene.end()
        assert sum(int(note.facts["count"]) for note in scene.registry.notes) == 500
        await scene.begin()

    run(play)


def test_nothing_of_a_bad_request_is_told() -> None:
    async def play(scene: Scene) -> None:
        await up(scene)
        nonce = scene.nonce("api")
        marks = ("canary-path", "canary-header", "canary-query", "canary-host")
        own = f"Host: api.broker.internal\r\nx-api-key: {nonce}"
        for raw in (
            f"GET /{marks[0]} HTTP/1.1\r\n{own}",
            f"GET /v1/messages?{marks[2]} HTTP/1.1\r\nHost: api.broker.internal\r\nx: {marks[1]}",
            f"GET / HTTP/1.1\r\nHost: {marks[3]}\r\nx-api-key: {nonce}",
            f"BAD{marks[1]} / HTTP/1.1",
        ):
            answer = await scene.talk(raw.encode() + b"\r\n\r\n", eof=True)
            told = answer + repr(scene.registry.notes).encode() + repr(scene.log.lines).encode()
            assert b"canary" not in told and nonce.encode() not in told
            assert REAL not in told

    run(play)


# ------------------------------------------------------------------ upgrades

SECOND = "GET /admin HTTP/1.1"


async def switching(scene: Scene, answer: bytes) -> tuple[Raw, bytearray]:
    """An upstream that answers an upgrade so, and what it is sent after the head."""
    after = bytearray()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.head(reader)
        writer.write(answer)
        await writer.drain()
        while data := await reader.read(1000):
            after.extend(data)

    server = await Raw(serve).start(scene.authority.server())
    scene.closing(server.stop)
    scene.bind("api", server.port, more="upgrade = true", routes=(("/v1/ws", "exact", ("GET",)),))
    await scene.up()
    return server, after


def _upgrade(scene: Scene) -> tuple[bytes, bytes]:
    """The head of an upgrade, and a request that would be refused, sent right behind it."""
    own = "".join(f"{name}: {value}\r\n" for name, value in scene.headers("api"))
    ask = f"GET /v1/ws HTTP/1.1\r\n{own}Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
    return ask.encode(), f"{SECOND}\r\n{own}Connection: close\r\n\r\n".encode()


@pytest.mark.parametrize("status", ["200 OK", "403 Forbidden", "426 Upgrade Required"])
def test_an_upgrade_that_is_declined_opens_no_tunnel(status: str) -> None:
    """What follows is the next request, and judged as one (a known way to smuggle)."""

    async def play(scene: Scene) -> None:
        answer = f"HTTP/1.1 {status}\r\nContent-Length: 2\r\n\r\nno".encode()
        server, after = await switching(scene, answer)
        said = await scene.talk(b"".join(_upgrade(scene)))
        assert said.startswith(f"HTTP/1.1 {status[:3]}".encode())
        assert said.count(b"HTTP/1.1 404") == 1
        assert (len(server.heads), bytes(after)) == (1, b"")

    run(play)


@pytest.mark.parametrize(
    "lines",
    [
        b"Upgrade: h2c\r\nConnection: upgrade\r\n",
        b"Upgrade: websocket, h2c\r\nConnection: upgrade\r\n",
        b"Upgrade: websocket\r\n",
        b"Connection: upgrade\r\n",
        b"",
    ],
)
def test_an_upgrade_to_something_else_is_refused(lines: bytes) -> None:
    async def play(scene: Scene) -> None:
        answer = b"HTTP/1.1 101 Switching Protocols\r\n" + lines + b"\r\n"
        server, after = await switching(scene, answer)
        said = await scene.talk(b"".join(_upgrade(scene)))
        assert b" 101 " not in said and said.startswith(b"HTTP/1.1 502")
        assert (len(server.heads), bytes(after)) == (1, b"")

    run(play)


def test_nothing_is_tunnelled_before_the_upstream_agreed() -> None:
    async def play(scene: Scene) -> None:
        agreed = asyncio.Event()
        early: list[bytes] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.head(reader)
            try:
                early.append(await asyncio.wait_for(reader.read(1000), 0.5))
            except TimeoutError:
                early.append(b"")
            writer.write(
                b"HTTP/1.1 101 Switching Protocols\r\n"
                b"Upgrade: websocket\r\nConnection: upgrade\r\n\r\nhello"
            )
            early.append(await reader.read(1000))
            agreed.set()

        server = await Raw(serve).start(scene.authority.server())
        scene.closing(server.stop)
        scene.bind("api", server.port, more="upgrade = true")
        await scene.up()
        ask, _ = _upgrade(scene)
        reader, writer = await scene.connect()
        writer.write(ask + b"frame")
        await asyncio.wait_for(reader.readuntil(b"hello"), 20)
        await asyncio.wait_for(agreed.wait(), 20)
        assert early == [b"", b"frame"]
        writer.close()

    run(play)


def test_the_credential_in_an_upgraded_connection_is_cut() -> None:
    async def play(scene: Scene) -> None:
        answer = (
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n"
            b"\r\n\x81\x7e" + REAL
        )
        await switching(scene, answer)
        ask, _ = _upgrade(scene)
        said = await scene.talk(ask)
        assert secrets_in(said) == [] and REAL[:12] not in said
        assert len(await scene.noted("reply-cut")) == 1

    run(play)


# ------------------------------------------------------------------ ahead of the reply


def test_requests_that_are_sent_ahead_without_end_are_held_and_not_kept() -> None:
    """A guest that never reads and always asks: what waits for it is bounded."""

    async def play(scene: Scene) -> None:
        upstream = await up(scene)
        own = "".join(f"{name}: {value}\r\n" for name, value in scene.headers("api"))
        one = f"GET /v1/messages HTTP/1.1\r\n{own}X: {'a' * 4000}\r\n\r\n".encode()
        reader, writer = await scene.connect()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        sent = 0
        try:
            async with asyncio.timeout(3):
                while sent < 40_000:
                    writer.write(one)
                    await writer.drain()
                    sent += 1
        except TimeoutError:
            pass  # it is held
        assert sent < 40_000
        assert (await scene.ask("api", method="GET")).status == 200  # nobody else is
        assert len(upstream.asked) <= sent + 1
        writer.transport.abort()
        reader.feed_eof()

    run(play)
