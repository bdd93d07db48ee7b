"""The doorbell: tells that there is something new, and never what.

A ring carries the publisher's epoch and the number of its newest journal entry, in one frame
of fixed size. Rings may be lost, doubled or merged (only the newest is kept for a slow
listener), so nobody may rely on one: the truth is read with a cursor (`replay`), the bell only
says when to look. Being connected, or connected again, rings too.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import zmq

from agent_box.bus import wire
from agent_box.bus.keys import KeyPair
from agent_box.bus.link import RECONNECT_MAX_MS, RECONNECT_MS
from agent_box.bus.sockets import Context, descriptor
from agent_box.bus.zap import Gate

_RING: Final = struct.Struct(f"!3s{wire.EPOCH_BYTES}sQ")
_FRAME_MAX: Final = 1_024  # the largest is a command of the CURVE handshake
SEQ_MAX: Final = (1 << 63) - 1

T = TypeVar("T")


class Ring(NamedTuple):
    """What the bell said.

    Attributes:
        epoch: of the publisher; None when the bell only says that it is connected.
        seq: number of the newest entry; 0 with epoch None.
    """

    epoch: bytes | None
    seq: int


class Publisher:
    """The bell's button, in the service that has the journal.

    Args:
        gate: of the service's server; it admits the listeners.
        sock: path of the bell's socket.
        secret: key pair of the service's role.
        service: its name.
        roles: who may listen: `policy.callers(service, "doorbell")`.

    Raises:
        zmq.ZMQError: the path cannot be bound.
    """

    def __init__(
        self, gate: Gate, *, sock: Path, secret: KeyPair, service: str, roles: frozenset[str]
    ) -> None:
        self._socket = gate.socket(zmq.PUB, f"agent-box/{service}/doorbell", secret, roles)
        self._socket.setsockopt(zmq.CONFLATE, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, _FRAME_MAX)
        self._socket.bind(f"ipc://{sock}")

    def ring(self, epoch: bytes, seq: int) -> None:
        """Rings. Never waits. Raises ValueError when `seq` is out of range."""
        if not 0 <= seq <= SEQ_MAX or len(epoch) != wire.EPOCH_BYTES:
            raise ValueError("not a ring")
        self._socket.send(_RING.pack(wire.MAGIC, epoch, seq))

    def close(self) -> None:
        self._socket.close(0)


class _Bell:
    """The listening socket, its monitor, and the newest ring."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        sock: Path,
        secret: KeyPair,
        server_key: bytes,
    ) -> None:
        self.newest: Ring | None = None
        self.socket = listener = context.socket(zmq.SUB)
        listener.linger = 0
        listener.setsockopt(zmq.CONFLATE, 1)
        listener.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        listener.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        listener.setsockopt(zmq.MAXMSGSIZE, _FRAME_MAX)
        listener.setsockopt(zmq.CURVE_SERVERKEY, server_key)
        listener.setsockopt(zmq.CURVE_PUBLICKEY, secret.public)
        listener.setsockopt(zmq.CURVE_SECRETKEY, secret.reveal())
        listener.setsockopt(zmq.SUBSCRIBE, b"")
        self.monitor = listener.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        self.monitor.linger = 0
        listener.connect(f"ipc://{sock}")

    def read(self) -> None:
        while True:
            try:
                self.monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            self.newest = self.newest or Ring(None, 0)
        while True:
            try:
                untrusted = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(untrusted) == _RING.size:
                magic, epoch, seq = _RING.unpack(untrusted)
                if magic == wire.MAGIC and seq <= SEQ_MAX:
                    self.newest = Ring(epoch, seq)

    def take(self) -> Ring | None:
        ring, self.newest = self.newest, None
        return ring

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close(0)


class Subscriber:
    """Listens, synchronously.

    Args:
        sock: path of the bell's socket.
        secret: key pair of the listening role.
        server_key: public key of the publisher's role, Z85.
    """

    def __init__(self, *, sock: Path, secret: KeyPair, server_key: bytes) -> None:
        self._context = Context()
        self._bell = _Bell(self._context, sock, secret, server_key)
        self._poller = zmq.Poller()
        self._poller.register(self._bell.socket, zmq.POLLIN)
        self._poller.register(self._bell.monitor, zmq.POLLIN)

    def wait(self, timeout_s: float) -> Ring | None:
        """The newest ring that has not been returned yet; None when none came in time."""
        until = wire.now_ns() + int(timeout_s * wire.NS)
        while True:
            self._bell.read()
            ring = self._bell.take()
            left_ms = -(-(until - wire.now_ns()) // 1_000_000)
            if ring is not None or left_ms <= 0:
                return ring
            self._poller.poll(left_ms)

    def close(self) -> None:
        self._bell.close()
        self._context.term()


class AsyncSubscriber:
    """Listens within a running loop. Args as for `Subscriber`; `context` as for the client."""

    def __init__(
        self,
        *,
        sock: Path,
        secret: KeyPair,
        server_key: bytes,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._context = Context() if context is None else context
        self._is_own = context is None
        self._bell = _Bell(self._context, sock, secret, server_key)
        self._rung = asyncio.Event()
        self._fds = (
            descriptor(self._bell.socket),
            descriptor(self._bell.monitor),
        )
        for fd in self._fds:
            self._loop.add_reader(fd, self._ready)
        self._ready()

    async def wait(self, timeout_s: float) -> Ring | None:
        """The newest ring that has not been returned yet; None when none came in time."""
        if self._bell.newest is None:
            self._rung.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._rung.wait()
            except TimeoutError:
                return None
        return self._bell.take()

    def close(self) -> None:
        for fd in self._fds:
            self._loop.remove_reader(fd)
        self._bell.close()
        if self._is_own:
            self._context.term()

    def _ready(self) -> None:
        self._bell.read()
        if self._bell.newest is not None:
            self._rung.set()


async def replay(
    bell: AsyncSubscriber,
    read: Callable[[int], Awaitable[tuple[Sequence[T], int]]],
    cursor: int,
    idle_s: float,
) -> AsyncIterator[T]:
    """All entries after `cursor`, in order, each once, for ever.

    Args:
        bell: says when to look.
        read: gives the entries after a cursor, as many as it likes, and the next cursor.
        cursor: where to begin.
        idle_s: looks after this many seconds even without a ring, since rings may be lost.
    """
    while True:
        entries, cursor = await read(cursor)
        for entry in entries:
            yield entry
        if not entries:
            await bell.wait(idle_s)
