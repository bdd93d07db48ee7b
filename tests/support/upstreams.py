"""Upstreams on loopback behind TLS, which remember what they were asked."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import trustme
from aiohttp import web

HOST = "localhost"


class Authority:
    """A CA of a test. `pem` is what a binding's `ca_file` holds."""

    def __init__(self) -> None:
        self._ca = trustme.CA()
        self.pem = self._ca.cert_pem.bytes()

    def server(self, *names: str, certificate: trustme.LeafCert | None = None) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        leaf = certificate or self._ca.issue_cert(*(names or (HOST, "127.0.0.1")))
        leaf.configure_cert(context)
        return context

    def leaf(self, *names: str, **options: object) -> trustme.LeafCert:
        return self._ca.issue_cert(*names, **options)  # type: ignore[arg-type]

    def files(self, directory: Path, *names: str) -> tuple[Path, Path]:
        """Certificate and key, for servers that read them from files."""
        leaf = self._ca.issue_cert(*(names or (HOST, "127.0.0.1")))
        certificate, key = directory / "server.pem", directory / "server.key"
        certificate.write_bytes(b"".join(each.bytes() for each in leaf.cert_chain_pems))
        key.write_bytes(leaf.private_key_pem.bytes())
        return certificate, key


@dataclass
class Asked:
    """One request, as the upstream saw it."""

    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes = b""

    def get(self, name: str) -> list[str]:
        return [value for each, value in self.headers if each.lower() == name]


Answers = Callable[[web.Request, Asked], Awaitable[web.StreamResponse]]


@dataclass
class App:
    """An aiohttp server. `asked` are the requests so far; `answer` may be replaced."""

    port: int = 0
    asked: list[Asked] = field(default_factory=list)
    connections: int = 0
    answer: Answers | None = None
    read_body: bool = True
    _runner: web.AppRunner | None = None

    async def start(self, tls: ssl.SSLContext | None, port: int = 0) -> App:
        app = web.Application(client_max_size=1 << 40)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(
            app, access_log=None, auto_decompress=False, shutdown_timeout=0.1
        )
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port, ssl_context=tls)
        await site.start()
        assert site._server is not None
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]
        return self

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        asked = Asked(
            request.method,
            request.raw_path if hasattr(request, "raw_path") else str(request.rel_url),
            [(n.decode(), v.decode("latin-1")) for n, v in request.raw_headers],
        )
        self.asked.append(asked)
        if self.read_body:
            asked.body = await request.read()
        if self.answer is not None:
            return await self.answer(request, asked)
        return web.json_response({"ok": True})

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()


Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Raw:
    """A server that does what a test writes byte for byte. `heads` are what it was sent."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self.port = 0
        self.connections = 0
        self.heads: list[bytes] = []
        self._server: asyncio.Server | None = None

    async def start(self, tls: ssl.SSLContext | None) -> Raw:
        self._server = await asyncio.start_server(self._accepted, "127.0.0.1", 0, ssl=tls)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            await self._serve(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass  # the broker hung up, which some tests are about
        finally:
            writer.close()

    async def head(self, reader: asyncio.StreamReader) -> bytes:
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        return head

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
