"""Content codings undone piece by piece, for a reader that only looks.

What goes to the guest are the bytes as they came; this is for scanning and counting them.
Pieces are bounded, whatever the coding says, and so is what a reply may grow to. Sources: RFC
9110 section 8.4.1, RFC 1950 to 1952, RFC 7932 (br), RFC 8878 and RFC 9659 (zstd, windows of
8 MiB at most).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Final, Protocol

import brotli
import zstandard

PIECE: Final = 256 << 10  # bytes of a decoded piece; zstd's are up to 64 times as long
FREE: Final = 64 << 20  # decoded bytes that need no excuse
RATIO: Final = 256  # decoded bytes for each byte that came, beyond those
CODINGS_MAX: Final = 2  # one upon the other
_ZSTD_SLICE: Final = 512  # bytes; each four of them may stand for 128 KiB
_ZSTD_WINDOW: Final = 8 << 20


class Unreadable(Exception):
    """The bytes are not what their coding says."""


class Bomb(Exception):
    """They decode to far more than they are."""


class Unknown(Exception):
    """There is no such coding here."""


class Decoder(Protocol):
    def feed(self, untrusted: bytes) -> Iterator[bytes]: ...


class _Zlib:
    """gzip, of one member or several, and deflate, with its wrapper or without."""

    def __init__(self, *, gzip: bool) -> None:
        self._gzip = gzip
        self._start = b""  # of a member, until it shows what it is
        self._object: zlib._Decompress | None = None
        self._plain = False  # what follows the last member is nothing compressed

    def feed(self, untrusted: bytes) -> Iterator[bytes]:
        rest = self._start + untrusted
        self._start = b""
        while rest:
            if self._plain:
                yield rest
                return
            if self._object is None:
                if len(rest) < 2:
                    self._start = rest
                    return
                self._object = self._opened(rest)
                continue
            try:
                piece = self._object.decompress(rest, PIECE)
            except zlib.error:
                raise Unreadable from None
            if piece:
                yield piece
            if self._object.eof:
                rest = self._object.unused_data
                self._object = None
                # deflate has one member; gzip's next one begins as the first did
                self._plain = bool(rest) and not (self._gzip and rest[:1] == b"\x1f")
            else:
                rest = self._object.unconsumed_tail

    def _opened(self, start: bytes) -> zlib._Decompress:
        if self._gzip:
            return zlib.decompressobj(16 + zlib.MAX_WBITS)
        wrapped = start[0] & 0x0F == 8 and int.from_bytes(start[:2], "big") % 31 == 0
        return zlib.decompressobj(zlib.MAX_WBITS if wrapped else -zlib.MAX_WBITS)


class _Brotli:
    def __init__(self) -> None:
        self._object = brotli.Decompressor()
        self._plain = False

    def feed(self, untrusted: bytes) -> Iterator[bytes]:
        rest = untrusted
        while True:
            if self._plain or self._object.is_finished():
                self._plain = True
                if rest:
                    yield rest
                return
            try:
                piece = self._object.process(rest, output_buffer_limit=PIECE)
            except brotli.error:
                raise Unreadable from None
            rest = b""
            if piece:
                yield piece
            if self._object.can_accept_more_data():
                return


class _Zstd:
    def __init__(self) -> None:
        whole = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
        self._object = whole.decompressobj(read_across_frames=True)

    def feed(self, untrusted: bytes) -> Iterator[bytes]:
        for at in range(0, len(untrusted), _ZSTD_SLICE):
            try:
                piece = self._object.decompress(untrusted[at : at + _ZSTD_SLICE])
            except zstandard.ZstdError:
                raise Unreadable from None
            if piece:
                yield piece


_CODINGS: Final[dict[str, Callable[[], Decoder]]] = {
    "gzip": lambda: _Zlib(gzip=True),
    "x-gzip": lambda: _Zlib(gzip=True),
    "deflate": lambda: _Zlib(gzip=False),
    "br": _Brotli,
    "zstd": _Zstd,
}


class Decoded:
    """All codings of a Content-Encoding header undone, last one first.

    Raises:
        Unknown: one of them is not known, or there are more than two.
    """

    def __init__(self, untrusted_encoding: bytes | None) -> None:
        names = (
            untrusted_encoding.decode("latin-1").lower().split(",") if untrusted_encoding else ()
        )
        known = [name for each in names if (name := each.strip()) not in ("", "identity")]
        if len(known) > CODINGS_MAX or any(name not in _CODINGS for name in known):
            raise Unknown
        self._decoders = [_CODINGS[name]() for name in reversed(known)]
        self.identity = not known
        self._came = self._decoded = 0

    def feed(self, untrusted: bytes) -> Iterator[bytes]:
        """The decoded pieces that these bytes complete.

        Raises:
            Unreadable, Bomb: nothing more can be said of what follows.
        """
        if self.identity:
            if untrusted:
                yield untrusted
            return
        self._came += len(untrusted)
        for piece in self._through(untrusted, 0):
            self._decoded += len(piece)
            if self._decoded > FREE + RATIO * self._came:
                raise Bomb
            yield piece

    def _through(self, untrusted: bytes, depth: int) -> Iterator[bytes]:
        if depth == len(self._decoders):
            yield untrusted
            return
        for piece in self._decoders[depth].feed(untrusted):
            yield from self._through(piece, depth + 1)
