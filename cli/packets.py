"""Which packets `capture --filter` shows: a small part of the language that tcpdump made known.

    tcp, udp, icmp
    [src|dst] host ADDRESS      [src|dst] net CIDR      [src|dst] port N
    not X, X and Y, X or Y, ( X )

`not` binds closest, then `and`, then `or`. Names are not looked up: in a capture an allowed name
has an address of 198.18.0.0/15, which the DNS answer before it shows.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from typing import Final, NamedTuple

PROTOCOLS: Final = {"icmp": 1, "tcp": 6, "udp": 17}
EXPRESSION_MAX: Final = 1000
_DEPTH_MAX: Final = 50
_WORD: Final = re.compile(r"\s*([()!]|&&|\|\||[^\s()!&|]+)")
_SYNONYMS: Final = {"!": "not", "&&": "and", "||": "or"}


class Facts(NamedTuple):
    """What a filter sees of an IPv4 packet; ports are None where there are none."""

    source: int
    destination: int
    protocol: int
    source_port: int | None
    destination_port: int | None


Filter = Callable[[Facts], bool]


class BadFilter(ValueError):
    """No expression of the language. One line that says where."""


def facts(packet: bytes) -> Facts | None:
    """None for what is no IPv4 packet."""
    if len(packet) < 20 or packet[0] >> 4 != 4:
        return None
    start = (packet[0] & 15) * 4
    ports: tuple[int | None, int | None] = (None, None)
    first = not int.from_bytes(packet[6:8], "big") & 0x1FFF
    if packet[9] in (PROTOCOLS["tcp"], PROTOCOLS["udp"]) and first and len(packet) >= start + 4:
        ports = (
            int.from_bytes(packet[start : start + 2], "big"),
            int.from_bytes(packet[start + 2 : start + 4], "big"),
        )
    source, destination = (int.from_bytes(packet[at : at + 4], "big") for at in (12, 16))
    return Facts(source, destination, packet[9], *ports)


def parse(untrusted: str) -> Filter:
    """Raises `BadFilter`."""
    if len(untrusted) > EXPRESSION_MAX:
        raise BadFilter(f"it is longer than {EXPRESSION_MAX} characters")
    words, at = [], 0
    while untrusted[at:].strip():
        found = _WORD.match(untrusted, at)
        if found is None:
            raise BadFilter(f"{untrusted[at:].strip()[:20]!r} is not understood")
        words.append(_SYNONYMS.get(found[1], found[1]))
        at = found.end()
    parser = _Parser(words)
    made = parser.either(0)
    if parser.words:
        raise BadFilter(f"{parser.words[0]!r} is not expected there")
    return made


class _Parser:
    def __init__(self, words: list[str]) -> None:
        self.words = words

    def take(self) -> str:
        if not self.words:
            raise BadFilter("something is missing at its end")
        return self.words.pop(0)

    def either(self, depth: int) -> Filter:
        parts = [self.both(depth)]
        while self.words and self.words[0] == "or":
            self.take()
            parts.append(self.both(depth))
        return parts[0] if len(parts) == 1 else lambda f: any(part(f) for part in parts)

    def both(self, depth: int) -> Filter:
        parts = [self.one(depth)]
        while self.words and self.words[0] == "and":
            self.take()
            parts.append(self.one(depth))
        return parts[0] if len(parts) == 1 else lambda f: all(part(f) for part in parts)

    def one(self, depth: int) -> Filter:
        if depth > _DEPTH_MAX:
            raise BadFilter("it is nested too deeply")
        word = self.take()
        if word == "not":
            inner = self.one(depth + 1)
            return lambda f: not inner(f)
        if word == "(":
            made = self.either(depth + 1)
            if self.take() != ")":
                raise BadFilter("a bracket is not closed")
            return made
        if word in PROTOCOLS:
            number = PROTOCOLS[word]
            return lambda f: f.protocol == number
        side = word if word in ("src", "dst") else None
        kind = self.take() if side else word
        if kind == "port":
            return _either(side, _port(self.take()), lambda f: (f.source_port, f.destination_port))
        if kind in ("host", "net"):
            return _either(side, _network(kind, self.take()), lambda f: (f.source, f.destination))
        raise BadFilter(f"{kind!r} is not one of tcp, udp, icmp, host, net, port")


def _either(
    side: str | None,
    test: Callable[[int | None], bool],
    pair: Callable[[Facts], tuple[int | None, int | None]],
) -> Filter:
    if side == "src":
        return lambda f: test(pair(f)[0])
    if side == "dst":
        return lambda f: test(pair(f)[1])
    return lambda f: any(test(value) for value in pair(f))


def _port(word: str) -> Callable[[int | None], bool]:
    if not (word.isascii() and word.isdigit() and 0 < int(word) < 65536):
        raise BadFilter(f"{word!r} is not a port")
    port = int(word)
    return lambda value: value == port


def _network(kind: str, word: str) -> Callable[[int | None], bool]:
    try:
        network = ipaddress.IPv4Network(word if kind == "net" else f"{word}/32")
    except ValueError:
        what = "an IPv4 address" if kind == "host" else "an IPv4 network such as 10.0.0.0/8"
        raise BadFilter(f"{word!r} is not {what}") from None
    low = int(network.network_address)
    high = int(network.broadcast_address)
    return lambda value: value is not None and low <= value <= high
