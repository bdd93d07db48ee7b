"""DNS messages, as far as a resolver for one guest needs them (RFC 1035, RFC 6891).

Both sides are untrusted: queries are the guest's, replies are whoever's answers first. Every
loop over a message is bounded by its length, and a name is read along pointers that only lead
backwards.
"""

from __future__ import annotations

import re
import socket
import struct
from dataclasses import dataclass
from typing import Final

A: Final = 1
CNAME: Final = 5
PTR: Final = 12
AAAA: Final = 28
_OPT: Final = 41
_IN: Final = 1

NOERROR: Final = 0
FORMERR: Final = 1
SERVFAIL: Final = 2
NXDOMAIN: Final = 3
NOTIMP: Final = 4
REFUSED: Final = 5

UDP_PLAIN: Final = 512  # bytes of a reply when the query says nothing (RFC 1035 §4.2.1)
UDP_MAX: Final = 4096  # and the most that we send or ask for
_NAME_MAX: Final = 255
_LABEL_MAX: Final = 63
_RECORDS_MAX: Final = 256  # of a reply, looked at
_HEADER: Final = struct.Struct(">HHHHHH")
_FIXED: Final = struct.Struct(">HHIH")
_PLAIN: Final = re.compile(rb"[A-Za-z0-9_-]*")

_QR: Final = 0x8000
_AA: Final = 0x0400
_TC: Final = 0x0200
_RD: Final = 0x0100
_RA: Final = 0x0080
_OPCODE: Final = 0x7800


class Malformed(ValueError):
    """Not a message that can be answered or believed."""


@dataclass(frozen=True, slots=True)
class Query:
    """A question. `name` is untrusted text: what no host name has stands there as \\DDD."""

    id: int
    flags: int
    name: str
    kind: int
    question: bytes  # as it was asked, for the reply
    size: int | None  # of the largest reply by UDP, when the query says it (EDNS)

    @property
    def internet(self) -> bool:
        return self.question[-2:] == b"\0\1"

    @property
    def standard(self) -> bool:
        return not self.flags & _OPCODE


@dataclass(frozen=True, slots=True)
class Reply:
    """What a server answered about the addresses of one name."""

    rcode: int
    addresses: tuple[str, ...]
    aliases: tuple[str, ...]  # names that it is another name for, in one form: untrusted text
    ttl: int  # seconds, of the shortest-lived record
    truncated: bool


def read_query(untrusted_message: bytes) -> Query:
    """Raises `Malformed`, also for a message that is an answer or asks other than one thing."""
    data = untrusted_message
    if len(data) < 12:
        raise Malformed("shorter than a header")
    number, flags, questions, answers, authorities, extras = _HEADER.unpack_from(data)
    if flags & _QR:
        raise Malformed("an answer")
    if questions != 1 or answers or authorities or extras > 2:
        raise Malformed("not one question")
    labels, at = _labels(data, 12, pointers=False)
    if len(data) < at + 4:
        raise Malformed("the question ends early")
    kind = int.from_bytes(data[at : at + 2], "big")
    end = at + 4
    size = None
    at = end
    for _ in range(extras):
        owner, at = _labels(data, at, pointers=True)
        if len(data) < at + 10:
            raise Malformed("a record ends early")
        what, udp, _ttl, length = _FIXED.unpack_from(data, at)
        at += 10 + length
        if at > len(data):
            raise Malformed("a record ends early")
        if what == _OPT and not owner:
            size = min(max(udp, UDP_PLAIN), UDP_MAX)
    return Query(number, flags, _text(labels), kind, data[12:end], size)


def error(untrusted_message: bytes, rcode: int) -> bytes | None:
    """A bare answer to what could not be read; None when it has not even a header."""
    if len(untrusted_message) < 12:
        return None
    number, flags, *_ = _HEADER.unpack_from(untrusted_message)
    if flags & _QR:
        return None  # never answer an answer
    return _HEADER.pack(number, _QR | (flags & (_OPCODE | _RD)) | _RA | rcode, 0, 0, 0, 0)


def reply(
    query: Query, rcode: int, addresses: tuple[bytes, ...] = (), *, ttl: int = 0, limit: int = 65535
) -> bytes:
    """An answer with A records, or with none; marked as cut (TC) where it would be longer."""
    records = b"".join(b"\xc0\x0c" + _FIXED.pack(A, _IN, ttl, 4) + address for address in addresses)
    return _answer(query, rcode, records, len(addresses), limit)


def pointer_reply(query: Query, name: str, *, ttl: int, limit: int = 65535) -> bytes:
    """An answer that names the host behind an address."""
    value = encode_name(name)
    record = b"\xc0\x0c" + _FIXED.pack(PTR, _IN, ttl, len(value)) + value
    return _answer(query, NOERROR, record, 1, limit)


def _answer(query: Query, rcode: int, records: bytes, count: int, limit: int) -> bytes:
    flags = _QR | _AA | _RA | (query.flags & _RD) | rcode
    extra = b"" if query.size is None else b"\0" + _FIXED.pack(_OPT, UDP_MAX, 0, 0)
    size = 12 + len(query.question) + len(records) + len(extra)
    if size > limit:
        flags |= _TC
        records, count = b"", 0
    head = _HEADER.pack(query.id, flags, 1, count, 0, 1 if extra else 0)
    return head + query.question + records + extra


def ask(number: int, name: str, kind: int) -> bytes:
    """A query of ours, with EDNS. Raises `Malformed` for what is no host name."""
    return (
        _HEADER.pack(number, _RD, 1, 0, 0, 1)
        + encode_name(name)
        + struct.pack(">HH", kind, _IN)
        + b"\0"
        + _FIXED.pack(_OPT, UDP_MAX, 0, 0)
    )


def encode_name(name: str) -> bytes:
    """A host name as labels. Raises `Malformed` when it does not fit."""
    out = bytearray()
    for label in name.encode("ascii").split(b".") if name else ():
        if not 0 < len(label) <= _LABEL_MAX:
            raise Malformed("a label of no length, or too long")
        out.append(len(label))
        out += label
    out.append(0)
    if len(out) > _NAME_MAX:
        raise Malformed("a name that is too long")
    return bytes(out)


def read_reply(untrusted_message: bytes, number: int, name: str, kind: int) -> Reply:
    """The addresses in an answer to `ask(number, name, kind)`.

    Only records that lead from the name asked for count, along its aliases.

    Raises:
        Malformed: it is no answer to that.
    """
    data = untrusted_message
    if len(data) < 12:
        raise Malformed("shorter than a header")
    got, flags, questions, answers, _, _ = _HEADER.unpack_from(data)
    if got != number or not flags & _QR or questions != 1:
        raise Malformed("not an answer to this query")
    labels, at = _labels(data, 12, pointers=False)
    if len(data) < at + 4 or data[at : at + 4] != struct.pack(">HH", kind, _IN):
        raise Malformed("an answer to another question")
    if _text(labels) != name:
        raise Malformed("an answer about another name")
    at += 4
    aliases: dict[str, str] = {}
    found: list[tuple[str, str, int]] = []
    ttls: dict[str, int] = {}
    for _ in range(min(answers, _RECORDS_MAX)):
        try:
            owner_labels, at = _labels(data, at, pointers=True)
            what, where, ttl, length = _FIXED.unpack_from(data, at)
        except (Malformed, struct.error):
            if flags & _TC:
                break
            raise Malformed("a record ends early") from None
        at += 10
        if at + length > len(data):
            if flags & _TC:
                break
            raise Malformed("a record ends early")
        owner = _text(owner_labels)
        if where == _IN and what == CNAME:
            target, _ = _labels(data, at, pointers=True)
            aliases[owner] = _text(target)
            ttls[owner] = ttl
        elif where == _IN and what == kind and length == (4 if kind == A else 16):
            family = socket.AF_INET if kind == A else socket.AF_INET6
            found.append((owner, socket.inet_ntop(family, data[at : at + length]), ttl))
        at += length
    chain = [name]
    shortest = 1 << 31
    while chain[-1] in aliases and len(chain) < 16:
        shortest = min(shortest, ttls[chain[-1]])
        chain.append(aliases[chain[-1]])
    here = [(address, ttl) for owner, address, ttl in found if owner == chain[-1]]
    shortest = min([shortest, *(ttl for _, ttl in here)])
    return Reply(
        rcode=flags & 15,
        addresses=tuple(dict.fromkeys(address for address, _ in here)),
        aliases=tuple(chain[1:]),
        ttl=shortest if here else 0,
        truncated=bool(flags & _TC),
    )


def _labels(data: bytes, at: int, *, pointers: bool) -> tuple[list[bytes], int]:
    """The labels of the name at `at`, and where what follows it begins."""
    labels: list[bytes] = []
    size = 1
    end = None
    while True:
        if at >= len(data):
            raise Malformed("a name ends early")
        length = data[at]
        if length >= 0xC0:
            if not pointers or at + 1 >= len(data):
                raise Malformed("a pointer where none may be")
            target = (length & 0x3F) << 8 | data[at + 1]
            if target >= at:
                raise Malformed("a pointer that leads forwards")
            if end is None:
                end = at + 2
            at = target
            continue
        if length > _LABEL_MAX:
            raise Malformed("an unknown kind of label")
        if not length:
            return labels, at + 1 if end is None else end
        label = data[at + 1 : at + 1 + length]
        if len(label) < length:
            raise Malformed("a name ends early")
        size += 1 + length
        if size > _NAME_MAX:
            raise Malformed("a name that is too long")
        labels.append(label)
        at += 1 + length


def _text(labels: list[bytes]) -> str:
    return ".".join(
        label.decode("ascii").lower()
        if _PLAIN.fullmatch(label)
        else "".join(
            chr(byte).lower() if _PLAIN.fullmatch(bytes((byte,))) else f"\\{byte:03d}"
            for byte in label
        )
        for label in labels
    )
