"""Datagrams with descriptors, over SEQPACKET sockets of this host."""

from __future__ import annotations

import array
import os
import socket
import struct
from collections.abc import Iterable, Sequence
from typing import Final

from agent_box.helper import wire
from agent_box.helper.contract import MESSAGE_BYTES

MAX_FDS: Final = 8  # that are received, to be closed; none of ours has more than one
_INT: Final = struct.calcsize("i")


def send(sock: socket.socket, data: bytes, fds: Sequence[int] = ()) -> None:
    """One datagram, whole or not at all.

    Raises:
        OSError: as the kernel says; BlockingIOError when the other does not read.
    """
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)


def receive(sock: socket.socket, fds: int = 0) -> tuple[bytes, list[int]]:
    """One datagram, empty at the end; and exactly `fds` descriptors, close-on-exec, or none.

    Raises:
        wire.WireError: too long, or other descriptors than those; all were closed.
        OSError: as the kernel says.
    """
    space = socket.CMSG_SPACE(MAX_FDS * _INT)
    data, ancillary, flags, _ = sock.recvmsg(MESSAGE_BYTES + 1, space, socket.MSG_CMSG_CLOEXEC)
    found: list[int] = []
    for level, kind, body in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers = array.array("i")
            numbers.frombytes(body[: len(body) - len(body) % _INT])
            found += numbers
    truncated = flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
    if truncated or len(data) > MESSAGE_BYTES or len(found) not in {0, fds}:
        close(found)
        raise wire.WireError("a datagram that is too long, or has descriptors that it must not")
    return data, found


def close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)


def peer(sock: socket.socket) -> tuple[int, int, int]:
    """pid, uid and gid of the process that connected (SO_PEERCRED, unix(7))."""
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, gid = struct.unpack("3i", raw)
    return pid, uid, gid


def listen(directory: int, name: str, kind: int, backlog: int) -> socket.socket:
    """A listening socket in an open directory, in the place of one that lies there.

    Through /proc/self/fd, so that the length of the directory's path does not matter.
    """
    sock = socket.socket(socket.AF_UNIX, kind)
    try:
        try:
            os.unlink(name, dir_fd=directory)
        except FileNotFoundError:
            pass
        sock.bind(f"/proc/self/fd/{directory}/{name}")
        sock.listen(backlog)
    except BaseException:
        sock.close()
        raise
    return sock


def connect(directory: int, name: str, kind: int) -> socket.socket:
    """A connected socket, at once or not at all.

    Raises:
        OSError: nobody listens there, or cannot take more.
    """
    sock = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK)
    try:
        sock.connect(f"/proc/self/fd/{directory}/{name}")
        sock.setblocking(True)
    except BaseException:
        sock.close()
        raise
    return sock
