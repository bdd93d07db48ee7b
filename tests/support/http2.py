"""The least of a client of HTTP/2 without TLS (RFC 9113): requests one by one, and pings."""

from __future__ import annotations

import os
import socket

from support.guestnet import take

DATA, HEADERS, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 4, 6, 8
ACK, END_STREAM, END_HEADERS = 1, 1, 4
OK = b"\x88"  # `:status: 200` (RFC 7541, appendix A)


class Client:
    """Begins a connection on a socket that is connected."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._stream = -1
        sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        self._send(SETTINGS, 0, 0, b"")

    def get(self, path: bytes) -> bytes:
        """The content of an answer that is 200."""
        self._stream += 2
        # Three fields of the static table, and two of its names with values of ours.
        fields = b"\x82\x86" + b"".join(
            bytes((name, len(value))) + value for name, value in ((4, path), (1, b"app.test"))
        )
        self._send(HEADERS, END_HEADERS | END_STREAM, self._stream, fields)
        content = b""
        while True:
            kind, flags, stream, payload = self._next()
            assert stream == self._stream
            if kind == HEADERS:
                assert OK in payload[:2], payload  # after a change of the table's size, or first
            else:
                assert kind == DATA
                content += payload
            if flags & END_STREAM:
                return content

    def ping(self) -> None:
        sent = os.urandom(8)
        self._send(PING, 0, 0, sent)
        assert self._next() == (PING, ACK, 0, sent)

    def _next(self) -> tuple[int, int, int, bytes]:
        """The next frame that is not the connection's own affair."""
        while True:
            head = take(self._sock, 9)
            kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
            payload = take(self._sock, int.from_bytes(head[:3], "big"))
            if kind == SETTINGS and not flags & ACK:
                self._send(SETTINGS, ACK, 0, b"")
            elif kind not in (SETTINGS, WINDOW_UPDATE):
                return kind, flags, stream, payload

    def _send(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        head = len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big")
        self._sock.sendall(head + payload)
