"""The broker as a process behind its wall, with the real store beside it: what a kill leaves."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h11
import pytest
from aiohttp import web
from support.brokerscene import REAL, Client
from support.house import House, inner_pid
from support.upstreams import App, Asked, Authority

from agent_box.broker.contract import Instance, InstanceUp, NoncesOf, UsageOf
from agent_box.bus.schema import Empty
from agent_box.process.secret import Secret
from agent_box.store import seal
from agent_box.store.contract import Name, Put, Sealed

ID = "0123456789abcdef0123456789abcdef"


class Whole:
    """Store and broker as processes, and an upstream in a thread of its own."""

    def __init__(self) -> None:
        self.house = House()
        self.authority = Authority()
        self.app = App()
        self.gate = threading.Event()  # streams go on to their end when it is set
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.app.answer = self._answer
        self._in_loop(self.app.start(self.authority.server()))
        (self.house.config.parent / "ca.pem").write_bytes(self.authority.pem)
        self.house.config.write_text(
            f"""version = 1
[bindings.api]
upstream = "https://localhost:{self.app.port}"
kind = "anthropic"
credential = "key"
allow_reserved = true
ca_file = "ca.pem"
[[bindings.api.routes]]
path = "/v1/"
match = "prefix"
methods = ["GET", "POST"]
"""
        )
        self.store = self.house.start("store")
        self.broker = self.house.start("broker")
        self.put(REAL)
        self.call("instance_up", InstanceUp(instance=ID, name="work", boot=1, bindings=["api"]))

    def _in_loop(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _answer(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        if request.path != "/v1/stream":
            usage = {"input_tokens": 7, "output_tokens": 5}
            return web.json_response({"model": "m", "usage": usage})
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        while not self.gate.is_set():
            await reply.write(b"data: x\n\n")
            await asyncio.sleep(0.05)
        return reply

    def put(self, value: bytes) -> None:
        with self.house.client("store") as client:
            key = client.call("seal_key", Empty(), deadline_s=10).key  # type: ignore[attr-defined]
            sealed = Sealed(to=key, box=seal.box(Secret(value), key))
            client.call("put", Put(name="key", value=sealed), deadline_s=10)

    def call(self, name: str, request: Any, role: str = "registry") -> Any:
        with self.house.client("broker", role) as client:
            return client.call(name, request, deadline_s=10)

    def headers(self) -> list[tuple[str, str]]:
        reply = self.call("nonces", NoncesOf(instance=ID, boot=1), "channel")
        return [("Host", "api.broker.internal"), ("x-api-key", reply.nonces[0].nonce)]

    def kill(self, process: subprocess.Popen[str]) -> None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    @property
    def sock(self) -> Path:
        return self.house.paths.runtime / "vm" / "broker" / ID / "sock"

    def close(self) -> None:
        self.gate.set()
        self.house.close()
        self._in_loop(self.app.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture
def whole() -> Iterator[Whole]:
    made = Whole()
    try:
        yield made
    finally:
        made.close()


async def ask(whole: Whole, headers: list[tuple[str, str]], path: str = "/v1/x") -> Any:
    client = Client(*await asyncio.open_unix_connection(whole.sock))
    try:
        return await client.ask("POST", path, headers, b"{}")
    finally:
        client.close()


async def retried(whole: Whole, headers: list[tuple[str, str]]) -> int:
    """The status that a client gets that tries again while nobody listens."""
    async with asyncio.timeout(60):
        while True:
            try:
                return int((await ask(whole, headers)).status)
            except OSError:
                await asyncio.sleep(0.01)  # nothing tells when somebody listens again


def test_a_request_through_the_wall_and_a_credential_that_is_taken_away(whole: Whole) -> None:
    headers = whole.headers()
    reply = asyncio.run(ask(whole, headers))
    assert reply.status == 200
    assert whole.app.asked[-1].get("x-api-key") == [REAL.decode()]
    whole.put(b"sk-another-value")
    asyncio.run(ask(whole, headers))
    assert whole.app.asked[-1].get("x-api-key") == ["sk-another-value"]
    with whole.house.client("store") as client:
        client.call("remove", Name(name="key"), deadline_s=10)
    reply = asyncio.run(ask(whole, headers))
    assert (reply.status, reply.code) == (503, "credential-missing")
    whole.kill(whole.store)
    reply = asyncio.run(ask(whole, headers))
    assert (reply.status, reply.code) == (503, "store")
    assert len(whole.app.asked) == 2
    whole.call("instance_down", Instance(instance=ID))
    assert not whole.sock.exists()


def test_a_store_that_stands_still_is_waited_for_in_bounds_and_nothing_is_forwarded(
    whole: Whole,
) -> None:
    headers = whole.headers()
    assert asyncio.run(ask(whole, headers)).status == 200
    pid = inner_pid(whole.store)
    assert pid is not None

    async def play() -> list[Any]:
        async with asyncio.timeout(60):
            return await asyncio.gather(*(ask(whole, headers) for _ in range(20)))

    os.kill(pid, signal.SIGSTOP)
    try:
        replies = asyncio.run(play())
    finally:
        os.kill(pid, signal.SIGCONT)
    assert {(reply.status, reply.code) for reply in replies} == {(503, "store")}
    # what it answers now, to those who are gone, lets nothing through either
    assert asyncio.run(ask(whole, headers)).status == 200
    assert len(whole.app.asked) == 2
    (row,) = whole.call("usage", UsageOf(instance=ID, since_day=0), "operator").used
    assert (row.requests, row.refused) == (2, 20)


def test_a_kill_during_streams_resets_each_and_loses_no_count(whole: Whole) -> None:
    headers = whole.headers()

    async def play() -> None:
        for _ in range(5):
            assert (await ask(whole, headers)).status == 200
        clients = [Client(*await asyncio.open_unix_connection(whole.sock)) for _ in range(20)]
        for client in clients:
            await client.send("POST", "/v1/stream", headers, b"{}")
        for client in clients:
            while not isinstance(await client.next(), h11.Data):
                pass
        pid = inner_pid(whole.broker)
        assert pid is not None
        _nothing_shown(pid)
        whole.kill(whole.broker)
        began = time.monotonic()
        for client in clients:
            assert not (await asyncio.wait_for(client.reply(), 20)).complete
            client.close()
        ended = time.monotonic()
        whole.broker = whole.house.start("broker")
        assert await retried(whole, headers) == 200
        print(
            f"\n20 streams ended {ended - began:.3f} s after the kill; the next request was "
            f"answered {time.monotonic() - ended:.3f} s after the new start"
        )

    asyncio.run(play())
    (row,) = whole.call("usage", UsageOf(instance=ID, since_day=0), "operator").used
    assert row.requests == 26
    assert (row.tokens_in, row.tokens_out) == (6 * 7, 6 * 5)
    told = whole.house.log("broker").encode() + whole.house.log("store").encode()
    for form in (REAL, b64encode(REAL), REAL.hex().encode()):
        assert form not in told
    nonce = dict(headers)["x-api-key"].encode()
    assert nonce not in told


def _nothing_shown(pid: int) -> None:
    """What /proc shows of the process to its own account, and whether it could dump a core."""
    status = Path(f"/proc/{pid}/limits").read_text()
    assert re.search(r"Max core file size\s+0\s+0\s", status)
    for name in ("cmdline", "environ"):
        try:
            shown = Path(f"/proc/{pid}/{name}").read_bytes()
        except PermissionError:
            continue  # it shows nothing at all
        assert REAL not in shown and b"sk-agentbox" not in shown
    with pytest.raises(PermissionError):
        Path(f"/proc/{pid}/mem").read_bytes()


def test_the_key_and_the_database_are_private(whole: Whole) -> None:
    data = whole.house.paths.data("broker")
    for path in data.iterdir():
        assert path.stat().st_mode & 0o077 == 0, path
        if path.name not in ("lock",):
            assert REAL not in path.read_bytes()
    assert whole.sock.parent.stat().st_mode & 0o777 == 0o700


def rss_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("no VmRSS")


@pytest.mark.parametrize("mib", [50, pytest.param(500, marks=pytest.mark.slow)])
def test_an_upload_and_a_download_keep_memory_flat(whole: Whole, mib: int) -> None:
    """What lies between a fast sender and a slow reader is a few buffers, and no body."""
    size = mib << 20
    seen: list[int] = []

    async def answer(request: web.Request, asked: Asked) -> web.StreamResponse:
        got = 0
        async for chunk in request.content.iter_any():
            got += len(chunk)
        seen.append(got)
        reply = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        reply.content_length = size
        await reply.prepare(request)
        for _ in range(mib * 4):
            await reply.write(bytes(1 << 18))
        return reply

    whole.app.answer, whole.app.read_body = answer, False
    headers = whole.headers()
    pid = inner_pid(whole.broker)
    assert pid is not None

    async def play() -> float:
        reader, writer = await asyncio.open_unix_connection(whole.sock, limit=1 << 18)
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
        writer.write(f"POST /v1/x HTTP/1.1\r\n{lines}Content-Length: {size}\r\n\r\n".encode())
        most = before = rss_mib(pid)
        for _ in range(mib):
            writer.write(bytes(1 << 20))
            await writer.drain()
            most = max(most, rss_mib(pid))
        await reader.readuntil(b"\r\n\r\n")
        left = size
        while left:
            data = await reader.read(1 << 18)
            assert data
            left -= len(data)
            most = max(most, rss_mib(pid))
        writer.close()
        return most - before

    grown = asyncio.run(play())
    print(f"\n{mib} MiB up and down: at most {grown:.1f} MiB more of memory")
    assert grown < 16
    assert seen == [size]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ten_gibibytes_of_a_reply_are_relayed_at_flat_memory(whole: Whole) -> None:
    """What is counted in the end is what the guest read, and a second reply follows."""
    size = 10 << 30

    async def answer(request: web.Request, asked: Asked) -> web.StreamResponse:
        reply = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        await reply.prepare(request)
        block = bytes(1 << 20)
        for _ in range(size >> 20):
            await reply.write(block)
        return reply

    usual, whole.app.answer = whole.app.answer, answer
    headers = whole.headers()
    pid = inner_pid(whole.broker)
    assert pid is not None

    async def play() -> float:
        client = Client(*await asyncio.open_unix_connection(whole.sock, limit=1 << 20))
        await client.send("POST", "/v1/x", headers, b"{}")
        most = before = rss_mib(pid)
        got = parts = 0
        while not isinstance(event := await client.next(), h11.EndOfMessage):
            if isinstance(event, h11.Data):
                got += len(event.data)
                parts += 1
                most = max(most, rss_mib(pid)) if parts % 1000 == 0 else most
        assert got == size
        client.close()
        whole.app.answer = usual
        assert (await ask(whole, headers)).status == 200
        return max(most, rss_mib(pid)) - before

    grown = asyncio.run(play())
    print(f"\n10 GiB down: at most {grown:.1f} MiB more of memory")
    assert grown < 16
    (row,) = whole.call("usage", UsageOf(instance=ID, since_day=0), "operator").used
    assert row.bytes_down > size


def test_two_hundred_streams_at_once_and_what_each_costs(whole: Whole) -> None:
    headers = whole.headers()
    pid = inner_pid(whole.broker)
    assert pid is not None

    async def play() -> float:
        before = rss_mib(pid)
        clients = [Client(*await asyncio.open_unix_connection(whole.sock)) for _ in range(200)]
        for client in clients:
            await client.send("POST", "/v1/stream", headers, b"{}")
        for client in clients:
            for _ in range(3):  # an event each
                while not isinstance(await client.next(), h11.Data):
                    pass
        grown = rss_mib(pid) - before
        whole.gate.set()
        for client in clients:
            assert (await client.reply()).complete
            client.close()
        return grown

    assert asyncio.run(play()) < 200  # a MiB each at most
