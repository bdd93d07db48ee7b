"""What the broker adds to a request, beside nginx and mitmproxy as reverse proxies, in one run.

    python tests/bench/bench_broker.py [--seconds N] [--rounds N] [--mitmdump PATH | --mitmproxy]

Everything is up at once and measured in turns, and what is printed are medians over the rounds.
`--mitmproxy` installs that program into an environment of its own for the run, because what it
needs and what agent-box needs exclude each other.

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
from collections.abc import Iterator, Sequence
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
HELD = 100
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
                elif head.split(b" ", 2)[1] == b"/v1/held":
                    writer.write(
                        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
                        b"Transfer-Encoding: chunked\r\n\r\n7\r\ndata: \n\r\n"
                    )
                    await reader.read()  # until who asked goes away
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
def broker(authority: Authority, port: int) -> Iterator[tuple[Wire, list[int]]]:
    """Where it is, and the processes of the broker and of the store."""
    house = House()
    try:
        (house.config.parent / "ca.pem").write_bytes(authority.pem)
        house.config.write_text(
            f'version = 1\n[bindings.api]\nupstream = "https://localhost:{port}"\n'
            'kind = "anthropic"\ncredential = "key"\nallow_reserved = true\nca_file = "ca.pem"\n'
            '[[bindings.api.routes]]\npath = "/v1/"\nmatch = "prefix"\nmethods = ["GET", "POST"]\n'
        )
        processes = [house.start("store"), house.start("broker")]
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
        pids = [pid for process in reversed(processes) if (pid := inner_pid(process))]
        assert len(pids) == 2
        yield Wire(("unix", house.paths.runtime / "vm" / "broker" / ID / "sock"), head), pids
    finally:
        house.close()


@contextlib.contextmanager
def nginx(root: Path, port: int) -> Iterator[Wire]:
    listen = free_port()
    (root / "nginx.conf").write_text(
        f"""daemon off; pid {root}/pid; error_log {root}/error.log; worker_processes 1;
events {{ worker_connections 1024; }}
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


def rss(pid: int) -> int:
    """Bytes."""
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


async def held(wire: Wire, pid: int) -> float:
    """KiB of memory for each of `HELD` streams that are open and quiet."""
    before = rss(pid)
    open_ = [await wire.open() for _ in range(HELD)]
    for _, writer in open_:
        writer.write(wire.request("/v1/held"))
    for reader, _ in open_:
        await reader.readuntil(b"data: ")
    took = (rss(pid) - before) / HELD / 1024
    for _, writer in open_:
        writer.transport.abort()
    return took


class Peer:
    """One of those that are compared, and what was found of it in each round."""

    def __init__(self, name: str, wire: Wire, pids: Sequence[int] = ()) -> None:
        self.name, self.wire, self.pids = name, wire, pids
        self.found: dict[str, list[float]] = {}

    def add(self, **found: float) -> None:
        for name, value in found.items():
            self.found.setdefault(name, []).append(value)

    async def round(self, seconds: float) -> None:
        await small(self.wire, 1, min(0.3, seconds))  # what is opened at first
        p50, p99, rate = await small(self.wire, 1, seconds)
        self.add(one_p50=p50, one_p99=p99, one_rate=rate)
        before = [cpu_s(pid) for pid in self.pids]
        p50, p99, rate = await small(self.wire, 16, seconds)
        self.add(many_p50=p50, many_p99=p99, many_rate=rate)
        for number, pid in enumerate(self.pids):
            took = (cpu_s(pid) - before[number]) / (rate * seconds)
            self.add(**{f"cpu_{number}": took * 1e3})
        self.add(stream=statistics.median([await stream(self.wire) for _ in range(3)]))
        median, largest = await events(self.wire)
        self.add(event=median, event_most=largest)

    def tell(self) -> None:
        got = {name: statistics.median(values) for name, values in self.found.items()}
        for which, many in (("1 connection", "one"), ("16 connections", "many")):
            print(
                f"{self.name:10} {which:15} p50 {got[f'{many}_p50']:7.3f} ms  "
                f"p99 {got[f'{many}_p99']:7.3f} ms  {got[f'{many}_rate']:8.0f}/s"
            )
        if self.pids:
            whose = zip(("broker", "store"), ("cpu_0", "cpu_1"), strict=True)
            told = ", ".join(f"{name} {got[cpu]:.3f} ms" for name, cpu in whose)
            print(f"{self.name:10} CPU a request   {told}")
        print(f"{self.name:10} 64 MiB          {got['stream']:7.0f} MB/s")
        print(
            f"{self.name:10} SSE             median {got['event']:.2f} ms, "
            f"most {got['event_most']:.2f} ms",
            flush=True,
        )

    async def crowd(self) -> None:
        """Many streams at once, once."""
        before = cpu_s(self.pids[0]) if self.pids else 0.0
        median, p99, largest = await crowd(self.wire)
        more = ""
        if self.pids:
            took = (cpu_s(self.pids[0]) - before) / (CROWD * CROWD_EVENTS) * 1e3
            more = f"  {took:.3f} ms of CPU an event"
        print(
            f"{self.name:10} {CROWD} x SSE       median {median:.2f} ms, p99 {p99:.2f} ms, "
            f"most {largest:.2f} ms{more}",
            flush=True,
        )


def installed(root: Path) -> str:
    """mitmproxy in an environment of its own; the path of its program."""
    where = root / "mitmproxy"
    subprocess.run([sys.executable, "-m", "venv", where], check=True)
    subprocess.run([where / "bin" / "pip", "install", "-q", "mitmproxy"], check=True)
    return str(where / "bin" / "mitmdump")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--mitmdump", default=shutil.which("mitmdump"))
    parser.add_argument("--mitmproxy", action="store_true", help="install it for this run")
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
        program = installed(root) if given.mitmproxy else given.mitmdump
        with contextlib.ExitStack() as stack:
            direct = Wire(("tls", (port, context)), b"Host: localhost\r\n")
            wire, pids = stack.enter_context(broker(authority, port))
            peers = [
                Peer("direct", direct),
                Peer("broker", wire, pids),
                Peer("nginx", stack.enter_context(nginx(root, port))),
            ]
            if program:
                peers.append(Peer("mitmproxy", stack.enter_context(mitmproxy(program, root, port))))

            async def all_() -> None:
                await small(wire, 1, 0.3)
                took = await held(wire, pids[0])  # first: later, room of others is free for it
                for _ in range(given.rounds):
                    for peer in peers:
                        await peer.round(given.seconds)
                for peer in peers:
                    peer.tell()
                    await peer.crowd()
                print(f"broker     a stream takes  {took:7.1f} KiB")

            asyncio.run(all_())
    finally:
        server.send_signal(signal.SIGKILL)
        server.wait()
        shutil.rmtree(root)


if __name__ == "__main__":
    main()
