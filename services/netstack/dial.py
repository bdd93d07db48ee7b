"""Connecting to a name with several addresses, in turn and soon at once (RFC 8305)."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from ipaddress import ip_address
from typing import Final

from agent_box.netstack.poller import IN, UNSURE, Poller

STAGGER_S: Final = 0.25  # RFC 8305 §5
_BEGUN: Final = (0, errno.EINPROGRESS, errno.EALREADY)
_FULL: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Done = Callable[[socket.socket | None, str | None, int], None]


def order(addresses: Sequence[str]) -> list[str]:
    """IPv6 and IPv4 by turns, the first family first (RFC 8305 §4)."""
    if len(addresses) == 1:
        return list(addresses)
    six = [a for a in addresses if ":" in a]
    four = [a for a in addresses if ":" not in a]
    mixed = []
    while six or four:
        if six:
            mixed.append(six.pop(0))
        if four:
            mixed.append(four.pop(0))
    return mixed


class Dial:
    """One attempt to connect. Calls `done` once, unless closed: with the socket, which is still
    watched by the poller and wants `hand_over`, and its address; or with None and an errno.

    Attributes:
        spoken: whether the socket that won may have something to be read already.
    """

    __slots__ = (
        "_attempts", "_done", "_error", "_left", "_over", "_poller", "_port", "_step", "spoken",
    )  # fmt: skip

    def __init__(self, poller: Poller, addresses: Sequence[str], port: int, done: Done) -> None:
        self._poller = poller
        self._left = order(addresses)
        self._port = port
        self._done = done
        self._attempts: list[_Attempt] = []
        self._error = errno.EHOSTUNREACH
        self._over = False
        self._step = 0
        self.spoken = False

    def start(self) -> None:
        """There is no limit of time here: who waits closes it."""
        self._next()

    def close(self) -> None:
        """Gives up, quietly."""
        self._over = True
        for attempt in self._attempts:
            attempt.close()
        self._attempts.clear()

    def won(self, attempt: _Attempt, *, spoken: bool) -> None:
        self.spoken = spoken
        self._attempts.remove(attempt)
        self.close()
        self._done(attempt.sock, attempt.address, 0)

    def lost(self, attempt: _Attempt, code: int) -> None:
        self._attempts.remove(attempt)
        attempt.close()
        self._note(code)
        self._next()

    def _note(self, code: int) -> None:
        # Refused says most: somebody was there.
        if self._error != errno.ECONNREFUSED:
            self._error = code

    def _next(self) -> None:
        while self._left and not self._over:
            address = self._left.pop(0)
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            try:
                sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            except OSError as error:
                self._note(error.errno or errno.EIO)
                continue
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                # The guest's own probes are answered here, so only we can see that nobody is there.
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                code = sock.connect_ex((address, self._port))
                if code not in _BEGUN:
                    raise OSError(code, "")
                attempt = _Attempt(self, sock, address)
                self._poller.watch(sock.fileno(), attempt)
            except OSError as error:
                sock.close()
                self._note(error.errno or errno.EIO)
                continue
            self._attempts.append(attempt)
            if code == 0:
                self.won(attempt, spoken=False)  # an edge tells
            elif self._left:
                self._step += 1
                self._poller.at(self._poller.now + STAGGER_S, partial(self._late, self._step))
            return
        if not self._over and not self._attempts:
            self._over = True
            self._done(None, None, self._error)

    def _late(self, step: int) -> None:
        if not self._over and step == self._step:
            self._next()


class _Attempt:
    __slots__ = ("_dial", "address", "sock")

    def __init__(self, dial: Dial, sock: socket.socket, address: str) -> None:
        self._dial = dial
        self.sock = sock
        self.address = address

    def on_event(self, events: int) -> None:
        if events & UNSURE:
            code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self._dial.lost(self, code)
                return
        # Else the first edge of a socket that connects says that it has.
        self._dial.won(self, spoken=bool(events & (IN | UNSURE)))

    def close(self) -> None:
        self._dial._poller.closing(self.sock.fileno())
        self.sock.close()


def full(code: int) -> bool:
    """Whether the error says that we have no descriptor or memory left."""
    return code in _FULL


@lru_cache(1024)
def usable(address: str) -> bool:
    """Whether it is an address at all. Files of the host may hold anything."""
    try:
        ip_address(address)
    except ValueError:
        return False
    return True
