"""The server that a TLS client names, out of the first bytes it sends (RFC 8446, RFC 6066 §3).

The bytes are the guest's. They may come in any pieces, and a handshake message may be spread
over records. What no client sends by accident, such as two names, is told as a name that no
policy allows, so that it never counts as a client which names nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

HELLO_MAX: Final = 1 << 16  # bytes of the stream; real ones stay below 4 KiB, with keys of PQC
_RECORD_MAX: Final = 1 << 14
_HANDSHAKE: Final = 22
_CLIENT_HELLO: Final = 1
_SERVER_NAME: Final = 0
_HOST_NAME: Final = 0


@dataclass(frozen=True)
class Hello:
    """What is known of it. With `named`, `sni` is untrusted text, and no name when malformed."""

    kind: Literal["no-name", "named"]
    sni: str | None


NO_NAME: Final = Hello("no-name", None)
MALFORMED: Final = Hello("named", "")


class HelloReader:
    """Reads one client's first bytes as they come; the work is in proportion to them.

    Attributes:
        data: all that was fed.
    """

    __slots__ = ("_at", "_left", "_message", "data")

    def __init__(self) -> None:
        self.data = bytearray()
        self._at = 0
        self._left = 0  # of the record that is being read
        self._message = bytearray()

    def feed(self, untrusted_piece: bytes | memoryview) -> Hello | None:
        """What the bytes so far say; None while they do not say it yet.

        Bytes that are no TLS name nobody.
        """
        data = self.data
        data += untrusted_piece
        if not data:
            return None
        if data[0] != _HANDSHAKE or (len(data) > 1 and data[1] != 3):
            return NO_NAME
        while True:
            if self._left:
                part = data[self._at : self._at + self._left]
                if not part:
                    break
                self._message += part
                self._at += len(part)
                self._left -= len(part)
                found = _whole(self._message)
                if found is not None:
                    return found
                continue
            if len(data) - self._at < 5:
                break
            if data[self._at] != _HANDSHAKE or data[self._at + 1] != 3:
                return MALFORMED  # another record within a message (RFC 8446 §5.1)
            self._left = data[self._at + 3] << 8 | data[self._at + 4]
            if not 0 < self._left <= _RECORD_MAX:
                return MALFORMED
            self._at += 5
        return MALFORMED if len(data) >= HELLO_MAX else None


def read_hello(untrusted_stream: bytes | bytearray) -> Hello | None:
    """What a client's first bytes say, given at once; see `HelloReader.feed`."""
    return HelloReader().feed(bytes(untrusted_stream))


def _whole(message: bytearray) -> Hello | None:
    """What a handshake message says; None while there is not all of it."""
    if len(message) < 4:
        return None
    if message[0] != _CLIENT_HELLO:
        return NO_NAME
    need = 4 + int.from_bytes(message[1:4], "big")
    if need > HELLO_MAX:
        return MALFORMED
    return _client_hello(bytes(message[4:need])) if len(message) >= need else None


class _Reader:
    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        part = self.data[self.at : self.at + count]
        if len(part) < count:
            raise ValueError("it ends too early")
        self.at += count
        return part

    def vector(self, width: int) -> bytes:
        return self.take(int.from_bytes(self.take(width), "big"))

    @property
    def left(self) -> int:
        return len(self.data) - self.at


def _client_hello(body: bytes) -> Hello:
    try:
        reader = _Reader(body)
        reader.take(2 + 32)  # legacy version, random
        reader.vector(1)  # session id
        reader.vector(2)  # cipher suites
        reader.vector(1)  # compression methods
        if not reader.left:
            return NO_NAME
        extensions = _Reader(reader.vector(2))
        if reader.left:
            return MALFORMED
        found: Hello = NO_NAME
        while extensions.left:
            kind = int.from_bytes(extensions.take(2), "big")
            value = extensions.vector(2)
            if kind == _SERVER_NAME:
                if found is not NO_NAME:
                    return MALFORMED
                found = _server_name(value)
        return found
    except ValueError:
        return MALFORMED


def _server_name(value: bytes) -> Hello:
    names = _Reader(_Reader(value).vector(2))
    if len(value) != names.left + 2:
        return MALFORMED
    kind = names.take(1)[0]
    name = names.vector(2)
    if kind != _HOST_NAME or names.left or not name:
        return MALFORMED
    return Hello("named", name.decode("ascii", "backslashreplace"))
