"""Upstreams that lie, hang, reflect and break off: what the guest gets, and what it never does."""

from __future__ import annotations

import asyncio
import datetime
import gzip
import random
import ssl
import zlib
from base64 import b64encode
from collections.abc import Awaitable, Callable
from dataclasses import replace

import brotli
import pytest
import trustme
import zstandard
from aiohttp import web
from support.brokerscene import REAL, Client, Scene, run
from support.upstreams import App, Asked, Authority, Raw

from agent_box.broker.limits import LIMITS

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


async def raw(scene: Scene, answer: bytes, *, end: bool = True) -> Raw:
    """An upstream that gives one answer to each head, whatever it is."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await server.head(reader)
        writer.write(answer)
        await writer.drain()
        if not end:
            await reader.read()  # until the broker hangs up

    server = await Raw(serve).start(scene.authority.server())
    scene.closing(server.stop)
    scene.bind("api", server.port)
    await scene.up()
    return server


async def told(scene: Scene, tls: ssl.SSLContext | None, **bound: object) -> tuple[str, App]:
    """The reason for which an upstream with these certificates is refused."""
    upstream = await App().start(tls)
    scene.closing(upstream.stop)
    scene.bind("api", upstream.port, **bound)  # type: ignore[arg-type]
    await scene.up()
    reply = await scene.ask("api", method="GET")
    assert reply.status == 502
    return reply.code, upstream


# ------------------------------------------------------------------ who the upstream is


def _expired(authority: Authority) -> trustme.LeafCert:
    past = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    return authority.leaf("localhost", not_before=past, not_after=past.replace(year=2021))


CERTIFICATES: dict[str, Callable[[Authority], ssl.SSLContext]] = {
    "expired": lambda own: own.server(certificate=_expired(own)),
    "self-signed": lambda own: Authority().server("localhost"),
    "another name": lambda own: own.server("example.com"),
    "another address": lambda own: own.server("127.0.0.2"),
}


@pytest.mark.parametrize("what", CERTIFICATES)
def test_a_certificate_that_does_not_verify(what: str) -> None:
    async def play(scene: Scene) -> None:
        code, upstream = await told(scene, CERTIFICATES[what](scene.authority))
        assert (code, upstream.asked, scene.store.asked) == ("upstream-tls", [], 0)

    run(play)


def test_an_authority_that_the_binding_does_not_name_is_nobody() -> None:
    async def play(scene: Scene) -> None:
        code, upstream = await told(scene, scene.authority.server(), ca=False)
        assert (code, upstream.asked) == ("upstream-tls", [])

    run(play)


def test_old_tls_is_not_spoken() -> None:
    async def play(scene: Scene) -> None:
        context = scene.authority.server()
        with pytest.warns(DeprecationWarning):
            context.minimum_version = ssl.TLSVersion.TLSv1
            context.maximum_version = ssl.TLSVersion.TLSv1_1
        context.set_ciphers("ALL:@SECLEVEL=0")
        code, upstream = await told(scene, context)
        # either end may be the one that hangs up
        assert code in ("upstream-tls", "upstream-connect") and upstream.asked == []

    run(play)


def test_no_tls_where_tls_is_meant() -> None:
    async def play(scene: Scene) -> None:
        code, upstream = await told(scene, None)
        assert (code, upstream.asked) == ("upstream-tls", [])

    run(play)


def test_a_reserved_address_needs_leave_whatever_name_leads_there() -> None:
    async def play(scene: Scene) -> None:
        for addresses in (
            ["127.0.0.1"],
            ["::1"],
            ["10.0.0.1", "169.254.169.254"],
            ["::ffff:7f00:1"],
        ):

            async def resolve(host: str, port: int, found: list[str] = addresses) -> list[str]:
                return found

            scene.resolve = resolve
            code, upstream = await told(
                scene,
                scene.authority.server("api.example.com"),
                more="allow_reserved = false",
                upstream="https://api.example.com",
            )
            assert (code, upstream.asked, scene.store.asked) == ("address", [], 0)

    run(play)


def test_a_name_that_does_not_resolve_and_a_port_where_nobody_listens() -> None:
    async def play(scene: Scene) -> None:
        async def resolve(host: str, port: int) -> list[str]:
            raise OSError

        gone = await App().start(scene.authority.server())
        await gone.stop()
        scene.bind("api", gone.port)
        await scene.up()
        reply = await scene.ask("api", body=b"{}")
        assert (reply.status, reply.code) == (502, "upstream-connect")
        scene.resolve = resolve
        reply = await scene.ask("api", body=b"{}")
        assert (reply.status, reply.code) == (502, "upstream-dns")

    run(play)


# ------------------------------------------------------------------ what it sends

ODD: dict[str, bytes] = {
    "garbage": b"\x00\x01\x02 no http at all\r\n\r\n",
    "nothing": b"",
    "half a head": b"HTTP/1.1 200 OK\r\nContent-Le",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nxx",
    "no number": b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n",
    "an upgrade nobody asked for": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n"
    b"Connection: upgrade\r\n\r\n",
    "an endless head": b"HTTP/1.1 200 OK\r\nX: " + b"a" * 300_000,
}


@pytest.mark.parametrize("what", ODD)
def test_what_is_no_reply_is_502(what: str) -> None:
    async def play(scene: Scene) -> None:
        await raw(scene, ODD[what])
        reply = await scene.ask("api", method="GET")
        assert reply.status == 502 and reply.code in ("upstream-garbage", "reply-bad")

    run(play)


TORN: dict[str, bytes] = {
    "in the body": b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc",
    "in a chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n64\r\nabc",
    "a bad chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\nzz\r\n",
}


LONG = bytes(range(256)) * 4096
LONG_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: %d\r\n"


def test_a_long_body_passes_byte_for_byte_and_its_connection_serves_again() -> None:
    async def play(scene: Scene) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while True:
                await server.head(reader)
                writer.write(LONG_HEAD % len(LONG) + b"\r\n" + LONG)

        server = await Raw(serve).start(scene.authority.server())
        scene.closing(server.stop)
        scene.bind("api", server.port)
        await scene.up()
        for number in range(1, 4):
            reply = await scene.ask("api", method="GET")
            assert (reply.status, reply.complete, reply.body == LONG) == (200, True, True)
            used = scene.used()["api"]
            assert (used["requests"], used["bytes_down"]) == (number, number * len(LONG))
        assert server.connections == 1

    run(play)


@pytest.mark.parametrize("body", [LONG, b"short"], ids=["long", "here with its head"])
@pytest.mark.parametrize(
    ("version", "head", "more"),
    [
        (b"1.1", b"", b"HTTP/1.1 200 OK\r\n"),
        (b"1.1", b"Connection: close\r\n", b""),
        (b"1.0", b"", b""),
    ],
    ids=["more than its length", "closed", "an old version"],
)
def test_after_a_body_of_known_length_a_connection_that_is_not_in_order_is_not_used(
    version: bytes, head: bytes, more: bytes, body: bytes
) -> None:
    async def play(scene: Scene) -> None:
        start = (LONG_HEAD % len(body)).replace(b"1.1", version, 1)
        server = await raw(scene, start + head + b"\r\n" + body + more, end=False)
        for number in (1, 2):
            reply = await scene.ask("api", method="GET")
            assert (reply.status, reply.complete, reply.body == body) == (200, True, True)
            assert server.connections == number

    run(play)


def test_a_long_body_that_is_torn_or_stands_still_does_not_look_whole() -> None:
    async def play(scene: Scene) -> None:
        await raw(scene, LONG_HEAD % (2 * len(LONG)) + b"\r\n" + LONG)
        reply = await scene.ask("api", method="GET")
        assert (reply.status, reply.complete) == (200, False)
        assert LONG.startswith(reply.body)
        await scene.down()
        await raw(scene, LONG_HEAD % (2 * len(LONG)) + b"\r\n" + LONG, end=False)
        reply = await scene.ask("api", method="GET")
        assert (reply.status, reply.complete, reply.body == LONG) == (200, False, True)

    run(play, replace(LIMITS, idle_s=1.0))


@pytest.mark.parametrize("what", TORN)
def test_a_reply_that_is_torn_does_not_look_whole(what: str) -> None:
    async def play(scene: Scene) -> None:
        await raw(scene, TORN[what])
        reply = await scene.ask("api", method="GET")
        assert (reply.status, reply.complete, reply.body) == (200, False, b"abc")

    run(play)


def test_a_reset_in_the_middle_does_not_look_whole() -> None:
    async def play(scene: Scene) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.head(reader)
            writer.write(TORN["in the body"])
            await writer.drain()
            await reader.readexactly(2)  # what the guest sends when it has the first bytes
            writer.transport.abort()

        server = await Raw(serve).start(scene.authority.server())
        scene.closing(server.stop)
        scene.bind("api", server.port)
        await scene.up()
        reader, writer = await scene.connect()
        head = "".join(f"{name}: {value}\r\n" for name, value in scene.headers("api"))
        writer.write(f"POST /v1/x HTTP/1.1\r\n{head}Content-Length: 4\r\n\r\n".encode())
        await reader.readuntil(b"abc")
        writer.write(b"{}")
        try:
            rest = await asyncio.wait_for(reader.read(), 20)
        except OSError:
            rest = b""
        assert rest == b""
        writer.close()

    run(play)


def test_one_that_hangs_is_given_up() -> None:
    async def play(scene: Scene) -> None:
        await raw(scene, b"", end=False)
        reply = await scene.ask("api", body=b"{}")
        assert (reply.status, reply.code) == (504, "upstream-timeout")
        head = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"
        await raw(scene, head, end=False)
        reply = await scene.ask("api", body=b"{}")
        assert (reply.status, reply.complete) == (200, False)

    run(play, replace(LIMITS, answer_s=0.5, idle_s=0.5))


def test_a_whole_exchange_has_its_time() -> None:
    async def answer(request: web.Request, asked: Asked) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        try:
            while True:
                await reply.write(b"x")
                await asyncio.sleep(0.02)
        except OSError:
            return reply

    async def play(scene: Scene) -> None:
        upstream = await App(answer=answer).start(scene.authority.server())
        scene.closing(upstream.stop)
        scene.bind("api", upstream.port)
        await scene.up()
        reply = await scene.ask("api", body=b"{}")
        assert (reply.status, reply.complete) == (200, False)

    run(play, replace(LIMITS, transfer_s=1.0))


def test_an_idle_connection_that_the_upstream_closed_costs_nobody_a_request() -> None:
    async def play(scene: Scene) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.head(reader)
            writer.write(OK)
            await writer.drain()
            await reader.readuntil(b"\r\n\r\n")  # the second request: closed without an answer

        server = await Raw(serve).start(scene.authority.server())
        scene.closing(server.stop)
        scene.bind("api", server.port)
        await scene.up()
        client = Client(*await scene.connect())
        for _ in range(3):
            reply = await client.ask("GET", "/v1/x", scene.headers("api"))
            assert (reply.status, reply.body) == (200, b"ok")
        client.close()
        assert scene.used()["api"]["requests"] == 3

    run(play)


@pytest.mark.parametrize("size", [65_535, 65_536, 65_537, 1_000_000])
def test_bodies_that_are_not_searched_arrive_however_they_are_cut(size: int) -> None:
    async def play(scene: Scene) -> None:
        body = random.Random(size).randbytes(size)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for first in (1, 30, 200, 70_000):
                await server.head(reader)
                whole = LONG_HEAD % size + b"\r\n" + body
                at = 0
                for piece in (first, 1, 40_000, 70_000, size):
                    writer.write(whole[at : at + piece])
                    at += piece
                    await writer.drain()
                    await asyncio.sleep(0.01)  # or the pieces arrive as one

        server = await Raw(serve).start(scene.authority.server())
        scene.closing(server.stop)
        scene.bind("api", server.port)
        await scene.up()
        client = Client(*await scene.connect())
        for _ in range(4):
            reply = await client.ask("GET", "/v1/x", scene.headers("api"))
            assert (reply.status, reply.complete, reply.body == body) == (200, True, True)
        client.close()
        assert server.connections == 1
        assert scene.used()["api"]["bytes_down"] == 4 * size

    run(play)


def test_what_comes_after_a_reply_is_never_the_next_ones() -> None:
    async def play(scene: Scene) -> None:
        extra = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nother"
        server = await raw(scene, OK + extra, end=False)
        client = Client(*await scene.connect())
        for _ in range(3):
            reply = await client.ask("GET", "/v1/x", scene.headers("api"))
            assert (reply.status, reply.body) == (200, b"ok")
        client.close()
        assert server.connections == 3

    run(play)


@pytest.mark.parametrize("closes", [True, False])
def test_an_answer_that_does_not_wait_for_the_body_is_told(closes: bool) -> None:
    """Such as a refusal of what is too large, while it is being sent."""

    async def play(scene: Scene) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.head(reader)
            writer.write(b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 3\r\n\r\nbig")
            await writer.drain()
            if not closes:
                await reader.read()

        server = await Raw(serve).start(scene.authority.server())
        scene.closing(server.stop)
        scene.bind("api", server.port)
        await scene.up()
        size = 32 << 20
        head = "".join(f"{name}: {value}\r\n" for name, value in scene.headers("api"))
        reader, writer = await scene.connect()
        writer.write(f"POST /v1/x HTTP/1.1\r\n{head}Content-Length: {size}\r\n\r\n".encode())

        async def send() -> None:
            try:
                for _ in range(size >> 16):
                    writer.write(bytes(1 << 16))
                    await writer.drain()
            except OSError:
                pass  # nobody takes the rest

        sending = scene.tasks.hold(send(), name="send")
        said = await asyncio.wait_for(reader.readuntil(b"big"), 20)
        assert said.startswith(b"HTTP/1.1 413")
        await asyncio.wait_for(asyncio.wait((sending,)), 20)
        writer.transport.abort()

    run(play)


# ------------------------------------------------------------------ what it must not send

Reflect = Callable[[web.Request, Asked], Awaitable[web.StreamResponse]]


def _text(body: bytes, **headers: str) -> Reflect:
    async def answer(request: web.Request, asked: Asked) -> web.StreamResponse:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return web.Response(body=body, headers={"Content-Type": "text/plain"} | names)

    return answer


async def _split(request: web.Request, asked: Asked) -> web.StreamResponse:
    reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await reply.prepare(request)
    for byte in b"data: " + REAL + b"\n\n":
        await reply.write(bytes((byte,)))
        await asyncio.sleep(0)  # each in a chunk of its own
    return reply


async def _trailer(request: web.Request, asked: Asked) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.write(
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n"
        b"X-Key: " + REAL + b"\r\n\r\n"
    )
    request.transport.close()
    return web.Response()


async def _early_hint(request: web.Request, asked: Asked) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.write(b"HTTP/1.1 103 Early Hints\r\nLink: " + REAL + b"\r\n\r\n")
    return web.Response(body=b"fine")


async def _moved(request: web.Request, asked: Asked) -> web.StreamResponse:
    where = f"https://elsewhere.example/?key={REAL.decode()}"
    return web.Response(status=302, headers={"Location": where})


REFLECTIONS: dict[str, Reflect] = {
    "in a trailer": _trailer,
    "in an early hint": _early_hint,
    "in a redirect": _moved,
    "in a cookie": _text(b"fine", Set_Cookie=f"key={REAL.decode()}; Path=/"),
    "in deflate": _text(zlib.compress(b"you sent " + REAL), Content_Encoding="deflate"),
    "in br": _text(brotli.compress(b"you sent " + REAL), Content_Encoding="br"),
    "in zstd": _text(zstandard.compress(b"you sent " + REAL), Content_Encoding="zstd"),
    "in two codings": _text(
        gzip.compress(brotli.compress(b"you sent " + REAL)), Content_Encoding="br, gzip"
    ),
    "in a header": _text(b"fine", X_Debug=f"key={REAL.decode()}"),
    "in the body": _text(b"you sent " + REAL + b" to us"),
    "across chunks": _split,
    "in gzip": _text(gzip.compress(b"you sent " + REAL), Content_Encoding="gzip"),
    "in base64": _text(b"Basic " + b64encode(b"x:" + REAL)),
    "in an error": _text(b'{"error": "bad key ' + REAL + b'"}', Content_Type="application/json"),
}


@pytest.mark.parametrize("what", REFLECTIONS)
def test_a_reply_that_carries_the_credential_back_is_cut(what: str) -> None:
    async def play(scene: Scene) -> None:
        upstream = await App(answer=REFLECTIONS[what]).start(scene.authority.server())
        scene.closing(upstream.stop)
        scene.bind("api", upstream.port)
        await scene.up()
        got = await _everything(scene)
        assert REAL not in got and REAL not in _unpacked(got)
        assert b64encode(b"x:" + REAL)[:-4] not in got
        (facts,) = await scene.noted("reply-cut")
        assert facts["binding"] == "api" and facts["reason"] == "reply-credential"
        assert REAL.decode() not in repr(scene.registry.notes) + repr(scene.log.lines)

    run(play)


async def _everything(scene: Scene) -> bytes:
    head = "".join(f"{name}: {value}\r\n" for name, value in scene.headers("api"))
    return await scene.talk(f"GET /v1/x HTTP/1.1\r\n{head}Connection: close\r\n\r\n".encode())


def _unpacked(got: bytes) -> bytes:
    body = got.partition(b"\r\n\r\n")[2]
    try:
        return gzip.decompress(body)
    except (OSError, EOFError):
        return body


# ------------------------------------------------------------------ budgets and tokens


def test_a_budget_refuses_and_says_so() -> None:
    async def play(scene: Scene) -> None:
        async def answer(request: web.Request, asked: Asked) -> web.StreamResponse:
            usage = {"input_tokens": 60, "output_tokens": 40}
            return web.json_response({"model": "m", "usage": usage})

        upstream = await App(answer=answer).start(scene.authority.server())
        scene.closing(upstream.stop)
        scene.bind("api", upstream.port, more="max_tokens = 150")
        await scene.up()
        for _ in range(2):
            assert (await scene.ask("api", body=b"{}")).status == 200
        reply = await scene.ask("api", body=b"{}")
        assert (reply.status, reply.code) == (403, "budget")
        assert "max_tokens" in reply.json()["error"]["message"]
        assert len(upstream.asked) == 2
        await scene.end()
        await scene.begin()
        assert (await scene.ask("api", body=b"{}")).code == "budget"
        used = scene.used()["api"]
        assert (used["tokens_in"], used["tokens_out"], used["requests"]) == (120, 80, 2)

    run(play)


def test_a_budget_of_requests_is_kept_by_many_at_once() -> None:
    async def play(scene: Scene) -> None:
        upstream = await App().start(scene.authority.server())
        scene.closing(upstream.stop)
        scene.bind("api", upstream.port, more="max_requests = 5")
        await scene.up()
        replies = await asyncio.gather(*(scene.ask("api", body=b"{}") for _ in range(30)))
        assert sorted(reply.status for reply in replies) == [200] * 5 + [403] * 25
        assert len(upstream.asked) == scene.used()["api"]["requests"] == 5

    run(play)


def test_costs_by_the_operators_table() -> None:
    async def play(scene: Scene) -> None:
        async def answer(request: web.Request, asked: Asked) -> web.StreamResponse:
            text = (
                'event: message_start\ndata: {"type": "message_start", "message": {"model": "m-1", '
                '"usage": {"input_tokens": 1000, "output_tokens": 1}}}\n\n'
                'event: message_delta\ndata: {"type": "message_delta", '
                '"usage": {"output_tokens": 2000}}\n\n'
            )
            return web.Response(text=text, headers={"Content-Type": "text/event-stream"})

        (scene.config.parent / "prices.toml").write_text(
            'version = 1\ncurrency = "USD"\n[[models]]\nkind = "anthropic"\nmodel = "m-*"\n'
            "input = 3\noutput = 15\n"
        )
        upstream = await App(answer=answer).start(scene.authority.server())
        scene.closing(upstream.stop)
        scene.bind("api", upstream.port)
        await scene.up()
        assert (await scene.ask("api", body=b"{}")).status == 200
        used = scene.used()["api"]
        assert (used["tokens_in"], used["tokens_out"]) == (1000, 2000)
        assert used["cost"] == 3_000 + 30_000

    run(play)


def test_a_guest_that_leaves_ends_the_request_and_pays_for_it() -> None:
    async def play(scene: Scene) -> None:
        left = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.head(reader)
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n9\r\ndata: x\n\n\r\n"
            )
            await writer.drain()
            while await reader.read(1000):
                pass
            left.set()

        server = await Raw(serve).start(scene.authority.server())
        scene.closing(server.stop)
        scene.bind("api", server.port)
        await scene.up()
        reader, writer = await scene.connect()
        head = "".join(f"{name}: {value}\r\n" for name, value in scene.headers("api"))
        writer.write(
            f"POST /v1/x HTTP/1.1\r\n{head}Content-Length: 40\r\n\r\n".encode() + b"a" * 40
        )
        await reader.readuntil(b"data: x")
        writer.close()
        await asyncio.wait_for(left.wait(), 20)
        await scene.end()
        await scene.begin()
        used = scene.used()["api"]
        assert (used["requests"], used["tokens_in"]) == (1, 10)

    run(play)
