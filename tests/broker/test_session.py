"""Whole requests through the broker: what is forwarded, and what the upstream then saw."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import os
from collections.abc import Sequence

import pytest
from aiohttp import WSMsgType, web
from support.brokerscene import ID, OTHER, REAL, Client, Scene, run, secrets_in
from support.upstreams import App, Asked, Raw

from agent_box.bus.errors import Reason, Refusal


async def app(scene: Scene, kind: str = "anthropic", more: str = "", **options: object) -> App:
    """An upstream with binding `api`, and the instance up."""
    made = await App(**options).start(scene.authority.server())  # type: ignore[arg-type]
    scene.closing(made.stop)
    scene.bind("api", made.port, kind, more=more)
    await scene.up()
    return made


def injected(upstream: App) -> int:
    """Requests that reached the upstream with the credential."""
    return sum(REAL.decode() in repr(asked) for asked in upstream.asked)


# ------------------------------------------------------------------ what is forwarded


def test_the_upstream_sees_the_real_key_and_the_guest_does_not() -> None:
    async def play(scene: Scene) -> None:
        upstream = await app(scene)
        nonce = scene.nonce("api")
        reply = await scene.ask("api", body=b'{"hello": 1}', more=[("X-Own", "kept")])
        assert (reply.status, reply.json(), reply.complete) == (200, {"ok": True}, True)
        (asked,) = upstream.asked
        assert (asked.method, asked.target, asked.body) == ("POST", "/v1/messages", b'{"hello": 1}')
        assert asked.get("x-api-key") == [REAL.decode()]
        assert asked.get("x-own") == ["kept"]
        assert asked.get("host") == [f"localhost:{upstream.port}"]
        assert nonce not in repr(asked)
        assert secrets_in(repr(reply).encode(), repr(scene.log.lines).encode()) == []
        used = scene.used()["api"]
        assert (used["requests"], used["refused"], used["bytes_up"]) == (1, 0, 12)
        assert used["bytes_down"] == len(reply.body)

    run(play)


@pytest.mark.parametrize(
    ("kind", "more", "sent", "seen"),
    [
        ("openai", "", ("Authorization", "Bearer {}"), ("authorization", "Bearer {}")),
        ("google", "", ("x-goog-api-key", "{}"), ("x-goog-api-key", "{}")),
        ("header", 'header = "x-secret"', ("X-Secret", "{}"), ("x-secret", "{}")),
        ("anthropic", "", ("Authorization", "Bearer {}"), ("x-api-key", "{}")),
    ],
)
def test_each_kind_puts_the_credential_where_it_belongs(
    kind: str, more: str, sent: tuple[str, str], seen: tuple[str, str]
) -> None:
    async def play(scene: Scene) -> None:
        upstream = await app(scene, kind, more)
        host = ("Host", "api.broker.internal")
        nonce = (sent[0], sent[1].format(scene.nonce("api")))
        reply = await scene.ask("api", headers=[host, nonce], body=b"{}")
        assert reply.status == 200
        assert upstream.asked[0].get(seen[0]) == [seen[1].format(REAL.decode())]
        assert injected(upstream) == 1
        assert scene.nonce("api") not in repr(upstream.asked)

    run(play)


def test_the_query_kind_replaces_the_parameter() -> None:
    async def play(scene: Scene) -> None:
        upstream = await app(scene, "query", 'query = "token"')
        target = f"/v1/x?a=1&token={scene.nonce('api')}&b=2"
        reply = await scene.ask(
            "api", target, method="GET", headers=[("Host", "api.broker.internal")]
        )
        assert reply.status == 200
        assert upstream.asked[0].target == f"/v1/x?a=1&b=2&token={REAL.decode()}"

    run(play)


def test_what_the_guest_says_of_itself_is_stripped_in_any_case() -> None:
    async def play(scene: Scene) -> None:
        upstream = await app(scene)
        nonce = scene.nonce("api")
        more = [
            ("AUTHORIZATION", "Bearer mine"),
            ("authorization", f"Bearer {nonce}"),
            ("X-Api-Key", "another"),
            ("Proxy-Authorization", "Basic eDp5"),
            ("Cookie", "session=1"),
            ("X-Forwarded-For", "10.0.0.1"),
        ]
        assert (await scene.ask("api", more=more, body=b"{}")).status == 200
        (asked,) = upstream.asked
        assert asked.get("x-api-key") == [REAL.decode()]
        for name in ("authorization", "proxy-authorization", "cookie", "x-forwarded-for"):
            assert asked.get(name) == []
        assert nonce not in repr(asked)

    run(play)


def test_the_text_of_the_nonce_in_a_body_is_data() -> None:
    async def play(scene: Scene) -> None:
        upstream = await app(scene)
        body = f'{{"key": "{scene.nonce("api")}"}}'.encode()
        client = Client(*await scene.connect())
        for _ in range(2):
            reply = await client.ask("POST", "/v1/messages", scene.headers("api"), body)
            assert reply.status == 200
        client.close()
        assert [asked.body for asked in upstream.asked] == [body, body]

    run(play)


def test_a_chunked_body_passes_byte_for_byte() -> None:
    async def play(scene: Scene) -> None:
        upstream = await app(scene)
        parts = [os.urandom(n) for n in (1, 70_000, 3, 200_000)]
        reply = await scene.ask("api", body=parts)
        assert reply.status == 200
        (asked,) = upstream.asked
        assert asked.body == b"".join(parts)
        assert asked.get("content-length") == []

    run(play)


def test_100_continue_and_103_are_not_the_answer() -> None:
    async def play(scene: Scene) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.head(reader)
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            assert await reader.readexactly(4) == b"body"
            writer.write(b"HTTP/1.1 103 Early Hints\r\nLink: </x>; rel=preload\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
            await writer.drain()

        server = await Raw(serve).start(scene.authority.server())
        scene.closing(server.stop)
        scene.bind("api", server.port)
        await scene.up()
        reply = await scene.ask("api", body=b"body", more=[("Expect", "100-continue")])
        assert (reply.status, reply.body, reply.informational) == (200, b"ok", [100, 103])

    run(play)


def test_trailers_pass_in_both_directions() -> None:
    async def play(scene: Scene) -> None:
        got: list[bytes] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.head(reader)
            got.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(
                b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X-Sum\r\n\r\n"
                b"2\r\nok\r\n0\r\nX-Sum: 7\r\n\r\n"
            )
            await writer.drain()

        server = await Raw(serve).start(scene.authority.server())
        scene.closing(server.stop)
        scene.bind("api", server.port)
        await scene.up()
        head = "".join(f"{n}: {v}\r\n" for n, v in scene.headers("api"))
        raw = (
            f"POST /v1/x HTTP/1.1\r\n{head}Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
        )
        answer = await scene.talk(
            raw.encode() + b"1\r\nA\r\n0\r\nX-Mine: 1\r\nx-api-key: no\r\n\r\n"
        )
        assert b"x-sum: 7\r\n" in answer.lower()
        assert b"x-mine: 1" in got[0].lower() and b"x-api-key" not in got[0].lower()

    run(play)


def test_sse_events_come_one_by_one() -> None:
    async def play(scene: Scene) -> None:
        async def answer(request: web.Request, asked: Asked) -> web.StreamResponse:
            reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await reply.prepare(request)
            for number in range(4):
                await reply.write(f"data: {number}\n\n".encode())
                await step.acquire()  # the next is sent when the guest has this one
            return reply

        step = asyncio.Semaphore(0)
        await app(scene, answer=answer)
        client = Client(*await scene.connect())
        await client.send("POST", "/v1/messages", scene.headers("api"), b"{}")
        for number in range(4):
            while not isinstance(event := await client.next(), _data()):
                pass
            assert bytes(event.data) == f"data: {number}\n\n".encode()
            step.release()
        client.close()

    run(play)


def _data() -> type:
    import h11

    return h11.Data


def test_sixty_gzip_replies_at_once_are_equal_to_their_hashes() -> None:
    async def play(scene: Scene) -> None:
        texts = {n: os.urandom(20_000).hex().encode() for n in range(60)}

        async def answer(request: web.Request, asked: Asked) -> web.StreamResponse:
            packed = gzip.compress(texts[int(request.query["n"])], 1)
            return web.Response(
                body=packed, headers={"Content-Encoding": "gzip", "Content-Type": "text/plain"}
            )

        await app(scene, answer=answer)
        replies = await asyncio.gather(
            *(scene.ask("api", f"/v1/x?n={n}", method="GET") for n in texts)
        )
        for number, reply in enumerate(replies):
            assert reply.headers["content-encoding"] == "gzip"
            assert gzip.decompress(reply.body) == texts[number]

    run(play)


def test_keep_alive_serves_many_and_each_is_asked_for_anew() -> None:
    async def play(scene: Scene) -> None:
        upstream = await app(scene)
        client = Client(*await scene.connect())
        for number in range(20):
            scene.store.values["api-key"] = b"sk-version-%d" % number
            reply = await client.ask("POST", "/v1/messages", scene.headers("api"), b"{}")
            assert reply.status == 200
        client.close()
        assert [a.get("x-api-key") for a in upstream.asked] == [
            [f"sk-version-{n}"] for n in range(20)
        ]
        assert scene.store.asked == 20

    run(play)


def test_pipelined_requests_are_judged_one_by_one() -> None:
    async def play(scene: Scene) -> None:
        upstream = await app(scene)
        head = "".join(f"{n}: {v}\r\n" for n, v in scene.headers("api"))
        good = f"GET /v1/a HTTP/1.1\r\n{head}\r\n".encode()
        bad = good.replace(b"/v1/a", b"/admin")
        last = good.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
        answer = await scene.talk(good + bad + last)
        assert answer.count(b"HTTP/1.1 200") == 2 and answer.count(b"HTTP/1.1 404") == 1
        assert [asked.target for asked in upstream.asked] == ["/v1/a", "/v1/a"]

    run(play)


def test_a_redirect_is_handed_on_and_not_followed() -> None:
    async def play(scene: Scene) -> None:
        async def answer(request: web.Request, asked: Asked) -> web.StreamResponse:
            return web.Response(status=307, headers={"Location": f"https://localhost:{port}/v1/b"})

        upstream = await app(scene, answer=answer)
        port = upstream.port
        reply = await scene.ask("api", body=b"{}")
        assert (reply.status, len(upstream.asked)) == (307, 1)

    run(play)


def test_head_has_a_length_and_no_body() -> None:
    async def play(scene: Scene) -> None:
        async def answer(request: web.Request, asked: Asked) -> web.StreamResponse:
            return web.Response(body=b"x" * 1000)

        await app(scene, answer=answer)
        client = Client(*await scene.connect())
        for _ in range(2):
            reply = await client.ask("HEAD", "/v1/messages", scene.headers("api"))
            assert (reply.status, reply.headers["content-length"], reply.body) == (200, "1000", b"")
            assert reply.complete
        client.close()
        reply = await scene.ask("api", "/", method="HEAD")
        assert (reply.status, reply.body) == (404, b"")

    run(play)


def test_websocket_where_the_binding_allows_it() -> None:
    async def answer(request: web.Request, asked: Asked) -> web.StreamResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        async for message in socket:
            if message.type is WSMsgType.TEXT:
                await socket.send_str(message.data.upper())
        return socket

    async def play(scene: Scene) -> None:
        import aiohttp

        upstream = await app(scene, more="upgrade = true", answer=answer, read_body=False)
        connector = aiohttp.UnixConnector(path=str(scene.sock()))
        async with aiohttp.ClientSession(connector=connector) as session:
            headers = {"x-api-key": scene.nonce("api")}
            async with session.ws_connect(
                "http://api.broker.internal/v1/socket", headers=headers
            ) as socket:
                for text in ("one", "two" * 30_000):
                    await socket.send_str(text)
                    assert await socket.receive_str() == text.upper()
        assert upstream.asked[0].get("x-api-key") == [REAL.decode()]

    run(play)


def test_an_upgrade_is_refused_where_it_is_not_allowed() -> None:
    async def play(scene: Scene) -> None:
        upstream = await app(scene)
        more = [("Upgrade", "websocket"), ("Connection", "Upgrade")]
        reply = await scene.ask("api", "/v1/socket", method="GET", more=more)
        assert (reply.status, reply.code, upstream.asked) == (403, "upgrade", [])
        (facts,) = await scene.noted("request-refused")
        assert facts == {"reason": "upgrade", "count": 1, "binding": "api"}

    run(play)


# ------------------------------------------------------------------ what is refused


def test_without_the_right_nonce_nothing_is_connected() -> None:
    async def play(scene: Scene) -> None:
        upstream = await app(scene)
        scene.bind("second", upstream.port)
        await scene.up()
        await scene.up(instance=OTHER, name="other")
        stale = scene.nonce("api")
        await scene.up()
        host = ("Host", "api.broker.internal")
        wrong: list[Sequence[tuple[str, str]]] = [
            [host],
            [host, ("x-api-key", "")],
            [host, ("x-api-key", REAL.decode())],
            [host, ("x-api-key", stale)],
            [host, ("x-api-key", scene.nonce("second"))],
            [host, ("x-api-key", scene.nonce("api", OTHER))],
            [host, ("Authorization", f"Basic {scene.nonce('api')}")],
        ]
        for headers in wrong:
            reply = await scene.ask("api", headers=headers, method="GET")
            assert reply.status == 401, headers
        assert (upstream.asked, scene.store.asked) == ([], 0)
        assert len(await scene.noted("nonce-refused")) == 2  # missing, and wrong
        assert scene.used()["api"]["refused"] == len(wrong)

    run(play)


def test_a_nonce_lives_as_long_as_its_boot_and_outlives_the_broker() -> None:
    async def play(scene: Scene) -> None:
        upstream = await app(scene)
        first = scene.headers("api")
        await scene.end()
        await scene.begin()
        assert (await scene.ask("api", headers=first, body=b"{}")).status == 200
        await scene.up()
        assert (await scene.ask("api", headers=first, body=b"{}")).status == 401
        assert (await scene.ask("api", body=b"{}")).status == 200
        await scene.down()
        with pytest.raises(OSError):
            await scene.connect()
        assert len(upstream.asked) == 2
        await scene.end()
        await scene.begin()
        with pytest.raises(OSError):
            await scene.connect()

    run(play)


def test_a_boot_whose_directory_is_gone_is_forgotten() -> None:
    async def play(scene: Scene) -> None:
        await app(scene)
        await scene.end()
        scene.sock().parent.rmdir()
        await scene.begin()
        assert scene.broker._ledger.boots() == []
        assert not scene.sock().parent.exists()

    run(play)


def test_a_boot_keeps_its_bindings_until_the_next_start() -> None:
    async def play(scene: Scene) -> None:
        one = await app(scene)
        two = await App().start(scene.authority.server())
        scene.closing(two.stop)
        scene.bind("api", two.port)
        assert (await scene.ask("api", body=b"{}")).status == 200
        await scene.end()
        await scene.begin()
        assert (await scene.ask("api", body=b"{}")).status == 200
        assert (len(one.asked), len(two.asked)) == (2, 0)
        await scene.up()
        assert (await scene.ask("api", body=b"{}")).status == 200
        assert (len(one.asked), len(two.asked)) == (2, 1)

    run(play)


def test_the_store_down_is_503_and_never_a_forward() -> None:
    async def play(scene: Scene) -> None:
        upstream = await app(scene)
        for reason in (Reason.UNAVAILABLE, Reason.STORE_LOCKED, Reason.TAMPERED, Reason.DEADLINE):
            scene.store.down = Refusal(reason, "no")
            reply = await scene.ask("api", body=b"{}")
            assert (reply.status, reply.code) == (503, "store")
        scene.store.down = None
        del scene.store.values["api-key"]
        reply = await scene.ask("api", body=b"{}")
        assert (reply.status, reply.code) == (503, "credential-missing")
        assert upstream.asked == []
        scene.store.values["api-key"] = b"bad\r\nX: y"
        assert (await scene.ask("api", body=b"{}")).code == "credential-unusable"
        assert upstream.asked == []
        scene.store.values["api-key"] = REAL
        assert (await scene.ask("api", body=b"{}")).status == 200

    run(play)


def test_an_instance_that_stops_while_the_store_is_asked_is_not_served() -> None:
    async def play(scene: Scene) -> None:
        upstream = await app(scene)
        scene.store.wait = asyncio.Event()
        asking = scene.tasks.hold(scene.ask("api", body=b"{}"), name="ask")
        await scene.store.was_asked.wait()
        await scene.down()
        scene.store.wait.set()
        reply = await asking
        assert (reply.complete, upstream.asked) == (False, [])

    run(play)


def test_up_again_for_the_same_boot_changes_nothing() -> None:
    async def play(scene: Scene) -> None:
        await app(scene)
        nonce = scene.nonce("api")
        client = Client(*await scene.connect())
        scene.boot -= 1
        await scene.up()
        assert scene.nonce("api") == nonce
        assert (await client.ask("POST", "/v1/m", scene.headers("api"), b"{}")).status == 200
        client.close()
        scene.boot -= 1
        with pytest.raises(Refusal) as refused:
            await scene.up("api", "another")
        assert refused.value.reason is Reason.CONFLICT
        scene.boot -= 2
        with pytest.raises(Refusal) as refused:
            await scene.up()
        assert refused.value.reason is Reason.CONFLICT
        assert scene.broker._boots[ID].running.nonces["api"] == nonce

    run(play)


def test_a_binding_that_is_not_there_or_not_built_starts_nothing() -> None:
    async def play(scene: Scene) -> None:
        await app(scene)
        await scene.down()
        with pytest.raises(Refusal) as refused:
            await scene.up("api", "missing")
        assert refused.value.reason is Reason.NOT_FOUND
        assert not scene.sock().exists() and scene.broker._ledger.boots() == []

    run(play)


def test_large_bodies_pass_in_both_directions_and_are_counted() -> None:
    async def play(scene: Scene) -> None:
        size = 8 << 20
        seen = hashlib.sha256()

        async def answer(request: web.Request, asked: Asked) -> web.StreamResponse:
            async for chunk in request.content.iter_any():
                seen.update(chunk)
            reply = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
            reply.content_length = size
            await reply.prepare(request)
            for _ in range(size >> 16):
                await reply.write(b"\xab" * 65536)
            return reply

        await app(scene, answer=answer, read_body=False)
        body = os.urandom(65536) * (size >> 16)
        reply = await scene.ask("api", body=body)
        assert (reply.complete, len(reply.body)) == (True, size)
        assert reply.body == b"\xab" * size
        assert seen.digest() == hashlib.sha256(body).digest()
        used = scene.used()["api"]
        assert (used["bytes_up"], used["bytes_down"]) == (size, size)

    run(play)


def test_the_last_reply_of_a_connection_is_whole_for_a_slow_reader() -> None:
    async def play(scene: Scene) -> None:
        size = 4 << 20

        async def answer(request: web.Request, asked: Asked) -> web.StreamResponse:
            return web.Response(body=b"\xab" * size, content_type="application/octet-stream")

        await app(scene, answer=answer)
        reader, writer = await asyncio.open_unix_connection(scene.sock(), limit=1024)
        head = f"GET /v1/x HTTP/1.1\r\nHost: api.broker.internal\r\nx-api-key: {scene.nonce('api')}"
        writer.write(head.encode() + b"\r\nConnection: close\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        got = 0
        while scene.used()["api"]["bytes_down"] < size:  # until the broker is done with it
            got += len(await reader.readexactly(4096))
        assert got + len(await reader.read()) == size
        writer.close()

    run(play)
