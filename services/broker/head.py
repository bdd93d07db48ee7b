"""The head of a request, read strictly from its raw bytes, before any lenient parser sees it.

A proxy and the server behind it must see the same request. h11 reads some things kindly (a
bare LF, a folded header, space round a value); what it reads kindly another parser may read
otherwise. So the raw bytes are judged here by a grammar without any leeway, and h11's own
reading must then agree. Sources: RFC 9112 sections 2.2, 3, 5, 6 and 11.2; RFC 9110 sections
5, 7.2 and 7.8.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import msgspec

from agent_box.broker import routes
from agent_box.broker.refusal import Reason, Refuse

if TYPE_CHECKING:
    import h11

MAX_HEAD: Final = 64 << 10  # bytes
MAX_HEADERS: Final = 100
MAX_LINE: Final = 16 << 10  # bytes of one header line
LENGTH_MAX: Final = 1 << 50  # bytes of a body; more is a number to confuse somebody with

_END: Final = b"\r\n\r\n"
_REQUEST_LINE: Final = re.compile(rb"([A-Z]{1,20}) ([!-~]+) HTTP/([0-9])\.([0-9])")
# No space before the colon, none at the line's start; no NUL, no lone CR or LF in a value.
_HEADER: Final = re.compile(
    rb"([!#$%&'*+.^_`|~0-9A-Za-z-]{1,256}):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)"
)
_NUMBER: Final = re.compile(rb"0|[1-9][0-9]{0,15}")
_ONCE: Final = (b"content-length", b"transfer-encoding", b"expect", b"upgrade", b"content-type")
_NO_OPTIONS: Final[frozenset[bytes]] = frozenset()
# Read as another name by servers that hand headers on as CGI variables.
_FRAMING_ALIASES: Final = frozenset((b"content_length", b"transfer_encoding", b"content-length_"))


class Framing(StrEnum):
    NONE = "none"
    LENGTH = "length"
    CHUNKED = "chunked"


class Head(msgspec.Struct, frozen=True):
    """A request's head that every parser reads alike.

    `headers` have lowercase names and values without space at the ends, in the order sent.
    `upgrade` is the protocol asked for, lowercase. `serial` tells this request from all
    others of this process: what was found out for one cannot serve another.
    """

    serial: int
    method: str
    asked: bytes  # the target as it was sent
    target: routes.Target
    headers: tuple[tuple[bytes, bytes], ...]
    framing: Framing
    length: int | None
    upgrade: str | None
    expects_continue: bool
    keep_alive: bool

    def get(self, name: bytes) -> tuple[bytes, ...]:
        """All values of a header, by its lowercase name."""
        return tuple([value for each, value in self.headers if each == name])


TOO_LONG: Final = Refuse(
    Reason.HEAD_TOO_LARGE, 431, f"the head of a request has at most {MAX_HEAD} bytes"
)
DISAGREE: Final = Refuse(Reason.HEAD_BAD, 400, "the head can be read in two ways")


def end(buffer: bytes | bytearray) -> int | None:
    """The length of the head at the start of `buffer`, with its empty line; None: not there yet.

    A bare LF does not end a line here, so a head that relies on one never ends and runs into
    `TOO_LONG` or the timeout; a line that has one is refused by `parse`.
    """
    found = buffer.find(_END, 0, MAX_HEAD + len(_END))
    return None if found < 0 else found + len(_END)


def hopeless(buffer: bytes | bytearray) -> Refuse | None:
    """Whether a head that is not complete yet can be refused already, instead of waited for."""
    if len(buffer) > MAX_HEAD:
        return TOO_LONG
    if re.search(rb"(?<!\r)\n", buffer) or b"\x00" in buffer:
        return _bad("a line ends in a bare LF, or there is a NUL")
    return None


def _bad(message: str) -> Refuse:
    return Refuse(Reason.HEAD_BAD, 400, message)


def _framing(message: str) -> Refuse:
    return Refuse(Reason.FRAMING, 400, message)


def parse(untrusted_raw: bytes, serial: int) -> Head | Refuse:
    """Reads a whole head, to and with its empty line."""
    if len(untrusted_raw) > MAX_HEAD + len(_END):
        return TOO_LONG
    if not untrusted_raw.endswith(_END):
        return _bad("the head has no end")
    first, *lines = untrusted_raw[: -len(_END)].split(b"\r\n")
    start = _REQUEST_LINE.fullmatch(first)
    if start is None:
        return _bad("the request line is not METHOD SP TARGET SP HTTP/1.1")
    if (start[3], start[4]) != (b"1", b"1"):
        return Refuse(Reason.HTTP_VERSION, 505, "only HTTP/1.1 is spoken here")
    if len(lines) > MAX_HEADERS:
        return Refuse(Reason.HEAD_TOO_LARGE, 431, f"there are more than {MAX_HEADERS} headers")
    headers: list[tuple[bytes, bytes]] = []
    for line in lines:
        if len(line) > MAX_LINE:
            return Refuse(Reason.HEAD_TOO_LARGE, 431, f"a header is longer than {MAX_LINE} bytes")
        found = _HEADER.fullmatch(line)
        if found is None:
            return _bad("a header line is not NAME: VALUE, is folded, or has a control character")
        headers.append((found[1].lower(), found[2].rstrip(b" \t")))
    return _whole(serial, start[1].decode(), start[2], tuple(headers))


def _whole(
    serial: int, method: str, untrusted_target: bytes, headers: tuple[tuple[bytes, bytes], ...]
) -> Head | Refuse:
    one = dict(headers)  # of those that stand there once
    if len(one) < len(headers):
        names = [name for name, _ in headers]
        for name in _ONCE:
            if names.count(name) > 1:
                return _framing(f"{name.decode()} stands there twice")
    if not _FRAMING_ALIASES.isdisjoint(one):
        return _framing("a header's name looks like one that frames the message")
    framed = _framed(one)
    if isinstance(framed, Refuse):
        return framed
    framing, length = framed
    if method in ("CONNECT", "TRACE"):
        return Refuse(Reason.METHOD, 405, "this method is not for an endpoint")
    target = routes.read(untrusted_target)
    if isinstance(target, Refuse):
        return target
    options = connection_options(headers)
    if options is None or options & _NEVER_AN_OPTION:
        return _bad("the Connection header names what it may not name")
    expect = one.get(b"expect", b"").lower()
    if expect not in (b"", b"100-continue"):
        return Refuse(Reason.HEAD_BAD, 417, "the only expectation is 100-continue")
    upgrade = one.get(b"upgrade")
    if (upgrade is not None) != (b"upgrade" in options):
        return Refuse(Reason.UPGRADE, 400, "Upgrade and Connection: upgrade belong together")
    if upgrade is not None and (framing is not Framing.NONE or method != "GET"):
        return Refuse(Reason.UPGRADE, 400, "an upgrade is asked for by a GET without a body")
    return Head(
        serial=serial,
        method=method,
        asked=untrusted_target,
        target=target,
        headers=headers,
        framing=framing,
        length=length,
        upgrade=None if upgrade is None else upgrade.decode("latin-1").lower(),
        expects_continue=bool(expect) and framing is not Framing.NONE,
        keep_alive=b"close" not in options,
    )


# A message whose sender has these taken out on the way would change its meaning.
_NEVER_AN_OPTION: Final = frozenset(
    (
        *(b"host", b"content-length", b"content-type", b"content-encoding", b"transfer-encoding"),
        *(b"authorization", b"x-api-key", b"cookie", b"expect", b"range"),
    )
)
_TOKEN: Final = re.compile(rb"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


def connection_options(headers: tuple[tuple[bytes, bytes], ...]) -> frozenset[bytes] | None:
    """What the Connection headers name, lowercase (RFC 9110 section 7.6.1); None: unreadable."""
    values = [value for name, value in headers if name == b"connection"]
    if not values:
        return _NO_OPTIONS
    options = {option.strip(b" \t").lower() for option in b",".join(values).split(b",")} - {b""}
    return frozenset(options) if all(map(_TOKEN.fullmatch, options)) else None


def _framed(one: dict[bytes, bytes]) -> tuple[Framing, int | None] | Refuse:
    """RFC 9112 section 6.3, without any of the repairs that it allows."""
    encoding, length = one.get(b"transfer-encoding"), one.get(b"content-length")
    if encoding is not None and length is not None:
        return _framing("Content-Length and Transfer-Encoding exclude each other")
    if encoding is not None:
        if encoding.lower() != b"chunked":
            return _framing("the only transfer encoding is chunked")
        return Framing.CHUNKED, None
    if length is None:
        return Framing.NONE, None
    if not _NUMBER.fullmatch(length) or int(length) > LENGTH_MAX:
        return _framing("Content-Length is not a plain number")
    return Framing.LENGTH, int(length)


def agrees(head: Head, event: h11.Request) -> bool:
    """Whether h11 read the same bytes as this head."""
    headers = [(name.lower(), value) for name, value in event.headers.raw_items()]
    return (
        event.method == head.method.encode()
        and event.http_version == b"1.1"
        and event.target == head.asked
        and headers == (_as_h11(head) if head.framing is Framing.CHUNKED else list(head.headers))
    )


def _as_h11(head: Head) -> list[tuple[bytes, bytes]]:
    """h11 lowers the one transfer encoding that it knows."""
    return [
        (name, value.lower() if name == b"transfer-encoding" else value)
        for name, value in head.headers
    ]
