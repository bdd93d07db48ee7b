"""Whole messages on non-blocking sockets, by the shortest way through pyzmq.

`send_multipart` and `recv_multipart` cost three times as much, and finding a socket empty by
`zmq.Again` three times as much as asking it first; at a few dozen microseconds a call that counts.
"""

from __future__ import annotations

from typing import Final

import zmq
from zmq.backend import Socket as _Plain

FRAMES_MAX: Final = 8  # further ones are taken off and dropped: a message of ours has at most four

_send, _recv, _get = _Plain.send, _Plain.recv, _Plain.get
_LAST: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_EVENTS: Final = int(zmq.EVENTS)
_POLLIN: Final = int(zmq.POLLIN)
_POLLOUT: Final = int(zmq.POLLOUT)


class Context(zmq.Context[zmq.Socket[bytes]]):
    """A ZeroMQ context that ends when it is told to, and not when it is forgotten.

    Its end waits for the end of its sockets, in C and without limit. A garbage collector that
    came to the context before the sockets would wait there for ever.
    """

    def __del__(self) -> None:
        """What was not closed is left to the end of the process."""


def descriptor(socket: zmq.Socket[bytes]) -> int:
    """The descriptor to wait on. It tells of a change, not of a state (`readable` does)."""
    return int(socket.getsockopt(zmq.FD))


def readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message waits. Looks into the socket itself, so it is also right after a send,
    which may have taken the descriptor's signal with it."""
    return bool(int(_get(socket, _EVENTS)) & _POLLIN)


def writable(socket: zmq.Socket[bytes]) -> bool:
    """Whether there is room for a message."""
    return bool(int(_get(socket, _EVENTS)) & _POLLOUT)


def receive(socket: zmq.Socket[bytes], flags: int = _LAST) -> list[bytes]:
    """One message that waits. Raises zmq.Again when none does.

    With `flags` 0 it may take as long as the socket's RCVTIMEO to come.
    """
    frame = _recv(socket, flags, False)
    frames = [frame.bytes]
    while frame.more:
        frame = _recv(socket, _LAST, False)
        if len(frames) < FRAMES_MAX:
            frames.append(frame.bytes)
    return frames


def receive_from(socket: zmq.Socket[bytes]) -> tuple[bytes, str, list[bytes]]:
    """One message that waits at a ROUTER: whence, the role that the ZAP handler gave the
    sender, and the frames. Raises zmq.Again when none waits."""
    first = frame = _recv(socket, _LAST, False)
    frames: list[bytes] = []
    while frame.more:
        frame = _recv(socket, _LAST, False)
        if len(frames) < FRAMES_MAX:
            frames.append(frame.bytes)
    return first.bytes, str(first.get("User-Id")), frames


def send(socket: zmq.Socket[bytes], *frames: bytes) -> None:
    """One message, whole or not at all. Raises zmq.Again or another ZMQError."""
    for frame in frames[:-1]:
        _send(socket, frame, _MORE)
    _send(socket, frames[-1], _LAST)
