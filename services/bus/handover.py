"""Descriptors, which the bus cannot carry: a SEQPACKET socket that hands them over.

The socket is the identity. Each lies in a directory that is mounted into the one service
that may ask there, so who asks is known before a byte is read, and there are no keys. One
datagram is one message: a request with its number, answered by the same number, either with
one descriptor beside it (SCM_RIGHTS, unix(7)) or with a reason. Many may be under way.

Bodies are msgpack under the same rules as on the bus (`wire`), and at most `MESSAGE_MAX`.
When a connection ends, what was under way for it is cancelled.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Final, Generic, Protocol, TypeVar

from agent_box.bus import wire
from agent_box.bus.errors import Reason, Refusal
from agent_box.bus.schema import Wire

MESSAGE_MAX: Final = 4096  # bytes
UNDER_WAY_MAX: Final = 256  # requests of one connection
CONNECTIONS_MAX: Final = 8  # one is enough; the last ones of a process that was killed linger
PAUSE_S: Final = 0.5  # without descriptors, until the next try to accept
_NUMBER: Final = 8  # bytes before the body, little-endian
_BACKLOG: Final = 16

R = TypeVar("R", bound=Wire)


class Hold(Protocol):
    """Starts a task and keeps it until it ends: `process.tasks.TaskSet.hold`."""

    def __call__(self, work: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]: ...


class HandoverServer(Generic[R]):
    """Answers requests of type `request` with descriptors.

    Args:
        path: where the socket is bound; what lay there is removed, so the caller must be the
            only process that serves it.
        request: the type of a request; anything else ends the connection.
        serve: gives the descriptor, which is closed here after it was sent. It may raise
            `Refusal`, which is told; any other exception is the task's.
        hold: starts the tasks that serve.
    """

    def __init__(
        self,
        path: Path,
        request: type[R],
        serve: Callable[[R], Awaitable[int]],
        hold: Hold,
    ) -> None:
        self._path = path
        self._request = request
        self._serve = serve
        self._hold = hold
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._paused: asyncio.TimerHandle | None = None
        self._connections: dict[socket.socket, dict[int, asyncio.Task[None]]] = {}

    def start(self) -> None:
        """Binds and listens.

        Raises:
            OSError: the path cannot be bound.
        """
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        self._listener.bind(str(self._path))
        self._listener.listen(_BACKLOG)
        self._listen()

    def close(self) -> None:
        """Ends every connection and what is under way for it. Twice is as once."""
        if self._paused is not None:
            self._paused.cancel()
        if self._listener.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
        for connection in list(self._connections):
            self._end(connection)

    def _listen(self) -> None:
        self._paused = None
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:  # no descriptors: it would be tried again and again at once
            loop.remove_reader(self._listener)
            self._paused = loop.call_later(PAUSE_S, self._listen)
            return
        if len(self._connections) >= CONNECTIONS_MAX:
            connection.close()
            return
        connection.setblocking(False)
        self._connections[connection] = {}
        loop.add_reader(connection, self._read, connection)

    def _end(self, connection: socket.socket) -> None:
        under_way = self._connections.pop(connection, None)
        if under_way is None:
            return
        asyncio.get_running_loop().remove_reader(connection)
        connection.close()
        for task in under_way.values():
            task.cancel()

    def _read(self, connection: socket.socket) -> None:
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
        under_way = self._connections[connection]
        if number in under_way:
            self._end(connection)
        elif len(under_way) >= UNDER_WAY_MAX:
            busy = Refusal(Reason.EXHAUSTED, f"{UNDER_WAY_MAX} requests are under way")
            self._send(connection, untrusted[:_NUMBER] + wire.encode_refusal(busy), None)
        else:
            work = self._answer(connection, under_way, number, request)
            task = under_way[number] = self._hold(work, name="handover")
            # one that is cancelled before its first step does not come to do it itself
            task.add_done_callback(lambda over: _forget(under_way, number, over))

    async def _answer(
        self,
        connection: socket.socket,
        under_way: dict[int, asyncio.Task[None]],
        number: int,
        request: R,
    ) -> None:
        head = number.to_bytes(_NUMBER, "little")
        try:
            fd = await self._serve(request)
        except Refusal as refusal:
            under_way.pop(number, None)  # the number may be used again once it is answered
            self._send(connection, head + wire.encode_refusal(refusal), None)
            return
        try:
            under_way.pop(number, None)
            self._send(connection, head, fd)
        finally:
            os.close(fd)

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


def _receive(connection: socket.socket) -> tuple[bytes, list[int], int]:
    """As `socket.recv_fds`, which does not pass on its flags: closed on exec from the start."""
    size = array.array("i").itemsize
    untrusted, ancillary, flags, _ = connection.recvmsg(
        MESSAGE_MAX, socket.CMSG_LEN(size), socket.MSG_CMSG_CLOEXEC
    )
    fds = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            fds.frombytes(data[: len(data) - len(data) % size])
    return untrusted, list(fds), flags


def _forget(
    under_way: dict[int, asyncio.Task[None]], number: int, task: asyncio.Task[None]
) -> None:
    if under_way.get(number) is task:  # the number may be in use again
        del under_way[number]


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
        except BlockingIOError:
            raise Refusal(Reason.UNAVAILABLE, f"{self._path}: it takes no more") from None
        except OSError as error:
            self.close()
            raise Refusal(Reason.UNAVAILABLE, f"{self._path}: {error.strerror}") from None
        finally:
            del self._waiting[number]
            # it may have come in the very moment in which we stopped waiting
            answer.cancel()
            if not taken and not answer.cancelled() and answer.exception() is None:
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
            untrusted, fds, flags = _receive(self._connection)
            if not untrusted or flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise OSError("the other side went away")
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
