"""Watches what an upstream sends back for the credential that it was sent.

An upstream may reflect a request: in an error, a redirect, a debugging page. The guest must
not learn the credential from it. `Scrub` looks at each piece of a text body before it goes
on, compressed or not, across the borders of pieces; what may be the beginning of the
credential waits for its continuation, and all else goes on byte for byte, at once. On a match
the reply is cut.

Looked for are the value itself, its base64 at each of the three alignments in both alphabets,
and both of these where characters are percent-encoded or escaped as in JSON. This stops
mistakes of an upstream. An upstream that means to tell the credential can: it has it.
"""

from __future__ import annotations

import re
from binascii import b2a_base64
from collections.abc import Callable, Iterable
from typing import Final

from agent_box.broker import decode
from agent_box.broker.gate import Inject

SHORT: Final = 6  # bytes; a shorter value would be found everywhere, and is not looked for
_HELD: Final = 4  # that many bytes of a beginning are worth waiting for
HELD_MAX: Final = 1 << 20  # compressed bytes that wait for what they begin

_URL_SAFE: Final = bytes.maketrans(b"+/", b"-_")  # RFC 4648 section 5
_ESCAPE: Final = re.compile(rb"%([0-9A-Fa-f]{2})|\\u00([0-9A-Fa-f]{2})|\\(/)")
_HALF_ESCAPE: Final = re.compile(rb"(?:%[0-9A-Fa-f]?|\\(?:u(?:0(?:0[0-9A-Fa-f]?)?)?)?)\Z")
_ESCAPED: Final = 6  # bytes that one byte takes at most, as \u0041
# Bodies that are no text. A type that is not told is looked at.
_NO_TEXT: Final = re.compile(
    rb"(?:image|audio|video|font|model)/(?!.*\+(?:xml|json))"
    rb"|application/(?:octet-stream|pdf|zip|gzip|x-gzip|x-tar|zstd|vnd\.rar|wasm)(?:;|$)"
    rb"|application/x-git-(?:upload-pack-result|packed-objects)"
)


class Cut(Exception):
    """The reply must not go on. The guest's connection is reset.

    `why` is "credential", "encoding" (a coding that cannot be read here), "unreadable" (it is
    not what its coding says) or "bomb" (it decodes to far more than it is).
    """

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


class Needles:
    """What is looked for, of one request."""

    __slots__ = ("_all", "longest")

    def __init__(self, inject: Inject) -> None:
        self._all: list[bytes] = []
        self._add(inject.credential.reveal())
        if inject.issued is not None:  # its link is opened by headers that may be secrets, too
            for name, value in inject.issued.headers:
                if name not in (b"accept", b"content-type"):
                    self._add(value)
        self.longest = max((len(each) for each in self._all), default=0)

    def _add(self, secret: bytes) -> None:
        if len(secret) < SHORT:
            return
        forms = [secret]
        for offset, skip in ((0, 0), (1, 2), (2, 3)):
            # without the characters that the neighbours have a part in
            encoded = b2a_base64(bytes(offset) + secret)[skip : (offset + len(secret)) * 8 // 6]
            forms += (encoded, encoded.translate(_URL_SAFE))
        self._all += [form for form in dict.fromkeys(forms) if form not in self._all]

    def within(self, untrusted: bytes) -> bool:
        """Whether one of them stands there, in any of its forms."""
        return self._found(untrusted) or (_escaped(untrusted) and self._found(plain(untrusted)))

    def _found(self, untrusted: bytes) -> bool:
        for needle in self._all:  # noqa: SIM110  # `any` costs twice as much
            if needle in untrusted:
                return True
        return False

    def begun(self, untrusted: bytes) -> int:
        """How many bytes at the end may be the beginning of one; 0 when there is nothing to it."""
        tail = untrusted[-_ESCAPED * self.longest :]
        whole = self._begun(tail)
        if b"%" not in tail and b"\\" not in tail:
            return whole  # as nearly always
        if not _escaped(tail) and not _HALF_ESCAPE.search(tail):
            return whole
        escaped = self._begun(plain(_HALF_ESCAPE.sub(b"", tail)))
        longest = _ESCAPED * (escaped + 1) if escaped else 0
        return min(max(whole, longest), len(untrusted))

    def _begun(self, tail: bytes) -> int:
        longest = 0
        for needle in self._all:
            at = tail.find(needle[:_HELD], max(0, len(tail) - len(needle) + 1))
            while at >= 0:
                if needle.startswith(tail[at:]):
                    longest = max(longest, len(tail) - at)
                    break
                at = tail.find(needle[:_HELD], at + 1)
        return longest


def _escaped(untrusted: bytes) -> bool:
    """Whether a character may be written as an escape."""
    return b"%" in untrusted or (
        b"\\" in untrusted and (b"\\u00" in untrusted or b"\\/" in untrusted)
    )


def plain(untrusted: bytes) -> bytes:
    """Percent-encoded and JSON-escaped characters written as themselves, once."""

    def one(found: re.Match[bytes]) -> bytes:
        return found[3] or bytes([int(found[1] or found[2], 16)])

    return _ESCAPE.sub(one, untrusted)


def is_text(untrusted_type: bytes | None) -> bool:
    """Whether a body of this Content-Type is looked at."""
    return untrusted_type is None or not _NO_TEXT.match(untrusted_type.strip().lower())


def in_headers(needles: Needles, untrusted: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a header or trailer has the credential in it."""
    # Looked through as one text: no form of a credential has a line's end in it.
    return needles.within(b"\n".join([part for pair in untrusted for part in pair]))


class Scrub:
    """One reply's body on its way through.

    Args:
        content_type, content_encoding: of the reply's head.
        tap: gets the decoded body, piece by piece, when it is text. A reply that is cut was
            not necessarily tapped to its end.

    Raises:
        Cut: with "encoding".
    """

    def __init__(
        self,
        needles: Needles,
        content_type: bytes | None,
        content_encoding: bytes | None,
        tap: Callable[[bytes], None] | None,
    ) -> None:
        self._needles = needles
        self._tap = tap
        self._carry = b""  # the end of what was decoded: a match may begin in it
        self._held = b""  # came, and may not go on yet
        self._decoded: decode.Decoded | None = None
        if is_text(content_type):
            try:
                self._decoded = decode.Decoded(content_encoding)
            except decode.Unknown:
                raise Cut("encoding") from None

    @property
    def blind(self) -> bool:
        """Whether the body is no text, and goes on as it is."""
        return self._decoded is None

    def feed(self, untrusted: bytes) -> bytes:
        """The bytes that may go on now: those held back, and these without what must wait.

        Raises:
            Cut: nothing of this piece may go on.
        """
        if self._decoded is None:
            return untrusted
        begun = 0 if not self._held else len(self._held)  # stays, if this decodes to nothing
        try:
            for piece in self._decoded.feed(untrusted):
                if self._tap is not None:
                    self._tap(piece)
                begun = self._look(piece)
        except decode.Unreadable:
            raise Cut("unreadable") from None
        except decode.Bomb:
            raise Cut("bomb") from None
        whole = self._held + untrusted if self._held else untrusted
        if not begun:
            self._held = b""
            return whole
        if not self._decoded.identity:
            begun = len(whole)  # which of them begins it cannot be told
            if begun > HELD_MAX:
                raise Cut("unreadable")
        keep = len(whole) - min(begun, len(whole))
        self._held = whole[keep:]
        return whole[:keep]

    def _look(self, piece: bytes) -> int:
        window = self._carry + piece
        if self._needles.within(window):
            raise Cut("credential")
        self._carry = window[-_ESCAPED * self._needles.longest :] if self._needles.longest else b""
        return self._needles.begun(window)

    def finish(self) -> bytes:
        """The reply is over: what was only a beginning goes on as well."""
        held, self._held = self._held, b""
        return held
