"""Descriptors, which the bus cannot carry: a SEQPACKET socket that hands them over.

The socket is the identity. Each lies in a directory that is mounted into the one service
that may ask there, so who asks is known before a byte is read, and there are no keys. One
datagram is one message: a request with its number, answered by the same number, either with
one descriptor beside it (SCM_RIGHTS, unix(7)) or with a reason. Many may be under way.

Bodies are msgpack under the same rules as on the bus (`wire`), and at most `MESSAGE_MAX`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final, Generic, TypeVar

from agent_box.bus import wire
from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.schema import Wire

MESSAGE_MAX: Final = 4096  # bytes
UNDER_WAY_MAX: Final = 256  # requests of one connection
_NUMBER: Final = 8  # bytes before the body, little-endian
_BACKLOG: Final = 16

R = TypeVar("R", bound=Wire)


class HandoverServer(Generic[R]):
    """Answers requests of type `request` with descriptors.

    Args:
        path: where the socket is bound; what lay there is removed, so the caller must be the
            only process that serves it.
        request: the type of a request; anything else ends the connection.
        serve: gives the descriptor, which is closed here after it was sent. It may raise
            `Refusal`, which is told; any other exception is the task's.
        spawn: keeps the tasks that serve.
    """

    def __init__(
        self,
        path: Path,
        request: type[R],
        serve: Callable[[R], Awaitable[int]],
        spawn: Callable[..., None],
    ) -> None:
        self._path = path
        self._request = request
        self._serve = serve
        self._spawn = spawn
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._connections: set[socket.socket] = set()

    def start(self) -> None:
        """Binds and listens.

        Raises:
            OSError: the path cannot be bound.
        """
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        self._listener.bind(str(self._path))
        self._listener.listen(_BACKLOG)
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def close(self) -> None:
        loop = asyncio.get_running_loop()
        for open_socket in (self._listener, *self._connections):
            loop.remove_reader(open_socket)
            open_socket.close()
        self._connections.clear()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return
        connection.setblocking(False)
        self._connections.add(connection)
        under_way: set[int] = set()
        asyncio.get_running_loop().add_reader(connection, self._read, connection, under_way)

    def _end(self, connection: socket.socket) -> None:
        if connection in self._connections:
            self._connections.discard(connection)
            asyncio.get_running_loop().remove_reader(connection)
            connection.close()

    def _read(self, connection: socket.socket, under_way: set[int]) -> None:
        try:
            untrusted, _, flags, _ = connection.recvmsg(MESSAGE_MAX)
        except BlockingIOError:
            return
        except OSError:
            untrusted, flags = b"", 0
        if not untrusted or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            self._end(connection)
            return
        try:
            request = wire.decode_body(untrusted[_NUMBER:], self._request)
        except wire.WireError:
            self._end(connection)
            return
        number = int.from_bytes(untrusted[:_NUMBER], "little")
        if number in under_way or len(under_way) >= UNDER_WAY_MAX:
            self._end(connection)
            return
        under_way.add(number)
        self._spawn(self._answer(connection, under_way, number, request), name="handover")

    async def _answer(
        self, connection: socket.socket, under_way: set[int], number: int, request: R
    ) -> None:
        head = number.to_bytes(_NUMBER, "little")
        try:
            fd = await self._serve(request)
        except Refusal as refusal:
            self._send(connection, head + wire.encode_refusal(refusal), None)
        else:
            try:
                self._send(connection, head, fd)
            finally:
                os.close(fd)
        finally:
            under_way.discard(number)

    def _send(self, connection: socket.socket, message: bytes, fd: int | None) -> None:
        if connection not in self._connections:
            return  # the caller went away; what it asked for is closed
        try:
            if fd is None:
                connection.send(message)
            else:
                socket.send_fds(connection, [message], [fd])
        except OSError:
            self._end(connection)  # it does not read its answers, or is gone


class HandoverClient:
    """Asks for descriptors. One connection, made at first need and again after it was lost."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection: socket.socket | None = None
        self._waiting: dict[int, asyncio.Future[int]] = {}
        self._number = 0

    async def ask(self, request: Wire, *, deadline_s: float) -> int:
        """The descriptor, owned by the caller.

        Raises:
            Refusal: what the other side said; `UNAVAILABLE` when it is not there or went
                away, `DEADLINE` when it did not answer in `deadline_s` seconds.
        """
        connection = self._connected()
        self._number += 1
        number = self._number
        answer: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        taken = False
        try:
            connection.send(number.to_bytes(_NUMBER, "little") + wire.encode_body(request))
            async with asyncio.timeout(deadline_s):
                fd = await answer
            taken = True
            return fd
        except TimeoutError:
            raise Refusal(Reason.DEADLINE, "no descriptor was handed over in time") from None
        except OSError as error:
            self.close()
            raise Refusal(Reason.UNAVAILABLE, f"{self._path.name}: {error.strerror}") from None
        finally:
            del self._waiting[number]
            # it may have come in the very moment in which we stopped waiting
            if not taken and not answer.cancel() and answer.exception() is None:
                os.close(answer.result())

    def close(self) -> None:
        """Ends the connection; whoever waits is told that it is gone."""
        if self._connection is None:
            return
        asyncio.get_running_loop().remove_reader(self._connection)
        self._connection.close()
        self._connection = None
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(Refusal(Reason.UNAVAILABLE, "the connection was lost"))

    def _connected(self) -> socket.socket:
        if self._connection is None:
            made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            made.setblocking(False)
            try:
                made.connect(str(self._path))
            except OSError as error:
                made.close()
                raise Refusal(
                    Reason.UNAVAILABLE, f"{self._path}: {error.strerror or error}"
                ) from None
            self._connection = made
            asyncio.get_running_loop().add_reader(made, self._read)
        return self._connection

    def _read(self) -> None:
        if self._connection is None:
            return
        fds: list[int] = []
        try:
            untrusted, fds, flags, _ = socket.recv_fds(self._connection, MESSAGE_MAX, 1)
            if not untrusted or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise OSError("the other side went away")
            for fd in fds:
                os.set_inheritable(fd, False)
            self._take(untrusted, fds)
        except BlockingIOError:
            return
        except (OSError, wire.WireError):
            self.close()
        finally:
            for fd in fds:
                os.close(fd)

    def _take(self, untrusted: bytes, fds: list[int]) -> None:
        number, body = int.from_bytes(untrusted[:_NUMBER], "little"), untrusted[_NUMBER:]
        answer = self._waiting.get(number)
        if answer is None or answer.done():
            return  # nobody waits for it any more; the descriptor is closed
        if body:
            answer.set_exception(wire.to_refusal(body))
        elif fds:
            answer.set_result(fds.pop())
        else:
            raise OSError("an answer without a descriptor")
