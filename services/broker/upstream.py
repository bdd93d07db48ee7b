"""Connections to one upstream: resolved here, judged, verified, kept and used again.

A name is resolved by the broker itself, and what is connected to is the address that was
judged: nothing resolves it a second time. TLS is 1.2 or newer, the chain and the name are
verified by the system's authorities and the binding's `ca_file`; there is no way to leave that
out. What the gate judges a connection by (where it really leads, for which name it was
verified) is read from its socket and stays with it, so every request over it is judged anew.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Final

from agent_box.broker import gate
from agent_box.broker.limits import Limits
from agent_box.broker.line import Line
from agent_box.broker.refusal import Reason, Refuse
from agent_box.broker.tls import Tls
from agent_box.config.addresses import parse_address

Resolve = Callable[[str, int], Awaitable[list[str]]]


class Unreachable(Exception):
    """The upstream cannot be reached as the binding wants it. `refuse` is what to answer."""

    def __init__(self, reason: Reason, status: int, message: str) -> None:
        super().__init__(message)
        self.refuse: Final = Refuse(reason, status, message)


class Connection:
    """One connection to an upstream, without a state of HTTP.

    Attributes:
        peer: what the gate judges it by.
        fresh: no request went over it yet.
    """

    def __init__(self, line: Line, peer: gate.Peer) -> None:
        self.line: Final = line
        self.peer: Final = peer
        self.fresh = True
        self.idle_since = 0.0

    @property
    def usable(self) -> bool:
        """It is open, and nothing came that was not asked for, as far as can be seen."""
        return self.line.quiet

    def close(self) -> None:
        """At once; what was not sent yet is lost."""
        self.line.abort()


async def resolve(host: str, port: int) -> list[str]:
    """All addresses of a name, by the host's resolver, in its order.

    Raises:
        OSError: there is none.
    """
    found = await asyncio.get_running_loop().getaddrinfo(
        host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
    )
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def tls(ca_pem: str | None) -> ssl.SSLContext:
    """How upstreams are verified.

    Args:
        ca_pem: authorities besides the system's.

    Raises:
        ssl.SSLError: they are no certificates.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # verifies chain and name
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION  # of 1.2: a write would have to wait for a read
    context.load_default_certs(ssl.Purpose.SERVER_AUTH)
    if ca_pem is not None:
        context.load_verify_locations(cadata=ca_pem)
    context.set_alpn_protocols(["http/1.1"])
    return context


class Upstream:
    """Where requests of one binding go, for one boot of one instance; nobody else's requests
    go over its connections.

    Args:
        ca_pem: text of the `ca_file` of `way`, None when it has none.
        resolver: gives the addresses of a name.
    """

    def __init__(
        self, way: gate.Way, ca_pem: str | None, limits: Limits, resolver: Resolve = resolve
    ) -> None:
        self._way: Final = way
        self._limits: Final = limits
        self._resolve: Final = resolver
        self._tls: Final = tls(ca_pem) if way.upstream.scheme == "https" else None
        self._idle: list[Connection] = []
        self._closed = False

    async def take(self, *, fresh: bool = False) -> Connection:
        """A connection: one that is kept, or a new one.

        Raises:
            Unreachable
        """
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if (
                fresh
                or not connection.usable
                or now - connection.idle_since > self._limits.pool_idle_s
            ):
                connection.close()
            else:
                return connection
        return await self._connect()

    def give(self, connection: Connection) -> None:
        """Back, after an exchange that ended in order."""
        if self._closed or not connection.usable or len(self._idle) >= self._limits.pool_each:
            connection.close()
            return
        connection.fresh = False
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.append(connection)

    def holds(self, connection: Connection) -> bool:
        """Whether it was given back and is kept."""
        return connection in self._idle

    def prune(self) -> None:
        """Closes what was kept for too long."""
        oldest = asyncio.get_running_loop().time() - self._limits.pool_idle_s
        for connection in [c for c in self._idle if c.idle_since < oldest or not c.usable]:
            self._idle.remove(connection)
            connection.close()

    def close(self) -> None:
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    async def _connect(self) -> Connection:
        last: Unreachable | None = None
        for address in await self._addresses():
            try:
                return await self._connect_to(address)
            except Unreachable as error:
                last = error
                if error.refuse.reason is Reason.UPSTREAM_TLS:
                    break  # another address of the name would be no better
        assert last is not None
        raise last

    async def _addresses(self) -> tuple[str, ...]:
        """Those that may be connected to, at least one."""
        host, port = self._way.upstream.host, self._way.upstream.port
        try:
            parse_address(host)
            found = [host]
        except ValueError:
            try:
                async with asyncio.timeout(self._limits.resolve_s):
                    found = await self._resolve(host, port)
            except TimeoutError:
                raise Unreachable(
                    Reason.UPSTREAM_DNS, 502, "the upstream's name was not resolved in time"
                ) from None
            except OSError:
                raise Unreachable(
                    Reason.UPSTREAM_DNS, 502, "the upstream's name cannot be resolved"
                ) from None
        judged = gate.addresses(self._way, found)
        if isinstance(judged, Refuse):
            raise Unreachable(judged.reason, judged.status, judged.message)
        return judged[: self._limits.addresses]

    async def _connect_to(self, address: str) -> Connection:
        upstream = self._way.upstream
        line = Line(self._limits.chunk, self._limits.buffer)
        try:
            transport = await self._opened(line, address)
        except TimeoutError:
            raise Unreachable(
                Reason.UPSTREAM_TIMEOUT, 504, "the upstream does not answer"
            ) from None
        except ssl.SSLCertVerificationError as error:
            why = f"the upstream's certificate is not good: {error.verify_message}"
            raise Unreachable(Reason.UPSTREAM_TLS, 502, why) from None
        except ssl.SSLError:
            raise Unreachable(
                Reason.UPSTREAM_TLS, 502, "the upstream speaks no TLS that is good enough"
            ) from None
        except OSError:
            raise Unreachable(
                Reason.UPSTREAM_CONNECT, 502, "the upstream cannot be connected to"
            ) from None
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer = gate.Peer(
            upstream=upstream,
            address=str(transport.get_extra_info("peername")[0]),
            verified=_verified(transport, upstream.host),
            ca_file=self._way.ca_file,
        )
        return Connection(line, peer)

    async def _opened(self, line: Line, address: str) -> asyncio.BaseTransport:
        """Connects a line to an address, with TLS where it is meant.

        Raises:
            ssl.SSLError, OSError, TimeoutError: it cannot be.
        """
        loop, seconds = asyncio.get_running_loop(), self._limits.connect_s
        context, host = self._tls, self._way.upstream.host
        protocol = line if context is None else Tls(context, host, line)
        async with asyncio.timeout(seconds):
            raw, _ = await loop.create_connection(
                lambda: protocol, address, self._way.upstream.port, flags=socket.AI_NUMERICHOST
            )
        if not isinstance(protocol, Tls):
            return raw
        try:
            await protocol.handshake(seconds)
        except BaseException:
            raw.abort()
            raise
        return protocol


def _verified(transport: asyncio.BaseTransport, host: str) -> str | None:
    """The name that OpenSSL verified the connection's certificate for, None without TLS."""
    spoken = transport.get_extra_info("ssl_object")
    if spoken is None:
        return None
    context = spoken.context
    if context.verify_mode is not ssl.CERT_REQUIRED or not context.check_hostname:
        return None
    return host if spoken.server_hostname == host else None
