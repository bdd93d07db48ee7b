"""DNS over TCP at the gateway: messages with a length before each (RFC 7766).

The flow ends in a socket pair: one end is the upstream that the relay knows, the other is read
here. So windows, half-closes and slow readers are the relay's, as for any flow.
"""

from __future__ import annotations

import socket
from typing import Final

from agent_box.netstack.names import Dns
from agent_box.netstack.poller import Poller

_OPEN_MAX: Final = 64
_PENDING_MAX: Final = 16  # queries of one connection at a time
_OUT_MAX: Final = 1 << 17


class DnsStreams:
    """All of an instance; the oldest gives way when there are too many."""

    def __init__(self, poller: Poller, dns: Dns) -> None:
        self.poller = poller
        self.dns = dns
        self.open: dict[int, DnsStream] = {}

    def connect(self) -> socket.socket:
        """A new connection's end for the relay. Raises OSError."""
        if len(self.open) >= _OPEN_MAX:
            next(iter(self.open.values())).close()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            DnsStream(self, ours)
        except OSError:
            ours.close()
            theirs.close()
            raise
        return theirs

    def close(self) -> None:
        for stream in list(self.open.values()):
            stream.close()


class DnsStream:
    """One connection."""

    def __init__(self, owner: DnsStreams, sock: socket.socket) -> None:
        self._owner = owner
        self._sock = sock
        self._in = bytearray()
        self._out = bytearray()
        self._pending = 0
        self._ended = False
        owner.poller.watch(sock.fileno(), self)
        owner.open[sock.fileno()] = self

    def on_event(self, events: int) -> None:
        try:
            self._work()
        except OSError:
            self.close()

    def close(self) -> None:
        if self._sock.fileno() >= 0:
            self._owner.open.pop(self._sock.fileno(), None)
            self._owner.poller.forget(self._sock.fileno())
            self._sock.close()

    def _work(self) -> None:
        self._flush()
        while self._pending < _PENDING_MAX and len(self._out) < _OUT_MAX:
            if self._sock.fileno() < 0:
                return
            length = int.from_bytes(self._in[:2], "big")
            if len(self._in) >= 2 and len(self._in) >= 2 + length:
                message = bytes(self._in[2 : 2 + length])
                del self._in[: 2 + length]
                self._pending += 1
                if not self._owner.dns.ask(message, self._answer, udp=False):
                    raise OSError("not a query")
                continue
            if self._ended:
                break
            try:
                data = self._sock.recv(65536)
            except BlockingIOError:
                break
            if not data:
                self._ended = True
            self._in += data
        self._flush()
        if self._ended and not self._out and not self._pending:
            self.close()

    def _answer(self, message: bytes) -> None:
        self._pending -= 1
        if self._sock.fileno() < 0:
            return
        self._out += len(message).to_bytes(2, "big") + message
        self._owner.poller.at(self._owner.poller.now, self._again)

    def _again(self) -> None:
        if self._sock.fileno() >= 0:
            self.on_event(0)

    def _flush(self) -> None:
        while self._out:
            try:
                del self._out[: self._sock.send(self._out)]
            except BlockingIOError:
                return
