"""The broker's own timeouts, at their true length, by a clock that jumps: hours in seconds."""

from __future__ import annotations

import asyncio
import os
from base64 import b64encode
from collections.abc import Awaitable, Callable
from dataclasses import fields

import pytest
from aiohttp import ClientSession, UnixConnector, web
from support import simclock
from support.brokerscene import Client, Scene
from support.brokerscene import run as played
from support.simclock import now
from support.upstreams import App, Asked, Raw

from agent_box.broker.limits import LIMITS

pytestmark = pytest.mark.timeout(300)
HOUR = 3600.0


def run(play: Callable[[Scene], Awaitable[None]]) -> None:
    async def resolve(host: str, port: int) -> list[str]:
        return ["127.0.0.1"]  # without a thread, which a jumping clock does not wait for

    async def resolved(scene: Scene) -> None:
        scene.resolve = resolve
        await play(scene)

    played(resolved, LIMITS, simclock.Loop)


async def app(scene: Scene, **options: object) -> App:
    made = await App(**options).start(scene.authority.server())  # type: ignore[arg-type]
    scene.closing(made.stop)
    scene.bind("api", made.port, more="upgrade = true")
    await scene.up()
    return made


async def _echo(request: web.Request, asked: Asked) -> web.StreamResponse:
    if "upgrade" not in request.headers:
        return web.json_response({"ok": True})
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    async for message in socket:
        await socket.send_str(message.data)
    return socket


@pytest.mark.parametrize("hours", [1, pytest.param(24, marks=pytest.mark.slow)])
def test_hours_of_keep_alive_leave_nothing_behind(hours: int) -> None:
    """One connection with a request each 100 s, one with bursts, and a WebSocket that is used
    each 25 minutes: each lives as long as it is used, and nothing grows."""

    async def play(scene: Scene) -> None:
        upstream = await app(scene, answer=_echo, read_body=False)
        headers = scene.headers("api")
        end = now() + hours * HOUR

        async def steady() -> int:
            client, asked = Client(*await scene.connect()), 0
            while now() < end:
                reply = await client.ask("POST", "/v1/x", headers, b"{}")
                assert (reply.status, reply.complete) == (200, True)
                asked += 1
                await asyncio.sleep(100)  # of simulated time
            client.close()
            return asked

        async def bursts() -> int:
            asked = 0
            while now() < end:
                client = Client(*await scene.connect())
                for _ in range(5):
                    assert (await client.ask("GET", "/v1/y", headers)).status == 200
                    await asyncio.sleep(5)  # of simulated time
                asked += 5
                # left open: the broker ends it after two minutes
                began = now()
                assert not (await client.reply()).complete
                assert LIMITS.idle_s - 10 <= now() - began <= LIMITS.idle_s
                client.close()
                await asyncio.sleep(400)  # of simulated time
            return asked

        async def socket() -> int:
            connector = UnixConnector(path=str(scene.sock()))
            async with ClientSession(connector=connector) as session:
                where = "http://api.broker.internal/v1/socket"
                async with session.ws_connect(
                    where, headers={"x-api-key": scene.nonce("api")}
                ) as opened:
                    while now() < end:
                        await opened.send_str("still here")
                        assert await opened.receive_str() == "still here"
                        await asyncio.sleep(25 * 60)  # of simulated time
            return 1

        await scene.ask("api", method="GET")  # what is made at first
        await asyncio.sleep(200)  # of simulated time
        tasks, fds = len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd"))
        asked = sum(await asyncio.gather(steady(), bursts(), socket()))
        await asyncio.sleep(200)  # of simulated time
        assert len(asyncio.all_tasks()) == tasks
        assert len(os.listdir("/proc/self/fd")) <= fds
        assert len(upstream.asked) == asked + 1 == scene.used()["api"]["requests"]
        assert scene.kinds() == []

    run(play)


def test_an_answer_has_five_minutes_and_no_more() -> None:
    async def answer(request: web.Request, asked: Asked) -> web.StreamResponse:
        await asyncio.sleep(float(request.query["after"]))  # of simulated time
        return web.json_response({"ok": True})

    async def play(scene: Scene) -> None:
        await app(scene, answer=answer)
        for after, status in (("61", 200), ("290", 200), ("310", 504)):
            began = now()
            target = f"/v1/x?after={after}"
            reply = await scene.ask("api", target, body=b"{}", seconds=HOUR)
            assert reply.status == status
            assert now() - began == pytest.approx(min(float(after), LIMITS.answer_s), abs=10)

    run(play)


def test_a_stream_may_pause_and_has_half_an_hour() -> None:
    async def answer(request: web.Request, asked: Asked) -> web.StreamResponse:
        pause, times = (float(request.query[name]) for name in ("pause", "times"))
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        for _ in range(int(times)):
            await asyncio.sleep(pause)  # of simulated time
            await reply.write(b"data: x\n\n")
        return reply

    async def play(scene: Scene) -> None:
        await app(scene, answer=answer)
        for pause, times, whole in ((110, 15, True), (110, 17, False), (130, 2, False)):
            began = now()
            target = f"/v1/x?pause={pause}&times={times}"
            reply = await scene.ask("api", target, body=b"{}", seconds=HOUR)
            assert (reply.status, reply.complete) == (200, whole)
            assert now() - began <= LIMITS.transfer_s + 10

    run(play)


# ------------------------------------------------------------------ slow on purpose


async def dribble(scene: Scene, start: bytes, byte: bytes, every_s: float) -> tuple[bytes, float]:
    """What is answered to one who sends a byte now and then, and after how long."""
    reader, writer = await scene.connect()
    writer.write(start)
    began = now()

    async def drip() -> None:
        while True:
            await asyncio.sleep(every_s)  # of simulated time
            writer.write(byte)

    dripping = scene.tasks.hold(drip(), name="drip")
    try:
        answer = await reader.read()
    except OSError:
        answer = b""
    took = now() - began
    dripping.cancel()
    await asyncio.wait((dripping,))
    writer.transport.abort()
    return answer, took


def test_a_slow_guest_is_cut_off() -> None:
    async def play(scene: Scene) -> None:
        upstream = await app(scene)
        lines = "".join(f"{name}: {value}\r\n" for name, value in scene.headers("api"))
        head = f"POST /v1/x HTTP/1.1\r\n{lines}".encode()
        answer, took = await dribble(scene, head, b"a", 1)
        assert answer.startswith(b"HTTP/1.1 408") and took <= LIMITS.head_s + 10
        assert upstream.asked == []
        body = head + b"Content-Length: 1000000\r\n\r\n"
        answer, took = await dribble(scene, body, b"a", 130)
        assert answer == b"" and took <= LIMITS.idle_s + 10
        answer, took = await dribble(scene, body, b"a", 110)
        assert took <= LIMITS.transfer_s + 10
        chunked = head + b"Transfer-Encoding: chunked\r\n\r\n"
        answer, took = await dribble(scene, chunked, b"1\r\na\r\n", 110)
        assert took <= LIMITS.transfer_s + 10
        answer, took = await dribble(scene, chunked + b"1", b"0", 1)  # a size without an end
        assert took <= LIMITS.transfer_s + 10

    run(play)


def test_a_push_that_does_not_come_to_the_point_is_cut_off() -> None:
    async def play(scene: Scene) -> None:
        made = await app(scene)
        more = 'basic_user = "x"\n[[bindings.code.repos]]\nname = "o/app"\npush = true'
        scene.bind("code", made.port, "git-basic", more=more, routes=None)
        await scene.up()
        lines = f"Host: code.broker.internal\r\nAuthorization: Basic {_basic(scene)}\r\n"
        head = f"POST /o/app.git/git-receive-pack HTTP/1.1\r\n{lines}".encode()
        type_ = b"Content-Type: application/x-git-receive-pack-request\r\n"
        start = head + type_ + b"Transfer-Encoding: chunked\r\n\r\n4\r\n03e8\r\n"
        answer, took = await dribble(scene, start, b"1\r\n0\r\n", 100)
        assert answer.startswith(b"HTTP/1.1 408")
        assert took <= LIMITS.transfer_s + 10
        assert made.asked == []

    run(play)


def _basic(scene: Scene) -> str:
    return b64encode(f"x:{scene.nonce('code')}".encode()).decode()


LONG = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: 1000000\r\n\r\n"
)


@pytest.mark.parametrize("where", ["head", "informational", "body", "long body", "chunk"])
def test_a_slow_upstream_is_given_up(where: str) -> None:
    start, byte = {
        "head": (b"HTTP/1.1 200 OK\r\nX: ", b"a"),
        "informational": (b"", b"HTTP/1.1 103 Early Hints\r\n\r\n"),
        "body": (b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n", b"a"),
        "long body": (LONG, b"a"),
        "chunk": (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1", b"0"),
    }[where]

    async def play(scene: Scene) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.head(reader)
            writer.write(start)
            while not writer.is_closing():
                await asyncio.sleep(50)  # of simulated time
                writer.write(byte)
                await writer.drain()

        server = await Raw(serve).start(scene.authority.server())
        scene.closing(server.stop)
        scene.bind("api", server.port)
        await scene.up()
        began = now()
        reply = await scene.ask("api", method="GET", seconds=2 * HOUR)
        if where in ("head", "informational"):
            assert (reply.status, reply.code) == (504, "upstream-timeout")
            assert now() - began <= LIMITS.answer_s + 60
        else:
            assert (reply.status, reply.complete) == (200, False)
            assert now() - began <= LIMITS.transfer_s + 60

    run(play)


def test_an_upstream_that_says_nothing_is_given_up_before_the_store_is_asked() -> None:
    async def play(scene: Scene) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read(1)
            await reader.read()  # never a word of TLS

        async def never(host: str, port: int) -> list[str]:
            return await asyncio.get_running_loop().create_future()

        server = await Raw(serve).start(None)
        scene.closing(server.stop)
        scene.bind("api", server.port)
        await scene.up()
        began = now()
        reply = await scene.ask("api", body=b"{}", seconds=HOUR)
        assert reply.status in (502, 504)
        assert now() - began <= 2 * LIMITS.connect_s + 10
        scene.resolve = never
        began = now()
        reply = await scene.ask("api", body=b"{}", seconds=HOUR)
        assert (reply.status, reply.code) == (502, "upstream-dns")
        assert now() - began <= LIMITS.resolve_s + 10
        assert scene.store.asked == 0

    run(play)


def test_a_long_body_that_stops_is_given_up() -> None:
    async def play(scene: Scene) -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await server.head(reader)
            writer.write(LONG + b"abc")
            await reader.read()

        server = await Raw(serve).start(scene.authority.server())
        scene.closing(server.stop)
        scene.bind("api", server.port)
        await scene.up()
        began = now()
        reply = await scene.ask("api", method="GET", seconds=HOUR)
        assert (reply.status, reply.complete, reply.body) == (200, False, b"abc")
        assert now() - began <= LIMITS.idle_s + 10

    run(play)


@pytest.mark.parametrize("length", [None, 1 << 40])
def test_a_guest_that_does_not_read_is_left(length: int | None) -> None:
    async def answer(request: web.Request, asked: Asked) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        reply.content_length = length
        await reply.prepare(request)
        try:
            while True:
                await reply.write(bytes(1 << 18))
        except OSError:
            ended.set()
            return reply

    ended = asyncio.Event()

    async def play(scene: Scene) -> None:
        await app(scene, answer=answer)
        _, writer = await scene.connect()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        head = "".join(f"{name}: {value}\r\n" for name, value in scene.headers("api"))
        writer.write(f"GET /v1/x HTTP/1.1\r\n{head}\r\n".encode())
        began = now()
        await asyncio.wait_for(ended.wait(), HOUR)
        assert now() - began <= LIMITS.idle_s + 10
        writer.transport.abort()

    run(play)


def test_the_limits_are_those_that_are_documented() -> None:
    said = {each.name: getattr(LIMITS, each.name) for each in fields(LIMITS)}
    assert (said["head_s"], said["idle_s"], said["answer_s"]) == (10, 120, 300)
    assert (said["transfer_s"], said["upgraded_idle_s"]) == (1800, 1800)
    assert (said["resolve_s"], said["connect_s"], said["pool_idle_s"]) == (10, 10, 20)
