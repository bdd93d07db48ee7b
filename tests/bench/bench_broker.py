"""What the broker adds to a request, beside nginx and mitmproxy as reverse proxies, in one run.

    python tests/bench/bench_broker.py [--seconds N] [--mitmdump PATH]

The upstream is a bare TLS server in a process of its own that answers from memory. The broker
runs behind its wall with the real store beside it, so each request has the whole gate and a
fresh answer of the store. nginx and mitmproxy open TLS to the same upstream; nginx keeps its
connections. The client is one process that speaks raw HTTP/1.1; it, the upstream and what is
measured share the host's cores, so compare columns of one run and not runs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import shutil
import signal
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.house import House, inner_pid
from support.until import until
from support.upstreams import Authority

from agent_box.broker.contract import InstanceUp, NoncesOf
from agent_box.bus.schema import Empty
from agent_box.process.secret import Secret
from agent_box.store import seal
from agent_box.store.contract import Put, Sealed

ID = "0" * 32
STREAM = 64 << 20
CROWD, CROWD_EVENTS, CROWD_EVERY_S = 200, 20, 0.5  # streams at once; events of each; between two
BODY = b'{"hello": "world, this is a small request"}'
Where = tuple[str, object]  # ("unix", path) or ("tcp", port) or ("tls", (port, context))


# ------------------------------------------------------------------ the upstream


async def upstream(certificate: str, key: str) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    reply = b'{"ok":true}'
    small = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    small = small % len(reply) + reply
    block = b"\xab" * (1 << 18)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                lower = head.lower()
                if b"content-length: " in lower:
                    size = int(lower.split(b"content-length: ")[1].split(b"\r\n")[0])
                    await reader.readexactly(size)
                if head.split(b" ", 2)[1] == b"/v1/stream":
                    writer.write(
                        b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\n"
                        b"Content-Length: %d\r\n\r\n" % STREAM
                    )
                    for _ in range(STREAM // len(block)):
                        writer.write(block)
                        await writer.drain()
                elif head.split(b" ", 2)[1] == b"/v1/crowd":
                    writer.write(
                        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                        b"Transfer-Encoding: chunked\r\n\r\n"
                    )
                    for _ in range(CROWD_EVENTS):
                        await asyncio.sleep(CROWD_EVERY_S * random.uniform(0.5, 1.5))
                        event = b"data: %.6f\n\n" % time.time()
                        writer.write(b"%x\r\n%s\r\n" % (len(event), event))
                        await writer.drain()
                    writer.write(b"0\r\n\r\n")
                elif head.split(b" ", 2)[1] == b"/v1/events":
                    writer.write(
                        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                        b"Transfer-Encoding: chunked\r\n\r\n"
                    )
                    for _ in range(200):
                        event = b"data: %.6f\n\n" % time.time()
                        writer.write(b"%x\r\n%s\r\n" % (len(event), event))
                        await writer.drain()
                        await asyncio.sleep(0.01)
                    writer.write(b"0\r\n\r\n")
                else:
                    writer.write(small)
                await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=context)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


# ------------------------------------------------------------------ the client


class Wire:
    def __init__(self, where: Where, head: bytes) -> None:
        self.where, self.head = where, head

    async def open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        kind, at = self.where
        if kind == "unix":
            return await asyncio.open_unix_connection(str(at), limit=1 << 20)
        if kind == "tcp":
            return await asyncio.open_connection("127.0.0.1", at, limit=1 << 20)  # type: ignore[arg-type]
        port, context = at  # type: ignore[misc]
        return await asyncio.open_connection(
            "127.0.0.1", port, ssl=context, server_hostname="localhost", limit=1 << 20
        )

    def request(self, path: str) -> bytes:
        start = f"POST {path} HTTP/1.1\r\n".encode()
        return start + self.head + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


async def small(wire: Wire, connections: int, seconds: float) -> tuple[float, float, float]:
    """p50 and p99 in ms, requests a second."""
    times: list[float] = []
    raw = wire.request("/v1/small")

    async def one(until_: float) -> None:
        reader, writer = await wire.open()
        while (began := time.perf_counter()) < until_:
            writer.write(raw)
            head = await reader.readuntil(b"\r\n\r\n")
            if not head.startswith(b"HTTP/1.1 200"):
                raise AssertionError(head)
            lower = head.lower()
            if b"content-length: " in lower:
                await reader.readexactly(int(lower.split(b"content-length: ")[1].split(b"\r\n")[0]))
            else:
                await reader.readuntil(b"0\r\n\r\n")
            times.append(time.perf_counter() - began)
        writer.close()

    end = time.perf_counter() + seconds
    began = time.perf_counter()
    await asyncio.gather(*(one(end) for _ in range(connections)))
    took = time.perf_counter() - began
    ordered = sorted(times)
    return (
        statistics.median(ordered) * 1e3,
        ordered[int(len(ordered) * 0.99)] * 1e3,
        len(ordered) / took,
    )


async def stream(wire: Wire) -> float:
    """MB/s of one 64 MiB reply."""
    reader, writer = await wire.open()
    began = time.perf_counter()
    writer.write(wire.request("/v1/stream"))
    await reader.readuntil(b"\r\n\r\n")
    got = 0
    while got < STREAM:
        data = await reader.read(1 << 20)
        if not data:
            raise AssertionError("torn")
        got += len(data)
    took = time.perf_counter() - began
    writer.close()
    return STREAM / took / 1e6


async def events(wire: Wire) -> tuple[float, float]:
    """Median and largest delay of an event in ms."""
    reader, writer = await wire.open()
    writer.write(wire.request("/v1/events"))
    await reader.readuntil(b"\r\n\r\n")
    delays = []
    while len(delays) < 200:
        line = await reader.readuntil(b"\n")
        if line.startswith(b"data: "):
            delays.append((time.time() - float(line[6:])) * 1e3)
    writer.close()
    return statistics.median(delays), max(delays)


async def crowd(wire: Wire) -> tuple[float, float, float]:
    """Median, 99th percentile and largest delay of an event in ms, of many streams at once."""
    delays: list[float] = []

    async def one() -> None:
        reader, writer = await wire.open()
        writer.write(wire.request("/v1/crowd"))
        await reader.readuntil(b"\r\n\r\n")
        for _ in range(CROWD_EVENTS):
            await reader.readuntil(b"data: ")
            sent = float(await reader.readuntil(b"\n"))
            delays.append((time.time() - sent) * 1e3)
        writer.close()

    await asyncio.gather(*(one() for _ in range(CROWD)))
    ordered = sorted(delays)
    return statistics.median(ordered), ordered[int(len(ordered) * 0.99)], ordered[-1]


# ------------------------------------------------------------------ what is measured


@contextlib.contextmanager
def broker(authority: Authority, port: int) -> Iterator[tuple[Wire, int]]:
    house = House()
    try:
        (house.config.parent / "ca.pem").write_bytes(authority.pem)
        house.config.write_text(
            f'version = 1\n[bindings.api]\nupstream = "https://localhost:{port}"\n'
            'kind = "anthropic"\ncredential = "key"\nallow_reserved = true\nca_file = "ca.pem"\n'
            '[[bindings.api.routes]]\npath = "/v1/"\nmatch = "prefix"\nmethods = ["GET", "POST"]\n'
        )
        house.start("store")
        process = house.start("broker")
        with house.client("store") as client:
            key = client.call("seal_key", Empty(), deadline_s=10).key  # type: ignore[attr-defined]
            value = Sealed(to=key, box=seal.box(Secret(b"sk-bench"), key))
            client.call("put", Put(name="key", value=value), deadline_s=10)
        with house.client("broker", "registry") as client:
            up = InstanceUp(instance=ID, name="work", boot=1, bindings=["api"])
            client.call("instance_up", up, deadline_s=10)
        with house.client("broker", "channel") as client:
            found = client.call("nonces", NoncesOf(instance=ID, boot=1), deadline_s=10)
        nonce = found.nonces[0].nonce  # type: ignore[attr-defined]
        head = f"Host: api.broker.internal\r\nx-api-key: {nonce}\r\n".encode()
        pid = inner_pid(process)
        assert pid is not None
        yield Wire(("unix", house.paths.runtime / "vm" / "broker" / ID / "sock"), head), pid
    finally:
        house.close()


@contextlib.contextmanager
def nginx(root: Path, port: int) -> Iterator[Wire]:
    listen = free_port()
    (root / "nginx.conf").write_text(
        f"""daemon off; pid {root}/pid; error_log {root}/error.log; worker_processes 1;
events {{ worker_connections 256; }}
http {{
  access_log off;
  client_body_temp_path {root}/t1; proxy_temp_path {root}/t2; fastcgi_temp_path {root}/t3;
  uwsgi_temp_path {root}/t4; scgi_temp_path {root}/t5;
  upstream up {{ server 127.0.0.1:{port}; keepalive 32; }}
  server {{ listen 127.0.0.1:{listen}; keepalive_requests 1000000;
    location / {{ proxy_pass https://up; proxy_http_version 1.1; proxy_buffering off;
      proxy_set_header Connection ""; proxy_set_header x-api-key sk-bench;
      proxy_ssl_verify on; proxy_ssl_trusted_certificate {root}/ca.pem; proxy_ssl_name localhost;
    }} }}
}}
"""
    )
    process = subprocess.Popen(["/usr/sbin/nginx", "-c", f"{root}/nginx.conf", "-p", str(root)])
    try:
        until("nginx listens", lambda: listens(listen))
        yield Wire(("tcp", listen), b"Host: localhost\r\n")
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def mitmproxy(program: str, root: Path, port: int) -> Iterator[Wire]:
    listen = free_port()
    process = subprocess.Popen(
        [
            program, "-q", "--mode", f"reverse:https://localhost:{port}", "-p", str(listen),
            "--listen-host", "127.0.0.1", "--set", f"confdir={root}/mitm",
            "--set", f"ssl_verify_upstream_trusted_ca={root}/ca.pem",
            "--set", "stream_large_bodies=1m", "--set", "http2=false",
            "--modify-headers", "/~q/x-api-key/sk-bench",
        ],
        env={"PATH": "/usr/bin:/bin", "HOME": str(root)},
    )  # fmt: skip
    try:
        until("mitmproxy listens", lambda: listens(listen), seconds=60)
        yield Wire(("tcp", listen), b"Host: localhost\r\n")
    finally:
        process.terminate()
        process.wait()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 1).close()
    except OSError:
        return False
    return True


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(name: str, wire: Wire, seconds: float, pid: int | None = None) -> None:
    async def all_() -> None:
        await small(wire, 1, min(1.0, seconds))  # what is opened at first
        p50, p99, rate = await small(wire, 1, seconds)
        print(f"{name:10} 1 connection    p50 {p50:7.3f} ms  p99 {p99:7.3f} ms  {rate:8.0f}/s")
        before = cpu_s(pid) if pid else 0.0
        p50, p99, rate = await small(wire, 16, seconds)
        more = ""
        if pid:
            more = f"  {(cpu_s(pid) - before) / (rate * seconds) * 1e3:.3f} ms of CPU a request"
        print(
            f"{name:10} 16 connections  p50 {p50:7.3f} ms  p99 {p99:7.3f} ms  {rate:8.0f}/s{more}"
        )
        rates = [await stream(wire) for _ in range(3)]
        print(f"{name:10} 64 MiB          {statistics.median(rates):7.0f} MB/s")
        median, largest = await events(wire)
        print(
            f"{name:10} SSE             median {median:.2f} ms, most {largest:.2f} ms", flush=True
        )
        before = cpu_s(pid) if pid else 0.0
        median, p99, largest = await crowd(wire)
        more = ""
        if pid:
            more = (
                f"  {(cpu_s(pid) - before) / (CROWD * CROWD_EVENTS) * 1e3:.3f} ms of CPU an event"
            )
        print(
            f"{name:10} {CROWD} x SSE       median {median:.2f} ms, p99 {p99:.2f} ms, "
            f"most {largest:.2f} ms{more}",
            flush=True,
        )

    asyncio.run(all_())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--mitmdump", default=shutil.which("mitmdump"))
    parser.add_argument("--upstream", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.upstream:
        asyncio.run(upstream(*given.upstream))
        return
    os.umask(0o077)
    root = Path(tempfile.mkdtemp(prefix="ab."))
    authority = Authority()
    (root / "ca.pem").write_bytes(authority.pem)
    certificate, key = authority.files(root)
    words = [sys.executable, __file__, "--upstream", str(certificate), str(key)]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        port = int(server.stdout.readline())
        context = ssl.create_default_context(cafile=root / "ca.pem")
        measure("direct", Wire(("tls", (port, context)), b"Host: localhost\r\n"), given.seconds)
        with broker(authority, port) as (wire, pid):
            measure("broker", wire, given.seconds, pid)
        with nginx(root, port) as wire:
            measure("nginx", wire, given.seconds)
        if given.mitmdump:
            with mitmproxy(given.mitmdump, root, port) as wire:
                measure("mitmproxy", wire, given.seconds)
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait()
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
