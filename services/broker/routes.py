"""What a request asks for: its target read in one way only, and the route that allows it.

A path is compared after one percent-decoding, and sent on in one canonical encoding of what
was compared. What two servers might read differently is refused: dot segments, empty
segments, encoded slashes, backslashes, semicolons, a second layer of encoding, control
characters and all that is not UTF-8. Sources: RFC 3986 sections 2.1, 3.3 and 3.4, RFC 9112
section 3.2.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final
from urllib.parse import quote, unquote_to_bytes

import msgspec

from agent_box.broker.refusal import Reason, Refuse
from agent_box.config.model import Route

TARGET_MAX: Final = 8192  # bytes
SEGMENTS_MAX: Final = 128

# RFC 3986 pchar and "/", with percent signs checked on their own. No ";": parameters of a
# segment are dropped by some servers before they look for dot segments.
_PATH: Final = re.compile(rb"/[A-Za-z0-9._~!$&'()*+,=:@/%-]*")
_QUERY: Final = re.compile(rb"[A-Za-z0-9._~!$&'()*+,;=:@/?%\[\]|-]*")
_BAD_PERCENT: Final = re.compile(rb"%(?![0-9A-Fa-f]{2})")
_NEVER: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\\%;\u2028\u2029\ufeff\ufffe\uffff]")
_SAFE: Final = "/-._~!$&'()*+,=:@"


class Target(msgspec.Struct, frozen=True):
    """A request target in origin-form that passed every rule.

    `path` is decoded once; `segments` are those between its slashes, the last one empty when
    it ends in a slash. `query` is as it was sent, without the question mark; None when there
    is none.
    """

    path: str
    segments: tuple[str, ...]
    query: bytes | None

    def encoded(self) -> bytes:
        """The path as it is sent on: one encoding for each path that can be compared."""
        return quote(self.path, safe=_SAFE).encode()


def _bad(message: str) -> Refuse:
    return Refuse(Reason.TARGET_BAD, 400, message)


def read(untrusted: bytes) -> Target | Refuse:
    """Reads a request target; every form but origin-form is refused."""
    if len(untrusted) > TARGET_MAX:
        return Refuse(Reason.TARGET_BAD, 414, f"the target is longer than {TARGET_MAX} bytes")
    if not untrusted.startswith(b"/"):
        return _bad("the target must be a path: no absolute-form, authority-form or asterisk")
    raw, mark, query = untrusted.partition(b"?")
    if not _PATH.fullmatch(raw) or _BAD_PERCENT.search(raw):
        return _bad("the path has characters that may not stand there unencoded")
    if not _QUERY.fullmatch(query) or _BAD_PERCENT.search(query):
        return _bad("the query has characters that may not stand there unencoded")
    if raw.count(b"/") > SEGMENTS_MAX:
        return _bad(f"the path has more than {SEGMENTS_MAX} segments")
    segments: list[str] = []
    for piece in raw[1:].split(b"/"):
        try:
            decoded = unquote_to_bytes(piece) if b"%" in piece else piece
            segment = decoded.decode()  # strict: no overlong form, no surrogate
        except UnicodeDecodeError:
            return _bad("the path is not UTF-8")
        if "/" in segment:
            return _bad("the path has an encoded slash")
        if _NEVER.search(segment):
            return _bad("the path has a backslash, semicolon, control or doubly encoded character")
        if segment.strip(" .") == "" and segment != "":
            return _bad("the path has a dot segment, or one of spaces")
        segments.append(segment)
    if "" in segments[:-1]:
        return _bad("the path has an empty segment")
    return Target("/" + "/".join(segments), tuple(segments), query if mark else None)


def find(routes: Sequence[Route], method: str, target: Target) -> Route | Refuse:
    """The route that allows the request: of all whose path matches, the longest decides.

    Exact goes before template and template before prefix. Methods are those of the longest
    match alone, so that a narrow route can be stricter than a wide one.
    """
    matching = [route for route in routes if _matches(route, target)]
    if not matching:
        return Refuse(Reason.PATH_UNKNOWN, 404, "no route of this binding has this path")
    best = max(matching, key=_rank) if len(matching) > 1 else matching[0]
    if method not in best.methods:
        return Refuse(Reason.METHOD, 405, "the route of this path does not allow this method")
    return best


def _rank(route: Route) -> tuple[int, int, int]:
    if route.match == "exact":
        return (2, len(route.path), 0)
    pieces = _pieces(route)
    fixed = sum(1 for piece in pieces if not piece.startswith("{"))
    return (1, len(pieces), fixed) if route.match == "template" else (0, len(pieces), fixed)


def _pieces(route: Route) -> list[str]:
    path = route.path[1:]
    if route.match == "prefix":
        path = path.removesuffix("/")
        return path.split("/") if path else []  # none: all paths
    return path.split("/")


def _matches(route: Route, target: Target) -> bool:
    if route.match == "exact":
        return target.path == route.path
    pieces = _pieces(route)
    if route.match == "prefix":
        return target.segments[: len(pieces)] == tuple(pieces)
    return len(pieces) == len(target.segments) and all(
        segment != "" if piece.startswith("{") else piece == segment
        for piece, segment in zip(pieces, target.segments, strict=True)
    )
