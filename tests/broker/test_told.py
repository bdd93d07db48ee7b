"""Every way to fail, and then a search: no answer, event or line of the log tells a secret."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import replace

from aiohttp import web
from support.brokerscene import REAL, Client, Scene, run
from support.canary import Canary
from support.upstreams import App, Asked, Authority, Raw

from agent_box.broker.limits import LIMITS
from agent_box.bus.errors import Reason, Refusal

GIT = 'basic_user = "x"\n[[bindings.code.repos]]\nname = "o/app"\npush = true'
# What an upstream may say that is no good reply.
BAD = (
    *(b"", b"\x00 no http " + REAL, b"HTTP/1.1 200 OK\r\nX-Key: " + REAL + b"\r\n\r\n"),
    b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n" + REAL[:-1],
    b"HTTP/1.1 200 " + REAL + b"\r\nContent-Length: 0\r\n\r\n",
    b"HTTP/1.1 101 " + REAL + b"\r\nUpgrade: " + REAL + b"\r\nConnection: upgrade\r\n\r\n",
    b"HTTP/1.1 302 Found\r\nContent-Length: 0\r\nLocation: /?" + b64encode(REAL) + b"\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"%x\r\n%s\r\n%s\r\n" % (len(REAL), REAL, REAL),
    b"HTTP/1.1 200 OK\r\nContent-Encoding: " + REAL + b"\r\nContent-Length: 1\r\n\r\nx",
)


def requests(nonce: str) -> Iterator[bytes]:
    """Each refused, with the nonce in each place where it may end up in a text."""
    host, key = "Host: api.broker.internal", f"x-api-key: {nonce}"
    pair = b64encode(f"x:{nonce}".encode()).decode()
    for lines in (
        ("GET /v1/x HTTP/1.1", host),
        ("GET /v1/x HTTP/1.1", host, f"{key}x"),
        ("GET /v1/x HTTP/1.1", host, f"Authorization: Basic {pair}"),
        (f"GET /{nonce} HTTP/1.1", host, key),
        (f"GET /v1/../{nonce} HTTP/1.1", host, key),
        (f"GET /v1/%2e%2e/{nonce} HTTP/1.1", host, key),
        (f"PATCH /v1/{nonce} HTTP/1.1", host, key),
        ("GET /v1/x HTTP/1.1", f"Host: {nonce}.broker.internal", key),
        ("GET /v1/x HTTP/1.1", host, f"Host: {nonce}", key),
        (f"GET http://{nonce}/v1/x HTTP/1.1", host, key),
        ("GET /v1/x HTTP/1.0", host, key),
        (f"GET /v1/x {nonce}", host, key),
        (f"{nonce} /v1/x HTTP/1.1", host, key),
        ("GET /v1/x HTTP/1.1", host, key, f"Upgrade: {nonce}", "Connection: upgrade"),
        ("GET /v1/x HTTP/1.1", host, key, f"Expect: {nonce}"),
        ("GET /v1/x HTTP/1.1", host, key, f"Connection: {nonce}", "X: a\r\n b"),
        ("POST /v1/x HTTP/1.1", host, key, f"Content-Length: {nonce}"),
        ("POST /v1/x HTTP/1.1", host, key, f"Transfer-Encoding: {nonce}"),
        ("GET /o/app.git/info/refs?service=git-upload-pack HTTP/1.1", host, key),
    ):
        yield "\r\n".join([*lines, "", ""]).encode()
    chunked = f"POST /v1/x HTTP/1.1\r\n{host}\r\n{key}\r\nTransfer-Encoding: chunked\r\n\r\n"
    yield f"{chunked}{nonce}\r\n".encode()


def test_no_way_to_fail_tells_credential_or_nonce() -> None:
    async def play(scene: Scene) -> None:
        told: list[bytes] = []

        async def said(data: bytes) -> None:
            told.append(await scene.talk(data, eof=True))

        async def asked() -> None:
            client = Client(*await scene.connect())
            reply = await client.ask("POST", "/v1/x", scene.headers("api"), b"{}")
            told.append(repr(reply).encode())
            client.close()

        async def fine(request: web.Request, _: Asked) -> web.StreamResponse:
            return web.json_response({"ok": True})

        upstream = await App(answer=fine).start(scene.authority.server())
        stranger = await App(answer=fine).start(Authority().server())
        for app in (upstream, stranger):
            scene.closing(app.stop)
        scene.bind("code", upstream.port, "git-basic", more=GIT, routes=None)
        scene.bind("api", upstream.port, more="max_requests = 1")
        await scene.up()
        nonces = [scene.nonce("api"), scene.nonce("code")]
        for data in requests(nonces[0]):
            await said(data)
        assert upstream.asked == [] and len(told) == 20
        for _ in range(2):
            await asked()  # the second is over the budget
        for reason in (Reason.UNAVAILABLE, Reason.STORE_LOCKED):
            scene.store.down = Refusal(reason, f"no {REAL.decode()}")
            scene.bind("api", upstream.port)
            await scene.up()
            await asked()
        scene.store.down = None
        scene.store.values["api-key"] = REAL + b"\r\nX: " + REAL
        await asked()
        del scene.store.values["api-key"]
        await asked()
        scene.bind("api", stranger.port)
        await scene.up()
        nonces.append(scene.nonce("api"))
        await asked()
        scene.bind("api", 1)
        await scene.up()
        nonces.append(scene.nonce("api"))
        await asked()
        for bad in BAD:

            async def serve(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, bad: bytes = bad
            ) -> None:
                await reader.readuntil(b"\r\n\r\n")
                writer.write(bad)
                await writer.drain()

            server = await Raw(serve).start(scene.authority.server())
            scene.closing(server.stop)
            scene.bind("api", server.port)
            await scene.up()
            nonces.append(scene.nonce("api"))
            await asked()
        assert await scene.broker._notes.flush(10)
        told.append(repr([note.facts for note in scene.registry.notes]).encode())
        told.append(repr(scene.log.lines).encode())
        everything = b"\n".join(told)
        real = Canary(REAL)
        assert real.within(everything) == []
        assert real.within(everything + REAL) != []
        for nonce in nonces:
            canary = Canary(nonce.encode())
            del canary.forms["its beginning"]  # all begin alike
            assert canary.within(everything) == []
        assert {"nonce-refused", "request-refused", "reply-cut"} <= set(scene.kinds())

    run(play, replace(LIMITS, idle_s=2.0, answer_s=2.0))
