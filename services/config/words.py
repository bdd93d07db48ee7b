"""The single values of the config file: each function reads one, strictly, or refuses it.

A refusal is a `ValueError` with the rule (to follow "must be"), or `values.Said` with a
sentence.
"""

from __future__ import annotations

import re
from typing import Any, Final

from agent_box.config import egress, values
from agent_box.config.addresses import parse_address
from agent_box.config.model import HARNESSES, Upstream


def line(untrusted: str) -> str:
    if not untrusted or not untrusted.isprintable():
        raise ValueError("one line of printable text")
    return untrusted


def harness(untrusted: Any) -> str | tuple[str, ...]:
    rule = f"one of {', '.join(HARNESSES)}, or an array with a command and its arguments"
    if isinstance(untrusted, str) and untrusted in HARNESSES:
        return untrusted
    if not isinstance(untrusted, list) or not untrusted:
        raise ValueError(rule)
    for word in untrusted:
        if not isinstance(word, str) or not word.isprintable():
            raise ValueError(rule)
    if not untrusted[0]:
        raise ValueError(rule)
    return tuple(untrusted)


def guest_path(untrusted: str) -> str:
    if not untrusted.isprintable() or not re.match(r"~?/.", untrusted) or len(untrusted) > 1024:
        raise ValueError("a path in the guest that begins with / or ~/")
    return untrusted


def ca_file(untrusted: str) -> str:
    parts = untrusted.split("/")
    if not untrusted.isprintable() or any(part in ("", ".", "..") for part in parts):
        raise ValueError("a file inside the config's directory, relative to it, without . or ..")
    return untrusted


_UPSTREAM: Final = re.compile(
    r"(https?)://(\[[0-9A-Fa-f:.]+\]|[^/?#@:\[\]\s]+)(?::([0-9]{1,5}))?/?", re.ASCII
)


def upstream(untrusted: str) -> Upstream:
    if "@" in untrusted:
        raise _blind("it holds an @: no key of this file takes a user or a password")
    found = _UPSTREAM.fullmatch(untrusted)
    rule = "like https://api.example.com or https://api.example.com:8443, without a path"
    if found is None:
        raise ValueError(rule)
    scheme, where = found[1], found[2]
    port = int(found[3]) if found[3] is not None else {"https": 443, "http": 80}[scheme]
    if not 1 <= port <= 65535:
        raise ValueError(rule)
    return Upstream(scheme=scheme, host=_upstream_host(where), port=port)


def _upstream_host(where: str) -> str:
    if where.startswith("["):
        try:
            return str(parse_address(where[1:-1]))
        except ValueError:
            raise _blind("the address in brackets is not an IPv6 address") from None
    try:
        return str(parse_address(where))
    except ValueError:
        pass  # then it is a name, or nothing
    try:
        host = egress.host(where)
    except ValueError as error:
        blind = "the host is neither a name nor a plain address"
        raise values.Said(str(error), blind=blind) from None
    if egress.in_broker_zone(host):
        raise _blind(f"names in {egress.BROKER_ZONE} are the broker's own")
    return host


def _blind(sentence: str) -> values.Said:
    """A sentence that shows nothing of the value."""
    return values.Said(sentence, blind=sentence)


def route_path(untrusted: str) -> str:
    rule = "a path that begins with /, of unreserved characters, without //, . or .. segments"
    if not re.fullmatch(r"(?:/[A-Za-z0-9._~!$&'()*+,=:@{}-]*)+", untrusted, re.ASCII):
        raise ValueError(rule)
    segments = untrusted.split("/")[1:]
    if len(untrusted) > 1024 or any(s in (".", "..") for s in segments) or "" in segments[:-1]:
        raise ValueError(rule)
    return untrusted


def method(untrusted: str) -> str:
    if not re.fullmatch(r"[A-Z]{1,20}", untrusted, re.ASCII) or untrusted in ("CONNECT", "TRACE"):
        raise ValueError("an HTTP method in capitals, not CONNECT or TRACE")
    return untrusted


# A header that the broker sets or that frames the message cannot carry a credential.
_NOT_A_CARRIER: Final = frozenset(
    (
        "connection",
        "content-length",
        "content-type",
        "expect",
        "host",
        "keep-alive",
        "proxy-connection",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    )
)


def header(untrusted: str) -> str:
    lower = untrusted.lower()
    if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,63}", lower, re.ASCII) or lower in _NOT_A_CARRIER:
        raise ValueError("the name of a header that may carry a credential, such as x-api-key")
    return lower


def query(untrusted: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._~-]{1,64}", untrusted, re.ASCII):
        raise ValueError("the name of a query parameter, such as key")
    return untrusted


def basic_user(untrusted: str) -> str:
    plain = untrusted.isascii() and untrusted.isprintable() and ":" not in untrusted
    if not plain or not 1 <= len(untrusted) <= 128:
        raise ValueError("1 to 128 printable ASCII characters without a colon")
    return untrusted


def repo(untrusted: str) -> str:
    segment = r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}"
    if not re.fullmatch(rf"{segment}(?:/{segment}){{1,9}}", untrusted, re.ASCII):
        raise ValueError("OWNER/NAME")
    if untrusted.endswith(".git"):
        raise ValueError("OWNER/NAME without .git")
    return untrusted


def cost(untrusted: Any) -> int:
    """Millionths of a currency. A budget is meant to be a round number, not a fine one."""
    rule = "a number above 0 with at most six decimals, such as 25 or 2.5"
    if isinstance(untrusted, bool) or not isinstance(untrusted, int | float):
        raise ValueError(rule)
    if not 0 < untrusted <= values.COUNT_MAX // 10**6:  # not a number, infinite: neither holds
        raise ValueError(rule)
    millionths = round(untrusted * 10**6)
    if abs(untrusted * 10**6 - millionths) > 1e-3 or millionths == 0:
        raise ValueError(rule)
    return millionths


def rule_host(untrusted: str) -> str:
    try:
        host = egress.host(untrusted, wildcard=True)
    except ValueError as error:
        raise values.Said(str(error)) from None
    if egress.in_broker_zone(host):
        raise values.Said(f"no policy speaks about {egress.BROKER_ZONE}: bindings do")
    return host


def said(read_value: Any) -> Any:
    def read_said(untrusted: Any) -> Any:
        try:
            return read_value(untrusted)
        except ValueError as error:
            raise values.Said(str(error)) from None

    return read_said
