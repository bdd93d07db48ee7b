"""Stream sockets that carry descriptors beside their bytes (SCM_RIGHTS, unix(7))."""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Iterable
from typing import Final

CHUNK: Final = 65536
_MOST: Final = 8  # descriptors in one call; the kernel splits at each message that has some
_INT: Final = array.array("i").itemsize


def send(sock: socket.socket, data: bytes | memoryview, fd: int | None) -> int:
    """Sends some of `data`, and with its first byte the descriptor; how many bytes it took.

    Raises:
        OSError: as send(2); BlockingIOError when it takes none now.
    """
    rights = []
    if fd is not None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
    return sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)


def receive(sock: socket.socket) -> tuple[bytes, list[int]]:
    """Some bytes, none at the end, and the descriptors beside them, closed on exec.

    Raises:
        OSError: as recv(2), or descriptors were lost on the way; those that came are closed.
    """
    data, ancillary, flags, _ = sock.recvmsg(
        CHUNK, socket.CMSG_SPACE(_MOST * _INT), socket.MSG_CMSG_CLOEXEC
    )
    found = array.array("i")
    for level, kind, body in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(body[: len(body) - len(body) % _INT])
    if flags & socket.MSG_CTRUNC:
        close(found)
        raise OSError("descriptors were lost")
    return data, list(found)


def close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
