"""The values on a command line: from text to what a verb's body gets.

A parser raises `ValueError` whose message is the rule, which `main` puts between the name of
the argument and the value, or `Said` with a sentence. Nothing is looked up here: that a
name exists is the body's affair.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from agent_box.config import values

if TYPE_CHECKING:
    from agent_box.config.egress import Target
    from agent_box.engine.image.reference import Reference

DEFAULT_DETACH_KEYS: Final = "ctrl-p,ctrl-q"
SOURCES: Final = ("host-observed", "guest-channel", "agent-reported")

Parser = Callable[[str], Any]

Said = values.Said
name = values.name
credential = values.credential
memory = values.memory
disk = values.disk


class Place(NamedTuple):
    """NAME[:/path]. `path` is None when it was left out: /home/agent/work then applies."""

    name: str
    path: str | None


class ImageSource(NamedTuple):
    """What `image pull` is asked for: a variant by its name, or a published image."""

    name: str | None
    reference: Reference | None


class Forward(NamedTuple):
    """[ADDR:]HOSTPORT:GUESTPORT. `host` 0 lets the daemon pick a free port."""

    address: str
    host: int
    guest: int


def integer(least: int, most: int) -> Parser:
    """A parser of decimal integers in a range, both ends included."""

    def parse(untrusted: str) -> int:
        if not re.fullmatch(r"[0-9]{1,12}", untrusted, re.ASCII):
            raise ValueError(f"an integer from {least} to {most}")
        value = int(untrusted)
        if not least <= value <= most:
            raise ValueError(f"an integer from {least} to {most}")
        return value

    return parse


class OneOf:
    """A parser of one word of a fixed set."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def __call__(self, untrusted: str) -> str:
        if untrusted not in self.words:
            raise ValueError(f"one of {', '.join(self.words)}")
        return untrusted


def word(untrusted: str) -> str:
    """Anything that can be written as UTF-8, also nothing."""
    try:
        untrusted.encode()
    except UnicodeEncodeError:
        raise ValueError("UTF-8 text") from None
    return untrusted


def argument(untrusted: str) -> bytes:
    """One word of a guest's command line: the very bytes that we were given."""
    return os.fsencode(untrusted)


def terminal(untrusted: str) -> str:
    """The id of a terminal, as `attach --list` tells it."""
    if not re.fullmatch(r"[0-9a-f]{1,32}", untrusted, re.ASCII):
        raise ValueError("the id of a terminal, as attach --list tells it")
    return untrusted


def text(untrusted: str) -> str:
    """Anything that can be written as UTF-8, and is not empty."""
    if not untrusted:
        raise ValueError("text that is not empty")
    return word(untrusted)


def line(untrusted: str) -> str:
    """Text of one printable line."""
    if not text(untrusted).isprintable():
        raise ValueError("one line of printable text")
    return untrusted


def place(untrusted: str) -> Place:
    who, colon, path = untrusted.partition(":")
    values.name(who)
    if not colon:
        return Place(who, None)
    if not path.startswith("/") or len(path) > 4096 or not path.isprintable():
        raise ValueError("NAME or NAME:/path with an absolute path in the guest")
    return Place(who, path)


def image(untrusted: str) -> ImageSource:
    """A variant, or HOST[:PORT]/REPOSITORY@sha256:DIGEST."""
    if "/" not in untrusted:
        return ImageSource(values.name(untrusted), None)
    from agent_box.engine.image import reference

    return ImageSource(None, reference.parse(untrusted))


def forward(untrusted: str) -> Forward:
    rule = "[ADDR:]HOSTPORT:GUESTPORT"
    parts = re.fullmatch(
        r"(?:(\[[0-9a-fA-F:.]+\]|[0-9.]+):)?([0-9]{1,5}):([0-9]{1,5})", untrusted, re.ASCII
    )
    if parts is None:
        raise ValueError(rule)
    import ipaddress

    address = (parts[1] or "127.0.0.1").strip("[]")
    try:
        ipaddress.ip_address(address)
    except ValueError:
        raise ValueError(f"{rule} with an IPv4 address or an IPv6 address in brackets") from None
    host, guest = int(parts[2]), int(parts[3])
    if host > 65535 or not 1 <= guest <= 65535:
        raise ValueError(f"{rule} with ports up to 65535")
    return Forward(address, host, guest)


def rule(untrusted: str) -> Target:
    """HOST[:PORTS][/PROTOCOL] of a policy's rule; ``*.x`` is everything below x."""
    return _egress(untrusted, wildcard=True)


def removal(untrusted: str) -> str:
    """What `policy set --remove` takes away: HOST[:PORTS][/PROTOCOL] or the id of a rule.

    The text as it stands: what is left out of it means any, so it is no `Target`.
    """
    if line(untrusted).startswith(("allow:", "deny:")) and len(untrusted) <= 1024:
        return untrusted
    _egress(untrusted, wildcard=True)
    return untrusted


def destination(untrusted: str) -> Target:
    """HOST[:PORT][/PROTOCOL] of `policy check`: one name or address, one port."""
    found = _egress(untrusted, wildcard=False)
    whole = found.network is None or found.network.prefixlen == found.network.max_prefixlen
    if not whole or len(found.ports) != 1 or found.ports[0][0] != found.ports[0][1]:
        raise ValueError("one name or address with one port, such as example.com:443")
    return found


def _egress(untrusted: str, *, wildcard: bool) -> Target:
    from agent_box.config import egress

    try:
        return egress.parse_target(untrusted, wildcard=wildcard)
    except ValueError as error:
        raise values.Said(str(error)) from None


_AGO: Final = re.compile(r"([0-9]{1,9})([smhd])", re.ASCII)
_AGO_MS: Final = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


def moment(untrusted: str) -> int:
    """Unix milliseconds of an RFC 3339 time with zone, or of so long ago: 90s, 15m, 2h, 7d."""
    rule = "an RFC 3339 time such as 2026-11-29T21:00:00Z, or so long ago: 90s, 15m, 2h, 7d"
    ago = _AGO.fullmatch(untrusted)
    if ago is not None:
        import time

        return max(0, int(time.time() * 1000) - int(ago[1]) * _AGO_MS[ago[2]])
    if not re.fullmatch(
        r"[0-9]{4}-[0-9]{2}-[0-9]{2}[Tt ][0-9]{2}:[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,6})?"
        r"(?:[Zz]|[+-][0-9]{2}:[0-9]{2})",
        untrusted,
        re.ASCII,
    ):
        raise ValueError(rule)
    from datetime import datetime

    try:
        value = datetime.fromisoformat(untrusted.upper())
    except ValueError:
        raise ValueError(rule) from None
    return max(0, int(value.timestamp() * 1000))


def environment(untrusted: str) -> tuple[str, str]:
    found = re.fullmatch(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", text(untrusted), re.ASCII | re.DOTALL)
    if found is None:
        raise ValueError("NAME=VALUE")
    return found[1], found[2]


def detach_keys(untrusted: str) -> tuple[int, ...]:
    """The bytes of a detach sequence: ``ctrl-p,ctrl-q``, or single characters."""
    keys = []
    for key in untrusted.split(","):
        control = re.fullmatch(r"ctrl-([a-z@\[\\\]^_])", key, re.ASCII)
        if control is not None:
            keys.append(ord(control[1].upper()) & 0x1F)
        elif len(key) == 1 and key.isascii() and key.isprintable():
            keys.append(ord(key))
        else:
            raise ValueError(f"keys joined by commas, such as {DEFAULT_DETACH_KEYS}")
    return tuple(keys)


def session(untrusted: str) -> str:
    """The id of a session, made up by a harness: opaque, printable, not long."""
    if len(untrusted) > 256:
        raise ValueError("at most 256 characters")
    return line(untrusted)
