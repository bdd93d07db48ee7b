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


def read_hello(untrusted_stream: bytes | bytearray) -> Hello | None:
    """What the client's first bytes say; None while they do not say it yet.

    Bytes that are no TLS name nobody.
    """
    data = untrusted_stream
    if not data:
        return None
    if data[0] != _HANDSHAKE or (len(data) > 1 and data[1] != 3):
        return NO_NAME
    message = bytearray()
    at = 0
    while True:
        if len(message) >= 4:
            if message[0] != _CLIENT_HELLO:
                return NO_NAME
            need = 4 + int.from_bytes(message[1:4], "big")
            if need > HELLO_MAX:
                return MALFORMED
            if len(message) >= need:
                return _client_hello(bytes(message[4:need]))
        if len(data) - at < 5:
            break
        if data[at] != _HANDSHAKE or data[at + 1] != 3:
            return MALFORMED  # another record within a message (RFC 8446 §5.1)
        length = data[at + 3] << 8 | data[at + 4]
        if not 0 < length <= _RECORD_MAX:
            return MALFORMED
        part = data[at + 5 : at + 5 + length]
        message += part
        if len(part) < length:
            # The rest of this record is under way; a name is told only by a whole message.
            if len(message) >= 4:
                if message[0] != _CLIENT_HELLO:
                    return NO_NAME
                need = 4 + int.from_bytes(message[1:4], "big")
                if len(message) >= need:
                    return _client_hello(bytes(message[4:need]))
            break
        at += 5 + length
    return MALFORMED if len(data) >= HELLO_MAX else None


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
